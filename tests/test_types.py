"""What a type checker sees: a result's type follows from a call's flags, and README, docs and examples have no error.

`src/fused_softmax/__init__.pyi` is made of the functions' signatures: `python tests/test_types.py` writes it.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import products
import pytest
from test_docs import PAGES, blocks

import fused_softmax

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src/fused_softmax"
STUB = PACKAGE / "__init__.pyi"
# Pyright takes no model of transformers for one that generates.
GENERATES = 'Cannot access attribute "generate" for class "_BaseModelWithGenerate"'
PYRIGHT = ROOT / "viz/node_modules/.bin/pyright"
ENVIRONMENT = os.environ | {"MYPYPATH": str(PACKAGE.parent), "MYPY_CACHE_DIR": str(ROOT / ".mypy_cache")}
GLUE = "\0"  # a space at which no line ends
# Of a flag that says what a call returns, by its annotation: the types of values that leave the result a tensor, and
# of those that do not. Whatever else it may be, the result may be either.
FLAGS = {
    "bool": ("Literal[False]", "Literal[True]"),
    "Sequence[str]": ("tuple[()]", "tuple[str, *tuple[str, ...]]"),
    "str | tuple[str, ...]": ("tuple[()]", "str | tuple[str, *tuple[str, ...]]"),
}


def overloads(function):
    """Of a function that returns `Tensor | Output`: a tensor without flags, an Output by any of them, else either."""
    tensor, output = function.returns.left, function.returns.right
    flags = [each for each in function.args.kwonlyargs if each.arg.startswith("return_")]
    off, on = ({each: FLAGS[ast.unparse(each.annotation)][i] for each in flags} for i in (0, 1))
    cases = [(off, tensor), *(({each: on[each]}, output) for each in flags), ({}, function.returns)]
    for types, returned in cases:
        copy = ast.parse(ast.unparse(function)).body[0]
        copy.body, copy.returns = [ast.Expr(ast.Constant(...))], returned
        for i, (argument, said) in enumerate(zip(copy.args.kwonlyargs, function.args.kwonlyargs, strict=True)):
            if said in types:
                argument.annotation = ast.parse(types[said]).body[0].value
                if types[said] == on[said]:
                    copy.args.kw_defaults[i] = None
            elif isinstance(argument.annotation, ast.Constant):  # a stub needs no quotes
                argument.annotation = ast.parse(argument.annotation.value).body[0].value
        signature = re.sub("(?<!,) ", GLUE, ast.unparse(copy).replace(":\n    ...", ": ..."))
        lines = textwrap.wrap(signature, 120, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        yield "\n".join(["@overload", *lines]).replace(GLUE, " ")


def imported(tree):
    """How a module imports each name that it imports from another."""
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {alias.name: f"from {node.module} import {alias.name}" for node in froms for alias in node.names}


def stub():
    """The public names as `__init__.py` imports them for type checkers; those that return either type overloaded."""
    found = imported(ast.parse((PACKAGE / "__init__.py").read_text()))
    public = {name: found[name] for name in fused_softmax.__all__}
    lines, functions = {"import torch", "from typing import Literal, overload"}, []
    for name, line in public.items():
        path = PACKAGE.parent / (line.split()[1].replace(".", "/") + ".py")
        tree = ast.parse(path.read_text() if path.is_file() else "")
        function = next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name), None)
        if function is None or " | " not in ast.unparse(function.returns):
            lines.add(f"{line} as {name}")
            continue
        functions.append("\n".join(overloads(function)))
        words = set(re.findall(r"\w+", functions[-1])) - public.keys()
        lines |= {line for each, line in imported(tree).items() if each in words}
    return (
        "# `python tests/test_types.py` makes this file.\n# fmt: off\n# ruff: noqa: E501, I001\n" +
        "\n".join(sorted(lines)) +
        f"\n\n__all__ = {fused_softmax.__all__}\n__version__: str\n\n" + "\n\n".join(functions) + "\n"
    )  # fmt: skip


def test_the_stub_is_made_of_the_functions_signatures():
    assert STUB.read_text() == stub(), "run `python tests/test_types.py`"


REFUSED = """
from typing import assert_type

import torch

import fused_softmax as fs

x, t, w = torch.randn(4, 8), torch.zeros(4, dtype=torch.int64), torch.randn(8, 8)
flag = len(x) > 3
assert_type(fs.cross_entropy(x, t), torch.Tensor)
assert_type(fs.cross_entropy(x, t, None, -100, "sum", return_lse=False), torch.Tensor)
assert_type(fs.cross_entropy(x, t, return_z_loss=True), fs.CrossEntropyOutput)
assert_type(fs.cross_entropy(x, t, return_lse=flag), torch.Tensor | fs.CrossEntropyOutput)
assert_type(fs.linear_log_prob(x, w, t, return_stats=("is_top1",)), fs.LogProbOutput)
fs.cross_entropy(x, t).lse
fs.cross_entropy(x, t, return_lse=True).backward()
fs.cross_entropy(x, t, smothing=0.1)
fs.cross_entropy(x, t, return_lse=True, smothing=0.1)
fs.cross_entropy(x, t, return_token_stats=True).token_stats.entropi
fs.linear_cross_entropy(x, w, t).loss
fs.log_prob(x, t).entropy
fs.log_prob(x, t, return_stats=("mean_logits",)).sum()
fs.linear_log_prob(x, w, t, return_entropy=True).sum()
fs.attention(x, x, x).output
fs.attention(x, x, x, return_stats="entropy").sum()
fs.attention(x, x, x, return_lse=True).lse.shap
fs.sample(x, order="sequental")
fs.cross_entropie
"""
LINES_REFUSED = set(range(REFUSED[: REFUSED.index("\nfs.") + 1].count("\n") + 1, REFUSED.count("\n") + 1))


def by_mypy(folder):
    """Its errors, (file, line, text) each."""
    command = (sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", "--output", "json", ".")
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr + done.stdout
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return [(each["file"], each["line"], each["message"]) for each in found if each["severity"] == "error"]


def by_pyright(folder):
    if not PYRIGHT.exists():
        pytest.skip("needs node and `make page`")
    # What other packages meant to export, and how they name the arguments of their methods, is theirs.
    off = ("reportPrivateImportUsage", "reportIncompatibleMethodOverride", "reportMissingImports")
    asked = {"include": ["*.py"], "extraPaths": [str(PACKAGE.parent)], **dict.fromkeys(off, False)}
    if products.QUICK:  # the types of transformers take it longer than all else
        (folder / "typings").mkdir()
        (folder / "typings/transformers.pyi").write_text("def __getattr__(name): ...\n")
    (folder / "pyrightconfig.json").write_text(json.dumps(asked))
    command = (PYRIGHT, "--pythonpath", sys.executable, "--outputjson")
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr + done.stdout
    found = [each for each in json.loads(done.stdout)["generalDiagnostics"] if each["severity"] == "error"]
    found = [(Path(each["file"]).name, each["range"]["start"]["line"] + 1, each["message"]) for each in found]
    return [each for each in found if not each[2].startswith(GENERATES)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """README and docs as modules whose lines are the pages' own, the examples, and lines that are wrong."""
    made = tmp_path_factory.mktemp("types")
    for page in (ROOT / "README.md", *PAGES):
        text = ""
        for line, code in blocks(page, every=True):
            text += "\n" * (line - text.count("\n")) + code
        (made / f"page_{page.stem.replace('-', '_')}.py").write_text(text)  # or one is taken for a package
    for example in (ROOT / "examples").glob("*.py"):
        shutil.copy(example, made)
    (made / "refused.py").write_text(REFUSED)
    return made


@pytest.mark.guard
@pytest.mark.parametrize("check", [by_mypy, by_pyright])
def test_a_checker_takes_all_that_is_shown_and_refuses_what_is_wrong(folder, check):
    found = check(folder)
    assert {line for file, line, _ in found if file == "refused.py"} == LINES_REFUSED
    shown = [f"{file}:{line}: {text}" for file, line, text in found if file != "refused.py"]
    assert not shown, "\n".join(shown)


if __name__ == "__main__":
    STUB.write_text(stub())
