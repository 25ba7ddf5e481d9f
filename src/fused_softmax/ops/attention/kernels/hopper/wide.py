"""attention's gradients for sm_90 and heads of more than 128 dims, as deterministic as those for fewer dims.

A warpgroup has no registers for both sums of its keys, dK and dV. So two warpgroups share a tile of keys. The first has
the scores and sums dV. It hands the weights, times the derivative of a softcap, to the second, which has dP and sums
dK. Each product is computed once.
For dQ, shared memory has no room for two tiles of keys and two of values beside the queries. They go in turn through
one ring of three tiles, values first.
The formulas are those of `ops/attention/kernels/gradient.py`, and its traffic too.
"""

from fused_softmax.ops.attention.kernels.hopper.forward import SIZES
from fused_softmax.ops.attention.kernels.hopper.gluon_names import (
    gl,
    jit,
    load_async,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from fused_softmax.ops.attention.kernels.hopper.parts import (
    await_empty,
    emptied,
    exponents_of,
    factor_of,
    fill,
    full,
    hidden_queries,
    keys_seen,
    less_lse,
    load_queries,
    own_tiles,
    queries_that_see,
    record_of,
    ring,
    ring_of,
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
from fused_softmax.ops.attention.kernels.hopper.spec import ROWS, Sizes

_ROWS = gl.constexpr(ROWS)
_HANDED = gl.constexpr(2)  # tiles of weights, so that the first warpgroup runs ahead of the second


@jit(do_not_specialize=SIZES)
def _keys_gradient_wide(
    q_map, k_map, v_map, slopes_ptr, do_map, rows_map, record_ptr, coarse_ptr, dk_map, dv_map,
    n_heads, group, n_queries, n_keys, left, right, offset, head_tiles, n_tiles, shift, scale, rate, cap,
    K: gl.constexpr,
):  # fmt: skip
    """dK and dV. rows_map, record_ptr: what `_delta` stores. coarse: as `own_tiles` takes it.

    rate, cap: as `scores_of` takes them.
    """
    heads = n_heads // group
    n_tiles = own_tiles(n_tiles, coarse_ptr, K)
    S = Sizes(n_heads, group, n_queries, n_keys, left, right, offset, head_tiles, n_tiles, shift, 0, heads)
    k = ring(1, 1, k_map)
    v = ring(1, 1, v_map)
    q = ring(K.stages, 2, q_map)
    do = ring(K.stages, 2, do_map)
    SCORES: gl.constexpr = [_ROWS, K.block]
    handed = ring_of(_HANDED, 1, SCORES, q_map.dtype)
    OF_ROWS: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    lse = gl.allocate_shared_memory(gl.float32, [K.stages, K.block], OF_ROWS)
    delta = gl.allocate_shared_memory(gl.float32, [K.stages, K.block], OF_ROWS)
    R: gl.constexpr = K.registers
    gl.warp_specialize([
        (_load_for_keys, (q_map, k_map, v_map, do_map, rows_map, q, k, v, do, lse, delta, S, K)),
        (_sum_values, (slopes_ptr, record_ptr, dv_map, q, k, do, lse, handed, rate, cap, S, K)),
        (_sum_keys, (dk_map, q, v, do, delta, handed, scale, S, K)),
    ], [4, 4], [R, R])  # fmt: skip


@jit
def _load_for_keys(q_map, k_map, v_map, do_map, rows_map, q, k, v, do, lse, delta, S, K: gl.constexpr):
    """All tiles that the two take, in their order."""
    STAGES: gl.constexpr = K.stages
    BYTES_Q: gl.constexpr = q_map.block_type.nbytes + rows_map.block_type.nbytes
    BYTES_DO: gl.constexpr = do_map.block_type.nbytes + rows_map.block_type.nbytes
    count = 0
    for turn in range(turns(S)):
        work = work_at(turn, S, K)
        fill(k, turn, 1, k_map, work.batch, work.head, work.first)
        fill(v, turn, 1, v_map, work.batch, work.head, work.first)
        begin, end = queries_that_see(work.first, S, K)
        for of_group in range(S.group):
            head = work.head * S.group + of_group
            number = 2 * (work.number * S.group + of_group)
            for i in range(begin, end):
                row, stage = i * K.block, count % STAGES
                await_empty(q, count, STAGES, BYTES_Q)
                load_async(q_map, [work.batch, head, row, 0], q.full.index(stage), q.tiles.index(stage))
                load_async(rows_map, [number, row], q.full.index(stage), lse.index(stage))
                await_empty(do, count, STAGES, BYTES_DO)
                load_async(do_map, [work.batch, head, row, 0], do.full.index(stage), do.tiles.index(stage))
                load_async(rows_map, [number + 1, row], do.full.index(stage), delta.index(stage))
                count += 1


@jit
def _sum_values(slopes_ptr, record_ptr, dv_map, q, k, do, lse, handed, rate, cap, S, K: gl.constexpr):
    """dV, and the weights that the other warpgroup takes. Tiles of scores are [keys, queries]."""
    STAGES: gl.constexpr = K.stages
    BLOCK: gl.constexpr = K.block
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    OF_QUERIES: gl.constexpr = gl.SliceLayout(0, SCORES)
    BLOCK_V: gl.constexpr = K.block_v
    OF_V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    dtype: gl.constexpr = dv_map.dtype
    none = gl.zeros([_ROWS, BLOCK], gl.float32, SCORES)
    keys = k.tiles.index(0)
    count = 0
    for turn in range(turns(S)):
        work = work_at(turn, S, K)
        begin, end = queries_that_see(work.first, S, K)
        high, low = hidden_queries(work.first, begin, end, S, K)
        dv = gl.zeros([_ROWS, BLOCK_V], gl.float32, OF_V)
        full(k, turn, 1)
        for of_group in range(S.group):
            slope = slope_of(slopes_ptr, work.batch, work.head * S.group + of_group, S, K)
            record = record_of(record_ptr, work.number * S.group + of_group, S)
            for i in range(begin, end):
                stage = count % STAGES
                full(q, count, STAGES)
                s = warpgroup_mma(keys, q.tiles.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
                s = warpgroup_mma_wait(0, (s,))
                z, unit, derivative = scores_of(s, q, 0, slope, work.first, i * BLOCK + S.offset, rate, cap, K, 0)
                if K.recorded:
                    z = less_lse(z, unit, lse.index(stage), record, i * BLOCK, S, K)
                p = gl.exp2(z * unit - lse.index(stage).load(OF_QUERIES)[None, :])
                handed_p = p
                if K.softcap:
                    handed_p = p * derivative
                emptied(q, count, STAGES)
                if K.left or K.right:
                    at_edge = (i < high) | (i >= low)
                    if at_edge:
                        p = visible_by_keys(p, work.first, i * BLOCK, S, K)
                        handed_p = visible_by_keys(handed_p, work.first, i * BLOCK, S, K)
                weights = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, OF_V, 2))
                mbarrier.wait(handed.empty.index(count % _HANDED), (count // _HANDED & 1) ^ 1)
                handed.tiles.index(count % _HANDED).store(handed_p.to(dtype))
                mbarrier.arrive(handed.full.index(count % _HANDED), count=1)
                full(do, count, STAGES)
                dv = warpgroup_mma(weights, do.tiles.index(stage), dv, is_async=True)
                dv = warpgroup_mma_wait(0, (dv,))
                emptied(do, count, STAGES)
                count += 1
        send(dv, keys, dv_map, work.number, work.first)
        emptied(k, 0, 1)


@jit
def _sum_keys(dk_map, q, v, do, delta, handed, scale, S, K: gl.constexpr):
    """dK."""
    STAGES: gl.constexpr = K.stages
    BLOCK: gl.constexpr = K.block
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    OF_QUERIES: gl.constexpr = gl.SliceLayout(0, SCORES)
    BLOCK_D: gl.constexpr = K.block_d
    OF_K: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    dtype: gl.constexpr = dk_map.dtype
    none = gl.zeros([_ROWS, BLOCK], gl.float32, SCORES)
    values = v.tiles.index(0)
    count = 0
    for turn in range(turns(S)):
        work = work_at(turn, S, K)
        begin, end = queries_that_see(work.first, S, K)
        dk = gl.zeros([_ROWS, BLOCK_D], gl.float32, OF_K)
        full(v, turn, 1)
        for _ in range(S.group * (end - begin)):
            stage = count % STAGES
            full(do, count, STAGES)
            dp = warpgroup_mma(values, do.tiles.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
            dp = warpgroup_mma_wait(0, (dp,))
            dp = dp - delta.index(stage).load(OF_QUERIES)[None, :]
            emptied(do, count, STAGES)
            full(handed, count, _HANDED)
            p = handed.tiles.index(count % _HANDED).load(SCORES).to(gl.float32)
            emptied(handed, count, _HANDED)
            ds = gl.convert_layout((p * dp).to(dtype), gl.DotOperandLayout(0, OF_K, 2))
            full(q, count, STAGES)  # for long, as the weights are of these queries
            dk = warpgroup_mma(ds, q.tiles.index(stage), dk, is_async=True)
            dk = warpgroup_mma_wait(0, (dk,))
            emptied(q, count, STAGES)
            count += 1
        send(dk * scale, values, dk_map, work.number, work.first)
        emptied(v, 0, 1)


@jit(do_not_specialize=SIZES)
def _queries_gradient_wide(
    q_map, k_map, v_map, slopes_ptr, do_map, rows_ptr, record_ptr, coarse_ptr, dq_map,
    n_heads, group, n_queries, n_keys, left, right, offset, head_tiles, n_tiles, shift, scale, rate, cap,
    K: gl.constexpr,
):  # fmt: skip
    """dQ. rate, cap: as `scores_of` takes them."""
    S = Sizes(n_heads, group, n_queries, n_keys, left, right, offset, head_tiles, n_tiles, shift)
    q = ring(K.consumers, K.consumers, q_map)  # its first barrier is for all queries and dO
    do = tiles_of(K.consumers, do_map)
    by = ring(K.stages, K.consumers, k_map)
    gl.store(coarse_ptr, 0)  # all kernels that read it have ended
    R: gl.constexpr = K.registers
    gl.warp_specialize([
        (_load_for_queries, (q_map, k_map, v_map, do_map, q, by, do, S, K)),
        (_sum_queries, (slopes_ptr, rows_ptr, record_ptr, dq_map, q, by, do, scale, rate, cap, S, K, 0)),
        (_sum_queries, (slopes_ptr, rows_ptr, record_ptr, dq_map, q, by, do, scale, rate, cap, S, K, 1)),
    ], [4, 4], [R, R])  # fmt: skip


@jit
def _load_for_queries(q_map, k_map, v_map, do_map, q, by, do, S, K: gl.constexpr):
    """All tiles that the consumers take, in their order."""
    count = 0
    for turn in range(turns(S)):
        work = work_at(turn, S, K)
        load_queries(q_map, do_map, q, do, turn, work, K)
        begin, end = keys_seen(work.first, S, K)
        for i in range(begin, end):
            fill(by, count, K.stages, v_map, work.batch, work.head // S.group, i * K.block)
            fill(by, count + 1, K.stages, k_map, work.batch, work.head // S.group, i * K.block)
            count += 2


@jit
def _sum_queries(
    slopes_ptr, rows_ptr, record_ptr, dq_map, q, by, do, scale, rate, cap, S, K: gl.constexpr, ME: gl.constexpr
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
            full(by, count, STAGES)
            values = by.tiles.index(count % STAGES).permute((1, 0))
            dp = warpgroup_mma(my_do, values, none, use_acc=False, is_async=True)
            full(by, count + 1, STAGES)
            keys = by.tiles.index((count + 1) % STAGES)
            s = warpgroup_mma(my_q, keys.permute((1, 0)), none, use_acc=False, is_async=True)
            dp = warpgroup_mma_wait(1, (dp,))
            emptied(by, count, STAGES)
            s = warpgroup_mma_wait(0, (s,))
            z, _, derivative = scores_of(s, by, 0, slope, first + S.offset, i * BLOCK, rate, cap, K, ME)
            p = gl.exp2(z * rates[:, None] - origin[:, None])
            if K.softcap:
                p = p * derivative
            if K.edge:
                at_edge = ((i + 1) * BLOCK > cut) | (i * BLOCK < low)
                if at_edge:
                    p = visible_by_queries(p, i * BLOCK, queries, S, K)
            ds = (p * (dp - delta[:, None])).to(dtype)
            ds = gl.convert_layout(ds, gl.DotOperandLayout(0, OF_Q, 2))
            dq = warpgroup_mma(ds, keys, dq, is_async=True)
            dq = warpgroup_mma_wait(0, (dq,))
            emptied(by, count + 1, STAGES)
            count += 2
        factor = factor_of(rows_ptr, work.number, padded, unit, record, queries, S, K)
        dq = dq * (gl.convert_layout(factor, gl.SliceLayout(1, OF_Q)) * scale)[:, None]
        send(dq, my_q, dq_map, work.number, first)
        emptied(q, 0, 1)
