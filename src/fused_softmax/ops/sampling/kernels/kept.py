"""Where the filters of a row end, and a token of what they keep, in two launches, where few logits decide it.

The first launch reads each logit once. It stores the state of each stretch and the maximum of each lane's 32 logits.
The lanes with the greatest maxima hold every logit above a certain one, so the second launch looks only at these lanes.
If a row's boundary is lower, the row is left to `wide`.

Every sum of probabilities is a sum of integers, so no result depends on how columns lie in threads or programs.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.exchange import let_next_begin, wait_for_launch_before
from fused_softmax.core.kernels.state import NEG_INF
from fused_softmax.ops.sampling.kernels.common import (
    COLUMN_BITS,
    GREATEST,
    GROUPS,
    KEPT_BITS,
    LANES,
    LOWEST,
    STRETCH,
    TOKENS,
    UNIT,
    at_temperature_1,
    bounds_of_code,
    calls_of,
    code_of,
    column_of,
    draw_of,
    filters_of,
    group_of,
    log2_of,
    logits_of,
    logprob_of,
    member_of,
    middle_of,
    noise_of,
    order_of,
    score_at,
    scratch_at,
    sum_of_8,
    sums_of,
    take_kept,
    units_of_8,
    value_of,
    weight_at,
    whole_grains,
    words_of,
)
from fused_softmax.ops.sampling.kernels.first import propose
from fused_softmax.ops.sampling.kernels.lanes import HIGHEST, greatest_lanes, lane_maxima
from fused_softmax.ops.sampling.kernels.ranked import least_of_ranked
from fused_softmax.ops.sampling.kernels.row import (
    STATUS,
    begin_parts,
    code_at,
    least_in_row,
    only_inf,
    row_state,
    within_row,
)
from fused_softmax.ops.sampling.kernels.spec import Held
from fused_softmax.ops.sampling.kernels.wide import open_row

# Shares of the mass that top-p asks for. The maxima of all lanes of N(0, 2^2) have 0.5 of it, of N(0, 6^2) 1.1.
FAR = tl.constexpr(0.7)
FEW = tl.constexpr(64)  # of top-k: so many logits the lanes of the greatest maxima always hold
NEAR = tl.constexpr(0.93)  # if the lanes that are held have this share, twice as many mostly have all


@triton.jit(do_not_specialize=["n_cols", "n_rows", "seed_low", "seed_high", "position_low", "position_high"])
def _stretches(
    scratch_ptr, raws_ptr, logits_ptr, bias_ptr, bitmask_ptr, rows_ptr, temperature_ptr, seed_ptr, position_ptr,
    strides, n_rows, n_cols, temperature, seed_low, seed_high, position_low, position_high, K: tl.constexpr,
):  # fmt: skip
    """A program reads K.stretches stretches of a row, and stores their states and the maximum of each lane.

    A state is m and s = sum 2 ** z; s is in units, and -1 where a logit is NaN or inf. raws_ptr takes s at temperature
    1. With K.first the program also stores the score by which each lane races. The k greatest logits lie in the k lanes
    with the greatest maxima, so later launches look for a filter's boundary in these lanes alone.
    """
    n_stretches = tl.cdiv(n_cols, STRETCH)
    n_parts = tl.cdiv(n_stretches, K.stretches)
    program = tl.program_id(0)
    draw = (program // n_parts).to(tl.int64)
    stretch = program % n_parts * K.stretches
    D = draw_of(
        logits_ptr, bias_ptr, bitmask_ptr, rows_ptr, temperature_ptr, seed_ptr, position_ptr, strides, n_rows, n_cols,
        temperature, seed_low, seed_high, position_low, position_high, draw, K,
    )  # fmt: skip
    let_next_begin(K.leads)
    call = calls_of(stretch, K)
    there = call < n_stretches * LANES
    if (stretch + K.stretches) * STRETCH <= n_cols:
        top, m, s, raw, score = state_of_stretches(D, call, there, raws_ptr is not None, K, True)
    else:
        top, m, s, raw, score = state_of_stretches(D, call, there, raws_ptr is not None, K, False)
    at = stretch + tl.arange(0, K.stretches)
    tl.store(scratch_at(scratch_ptr, draw, K.tops_at, tl.float32, K) + call, top, mask=there)
    tl.store(scratch_at(scratch_ptr, draw, K.maxima_at, tl.float32, K) + at, m, mask=at < n_stretches)
    tl.store(scratch_at(scratch_ptr, draw, K.sums_at, tl.int64, K) + at, s, mask=at < n_stretches)
    if raws_ptr is not None:
        tl.store(raws_ptr + draw * K.room + at, raw, mask=at < n_stretches)
    if not (K.ranked or K.first):  # noqa: SIM102  a constexpr, then a value
        if stretch == 0:
            begin_parts(scratch_ptr + draw * K.scratch)
    if K.first:
        best = tl.max(tl.reshape(score, [K.stretches, 32]), axis=1)
        tl.store(scratch_at(scratch_ptr, draw, K.scores_at, tl.float32, K) + call, score, mask=there)
        tl.store(scratch_at(scratch_ptr, draw, K.bests_at, tl.float32, K) + at, best, mask=at < n_stretches)


@triton.jit
def state_of_stretches(D, call, there, RAWS: tl.constexpr, K: tl.constexpr, WHOLE: tl.constexpr):
    """(maxima of lanes; m, s, and s at temperature 1 of stretches; scores of lanes relative to their stretch's m).

    s is in units, and -1 where a logit is NaN or inf. The score of a lane is that of its first arrival (K.first).
    """
    S: tl.constexpr = K.stretches
    x = (
        logits_of(D, column_of(call, 0), there, K, WHOLE, True),
        logits_of(D, column_of(call, 1), there, K, WHOLE, True),
        logits_of(D, column_of(call, 2), there, K, WHOLE, True),
        logits_of(D, column_of(call, 3), there, K, WHOLE, True),
    )
    top = tl.max(tl.maximum(tl.maximum(x[0], x[1]), tl.maximum(x[2], x[3])), axis=1)
    m = tl.max(tl.reshape(top, [S, 32]), axis=1)
    of_lane = tl.reshape(tl.broadcast_to(m[:, None], [S, 32]), [S * 32])[:, None]
    s_0, s_1 = sum_of_8(weight_at(x[0], of_lane, D, K)), sum_of_8(weight_at(x[1], of_lane, D, K))
    s_2, s_3 = sum_of_8(weight_at(x[2], of_lane, D, K)), sum_of_8(weight_at(x[3], of_lane, D, K))
    score = top
    if K.first:
        words = words_of(D, call, GROUPS)
        all_words = words[0] ^ words[1] ^ words[2] ^ words[3]
        score = tl.maximum(
            tl.maximum(
                log2_of(s_0, K) + noise_of(words[0], all_words, K), log2_of(s_1, K) + noise_of(words[1], all_words, K)
            ),
            tl.maximum(
                log2_of(s_2, K) + noise_of(words[2], all_words, K), log2_of(s_3, K) + noise_of(words[3], all_words, K)
            ),
        )  # fmt: skip
    s = (s_0 + s_1) + (s_2 + s_3)
    if K.linear:
        units = units_of_8(weight_at(x[0], of_lane, D, K), K) + units_of_8(weight_at(x[1], of_lane, D, K), K)
        units += units_of_8(weight_at(x[2], of_lane, D, K), K) + units_of_8(weight_at(x[3], of_lane, D, K), K)
    else:
        units = units_of_lanes(s)
    s = of_stretches(units, s, K)
    raw = s
    if RAWS:
        D = at_temperature_1(D)
        s_0, s_1 = sum_of_8(weight_at(x[0], of_lane, D, K)), sum_of_8(weight_at(x[1], of_lane, D, K))
        s_2, s_3 = sum_of_8(weight_at(x[2], of_lane, D, K)), sum_of_8(weight_at(x[3], of_lane, D, K))
        raw = (s_0 + s_1) + (s_2 + s_3)
        raw = of_stretches(units_of_lanes(raw), raw, K)
    return top, m, s, raw, score


@triton.jit
def units_of_lanes(s):
    return (tl.where(s == s, s, 0.0) * UNIT).to(tl.int64)


@triton.jit
def of_stretches(units, s, K: tl.constexpr):
    """The sums of stretches in units, from those of their lanes; -1 where s of a lane is NaN."""
    odd = tl.max(tl.reshape((s != s).to(tl.int32), [K.stretches, LANES]), axis=1)
    return tl.where(odd > 0, -1, tl.sum(tl.reshape(units, [K.stretches, LANES]), axis=1))


@triton.jit(
    do_not_specialize=["n_cols", "n_rows", "top_k", "seed_low", "seed_high", "position_low", "position_high"]
)  # fmt: skip
def _choose(
    scratch_ptr, logits_ptr, tokens_ptr, valid_ptr, logprobs_ptr, kept_ptr, bias_ptr, bitmask_ptr, rows_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, strides, n_rows, n_cols, temperature,
    top_k, top_p, min_p, seed_low, seed_high, position_low, position_high, K: tl.constexpr,
):  # fmt: skip
    """A program draws from the lanes of the greatest maxima, or leaves to later launches what they need (K.opens).

    K.by_row: rows whose draw needs no boundary are drawn from before they are judged. K.given: the token is known, and
    what is kept is not.
    """
    draw = tl.program_id(0).to(tl.int64)
    D = draw_of(
        logits_ptr, bias_ptr, bitmask_ptr, rows_ptr, temperature_ptr, seed_ptr, position_ptr, strides, n_rows, n_cols,
        temperature, seed_low, seed_high, position_low, position_high, draw, K,
    )  # fmt: skip
    if kept_ptr is not None:
        kept_ptr += draw * strides[KEPT_BITS]
    wait_for_launch_before(K.follows)
    let_next_begin(K.leads)
    top = lane_maxima(scratch_ptr, draw, D, K)  # in flight while the row's state is computed
    m, total, odd = row_state(scratch_ptr, draw, D, K)
    F = filters_of(top_k_ptr, top_p_ptr, min_p_ptr, strides, top_k, top_p, min_p, m, total, draw, D, K)
    valid = D.valid & (F.p > 0)
    token = tl.zeros([], tl.int64)
    if K.given:
        token = tl.load(tokens_ptr + draw * strides[TOKENS])
    logprob = tl.full([], float("nan"), tl.float32)
    if K.opens:
        tl.store(scratch_ptr + draw * K.scratch + STATUS, 0)
    if odd:
        token, valid = only_inf(kept_ptr, D, valid, K)
        logprob = tl.where(valid, 0.0, logprob)
    else:
        valid &= m > NEG_INF
        if valid:
            if K.by_row:
                if draws_first(F, K):
                    token = propose(scratch_ptr, draw, D, F, K)
                else:
                    token, logprob = choose(top, token, scratch_ptr, kept_ptr, draw, D, F, K)
            else:
                token, logprob = choose(top, token, scratch_ptr, kept_ptr, draw, D, F, K)
    tl.store(tokens_ptr + draw * strides[TOKENS], token)
    tl.store(valid_ptr + draw, valid.to(tl.int8))
    if logprobs_ptr is not None:
        tl.store(logprobs_ptr + draw, logprob)


@triton.jit
def draws_first(F, K: tl.constexpr):
    """Whether a row's token needs no boundary.

    It needs one if top-k leaves few columns, or if top-p judges what top-k leaves.
    """
    return (F.k == 0) | ((F.k > FEW) & ((F.p >= 1) | K.joint))


@triton.jit
def choose(top, token, scratch_ptr, kept_ptr, draw, D, F, K: tl.constexpr):
    """(token, its logprob) of a row that can be drawn from. token: the given one, if K.given."""
    logprob = tl.zeros([], tl.float32)
    enough, near, known = F.k < 0, F.k < 0, tl.zeros([], tl.int32)
    if not is_far(top, D, F, K):
        token, logprob, enough, near, known = choose_among(top, token, None, scratch_ptr, kept_ptr, draw, D, F, K)
    if not enough:
        tl.debug_barrier()  # the callee writes shared memory, and Triton puts no barrier before a call
        if K.wide:
            if near:
                token, logprob, enough = choose_among_more(token, known, scratch_ptr, kept_ptr, draw, D, F, K)
            if not enough:
                open_row(scratch_ptr + draw * K.scratch, D, F, K)
        else:
            B = bounds_to(token, least_in_row(D, F, K), D, K)
            tl.debug_barrier()
            token, logprob = within_row(token, kept_ptr, D, F.m, B, K)
    return token, logprob


@triton.jit
def bounds_to(token, least, D, K: tl.constexpr):
    """The Bounds of all logits from a code on. A given token is within, however sums were rounded."""
    if K.given:
        least = tl.minimum(least, code_at(token, D, K))
    return bounds_of_code(least)


@triton.jit
def is_far(top, D, F, K: tl.constexpr):
    """Whether the lanes of the greatest maxima will hardly hold the mass that top-p asks for.

    So it is if top-p alone judges, and the maxima of all lanes have little mass.
    """
    if K.wide:
        alone = (F.k == 0) & (F.least == K.lowest) & (D.n_cols > K.capacity * LANES)
        return alone & (tl.sum(weight_at(top, F.m, D, K)) * UNIT < F.p * F.total.to(tl.float32) * FAR)
    else:
        return F.k < 0


@triton.jit(noinline=True)
def choose_among_more(token, known, scratch_ptr, kept_ptr, draw, D, F, K: tl.constexpr):
    """(token, its logprob, whether all that decides it is known), from twice as many lanes.

    known: an order. Logits from it on were looked at before, and the filters do not end among them.
    """
    MORE: tl.constexpr = K.more
    top = lane_maxima(scratch_ptr, draw, D, K)
    token, logprob, enough, _, _ = choose_among(top, token, known, scratch_ptr, kept_ptr, draw, D, F, MORE)
    return token, logprob, enough


@triton.jit
def choose_among(top, token, cut, scratch_ptr, kept_ptr, draw, D, F, K: tl.constexpr):
    """Draw from K.capacity lanes.

    Returns (token, its logprob, whether all that decides it is known, whether twice as many lanes may tell, the order
    from which on all logits are known). cut: an order from which on all logits are known to be kept, or None.
    """
    call, known = greatest_lanes(top, D, F, K)
    there = call >= 0
    call = tl.maximum(call, 0)
    H = held_of(call, there, D, K)
    least, enough, near, known = least_of_candidates(H, known, cut, scratch_ptr, draw, D, F, K)
    logprob = tl.zeros([], tl.float32)
    if enough:
        B = bounds_to(token, tl.maximum(least, F.least.to(tl.int64) << COLUMN_BITS), D, K)
        words = words_of(D, H.call, GROUPS)
        all_words = words[0] ^ words[1] ^ words[2] ^ words[3]
        key_0, mass_0 = take_kept(H.x_0, column_of(call, 0), there, words[0], all_words, D, F.m, B, kept_ptr, K)
        key_1, mass_1 = take_kept(H.x_1, column_of(call, 1), there, words[1], all_words, D, F.m, B, kept_ptr, K)
        key_2, mass_2 = take_kept(H.x_2, column_of(call, 2), there, words[2], all_words, D, F.m, B, kept_ptr, K)
        key_3, mass_3 = take_kept(H.x_3, column_of(call, 3), there, words[3], all_words, D, F.m, B, kept_ptr, K)
        key = tl.max(tl.maximum(tl.maximum(key_0, key_1), tl.maximum(key_2, key_3)), axis=0)
        mass = tl.sum(mass_0 + mass_1 + mass_2 + mass_3, axis=0)
        if not K.given:
            token = member_of(D, group_of(key), F.m, K, B)
        logprob = logprob_of(token, mass, D, F.m, K)
    return token, logprob, enough, near, known


@triton.jit
def held_of(call, there, D, K: tl.constexpr):
    return Held(
        logits_of(D, column_of(call, 0), there, K), logits_of(D, column_of(call, 1), there, K),
        logits_of(D, column_of(call, 2), there, K), logits_of(D, column_of(call, 3), there, K), call,
    )  # fmt: skip


@triton.jit
def least_of_candidates(H, known, cut, scratch_ptr, draw, D, F, K: tl.constexpr):
    """Where top-k and top-p end among the logits that are held.

    Returns (the code of the last logit that they keep, whether all that decides it is known, whether twice as many
    lanes may tell, the order from which on all logits are known).
    """
    list_ptr = scratch_at(scratch_ptr, draw, K.ranked_at, tl.int64, K)
    may, near = may_decide(H, D, F, K)
    count, mass = amount_from(H, cut, F, D, K)
    n, listed = list_held(list_ptr, H, tl.where(may, known, HIGHEST), cut, F, K)
    known = tl.where(may, listed, known)
    if cut is not None:
        known = tl.minimum(known, cut)
    least, by_k, by_p = least_of_ranked(list_ptr, n, count, mass, D, F, K)
    if K.joint:
        enough = by_k | by_p
    else:
        enough = tl.where(F.k > 0, by_k & (by_p | (F.p >= 1)), by_p)
    # min-p keeps nothing of what is unknown.
    by_z = (known <= F.least) & (K.joint | (F.p >= 1) | (F.k == 0))
    return tl.maximum(least, known.to(tl.int64) << COLUMN_BITS), enough | by_z | (known == LOWEST), near, known


@triton.jit
def may_decide(H, D, F, K: tl.constexpr):
    """(whether to rank what is held, whether twice as many lanes may tell).

    Ranking takes long. It is left out if top-p alone judges, and what is held has too little mass for it. Twice as many
    lanes may tell if they hold what top-k keeps, or if most of that mass is held.
    """
    if K.wide:
        held = tl.sum(
            weight_and_more(H.x_0, F.m, D, K) + weight_and_more(H.x_1, F.m, D, K)
            + weight_and_more(H.x_2, F.m, D, K) + weight_and_more(H.x_3, F.m, D, K)
        )  # fmt: skip
        target = F.p * F.total.to(tl.float32)
        near = tl.where(F.k > 0, F.k <= 2 * K.capacity, held * UNIT > target * NEAR)
        return (F.k > 0) | (F.p >= 1) | (held * UNIT > target), near
    else:
        return F.k >= 0, F.k < 0


@triton.jit
def weight_and_more(x, m, D, K: tl.constexpr):
    """1.01 times the weights. Weights themselves would be kept in registers by the compiler until the draw."""
    if K.linear:
        return weight_at(x, m, D, K) * 1.01
    else:
        return tl.exp2(score_at(x, D, m, K) + 0.0144)


@triton.jit
def amount_from(H, cut, F, D, K: tl.constexpr):
    """(how many of the held logits have the order `cut` or more, their mass in units)."""
    if cut is None:
        return tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    else:
        x = tl.maximum(value_of(cut), -GREATEST)
        mass = mass_from(H.x_0, x, F, D, K) + mass_from(H.x_1, x, F, D, K)
        mass += mass_from(H.x_2, x, F, D, K) + mass_from(H.x_3, x, F, D, K)
        mass, count = sums_of(mass, lanes_between(H, cut, None), K)
        return count.to(tl.int64), mass


@triton.jit
def mass_from(x, least, F, D, K: tl.constexpr):
    """The mass, in units, of each lane's logits of `least` or more. `mass_of_code` gives each logit the same mass."""
    return tl.sum((tl.where(x >= least, weight_at(x, F.m, D, K), 0.0) * UNIT).to(tl.int64), axis=1)


@triton.jit
def list_held(list_ptr, H, known, cut, F, K: tl.constexpr):
    """(how many codes of candidates are listed, the order from which on they are complete).

    Candidates are the held logits from the order `known` on, and below the order `cut` unless that is None. If these
    are more than K.candidates, they begin at a higher order.
    """
    n = tl.sum(lanes_between(H, known, cut), axis=0)
    if n > K.candidates:
        high = order_of(F.m) + 1 if cut is None else cut
        low, high = whole_grains(known.to(tl.int64), high.to(tl.int64), K)
        while high - low > K.grain:
            middle = middle_of(low, high, K)
            many = tl.sum(lanes_between(H, middle.to(tl.int32), cut), axis=0) > K.candidates
            low = tl.where(many, middle, low)
            high = tl.where(many, high, middle)
        known = high.to(tl.int32)
        n = tl.sum(lanes_between(H, known, cut), axis=0)
    n_0, n_1, n_2, n_3 = (
        count_lanes(H.x_0, known, cut), count_lanes(H.x_1, known, cut), count_lanes(H.x_2, known, cut),
        count_lanes(H.x_3, known, cut),
    )  # fmt: skip
    of_lane = n_0 + n_1 + n_2 + n_3
    base = tl.cumsum(of_lane, axis=0) - of_lane
    list_candidates(list_ptr, H.x_0, column_of(H.call, 0), base, known, cut)
    list_candidates(list_ptr, H.x_1, column_of(H.call, 1), base + n_0, known, cut)
    list_candidates(list_ptr, H.x_2, column_of(H.call, 2), base + n_0 + n_1, known, cut)
    list_candidates(list_ptr, H.x_3, column_of(H.call, 3), base + n_0 + n_1 + n_2, known, cut)
    tl.debug_barrier()
    return n, known


@triton.jit
def is_between(x, known, cut):
    """Whether logits are of the order `known` or above, and below the order `cut` unless it is None."""
    order = order_of(x)
    between = (order >= known) & (x > NEG_INF)
    if cut is not None:
        between = between & (order < cut)
    return between.to(tl.int32)


@triton.jit
def count_lanes(x, known, cut):
    """How many logits of each lane are between the two orders."""
    return tl.sum(is_between(x, known, cut), axis=1)


@triton.jit
def lanes_between(H, known, cut):
    """How many logits of all four quarters of each lane are between the two orders."""
    return (
        count_lanes(H.x_0, known, cut) + count_lanes(H.x_1, known, cut)
        + count_lanes(H.x_2, known, cut) + count_lanes(H.x_3, known, cut)
    )  # fmt: skip


@triton.jit
def list_candidates(ranked_ptr, x, first, base, known, cut):
    """Store the codes of the logits [lanes, 8] between the two orders, those of each lane from its base on."""
    cols = first[:, None] + tl.arange(0, 8)[None, :]
    chosen = is_between(x, known, cut)
    place = base[:, None] + tl.cumsum(chosen, axis=1) - chosen
    tl.store(ranked_ptr + place, code_of(x, cols), mask=chosen > 0)
