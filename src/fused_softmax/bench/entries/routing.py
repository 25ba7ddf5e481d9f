"""A router as it is measured: the weights of the best experts, and the gradient of these and of both losses."""

from collections.abc import Callable

import torch
from torch import Tensor

from fused_softmax import route
from fused_softmax.bench.cases import Case
from fused_softmax.bench.entries import ceiling
from fused_softmax.bench.entries.losses import loss_gradient
from fused_softmax.bench.entries.makers import Call
from fused_softmax.bench.entries.operation import Inputs, Operation, widest

_KS = {64: 6, 512: 10, 896: 16, 2304: 36}  # of models, by their experts; 8 of all others
_SAMPLE = Case((13, 96))


def k_of(case: Case) -> int:
    return min(case.n_cols, _KS.get(case.n_cols, 8))


def distinct(case: Case, generator: torch.Generator) -> Tensor:
    """Logits of which no two of a row are equal, for torch's topk chooses any of equal ones."""
    device, dtype = generator.device, getattr(torch, case.dtype)
    bits = torch.arange(case.n_cols, device=device) - case.n_cols // 2  # a step of bfloat16 each, from 1/16 on
    values = torch.where(bits < 0, -1.0, 1.0) * torch.ldexp(
        1 + bits.abs() % 64 / 64, torch.div(bits.abs(), 64, rounding_mode="floor") - 4
    )
    order = torch.rand(case.shape, device=device, generator=generator).argsort(-1)
    return values.to(dtype)[order]


def alone(case: Case, generator: torch.Generator) -> Inputs:
    return (distinct(case, generator),)


def with_gradient(case: Case, generator: torch.Generator) -> Inputs:
    weights = torch.randn(case.n_rows, k_of(case), device=generator.device, generator=generator)
    return distinct(case, generator), weights


def best(x: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of torch's operations: probabilities, the weights of the k best, and who these are."""
    p = torch.softmax(x, -1, dtype=widest(x))
    weights, ids = p.topk(k, -1)
    return p, weights / weights.sum(-1, keepdim=True), ids


def balance(x: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The weights, the aux loss and the z-loss, as trainers compute them of torch's operations."""
    p, weights, ids = best(x, k)
    n_rows, n_experts = x.shape
    counts = torch.zeros(n_experts, dtype=p.dtype, device=x.device)
    counts = counts.scatter_add(0, ids.flatten(), torch.ones(ids.numel(), dtype=p.dtype, device=x.device))
    aux_loss = n_experts * (counts / (n_rows * k) * p.mean(0)).sum()
    return weights, aux_loss, x.to(p.dtype).logsumexp(-1).square().mean()


def own_losses(x: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    out = route(x, k, return_aux_loss=True, return_z_loss=True)
    return out.weights, out.aux_loss, out.z_loss


def gradient(function: Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]], case: Case) -> Call:
    """The gradient of some sum of the weights and of both losses, with the forward pass."""

    def total(x, of_weights):
        weights, aux_loss, z_loss = function(x, k_of(case))
        return (weights * of_weights).sum() + aux_loss + z_loss

    return loss_gradient(total)(case)


def quack(case: Case) -> Call:
    from quack.topk import topk

    return lambda x: topk(x, k_of(case), softmax=True)[0].float()


def vllm(case: Case) -> Call:
    from vllm import _custom_ops

    def call(x):
        like = {"device": x.device}
        weights = torch.empty(case.n_rows, k_of(case), dtype=torch.float32, **like)
        ids, rows = (torch.empty(case.n_rows, k_of(case), dtype=torch.int32, **like) for _ in range(2))
        _custom_ops.topk_softmax(weights, ids, rows, x, True)
        return weights

    return call


def of_transformer_engine(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(the weights of the k best, whether an expert has the row).

    Its weights are dense, with the dtype of the logits: Megatron gives it float32. torch's topk makes k of them.
    """
    from transformer_engine.pytorch.router import fused_topk_with_score_function

    probs, chosen = fused_topk_with_score_function(
        x.float(), k, use_pre_softmax=False, num_groups=None, group_topk=None, scaling_factor=None,
        score_function="softmax", expert_bias=None,
    )  # fmt: skip
    return probs.topk(k).values, chosen


def transformer_engine(case: Case) -> Call:
    import transformer_engine.pytorch.router  # noqa: F401

    return lambda x: of_transformer_engine(x, k_of(case))[0]


def transformer_engine_gradient(case: Case) -> Call:
    """Its weights and aux loss, and torch's z-loss, for it has none."""
    from transformer_engine.pytorch.router import fused_compute_score_for_moe_aux_loss, fused_moe_aux_loss

    def losses(x, k):
        weights, chosen = of_transformer_engine(x, k)
        _, scores = fused_compute_score_for_moe_aux_loss(x.float(), k, "softmax")
        counts = chosen.sum(0, dtype=torch.int32)
        aux_loss = fused_moe_aux_loss(
            scores, counts, total_num_tokens=case.n_rows, num_experts=case.n_cols, topk=k, coeff=1.0
        )
        return weights, aux_loss, x.float().logsumexp(-1).square().mean()

    return gradient(losses, case)


def _weights_bytes(case: Case) -> int:
    """Of the result, and less than a call writes, for the experts' numbers are no part of it."""
    return case.n_rows * k_of(case) * 4


ENTRIES = {
    "route": Operation(
        inputs=alone,
        own=lambda case: lambda x: route(x, k_of(case), return_counts=False).weights,
        formula=lambda case: lambda x: best(x, k_of(case))[1],
        held_bytes=lambda case: case.tensor_bytes + _weights_bytes(case),
        ceilings=lambda case: ceiling.reads(),
        parameters=lambda case: {"k": k_of(case)},
        sample=_SAMPLE,
    ),
    "route_gradient": Operation(
        inputs=with_gradient,
        own=lambda case: gradient(own_losses, case),
        formula=lambda case: gradient(balance, case),
        held_bytes=lambda case: 2 * case.tensor_bytes + _weights_bytes(case),
        ceilings=lambda case: ceiling.copies(),
        parameters=lambda case: {"k": k_of(case)},
        whole=True,
        sample=_SAMPLE,
    ),
}
