"""The loss of a shard by kernels as one kept call: its launches, the exchange among them, its gradient for autograd.

A kept call serves all calls with like tensors, options and shards. It holds none of these, nor their group.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fused_softmax.core.calls import contiguous_strides, find, keep, kept
from fused_softmax.core.checks import arithmetic_of
from fused_softmax.core.launched import Launched
from fused_softmax.core.no_gradient import LOSS, refuse, saved_of
from fused_softmax.core.route import needs_grad, resolved
from fused_softmax.ops.losses.calls import LossRows
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
from fused_softmax.ops.losses.overwritten import Overwritten
from fused_softmax.ops.losses.sums import prepare_finish, prepare_totals, totals_parts
from fused_softmax.ranks.first_derivative import once
from fused_softmax.ranks.groups import Shards, notice_of
from fused_softmax.ranks.launches import allocator

Whole = Callable[[Tensor, Tensor, Loss, Shards], Tensor]


class OfGradient(NamedTuple):
    """kinds: what finds a kept gradient, beside tensors. inplace: whether the gradient is written over the logits."""

    kinds: tuple
    inplace: bool


def losses_by_kernels(
    x: Tensor, target: Tensor, loss: Loss, shards: Shards, wanted: Wanted, dtype: torch.dtype, over: Sequence[Any],
    whole: Whole | None,
) -> tuple[Tensor | None, ...] | None:  # fmt: skip
    """What `states.sharded` gives, without an lse that is not wanted; None if kernels do not make it."""
    if loss.scale == 0:
        return None
    options = (
        *wanted, dtype, torch.is_grad_enabled(), loss.reduction, *loss.key(), *shards[1:4],
        shards.digest is None, shards.by_peers is None, whole is None, len(over) > 0,
    )  # fmt: skip
    call = find("losses over ranks", options, x, target, loss.weight)
    if call is None:
        if not takes(x, target):
            return None
        launched = _prepare(x, target, loss, shards, wanted, dtype, len(over) > 0, whole is not None)
        call = keep(launched, "losses over ranks", options, x, target, loss.weight)
    return call(x, target, loss, shards, over, whole)


def _numbers(loss: Loss) -> tuple[LossNumbers, LossNumbers]:
    """The numbers of the loss, and those of the launches that read and write rows."""
    numbers = loss.numbers()
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
    held, differentiates, beside = shards.held, needs_grad(x), wanted.beside
    plain = _numbers(loss) if loss.plain and not loss.smooth else None
    inplace = wanted.inplace and loss.reduction != "none"
    of_gradient = OfGradient((*loss.key(), *shards[1:4], inplace), inplace)
    with torch.no_grad():
        run = _prepare_run(x, target, loss, shards, wanted, dtype, spread, merges)

    def call(x, target, loss, shards, over, whole):
        weight = None if loss.weight is None else _own_weight(loss, x, held)
        of_call = weight, plain or _numbers(loss), loss, shards, over, whole
        if not differentiates:
            return run(x, target, of_call)[0]
        if beside:
            return _differentiated(x, target, run, of_call, of_gradient, True)
        return _differentiated(x, target, run, of_call, of_gradient, False), None, None

    return Launched(call)


def _prepare_run(
    x: Tensor, target: Tensor, loss: Loss, shards: Shards, wanted: Wanted, dtype: torch.dtype, spread: bool,
    merges: bool,
) -> Callable[[Tensor, Tensor, tuple], tuple]:  # fmt: skip
    """run(x, target, of_call) -> ((loss, lse, z-loss, *statistics), the states of rows, a mean's totals)

    of_call: the weight of the shard's classes, `_numbers`, and the loss, shards, over and whole of a call.
    """
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
        weight, numbers, loss, shards, over, whole = of_call
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
            return (y, lse, z), states, totals
        correct = (best_at == target) & (target.long() != ignore_index)  # of uint8, -100 would be 156
        return (y, lse, z, values.clone(), entropy, best_at, correct), states, totals

    return run


def _prepare_total(x: Tensor, loss: Loss, parts: int, dtype: torch.dtype) -> Callable[..., tuple]:
    """What sums the losses of rows, by totals [2, parts]: call(values, z, totals, None, None) -> (loss, z-loss)"""
    values = torch.empty(len(x), dtype=torch.float32, device=x.device)
    totals = torch.empty(2, parts, dtype=torch.float32, device=x.device) if loss.mean else None
    z = torch.empty_like(values) if loss.lse_square_scale else None
    return prepare_finish(LossRows(None, None, values, z), totals, None, loss, 0, dtype).__call__


class _Losses(torch.autograd.Function):
    """(loss, lse, z-loss, statistics) of rows, the same on every rank, with the gradient of this rank's logits."""

    @staticmethod
    def forward(ctx, x, target, run, of_call, of_gradient, beside):
        ctx.set_materialize_grads(False)
        results, states, totals = run(x, target, of_call)
        ctx.of_call, ctx.of_gradient = of_call[:4], of_gradient
        ctx.overwritten = Overwritten(x) if of_gradient.inplace else None
        ctx.save_for_backward(x if ctx.overwritten is None else None, target, states, totals)
        if not beside:
            return results[0]
        ctx.mark_non_differentiable(*results[5:])
        return results

    @staticmethod
    @once("cross_entropy")
    def backward(ctx, dy, dlse=None, dz=None, *of_stats):
        refuse("cross_entropy", STATISTICS, of_stats, LOSS)
        x, target, states, totals = saved_of(ctx, "cross_entropy")
        dy, dlse, dz = resolved(dy, dlse, dz)
        # Results that are added have one gradient, and a guard takes no tensor twice.
        dz, dlse = (None if each is None else each.detach() for each in (dz, dlse))
        beside = _dense(dy), _dense(dz), _dense(dlse)
        dx = None
        if ctx.overwritten is not None:
            x = dx = ctx.overwritten.memory()
        dx = _gradient(x, dx, target, states, totals, beside, ctx.of_call, ctx.of_gradient)
        return dx, None, None, None, None, None


# As _Losses.apply, less its search for functorch's wrappers: a call that a transform watches does not come here.
_differentiated = super(torch.autograd.Function, _Losses).apply


def _dense(dy: Tensor | None) -> Tensor | None:
    """A gradient of one value; or of one value a row, which then lie side by side."""
    return dy if dy is None or not dy.ndim else dy.contiguous()


def _gradient(
    x: Tensor, dx: Tensor | None, target: Tensor, states: Tensor, totals: Tensor | None,
    beside: tuple[Tensor | None, ...], of_call: tuple, of_gradient: OfGradient,
) -> Tensor:  # fmt: skip
    """The gradient of a shard's logits. Autograd may have moved what it saved, so this call is looked up by itself.

    dx: where the gradient goes, if that is the logits' memory.
    """
    weight, numbers, loss, shards = of_call
    tensors = target, weight, states, totals, *beside
    prepared = x, tensors, replace(loss, weight=weight), shards, of_gradient.inplace
    call = kept("gradients over ranks", of_gradient.kinds, (x, *tensors), _prepare_gradient, *prepared)
    return call(x, dx, *tensors[:4], beside, numbers)


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
