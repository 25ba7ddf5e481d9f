"""What a run prints: a row for every shape, then everything that has no figure and why."""

from collections.abc import Callable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from fused_softmax.bench.record import Point, Run


def print_head(run: Run, console: Console) -> None:
    env = run.environment
    gpu = env["gpu"]
    versions = ", ".join(f"{name} {env[name]}" for name in ("torch", "triton", "python"))
    say(console, f"{gpu['name'] if gpu else 'CPU, no GPU'}; {versions}")


def print_run(run: Run, console: Console) -> None:
    if any(point.kernel for point in run.points):
        title = "kernel: GB/s of one read and one write, and the ratio to the best copy kernel of the same bytes"
        print_table(run, console, title, cell, with_ceiling=True)
        print_table(run, console, "call: us of eager wall time, and us to enqueue it where the shape is small", call)
    elif any(point.call for point in run.points):
        print_table(run, console, "call: GB/s over eager wall time on the CPU, and its us", call_speed)
    for check in run.checks:
        error = "" if check.error is None else f", largest error {check.error:.1e}"
        shape = f"{check.n_rows} x {check.n_cols} {check.dtype}"
        detail = f": {check.message}" if check.message else error
        say(console, f"interpreter, {shape}, {check.kernel}: {check.status}{detail}")
    if run.checks:
        say(console, "No GPU: the kernels above were run in Triton's interpreter and compared, and not timed.")
    print_without_figure(run, console)


def print_table(
    run: Run, console: Console, title: str, text: Callable[[Point], str], with_ceiling: bool = False
) -> None:
    shown = [name for name in providers(run) if any(p.provider == name and p.status != "absent" for p in run.points)]
    plain = not console.is_terminal
    say(console, title)
    table = Table(box=None if plain else box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("rows x cols dtype", no_wrap=True)
    for name in shown:
        table.add_column(name, justify="right", overflow="fold")
    if with_ceiling:
        table.add_column("ceiling", justify="right", overflow="fold")
    by_case: dict[tuple, dict[str, Point]] = {}
    for point in run.points:
        by_case.setdefault((point.n_rows, point.n_cols, point.dtype), {})[point.provider] = point
    for (n_rows, n_cols, dtype), points in by_case.items():
        cells = [text(points[name]) if name in points else "" for name in shown]
        if with_ceiling:
            ceiling = next((point.ceiling for point in points.values() if point.ceiling), None)
            cells.append(f"{ceiling.gb_per_s:.0f} {ceiling.name}" if ceiling else "")
        table.add_row(f"{n_rows} x {n_cols} {dtype}", *cells)
    console.print(table)
    console.print()


def cell(point: Point) -> str:
    if point.kernel is None:
        return call_speed(point) if point.call else point.status
    mark = "*" if point.method == "events" else ""
    return f"{point.kernel.gb_per_s:.0f}{mark} {point.ratio:.3f}"


def call(point: Point) -> str:
    if point.call is None:
        return point.status
    return f"{point.call.p50_us:.1f}" + (f" ({point.host_us:.1f})" if point.host_us is not None else "")


def call_speed(point: Point) -> str:
    return f"{point.call.gb_per_s:.1f} ({point.call.p50_us:.0f})" if point.call else point.status


def print_without_figure(run: Run, console: Console) -> None:
    """One line for each different reason, with the shapes it holds for."""
    reasons: dict[tuple[str, str, str], list[Point]] = {}
    for point in run.points:
        if point.message:
            reasons.setdefault((point.provider, point.status, point.message), []).append(point)
    for (provider, status, message), points in reasons.items():
        first = f"{points[0].n_rows} x {points[0].n_cols} {points[0].dtype}"
        where = "" if status == "absent" else f" at {first}" + (f" and {len(points) - 1} more" if points[1:] else "")
        say(console, f"{provider}: {status}{where}: {message}")
    buffers = sorted({point.buffers for point in run.points if point.buffers})
    if buffers:
        span = f"{buffers[0]} to {buffers[-1]}" if buffers[1:] else str(buffers[0])
        l2 = run.environment["gpu"]["l2_bytes"]
        warm = sorted({f"{p.n_rows} x {p.n_cols}" for p in run.points if p.rotated_bytes and p.rotated_bytes <= 4 * l2})
        say(console, f"Kernel figures rotate over {span} input and output pairs.")
        if warm:
            say(console, f"Partly from L2, too small for rotation over four times its size: {', '.join(warm)}.")
    if any(point.method == "events" for point in run.points):
        say(console, "* could not be captured in a CUDA graph: timed by events around eager calls.")


def print_end(run: Run, console: Console, stopped: str, written: Sequence[Path]) -> None:
    if stopped:
        say(console, f"Stopped early: {stopped}. What was measured until then is kept; an earlier file is unchanged.")
    for path in written:
        say(console, f"wrote {path}")


def providers(run: Run) -> list[str]:
    return list(dict.fromkeys(point.provider for point in run.points))


def say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)
