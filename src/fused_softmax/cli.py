"""The command line. It wires the parts together and computes nothing itself."""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import click
    from rich.console import Console
except ImportError as error:
    sys.exit(f"{error.name} is missing: pip install 'fused-softmax[cli]'")

from fused_softmax.bench import cases, operations, providers, record, sweeps
from fused_softmax.bench.providers import PROVIDER_ALIASES
from fused_softmax.bench.resume import CannotResume
from fused_softmax.plan import H200, Device, built_in


class _Keeping(click.Command):
    """A command that records its arguments as they were typed."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # A resumed run is still the same run.
        ctx.meta["typed"] = [argument for argument in args if argument != "--resume"]
        return super().parse_args(ctx, args)


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


def _each(parse: Callable[[str], Any]) -> Callable[..., list[Any]]:
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


def _one(parse: Callable[[str], Any]) -> Callable[..., Any]:
    def callback(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
        return None if value is None else _each(parse)(ctx, param, (value,))[0]

    return callback


def _dtypes(text: str) -> list[str]:
    return [cases.parse_dtype(part) for part in text.split(",")]


def _providers(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",")]
    known = operations.provider_names()
    for name in names:
        if name not in known:
            raise ValueError(f"unknown provider {name!r}; known: {', '.join(known)}")
    return names


def _sweep(text: str) -> str:
    if text not in sweeps.SWEEPS:
        raise ValueError(f"unknown sweep {text!r}; known: {', '.join(sweeps.SWEEPS)}")
    return text


def _operations(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in operations.OPERATIONS:
            raise ValueError(f"unknown operation {name!r}; known: {', '.join(operations.OPERATIONS)}")
    return names


def _operation(text: str) -> str:
    (name,) = _operations(text)
    return name


def _tunable(text: str) -> list[str]:
    names = _operations(text)
    for name in names:
        if name not in ("softmax", "softmax_backward"):
            raise ValueError(f"{name} is not tuned; softmax and softmax_backward are")
    return names


def _backend(text: str) -> str:
    (name,) = _providers(PROVIDER_ALIASES.get(text, text))
    return name


def _backends(text: str) -> list[str]:
    return [_backend(part.strip()) for part in text.split(",")]


def _columns(title: str, lines: dict[str, str]) -> str:
    """One line for each entry under a title, for an epilog. \\b keeps click from joining the lines."""
    width = max(map(len, lines))
    return "\n".join(("\b", title, *(f"  {name:{width}}  {about}" for name, about in lines.items())))


def _output(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Fails before anything is measured if the file cannot be written."""
    try:
        if path:
            record.require_writable(path)
    except OSError as error:
        raise click.BadParameter(f"cannot write {path}: {error.strerror or error}", ctx, param) from None
    return path


def _image(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    if path and path.suffix not in (".png", ".svg", ".pdf"):
        raise click.BadParameter(f"cannot draw {path.name}: its name must end in .png, .svg or .pdf", ctx, param)
    if path and importlib.util.find_spec("matplotlib") is None:
        raise click.BadParameter("matplotlib is missing: pip install 'fused-softmax[cli]'", ctx, param)
    return _output(ctx, param, path)


_file = click.Path(path_type=Path)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(record.version())
def main() -> None:
    """Softmax kernels at memory speed: measure them, see how a shape is planned, and step through a run."""


@click.command(cls=_Keeping)
@click.argument("names_of_sweeps", metavar="[SWEEP]...", nargs=-1, callback=_each(_sweep))
@click.option(
    "--op",
    "asked_operations",
    metavar="NAME",
    multiple=True,
    callback=_each(_operations),
    help="Measure only these of the sweep's operations; with custom, any operation.",
)
@click.option(
    "--shape",
    "shapes",
    metavar="ROWSxCOLS",
    multiple=True,
    callback=_each(cases.parse_shapes),
    help="One shape. Sweeps that take other dims accept 64x4096x512:1, which runs along dim 1.",
)
@click.option(
    "--rows",
    metavar="N",
    multiple=True,
    callback=_each(cases.parse_sizes),
    help="Rows; with --cols, every pair is measured.",
)
@click.option(
    "--cols",
    metavar="N|START:STOP:STEP",
    multiple=True,
    callback=_each(cases.parse_sizes),
    help="Columns; STOP is excluded. Without --rows, there are as many rows as hold --elements.",
)
@click.option(
    "--elements", metavar="N", callback=_one(cases.parse_size), help="Elements of a tensor.  [default: 128Mi]"
)
@click.option(
    "--dtype", "dtypes", metavar="NAME", multiple=True, callback=_each(_dtypes), help="Default: the sweep's dtypes."
)
@click.option(
    "--provider", "names", metavar="NAME", multiple=True, callback=_each(_providers), help="Default: all providers."
)
@click.option("--quick", is_flag=True, help="Measure a short, representative set.")
@click.option("--verify-only", is_flag=True, help="Check against float64 and time nothing.")
@click.option("--reps", type=click.IntRange(1, 100), help="Rounds in which the providers take turns.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the inputs.")
@click.option("--out", type=_file, callback=_output, help="File for the results, as JSON.")
@click.option(
    "--resume",
    is_flag=True,
    help="Measure what --out does not contain yet. Refused if GPU, version, commit or effort differ.",
)
@click.option(
    "--plot",
    type=_file,
    callback=_image,
    help="Draw GB/s over the columns, or over what varies instead, as .png, .svg or .pdf.",
)
@click.pass_context
def _sweep_command(ctx: click.Context, /, **options: Any) -> None:
    """Check every provider against float64, then time it: GB/s, and the ratio to a plain kernel that moves as much.

    A sweep names the operations to measure, and their shapes and dtypes unless options give others. Without one, the
    tutorial's sweep runs. Repeat an option or separate its values by commas. Ctrl-C keeps what was measured.
    """
    from fused_softmax.bench import run

    if options["elements"] and options["rows"]:
        raise click.UsageError("--elements takes the place of --rows: give only one of them")
    if options["resume"] and not options["out"]:
        raise click.UsageError("--resume continues the file that --out names: give --out too")
    named = options.pop("names_of_sweeps") or [sweeps.TUTORIAL]
    asked = {name: options.pop(name) for name in ("shapes", "rows", "cols", "elements", "dtypes")}
    asked["operations"] = options.pop("asked_operations")
    try:
        found = [case for name in named for case in sweeps.build(name, **asked, quick=options["quick"])]
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    chosen = cases.unique(found)
    known = operations.provider_names(dict.fromkeys(case.operation for case in chosen))
    if strangers := [name for name in options["names"] if name not in known]:
        raise click.UsageError(f"{' '.join(named)} has no provider {strangers[0]!r}; it has {', '.join(known)}")
    standing = not (asked["shapes"] or asked["rows"] or asked["elements"])
    arguments = record.command_line(["bench", *ctx.meta["typed"]])
    try:
        code = run.bench(arguments, _console(), Console(stderr=True), chosen=chosen, standing=standing, **options)
    except CannotResume as error:
        raise click.UsageError(str(error)) from None
    ctx.exit(code)


bench = _Bench(_sweep_command, name="bench")
main.add_command(bench)


@bench.command()
@click.option("--M", "n_rows", metavar="ROWS", required=True, callback=_one(cases.parse_size), help="Rows.")
@click.option("--N", "n_cols", metavar="COLS", required=True, callback=_one(cases.parse_size), help="Columns.")
@click.option(
    "--dtype",
    default="float16",
    show_default=True,
    callback=_one(cases.parse_dtype),
    help="float32, float16, bfloat16 or float64.",
)
@click.option("--op", "operation", default="softmax", show_default=True, callback=_one(_operation), help="Operation.")
@click.option(
    "--backend",
    default="fused",
    show_default=True,
    callback=_one(_backend),
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
        _print(single.time_calls(case, backend, warmup, iters).facts(), as_json)
    except (single.NoFigure, ValueError) as error:
        raise click.ClickException(str(error)) from None


@bench.command()
@click.option("--out", type=_file, callback=_output, help="File for the rows, as JSON.")
@click.pass_context
def host(ctx: click.Context, out: Path | None) -> None:
    """Time what one small eager call costs the host, ours beside torch's own for the same result, in under a minute.

    Exits with 1 if a result differs from torch's: it then has no figure.
    """
    from fused_softmax.bench import host as hosts
    from fused_softmax.bench import run

    _, gpu = _device()
    console = _console()
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


@bench.command()
@click.argument("before", type=_file)
@click.argument("after", type=_file)
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
@click.option("--provider", "names", metavar="NAME", multiple=True, callback=_each(_providers), help="Only these.")
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

    old, new = (_results(path) for path in (before, after))
    found = comparing.compare(old, new, tolerance=tolerance / 100, wanted=wanted, **options)
    report.print_comparison(found, _console(), everything)
    ctx.exit(found.exit_code)


@bench.command()
@click.option("--op", "chosen", metavar="NAME", multiple=True, callback=_each(_tunable), help="Default: softmax.")
@click.option(
    "--dtype", "dtypes", metavar="NAME", multiple=True, callback=_each(_dtypes), help="Default: float32,bfloat16."
)
@click.option("--cols", metavar="N", multiple=True, callback=_each(cases.parse_sizes), help="Default: 1024 to 524288.")
@click.option(
    "--elements", metavar="N", callback=_one(cases.parse_size), help="Elements of a tensor.  [default: 128Mi]"
)
@click.option("--out", type=_file, callback=_output, help="File for the table.  [default: the user's own]")
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

    device, gpu = _device()
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


@main.command()
@click.option("--M", "n_rows", metavar="ROWS", required=True, callback=_one(cases.parse_size), help="Rows.")
@click.option("--N", "n_cols", metavar="COLS", required=True, callback=_one(cases.parse_size), help="Columns.")
@click.option(
    "--dtype",
    default="float16",
    show_default=True,
    callback=_one(cases.parse_dtype),
    help="float32, float16, bfloat16 or float64.",
)
@click.option("--op", "operation", default="softmax", show_default=True, callback=_one(_operation), help="Operation.")
@click.option(
    "--provider", "names", metavar="NAME", multiple=True, callback=_each(_backends), help="Default: fused and torch."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def profile(n_rows: int, n_cols: int, dtype: str, operation: str, names: list[str], as_json: bool) -> None:
    """Run one call of each provider under ncu and print one table: bytes moved, occupancy, registers, widths, stalls.

    Where counters cannot be read, it says why and prints facts of the compiled kernel, and Proton's times.
    """
    from fused_softmax.profile import run, table

    case = cases.Case((n_rows, n_cols), dtype, operation)
    try:
        sweeps.require_dims(case, operation, sweeps.ndim_of(operation))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    known = operations.provider_names([operation])
    if strangers := [name for name in names if name not in known]:
        raise click.UsageError(f"{operation} has no provider {strangers[0]!r}; it has {', '.join(known)}")
    device, gpu = _device()
    found = [run.profile(case, name, device, gpu=gpu) for name in names or [providers.OWN, providers.TORCH]]
    floor_bytes = operations.operation_of(case).floor_bytes(case)
    if as_json:
        click.echo(json.dumps({"case": str(case), **table.facts(found, floor_bytes, device)}, indent=1))
    else:
        run.print_table(case, found, floor_bytes, device, _console())


@main.command("report")
@click.argument("results", nargs=-1, required=True, type=_file)
@click.option("-o", "--out", type=_file, required=True, callback=_output, help="File for the page.")
@click.option("--charts", "folder", type=_file, help="Folder for every chart as PNG and SVG.")
@click.option("--title", default="Measured: fused-softmax", show_default=True, help="Title of the page.")
def report_command(results: tuple[Path, ...], out: Path, folder: Path | None, title: str) -> None:
    """Write one self-contained page from RESULTS of `bench --out`: charts, tables, how it was measured."""
    try:
        from fused_softmax.bench import page
    except ImportError as error:
        raise click.ClickException(f"{error.name} is missing: pip install 'fused-softmax[report]'") from None

    names = [path.stem for path in results]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise click.UsageError(f"two results files are named {twice[0]}: rename one")
    for path in results:
        _results(path)
    parts = [page.part(path) for path in results]
    record.write_whole(out, page.render(parts, title).encode())
    click.echo(f"wrote {out}")
    if folder:
        click.echo(f"wrote {len(page.save_charts(parts, folder))} files into {folder}")


@main.command()
@click.argument("n_rows", metavar="ROWS", callback=_one(cases.parse_size))
@click.argument("n_cols", metavar="COLS", callback=_one(cases.parse_size))
@click.option(
    "--dtype",
    default="float32",
    show_default=True,
    callback=_one(cases.parse_dtype),
    help="float32, float16, bfloat16 or float64.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(n_rows: int, n_cols: int, dtype: str, as_json: bool) -> None:
    """Print the plan for contiguous ROWS x COLS on this GPU: why, its traffic and others', the least possible time."""
    from fused_softmax.bench import report

    device, gpu = _device()
    if not gpu and not as_json:
        click.echo(f"no GPU: planned for the built-in {device.name}")
    asked = device, n_rows, n_cols, cases.ITEMSIZE[dtype]
    _print(report.plan_facts(providers.plan_on(*asked), device), as_json)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def env(as_json: bool) -> None:
    """Print the environment that results are recorded with."""
    from fused_softmax.bench import run

    _print(record.environment(*run.gpu_facts()), as_json)


@main.command()
@click.option(
    "--kernel", "names", metavar="NAME", multiple=True, help="Kernel to record; see --list. Repeat to compare."
)
@click.option("--second", metavar="KERNEL", help="A second kernel on the same matrix, like a second --kernel.")
@click.option(
    "--matrix",
    metavar="FILE",
    help="Rows of numbers: .npy, or text such as CSV; - is standard input.  [default: a 3 x 8 example]",
)
@click.option("--block", type=int, help="Columns of a tile, a power of two.  [default: 4]")
@click.option("--dtype", callback=_one(cases.parse_dtype), help="Default: the matrix's, or float32.")
@click.option("-o", "--out", type=_file, help="A page (.html) or only the recordings (.json; - is standard output).")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@click.option("--list", "listed", is_flag=True, help="List the kernels that can be recorded, and exit.")
def trace(
    names: tuple[str, ...],
    second: str | None,
    matrix: str | None,
    block: int | None,
    dtype: str | None,
    out: Path | None,
    force: bool,
    listed: bool,
) -> None:
    """Write a page that steps through kernels line by line, as they run under Triton's interpreter.

    The page also contains its built-in recordings. Without --kernel and --matrix, only these are written.
    """
    try:
        from fused_softmax import trace as tracing
        from fused_softmax.trace import files, page, presets
    except ImportError as error:
        raise _missing(error) from None
    if listed:
        for kernel in tracing.kernels().values():
            click.echo(f"{kernel.name:14}{kernel.title}")
        return
    if out is None:
        raise click.UsageError("-o FILE is missing: a page (.html) or the recordings (.json, or - for standard output)")
    if out.suffix not in (".html", ".json") and str(out) != "-":
        raise click.UsageError(f"{out.name} must end in .html (a page) or .json (only the recordings)")
    if out.exists() and not force:
        raise click.ClickException(f"{out} exists; --force overwrites it")
    wanted = [*names, *([second] if second else [])]
    try:
        recordings, kept = [], presets.load()
        if wanted or matrix or block or dtype:
            rows = files.read_matrix(matrix) if matrix else presets.EXAMPLE
            wanted = wanted or ["online"]
            recordings = [tracing.record(name, rows, block=block, dtype=dtype) for name in wanted]
        if out.suffix == ".html":
            text = page.embed(recordings, kept)
        else:
            found = recordings or kept
            text = json.dumps(found[0] if len(found) == 1 else found, allow_nan=False) + "\n"
        if str(out) == "-":
            click.echo(text, nl=False)
        else:
            files.write(out, text, force=force)
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror}" if error.filename else str(error)) from None
    except (ValueError, tracing.RecordingError) as error:
        raise click.ClickException(str(error)) from None


def _missing(error: ImportError) -> click.ClickException:
    return click.ClickException(f"{error.name} is missing: pip install 'fused-softmax[viz]'")


@main.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; by default only loopback.")
@click.option("--port", type=click.IntRange(0, 65535), default=8765, show_default=True, help="0 takes any free port.")
def serve(host: str, port: int) -> None:
    """Serve the page, and record the matrices that its reader types. Ctrl+C ends it."""
    try:
        from fused_softmax.trace import page, presets
        from fused_softmax.trace import serve as server
    except ImportError as error:
        raise _missing(error) from None
    try:
        server.serve(page.embed([], presets.load()), host, port, lambda address: click.echo(f"serving on {address}"))
    except OSError as error:
        raise click.ClickException(f"cannot listen on {host}, port {port}: {error.strerror}") from None


_sweep_command.epilog = "\n\n".join(
    (
        _columns("Sweeps:", {name: sweep.about for name, sweep in sweeps.SWEEPS.items()}),
        _columns("Commands:", {name: each.get_short_help_str(90) for name, each in bench.commands.items()}),
    )
)


def _results(path: Path) -> record.Run:
    """The results that `bench --out` wrote. A file that cannot be read is a usage error, exit code 2."""
    try:
        return record.read(path)
    except OSError as error:
        raise click.UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _device() -> tuple[Device, bool]:
    """The GPU and True, or without a GPU the built-in H200 and False."""
    import torch

    if not torch.cuda.is_available():
        return H200, False
    from fused_softmax.device import device_of

    return device_of(0), True


def _console() -> Console:
    """A console that does not fold tables when the output is a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else 1000)


def _print(facts: dict[str, Any], as_json: bool) -> None:
    from fused_softmax.bench import report

    if as_json:
        click.echo(json.dumps(facts, indent=1))
    else:
        report.print_facts(facts, Console())


if __name__ == "__main__":
    main(prog_name="fused-softmax")
