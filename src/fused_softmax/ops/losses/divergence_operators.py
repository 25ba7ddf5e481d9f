"""The rules of divergences as a registered operator and its gradient: what runs, fakes, autograd.

Of rows [n, n_classes] of a student and of a teacher. m_t and ls_t are empty where the teacher has no logits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fused_softmax.core.route import on_device
from fused_softmax.ops.losses import divergence_rows as ops
from fused_softmax.ops.losses.divergence_launches import Pair, PairRows, backward, in_vectors
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


def _split(given: Sequence) -> tuple[Divergence, list[Tensor | None]]:
    """(options whose temperatures are numbers, the temperatures of rows)."""
    options = Divergence.of_traced(given)
    of_rows = [
        each.to(torch.float32).contiguous() if isinstance(each, Tensor) else None
        for each in (options.temperature, options.target_temperature)
    ]
    return options.with_numbers(), of_rows


def _runs(input: Tensor, target: Tensor, options: Divergence) -> bool:
    return on_device(input) and not ops.refused(input, target, options)


def divergence(input, target, *given):
    with torch._C.DisableTorchFunction():  # a mode of functions has seen the call
        options, of_rows = _split(given)
        if not _runs(input, target, options):
            value = ops.referred(input, target, Divergence.of_traced(given)).to(torch.float32)
            rest = [torch.zeros_like(value) for _ in range(5)]
            return value, *rest
        rows = ops.run(input, target, None, *of_rows, options)[1]
        nothing = input.new_empty(0, dtype=torch.float32)
        of_teacher = [nothing.clone() if each is None else each for each in (rows.m_t, rows.ls_t)]
        return rows.value, rows.m, rows.ls, *of_teacher, rows.total


def fake_divergence(input, target, *given):
    options = Divergence.of_traced(given)
    n = input.shape[0]
    states = n if options.target_is == "logits" or not _runs(input, target, options) else 0
    return tuple(input.new_empty(size, dtype=torch.float32) for size in (n, n, n, states, states, n))


def save_divergence(ctx, inputs, output):
    input, target, *given = inputs
    options = Divergence.of_traced(given)
    of_rows = [each if isinstance(each, Tensor) else None for each in (options.temperature, options.target_temperature)]
    ctx.given = tuple(None if isinstance(each, Tensor) else each for each in given)
    ctx.save_for_backward(input, target, *of_rows, *output)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def divergence_gradient(ctx, ddivergence, *_):
    input, target, *saved = ctx.saved_tensors
    of_rows, rows = saved[:2], saved[2:]
    dx = None
    if ctx.needs_input_grad[0] and ddivergence is not None:
        options = ops.with_rows(Divergence.of_traced(ctx.given).with_numbers(), *of_rows)
        if torch.is_grad_enabled():
            dx, _ = ops.differentiable_gradient(input, target, None, *of_rows, options, ddivergence, rows[0])
        else:
            operator = torch.ops.fused_softmax.divergence_backward.default
            dx = operator(input, target, *rows, ddivergence, *options.traced())
    return (dx, *[None] * (len(ctx.needs_input_grad) - 1))


def divergence_backward(input, target, value, m, ls, m_t, ls_t, total, ddivergence, *given):
    with torch._C.DisableTorchFunction():
        options, of_rows = _split(given)
        if not _runs(input, target, options):
            gradients = ops.differentiable_gradient(input, target, None, *of_rows, options, ddivergence, value)
            return gradients[0]
        of_teacher = [None if options.target_is != "logits" else each for each in (m_t, ls_t)]
        pair = Pair(in_vectors(input, target), in_vectors(target, input), None, *of_rows)
        rows = PairRows(m, ls, *of_teacher, value, total)
        return backward(pair, rows, ddivergence, options)[0]


def fake_divergence_backward(input, *_):
    return torch.empty_like(input, memory_format=torch.contiguous_format)
