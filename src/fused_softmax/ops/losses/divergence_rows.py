"""The divergences of rows of a student and of a teacher, the cross-entropy of probabilities, and their gradients."""

from dataclasses import replace

import torch
from torch import Tensor

from fused_softmax.core.checks import DTYPES, arithmetic_of
from fused_softmax.core.no_gradient import saved_of
from fused_softmax.core.route import apart, batched, needs_grad, resolved
from fused_softmax.ops.losses import reference
from fused_softmax.ops.losses.divergence_launches import Pair, PairRows, backward, forward, in_vectors
from fused_softmax.ops.losses.options import Divergence


def refused(input: Tensor, target: Tensor, options: Divergence) -> str:
    """Why the kernels do not take a call; "" if they do."""
    for dtype in (input.dtype, target.dtype):
        if dtype not in DTYPES or dtype == torch.float64:
            return f"no kernel has {dtype}"
    if options.scale == 0 or options.target_scale == 0:
        return "scale is 0"
    return "" if input.numel() else "there are no logits"


def differentiated(x, y, weight, temperature, target_temperature, options: Divergence) -> Tensor:
    """The divergences of rows [n, n_classes], float32. weight: of the classes of "cross". temperatures: of rows."""
    if not needs_grad(x, y):
        return run(x, y, weight, temperature, target_temperature, options)[1].value
    return _apply(x, y, weight, temperature, target_temperature, options)


def with_rows(options: Divergence, temperature: Tensor | None, target_temperature: Tensor | None) -> Divergence:
    """With temperatures of rows, where there are any."""
    given = {"temperature": temperature, "target_temperature": target_temperature}
    return replace(options, **{name: each for name, each in given.items() if each is not None})


def run(x, y, weight, temperature, target_temperature, options: Divergence) -> tuple[Pair, PairRows]:
    """(the tensors as kernels took them, what is known of their rows)."""
    pair = Pair(in_vectors(x.detach(), y), in_vectors(y.detach(), x), weight, temperature, target_temperature)
    return pair, forward(pair, options)


class _Divergence(torch.autograd.Function):
    """The divergences of rows [n, n_classes], float32."""

    @staticmethod
    def forward(ctx, x, y, weight, temperature, target_temperature, options):
        pair, rows = run(x, y, weight, temperature, target_temperature, options)
        ctx.options = options
        ctx.save_for_backward(x, y, *pair[2:], *rows)
        return rows.value

    @staticmethod
    def backward(ctx, dvalue):
        nothing = (None,) * 4
        (dvalue,) = resolved(dvalue)
        x, y, weight, *of_rows = saved_of(ctx, "divergence")
        temperatures, rows = of_rows[:2], PairRows(*of_rows[2:])
        if torch.is_grad_enabled() or batched(dvalue):
            dx, dy = differentiable_gradient(
                x, y, weight, *temperatures, ctx.options, dvalue, rows.value, ctx.needs_input_grad[:2]
            )
            return dx, dy, *nothing
        pair = Pair(in_vectors(x, y), in_vectors(y, x), weight, *temperatures)
        return *backward(pair, rows, dvalue, ctx.options, of_target=ctx.needs_input_grad[1]), *nothing


# As its apply, less its search for functorch's wrappers: a call that a transform watches does not come here.
_apply = super(torch.autograd.Function, _Divergence).apply


def differentiable_gradient(
    x, y, weight, temperature, target_temperature, options: Divergence, dvalue, value, wanted=(True, False)
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients by torch's operations, for a second derivative or a batch of gradients.

    Rows that get no gradient are left out where their divergence is not finite: 0 times it would be NaN.
    """
    options = with_rows(options, temperature, target_temperature)
    counts = None if batched(dvalue) else (dvalue != 0) | value.isfinite()
    with torch.enable_grad():
        given = apart(*(each if each.requires_grad else each.detach().requires_grad_() for each in (x, y)))
        rows = referred(*given, options, counts, weight)
    asked = [each for each, wants in zip(given, wanted, strict=True) if wants]
    found = iter(torch.autograd.grad([rows], asked, [dvalue.to(rows.dtype)], create_graph=torch.is_grad_enabled()))
    dx, dy = (next(found) if wants else None for wants in wanted)
    return dx, dy


def referred(input, target, options: Divergence, counts: Tensor | None = None, weight=None) -> Tensor:
    """`reference.divergence` in the dtype of the arithmetic, 0 in rows that do not count."""
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
