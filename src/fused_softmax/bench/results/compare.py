"""Compares two runs: what got faster or slower by more than either run's own spread."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from fused_softmax.bench.cases import Case
from fused_softmax.bench.results.record import Figure, Point, Run

Clock = Literal["kernel", "call"]
By = Literal["time", "ratio"]
Verdict = Literal["slower", "faster", "same"]
# Statuses of a point that lost its figure, which is worse than any time.
LOST = ("wrong", "refused")


@dataclass(frozen=True)
class Change:
    """One provider at one case in both runs.

    factor: the time after over the time before; by ratio, both in units of each run's own ceiling.
    verdict: "same" if the spans from p20 to p80 overlap or the medians differ by less than the tolerance.
    """

    case: Case
    provider: str
    clock: Clock
    before: Figure
    after: Figure
    factor: float
    verdict: Verdict


@dataclass(frozen=True)
class Lost:
    """A point that had a figure before and has none now."""

    case: Case
    provider: str
    status: str
    message: str


@dataclass(frozen=True)
class Comparison:
    """Changes in the order of the first run, lost figures, counts of points in one run alone, differences in words."""

    changes: list[Change]
    lost: list[Lost]
    only_before: int
    only_after: int
    differences: list[str]

    @property
    def exit_code(self) -> int:
        """0: nothing got slower or was lost; 1: something did; 2: nothing could be compared."""
        if not self.changes and not self.lost:
            return 2
        return int(bool(self.lost) or any(change.verdict == "slower" for change in self.changes))

    def means(self) -> dict[tuple[str, str, str, Clock], tuple[float, int, int, int]]:
        """By operation, dtype, provider and clock: the factors' geometric mean; counts of all, faster and slower."""
        groups: dict[tuple[str, str, str, Clock], list[Change]] = {}
        for each in self.changes:
            key = each.case.operation, each.case.dtype, each.provider, each.clock
            groups.setdefault(key, []).append(each)
        return {
            key: (
                geometric_mean(change.factor for change in group),
                len(group),
                sum(change.verdict == "faster" for change in group),
                sum(change.verdict == "slower" for change in group),
            )
            for key, group in groups.items()
        }


def compare(
    before: Run,
    after: Run,
    *,
    by: By = "time",
    clock: Clock | None = None,
    tolerance: float = 0.02,
    wanted: Callable[[Point], bool] = lambda point: True,
) -> Comparison:
    """Match the points of two runs by case and provider.

    by: "time", or "ratio", which measures kernel times in units of each run's ceiling and so removes a common drift.
    clock: which figures to compare. None takes the kernel's if both runs have them, else the call's, never a mix.
    tolerance: the smallest relative change of a median that counts.
    """
    olds, news = ({(p.case, p.provider): p for p in run.points if wanted(p)} for run in (before, after))
    changes, lost = [], []
    for key, old in olds.items():
        new = news.get(key)
        if new is None:
            continue
        if old.status == "ok" and new.status in LOST:
            lost.append(Lost(*key, new.status, new.message))
        elif change := _change(old, new, by, clock, tolerance):
            changes.append(change)
    return Comparison(
        changes, lost, len(olds.keys() - news.keys()), len(news.keys() - olds.keys()), differences(before, after)
    )


def _change(old: Point, new: Point, by: By, clock: Clock | None, tolerance: float) -> Change | None:
    for each in (clock,) if clock else ("kernel", "call"):
        a, b = getattr(old, each), getattr(new, each)
        if a is None or b is None:
            continue
        units = (1.0, 1.0)
        if by == "ratio":
            if each != "kernel" or not (old.ceiling and new.ceiling):
                continue
            units = old.ceiling.gb_per_s, new.ceiling.gb_per_s
        low, high = _span(a, units[0]), _span(b, units[1])
        factor = (b.p50_us * units[1]) / (a.p50_us * units[0])
        verdict: Verdict = "same"
        if factor > 1 + tolerance and high[0] > low[1]:
            verdict = "slower"
        elif factor < 1 / (1 + tolerance) and high[1] < low[0]:
            verdict = "faster"
        return Change(old.case, old.provider, each, a, b, factor, verdict)
    return None


def _span(figure: Figure, unit: float) -> tuple[float, float]:
    return figure.p20_us * unit, figure.p80_us * unit


def differences(before: Run, after: Run) -> list[str]:
    """How the runs differ as experiments: the GPU first, then versions, source, dtypes and moved ceilings."""
    said = []
    gpus = [(run.environment.get("gpu") or {}).get("name", "no GPU") for run in (before, after)]
    if gpus[0] != gpus[1]:
        said.append(f"different GPUs: {gpus[0]}, then {gpus[1]}")
    for name in ("torch", "triton", "python", "commit", "source", "kernels"):
        old, new = before.environment.get(name), after.environment.get(name)
        if old != new:
            said.append(f"{name} {old or 'unknown'}, then {new or 'unknown'}")
    dtypes = [sorted({point.dtype for point in run.points}) for run in (before, after)]
    if dtypes[0] != dtypes[1]:
        said.append(f"different dtypes: {', '.join(dtypes[0])}, then {', '.join(dtypes[1])}")
    tops = [{p.case: p.ceiling.gb_per_s for p in run.points if p.ceiling} for run in (before, after)]
    if moved := [tops[1][case] / tops[0][case] for case in tops[0].keys() & tops[1].keys()]:
        mean = geometric_mean(moved)
        if abs(mean - 1) > 0.01:
            said.append(f"the ceilings are {mean:.3f} of what they were: --by ratio removes that")
    return said


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs))
