"""Makes first calls on a CPU, and prints which of them imported sympy: `python tests/imports_of_calls.py`."""

import sys

import torch

import fused_softmax


def calls():
    x, weight, target = torch.randn(4, 64), torch.randn(9, 64), torch.tensor([1, 2, 3, 4])
    q, k = torch.randn(2, 4, 8, 16), torch.randn(1, 4, 8, 16)
    graded = x.clone().requires_grad_()
    yield "softmax", lambda: fused_softmax.softmax(graded, 1).sum().backward()
    yield "log_softmax", lambda: fused_softmax.log_softmax(graded, 0).sum().backward()
    yield "logsumexp", lambda: fused_softmax.logsumexp(graded, (0, 1)).backward()
    yield "cross_entropy", lambda: fused_softmax.cross_entropy(graded, target).backward()
    yield "statistics", lambda: fused_softmax.cross_entropy(x, target, return_token_stats=True)
    yield "linear_cross_entropy", lambda: fused_softmax.linear_cross_entropy(graded, weight, target).backward()
    yield "log_prob", lambda: fused_softmax.log_prob(graded, target).sum().backward()
    yield "divergence", lambda: fused_softmax.divergence(graded, x).backward()
    yield "attention", lambda: fused_softmax.attention(q.clone().requires_grad_(), k, k).sum().backward()
    yield "sample", lambda: fused_softmax.sample(x, 0.7, top_k=3, seed=1)
    yield "route", lambda: fused_softmax.route(graded, 3, return_aux_loss=True).aux_loss.backward()
    yield "filters", lambda: fused_softmax.top_p_mask_logits(x, 0.5)


if __name__ == "__main__":
    for name, call in calls():
        call()
        if "sympy" in sys.modules:
            print(name)
            break
