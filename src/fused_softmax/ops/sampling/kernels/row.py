"""Draws from a whole row of logits, or a part of it, within given bounds; bounds found by reading a row repeatedly.

Such reading is slow, but right for any logits. It serves rows whose boundary nothing quicker finds.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.state import NEG_INF
from fused_softmax.ops.sampling.kernels.common import (
    COLUMN_BITS,
    GROUPS,
    LANES,
    LOWEST,
    STRETCH,
    bounds_of_code,
    calls_of,
    code_of,
    column_of,
    group_of,
    kept_of,
    logits_of,
    logprob_of,
    member_of,
    order_of,
    scratch_at,
    survey,
    take_kept,
    units_of_8,
    weight_at,
    weight_of_maximum,
    words_of,
)

# A row's record: what is open of it; orders below and above its last kept logit; how many logits are above these, and
# their mass; the code of the last kept logit; what its parts add to; its maximum and its sum; how many are listed.
STATUS, LOW, HIGH, COUNT, MASS, LEAST, KEY, KEPT, TICKET, TOP, TOTAL, LISTED = (tl.constexpr(i) for i in range(12))
DRAW_ONLY, ALL, JUDGED, REJECTED = (tl.constexpr(i) for i in range(1, 5))  # what is open


@triton.jit
def row_state(scratch_ptr, draw, D, K: tl.constexpr, raws_ptr=None):
    """(m, s in units, whether the row has a NaN or an inf), from all stretches of a row.

    raws_ptr: the sums of stretches at the temperature of D, if those of the scratch are at another.
    """
    n_stretches = tl.cdiv(D.n_cols, STRETCH)
    at = tl.arange(0, K.all_stretches)
    on = at < n_stretches
    m_parts = tl.load(scratch_at(scratch_ptr, draw, K.maxima_at, tl.float32, K) + at, mask=on, other=NEG_INF)
    if raws_ptr is None:
        sums_ptr = scratch_at(scratch_ptr, draw, K.sums_at, tl.int64, K)
    else:
        sums_ptr = raws_ptr + draw * K.room
    s_parts = tl.load(sums_ptr + at, mask=on, other=0)
    m = tl.max(m_parts, axis=0)
    weight = weight_of_maximum(m_parts, m, D, K).to(tl.float64)
    return m, tl.sum((s_parts.to(tl.float64) * weight).to(tl.int64), axis=0), tl.min(s_parts, axis=0) < 0


@triton.jit
def only_inf(kept_ptr, D, valid, K: tl.constexpr):
    """(token, whether it can be drawn) of a row with a NaN or an inf. One inf alone is drawn."""
    _, n_inf, at_inf, n_nan = survey(D, K)
    valid &= (n_nan == 0) & (n_inf == 1)
    token = tl.where(valid, at_inf, 0).to(tl.int64)
    if kept_ptr is not None:  # noqa: SIM102  a constexpr, then a value
        if valid:
            tl.store(kept_ptr + token // 8, (1 << (token % 8)).to(tl.uint8))
    return token, valid


@triton.jit
def code_at(col, D, K: tl.constexpr):
    """The code of a column's logit."""
    first = (col // 8 * 8).to(tl.int32)
    x = logits_of(D, first + tl.zeros([1], tl.int32), tl.full([1], 1, tl.int1), K)
    x = tl.max(tl.where(first + tl.arange(0, 8)[None, :] == col, x, NEG_INF))
    return code_of(x, col)


@triton.jit
def best_kept(kept_ptr, tops_ptr, D, start, end, m, B, K: tl.constexpr):
    """(key of the best group, mass in units) of what is kept in the stretches from start to end.

    tops_ptr: the maxima of lanes, or None. A lane whose maximum is not kept is not read.
    """
    best = tl.zeros([K.stretches * LANES], tl.int64)
    mass = tl.zeros([K.stretches * LANES], tl.int64)
    for stretch in range(start, end, K.stretches):
        call = calls_of(stretch, K)
        there = call < end * LANES
        if tops_ptr is not None:
            there = there & (tl.load(tops_ptr + call, mask=there, other=NEG_INF) >= B.x)
        best, mass = take_lanes(kept_ptr, D, call, there, m, B, best, mass, K)
    return tl.max(best, axis=0), tl.sum(mass, axis=0)


@triton.jit
def take_lanes(kept_ptr, D, call, there, m, B, best, mass, K: tl.constexpr):
    """(best, mass) of each lane after taking what is kept of the 32 columns of its call."""
    words = words_of(D, call, GROUPS)
    all_words = words[0] ^ words[1] ^ words[2] ^ words[3]
    for quarter in tl.static_range(4):
        first = column_of(call, quarter)
        x = logits_of(D, first, there, K)
        key, more = take_kept(x, first, there, words[quarter], all_words, D, m, B, kept_ptr, K)
        best = tl.maximum(best, key)
        mass += more
    return best, mass


@triton.jit
def begin_parts(record_ptr):
    """Clear what the parts of a row will add to."""
    zero = tl.zeros([], tl.int64)
    tl.store(record_ptr + KEY, zero)
    tl.store(record_ptr + KEPT, zero)
    tl.store(record_ptr + TICKET, zero)


@triton.jit
def finish_parts(
    record_ptr, token_ptr, logprobs_ptr, key, mass, D, m, B, draw, n_parts, K: tl.constexpr
):  # fmt: skip
    """Add a part's best group and mass to those of its row.

    The part that arrives last writes the token, unless it is given (K.given). No part waits.
    """
    tl.atomic_max(record_ptr + KEY, key, sem="relaxed")
    tl.atomic_add(record_ptr + KEPT, mass, sem="relaxed")
    last = tl.atomic_add(record_ptr + TICKET, 1, sem="acq_rel") == n_parts - 1
    if last:
        key = tl.atomic_max(record_ptr + KEY, 0, sem="relaxed")
        mass = tl.atomic_add(record_ptr + KEPT, 0, sem="relaxed")
        if K.given:
            token = tl.load(token_ptr)
        else:
            token = member_of(D, group_of(key), m, K, B)
            tl.store(token_ptr, token)
        if logprobs_ptr is not None:
            tl.store(logprobs_ptr + draw, logprob_of(token, mass, D, m, K))


@triton.jit(noinline=True)
def within_row(token, kept_ptr, D, m, B, K: tl.constexpr):
    """(token, its logprob) of a whole row, by one program. token: the given one, if K.given."""
    key, mass = best_kept(kept_ptr, None, D, 0, tl.cdiv(D.n_cols, STRETCH), m, B, K)
    if not K.given:
        token = member_of(D, group_of(key), m, K, B)
    return token, logprob_of(token, mass, D, m, K)


@triton.jit(noinline=True)
def least_in_row(D, F, K: tl.constexpr):
    """The code of the last logit that is kept of a row, by reading it again and again.

    Top-k and top-p each take logits in order until a number, or a mass, is reached: a bisection finds the last one.
    """
    floor = (tl.zeros([], tl.int64) + LOWEST) << COLUMN_BITS
    least = floor
    for by_mass in range(2):
        if tl.where(by_mass == 1, F.p < 1, F.k > 0):
            low, high = floor, (order_of(F.m).to(tl.int64) + 1) << COLUMN_BITS
            if not K.joint:
                low = least  # top-p judges what top-k left
            target = tl.where(by_mass == 1, F.p.to(tl.float64) * F.total.to(tl.float64), F.k.to(tl.float64))
            between = tl.zeros([], tl.int64) + 2
            below, above = between * 0, between * 0  # how many lie from low, and from high, on
            middle = low
            while between > 1:
                count, mass = amount_in_row(D, F.m, bounds_of_code(middle), K)
                if (middle == low) & (by_mass == 1) & (F.k > 0) & (not K.joint):
                    target = F.p.to(tl.float64) * mass.to(tl.float64)
                reached = tl.where(by_mass == 1, mass.to(tl.float64), count.to(tl.float64)) >= target
                if middle == low:
                    below = count
                low = tl.where(reached, middle, low)
                below = tl.where(reached, count, below)
                high = tl.where(reached | (middle == low), high, middle)
                above = tl.where(reached | (middle == low), above, count)
                between = tl.minimum(below - above, high - low)
                middle = (low + high) >> 1
            least = tl.maximum(least, low)
    return tl.maximum(least, F.least.to(tl.int64) << COLUMN_BITS)


@triton.jit
def amount_in_row(D, m, B, K: tl.constexpr):
    """(how many logits of a row are within the bounds, their mass in units)."""
    count = tl.zeros([K.stretches * LANES, 8], tl.int32)
    mass = tl.zeros([K.stretches * LANES], tl.int64)
    for stretch in range(0, tl.cdiv(D.n_cols, STRETCH), K.stretches):
        call = calls_of(stretch, K)
        for quarter in range(4):
            first = column_of(call, quarter)
            x = logits_of(D, first, call >= 0, K)
            kept = kept_of(x, first[:, None] + tl.arange(0, 8)[None, :], B)
            count += kept.to(tl.int32)
            mass += units_of_8(tl.where(kept, weight_at(x, m, D, K), 0.0), K)
    return tl.sum(count).to(tl.int64), tl.sum(mass, axis=0)
