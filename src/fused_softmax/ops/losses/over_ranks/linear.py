"""Cross-entropy of a linear layer whose classes lie in shards over ranks: chunks of rows, each with its own exchange.

Every rank makes its classes' logits of a chunk, tells the others what it knows of them, writes the gradient over them,
and multiplies it back. The input's gradient that this gives is a part of a sum over ranks. It is sent to the others
while the next chunk's products are made.
Extra memory: a chunk of logits, and an accumulator of linear_weight's gradient, as on one device.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fused_softmax.core.checks import arithmetic_of
from fused_softmax.core.no_gradient import LOSS, refuse, saved_of
from fused_softmax.core.route import resolved
from fused_softmax.ops.losses.linear_by_classes import add_product
from fused_softmax.ops.losses.linear_by_rows import Gradients, Linear, chunks, divides_late, lowered
from fused_softmax.ops.losses.options import Loss
from fused_softmax.ops.losses.output import STATISTICS
from fused_softmax.ops.losses.over_ranks.states import (
    Counts,
    Shard,
    States,
    coefficients_of,
    counts_of,
    gradient_of,
    losses_of,
    reduced,
    shard_of,
    states_of,
    stats_of,
    weights_of,
)
from fused_softmax.ops.losses.sums import left_out_of, of_counted
from fused_softmax.ranks.first_derivative import once
from fused_softmax.ranks.groups import Shards, gather

_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)


class OfCall(NamedTuple):
    """What stays the same from chunk to chunk.

    summed: whether the input's gradient is summed over ranks here. over: groups over whose ranks the rows lie.
    """

    loss: Loss
    linear: Linear
    shards: Shards
    dtype: torch.dtype
    summed: bool
    over: Sequence[Any] = ()

    @property
    def group(self) -> Any:
        return group_of(self.shards, self.summed)


def group_of(shards: Shards | None, summed: bool) -> Any:
    """Over whose ranks the input's gradient is summed, or None. summed: whether it is summed here."""
    return shards.group if shards is not None and summed and len(shards.sizes) > 1 else None


def leading_of_all(name: str, input: Tensor, target: Any, group: Any) -> tuple[int, ...]:
    """The leading shape of the input of all ranks, of which each gives as many rows."""
    n_ranks, rows = dist.get_world_size(group), input.shape[:-1].numel()
    if input.ndim != 2 or not isinstance(target, Tensor) or tuple(target.shape[:1]) != (n_ranks * rows,):
        raise ValueError(
            f"{name}: input_sharded takes [rows, in_features] of each rank and target [ranks * rows], got "
            f"{tuple(input.shape)}, {tuple(getattr(target, 'shape', ()))} and {n_ranks} ranks"
        )
    return (n_ranks * rows,)


class GatheredRows(torch.autograd.Function):
    """The rows of all ranks, in rank order; each rank gets the sum over ranks of its own rows' gradients.

    name: of the function that gathers them.
    """

    @staticmethod
    def forward(ctx, x, shards, name):
        ctx.shards, ctx.name = shards, name
        return gather(x.contiguous(), shards._replace(digest=None, by_peers=None)).flatten(0, 1)

    @staticmethod
    def backward(ctx, dx):
        return once(ctx.name)(_scattered)(ctx, dx)


def _scattered(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
    own = dx.new_empty(len(dx) // len(ctx.shards.sizes), *dx.shape[1:])  # every rank has as many rows
    _reduce_scatter(own, dx.contiguous(), group=ctx.shards.group)
    return own, None, None


class LinearSharded(torch.autograd.Function):
    """(loss, lse, z-loss, statistics), the same on every rank, with gradients of input, linear_weight, linear_bias."""

    @staticmethod
    def forward(ctx, x, w, bias, target, of_call, asked):
        ctx.set_materialize_grads(False)
        loss, shards, late = of_call.loss, of_call.shards, divides_late(x, of_call.loss)
        counts = _counts_of_all(x, target, of_call)
        at_once = any(asked) and loss.reduction != "none"
        at_once = at_once and not (late and loss.lse_square_scale and loss.weight is not None)
        layer, wide = lowered(x, w, bias), late or w.dtype != x.dtype
        summing = Summing(*layer, of_call.linear, of_call.group, asked, wide, ~counts.on) if at_once else None
        found = []
        for here, shard in _shards_of(*layer, target, of_call):
            states = states_of(shard)
            found.append(states)
            if summing is not None:
                of_chunk = _counts_at(counts, here, divided=not late)
                summing.add(here.start, _gradient(shard, states, of_chunk, states.lse.new_ones(()), None, None))
        states = States(*[None if each[0] is None else torch.cat(each) for each in zip(*found, strict=True)])  # type: ignore[arg-type]
        whole = shard_of(x.new_empty(len(x), 0), target, loss, shards)
        y, z = losses_of(whole, states, counts)
        ctx.late = None
        if late and counts.of_loss is not None:
            ctx.late = 1.0 / torch.where(counts.of_z == 0, 1.0, counts.of_loss)  # type: ignore[arg-type]
        ctx.gradients, ctx.of_call, ctx.asked = summing and summing.finish(), of_call, asked
        ctx.left_out = ~counts.on
        ctx.save_for_backward(x, w, bias, target, *states[:6], counts.of_loss, counts.of_z)
        of_loss, of_z = reduced((y, z), counts, loss)
        stats = stats_of(whole, states, counts, y)
        ctx.mark_non_differentiable(*stats[2:])
        return (of_loss + of_z).to(of_call.dtype), states.lse, of_z.to(of_call.dtype), *stats

    @staticmethod
    @once("linear_cross_entropy")
    def backward(ctx, dy, dlse, dz, *of_stats):
        refuse("linear_cross_entropy", STATISTICS, of_stats, LOSS)
        x, w, bias, target, *of_all, of_loss, of_z = saved_of(ctx, "linear_cross_entropy")
        dy, dlse, dz = resolved(dy, dlse, dz)
        of_call, states = ctx.of_call, States(*of_all)
        if ctx.gradients is not None and dlse is None and dz is None and dy is not None:
            # Given away: whoever has them may change them, and a second backward computes them again.
            gradients, ctx.gradients = ctx.gradients, None
            factor = of_counted(dy if ctx.late is None else dy * ctx.late, ctx.left_out)
            return *gradients.times(factor, x, w, bias), *(None,) * 3
        counts = _counts_of_all(x, target, of_call, () if of_loss is None else (of_loss, of_z))
        of_lse = None if dlse is None else dlse.reshape(-1)
        left_out = left_out_of(target, of_call.loss, of_lse)
        layer, wide = lowered(x, w, bias), divides_late(x, of_call.loss) or w.dtype != x.dtype
        summing = Summing(*layer, of_call.linear, of_call.group, ctx.asked, wide, left_out)
        incoming = [None if each is None else each.to(states.lse.dtype) for each in (dy, dlse, dz)]
        for here, shard in _shards_of(*layer, target, of_call):
            of_rows = [each if each is None or each.ndim == 0 else each[here] for each in incoming]
            of_chunk = States(*[None if each is None else each[here] for each in states])  # type: ignore[arg-type]
            summing.add(here.start, _gradient(shard, of_chunk, _counts_at(counts, here), *of_rows))
        return *summing.finish().in_dtypes(x, w, bias), *(None,) * 3


def _gradient(shard: Shard, states: States, counts: Counts, dy, dlse, dz) -> Tensor:
    """That of a chunk's logits, over which it is written."""
    return gradient_of(shard, states, coefficients_of(shard, states, counts, dy, dlse, dz), shard.x)


class Summing:
    """The gradients of a call, of which the input's is summed over ranks chunk by chunk, as wide as chunks add up."""

    def __init__(
        self, x: Tensor, w: Tensor, bias: Tensor | None, linear: Linear, group: Any, asked: Sequence[bool], wide: bool,
        left_out: Tensor | None,
    ) -> None:  # fmt: skip
        """group: over whose ranks, or None where one rank has it whole."""
        self.group = group if asked[0] else None
        own = asked[0] and self.group is None, *asked[1:]
        self.gradients = Gradients(x, w, bias, linear, own, wide=wide, left_out=left_out)
        self.wide = arithmetic_of(x) if linear.accumulate or wide else x.dtype
        self.dx = None if self.group is None else torch.empty_like(x)
        self.on_its_way: tuple[int, Tensor, Any] | None = None

    def add(self, start: int, dlogits: Tensor) -> None:
        self.gradients.add(start, dlogits)
        if self.group is not None:
            part = add_product(None, dlogits, self.gradients.w, self.wide)
            self._arrived()
            self.on_its_way = start, part, dist.all_reduce(part, group=self.group, async_op=True)

    def finish(self) -> Gradients:
        if self.group is not None:
            self._arrived()
            self.gradients.dx = self.dx
        return self.gradients.done()

    def _arrived(self) -> None:
        if self.on_its_way is not None and self.dx is not None:
            start, rows, work = self.on_its_way
            work.wait()
            self.dx[start : start + len(rows)] = rows
            self.on_its_way = None


def _shards_of(
    x: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, of_call: OfCall
) -> Iterator[tuple[slice, Shard]]:
    """(rows, their logits) of each chunk; one of none where there are no rows, for other ranks may have some."""
    if not len(x):
        yield slice(0, 0), shard_of(x.new_empty(0, len(w)), target, of_call.loss, of_call.shards)
    for start, logits in chunks(x, w, bias, of_call.linear):
        here = slice(start, start + len(logits))
        yield here, shard_of(logits, target[here], of_call.loss, of_call.shards)


def _counts_of_all(x: Tensor, target: Tensor, of_call: OfCall, totals: Sequence[Tensor] = ()) -> Counts:
    """Of all rows, before any of their logits are made. totals: of a mean, where they are known."""
    loss, lse, weight = of_call.loss, x.new_empty(len(x), dtype=arithmetic_of(x)), None
    shard = shard_of(x.new_empty(len(x), 0), target, loss, of_call.shards)
    if loss.weight is not None and loss.mean and not totals:
        weight = gather(weights_of(shard), of_call.shards).sum(0)  # type: ignore[arg-type]
    return counts_of(shard, States(lse, lse, lse, weight), of_call.over, totals)


def _counts_at(counts: Counts, here: slice, divided: bool = True) -> Counts:
    """divided: whether a mean's totals are in the gradients."""
    of_loss, of_z = (counts.of_loss, counts.of_z) if divided else (None, None)
    return Counts(counts.on[here], counts.wrong[here], of_loss, of_z)
