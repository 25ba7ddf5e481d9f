"""A full disk, a full standard output: one line that names what could not be written, and nothing measured is lost."""

import errno
import os
import sys
import tempfile
from pathlib import Path

import pytest
from commands import CUSTOM, SHAPE, folder_without_work, fused_softmax, started

from fused_softmax.bench import committed, renew
from fused_softmax.bench.commands import commands
from fused_softmax.bench.measure import host, measure, run, saving, tune
from fused_softmax.bench.results import record
from fused_softmax.cli import main
from fused_softmax.core.plan import H200, tuned

FULL = os.strerror(errno.ENOSPC)
needs_a_full_device = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")


@pytest.fixture
def here(monkeypatch, tmp_path):
    """A folder to measure in, on a CPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "on_gpu", lambda: False)
    monkeypatch.setattr(run, "verify", lambda *_: iter(()))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path


def full_disk(monkeypatch, after=0, but="temporary"):
    """Writes into folders other than `but` fail, after so many that do not."""
    real, written = os.fdopen, []

    def opened(descriptor, *arguments, **options):
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        written.append(name)
        if len(written) > after and f"/{but}/" not in name:
            os.close(descriptor)
            raise OSError(errno.ENOSPC, FULL)
        return real(descriptor, *arguments, **options)

    monkeypatch.setattr(os, "fdopen", opened)


def kept_elsewhere(stderr, name):
    """The file that the last line on stderr, after those of progress, names as where the measurements are."""
    *_, line = stderr.splitlines()
    assert line.startswith(f"Error: cannot write {name}: {FULL}; ")
    assert line.endswith(" has what was measured")
    return Path(line.split("; ")[1].removesuffix(" has what was measured"))


ARGUMENTS = ("bench", "custom", "--shape", "8x100,4x50", "--provider", "torch", "--verify-only", "--out", "new.json")


@pytest.mark.parametrize(("after", "name", "points"), [(0, "new.partial.json", 1), (2, "new.json", 2)])
def test_what_was_measured_is_printed_and_kept_elsewhere_if_the_disk_is_full(here, monkeypatch, after, name, points):
    full_disk(monkeypatch, after)
    result = fused_softmax(*ARGUMENTS)
    assert result.exit_code == 1
    other = kept_elsewhere(result.stderr, name)
    assert other.name == name
    assert len(record.load(other).points) == points
    assert "8 x 100 float32" in result.stdout
    assert not Path("new.json").exists()
    assert not list(Path().glob(".*"))


def test_a_disk_without_room_anywhere_is_said_in_one_line(here, monkeypatch):
    full_disk(monkeypatch, but="none")
    result = fused_softmax(*ARGUMENTS)
    assert result.exit_code == 1
    assert result.stderr == (
        f"Error: cannot write new.partial.json: {FULL}; it could not be written among temporary files either\n"
    )


def test_rows_of_the_host_are_printed_and_kept_elsewhere_if_the_disk_is_full(here, monkeypatch):
    monkeypatch.setattr(commands, "find_device", lambda: (H200, False))
    monkeypatch.setattr(host, "measure_all", lambda device: iter([host.Row("one", 1.0, 2.0, 0.5)]))
    full_disk(monkeypatch)
    result = fused_softmax("bench", "host", "--out", "new.json")
    assert result.exit_code == 1
    assert '"one"' in kept_elsewhere(result.stderr, "new.json").read_text()
    assert "one" in result.stdout


def test_ladders_are_printed_if_the_disk_is_full(here, monkeypatch):
    monkeypatch.setattr(commands, "find_device", lambda: (H200, True))
    monkeypatch.setattr(run, "gpu_facts", lambda: (None, None))
    monkeypatch.setattr(tune, "tune", lambda *_: tune.built_in(1, 2))
    monkeypatch.setattr(tuned, "save", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, FULL)))
    result = fused_softmax("bench", "tune", "--out", "plans.json")
    assert (result.exit_code, result.stderr) == (
        1, f"Error: cannot write plans.json: {FULL}; the ladders are printed, and nowhere else\n"
    )  # fmt: skip
    assert "row_warps" in result.stdout


def test_bench_all_stops_at_a_file_that_cannot_be_written(here, monkeypatch):
    tried, said = [], []
    monkeypatch.setattr(renew.Renewal, "state", lambda *_: committed.State("missing"))

    def measured(asked, *_, **__):
        tried.append(asked)
        raise saving.NotSaved("cannot write one.json: full; other has what was measured")

    monkeypatch.setattr(run, "measured", measured)
    two = [renew.Renewal(name, name, here) for name in ("one", "two")]
    assert renew.renew(two, {}, None, said.append) == 1
    assert tried == ["one"]
    assert said[-1].startswith("Stopped: cannot write one.json: full; other has what was measured. --resume")


def test_a_page_that_cannot_be_written_is_named(here, monkeypatch):
    pytest.importorskip("fused_softmax.bench.show.page", reason="the report's extra is not installed")
    assert fused_softmax(*ARGUMENTS).exit_code == 0
    full_disk(monkeypatch)
    result = fused_softmax("report", "new.json", "-o", "page.html")
    assert (result.exit_code, result.stderr) == (1, f"Error: cannot write page.html: {FULL}\n")
    result = fused_softmax("trace", "-o", "page.html")
    assert (result.exit_code, result.stderr) == (1, f"Error: cannot write page.html: {FULL}\n")
    assert not list(Path().glob(".*"))


@needs_a_full_device
@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        ("env",),
        ("plan", "8", "8"),
        ("plan", "8", "8", "--json"),
        ("profile", "--list"),
        ("profile", *SHAPE, "--provider", "torch"),
        CUSTOM,
        ("bench", "--list"),
        ("bench", "one", *SHAPE, "--provider", "torch", "--iters", "1"),
        ("bench", "host"),
        ("bench", "tune"),
        ("bench", "all", "--out", "new", "--dry-run"),
        ("bench", "compare", "results.json", "results.json"),
        ("bench", "shards", "--list"),
        ("bench", "cold", "--list"),
        ("report", "results.json", "-o", "new.html"),
        ("trace", "--list"),
        ("trace", "-o", "-"),
        ("serve", "--port", "0"),
    ],
    ids=lambda arguments: " ".join(arguments)[:40],
)
def test_a_full_standard_output_is_one_line(monkeypatch, tmp_path, capsys, arguments):
    folder_without_work(monkeypatch, tmp_path)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "on_gpu", lambda: False)
    monkeypatch.setattr(host, "measure_all", lambda device: iter(()))
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as ended:
            main(arguments, "fused-softmax")
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"Error: cannot write standard output: {FULL}\n"


@needs_a_full_device
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_process_with_a_full_standard_output_says_nothing_else(monkeypatch, unbuffered):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    script = "import sys; sys.stdout = open('/dev/full', 'w'); from fused_softmax.cli import main; main(['--version'])"
    process = started("-c", script)
    assert process.communicate(timeout=60) == ("", f"Error: cannot write standard output: {FULL}\n")
    assert process.returncode == 1


def test_a_closed_pipe_is_silent():
    process = started("-m", "fused_softmax", "bench", "--list")
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(60) == 1
