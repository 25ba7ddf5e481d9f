"""Going on with a run that stopped: which of its points still hold, and why it must not be gone on with."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fused_softmax.bench import record
from fused_softmax.bench.cases import Case
from fused_softmax.bench.record import Point, Run

# A reading of the moment, not a property of the machine.
PASSING = {"clocks_sm", "clocks_mem"}
# What another try cannot change on the same machine, with the same source.
HELD = ("ok", "wrong", "untimed")


class CannotResume(ValueError):
    """The file is of another machine, source or effort, or no results at all."""


def earlier(out: Path) -> Run | None:
    """The run to go on with: what was left when one stopped, else the finished one, else None.

    Raises CannotResume for a file that `fused-softmax bench --out` did not write.
    """
    for path in (record.partial_path(out), out):
        if path.exists():
            try:
                return record.read(path)
            except ValueError as error:
                raise CannotResume(str(error)) from None
    return None


def mismatch(old: Run, new: Run) -> str:
    """What tells the two runs apart, "then, now" of each, or "": the machine, the versions, the source, the effort."""
    pairs = [(_flat(old.environment), _flat(new.environment)), (_flat(old.options), _flat(new.options))]
    said = [
        f"{name} {before.get(name)} then, {now.get(name)} now"
        for before, now in pairs
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    return "; ".join(said)


def _flat(facts: dict[str, Any]) -> dict[str, Any]:
    gpu = facts.get("gpu") or {}
    flat = {name: value for name, value in facts.items() if name != "gpu"}
    return flat | {f"GPU {name}": value for name, value in gpu.items() if name not in PASSING}


class Held:
    """The points of an earlier run that need not be measured again."""

    def __init__(self, points: Iterable[Point] = ()):
        self.points = {(point.case, point.provider): point for point in points if point.status in HELD}

    def missing(self, case: Case, names: Sequence[str]) -> list[str]:
        return [name for name in names if (case, name) not in self.points]

    def merged(self, points: Iterable[Point]) -> list[Point]:
        """Those held and those measured since, as if in one run: the points of a case beside each other."""
        by_case: dict[Case, list[Point]] = {}
        for point in [*self.points.values(), *points]:
            by_case.setdefault(point.case, []).append(point)
        return [point for group in by_case.values() for point in group]
