"""The line on a terminal while a first call compiles: when it is there, and that it goes."""

import contextlib
import io
import time
from types import SimpleNamespace

import pytest

from fused_softmax.core import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    own = SimpleNamespace(stderr=Terminal())  # pytest puts its own into sys
    monkeypatch.setattr(progress, "sys", own)
    monkeypatch.setattr(progress, "_AFTER", 0.2)
    monkeypatch.setattr(progress, "_WANTED", True)
    monkeypatch.setattr(progress, "_last", 0.0)
    monkeypatch.delenv("TERM", raising=False)
    return own.stderr


def compile_for(seconds, name="_part_loss"):
    with progress.compiling(name):
        time.sleep(seconds)


def test_what_takes_long_is_named_and_then_gone(terminal):
    compile_for(0.5)
    line, end = terminal.getvalue().split("\r\x1b[K")[1:]
    assert line == "fused_softmax: a first call compiles _part_loss (FUSED_SOFTMAX_PROGRESS=0 hides this)"
    assert end == ""


def test_what_is_quick_is_not(terminal):
    compile_for(0.0)
    time.sleep(0.4)
    assert terminal.getvalue() == ""


def test_several_that_are_quick_take_long_together(terminal):
    for _ in range(6):
        compile_for(0.08)
    assert "compiles _part_loss" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_it_goes_when_a_kernel_does_not_compile(terminal):
    with contextlib.suppress(RuntimeError), progress.compiling("_part_loss"):
        time.sleep(0.4)
        raise RuntimeError
    assert terminal.getvalue().endswith("\r\x1b[K")


@pytest.mark.parametrize("why", ["not wanted", "a file", "a dumb terminal", "none", "closed"])
def test_where_nobody_would_see_it_nothing_is_written(terminal, monkeypatch, why):
    if why == "not wanted":
        monkeypatch.setattr(progress, "_WANTED", False)
    elif why == "a dumb terminal":
        monkeypatch.setenv("TERM", "dumb")
    elif why == "closed":
        terminal.close()
    else:
        progress.sys.stderr = io.StringIO() if why == "a file" else None
    stream = progress.sys.stderr
    compile_for(0.4)
    assert stream is None or stream.closed or stream.getvalue() == ""
