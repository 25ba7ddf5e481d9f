"""What a run prints: a row for every shape, then everything without a figure, and why."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from fused_softmax.bench import cases
from fused_softmax.bench.cases import Case, in_time
from fused_softmax.bench.catalog import OWN, TORCH
from fused_softmax.bench.entries.attention_kinds import flops
from fused_softmax.bench.results.compare import Comparison
from fused_softmax.bench.results.record import (
    FirstCall,
    Point,
    Run,
    ceiling_of,
    floor_of,
    found_nothing,
    rows_only,
    without_figure,
)
from fused_softmax.bench.show import first_calls, steps
from fused_softmax.classic.naive import naive_traffic
from fused_softmax.core.described import number_of
from fused_softmax.core.plan import Device, RowPlan
from fused_softmax.ops.attention.plan.hopper import plan_hopper
from fused_softmax.ops.attention.plan.sdpa import Pass, entry_of
from fused_softmax.ops.attention.plan.tiles import Tiles, plan_attention
from fused_softmax.ops.attention.ways import Choice

# Statuses that get a column even without a figure. Providers with another status are named beneath the table.
SHOWN = ("ok", "wrong", "refused", "skipped")
WORDS = ("", "case", "operation", "dtype", "provider", "clock", "step")  # columns that hold no numbers
CONSUMER_ROWS = 64  # of each consumer of `HopperTiles`: a test holds it to the kernels' own


def print_head(run: Run, console: Console) -> None:
    env = run.environment
    versions = ", ".join(f"{name} {env[name]}" for name in ("torch", "triton", "python"))
    say(console, f"{env['gpu']['name'] if env['gpu'] else 'no GPU'}; {versions}")


def print_who_computes(console: Console, providers: Sequence[str], timed: bool) -> None:
    """Without a GPU: what the figures are of. providers: those that are measured."""
    so = f"{OWN} is timed by them" if OWN in providers else f"{TORCH}'s times are also {OWN}'s"
    if not timed:
        so = f"{TORCH}'s results are also {OWN}'s"
    say(console, f"On a CPU torch computes: this package calls torch's operations there, so {so}.")
    if timed:
        say(console, "Its kernels do not run here. --verify-only compares them under Triton's interpreter.")


def print_run(run: Run, console: Console) -> None:
    if of_steps := steps.steps_of(run):
        print_steps(of_steps, console)
    elif any(point.kernel for point in run.points):
        title = f"kernel: GB/s of {floor_of(run)}, and the ratio to the best {ceiling_of(run)} that moves as much"
        if all(flops(point.case) for point in run.points):
            title = "kernel: TFLOP/s of the products (a gradient's with the forward pass), and the ratio to cuBLAS"
        print_table(run, console, title, cell, with_ceiling=True)
        print_table(run, console, "call: us of eager wall time; in brackets, us to enqueue one", call)
    elif any(point.call for point in run.points):
        print_table(run, console, "call: GB/s over eager wall time on the CPU; in brackets, its us", call_speed)
    elif run.points:
        print_table(run, console, "largest error against float64, and the error allowed", error)
    if any(p.memory_bytes and ("cross_entropy" in p.operation or "log_prob" in p.operation) for p in run.points):
        print_table(run, console, "memory: MiB that a call allocated at most, beside its inputs", memory)
    if run.first_calls:
        print_first_calls(run.first_calls, console)
    for check in run.checks:
        detail = check.message or f"largest error {check.error:.1e}"
        shape = f"{check.n_rows} x {check.n_cols} {check.dtype}"
        say(console, f"interpreter, {shape}, {check.kernel}: {check.status}, {detail}")
    print_without_figure(run, console)


def print_table(
    run: Run, console: Console, title: str, text: Callable[[Point], str], with_ceiling: bool = False
) -> None:
    shown = list(dict.fromkeys(p.provider for p in run.points if p.error is not None or p.status in SHOWN))
    plain = not console.is_terminal
    say(console, title)
    table = Table(box=None if plain else box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("rows x cols dtype" if rows_only(run) else "operation shape dtype", no_wrap=True)
    for name in shown:
        table.add_column(name, justify="right", overflow="fold")
    if with_ceiling:
        table.add_column("ceiling", justify="right", overflow="fold")
    by_case: dict[Case, dict[str, Point]] = {}
    for point in run.points:
        by_case.setdefault(point.case, {})[point.provider] = point
    for case, points in by_case.items():
        cells = [text(points[name]) if name in points else "" for name in shown]
        if with_ceiling:
            cells.append(next((top(point) for point in points.values() if point.ceiling), ""))
        table.add_row(str(case), *cells)
    show(console, table)
    console.print()


def print_steps(points: Sequence[Point], console: Console) -> None:
    say(console, f"{steps.ABOUT}. {steps.OF_ERRORS}.")
    table = new_table(console, *steps.HEADS)
    for row in steps.rows(points):
        table.add_row(*row)
    show(console, table)


def print_first_calls(found: Sequence[FirstCall], console: Console) -> None:
    heads, rows = first_calls.table(found)
    say(console, f"{first_calls.TITLE}. {first_calls.ABOUT}")
    table = new_table(console, "", *heads[1:-1])
    table.add_column(heads[-1], overflow="fold")
    for row in rows:
        table.add_row(*row)
    show(console, table)
    say(console, first_calls.apart(found))


def top(point: Point) -> str:
    """The ceiling beside which a point stands, and its speed."""
    ceiling, done = point.ceiling, flops(point.case)
    if ceiling is None:
        return ""
    if done and point.kernel and point.ratio:
        return f"{done / point.kernel.p50_us * 1e-6 / point.ratio:.0f} TFLOP/s {ceiling.name}"
    return (f"{ceiling.p50_us:.0f} us" if in_time(point.case) else f"{ceiling.gb_per_s:.0f}") + f" {ceiling.name}"


def cell(point: Point) -> str:
    if point.kernel is None:
        return call_speed(point) if point.call else point.status
    mark = "*" if point.method == "events" else ""
    if done := flops(point.case):
        return f"{done / point.kernel.p50_us * 1e-6:.0f} TFLOP/s{mark} {point.ratio:.3f}"
    if in_time(point.case):
        return f"{point.kernel.p50_us:.0f} us{mark} {point.ratio:.3f}"
    return f"{point.kernel.gb_per_s:.0f}{mark} {point.ratio:.3f}"


def call(point: Point) -> str:
    if point.call is None:
        return point.status
    return f"{point.call.p50_us:.1f}" + (f" ({point.host_us:.1f})" if point.host_us is not None else "")


def error(point: Point) -> str:
    return point.status if point.error is None else f"{point.error:.1e} {point.error_allowed:.1e}"


def memory(point: Point) -> str:
    return point.status if point.memory_bytes is None else f"{point.memory_bytes / 2**20:.1f}"


def call_speed(point: Point) -> str:
    if point.call and in_time(point.case):
        return f"({point.call.p50_us:.0f})"
    return f"{point.call.gb_per_s:.1f} ({point.call.p50_us:.0f})" if point.call else point.status


def print_without_figure(run: Run, console: Console) -> None:
    """One line for each reason, with the shapes that it applies to, and how the figures were taken."""
    for line in without_figure(run.points):
        say(console, line)
    for point in run.points:
        handed = [which for which, who in (point.plan or {}).get("who", {}).items() if who == "cuDNN"]
        if handed:
            say(console, f"{point.provider} hands {point.case} to cuDNN: {' and '.join(handed)}.")
    buffers = sorted({point.buffers for point in run.points if point.buffers})
    if buffers:
        l2 = run.environment["gpu"]["l2_bytes"]
        warm = sorted({p.case.size for p in run.points if p.rotated_bytes and p.rotated_bytes <= 4 * l2})
        sets = f"{buffers[0]} to {buffers[-1]} sets" if buffers[1:] else number_of(buffers[0], "set")
        say(console, f"Kernel figures rotate over {sets} of inputs and outputs.")
        if warm:
            say(console, f"Read partly from L2, too small to rotate over four times its size: {', '.join(warm)}.")
    if throttled := sorted({reason for p in run.points for reason in (p.clocks or {}).get("throttled", ())}):
        say(console, f"The GPU lowered its clocks while it was timed: {', '.join(throttled)}.")
    if any(point.method == "events" for point in run.points):
        say(console, "* could not be captured in a CUDA graph; timed by events around eager calls.")


def print_end(run: Run, console: Console, stopped: str, written: Sequence[Path]) -> None:
    if stopped:
        kept = "Nothing was written."
        if written:
            kept = f"{written[0]} has what was measured; the same command with --resume continues from here."
        say(console, f"Stopped early: {stopped}. {kept}")
        return
    for path in written:
        say(console, f"wrote {path}")


def say_if_nothing(run: Run, progress: Console, stopped: str) -> None:
    """Of a run to its end that found nothing: the first reason, for standard output may be a file."""
    if not stopped and found_nothing(run):
        reasons = without_figure(run.points)
        more = f" (and {len(reasons) - 1} more)" if reasons[1:] else ""
        say(progress, f"Error: nothing was measured: {reasons[0]}{more}")


def duration(seconds: float) -> str:
    """A time span for people: 40 s, 12 min, 1 h 5 min."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def show(console: Console, table: Table) -> None:
    """Print a table. On a terminal too narrow for its words, a row goes on in the next line: no word is folded."""
    for column in table.columns:
        words = [word for cell in (column.header, *column.cells) for word in str(cell).split()]
        column.min_width = max(map(len, words), default=0)
    if _least_width(console, table) > console.width:
        table.box = None
        table.width = max(console.width, _least_width(console, table))
    console.print(table, crop=False)


def _least_width(console: Console, table: Table) -> int:
    return Measurement.get(console, console.options.update(max_width=10_000), table).minimum


def say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def print_comparison(found: Comparison, console: Console, everything: bool) -> None:
    """One line for each change (or for every point), then geometric means, then totals."""
    for difference in found.differences:
        say(console, f"note: {difference}")
    shown = [change for change in found.changes if everything or change.verdict != "same"]
    if shown:
        table = new_table(console, "case", "provider", "clock", "before us", "after us", "after/before", "")
        for each in shown:
            times = (f"{figure.p50_us:.2f}" for figure in (each.before, each.after))
            table.add_row(str(each.case), each.provider, each.clock, *times, f"{each.factor:.3f}", each.verdict)
        show(console, table)
    for lost in found.lost:
        say(console, f"{lost.provider} at {lost.case}: had a figure, now {lost.status}: {lost.message}")
    if found.changes:
        heads = ("operation", "dtype", "provider", "clock", "points", "faster", "slower", "geometric mean")
        table = new_table(console, *heads)
        for key, (mean, count, faster, slower) in found.means().items():
            table.add_row(*key, str(count), str(faster), str(slower), f"{mean:.3f}")
        show(console, table)
    say(
        console,
        "; ".join([f"{number_of(len(found.changes) + len(found.lost), 'point')} compared", *only_in_one(found)]),
    )


def only_in_one(found: Comparison) -> list[str]:
    """How many points one of the runs has alone, in words."""
    counts = (found.only_before, "first"), (found.only_after, "second")
    return [f"{number_of(n, 'point is', 'points are')} only in the {which} file" for n, which in counts if n]


def new_table(console: Console, *heads: str) -> Table:
    table = Table(box=None if not console.is_terminal else box.SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        table.add_column(head, overflow="fold", justify="left" if head in WORDS else "right")
    return table


def plan_facts(plan: RowPlan, device: Device) -> dict[str, Any]:
    """The plan, its reasons, the bytes it and others move, and the floor's time at the device's copy speed.

    torch_bytes: counted in torch's source for aligned rows; bytes that its kernel reads again may come from L2.
    """
    moved = (plan.reads + plan.writes) * plan.itemsize
    floor = 2 * plan.n_rows * plan.n_cols * plan.itemsize
    naive = naive_traffic(plan.n_rows, plan.n_cols)
    speed = device.copy_bytes_per_second
    return {
        "device": device.name,
        **plan.data(),
        "programs": plan.programs,
        "why": list(plan.reasons),
        "traffic_bytes": moved,
        "floor_bytes": floor,
        "traffic_over_floor": moved / floor,
        "torch_bytes": floor * (torch_reads(plan.n_cols, plan.itemsize) + 1) // 2,
        "naive_bytes": (naive.reads + naive.writes) * plan.itemsize,
        "floor_us": floor / speed * 1e6 if speed else None,
    }


def attention_facts(shape: Sequence[int], itemsize: int, device: Device) -> dict[str, Any]:
    """Who computes each pass of plain attention, and why; the kernels' tiles.

    Those of the plain kernels are by what is done to scores.

    shape: batch, heads, length, dim.
    """
    *heads, length, dim = shape
    found: dict[str, Any] = {"device": device.name, "shape": " x ".join(map(str, shape)), "itemsize": itemsize}
    if itemsize == cases.ITEMSIZE["float64"]:
        why = "torch's operations: no kernel of attention takes float64"
        return found | dict.fromkeys(("plain forward", "plain backward"), why)
    gluon = gluon_tiles(length, dim, itemsize, device)
    ours = f"the {'Gluon' if gluon else 'plain'} kernels, by these tiles"
    passes: tuple[Pass, ...] = ("forward", "backward")
    for which in passes:
        entry = entry_of(which, dim, dim, itemsize, math.prod(heads), length, length, device)
        found[f"plain {which}"] = ours if isinstance(entry, str) else f"cuDNN, by torch; measured, {entry.note}"
    if gluon:
        found["Gluon kernels"] = gluon
    for extras, what in enumerate(("nothing done to scores", "one thing, as a bias", "two or more")):
        plan = plan_attention(dim, dim, itemsize, length, length, device, extras)
        found[f"plain kernels, {what}"] = {
            kernel: f"{each.block_m} queries x {each.block_n} keys, {number_of(each.num_warps, 'warp')}, "
            + number_of(each.num_stages, "stage")
            for kernel, each in vars(plan).items()
            if isinstance(each, Tiles)
        }
    return found


def ways_facts(choices: Sequence[Choice]) -> dict[str, Any]:
    """Which way takes each pass of attention, and why those that stand before it do not."""
    return {
        f"{each.of}, by {each.way.name}": {f"not by {name}": why for name, why in each.refused.items()}
        for each in choices
    }


def gluon_tiles(length: int, dim: int, itemsize: int, device: Device) -> dict[str, str]:
    """Of each kernel of plain attention, where the GPU and the heads have one."""
    found = {}
    for kernel, mine, by in (
        ("forward", "queries", "keys"),
        ("keys", "keys", "queries"),
        ("queries", "queries", "keys"),
    ):
        plan = plan_hopper(dim, dim, itemsize, length, device, kernel)
        if not isinstance(plan, str):
            found[kernel] = (
                f"{plan.consumers * CONSUMER_ROWS} {mine} x {plan.block} {by}, {number_of(plan.stages, 'stage')}"
            )
    return found


def torch_reads(n_cols: int, itemsize: int) -> int:
    """How often torch's softmax reads a row: once if a warp, the registers or 48 KiB hold it, else three times."""
    held = n_cols <= 9 * 1024 or (n_cols * itemsize < 48 * 1024 and n_cols * itemsize % 16 == 0)
    return 1 if held else 3


def print_facts(facts: dict[str, Any], console: Console) -> None:
    """Names and values, one to a line; nested ones are indented."""
    for name, value in facts.items():
        if isinstance(value, list):
            for line in value or ["unknown"]:
                say(console, f"{name:20} {line}")
        elif isinstance(value, dict):
            say(console, name)
            print_facts({f"  {key}": inner for key, inner in value.items()}, console)
        else:
            text = (
                f"{value:,}"
                if name.endswith(("_bytes", "elements"))
                else f"{value:.4g}"
                if isinstance(value, float)
                else value
            )
            say(console, f"{name:20} {'unknown' if text is None else text}")
