"""An all_gather of few numbers a row, through the slots by which kernels tell their states.

Traffic: 8 bytes for each 32 bits, into every rank's slots.
"""

import triton
import triton.language as tl

from fused_softmax.kernels.exchange import tag_of
from fused_softmax.kernels.peers import DIGEST, announce, collect, store_far, tell_host, turn_of


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
    start, tag = turn_of(slots_ptr, row_at + rank * LANES, set_size, K)
    tl.debug_barrier()  # that slot is read by all before one writes it
    row_at += start
    if K.publish:
        own = tl.load(own_ptr + at, mask=at < n, other=0).to(tl.int64)
        for other in range(ranks):
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
                tell_host(bases_ptr, asked_ptr, row, other, lost, rank, ranks, K)
