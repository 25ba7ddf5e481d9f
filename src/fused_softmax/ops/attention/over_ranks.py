"""Attention of DTensors: each rank has its own batches and heads, and no rank hears of another."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fused_softmax.ops.attention.options import NAME
from fused_softmax.ops.attention.reference import AttentionOutput
from fused_softmax.ranks.dtensor import Axes, Cut, cut_of, shard_by_shard


def attention_on_shards(
    function: Callable[..., Tensor | AttentionOutput], given: Mapping[str, Any], lead: tuple[int, ...]
) -> Tensor | AttentionOutput:
    """function(**given) of DTensors that fit together, as DTensors.

    given: attention's tensors by name. lead: the leading shape of the output, [..., heads].
    """
    n = len(lead)
    of_output: Axes = (*range(n), None, None)

    def axes_of(argument: str, tensor: Any) -> Axes:
        if tensor is None:
            return ()
        if argument in ("sinks", "alibi_slopes"):  # [heads] or [..., heads]
            return of_output[n - tensor.ndim : n] if n else (None,)
        return of_output[n + 2 - tensor.ndim :]

    placed = {argument: (each, axes_of(argument, each)) for argument, each in given.items()}
    cut = cut_of(NAME, placed, lead, ["batch"] * (n - 1) + ["heads"] * min(n, 1))
    _check_heads(given["key"], cut, lead)
    return shard_by_shard(cut, function, placed, lambda result: of_output[: result.ndim])


def _check_heads(key: Tensor, cut: Cut, lead: tuple[int, ...]) -> None:
    """ValueError where ranks have heads of query whose heads of key other ranks have."""
    ranks = math.prod(
        cut.mesh.size(i) for i, each in enumerate(cut.placements) if getattr(each, "dim", None) == len(lead) - 1
    )
    n_heads = key.shape[-3] if key.ndim > 2 else 1
    if 1 < n_heads < lead[-1] and n_heads % ranks:
        raise ValueError(
            f"{NAME}: key must have heads of which {ranks} ranks hold as many each, got {n_heads} heads of key for "
            f"{lead[-1]} of query: redistribute query, key and value with [Replicate()] or shards of batch"
        )
