"""The state of a row of logits from one read, tile by tile; and the state of a row from the states of its parts.

For kernels that need a row's log-sum-exp before anything else: losses without a gradient, and log-probabilities.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.rows import body_of, first_max_of, lanes_of_part, load_edge, whole_vectors
from fused_softmax.core.kernels.spec import Row, Rows
from fused_softmax.core.kernels.state import (
    NEG_INF,
    NO_COLUMN,
    exp_at,
    hold_all,
    max_of,
    merge,
    origin_of,
    rounded_product,
    scores_of,
    weight_of,
)
from fused_softmax.ops.losses.kernels.common import (
    exponent_at,
    faded_terms,
    finish_edge,
    load_logits,
    power_of,
    sum_of,
    sum_of_edge,
    sums_and_terms,
)
from fused_softmax.ops.losses.kernels.kept import ELSEWHERE, bits_on, columns_at
from fused_softmax.ops.losses.kernels.spec import Scanned


@triton.jit
def side_by_side(r, K: tl.constexpr):
    """The Row, with columns dealt so that neighbouring lanes read neighbouring elements, where each is read by itself.

    bf16 4096 x 50257 takes a third of the time by it.
    """
    if K.vector == 1:
        WIDTH: tl.constexpr = K.lane_cols
        HEIGHT: tl.constexpr = K.block_cols // K.lane_cols
        cols = tl.arange(0, HEIGHT)[:, None] + tl.arange(0, WIDTH)[None, :] * HEIGHT
        return Row(r.row, r.part, r.start, r.size, r.head, r.body, cols)
    else:
        return r


@triton.jit
def scan_logits(x_ptr, x_row_stride, misalignment, row, part, weight_ptr, zero, n_cols, n_parts, part_cols, hidden, N,
                kept, K: tl.constexpr):  # fmt: skip
    """The Scanned of a part of a row of logits. zero: the origin from which smoothing sums them.

    kept: the row's Listed (K.listed) or Masked (K.masked); else it is not used, and all columns count.
    """
    n_classes = n_cols
    if K.listed:  # places of the list are scanned instead of columns
        n_cols, part_cols = kept.size, kept.size
    PIECES: tl.constexpr = K.pieces
    x = Rows(x_ptr, x_row_stride, misalignment)
    part_cols = whole_vectors(part_cols, K)
    r = lanes_of_part(part, row, x, n_cols, part_cols, K)
    if not K.masked:  # a lane reads the bits of neighbouring columns by one access
        r = side_by_side(r, K)
    x_body = body_of(x, row, K)
    edge = 0
    if K.shifted:  # loaded before anything waits for the pieces
        edge = load_edge(x, n_cols, n_parts, r, hidden, K)
    HEIGHT: tl.constexpr = K.block_cols // K.lane_cols
    m = tl.full([HEIGHT, 1], NEG_INF, K.state_dtype)
    s = tl.zeros([HEIGHT, 1], K.state_dtype)
    wz = tl.zeros([HEIGHT, 1], K.state_dtype)
    u = tl.zeros([HEIGHT, 1], K.state_dtype)
    q = tl.zeros([HEIGHT, 1], K.state_dtype)
    total = tl.zeros([HEIGHT, 1], K.state_dtype)
    found = tl.full([HEIGHT, 1], NO_COLUMN, tl.int32)
    n = tl.zeros([HEIGHT, 1], K.state_dtype)
    end = tl.minimum(r.start + part_cols, r.body)
    for at in range(r.start, end, PIECES * K.block_cols):
        on = ()
        if K.listed:
            c = columns_at(kept, at + r.cols, n_classes, K)
            z = load_listed(x_body, c, at + r.cols < end, n_classes, hidden, N, K)
            if K.shard:
                on = ((at + r.cols < end) & (c != ELSEWHERE),)
        else:
            z = load_logits(x_body + at, r.cols, end - at, hidden, N, K, PIECES, 0)
            if K.masked:
                on = bits_of(kept, at, end, r.cols, K)
                z = where_on(z, on, hidden, K)
        m_tile = tl.maximum(m, max_of(z, N.factor, K)[:, None])
        scale, base = origin_of(m_tile, K.ptx)
        fade = weight_of(m, m_tile, K.ptx)
        held = hold_all(z, K.ptx)
        if K.smooth:
            wz += sum_of(z, r.head + at, r.cols, end - at, weight_ptr, zero, N, K)[:, None]
        if K.finds:
            if K.listed:
                here = first_max_of(z, m_tile, 0, c.to(tl.int32), N.factor, K)[:, None]
            else:
                here = first_max_of(z, m_tile, (r.head + at).to(tl.int32), r.cols, N.factor, K)[:, None]
            found = tl.where(m_tile > m, here, tl.minimum(found, here))
        s_tile, u_tile = sums_and_terms(held, scale, base, N, K)
        if K.stats:
            u = faded_terms(u, s, m, m_tile, fade, K) + u_tile[:, None]
        if K.moments:
            squares, values = moments_of(held, r.cols, end - at, on, scale, base, N, K)
            q = q * fade * fade + squares[:, None]
            total += values[:, None]
            if K.picks:
                n += count_of(on, K)[:, None]
        s = s * fade + s_tile[:, None]
        m = m_tile
    m_lane = m
    m = tl.max(tl.max(m_lane, axis=1), axis=0)
    fade = weight_of(m_lane, m, K.ptx)
    u = tl.sum(tl.sum(faded_terms(u, s, m_lane, m, fade, K), axis=1), axis=0)
    s = tl.sum(tl.sum(s * fade, axis=1), axis=0)
    wz = tl.sum(tl.sum(wz, axis=1), axis=0)
    q = tl.sum(tl.sum(q * fade * fade, axis=1), axis=0)
    total = tl.sum(tl.sum(total, axis=1), axis=0)
    found = tl.min(tl.min(tl.where(m_lane == m, found, NO_COLUMN), axis=1), axis=0)
    n = tl.sum(tl.sum(n, axis=1), axis=0)
    if K.listed and not K.shard:
        n = kept.size.to(K.state_dtype)
    if K.shifted:  # no call asks for moments of shifted rows
        edge = finish_edge(edge, N, K)
        m_edge = tl.max(edge.x, axis=0)
        scale, base = origin_of(m_edge, K.ptx)
        e, t = power_of(exponent_at(edge.x, scale, base, K), K)
        m_body, s_body, s_edge = m, s, tl.sum(e, axis=0)
        m, s = merge(m, s, m_edge, s_edge, K.ptx)
        if K.smooth:
            wz += sum_of_edge(edge, weight_ptr, zero, 0, K)
        if K.stats:
            u_edge = tl.sum(rounded_product(e, t), axis=0)
            u = faded_terms(u, s_body, m_body, m, weight_of(m_body, m, K.ptx), K)
            u += faded_terms(u_edge, s_edge, m_edge, m, weight_of(m_edge, m, K.ptx), K)
        if K.finds:
            found = tl.where(m_body == m, found, NO_COLUMN)
            found = tl.minimum(found, tl.min(tl.where(edge.on & (edge.x == m), edge.cols, NO_COLUMN), axis=0))
    return Scanned(m, s, wz, u, q, total, found, n)


@triton.jit
def load_listed(row_ptr, c, there, n_classes, hidden, N, K: tl.constexpr):
    """`load_logits` of the columns c that are `there`, as one piece; NaN where c is no column."""
    inside = (c >= 0) & (c < n_classes)
    (z,) = load_logits(row_ptr, tl.where(inside, c, n_classes), n_classes, hidden, N, K, 1, 0)
    none = (tl.zeros([], K.state_dtype) + float("nan")).to(z.dtype)
    wrong = inside == 0
    if K.shard:
        wrong = c == -1
    return (tl.where(there & wrong, none, z),)


@triton.jit
def bits_of(M, at, end, cols, K: tl.constexpr):
    """Which columns before `end` a bitmask has, for all pieces from `at` on. The columns of a lane share one access."""
    WIDTH: tl.constexpr = K.lane_cols
    PIECES: tl.constexpr = K.pieces
    lane = tl.arange(0, K.block_cols // K.lane_cols)[:, None] * WIDTH
    on = ()
    for p in tl.static_range(PIECES):
        first = at + p * K.block_cols + lane
        here = (bits_on(M, first, end, K) >> tl.arange(0, WIDTH)[None, :]) & 1 == 1
        on = on + (here & (p * K.block_cols + cols < end - at),)  # noqa: RUF005
    return on


@triton.jit
def where_on(pieces, on, hidden, K: tl.constexpr):
    """The pieces, with columns that are not `on` as columns past a row's end are."""
    kept = ()
    for p in tl.static_range(len(pieces)):
        other = NEG_INF if K.capped else (tl.zeros([], K.state_dtype) + hidden).to(pieces[p].dtype)
        kept = kept + (tl.where(on[p], pieces[p], other),)  # noqa: RUF005
    return kept


@triton.jit
def count_of(on, K: tl.constexpr):
    """How many columns are `on`, over the last axis of all pieces."""
    n = on[0].to(K.state_dtype)
    for p in tl.static_range(1, len(on)):
        n += on[p].to(K.state_dtype)
    return tl.sum(n, axis=K.axis)


@triton.jit
def moments_of(pieces, cols, size, on, scale, base, N, K: tl.constexpr):
    """(sum exp(z - m) ** 2, sum z) over the last axis of all pieces.

    The second sum is over the columns that are `on` (K.picks), or over the first `size` columns.
    """
    squares = tl.zeros(pieces[0].shape, K.state_dtype)
    values = tl.zeros(pieces[0].shape, K.state_dtype)
    for p in tl.static_range(len(pieces)):
        z = scores_of(pieces[p], N.factor, K, K.unpack)
        e = exp_at(z, scale, base, K.ptx)
        squares += rounded_product(e, e)
        if K.picks:
            values += tl.where(on[p], z, 0.0)
        else:
            values += tl.where(p * K.block_cols + cols < size, z, 0.0)
    return tl.sum(squares, axis=K.axis), tl.sum(values, axis=K.axis)


@triton.jit
def store_scanned(states_ptr, found_ptr, row, part, n_rows, n_parts, S, K: tl.constexpr):
    """Store the Scanned of one part of a row, for `merge_scanned`."""
    states_ptr += row * n_parts + part
    step = n_rows.to(tl.int64) * n_parts
    tl.store(states_ptr, S.m)
    tl.store(states_ptr + step, S.s)
    tl.store(states_ptr + 2 * step, S.wz)
    if K.stats:
        tl.store(states_ptr + 3 * step, S.u)
    if K.moments:
        tl.store(states_ptr + 4 * step, S.q)
        tl.store(states_ptr + 5 * step, S.total)
        if K.masked:
            tl.store(states_ptr + 6 * step, S.n)
    if K.finds:
        tl.store(found_ptr + row * n_parts + part, S.found)


@triton.jit
def merge_scanned(states_ptr, found_ptr, row, n_rows, n_parts, K: tl.constexpr):
    """The Scanned of rows [K.block_rows], from those of all their parts."""
    j = tl.arange(0, K.lanes)[None, :]
    on = j < n_parts
    step = n_rows.to(tl.int64) * n_parts
    states_ptr += row[:, None] * n_parts + j
    m_parts = tl.load(states_ptr, mask=on, other=NEG_INF)
    m = tl.max(m_parts, axis=1)
    fade = weight_of(m_parts, m[:, None], K.ptx)
    s_parts = tl.load(states_ptr + step, mask=on, other=0.0)
    s = tl.sum(rounded_product(s_parts, fade), axis=1)
    wz = tl.sum(tl.load(states_ptr + 2 * step, mask=on, other=0.0), axis=1)
    u = tl.zeros(m.shape, K.state_dtype)
    q = tl.zeros(m.shape, K.state_dtype)
    total = tl.zeros(m.shape, K.state_dtype)
    found = tl.full(m.shape, NO_COLUMN, tl.int32)
    n = tl.zeros(m.shape, K.state_dtype)
    if K.stats:
        u_parts = tl.load(states_ptr + 3 * step, mask=on, other=0.0)
        u = tl.sum(faded_terms(u_parts, s_parts, m_parts, m[:, None], fade, K), axis=1)
    if K.moments:
        q_parts = tl.load(states_ptr + 4 * step, mask=on, other=0.0)
        q = tl.sum(rounded_product(rounded_product(q_parts, fade), fade), axis=1)
        total = tl.sum(tl.load(states_ptr + 5 * step, mask=on, other=0.0), axis=1)
        if K.masked:
            n = tl.sum(tl.load(states_ptr + 6 * step, mask=on, other=0.0), axis=1)
    if K.finds:
        found = tl.load(found_ptr + row[:, None] * n_parts + j, mask=on, other=NO_COLUMN)
        found = tl.min(tl.where(m_parts == m[:, None], found, NO_COLUMN), axis=1)
    return Scanned(m, s, wz, u, q, total, found, n)
