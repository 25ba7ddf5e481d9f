"""The operators as PyTorch's own: what tracing sees of a call, in the namespace torch.ops.fused_softmax.

softmax, log_softmax and logsumexp, and the gradients of the first two. An eager call never comes here; one that a
compiler, export, vmap or a mode watches (`arguments.traced`) is one node, which runs the same kernels when its turn
comes. On devices without kernels, where an exported program may land, it is composed of torch's operations.
Each has a fake for shapes, autograd by the eager functions' own rules, and a rule for vmap. torch.library has no place
for rules of functorch's grad and jvp: `traced` leaves those calls to torch.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fused_softmax import reference
from fused_softmax.ops import logsumexp as lse_ops
from fused_softmax.ops import softmax as softmax_ops
from fused_softmax.ops.arguments import DTYPES, on_device
from fused_softmax.ops.scores import PLAIN, Scores, check_scores

_SCORED = 'float? scale=None, Tensor? row_scale=None, Tensor? mask=None, bool is_causal=False, str masked_rows="nan"'
_SOFTMAX = f"(Tensor input, int dim, ScalarType? dtype=None, {_SCORED}) -> Tensor"
_LOGSUMEXP = f"(Tensor input, int[] dim, bool keepdim=False, {_SCORED}) -> Tensor"
# scale: that of scores of which some may be hidden; what is -inf in y then is, and has no gradient.
_BACKWARD = "(Tensor dy, Tensor y, int dim, ScalarType? dtype=None, float? scale=None) -> Tensor"


# What runs.


def _softmax(log, input, dim, dtype=None, scale=None, row_scale=None, mask=None, is_causal=False, masked_rows="nan"):
    name = "log_softmax" if log else "softmax"
    result_dtype = input.dtype if dtype is None else dtype
    scored = _scored(scale, row_scale, mask, is_causal, masked_rows)
    scores = check_scores(name, input, dim, **scored) if scored else PLAIN
    with torch._C.DisableTorchFunction():  # a mode of functions has seen the call
        if on_device(input) and result_dtype in DTYPES:
            return softmax_ops._forward(log, input, dim, result_dtype, None, scores)
        return getattr(reference, name)(input, dim, dtype=dtype, arithmetic=_arithmetic(result_dtype), **scored)


def _logsumexp(input, dim, keepdim=False, scale=None, row_scale=None, mask=None, is_causal=False, masked_rows="nan"):
    dim = dim[0] if len(dim) == 1 else tuple(dim)
    scored = _scored(scale, row_scale, mask, is_causal, masked_rows)
    scores = check_scores("logsumexp", input, dim, **scored) if scored else PLAIN
    with torch._C.DisableTorchFunction():
        if on_device(input) and input.dtype in DTYPES and input.ndim and input.numel():
            return lse_ops._forward(input, dim, keepdim, None, scores)
        return reference.logsumexp(input, dim, keepdim, arithmetic=_arithmetic(input.dtype), **scored)


def _softmax_backward(log, dy, y, dim, dtype=None, scale=None):
    scores, factor = (PLAIN, 1.0) if scale is None else (Scores(scale, masked_rows="zero"), scale)
    with torch._C.DisableTorchFunction():
        if on_device(y) and y.dtype in DTYPES:
            dx = torch.empty(y.shape, dtype=dtype or y.dtype, device=y.device)
            return softmax_ops._backward(dy, y, dx, dim, log, scores, factor)
        dz = softmax_ops._differentiable_backward(dy, y, dim, log, scores)
        return (dz * factor).to(dtype or y.dtype)


def _scored(scale, row_scale, mask, is_causal, masked_rows) -> dict[str, Any]:
    """The keyword arguments of the public function, or nothing if all are as they are left out."""
    scale = scale if row_scale is None else row_scale
    scored = {"scale": scale, "mask": mask, "is_causal": is_causal, "masked_rows": masked_rows}
    return {} if scale is None and mask is None and not is_causal and masked_rows == "nan" else scored


def _arithmetic(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# What tracing is told instead.


def _fake_softmax(input, dim, dtype=None, *scored):
    return input.new_empty(input.shape, dtype=dtype)


def _fake_logsumexp(input, dim, keepdim=False, *scored):
    return torch.logsumexp(input, dim, keepdim)


def _fake_backward(dy, y, dim, dtype=None, scale=None):
    return y.new_empty(y.shape, dtype=dtype)


# Autograd. The dispatcher leaves out last arguments that equal their defaults, and asks for no gradient of theirs.


def _save_softmax(log, ctx, inputs, output):
    input, dim, _, *scored = inputs
    softmax_ops.save_for_gradients(ctx, log, input, dim, output, Scores.of_arguments(*scored))


def _save_logsumexp(ctx, inputs, output):
    input, dim, _, *scored = inputs
    lse_ops.save_for_gradients(ctx, input, dim, output, Scores.of_arguments(*scored))


def _gradients(gradients, ctx, dy):
    asked = ctx.needs_input_grad
    for_input, for_scale, for_mask = (len(asked) > i and asked[i] for i in (0, 4, 5))
    dx, dmask, dscale = gradients(ctx, dy, for_input, for_mask, for_scale)
    return (dx, None, None, None, dscale, dmask, None, None)[: len(asked)]


def _save_backward(ctx, inputs, output):
    dy, y, ctx.dim, _, ctx.scale = inputs
    ctx.save_for_backward(dy, y)


def _softmax_second(ctx, g):
    """Of dx = y (dy - d), d = sum y dy."""
    dy, y = ctx.saved_tensors
    g = g.to(y.dtype) * (1.0 if ctx.scale is None else ctx.scale)
    c, d = (each.sum(ctx.dim, keepdim=True) for each in (y * g, y * dy))
    return (y * (g - c), g * (dy - d) - c * dy, None, None, None)[: len(ctx.needs_input_grad)]


def _log_softmax_second(ctx, g):
    """Of dx = dy - exp(y) d, d = sum dy."""
    dy, y = ctx.saved_tensors
    g = g.to(y.dtype) if ctx.scale is None else (g.to(y.dtype) * ctx.scale).masked_fill(y == -float("inf"), 0.0)
    weighted = y.exp() * g
    d_dy, d_y = g - weighted.sum(ctx.dim, keepdim=True), -weighted * dy.sum(ctx.dim, keepdim=True)
    return (d_dy, d_y, None, None, None)[: len(ctx.needs_input_grad)]


# vmap: the batch is one more dim, in front.


def _batched_softmax(operator, info, in_dims, input, dim, dtype=None, scale=None, row_scale=None, mask=None, *rest):
    scalar = input.ndim == (in_dims[0] is not None)
    input = _in_front(input, in_dims[0], info.batch_size)
    if scalar:
        input, dim = input.unsqueeze(-1), 0
    row_scale, mask = _beside(input, (row_scale, mask), in_dims[4:6])
    y = operator(input, dim % (input.ndim - 1) + 1, dtype, scale, row_scale, mask, *rest)
    return y.squeeze(-1) if scalar else y, 0


def _batched_logsumexp(
    operator, info, in_dims, input, dim, keepdim=False, scale=None, row_scale=None, mask=None, *rest
):
    input = _in_front(input, in_dims[0], info.batch_size)
    row_scale, mask = _beside(input, (row_scale, mask), in_dims[4:6])
    dim = [d % (input.ndim - 1) + 1 for d in dim]
    return operator(input, dim, keepdim, scale, row_scale, mask, *rest), 0


def _batched_backward(operator, info, in_dims, dy, y, dim, *rest):
    scalar = y.ndim == (in_dims[1] is not None)
    dy, y = (_in_front(t, at, info.batch_size) for t, at in zip((dy, y), in_dims, strict=False))
    if scalar:
        dy, y, dim = dy.unsqueeze(-1), y.unsqueeze(-1), 0
    dx = operator(dy, y, dim % (y.ndim - 1) + 1, *rest)
    return dx.squeeze(-1) if scalar else dx, 0


def _in_front(t: Tensor, at: int | None, batch_size: int) -> Tensor:
    return t.expand(batch_size, *t.shape) if at is None else t.movedim(at, 0)


def _beside(input: Tensor, tensors: tuple[Tensor | None, ...], in_dims: tuple[int | None, ...]) -> list[Tensor | None]:
    """Scale and mask whose batch, where there is one, stands in front of as many dims as the input has."""
    result = list(tensors)
    for i, (tensor, at) in enumerate(zip(tensors, in_dims, strict=False)):
        if tensor is not None and at is not None:
            tensor = tensor.movedim(at, 0)
            result[i] = tensor.reshape(tensor.shape[0], *[1] * (input.ndim - tensor.ndim), *tensor.shape[1:])
    return result


def _register() -> torch.library.Library:
    library = torch.library.Library("fused_softmax", "DEF")

    def add(name, schema, run, save, fake, backward, batched):
        # Results are contiguous however the input lies, so a compiler may lay that out as it likes.
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
        library.impl(name, run, "CompositeExplicitAutograd")
        qualified = f"fused_softmax::{name}"
        torch.library.register_fake(qualified, fake, lib=library)
        torch.library.register_autograd(qualified, backward, setup_context=save, lib=library)
        operator = getattr(torch.ops.fused_softmax, name).default
        torch.library.register_vmap(qualified, partial(batched, operator), lib=library)

    of_softmax, of_logsumexp = (partial(_gradients, ops.gradients) for ops in (softmax_ops, lse_ops))
    for log, name, second in ((False, "softmax", _softmax_second), (True, "log_softmax", _log_softmax_second)):
        run, save = partial(_softmax, log), partial(_save_softmax, log)
        add(name, _SOFTMAX, run, save, _fake_softmax, of_softmax, _batched_softmax)
        run = partial(_softmax_backward, log)
        add(f"{name}_backward", _BACKWARD, run, _save_backward, _fake_backward, second, _batched_backward)
    add("logsumexp", _LOGSUMEXP, _logsumexp, _save_logsumexp, _fake_logsumexp, of_logsumexp, _batched_logsumexp)
    return library


_library = _register()  # what it defines lives as long as it does
