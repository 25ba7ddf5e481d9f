"""Ways to compute a pass of attention. In each table, the first way that takes a pass computes it.

Every table is asked through `chosen`, to which `explain()` listens.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Way(NamedTuple):
    """One way to compute a pass.

    plan: the record by which it takes a pass, or a str that says why it does not. It launches and allocates nothing.
    prepare: from a pass, that record and what else a table's ways take, it makes what computes the pass.
    """

    name: str
    plan: Callable[[Any], Any]
    prepare: Callable[..., Any]


class Choice(NamedTuple):
    """Which way takes a pass, and by which plan. refused: by name, why each way before it does not."""

    of: str
    way: Way
    plan: Any
    refused: dict[str, str]

    def prepare(self, asked: Any, *more: Any) -> Any:
        return self.way.prepare(asked, self.plan, *more)


def chosen(of: str, ways: Sequence[Way], asked: Any) -> Choice:
    """The first of these ways that takes a pass. The last one takes every pass.

    of: the part of a call that it computes.
    """
    refused: dict[str, str] = {}
    for way in ways:
        plan = way.plan(asked)
        if not isinstance(plan, str):
            return Choice(of, way, plan, refused)
        refused[way.name] = plan
    raise AssertionError(f"no way takes {of}")
