"""The rules that every draw from a row of logits shares: the columns of each lane, the noise, and the order of logits.

Columns are dealt in stretches of 1024. Lane i of a stretch has the 8 columns from 8 * i on in each of its four quarters
of 256. One Philox call gives the words of these four groups (`noise`). A group is drawn by log2 sum 2 ** z +
noise, and its member by noise of the member's own, where z = (x - origin) * log2(e) / temperature.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.state import LN2, LOG2E, NEG_INF, widen
from fused_softmax.ops.sampling.kernels.spec import Bounds, Draw, Filters

INF = tl.constexpr(float("inf"))
GREATEST = tl.constexpr(3.4028234663852886e38)
LANES = tl.constexpr(32)
QUARTER = tl.constexpr(256)
STRETCH = tl.constexpr(1024)
NO_COLUMN = tl.constexpr(2147483647)
UNIT = tl.constexpr(1099511627776.0)  # 2 ** 40: a weight of 1 as an integer
COLUMN_BITS, LAST_COLUMN = tl.constexpr(24), tl.constexpr(16777215)
LOWEST = tl.constexpr(-2139095041)  # the order of -inf
# As REACHED of ops/sampling/reference.py, and twice as far: fp32 numbers and weights have their own roundings.
REACHED = tl.constexpr(1 - 2.0**-21)
REACHED_BY_PROBS = tl.constexpr(1 - 2.0**-22)  # the sums of probabilities are as exact as those of the reference
GROUPS, MEMBERS = tl.constexpr(0), tl.constexpr(1)  # streams of noise
STREAMS = tl.constexpr(8)  # of a turn
# The strides of a kernel's tensors along their first dims; of a number in a tensor's place, what each draw adds to it.
LOGITS, BIAS, BITMASK, TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED, POSITION, TOKENS, KEPT_BITS = (
    tl.constexpr(i) for i in range(11)
)


@triton.jit
def number_at(ptr, stride, number, draw):
    if ptr is not None:
        return tl.load(ptr + draw * stride).to(tl.float32)
    else:
        return tl.zeros([], tl.float32) + number


@triton.jit
def integer_at(ptr, stride, low, high, draw):
    """An int64 of a draw: loaded, or made of two int32 halves, plus the stride times the draw."""
    if ptr is not None:
        return tl.load(ptr + draw * stride).to(tl.int64)
    else:
        number = ((tl.zeros([], tl.int64) + high) << 32) | ((tl.zeros([], tl.int64) + low) & 0xFFFFFFFF)
        return number + draw * stride


@triton.jit
def scratch_at(scratch_ptr, draw, at: tl.constexpr, dtype: tl.constexpr, K: tl.constexpr):
    """Where a part of a draw's scratch begins: see SampleSpec."""
    return (scratch_ptr + draw * K.scratch + at).to(tl.pointer_type(dtype), bitcast=True)


@triton.jit
def row_of(rows_ptr, draw, n_rows):
    """(the row of a draw, whether there is one); row 0 if there is none."""
    if rows_ptr is not None:
        row = tl.load(rows_ptr + draw).to(tl.int64)
        there = (row >= 0) & (row < n_rows)
        return tl.where(there, row, 0), there
    else:
        return draw, draw >= 0


@triton.jit
def draw_of(
    logits_ptr, bias_ptr, bitmask_ptr, rows_ptr, temperature_ptr, seed_ptr, position_ptr, strides, n_rows, n_cols,
    temperature, seed_low, seed_high, position_low, position_high, draw, K: tl.constexpr,
):  # fmt: skip
    """The Draw of this number."""
    row, there = row_of(rows_ptr, draw, n_rows)
    temperature = number_at(temperature_ptr, strides[TEMPERATURE], temperature, draw)
    seed = integer_at(seed_ptr, strides[SEED], seed_low, seed_high, draw)
    position = integer_at(position_ptr, strides[POSITION], position_low, position_high, draw)
    ptr = logits_ptr + row * strides[LOGITS]
    bias_ptr = bias_ptr + draw // K.bias_draws * strides[BIAS] if K.biased else ptr
    bitmask_ptr = bitmask_ptr + draw // K.bitmask_draws * strides[BITMASK] if K.bitmasked else ptr
    return Draw(
        ptr, bias_ptr, bitmask_ptr, n_cols, temperature, factor_of(temperature), seed, position,
        there & can_be(temperature), 0,
    )  # fmt: skip


@triton.jit
def at_turn(D, turn):
    """The same Draw, with the noise of another turn."""
    return Draw(
        D.ptr, D.bias_ptr, D.bitmask_ptr, D.n_cols, D.temperature, D.factor, D.seed, D.position, D.valid, turn
    )  # fmt: skip


@triton.jit
def at_temperature_1(D):
    """The same Draw at temperature 1."""
    return Draw(
        D.ptr, D.bias_ptr, D.bitmask_ptr, D.n_cols, tl.full([], 1.0, tl.float32), tl.full([], LOG2E, tl.float32),
        D.seed, D.position, D.valid, D.turn,
    )  # fmt: skip


@triton.jit
def factor_of(temperature):
    """log2(e) / temperature, never infinite, so that it gives 0 times a difference of 0."""
    factor = tl.full([], LOG2E, tl.float32) / tl.where(temperature > 0, temperature, 1.0)
    return tl.minimum(factor, GREATEST)


@triton.jit
def can_be(temperature):
    return (temperature >= 0) & (temperature < INF)


@triton.jit
def filters_of(
    top_k_ptr, top_p_ptr, min_p_ptr, strides, top_k, top_p, min_p, m, total, draw, D, K: tl.constexpr
):  # fmt: skip
    """The Filters of a draw. k is 1 for temperature 0. p is 0 if a filter has a number that is not allowed.

    p is a little less than top_p, so that a sum that misses top_p by rounding has reached it.
    """
    p = number_at(top_p_ptr, strides[TOP_P], top_p, draw)
    least_p = number_at(min_p_ptr, strides[MIN_P], min_p, draw)
    k = integer_at(top_k_ptr, strides[TOP_K], top_k, 0, draw)
    k = tl.where(D.temperature > 0, tl.where((k > 0) & (k < D.n_cols), k, 0), 1)
    p = tl.where(p < 1, p * (REACHED_BY_PROBS if K.linear else REACHED), p)
    least = tl.zeros([], tl.int32) + K.lowest
    if least_p > 0:
        least = order_of_share(tl.maximum(least_p, 1e-37) * REACHED, m, D, K)
    return Filters(k, tl.where((p > 0) & (least_p <= 1), p, 0.0), least, m, total)


@triton.jit
def order_of_share(p, m, D, K: tl.constexpr):
    """The order of the least logit that is at least p times as likely as the greatest one, m."""
    z = log2_of(p, K)
    # The approximate logarithm misses log2 p by so little that a linear term corrects it.
    log_p = (z.to(tl.float64) + (p * tl.exp2(-z) - 1.0) * LOG2E) * LN2
    least = m.to(tl.float64) + log_p * D.temperature
    x = least.to(tl.float32)
    return order_of(x) + (x.to(tl.float64) < least).to(tl.int32)


@triton.jit
def calls_of(stretch, K: tl.constexpr):
    """The numbers of the Philox calls of the lanes that read K.stretches stretches from `stretch` on."""
    return tl.arange(0, K.stretches * LANES) + stretch * LANES


@triton.jit
def column_of(call, quarter):
    """The first of the 8 columns that a call's lane has in a quarter of its stretch."""
    return call // LANES * STRETCH + quarter * QUARTER + call % LANES * 8


@triton.jit
def logits_of(D, first, there, K: tl.constexpr, WHOLE: tl.constexpr = False, PASSING: tl.constexpr = False):
    """x [lanes, 8]: 8 logits from `first` on in fp32, with their bias; -inf past the row, or where the bitmask has 0.

    there: which lanes there are. WHOLE: whether all lanes are there, and lie within the row. PASSING: with WHOLE,
    whether L2 is to drop these logits first, and to keep what else it has, such as the code and the scratch of later
    launches.
    """
    cols = first[:, None] + tl.arange(0, 8)[None, :]
    if WHOLE:
        if PASSING:
            x = widen(tl.load(D.ptr + cols, eviction_policy="evict_first"), tl.float32, K.ptx)
        else:
            x = widen(tl.load(D.ptr + cols), tl.float32, K.ptx)
        if K.linear:
            x = weight_of_prob(x)
        if K.of_probs:
            x = log_of_prob(x)
        if K.biased:
            x += tl.load(D.bias_ptr + cols).to(tl.float32)
        if K.bitmasked:
            bits = tl.load(D.bitmask_ptr + first // 8).to(tl.int32)
            x = tl.where((bits[:, None] >> tl.arange(0, 8)[None, :]) & 1 == 1, x, NEG_INF)
        return x
    else:
        # A bound in whole groups allows accesses of 16 bytes.
        if K.whole_groups:
            on = (there & (first < D.n_cols))[:, None] & (tl.arange(0, 8) >= 0)[None, :]
        else:
            on = there[:, None] & (cols < D.n_cols)
        x = widen(tl.load(D.ptr + cols, mask=on, other=NEG_INF), tl.float32, K.ptx)
        if K.linear:
            x = tl.where(on, weight_of_prob(x), NEG_INF)
        if K.of_probs:
            x = tl.where(on, log_of_prob(x), NEG_INF)
        if K.biased:
            x += tl.load(D.bias_ptr + cols, mask=on, other=0.0).to(tl.float32)
        if K.bitmasked:
            bits = tl.load(D.bitmask_ptr + first // 8, mask=there & (first < D.n_cols), other=0).to(tl.int32)
            x = tl.where((bits[:, None] >> tl.arange(0, 8)[None, :]) & 1 == 1, x, NEG_INF)
        return x


@triton.jit
def log_of_prob(p):
    """The logit of a probability; NaN if it is inf, negative or NaN."""
    return tl.log(tl.where(p < INF, p, float("nan")))


@triton.jit
def weight_of_prob(p):
    """The probability; NaN if it is inf, negative or NaN."""
    return tl.where((p >= 0) & (p < INF), p, float("nan"))


@triton.jit
def score_at(x, D, origin, K: tl.constexpr):
    """z of logits, from an origin; of probabilities (K.linear) log2 of their weight."""
    if K.linear:
        return log2_of(weight_at(x, origin, D, K), K)
    else:
        return (x - origin) * D.factor


@triton.jit
def of_score(z, D, origin, K: tl.constexpr):
    """The logit, or the probability, that has this score."""
    if K.linear:
        return tl.exp2(z) / power_for(origin)
    else:
        return origin + z / D.factor


@triton.jit
def weight_at(x, m, D, K: tl.constexpr):
    """2 ** z of logits, from their maximum m: 1 at m, 0 at -inf. A NaN or an inf gives NaN.

    Of probabilities (K.linear): these times a power of two, by which m is from 0.5 to 1.
    """
    if K.linear:
        return tl.where(x < 0, 0.0, x * power_for(m))  # -inf is past the row
    else:
        return tl.exp2((x - tl.where(m == NEG_INF, 0.0, m)) * D.factor)


@triton.jit
def weight_of_maximum(m_part, m, D, K: tl.constexpr):
    """What turns weights from the maximum of a part of a row into weights from that of the row."""
    if K.linear:
        return tl.where(m_part > 0, power_for(m) / power_for(m_part), 0.0)
    else:
        return weight_at(m_part, m, D, K)


@triton.jit
def power_for(m):
    """The power of two by which m > 0 is from 0.5 to 1; at most 2 ** 126, so a subnormal m stays less."""
    exponent = (m.to(tl.int32, bitcast=True) >> 23) & 0xFF
    power = ((253 - tl.minimum(exponent, 252)) << 23).to(tl.float32, bitcast=True)
    return tl.where(exponent > 252, power * 0.25, power)


@triton.jit
def units_of_8(weight, K: tl.constexpr):
    """The sums of rows of 8 weights, in units. Of fp32 probabilities each weight is rounded to the nearest unit.

    Others are added up in fp32, which is exact enough for logits and for results of 16 bits.
    """
    if K.linear and K.grain_bits == 0:
        return tl.sum((weight * UNIT + 0.5).to(tl.int64), axis=1)
    else:
        return (sum_of_8(weight) * UNIT).to(tl.int64)


@triton.jit
def log2_of(x, K: tl.constexpr):
    if K.ptx:
        return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@triton.jit
def noise_of(word, all_words, K: tl.constexpr):
    """-log2(-log2(1 - u)), from a word and the xor of all four words of its call: `noise` says what u is."""
    u = word.to(tl.float32) * 2.3283064365386963e-10 + (all_words ^ word).to(tl.float32) * 5.421010862427522e-20
    u = tl.minimum(u + 2.710505431213761e-20, 0.99999994)
    near_0 = u * (1.4426950408889634 + u * (0.7213475204444817 + u * (0.4808983469629878 + u * 0.36067376022224085)))
    return -log2_of(tl.where(u < 0.03125, near_0, -log2_of(1.0 - u, K)), K)


@triton.jit
def words_of(D, counter, STREAM: tl.constexpr):
    """Four words of noise for each counter."""
    return words_of_turns(D, counter, D.turn, STREAM)


@triton.jit
def words_of_turns(D, counter, turn, STREAM: tl.constexpr):
    """Four words of noise for each counter, at a turn of its own."""
    c0 = counter.to(tl.uint32)
    zero = c0 * 0
    stream = zero + turn * STREAMS + STREAM
    low = (D.position & 0xFFFFFFFF).to(tl.uint32)
    high = (D.position >> 32).to(tl.uint32)
    return tl.philox(D.seed, c0, stream, zero + low, zero + high)


@triton.jit
def sum_of_8(x):
    """The sums of rows of 8, by pairs of neighbours: one order, so one result in every layout."""
    L: tl.constexpr = x.shape[0]
    a, b = tl.split(x.reshape(L, 4, 2))
    a, b = tl.split((a + b).reshape(L, 2, 2))
    a, b = tl.split(a + b)
    return a + b


@triton.jit
def max_of_8(x):
    """The maxima of rows of 8; NaN if a row has one. A reduction would pass over it."""
    L: tl.constexpr = x.shape[0]
    a, b = tl.split(x.reshape(L, 4, 2))
    a, b = tl.split(tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL).reshape(L, 2, 2))
    a, b = tl.split(tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL))
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sums_of(a, b, K: tl.constexpr):
    """The sums of a and b, by one exchange between warps."""
    if K.ptx:
        return tl.reduce((a, b), None, add_pairs)
    else:  # the interpreter is slow at reductions that it does not know
        return tl.sum(a), tl.sum(b)


@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def key_of(score, group):
    """int64 keys above 0 that sort as scores do. Of equal scores, the lower group has the greater key."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True).to(tl.int64)
    return (ordered << 31) | (2147483647 - group).to(tl.int64)


@triton.jit
def score_of(key):
    ordered = (key >> 31).to(tl.uint32).to(tl.int32, bitcast=True)
    return tl.where(ordered < 0, ordered ^ -2147483648, ~ordered).to(tl.float32, bitcast=True)


@triton.jit
def group_of(key):
    return 2147483647 - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def order_of(x):
    """int32 orders, which sort as fp32 numbers do."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(order):
    """The number that has this order."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def whole_grains(low, high, K: tl.constexpr):
    """The orders low and high, moved apart to whole grains. A 16-bit number is alone in its grain."""
    return low >> K.grain_bits << K.grain_bits, (high + K.grain - 1) >> K.grain_bits << K.grain_bits


@triton.jit
def middle_of(low, high, K: tl.constexpr):
    """The middle of whole grains low and high, a whole grain too."""
    return low + ((high - low) >> K.grain_bits >> 1 << K.grain_bits)


@triton.jit
def code_of(x, cols):
    """int64 codes that sort as filters order logits: by value. Of equal ones the lower column has the greater code."""
    return (order_of(x).to(tl.int64) << COLUMN_BITS) | (LAST_COLUMN - cols)


@triton.jit
def kept_of(x, cols, B):
    """Which logits are within the bounds B."""
    return x >= tl.where(cols <= B.col, B.x, B.above)


@triton.jit
def member_of(D, group, origin, K: tl.constexpr, B=None):
    """The column that is drawn from a group; from those within the bounds B, if there are any."""
    cols = group * 8 + tl.arange(0, 8)
    x = tl.reshape(logits_of(D, group * 8 + tl.zeros([1], tl.int32), tl.full([1], 1, tl.int1), K), [8])
    if B is not None:
        x = tl.where(kept_of(x, cols, B), x, NEG_INF)
    words = words_of(D, cols, MEMBERS)
    z = score_at(x, D, origin, K)
    drawn = tl.where(x == NEG_INF, NEG_INF, z + noise_of(words[0], words[0] ^ words[1] ^ words[2] ^ words[3], K))
    drawn = tl.where(D.temperature > 0, drawn, x)
    best = tl.max(drawn, axis=0)
    return tl.min(tl.where(drawn == best, cols, NO_COLUMN), axis=0).to(tl.int64)


@triton.jit
def survey(D, K: tl.constexpr):
    """(maximum, how many inf, the first of them, how many NaN) of a whole row."""
    L: tl.constexpr = K.stretches * LANES
    m = tl.full([L], NEG_INF, tl.float32)
    n_inf, n_nan = tl.zeros([L], tl.int32), tl.zeros([L], tl.int32)
    at_inf = tl.full([L], NO_COLUMN, tl.int32)
    for stretch in range(0, tl.cdiv(D.n_cols, STRETCH), K.stretches):
        call = calls_of(stretch, K)
        for quarter in range(4):
            first = column_of(call, quarter)
            # + 0.0: a pass of Triton's compiler fails on the maximum of a fresh load, which it takes for another case.
            x = logits_of(D, first, call >= 0, K) + 0.0
            cols = first[:, None] + tl.arange(0, 8)[None, :]
            m = tl.maximum(m, tl.max(x, axis=1))
            n_inf += tl.sum((x == INF).to(tl.int32), axis=1)
            n_nan += tl.sum((x != x).to(tl.int32), axis=1)
            at_inf = tl.minimum(at_inf, tl.min(tl.where(x == INF, cols, NO_COLUMN), axis=1))
    return tl.max(m, axis=0), tl.sum(n_inf, axis=0), tl.min(at_inf, axis=0), tl.sum(n_nan, axis=0)


@triton.jit
def bounds_of_code(code):
    """The Bounds of all logits whose code is at least this. -inf is never within."""
    order = (code >> COLUMN_BITS).to(tl.int32)
    col = tl.full([], LAST_COLUMN, tl.int32) - (code & LAST_COLUMN).to(tl.int32)
    above = tl.maximum(value_of(order + 1), -GREATEST, propagate_nan=tl.PropagateNan.ALL)  # nothing is above inf
    return Bounds(tl.maximum(value_of(order), -GREATEST), above, col)


@triton.jit
def take_kept(x, first, there, word, all_words, D, m, B, kept_ptr, K: tl.constexpr):
    """(keys, masses in units) of groups, from what is within the bounds B.

    kept_ptr gets a byte of bits for each group.
    """
    kept = kept_of(x, first[:, None] + tl.arange(0, 8)[None, :], B)
    if kept_ptr is not None:
        byte = tl.sum(kept.to(tl.int32) << tl.arange(0, 8)[None, :], axis=1)
        tl.store(kept_ptr + first // 8, byte.to(tl.uint8), mask=there & (first < D.n_cols))
    s = sum_of_8(tl.where(kept, weight_at(x, m, D, K), 0.0))
    score = tl.where(s > 0, log2_of(s, K) + noise_of(word, all_words, K), NEG_INF)
    return key_of(score, first // 8), (s * UNIT).to(tl.int64)


@triton.jit
def logprob_of(token, mass, D, m, K: tl.constexpr):
    """log p of a token. mass: of all that is kept, in units."""
    x = logits_of(D, (token // 8 * 8).to(tl.int32) + tl.zeros([1], tl.int32), tl.full([1], 1, tl.int1), K)
    x = tl.max(tl.where(token // 8 * 8 + tl.arange(0, 8)[None, :] == token, x, NEG_INF))
    return (score_at(x, D, m, K) - log2_of(mass.to(tl.float32) / UNIT, K)) * LN2
