"""What a terminal shows while a command works."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from fused_softmax.interrupt import Leaving


def _on_terminal() -> bool:
    """Whether stderr is one; it is None where it is closed."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def busy(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr, where that is a terminal, until the block ends. Yields what prints a line beside it."""
    if not _on_terminal():
        yield click.echo
        return
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner

    # rich would send what is printed to stdout to stderr.
    options: dict[str, Any] = {"transient": True, "redirect_stdout": False, "redirect_stderr": False}
    with Live(Spinner("dots", what), console=Console(stderr=True), **options) as live:

        def say(text: str) -> None:
            live.stop()
            click.echo(text)
            live.start()

        yield say


@contextmanager
def importing(what: str = "PyTorch") -> Iterator[None]:
    """The spinner of an import, during which Ctrl-C ends the process at once: what is imported may swallow it."""
    end_of_spinner = "\r\x1b[2K\x1b[?25h" if _on_terminal() else ""  # its line is cleared, and the cursor shown
    with busy(f"importing {what}"), Leaving(end_of_spinner):
        yield
