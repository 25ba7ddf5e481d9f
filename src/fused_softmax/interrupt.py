"""Ctrl-C before a command can answer it in a line of its own. It imports nothing that is not there already."""

import os
from _signal import SIGINT, default_int_handler, getsignal, signal  # `signal` takes milliseconds to import

INTERRUPTED = 130  # the exit code, as of shells


def leave_at_once(code: int) -> None:
    """From now on Ctrl-C ends the process with this code: its work is done, and Python takes down what it imported."""
    if getsignal(SIGINT) is default_int_handler:
        signal(SIGINT, lambda *_: os._exit(code))


class Leaving:
    """A block in which Ctrl-C ends the process at once, in one line: what is imported may swallow KeyboardInterrupt.

    clear: what is written before the line.
    """

    def __init__(self, clear: str = ""):
        self.clear = clear
        self.before = getsignal(SIGINT)

    def __enter__(self) -> None:
        self._answer_by(self._leave)

    def __exit__(self, *_: object) -> None:
        self._answer_by(self.before)

    def _answer_by(self, answer: object) -> None:
        if self.before is not default_int_handler:  # somebody else answers, or a shell has it ignored
            return
        try:  # noqa: SIM105  (contextlib would be imported)
            signal(SIGINT, answer)
        except ValueError:  # of a thread that is not the main one
            pass

    def _leave(self, *_: object) -> None:
        os.write(2, f"{self.clear}interrupted\n".encode())
        os._exit(INTERRUPTED)
