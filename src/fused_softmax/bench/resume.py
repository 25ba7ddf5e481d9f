"""Continues a run that stopped: which of its points still hold, or why it must not be continued."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fused_softmax.bench import record
from fused_softmax.bench.cases import Case
from fused_softmax.bench.record import Point, Run

# Readings of the moment, not properties of the machine.
PASSING = {"clocks_sm", "clocks_mem"}
# Statuses that another try on the same machine with the same source cannot change.
HELD = ("ok", "wrong", "untimed")


class CannotResume(ValueError):
    """The file has no results, or they are from another machine, source or effort."""


def earlier(out: Path) -> Run | None:
    """The run to continue: the partial one if there is one, else the finished one, else None.

    Raises CannotResume for a file that `fused-softmax bench --out` did not write, or that cannot be read.
    """
    for path in (record.partial_path(out), out):
        if path.exists():
            try:
                return record.read(path)
            except OSError as error:
                raise CannotResume(f"cannot read {path}: {error.strerror}") from None
            except ValueError as error:
                raise CannotResume(str(error)) from None
    return None


def mismatch(old: Run, new: Run) -> str:
    """The differences between two runs, as "then, now", or "": machine, versions, source and effort."""
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
        """The held points and the new ones as one run, with the points of a case side by side."""
        by_case: dict[Case, list[Point]] = {}
        for point in [*self.points.values(), *points]:
            by_case.setdefault(point.case, []).append(point)
        return [point for group in by_case.values() for point in group]
