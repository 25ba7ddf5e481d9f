"""attention of short lengths, and its gradients: all queries and keys of a head are one tile.

A program has one head of several batches and goes through them. So it reads a bias that all batches share once, and
fetches the next batch while it computes one. No row needs a running state, and delta is a sum over the tile:

    p = exp(z - lse);  dP = dO V^T;  delta = sum_j p dP - dlse;  dS = p (dP - delta);  dV = p^T dO;
    dQ = scale dS' K;  dK = scale dS'^T Q, with dS' as in gradient.py

The gradient of a shared bias is the sum of dS. It stays in registers until the end, and then each program writes its
part.
Traffic: forward query, key, value, output and lse once; backward query, key, value, dO, lse and the results once.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.state import LOG2E, NEG_INF
from fused_softmax.ops.attention.kernels.forward import store_rows, with_sink
from fused_softmax.ops.attention.kernels.gradient import before_cap
from fused_softmax.ops.attention.kernels.scores import (
    dense_head,
    load_added,
    load_tile,
    place_of,
    scores_of,
    store_tile,
    unit_at,
    unit_of,
)
from fused_softmax.ops.attention.kernels.spec import Added, Sizes, Tile

_BATCHES = tl.constexpr(32)  # batches whose lse are read together


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
        q_head = dense_head(q_ptr, q_strides, place, place.head, K)
        k_head = dense_head(k_ptr, k_strides, place, place.head // group, K)
        v_head = dense_head(v_ptr, v_strides, place, place.head // group, K)
        q = load_tile(q_head, 0, n_queries, BLOCK_M, K.head_dim, K.block_d)
        k = load_tile(k_head, 0, n_keys, BLOCK_N, K.head_dim, K.block_d, K.ragged)
        v = load_tile(v_head, 0, n_keys, BLOCK_N, K.value_dim, K.block_v, K.ragged)
        z, _ = scores_of(q, k, T, A, place, S, K, K.edge, K.ragged)
        z, unit = with_held(z, unit_of(A, K), held, K)
        p, m, s = weights_of(z, unit)
        o = tl.dot(p.to(v.dtype), v, input_precision="ieee")
        if K.sinks:
            m, s, _, o = with_sink(m, s, s, o, tl.load(sinks_ptr + place.head), unit, K)
        store_rows(m, s, o, o_ptr, lse_ptr, number.to(tl.int64), 0, n_queries, unit, BLOCK_M, K)


@triton.jit
def held_bias(head, n_inner, n_heads, A, T, S, K: tl.constexpr):
    """The bias of a head that all batches share, in units of log 2; 0 where there is none."""
    if K.held:
        place = place_of(head, n_inner, n_heads)
        return load_added(A.bias_ptr, A.bias_strides, place, T, S, K.bias_rows, K.ragged).to(tl.float32) * LOG2E
    else:
        return 0.0


@triton.jit
def with_held(z, unit, held, K: tl.constexpr):
    """(scores with the bias that batches share, the factor that turns them into units of log 2).

    A hidden score stays -inf, whatever its bias is.
    """
    if K.held and (K.left or K.right or K.mask):
        return tl.where(z == NEG_INF, z, z * unit + held), tl.full([], 1.0, tl.float32)
    elif K.held:
        return z * unit + held, tl.full([], 1.0, tl.float32)
    else:
        return z, unit


@triton.jit
def weights_of(z, unit):
    """(exp(z - m), m, their sum) of rows that are in the tile as a whole. m is scaled by `unit_at`."""
    top = tl.max(z, axis=1)
    rate = unit_at(top, unit)
    m = top * rate
    p = tl.exp2(z * rate[:, None] - tl.where(m == NEG_INF, 0.0, m)[:, None])
    return p, m, tl.sum(p, axis=1)


@triton.jit
def less_lse(z, unit):
    """Scores less lse of their rows in the same units. The maximum is not rounded."""
    top = tl.max(z, axis=1)
    z = z - tl.where(top == NEG_INF, 0.0, top)[:, None]
    s = tl.sum(tl.exp2(z * unit), axis=1)
    return z - tl.where(s == 0.0, 0.0, tl.log2(s) / unit)[:, None]


@triton.jit
def some_is_coarse(lse_ptr, head, part, steps, n_batches, n_heads, n_queries, K: tl.constexpr):
    """Whether some lse of a program's batches has too few digits for weights."""
    BLOCK_M: tl.constexpr = K.block_m
    begin, end = part * steps, tl.minimum((part + 1) * steps, n_batches)
    greatest = tl.zeros([_BATCHES, BLOCK_M], tl.float32)
    rows = tl.arange(0, BLOCK_M)[None, :]
    for first in tl.range(begin, end, _BATCHES):
        batches = (first + tl.arange(0, _BATCHES))[:, None]
        at = lse_ptr + ((batches * n_heads + head).to(tl.int64) * n_queries + rows)
        lse = tl.load(at, mask=(batches < end) & (rows < n_queries), other=NEG_INF)
        greatest = tl.maximum(greatest, tl.where(lse == NEG_INF, 0.0, tl.abs(lse)))
    return tl.max(tl.max(greatest, axis=1), axis=0) * LOG2E > K.most_lse


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
    if some_is_coarse(lse_ptr, head, part, steps, n_batches, n_heads, n_queries, K):
        total = gradients_of_batches(
            q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, dlse_ptr, dq_ptr, dk_ptr, dv_ptr, q_strides, k_strides,
            v_strides, do_strides, held, head, part, n_inner, n_heads, n_queries, n_keys, n_batches, steps, scale,
            A, T, S, K, True,
        )  # fmt: skip
    else:
        total = gradients_of_batches(
            q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, dlse_ptr, dq_ptr, dk_ptr, dv_ptr, q_strides, k_strides,
            v_strides, do_strides, held, head, part, n_inner, n_heads, n_queries, n_keys, n_batches, steps, scale,
            A, T, S, K, False,
        )  # fmt: skip
    if K.stores_ds:
        dbias_ptr += tl.program_id(0).to(tl.int64) * n_queries * n_keys
        inside = (T.rows < n_queries) & (T.cols < n_keys)
        tl.store(dbias_ptr + (T.rows * n_keys + T.cols), total, mask=inside)


@triton.jit
def gradients_of_batches(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, dlse_ptr, dq_ptr, dk_ptr, dv_ptr, q_strides, k_strides,
    v_strides, do_strides, held, head, part, n_inner, n_heads, n_queries, n_keys, n_batches, steps, scale,
    A, T, S, K: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The sum of dS over a program's batches, whose dQ, dK and dV are stored. EXACT: whether some lse is too coarse."""
    BLOCK_M: tl.constexpr = K.block_m
    BLOCK_N: tl.constexpr = K.block_n
    rows = tl.arange(0, BLOCK_M)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for batch in tl.range(part * steps, tl.minimum((part + 1) * steps, n_batches)):
        number = batch * n_heads + head
        place = place_of(number, n_inner, n_heads)
        q_head = dense_head(q_ptr, q_strides, place, place.head, K)
        k_head = dense_head(k_ptr, k_strides, place, place.head, K)
        v_head = dense_head(v_ptr, v_strides, place, place.head, K)
        do_head = dense_head(do_ptr, do_strides, place, place.head, K)
        q = load_tile(q_head, 0, n_queries, BLOCK_M, K.head_dim, K.block_d)
        k = load_tile(k_head, 0, n_keys, BLOCK_N, K.head_dim, K.block_d, K.ragged)
        v = load_tile(v_head, 0, n_keys, BLOCK_N, K.value_dim, K.block_v, K.ragged)
        do = load_tile(do_head, 0, n_queries, BLOCK_M, K.value_dim, K.block_v)
        number = number.to(tl.int64)
        at = number * n_queries + rows
        lse = tl.load(lse_ptr + at, mask=rows < n_queries, other=NEG_INF)
        z, c = scores_of(q, k, T, A, place, S, K, K.edge, K.ragged)
        nothing = lse == NEG_INF
        z, unit = with_held(z, unit_of(A, K), held, K)
        if EXACT:
            z = less_lse(z, unit)
            lse = tl.zeros_like(lse)
        p = tl.exp2(z * unit - tl.where(nothing, float("inf"), lse * LOG2E)[:, None])
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
    return total
