"""What a recording has so far, and each access as one of its entries."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fused_softmax.trace.recorder.encode import numbers
from fused_softmax.trace.recorder.memory import Memory
from fused_softmax.trace.recorder.story import Source, Story


class OutsideError(Exception):
    """An access outside all tensors. elements: how many."""

    def __init__(self, elements: int) -> None:
        super().__init__(elements)
        self.elements = elements


class Recorded:
    """What has been recorded so far.

    reads, writes: for each tensor, how often each element was moved. states: all that is known of each row at the end.
    """

    counts_scratch = False  # whether scratch tensors are part of the traffic

    def __init__(self, story: Story) -> None:
        self.memory = Memory()
        self.phases = story.in_order()
        self.sources: list[Source] = []
        self.launches: list[dict[str, Any]] = []
        self.frames: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self.states: dict[int, dict[str, Any]] = {}
        self.reads: dict[int, np.ndarray] = {}
        self.writes: dict[int, np.ndarray] = {}

    def note(self, kind: str, ptrs: Any, mask: Any, value: Any = None) -> list[dict[str, Any]]:
        """One access ("loads" or "stores") as an entry for each tensor that it touches.

        An element counts once, however many lanes ask for it, because memory sees it once. A store without a value
        stores what memory holds now. Raises OutsideError for an access outside all tensors.
        """
        addresses = np.asarray(ptrs.data)
        on = np.ones(addresses.shape, bool) if mask is None else np.asarray(getattr(mask, "data", mask), bool)
        on = np.broadcast_to(on, addresses.shape).reshape(-1)
        tensor, index = self.memory.locate(addresses)
        outside = int((tensor[on] < 0).sum())
        if outside:
            raise OutsideError(outside)
        stored = None if value is None else np.broadcast_to(np.asarray(value.data), addresses.shape).reshape(-1)
        counted = self.reads if kind == "loads" else self.writes
        entries = []
        for each in dict.fromkeys(tensor[on].tolist()):
            held = self.memory.tensors[each]
            lanes = np.flatnonzero(on & (tensor == each))
            at, first = np.unique(index[lanes], return_index=True)
            order = np.argsort(first)
            at, lanes = at[order], lanes[first[order]]
            entry: dict[str, Any] = {"tensor": each, "at": at.tolist()}
            if kind == "stores":
                entry["data"] = numbers(_elements(held.view, at) if stored is None else stored[lanes], held.dtype)
            entries.append(entry | {"masked": int((~on).sum())})
            counted.setdefault(each, np.zeros(held.view.numel(), np.int64))[at] += 1
        return entries


def _elements(view: Tensor, at: np.ndarray) -> np.ndarray:
    values = view.contiguous().reshape(-1)[torch.from_numpy(at)]
    return (values.view(torch.uint16) if values.dtype == torch.bfloat16 else values).numpy()
