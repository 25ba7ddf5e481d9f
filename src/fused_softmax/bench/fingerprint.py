"""A fingerprint of the kernels: a digest of the code that decides what a figure of this package is a figure of.

That is device code, the planner, and all that an eager call runs through up to its launch. Instruments do not count,
nor do `reference.py` and its like, which compute what the kernels leave to torch. Comments and docstrings do not count
either: they may say later what was measured.

Each operation has a fingerprint of its own too, of the part of that code that it imports: a change of the samplers
leaves the figures of softmax as they are. What only calls over the ranks of a group run through is no part of these,
for every figure of an operation by itself is of one GPU. It has one of its own.
"""

import ast
import hashlib
import io
import tokenize
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]
PARTS = (
    "kernels", "plan", "ops", "classic", "autocast.py", "calls.py", "described.py", "device.py", "distributed.py",
    "launch.py", "launcher.c", "layout.py", "lookup.c", "native.py", "options.py", "options_attention.py",
    "options_sampling.py", "peers.py", "route.py", "runner.py", "workspace.py",
)  # fmt: skip

OVER_RANKS = (
    "distributed.py", "peers.py", "ops/attention_on_shards.py", "ops/cross_entropy_sharded.py", "ops/gather_peers.py",
    "ops/linear_on_shards.py", "ops/linear_sharded.py", "ops/loss_on_shards.py", "ops/loss_peers.py",
    "ops/loss_sharded_calls.py", "ops/loss_sharded_steps.py", "ops/once.py", "ops/peer_launches.py",
    "ops/sample_sharded.py", "ops/sampling_on_shards.py", "ops/shard_memory.py", "ops/shards.py",
    "ops/softmax_gradient_sharded.py", "ops/softmax_peers.py", "ops/softmax_sharded.py",
)  # fmt: skip


@cache
def kernels() -> str:
    """The fingerprint of this source's kernels: 12 hexadecimal digits."""
    return _digest(files())


@cache
def of_operations() -> dict[str, str]:
    """That of each operation of the bench, by its name, and as "over ranks" that of calls over the ranks of a group."""
    return {name: _digest(path for path in files() if path in found) for name, found in _files_of_operations().items()}


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.relative_to(PACKAGE).as_posix()}\0{_code(path)}\0".encode())
    return digest.hexdigest()[:12]


@cache  # most files are of several operations
def _code(path: Path) -> str:
    text = path.read_text()
    return code_of(text) if path.suffix == ".py" else text


def _files_of_operations() -> dict[str, set[Path]]:
    """What an operation is made of: what its function imports, and all of the package that is no module of Python."""
    from fused_softmax.register.table import OPERATORS

    always = {path for path in files() if path.suffix != ".py" or "classic" in path.parts}
    found = {}
    for operator in OPERATORS:
        run = operator.public or operator.run
        module = getattr(run, "func", run).__globals__["__name__"]  # a public function's __module__ is the package
        for name in operator.bench:
            found[name] = always | _imported(_path_of(module), without=_over_ranks())
    found["over ranks"] = always.union(*map(_imported, _over_ranks()))
    return found


def _over_ranks() -> set[Path]:
    return {PACKAGE / path for path in OVER_RANKS}


def _imported(path: Path, without: Collection[Path] = ()) -> set[Path]:
    """A module's file, and those of this package that it imports, and so on; not `without`, nor what these import."""
    found, left = set(), [path]
    while left:
        path = left.pop()
        if path not in found and path not in without:
            found.add(path)
            left += _imports(path)
    return found


@cache
def _imports(path: Path) -> tuple[Path, ...]:
    """The files that a module takes names from; what a package's __init__ takes from a file is that file's."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE.name:
            for alias in node.names:
                found.append(_file_of(node.module or "", alias.name))
    return tuple(found)


def _file_of(module: str, name: str) -> Path:
    """Where a name of a module is defined, of a module that may be a package."""
    for there in (f"{module}.{name}", module):
        path = _path_of(there)
        if path.exists():
            break
    if path.name == "__init__.py":
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
                return _file_of(node.module or "", name)
    return path


def _path_of(module: str) -> Path:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


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


def difference(
    environment: Mapping[str, Any], present: Mapping[str, Any] | None = None, operations: Collection[str] = ()
) -> str:
    """How the kernels of a result differ from the present ones, in words, or "".

    environment: the result's. present: the present one, as `recorded` has it. operations: those that the result has.
    """
    then, present = environment.get("kernels"), present or recorded()
    if then is None:
        return "made before fingerprints"
    if then == present["kernels"]:
        return ""
    before, now = environment.get("kernels_of") or {}, present.get("kernels_of") or {}
    others = [name for name in operations if name not in before or before[name] != now.get(name)]
    if operations and not others:
        return ""
    of = f" of {', '.join(sorted(others))}" if others and before else ""
    return f"of other kernels{of} (fingerprint {then} against {present['kernels']})"


def recorded() -> dict[str, Any]:
    """What a result's environment says of kernels."""
    return {"kernels": kernels(), "kernels_of": of_operations()}
