"""The commands of `fused-softmax bench`. They wire the parts together and compute nothing themselves."""

import math
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fused_softmax.bench import cases, catalog
from fused_softmax.bench.commands import cold, paths, steps
from fused_softmax.bench.commands.arguments import (
    TUNABLE,
    Listing,
    OfRows,
    also,
    case_of,
    columns,
    dtype_option,
    dtypes_option,
    find_device,
    force_option,
    json_option,
    list_option,
    new_console,
    operation_option,
    out_option,
    parse_committed,
    parse_tunable,
    print_facts,
    provider_option,
    providers_option,
    read_results,
    require_known,
    say_interrupted,
    shape_options,
    value_of,
    values_of,
)
from fused_softmax.bench.commands.front import Whole
from fused_softmax.bench.commands.shards import shards
from fused_softmax.bench.commands.sweep import asked, sweep_command
from fused_softmax.bench.commands.warm import compile_ahead, measures, warm_options
from fused_softmax.bench.show.progress import busy, importing
from fused_softmax.core.described import number_of

if TYPE_CHECKING:
    from fused_softmax.bench.measure.cold import Asked as AskedCold
    from fused_softmax.bench.measure.run import Asked
    from fused_softmax.bench.measure.steps import Asked as AskedSteps
    from fused_softmax.bench.renew import Renewal
    from fused_softmax.bench.results.record import Point

MOST_CALLS = 100_000  # of `bench one`: more take minutes, and their average says no more


class _Bench(click.Group):
    """A group whose first word need not name a command. If it does not, all words belong to the measurement."""

    def __init__(self, sweep: click.Command, **settings: Any):
        super().__init__(help=sweep.help, **settings)
        self.sweep = sweep

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args and args[0] in self.commands:
            return super().make_context(info_name, args, parent, **extra)
        return self.sweep.make_context(info_name, args, parent, **extra)


bench = _Bench(sweep_command, name="bench", short_help="Compare implementations with float64, and time them.")

bench.add_command(shards)
bench.add_command(cold.cold)
bench.add_command(steps.step)


@bench.command(cls=OfRows)
@shape_options()
@dtype_option()
@operation_option
@provider_option(catalog.OWN)
@click.option(
    "--warmup",
    metavar="N",
    type=Whole(0, MOST_CALLS),
    default=10,
    show_default=True,
    help="Calls before the timed ones.",
)
@click.option(
    "--iters",
    metavar="N",
    type=Whole(1, MOST_CALLS),
    default=100,
    show_default=True,
    help="Timed calls, each timed alone.",
)
@click.option("--profile-only", is_flag=True, help="Make one call and print no figure, for a profiler.")
@json_option
@list_option
@click.pass_context
def one(
    ctx: click.Context,
    n_rows: int,
    n_cols: int,
    dtype: str,
    operation: str,
    provider: str,
    warmup: int,
    iters: int,
    profile_only: bool,
    as_json: bool,
) -> None:
    """Time one provider at one shape: the average of the middle 80 % of its calls.

    It says what is timed: without a GPU, this package calls torch's operations. Ctrl-C ends the calls, and prints the
    average of those that were made.
    """
    case = case_of(n_rows, n_cols, dtype, operation)
    require_known([provider], [operation], operation)
    with importing():
        from fused_softmax.bench.measure import one as single

    try:
        with busy(f"{provider} at {case}"):
            if not profile_only:
                found = single.time_calls(case, provider, warmup, iters)
            else:
                single.call_once(case, provider)
    except single.NoFigure as error:
        raise click.ClickException(str(error)) from None
    if profile_only:
        click.echo(f"{provider}: one call at {case}, by {single.path_of(case, provider)}", err=as_json)
        return
    print_facts(found.facts(), as_json)
    if len(found.seconds) < iters:
        say_interrupted(ctx, f"the average is of {number_of(len(found.seconds), 'call')}")


@bench.command(short_help="Time what one small eager call costs the CPU, beside torch's own.")
@out_option(".json", "the rows")
@force_option
@click.pass_context
def host(ctx: click.Context, out: Path | None, force: bool) -> None:
    """Time what one small eager call costs the CPU, ours beside torch's own for the same result, in under a minute.

    A result that differs from torch's has no figure, and the exit status is then 1. Ctrl-C keeps the rows that were
    measured.
    """
    from fused_softmax.bench.measure import saving
    from fused_softmax.bench.results import record

    if out:
        paths.require_outputs([out, record.partial_path(out)], replace=force)
    _, gpu = find_device()
    with importing():
        from fused_softmax.bench.measure import host as hosts
        from fused_softmax.bench.measure import run

    console = new_console()
    if not gpu:
        console.print("No GPU: these are times of calls on the CPU, where this package takes torch's path.")
    arguments = record.command_line(["bench", "host", *(["--out", str(out)] if out else [])])
    rows: list[hosts.Row] = []
    environment, stopped = {}, False
    try:
        if out:  # before the rows, for whoever stops it then has none to lose
            environment = run.environment()
        with busy("timing calls"):
            for row in hosts.measure_all("cuda" if gpu else "cpu"):
                rows.append(row)
    except KeyboardInterrupt:
        stopped = True
    where = record.partial_path(out) if out and stopped else out
    saves = where is not None and bool(rows or not stopped)
    try:
        if where and saves:
            saving.save_content(hosts.text(rows, environment, arguments).encode(), where)
    finally:  # printed last: standard output may be full too
        if rows or not stopped:
            hosts.print_rows(rows, console)
    if saves:
        click.echo(f"wrote {where}")
    if out and not stopped:
        record.partial_path(out).unlink(missing_ok=True)
    if stopped:
        say_interrupted(ctx, f"{number_of(len(rows), 'row was', 'rows were')} measured")
    ctx.exit(int(any(row.wrong for row in rows)))


@bench.command("all", short_help="Measure all committed results files again, or say which are current.")
@click.option(
    "-o", "--out", "folder", type=paths.FILE, callback=paths.folder,
    help="Folder of the files: benchmarks/results in this project.  [required to measure]",
)  # fmt: skip
@click.option(
    "--only", "names", metavar="NAME", multiple=True, callback=values_of(parse_committed), help="Only these files."
)
@click.option("--resume", is_flag=True, help="Keep what is current, and continue what was stopped.")
@click.option("--force", is_flag=True, help="Measure everything anew.")
@click.option("--dry-run", is_flag=True, help="Say which files are current, and measure nothing. Needs no GPU.")
@warm_options
@click.pass_context
def all_command(
    ctx: click.Context, folder: Path | None, names: list[str], resume: bool, force: bool, dry_run: bool, warm: bool,
    device: str | None,
) -> None:  # fmt: skip
    """Measure all committed results files of this GPU again, one after another, with the kernels of this source.

    A file is current if these kernels made all its points, on this GPU, with this torch and Triton. Ctrl-C keeps what
    was measured. Exits with 1 if a file could not be measured, or has a wrong result.
    """
    if resume and force:
        raise click.UsageError("--resume keeps what is current and --force keeps nothing: give only one of them")
    if dry_run and warm:
        raise click.UsageError("--dry-run begins nothing and --warm compiles: give only one of them")
    measured = measures(warm, device)
    if folder is None:
        if measured:
            (param,) = [each for each in ctx.command.params if each.name == "folder"]
            raise click.MissingParameter(ctx=ctx, param=param)
        folder = Path()  # which nothing is written to
    from rich.console import Console

    from fused_softmax.bench.committed import COMMITTED, GPUS, of_gpu

    with importing():
        from fused_softmax.bench import renew
        from fused_softmax.bench.measure import measure, run
        from fused_softmax.bench.results import record

    environment = run.environment()
    here = (environment["gpu"] or {}).get("name", "")
    chosen = [
        renew.Renewal(name, asked_of(COMMITTED[name].arguments, f"{name}.json"), folder)
        for name in (each for each in COMMITTED if each in (names or of_gpu(here or GPUS.get(device or "", ""))))
    ]
    if not measured:
        ctx.exit(int(not compile_ahead(_sweeps(chosen), device, measured)))
    if dry_run:
        if not environment["gpu"]:
            click.echo("No GPU: of each file the kernels are compared, and neither its GPU nor its versions.")
        for renewal in chosen:
            click.echo(f"{renewal.name}: {renewal.state(environment)}")
        return
    there = [path.name for each in chosen for path in (each.out, record.partial_path(each.out)) if path.exists()]
    if there and not resume and not force:
        more = f" and {len(there) - 1} more" if there[1:] else ""
        raise click.UsageError(
            f"{there[0]}{more} would be overwritten: --resume keeps what is current, --force measures all anew"
        )
    if not measure.on_gpu():
        raise click.ClickException("no GPU: nothing was measured; --dry-run says which files are current")
    for gpu in sorted({GPUS.get(each.name.partition("_")[0], here) for each in chosen} - {here}):
        click.echo(f"note: files are named after an {gpu}, and this is an {here}", err=True)
    for renewal in chosen:
        paths.require_writable(renewal.out, f"into {folder}")
    if warm and (left := _sweeps(each for each in chosen if force or each.state(environment).word != "current")):
        compile_ahead(left, device, measured)
    ctx.exit(renew.renew(chosen, environment, Console(stderr=True), click.echo, force))


def _sweeps(renewals: "Iterable[Renewal]") -> "list[Asked]":
    """Those of the measurements that `--warm` compiles for: neither first calls nor steps of training."""
    from fused_softmax.bench.measure.run import Asked

    return [each.asked for each in renewals if isinstance(each.asked, Asked)]


def asked_of(arguments: str, out: str) -> "Asked | AskedCold | AskedSteps":
    """The measurement that a row of committed results names. out: the name of the file that is to hold it."""
    first, *rest = words = shlex.split(arguments)
    if first == cold.cold.name:
        return cold.asked(rest, out)
    return steps.asked(rest, out) if first == steps.step.name else asked(words, out)


class _Percent(click.FloatRange):
    name = "number"  # in errors, where click's own is a float range

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return found


class _Compared(Listing):
    def facts(self) -> dict[str, dict[str, str]]:
        return {"Providers": also(catalog.provider_names())}


@bench.command(cls=_Compared)
@click.argument("before", type=paths.FILE)
@click.argument("after", type=paths.FILE)
@click.option(
    "--by",
    type=click.Choice(["time", "ratio"]),
    default="time",
    show_default=True,
    help="ratio: compare times in units of each run's own ceiling.",
)
@click.option("--clock", type=click.Choice(["kernel", "call"]), help="Default: kernel where both have it, else call.")
@click.option(
    "--tolerance",
    type=_Percent(0),
    default=2,
    show_default=True,
    help="Percent by which a median must change to count.",
)
@providers_option("Only these.")
@click.option("--all", "everything", is_flag=True, help="Also show what stayed the same.")
@list_option
@click.pass_context
def compare(
    ctx: click.Context, before: Path, after: Path, names: list[str], everything: bool, tolerance: float, **options: Any
) -> None:
    """Say what got faster or slower between two results, beyond the spread of both.

    Exits with 0 if nothing got slower, 1 if something got slower or lost its figure, 2 if nothing can be compared.
    """

    def wanted(point: "Point") -> bool:
        return not names or point.provider in names

    old, new = (read_results(path) for path in (before, after))
    with importing():
        from fused_softmax.bench.results import compare as comparing
        from fused_softmax.bench.show import report

    with busy("comparing"):
        found = comparing.compare(old, new, tolerance=tolerance / 100, wanted=wanted, **options)
    if found.exit_code == 2:
        of = f" of {', '.join(names)}" if names else ""
        why = [*report.only_in_one(found), *found.differences] or ["no point has a figure in both"]
        raise click.UsageError("; ".join([f"nothing{of} could be compared", *why]))
    report.print_comparison(found, new_console(), everything)
    ctx.exit(found.exit_code)


class _Tuned(Listing):
    def facts(self) -> dict[str, dict[str, str]]:
        return {"Operations": dict.fromkeys(TUNABLE, ""), "Dtypes": also(cases.ITEMSIZE)}


@bench.command(cls=_Tuned)
@click.option(
    "--op", "chosen", metavar="NAME", multiple=True, callback=values_of(parse_tunable), help="Default: softmax."
)
@dtypes_option("float32,bfloat16")
@click.option(
    "--cols", metavar="N", multiple=True, callback=values_of(cases.parse_sizes), help="Default: 1024 to 524288."
)
@click.option(
    "--elements", metavar="N", callback=value_of(cases.parse_size), help="Elements of a tensor.  [default: 128Mi]"
)
@out_option(".json", "the table", default="the user's own")
@click.option("--force", is_flag=True, help="Replace the plans that the file has for this GPU.")
@click.option("--print-only", is_flag=True, help="Print the ladders, write no table.")
@list_option
@click.pass_context
def tune(
    ctx: click.Context,
    chosen: list[str],
    dtypes: list[str],
    cols: list[int],
    elements: int | None,
    out: Path | None,
    force: bool,
    print_only: bool,
) -> None:
    """Time the planner's choices on this GPU, and write the best ones for the planner to use.

    It also prints them as ladders, the planner's tables of thresholds. The file is the one that FUSED_SOFTMAX_PLANS
    names, or plans.json in the user's configuration folder. Results of `bench` say when it is in use. Delete the file
    to return to the built-in plans.
    """
    device, gpu = find_device()
    with importing():
        from fused_softmax.bench.measure import run
        from fused_softmax.bench.measure import tune as tuner
        from fused_softmax.bench.results import record
        from fused_softmax.core.plan import built_in, tuned

    chosen, dtypes = chosen or ["softmax"], dtypes or ["float32", "bfloat16"]
    where = out or tuned.path()
    if not print_only:
        paths.require_writable(where)
    try:
        kept = tuned.load(where) if where.exists() and not print_only else {}  # a bad file fails before the work
    except OSError as error:
        raise click.UsageError(f"cannot write {where}: {error.strerror or error}") from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if device.name in kept and not force:
        raise click.UsageError(f"{where} has plans for {device.name}; --force replaces them")
    if not gpu:
        for operation in chosen:
            for dtype in dtypes:
                click.echo(tuner.source(built_in(tuner.OPERATIONS[operation], cases.ITEMSIZE[dtype])))
        raise click.ClickException("no GPU: these are the built-in ladders; nothing was measured or written")
    stopped = False
    try:
        with busy("timing plans") as say:
            table = tuner.tune(device, chosen, dtypes, cols or tuner.WIDTHS, elements or tuner.ELEMENTS, say)
    except tuner.Interrupted as error:
        table, where, stopped = error.table, record.partial_path(where), True
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    if table.ladders:
        try:
            if not print_only:
                tuned.save(where, device.name, table, run.environment())
        except OSError as error:
            why = error.strerror or error
            said = f"cannot write {where}: {why}; the ladders are printed, and nowhere else"
            raise click.ClickException(said) from None
        finally:  # printed last: standard output may be full too
            click.echo(tuner.source(table))
    if stopped:
        kept_in = f"{where} has the ladders until then" if table.ladders and not print_only else "nothing was written"
        say_interrupted(ctx, kept_in)
    if not print_only:
        click.echo(f"wrote {where}: plans for {device.name} use it from the next process on")


sweep_command.epilog = columns("Commands", {name: each.get_short_help_str(90) for name, each in bench.commands.items()})
