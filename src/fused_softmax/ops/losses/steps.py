"""A cross-entropy of rows as its launches, prepared one by one, and their gradient for autograd.

The gradient of a sum or mean is written together with the losses if that saves a read of the logits. A second backward
pass writes it in the same way again. Otherwise it is computed from the logits and each row's m and ls.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_softmax.core.calls import find, kept
from fused_softmax.core.checks import arithmetic_of
from fused_softmax.core.launched import Launched
from fused_softmax.core.no_gradient import LOSS, refuse, unpacked
from fused_softmax.core.options import refuse_batch_invariant
from fused_softmax.core.route import batched, needs_grad, resolved
from fused_softmax.ops.losses import reference
from fused_softmax.ops.losses.given_lse import forward_given_lse, prepare_given_lse
from fused_softmax.ops.losses.launches import (
    LossRows,
    backward,
    forward,
    given_of,
    gradient_key,
    is_whole,
    plan_forward,
    prepare_losses,
    rows_for,
    with_whole_rows,
)
from fused_softmax.ops.losses.options import Loss
from fused_softmax.ops.losses.output import STATISTICS, Wanted, shaped, stats_of
from fused_softmax.ops.losses.overwritten import check_claim
from fused_softmax.ops.losses.sums import (
    counts_targets,
    finish,
    left_out_of,
    of_counted,
    prepare_finish,
    prepare_multiply,
    prepare_totals,
    totals_of,
)
from fused_softmax.ranks.groups import Shards


class Kind(NamedTuple):
    """What a kept call does, beside its tensors and numbers."""

    loss: Loss
    wanted: Wanted
    dtype: torch.dtype
    inplace: bool
    at_once: bool


class Steps(NamedTuple):
    """A loss's launches, prepared: the targets' totals, the rows, their sum, their gradient times a number.

    None for a launch that a call has no need of.
    """

    totals: Any
    rows: Any
    finish: Any
    multiply: Any = None


class OverRanks(NamedTuple):
    """A loss that ranks have merged in its launch: its shards, and what makes its gradient a second time.

    gradient: (ctx, dy) -> (dx,), from what the Function keeps; its `m` is m and ls of rows [2, n].
    """

    shards: Shards
    gradient: Callable[[Any, Tensor], tuple[Tensor | None, ...]]


def as_rows(input: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [n, n_classes] with contiguous columns, and targets [n]."""
    return with_whole_rows(rows_of(input)), target.reshape(-1).contiguous()


def rows_of(input: Tensor) -> Tensor:
    """Logits as [n, n_classes]."""
    if input.ndim == 2:
        return input
    return input.unsqueeze(0) if input.ndim == 1 else input.movedim(1, -1).flatten(0, -2)


def prepare_steps(kind: Kind, x: Tensor, target: Tensor, loss: Loss, lse: Tensor | None = None) -> Steps:
    """The steps of a loss for rows and targets like these, as Launched. lse: of every row, if it is given."""
    dx, dtype = dx_like(kind, x), _dtype_of_rows(loss, kind)
    plan = plan_forward(x, dx, loss) if lse is None else None
    whole = plan is not None and not kind.wanted.z_loss and is_whole(plan, dx, loss)
    counts = whole or counts_targets(target, loss.mean, needs_grad(x))
    states = (dx is None and needs_grad(x)) or kind.wanted.lse or loss.stats

    def prepare_rows(totals):
        given = given_of(x, dx, target, loss, totals)
        if lse is not None:
            return prepare_given_lse(given, lse, loss, dtype)
        return prepare_losses(given, loss, plan, dtype, states, kind.dtype if whole else None, totals is not None)

    return prepare_around(prepare_rows, kind, dx, target, loss, x.shape[1], arithmetic_of(x), whole, counts)


def dx_like(kind: Kind, x: Tensor) -> Tensor | None:
    """Where a gradient like x goes, if it is written with the loss."""
    if not kind.at_once:
        return None
    return x.detach() if kind.inplace else torch.empty_like(x, memory_format=torch.contiguous_format)


def prepare_around(
    prepare_rows: Callable[[Tensor | None], Launched], kind: Kind, dx: Tensor | None, target: Tensor, loss: Loss,
    n_classes: int, arithmetic: torch.dtype, whole: bool, counts: bool,
) -> Steps:  # fmt: skip
    """The steps of a loss. `prepare_rows` gives the step of the rows, with the targets' totals or without.

    whole: whether the rows' launch sums their losses. counts: whether it, or the launch that sums them, counts targets.
    """
    totals = prepare_totals(target, loss, n_classes, arithmetic) if loss.mean and not counts else None
    counted = None if totals is None or totals.like is None else totals.like()
    rows = prepare_rows(counted)
    multiplying = finishing = None
    if dx is not None and dx.numel():
        multiplying = prepare_multiply(dx, torch.empty((), dtype=kind.dtype, device=dx.device))
    if not whole and loss.reduction != "none":
        assert rows.like is not None
        finishing = prepare_finish(rows.like(), counted, target if counts else None, loss, n_classes, kind.dtype)
    return Steps(totals, rows, finishing, multiplying)


def run_steps(
    steps: Steps, x: Tensor, target: Tensor, loss: Loss, numbers: tuple, given_lse: Tensor | None, kind: Kind,
    dx: Tensor | None,
):  # fmt: skip
    """((loss, lse, z-loss, statistics), rows, totals). What was given or not asked for is None, or missing."""
    totals = None if steps.totals is None else steps.totals(target, loss.weight)
    given = given_of(x, dx, target, loss, totals)
    if given_lse is None:
        rows = steps.rows(given, numbers)
    else:
        rows = steps.rows(given, numbers, given_lse)
        if dx is not None:
            backward(x, target, given_lse, torch.zeros_like(given_lse), loss, totals=totals, dx=dx)
    if rows.result is not None:
        y, z = rows.result, None
    elif steps.finish is None:
        y, z = rows.loss, rows.z
        y = shaped(y if z is None else y + z, y.shape, kind.dtype)
        z = None if z is None else shaped(z, z.shape, kind.dtype)
    else:
        y, z = steps.finish(rows.loss, rows.z, totals, target, loss.weight)
    lse = rows.m + rows.ls if kind.wanted.lse and given_lse is None else None
    if kind.wanted.z_loss and z is None:
        z = torch.zeros_like(y)
    stats = stats_of(rows, target, loss) if loss.stats else ()
    return (y, lse, z, *stats), rows, totals


def losses_of(x: Tensor, target: Tensor, loss: Loss, kind: Kind, lse: Tensor | None = None):
    """`run_steps` for a call that is not kept as a whole: each of its steps is kept by itself."""
    dtype = _dtype_of_rows(loss, kind)

    def rows(given, numbers, given_lse=None):
        if given_lse is None:
            return forward(x, target, loss, given.totals, dtype=dtype)
        return forward_given_lse(x, target, given_lse, loss, dtype)

    steps = Steps(
        partial(_totals_step, loss, x.shape[1], arithmetic_of(x)) if loss.mean else None,
        rows,
        None if loss.reduction == "none" else partial(_finish_step, loss, kind.dtype),
    )
    return run_steps(steps, x, target, loss, (), lse, kind, None)


def _dtype_of_rows(loss: Loss, kind: Kind) -> torch.dtype | None:
    return kind.dtype if loss.reduction == "none" and not loss.stats and not loss.lse_square_scale else None


def _totals_step(loss, n_classes, dtype, target, weight):
    return totals_of(target, loss, n_classes, dtype)


def _finish_step(loss, dtype, values, z, totals, *_):
    return finish(LossRows(None, None, values, z), totals, loss, dtype)


class _CrossEntropy(torch.autograd.Function):
    """(loss, lse, z-loss, statistics) of rows. The gradient of a sum or mean is made together with the loss."""

    @staticmethod
    def forward(ctx, x, target, of_call, how):
        ctx.set_materialize_grads(False)
        loss, numbers, lse = of_call
        kind, steps, ctx.claim, ctx.ranks = how
        dx = dx_like(kind, x)
        results, rows, totals = run_steps(steps, x, target, loss, numbers, lse, kind, dx)
        ctx.dx, ctx.loss, ctx.multiply, ctx.lse_is_given = dx, loss, steps.multiply, lse is not None
        ctx.kind, ctx.numbers, ctx.quick = kind, numbers, None
        # Of a mean that takes too long. A target that is read later may have been changed.
        ctx.left_out = left_out_of(target, loss) if steps.multiply is not None and loss.reduction == "sum" else None
        if ctx.ranks is None and not kind.at_once and lse is None and not (loss.mean and totals is None):
            ctx.quick = gradient_key(loss, totals)
        ctx.save_for_backward(None if kind.inplace else x, target, totals, rows.m, rows.ls, loss.weight)
        if len(results) > 3:
            ctx.mark_non_differentiable(*results[5:])
        return results if kind.wanted.beside else results[0]

    @staticmethod
    def backward(ctx, dy, dlse=None, dz=None, *of_stats):
        saved, of_others = None, any(each is not None for each in (dlse, dz, *of_stats))
        if ctx.quick is not None and dy is not None and not of_others and not torch.is_grad_enabled():
            saved = unpacked(ctx, "cross_entropy")
            dx = _found_gradient(ctx, saved, dy)
            if dx is not None:
                return dx, None, None, None
        refuse("cross_entropy", STATISTICS, of_stats, LOSS)
        if dy is None and dlse is None and dz is None:
            return None, None, None, None
        dy, dlse, dz = resolved(dy, dlse, dz)
        alone = dlse is None and dz is None and not torch.is_grad_enabled() and not batched(dy)
        only_once = ctx.kind.inplace or ctx.ranks is not None
        if ctx.kind.at_once and alone and not (only_once and ctx.dx is None):
            # Given away: whoever has it may change it, and a second backward writes it again.
            dx, ctx.dx = ctx.dx, None
            if dx is None:
                x, target, _, _, _, loss = _saved(ctx)
                dx = _written_again(x, target, loss, ctx.numbers, ctx.kind)
            else:
                check_claim(ctx)
            if ctx.multiply is not None:
                ctx.multiply(dx, dy if ctx.left_out is None else of_counted(dy, ctx.left_out))
            return dx, None, None, None
        if ctx.ranks is not None:
            return *ctx.ranks.gradient(ctx, dy), None, None, None
        x, target, totals, m, ls, loss = _saved(ctx, saved)
        if torch.is_grad_enabled():
            if loss.batch_invariant:
                refuse_batch_invariant("cross_entropy", "torch's operations make a gradient that is differentiated")
            if x is None:
                raise RuntimeError("cross_entropy: inplace_backward leaves no logits for a second derivative")
            given_lse = m if ctx.lse_is_given else None
            return differentiable_gradient(x, target, loss, dy, dlse, dz, given_lse), None, None, None
        if x is not None and batched(dy, dlse, dz):
            return _one_by_one(x, target, m, ls, loss, dy, dlse, dz), None, None, None
        if x is None:
            raise RuntimeError("cross_entropy: inplace_backward has one backward, of the loss alone")
        m, ls = _states(x, target, loss, m, ls)
        if loss.mean and totals is None:  # each program counted for itself
            totals = totals_of(target, loss, x.shape[1], m.dtype)
        dy = torch.zeros((), dtype=m.dtype, device=m.device) if dy is None else dy
        total_dz = None if dz is None else dy + dz
        dx = backward(x, target, m, ls, loss, totals=totals, dy=dy, dz=total_dz, dlse=dlse)
        return dx, None, None, None


# As _CrossEntropy.apply, without its search for functorch's wrappers: a call under a transform does not come here.
differentiated = super(torch.autograd.Function, _CrossEntropy).apply


def _found_gradient(ctx, saved: tuple, dy: Tensor) -> Tensor | None:
    """The gradient by a kept call, with little Python, which takes long in autograd's thread; None if none is kept."""
    x, target, totals, m, ls, weight = saved
    for each in (m, ls) if totals is None else (m, ls, totals):  # no guard looks at what hooks of saved tensors return
        if each.is_neg() or not each.is_contiguous():
            return None
    dy = shaped(dy, dy.shape, m.dtype).contiguous()
    call = find(*ctx.quick, x, target, None, weight, dy, None, None)
    if call is None:
        return None
    loss = ctx.loss if weight is None else replace(ctx.loss, weight=weight)
    return call(given_of(x, None, target, loss, totals), (m, ls, dy, None, None), ctx.numbers)


def _saved(ctx, saved: tuple | None = None) -> tuple:
    """(x, target, totals, m, ls, loss) as kernels read them: hooks of saved tensors may return other strides.

    saved: ctx.saved_tensors, if they were unpacked.
    """
    x, *beside = resolved(*(unpacked(ctx, "cross_entropy") if saved is None else saved))
    if x is not None and x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
    target, totals, m, ls, weight = (None if each is None else each.contiguous() for each in beside)
    if x is not None:
        x = rows_for(x, ctx.loss)
    return x, target, totals, m, ls, ctx.loss if weight is None else replace(ctx.loss, weight=weight)


def _written_again(x, target, loss: Loss, numbers: tuple, kind: Kind) -> Tensor:
    """The gradient that the forward pass wrote, by the same launches: the same bits, and one pass over the logits.

    x may lie elsewhere than it did, and need no gradient, because what autograd saves may have been moved.
    """
    x = x if x.requires_grad else x.detach().requires_grad_()  # the steps of a loss with a gradient
    options = kind.wanted, kind.dtype, *loss.key, loss.reduction
    tensors = x, target, loss.weight
    steps: Any = kept("loss again", options, tensors, _prepare_again, kind, x, target, loss)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    run_steps(steps, x, target, loss, numbers, None, kind, dx)
    return dx


def _prepare_again(kind: Kind, x: Tensor, target: Tensor, loss: Loss) -> Launched:
    with torch.enable_grad():  # as in the forward pass: the gradient asks for the targets' totals
        steps = prepare_steps(kind, x, target, loss)
    return Launched(functions_of(steps))  # type: ignore[arg-type]


def functions_of(steps: Steps) -> Steps:
    """The functions that run each of these prepared steps."""
    return Steps(*[each and each.__call__ for each in steps])


def _states(x, target, loss, m, ls):
    """m and ls of every row. They are made again if they were not kept, as when the gradient was written with the loss.

    If lse is given, m is lse and there is no ls.
    """
    if m is not None:
        return m, torch.zeros_like(m) if ls is None else ls
    rows = forward(x, target, loss)
    return rows.m, rows.ls


def _one_by_one(x, target, m, ls, loss, dy, dlse, dz):
    """The gradients of a batch, each by the operator, which PyTorch calls once for each."""
    m, ls = _states(x, target, loss, m, ls)
    operator = torch.ops.fused_softmax.cross_entropy_backward.default
    return operator(x, target, m, ls, dy, dz, dlse, *loss.traced())


def differentiable_gradient(x, target, loss: Loss, dy, dlse, dz, given_lse=None):
    """The gradient by torch's operations, for a second derivative."""
    return differentiable_gradients([x], x, target, loss, dy, dlse, dz, given_lse)[0]


def differentiable_gradients(inputs, logits, target, loss: Loss, dy, dlse, dz, given_lse=None) -> tuple[Tensor, ...]:
    """The gradients, by torch's operations, of the inputs from which logits [n, n_classes] were made.

    dy, dlse and dz are of loss, lse and z-loss.
    """
    y, lse, z = reference.cross_entropy(
        logits, target, reduction=loss.reduction, **loss.reference_arguments(), dtype=arithmetic_of(logits),
        arithmetic=arithmetic_of(logits), lse=given_lse,
    )  # fmt: skip
    pairs = [(y, dy), (lse, dlse), (z, dz)]
    outputs, gradients = zip(*[(o, g.to(o.dtype)) for o, g in pairs if g is not None], strict=True)
    return torch.autograd.grad(outputs, inputs, gradients, create_graph=True)
