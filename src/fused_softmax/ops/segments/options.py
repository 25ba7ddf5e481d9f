"""The options of a call on segments, its offsets or index, and their checks."""

import math
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from fused_softmax.core.checks import DTYPES, check
from fused_softmax.core.described import typed
from fused_softmax.core.options import Options, option
from fused_softmax.core.route import checks_values, is_sharded
from fused_softmax.ops import autocast

_INTEGERS = (torch.int64, torch.int32)


def _is_count(name: str, argument: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: {argument} must be an int, not {typed(value)}")
    if value < 0:
        raise ValueError(f"{name}: {argument} must be at least 0, got {value}")


def _is_scale(name: str, argument: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: {argument} must be a number, not {typed(value)}")
    if not math.isfinite(value) or value == 0:
        raise ValueError(f"{name}: {argument} must be finite and not 0, got {value}")


@dataclass(frozen=True)
class Segments(Options):
    """The options of one call. n_segments: None where an index alone says which segments there are."""

    n_segments: int | None = option(None, "int?", _is_count)
    dim: int = option(0, "int")
    scale: float | None = option(None, "float?", _is_scale)
    dtype: torch.dtype | None = option(None, "ScalarType?")


def segments_of(name: str, input: Any, offsets: Any, index: Any, given: Segments) -> Segments:
    """The options of a call with what follows from its tensors, or an error that names the argument."""
    dim = int(given.dim) if isinstance(given.dim, Integral) and not isinstance(given.dim, bool) else given.dim
    result = check(name, input, dim, given.dtype, None)
    if is_sharded(input):
        raise NotImplementedError(f"{name}: input must be a plain tensor, not a DTensor; give its local tensors")
    if result not in DTYPES:
        raise NotImplementedError(f"{name}: not implemented for {result}; give a dtype of 16 to 64 bit floats")
    if input.ndim == 0:
        raise ValueError(f"{name}: input must have at least one dim, got shape ()")
    for argument, each in Segments.OPTIONS.items():
        value = getattr(given, argument)
        if each.check is not None and value is not None:
            each.check(name, argument, value)
    if (offsets is None) == (index is None):
        both = "neither" if offsets is None else "both"
        raise ValueError(f"{name}: give offsets or index, one of the two, got {both}")
    n, n_segments = input.shape[dim], given.n_segments
    if index is not None:
        _check_integers(name, "index", index, input)
        if index.shape != (n,):
            raise ValueError(
                f"{name}: index must have shape ({n},), one for each element of dim {dim} of input of shape "
                f"{tuple(input.shape)}, got {tuple(index.shape)}"
            )
    else:
        _check_integers(name, "offsets", offsets, input)
        if offsets.ndim != 1 or offsets.shape[0] == 0:
            raise ValueError(f"{name}: offsets must have shape (n_segments + 1,), got {tuple(offsets.shape)}")
        found = offsets.shape[0] - 1
        if n_segments is not None and n_segments != found:
            raise ValueError(f"{name}: n_segments={n_segments} does not fit offsets of shape ({found + 1},)")
        if found == 0 and n:
            raise ValueError(f"{name}: offsets of shape (1,) have no segment for the {n} elements of dim {dim}")
        n_segments = found
    if name == "segment_logsumexp" and n_segments is None:
        raise ValueError(f"{name}: n_segments is needed with index, got None: it is the size of the result")
    if given.dtype is None:
        result = autocast.result_dtype(name, input)
    options = replace(given, dim=dim % input.ndim, n_segments=n_segments, dtype=result)
    _check_values(name, input, offsets, index, options)
    return options


def _check_integers(name: str, argument: str, tensor: Any, input: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: {argument} must be a Tensor, not {typed(tensor)}")
    if tensor.is_nested or tensor.layout != torch.strided:
        raise RuntimeError(f"{name}: {argument} must be a dense strided tensor, got {tensor.layout}")
    if tensor.dtype not in _INTEGERS:
        raise TypeError(f"{name}: {argument} must be of int64 or int32, got {tensor.dtype}")
    if tensor.device != input.device:
        raise RuntimeError(f"{name}: {argument} must be on the input's device {input.device}, got {tensor.device}")


def _check_values(name: str, input: Tensor, offsets: Tensor | None, index: Tensor | None, options: Segments) -> None:
    """Raise for offsets or an index that no segments have, where values may be read."""
    looked_at: Any = index if offsets is None else offsets
    if not checks_values(input, looked_at):
        return
    if offsets is None:
        most = math.inf if options.n_segments is None else options.n_segments
        if looked_at.numel() == 0:
            return
        least, greatest = (int(each) for each in looked_at.aminmax())
        if least < 0 or greatest >= most:
            wanted = "at least 0" if most == math.inf else f"in [0, {most})"
            raise IndexError(f"{name}: index must be {wanted}, got {least if least < 0 else greatest}")
        return
    n = input.shape[options.dim]
    first, last = int(looked_at[0]), int(looked_at[-1])
    if first != 0 or last != n:
        raise ValueError(
            f"{name}: offsets must begin with 0 and end with {n}, the size of dim {options.dim} of input of shape "
            f"{tuple(input.shape)}, got {first} and {last}"
        )
    falls = looked_at[1:] < looked_at[:-1]
    if falls.any():
        at = int(falls.int().argmax())
        raise ValueError(
            f"{name}: offsets must not decrease, but offsets[{at + 1}] is {int(looked_at[at + 1])} after "
            f"{int(looked_at[at])}"
        )
