"""The lanes of a row with the greatest maxima: they hold every logit above a certain one.

A lane has 32 columns (`common.py`), and the launch that reads a row leaves the maximum of each.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.state import NEG_INF
from fused_softmax.ops.sampling.kernels.common import (
    LANES,
    LOWEST,
    STRETCH,
    middle_of,
    order_of,
    scratch_at,
    sums_of,
    whole_grains,
)

RANKED = tl.constexpr(128)  # maxima of stretches that are ranked, at most
PIVOTS = tl.constexpr(4)  # maxima of stretches that are tried as bounds before a bisection
HIGHEST = tl.constexpr(2147483647)  # above the order of any number


@triton.jit
def lane_maxima(scratch_ptr, draw, D, K: tl.constexpr):
    """[stretches, lanes]: the maximum of each lane of a row."""
    call = tl.arange(0, K.all_stretches)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    tops_ptr = scratch_at(scratch_ptr, draw, K.tops_at, tl.float32, K)
    return tl.load(tops_ptr + call, mask=call < tl.cdiv(D.n_cols, STRETCH) * LANES, other=NEG_INF)


@triton.jit
def greatest_lanes(top, D, F, K: tl.constexpr):
    """(calls [K.capacity] of the lanes with the greatest maxima, -1 past the last; an order).

    The lanes hold every logit of this order or a higher one.
    """
    order = order_of(top)
    there = order > LOWEST
    n_there, n_least = sums_of(there.to(tl.int32), (order >= F.least).to(tl.int32), K)
    high = tl.zeros([], tl.int64) + LOWEST
    if n_there > K.capacity:
        # Nothing below min-p's bound is looked for.
        few = (n_least <= K.capacity) & (F.least > LOWEST)
        high = tl.where(few, F.least, order_of(F.m) + 1).to(tl.int64)
        if not few:
            high = bound_of_lanes(order, high, D, F, K)
    # One bit for each lane of a stretch.
    marks = tl.sum(((order >= high) & there).to(tl.int32) << tl.arange(0, LANES)[None, :], axis=1)
    return nth_lanes(marks, K), high.to(tl.int32)


@triton.jit
def bound_of_lanes(order, high, D, F, K: tl.constexpr):
    """An order that at most K.capacity lanes reach, and at least as many as top-k asks for, or nearly K.capacity.

    The maxima of stretches, or of a few stretches together, are tried first. How many stretches reach an order tells
    how many lanes do, if lanes are independent. A bisection goes on from there.
    """
    wanted = tl.where((F.k > 0) & (F.k <= K.capacity), F.k, K.capacity - K.capacity // 8).to(tl.int32)
    goal = (wanted + K.capacity) >> 1
    S: tl.constexpr = K.all_stretches
    TOGETHER: tl.constexpr = (S + RANKED - 1) // RANKED
    of_stretch = tl.max(tl.reshape(order, [S // TOGETHER, TOGETHER * LANES]), axis=1)
    rank = tl.sum((of_stretch[None, :] > of_stretch[:, None]).to(tl.int32), axis=1)
    n_stretches = tl.cdiv(D.n_cols, STRETCH * TOGETHER)
    last = n_stretches - (n_stretches.to(tl.float32) * tl.exp(-goal.to(tl.float32) / n_stretches)).to(tl.int32)
    low = tl.zeros([], tl.int64) + LOWEST + 1
    n_high = tl.zeros([], tl.int32)
    turn = tl.zeros([], tl.int32)
    while (turn < PIVOTS) & (n_high < wanted):
        pivot = tl.min(tl.where(rank < last, of_stretch, HIGHEST), axis=0).to(tl.int64)
        n = tl.sum((order >= pivot).to(tl.int32))
        low = tl.where(n > K.capacity, tl.maximum(low, pivot), low)
        n_high = tl.where((n > K.capacity) | (pivot >= high), n_high, n)
        high = tl.where(n > K.capacity, high, tl.minimum(high, pivot))
        last = tl.maximum(last * goal // tl.maximum(n, 1), 1)
        turn += 1
    low, high = whole_grains(low, high, K)
    while (high - low > K.grain) & (n_high < wanted):
        middle = middle_of(low, high, K)
        n = tl.sum((order >= middle).to(tl.int32))
        low = tl.where(n > K.capacity, middle, low)
        high = tl.where(n > K.capacity, high, middle)
        n_high = tl.where(n > K.capacity, n_high, n)
    return high


@triton.jit
def nth_lanes(marks, K: tl.constexpr):
    """The calls of the lanes that are marked in each stretch, at most K.capacity; -1 past the last."""
    n = ones_of(marks)
    end = tl.cumsum(n, axis=0)
    i = tl.arange(0, K.capacity)
    # How many stretches end at place i or before it.
    stretch = tl.cumsum(tl.histogram(end, K.capacity, mask=end < K.capacity), axis=0)
    there = stretch < K.all_stretches
    stretch = tl.where(there, stretch, 0)
    word = tl.gather(marks, stretch, 0)
    nth = i - tl.gather(end - n, stretch, 0)
    lane = i * 0
    for step in tl.static_range(5):  # halves of the word: 16, 8, 4, 2 and 1 bit
        bits = 16 >> step
        low = word & ((1 << bits) - 1)
        n_low = ones_of(low)
        upper = nth >= n_low
        nth -= tl.where(upper, n_low, 0)
        lane += tl.where(upper, bits, 0)
        word = tl.where(upper, (word >> bits) & ((1 << bits) - 1), low)
    return tl.where(there, stretch * LANES + lane, -1)


@triton.jit
def ones_of(word):
    """How many of 32 bits are 1."""
    n = word - ((word >> 1) & 0x55555555)
    n = (n & 0x33333333) + ((n >> 2) & 0x33333333)
    n = (n + (n >> 4)) & 0x0F0F0F0F
    return (n + (n >> 8) + (n >> 16) + (n >> 24)) & 0x3F
