"""Rows routed by kernels, with their gradient; a second derivative and batched gradients are torch's operations."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fused_softmax.core.launched import Call
from fused_softmax.core.no_gradient import saved_of
from fused_softmax.core.route import batched, needs_grad, resolved
from fused_softmax.ops.routing import reference
from fused_softmax.ops.routing.launches import OfResults, RoutedRows, RouteRows, backward, forward, rows_of_call
from fused_softmax.ops.routing.options import Routing
from fused_softmax.ops.routing.reference import RouteOutput


def output_of(rows: RoutedRows, leading: tuple[int, ...], options: Routing) -> RouteOutput:
    """The result of a call, whose logits have leading dims."""
    weights, indices, counts, prob_sums, aux_loss, z_loss, dense, *_ = rows
    if len(leading) != 1:
        weights, indices = weights.view(*leading, options.k), indices.view(*leading, options.k)
        dense = None if dense is None else dense.view(*leading, dense.shape[1])
    if not options.return_counts:
        counts = prob_sums = None
    return RouteOutput(weights, indices, counts, prob_sums, aux_loss, z_loss, dense)


def with_gradient(given: RouteRows, options: Routing, run: Call) -> RoutedRows:
    """What `run`, a call that `prepare_route` made, finds of rows; with the gradient of the logits."""
    weights, indices, counts, prob_sums, aux_loss, z_loss, dense = _apply(*given, (options, run))
    return RoutedRows(weights, indices, counts, prob_sums, aux_loss, z_loss, dense, None, None, None)


def with_states(logits: Tensor, options: Routing) -> RoutedRows:
    """What kernels find of rows, with their states, and with the gradient of the logits where it is wanted."""
    given = rows_of_call(logits, options)
    rows = forward(given._replace(x=given.x.detach()), options, states=True)
    if not needs_grad(logits):
        return rows
    alike = replace(options, bias=None, noise=None, indices=None, row_mask=None)
    return with_gradient(given, alike, lambda *_: rows)._replace(states=rows.states)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, noise, indices, row_mask, how):
        ctx.options, run = how
        rows = run(x, bias, noise, indices, row_mask)
        counts = rows.counts if rows.of_sequences is None else rows.of_sequences
        saved = x, noise, indices, row_mask, rows.weights, rows.indices, rows.states, counts, rows.shares
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(*[each for each in (rows.indices, rows.counts) if each is not None])
        ctx.set_materialize_grads(False)
        return rows[:7]

    @staticmethod
    def backward(ctx, dweights, dindices, dcounts, dprob_sums, daux_loss, dz_loss, ddense):
        of_results = OfResults(*resolved(dweights, dprob_sums, daux_loss, dz_loss, ddense))
        dx = None
        if any(each is not None for each in of_results):
            dx = gradient_of(saved_of(ctx, "route"), of_results, ctx.options)
        return dx, None, None, None, None, None


# As its apply, without its search for functorch's wrappers: a call under a transform does not come here.
_apply = super(torch.autograd.Function, _Route).apply


def gradient_of(saved: Any, of_results: OfResults, options: Routing) -> Tensor:
    """The gradient of the logits. saved: x, noise, indices and row_mask of a call, and what was found of its rows."""
    if torch.is_grad_enabled() or batched(*of_results):
        x, noise, indices, row_mask, _, ids, *_ = saved
        return differentiable_gradient(x, noise, indices, row_mask, ids, of_results, options)
    return gradient_by_kernels(saved, of_results, options)


def gradient_by_kernels(saved: Any, of_results: OfResults, options: Routing) -> Tensor:
    x, noise, _, _, weights, ids, states, counts, shares = saved
    # Hooks of saved tensors may return other strides.
    weights, ids = weights.contiguous(), ids.contiguous()
    noise, states, counts, shares = (
        each if each is None else each.contiguous() for each in (noise, states, counts, shares)
    )
    rows = RoutedRows(weights, ids, counts, None, None, None, None, states, None, shares)
    given = RouteRows(x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous(), None, noise, None, None)
    return backward(given, rows, of_results, options)


def differentiable_gradient(
    x: Tensor, noise: Tensor | None, indices: Tensor | None, row_mask: Tensor | None, ids: Tensor,
    of_results: OfResults, options: Routing,
) -> Tensor:  # fmt: skip
    """The same by torch's operations, of the choices that were made."""
    if indices is None:  # a row that is routed has all of its choices
        indices, row_mask = ids, ids[:, 0] >= 0
    replays = replace(options, indices=indices, row_mask=row_mask, noise=noise, bias=None, n_groups=1, groups_kept=None)
    with torch.enable_grad():
        leaf = x if x.requires_grad else x.detach().requires_grad_()
        found = reference.output_of(reference.rows_of(leaf, replays), leaf, replays)
    results = found.weights, found.prob_sums, found.aux_loss, found.z_loss, found.dense
    pairs: list[Any] = [(result, d) for result, d in zip(results, of_results, strict=True) if d is not None]
    (dx,) = torch.autograd.grad(
        [result for result, _ in pairs], [leaf], [d for _, d in pairs], create_graph=torch.is_grad_enabled(),
    )  # fmt: skip
    return dx
