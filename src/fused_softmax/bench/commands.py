"""The commands of `fused-softmax bench`. They wire the parts together and compute nothing themselves."""

import shlex
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from fused_softmax.bench import cases, record, sweeps
from fused_softmax.bench.arguments import (
    FILE,
    FOLDER,
    find_device,
    new_console,
    parse_backend,
    parse_committed,
    parse_dtypes,
    parse_operation,
    parse_providers,
    parse_tunable,
    print_facts,
    read_results,
    value_of,
    values_of,
    writable,
)
from fused_softmax.bench.committed import COMMITTED, GPU
from fused_softmax.bench.sweep_command import asked, sweep_command
from fused_softmax.plan import built_in


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


def _columns(title: str, lines: dict[str, str]) -> str:
    """One line for each entry under a title, for an epilog. \\b keeps click from joining the lines."""
    width = max(map(len, lines))
    return "\n".join(("\b", title, *(f"  {name:{width}}  {about}" for name, about in lines.items())))


bench = _Bench(sweep_command, name="bench")


@bench.command()
@click.option("--M", "n_rows", metavar="ROWS", required=True, callback=value_of(cases.parse_size), help="Rows.")
@click.option("--N", "n_cols", metavar="COLS", required=True, callback=value_of(cases.parse_size), help="Columns.")
@click.option(
    "--dtype",
    default="float16",
    show_default=True,
    callback=value_of(cases.parse_dtype),
    help="float32, float16, bfloat16 or float64.",
)
@click.option(
    "--op", "operation", default="softmax", show_default=True, callback=value_of(parse_operation), help="Operation."
)
@click.option(
    "--backend",
    default="fused",
    show_default=True,
    callback=value_of(parse_backend),
    help="fused, torch, compile or a provider.",
)
@click.option("--warmup", type=click.IntRange(0), default=10, show_default=True, help="Calls before the timed ones.")
@click.option("--iters", type=click.IntRange(1), default=100, show_default=True, help="Timed calls, each timed alone.")
@click.option("--profile-only", is_flag=True, help="Make one call and print no figure, for a profiler.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def one(
    n_rows: int,
    n_cols: int,
    dtype: str,
    operation: str,
    backend: str,
    warmup: int,
    iters: int,
    profile_only: bool,
    as_json: bool,
) -> None:
    """Time one provider at one shape: the average of the middle 80 % of its calls."""
    from fused_softmax.bench import one as single

    case = cases.Case((n_rows, n_cols), dtype, operation)
    try:
        sweeps.require_dims(case, operation, sweeps.ndim_of(operation))
        if profile_only:
            single.call_once(case, backend)
            click.echo(f"{backend}: one call at {case}", err=as_json)
            return
        print_facts(single.time_calls(case, backend, warmup, iters).facts(), as_json)
    except (single.NoFigure, ValueError) as error:
        raise click.ClickException(str(error)) from None


@bench.command()
@click.option("--out", type=FILE, callback=writable, help="File for the rows, as JSON.")
@click.pass_context
def host(ctx: click.Context, out: Path | None) -> None:
    """Time what one small eager call costs the host, ours beside torch's own for the same result, in under a minute.

    Exits with 1 if a result differs from torch's: it then has no figure.
    """
    from fused_softmax.bench import host as hosts
    from fused_softmax.bench import run

    _, gpu = find_device()
    console = new_console()
    if not gpu:
        console.print("No GPU: these are times of calls on the CPU.", highlight=False)
    arguments = record.command_line(["bench", "host", *(["--out", str(out)] if out else [])])
    rows = hosts.measure_all("cuda" if gpu else "cpu")
    hosts.print_rows(rows, console)
    if out:
        environment = record.environment(*run.gpu_facts())
        record.write_whole(out, hosts.text(rows, environment, arguments).encode())
        click.echo(f"wrote {out}")
    ctx.exit(int(any(row.wrong for row in rows)))


@bench.command("all")
@click.option(
    "--out", "folder", type=FOLDER, required=True, help="Folder of the files: benchmarks/results in this project."
)
@click.option(
    "--only", "names", metavar="NAME", multiple=True, callback=values_of(parse_committed), help="Only these files."
)
@click.option("--resume", is_flag=True, help="Keep what is current, and continue what was stopped.")
@click.option("--force", is_flag=True, help="Measure everything anew.")
@click.option("--dry-run", is_flag=True, help="Say which files are current, and measure nothing. Needs no GPU.")
@click.pass_context
def all_command(ctx: click.Context, folder: Path, names: list[str], resume: bool, force: bool, dry_run: bool) -> None:
    """Make every committed results file anew, one after another, with the kernels of this source.

    A file is current if it has all its points from these kernels, on this GPU, with this torch and Triton. Ctrl-C keeps
    what was measured. Exits with 1 if a file could not be measured, or has a wrong result.
    """
    from fused_softmax.bench import measure, renew, run

    if resume and force:
        raise click.UsageError("--resume keeps what is current and --force keeps nothing: give only one of them")
    chosen = [
        renew.Renewal(name, asked(shlex.split(COMMITTED[name]), f"{name}.json"), folder)
        for name in COMMITTED
        if name in names or not names
    ]
    if dry_run:
        environment = record.environment(*run.gpu_facts())
        if not environment["gpu"]:
            click.echo("No GPU: of each file the kernels are compared, and neither its GPU nor its versions.")
        for renewal in chosen:
            click.echo(f"{renewal.name}: {renewal.state(environment)}")
        return
    there = [renewal.out.name for renewal in chosen if renewal.out.exists()]
    if there and not resume and not force:
        more = f" and {len(there) - 1} more" if there[1:] else ""
        raise click.UsageError(
            f"{there[0]}{more} would be overwritten: --resume keeps what is current, --force measures all anew"
        )
    if not measure.on_gpu():
        raise click.ClickException("no GPU: nothing was measured; --dry-run says which files are current")
    environment = record.environment(*run.gpu_facts())
    if environment["gpu"]["name"] != GPU:
        click.echo(f"note: the files are named after an {GPU}, and this is an {environment['gpu']['name']}", err=True)
    try:
        for renewal in chosen:
            record.require_writable(renewal.out)
    except OSError as error:
        raise click.UsageError(f"cannot write into {folder}: {error.strerror or error}") from None
    ctx.exit(renew.renew(chosen, environment, Console(stderr=True), click.echo, force))


@bench.command()
@click.argument("before", type=FILE)
@click.argument("after", type=FILE)
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
    type=click.FloatRange(0),
    default=2,
    show_default=True,
    help="Percent by which a median must change to count.",
)
@click.option(
    "--provider", "names", metavar="NAME", multiple=True, callback=values_of(parse_providers), help="Only these."
)
@click.option("--all", "everything", is_flag=True, help="Also show what stayed the same.")
@click.pass_context
def compare(
    ctx: click.Context, before: Path, after: Path, names: list[str], everything: bool, tolerance: float, **options: Any
) -> None:
    """Say what got faster or slower between two results, beyond the spread of both.

    Exits with 0 if nothing got slower, 1 if something got slower or lost its figure, 2 if nothing can be compared.
    """
    from fused_softmax.bench import compare as comparing
    from fused_softmax.bench import report

    def wanted(point: record.Point) -> bool:
        return not names or point.provider in names

    old, new = (read_results(path) for path in (before, after))
    found = comparing.compare(old, new, tolerance=tolerance / 100, wanted=wanted, **options)
    report.print_comparison(found, new_console(), everything)
    ctx.exit(found.exit_code)


@bench.command()
@click.option(
    "--op", "chosen", metavar="NAME", multiple=True, callback=values_of(parse_tunable), help="Default: softmax."
)
@click.option(
    "--dtype",
    "dtypes",
    metavar="NAME",
    multiple=True,
    callback=values_of(parse_dtypes),
    help="Default: float32,bfloat16.",
)
@click.option(
    "--cols", metavar="N", multiple=True, callback=values_of(cases.parse_sizes), help="Default: 1024 to 524288."
)
@click.option(
    "--elements", metavar="N", callback=value_of(cases.parse_size), help="Elements of a tensor.  [default: 128Mi]"
)
@click.option("--out", type=FILE, callback=writable, help="File for the table.  [default: the user's own]")
@click.option("--print-only", is_flag=True, help="Print the ladders, write no table.")
@click.pass_context
def tune(
    ctx: click.Context,
    chosen: list[str],
    dtypes: list[str],
    cols: list[int],
    elements: int | None,
    out: Path | None,
    print_only: bool,
) -> None:
    """Time the planner's choices on this GPU, and write the best ones for the planner to use.

    It also prints them as ladders, the planner's tables of thresholds. The file is the one that FUSED_SOFTMAX_PLANS
    names, or plans.json in the user's configuration folder. Results of `bench` say when it is in use. Delete the file
    to return to the built-in plans.
    """
    from fused_softmax.bench import run
    from fused_softmax.bench import tune as tuner
    from fused_softmax.plan import tuned

    device, gpu = find_device()
    chosen, dtypes = chosen or ["softmax"], dtypes or ["float32", "bfloat16"]
    if not gpu:
        for operation in chosen:
            for dtype in dtypes:
                click.echo(tuner.source(built_in(tuner.OPERATIONS[operation], cases.ITEMSIZE[dtype])))
        raise click.ClickException("no GPU: these are the built-in ladders; nothing was measured or written")
    try:
        where = out or tuned.path()
        if not print_only and where.exists():
            tuned.load(where)  # a bad file fails before anything is measured
        table = tuner.tune(device, chosen, dtypes, cols or tuner.WIDTHS, elements or tuner.ELEMENTS, click.echo)
        click.echo(tuner.source(table))
        if not print_only:
            tuned.save(where, device.name, table, record.environment(*run.gpu_facts()))
            click.echo(f"wrote {where}: plans for {device.name} use it from the next process on")
    except KeyboardInterrupt:
        click.echo("interrupted: nothing was written", err=True)
        ctx.exit(130)
    except ValueError as error:
        raise click.ClickException(str(error)) from None


sweep_command.epilog = "\n\n".join(
    (
        _columns("Sweeps:", {name: sweep.about for name, sweep in sweeps.SWEEPS.items()}),
        _columns("Commands:", {name: each.get_short_help_str(90) for name, each in bench.commands.items()}),
    )
)
