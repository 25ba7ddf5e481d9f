"""The device shelf of strided dims: tiles [BLOCK_COLS, BLOCK_INNER], and a message for every inner position."""

import triton
import triton.language as tl

from fused_softmax.rowwise import (
    GREATEST,
    GREATEST_FP64,
    finite_top,
    natural_exp,
    pack_state,
    tag_of,
    unpack_state,
    wait_for,
    widen,
)


@triton.jit
def place_of(n_parts, SPLIT: tl.constexpr):
    """(group, part) of a program."""
    program = tl.program_id(0)
    if SPLIT:
        return program // n_parts, program % n_parts
    else:
        return program, program * 0


@triton.jit
def slots_of(slots_ptr, group, part, n_parts, BLOCK_INNER: tl.constexpr, PUBLISH: tl.constexpr):
    """(the group's slots, those of one inner position side by side; this launch's tag)."""
    slots_ptr += group.to(tl.int64) * n_parts * BLOCK_INNER
    tag = tag_of(tl.load(slots_ptr + part, volatile=True))
    if PUBLISH:
        tag = 1 - tag
    return slots_ptr, tag


@triton.jit
def multiple_of(size, VECTOR: tl.constexpr):
    """A size that VECTOR divides, in a form that shows the compiler so: accesses are as wide as it knows them to be."""
    return size // VECTOR * VECTOR


@triton.jit
def inner_of(group, n_inner, BLOCK_INNER: tl.constexpr, VECTOR: tl.constexpr):
    """(outer, inner positions, which there are) of a group."""
    blocks = tl.cdiv(n_inner, BLOCK_INNER)
    inner = group % blocks * BLOCK_INNER + tl.arange(0, BLOCK_INNER)
    return (group // blocks).to(tl.int64), inner, inner < multiple_of(n_inner, VECTOR)


@triton.jit
def load_columns(
    ptr, stride, inner, on, size, OTHER: tl.constexpr, BLOCK_COLS: tl.constexpr, PIECES: tl.constexpr,
    FULL_PIECES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """PIECES tiles [BLOCK_COLS, BLOCK_INNER] one below another, as a tuple; columns from `size` on are OTHER."""
    cols = tl.arange(0, BLOCK_COLS)[:, None]
    at = ptr + (cols.to(tl.int64) * stride + inner[None, :])
    step = stride.to(tl.int64) * BLOCK_COLS
    pieces = ()
    for p in tl.static_range(PIECES):
        # `on`, of a bound that the compiler knows nothing of, makes accesses of one element: only where it is needed.
        if p < FULL_PIECES and WHOLE:
            piece = tl.load(at + p * step)
        elif WHOLE:
            piece = tl.load(at + p * step, mask=p * BLOCK_COLS + cols < size, other=OTHER)
        else:
            piece = tl.load(at + p * step, mask=(p * BLOCK_COLS + cols < size) & on[None, :], other=OTHER)
        pieces = pieces + (piece,)  # noqa: RUF005  the compiler has no unpacking
    return pieces


@triton.jit
def store_columns(
    ptr, stride, inner, on, size, y, p, BLOCK_COLS: tl.constexpr, FULL: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    cols = tl.arange(0, BLOCK_COLS)[:, None]
    at = ptr + (cols.to(tl.int64) * stride + inner[None, :]) + p * (stride.to(tl.int64) * BLOCK_COLS)
    if FULL and WHOLE:
        tl.store(at, y, cache_modifier=".cs")
    elif WHOLE:
        tl.store(at, y, mask=p * BLOCK_COLS + cols < size, cache_modifier=".cs")
    else:
        tl.store(at, y, mask=(p * BLOCK_COLS + cols < size) & on[None, :], cache_modifier=".cs")


@triton.jit
def empty_state(BLOCK_COLS: tl.constexpr, BLOCK_INNER: tl.constexpr, CAST: tl.constexpr):
    """(m, s) of every lane of a tile that has read nothing. m is finite and stays so: -inf - -inf never is."""
    if CAST.is_fp64():
        m = tl.full([BLOCK_COLS, BLOCK_INNER], -GREATEST_FP64, tl.float64)
    else:
        m = tl.full([BLOCK_COLS, BLOCK_INNER], -GREATEST, tl.float32)
    return m, tl.zeros_like(m)


@triton.jit
def take_columns(m, s, x, CAST: tl.constexpr, PTX: tl.constexpr):
    """The state of every lane with its elements of the tiles x."""
    top = widen(x[0], CAST)
    for p in tl.static_range(1, len(x)):
        top = tl.maximum(top, widen(x[p], CAST))
    top = finite_top(tl.maximum(m, top))  # m last: of narrow numbers alone, two are compared at once
    s *= natural_exp(m - top, PTX)
    for p in tl.static_range(len(x)):
        s += natural_exp(widen(x[p], CAST, PTX) - top, PTX)
    return top, s


@triton.jit
def merge_states(m_parts, s_parts, AXIS: tl.constexpr, PTX: tl.constexpr):
    """The state of all states along an axis."""
    m = tl.max(m_parts, axis=AXIS)
    return m, tl.sum(s_parts * natural_exp(m_parts - tl.expand_dims(m, AXIS), PTX), axis=AXIS)


@triton.jit
def publish_columns(m, s, slots_ptr, part, n_parts, tag, BLOCK_INNER: tl.constexpr):
    """publish, a message an inner position."""
    slot_ptrs = slots_ptr + part + tl.arange(0, BLOCK_INNER)[None, :] * n_parts
    tl.atomic_xchg(slot_ptrs, pack_state(m, s, tag), sem="relaxed")


@triton.jit
def collect_columns(slots_ptr, n_parts, tag, LANES: tl.constexpr, BLOCK_INNER: tl.constexpr):
    """collect, [BLOCK_INNER, LANES]: 0 past the parts, and NaN for s where a message never came.

    Parts run along the other axis than columns do: so the compiler lays out the result anew, and not the columns. And
    side by side: so that few threads share an inner position, of one warp, which reduce without shared memory.
    """
    part = tl.arange(0, LANES)[None, :]
    slot_ptrs = slots_ptr + part + tl.arange(0, BLOCK_INNER)[:, None] * n_parts
    peer = (part < n_parts) & (tl.arange(0, BLOCK_INNER)[:, None] >= 0)
    message = tl.zeros([BLOCK_INNER, LANES], tl.int64) + ((1 - tag) << 31)
    message = wait_for(slot_ptrs, message, peer, tag)
    m_parts, s_parts = unpack_state(message)
    late = peer & (tag_of(message) != tag)
    return tl.where(peer, m_parts, 0.0), tl.where(late, float("nan"), tl.where(peer, s_parts, 0.0))
