"""How programs that share a row exchange its state: one 64-bit message each, whose tag flips at every launch.

Every launch flips the tag of every slot of a row. So an old message never passes for a new one, and nothing is reset
between launches (a sense-reversing barrier). No program depends on another: a program that has waited long reads the
missing parts itself, computes their states with the same bits, and goes on. A scan's decoupled fallback does the same
(Smith, Levien, Owens, "Decoupled Fallback", SPAA 2025).

A launch may begin while the one before it ends: programmatic dependent launch, of sm_90 and later. A kernel launched so
(`launch_pdl`) may be resident before the previous launch is done. Each of its programs waits before it reads or writes
what that launch wrote. What earlier launches wrote is there too: the previous launch began as usual, after all of them,
or has itself waited for the one before it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fused_softmax.core.kernels.state import NEG_INF, rounded_product, weight_of, with_sink

POLLS = tl.constexpr(512)  # reads of L2: more than parts take to wait for each other, if all of them run
IN_ANY_WARP = tl.constexpr(
    "{ .reg .pred mine, any; setp.ne.s32 mine, $1, 0; bar.red.or.pred any, 0, mine; selp.s32 $0, 1, 0, any; }"
)


@triton.jit
def pack_state(m, s, tag):
    """(m, s) in fp32 and a tag of one bit, in 64 bits. A message that is written whole needs no flag and no fence.

    The tag takes the place of the sign of s.
    """
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
    """(where the slots of a group of n_parts programs begin, this launch's tag). stride: slots of each part."""
    slots_ptr = slots_again(slots_ptr, group, n_parts, stride)
    tag = tag_of(tl.load(slots_ptr + part, volatile=True))
    if K.publish:
        tag = 1 - tag
    return slots_ptr, tag


@triton.jit
def wait_for(slot_ptrs, message, wanted, tag):
    """(messages, whether one is missing): re-read the wanted slots until all have this launch's tag, or POLLS times.

    Each slot is read by one lane, and only while it is missing.
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
    """(the messages of all parts of a row, one a lane; whether one is still missing).

    If many programs share a row (K.poll_last_first), they first poll the last part alone, because it starts last.
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
    """Two messages of all parts of a row, or three (THIRD), whose slots lie `step` apart; and whether one is missing.

    As `collect`, but they are requested together. One after another, each would make its own way to L2 and back.
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
    """Whether the flag, 0 or 1, is set in any warp: warps may have read different messages.

    It is a barrier too. Triton puts none before a call, although the callee writes shared memory that others may still
    read.
    """
    if K.ptx:
        return tl.inline_asm_elementwise(IN_ANY_WARP, "=r,r", [flag], dtype=tl.int32, is_pure=False, pack=1)
    else:
        return tl.max(tl.zeros([256], tl.int32) + flag, axis=0)


@triton.jit
def slots_again(slots_ptr, group, n_parts, stride):
    """Where the slots of a group begin: `slots_of` for a program that has its tag already."""
    return slots_ptr + group.to(tl.int64) * n_parts * stride


@triton.jit
def stand_in(slots_ptr, n_parts, tag, STATE: tl.constexpr, given, K: tl.constexpr):
    """The messages of all parts. Missing ones are computed here: STATE(part, given, K) is a part's (m, s).

    Nothing is written to slots: a part's slot belongs to the part, which learns the launch's tag from it when it
    starts. A part may overwrite its data, but only once it has all messages, its own among them. So if a part's message
    is still missing after the part's data was read, the data had not been overwritten, and what was read is whole. All
    warps compute a part that any of them misses.
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

    Each part's message is read in the copy of the slots that the part itself reads.
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
    """(m, s) of every part, one a lane; the empty state past the last one."""
    peer = tl.arange(0, K.lanes) < n_parts
    m_parts, s_parts = unpack_state(message)
    return tl.where(peer, m_parts, NEG_INF), tl.where(peer, s_parts, 0.0)


@triton.jit
def merged(message, n_parts, K: tl.constexpr):
    """The state of a row, from the messages of all its parts."""
    m_parts, s_parts = states_of(message, n_parts, K)
    m = tl.max(m_parts, axis=0)
    return m, tl.sum(rounded_product(s_parts, weight_of(m_parts, m, K.ptx)), axis=0)


@triton.jit
def merged_greedy(message, part, n_parts, greedy, sink, K: tl.constexpr):
    """`merged` for rows that may be greedy, with the sink.

    If parts share the maximum of a greedy row, the first of them has it. s is then that of this part alone, or NaN, and
    all other parts get m = +inf. In other rows s counts all parts.
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
    """The sum of a number that each part has told. It needs no rescaling."""
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
