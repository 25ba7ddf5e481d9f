"""A line on the terminal if first calls compile for longer than a second. It disappears when the kernel is done."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, Timer

_AFTER = 1.0  # seconds
_WANTED = os.environ.get("FUSED_SOFTMAX_PROGRESS") != "0" and os.environ.get("LOCAL_RANK", "0") == "0"
_CLEAR = "\r\x1b[K"

_since = _last = 0.0  # when the present series of compilations began, and when its latest one ended


@contextmanager
def compiling(name: str) -> Iterator[None]:
    """Put this around what may compile a kernel, one thread at a time. If stderr is no terminal, it writes nothing."""
    global _since, _last
    if not _WANTED or not _is_terminal():
        yield
        return
    now = time.monotonic()
    if now - _last > _AFTER:
        _since = now
    lock, done, told = Lock(), False, False

    def tell() -> None:
        nonlocal told
        with lock:
            if not done:
                told = True
                _write(f"{_CLEAR}fused_softmax: a first call compiles {name} (FUSED_SOFTMAX_PROGRESS=0 hides this)")

    timer = Timer(max(0.0, _AFTER - (now - _since)), tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with lock:
            done = True
        if told:
            _write(_CLEAR)
        _last = time.monotonic()


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):  # None, or closed
        return False


def _write(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):  # the terminal is gone by now
        pass
