"""`fused-softmax bench [SWEEP]...`: which cases its arguments ask for, by which providers, and with what effort."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fused_softmax.bench import cases
from fused_softmax.bench.commands import paths
from fused_softmax.bench.commands.arguments import (
    Recorded,
    dtypes_option,
    effort_options,
    force_option,
    list_option,
    new_console,
    out_option,
    parse_operations,
    parse_sweep,
    providers_option,
    read_results,
    require_known,
    say_interrupted,
    value_of,
    values_of,
)
from fused_softmax.bench.commands.front import Option
from fused_softmax.bench.commands.warm import compile_ahead, measures, warm_options
from fused_softmax.bench.show.progress import importing
from fused_softmax.interrupt import INTERRUPTED

if TYPE_CHECKING:
    from fused_softmax.bench.measure.run import Asked
    from fused_softmax.bench.results.record import Run


class _Sweep(Recorded):
    def facts(self) -> dict[str, dict[str, str]]:
        from fused_softmax.bench.measure.sweeps import SWEEPS

        return {"Sweeps": {name: sweep.about for name, sweep in SWEEPS.items()}} | super().facts()


@click.command(cls=_Sweep)
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
    "--M",
    "rows",
    cls=Option,
    metavar="N",
    multiple=True,
    callback=values_of(cases.parse_sizes),
    help="Rows; with --cols, every pair is measured.",
)
@click.option(
    "--cols",
    "--N",
    "cols",
    cls=Option,
    metavar="N|START:STOP:STEP",
    multiple=True,
    callback=values_of(cases.parse_sizes),
    help="Columns; STOP is excluded. Without --rows, there are as many rows as hold --elements.",
)
@click.option(
    "--elements", metavar="N", callback=value_of(cases.parse_size), help="Elements of a tensor.  [default: 128Mi]"
)
@dtypes_option("the sweep's")
@providers_option("Providers; --list names them.  [default: all]")
@effort_options("a short, representative set")
@out_option(".json", "the results")
@click.option(
    "--resume",
    is_flag=True,
    help="Measure what --out does not contain yet. Refused if GPU, versions, source, --reps, --quick or --seed differ.",
)
@warm_options
@click.option(
    "--plot",
    type=paths.FILE,
    callback=paths.drawable,
    help="Draw GB/s, or times of matrix products, over the columns or whatever else varies, as .png, .svg or .pdf.",
)
@click.option(
    "--beside", type=paths.FILE, help="Draw the figures of this results file, such as another GPU's, below --plot's."
)
@force_option
@list_option
@click.pass_context
def sweep_command(ctx: click.Context, /, **options: Any) -> None:
    """Check every provider against float64, then time it: GB/s, and the ratio to a plain kernel that moves as much.

    A sweep names the operations to measure, and their shapes and dtypes unless options give others. Without a name, the
    sweep `tutorial` runs. Repeat an option or separate its values by commas. Ctrl-C keeps what was measured.
    """
    files = {name: options.pop(name) for name in ("out", "plot", "resume", "beside")}
    out, resume, force = files["out"], files["resume"], options.pop("force")
    require_resumable(out, resume=resume, force=force)
    warm, device = options.pop("warm"), options.pop("device")
    # Names are checked before PyTorch is imported, which takes seconds.
    measured = _measured(options)
    require_files(out, files["plot"], replace=resume or force)
    files["beside"] = _beside(files["beside"], files["plot"], out)
    measured_here = measures(warm, device)
    from fused_softmax.bench.results.record import CannotResume, earlier

    try:
        if resume:
            earlier(out)
        with importing():
            from rich.console import Console

            from fused_softmax.bench.measure import measure, run, verify

        asked = _asked(ctx.meta["typed"], measured)
        interprets = asked.verify_only and not measure.on_gpu() and verify.kernels(asked.operations, asked.names)
        if interprets and importlib.util.find_spec("numpy") is None:
            raise click.ClickException("numpy is missing: pip install 'fused-softmax[viz]'")
        if warm:
            all_planned = compile_ahead([asked], device, measured_here)
            if not measured_here:
                ctx.exit(int(not all_planned))
        code = run.bench(asked, new_console(), Console(stderr=True), **files)
    except CannotResume as error:
        raise click.UsageError(str(error)) from None
    if code == INTERRUPTED:  # the tables, which say what was kept, are on standard output
        say_interrupted(ctx)
    ctx.exit(code)


def _beside(path: Path | None, plot: Path | None, out: Path | None) -> "Run | None":
    """The results that a plot has beside its own, or a UsageError."""
    if path is None:
        return None
    if plot is None:
        raise click.UsageError("--beside adds to the picture of --plot: give --plot too")
    paths.require_outputs([each for each in (plot, out) if each], [path], replace=True)
    run = read_results(path)
    if not any(point.kernel or point.call for point in run.points):
        raise click.UsageError(f"{path} has no figures to draw")
    return run


def require_resumable(out: Path | None, *, resume: bool, force: bool) -> None:
    """UsageError for options that contradict each other."""
    if resume and not out:
        raise click.UsageError("--resume continues the file that --out names: give --out too")
    if resume and force:
        raise click.UsageError("--resume keeps what was measured and --force keeps nothing: give only one of them")


def require_files(out: Path | None, plot: Path | None = None, *, replace: bool) -> None:
    """UsageError for files that cannot be written, or that exist and are not to be replaced."""
    from fused_softmax.bench.results import record

    outputs = [path for path in (out, out and record.partial_path(out), plot) if path]
    resumed = paths.OVERWRITE + (", --resume continues the run in --out" if out else "")
    paths.require_outputs(outputs, replace=replace, how=resumed)


def asked(arguments: Sequence[str], out: str) -> "Asked":
    """The measurement that arguments of `fused-softmax bench` ask for. out: the name of the file that is to hold it."""
    ctx = sweep_command.make_context("bench", list(arguments))
    files = ("out", "plot", "resume", "beside", "force", "warm", "device")
    options = {name: value for name, value in ctx.params.items() if name not in files}
    return _asked([*ctx.meta["typed"], "--out", out], _measured(options))


def _measured(options: dict[str, Any]) -> dict[str, Any]:
    """The fields of an `Asked` but its command, or a UsageError."""
    from fused_softmax.bench.measure import sweeps

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
    require_known(options["names"], (case.operation for case in chosen), " ".join(named))
    standing = not (given["shapes"] or given["rows"] or given["elements"])
    return {"chosen": chosen, "standing": standing, **options}


def _asked(typed: list[str], measured: dict[str, Any]) -> "Asked":
    from fused_softmax.bench.measure.run import Asked
    from fused_softmax.bench.results import record

    return Asked(record.command_line(["bench", *typed]), **measured)
