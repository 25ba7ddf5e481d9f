"""The rules of softmax, log_softmax and logsumexp as registered operators: what runs, fakes, gradients, vmap."""

from typing import Any

import torch
from torch import Tensor

from fused_softmax.core import one_dim
from fused_softmax.core.checks import DTYPES, arithmetic_in
from fused_softmax.core.one_dim import in_front
from fused_softmax.core.route import on_device
from fused_softmax.ops.softmax import calls as softmax_calls
from fused_softmax.ops.softmax import logsumexp as lse_ops
from fused_softmax.ops.softmax import reference
from fused_softmax.ops.softmax.gradients import differentiable_backward, save_for_gradients
from fused_softmax.ops.softmax.scores import Scores, scores_of

SCORED = Scores.schema()
_LAST = Scores.schema(["batch_invariant"])
SOFTMAX = one_dim.forward_schema(SCORED, _LAST)
# dtype: of the result, to which the input is rounded as it is read.
LOGSUMEXP = f"(Tensor input, int[] dim, bool keepdim=False, {SCORED}, ScalarType? dtype=None, {_LAST}) -> Tensor"
_N_SCORED = len(Scores().traced())
_PLACES = 5, 4, 9  # of mask, row_scale and row_sink among the arguments of each of the three
# scale: of scores that may be masked; an element that is -inf in y then was masked, and has no gradient.
BACKWARD = one_dim.backward_schema("float? scale=None", _LAST)


# What runs.


def softmax(log, input, dim, dtype=None, *rest):
    name = "log_softmax" if log else "softmax"
    result_dtype = input.dtype if dtype is None else dtype
    given, _ = _split(rest, 0)
    scores = scores_of(name, input, dim, **given.options())
    with torch._C.DisableTorchFunction():  # a mode of functions has seen the call
        if on_device(input) and result_dtype in DTYPES:
            of = softmax_calls.LOG_SOFTMAX if log else softmax_calls.SOFTMAX
            return softmax_calls.forward(of, input, (dim,), result_dtype, None, scores)
        composed, arithmetic = getattr(reference, name), arithmetic_in(result_dtype)
        return composed(input, dim, dtype=dtype, arithmetic=arithmetic, **given.formula())


def logsumexp(input, dim, keepdim=False, *rest):
    dims, (given, (dtype,)) = tuple(dim), _split(rest, 1)
    result_dtype = input.dtype if dtype is None else dtype
    scores = scores_of("logsumexp", input, dims[0] if dims else 0, **given.options())
    with torch._C.DisableTorchFunction():
        if on_device(input) and {input.dtype, result_dtype} <= {*DTYPES} and input.ndim and input.numel():
            return softmax_calls.forward(softmax_calls.LOGSUMEXP, input, dims, result_dtype, None, scores, keepdim)
        single, arithmetic = dims[0] if len(dims) == 1 else dims, arithmetic_in(result_dtype)
        return reference.logsumexp(input, single, keepdim, dtype=dtype, arithmetic=arithmetic, **given.formula())


def softmax_backward(log, dy, y, dim, dtype=None, scale=None, batch_invariant=False):
    hides, factor = scale is not None, 1.0 if scale is None else scale
    with torch._C.DisableTorchFunction():
        if on_device(y) and y.dtype in DTYPES:
            return softmax_calls.backward(dy, y, dim, dtype or y.dtype, log, hides, factor, batch_invariant)
        dz = differentiable_backward(dy, y, dim, log, hides)
        return (dz * factor).to(dtype or y.dtype)


def _split(rest: tuple, between: int) -> tuple[Scores, tuple]:
    """(an operator's scores, as many arguments behind them), of those that were not left out; None for one that was."""
    last = _N_SCORED + between
    scores = Scores.of_traced(rest[:_N_SCORED], batch_invariant=len(rest) > last and rest[last])
    return scores, (*rest[_N_SCORED:last], *(None,) * (last - len(rest)))[:between]


# What tracing is told instead.


def fake_logsumexp(input, dim, keepdim=False, *rest):
    return torch.logsumexp(input, dim, keepdim).to(_split(rest, 1)[1][0] or input.dtype)


# Autograd. The dispatcher leaves out last arguments that equal their defaults, and asks for no gradient of theirs.


def save_softmax(log, ctx, inputs, output):
    input, dim, _, *rest = inputs
    save_for_gradients(ctx, log, input, dim, output, _split(tuple(rest), 0)[0])


def save_logsumexp(ctx, inputs, output):
    input, dim, _, *rest = inputs
    lse_ops.save_for_gradients(ctx, input, dim, output, _split(tuple(rest), 1)[0])


def gradients_of(gradients, ctx, dy):
    asked = ctx.needs_input_grad
    places = (0, *_PLACES)
    of_places = [len(asked) > i and asked[i] for i in places]
    found = gradients(ctx, dy, *of_places)
    result: list[Tensor | None] = [None] * len(asked)
    for i, each in zip(places, found, strict=True):
        if i < len(asked):
            result[i] = each
    return tuple(result)


def save_backward(ctx, inputs, output):
    dy, y, ctx.dim, _, ctx.scale, *_ = inputs
    ctx.save_for_backward(dy, y)


def softmax_second(ctx, g):
    """Of dx = y (dy - d), d = sum y dy."""
    dy, y = ctx.saved_tensors
    g = g.to(y.dtype) * (1.0 if ctx.scale is None else ctx.scale)
    c, d = (each.sum(ctx.dim, keepdim=True) for each in (y * g, y * dy))
    return (y * (g - c), g * (dy - d) - c * dy, *(None,) * 4)[: len(ctx.needs_input_grad)]


def log_softmax_second(ctx, g):
    """Of dx = dy - exp(y) d, d = sum dy."""
    dy, y = ctx.saved_tensors
    g = g.to(y.dtype) if ctx.scale is None else (g.to(y.dtype) * ctx.scale).masked_fill(y == -float("inf"), 0.0)
    weighted = y.exp() * g
    d_dy, d_y = g - weighted.sum(ctx.dim, keepdim=True), -weighted * dy.sum(ctx.dim, keepdim=True)
    return (d_dy, d_y, *(None,) * 4)[: len(ctx.needs_input_grad)]


# vmap: the batch is one more dim, in front.


def batched_softmax(operator, info, in_dims, input, dim, *rest):
    ndim = max(1, input.ndim - (in_dims[0] is not None)) + 1
    return one_dim.batched(operator, info, in_dims, input, dim, *_beside(ndim, rest, in_dims))


def batched_logsumexp(operator, info, in_dims, input, dim, *rest):
    input = in_front(input, in_dims[0], info.batch_size)
    dim = [d % (input.ndim - 1) + 1 for d in dim]
    return operator(input, dim, *_beside(input.ndim, rest, in_dims)), 0


def _beside(ndim: int, rest: tuple, in_dims: tuple[int | None, ...]) -> list[Any]:
    """The arguments after dim: mask, scale and sink with their batch, where they have one, in front, and ndim dims."""
    result = list(rest)
    for place in _PLACES:
        i = place - 2
        if place < len(in_dims) and in_dims[place] is not None and i < len(rest):
            tensor = rest[i].movedim(in_dims[place], 0)
            result[i] = tensor.reshape(tensor.shape[0], *[1] * (ndim - tensor.ndim), *tensor.shape[1:])
    return result
