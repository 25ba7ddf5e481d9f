"""How programs that share a row exchange its state: one 64-bit message each, whose tag flips at every launch.

Every launch flips the tag of every slot of a row, so what a slot held before never passes for a new message, and
nothing is reset between launches (a sense-reversing barrier).
"""

import triton
import triton.language as tl

from fused_softmax.kernels.state import NEG_INF, weight_of

POLL_LIMIT = tl.constexpr(1 << 24)  # about ten seconds: a row whose other programs never run becomes NaN, not a hang


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
def slots_of(slots_ptr, group, part, n_parts, stride, K: tl.constexpr):
    """(where the slots of a group of n_parts programs begin, this launch's tag). stride: slots that each part has."""
    slots_ptr += group.to(tl.int64) * n_parts * stride
    tag = tag_of(tl.load(slots_ptr + part, volatile=True))
    if K.publish:
        tag = 1 - tag
    return slots_ptr, tag


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
def publish(m, s, slots_ptr, part, n_parts, tag, K: tl.constexpr):
    """Write this part's message (m, s), s not negative, into every copy of its row's slots.

    The slots stand in K.copies copies, each read by its own share of the programs: L2 serves one reader of a sector at
    a time, and readers queue ahead of the writers they wait for.
    """
    LANES: tl.constexpr = K.lanes
    j = tl.arange(0, LANES)
    message = pack_state(m, s, tag) + tl.zeros([LANES], tl.int64)
    tl.atomic_xchg(slots_ptr + part + j * n_parts, message, mask=j < K.copies, sem="relaxed")


@triton.jit
def collect(slots_ptr, part, n_parts, tag, K: tl.constexpr):
    """Wait for the messages of all parts of a row: (m, s) a lane, 0 in lanes past the parts, and which never came.

    Programs that poll the last part first, and alone, are many: it starts last.
    """
    LANES: tl.constexpr = K.lanes
    j = tl.arange(0, LANES)
    peer = j < n_parts
    slots_ptr += (part % K.copies) * n_parts
    message = tl.zeros([LANES], tl.int64) + ((1 - tag) << 31)
    if K.poll_last_first:
        message = wait_for(slots_ptr + j, message, j == n_parts - 1, tag)
    message = tl.load(slots_ptr + j, mask=peer & (tag_of(message) != tag), other=message, volatile=True)
    message = wait_for(slots_ptr + j, message, peer, tag)
    m_parts, s_parts = unpack_state(message)
    return tl.where(peer, m_parts, 0.0), tl.where(peer, s_parts, 0.0), peer & (tag_of(message) != tag)


@triton.jit
def exchange(m, s, slots_ptr, part, n_parts, tag, K: tl.constexpr):
    """Publish the state of this part of a row, wait for the others', return the state of the row."""
    if K.publish:
        publish(m, s, slots_ptr, part, n_parts, tag, K)
    if K.collect:
        m, s = merge_parts(slots_ptr, part, n_parts, tag, K)
    return m, s


@triton.jit
def merge_parts(slots_ptr, part, n_parts, tag, K: tl.constexpr):
    """The state of a row by the messages of all its parts."""
    m_parts, s_parts = collect_states(slots_ptr, part, n_parts, tag, K)
    m = tl.max(m_parts, axis=0)
    return m, tl.sum(s_parts * weight_of(m_parts, m, K.ptx), axis=0)


@triton.jit
def collect_states(slots_ptr, part, n_parts, tag, K: tl.constexpr):
    """(m, s) of every part, empty past the last one; NaN for an s that never came."""
    m_parts, s_parts, missing = collect(slots_ptr, part, n_parts, tag, K)
    m_parts = tl.where(tl.arange(0, K.lanes) < n_parts, m_parts, NEG_INF)
    return m_parts, tl.where(missing, float("nan"), s_parts)


@triton.jit
def exchange_greedy(m, s, slots_ptr, part, n_parts, tag, greedy, K: tl.constexpr):
    """exchange, of rows that may be greedy: of parts that share the maximum the first has it, and s counts all.

    Of a greedy row its own s is left, or NaN; and an m of +inf for all parts but the winner.
    """
    if K.publish:
        publish(m, s, slots_ptr, part, n_parts, tag, K)
    if K.collect:
        m_parts, s_parts = collect_states(slots_ptr, part, n_parts, tag, K)
        m = tl.max(m_parts, axis=0)
        s = tl.sum(s_parts * weight_of(m_parts, m, K.ptx), axis=0)
        j = tl.arange(0, K.lanes)
        winner = tl.min(tl.where(m_parts == m, j, K.lanes), axis=0)
        s = tl.where(greedy & (s > 0), tl.sum(tl.where(j == winner, s_parts, 0.0), axis=0), s)
        m = tl.where(greedy & (part != winner) & (s == s), float("inf"), m)
    return m, s


@triton.jit
def exchange_sum(d, slots_ptr, part, n_parts, tag, K: tl.constexpr):
    """The sum of d over all parts of a row: numbers that need no rescaling."""
    if K.publish:
        publish(d, tl.zeros([], tl.float32), slots_ptr, part, n_parts, tag, K)
    if K.collect:
        d_parts, _, missing = collect(slots_ptr, part, n_parts, tag, K)
        d = tl.sum(tl.where(missing, float("nan"), d_parts), axis=0)
    return d
