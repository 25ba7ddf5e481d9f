"""Every command with every kind of bad argument: one line, exit code 2, and nothing lost. Ctrl-C, help and names."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from fused_softmax import cli
from fused_softmax.bench import catalog, commands, front, host, measure, one, operations, record, run, sweeps, tune
from fused_softmax.bench.cases import ALIASES, DTYPE, ITEMSIZE
from fused_softmax.cli import main
from fused_softmax.plan import H200, tuned

ROOT = Path(__file__).parents[1]
SHAPE = ("--rows", "8", "--cols", "100")
CUSTOM = ("bench", "custom", "--shape", "8x100", "--provider", "torch")


def fused_softmax(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="fused-softmax")


def files():
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


@pytest.fixture
def here(monkeypatch, tmp_path):
    """A folder with files of every kind, and no work done in it."""
    monkeypatch.chdir(tmp_path)
    figure = record.Figure(1.0, 1.1, 1.2, 2000.0)
    points = [record.Point(64, 256, "float32", name, "ok", kernel=figure) for name in ("fused_softmax", "torch")]
    environment = {"torch": "2.11", "triton": "3.6", "python": "3.12", "gpu": {"name": "NVIDIA H200"}}
    found = record.Run(environment, "fused-softmax bench", points, complete=True)
    for name in ("results.json", "results.html", "results.png", "h200_softmax.json"):
        record.save(found, Path(name))
    Path("kept.json").write_text("kept")
    Path("kept.html").write_text("kept")
    Path("kept.png").write_text("kept")
    Path("run.partial.json").write_text("kept")
    Path("deep.json").write_text("[" * 100_000)
    Path("rows.json").write_text("1,2\n3,4\n")
    Path("ragged.csv").write_text("1,2\n3\n")
    Path("full").mkdir()
    Path("full/kept.svg").write_text("kept")
    Path("folder.json").mkdir()
    Path("folder.html").mkdir()
    Path("link.json").symlink_to("rows.json")
    Path("link.html").symlink_to("results.html")
    monkeypatch.setenv("FUSED_SOFTMAX_PLANS", "none.json")
    monkeypatch.delenv("RANK", raising=False)
    work = [
        (measure, "measure"), (one, "time_calls"), (one, "call_once"), (host, "measure"), (tune, "tune"),
        (record, "write_whole"),
    ]  # fmt: skip
    for module, name in work:
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("worked"))
    return tmp_path


OUTPUTS = {  # of commands that take -o or --out: the arguments, and the suffixes
    "bench": (CUSTOM, ".json"),
    "bench host": (("bench", "host"), ".json"),
    "bench shards": (("bench", "shards"), ".json"),
    "bench tune": (("bench", "tune"), ".json"),
    "report": (("report", "results.json"), ".html"),
    "trace": (("trace", "--kernel", "naive"), ".html"),
}
BAD_OUTPUTS = ["x.txt", "x", "", "folder{}", "results.json/under{}", "kept{}", "a" * 300 + "{}"]
SHAPED = ("bench one", "profile")  # commands of one shape
BAD_SIZES = ["0", "-4", "x", "1e3", "", "4.5", "9" * 40, "4Ti", "٣"]
BAD = [
    *(
        pytest.param((*arguments, "--out", bad.format(suffix)), id=f"{name}: {bad[:20]}")
        for name, (arguments, suffix) in OUTPUTS.items()
        for bad in BAD_OUTPUTS
        if not (name == "bench tune" and bad == "kept{}")
    ),
    *(
        (*command.split(), "--nothing")
        for command in (
            "bench",
            "bench one",
            "bench host",
            "bench shards",
            "bench all",
            "bench compare",
            "bench tune",
            "report",
            "profile",
            "plan",
            "env",
            "trace",
            "serve",
        )
    ),
    *(
        (*command.split(), "--rows", size, "--cols", "8")
        for command in (*SHAPED, "bench", "plan")
        for size in BAD_SIZES
    ),
    *(("plan", size, "8") for size in BAD_SIZES),
    ("plan", "8", "8", "--rows", "8"),
    ("plan", "--rows", "8"),
    ("plan",),
    *((*command.split(), *SHAPE, "--dtype", "int8") for command in (*SHAPED, "bench")),
    ("plan", "8", "8", "--dtype", "int8"),
    ("trace", "-o", "x.json", "--dtype", "int8"),
    ("bench", "tune", "--dtype", "int8"),
    *((*command.split(), *SHAPE, "--provider", "cudnn") for command in (*SHAPED, "bench")),
    ("bench", "compare", "results.json", "results.json", "--provider", "cudnn"),
    *((*command.split(), *SHAPE, "--provider", "liger", "--op", "logsumexp") for command in SHAPED),
    ("bench", "custom", *SHAPE, "--provider", "liger", "--op", "logsumexp"),
    *((*command.split(), *SHAPE, "--op", "matmul") for command in (*SHAPED, "bench")),
    *((*command.split(), *SHAPE, "--op", "softmax,logsumexp") for command in SHAPED),
    *((*command.split(), *SHAPE, "--op", "softmax_causal") for command in (*SHAPED, "bench")),
    ("bench", "tune", "--op", "logsumexp"),
    *((*command.split(), "--rows", "8") for command in SHAPED),
    ("plan", "8"),
    ("plan", "8", "8", "8"),
    # options of one command
    ("bench", "nothing"),
    ("bench", "shards"),
    ("bench", "shards", "--provider", "quack"),
    ("bench", "shards", "--op", "logsumexp"),
    ("bench", "shards", "--shape", "8x8:0"),
    ("bench", "--reps", "0"),
    ("bench", "--seed", "x"),
    ("bench", "--shape", "8"),
    ("bench", "--cols", "8:4"),
    ("bench", "--cols", "1:99999999999"),
    ("bench", "--resume"),
    ("bench", "--resume", "--force", "--out", "kept.json"),
    ("bench", "--resume", "--out", "kept.json"),
    ("bench", "--resume", "--out", "deep.json"),
    (*CUSTOM, "--out", "run.json"),  # beside which an interrupted run lies
    (*CUSTOM, "--plot", "kept.png"),
    (*CUSTOM, "--plot", "x.txt"),
    (*CUSTOM, "--plot", "results.json/x.png"),
    ("bench", "one", *SHAPE, "--iters", "0"),
    ("bench", "one", *SHAPE, "--warmup", "-1"),
    ("bench", "all"),
    ("bench", "all", "--out", "kept.json"),
    ("bench", "all", "--out", "kept.json/under"),
    ("bench", "all", "--out", "x", "--only", "nothing"),
    ("bench", "all", "--out", "x", "--resume", "--force"),
    ("bench", "all", "--out", "."),
    ("bench", "tune", "--out", "kept.json"),  # which is no table of plans
    ("bench", "tune", "--cols", "0"),
    ("bench", "compare", "results.json", "results.json", "--tolerance", "-1"),
    ("bench", "compare", "results.json", "results.json", "--clock", "wall"),
    ("report", "-o", "x.html"),
    ("report", "results.json", "full/../results.json", "-o", "x.html"),
    ("report", "results.json", "-o", "x.html", "--charts", "kept.json"),
    ("report", "results.json", "-o", "x.html", "--charts", "full"),
    ("report", "results.html", "-o", "results.html", "--force"),
    ("report", "results.html", "-o", "link.html", "--force"),
    ("trace", "--matrix", "rows.json", "-o", "rows.json", "--force"),
    ("trace", "--matrix", "rows.json", "-o", "link.json", "--force"),
    ("trace",),
    ("trace", "--kernel", "fast", "-o", "x.json"),
    ("trace", "--second", "fast", "-o", "x.json"),
    ("trace", "--block", "3", "-o", "x.json"),
    ("trace", "--block", "0", "-o", "x.json"),
    ("trace", "--block", "x", "-o", "x.json"),
    *(("trace", "--matrix", name, "-o", "x.json") for name in ("none.csv", "ragged.csv", "full", "kept.json")),
    ("serve", "--port", "99999"),
    ("serve", "--port", "x"),
    *(
        (*arguments, *more)
        for name in ("none.json", "kept.json", "full", "deep.json", "rows.json", "")
        for arguments, more in ((("report", name), ("-o", "x.html")), (("bench", "compare", "results.json", name), ()))
    ),
    ("nothing",),
]


@pytest.mark.parametrize("arguments", BAD, ids=lambda arguments: " ".join(arguments)[:60])
def test_a_wrong_value_is_one_line_and_exit_code_2_and_nothing_is_written(here, arguments):
    before = files()
    result = fused_softmax(*arguments)
    assert result.exit_code == 2, (result.output, result.exception)
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert files() == before
    assert not [path for path in Path().iterdir() if path.name.startswith(("x", "a" * 20))]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("environment",), []),
        (("environment", "gpu"), "H200"),
        (("points",), [1]),
        (("points", 0, "n_rows"), "64"),
        (("points", 0, "n_cols"), 0),
        (("points", 0, "dtype"), "int8"),
        (("points", 0, "status"), "fine"),
        (("points", 0, "ratio"), [1]),
        (("points", 0, "kernel", "p50_us"), 0),
        (("points", 0, "clocks"), -1),
        (("points", 0, "parameters"), {"shape": None}),
        (("points", 0, "parameters"), {"dim": 5}),
        (("nothing",), 1),
    ],
    ids=str,
)
def test_results_with_a_value_that_no_run_has_are_refused(here, place, value):
    found = json.loads(Path("results.json").read_text())
    *outer, name = place
    inner = found
    for key in outer:
        inner = inner[key]
    inner[name] = value
    Path("odd.json").write_text(json.dumps(found))
    for arguments in (("report", "odd.json", "-o", "x.html"), ("bench", "compare", "results.json", "odd.json")):
        result = fused_softmax(*arguments)
        assert (result.exit_code, result.stderr) == (
            2, "Error: odd.json is not what `fused-softmax bench --out` writes\n"
        )  # fmt: skip


def test_every_command_is_tried():
    def names(group, before=()):
        for name, each in group.commands.items():
            yield from [(*before, name)] if not hasattr(each, "commands") else names(each, (*before, name))

    tried = [arguments.values[0] if hasattr(arguments, "values") else arguments for arguments in BAD]
    for name in names(main):
        assert [each for each in tried if each[: len(name)] == name], name


def test_what_exists_is_overwritten_only_by_force(here, monkeypatch):
    monkeypatch.undo()
    monkeypatch.chdir(here)
    monkeypatch.setattr(run, "verify", lambda operations: iter(()))
    monkeypatch.setattr(measure, "on_gpu", lambda: False)
    arguments = (*CUSTOM, "--verify-only", "--out", "kept.json")
    result = fused_softmax(*arguments)
    assert (result.exit_code, result.stderr) == (
        2, "Error: kept.json exists; --force overwrites it, --resume continues the run in --out\n"
    )  # fmt: skip
    assert fused_softmax(*arguments, "--force").exit_code == 0
    assert record.load(Path("kept.json")).complete
    assert fused_softmax(*arguments, "--resume").exit_code == 0
    assert fused_softmax("trace", "-o", "kept.html").exit_code == 2
    assert Path("kept.html").read_text() == "kept"


def test_charts_never_take_the_place_of_results(here, monkeypatch):
    page = pytest.importorskip("fused_softmax.bench.page", reason="the report's extra is not installed")
    Path("results_softmax_float32_speed.svg").write_bytes(Path("results.json").read_bytes())
    monkeypatch.setattr(page, "part", lambda path: page.Part(path.stem, record.load(path), [], []))
    monkeypatch.setattr(page, "chart_files", lambda each, folder: [folder / "results_softmax_float32_speed.svg"])
    before = files()
    given = ("results.json", "results_softmax_float32_speed.svg", "-o", "x.html", "--charts", ".", "--force")
    result = fused_softmax("report", *given)
    assert (result.exit_code, files()) == (2, before)
    assert result.stderr.endswith("is an input, which nothing overwrites: give another name\n")


# Ctrl-C


def interrupt(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("where", "arguments"),
    [
        ((measure, "measure"), CUSTOM),
        ((run, "gpu_facts"), (*CUSTOM, "--out", "new.json")),
        ((run, "gpu_facts"), ("env",)),
        ((one, "time_calls"), ("bench", "one", *SHAPE)),
        ((host, "measure"), ("bench", "host")),
        ((commands, "find_device"), ("bench", "host")),
        ((commands, "find_device"), ("bench", "tune")),
        ((cli, "find_device"), ("profile", *SHAPE)),
        ((cli, "find_device"), ("plan", "8", "8")),
        ((cli, "read_results"), ("report", "results.json", "-o", "new.html")),
        ((commands, "read_results"), ("bench", "compare", "results.json", "results.json")),
        ((record, "environment"), ("bench", "all", "--out", "new", "--dry-run")),
        (("fused_softmax.trace.asked", "asked"), ("trace", "--kernel", "naive", "-o", "new.json")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value[0], str) and len(value) > 1 else "",
)
def test_ctrl_c_ends_in_one_line(here, monkeypatch, where, arguments):
    monkeypatch.setattr(*(where if not isinstance(where[0], str) else (".".join(where),)), interrupt)
    result = fused_softmax(*arguments)
    assert result.exit_code == front.INTERRUPTED
    assert len(result.stderr.splitlines()) <= 1
    assert "interrupted" in result.output
    assert not Path("new.html").exists()


def test_what_was_measured_before_ctrl_c_is_kept(here, monkeypatch):
    monkeypatch.undo()
    monkeypatch.chdir(here)
    rows = iter([host.Row("one", 1.0, 2.0, 0.5)])
    monkeypatch.setattr(host, "measure", lambda pair: next(rows, None) or interrupt())
    result = fused_softmax("bench", "host", "--out", "new.json")
    assert (result.exit_code, result.stderr) == (130, "interrupted: 1 rows were measured\n")
    assert not Path("new.json").exists()
    assert json.loads(Path("new.partial.json").read_text())["rows"][0]["name"] == "one"
    assert fused_softmax("bench", "host", "--out", "new.json").exit_code == 2

    times = iter([1.0, 2.0])
    monkeypatch.setattr(one, "_wall_around", lambda call: next(times, None) or interrupt())
    monkeypatch.setattr(measure, "on_gpu", lambda: False)
    result = fused_softmax("bench", "one", *SHAPE, "--provider", "torch", "--json")
    assert (result.exit_code, result.stderr) == (130, "interrupted: the average is of 2 calls\n")
    assert json.loads(result.stdout)["iterations"] == 2


def test_ladders_measured_before_ctrl_c_are_kept(here, monkeypatch):
    monkeypatch.setattr(commands, "find_device", lambda: (H200, True))
    monkeypatch.setattr(run, "gpu_facts", lambda: (None, None))
    table = tune.built_in(1, 2)
    monkeypatch.setattr(tune, "tune", lambda *_: (_ for _ in ()).throw(tune.Interrupted(table)))
    result = fused_softmax("bench", "tune", "--out", "plans.json")
    assert result.exit_code == 130
    assert result.stderr == "interrupted: plans.partial.json has the ladders until then\n"
    assert tuned.load(Path("plans.partial.json"))[H200.name].ladders
    assert not Path("plans.json").exists()


@pytest.mark.parametrize("seconds", [0.7, 1.5])
def test_ctrl_c_while_starting_is_one_line(seconds):
    process = started("-m", "fused_softmax.cli", "bench", "custom", "--shape", "64x64", "--reps", "100")
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=20)[1]
    assert (process.returncode, said) == (130, "interrupted\n")


def started(*arguments):
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_INTERPRET")} | {
        "PYTHONPATH": str(ROOT / "src")
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # Ctrl-C is ignored below a shell's background job.
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen([sys.executable, *arguments], env=environment, preexec_fn=heeds, **pipes)


# Names


def test_the_catalog_names_what_is_measured():
    assert {name: list(each.providers) for name, each in operations.OPERATIONS.items()} == {
        name: catalog.provider_names([name]) for name in catalog.PEERS
    }
    assert catalog.provider_names() == operations.provider_names()


@pytest.mark.parametrize("command", ["bench", "bench one", "bench compare", "bench tune", "profile"])
def test_help_and_list_name_all_there_is_to_choose(command):
    for option in ("--help", "--list"):
        result = fused_softmax(*command.split(), option)
        assert result.exit_code == 0
        words = result.output.split()
        names = [*catalog.PEERS, *ITEMSIZE, *ALIASES, *catalog.PROVIDER_ALIASES, "flashinfer", "chunks"]
        for name in [*names, *(sweeps.SWEEPS if command == "bench" else ())]:
            assert {name, f"{name},"} & set(words), name


@pytest.mark.parametrize("name", ["fused", "triton", "fused-softmax", "FUSED_SOFTMAX", "fused_softmax"])
@pytest.mark.parametrize(
    "command",
    [
        "bench custom --rows 2 --cols 8 --verify-only", "bench custom --M 2 --N 8 --verify-only",
        "bench one --rows 2 --cols 8 --iters 3 --profile-only", "bench one --M 2 --N 8 --iters 3 --profile-only",
        "profile --rows 2 --cols 8", "bench compare results.json results.json",
    ],
)  # fmt: skip
@pytest.mark.parametrize("option", ["--provider", "--backend"])
def test_every_spelling_is_taken_by_every_command(here, monkeypatch, command, option, name):
    seen = []
    monkeypatch.setattr(measure, "measure", lambda case, names, effort: seen.append((case, list(names))) or [])
    monkeypatch.setattr(run, "verify", lambda operations: iter(()))
    monkeypatch.setattr(record, "environment", lambda *_: {"torch": "", "triton": "", "python": "", "gpu": None})
    monkeypatch.setattr(one, "call_once", lambda case, name: seen.append((case, [name])))
    monkeypatch.setattr(cli, "find_device", lambda: (H200, False))
    monkeypatch.setattr("fused_softmax.profile.run.profile", lambda case, name, *_, gpu: seen.append((case, [name])))
    monkeypatch.setattr("fused_softmax.profile.run.print_table", lambda *_: None)
    result = fused_softmax(*command.split(), option, name)
    assert result.exit_code == 0, (result.output, result.exception)
    if "compare" not in command:
        ((case, names),) = seen
        assert (case.shape, case.dtype, names) == ((2, 8), DTYPE, ["fused_softmax"])


def test_names_are_found_however_they_are_spelled():
    for text, name in (
        ("Torch-Compile", "torch.compile"),
        ("compile", "torch.compile"),
        ("torch_chunked", "torch chunked"),
    ):
        assert catalog.find("provider", text, catalog.provider_names(), catalog.PROVIDER_ALIASES) == name
    assert catalog.find("sweep", "cross_entropy", sweeps.SWEEPS) == "cross-entropy"
    assert catalog.find("operation", "cross-entropy", catalog.PEERS) == "cross_entropy"
    for known in (catalog.PEERS, sweeps.SWEEPS, catalog.provider_names()):
        assert [catalog.find("name", name, known) for name in known] == list(known)
    with pytest.raises(ValueError, match="unknown sweep 'nothing'; known: tutorial"):
        catalog.find("sweep", "nothing", sweeps.SWEEPS)


def test_a_single_figure_says_which_path_was_timed(monkeypatch):
    monkeypatch.setattr(measure, "on_gpu", lambda: False)
    monkeypatch.setattr(measure, "interpreting", lambda: False)
    found = json.loads(fused_softmax("bench", "one", *SHAPE, "--iters", 3, "--json").stdout)
    assert found["path"] == "torch's path on the CPU, for there is no GPU: no kernel of this package is timed"
    found = json.loads(fused_softmax("bench", "one", *SHAPE, "--iters", 3, "--backend", "naive", "--json").stdout)
    assert found["path"] == "naive on the CPU"


# Speed


def seconds(*arguments):
    start = time.perf_counter()
    process = started(*arguments)
    assert process.communicate()[1] == ""
    return time.perf_counter() - start


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", ["", "bench", "report"])
def test_help_is_there_at_once(command):
    """In turns, and the least of several: a busy machine slows one of them alone."""
    pairs = [
        (seconds("-c", "import click"), seconds("-m", "fused_softmax.cli", *command.split(), "--help"))
        for _ in range(4)
    ]
    click, help = map(min, zip(*pairs, strict=True))
    assert help <= 2 * click + 0.15


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["bench", "--list"], ["bench", "--dtype", "int8"]])
def test_help_and_wrong_names_import_no_pytorch(arguments):
    script = f"""
import sys
from fused_softmax.cli import main
try:
    main({arguments})
except SystemExit:
    pass
assert not {{"torch", "triton", "rich"}} & set(sys.modules)
"""
    process = started("-c", script)
    process.communicate()
    assert process.returncode == 0
