"""Segments longer than a tile: a range of positions is reduced to two numbers, tile after tile, and then written."""

import triton
import triton.language as tl

from fused_softmax.core.kernels.state import NEG_INF, exp_at, rounded_product
from fused_softmax.ops.segments.kernels.elements import (
    columns_there,
    of_order,
    origin,
    read,
    side_by_side,
    term,
    weight,
    write,
    written,
)


@triton.jit
def range_places(S, tile, begin, end, K: tl.constexpr):
    """(near, far, there) of the elements of one tile of positions; `there` are those in the range."""
    WIDE: tl.constexpr = K.range_wide
    first = tl.full([], 0, tl.int64) + tile * K.range_tile
    least, most = tl.maximum(begin - first, 0).to(tl.int32), tl.minimum(end - first, K.range_tile).to(tl.int32)
    if K.ordered:
        step = tl.arange(0, K.range_deep)[:, None, None] * WIDE + tl.arange(0, WIDE)[None, :, None]
        there = (step >= least) & (step < most)
        near, far = of_order(S, first + step, there, K), tl.full([1, 1, 1], 0, tl.int32)
        there = tl.broadcast_to(there, near.shape)
    else:
        near = (S.base + first * S.stride + side_by_side(S, WIDE, K))[None, :]
        far = tl.arange(0, K.range_deep)[:, None] * (WIDE * S.stride)
        step = tl.arange(0, K.range_deep)[:, None] * (WIDE * K.cols) + tl.arange(0, WIDE * K.cols)[None, :]
        there = (step >= least * K.cols) & (step < most * K.cols)
    return near, far, columns_there(S, there, K)


@triton.jit
def is_inside(tile, begin, end, K: tl.constexpr):
    """Whether a tile lies in the range as a whole, and needs no mask.

    With a mask, accesses of 16 bytes would become accesses of 4.
    """
    return (K.whole and not K.ordered) & (tile * K.range_tile >= begin) & ((tile + 1) * K.range_tile <= end)


@triton.jit
def read_range(S, tile, begin, end, K: tl.constexpr):
    """(a, b) [deep, wide, cols] of a tile, as `read` gives them. Positions outside the range add nothing."""
    near, far, there = range_places(S, tile, begin, end, K)
    if is_inside(tile, begin, end, K):
        a, b = read(S, near, far, None, K)
    else:
        a, b = read(S, near, far, there, K)
    return of_columns(a, K), of_columns(b, K)


@triton.jit
def of_columns(a, K: tl.constexpr):
    return tl.reshape(a, [K.range_deep, K.range_wide, K.cols])


@triton.jit
def reduce_range(S, begin, end, K: tl.constexpr):
    """The two numbers [1, cols] of what a segment has in a range: (m, s), or d twice.

    Each lane has its own state until the end.
    """
    m = tl.full([K.range_wide, K.cols], NEG_INF, tl.float32)
    s = tl.full([K.range_wide, K.cols], 0, tl.float32)
    for tile in range(begin // K.range_tile, tl.cdiv(end, K.range_tile)):
        a, b = read_range(S, tile, begin, end, K)
        if K.backward:
            s += tl.sum(term(a, b, K), axis=0)
        else:
            top = tl.maximum(m, tl.max(a, axis=0))
            scale, base = origin(top, K)
            s = s * weight(m, top, K) + tl.sum(exp_at(a, scale[None, :, :], base[None, :, :], K.ptx), axis=0)
            m = top
    return whole_of(m, s, K)


@triton.jit
def whole_of(m, s, K: tl.constexpr):
    """The two numbers [1, cols] of a segment, from the states [lanes, cols] of its parts."""
    if K.backward:
        d = tl.sum(s, axis=0)[None, :]
        return d, d
    else:
        top = tl.max(m, axis=0)[None, :]
        return top, tl.sum(rounded_product(s, weight(m, top, K)), axis=0)[None, :]


@triton.jit
def write_range(S, begin, end, m, s, K: tl.constexpr):
    """Write the results of a range. The last tile comes first: it was read last, and the caches have it."""
    first, last = begin // K.range_tile, tl.cdiv(end, K.range_tile)
    for back in range(0, last - first):
        tile = last - 1 - back
        near, far, there = range_places(S, tile, begin, end, K)
        if is_inside(tile, begin, end, K):
            a, b = read(S, near, far, None, K)
            y = written(S, of_columns(a, K), of_columns(b, K), m[None, :, :], s[None, :, :], K)
            write(S, near, far, None, y, K)
        else:
            a, b = read(S, near, far, there, K)
            y = written(S, of_columns(a, K), of_columns(b, K), m[None, :, :], s[None, :, :], K)
            write(S, near, far, there, y, K)
