"""What a terminal shows while a command works."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fused_softmax.interrupt import Leaving

if TYPE_CHECKING:
    from rich.console import Console


def _on_terminal() -> bool:
    """Whether stderr is one; it is None where it is closed."""
    return sys.stderr is not None and sys.stderr.isatty()


def spinner(console: "Console") -> str:
    """The name of the spinner that the console can show."""
    return "dots" if console.encoding.startswith("utf") else "line"


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
    console = Console(stderr=True)
    options: dict[str, Any] = {"transient": True, "redirect_stdout": False, "redirect_stderr": False}
    with Live(Spinner(spinner(console), what), console=console, **options) as live:

        def say(text: str) -> None:
            live.stop()
            click.echo(text)
            live.start()

        yield say


EVERY = 10  # seconds between the lines of what is no terminal


def counted(what: str, paths: Sequence[Path]) -> Iterator[Path]:
    """The paths one after another, with a bar on stderr; where that is no terminal, with a line now and then."""
    if not _on_terminal():
        last = time.monotonic()
        for done, path in enumerate(paths):
            if time.monotonic() - last > EVERY:
                last = time.monotonic()
                click.echo(f"{what}: {done} of {len(paths)}", err=True)
            yield path
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    options: dict[str, Any] = {"transient": True, "redirect_stdout": False, "redirect_stderr": False}
    with Progress(*columns, console=Console(stderr=True), **options) as progress:
        task = progress.add_task(what, total=len(paths))
        for path in paths:
            progress.update(task, description=f"{what}: {path.name}")
            yield path
            progress.advance(task)


@contextmanager
def importing(what: str = "PyTorch") -> Iterator[None]:
    """The spinner of an import, during which Ctrl-C ends the process at once: what is imported may swallow it."""
    end_of_spinner = "\r\x1b[2K\x1b[?25h" if _on_terminal() else ""  # its line is cleared, and the cursor shown
    with busy(f"importing {what}"), Leaving(end_of_spinner):
        yield
