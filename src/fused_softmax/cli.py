"""The command line. It wires the parts together and computes nothing itself."""

import errno
import importlib.util
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

if missing := [name for name in ("click", "rich") if importlib.util.find_spec(name) is None]:
    sys.exit(f"{missing[0]} is missing: pip install 'fused-softmax[cli]'")

import click

from fused_softmax import __version__
from fused_softmax.bench import cases, catalog
from fused_softmax.bench.commands import paths
from fused_softmax.bench.commands.arguments import (
    OfRows,
    case_of,
    dtype_option,
    each_value_of,
    find_device,
    force_option,
    json_option,
    list_option,
    new_console,
    operation_option,
    print_facts,
    providers_option,
    read_results,
    require_known,
    say_interrupted,
    shape_options,
)
from fused_softmax.bench.commands.commands import bench
from fused_softmax.bench.commands.front import NO_ROOM, Front, Whole
from fused_softmax.bench.show.progress import busy, counted, importing
from fused_softmax.core import files
from fused_softmax.core.described import number_of


@click.group(cls=Front, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Softmax kernels at memory speed: measure them, see how a shape is planned, and step through a run."""


main.add_command(bench)


@main.command(cls=OfRows, short_help="Run one call of each provider under NVIDIA's ncu.")
@shape_options()
@dtype_option()
@operation_option
@providers_option("Repeat, or separate by commas; --list names them.  [default: fused_softmax,torch]")
@json_option
@list_option
@click.pass_context
def profile(
    ctx: click.Context, n_rows: int, n_cols: int, dtype: str, operation: str, names: list[str], as_json: bool
) -> None:
    """Run one call of each provider under ncu and print one table: bytes moved, occupancy, registers, widths, stalls.

    If the counters cannot be read, it says why. It then prints facts of the compiled kernel and, with a GPU, times by
    Triton's profiler Proton. Exits with 1 if nothing was found out of any provider.
    """
    case = case_of(n_rows, n_cols, dtype, operation)
    require_known(names, [operation], operation)
    device, gpu = find_device()
    with importing():
        from fused_softmax.bench.entries import operations
        from fused_softmax.profile import run, table
    found: list[table.Profile] = []
    stopped = False
    try:
        for name in names or [catalog.OWN, catalog.TORCH]:
            with busy(f"{name} at {case}"):
                found.append(run.profile(case, name, device, gpu=gpu))
    except KeyboardInterrupt:
        stopped = True
    floor_bytes = operations.operation_of(case).floor_bytes(case)
    if as_json:
        click.echo(json.dumps({"case": str(case), **table.facts(found, floor_bytes, device)}, indent=1))
    elif found:
        run.print_table(case, found, floor_bytes, device, new_console(), gpu=gpu)
    if stopped:
        say_interrupted(ctx, f"{number_of(len(found), 'provider was', 'providers were')} profiled")
    ctx.exit(int(not any(each.kernels for each in found)))


@main.command("report", short_help="Turn results into one page of charts and tables.")
@click.argument("results", nargs=-1, required=True, type=paths.FILE)
@click.option("-o", "--out", type=paths.FILE, required=True, callback=paths.ending(".html"), help="File for the page.")
@click.option(
    "--charts", "folder", type=paths.FILE, callback=paths.folder, help="Folder for every chart as PNG and SVG."
)
@click.option(
    "--title", default="Measured: fused-softmax", show_default=True, callback=paths.text, help="Title of the page."
)
@force_option
def report_command(results: tuple[Path, ...], out: Path, folder: Path | None, title: str, force: bool) -> None:
    """Write one self-contained page from RESULTS of `bench --out`: charts, tables, how it was measured."""
    names = [path.stem for path in results]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise click.UsageError(f"two results files are named {twice[0]}: rename one")
    paths.require_outputs([out], results, replace=force)
    if folder and not force and folder.exists() and next(folder.iterdir(), None):
        raise click.UsageError(f"{folder} is not empty; --force overwrites the charts in it")
    for path in results:
        read_results(path)
    try:
        with importing("what draws"):
            from fused_softmax.bench.show import page
    except ImportError as error:
        raise click.ClickException(f"{error.name} is missing: pip install 'fused-softmax[report]'") from None

    try:
        parts = [page.part(path) for path in counted("drawing", results)]
        with busy("making the page") as say:
            charts = [path for each in parts for path in page.chart_files(each, folder)] if folder else []
            paths.require_outputs([*charts, out], results, replace=True, how="")
            files.write_whole(out, page.render(parts, title).encode())
            say(f"wrote {out}")
            if folder:
                say(f"wrote {number_of(len(page.save_charts(parts, folder)), 'file')} into {folder}")
    except OSError as error:
        if not error.filename:
            raise  # of standard output
        raise click.ClickException(f"cannot write {error.filename}: {error.strerror}") from None


@main.command(short_help="Say how a shape would run, and why.")
@click.argument(
    "shape", metavar="[ROWS COLS | BATCH HEADS LENGTH DIM]", nargs=-1, callback=each_value_of(cases.parse_size)
)
@shape_options(required=False)
@dtype_option()
@json_option
def plan(shape: list[int], n_rows: int | None, n_cols: int | None, dtype: str, as_json: bool) -> None:
    """Print how softmax of contiguous ROWS x COLS runs on this GPU, and why.

    It also prints how many bytes this plan, torch and a naive softmax move, and the least possible time. For the four
    sizes of attention, it prints who computes each pass of plain attention, and why, the kernels' tiles, and why the
    ways that stand before the one taken do not take it.
    """
    given = [size for size in (n_rows, n_cols) if size is not None]
    of_attention = len(shape) == 4 and not given
    if not of_attention and sorted((len(shape), len(given))) != [0, 2]:
        raise click.UsageError("give two sizes, as ROWS COLS or by --rows and --cols, or the four sizes of attention")
    if math.prod([*shape, *given]) >= cases.LARGEST:
        raise click.UsageError(f"{' x '.join(map(str, shape or given))} is larger than any tensor")
    device, gpu = find_device()
    with importing():
        from fused_softmax.bench.entries import makers
        from fused_softmax.bench.show import report

    if of_attention:
        import torch

        from fused_softmax.ops.attention.calls import planned
        from fused_softmax.ops.attention.options import KERNEL_DTYPES
        from fused_softmax.ops.attention.plan.tiles import HALF

        most = max(HALF["forward"])  # the ladder's end
        if shape[-1] > most:
            raise click.UsageError(f"attention's heads have at most {most} dims, not {shape[-1]}")
        facts = report.attention_facts(shape, cases.ITEMSIZE[dtype], device)
        if getattr(torch, dtype) in KERNEL_DTYPES and 0 not in shape:
            facts |= report.ways_facts(planned(shape, getattr(torch, dtype), device))
    else:
        n_rows, n_cols = shape or given
        facts = report.plan_facts(makers.plan_on(device, n_rows, n_cols, cases.ITEMSIZE[dtype]), device)
    if not gpu and not as_json:
        click.echo(f"no GPU: planned for the built-in {device.name}")
    print_facts(facts, as_json)


@main.command()
@json_option
def env(as_json: bool) -> None:
    """Print the environment that results are recorded with."""
    with importing():
        from fused_softmax.bench.measure import run
        from fused_softmax.bench.results import record

        facts = record.environment(*run.gpu_facts())
    del facts["kernels_of"]  # a digest an operation, which files of results have
    if not as_json:
        facts["gpu"] = facts["gpu"] or "none"
    print_facts(facts, as_json)


@main.command(short_help="Write a page that steps through kernels line by line.")
@click.option(
    "--kernel", "names", metavar="NAME", multiple=True, help="Kernel to record; see --list. Repeat to compare."
)
@click.option("--second", metavar="KERNEL", help="A second kernel on the same matrix, like a second --kernel.")
@click.option(
    "--matrix",
    metavar="FILE",
    help="Rows of numbers: .npy, or text such as CSV or a printed tensor; - is stdin.  [default: a small example]",
)
@click.option("--block", type=int, help="Columns of a tile, or rows of attention's: a power of two.  [default: 4]")
@dtype_option(None, f"{', '.join(cases.ITEMSIZE)}.  [default: the matrix's, or {cases.DTYPE}]")
@click.option(
    "-o", "--out", type=paths.FILE, help="A page (.html) or only the recordings (.json; - is standard output)."
)
@force_option
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
    wanted = [*names, *([] if second is None else [second])]
    if matrix == "":
        raise click.UsageError("--matrix is empty: give the name of a file, or - for standard input")
    out = Path("-") if listed else _required_out(out, matrix, force)
    try:
        with importing():
            from fused_softmax import trace as tracing
            from fused_softmax.bench.results import record
            from fused_softmax.trace import asked, matrices, page, presets
    except ImportError as error:
        raise _missing(error) from None
    if listed:
        for kernel in tracing.kernels().values():
            click.echo(f"{kernel.name:14}{kernel.title}")
        return
    try:
        wanted = [cases.find("kernel", name, tracing.kernels()) for name in wanted]
        requests = []
        if wanted or matrix or block is not None or dtype:
            if matrix and matrix != "-":
                record.require_regular(Path(matrix))
            rows = matrices.read_matrix(matrix) if matrix else None
            requests = [
                asked.asked(name, presets.example_of(name) if rows is None else rows, block, dtype)
                for name in wanted or ["online"]
            ]
    except OSError as error:
        raise click.UsageError(f"cannot read {matrix}: {error.strerror or error}") from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    try:
        with busy("recording"):
            recordings = [tracing.record(each.kernel, each.x, block=each.block) for each in requests]
            kept = presets.load()
        if out.suffix == ".html":
            text = page.embed(recordings, kept)
        else:
            found = recordings or kept
            text = json.dumps(found[0] if len(found) == 1 else found, allow_nan=False) + "\n"
        if str(out) == "-":
            click.echo(text, nl=False)
        else:
            files.write_whole(out, text, force=force)
            how = "open it in a browser" if out.suffix == ".html" else "recordings, as trace/schema.json describes them"
            click.echo(f"wrote {out}: {how}")
    except FileExistsError:  # since it was checked
        raise click.ClickException(f"{out} exists") from None
    except OSError as error:
        if not error.filename:
            raise  # of standard output
        raise click.ClickException(f"cannot write {error.filename}: {error.strerror}") from None
    except ValueError as error:  # of a block that the kernel does not take for such a matrix
        raise click.UsageError(str(error)) from None
    except tracing.RecordingError as error:
        raise click.ClickException(str(error)) from None


def _required_out(out: Path | None, matrix: str | None, force: bool) -> Path:
    if out is None:
        raise click.UsageError("-o FILE is missing: a page (.html) or the recordings (.json, or - for standard output)")
    if str(out) == "-":
        return out
    if out.suffix not in (".html", ".json"):
        raise click.UsageError(f"{out.name} must end in .html (a page) or .json (only the recordings)")
    paths.require_writable(out)
    inputs = [Path("/dev/stdin" if matrix == "-" else matrix)] if matrix else []
    paths.require_outputs([out], inputs, replace=force)
    return out


def _missing(error: ImportError) -> click.ClickException:
    if error.name == "triton":
        return click.ClickException(str(error))
    return click.ClickException(f"{error.name} is missing: pip install 'fused-softmax[viz]'")


@main.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; by default only loopback.")
@click.option("--port", type=Whole(0, 65535), default=8765, show_default=True, help="0 takes any free port.")
@click.option(
    "--allow-host",
    "allowed",
    metavar="NAME",
    multiple=True,
    help="A name or address, without a port, by which others reach this server. Needed unless it listens on loopback.",
)
def serve(host: str, port: int, allowed: tuple[str, ...]) -> None:
    """Serve the page, and record the matrices that its reader types. Ctrl-C ends it."""
    import socket

    try:
        with importing():
            from fused_softmax.trace import page, presets
            from fused_softmax.trace.server import hosts
            from fused_softmax.trace.server import serve as server
    except ImportError as error:
        raise _missing(error) from None
    try:
        names = hosts.answered(host, allowed)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    html = page.embed([], presets.load(), server=server.known())
    try:
        server.serve(html, host, port, lambda address: click.echo(f"serving on {address}"), names)
        click.echo("stopped", err=True)
    except OSError as error:
        if error.errno in (*NO_ROOM, errno.EPIPE):
            raise  # of standard output
        said = f"cannot listen on {host}, port {port}: {(error.strerror or str(error)).partition(' (')[0]}"
        wrong = error.errno in (errno.EADDRNOTAVAIL, socket.EAI_NONAME)  # no address of this machine, or of any
        raise (click.UsageError if wrong else click.ClickException)(said) from None


_SIZE = Whole(1, 2**31 - 1)


@main.command(short_help="Compile kernels before the first call needs them.")
@click.option(
    "--for", "uses", type=click.Choice(["train", "serve"]), multiple=True, required=True,
    help="What the calls are for; give it twice for both.",
)  # fmt: skip
@click.option("--device", type=click.Choice(["h100", "h200"]), help="The card.  [default: this machine's GPU]")
@dtype_option("bfloat16", "Of logits, hidden states and heads.")
@click.option("--vocab", type=_SIZE, default=128256, show_default=True, help="Columns of the logits.")
@click.option(
    "--rows", type=_SIZE, multiple=True,
    help="Tokens of a step; may be repeated.  [default: 8192 to train, 1 to 512 by powers of two to serve]",
)  # fmt: skip
@click.option("--hidden", type=_SIZE, default=4096, show_default=True, help="Columns of the hidden states.")
@click.option("--heads", type=_SIZE, default=32, show_default=True, help="Heads of the queries.")
@click.option("--key-heads", type=_SIZE, default=8, show_default=True, help="Heads of keys and values.")
@click.option("--head-dim", type=Whole(1, 256), default=128, show_default=True, help="Dims of a head.")
@click.option(
    "--context", "contexts", type=_SIZE, multiple=True, default=(4096,), show_default=True,
    help="Lengths of sequences; may be repeated.",
)  # fmt: skip
@click.option("--processes", type=Whole(1), help="How many compile at a time.  [default: the cores, at most 16]")
@click.option(
    "--folder", type=paths.FILE, callback=paths.folder, help="Triton's cache.  [default: TRITON_CACHE_DIR, or Triton's]"
)
def warm(
    uses: tuple[str, ...], device: str | None, dtype: str, rows: tuple[int, ...], processes: int | None,
    folder: Path | None, **sizes: Any,
) -> None:  # fmt: skip
    """Compile what training or serving a model needs into Triton's cache, in parallel, with or without the GPU.

    A container can ship the folder. A process that makes these calls later compiles nothing.
    """
    import time

    with importing():
        import torch
        from triton import knobs
    if folder is None:  # before what builds its C sources there
        paths.folder(None, None, Path(knobs.cache.dir))
    with importing():
        from fused_softmax import ahead
        from fused_softmax.warm.uses import ROWS, USES, Model
    if sizes["heads"] % sizes["key_heads"]:
        raise click.UsageError(f"--heads {sizes['heads']} is not a multiple of --key-heads {sizes['key_heads']}")
    if device is None and not torch.cuda.is_available():
        raise click.UsageError("there is no GPU here: name the card by --device")
    calls = []
    for use in dict.fromkeys(uses):
        model = Model(dtype=getattr(torch, dtype), rows=rows or ROWS[use], **sizes)
        calls += list(USES[use](model))
    began, kernels = time.perf_counter(), []
    try:
        with busy(f"compiling for {number_of(len(calls), 'call')}"):
            for each in ahead.compiling(calls, device, processes, folder):
                kernels.append(each)
    except (RuntimeError, ValueError) as error:  # a kernel that does not compile; a shape that no call can have
        kind = click.UsageError if isinstance(error, ValueError) else click.ClickException
        said = re.sub(r"^call \d+: \w+: ", "", str(error).removeprefix("warmup: "))  # of a call that nobody numbered
        raise kind(said) from None
    compiled = sum(not each.found for each in kernels)
    seconds = time.perf_counter() - began
    calls_take = number_of(len(calls), "call takes", "calls take")
    click.echo(f"{calls_take} {number_of(len(kernels), 'kernel')}: {compiled} compiled in {seconds:.1f} s")


if __name__ == "__main__":
    main(prog_name="fused-softmax")
