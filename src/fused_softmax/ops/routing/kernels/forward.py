"""Which experts rows go to, their weights, and in the same launch counts, sums of probabilities and both losses.

    m = max x, s = sum exp(x - m), p = exp(x - m) / s
    ids the k best of x, or of score + bias; weight = score[ids] / sum score[ids] * scale
    aux = n_experts * sum(count * sum p) / (n ** 2 * k), z = sum (m + log s) ** 2 / n

Traffic: logits are read once, and 8 bytes are written for each choice. If the gradient needs them, 8 or 12 bytes of
states are written for each row. A dense result takes 4 bytes for each expert. With K.elsewhere the logits of the chosen
experts are read once more. If experts are too many for the sums to fit in registers (not K.held), a program writes the
states, and reads its own rows a second time to add them up, from the cache of its multiprocessor.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.state import LOG2E, NEG_INF
from fused_softmax.ops.routing.kernels.choice import best_head, choose, keys_of, lists_of, number_found, numbers_of
from fused_softmax.ops.routing.kernels.common import (
    LANES,
    LEAST,
    along_lanes,
    greatest_of,
    in_lanes,
    is_some,
    lanes,
    logits_at,
    of_each,
    over,
    part_of_rows,
    score_beside,
    score_of,
    tiles_of,
    total_of,
    weights_of,
    write_zeros,
)
from fused_softmax.ops.routing.kernels.held import add_held, nothing_held, with_choices, with_ids, with_probs
from fused_softmax.ops.routing.kernels.spec import Given, Sums
from fused_softmax.ops.routing.kernels.sums import add_rows


@triton.jit(do_not_specialize=[
    "x_row_stride", "noise_row_stride", "dense_row_stride", "length", "n_parts", "part_rows", "n_sequences"
])  # fmt: skip
def _route(
    x_ptr, bias_ptr, noise_ptr, given_ptr, mask_ptr, weights_ptr, indices_ptr, dense_ptr, states_ptr, slots_ptr,
    all_ptr, squares_ptr, balances_ptr, shares_ptr, of_sequences_ptr, counts_ptr, prob_sums_ptr, aux_loss_ptr,
    z_loss_ptr, x_row_stride, noise_row_stride, dense_row_stride, length, n_parts, part_rows, n_sequences, n_turns,
    scale, unit, K: tl.constexpr,
):  # fmt: skip
    """A program has a part of the rows of a sequence. Without sequences, all rows are one."""
    sequence, first, end = part_of_rows(length, n_parts, part_rows, K)
    held = nothing_held(K)
    for at in range(first, end, K.rows):
        held = route_rows(
            x_ptr, bias_ptr, noise_ptr, given_ptr, mask_ptr, weights_ptr, indices_ptr, dense_ptr, states_ptr,
            x_row_stride, noise_row_stride, dense_row_stride, at, end, n_turns, scale, held, K,
        )  # fmt: skip
    if K.sums:
        S = Sums(
            slots_ptr, all_ptr, squares_ptr, balances_ptr, shares_ptr, of_sequences_ptr, counts_ptr, prob_sums_ptr,
            aux_loss_ptr, z_loss_ptr, unit,
        )  # fmt: skip
        if K.held:
            add_held(held, sequence, n_parts, n_sequences, S, K)
        else:
            tl.debug_barrier()  # add_rows reads what all threads have written
            add_rows(
                x_ptr, noise_ptr, indices_ptr, states_ptr, x_row_stride, noise_row_stride, first.to(tl.int64),
                end.to(tl.int64), sequence, n_parts, n_sequences, S, K,
            )  # fmt: skip


@triton.jit
def route_rows(
    x_ptr, bias_ptr, noise_ptr, given_ptr, mask_ptr, weights_ptr, indices_ptr, dense_ptr, states_ptr, x_row_stride,
    noise_row_stride, dense_row_stride, first, end, n_turns, scale, held, K: tl.constexpr,
):  # fmt: skip
    """Route K.rows rows from `first` on, those before `end`. Returns what is held, these rows included."""
    HALVES: tl.constexpr = K.halves
    row = (first + tl.arange(0, K.rows)).to(tl.int64)
    here = row < end
    R = Given(
        x_ptr + (row * x_row_stride)[None, :, None],
        None if noise_ptr is None else noise_ptr + (row * noise_row_stride)[None, :, None],
        x_row_stride, noise_row_stride, row, here[None, :, None],
    )  # fmt: skip
    tiles = tiles_of(R, K)
    valid = here & is_row_of_numbers(tiles, K)
    if mask_ptr is not None:
        valid &= tl.load(mask_ptr + row, mask=here, other=0) != 0
    m, total = of_each(0, tl.float32, K), of_each(1.0, tl.float32, K)
    scores, of_scores = tiles, total
    if K.elsewhere:
        m = greatest_of(tiles)
        scores, total, of_scores = scores_of_all(tiles, m, states_ptr, K)
    wrong = of_each(0, tl.int32, K) == 1
    if given_ptr is None:
        keys, ordered = keys_of(tiles, m, total, bias_ptr, K)
        valid &= ordered
        heads, experts = lists_of(keys, K)
    else:
        ids, wrong = replayed(given_ptr, row, here, K)
    if not K.elsewhere:
        m = number_found(best_head(heads, K), K)
        scores, total, of_scores = scores_of_all(tiles, m, states_ptr, K)
    if K.held:  # before the choice, so that no thread holds logits during it
        routed = valid & (wrong == 0) & (m > NEG_INF) & (m < float("inf"))
        held = with_probs(held, scores, m, total, of_scores, routed, K)
    if given_ptr is None:
        found, ids, last, last_id = choose(heads, experts, R, m, total, bias_ptr, n_turns, K)
        x = numbers_of(found, K)
        if K.held:
            held = with_choices(held, keys, last, last_id, routed, K)
    else:
        x = ids  # K.elsewhere, which reads their logits, is set whenever ids are given
        if K.held:
            held = with_ids(held, given_ptr, row, routed, K)
    valid &= (m > NEG_INF) & (m < float("inf"))
    wrong &= valid
    valid &= wrong == 0
    ids = taken_of(ids, valid, K)
    if K.elsewhere:
        x = logits_of_taken(x_ptr, noise_ptr, x_row_stride, noise_row_stride, row, ids, K)
    weights = weights_of_taken(x, ids, m, total, scale, K)
    if dense_ptr is not None:
        write_zeros(dense_ptr, dense_row_stride, row, here, tl.where(wrong, float("nan"), 0.0), K)
        tl.debug_barrier()  # all threads write their zeros before any writes weights
    for h in tl.static_range(HALVES):
        j = lanes() + h * LANES
        at = row[:, None] * K.k + j
        there = here[:, None] & (j < K.k)
        weight = tl.where(wrong[:, None], float("nan"), weights[h])
        tl.store(weights_ptr + at, weight, mask=there)
        tl.store(indices_ptr + at, ids[h], mask=there)
        if dense_ptr is not None:
            taken = there & (ids[h] >= 0)
            tl.store(dense_ptr + row[:, None] * dense_row_stride + along_lanes(ids[h]), weight, mask=taken)
    if states_ptr is not None:
        of_row = tl.where(lanes() == 0, m[:, None], tl.where(lanes() == 1, total[:, None], of_scores[:, None]))
        at = states_ptr + row[:, None] * K.states + lanes()
        tl.store(at, tl.where(valid[:, None], of_row, 0.0), mask=here[:, None] & (lanes() < K.states))
    return held


@triton.jit
def is_row_of_numbers(tiles, K: tl.constexpr):
    bad = in_lanes(0, tl.int32, K)
    for t in tl.static_range(len(tiles)):
        bad |= tl.max((tiles[t] != tiles[t]).to(tl.int32), axis=0)
    return tl.max(bad, axis=1) == 0


@triton.jit
def replayed(given_ptr, row, here, K: tl.constexpr):
    """(the ids that are given; whether a row has one that is neither an expert nor -1, or one that is there twice)."""
    HALVES: tl.constexpr = K.halves
    ids = ()
    bad = in_lanes(0, tl.int32, K)
    for h in tl.static_range(HALVES):
        j = lanes() + h * LANES
        given = tl.load(given_ptr + row[:, None] * K.k + j, mask=here[:, None] & (j < K.k), other=-1)
        bad |= ((given < -1) | (given >= K.n_experts)).to(tl.int32)
        ids = ids + (given.to(tl.int32),)  # noqa: RUF005  the compiler has no unpacking
    for turn in range(K.k):
        id = tl.load(given_ptr + row * K.k + turn, mask=here, other=-1).to(tl.int32)[:, None]
        for h in tl.static_range(HALVES):
            bad |= ((ids[h] == id) & (id >= 0) & (lanes() + h * LANES != turn)).to(tl.int32)
    return ids, tl.max(bad, axis=1) == 1


@triton.jit
def taken_of(ids, valid, K: tl.constexpr):
    """The ids that are taken; -1 in rows that are not valid, and past the K.k places."""
    HALVES: tl.constexpr = K.halves
    taken = ()
    for h in tl.static_range(HALVES):
        there = valid[:, None] & (lanes() + h * LANES < K.k)
        taken = taken + (tl.where(there, tl.maximum(ids[h], -1), -1),)  # noqa: RUF005
    return taken


@triton.jit
def logits_of_taken(x_ptr, noise_ptr, x_row_stride, noise_row_stride, row, ids, K: tl.constexpr):
    HALVES: tl.constexpr = K.halves
    R = Given(
        x_ptr + (row * x_row_stride)[:, None],
        None if noise_ptr is None else noise_ptr + (row * noise_row_stride)[:, None],
        x_row_stride, noise_row_stride, row, row,
    )  # fmt: skip
    x = ()
    for h in tl.static_range(HALVES):
        x = x + (logits_at(R, along_lanes(ids[h]), ids[h] >= 0, K),)  # noqa: RUF005
    return x


@triton.jit
def weights_of_taken(x, ids, m, total, scale, K: tl.constexpr):
    """The weights [rows, LANES] of each half, from the logits x of the experts that are taken."""
    HALVES: tl.constexpr = K.halves
    top = m  # the first choice's
    if K.elsewhere:
        top = of_each(NEG_INF, tl.float32, K)
        for h in tl.static_range(HALVES):
            top = tl.maximum(top, tl.max(tl.where(ids[h] >= 0, x[h], NEG_INF), axis=1))
    scores = ()
    sum_of_scores = of_each(0, tl.float32, K)
    for h in tl.static_range(HALVES):
        if not K.by_softmax:
            score = score_beside(x[h], top[:, None], K) if K.renormalize else score_of(x[h], K)
        elif K.alone:
            score = tl.where(top[:, None] == NEG_INF, 0.0, tl.exp(x[h] - top[:, None]))
        else:
            score = tl.exp(x[h] - m[:, None]) / total[:, None]
        score = tl.where(ids[h] >= 0, score, 0.0)
        scores = scores + (score,)  # noqa: RUF005
        sum_of_scores += tl.sum(score, axis=1)
    factor = of_each(0, tl.float32, K) + scale
    if K.alone:
        some = sum_of_scores > 0
        if K.score_first and K.elsewhere:
            # Where the probabilities of the chosen experts sum to less than any float32, weights are 0.
            some &= tl.log2(sum_of_scores) + (top - m) * LOG2E - tl.log2(total) > LEAST
        factor *= over(sum_of_scores, some)
    elif K.renormalize:
        factor *= over(sum_of_scores, is_some(sum_of_scores, top, K))
    weights = ()
    for h in tl.static_range(HALVES):
        weights = weights + (scores[h] * factor[:, None],)  # noqa: RUF005
    return weights


@triton.jit
def scores_of_all(tiles, m, states_ptr, K: tl.constexpr):
    """(scores, total, of_scores), as far as they are needed.

    scores: of all tiles, what a probability is before it is divided by the sum of its row. total: sum exp(x - m).
    of_scores: the sum of `score_beside`; inf where the sum of scores is 0 in float32.
    """
    scores = tiles
    total = of_each(1.0, tl.float32, K)
    if K.totals:
        scores = weights_of(tiles, tl.where(m == NEG_INF, 0.0, m))
        total = total_of(scores)
    of_scores = total
    if not K.by_softmax and (K.sums or states_ptr is not None):
        scores = scores_beside(tiles, m, K)
        of_scores = total_of(scores)
        of_scores = tl.where(is_some(of_scores, m, K), of_scores, float("inf"))
    return scores, total, of_scores


@triton.jit
def scores_beside(tiles, m, K: tl.constexpr):
    scores = ()
    for t in tl.static_range(len(tiles)):
        scores = scores + (score_beside(tiles[t], m[None, :, None], K),)  # noqa: RUF005
    return scores
