"""Cross-entropy of rows whose classes lie in shards over ranks, by one exchange of a few numbers a row.

loss = (1 - e) w_t (lse - z_t) + e / C (W lse - sum_c w_c z_c),  e = label_smoothing,  W = sum_c w_c.
Each rank reads its shard for the lse and the sums of its own classes; the exchange tells every rank those of all. The
gradient reads the shard again and writes it. It needs no exchange: every rank has the gradient of the one loss.
Traffic of a shard of N columns: MN, with a gradient 3MN; between ranks at most 8 numbers a row.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fused_softmax.core.checks import arithmetic_of
from fused_softmax.core.route import runs_here
from fused_softmax.ops.losses import launches as losses
from fused_softmax.ops.losses.options import Loss
from fused_softmax.ops.losses.over_ranks.launches import ELSEWHERE, own_loss
from fused_softmax.ranks.groups import Shards, gather


class Shard(NamedTuple):
    """One rank's part of a loss.

    x: [n, columns], padding among them. target: [n], among the classes of all ranks. loss: its weight [columns].
    local: [n], targets among this shard's classes, or ELSEWHERE.
    """

    x: Tensor
    target: Tensor
    local: Tensor
    loss: Loss
    shards: Shards

    @property
    def classes(self) -> Tensor:
        """The logits without padding."""
        return self.x[:, : self.shards.held]

    @property
    def by_kernels(self) -> bool:
        return self.shards.held > 0 and len(self.x) > 0 and self.loss.scale != 0 and runs_here(self.x, self.target)


class States(NamedTuple):
    """Of every row, in the dtype of the arithmetic: by a shard [n], by all shards [ranks, n], or by the whole row [n].

    m, ls: the greatest logit, and log sum_c exp(z_c - m). logit, weight: of the target; 0 in a shard that does not hold
    it, so that sums over shards are exact. weighted: sum_c w_c z_c. total: W. expected: sum_c p_c z_c. best_at: the
    first class of the greatest logit, numbered among all ranks.
    """

    m: Tensor
    ls: Tensor
    logit: Tensor
    weight: Tensor | None = None
    weighted: Tensor | None = None
    total: Tensor | None = None
    expected: Tensor | None = None
    best_at: Tensor | None = None

    @property
    def lse(self) -> Tensor:
        return self.m + self.ls


class Coefficients(NamedTuple):
    """The gradient of a row's logits z is p_c a - [c = t] w_t b - w_c u; each is [n]. u: None without smoothing."""

    a: Tensor
    b: Tensor
    u: Tensor | None


def shard_of(x: Tensor, target: Tensor, loss: Loss, shards: Shards) -> Shard:
    """x: [n, columns], its columns contiguous. target: [n]."""
    t = target.long()
    local = t - shards.first
    local = torch.where((local >= 0) & (local < shards.held) & (t != loss.ignore_index), local, ELSEWHERE)
    return Shard(x, target, local, _with_own_weight(loss, x, shards), shards)


def _with_own_weight(loss: Loss, x: Tensor, shards: Shards) -> Loss:
    if loss.weight is None:
        return loss
    return replace(loss, weight=loss.weight.detach().to(arithmetic_of(x))[: shards.held].contiguous().resolve_neg())


def states_of(shard: Shard) -> States:
    """The states of whole rows, merged from those of all shards in rank order, by a collective."""
    own = _by_kernels(shard) if shard.by_kernels else _composed(shard)
    heard = iter(gather(torch.stack([each for each in own if each is not None]), shard.shards).unbind(1))
    of_ranks = States(*[None if each is None else next(heard) for each in own])  # type: ignore[arg-type]
    return merged(of_ranks)


def merged(heard: States) -> States:
    expected, best_at = heard.expected, heard.best_at
    m = heard.m.amax(0)
    ls = (heard.ls + (heard.m - _origin(m))).exp().sum(0).log()
    lse = m + ls
    if expected is not None and best_at is not None:
        p = (heard.lse - lse).exp()
        expected = torch.where(p == 0, 0.0, p * expected).sum(0)
        best_at = best_at.long().gather(0, heard.m.argmax(0, keepdim=True)).squeeze(0)  # of the first of the greatest
    weight, weighted, total = (None if each is None else each.sum(0) for each in heard[3:6])
    return States(m, ls, heard.logit.sum(0), weight, weighted, total, expected, best_at)


def _composed(shard: Shard) -> States:
    """The states of a shard, by torch's operations."""
    loss, z = shard.loss, _scaled(shard.classes, shard.loss)
    columns = z.shape[1]
    m = z.amax(1) if columns else z.new_full((len(z),), -torch.inf)
    ls = (z - _origin(m).unsqueeze(1)).exp().sum(1).log()
    lse = m + ls
    weighted = total = expected = best_at = None
    if loss.smooth:
        weights = z.new_ones(columns) if loss.weight is None else loss.weight
        weighted, total = (weights * z).sum(1), weights.sum().expand(len(z))
    if loss.stats:
        p = (z - torch.where(lse.isinf(), 0.0, lse).unsqueeze(1)).exp()
        expected = torch.where(p == 0, 0.0, p * z).sum(1)
        best_at = (z.argmax(1) + shard.shards.first).to(lse.dtype) if columns else torch.zeros_like(lse)
    return States(m, ls, *_of_targets(shard, lse.dtype), weighted, total, expected, best_at)


def _origin(m: Tensor) -> Tensor:
    """What is subtracted from the logits of a row: its maximum, or 0 if that is -inf."""
    return torch.where(m == -torch.inf, 0.0, m)


def _by_kernels(shard: Shard) -> States:
    """The states of a shard in one read of it."""
    loss, x = shard.loss, shard.classes
    own = own_loss(loss)
    target = shard.local
    if loss.smooth:  # with a target spread over all classes alike, the loss is (W lse - sum_c w_c z_c) / C
        own, target = replace(own, label_smoothing=1.0), torch.zeros_like(target)
    own = replace(own, stats=loss.stats)
    rows = losses.forward(x, target, own)
    m: Any = rows.m
    ls: Any = rows.ls
    lse = m + ls
    weighted = total = expected = best_at = None
    if loss.smooth:
        of_all = lse.new_full((), x.shape[1]) if loss.weight is None else loss.weight.sum()
        # Its target is class 0, with the factor 0, and 0 times an infinite logit is NaN. The sum is then that logit.
        first = _scaled(x[:, 0], loss) * (1.0 if loss.weight is None else loss.weight[0])
        weighted = torch.where(first.isinf(), first, of_all * lse - x.shape[1] * rows.loss)
        total = of_all.expand(len(x))
    if loss.stats:
        expected = torch.where(lse == -torch.inf, 0.0, lse - rows.entropy)
        best_at = (rows.predicted + shard.shards.first).to(lse.dtype)  # type: ignore[operator, union-attr]
    return States(m, ls, *_of_targets(shard, lse.dtype), weighted, total, expected, best_at)


def _of_targets(shard: Shard, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """(z_t, w_t) of the targets that the shard holds."""
    x, (here, at) = shard.classes, _places(shard)
    if not x.shape[1]:
        return x.new_zeros(len(x), dtype=dtype), weights_of(shard)
    logit = torch.where(here, _scaled(x.gather(1, at.unsqueeze(1)), shard.loss).squeeze(1), 0.0)
    return logit.to(dtype), weights_of(shard)


def weights_of(shard: Shard) -> Tensor | None:
    """w_t of the targets that the shard holds; 0 of others."""
    weight, (here, at) = shard.loss.weight, _places(shard)
    if weight is None or not len(weight):
        return None if weight is None else weight.new_zeros(len(at))
    return torch.where(here, weight[at], 0.0)


def _scaled(x: Tensor, loss: Loss) -> Tensor:
    scale, softcap = _numbers(x, loss)
    z = x.to(arithmetic_of(x)) * scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def _numbers(x: Tensor, loss: Loss) -> tuple[float, float | None]:
    """scale and softcap as the kernels have them."""
    if arithmetic_of(x) == torch.float64 or loss.scale == 0:
        return loss.scale, loss.softcap
    numbers = loss.numbers
    return numbers.factor, None if loss.softcap is None else numbers.cap


class Counts(NamedTuple):
    """Which targets count [n], which of them are no class, and what a mean divides losses and z-losses by."""

    on: Tensor
    wrong: Tensor
    of_loss: Tensor | None
    of_z: Tensor | None


def counts_of(shard: Shard, states: States, over: Sequence[Any] = (), totals: Sequence[Tensor] = ()) -> Counts:
    """over: groups over whose ranks the rows lie. totals: of_loss and of_z, where they are known."""
    t = shard.target.long()
    on = t != shard.loss.ignore_index
    wrong = on & ((t < 0) | (t >= shard.shards.n_classes))
    if not shard.loss.mean:
        return Counts(on, wrong, None, None)
    if totals:
        return Counts(on, wrong, *totals)
    of_z = on.sum().to(states.lse.dtype)
    of_loss = of_z if states.weight is None else torch.where(on & ~wrong, states.weight, 0.0).sum()
    both = torch.stack((of_loss, of_z))
    for group in over:
        dist.all_reduce(both, group=group)
    return Counts(on, wrong, *both.unbind())


def losses_of(shard: Shard, states: States, counts: Counts) -> tuple[Tensor, Tensor]:
    """(loss, z-loss) of every row [n], neither of which has the other in it."""
    loss, (a, b) = shard.loss, _shares(shard)
    of_target = (states.m - states.logit) + states.ls  # one by one: m + ls would be rounded at the size of m
    y = a * (of_target if states.weight is None else states.weight * of_target)
    if loss.smooth:
        y = y + b * (states.total * states.lse - states.weighted)  # type: ignore[operator]
    spoilt = torch.where(counts.wrong, torch.nan, 1.0).to(y.dtype)
    y = y.masked_fill(~counts.on, 0.0) * spoilt
    if not loss.lse_square_scale:
        return y, torch.zeros_like(y)
    return y, (loss.lse_square_scale * states.lse.square()).masked_fill(~counts.on, 0.0) * spoilt


def _shares(shard: Shard) -> tuple[float, float]:
    """What the target counts, and what each class does."""
    smoothing = float(shard.loss.label_smoothing)
    return 1.0 - smoothing, smoothing / shard.shards.n_classes


def coefficients_of(
    shard: Shard, states: States, counts: Counts, dy: Tensor | None, dlse: Tensor | None, dz: Tensor | None
) -> Coefficients:
    """By the gradients of loss, lse and z-loss: one number, or one a row."""
    (of_target, of_class), zero = _shares(shard), torch.zeros_like(states.lse)
    g = zero + _over(dy, counts.of_loss)
    g = torch.where(counts.on, torch.where(counts.wrong, torch.nan, g), 0.0)
    b, u = of_target * g, None
    a = b if states.weight is None else b * states.weight
    if shard.loss.smooth:
        u = of_class * g
        a = a + u * states.total  # type: ignore[operator]
    if shard.loss.lse_square_scale:
        g_z = zero + _over(dy, counts.of_z) + _over(dz, counts.of_z)
        a = a + torch.where(counts.on, 2.0 * shard.loss.lse_square_scale * states.lse * g_z, 0.0)
    return Coefficients(a if dlse is None else a + dlse, b, u)


def _over(gradient: Tensor | None, total: Tensor | None) -> Tensor | float:
    """A gradient over what a mean divides by; 0 if the gradient is 0, although the total may be 0 too."""
    if gradient is None or total is None:
        return 0.0 if gradient is None else gradient
    return torch.where(gradient == 0, 0.0, gradient / total)


def gradient_of(shard: Shard, states: States, given: Coefficients, dx: Tensor) -> Tensor:
    """dx [n, columns], which may be the logits' own memory; 0 at padding."""
    held = shard.shards.held
    dx[:, held:] = 0
    # A row without an incoming gradient gets 0, whatever its logits are.
    asked = (given.a != 0) | (given.b != 0)
    asked = asked if given.u is None else asked | (given.u != 0)
    if shard.by_kernels:
        _kernels_gradient(shard, states, given, asked, dx[:, :held])
    elif held:
        dx[:, :held] = _composed_gradient(shard, states, given).masked_fill(~asked.unsqueeze(1), 0.0)
    return dx


def _composed_gradient(shard: Shard, states: States, given: Coefficients) -> Tensor:
    z, weight = _scaled(shard.classes, shard.loss), shard.loss.weight
    dz = (z - states.m.unsqueeze(1) - states.ls.unsqueeze(1)).exp() * given.a.unsqueeze(1)
    if given.u is not None:
        dz = dz - given.u.unsqueeze(1) * (1.0 if weight is None else weight)
    here, at = _places(shard)
    b = given.b if weight is None else given.b * weight[at]
    dz = dz.scatter_add(1, at.unsqueeze(1), torch.where(here, -b, 0.0).unsqueeze(1))
    return (dz * _slope(z, shard.loss)).to(shard.x.dtype)


def _kernels_gradient(shard: Shard, states: States, given: Coefficients, asked: Tensor, dx: Tensor) -> None:
    x, own = shard.classes, own_loss(shard.loss)
    m = torch.where(asked, states.m, torch.finfo(torch.float32).max)  # with it a row of -inf has p = 0
    ls = torch.where(asked, states.ls, 0.0)
    here, at = _places(shard)
    weight = None if own.weight is None else own.weight[at]
    if given.u is None:
        # Of its own targets the kernel takes p a - w_t b as one; rows whose target is elsewhere have p a alone.
        own_a = given.b if weight is None else given.b * weight
        losses.backward(
            x, torch.where(asked, shard.local, ELSEWHERE), m, ls, own, dy=given.b,
            dlse=given.a - torch.where(here, own_a, 0.0), dx=dx,
        )  # fmt: skip
        return
    # The kernel computes p a - w_c u, as for a target spread over all classes alike. The target's own element is then
    # set by itself, rounded once as the others are.
    z = _scaled(x.gather(1, at.unsqueeze(1)), shard.loss).squeeze(1)
    step = (z - m - ls).exp() * given.a - (given.u + given.b) * (1.0 if weight is None else weight)
    step = (step * _slope(z, shard.loss)).to(dx.dtype)
    columns = x.shape[1]
    of_all = float(columns) if own.weight is None else own.weight.sum()
    losses.backward(
        x, torch.where(asked, 0, ELSEWHERE), m, ls, replace(own, label_smoothing=1.0), dy=given.u * columns,
        dlse=given.a - given.u * of_all, dx=dx,
    )  # fmt: skip
    step = torch.where(here & asked, step, dx.gather(1, at.unsqueeze(1)).squeeze(1))
    dx.scatter_(1, at.unsqueeze(1), step.unsqueeze(1))


def _places(shard: Shard) -> tuple[Tensor, Tensor]:
    """(whether the shard holds a row's target, where; the first class for others)."""
    here = shard.local != ELSEWHERE
    return here, torch.where(here, shard.local, 0)


def _slope(z: Tensor, loss: Loss) -> Tensor | float:
    """dz / dx."""
    scale, softcap = _numbers(z, loss)
    return scale if softcap is None else scale * (1.0 - (z / softcap).square())


def reduced(values: tuple[Tensor, Tensor], counts: Counts, loss: Loss) -> list[Tensor]:
    """Losses of rows, and their z-losses, reduced as the caller asks."""
    if loss.reduction == "none":
        return [*values]
    y, z = (each.sum() for each in values)
    y = y if counts.of_loss is None else y / counts.of_loss
    return [y, z if counts.of_z is None or not loss.lse_square_scale else z / counts.of_z]


def stats_of(shard: Shard, states: States, counts: Counts, y: Tensor) -> list[Tensor]:
    """The TokenStats of the targets, if they are asked for."""
    if states.expected is None or states.best_at is None:
        return []
    entropy = (states.lse - states.expected).masked_fill(~counts.on, 0.0)
    correct = (states.best_at == shard.target.long()) & counts.on
    return [y.clone(), entropy, states.best_at.masked_fill(~counts.on, 0), correct]
