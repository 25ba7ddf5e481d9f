"""`fused-softmax bench [SWEEP]...`: which cases its arguments ask for, by which providers, and with what effort."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from fused_softmax.bench import cases, operations, record, sweeps
from fused_softmax.bench.arguments import (
    FILE,
    drawable,
    new_console,
    parse_dtypes,
    parse_operations,
    parse_providers,
    parse_sweep,
    value_of,
    values_of,
    writable,
)
from fused_softmax.bench.resume import CannotResume

if TYPE_CHECKING:
    from fused_softmax.bench.run import Asked


class _Keeping(click.Command):
    """A command that records its arguments as they were typed."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # A resumed run is still the same run.
        ctx.meta["typed"] = [argument for argument in args if argument != "--resume"]
        return super().parse_args(ctx, args)


@click.command(cls=_Keeping)
@click.argument("names_of_sweeps", metavar="[SWEEP]...", nargs=-1, callback=values_of(parse_sweep))
@click.option(
    "--op",
    "asked_operations",
    metavar="NAME",
    multiple=True,
    callback=values_of(parse_operations),
    help="Measure only these of the sweep's operations; with custom, any operation.",
)
@click.option(
    "--shape",
    "shapes",
    metavar="ROWSxCOLS",
    multiple=True,
    callback=values_of(cases.parse_shapes),
    help="One shape. Sweeps that take other dims accept 64x4096x512:1, which runs along dim 1.",
)
@click.option(
    "--rows",
    metavar="N",
    multiple=True,
    callback=values_of(cases.parse_sizes),
    help="Rows; with --cols, every pair is measured.",
)
@click.option(
    "--cols",
    metavar="N|START:STOP:STEP",
    multiple=True,
    callback=values_of(cases.parse_sizes),
    help="Columns; STOP is excluded. Without --rows, there are as many rows as hold --elements.",
)
@click.option(
    "--elements", metavar="N", callback=value_of(cases.parse_size), help="Elements of a tensor.  [default: 128Mi]"
)
@click.option(
    "--dtype",
    "dtypes",
    metavar="NAME",
    multiple=True,
    callback=values_of(parse_dtypes),
    help="Default: the sweep's dtypes.",
)
@click.option(
    "--provider",
    "names",
    metavar="NAME",
    multiple=True,
    callback=values_of(parse_providers),
    help="Default: all providers.",
)
@click.option("--quick", is_flag=True, help="Measure a short, representative set.")
@click.option("--verify-only", is_flag=True, help="Check against float64 and time nothing.")
@click.option("--reps", type=click.IntRange(1, 100), help="Rounds in which the providers take turns.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the inputs.")
@click.option("--out", type=FILE, callback=writable, help="File for the results, as JSON.")
@click.option(
    "--resume",
    is_flag=True,
    help="Measure what --out does not contain yet. Refused if GPU, version, commit or effort differ.",
)
@click.option(
    "--plot",
    type=FILE,
    callback=drawable,
    help="Draw GB/s over the columns, or over what varies instead, as .png, .svg or .pdf.",
)
@click.pass_context
def sweep_command(ctx: click.Context, /, **options: Any) -> None:
    """Check every provider against float64, then time it: GB/s, and the ratio to a plain kernel that moves as much.

    A sweep names the operations to measure, and their shapes and dtypes unless options give others. Without one, the
    tutorial's sweep runs. Repeat an option or separate its values by commas. Ctrl-C keeps what was measured.
    """
    from fused_softmax.bench import run

    files = {name: options.pop(name) for name in ("out", "plot", "resume")}
    if files["resume"] and not files["out"]:
        raise click.UsageError("--resume continues the file that --out names: give --out too")
    try:
        code = run.bench(_asked(ctx.meta["typed"], options), new_console(), Console(stderr=True), **files)
    except CannotResume as error:
        raise click.UsageError(str(error)) from None
    ctx.exit(code)


def asked(arguments: Sequence[str], out: str) -> "Asked":
    """The measurement that arguments of `fused-softmax bench` ask for. out: the name of the file that is to hold it."""
    ctx = sweep_command.make_context("bench", list(arguments))
    options = {name: value for name, value in ctx.params.items() if name not in ("out", "plot", "resume")}
    return _asked([*ctx.meta["typed"], "--out", out], options)


def _asked(typed: list[str], options: dict[str, Any]) -> "Asked":
    from fused_softmax.bench.run import Asked

    if options["elements"] and options["rows"]:
        raise click.UsageError("--elements takes the place of --rows: give only one of them")
    named = options.pop("names_of_sweeps") or [sweeps.TUTORIAL]
    given = {name: options.pop(name) for name in ("shapes", "rows", "cols", "elements", "dtypes")}
    given["operations"] = options.pop("asked_operations")
    try:
        found = [case for name in named for case in sweeps.build(name, **given, quick=options["quick"])]
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    chosen = cases.unique(found)
    known = operations.provider_names(dict.fromkeys(case.operation for case in chosen))
    if strangers := [name for name in options["names"] if name not in known]:
        raise click.UsageError(f"{' '.join(named)} has no provider {strangers[0]!r}; it has {', '.join(known)}")
    standing = not (given["shapes"] or given["rows"] or given["elements"])
    return Asked(record.command_line(["bench", *typed]), chosen, standing=standing, **options)
