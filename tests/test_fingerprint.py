"""Which changes of the source leave results as they are, and which make them stale."""

import ast
import re
import shutil

import pytest

from fused_softmax.bench.results import fingerprint
from fused_softmax.bench.results.fingerprint import PACKAGE, Definition, Source

FUNCTIONS = {
    name: found for name, found in fingerprint.functions().items() if name in ("softmax", "sample", "attention")
}
EVERY = {*FUNCTIONS, "over ranks"}


@pytest.fixture(scope="module")
def present():
    return Source(PACKAGE, FUNCTIONS).of_operations


@pytest.fixture
def source(tmp_path):
    """A copy of the package, to be changed."""
    ignored = shutil.ignore_patterns("__pycache__", "*.json", "*.html", "bench", "trace", "profile")
    return shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=ignored)


def changed_by(source, present):
    """The operations whose fingerprints a changed copy has not."""
    now = Source(source, FUNCTIONS).of_operations
    return {name for name in now if now[name] != present[name]}


def file_of(source, text):
    (found,) = [path for path in source.rglob("*.py") if text in path.read_text()]
    return found


def replace(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def replace_everywhere(source, pattern, new):
    """By a regular expression, in every file of Python."""
    texts = {path: path.read_text() for path in source.rglob("*.py")}
    changed = {path: re.sub(pattern, new, text, flags=re.MULTILINE) for path, text in texts.items()}
    assert changed != texts
    for path, text in changed.items():
        path.write_text(text)


def test_an_operation_is_of_its_own_public_function():
    """An operator may name operations of several functions."""
    functions = fingerprint.functions()
    assert {name: functions[name].name for name in ("log_prob", "log_prob_gradient", "linear_log_prob")} == {
        "log_prob": "log_prob", "log_prob_gradient": "log_prob", "linear_log_prob": "linear_log_prob"
    }  # fmt: skip


def test_a_file_may_have_another_name(source, present):
    old = file_of(source, "\nclass RowPlan")
    old.rename(old.with_name("other_name.py"))
    replace_everywhere(source, rf"\bplan\.{old.stem} import", "plan.other_name import")
    assert changed_by(source, present) == set()


def test_a_definition_may_stand_in_another_file(source, present):
    text = (old := file_of(source, "\ndef is_rows(")).read_text()
    definition = next(node for node in ast.parse(text).body if getattr(node, "name", "") == "is_rows")
    code = ast.get_source_segment(text, definition)
    module = ".".join((PACKAGE.name, *old.relative_to(source).with_suffix("").parts))
    (source / "elsewhere.py").write_text(f"from torch import Tensor\n\nfrom {module} import flatten\n\n\n{code}\n")
    replace(old, code, "")
    for path in source.rglob("*.py"):
        text = path.read_text()
        if re.search(r"\bis_rows,", text):
            path.write_text(re.sub(r"\bis_rows,", "", text) + "\nfrom fused_softmax.elsewhere import is_rows\n")
    assert changed_by(source, present) == set()


def test_a_definition_and_a_module_may_be_called_otherwise(source, present):
    replace_everywhere(source, r"\bis_rows\b", "lies_in_rows")
    using = file_of(source, "\ndef _softmax(name")
    text = re.sub(r"(?<![\w.])autocast\.", "known_by.", using.read_text())
    assert "known_by.result_dtype(" in text
    using.write_text(f"{text}\nfrom fused_softmax.ops import autocast as known_by\n")
    assert changed_by(source, present) == set()


def test_imports_comments_and_docstrings_do_not_count(source, present):
    replace_everywhere(source, r"^from (\S+) import (\w+)$", r"from \1 import \2 as \2  # why")
    replace_everywhere(source, r'^( *)"""(?=\w)', r'\1"""Says. ')
    for path in source.rglob("*.c"):
        path.write_text(f"// why\n{path.read_text()}/* that is\n all */")
    assert changed_by(source, present) == set()


@pytest.mark.parametrize(
    ("text", "old", "new", "changed"),
    [
        ("\ndef _tile_forward(", "tl.program_id(0)", "tl.program_id(1)", {"softmax", "over ranks"}),  # in a kernel
        ("\n_KEPT_BYTES = ", "_KEPT_BYTES = 16", "_KEPT_BYTES = 17", {"softmax", "over ranks"}),  # a constant
        ("\nclass DrawPlan", "frozen=True", "frozen=False", {"sample", "over ranks"}),  # a decorator
        ("\ndef seed_of(", "2**63 - 1", "2**62 - 1", {"sample", "over ranks"}),  # a number within a function
        ("\ndef supplied(", "sink=None", "sink=0", {"softmax", "over ranks"}),  # a default
        ("\ndef _queries_gradient_hopper(", "\n@jit\n", "\n@jit(noinline=True)\n", {"attention", "over ranks"}),
        ("\ndef softmax_by_peers(", "peers: Peers,", "peers: Peers | None,", {"over ranks"}),
        ("\ndef told_by(", "def told_by(", "@cache\ndef told_by(", {"over ranks"}),
        ("\ndef naive_softmax(", "torch.exp(", "torch.exp2(", EVERY),  # what results are compared with
        ("\ndef running_sum(", "def running_sum(", "@cache\ndef running_sum(", set()),  # a formula
    ],
)
def test_a_definition_counts_where_calls_run_through_it(source, present, text, old, new, changed):
    replace(file_of(source, text), old, new)
    assert changed_by(source, present) == changed


@pytest.mark.parametrize("name", ["launcher.c", "lookup.c"])
def test_all_of_c_counts_always(source, present, name):
    (path,) = source.rglob(name)
    replace(path, "return NULL;", "return 0;")
    assert changed_by(source, present) == EVERY


def test_kernels_count_and_instruments_do_not():
    source = Source(PACKAGE, fingerprint.functions())
    functions = fingerprint.functions().values()
    found = {*source.reached(functions), *source.reached(source.entries_over_ranks(functions), over_ranks=True)}
    kernels = {
        (path.stem, node.name)
        for path in PACKAGE.rglob("kernels/**/*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.decorator_list
    }
    assert len(kernels) > 200
    assert kernels <= {(each.module.split(".")[-1], each.name) for each in found}
    others = {"bench", "trace", "profile", "explanation", "hf", "interrupt", "without_triton"}
    assert not [each for each in found if each.module.split(".")[1] in others]


def test_a_figure_of_one_gpu_is_not_of_what_only_ranks_run_through():
    source = Source(PACKAGE, FUNCTIONS)
    of_ranks = source.reached(source.entries_over_ranks(FUNCTIONS.values()), over_ranks=True)
    (kernel,) = [each for each in of_ranks if each.name == "_peer_forward"]
    assert kernel not in source.reached(FUNCTIONS.values())


def test_every_pattern_of_files_finds_some():
    for pattern in (*fingerprint.OVER_RANKS, *fingerprint.ALWAYS, *fingerprint.NEVER):
        assert any(path.match(pattern) for path in PACKAGE.rglob("*.py")), pattern


def of(folder, main, **others):
    """The fingerprint of `f` of a small package, whose files have these texts."""
    package = folder / "small"
    package.mkdir(exist_ok=True)
    for name, text in {"main": main, **others}.items():
        (package / f"{name}.py").write_text(text)
    return Source(package, {"f": Definition("small.main", "f")}).of_operations["f"]


RAISES = """
def f(x):
    if x:
        y = {}
        raise ValueError(f"y is {{y}}, and not {}")
    return {}
"""
ONE_TWO = {"one": "def g():\n    return 1\n", "two": "def g():\n    return 2\n"}
BRANCHES = """
def f(x):
    if x:
        from small.{} import g
    else:
        from small.{} import g
    return g()
"""
TRIED = """
try:
    from triton import {} as g
except ImportError:
    g = None

def f():
    return g
"""


@pytest.mark.parametrize(
    "user",
    [
        "from small.one import g\n\ndef f():\n    return g()\n",
        "from small import one as g\n\ndef f():\n    return g.g()\n",
        "import small.one as g\n\ndef f(x):\n    return getattr(g, x)\n",  # any of a module
        "from small.one import g\n\n@g\nclass f:\n    def g(self):\n        return 1\n",
        "from small.one import g\n\nclass f:\n    def a(self, g):\n        g()\n    def b(self):\n        g()\n",
        "from small.one import g\n\nclass f:\n    g = 1\n    def b(self):\n        g()\n",
        "from small.one import g\n\ndef f(g=g):\n    return g\n",
        "from small.one import g\n\ndef f():\n    return [g for g in g()]\n",
        "from small.one import g\n\ndef f():\n    return h()\n\ndef h():\n    return i() or f()\n\ni = g\n",
    ],
)
def test_definitions_of_one_name_are_not_confused(tmp_path, user):
    """Whatever else has that name."""
    other = user.replace("small.one", "small.two").replace("import one", "import two")
    assert of(tmp_path, user, **ONE_TWO) != of(tmp_path, other, **ONE_TWO)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (BRANCHES.format("one", "two"), BRANCHES.format("two", "one")),
        (TRIED.format("jit"), TRIED.format("autotune")),
        ("from math import log\n\ndef f():\n    log(2)\n", "from cmath import log\n\ndef f():\n    log(2)\n"),
        ("def f():\n    return 1\n", "def f():\n    return 1\n\nf.attribute = 1\n"),
        ("T = []\n\ndef f():\n    return T\n", "T = []\n\ndef f():\n    return T\n\nT.append(f)\n"),
        ("def f():\n    return 1\n", "import torch\n\ndef f():\n    return 1\n\ntorch.manual_seed(1)\n"),
        ("A, B = 1, 2\n\ndef f():\n    return A\n", "A, B = 1, 2\n\ndef f():\n    return B\n"),
        ("A = []\nB = []\n\ndef f():\n    return A, B\n", "A = []\nB = []\n\ndef f():\n    return A, A\n"),
        ("def f(x: int):\n    return x\n", "def f(x: float):\n    return x\n"),
        ("def f():\n    return 'a'\n", "def f():\n    return 'b'\n"),
        ("def f():\n    return f'{1}a'\n", "def f():\n    return f'{1}b'\n"),
        (RAISES.format(1, 1, 1), RAISES.format(1, 1, 2)),
        ("def f(x):\n    if x > 1:\n        raise\n", "def f(x):\n    if x > 2:\n        raise\n"),
        ("def f(x):\n    if x:\n        return 1\n    raise\n", "def f(x):\n    if x:\n        return 2\n    raise\n"),
    ],
)
def test_what_counts(tmp_path, before, after):
    assert of(tmp_path, before, **ONE_TWO) != of(tmp_path, after, **ONE_TWO)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from math import log\n\ndef f():\n    log(2)\n", "def f():\n    import math as m\n    m.log(2)\n"),
        ("from small.one import g\n\ndef f():\n    g()\n", "import small.one\n\ndef f():\n    small.one.g()\n"),
        ("from small.one import g\n\ndef f():\n    g()\n", "from small.three import h\n\ndef f():\n    h()\n"),
        ("def f(one):\n    return one.g()\n", "from small import one\n\ndef f(one):\n    return one.g()\n"),
        ("def f():\n    return 1\n", "def h():\n    return 2\n\ndef f():\n    'Says.'\n    return 1  # so\n"),
        (RAISES.format(1, 1, 1), RAISES.format(2, 3, 1)),
        ("def f():\n    raise Error(g())\n\ndef g():\n    return 1\n", "def f():\n    raise\n"),
        ("def f():\n    h()\n\ndef h():\n    f()\n", "def other():\n    f()\n\ndef f():\n    other()\n"),
    ],
)
def test_what_does_not_count(tmp_path, before, after):
    others = ONE_TWO | {"three": "from small.one import g as h\n"}
    assert of(tmp_path, before, **others) == of(tmp_path, after, **others)


def test_comments_in_c_do_not_count_and_strings_do(tmp_path):
    (tmp_path / "small").mkdir()
    found = {}
    for text in ('f("//a", \'"\'); // b', 'f("//a", \'"\'); /* c\n */', '  f("//a", \'"\');', 'f("//b", \'"\'); // b'):
        (tmp_path / "small" / "a.c").write_text(text)
        found[text] = of(tmp_path, "def f():\n    return 1\n")
    first, second, third, other = found.values()
    assert first == second == third != other


def test_every_version_of_python_finds_the_same(tmp_path):
    text = '''
import math
from dataclasses import dataclass

@dataclass(frozen=True)
class Shape:
    rows: int
    names: "tuple[str, ...]" = ()

    def f(self, /, *xs, y=1.5, **more) -> str:
        """Says."""
        match xs:
            case [Shape(rows=1), *rest] | [*rest]:
                y += len(rest)
        try:
            return f"{y!r:>{self.rows}}" "é" f"{math.pi=:.2f}{{}}" + str([x async for x in more if (z := x)])
        except (ValueError, KeyError) as error:
            raise error from None

async def f(a: Shape | None = None, b=lambda x: {**x, 1: ..., "b": b"c", 2j: -1e300}):
    with a as c, b:
        return await a.f(*c, **b)[1:2, ::3] if a else not b
'''
    assert of(tmp_path, text) == "b3fb152e15bb"


def test_a_result_is_current_while_its_operations_are():
    then = {"kernels": "a", "kernels_of": {"softmax": "1", "sample": "2"}}
    now = {"kernels": "b", "kernels_of": {"softmax": "1", "sample": "3"}}
    assert not fingerprint.difference(then, now, ["softmax"])
    assert (
        fingerprint.difference(then, now, ["softmax", "sample"])
        == "of other kernels of sample (fingerprint a against b)"
    )
    assert (
        fingerprint.difference(then, now, ["sample", "a", "b", "c"])
        == "of other kernels of all 4 operations (fingerprint a against b)"
    )
    assert fingerprint.difference(then, now, ["logsumexp"])
    assert fingerprint.difference(then, now)
    assert not fingerprint.difference(then, then)


def test_results_made_before_operations_had_fingerprints_go_by_that_of_all_kernels():
    now = {"kernels": "b", "kernels_of": {"softmax": "1"}}
    assert fingerprint.difference({"kernels": "a"}, now, ["softmax"]) == "of other kernels (fingerprint a against b)"
    assert not fingerprint.difference({"kernels": "b"}, now, ["softmax"])
    assert fingerprint.difference({}, now, ["softmax"]) == "made before fingerprints"
