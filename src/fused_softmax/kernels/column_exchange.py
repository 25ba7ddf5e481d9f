"""How programs that share columns over a strided dim exchange states: one message for each inner position.

A message, its tag and the wait for it are those of `exchange.py`, and so is what a function named after one there does.
A group's slots are [block_inner, n_parts], and are read as a tile [block_inner, lanes].
"""

import triton
import triton.language as tl

from fused_softmax.kernels.exchange import in_any_warp, pack_state, tag_of, unpack_state, wait_for
from fused_softmax.kernels.state import NEG_INF, rounded_product, weight_of


@triton.jit
def publish_columns(m, s, slots_ptr, part, n_parts, tag, K: tl.constexpr):
    """`publish`, a message an inner position."""
    tl.debug_barrier()  # warps that share no column may be late, and read the tag that this flips
    slot_ptrs = slots_ptr + part + tl.arange(0, K.block_inner)[None, :] * n_parts
    tl.atomic_xchg(slot_ptrs, pack_state(m, s, tag), sem="relaxed")


@triton.jit
def slots_of_columns(slots_ptr, n_parts, K: tl.constexpr):
    """(addresses [block_inner, lanes] of the slots of a group, which of them belong to a part)."""
    part = tl.arange(0, K.lanes)[None, :]
    inner = tl.arange(0, K.block_inner)[:, None]
    return slots_ptr + part + inner * n_parts, (part < n_parts) & (inner >= 0)


@triton.jit
def collect_columns(slots_ptr, n_parts, tag, K: tl.constexpr):
    """`collect`, [block_inner, lanes].

    Parts run along the other axis than columns do, so that the compiler lays out the result anew, and not the columns.
    And side by side: few threads of one warp share an inner position, and reduce it without shared memory.
    """
    LANES: tl.constexpr = K.lanes
    BLOCK_INNER: tl.constexpr = K.block_inner
    slot_ptrs, peer = slots_of_columns(slots_ptr, n_parts, K)
    message = tl.zeros([BLOCK_INNER, LANES], tl.int64) + ((1 - tag) << 31)
    message, left = wait_for(slot_ptrs, message, peer, tag)
    if K.helps:
        left = in_any_warp(left, K)
    return message, left


@triton.jit
def stand_in_columns(slots_ptr, n_parts, tag, STATE: tl.constexpr, given, K: tl.constexpr):
    """`stand_in`, for every inner position."""
    BLOCK_INNER: tl.constexpr = K.block_inner
    LANES: tl.constexpr = K.lanes
    slot_ptrs, peer = slots_of_columns(slots_ptr, n_parts, K)
    message = tl.zeros([BLOCK_INNER, LANES], tl.int64) + ((1 - tag) << 31)
    message, part = next_missing_columns(slot_ptrs, message, tl.zeros([], tl.int32), n_parts, tag, K)
    while part < n_parts:
        m, s = STATE(part, given, K)
        tl.debug_barrier()  # no slot is read before the data was
        message = tl.load(slot_ptrs, mask=peer & (tag_of(message) != tag), other=message, volatile=True)
        missing = (tl.arange(0, LANES)[None, :] == part) & (tag_of(message) != tag)
        message = tl.where(missing, tl.trans(pack_state(m, s, tag)), message)
        message, part = next_missing_columns(slot_ptrs, message, part + 1, n_parts, tag, K)
    return message


@triton.jit
def next_missing_columns(slot_ptrs, message, part, n_parts, tag, K: tl.constexpr):
    """`next_missing`: of parts whose state of any inner position a warp misses."""
    lanes = tl.arange(0, K.lanes)[None, :]
    missing = tl.zeros([], tl.int32)
    while (part < n_parts) & (missing == 0):
        message = tl.load(slot_ptrs, mask=(lanes < n_parts) & (tag_of(message) != tag), other=message, volatile=True)
        missing = in_any_warp(tl.max(((lanes == part) & (tag_of(message) != tag)).to(tl.int32), axis=None), K)
        part += 1 - missing
    return message, part


@triton.jit
def states_of_columns(message, n_parts, K: tl.constexpr):
    """`states_of`, [block_inner, lanes]."""
    peer = tl.arange(0, K.lanes)[None, :] < n_parts
    m_parts, s_parts = unpack_state(message)
    return tl.where(peer, m_parts, NEG_INF), tl.where(peer, s_parts, 0.0)


@triton.jit
def merged_columns(message, n_parts, K: tl.constexpr):
    """`merged`, for every inner position."""
    m_parts, s_parts = states_of_columns(message, n_parts, K)
    m = tl.max(m_parts, axis=1)
    weights = weight_of(m_parts, m[:, None], K.ptx and not K.subtract_first)
    s = tl.sum(rounded_product(s_parts, weights), axis=1)
    return m[None, :], s[None, :]


@triton.jit
def summed_columns(message, n_parts, K: tl.constexpr):
    """`summed`, for every inner position."""
    d_parts, _ = unpack_state(message)
    return tl.sum(tl.where(tl.arange(0, K.lanes)[None, :] < n_parts, d_parts, 0.0), axis=1)[None, :]
