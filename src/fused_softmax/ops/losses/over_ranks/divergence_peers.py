"""Divergences of rows whose classes lie over ranks, by one launch that exchanges with those of the other ranks.

A sum or mean reads the shards of student and teacher once, and writes the gradient in the same pass.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_softmax.core.calls import kept
from fused_softmax.core.launched import Launched, compose
from fused_softmax.core.no_gradient import saved_of
from fused_softmax.core.route import needs_grad, resolved
from fused_softmax.core.runner import IN_TURN, spec_of
from fused_softmax.ops.losses.divergence_launches import (
    BESIDES,
    IN_TURN_TWICE,
    NUMBERS,
    Pair,
    PairRows,
    in_vectors,
    kind_of,
    vector_of,
)
from fused_softmax.ops.losses.divergence_rows import counts_of, of_mean, pair_of, sum_of
from fused_softmax.ops.losses.kernels.spec import PairSpec
from fused_softmax.ops.losses.launches import picked_of
from fused_softmax.ops.losses.options import Divergence
from fused_softmax.ops.losses.over_ranks.divergence import OfCall, flat, gradients_of
from fused_softmax.ops.losses.sums import multiply, of_counted
from fused_softmax.ranks.first_derivative import once
from fused_softmax.ranks.groups import Shards
from fused_softmax.ranks.launches import Facts, allocator, facts_of, plan_of, prepare_launch
from fused_softmax.ranks.peers import Peers

_DTYPES = (torch.float32, torch.bfloat16)  # a gradient of float16 would underflow before a loss's scale reaches it


def in_one_launch(pair: Pair, options: Divergence, shards: Shards) -> bool:
    """Whether one launch computes a sum or mean. All ranks decide alike."""
    if pair.x.dtype not in _DTYPES or pair.y.dtype not in _DTYPES or options.scale == 0 or options.target_scale == 0:
        return False
    facts, vector = facts_of(shards), vector_of(pair)
    if not len(pair.x) or any(n == 0 or n % vector for n in shards.held_by):
        return False
    return _plan(len(pair.x), pair, facts) is not None


def _plan(n_rows: int, pair: Pair, facts: Facts) -> Any:
    itemsize = max(pair.x.element_size(), pair.y.element_size())
    return plan_of(n_rows, itemsize, "even", facts, pair.x.get_device(), inputs=2)


def summed_by_peers(
    x: Tensor, y: Tensor, options: Divergence, weight: Tensor | None, reduction: str, dtype: torch.dtype,
    shards: Shards, peers: Peers,
) -> Tensor | None:  # fmt: skip
    """The sum or mean of the divergences of rows; None where one launch cannot compute it.

    Of the columns [..., columns] that this rank has. weight: of rows, of the leading shape. dtype: of the result.
    """
    pair, of_call = pair_of(flat(x), flat(y.detach()), options), OfCall(options.with_numbers(), shards)
    if not in_one_launch(pair, of_call.options, shards):
        return None
    counts, share = counts_of(pair, weight, reduction)
    how = How(of_call, reduction, dtype, needs_grad(x), peers)
    found = SummedByPeers.apply(pair.x, pair.y, pair.temperature, pair.target_temperature, counts, (how, share))
    return found.to(dtype)


class How(NamedTuple):
    """How a launch computes a sum or mean. dtype: of the call's result. gradient: whether it is wanted."""

    of_call: OfCall
    reduction: str
    dtype: torch.dtype
    gradient: bool
    peers: Peers


class SummedByPeers(torch.autograd.Function):
    """The sum or mean of the divergences of rows, with the gradient of this rank's columns."""

    @staticmethod
    def forward(ctx, x, y, temperature, target_temperature, counts, how):
        (of_call, reduction, *_), share = how
        mean, total = reduction == "mean", None
        if mean and counts is not None:
            counts, total = of_mean(counts)
        pair = Pair(x.detach(), y.detach(), None, temperature, target_temperature)
        held = of_call.shards.held
        if held < x.shape[1]:
            pair = pair._replace(x=pair.x[:, :held], y=pair.y[:, :held])
        own = pair._replace(x=in_vectors(pair.x, pair.y), y=in_vectors(pair.y, pair.x))
        value, known, ctx.gradient = _launch(own, counts, share, how[0])
        ctx.of_call, ctx.share = of_call, share
        ctx.save_for_backward(x, y, temperature, target_temperature, counts, known)
        return sum_of(value, counts, mean, total)

    @staticmethod
    @once("divergence")
    def backward(ctx, dresult):
        (dresult,) = resolved(dresult)
        x, y, *others = saved_of(ctx, "divergence")
        # Given away: whoever has it may change it, and a second backward writes it again.
        dx, ctx.gradient = ctx.gradient, None
        # Hooks of saved tensors may return other strides.
        saved: list[Any] = [each if each is None else each.contiguous() for each in others]
        *of_rows, counts, known = saved
        if dx is None:
            m, ls, m_t, ls_t, total = known.unbind()
            if ctx.of_call.options.target_is != "logits":
                m_t = ls_t = None
            dvalue = (dresult * ctx.share).expand(len(x)) if counts is None else counts * dresult
            rows = PairRows(m, ls, m_t, ls_t, None, total)
            dx, _ = gradients_of(Pair(x, y, None, *of_rows), rows, (dvalue, None), ctx.of_call, (True, False))
        else:
            multiply(dx, dresult.contiguous() if counts is None else of_counted(dresult, counts == 0))
            padding = x.shape[1] - dx.shape[1]
            dx = torch.nn.functional.pad(dx, (0, padding)) if padding else dx
        return dx, *[None] * 5


def _launch(
    pair: Pair, counts: Tensor | None, share: float, how: How
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(the divergences of whole rows, what is known of them, the gradient of this rank's columns)."""
    (options, shards), peers = how.of_call, how.peers
    peers.in_turn()
    facts = facts_of(shards)._replace(digest=None)  # of the numbers too, which may change at every step
    key = peers.number, *options.key, facts, how.reduction, how.dtype, how.gradient
    call = kept("divergence by peers", key, (*pair, counts), _prepare, pair, counts, how, facts)
    return call(peers, shards.group, pair, counts, (*options.numbers, share))


def _prepare(pair: Pair, counts: Tensor | None, how: How, facts: Facts) -> Launched:
    """call(peers, group, pair, counts, numbers) -> (value, known, dx)"""
    from fused_softmax.ops.losses.kernels.divergence_peers import _pair_peers

    (options, shards), gradient, peers = how.of_call, how.gradient, how.peers
    (n_rows, n_cols), device, empty = pair.x.shape, pair.x.get_device(), allocator(pair.x.device)
    plan_for = partial(_plan, pair=pair, facts=facts)
    plan = plan_for(n_rows)
    spec = spec_of(
        PairSpec, plan, torch.float32, device, itemsize=plan.itemsize, peers=True, **kind_of(pair, options)
    )  # fmt: skip
    spec = replace(spec, itemsize=min(pair.x.element_size(), pair.y.element_size()))
    dtype = pair.x.dtype

    def made(n):
        value = empty((n,), (1,), torch.float32)
        if not gradient:
            return value, None, None
        return value, empty((5, n), (n, 1), torch.float32), empty((n, n_cols), (n_cols, 1), dtype)

    def arranged(pair, counts, value, known, dx):
        return pair.x, pair.y, dx, pair.temperature, pair.target_temperature, counts, value, known

    names = "x", "y", "dx", "temperature", "target_temperature", "dvalue", "value", "known"
    given = arranged(pair, counts, *made(n_rows))
    picked = picked_of(given)
    numbers = *NUMBERS, "share"
    values = dict(zip(numbers, (*options.numbers, 1.0), strict=True)) | ({} if gradient else {"dx_row_stride": 0})
    of_rows = [each is not None for each in (pair.temperature, pair.target_temperature, counts)]
    said = f"{pair.x.dtype} {pair.y.dtype} {how.dtype} {facts.sizes} {facts.n_classes} {options.key} {of_rows}"
    besides = BESIDES + 16 if options.kind == "jsd" and plan.itemsize == 4 else BESIDES  # fp32 jsd spills by fewer
    launched = prepare_launch(
        _pair_peers, plan_for, n_rows, spec, dict(zip(names, given, strict=True)), values, numbers, peers, shards.group,
        f"divergence {how.reduction} {said}",
        messages=spec.messages, besides=besides, turns=IN_TURN_TWICE if spec.twice else IN_TURN,
    )  # fmt: skip

    def build(n, run):
        def call(peers, group, pair, counts, numbers):
            of_call = made(n)
            run(peers, group, *picked(arranged(pair, counts, *of_call)), *numbers)
            return of_call

        return call

    return compose(build, launched, n=n_rows, by_row=True)
