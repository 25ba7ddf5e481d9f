"""How tensors lie: as rows, as columns over a strided dim, and scores against them.

Rows, and the outer indices of columns, are numbered in one order for all tensors of a call. Where one stride does not
describe that in each of them, up to three dims do: tensors that are permuted, sliced or expanded are read as they lie.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fused_softmax.core.plan import Alignment

Order = tuple[tuple[int, ...], tuple[int, ...]]
_MOST_NESTED = 2**31  # rows, or outer indices, up to which kernels number them over several dims, in 32 bits


def last(x: Tensor, dim: int) -> Tensor:
    """x with `dim` moved last."""
    return x if x.ndim == 0 else x.movedim(dim, -1)


def as_rows(*tensors: Tensor) -> tuple[tuple[Tensor, ...], tuple[bool, ...]]:
    """(`rows_of` tensors of one shape, which of them are copies): as few are copied as can be.

    Copied are tensors whose last dim is not contiguous, those whose rows take more than three strides, and those with
    2**31 rows that take two.
    """
    for copies in sorted(itertools.product((False, True), repeat=len(tensors)), key=sum):
        rows = rows_of(*(x.contiguous() if copy else x for x, copy in zip(tensors, copies, strict=True)))
        if rows is not None:
            return rows, copies
    raise AssertionError("copies have rows")


def rows_of(*tensors: Tensor) -> tuple[Tensor, ...] | None:
    """Tensors of one shape as views that number their rows alike, with contiguous columns; None if they have none.

    [n_rows, n_cols] if each has one row stride, else [n_0, n_1, n_2, n_cols].
    """
    rows = tuple(each for each in map(flatten, tensors) if each is not None)
    if len(rows) == len(tensors):
        return rows
    n_cols = tensors[0].shape[-1]
    if n_cols > 1 and any(x.stride(-1) != 1 for x in tensors):
        return None
    nested = _nested(tensors[0].shape[:-1], [x.stride()[:-1] for x in tensors])
    if nested is None:
        return None
    sizes, strides = nested
    return tuple(x.as_strided((*sizes, n_cols), (*of_x, 1)) for x, of_x in zip(tensors, strides, strict=True))


def sizes_of(rows: Tensor) -> tuple[int, int]:
    """(n_rows, n_cols) of what `rows_of` returns."""
    *leading, n_cols = rows.shape
    return math.prod(leading), n_cols


def flatten(x: Tensor) -> Tensor | None:
    """x as a view [n_rows, n_cols] with contiguous columns, or None where no single row stride describes it."""
    if x.ndim == 0:
        return x.reshape(1, 1)
    n_cols = x.shape[-1]
    if n_cols > 1 and x.stride(-1) != 1:
        return None
    n_rows, row_stride = 1, n_cols
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if n_rows == 1:
            row_stride = stride
        elif stride != n_rows * row_stride:
            return None
        n_rows *= size
    return x.as_strided((n_rows, n_cols), (row_stride, 1))


def is_rows(x: Tensor) -> bool:
    """Whether x can be written as rows: contiguous columns, one row stride, no two rows in one place."""
    rows = flatten(x)
    return rows is not None and (rows.shape[0] == 1 or rows.stride(0) >= rows.shape[1])


def rows_to_write(x: Tensor) -> Tensor:
    """A result that `is_rows`, as a view [n_rows, n_cols]."""
    rows = flatten(x)
    assert rows is not None, f"no one row stride describes a result of strides {x.stride()}"
    return rows


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the memory from a's first element to its last meets b's, whatever storages they belong to."""
    return overlap_like(a, b)(a, b)


def overlap_like(out: Tensor, *read: Any) -> Callable[..., bool]:
    """A function that says, for tensors of a kept call, which lie like these, whether `out` overlaps one that is read.

    read: what is no tensor does not count. Addresses differ from call to call, so this is asked at every call.
    """
    of_out, sizes = bytes_of(out), [(i, bytes_of(each)) for i, each in enumerate(read) if isinstance(each, Tensor)]

    def overlaps(out, *read):
        place = out.data_ptr()
        for i, of_read in sizes:  # noqa: SIM110  a generator takes longer
            if -of_out < place - read[i].data_ptr() < of_read:
                return True
        return False

    return overlaps


def as_bytes(x: Tensor) -> Tensor:
    """A tensor as bytes, uint8, with a last dim that is longer by the element size; a copy if rows have gaps."""
    if x.stride(-1) != 1:
        x = x.contiguous()
        x = x.as_strided(x.shape, (*x.stride()[:-1], 1))  # torch leaves the stride of a dim of one element as it was
    return x.view(torch.uint8)


def bytes_of(x: Tensor) -> int:
    """How many bytes from a tensor's first element to its last; 0 of none."""
    if not x.numel():
        return 0
    return (sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1) * x.element_size()


def alignment_of(x: Tensor, *others: Tensor) -> Alignment:
    """How the rows of all these tensors lie against 16-byte boundaries, in elements of x as kernels hold it."""
    vector = 16 // held_bytes(x)
    places = set()
    for t in (x, *others):
        strides = (t.stride(d) for d in range(len(t.shape) - 1) if t.shape[d] > 1)
        places.add((t.data_ptr() // t.element_size() % vector, *(stride % vector for stride in strides)))
    if not any(itertools.chain(*places)) and x.shape[-1] % vector == 0:
        return "even"
    nested = any(len(t.shape) > 2 for t in (x, *others))
    return "shifted" if len(places) == 1 and x.shape[-1] >= 2 * vector and not nested else "scalar"


def alignment_alone(x: Tensor, *others: Tensor) -> Alignment:
    """How rows that `rows_alone` has laid out are read and written: by their columns and dtypes alone."""
    tensors, n_cols = (x, *others), x.shape[-1]
    even = all(n_cols % (16 // held_bytes(each)) == 0 for each in tensors)
    assert not even or all(alignment_of(each) == "even" for each in tensors), "rows that start anywhere"
    return "even" if even else "scalar"


def rows_alone(x: Tensor, *beside: torch.dtype) -> Tensor:
    """x [..., n_cols] as rows [n_rows, n_cols] that are read alike in any batch, at any place in it; a copy if need be.

    Rows start on 16 bytes if their columns allow it, in x's dtype and in those of the tensors beside it. A single row
    has n_cols for its stride, so that Triton sees the same in it as in several.
    """
    rows, n_cols = flatten(x), x.shape[-1] if x.ndim else 1
    if rows is not None:
        vector, stride = 16 // held_bytes(x), rows.stride(0)
        even = not any(n_cols % (16 // max(2, dtype.itemsize)) for dtype in (x.dtype, *beside))
        starts = rows.data_ptr() // x.element_size(), stride
        alike = (stride == 1, stride % 16 == 0) == (n_cols == 1, n_cols % 16 == 0)
        if alike and not (even and any(start % vector for start in starts)):
            return rows
    return x.clone(memory_format=torch.contiguous_format).view(-1, n_cols)


def held_bytes(x: Tensor) -> int:
    """Bytes of an element as kernels hold it: fp8 becomes fp16."""
    return max(2, x.element_size())


def columns_of(dim: int, x: Tensor, *others: Tensor) -> tuple[Tensor, ...] | None:
    """Tensors as views [n_outer, n_cols, n_inner] that number alike, `dim` in the middle and n_inner contiguous.

    Or as [n_0, n_1, n_2, n_cols, n_inner], if some have no single stride for n_outer. None if x has a single column, if
    no inner positions are contiguous in all tensors, or if the outer indices take more than three strides. Tensors are
    of one shape, but for the size of `dim`. Indices are in the order in which the last tensor lies.
    """
    tensors = x, *others
    outer, inner = column_dims(dim, x, *others)
    n_inner = math.prod(x.shape[d] for d in inner)
    if n_inner == 1 or x.shape[dim] == 1:
        return None
    outer = outer[::-1]
    nested = _nested([x.shape[d] for d in outer], [[each.stride(d) for d in outer] for each in tensors])
    if nested is None:
        return None
    sizes, strides = nested
    if sizes[1:] == (1, 1):
        sizes, strides = sizes[:1], [of_each[:1] for of_each in strides]
    return tuple(
        each.as_strided((*sizes, each.shape[dim], n_inner), (*of_each, each.stride(dim), 1))
        for each, of_each in zip(tensors, strides, strict=True)
    )


def column_dims(dim: int, x: Tensor, *others: Tensor) -> Order:
    """The dims within n_outer and within n_inner of `columns_of`, the innermost first."""
    tensors, dim = (x, *others), dim % x.ndim
    lies = tensors[-1].stride()
    outer = sorted((d for d in range(x.ndim) if d != dim and x.shape[d] != 1), key=lambda d: (-lies[d], d))
    inner, n_inner = [], 1
    while outer and all(each.stride(outer[-1]) == n_inner for each in tensors):
        inner.append(outer.pop())
        n_inner *= x.shape[inner[-1]]
    return tuple(reversed(outer)), tuple(inner)


def _nested(sizes: Sequence[int], strides: Sequence[Sequence[int]]):
    """(three sizes, three strides of each tensor) that number dims of such strides; None if three are too few.

    The leading dim counts in the first size alone, so that the other numbers stay in a call for another leading size.
    """
    merged, of_each = coalesced(sizes, strides)
    if len(merged) > 3 or math.prod(merged) >= _MOST_NESTED:
        return None
    ones = 3 - len(merged)
    return (*merged[:1], *(1,) * ones, *merged[1:])[:3], [(*each[:1], *(0,) * ones, *each[1:])[:3] for each in of_each]


def coalesced(sizes, strides):
    """Dims, without those of size 1, and with neighbours merged if every tensor steps through both as through one."""
    merged: list[tuple[int, ...]] = []  # (size, stride of each tensor), outermost first
    for i, size in enumerate(sizes):
        if size == 1:
            continue
        here = tuple(each[i] for each in strides)
        if merged and all(outer == size * inner for outer, inner in zip(merged[-1][1:], here, strict=True)):
            merged[-1] = (merged[-1][0] * size, *here)
        else:
            merged.append((size, *here))
    return tuple(each[0] for each in merged), [tuple(each[i + 1] for each in merged) for i in range(len(strides))]
