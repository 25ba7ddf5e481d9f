"""On a terminal a command shows within a second that it works, whatever it imports first."""

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, SHAPE, folder_without_work

from fused_softmax.bench.show import progress

SLOW = [
    ("env",),
    ("plan", "8", "8"),
    ("serve", "--port", "0"),
    ("trace", "--list"),
    ("profile", *SHAPE),
    ("bench", "--shape", "8x8"),
    ("bench", "one", *SHAPE),
    ("bench", "host"),
    ("bench", "tune", "--print-only"),
    ("bench", "all", "--out", ".", "--dry-run"),
    ("bench", "compare", "results.json", "results.json"),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("arguments", SLOW, ids=" ".join)
def test_an_import_of_pytorch_is_shown_on_a_terminal(monkeypatch, tmp_path, arguments):
    folder_without_work(monkeypatch, tmp_path)
    screen, terminal = pty.openpty()
    command = [sys.executable, "-m", "fused_softmax", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "TERM": "xterm"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=terminal, env=environment) as process:
        os.close(terminal)
        said = b""
        try:
            while b"importing PyTorch" not in said:
                said += os.read(screen, 4096)  # raises at the end of the process
        finally:
            process.kill()
            os.close(screen)


PATHS = [Path("some/first.json"), Path("some/second.json")]


def test_files_are_counted_on_a_terminal_by_a_bar_with_their_names(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress.sys, "stderr", screen := Terminal())
    assert list(progress.counted("drawing", PATHS)) == PATHS
    assert "drawing: second.json" in screen.getvalue()


def test_files_are_counted_elsewhere_by_a_line_now_and_then(monkeypatch, capsys):
    assert list(progress.counted("drawing", PATHS)) == PATHS
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(progress, "EVERY", -1)
    assert list(progress.counted("drawing", PATHS)) == PATHS
    assert capsys.readouterr() == ("", "drawing: 0 of 2\ndrawing: 1 of 2\n")
