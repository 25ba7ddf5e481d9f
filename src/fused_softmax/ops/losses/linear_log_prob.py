"""log_prob of input @ linear_weight.T + linear_bias, from hidden states.

Either all logits stay for the backward pass, which writes their gradient over them: three matrix products. Or the
logits exist a chunk of rows at a time, and the backward pass makes them again: four. Blocks of classes replace its
chunks if that takes less memory (`log_prob_by_classes.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fused_softmax.core.checks import arithmetic_of
from fused_softmax.core.described import described
from fused_softmax.core.no_gradient import refuse, saved_of
from fused_softmax.core.route import Route, apart, batched, checks_values, needs_grad, resolved, route_of
from fused_softmax.ops import autocast
from fused_softmax.ops.losses import log_prob as of_logits
from fused_softmax.ops.losses.cross_entropy import check_targets, check_targets_of_all
from fused_softmax.ops.losses.linear_by_rows import (
    Linear,
    as_autocast_has,
    check_layer,
    chunks,
    counted,
    linear_of,
    spread,
    whole_logits,
)
from fused_softmax.ops.losses.linear_by_rows import lowered as _lowered
from fused_softmax.ops.losses.log_prob import HAVE, STATISTICS, LogProbOutput
from fused_softmax.ops.losses.log_prob_by_classes import gradients_by_classes, way_of
from fused_softmax.ops.losses.log_prob_launches import Asked, LogProbRows, aligned, backward, forward, given_of
from fused_softmax.ops.losses.log_prob_launches import Gradients as Incoming
from fused_softmax.ops.losses.options import Kept, LogProb
from fused_softmax.ops.losses.over_ranks.dtensor import linear_log_prob_on_shards, own_classes
from fused_softmax.ops.losses.over_ranks.linear import GatheredRows, Summing, group_of, leading_of_all
from fused_softmax.ops.losses.over_ranks.log_prob import OfCall, gradient_of, rows_of_all
from fused_softmax.ranks.dtensor import as_dtensor, mesh_of
from fused_softmax.ranks.first_derivative import once
from fused_softmax.ranks.gather import peers_of, told_by
from fused_softmax.ranks.groups import Over, Refusing, Shards, Transport, check_over, over_of, shards_of, sizes_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # which PyTorch may be built without

_NAME = "linear_log_prob"


def linear_log_prob(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    temperature: float | Tensor | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    return_lse: bool = False,
    return_stats: Sequence[str] = (),
    kept: tuple[Tensor, Tensor] | Tensor | None = None,
    chunk_size: int | None = None,
    logits: str = "auto",
    accumulate: str = "fp32",
    dtype: torch.dtype | None = None,
    group: "ProcessGroup | None" = None,
    n_classes: int | None = None,
    shard_sizes: Sequence[int] | None = None,
    transport: Transport | None = None,
    skip_ignored: bool = False,
    input_sharded: bool = False,
) -> Tensor | LogProbOutput:
    """log_prob(linear(input, linear_weight, linear_bias), target, ...), from hidden states.

    input: [..., in_features]; float32, float16, bfloat16 or float64.
    linear_weight: [n_classes, in_features]; linear_bias: [n_classes]. Each has the input's dtype. If that has 16 bits,
        they may be float32 master weights: products are made in the input's dtype, and their gradients are float32.
        A tensor that requires no gradient costs no product for one. Autocast casts these three as it casts linear's.
    target, scale, softcap, temperature, ignore_index, return_entropy, return_lse, return_stats, kept, dtype: as
        log_prob's. All logits are made, whatever kept leaves out.
    chunk_size: how many rows of logits are in memory at a time, unless all are kept. None takes as many as fill 1 GiB,
        or fewer, so that chunks are equal; or all rows, if that takes no more memory than chunks with an accumulator.
    logits: "keep" holds all logits, in the input's dtype, until the backward pass. That takes three matrix products in
        all. "recompute" makes them chunk by chunk, and again in the backward pass: four products. "auto" keeps them if
        the number of rows is at most chunk_size or at most in_features. Kept logits are no saved tensors: hooks such as
        save_on_cpu do not move them, and checkpointing without reentry does not free them.
        Where a float32 sum of linear_weight's gradient would take more memory, the gradients are made by blocks of
        classes, each of all rows, with as many logits as a chunk has. A list in kept excludes that, and so does group=.
    accumulate: "fp32" adds chunks of linear_weight's gradient, or blocks of the input's, in float32 (float64 for
        float64). "input" adds them in their own dtype, and allocates no accumulator.
    group, n_classes, shard_sizes, transport: as log_prob's. Each rank gives its own rows of linear_weight, and of
        linear_bias. The input is the same on all ranks, and so is its gradient, which is summed over them as
        `accumulate` says. linear_weight and linear_bias may be DTensors in [Shard(0)] over the group. Without group=, a
        DTensor takes an input that is one too, on the same mesh.
    skip_ignored: makes no logits for rows whose targets are all ignored. This pays if many rows are. It waits for the
        device, to learn how many they are.
    input_sharded: with group: each rank gives as many rows [rows, in_features] of the input, in rank order, and gets
        their gradient; targets [ranks * rows] or [ranks * rows, k], temperatures and results are those of all.

    A second backward pass makes the logits again. Compiled code has chunks too. With "auto" it keeps the logits if the
    number of rows is at most in_features, or at most a chunk_size that is given. Its gradient of kept logits is a
    tensor of its own, and its skip_ignored leaves out no rows. torch.func and devices without kernels have all logits
    in memory. A row's results have the same bits in any batch for which cuBLAS chooses the same kernel.
    Returns as log_prob. Raises as log_prob; also ValueError for shapes that do not fit, chunk_size < 1, or an unknown
    logits or accumulate, and RuntimeError for a linear_weight or linear_bias of another dtype or device.

    >>> linear_log_prob(hidden, lm_head.weight, tokens, temperature=0.7)  # [8192, 4096], [151936, 4096], [8192]
    >>> linear_log_prob(hidden, lm_head.weight, tokens, return_entropy=True).entropy  # [8192], float32
    """
    given = {"scale": scale, "softcap": softcap, "temperature": temperature, "ignore_index": ignore_index}
    asked = return_entropy, return_lse, return_stats
    how = {
        "chunk_size": chunk_size, "logits": logits, "accumulate": accumulate, "skip_ignored": bool(skip_ignored),
        "input_sharded": bool(input_sharded),
    }  # fmt: skip
    of_call = input, linear_weight, target, linear_bias, given, asked, kept, how, dtype
    if group is None and n_classes is None and shard_sizes is None and transport is None and not input_sharded:
        return _linear_log_prob(*of_call)
    return _of_shards(*of_call, over_of(group, n_classes, shard_sizes, transport))


def _linear_log_prob(input, linear_weight, target, linear_bias, given, asked, kept, how, dtype):
    (input, linear_weight, linear_bias), options, wanted = _checked(
        input, linear_weight, target, linear_bias, given, asked, how, dtype
    )
    of_layer = {"input": input, "linear_weight": linear_weight, "linear_bias": linear_bias}
    temperature = options.temperature if isinstance(options.temperature, Tensor) else None
    beside = {"target": target, "temperature": temperature, **of_logits.tensors_of_kept(kept)}
    mesh = mesh_of(_NAME, of_layer, beside)
    n_classes, leading = linear_weight.shape[0], tuple(input.shape[:-1])
    columns = of_logits.checked_kept(_NAME, kept, input, (*leading, n_classes))
    if checks_values(input, target):
        check_targets(_NAME, target, n_classes, options.ignore_index)
    if mesh is not None:

        def of_rank(x, w, t, bias, temperature, kept, shards):
            of_rows = replace(options, temperature=temperature)
            columns = of_logits.checked_kept(_NAME, kept, x, (*x.shape[:-1], n_classes))
            return _by_chunks(x, w, t, bias, of_rows, columns, wanted, how, dtype, shards)

        input, linear_weight = as_dtensor(input, mesh), as_dtensor(linear_weight, mesh)
        of_all = target, options.temperature, kept
        return linear_log_prob_on_shards(of_rank, input, linear_weight, linear_bias, *of_all)
    tensors = [input, linear_weight, target, linear_bias, temperature, *columns[:3]]
    tensors = [each for each in tensors if each is not None]
    empty = not (input.numel() and target.numel())
    refused = "there are no logits" if empty else of_logits.refused(input, target, options)
    route = route_of(_NAME, *tensors, refused=refused, batches=False, holds="" if empty else "all logits")
    if route is Route.OPERATOR and not _keeps_where_traced(input, linear_weight, linear_bias, how):
        return _traced(input, linear_weight, target, linear_bias, options, columns, wanted, how, dtype)
    if route is not Route.KERNEL:
        rows, targets = _rows_of(input, target)
        of_rows = target_of_rows(targets, options.ignore_index)
        made = whole_logits(rows, linear_weight, linear_bias, of_rows, options.ignore_index)
        return of_logits.of_checked(made.view(*leading, n_classes), target, given, wanted, dtype, kept)
    return _by_chunks(input, linear_weight, target, linear_bias, options, columns, wanted, how, dtype)


def _checked(
    input, linear_weight, target, linear_bias, given, asked, how, dtype, over: Over | None = None
) -> tuple[tuple[Tensor, Tensor, Tensor | None], LogProb, Asked]:
    """((input, weight, bias) in the dtype of products, with a group this rank's classes of both; options; wanted)."""
    entropy, lse, stats = asked
    wanted = of_logits.wanted_of(entropy, lse, stats, _NAME)
    check_layer(_NAME, input, linear_weight, linear_bias, how["chunk_size"], how["accumulate"])
    if how["logits"] not in ("auto", "keep", "recompute"):
        raise ValueError(f'{_NAME}: logits must be "auto", "keep" or "recompute", got {described(how["logits"])}')
    input, linear_weight, linear_bias = as_autocast_has(input, linear_weight, linear_bias)
    if over is not None:
        linear_weight = own_classes(_NAME, "linear_weight", linear_weight, over.group)
        linear_bias = own_classes(_NAME, "linear_bias", linear_bias, over.group)
    columns, leading = linear_weight.shape[0], tuple(input.shape[:-1])
    columns = columns if over is None else sum(sizes_of(_NAME, over, columns))
    if over is not None and how["input_sharded"]:
        leading = leading_of_all(_NAME, input, target, over.group)
    options = of_logits.checked(input, (*leading, columns), target, given, dtype, _NAME)
    return (input, linear_weight, linear_bias), options, wanted


def _of_shards(input, linear_weight, target, linear_bias, given, asked, kept, how, dtype, over: Over):
    """A call whose classes lie over the ranks of a group."""
    with Refusing(_NAME, over, input, linear_weight, target):
        check_over(_NAME, over, input, target, given["temperature"], *of_logits.tensors_of_kept(kept).values())
        (input, linear_weight, linear_bias), options, wanted = _checked(
            input, linear_weight, target, linear_bias, given, asked, how, dtype, over
        )
        sizes = sizes_of(_NAME, over, linear_weight.shape[0])
        if checks_values(input, target):
            check_targets_of_all(_NAME, target, sizes, over, options.ignore_index)
        leading = leading_of_all(_NAME, input, target, over.group) if how["input_sharded"] else tuple(input.shape[:-1])
        columns = of_logits.checked_kept(_NAME, kept, input, (*leading, over.n_classes or sum(sizes)))
    alike = {
        "operation": _NAME, "dtype": input.dtype, "weight_dtype": linear_weight.dtype,
        "in_features": input.shape[-1], **options.asked(),
        "wanted": tuple(wanted), "result": dtype, **how, "targets": tuple(target.shape[input.ndim - 1 :]),
        "require_grad": tuple(each is not None and needs_grad(each) for each in (input, linear_weight, linear_bias)),
        "kept": of_logits.told_of_kept(columns),
    }  # fmt: skip
    shards = shards_of(_NAME, sizes, prod(input.shape[:-1]), over, input.device, alike, target)
    peers = peers_of(_NAME, over.transport, over.group, input, linear_weight, target)
    if peers is not None:  # the backend too makes collectives, which a rank must not make alone
        peers.agree(_NAME, (shards.sizes, shards.n_classes, input.shape, target.shape, *alike.items()))
    shards, held = told_by(peers, _NAME, shards), shards.held
    if how["input_sharded"]:
        input = GatheredRows.apply(input, shards, _NAME)
    if held < linear_weight.shape[0]:  # padding may be anything, so no product includes it
        linear_weight = linear_weight[:held]
        linear_bias = None if linear_bias is None else linear_bias[:held]
    return _by_chunks(input, linear_weight, target, linear_bias, options, columns, wanted, how, dtype, shards)


def _rows_of(input: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(the input [n, in_features], its targets [n, k])"""
    rows = input.reshape(prod(input.shape[:-1]), input.shape[-1])
    return rows, target.reshape(rows.shape[0], target.shape[-1] if target.ndim == input.ndim else 1)


def _keeps_where_traced(input: Tensor, w: Tensor, bias: Tensor | None, how: dict[str, Any]) -> bool:
    """Whether all logits of a call that is traced are made at once, as a tensor of their own."""
    if not any(each is not None and needs_grad(each) for each in (input, w, bias)):
        return False
    few = prod(input.shape[:-1]) <= max(how["chunk_size"] or 0, input.shape[-1])
    return how["logits"] == "keep" or (how["logits"] == "auto" and few)


def _traced(
    input: Tensor, w: Tensor, target: Tensor, bias: Tensor | None, options: LogProb, columns: Kept, wanted: Asked,
    how: dict[str, Any], dtype: torch.dtype | None,
) -> Tensor | LogProbOutput:  # fmt: skip
    """One registered operator, which makes the logits by chunks, and again for the gradient."""
    rows, targets = _rows_of(input, target)
    if isinstance(options.temperature, Tensor):
        options = replace(options, temperature=options.temperature.detach().reshape(-1))
    found = torch.ops.fused_softmax.linear_log_prob.default(
        rows, w, bias, targets, *options.traced(), list(wanted[:-1]), *columns[:3], how["chunk_size"], how["accumulate"]
    )
    dtype = dtype or arithmetic_of(input)
    return of_logits.output_of_operator(_NAME, found, wanted, target.shape, input.shape[:-1], dtype)


def _by_chunks(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, options: LogProb, columns: Kept,
    wanted: Asked, how: dict[str, Any], dtype: torch.dtype | None, shards: Shards | None = None,
) -> Tensor | LogProbOutput:  # fmt: skip
    """shards: who has which classes; the weight then has those of this rank."""
    rows, targets = _rows_of(input, target)
    options, temperature = of_logits.split(options, input)
    which, n = counted(targets, options.ignore_index) if how["skip_ignored"] else None, len(rows)
    if which is not None:
        rows, targets, columns = rows[which], targets[which], columns.of_rows(which)
        temperature = None if temperature is None else temperature[which]
    asked = [each is not None and needs_grad(each) for each in (rows, linear_weight, linear_bias)]
    sizes = () if shards is None else shards.sizes
    linear = linear_of(rows, linear_weight, how["chunk_size"], how["accumulate"], asked[1], sizes)
    few = rows.shape[0] <= max(linear.chunk_size, rows.shape[1])
    keeps = any(asked) and (how["logits"] == "keep" or (how["logits"] == "auto" and few))
    way = way_of(rows, linear_weight, linear, asked, keeps, columns, shards is not None, how["chunk_size"])
    if way.classes is not None:  # chunks of rows then have no sum of linear_weight's gradient to save
        linear = linear_of(rows, linear_weight, how["chunk_size"], how["accumulate"], False)
    of_call = How(
        options, linear, wanted._replace(states=any(asked)), keeps, way.classes, shards, not how["input_sharded"]
    )
    function = _LinearLogProb if shards is None else _LinearLogProbOverRanks
    found = function.apply(rows, linear_weight, linear_bias, targets.contiguous(), temperature, columns, of_call)
    if which is not None:
        found = [None if each is None else spread(each, which, n) for each in found]
    return of_logits.output_of(found, wanted, target.shape, input.shape[:-1], dtype or arithmetic_of(input))


class How(NamedTuple):
    """What a call does, beside its tensors.

    keeps: whether all logits stay for the backward pass. classes: of a block by which the gradients are made; None if
    by chunks of rows. shards: of classes that lie over ranks, or None. summed: whether the input's gradient is summed
    over them here.
    """

    options: LogProb
    linear: Linear
    asked: Asked
    keeps: bool
    classes: int | None = None
    shards: Shards | None = None
    summed: bool = True

    @property
    def group(self) -> Any:
        return group_of(self.shards, self.summed)


def target_of_rows(targets: Tensor, ignore_index: int) -> Tensor:
    """A target [n] for each row of targets [n, k]: ignored if all of the row's targets are."""
    counts = (targets.long() != ignore_index).any(-1)
    return torch.where(counts, 0 if ignore_index else 1, ignore_index)


class _LinearLogProb(torch.autograd.Function):
    """(log_prob, entropy, lse, statistics) of rows, in the dtype of the arithmetic; None for what is not asked for."""

    @staticmethod
    def forward(ctx, x, w, bias, target, temperature, columns, how):
        ctx.set_materialize_grads(False)
        found, ctx.logits = forward_of_layer(x, w, bias, target, temperature, columns, how)
        ctx.how = how
        ctx.save_for_backward(
            x, w, bias, target, temperature, found.m, found.ls, found.entropy, *columns[:3]
        )  # fmt: skip
        if found.is_top1 is not None:
            ctx.mark_non_differentiable(found.is_top1)
        return found[2:]

    @staticmethod
    def backward(ctx, dlog_prob, dentropy, dlse, *of_stats):
        refuse(_NAME, STATISTICS, of_stats, HAVE)
        nothing, asked = (None,) * 4, list(ctx.needs_input_grad[:3])
        if dlog_prob is None and dentropy is None and dlse is None:
            return (None,) * 7
        incoming = Incoming(*resolved(dlog_prob, dentropy, dlse))
        x, w, bias, *others = saved_of(ctx, _NAME)
        saved: list[Any] = [None if each is None else each.contiguous() for each in others]
        target, temperature, m, ls, entropy, *of_kept = saved
        columns = Kept(*of_kept)
        if ctx.how.shards is None and (torch.is_grad_enabled() or batched(*incoming)):
            return *differentiable(x, w, bias, target, temperature, columns, ctx.how.options, asked, incoming), *nothing
        logits, ctx.logits = ctx.logits, None  # of which the gradient is made where they are
        states = m, ls, entropy
        return *backward_of_layer(
            x, w, bias, target, temperature, columns, states, ctx.how, asked, incoming, logits
        ), *nothing


class _LinearLogProbOverRanks(_LinearLogProb):
    """`_LinearLogProb` for classes that lie over ranks.

    All is the same on every rank, except the gradients of weight and bias.
    """

    backward = staticmethod(once(_NAME)(_LinearLogProb.backward))


def forward_of_layer(x, w, bias, target, temperature, columns: Kept, how: How) -> tuple[LogProbRows, Tensor | None]:
    """(what is known of all rows, the logits if they are kept)."""
    linear = Linear(x.shape[0], how.linear.accumulate) if how.keeps else how.linear
    parts, logits = [], None
    for start, logits in _chunks(*_lowered(x, w, bias), linear):
        here = slice(start, start + len(logits))
        t = None if temperature is None else temperature[here]
        if how.shards is None:
            given = given_of(aligned(logits), target[here], t, how.options, columns.rows(here))
            parts.append(forward(given, how.options, how.asked))
        else:
            of_call = OfCall(how.options, how.shards, how.asked)
            parts.append(rows_of_all(logits, target[here], t, columns.rows(here), of_call))
    if len(parts) == 1:
        return parts[0], logits if how.keeps else None
    joined = [None if each[0] is None else torch.cat(each) for each in zip(*parts, strict=True)]
    return LogProbRows(*joined), None  # type: ignore[arg-type]


def backward_of_layer(
    x, w, bias, target, temperature, columns: Kept, states, how: How, asked, incoming: Incoming, kept: Tensor | None
):  # fmt: skip
    """The gradients asked for. kept: all logits, over which their gradient is written; None if they are made again."""
    if how.classes is not None:
        layer = x.detach(), w.detach(), None if bias is None else bias.detach()
        return gradients_by_classes(
            *layer, target, temperature, columns, states, how.options, asked, incoming, how.classes, how.linear
        )  # fmt: skip
    lowered = _lowered(x, w, bias)
    left_out = (target.long() == how.options.ignore_index).all(-1) if asked[1] else None
    linear = how.linear if kept is None else Linear(x.shape[0], how.linear.accumulate)
    summing = Summing(*lowered, linear, how.group, asked, wide=w.dtype != x.dtype, left_out=left_out)
    for start, logits in _chunks(*lowered, linear) if kept is None else [(0, kept)]:
        here = slice(start, start + len(logits))
        t = None if temperature is None else temperature[here]
        m, ls, entropy, *of_rows = (each if each is None else each[here] for each in (*states, *incoming))
        if how.shards is None:
            given = given_of(logits, target[here], t, how.options, columns.rows(here))
            backward(given, m, ls, entropy, Incoming(*of_rows), how.options, logits)  # type: ignore[arg-type]
        else:
            of_call, states_here = OfCall(how.options, how.shards, how.asked), (m, ls, entropy)
            gradient_of(logits, target[here], t, states_here, Incoming(*of_rows), of_call, logits, columns.rows(here))  # type: ignore[arg-type]
        summing.add(start, logits)
    del logits, kept  # the rounded gradients take as much
    return summing.finish().in_dtypes(x, w, bias)


def _chunks(x: Tensor, w: Tensor, bias: Tensor | None, linear: Linear) -> Iterator[tuple[int, Tensor]]:
    """`chunks`, and one without rows where there are none."""
    yield from chunks(x, w, bias, linear) if len(x) else [(0, x.new_empty(0, len(w)))]


def differentiable(x, w, bias, target, temperature, columns: Kept, options: LogProb, asked, incoming: Incoming):
    """The gradients, composed of torch's operations, for a second derivative or a batch of gradients."""
    ignore_index, again = options.ignore_index, torch.is_grad_enabled()
    with autocast.off(x), torch.enable_grad():
        x, w, bias = apart(x, w, bias)
        inputs = [each for each, wants in zip((x, w, bias), asked, strict=True) if wants]
        weight, of_bias = w.to(x.dtype), None if bias is None else bias.to(x.dtype)
        logits = whole_logits(x, weight, of_bias, target_of_rows(target, ignore_index), ignore_index)
        results = of_logits.referred(logits, target, options, temperature, columns)[:3]
        pairs = [(y, g.to(y.dtype)) for y, g in zip(results, incoming, strict=True) if g is not None]
        outputs, of_outputs = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(outputs, inputs, of_outputs, create_graph=again))
    return [next(found) if wants else None for wants in asked]
