"""Checks of arguments that operators share: they raise torch's errors and name the argument."""

import os
from typing import Any

import torch
from torch import Tensor

from fused_softmax.core.described import shape_said, typed


def check(name: str, input: Tensor, dim: int, dtype: torch.dtype | None, out: Tensor | None) -> torch.dtype:
    """The dtype of the result, or an error for a call that torch refuses too."""
    if not isinstance(input, Tensor):
        raise TypeError(f"{name}: input must be a Tensor, not {typed(input)}")
    if input.is_nested or input.layout != torch.strided:
        kind = "nested" if input.is_nested else str(input.layout)
        # As torch: what is sparse has no such kernel, what is nested is refused by the one it has.
        error = RuntimeError if input.is_nested else NotImplementedError
        raise error(f"{name}: input must be a dense strided tensor, got a {kind} one of shape {shape_said(input)}")
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"{name}: dim must be an int, not {typed(dim)}")
    bound = max(1, input.ndim)
    if not -bound <= dim < bound:
        raise IndexError(
            f"{name}: dim {dim} is out of range [{-bound}, {bound - 1}] for input of shape {shape_said(input)}"
        )
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name}: dtype must be a torch.dtype, not {typed(dtype)}")
    result_dtype = dtype or input.dtype
    if not result_dtype.is_floating_point and not result_dtype.is_complex:
        raise NotImplementedError(f"{name}: not implemented for {asked_of(input, dtype)}; give a floating dtype")
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
        raise RuntimeError(f"{name}: out must have the input's shape {shape_said(input)}, got {shape_said(out)}")
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise RuntimeError(
            f"{name}: more than one element of out refers to a single memory location, got shape {shape_said(out)} of "
            f"strides {out.stride()}; give a new tensor"
        )


def sized(out: Tensor, shape: tuple[int, ...]) -> Tensor:
    """out in the shape of the result, resized as torch resizes it.

    A compiler traces no resizing, so none is requested in vain.
    """
    return out if out.shape == shape else out.resize_(shape)


def asked_of(input: Tensor, dtype: torch.dtype | None) -> str:
    """What an error says of the dtype of a result."""
    of_input = f"input of dtype {input.dtype} and shape {shape_said(input)}"
    return f"{of_input} without dtype=" if dtype is None else f"dtype={dtype} of {of_input}"


CHECK = os.environ.get("FUSED_SOFTMAX_CHECK") == "1"  # whether calls wait for a device to look at values
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # of results


def is_causal_bias(mask: Any) -> bool:
    """Whether a mask is torch.nn.attention.bias.CausalBias, told by its module: importing that takes seconds."""
    return isinstance(mask, Tensor) and type(mask).__module__ == "torch.nn.attention.bias"


def dense_mask(name: str, argument: str, mask: Any, device: torch.device) -> Any:
    """A mask whose elements lie in its memory. A CausalBias becomes the bool mask that it stands for.

    Other tensors that are made only when they are asked for are refused.
    """
    if mask is None or type(mask) is Tensor:
        return mask
    if is_causal_bias(mask):
        diagonal = mask.seq_len_kv - mask.seq_len_q if mask.variant.name == "LOWER_RIGHT" else 0
        return torch.ones(mask.seq_len_q, mask.seq_len_kv, dtype=torch.bool, device=device).tril(diagonal)
    if isinstance(mask, Tensor) and (hasattr(mask, "materialize") or hasattr(mask, "_materialize")):
        raise TypeError(
            f"{name}: {argument} is a {type(mask).__name__}, whose elements are not in memory before it is "
            f"materialized; give the dense tensor that it stands for"
        )
    return mask


def arithmetic_of(x: Tensor) -> torch.dtype:
    return arithmetic_in(x.dtype)


def arithmetic_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which results of a dtype are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def broadcast(name: str, argument: str, tensor: Tensor, input: Tensor, shape: tuple[int, ...]) -> Tensor:
    """tensor, on the input's device: as for torch's operators, one without dims may come from the CPU."""
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise RuntimeError(f"{name}: {argument} must be a dense strided tensor, got a {kind} one")
    if tensor.device != input.device and (tensor.ndim or tensor.device.type != "cpu"):
        raise RuntimeError(f"{name}: {argument} must be on the input's device {input.device}, got {tensor.device}")
    aligned = tuple(tensor.shape)
    fits = len(aligned) <= len(shape) and all(
        size in (1, whole) for size, whole in zip(reversed(aligned), reversed(shape), strict=False)
    )
    if not fits:
        raise ValueError(f"{name}: {argument} must broadcast to the input's shape {shape}, got shape {aligned}")
    return tensor.to(input.device)
