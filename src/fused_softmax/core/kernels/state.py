"""The state (m, s) of a row, where m is its maximum and s = sum exp(x - m), and the results that follow from it.

States merge: the states of two parts of a row give the state of the row (Milakov and Gimelshein, "Online normalizer
calculation for softmax", arXiv 1805.02867).
"""

import triton
import triton.language as tl

NEG_INF = tl.constexpr(-float("inf"))
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
GREATEST = tl.constexpr(3.4028234663852886e38)
GREATEST_FP64 = tl.constexpr(1.7976931348623157e308)
NO_COLUMN = tl.constexpr(2147483647)
HALVES = tl.constexpr("{ .reg .b32 t; shl.b32 t, $2, 16; mov.b32 $0, t; and.b32 t, $2, 0xffff0000; mov.b32 $1, t; }")


@triton.jit
def widen(x, CAST: tl.constexpr, PTX: tl.constexpr = False):
    """x rounded to the dtype CAST, in the dtype of the arithmetic: fp64 for fp64, fp32 for all else.

    PTX: bf16 takes one instruction an element. The compiler would take two for the upper element of a register.
    """
    if CAST.is_fp64():
        return x.to(tl.float64)
    elif PTX and x.dtype.is_bf16() and (CAST.is_bf16() or CAST.is_fp32()):
        return tl.inline_asm_elementwise(HALVES, "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2)
    else:
        return x.to(CAST).to(tl.float32)


@triton.jit
def load_exact(ptr, mask, other, K: tl.constexpr):
    """What is at ptr where `mask`, and `other` elsewhere; both are None if nothing is masked. fp8 becomes fp16.

    `other` comes after the conversion, because no 8-bit format has all its values.
    """
    if K.fp8 is None:
        return tl.load(ptr, mask=mask, other=other)
    elif mask is None:
        return of_fp8(tl.load(ptr), K)
    else:
        x = of_fp8(tl.load(ptr, mask=mask, other=0), K)
        return tl.where(mask, x, (tl.zeros([], tl.float32) + other).to(tl.float16))


@triton.jit
def of_fp8(x, K: tl.constexpr):
    """The fp16 numbers that bytes of fp8 stand for, exactly.

    An e5m2 number is the upper byte of an fp16 number. The exponent bias of e4m3 is 8 less than that of fp16.
    """
    if K.converts_fp8:
        return x.to(K.fp8, bitcast=True).to(tl.float16)
    elif K.fp8 == tl.float8e5:
        return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    else:
        bits = (x.to(tl.int8, bitcast=True).to(tl.int16) << 7) & -16385  # without the second copy of the sign
        y = bits.to(tl.float16, bitcast=True) * 256.0
        return tl.where(tl.abs(y) == 480.0, float("nan"), y)  # the code of 480 is NaN: the greatest number is 448


@triton.jit
def origin_of(m, PTX: tl.constexpr, SUBTRACT_FIRST: tl.constexpr = False):
    """(scale, base) with exp(x - m) = 2 ** (x * scale - base), up to a factor that every x shares; base 0 if m is -inf.

    With m = -inf, exp(-inf - -inf) would be NaN, while any finite base gives exact zeros.
    On NVIDIA the exponent is one fused multiply-add, and `base` is m * scale, rounded. The row's s has the same error
    as a factor, so the error cancels. It must not overflow, though. From 2 ** 30 on, scale is 1 and m * scale is exact:
    fp32 numbers are 128 apart there, so exp is 0 or 1 in any base. Elsewhere, and with SUBTRACT_FIRST, base is m. That
    takes one more instruction for every x, but no register for the scale of every m.
    """
    finite = tl.where(m == NEG_INF, 0.0, m)
    if PTX and not SUBTRACT_FIRST and m.dtype == tl.float32:
        scale = tl.where(tl.abs(finite) < 1073741824.0, LOG2E, 1.0)
        # No multiplication: fused into a later subtraction, it would not be the rounded product that s was summed with.
        base = tl.fma(finite, scale, 0.0)
        return scale, base
    else:
        return finite, finite  # scale is not used


@triton.jit
def exp_at(x, scale, base, PTX: tl.constexpr, SUBTRACT_FIRST: tl.constexpr = False):
    """exp(x - m) by the (scale, base) of m; fp32 or fp64."""
    if PTX and SUBTRACT_FIRST:
        return tl.exp2((x - base) * LOG2E)
    elif PTX and x.dtype == tl.float32:
        return tl.exp2(tl.fma(x, scale, -base))
    else:
        return natural_exp(x - base, PTX)


@triton.jit
def natural_exp(x, PTX: tl.constexpr):
    """exp(x); on NVIDIA subnormal results are 0, which saves three instructions."""
    if PTX and x.dtype == tl.float32:
        return tl.exp2(x * LOG2E)
    else:
        return tl.exp(x)


@triton.jit
def weight_of(m_part, m, PTX: tl.constexpr):
    """exp(m_part - m), for m_part <= m: the factor of a part's s in the row. NaN if m is +inf or NaN.

    If m is -inf, every part is empty, and its s is 0 or NaN. The factor is then 1, so that s stays as it is.
    """
    if PTX and m.dtype == tl.float32:
        scale_part, base_part = origin_of(m_part, PTX)
        scale, base = origin_of(m, PTX)
        weight = tl.where((scale_part == scale) & (m_part != NEG_INF), tl.exp2(base_part - base), 0.0)
        weight = tl.where(m == float("inf"), float("nan"), weight)
    else:
        weight = exp_at(m_part, m, m, False)
    return tl.where(m == NEG_INF, 1.0, weight)


@triton.jit
def merge(m_a, s_a, m_b, s_b, PTX: tl.constexpr):
    """The state of two parts of a row together. s carries a NaN, so m may be taken without it."""
    m = tl.maximum(m_a, m_b)
    return m, s_a * weight_of(m_a, m, PTX) + s_b * weight_of(m_b, m, PTX)


@triton.jit
def merge_score(m, s, top, z, PTX: tl.constexpr):
    """The state of a part of a row and one more score z. top: z, or `finite_top` of it."""
    scale, base = origin_of(top, PTX)
    return merge(m, s, top, exp_at(z, scale, base, PTX), PTX)


@triton.jit
def hold(x, PTX: tl.constexpr):
    """x, hidden from the compiler.

    2-byte values then wait packed in registers, and not as fp32 copies that were made for an earlier use.
    """
    if PTX and x.dtype.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    else:
        return x


@triton.jit
def hold_all(pieces, PTX: tl.constexpr):
    held = ()
    for p in tl.static_range(len(pieces)):
        held = held + (hold(pieces[p], PTX),)  # noqa: RUF005  the compiler has no unpacking
    return held


@triton.jit
def with_sink(m, s, sink, K: tl.constexpr):
    """The state of a whole row, in which its sink counts if K.sink."""
    if K.sink:
        m, s = merge_score(m, s, sink, sink, K.ptx)
    return m, s


@triton.jit
def scores_of(x, factor, K: tl.constexpr, PTX: tl.constexpr = False):
    """z: a piece as the arithmetic sees it, rounded to the compute dtype and then multiplied by the row's factor."""
    z = widen(x, K.compute_dtype, PTX)
    if K.scale_on_use:
        z *= factor
    return z


@triton.jit
def rounded_product(a, b):
    """a * b, rounded before it is summed.

    Fused into the first addition of a sum, it would make the sum depend on how lanes are laid out.
    """
    return tl.fma(a, b, 0.0)


@triton.jit
def max_of(pieces, factor, K: tl.constexpr):
    """The maximum of the scores of all pieces along the axis that is reduced."""
    top = scores_of(pieces[0], factor, K)
    for p in tl.static_range(1, len(pieces)):
        top = tl.maximum(top, scores_of(pieces[p], factor, K))
    return tl.max(top, axis=K.axis)


@triton.jit
def sum_exp_of(pieces, scale, base, factor, K: tl.constexpr):
    """sum exp(z - m) of all pieces along that axis, by the (scale, base) of m as it broadcasts to them."""
    total = exp_at(scores_of(pieces[0], factor, K, K.unpack), scale, base, K.ptx, K.subtract_first)
    for p in tl.static_range(1, len(pieces)):
        total += exp_at(scores_of(pieces[p], factor, K, K.unpack), scale, base, K.ptx, K.subtract_first)
    return tl.sum(total, axis=K.axis)


@triton.jit
def rounding_of(m, PTX: tl.constexpr):
    """The exponent of 2 that m itself gets: what rounding has taken from the base of `origin_of`.

    2 to this power is a factor of s.
    """
    if PTX and m.dtype == tl.float32:
        scale, base = origin_of(m, PTX)
        return tl.where((scale == LOG2E) & (m != NEG_INF), tl.fma(m, scale, -base), 0.0)
    else:
        return 0.0


@triton.jit
def log_sum_of(m, s, PTX: tl.constexpr):
    """log sum exp(z - m), from s without the rounding of `origin_of`'s base; 0 if m alone counts."""
    if PTX and m.dtype == tl.float32:
        rounding = rounding_of(m, PTX)
        return tl.where(s == tl.exp2(rounding), 0.0, tl.log(s) - rounding * LN2)
    else:
        return tl.log(s)


@triton.jit
def reciprocal_of(m, s, PTX: tl.constexpr):
    """1 / s. If m alone counts, it is the next greater number.

    exp(m - m) over s is then 1 or more, however base was rounded.
    """
    inv_s = 1.0 / s
    if PTX and m.dtype == tl.float32:
        above = (inv_s.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
        inv_s = tl.where(s == tl.exp2(rounding_of(m, PTX)), above, inv_s)
    return inv_s


@triton.jit
def result_of(z, m, s, K: tl.constexpr):
    """softmax of scores, or its logarithm (K.log), by the state of their row, in the dtype of the result."""
    rounds: tl.constexpr = K.ptx and not K.subtract_first
    if K.log:
        y = z - m - log_sum_of(m, s, rounds)
        if K.zero_masked_rows:
            y = tl.where(s == 0.0, NEG_INF, y)
    else:
        exact: tl.constexpr = rounds and K.cast_dtype.is_fp32()  # 16 bits round such a result to 1 anyway
        inv_s = reciprocal_of(m, s, exact)
        if K.zero_masked_rows:
            inv_s = tl.where(s == 0.0, 0.0, inv_s)
        scale, base = origin_of(m, K.ptx, K.subtract_first)
        y = exp_at(z, scale, base, K.ptx, K.subtract_first) * inv_s
        if exact:
            y = tl.minimum(y, 1.0, propagate_nan=tl.PropagateNan.ALL)
    return y.to(K.cast_dtype)


@triton.jit
def finite_top(m):
    """m, but the greatest number in place of +inf: exp(inf - m) is then inf, as lse is, and not NaN."""
    return tl.minimum(m, GREATEST_FP64 if m.dtype.is_fp64() else GREATEST)


@triton.jit
def lse_of(m, s, greedy, sink, K: tl.constexpr):
    """m + log s, with the sink if K.sink; inf if s is.

    For a greedy row it is m, because the first of its tied maxima alone counts.
    """
    if K.sink:
        if K.greedy:
            scale, base = origin_of(m, K.ptx)
            alone = exp_at(m, scale, base, K.ptx)
            s = tl.where(greedy & (s > 0) & (s < float("inf")), alone, s)
        m, s = merge_score(m, s, finite_top(sink), sink, K.ptx)
    lse = m + log_sum_of(m, s, K.ptx)
    if K.greedy and not K.sink:
        lse = tl.where(greedy & (s > 0) & (s < float("inf")), m, lse)
    return lse


@triton.jit
def capped(z, cap):
    """cap * tanh(z / cap). Near 0 it is a polynomial, because 1 - exp(-2 z / cap) would lose all digits there."""
    size = tl.abs(z)
    y = size / cap
    q = y * y
    if z.dtype.is_fp64():  # (tanh(y) / y - 1) / y ** 2 up to y = 0.55, to 2e-18; in fp32 to 4e-9
        c = q * -2.06027653763663395e-5 + 8.51131368557767122e-5
        c = c * q - 2.34634741088723713e-4
        c = c * q + 5.88936052007405776e-4
        c = c * q - 1.45566183010071603e-3
        c = c * q + 3.59211037868902388e-3
        c = c * q - 8.86323439781435484e-3
        c = c * q + 2.18694884936669419e-2
        c = c * q - 5.39682539674340145e-2
        c = c * q + 1.33333333333327148e-1
        c = c * q - 3.33333333333333326e-1
    else:
        c = q * -6.61022783111473421e-3 + 2.13093886644434736e-2
        c = c * q - 5.39094288274605454e-2
        c = c * q + 1.33331137290208719e-1
        c = c * q - 3.33333320079769797e-1
    e = tl.exp(-2.0 * y)
    top = tl.where(y < 0.55, size + size * (q * c), cap - cap * (2.0 * e / (1.0 + e)))
    return tl.where(z < 0, -top, tl.where(z == z, top, z))
