"""Every command with every kind of bad argument: one line, exit code 2, and nothing lost."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from commands import CUSTOM, SHAPE, folder_without_work, fused_softmax

from fused_softmax.bench.cases import parse_dtype
from fused_softmax.bench.commands import commands
from fused_softmax.bench.measure import measure, run
from fused_softmax.bench.results import record
from fused_softmax.cli import main
from fused_softmax.core.plan import H200


def files():
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


@pytest.fixture
def here(monkeypatch, tmp_path):
    return folder_without_work(monkeypatch, tmp_path)


OUTPUTS = {  # of commands that take -o or --out: the arguments, and the suffixes
    "bench": (CUSTOM, ".json"),
    "bench cold": (("bench", "cold"), ".json"),
    "bench host": (("bench", "host"), ".json"),
    "bench shards": (("bench", "shards"), ".json"),
    "bench tune": (("bench", "tune"), ".json"),
    "report": (("report", "results.json"), ".html"),
    "trace": (("trace", "--kernel", "naive"), ".html"),
}
BAD_OUTPUTS = [
    "x.txt",
    "x",
    "",
    "folder{}",
    "results.json/under{}",
    "kept{}",
    "a" * 300 + "{}",
    "/proc/x{}",
    "/sys/under/x{}",
]
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
            "bench cold",
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
    ("plan", "1", "8", "64", "300"),  # heads of more dims than there are kernels for
    # options of one command
    ("bench", "nothing"),
    ("bench", "shards"),
    ("bench", "shards", "--provider", "quack"),
    ("bench", "shards", "--op", "logsumexp"),
    ("bench", "shards", "--shape", "8x8:0"),
    *((*command.split(), "--reps", count) for command in ("bench", "bench shards") for count in ("0", "101")),
    ("bench", "--seed", "x"),
    ("bench", "--seed", str(2**64)),
    ("bench", "--out", "a" * 248 + ".json"),  # beside which no name is left for what Ctrl-C keeps
    ("bench", "host", "--out", "a" * 248 + ".json"),
    ("bench", "cold", "--out", "a" * 248 + ".json"),
    ("bench", "cold", "--only", "nothing"),
    ("bench", "cold", "--resume"),
    ("bench", "cold", "--resume", "--force", "--out", "kept.json"),
    ("bench", "cold", "softmax"),
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
    *(("bench", "one", *SHAPE, "--iters", count) for count in ("0", "100001", "9" * 40, "x", "1e3")),
    *(("bench", "one", *SHAPE, "--warmup", count) for count in ("-1", "100001", "9" * 40, "x", "1e3")),
    ("bench", "all"),
    ("bench", "all", "--out", "kept.json"),
    ("bench", "all", "--out", "kept.json/under"),
    ("bench", "all", "--out", "x", "--only", "nothing"),
    ("bench", "all", "--out", "x", "--resume", "--force"),
    ("bench", "all", "--out", "."),
    ("bench", "all", "--out", "/proc"),
    ("report", "results.json", "-o", "x.html", "--charts", "/proc/x"),
    ("bench", "tune", "--out", "kept.json"),  # which is no table of plans
    ("bench", "tune", "--cols", "0"),
    *(("bench", "compare", "results.json", "results.json", "--tolerance", each) for each in ("-1", "nan", "inf")),
    ("bench", "compare", "results.json", "results.json", "--clock", "wall"),
    ("report", "-o", "x.html"),
    pytest.param(("report", "results.json", "-o", "x.html", "--title", "\udcff"), id="report: a title that is no text"),
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
    ("trace", "--second", "", "-o", "x.json"),
    ("trace", "--matrix", "", "-o", "x.json"),
    ("trace", "--block", "3", "-o", "x.json"),
    ("trace", "--block", "0", "-o", "x.json"),
    ("trace", "--block", "x", "-o", "x.json"),
    *(
        ("trace", "--matrix", name, "-o", "x.json")
        for name in ("none.csv", "ragged.csv", "full", "kept.json", "pipe.json")
    ),
    ("trace", "--matrix", "pipe.npy", "-o", "x.json"),
    ("trace", "--matrix", "/dev/zero", "-o", "x.json"),
    ("bench", "--resume", "--out", "pipe.json"),
    ("bench", "--resume", "--out", "piped.json"),
    ("bench", "tune", "--out", "pipe.json"),
    ("warm",),
    ("warm", "--for", "play", "--device", "h100"),
    ("warm", "--for", "train", "--device", "h100", "--vocab", "0"),
    ("warm", "--for", "serve", "--device", "h100", "--heads", "7"),
    ("warm", "--for", "serve", "--device", "h100", "--folder", "rows.json"),
    ("serve", "--port", "99999"),
    ("serve", "--port", "x"),
    ("serve", "--host", "0.0.0.0"),  # which others reach, by names that nobody gave
    ("serve", "--host", "::"),
    ("serve", "--host", ""),
    ("serve", "--host", "192.0.2.1", "--allow-host", "here.example"),  # an address of no machine
    ("serve", "--host", "no-such-host.invalid", "--allow-host", "here.example"),
    *(("serve", "--allow-host", name) for name in ("", "*", "a b", "a:80", "http://a", "[::1]:80")),
    *(
        (*arguments, *more)
        for name in ("none.json", "kept.json", "full", "deep.json", "rows.json", "pipe.json", "")
        for arguments, more in ((("report", name), ("-o", "x.html")), (("bench", "compare", "results.json", name), ()))
    ),
    ("nothing",),
]


@pytest.mark.timeout(60)  # a pipe without a writer never ends
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
        *((("points", 0, "kernel", "p50_us"), each) for each in (0, 1e-320, 10**400, math.inf)),
        (("environment", "triton"), "\ud800"),
        (("points", 0, "n_rows"), 10**400),
        (("points", 0, "parameters"), {"shape": [], "dim": -1}),
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
    page = pytest.importorskip("fused_softmax.bench.show.page", reason="the report's extra is not installed")
    Path("results_softmax_float32_speed.svg").write_bytes(Path("results.json").read_bytes())
    monkeypatch.setattr(page, "part", lambda path: page.Part(path.stem, record.load(path), [], []))
    monkeypatch.setattr(page, "chart_files", lambda each, folder: [folder / "results_softmax_float32_speed.svg"])
    before = files()
    given = ("results.json", "results_softmax_float32_speed.svg", "-o", "x.html", "--charts", ".", "--force")
    result = fused_softmax("report", *given)
    assert (result.exit_code, files()) == (2, before)
    assert result.stderr.endswith("is an input, which nothing overwrites: give another name\n")


@pytest.mark.parametrize("path", ["new.json", "rows.json", "full/new.json", "none/under/new.json", "link.json"])
def test_a_look_whether_a_file_can_be_made_makes_none_and_touches_none(here, path):
    def state():
        return {str(each): (each.lstat().st_mtime_ns, each.lstat().st_ino) for each in Path().rglob("*")}

    before = state() | {"full": None}
    record.require_writable(Path(path))
    assert state() | {"full": None} == before


def test_what_tune_only_prints_needs_no_file(here, monkeypatch):
    monkeypatch.setenv("FUSED_SOFTMAX_PLANS", "/proc/x.json")
    monkeypatch.setattr(commands, "find_device", lambda: (H200, False))
    assert fused_softmax("bench", "tune").stderr.startswith("Error: cannot write /proc/x.json: ")
    result = fused_softmax("bench", "tune", "--print-only")
    assert (result.exit_code, result.stderr.split(":")[1]) == (1, " no GPU")


def run_by(shell):
    """A command line with $F in it, as a shell runs it."""
    program = f"{sys.executable} -m fused_softmax"
    return subprocess.run(["sh", "-c", shell.replace("$F", program)], capture_output=True, text=True, timeout=120)


def test_an_input_that_comes_by_a_redirect_is_not_overwritten(here):
    before = Path("rows.json").read_text()
    done = run_by("$F trace --kernel online --matrix - -o rows.json --force < rows.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "Error: rows.json is an input, which nothing overwrites: give another name\n"
    assert Path("rows.json").read_text() == before


def test_commands_run_with_stderr_closed_and_say_so_of_stdin(here):
    done = run_by("$F plan 4 4 2>&-")
    assert done.returncode == 0
    assert "tile" in done.stdout
    done = run_by("$F trace --kernel online --matrix - -o x.json <&-")
    assert (done.returncode, done.stderr) == (2, "Error: standard input is closed\n")


@pytest.mark.parametrize("spelled", ["float-32", "FLOAT_32", "torch.float32", "fp-32", " Float32 "])
def test_dtypes_are_spelled_as_freely_as_other_names(spelled):
    assert parse_dtype(spelled) == "float32"
