"""Draws first, and judges afterwards: a token of a filtered row without the filter's boundary.

Each lane of a row is a Poisson process whose rate is the lane's weight. An unfiltered draw takes the earliest of the
lanes' first arrivals. All arrivals in the order of time are independent draws from the row (Kingman, "Poisson
Processes", 1993, superposition and marking). The first one that the filters keep is a draw from what they keep:
rejection sampling. min-p judges an arrival by its own logit. top-p and top-k judge it by what lies above it in the row,
and one more read of the row sums that for all candidates at once. A candidate below one that was rejected is rejected
too. So only the records are judged: candidates above all earlier ones.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.exchange import let_next_begin, wait_for_launch_before
from fused_softmax.core.kernels.state import NEG_INF
from fused_softmax.ops.sampling.kernels.common import (
    COLUMN_BITS,
    GROUPS,
    INF,
    KEPT_BITS,
    LANES,
    LAST_COLUMN,
    LOWEST,
    MEMBERS,
    NO_COLUMN,
    STRETCH,
    TOKENS,
    UNIT,
    at_turn,
    bounds_of_code,
    code_of,
    column_of,
    draw_of,
    filters_of,
    group_of,
    log2_of,
    logits_of,
    member_of,
    noise_of,
    order_of,
    score_at,
    scratch_at,
    sum_of_8,
    value_of,
    weight_at,
    words_of_turns,
)
from fused_softmax.ops.sampling.kernels.row import (
    DRAW_ONLY,
    JUDGED,
    LEAST,
    LOW,
    REJECTED,
    STATUS,
    TICKET,
    TOP,
    TOTAL,
    amount_in_row,
    begin_parts,
    best_kept,
    code_at,
    finish_parts,
    least_in_row,
    only_inf,
    row_state,
)

ARRIVALS, RECORDS = tl.constexpr(8), tl.constexpr(4)  # drawn, and judged, before a row is read again
RETRIES = tl.constexpr(16)  # draws from a row whose candidates were all rejected, before its boundary is sought
CODES, MASSES, COUNTS = tl.constexpr(12), tl.constexpr(16), tl.constexpr(20)  # where these of the records begin
NO_CODE = tl.constexpr(9223372036854775807)


@triton.jit(
    do_not_specialize=["n_cols", "n_rows", "top_k", "seed_low", "seed_high", "position_low", "position_high"]
)  # fmt: skip
def _propose(
    scratch_ptr, logits_ptr, tokens_ptr, valid_ptr, bias_ptr, bitmask_ptr, rows_ptr, temperature_ptr, top_k_ptr,
    top_p_ptr, min_p_ptr, seed_ptr, position_ptr, strides, n_rows, n_cols, temperature, top_k, top_p, min_p, seed_low,
    seed_high, position_low, position_high, K: tl.constexpr,
):  # fmt: skip
    """A program finds a row's first arrivals, and leaves the rest to `_decide`."""
    draw = tl.program_id(0).to(tl.int64)
    D = draw_of(
        logits_ptr, bias_ptr, bitmask_ptr, rows_ptr, temperature_ptr, seed_ptr, position_ptr, strides, n_rows, n_cols,
        temperature, seed_low, seed_high, position_low, position_high, draw, K,
    )  # fmt: skip
    wait_for_launch_before(K.follows)
    let_next_begin(K.leads)
    m, total, odd = row_state(scratch_ptr, draw, D, K)
    F = filters_of(top_k_ptr, top_p_ptr, min_p_ptr, strides, top_k, top_p, min_p, m, total, draw, D, K)
    valid = D.valid & (F.p > 0)
    token = tl.zeros([], tl.int64)
    tl.store(scratch_ptr + draw * K.scratch + STATUS, 0)
    if odd:
        token, valid = only_inf(None, D, valid, K)
    else:
        valid &= m > NEG_INF
        if valid:
            token = propose(scratch_ptr, draw, D, F, K)
    tl.store(tokens_ptr + draw * strides[TOKENS], token)
    tl.store(valid_ptr + draw, valid.to(tl.int8))


@triton.jit
def propose(scratch_ptr, draw, D, F, K: tl.constexpr):
    """The token of a row that can be drawn from; or 0, and the scratch says what is open."""
    token = tl.zeros([], tl.int64)
    record_ptr = scratch_ptr + draw * K.scratch
    # Otherwise the greatest logit alone has the mass that top-p asks for.
    if (D.temperature > 0) & (mass_of(F) > UNIT):
        rejects = (F.k > 0) | (F.p < 1)
        if rejects | (F.least > LOWEST):
            tl.store(record_ptr + TOP, order_of(F.m).to(tl.int64))
            tl.store(record_ptr + TOTAL, F.total)
            tl.store(record_ptr + LEAST, F.least.to(tl.int64) << COLUMN_BITS)
            begin_parts(record_ptr)
            if rejects:
                open_draw(record_ptr, candidates_of(scratch_ptr, draw, D, F, K), D, F, K)
            tl.store(record_ptr + STATUS, tl.where(rejects, JUDGED, DRAW_ONLY))
        else:
            token += member_of(D, first_group(scratch_ptr, draw, D, F, K), F.m, K)
    else:
        token = greatest_of(scratch_ptr, draw, D, F, K)
    return token


@triton.jit
def greatest_of(scratch_ptr, draw, D, F, K: tl.constexpr):
    """The first column of a row's maximum. It is in the first stretch that has this maximum."""
    at = tl.arange(0, K.all_stretches)
    maxima_ptr = scratch_at(scratch_ptr, draw, K.maxima_at, tl.float32, K)
    maxima = tl.load(maxima_ptr + at, mask=at < tl.cdiv(D.n_cols, STRETCH), other=NEG_INF)
    stretch = tl.min(tl.where(maxima == F.m, at, K.all_stretches), axis=0)
    call = tl.arange(0, LANES) + stretch * LANES
    col = tl.full([], NO_COLUMN, tl.int32)
    for quarter in range(4):
        first = column_of(call, quarter)
        cols = first[:, None] + tl.arange(0, 8)[None, :]
        x = logits_of(D, first, call >= 0, K) + 0.0  # 0.0: see `survey`
        col = tl.minimum(col, tl.min(tl.where(x == F.m, cols, NO_COLUMN)))
    return col.to(tl.int64)


@triton.jit
def first_group(scratch_ptr, draw, D, F, K: tl.constexpr):
    """The group of a row's first arrival, which nothing judges: an unfiltered draw."""
    stretch = first_greatest(scores_of_stretches(scratch_ptr, draw, D, F, K), tl.arange(0, K.all_stretches))
    call = stretch * LANES + tl.arange(0, LANES)
    scores_ptr = scratch_at(scratch_ptr, draw, K.scores_at, tl.float32, K)
    call = first_greatest(tl.load(scores_ptr + call), call)  # all of one stretch, so its maximum does not matter
    quarter = tl.arange(0, 4)
    first = column_of(call, quarter)
    s = sum_of_8(weight_at(logits_of(D, first, first >= 0, K), F.m, D, K))
    words = words_of_turns(D, call + 0 * quarter, 0, GROUPS)
    word = tl.where(quarter < 2, tl.where(quarter == 0, words[0], words[1]), tl.where(quarter == 2, words[2], words[3]))
    score = log2_of(s, K) + noise_of(word, words[0] ^ words[1] ^ words[2] ^ words[3], K)
    return first_greatest(score, first // 8)


@triton.jit
def first_greatest(score, at):
    """The number of the greatest score; of equal scores the lowest number."""
    return tl.min(tl.where(score == tl.max(score, axis=0), at, NO_COLUMN), axis=0)


@triton.jit
def candidates_of(scratch_ptr, draw, D, F, K: tl.constexpr):
    """[ARRIVALS]: the codes of a row's first arrivals, in the order of time.

    They are all in the ARRIVALS lanes whose own first arrivals are the earliest. Past the last one, codes are below any
    logit's.
    """
    call, there = earliest_lanes(scratch_ptr, draw, D, F, K)
    n = tl.arange(0, ARRIVALS)
    counter, turn = call[:, None] + 0 * n[None, :], 0 * call[:, None] + n[None, :]
    words = words_of_turns(D, counter, turn, GROUPS)
    all_words = words[0] ^ words[1] ^ words[2] ^ words[3]
    best = tl.full([ARRIVALS, ARRIVALS], NEG_INF, tl.float32)
    group = tl.zeros([ARRIVALS, ARRIVALS], tl.int32)
    for quarter in tl.static_range(4):
        first = column_of(call, quarter)
        s = sum_of_8(weight_at(logits_of(D, first, there, K), F.m, D, K))
        score = log2_of(s, K)[:, None] + noise_of(words[quarter], all_words, K)
        group = tl.where(score > best, first[:, None] // 8, group)
        best = tl.maximum(score, best)
    # After an arrival a process begins anew, so the time to the next one is distributed as the time of the first.
    time = tl.reshape(tl.cumsum(tl.exp2(-best), axis=1), [ARRIVALS * ARRIVALS])
    j, there = greatest(-time, tl.arange(0, ARRIVALS * ARRIVALS))
    group = tl.gather(tl.reshape(group, [ARRIVALS * ARRIVALS]), j, 0)
    turn = tl.gather(tl.reshape(turn, [ARRIVALS * ARRIVALS]), j, 0)
    x = logits_of(D, group * 8, there, K)
    cols = group[:, None] * 8 + tl.arange(0, 8)[None, :]
    words = words_of_turns(D, cols, turn[:, None], MEMBERS)
    z = score_at(x, D, F.m, K) + noise_of(words[0], words[0] ^ words[1] ^ words[2] ^ words[3], K)
    z = tl.where(x == NEG_INF, NEG_INF, z)
    col = tl.min(tl.where(z == tl.max(z, axis=1)[:, None], cols, NO_COLUMN), axis=1)
    x = tl.max(tl.where(cols == col[:, None], x, NEG_INF), axis=1)
    return tl.where(there, code_of(x, col), (tl.zeros([], tl.int64) + LOWEST) << COLUMN_BITS)


@triton.jit
def earliest_lanes(scratch_ptr, draw, D, F, K: tl.constexpr):
    """(calls [ARRIVALS] of the lanes of a row with the earliest first arrivals, which of these exist)."""
    maxima_ptr = scratch_at(scratch_ptr, draw, K.maxima_at, tl.float32, K)
    scores_ptr = scratch_at(scratch_ptr, draw, K.scores_at, tl.float32, K)
    stretch, there = greatest(scores_of_stretches(scratch_ptr, draw, D, F, K), tl.arange(0, K.all_stretches))
    # These lanes are in the ARRIVALS stretches whose best scores are the greatest.
    call = stretch[:, None] * LANES + tl.arange(0, LANES)[None, :]
    maxima = tl.load(maxima_ptr + stretch, mask=there, other=NEG_INF)
    scores = tl.load(scores_ptr + call, mask=there[:, None], other=NEG_INF)
    scores = in_row(scores, maxima[:, None], D, F, K)
    return greatest(tl.reshape(scores, [ARRIVALS * LANES]), tl.reshape(call, [ARRIVALS * LANES]))


@triton.jit
def scores_of_stretches(scratch_ptr, draw, D, F, K: tl.constexpr):
    """The greatest score of each stretch of a row."""
    at = tl.arange(0, K.all_stretches)
    on = at < tl.cdiv(D.n_cols, STRETCH)
    maxima = tl.load(scratch_at(scratch_ptr, draw, K.maxima_at, tl.float32, K) + at, mask=on, other=NEG_INF)
    bests = tl.load(scratch_at(scratch_ptr, draw, K.bests_at, tl.float32, K) + at, mask=on, other=NEG_INF)
    return in_row(bests, maxima, D, F, K)


@triton.jit
def in_row(score, maximum, D, F, K: tl.constexpr):
    """Scores relative to the row's maximum, from scores relative to that of their stretch."""
    return tl.where(maximum > NEG_INF, score + score_at(maximum, D, F.m, K), NEG_INF)


@triton.jit
def greatest(score, at):
    """(the numbers of the ARRIVALS greatest scores, the greatest first, 0 past the last; which of these exist).

    at: the numbers of the scores. Of equal scores the lowest number comes first.
    """
    i = tl.arange(0, ARRIVALS)
    order = order_of(score)
    found = tl.full([ARRIVALS], NO_COLUMN, tl.int32)
    for turn in range(ARRIVALS):
        most = tl.max(order, axis=0)
        one = tl.min(tl.where(order == most, at, NO_COLUMN), axis=0)
        found = tl.where((i == turn) & (most > LOWEST), one, found)
        order = tl.where(at == one, LOWEST, order)
    there = found < NO_COLUMN
    return tl.where(there, found, 0), there


@triton.jit
def open_draw(record_ptr, code, D, F, K: tl.constexpr):
    """Leave the records among the candidates to `_decide`, in ascending order."""
    i = tl.arange(0, ARRIVALS)
    may = (code >> COLUMN_BITS) >= tl.maximum(F.least, LOWEST + 1)
    below = (i[None, :] >= i[:, None]) | (code[None, :] < code[:, None]) | (may.to(tl.int32) == 0)[None, :]
    is_record = may & (tl.min(below.to(tl.int32), axis=1) > 0)
    ones = is_record.to(tl.int32)
    place = tl.cumsum(ones, axis=0) - ones
    # Equal logits before a record in its own group are counted here: `_decide` does not tell them apart.
    x = value_of((code >> COLUMN_BITS).to(tl.int32))
    col = ((code & LAST_COLUMN) ^ LAST_COLUMN).to(tl.int32)
    cols = (col // 8 * 8)[:, None] + tl.arange(0, 8)[None, :]
    x_8 = logits_of(D, col // 8 * 8, is_record, K)
    equal = tl.sum(((x_8 == x[:, None]) & (cols < col[:, None])).to(tl.int32), axis=1).to(tl.int64)
    mass = equal * (weight_at(x, F.m, D, K) * UNIT).to(tl.int64)
    slot = tl.arange(0, RECORDS)
    tl.store(record_ptr + CODES + slot, tl.full([RECORDS], NO_CODE, tl.int64))
    tl.debug_barrier()
    on = is_record & (place < RECORDS)
    tl.store(record_ptr + CODES + place, code, mask=on)
    tl.store(record_ptr + MASSES + place, mass, mask=on)
    tl.store(record_ptr + COUNTS + place, equal, mask=on)


@triton.jit(
    do_not_specialize=[
        "n_cols", "n_parts", "n_rows", "part_stretches", "top_k", "seed_low", "seed_high", "position_low",
        "position_high",
    ]
)  # fmt: skip
def _decide(
    scratch_ptr, logits_ptr, tokens_ptr, logprobs_ptr, kept_ptr, bias_ptr, bitmask_ptr, rows_ptr, temperature_ptr,
    top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, strides, n_rows, n_cols, n_parts, part_stretches,
    temperature, top_k, top_p, min_p, seed_low, seed_high, position_low, position_high, K: tl.constexpr,
):  # fmt: skip
    """A program has a part of an open row.

    It sums what lies above the candidates, or draws from what lies above a known boundary. The part that arrives last
    writes the token. No part waits.
    """
    wait_for_launch_before(K.follows)
    let_next_begin(K.leads)
    program = tl.program_id(0)
    draw = (program // n_parts).to(tl.int64)
    part = program % n_parts
    record_ptr = scratch_ptr + draw * K.scratch
    status = tl.load(record_ptr + STATUS)
    if status > 0:
        D = draw_of(
            logits_ptr, bias_ptr, bitmask_ptr, rows_ptr, temperature_ptr, seed_ptr, position_ptr, strides, n_rows,
            n_cols, temperature, seed_low, seed_high, position_low, position_high, draw, K,
        )  # fmt: skip
        m = value_of(tl.load(record_ptr + TOP).to(tl.int32))
        start = part * part_stretches
        end = tl.minimum(start + part_stretches, tl.cdiv(n_cols, STRETCH))
        tops_ptr = scratch_at(scratch_ptr, draw, K.tops_at, tl.float32, K)
        token_ptr = tokens_ptr + draw * strides[TOKENS]
        within = status > 0
        if K.first and not K.given:
            within = status != JUDGED
            if status == JUDGED:
                add_above(record_ptr, tops_ptr, start, end, D, m, K)
                last = tl.atomic_add(record_ptr + TICKET, 1, sem="acq_rel") == n_parts - 1
                if last:
                    total = tl.load(record_ptr + TOTAL)
                    F = filters_of(
                        top_k_ptr, top_p_ptr, min_p_ptr, strides, top_k, top_p, min_p, m, total, draw, D, K
                    )  # fmt: skip
                    token, cut = first_kept(record_ptr, F, K)
                    if token >= 0:
                        tl.store(token_ptr, token)
                    else:
                        tl.store(record_ptr + STATUS, REJECTED)
                        tl.store(record_ptr + LOW, cut)
        if within:
            least = tl.load(record_ptr + LEAST)
            if K.given:
                least = tl.minimum(least, code_at(tl.load(token_ptr), D, K))
            B = bounds_of_code(least)
            if kept_ptr is not None:
                kept_ptr += draw * strides[KEPT_BITS]
            key, mass = best_kept(kept_ptr, tops_ptr, D, start, end, m, B, K)
            finish_parts(record_ptr, token_ptr, logprobs_ptr, key, mass, D, m, B, draw, n_parts, K)


@triton.jit
def add_above(record_ptr, tops_ptr, start, end, D, m, K: tl.constexpr):
    """Add the mass that a part of the row has above each record; with top-k also how many logits."""
    L: tl.constexpr = K.stretches * LANES
    code_0, code_1 = tl.load(record_ptr + CODES), tl.load(record_ptr + CODES + 1)
    code_2, code_3 = tl.load(record_ptr + CODES + 2), tl.load(record_ptr + CODES + 3)
    least = tl.where(code_0 == NO_CODE, INF, value_of((code_0 >> COLUMN_BITS).to(tl.int32)))
    mass_0, mass_1 = tl.zeros([L], tl.int64), tl.zeros([L], tl.int64)
    mass_2, mass_3 = tl.zeros([L], tl.int64), tl.zeros([L], tl.int64)
    n_0, n_1 = tl.zeros([L], tl.int32), tl.zeros([L], tl.int32)
    n_2, n_3 = tl.zeros([L], tl.int32), tl.zeros([L], tl.int32)
    call = tl.arange(0, L) + start * LANES
    top = tl.load(tops_ptr + call, mask=call < end * LANES, other=NEG_INF)
    for _ in range(start, end, K.stretches):
        # A lane whose maximum is below all candidates adds nothing, and is not read.
        there = top >= least
        x = (
            logits_of(D, column_of(call, 0), there, K), logits_of(D, column_of(call, 1), there, K),
            logits_of(D, column_of(call, 2), there, K), logits_of(D, column_of(call, 3), there, K),
        )  # fmt: skip
        top = tl.load(tops_ptr + call + L, mask=call + L < end * LANES, other=NEG_INF)
        s_0, s_1 = tl.zeros([L], tl.float32), tl.zeros([L], tl.float32)
        s_2, s_3 = tl.zeros([L], tl.float32), tl.zeros([L], tl.float32)
        for quarter in tl.static_range(4):
            first = column_of(call, quarter)
            w = weight_at(x[quarter], m, D, K)
            s_0, n_0 = with_above(x[quarter], w, first, code_0, s_0, n_0, K)
            if code_1 != NO_CODE:
                s_1, n_1 = with_above(x[quarter], w, first, code_1, s_1, n_1, K)
                if code_2 != NO_CODE:
                    s_2, n_2 = with_above(x[quarter], w, first, code_2, s_2, n_2, K)
                    s_3, n_3 = with_above(x[quarter], w, first, code_3, s_3, n_3, K)
        mass_0 += (s_0 * UNIT).to(tl.int64)
        mass_1 += (s_1 * UNIT).to(tl.int64)
        mass_2 += (s_2 * UNIT).to(tl.int64)
        mass_3 += (s_3 * UNIT).to(tl.int64)
        call += L
    add_one(record_ptr, 0, mass_0, n_0, K)
    if code_1 != NO_CODE:
        add_one(record_ptr, 1, mass_1, n_1, K)
        if code_2 != NO_CODE:
            add_one(record_ptr, 2, mass_2, n_2, K)
            add_one(record_ptr, 3, mass_3, n_3, K)


@triton.jit
def with_above(x, w, first, code, s, n, K: tl.constexpr):
    """(s, n) of each lane after adding the weights, and the number, of its group's logits above a code.

    Logits equal to the code's in its own group are not added: `open_draw` has counted those that come before it.
    """
    B = bounds_of_code(code)
    least = tl.where(code == NO_CODE, INF, tl.where(first + 7 < B.col, B.x, B.above))
    above = x >= least[:, None]
    s += sum_of_8(tl.where(above, w, 0.0))
    if K.counted:
        n += tl.sum(above.to(tl.int32), axis=1)
    return s, n


@triton.jit
def add_one(record_ptr, i, mass, n, K: tl.constexpr):
    tl.atomic_add(record_ptr + MASSES + i, tl.sum(mass, axis=0), sem="relaxed")
    if K.counted:
        tl.atomic_add(record_ptr + COUNTS + i, tl.sum(n, axis=0).to(tl.int64), sem="relaxed")


@triton.jit
def first_kept(record_ptr, F, K: tl.constexpr):
    """(the column of the first record that top-k and top-p keep, or -1; the greatest code among the records)."""
    i = tl.arange(0, RECORDS)
    code = tl.load(record_ptr + CODES + i)
    there = code != NO_CODE
    # Read by atomics: the multiprocessor's own cache does not have what other programs added.
    mass = tl.atomic_add(record_ptr + MASSES + i, tl.zeros([RECORDS], tl.int64), sem="relaxed")
    kept = there & (mass.to(tl.float64) < mass_of(F))
    if K.counted:
        count = tl.atomic_add(record_ptr + COUNTS + i, tl.zeros([RECORDS], tl.int64), sem="relaxed")
        kept = kept & (count < count_of(F))
    least = tl.min(tl.where(kept, code, NO_CODE), axis=0)
    cut = tl.max(tl.where(there, code, (tl.zeros([], tl.int64) + LOWEST) << COLUMN_BITS), axis=0)
    return tl.where(least == NO_CODE, -1, (least & LAST_COLUMN) ^ LAST_COLUMN), cut


@triton.jit
def mass_of(F):
    """top-p keeps a column if less than this mass lies above it."""
    return tl.where(F.p < 1, F.p.to(tl.float64) * F.total.to(tl.float64), INF)


@triton.jit
def count_of(F):
    """top-k keeps a column if fewer columns than this lie above it."""
    return tl.where(F.k > 0, F.k, NO_CODE)


@triton.jit(
    do_not_specialize=["n_cols", "n_rows", "top_k", "seed_low", "seed_high", "position_low", "position_high"]
)  # fmt: skip
def _redraw(
    scratch_ptr, logits_ptr, tokens_ptr, bias_ptr, bitmask_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr,
    min_p_ptr, seed_ptr, position_ptr, strides, n_rows, n_cols, temperature, top_k, top_p, min_p, seed_low, seed_high,
    position_low, position_high, K: tl.constexpr,
):  # fmt: skip
    """A program draws the token of a row whose candidates were all rejected.

    It draws above the last candidate until a draw is kept. Each read of the row sums what lies above the last
    candidate, and draws the next one from it, with noise of its own. On average a draw leaves half of what was to be
    rejected.
    """
    wait_for_launch_before(K.follows)
    draw = tl.program_id(0).to(tl.int64)
    record_ptr = scratch_ptr + draw * K.scratch
    if tl.load(record_ptr + STATUS) == REJECTED:
        D = draw_of(
            logits_ptr, bias_ptr, bitmask_ptr, rows_ptr, temperature_ptr, seed_ptr, position_ptr, strides, n_rows,
            n_cols, temperature, seed_low, seed_high, position_low, position_high, draw, K,
        )  # fmt: skip
        m, total = value_of(tl.load(record_ptr + TOP).to(tl.int32)), tl.load(record_ptr + TOTAL)
        F = filters_of(top_k_ptr, top_p_ptr, min_p_ptr, strides, top_k, top_p, min_p, m, total, draw, D, K)
        tops_ptr = scratch_at(scratch_ptr, draw, K.tops_at, tl.float32, K)
        cut = tl.load(record_ptr + LOW)
        drawn, turn, open = tl.full([], 0, tl.int64), tl.zeros([], tl.int32), tl.zeros([], tl.int32) == 0
        while open:
            at = at_turn(D, ARRIVALS + turn)
            least = tl.maximum(cut + 1, F.least.to(tl.int64) << COLUMN_BITS)
            if turn == RETRIES:
                tl.debug_barrier()  # the callee writes shared memory, and Triton puts no barrier before a call
                least = least_in_row(D, F, K)
                tl.debug_barrier()
            B = bounds_of_code(least)
            key, mass = best_kept(None, tops_ptr, at, 0, tl.cdiv(n_cols, STRETCH), m, B, K)
            kept = mass.to(tl.float64) < mass_of(F)
            if K.counted:
                count, _ = amount_in_row(D, m, B, K)
                kept = kept & (count < count_of(F))
            kept = tl.where(turn == RETRIES, cut >= least, kept) & (turn > 0)
            if not kept:
                drawn = member_of(at, group_of(key), m, K, B)
                cut = code_at(drawn, D, K)
            open = (not kept) & (turn < RETRIES)
            turn += 1
        tl.store(tokens_ptr + draw * strides[TOKENS], drawn)
