"""Which results a change of the source leaves as they are."""

import ast
import re
import shutil

import pytest

from fused_softmax.bench.results import fingerprint
from fused_softmax.bench.results.fingerprint import Definition, Source

ALL = fingerprint.of_source()
OPERATIONS = {name: ALL.operations[name] for name in ("softmax", "sample", "attention")}


@pytest.fixture(scope="module")
def present():
    return Source(fingerprint.PACKAGE, OPERATIONS).of_operations


@pytest.fixture
def source(tmp_path):
    """A copy of the package, to be changed."""
    copied = tmp_path / fingerprint.NAME
    shutil.copytree(fingerprint.PACKAGE, copied, ignore=shutil.ignore_patterns("__pycache__", "*.json", "*.html"))
    return copied


def changed_by(source, present):
    """The operations whose digests a changed copy has not."""
    now = Source(source, OPERATIONS).of_operations
    return {name for name in now if now[name] != present[name]}


def file_of(source, text):
    """The file of the package that has a text; there is one."""
    (found,) = [path for path in source.rglob("*.py") if text in path.read_text()]
    return found


def replace(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_a_copy_is_the_source(source, present):
    assert changed_by(source, present) == set()


def test_files_and_modules_may_have_other_names(source, present):
    """A file that moves, whose importers follow."""
    old = file_of(source, "\nclass RowPlan")
    moved = old.with_name("other_name.py")
    old.rename(moved)
    for path in source.rglob("*.py"):
        text = path.read_text()
        path.write_text(re.sub(rf"\b(plan)\.{old.stem} import", r"\1.other_name import", text))
    assert f"{old.stem} import RowPlan" not in "".join(path.read_text() for path in source.rglob("*.py"))
    assert changed_by(source, present) == set()


def test_a_definition_may_stand_in_another_file(source, present):
    text = (old := file_of(source, "\ndef is_rows(")).read_text()
    definition = next(node for node in ast.parse(text).body if getattr(node, "name", "") == "is_rows")
    code = ast.get_source_segment(text, definition)
    module = ".".join((fingerprint.NAME, *old.relative_to(source).with_suffix("").parts))
    (source / "elsewhere.py").write_text(f"from torch import Tensor\n\nfrom {module} import flatten\n\n\n{code}\n")
    for path in source.rglob("*.py"):
        text = path.read_text()
        if path != old and re.search(r"\bis_rows,", text):
            path.write_text(re.sub(r"\bis_rows,", "", text) + "\nfrom fused_softmax.elsewhere import is_rows\n")
    replace(old, code, "")
    assert changed_by(source, present) == set()


def test_imports_comments_and_docstrings_do_not_count(source, present):
    for path in source.rglob("*.py"):
        text = path.read_text()
        text = re.sub(r"^from (\S+) import (\w+)$", r"from \1 import \2 as \2  # why", text, flags=re.MULTILINE)
        path.write_text(re.sub(r'^"""', '"""Says. ', text))
    for path in source.rglob("*.c"):
        path.write_text(f"// why\n{path.read_text()}")
    assert changed_by(source, present) == set()


def test_a_module_may_be_imported_by_another_name(source, present):
    found = file_of(source, "\ndef _softmax(name")
    text = found.read_text()
    assert "autocast.result_dtype(" in text
    text = re.sub(r"(?<![\w.])autocast\.", "known_by.", text)
    package = fingerprint.NAME if (source / "autocast.py").exists() else f"{fingerprint.NAME}.core"
    found.write_text(f"{text}\nfrom {package} import autocast as known_by\n")
    assert changed_by(source, present) == set()


@pytest.mark.parametrize(
    ("text", "old", "new", "changed"),
    [
        ("\ndef _tile_forward(", "tl.program_id(0)", "tl.program_id(1)", {"softmax", "over ranks"}),  # of a kernel
        ("\n_KEPT_BYTES = ", "_KEPT_BYTES = 16", "_KEPT_BYTES = 17", {"softmax", "over ranks"}),  # a constant
        ("\nclass DrawPlan", "frozen=True", "frozen=False", {"sample", "over ranks"}),  # a decorator
        ("\ndef seed_of(", "2**63 - 1", "2**62 - 1", {"sample", "over ranks"}),  # a number within a function
        ("\ndef softmax_by_peers(", "peers: Peers,", "peers: Peers | None,", {"over ranks"}),  # an annotation
        ("\ndef supplied(", "sink=None", "sink=0", {"softmax", "over ranks"}),  # a default
    ],
)
def test_what_a_definition_says_counts_where_a_call_runs_through_it(source, present, text, old, new, changed):
    replace(file_of(source, text), old, new)
    assert changed_by(source, present) == changed


def test_code_in_c_and_what_figures_are_compared_with_are_of_all_operations(source, present):
    for path, old, new in (
        (source / "classic" / "naive.py", "torch.exp(", "torch.exp2("),
        (next(source.rglob("*.c")), "return", "return +"),
    ):
        text = path.read_text()
        replace(path, old, new)
        assert changed_by(source, present) == {*OPERATIONS, "over ranks"}
        path.write_text(text)


def test_definitions_of_one_name_are_not_confused(source, present):
    """One that counts already in the place of another."""
    (source / "one.py").write_text("def f():\n    return 1\n")
    (source / "two.py").write_text("def f():\n    return 2\n")
    imports = "from fused_softmax.{} import f\nfrom fused_softmax import one, two\n"
    found = set()
    for name in ("one", "two"):
        (source / "user.py").write_text(f"{imports.format(name)}\n\ndef g():\n    return f(), one.f, two.f\n")
        found.add(Source(source, {"g": Definition("fused_softmax.user", "g")}).of_operations["g"])
    assert len(found) == 2


def test_functions_that_import_one_name_from_several_files_refer_to_all(source):
    (source / "one.py").write_text("def f():\n    return 1\n")
    (source / "two.py").write_text("def h():\n    return 2\n")
    (source / "user.py").write_text(
        "def g(x):\n    if x:\n        from fused_softmax.one import f as kernel\n    else:\n"
        "        from fused_softmax.two import h as kernel\n    return kernel()\n"
    )
    found = Source(source, {"g": Definition("fused_softmax.user", "g")}).definitions_of_operations["g"]
    assert {Definition("fused_softmax.one", "f"), Definition("fused_softmax.two", "h")} <= found


def test_a_statement_that_does_something_with_a_definition_counts_with_it(source):
    (source / "user.py").write_text("TABLE = []\n\n\ndef g():\n    return 1\n\n\nTABLE.append(g)\n")
    found = Source(source, {"g": Definition("fused_softmax.user", "g")}).definitions_of_operations["g"]
    assert Definition("fused_softmax.user", "TABLE") in found


def test_what_a_call_runs_through_counts():
    """Every kernel of the package, the planner, the launch, and nothing of the instruments."""
    found = set().union(*ALL.definitions_of_operations.values())
    kernels = {
        (path.stem, node.name)
        for path in fingerprint.PACKAGE.rglob("kernels/**/*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.decorator_list
    }  # fmt: skip
    assert len(kernels) > 200
    assert kernels <= {(each.module.split(".")[-1], each.name) for each in found}
    assert not {
        each for each in found if each.module.split(".")[1] in ("bench", "trace", "profile", "explanation", "hf")
    }


def test_a_figure_of_one_gpu_is_not_of_what_only_ranks_run_through():
    found = dict(ALL.definitions_of_operations)
    of_ranks = found.pop("over ranks")
    kernel = {each for each in of_ranks if each.name == "_peer_forward"}
    assert kernel
    for operation in found:
        assert not found[operation] & kernel, operation
        assert not {each for each in found[operation] if each.name in ("Shards", "told_by", "gather")}


def test_every_pattern_of_files_finds_some():
    for pattern in (*fingerprint.OVER_RANKS, *fingerprint.ALWAYS):
        assert [*fingerprint.PACKAGE.glob(pattern)], pattern


def test_a_result_is_current_while_its_operations_are():
    then = {"kernels": "a", "kernels_of": {"softmax": "1", "sample": "2"}}
    now = {"kernels": "b", "kernels_of": {"softmax": "1", "sample": "3"}}
    assert not fingerprint.difference(then, now, ["softmax"])
    assert (
        fingerprint.difference(then, now, ["softmax", "sample"])
        == "of other kernels of sample (fingerprint a against b)"
    )
    assert fingerprint.difference(then, now, ["logsumexp"])
    assert fingerprint.difference(then, now)
    assert not fingerprint.difference(then, then)


def test_results_made_before_operations_had_fingerprints_go_by_that_of_all_kernels():
    now = {"kernels": "b", "kernels_of": {"softmax": "1"}}
    assert fingerprint.difference({"kernels": "a"}, now, ["softmax"]) == "of other kernels (fingerprint a against b)"
    assert not fingerprint.difference({"kernels": "b"}, now, ["softmax"])
    assert fingerprint.difference({}, now, ["softmax"]) == "made before fingerprints"
