"""attention of short lengths, and its gradients: all queries and keys of a head are one tile.

A program has one head of several batches and goes through them, so that a bias that all batches share is read once, and
the next batch is fetched while one is computed. No row needs a running state, and delta is a sum over the tile:

    p = exp(z - lse);  dP = dO V^T;  delta = sum_j p dP - dlse;  dS = p (dP - delta);  dV = p^T dO;
    dQ = scale dS' K;  dK = scale dS'^T Q, with dS' as in attention_grad.py

A shared bias's gradient, the sum of dS, stays in registers until the end; each program writes its part.
Traffic: forward query, key, value, output and lse once; backward query, key, value, dO, lse and the results once.
"""

import triton
import triton.language as tl

from fused_softmax.kernels.attention import store_rows, with_sink
from fused_softmax.kernels.attention_grad import before_cap
from fused_softmax.kernels.attention_scores import (
    head_at,
    in_log2,
    load_added,
    load_tile,
    place_of,
    scores_of,
    store_tile,
)
from fused_softmax.kernels.attention_spec import Added, Head, Sizes, Tile
from fused_softmax.kernels.state import LOG2E, NEG_INF


@triton.jit(
    do_not_specialize=[
        "n_inner", "n_heads", "group", "n_queries", "n_keys", "left", "right", "offset", "n_batches", "steps",
    ]
)  # fmt: skip
def _short(
    q_ptr, k_ptr, v_ptr, mask_ptr, bias_ptr, sinks_ptr, slopes_ptr, o_ptr, lse_ptr,
    q_strides, k_strides, v_strides, mask_strides, bias_strides, slopes_strides,
    n_inner, n_heads, group, n_queries, n_keys, left, right, offset, scale, cap, n_batches, steps, K: tl.constexpr,
):  # fmt: skip
    BLOCK_M: tl.constexpr = K.block_m
    BLOCK_N: tl.constexpr = K.block_n
    A = Added(mask_ptr, mask_strides, bias_ptr, bias_strides, slopes_ptr, slopes_strides, scale, cap)
    S = Sizes(n_queries, n_keys, left, right, offset)
    T = Tile(0, tl.arange(0, BLOCK_M)[:, None], 0, tl.arange(0, BLOCK_N)[None, :])
    head, part = tl.program_id(0) % n_heads, tl.program_id(0) // n_heads
    held = held_bias(head, n_inner, n_heads, A, T, S, K)
    for batch in tl.range(part * steps, tl.minimum((part + 1) * steps, n_batches)):
        number = batch * n_heads + head
        place = place_of(number, n_inner, n_heads)
        q_head = Head(head_at(q_ptr, q_strides, place, place.head), q_strides[3])
        k_head = Head(head_at(k_ptr, k_strides, place, place.head // group), k_strides[3])
        v_head = Head(head_at(v_ptr, v_strides, place, place.head // group), v_strides[3])
        q = load_tile(q_head, 0, n_queries, BLOCK_M, K.head_dim, K.block_d)
        k = load_tile(k_head, 0, n_keys, BLOCK_N, K.head_dim, K.block_d, K.ragged)
        v = load_tile(v_head, 0, n_keys, BLOCK_N, K.value_dim, K.block_v, K.ragged)
        z, _ = scores_of(q, k, T, A, place, S, K, K.edge, K.ragged)
        z = with_held(in_log2(z, A, K), held, K)
        m = tl.max(z, axis=1)
        p = tl.exp2(z - tl.where(m == NEG_INF, 0.0, m)[:, None])
        s = tl.sum(p, axis=1)
        o = tl.dot(p.to(v.dtype), v, input_precision="ieee")
        if K.sinks:
            m, s, _, o = with_sink(m, s, s, o, tl.load(sinks_ptr + place.head), K)
        store_rows(m, s, o, o_ptr, lse_ptr, number.to(tl.int64), 0, n_queries, BLOCK_M, K)


@triton.jit
def held_bias(head, n_inner, n_heads, A, T, S, K: tl.constexpr):
    """The bias of a head that all batches share, in units of log 2; 0 where there is none."""
    if K.held:
        place = place_of(head, n_inner, n_heads)
        return load_added(A.bias_ptr, A.bias_strides, place, T, S, K.bias_rows, K.ragged).to(tl.float32) * LOG2E
    else:
        return 0.0


@triton.jit
def with_held(z, held, K: tl.constexpr):
    """Scores with the bias that batches share; a hidden one stays -inf, whatever its bias is."""
    if K.held and (K.left or K.right or K.mask):
        return tl.where(z == NEG_INF, z, z + held)
    else:
        return z + held


@triton.jit(
    do_not_specialize=["n_inner", "n_heads", "group", "n_queries", "n_keys", "left", "right", "offset", "n_batches",
                       "steps"]
)  # fmt: skip
def _short_gradient(
    q_ptr, k_ptr, v_ptr, mask_ptr, bias_ptr, slopes_ptr, do_ptr, lse_ptr, dlse_ptr, dq_ptr, dk_ptr, dv_ptr, dbias_ptr,
    q_strides, k_strides, v_strides, mask_strides, bias_strides, slopes_strides, do_strides,
    n_inner, n_heads, group, n_queries, n_keys, left, right, offset, scale, cap, n_batches, steps, K: tl.constexpr,
):  # fmt: skip
    """dQ, dK and dV, of heads that share no keys, and if K.stores_ds a part of [parts, heads, queries, keys] of dS."""
    BLOCK_M: tl.constexpr = K.block_m
    BLOCK_N: tl.constexpr = K.block_n
    A = Added(mask_ptr, mask_strides, bias_ptr, bias_strides, slopes_ptr, slopes_strides, scale, cap)
    S = Sizes(n_queries, n_keys, left, right, offset)
    rows = tl.arange(0, BLOCK_M)
    T = Tile(0, rows[:, None], 0, tl.arange(0, BLOCK_N)[None, :])
    head, part = tl.program_id(0) % n_heads, tl.program_id(0) // n_heads
    held = held_bias(head, n_inner, n_heads, A, T, S, K)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for batch in tl.range(part * steps, tl.minimum((part + 1) * steps, n_batches)):
        number = batch * n_heads + head
        place = place_of(number, n_inner, n_heads)
        q_head = Head(head_at(q_ptr, q_strides, place, place.head), q_strides[3])
        k_head = Head(head_at(k_ptr, k_strides, place, place.head), k_strides[3])
        v_head = Head(head_at(v_ptr, v_strides, place, place.head), v_strides[3])
        do_head = Head(head_at(do_ptr, do_strides, place, place.head), do_strides[3])
        q = load_tile(q_head, 0, n_queries, BLOCK_M, K.head_dim, K.block_d)
        k = load_tile(k_head, 0, n_keys, BLOCK_N, K.head_dim, K.block_d, K.ragged)
        v = load_tile(v_head, 0, n_keys, BLOCK_N, K.value_dim, K.block_v, K.ragged)
        do = load_tile(do_head, 0, n_queries, BLOCK_M, K.value_dim, K.block_v)
        number = number.to(tl.int64)
        at = number * n_queries + rows
        lse = tl.load(lse_ptr + at, mask=rows < n_queries, other=NEG_INF)
        z, c = scores_of(q, k, T, A, place, S, K, K.edge, K.ragged)
        nothing = lse == NEG_INF
        z = with_held(in_log2(z, A, K), held, K)
        p = tl.exp2(z - tl.where(nothing, float("inf"), lse * LOG2E)[:, None])
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        delta = tl.sum(p * dp, axis=1)
        if dlse_ptr is not None:
            dlse = tl.load(dlse_ptr + at, mask=rows < n_queries, other=0.0)
            delta -= tl.where(nothing, 0.0, dlse)
        ds = p * (dp - delta[:, None])
        if K.stores_ds:
            total += ds
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, input_precision="ieee")
        ds = before_cap(ds, c, A, K).to(q.dtype)
        dq = tl.dot(ds, k, input_precision="ieee") * scale
        dk = tl.dot(tl.trans(ds), q, input_precision="ieee") * scale
        row = number * n_keys
        store_tile(dq_ptr + number * n_queries * K.head_dim, dq, 0, n_queries, BLOCK_M, K.head_dim, K.block_d)
        store_tile(dk_ptr + row * K.head_dim, dk, 0, n_keys, BLOCK_N, K.head_dim, K.block_d)
        store_tile(dv_ptr + row * K.value_dim, dv, 0, n_keys, BLOCK_N, K.value_dim, K.block_v)
    if K.stores_ds:
        dbias_ptr += tl.program_id(0).to(tl.int64) * n_queries * n_keys
        inside = (T.rows < n_queries) & (T.cols < n_keys)
        tl.store(dbias_ptr + (T.rows * n_keys + T.cols), total, mask=inside)
