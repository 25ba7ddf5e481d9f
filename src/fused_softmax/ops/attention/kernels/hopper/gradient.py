"""attention's gradients for sm_90 and heads of up to 128 dims, deterministic.

The formulas are those of `kernels/gradient.py`, and so are the two kernels: dK and dV by tiles of keys, dQ by tiles of
queries. Both work as `forward.py` beside them does: one warpgroup loads the tiles that they go over, and each consumer
has 64 rows of its own.
Traffic: that of `kernels/gradient.py`.
"""

from fused_softmax.ops.attention.kernels.hopper.forward import SIZES
from fused_softmax.ops.attention.kernels.hopper.gluon_names import (
    fence_async_shared,
    gl,
    jit,
    load_async,
    store_async,
    stores_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from fused_softmax.ops.attention.kernels.hopper.parts import (
    await_empty,
    biases,
    emptied,
    exponents_of,
    factor_of,
    full,
    hidden_queries,
    keys_seen,
    less_lse,
    load_bias,
    load_queries,
    my_turn,
    next_turn,
    own_tiles,
    queries_that_see,
    record_of,
    ring,
    rows_of_head,
    scores_of,
    seen_by_all,
    send,
    slope_of,
    state_at,
    tiles_of,
    turns,
    unit_of,
    visible_by_keys,
    visible_by_queries,
    work_at,
)
from fused_softmax.ops.attention.kernels.hopper.spec import ROWS, Kept, Sizes

_ROWS = gl.constexpr(ROWS)


@jit(do_not_specialize=[*SIZES, "first_head", "heads"])
def _keys_gradient_hopper(
    q_map, k_map, v_map, bias_map, slopes_ptr, do_map, rows_map, record_ptr, coarse_ptr, dk_map, dv_map, ds_map,
    n_heads, group, n_queries, n_keys, left, right, offset, head_tiles, n_tiles, shift, first_head, heads, scale,
    rate, cap, K: gl.constexpr,
):  # fmt: skip
    """dK and dV, of `heads` heads of keys from first_head on. rows_map, record_ptr: what `_delta` stores.

    coarse: as `own_tiles` takes it. rate, cap: as `scores_of` takes them; with a bias the rate is the scale. ds_map: dS
    of these heads alone, if it is kept. Tiles that no query sees are not stored.
    """
    n_tiles = own_tiles(n_tiles, coarse_ptr, K)
    S = Sizes(n_heads, group, n_queries, n_keys, left, right, offset, head_tiles, n_tiles, shift, first_head, heads)
    k = ring(K.consumers, K.consumers, k_map)  # its first barrier is for all keys and values
    v = tiles_of(K.consumers, v_map)
    q = ring(K.stages, K.consumers, q_map)
    do = tiles_of(K.stages, do_map)  # full when the queries are
    b = biases(q, bias_map, K)
    kept = Kept(ds_map, tiles_of(K.consumers, ds_map) if K.stores_ds else q.tiles, record_ptr)
    OF_ROWS: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    lse = gl.allocate_shared_memory(gl.float32, [K.stages, K.block], OF_ROWS)
    delta = gl.allocate_shared_memory(gl.float32, [K.stages, K.block], OF_ROWS)
    R: gl.constexpr = K.registers
    gl.warp_specialize([
        (_load_for_keys, (q_map, k_map, v_map, bias_map, do_map, rows_map, q, k, v, b, do, lse, delta, S, K)),
        (_sum_for_keys, (slopes_ptr, dk_map, dv_map, q, k, v, b, do, lse, delta, kept, scale, rate, cap, S, K, 0)),
        (_sum_for_keys, (slopes_ptr, dk_map, dv_map, q, k, v, b, do, lse, delta, kept, scale, rate, cap, S, K, 1)),
    ], [4, 4], [R, R])  # fmt: skip


@jit
def _load_for_keys(
    q_map, k_map, v_map, bias_map, do_map, rows_map, q, k, v, b, do, lse, delta, S, K: gl.constexpr
):  # fmt: skip
    """All tiles that the consumers take, in their order."""
    CONSUMERS: gl.constexpr = K.consumers
    STAGES: gl.constexpr = K.stages
    BYTES: gl.constexpr = CONSUMERS * (k_map.block_type.nbytes + v_map.block_type.nbytes)
    BYTES_BY: gl.constexpr = q_map.block_type.nbytes + do_map.block_type.nbytes + 2 * rows_map.block_type.nbytes
    BYTES_BIAS: gl.constexpr = CONSUMERS * bias_map.block_type.nbytes if K.bias else 0
    count = 0
    for turn in range(turns(S)):
        work = work_at(turn, S, K)
        await_empty(k, turn, 1, BYTES)
        for each in gl.static_range(CONSUMERS):
            first = work.first + each * _ROWS
            load_async(k_map, [work.batch, work.head, first, 0], k.full.index(0), k.tiles.index(each))
            load_async(v_map, [work.batch, work.head, first, 0], k.full.index(0), v.index(each))
        begin, end = queries_that_see(work.first, S, K)
        for of_group in range(S.group):
            head = work.head * S.group + of_group
            number = 2 * (work.number * S.group + of_group)
            for i in range(begin, end):
                row, stage = i * K.block, count % STAGES
                await_empty(q, count, STAGES, BYTES_BY + BYTES_BIAS)
                if K.bias:
                    load_bias(b, bias_map, q.full.index(stage), stage, work.batch, head, row, work.first, K)
                load_async(q_map, [work.batch, head, row, 0], q.full.index(stage), q.tiles.index(stage))
                load_async(rows_map, [number, row], q.full.index(stage), lse.index(stage))
                load_async(do_map, [work.batch, head, row, 0], q.full.index(stage), do.index(stage))
                load_async(rows_map, [number + 1, row], q.full.index(stage), delta.index(stage))
                count += 1


@jit
def _sum_for_keys(
    slopes_ptr, dk_map, dv_map, q, k, v, b, do, lse, delta, kept, scale, rate, cap, S,
    K: gl.constexpr, ME: gl.constexpr,
):  # fmt: skip
    """dK and dV of the ME-th _ROWS keys of each tile."""
    BLOCK_D: gl.constexpr = K.block_d
    BLOCK_V: gl.constexpr = K.block_v
    OF_K: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    OF_V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    EDGE: gl.constexpr = K.recorded and (K.left or K.right)
    dtype: gl.constexpr = dk_map.dtype
    if K.consumers == ME + 1:
        next_turn(ME, K.consumers)
    count = 0
    for turn in range(turns(S)):
        work = work_at(turn, S, K)
        first = work.first + ME * _ROWS
        begin, end = queries_that_see(work.first, S, K)
        high, low = begin, end
        if not K.recorded:
            high, low = hidden_queries(first, begin, end, S, K)
        dk = gl.zeros([_ROWS, BLOCK_D], gl.float32, OF_K)
        dv = gl.zeros([_ROWS, BLOCK_V], gl.float32, OF_V)
        full(k, turn, 1)
        my_k, my_v = k.tiles.index(ME), v.index(ME)
        my_turn(ME)
        for of_group in range(S.group):
            head = (work.head - S.first_head) * S.group + of_group
            slope = slope_of(slopes_ptr, work.batch, work.head * S.group + of_group, S, K)
            record = record_of(kept.record, work.number * S.group + of_group, S)
            at = Kept(kept.ds_map, kept.tiles, record, work.batch, head, first, slope)
            if K.right and not K.recorded:
                dk, dv = _add_queries(
                    dk, dv, count - begin, begin, high, at, my_k, my_v, q, b, do, lse, delta, rate, cap, S, K, ME, True
                )
            dk, dv = _add_queries(
                dk, dv, count - begin, high, low, at, my_k, my_v, q, b, do, lse, delta, rate, cap, S, K, ME, EDGE
            )
            if K.left and not K.recorded:
                dk, dv = _add_queries(
                    dk, dv, count - begin, low, end, at, my_k, my_v, q, b, do, lse, delta, rate, cap, S, K, ME, True
                )
            count += end - begin
        next_turn(ME, K.consumers)
        my_k.store((dk * scale).to(dtype))
        my_v.store(dv.to(dtype))
        fence_async_shared()
        store_async(dk_map, [work.number, first, 0], my_k)
        store_async(dv_map, [work.number, first, 0], my_v)
        stores_wait(0)
        emptied(k, 0, 1)


@jit
def _add_queries(
    dk, dv, count, begin, end, kept, my_k, my_v, q, b, do, lse, delta, rate, cap, S,
    K: gl.constexpr, ME: gl.constexpr, EDGE: gl.constexpr,
):  # fmt: skip
    """dK and dV after adding the tiles of queries from begin to end. Tiles of scores are [keys, queries]."""
    BLOCK: gl.constexpr = K.block
    STAGES: gl.constexpr = K.stages
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    OF_QUERIES: gl.constexpr = gl.SliceLayout(0, SCORES)
    dtype: gl.constexpr = my_k.dtype
    for i in range(begin, end):
        at = count + i
        stage = at % STAGES
        queries, of_output = q.tiles.index(stage), do.index(stage)
        none = gl.zeros([_ROWS, BLOCK], gl.float32, SCORES)
        full(q, at, STAGES)
        s = warpgroup_mma(my_k, queries.permute((1, 0)), none, use_acc=False, is_async=True)
        dp = warpgroup_mma(my_v, of_output.permute((1, 0)), none, use_acc=False, is_async=True)
        next_turn(ME, K.consumers)
        s = warpgroup_mma_wait(1, (s,))
        z, unit, derivative = scores_of(s, b, stage, kept.slope, kept.first, i * BLOCK + S.offset, rate, cap, K, ME)
        if K.recorded:
            z = less_lse(z, unit, lse.index(stage), kept.record, i * BLOCK, S, K)
        p = gl.exp2(z * unit - lse.index(stage).load(OF_QUERIES)[None, :])
        of_scores = p
        if K.softcap:
            of_scores = p * derivative
        if EDGE:
            p = visible_by_keys(p, kept.first, i * BLOCK, S, K)
            of_scores = visible_by_keys(of_scores, kept.first, i * BLOCK, S, K) if K.softcap else p
        weights = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, dv.type.layout, 2))
        dp = warpgroup_mma_wait(0, (dp,))
        ds = (of_scores * (dp - delta.index(stage).load(OF_QUERIES)[None, :])).to(dtype)
        if K.stores_ds:
            mine = kept.tiles.index(ME)
            stores_wait(0)  # until the tile before has been read
            mine.permute((1, 0)).store(ds)
            fence_async_shared()
            store_async(kept.ds_map, [kept.batch, kept.head, i * BLOCK, kept.first], mine)
        ds = gl.convert_layout(ds, gl.DotOperandLayout(0, dk.type.layout, 2))
        my_turn(ME)
        dv = warpgroup_mma(weights, of_output, dv, is_async=True)
        dk = warpgroup_mma(ds, queries, dk, is_async=True)
        dk, dv = warpgroup_mma_wait(0, (dk, dv))
        emptied(q, at, STAGES)
    return dk, dv


@jit(do_not_specialize=SIZES)
def _queries_gradient_hopper(
    q_map, k_map, v_map, bias_map, slopes_ptr, do_map, rows_ptr, record_ptr, coarse_ptr, dq_map,
    n_heads, group, n_queries, n_keys, left, right, offset, head_tiles, n_tiles, shift, scale, rate, cap,
    K: gl.constexpr,
):  # fmt: skip
    """dQ. rate, cap: as `_keys_gradient_hopper`'s."""
    S = Sizes(n_heads, group, n_queries, n_keys, left, right, offset, head_tiles, n_tiles, shift)
    q = ring(K.consumers, K.consumers, q_map)  # its first barrier is for all queries and dO
    do = tiles_of(K.consumers, do_map)
    k = ring(K.stages, K.consumers, k_map)
    v = tiles_of(K.stages, v_map)  # full when the keys are
    b = biases(k, bias_map, K)
    gl.store(coarse_ptr, 0)  # all kernels that read it have ended
    R: gl.constexpr = K.registers
    gl.warp_specialize([
        (_load_for_queries, (q_map, k_map, v_map, bias_map, do_map, q, k, v, b, do, S, K)),
        (_sum_for_queries, (slopes_ptr, rows_ptr, record_ptr, dq_map, q, k, v, b, do, scale, rate, cap, S, K, 0)),
        (_sum_for_queries, (slopes_ptr, rows_ptr, record_ptr, dq_map, q, k, v, b, do, scale, rate, cap, S, K, 1)),
    ], [4, 4], [R, R])  # fmt: skip


@jit
def _load_for_queries(q_map, k_map, v_map, bias_map, do_map, q, k, v, b, do, S, K: gl.constexpr):
    """All tiles that the consumers take, in their order."""
    CONSUMERS: gl.constexpr = K.consumers
    BYTES_BY: gl.constexpr = k_map.block_type.nbytes + v_map.block_type.nbytes
    BYTES_BIAS: gl.constexpr = CONSUMERS * bias_map.block_type.nbytes if K.bias else 0
    count = 0
    for turn in range(turns(S)):
        work = work_at(turn, S, K)
        load_queries(q_map, do_map, q, do, turn, work, K)
        begin, end = keys_seen(work.first, S, K)
        for i in range(begin, end):
            row, stage = i * K.block, count % K.stages
            await_empty(k, count, K.stages, BYTES_BY + BYTES_BIAS)
            if K.bias:
                load_bias(b, bias_map, k.full.index(stage), stage, work.batch, work.head, work.first, row, K)
            load_async(k_map, [work.batch, work.head // S.group, row, 0], k.full.index(stage), k.tiles.index(stage))
            load_async(v_map, [work.batch, work.head // S.group, row, 0], k.full.index(stage), v.index(stage))
            count += 1


@jit
def _sum_for_queries(
    slopes_ptr, rows_ptr, record_ptr, dq_map, q, k, v, b, do, scale, rate, cap, S, K: gl.constexpr, ME: gl.constexpr
):  # fmt: skip
    """dQ of the ME-th _ROWS queries of each tile."""
    BLOCK: gl.constexpr = K.block
    BLOCK_D: gl.constexpr = K.block_d
    STAGES: gl.constexpr = K.stages
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    OF_Q: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    OF_QUERIES: gl.constexpr = gl.SliceLayout(1, SCORES)
    dtype: gl.constexpr = dq_map.dtype
    none = gl.zeros([_ROWS, BLOCK], gl.float32, SCORES)
    padded = rows_of_head(S)
    unit = unit_of(rate, K)
    if K.consumers == ME + 1:
        next_turn(ME, K.consumers)
    count = 0
    for turn in range(turns(S)):
        work = work_at(turn, S, K)
        first = work.first + ME * _ROWS
        queries = first + gl.arange(0, _ROWS, OF_QUERIES)
        lse, delta = state_at(rows_ptr, work.number, queries, padded)
        record = record_of(record_ptr, work.number, S)
        rates, origin = exponents_of(lse, unit, record, queries, S, K)
        begin, end = keys_seen(work.first, S, K)
        low, cut = seen_by_all(first, S, K)
        slope = slope_of(slopes_ptr, work.batch, work.head, S, K)
        dq = gl.zeros([_ROWS, BLOCK_D], gl.float32, OF_Q)
        full(q, turn, 1)
        my_q, my_do = q.tiles.index(ME), do.index(ME)
        for i in range(begin, end):
            stage = count % STAGES
            full(k, count, STAGES)
            my_turn(ME)
            s = warpgroup_mma(my_q, k.tiles.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
            dp = warpgroup_mma(my_do, v.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
            next_turn(ME, K.consumers)
            s = warpgroup_mma_wait(1, (s,))
            z, _, derivative = scores_of(s, b, stage, slope, first + S.offset, i * BLOCK, rate, cap, K, ME)
            p = gl.exp2(z * rates[:, None] - origin[:, None])
            if K.softcap:
                p = p * derivative
            if K.edge:
                at_edge = ((i + 1) * BLOCK > cut) | (i * BLOCK < low)
                if at_edge:
                    p = visible_by_queries(p, i * BLOCK, queries, S, K)
            dp = warpgroup_mma_wait(0, (dp,))
            ds = (p * (dp - delta[:, None])).to(dtype)
            ds = gl.convert_layout(ds, gl.DotOperandLayout(0, OF_Q, 2))
            dq = warpgroup_mma(ds, k.tiles.index(stage), dq, is_async=True)
            dq = warpgroup_mma_wait(0, (dq,))
            emptied(k, count, STAGES)
            count += 1
        factor = factor_of(rows_ptr, work.number, padded, unit, record, queries, S, K)
        dq = dq * (gl.convert_layout(factor, gl.SliceLayout(1, OF_Q)) * scale)[:, None]
        send(dq, my_q, dq_map, work.number, first)
        emptied(q, 0, 1)
