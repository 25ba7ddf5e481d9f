"""A page's table of results, from a file that `fused-softmax bench --out` wrote.

    python -m fused_softmax.bench.readme benchmarks/results/h200_softmax.json docs/results.md [--place NAME] [--check]

Rewrites the text between two markers, and nothing else. NAME selects the markers if there are several tables. The
command also draws the picture beside the results, which has their name, if the page shows it and its figures are stale.
With --check it writes nothing and exits with 1 if the page or the picture disagrees with the file. Standard library
only, except for drawing.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fused_softmax.bench import tables
from fused_softmax.bench.cases import Case, in_time
from fused_softmax.bench.catalog import OWN
from fused_softmax.bench.entries.attention_kinds import flops
from fused_softmax.bench.results import record
from fused_softmax.bench.results.record import Point, Run
from fused_softmax.bench.show import first_calls, plot, steps
from fused_softmax.bench.tables import table_row


def render(run: Run) -> str:
    """The Markdown between the markers: how it was measured, a row for every shape, absent providers."""
    if run.first_calls and run.complete:
        return _of_first_calls(run)
    of_steps = run.environment["gpu"] and steps.steps_of(run)
    timed = of_steps or any(point.kernel for point in run.points)
    if not run.complete or not timed:
        raise ValueError("not a finished run on a GPU: it stopped early" if timed else "it has no kernel figures")
    if of_steps:
        return _of_steps(run)
    cases: dict[Case, dict[str, Point]] = {}
    for point in run.points:
        cases.setdefault(point.case, {})[point.provider] = point
    names = list(dict.fromkeys(p.provider for p in run.points if p.status != "absent" and p.provider != OWN))
    rows = record.rows_only(run)
    left = ["rows x cols", "dtype"] if rows else ["operation", "shape", "dtype"]
    right = [OWN, "ratio", *names]
    lines = [table_row([*left, *right]), table_row([*["---"] * len(left), *["---:"] * len(right)])]
    for case, points in cases.items():
        own = points.get(OWN)
        ratio = f"{own.ratio:.3f}" if own and own.ratio is not None else ""
        what = [case.size, case.dtype] if rows else [case.operation, case.size, case.dtype]
        lines.append(table_row([*what, _cell(own), ratio, *(_cell(points.get(n)) for n in names)]))
    return "\n".join([_about(run), "", *lines, *_notes(run)])


def _of_first_calls(run: Run) -> str:
    heads, rows = first_calls.table(run.first_calls)
    lines = [table_row(heads), table_row(["---", *["---:"] * (len(heads) - 2), "---"]), *map(table_row, rows)]
    processor = f"{run.environment['processor']} ({run.environment['cores']} cores)"
    about = f"{first_calls.ABOUT} {_where(run)}, {processor}. Made by\n`{run.command}`."
    return "\n".join([about, "", *lines, "", first_calls.apart(run.first_calls)])


def _of_steps(run: Run) -> str:
    points = steps.steps_of(run)
    heads, *rows = steps.compared(points)
    lines = [table_row(heads), table_row(["---", *["---:"] * (len(heads) - 1)]), *map(table_row, rows)]
    missing = record.without_figure(point for point in run.points if not point.call)
    model = f"The Llama has {points[0].parameters['parameters'] / 1e9:.2f} billion random weights, in bf16"
    about = f"{'. '.join([*missing, model, steps.ABOUT, _where(run)])}. Made by `{run.command}`."
    return "\n".join([*lines, "", about])


def _where(run: Run) -> str:
    env = run.environment
    gpu = env["gpu"] or {}
    return ", ".join(
        filter(
            None,
            (
                gpu.get("name"),
                gpu.get("driver_version") and f"driver {gpu['driver_version']}",
                f"torch {env['torch']}, Triton {env['triton']}",
                env.get("kernels") and f"kernels {env['kernels']}",
            ),
        )
    )


def _about(run: Run) -> str:
    of_products = [bool(flops(point.case)) for point in run.points]
    if any(of_products):
        what = (
            "TFLOP/s of the products; of a gradient, with those of the forward pass. The ratio compares this package "
            "with a product of square matrices by cuBLAS in the same run."
        )
        if not all(of_products):
            what += " Of one query: us, and the ratio to the best kernel that only reads as much."
    elif all(_draws(point.case) for point in run.points):
        what = (
            "Kernel time in us. The ratio divides the time of the best kernel that only reads as much by this "
            "package's, in the same run."
        )
    elif all(in_time(point.case) for point in run.points):
        what = (
            "Kernel time in us. The ratio divides the time of the three matrix products alone by this package's, in "
            "the same run."
        )
    else:
        what = (
            f"Kernel time as GB/s of {record.floor_of(run)}. The ratio compares this package with the best "
            f"{record.ceiling_of(run)} on the same buffers in the same run."
        )
    return f"{what} {_where(run)}. Made by\n`{run.command}`."


def _notes(run: Run) -> list[str]:
    notes = []
    if any(point.method == "events" for point in run.points):
        notes.append("\\* Could not be captured in a CUDA graph, so it was timed by events around eager calls.")
    notes += record.without_figure(point for point in run.points if not point.kernel)
    return [line for note in notes for line in ("", note)]


def _cell(point: Point | None) -> str:
    """GB/s, TFLOP/s of attention, or us if other products or draws are timed, or why there is no figure."""
    if point is None:
        return ""
    if point.kernel is None:
        return point.status
    mark = "\\*" if point.method == "events" else ""
    if done := flops(point.case):
        return f"{done / point.kernel.p50_us * 1e-6:.0f}{mark}"
    if _draws(point.case) or point.operation == "attention_decode":
        return f"{point.kernel.p50_us:.{1 if point.kernel.p50_us < 100 else 0}f}{mark}"  # of a few us, a tenth counts
    return f"{point.kernel.p50_us if in_time(point.case) else point.kernel.gb_per_s:.0f}{mark}"


def _draws(case: Case) -> bool:
    return case.operation.startswith("sample")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = tables.command("readme", "Fill the table of results.")
    parser.add_argument("results", type=Path, help="JSON that `fused-softmax bench --out` wrote")
    parser.add_argument("--place", default="", help="which pair of markers, if there are several")
    return tables.run(parser, arguments, _update)


def _update(options: argparse.Namespace) -> list[Path]:
    with tables.naming(options.results):
        run = record.read(options.results)
        table = render(run)
    stale = tables.fill(options.page, table, options.place, check=options.check)
    picture = options.results.with_suffix(".png")
    shown = f"/{picture.name})" in options.page.read_text(encoding="utf-8")
    if shown and not (picture.exists() and plot.shows(picture, run)):
        stale.append(picture)
        if not options.check:
            plot.plot(run, picture)
    return stale


if __name__ == "__main__":
    sys.exit(main())
