"""The options of a call on segments, its offsets or index, and their checks."""

import math
import re
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, NoReturn

import torch
from torch import Tensor

from fused_softmax.core.checks import DTYPES, asked_of, check
from fused_softmax.core.described import described, shape_said, typed
from fused_softmax.core.options import Options, is_finite, option, plain_number
from fused_softmax.core.route import checks_values, is_sharded
from fused_softmax.ops import autocast

_INTEGERS = (torch.int64, torch.int32)
_MOST = torch.iinfo(torch.int64).max - 1  # segments, so that an int64 holds one more


def _is_int(name: str, argument: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: {argument} must be an int, not {typed(value)}")


def _is_scale(name: str, argument: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: {argument} must be a number, not {typed(value)}")
    if not is_finite(value) or value == 0:
        raise ValueError(f"{name}: {argument} must be finite and not 0, got {described(value)}")


@dataclass(frozen=True)
class Segments(Options):
    """The options of one call. n_segments: None where an index alone says which segments there are."""

    n_segments: int | None = option(None, "int?", _is_int)
    dim: int = option(0, "int")
    scale: float | None = option(None, "float?", _is_scale)
    dtype: torch.dtype | None = option(None, "ScalarType?")


def segments_of(name: str, input: Any, offsets: Any, index: Any, given: Segments) -> Segments:
    """The options of a call with what follows from its tensors, or an error that names the argument."""
    dim = plain_number(given.dim) if isinstance(given.dim, Integral) else given.dim
    result = check(name, input, dim, given.dtype, None)
    if is_sharded(input):
        raise NotImplementedError(_of_shards(name, "input", input))
    if result not in DTYPES:
        raise NotImplementedError(
            f"{name}: not implemented for {asked_of(input, given.dtype)}; give a dtype of 16 to 64 bit floats"
        )
    if input.ndim == 0:
        raise ValueError(f"{name}: input must have at least one dim, got shape ()")
    for argument, each in Segments.OPTIONS.items():
        value = getattr(given, argument)
        if each.check is not None and value is not None:
            each.check(name, argument, value)
    if (offsets is None) == (index is None):
        both = "neither" if offsets is None else f"both, {described(offsets)} and {described(index)}"
        raise ValueError(f"{name}: give offsets or index, one of the two, for {_of(input)}, got {both}")
    n, n_segments, scale = input.shape[dim], plain_number(given.n_segments), plain_number(given.scale)
    if n_segments is not None and not 0 <= n_segments <= _MOST:
        raise ValueError(
            f"{name}: n_segments must be at least 0 and below 2**63 - 1 for {_of(input)}, got {described(n_segments)}"
        )
    if index is not None:
        _check_integers(name, "index", index, input)
        if index.shape != (n,):
            raise ValueError(
                f"{name}: index must have shape ({n},), one for each element of dim {dim} of {_of(input)}, got "
                f"{tuple(index.shape)}"
            )
    else:
        _check_integers(name, "offsets", offsets, input)
        if offsets.ndim != 1 or offsets.shape[0] == 0:
            raise ValueError(
                f"{name}: offsets must have shape (n_segments + 1,) for {_of(input)}, got {tuple(offsets.shape)}"
            )
        found = offsets.shape[0] - 1
        if n_segments is not None and n_segments != found:
            raise ValueError(
                f"{name}: n_segments must be {found} or None for offsets of shape ({found + 1},), got {n_segments}"
            )
        if found == 0 and n:
            raise ValueError(
                f"{name}: offsets must have at least one segment for the {n} elements of dim {dim} of {_of(input)}, "
                f"got shape (1,)"
            )
        n_segments = found
    if name == "segment_logsumexp" and n_segments is None:
        raise ValueError(
            f"{name}: n_segments must be an int with index of shape ({n},), for it is the size of the result, got None"
        )
    if given.dtype is None:
        result = autocast.result_dtype(name, input)
    options = replace(given, dim=dim % input.ndim, n_segments=n_segments, scale=scale, dtype=result)
    _check_values(name, input, offsets, index, options)
    return options


def _check_integers(name: str, argument: str, tensor: Any, input: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: {argument} must be a Tensor of int64 or int32, not {typed(tensor)}")
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise RuntimeError(
            f"{name}: {argument} must be a dense strided tensor, got a {kind} one of shape {shape_said(tensor)}"
        )
    if is_sharded(tensor):
        raise NotImplementedError(_of_shards(name, argument, tensor))
    if tensor.dtype not in _INTEGERS:
        raise TypeError(f"{name}: {argument} must be of int64 or int32, got {described(tensor)}")
    if tensor.device != input.device:
        raise RuntimeError(
            f"{name}: {argument} must be on the device of the input, {input.device}, got {described(tensor)}"
        )


def _of(input: Tensor) -> str:
    return f"input of shape {tuple(input.shape)}"


def _of_shards(name: str, argument: str, tensor: Tensor) -> str:
    shape = tuple(tensor.shape)
    return f"{name}: {argument} must be a plain tensor, not a DTensor of shape {shape}; give its local tensor"


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
            wanted = "at least 0" if most == math.inf else f"in [0, {most}), for n_segments={most}"
            wrong = least if least < 0 else greatest
            raise IndexError(
                f"{name}: index of shape {tuple(looked_at.shape)} must be {wanted}, got {wrong} at "
                f"[{int((looked_at == wrong).int().argmax())}]"
            )
        return
    n = input.shape[options.dim]
    first, last = int(looked_at[0]), int(looked_at[-1])
    if first != 0 or last != n:
        raise ValueError(
            f"{name}: offsets of shape {tuple(looked_at.shape)} must begin with 0 and end with {n}, the size of dim "
            f"{options.dim} of input of shape {tuple(input.shape)}, got {first} and {last}"
        )
    falls = looked_at[1:] < looked_at[:-1]
    if falls.any():
        at = int(falls.int().argmax())
        raise ValueError(
            f"{name}: offsets of shape {tuple(looked_at.shape)} must not decrease, but offsets[{at + 1}] is "
            f"{int(looked_at[at + 1])} after {int(looked_at[at])}"
        )


def raise_as(error: Exception, names: dict[str, str]) -> NoReturn:
    """Raise a function's error in another's words. names: its names, its own first, and the other's."""
    said = str(error)
    if not said.startswith(f"{next(iter(names))}: "):
        raise error
    raise type(error)(re.sub(r"\w+", lambda word: names.get(word[0], word[0]), said)) from error
