"""What an import sets off, which part imports which, and what no file of the project names."""

import ast
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from products import one_in

import fused_softmax

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src/fused_softmax"
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
)
PARTS = {path.stem for path in PACKAGE.iterdir()}
PUBLIC = "fused_softmax"  # the package's own names, which its __init__ takes from ops, nn and register
ROOMS = {f"ops/{path.name}" for path in (PACKAGE / "ops").iterdir() if path.is_dir() and path.name != "__pycache__"}

# Each part, and the parts of ours that it may import. What is not here yet gets a line: dependencies point one way.
MAY_IMPORT = {
    PUBLIC: {*ROOMS, "nn", "register", "explanation", "ahead", "without_triton"},
    "without_triton": set(),
    "core": set(),
    "ranks": {"core"},
    "ops": set(),
    **{room: {"core", "ranks", "ops"} for room in ROOMS},
    "ops/losses": {"core", "ranks", "ops", "ops/softmax"},
    "ops/softmax": {"core", "ranks", "ops", "ops/segments"},
    "register": {*ROOMS, "core"},
    "nn": {*ROOMS, "core", "register"},
    "hf": {*ROOMS, "core", "register"},
    "pyg": {*ROOMS, "register"},
    "trl": {"register"},
    "explanation": {*ROOMS, "core", "register"},
    "classic": set(),
    "bench": {*ROOMS, PUBLIC, "core", "classic", "register", "hf", "trl", "ahead", "interrupt"},
    "profile": {*ROOMS, "core", "bench"},
    "trace": {*ROOMS, PUBLIC, "core", "classic"},
    "ahead": {"core"},
    "warm": {*ROOMS, "core", "profile"},
    "cli": {*ROOMS, PUBLIC, "core", "bench", "profile", "trace", "ahead", "warm", "interrupt"},
    "interrupt": set(),
    "__main__": {"interrupt", "cli"},
}


def python(script):
    """Run a script outside the interpreter, which this process may have asked for."""
    environment = {k: v for k, v in os.environ.items() if k not in ("FUSED_SOFTMAX_INTERPRET", "TRITON_INTERPRET")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_kernels_are_read_with_the_first_launch_of_one():
    """To read the source of all takes longer than the rest of the import."""
    python("""
import sys, fused_softmax, fused_softmax.nn, fused_softmax.hf
fused_softmax.softmax, fused_softmax.enable
from triton.runtime.jit import JITFunction
modules = [module for name, module in sys.modules.items() if name.startswith("fused_softmax")]
read = {each for module in modules for each in vars(module).values() if isinstance(each, JITFunction)}
assert not read, read
""")


def test_recordings_name_the_extra_that_they_need():
    python("""
import sys
sys.modules["numpy"] = None
try:
    from fused_softmax import trace
except ImportError as error:
    assert str(error) == "fused_softmax.trace needs NumPy, which is not installed: pip install 'fused-softmax[viz]'"
else:
    raise AssertionError("it was imported")
""")


def test_importing_asks_no_device_anything():
    python(f"""
import importlib, inspect, sys
import torch, triton
is_initialized = torch.cuda.is_initialized

def refuse(*arguments, **keywords):
    raise AssertionError("a device was asked")

def no_driver(event, arguments):
    if event == "ctypes.dlopen" and any(name in str(arguments[0]) for name in ("libcuda", "libcudart", "libnvidia")):
        raise AssertionError("a driver was loaded")

for name, value in vars(torch.cuda).copy().items():
    if inspect.isfunction(value):
        setattr(torch.cuda, name, refuse)
for name in vars(torch._C).copy():
    if name.startswith("_cuda_get"):
        setattr(torch._C, name, refuse)
type(triton.runtime.driver).active = property(refuse)
sys.addaudithook(no_driver)
for name in {MODULES}:
    importlib.import_module(name)
assert not is_initialized()
""")


def test_what_serves_other_packages_needs_none_of_them():
    python("""
import sys
for name in ("transformers", "peft", "accelerate"):
    sys.modules[name] = None
import fused_softmax.hf
assert fused_softmax.hf.__all__ == sorted(fused_softmax.hf.__all__)
""")


def test_the_package_is_light_until_a_public_name_is_used():
    python("""
import sys
import fused_softmax
assert not {"torch", "triton"} & set(sys.modules)
assert dir(fused_softmax) == sorted(fused_softmax.__all__)
assert fused_softmax.__version__
try:
    fused_softmax.sotfmax
except AttributeError as error:
    assert str(error) == "module 'fused_softmax' has no attribute 'sotfmax'"
else:
    raise AssertionError("it has any name")
assert "torch" not in sys.modules
import torch
assert not hasattr(torch.ops.fused_softmax, "softmax")
from fused_softmax import logsumexp
assert torch.ops.fused_softmax.softmax.default
assert fused_softmax.__all__ == sorted(name for name in vars(fused_softmax) if name in fused_softmax.__all__)
assert dir(fused_softmax) == fused_softmax.__all__
""")


@pytest.mark.parametrize(
    "use",
    one_in(3, [
        "import fused_softmax.nn",
        "from fused_softmax import nn",
        "from fused_softmax import *; softmax",
        "import pickle; pickle.loads(FUNCTION)",
        "import pickle; pickle.loads(MODULE)",
        "import fused_softmax; torch.compile(lambda x: fused_softmax.softmax(x, 0), backend='eager')(torch.ones(2))",
    ]),
)  # fmt: skip
def test_what_leads_to_a_public_function_registers_the_operators(use):
    function, module = pickle.dumps(fused_softmax.softmax), pickle.dumps(fused_softmax.nn.Softmax(-1))
    python(f"""
import torch
FUNCTION, MODULE = {function!r}, {module!r}
{use}
assert torch.ops.fused_softmax.softmax.default
""")


def test_public_names_are_imported_for_type_checkers_too():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (seen,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    assert sorted(alias.name for each in seen.body for alias in each.names) == fused_softmax.__all__


@pytest.mark.parametrize(
    "module",
    [
        "core.plan",
        "core.plan.tuned",
        "bench.cases",
        "bench.catalog",
        "bench.measure.clocks",
        "bench.committed",
        "bench.results.fingerprint",
        "bench.entries.first_calls",
        "bench.show.first_calls",
        "bench.show.plot",
        "bench.show.steps",
        "bench.overview",
        "bench.readme",
        "bench.results.record",
        "bench.simulated",
        "bench.show.summary",
        "bench.measure.sweeps",
        "bench.tables",
    ],
)
def test_what_is_read_without_a_gpu_imports_the_standard_library_alone(module):
    python(f"""
import sys
before = set(sys.modules)
import fused_softmax.{module}
new = {{name.partition(".")[0] for name in set(sys.modules) - before}} - {{"fused_softmax"}}
assert new <= sys.stdlib_module_names, new - sys.stdlib_module_names
""")


def imported(path):
    """The dotted name of everything that a file imports, wherever in it."""
    yield from imported_by(ast.parse(path.read_text()))


def imported_by(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ("." * node.level + f"{node.module}.{alias.name}" for alias in node.names)


def part_of(name):
    """The part of ours that a dotted name is of; None for what is not ours."""
    package, *rest = name.split(".")
    if package != PUBLIC:
        return None
    if (room := "/".join(rest[:2])) in ROOMS:
        return room
    return rest[0] if rest and rest[0] in PARTS else PUBLIC


def test_dependencies_point_one_way():
    for path in PACKAGE.rglob("*.py"):
        part = part_of(".".join((PUBLIC, *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"))
        assert part in MAY_IMPORT, f"{part}: what of ours may it import?"
        names = list(imported(path))
        assert not any(name.startswith(".") for name in names), f"{path}: imports are absolute"
        others = {part_of(name) for name in names} - {None, part} - MAY_IMPORT[part]
        assert not others, f"{path}: {part} does not import {others}"


def test_what_rooms_share_knows_no_operator():
    """By its name, as a string: what differs from operator to operator is a room's to say."""
    from fused_softmax.register.table import OPERATORS

    names = {operator.name for operator in OPERATORS} | {*fused_softmax.__all__}
    for path in [path for part in ("core", "ranks") for path in (PACKAGE / part).rglob("*.py")]:
        written = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        assert not written & names, path


def test_rooms_import_at_the_top_of_a_file():
    """But kernels, which import kernels alone: any other import inside a function would hide a circle."""
    for path in [path for part in ("core", "ranks", "ops") for path in (PACKAGE / part).rglob("*.py")]:
        tree = ast.parse(path.read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        names = {name for each in functions for name in imported_by(each) if part_of(name) is not None}
        assert not {name for name in names if not is_of_kernels(name)}, path


def test_a_rooms_init_is_empty():
    for folder in [PACKAGE / "ops", PACKAGE / "core", PACKAGE / "ranks", *(PACKAGE / room for room in ROOMS)]:
        assert not (folder / "__init__.py").read_text(), folder


def test_the_parts_have_no_cycle():
    below = dict.fromkeys(MAY_IMPORT, frozenset())
    for _ in MAY_IMPORT:
        below = {part: parts | {p for each in parts for p in below[each]} for part, parts in MAY_IMPORT.items()}
    assert not [part for part in MAY_IMPORT if part in below[part]]


def is_of_kernels(name):
    return name.startswith(f"{PUBLIC}.") and "kernels" in name.split(".")[:-1]


def test_kernels_are_named_where_they_are_launched_alone():
    """The others know of kernels what a Spec says."""
    for path in PACKAGE.rglob("*.py"):
        part = path.relative_to(PACKAGE).parts[0]
        names = {name for name in imported(path) if is_of_kernels(name)}
        names = {name for name in names if not name.startswith(f"{PUBLIC}.core.kernels.spec.")}
        if path == PACKAGE / "trace/entries/attention.py":  # launches it by tiles so small that no plan has them
            room = f"{PUBLIC}.ops.attention.kernels"
            names -= {f"{room}.forward._attention", f"{room}.spec.AttentionSpec"}
        if path == PACKAGE / "trace/entries/segments.py":  # likewise
            room = f"{PUBLIC}.ops.segments.kernels"
            names -= {f"{room}.bunches._compute", f"{room}.bunches._finish", f"{room}.spec.SegmentSpec"}
        if path == PACKAGE / "trace/entries/rows.py":  # leaves out of a page what kernels only pass on
            names -= {f"{PUBLIC}.ops.losses.kernels.spec.Numbers"}
        assert part in ("core", "ops", "ranks") or not names, f"{path} imports {names}"


def of_others(path):
    """Every name of ours that a file takes from another module: imported, or as an attribute of what it imported."""
    bound = {}
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            origin = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            bound |= {alias.asname or alias.name: origin + alias.name for alias in node.names}
    bound = {name: origin for name, origin in bound.items() if f"{origin}.".startswith(f"{PUBLIC}.")}
    yield from bound.values()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (origin := bound.get(ast.unparse(node.value))) is not None:
            yield f"{origin}.{node.attr}"


def is_underscored(name):
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def test_no_module_takes_an_underscored_name_of_another():
    """But kernels, which whatever launches or records them must name."""
    for path in PACKAGE.rglob("*.py"):
        part = path.relative_to(PACKAGE).parts[0]
        names = [name for name in of_others(path) if is_underscored(name)]
        if part in ("core", "ops", "ranks", "trace"):
            names = [name for name in names if not is_of_kernels(name)]
        if part == "trace":
            names = [name for name in names if not name.startswith(f"{PUBLIC}.classic.")]
        assert not names, f"{path}: {names}"


def test_no_file_takes_an_underscored_name_of_the_planner():
    """Ladders are public data: a test or a bench that derives widths from them needs no other."""
    for path in [*(ROOT / "tests").glob("*.py"), *(ROOT / "lab").glob("*.py")]:
        names = [name for name in of_others(path) if f"{name}.".startswith(f"{PUBLIC}.core.plan.")]
        assert not [name for name in names if is_underscored(name)], path


def test_nothing_imports_an_experiment():
    experiments = {"lab", *[path.stem for path in (ROOT / "lab").glob("*.py")]}
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "tests").glob("*.py")]:
        for name in imported(path):
            assert not experiments & set(name.split(".")[:2]), f"{path} imports {name}"


# Bracketed here and there, so that this file does not name them.
ELSEWHERE = {
    "a path of somebody's machine": rb"(?<![\w.])/(?:work|root|Users)/|/home/\w|[A-Z]:\\Users",
    "the address of a registry": (
        rb"pypi[.]org|pythonhosted[.]org|(?:extra-)?index[-]url|download[.]pytorch[.]org|anaconda[.]org"
        rb"|registry[.](?:npmjs|yarnpkg)|npmjs[.]com|crates[.]io|proxy[.]golang[.]org"
    ),
}


def test_no_file_names_a_machine_or_a_registry():
    listed = None
    if shutil.which("git"):
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True)
    if listed is None or listed.returncode or not listed.stdout:
        pytest.skip("not a checkout")
    found = [
        f"{name}: {what}: {match[0].decode()}"
        for name in listed.stdout.decode().split("\0")[:-1]
        if (path := ROOT / name).is_file()
        for what, pattern in ELSEWHERE.items()
        for match in re.finditer(pattern, path.read_bytes())
    ]
    assert not found
