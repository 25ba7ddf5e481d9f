"""The tensors of a recording as the kernels address them: guarded copies, and a map from addresses to elements.

An interpreted kernel reads and writes real memory. So every storage is copied, with guard bytes before and after the
copy, all 0xFF (NaN in every float dtype). An access outside the elements of a tensor is an error and is not made.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fused_softmax.trace.recorder.encode import dtype_name, tensor_numbers

Role = Literal["input", "output", "scratch", "registers"]
Axis = Literal["rows", "cols"]

GUARD = 4096  # bytes before and after each storage
MOST_ELEMENTS = 65536  # of one tensor


class RecordingError(RuntimeError):
    """A run cannot be recorded. The message says why, and what can be recorded."""


@dataclass
class Held:
    """One tensor of the recording.

    role: "registers" is a matrix that no memory holds: its tiles come and go in registers.
    along: which of the matrix's axes this tensor's rows are, if it is no such matrix itself: of a product, the rows of
        one factor are the matrix's rows, those of the other its columns.
    """

    name: str
    argument: str | None
    role: Role
    view: Tensor  # into the guarded copy
    dtype: str
    before: list[Any]
    along: Axis | None = None

    def entry(self) -> dict[str, Any]:
        """Its entry in a recording."""
        entry: dict[str, Any] = {"name": self.name, "role": self.role, "dtype": self.dtype}
        if self.argument:
            entry["argument"] = self.argument
        if self.along:
            entry["along"] = self.along
        entry["shape"] = list(self.view.shape)
        if not self.view.is_contiguous():
            entry["strides"] = list(self.view.stride())
        return entry | {"before": self.before, "after": tensor_numbers(self.view)}


@dataclass
class _Region:
    """The guarded copy of one storage, and each element's tensor and index in that tensor."""

    original: Tensor  # all bytes of the storage; keeps them alive, so that no other storage gets their address
    guarded: Tensor
    start: int  # address of the first byte of the copy
    itemsize: int
    tensor: np.ndarray
    index: np.ndarray
    held: list[int] = field(default_factory=list)


class Memory:
    """The guarded copies of all tensors of one recording."""

    def __init__(self) -> None:
        self.tensors: list[Held] = []
        self._regions: dict[int, _Region] = {}

    def hold(
        self,
        name: str,
        tensor: Tensor,
        role: Role,
        argument: str | None = None,
        *,
        unset: bool = False,
        along: Axis | None = None,
    ) -> Tensor:
        """The guarded copy of a tensor. The tensor joins the recording unless its elements already belong to it.

        Outputs and unset tensors are poisoned with NaN before a kernel writes them.
        """
        if tensor.device.type != "cpu":
            raise RecordingError(f"{name} is on {tensor.device}; recordings are made on the CPU, so pass x.cpu()")
        if tensor.numel() > MOST_ELEMENTS:
            raise RecordingError(
                f"{name} has {tensor.numel()} elements of shape {tuple(tensor.shape)}; a recording holds every value, "
                f"so a tensor may have at most {MOST_ELEMENTS}: use a small example"
            )
        region = self._region(tensor, name)
        view = _as(region.guarded, tensor)
        at = _offsets(tensor)
        if (region.tensor[at] < 0).any():
            number = len(self.tensors)
            if role == "output" or unset:
                view.fill_(float("nan") if view.is_floating_point() else 0)
                region.original.copy_(region.guarded)
            region.tensor[at] = number
            region.index[at] = np.arange(at.size)
            region.held.append(number)
            held = Held(name, argument, role, view, dtype_name(tensor.dtype), tensor_numbers(view), along)
            self.tensors.append(held)
        elif argument:
            known = [self.tensors[each] for each in region.tensor[at[:1]].tolist()]
            for each in known:
                each.argument = each.argument or argument
        return view

    def imagine(self, name: str, n_rows: int, n_cols: int) -> None:
        """Let a float32 matrix join the recording that no memory holds: a story says which locals are tiles of it."""
        view = torch.full((n_rows, n_cols), float("nan"))
        self.tensors.append(Held(name, None, "registers", view, "float32", tensor_numbers(view)))

    def bring(self) -> None:
        """Copy into the guarded copies what the host has written since the last launch."""
        for region in self._regions.values():
            region.guarded.copy_(region.original)

    def take(self) -> None:
        """Copy back from the guarded copies what a launch has written."""
        for region in self._regions.values():
            region.original.copy_(region.guarded)

    def locate(self, addresses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(tensor, logical index) of each address, -1 if no element begins there."""
        flat = addresses.reshape(-1).astype(np.int64)
        tensor = np.full(flat.shape, -1, np.int64)
        index = np.full(flat.shape, -1, np.int64)
        for region in self._regions.values():
            at, rest = np.divmod(flat - region.start, region.itemsize)
            inside = (rest == 0) & (at >= 0) & (at < region.tensor.size)
            tensor[inside] = region.tensor[at[inside]]
            index[inside] = region.index[at[inside]]
        return tensor, index

    def near(self, address: int) -> int | None:
        """The tensor whose storage or guard contains an address: a masked-off pointer points past that tensor."""
        for region in self._regions.values():
            if region.held and -GUARD <= address - region.start < region.tensor.size * region.itemsize + GUARD:
                return region.held[0]
        return None

    def _region(self, tensor: Tensor, name: str) -> _Region:
        storage = tensor.untyped_storage()
        found = self._regions.get(storage.data_ptr())
        itemsize = tensor.element_size()
        if found is not None:
            if found.itemsize != itemsize:
                raise RecordingError(f"{name} shares memory with a tensor of another element size")
            return found
        original = torch.empty(0, dtype=torch.uint8).set_(storage)
        around = np.full(storage.nbytes() + 2 * GUARD + 64, 0xFF, np.uint8)
        skip = GUARD + -(around.ctypes.data + GUARD) % 64
        guarded = torch.from_numpy(around)[skip : skip + storage.nbytes()]
        guarded.copy_(original)
        n = storage.nbytes() // itemsize
        region = _Region(
            original, guarded, guarded.data_ptr(), itemsize, np.full(n, -1, np.int64), np.full(n, -1, np.int64)
        )
        self._regions[storage.data_ptr()] = region
        return region


def _as(memory: Tensor, like: Tensor) -> Tensor:
    """A view of `memory` with the position, shape and strides that `like` has in its storage."""
    first = memory.storage_offset() // like.element_size() + like.storage_offset()
    whole = torch.empty(0, dtype=like.dtype).set_(memory.untyped_storage())
    return whole.as_strided(tuple(like.shape), like.stride(), first)


def _offsets(tensor: Tensor) -> np.ndarray:
    """The offset of each element in its storage, in elements, in logical order."""
    at = np.full((), tensor.storage_offset(), np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        at = at[..., None] + np.arange(size) * stride
    return at.reshape(-1)
