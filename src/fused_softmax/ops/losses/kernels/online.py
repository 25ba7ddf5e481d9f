"""Losses without a gradient: logits are read once (MN); if rows are few, many programs share each.

Beside them, the loss of rows whose log-sum-exp is given, that of a longer row:  loss = w (lse - z_t).  It reads the
target's logit and the lse of every row. The gradient is `gradient._gradient` with m = lse and ls = 0.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.rows import body_of, first_max_of, lanes_of_part, load_edge, whole_vectors
from fused_softmax.core.kernels.spec import Rows
from fused_softmax.core.kernels.state import (
    NEG_INF,
    NO_COLUMN,
    exp_at,
    hold_all,
    log_sum_of,
    max_of,
    merge,
    origin_of,
    rounded_product,
    sum_exp_of,
    weight_of,
)
from fused_softmax.ops.losses.kernels.common import (
    entropy_terms,
    faded_terms,
    finish_edge,
    load_logits,
    load_target_logit,
    numbers_of,
    store_losses,
    store_stats,
    sum_of,
    sum_of_edge,
    target_of,
    weight_total,
    zero_of,
)


@triton.jit(do_not_specialize=["n_rows", "n_cols", "n_parts", "part_cols", "misalignment", "ignore_index"])
def _online_loss(
    x_ptr, target_ptr, weight_ptr, w_total_ptr, numbers_ptr, states_ptr, found_ptr,
    m_ptr, ls_ptr, loss_ptr, z_ptr, entropy_ptr, predicted_ptr,
    x_row_stride, n_rows, n_cols, n_parts, part_cols, misalignment,
    ignore_index, factor, hidden, cap, smoothing, lse_square_scale, K: tl.constexpr,
):  # fmt: skip
    """The loss of a row a program, tile by tile, or the state of one part of it (where states_ptr is given)."""
    PIECES: tl.constexpr = K.pieces
    x = Rows(x_ptr, x_row_stride, misalignment)
    program = tl.program_id(0)
    row = (program // n_parts).to(tl.int64)
    part_cols = whole_vectors(part_cols, K)
    N = numbers_of(numbers_ptr, factor, cap, smoothing, lse_square_scale, K)
    T = target_of(row, target_ptr, weight_ptr, n_cols, ignore_index, K)
    z_t = tl.zeros([], K.state_dtype)
    if K.smooth:
        z_t = load_target_logit(x_ptr + row * x_row_stride, T, T.kept, N, K)
    zero = zero_of(z_t)
    r = lanes_of_part((program % n_parts).to(tl.int64), row, x, n_cols, part_cols, K)
    x_body = body_of(x, row, K)
    edge = 0
    if K.shifted:  # loaded before anything waits for the pieces
        edge = load_edge(x, n_cols, n_parts, r, hidden, K)
    HEIGHT: tl.constexpr = K.block_cols // K.lane_cols
    m = tl.full([HEIGHT, 1], NEG_INF, K.state_dtype)
    s = tl.zeros([HEIGHT, 1], K.state_dtype)
    wz = tl.zeros([HEIGHT, 1], K.state_dtype)
    u = tl.zeros([HEIGHT, 1], K.state_dtype)
    found = tl.full([HEIGHT, 1], NO_COLUMN, tl.int32)
    end = tl.minimum(r.start + part_cols, r.body)
    for at in range(r.start, end, PIECES * K.block_cols):
        z = load_logits(x_body + at, r.cols, end - at, hidden, N, K, PIECES, 0)
        m_tile = tl.maximum(m, max_of(z, N.factor, K)[:, None])
        scale, base = origin_of(m_tile, K.ptx)
        fade = weight_of(m, m_tile, K.ptx)
        held = hold_all(z, K.ptx)
        if K.smooth:
            wz += sum_of(z, r.head + at, r.cols, end - at, weight_ptr, zero, N, K)[:, None]
        if K.stats:
            here = first_max_of(z, m_tile, (r.head + at).to(tl.int32), r.cols, N.factor, K)[:, None]
            found = tl.where(m_tile > m, here, tl.minimum(found, here))
            u = faded_terms(u, s, m, m_tile, fade) + entropy_terms(held, scale, base, m_tile, N, K)[:, None]
        s = s * fade + sum_exp_of(held, scale, base, N.factor, K)[:, None]
        m = m_tile
    if not K.smooth:  # the first read need not wait for the target
        z_t = load_target_logit(x_ptr + row * x_row_stride, T, T.kept, N, K)
    m_lane = m
    m = tl.max(tl.max(m_lane, axis=1), axis=0)
    fade = weight_of(m_lane, m, K.ptx)
    u = tl.sum(tl.sum(faded_terms(u, s, m_lane, m, fade), axis=1), axis=0)
    s = tl.sum(tl.sum(s * fade, axis=1), axis=0)
    wz = tl.sum(tl.sum(wz, axis=1), axis=0)
    found = tl.min(tl.min(tl.where(m_lane == m, found, NO_COLUMN), axis=1), axis=0)
    if K.shifted:
        edge = finish_edge(edge, N, K)
        m_edge = tl.max(edge.x, axis=0)
        scale, base = origin_of(m_edge, K.ptx)
        e = exp_at(edge.x, scale, base, K.ptx)
        m_body, s_body, s_edge = m, s, tl.sum(e, axis=0)
        m, s = merge(m, s, m_edge, s_edge, K.ptx)
        if K.smooth:
            wz += sum_of_edge(edge, weight_ptr, zero, 0, K)
        if K.stats:
            u_edge = tl.sum(tl.where(edge.x == NEG_INF, 0.0, e * (edge.x - m_edge)), axis=0)
            u = faded_terms(u, s_body, m_body, m, weight_of(m_body, m, K.ptx))
            u += faded_terms(u_edge, s_edge, m_edge, m, weight_of(m_edge, m, K.ptx))
            found = tl.where(m_body == m, found, NO_COLUMN)
            found = tl.minimum(found, tl.min(tl.where(edge.on & (edge.x == m), edge.cols, NO_COLUMN), axis=0))
    if states_ptr is not None:
        states_ptr += row * n_parts + r.part
        step = n_rows.to(tl.int64) * n_parts
        tl.store(states_ptr, m)
        tl.store(states_ptr + step, s)
        tl.store(states_ptr + 2 * step, wz)
        if K.stats:
            tl.store(states_ptr + 3 * step, u)
            tl.store(found_ptr + row * n_parts + r.part, found)
    else:
        w_total = weight_total(w_total_ptr, n_cols, K)
        ls = log_sum_of(m, s, K.ptx)
        if m_ptr is not None:
            tl.store(m_ptr + row, m)
            tl.store(ls_ptr + row, ls)
        store_losses(loss_ptr, z_ptr, row, r.part >= 0, m, ls, z_t, zero_of(z_t), T, wz, w_total, n_cols, N, K)
        if K.stats:
            store_stats(entropy_ptr, predicted_ptr, row, r.part >= 0, ls, s, u, found, n_cols)


@triton.jit(do_not_specialize=["n_rows", "n_cols", "n_parts", "ignore_index"])
def _merge_losses(
    x_ptr, target_ptr, weight_ptr, w_total_ptr, numbers_ptr, states_ptr, found_ptr,
    m_ptr, ls_ptr, loss_ptr, z_ptr, entropy_ptr, predicted_ptr,
    x_row_stride, n_rows, n_cols, n_parts, ignore_index, factor, hidden, cap, smoothing, lse_square_scale,
    K: tl.constexpr,
):  # fmt: skip
    """The losses of rows by the states of their parts."""
    row = tl.program_id(0).to(tl.int64) * K.block_rows + tl.arange(0, K.block_rows)
    row = tl.minimum(row, n_rows - 1)
    N = numbers_of(numbers_ptr, factor, cap, smoothing, lse_square_scale, K)
    T = target_of(row, target_ptr, weight_ptr, n_cols, ignore_index, K)
    j = tl.arange(0, K.lanes)[None, :]
    on = j < n_parts
    step = n_rows.to(tl.int64) * n_parts
    states_ptr += row[:, None] * n_parts + j
    m_parts = tl.load(states_ptr, mask=on, other=NEG_INF)
    m = tl.max(m_parts, axis=1)
    fade = weight_of(m_parts, m[:, None], K.ptx)
    s_parts = tl.load(states_ptr + step, mask=on, other=0.0)
    s = tl.sum(rounded_product(s_parts, fade), axis=1)
    wz = tl.sum(tl.load(states_ptr + 2 * step, mask=on, other=0.0), axis=1)
    z_t = load_target_logit(x_ptr + row * x_row_stride, T, T.kept, N, K)
    w_total = weight_total(w_total_ptr, n_cols, K)
    ls = log_sum_of(m, s, K.ptx)
    if m_ptr is not None:
        tl.store(m_ptr + row, m)
        tl.store(ls_ptr + row, ls)
    store_losses(loss_ptr, z_ptr, row, row >= 0, m, ls, z_t, zero_of(z_t), T, wz, w_total, n_cols, N, K)
    if K.stats:
        u_parts = tl.load(states_ptr + 3 * step, mask=on, other=0.0)
        u = tl.sum(faded_terms(u_parts, s_parts, m_parts, m[:, None], fade), axis=1)
        found = tl.load(found_ptr + row[:, None] * n_parts + j, mask=on, other=NO_COLUMN)
        found = tl.min(tl.where(m_parts == m[:, None], found, NO_COLUMN), axis=1)
        store_stats(entropy_ptr, predicted_ptr, row, row >= 0, ls, s, u, found, n_cols)


@triton.jit(do_not_specialize=["n_rows", "n_cols", "ignore_index"])
def _loss_given_lse(
    x_ptr, target_ptr, weight_ptr, numbers_ptr, lse_ptr, loss_ptr,
    x_row_stride, n_rows, n_cols, ignore_index, factor, cap, K: tl.constexpr,
):  # fmt: skip
    """The losses of K.block_rows rows a program."""
    BLOCK_ROWS: tl.constexpr = K.block_rows
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = row < n_rows
    row = tl.minimum(row, n_rows - 1)
    N = numbers_of(numbers_ptr, factor, cap, 0.0, 0.0, K)
    T = target_of(row, target_ptr, weight_ptr, n_cols, ignore_index, K)
    z_t = load_target_logit(x_ptr + row * x_row_stride, T, T.kept, N, K)
    lse = tl.load(lse_ptr + row)
    store_losses(loss_ptr, None, row, live, lse, 0.0, z_t, 0.0, T, 0.0, 0.0, n_cols, N, K)
