"""One table of all operations against their peers, from the committed results.

    python -m fused_softmax.bench.overview benchmarks/results README.md [--check]

Rewrites the text between the markers `<!-- results overview:begin -->` and `:end`, and nothing else. With --check it
writes nothing and exits with 1 if the page disagrees with the files. Standard library only.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fused_softmax.bench import tables
from fused_softmax.bench.catalog import OWN, PROVIDERS
from fused_softmax.bench.results import record
from fused_softmax.bench.results.record import Point, Run
from fused_softmax.bench.show.summary import pairs, title_of
from fused_softmax.bench.tables import table_row

PLACE = "overview"
NONE = "–"
BY_EVENTS, CALLS_CUDNN = "\\*", " †"
NOTES = {
    BY_EVENTS: "Timed by events around eager calls, because it could not be captured in a CUDA graph.",
    CALLS_CUDNN: "This package calls cuDNN for some of these cases.",
}


class Line(NamedTuple):
    """A row of a table: the file it is made of, less its GPU, the operation, and its title if not the operation's."""

    file: str
    operation: str
    title: str = ""


LINES = (
    Line("softmax", "softmax"),
    Line("few_rows", "softmax", "softmax, few rows"),
    Line("vocab", "softmax_float32", "softmax, bf16 to fp32"),
    Line("dims", "softmax_dim"),
    Line("masked", "softmax_causal"),
    Line("masked", "softmax_masked"),
    Line("masked", "softmax_biased"),
    Line("backward", "softmax_backward"),
    Line("backward", "log_softmax_backward"),
    Line("logsumexp", "logsumexp"),
    Line("cross_entropy", "cross_entropy"),
    Line("cross_entropy", "cross_entropy_gradient"),
    Line("linear_cross_entropy", "linear_cross_entropy"),
    Line("log_prob", "log_prob"),
    Line("log_prob", "log_prob_gradient"),
    Line("sampling", "sample"),
    Line("sampling", "sample_top_k"),
    Line("sampling", "sample_top_p"),
    Line("sampling", "sample_top_p_peaked"),
    Line("sampling", "sample_min_p"),
    Line("attention", "attention_causal"),
    Line("attention", "attention_causal_gradient"),
    Line("attention", "attention_biased"),
    Line("attention", "attention_biased_gradient"),
    Line("attention", "attention_softcap_gradient"),
    Line("attention", "attention_sinks_gradient"),
    Line("attention", "attention_decode"),
)
HEADINGS = {each.name: each.heading for each in PROVIDERS if each.heading}


def render(runs: Mapping[str, Run]) -> str:
    """The Markdown between the markers: what the cells mean, a table for each GPU, and which kernels were measured.

    runs: by the name of the file, as `h200_softmax`. A file that is missing leaves its row without figures.
    """
    of_gpus, enqueued = [], set()
    for gpu in _gpus(runs):
        of_gpu = {line.file: runs[file] for line in LINES if (file := f"{gpu}_{line.file}") in runs}
        names = sorted({(run.environment["gpu"] or {}).get("name", "no GPU") for run in of_gpu.values()})
        lines, counts = _table(of_gpu)
        of_gpus += [f"**{', '.join(names)}**", "", *lines, ""]
        enqueued |= counts
    marks = [mark for mark in NOTES if mark in "".join(of_gpus)]
    notes = [each for mark in marks for each in (f"{mark.strip()} {NOTES[mark]}", "")]
    return "\n".join([_about(enqueued - {0}), "", *of_gpus, *notes, _kernels(runs)])


def _gpus(files: Iterable[str]) -> list[str]:
    """The GPUs that files are named after, as h200."""
    return sorted({file.partition("_")[0] for file in files}, reverse=True)


def _table(runs: Mapping[str, Run]) -> tuple[list[str], set[int]]:
    """(a row for each of LINES, of how many cases the host's figures are medians)."""
    header = ["operation", *HEADINGS.values(), "MiB, ours / torch", "host us, ours / torch"]
    lines = [table_row(header), table_row(["---", *["---:"] * (len(header) - 1)])]
    enqueued = set()
    for line in LINES:
        run = runs.get(line.file)
        found = pairs(run, line.operation)
        enqueued.add(len(_enqueued(found.get("torch", []))))
        cells = [_speed_up(found.get(peer, [])) for peer in HEADINGS]
        title = (line.title or title_of(line.operation)) + (CALLS_CUDNN if _calls_cudnn(run, line.operation) else "")
        lines.append(table_row([title, *cells, _memory(found.get("torch", [])), _host(found.get("torch", []))]))
    return lines, enqueued


def _speed_up(pairs: Sequence[tuple[Point, Point]]) -> str:
    times = [theirs.kernel.p50_us / ours.kernel.p50_us for ours, theirs in pairs if ours.kernel and theirs.kernel]
    if not times:
        return NONE
    mean = math.exp(statistics.fmean(map(math.log, times)))
    mark = BY_EVENTS if any(theirs.method == "events" for _, theirs in pairs) else ""
    return f"{mean:.2f}{mark}" + (f" ({min(times):.2f})" if times[1:] else "")


def _calls_cudnn(run: Run | None, operation: str) -> bool:
    own = [p for p in run.points if (p.operation, p.provider) == (operation, OWN)] if run else []
    return any("cuDNN" in (p.plan or {}).get("who", {}).values() for p in own)


def _memory(pairs: Sequence[tuple[Point, Point]]) -> str:
    """Of the case in which torch takes most."""
    found = [(b.memory_bytes, a.memory_bytes) for a, b in pairs if a.memory_bytes is not None and b.memory_bytes]
    if not found:
        return NONE
    theirs, ours = max(found)
    return f"{_mib(ours)} / {_mib(theirs)}"


def _mib(n: int) -> str:
    return f"{n / 2**20:.0f}" if n >= 2**20 else f"{n / 2**20:.2g}"


def _enqueued(pairs: Sequence[tuple[Point, Point]]) -> list[tuple[float, float]]:
    return [(ours.host_us, theirs.host_us) for ours, theirs in pairs if ours.host_us and theirs.host_us]


def _host(pairs: Sequence[tuple[Point, Point]]) -> str:
    found = _enqueued(pairs)
    if not found:
        return NONE
    ours, theirs = (statistics.median(each) for each in zip(*found, strict=True))
    return f"{ours:.0f} / {theirs:.0f}"


def _about(enqueued: Collection[int]) -> str:
    """enqueued: of how many cases the host's figures are medians."""
    counts = " to ".join(map(str, sorted({min(enqueued), max(enqueued)}))) if enqueued else "all"
    return (
        f"A peer's column has its kernel time divided by ours: the geometric mean over all measured shapes and dtypes, "
        f"and in brackets the worst case. Memory: the peak that one call allocates, at the shape where torch needs "
        f"most. Host: the CPU's time to enqueue a small call, as the median of {counts} shapes. A dash: not measured."
    )


def _kernels(runs: Mapping[str, Run]) -> str:
    """What says whose kernels were measured: a file of one operation stays current while others' kernels change."""
    command = "fused-softmax bench all --dry-run --out benchmarks/results"
    ask = f"`{command}` says which result files this source's kernels made."
    old = any(run.environment.get("kernels") is None for run in runs.values())
    return f"These figures are of earlier kernels than the source's: {ask}" if old else ask


def main(arguments: Sequence[str] | None = None) -> int:
    parser = tables.command("overview", "Fill the table of all operations.")
    parser.add_argument("results", type=Path, help="folder of JSON files that `fused-softmax bench all` wrote")
    return tables.run(parser, arguments, _update)


def _update(options: argparse.Namespace) -> list[Path]:
    runs = {}
    names = sorted({line.file for line in LINES})
    for path in sorted(options.results.glob("*_*.json")):
        if path.stem.partition("_")[2] in names:
            with tables.naming(path):
                runs[path.stem] = record.read(path)
    if not runs:
        raise ValueError(f"{options.results}: no file of a GPU's {', '.join(names)}")
    return tables.fill(options.page, render(runs), PLACE, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
