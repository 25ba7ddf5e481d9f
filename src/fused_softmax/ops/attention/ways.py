"""Ways to compute a pass of attention: tables in which the first way that takes a pass computes it.

`explain()` listens to `chosen`, which every table is asked through.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Way(NamedTuple):
    """One way to compute a pass.

    plan: the record by which it takes a pass, or as a str why it does not. It launches and allocates nothing.
    prepare: of a pass, that record and what else a table's ways take, what computes it.
    """

    name: str
    plan: Callable[[Any], Any]
    prepare: Callable[..., Any]


class Choice(NamedTuple):
    """Which way takes a pass, and by which plan. refused: of each way before it, by name, why it does not."""

    of: str
    way: Way
    plan: Any
    refused: dict[str, str]

    def prepare(self, asked: Any, *more: Any) -> Any:
        return self.way.prepare(asked, self.plan, *more)


def chosen(of: str, ways: Sequence[Way], asked: Any) -> Choice:
    """The first of these ways that takes a pass; the last takes every one. of: what of a call it computes."""
    refused: dict[str, str] = {}
    for way in ways:
        plan = way.plan(asked)
        if not isinstance(plan, str):
            return Choice(of, way, plan, refused)
        refused[way.name] = plan
    raise AssertionError(f"no way takes {of}")
