"""The device shelf: how a row is read, its state (m, s), and how programs that share a row exchange it.

m is the row's maximum, s = sum exp(x - m). States merge: the states of two parts of a row give the state of the row
(Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867).
"""

import triton
import triton.language as tl

NEG_INF = tl.constexpr(-float("inf"))
LOG2E = tl.constexpr(1.4426950408889634)
POLL_LIMIT = tl.constexpr(1 << 24)  # about ten seconds: a row whose other programs never run becomes NaN, not a hang


@triton.jit
def widen(x, CAST: tl.constexpr):
    """x rounded to the dtype CAST, in the dtype of the arithmetic: fp64 for fp64, fp32 for all else."""
    if CAST.is_fp64():
        return x.to(tl.float64)
    else:
        return x.to(CAST).to(tl.float32)


@triton.jit
def origin_of(m, PTX: tl.constexpr):
    """(scale, base) with exp(x - m) = 2 ** (x * scale - base), but for a factor all x share; base 0 if all was -inf.

    exp(-inf - -inf) is NaN, while any finite base gives the exact zeros.
    On NVIDIA the exponent is one fused multiply-add, and `base` is m * scale rounded: the row's s shares that error, so
    it cancels. It must not overflow though: from 2 ** 30 on, where fp32 is 128 apart and exp is 0 or 1, scale is 1 and
    m * scale exact. Elsewhere the subtraction comes first, so base is m.
    """
    finite = tl.where(m == NEG_INF, 0.0, m)
    if PTX and m.dtype == tl.float32:
        scale = tl.where(tl.abs(finite) < 1073741824.0, LOG2E, 1.0)
        # Opaque: folded into a later subtraction, the product would not be the one that s was summed with.
        base = tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [finite, scale], dtype=tl.float32, is_pure=True, pack=1
        )
        return scale, base
    else:
        return finite, finite  # scale is not used


@triton.jit
def exp_at(x, scale, base, PTX: tl.constexpr):
    """exp(x - m) by the (scale, base) of m; fp32 or fp64."""
    if PTX and x.dtype == tl.float32:
        return tl.exp2(tl.fma(x, scale, -base))
    else:
        return tl.exp(x - base)


@triton.jit
def weight_of(m_part, m, PTX: tl.constexpr):
    """exp(m_part - m), for m_part <= m: what the s of a part counts in the whole. NaN where m is -inf, +inf or NaN."""
    if PTX and m.dtype == tl.float32:
        scale_part, base_part = origin_of(m_part, PTX)
        scale, base = origin_of(m, PTX)
        weight = tl.where((scale_part == scale) & (m_part != NEG_INF), tl.exp2(base_part - base), 0.0)
        return tl.where(tl.abs(m) == float("inf"), float("nan"), weight)
    else:
        return exp_at(m_part, m, m, False)


@triton.jit
def merge(m_a, s_a, m_b, s_b, PTX: tl.constexpr):
    """The state of two parts of a row together. A NaN travels in s, so m may be taken without it."""
    m = tl.maximum(m_a, m_b)
    empty = m == NEG_INF  # and then s is 0, or NaN where a NaN stands among the -inf
    s = s_a * weight_of(m_a, m, PTX) + s_b * weight_of(m_b, m, PTX)
    return m, tl.where(empty, s_a + s_b, s)


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
def load_pieces(ptr, cols, size, BLOCK_COLS: tl.constexpr, PIECES: tl.constexpr, FULL_PIECES: tl.constexpr):
    """PIECES tiles side by side from ptr, as a tuple; columns from `size` on are -inf; FULL_PIECES end before it."""
    pieces = ()
    for p in tl.static_range(PIECES):
        if p < FULL_PIECES:
            piece = tl.load(ptr + (p * BLOCK_COLS + cols))
        else:
            piece = tl.load(ptr + (p * BLOCK_COLS + cols), mask=p * BLOCK_COLS + cols < size, other=NEG_INF)
        pieces = pieces + (piece,)  # noqa: RUF005  the compiler has no unpacking
    return pieces


@triton.jit
def max_of(pieces, CAST: tl.constexpr):
    """The maximum over the last axis of all pieces."""
    top = widen(pieces[0], CAST)
    for p in tl.static_range(1, len(pieces)):
        top = tl.maximum(top, widen(pieces[p], CAST))
    return tl.max(top, axis=len(top.shape) - 1)


@triton.jit
def sum_exp_of(pieces, scale, base, CAST: tl.constexpr, PTX: tl.constexpr):
    """sum exp(x - m) over the last axis of all pieces, by the (scale, base) of m, which broadcasts against a piece."""
    total = exp_at(widen(pieces[0], CAST), scale, base, PTX)
    for p in tl.static_range(1, len(pieces)):
        total += exp_at(widen(pieces[p], CAST), scale, base, PTX)
    return tl.sum(total, axis=len(total.shape) - 1)


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
def wait_for(slots_ptr, message, wanted, tag):
    """Re-read the wanted slots until all carry this launch's tag; one lane a slot, and only while it is missing."""
    j = tl.arange(0, message.shape[0])
    missing = wanted & (tag_of(message) != tag)
    polls = 0
    while (tl.max(missing.to(tl.int32), axis=0) > 0) & (polls < POLL_LIMIT):
        message = tl.load(slots_ptr + j, mask=missing, other=message, volatile=True)
        missing = wanted & (tag_of(message) != tag)
        polls += 1
    return message


@triton.jit
def exchange(
    m, s, slots_ptr, part, n_parts, tag,
    LANES: tl.constexpr, COPIES: tl.constexpr, PATIENT: tl.constexpr,
    PUBLISH: tl.constexpr, COLLECT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Publish the state of this part of a row, wait for the others', return the state of the row.

    Every launch flips the tag of every slot of a row, so what a slot held before never passes for a new message, and
    nothing is reset between launches (a sense-reversing barrier). `tag` is this launch's.
    The slots stand in COPIES copies, each read by its own share of the programs: L2 serves one reader of a sector at a
    time, and readers queue ahead of the writers they wait for. For the same reason PATIENT programs, of which many
    wait, await the last part first and alone: it starts last.
    PUBLISH and COLLECT are both true on a GPU. The interpreter runs programs one after another, and so runs them in
    two launches: all publish before any collects.
    """
    j = tl.arange(0, LANES)
    peer = j < n_parts
    if PUBLISH:
        message = pack_state(m, s, tag) + tl.zeros([LANES], tl.int64)
        tl.atomic_xchg(slots_ptr + part + j * n_parts, message, mask=j < COPIES, sem="relaxed")
    if COLLECT:
        slots_ptr += (part % COPIES) * n_parts
        message = tl.zeros([LANES], tl.int64) + ((1 - tag) << 31)
        if PATIENT:
            message = wait_for(slots_ptr, message, j == n_parts - 1, tag)
        message = tl.load(slots_ptr + j, mask=peer & (tag_of(message) != tag), other=message, volatile=True)
        message = wait_for(slots_ptr, message, peer, tag)
        m_parts, s_parts = unpack_state(message)
        m_parts = tl.where(peer, m_parts, NEG_INF)
        s_parts = tl.where(peer, tl.where(tag_of(message) == tag, s_parts, float("nan")), 0.0)
        m = tl.max(m_parts, axis=0)
        s = tl.sum(s_parts * weight_of(m_parts, m, PTX), axis=0)
    return m, s
