"""The rules of softmax, log_softmax and logsumexp as registered operators: what runs, fakes, gradients, vmap."""

from typing import Any

import torch
from torch import Tensor

from fused_softmax import reference
from fused_softmax.ops import logsumexp as lse_ops
from fused_softmax.ops import logsumexp_calls, softmax_calls
from fused_softmax.ops import softmax as softmax_ops
from fused_softmax.options import DTYPES, PLAIN, Scores, scores_of
from fused_softmax.register import one_dim
from fused_softmax.register.one_dim import in_front
from fused_softmax.route import on_device

SCORED = 'float? scale=None, Tensor? row_scale=None, Tensor? mask=None, bool is_causal=False, str masked_rows="nan"'
SOFTMAX = one_dim.forward_schema(SCORED)
LOGSUMEXP = f"(Tensor input, int[] dim, bool keepdim=False, {SCORED}) -> Tensor"
# scale: of scores that may be masked; an element that is -inf in y then was masked, and has no gradient.
BACKWARD = one_dim.backward_schema("float? scale=None")


# What runs.


def softmax(log, input, dim, dtype=None, scale=None, row_scale=None, mask=None, is_causal=False, masked_rows="nan"):
    name = "log_softmax" if log else "softmax"
    result_dtype = input.dtype if dtype is None else dtype
    scored = _scored(scale, row_scale, mask, is_causal, masked_rows)
    scores = scores_of(name, input, dim, **scored) if scored else PLAIN
    with torch._C.DisableTorchFunction():  # a mode of functions has seen the call
        if on_device(input) and result_dtype in DTYPES:
            return softmax_calls.forward(log, input, dim, result_dtype, None, scores)
        return getattr(reference, name)(input, dim, dtype=dtype, arithmetic=_arithmetic(result_dtype), **scored)


def logsumexp(input, dim, keepdim=False, scale=None, row_scale=None, mask=None, is_causal=False, masked_rows="nan"):
    dims = tuple(dim)
    scored = _scored(scale, row_scale, mask, is_causal, masked_rows)
    scores = scores_of("logsumexp", input, dims[0], **scored) if scored else PLAIN
    with torch._C.DisableTorchFunction():
        if on_device(input) and input.dtype in DTYPES and input.ndim and input.numel():
            return logsumexp_calls.forward(input, dims, keepdim, None, scores)
        single = dims[0] if len(dims) == 1 else dims
        return reference.logsumexp(input, single, keepdim, arithmetic=_arithmetic(input.dtype), **scored)


def softmax_backward(log, dy, y, dim, dtype=None, scale=None):
    hides, factor = scale is not None, 1.0 if scale is None else scale
    with torch._C.DisableTorchFunction():
        if on_device(y) and y.dtype in DTYPES:
            return softmax_calls.backward(dy, y, dim, dtype or y.dtype, log, hides, factor)
        dz = softmax_ops.differentiable_backward(dy, y, dim, log, hides)
        return (dz * factor).to(dtype or y.dtype)


def _scored(scale, row_scale, mask, is_causal, masked_rows) -> dict[str, Any]:
    """The keyword arguments of the public function, or nothing if all are as they are left out."""
    scale = scale if row_scale is None else row_scale
    scored = {"scale": scale, "mask": mask, "is_causal": is_causal, "masked_rows": masked_rows}
    return {} if scale is None and mask is None and not is_causal and masked_rows == "nan" else scored


def _arithmetic(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# What tracing is told instead.


def fake_logsumexp(input, dim, keepdim=False, *scored):
    return torch.logsumexp(input, dim, keepdim)


# Autograd. The dispatcher leaves out last arguments that equal their defaults, and asks for no gradient of theirs.


def save_softmax(log, ctx, inputs, output):
    input, dim, _, *scored = inputs
    softmax_ops.save_for_gradients(ctx, log, input, dim, output, Scores.of_operator(*scored))


def save_logsumexp(ctx, inputs, output):
    input, dim, _, *scored = inputs
    lse_ops.save_for_gradients(ctx, input, dim, output, Scores.of_operator(*scored))


def gradients_of(gradients, ctx, dy):
    asked = ctx.needs_input_grad
    for_input, for_scale, for_mask = (len(asked) > i and asked[i] for i in (0, 4, 5))
    dx, dmask, dscale = gradients(ctx, dy, for_input, for_mask, for_scale)
    return (dx, None, None, None, dscale, dmask, None, None)[: len(asked)]


def save_backward(ctx, inputs, output):
    dy, y, ctx.dim, _, ctx.scale = inputs
    ctx.save_for_backward(dy, y)


def softmax_second(ctx, g):
    """Of dx = y (dy - d), d = sum y dy."""
    dy, y = ctx.saved_tensors
    g = g.to(y.dtype) * (1.0 if ctx.scale is None else ctx.scale)
    c, d = (each.sum(ctx.dim, keepdim=True) for each in (y * g, y * dy))
    return (y * (g - c), g * (dy - d) - c * dy, None, None, None)[: len(ctx.needs_input_grad)]


def log_softmax_second(ctx, g):
    """Of dx = dy - exp(y) d, d = sum dy."""
    dy, y = ctx.saved_tensors
    g = g.to(y.dtype) if ctx.scale is None else (g.to(y.dtype) * ctx.scale).masked_fill(y == -float("inf"), 0.0)
    weighted = y.exp() * g
    d_dy, d_y = g - weighted.sum(ctx.dim, keepdim=True), -weighted * dy.sum(ctx.dim, keepdim=True)
    return (d_dy, d_y, None, None, None)[: len(ctx.needs_input_grad)]


# vmap: the batch is one more dim, in front.


def batched_softmax(operator, info, in_dims, input, dim, dtype=None, scale=None, row_scale=None, mask=None, *rest):
    ndim = max(1, input.ndim - (in_dims[0] is not None)) + 1
    row_scale, mask = _beside(ndim, (row_scale, mask), in_dims[4:6])
    return one_dim.batched(operator, info, in_dims, input, dim, dtype, scale, row_scale, mask, *rest)


def batched_logsumexp(operator, info, in_dims, input, dim, keepdim=False, scale=None, row_scale=None, mask=None, *rest):
    input = in_front(input, in_dims[0], info.batch_size)
    row_scale, mask = _beside(input.ndim, (row_scale, mask), in_dims[4:6])
    dim = [d % (input.ndim - 1) + 1 for d in dim]
    return operator(input, dim, keepdim, scale, row_scale, mask, *rest), 0


def _beside(ndim: int, tensors: tuple[Tensor | None, ...], in_dims: tuple[int | None, ...]) -> list[Tensor | None]:
    """Scale and mask with their batch, where they have one, in front, and ndim dims in all."""
    result = list(tensors)
    for i, (tensor, at) in enumerate(zip(tensors, in_dims, strict=False)):
        if tensor is not None and at is not None:
            tensor = tensor.movedim(at, 0)
            result[i] = tensor.reshape(tensor.shape[0], *[1] * (ndim - tensor.ndim), *tensor.shape[1:])
    return result
