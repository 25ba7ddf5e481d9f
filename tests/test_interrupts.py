"""Ctrl-C at any moment ends a command in one line, and what was measured is kept."""

import json
import signal
import time
from pathlib import Path

import pytest
from commands import CUSTOM, SHAPE, folder_without_work, fused_softmax, started

from fused_softmax import cli
from fused_softmax.bench.commands import commands
from fused_softmax.bench.measure import host, measure, one, run, tune
from fused_softmax.bench.results import record
from fused_softmax.core import files
from fused_softmax.core.files import write_whole
from fused_softmax.core.plan import H200, tuned
from fused_softmax.interrupt import INTERRUPTED


@pytest.fixture
def here(monkeypatch, tmp_path):
    return folder_without_work(monkeypatch, tmp_path)


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
    assert result.exit_code == INTERRUPTED
    assert len(result.stderr.splitlines()) <= 1
    assert "interrupted" in result.output
    assert not Path("new.html").exists()


def test_rows_of_host_are_not_lost_while_the_environment_is_read(here, monkeypatch):
    """It takes seconds, so it is read before there are rows; no file is left of a run that has none."""
    monkeypatch.undo()
    monkeypatch.chdir(here)
    told, of_environment = [], record.environment
    monkeypatch.setattr(record, "environment", lambda *of: told.append("environment") or of_environment(*of))
    rows = iter([host.Row("one", 1.0, 2.0, 0.5)])
    monkeypatch.setattr(host, "measure", lambda pair: told.append("row") or next(rows, None) or interrupt())
    assert fused_softmax("bench", "host", "--out", "new.json").exit_code == 130
    assert told == ["environment", "row", "row"]
    monkeypatch.setattr(record, "environment", lambda *of: interrupt())
    assert fused_softmax("bench", "host", "--out", "other.json").exit_code == 130
    assert not list(Path().glob("other*"))


def test_what_was_measured_before_ctrl_c_is_kept(here, monkeypatch):
    monkeypatch.undo()
    monkeypatch.chdir(here)
    rows = iter([host.Row("one", 1.0, 2.0, 0.5)])
    monkeypatch.setattr(host, "measure", lambda pair: next(rows, None) or interrupt())
    result = fused_softmax("bench", "host", "--out", "new.json")
    assert (result.exit_code, result.stderr) == (130, "interrupted: 1 row was measured\n")
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
    monkeypatch.setattr(files, "write_whole", write_whole)  # which `here` forbids
    table = tune.built_in(1, 2)
    monkeypatch.setattr(tune, "tune", lambda *_: (_ for _ in ()).throw(tune.Interrupted(table)))
    result = fused_softmax("bench", "tune", "--out", "plans.json")
    assert result.exit_code == 130
    assert result.stderr == "interrupted: plans.partial.json has the ladders until then\n"
    assert tuned.load(Path("plans.partial.json"))[H200.name].ladders
    assert not Path("plans.json").exists()


@pytest.mark.parametrize("seconds", [0.7, 1.5])
def test_ctrl_c_while_starting_is_one_line(seconds):
    process = started("-m", "fused_softmax", "bench", "custom", "--shape", "64x64", "--reps", "100")
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=20)[1]
    assert (process.returncode, said) == (130, "interrupted\n")


AT_AN_IMPORT = """
import os, signal, sys
name = sys.argv.pop()

class Interrupting:
    def find_spec(wanted, *_):
        if wanted == name:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting)
from fused_softmax.__main__ import main
main()
"""


@pytest.mark.parametrize(
    "name", ["fused_softmax.cli", "pathlib", "click", "fused_softmax.bench.commands.front", "torch"]
)
def test_ctrl_c_at_any_import_of_the_start_is_one_line(name):
    process = started("-c", AT_AN_IMPORT, "env", name)
    said = process.communicate(timeout=60)[1]
    assert (process.returncode, said) == (130, "interrupted\n")


@pytest.mark.parametrize(("arguments", "code"), [(("plan", "8", "8"), 0), (("plan", "8"), 2)])
def test_ctrl_c_when_the_work_is_done_changes_nothing(arguments, code):
    """Python takes down what it imported, for as long as a second, and would print what Ctrl-C interrupts there."""
    script = f"""
import atexit, os, signal, sys
atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))
sys.argv[1:] = {list(arguments)}
from fused_softmax.__main__ import main
main()
"""
    process = started("-c", script)
    out, said = process.communicate(timeout=60)
    assert (process.returncode, said.count("\n"), "Traceback" in said) == (code, int(code > 0), False)
    assert bool(out) == (code == 0)


def test_nothing_is_imported_before_ctrl_c_can_be_answered():
    """Python answers it until then, by a traceback."""
    script = "import sys; old = {*sys.modules}; import fused_softmax.__main__; print(*sorted({*sys.modules} - old))"
    said = started("-c", script).communicate(timeout=60)[0]
    assert said.split() == ["fused_softmax", "fused_softmax.__main__", "fused_softmax.interrupt"]
