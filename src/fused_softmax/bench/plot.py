"""GB/s over row length: a line for every provider, and the ceiling above them.

Kernel figures where a run has them, wall time otherwise; never both in one plot.
"""

import math
from collections.abc import Iterable
from pathlib import Path

from fused_softmax.bench.record import Point, Run

# Order and colours stand for providers, so that two plots read alike.
# Okabe and Ito's colours: apart without colour vision.
STYLES = {
    "fused_softmax": ("#D55E00", "o"),
    "torch": ("#0072B2", "s"),
    "torch.compile": ("#56B4E9", "D"),
    "naive": ("#999999", "x"),
    "persistent": ("#009E73", "^"),
    "hybrid": ("#CC79A7", "v"),
    "online": ("#E69F00", "P"),
    "liger": ("#8B6D05", "*"),
    "quack": ("#5D3A9B", "<"),
}


def plot(run: Run, path: Path) -> None:
    """Draw the run's figures, one panel for each dtype."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    on_gpu = any(point.kernel for point in run.points)
    points = [point for point in run.points if (point.kernel if on_gpu else point.call)]
    dtypes = list(dict.fromkeys(point.dtype for point in points))
    drawing = Figure(figsize=(7.5 * len(dtypes) + 1.5, 5), layout="constrained")
    FigureCanvasAgg(drawing)
    panels = drawing.subplots(1, len(dtypes), squeeze=False, sharey=True)[0]
    for panel, dtype in zip(panels, dtypes, strict=True):
        draw_panel(panel, [point for point in points if point.dtype == dtype], on_gpu)
    gpu = run.environment["gpu"]
    where = gpu["name"] if gpu else "CPU"
    panels[0].set_ylabel("GB/s of one read and one write" + ("" if on_gpu else ", eager wall time"))
    handles = {label: h for panel in panels for h, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    drawing.legend(handles.values(), handles.keys(), loc="outside right center", title=where, frameon=False)
    drawing.savefig(path, dpi=150)


def draw_panel(panel, points: list[Point], on_gpu: bool) -> None:
    names = {point.provider for point in points}
    for name in [*(name for name in STYLES if name in names), *sorted(names - STYLES.keys())]:
        line = sorted((p.n_cols, speed(p, on_gpu)) for p in points if p.provider == name)
        colour, marker = STYLES.get(name, ("#000000", "."))
        panel.plot(*zip(*line, strict=True), color=colour, marker=marker, markersize=4, linewidth=1.2, label=name)
    ceilings = sorted({(p.n_cols, p.ceiling.gb_per_s) for p in points if p.ceiling})
    if ceilings:
        panel.plot(*zip(*ceilings, strict=True), color="black", linestyle="--", linewidth=1.2, label="best copy kernel")
    panel.set_title(f"softmax forward, {points[0].dtype}, {rows_of(point.n_rows for point in points)}")
    widths = [point.n_cols for point in points]
    if max(widths) > 16 * min(widths):
        panel.set_xscale("log", base=2)
        ticks = range(math.floor(math.log2(min(widths))), math.ceil(math.log2(max(widths))) + 1)
        panel.set_xticks([2**tick for tick in ticks], [size(2**tick) for tick in ticks])
    panel.set_xlabel("n_cols")
    panel.set_ylim(bottom=0)
    panel.grid(True, color="#DDDDDD", linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)


def speed(point: Point, on_gpu: bool) -> float:
    figure = point.kernel if on_gpu else point.call
    assert figure
    return figure.gb_per_s


def rows_of(counts: Iterable[int]) -> str:
    low, *others = sorted(set(counts))
    if others:
        return f"{low} to {others[-1]} rows"
    return f"{low} row" + "s" * (low > 1)


def size(n: int) -> str:
    for unit, suffix in ((2**20, "Mi"), (2**10, "Ki")):
        if n >= unit:
            return f"{n // unit}{suffix}"
    return str(n)
