"""Plots GB/s over row length, or over what varies instead: a line for every provider, and the ceiling.

A plot shows kernel figures if the run has them, wall time otherwise, and never both.
"""

import hashlib
import io
import math
from collections.abc import Iterable
from pathlib import Path

from fused_softmax.bench.cases import Case
from fused_softmax.bench.catalog import in_order, look_of
from fused_softmax.bench.results.record import Point, Run, ceiling_of, floor_of, write_whole
from fused_softmax.bench.show.summary import title_of

SOURCE = "figures of fused-softmax bench "


def plot(run: Run, path: Path) -> None:
    """Draw the run's figures, one panel for each operation and dtype."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    on_gpu = any(point.kernel for point in run.points)
    points = [point for point in run.points if (point.kernel if on_gpu else point.call)]
    kinds = list(dict.fromkeys((point.operation, point.dtype) for point in points))
    drawing = Figure(figsize=(7.5 * len(kinds) + 1.5, 5), layout="constrained")
    FigureCanvasAgg(drawing)
    panels = drawing.subplots(1, len(kinds), squeeze=False, sharey=True)[0]
    for panel, kind in zip(panels, kinds, strict=True):
        shown = [point for point in points if (point.operation, point.dtype) == kind]
        draw_panel(panel, shown, on_gpu, f"best {ceiling_of(run)}")
    gpu = run.environment["gpu"]
    where = gpu["name"] if gpu else "CPU"
    panels[0].set_ylabel(f"GB/s of {floor_of(run)}" + ("" if on_gpu else ", eager wall time"))
    handles = {label: h for panel in panels for h, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    drawing.legend(handles.values(), handles.keys(), loc="outside right center", title=where, frameon=False)
    image = io.BytesIO()
    source = {"Subject" if path.suffix == ".pdf" else "Description": f"{SOURCE}{digest(run)}"}
    drawing.savefig(image, format=path.suffix[1:], dpi=150, metadata=source)
    write_whole(path, image.getvalue())


def digest(run: Run) -> str:
    """A digest of the plotted figures. It is stored in the picture, so that a stale picture can be told."""
    shown = [
        (
            str(p.case),
            p.provider,
            *(f"{figure.gb_per_s:.6g}" if figure else "" for figure in (p.kernel, p.call, p.ceiling)),
        )
        for p in run.points
    ]
    return hashlib.sha256(repr(shown).encode()).hexdigest()[:16]


def shows(path: Path, run: Run) -> bool:
    """Whether a file that `plot` wrote shows the figures of this run."""
    return f"{SOURCE}{digest(run)}".encode() in path.read_bytes()


def draw_panel(panel, points: list[Point], on_gpu: bool, ceiling: str) -> None:
    axis, at = axis_of([point.case for point in points])
    names = {point.provider for point in points}
    for name in in_order(names):
        line = sorted((at[p.case], speed(p, on_gpu)) for p in points if p.provider == name)
        look = look_of(name)
        kind = {"color": look.colour, "marker": look.marker, "markersize": 4, "linewidth": 1.2}
        panel.plot(*zip(*line, strict=True), label=name, **kind)
    ceilings = sorted({(at[p.case], p.ceiling.gb_per_s) for p in points if p.ceiling})
    if ceilings:
        panel.plot(*zip(*ceilings, strict=True), color="black", linestyle="--", linewidth=1.2, label=ceiling)
    operation = "softmax forward" if points[0].operation == "softmax" else title_of(points[0].operation)
    rows = f", {rows_of(point.n_rows for point in points)}" if axis == "n_cols" else ""
    panel.set_title(f"{operation}, {points[0].dtype}{rows}")
    places = at.values()
    if axis == "shape":
        panel.set_xticks(list(places), [case.size for case in at], rotation=30, ha="right")
    elif max(places) > 16 * min(places):
        panel.set_xscale("log", base=2)
        ticks = range(math.floor(math.log2(min(places))), math.ceil(math.log2(max(places))) + 1)
        panel.set_xticks([2**tick for tick in ticks], [size(2**tick) for tick in ticks])
    panel.set_xlabel(axis)
    panel.set_ylim(bottom=0)
    panel.grid(True, color="#DDDDDD", linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)


def axis_of(cases: Iterable[Case]) -> tuple[str, dict[Case, int]]:
    """The axis that tells the cases apart (row length, number of rows, or shape) and each case's place on it."""
    different = list(dict.fromkeys(cases))
    if all(len(case.shape) == 2 for case in different):
        for axis in ("n_cols", "n_rows"):
            at = {case: getattr(case, axis) for case in different}
            if len(set(at.values())) == len(at):
                return axis, at
    return "shape", {case: place for place, case in enumerate(different)}


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
