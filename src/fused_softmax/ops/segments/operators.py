"""The rules of functions of segments as registered operators: what runs, fakes, gradients.

order: for an index, its elements in the order of their segments. The last segment of the offsets then has the elements
that are in none.
"""

from functools import partial
from typing import Any

import torch

from fused_softmax.core.checks import arithmetic_in
from fused_softmax.core.route import on_device
from fused_softmax.ops.segments import gradients, launches, reference
from fused_softmax.ops.segments.launches import Cut

_HOW = "Tensor offsets, Tensor? order=None, int dim=0, float? scale=None"
FORWARD = f"(Tensor input, {_HOW}, ScalarType? dtype=None) -> Tensor"
BACKWARD = f"(Tensor dy, Tensor y, {_HOW}, ScalarType? dtype=None) -> Tensor"
_DEFAULTS: tuple[Any, ...] = None, 0, None, None  # the dispatcher leaves out last arguments that equal them
LSE_BACKWARD = f"(Tensor dlse, Tensor input, Tensor lse, {_HOW}) -> Tensor"


def forward(name, input, offsets, order=None, dim=0, scale=None, dtype=None):
    cut, result = Cut(offsets, order), dtype or input.dtype
    with torch._C.DisableTorchFunction():  # a mode of functions has seen the call
        if on_device(input) and not launches.refused(input, result):
            return launches.forward(name, input, cut, dim, scale, result)
        layout = gradients.layout_of(input.shape[dim], cut)
        return reference.of_layout(name, input, layout, cut.n_results, dim, scale, result, arithmetic_in(result))


def fake_forward(name, input, offsets, order=None, dim=0, scale=None, dtype=None):
    shape = list(input.shape)
    if name == "segment_logsumexp":
        shape[dim] = offsets.shape[0] - (1 if order is None else 2)
    return input.new_empty(shape, dtype=dtype)


def save(name, ctx, inputs, output):
    input, offsets, order, dim, scale, dtype = tuple(inputs) + _DEFAULTS[len(inputs) - 2 :]
    gradients.save(ctx, input, output, offsets, order, (name, dim, scale, dtype))


def gradient(ctx, dy):
    return gradients.gradient(ctx, dy), *[None] * (len(ctx.needs_input_grad) - 1)


def backward(name, dy, y, offsets, order=None, dim=0, scale=None, dtype=None):
    cut, dtype = Cut(offsets, order), dtype or y.dtype
    with torch._C.DisableTorchFunction():
        if on_device(y) and not launches.refused(y, dtype):
            return launches.backward(name, dy, y, cut, dim, scale, dtype)
        return gradients.composed(name, dy, y, None, cut, dim, scale).to(dtype).contiguous()


def lse_backward(dlse, input, lse, offsets, order=None, dim=0, scale=None):
    cut = Cut(offsets, order)
    with torch._C.DisableTorchFunction():
        if on_device(input) and not launches.refused(input, lse.dtype):
            return launches.lse_backward(dlse, input, lse, cut, dim, scale)
        dx = gradients.composed("segment_logsumexp", dlse, lse, input, cut, dim, scale)
        return dx.to(input.dtype).contiguous()


def fake_backward(dy, y, offsets, order=None, dim=0, scale=None, dtype=None):
    return y.new_empty(y.shape, dtype=dtype)


def fake_lse_backward(dlse, input, *_):
    return input.new_empty(input.shape)


def rules_of(name: str) -> dict[str, Any]:
    """Of a forward operator, for its row of the table."""
    return {
        "name": name, "schema": FORWARD, "run": partial(forward, name), "fake": partial(fake_forward, name),
        "save": partial(save, name), "gradient": gradient,
    }  # fmt: skip
