"""softmax, log_softmax and logsumexp of rows whose columns lie in shards over ranks.

Each rank reduces its columns to their lse. The ranks exchange these, one number a row, and merge them in rank order.
To a rank, the columns of the others are then one more logit of each row: a sink at their lse. Its part of the softmax
is the softmax of its own columns beside that sink.
Traffic of a shard of N columns: it is read for its lse, then read and written (3MN); its gradient is made of y and dy
by the two launches below (5MN), or by torch's operations.

The gradient of softmax and log_softmax takes two launches, `_stream_dot` and `_stream_backward`. The first sums a row's
part of y dy (of log_softmax dy), the ranks tell each other their sums, and the second writes the gradient by the sum of
all of them.
Traffic of a shard of N columns: y and dy are read twice, and the gradient is written once (5MN).
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fused_softmax.core.calls import contiguous_strides, kept
from fused_softmax.core.checks import DTYPES, arithmetic_in, dense_mask
from fused_softmax.core.device import device_of
from fused_softmax.core.kernels.spec import GradientSpec
from fused_softmax.core.launched import Launched
from fused_softmax.core.layout import alignment_of, flatten
from fused_softmax.core.plan import RowPlan, candidate
from fused_softmax.core.route import needs_grad, resolved, runs_here
from fused_softmax.core.runner import TLDTYPES, prepare, spec_of
from fused_softmax.ops.softmax.calls import LOGSUMEXP, logsumexp_backward, prepare_call
from fused_softmax.ops.softmax.scores import PLAIN, Scores, kind_of_scale, scores_of
from fused_softmax.ranks.first_derivative import once
from fused_softmax.ranks.groups import Over, Shards, gather, shards_of
from fused_softmax.ranks.launches import allocator

OfOne = Callable[..., Tensor]


def scores_of_shard(name: str, x: Tensor, dim: int, scale, mask, is_causal, masked_rows, sink) -> Scores:
    """The Scores of one rank's columns, or an error that names the argument."""
    mask = dense_mask(name, "mask", mask, x.device)
    scores = scores_of(name, x, dim, scale, mask, is_causal, masked_rows, sink)
    if x.ndim == 0:
        raise ValueError(f"{name}: group takes an input of at least one dim, got shape ()")
    if scores.is_causal:
        raise ValueError(f"{name}: is_causal needs whole rows, and with group a rank has some columns")
    if not isinstance(scores.scale, Tensor) and scores.scale == 0:
        raise ValueError(f"{name}: a scale of 0 needs whole rows, and with group a rank has some columns")
    if isinstance(scores.scale, Tensor):  # which nobody waits for to look at
        scores = replace(scores, scale=torch.where(scores.scale == 0, torch.nan, scores.scale), never_zero=True)
    return scores


def shards_of_dim(
    name: str, x: Tensor, dim: int, dtype: torch.dtype, scores: Scores, sizes: tuple[int, ...], over: Over
) -> Shards:
    """The shards of `dim`, of so many columns by rank."""
    dim %= x.ndim
    shape = tuple(size for d, size in enumerate(x.shape) if d != dim)
    of_scores = {"scale": scores.scale, "sink": scores.sink}
    asked = {
        "operation": name, "dtype": f"{x.dtype} to {dtype}", "dim": dim, "shape": shape,
        "masked_rows": scores.masked_rows,
        **{key: "a tensor" if isinstance(each, Tensor) else each for key, each in of_scores.items()},
    }  # fmt: skip
    if name != "logsumexp":  # ranks exchange in the backward pass too, in one of two ways
        graded = needs_grad(*scores.tensors)
        asked |= {"requires_grad": graded or needs_grad(x), "scores_require_grad": graded}
    return shards_of(name, sizes, math.prod(shape), over, x.device, asked)


def logsumexp_of_shards(
    x: Tensor, dim: int, keepdim: bool, scores: Scores, shards: Shards, dtype: torch.dtype
) -> Tensor:
    """lse of whole rows, in `dtype`."""
    held, own_scores = _held(x, dim, scores, shards)
    if (
        scores.plain
        and needs_grad(held)
        and dim % x.ndim == x.ndim - 1
        and _by_kernels(held)
        and flatten(held) is not None
    ):
        lse = _LseOfRows.apply(held, shards)
    else:
        lse = _Merged.apply(_lse_of(held, dim, x.dtype, own_scores), shards)
    if scores.sink is not None:
        lse = torch.logaddexp(lse, _sink_of(scores, lse))
    return (lse if keepdim else lse.squeeze(dim)).to(dtype)


def softmax_of_shards(
    of_one: OfOne, log: bool, x: Tensor, dim: int, dtype: torch.dtype, scores: Scores, shards: Shards
) -> Tensor:
    """This rank's columns of the softmax of whole rows; at padding 0, or its logarithm.

    of_one: the function of one device, `softmax`, or `log_softmax` where log is True.
    """
    columns = x.shape[dim]
    x, scores = _held(x, dim, scores, shards)
    if needs_grad(*scores.tensors):
        others = _Others.apply(_lse_of(x, dim, dtype, scores), shards, _hollow(scores))
        y = _beside(of_one, x, dim, dtype, scores, others)
    else:
        y = SoftmaxOfShard.apply(x, of_one, log, dim, dtype, scores, shards)
    if x.shape[dim] == columns:
        return y
    after = (0, 0) * (x.ndim - 1 - dim % x.ndim) + (0, columns - x.shape[dim])
    return torch.nn.functional.pad(y, after, value=-torch.inf if log else 0.0)


def _held(x: Tensor, dim: int, scores: Scores, shards: Shards) -> tuple[Tensor, Scores]:
    """x and its mask without padding."""
    if x.shape[dim] == shards.held:
        return x, scores
    mask, from_end = scores.mask, dim % x.ndim - x.ndim
    if mask is not None and mask.ndim >= -from_end and mask.shape[from_end] != 1:
        scores = replace(scores, mask=mask.narrow(from_end, 0, shards.held))
    return x.narrow(dim, 0, shards.held), scores


def _lse_of(x: Tensor, dim: int, dtype: torch.dtype, scores: Scores) -> Tensor:
    """lse of a shard's columns, as they are in `dtype`; `dim` kept, in the dtype of the arithmetic."""
    arithmetic = arithmetic_in(dtype)
    x = x if dtype in (x.dtype, arithmetic) and x.dtype.is_floating_point else x.to(dtype)
    if not x.shape[dim]:
        return x.sum(dim, keepdim=True, dtype=arithmetic) - torch.inf
    scores = replace(scores, sink=None)
    if _by_kernels(x, *scores.tensors) and not needs_grad(x, *scores.tensors):
        return _kept_lse(x, dim, arithmetic, scores)  # the operator plans and prepares such a launch at every call
    arguments = scores.operator_arguments()
    return torch.ops.fused_softmax.logsumexp.default(x, [dim], True, *arguments, dtype=arithmetic)


def _by_kernels(x: Tensor, *others: Tensor) -> bool:
    return x.numel() > 0 and x.dtype in DTYPES and runs_here(x, *others)


def _kept_lse(x: Tensor, dim: int, dtype: torch.dtype, scores: Scores) -> Tensor:
    options, others = (dim, dtype, scores.masked_rows), (kind_of_scale(scores.scale), scores.mask)
    prepared = LOGSUMEXP, x, (dim,), dtype, None, scores, True
    call = kept("lse of a shard", options, (x, *others), prepare_call, *prepared)
    return call(x, None, scores.scale, scores.mask, None)


def _sink_of(scores: Scores, lse: Tensor) -> Tensor:
    sink = scores.sink
    return sink.to(lse.dtype) if isinstance(sink, Tensor) else lse.new_full((), sink)  # type: ignore[arg-type]


def _beside(of_one: OfOne, x: Tensor, dim: int, dtype: torch.dtype, scores: Scores, others: Tensor) -> Tensor:
    """The softmax of a shard's columns, if those of other ranks have the lse `others`."""
    if not x.shape[dim]:
        return x.to(dtype) + others.to(dtype)  # nothing, by way of what has to be gathered in the backward pass too
    sink = others if scores.sink is None else torch.logaddexp(others, _sink_of(scores, others))
    return of_one(x, dim, dtype=dtype, **replace(scores, sink=sink).options())


def _hollow(scores: Scores) -> float:
    """What stands for a row of which no rank keeps anything: NaN, as its softmax; else it is the others' lse alone."""
    return torch.nan if scores.sink is None and scores.masked_rows == "nan" else -torch.inf


def _heard(own: Tensor, shards: Shards) -> Tensor:
    """[ranks, *own.shape]: a number of every row, from all ranks."""
    return gather(own.reshape(-1), shards).view(len(shards.sizes), *own.shape)


def _lse_of_others(heard: Tensor, rank: int, hollow: float) -> Tensor:
    others = [each for other, each in enumerate(heard) if other != rank]
    lse = torch.logsumexp(torch.stack(others), 0) if others else torch.full_like(heard[0], -torch.inf)
    return torch.where((heard == -torch.inf).all(0), hollow, lse)


class _Merged(torch.autograd.Function):
    """lse of whole rows, from a shard's."""

    @staticmethod
    def forward(ctx, own, shards):
        lse = torch.logsumexp(_heard(own, shards), 0)
        ctx.save_for_backward(own, lse)
        return lse

    @staticmethod
    @once("logsumexp")
    def backward(ctx, dlse):
        own, lse = ctx.saved_tensors
        return (own - lse).exp().masked_fill(own == -torch.inf, 0.0) * dlse, None


class _LseOfRows(torch.autograd.Function):
    """lse of whole rows, from a shard's columns, which are read again for the gradient p dlse."""

    @staticmethod
    def forward(ctx, x, shards):
        own = _kept_lse(x, x.ndim - 1, arithmetic_in(x.dtype), PLAIN)
        lse = torch.logsumexp(_heard(own, shards), 0)
        ctx.save_for_backward(x, lse)
        return lse

    @staticmethod
    @once("logsumexp")
    def backward(ctx, dlse):
        x, lse = ctx.saved_tensors
        (dlse,) = resolved(dlse)
        return logsumexp_backward(x, lse, dlse, (x.ndim - 1,), hides=True), None


class _Others(torch.autograd.Function):
    """lse of the other ranks' columns, from a shard's. Its gradient is gathered from these ranks."""

    @staticmethod
    def forward(ctx, own, shards, hollow):
        heard = _heard(own, shards)
        ctx.save_for_backward(heard)
        ctx.shards, ctx.hollow = shards, hollow
        return _lse_of_others(heard, shards.rank, hollow)

    @staticmethod
    @once("softmax")
    def backward(ctx, gradient):
        (heard,), shards = ctx.saved_tensors, ctx.shards
        gradients, own = _heard(gradient, shards), heard[shards.rank]
        total = torch.zeros_like(own)
        for rank, each in enumerate(gradients):
            if rank != shards.rank:
                of_others = _lse_of_others(heard, rank, ctx.hollow)
                total += (own - of_others).exp().masked_fill(own == -torch.inf, 0.0) * each
        return total, None, None


class SoftmaxOfShard(torch.autograd.Function):
    """softmax, or its logarithm, with the gradient of a shard's input, for which one sum a row is exchanged."""

    @staticmethod
    def forward(ctx, x, of_one, log, dim, dtype, scores, shards):
        heard = _heard(_lse_of(x, dim, dtype, scores), shards)
        others = _lse_of_others(heard, shards.rank, _hollow(scores))
        y = _beside(of_one, x, dim, dtype, scores, others)
        # A mask is not kept: what it hides is 0 in y.
        ctx.of_call = log, dim, x.dtype, scores.hides, None if scores.per_row is not None else scores.scale, shards
        ctx.save_for_backward(y, scores.per_row)
        return y

    @staticmethod
    @once("softmax")
    def backward(ctx, dy):
        (y, per_row), (log, dim, dtype, hides, scale, shards) = ctx.saved_tensors, ctx.of_call
        if per_row is None and takes(dy, y, dim, dtype, scale):
            summed = lambda own: gather(own, shards).sum(0)  # noqa: E731
            return gradient(dy, y, log, hides, scale, dtype, summed), *(None,) * 6
        scale = scale if per_row is None else per_row
        y_wide, dy = (each.to(arithmetic_in(y.dtype)) for each in (y, dy))
        own = dy if log else y_wide * dy
        total = _heard(own.sum(dim, keepdim=True), shards).sum(0)
        dz = dy - y_wide.exp() * total if log else y_wide * (dy - total)
        if log and hides:
            dz = dz.masked_fill(y == -torch.inf, 0.0)
        return (dz if scale is None else dz * scale).to(dtype), *(None,) * 6


def takes(dy: Tensor, y: Tensor, dim: int, dtype: torch.dtype, factor: float | None) -> bool:
    """Whether kernels make the gradient, in `dtype` and times the factor, if there is one."""
    # A kernel's number has 32 bits. torch rounds fp64 to 16 bits, because the interpreter does it wrongly.
    exact = (factor is None and dtype == y.dtype) or torch.float64 not in (y.dtype, dtype)
    fits = y.numel() > 0 and dim % y.ndim == y.ndim - 1 and y.dtype in DTYPES and dtype in DTYPES
    return fits and exact and dy.dtype == y.dtype and y.is_contiguous() and runs_here(dy, y)


def gradient(
    dy: Tensor, y: Tensor, log: bool, hides: bool, factor: float | None, dtype: torch.dtype,
    summed: Callable[[Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """dx of arguments that it `takes`. summed: gives [n_rows] of all ranks for those of this one."""
    dy = dy if flatten(dy) is not None else dy.contiguous()
    options = log, hides, factor is not None, dtype
    return kept("softmax gradient of shards", options, (y, dy), _prepare, dy, y, *options)(dy, y, factor, summed)


def _plan(dy: Tensor, y: Tensor, dx: Tensor) -> RowPlan:
    (n_rows, n_cols), gpu = y.shape, device_of(y.get_device())
    return candidate("stream", n_rows, n_cols, y.element_size(), gpu, alignment=alignment_of(y, dy, dx), inputs=2)


def _prepare(dy: Tensor, y: Tensor, log: bool, hides: bool, scaled: bool, dtype: torch.dtype) -> Launched:
    """call(dy, y, factor, summed) -> dx"""
    from fused_softmax.ops.softmax.kernels.gradient import _stream_backward, _stream_dot

    shape, strides = y.shape, contiguous_strides(y.shape)
    empty, state_dtype = allocator(y.device), arithmetic_in(y.dtype)
    rows: list = [flatten(each) for each in (dy, y, empty(tuple(shape), strides, dtype))]
    plan, device = _plan(*rows), y.get_device()
    spec = spec_of(
        GradientSpec, plan, y.dtype, device, itemsize=16 // plan.vector, out_dtype=TLDTYPES[dtype], log=log,
        hides=hides, scaled=scaled, stream=True,
    )  # fmt: skip
    of_parts = (plan.n_rows, plan.parts), (plan.parts, 1)
    tensors = {**dict(zip(("dy", "y", "dx"), rows, strict=True)), "d": empty(*of_parts, state_dtype)}
    of_dot = {name: tensors[name] for name in ("dy", "y", "d")}
    first = prepare(_stream_dot, plan, replace(spec, out_dtype=None, scaled=False), of_dot, device=device).__call__
    numbers = ("factor",) if scaled else ()
    spec = replace(spec, lanes=plan.lanes)
    second = prepare(_stream_backward, plan, spec, tensors, {"factor": 1.0}, device=device, numbers=numbers).__call__

    def call(dy, y, factor, summed):
        d = empty(*of_parts, state_dtype)
        first(dy, y, d)
        if plan.parts == 1:
            d = summed(d.view(-1))
        else:  # one part stands for all
            total = summed(d.sum(1))
            d = torch.zeros_like(d)
            d[:, 0] = total
        dx = empty(tuple(shape), strides, dtype)
        second(dy, y, dx, d, *((factor,) if scaled else ()))
        return dx

    return Launched(call)
