"""attention's forward pass for sm_90: one warpgroup loads tiles of keys and values, consumers of 64 queries multiply.

The recurrence is that of `kernels/forward.py`. Programs stay on their multiprocessor and take one tile of queries after
another. Tiles come by TMA, which fills with zeros beyond the last row and the last dim, and products are wgmma. A
consumer issues the scores of a tile before it adds the previous tile to the output. While it computes exponentials, the
others multiply: named barriers let one consumer begin at a time.
Traffic: that of `kernels/forward.py`.
"""

from fused_softmax.ops.attention.kernels.hopper.gluon_names import (
    fence_async_shared,
    gl,
    jit,
    load_async,
    mbarrier,
    store_async,
    stores_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from fused_softmax.ops.attention.kernels.hopper.parts import (
    LN2,
    LOG2E,
    LOWEST,
    await_empty,
    biases,
    capped,
    emptied,
    fill,
    full,
    huge_from,
    huge_unit,
    keys_seen,
    load_bias,
    my_turn,
    next_turn,
    origin_of,
    ring,
    seen_by_all,
    sink_as_origin,
    slope_of,
    turns,
    unit_at,
    unit_of,
    with_alibi,
    with_bias,
    work_at,
)
from fused_softmax.ops.attention.kernels.hopper.spec import ROWS, Sizes

_ROWS = gl.constexpr(ROWS)
SIZES = ["n_heads", "group", "n_queries", "n_keys", "left", "right", "offset", "head_tiles", "n_tiles", "shift"]


@jit(do_not_specialize=SIZES)
def _attention_hopper(
    q_map, k_map, v_map, bias_map, sinks_ptr, slopes_ptr, o_map, lse_ptr,
    n_heads, group, n_queries, n_keys, left, right, offset, head_tiles, n_tiles, shift, scale, cap,
    K: gl.constexpr,
):  # fmt: skip
    """scale: in units of log 2, natural ones with a bias, or as `capped` takes it where scores are capped, at cap."""
    S = Sizes(n_heads, group, n_queries, n_keys, left, right, offset, head_tiles, n_tiles, shift)
    q = ring(K.consumers, K.consumers, q_map)  # its first barrier is for all of its tiles
    k = ring(K.stages, K.consumers, k_map)
    v = ring(K.stages, K.consumers, v_map)
    b = biases(k, bias_map, K)
    if K.reuses:
        o = q.tiles
    else:
        OF_TILES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_ROWS, K.block_v], o_map.dtype)
        o = gl.allocate_shared_memory(o_map.dtype, [K.consumers, _ROWS, K.block_v], OF_TILES)
    R: gl.constexpr = K.registers
    if K.consumers == 2:
        gl.warp_specialize([
            (_load, (q_map, k_map, v_map, bias_map, q, k, v, b, S, K)),
            (_attend, (sinks_ptr, slopes_ptr, o_map, lse_ptr, q, k, v, b, o, scale, cap, S, K, 0)),
            (_attend, (sinks_ptr, slopes_ptr, o_map, lse_ptr, q, k, v, b, o, scale, cap, S, K, 1)),
        ], [4, 4], [R, R])  # fmt: skip
    else:
        gl.warp_specialize([
            (_load, (q_map, k_map, v_map, bias_map, q, k, v, b, S, K)),
            (_attend, (sinks_ptr, slopes_ptr, o_map, lse_ptr, q, k, v, b, o, scale, cap, S, K, 0)),
            (_attend, (sinks_ptr, slopes_ptr, o_map, lse_ptr, q, k, v, b, o, scale, cap, S, K, 1)),
            (_attend, (sinks_ptr, slopes_ptr, o_map, lse_ptr, q, k, v, b, o, scale, cap, S, K, 2)),
        ], [4, 4, 4], [R, R, R])  # fmt: skip


@jit
def _load(q_map, k_map, v_map, bias_map, q, k, v, b, S, K: gl.constexpr):
    """All tiles that the consumers take, in their order."""
    CONSUMERS: gl.constexpr = K.consumers
    count = 0
    for turn in range(turns(S)):
        work = work_at(turn, S, K)
        of_keys = work.head // S.group
        mbarrier.wait(q.empty.index(0), (turn & 1) ^ 1)
        mbarrier.expect(q.full.index(0), K.consumers * q_map.block_type.nbytes)
        for i in gl.static_range(CONSUMERS):
            row = work.first + i * _ROWS
            load_async(q_map, [work.batch, work.head, row, 0], q.full.index(0), q.tiles.index(i))
        begin, end = keys_seen(work.first, S, K)
        for i in range(end - begin):
            row = (end - 1 - i) * K.block
            if K.bias:
                stage = count % K.stages
                await_empty(k, count, K.stages, k_map.block_type.nbytes + CONSUMERS * bias_map.block_type.nbytes)
                load_async(k_map, [work.batch, of_keys, row, 0], k.full.index(stage), k.tiles.index(stage))
                load_bias(b, bias_map, k.full.index(stage), stage, work.batch, work.head, work.first, row, K)
            else:
                fill(k, count, K.stages, k_map, work.batch, of_keys, row)
            fill(v, count, K.stages, v_map, work.batch, of_keys, row)
            count += 1


@jit
def _hide(s, tile, rows, S, K: gl.constexpr):
    """Scores, with -inf for hidden keys."""
    BLOCK: gl.constexpr = K.block
    cols = tile * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, s.type.layout))
    end = gl.full(rows.shape, S.n_keys, gl.int32, rows.type.layout)
    if K.right:
        end = gl.minimum(rows + (S.offset + S.right + 1), end)
    seen = cols[None, :] < end[:, None]
    if K.left:
        seen = seen & (cols[None, :] >= (rows + (S.offset - S.left))[:, None])
    return gl.where(seen, s, float("-inf"))


@jit
def _attend(
    sinks_ptr, slopes_ptr, o_map, lse_ptr, q, k, v, b, o, scale, cap, S, K: gl.constexpr, ME: gl.constexpr
):  # fmt: skip
    """The output of the ME-th _ROWS queries of each tile."""
    BLOCK: gl.constexpr = K.block
    BLOCK_V: gl.constexpr = K.block_v
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    OF_OUTPUT: gl.constexpr = gl.SliceLayout(1, OUTPUT)
    dtype: gl.constexpr = o_map.dtype
    unit = unit_of(scale, K)
    of_huge, most = huge_unit(unit), huge_from(unit)
    no_scores = gl.zeros([_ROWS, BLOCK], gl.float32, SCORES)
    if K.consumers == ME + 1:
        next_turn(ME, K.consumers)
    count = 0
    for turn in range(turns(S)):
        work = work_at(turn, S, K)
        first = work.first + ME * _ROWS
        rows = first + gl.arange(0, _ROWS, OF_ROWS)
        begin, end = keys_seen(work.first, S, K)
        low, cut = seen_by_all(first, S, K)
        slope = slope_of(slopes_ptr, work.batch, work.head, S, K)
        mbarrier.wait(q.full.index(0), turn & 1)
        queries = q.tiles.index(ME)
        full(k, count, K.stages)
        my_turn(ME)
        keys = k.tiles.index(count % K.stages).permute((1, 0))
        s = warpgroup_mma(queries, keys, no_scores, use_acc=False, is_async=True)
        next_turn(ME, K.consumers)
        s = warpgroup_mma_wait(0, (s,))
        if K.bias:
            s = with_bias(s, b, count % K.stages, scale, K, ME)
        emptied(k, count, K.stages)
        if K.softcap:
            s, _ = capped(s, scale, cap)
        if K.alibi:
            s = with_alibi(s, scale, slope, first + S.offset, (end - 1) * BLOCK)
        if K.edge:
            at_edge = (end * BLOCK > cut) | ((end - 1) * BLOCK < low)
            if at_edge:
                s = _hide(s, end - 1, rows, S, K)
        top = gl.maximum(gl.max(s, 1), LOWEST)
        rate = unit_at(top, unit, most, of_huge)
        m = origin_of(top, rate, K)
        p = gl.exp2(s * rate[:, None] - m[:, None])
        sums = gl.sum(p, 1)
        weights = gl.convert_layout(p.to(dtype), WEIGHTS)
        output = gl.zeros([_ROWS, BLOCK_V], gl.float32, OUTPUT)
        count += 1
        for i in range(1, end - begin):
            full(k, count, K.stages)
            my_turn(ME)
            keys = k.tiles.index(count % K.stages).permute((1, 0))
            s = warpgroup_mma(queries, keys, no_scores, use_acc=False, is_async=True)
            next_turn(ME, K.consumers)
            full(v, count - 1, K.stages)
            output = warpgroup_mma(weights, v.tiles.index((count - 1) % K.stages), output, is_async=True)
            s = warpgroup_mma_wait(1, (s,))
            if K.bias:
                s = with_bias(s, b, count % K.stages, scale, K, ME)
            emptied(k, count, K.stages)
            if K.softcap:
                s, _ = capped(s, scale, cap)
            if K.alibi:
                s = with_alibi(s, scale, slope, first + S.offset, (end - 1 - i) * BLOCK)
            if K.edge:
                at_edge = ((end - i) * BLOCK > cut) | ((end - 1 - i) * BLOCK < low)
                if at_edge:
                    s = _hide(s, end - 1 - i, rows, S, K)
            top = gl.maximum(top, gl.max(s, 1))
            rate = unit_at(top, unit, most, of_huge)
            new = origin_of(top, rate, K)
            decay = gl.exp2(m - new)
            m = new
            p = gl.exp2(s * rate[:, None] - m[:, None])
            sums = sums * decay + gl.sum(p, 1)
            output = warpgroup_mma_wait(0, (output,))
            emptied(v, count - 1, K.stages)
            output = output * gl.convert_layout(decay, OF_OUTPUT)[:, None]
            weights = gl.convert_layout(p.to(dtype), WEIGHTS)
            count += 1
        if not K.reuses:
            mbarrier.arrive(q.empty.index(0), count=1)
        full(v, count - 1, K.stages)
        output = warpgroup_mma(weights, v.tiles.index((count - 1) % K.stages), output, is_async=True)
        share = gl.full([_ROWS], 1.0, gl.float32, OF_ROWS)
        greatest = top * unit
        if K.sinks:
            sink = gl.load(sinks_ptr + work.head).to(gl.float32) * LOG2E
            of_sink = sink_as_origin(sink, unit, of_huge)
            base = gl.maximum(m, of_sink)
            share = gl.exp2(m - base)
            sums = sums * share + gl.exp2(of_sink - base)
            greatest = gl.where(of_sink > m, sink, greatest)
        lse = gl.where(sums == 0.0, float("-inf"), (greatest + gl.log2(sums)) * LN2)
        share = share / gl.where(sums == 0.0, 1.0, sums)
        gl.store(lse_ptr + work.number.to(gl.int64) * S.n_queries + rows, lse, mask=rows < S.n_queries)
        output = warpgroup_mma_wait(0, (output,))
        emptied(v, count - 1, K.stages)
        output = output * gl.convert_layout(share, OF_OUTPUT)[:, None]
        stores_wait(0)
        o.index(ME).store(output.to(dtype))
        fence_async_shared()
        store_async(o_map, [work.number, first, 0], o.index(ME))
        if K.reuses:
            stores_wait(0)
            mbarrier.arrive(q.empty.index(0), count=1)
    stores_wait(0)
