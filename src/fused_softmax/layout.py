"""How tensors lie: as rows, as columns over a strided dim, and scores against them. Nothing is copied here."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_softmax.kernels.spec import ADDED_MASK, BOOL_MASK, NO_MASK
from fused_softmax.options import Scores
from fused_softmax.plan import Alignment

_KEPT_BYTES = 16 << 20  # of a mask that L2 keeps beside the rows that stream through it

Order = tuple[tuple[int, ...], tuple[int, ...]]


def last(x: Tensor, dim: int) -> Tensor:
    """x with `dim` moved last."""
    return x if x.ndim == 0 else x.movedim(dim, -1)


def as_rows(x: Tensor) -> Tensor:
    """x as [n_rows, n_cols] with contiguous columns; a copy only where no single row stride describes it."""
    rows = flatten(x)
    return rows if rows is not None else x.contiguous().view(-1, x.shape[-1])


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


def overlap(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def alignment_of(x: Tensor, *others: Tensor) -> Alignment:
    """How the rows of all these tensors lie against 16-byte boundaries, counted in elements of x."""
    vector = 16 // x.element_size()
    many = x.shape[0] > 1
    places = {(t.data_ptr() // t.element_size() % vector, t.stride(0) % vector if many else 0) for t in (x, *others)}
    if places == {(0, 0)} and x.shape[1] % vector == 0:
        return "even"
    return "shifted" if len(places) == 1 and x.shape[1] >= 2 * vector else "scalar"


def columns_of(x: Tensor, dim: int) -> tuple[Tensor, Order] | None:
    """x as a view [n_outer, n_cols, n_inner], `dim` in the middle and n_inner contiguous, or None if there is none.

    With it the order of the other dims within n_outer and n_inner, which all tensors of a call must share.
    """
    dim %= x.ndim
    inner: list[int] = []
    others = sorted((d for d in range(x.ndim) if d != dim and x.shape[d] != 1), key=lambda d: (x.stride(d), -d))
    size = 1
    while others and x.stride(others[0]) == size:
        size *= x.shape[others[0]]
        inner.append(others.pop(0))
    if not inner or x.shape[dim] == 1:
        return None
    if any(x.stride(b) != x.stride(a) * x.shape[a] for a, b in itertools.pairwise(others)):
        return None
    n_outer = math.prod(x.shape[d] for d in others)
    view = x.as_strided((n_outer, x.shape[dim], size), (x.stride(others[0]) if others else 0, x.stride(dim), 1))
    return view, (tuple(others), tuple(inner))


@dataclass(frozen=True)
class ScoreLayout:
    """How mask, scale and sink lie against the rows of an input [n_rows, n_cols], for the kernels.

    A row's number splits into up to three indices (the last two of sizes n_1 and n_2); strides are of those.

    mask, scale, sink: the tensors, or None. values: a kernel's arguments by name.
    kind: the fields of its ScoreSpec that the scores decide.
    shared_dims: how many indices, the last ones, a row of the mask depends on, if not on the one before them.
    copied: whether one of these is a copy, which another call has to make anew.
    leading: the value, if any, that counts the rows' leading index, and so grows with the input's leading size.
    """

    mask: Tensor | None
    scale: Tensor | None
    sink: Tensor | None
    values: dict[str, Any]
    kind: dict[str, Any]
    shared_dims: int = 0
    copied: bool = False
    leading: str | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """A launch's, in the kernels' order."""
        return tuple(each for each in (self.mask, self.scale, self.sink) if each is not None)


_NAMES = (
    "n_1", "n_2", "mask_0", "mask_1", "mask_2", "mask_col_stride", "scale_0", "scale_1", "scale_2", "n_queries",
)  # fmt: skip
_SINK = ("sink_0", "sink_1", "sink_2")
_PLAIN = ScoreLayout(None, None, None, dict.fromkeys((*_NAMES, *_SINK, "scale")), {})


def scores_against(scores: Scores, shape: tuple[int, ...]) -> ScoreLayout:
    """The layout of scores for an input of `shape` whose rows run along its last dim."""
    if scores.plain:
        return _PLAIN
    shape = shape or (1,)
    mask = scores.mask
    given = (mask, *(each if isinstance(each, Tensor) else None for each in (scores.scale, scores.sink)))
    views = [None if t is None else t.expand(shape) for t in given]
    sizes, strides = _coalesced(shape[:-1], views)
    copied = len(sizes) > 3
    if copied:  # no three indices describe it
        views = [None if view is None else _dense(view) for view in views]
        sizes, strides = _coalesced(shape[:-1], views)
    shared = 0
    if views[0] is not None and len(sizes) > 1 and strides[0][0] == 0:
        distinct = math.prod(size for size, stride in zip(shape, views[0].stride(), strict=True) if stride)
        shared = len(sizes) - 1 if distinct * views[0].element_size() > _KEPT_BYTES else 0
    leading = {1: "n_2", 2: "n_1"}.get(len(sizes))
    sizes = (1,) * (3 - len(sizes)) + sizes
    strides = [(0,) * (3 - len(each)) + each for each in strides]
    col_stride = 0 if views[0] is None else views[0].stride(-1)
    n_queries = shape[-2] if scores.is_causal else 1
    values = dict(zip(_NAMES, (*sizes[1:], *strides[0], col_stride, *strides[1], n_queries), strict=True))
    # None where there is no sink: a kernel without one has no argument for it, and stays as it was compiled.
    values |= dict(zip(_SINK, (None,) * 3 if views[2] is None else strides[2], strict=True))
    kind = {
        "mask": NO_MASK if mask is None else BOOL_MASK if mask.dtype == torch.bool else ADDED_MASK,
        "scaled": scores.scale is not None,
        "greedy": scores.greedy,
        "causal": scores.is_causal,
        "zero_masked_rows": scores.masked_rows == "zero",
        "sink": views[2] is not None,
    }
    values |= {"scale": scores.number}
    return ScoreLayout(views[0], views[1], views[2], values, kind, shared, copied, leading)


def _dense(view: Tensor) -> Tensor:
    """A copy in which any neighbours of the leading dims merge, and which has no more of the last dim than the view."""
    return view.contiguous() if view.stride(-1) else view[..., :1].contiguous().expand(view.shape)


def _coalesced(sizes, views):
    """Dims of size 1 dropped and neighbours merged wherever every tensor steps through both as through one."""
    strides = [(0,) * len(sizes) if view is None else view.stride()[:-1] for view in views]
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
