"""A run's charts, as Vega-Lite by Altair. The page, its image files and the picture of a run show the same ones.

A provider has the same colour, shape and dash everywhere; the ceiling is a line of its own.
"""

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import altair as alt
import vl_convert

from fused_softmax.bench.cases import Case, in_time
from fused_softmax.bench.catalog import OWN, in_order, look_of
from fused_softmax.bench.results.record import Point, Run, ceiling_of, floor_of
from fused_softmax.bench.show import summary

INK = "#1a1c1f"  # the ceiling's colour; the dark page replaces it by a light one
CEILING_DASH = [3, 1]
VEGA_LITE = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
BAR = "M-.9,-.12L.9,-.12L.9,.12L-.9,.12Z"
SIZE_LABEL = (
    "datum.value >= 1048576 ? format(datum.value / 1048576, '~g') + 'Mi' : "
    "datum.value >= 1024 ? format(datum.value / 1024, '~g') + 'Ki' : format(datum.value, '~g')"
)
WORDS = {"n_cols": "columns", "n_rows": "rows"}
# A map of rows by columns is drawn where at least this part of it has a figure.
DENSE = 0.4
VALIDATE = False  # against Vega-Lite's schema: takes half of the time, so only the tests do it
CROWDED = 60  # from so many points on, a line's marks are small


@dataclass(frozen=True)
class Chart:
    """A chart. name: of its files. caption: a sentence on what it shows, also for people who cannot see it."""

    name: str
    title: str
    caption: str
    spec: dict[str, Any]
    shown: str = ""  # in a grid, the line that is shown at first
    dots: bool = False  # one line of marks for each shape: long names on the left leave little room for a legend


@dataclass(frozen=True)
class Group:
    """The charts of one operation and dtype of a run."""

    operation: str
    dtype: str
    charts: list[Chart]


class Panel:
    """The points of one operation and dtype as rows of data, and everything that their charts share."""

    def __init__(self, run: Run, points: Sequence[Point], stem: str, interactive: bool = True):
        """interactive: a reader can choose providers, and of a grid of rows by columns the line that is shown."""
        self.run, self.stem, self.interactive = run, stem, interactive
        self.on_gpu = any(point.kernel for point in run.points)
        self.points = [point for point in points if (point.kernel if self.on_gpu else point.call)]
        self.axis, self.at = axis_of([point.case for point in self.points])
        self.by = ""  # in a grid, the size that stays the same along a line
        if interactive and self.axis == "shape" and (grid := grid_of([point.case for point in self.points])):
            self.axis, self.by = grid
            self.at = {case: getattr(case, self.axis) for case in self.at}
        names = {point.provider for point in self.points}
        self.names = in_order(names)
        self.ceiling = f"best {ceiling_of(run)}"
        self.tops = {point.case: point.ceiling for point in self.points if point.ceiling}
        self.kind = f"{points[0].operation}, {points[0].dtype}"
        self.title = f"{summary.title_of(points[0].operation)}, {points[0].dtype}"
        self.floor = floor_of(run)

    @property
    def shapes(self) -> list[str]:
        """The shapes, in the order of their places."""
        return [case.size for case in sorted(self.at, key=lambda case: (self.at[case], case.n_rows))]

    def row(self, point: Point, **more: Any) -> dict[str, Any]:
        return {**self.place(point.case), "provider": point.provider, **more}

    def place(self, case: Case) -> dict[str, Any]:
        place: dict[str, Any] = {"at": self.at[case], "shape": case.size}
        return place | ({"by": getattr(case, self.by)} if self.by else {})

    def chart(self, kind: str, title: str, caption: str, chart: Any) -> Chart:
        slug = re.sub(r"[^a-z0-9]+", "_", f"{self.stem}_{self.kind}_{kind}".lower())
        autosize = alt.AutoSizeParams(type="fit-x", contains="padding")
        spec = _shortened(chart.properties(width="container", autosize=autosize).to_dict(validate=VALIDATE))
        curves = kind in ("speed", "ratio", "memory")
        shown = f"{max(getattr(p.case, self.by) for p in self.points)} {WORDS[self.by]}" if self.by and curves else ""
        return Chart(slug, f"{title}: {self.title}", caption, spec, shown, curves and self.axis == "shape")

    def looks(self, ceiling: bool) -> dict[str, Any]:
        """The encodings that tell providers apart, each the whole legend."""
        names = [*self.names, *([self.ceiling] if ceiling else [])]
        looks = [look_of(name) for name in self.names]
        colours, marks = [look.colour for look in looks], [look.shape for look in looks]
        dashes = [list(look.dash) for look in looks]
        if ceiling:
            colours, marks, dashes = [*colours, INK], [*marks, BAR], [*dashes, CEILING_DASH]
        legend = alt.Legend(title=None, orient="bottom", symbolStrokeWidth=2, labelLimit=170)
        return {
            "color": alt.Color("provider:N", scale=alt.Scale(domain=names, range=colours), legend=legend),
            "shape": alt.Shape("provider:N", scale=alt.Scale(domain=names, range=marks), legend=legend),
            "strokeDash": alt.StrokeDash("provider:N", scale=alt.Scale(domain=names, range=dashes), legend=legend),
        }

    def lines(self, rows: list[dict[str, Any]], field: str, title: str, ceiling: bool, log: bool = False) -> Any:
        """A line for every provider over what varies, or, where shapes have no order, a mark on a line for each."""
        looks = self.looks(ceiling)
        scale = alt.Scale(type="log", nice=False) if log else alt.Scale(zero=True)
        value: dict[str, Any] = {"title": title, "scale": scale}
        tooltip = [
            alt.Tooltip("provider:N"),
            alt.Tooltip("shape:N"),
            alt.Tooltip(f"{field}:Q", title=title, format=".4~g"),
        ]
        picked = alt.selection_point(fields=["provider"], bind="legend")
        picks = [picked] if self.interactive else []
        faint = {"opacity": alt.when(picked).then(alt.value(1)).otherwise(alt.value(0.12)) if picks else alt.value(1)}
        data = alt.Chart(alt.Data(values=rows))
        if self.axis == "shape":
            places = alt.Y("shape:N", sort=self.shapes, title=None, axis=alt.Axis(labelLimit=190, grid=True))
            where = alt.X(f"{field}:Q", **value), places, looks["color"]
            of_ceiling = f"datum.provider == '{self.ceiling}'"
            tops = data.mark_tick(thickness=2.5, size=18).encode(*where, tooltip=tooltip).transform_filter(of_ceiling)
            marks = data.mark_point(filled=True, size=70, strokeWidth=2).encode(
                *where, looks["shape"], tooltip=tooltip, **faint
            )
            marks = marks.transform_filter(f"!({of_ceiling})").add_params(*picks)
            return (alt.layer(tops, marks) if ceiling else marks).properties(height=26 * len(self.shapes))
        x, y = self.along(), alt.Y(f"{field}:Q", **value)
        crowded = len({row["at"] for row in rows}) > CROWDED
        scattered = clustered(self.at.values())
        line = data.mark_line(strokeWidth=1.8).encode(x, y, looks["color"], looks["strokeDash"], **faint)
        marks = data.mark_point(filled=True, size=9 if crowded else 42, strokeWidth=1.5).encode(
            x, y, looks["color"], looks["shape"], tooltip=tooltip, **faint
        )
        if scattered:
            shown = marks.encode(size=alt.value(24))
        elif not crowded:
            shown = marks.transform_filter(alt.datum.provider != self.ceiling)
        else:  # on a crowded line every eighth point is marked, enough to tell the lines apart
            shown = marks.transform_filter(f"datum.place % 8 == 0 && datum.provider != '{self.ceiling}'").encode(
                size=alt.value(42)
            )
        hover = data.mark_point(size=120, opacity=0).encode(x, y, tooltip=tooltip)
        layers = alt.layer(*([] if scattered else [line]), shown, hover).add_params(*picks).properties(height=300)
        if not self.by:
            return layers
        sizes = sorted({row["by"] for row in rows})
        chosen = alt.param(bind=alt.binding_select(options=sizes, name=f"{WORDS[self.by]} "), value=sizes[-1])
        return layers.add_params(chosen).transform_filter(alt.datum.by == chosen)

    def along(self) -> alt.X:
        """The axis of the varying size: logarithmic if it spans more than four powers of two."""
        places = list(self.at.values())
        title = WORDS[self.axis]
        if max(places) <= 16 * min(places):
            return alt.X("at:Q", title=title, scale=alt.Scale(zero=False, nice=False, padding=8))
        low, high = math.floor(math.log2(min(places))), math.ceil(math.log2(max(places)))
        values = [2**i for i in range(low, high + 1)]
        axis = alt.Axis(values=values, labelExpr=SIZE_LABEL, labelOverlap="greedy", labelSeparation=6)
        return alt.X("at:Q", title=title, scale=alt.Scale(type="log", base=2, nice=False, padding=8), axis=axis)

    def placed(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows, sorted, each with its number along its provider's line."""
        rows = sorted(rows, key=lambda row: row["at"])
        seen: Counter[tuple[Any, ...]] = Counter()
        for row in rows:
            line = row["provider"], row.get("by")
            row["place"] = seen[line]
            seen[line] += 1
        return rows

    def speed(self) -> Chart:
        if self.in_time:
            what, better = "Time" + (" on the GPU" if self.on_gpu else ", eager wall time"), "lower"
            top = "is a product of matrices alone, in the same run"
        else:
            what, better = f"GB/s of {self.floor}" + ("" if self.on_gpu else ", eager wall time"), "higher"
            top = "moved as many bytes in the same run and computed nothing"
        caption = f"{what}; {better} is better." + (f" The {self.ceiling} {top}." if self.tops else "")
        return self.chart("speed", "Time" if self.in_time else "Speed", caption, self.speed_lines())

    @property
    def in_time(self) -> bool:
        """Whether its figures are times, and not GB/s."""
        return in_time(self.points[0].case)

    def speed_lines(self) -> Any:
        """GB/s of every provider and the ceiling, or ms of what is timed."""

        def value(figure: Any) -> float:
            return figure.p50_us / 1e3 if self.in_time else figure.gb_per_s

        rows = [self.row(p, value=value(_figure(p, self.on_gpu))) for p in self.points]
        rows += [{**self.place(case), "provider": self.ceiling, "value": value(top)} for case, top in self.tops.items()]
        unit = "ms" if self.in_time else "GB/s"
        return self.lines(self.placed(rows), "value", unit, ceiling=bool(self.tops), log=self.in_time)

    def ratio(self) -> Chart | None:
        rows = [self.row(p, value=p.ratio) for p in self.points if p.ratio is not None]
        if not rows:
            return None
        chart = self.lines(self.placed(rows), "value", "ratio to the ceiling", ceiling=False)
        one = alt.Chart(alt.Data(values=[{"one": 1}])).mark_rule(color=INK, strokeDash=CEILING_DASH)
        one = one.encode(alt.X("one:Q") if self.axis == "shape" else alt.Y("one:Q"))
        caption = f"Speed as a part of the {self.ceiling}'s in the same rounds; 1 is as fast as memory moves."
        return self.chart("ratio", "Ratio to the ceiling", caption, (one + chart).properties(height=chart.height))

    def speed_up(self) -> Chart | None:
        """This package over the others, or a map of rows by columns over torch if the points fill it."""
        own = {p.case: _figure(p, self.on_gpu).p50_us for p in self.points if p.provider == OWN}
        others = [name for name in self.names if name != OWN]
        rows = [
            {
                "rows": p.n_rows, "cols": p.n_cols, "shape": p.case.size, "over": p.provider,
                "factor": (factor := _figure(p, self.on_gpu).p50_us / own[p.case]), "log": math.log2(factor),
            }
            for p in self.points
            if p.provider in others and p.case in own
        ]  # fmt: skip
        if not rows:
            return None
        widest = max(1.0, max(abs(row["log"]) for row in rows))
        colour = alt.Color(
            "log:Q",
            title="times as fast",
            scale=alt.Scale(domain=[-widest, 0, widest], range=["#b2561b", "#f3efe6", "#14618f"], interpolate="lab"),
            legend=alt.Legend(
                orient="bottom", labelExpr="format(pow(2, datum.value), '.2~r') + '×'", gradientLength=180
            ),
        )
        over_torch = [row for row in rows if row["over"] == "torch"]
        grid = grid_of([Case((row["rows"], row["cols"])) for row in over_torch]) if self.by else None
        if grid:
            y, x = (name.removeprefix("n_") for name in grid)
            rows, lines = over_torch, len({row[y] for row in over_torch})
            tilt = -45 if len({row[x] for row in rows}) > 4 else 0
            axis = alt.Axis(orient="top", labelAngle=tilt)
            places = alt.X(f"{x}:O", axis=axis, sort="ascending"), alt.Y(f"{y}:O")
            how = "over torch, by rows and columns"
        else:
            sort = [shape for shape in self.shapes if any(row["shape"] == shape for row in rows)]
            lines = len(sort)
            axis = alt.Axis(orient="top", labelAngle=-45 if len(others) > 3 else 0, labelLimit=90)
            places = (
                alt.X("over:N", sort=others, title="over", axis=axis),
                alt.Y("shape:N", sort=sort, title=None, axis=alt.Axis(labelLimit=190)),
            )
            how = "over each of the others"
        tooltip = ["shape:N", "over:N", alt.Tooltip("factor:Q", format=".3~g", title="times as fast")]
        data = alt.Chart(alt.Data(values=rows)).encode(*places)
        cells = data.mark_rect(stroke="#88888855").encode(colour, tooltip=tooltip)
        dark = abs(alt.datum.log) > 0.8 * widest
        text = data.mark_text(fontSize=11).encode(
            alt.Text("factor:Q", format=".2f"),
            color=alt.when(dark).then(alt.value("#ffffff")).otherwise(alt.value("#16181a")),
        )
        caption = f"How many times as fast this package is, {how}, by {'kernel' if self.on_gpu else 'wall'} time."
        return self.chart("speed_up", "Speed-up", caption, (cells + text).properties(height=20 * lines))

    def call_against_kernel(self) -> Chart | None:
        rows = [self.row(p, kernel=p.kernel.p50_us, call=p.call.p50_us) for p in self.points if p.kernel and p.call]
        if not rows:
            return None
        looks = self.looks(ceiling=False)
        low = min(min(row["kernel"], row["call"]) for row in rows)
        high = max(max(row["kernel"], row["call"]) for row in rows)
        scale = alt.Scale(type="log", nice=False, domain=[low / 1.15, high * 1.15])
        axis = alt.Axis(format="~g", labelOverlap="greedy", labelSeparation=6)
        x = alt.X("kernel:Q", title="kernel, us", scale=scale, axis=axis)
        y = alt.Y("call:Q", title="call, us", scale=scale, axis=axis)
        ends = [{"kernel": us, "call": us} for us in (low / 1.15, high * 1.15)]
        same = alt.Chart(alt.Data(values=ends)).mark_line(color=INK, strokeDash=CEILING_DASH, strokeWidth=1)
        tooltip = [
            "provider:N",
            "shape:N",
            alt.Tooltip("kernel:Q", format=".4~g"),
            alt.Tooltip("call:Q", format=".4~g"),
        ]
        picked = alt.selection_point(fields=["provider"], bind="legend")
        marks = alt.Chart(alt.Data(values=rows)).mark_point(filled=True, size=48, strokeWidth=1.5)
        marks = marks.encode(
            x, y, looks["color"], looks["shape"], tooltip=tooltip,
            opacity=alt.when(picked).then(alt.value(0.85)).otherwise(alt.value(0.1)),
        ).add_params(picked)  # fmt: skip
        caption = "Eager wall time against time on the GPU. On the line the host keeps up; above it, it does not."
        chart = (same.encode(x, y) + marks).properties(height=300)
        return self.chart("call", "Call against kernel", caption, chart)

    def memory(self) -> Chart | None:
        rows = [self.row(p, value=p.memory_bytes / 2**20) for p in self.points if p.memory_bytes]
        if not rows:
            return None
        caption = "The most memory that one call allocated at once, its result included, its inputs not."
        chart = self.lines(self.placed(rows), "value", "MiB", ceiling=False)
        return self.chart("memory", "Memory", caption, chart)

    def frontier(self) -> Chart | None:
        """Time against memory: a linear layer's loss with chunks of many sizes."""
        rows = [
            self.row(p, ms=p.kernel.p50_us / 1e3, mib=p.memory_bytes / 2**20)
            for p in self.points
            if p.kernel and p.memory_bytes and p.operation.startswith("linear_")
        ]
        if not rows:
            return None
        looks = self.looks(ceiling=False)
        shapes = [size for size in self.shapes if any(row["shape"] == size for row in rows)]
        largest = max(shapes, key=lambda size: min(row["ms"] for row in rows if row["shape"] == size))
        chosen = alt.param(bind=alt.binding_select(options=shapes, name="tokens x hidden x vocabulary "), value=largest)
        x = alt.X("mib:Q", title="MiB that a call allocated at most", scale=alt.Scale(zero=True))
        y = alt.Y("ms:Q", title="ms", scale=alt.Scale(zero=True))
        tooltip = [
            "provider:N", "shape:N", alt.Tooltip("ms:Q", format=".4~g"),
            alt.Tooltip("mib:Q", title="MiB", format=".4~g"),
        ]  # fmt: skip
        marks = alt.Chart(alt.Data(values=rows)).mark_point(filled=True, size=90, strokeWidth=2)
        marks = marks.encode(x, y, looks["color"], looks["shape"], tooltip=tooltip)
        marks = marks.transform_filter(alt.datum.shape == chosen)
        tops = [{"shape": case.size, "ms": top.p50_us / 1e3, "what": top.name} for case, top in self.tops.items()]
        floor = alt.Chart(alt.Data(values=tops)).mark_rule(color=INK, strokeDash=CEILING_DASH)
        floor = floor.encode(alt.Y("ms:Q"), tooltip=["what:N", "shape:N", alt.Tooltip("ms:Q", format=".4~g")])
        chart = alt.layer(floor.transform_filter(alt.datum.shape == chosen), marks).add_params(chosen)
        caption = (
            "Time on the GPU against the most memory that one call allocated, its gradients included, its inputs not. "
            "Lower left is better; the line is the matrix products alone."
        )
        return self.chart("frontier", "Time against memory", caption, chart.properties(height=300))


def _shortened(part: Any) -> Any:
    """A specification with numbers of five digits. More digits made a third of the page and cannot be seen."""
    if isinstance(part, float):
        return float(f"{part:.5g}")
    if isinstance(part, dict):
        return {name: _shortened(value) for name, value in part.items()}
    return [_shortened(each) for each in part] if isinstance(part, list) else part


def grid_of(cases: Iterable[Case]) -> tuple[str, str] | None:
    """The two sizes of shapes that fill a grid of rows by columns well enough, the more numerous size first."""
    different = set(cases)
    n_rows, n_cols = ({getattr(case, name) for case in different} for name in ("n_rows", "n_cols"))
    flat = all(len(case.shape) == 2 for case in different)
    if not flat or min(len(n_rows), len(n_cols)) < 2 or len(different) < DENSE * len(n_rows) * len(n_cols):
        return None
    return ("n_rows", "n_cols") if len(n_rows) > len(n_cols) else ("n_cols", "n_rows")


def clustered(places: Iterable[int]) -> bool:
    """Whether most sizes stand close beside others, far from the next ones: a line through them is vertical strokes."""
    logs = [math.log(place) for place in sorted(set(places))]
    gaps = [after - before for before, after in pairwise(logs)]
    return bool(gaps) and statistics.median(gaps) < statistics.fmean(gaps) / 8


def axis_of(cases: Iterable[Case]) -> tuple[str, dict[Case, int]]:
    """The axis that tells the cases apart (row length, number of rows, or shape) and each case's place on it."""
    different = list(dict.fromkeys(cases))
    if all(len(case.shape) == 2 for case in different):
        for axis in ("n_cols", "n_rows"):
            at = {case: getattr(case, axis) for case in different}
            if len(set(at.values())) == len(at):
                return axis, at
    return "shape", {case: place for place, case in enumerate(different)}


def rows_of(counts: Iterable[int]) -> str:
    low, *others = sorted(set(counts))
    if others:
        return f"{low} to {others[-1]} rows"
    return f"{low} row" + "s" * (low > 1)


def _panels(run: Run, stem: str = "", interactive: bool = True) -> list[Panel]:
    """A panel for each operation and dtype of which a run has figures."""
    kinds: dict[tuple[str, str], list[Point]] = {}
    for point in run.points:
        kinds.setdefault((point.operation, point.dtype), []).append(point)
    return [panel for points in kinds.values() if (panel := Panel(run, points, stem, interactive)).points]


def groups(run: Run, stem: str) -> list[Group]:
    """A run's charts, by operation and dtype. Charts without figures are left out."""
    found = []
    for panel in _panels(run, stem):
        makers: list[Callable[[], Chart | None]] = [
            panel.speed, panel.ratio, panel.speed_up, panel.call_against_kernel, panel.memory, panel.frontier,
        ]  # fmt: skip
        charts = [chart for make in makers if (chart := make())]
        found.append(Group(panel.points[0].operation, panel.points[0].dtype, charts))
    return found


def picture(run: Run) -> dict[str, Any]:
    """The speed at every operation and dtype, side by side, with one legend."""
    panels = _panels(run, interactive=False)
    names = in_order({name for panel in panels for name in panel.names})
    charts = []
    for panel in panels:
        panel.names = names
        rows = f", {rows_of(p.n_rows for p in panel.points)}" if panel.axis == "n_cols" else ""
        charts.append(panel.speed_lines().properties(width=520, title=f"{panel.title}{rows}"))
    floor = "" if all(panel.in_time for panel in panels) else f"; GB/s of {floor_of(run)}"
    where = f"{summary.machine_of(run)}{floor}" if panels[0].on_gpu else f"torch on a CPU{floor}; eager wall time"
    shared = all(panel.axis != "shape" and not panel.in_time for panel in panels)
    whole = alt.concat(*charts, columns=2, title=where).resolve_scale(y="shared" if shared else "independent")
    return whole.to_dict(validate=VALIDATE)


def pictures(runs: Sequence[Run]) -> dict[str, Any]:
    """The pictures of runs, each with a legend of its own, one below another."""
    first, *others = map(picture, runs)
    if not others:
        return first
    each_its_own = {"scale": dict.fromkeys(("color", "shape", "strokeDash"), "independent")}
    return {"vconcat": [bare(each) for each in (first, *others)], "spacing": 40, "resolve": each_its_own}


def drawn(spec: dict[str, Any], suffix: str, scale: float) -> bytes:
    """The image file of a specification. suffix: ".png", ".svg" or ".pdf". scale: pixels of a PNG for each of ours."""
    text = json.dumps(bare(spec) | {"background": "white"})
    if suffix == ".png":
        return vl_convert.vegalite_to_png(text, vl_version=VEGA_LITE, scale=scale)
    if suffix == ".pdf":
        return vl_convert.vegalite_to_pdf(text, vl_version=VEGA_LITE)
    return vl_convert.vegalite_to_svg(text, vl_version=VEGA_LITE).encode()


def bare(spec: dict[str, Any]) -> dict[str, Any]:
    """A specification without its schema's address, which nothing reads, and without Altair's own sizes."""
    return {name: value for name, value in spec.items() if name not in ("$schema", "config")}


def _figure(point: Point, on_gpu: bool) -> Any:
    return point.kernel if on_gpu else point.call
