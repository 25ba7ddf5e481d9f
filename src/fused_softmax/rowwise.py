"""The device shelf: how a row is read, its state (m, s), and how programs that share a row exchange it.

m is the row's maximum, s = sum exp(x - m). States merge: the states of two parts of a row give the state of the row
(Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867).
"""

import triton
import triton.language as tl

NEG_INF = tl.constexpr(-float("inf"))
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LEAST = tl.constexpr(2.0**-149)  # of fp32, above 0
GREATEST = tl.constexpr(3.4028234663852886e38)
GREATEST_FP64 = tl.constexpr(1.7976931348623157e308)
HALVES = tl.constexpr("{ .reg .b32 t; shl.b32 t, $2, 16; mov.b32 $0, t; and.b32 t, $2, 0xffff0000; mov.b32 $1, t; }")
POLL_LIMIT = tl.constexpr(1 << 24)  # about ten seconds: a row whose other programs never run becomes NaN, not a hang


@triton.jit
def widen(x, CAST: tl.constexpr, PTX: tl.constexpr = False):
    """x rounded to the dtype CAST, in the dtype of the arithmetic: fp64 for fp64, fp32 for all else.

    PTX: bf16 by an instruction an element, where the compiler takes two for the upper one of a register.
    """
    if CAST.is_fp64():
        return x.to(tl.float64)
    elif PTX and x.dtype.is_bf16() and (CAST.is_bf16() or CAST.is_fp32()):
        return tl.inline_asm_elementwise(HALVES, "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2)
    else:
        return x.to(CAST).to(tl.float32)


@triton.jit
def origin_of(m, PTX: tl.constexpr, APART: tl.constexpr = False):
    """(scale, base) with exp(x - m) = 2 ** (x * scale - base), but for a factor all x share; base 0 if all was -inf.

    exp(-inf - -inf) is NaN, while any finite base gives the exact zeros.
    On NVIDIA the exponent is one fused multiply-add, and `base` is m * scale rounded: the row's s shares that error, so
    it cancels. It must not overflow though: from 2 ** 30 on, where fp32 is 128 apart and exp is 0 or 1, scale is 1 and
    m * scale exact. Elsewhere, and APART, the subtraction comes first, so base is m: an instruction more for every x,
    and no register for the scale of every m.
    """
    finite = tl.where(m == NEG_INF, 0.0, m)
    if PTX and not APART and m.dtype == tl.float32:
        scale = tl.where(tl.abs(finite) < 1073741824.0, LOG2E, 1.0)
        # No multiplication: folded into a later subtraction, it would not be the product that s was summed with.
        base = tl.fma(finite, scale, 0.0)
        return scale, base
    else:
        return finite, finite  # scale is not used


@triton.jit
def exp_at(x, scale, base, PTX: tl.constexpr, APART: tl.constexpr = False):
    """exp(x - m) by the (scale, base) of m; fp32 or fp64."""
    if PTX and APART:
        return tl.exp2((x - base) * LOG2E)
    elif PTX and x.dtype == tl.float32:
        return tl.exp2(tl.fma(x, scale, -base))
    else:
        return natural_exp(x - base, PTX)


@triton.jit
def natural_exp(x, PTX: tl.constexpr):
    """exp(x); on NVIDIA subnormal results are 0, which is three instructions less."""
    if PTX and x.dtype == tl.float32:
        return tl.exp2(x * LOG2E)
    else:
        return tl.exp(x)


@triton.jit
def weight_of(m_part, m, PTX: tl.constexpr):
    """exp(m_part - m), for m_part <= m: what the s of a part counts in the whole. NaN where m is +inf or NaN.

    Where m is -inf every part is empty, and its s 0, or NaN: counted once, it stays what it is.
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
    """The state of two parts of a row together. A NaN travels in s, so m may be taken without it."""
    m = tl.maximum(m_a, m_b)
    return m, s_a * weight_of(m_a, m, PTX) + s_b * weight_of(m_b, m, PTX)


@triton.jit
def hold(x, PTX: tl.constexpr):
    """x, opaque to the compiler: 2-byte values wait packed in registers, not as fp32 copies made for an earlier use."""
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
def head_of(row, row_stride, phase, VECTOR: tl.constexpr, SHIFTED: tl.constexpr):
    """Elements of a row before its first 16-byte boundary; `phase` is the tensor's own offset from one."""
    if SHIFTED:
        return ((VECTOR - (row * row_stride + phase) % VECTOR) % VECTOR).to(tl.int32)
    else:
        return 0


@triton.jit
def body_of(ptr, row, row_stride, phase, VECTOR: tl.constexpr, SHIFTED: tl.constexpr):
    """The first 16-byte boundary of a row, in a form that shows the compiler that it is one."""
    if SHIFTED:
        aligned = tl.multiple_of(ptr - phase, VECTOR * ptr.dtype.element_ty.primitive_bitwidth // 8)
        return aligned + (row * row_stride + phase + VECTOR - 1) // VECTOR * VECTOR
    else:
        return ptr + row * (row_stride // VECTOR * VECTOR)


@triton.jit
def edges_of(lane, head, body, n_cols, VECTOR: tl.constexpr):
    """Columns before and after the body, one a lane of 2 * VECTOR, and which lanes have one."""
    cols = tl.where(lane < VECTOR, lane, head + body + lane - VECTOR)
    return cols, tl.where(lane < VECTOR, lane < head, cols < n_cols)


@triton.jit
def load_edges(ptr, row, row_stride, head, body, n_cols, hidden, VECTOR: tl.constexpr):
    """edges_of several rows, and what stands there."""
    cols, on = edges_of(tl.arange(0, 2 * VECTOR)[None, :], head, body, n_cols, VECTOR)
    return cols, on, tl.load(ptr + row * row_stride + cols, mask=on, other=hidden)


@triton.jit
def load_pieces(
    ptr, cols, size, BLOCK_COLS: tl.constexpr, PIECES: tl.constexpr, FULL_PIECES: tl.constexpr,
    other=NEG_INF,
):  # fmt: skip
    """PIECES tiles side by side from ptr, as a tuple; columns from `size` on are `other`; FULL_PIECES end before it."""
    pieces = ()
    for p in tl.static_range(PIECES):
        if p < FULL_PIECES:
            piece = tl.load(ptr + (p * BLOCK_COLS + cols))
        else:
            piece = tl.load(ptr + (p * BLOCK_COLS + cols), mask=p * BLOCK_COLS + cols < size, other=other)
        pieces = pieces + (piece,)  # noqa: RUF005  the compiler has no unpacking
    return pieces


@triton.jit
def scores_of(x, factor, CAST: tl.constexpr, SCALED: tl.constexpr, PTX: tl.constexpr = False):
    """z: a piece as the arithmetic sees it, rounded to CAST and then multiplied by the row's factor if SCALED."""
    z = widen(x, CAST, PTX)
    if SCALED:
        z *= factor
    return z


@triton.jit
def max_of(pieces, factor, CAST: tl.constexpr, SCALED: tl.constexpr, AXIS: tl.constexpr = -1):
    """The maximum over the last axis, or AXIS, of the scores of all pieces."""
    top = scores_of(pieces[0], factor, CAST, SCALED)
    for p in tl.static_range(1, len(pieces)):
        top = tl.maximum(top, scores_of(pieces[p], factor, CAST, SCALED))
    return tl.max(top, axis=len(top.shape) - 1 if AXIS == -1 else AXIS)


@triton.jit
def sum_exp_of(
    pieces, scale, base, factor, CAST: tl.constexpr, SCALED: tl.constexpr, PTX: tl.constexpr, AXIS: tl.constexpr = -1,
    APART: tl.constexpr = False, UNPACK: tl.constexpr = True,
):  # fmt: skip
    """sum exp(z - m) over the last axis, or AXIS, of all pieces, by the (scale, base) of m as it broadcasts to them."""
    total = exp_at(scores_of(pieces[0], factor, CAST, SCALED, PTX and UNPACK), scale, base, PTX, APART)
    for p in tl.static_range(1, len(pieces)):
        total += exp_at(scores_of(pieces[p], factor, CAST, SCALED, PTX and UNPACK), scale, base, PTX, APART)
    return tl.sum(total, axis=len(total.shape) - 1 if AXIS == -1 else AXIS)


@triton.jit
def log_sum_of(m, s, PTX: tl.constexpr):
    """log sum exp(z - m), from which the rounding of origin_of's base, a factor of s, is taken out again."""
    if PTX and m.dtype == tl.float32:
        scale, base = origin_of(m, PTX)
        rounding = tl.where(scale == LOG2E, tl.fma(m, scale, -base), 0.0)
        return tl.log(s) - tl.where(m == NEG_INF, 0.0, rounding) * LN2
    else:
        return tl.log(s)


@triton.jit
def result_of(
    z, m, s, CAST: tl.constexpr, LOG: tl.constexpr, ZERO: tl.constexpr, PTX: tl.constexpr, APART: tl.constexpr = False
):  # fmt: skip
    """softmax, or LOG its logarithm, of scores by the state of their row; ZERO: a row with nothing kept is no NaN."""
    if LOG:
        y = z - m - log_sum_of(m, s, PTX and not APART)
        if ZERO:
            y = tl.where(s == 0.0, NEG_INF, y)
    else:
        inv_s = 1.0 / s
        if ZERO:
            inv_s = tl.where(s == 0.0, 0.0, inv_s)
        scale, base = origin_of(m, PTX, APART)
        y = exp_at(z, scale, base, PTX, APART) * inv_s
    return y.to(CAST)


@triton.jit
def store_results(
    y_ptr, x, m, s, factor, cols, size, BLOCK_COLS: tl.constexpr, FULL_PIECES: tl.constexpr, CAST: tl.constexpr,
    HELD: tl.constexpr, LOG: tl.constexpr, SCALED: tl.constexpr, ZERO: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """result_of all pieces, side by side from y_ptr, up to column `size`; FULL_PIECES end before it."""
    x = hold_all(x, PTX)
    for p in tl.static_range(len(x)):
        y = result_of(scores_of(x[p], factor, HELD, SCALED, PTX), m, s, CAST, LOG, ZERO, PTX)
        if p < FULL_PIECES:
            tl.store(y_ptr + (p * BLOCK_COLS + cols), y, cache_modifier=".cs")
        else:
            tl.store(y_ptr + (p * BLOCK_COLS + cols), y, mask=p * BLOCK_COLS + cols < size, cache_modifier=".cs")


@triton.jit
def finite_top(m):
    """m, but the greatest number for +inf: exp(inf - m) is then inf and not NaN, as lse is."""
    return tl.minimum(m, GREATEST_FP64 if m.dtype.is_fp64() else GREATEST)


@triton.jit
def lse_of(m, s, greedy, GREEDY: tl.constexpr, PTX: tl.constexpr):
    """m + log s; of a greedy row, of whose tied maxima the first alone counts, m; inf where s is."""
    lse = m + log_sum_of(m, s, PTX)
    if GREEDY:
        lse = tl.where(greedy & (s > 0) & (s < float("inf")), m, lse)
    return lse


@triton.jit
def broadcast_offset(row, n_1, n_2, stride_0, stride_1, stride_2):
    """Where a row, numbered over up to three dims (the last two of n_1 and n_2), begins in a tensor of such strides."""
    outer = row // n_2
    offset = (outer // n_1).to(tl.int64) * stride_0 + (outer % n_1).to(tl.int64) * stride_1
    return offset + (row % n_2).to(tl.int64) * stride_2


@triton.jit
def shared_row(program, n_rows, n_inner):
    """The row of a program where those that lie n_inner rows apart, and share a mask's row, follow each other."""
    n_outer = n_rows // n_inner
    return (program % n_outer).to(tl.int64) * n_inner + program // n_outer


@triton.jit
def visible_of(row, n_cols, n_queries, CAUSAL: tl.constexpr):
    """How many leading columns of a row are not hidden by causality."""
    if CAUSAL:
        return tl.maximum(tl.minimum(n_cols, (row % n_queries).to(tl.int32) + 1 + n_cols - n_queries), 0)
    else:
        return n_cols


@triton.jit
def factor_of(row, number, scale_ptr, n_1, n_2, stride_0, stride_1, stride_2, SCALED: tl.constexpr, CAST: tl.constexpr):
    """(factor, hidden, greedy) of a row: its scale, the x that becomes -inf by it, and whether the scale was 0.

    The factor of a greedy row is 1.
    """
    if SCALED:
        factor = number
        if scale_ptr is not None:
            factor = tl.load(scale_ptr + broadcast_offset(row, n_1, n_2, stride_0, stride_1, stride_2))
        # By way of integers: the interpreter forgets that a comparison of scalar floats is a truth value.
        sign = tl.where(factor < 0, -1, tl.where(factor == 0, 0, 1))
        if factor.dtype.is_fp64() and not CAST.is_fp64():  # 0 is another thing than what is next to it
            factor = factor.to(tl.float32)
            factor = tl.where(factor == 0, LEAST * sign.to(tl.float32), factor)
        factor = factor.to(tl.float64 if CAST.is_fp64() else tl.float32)
        return tl.where(sign == 0, 1.0, factor), tl.where(sign == -1, float("inf"), NEG_INF), sign == 0
    else:
        return 1.0, NEG_INF, False


@triton.jit
def keep_scores(
    x, cols, on, visible, factor, hidden, mask_ptr, mask_col_stride,
    CAST: tl.constexpr, MASK: tl.constexpr, SCALED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """What was read from columns `cols` of a row (where `on`), with all that mask and causality hide at `hidden`.

    An added mask (2) makes of it the finished scores, in the dtype of the arithmetic.
    """
    wide: tl.constexpr = tl.float64 if x.dtype.is_fp64() else tl.float32
    keep = on
    if MASK == 2:
        x = scores_of(x, factor, CAST, SCALED)
        x += tl.load(mask_ptr + cols.to(tl.int64) * mask_col_stride, mask=on, other=0.0).to(x.dtype)
        hidden = NEG_INF
    if MASK == 1:
        keep = keep & (tl.load(mask_ptr + cols.to(tl.int64) * mask_col_stride, mask=on, other=0) != 0)
    if CAUSAL:
        keep = keep & (cols < visible)
    return tl.where(keep, x, (tl.zeros([], wide) + hidden).to(x.dtype))


@triton.jit
def load_scores(
    ptr, first, cols, size, visible, factor, hidden, mask_ptr, mask_col_stride,
    BLOCK_COLS: tl.constexpr, PIECES: tl.constexpr, FULL_PIECES: tl.constexpr, VECTOR: tl.constexpr,
    CAST: tl.constexpr, MASK: tl.constexpr, SCALED: tl.constexpr, CAUSAL: tl.constexpr, OPEN: tl.constexpr = 0,
):  # fmt: skip
    """load_pieces from column `first` of a row on, masked and causal; what causality hides is not read.

    OPEN: how many leading pieces causality hides nothing of.
    """
    if CAUSAL:
        read = tl.minimum(size, (visible - first + VECTOR - 1) // VECTOR * VECTOR)
        pieces = load_pieces(ptr, cols, read, BLOCK_COLS, PIECES, OPEN, hidden)
    else:
        read = size
        pieces = load_pieces(ptr, cols, size, BLOCK_COLS, PIECES, FULL_PIECES, hidden)
    if MASK or CAUSAL:
        kept = ()
        for p in tl.static_range(PIECES):
            if MASK or p >= OPEN:
                piece = keep_scores(
                    pieces[p], first + p * BLOCK_COLS + cols, p * BLOCK_COLS + cols < read, visible, factor, hidden,
                    mask_ptr, mask_col_stride, CAST, MASK, SCALED, CAUSAL and p >= OPEN,
                )  # fmt: skip
            else:
                piece = pieces[p]
            kept = kept + (piece,)  # noqa: RUF005  the compiler has no unpacking
        return kept
    else:
        return pieces


@triton.jit
def first_max_of(pieces, m, first, cols, factor, BLOCK_COLS: tl.constexpr, CAST: tl.constexpr, SCALED: tl.constexpr):
    """The first column whose score is m; past every column if none is."""
    found = tl.where(scores_of(pieces[0], factor, CAST, SCALED) == m, first + cols, 2147483647)
    for p in tl.static_range(1, len(pieces)):
        here = scores_of(pieces[p], factor, CAST, SCALED) == m
        found = tl.minimum(found, tl.where(here, first + p * BLOCK_COLS + cols, 2147483647))
    return tl.min(found, axis=len(found.shape) - 1)


@triton.jit
def keep_column(pieces, column, greedy, first, cols, BLOCK_COLS: tl.constexpr):
    """The pieces of a greedy row with one column kept and -inf elsewhere, but where it is NaN."""
    kept = ()
    wide: tl.constexpr = tl.float64 if pieces[0].dtype.is_fp64() else tl.float32
    for p in tl.static_range(len(pieces)):
        x = pieces[p]
        hide = greedy & (first + p * BLOCK_COLS + cols != column) & (x.to(wide) == x.to(wide))
        kept = kept + (tl.where(hide, tl.full([], NEG_INF, wide).to(x.dtype), x),)  # noqa: RUF005  the compiler has no unpacking
    return kept


@triton.jit
def prefetch_l2(ptr, phase, start, n):
    """One thread asks L2 for n elements from ptr + start on, less what shares 16 bytes with others. From sm_90 on."""
    itemsize: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
    vector: tl.constexpr = 16 // itemsize
    begin = (start + phase + vector - 1) // vector * vector
    n_bytes = ((start + phase + n - begin) // vector * 16).to(tl.int32)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; setp.gt.and.s32 p, $2, 0, p;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r",
        [ptr - phase + begin, n_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def pack_state(m, s, tag):
    """(m, s) in fp32 and one bit in 64: a message written whole needs no flag and no fence, and s has no sign."""
    high = m.to(tl.int32, bitcast=True).to(tl.int64) << 32
    low = (s.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.int64)
    return high | low | (tag << 31)


@triton.jit
def unpack_state(message):
    m = (message >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    s = (message & 0x7FFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    return m, s


@triton.jit
def tag_of(message):
    return (message >> 31) & 1


@triton.jit
def wait_for(slot_ptrs, message, wanted, tag):
    """Re-read the wanted slots until all carry this launch's tag; one lane a slot, and only while it is missing."""
    missing = wanted & (tag_of(message) != tag)
    polls = 0
    while (tl.max(missing.to(tl.int32), axis=None) > 0) & (polls < POLL_LIMIT):
        message = tl.load(slot_ptrs, mask=missing, other=message, volatile=True)
        missing = wanted & (tag_of(message) != tag)
        polls += 1
    return message


@triton.jit
def publish(m, s, slots_ptr, part, n_parts, tag, LANES: tl.constexpr, COPIES: tl.constexpr):
    """Write this part's message (m, s), s not negative, into every copy of its row's slots.

    Every launch flips the tag of every slot of a row, so what a slot held before never passes for a new message, and
    nothing is reset between launches (a sense-reversing barrier). `tag` is this launch's.
    The slots stand in COPIES copies, each read by its own share of the programs: L2 serves one reader of a sector at a
    time, and readers queue ahead of the writers they wait for.
    """
    j = tl.arange(0, LANES)
    message = pack_state(m, s, tag) + tl.zeros([LANES], tl.int64)
    tl.atomic_xchg(slots_ptr + part + j * n_parts, message, mask=j < COPIES, sem="relaxed")


@triton.jit
def collect(
    slots_ptr, part, n_parts, tag, LANES: tl.constexpr, COPIES: tl.constexpr, PATIENT: tl.constexpr
):  # fmt: skip
    """Wait for the messages of all parts of a row: (m, s) a lane, 0 in lanes past the parts, and which never came.

    PATIENT programs, of which many wait, await the last part first and alone: it starts last.
    """
    j = tl.arange(0, LANES)
    peer = j < n_parts
    slots_ptr += (part % COPIES) * n_parts
    message = tl.zeros([LANES], tl.int64) + ((1 - tag) << 31)
    if PATIENT:
        message = wait_for(slots_ptr + j, message, j == n_parts - 1, tag)
    message = tl.load(slots_ptr + j, mask=peer & (tag_of(message) != tag), other=message, volatile=True)
    message = wait_for(slots_ptr + j, message, peer, tag)
    m_parts, s_parts = unpack_state(message)
    return tl.where(peer, m_parts, 0.0), tl.where(peer, s_parts, 0.0), peer & (tag_of(message) != tag)


@triton.jit
def exchange(
    m, s, slots_ptr, part, n_parts, tag,
    LANES: tl.constexpr, COPIES: tl.constexpr, PATIENT: tl.constexpr,
    PUBLISH: tl.constexpr, COLLECT: tl.constexpr, PTX: tl.constexpr, greedy=False, GREEDY: tl.constexpr = False,
):  # fmt: skip
    """Publish the state of this part of a row, wait for the others', return the state of the row.

    PUBLISH and COLLECT are both true on a GPU. The interpreter runs programs one after another, and so runs them in
    two launches: all publish before any collects.
    """
    if PUBLISH:
        publish(m, s, slots_ptr, part, n_parts, tag, LANES, COPIES)
    if COLLECT:
        j = tl.arange(0, LANES)
        m_parts, s_parts, missing = collect(slots_ptr, part, n_parts, tag, LANES, COPIES, PATIENT)
        m_parts = tl.where(j < n_parts, m_parts, NEG_INF)
        s_parts = tl.where(missing, float("nan"), s_parts)
        m = tl.max(m_parts, axis=0)
        s = tl.sum(s_parts * weight_of(m_parts, m, PTX), axis=0)
        if GREEDY:
            # Of parts that share the maximum the first has it, and s counts all: its own is left, or NaN.
            winner = tl.min(tl.where(m_parts == m, j, LANES), axis=0)
            s = tl.where(greedy & (s > 0), tl.sum(tl.where(j == winner, s_parts, 0.0), axis=0), s)
            m = tl.where(greedy & (part != winner) & (s == s), float("inf"), m)
    return m, s


@triton.jit
def dot_of(
    y, dy, CAST: tl.constexpr, LOG: tl.constexpr, PTX: tl.constexpr, AXIS: tl.constexpr = -1,
    HIDDEN: tl.constexpr = False,
):  # fmt: skip
    """d over the last axis, or AXIS, of all pieces: sum y * dy, or of log_softmax sum dy; HIDDEN as gradient_of's."""
    total = product_of(y[0], dy[0], CAST, LOG, HIDDEN, PTX)
    for p in tl.static_range(1, len(dy)):
        total += product_of(y[p], dy[p], CAST, LOG, HIDDEN, PTX)
    return tl.sum(total, axis=len(total.shape) - 1 if AXIS == -1 else AXIS)


@triton.jit
def product_of(y, dy, CAST: tl.constexpr, LOG: tl.constexpr, HIDDEN: tl.constexpr, PTX: tl.constexpr):
    """What one piece gives to d."""
    dy = widen(dy, CAST, PTX)
    if LOG:
        return dy
    elif HIDDEN:
        return tl.where(dy == 0.0, 0.0, widen(y, CAST, PTX) * dy)
    else:
        return widen(y, CAST, PTX) * dy


@triton.jit
def gradient_of(
    y, dy, d, factor, CAST: tl.constexpr, LOG: tl.constexpr, HIDDEN: tl.constexpr, SCALED: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """The gradient of one piece of x by its row's d, times factor if SCALED.

    HIDDEN, of scores of which some may be hidden: 0 where log_softmax is -inf, and in a row of NaN with a dy of 0.
    """
    y = widen(y, CAST, PTX)
    dy = widen(dy, CAST, PTX)
    if LOG:
        share = natural_exp(y, PTX) * d
        if HIDDEN:
            share = tl.where(d == 0.0, 0.0, share)
        dx = dy - share
        if HIDDEN:
            dx = tl.where(y == NEG_INF, 0.0, dx)
    else:
        dx = y * (dy - d)
        if HIDDEN:
            dx = tl.where(dy == d, 0.0, dx)
    if SCALED:
        dx *= factor
    return dx
