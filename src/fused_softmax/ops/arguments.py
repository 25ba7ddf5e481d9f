"""The checks of arguments that all operators along one dim share: they raise torch's errors and name the argument."""

import torch
from torch import Tensor

from fused_softmax.described import typed


def check(name: str, input: Tensor, dim: int, dtype: torch.dtype | None, out: Tensor | None) -> torch.dtype:
    """The dtype of the result, or an error for a call that torch refuses too."""
    if not isinstance(input, Tensor):
        raise TypeError(f"{name}: input must be a Tensor, not {type(input).__name__}")
    if input.is_nested or input.layout != torch.strided:
        kind = "nested" if input.is_nested else str(input.layout)
        # As torch: what is sparse has no such kernel, what is nested is refused by the one it has.
        error = RuntimeError if input.is_nested else NotImplementedError
        raise error(f"{name}: input must be a dense strided tensor, got a {kind} one of shape {_shape(input)}")
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"{name}: dim must be an int, not {typed(dim)}")
    bound = max(1, input.ndim)
    if not -bound <= dim < bound:
        raise IndexError(
            f"{name}: dim {dim} is out of range [{-bound}, {bound - 1}] for input of shape {_shape(input)}"
        )
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name}: dtype must be a torch.dtype, not {typed(dtype)}")
    result_dtype = dtype or input.dtype
    if not result_dtype.is_floating_point and not result_dtype.is_complex:
        what = f"dtype={dtype}" if dtype is not None else f"input of dtype {input.dtype} without dtype="
        raise NotImplementedError(f"{name}: not implemented for {what}; give a floating dtype")
    if out is not None:
        _check_out(name, input, result_dtype, out)
    return result_dtype


def _check_out(name: str, input: Tensor, result_dtype: torch.dtype, out: Tensor) -> None:
    if not isinstance(out, Tensor):
        raise TypeError(f"{name}: out must be a Tensor, not {type(out).__name__}")
    if out.dtype != result_dtype:
        raise RuntimeError(f"{name}: out must have dtype {result_dtype}, got {out.dtype}")
    if out.device != input.device:
        raise RuntimeError(f"{name}: out must be on the input's device {input.device}, got {out.device}")
    if out.shape != input.shape and out.numel() > 0:
        raise RuntimeError(f"{name}: out must have the input's shape {_shape(input)}, got {_shape(out)}")


def sized(out: Tensor, shape: tuple[int, ...]) -> Tensor:
    """out in the shape of the result, as torch resizes it. A compiler traces no resizing, so none is asked in vain."""
    return out if out.shape == shape else out.resize_(shape)


def _shape(x: Tensor) -> str:
    return "(nested)" if x.is_nested else str(tuple(x.shape))
