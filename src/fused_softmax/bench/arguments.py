"""What the commands have in common: how they parse their arguments, and the device and console that they use."""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from fused_softmax.bench import cases, operations, record, sweeps
from fused_softmax.bench.committed import COMMITTED
from fused_softmax.bench.providers import PROVIDER_ALIASES
from fused_softmax.plan import H200, Device


def values_of(parse: Callable[[str], Any]) -> Callable[..., list[Any]]:
    """A click callback for a repeatable option: parses every value, and says what is wrong with a bad one."""

    def callback(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> list[Any]:
        parsed: list[Any] = []
        for value in values:
            try:
                item = parse(value)
            except ValueError as error:
                raise click.BadParameter(str(error), ctx, param) from None
            parsed += item if isinstance(item, list) else [item]
        return list(dict.fromkeys(parsed))

    return callback


def value_of(parse: Callable[[str], Any]) -> Callable[..., Any]:
    """A click callback for an option with one value."""

    def callback(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
        return None if value is None else values_of(parse)(ctx, param, (value,))[0]

    return callback


def parse_dtypes(text: str) -> list[str]:
    return [cases.parse_dtype(part) for part in text.split(",")]


def parse_providers(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",")]
    known = operations.provider_names()
    for name in names:
        if name not in known:
            raise ValueError(f"unknown provider {name!r}; known: {', '.join(known)}")
    return names


def parse_sweep(text: str) -> str:
    if text not in sweeps.SWEEPS:
        raise ValueError(f"unknown sweep {text!r}; known: {', '.join(sweeps.SWEEPS)}")
    return text


def parse_operations(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in operations.OPERATIONS:
            raise ValueError(f"unknown operation {name!r}; known: {', '.join(operations.OPERATIONS)}")
    return names


def parse_operation(text: str) -> str:
    (name,) = parse_operations(text)
    return name


def parse_tunable(text: str) -> list[str]:
    names = parse_operations(text)
    for name in names:
        if name not in ("softmax", "softmax_backward"):
            raise ValueError(f"{name} is not tuned; softmax and softmax_backward are")
    return names


def parse_committed(text: str) -> list[str]:
    names = [part.strip().removesuffix(".json") for part in text.split(",")]
    for name in names:
        if name not in COMMITTED:
            raise ValueError(f"no committed file is named {name!r}; these are: {', '.join(COMMITTED)}")
    return names


def parse_backend(text: str) -> str:
    (name,) = parse_providers(PROVIDER_ALIASES.get(text, text))
    return name


def parse_backends(text: str) -> list[str]:
    return [parse_backend(part.strip()) for part in text.split(",")]


def writable(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Fails before anything is measured if the file cannot be written."""
    try:
        if path:
            record.require_writable(path)
    except OSError as error:
        raise click.BadParameter(f"cannot write {path}: {error.strerror or error}", ctx, param) from None
    return path


def drawable(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    if path and path.suffix not in (".png", ".svg", ".pdf"):
        raise click.BadParameter(f"cannot draw {path.name}: its name must end in .png, .svg or .pdf", ctx, param)
    if path and importlib.util.find_spec("matplotlib") is None:
        raise click.BadParameter("matplotlib is missing: pip install 'fused-softmax[cli]'", ctx, param)
    return writable(ctx, param, path)


FILE = click.Path(path_type=Path)
FOLDER = click.Path(path_type=Path, file_okay=False)


def read_results(path: Path) -> record.Run:
    """The results that `bench --out` wrote. A file that cannot be read is a usage error, exit code 2."""
    try:
        return record.read(path)
    except OSError as error:
        raise click.UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def find_device() -> tuple[Device, bool]:
    """The GPU and True, or without a GPU the built-in H200 and False."""
    import torch

    if not torch.cuda.is_available():
        return H200, False
    from fused_softmax.device import device_of

    return device_of(0), True


def new_console() -> Console:
    """A console that does not fold tables when the output is a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else 1000)


def print_facts(facts: dict[str, Any], as_json: bool) -> None:
    from fused_softmax.bench import report

    if as_json:
        click.echo(json.dumps(facts, indent=1))
    else:
        report.print_facts(facts, Console())
