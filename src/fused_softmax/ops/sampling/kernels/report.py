"""Log-probabilities of a draw's token and of a row's greatest logits, and its rank, from what `_stretches` left.

Where they are of the logits that were drawn from, that is what the draw's own first launch left.

The greatest logits are those of the lanes with the greatest maxima, as filters have them: no row is sorted.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.state import LN2, NEG_INF
from fused_softmax.ops.sampling.kernels.common import (
    COLUMN_BITS,
    INF,
    KEPT_BITS,
    LANES,
    LAST_COLUMN,
    LOWEST,
    STRETCH,
    TOKENS,
    UNIT,
    bounds_of_code,
    calls_of,
    column_of,
    draw_of,
    filters_of,
    kept_of,
    logits_of,
    scratch_at,
    survey,
    value_of,
)
from fused_softmax.ops.sampling.kernels.kept import held_of, list_held
from fused_softmax.ops.sampling.kernels.lanes import greatest_lanes, lane_maxima
from fused_softmax.ops.sampling.kernels.ranked import sort_listed
from fused_softmax.ops.sampling.kernels.row import LISTED, least_in_row, row_state
from fused_softmax.ops.sampling.kernels.wide import list_marked


@triton.jit(do_not_specialize=["n_cols", "n_rows", "top_k"])
def _report(
    scratch_ptr, raws_ptr, listed_ptr, logits_ptr, tokens_ptr, valid_ptr, logprobs_ptr, kept_ptr, top_ptr,
    top_tokens_ptr, rank_ptr, bias_ptr, bitmask_ptr, rows_ptr, temperature_ptr, strides, n_rows, n_cols, temperature,
    top_k, S: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The token's log-probability and the top_k greatest ones, of the row as it was given.

    With kept_ptr they are of what the filters kept, and the token's is known. S: how the scratch is laid out, which
    may be that of the draw. raws_ptr: as `row_state` has it. listed_ptr: room for K.candidates codes a row.
    """
    draw = tl.program_id(0).to(tl.int64)
    D = draw_of(
        logits_ptr, bias_ptr, bitmask_ptr, rows_ptr, temperature_ptr, None, None, strides, n_rows, n_cols, temperature,
        0, 0, 0, 0, draw, K,
    )  # fmt: skip
    valid = tl.load(valid_ptr + draw).to(tl.int32) != 0
    token = tl.load(tokens_ptr + draw * strides[TOKENS])
    m, total, odd = row_state(scratch_ptr, draw, D, S, raws_ptr)
    x = logits_of(D, (token // 8 * 8).to(tl.int32) + tl.zeros([1], tl.int32), tl.full([1], 1, tl.int1), K)
    # 0.0: see `survey`.
    x_t = tl.sum(tl.where(token // 8 * 8 + tl.arange(0, 8)[None, :] == token, x + 0.0, 0.0))
    if kept_ptr is None:
        origin, factor = m, 1.0
        offset = -tl.log(total.to(tl.float32) / UNIT)
        if odd:
            _m, n_inf, _, n_nan = survey(D, K)
            origin = tl.zeros([], tl.float32) + INF
            offset = tl.where((n_nan == 0) & (n_inf == 1), 0.0, float("nan"))
        logprob = tl.where(x_t == origin, offset, x_t - origin + offset)
        tl.store(logprobs_ptr + draw, tl.where(valid, logprob, float("nan")))
    else:
        origin, factor, offset = x_t, D.factor * LN2, tl.load(logprobs_ptr + draw)
    if rank_ptr is not None:
        rank = tl.zeros([], tl.int64)
        if valid:
            rank += 1 + count_above(scratch_ptr, draw, x_t, D, S, K)
        tl.store(rank_ptr + draw, rank)
    if top_ptr is not None:
        N: tl.constexpr = K.candidates
        i = tl.arange(0, N)
        n = tl.zeros([], tl.int32)
        if valid:
            F = filters_of(None, None, None, strides, top_k, 1.0, 0.0, m, total, draw, D, K)
            n = list_greatest(listed_ptr + draw * N, scratch_ptr, draw, D, F, S, K)
        code = sort_listed(listed_ptr + draw * N, n, K)
        x = value_of((code >> COLUMN_BITS).to(tl.int32))
        col = tl.full([], LAST_COLUMN, tl.int32) - (code & LAST_COLUMN).to(tl.int32)
        on = i < tl.minimum(n, top_k)
        value = tl.where(x == origin, offset, (x - origin) * factor + offset)
        if kept_ptr is not None:
            byte = tl.load(kept_ptr + draw * strides[KEPT_BITS] + col // 8, mask=on, other=0).to(tl.int32)
            value = tl.where((byte >> (col % 8)) & 1 == 1, value, NEG_INF)
        at = draw * top_k
        tl.store(top_ptr + at + i, value, mask=on)
        tl.store(top_tokens_ptr + at + i, tl.where(value > NEG_INF, col, -1).to(tl.int64), mask=on)
        beyond = (i >= tl.minimum(n, top_k)) & (i < top_k)
        tl.store(top_ptr + at + i, tl.where(valid & (offset == offset), NEG_INF, float("nan")), mask=beyond)
        tl.store(top_tokens_ptr + at + i, tl.full([N], -1, tl.int64), mask=beyond)


@triton.jit
def count_above(scratch_ptr, draw, x_t, D, S: tl.constexpr, K: tl.constexpr):
    """How many logits of a row are greater than x_t.

    A lane is read if its maximum is greater, or NaN, which may hide a greater one.
    """
    tops_ptr = scratch_at(scratch_ptr, draw, S.tops_at, tl.float32, S)
    count = tl.zeros([K.stretches * LANES], tl.int32)
    for stretch in range(0, tl.cdiv(D.n_cols, STRETCH), K.stretches):
        call = calls_of(stretch, K)
        there = call < tl.cdiv(D.n_cols, STRETCH) * LANES
        top = tl.load(tops_ptr + call, mask=there, other=NEG_INF)
        there = there & ((top > x_t) | (top != top))
        for quarter in tl.static_range(4):
            x = logits_of(D, column_of(call, quarter), there, K)
            count += tl.sum((x > x_t).to(tl.int32), axis=1)
    return tl.sum(count, axis=0)


@triton.jit
def list_greatest(list_ptr, scratch_ptr, draw, D, F, S: tl.constexpr, K: tl.constexpr):
    """List the codes of the k greatest logits, or a few more. Returns how many."""
    call, known = greatest_lanes(lane_maxima(scratch_ptr, draw, D, S), D, F, K)
    there = call >= 0
    call = tl.maximum(call, 0)
    n, known = list_held(list_ptr, held_of(call, there, D, K), known, None, F, K)
    if (n < F.k) & (known > LOWEST):  # too many are equal, or too few lanes were looked at
        n = list_from(list_ptr, scratch_ptr + draw * S.scratch, bounds_of_code(least_in_row(D, F, K)), D, K)
    return n


@triton.jit(noinline=True)
def list_from(list_ptr, record_ptr, B, D, K: tl.constexpr):
    """List the codes of all logits within the bounds, for which the row is read. Returns how many."""
    tl.store(record_ptr + LISTED, tl.zeros([], tl.int64))
    tl.debug_barrier()
    for stretch in range(0, tl.cdiv(D.n_cols, STRETCH), K.stretches):
        call = calls_of(stretch, K)
        marks = tl.zeros([K.stretches * LANES], tl.int32)
        for quarter in tl.static_range(4):
            first = column_of(call, quarter)
            x = logits_of(D, first, call >= 0, K)
            within = kept_of(x, first[:, None] + tl.arange(0, 8)[None, :], B).to(tl.int32)
            marks |= tl.sum(within << tl.arange(0, 8)[None, :], axis=1) << (quarter * 8)
        list_marked(list_ptr, record_ptr, marks, call, D, K)
    tl.debug_barrier()
    return tl.minimum(tl.load(record_ptr + LISTED).to(tl.int32), K.candidates)
