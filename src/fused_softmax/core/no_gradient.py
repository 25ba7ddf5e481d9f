"""A backward pass that cannot be is an error that says so: one through statistics, or through tensors changed since.

A statistic takes part in autograd, so that a backward pass that comes to it raises. It is read as any tensor.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_softmax.core.route import resolved, within_functorch

LOSS = "loss, lse and z_loss have one"
ATTENTION = "output and lse have one"


def says(name: str, statistic: str, have: str) -> str:
    """The error of a backward pass through a statistic. have: what has a gradient."""
    return f"{name}: {statistic} has no gradient, and a backward pass came to it; {have}. Use {statistic}.detach()"


def refuse(name: str, statistics: Sequence[str], gradients: Sequence[Tensor | None], have: str) -> None:
    """RuntimeError where a gradient came back to one of these statistics."""
    for statistic, gradient in zip(statistics, gradients, strict=False):
        if gradient is not None:
            raise RuntimeError(says(name, statistic, have))


def refusing(name: str, statistics: Sequence[str], values: Sequence[Tensor], beside: Tensor, have: str) -> list[Tensor]:
    """Statistics by torch's operations or an operator, of which those of float dtypes raise in a backward pass.

    beside: a result with a gradient, by which autograd finds its way from a statistic to the inputs.
    """
    if not torch.is_grad_enabled() or not (beside.requires_grad or within_functorch()):
        return list(values)
    through: Any = torch.ops.fused_softmax.no_gradient.default if torch.compiler.is_compiling() else _NoGradient.apply
    return [
        through(each, beside, says(name, statistic, have)) if each.is_floating_point() else each
        for statistic, each in zip(statistics, values, strict=True)
    ]


class _NoGradient(torch.autograd.Function):
    """A statistic whose backward pass raises. In forward mode it has the derivative that it came with."""

    generate_vmap_rule = True

    @staticmethod
    def forward(statistic, beside, message):
        return statistic.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        statistic, _, ctx.message = inputs
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.dtype, ctx.device = statistic.shape, statistic.dtype, statistic.device

    @staticmethod
    def backward(ctx, gradient):
        if gradient is not None:
            raise RuntimeError(ctx.message)
        return None, None, None

    @staticmethod
    def jvp(ctx, tangent, of_beside, _):
        if tangent is None:
            tangent = torch.zeros(ctx.shape, dtype=ctx.dtype, device=ctx.device)
        return tangent.clone() if of_beside is None else _NoGradient.apply(tangent, of_beside, ctx.message)


def saved_of(ctx: Any, name: str) -> tuple[Any, ...]:
    """`unpacked`, as kernels read them."""
    return resolved(*unpacked(ctx, name))


def unpacked(ctx: Any, name: str) -> tuple[Any, ...]:
    """ctx.saved_tensors. RuntimeError that names the loss if one was changed since.

    A backward pass asks once: torch.utils.checkpoint raises where tensors are unpacked a second time. torch's own
    losses keep the logarithm of a softmax, so with them the logits may be changed.
    """
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise RuntimeError(
            f"{name}: the logits, or what else the loss was made of, were modified by an inplace operation before its "
            "backward pass, which reads them. Write logits = logits / t in the place of logits.div_(t), or change "
            f"them after the backward pass, or give the loss a copy. ({error})"
        ) from error
