"""softmax over the last dim by one program for each row, with two paths in one kernel.  y = exp(x - m) / s

Traffic: a row that fits in one block is read once and written once (2MN elements). A longer row is read tile by tile in
three passes, for the maximum, the sum and the output. They read 3MN and write MN; a cache may serve the later reads.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_softmax.classic.rows import MAX_BLOCK, block_warps, kernel_rows, value_bytes, value_dtype

# Bytes of values that one program holds in registers. On sm_90, 32 warps need 47 to 64 registers a thread and spill
# none. Twice as many bytes spill.
BLOCK_BYTES = 128 * 1024
# A tile keeps nothing between passes, so it need not fill the registers: 8 warps, and several programs run at once.
TILE_BYTES = 32 * 1024


def hybrid_softmax(
    x: Tensor, *, block_cap: int | None = None, accumulate: Literal["float32", "float64"] = "float32"
) -> Tensor:
    """softmax over the last dim of x [n_rows, n_cols].

    block_cap: a power of two: the longest row that goes in one block, and the tile of longer rows. By default, a block
        is as large as one program's registers hold, and a tile is a quarter of that.
    accumulate: the dtype in which both paths sum s. The terms are float32 either way (float64 for a float64 x), so
        "float64" removes the rounding of the additions and nothing else.
    """
    x = kernel_rows(x)
    value = value_dtype(x)
    if accumulate not in ("float32", "float64"):
        raise ValueError(f"accumulate must be 'float32' or 'float64', got {accumulate!r}")
    if block_cap is None:
        block_cap, tile_cols = BLOCK_BYTES // value_bytes(x), TILE_BYTES // value_bytes(x)
    elif 1 <= block_cap <= MAX_BLOCK and block_cap & (block_cap - 1) == 0:
        tile_cols = block_cap
    else:
        raise ValueError(f"block_cap must be a power of two from 1 to {MAX_BLOCK}, got {block_cap}")
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return y
    n_rows, n_cols = x.shape
    one_block = n_cols <= block_cap
    block_cols = triton.next_power_of_2(n_cols) if one_block else tile_cols
    with torch.cuda.device_of(x):
        _forward[(n_rows,)](
            *(x, y, x.stride(0), y.stride(0), n_cols),
            VALUE=value,
            SUM=tl.float64 if accumulate == "float64" else value,
            ONE_BLOCK=one_block,
            BLOCK_COLS=block_cols,
            num_warps=block_warps(block_cols * value_bytes(x)),
            enable_fp_fusion=True,
        )
    return y


@triton.jit
def _forward(
    x_ptr,
    y_ptr,
    x_row_stride,
    y_row_stride,
    n_cols,
    VALUE: tl.constexpr,
    SUM: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_row, y_row = x_ptr + row * x_row_stride, y_ptr + row * y_row_stride
    cols = tl.arange(0, BLOCK_COLS)

    if ONE_BLOCK:
        in_row = cols < n_cols
        x = tl.load(x_row + cols, mask=in_row, other=float("-inf")).to(VALUE)
        e = tl.exp(x - tl.max(x, axis=0))
        s = tl.sum(e.to(SUM), axis=0).to(VALUE)
        tl.store(y_row + cols, e / s, mask=in_row)
    else:
        m = tl.full((), float("-inf"), VALUE)
        for start in range(0, n_cols, BLOCK_COLS):
            x = tl.load(x_row + start + cols, mask=start + cols < n_cols, other=float("-inf")).to(VALUE)
            m = tl.maximum(m, tl.max(x, axis=0))

        total = tl.zeros((), SUM)
        for start in range(0, n_cols, BLOCK_COLS):
            x = tl.load(x_row + start + cols, mask=start + cols < n_cols, other=float("-inf")).to(VALUE)
            total += tl.sum(tl.exp(x - m).to(SUM), axis=0)
        s = total.to(VALUE)

        for start in range(0, n_cols, BLOCK_COLS):
            in_row = start + cols < n_cols
            x = tl.load(x_row + start + cols, mask=in_row, other=float("-inf")).to(VALUE)
            tl.store(y_row + start + cols, tl.exp(x - m) / s, mask=in_row)
