"""Builds the folder that Hugging Face's `kernels` loads: `python hub/build.py OUT`.

OUT gets a card and build/torch-cuda, which has the parts of the package that compute, and layers.py. `kernels` loads
it under a name of its own, beside other versions and beside an installed package. So imports become relative, and
operators get a namespace of that name.
"""

import ast
import hashlib
import json
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
PACKAGE = HERE.parent / "src/fused_softmax"
PARTS = ("core", "ranks", "ops", "register", "__init__.py", "explanation.py", "nn.py", "without_triton.py")
VERSION = 1  # of the kernel's interface: the Hub's branch v1. A change that breaks callers takes the next number
IMPORT = re.compile(r"^( *)from fused_softmax([\w.]*) import ", re.M)
NAMESPACE = re.compile(r'(?<=torch\.ops\.)fused_softmax\b|(?<=Library\(")fused_softmax(?=")|(?<=")fused_softmax(?=::)')


def files():
    """What the kernel is made of, by path within it."""
    found = {"layers.py": HERE / "layers.py"}
    for part in PARTS:
        place = PACKAGE / part
        for path in [place] if place.is_file() else sorted(place.rglob("*.*")):
            if path.suffix in (".py", ".c"):
                found[path.relative_to(PACKAGE).as_posix()] = path
    return found


def without_warmup(text):
    """`warmup` starts processes that import the package by its name, which a kernel has not."""
    return re.sub(r"^.*\bwarmup\b.*\n", "", text, flags=re.M)


def relative(name, text, namespace):
    """A module's source, of which no part depends on the name of its package."""
    dots = "." * (1 + name.count("/"))
    text = IMPORT.sub(lambda found: f"{found[1]}from {dots}{found[2].lstrip('.')} import ", text)
    text = NAMESPACE.sub(namespace, text)
    for node in ast.walk(ast.parse(text)):
        named = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        named += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for each in named:
            if each.partition(".")[0] == PACKAGE.name:
                raise SystemExit(f"{name}:{node.lineno}: imports {each} in a way that build.py cannot make relative")
    return text


def build(out, repository="OWNER/fused-softmax"):
    """Write the kernel into the folder `out`, which must be new or empty. repository: the Hub's, for the card."""
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise SystemExit(f"{out} is not empty")
    sources = files()
    digest = hashlib.sha256()
    for name, path in sorted(sources.items()):
        digest.update(name.encode() + path.read_bytes())
    version = re.search(r'^__version__ = "(.*)"$', (PACKAGE / "__init__.py").read_text(), re.M)[1]
    identity = f"_fused_softmax_cuda_{digest.hexdigest()[:12]}"
    kernel = out / "build/torch-cuda"
    for name, path in sources.items():
        text = path.read_text()
        if path.suffix == ".py":
            if name == "__init__.py":
                text = without_warmup(text) + "\nfrom fused_softmax import layers  # noqa: E402  where kernels looks\n"
            text = relative(name, text, identity)
        (kernel / name).parent.mkdir(parents=True, exist_ok=True)
        (kernel / name).write_text(text)
    about = {
        "name": "fused-softmax", "id": identity, "version": VERSION, "license": "mit", "kernels-minver": "0.17.0",
        "python-depends": [], "backend": {"type": "cuda"},
    }  # fmt: skip
    (kernel / "metadata.json").write_text(json.dumps(about, indent=2) + "\n")
    card = (HERE / "CARD.md").read_text().replace("OWNER/fused-softmax", repository)
    (out / "README.md").write_text(card.replace("VERSION", version))
    (out / "LICENSE").write_text((HERE.parent / "LICENSE").read_text())
    return kernel


if __name__ == "__main__":
    print(build(Path(sys.argv[1]), *sys.argv[2:]))
