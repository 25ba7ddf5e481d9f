"""A linear layer and its cross-entropy as they are measured, with the gradients of both."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fused_softmax import linear_cross_entropy
from fused_softmax.bench.cases import Case
from fused_softmax.bench.entries import ceiling
from fused_softmax.bench.entries.losses import loss_gradient_formula
from fused_softmax.bench.entries.makers import Call, Maker
from fused_softmax.bench.entries.operation import Inputs, Operation, widest


def layer(case: Case, generator: torch.Generator) -> Inputs:
    """Tokens [tokens, hidden] and weights [classes, hidden], scaled for logits of deviation 2; a class a token."""
    n, n_features, n_classes = case.shape
    options: dict[str, Any] = {"device": generator.device, "generator": generator}
    scale = math.sqrt(2) * n_features**-0.25
    x, w = (torch.randn(rows, n_features, dtype=getattr(torch, case.dtype), **options) for rows in (n, n_classes))
    return x.mul_(scale), w.mul_(scale), torch.randint(n_classes, (n,), **options)


def layer_gradient(function: Call) -> Maker:
    """The gradients of a linear layer's mean loss as one result: the tokens' is summed into the weights' first row.

    An error in either gradient shows in it, and nothing is copied.
    """

    def call(x, w, target):
        with torch.enable_grad():
            x, w = (each.detach().requires_grad_() for each in (x, w))
            dx, dw = torch.autograd.grad(function(x, w, target), (x, w))
        return with_sum(dx, dw)

    return lambda case: call


def with_sum(dx: Tensor, dw: Tensor) -> Tensor:
    dw[0] += dx.sum(0, dtype=widest(dx)) * dx.shape[0] ** -0.5  # as large as the other rows
    return dw


def layer_gradient_formula(case: Case) -> Call:
    def call(x, w, target):
        dlogits = loss_gradient_formula(Case((case.shape[0], case.n_cols)))(x @ w.t(), target)
        return with_sum(dlogits @ w, dlogits.t() @ x)

    return call


def linear_then_loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, w), target)


def layer_bytes(case: Case) -> int:
    """Bytes of the tokens, weights, targets and the weights' gradient."""
    n, n_features, n_classes = case.shape
    return (n + 2 * n_classes) * n_features * case.itemsize + 8 * n


def layer_checking_bytes(case: Case) -> int:
    """Bytes in float64 of the logits, the formula's intermediates and the other tensors."""
    n, n_features, n_classes = case.shape
    return 8 * (5 * n * n_classes + 4 * (n + n_classes) * n_features)


def own(case: Case, **options: Any) -> Call:
    return layer_gradient(partial(linear_cross_entropy, **options))(case)


def own_in_one_chunk(case: Case) -> Call:
    return own(case, chunk_size=case.shape[0])


def liger(case: Case) -> Call:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return layer_gradient(liger_fused_linear_cross_entropy)(case)


def cut_cross_entropy(case: Case) -> Call:
    from cut_cross_entropy import linear_cross_entropy

    return layer_gradient(linear_cross_entropy)(case)


def torch_chunked(case: Case) -> Call:
    from torch.nn import LinearCrossEntropyOptions  # new in torch 2.13
    from torch.nn.functional import linear_cross_entropy

    options = LinearCrossEntropyOptions()
    return layer_gradient(lambda x, w, target: linear_cross_entropy(x, w, target, options=options))(case)


ENTRIES = {
    "linear_cross_entropy": Operation(
        inputs=layer,
        own=own,
        formula=layer_gradient_formula,
        eager=layer_gradient(linear_then_loss),
        held_bytes=layer_bytes,
        ceilings=lambda case: ceiling.products(),
        parameters=lambda case: {"reduction": "mean"},
        whole=True,
        checking_bytes=layer_checking_bytes,
        sample=Case((61, 24, 781)),
    ),
}
