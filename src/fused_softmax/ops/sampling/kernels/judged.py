"""What filters keep of rows, without a draw.

A row's record then has the code of the last kept logit, the mass of all that is kept, and the row's maximum: LEAST,
KEPT and TOP of `row`. They determine the row's distribution, which `share_of` and `shares_at` give.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fused_softmax.core.kernels.exchange import let_next_begin, wait_for_launch_before
from fused_softmax.core.kernels.state import LN2, NEG_INF
from fused_softmax.ops.sampling.kernels.common import (
    COLUMN_BITS,
    INF,
    LANES,
    LOWEST,
    STRETCH,
    UNIT,
    bounds_of_code,
    calls_of,
    code_of,
    column_of,
    draw_of,
    factor_of,
    filters_of,
    kept_of,
    logits_of,
    order_of,
    scratch_at,
    survey,
    units_of_8,
    value_of,
    weight_at,
)
from fused_softmax.ops.sampling.kernels.kept import held_of, is_far, least_of_candidates
from fused_softmax.ops.sampling.kernels.lanes import greatest_lanes, lane_maxima
from fused_softmax.ops.sampling.kernels.row import (
    DRAW_ONLY,
    KEPT,
    LEAST,
    STATUS,
    TOP,
    amount_in_row,
    begin_parts,
    least_in_row,
    only_inf,
    row_state,
)
from fused_softmax.ops.sampling.kernels.wide import open_row


class Judged(NamedTuple):
    """A row D, its maximum m, the bounds B of what is kept, and the probability `share` of a weight of 1."""

    D: Any
    m: Any
    B: Any
    share: Any


@triton.jit(do_not_specialize=["n_cols", "n_rows", "top_k"])
def _judge(
    scratch_ptr, logits_ptr, valid_ptr, bias_ptr, bitmask_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr,
    min_p_ptr, strides, n_rows, n_cols, temperature, top_k, top_p, min_p, K: tl.constexpr,
):  # fmt: skip
    """A program makes the record of a row from the lanes of the greatest maxima, or leaves it to later launches."""
    draw = tl.program_id(0).to(tl.int64)
    D = draw_of(
        logits_ptr, bias_ptr, bitmask_ptr, rows_ptr, temperature_ptr, None, None, strides, n_rows, n_cols, temperature,
        0, 0, 0, 0, draw, K,
    )  # fmt: skip
    wait_for_launch_before(K.follows)
    let_next_begin(K.leads)
    record_ptr = scratch_ptr + draw * K.scratch
    m, total, odd = row_state(scratch_ptr, draw, D, K)
    F = filters_of(top_k_ptr, top_p_ptr, min_p_ptr, strides, top_k, top_p, min_p, m, total, draw, D, K)
    valid = D.valid & (F.p > 0)
    tl.store(record_ptr + STATUS, 0)
    least, mass = (tl.zeros([], tl.int64) + LOWEST) << COLUMN_BITS, total
    known = tl.zeros([], tl.int32) == 0
    if K.linear:
        valid &= (m > 0) & (not odd)
        odd &= False
    if K.masks & (odd | (m == NEG_INF)):
        least, valid = bounds_of_odd(D, F, valid, K)
        m = tl.full([], INF, tl.float32)
    elif odd:
        column, valid = only_inf(None, D, valid, K)
        m = tl.full([], INF, tl.float32)
        least, mass = code_of(m, column), (tl.zeros([], tl.float32) + UNIT).to(tl.int64)
    else:
        valid &= m > NEG_INF
        known = (F.k == 0) & (F.p >= 1) & (F.least == K.lowest)
        if valid & (known.to(tl.int32) == 0):
            known = tl.zeros([], tl.int32) > 0
            if K.ranked:
                least, mass, known = judged(scratch_ptr, draw, D, F, K)
            else:  # min-p keeps all logits from its bound on
                tl.store(record_ptr + STATUS, DRAW_ONLY)
                tl.store(record_ptr + LEAST, F.least.to(tl.int64) << COLUMN_BITS)
                tl.store(record_ptr + TOP, order_of(m).to(tl.int64))
                begin_parts(record_ptr)
    if known:
        tl.store(record_ptr + TOP, order_of(m).to(tl.int64))
        tl.store(record_ptr + LEAST, least)
        tl.store(record_ptr + KEPT, mass)
    tl.store(valid_ptr + draw, valid.to(tl.int8))


@triton.jit
def bounds_of_odd(D, F, valid, K: tl.constexpr):
    """(the code of the last kept logit, whether the row is not NaN) of a row that has a NaN or an inf, or -inf alone.

    top-k counts an inf as any other logit. Other filters keep nothing beside an inf, because nothing else has a
    probability.
    """
    _, n_inf, at_inf, n_nan = survey(D, K)
    least = (tl.zeros([], tl.int64) + LOWEST) << COLUMN_BITS
    valid &= n_nan == 0
    if K.counted:
        if (F.k > 0) & (n_nan == 0):
            tl.debug_barrier()  # the callee writes shared memory, and Triton puts no barrier before a call
            least = least_in_row(D, F, K)
    else:
        valid &= n_inf <= 1
        ends = (n_inf == 1) & ((F.p < 1) | (F.least > LOWEST))
        least = tl.where(ends, code_of(tl.full([], INF, tl.float32), at_inf), least)
    return least, valid


@triton.jit
def judged(scratch_ptr, draw, D, F, K: tl.constexpr):
    """(the code of the last kept logit, the mass of all that is kept, whether they are known)."""
    top = lane_maxima(scratch_ptr, draw, D, K)
    least, mass, enough = tl.zeros([], tl.int64), tl.zeros([], tl.int64), F.k < 0
    if not is_far(top, D, F, K):
        least, mass, enough = judged_among(top, scratch_ptr, draw, D, F, K)
    if not enough:
        if K.wide:
            open_row(scratch_ptr + draw * K.scratch, D, F, K)
        else:
            tl.debug_barrier()  # the callee writes shared memory, and Triton puts no barrier before a call
            least = least_in_row(D, F, K)
            tl.debug_barrier()
            _, mass = amount_in_row(D, F.m, bounds_of_code(least), K)
            enough = F.k >= 0
    return least, mass, enough


@triton.jit
def judged_among(top, scratch_ptr, draw, D, F, K: tl.constexpr):
    """(the code of the last kept logit, the mass of all that is kept, whether they are known), from K.capacity lanes.

    A second look at twice as many, as a draw takes, takes as long as the launches for a low boundary.
    """
    call, known = greatest_lanes(top, D, F, K)
    there = call >= 0
    H = held_of(tl.maximum(call, 0), there, D, K)
    least, enough, _, _ = least_of_candidates(H, known, None, scratch_ptr, draw, D, F, K)
    least = tl.maximum(least, F.least.to(tl.int64) << COLUMN_BITS)
    mass = tl.zeros([], tl.int64)
    if enough:
        B = bounds_of_code(least)
        of_lanes = mass_within(H.x_0, column_of(H.call, 0), D, F.m, B, K)
        of_lanes += mass_within(H.x_1, column_of(H.call, 1), D, F.m, B, K)
        of_lanes += mass_within(H.x_2, column_of(H.call, 2), D, F.m, B, K)
        of_lanes += mass_within(H.x_3, column_of(H.call, 3), D, F.m, B, K)
        mass = tl.sum(of_lanes, axis=0)
    return least, mass, enough


@triton.jit
def mass_within(x, first, D, m, B, K: tl.constexpr):
    """The mass, in units, of each group's logits within the bounds."""
    kept = kept_of(x, first[:, None] + tl.arange(0, 8)[None, :], B)
    return units_of_8(tl.where(kept, weight_at(x, m, D, K), 0.0), K)


@triton.jit(do_not_specialize=["n_cols", "n_parts", "n_rows", "part_stretches"])
def _sum_kept(
    scratch_ptr, logits_ptr, bias_ptr, bitmask_ptr, rows_ptr, temperature_ptr, strides, n_rows, n_cols, n_parts,
    part_stretches, temperature, K: tl.constexpr,
):  # fmt: skip
    """Add the kept mass of a part of an open row to its record. A lane whose maximum is not kept is not read."""
    wait_for_launch_before(K.follows)
    let_next_begin(K.leads)
    program = tl.program_id(0)
    draw = (program // n_parts).to(tl.int64)
    record_ptr = scratch_ptr + draw * K.scratch
    if tl.load(record_ptr + STATUS) > 0:
        D = draw_of(
            logits_ptr, bias_ptr, bitmask_ptr, rows_ptr, temperature_ptr, None, None, strides, n_rows, n_cols,
            temperature, 0, 0, 0, 0, draw, K,
        )  # fmt: skip
        m, B = value_of(tl.load(record_ptr + TOP).to(tl.int32)), bounds_of_code(tl.load(record_ptr + LEAST))
        start = program % n_parts * part_stretches
        end = tl.minimum(start + part_stretches, tl.cdiv(n_cols, STRETCH))
        tops_ptr = scratch_at(scratch_ptr, draw, K.tops_at, tl.float32, K)
        mass = tl.zeros([K.stretches * LANES], tl.int64)
        for stretch in range(start, end, K.stretches):
            call = calls_of(stretch, K)
            there = call < end * LANES
            there = there & (tl.load(tops_ptr + call, mask=there, other=NEG_INF) >= B.x)
            for quarter in tl.static_range(4):
                first = column_of(call, quarter)
                mass += mass_within(logits_of(D, first, there, K), first, D, m, B, K)
        tl.atomic_add(record_ptr + KEPT, tl.sum(mass, axis=0), sem="relaxed")


@triton.jit(do_not_specialize=["n_rows", "n_cols", "n_parts", "part_stretches"])
def _write_kept(
    scratch_ptr, valid_ptr, logits_ptr, y_ptr, strides, n_rows, n_cols, n_parts, part_stretches, K: tl.constexpr
):  # fmt: skip
    """Write a part of a row: logits that are kept, and -inf elsewhere; NaN if the row is NaN.

    Of probabilities (K.linear): those that are kept over their sum, and 0 elsewhere.
    """
    wait_for_launch_before(K.follows)
    program = tl.program_id(0)
    draw = (program // n_parts).to(tl.int64)
    D = draw_of(
        logits_ptr, None, None, None, None, None, None, strides, n_rows, n_cols, 1.0, 0, 0, 0, 0, draw, K
    )  # fmt: skip
    record_ptr = scratch_ptr + draw * K.scratch
    B = bounds_of_code(tl.load(record_ptr + LEAST))
    is_nan = tl.load(valid_ptr + draw) == 0
    if K.linear:
        m = value_of(tl.load(record_ptr + TOP).to(tl.int32))
        share = tl.full([], UNIT, tl.float64) / tl.load(record_ptr + KEPT).to(tl.float64)
        share_high = share.to(tl.float32)
        share_low = (share - share_high.to(tl.float64)).to(tl.float32)  # so that a product is rounded once
    start = program % n_parts * part_stretches
    end = tl.minimum(start + part_stretches, tl.cdiv(n_cols, STRETCH))
    for stretch in range(start, end, K.stretches):
        call = calls_of(stretch, K)
        there = call < end * LANES
        for quarter in tl.static_range(4):
            first = column_of(call, quarter)
            cols = first[:, None] + tl.arange(0, 8)[None, :]
            x = logits_of(D, first, there, K)
            if K.linear:
                w = tl.where(kept_of(x, cols, B), weight_at(x, m, D, K), 0.0)
                y = tl.fma(w, share_high, w * share_low)
            else:
                y = tl.where(kept_of(x, cols, B), x, NEG_INF)
            y = tl.where(is_nan, float("nan"), y)
            tl.store(y_ptr + draw * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=there[:, None] & (cols < n_cols))


@triton.jit
def judged_row(D, scratch_ptr, draw, K: tl.constexpr):
    """The Judged row of a record that is known."""
    record_ptr = scratch_ptr + draw * K.scratch
    m = value_of(tl.load(record_ptr + TOP).to(tl.int32))
    return Judged(D, m, bounds_of_code(tl.load(record_ptr + LEAST)), share_of_unit(tl.load(record_ptr + KEPT)))


@triton.jit
def share_of_unit(kept):
    """The probability of a weight of 1, from the mass of all that is kept."""
    return (tl.full([], UNIT, tl.float64) / kept.to(tl.float64)).to(tl.float32)


@triton.jit
def share_of(J, first, there, K: tl.constexpr):
    """The probabilities [lanes, 8] of groups of a judged row; 0 past its end, and where not `there`."""
    x = logits_of(J.D, first, there, K)
    kept = kept_of(x, first[:, None] + tl.arange(0, 8)[None, :], J.B)
    return tl.where(kept, share_at(x, J.m, J.D.factor) * J.share, 0.0)


@triton.jit
def share_at(x, m, factor):
    """The weights of logits: 1 where they are the maximum, which may be inf."""
    return tl.where(x == m, 1.0, tl.exp2((x - m) * factor))


@triton.jit
def shares_at(scratch_ptr, draws, x, cols, temperature, on, K: tl.constexpr):
    """The probability of one logit in each of several judged rows; 0 where not `on`."""
    record_ptr = scratch_ptr + draws * K.scratch
    m = value_of(tl.load(record_ptr + TOP, mask=on, other=0).to(tl.int32))
    least, kept = tl.load(record_ptr + LEAST, mask=on, other=0), tl.load(record_ptr + KEPT, mask=on, other=1)
    weight = tl.where(code_of(x, cols) >= least, share_at(x, m, factor_of(temperature)), 0.0)
    return tl.where(on, weight * share_of_unit(kept), 0.0)


@triton.jit
def log_shares_at(scratch_ptr, draws, x, cols, temperature, on, K: tl.constexpr):
    """The logarithms of `shares_at`, also of probabilities that are too small for float32."""
    record_ptr = scratch_ptr + draws * K.scratch
    m = value_of(tl.load(record_ptr + TOP, mask=on, other=0).to(tl.int32))
    least, kept = tl.load(record_ptr + LEAST, mask=on, other=0), tl.load(record_ptr + KEPT, mask=on, other=1)
    z = tl.where(x == m, 0.0, (x - m) * factor_of(temperature))
    log = (z - tl.log2(kept.to(tl.float64) / UNIT).to(tl.float32)) * LN2
    return tl.where(code_of(x, cols) >= least, log, NEG_INF)
