"""The rules of divergences as a registered operator and its gradient: what runs, fakes, autograd.

Of rows [n, n_classes] of a student and of a teacher. m_t and ls_t are empty where the teacher has no logits.
"""

import torch
from torch import Tensor

from fused_softmax.core.route import on_device
from fused_softmax.ops.losses import divergence_rows as ops
from fused_softmax.ops.losses.divergence_launches import OF_PAIR, Pair, PairRows
from fused_softmax.ops.losses.options import Divergence

_OPTIONS = Divergence.schema()
DIVERGENCE = (
    f"(Tensor input, Tensor target, {_OPTIONS}) -> (Tensor divergence, Tensor m, Tensor ls, Tensor m_t, Tensor ls_t, "
    "Tensor total)"
)
BACKWARD = (
    "(Tensor input, Tensor target, Tensor divergence, Tensor m, Tensor ls, Tensor m_t, Tensor ls_t, Tensor total, "
    f"Tensor ddivergence, {_OPTIONS}) -> Tensor"
)


def _runs(input: Tensor, target: Tensor, options: Divergence) -> bool:
    return on_device(input) and not ops.refused(input, target, options)


def divergence(input, target, *given):
    with torch._C.DisableTorchFunction():  # a mode of functions has seen the call
        options = Divergence.of_traced(given)
        if not _runs(input, target, options):
            value = ops.referred(input, target, options).to(torch.float32)
            rest = [torch.zeros_like(value) for _ in range(5)]
            return value, *rest
        rows = ops.run(ops.pair_of(input, target, options), options.with_numbers())[1]
        of_teacher = rows.m_t, rows.ls_t
        m_t, ls_t = (input.new_empty(0, dtype=torch.float32) if each is None else each for each in of_teacher)
        return rows.value, rows.m, rows.ls, m_t, ls_t, rows.total


def fake_divergence(input, target, *given):
    options = Divergence.of_traced(given)
    n = input.shape[0]
    states = n if options.target_is == "logits" or not _runs(input, target, options) else 0
    return tuple(input.new_empty(size, dtype=torch.float32) for size in (n, n, n, states, states, n))


def save_divergence(ctx, inputs, output):
    input, target, *given = inputs
    options = Divergence.of_traced(given)
    ctx.options = options.with_numbers()
    ctx.save_for_backward(*ops.pair_of(input, target, options), *output)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def divergence_gradient(ctx, ddivergence, *_):
    saved = ctx.saved_tensors
    pair, (value, *states) = Pair(*saved[:OF_PAIR]), saved[OF_PAIR:]
    dx: Tensor | None = None
    if ctx.needs_input_grad[0] and ddivergence is not None:
        if torch.is_grad_enabled():
            dx = ops.differentiable_gradient(pair, ctx.options, ddivergence, value)[0]
        else:
            operator = torch.ops.fused_softmax.divergence_backward.default
            options = ops.with_rows(ctx.options, pair)
            dx = operator(pair.x, pair.y, value, *states, ddivergence, *options.traced())
    return (dx, *[None] * (len(ctx.needs_input_grad) - 1))


def divergence_backward(input, target, value, m, ls, m_t, ls_t, total, ddivergence, *given):
    with torch._C.DisableTorchFunction():
        options = Divergence.of_traced(given)
        pair, alike = ops.pair_of(input, target, options), options.with_numbers()
        if not _runs(input, target, options):
            return ops.differentiable_gradient(pair, alike, ddivergence, value)[0]
        m_t, ls_t = (m_t, ls_t) if options.target_is == "logits" else (None, None)
        return ops.gradients(pair, PairRows(m, ls, m_t, ls_t, value, total), ddivergence, alike)[0]


def fake_divergence_backward(input, *_):
    return torch.empty_like(input, memory_format=torch.contiguous_format)
