"""The command line. It wires the parts together and computes nothing itself."""

import importlib.util
import json
import sys
from pathlib import Path

if missing := [name for name in ("click", "rich") if importlib.util.find_spec(name) is None]:
    sys.exit(f"{missing[0]} is missing: pip install 'fused-softmax[cli]'")

import click

from fused_softmax.bench import cases, operations, providers, record, sweeps
from fused_softmax.bench.arguments import (
    FILE,
    find_device,
    new_console,
    parse_backends,
    parse_operation,
    print_facts,
    read_results,
    value_of,
    values_of,
    writable,
)
from fused_softmax.bench.commands import bench


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(record.version())
def main() -> None:
    """Softmax kernels at memory speed: measure them, see how a shape is planned, and step through a run."""


main.add_command(bench)


@main.command()
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
    "--provider",
    "names",
    metavar="NAME",
    multiple=True,
    callback=values_of(parse_backends),
    help="Default: fused and torch.",
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
    device, gpu = find_device()
    found = [run.profile(case, name, device, gpu=gpu) for name in names or [providers.OWN, providers.TORCH]]
    floor_bytes = operations.operation_of(case).floor_bytes(case)
    if as_json:
        click.echo(json.dumps({"case": str(case), **table.facts(found, floor_bytes, device)}, indent=1))
    else:
        run.print_table(case, found, floor_bytes, device, new_console())


@main.command("report")
@click.argument("results", nargs=-1, required=True, type=FILE)
@click.option("-o", "--out", type=FILE, required=True, callback=writable, help="File for the page.")
@click.option("--charts", "folder", type=FILE, help="Folder for every chart as PNG and SVG.")
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
        read_results(path)
    parts = [page.part(path) for path in results]
    record.write_whole(out, page.render(parts, title).encode())
    click.echo(f"wrote {out}")
    if folder:
        click.echo(f"wrote {len(page.save_charts(parts, folder))} files into {folder}")


@main.command()
@click.argument("n_rows", metavar="ROWS", callback=value_of(cases.parse_size))
@click.argument("n_cols", metavar="COLS", callback=value_of(cases.parse_size))
@click.option(
    "--dtype",
    default="float32",
    show_default=True,
    callback=value_of(cases.parse_dtype),
    help="float32, float16, bfloat16 or float64.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(n_rows: int, n_cols: int, dtype: str, as_json: bool) -> None:
    """Print the plan for contiguous ROWS x COLS on this GPU: why, its traffic and others', the least possible time."""
    from fused_softmax.bench import report

    device, gpu = find_device()
    if not gpu and not as_json:
        click.echo(f"no GPU: planned for the built-in {device.name}")
    asked = device, n_rows, n_cols, cases.ITEMSIZE[dtype]
    print_facts(report.plan_facts(providers.plan_on(*asked), device), as_json)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def env(as_json: bool) -> None:
    """Print the environment that results are recorded with."""
    from fused_softmax.bench import run

    facts = record.environment(*run.gpu_facts())
    del facts["kernels_of"]  # a digest an operation, which files of results have
    print_facts(facts, as_json)


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
@click.option("--dtype", callback=value_of(cases.parse_dtype), help="Default: the matrix's, or float32.")
@click.option("-o", "--out", type=FILE, help="A page (.html) or only the recordings (.json; - is standard output).")
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


if __name__ == "__main__":
    main(prog_name="fused-softmax")
