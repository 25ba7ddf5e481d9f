"""The host code that the classic kernels share: checks of x, the dtype to compute in, the number of warps."""

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# The kernels index columns in 32 bits, and a tile may reach past the end of its row.
MAX_COLS = 2**30
# The limit of a grid's first dimension, on every CUDA device.
MAX_ROWS = 2**31 - 1
# The most elements that Triton allows in one tensor.
MAX_BLOCK = 2**20
# A program has at most 1024 threads, and a warp of AMD's data-centre GPUs has 64.
MAX_WARPS = 16 if torch.version.hip else 32


def check_rows(x: Tensor) -> None:
    """Raise TypeError or ValueError unless x is a 2-D tensor of one of DTYPES."""
    if x.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f"x must be one of {names}, got {x.dtype}")
    if x.dim() != 2:
        raise ValueError(f"x must be 2-D, [n_rows, n_cols], got shape {tuple(x.shape)}")


def kernel_rows(x: Tensor, *, max_cols: int = MAX_COLS, why: str = "columns are indexed in 32 bits") -> Tensor:
    """x with unit column stride, copied only if necessary. Raises ValueError if a kernel cannot take it."""
    check_rows(x)
    n_rows, n_cols = x.shape
    if n_cols > max_cols:
        raise ValueError(f"x has rows of {n_cols} elements, more than {max_cols}: {why}")
    if n_rows > MAX_ROWS:
        raise ValueError(f"x has {n_rows} rows, more than {MAX_ROWS}")
    if not x.is_cuda and not interpreted():
        raise ValueError(
            f"x is on {x.device}: Triton kernels take CUDA tensors, or CPU tensors if FUSED_SOFTMAX_INTERPRET=1 was "
            "set before fused_softmax was imported"
        )
    return x if x.stride(1) == 1 else x.contiguous()


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return bool(triton.knobs.runtime.interpret)


def value_dtype(x: Tensor) -> tl.dtype:
    """The dtype that a kernel computes in."""
    return tl.float64 if x.dtype is torch.float64 else tl.float32


def value_bytes(x: Tensor) -> int:
    """Bytes of one value in the dtype that a kernel computes in."""
    return 8 if x.dtype is torch.float64 else 4


def block_warps(block_bytes: int, max_warps: int = MAX_WARPS) -> int:
    """Warps for a block with this many bytes of values: up to 128 KiB, a thread holds 8 to 32 registers of them."""
    kib = block_bytes // 1024
    return min(4 if kib <= 8 else 8 if kib <= 32 else 16 if kib <= 64 else 32, max_warps)
