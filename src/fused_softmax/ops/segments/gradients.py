"""Functions of segments as autograd differentiates them: by kernels, and a second time by torch's operations."""

from typing import Any

import torch
from torch import Tensor

from fused_softmax.core.checks import arithmetic_of
from fused_softmax.core.route import Route, route_of
from fused_softmax.ops.segments import launches, reference
from fused_softmax.ops.segments.launches import Cut


class _Segments(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, offsets, order, *how):
        y = launches.forward(how[0], input, Cut(offsets, order), *how[1:])
        save(ctx, input, y, offsets, order, how)
        return y

    @staticmethod
    def backward(ctx, dy):
        return gradient(ctx, dy), *[None] * 6


def differentiated(name: str, input: Tensor, cut: Cut, dim: int, scale: float | None, dtype: torch.dtype) -> Any:
    """`launches.forward` with a gradient."""
    return _Segments.apply(input, *cut, name, dim, scale, dtype)


def save(ctx, input: Tensor, y: Tensor, offsets: Tensor, order: Tensor | None, how: tuple) -> None:
    """What `gradient` takes. how: name, dim, scale, dtype of a call."""
    ctx.name, ctx.dim, ctx.scale, _ = how
    ctx.input_dtype = input.dtype
    ctx.save_for_backward(y, input if ctx.name == "segment_logsumexp" else None, offsets, order)


def gradient(ctx, dy: Tensor) -> Tensor:
    """The gradient of the input."""
    y, input, offsets, order = ctx.saved_tensors
    # Hooks of saved tensors may return other strides.
    offsets, order = offsets.contiguous(), order if order is None else order.contiguous()
    name, how = ctx.name, (ctx.dim, ctx.scale)
    route = Route.COMPOSED if torch.is_grad_enabled() else route_of(f"{name}_backward", dy, y, offsets, batches=False)
    if route is Route.COMPOSED:
        return composed(name, dy, y, input, Cut(offsets, order), *how).to(ctx.input_dtype)
    if name == "segment_logsumexp":
        if route is Route.OPERATOR:
            return torch.ops.fused_softmax.segment_logsumexp_backward.default(dy, input, y, offsets, order, *how)
        return launches.lse_backward(dy, input, y, Cut(offsets, order), *how)
    if route is Route.OPERATOR:
        operator = getattr(torch.ops.fused_softmax, f"{name}_backward").default
        return operator(dy, y, offsets, order, *how, ctx.input_dtype)
    return launches.backward(name, dy, y, Cut(offsets, order), *how, ctx.input_dtype)


def layout_of(n: int, cut: Cut) -> reference.Layout:
    if cut.order is None:
        return reference.layout_of(n, cut.offsets, None, None)
    return reference.of_order(cut.offsets, cut.order)


def composed(name: str, dy: Tensor, y: Tensor, input: Tensor | None, cut: Cut, dim: int, scale: float | None) -> Tensor:
    """The gradient by torch's operations, which have one themselves, in the dtype of the arithmetic.

    input: of segment_logsumexp, whose result is y.
    """
    arithmetic = arithmetic_of(y)
    of = y if input is None else input
    n, rest = of.shape[dim], (*of.shape[:dim], *of.shape[dim + 1 :])
    layout = layout_of(n, cut)
    dy, y = (reference.scores_of(each, dim, None, arithmetic, arithmetic)[0] for each in (dy, y))
    if input is None:
        dz = reference.gradient_of_elements(dy, y, name == "segment_log_softmax", layout[:3])
    else:
        z, _ = reference.scores_of(input, dim, scale, y.dtype, arithmetic)
        missing = len(layout.spoilt) - len(y)  # of elements that are in no segment
        y, dy = (torch.nn.functional.pad(each, (0, 0, 0, missing), value=torch.nan) for each in (y, dy))
        dz = reference.gradient_of_lse(dy, z, y, layout[:3])
    dz = dz.view(n, *rest).movedim(0, dim)
    return dz if scale is None else dz * scale
