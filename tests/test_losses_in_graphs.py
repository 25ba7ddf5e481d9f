"""Post-training losses in CUDA graphs: a replay has the bits of a call, whatever its tensors hold by then."""

import pytest
import torch
from conftest import INTERPRETED, peaked

from fused_softmax import divergence, linear_log_prob, log_prob

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="no GPU"),
]
BF16, N, CLASSES, FEATURES = torch.bfloat16, 64, 128256, 64


def inputs(seed):
    """(logits, another model's logits, hidden states, targets)"""
    x, y = (peaked(N, CLASSES, BF16, seed + i).cuda() for i in (0, 1))
    hidden = torch.randn(N, FEATURES, generator=torch.Generator().manual_seed(seed)).to("cuda", BF16)
    return x, y, hidden, (torch.arange(N) * 99 + seed).cuda()


def calls_of(x, y, hidden, target):
    weight = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(9)).to("cuda", BF16)
    logits, states, weight = (each.requires_grad_() for each in (x, hidden, weight))

    def of_logits():
        out = log_prob(logits, target, temperature=0.7, return_entropy=True)
        return *out[:2], *torch.autograd.grad(out.log_prob.sum() + 0.1 * out.entropy.sum(), logits)

    def of_pairs(kind, reduction):
        found = divergence(logits, y, kind=kind, reduction=reduction)
        return found, *torch.autograd.grad(found.sum(), logits)

    def of_states(way):
        out = linear_log_prob(states, weight, target, return_entropy=True, logits=way)
        return *out[:2], *torch.autograd.grad(out.log_prob.sum() + 0.1 * out.entropy.sum(), (states, weight))

    return {
        "log_prob": of_logits, "kl": lambda: of_pairs("kl", "none"), "jsd": lambda: of_pairs("jsd", "mean"),
        "linear_log_prob, kept": lambda: of_states("keep"), "linear_log_prob": lambda: of_states("recompute"),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["log_prob", "kl", "jsd", "linear_log_prob, kept", "linear_log_prob"])
def test_a_replay_has_the_bits_of_a_call(name):
    given = inputs(0)
    call = calls_of(*given)[name]

    def run():
        return [each.detach() for each in call()]

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed in (0, 5, 11):
        for place, new in zip(given, inputs(seed), strict=True):
            place.detach().copy_(new)
        wanted = [each.clone() for each in run()]
        for each in captured:
            each.fill_(0)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(captured, wanted, strict=True))
