"""Gradients over ranks, which have no second derivative: whoever asks for one is told."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def once(name: str) -> Callable[[Callable], Callable]:
    """A Function's backward, of which a second derivative raises RuntimeError, on every way to it.

    torch's once_differentiable raises on a way of its own, which torch.autograd.grad passes by where there is another.
    """

    def decorated(backward: Callable) -> Callable:
        @wraps(backward)
        def wrapped(ctx: Any, *gradients: Tensor | None) -> tuple:
            if not torch.is_grad_enabled():
                return backward(ctx, *gradients)
            with torch.no_grad():
                found = backward(ctx, *gradients)
            of = *gradients, *ctx.saved_tensors
            return tuple(None if each is None else _Once.apply(each, name, *of) for each in found)

        return wrapped

    return decorated


class _Once(torch.autograd.Function):
    """A gradient, and the tensors that a second one would be of."""

    @staticmethod
    def forward(ctx, gradient, name, *of):
        ctx.name = name
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(f"{ctx.name}: there is no second derivative over the ranks of a group")
