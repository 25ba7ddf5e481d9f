"""Cross-entropy of rows whose classes lie over ranks, by one launch that exchanges with those of the other ranks.

A sum or mean with a gradient reads the shard once and writes its gradient (2MN). All other losses take the states of
whole rows from such a launch (MN), and go on as `states` does.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_softmax.core.calls import kept
from fused_softmax.core.launched import Launched, compose
from fused_softmax.core.layout import alignment_of
from fused_softmax.core.no_gradient import saved_of
from fused_softmax.core.route import needs_grad
from fused_softmax.core.runner import spec_of
from fused_softmax.ops.losses.kernels.spec import LossSpec
from fused_softmax.ops.losses.launches import (
    WHOLE,
    Given,
    LossRows,
    counted_by_each,
    picked_of,
    ticket_of,
    with_whole_rows,
)
from fused_softmax.ops.losses.options import Loss
from fused_softmax.ops.losses.output import Wanted
from fused_softmax.ops.losses.over_ranks.states import States, coefficients_of, counts_of, gradient_of, shard_of
from fused_softmax.ops.losses.overwritten import begin_overwriting
from fused_softmax.ops.losses.steps import (
    Kind,
    OverRanks,
    Steps,
    as_rows,
    differentiated,
    dx_like,
    prepare_around,
    run_steps,
)
from fused_softmax.ranks.first_derivative import once
from fused_softmax.ranks.groups import Shards
from fused_softmax.ranks.launches import DTYPES, Facts, allocator, facts_of, plan_of, prepare_launch
from fused_softmax.ranks.peers import Peers

_NUMBERS = ("factor", "hidden", "cap")  # of LossNumbers, which each launch is given
_numbers_in = attrgetter(*_NUMBERS)


def in_one_launch(x: Tensor, target: Tensor, loss: Loss, shards: Shards) -> bool:
    """Whether the launch that reads the logits merges the states of whole rows. All ranks decide alike."""
    if loss.weight is not None or loss.smooth or loss.stats or loss.scale == 0 or x.dtype not in DTYPES:
        return False
    n_rows = target.numel()
    return n_rows > 0 and plan_of(n_rows, x.element_size(), "even", facts_of(shards), x.get_device()) is not None


class OfRanks(NamedTuple):
    """What a kept call over ranks does, beside its tensors, its numbers and its group.

    held: this rank's columns that are no padding. empty: what allocates. said: `said_of`.
    """

    kind: Kind
    facts: Facts
    held: int
    empty: Callable[..., Tensor]
    said: str


def said_of(loss: Loss, wanted: Wanted, dtype: torch.dtype) -> str:
    """What ranks have to ask alike of a loss, but softcap and scale, which each launch is given."""
    of_loss = {name: value for name, value in loss.asked().items() if name not in ("softcap", "scale")}
    return f"{of_loss} {loss.kind()} {tuple(wanted[:3])} {dtype}"


def written_at_once(input: Tensor, loss: Loss, wanted: Wanted) -> bool:
    """Whether the call asks only for a sum or mean, and its gradient if one is wanted."""
    alone = loss.reduction != "none" and not wanted.beside and not loss.lse_square_scale
    inplace = wanted.inplace and not input.is_contiguous()
    return alone and not (needs_grad(input) and (input.dtype == torch.float16 or inplace))


def loss_by_peers(
    input: Tensor, target: Tensor, loss: Loss, wanted: Wanted, dtype: torch.dtype, shards: Shards, peers: Peers
) -> Tensor:
    """What `prepare_loss` gives, found or kept, of arguments that were checked."""
    options = peers.number, *loss.asked().items(), *wanted, dtype, facts_of(shards), torch.is_grad_enabled()
    prepared = input, target, loss, wanted, dtype, shards, peers
    call = kept("cross_entropy by peers", options, (input, target), prepare_loss, *prepared)
    return call(peers, shards.group, input, target, loss.softcap, loss.scale)


def prepare_loss(
    input: Tensor, target: Tensor, loss: Loss, wanted: Wanted, dtype: torch.dtype, shards: Shards, peers: Peers
) -> Launched:
    """call(peers, group, input, target, softcap, scale) -> the loss, a sum or mean that is `written_at_once`."""
    gradient = needs_grad(input)
    kind = Kind(loss, wanted, dtype, wanted.inplace and gradient, gradient)
    of_ranks = _of_ranks(kind, facts_of(shards), input)
    simple = input.ndim == 2 and (input.stride(1) == 1 or input.shape[1] <= 1) and target.is_contiguous()
    x, flat = as_rows(input.detach(), target)
    dx, whole = dx_like(kind, x), gradient and len(x) <= WHOLE[-1]
    prepare_rows = partial(_prepare_rows, of_ranks, x, dx, flat, whole, peers, shards.group)
    steps = prepare_around(prepare_rows, kind, dx, flat, loss, shards.n_classes, torch.float32, whole, counts=whole)
    plain = loss.numbers if loss.plain else None

    def build(_, *functions):
        steps = Steps(*functions)

        def call(peers, group, input, target, softcap, scale):
            peers.in_turn()
            claim = begin_overwriting(input) if kind.inplace else None
            x, flat = (input, target) if simple else as_rows(input, target)
            asked, numbers = loss, plain
            if numbers is None:
                asked = replace(loss, softcap=softcap, scale=1.0 if scale is None else scale)
                numbers = asked.numbers
            of_group = steps._replace(rows=partial(steps.rows, peers, group))
            if not gradient:
                return run_steps(of_group, x, flat, asked, numbers, None, kind, None)[0][0]
            ranks = OverRanks(of_ranks.facts.of(group), _again)
            return differentiated(x, flat, (asked, numbers, None), (kind, of_group, claim, ranks))

        return call

    return compose(build, *steps, n=len(input) if simple and target.ndim == 1 else None, by_row=True)


def _of_ranks(kind: Kind, facts: Facts, x: Tensor) -> OfRanks:
    return OfRanks(kind, facts, facts.of(None).held, allocator(x.device), said_of(kind.loss, kind.wanted, kind.dtype))


def _prepare_rows(
    of_ranks: OfRanks, x: Tensor, dx: Tensor | None, target: Tensor, whole: bool, peers: Peers, group: Any,
    totals: Tensor | None,
) -> Launched:  # fmt: skip
    """call(peers, group, given, numbers) -> LossRows, whose m is m and ls of rows [2, n]."""
    kind, held, empty, n_rows = of_ranks.kind, of_ranks.held, of_ranks.empty, len(x)
    device, counts, padded = x.get_device(), whole and kind.loss.mean, held < x.shape[1]

    def rows_of(n):
        states = empty((2, n), (n, 1), torch.float32)
        result = empty((), (), kind.dtype) if whole else None
        return LossRows(states, None, empty((n,), (1,), torch.float32), result=result)

    def arranged(given, rows):
        ticket = ticket_of(device) if whole else None
        return given.x, given.dx, given.target, given.totals, rows.m, rows.loss, rows.result, ticket

    def counts_alike(n):
        return not whole or (n <= WHOLE[-1] and (not counts or counted_by_each(n) == counted_by_each(n_rows)))

    like = Given(x, dx, target, totals=None if dx is None else totals)
    picked = picked_of(arranged(like, rows_of(n_rows)))
    launched = _prepare_launch(
        of_ranks, x, dx, target, peers, group, totals=totals, result=rows_of(n_rows).result, alike=counts_alike,
        loss=rows_of(n_rows).loss, finishes=whole, counted=counted_by_each(n_rows) if counts else 0,
    )  # fmt: skip

    def build(n, run):
        def call(peers, group, given, numbers):
            rows, dx = rows_of(n), given.dx
            run(peers, group, *picked(arranged(given, rows)), *_numbers_in(numbers))
            if dx is not None and padded:
                dx[:, held:] = 0  # padding
            return rows

        return call

    return compose(build, launched, n=n_rows, like=partial(rows_of, n_rows), by_row=True)


def _prepare_launch(
    of_ranks: OfRanks, x: Tensor, dx: Tensor | None, target: Tensor, peers: Peers, group: Any, *, totals: Tensor | None,
    loss: Tensor | None, result: Tensor | None = None, finishes: bool = False, counted: int = 0,
    alike: Callable[[int], bool] = lambda n: True,
) -> Launched:  # fmt: skip
    """call(peers, group, x, dx, target, totals, states, loss, result, ticket, *numbers), less what is None.

    alike: whether another number of rows takes the same launch, if their plan is the same.
    """
    from fused_softmax.ops.losses.kernels.peers import _peer_loss

    asked, facts, device = of_ranks.kind.loss, of_ranks.facts, x.get_device()
    alignment = alignment_of(*(each[:, : of_ranks.held] for each in (x, dx) if each is not None))
    itemsize = 4 if asked.softcap is not None else x.element_size()

    def plan_for(n_rows):
        plan = plan_of(n_rows, itemsize, alignment, facts, device)
        assert plan is not None
        return plan

    spec = spec_of(
        LossSpec, plan_for(len(x)), x.dtype, device, itemsize=x.element_size(), peers=True,
        **asked.kind() | {"mean": asked.mean and dx is not None, "z_loss": False},
        gradient=dx is not None, inplace=dx is not None and of_ranks.kind.inplace, finishes=finishes, counted=counted,
        totals=1 if totals is None else totals.shape[1],
    )  # fmt: skip
    states = torch.empty((2 if loss is not None else 3, len(x)), dtype=torch.float32, device=x.device)
    tensors = {
        "x": x, "dx": dx, "target": target, "totals": totals if dx is not None else None,
        "states": states, "loss": loss, "result": result, "ticket": ticket_of(device) if finishes else None,
    }  # fmt: skip
    values = {
        "n_classes": facts.n_classes, "first": facts.of(None).first, "ignore_index": asked.ignore_index,
        **dict(zip(_NUMBERS, _numbers_in(asked.numbers), strict=True)),
    } | ({} if dx is not None else {"dx_row_stride": 0})  # fmt: skip
    said = f"cross_entropy {x.dtype} {facts.sizes} {facts.n_classes} {of_ranks.said}"
    return prepare_launch(
        _peer_loss, plan_for, len(x), spec, tensors, values, _NUMBERS, peers, group, said, alike=alike
    )  # fmt: skip


@once("cross_entropy")
def _again(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient from the logits and the states of rows."""
    x, target, _, of_rows, *_ = saved_of(ctx, "cross_entropy")
    if x is None:
        raise RuntimeError("cross_entropy: inplace_backward has one backward, of the loss alone")
    m, ls = of_rows
    x = with_whole_rows(x)  # hooks of saved tensors may return other strides
    shard, states = shard_of(x, target, ctx.loss, ctx.ranks.shards), States(m, ls, torch.zeros_like(m))
    given = coefficients_of(shard, states, counts_of(shard, states), dy.to(m.dtype), None, None)
    return (gradient_of(shard, states, given, torch.empty(x.shape, dtype=x.dtype, device=x.device)),)


def states_by(peers: Peers, wanted: Wanted, dtype: torch.dtype) -> Callable[[Tensor, Tensor, Loss, Shards], Tensor]:
    """What makes m, ls and the targets' logits [3, n] of whole rows of a shard."""
    return partial(_states_of, peers, wanted, dtype)


def _states_of(
    peers: Peers, wanted: Wanted, dtype: torch.dtype, x: Tensor, target: Tensor, loss: Loss, shards: Shards
) -> Tensor:  # fmt: skip
    peers.in_turn()
    facts, group = facts_of(shards), shards.group
    options = peers.number, *loss.asked().items(), facts, wanted, dtype
    of_ranks = _of_ranks(Kind(loss, wanted, dtype, False, False), facts, x)
    call = kept("states by peers", options, (x, target), _prepare_states, of_ranks, x, target, peers, group)
    return call(peers, group, x, target, _numbers_in(loss.numbers))


def _prepare_states(of_ranks: OfRanks, x: Tensor, target: Tensor, peers: Peers, group: Any) -> Launched:
    n_rows, empty = len(x), of_ranks.empty
    run = _prepare_launch(of_ranks, x.detach(), None, target, peers, group, totals=None, loss=None).__call__

    def call(peers, group, x, target, numbers):
        found = empty((3, n_rows), (n_rows, 1), torch.float32)
        run(peers, group, x, target, found, *numbers)
        return found

    return Launched(call)
