"""What a call of attention asks for beside its tensors, checked once: scale, softcap, what is visible, what comes back.

Shapes and dtypes are checked as scaled_dot_product_attention checks them, before anything runs.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_softmax.core.checks import dense_mask, is_causal_bias
from fused_softmax.core.described import described
from fused_softmax.core.options import Options, option

NAME = "attention"
STATS = ("entropy", "row_max", "column_sums")
MOST_DIM = 256  # of a head
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _is_number(name: str, argument: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real | torch.SymFloat):
        raise TypeError(f"{name}: {argument} must be a number, not {type(value).__name__}")


def _is_cap(name: str, argument: str, value: Any) -> None:
    if value is None:
        return
    _is_number(name, argument, value)
    if not 0 < value < math.inf:
        raise ValueError(f"{name}: {argument} must be more than 0 and finite, got {value}")


@dataclass(frozen=True)
class Attention(Options):
    """scores = softcap(scale query key^T) + bias + attn_mask + ALiBi, of which keys within the window are visible.

    left, right: query i sees key j where i + offset - left <= j <= i + offset + right; None is unbounded. offset is 0,
    or keys - queries where bottom_right. enable_gqa: whether several heads of query share one of key and value.
    entropy, row_max, column_sums: which statistics are asked for. deterministic: whether every run is to give the same
    bits. asked_stats: the names of the statistics in the order in which they were asked for.
    """

    scale: float = option(MISSING, "float", _is_number)
    softcap: float | None = option(None, "float?", _is_cap)
    left: int | None = option(None, "int?")
    right: int | None = option(None, "int?")
    bottom_right: bool = option(False, "bool")
    enable_gqa: bool = option(False, "bool")
    entropy: bool = option(False, "bool")
    row_max: bool = option(False, "bool")
    column_sums: bool = option(False, "bool")
    deterministic: bool = option(False, "bool")
    asked_stats: tuple[str, ...] = ()

    @property
    def bounded(self) -> bool:
        return self.left is not None or self.right is not None

    @property
    def stats(self) -> tuple[str, ...]:
        """The names of those that are asked for, in the order in which the caller did."""
        return self.asked_stats or tuple(name for name in STATS if getattr(self, name))

    def offset(self, n_queries: int, n_keys: int) -> int:
        return n_keys - n_queries if self.bottom_right else 0

    def arguments(self) -> dict[str, Any]:
        """As `attention` takes them."""
        return {
            "scale": self.scale, "softcap": self.softcap, "window": (self.left, self.right),
            "causal_align": "bottom_right" if self.bottom_right else "top_left", "enable_gqa": self.enable_gqa,
        }  # fmt: skip


class Beside(NamedTuple):
    """The tensors of a call beside query, key and value; None where it goes without one."""

    attn_mask: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None


def attention_of(
    query: Any, key: Any, value: Any, beside: Beside, is_causal: Any, causal_align: Any, scale: Any, enable_gqa: Any,
    window: Any, softcap: Any, dropout_p: Any, return_stats: Any, deterministic: Any = False,
    cast: torch.dtype | None = None,
) -> Attention:  # fmt: skip
    """The Attention of a call, or an error that names the argument.

    cast: autocast's dtype, where it casts the query; key and value are then cast too.
    """
    if dropout_p != 0:
        raise ValueError(f"{NAME}: dropout_p must be 0.0, for no weights are in memory; got {described(dropout_p)}")
    for argument, tensor in (("query", query), ("key", key), ("value", value)):
        _check_tensor(argument, tensor, query, cast)
    _check_shapes(query, key, value, enable_gqa)
    if causal_align not in ("top_left", "bottom_right"):
        raise ValueError(f'{NAME}: causal_align must be "top_left" or "bottom_right", got {described(causal_align)}')
    if is_causal and beside.attn_mask is not None:
        raise RuntimeError(f"{NAME}: is_causal=True takes no attn_mask; give an additive one as bias")
    n_heads = query.shape[-3] if query.ndim > 2 else 1
    shape = (*broadcast(query, key, value, enable_gqa), query.shape[-2], key.shape[-2])
    if beside.attn_mask is not None:
        _check_beside("attn_mask", beside.attn_mask, query, shape, bool_too=True)
    if beside.bias is not None:
        _check_beside("bias", beside.bias, query, shape)
    if beside.sinks is not None:
        _check_beside("sinks", beside.sinks, query, None)
        if tuple(beside.sinks.shape) != (n_heads,):
            raise RuntimeError(f"{NAME}: sinks must have shape [heads], ({n_heads},), got {_shape(beside.sinks)}")
    if beside.alibi_slopes is not None:
        _check_beside("alibi_slopes", beside.alibi_slopes, query, None)
        shapes = (n_heads,), tuple(shape[:-2])
        if tuple(beside.alibi_slopes.shape) not in shapes:
            raise RuntimeError(
                f"{NAME}: alibi_slopes must have shape {shapes[0]} or {shapes[1]}, got {_shape(beside.alibi_slopes)}"
            )
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1]) if query.shape[-1] else 1.0
    else:
        _is_number(NAME, "scale", scale)
        scale = float(scale) if isinstance(scale, Real) else scale
    _is_cap(NAME, "softcap", softcap)
    left, right = _window(window)
    if is_causal:
        right = 0 if right is None else min(right, 0)
    if not isinstance(return_stats, Iterable):
        raise TypeError(f"{NAME}: return_stats must be names among {STATS}, not {type(return_stats).__name__}")
    stats = (return_stats,) if isinstance(return_stats, str) else tuple(return_stats)
    for each in stats:
        if each not in STATS:
            raise ValueError(f"{NAME}: return_stats takes names among {STATS}, got {described(each)}")
    return Attention(
        scale=scale, softcap=softcap, left=left, right=right, bottom_right=causal_align == "bottom_right",
        enable_gqa=bool(enable_gqa), deterministic=bool(deterministic), asked_stats=tuple(dict.fromkeys(stats)),
        **dict.fromkeys(stats, True),
    )  # fmt: skip


def without_causal_bias(
    query: Tensor, key: Tensor, beside: Beside, is_causal: Any, causal_align: Any, window: Any,
    cast: torch.dtype | None = None,
) -> tuple[Beside, Any, Any]:  # fmt: skip
    """(the tensors beside, is_causal, causal_align) of a call whose attn_mask or bias is a CausalBias of torch's.

    It becomes causality. It becomes a bool mask if other things that are aligned as causality are aligned otherwise.
    cast: as in `attention_of`.
    """
    for argument, tensor in (("query", query), ("key", key)):
        _check_tensor(argument, tensor, query, cast)
    mask: Any = beside.attn_mask
    bias = beside.bias
    if is_causal_bias(bias):
        if mask is not None:
            raise TypeError(f"{NAME}: bias is a CausalBias beside an attn_mask; combine both in attn_mask")
        mask, bias = bias, None
    if is_causal:
        raise RuntimeError(f"{NAME}: is_causal=True takes no CausalBias, which is causal itself")
    given, sizes = (mask.seq_len_q, mask.seq_len_kv), (query.shape[-2], key.shape[-2])
    if given != sizes:
        raise RuntimeError(f"{NAME}: a CausalBias must be made of (queries, keys), {sizes}, got {given}")
    align = "bottom_right" if mask.variant.name == "LOWER_RIGHT" else "top_left"
    aligned = align == causal_align or given[0] == given[1]
    if aligned or (window is None and beside.alibi_slopes is None):
        return beside._replace(attn_mask=None, bias=bias), True, causal_align if aligned else align
    return beside._replace(attn_mask=dense_mask(NAME, "attn_mask", mask, query.device), bias=bias), False, causal_align


def broadcast(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """The leading shape of the output: [..., heads]."""
    if not enable_gqa:
        return _broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    return (*_broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3]), query.shape[-3])


def _broadcast_shapes(*shapes: Sequence[int]) -> tuple[int, ...]:
    """As torch.broadcast_shapes, which imports sympy: one to three seconds of a first call."""
    found = [1] * max(map(len, shapes))
    for shape in shapes:
        for i in range(-len(shape), 0):
            if type(shape[i]) is not int or (shape[i] != 1 != found[i] != shape[i]):
                return tuple(torch.broadcast_shapes(*shapes))  # its error, or sizes that a compiler knows by name
            if shape[i] != 1:
                found[i] = shape[i]
    return tuple(found)


def _window(window: Any) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise ValueError(f"{NAME}: window must be (left, right), each an int or None, got {described(window)}")
    for side in window:
        if side is None:
            continue
        if isinstance(side, bool) or not isinstance(side, Integral | torch.SymInt):
            raise TypeError(f"{NAME}: window must be (left, right), each an int or None, got {described(window)}")
        if side < 0:
            raise ValueError(f"{NAME}: window must have no negative size, got {described(window)}; None is unbounded")
    return window[0], window[1]


def _check_tensor(argument: str, tensor: Any, query: Any, cast: torch.dtype | None) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{NAME}: {argument} must be a Tensor, not {type(tensor).__name__}")
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise RuntimeError(f"{NAME}: {argument} must be a dense strided tensor, got a {kind} one")
    if tensor.dtype not in _FLOATS:
        raise RuntimeError(f"{NAME}: {argument} must be of float16, bfloat16, float32 or float64, got {tensor.dtype}")
    if tensor.dtype != query.dtype and (cast is None or tensor.dtype == torch.float64):
        raise RuntimeError(f"{NAME}: {argument} must have the query's dtype {query.dtype}, got {tensor.dtype}")
    if tensor.device != query.device:
        raise RuntimeError(f"{NAME}: {argument} must be on the query's device {query.device}, got {tensor.device}")
    if tensor.ndim < 2:
        raise RuntimeError(f"{NAME}: {argument} must have shape [..., heads, length, dim], got {_shape(tensor)}")


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    if key.shape[-1] != query.shape[-1]:
        raise RuntimeError(f"{NAME}: key must have the query's last size {query.shape[-1]}, got shape {_shape(key)}")
    if value.shape[-2] != key.shape[-2]:
        raise RuntimeError(f"{NAME}: value must have the key's length {key.shape[-2]}, got shape {_shape(value)}")
    for argument, tensor in (("query", query), ("value", value)):
        if tensor.shape[-1] > MOST_DIM:
            raise ValueError(f"{NAME}: {argument} must have a last size of at most {MOST_DIM}, got {_shape(tensor)}")
    if enable_gqa:
        if min(query.ndim, key.ndim, value.ndim) < 3:
            raise RuntimeError(f"{NAME}: enable_gqa takes [..., heads, length, dim], got query {_shape(query)}")
        heads, of_keys, of_values = (each.shape[-3] for each in (query, key, value))
        if of_keys != of_values:
            raise RuntimeError(f"{NAME}: value must have the key's {of_keys} heads, got shape {_shape(value)}")
        if of_keys == 0 or heads % of_keys:
            raise RuntimeError(f"{NAME}: key must have heads that divide the query's {heads}, got shape {_shape(key)}")
    try:
        broadcast(query, key, value, enable_gqa)
    except RuntimeError:
        raise RuntimeError(
            f"{NAME}: the leading sizes of query, key and value must broadcast, got {_shape(query)}, {_shape(key)} "
            f"and {_shape(value)}"
        ) from None


def _check_beside(argument: str, tensor: Any, query: Tensor, shape: Any, bool_too: bool = False) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{NAME}: {argument} must be a Tensor, not {type(tensor).__name__}")
    tensor = dense_mask(NAME, argument, tensor, query.device)
    if tensor.is_nested or tensor.layout != torch.strided:
        raise RuntimeError(f"{NAME}: {argument} must be a dense strided tensor, got {tensor.layout}")
    if tensor.dtype not in _FLOATS and not (bool_too and tensor.dtype == torch.bool):
        kinds = "bool or a float dtype" if bool_too else "a float dtype"
        raise RuntimeError(f"{NAME}: {argument} must be of {kinds}, got {tensor.dtype}")
    if tensor.device != query.device:
        raise RuntimeError(f"{NAME}: {argument} must be on the query's device {query.device}, got {tensor.device}")
    if shape is None:
        return
    pairs = zip(reversed(tensor.shape), reversed(shape), strict=False)
    if tensor.ndim > len(shape) or any(n not in (1, wanted) for n, wanted in pairs):
        raise RuntimeError(
            f"{NAME}: {argument} must broadcast to [..., heads, queries, keys], {tuple(shape)}, got {_shape(tensor)}"
        )


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
