"""The divergence of a student's linear layer from a teacher's, from the hidden states of both.

The logits of both exist a chunk of rows at a time. A mean and a sum make their gradient in the forward pass: two
products for the logits, two for the gradients. Without a reduction, and for float16, the backward pass makes the
logits again.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_softmax.core.checks import arithmetic_of
from fused_softmax.core.no_gradient import saved_of
from fused_softmax.core.route import Route, apart, batched, needs_grad, resolved, route_of
from fused_softmax.ops import autocast
from fused_softmax.ops.losses.divergence import check_divergence, divergence, reduced
from fused_softmax.ops.losses.divergence_launches import Pair
from fused_softmax.ops.losses.divergence_rows import gradients, pair_of, referred, refused, run, with_rows
from fused_softmax.ops.losses.linear_by_rows import (
    OF_LAYERS,
    Gradients,
    Linear,
    check_layer,
    chunks,
    linear_of,
    lowered,
)
from fused_softmax.ops.losses.options import Divergence

_NAME = "linear_divergence"


def linear_divergence(
    input: Tensor,
    linear_weight: Tensor,
    target_input: Tensor,
    target_weight: Tensor,
    *,
    linear_bias: Tensor | None = None,
    target_bias: Tensor | None = None,
    kind: str = "kl",
    beta: float = 0.5,
    scale: float | None = None,
    softcap: float | None = None,
    temperature: float | Tensor | None = None,
    target_scale: float | None = None,
    target_softcap: float | None = None,
    target_temperature: float | Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    chunk_size: int | None = None,
    accumulate: str = "fp32",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """divergence(linear(input, linear_weight, linear_bias), linear(target_input, target_weight, target_bias), ...).

    The logits of neither model are ever in memory as a whole.

    input: the student's hidden states [..., in_features]; float32, float16, bfloat16 or float64.
    linear_weight: [n_classes, in_features]; linear_bias: [n_classes]. Each has the input's dtype, or float32 beside
        16 bits: products are in the input's dtype, and the gradient in the weight's.
    target_input: the teacher's hidden states, of the same leading shape; their size and dtype may differ.
    target_weight: [n_classes, target features]; target_bias: [n_classes]; of the target_input's dtype. The teacher gets
        no gradient: a tensor of its that requires one raises RuntimeError.
    kind, beta, scale, softcap, temperature, target_scale, target_softcap, target_temperature, weight, reduction, dtype:
        as `divergence` takes them. A row of weight 0 adds nothing to any gradient, whatever it holds.
    chunk_size: rows whose logits exist at once; by default as many as take about 1 GiB, or one chunk where a second
        copy of the weight's gradient would take more.
    accumulate: "fp32" adds up the weight's gradient over chunks in float32; "input" in the input's dtype.

    With mean and sum the gradients are made in the forward pass, but those of float16 and of "none" in the backward
    pass, which makes the logits again. So does the backward pass of compiled code, which has chunks too.
    Returns the divergence, [] or of the leading shape; float32, or float64 for float64.
    Raises TypeError, ValueError or RuntimeError for arguments that do not fit, naming the argument.

    >>> linear_divergence(hidden, student.lm_head.weight, of_teacher, teacher.lm_head.weight, kind="jsd")
    tensor(0.4103, device='cuda:0', grad_fn=<_LinearDivergenceBackward>)
    """
    given: dict[str, Any] = {
        "kind": kind, "beta": beta, "scale": scale, "softcap": softcap, "temperature": temperature,
        "target_scale": target_scale, "target_softcap": target_softcap, "target_temperature": target_temperature,
        "target_is": "logits",
    }  # fmt: skip
    layers = input, linear_weight, linear_bias, target_input, target_weight, target_bias
    return _linear_divergence(*layers, given, weight, reduction, chunk_size, accumulate, dtype)


def _linear_divergence(
    input, linear_weight, linear_bias, target_input, target_weight, target_bias, given, weight, reduction, chunk_size,
    accumulate, dtype,
) -> Tensor:  # fmt: skip
    check_layer(_NAME, input, linear_weight, linear_bias, chunk_size, accumulate)
    _check_teacher(input, linear_weight, target_input, target_weight, target_bias)
    shape = (*input.shape[:-1], linear_weight.shape[0])
    options = check_divergence(_NAME, input, shape, given, weight, reduction, dtype)
    cast = autocast.lowered_dtype(OF_LAYERS, input)
    if cast is not None:
        input, linear_weight, target_input, target_weight = (
            each.to(cast) for each in (input, linear_weight, target_input, target_weight)
        )
        linear_bias, target_bias = (None if each is None else each.to(cast) for each in (linear_bias, target_bias))
    target_input, target_weight = target_input.detach(), target_weight.detach()
    target_bias = None if target_bias is None else target_bias.detach()
    layers = [input, linear_weight, linear_bias, target_input, target_weight, target_bias]
    tensors = [each for each in (*layers, options.temperature, options.target_temperature) if isinstance(each, Tensor)]
    empty = not input.numel()
    why = "there are no logits" if empty else refused(input, target_input, options)
    route = route_of(_NAME, *tensors, refused=why, batches=False, holds="" if empty else "all logits")
    if route is Route.COMPOSED:
        if weight is not None:  # whose gradient of 0 times NaN would be NaN
            input = torch.where(weight.detach().unsqueeze(-1) == 0, 0.0, input)
        x, y = whole(input, linear_weight, linear_bias), whole(target_input, target_weight, target_bias)
        return divergence(x, y, **given, weight=weight, reduction=reduction, dtype=dtype)
    rows = input.reshape(-1, input.shape[-1])
    of_teacher = target_input.reshape(-1, target_input.shape[-1])
    pair = pair_of(rows, of_teacher, options)
    if route is Route.OPERATOR:
        both = rows, linear_weight, linear_bias, of_teacher, target_weight, target_bias
        traced = with_rows(options, pair).traced()
        values = torch.ops.fused_softmax.linear_divergence.default(*both, *traced, chunk_size, accumulate)
        return reduced(values.view(shape[:-1]), weight, reduction).to(dtype or arithmetic_of(input))
    factor = _factor_of(len(rows), weight, reduction, input)
    asked = tuple(each is not None and needs_grad(each) for each in layers[:3])
    linear = linear_of(rows, linear_weight, chunk_size, accumulate, asked[1])
    at_once = reduction != "none" and input.dtype != torch.float16
    how = way_of(options.with_numbers(), linear, at_once, len(rows), any(asked))
    found = _LinearDivergence.apply(
        rows, linear_weight, linear_bias, of_teacher, target_weight, target_bias, pair.temperature,
        pair.target_temperature, factor, how,
    )  # fmt: skip
    if not at_once:
        found = reduced(found.view(shape[:-1]), weight, reduction)
    elif reduction == "mean" and weight is not None:
        found = torch.where(weight.detach().sum() == 0, float("nan"), found)
    return found.to(dtype or arithmetic_of(input))


class How(NamedTuple):
    """What a call does, beside its tensors. at_once: whether it is reduced, and its gradients made, right away.

    linear: None where torch's operations make the products.
    """

    options: Divergence
    linear: Linear | None
    at_once: bool
    reason: str = ""


def way_of(options: Divergence, linear: Linear, at_once: bool, n_rows: int, differentiates: bool) -> How:
    """How a call goes, with the words for it."""
    n = -(-n_rows // linear.chunk_size)
    said = "all rows are one chunk" if n == 1 else f"rows go by {n} chunks of {linear.chunk_size}"
    if differentiates:
        said += ", and their gradients are made " + ("with them" if at_once else "in the backward pass")
    return How(options, linear, at_once, said)


def whole(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x, w.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _factor_of(n_rows: int, weight: Tensor | None, reduction: str, input: Tensor) -> Tensor:
    """[n_rows], float32: what a row counts in the result; 0 of rows that do not count."""
    if weight is None:
        each = 1.0 / n_rows if reduction == "mean" else 1.0
        return torch.full((n_rows,), each, dtype=torch.float32, device=input.device)
    w = weight.detach().reshape(-1).to(torch.float32)
    return torch.where(w == 0, 0.0, w / w.sum()) if reduction == "mean" else w


def _check_teacher(input, linear_weight, target_input, target_weight, target_bias) -> None:
    """An error that names the argument where a teacher's tensors do not fit."""
    given = {"target_input": target_input, "target_weight": target_weight}
    given |= {} if target_bias is None else {"target_bias": target_bias}
    for argument, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{_NAME}: {argument} must be a Tensor, not {type(tensor).__name__}")
        if tensor.is_nested or tensor.layout != torch.strided:
            raise RuntimeError(f"{_NAME}: {argument} must be a dense strided tensor, got {tensor.layout}")
        if not tensor.is_floating_point():
            raise NotImplementedError(f"{_NAME}: {argument} must be of a float dtype, got {tensor.dtype}")
        if tensor.device != input.device:
            raise RuntimeError(f"{_NAME}: {argument} must be on the input's device {input.device}, got {tensor.device}")
        if tensor.dtype != target_input.dtype:
            raise RuntimeError(
                f"{_NAME}: {argument} must be of the target_input's dtype {target_input.dtype}, got {tensor.dtype}"
            )
        if tensor.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(f"{_NAME}: {argument} requires grad, and a teacher gets none; give {argument}.detach()")
    leading, n_classes = tuple(input.shape[:-1]), linear_weight.shape[0]
    if target_input.ndim == 0 or tuple(target_input.shape[:-1]) != leading:
        raise ValueError(
            f"{_NAME}: target_input must have shape {(*leading, 'target features')}, got {tuple(target_input.shape)}"
        )
    expected = n_classes, target_input.shape[-1]
    if tuple(target_weight.shape) != expected:
        raise ValueError(f"{_NAME}: target_weight must have shape {expected}, got {tuple(target_weight.shape)}")
    if target_bias is not None and tuple(target_bias.shape) != (n_classes,):
        raise ValueError(f"{_NAME}: target_bias must have shape ({n_classes},), got {tuple(target_bias.shape)}")


class Layers(NamedTuple):
    """Rows, weight and bias of the student's layer and of the teacher's, and temperatures of rows."""

    x: Tensor
    w: Tensor
    bias: Tensor | None
    h: Tensor
    v: Tensor
    of_v: Tensor | None
    temperature: Tensor | None
    target_temperature: Tensor | None


class _LinearDivergence(torch.autograd.Function):
    """The divergences of rows, float32; or at once the sum of them by their factors."""

    @staticmethod
    def forward(ctx, x, w, bias, h, v, of_v, temperature, target_temperature, factor, how):
        layers, asked = Layers(x, w, bias, h, v, of_v, temperature, target_temperature), ctx.needs_input_grad[:3]
        found = _gradients_of(layers, factor == 0, how, asked) if how.at_once and any(asked) else None
        values = []
        for here, made in _pairs(layers, how):
            pair, rows = run(made, how.options)
            values.append(rows.value)
            if found is not None:
                gradients(pair, rows, factor[here], how.options, over=True)
                found.add(here.start, pair.x)
        value = torch.cat(values)
        ctx.how = how
        of_layer = [None] * 3 if found is None else found.in_dtypes(x, w, bias)
        ctx.save_for_backward(*layers, factor, value, *of_layer)
        return torch.where(factor == 0, 0.0, value * factor).sum() if how.at_once else value

    @staticmethod
    def backward(ctx, incoming):
        (incoming,) = resolved(incoming)
        *both, temperature, of_target, factor, value, dx, dw, db = saved_of(ctx, _NAME)
        of_rows = temperature, of_target, factor  # of which hooks of saved tensors may return other strides
        rows: list[Any] = [each if each is None else each.contiguous() for each in of_rows]
        layers, factor, how = Layers(*both, *rows[:2]), rows[2], ctx.how
        asked, nothing = ctx.needs_input_grad[:3], (None,) * 7
        if torch.is_grad_enabled() or batched(incoming):
            return *differentiable(layers, factor, how, asked, incoming, value), *nothing
        if how.at_once:
            return *(each if each is None else each * incoming.to(each.dtype) for each in (dx, dw, db)), *nothing
        return *gradients_of_rows(layers, factor == 0, how, asked, incoming.contiguous()), *nothing


def values_of(layers: Layers, how: How) -> Tensor:
    """The divergences of rows, float32."""
    return torch.cat([run(made, how.options)[1].value for _, made in _pairs(layers, how)])


def gradients_of_rows(
    layers: Layers, left_out: Tensor, how: How, asked: Sequence[bool], incoming: Tensor
) -> list[Tensor | None]:
    """The gradients asked for, by logits that are made again. left_out: rows that have no part in them."""
    found = _gradients_of(layers, left_out, how, asked)
    for here, made in _pairs(layers, how):
        pair, states = run(made, how.options)
        gradients(pair, states, incoming[here], how.options, over=True)
        found.add(here.start, pair.x)
    return found.in_dtypes(layers.x, layers.w, layers.bias)


def with_temperatures(options: Divergence, layers: Layers) -> Divergence:
    """With the temperatures of rows, where there are any."""
    return with_rows(options, Pair(layers.x, layers.h, None, *layers[6:]))


def _gradients_of(layers: Layers, left_out: Tensor | None, how: How, asked: Sequence[bool]) -> Gradients:
    assert how.linear is not None
    left_out = left_out if asked[1] else None
    wide = layers.w.dtype != layers.x.dtype
    return Gradients(*lowered(*layers[:3]), how.linear, asked, wide=wide, left_out=left_out)


def _pairs(layers: Layers, how: How) -> Iterator[tuple[slice, Pair]]:
    """(rows, the logits of both layers) of each chunk."""
    assert how.linear is not None
    of_student, of_teacher = chunks(*lowered(*layers[:3]), how.linear), chunks(*layers[3:6], how.linear)
    for (start, logits), (_, theirs) in zip(of_student, of_teacher, strict=True):
        here = slice(start, start + len(logits))
        temperature, of_target = (None if each is None else each[here] for each in layers[6:])
        yield here, Pair(logits, theirs, None, temperature, of_target)


def differentiable(
    layers: Layers, factor: Tensor, how: How, asked: Sequence[bool], incoming: Tensor, value: Tensor
) -> list[Tensor | None]:
    """The gradients by torch's operations, for a second derivative or a batch of gradients."""
    options, again = with_temperatures(how.options, layers), torch.is_grad_enabled()
    with autocast.off(layers.x), torch.enable_grad():
        x, w, bias = apart(*layers[:3])
        inputs = [each for each, wants in zip((x, w, bias), asked, strict=True) if wants]
        counts = (factor != 0) | value.isfinite()
        rows = torch.where(counts.unsqueeze(-1), x, 0.0)
        found = referred(whole(rows, w, bias), whole(*layers[3:6]), options, counts)
        found = torch.where(factor == 0, 0.0, found * factor).sum() if how.at_once else found
        of_inputs = iter(torch.autograd.grad([found], inputs, [incoming.to(found.dtype)], create_graph=again))
    return [next(of_inputs) if wants else None for wants in asked]
