"""Cross-entropy of a linear layer's logits and targets that are probabilities, by the kernels of pairs of rows.

The logits exist a chunk of rows at a time. A mean and a sum make their gradients in the forward pass: one product for
the logits, two for the gradients. Without a reduction, and for float16, the backward pass makes the logits again.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fused_softmax.core.no_gradient import saved_of
from fused_softmax.core.route import apart, batched, needs_grad, resolved
from fused_softmax.ops import autocast
from fused_softmax.ops.losses.divergence_launches import Pair
from fused_softmax.ops.losses.divergence_rows import gradients, referred, run
from fused_softmax.ops.losses.linear_by_rows import Gradients, Linear, chunks, linear_of, lowered, whole_logits
from fused_softmax.ops.losses.options import Divergence, Loss, weight_for_kernels
from fused_softmax.ops.losses.sums import multiply


class _How(NamedTuple):
    """What a call does, beside its tensors. asked: which gradients of input, weight, bias and target are wanted."""

    options: Divergence
    linear: Linear
    reduction: str
    asked: tuple[bool, ...]

    def reduced(self, rows: Tensor) -> Tensor:
        return rows if self.reduction == "none" else rows.mean() if self.reduction == "mean" else rows.sum()


def loss_of_probabilities(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, loss: Loss,
    chunk_size: int | None, accumulate: str,
) -> Tensor:  # fmt: skip
    """The loss, float32, [] or of the leading shape, with the gradients of input, weight, bias and target."""
    rows = input.reshape(-1, input.shape[-1])
    asked = tuple(each is not None and needs_grad(each) for each in (input, linear_weight, linear_bias, target))
    linear = linear_of(rows, linear_weight, chunk_size, accumulate, asked[1])
    how = _How(Divergence.of_loss(loss), linear, loss.reduction, asked)
    found = _LinearProbabilities.apply(
        rows, linear_weight, linear_bias, target.reshape(len(rows), -1), weight_for_kernels(loss.weight, input), how
    )  # fmt: skip
    return found.view(input.shape[:-1]) if loss.reduction == "none" else found


class _LinearProbabilities(torch.autograd.Function):
    """The loss of rows x [n, in_features] by targets [n, n_classes], reduced as asked."""

    @staticmethod
    def forward(ctx, x, w, bias, target, weight, how):
        # In fp16 a mean's division would make gradients vanish that a scaled loss would have kept: they come later.
        at_once = any(how.asked) and how.reduction != "none" and x.dtype != torch.float16
        each = 1.0 / len(x) if how.reduction == "mean" else 1.0
        counts = torch.full((len(x),), each, dtype=torch.float32, device=x.device) if at_once else None
        values, *ctx.found = _by_chunks(x, w, bias, target, weight, how, counts)
        ctx.how = how
        ctx.save_for_backward(x, w, bias, target, weight)
        return how.reduced(values)

    @staticmethod
    def backward(ctx, dy):
        (dy,), how = resolved(dy), ctx.how
        x, w, bias, target, weight = saved_of(ctx, "linear_cross_entropy")
        if torch.is_grad_enabled() or batched(dy):
            return *_differentiable(x, w, bias, target, weight, how, dy), None, None
        # Given away: whoever has them may change them, and a second backward computes them again.
        (of_layer, of_target), ctx.found = ctx.found, (None, None)
        if of_layer is not None:
            of_target = of_target if of_target is None else multiply(of_target, dy)
            return *of_layer.times(dy, x, w, bias), of_target, None, None
        counts = (dy / len(x) if how.reduction == "mean" else dy).expand(len(x))
        _, *found = _by_chunks(x, w, bias, target, weight, how, counts)
        return *found[0].in_dtypes(x, w, bias), found[1], None, None  # type: ignore[union-attr]


def _by_chunks(
    x: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, weight: Tensor | None, how: _How, counts: Tensor | None
) -> tuple[Tensor, Gradients | None, Tensor | None]:  # fmt: skip
    """(the losses of rows, float32; the gradients asked for, of the layer and of the target, if there are counts).

    counts: what each row's loss counts [n].
    """
    layer, values = lowered(x, w, bias), []
    found: Gradients | None = None
    of_target: Tensor | None = None
    if counts is not None:
        found = Gradients(*layer, how.linear, how.asked, wide=w.dtype != x.dtype)
        if how.asked[3]:
            of_target = torch.empty(target.shape, dtype=target.dtype, device=x.device)
    for start, logits in chunks(*layer, how.linear):
        here = slice(start, start + len(logits))
        pair, rows = run(Pair(logits, target[here], weight), how.options)
        values.append(rows.value)
        if found is not None and counts is not None:
            _, part = gradients(pair, rows, counts[here], how.options, of_target is not None, over=True)
            found.add(start, pair.x)
            if of_target is not None and part is not None:
                of_target[here] = part
    return torch.cat(values), found and found.done(), of_target


def _differentiable(x, w, bias, target, weight, how: _How, dy: Tensor) -> list[Tensor | None]:
    """The gradients by torch's operations, for a second derivative or a batch of gradients."""
    again = torch.is_grad_enabled()
    with autocast.off(x), torch.enable_grad():
        x, w, bias, target = apart(x, w, bias, target)
        inputs = [each for each, wants in zip((x, w, bias, target), how.asked, strict=True) if wants]
        rows = referred(whole_logits(x, w, bias, target, -1), target, how.options, weight=weight)
        y = how.reduced(rows)
        found = iter(torch.autograd.grad([y], inputs, [dy.to(y.dtype)], create_graph=again))
    return [next(found) if wants else None for wants in how.asked]
