"""Losses without a gradient: logits are read once (MN). If rows are few, many programs share each.

Also the loss of rows whose log-sum-exp is given, such as that of a longer row:  loss = w (lse - z_t).  It reads the
target's logit and the lse of every row. Its gradient is `gradient._gradient` with m = lse and ls = 0.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.state import log_sum_of
from fused_softmax.ops.losses.kernels.common import (
    entropy_of,
    load_target_logit,
    numbers_of,
    store_losses,
    store_stats,
    target_of,
    weight_total,
    zero_of,
)
from fused_softmax.ops.losses.kernels.scan import merge_scanned, scan_logits, store_scanned


@triton.jit(do_not_specialize=["n_rows", "n_cols", "n_parts", "part_cols", "misalignment", "ignore_index"])
def _online_loss(
    x_ptr, target_ptr, weight_ptr, w_total_ptr, numbers_ptr, states_ptr, found_ptr,
    m_ptr, ls_ptr, loss_ptr, z_ptr, entropy_ptr, predicted_ptr,
    x_row_stride, n_rows, n_cols, n_parts, part_cols, misalignment,
    ignore_index, factor, hidden, cap, smoothing, lse_square_scale, K: tl.constexpr,
):  # fmt: skip
    """A program has a row, tile by tile; or, if states_ptr is given, a part of a row, whose state it stores."""
    program = tl.program_id(0)
    row = (program // n_parts).to(tl.int64)
    part = (program % n_parts).to(tl.int64)
    N = numbers_of(numbers_ptr, factor, cap, smoothing, lse_square_scale, K)
    T = target_of(row, target_ptr, weight_ptr, n_cols, ignore_index, K)
    z_t = tl.zeros([], K.state_dtype)
    if K.smooth:
        z_t = load_target_logit(x_ptr + row * x_row_stride, T, T.kept, N, K)
    S = scan_logits(
        x_ptr, x_row_stride, misalignment, row, part, weight_ptr, zero_of(z_t), n_cols, n_parts, part_cols, hidden, N,
        None, K,
    )  # fmt: skip
    if not K.smooth:  # the first read need not wait for the target
        z_t = load_target_logit(x_ptr + row * x_row_stride, T, T.kept, N, K)
    if states_ptr is not None:
        store_scanned(states_ptr, found_ptr, row, part, n_rows, n_parts, S, K)
    else:
        w_total = weight_total(w_total_ptr, n_cols, K)
        ls = log_sum_of(S.m, S.s, K.ptx)
        if m_ptr is not None:
            tl.store(m_ptr + row, S.m)
            tl.store(ls_ptr + row, ls)
        store_losses(loss_ptr, z_ptr, row, part >= 0, S.m, ls, z_t, zero_of(z_t), T, S.wz, w_total, n_cols, N, K)
        if K.stats:
            entropy = entropy_of(S.m, S.s, ls, S.u, K)
            store_stats(entropy_ptr, predicted_ptr, row, part >= 0, entropy, S.found, n_cols)


@triton.jit(do_not_specialize=["n_rows", "n_cols", "n_parts", "ignore_index"])
def _merge_losses(
    x_ptr, target_ptr, weight_ptr, w_total_ptr, numbers_ptr, states_ptr, found_ptr,
    m_ptr, ls_ptr, loss_ptr, z_ptr, entropy_ptr, predicted_ptr,
    x_row_stride, n_rows, n_cols, n_parts, ignore_index, factor, hidden, cap, smoothing, lse_square_scale,
    K: tl.constexpr,
):  # fmt: skip
    """The losses of K.block_rows rows, from the states of their parts."""
    row = tl.program_id(0).to(tl.int64) * K.block_rows + tl.arange(0, K.block_rows)
    row = tl.minimum(row, n_rows - 1)
    N = numbers_of(numbers_ptr, factor, cap, smoothing, lse_square_scale, K)
    T = target_of(row, target_ptr, weight_ptr, n_cols, ignore_index, K)
    S = merge_scanned(states_ptr, found_ptr, row, n_rows, n_parts, K)
    z_t = load_target_logit(x_ptr + row * x_row_stride, T, T.kept, N, K)
    w_total = weight_total(w_total_ptr, n_cols, K)
    ls = log_sum_of(S.m, S.s, K.ptx)
    if m_ptr is not None:
        tl.store(m_ptr + row, S.m)
        tl.store(ls_ptr + row, ls)
    store_losses(loss_ptr, z_ptr, row, row >= 0, S.m, ls, z_t, zero_of(z_t), T, S.wz, w_total, n_cols, N, K)
    if K.stats:
        entropy = entropy_of(S.m, S.s, ls, S.u, K)
        store_stats(entropy_ptr, predicted_ptr, row, row >= 0, entropy, S.found, n_cols)


@triton.jit(do_not_specialize=["n_rows", "n_cols", "ignore_index"])
def _loss_given_lse(
    x_ptr, target_ptr, weight_ptr, numbers_ptr, lse_ptr, loss_ptr,
    x_row_stride, n_rows, n_cols, ignore_index, factor, cap, K: tl.constexpr,
):  # fmt: skip
    """The losses of K.block_rows rows whose lse is given."""
    BLOCK_ROWS: tl.constexpr = K.block_rows
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = row < n_rows
    row = tl.minimum(row, n_rows - 1)
    N = numbers_of(numbers_ptr, factor, cap, 0.0, 0.0, K)
    T = target_of(row, target_ptr, weight_ptr, n_cols, ignore_index, K)
    z_t = load_target_logit(x_ptr + row * x_row_stride, T, T.kept, N, K)
    lse = tl.load(lse_ptr + row)
    store_losses(loss_ptr, None, row, live, lse, 0.0, z_t, 0.0, T, 0.0, 0.0, n_cols, N, K)
