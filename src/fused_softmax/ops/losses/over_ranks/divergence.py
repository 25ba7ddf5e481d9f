"""Divergences of rows whose classes lie in shards over ranks, and the cross-entropy of probabilities.

They take one exchange of a few numbers a row; jsd and tvd take two. A shard is a pair of rows to its rank, which reads
it as one device does. The results of whole rows follow from those of all shards r, with the share Q_r = exp(lse_r -
lse) of the student's probability that shard r has, and T_r of the teacher's, which counts as 1 for probabilities:
kl of logits = sum_r T_r (kl_r + log T_r - log Q_r),  reverse_kl = sum_r Q_r (reverse_kl_r + log Q_r - log T_r),
kl of probabilities, and cross = sum_r (that of shard r - S_r log Q_r),  S_r = sum w T of shard r.
Each is counted from the shard's own lse, so ranks need not count logits from the same origin. jsd and tvd are sums over
columns that need the states of whole rows, so all shards tell their states first. The gradient needs no exchange.
Traffic: as on one device; between ranks at most 6 numbers a row.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_softmax.core.calls import kept
from fused_softmax.core.checks import arithmetic_of
from fused_softmax.core.launched import Launched
from fused_softmax.core.no_gradient import saved_of
from fused_softmax.core.route import resolved, runs_here
from fused_softmax.core.runner import TLDTYPES, has_ptx, prepare
from fused_softmax.ops.losses import reference
from fused_softmax.ops.losses.divergence_launches import OF_PAIR, Pair, PairRows, in_vectors, shard_sums
from fused_softmax.ops.losses.divergence_rows import gradients, losses_of, pair_of, refused, run
from fused_softmax.ops.losses.kernels.spec import PairSpec
from fused_softmax.ops.losses.launches import picked_of
from fused_softmax.ops.losses.options import Divergence, Loss, weight_for_kernels
from fused_softmax.ranks.first_derivative import once
from fused_softmax.ranks.groups import Shards, gather
from fused_softmax.ranks.launches import allocator

_ROWS = 128  # of a program


class OfCall(NamedTuple):
    """What a call has beside its tensors. options: with numbers for temperatures, and the smoothing of whole rows."""

    options: Divergence
    shards: Shards

    @property
    def name(self) -> str:
        return "cross_entropy" if self.options.kind == "cross" else "divergence"


class Own(NamedTuple):
    """A rank's part of a call: its columns without padding, and the options for them alone.

    mass: the factor of its smoothed targets in the loss. The options' smoothing spreads them over the rank's own
    classes. Times mass, they are the smoothed targets of whole rows.
    """

    pair: Pair
    options: Divergence
    mass: float

    @property
    def by_kernels(self) -> bool:
        """Whether kernels compute, on a device that has any.

        It follows from dtypes, which are the same on all ranks.
        """
        tensors = [each for each in self.pair[1:] if each is not None]
        return not refused(self.pair.x, self.pair.y, self.options) and runs_here(self.pair.x, *tensors)

    @property
    def arithmetic(self) -> torch.dtype:
        return torch.promote_types(arithmetic_of(self.pair.x), arithmetic_of(self.pair.y))


def own_of(pair: Pair, of_call: OfCall) -> Own:
    held, n_classes = of_call.shards.held, of_call.shards.n_classes
    smoothing = float(of_call.options.label_smoothing)
    share = smoothing * held / n_classes
    mass = 1.0 - smoothing + share
    options = replace(of_call.options, shard=True, label_smoothing=share / mass if share else 0.0)
    if held < pair.x.shape[1]:
        weight = None if pair.weight is None else pair.weight[:held]
        pair = pair._replace(x=pair.x[:, :held], y=pair.y[:, :held], weight=weight)
    return Own(pair, options, mass)


def _forward(ctx, x, y, weight, temperature, target_temperature, of_call):
    ctx.set_materialize_grads(False)
    pair = Pair(x.detach(), y.detach(), weight, temperature, target_temperature)
    rows = rows_of_all(pair, of_call)
    ctx.of_call = of_call
    ctx.save_for_backward(x, y, *pair[2:], *rows._replace(value=None))
    return rows.value, rows.m + rows.ls if of_call.options.kind == "cross" else None


def _backward(ctx, dvalue, dlse):
    nothing = (None,) * 6
    if dvalue is None and dlse is None:
        return nothing
    x, y, *others = saved_of(ctx, ctx.of_call.name)
    # Hooks of saved tensors may return other strides.
    saved: list[Any] = [each if each is None else each.contiguous() for each in others]
    pair, rows = Pair(x, y, *saved[: OF_PAIR - 2]), PairRows(*saved[OF_PAIR - 2 :])
    wanted = ctx.needs_input_grad[:2]
    return *gradients_of(pair, rows, resolved(dvalue, dlse), ctx.of_call, wanted), *nothing[2:]


class DivergenceOverRanks(torch.autograd.Function):
    """(the divergences of rows [n, columns], None), the same on all ranks, with the gradient of this rank's columns."""

    forward = staticmethod(_forward)
    backward = staticmethod(once("divergence")(_backward))


class ProbabilitiesOverRanks(torch.autograd.Function):
    """(the cross-entropies of rows, their lse) likewise, with the gradients of the logits and of the probabilities."""

    forward = staticmethod(_forward)
    backward = staticmethod(once("cross_entropy")(_backward))


def rows_over_ranks(input: Tensor, target: Tensor, options: Divergence, shards: Shards) -> Tensor:
    """The divergence of every row, in the leading shape, of the columns [..., columns] that this rank has."""
    leading, x, y = input.shape[:-1], flat(input), flat(target.detach())
    value, _ = DivergenceOverRanks.apply(*pair_of(x, y, options), OfCall(options.with_numbers(), shards))
    return value.view(leading)


def probabilities_over_ranks(
    x: Tensor, target: Tensor, loss: Loss, shards: Shards, dtype: torch.dtype
) -> tuple[Tensor, Any, Any]:
    """(loss, lse, z-loss) of logits [n, columns] by probabilities [n, columns], of whose columns this rank has these.

    loss: its weight is [columns].
    """
    weight = weight_for_kernels(loss.weight, x)
    weight = None if weight is None else weight.resolve_neg()
    of_call = OfCall(Divergence.of_loss(loss), shards)
    rows, lse = ProbabilitiesOverRanks.apply(x, target, weight, None, None, of_call)
    return losses_of(rows, lse, loss, dtype)


def lacks(loss: Loss) -> str:
    """What a loss of probabilities asks for that does not exist over ranks; "" if nothing."""
    if loss.stats:
        return "return_token_stats takes targets of class indices with group=, got probabilities"
    if loss.weight is not None and loss.weight.requires_grad and torch.is_grad_enabled():
        return "weight requires grad, and with group= it is a constant; give weight.detach()"
    return ""


def flat(x: Tensor) -> Tensor:
    """Rows [n, columns] of a tensor that may have no columns."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def rows_of_all(pair: Pair, of_call: OfCall) -> PairRows:
    """What is known of whole rows, of which this rank has some columns."""
    own, shards = own_of(pair, of_call), of_call.shards
    pair, options, mass = own
    by_kernels = own.by_kernels
    if by_kernels:
        pair, rows = run(pair, options)
    else:
        rows = _rows_by_operations(own)
    told = [getattr(rows, name) for name in _told(options)]
    if mass != 1.0:
        told[-2:] = [each * mass for each in told[-2:]]
    whole = _merged(gather(torch.stack(told), shards), options)
    if not options.twice:
        return whole
    sums = shard_sums(pair, whole, options) if by_kernels else _sums_by_operations(own, whole)
    value, total = gather(sums, shards).sum(0).unbind()
    # Two tensors: a caller may change one of them. Not by _replace, which code that torch 2.11 compiles cannot keep.
    return PairRows(*whole[:4], value.clone(), total)


def _told(options: Divergence) -> tuple[str, ...]:
    """What a rank tells of its rows first, by the names of PairRows."""
    states = ("m", "ls", "m_t", "ls_t") if options.target_is == "logits" else ("m", "ls")
    if options.twice:
        return states
    counts = options.target_is != "logits" and options.kind != "reverse_kl"
    return (*states, "value", "total") if counts else (*states, "value")


def _merged(heard: Tensor, options: Divergence) -> PairRows:
    """What is known of whole rows by the messages [ranks, numbers, n] of all, the same on every rank."""
    if not heard.numel() or not runs_here(heard):  # by what is the same on all ranks
        return _merged_by_operations(heard, options)
    key = len(heard), options.kind, options.target_is
    return kept("divergences of ranks", key, (heard,), _prepare_merging, heard, options)(heard)


def _prepare_merging(heard: Tensor, options: Divergence) -> Launched:
    """call(heard) -> PairRows"""
    from fused_softmax.ops.losses.kernels.divergence_over_ranks import _merge_pairs_of_ranks

    ranks, n = len(heard), heard.shape[2]
    device, dtype, empty = heard.get_device(), heard.dtype, allocator(heard.device)
    by_logits, sums = options.target_is == "logits", not options.twice

    def made() -> PairRows:
        wants = True, True, by_logits, by_logits, sums, sums
        return PairRows(*[empty((n,), (1,), dtype) if each else None for each in wants])  # type: ignore[arg-type]

    spec = PairSpec(
        block_rows=_ROWS, block_cols=1, pieces=1, vector=1, cast_dtype=TLDTYPES[dtype], ptx=has_ptx(device),
        divergence=options.kind, given=options.target_is,
    )  # fmt: skip
    values = {"n_rows": n, "ranks": ranks, "length": heard[0].numel()}
    tensors = {"heard": heard, **made()._asdict()}
    run = prepare(
        _merge_pairs_of_ranks, None, spec, tensors, values, device=device, programs=lambda plan: -(-n // _ROWS),
        num_warps=4,
    ).__call__  # fmt: skip
    picked = picked_of(tuple(tensors.values()))

    def call(heard):
        rows = made()
        run(*picked((heard, *rows)))
        return rows

    return Launched(call)


def _merged_by_operations(heard: Tensor, options: Divergence) -> PairRows:
    m, ls, log_q = _whole_state(heard[:, 0], heard[:, 1])
    m_t = ls_t = log_t = None
    if options.target_is == "logits":
        m_t, ls_t, log_t = _whole_state(heard[:, 2], heard[:, 3])
    if options.twice:
        return PairRows(m, ls, m_t, ls_t, None, None)  # type: ignore[arg-type]
    own = heard[:, 2 if log_t is None else 4]
    if options.kind == "reverse_kl":
        value = _expected(log_q, own + (log_q if log_t is None else log_q - log_t))
        total = value.clone()  # a caller may change the divergence in place
    elif log_t is not None:
        value, total = _expected(log_t, own + (log_t - log_q)), torch.ones_like(m)
    else:
        of_shards = heard[:, 3]
        value = (own - torch.where(of_shards == 0, 0.0, of_shards * log_q)).sum(0)
        total = of_shards.sum(0)
    return PairRows(m, ls, m_t, ls_t, value, total)


def _whole_state(m_r: Tensor, ls_r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(m, ls of whole rows [n], the logarithm of each shard's share [ranks, n])."""
    m = m_r.amax(0)
    ls = (ls_r + (m_r - _finite(m))).exp().sum(0).log()
    return m, ls, (m_r - m) + (ls_r - ls)  # one by one: m + ls would be rounded at the size of m


def _expected(log_share: Tensor, values: Tensor) -> Tensor:
    share = log_share.exp()
    return torch.where(share == 0, 0.0, share * values).sum(0)


def _finite(x: Tensor) -> Tensor:
    """0 in the place of -inf."""
    return torch.where(x == -torch.inf, 0.0, x)


class _Teacher(NamedTuple):
    """A teacher's probabilities, with the classes' weights in them, and their logarithms."""

    p: Tensor
    log_p: Tensor


def _teacher(own: Own, m_t: Tensor | None = None, ls_t: Tensor | None = None) -> _Teacher:
    """m_t, ls_t: of logits, of which -inf counts as 0."""
    pair, options, _ = own
    if options.target_is == "logits":
        z = _of_teacher(own)
        log_t = z - m_t.unsqueeze(1) - ls_t.unsqueeze(1)  # type: ignore[union-attr]
        return _Teacher(log_t.exp(), log_t)
    y = pair.y.to(own.arithmetic)
    if options.target_is == "log_probs":
        return _Teacher(y.exp(), y)
    if options.label_smoothing:
        y = y * (1.0 - options.label_smoothing) + options.label_smoothing / y.shape[1]
    if options.kind == "cross":
        return _Teacher(y if pair.weight is None else y * pair.weight.to(y.dtype), y)
    return _Teacher(y, y.log())


def _of_student(own: Own, x: Tensor) -> Tensor:
    options, of_rows = own.options, own.pair.temperature
    return _finished(x.to(own.arithmetic), options.scale, options.softcap, options.temperature, of_rows)


def _of_teacher(own: Own) -> Tensor:
    options, of_rows = own.options, own.pair.target_temperature
    y = own.pair.y.to(own.arithmetic)
    return _finished(y, options.target_scale, options.target_softcap, options.target_temperature, of_rows)


def _finished(x: Tensor, scale: float, softcap: float | None, temperature: Any, of_rows: Tensor | None) -> Tensor:
    return reference.finished(x, scale, softcap, temperature if of_rows is None else of_rows)


def _state(z: Tensor) -> tuple[Tensor, Tensor]:
    m = z.amax(1)
    return m, (z - _finite(m).unsqueeze(1)).exp().sum(1).log()


def _rows_by_operations(own: Own) -> PairRows:
    """What is known of a shard's own rows by torch's operations, as kernels have it."""
    pair, options, _ = own
    by_logits = options.target_is == "logits"
    nothing = torch.zeros(len(pair.x), dtype=own.arithmetic, device=pair.x.device)
    if not pair.x.shape[1]:
        none = torch.full_like(nothing, -torch.inf)
        of_t = none if by_logits else None
        return PairRows(none, none, of_t, of_t, nothing, nothing)
    z = _of_student(own, pair.x)
    m, ls = _state(z)
    m_t, ls_t = _state(_of_teacher(own)) if by_logits else (None, None)
    if options.twice:
        return PairRows(m, ls, m_t, ls_t, None, nothing)
    log_q = z - _finite(m).unsqueeze(1) - _finite(ls).unsqueeze(1)
    t, log_t = _teacher(own, *[each if each is None else _finite(each) for each in (m_t, ls_t)])
    if options.kind == "cross":
        value = -(t * log_q).sum(1)  # NaN of 0 times -inf, as torch's
    elif options.kind == "kl":
        value = torch.where(t == 0, 0.0, t * (log_t - log_q)).sum(1)
    else:
        q = log_q.exp()
        value = torch.where(q == 0, 0.0, q * (log_q - log_t)).sum(1)
    return PairRows(m, ls, m_t, ls_t, value, t.sum(1))


def _sums_by_operations(own: Own, whole: PairRows) -> Tensor:
    """[2, n]: what a shard adds to jsd or tvd, and to what their gradient takes."""
    if not own.pair.x.shape[1]:
        return torch.zeros(2, len(own.pair.x), dtype=own.arithmetic, device=own.pair.x.device)
    log_q = _of_student(own, own.pair.x) - whole.m.unsqueeze(1) - whole.ls.unsqueeze(1)
    f, here = _shares(log_q, _teacher(own, whole.m_t, whole.ls_t), own.options)
    return torch.stack((here.sum(1), (log_q.exp() * f).sum(1)))


def _shares(log_q: Tensor, teacher: _Teacher, options: Divergence) -> tuple[Tensor, Tensor]:
    """(f of the gradient Q (f - sum Q f), what a column adds to jsd or tvd)."""
    q, (t, log_t) = log_q.exp(), teacher
    if options.kind == "tvd":
        apart = q - t
        return 0.5 * torch.where(apart > 0, 1.0, torch.where(apart < 0, -1.0, apart)), 0.5 * apart.abs()
    if options.kind == "jsd":
        mixed = options.beta * t + (1.0 - options.beta) * q
        log_m = torch.where(mixed == 0, 1.0, mixed).log()
        of_t = torch.where(t == 0, 0.0, t * (log_t - log_m))
        f = torch.where(q == 0, 0.0, log_q - log_m)
        return (1.0 - options.beta) * f, options.beta * of_t + (1.0 - options.beta) * q * f
    return log_q - log_t, torch.zeros_like(q)


def gradients_of(
    pair: Pair, rows: PairRows, beside: tuple[Tensor | None, Tensor | None], of_call: OfCall, wanted: tuple[bool, ...],
    over: bool = False,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of this rank's columns, 0 at padding: the student's, over them if asked; the targets' if wanted.

    rows: of whole rows. beside: the gradients of their divergences and of their lse.
    """
    (dvalue, dlse), own = beside, own_of(pair, of_call)
    held, x = of_call.shards.held, pair.x
    dx = x if over else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dx[:, held:] = 0
    dvalue = torch.zeros_like(rows.m) if dvalue is None else dvalue.to(rows.m.dtype)
    rows, dvalue = rows._replace(total=rows.total / own.mass) if own.mass != 1.0 else rows, dvalue * own.mass
    dy = None
    if not held or not len(x):
        dy = pair.y.new_zeros(pair.y.shape[0], held) if wanted[1] else None
    elif own.by_kernels:
        given = own.pair._replace(x=in_vectors(own.pair.x, own.pair.y), y=in_vectors(own.pair.y, own.pair.x))
        _, dy = gradients(given, rows, dvalue, own.options, wanted[1], dx[:, :held], dlse)
    else:
        own_dx, dy = _gradients_by_operations(own, rows, dvalue, dlse, wanted[1])
        dx[:, :held] = own_dx
    if dy is not None and held < x.shape[1]:
        dy = torch.nn.functional.pad(dy, (0, x.shape[1] - held))
    return dx if wanted[0] else None, dy


def _gradients_by_operations(
    own: Own, rows: PairRows, dvalue: Tensor, dlse: Tensor | None, of_target: bool
) -> tuple[Tensor, Tensor | None]:
    pair, options, _ = own
    with torch.enable_grad():
        leaf = pair.x.detach().requires_grad_()
        z = _of_student(own, leaf)
    log_q = z.detach() - rows.m.unsqueeze(1) - rows.ls.unsqueeze(1)
    q, total, g = log_q.exp(), rows.total.unsqueeze(1), dvalue.unsqueeze(1)
    teacher = _teacher(own, rows.m_t, rows.ls_t)
    if options.kind in ("kl", "cross"):
        dz = total * q - teacher.p
    else:
        dz = torch.where(q == 0, 0.0, q * (_shares(log_q, teacher, options)[0] - total))
    dz, asked = torch.where(g == 0, 0.0, g * dz), g != 0
    if dlse is not None:
        of_lse = dlse.to(q.dtype).unsqueeze(1)
        dz, asked = dz + torch.where(of_lse == 0, 0.0, of_lse * q), asked | (of_lse != 0)
    (dx,) = torch.autograd.grad(z, leaf, dz)
    dy = None
    if of_target:
        w = 1.0 if pair.weight is None else pair.weight.to(q.dtype)
        dy = torch.where(g == 0, 0.0, g * w * (1.0 - options.label_smoothing) * -log_q).to(pair.y.dtype)
    return dx.masked_fill(~asked, 0.0), dy


class ChosenLogits(torch.autograd.Function):
    """Logits [n, k] of columns among all classes, from rows [n, columns] that lie in shards.

    NaN if a column is no class. It takes one exchange of k numbers a row.
    """

    @staticmethod
    def forward(ctx, x, columns, shards):
        local = columns - shards.first
        here = (local >= 0) & (local < shards.held)
        at = torch.where(here, local, 0)
        own = torch.where(here, x.gather(1, at), 0.0) if shards.held else x.new_zeros(columns.shape)
        told = gather(own.t().contiguous().to(arithmetic_of(x)), shards)
        ctx.save_for_backward(at, here)
        ctx.shape = x.shape
        inside = (columns >= 0) & (columns < shards.n_classes)
        return torch.where(inside, told.sum(0).t(), math.nan).to(x.dtype)

    @staticmethod
    @once("divergence")
    def backward(ctx, dz):
        at, here = ctx.saved_tensors
        dx = dz.new_zeros(ctx.shape)
        if ctx.shape[1]:
            dx.scatter_add_(1, at, torch.where(here, dz, 0.0))
        return dx, None, None
