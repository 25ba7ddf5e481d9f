"""attention of few queries over many keys: the keys of a head are cut into parts, one for each program.

The rows of a tile are all rows that share the keys: the queries of the heads of a group. Each program stores (m, s, o)
of its part. The one that ends last merges them in the order of the parts, so that a result has the same bits every
time:

    m = max_p m_p;  s = sum_p s_p exp(m_p - m);  o = sum_p o_p exp(m_p - m);  output = o / s

A ticket tells which program ends last. It is 0 again at the end of the launch (Dao et al., "Flash-Decoding", 2023).
Traffic: key and value once; the states of the parts are written and read once, in fp32.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.state import NEG_INF
from fused_softmax.ops.attention.kernels.forward import store_rows, visit, with_sink
from fused_softmax.ops.attention.kernels.scores import dense_head, head_at, keys_seen, place_of, unit_of
from fused_softmax.ops.attention.kernels.spec import Added, Place, Sizes


@triton.jit(
    do_not_specialize=["n_inner", "n_heads", "group", "n_queries", "n_keys", "left", "right", "offset", "n_parts"]
)
def _decode(
    q_ptr, k_ptr, v_ptr, mask_ptr, bias_ptr, sinks_ptr, slopes_ptr, o_ptr, lse_ptr, parts_ptr, tickets_ptr,
    q_strides, k_strides, v_strides, mask_strides, bias_strides, slopes_strides,
    n_inner, n_heads, group, n_queries, n_keys, left, right, offset, scale, cap, n_parts, K: tl.constexpr,
):  # fmt: skip
    BLOCK_M: tl.constexpr = K.block_m
    BLOCK_R: tl.constexpr = K.block_r
    BLOCK_V: tl.constexpr = K.block_v
    A = Added(mask_ptr, mask_strides, bias_ptr, bias_strides, slopes_ptr, slopes_strides, scale, cap)
    S = Sizes(n_queries, n_keys, left, right, offset)
    program = tl.program_id(0)
    number, part = program // n_parts, program % n_parts
    n_rows = group * n_queries
    place = place_of(number, n_inner, n_heads // group)
    heads, queries = rows_of(place, group, n_queries, BLOCK_M)
    q_rows = head_at(q_ptr, q_strides, place, heads) + queries.to(tl.int64) * q_strides[3]
    dims = tl.arange(0, K.block_d)
    q = tl.load(q_rows[:, None] + dims[None, :], mask=(dims < K.head_dim)[None, :], other=0.0)
    k_head = dense_head(k_ptr, k_strides, place, place.head, K)
    v_head = dense_head(v_ptr, v_strides, place, place.head, K)
    top = tl.full([BLOCK_M], NEG_INF, tl.float32)
    m = top
    s = tl.zeros([BLOCK_M], tl.float32)
    o = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    begin, _, end = keys_seen(0, S, K)
    span = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), K.block_n), n_parts) * K.block_n
    begin += part * span
    end = tl.minimum(begin + span, end)
    of_query = Place(place.outer, place.inner, heads[:, None])
    top, m, s, _, o = visit(
        top, m, s, s, o, q, k_head, v_head, 0, queries[:, None], begin, end, A, of_query, S, K, K.edge
    )
    if K.lanes == 1:
        store_merged(m, s, o, sinks_ptr, o_ptr, lse_ptr, number, place, group, n_queries, unit_of(A, K), BLOCK_M, K)
    else:
        store_part(parts_ptr, program, m, s, o, n_rows, K)
        tl.debug_barrier()  # the thread that draws the ticket releases what all threads have stored
        if tl.atomic_add(tickets_ptr + number, 1, sem="acq_rel") == n_parts - 1:
            tl.atomic_xchg(tickets_ptr + number, 0, sem="relaxed")
            all_m, all_s, all_o = merged_parts(parts_ptr, number.to(tl.int64) * n_parts, n_parts, K)
            unit = unit_of(A, K)
            store_merged(
                all_m, all_s, all_o, sinks_ptr, o_ptr, lse_ptr, number, place, group, n_queries, unit, BLOCK_R, K
            )


@triton.jit
def rows_of(place, group, n_queries, ROWS: tl.constexpr):
    """(heads, queries) of the rows that share a head of keys. Rows beyond the last repeat it."""
    rows = tl.minimum(tl.arange(0, ROWS), group * n_queries - 1)
    return place.head * group + rows // n_queries, rows % n_queries


@triton.jit
def store_part(parts_ptr, program, m, s, o, n_rows, K: tl.constexpr):
    """Store a part: all o [programs, BLOCK_R, BLOCK_V] come first, then all m, then all s."""
    BLOCK_R: tl.constexpr = K.block_r
    BLOCK_V: tl.constexpr = K.block_v
    rows, dims = tl.arange(0, K.block_m), tl.arange(0, BLOCK_V)
    first = program.to(tl.int64) * BLOCK_R
    valid = rows < n_rows
    tl.store(parts_ptr + first * BLOCK_V + (rows[:, None] * BLOCK_V + dims[None, :]), o, mask=valid[:, None])
    n = tl.num_programs(0).to(tl.int64) * BLOCK_R
    states_ptr = parts_ptr + n * BLOCK_V + first
    tl.store(states_ptr + rows, m, mask=valid)
    tl.store(states_ptr + n + rows, s, mask=valid)


@triton.jit
def merged_parts(parts_ptr, first, n_parts, K: tl.constexpr):
    """(m, s, o) of n_parts parts from `first` on, [BLOCK_R] and [BLOCK_R, BLOCK_V], read from L2."""
    LANES: tl.constexpr = K.lanes
    CHUNK: tl.constexpr = K.chunk
    BLOCK_R: tl.constexpr = K.block_r
    BLOCK_V: tl.constexpr = K.block_v
    n = tl.num_programs(0).to(tl.int64) * BLOCK_R
    states_ptr = parts_ptr + n * BLOCK_V + first * BLOCK_R
    parts_ptr += first * BLOCK_R * BLOCK_V
    part, row = tl.arange(0, LANES)[:, None], tl.arange(0, BLOCK_R)[None, :]
    at, there = states_ptr + (part * BLOCK_R + row), part < n_parts
    m_parts = tl.load(at, mask=there, other=NEG_INF, cache_modifier=".cg")
    s_parts = tl.load(at + n, mask=there, other=0.0, cache_modifier=".cg")
    m = tl.max(m_parts, axis=0)
    base = tl.where(m == NEG_INF, 0.0, m)[None, :]
    s = tl.sum(s_parts * tl.exp2(m_parts - base), axis=0)
    o = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    dims = tl.arange(0, BLOCK_V)[None, None, :]
    for start in tl.static_range(0, LANES, CHUNK):
        part = start + tl.arange(0, CHUNK)[:, None]
        there = part < n_parts
        at = states_ptr + (part * BLOCK_R + row)
        weight = tl.exp2(tl.load(at, mask=there, other=NEG_INF, cache_modifier=".cg") - base)
        at = parts_ptr + ((part * BLOCK_R + row)[:, :, None] * BLOCK_V + dims)
        o_parts = tl.load(at, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
        o += tl.sum(o_parts * weight[:, :, None], axis=0)
    return m, s, o


@triton.jit
def store_merged(
    m, s, o, sinks_ptr, o_ptr, lse_ptr, number, place, group, n_queries, unit, ROWS: tl.constexpr, K: tl.constexpr
):
    """Store output and lse of all rows that share a head of keys."""
    if K.sinks:
        heads, _ = rows_of(place, group, n_queries, ROWS)
        m, s, _, o = with_sink(m, s, s, o, tl.load(sinks_ptr + heads), unit, K)
    store_rows(m, s, o, o_ptr, lse_ptr, number.to(tl.int64), 0, group * n_queries, unit, ROWS, K)
