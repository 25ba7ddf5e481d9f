"""The rules of routing as a registered operator and its gradient: what runs, fakes, autograd, vmap.

Of rows [n_rows, n_experts]; what is not asked for is empty. The last three results are for the gradient.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fused_softmax.core.one_dim import in_front, one_by_one
from fused_softmax.core.route import on_device
from fused_softmax.ops.routing import reference
from fused_softmax.ops.routing.launches import OfResults, RoutedRows, forward, refused_sizes, rows_of_call
from fused_softmax.ops.routing.options import Routing
from fused_softmax.ops.routing.rows import differentiable_gradient, gradient_by_kernels

ROUTE = (
    f"(Tensor logits, {Routing.schema()}) -> (Tensor weights, Tensor indices, Tensor counts, Tensor prob_sums, "
    "Tensor aux_loss, Tensor z_loss, Tensor dense, Tensor states, Tensor of_sequences, Tensor shares)"
)
BACKWARD = (
    "(Tensor logits, Tensor weights, Tensor chosen, Tensor states, Tensor of_sequences, Tensor shares, "
    f"Tensor? dweights, Tensor? dprob_sums, Tensor? daux_loss, Tensor? dz_loss, Tensor? ddense, {Routing.schema()}) "
    "-> Tensor"
)
_INTEGERS, _OF_EXAMPLES = (1, 2, 8), (2, 3, 4, 5, 9)  # of the results


def _runs(logits: Tensor, options: Routing) -> bool:
    return on_device(logits) and not refused_sizes(logits.shape[0], logits.shape[1], options)


def route(logits, *given):
    options = Routing.of_traced(given)
    with torch._C.DisableTorchFunction():  # a mode of functions has seen the call
        if _runs(logits, options):
            found = forward(rows_of_call(logits, options), options, states=True)
        else:
            rows = reference.output_of(reference.rows_of(logits, options), logits, options)
            found = RoutedRows(*rows, None, None, None)
        return tuple(
            logits.new_empty(0, dtype=torch.int32 if i in _INTEGERS else torch.float32)
            if each is None
            else each.contiguous()
            for i, each in enumerate(found)
        )


def fake_route(logits, *given):
    options = Routing.of_traced(given)
    n_rows, n_experts = logits.shape
    runs, sums = _runs(logits, options), options.sums
    n_sequences = n_rows // options.length(n_rows)
    n = [] if options.examples is None else [options.examples]
    shapes: tuple[list[int] | None, ...] = (
        [n_rows, options.k], [n_rows, options.k], *[[*n, n_experts] if sums else None] * 2,
        n if options.return_aux_loss else None, n if options.return_z_loss else None,
        [n_rows, n_experts] if options.dense else None,
        [n_rows, 2 if options.score == "softmax" else 3] if runs and options.totals else None,
        [n_sequences, n_experts] if runs and options.in_sequences else None,
        [*n, 2 + n_sequences // (options.examples or 1)] if runs and sums else None,
    )  # fmt: skip
    return tuple(
        logits.new_empty([0] if shape is None else shape, dtype=torch.int32 if i in _INTEGERS else torch.float32)
        for i, shape in enumerate(shapes)
    )


def save_route(ctx, inputs, output):
    logits, *given = inputs
    weights, chosen, counts, *_, states, of_sequences, shares = output
    options = Routing.of_traced(given)
    ctx.options = replace(options, bias=None, noise=None, indices=None, row_mask=None)
    ctx.save_for_backward(
        logits, options.noise, options.indices, options.row_mask, weights, chosen, states,
        of_sequences if options.in_sequences else counts, shares,
    )  # fmt: skip
    ctx.mark_non_differentiable(chosen, counts, states, of_sequences, shares)
    ctx.set_materialize_grads(False)


def route_gradient(ctx, dweights, dchosen, dcounts, dprob_sums, daux_loss, dz_loss, ddense, *_):
    logits, noise, indices, row_mask, weights, chosen, states, counts, shares = ctx.saved_tensors
    asked = ctx.options.return_aux_loss, ctx.options.return_z_loss, ctx.options.dense
    daux_loss, dz_loss, ddense = (
        each if wanted else None for each, wanted in zip((daux_loss, dz_loss, ddense), asked, strict=True)
    )
    of_results = OfResults(dweights, dprob_sums if ctx.options.sums else None, daux_loss, dz_loss, ddense)
    dx: Tensor | None = None
    if ctx.needs_input_grad[0] and any(each is not None for each in of_results):
        if torch.is_grad_enabled():
            dx = differentiable_gradient(logits, noise, indices, row_mask, chosen, of_results, ctx.options)
        else:
            options = replace(ctx.options, noise=noise, indices=indices, row_mask=row_mask)
            operator = torch.ops.fused_softmax.route_backward.default
            dx = operator(logits, weights, chosen, states, counts, shares, *of_results, *options.traced())
    return (dx, *[None] * (len(ctx.needs_input_grad) - 1))


def route_backward(logits, weights, chosen, states, counts, shares, *given):
    with torch._C.DisableTorchFunction():
        of_results, options = OfResults(*given[:5]), Routing.of_traced(given[5:])
        if not _runs(logits, options):
            return differentiable_gradient(
                logits, options.noise, options.indices, options.row_mask, chosen, of_results, options
            )
        noise = options.noise
        saved = logits, noise, options.indices, options.row_mask, weights, chosen, states, counts, shares
        return gradient_by_kernels(saved, of_results, options)


def fake_route_backward(logits, *_):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


# vmap: the batch is more rows, in so many examples. A bias is one of all rows, so a batch of them takes a launch for
# each; a gradient, whose choices are made, needs none.


def batched_route(operator, info, in_dims, logits, *given):
    options = Routing.of_traced(given)
    biased = dict(zip(Routing.FORMULA, in_dims[1:], strict=False)).get("bias") is not None
    if biased or not info.batch_size:
        return one_by_one(operator, info, in_dims, (logits, *given))
    logits = _of_all(logits, in_dims[0], info)
    found = list(operator(logits, *_options_of_all(options, in_dims[1:], info).traced()))
    if not options.in_sequences:
        found[8] = found[8].new_empty(0)
    for i, each in enumerate(found):
        if each.shape != (0,) and (i not in _OF_EXAMPLES or options.examples is not None):
            found[i] = each.unflatten(0, (info.batch_size, -1))
    return tuple(found), tuple(None if each.shape == (0,) else 0 for each in found)


def batched_route_backward(operator, info, in_dims, *arguments):
    if not info.batch_size:
        return torch.empty_like(in_front(arguments[0], in_dims[0], 0)), 0
    options = replace(Routing.of_traced(arguments[11:]), bias=None)
    n = options.examples is not None
    of_rows = *[True] * 4, options.in_sequences, n, True, n, n, n, True
    tensors = [
        each if each is None else _of_all(each, at, info, rows)
        for each, at, rows in zip(arguments[:11], in_dims[:11], of_rows, strict=True)
    ]
    dx = operator(*tensors, *_options_of_all(options, in_dims[11:], info).traced())
    return dx.unflatten(0, (info.batch_size, -1)), 0


def _of_all(each: Tensor, at: int | None, info, rows: bool = True) -> Tensor:
    each = in_front(each, at, info.batch_size)
    return each.flatten(0, 1) if rows else each


def _options_of_all(options, in_dims, info):
    at = dict(zip(Routing.FORMULA, in_dims, strict=False))
    tensors = {name: _of_all(each, at[name], info) for name, each in options.tensors.items() if name != "bias"}
    return replace(options, **tensors, examples=info.batch_size * (options.examples or 1) if options.sums else None)
