"""How programs that share a row exchange its state: one 64-bit message each, whose tag flips at every launch.

Every launch flips the tag of every slot of a row. So an old message never passes for a new one, and nothing is reset
between launches (a sense-reversing barrier). No program depends on another: a program that has waited long reads the
missing parts itself, computes their states with the same bits, and goes on. A scan's decoupled fallback does the same
(Smith, Levien, Owens, "Decoupled Fallback", SPAA 2025).

Launches that begin while the one before them ends: programmatic dependent launch, of sm_90 and later.

A kernel launched so (`launch_pdl`) may be resident before the launch before it is done. Each of its programs waits,
before it reads or writes what that launch wrote. What earlier launches wrote is there if the launch before began as
usual, after all of them, or has waited for the one before it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fused_softmax.core.kernels.state import NEG_INF, rounded_product, weight_of, with_sink

POLLS = tl.constexpr(512)  # of L2: longer than parts that run wait for each other
IN_ANY_WARP = tl.constexpr(
    "{ .reg .pred mine, any; setp.ne.s32 mine, $1, 0; bar.red.or.pred any, 0, mine; selp.s32 $0, 1, 0, any; }"
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
def slots_of(slots_ptr, group, part, n_parts, stride, K: tl.constexpr):
    """(where the slots of a group of n_parts programs begin, this launch's tag). stride: slots that each part has."""
    slots_ptr = slots_again(slots_ptr, group, n_parts, stride)
    tag = tag_of(tl.load(slots_ptr + part, volatile=True))
    if K.publish:
        tag = 1 - tag
    return slots_ptr, tag


@triton.jit
def wait_for(slot_ptrs, message, wanted, tag):
    """(messages, whether one is missing): re-read the wanted slots until all carry this launch's tag, or for POLLS.

    One lane a slot, and only while it is missing.
    """
    missing = wanted & (tag_of(message) != tag)
    left = tl.max(missing.to(tl.int32), axis=None)
    polls = 0
    while (left > 0) & (polls < POLLS):
        message = tl.load(slot_ptrs, mask=missing, other=message, volatile=True)
        missing = wanted & (tag_of(message) != tag)
        left = tl.max(missing.to(tl.int32), axis=None)
        polls += 1
    return message, left


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
    """(the messages of all parts of a row, a lane each, whether one is missing still).

    Programs that poll the last part first, and alone, are many: it starts last.
    """
    LANES: tl.constexpr = K.lanes
    j = tl.arange(0, LANES)
    slots_ptr += (part % K.copies) * n_parts
    message = tl.zeros([LANES], tl.int64) + ((1 - tag) << 31)
    if K.poll_last_first:
        message, _ = wait_for(slots_ptr + j, message, j == n_parts - 1, tag)
    message = tl.load(slots_ptr + j, mask=(j < n_parts) & (tag_of(message) != tag), other=message, volatile=True)
    message, left = wait_for(slots_ptr + j, message, j < n_parts, tag)
    return message, in_any_warp(left, K)


@triton.jit
def collect_several(slots_ptr, step, part, n_parts, tag, THIRD: tl.constexpr, K: tl.constexpr):
    """Two messages of all parts of a row, or three (THIRD), whose slots lie `step` apart, and whether one is missing.

    As `collect`, but asked for together: one after another, each would take its own way to L2 and back.
    """
    LANES: tl.constexpr = K.lanes
    j = tl.arange(0, LANES)
    on = j < n_parts
    slot_ptrs = slots_ptr + (part % K.copies) * n_parts + j
    old = tl.zeros([LANES], tl.int64) + ((1 - tag) << 31)
    if K.poll_last_first:
        wait_for(slot_ptrs, old, j == n_parts - 1, tag)
    a, b, c = load_several(slot_ptrs, step, on, old, old, old, THIRD)
    missing = on & ((tag_of(a) != tag) | (tag_of(b) != tag) | (THIRD & (tag_of(c) != tag)))
    left = tl.max(missing.to(tl.int32), axis=0)
    rounds = 0
    while (left > 0) & (rounds < POLLS):
        a, b, c = load_several(slot_ptrs, step, missing, a, b, c, THIRD)
        missing = on & ((tag_of(a) != tag) | (tag_of(b) != tag) | (THIRD & (tag_of(c) != tag)))
        left = tl.max(missing.to(tl.int32), axis=0)
        rounds += 1
    return a, b, c, in_any_warp(left, K)


@triton.jit
def load_several(slot_ptrs, step, on, a, b, c, THIRD: tl.constexpr):
    a = tl.load(slot_ptrs, mask=on, other=a, volatile=True)
    b = tl.load(slot_ptrs + step, mask=on, other=b, volatile=True)
    if THIRD:
        c = tl.load(slot_ptrs + 2 * step, mask=on, other=c, volatile=True)
    return a, b, c


@triton.jit
def in_any_warp(flag, K: tl.constexpr):
    """Whether the flag, 0 or 1, is set in any warp: what each of them has read for itself may differ.

    A barrier too. Triton puts none before a call, although what is called writes shared memory that others still read.
    """
    if K.ptx:
        return tl.inline_asm_elementwise(IN_ANY_WARP, "=r,r", [flag], dtype=tl.int32, is_pure=False, pack=1)
    else:
        return tl.max(tl.zeros([256], tl.int32) + flag, axis=0)


@triton.jit
def slots_again(slots_ptr, group, n_parts, stride):
    """Where the slots of a group begin: `slots_of`, for a program that has its tag."""
    return slots_ptr + group.to(tl.int64) * n_parts * stride


@triton.jit
def stand_in(slots_ptr, n_parts, tag, STATE: tl.constexpr, given, K: tl.constexpr):
    """The messages of all parts: those missing are computed here, STATE(part, given, K) being a part's (m, s).

    Nothing is written: a part's slot is its own, which tells it the launch's tag when it starts. A part overwrites its
    data, if it does, once it has all messages, its own among them. So where a message is still missing after its part's
    data was read, the part had not overwritten it, and what was read is whole. All warps compute a part that any of
    them misses.
    """
    LANES: tl.constexpr = K.lanes
    j = tl.arange(0, LANES)
    message = tl.zeros([LANES], tl.int64) + ((1 - tag) << 31)
    message, part = next_missing(slots_ptr, message, tl.zeros([], tl.int32), n_parts, tag, K)
    while part < n_parts:
        m, s = STATE(part, given, K)
        tl.debug_barrier()  # no slot is read before the data was
        slot_ptrs = slots_ptr + (part % K.copies) * n_parts + j
        message = tl.load(slot_ptrs, mask=(j < n_parts) & (tag_of(message) != tag), other=message, volatile=True)
        message = tl.where((j == part) & (tag_of(message) != tag), pack_state(m, s, tag), message)
        message, part = next_missing(slots_ptr, message, part + 1, n_parts, tag, K)
    return message


@triton.jit
def next_missing(slots_ptr, message, part, n_parts, tag, K: tl.constexpr):
    """(messages, the first part from `part` on that a warp misses, or n_parts).

    Of copies that is read which the part itself reads.
    """
    j = tl.arange(0, K.lanes)
    missing = tl.zeros([], tl.int32)
    while (part < n_parts) & (missing == 0):
        slot_ptrs = slots_ptr + (part % K.copies) * n_parts + j
        message = tl.load(slot_ptrs, mask=(j < n_parts) & (tag_of(message) != tag), other=message, volatile=True)
        missing = in_any_warp(tl.max(((j == part) & (tag_of(message) != tag)).to(tl.int32), axis=0), K)
        part += 1 - missing
    return message, part


@triton.jit
def states_of(message, n_parts, K: tl.constexpr):
    """(m, s) of every part, a lane each; empty past the last one."""
    peer = tl.arange(0, K.lanes) < n_parts
    m_parts, s_parts = unpack_state(message)
    return tl.where(peer, m_parts, NEG_INF), tl.where(peer, s_parts, 0.0)


@triton.jit
def merged(message, n_parts, K: tl.constexpr):
    """The state of a row by the messages of all its parts."""
    m_parts, s_parts = states_of(message, n_parts, K)
    m = tl.max(m_parts, axis=0)
    return m, tl.sum(rounded_product(s_parts, weight_of(m_parts, m, K.ptx)), axis=0)


@triton.jit
def merged_greedy(message, part, n_parts, greedy, sink, K: tl.constexpr):
    """`merged`, of rows that may be greedy: of parts that share the maximum the first has it, and s counts all.

    In a greedy row s is the winner's alone, or NaN, and all other parts get m = +inf. The sink is counted already.
    """
    m_parts, s_parts = states_of(message, n_parts, K)
    m = tl.max(m_parts, axis=0)
    s = tl.sum(rounded_product(s_parts, weight_of(m_parts, m, K.ptx)), axis=0)
    j = tl.arange(0, K.lanes)
    winner = tl.min(tl.where(m_parts == m, j, K.lanes), axis=0)
    s = tl.where(greedy & (s > 0), tl.sum(tl.where(j == winner, s_parts, 0.0), axis=0), s)
    m, s = with_sink(m, s, sink, K)
    m = tl.where(greedy & (part != winner) & (s == s), float("inf"), m)
    return m, s


@triton.jit
def summed(message, n_parts, K: tl.constexpr):
    """The sum of a number that each part has told, which needs no rescaling."""
    d_parts, _ = states_of(message, n_parts, K)
    return tl.sum(tl.where(tl.arange(0, K.lanes) < n_parts, d_parts, 0.0), axis=0)


@triton.jit
def wait_for_launch_before(FOLLOWS: tl.constexpr):
    if FOLLOWS:
        gdc_wait()


@triton.jit
def let_next_begin(LEADS: tl.constexpr):
    """The next launch may begin once every program has said so, or has ended."""
    if LEADS:
        gdc_launch_dependents()
