"""The rules of divergences of linear layers as a registered operator and its gradient: what runs, fakes, autograd.

The divergences of rows [n, in_features]; whatever reduces them follows. The gradient makes the logits again. Without a
target_weight, target_input are probabilities [n, n_classes], and by kind "cross" the result is their cross-entropy,
with weights of classes.
"""

from typing import Any

import torch
from torch import Tensor

from fused_softmax.core.route import on_device
from fused_softmax.ops.losses import linear_pairs as ops
from fused_softmax.ops.losses.divergence_operators import OF_LOSS
from fused_softmax.ops.losses.divergence_rows import pair_of, referred, refused, with_rows
from fused_softmax.ops.losses.linear_by_rows import linear_of
from fused_softmax.ops.losses.options import Divergence

_LAYERS = (
    "Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor target_input, Tensor? target_weight, "
    "Tensor? target_bias"
)
_HOW = f'{Divergence.schema()}, {OF_LOSS}, int? chunk_size=None, str accumulate="fp32"'
_N_OPTIONS = len(Divergence().traced())
LINEAR_DIVERGENCE = f"({_LAYERS}, {_HOW}) -> Tensor"
BACKWARD = (
    f"(Tensor ddivergence, {_LAYERS}, {_HOW}, bool[] asked=[]) -> (Tensor input, Tensor linear_weight, "
    "Tensor linear_bias, Tensor target_input)"
)
_ASKED = 4


def _split(given: tuple) -> tuple[ops.Layers, Divergence, int | None, str, list[bool]]:
    """The dispatcher leaves out last arguments that are defaults."""
    (x, w, bias, h, v, of_v), given = given[:6], given[6:]
    more = given[_N_OPTIONS:]
    defaults: tuple[Any, ...] = None, 0.0, None, "fp32", []
    weight, label_smoothing, chunk_size, accumulate, asked = more + defaults[len(more) :]
    options = Divergence.of_traced(given[:_N_OPTIONS], label_smoothing=label_smoothing)
    _, _, _, temperature, of_target = pair_of(x, h, options)
    layers = ops.Layers(x, w, bias, h, v, of_v, weight, temperature, of_target)
    return layers, options, chunk_size, accumulate, asked


def _how(options: Divergence, **more: Any) -> ops.How:
    return ops.How("linear_divergence", options.with_numbers(), **more)


def _runs(layers: ops.Layers, options: Divergence) -> bool:
    return on_device(layers.x) and not refused(layers.x, layers.h, options)


def linear_divergence(*given):
    with torch._C.DisableTorchFunction():  # a mode of functions has seen the call
        layers, options, chunk_size, accumulate, _ = _split(given)
        if not _runs(layers, options):
            logits = ops.whole(*layers[:3])
            return referred(logits, layers.teachers, options, weight=layers.weight).to(torch.float32)
        linear = linear_of(layers.x, layers.w, chunk_size, accumulate, False)
        return ops.by_chunks(layers, _how(options, linear=linear))[0]


def fake_linear_divergence(input, *_):
    return input.new_empty(input.shape[:1], dtype=torch.float32)


def save_linear_divergence(ctx, inputs, output):
    layers, options, *ctx.how = _split(inputs)
    ctx.options = options.with_numbers()
    ctx.save_for_backward(*layers)
    ctx.set_materialize_grads(False)


def linear_divergence_gradient(ctx, ddivergence):
    found: list[Tensor | None] = [None] * _ASKED
    layers, (chunk_size, accumulate, _) = ops.Layers(*ctx.saved_tensors), ctx.how
    asked = [*ctx.needs_input_grad[:3], ctx.needs_input_grad[3] and layers.v is None]
    if ddivergence is not None and any(asked):
        if torch.is_grad_enabled():
            found = ops.differentiable(layers, None, _how(ctx.options, asked=asked), ddivergence)
        else:
            options = with_rows(ctx.options, ops.Pair(layers.x, layers.h, None, *layers[7:]))
            made = torch.ops.fused_softmax.linear_divergence_backward.default(
                ddivergence, *layers[:6], *options.traced(), layers.weight, options.label_smoothing, chunk_size,
                accumulate, asked,
            )  # fmt: skip
            found = [each if wants else None for each, wants in zip(made, asked, strict=True)]
    return *found, *[None] * (len(ctx.needs_input_grad) - _ASKED)


def linear_divergence_backward(ddivergence, *given):
    with torch._C.DisableTorchFunction():
        layers, options, chunk_size, accumulate, asked = _split(given)
        if _runs(layers, options):
            linear, left_out = linear_of(layers.x, layers.w, chunk_size, accumulate, asked[1]), ddivergence == 0
            how = _how(options, linear=linear, asked=asked)
            found = ops.gradients_of_rows(layers, how, left_out, ddivergence.contiguous())
        else:
            leaves: Any = [each if each is None else each.detach().requires_grad_() for each in layers[:_ASKED]]
            layers = ops.Layers(*leaves, *layers[_ASKED:])
            found = ops.differentiable(layers, ddivergence, _how(options, asked=asked), ddivergence)
        return tuple(layers.x.new_empty(0) if each is None else each for each in found)


def fake_linear_divergence_backward(ddivergence, *given):
    layers, *_, asked = _split(given)
    return tuple(
        of.new_empty(of.shape) if wants and of is not None else layers.x.new_empty(0)
        for of, wants in zip(layers, asked, strict=False)
    )


def flops_of_linear_divergence(*given, out_val, **__) -> int:
    """The logits of both layers; as torch counts products, two operations for each element of a factor."""
    return _products(given, 0)


def flops_of_linear_divergence_backward(ddivergence, *given, out_val, **__) -> int:
    """The logits, which are made again, and the gradients."""
    return _products(given, sum(each.numel() > 0 for each in out_val[:2]))


def _products(layers: tuple, made: int) -> int:
    x, w, _, _, v, *_ = layers
    return 2 * x.shape[0] * w.shape[0] * (w.shape[1] * (1 + made) + (0 if v is None else v.shape[1]))
