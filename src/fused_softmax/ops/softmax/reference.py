"""What softmax is, twice: torch in float64, and the kernels' recurrences in plain Python, block by block.

y = exp(x - m) / s,  m = max x,  s = sum exp(x - m).  Tests hold kernels to the first; the second shows what a kernel's
state is after each block, for the page and for readers.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

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
    # A number would become one of torch's default dtype, which may round it to 0.
    scale = torch.as_tensor(scale, dtype=getattr(scale, "dtype", torch.float64), device=y.device)
    return torch.where(scale == 0, y.detach(), y)


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
