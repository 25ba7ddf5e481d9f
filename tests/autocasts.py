"""Calls by torch's names and by this package's, and autocast for a device that need not be there."""

from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F

import fused_softmax
from fused_softmax import nn

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
N, CLASSES, FEATURES = 6, 40, 16


@contextmanager
def _on(device, dtype):
    # torch.autocast("cuda") turns itself off where there is no GPU; what it sets does not.
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])


def autocast(device, dtype):
    """torch.autocast to a dtype; None is none."""
    if dtype is None:
        return nullcontext()
    there = device != "cuda" or torch.cuda.is_available()
    return torch.autocast(device, dtype) if there else _on(device, dtype)


def tensors(device, dtype, fill=True):
    """Logits, targets, and what else calls take, those of a float dtype with a gradient. fill: with values.

    Of a GPU that is not there, autograd makes no node: such tensors are without a gradient.
    """
    differentiable = device == "cpu" or torch.cuda.is_available()
    generator = torch.Generator().manual_seed(0)

    def rand(*shape, grad=True, scale=1.0):
        if not fill:
            return torch.empty(shape, dtype=dtype, device=device).requires_grad_(grad and differentiable)
        return (torch.randn(*shape, generator=generator, dtype=FP64) * scale).to(device, dtype).requires_grad_(grad)

    target = torch.arange(N, device=device) * 5
    target = target.where(target != 5, -100)
    probabilities = rand(N, CLASSES, grad=False).softmax(-1)
    return {
        "x": rand(N, CLASSES, scale=3.0), "t": target, "p": probabilities, "w": rand(CLASSES, grad=False).abs() + 0.5,
        "h": rand(N, FEATURES), "l": rand(CLASSES, FEATURES), "b": rand(CLASSES),
        "q": rand(2, 4, 5, FEATURES), "k": rand(2, 2, 7, FEATURES), "v": rand(2, 2, 7, FEATURES),
        "m": rand(5, 7, grad=False), "s": rand(4),
    }  # fmt: skip


def _ours_or_torchs(ours):
    of = fused_softmax if ours else F
    return of, torch.logsumexp if not ours else fused_softmax.logsumexp


def linear_loss(ours, g, **options):
    if ours:
        return fused_softmax.linear_cross_entropy(g["h"], g["l"], g["t"], linear_bias=g["b"], **options)
    return F.cross_entropy(F.linear(g["h"], g["l"], g["b"]), g["t"], **options)


def attention(ours, g, mask=None, **options):
    of = fused_softmax.attention if ours else F.scaled_dot_product_attention
    return of(g["q"], g["k"], g["v"], mask, enable_gqa=True, **options)


def _module(name, *arguments, **options):
    return lambda ours, g: getattr(nn if ours else torch.nn, name)(*arguments, **options)(g["x"])


def _loss(ours, g, target="t", **options):
    return _ours_or_torchs(ours)[0].cross_entropy(g["x"], g[target], **options)


# By name: what computes it, of (whether by this package, tensors).
CALLS = {
    "softmax": lambda ours, g: _ours_or_torchs(ours)[0].softmax(g["x"], -1),
    "softmax, dim 0": lambda ours, g: _ours_or_torchs(ours)[0].softmax(g["x"], 0),
    "softmax, dtype": lambda ours, g: _ours_or_torchs(ours)[0].softmax(g["x"], -1, dtype=FP64),
    "log_softmax": lambda ours, g: _ours_or_torchs(ours)[0].log_softmax(g["x"], -1),
    "logsumexp": lambda ours, g: _ours_or_torchs(ours)[1](g["x"], -1),
    "logsumexp, dims": lambda ours, g: _ours_or_torchs(ours)[1](g["x"], (0, 1), True),
    "cross_entropy": _loss,
    "cross_entropy, none": lambda ours, g: _loss(ours, g, reduction="none"),
    "cross_entropy, weight": lambda ours, g: _loss(ours, g, weight=g["w"], label_smoothing=0.1),
    "cross_entropy, probabilities": lambda ours, g: _loss(ours, g, "p"),
    "linear_cross_entropy": linear_loss,
    "linear_cross_entropy, none": lambda ours, g: linear_loss(ours, g, reduction="none"),
    "attention": attention,
    "attention, causal": lambda ours, g: attention(ours, g, is_causal=True),
    "attention, bool mask": lambda ours, g: attention(ours, g, g["m"] > -1.0),
    "attention, mask": lambda ours, g: attention(ours, g, g["m"]),
    "nn.Softmax": _module("Softmax", -1),
    "nn.LogSoftmax": _module("LogSoftmax", -1),
}
# Of what torch has no name for: the operator whose dtype it is to have.
OPTIONS = {
    "softmax": [
        lambda g: fused_softmax.softmax(g["x"], scale=0.5, mask=g["p"] > 0.02, sink=0.0),
        lambda g: fused_softmax.log_softmax(g["x"], mask=g["p"], masked_rows="zero"),
        lambda g: fused_softmax.softmax(g["x"], is_causal=True),
    ],
    "logsumexp": [
        lambda g: fused_softmax.logsumexp(g["x"], -1, scale=0.5, sink=0.0),
        lambda g: fused_softmax.logsumexp(g["x"], -1, mask=g["p"] > 0.02),
    ],
    "cross_entropy": [
        lambda g: fused_softmax.cross_entropy(g["x"], g["t"], softcap=30.0, lse_square_scale=1e-3),
        lambda g: fused_softmax.cross_entropy(g["x"], g["t"], return_z_loss=True, lse_square_scale=1e-3).z_loss,
        lambda g: fused_softmax.cross_entropy(g["x"], g["t"], return_token_stats=True).loss,
        lambda g: fused_softmax.cross_entropy(g["x"], g["t"], lse=g["x"].detach().double().logsumexp(-1)),
        lambda g: nn.CrossEntropyLoss(reduction="sum")(g["x"], g["t"]),
    ],
    "linear_cross_entropy": [
        lambda g: linear_loss(True, g, softcap=30.0),
        lambda g: linear_loss(True, g, return_lse=True).loss,
        lambda g: linear_loss(True, g, chunk_size=2),
    ],
    "attention": [
        lambda g: attention(True, g, softcap=20.0),
        lambda g: attention(True, g, return_lse=True).output,
        lambda g: attention(True, g, window=(2, 0), sinks=g["s"]),
    ],
}  # fmt: skip
