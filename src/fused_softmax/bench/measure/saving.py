"""Saves what was measured. If its file cannot be written, such as on a full disk, it goes among temporary files."""

import tempfile
from pathlib import Path

import click

from fused_softmax.bench.results import record
from fused_softmax.bench.results.record import Run
from fused_softmax.core import files


class NotSaved(click.ClickException):
    """A file could not be written. The message says why, and where its content is instead. run: what it was to have."""

    def __init__(self, message: str, run: Run | None = None):
        super().__init__(message)
        self.run = run


def save(run: Run, path: Path) -> None:
    """Write a run into its file, or raise NotSaved."""
    save_content(record.content_of(run), path, run)


def save_content(content: bytes, path: Path, run: Run | None = None) -> None:
    """Write a file. If that fails, write it among temporary files, and raise NotSaved."""
    try:
        files.write_whole(path, content)
    except OSError as error:
        raise NotSaved(f"cannot write {path}: {error.strerror}; {_elsewhere(content, path)}", run) from None


def _elsewhere(content: bytes, path: Path) -> str:
    try:
        other = Path(tempfile.mkdtemp(prefix="fused-softmax-"), path.name)
        files.write_whole(other, content)
    except OSError:
        return "it could not be written among temporary files either"
    return f"{other} has what was measured"
