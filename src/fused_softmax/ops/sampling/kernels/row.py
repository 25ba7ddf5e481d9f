"""Draws from a whole row of logits, or a part of it, within given bounds; and bounds by reading a row again and again.

Such reading is slow, and right whatever the logits are: it serves rows whose boundary nothing quicker can find.
"""

import triton
import triton.language as tl

from fused_softmax.ops.sampling.kernels.common import (
    COLUMN_BITS,
    GROUPS,
    LANES,
    LOWEST,
    STRETCH,
    TOKENS,
    UNIT,
    bounds_of_code,
    calls_of,
    column_of,
    group_of,
    kept_of,
    logits_of,
    logprob_of,
    member_of,
    order_of,
    sum_of_8,
    take_kept,
    weight_at,
    words_of,
)

# Where a row's record has what its parts add to.
KEY, KEPT, TICKET = tl.constexpr(6), tl.constexpr(7), tl.constexpr(8)


@triton.jit
def best_kept(kept_ptr, D, start, end, m, B, K: tl.constexpr):
    """(key of the best group, mass in units) of what is kept of stretches from start to end."""
    best = tl.zeros([K.stretches * LANES], tl.int64)
    mass = tl.zeros([K.stretches * LANES], tl.int64)
    for stretch in range(start, end, K.stretches):
        call = calls_of(stretch, K)
        best, mass = take_lanes(kept_ptr, D, call, call < end * LANES, m, B, best, mass, K)
    return tl.max(best, axis=0), tl.sum(mass, axis=0)


@triton.jit
def take_lanes(kept_ptr, D, call, there, m, B, best, mass, K: tl.constexpr):
    """(best, mass) of each lane with what is kept of the 32 columns of its call."""
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
    """Nothing yet of a row that several programs draw from."""
    zero = tl.zeros([], tl.int64)
    tl.store(record_ptr + KEY, zero)
    tl.store(record_ptr + KEPT, zero)
    tl.store(record_ptr + TICKET, zero)


@triton.jit
def finish_parts(
    record_ptr, tokens_ptr, logprobs_ptr, key, mass, D, m, B, draw, n_parts, strides, K: tl.constexpr
):  # fmt: skip
    """Adds a part's best group and mass to its row's. The part that arrives last writes the token: nobody waits."""
    tl.atomic_max(record_ptr + KEY, key, sem="relaxed")
    tl.atomic_add(record_ptr + KEPT, mass, sem="relaxed")
    last = tl.atomic_add(record_ptr + TICKET, 1, sem="acq_rel") == n_parts - 1
    if last:
        key = tl.atomic_max(record_ptr + KEY, 0, sem="relaxed")
        mass = tl.atomic_add(record_ptr + KEPT, 0, sem="relaxed")
        token = member_of(D, group_of(key), m, K, B)
        tl.store(tokens_ptr + draw * strides[TOKENS], token)
        if logprobs_ptr is not None:
            tl.store(logprobs_ptr + draw, logprob_of(token, mass, D, m, K))


@triton.jit(noinline=True)
def within_row(kept_ptr, D, m, B, K: tl.constexpr):
    """(token, its logprob) of a whole row, by one program."""
    key, mass = best_kept(kept_ptr, D, 0, tl.cdiv(D.n_cols, STRETCH), m, B, K)
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
                low = least  # of what top-k left
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
    """(how many, their mass in units) of what is within bounds of a row."""
    count = tl.zeros([K.stretches * LANES, 8], tl.int32)
    mass = tl.zeros([K.stretches * LANES], tl.int64)
    for stretch in range(0, tl.cdiv(D.n_cols, STRETCH), K.stretches):
        call = calls_of(stretch, K)
        for quarter in range(4):
            first = column_of(call, quarter)
            x = logits_of(D, first, call >= 0, K)
            kept = kept_of(x, first[:, None] + tl.arange(0, 8)[None, :], B)
            count += kept.to(tl.int32)
            mass += (sum_of_8(tl.where(kept, weight_at(x, m, D), 0.0)) * UNIT).to(tl.int64)
    return tl.sum(count).to(tl.int64), tl.sum(mass, axis=0)
