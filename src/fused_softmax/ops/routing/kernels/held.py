"""The sums over a program's rows, held in registers while it routes them, so that no row is read twice.

A program routes K.rows rows at each turn. For each tile of experts it holds sums of probabilities and counts, [stacked,
rows, LANES]: one for each place of a row in a turn. For each such place it also holds how many rows were routed, and
the sum of their (m + log s) ** 2. Each turn adds to these numbers. At the end the places are added together.
"""

import triton
import triton.language as tl

from fused_softmax.ops.routing.kernels.common import LANES, experts_of, of_each, over, over_tiles
from fused_softmax.ops.routing.kernels.sums import close, copy_of, slots_of


@triton.jit
def nothing_held(K: tl.constexpr):
    """(probabilities of all tiles, counts of all tiles, routed rows, squares): the sums before the first turn."""
    N_CHUNKS: tl.constexpr = K.n_chunks
    CHUNKS: tl.constexpr = K.chunks
    probs, counts = (), ()
    if K.held:
        for c in tl.static_range(N_CHUNKS):
            probs = probs + zeros_of_chunk(tl.float32, CHUNKS[3 * c + 1], CHUNKS[3 * c + 2], K)
            counts = counts + zeros_of_chunk(tl.int32, CHUNKS[3 * c + 1], CHUNKS[3 * c + 2], K)
    return probs, counts, of_each(0, tl.int32, K), of_each(0, tl.float32, K)


@triton.jit
def zeros_of_chunk(DTYPE: tl.constexpr, STACKED: tl.constexpr, LENGTH: tl.constexpr, K: tl.constexpr):
    ROWS: tl.constexpr = K.rows
    zeros = ()
    for _ in tl.static_range(LENGTH):
        zeros = zeros + (tl.zeros([STACKED, ROWS, LANES], DTYPE),)  # noqa: RUF005  the compiler has no unpacking
    return zeros


@triton.jit
def with_probs(held, scores, m, total, of_scores, routed, K: tl.constexpr):
    """What is held, after adding the probabilities and squares of rows that are routed.

    scores: what a probability is before it is divided by the sum of its row. Past the experts it is 0.
    """
    probs, counts, n, squares = held
    share = over_tiles(over(total if K.by_softmax else of_scores, routed))
    sums = ()
    for t in tl.static_range(len(scores)):
        sums = sums + (probs[t] + tl.where(over_tiles(routed), scores[t] * share, 0.0),)  # noqa: RUF005
    lse = m + tl.log(total)
    return sums, counts, n + routed.to(tl.int32), squares + tl.where(routed, lse * lse, 0.0)


@triton.jit
def with_choices(held, keys, last, last_id, routed, K: tl.constexpr):
    """What is held, after counting the rows' choices: experts whose keys do not sort after the last choice's."""
    N_CHUNKS: tl.constexpr = K.n_chunks
    CHUNKS: tl.constexpr = K.chunks
    START: tl.constexpr = K.starts
    probs, counts, n, squares = held
    sums = ()
    for c in tl.static_range(N_CHUNKS):
        sums = sums + with_choices_of_chunk(
            counts, keys, last, last_id, routed, START[c], CHUNKS[3 * c], CHUNKS[3 * c + 1], CHUNKS[3 * c + 2], K
        )
    return probs, sums, n, squares


@triton.jit
def with_choices_of_chunk(
    counts, keys, last, last_id, routed, START: tl.constexpr, FIRST: tl.constexpr, STACKED: tl.constexpr,
    LENGTH: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    last, last_id = over_tiles(last), over_tiles(last_id)
    sums = ()
    for t in tl.static_range(LENGTH):
        key = keys[START + t]
        if K.packed:
            chosen = key >= last
        else:
            expert, _ = experts_of(FIRST + t, STACKED, K)
            chosen = (key > last) | ((key == last) & (expert <= last_id))
        sums = sums + (counts[START + t] + (chosen & over_tiles(routed)).to(tl.int32),)  # noqa: RUF005
    return sums


@triton.jit
def with_ids(held, given_ptr, row, routed, K: tl.constexpr):
    """What is held, after counting the experts that are given; -1 is none.

    A lane past the end of a group has the number of an expert in the next one. It counts too, but is never added.
    """
    probs, counts, n, squares = held
    for turn in range(K.k):
        id = tl.load(given_ptr + row * K.k + turn, mask=routed, other=-1).to(tl.int32)
        counts = with_id(counts, id, K)
    return probs, counts, n, squares


@triton.jit
def with_id(counts, id, K: tl.constexpr):
    N_CHUNKS: tl.constexpr = K.n_chunks
    CHUNKS: tl.constexpr = K.chunks
    START: tl.constexpr = K.starts
    sums = ()
    for c in tl.static_range(N_CHUNKS):
        sums = sums + with_id_of_chunk(counts, id, START[c], CHUNKS[3 * c], CHUNKS[3 * c + 1], CHUNKS[3 * c + 2], K)
    return sums


@triton.jit
def with_id_of_chunk(
    counts, id, START: tl.constexpr, FIRST: tl.constexpr, STACKED: tl.constexpr, LENGTH: tl.constexpr, K: tl.constexpr
):
    sums = ()
    for t in tl.static_range(LENGTH):
        expert, _ = experts_of(FIRST + t, STACKED, K)
        sums = sums + (counts[START + t] + (expert == over_tiles(id)).to(tl.int32),)  # noqa: RUF005
    return sums


@triton.jit
def add_held(held, sequence, n_parts, n_sequences, S, K: tl.constexpr):
    """Add what is held of a program to the sums of its sequence."""
    N_CHUNKS: tl.constexpr = K.n_chunks
    CHUNKS: tl.constexpr = K.chunks
    START: tl.constexpr = K.starts
    probs, counts, n, squares = held
    for c in tl.static_range(N_CHUNKS):
        add_chunk(probs, counts, sequence, START[c], CHUNKS[3 * c], CHUNKS[3 * c + 1], CHUNKS[3 * c + 2], S, K)
    if S.squares_ptr is None:
        close(tl.sum(n, axis=0).to(tl.int64), 0.0, sequence, n_parts, n_sequences, S, K)
    else:
        of_squares, of_rows = tl.reduce((squares, n), 0, sums_of)
        close(of_rows.to(tl.int64), of_squares, sequence, n_parts, n_sequences, S, K)


@triton.jit
def add_chunk(
    probs, counts, sequence, START: tl.constexpr, FIRST: tl.constexpr, STACKED: tl.constexpr, LENGTH: tl.constexpr, S,
    K: tl.constexpr,
):  # fmt: skip
    slots_ptr = copy_of(slots_of(sequence, S, K), K)
    for t in tl.static_range(LENGTH):
        expert, there = experts_of(FIRST + t, STACKED, K)
        p, count = tl.reduce((probs[START + t], counts[START + t]), 1, sums_of, keep_dims=True)
        tl.atomic_add(slots_ptr + expert, (p * S.unit).to(tl.int64), mask=there, sem="relaxed")
        tl.atomic_add(slots_ptr + K.n_experts + expert, count.to(tl.int64), mask=there, sem="relaxed")


@triton.jit
def sums_of(p, count, other_p, other_count):
    """The sums of two rows. Reducing both numbers at once takes half as many exchanges between warps."""
    return p + other_p, count + other_count
