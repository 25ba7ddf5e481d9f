"""How programs exchange the states of a row whose columns lie on several GPUs: in slots that every GPU may write.

Each rank has slots in its own memory, ranks * (n_parts + 1) a row for each message of a part, and the ranks write into
each other's: a part its state, and a rank its header, which holds the target's logit, where the rank has it, and a
digest of what was asked. A message is written whole into every rank's slots, its own among them, and each program polls
its own rank's. All ranks merge the same messages in the same order, and so get the same bits.

There are two sets of slots. A launch takes the set that the launch before it left alone, and flips its tag. A program
tells both by its own slot, so that a captured graph replays. This is safe. Who is in launch k + 2 has seen messages of
launch k + 1 from all ranks, so these have ended launch k, and read its set no more. A launch ends when its programs
have seen all slots of their rows flipped. So the slots of a row are in step between launches, and where rows have
equally many slots, a launch may have any number of rows.

Programs start in the order of rows on every rank, and a row's parts are few. So the first row that is not finished has
all its programs on all chips that have launched, and nothing waits in a circle. A rank that comes late is waited for,
as long as the group's timeout. Then rows become NaN, and a word tells the host who was missing.

The first program also tells every rank which launch this one is: its number, one more than of the launch before, and
the digest. Who has waited long looks there. A launch of the same number and another digest will never send what this
one waits for, and a rank whose word is negative has refused its call, or a launch of it has failed.

After a launch that has failed a rank waits no more, so it could run ahead of the others, and tags repeat. Therefore its
later launches send nothing, and no message carries their tag, until the hosts begin anew.

An all_gather of few numbers a row, through the slots by which kernels tell their states.

Traffic: 8 bytes for each 32 bits, into every rank's slots.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.exchange import pack_state, states_of, tag_of, wait_for
from fused_softmax.core.kernels.state import rounded_product, weight_of

DIGEST = tl.constexpr(0x7FFFFFFF)
MISSING = tl.constexpr(1)
DIFFERENT = tl.constexpr(2)
FAILED = tl.constexpr(-(2**63))  # the sign of a rank's word
NO_TAG = tl.constexpr(2)  # which no message carries


@triton.jit
def turn_of(slots_ptr, own, set_size, asked_ptr, rank, K: tl.constexpr):
    """(where this launch's set begins, its tag), by the slot `own`, which no other program writes.

    The tag is NO_TAG once a launch of this rank has failed, or its host has refused a call.
    """
    first = tag_of(tl.load(slots_ptr + own, volatile=True))
    second = tag_of(tl.load(slots_ptr + set_size + own, volatile=True))
    if K.publish:
        turn = first ^ second
        tag = 1 - tl.where(turn == 0, first, second)
    else:  # the launch before has written it
        turn = 1 - (first ^ second)
        tag = tl.where(turn == 0, first, second)
    return turn * set_size, tl.where(tl.load(asked_ptr + rank, volatile=True) < 0, NO_TAG, tag)


@triton.jit
def header_of(value, digest, tag):
    """A number in fp32, the digest of what a rank asks for, and the tag."""
    high = value.to(tl.int32, bitcast=True).to(tl.int64) << 32
    return high | digest | (tag << 31)


@triton.jit
def bases_of(bases_ptr, ranks, K: tl.constexpr):
    """Where each rank's slots begin, a lane each."""
    j = tl.arange(0, K.lanes)
    return tl.load(bases_ptr + j, mask=j < ranks, other=0)


@triton.jit
def send(bases, at, message, ranks, K: tl.constexpr):
    """Write a message into slot `at` of every rank. It is whole at once, and needs no fence."""
    LANES: tl.constexpr = K.lanes
    j = tl.arange(0, LANES)
    store_far(bases + at * 8, message + tl.zeros([LANES], tl.int64), j < ranks, K)


@triton.jit
def store_far(addresses, messages, on, K: tl.constexpr):
    """Write 64 bits each to addresses of any GPU."""
    if K.ptx:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.relaxed.sys.global.b64 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,l,r",
            [addresses, messages, on.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(addresses.to(tl.pointer_type(tl.int64)), messages, mask=on)


@triton.jit
def nanoseconds(K: tl.constexpr):
    """The device's clock, a lane each: lanes read it at different times, and no thread decides alone."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; mov.b32 t, $1; mov.u64 $0, %globaltimer; }",
        "=l,r",
        [tl.arange(0, K.lanes)],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def announce(bases_ptr, asked_ptr, rank, ranks, digest, K: tl.constexpr):
    """Tell every rank which launch this is, or that an earlier one failed. asked_ptr: this rank's words, one a rank.

    Another program of this launch may set the sign of this rank's own word meanwhile. So the word is added to, and not
    overwritten.
    """
    LANES: tl.constexpr = K.lanes
    j = tl.arange(0, LANES)
    words = tl.load(bases_ptr + ranks + 2 + j, mask=j < ranks, other=0)
    last = tl.load(asked_ptr + rank, volatile=True)
    tl.debug_barrier()  # all have read it before one writes it
    word = ((((last >> 32) + 1) & DIGEST) << 32) | digest
    word = tl.where(last < 0, last, word)
    store_far(words + rank * 8, word + tl.zeros([LANES], tl.int64), (j < ranks) & (j != rank), K)
    tl.atomic_add(asked_ptr + rank, word - last, sem="relaxed")


@triton.jit
def odd_one(asked_ptr, rank, ranks, K: tl.constexpr):
    """The first other rank that has failed or refused, or whose launch of this number differs; K.lanes: there is none.

    This rank's own word is compared as it stands there, so that one that is yet to be written does no harm.
    """
    j = tl.arange(0, K.lanes)
    asked = tl.load(asked_ptr + j, mask=j < ranks, other=0, volatile=True)
    differs = asked ^ tl.load(asked_ptr + rank, volatile=True)
    odd = (asked < 0) | ((((differs >> 32) & DIGEST) == 0) & ((differs & DIGEST) != 0))
    return tl.min(tl.where((j < ranks) & (j != rank) & odd, j, K.lanes), axis=0)


@triton.jit
def wait_long(slot_ptrs, asked_ptr, rank, ranks, message, wanted, tag, limit, K: tl.constexpr):
    """`wait_for`, for `limit` nanoseconds more; polls, where there is no clock. It ends where a rank is at odds."""
    waiting = 1
    polls = 0
    if K.ptx:
        begin = nanoseconds(K)
    while waiting > 0:
        odd = odd_one(asked_ptr, rank, ranks, K)  # before the messages, which an earlier launch may have left
        message = tl.load(slot_ptrs, mask=wanted & (tag_of(message) != tag), other=message, volatile=True)
        missing = wanted & (tag_of(message) != tag)
        if K.ptx:
            missing = missing & (nanoseconds(K) - begin < limit)
        else:
            missing = missing & (polls < limit)
        waiting = tl.where(odd < K.lanes, 0, tl.max(missing.to(tl.int32), axis=0))
        polls += 1
    return message


@triton.jit
def collect(slots_ptr, bases_ptr, asked_ptr, rank, ranks, n_slots, tag, K: tl.constexpr):
    """The messages of a row, a lane each; some may be missing when the wait is over."""
    LANES: tl.constexpr = K.lanes
    j = tl.arange(0, LANES)
    message = tl.zeros([LANES], tl.int64) + ((1 - tag) << 31)
    message, left = wait_for(slots_ptr + j, message, j < n_slots, tag)
    if left > 0:
        limit = tl.load(bases_ptr + ranks + 1)
        # Who starts after another has given up does not wait as long again. The host's word, which says so too, is far.
        limit = tl.where(tl.load(asked_ptr + rank, volatile=True) < 0, 0, limit)
        message = wait_long(slots_ptr + j, asked_ptr, rank, ranks, message, j < n_slots, tag, limit, K)
    return message


@triton.jit
def word_of(bases_ptr, ranks):
    """Where the host is told who was missing."""
    return tl.load(bases_ptr + ranks).to(tl.pointer_type(tl.int64))


@triton.jit
def fail(bases_ptr, asked_ptr, row, who, lost, rank, ranks, K: tl.constexpr):
    """Leave word of a row for which a rank has sent nothing (lost > 0), or a message of another launch.

    The first word for the host stays, because later launches do not wait, and so know less of the cause. They learn of
    the failure from this rank's own word, and tell the other ranks.
    """
    odd = odd_one(asked_ptr, rank, ranks, K)
    lost = tl.where(odd < K.lanes, 0, lost)
    who = tl.where(odd < K.lanes, odd, who)
    word = (row << 16) | (who.to(tl.int64) << 2) | tl.where(lost > 0, MISSING, DIFFERENT)
    at = word_of(bases_ptr, ranks)
    tl.store(at, word, mask=tl.load(at, volatile=True) == 0)
    tl.atomic_or(asked_ptr + rank, FAILED, sem="relaxed")


@triton.jit
def sum_of_pairs(x):
    """The sum of x [n], neighbours first: in one order in all kernels, while tl.sum's follows how each lays x out."""
    for _ in tl.static_range(16):
        if x.shape[0] > 1:
            x = tl.sum(tl.reshape(x, [x.shape[0] // 2, 2]), axis=1)
    return tl.sum(x, axis=0)


@triton.jit
def are_headers(n_states, ranks, K: tl.constexpr):
    """Which lanes have the headers of a row's messages: the states of its parts stand before them."""
    j = tl.arange(0, K.lanes)
    return (j >= n_states) & (j < n_states + ranks)


@triton.jit
def doubt_of(message, bases_ptr, asked_ptr, row, n_parts, rank, ranks, digest, tag, K: tl.constexpr):
    """NaN, where a message is missing or a rank has asked for something else, and the host is told; 0 otherwise."""
    j = tl.arange(0, K.lanes)
    n_states = n_parts * ranks
    heads = are_headers(n_states, ranks, K)
    missing = (j < n_states + ranks) & (tag_of(message) != tag)
    wrong = missing | (heads & ((message & DIGEST) != digest))
    first = tl.min(tl.where(wrong, j, K.lanes), axis=0)
    doubt = tl.zeros([], tl.float32)
    if first < K.lanes:
        lost = tl.max((missing & (j == first)).to(tl.int32), axis=0)
        who = tl.where(first < n_states, first // n_parts, first - n_states)
        fail(bases_ptr, asked_ptr, row, who, lost, rank, ranks, K)
        doubt += float("nan")
    return doubt


@triton.jit
def state_of(message, bases_ptr, asked_ptr, row, n_parts, rank, ranks, digest, tag, K: tl.constexpr):
    """(m, s, value) of a whole row: the sum of its headers' values, of which all but one are 0. s is NaN in doubt."""
    n_states = n_parts * ranks
    m_parts, s_parts = states_of(message, n_states, K)
    m = tl.max(m_parts, axis=0)
    s = sum_of_pairs(rounded_product(s_parts, weight_of(m_parts, m, K.ptx)))
    value = (message >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    value = tl.sum(tl.where(are_headers(n_states, ranks, K), value, 0.0), axis=0)
    s += doubt_of(message, bases_ptr, asked_ptr, row, n_parts, rank, ranks, digest, tag, K)
    return m, s, value


@triton.jit
def tell(m, s, value, heads, bases, row_at, part, n_parts, rank, ranks, digest, tag, K: tl.constexpr):
    """Send a part's state to all ranks, and from one part of a rank (where `heads`) its header."""
    to = tl.where(tag == NO_TAG, 0, ranks)
    send(bases, row_at + rank * n_parts + part, pack_state(m, s, tag), to, K)
    if heads:
        send(bases, row_at + ranks * n_parts + rank, header_of(value, digest, tag), to, K)


@triton.jit(do_not_specialize=["n", "n_rows", "words", "rank", "ranks", "digest", "set_size"])
def _peer_gather(
    slots_ptr, bases_ptr, asked_ptr, own_ptr, heard_ptr, n, n_rows, words, rank, ranks, digest, set_size,
    K: tl.constexpr,
):  # fmt: skip
    """heard [ranks, n] of every rank's own [n], of 32 bits each; K.lanes of them a program, and a slot for each.

    words: of a number. n_rows: numbers of one kind, which are those of rows. What is missing becomes NaN.
    """
    LANES: tl.constexpr = K.lanes
    program = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, LANES)
    at = program * LANES + j
    row_at = program * ranks * LANES
    start, tag = turn_of(slots_ptr, row_at + rank * LANES, set_size, asked_ptr, rank, K)
    tl.debug_barrier()  # that slot is read by all before one writes it
    row_at += start
    if K.publish:
        own = tl.load(own_ptr + at, mask=at < n, other=0).to(tl.int64)
        for other in range(tl.where(tag == NO_TAG, 0, ranks)):
            base = tl.load(bases_ptr + other)
            store_far(base + (row_at + rank * LANES + j) * 8, (own << 32) | digest | (tag << 31), j < LANES, K)
        if program == 0:
            announce(bases_ptr, asked_ptr, rank, ranks, digest, K)
    if K.collect:
        for other in range(ranks):
            message = collect(slots_ptr + row_at + other * LANES, bases_ptr, asked_ptr, rank, ranks, LANES, tag, K)
            missing = tag_of(message) != tag
            wrong = (at < n) & (missing | ((message & DIGEST) != digest))
            tl.store(heard_ptr + at, tl.where(wrong, -1, message >> 32).to(tl.int32), mask=at < n)
            heard_ptr += n
            first = tl.min(tl.where(wrong, j, LANES), axis=0)
            if first < LANES:
                lost = tl.max((missing & (j == first)).to(tl.int32), axis=0)
                row = (program * LANES + first) // words % n_rows
                fail(bases_ptr, asked_ptr, row, other, lost, rank, ranks, K)
