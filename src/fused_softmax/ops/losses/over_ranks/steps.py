"""The loss of a shard, whoever makes its numbers and however ranks exchange them, and its gradient for autograd.

Either kernels make the numbers, as one kept call with its launches, or torch's operations do. Ranks exchange them by a
collective, by messages in each other's memory (`Shards.by_peers`), or in the launch that reads the logits (`whole`). A
kept call serves all calls with like tensors, options and shards. It holds none of these, nor their group.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fused_softmax.core.calls import contiguous_strides, find, keep, kept
from fused_softmax.core.checks import arithmetic_of
from fused_softmax.core.launched import Launched
from fused_softmax.core.no_gradient import LOSS, refuse, saved_of
from fused_softmax.core.route import needs_grad, resolved
from fused_softmax.ops.losses.launches import LossRows, with_whole_rows
from fused_softmax.ops.losses.options import Loss, LossNumbers
from fused_softmax.ops.losses.output import STATISTICS, Wanted
from fused_softmax.ops.losses.over_ranks.launches import (
    HEADER,
    OfShard,
    prepare_gradient,
    prepare_merge,
    prepare_telling,
    rows_numbers,
    takes,
)
from fused_softmax.ops.losses.over_ranks.states import (
    States,
    coefficients_of,
    counts_of,
    gradient_of,
    losses_of,
    reduced,
    shard_of,
    states_of,
    stats_of,
)
from fused_softmax.ops.losses.overwritten import Overwritten
from fused_softmax.ops.losses.sums import prepare_finish, prepare_totals, totals_parts
from fused_softmax.ranks.first_derivative import once
from fused_softmax.ranks.groups import Shards, notice_of
from fused_softmax.ranks.launches import allocator

Whole = Callable[[Tensor, Tensor, Loss, Shards], Tensor]


class OfCall(NamedTuple):
    """What a call has beside its tensors.

    over: groups over whose ranks the rows lie. whole: what makes the states of whole rows, where a launch does. weight:
    of the shard's classes, and numbers: `_numbers`, where kernels make the losses.
    """

    loss: Loss
    shards: Shards
    over: Sequence[Any]
    whole: Whole | None
    weight: Tensor | None = None
    numbers: Any = None


class Way(NamedTuple):
    """What makes the losses of calls: kernels, prepared for calls like one, or torch's operations, for any.

    run: (x, target, OfCall) -> ((loss, lse, z-loss, *statistics), tensors that the gradient takes)
    gradient: (x, dx, target, these tensors, gradients of (loss, z-loss, lse), OfCall) -> dx, which is new if none is
        given.
    beside: whether more than the loss is wanted. inplace: whether the gradient is written over the logits.
    """

    run: Callable[[Tensor, Tensor, OfCall], tuple[tuple, Sequence[Tensor | None]]]
    gradient: Callable[..., Tensor]
    beside: bool
    inplace: bool


def sharded(
    x: Tensor, target: Tensor, loss: Loss, shards: Shards, wanted: Wanted, dtype: torch.dtype,
    over: Sequence[Any] = (), whole: Whole | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """(loss, lse, z-loss, statistics) of logits [n, columns] by targets [n]. loss: its weight is [columns].

    over: groups over whose ranks the rows lie: a mean is over all rows, and what is returned is this rank's part of it.
    whole: what makes m, ls and the targets' logits of whole rows [3, n] of a shard, if no other exchange is needed.
    What is not wanted may be None.
    """
    options = (
        *wanted, dtype, torch.is_grad_enabled(), loss.reduction, *loss.key, loss.scale == 0, *shards[1:4],
        shards.digest is None, shards.by_peers is None, whole is None, len(over) > 0,
    )  # fmt: skip
    call = find("losses over ranks", options, x, target, loss.weight)
    if call is None and takes(x, target, loss):
        launched = _prepare(x, target, loss, shards, wanted, dtype, len(over) > 0, whole is not None)
        call = keep(launched, "losses over ranks", options, x, target, loss.weight)
    if call is not None:
        return call(x, target, loss, shards, over, whole)
    way = Way(partial(_by_operations, wanted, dtype), _gradient_by_operations, wanted.beside, _is_inplace(wanted, loss))
    found = _Losses.apply(x, target, way, OfCall(loss, shards, over, whole))
    return found if wanted.beside else (found, None, None)


def _is_inplace(wanted: Wanted, loss: Loss) -> bool:
    return wanted.inplace and loss.reduction != "none"


class _Losses(torch.autograd.Function):
    """(loss, lse, z-loss, statistics) of rows, the same on every rank, with the gradient of this rank's logits."""

    @staticmethod
    def forward(ctx, x, target, way, of_call):
        ctx.set_materialize_grads(False)
        results, kept = way.run(x, target, of_call)
        ctx.way, ctx.of_call = way, of_call
        ctx.overwritten = Overwritten(x) if way.inplace else None
        ctx.save_for_backward(x if ctx.overwritten is None else None, target, *kept)
        if not way.beside:
            return results[0]
        ctx.mark_non_differentiable(*results[5:])
        return results

    @staticmethod
    @once("cross_entropy")
    def backward(ctx, dy, dlse=None, dz=None, *of_stats):
        refuse("cross_entropy", STATISTICS, of_stats, LOSS)
        x, *others = saved_of(ctx, "cross_entropy")
        # Hooks of saved tensors may return other strides.
        x = x if x is None else with_whole_rows(x)
        target, *kept = (each if each is None else each.contiguous() for each in others)
        dy, dlse, dz = resolved(dy, dlse, dz)
        # Results that are added have one gradient, and a guard takes no tensor twice.
        dz, dlse = (None if each is None else each.detach() for each in (dz, dlse))
        dx = None
        if ctx.overwritten is not None:
            x = dx = ctx.overwritten.memory()
        return ctx.way.gradient(x, dx, target, kept, (dy, dz, dlse), ctx.of_call), None, None, None


# As _Losses.apply, less its search for functorch's wrappers: a call under a transform is not prepared.
_differentiated = super(torch.autograd.Function, _Losses).apply


def _by_operations(wanted: Wanted, dtype: torch.dtype, x: Tensor, target: Tensor, of_call: OfCall):
    """`Way.run` by torch's operations, and kernels that read and write logits where they take them."""
    loss, shards, over, whole, *_ = of_call
    shard = shard_of(x, target, loss, shards)
    states = states_of(shard) if whole is None else States(*whole(x, target, loss, shards).unbind())
    counts = counts_of(shard, states, over)
    y, z = losses_of(shard, states, counts)
    of_loss, of_z = reduced((y, z), counts, loss)
    results = (of_loss + of_z).to(dtype), states.lse, of_z.to(dtype), *stats_of(shard, states, counts, y)
    return results, (*states[:6], counts.of_loss, counts.of_z)


def _gradient_by_operations(x, dx, target, kept, beside, of_call):
    *of_rows, of_loss, of_z = kept
    shard, states = shard_of(x, target, of_call.loss, of_call.shards), States(*of_rows)
    counts = counts_of(shard, states, totals=() if of_loss is None else (of_loss, of_z))
    dy, dz, dlse = (None if each is None else each.to(states.lse.dtype) for each in beside)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if dx is None else dx
    return gradient_of(shard, states, coefficients_of(shard, states, counts, dy, dlse, dz), dx)


def _numbers(loss: Loss) -> tuple[LossNumbers, LossNumbers]:
    """The numbers of the loss, and those of the launches that read and write rows."""
    numbers = loss.numbers
    return numbers, rows_numbers(loss, numbers)


def _own_weight(loss: Loss, x: Tensor, held: int) -> Tensor | None:
    return None if loss.weight is None else loss.weight.detach().to(arithmetic_of(x))[:held].contiguous().resolve_neg()


def _prepare(
    x: Tensor, target: Tensor, loss: Loss, shards: Shards, wanted: Wanted, dtype: torch.dtype, spread: bool,
    merges: bool,
) -> Launched:  # fmt: skip
    """call(x, target, loss, shards, over, whole) -> (loss, lse, z-loss, *statistics)

    spread: whether the rows lie over ranks too. merges: whether `whole` merges the states of rows.
    """
    held, differentiates, inplace = shards.held, needs_grad(x), _is_inplace(wanted, loss)
    plain = _numbers(loss) if loss.plain and not loss.smooth else None
    with torch.no_grad():
        run = _prepare_run(x, target, loss, shards, wanted, dtype, spread, merges)
    kinds = *loss.key, *shards[1:4], inplace
    way = Way(run, partial(_gradient_by_kernels, kinds, inplace), wanted.beside, inplace)

    def call(x, target, loss, shards, over, whole):
        weight = None if loss.weight is None else _own_weight(loss, x, held)
        of_call = OfCall(loss, shards, over, whole, weight, plain or _numbers(loss))
        if not differentiates:
            return run(x, target, of_call)[0]
        found = _differentiated(x, target, way, of_call)
        return found if way.beside else (found, None, None)

    return Launched(call)


def _prepare_run(
    x: Tensor, target: Tensor, loss: Loss, shards: Shards, wanted: Wanted, dtype: torch.dtype, spread: bool,
    merges: bool,
) -> Callable[[Tensor, Tensor, OfCall], tuple]:  # fmt: skip
    """`Way.run`; what the gradient takes is the states of rows, and a mean's totals."""
    held, n_rows, device, ranks, empty = shards.held, len(x), x.device, len(shards.sizes), allocator(x.device)
    padded, weighted, mean, by_row = held < x.shape[1], loss.weight is not None, loss.mean, loss.reduction == "none"
    bare, ignore_index, z_loss = replace(loss, weight=None), loss.ignore_index, wanted.z_loss
    given = OfShard(x[:, :held], target, replace(loss, weight=_own_weight(loss, x, held)), shards)
    headers = notice = tell = None
    if merges:
        heard = empty((1, 3, n_rows), (3 * n_rows, n_rows, 1), torch.float32)
    else:
        tell, heard = prepare_telling(given), empty((ranks * given.length,), (1,), torch.float32)
        if given.headed:
            headers = empty((ranks, HEADER), (HEADER, 1), torch.float32)
            notice = notice_of(shards.group, ranks, device)
    merge = prepare_merge(given, heard, headers, notice, 1 if merges else ranks, wanted.lse)
    count = prepare_totals(target, bare, shards.n_classes, torch.float32).__call__ if mean and not weighted else None
    total = None if by_row else _prepare_total(x, loss, 1 if weighted or spread else totals_parts(n_rows), dtype)

    def run(x, target, of_call):
        loss, shards, over, whole, weight, numbers = of_call
        if tell is None:
            heard, headers, notice = whole(x, target, loss, shards), None, None
        else:
            heard, headers = tell(x[:, :held] if padded else x, target, weight, numbers, shards)
            notice = None if headers is None else notice_of(shards.group, ranks, device)
        states, lse, values, z, counted, entropy, best_at = merge(heard, headers, notice, target, numbers[0])
        totals = None
        if mean:
            totals = counted if count is None else count(target, None)
            if weighted or spread:  # as many numbers on every rank, however many rows it has
                totals = totals.sum(1, keepdim=True)
            for group in over:
                dist.all_reduce(totals, group=group)
        if total is None:
            y, z = (values if z is None else values + z).to(dtype), None if z is None else z.to(dtype)
        else:
            y, z = total(values, z, totals, None, None)
        if z is None and z_loss:
            z = torch.zeros_like(y)
        if entropy is None:
            return (y, lse, z), (states, totals)
        correct = (best_at == target) & (target.long() != ignore_index)  # of uint8, -100 would be 156
        return (y, lse, z, values.clone(), entropy, best_at, correct), (states, totals)

    return run


def _prepare_total(x: Tensor, loss: Loss, parts: int, dtype: torch.dtype) -> Callable[..., tuple]:
    """What sums the losses of rows, by totals [2, parts]: call(values, z, totals, None, None) -> (loss, z-loss)"""
    values = torch.empty(len(x), dtype=torch.float32, device=x.device)
    totals = torch.empty(2, parts, dtype=torch.float32, device=x.device) if loss.mean else None
    z = torch.empty_like(values) if loss.lse_square_scale else None
    return prepare_finish(LossRows(None, None, values, z), totals, None, loss, 0, dtype).__call__


def _dense(dy: Tensor | None) -> Tensor | None:
    """A gradient of one value; or of one value a row, which then lie side by side."""
    return dy if dy is None or not dy.ndim else dy.contiguous()


def _gradient_by_kernels(
    kinds: tuple, inplace: bool, x: Tensor, dx: Tensor | None, target: Tensor, kept_by: Sequence[Tensor | None],
    beside: Sequence[Tensor | None], of_call: OfCall,
) -> Tensor:  # fmt: skip
    """The gradient by a kept call, which is looked up by itself, by kinds and tensors.

    Autograd may have moved what it saved.
    """
    tensors = target, of_call.weight, *kept_by, *map(_dense, beside)
    prepared = x, tensors, replace(of_call.loss, weight=of_call.weight), of_call.shards, inplace
    call = kept("gradients over ranks", kinds, (x, *tensors), _prepare_gradient, *prepared)
    return call(x, dx, *tensors[:4], tensors[4:], of_call.numbers)


def _prepare_gradient(x: Tensor, tensors: tuple, loss: Loss, shards: Shards, inplace: bool) -> Launched:
    """call(x, dx, target, weight, states, totals, beside, numbers) -> dx, which is new where none is given."""
    target, _, states, totals, *beside = tensors
    held, shape, dtype, empty = shards.held, tuple(x.shape), x.dtype, allocator(x.device)
    padded, strides = held < shape[1], contiguous_strides(shape)
    write: Any = None
    if held:
        dx = x.detach() if inplace else empty(shape, strides, dtype)
        given = OfShard(x[:, :held], target, loss, shards)
        write = prepare_gradient(given, states, totals, tuple(beside), dx[:, :held])

    def call(x, dx, target, weight, states, totals, beside, numbers):
        if dx is None:
            dx = empty(shape, strides, dtype)
        own, of_own = x, dx
        if padded:
            dx[:, held:] = 0
            own, of_own = x[:, :held], dx[:, :held]
        if write is not None:
            write(own, target, weight, states, totals, beside, numbers, of_own)
        return dx

    return Launched(call)
