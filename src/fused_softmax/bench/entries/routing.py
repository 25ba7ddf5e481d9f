"""A router as it is measured: the weights of the best experts, with counts and losses or of groups; the gradient."""

from collections.abc import Callable

import torch
from torch import Tensor

from fused_softmax import route
from fused_softmax.bench.cases import Case
from fused_softmax.bench.entries import ceiling
from fused_softmax.bench.entries.losses import loss_gradient
from fused_softmax.bench.entries.makers import Call
from fused_softmax.bench.entries.operation import Inputs, Operation, widest

Losses = tuple[Tensor, Tensor, Tensor, Tensor]  # the weights, the aux loss, the z-loss, and the counts of experts
_KS = {64: 6, 512: 10, 896: 16, 2304: 36}  # of models, by their experts; 8 of all others
_SAMPLE = Case((13, 96))
_GROUPS, _GROUPS_KEPT, _SCALE, _BIAS = 8, 4, 2.5, 0.5  # DeepSeek-V3's, but for the bias


def k_of(case: Case) -> int:
    return min(case.n_cols, _KS.get(case.n_cols, 8))


def distinct(case: Case, generator: torch.Generator) -> Tensor:
    """Logits of which no two of a row are equal, for torch's topk chooses any of equal ones."""
    order = torch.rand(case.shape, device=generator.device, generator=generator).argsort(-1)
    return _values(case, generator.device)[order]


def _values(case: Case, device: torch.device) -> Tensor:
    """As many numbers as a row has, the least first."""
    bits = torch.arange(case.n_cols, device=device) - case.n_cols // 2  # a step of bfloat16 each, from 1/16 on
    values = torch.where(bits < 0, -1.0, 1.0) * torch.ldexp(
        1 + bits.abs() % 64 / 64, torch.div(bits.abs(), 64, rounding_mode="floor") - 4
    )
    return values.to(getattr(torch, case.dtype))


def grouped(case: Case, generator: torch.Generator) -> Inputs:
    """(logits, bias): no rounding decides between two groups or experts, and the bias makes the choice.

    It lifts the first half of each group, which has the lesser half of its numbers, above the other. Groups have every
    eighth number, in an order that differs by rows.
    """
    device, size = generator.device, case.n_cols // _GROUPS
    groups = torch.rand(case.n_rows, _GROUPS, 1, 1, device=device, generator=generator).argsort(1)
    halves = torch.rand(case.n_rows, _GROUPS, 2, size // 2, device=device, generator=generator).argsort(-1)
    places = groups + _GROUPS * (halves + torch.tensor([[0], [size // 2]], device=device))
    bias = torch.tensor([_BIAS, 0.0], device=device).repeat_interleave(size // 2).repeat(_GROUPS)
    return _values(case, device)[places.view(case.shape)], bias


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


def best_of_groups(x: Tensor, bias: Tensor, k: int) -> Tensor:
    """The weights of the k best of the kept groups, as DeepSeek-V3 computes them of torch's operations."""
    scores = x.to(widest(x)).sigmoid()
    groups = (scores + bias).view(len(x), _GROUPS, -1)
    kept = groups.topk(2, -1).values.sum(-1).topk(_GROUPS_KEPT, -1).indices
    left_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(1, kept, False)
    ids = groups.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(1).topk(k, -1).indices
    weights = scores.gather(1, ids)
    return weights / weights.sum(-1, keepdim=True) * _SCALE


def own_of_groups(x: Tensor, bias: Tensor, k: int) -> Tensor:
    return route(
        x, k, score="sigmoid", bias=bias, n_groups=_GROUPS, groups_kept=_GROUPS_KEPT, scale=_SCALE, return_counts=False
    ).weights


def balance(x: Tensor, k: int) -> Losses:
    """As trainers compute them of torch's operations."""
    p, weights, ids = best(x, k)
    n_rows, n_experts = x.shape
    counts = torch.zeros(n_experts, dtype=p.dtype, device=x.device)
    counts = counts.scatter_add(0, ids.flatten(), torch.ones(ids.numel(), dtype=p.dtype, device=x.device))
    aux_loss = n_experts * (counts / (n_rows * k) * p.mean(0)).sum()
    return weights, aux_loss, x.to(p.dtype).logsumexp(-1).square().mean(), counts


def own_losses(x: Tensor, k: int) -> Losses:
    out = route(x, k, return_aux_loss=True, return_z_loss=True)
    return out.weights, out.aux_loss, out.z_loss, out.counts


def joined(case: Case, losses: Losses) -> Tensor:
    """One tensor, with counts as parts of their mean, which is about 1 as the weights and the aux loss are."""
    weights, aux_loss, z_loss, counts = losses
    counts = counts.to(weights.dtype) * (case.n_cols / (case.n_rows * k_of(case)))
    return torch.cat([weights.flatten(), counts, aux_loss.view(1), z_loss.view(1)])


def gradient(function: Callable[[Tensor, int], Losses], case: Case) -> Call:
    """The gradient of some sum of the weights and of both losses, with the forward pass."""

    def total(x, of_weights):
        weights, aux_loss, z_loss, _ = function(x, k_of(case))
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


def transformer_engine_losses(case: Case, passes: bool = False) -> Call:
    """Its weights and aux loss, and torch's z-loss, for it has none. passes: their gradient, with the forward pass."""
    from transformer_engine.pytorch.router import fused_compute_score_for_moe_aux_loss, fused_moe_aux_loss

    def losses(x, k):
        weights, chosen = of_transformer_engine(x, k)
        _, scores = fused_compute_score_for_moe_aux_loss(x.float(), k, "softmax")
        counts = chosen.sum(0, dtype=torch.int32)
        aux_loss = fused_moe_aux_loss(
            scores, counts, total_num_tokens=case.n_rows, num_experts=case.n_cols, topk=k, coeff=1.0
        )
        return weights, aux_loss, x.float().logsumexp(-1).square().mean(), counts

    return gradient(losses, case) if passes else lambda x: losses(x, k_of(case))


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
    "route_losses": Operation(
        inputs=alone,
        own=lambda case: lambda x: own_losses(x, k_of(case)),
        formula=lambda case: lambda x: balance(x, k_of(case)),
        held_bytes=lambda case: case.tensor_bytes + _weights_bytes(case) + (case.n_cols + 2) * 4,
        ceilings=lambda case: ceiling.reads(),
        parameters=lambda case: {"k": k_of(case)},
        joined=joined,
        whole=True,
        own_error=2.0**-21,  # of the z-loss, a float32 sum of squares over all rows
        sample=_SAMPLE,
    ),
    "route_groups": Operation(
        inputs=grouped,
        own=lambda case: lambda x, bias: own_of_groups(x, bias, k_of(case)),
        formula=lambda case: lambda x, bias: best_of_groups(x, bias, k_of(case)),
        held_bytes=lambda case: case.tensor_bytes + case.n_cols * 4 + _weights_bytes(case),
        ceilings=lambda case: ceiling.reads(),
        parameters=lambda case: {"k": k_of(case), "groups": _GROUPS},
        whole=True,  # the bias is of all rows
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
