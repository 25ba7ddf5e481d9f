"""Losses of rows of logits as they are measured, and their gradients."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fused_softmax import cross_entropy, divergence, log_prob
from fused_softmax.bench.cases import Case
from fused_softmax.bench.catalog import DIVERGENCES
from fused_softmax.bench.entries import ceiling
from fused_softmax.bench.entries.makers import Call, Maker, without_init
from fused_softmax.bench.entries.operation import Inputs, Operation, logits, widest

Pair = tuple[Tensor, Tensor]


def with_targets(case: Case, generator: torch.Generator) -> Inputs:
    """Logits and one class for every row; no row is ignored."""
    device = generator.device
    return logits(case, generator), torch.randint(case.n_cols, (case.n_rows,), device=device, generator=generator)


def losses(case: Case) -> Call:
    return lambda x, target: x.logsumexp(-1) - x.gather(-1, target.unsqueeze(-1)).squeeze(-1)


def loss_gradient(function: Call) -> Maker:
    """The gradient of the mean loss, including the forward pass."""

    def call(x, target):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(function(x, target), x)[0]

    return lambda case: call


def loss_gradient_formula(case: Case) -> Call:
    def call(x, target):
        dx = torch.softmax(x, -1, dtype=widest(x))
        one = torch.arange(case.n_cols, device=x.device) == target.unsqueeze(-1)
        return ((dx - one.to(dx.dtype)) / case.n_rows).to(x.dtype)

    return call


def own_log_prob(x: Tensor, target: Tensor) -> Pair:
    return log_prob(x, target, return_entropy=True)[:2]


def eager_log_prob(x: Tensor, target: Tensor) -> Pair:
    """As reinforcement learning computes it of torch's operations, in float32."""
    log_p = torch.log_softmax(x, -1, dtype=torch.float32)
    return log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def log_prob_formula(case: Case) -> Call:
    def call(x, target):
        log_p = torch.log_softmax(x, -1, dtype=widest(x))
        return torch.stack([log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)], -1)

    return call


def log_prob_pair(function: Callable[[Tensor, Tensor], Pair], gradient: bool = False) -> Call:
    """A function's log-probabilities and entropies as one result, or the gradient of their sum, with both passes."""

    def call(x, target):
        return torch.stack(function(x, target), -1)

    def both_passes(x, target):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            of_targets, entropy = function(x, target)
            return torch.autograd.grad((of_targets.sum() + entropy.sum()), x)[0]

    return both_passes if gradient else call


def log_prob_gradient_formula(case: Case) -> Call:
    def call(x, target):
        log_p = torch.log_softmax(x, -1, dtype=widest(x))
        p = log_p.exp()
        entropy = -(p * log_p).sum(-1, keepdim=True)
        dx = log_p.add_(entropy + 1).mul_(p).neg_()  # in place: of a layer's float64 logits there are 10 GiB
        return dx.scatter_add_(-1, target.unsqueeze(-1), torch.ones_like(entropy)).to(x.dtype)

    return call


def with_teacher(case: Case, generator: torch.Generator) -> Inputs:
    """A student's logits and a teacher's."""
    return logits(case, generator), logits(case, generator)


def with_teacher_apart(case: Case, generator: torch.Generator) -> tuple[Tensor, ...]:
    """The same, but no two probabilities of a column are so near each other that float32 may take them for equal.

    The gradient of tvd jumps where they are.
    """
    x, y = with_teacher(case, generator)
    near = (torch.log_softmax(x, -1, dtype=widest(x)) - torch.log_softmax(y, -1, dtype=widest(y))).abs() < 1e-4
    return x, torch.where(near, y + y.abs() / 32 + 1 / 64, y)  # by what 16 bits do not round away


def divergences_formula(kind: str) -> Maker:
    def call(x, y):
        log_q, log_t = (torch.log_softmax(each, -1, dtype=widest(x)) for each in (x, y))
        if kind == "kl":
            return (log_t.exp() * (log_t - log_q)).sum(-1)
        if kind == "reverse_kl":
            return (log_q.exp() * (log_q - log_t)).sum(-1)
        if kind == "tvd":
            return (log_q.exp() - log_t.exp()).abs().sum(-1) / 2
        log_m = torch.logaddexp(log_q, log_t) - math.log(2.0)
        return (log_q.exp() * (log_q - log_m) + log_t.exp() * (log_t - log_m)).sum(-1) / 2

    return lambda case: call


def divergence_by_torch(x: Tensor, y: Tensor, kind: str, reduction: str = "batchmean") -> Tensor:
    """As distillation computes it of torch's operations, in float32."""
    log_q, log_t = (torch.log_softmax(each, -1, dtype=torch.float32) for each in (x, y))
    kl_div = partial(torch.nn.functional.kl_div, reduction=reduction, log_target=True)
    if kind == "kl":
        return kl_div(log_q, log_t)
    if kind == "reverse_kl":
        return kl_div(log_t, log_q)
    if kind == "tvd":
        apart = (log_q.exp() - log_t.exp()).abs() / 2
        return apart if reduction == "none" else apart.sum() / len(x)
    log_m = torch.logaddexp(log_q, log_t) - math.log(2.0)
    return (kl_div(log_m, log_q) + kl_div(log_m, log_t)) / 2


def divergence_gradient_formula(kind: str) -> Maker:
    def make(case: Case) -> Call:
        def call(x, y):
            if kind == "kl":
                q, t = (torch.softmax(each, -1, dtype=widest(x)) for each in (x, y))
                return ((q - t) / case.n_rows).to(x.dtype)
            log_q, log_t = (torch.log_softmax(each, -1, dtype=widest(x)) for each in (x, y))
            q = log_q.exp()
            if kind == "reverse_kl":
                slope = log_q - log_t
            elif kind == "jsd":
                slope = (log_q - torch.logaddexp(log_q, log_t) + math.log(2.0)) / 2
            else:
                slope = torch.sign(q - log_t.exp()) / 2
            return (q * (slope - (q * slope).sum(-1, keepdim=True)) / case.n_rows).to(x.dtype)

        return call

    return make


def liger_divergence(case: Case, kind: str) -> Call:
    """Its losses take log-probabilities, or of tvd probabilities, which torch makes in float32."""
    from liger_kernel.transformers import functional as liger

    of_tvd = partial(liger.liger_tvd, reduction="batchmean")
    of_beta = {"reverse_kl": 1.0, "jsd": 0.5}

    def call(x, y):
        if kind == "tvd":
            return of_tvd(*(torch.softmax(each, -1, dtype=torch.float32) for each in (x, y)))
        log_q, log_t = (torch.log_softmax(each, -1, dtype=torch.float32) for each in (x, y))
        if kind == "kl":
            return liger.liger_kl_div(log_q, log_t, reduction="batchmean", log_target=True)
        return liger.liger_jsd(log_q, log_t, beta=of_beta[kind])

    return loss_gradient(call)(case)


def trl_divergence(case: Case, beta: float, gradient: bool = False) -> Call:
    """Under autocast, as GKDTrainer trains in 16 bits: its logarithms are then float32."""
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    def of_rows(x, y, reduction):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.element_size() == 2):
            return GKDTrainer.generalized_jsd_loss(x, y, beta=beta, reduction=reduction)

    if gradient:
        return loss_gradient(partial(of_rows, reduction="batchmean"))(case)
    return lambda x, y: of_rows(x, y, "none").sum(-1)


def quack(case: Case) -> Call:
    from quack.cross_entropy import cross_entropy

    return loss_gradient(cross_entropy)(case)


def trl(case: Case, gradient: bool = False) -> Call:
    from trl.kernels import selective_log_softmax_and_entropy

    return log_prob_pair(selective_log_softmax_and_entropy, gradient)


def verl(case: Case, gradient: bool = False) -> Call:
    """Its results have the dtype of the logits."""
    functional = without_init("verl.utils.torch_functional")

    def both(x, target):
        of_targets = functional.logprobs_from_logits(x, target, inplace_backward=False)
        return of_targets.float(), functional.entropy_from_logits(x).float()

    return log_prob_pair(both, gradient)


def _divergence(kind: str) -> Operation:
    return Operation(
        inputs=with_teacher,
        own=lambda case: partial(divergence, kind=kind, reduction="none"),
        formula=divergences_formula(kind),
        eager=lambda case: lambda x, y: divergence_by_torch(x, y, kind, "none").sum(-1),
        held_bytes=lambda case: 2 * case.tensor_bytes + 4 * case.n_rows,
        ceilings=lambda case: ceiling.reads(),
        parameters=lambda case: {"kind": kind, "reduction": "none"},
    )


def _divergence_gradient(kind: str) -> Operation:
    return Operation(
        inputs=with_teacher_apart if kind == "tvd" else with_teacher,
        own=loss_gradient(partial(divergence, kind=kind)),
        formula=divergence_gradient_formula(kind),
        eager=loss_gradient(partial(divergence_by_torch, kind=kind)),
        held_bytes=lambda case: 3 * case.tensor_bytes,
        ceilings=lambda case: ceiling.adds(),
        parameters=lambda case: {"kind": kind, "reduction": "mean"},
        of_torchs=2.0 if kind == "jsd" else 1.0,  # as of linear_divergence
    )


ENTRIES = {
    "cross_entropy": Operation(
        inputs=with_targets,
        own=lambda case: lambda x, target: cross_entropy(x, target, reduction="none"),
        formula=losses,
        eager=lambda case: lambda x, target: torch.nn.functional.cross_entropy(x, target, reduction="none"),
        held_bytes=lambda case: case.tensor_bytes + case.n_rows * (8 + case.itemsize),
        ceilings=lambda case: ceiling.reads(),
        parameters=lambda case: {"reduction": "none"},
    ),
    "cross_entropy_gradient": Operation(
        inputs=with_targets,
        own=loss_gradient(cross_entropy),
        formula=loss_gradient_formula,
        eager=loss_gradient(torch.nn.functional.cross_entropy),
        held_bytes=lambda case: 2 * case.tensor_bytes + 8 * case.n_rows,
        ceilings=lambda case: ceiling.copies(),
        parameters=lambda case: {"reduction": "mean"},
    ),
    "log_prob": Operation(
        inputs=with_targets,
        own=lambda case: log_prob_pair(own_log_prob),
        formula=log_prob_formula,
        eager=lambda case: log_prob_pair(eager_log_prob),
        held_bytes=lambda case: case.tensor_bytes + 16 * case.n_rows,
        ceilings=lambda case: ceiling.reads(),
        parameters=lambda case: {"return_entropy": True},
    ),
    "log_prob_gradient": Operation(
        inputs=with_targets,
        own=lambda case: log_prob_pair(own_log_prob, gradient=True),
        formula=log_prob_gradient_formula,
        eager=lambda case: log_prob_pair(eager_log_prob, gradient=True),
        held_bytes=lambda case: 2 * case.tensor_bytes + 8 * case.n_rows,
        ceilings=lambda case: ceiling.copies(),
        parameters=lambda case: {"return_entropy": True},
    ),
    **{name: _divergence(kind) for name, kind in DIVERGENCES.items()},
    **{f"{name}_gradient": _divergence_gradient(kind) for name, kind in DIVERGENCES.items()},
}
