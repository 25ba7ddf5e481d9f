"""softmax, log_softmax and logsumexp over the ragged dim of nested tensors of layout jagged, which are segments."""

from typing import Any

import torch
from torch import Tensor

from fused_softmax.core.described import described, shape_said, typed
from fused_softmax.ops.segments import segments
from fused_softmax.ops.segments.options import raise_as


def is_jagged(input: Any) -> bool:
    return isinstance(input, Tensor) and input.is_nested and input.layout == torch.jagged


def of_nested(
    name: str, input: Any, dim: Any, dtype: torch.dtype | None, keepdim: bool = False, scale: Any = None,
    others: dict[str, Any] | None = None,
) -> Tensor:  # fmt: skip
    """The function `name` over the ragged dim: nested like the input; of logsumexp [batch, ...], or with 1 in `dim`.

    others: arguments that are not for nested tensors, each of which must be None or False.
    """
    for argument, value in (others or {}).items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{name}: {argument}= is not for {_of(input)}, got {described(value)}")
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"{name}: dim must be an int for {_of(input)}, not {typed(dim)}")
    ragged = input._ragged_idx
    if not -input.ndim <= dim < input.ndim:
        raise IndexError(f"{name}: dim {dim} is out of range [{-input.ndim}, {input.ndim - 1}] for {_of(input)}")
    if dim % input.ndim != ragged:
        raise RuntimeError(
            f"{name}: dim must be the ragged dim {ragged} of {_of(input)}, got {dim}; take its values() for another"
        )
    if input.lengths() is not None:
        raise RuntimeError(
            f"{name}: input of shape {shape_said(input)} is a nested tensor with holes, for it has lengths beside its "
            f"offsets; give one whose values lie together, as input.contiguous() does"
        )
    values, offsets = input.values(), input.offsets()
    compute = getattr(segments, f"segment_{name}")
    try:
        y = compute(values, offsets, dim=ragged - 1, scale=scale, dtype=dtype)
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        raise_as(error, {f"segment_{name}": name})
    if name == "logsumexp":
        y = y.movedim(ragged - 1, 0)
        return y.unsqueeze(ragged) if keepdim else y
    return like(input, y)


def _of(input: Any) -> str:
    return f"a nested input of shape {shape_said(input)}"


def like(input: Any, values: Tensor) -> Tensor:
    """A nested tensor of the input's structure, with these values."""
    return torch.nested.nested_tensor_from_jagged(
        values, input.offsets(), jagged_dim=input._ragged_idx, min_seqlen=_known(input, "_maybe_min_seqlen"),
        max_seqlen=_known(input, "_maybe_max_seqlen"),
    )  # fmt: skip


def _known(input: Any, what: str) -> Any:
    """What torch has cached of a nested tensor's lengths. To compute it would wait for the device."""
    return getattr(input, what, None)
