"""How much each key is looked at: the sums of attention's weights over the queries of a head.

sums_j = sum_i exp(scores_ij - lse_i), where lse is as `_delta` records it: weights are in no memory. A program has a
tile of keys.
Traffic: key and sums once, query and its record once for each tile of keys that they see.
"""

import triton
import triton.language as tl

from fused_softmax.ops.attention.kernels.hidden import next_tile, queries_to_visit
from fused_softmax.ops.attention.kernels.scores import (
    dense_head,
    less_maximum,
    load_tile,
    place_of,
    queries_that_see,
    record_at,
    scores_of,
    state_of,
    unit_of,
)
from fused_softmax.ops.attention.kernels.spec import Added, Sizes, Tile


@triton.jit(do_not_specialize=["n_inner", "n_heads", "group", "n_queries", "n_keys", "left", "right", "offset"])
def _column_sums(
    q_ptr, k_ptr, mask_ptr, bias_ptr, slopes_ptr, record_ptr, sums_ptr,
    q_strides, k_strides, mask_strides, bias_strides, slopes_strides,
    n_inner, n_heads, group, n_queries, n_keys, left, right, offset, scale, cap, K: tl.constexpr,
):  # fmt: skip
    """sum_i p_ij of a tile of keys, for one head of query. record: what `_delta` stores."""
    BLOCK_M: tl.constexpr = K.block_m
    BLOCK_N: tl.constexpr = K.block_n
    A = Added(mask_ptr, mask_strides, bias_ptr, bias_strides, slopes_ptr, slopes_strides, scale, cap)
    S = Sizes(n_queries, n_keys, left, right, offset)
    n_tiles = tl.cdiv(n_keys, BLOCK_N)
    program = tl.program_id(0)
    number, first = program // n_tiles, program % n_tiles * BLOCK_N
    place = place_of(number, n_inner, n_heads)
    q_head = dense_head(q_ptr, q_strides, place, place.head, K)
    k_head = dense_head(k_ptr, k_strides, place, place.head // group, K)
    k = load_tile(k_head, first, n_keys, BLOCK_N, K.head_dim, K.block_d)
    record = record_at(record_ptr, number, n_queries)
    sums = tl.zeros([BLOCK_N], tl.float32)
    begin, end = queries_that_see(first, S, K)
    if K.skips:
        word, run, n = queries_to_visit(begin, end, first, place, A, S, K)
        for i in tl.range(0, n):
            tile, word = next_tile(word, i, run)
            sums += sums_of(k, q_head, record, first, begin + tile * BLOCK_M, A, place, S, K)
    else:
        for start in tl.range(begin, end, BLOCK_M):
            sums += sums_of(k, q_head, record, first, start, A, place, S, K)
    cols = first + tl.arange(0, BLOCK_N)
    tl.store(sums_ptr + number.to(tl.int64) * n_keys + cols, sums, mask=cols < n_keys)


@triton.jit
def sums_of(k, q_head, record, first, start, A, place, S, K: tl.constexpr):
    """The sums that the tile of queries from `start` on adds."""
    BLOCK_M: tl.constexpr = K.block_m
    BLOCK_N: tl.constexpr = K.block_n
    q = load_tile(q_head, start, S.n_queries, BLOCK_M, K.head_dim, K.block_d)
    m, log_sum, _ = state_of(record, start, S.n_queries, BLOCK_M)
    T = Tile(start, tl.arange(0, BLOCK_M)[None, :], first, tl.arange(0, BLOCK_N)[:, None])
    z, _ = scores_of(k, q, T, A, place, S, K, True, K.ragged)
    p = tl.exp2(less_maximum(z, m[None, :]) * unit_of(A, K) - log_sum[None, :])
    return tl.sum(p, axis=1)
