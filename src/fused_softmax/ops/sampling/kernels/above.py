"""A token from the logits above a bound that follows from a row's maximum, as min-p's does, in two launches.

The first launch, `_stretches`, stores the state of each stretch and the maximum of each lane's 32 logits. So the second
launch knows the bound of a row, and which lanes have logits above it. It reads these lanes alone, in parts of a row.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.exchange import wait_for_launch_before
from fused_softmax.core.kernels.state import NEG_INF
from fused_softmax.ops.sampling.kernels.common import (
    COLUMN_BITS,
    KEPT_BITS,
    LANES,
    STRETCH,
    TOKENS,
    bounds_of_code,
    draw_of,
    filters_of,
    order_of,
    scratch_at,
)
from fused_softmax.ops.sampling.kernels.lanes import ones_of
from fused_softmax.ops.sampling.kernels.row import finish_parts, only_inf, row_state, take_lanes


@triton.jit(
    do_not_specialize=[
        "n_cols", "n_parts", "n_rows", "seed_low", "seed_high", "position_low", "position_high",
    ]
)  # fmt: skip
def _draw_above(
    scratch_ptr, logits_ptr, tokens_ptr, valid_ptr, logprobs_ptr, kept_ptr, bias_ptr, bitmask_ptr, rows_ptr,
    temperature_ptr, min_p_ptr, seed_ptr, position_ptr, strides, n_rows, n_cols, n_parts, temperature, min_p, seed_low,
    seed_high, position_low, position_high, K: tl.constexpr,
):  # fmt: skip
    """A program draws from K.part_stretches stretches of what min-p, or no filter, leaves of a row."""
    wait_for_launch_before(K.follows)
    program = tl.program_id(0)
    draw = (program // n_parts).to(tl.int64)
    part = program % n_parts
    D = draw_of(
        logits_ptr, bias_ptr, bitmask_ptr, rows_ptr, temperature_ptr, seed_ptr, position_ptr, strides, n_rows, n_cols,
        temperature, seed_low, seed_high, position_low, position_high, draw, K,
    )  # fmt: skip
    if kept_ptr is not None:
        kept_ptr += draw * strides[KEPT_BITS]
    stretch = part * K.part_stretches
    call = (stretch + tl.arange(0, K.part_stretches))[:, None] * LANES + tl.arange(0, LANES)[None, :]
    tops_ptr = scratch_at(scratch_ptr, draw, K.tops_at, tl.float32, K)
    top = tl.load(tops_ptr + call, mask=call < tl.cdiv(n_cols, STRETCH) * LANES, other=NEG_INF)
    m, total, odd = row_state(scratch_ptr, draw, D, K)
    F = filters_of(None, None, min_p_ptr, strides, 0, 1.0, min_p, m, total, draw, D, K)
    valid = D.valid & (F.p > 0)
    if valid & (m > NEG_INF) & (not odd):
        lanes_ptr = scratch_at(scratch_ptr, draw, K.lanes_at, tl.int32, K) + stretch * LANES
        chosen = (order_of(top) >= F.least) & (top > NEG_INF)
        n_lanes = tl.minimum(K.part_stretches, tl.cdiv(n_cols, STRETCH) - stretch) * LANES
        most = tl.sum(chosen.to(tl.int32)) * 2 > n_lanes  # then all lanes are read, which is faster than listing them
        n = list_lanes(lanes_ptr, chosen & (not most), stretch)
        n = tl.where(most, n_lanes, n)
        B = bounds_of_code(F.least.to(tl.int64) << COLUMN_BITS)
        L: tl.constexpr = K.stretches * LANES
        best, mass = tl.zeros([L], tl.int64), tl.zeros([L], tl.int64)
        for start in range(0, n, L):
            i = start + tl.arange(0, L)
            lane = tl.load(lanes_ptr + i, mask=(i < n) & (not most), other=0)
            lane = tl.where(most, stretch * LANES + i, lane)
            best, mass = take_lanes(kept_ptr, D, lane, i < n, m, B, best, mass, K)
        key, mass = tl.max(best, axis=0), tl.sum(mass, axis=0)
        if part == 0:
            tl.store(valid_ptr + draw, tl.full([], 1, tl.int8))
        record_ptr, token_ptr = scratch_ptr + draw * K.scratch, tokens_ptr + draw * strides[TOKENS]
        finish_parts(record_ptr, token_ptr, logprobs_ptr, key, mass, D, m, B, draw, n_parts, K)
    elif part == 0:
        token, drawn = tl.zeros([], tl.int64), valid & odd
        if odd:
            token, drawn = only_inf(kept_ptr, D, valid, K)
        tl.store(tokens_ptr + draw * strides[TOKENS], token)
        tl.store(valid_ptr + draw, drawn.to(tl.int8))
        if logprobs_ptr is not None:
            tl.store(logprobs_ptr + draw, tl.where(drawn, 0.0, float("nan")))


@triton.jit
def list_lanes(lanes_ptr, chosen, first):
    """List the calls of the chosen lanes, for stretches from `first` on. Returns how many there are.

    chosen: [stretches, lanes]. A stretch has a word with a bit for each lane, and lists its few lanes one by one.
    """
    marks = tl.sum(chosen.to(tl.int32) << tl.arange(0, LANES)[None, :], axis=1)
    n = ones_of(marks)
    end = tl.cumsum(n, axis=0)
    stretch = first + tl.arange(0, chosen.shape[0])
    for i in range(tl.max(n, axis=0)):
        tl.store(lanes_ptr + end - n + i, stretch * LANES + ones_of((marks & -marks) - 1), mask=marks != 0)
        marks &= marks - 1
    tl.debug_barrier()
    return tl.sum(n, axis=0)
