"""softmax and log_softmax as autograd differentiates them: the gradients of input, mask, scale and sink, from y and dy.

If only the input's is wanted, a kernel writes it, and reads y and dy once. torch's operations do the rest.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_softmax.core.calls import find
from fused_softmax.core.checks import DTYPES, arithmetic_in, arithmetic_of
from fused_softmax.core.launched import Launched, compose
from fused_softmax.core.options import refuse_batch_invariant
from fused_softmax.core.route import Route, on_device, route_of, runs_here
from fused_softmax.core.runner import FP8
from fused_softmax.ops.softmax import reference
from fused_softmax.ops.softmax.calls import LOGSUMEXP, backward, backward_key, prepare_call
from fused_softmax.ops.softmax.scores import Scores


class Differentiated(NamedTuple):
    """What the gradient of a call depends on, beside its tensors and numbers.

    sunk: whether there is a sink.
    batch_invariant: whether a row has the same bits in any batch.
    quick: the name and options of the kernel's call, if only dx may be wanted and a kernel makes it.
    """

    log: bool
    dim: int
    hides: bool
    greedy: bool
    input_dtype: torch.dtype
    sunk: bool
    batch_invariant: bool
    quick: tuple[str, tuple] | None = None


def _differentiated(log: bool, input: Tensor, dim: int, dtype: torch.dtype, scores: Scores) -> Differentiated:
    sunk = scores.sink is not None
    kind = Differentiated(log, dim, scores.hides, scores.greedy, input.dtype, sunk, scores.batch_invariant)
    exact = scores.scale is None or dtype != torch.float64  # a kernel's number has 32 bits
    written = exact and input.dtype in DTYPES
    if scores.per_row is not None or not written or (scores.greedy and (log or sunk)):
        return kind
    scaled = scores.scale is not None
    return kind._replace(
        quick=backward_key(log, dim, input.dtype, scores.hides, scaled, scores.batch_invariant)
    )  # fmt: skip


def with_gradient(
    launched: Launched, log: bool, input: Tensor, dim: int, dtype: torch.dtype, scores: Scores
) -> Launched:
    """A prepared call as one that autograd differentiates."""
    kind = _differentiated(log, input, dim, dtype, scores)
    of_scores = scores.per_row is not None or (scores.mask is not None and scores.mask.requires_grad)
    of_sink = isinstance(scores.sink, Tensor) and scores.sink.requires_grad
    summed = _prepare_lse(input, dim, dtype, scores) if of_sink else None

    def build(n, forward, lse_of):
        def call(input, out, scale, mask, sink):
            return _apply_to_input(input, (forward, scale, mask, sink, kind))

        def scored_call(input, out, scale, mask, sink):
            per_row, number = (scale, None) if isinstance(scale, Tensor) else (None, scale)
            return _apply(input, mask, per_row, sink, (forward, lse_of, number, kind))

        return scored_call if of_scores or of_sink else call

    return compose(build, launched, summed, n=input.shape[0] if launched.of_any_rows else None)


def _prepare_lse(input: Tensor, dim: int, dtype: torch.dtype, scores: Scores) -> Launched:
    """lse of a call's rows, by which its sink has a gradient: in the dtype of the arithmetic, `dim` kept."""
    rounded = input.dtype not in (dtype, *FP8) and dtype != arithmetic_in(dtype)
    if rounded or not input.dtype.is_floating_point:
        inner = _prepare_lse(input.to(dtype), dim, dtype, scores).__call__
        return Launched(lambda input, out, scale, mask, sink: inner(input.to(dtype), out, scale, mask, sink))
    arithmetic, rules = arithmetic_in(dtype), scores.rules
    if input.numel() and input.ndim:
        return prepare_call(LOGSUMEXP, input, (dim,), arithmetic, None, scores, True)

    def composed(input, out, scale, mask, sink):
        arguments = Scores(scale, mask, sink=sink, **rules).formula()
        return reference.logsumexp(input, dim, True, dtype=arithmetic, arithmetic=arithmetic, **arguments)

    return Launched(composed)


class _OfInput(torch.autograd.Function):
    """y with the gradient of input alone: `_Softmax` with fewer arguments for autograd to go through."""

    @staticmethod
    def forward(ctx, input, how):
        forward, ctx.number, mask, sink, ctx.kind = how
        y = forward(input, None, ctx.number, mask, sink)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        quick, saved = ctx.kind.quick, ctx.saved_tensors  # unpacked once: a checkpoint allows no more
        if quick is not None and not torch.is_grad_enabled():
            call = find(*quick, saved[0], dy)
            if call is not None:
                return call(dy, saved[0], ctx.number), None
        return gradients(ctx, dy, True, False, False, saved=saved)[0], None


class _Softmax(torch.autograd.Function):
    """y with the gradient of input, of an added mask, of a scale tensor and of a sink tensor, from y and dy."""

    @staticmethod
    def forward(ctx, input, mask, scale, sink, how):
        forward, lse_of, ctx.number, ctx.kind = how
        ctx.mask_shape = None if mask is None else mask.shape
        given = ctx.number if scale is None else scale
        y = forward(input, None, given, mask, sink)
        seen = input if scale is not None and scale.requires_grad else None
        if lse_of is not None:
            ctx.save_for_backward(y, scale, seen, sink, lse_of(input, None, given, mask, sink))
        elif scale is not None:
            ctx.save_for_backward(y, scale, seen)
        else:
            ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        return *gradients(ctx, dy, *ctx.needs_input_grad[:4]), None


# As their apply, without its search for functorch's wrappers: a call under a transform does not come here.
_apply_to_input = super(torch.autograd.Function, _OfInput).apply
_apply = super(torch.autograd.Function, _Softmax).apply


def save_for_gradients(ctx, log: bool, input: Tensor, dim: int, y: Tensor, scores: Scores) -> None:
    """What `gradients` takes, for the registered operator."""
    scale, sink = scores.per_row, scores.sink
    seen = input if scale is not None and scale.requires_grad else None
    if isinstance(sink, Tensor) and sink.requires_grad:
        arithmetic = arithmetic_of(y)
        rounded = input if y.dtype in (input.dtype, arithmetic) else input.to(y.dtype)
        operator = torch.ops.fused_softmax.logsumexp.default
        lse = operator(rounded, [dim], True, *scores.operator_arguments(), arithmetic)
        ctx.save_for_backward(y, scale, seen, sink, lse)
    else:
        ctx.save_for_backward(y, scale, seen)
    ctx.kind = _differentiated(log, input, dim, y.dtype, scores)
    ctx.mask_shape = None if scores.mask is None else scores.mask.shape
    ctx.number = None if scale is not None else scores.scale


_NOT_SAVED: tuple[Any, ...] = (None,) * 4  # after y


def gradients(
    ctx, dy: Tensor, for_input: bool, for_mask: bool, for_scale: bool, for_sink: bool = False, *, saved: Any = None
):
    """Those of input, mask, scale and sink that are asked for. saved: ctx.saved_tensors, if they were unpacked."""
    y, scale, input, sink, lse = (*(ctx.saved_tensors if saved is None else saved), *_NOT_SAVED)[:5]
    kind: Differentiated = ctx.kind
    factor: Any = scale if scale is not None else 1.0 if ctx.number is None else ctx.number
    if not (for_input or for_mask or for_scale):
        return None, None, None, sink_gradient(dy, y, sink, lse, kind) if for_sink else None
    greedy = None  # in rows of scale 0 the first maximum, times 1, competes with the sink
    if kind.greedy and kind.sunk:
        greedy = torch.as_tensor(factor, device=dy.device) == 0
        factor = 1.0 if scale is None else torch.where(greedy, 1.0, scale.to(dy.device))
    # dx alone is rounded once. The others are reductions of the gradient of the scores, in the dtype of the
    # arithmetic. A kernel's number has 32 bits, too few for fp64, and no kernel writes fp8.
    in_kernel = scale is None and not for_mask and (factor == 1 or y.dtype != torch.float64)
    in_kernel = in_kernel and kind.input_dtype in DTYPES
    if in_kernel and not (kind.log and kind.greedy) and not torch.is_grad_enabled() and runs_here(dy, y):
        dsink = sink_gradient(dy, y, sink, lse, kind) if for_sink else None
        how = kind.dim, kind.input_dtype, kind.log, kind.hides, factor, kind.batch_invariant
        return backward(dy, y, *how), None, None, dsink
    arithmetic = torch.promote_types(y.dtype, torch.float32)
    dz_dtype, dz_factor = (kind.input_dtype, factor) if in_kernel else (arithmetic, 1.0)
    route = Route.COMPOSED if torch.is_grad_enabled() else route_of("softmax_backward", dy, y)
    if kind.batch_invariant and route is Route.COMPOSED and on_device(y):
        refuse_batch_invariant("log_softmax" if kind.log else "softmax", "torch's operations make this gradient")
    if route is Route.KERNEL:
        dz = backward(dy, y, kind.dim, dz_dtype, kind.log, kind.hides, dz_factor, kind.batch_invariant)
    elif route is Route.OPERATOR:
        operators = torch.ops.fused_softmax
        operator = operators.log_softmax_backward if kind.log else operators.softmax_backward
        alone = (True,) if kind.batch_invariant else ()
        if kind.hides or dz_factor == 1:
            dz = operator.default(dy, y, kind.dim, dz_dtype, float(dz_factor) if kind.hides else None, *alone)
        else:
            dz = (operator.default(dy, y, kind.dim, arithmetic, None, *alone) * dz_factor).to(dz_dtype)
    else:
        dz = differentiable_backward(dy, y, kind.dim, kind.log, kind.hides, arithmetic) * dz_factor
    if greedy is not None:
        dz = dz.masked_fill(greedy & (y == (-float("inf") if kind.log else 0.0)), 0.0)
    elif kind.log and kind.greedy:  # a logarithm of 1 or of 0, wherever the scores move
        dz = dz.masked_fill(torch.as_tensor(factor, device=dz.device) == 0, 0.0)
    dx = dmask = dscale = dsink = None
    if for_input:
        dx = (dz if in_kernel else dz * factor).to(kind.input_dtype)
    if for_mask:
        dmask = dz.sum_to_size(ctx.mask_shape)
    if for_scale:
        # A masked element may be NaN, and has no part.
        dscale = dz * input.to(dz.dtype).masked_fill(y == (-float("inf") if kind.log else 0.0), 0.0)
        if greedy is not None:
            dscale = dscale.masked_fill(greedy, 0.0)
        dscale = dscale.sum_to_size(scale.shape).to(scale.dtype)
    if for_sink:
        dsink = sink_gradient(dy, y, sink, lse, kind)
    return dx, dmask, dscale, dsink


def sink_gradient(dy: Tensor, y: Tensor, sink: Tensor, lse: Tensor, kind: Differentiated) -> Tensor:
    """-p sum y dy, of log_softmax -p sum dy, with the sink's own p = exp(sink - lse), summed to the sink's shape."""
    arithmetic = torch.promote_types(y.dtype, torch.float32)
    z = sink.detach().to(dy.device, arithmetic)
    p = (z - lse).exp().masked_fill(z == -float("inf"), 0.0)
    if torch.is_grad_enabled():  # lse is no output. 1 - sum y has the derivative of p, though not its digits
        rest = 1.0 - (y.to(arithmetic).exp() if kind.log else y.to(arithmetic)).sum(kind.dim, keepdim=True)
        p = p + (rest - rest.detach())
    terms = dy.to(arithmetic)
    if not kind.log:
        # A row that keeps nothing is NaN, and has no part if dy is 0.
        terms = (terms * y.to(arithmetic)).masked_fill(dy == 0, 0.0)
    return (-p * terms.sum(kind.dim, keepdim=True)).sum_to_size(sink.shape).to(sink.dtype)


def differentiable_backward(
    dy: Tensor, y: Tensor, dim: int, log: bool, hides: bool, dtype: torch.dtype | None = None
) -> Tensor:
    """The gradient by torch's operations, for a second derivative; in `dtype`, or y's."""
    function = torch.ops.aten._log_softmax_backward_data if log else torch.ops.aten._softmax_backward_data
    arithmetic = torch.promote_types(y.dtype, torch.float32)
    dz = function(dy.to(arithmetic), y.to(arithmetic), dim, arithmetic).to(dtype or y.dtype)
    if not hides:
        return dz
    # A row that keeps nothing has a y and a dz of NaN, but no part in what follows.
    dz = dz.masked_fill((dy == 0).all(dim, keepdim=True), 0.0)
    return dz.masked_fill(y == -float("inf"), 0.0) if log else dz
