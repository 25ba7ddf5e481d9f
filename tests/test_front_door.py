"""Every command with every kind of bad argument: one line, exit code 2, and nothing lost."""

import ast
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import CUSTOM, ROOT, SHAPE, folder_without_work, fused_softmax
from products import one_in

from fused_softmax.bench.cases import parse_dtype
from fused_softmax.bench.commands import commands
from fused_softmax.bench.measure import measure, run
from fused_softmax.bench.results import compare, record
from fused_softmax.bench.show import report
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
    "bench step": (("bench", "step"), ".json"),
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
            "bench step",
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
    ("plan", "1000000000000", "1000000000000"),  # each a size, and together no tensor
    ("plan", "--rows", "4Gi", "--cols", "4Gi"),
    ("plan", "1Mi", "1Mi", "4Mi", "64"),
    ("plan", "1", "8", "64", "300"),  # heads of more dims than there are kernels for
    # options of one command
    ("bench", "nothing"),
    ("bench", "shards"),
    ("bench", "shards", "--provider", "quack"),
    ("bench", "shards", "--op", "logsumexp"),
    ("bench", "shards", "--shape", "8x8:0"),
    ("bench", "shards", "--op", "softmax", "--shape", "8x8x8"),
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
    ("bench", "step", "--op", "softmax"),
    ("bench", "step", "--op", "step_grpo", "--provider", "liger"),
    ("bench", "step", "--shape", "8x128256"),
    ("bench", "step", "--shape", "2x1x1000"),
    ("bench", "step", "--reps", "0"),
    ("bench", "step", "--resume"),
    ("bench", "step", "step_llama"),
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
    (*CUSTOM, "--beside", "results.json"),
    (*CUSTOM, "--plot", "x.png", "--beside", "kept.json"),
    (*CUSTOM, "--plot", "x.png", "--out", "results.json", "--force", "--beside", "results.json"),
    *(("bench", "one", *SHAPE, "--iters", count) for count in ("0", "100001", "9" * 40, "x", "1e3")),
    *(("bench", "one", *SHAPE, "--warmup", count) for count in ("-1", "100001", "9" * 40, "x", "1e3")),
    ("bench", "all"),
    ("bench", "all", "--out", "kept.json"),
    ("bench", "all", "--out", "kept.json/under"),
    ("bench", "all", "--out", "x", "--only", "nothing"),
    ("bench", "all", "--out", "x", "--resume", "--force"),
    ("bench", "all", "--out", "."),
    ("bench", "all", "--out", "/proc"),
    ("bench", "all", "--out", "", "--resume"),
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
    ("report", "results.json", "-o", "x.html", "--charts", "", "--force"),
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
    ("warm", "--for", "serve", "--device", "h100", "--folder", ""),  # which pathlib takes for the current folder
    ("serve", "--port", "99999"),
    ("serve", "--port", "x"),
    ("serve", "--host", "0.0.0.0"),  # which others reach, by names that nobody gave
    ("serve", "--host", "::"),
    ("serve", "--host", ""),
    pytest.param(("serve", "--host", "\udcff", "--allow-host", "a"), id="serve: a host that is no text"),
    ("serve", "--host", "a" * 64, "--allow-host", "a"),  # no label of a name is as long
    ("serve", "--host", "a..b", "--allow-host", "a"),
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


def options_of(arguments):
    command = main
    for word in arguments:
        command = getattr(command, "commands", {}).get(word, command)
    return {name for param in getattr(command, "sweep", command).params for name in param.opts}


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
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", re.sub("`.*?`", "", line)))
    assert named <= {*options_of(arguments), *arguments}, "it names options that the command does not have"
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
    monkeypatch.setattr(run, "verify", lambda *_: iter(()))
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


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}  # a locale without UTF-8, as Python may meet it


@pytest.mark.parametrize(
    "arguments", one_in(3, ["trace -o new.html", "env", "report results.json -o new.html", "trace --kernel naive -o -"])
)
def test_commands_read_and_write_utf_8_whatever_the_locale(here, monkeypatch, arguments):
    for name, value in ASCII.items():
        monkeypatch.setenv(name, value)
    done = run_by(f"$F {arguments}")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()


OF_ASCII = ("core/plan/tuned.py", "core/native.py", "ranks/peers.py")


def test_every_text_file_and_pipe_names_its_encoding():
    """The locale's, which is the default, need not be UTF-8."""
    nameless = []
    for path in (ROOT / "src/fused_softmax").rglob("*.py"):
        calls = [each for each in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(each, ast.Call)]
        for call in () if any(map(path.match, OF_ASCII)) else calls:
            of, _, name = ast.unparse(call.func).rpartition(".")
            named = {keyword.arg for keyword in call.keywords}  # None is of **
            of_file = name in ("read_text", "write_text") and of != "formatter"
            if (of_file and not named & {"encoding", None}) or (name in ("run", "Popen") and "text" in named):
                nameless.append(f"{path.name}:{call.lineno}")
    assert nameless == []


def test_a_name_that_the_output_cannot_show_is_written_all_the_same(here, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8:strict")
    done = run_by("$F trace --kernel naive -o $(printf '\\377').json")
    assert (done.returncode, done.stdout.startswith("wrote \\udcff.json: "), done.stderr) == (0, True, "")
    assert Path("\udcff.json").exists()


def test_a_title_that_is_no_text_is_named(here):
    said = fused_softmax("report", "results.json", "-o", "x.html", "--title", "a\udcff").stderr
    assert said == "Error: Invalid value for '--title': 'a\\udcff' is not valid Unicode\n"


def test_results_of_a_later_version_are_told_from_other_files(here):
    found = json.loads(Path("results.json").read_text())
    for content, said in (
        (found | {"schema": 2}, "was written by a later version of this package, which this one cannot read"),
        (found | {"schema": "2"}, "is not what `fused-softmax bench --out` writes"),
        ({"schema": 2}, "is not what `fused-softmax bench --out` writes"),
        ({"a": 1}, "is not what `fused-softmax bench --out` writes"),
        ([1], "is not what `fused-softmax bench --out` writes"),
    ):
        Path("other.json").write_text(json.dumps(content))
        assert fused_softmax("report", "other.json", "-o", "x.html").stderr == f"Error: other.json {said}\n"
    Path("other.json").write_text('{"schema": 1' + "0" * 5000 + "}")  # a number that Python does not read
    said = fused_softmax("bench", "compare", "results.json", "other.json").stderr
    assert said == "Error: other.json is not what `fused-softmax bench --out` writes\n"


def test_a_write_protected_file_is_not_called_irregular(here, monkeypatch):
    monkeypatch.setattr(record.os, "access", lambda path, mode: mode != os.W_OK)
    said = fused_softmax(*CUSTOM, "--out", "kept.json", "--force").stderr
    assert said.endswith("cannot write kept.json: it is write-protected\n")


@pytest.mark.parametrize("columns", [40, 80])
def test_no_terminal_is_so_narrow_that_a_word_is_folded(columns):
    from rich.console import Console

    console = Console(width=columns, force_terminal=True, color_system=None, record=True)
    figure = record.Figure(1.0, 1.1, 1.2, 2000.0)
    names = ("fused_softmax", "torch", "own kernels", "sdpa efficient")
    points = [
        record.Point(4096, 65536, "bfloat16", name, "ok", kernel=figure, ratio=0.5, operation=operation)
        for name in names
        for operation in ("softmax", "segment_softmax_unsorted_gradient")
    ]
    found = compare.compare(*[record.Run({}, "", points)] * 2)
    report.print_comparison(found, console, everything=True)
    said = console.export_text()
    for word in ("segment_softmax_unsorted_gradient", "fused_softmax", "efficient", "after/before"):
        assert word in said
