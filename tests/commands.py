"""The command as its users run it: in this process, or in one of its own; and a folder to run it in."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from fused_softmax.bench.measure import cold, host, measure, one, steps, tune
from fused_softmax.bench.results import record
from fused_softmax.cli import main
from fused_softmax.core import files

ROOT = Path(__file__).parents[1]
SHAPE = ("--rows", "8", "--cols", "100")
CUSTOM = ("bench", "custom", "--shape", "8x100", "--provider", "torch")


def fused_softmax(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="fused-softmax")


def started(*arguments):
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_INTERPRET")} | {
        "PYTHONPATH": str(ROOT / "src")
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # Ctrl-C is ignored below a shell's background job.
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen([sys.executable, *arguments], env=environment, preexec_fn=heeds, **pipes)


def folder_without_work(monkeypatch, tmp_path):
    """Enter a folder with files of every kind, in which a command that begins its work fails the test."""
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
    for name in ("pipe.json", "pipe.npy", "piped.partial.json"):  # without a writer
        os.mkfifo(name)
    monkeypatch.setenv("FUSED_SOFTMAX_PLANS", "none.json")
    monkeypatch.delenv("RANK", raising=False)
    work = [
        (measure, "measure"), (one, "time_calls"), (one, "call_once"), (host, "measure"), (cold, "measure"),
        (steps, "measure"), (tune, "tune"), (files, "write_whole"),
    ]  # fmt: skip
    for module, name in work:
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("worked"))
    return tmp_path
