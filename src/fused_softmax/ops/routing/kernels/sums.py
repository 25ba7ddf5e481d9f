"""What rows add up to: counts, probabilities and both losses, with the same bits in whatever order programs end.

A program has its rows' sums in registers (`held.py`), or reads its rows again (`add_rows`). Programs add integers by
atomics: counts, and probabilities in units of 1 / unit. The order of integers does not change their sum. Programs take
turns with K.copies copies of the slots, so that fewer wait for the same one. A ticket tells which program is the last
one of its sequence, and of all. It finishes the sums, and sets the slots of all rows back to 0.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.state import NEG_INF
from fused_softmax.ops.routing.kernels import spec
from fused_softmax.ops.routing.kernels.common import score_beside

# Slots after those of experts: routed rows; programs, or sequences, that are done; sequences with a routed row.
ROWS_AT, DONE_AT, SEQUENCES_AT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
BESIDE = tl.constexpr(spec.BESIDE)
ADDED = tl.constexpr(1024)  # programs, or sequences, whose numbers are added at a time


@triton.jit
def add_rows(
    x_ptr, noise_ptr, indices_ptr, states_ptr, x_row_stride, noise_row_stride, first, end, sequence, n_parts,
    n_sequences, S, K: tl.constexpr,
):  # fmt: skip
    """Add the rows [first, end) of a sequence, of which this program has written the states and indices."""
    SUM_ROWS: tl.constexpr = K.sum_rows
    SUM_COLS: tl.constexpr = K.sum_cols
    slots_ptr = copy_of(slots_of(sequence, S, K), K)
    for block in range(0, K.n_experts, K.sum_cols):
        expert = block + tl.arange(0, K.sum_cols)
        there = expert < K.n_experts
        probs = tl.zeros([SUM_ROWS, SUM_COLS], tl.float32)
        for at in range(first, end, K.sum_rows):
            probs += probs_of(x_ptr, noise_ptr, states_ptr, x_row_stride, noise_row_stride, at, end, expert, there, K)
        units = (tl.sum(probs, axis=0) * S.unit).to(tl.int64)
        tl.atomic_add(slots_ptr + expert, units, mask=there, sem="relaxed")
        count = counts_of(indices_ptr, first, end, block, K)
        tl.atomic_add(slots_ptr + K.n_experts + expert, count.to(tl.int64), mask=there, sem="relaxed")
    n, squares = routed_of(states_ptr, first, end, K)
    close(n, squares, sequence, n_parts, n_sequences, S, K)


@triton.jit
def slots_of(sequence, S, K: tl.constexpr):
    """The slots of a sequence: the probabilities of all experts, the counts of all experts, and BESIDE more."""
    return S.slots_ptr + sequence.to(tl.int64) * (2 * K.n_experts + BESIDE)


@triton.jit
def copy_of(slots_ptr, K: tl.constexpr):
    """The copy of a sequence's slots that this program adds to."""
    return slots_ptr + tl.program_id(0) % K.copies * (2 * K.n_experts + BESIDE)


@triton.jit
def close(n, squares, sequence, n_parts, n_sequences, S, K: tl.constexpr):
    """Add a program's n routed rows and their squares. The last program of the sequence finishes it."""
    slots_ptr = slots_of(sequence, S, K)
    beside_ptr = slots_ptr + 2 * K.n_experts
    tl.atomic_add(beside_ptr + ROWS_AT, n, sem="relaxed")
    if S.squares_ptr is not None:
        tl.store(S.squares_ptr + tl.program_id(0), squares)
    tl.debug_barrier()  # the thread that draws the ticket releases what all threads have added
    if tl.atomic_add(beside_ptr + DONE_AT, 1, sem="acq_rel") == n_parts - 1:
        n = tl.load(beside_ptr + ROWS_AT, volatile=True)
        if K.sequences:
            finish_sequence(slots_ptr, sequence, n, n_sequences, S, K)
        else:
            of_first = first_squares(S)
            loss = finish_counts(slots_ptr, S, K)
            share = share_of(n, K)
            tl.store(S.shares_ptr + 2, share)
            finish_losses(loss * share, of_first, n, tl.full([], 1, tl.int64), slots_ptr, S, K)


@triton.jit
def probs_of(x_ptr, noise_ptr, states_ptr, x_row_stride, noise_row_stride, at, end, expert, there, K: tl.constexpr):
    """The probabilities of some experts of rows, [K.sum_rows, K.sum_cols]; 0 in rows that are not routed."""
    row = at + tl.arange(0, K.sum_rows)
    here = row < end
    m = tl.load(states_ptr + row * K.states, mask=here, other=0.0)
    total = tl.load(states_ptr + row * K.states + 1, mask=here, other=0.0)
    on = (here & (total > 0))[:, None] & there[None, :]
    if K.aligned:
        x_row_stride = x_row_stride // 8 * 8  # the argument itself says nothing of this, lest `tiles_of` reads vectors
    x = tl.load(x_ptr + (row * x_row_stride)[:, None] + expert[None, :], mask=on, other=NEG_INF).to(tl.float32)
    if noise_ptr is not None:
        noise = tl.load(noise_ptr + (row * noise_row_stride)[:, None] + expert[None, :], mask=on, other=0.0)
        x += noise.to(tl.float32)
    if K.by_softmax:
        share = 1.0 / tl.where(total > 0, total, 1.0)
        return tl.exp(x - m[:, None]) * share[:, None]
    else:
        of_scores = tl.load(states_ptr + row * K.states + 2, mask=here, other=1.0)
        share = 1.0 / tl.where(of_scores > 0, of_scores, 1.0)
        return tl.where(on, score_beside(x, m[:, None], K) * share[:, None], 0.0)


@triton.jit
def counts_of(indices_ptr, first, end, block, K: tl.constexpr):
    """How often the rows [first, end) have chosen each of the experts from `block` on, int32 [K.sum_cols]."""
    SUM_COLS: tl.constexpr = K.sum_cols
    counts = tl.zeros([SUM_COLS], tl.int32)
    for at in range(first * K.k, end * K.k, K.sum_ids):
        j = at + tl.arange(0, K.sum_ids)
        id = tl.load(indices_ptr + j, mask=j < end * K.k, other=-1) - block
        counts += tl.histogram(id, SUM_COLS, mask=(id >= 0) & (id < K.sum_cols))
    return counts


@triton.jit
def routed_of(states_ptr, first, end, K: tl.constexpr):
    """(how many of the rows [first, end) are routed, int64; the sum of their (m + log s) ** 2)."""
    SUM_ROWS: tl.constexpr = K.sum_rows
    n = tl.zeros([SUM_ROWS], tl.int64)
    squares = tl.zeros([SUM_ROWS], tl.float32)
    for at in range(first, end, K.sum_rows):
        row = at + tl.arange(0, K.sum_rows)
        m = tl.load(states_ptr + row * K.states, mask=row < end, other=0.0)
        total = tl.load(states_ptr + row * K.states + 1, mask=row < end, other=0.0)
        lse = m + tl.log(tl.where(total > 0, total, 1.0))
        n += (total > 0).to(tl.int64)
        squares += tl.where(total > 0, lse * lse, 0.0)
    return tl.sum(n, axis=0), tl.sum(squares, axis=0)


@triton.jit
def share_of(n, K: tl.constexpr):
    """n_experts / (n ** 2 * k) of n rows, with n at least 1: what the loss is of the sum of count * sum p."""
    rows = tl.maximum(n, 1).to(tl.float32)
    return K.n_experts / (rows * rows * K.k)


@triton.jit
def added_in(slots_ptr, expert, K: tl.constexpr):
    """What programs have added for some experts: probabilities in units, and counts."""
    COPIES: tl.constexpr = K.copies
    there = expert < K.n_experts
    units, count = tl.zeros(expert.shape, tl.int64), tl.zeros(expert.shape, tl.int64)
    for _ in tl.static_range(COPIES):
        units += tl.load(slots_ptr + expert, mask=there, other=0, volatile=True)
        count += tl.load(slots_ptr + K.n_experts + expert, mask=there, other=0, volatile=True)
        slots_ptr += 2 * K.n_experts + BESIDE
    return units, count


@triton.jit
def finish_sequence(slots_ptr, sequence, n, n_sequences, S, K: tl.constexpr):
    """Add a sequence of n rows to the sums of all rows. The last sequence finishes these."""
    loss = tl.zeros([], tl.float64)
    for block in range(0, K.n_experts, K.sum_cols):
        expert = block + tl.arange(0, K.sum_cols)
        there = expert < K.n_experts
        units, count = added_in(slots_ptr, expert, K)
        at = sequence.to(tl.int64) * K.n_experts + expert
        tl.store(S.of_sequences_ptr + at, count.to(tl.int32), mask=there)
        tl.atomic_add(S.all_ptr + expert, units, mask=there, sem="relaxed")
        tl.atomic_add(S.all_ptr + K.n_experts + expert, count, mask=there, sem="relaxed")
        loss += tl.sum(units.to(tl.float64) * (1.0 / S.unit) * count.to(tl.float64), axis=0)
    share = share_of(n, K)
    tl.store(S.balances_ptr + sequence, loss * share)
    tl.store(S.shares_ptr + 2 + sequence, share)
    beside_ptr = S.all_ptr + 2 * K.n_experts
    tl.atomic_add(beside_ptr + ROWS_AT, n, sem="relaxed")
    tl.atomic_add(beside_ptr + SEQUENCES_AT, (n > 0).to(tl.int64), sem="relaxed")
    tl.debug_barrier()
    if tl.atomic_add(beside_ptr + DONE_AT, 1, sem="acq_rel") == n_sequences - 1:
        n_counted = tl.load(beside_ptr + SEQUENCES_AT, volatile=True)
        n_routed = tl.load(beside_ptr + ROWS_AT, volatile=True)
        of_first = first_squares(S)
        finish_counts(S.all_ptr, S, K)
        balances = tl.zeros([ADDED], tl.float64)
        for first in range(0, n_sequences, ADDED):
            j = first + tl.arange(0, ADDED)
            balances += tl.load(S.balances_ptr + j, mask=j < n_sequences, other=0.0, volatile=True)
        aux_loss = tl.sum(balances, axis=0) / tl.maximum(n_counted, 1).to(tl.float64)
        finish_losses(aux_loss, of_first, n_routed, n_counted, S.all_ptr, S, K)


@triton.jit
def finish_counts(slots_ptr, S, K: tl.constexpr):
    """Write counts and sums of probabilities, set their slots to 0, and return the sum of count * sum p."""
    COPIES: tl.constexpr = K.copies
    loss = tl.zeros([], tl.float64)
    for block in range(0, K.n_experts, K.sum_cols):
        expert = block + tl.arange(0, K.sum_cols)
        there = expert < K.n_experts
        units, count = added_in(slots_ptr, expert, K)
        probs = units.to(tl.float64) * (1.0 / S.unit)  # which is a power of 2
        tl.store(S.counts_ptr + expert, count.to(tl.int32), mask=there)
        tl.store(S.prob_sums_ptr + expert, probs.to(tl.float32), mask=there)
        for copy in tl.static_range(COPIES):
            at = slots_ptr + copy * (2 * K.n_experts + BESIDE) + expert
            tl.store(at, tl.zeros(expert.shape, tl.int64), mask=there)
            tl.store(at + K.n_experts, tl.zeros(expert.shape, tl.int64), mask=there)
        loss += tl.sum(probs * count.to(tl.float64), axis=0)
    return loss


@triton.jit
def first_squares(S):
    """The squares of the first programs, so that this load does not wait for others; 0 without a z-loss."""
    j = tl.arange(0, ADDED)
    squares = tl.zeros([ADDED], tl.float32)
    if S.z_loss_ptr is not None:
        squares = tl.load(S.squares_ptr + j, mask=j < tl.num_programs(0), other=0.0, volatile=True)
    return squares


@triton.jit
def finish_losses(aux_loss, of_first, n, n_counted, slots_ptr, S, K: tl.constexpr):
    """Write the losses of all n rows, with n_counted sequences, and set the slots after those of experts to 0.

    of_first: the squares of the first programs.
    """
    of_rows = 1.0 / tl.maximum(n, 1).to(tl.float32)
    if S.aux_loss_ptr is not None:
        tl.store(S.aux_loss_ptr, aux_loss.to(tl.float32))
    if S.z_loss_ptr is not None:
        squares = of_first.to(tl.float64)
        for first in range(ADDED, tl.num_programs(0), ADDED):
            j = first + tl.arange(0, ADDED)
            squares += tl.load(S.squares_ptr + j, mask=j < tl.num_programs(0), other=0.0, volatile=True).to(tl.float64)
        tl.store(S.z_loss_ptr, (tl.sum(squares, axis=0) * of_rows).to(tl.float32))
    tl.store(S.shares_ptr, of_rows)
    tl.store(S.shares_ptr + 1, 1.0 / tl.maximum(n_counted, 1).to(tl.float32))
    for i in tl.static_range(BESIDE):
        tl.store(slots_ptr + 2 * K.n_experts + i, tl.zeros([], tl.int64))
