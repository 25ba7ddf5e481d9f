"""Where the heads of a call lie: all leading dims but the heads, as two dims along which every tensor has a stride.

A mask keeps its pattern, the dims over which it is broadcast: these have strides of 0, so the mask is never expanded,
and its gradient is summed over them.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fused_softmax.core.calls import allocator, contiguous_strides

_WORD = 8  # bytes of a mask that are looked at together


class Pattern(NamedTuple):
    """A mask or bias against [outer, inner, heads, queries, keys].

    sizes: of the call. own: of the mask itself, 1 where it is broadcast. strides: of a contiguous mask, 0 there.
    """

    sizes: tuple[int, ...]
    own: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def full(self) -> bool:
        return self.own == self.sizes


class Groups:
    """Leading dims, with neighbours merged, so that two strides of each tensor tell where a batch lies.

    expanded: the tensors as views of the same leading shape. own: of each its own leading sizes, 1 where it is
    broadcast. `fits` is False if two strides are too few: the tensors then have to be made contiguous.
    """

    def __init__(self, lead: Sequence[int], expanded: Sequence[Tensor], own: Sequence[Sequence[int]]):
        self._dims: list[list[int]] = []  # of each group
        self.lead = tuple(lead)
        for d, size in enumerate(lead):
            if size == 1:
                continue
            if self._dims and all(
                each.stride(self._dims[-1][-1]) == each.stride(d) * size
                and (sizes[self._dims[-1][-1]] == 1) == (sizes[d] == 1)
                for each, sizes in zip(expanded, own, strict=True)
            ):
                self._dims[-1].append(d)
            else:
                self._dims.append([d])
        self.fits = len(self._dims) <= 2

    @property
    def sizes(self) -> tuple[int, int]:
        """(outer, inner)"""
        sizes = [1, 1]
        for i, dims in enumerate(reversed(self._dims)):
            for d in dims:
                sizes[1 - i] *= self.lead[d]
        return sizes[0], sizes[1]

    def strides(self, tensor: Tensor, n_dims: int) -> tuple[int, ...]:
        """Strides of (outer, inner) and of the n_dims dims after the leading ones; 0 for a dim of size 1."""
        found = [0, 0]
        for i, dims in enumerate(reversed(self._dims)):
            found[1 - i] = tensor.stride(dims[-1])
        first = len(self.lead)
        return (*found, *(tensor.stride(d) if tensor.shape[d] > 1 else 0 for d in range(first, first + n_dims)))

    def pattern(self, own: Sequence[int], shape: Sequence[int]) -> Pattern:
        """Of a mask with these sizes of its own, one for each dim of the call's `shape`."""
        steps, step = [0] * len(own), 1
        for d in reversed(range(len(own))):
            steps[d] = step
            step *= own[d]
        n_lead = len(self.lead)
        sizes, of_own, strides = [*self.sizes], [1, 1], [0, 0]
        for i, dims in enumerate(reversed(self._dims)):
            if own[dims[-1]] != 1:
                of_own[1 - i], strides[1 - i] = sizes[1 - i], steps[dims[-1]]
        for d in range(n_lead, n_lead + 3):
            sizes.append(shape[d])
            of_own.append(own[d])
            strides.append(steps[d] if own[d] > 1 else 0)
        return Pattern(tuple(sizes), tuple(of_own), tuple(strides))


def skipping(
    mask: Tensor | None, strides: Sequence[int] | None, rows: bool, n_keys: int, copied: bool
) -> tuple[bool, int]:  # fmt: skip
    """Whether tiles that a mask hides as a whole are found, and how many of its keys are looked at together.

    strides: of (outer, inner, head, query, key). rows: whether it differs between queries. It is then looked at 8 bytes
    at a time, because single ones take long. copied: whether it is made contiguous first.
    """
    if mask is None or strides is None or strides[4] != 1:
        return False, 1
    places = *strides[:4], n_keys, 0 if copied else mask.data_ptr()
    fits = mask.dtype == torch.bool and not any(each % _WORD for each in places)
    return fits or not rows, _WORD if fits else 1


def own_sizes(tensor: Tensor, n_dims: int) -> tuple[int, ...]:
    return (1,) * (n_dims - tensor.ndim) + tuple(tensor.shape)


def maker(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """What makes an empty tensor, contiguous."""
    empty, strides = allocator(device), contiguous_strides(shape)
    return lambda: empty(shape, strides, dtype)


def blocks(n: int, block: int) -> int:
    """How many blocks hold n."""
    return -(-n // block)
