"""The files of a command, checked before any work: no output is an input, another output, or a file that is kept."""

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click


class _File(click.Path):
    """A path that is not empty, as an unset variable of a script is: pathlib takes it for the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if str(value) == "":
            self.fail("it is empty: give a name", param, ctx)
        return super().convert(value, param, ctx)


FILE = _File(path_type=Path)
OVERWRITE = "--force overwrites it"
PICTURES = (".png", ".svg", ".pdf")


def ending(*suffixes: str) -> Callable[..., Path | None]:
    """A click callback for an output file: its name must end in one of the suffixes, and it must be writable."""

    def callback(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
        if path is not None:
            if path.suffix not in suffixes:
                known = " or ".join(filter(None, (", ".join(suffixes[:-1]), suffixes[-1])))
                raise click.BadParameter(f"cannot write {path.name or path}: its name must end in {known}", ctx, param)
            require_writable(path)
        return path

    return callback


def drawable(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """A click callback for a picture."""
    missing = [name for name in ("altair", "vl_convert") if importlib.util.find_spec(name) is None]
    if path and missing:
        raise click.BadParameter(f"{missing[0]} is missing: pip install 'fused-softmax[cli]'", ctx, param)
    return ending(*PICTURES)(ctx, param, path)


def folder(ctx: click.Context | None, param: click.Parameter | None, path: Path | None) -> Path | None:
    """A click callback for a folder of outputs."""
    if path is not None:
        if path.exists() and not path.is_dir():
            raise click.UsageError(f"cannot write into {path}: it is not a folder")
        require_writable(path / "file", f"into {path}")
    return path


def text(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """A click callback for a text that a file will have."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise click.BadParameter(f"{ascii(value)[:80]} is not valid Unicode", ctx, param) from None
    return value


def require_writable(path: Path, what: str = "") -> None:
    """UsageError for a file that cannot be written, or is what `what` names it."""
    from fused_softmax.bench.results import record

    try:
        record.require_writable(path)
    except (OSError, ValueError) as error:
        why = (isinstance(error, OSError) and error.strerror) or error
        raise click.UsageError(f"cannot write {what or path}: {why}") from None


def require_outputs(
    outputs: Sequence[Path], inputs: Iterable[Path] = (), *, replace: bool, how: str = OVERWRITE
) -> None:
    """UsageError for an output that is an input or another output, and, unless `replace`, for one that exists.

    how: what replaces it, in words.
    """
    given = list(inputs)
    for at, path in enumerate(outputs):
        if any(same(path, each) for each in given):
            raise click.UsageError(f"{path} is an input, which nothing overwrites: give another name")
        if any(same(path, each) for each in outputs[:at]):
            raise click.UsageError(f"{path} is the file of two outputs: give one of them another name")
    try:
        there = [path for path in outputs if path.exists() or path.is_symlink()]
    except OSError as error:  # of a name that is too long with the suffix of what is kept on Ctrl-C
        raise click.UsageError(f"cannot write {outputs[0].name[:40]}...: {error.strerror}") from None
    if there and not replace:
        raise click.UsageError(f"{there[0]} exists; {how}")


def same(one: Path, other: Path) -> bool:
    """Whether both are one file, by whatever names."""
    try:
        return one.samefile(other)
    except OSError:
        return one.absolute() == other.absolute()
