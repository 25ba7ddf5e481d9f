"""The rules of divergences of linear layers as a registered operator and its gradient: what runs, fakes, autograd.

The divergences of rows [n, in_features]; whatever reduces them follows. The gradient makes the logits again.
"""

from typing import Any

import torch
from torch import Tensor

from fused_softmax.core.route import on_device
from fused_softmax.ops.losses import linear_divergence as ops
from fused_softmax.ops.losses.divergence_rows import pair_of, referred, refused
from fused_softmax.ops.losses.linear_by_rows import linear_of
from fused_softmax.ops.losses.options import Divergence

_LAYERS = (
    "Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor target_input, Tensor target_weight, "
    "Tensor? target_bias"
)
_HOW = f'{Divergence.schema()}, int? chunk_size=None, str accumulate="fp32"'
_N_OPTIONS = len(Divergence().traced())
LINEAR_DIVERGENCE = f"({_LAYERS}, {_HOW}) -> Tensor"
BACKWARD = (
    f"(Tensor ddivergence, Tensor divergence, {_LAYERS}, {_HOW}, bool[] asked=[]) -> (Tensor input, "
    "Tensor linear_weight, Tensor linear_bias)"
)


def _split(given: tuple) -> tuple[Divergence, int | None, str, list[bool]]:
    """The dispatcher leaves out last arguments that are defaults."""
    more = given[_N_OPTIONS:]
    defaults: tuple[Any, ...] = None, "fp32", []
    chunk_size, accumulate, asked = more + defaults[len(more) :]
    return Divergence.of_traced(given[:_N_OPTIONS]), chunk_size, accumulate, asked


def _layers_of(tensors: tuple, options: Divergence) -> ops.Layers:
    of_layers: list[Any] = [each if each is None else each.contiguous() for each in tensors]
    x, w, bias, h, v, of_v = of_layers
    _, _, _, temperature, of_target = pair_of(x, h, options)
    return ops.Layers(x, w, bias, h, v, of_v, temperature, of_target)


def _runs(x: Tensor, h: Tensor, options: Divergence) -> bool:
    return on_device(x) and not refused(x, h, options)


def linear_divergence(*given):
    with torch._C.DisableTorchFunction():  # a mode of functions has seen the call
        options, chunk_size, accumulate, _ = _split(given[6:])
        layers = _layers_of(given[:6], options)
        if not _runs(layers.x, layers.h, options):
            return referred(ops.whole(*layers[:3]), ops.whole(*layers[3:6]), options).to(torch.float32)
        linear = linear_of(layers.x, layers.w, chunk_size, accumulate, False)
        return ops.values_of(layers, ops.How(options.with_numbers(), linear, False))


def fake_linear_divergence(input, *_):
    return input.new_empty(input.shape[:1], dtype=torch.float32)


def save_linear_divergence(ctx, inputs, output):
    options, *ctx.how = _split(inputs[6:])
    ctx.options = options.with_numbers()
    ctx.save_for_backward(*inputs[:6], output, *pair_of(inputs[0], inputs[3], options)[3:])
    ctx.set_materialize_grads(False)


def linear_divergence_gradient(ctx, ddivergence):
    found: list[Tensor | None] = [None] * 3
    asked = list(ctx.needs_input_grad[:3])
    if ddivergence is not None and any(asked):
        saved, (chunk_size, accumulate, _) = ctx.saved_tensors, ctx.how
        tensors, value = saved[:6], saved[6]
        layers = ops.Layers(*tensors, *saved[7:])
        if torch.is_grad_enabled():
            how = ops.How(ctx.options, None, False)
            found = ops.differentiable(layers, torch.ones_like(value), how, asked, ddivergence, value)
        else:
            options = ops.with_temperatures(ctx.options, layers).traced()
            operator = torch.ops.fused_softmax.linear_divergence_backward.default
            made = operator(ddivergence, value, *tensors, *options, chunk_size, accumulate, asked)
            found = [each if wants else None for each, wants in zip(made, asked, strict=True)]
    return *found, *[None] * (len(ctx.needs_input_grad) - 3)


def linear_divergence_backward(ddivergence, value, *given):
    with torch._C.DisableTorchFunction():
        options, chunk_size, accumulate, asked = _split(given[6:])
        layers, left_out = _layers_of(given[:6], options), ddivergence == 0
        if _runs(layers.x, layers.h, options):
            linear = linear_of(layers.x, layers.w, chunk_size, accumulate, asked[1])
            how = ops.How(options.with_numbers(), linear, False)
            found = ops.gradients_of_rows(layers, left_out, how, asked, ddivergence.contiguous())
        else:
            x, w, bias = (each if each is None else each.detach().requires_grad_() for each in layers[:3])
            layers = layers._replace(x=x, w=w, bias=bias)  # type: ignore[arg-type]
            how, counts = ops.How(options.with_numbers(), None, False), (~left_out).to(torch.float32)
            found = ops.differentiable(layers, counts, how, asked, ddivergence, value)
        return tuple(layers.x.new_empty(0) if each is None else each for each in found)


def fake_linear_divergence_backward(ddivergence, value, *given):
    asked = _split(given[6:])[3]
    return tuple(
        of.new_empty(of.shape) if wants and of is not None else given[0].new_empty(0)
        for of, wants in zip(given[:3], asked, strict=True)
    )


def flops_of_linear_divergence(x, w, bias, h, v, *_, out_val, **__) -> int:
    """The logits of both layers; as torch counts products, two operations for each element of a factor."""
    return 2 * x.shape[0] * w.shape[0] * (w.shape[1] + v.shape[1])


def flops_of_linear_divergence_backward(ddivergence, value, x, w, bias, h, v, *_, out_val, **__) -> int:
    """The logits, which are made again, and the gradients."""
    made = sum(each.numel() > 0 for each in out_val[:2])
    return 2 * x.shape[0] * w.shape[0] * (w.shape[1] * (1 + made) + v.shape[1])
