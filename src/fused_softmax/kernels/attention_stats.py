"""How much each key is looked at: the sums of attention's weights over the queries of a head.

sums_j = sum_i exp(scores_ij - lse_i), from lse: weights are in no memory. A program has a tile of keys.
Traffic: key and sums once, query and lse once for each tile of keys that they see.
"""

import triton
import triton.language as tl

from fused_softmax.kernels.attention_grad import state_of
from fused_softmax.kernels.attention_hidden import next_tile, queries_to_visit
from fused_softmax.kernels.attention_scores import head_at, in_log2, load_tile, place_of, queries_that_see, scores_of
from fused_softmax.kernels.attention_spec import Added, Head, OfRows, Sizes, Tile


@triton.jit(do_not_specialize=["n_inner", "n_heads", "group", "n_queries", "n_keys", "left", "right", "offset"])
def _column_sums(
    q_ptr, k_ptr, mask_ptr, bias_ptr, slopes_ptr, lse_ptr, sums_ptr,
    q_strides, k_strides, mask_strides, bias_strides, slopes_strides,
    n_inner, n_heads, group, n_queries, n_keys, left, right, offset, scale, cap, K: tl.constexpr,
):  # fmt: skip
    """sum_i p_ij of a tile of keys, for one head of query."""
    BLOCK_M: tl.constexpr = K.block_m
    BLOCK_N: tl.constexpr = K.block_n
    A = Added(mask_ptr, mask_strides, bias_ptr, bias_strides, slopes_ptr, slopes_strides, scale, cap)
    S = Sizes(n_queries, n_keys, left, right, offset)
    n_tiles = tl.cdiv(n_keys, BLOCK_N)
    program = tl.program_id(0)
    number, first = program // n_tiles, program % n_tiles * BLOCK_N
    place = place_of(number, n_inner, n_heads)
    q_head = Head(head_at(q_ptr, q_strides, place, place.head), q_strides[3])
    k_head = Head(head_at(k_ptr, k_strides, place, place.head // group), k_strides[3])
    k = load_tile(k_head, first, n_keys, BLOCK_N, K.head_dim, K.block_d)
    rows_of = OfRows(lse_ptr, lse_ptr, number.to(tl.int64) * n_queries)
    sums = tl.zeros([BLOCK_N], tl.float32)
    begin, end = queries_that_see(first, S, K)
    if K.skips:
        word, run, n = queries_to_visit(begin, end, first, place, A, S, K)
        for i in tl.range(0, n):
            tile, word = next_tile(word, i, run)
            sums += sums_of(k, q_head, rows_of, first, begin + tile * BLOCK_M, A, place, S, K)
    else:
        for start in tl.range(begin, end, BLOCK_M):
            sums += sums_of(k, q_head, rows_of, first, start, A, place, S, K)
    cols = first + tl.arange(0, BLOCK_N)
    tl.store(sums_ptr + number.to(tl.int64) * n_keys + cols, sums, mask=cols < n_keys)


@triton.jit
def sums_of(k, q_head, rows_of, first, start, A, place, S, K: tl.constexpr):
    """What the tile of queries from `start` on adds."""
    BLOCK_M: tl.constexpr = K.block_m
    BLOCK_N: tl.constexpr = K.block_n
    q = load_tile(q_head, start, S.n_queries, BLOCK_M, K.head_dim, K.block_d)
    lse, _ = state_of(rows_of, start, S.n_queries, BLOCK_M)
    T = Tile(start, tl.arange(0, BLOCK_M)[None, :], first, tl.arange(0, BLOCK_N)[:, None])
    z, _ = scores_of(k, q, T, A, place, S, K, True, K.ragged)
    return tl.sum(tl.exp2(in_log2(z, A, K) - lse[None, :]), axis=1)
