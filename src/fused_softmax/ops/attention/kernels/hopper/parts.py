"""What attention's kernels for sm_90 share: which tile a program takes, rings of tiles, and who multiplies when."""

from fused_softmax.ops.attention.kernels.hopper.gluon_names import (
    constexpr_function,
    fence_async_shared,
    gl,
    jit,
    load_async,
    mbarrier,
    store_async,
    stores_wait,
)
from fused_softmax.ops.attention.kernels.hopper.spec import ROW_VECTOR, ROWS, Ring, Work
from fused_softmax.ops.attention.kernels.spec import GRANULE

LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-(2.0**100))  # the start of a maximum: finite, so that -inf - -inf never arises
FLOOR = gl.constexpr(-(2.0**126))  # below all maxima: max(product, FLOOR) is not fused into a subtraction, unrounded
_HUGE = gl.constexpr(2.0**28)  # as `scores.HUGE`
_GRANULE = gl.constexpr(GRANULE)
_ROWS = gl.constexpr(ROWS)
_VECTOR = gl.constexpr(ROW_VECTOR)
_FIRST_NAMED = gl.constexpr(9)  # the first free barrier of a program; Triton takes 0, 1, and 2 + a partition's number


@jit
def turns(S):
    """How many tiles this program takes."""
    programs = gl.num_programs(0)
    whole = S.n_tiles // programs
    return whole + (_place(whole, S) < S.n_tiles - whole * programs).to(gl.int32)


@jit
def _place(turn, S):
    """The place of this program among those of a turn."""
    return (gl.program_id(0) + turn * S.shift) % gl.num_programs(0)


@jit
def work_at(turn, S, K: gl.constexpr):
    """The tile of this program's turn. Tiles of a head are side by side, because they read the same from L2.

    If tiles differ in how much they see, every second head goes backwards, and the plan's shift makes shares equal.
    Batches that share a bias come one after another, so that L2 has it.
    """
    tile = turn * gl.num_programs(0) + _place(turn, S)
    number, place = tile // S.head_tiles, tile % S.head_tiles
    heads = S.n_heads
    if K.of_keys:
        heads = S.heads
    if K.right or K.left:
        backwards = (S.n_tiles // S.head_tiles - 1 - number) % 2 == (1 if K.of_keys else 0)
        place = gl.where(backwards, S.head_tiles - 1 - place, place)
    batch, head = number // heads, number % heads
    if K.bias and not K.bias_batches:
        n_batches = S.n_tiles // S.head_tiles // heads
        batch, head = number % n_batches, number // n_batches
        number = batch * heads + head
    if K.of_keys:
        head += S.first_head
        number = batch * (S.n_heads // S.group) + head
    return Work(number, batch, head, place * K.block_m)


@jit
def keys_seen(first, S, K: gl.constexpr):
    """(begin, end): the tiles of keys that some of block_m queries from `first` on see.

    If they see none, it is one tile, which is hidden.
    """
    last = gl.minimum(first + K.block_m, S.n_queries) - 1
    begin, end = 0, S.n_keys
    if K.left:
        begin = gl.maximum(first + S.offset - S.left, 0) // K.block
    if K.right:
        end = gl.minimum(last + S.offset + S.right + 1, S.n_keys)
    return begin, gl.maximum(gl.cdiv(gl.maximum(end, 0), K.block), begin + 1)


@jit
def queries_that_see(first, S, K: gl.constexpr):
    """(begin, end): tiles of queries that see some of block_m keys from `first` on; none if no query does."""
    last = gl.minimum(first + K.block_m, S.n_keys) - 1
    begin, end = 0, S.n_queries
    if K.right:
        begin = gl.maximum(first - S.offset - S.right, 0) // K.block
    if K.left:
        end = gl.maximum(gl.minimum(last - S.offset + S.left + 1, S.n_queries), 0)
    return begin, gl.maximum(gl.cdiv(end, K.block), begin)


@jit
def seen_by_all(first, S, K: gl.constexpr):
    """(low, cut): all of _ROWS queries from `first` on see all keys from low on and before cut."""
    cut, low = S.n_keys, 0
    if K.right:
        cut = gl.minimum(first + S.offset + S.right + 1, cut)
    if K.left:
        low = first + (_ROWS - 1) + S.offset - S.left
    return low, cut


@jit
def rows_of_head(S):
    """How many floats a row has that `_delta` stores for a head."""
    return gl.cdiv(S.n_queries, _VECTOR) * _VECTOR


@jit
def state_at(rows_ptr, number, queries, padded):
    """(lse, delta) of queries of a head; inf and 0 beyond the padded rows."""
    at = number.to(gl.int64) * 2 * padded + queries
    lse = gl.load(rows_ptr + at, mask=queries < padded, other=float("inf"))
    delta = gl.load(rows_ptr + at + padded, mask=queries < padded, other=0.0)
    return lse, delta


@jit
def hidden_queries(first, begin, end, S, K: gl.constexpr):
    """(high, low): the tiles of queries from high to low see all of _ROWS keys from `first` on."""
    high, low = begin, end
    if K.right:
        high = gl.minimum(gl.maximum(gl.cdiv(first + (_ROWS - 1) - S.offset - S.right, K.block), begin), end)
    if K.left:
        low = gl.minimum(gl.maximum((first - S.offset + S.left + 1) // K.block, high), end)
    return high, low


@jit
def visible_by_keys(p, key, query, S, K: gl.constexpr):
    """Weights [keys from `key` on, queries from `query` on], 0 where a key is hidden from a query."""
    keys = key + gl.arange(0, _ROWS, gl.SliceLayout(1, p.type.layout))
    queries = query + S.offset + gl.arange(0, K.block, gl.SliceLayout(0, p.type.layout))
    if K.right:
        p = gl.where(keys[:, None] <= (queries + S.right)[None, :], p, 0.0)
    if K.left:
        p = gl.where(keys[:, None] >= (queries - S.left)[None, :], p, 0.0)
    return p


@jit
def visible_by_queries(p, first, queries, S, K: gl.constexpr):
    """Weights [queries, keys from `first` on], 0 where a key is hidden from a query."""
    keys = first + gl.arange(0, K.block, gl.SliceLayout(0, p.type.layout))
    if K.ragged:
        p = gl.where((keys < S.n_keys)[None, :], p, 0.0)
    if K.right:
        p = gl.where(keys[None, :] <= (queries + (S.offset + S.right))[:, None], p, 0.0)
    if K.left:
        p = gl.where(keys[None, :] >= (queries + (S.offset - S.left))[:, None], p, 0.0)
    return p


@jit
def tiles_of(N: gl.constexpr, tile_map):
    """Room for N tiles as tile_map loads them."""
    SHAPE: gl.constexpr = [tile_map.block_shape[2], tile_map.block_shape[3]]
    return _tiles(N, SHAPE, tile_map.dtype)


@jit
def _tiles(N: gl.constexpr, SHAPE: gl.constexpr, dtype: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE, dtype)
    return gl.allocate_shared_memory(dtype, [N, SHAPE[0], SHAPE[1]], LAYOUT)


@jit
def ring(N: gl.constexpr, READERS: gl.constexpr, tile_map):
    """A Ring of N tiles as tile_map loads them. READERS of them have to say that a tile is empty again."""
    SHAPE: gl.constexpr = [tile_map.block_shape[2], tile_map.block_shape[3]]
    return ring_of(N, READERS, SHAPE, tile_map.dtype)


@jit
def ring_of(N: gl.constexpr, READERS: gl.constexpr, SHAPE: gl.constexpr, dtype: gl.constexpr):
    """`ring` with tiles of a given shape."""
    full = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(empty.index(i), READERS)
    return Ring(_tiles(N, SHAPE, dtype), full, empty)


@jit
def await_empty(of, count, N: gl.constexpr, BYTES: gl.constexpr):
    """Wait until the count-th tile of a ring of N may be filled. BYTES in all will come."""
    i = count % N
    mbarrier.wait(of.empty.index(i), (count // N & 1) ^ 1)
    mbarrier.expect(of.full.index(i), BYTES)


@jit
def fill(into, count, N: gl.constexpr, tile_map, batch, head, row):
    """Fill the count-th tile of a ring of N, once it is empty, with rows from `row` on."""
    await_empty(into, count, N, tile_map.block_type.nbytes)
    i = count % N
    load_async(tile_map, [batch, head, row, 0], into.full.index(i), into.tiles.index(i))


@jit
def load_queries(q_map, do_map, q, do, turn, work, K: gl.constexpr):
    """Load queries and dO of each consumer. The first barrier of q is for all of them."""
    CONSUMERS: gl.constexpr = K.consumers
    BYTES: gl.constexpr = CONSUMERS * (q_map.block_type.nbytes + do_map.block_type.nbytes)
    await_empty(q, turn, 1, BYTES)
    for each in gl.static_range(CONSUMERS):
        first = work.first + each * _ROWS
        load_async(q_map, [work.batch, work.head, first, 0], q.full.index(0), q.tiles.index(each))
        load_async(do_map, [work.batch, work.head, first, 0], q.full.index(0), do.index(each))


@jit
def send(x, tile, tile_map, number, first):
    """Store rows of a head's result from `first` on.

    They go by way of a tile of shared memory, which may be filled again afterwards.
    """
    tile.store(x.to(tile_map.dtype))
    fence_async_shared()
    store_async(tile_map, [number, first, 0], tile)
    stores_wait(0)


@jit
def biases(like, bias_map, K: gl.constexpr):
    """Room for a tile of the bias for each consumer, beside each tile of a ring.

    Without a bias, it is something that is never read.
    """
    if K.bias:
        return tiles_of(K.stages * K.consumers, bias_map)
    else:
        return like.tiles


@jit
def load_bias(b, bias_map, full, stage, batch, head, row, col, K: gl.constexpr):
    """Load the bias of each consumer, whose rows are queries, or keys if K.of_keys."""
    CONSUMERS: gl.constexpr = K.consumers
    ROWS_OF_ONE: gl.constexpr = bias_map.block_shape[3 if K.of_keys else 2]
    for each in gl.static_range(CONSUMERS):
        if K.of_keys:
            at = [batch * K.bias_batches, head * K.bias_heads, row, col + each * ROWS_OF_ONE]
        else:
            at = [batch * K.bias_batches, head * K.bias_heads, row + each * ROWS_OF_ONE, col]
        load_async(bias_map, at, full, b.index(stage * CONSUMERS + each))


@jit
def with_bias(s, b, stage, scale, K: gl.constexpr, ME: gl.constexpr):
    """Scaled scores plus the bias."""
    tile = b.index(stage * K.consumers + ME)
    if K.of_keys:
        tile = tile.permute((1, 0))
    return s * scale + tile.load(s.type.layout).to(gl.float32)


@jit
def slope_of(slopes_ptr, batch, head, S, K: gl.constexpr):
    """The slope of a head, in units of log 2; 0 without slopes."""
    if K.alibi:
        return gl.load(slopes_ptr + batch * (K.slope_batches * S.n_heads) + head).to(gl.float32) * LOG2E
    else:
        return 0.0


@jit
def with_alibi(s, scale, slope, row, col):
    """Scaled scores less slope times distance, in units of log 2.

    row, col: places of the first query and the first key, or of the first key and the first query.
    """
    rows = (row + gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))).to(gl.float32)
    cols = (col + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))).to(gl.float32)
    return s * scale - slope * gl.abs(rows[:, None] - cols[None, :])


@jit
def capped(s, rate, cap):
    """(cap tanh(x), the derivative of tanh(x)), where s rate is 2 x in units of log 2.

    tanh(x) = 1 - 2 r, and its derivative is 4 (r - r ** 2), where r = 1 / (exp(2 x) + 1).
    """
    r = reciprocal(gl.exp2(s * rate) + 1.0)
    return cap - (2.0 * cap) * r, 4.0 * (r - r * r)


@jit
def scores_of(s, b, stage, slope, row, col, rate, cap, K: gl.constexpr, ME: gl.constexpr):
    """(scores, the factor that turns them into units of log 2, the derivative of the cap), from products of q and k.

    row, col: as `with_alibi` takes them.
    """
    unit = unit_of(rate, K)
    if K.bias:
        z = with_bias(s, b, stage, rate, K, ME)
        return z, unit, z
    elif K.alibi:
        z = with_alibi(s, rate, slope, row, col)
        return z, unit, z
    elif K.softcap:
        z, derivative = capped(s, rate, cap)
        return z, unit, derivative
    else:
        return s, unit, s


@jit
def unit_of(rate, K: gl.constexpr):
    """The factor that turns scores, as `scores_of` gives them, into units of log 2.

    rate: that factor for products, if there is no bias, softcap or slope.
    """
    if K.bias:
        return gl.to_tensor(LOG2E)
    elif K.softcap or K.alibi:
        return gl.to_tensor(1.0)
    else:
        return rate


@jit
def huge_unit(unit):
    """The least power of two that is at least unit."""
    return ((unit.to(gl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(gl.float32, bitcast=True)


@jit
def huge_from(unit):
    """The maximum from which on a row's scores are multiplied by `huge_unit`: kernels/scores.py says why."""
    return (1.0 / unit) * _HUGE


@jit
def unit_at(m, unit, most, of_huge):
    """The factor that turns scores of a row with maximum m into units of log 2; of_huge from `most` on."""
    return gl.where(gl.abs(m) > most, of_huge, unit)


@jit
def origin_of(top, rate, K: gl.constexpr):
    """top * rate, rounded before anything is subtracted from it, in the way that was faster for K's tiles."""
    if K.block_d == 64 and K.consumers == 2:
        return gl.maximum(top * rate, FLOOR)
    else:
        return gl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [top, rate], dtype=gl.float32, is_pure=True, pack=1
        )


@jit
def sink_as_origin(sink, unit, of_huge):
    """A sink in units of log 2, scaled as `unit_at` scales a row's maximum."""
    return gl.where(gl.abs(sink) > _HUGE, sink * (of_huge / unit), sink)


@jit
def record_of(record_ptr, number, S):
    """Where `_delta` has recorded a head's queries."""
    return record_ptr + number.to(gl.int64) * (3 * S.n_queries)


@jit
def own_tiles(n_tiles, coarse_ptr, K: gl.constexpr):
    """How many tiles a kernel of dK and dV has: none if `coarse` says that the other kernel computes.

    One kernel takes the recorded maxima, for calls in which some lse is coarse. The other one saves their registers.
    """
    return gl.where((gl.load(coarse_ptr) != 0) == K.recorded, n_tiles, 0)


@jit
def is_coarse(lse):
    """Whether lse of a query is the mark of `_delta` that it has recorded the maximum and the log of the sum."""
    return lse.to(gl.int32, bitcast=True) == -(2**31)  # -0, which no lse is


@jit
def less_lse(z, unit, lse, record, first, S, K: gl.constexpr):
    """Scores [keys, queries] less what `_delta` has recorded of queries from `first` on, where their lse is coarse.

    lse: a tile of shared memory. unit: the factor that turns the scores into units of log 2.
    """
    OF_QUERIES: gl.constexpr = gl.SliceLayout(0, z.type.layout)
    queries = gl.arange(0, K.block, OF_QUERIES)
    coarse = is_coarse(lse.load(OF_QUERIES))
    record += S.n_queries + first  # so that a thread computes one address for all
    m = (gl.load(record + queries, mask=coarse, other=0.0) * _recorded_unit(K))[None, :]
    z = z - m
    z = gl.where(z > gl.where(m == 0.0, float("inf"), gl.abs(m) * -(2.0**-22)), 0.0, z)  # as `less_maximum` has it
    record += S.n_queries
    return z - (gl.load(record + queries, mask=coarse, other=0.0) * (1.0 / unit))[None, :]


@jit
def exponents_of(lse, unit, record, queries, S, K: gl.constexpr):
    """(rate, origin) of queries: weights are exp2(score rate - origin) times `factor_of`, without a rounded maximum.

    lse: in units of log 2. unit: the factor that turns scores into these.
    """
    coarse = is_coarse(lse)
    m = gl.load(record + S.n_queries + queries, mask=coarse, other=0.0) * _recorded_unit(K)
    rate = unit_at(m, unit, huge_from(unit), huge_unit(unit))
    return rate, gl.where(coarse, m * rate, lse)


@jit
def factor_of(rows_ptr, number, padded, unit, record, queries, S, K: gl.constexpr):
    """What `exponents_of` leaves out of weights: the sum, if lse is coarse, and what rounding the origin has lost.

    It is computed after a loop over keys, so that no register holds it meanwhile.
    """
    lse, _ = state_at(rows_ptr, number, queries, padded)
    coarse = is_coarse(lse)
    m = gl.load(record + S.n_queries + queries, mask=coarse, other=0.0) * _recorded_unit(K)
    log_sum = gl.load(record + 2 * S.n_queries + queries, mask=coarse, other=0.0)
    rate = unit_at(m, unit, huge_from(unit), huge_unit(unit))
    return gl.where(coarse, gl.exp2(-log_sum - gl.fma(m, rate, -(m * rate))), 1.0)


@constexpr_function
def _recorded_unit(K):
    """The factor that turns recorded maxima into the units of scores here. With a cap, these are units of log 2."""
    return 1.4426950408889634 if K.softcap else 1.0


@jit
def reciprocal(x):
    """1 / x, to 1 unit in the last place. A division takes five instructions more."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@jit
def log2(x):
    """log2(x), with an error of 2 ** -22 at most, absolute near 1.

    One to 1 unit in the last place takes twenty instructions more.
    """
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@jit
def full(of, count, N: gl.constexpr):
    """Wait for the count-th tile of a ring of N."""
    mbarrier.wait(of.full.index(count % N), count // N & 1)


@jit
def emptied(of, count, N: gl.constexpr):
    mbarrier.arrive(of.empty.index(count % N), count=1)


@constexpr_function
def _named(operation, number):
    return f"{{ bar.{operation} {number}, 256; mov.b32 $0, $1; }}"


@jit
def _bar(OPERATION: gl.constexpr, NUMBER: gl.constexpr):
    ONE_EACH: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    ASM: gl.constexpr = _named(OPERATION, NUMBER)
    none = gl.full([128], 0, gl.int32, ONE_EACH)
    gl.inline_asm_elementwise(ASM, "=r,r", [none], dtype=gl.int32, is_pure=False, pack=1)


@jit
def my_turn(ME: gl.constexpr):
    """Wait until the consumer before this one has issued its products."""
    _bar("sync", _FIRST_NAMED + ME)


@jit
def next_turn(ME: gl.constexpr, CONSUMERS: gl.constexpr):
    _bar("arrive", _FIRST_NAMED + (ME + 1) % CONSUMERS)
