"""The rules of the losses as registered operators: what runs, fakes, gradients.

cross_entropy and its gradient, which reads the logits a second time (3MN in all): an operator changes none of its
arguments and nobody knows dy yet, so nothing is written in the forward pass. linear_cross_entropy gives the gradients
beside the loss, as an eager call does, where someone asks for them and their scale does no harm; its own gradient
operator makes the logits again. Under functorch's transforms and on devices without kernels torch's operations compute.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fused_softmax.core.checks import arithmetic_of
from fused_softmax.core.options import refuse_batch_invariant
from fused_softmax.core.route import on_device
from fused_softmax.ops.losses import launches as losses
from fused_softmax.ops.losses import linear_cross_entropy as linear_ops
from fused_softmax.ops.losses import reference
from fused_softmax.ops.losses.linear_by_classes import without
from fused_softmax.ops.losses.linear_by_rows import linear_of, lowered
from fused_softmax.ops.losses.options import WITHOUT_ROWS, Loss
from fused_softmax.ops.losses.output import Wanted
from fused_softmax.ops.losses.steps import Kind, differentiable_gradient, losses_of
from fused_softmax.ops.losses.sums import left_out_of, of_counted, totals_of

_LOSS = Loss.schema()
_LAST = Loss.schema(["batch_invariant"])
_MORE = f"ScalarType? dtype=None, bool return_token_stats=False, {_LAST}"
# lse is m + ls, and its gradient that of ls. Statistics that are not asked for, z-losses too, are empty or 0.
_STATS = "Tensor losses, Tensor entropy, Tensor predicted, Tensor correct"
_ROWS = f"(Tensor loss, Tensor z_loss, Tensor m, Tensor ls, {_STATS})"
CROSS_ENTROPY = f"(Tensor input, Tensor target, {_LOSS}, {_MORE}) -> {_ROWS}"
CROSS_ENTROPY_BACKWARD = (
    f"(Tensor input, Tensor target, Tensor m, Tensor ls, Tensor? dy, Tensor? dz, Tensor? dls, {_LOSS}) -> Tensor"
)
CROSS_ENTROPY_GIVEN_LSE = (
    f"(Tensor input, Tensor target, Tensor lse, {Loss.schema(WITHOUT_ROWS)}, ScalarType? dtype=None) -> Tensor"
)
_LINEAR = 'int? chunk_size=None, str accumulate="fp32", bool[] gradients=[]'
_LINEAR_DEFAULTS: tuple[Any, ...] = (None, "fp32", [], False, False, False)
_RETURNS = "bool return_lse=False, bool return_z_loss=False, bool return_token_stats=False"
_OF_LINEAR = "Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias"
_GRADIENTS = "Tensor dinput, Tensor dlinear_weight, Tensor dlinear_bias"
_LINEAR_ROWS = f"(Tensor loss, {_GRADIENTS}, Tensor lse, Tensor z_loss, {_STATS})"  # empty if not asked for
LINEAR_CROSS_ENTROPY = f"({_OF_LINEAR}, {_LOSS}, {_LINEAR}, {_RETURNS}) -> {_LINEAR_ROWS}"
_LATER = "Tensor? dlse=None, Tensor? dz=None"
LINEAR_BACKWARD = f"(Tensor dy, {_OF_LINEAR}, {_LOSS}, {_LINEAR}, {_LATER}) -> ({_GRADIENTS})"


def _on_kernels(x: Tensor) -> bool:
    return on_device(x) and x.numel() > 0


# What runs.


def cross_entropy(input, target, *given):
    with torch._C.DisableTorchFunction():  # a mode of functions has seen the call
        of_loss, (dtype, stats, alone) = _split(given)
        loss = replace(Loss.of_operator(input, of_loss, stats), batch_invariant=alone)
        dtype, target = dtype or input.dtype, target.contiguous()
        if not _on_kernels(input):
            return _composed(input, target, loss, dtype)
        kind = Kind(loss, Wanted(lse=True, z_loss=True, stats=stats), dtype, False, False)
        (y, _, z, *stats), rows, _ = losses_of(losses.rows_for(input, loss), target, loss, kind)
        # Of results, none is a view of another.
        return y.clone(), z.clone(), rows.m, rows.ls, *(stats or _no_stats(rows.m))


def cross_entropy_given_lse(input, target, lse, *given):
    with torch._C.DisableTorchFunction():
        of_loss, (dtype,) = _split(given, (None,), WITHOUT_ROWS)
        loss = Loss.of_traced(of_loss, WITHOUT_ROWS).for_kernels(input)
        dtype, lse = dtype or input.dtype, lse.to(arithmetic_of(input)).contiguous()
        if not _on_kernels(input):
            return _composed(input, target, loss, dtype, lse)[0]
        kind = Kind(loss, Wanted(), dtype, False, False)
        return losses_of(losses.rows_for(input, loss), target.contiguous(), loss, kind, lse)[0][0]


def cross_entropy_backward(input, target, m, ls, dy, dz, dls, *of_loss):
    with torch._C.DisableTorchFunction():
        loss = Loss.of_operator(input, of_loss)
        # Hooks of saved tensors may return other strides.
        target, m, ls = target.contiguous(), m.contiguous(), ls.contiguous()
        if not _on_kernels(input):
            return _gradient(input, target, m + ls, dy, dz, dls, loss)
        totals = totals_of(target, loss, input.shape[1], arithmetic_of(input)) if loss.mean else None
        dy = torch.zeros((), dtype=m.dtype, device=m.device) if dy is None else dy
        dz = None if dz is None else dy + dz
        dx = torch.empty(input.shape, dtype=input.dtype, device=input.device)
        rows = losses.with_whole_rows(input)
        return losses.backward(rows, target, m, ls, loss, totals=totals, dy=dy, dz=dz, dlse=dls, dx=dx)


def linear_cross_entropy(x, w, target, bias, *given):
    with torch._C.DisableTorchFunction():
        of_loss, (chunk_size, accumulate, asked, *more) = _split(given, _LINEAR_DEFAULTS)
        wanted = Wanted(*more)
        loss = Loss.of_operator(x, of_loss, wanted.stats)
        linear = linear_of(x, w, chunk_size, accumulate, len(asked) > 1 and asked[1])
        asked = _at_once(x, loss.reduction, asked)
        if not _on_kernels(x):
            logits = torch.nn.functional.linear(*lowered(x, w, bias))
            y, z, lse, _, *stats = _composed(logits, target, loss, arithmetic_of(x))
            one = torch.ones((), dtype=y.dtype, device=y.device)
            dlogits = _gradient(logits, target, lse, one, None, None, loss) if any(asked) else logits
            found = _of_layer(without(x, left_out_of(target, loss)), w, bias, dlogits, asked)
        else:
            given = x.contiguous(), w, bias, target.contiguous(), loss, linear, asked, wanted
            (y, lse, z, *stats), _, gradients = linear_ops.forward(*given)
            found = [None] * 3 if gradients is None else gradients.in_dtypes(x, w, bias)
            found, y = [x.new_empty(0) if each is None else each for each in found], y.clone()
        lse, z = (each if asks else y.new_empty(0) for each, asks in ((lse, wanted.lse), (z, wanted.z_loss)))
        return y, *found, lse, z, *(stats or _no_stats(y))


def linear_backward(dy, x, w, target, bias, *given):
    with torch._C.DisableTorchFunction():
        of_loss, (chunk_size, accumulate, asked, dlse, dz) = _split(given, (None, "fp32", [], None, None))
        loss = Loss.of_operator(x, of_loss)
        linear = linear_of(x, w, chunk_size, accumulate, asked[1])
        if not _on_kernels(x):
            logits = torch.nn.functional.linear(*lowered(x, w, bias))
            _, _, lse, *_ = _composed(logits, target, loss, arithmetic_of(x))
            dlogits = _gradient(logits, target, lse, dy, dz, dlse, loss)
            return _of_layer(without(x, left_out_of(target, loss, dlse)), w, bias, dlogits, asked)
        x, target = x.contiguous(), target.contiguous()
        totals = totals_of(target, loss, w.shape[0], arithmetic_of(x)) if loss.mean else None
        found = linear_ops.backward(x, w, bias, target, totals, loss, linear, asked, dy, dlse, dz)
        return tuple(x.new_empty(0) if each is None else each for each in found)


def _split(
    given: tuple, defaults: tuple = (None, False, False), names: Collection[str] = Loss.FORMULA
) -> tuple[tuple, tuple]:
    """A loss's options, and the arguments after them. The dispatcher leaves out last arguments that are defaults."""
    n = len(names)
    more = given[n:]
    return given[:n], (*more, *defaults[len(more) :])


def _at_once(x, reduction: str, asked) -> list[bool]:
    """Which gradients are made beside the loss. In fp16 none: what loss scaling would have kept would underflow."""
    return [bool(each) and reduction != "none" and x.dtype != torch.float16 for each in asked or (False,) * 3]


def _no_stats(like: Tensor) -> list[Tensor]:
    return [like.new_empty(0, dtype=dtype) for dtype in _stats_dtypes(like)]


def _stats_dtypes(like: Tensor) -> tuple[torch.dtype, ...]:
    return like.dtype, like.dtype, torch.int64, torch.bool


# Of torch's operations.


def _composed(x, target, loss, dtype, given_lse=None):
    arguments = loss.reference_arguments() | {"arithmetic": arithmetic_of(x)}
    y, lse, z = reference.cross_entropy(x, target, reduction=loss.reduction, dtype=dtype, lse=given_lse, **arguments)
    stats = reference.token_stats(x, target, **arguments) if loss.stats else _no_stats(lse)
    return y, z, lse, torch.zeros_like(lse), *stats


def _logits(x, loss):
    """z and dz / dx."""
    z = x.to(arithmetic_of(x)) * loss.scale
    if loss.softcap is None:
        return z, loss.scale
    t = torch.tanh(z / loss.softcap)
    return loss.softcap * t, loss.scale * (1.0 - t * t)


def _gradient(x, target, lse, dy, dz, dls, loss):
    """dx = (p a - [c = t] b - w_c u) dz / dx, as the kernels."""
    z, dz_dx = _logits(x, loss)
    n_classes, target = x.shape[1], target.long()
    counts = target != loss.ignore_index
    wrong = counts & ((target < 0) | (target >= n_classes))
    kept = counts & ~wrong
    t = torch.where(kept, target, 0)
    weights = torch.ones(n_classes, dtype=z.dtype, device=z.device) if loss.weight is None else loss.weight
    w = weights[t]
    g = torch.zeros((), dtype=z.dtype, device=z.device) if dy is None else dy.to(z.dtype)
    g_z = g if dz is None else g + dz.to(z.dtype)
    if loss.mean:
        of_loss = counts.sum() if loss.weight is None else torch.where(kept, w, 0.0).sum()
        # No incoming gradient gives no gradient, even if a total is 0 too.
        g_z, g = (torch.where(of == 0, 0.0, of / total) for of, total in ((g_z, counts.sum()), (g, of_loss)))
    hard, even = 1.0 - loss.label_smoothing, loss.label_smoothing / n_classes
    a = g * (hard * w + even * weights.sum()) + g_z * 2.0 * loss.lse_square_scale * lse
    a, b, u = (torch.where(kept, each, 0.0) for each in (a, g * hard * w, g * even + torch.zeros_like(w)))
    a = a if dls is None else a + dls
    a = a.masked_fill(wrong, float("nan"))
    reads = counts if dls is None else counts | (a != 0)
    dx = (z - lse.unsqueeze(-1)).exp() * a.unsqueeze(-1) - weights * u.unsqueeze(-1)
    dx = dx.scatter_add(-1, t.unsqueeze(-1), -b.unsqueeze(-1)) * dz_dx
    return dx.masked_fill(~reads.unsqueeze(-1), 0.0).to(x.dtype)


def _of_layer(x, w, bias, dlogits, asked):
    found = (
        dlogits @ w.to(x.dtype) if asked[0] else x.new_empty(0),
        (dlogits.t() @ x).to(w.dtype) if asked[1] else x.new_empty(0),
        dlogits.sum(0).to(bias.dtype) if asked[2] and bias is not None else x.new_empty(0),
    )
    return found


# What tracing is told instead.


def fake_cross_entropy(input, target, *given):
    of_loss, (dtype, stats, _) = _split(given)
    n = input.shape[0]
    shape = [n] if _reduction(of_loss) == "none" else []
    y, z = (input.new_empty(shape, dtype=dtype or input.dtype) for _ in range(2))
    m, ls = (input.new_empty([n], dtype=arithmetic_of(input)) for _ in range(2))
    return y, z, m, ls, *_fake_stats(m, n, stats)


def fake_given_lse(input, target, lse, *given):
    of_loss, (dtype,) = _split(given, (None,), WITHOUT_ROWS)
    shape = [input.shape[0]] if _reduction(of_loss) == "none" else []
    return input.new_empty(shape, dtype=dtype or input.dtype)


def fake_backward(input, *given):
    return input.new_empty(input.shape)


def fake_linear(x, w, target, bias, *given):
    of_loss, (_, _, asked, *more) = _split(given, _LINEAR_DEFAULTS)
    reduction, wanted, n, dtype = _reduction(of_loss), Wanted(*more), x.shape[0], arithmetic_of(x)
    shape = [n] if reduction == "none" else []
    y, z = (x.new_empty(each, dtype=dtype) for each in (shape, shape if wanted.z_loss else [0]))
    lse = x.new_empty([n] if wanted.lse else [0], dtype=dtype)
    return y, *_fake_gradients(x, w, bias, _at_once(x, reduction, asked)), lse, z, *_fake_stats(lse, n, wanted.stats)


def fake_linear_backward(dy, x, w, target, bias, *given):
    return _fake_gradients(x, w, bias, _split(given, (None, "fp32", []))[1][2])


# What is counted: two operations for each element of a factor that is multiplied and added, as torch counts products.


def flops_of_linear(x, w, *_, out_val, **__) -> int:
    """The logits, and the gradients that are made beside the loss; a bias and the loss itself count nothing."""
    return _products(x, w, out_val[1:3])


def flops_of_linear_backward(dy, x, w, *_, out_val, **__) -> int:
    """The logits, which are made again, and the gradients."""
    return _products(x, w, out_val[:2])


def _products(x, w, gradients) -> int:
    made = sum(each.numel() > 0 for each in gradients)
    return 2 * x.shape[0] * w.shape[0] * w.shape[1] * (1 + made)


def _fake_stats(like, n, wanted):
    return [like.new_empty([n] if wanted else [0], dtype=each) for each in _stats_dtypes(like)]


def _fake_gradients(x, w, bias, asked):
    return tuple(
        of.new_empty(of.shape) if wanted and of is not None else x.new_empty([0])
        for of, wanted in zip((x, w, bias), asked, strict=True)
    )


def _reduction(of_loss: tuple) -> str:
    return Loss(*of_loss).reduction


# Autograd.


def save_cross_entropy(ctx, inputs, output):
    input, target, *given = inputs
    _, _, m, ls, *stats = output
    of_loss, (_, _, ctx.batch_invariant) = _split(tuple(given))
    ctx.given = of_loss[1:]
    ctx.save_for_backward(input, target, m, ls, given[0] if given else None)
    ctx.mark_non_differentiable(m, *stats)
    ctx.set_materialize_grads(False)


def cross_entropy_gradient(ctx, dy, dz, dm, dls, *_):
    input, target, m, ls, weight = ctx.saved_tensors
    dx = None
    if ctx.needs_input_grad[0] and not (dy is None and dz is None and dls is None):
        if torch.is_grad_enabled():
            loss = Loss.of_operator(input, (weight, *ctx.given))
            if ctx.batch_invariant:
                refuse_batch_invariant("cross_entropy", "torch's operations make a gradient that is differentiated")
            dx = differentiable_gradient(input, target, loss, dy, dls, dz)
        else:
            operator = torch.ops.fused_softmax.cross_entropy_backward.default
            dx = operator(input, target, m, ls, dy, dz, dls, weight, *ctx.given)
    return (dx, *[None] * (len(ctx.needs_input_grad) - 1))


def save_given_lse(ctx, inputs, output):
    input, target, lse, *given = inputs
    of_loss, _ = _split(tuple(given), (None,), WITHOUT_ROWS)
    loss = Loss.of_traced(of_loss, WITHOUT_ROWS)
    ctx.loss = replace(loss, weight=None)
    ctx.save_for_backward(input, target, lse, loss.weight)


def given_lse_gradient(ctx, dy):
    """exp(z - lse), less 1 at the target: the gradient of a whole row's loss with m = lse and ls = 0."""
    input, target, lse, weight = ctx.saved_tensors
    dx, lse = None, lse.detach().to(arithmetic_of(input))
    if ctx.needs_input_grad[0] and torch.is_grad_enabled():
        loss = replace(ctx.loss, weight=weight).for_kernels(input)
        dx = differentiable_gradient(input, target, loss, dy, None, None, lse)
    elif ctx.needs_input_grad[0]:
        operator = torch.ops.fused_softmax.cross_entropy_backward.default
        arguments = replace(ctx.loss, weight=weight).traced()
        dx = operator(input, target, lse, torch.zeros_like(lse), dy, None, None, *arguments)
    return (dx, *[None] * (len(ctx.needs_input_grad) - 1))


def save_cross_entropy_backward(ctx, inputs, output):
    input, target, _, _, dy, dz, dls, *of_loss = inputs
    ctx.given = of_loss[1:]
    ctx.save_for_backward(input, target, dy, dz, dls, of_loss[0] if of_loss else None)


def cross_entropy_second(ctx, g):
    """The gradient of cross_entropy's gradient, as a function of the logits, m and ls included."""
    input, target, dy, dz, dls, weight = ctx.saved_tensors
    at = (0, 4, 5, 6)
    with torch.enable_grad():
        given = [None if each is None else each.detach().requires_grad_() for each in (input, dy, dz, dls)]
        x, dy, dz, dls = given
        loss = Loss.of_operator(input, (weight, *ctx.given))
        dx = differentiable_gradient(x, target, loss, dy, dls, dz)
        there = [each for each in given if each is not None]
        found = iter(torch.autograd.grad(dx, there, g, allow_unused=True))
    results: list[Any] = [None] * len(ctx.needs_input_grad)
    for i, each in zip(at, given, strict=True):
        results[i] = None if each is None else next(found)
    return tuple(results)


def save_linear(ctx, inputs, output):
    x, w, target, bias, *given = inputs
    _, *gradients = output[:4]
    of_loss, more = _split(tuple(given), _LINEAR_DEFAULTS)
    ctx.of_loss, ctx.more = of_loss[1:], more[:3]
    ctx.at_once = any(_at_once(x, _reduction(of_loss), more[2]))
    ctx.save_for_backward(x, w, target, bias, of_loss[0] if of_loss else None, *gradients)
    asked = Wanted(*more[3:])
    unasked = [each for each, asks in zip(output[4:6], asked[:2], strict=True) if not asks]
    ctx.mark_non_differentiable(*gradients, *unasked, *output[6:])
    ctx.set_materialize_grads(False)  # zeros of the weight's shape, for gradients of gradients that nobody has


def linear_gradient(ctx, dy, dinput, dlinear_weight, dlinear_bias, dlse=None, dz=None, *_):
    if dy is None and dlse is None and dz is None:
        return (None,) * len(ctx.needs_input_grad)
    x, w, target, bias, weight, *gradients = ctx.saved_tensors
    asked = [ctx.needs_input_grad[i] for i in (0, 1, 3)]
    loss, alone = Loss.of_operator(x, (weight, *ctx.of_loss)), dlse is None and dz is None
    if torch.is_grad_enabled():
        gradients = linear_ops.differentiable_gradient(x, w, bias, target, loss, asked, dy, dlse, dz)
    elif alone and ctx.at_once and all(made or not wanted for made, wanted in zip(ctx.more[2], asked, strict=True)):
        # The product is rounded once. dy is not rounded, because it may be any number.
        factor = of_counted(dy, left_out_of(target, loss))
        gradients = [(each.to(dy.dtype) * factor).to(each.dtype) for each in gradients]
    else:
        dy = torch.zeros((), dtype=arithmetic_of(x), device=x.device) if dy is None else dy
        gradients = torch.ops.fused_softmax.linear_cross_entropy_backward.default(
            dy, x, w, target, bias, *_all_of((weight, *ctx.of_loss)), *ctx.more[:2], asked,
            *(() if alone else (dlse, dz)),
        )  # fmt: skip
    dx, dw, db = (each if wanted else None for each, wanted in zip(gradients, asked, strict=True))
    return (dx, dw, None, db, *[None] * (len(ctx.needs_input_grad) - 4))


def _all_of(of_loss: tuple) -> tuple:
    """The arguments, with the defaults that the dispatcher left out."""
    defaults = tuple(Loss.DEFAULTS[name] for name in Loss.FORMULA)
    return (*of_loss, *defaults[len(of_loss) :])
