"""A page's table of results, from a file that `fused-softmax bench --out` wrote.

    python -m fused_softmax.bench.readme benchmarks/results/h200_softmax.json docs/results.md [--place NAME] [--check]

Rewrites the text between two markers, and nothing else. NAME selects the markers if there are several tables. It also
draws the picture beside the results, which has their name, if the page shows it and its figures are stale. With
--check it writes nothing and exits with 1 if the page or the picture disagrees with the file. Standard library only,
except for drawing.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fused_softmax.bench import plot, record
from fused_softmax.bench.cases import Case, in_time
from fused_softmax.bench.record import Point, Run


def markers(place: str = "") -> tuple[str, str]:
    """The markers at the beginning and the end of a table."""
    name = f"results {place}".strip()
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


BEGIN, END = markers()
OWN = "fused_softmax"


def render(run: Run) -> str:
    """The Markdown between the markers: how it was measured, a row for every shape, absent providers."""
    timed = any(point.kernel for point in run.points)
    if not run.complete or not timed:
        raise ValueError("not a finished run on a GPU: it stopped early" if timed else "it has no kernel figures")
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


def _about(run: Run) -> str:
    env = run.environment
    gpu = env["gpu"] or {}
    where = ", ".join(
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
    if all(in_time(point.case) for point in run.points):
        what = (
            "Kernel time in us. The ratio divides the time of the three matrix products alone by this package's, in "
            "the same run."
        )
    else:
        what = (
            f"Kernel time as GB/s of {record.floor_of(run)}. The ratio compares this package with the best "
            f"{record.ceiling_of(run)} on the same buffers in the same run."
        )
    return f"{what} {where}. Made by\n`{run.command}`."


def _notes(run: Run) -> list[str]:
    notes = []
    if any(point.method == "events" for point in run.points):
        notes.append("\\* Could not be captured in a CUDA graph, so it was timed by events around eager calls.")
    notes += record.without_figure(point for point in run.points if not point.kernel)
    return [line for note in notes for line in ("", note)]


def _cell(point: Point | None) -> str:
    """GB/s, or us if products are timed, or why there is no figure."""
    if point is None:
        return ""
    if point.kernel is None:
        return point.status
    figure = point.kernel.p50_us if in_time(point.case) else point.kernel.gb_per_s
    return f"{figure:.0f}" + ("\\*" if point.method == "events" else "")


def table_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def replace(text: str, table: str, place: str = "") -> str:
    """`text` with `table` between the markers. Each marker must occur once, in order."""
    begin, end = markers(place)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"needs {begin} and, after it, {end}, once each")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m fused_softmax.bench.readme", description="Fill the table of results.")
    parser.add_argument("results", type=Path, help="JSON that `fused-softmax bench --out` wrote")
    parser.add_argument("readme", type=Path, help="Markdown file with the two markers")
    parser.add_argument("--place", default="", help="which pair of markers, if there are several")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the two disagree")
    options = parser.parse_args(arguments)
    path = options.results
    try:
        run = record.read(path)
        table = render(run)
        path = options.readme
        old = path.read_text()
        new = replace(old, table, options.place)
        stale = [] if new == old else [path]
        picture = options.results.with_suffix(".png")
        if f"/{picture.name})" in old and not (picture.exists() and plot.shows(picture, run)):
            stale.append(picture)
        if options.check:
            for path in stale:
                print(f"{path} does not show {options.results}: run this again without --check", file=sys.stderr)
            return int(bool(stale))
        if new != old:
            record.write_whole(path, new.encode())
        if picture in stale:
            plot.plot(run, picture)
    except OSError as error:
        parser.error(f"{path}: {error.strerror or error}")
    except KeyError as error:
        parser.error(f"{path}: no {error} in its environment")
    except ValueError as error:
        parser.error(f"{path}: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
