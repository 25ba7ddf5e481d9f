"""What the commands have in common: their options, how they parse them, and the device and console that they use."""

import json
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from fused_softmax.bench import cases, catalog
from fused_softmax.bench.commands.front import Option, Whole
from fused_softmax.bench.commands.warm import without_options
from fused_softmax.bench.show.progress import importing
from fused_softmax.interrupt import INTERRUPTED

if TYPE_CHECKING:
    from rich.console import Console

    from fused_softmax.bench.results.record import Run
    from fused_softmax.core.plan import Device


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


def each_value_of(parse: Callable[[str], Any]) -> Callable[..., list[Any]]:
    """A click callback for an argument with several values, of which two may be equal."""
    one = value_of(parse)
    return lambda ctx, param, values: [one(ctx, param, value) for value in values]


def listed(parse: Callable[[str], str]) -> Callable[[str], list[str]]:
    """A parser of values that are separated by commas."""
    return lambda text: [parse(part) for part in text.split(",")]


parse_dtypes = listed(cases.parse_dtype)
parse_operation = partial(cases.find, "operation", known=catalog.PEERS)
parse_operations = listed(parse_operation)


def parse_provider(text: str) -> str:
    return cases.find("provider", text, catalog.provider_names(), catalog.PROVIDER_ALIASES)


parse_providers = listed(parse_provider)


def parse_sweep(text: str) -> str:
    from fused_softmax.bench.measure import sweeps

    return cases.find("sweep", text, sweeps.SWEEPS)


TUNABLE = ("softmax", "softmax_backward")


def parse_tunable(text: str) -> list[str]:
    names = parse_operations(text)
    for name in names:
        if name not in TUNABLE:
            raise ValueError(f"{name} is not tuned; {' and '.join(TUNABLE)} are")
    return names


def parse_committed(text: str) -> list[str]:
    from fused_softmax.bench.committed import COMMITTED

    names = [part.strip().removesuffix(".json") for part in text.split(",")]
    for name in names:
        if name not in COMMITTED:
            near = cases.near(name, COMMITTED)
            raise ValueError(f"no committed file is named {name!r}{near}; --dry-run lists them all")
    return names


def also(names: Iterable[str]) -> dict[str, str]:
    """Each of the names with its other spellings, in words."""
    spelled: dict[str, list[str]] = {}
    for alias, name in (*cases.ALIASES.items(), *catalog.PROVIDER_ALIASES.items()):
        spelled.setdefault(name, []).append(alias)
    return {name: f"also {', '.join(spelled[name])}" if name in spelled else "" for name in names}


def facts_of_names(operations: Collection[str] = tuple(catalog.PEERS)) -> dict[str, dict[str, str]]:
    """The names that the options take, each with a word on it, by kind. operations: those that may be chosen."""
    always = ", ".join(catalog.provider_names(["softmax_dim"]))
    return {
        "Operations, and their providers beside " + always: {
            name: ", ".join(catalog.PEERS[name]) for name in operations
        },
        "Providers": also(catalog.provider_names(operations)),
        "Dtypes": also(cases.ITEMSIZE),
    }


def columns(title: str, lines: Mapping[str, str]) -> str:
    """One line for each entry under a title. \\b keeps click from joining the lines of an epilog."""
    width = max(map(len, lines))
    return "\n".join(("\b", f"{title}:", *(f"  {name:{width}}  {about}".rstrip() for name, about in lines.items())))


class Listing(click.Command):
    """A command whose help ends with the names that its options take."""

    def facts(self) -> dict[str, dict[str, str]]:
        return facts_of_names()

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        for title, lines in self.facts().items():
            formatter.write_paragraph()
            formatter.write_text(columns(title, lines))


class OfRows(Listing):
    """A command whose shape is --rows and --cols."""

    def facts(self) -> dict[str, dict[str, str]]:
        from fused_softmax.bench.measure.sweeps import ndim_of

        return facts_of_names([name for name in catalog.PEERS if ndim_of(name) in (2, None)])


class Recorded(Listing):
    """A command that records its arguments as they were typed: a run that continues or replaces another is the same."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["typed"] = [each for each in without_options(args) if each not in ("--resume", "--force")]
        return super().parse_args(ctx, args)


def _list(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        found = ctx.command.facts() if isinstance(ctx.command, Listing) else facts_of_names()
        click.echo("\n\n".join(columns(title, lines).removeprefix("\b\n") for title, lines in found.items()))
        ctx.exit()


Decorator = Callable[[Any], Any]

list_option: Decorator = click.option(
    "--list", is_flag=True, is_eager=True, expose_value=False, callback=_list, help="List the names to choose from."
)
json_option: Decorator = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
force_option: Decorator = click.option("--force", is_flag=True, help="Overwrite a file that exists.")
operation_option: Decorator = click.option(
    "--op", "operation", metavar="NAME", default="softmax", show_default=True, callback=value_of(parse_operation),
    help="Operation; --list names them.",
)  # fmt: skip


def dtype_option(default: str | None = cases.DTYPE, help: str = f"{', '.join(cases.ITEMSIZE)}.") -> Decorator:
    return click.option(
        "--dtype", metavar="NAME", default=default, show_default=default is not None,
        callback=value_of(cases.parse_dtype), help=help,
    )  # fmt: skip


def dtypes_option(default: str) -> Decorator:
    return click.option(
        "--dtype", "dtypes", metavar="NAME", multiple=True, callback=values_of(parse_dtypes),
        help=f"{', '.join(cases.ITEMSIZE)}.  [default: {default}]",
    )  # fmt: skip


def providers_option(help: str, parse: Callable[[str], list[str]] = parse_providers) -> Decorator:
    """--provider, repeated or with commas; --backend is its other spelling."""
    return click.option(
        "--provider", "--backend", "names", cls=Option, metavar="NAME", multiple=True,
        callback=values_of(parse), help=help,
    )  # fmt: skip


def effort_options(quick: str) -> Decorator:
    """How long a command measures. quick: what --quick measures."""
    options = (
        click.option("--quick", is_flag=True, help=f"Measure {quick}."),
        click.option("--verify-only", is_flag=True, help="Check against float64 and time nothing."),
        click.option("--reps", type=Whole(1, 100), help="Rounds in which the providers take turns."),
        click.option("--seed", type=Whole(0, 2**63 - 1), default=0, show_default=True, help="Seed of the inputs."),
    )
    return lambda command: reduce(lambda command, option: option(command), reversed(options), command)


def provider_option(default: str) -> Decorator:
    return click.option(
        "--provider", "--backend", "provider", cls=Option, metavar="NAME", default=default, show_default=True,
        callback=value_of(parse_provider), help="Provider; --list names them.",
    )  # fmt: skip


def shape_options(*, required: bool = True) -> Decorator:
    """--rows and --cols of one shape; --M and --N are their other spellings."""
    size = partial(click.option, cls=Option, metavar="N", required=required, callback=value_of(cases.parse_size))
    rows, cols = size("--rows", "--M", "n_rows", help="Rows."), size("--cols", "--N", "n_cols", help="Columns.")
    return lambda command: rows(cols(command))


def out_option(suffix: str, what: str, *, required: bool = False, default: str = "") -> Decorator:
    from fused_softmax.bench.commands.paths import FILE, ending

    text = f"File for {what} ({suffix})." + (f"  [default: {default}]" if default else "")
    return click.option("-o", "--out", type=FILE, required=required, callback=ending(suffix), help=text)


def require_known(names: Iterable[str], operations: Iterable[str], what: str) -> None:
    """UsageError for a provider that none of the operations has. what: has the operations, in words."""
    known = catalog.provider_names(dict.fromkeys(operations))
    if strangers := [name for name in names if name not in known]:
        raise click.UsageError(f"{what} has no provider {strangers[0]!r}; it has {', '.join(known)}")


def case_of(n_rows: int, n_cols: int, dtype: str, operation: str) -> cases.Case:
    """The case of one shape, or a UsageError for an operation that takes shapes of other dims."""
    from fused_softmax.bench.measure import sweeps

    if (ndim := sweeps.ndim_of(operation)) not in (2, None):
        other = f"`fused-softmax bench custom --op {operation} --shape` measures it"
        raise click.UsageError(f"{operation} takes shapes of {ndim} dims, not of rows and columns; {other}")
    return cases.Case((n_rows, n_cols), dtype, operation)


def read_results(path: Path) -> "Run":
    """The results that `bench --out` wrote. A file that cannot be read is a usage error, exit code 2."""
    from fused_softmax.bench.results import record

    try:
        return record.read(path)
    except OSError as error:
        raise click.UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def say_interrupted(ctx: click.Context, what: str = "") -> NoReturn:
    """End a command that Ctrl-C stopped. what: was kept, or was measured until then."""
    click.echo(": ".join(filter(None, ("interrupted", what))), err=True)
    ctx.exit(INTERRUPTED)


def find_device() -> "tuple[Device, bool]":
    """The GPU and True, or without a GPU the built-in H200 and False."""
    with importing():
        import torch

        from fused_softmax.core.plan import H200

        if not torch.cuda.is_available():
            return H200, False
        from fused_softmax.core.device import device_of

        return device_of(0), True


def new_console() -> "Console":
    """A console that does not fold tables when the output is a file or a pipe."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 1000)


def print_facts(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(facts, indent=1))
        return
    from rich.console import Console

    from fused_softmax.bench.show import report

    report.print_facts(facts, Console())
