"""The rules of divergences of linear layers as a registered operator and its gradient: what runs, fakes, autograd.

The divergences of rows [n, in_features]; whatever reduces them follows. The gradient makes the logits again. Without a
target_weight, target_input are probabilities [n, n_classes], and by kind "cross" the result is their cross-entropy,
with weights of classes. lse is that of rows of kind "cross", and empty if not asked for.
"""

from typing import Any

import torch
from torch import Tensor

from fused_softmax.core.route import on_device
from fused_softmax.ops.losses import linear_pairs as ops
from fused_softmax.ops.losses.divergence_operators import OF_LOSS
from fused_softmax.ops.losses.divergence_rows import lse_of, pair_of, referred, refused, with_rows
from fused_softmax.ops.losses.linear_by_rows import linear_of
from fused_softmax.ops.losses.options import Divergence

_LAYERS = (
    "Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor target_input, Tensor? target_weight, "
    "Tensor? target_bias"
)
_HOW = f'{Divergence.schema()}, {OF_LOSS}, int? chunk_size=None, str accumulate="fp32"'
_N_OPTIONS = len(Divergence().traced())
LINEAR_DIVERGENCE = f"({_LAYERS}, {_HOW}, bool return_lse=False) -> (Tensor divergence, Tensor lse)"
BACKWARD = (
    f"(Tensor ddivergence, {_LAYERS}, {_HOW}, bool[] asked=[], Tensor? dlse=None) -> (Tensor input, "
    "Tensor linear_weight, Tensor linear_bias, Tensor target_input)"
)
_ASKED = 4


_DEFAULTS: tuple[Any, ...] = (None, 0.0, None, "fp32")


def _split(given: tuple) -> tuple[ops.Layers, Divergence, int | None, str, tuple]:
    """(layers, options, chunk_size, accumulate, what follows).

    The dispatcher leaves out last arguments that are defaults.
    """
    (x, w, bias, h, v, of_v), given = given[:6], given[6:]
    more = given[_N_OPTIONS:]
    weight, label_smoothing, chunk_size, accumulate, *rest = more + _DEFAULTS[len(more) :]
    options = Divergence.of_traced(given[:_N_OPTIONS], label_smoothing=label_smoothing)
    _, _, _, temperature, of_target = pair_of(x, h, options)
    weight = None if weight is None else weight.contiguous()  # hooks of saved tensors may return other strides
    layers = ops.Layers(x, w, bias, h, v, of_v, weight, temperature, of_target)
    return layers, options, chunk_size, accumulate, tuple(rest)


def _how(options: Divergence, **more: Any) -> ops.How:
    return ops.How("linear_divergence", options.with_numbers(), **more)


def _runs(layers: ops.Layers, options: Divergence) -> bool:
    return on_device(layers.x) and not refused(layers.x, layers.h, options)


def linear_divergence(*given):
    with torch._C.DisableTorchFunction():  # a mode of functions has seen the call
        layers, options, chunk_size, accumulate, more = _split(given)
        returns_lse, nothing = any(more), layers.x.new_empty(0, dtype=torch.float32)
        if not _runs(layers, options):
            logits = ops.whole(*layers[:3])
            found = referred(logits, layers.teachers, options, weight=layers.weight).to(torch.float32)
            return found, lse_of(logits, options).to(torch.float32) if returns_lse else nothing
        linear = linear_of(layers.x, layers.w, chunk_size, accumulate, False)
        found, lse, *_ = ops.by_chunks(layers, _how(options, linear=linear, lse=returns_lse))
        return found, nothing if lse is None else lse


def fake_linear_divergence(*given):
    input, *_, returns_lse = given[0], _split(given)[-1]
    sizes = input.shape[0], input.shape[0] if any(returns_lse) else 0
    return tuple(input.new_empty(size, dtype=torch.float32) for size in sizes)


def save_linear_divergence(ctx, inputs, output):
    layers, options, *ctx.how, returns_lse = _split(inputs)
    ctx.options = options.with_numbers()
    ctx.save_for_backward(*layers)
    ctx.set_materialize_grads(False)
    if not any(returns_lse):
        ctx.mark_non_differentiable(output[1])


def linear_divergence_gradient(ctx, ddivergence, dlse):
    found: list[Tensor | None] = [None] * _ASKED
    layers = ops.Layers(*ctx.saved_tensors)
    asked = [*ctx.needs_input_grad[:3], ctx.needs_input_grad[3] and layers.v is None]
    if any(asked) and not (ddivergence is None and dlse is None):
        if torch.is_grad_enabled():
            found = ops.differentiable(layers, None, _how(ctx.options, asked=asked), ddivergence, dlse)
        else:
            options = with_rows(ctx.options, ops.Pair(layers.x, layers.h, None, *layers[7:]))
            ddivergence = torch.zeros_like(dlse) if ddivergence is None else ddivergence
            made = torch.ops.fused_softmax.linear_divergence_backward.default(
                ddivergence, *layers[:6], *options.traced(), layers.weight, options.label_smoothing, *ctx.how, asked,
                *(() if dlse is None else (dlse,)),
            )  # fmt: skip
            found = [each if wants else None for each, wants in zip(made, asked, strict=True)]
    return *found, *[None] * (len(ctx.needs_input_grad) - _ASKED)


def linear_divergence_backward(ddivergence, *given):
    with torch._C.DisableTorchFunction():
        layers, options, chunk_size, accumulate, (asked, *beside) = _split(given)
        dlse = beside[0].contiguous() if beside and beside[0] is not None else None
        counts = ddivergence != 0 if dlse is None else (ddivergence != 0) | (dlse != 0)
        if _runs(layers, options):
            linear = linear_of(layers.x, layers.w, chunk_size, accumulate, asked[1])
            how = _how(options, linear=linear, asked=asked)
            found = ops.gradients_of_rows(layers, how, ~counts, ddivergence.contiguous(), dlse)
        else:
            leaves: Any = [each if each is None else each.detach().requires_grad_() for each in layers[:_ASKED]]
            layers = ops.Layers(*leaves, *layers[_ASKED:])
            found = ops.differentiable(layers, counts, _how(options, asked=asked), ddivergence, dlse)
        return tuple(layers.x.new_empty(0) if each is None else each for each in found)


def fake_linear_divergence_backward(ddivergence, *given):
    layers, *_, (asked, *_) = _split(given)
    return tuple(
        of.new_empty(of.shape) if wants and of is not None else layers.x.new_empty(0)
        for of, wants in zip(layers, asked, strict=False)
    )


def flops_of_linear_divergence(*given, out_val, **__) -> int:
    """The logits of both layers; as torch counts products, two operations for each multiplication."""
    return _products(given, 0)


def flops_of_linear_divergence_backward(ddivergence, *given, out_val, **__) -> int:
    """The logits, which are made again, and the gradients."""
    return _products(given, sum(each.numel() > 0 for each in out_val[:2]))


def _products(layers: tuple, made: int) -> int:
    x, w, _, _, v, *_ = layers
    return 2 * x.shape[0] * w.shape[0] * (w.shape[1] * (1 + made) + (0 if v is None else v.shape[1]))
