"""One self-contained page of several results, and its charts as files."""

import base64
import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import vl_convert

from fused_softmax.bench import committed
from fused_softmax.bench.catalog import PROVIDERS
from fused_softmax.bench.results import fingerprint, record
from fused_softmax.bench.results.record import Run
from fused_softmax.bench.show import charts, first_calls, summary
from fused_softmax.core import files
from fused_softmax.core.described import number_of

# Colours for a white page, and their replacements on a black one.
DARK = {charts.INK: "#e8e6e1"} | {each.look.colour: each.look.dark for each in PROVIDERS if each.look.dark}
SUFFIXES = (".svg", ".png")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


@dataclass(frozen=True)
class Part:
    """A results file on the page."""

    stem: str
    run: Run
    groups: list[charts.Group]
    summaries: list[summary.Summary]

    @property
    def gpu(self) -> str:
        return summary.machine_of(self.run)

    @property
    def title(self) -> str:
        """Its name for people: of a file that is not committed, its operations."""
        operations = dict.fromkeys(summary.title_of(point.operation) for point in self.run.points)
        if self.run.first_calls:
            operations["First calls"] = None
        if row := (committed.COMMITTED | committed.OVER_RANKS).get(self.stem):
            return row.title
        return ", ".join(operations) or "No results"

    @property
    def about(self) -> str:
        """What it holds, in a line."""
        points, first = self.run.points, self.run.first_calls
        if first:
            kernels = number_of(sum(len(each.kernels) for each in first), "kernel")
            return f"{number_of(len(first), 'process', 'processes')}, {kernels} compiled"
        counts = (len({each(p) for p in points}) for each in (_shape, lambda p: p.dtype, lambda p: p.provider))
        return ", ".join(map(number_of, counts, ("shape", "dtype", "implementation")))

    @property
    def peers(self) -> list[str]:
        return list(dict.fromkeys(name for each in self.summaries for name in each.over))

    @property
    def failed(self) -> list[str]:
        return summary.failed(self.run)

    @property
    def difference(self) -> str:
        """How the kernels measured differ from the present ones, or ""."""
        return fingerprint.difference(self.run.environment, operations={p.operation for p in self.run.points})

    @property
    def age(self) -> str:
        """That the figures are not of the present kernels, in words, or ""."""
        return f"Not of the present kernels: {self.difference}." if self.difference else ""

    @property
    def facts(self) -> list[tuple[str, str]]:
        """The environment, one line for each known fact."""
        env = dict(self.run.environment)
        env.pop("kernels_of", None)
        gpu = {f"GPU {name}": value for name, value in (env.pop("gpu", None) or {"": "none"}).items()}
        pairs = [*((name, env[name]) for name in env), *gpu.items(), *self.run.options.items()]
        return [(name.replace("_", " ").strip(), text(value, name)) for name, value in pairs if value is not None]

    @property
    def notes(self) -> list[str]:
        """Why points have no figure, one line for each reason, and what the clocks did."""
        lines = record.without_figure(point for point in self.run.points if not point.kernel and not point.call)
        if events := sorted({point.provider for point in self.run.points if point.method == "events"}):
            lines.append(f"Timed by events around eager calls, because capture in a graph failed: {', '.join(events)}.")
        if throttled := sorted({why for p in self.run.points for why in (p.clocks or {}).get("throttled", ())}):
            lines.append(f"The GPU lowered its clocks while it was timed: {', '.join(throttled)}.")
        if not self.run.complete:
            lines.append("The run stopped early: some shapes are missing.")
        return lines

    @property
    def first_calls(self) -> first_calls.Table | None:
        return first_calls.table(self.run.first_calls) if self.run.first_calls else None

    @property
    def about_first_calls(self) -> str:
        return f"{first_calls.ABOUT} {first_calls.apart(self.run.first_calls)}"

    @property
    def rows(self) -> Iterable[dict[str, Any]]:
        """All figures, one row for each point."""
        for point in self.run.points:
            kernel, call = point.kernel, point.call
            best = kernel or call
            yield {
                "case": str(point.case),
                "provider": point.provider,
                "gb_per_s": number(best.gb_per_s if best else None, ".0f" if kernel else ".2f"),
                "ratio": number(point.ratio, ".3f"),
                "kernel": _spread(kernel),
                "call": _spread(call),
                "memory": number(point.memory_bytes and point.memory_bytes / 2**20, ".1f"),
                "status": "" if best else ": ".join(filter(None, (point.status, point.message))),
            }


def part(path: Path) -> Part:
    """A results file as a part of the page. ValueError if it holds no results, OSError if it cannot be read."""
    run = record.read(path)
    return Part(path.stem, run, charts.groups(run, path.stem), summary.summaries({path.stem: run}))


def render(parts: Sequence[Part], title: str) -> str:
    """The whole page as text, with styles, scripts and data. It asks the network for nothing."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fused_softmax.bench"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters["number"] = number
    environment.filters["named"] = summary.title_of
    order = list(committed.COMMITTED | committed.OVER_RANKS)
    parts = sorted(parts, key=lambda each: order.index(each.stem) if each.stem in order else len(order))
    runs = {each.stem: each.run for each in parts}
    of_others: dict[str, list[Part]] = {}
    for each in parts:
        if each.difference:
            of_others.setdefault(str(each.run.environment.get("kernels") or ""), []).append(each)
    specs = {chart.name: charts.bare(chart.spec) for each in parts for group in each.groups for chart in group.charts}
    gpus = dict.fromkeys(each.gpu for each in parts)
    summaries = summary.summaries(runs)
    return environment.get_template("report.html").render(
        title=title,
        parts=parts,
        gpus=list(gpus),
        titles={each.stem: each.title for each in parts},
        summaries=summaries,
        several_machines=len({each.machine for each in summaries}) > 1,
        checked=summary.checked(runs.values()),
        of_others=of_others,
        specs=packed(specs),
        kernels=fingerprint.kernels(),
        dark=json.dumps(DARK),
        font=json.dumps(FONT),
        bundle=vl_convert.javascript_bundle(vl_version=charts.VEGA_LITE).replace("</script", "<\\/script"),  # type: ignore[call-arg]
    )


def _shape(point: record.Point) -> str:
    return point.case.size


def packed(specs: dict[str, Any]) -> str:
    """The specifications compressed to a tenth, in letters that cannot end a script element."""
    text = json.dumps(specs, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def chart_files(each: Part, folder: Path) -> list[Path]:
    """The files that `save_charts` writes for a part."""
    return [folder / f"{chart.name}{suffix}" for group in each.groups for chart in group.charts for suffix in SUFFIXES]


def save_charts(parts: Sequence[Part], folder: Path, say: Callable[[str], object] = lambda name: None) -> list[Path]:
    """Write every chart as PNG and SVG, named after the file, the operation, the dtype and the kind of chart."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    shown = ((each, chart) for each in parts for group in each.groups for chart in group.charts)
    for each, chart in shown:
        title = {"text": chart.title, "subtitle": ", ".join(filter(None, (each.gpu, chart.shown, each.age)))}
        spec = chart.spec | {"width": 640, "title": title}
        for suffix in SUFFIXES:
            path = folder / f"{chart.name}{suffix}"
            files.write_whole(path, charts.drawn(spec, suffix, scale=2))
            written.append(path)
        say(chart.name)
    return written


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def text(value: Any, name: str = "") -> str:
    if isinstance(value, int) and not isinstance(value, bool) and name.endswith("_bytes"):
        return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"
    return str(value)


def _spread(figure: record.Figure | None) -> str:
    return f"{figure.p50_us:.2f} ({figure.p20_us:.2f} to {figure.p80_us:.2f})" if figure else ""
