"""A program's place in the matrix: its rows and columns, and its knowledge of these rows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fused_softmax.trace.recorder.encode import dtype_name, numbers, read_numbers
from fused_softmax.trace.recorder.locals import flat, named, positions
from fused_softmax.trace.recorder.memory import Held, Memory
from fused_softmax.trace.recorder.story import Tile, Told


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

    @property
    def imagined(self) -> bool:
        """Whether it is in no memory."""
        return bool(self._memory.tensors) and self._memory.tensors[0].role == "registers"

    def rows_of(self, now: dict[str, Any], names: str) -> list[int]:
        """The rows that a local, or a sum of locals, names."""
        rows = positions(now, names)
        return [] if rows is None else sorted({int(row) for row in rows if 0 <= row < self.shape()[0]})

    def reach(self, entry: dict[str, Any], place: Place) -> tuple[list[int], tuple[int, int] | None] | None:
        """(rows, columns) of an access, if its tensor is an input or output of the matrix's size, or lies along it."""
        n_rows, n_cols = self.shape()
        held = self._memory.tensors[entry["tensor"]]
        if held.along or self.imagined:
            return _reach_along(held, entry["at"], place)
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
        rows = positions(now, told.row)
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

    def hold(self, tiles: Mapping[str, Tile], now: dict[str, Any], before: dict[str, Any]) -> list[dict[str, Any]]:
        """The tiles that a line has made of matrices that no memory holds: an entry for each, as for a store."""
        entries = []
        for name, tile in tiles.items():
            value: Any = now.get(name)
            data, rows = flat(value), positions(now, tile.rows)
            if value is before.get(name) or data is None or rows is None:
                continue
            number = next(at for at, held in enumerate(self._memory.tensors) if held.name == tile.of)
            view = self._memory.tensors[number].view
            cols = positions(now, tile.cols) if tile.cols else np.arange(data.size // rows.size)
            if cols is None or data.size != rows.size * cols.size:
                continue
            inside = np.logical_and.outer((rows >= 0) & (rows < view.shape[0]), (cols >= 0) & (cols < view.shape[1]))
            at = np.add.outer(rows.astype(np.int64) * view.shape[1], cols)[inside]
            encoded = numbers(data.reshape(inside.shape)[inside], dtype_name(value.dtype))
            view.view(-1)[torch.from_numpy(at)] = torch.tensor(read_numbers(encoded))
            entries.append({"tensor": number, "at": at.tolist(), "data": encoded})
        return entries


def _reach_along(held: Held, at: list[int], place: Place) -> tuple[list[int], tuple[int, int] | None] | None:
    """The place of a program that accesses elements of a tensor whose rows are the matrix's rows or columns."""
    if not held.along or not at:
        return None
    touched = sorted({each // (held.view.numel() // held.view.shape[0]) for each in at})
    if held.along == "rows":
        return touched, None
    return place.rows, (touched[0], touched[-1] + 1)
