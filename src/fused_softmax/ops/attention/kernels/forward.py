"""attention's forward pass: a program has one tile of queries, and the keys go by in tiles.

    m' = max(m, max_j z_j);  p_j = exp(z_j - m');  s' = s exp(m - m') + sum_j p_j;  o' = o exp(m - m') + sum_j p_j v_j

and at the end output = o / s, lse = m + log s, in which a sink counts one score more (Dao et al., "FlashAttention",
arXiv 2205.14135; Milakov and Gimelshein, arXiv 1805.02867). m and s are fp32, p is rounded to the dtype of the values.
Traffic: query, output and lse once; key and value once for each tile of queries of their head, less what is hidden.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.state import LN2, LOG2E, NEG_INF
from fused_softmax.ops.attention.kernels.hidden import keys_to_visit, next_tile
from fused_softmax.ops.attention.kernels.scores import (
    dense_head,
    keys_seen,
    load_tile,
    origin_in_log2,
    place_of,
    scores_of,
    sink_as_origin,
    store_tile,
    unit_at,
    unit_of,
)
from fused_softmax.ops.attention.kernels.spec import Added, Sizes, Tile


@triton.jit(do_not_specialize=["n_inner", "n_heads", "group", "n_queries", "n_keys", "left", "right", "offset"])
def _attention(
    q_ptr, k_ptr, v_ptr, mask_ptr, bias_ptr, sinks_ptr, slopes_ptr, o_ptr, lse_ptr, entropy_ptr, row_max_ptr,
    q_strides, k_strides, v_strides, mask_strides, bias_strides, slopes_strides,
    n_inner, n_heads, group, n_queries, n_keys, left, right, offset, scale, cap, K: tl.constexpr,
):  # fmt: skip
    BLOCK_M: tl.constexpr = K.block_m
    BLOCK_V: tl.constexpr = K.block_v
    A = Added(mask_ptr, mask_strides, bias_ptr, bias_strides, slopes_ptr, slopes_strides, scale, cap)
    S = Sizes(n_queries, n_keys, left, right, offset)
    n_tiles = tl.cdiv(n_queries, BLOCK_M)
    program = tl.program_id(0)
    number, tile = program // n_tiles, program % n_tiles
    if K.right:  # the last tile sees most
        tile = n_tiles - 1 - tile
    place = place_of(number, n_inner, n_heads)
    first = tile * BLOCK_M
    q_head = dense_head(q_ptr, q_strides, place, place.head, K)
    k_head = dense_head(k_ptr, k_strides, place, place.head // group, K)
    v_head = dense_head(v_ptr, v_strides, place, place.head // group, K)
    q = load_tile(q_head, first, n_queries, BLOCK_M, K.head_dim, K.block_d)
    top = tl.full([BLOCK_M], NEG_INF, tl.float32)
    m = top
    s = tl.zeros([BLOCK_M], tl.float32)
    t = tl.zeros([BLOCK_M], tl.float32)
    o = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    begin, cut, end = keys_seen(first, S, K)
    rows = tl.arange(0, BLOCK_M)
    if K.cuts:
        top, m, s, t, o = visit(
            top, m, s, t, o, q, k_head, v_head, first, rows[:, None], begin, cut, A, place, S, K, False
        )
        begin = cut
    if K.edge or not K.cuts:
        top, m, s, t, o = visit(
            top, m, s, t, o, q, k_head, v_head, first, rows[:, None], begin, end, A, place, S, K, K.edge
        )
    at = number.to(tl.int64) * n_queries + first + rows
    valid = first + rows < n_queries
    if K.row_max:
        tl.store(row_max_ptr + at, origin_in_log2(m, unit_of(A, K)) * LN2, mask=valid)
    if K.sinks:
        m, s, t, o = with_sink(m, s, t, o, tl.load(sinks_ptr + place.head), unit_of(A, K), K)
    store_rows(m, s, o, o_ptr, lse_ptr, number.to(tl.int64), first, n_queries, unit_of(A, K), BLOCK_M, K)
    if K.entropy:
        entropy = tl.where(s == 0.0, 0.0, (tl.log2(s) - t / tl.where(s == 0.0, 1.0, s)) * LN2)
        tl.store(entropy_ptr + at, entropy, mask=valid)


@triton.jit
def visit(
    top, m, s, t, o, q, k_head, v_head, first, rows, begin, end, A, place, S, K: tl.constexpr, EDGE: tl.constexpr
):  # fmt: skip
    """The state after the keys from begin to end. EDGE: whether some of them may be hidden, or beyond the last.

    top: maxima of scores; m: the same in units of log 2, as `unit_at` turns them.

    rows: [BLOCK_M, 1], the tile's queries from `first` on.
    """
    BLOCK_N: tl.constexpr = K.block_n
    if not K.skips:
        for start in tl.range(begin, end, BLOCK_N):
            top, m, s, t, o = add_keys(top, m, s, t, o, q, k_head, v_head, first, rows, start, A, place, S, K, EDGE)
    else:
        word, run, n = keys_to_visit(first, begin, end, place, A, S, K)
        for i in tl.range(0, n):
            tile, word = next_tile(word, i, run)
            start = begin + tile * BLOCK_N
            top, m, s, t, o = add_keys(top, m, s, t, o, q, k_head, v_head, first, rows, start, A, place, S, K, EDGE)
    return top, m, s, t, o


@triton.jit
def add_keys(top, m, s, t, o, q, k_head, v_head, first, rows, start, A, place, S, K: tl.constexpr, EDGE: tl.constexpr):
    """The state after adding the tile of keys from `start` on."""
    BLOCK_N: tl.constexpr = K.block_n
    GUARD: tl.constexpr = EDGE and K.ragged
    k = load_tile(k_head, start, S.n_keys, BLOCK_N, K.head_dim, K.block_d, GUARD)
    T = Tile(first, rows, start, tl.arange(0, BLOCK_N)[None, :])
    z, _ = scores_of(q, k, T, A, place, S, K, EDGE, GUARD)
    top = tl.maximum(top, tl.max(z, axis=1))
    if K.in_log2:
        new = top
        base = tl.where(new == NEG_INF, 0.0, new)  # -inf - -inf is NaN
        z = z - base[:, None]
    else:
        unit = unit_at(top, unit_of(A, K))
        new = top * unit
        base = tl.where(new == NEG_INF, 0.0, new)
        z = z * unit[:, None] - base[:, None]
    p = tl.exp2(z)
    weight = tl.exp2(m - base)
    if K.entropy:
        t = weight * (t + weighed(s, m - base)) + tl.sum(weighed(p, z), axis=1)
    s = s * weight + tl.sum(p, axis=1)
    v = load_tile(v_head, start, S.n_keys, BLOCK_N, K.value_dim, K.block_v, GUARD)
    o = tl.dot(p.to(v.dtype), v, o * weight[:, None], input_precision="ieee")
    return top, new, s, t, o


@triton.jit
def weighed(p, z):
    """p z; 0 where p is 0, because z may be -inf there."""
    return tl.where(p == 0.0, 0.0, p * z)


@triton.jit
def with_sink(m, s, t, o, sink, unit, K: tl.constexpr):
    """The state with one more score. t is used with K.entropy alone."""
    sink = sink_as_origin(sink.to(tl.float32) * LOG2E, unit)
    top = tl.maximum(m, sink)
    base = tl.where(top == NEG_INF, 0.0, top)
    weight, beside = tl.exp2(m - base), tl.exp2(sink - base)
    if K.entropy:
        t = weight * (t + weighed(s, m - base)) + weighed(beside, sink - base)
    return top, s * weight + beside, t, o * weight[:, None]


@triton.jit
def store_rows(m, s, o, o_ptr, lse_ptr, number, first, n, unit, ROWS: tl.constexpr, K: tl.constexpr):
    """Store output and lse from a state: of rows from `first` on, of the n rows of a head."""
    total = tl.where(s == 0.0, 1.0, s)
    if K.exact:
        o = o / total[:, None]
    else:  # a division of each element takes three operations more
        o = o * (1.0 / total)[:, None]
    store_tile(o_ptr + number * n * K.value_dim, o, first, n, ROWS, K.value_dim, K.block_v)
    rows = first + tl.arange(0, ROWS)
    lse = tl.where(s == 0.0, NEG_INF, (origin_in_log2(m, unit) + tl.log2(s)) * LN2)
    tl.store(lse_ptr + number * n + rows, lse, mask=rows < n)
