"""The losses of rows whose log-sum-exp is given: that of a longer row, of which the logits are a part.

loss = w (lse - z_t).
Traffic: the target's logit and the lse of every row. The gradient is `loss_grad._gradient` with m = lse and ls = 0.
"""

import triton
import triton.language as tl

from fused_softmax.kernels.losses import load_target_logit, numbers_of, store_losses, target_of


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
