"""Gradients whose saved tensors are given back at other strides, by hooks of autograd."""

import contextlib
import os

import pytest
import torch
from conftest import peaked
from sharded import over, shard
from torch.utils.flop_counter import FlopCounterMode

from fused_softmax import (
    attention,
    cross_entropy,
    divergence,
    linear_cross_entropy,
    linear_divergence,
    linear_log_prob,
    log_prob,
)

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="without a GPU or the interpreter, CPU tensors take ATen",
)
N, CLASSES = 6, 37
TARGET = torch.tensor([3, 0, -100, 36, 21, 7])
TARGETS = torch.stack((TARGET, TARGET.flip(0), torch.arange(N)), 1)
WEIGHT, TEMPERATURE = torch.linspace(0.2, 2.0, CLASSES), torch.linspace(0.5, 2.0, N)
X, P = peaked(N, CLASSES), peaked(N, CLASSES, seed=1).softmax(1)
LAYER = peaked(N, 16, seed=2) / 4, peaked(CLASSES, 16, seed=3) / 4, peaked(1, CLASSES, seed=4)[0]


def losses(device, cut=lambda whole, dim: whole, **over):
    """By name: (the tensors that get gradients, what is called). cut: gives a rank its own classes of a dim.

    over: the arguments of a call over ranks.
    """
    t, k, w, temperature = (each.to(device) for each in (TARGET, TARGETS, cut(WEIGHT, 0), TEMPERATURE))
    x, p, layer = cut(X, 1), cut(P, 1), (LAYER[0], cut(LAYER[1], 0), cut(LAYER[2], 0))
    teacher, of_teacher = p.log().to(device), layer[1].to(device) / 2
    beside = {"lse_square_scale": 1e-2, "return_lse": True, "return_z_loss": True, **over}
    chunks = {"chunk_size": 4, **over}
    return {
        "loss": ((x,), lambda x: cross_entropy(x, t, reduction="none", **over)),
        "loss and lse": ((x,), lambda x: cross_entropy(x, t, **beside)),
        "weights": ((x,), lambda x: cross_entropy(x, t, w, softcap=9.0, label_smoothing=0.1, **over)),
        "probabilities": ((x, p), lambda x, p: cross_entropy(x, p, w, reduction="none", **over)),
        "probabilities and lse": ((x, p), lambda x, p: cross_entropy(x, p, **beside)),
        "log_prob": ((x,), lambda x: log_prob(x, k, temperature=temperature, **over)),
        "entropy": ((x,), lambda x: log_prob(x, t, return_entropy=True, **over)[:2]),
        "divergence": ((x,), lambda x: divergence(x, teacher, temperature=temperature, reduction="none", **over)),
        "layer": (layer, lambda x, w, b: linear_cross_entropy(x, w, t, linear_bias=b, **chunks)),
        "layer and lse": (
            layer, lambda x, of, b: linear_cross_entropy(x, of, t, linear_bias=b, weight=w, **chunks | beside),
        ),
        "layer of probabilities": (
            (*layer, p), lambda x, of, b, p: linear_cross_entropy(x, of, p, linear_bias=b, weight=w, **chunks),
        ),
        "layer's log_prob": (
            layer,
            lambda x, w, b: linear_log_prob(x, w, k, linear_bias=b, temperature=temperature, **chunks),
        ),
        "layer's divergence": (
            layer[:2],
            lambda x, w: linear_divergence(x, w, x.detach(), of_teacher, temperature=temperature, **chunks),
        ),
    }  # fmt: skip


def laid_out_anew(saved):
    """The same values, beside others."""
    return torch.stack([saved, torch.zeros_like(saved)], -1)[..., 0]


def gradients(call, given, device, hook=None, watched=False):
    """Those of two backward passes, the second of which finds nothing that the forward pass made ahead."""
    leaves = [each.to(device, copy=True).requires_grad_() for each in given]
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, hook) if hook else contextlib.nullcontext()
    with FlopCounterMode(display=False) if watched else contextlib.nullcontext():
        with hooks:
            found = call(*leaves)
        results = [each for each in ((found,) if isinstance(found, torch.Tensor) else found) if each is not None]
        incoming = [torch.linspace(0.5, 2.0, each.numel(), device=device).view(each.shape) for each in results]
        passes = []
        for _ in range(2):
            for each in leaves:
                each.grad = None
            torch.autograd.backward(results, incoming, retain_graph=True)
            passes += [each.grad for each in leaves]
    return passes


@pytest.mark.parametrize("of", losses("cpu"))
@pytest.mark.parametrize("watched", [False, True], ids=["eager", "an operator"])
def test_saved_tensors_at_other_strides(of, watched, device):
    given, call = losses(device)[of]
    wanted = gradients(call, given, device)
    found = gradients(call, given, device, laid_out_anew, watched)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)  # for other strides cuBLAS may take another kernel


@pytest.mark.parametrize("watched", [False, True], ids=["eager", "an operator"])
def test_attentions_saved_tensors_at_other_strides(watched, device):
    heads = [peaked(8, 16, seed=seed).view(1, 2, 4, 16) / 4 for seed in range(3)]
    call = lambda *given: attention(*given, is_causal=True, return_lse=True)[:2]  # noqa: E731
    wanted = gradients(call, heads, device)
    torch.testing.assert_close(gradients(call, heads, device, laid_out_anew, watched), wanted)


def over_ranks(group):
    """The gradients of every call, with and without hooks."""
    calls = losses("cpu", lambda whole, dim: shard(whole, group, dim), **over(group))
    return {
        of: [gradients(call, given, "cpu", hook) for hook in (None, laid_out_anew)]
        for of, (given, call) in calls.items()
    }


@pytest.mark.skipif(not INTERPRETED, reason="the ranks have tensors of a CPU, which only the interpreter runs")
def test_saved_tensors_at_other_strides_over_ranks(ranks):
    for found in ranks.values(2, over_ranks):
        for of, (wanted, ours) in found.items():
            torch.testing.assert_close(ours, wanted, msg=lambda said, of=of: f"{of}: {said}")
