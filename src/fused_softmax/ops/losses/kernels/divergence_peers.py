"""The divergences of pairs of rows whose classes lie on several GPUs, and the gradient of their sum, in one pass.

As `divergence_held`, but the programs of a row exchange over all ranks (ranks/kernels.py). Each message of a part has
its own slots.
Traffic of a shard: two reads and a write; between GPUs 24 bytes a part, for jsd and tvd 32, and as many a row.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.exchange import collect_several, states_of, tag_of
from fused_softmax.core.kernels.rows import part_of, prefetch_part
from fused_softmax.core.kernels.spec import Rows
from fused_softmax.core.kernels.state import hold_all
from fused_softmax.ops.losses.kernels.divergence import faded_pairs, known_of, numbers_of_pair
from fused_softmax.ops.losses.kernels.divergence_held import (
    both_of,
    finish_held,
    load_pair,
    shares_of_held,
    sums_of_held,
    told_of,
)
from fused_softmax.ops.losses.kernels.spec import HeldPair, PairSums, RowOfRanks
from fused_softmax.ranks.kernels import announce, bases_of, collect, doubt_of, sum_of_pairs, tell, turn_of


@triton.jit(do_not_specialize=[
    "x_row_stride", "y_row_stride", "dx_row_stride", "n_cols", "n_parts", "part_cols", "misalignment", "ahead", "rank",
    "ranks", "digest", "set_size",
])  # fmt: skip
def _pair_peers(
    slots_ptr, bases_ptr, asked_ptr, x_ptr, y_ptr, dx_ptr, temperature_ptr, target_temperature_ptr, dvalue_ptr,
    value_ptr, known_ptr, x_row_stride, y_row_stride, dx_row_stride, n_cols, n_parts, part_cols, misalignment, ahead,
    rank, ranks, digest, set_size, factor, cap, target_factor, target_cap, beta, smoothing, share, K: tl.constexpr,
):  # fmt: skip
    """A program has a part of both rows, and writes the student's gradient if dx_ptr is given.

    dvalue_ptr, share: as `_pair_held` has them. known_ptr: [5, n_rows], both states of whole rows and `total`.
    """
    program = tl.program_id(0)
    row = (program // n_parts).to(tl.int64)
    part = program % n_parts
    n_rows = tl.num_programs(0) // n_parts
    if dvalue_ptr is not None:
        share *= tl.load(dvalue_ptr + row)
    P = HeldPair(
        Rows(x_ptr, x_row_stride, misalignment), Rows(y_ptr, y_row_stride, misalignment),
        Rows(dx_ptr, dx_row_stride, misalignment), None, None, value_ptr, n_cols, n_parts, part_cols,
        numbers_of_pair(factor, cap, target_factor, target_cap, beta, smoothing, temperature_ptr,
                        target_temperature_ptr, row),
        share,
    )  # fmt: skip
    n_slots = (n_parts + 1) * ranks
    bases = bases_of(bases_ptr, ranks, K)
    row_at = row * n_slots * K.messages
    start, tag = turn_of(slots_ptr, row_at + rank * n_parts + part, set_size, asked_ptr, rank, K)
    G = RowOfRanks(
        slots_ptr, bases_ptr, asked_ptr, start + row_at, row, n_slots, n_parts, rank, ranks, digest, tag
    )  # fmt: skip
    r = part_of(part, row, P.x, n_cols, part_cols, K)
    x, y = load_pair(r, P, K)
    S = sums_of_held(x, y, r, P, K)
    if K.publish:
        tell_sums(S, part, bases, G, K)
        if program == 0:
            announce(bases_ptr, asked_ptr, rank, ranks, digest, K)
    if K.prefetch:
        prefetch_part(P.x, n_cols, n_parts, part_cols, tl.num_programs(0), ahead, K)
        prefetch_part(P.y, n_cols, n_parts, part_cols, tl.num_programs(0), ahead, K)
    x, y = hold_all(x, K.ptx), hold_all(y, K.ptx)
    if K.collect:
        S = sums_of_ranks(G, K)
        B, value, total = both_of(S, K)
        if K.twice:
            of_part, total_of_part = shares_of_held(x, y, r, B, P, K)
            x, y = hold_all(x, K.ptx), hold_all(y, K.ptx)
            if K.publish_shares:
                none = tl.zeros([], tl.float32)
                tell_one(of_part, none, 2, part, bases, G, K)
                tell_one(total_of_part, none, 3, part, bases, G, K)
            if K.collect_shares:
                value, total = shares_of_ranks(G, K)
        if K.collect_shares or not K.twice:
            if part == 0:
                tl.store(value_ptr + row, value)
            if dx_ptr is not None:
                if part == 0:
                    ls, m_t, ls_t, _value, _total = known_of(S, K)
                    tl.store(known_ptr + row, S.m)
                    tl.store(known_ptr + n_rows + row, ls)
                    tl.store(known_ptr + 2 * n_rows + row, m_t)
                    tl.store(known_ptr + 3 * n_rows + row, ls_t)
                    tl.store(known_ptr + 4 * n_rows + row, total)
                finish_held(x, y, r, B, value, total, P, K)


@triton.jit
def tell_one(first, second, i: tl.constexpr, part, bases, G, K: tl.constexpr):
    """Send message i of a part. second must not be negative. The first part sends the header too."""
    at, none = G.at + i * G.n_slots, tl.zeros([], tl.float32)
    tell(first, second, none, part == 0, bases, at, part, G.n_parts, G.rank, G.ranks, G.digest, G.tag, K)


@triton.jit
def tell_sums(S, part, bases, G, K: tl.constexpr):
    none = tl.zeros([], tl.float32)
    tell_one(S.m, S.s, 0, part, bases, G, K)
    if K.given == "logits":
        tell_one(S.m_t, S.s_t, 1, part, bases, G, K)
    else:
        tell_one(S.s_t, none, 1, part, bases, G, K)
    if not K.twice:
        tell_one(S.c, none, 2, part, bases, G, K)


@triton.jit
def collect_messages(i: tl.constexpr, THIRD: tl.constexpr, G, K: tl.constexpr):
    """(messages i, i + 1 and, if THIRD, i + 2 of all parts on all ranks; the `doubt_of` them)."""
    slots_ptr = G.slots_ptr + (G.at + i * G.n_slots)
    a, b, c, left = collect_several(slots_ptr, G.n_slots, 0, G.n_slots, G.tag, THIRD, K)
    if left > 0:
        a = collect(slots_ptr, G.bases_ptr, G.asked_ptr, G.rank, G.ranks, G.n_slots, G.tag, K)
        b = collect(slots_ptr + G.n_slots, G.bases_ptr, G.asked_ptr, G.rank, G.ranks, G.n_slots, G.tag, K)
        if THIRD:
            c = collect(slots_ptr + 2 * G.n_slots, G.bases_ptr, G.asked_ptr, G.rank, G.ranks, G.n_slots, G.tag, K)
    worst = tl.where(tag_of(b) != G.tag, b, a)
    if THIRD:
        worst = tl.where(tag_of(c) != G.tag, c, worst)
    doubt = doubt_of(
        worst, G.bases_ptr, G.asked_ptr, G.row, G.n_parts, G.rank, G.ranks, G.digest, G.tag, K
    )  # fmt: skip
    return a, b, c, doubt


@triton.jit
def sums_of_ranks(G, K: tl.constexpr):
    """The PairSums of whole rows, added up in the same order on all ranks; NaN in doubt."""
    n_states = G.n_parts * G.ranks
    of_s, of_t, of_c, doubt = collect_messages(0, not K.twice, G, K)
    m, s = states_of(of_s, n_states, K)
    if K.given == "logits":
        m_t, s_t = states_of(of_t, n_states, K)
    else:
        m_t, s_t = tl.zeros_like(s), told_of(of_t, n_states, K)
    c = tl.zeros_like(s)
    if not K.twice:
        c = told_of(of_c, n_states, K)
    S = faded_pairs(PairSums(m, s, m_t, s_t, c), K)
    return PairSums(S.m, sum_of_pairs(S.s) + doubt, S.m_t, sum_of_pairs(S.s_t), sum_of_pairs(S.c))


@triton.jit
def shares_of_ranks(G, K: tl.constexpr):
    """(jsd or tvd of whole rows, their sum Q f); NaN in doubt."""
    n_states = G.n_parts * G.ranks
    of_value, of_q, _c, doubt = collect_messages(2, False, G, K)
    value, total = sum_of_pairs(told_of(of_value, n_states, K)), sum_of_pairs(told_of(of_q, n_states, K))
    return value + doubt, total + doubt
