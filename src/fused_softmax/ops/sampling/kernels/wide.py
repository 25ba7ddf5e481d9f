"""Where the filters of a row end, in two more launches, where many logits lie above the boundary.

A sample of the row gives two logits with the boundary between them. The first launch reads the row, counts the logits
above both and lists those in between, a few thousand. The second finds the boundary in this list; `_decide` draws from
the kept logits. If the sample misleads, a bisection reads the row as often as it needs, with the same result.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.exchange import let_next_begin, wait_for_launch_before
from fused_softmax.core.kernels.state import NEG_INF
from fused_softmax.ops.sampling.kernels.common import (
    COLUMN_BITS,
    GREATEST,
    LANES,
    LAST_COLUMN,
    LOWEST,
    QUARTER,
    STRETCH,
    UNIT,
    bounds_of_code,
    calls_of,
    code_of,
    column_of,
    draw_of,
    filters_of,
    logits_of,
    middle_of,
    of_score,
    order_of,
    score_at,
    scratch_at,
    sums_of,
    units_of_8,
    value_of,
    weight_at,
    whole_grains,
)
from fused_softmax.ops.sampling.kernels.lanes import ones_of
from fused_softmax.ops.sampling.kernels.row import (
    ALL,
    COUNT,
    DRAW_ONLY,
    HIGH,
    KEPT,
    LEAST,
    LISTED,
    LOW,
    MASS,
    STATUS,
    TOP,
    TOTAL,
    amount_in_row,
    begin_parts,
    least_in_row,
)

SPREADS = tl.constexpr(5.0)  # standard deviations by which a sample's boundary may be off
BINS = tl.constexpr(1024)
SAMPLED_WELL = tl.constexpr(131072.0)  # columns: the list has room for what one sample of so many misses
LEAST_SCORE = tl.constexpr(-40.0)  # the least of a sample's histogram: lower scores have no weight


@triton.jit
def open_row(record_ptr, D, F, K: tl.constexpr):
    """Leave an open row to the later launches: its state, and where its boundary is according to a sample."""
    status, low, high = DRAW_ONLY + 0, tl.zeros([], tl.int32) + LOWEST, order_of(F.m) + 1
    if (F.k > 0) | (F.p < 1):
        status = ALL + 0
        if D.n_cols > K.listed:
            low, high = sampled_bracket(scratch_at(record_ptr, 0, K.bins_at, tl.int32, K), D, F, K)
        if K.linear:
            low = tl.maximum(low, F.least)
    tl.store(record_ptr + STATUS, status)
    tl.store(record_ptr + LOW, low.to(tl.int64))
    tl.store(record_ptr + HIGH, high.to(tl.int64))
    tl.store(record_ptr + LEAST, F.least.to(tl.int64) << COLUMN_BITS)
    zero = tl.zeros([], tl.int64)
    tl.store(record_ptr + COUNT, zero)
    tl.store(record_ptr + MASS, zero)
    begin_parts(record_ptr)
    tl.store(record_ptr + LISTED, zero)
    tl.store(record_ptr + TOP, order_of(F.m).to(tl.int64))
    tl.store(record_ptr + TOTAL, F.total)


@triton.jit
def sampled_bracket(bins_ptr, D, F, K: tl.constexpr):
    """(low, high): orders between which the boundary of top-k, or else of top-p, should be.

    A histogram of the sample's scores, from the least to the maximum, tells how much lies below each bin.
    """
    N: tl.constexpr = K.sampled * 8
    turns = turns_of(D.n_cols)
    x = sampled(D, 0, turns, K)
    z = score_at(x, D, F.m, K)
    none = 0.0 if K.linear else NEG_INF
    least = tl.minimum(tl.maximum(tl.min(tl.where(x > none, z, 0.0), axis=0), LEAST_SCORE), -1e-20)
    width = least / -BINS
    n = counted(bins_ptr, bin_of(z, least, width), x > none)
    for turn in range(1, turns):
        x = sampled(D, turn, turns, K)
        n += counted(bins_ptr, bin_of(score_at(x, D, F.m, K), least, width), x > none)
    at = tl.arange(0, BINS)
    share = N * turns.to(tl.float32) / D.n_cols.to(tl.float32)
    by_k = (F.k > 0) & ((F.p >= 1) | (not K.joint) | (F.k < K.listed // 4))
    v = tl.where(by_k, 1.0, tl.exp2(least + (at + 0.5) * width))
    n_all = tl.sum(n, axis=0)
    below = tl.cumsum(n * v, axis=0) - n * v
    n_from = n_all - tl.cumsum(n, axis=0) + n
    want = (1.0 - F.p) * (F.total.to(tl.float32) / UNIT) * share
    want = tl.where(by_k, n_all - F.k.to(tl.float32) * share, want)
    first = tl.sum(tl.where(below <= want, n * v, 0.0), axis=0)
    second = tl.sum(tl.where(below <= want, n * v * v, 0.0), axis=0)
    spread = tl.minimum(tl.maximum(tl.sqrt(second) * SPREADS / tl.maximum(first, 1e-30), 0.02), 1.0) * want
    spread = tl.where(by_k, tl.sqrt(tl.maximum(n_all - want, 0.0)) * SPREADS + 8.0, spread)
    low = tl.sum((below <= want - spread).to(tl.int32), axis=0) - 2
    high = tl.sum((below <= want + spread).to(tl.int32), axis=0) + 1
    # If more lie between than the list has room for: as many on both sides of the expected boundary.
    room = 0.7 * K.listed * share
    n_high = tl.max(tl.where(at >= high, n_from, 0.0), axis=0)
    if tl.max(tl.where(at >= low, n_from, 0.0), axis=0) - n_high > room:
        n_middle = tl.max(tl.where(below > want, n_from, 0.0), axis=0)
        low = tl.maximum(low, tl.sum((n_from > n_middle + room / 2).to(tl.int32), axis=0))
        high = tl.minimum(high, tl.sum((n_from > n_middle - room / 2).to(tl.int32), axis=0))
        n_high = tl.max(tl.where(at >= high, n_from, 0.0), axis=0)
    # If few lie above, they are listed too.
    few = n_high < 64
    n_high = tl.where(few, 0.0, n_high)
    low = tl.maximum(low, tl.sum((n_from > n_high + room).to(tl.int32), axis=0))
    low_order = tl.where(low > 0, order_of(of_score(least + low * width, D, F.m, K)), LOWEST)
    high_order = order_of(of_score(least + high * width, D, F.m, K))
    return low_order, tl.where(few | (high >= BINS), order_of(F.m) + 1, tl.minimum(high_order, order_of(F.m) + 1))


@triton.jit
def turns_of(n_cols):
    """How many samples of a row are taken. Their boundary is off by columns in proportion to n_cols / sqrt(turns)."""
    much = n_cols.to(tl.float32) / SAMPLED_WELL
    return tl.minimum(tl.maximum(tl.ceil(much * much), 1.0), 16.0).to(tl.int32)


@triton.jit
def sampled(D, turn, turns, K: tl.constexpr):
    """The logits of K.sampled groups of 8 from all over a row; other groups at each turn."""
    N: tl.constexpr = K.sampled * 8
    n_groups = tl.cdiv(D.n_cols, 8)
    i = (tl.arange(0, K.sampled) * turns + turn).to(tl.int64)
    group = (i * n_groups // (K.sampled * turns)).to(tl.int32)
    return tl.reshape(logits_of(D, group * 8, group >= 0, K), [N])


@triton.jit
def counted(bins_ptr, bin, on):
    """fp32 [BINS]: how many are in each bin. `tl.histogram` took longer (measured/sampling.md)."""
    at = bins_ptr + tl.arange(0, BINS)
    tl.store(at, tl.zeros([BINS], tl.int32))
    tl.debug_barrier()
    tl.atomic_add(bins_ptr + bin, 1, mask=on, sem="relaxed")
    tl.debug_barrier()
    n = tl.load(at, cache_modifier=".cg")  # from L2, where atomics add
    tl.debug_barrier()
    return n.to(tl.float32)


@triton.jit
def bin_of(z, least, width):
    return tl.minimum(tl.maximum((z - least) / width, 0.0), BINS - 1.0).to(tl.int32)


@triton.jit(do_not_specialize=["n_cols", "n_parts", "n_rows", "part_stretches"])
def _weigh(
    scratch_ptr, logits_ptr, bias_ptr, bitmask_ptr, rows_ptr, temperature_ptr, strides, n_rows, n_cols, n_parts,
    part_stretches, temperature, K: tl.constexpr,
):  # fmt: skip
    """A program has a part of an open row. It lists the logits within the bracket.

    It also counts the logits above the bracket, and sums their mass.
    """
    wait_for_launch_before(K.follows)
    let_next_begin(K.leads)
    program = tl.program_id(0)
    draw = (program // n_parts).to(tl.int64)
    part = program % n_parts
    record_ptr = scratch_ptr + draw * K.scratch
    if tl.load(record_ptr + STATUS) == ALL:
        D = draw_of(
            logits_ptr, bias_ptr, bitmask_ptr, rows_ptr, temperature_ptr, None, None, strides, n_rows, n_cols,
            temperature, 0, 0, 0, 0, draw, K,
        )  # fmt: skip
        m = value_of(tl.load(record_ptr + TOP).to(tl.int32))
        low = tl.maximum(value_of(tl.load(record_ptr + LOW).to(tl.int32)), -GREATEST)
        high = value_of(tl.load(record_ptr + HIGH).to(tl.int32))
        start = part * part_stretches
        end = tl.minimum(start + part_stretches, tl.cdiv(n_cols, STRETCH))
        list_ptr = scratch_at(scratch_ptr, draw, K.list_at, tl.int64, K)
        count = tl.zeros([K.stretches * LANES], tl.int32)
        mass = tl.zeros([K.stretches * LANES], tl.int64)
        for stretch in range(start, end, K.stretches):
            call = calls_of(stretch, K)
            there = call < end * LANES
            marks = tl.zeros([K.stretches * LANES], tl.int32)
            for quarter in tl.static_range(4):
                x = logits_of(D, column_of(call, quarter), there, K)
                above = x >= high
                mass += units_of_8(tl.where(above, weight_at(x, m, D, K), 0.0), K)
                count += tl.sum(above.to(tl.int32), axis=1)
                within = ((x >= low) & (x < high)).to(tl.int32)
                marks |= tl.sum(within << tl.arange(0, 8)[None, :], axis=1) << (quarter * 8)
            list_marked(list_ptr, record_ptr, marks, call, D, K)
        tl.atomic_add(record_ptr + COUNT, tl.sum(count, axis=0).to(tl.int64), sem="relaxed")
        tl.atomic_add(record_ptr + MASS, tl.sum(mass, axis=0), sem="relaxed")


@triton.jit
def list_marked(list_ptr, record_ptr, marks, call, D, K: tl.constexpr):
    """Add the codes of the logits that lanes have marked to a list, in no order, while there is room."""
    n = ones_of(marks)
    most = tl.max(n, axis=0)
    if most > 0:
        base = tl.atomic_add(record_ptr + LISTED, tl.sum(n, axis=0).to(tl.int64), sem="relaxed").to(tl.int32)
        base += tl.cumsum(n, axis=0) - n
        first = column_of(call, 0)
        for i in range(most):
            bit = ones_of((marks & -marks) - 1)
            on = (marks != 0) & (base + i < K.listed)
            col = first + bit // 8 * QUARTER + bit % 8
            x = tl.load(D.ptr + col, mask=on, other=0.0).to(tl.float32)  # the value that was just read
            if K.biased:
                x += tl.load(D.bias_ptr + col, mask=on, other=0.0).to(tl.float32)
            tl.store(list_ptr + base + i, code_of(x, col), mask=on)
            marks &= marks - 1


@triton.jit(do_not_specialize=["n_cols", "n_rows", "top_k"])
def _bound(
    scratch_ptr, logits_ptr, bias_ptr, bitmask_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, strides,
    n_rows, n_cols, temperature, top_k, top_p, min_p, K: tl.constexpr,
):  # fmt: skip
    """A program finds the last kept logit of an open row in its list."""
    wait_for_launch_before(K.follows)
    let_next_begin(K.leads)
    draw = tl.program_id(0).to(tl.int64)
    record_ptr = scratch_ptr + draw * K.scratch
    if tl.load(record_ptr + STATUS) == ALL:
        D = draw_of(
            logits_ptr, bias_ptr, bitmask_ptr, rows_ptr, temperature_ptr, None, None, strides, n_rows, n_cols,
            temperature, 0, 0, 0, 0, draw, K,
        )  # fmt: skip
        m = value_of(tl.load(record_ptr + TOP).to(tl.int32))
        total = tl.load(record_ptr + TOTAL)
        F = filters_of(top_k_ptr, top_p_ptr, min_p_ptr, strides, top_k, top_p, min_p, m, total, draw, D, K)
        list_ptr = scratch_at(scratch_ptr, draw, K.list_at, tl.int64, K)
        n = tl.load(record_ptr + LISTED)
        least, kept, found = tl.zeros([], tl.int64), tl.zeros([], tl.int64), n < 0
        if n <= K.listed:
            if n <= K.listed // 2:
                least, kept, found = least_of_list(record_ptr, list_ptr, n, D, F, K, K.listed // 2)
            else:
                least, kept, found = least_of_list(record_ptr, list_ptr, n, D, F, K, K.listed)
        if not found:
            tl.debug_barrier()  # the callee writes shared memory, and Triton puts no barrier before a call
            least = least_in_row(D, F, K)
            if K.sums:
                tl.debug_barrier()
                _, kept = amount_in_row(D, F.m, bounds_of_code(least), K)
        tl.store(record_ptr + LEAST, tl.maximum(least, F.least.to(tl.int64) << COLUMN_BITS))
        if K.sums:
            tl.store(record_ptr + KEPT, kept)


@triton.jit
def least_of_list(record_ptr, list_ptr, n, D, F, K: tl.constexpr, ROOM: tl.constexpr):
    """(the code of the last logit that top-k and top-p keep, the mass of what they keep, whether the list has it).

    The mass is 0 without K.sums.
    """
    i = tl.arange(0, ROOM)
    on = i < n
    code = tl.load(list_ptr + i, mask=on, other=0)
    order = (code >> COLUMN_BITS).to(tl.int32)
    cols = tl.full([], LAST_COLUMN, tl.int32) - (code & LAST_COLUMN).to(tl.int32)
    low, high = tl.load(record_ptr + LOW), tl.load(record_ptr + HIGH)
    count, mass = tl.load(record_ptr + COUNT), tl.load(record_ptr + MASS)
    least, by_k, by_p = least_of_filters(order, cols, on, low, high, count, mass, D, F, K)
    kept = mass * 0
    if K.sums:
        weight = (weight_at(value_of(order), F.m, D, K) * UNIT).to(tl.int64)
        kept = mass + tl.sum(tl.where(on & at_or_above(order, cols, least), weight, 0), axis=0)
    if K.joint:  # a filter that ends below the list keeps all of it; where one ends above it is unknown
        found = (by_k | by_p) & ((F.k == 0) | (count < F.k))
        if F.p < 1:
            found = found & (mass.to(tl.float64) < F.p.to(tl.float64) * F.total.to(tl.float64))
        return least, kept, found
    else:
        found = tl.where(F.k > 0, by_k & (by_p | (F.p >= 1)), by_p)
        if K.linear:  # top-k keeps all above 0, if it does not end there
            found = found | ((low <= F.least) & (F.p >= 1) & (count + n < F.k))
        return least, kept, found


@triton.jit
def least_of_filters(order, cols, on, low, high, count, mass, D, F, K: tl.constexpr):
    """(the code of the last logit that top-k and top-p keep, whether top-k ends among these, whether top-p does).

    order, cols: of the logits that are `on`, whose orders are from low to high. count, mass: of all logits above these.
    """
    weight = tl.where(on, (weight_at(value_of(order), F.m, D, K) * UNIT).to(tl.int64), 0)
    of_all, n = sums_of(weight, on.to(tl.int32), K)
    least = (tl.zeros([], tl.int64) + LOWEST) << COLUMN_BITS
    target = F.p.to(tl.float64) * F.total.to(tl.float64)
    by_k = (F.k > 0) & (count < F.k) & (count + n >= F.k)
    if by_k:
        least = last_of(order, cols, on, on.to(tl.int64), low, high, count, F.k.to(tl.float64), K)
        if not K.joint:
            kept = tl.sum(tl.where(at_or_above(order, cols, least), weight, 0), axis=0)
            target = F.p.to(tl.float64) * (mass + kept).to(tl.float64)
    reaches = tl.where((mass + of_all).to(tl.float64) >= target, 1, 0)
    by_p = (tl.where(F.p < 1, 1, 0) > 0) & (tl.where(mass.to(tl.float64) < target, 1, 0) * reaches > 0)
    if by_p:
        least = tl.maximum(least, last_of(order, cols, on, weight, low, high, mass, target, K))
    return least, by_k, by_p


@triton.jit
def at_or_above(order, cols, code):
    return ((order.to(tl.int64) << COLUMN_BITS) | (LAST_COLUMN - cols)) >= code


@triton.jit
def last_of(order, cols, on, v, low, high, above, target, K: tl.constexpr):
    """The code of the logit at which a sum reaches a target: it starts at `above`, and adds v from logit to logit.

    The logits that are `on` have orders from low to high.
    """
    low, high = whole_grains(low, high, K)
    while high - low > K.grain:
        middle = middle_of(low, high, K)
        reached = (above + tl.sum(tl.where(order >= middle.to(tl.int32), v, 0), axis=0)).to(tl.float64) >= target
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    n = tl.sum((on & (order >= low) & (order < high)).to(tl.int32), axis=0)
    equal = on & (order >= low) & (order < high)
    last = tl.max(tl.where(equal, cols, 0), axis=0)
    if n > 1:
        # Logits of one order have one v, and are kept from the lowest column on.
        above += tl.sum(tl.where(on & (order >= high), v, 0), axis=0)
        one = tl.max(tl.where(equal, v, 0), axis=0)
        before = tl.full([], -1, tl.int32)
        if (above + (n - 1) * one).to(tl.float64) >= target:
            while last - before > 1:
                middle = (before + last) >> 1
                n = tl.sum((equal & (cols <= middle)).to(tl.int32), axis=0)
                reached = (above + n * one).to(tl.float64) >= target
                last = tl.where(reached, middle, last)
                before = tl.where(reached, before, middle)
    low = tl.max(tl.where(equal, order, LOWEST), axis=0).to(tl.int64)
    return (low << COLUMN_BITS) | (tl.full([], LAST_COLUMN, tl.int64) - last)
