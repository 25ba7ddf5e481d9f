"""A tile: pieces of segments, all read at once, so that each element is read once and written once.

A row of the tile is a piece: at most `length` positions of one segment. The pieces of a segment are next to each other,
and all in one tile. A scan over the rows merges the pieces of each segment.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.state import exp_at
from fused_softmax.ops.segments.kernels.elements import (
    columns_there,
    given_of,
    of_order,
    origin,
    read,
    side_by_side,
    term,
    write,
    write_lse,
    written,
)


@triton.jit
def of_tile(S, segment, begin, size, nth, left, K: tl.constexpr):
    """Write the results of the segments whose pieces are the rows of a tile.

    segment, begin, size: of each row's segment, [pieces]; size is below 0 in a row without one. nth: which piece of it
    the row is. left: how many pieces come after it.
    """
    lives = size >= 0
    near, far, there = places_of(S, begin + nth.to(tl.int64) * K.length, size - nth * K.length, K)
    a, b = read(S, near, far, there, K)
    a, b = of_rows(a, K), of_rows(b, K)
    several = tl.max(tl.maximum(nth, left), axis=0) > 0
    begins, last = nth == 0, tl.arange(0, K.pieces) + left
    if not K.sums:
        m, s = given_of(S, segment[:, None], lives[:, None], K)
    elif K.backward:
        s = tl.sum(tl.sum(term(a, b, K), axis=1), axis=1)
        if several:
            s = sum_of_pieces(s, begins, last, K)
        m = s
    else:
        m = tl.max(tl.max(a, axis=1), axis=1)
        if several:
            m = max_of_pieces(m, begins, last, K)
        scale, base = origin(m, K)
        e = exp_at(a, scale[:, None, None, :], base[:, None, None, :], K.ptx)
        s = tl.sum(tl.sum(e, axis=1), axis=1)
        if several:
            s = sum_of_pieces(s, begins, last, K)
        if K.lse:
            write_lse(S, segment[:, None], (lives & begins)[:, None], m, s, K)
        elif K.nowhere:
            s = tl.where((segment >= S.n_lse)[:, None], float("nan"), s)
    if K.writes_elements:
        m, s = m[:, None, None, :], s[:, None, None, :]
        if K.backward or K.log:
            write(S, near, far, there, written(S, a, b, m, s, K), K)
        else:
            write(S, near, far, there, e * (1.0 / s), K)


@triton.jit
def of_rows(a, K: tl.constexpr):
    return tl.reshape(a, [K.pieces, K.deep, K.wide, K.cols])


@triton.jit
def places_of(S, first, upto, K: tl.constexpr):
    """(near, far, there) of elements: [pieces, deep, wide * cols], with an order [pieces, deep, wide, cols].

    first: the first position of each row. upto: how many positions from there on belong to its segment.
    The compiler gives lanes first the last axis and then rows. So a thread has all of `deep`, and few lanes share a
    row.
    """
    if K.ordered:
        deep, wide = tl.arange(0, K.deep)[None, :, None, None], tl.arange(0, K.wide)[None, None, :, None]
        there = deep * K.wide + wide < upto[:, None, None, None]
        near = of_order(S, first[:, None, None, None] + (deep * K.wide + wide), there, K)
        far, there = tl.full([1, 1, 1, 1], 0, tl.int32), tl.broadcast_to(there, near.shape)
    else:
        near = (S.base + first * S.stride)[:, None, None] + side_by_side(S, K.wide, K)[None, None, :]
        far = (tl.arange(0, K.deep) * (K.wide * S.stride))[None, :, None]
        deep = tl.arange(0, K.deep)[None, :, None] * (K.wide * K.cols)
        wide = tl.arange(0, K.wide * K.cols)[None, None, :]
        there = deep + wide < (upto * K.cols)[:, None, None]
    return near, far, columns_there(S, there, K)


@triton.jit
def max_of_pieces(m, begins, last, K: tl.constexpr):
    """For each piece, the maximum over all pieces of its segment."""
    begins = tl.broadcast_to(begins.to(tl.int32)[:, None], m.shape)
    return of_last(tl.associative_scan((begins, m), 0, _greater)[1], last)


@triton.jit
def sum_of_pieces(s, begins, last, K: tl.constexpr):
    """For each piece, the sum over all pieces of its segment."""
    begins = tl.broadcast_to(begins.to(tl.int32)[:, None], s.shape)
    return of_last(tl.associative_scan((begins, s), 0, _added)[1], last)


@triton.jit
def of_last(x, last):
    return tl.gather(x, tl.broadcast_to(last[:, None], x.shape), 0)


@triton.jit
def _greater(begins_a, m_a, begins_b, m_b):
    return begins_a | begins_b, tl.where(begins_b != 0, m_b, tl.maximum(m_a, m_b))


@triton.jit
def _added(begins_a, s_a, begins_b, s_b):
    return begins_a | begins_b, tl.where(begins_b != 0, s_b, s_a + s_b)
