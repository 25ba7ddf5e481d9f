"""What softmax is, twice: torch in float64, and the kernels' recurrences in plain Python, block by block.

y = exp(x - m) / s,  m = max x,  s = sum exp(x - m).  Tests hold kernels to the first; the second shows what a kernel's
state is after each block, for the page and for readers.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor


def softmax(input: Tensor, dim: int = -1, **arguments) -> Tensor:
    """fused_softmax.softmax of torch's operations, in float64: one rounding from the truth. Arguments: `of_scores`."""
    return of_scores(_but_the_sink(torch.softmax, arguments), 0.0, input, dim, **arguments)


def log_softmax(input: Tensor, dim: int = -1, **arguments) -> Tensor:
    """fused_softmax.log_softmax likewise."""
    y = of_scores(_but_the_sink(torch.log_softmax, arguments), -math.inf, input, dim, **arguments)
    scale = arguments.get("scale")
    if scale is None or arguments.get("sink") is not None:
        return y
    # Of scale 0 it is a logarithm of 1 or of 0, wherever the scores move.
    return torch.where(torch.as_tensor(scale, device=y.device) == 0, y.detach(), y)


def logsumexp(input: Tensor, dim: int | Sequence[int], keepdim: bool = False, **arguments) -> Tensor:
    """fused_softmax.logsumexp likewise."""
    return of_scores(partial(torch.logsumexp, keepdim=keepdim), -math.inf, input, dim, **arguments)


def of_scores(
    function,
    nothing: float,
    input: Tensor,
    dim,
    *,
    dtype: torch.dtype | None = None,
    scale: float | Tensor | None = None,
    mask: Tensor | None = None,
    is_causal: bool = False,
    masked_rows: str = "nan",
    sink: float | Tensor | None = None,
    arithmetic: torch.dtype = torch.float64,
) -> Tensor:
    """function(scores of the input, dim) in the dtype `arithmetic`, rounded to the dtype of the result.

    The last of the scores is the sink, if there is one.
    nothing: what masked_rows="zero" gives a row of which nothing is kept.
    """
    result = input.dtype if dtype is None else dtype
    if not result.is_floating_point:
        raise TypeError(f"there is no result of dtype {result}; give a floating-point dtype")
    z = scores(input.to(result).to(arithmetic), dim, scale, mask, is_causal)
    if sink is not None:
        (dim,) = dim if isinstance(dim, Sequence) else (dim,)
        z = torch.cat([z if z.ndim else z.view(1), _sink_beside(z, dim, sink)], dim)
    if masked_rows != "zero":
        y = function(z, dim)
    else:
        empty = (z == -math.inf).all(dim, keepdim=True)
        y = function(z.masked_fill(empty, 0.0), dim)  # of 0 and not of -inf, whose gradient is NaN even where dy is 0
        y = y.masked_fill(empty if y.ndim == z.ndim else empty.reshape(y.shape), nothing)
    return (y if input.ndim else y.reshape(())).to(result)


def _sink_beside(z: Tensor, dim: int, sink: float | Tensor) -> Tensor:
    """The sink in the dtype of z and in its shape, with size 1 in dim; of z without dims as of one element."""
    sink = (
        sink.to(z.device, z.dtype) if isinstance(sink, Tensor) else torch.full((), sink, dtype=z.dtype, device=z.device)
    )
    sizes = list(z.shape or (1,))
    sizes[dim] = 1
    return sink.expand(sizes)


def _but_the_sink(function, arguments):
    """function, and of its result all but the sink's column, if the arguments have a sink."""
    if arguments.get("sink") is None:
        return function
    return lambda z, dim: function(z, dim).narrow(dim, 0, z.shape[dim] - 1)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    softcap: float | None = None,
    scale: float = 1.0,
    lse_square_scale: float = 0.0,
    dtype: torch.dtype | None = None,
    arithmetic: torch.dtype = torch.float64,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, lse, z-loss) of fused_softmax.cross_entropy of torch's operations; a target that is no class gives NaN."""
    result = input.dtype if dtype is None else dtype
    class_dim = 0 if input.ndim == 1 else 1
    z = (input.to(arithmetic) * scale).movedim(class_dim, -1)
    n_classes = z.shape[-1]
    t: Any = None
    counts: Any = None
    if not target.is_floating_point():
        t = target.long()
        counts = t != ignore_index
    if lse is None:
        z, known = _spared(z, counts, softcap)
        lse, log_p = torch.logsumexp(z, -1), torch.log_softmax(z, -1)
        lse = lse if known is None else torch.where(counts | known.isfinite(), lse, known)
    else:  # that of longer rows: its value stays as it is given, and its derivative by z is p
        lse = lse.detach().to(arithmetic)
        z, of_rows = (torch.where(on, each, 0.0) for on, each in ((counts.unsqueeze(-1), z), (counts, lse)))
        z = _capped(z, softcap)
        p = torch.exp(z - of_rows.unsqueeze(-1))
        log_p = z - (of_rows + (p - p.detach()).sum(-1)).unsqueeze(-1)
    weights = torch.ones(n_classes, dtype=arithmetic, device=z.device) if weight is None else weight.to(arithmetic)
    z_loss = lse_square_scale * lse.square()
    if counts is None:
        q = target.to(arithmetic).movedim(class_dim, -1) * (1.0 - label_smoothing) + label_smoothing / n_classes
        loss = -(weights * q * log_p).sum(-1)
        of_loss = of_z = torch.tensor(float(lse.numel()), dtype=arithmetic, device=z.device)
    else:
        wrong = counts & ((t < 0) | (t >= n_classes))
        kept = counts & ~wrong
        t = torch.where(kept, t, 0)
        w = weights.gather(0, t.flatten()).view(t.shape)  # and not weights[t], which vmap refuses of one target
        loss = -w * log_p.gather(-1, t.unsqueeze(-1)).squeeze(-1)
        if label_smoothing:
            loss = (1.0 - label_smoothing) * loss - label_smoothing / n_classes * (weights * log_p).sum(-1)
        spoilt = torch.where(wrong, math.nan, 1.0).to(arithmetic)  # multiplied, so that the gradient is NaN too
        loss, z_loss = (each.masked_fill(~counts, 0.0) * spoilt for each in (loss, z_loss))
        of_loss, of_z = (torch.where(kept, w, 0.0).sum() if weight is not None else counts.sum()), counts.sum()
    if reduction != "none":
        loss, z_loss = loss.sum(), z_loss.sum()
    if reduction == "mean":
        loss, z_loss = loss / of_loss, z_loss / of_z
    if lse_square_scale:
        total = loss + z_loss
    else:  # 0 and no product with 0, for an lse may be infinite, and a mean of nothing
        total, z_loss = loss, loss.masked_fill(torch.ones_like(loss, dtype=torch.bool), 0.0)
    return total.to(result), lse, z_loss.to(result)


def _spared(z: Tensor, counts: Tensor | None, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """(z capped, and 0 in rows that do not count and whose lse is not finite; the lse of all rows as they were).

    Of such a row's gradient of 0, torch's operations would make NaN.
    """
    if counts is None:
        return _capped(z, softcap), None
    known = torch.logsumexp(_capped(z.detach(), softcap), -1)
    return _capped(torch.where((counts | known.isfinite()).unsqueeze(-1), z, 0.0), softcap), known


def _capped(z: Tensor, softcap: float | None) -> Tensor:
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None,
    dtype: torch.dtype | None = None, arithmetic: torch.dtype = torch.float64, **arguments,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, lse, z-loss) of fused_softmax.linear_cross_entropy likewise, all logits at once.

    arguments: `cross_entropy`'s.
    """
    bias = None if linear_bias is None else linear_bias.to(arithmetic)
    z = torch.nn.functional.linear(input.to(arithmetic), linear_weight.to(arithmetic), bias)
    if z.ndim > 2:
        z = z.movedim(-1, 1)
        target = target.movedim(-1, 1) if target.is_floating_point() else target
    return cross_entropy(z, target, dtype=dtype or input.dtype, arithmetic=arithmetic, **arguments)


def token_stats(
    input: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, *, softcap: float | None = None, scale: float = 1.0, lse_square_scale: float = 0.0,
    arithmetic: torch.dtype = torch.float64, **_,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, entropy, likeliest class, whether that is the target) of every target, in the dtype `arithmetic`."""
    with torch.no_grad():
        class_dim = 0 if input.ndim == 1 else 1
        of_tokens, lse, z_loss = cross_entropy(
            input, target, weight, ignore_index, "none", label_smoothing, softcap=softcap, scale=scale,
            lse_square_scale=lse_square_scale, dtype=arithmetic, arithmetic=arithmetic,
        )  # fmt: skip
        logits = input.to(arithmetic) * scale
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        p = torch.softmax(logits, class_dim)
        entropy = lse - torch.where(p == 0, 0.0, p * logits).sum(class_dim)
        predicted = logits.argmax(class_dim)
        if target.is_floating_point():
            counts, best = torch.ones_like(predicted, dtype=torch.bool), target.argmax(class_dim)
        else:
            counts, best = target.long() != ignore_index, target
        of_tokens = of_tokens - z_loss if lse_square_scale else of_tokens
        return (
            of_tokens, entropy.masked_fill(~counts, 0.0), predicted.masked_fill(~counts, 0),
            (predicted == best) & counts,
        )  # fmt: skip


def scores(z: Tensor, dim, scale: float | Tensor | None, mask: Tensor | None, is_causal: bool) -> Tensor:
    """z * scale + mask, with -inf wherever a bool mask or causality hides."""
    greedy = None
    if scale is not None:
        scale = (
            scale.to(z.device)
            if isinstance(scale, Tensor)
            else torch.tensor(scale, dtype=torch.float64, device=z.device)
        )
        greedy = scale == 0  # before it is rounded
        z = z * torch.where(greedy, 1.0, scale.to(z.dtype))
    if mask is not None:
        z = z.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else z + mask.to(z.dtype)
    if is_causal:
        n_queries, n_keys = z.shape[-2:]
        kept = torch.ones(n_queries, n_keys, dtype=torch.bool, device=z.device).tril(n_keys - n_queries)
        z = z.masked_fill(~kept, -math.inf)
    if greedy is not None and z.ndim and z.numel():
        z = z.masked_fill(greedy & ~_first_max(z, dim) & ~z.isnan(), -math.inf)
    return z


def _first_max(z: Tensor, dim: int | Sequence[int]) -> Tensor:
    """Where the first of the greatest along `dim` stands, dims taken in order; NaN is passed over."""
    dims = [d % z.ndim for d in (dim if isinstance(dim, Sequence) else (dim,))]
    ends = list(range(-len(dims), 0))
    last = z.nan_to_num(-math.inf, math.inf, -math.inf).movedim(dims, ends).flatten(-len(dims))
    first = torch.zeros_like(last, dtype=torch.bool).scatter(-1, last.argmax(-1, keepdim=True), True)
    return first.unflatten(-1, [z.shape[d] for d in dims]).movedim(ends, dims)


def softmax_fp64(input: Tensor, dim: int = -1) -> Tensor:
    """torch.softmax computed in float64 and left there: the truth that errors are measured against."""
    return torch.softmax(input.double(), dim)


@dataclass(frozen=True)
class OnlineStep:
    """What one block, columns start to stop, does to the state (m, s) of its row.

    s_after = s_before * rescale + block_sum, where block_sum is sum exp(x - m_after) over the block.
    """

    start: int
    stop: int
    block_max: float
    m_before: float
    m_after: float
    rescale: float
    block_sum: float
    s_before: float
    s_after: float


def online_steps(row: Sequence[float], block: int) -> Iterator[OnlineStep]:
    """The online recurrence over a row, one step for each block of columns; the last step's (m, s) is the row's."""
    m, s = -math.inf, 0.0
    for start, stop in _blocks(row, block):
        values = row[start:stop]
        block_max = _maximum(values)
        m_after = max(m, block_max)
        # exp(-inf - -inf) is NaN; until a finite value is seen any finite origin gives the exp(-inf) = 0 that is meant.
        origin = 0.0 if m_after == -math.inf else m_after
        rescale = math.exp(m - origin)
        block_sum = _exp_sum(values, origin)
        s_after = s * rescale + block_sum
        yield OnlineStep(start, stop, block_max, m, m_after, rescale, block_sum, s, s_after)
        m, s = m_after, s_after


@dataclass(frozen=True)
class MaxStep:
    """First pass: a block's maximum, and the row's so far."""

    start: int
    stop: int
    block_max: float
    m: float


@dataclass(frozen=True)
class SumStep:
    """Second pass: a block's sum exp(x - m) with the row's final m, and the row's so far."""

    start: int
    stop: int
    block_sum: float
    s: float


@dataclass(frozen=True)
class WriteStep:
    """Third pass: a block's outputs."""

    start: int
    stop: int
    y: tuple[float, ...]


def three_pass_steps(row: Sequence[float], block: int) -> Iterator[MaxStep | SumStep | WriteStep]:
    """The tiled softmax that reads a row three times: all its MaxSteps, then its SumSteps, then its WriteSteps."""
    m = -math.inf
    for start, stop in _blocks(row, block):
        block_max = _maximum(row[start:stop])
        m = max(m, block_max)
        yield MaxStep(start, stop, block_max, m)
    s = 0.0
    for start, stop in _blocks(row, block):
        block_sum = _exp_sum(row[start:stop], m)
        s += block_sum
        yield SumStep(start, stop, block_sum, s)
    for start, stop in _blocks(row, block):
        # A row of nothing but -inf makes every term NaN, as in torch, so s is 0 nowhere.
        yield WriteStep(start, stop, tuple(math.exp(x - m) / s for x in row[start:stop]))


def _blocks(row: Sequence[float], block: int) -> Iterator[tuple[int, int]]:
    if block < 1:
        raise ValueError(f"block must be at least 1, got {block}")
    return ((start, min(start + block, len(row))) for start in range(0, len(row), block))


def _maximum(values: Sequence[float]) -> float:
    """The greatest value; NaN is passed over here, as on the GPU, and reaches the result through the sum."""
    return max((x for x in values if not math.isnan(x)), default=-math.inf)


def _exp_sum(values: Sequence[float], origin: float) -> float:
    return math.fsum(math.exp(x - origin) for x in values)
