"""attention's gradients, deterministic: no program adds to what another one writes.

p = exp(z - lse);  dP = dO V^T;  dS = p (dP - delta),  delta = sum_d dO O - dlse;  dV = p^T dO;
dQ = scale dS' K,  dK = scale dS'^T Q,  dS' = dS (1 - (c / cap) ** 2) of capped scores c, and dS without a softcap;
dsink = -sum_i exp(sink - lse_i) delta_i.  dS is the gradient of a bias, summed over what the bias is broadcast over.
Weights are computed again from lse. dK and dV go by tiles of keys over all heads that share them, dQ by tiles of
queries: seven products in place of five, and nothing is added up in memory.
An lse of thousands has lost the digits of log s. `_delta` finds such rows, and computes their maximum and log s again,
apart from each other: p = exp(z - m - log s), where z - m loses nothing.
Traffic: query, key, value, dO once a tile of the other length; delta, lse once a tile of keys; each result once.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.state import LOG2E, NEG_INF
from fused_softmax.ops.attention.kernels.hidden import (
    BITS,
    bits_of,
    keys_to_visit,
    next_tile,
    queries_to_visit,
    tiles_seen,
)
from fused_softmax.ops.attention.kernels.scores import (
    dense_head,
    keys_seen,
    less_maximum,
    load_tile,
    place_of,
    queries_that_see,
    record_at,
    scores_of,
    state_of,
    store_tile,
    unit_of,
)
from fused_softmax.ops.attention.kernels.spec import GRANULE, Added, Head, Read, Sizes, Tile

_GRANULE = tl.constexpr(GRANULE)


@triton.jit(
    do_not_specialize=[
        "n_inner", "n_heads", "group", "n_queries", "n_keys", "left", "right", "offset", "n_padded",
    ]
)  # fmt: skip
def _delta(
    q_ptr, k_ptr, mask_ptr, bias_ptr, sinks_ptr, slopes_ptr, o_ptr, do_ptr, lse_ptr, dlse_ptr, record_ptr, coarse_ptr,
    rows_ptr,
    q_strides, k_strides, mask_strides, bias_strides, slopes_strides, do_strides,
    n_inner, n_heads, group, n_queries, n_keys, left, right, offset, scale, cap, n_padded, K: tl.constexpr,
):  # fmt: skip
    """What the gradients have to know of GRANULE queries.

    record: of each head, delta, m and log2 of the sum, as `state_of` takes them. m is 0 and the log is lse, unless lse
    is too coarse for one of these queries. delta is 0 for a query that sees nothing, and is not stored without o.
    coarse: becomes 1 if some lse is too coarse. The kernel of dQ sets it back to 0.
    rows: [heads, 2, n_padded], if given: lse in units of log 2, and delta. lse is inf for a query that sees nothing,
    and -0 where it is too coarse, so that the record is used.
    """
    n_tiles = tl.cdiv(n_queries, _GRANULE)
    program = tl.program_id(0)
    number, first = program // n_tiles, program % n_tiles * _GRANULE
    place = place_of(number, n_inner, n_heads)
    rows = tl.arange(0, _GRANULE)
    at, valid = number.to(tl.int64) * n_queries + first + rows, first + rows < n_queries
    record = record_at(record_ptr, number, n_queries) + first + rows
    if o_ptr is not None:
        o_head = Head(o_ptr + number.to(tl.int64) * n_queries * K.value_dim, K.value_dim)
        o = load_tile(o_head, first, n_queries, _GRANULE, K.value_dim, K.block_v)
        do_head = dense_head(do_ptr, do_strides, place, place.head, K)
        do = load_tile(do_head, first, n_queries, _GRANULE, K.value_dim, K.block_v)
        delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1)
        if dlse_ptr is not None:
            delta -= tl.load(dlse_ptr + at, mask=valid, other=0.0)
    lse = tl.load(lse_ptr + at, mask=valid, other=NEG_INF)
    nothing = lse == NEG_INF
    log_sum = tl.where(nothing, float("inf"), lse * LOG2E + 0.0)  # no -0
    coarse = tl.max(tl.where(nothing, 0.0, tl.abs(lse)), axis=0) * LOG2E > K.most_lse
    if o_ptr is not None:
        delta = tl.where(nothing, 0.0, delta)
        tl.store(record, delta, mask=valid)
        if rows_ptr is not None:
            rows_ptr += number.to(tl.int64) * 2 * n_padded + first + rows
            inside = first + rows < n_padded
            mark = tl.full([_GRANULE], -(2**31), tl.int32).to(tl.float32, bitcast=True)  # a literal would lose its sign
            tl.store(rows_ptr, tl.where(nothing, log_sum, tl.where(coarse, mark, log_sum)), mask=inside)
            tl.store(rows_ptr + n_padded, delta, mask=inside)
    m = tl.zeros([_GRANULE], tl.float32)
    if coarse:
        A = Added(mask_ptr, mask_strides, bias_ptr, bias_strides, slopes_ptr, slopes_strides, scale, cap)
        S = Sizes(n_queries, n_keys, left, right, offset)
        q_head = dense_head(q_ptr, q_strides, place, place.head, K)
        k_head = dense_head(k_ptr, k_strides, place, place.head // group, K)
        m, log_sum = maximum_and_log_sum(q_head, k_head, sinks_ptr, first, place, A, S, K)
        if coarse_ptr is not None:
            tl.store(coarse_ptr, 1)
    tl.store(record + n_queries, m, mask=valid)
    tl.store(record + 2 * n_queries, log_sum, mask=valid)


@triton.jit
def maximum_and_log_sum(q_head, k_head, sinks_ptr, first, place, A, S, K: tl.constexpr):
    """The maximum of each query's scores, as `scores_of` gives them, and log2 of its sum.

    They are 0 and inf for a query that sees nothing.
    """
    BLOCK_N: tl.constexpr = K.block_n
    unit = unit_of(A, K)
    q = load_tile(q_head, first, S.n_queries, _GRANULE, K.head_dim, K.block_d)
    m = tl.full([_GRANULE], NEG_INF, tl.float32)
    s = tl.zeros([_GRANULE], tl.float32)
    rows = tl.arange(0, _GRANULE)[:, None]
    begin, _cut, end = keys_seen(first, S, K)
    for start in tl.range(begin, end, BLOCK_N):
        k = load_tile(k_head, start, S.n_keys, BLOCK_N, K.head_dim, K.block_d)
        T = Tile(first, rows, start, tl.arange(0, BLOCK_N)[None, :])
        z, _ = scores_of(q, k, T, A, place, S, K, True, K.ragged)
        top = tl.maximum(m, tl.max(z, axis=1))
        base = tl.where(top == NEG_INF, 0.0, top)
        s = s * tl.exp2((m - base) * unit) + tl.sum(tl.exp2((z - base[:, None]) * unit), axis=1)
        m = top
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + place.head).to(tl.float32) * LOG2E / unit
        top = tl.maximum(m, sink)
        base = tl.where(top == NEG_INF, 0.0, top)
        s = s * tl.exp2((m - base) * unit) + tl.exp2((sink - base) * unit)
        m = top
    return tl.where(m == NEG_INF, 0.0, m), tl.where(s == 0.0, float("inf"), tl.log2(s))


@triton.jit(do_not_specialize=["n_inner", "n_heads", "group", "n_queries", "n_keys", "left", "right", "offset"])
def _keys_gradient(
    q_ptr, k_ptr, v_ptr, mask_ptr, bias_ptr, slopes_ptr, do_ptr, record_ptr, coarse_ptr, dk_ptr, dv_ptr,
    q_strides, k_strides, v_strides, mask_strides, bias_strides, slopes_strides, do_strides,
    n_inner, n_heads, group, n_queries, n_keys, left, right, offset, scale, cap, K: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile of keys.

    coarse: which of two kernels computes: the one whose weights take the recorded maxima, or the faster one without
    them.
    """
    if (tl.load(coarse_ptr) != 0) != K.recorded:  # the other kernel computes
        return
    BLOCK_N: tl.constexpr = K.block_n
    BLOCK_D: tl.constexpr = K.block_d
    BLOCK_V: tl.constexpr = K.block_v
    A = Added(mask_ptr, mask_strides, bias_ptr, bias_strides, slopes_ptr, slopes_strides, scale, cap)
    S = Sizes(n_queries, n_keys, left, right, offset)
    n_tiles = tl.cdiv(n_keys, BLOCK_N)
    program = tl.program_id(0)
    number, first = program // n_tiles, program % n_tiles * BLOCK_N
    n_key_heads = n_heads // group
    place = place_of(number, n_inner, n_key_heads)
    k_head = dense_head(k_ptr, k_strides, place, place.head, K)
    v_head = dense_head(v_ptr, v_strides, place, place.head, K)
    k = load_tile(k_head, first, n_keys, BLOCK_N, K.head_dim, BLOCK_D)
    v = load_tile(v_head, first, n_keys, BLOCK_N, K.value_dim, BLOCK_V)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    begin, end = queries_that_see(first, S, K)
    for of_group in tl.range(0, group):
        of_query = number * group + of_group  # heads of key and of query are numbered alike
        place = place_of(of_query, n_inner, n_heads)
        q_head = dense_head(q_ptr, q_strides, place, place.head, K)
        do_head = dense_head(do_ptr, do_strides, place, place.head, K)
        record = record_at(record_ptr, of_query, n_queries)
        dk, dv = over_queries(dk, dv, k, v, q_head, do_head, record, first, begin, end, A, place, S, K, K.edge)
    row = number.to(tl.int64) * n_keys
    store_tile(dk_ptr + row * K.head_dim, dk * scale, first, n_keys, BLOCK_N, K.head_dim, BLOCK_D)
    store_tile(dv_ptr + row * K.value_dim, dv, first, n_keys, BLOCK_N, K.value_dim, BLOCK_V)


@triton.jit
def over_queries(
    dk, dv, k, v, q_head, do_head, record, first, begin, end, A, place, S, K: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """dK and dV after adding the queries from begin to end."""
    BLOCK_M: tl.constexpr = K.block_m
    if K.skips:
        word, run, n = queries_to_visit(begin, end, first, place, A, S, K)
        for i in tl.range(0, n):
            tile, word = next_tile(word, i, run)
            start = begin + tile * BLOCK_M
            dk, dv = add_queries(dk, dv, k, v, q_head, do_head, record, first, start, A, place, S, K, EDGE)
    else:
        for start in tl.range(begin, end, BLOCK_M):
            dk, dv = add_queries(dk, dv, k, v, q_head, do_head, record, first, start, A, place, S, K, EDGE)
    return dk, dv


@triton.jit
def add_queries(
    dk, dv, k, v, q_head, do_head, record, first, start, A, place, S, K: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """dK and dV after adding the tile of queries from `start` on. Tiles of scores are [keys, queries]."""
    BLOCK_M: tl.constexpr = K.block_m
    BLOCK_N: tl.constexpr = K.block_n
    GUARD: tl.constexpr = EDGE and K.ragged
    q = load_tile(q_head, start, S.n_queries, BLOCK_M, K.head_dim, K.block_d)
    m, log_sum, delta = state_of(record, start, S.n_queries, BLOCK_M, K.recorded)
    T = Tile(start, tl.arange(0, BLOCK_M)[None, :], first, tl.arange(0, BLOCK_N)[:, None])
    z, c = scores_of(k, q, T, A, place, S, K, EDGE, GUARD)
    p = tl.exp2(less_maximum(z, m[None, :], K.recorded) * unit_of(A, K) - log_sum[None, :])
    do = load_tile(do_head, start, S.n_queries, BLOCK_M, K.value_dim, K.block_v)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
    ds = p * (tl.dot(v, tl.trans(do), input_precision="ieee") - delta[None, :])
    dk = tl.dot(before_cap(ds, c, A, K).to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["n_inner", "n_heads", "group", "n_queries", "n_keys", "left", "right", "offset"])
def _queries_gradient(
    q_ptr, k_ptr, v_ptr, mask_ptr, bias_ptr, slopes_ptr, do_ptr, record_ptr, coarse_ptr, dq_ptr, ds_ptr,
    q_strides, k_strides, v_strides, mask_strides, bias_strides, slopes_strides, do_strides,
    n_inner, n_heads, group, n_queries, n_keys, left, right, offset, scale, cap, K: tl.constexpr,
):  # fmt: skip
    """dQ of a tile of queries. With K.stores_ds also its dS [batches, heads, queries, keys], where keys are seen."""
    BLOCK_M: tl.constexpr = K.block_m
    BLOCK_D: tl.constexpr = K.block_d
    A = Added(mask_ptr, mask_strides, bias_ptr, bias_strides, slopes_ptr, slopes_strides, scale, cap)
    S = Sizes(n_queries, n_keys, left, right, offset)
    n_tiles = tl.cdiv(n_queries, BLOCK_M)
    program = tl.program_id(0)
    number, tile = program // n_tiles, program % n_tiles
    if K.right:
        tile = n_tiles - 1 - tile
    place = place_of(number, n_inner, n_heads)
    first = tile * BLOCK_M
    q_head = dense_head(q_ptr, q_strides, place, place.head, K)
    do_head = dense_head(do_ptr, do_strides, place, place.head, K)
    k_head = dense_head(k_ptr, k_strides, place, place.head // group, K)
    v_head = dense_head(v_ptr, v_strides, place, place.head // group, K)
    q = load_tile(q_head, first, n_queries, BLOCK_M, K.head_dim, BLOCK_D)
    do = load_tile(do_head, first, n_queries, BLOCK_M, K.value_dim, K.block_v)
    row = number.to(tl.int64) * n_queries
    m, log_sum, delta = state_of(record_at(record_ptr, number, n_queries), first, n_queries, BLOCK_M)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    begin, _, end = keys_seen(first, S, K)
    dq = over_keys(dq, q, do, m, log_sum, delta, k_head, v_head, ds_ptr, row, first, begin, end, A, place, S, K, K.edge)
    store_tile(dq_ptr + row * K.head_dim, dq * scale, first, n_queries, BLOCK_M, K.head_dim, BLOCK_D)
    if program == 0:  # all kernels that read it have ended
        tl.store(coarse_ptr, 0)


@triton.jit
def over_keys(
    dq, q, do, m, log_sum, delta, k_head, v_head, ds_ptr, row, first, begin, end, A, place, S,
    K: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """dQ after adding the keys from begin to end."""
    BLOCK_N: tl.constexpr = K.block_n
    if K.skips:
        word, run, n = keys_to_visit(first, begin, end, place, A, S, K)
        if K.stores_ds:
            store_hidden(ds_ptr, row, first, begin, end, word, run, S, K)
        for i in tl.range(0, n):
            tile, word = next_tile(word, i, run)
            start = begin + tile * BLOCK_N
            dq = add_keys(dq, q, do, m, log_sum, delta, k_head, v_head, ds_ptr, row, first, start, A, place, S, K, EDGE)
    else:
        for start in tl.range(begin, end, BLOCK_N):
            dq = add_keys(dq, q, do, m, log_sum, delta, k_head, v_head, ds_ptr, row, first, start, A, place, S, K, EDGE)
    return dq


@triton.jit
def add_keys(
    dq, q, do, m, log_sum, delta, k_head, v_head, ds_ptr, row, first, start, A, place, S,
    K: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """dQ after adding the tile of keys from `start` on."""
    BLOCK_M: tl.constexpr = K.block_m
    BLOCK_N: tl.constexpr = K.block_n
    GUARD: tl.constexpr = EDGE and K.ragged
    k = load_tile(k_head, start, S.n_keys, BLOCK_N, K.head_dim, K.block_d, GUARD)
    v = load_tile(v_head, start, S.n_keys, BLOCK_N, K.value_dim, K.block_v, GUARD)
    T = Tile(first, tl.arange(0, BLOCK_M)[:, None], start, tl.arange(0, BLOCK_N)[None, :])
    z, c = scores_of(q, k, T, A, place, S, K, EDGE, GUARD)
    p = tl.exp2(less_maximum(z, m[:, None]) * unit_of(A, K) - log_sum[:, None])
    ds = p * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta[:, None])
    if K.stores_ds:
        store_ds(ds_ptr, ds, row, T, S)
    return tl.dot(before_cap(ds, c, A, K).to(k.dtype), k, dq, input_precision="ieee")


@triton.jit
def store_ds(ds_ptr, ds, row, T, S):
    """Store dS of a tile. row: where the head's first query is among those of all heads."""
    inside = (T.first + T.rows < S.n_queries) & (T.start + T.cols < S.n_keys)
    at = ds_ptr + (row + T.first) * S.n_keys + T.start + (T.rows * S.n_keys + T.cols)
    tl.store(at, ds.to(ds_ptr.dtype.element_ty), mask=inside)


@triton.jit
def store_hidden(ds_ptr, row, first, begin, end, word, run, S, K: tl.constexpr):
    """Store 0 in the tiles of keys from begin to end whose bit is not set.

    Each bit stands for a run of tiles.
    """
    BLOCK_M: tl.constexpr = K.block_m
    BLOCK_N: tl.constexpr = K.block_n
    zeros = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(begin, end, BLOCK_N):
        if (word >> ((start - begin) // BLOCK_N // run).to(tl.int64)) & 1 == 0:
            T = Tile(first, tl.arange(0, BLOCK_M)[:, None], start, tl.arange(0, BLOCK_N)[None, :])
            store_ds(ds_ptr, zeros, row, T, S)


@triton.jit
def before_cap(ds, c, A, K: tl.constexpr):
    """The gradient of scores before they are capped."""
    if K.softcap:
        y = c / A.cap
        return tl.where(ds == 0.0, 0.0, ds * (1.0 - y * y))
    else:
        return ds


@triton.jit(do_not_specialize=["n_inner", "n_heads", "group", "n_queries", "n_keys", "left", "right", "offset"])
def _bias_gradient(
    q_ptr, k_ptr, v_ptr, mask_ptr, bias_ptr, slopes_ptr, do_ptr, record_ptr, dbias_ptr,
    q_strides, k_strides, v_strides, mask_strides, bias_strides, slopes_strides, do_strides, dbias_strides,
    repeats, tiles, n_parts, n_inner, n_heads, group, n_queries, n_keys, left, right, offset, scale, cap,
    K: tl.constexpr,
):  # fmt: skip
    """One part of the sum of dS over what a bias is broadcast over, for a tile of the bias, in a fixed order.

    tiles: the sizes (outer, inner, head, query tile, key tile) of the bias. repeats: over how many of each it is
    broadcast. dbias_strides: of (part, outer, inner, head, query, key); 0 where the bias is broadcast.
    """
    BLOCK_M: tl.constexpr = K.block_m
    BLOCK_N: tl.constexpr = K.block_n
    A = Added(mask_ptr, mask_strides, bias_ptr, bias_strides, slopes_ptr, slopes_strides, scale, cap)
    S = Sizes(n_queries, n_keys, left, right, offset)
    program = tl.program_id(0)
    part, number = program % n_parts, program // n_parts
    key_tile, number = number % tiles[4], number // tiles[4]
    query_tile, number = number % tiles[3], number // tiles[3]
    head, number = number % tiles[2], number // tiles[2]
    inner, outer = number % tiles[1], number // tiles[1]
    n_steps = repeats[0] * repeats[1] * repeats[2] * repeats[3] * repeats[4]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    steps = tl.cdiv(n_steps, n_parts)
    begin, end = steps * part, tl.minimum(steps * (part + 1), n_steps)
    R = Read(
        Head(q_ptr, q_strides), Head(k_ptr, k_strides), Head(v_ptr, v_strides), Head(do_ptr, do_strides),
        record_ptr,
    )  # fmt: skip
    if K.skips:
        for some in tl.range(begin, end, BITS):
            every = some + tl.arange(0, BITS)
            heads, rows, cols = tile_at(every, outer, inner, head, query_tile, key_tile, repeats, n_inner, n_heads, K)
            inside = (every < end) & in_window(rows, cols, S, K)
            word = tiles_seen(rows, cols, inside, place_of(heads, n_inner, n_heads), A, S, K)
            for i in tl.range(0, bits_of(word)):
                tile, word = next_tile(word, i, 1)
                of_query, first, start = tile_at(
                    some + tile, outer, inner, head, query_tile, key_tile, repeats, n_inner, n_heads, K
                )
                total = add_tile(total, of_query, first, start, n_inner, n_heads, group, R, A, S, K)
    else:
        for step in tl.range(begin, end):
            of_query, first, start = tile_at(
                step, outer, inner, head, query_tile, key_tile, repeats, n_inner, n_heads, K
            )
            if not (K.left or K.right) or in_window(first, start, S, K):
                total = add_tile(total, of_query, first, start, n_inner, n_heads, group, R, A, S, K)
    dbias_ptr += part.to(tl.int64) * dbias_strides[0] + outer.to(tl.int64) * dbias_strides[1]
    dbias_ptr += inner.to(tl.int64) * dbias_strides[2] + head.to(tl.int64) * dbias_strides[3]
    rows, cols = query_tile * BLOCK_M + tl.arange(0, BLOCK_M), key_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if K.sums_rows and K.sums_cols:
        tl.store(dbias_ptr, tl.sum(tl.sum(total, axis=1), axis=0))
    elif K.sums_rows:
        tl.store(dbias_ptr + cols.to(tl.int64) * dbias_strides[5], tl.sum(total, axis=0), mask=cols < n_keys)
    elif K.sums_cols:
        tl.store(dbias_ptr + rows.to(tl.int64) * dbias_strides[4], tl.sum(total, axis=1), mask=rows < n_queries)
    else:
        at = rows.to(tl.int64)[:, None] * dbias_strides[4] + cols.to(tl.int64)[None, :] * dbias_strides[5]
        tl.store(dbias_ptr + at, total, mask=(rows < n_queries)[:, None] & (cols < n_keys)[None, :])


@triton.jit
def tile_at(step, outer, inner, head, query_tile, key_tile, repeats, n_inner, n_heads, K: tl.constexpr):
    """(head of all, first query, first key) of a step, or of several.

    In each dim, either the number of the bias's tile or that of the step is 0.
    """
    tile_n, left_over = step % repeats[4] + key_tile, step // repeats[4]
    tile_m, left_over = left_over % repeats[3] + query_tile, left_over // repeats[3]
    at_head, left_over = left_over % repeats[2] + head, left_over // repeats[2]
    at_inner, at_outer = left_over % repeats[1] + inner, left_over // repeats[1] + outer
    of_query = (at_outer * n_inner + at_inner) * n_heads + at_head
    return of_query, tile_m * K.block_m, tile_n * K.block_n


@triton.jit
def in_window(first, start, S, K: tl.constexpr):
    """Whether some query of a tile sees some key by causality and the window, for one tile or several."""
    seen = start >= 0
    if K.right:
        seen = seen & (start <= first + K.block_m - 1 + S.offset + S.right)
    if K.left:
        seen = seen & (start + K.block_n - 1 >= first + S.offset - S.left)
    return seen


@triton.jit
def add_tile(total, of_query, first, start, n_inner, n_heads, group, R, A, S, K: tl.constexpr):
    """The sum of dS after adding a tile of the head of queries with this number."""
    BLOCK_M: tl.constexpr = K.block_m
    BLOCK_N: tl.constexpr = K.block_n
    place = place_of(of_query, n_inner, n_heads)
    q_head = dense_head(R.q.ptr, R.q.stride, place, place.head, K)
    do_head = dense_head(R.do.ptr, R.do.stride, place, place.head, K)
    k_head = dense_head(R.k.ptr, R.k.stride, place, place.head // group, K)
    v_head = dense_head(R.v.ptr, R.v.stride, place, place.head // group, K)
    q = load_tile(q_head, first, S.n_queries, BLOCK_M, K.head_dim, K.block_d)
    k = load_tile(k_head, start, S.n_keys, BLOCK_N, K.head_dim, K.block_d)
    v = load_tile(v_head, start, S.n_keys, BLOCK_N, K.value_dim, K.block_v)
    do = load_tile(do_head, first, S.n_queries, BLOCK_M, K.value_dim, K.block_v)
    T = Tile(first, tl.arange(0, BLOCK_M)[:, None], start, tl.arange(0, BLOCK_N)[None, :])
    z, _ = scores_of(q, k, T, A, place, S, K, True, K.ragged)
    m, log_sum, delta = state_of(record_at(R.record_ptr, of_query, S.n_queries), first, S.n_queries, BLOCK_M)
    p = tl.exp2(less_maximum(z, m[:, None]) * unit_of(A, K) - log_sum[:, None])
    return total + p * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta[:, None])
