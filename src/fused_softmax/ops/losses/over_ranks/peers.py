"""Cross-entropy of rows whose classes lie over ranks, by one launch that exchanges with those of the other ranks.

A sum or mean with a gradient reads the shard once and writes its gradient (2MN). All else takes the states of whole
rows from such a launch (MN), and goes on as `states` does.
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
from fused_softmax.core.route import batched, needs_grad, resolved
from fused_softmax.core.runner import spec_of
from fused_softmax.ops.losses.calls import WHOLE, LossRows, counted_by_each, ticket_of
from fused_softmax.ops.losses.kernels.peers import _peer_loss
from fused_softmax.ops.losses.kernels.spec import LossSpec
from fused_softmax.ops.losses.options import Loss
from fused_softmax.ops.losses.output import Wanted
from fused_softmax.ops.losses.over_ranks.states import States, coefficients_of, counts_of, gradient_of, shard_of
from fused_softmax.ops.losses.overwritten import begin_overwriting, check_claim
from fused_softmax.ops.losses.steps import as_rows
from fused_softmax.ops.losses.sums import prepare_finish, prepare_multiply, prepare_totals
from fused_softmax.ranks.first_derivative import once
from fused_softmax.ranks.groups import Shards
from fused_softmax.ranks.launches import DTYPES, Facts, allocator, facts_of, plan_of, prepare_launch
from fused_softmax.ranks.peers import Peers

_NUMBERS = ("factor", "hidden", "cap")


def in_one_launch(x: Tensor, target: Tensor, loss: Loss, shards: Shards) -> bool:
    """Whether the launch that reads the logits merges the states of whole rows: by what is the same on all ranks."""
    if loss.weight is not None or loss.smooth or loss.stats or loss.scale == 0 or x.dtype not in DTYPES:
        return False
    n_rows = target.numel()
    return n_rows > 0 and plan_of(n_rows, x.element_size(), "even", facts_of(shards), x.get_device()) is not None


class Kind(NamedTuple):
    """What a kept call does, beside its tensors and numbers.

    at_once: whether its gradient is written with the loss. held: this rank's columns that are no padding. empty: what
    allocates. said: `said_of`.
    """

    loss: Loss
    dtype: torch.dtype
    inplace: bool
    at_once: bool
    facts: Facts
    held: int
    empty: Callable[..., Tensor]
    said: str


_numbers_in = attrgetter(*_NUMBERS)


def _numbers_of(loss: Loss) -> tuple[float, float, float]:
    """_NUMBERS of a loss, which each launch is given."""
    return _numbers_in(loss.numbers())


def said_of(loss: Loss, wanted: Wanted, dtype: torch.dtype) -> str:
    """What ranks have to ask alike of a loss, but softcap and scale, which each launch is given."""
    of_loss = {name: value for name, value in loss.asked().items() if name not in ("softcap", "scale")}
    return f"{of_loss} {loss.kind()} {tuple(wanted[:3])} {dtype}"


def written_at_once(input: Tensor, loss: Loss, wanted: Wanted) -> bool:
    """Whether a sum or mean, and its gradient where one is wanted, is all that is asked for."""
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
    inplace = wanted.inplace and gradient
    said = said_of(loss, wanted, dtype)
    kind = Kind(loss, dtype, inplace, gradient, facts_of(shards), shards.held, allocator(input.device), said)
    simple = input.ndim == 2 and (input.stride(1) == 1 or input.shape[1] <= 1) and target.is_contiguous()
    x, flat = as_rows(input.detach(), target)
    steps = _prepare_steps(kind, x, flat, peers, shards.group)
    plain = _numbers_of(loss) if loss.plain else None

    def build(_, *functions):
        steps = _Steps(*functions)

        def call(peers, group, input, target, softcap, scale):
            peers.in_turn()
            claim = begin_overwriting(input) if kind.inplace else None
            x, flat = (input, target) if simple else as_rows(input, target)
            numbers = plain
            if numbers is None:
                numbers = _numbers_of(replace(loss, softcap=softcap, scale=1.0 if scale is None else scale))
            how = kind, steps, numbers, peers, group, claim
            if not gradient:
                return _run(x, flat, how)[0]
            return _differentiated(x, flat, how)

        return call

    return compose(build, *steps, n=len(input) if simple and target.ndim == 1 else None, by_row=True)


class _Steps(NamedTuple):
    """The launches of a loss, as Launched; None for one that a call has no need of."""

    totals: Any
    rows: Any
    finish: Any
    multiply: Any


class Found(NamedTuple):
    """m and ls of rows [2, n], their losses [n], and these added up, where one launch has done that."""

    states: Tensor
    values: Tensor
    result: Tensor | None


def _prepare_steps(kind: Kind, x: Tensor, target: Tensor, peers: Peers, group: Any) -> _Steps:
    loss, columns = kind.loss, x.shape[1]
    whole = kind.at_once and len(x) <= WHOLE[-1]
    n_classes = kind.facts.n_classes
    totals = prepare_totals(target, loss, n_classes, torch.float32) if loss.mean and not whole else None
    counted = None if totals is None or totals.like is None else totals.like()
    rows = _prepare_rows(kind, x, target, counted, whole, peers, group)
    finish = multiply = None
    if not whole:
        values = torch.empty(len(x), dtype=torch.float32, device=x.device)
        finish = prepare_finish(LossRows(None, None, values), counted, None, loss, n_classes, kind.dtype)
    if kind.at_once and columns:
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        multiply = prepare_multiply(dx, torch.empty((), dtype=kind.dtype, device=x.device))
    return _Steps(totals, rows, finish, multiply)


def _prepare_rows(
    kind: Kind, x: Tensor, target: Tensor, totals: Tensor | None, whole: bool, peers: Peers, group: Any
) -> Launched:
    """call(peers, group, x, dx, target, totals, numbers) -> Found"""
    empty, n_rows = kind.empty, len(x)
    device, counts = x.get_device(), whole and kind.loss.mean
    dx = None
    if kind.at_once:
        dx = x if kind.inplace else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    result = torch.empty((), dtype=kind.dtype, device=x.device) if whole else None

    def counts_alike(n):
        return not whole or (n <= WHOLE[-1] and (not counts or counted_by_each(n) == counted_by_each(n_rows)))

    launched = _prepare_launch(
        kind, x, dx, target, peers, group, totals=totals, result=result, alike=counts_alike,
        loss=torch.empty(n_rows, dtype=torch.float32, device=x.device),
        finishes=whole, counted=counted_by_each(n_rows) if counts else 0,
    )  # fmt: skip

    def build(n, run):
        of_row = (n,), (1,)

        def call(peers, group, x, dx, target, totals, numbers):
            states, loss = empty((2, n), (n, 1), torch.float32), empty(*of_row, torch.float32)
            y = empty((), (), kind.dtype) if whole else None
            if whole:
                run(peers, group, x, dx, target, states, loss, y, ticket_of(device), *numbers)
            elif dx is None:
                run(peers, group, x, target, states, loss, *numbers)
            elif totals is None:
                run(peers, group, x, dx, target, states, loss, *numbers)
            else:
                run(peers, group, x, dx, target, totals, states, loss, *numbers)
            return Found(states, loss, y)

        return call

    return compose(build, launched, n=n_rows, by_row=True)


def _prepare_launch(
    kind: Kind, x: Tensor, dx: Tensor | None, target: Tensor, peers: Peers, group: Any, *, totals: Tensor | None,
    loss: Tensor | None, result: Tensor | None = None, finishes: bool = False, counted: int = 0,
    alike: Callable[[int], bool] = lambda n: True,
) -> Launched:  # fmt: skip
    """call(peers, group, x, dx, target, totals, states, loss, result, ticket, *numbers), less what is None.

    alike: whether another number of rows takes the same launch, if their plan is the same.
    """
    asked, facts, device = kind.loss, kind.facts, x.get_device()
    alignment = alignment_of(*(each[:, : kind.held] for each in (x, dx) if each is not None))
    itemsize = 4 if asked.softcap is not None else x.element_size()

    def plan_for(n_rows):
        plan = plan_of(n_rows, itemsize, alignment, facts, device)
        assert plan is not None
        return plan

    spec = spec_of(
        LossSpec, plan_for(len(x)), x.dtype, device, itemsize=x.element_size(), peers=True,
        **asked.kind() | {"mean": asked.mean and dx is not None, "z_loss": False},
        gradient=dx is not None, inplace=dx is not None and kind.inplace, finishes=finishes, counted=counted,
        totals=1 if totals is None else totals.shape[1],
    )  # fmt: skip
    states = torch.empty((2 if loss is not None else 3, len(x)), dtype=torch.float32, device=x.device)
    tensors = {
        "x": x, "dx": dx, "target": target, "totals": totals if dx is not None else None,
        "states": states, "loss": loss, "result": result, "ticket": ticket_of(device) if finishes else None,
    }  # fmt: skip
    values = {
        "n_classes": facts.n_classes, "first": facts.of(None).first, "ignore_index": asked.ignore_index,
        **dict(zip(_NUMBERS, _numbers_of(asked), strict=True)),
    } | ({} if dx is not None else {"dx_row_stride": 0})  # fmt: skip
    said = f"cross_entropy {x.dtype} {facts.sizes} {facts.n_classes} {kind.said}"
    return prepare_launch(
        _peer_loss, plan_for, len(x), spec, tensors, values, _NUMBERS, peers, group, said, alike=alike
    )  # fmt: skip


def _run(x: Tensor, target: Tensor, how: tuple) -> tuple[Tensor, Tensor | None, Tensor]:
    """(the loss, dx, m and ls of rows [2, n])"""
    kind, steps, numbers, peers, group, _ = how
    totals = None if steps.totals is None else steps.totals(target, None)
    dx, (n_rows, columns) = None, x.shape
    if kind.at_once:
        dx = x.detach() if kind.inplace else kind.empty((n_rows, columns), (columns, 1), x.dtype)
    states, values, y = steps.rows(peers, group, x, dx, target, totals, numbers)
    if y is None:
        y = steps.finish(values, None, totals, None, None)[0]
    if dx is not None and kind.held < columns:
        dx[:, kind.held :] = 0  # padding
    return y, dx, states


class _Loss(torch.autograd.Function):
    """A sum or mean; its gradient is there when it is."""

    @staticmethod
    def forward(ctx, x, target, how):
        ctx.set_materialize_grads(False)
        kind, steps, _, _, group, ctx.claim = how
        y, ctx.dx, states = _run(x, target, how)
        ctx.multiply, ctx.of_call = steps.multiply, (kind, group)
        ctx.save_for_backward(None if kind.inplace else x, target, states)
        return y

    @staticmethod
    def backward(ctx, dy, *_):
        if dy is None:
            return None, None, None
        (dy,) = resolved(dy)
        if ctx.dx is not None and not torch.is_grad_enabled() and not batched(dy):
            # Given away: whoever has it may change it, and a second backward computes it again.
            dx, ctx.dx = ctx.dx, None
            check_claim(ctx)
            if ctx.multiply is not None:
                ctx.multiply(dx, dy)
            return dx, None, None
        return _again(ctx, dy)


# As _Loss.apply, less its search for functorch's wrappers, which no call over a group comes under.
_differentiated = super(torch.autograd.Function, _Loss).apply


@once("cross_entropy")
def _again(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient from the logits and the states of rows."""
    (x, target, (m, ls)), (kind, group) = saved_of(ctx, "cross_entropy"), ctx.of_call
    if x is None:
        raise RuntimeError("cross_entropy: inplace_backward has one backward, of the loss alone")
    shard = shard_of(x, target, kind.loss, kind.facts.of(group))
    states = States(m, ls, torch.zeros_like(m))
    given = coefficients_of(shard, states, counts_of(shard, states), dy.to(m.dtype), None, None)
    return gradient_of(shard, states, given, torch.empty(x.shape, dtype=x.dtype, device=x.device)), None, None


def states_by(peers: Peers, wanted: Wanted, dtype: torch.dtype) -> Callable[[Tensor, Tensor, Loss, Shards], Tensor]:
    """What makes m, ls and the targets' logits [3, n] of whole rows of a shard."""
    return partial(_states_of, peers, wanted, dtype)


def _states_of(
    peers: Peers, wanted: Wanted, dtype: torch.dtype, x: Tensor, target: Tensor, loss: Loss, shards: Shards
) -> Tensor:  # fmt: skip
    peers.in_turn()
    facts, group = facts_of(shards), shards.group
    options = peers.number, *loss.asked().items(), facts, wanted, dtype
    prepared = loss, facts, x, target, peers, group, said_of(loss, wanted, dtype)
    call = kept("states by peers", options, (x, target), _prepare_states, *prepared)
    return call(peers, group, x, target, _numbers_of(loss))


def _prepare_states(
    loss: Loss, facts: Facts, x: Tensor, target: Tensor, peers: Peers, group: Any, said: str
) -> Launched:
    n_rows, empty = len(x), allocator(x.device)
    kind = Kind(loss, torch.float32, False, False, facts, facts.of(None).held, empty, said)
    run = _prepare_launch(kind, x.detach(), None, target, peers, group, totals=None, loss=None).__call__

    def call(peers, group, x, target, numbers):
        found = empty((3, n_rows), (n_rows, 1), torch.float32)
        run(peers, group, x, target, found, *numbers)
        return found

    return Launched(call)
