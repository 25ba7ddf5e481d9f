"""attention of narrow windows for sm_90: all keys that a tile of queries sees are in shared memory at once.

A program has _ROWS queries for each consumer. It reads the keys and values that these see once, and goes through some
of the heads that share them. All scores of a row are there together, so no row needs a running state:

    m = max_j z_j;  p_j = exp(z_j - m);  output = sum_j p_j v_j / sum_j p_j

Keys lie in tiles of _ROWS. The last tile ends where the window of the last query ends. So each consumer sees `pieces`
tiles, which begin one tile further for the next consumer, and it is known which of them the window cuts.
Traffic: query, output and lse once; for all heads that a program goes through, the keys and values that some of its
queries may see, in whole tiles.
"""

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
    FLOOR,
    LN2,
    LOG2E,
    LOWEST,
    await_empty,
    emptied,
    fill,
    full,
    huge_from,
    huge_unit,
    log2,
    reciprocal,
    ring,
    sink_as_origin,
    tiles_of,
    unit_at,
)
from fused_softmax.ops.attention.kernels.hopper.spec import ROWS, WindowSizes, WindowWork

_ROWS = gl.constexpr(ROWS)
SIZES = ["n_heads", "group", "n_queries", "n_keys", "offset", "head_tiles", "n_tiles", "span"]


@jit(do_not_specialize=SIZES)
def _window_hopper(
    q_map, k_map, v_map, sinks_ptr, o_map, lse_ptr,
    n_heads, group, n_queries, n_keys, offset, head_tiles, n_tiles, span, scale, K: gl.constexpr,
):  # fmt: skip
    """scale: in units of log 2. span: heads that a program goes through; n_tiles: of all of these."""
    S = WindowSizes(n_heads, group, n_queries, n_keys, offset, head_tiles, n_tiles, span)
    q = ring(K.consumers * K.stages, 1, q_map)
    k = ring(K.key_stages * K.all_pieces, K.consumers, k_map)  # only its first key_stages barriers are used
    v = tiles_of(K.key_stages * K.all_pieces, v_map)
    OF_TILES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_ROWS, K.block_v], o_map.dtype)
    o = gl.allocate_shared_memory(o_map.dtype, [K.consumers, _ROWS, K.block_v], OF_TILES)
    R: gl.constexpr = K.registers
    gl.warp_specialize([
        (_load, (q_map, k_map, v_map, q, k, v, S, K)),
        (_attend, (sinks_ptr, o_map, lse_ptr, q, k, v, o, scale, S, K, 0)),
        (_attend, (sinks_ptr, o_map, lse_ptr, q, k, v, o, scale, S, K, 1)),
    ], [4, 4], [R, R])  # fmt: skip


@jit
def _turns(S):
    """How many tiles this program takes."""
    programs = gl.num_programs(0)
    return (S.n_tiles - gl.program_id(0) + programs - 1) // programs


@jit
def _work_at(turn, S, K: gl.constexpr):
    """(batch, first head, first query, first key) of this program's turn. Keys before 0 are read as zeros."""
    tile = gl.program_id(0) + turn * gl.num_programs(0)
    number, place = tile // S.head_tiles, tile % S.head_tiles
    spans = S.n_heads // S.span
    first = place * K.block_m
    end = first + K.block_m + S.offset + K.after
    return number // spans, number % spans * S.span, first, end - K.all_pieces * _ROWS


@jit
def _load(q_map, k_map, v_map, q, k, v, S, K: gl.constexpr):
    """All tiles that the consumers take, in their order."""
    CONSUMERS: gl.constexpr = K.consumers
    PIECES: gl.constexpr = K.all_pieces
    BYTES: gl.constexpr = PIECES * (k_map.block_type.nbytes + v_map.block_type.nbytes)
    count = 0
    for turn in range(_turns(S)):
        batch, head, first, start = _work_at(turn, S, K)
        of_keys = head // S.group
        stage = turn % K.key_stages
        await_empty(k, turn, K.key_stages, BYTES)
        for piece in gl.static_range(PIECES):
            at = stage * PIECES + piece
            row = start + piece * _ROWS
            load_async(k_map, [batch, of_keys, row, 0], k.full.index(stage), k.tiles.index(at))
            load_async(v_map, [batch, of_keys, row, 0], k.full.index(stage), v.index(at))
        for i in range(S.span):
            for each in gl.static_range(CONSUMERS):
                fill(q, count, CONSUMERS * K.stages, q_map, batch, head + i, first + each * _ROWS)
                count += 1


@jit
def _attend(sinks_ptr, o_map, lse_ptr, q, k, v, o, scale, S, K: gl.constexpr, ME: gl.constexpr):
    """The output of the ME-th _ROWS queries of each tile."""
    count = ME
    for turn in range(_turns(S)):
        batch, head, first, start = _work_at(turn, S, K)
        own = WindowWork(batch * S.n_heads + head, head, first + ME * _ROWS, start + ME * _ROWS)
        keys = turn % K.key_stages * K.all_pieces + ME
        full(k, turn, K.key_stages)
        if (own.start >= 0) & (own.start + K.pieces * _ROWS <= S.n_keys):
            _go_through(sinks_ptr, o_map, lse_ptr, q, k, v, o, scale, count, keys, own, S, K, ME, False)
        else:
            _go_through(sinks_ptr, o_map, lse_ptr, q, k, v, o, scale, count, keys, own, S, K, ME, True)
        count += S.span * K.consumers
        emptied(k, turn, K.key_stages)
    stores_wait(0)


@jit
def _go_through(
    sinks_ptr, o_map, lse_ptr, q, k, v, o, scale, count, keys, own, S, K: gl.constexpr, ME: gl.constexpr,
    EDGE: gl.constexpr,
):  # fmt: skip
    """_ROWS queries of `span` heads. keys: which tile of keys comes first.

    EDGE: whether some of these keys do not exist.
    """
    BLOCK_V: gl.constexpr = K.block_v
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _ROWS, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    OF_OUTPUT: gl.constexpr = gl.SliceLayout(1, OUTPUT)
    PIECES: gl.constexpr = K.pieces
    TILES: gl.constexpr = K.consumers * K.stages
    dtype: gl.constexpr = o_map.dtype
    no_scores = gl.zeros([_ROWS, _ROWS], gl.float32, SCORES)
    of_huge, most = huge_unit(scale), huge_from(scale)
    rows = own.first + gl.arange(0, _ROWS, OF_ROWS)
    for i in range(S.span):
        at = count + i * K.consumers
        full(q, at, TILES)
        queries = q.tiles.index(at % TILES)
        under_way = ()
        for piece in gl.static_range(PIECES):
            tile = k.tiles.index(keys + piece).permute((1, 0))
            under_way = under_way + (warpgroup_mma(queries, tile, no_scores, use_acc=False, is_async=True),)  # noqa: RUF005
        products = warpgroup_mma_wait(0, under_way)
        if PIECES == 1:
            products = (products,)
        emptied(q, at, TILES)
        top = gl.full([_ROWS], LOWEST, gl.float32, OF_ROWS)
        scores = ()
        for piece in gl.static_range(PIECES):
            s = _hidden(products[piece], own.start + piece * _ROWS, S, piece, K, EDGE)
            scores = scores + (s,)  # noqa: RUF005  the compiler has no unpacking
            top = gl.maximum(top, gl.max(s, 1))
        rate = unit_at(top, scale, most, of_huge)
        m, greatest = gl.maximum(top * rate, FLOOR), top * scale
        sums = gl.zeros([_ROWS], gl.float32, OF_ROWS)
        if K.sinks:
            sink = gl.load(sinks_ptr + own.head + i).to(gl.float32) * LOG2E
            of_sink = sink_as_origin(sink, scale, of_huge)
            greatest = gl.where(of_sink > m, sink, greatest)
            m = gl.maximum(m, of_sink)
            sums += gl.exp2(of_sink - m)
        output = gl.zeros([_ROWS, BLOCK_V], gl.float32, OUTPUT)
        for piece in gl.static_range(PIECES):
            p = gl.exp2(scores[piece] * rate[:, None] - m[:, None])
            sums += gl.sum(p, 1)
            weights = gl.convert_layout(p.to(dtype), WEIGHTS)
            output = warpgroup_mma(weights, v.index(keys + piece), output, use_acc=piece != 0, is_async=True)
        lse = gl.where(sums == 0.0, float("-inf"), (greatest + log2(sums)) * LN2)
        share = reciprocal(gl.where(sums == 0.0, 1.0, sums))
        gl.store(lse_ptr + (own.number + i).to(gl.int64) * S.n_queries + rows, lse, mask=rows < S.n_queries)
        output = warpgroup_mma_wait(0, (output,))
        output = output * gl.convert_layout(share, OF_OUTPUT)[:, None]
        stores_wait(0)
        o.index(ME).store(output.to(dtype))
        fence_async_shared()
        store_async(o_map, [own.number + i, own.first, 0], o.index(ME))


@jit
def _hidden(s, first, S, PIECE: gl.constexpr, K: gl.constexpr, EDGE: gl.constexpr):
    """Scores, with -inf for hidden keys. PIECE: which of a consumer's tiles of keys it is. first: its first key."""
    BELOW: gl.constexpr = (
        K.pieces - PIECE - 1
    ) * _ROWS  # keys from this tile's first to the last that the first query sees
    rows = gl.arange(0, _ROWS, gl.SliceLayout(1, s.type.layout))
    cols = gl.arange(0, _ROWS, gl.SliceLayout(0, s.type.layout))
    if K.cut_left > PIECE:
        s = gl.where(cols[None, :] > (rows + (BELOW - K.width))[:, None], s, float("-inf"))
    if K.pieces == PIECE + 1:
        s = gl.where(cols[None, :] > rows[:, None], float("-inf"), s)
    if EDGE:
        keys = first + cols
        s = gl.where(((keys >= 0) & (keys < S.n_keys))[None, :], s, float("-inf"))
    return s
