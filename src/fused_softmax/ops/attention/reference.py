"""attention of torch's operations: the truth in float64, the path of CPUs, and what a second derivative goes through.

scores = softcap * tanh(scale q k / softcap) + bias + mask - slope |i + offset - j|, and -inf where hidden;
lse = log(exp(sink) + sum_j exp(scores_j)),  p_j = exp(scores_j - lse),  output = sum_j p_j v_j.
Scores of all queries and keys are in memory.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor


class AttentionOutput(NamedTuple):
    """The result of `attention`, and what was asked for beside it.

    output: [..., heads, queries, value_dim], of the query's dtype.
    lse: [..., heads, queries], float32 (float64 of float64), with a gradient; None unless return_lse.
    stats: by name, of lse's dtype. "entropy" and "row_max" [..., heads, queries], "column_sums" [..., heads, keys]. A
        backward pass through one raises RuntimeError.

    >>> out = attention(q, k, v, return_lse=True, return_stats="column_sums")
    >>> out.output, out.lse, out.stats["column_sums"]  # [2, 4, 64, 32], [2, 4, 64], [2, 4, 64]
    """

    output: Tensor
    # `| Any`, and not `| None`: a type checker then lets callers who asked for it use it.
    lse: Tensor | Any
    stats: dict[str, Tensor]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    is_causal: bool = False,
    causal_align: str = "top_left",
    scale: float | None = None,
    enable_gqa: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
    return_stats: tuple[str, ...] = (),
    arithmetic: torch.dtype = torch.float64,
) -> Tensor | AttentionOutput:
    """fused_softmax.attention of torch's operations in the dtype `arithmetic`, rounded once. Arguments: the same."""
    q, k, v = (each.to(arithmetic) for each in (query, key, value))
    if enable_gqa and q.shape[-3] != k.shape[-3]:
        group = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1]) if q.shape[-1] else 1.0
    if max(q.ndim, k.ndim, v.ndim) == 2:  # the one head has no dim
        sinks, alibi_slopes = (None if each is None else each.squeeze(0) for each in (sinks, alibi_slopes))
    z = q @ k.transpose(-2, -1) * scale
    z = z.expand(torch.broadcast_shapes(z.shape[:-2], v.shape[:-2]) + z.shape[-2:])
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    is_bool = attn_mask is not None and attn_mask.dtype == torch.bool
    for added in (bias, None if is_bool else attn_mask):
        z = z if added is None else z + added.to(arithmetic)
    behind = _behind(z, causal_align)
    if alibi_slopes is not None:
        z = z - alibi_slopes.to(arithmetic)[..., None, None] * behind.abs()
    for kept in (attn_mask if is_bool else None, *_within(behind, is_causal, window)):
        z = z if kept is None else z.masked_fill(~kept, -math.inf)
    weights, lse = _normalised(z, None if sinks is None else sinks.to(arithmetic), return_lse)
    p = weights[..., : z.shape[-1]]
    output = (p @ v).to(query.dtype)
    if not return_lse and not return_stats:
        return output
    beside = torch.float64 if query.dtype == torch.float64 else torch.float32
    with torch.no_grad():
        stats = {name: _stat(name, z, weights).to(beside) for name in return_stats}
    return AttentionOutput(output, None if lse is None else lse.to(beside), stats)


def _behind(z: Tensor, causal_align: str) -> Tensor:
    """How far each key lies behind each query, [queries, keys]."""
    n_queries, n_keys = z.shape[-2:]
    offset = n_keys - n_queries if causal_align == "bottom_right" else 0
    rows = torch.arange(n_queries, device=z.device)[:, None] + offset
    return rows - torch.arange(n_keys, device=z.device)


def _within(behind: Tensor, is_causal: bool, window: tuple[int | None, int | None] | None) -> list[Tensor]:
    """Which keys each query sees by the window and by causality."""
    left, right = (None, None) if window is None else window
    if is_causal:
        right = 0 if right is None else min(right, 0)
    return ([] if left is None else [behind <= left]) + ([] if right is None else [behind >= -right])


def _normalised(z: Tensor, sinks: Tensor | None, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """(the softmax of scores, that of a sink last; their lse). A query that sees nothing has weights 0 and lse -inf."""
    if sinks is not None:
        z = torch.cat([z, sinks[..., None, None].expand(*z.shape[:-1], 1)], -1)
    # Of 0 and not of -inf, whose gradient is NaN even where the gradient of the result is 0.
    empty = (z == -math.inf).all(-1, keepdim=True)
    filled = z.masked_fill(empty, 0.0)
    lse = torch.logsumexp(filled, -1).masked_fill(empty.squeeze(-1), -math.inf) if return_lse else None
    return torch.softmax(filled, -1).masked_fill(empty, 0.0), lse


def _stat(name: str, z: Tensor, weights: Tensor) -> Tensor:
    if name == "entropy":
        return torch.special.entr(weights).sum(-1)
    if name == "row_max":
        return z.amax(-1) if z.shape[-1] else z.new_full(z.shape[:-1], -math.inf)
    return weights[..., : z.shape[-1]].sum(-2)
