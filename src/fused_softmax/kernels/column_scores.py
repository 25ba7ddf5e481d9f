"""Scores over a strided dim: scale and mask applied to held tiles [block_cols, block_inner].

Scale and mask are read where they lie. If a mask is the same for all columns, or for all inner positions, a program
reads only one row or one column of the mask for each tile.
"""

import triton
import triton.language as tl

from fused_softmax.kernels.row_scores import scores_by
from fused_softmax.kernels.spec import RowScores
from fused_softmax.kernels.state import NEG_INF, NO_COLUMN, scores_of, widen


@triton.jit
def scores_of_columns(c, S, K: tl.constexpr):
    """What the scores of each inner position depend on; numbers where they are the same for all."""
    if K.scaled:
        factor = S.scale
        if S.scale_ptr is not None:
            at = S.scale_ptr + c.outer * S.scale_outer
            if K.scale_inner:
                at += c.inner[None, :].to(tl.int64) * S.scale_inner
                factor = tl.load(at, mask=c.on[None, :], other=1.0)
            else:
                factor = tl.load(at)
        return scores_by(factor, 0, K)
    else:
        return RowScores(0, 1.0, NEG_INF, False)


@triton.jit
def keep_columns(tiles, c, q, S, K: tl.constexpr):
    """The tiles with all that is masked turned to the masked input.

    An added mask makes of them the finished scores, in the dtype of the arithmetic.
    """
    wide: tl.constexpr = tl.float64 if tiles[0].dtype.is_fp64() else tl.float32
    kept = ()
    for p in tl.static_range(len(tiles)):
        if p == 0 or K.mask_cols:
            mask = mask_of_columns(p, c, S, K)
        x = tiles[p]
        if K.mask == 2:
            x = widen(x, K.cast_dtype)
            if K.scaled:
                x *= q.factor
            x += mask.to(x.dtype)
        else:
            x = tl.where(mask != 0, x, (tl.zeros([], wide) + q.masked_input).to(x.dtype))
        kept = kept + (x,)  # noqa: RUF005  the compiler has no unpacking
    return kept


@triton.jit
def mask_of_columns(p, c, S, K: tl.constexpr):
    """The mask of a tile: of its shape, or one row, one column or one number of it. 0 where the tile has nothing."""
    VECTOR: tl.constexpr = K.vector
    cols = tl.arange(0, K.block_cols)[:, None]
    inner = tl.max_contiguous(c.inner, VECTOR)[None, :]  # no wider than x is read: a thread has the same positions
    here = S.mask_ptr + c.outer * in_vectors(S.mask_outer, K)
    if K.mask_cols:
        stride = in_vectors(S.mask_col, K).to(tl.int64)
        here += c.start.to(tl.int64) * stride
        at = cols.to(tl.int64) * stride
        if K.mask_inner:
            at += inner.to(tl.int64) * S.mask_inner
        here = here + at + p * (stride * K.block_cols)
        if p < K.full_pieces and (K.whole or not K.mask_inner):
            return tl.load(here)
        elif K.whole or not K.mask_inner:
            return tl.load(here, mask=p * K.block_cols + cols < c.size, other=0)
        elif p < K.full_pieces:
            return tl.load(here, mask=c.on[None, :] & (cols >= 0), other=0)
        else:
            return tl.load(here, mask=(p * K.block_cols + cols < c.size) & c.on[None, :], other=0)
    elif K.mask_inner:
        here += inner.to(tl.int64) * S.mask_inner
        return tl.load(here, mask=c.on[None, :], other=0)
    else:
        return tl.load(here)


@triton.jit
def in_vectors(stride, K: tl.constexpr):
    """A stride of the mask, in a form that shows the compiler how wide its accesses may be."""
    return stride // K.mask_vector * K.mask_vector


@triton.jit
def keep_first_columns(tiles, m, q, K: tl.constexpr):
    """Of greedy inner positions the first maximum alone: all else becomes -inf, but where it is NaN."""
    wide: tl.constexpr = tl.float64 if tiles[0].dtype.is_fp64() else tl.float32
    cols = tl.arange(0, K.block_cols)[:, None]
    found = tl.where(scores_of(tiles[0], q.factor, K) == m, cols, NO_COLUMN)
    for p in tl.static_range(1, len(tiles)):
        here = scores_of(tiles[p], q.factor, K) == m
        found = tl.minimum(found, tl.where(here, p * K.block_cols + cols, NO_COLUMN))
    first = tl.min(found, axis=0)[None, :]
    kept = ()
    for p in tl.static_range(len(tiles)):
        x = tiles[p]
        hide = q.greedy & (p * K.block_cols + cols != first) & (x.to(wide) == x.to(wide))
        kept = kept + (tl.where(hide, tl.full([], NEG_INF, wide).to(x.dtype), x),)  # noqa: RUF005
    return kept
