"""The rules of log-probabilities of linear layers as a registered operator and its gradient.

Of rows [n, in_features] and targets [n, k], with the results of `log_prob_operators`. The logits exist a chunk at a
time, and the gradient makes them again.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fused_softmax.core.route import on_device
from fused_softmax.ops.losses import linear_log_prob as ops
from fused_softmax.ops.losses import log_prob as of_logits
from fused_softmax.ops.losses import log_prob_operators as log_prob_rules
from fused_softmax.ops.losses.linear_by_rows import linear_of, whole_logits
from fused_softmax.ops.losses.log_prob_launches import Asked, Gradients
from fused_softmax.ops.losses.options import Kept, LogProb

_LAYER = "Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor target"
_CHUNKS = 'int? chunk_size=None, str accumulate="fp32"'
LINEAR_LOG_PROB = f"({_LAYER}, {log_prob_rules.GIVEN}, {_CHUNKS}) -> {log_prob_rules.RESULTS}"
BACKWARD = (
    f"({_LAYER}, {log_prob_rules.STATES}, {log_prob_rules.GIVEN}, {_CHUNKS}, bool[] gradients=[]) -> "
    "(Tensor input, Tensor linear_weight, Tensor linear_bias)"
)
_DEFAULTS: tuple[Any, ...] = (None, "fp32", [])


def _split(given: Sequence) -> tuple[LogProb, Asked, Kept, int | None, str, list[bool]]:
    """The dispatcher leaves out last arguments that are defaults."""
    of_logits, more = given[: log_prob_rules.N_GIVEN], given[log_prob_rules.N_GIVEN :]
    chunk_size, accumulate, gradients = (*more, *_DEFAULTS[len(more) :])
    return *log_prob_rules.split(of_logits), chunk_size, accumulate, list(gradients)


def _runs(x: Tensor, target: Tensor, options: LogProb) -> bool:
    return on_device(x) and not of_logits.refused(x, target, options)


def linear_log_prob(x, w, bias, target, *given):
    with torch._C.DisableTorchFunction():  # a mode of functions has seen the call
        options, asked, kept, chunk_size, accumulate, _ = _split(given)
        if not _runs(x, target, options):
            ignore_index = options.ignore_index
            logits = whole_logits(x, w, bias, ops.target_of_rows(target, ignore_index), ignore_index)
            return log_prob_rules.log_prob(logits, target, *given[: log_prob_rules.N_GIVEN])
        options, temperature = of_logits.split(options, x)
        how = ops.How(options, linear_of(x, w, chunk_size, accumulate, False), asked, keeps=False)
        found, _ = ops.forward_of_layer(x, w, bias, target.contiguous(), temperature, kept, how)
        return log_prob_rules.results_of(found, x)


def save_linear_log_prob(ctx, inputs, output):
    *layer, target = inputs[:4]
    _, m, ls, entropy, _, *stats = output
    options, ctx.asked, kept, *ctx.chunks = _split(inputs[4:])
    temperature = options.temperature if isinstance(options.temperature, Tensor) else None
    ctx.options = options.with_number()
    ctx.save_for_backward(*layer, target, m, ls, entropy, temperature, *kept[:3])
    ctx.mark_non_differentiable(m, ls, *stats)
    ctx.set_materialize_grads(False)


def linear_log_prob_gradient(ctx, dlog_prob, dm, dls, dentropy, dlse, *_):
    x, w, bias, target, m, ls, entropy, temperature, *kept = ctx.saved_tensors
    incoming = Gradients(dlog_prob, dentropy if ctx.asked.entropy else None, dlse if ctx.asked.lse else None)
    asked, found = list(ctx.needs_input_grad[:3]), [None, None, None]
    if any(asked) and any(each is not None for each in incoming):
        if torch.is_grad_enabled():
            found = ops.differentiable(x, w, bias, target, temperature, Kept(*kept), ctx.options, asked, incoming)
        else:
            options = ctx.options if temperature is None else replace(ctx.options, temperature=temperature)
            chunk_size, accumulate, _ = ctx.chunks
            made = torch.ops.fused_softmax.linear_log_prob_backward.default(
                x, w, bias, target, m, ls, entropy, *incoming, *options.traced(), ctx.asked[:-1], *kept, chunk_size,
                accumulate, asked,
            )  # fmt: skip
            found = [each if wants else None for each, wants in zip(made, asked, strict=True)]
    return *found, *[None] * (len(ctx.needs_input_grad) - 3)


def linear_log_prob_backward(x, w, bias, target, m, ls, entropy, dlog_prob, dentropy, dlse, *given):
    with torch._C.DisableTorchFunction():
        options, _, kept, chunk_size, accumulate, asked = _split(given)
        incoming, runs = Gradients(dlog_prob, dentropy, dlse), _runs(x, target, options)
        options, temperature = of_logits.split(options, x)
        if runs:
            linear = linear_of(x, w, chunk_size, accumulate, asked[1])
            states = m.contiguous(), ls.contiguous(), None if dentropy is None else entropy.contiguous()
            way = ops.way_of(x, w, linear, asked, False, kept, False, chunk_size)
            if way.classes is not None:
                linear = linear_of(x, w, chunk_size, accumulate, False)
            how = ops.How(options, linear, Asked(), keeps=False, classes=way.classes)
            found = ops.backward_of_layer(
                x, w, bias, target.contiguous(), temperature, kept, states, how, asked, incoming, None
            )
        else:
            x, w, bias = (each if each is None else each.detach().requires_grad_() for each in (x, w, bias))
            found = ops.differentiable(x, w, bias, target, temperature, kept, options, asked, incoming)
        return tuple(x.new_empty(0) if each is None else each for each in found)


def fake_linear_log_prob(x, w, bias, target, *given):
    return log_prob_rules.fake_log_prob(x, target, *given[: log_prob_rules.N_GIVEN])


def fake_linear_log_prob_backward(x, w, bias, target, m, ls, entropy, dlog_prob, dentropy, dlse, *given):
    *_, asked = _split(given)
    return tuple(
        of.new_empty(of.shape) if wants and of is not None else x.new_empty(0)
        for of, wants in zip((x, w, bias), asked, strict=True)
    )


def flops_of_linear_log_prob(x, w, *_, **__) -> int:
    """The logits; as torch counts products, two operations for each multiplication."""
    return _product(x, w)


def flops_of_linear_log_prob_backward(x, w, *_, out_val, **__) -> int:
    """The logits, which are made again, and the gradients."""
    return _product(x, w) * (1 + sum(each.numel() > 0 for each in out_val[:2]))


def _product(x, w) -> int:
    return 2 * x.shape[0] * w.shape[0] * w.shape[1]
