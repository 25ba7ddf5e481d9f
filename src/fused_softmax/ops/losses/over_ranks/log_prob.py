"""Log-probabilities of rows whose classes lie in shards over ranks, by one exchange of a few numbers a row.

A shard is a row to its rank, which reads it as one device does. The results of the whole row follow from those of all
shards r, with the share P_r = exp(lse_r - lse) of the row's probability that shard r has:
log p_t = log p_t of shard r + log P_r,  entropy = sum_r P_r (entropy_r - log P_r),
sum_c p_c ** 2 = sum_r P_r ** 2 (sum_c p_c ** 2 of shard r),  mean = sum_r n_r mean_r / sum_r n_r.
None of these is a small difference of large logits. The gradient needs no exchange, because every rank has the gradient
of the same results. Targets and kept columns are those of whole rows on every rank, so each rank knows which targets
count.
Traffic of a shard of N columns: MN, with a gradient 3MN; between ranks 3 numbers a row, and one for each result more,
or two for a mean over kept columns.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_softmax.core.calls import bump_version, kept
from fused_softmax.core.checks import DTYPES, arithmetic_of
from fused_softmax.core.launched import Launched
from fused_softmax.core.no_gradient import refuse, saved_of
from fused_softmax.core.route import resolved, runs_here
from fused_softmax.core.runner import TLDTYPES, has_ptx, prepare
from fused_softmax.ops.losses import reference
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


class OfCall(NamedTuple):
    """What a call has beside its tensors. options: with a number for a temperature. asked: of whole rows.

    inplace: whether the gradient is written over the logits.
    """

    options: LogProb
    shards: Shards
    asked: Asked
    inplace: bool = False


class Places(NamedTuple):
    """Targets [n, k] of whole rows as a shard sees them, for torch's operations.

    local: among its own classes; of those that it does not have, the first. here: whether it has them. counts: whether
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


def _places_of(target: Tensor, ignore_index: int, shards: Shards) -> Places:
    t = target.long()
    counts, local = t != ignore_index, t - shards.first
    wrong = counts & ((t < 0) | (t >= shards.n_classes))
    here = counts & (local >= 0) & (local < shards.held)
    return Places(torch.where(here, local, 0), here, counts, wrong)


class LogProbOverRanks(torch.autograd.Function):
    """(log_prob, entropy, lse, statistics) of rows x [n, columns] by targets [n, k], the same on every rank, with the
    gradient of this rank's logits.
    """

    @staticmethod
    def forward(ctx, x, target, temperature, columns, of_call):
        ctx.set_materialize_grads(False)
        found = rows_of_all(x, target, temperature, columns, of_call)
        ctx.of_call = of_call
        ctx.save_for_backward(x, target, temperature, found.m, found.ls, found.entropy, *columns[:3])
        if found.is_top1 is not None:
            ctx.mark_non_differentiable(found.is_top1)
        return found[2:]

    @staticmethod
    @once("log_prob")
    def backward(ctx, dlog_prob, dentropy, dlse, *of_stats):
        refuse("log_prob", STATISTICS, of_stats, HAVE)
        if dlog_prob is None and dentropy is None and dlse is None:
            return (None,) * 5
        x, target, temperature, m, ls, entropy, *of_kept = saved_of(ctx, "log_prob")
        of_call, gradients = ctx.of_call, Gradients(*resolved(dlog_prob, dentropy, dlse))
        rows = with_whole_rows(x)  # hooks of saved tensors may return other strides
        dx = rows.detach() if of_call.inplace else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        gradient_of(rows, target, temperature, (m, ls, entropy), gradients, of_call, dx, Kept(*of_kept))
        if of_call.inplace:  # whoever else keeps the logits is told by autograd
            bump_version(x)
        return dx, None, None, None, None


def rows_of_all(
    x: Tensor, target: Tensor, temperature: Tensor | None, columns: Kept, of_call: OfCall
) -> LogProbRows:  # fmt: skip
    """What is known of whole rows, of whose columns x has this rank's. target: [n, k], contiguous."""
    own = _own(x[:, : of_call.shards.held], target, temperature, columns, of_call)
    return merged(gather(_said(own, columns, of_call), of_call.shards), target, columns.given is not None, of_call)


def _by_kernels(x: Tensor, target: Tensor, options: LogProb) -> bool:
    return x.numel() > 0 and options.scale != 0 and x.dtype in DTYPES and runs_here(x, target)


def _own(x: Tensor, target: Tensor, temperature: Tensor | None, columns: Kept, of_call: OfCall) -> LogProbRows:
    """What is known of the shard's own rows, as the kernels give it. What is not asked for may be anything."""
    options, shards, asked, _ = of_call
    if _by_kernels(x, target, options):
        given = given_of(aligned(x, columns), target, temperature, options, columns, (shards.first, shards.n_classes))
        return forward(given, options, asked._replace(lse=False, states=True))
    n, arithmetic, places = len(x), arithmetic_of(x), _places_of(target, options.ignore_index, shards)
    if not x.shape[1]:
        nothing = x.new_full((n,), -math.inf, dtype=arithmetic)
        zero, mean = torch.zeros_like(nothing), nothing.new_zeros(n if columns.given is None else (2, n))
        return LogProbRows(nothing, nothing, zero.new_full(target.shape, math.inf), zero, None, zero, mean, places.here)
    z, on = _finished(x, temperature, options), None
    if columns.given is not None:
        whole, spoilt = _columns_of(columns, x, shards)
        on = whole[:, shards.first : shards.first + shards.held] | spoilt, spoilt
        z = z.masked_fill(~on[0], -math.inf)
    m = z.amax(1)
    origin = _origin(m)
    of_targets, entropy, ls, stats = reference.log_prob(
        z - origin.unsqueeze(1), torch.where(places.counts, places.local, -1), ignore_index=-1, columns=on,
        arithmetic=arithmetic,
    )  # fmt: skip
    mean = stats["mean_logits"] + origin
    if on is not None:
        total = torch.where(on[0], z, 0.0).masked_fill(on[1], math.nan).sum(1)
        mean = torch.stack((total, on[0].sum(1).to(arithmetic)))
    top = stats["is_top1"] & places.here
    of_targets = torch.where(places.here, of_targets, math.inf)
    return LogProbRows(m, ls, of_targets, entropy, None, stats["log_sum_sq_probs"], mean, top)


def _columns_of(columns: Kept, x: Tensor, shards: Shards) -> tuple[Tensor, Tensor]:
    """(over which columns of whole rows they are normalised [n, n_classes], which rows cannot be [n, 1])."""
    n, first = len(x), 0
    if columns.offsets is not None:  # of a chunk, those of all rows
        n, first = len(columns.offsets) - 1, columns.first_row
    found, spoilt = reference.columns_of(columns.given, (n, shards.n_classes))
    return found[first : first + len(x)], spoilt[first : first + len(x)]


def _finished(x: Tensor, temperature: Tensor | None, options: LogProb) -> Tensor:
    of_rows = options.temperature if temperature is None else temperature
    return reference.finished(x.to(arithmetic_of(x)), options.scale, options.softcap, of_rows)


def _origin(m: Tensor) -> Tensor:
    """What is subtracted from the numbers of a row: its maximum, or 0 if that is -inf."""
    return torch.where(m == -torch.inf, 0.0, m)


def _said(own: LogProbRows, columns: Kept, of_call: OfCall) -> Tensor:
    """A rank's message [numbers, n]: m, ls, the results of its rows, and those of its targets.

    A mean is a part of the whole row's; over kept columns it is a sum and a count. Targets of other ranks are +inf. If
    a likeliest class is -1, the rank has no column.
    """
    _, shards, asked, _ = of_call
    wanted = (own.entropy, asked.entropy), (own.log_sum_sq_probs, asked.log_sum_sq_probs)
    of_rows: list[Any] = [own.m, own.ls, *[each for each, wants in wanted if wants]]
    if asked.mean_logits and own.mean_logits is not None:
        whole = columns.given is None
        of_rows += [own.mean_logits * (shards.held / shards.n_classes)] if whole else own.mean_logits.unbind()
    said = [torch.stack(of_rows), own.log_prob.t()]
    if asked.is_top1:
        top = own.is_top1.t().to(own.log_prob.dtype)  # type: ignore[union-attr]
        said.append(top if shards.held else top - 1.0)
    return torch.cat(said)


def merged(heard: Tensor, target: Tensor, truncated: bool, of_call: OfCall) -> LogProbRows:
    """What is known of whole rows by the messages [ranks, numbers, n] of all, the same on every rank.

    truncated: whether rows are normalised over some columns alone.
    """
    options, shards, asked, _ = of_call
    if not heard.numel() or not runs_here(heard, target):  # by what is the same on all ranks
        return _merged(heard, _places_of(target, options.ignore_index, shards), truncated, asked)
    key = len(heard), options.ignore_index, shards.n_classes, truncated, *asked
    call = kept("log_probs of shards", key, (heard, target), _prepare_merging, heard, target, key, asked)
    return call(heard, target)


def _prepare_merging(heard: Tensor, target: Tensor, key: tuple, asked: Asked) -> Launched:
    """call(heard, target) -> LogProbRows"""
    from fused_softmax.ops.losses.kernels.log_prob_over_ranks import _merge_shards

    (n, k), dtype, empty = target.shape, heard.dtype, allocator(heard.device)

    def made() -> LogProbRows:
        entropy, lse, log_sq, mean = (empty((n,), (1,), dtype) if each else None for each in asked[:4])
        of_row, of_targets = ((n,), (1,)), ((n, k), (k, 1))
        top = empty(*of_targets, torch.bool) if asked.is_top1 else None
        found = empty(*of_row, dtype), empty(*of_row, dtype), empty(*of_targets, dtype)
        return LogProbRows(*found, entropy, lse, log_sq, mean, top)

    ranks, ignore_index, n_classes, truncated, *_ = key
    values = {
        "n_rows": n, "ranks": ranks, "length": heard[0].numel(), "n_targets": k, "n_classes": n_classes,
        "ignore_index": ignore_index,
    }  # fmt: skip
    names = ("heard", "target", "m", "ls", "log_prob", "entropy", "lse", "log_sq", "mean", "top")
    arranged = heard, target, *made()
    device, programs = heard.get_device(), -(-n // _ROWS)
    spec = LossSpec(
        block_rows=_ROWS, block_cols=1, pieces=1, vector=1, cast_dtype=TLDTYPES[dtype], ptx=has_ptx(device),
        masked=truncated,
    )  # fmt: skip
    run = prepare(
        _merge_shards, None, spec, dict(zip(names, arranged, strict=True)), values, device=device,
        programs=lambda plan: programs, num_warps=4,
    ).__call__  # fmt: skip
    picked = picked_of(arranged)

    def call(heard, target):
        found = made()
        run(*picked((heard, target, *found)))
        return found

    return Launched(call)


def _merged(heard: Tensor, places: Places, truncated: bool, asked: Asked) -> LogProbRows:
    """The same by torch's operations."""
    k = places.local.shape[1]
    wants = asked.entropy, asked.log_sum_sq_probs, asked.mean_logits, asked.mean_logits and truncated
    m_r, ls_r, *of_rows = heard[:, : 2 + sum(wants)].unbind(1)
    of_targets, tops = heard[:, 2 + sum(wants) :].split((k, k if asked.is_top1 else 0), 1)
    m = m_r.amax(0)
    ls = (ls_r + (m_r - _origin(m))).exp().sum(0).log()
    of_m, of_ls = (_origin(m), _origin(ls)) if truncated else (m, ls)
    log_share = (m_r - of_m) + (ls_r - of_ls)  # one by one: m + ls would be rounded at the size of m
    share = log_share.exp()
    entropy_r, log_sq_r, mean_r, count_r = (of_rows.pop(0) if each else None for each in wants)
    entropy = log_sq = top = None
    if entropy_r is not None:
        entropy = torch.where(share == 0, 0.0, share * (entropy_r - log_share)).sum(0)
    if log_sq_r is not None:
        log_sq = torch.where(share == 0, 0.0, (2.0 * log_share + log_sq_r).exp()).sum(0).log()
    mean = None if mean_r is None else mean_r.sum(0)
    if mean is not None and count_r is not None:
        count = count_r.sum(0)
        mean = torch.where(count > 0, mean / count, 0.0)
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


def gradient_of(
    x: Tensor, target: Tensor, temperature: Tensor | None, states: tuple[Tensor, Tensor, Tensor | None],
    gradients: Gradients, of_call: OfCall, dx: Tensor, columns: Kept = EVERY,
) -> None:  # fmt: skip
    """Write dx [n, columns], which may be x: the gradient of this rank's logits, and 0 at padding.

    states: m, ls and, if it has a gradient, the entropy, all of whole rows. Target and columns are of whole rows too.
    """
    options, shards = of_call.options, of_call.shards
    held = shards.held
    if held < x.shape[1]:
        dx[:, held:] = 0
    if not held or not len(x):
        return
    x, of_own, target = with_whole_rows(x[:, :held]), dx[:, :held], target.contiguous()
    m, ls, entropy, temperature = (each if each is None else each.contiguous() for each in (*states, temperature))
    if _by_kernels(x, target, options):
        given = given_of(x, target, temperature, options, columns, (shards.first, shards.n_classes))
        backward(given, m, ls, entropy, gradients, options, of_own)  # type: ignore[arg-type]
        return
    of_own.copy_(_gradient(x, target, temperature, (m, ls, entropy), gradients, of_call, columns))


def _gradient(
    x: Tensor, target: Tensor, temperature: Tensor | None, states: tuple, gradients: Gradients, of_call: OfCall,
    columns: Kept,
) -> Tensor:  # fmt: skip
    """That of a shard's own logits [n, held], by torch's operations."""
    (m, ls, entropy), (options, shards, *_) = states, of_call
    dlog_prob, dentropy, dlse = (None if each is None else each.to(m.dtype) for each in gradients)
    places = _places_of(target, options.ignore_index, shards)
    counted, on = places.counts & ~places.wrong, places.of_row.unsqueeze(1)
    spoilt = torch.zeros_like(on)
    if columns.given is not None:
        whole, spoilt = _columns_of(columns, x, shards)
        counted &= whole.gather(1, torch.where(counted, target.long(), 0))
        on = on & whole[:, shards.first : shards.first + shards.held] & (ls != -math.inf).unsqueeze(1)
    with torch.enable_grad():
        leaf = torch.where(on, x.detach(), 0.0).requires_grad_()
        z = _finished(leaf, temperature, options)
    log_p = z.detach() - m.unsqueeze(1) - ls.unsqueeze(1)
    p, of_p = log_p.exp(), torch.zeros_like(m)
    if dlse is not None:
        of_p = of_p + dlse
    if dlog_prob is not None:
        dlog_prob = torch.where(counted, dlog_prob, 0.0)
        of_p = of_p - dlog_prob.sum(1)
    of_p = of_p.unsqueeze(1)
    if dentropy is not None and entropy is not None:
        of_p = of_p - dentropy.unsqueeze(1) * (torch.where(p == 0, 0.0, log_p) + entropy.unsqueeze(1))
    dz = p * of_p
    if dlog_prob is not None:
        dz = dz.scatter_add(1, places.local, torch.where(places.here, dlog_prob, 0.0))
    (found,) = torch.autograd.grad(z, leaf, dz)
    found = found.masked_fill(places.wrong.any(1, keepdim=True), math.nan).masked_fill(~on, 0.0)
    return found.masked_fill(spoilt & places.of_row.unsqueeze(1), math.nan)
