"""Log-probabilities of rows whose classes lie in shards over ranks, by one exchange of a few numbers a row.

A shard is a row to its rank, which reads it as one device does. What all shards say of theirs is that of the whole row,
with the share P_r = exp(lse_r - lse) that shard r has of a row's probability:
log p_t = log p_t of shard r + log P_r,  entropy = sum_r P_r (entropy_r - log P_r),
sum_c p_c ** 2 = sum_r P_r ** 2 (sum_c p_c ** 2 of shard r),  mean = sum_r n_r mean_r / sum_r n_r.
None is a small difference of great logits. The gradient needs no exchange, for every rank has that of the same results.
Traffic of a shard of N columns: MN, with a gradient 3MN; between ranks 3 numbers a row, and one for each result more.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_softmax.core.calls import bump_version, kept
from fused_softmax.core.checks import DTYPES, arithmetic_of
from fused_softmax.core.launched import Call, Launched
from fused_softmax.core.no_gradient import refuse, saved_of
from fused_softmax.core.route import resolved, runs_here
from fused_softmax.core.runner import TLDTYPES, has_ptx, prepare
from fused_softmax.ops.losses import reference
from fused_softmax.ops.losses.kernels.log_prob_over_ranks import _merge_shards, _place
from fused_softmax.ops.losses.kernels.spec import LossSpec
from fused_softmax.ops.losses.launches import picked_of, with_whole_rows
from fused_softmax.ops.losses.log_prob_launches import (
    HAVE,
    STATISTICS,
    Asked,
    Gradients,
    LogProbRows,
    aligned,
    backward,
    forward,
    given_of,
)
from fused_softmax.ops.losses.options import EVERY, Kept, LogProb
from fused_softmax.ranks.first_derivative import once
from fused_softmax.ranks.groups import Shards, gather
from fused_softmax.ranks.launches import allocator

_ROWS = 128  # of a program
_IGNORED, _NO_CLASS = -1, -2  # among a shard's own targets, whatever ignore_index is


class OfCall(NamedTuple):
    """What a call has beside its tensors. options: with a number for a temperature. asked: of whole rows.

    inplace: whether the gradient is written over the logits.
    """

    options: LogProb
    shards: Shards
    asked: Asked
    inplace: bool = False


class Places(NamedTuple):
    """Targets [n, k] of whole rows as a shard sees them.

    local: among its own classes; of those that another shard has, the first. here: whether it has them. counts: whether
    they are not ignored. wrong: whether there is no such class.
    """

    local: Tensor
    here: Tensor
    counts: Tensor
    wrong: Tensor

    @property
    def of_row(self) -> Tensor:
        """Whether any of a row's targets counts [n]."""
        return self.counts.any(1)


def places_of(target: Tensor, ignore_index: int, shards: Shards) -> Places:
    """target: [n, k], contiguous."""
    if target.numel() and runs_here(target):
        key = ignore_index, shards.first, shards.held, shards.n_classes
        return kept("places of shards", key, (target,), _prepare_placing, target, *key)(target)
    t = target.long()
    counts, local = t != ignore_index, t - shards.first
    wrong = counts & ((t < 0) | (t >= shards.n_classes))
    here = counts & (local >= 0) & (local < shards.held)
    local = torch.where(here, local, 0).masked_fill(~counts, _IGNORED).masked_fill(wrong, _NO_CLASS)
    return Places(local, here, counts, wrong)


def _prepare_placing(target: Tensor, ignore_index: int, first: int, held: int, n_classes: int) -> Launched:
    """call(target) -> Places"""
    shape, strides, empty = tuple(target.shape), target.stride(), allocator(target.device)

    def made() -> Places:
        return Places(*[empty(shape, strides, torch.bool if i else torch.int64) for i in range(4)])

    values = {
        "n": target.numel(), "first": first, "held": held, "n_classes": n_classes, "ignore_index": ignore_index,
        "ignored": _IGNORED, "no_class": _NO_CLASS,
    }  # fmt: skip
    run = _prepare(_place, torch.float32, target, {"target": target, **made()._asdict()}, values, target.numel())

    def call(target):
        found = made()
        run(target, *found)
        return found

    return Launched(call)


def _prepare(kernel: Any, dtype: torch.dtype, like: Tensor, tensors: dict, values: dict, n: int) -> Call:
    """The launch of a kernel of n rows or targets."""
    device = like.get_device()
    spec = LossSpec(
        block_rows=_ROWS, block_cols=1, pieces=1, vector=1, cast_dtype=TLDTYPES[dtype], ptx=has_ptx(device)
    )  # fmt: skip
    programs = -(-n // _ROWS)
    return prepare(
        kernel, None, spec, tensors, values, device=device, programs=lambda plan: programs, num_warps=4
    ).__call__  # fmt: skip


class LogProbOverRanks(torch.autograd.Function):
    """(log_prob, entropy, lse, statistics) of rows x [n, columns] by targets [n, k], the same on every rank, with the
    gradient of this rank's logits.
    """

    @staticmethod
    def forward(ctx, x, target, temperature, of_call):
        ctx.set_materialize_grads(False)
        places = places_of(target, of_call.options.ignore_index, of_call.shards)
        found = rows_of_all(x, target, places, temperature, of_call)
        ctx.of_call = of_call
        ctx.save_for_backward(x, temperature, found.m, found.ls, found.entropy, *places)
        if found.is_top1 is not None:
            ctx.mark_non_differentiable(found.is_top1)
        return found[2:]

    @staticmethod
    @once("log_prob")
    def backward(ctx, dlog_prob, dentropy, dlse, *of_stats):
        refuse("log_prob", STATISTICS, of_stats, HAVE)
        if dlog_prob is None and dentropy is None and dlse is None:
            return (None,) * 4
        x, temperature, m, ls, entropy, *places = saved_of(ctx, "log_prob")
        of_call, gradients = ctx.of_call, Gradients(*resolved(dlog_prob, dentropy, dlse))
        dx = x.detach() if of_call.inplace else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        gradient_of(x, Places(*places), temperature, (m, ls, entropy), gradients, of_call, dx)
        if of_call.inplace:  # whoever else keeps the logits is told by autograd
            bump_version(x)
        return dx, None, None, None


def rows_of_all(x: Tensor, target: Tensor, places: Places, temperature: Tensor | None, of_call: OfCall) -> LogProbRows:
    """What is known of whole rows, of whose columns x has this rank's. target: [n, k], contiguous."""
    options, shards, asked, _ = of_call
    own = _own(x[:, : shards.held], places, temperature, options, asked)
    return merged(gather(_said(own, places, shards, asked), shards), target, places, of_call)


def _by_kernels(x: Tensor, target: Tensor, options: LogProb) -> bool:
    return x.numel() > 0 and options.scale != 0 and x.dtype in DTYPES and runs_here(x, target)


def _own(x: Tensor, places: Places, temperature: Tensor | None, options: LogProb, asked: Asked) -> LogProbRows:
    """What is known of the shard's own rows; of what nobody asks for, anything."""
    options = replace(options, ignore_index=_IGNORED)
    if _by_kernels(x, places.local, options):
        given = given_of(aligned(x), places.local, temperature, options)
        return forward(given, options, asked._replace(lse=False, states=True))
    n, arithmetic = len(x), arithmetic_of(x)
    if not x.shape[1]:
        nothing = x.new_full((n,), -math.inf, dtype=arithmetic)
        zero, of_targets = torch.zeros_like(nothing), places.local.new_zeros(places.local.shape, dtype=arithmetic)
        return LogProbRows(nothing, nothing, of_targets, zero, None, zero, zero, places.here)
    z = _finished(x, temperature, options)
    m = z.amax(1)
    origin = _origin(m)
    of_targets, entropy, ls, stats = reference.log_prob(
        z - origin.unsqueeze(1), places.local, ignore_index=_IGNORED, arithmetic=arithmetic
    )
    stats["mean_logits"] = stats["mean_logits"] + origin
    return LogProbRows(m, ls, of_targets, entropy, None, **stats)


def _finished(x: Tensor, temperature: Tensor | None, options: LogProb) -> Tensor:
    of_rows = options.temperature if temperature is None else temperature
    return reference.finished(x.to(arithmetic_of(x)), options.scale, options.softcap, of_rows)


def _origin(m: Tensor) -> Tensor:
    """What is subtracted from the logits of a row: of one that is -inf everywhere, 0."""
    return torch.where(m == -torch.inf, 0.0, m)


def _said(own: LogProbRows, places: Places, shards: Shards, asked: Asked) -> Tensor:
    """A rank's message [numbers, n]: m, ls, the results of its rows, and those of its targets.

    A mean is a part of the whole row's. Targets of other ranks are +inf; -1 of a likeliest class says that there is no
    column.
    """
    wanted = (own.entropy, asked.entropy), (own.log_sum_sq_probs, asked.log_sum_sq_probs)
    of_rows = [own.m, own.ls, *[each for each, wants in wanted if wants]]
    if asked.mean_logits and own.mean_logits is not None:
        of_rows.append(own.mean_logits * (shards.held / shards.n_classes))
    said = [torch.stack(of_rows), torch.where(places.here, own.log_prob, torch.inf).t()]  # type: ignore[arg-type]
    if asked.is_top1:
        top = (own.is_top1 & places.here).t().to(own.log_prob.dtype)  # type: ignore[operator]
        said.append(top if shards.held else top - 1.0)
    return torch.cat(said)


def merged(heard: Tensor, target: Tensor, places: Places, of_call: OfCall) -> LogProbRows:
    """What is known of whole rows by the messages [ranks, numbers, n] of all, the same on every rank."""
    if not heard.numel() or not runs_here(heard, target):  # by what is the same on all ranks
        return _merged(heard, places, of_call.asked)
    options, shards, asked, _ = of_call
    key = len(heard), options.ignore_index, shards.n_classes, *asked
    call = kept("log_probs of shards", key, (heard, target), _prepare_merging, heard, target, key, asked)
    return call(heard, target)


def _prepare_merging(heard: Tensor, target: Tensor, key: tuple, asked: Asked) -> Launched:
    """call(heard, target) -> LogProbRows"""
    (n, k), dtype, empty = target.shape, heard.dtype, allocator(heard.device)

    def made() -> LogProbRows:
        entropy, lse, log_sq, mean = (empty((n,), (1,), dtype) if each else None for each in asked[:4])
        of_row, of_targets = ((n,), (1,)), ((n, k), (k, 1))
        top = empty(*of_targets, torch.bool) if asked.is_top1 else None
        found = empty(*of_row, dtype), empty(*of_row, dtype), empty(*of_targets, dtype)
        return LogProbRows(*found, entropy, lse, log_sq, mean, top)

    ranks, ignore_index, n_classes, *_ = key
    values = {
        "n_rows": n, "ranks": ranks, "length": heard[0].numel(), "n_targets": k, "n_classes": n_classes,
        "ignore_index": ignore_index,
    }  # fmt: skip
    names = ("heard", "target", "m", "ls", "log_prob", "entropy", "lse", "log_sq", "mean", "top")
    arranged = heard, target, *made()
    run = _prepare(_merge_shards, dtype, heard, dict(zip(names, arranged, strict=True)), values, n)
    picked = picked_of(arranged)

    def call(heard, target):
        found = made()
        run(*picked((heard, target, *found)))
        return found

    return Launched(call)


def _merged(heard: Tensor, places: Places, asked: Asked) -> LogProbRows:
    """The same by torch's operations."""
    k, wants = places.local.shape[1], (asked.entropy, asked.log_sum_sq_probs, asked.mean_logits)
    m_r, ls_r, *of_rows = heard[:, : 2 + sum(wants)].unbind(1)
    of_targets, tops = heard[:, 2 + sum(wants) :].split((k, k if asked.is_top1 else 0), 1)
    m = m_r.amax(0)
    ls = (ls_r + (m_r - _origin(m))).exp().sum(0).log()
    log_share = (m_r - m) + (ls_r - ls)  # apart, for m may be far greater than both
    share = log_share.exp()
    entropy_r, log_sq_r, mean_r = (of_rows.pop(0) if each else None for each in wants)
    entropy = log_sq = top = None
    if entropy_r is not None:
        entropy = torch.where(share == 0, 0.0, share * (entropy_r - log_share)).sum(0)
    if log_sq_r is not None:
        log_sq = torch.where(share == 0, 0.0, (2.0 * log_share + log_sq_r).exp()).sum(0).log()
    mean = None if mean_r is None else mean_r.sum(0)
    of_share = log_share.unsqueeze(1)
    own = torch.where(of_share == -torch.inf, of_share, of_targets + of_share).where(of_targets != torch.inf, 0.0)
    log_prob = own.sum(0).masked_fill(~places.counts.t(), 0.0).masked_fill(places.wrong.t(), math.nan)
    if asked.is_top1:  # that of the first shard with the greatest logit
        best = ((m_r == m) & (tops[:, 0] >= 0)).to(torch.int32).argmax(0).expand(1, k, -1)
        top = (tops.gather(0, best).squeeze(0) > 0).t().contiguous()
    lse = m + ls if asked.lse else None
    entropy, lse, log_sq, mean = (
        None if each is None else each.masked_fill(~places.of_row, 0.0) for each in (entropy, lse, log_sq, mean)
    )
    return LogProbRows(m, ls, log_prob.t().contiguous(), entropy, lse, log_sq, mean, top)


def _own_gradients(gradients: Gradients, places: Places, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor]:
    """Those of a shard's own results: a target elsewhere takes from its row's logits what lse would give them."""
    dlog_prob, dentropy, dlse = (None if each is None else each.to(dtype) for each in gradients)
    if dlog_prob is None:
        dlog_prob = torch.zeros(places.local.shape, dtype=dtype, device=places.local.device)
    elsewhere = torch.where(places.counts & ~places.here, dlog_prob, 0.0).sum(1)
    dlse = -elsewhere if dlse is None else dlse - elsewhere
    return torch.where(places.here, dlog_prob, 0.0), dentropy, dlse


def gradient_of(
    x: Tensor, places: Places, temperature: Tensor | None, states: tuple[Tensor, Tensor, Tensor | None],
    gradients: Gradients, of_call: OfCall, dx: Tensor, columns: Kept = EVERY,
) -> None:  # fmt: skip
    """Write dx [n, columns], which may be x: the gradient of this rank's logits, and 0 at padding.

    states: m, ls and, where it has a gradient, the entropy of whole rows. columns: the bits of those that are kept.
    """
    options, shards = replace(of_call.options, ignore_index=_IGNORED), of_call.shards
    held = shards.held
    if held < x.shape[1]:
        dx[:, held:] = 0
    if not held or not len(x):
        return
    dlog_prob, dentropy, dlse = _own_gradients(gradients, places, states[0].dtype)
    x, of_own = with_whole_rows(x[:, :held]), dx[:, :held]
    m, ls, entropy = states[0].contiguous(), states[1].contiguous(), states[2]
    entropy = entropy if entropy is None else entropy.contiguous()
    if _by_kernels(x, places.local, options):
        given = given_of(x, places.local, temperature, options, columns)
        backward(given, m, ls, entropy, Gradients(dlog_prob, dentropy, dlse), options, of_own)
        return
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        z = _finished(leaf, temperature, options)
    log_p = z.detach() - m.unsqueeze(1) - ls.unsqueeze(1)
    p, of_p = log_p.exp(), (dlse - dlog_prob.sum(1)).unsqueeze(1)
    if dentropy is not None and entropy is not None:
        of_p = of_p - dentropy.unsqueeze(1) * (torch.where(p == 0, 0.0, log_p) + entropy.unsqueeze(1))
    dz = (p * of_p).scatter_add(1, places.local.clamp(min=0), dlog_prob)
    (found,) = torch.autograd.grad(z, leaf, dz)
    found = found.masked_fill(~places.of_row.unsqueeze(1), 0.0)
    of_own.copy_(found.masked_fill(places.wrong.any(1, keepdim=True), math.nan))
