"""A program's place in the matrix: its rows and columns, and its knowledge of these rows."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fused_softmax.trace.encode import dtype_name, numbers
from fused_softmax.trace.locals import flat, named
from fused_softmax.trace.memory import Memory
from fused_softmax.trace.story import Told


@dataclass
class Place:
    """One program's current rows, its columns or None, and (m, s) of each row as far as it knows them."""

    rows: list[int] = field(default_factory=list)
    cols: tuple[int, int] | None = None
    state: dict[int, dict[str, Any]] = field(default_factory=dict)


class Matrix:
    """The first tensor of a recording. Each step has a place in it."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def shape(self) -> tuple[int, int]:
        """(rows, columns). A tensor of one dim is one row."""
        if not self._memory.tensors:
            return 0, 1
        view = self._memory.tensors[0].view
        n_cols = view.shape[-1] if view.ndim else 1
        return view.numel() // max(1, n_cols), n_cols

    def rows_of(self, value: Any) -> list[int]:
        """The rows that a local names."""
        rows = flat(value)
        return [] if rows is None else sorted({int(row) for row in rows if 0 <= row < self.shape()[0]})

    def reach(self, entry: dict[str, Any]) -> tuple[list[int], tuple[int, int]] | None:
        """(rows, columns) of an access, if its tensor is an input or output of the matrix's size."""
        n_rows, n_cols = self.shape()
        held = self._memory.tensors[entry["tensor"]]
        if held.view.numel() != n_rows * n_cols or held.role == "scratch" or not entry["at"]:
            return None
        rows, cols = zip(*(divmod(at, n_cols) for at in entry["at"]), strict=True)
        return sorted(set(rows)), (min(cols), max(cols) + 1)

    def learn(
        self, place: Place, told: Told, now: dict[str, Any], before: dict[str, Any], reduced: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """The rows whose maximum or sum has changed, with everything known of them now.

        A local that is as it was before says nothing: a function that the kernel has called may know more by now.
        """
        rows = flat(named(now, told.row))
        if rows is None:
            return []
        news = set()
        for letter, names in (("m", told.m), ("s", told.s)):
            values = [reduced.get(name) if name.endswith("()") else named(now, name) for name in names]
            value: Any = next((value for value in values if value is not None), None)
            if any(value is named(before, name) for name in names):
                continue
            of_rows = flat(value)
            if of_rows is None or of_rows.size not in (1, rows.size) or of_rows.dtype.kind != "f":
                continue
            encoded = numbers(np.broadcast_to(of_rows, rows.shape), dtype_name(getattr(value, "dtype", "float64")))
            for row, each in zip(map(int, rows), encoded, strict=True):
                state = place.state.setdefault(row, {})
                if 0 <= row < self.shape()[0] and state.get(letter) != each:
                    state[letter] = each
                    news.add(row)
        return [{"row": row} | place.state[row] for row in sorted(news)]
