"""What a report says first: how fast each operation is, what failed its check, and whose kernels were measured."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fused_softmax.bench.cases import ITEMSIZE, Case
from fused_softmax.bench.catalog import OPERATIONS, OWN, STEPS, TORCH, VARIANTS
from fused_softmax.bench.results import record
from fused_softmax.bench.results.compare import geometric_mean
from fused_softmax.bench.results.record import Figure, Point, Run

Pairs = dict[str, list[tuple[Point, Point]]]


def pairs(run: Run | None, operation: str, dtype: str | None = None) -> Pairs:
    """By provider, this package's point and the peer's of every case of which both are right. dtype: None for all."""
    if run is None:
        return {}
    asked = [p for p in run.points if p.operation == operation and dtype in (None, p.dtype)]
    points = [p for p in asked if p.status == "ok"]
    own = {p.case: p for p in points if p.provider == OWN}
    found: Pairs = {}
    for p in points:
        if p.provider != OWN and p.case in own:
            found.setdefault(p.provider, []).append((own[p.case], p))
    return found


class Speed(NamedTuple):
    """How many times as fast this package is: the geometric mean of all shapes, and the least of them."""

    mean: float
    least: float


class Lowest(NamedTuple):
    """The lowest ratio to the ceiling, at which shape, and the stem of the file that has it."""

    ratio: float
    shape: str
    stem: str


@dataclass(frozen=True)
class Summary:
    """This package at one operation and dtype on one machine, over all shapes of all files.

    points: how many; two files may have the same shape. ratio: the geometric mean of the ratios to the ceiling.
    over: each other provider. best: over the fastest of the other providers at each shape.
    """

    operation: str
    dtype: str
    machine: str
    points: int
    ratio: float | None
    lowest: Lowest | None
    over: dict[str, Speed]
    best: Speed | None

    @property
    def only_torch(self) -> bool:
        """Whether nobody but torch was measured beside this package."""
        return not self.over.keys() - VARIANTS - {TORCH}


def machine_of(run: Run) -> str:
    return str((run.environment.get("gpu") or {}).get("name", "no GPU"))


def title_of(operation: str) -> str:
    """An operation's name for people."""
    return STEPS[operation].title if operation in STEPS else OPERATIONS.get(operation, operation)


def summaries(runs: Mapping[str, Run]) -> list[Summary]:
    """One for each operation, dtype and machine for which this package has figures, in the order of `OPERATIONS`.

    runs: by the stems of their files. Points are compared within a file and never between two.
    """
    kinds: dict[tuple[str, str, str], dict[str, Run]] = {}
    for stem, run in runs.items():
        for point in run.points:
            if point.provider == OWN and _figure(run, point):
                kinds.setdefault((point.operation, point.dtype, machine_of(run)), {})[stem] = run
    order, dtypes = list(OPERATIONS), list(ITEMSIZE)

    def place(kind: tuple[str, str, str]) -> tuple[int, int]:
        operation, dtype, _ = kind
        return (
            order.index(operation) if operation in order else len(order),
            dtypes.index(dtype) if dtype in dtypes else len(dtypes),
        )

    return [_summary(*kind, kinds[kind]) for kind in sorted(kinds, key=place)]


def _summary(operation: str, dtype: str, machine: str, runs: Mapping[str, Run]) -> Summary:
    points, ratios = 0, []
    over: dict[str, list[float]] = {}
    best: list[float] = []
    for stem, run in runs.items():
        own = [p for p in run.points if (p.operation, p.dtype, p.provider) == (operation, dtype, OWN)]
        points += sum(bool(_figure(run, p)) for p in own)
        ratios += [Lowest(p.ratio, p.case.size, stem) for p in own if p.ratio is not None]
        least: dict[Case, float] = {}
        for name, both in pairs(run, operation, dtype).items():
            for ours, theirs in both:
                mine, other = _figure(run, ours), _figure(run, theirs)
                if mine and other:
                    factor = other.p50_us / mine.p50_us
                    over.setdefault(name, []).append(factor)
                    if name not in VARIANTS:
                        least[ours.case] = min(factor, least.get(ours.case, factor))
        best += least.values()
    mean = geometric_mean(each.ratio for each in ratios) if ratios else None
    speeds = {name: _speed(factors) for name, factors in over.items()}
    lowest = min(ratios, default=None)
    return Summary(operation, dtype, machine, points, mean, lowest, speeds, _speed(best) if best else None)


def _speed(factors: Sequence[float]) -> Speed:
    return Speed(geometric_mean(factors), min(factors))


def _figure(run: Run, point: Point) -> Figure | None:
    """A point's figure by the run's clock: the kernel's where the run has any."""
    return point.kernel if any(each.kernel for each in run.points) else point.call


def failed(run: Run) -> list[str]:
    """What failed its check, one line for all failures that differ in their numbers alone."""
    checks = [check for check in run.checks if check.status in ("wrong", "failed")]
    return record.without_figure(record.failures(run)) + [
        f"{check.kernel} under Triton's interpreter: {check.status} at {check.n_rows} x {check.n_cols} {check.dtype}: "
        + (check.message or f"largest error {check.error}")
        for check in checks
    ]


class Checked(NamedTuple):
    """How many results were compared with float64, and how many of them matched."""

    compared: int
    matched: int


def checked(runs: Iterable[Run]) -> Checked:
    statuses = [status for run in runs for status in _statuses(run)]
    return Checked(statuses.count("ok") + statuses.count("wrong"), statuses.count("ok"))


def _statuses(run: Run) -> list[str]:
    return [point.status for point in run.points] + [check.status for check in run.checks]
