"""One table of all operations against their peers, with columns for each GPU, from the committed results.

    python -m fused_softmax.bench.overview benchmarks/results README.md [--check]

Rewrites the text between the markers `<!-- results overview:begin -->` and `:end`, and nothing else. With --check it
writes nothing and exits with 1 if the page disagrees with the files. Standard library only.
"""

import argparse
import math
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fused_softmax.bench import tables
from fused_softmax.bench.cases import Case
from fused_softmax.bench.catalog import NAMED, OWN, PROVIDERS, TORCH
from fused_softmax.bench.committed import COMMITTED, OVER_RANKS
from fused_softmax.bench.results import record
from fused_softmax.bench.results.record import Point, Run
from fused_softmax.bench.show.summary import Pairs, machine_of, pairs, title_of
from fused_softmax.bench.tables import table_row

PLACE = "overview"
NONE = "–"
UNBROKEN = "\u00a0"  # a space at which no line of a cell ends
SHOWN_DTYPE = "bfloat16"  # of the times, where it was measured
LESS = 0.95  # of our memory: a peer that takes less than this is named
BY_EVENTS, CALLS_CUDNN = "\\*", " †"
NOTES = {
    BY_EVENTS: "Timed by events around eager calls, because it could not be captured in a CUDA graph.",
    CALLS_CUDNN: "This package calls cuDNN for some of these cases.",
}
ABOUT = (
    "Each row shows the bfloat16 shape where torch takes most memory; where several take as much, the one where this "
    "package is slowest. Ours / torch: the time of the kernels at that shape. Over torch, over others: how many times "
    "as fast this package is, as the geometric mean over all shapes and dtypes that both compute correctly, and the "
    "worst of them in brackets. MiB: the most that one call allocates at that shape, its result and gradients "
    "included; others are named where they take less than this package."
)
OF_SEVERAL = "Others' factors are over all of these GPUs, and MiB are the first one's."


class Line(NamedTuple):
    """A row of a table: the file it is made of, less its GPU, the operations, and its title if not the operation's."""

    file: str
    operations: tuple[str, ...]
    title: str


def _line(file: str, *operations: str, title: str = "") -> Line:
    return Line(file, operations, title or title_of(operations[0]))


LINES = (
    _line("softmax", "softmax"),
    _line("few_rows", "softmax", title="softmax, few rows"),
    _line("vocab", "softmax_float32", title="softmax, bf16 to fp32"),
    _line("dims", "softmax_dim"),
    _line("masked", "softmax_causal", "softmax_masked", "softmax_biased", title="softmax with a mask"),
    _line("backward", "softmax_backward"),
    _line("backward", "log_softmax_backward"),
    _line("logsumexp", "logsumexp"),
    _line("cross_entropy", "cross_entropy"),
    _line("cross_entropy", "cross_entropy_gradient"),
    _line("linear_cross_entropy", "linear_cross_entropy"),
    _line("log_prob", "log_prob"),
    _line("log_prob", "log_prob_gradient"),
    _line("sampling", "sample"),
    _line("sampling", "sample_top_k"),
    _line("sampling", "sample_top_p", "sample_top_p_peaked"),
    _line("sampling", "sample_min_p"),
    _line("router", "route", title="route to experts"),
    _line("router", "route_gradient", title="route with both losses, gradient"),
    _line("segments", "segment_softmax_products", title="softmax of segments"),
    _line("attention", "attention_causal"),
    _line("attention", "attention_causal_gradient"),
    _line("attention", "attention_biased"),
    _line("attention", "attention_biased_gradient"),
    _line("attention", "attention_softcap_gradient"),
    _line("attention", "attention_sinks_gradient"),
    _line("attention", "attention_decode"),
)
NAMES = {each.name: each.heading for each in PROVIDERS if each.heading}


def render(runs: Mapping[str, Run]) -> str:
    """The Markdown between the markers: what the cells mean, the table, what to know of it, whose kernels they are.

    runs: by the name of the file, as `h200_softmax`. A GPU has columns, and an operation a row, if a file has them.
    """
    of_gpus = {gpu: _of(gpu, runs) for gpu in _gpus(runs)}
    gpus = [gpu for gpu, found in of_gpus.items() if any(_pairs(found.get(line.file), line) for line in LINES)]
    names = [f"{gpu.upper()}: {', '.join(sorted({machine_of(run) for run in of_gpus[gpu].values()}))}" for gpu in gpus]
    rows = _rows({gpu: of_gpus[gpu] for gpu in gpus})
    below = [line for gpu in gpus for line in _below(of_gpus[gpu], f"{gpu.upper()}: " if gpus[1:] else "")]
    marks = [f"{mark.strip()} {note}" for mark, note in NOTES.items() if mark in "".join(rows)]
    about = " ".join([ABOUT, *([OF_SEVERAL] if gpus[1:] else []), f"{'. '.join(names)}."])
    parts = [about, "\n".join(rows), *below, " ".join(marks), _kernels(runs)]
    return "\n\n".join(filter(None, parts))


def _gpus(files: Iterable[str]) -> list[str]:
    """The GPUs that files are named after, as h200."""
    return sorted({file.partition("_")[0] for file in files}, reverse=True)


def _of(gpu: str, runs: Mapping[str, Run]) -> dict[str, Run]:
    """A GPU's runs, by the name of the file less the GPU."""
    return {file.partition("_")[2]: run for file, run in runs.items() if file.partition("_")[0] == gpu}


def _rows(of_gpus: Mapping[str, Mapping[str, Run]]) -> list[str]:
    """The head of the table, and a row for each of LINES of which a GPU has a time of this package."""
    columns = [f"{gpu.upper()}: {what}" for gpu in of_gpus for what in ("ours / torch", "over torch")]
    head = ["operation, shape", *columns, "over others", "MiB, ours / torch"]
    rows = [table_row(head), table_row(["---", *["---:"] * len(columns), "---", "---:"])]
    for line in LINES:
        found = {gpu: _pairs(runs.get(line.file), line) for gpu, runs in of_gpus.items()}
        if (at := _shown_case(found.values())) is None:
            continue
        shown = {gpu: _at(at, each) for gpu, each in found.items()}
        shape = _unbroken(at.size + ("" if at.dtype == SHOWN_DTYPE else f" {at.dtype}"))
        cells = [each for gpu in of_gpus for each in (_times(shown[gpu]), _factor(found[gpu].get(TORCH, ())))]
        everywhere = {name: [both for each in found.values() for both in each.get(name, ())] for name in NAMES}
        others = [f"{NAMES[name]} {_factor(both)}" for name, both in everywhere.items() if name != TORCH and both]
        memory = next((text for each in shown.values() if (text := _memory(each))), NONE)
        mark = CALLS_CUDNN if any(_calls_cudnn(runs.get(line.file), line) for runs in of_gpus.values()) else ""
        if not columns[2:]:  # with several GPUs a page is too narrow for that
            cells, others = list(map(_unbroken, cells)), list(map(_unbroken, others))
        rows.append(table_row([f"{line.title}{mark}, {shape}", *cells, ", ".join(others) or NONE, memory]))
    return rows


def _unbroken(text: str) -> str:
    return text.replace(" ", UNBROKEN)


def _pairs(run: Run | None, line: Line) -> Pairs:
    """As `pairs` has them, of all operations of a line, where both have a time."""
    found: Pairs = {}
    for operation in line.operations:
        for name, both in pairs(run, operation).items():
            if timed := [each for each in both if each[0].kernel and each[1].kernel]:
                found.setdefault(name, []).extend(timed)
    return found


def _shown_case(found: Iterable[Pairs]) -> Case | None:
    """The case whose times are shown, of the first GPU that has any."""
    for each in found:
        cases = {ours.case: ours for both in each.values() for ours, _ in both}
        took = {theirs.case: theirs.memory_bytes or 0 for _, theirs in each.get(TORCH, ())}
        if of_dtype := [case for case in cases if case.dtype == SHOWN_DTYPE] or list(cases):
            return max(of_dtype, key=lambda case: (took.get(case, 0), _us(cases[case])))
    return None


def _at(case: Case, found: Pairs) -> dict[str, Point]:
    """By provider, the points of a case."""
    shown: dict[str, Point] = {}
    for name, both in found.items():
        for ours, theirs in both:
            if ours.case == case:
                shown |= {OWN: ours, name: theirs}
    return shown


def _us(point: Point) -> float:
    return point.kernel.p50_us if point.kernel else 0


def _factor(both: Sequence[tuple[Point, Point]]) -> str:
    """How many times as fast this package is."""
    if not both:
        return NONE
    factors = [_us(theirs) / _us(ours) for ours, theirs in both]
    mean = math.exp(statistics.fmean(map(math.log, factors)))
    mark = BY_EVENTS if any(theirs.method == "events" for _, theirs in both) else ""
    return f"{_digits(mean)}{mark}" + (f" ({_digits(min(factors))})" if factors[1:] else "")


def _times(shown: Mapping[str, Point]) -> str:
    us = [_us(shown[name]) for name in (OWN, TORCH) if name in shown]
    units = ["ms" if each >= 1000 else "us" for each in us]
    values = [_digits(each / 1000 if unit == "ms" else each) for each, unit in zip(us, units, strict=True)]
    if len(set(units)) == 1:
        values[-1] += UNBROKEN + units[0]
    else:
        values = [value + UNBROKEN + unit for value, unit in zip(values, units, strict=True)]
    return f"{UNBROKEN}/ ".join(values) or NONE


def _digits(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def _calls_cudnn(run: Run | None, line: Line) -> bool:
    own = [p for p in run.points if p.operation in line.operations and p.provider == OWN] if run else []
    return any("cuDNN" in (p.plan or {}).get("who", {}).values() for p in own)


def _memory(shown: Mapping[str, Point]) -> str:
    took = {name: point.memory_bytes for name, point in shown.items() if point.memory_bytes is not None}
    if OWN not in took:
        return ""
    both = " / ".join(_mib(took[name]) for name in (OWN, TORCH) if name in took)
    less = [name for name in NAMES if name != TORCH and name in took and took[name] < LESS * took[OWN]]
    return ", ".join(map(_unbroken, [both, *(f"{NAMES[name]} {_mib(took[name])}" for name in less)]))


def _mib(n: int) -> str:
    return f"{n / 2**20:.0f}" if n >= 2**20 or n == 0 else f"{n / 2**20:.2g}"


def _below(runs: Mapping[str, Run], whose: str) -> list[str]:
    """What stands below the table of a GPU: the host's times, what failed its check, and who was not there."""
    failed = " ".join(filter(None, (_wrong(runs.values()), _absent(runs.values()))))
    return [whose + each for each in (_hosts(runs), failed) if each]


def _hosts(runs: Mapping[str, Run]) -> str:
    """The medians of the host's times of the calls that are small enough to have one."""
    said = []
    for line in LINES:
        beside_torch = _pairs(runs.get(line.file), line).get(TORCH, ())
        both = [(ours.host_us, theirs.host_us) for ours, theirs in beside_torch if ours.host_us and theirs.host_us]
        if both:
            ours, theirs = (statistics.median(each) for each in zip(*both, strict=True))
            said.append(f"{line.title} {ours:.0f} / {theirs:.0f}")
    return f"What the CPU takes to enqueue a small call, us, ours / torch's: {'; '.join(said)}." if said else ""


def _wrong(runs: Iterable[Run]) -> str:
    """What failed its check against float64, how often, and by how much at worst."""
    compared: dict[tuple[str, str, str], list[Point]] = {}
    for point in (point for run in runs for point in run.points if point.status in ("ok", "wrong")):
        family = title_of(point.operation).partition(", ")[0]
        compared.setdefault((point.provider, family, point.dtype), []).append(point)
    said = []
    for name in NAMED:
        for (provider, family, dtype), points in compared.items():
            wrong = [point for point in points if point.status == "wrong"]
            if provider == name and wrong:
                who = "this package" if name == OWN else NAMES.get(name, name)
                operations = {point.operation for point in wrong}
                title = title_of(operations.pop()) if len(operations) == 1 else family
                said.append(f"{title} in {dtype} by {who}, {len(wrong)} of {len(points)} results, {_worst(wrong)}")
    if not said:
        return ""
    return f"**Failed the check against float64**, and so is in no time and no ratio: {'; '.join(said)}."


def _worst(wrong: Sequence[Point]) -> str:
    """The largest error for what is allowed. The point's own figures are of its first result, not of a replay."""
    errors = [re.search(r"([\d.]+e[+-]\d+), allowed ([\d.]+e[+-]\d+)", point.message) for point in wrong]
    worst = max((each for each in errors if each), key=lambda each: float(each[1]) / float(each[2]), default=None)
    return f"at worst {worst[1]} off where {worst[2]} is allowed" if worst else wrong[0].message


def _absent(runs: Iterable[Run]) -> str:
    there: dict[str, bool] = {}
    for point in (point for run in runs for point in run.points):
        there[point.provider] = there.get(point.provider, False) or point.status != "absent"
    names = [NAMES.get(name, name) for name in NAMED if not there.get(name, True)]
    return f"Not installed on the machine that measured: {', '.join(names)}." if names else ""


def _kernels(runs: Mapping[str, Run]) -> str:
    """What says whose kernels were measured: a file of one operation stays current while others' kernels change."""
    command = "fused-softmax bench all --dry-run --out benchmarks/results"
    ask = f"`{command}` says which result files this source's kernels made."
    files = {line.file for line in LINES}
    old = any(run.environment.get("kernels") is None for name, run in runs.items() if name.partition("_")[2] in files)
    return f"These figures are of earlier kernels than the source's: {ask}" if old else ask


def main(arguments: Sequence[str] | None = None) -> int:
    parser = tables.command("overview", "Fill the table of all operations.")
    parser.add_argument("results", type=Path, help="folder of JSON files that `fused-softmax bench all` wrote")
    return tables.run(parser, arguments, _update)


def _update(options: argparse.Namespace) -> list[Path]:
    runs = {}
    for path in sorted(options.results.glob("*_*.json")):
        if path.stem in COMMITTED or path.stem in OVER_RANKS:
            with tables.naming(path):
                runs[path.stem] = record.read(path)
    if not runs:
        raise ValueError(f"{options.results}: no file of a GPU, such as h200_softmax.json")
    return tables.fill(options.page, render(runs), PLACE, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
