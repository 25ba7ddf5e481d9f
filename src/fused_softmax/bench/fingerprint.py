"""A fingerprint of the kernels: a digest of the code that decides what a figure of this package is a figure of.

That is device code, the planner, and all that an eager call runs through up to its launch. Instruments do not count,
nor do `reference.py` and its like, which compute what the kernels leave to torch. Comments and docstrings do not count
either: they may say later what was measured.
"""

import ast
import hashlib
import io
import tokenize
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]
PARTS = (
    "kernels", "plan", "ops", "classic", "calls.py", "device.py", "launch.py", "launcher.c", "layout.py", "lookup.c",
    "native.py", "options.py", "options_sampling.py", "route.py", "runner.py", "workspace.py",
)  # fmt: skip


@cache
def kernels() -> str:
    """The fingerprint of this source's kernels: 12 hexadecimal digits."""
    digest = hashlib.sha256()
    for path in files():
        text = path.read_text()
        code = code_of(text) if path.suffix == ".py" else text
        digest.update(f"{path.relative_to(PACKAGE).as_posix()}\0{code}\0".encode())
    return digest.hexdigest()[:12]


def files() -> Iterator[Path]:
    """The files that count."""
    for part in PARTS:
        path = PACKAGE / part
        yield from sorted(path.rglob("*.py")) if path.is_dir() else (path,)


def code_of(text: str) -> str:
    """Python source without its comments, docstrings and blank lines."""
    lines = text.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            first = node.body[0]
            lines[first.lineno - 1 : first.end_lineno] = [""] * ((first.end_lineno or 0) - first.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def difference(environment: Mapping[str, Any], present: str | None = None) -> str:
    """How the kernels of a result differ from the present ones, in words, or "". environment: the result's."""
    then, present = environment.get("kernels"), present or kernels()
    if then is None:
        return "made before fingerprints"
    return "" if then == present else f"of other kernels (fingerprint {then} against {present})"
