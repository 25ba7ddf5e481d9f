"""Linear layers as they are measured: cross-entropy, log-probabilities and divergences, with the layer's gradients."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fused_softmax import linear_cross_entropy, linear_divergence, linear_log_prob
from fused_softmax.bench.cases import Case
from fused_softmax.bench.entries import ceiling
from fused_softmax.bench.entries.losses import (
    divergence_by_torch,
    divergence_gradient_formula,
    eager_log_prob,
    log_prob_gradient_formula,
    loss_gradient_formula,
)
from fused_softmax.bench.entries.makers import Call, Maker, without_init
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


def log_prob_gradient(function: Call) -> Call:
    """The gradients of the sum of a layer's log-probabilities and entropies as one result, as layer_gradient has it."""

    def call(x, w, target):
        with torch.enable_grad():
            x, w = (each.detach().requires_grad_() for each in (x, w))
            both = function(x, w, target)
            # The gradient of a sum is expanded, and verl's kernel takes a contiguous one.
            dx, dw = torch.autograd.grad(both, (x, w), [torch.ones_like(each) for each in both])
        return with_sum(dx, dw)

    return call


def log_prob_formula(case: Case) -> Call:
    of_logits = log_prob_gradient_formula(case)

    def call(x, w, target):
        dlogits = of_logits(x @ w.t(), target)
        return with_sum(dlogits @ w, dlogits.t() @ x)

    return call


def linear_then_log_prob(x: Tensor, w: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return eager_log_prob(torch.nn.functional.linear(x, w), target)


def own_log_prob(case: Case, **options: Any) -> Call:
    return log_prob_gradient(lambda x, w, target: linear_log_prob(x, w, target, return_entropy=True, **options)[:2])


def trl(case: Case) -> Call:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE  # as its trainers call it

    options = None, 1.0, ("entropy",)  # softcap, scale, outputs
    return log_prob_gradient(
        lambda x, w, target: ChunkedLogProbFunction.apply(
            x, w, None, target, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, *options
        )[:2]
    )


def liger_log_prob(case: Case) -> Call:
    """On Hopper it needs CuTe DSL; elsewhere it is torch's operations, in chunks."""
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction

    def both(x, w, target):
        losses, entropy = LigerFusedLinearScaledCrossEntropyFunction.apply(x, w, target, 1.0, -100, 1, True)
        return -losses, entropy

    return log_prob_gradient(both)


def verl(case: Case) -> Call:
    linear_cross_entropy = without_init("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    return log_prob_gradient(lambda x, w, target: linear_cross_entropy(x, w, target, 1.0, "none"))


def two_layers(case: Case, generator: torch.Generator) -> Inputs:
    """A student's tokens and weights, and a teacher's."""
    return *layer(case, generator)[:2], *layer(case, generator)[:2]


def divergence_gradient(function: Call) -> Maker:
    """The student's gradients of a mean divergence as one result, as layer_gradient has it."""

    def call(x, w, h, v):
        with torch.enable_grad():
            x, w = (each.detach().requires_grad_() for each in (x, w))
            dx, dw = torch.autograd.grad(function(x, w, h, v), (x, w))
        return with_sum(dx, dw)

    return lambda case: call


def jsd(x: Tensor, w: Tensor, h: Tensor, v: Tensor) -> Tensor:
    return divergence_by_torch(torch.nn.functional.linear(x, w), torch.nn.functional.linear(h, v), "jsd")


def jsd_formula(case: Case) -> Call:
    of_logits = divergence_gradient_formula("jsd")(Case((case.shape[0], case.n_cols)))

    def call(x, w, h, v):
        dlogits = of_logits(x @ w.t(), h @ v.t())
        return with_sum(dlogits @ w, dlogits.t() @ x)

    return call


def two_layers_bytes(case: Case) -> int:
    """Bytes of the tokens, weights and the student's weights' gradient."""
    n, n_features, n_classes = case.shape
    return (2 * n + 3 * n_classes) * n_features * case.itemsize


def liger_jsd(case: Case) -> Call:
    from liger_kernel.transformers.functional import liger_fused_linear_jsd

    return divergence_gradient(liger_fused_linear_jsd)(case)


def trl_jsd(case: Case) -> Call:
    """It computes the student's entropies too."""
    from trl.trainer.distillation_trainer import ChunkedDivergenceFunction

    beta = 0.5
    return divergence_gradient(
        lambda x, w, h, v: ChunkedDivergenceFunction.apply(x, w, None, h, v, None, beta)[0].mean()
    )(case)


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
    "linear_log_prob": Operation(
        inputs=layer,
        own=own_log_prob,
        formula=log_prob_formula,
        eager=lambda case: log_prob_gradient(linear_then_log_prob),
        held_bytes=layer_bytes,
        ceilings=lambda case: ceiling.products(),
        parameters=lambda case: {"return_entropy": True},
        whole=True,
        checking_bytes=layer_checking_bytes,
        sample=Case((61, 24, 781)),
    ),
    "linear_divergence": Operation(
        inputs=two_layers,
        own=divergence_gradient(partial(linear_divergence, kind="jsd")),
        formula=jsd_formula,
        eager=divergence_gradient(jsd),
        held_bytes=two_layers_bytes,
        ceilings=lambda case: ceiling.products(of_two_layers=True),
        parameters=lambda case: {"kind": "jsd", "reduction": "mean"},
        whole=True,
        checking_bytes=lambda case: 2 * layer_checking_bytes(case),
        of_torchs=2.0,  # the largest error of many: in fp32, where the whole error is less than torch's, 1.6 times its
        sample=Case((61, 24, 781)),
    ),
}
