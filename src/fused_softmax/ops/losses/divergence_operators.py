"""The rules of divergences as a registered operator and its gradient: what runs, fakes, autograd.

Of rows [n, n_classes] of a student and of a teacher. m_t and ls_t are empty where the teacher has no logits. Of kind
"cross", lse is m + ls, and its gradient comes back as that of ls.
"""

from typing import Any

import torch
from torch import Tensor

from fused_softmax.core.route import on_device
from fused_softmax.ops.losses import divergence_rows as ops
from fused_softmax.ops.losses.divergence_launches import OF_PAIR, Pair, PairRows
from fused_softmax.ops.losses.options import Divergence

_OPTIONS = Divergence.schema()
_N_OPTIONS = len(Divergence().traced())
OF_LOSS = "Tensor? weight=None, float label_smoothing=0.0"
DIVERGENCE = (
    f"(Tensor input, Tensor target, {_OPTIONS}, {OF_LOSS}) -> (Tensor divergence, Tensor m, Tensor ls, Tensor m_t, "
    "Tensor ls_t, Tensor total)"
)
BACKWARD = (
    "(Tensor input, Tensor target, Tensor divergence, Tensor m, Tensor ls, Tensor m_t, Tensor ls_t, Tensor total, "
    f"Tensor ddivergence, {_OPTIONS}, {OF_LOSS}, bool[] asked=[], Tensor? dls=None) -> "
    "(Tensor input, Tensor target)"
)
_DEFAULTS: tuple[Any, ...] = (None, 0.0, [], None)


def _split(given: tuple) -> tuple[Divergence, Tensor | None, list[bool], Tensor | None]:
    """(options, weights of classes, which gradients are wanted, dls).

    The dispatcher leaves out last arguments that are defaults.
    """
    more = given[_N_OPTIONS:]
    weight, label_smoothing, asked, dls = more + _DEFAULTS[len(more) :]
    options = Divergence.of_traced(given[:_N_OPTIONS], label_smoothing=label_smoothing)
    return options, weight, list(asked) or [True, False], dls


def _pair(input: Tensor, target: Tensor, options: Divergence, weight: Tensor | None) -> Pair:
    return ops.pair_of(input, target, options)._replace(weight=None if weight is None else weight.contiguous())


def _runs(input: Tensor, target: Tensor, options: Divergence) -> bool:
    return on_device(input) and not ops.refused(input, target, options)


def divergence(input, target, *given):
    with torch._C.DisableTorchFunction():  # a mode of functions has seen the call
        options, weight, *_ = _split(given)
        if not _runs(input, target, options):
            value = ops.referred(input, target, options, weight=weight).to(torch.float32)
            m, *rest = (torch.zeros_like(value) for _ in range(5))
            if options.kind == "cross":
                m = ops.lse_of(input, options).to(torch.float32)
            return value, m, *rest
        rows = ops.run(_pair(input, target, options, weight), options.with_numbers())[1]
        of_teacher = rows.m_t, rows.ls_t
        m_t, ls_t = (input.new_empty(0, dtype=torch.float32) if each is None else each for each in of_teacher)
        return rows.value, rows.m, rows.ls, m_t, ls_t, rows.total


def fake_divergence(input, target, *given):
    options, *_ = _split(given)
    n = input.shape[0]
    states = n if options.target_is == "logits" or not _runs(input, target, options) else 0
    return tuple(input.new_empty(size, dtype=torch.float32) for size in (n, n, n, states, states, n))


def save_divergence(ctx, inputs, output):
    input, target, *given = inputs
    options, weight, *_ = _split(tuple(given))
    ctx.options = options.with_numbers()
    ctx.save_for_backward(*_pair(input, target, options, weight), *output)
    ctx.mark_non_differentiable(*(each for i, each in enumerate(output[1:]) if i != 1 or options.kind != "cross"))
    ctx.set_materialize_grads(False)


def divergence_gradient(ctx, ddivergence, dm, dls, *_):
    saved = ctx.saved_tensors
    pair, (value, *states) = Pair(*saved[:OF_PAIR]), saved[OF_PAIR:]
    found: list[Tensor | None] = [None, None]
    asked = list(ctx.needs_input_grad[:2])
    if any(asked) and not (ddivergence is None and dls is None):
        ddivergence = torch.zeros_like(value) if ddivergence is None else ddivergence
        if torch.is_grad_enabled():
            found = list(ops.differentiable_gradient(pair, ctx.options, ddivergence, value, asked, dls))
        else:
            options = ops.with_rows(ctx.options, pair)
            made = torch.ops.fused_softmax.divergence_backward.default(
                pair.x, pair.y, value, *states, ddivergence, *options.traced(), pair.weight, options.label_smoothing,
                asked, *(() if dls is None else (dls,)),
            )  # fmt: skip
            found = [each if wants else None for each, wants in zip(made, asked, strict=True)]
    return (*found, *[None] * (len(ctx.needs_input_grad) - 2))


def divergence_backward(input, target, value, m, ls, m_t, ls_t, total, ddivergence, *given):
    with torch._C.DisableTorchFunction():
        options, weight, asked, dls = _split(given)
        pair, alike = _pair(input, target, options, weight), options.with_numbers()
        if _runs(input, target, options):
            m_t, ls_t = (m_t, ls_t) if options.target_is == "logits" else (None, None)
            # Hooks of saved tensors may return other strides.
            states = m, ls, m_t, ls_t, total
            m, ls, m_t, ls_t, total = (each if each is None else each.contiguous() for each in states)
            rows = PairRows(m, ls, m_t, ls_t, value, total)
            found: Any = ops.gradients(pair, rows, ddivergence, alike, asked[1], dlse=dls)
        else:
            found = ops.differentiable_gradient(pair, alike, ddivergence, value, asked, dls)
        return tuple(
            input.new_empty(0) if each is None or not wants else each for each, wants in zip(found, asked, strict=True)
        )


def fake_divergence_backward(input, target, *given):
    _, _, asked, _ = _split(given[7:])
    return tuple(
        torch.empty_like(each, memory_format=torch.contiguous_format) if wants else input.new_empty(0)
        for each, wants in zip((input, target), asked, strict=True)
    )
