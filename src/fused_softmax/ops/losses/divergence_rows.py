"""The divergences of rows of a student and of a teacher, the cross-entropy of probabilities, and their gradients."""

from dataclasses import replace

import torch
from torch import Tensor

from fused_softmax.core.checks import DTYPES, arithmetic_of
from fused_softmax.core.no_gradient import saved_of
from fused_softmax.core.route import apart, batched, needs_grad, resolved
from fused_softmax.ops.losses import reference
from fused_softmax.ops.losses.divergence_launches import (
    OF_PAIR,
    Pair,
    PairRows,
    at_once,
    backward,
    forward,
    in_vectors,
    plan_held,
)
from fused_softmax.ops.losses.options import Divergence
from fused_softmax.ops.losses.sums import multiply


def refused(input: Tensor, target: Tensor, options: Divergence) -> str:
    """Why the kernels do not take a call; "" if they do."""
    for dtype in (input.dtype, target.dtype):
        if dtype not in DTYPES or dtype == torch.float64:
            return f"no kernel has {dtype}"
    if options.scale == 0 or options.target_scale == 0:
        return "scale is 0"
    return "" if input.numel() else "there are no logits"


def differentiated(pair: Pair, options: Divergence) -> Tensor:
    """The divergences of rows, float32, with their gradients."""
    if not needs_grad(pair.x, pair.y):
        return run(pair, options)[1].value
    return _apply(*pair, options)


def summed(pair: Pair, options: Divergence, weight: Tensor | None, reduction: str) -> Tensor | None:
    """The sum or mean of rows' divergences, float32, whose gradients are written in the same pass; None where not.

    weight: of rows. A row of weight 0 adds 0, whatever it holds. Of fp16, what loss scaling would have kept is lost
    before the scaled result comes back.
    """
    if reduction == "none" or not needs_grad(pair.x, pair.y) or torch.float16 in (pair.x.dtype, pair.y.dtype):
        return None
    if plan_held(_in_vectors(pair)) is None:
        return None
    return _apply_summed(*pair, _counts(pair, weight, reduction), options)


def _counts(pair: Pair, weight: Tensor | None, reduction: str) -> Tensor:
    """What each row's divergence counts in the result, float32 [n]."""
    n = len(pair.x)
    if weight is None:
        each = 1 / n if reduction == "mean" else 1.0
        return torch.full((n,), each, dtype=torch.float32, device=pair.x.device)
    w = weight.detach().reshape(-1).to(torch.float32)
    return w / w.sum() if reduction == "mean" else w.contiguous()


def pair_of(x: Tensor, y: Tensor, options: Divergence) -> Pair:
    """Rows with the temperatures of each, as kernels take them."""
    temperature, of_target = (
        each.detach().reshape(-1).to(torch.float32).contiguous() if isinstance(each, Tensor) else None
        for each in (options.temperature, options.target_temperature)
    )
    return Pair(x, y, None, temperature, of_target)


def with_rows(options: Divergence, pair: Pair) -> Divergence:
    """With the temperatures of rows, where there are any."""
    if pair.temperature is not None:
        options = replace(options, temperature=pair.temperature)
    if pair.target_temperature is not None:
        options = replace(options, target_temperature=pair.target_temperature)
    return options


def _in_vectors(pair: Pair) -> Pair:
    return pair._replace(x=in_vectors(pair.x, pair.y), y=in_vectors(pair.y, pair.x))


def _detached(pair: Pair) -> Pair:
    return _in_vectors(pair._replace(x=pair.x.detach(), y=pair.y.detach()))


def run(pair: Pair, options: Divergence) -> tuple[Pair, PairRows]:
    """(the tensors as kernels took them, what is known of their rows)."""
    pair = _detached(pair)
    return pair, forward(pair, options)


def gradients(
    pair: Pair, rows: PairRows, dvalue: Tensor, options: Divergence, of_target: bool = False, over: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Those of the student's rows, over them if asked, and if wanted of the teacher's, by the kernels."""
    return backward(pair if over else _in_vectors(pair), rows, dvalue, options, of_target, pair.x if over else None)


class _Divergence(torch.autograd.Function):
    """The divergences of rows [n, n_classes], float32."""

    @staticmethod
    def forward(ctx, x, y, weight, temperature, target_temperature, options):
        pair, rows = run(Pair(x, y, weight, temperature, target_temperature), options)
        ctx.options = options
        ctx.save_for_backward(x, y, *pair[2:], *rows._replace(value=None))  # which a caller may change in place
        return rows.value

    @staticmethod
    def backward(ctx, dvalue):
        (dvalue,) = resolved(dvalue)
        saved = saved_of(ctx, "divergence")
        pair, rows = Pair(*saved[:OF_PAIR]), PairRows(*saved[OF_PAIR:])
        wanted = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled() or batched(dvalue):
            dx, dy = differentiable_gradient(pair, ctx.options, dvalue, wanted=wanted)
        else:
            dx, dy = gradients(pair, rows, dvalue, ctx.options, of_target=wanted[1])
        return dx, dy, None, None, None, None


class _Summed(torch.autograd.Function):
    """The sum of what divergences of rows [n, n_classes] count; its gradient is there when it is."""

    @staticmethod
    def forward(ctx, x, y, weight, temperature, target_temperature, counts, options):
        pair = Pair(x, y, weight, temperature, target_temperature)
        value, *ctx.gradients = at_once(_detached(pair), counts, options, ctx.needs_input_grad[1])
        ctx.options = options
        ctx.save_for_backward(*pair, counts)
        return torch.where(counts == 0, 0.0, counts * value).sum()

    @staticmethod
    def backward(ctx, dresult):
        (dresult,) = resolved(dresult)
        saved = saved_of(ctx, "divergence")
        pair, counts = Pair(*saved[:OF_PAIR]), saved[OF_PAIR]
        if torch.is_grad_enabled() or batched(dresult):
            dx, dy = differentiable_gradient(pair, ctx.options, counts * dresult, wanted=ctx.needs_input_grad[:2])
            return dx, dy, None, None, None, None, None
        # Given away: whoever has them may change them, and a second backward writes them again.
        found, ctx.gradients = ctx.gradients, None
        if found is None:
            found = at_once(_detached(pair), counts, ctx.options, ctx.needs_input_grad[1])[1:]
        dx, dy = (None if each is None else multiply(each, dresult.contiguous()) for each in found)
        return dx if ctx.needs_input_grad[0] else None, dy, None, None, None, None, None


# As their apply, less its search for functorch's wrappers: a call that a transform watches does not come here.
_apply = super(torch.autograd.Function, _Divergence).apply
_apply_summed = super(torch.autograd.Function, _Summed).apply


def differentiable_gradient(
    pair: Pair, options: Divergence, dvalue: Tensor, value: Tensor | None = None, wanted=(True, False)
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients by torch's operations, for a second derivative or a batch of gradients.

    Rows that get no gradient are left out where their divergence is not finite: 0 times it would be NaN.
    """
    counts = None
    if not batched(dvalue):
        if value is None:
            with torch.no_grad():
                value = referred(pair.x, pair.y, with_rows(options, pair), weight=pair.weight)
        counts = (dvalue != 0) | value.isfinite()
    with torch.enable_grad():
        x, y = apart(*(each if each.requires_grad else each.detach().requires_grad_() for each in pair[:2]))
        rows = referred(x, y, with_rows(options, pair), counts, pair.weight)
    asked = [each for each, wants in zip((x, y), wanted, strict=True) if wants]
    found = iter(torch.autograd.grad([rows], asked, [dvalue.to(rows.dtype)], create_graph=torch.is_grad_enabled()))
    dx, dy = (next(found) if wants else None for wants in wanted)
    return dx, dy


def referred(
    input: Tensor, target: Tensor, options: Divergence, counts: Tensor | None = None, weight: Tensor | None = None
) -> Tensor:
    """The formula of rows in the dtype of the arithmetic, and 0 of rows that do not count."""
    arithmetic = torch.promote_types(arithmetic_of(input), arithmetic_of(target))
    if counts is not None:
        of_rows = counts.unsqueeze(-1)
        input, target = torch.where(of_rows, input, 0.0), torch.where(of_rows, target, 0.0)
    if options.kind == "cross":
        rows = reference.cross_entropy(
            input, target, weight, reduction="none", label_smoothing=options.label_smoothing, softcap=options.softcap,
            scale=options.scale, dtype=arithmetic, arithmetic=arithmetic,
        )[0]  # fmt: skip
    else:
        rows = reference.divergence(input, target, **options.options(), arithmetic=arithmetic)
    return rows if counts is None else torch.where(counts, rows, 0.0)
