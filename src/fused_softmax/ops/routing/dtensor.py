"""Routing of DTensors whose rows lie in shards: each rank routes its own rows, and sums are those of all ranks."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fused_softmax.core.route import Route, route_of, watcher_of
from fused_softmax.ops.routing.launches import RoutedRows, refused_sizes
from fused_softmax.ops.routing.options import Routing
from fused_softmax.ops.routing.reference import Routed, RouteOutput, Sums, output_of
from fused_softmax.ops.routing.rows import with_states
from fused_softmax.ranks.dtensor import Axes, Cut, cut_of, tied


def route_on_shards(
    name: str, rows_of: Callable[[Tensor, Routing], Routed], logits: Any, options: Routing
) -> RouteOutput:  # fmt: skip
    """`route` of logits that are a DTensor, as DTensors. rows_of: routes a rank's rows where kernels do not."""
    leading: Axes = tuple(range(logits.ndim - 1))
    of_experts: Axes = (*leading, None)
    axes: dict[str, Axes] = {"bias": (None,), "noise": of_experts, "indices": of_experts, "row_mask": leading}
    placed = {argument: (each, axes[argument]) for argument, each in options.tensors.items()}
    words = ["rows"] if logits.ndim == 2 else [f"rows of dim {dim}" for dim in leading]
    cut = cut_of(name, {"logits": (logits, of_experts), **placed}, logits.shape[:-1], words)
    if options.sequence_length is not None:
        _check_sequences(name, cut, tuple(logits.shape), options.sequence_length)
    local = cut.local(logits, of_experts)
    options = Routing(**options.options() | {argument: cut.local(*each) for argument, each in placed.items()})
    routed = rows_of_rank(name, local, options, rows_of)
    if options.sums:
        of_rank = {field: each for field, each in routed.sums._asdict().items() if each is not None}
        sums = Sums(**{field: _of_all(cut, tied(each, local)) for field, each in of_rank.items()})
        routed = routed._replace(sums=sums)
    found = output_of(routed, local, options)

    def result(each: Tensor | None, axes: Axes) -> Any:
        return None if each is None else cut.result(tied(each, local) if each.requires_grad else each, axes)

    return RouteOutput(
        result(found.weights, of_experts), result(found.indices, of_experts), result(found.counts, (None,)),
        result(found.prob_sums, (None,)), result(found.aux_loss, ()), result(found.z_loss, ()),
        result(found.dense, of_experts),
    )  # fmt: skip


def rows_of_rank(
    name: str, logits: Tensor, options: Routing, rows_of: Callable[[Tensor, Routing], Routed]
) -> Routed:  # fmt: skip
    """The rows of plain logits, those of a rank, by kernels where these take them as they stand."""
    watcher = watcher_of(logits, *options.tensors.values())
    refused = refused_sizes(logits.shape[:-1].numel(), logits.shape[-1], options) or (watcher.reason if watcher else "")
    if route_of(name, logits, refused=refused) is not Route.KERNEL:
        return rows_of(logits, options)
    asked = replace(options, return_counts=options.sums, return_aux_loss=options.in_sequences)
    rows = with_states(logits, asked)
    return Routed(rows.weights, rows.indices, rows.dense, _sums_of(rows, asked))


def _sums_of(rows: RoutedRows, options: Routing) -> Sums:
    """Of the rows of a rank. Their gradients, in which all ranks' rows count, are those of what its kernel adds up."""
    if not options.sums:
        return Sums()
    found: Any = rows
    routed = found.states[:, 1] > 0
    n_rows = routed.sum(dtype=torch.float64)
    squares = balance = n_sequences = None
    if options.return_z_loss:
        squares = found.z_loss.double() * n_rows
    if options.return_aux_loss:
        n_sequences = routed.view(-1, options.length(len(routed))).any(1).sum(dtype=torch.float64)
        balance = found.aux_loss.double() * n_sequences
    return Sums(found.counts, found.prob_sums.double(), n_rows, squares, balance, n_sequences)


def _of_all(cut: Cut, of_rank: Tensor) -> Tensor:
    """The sum over the ranks that have other rows, the same on all of them."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    partial = [Replicate() if each.is_replicate() else Partial() for each in cut.placements]
    return DTensor.from_local(of_rank, cut.mesh, partial, run_check=False).full_tensor()


def _check_sequences(name: str, cut: Cut, shape: tuple[int, ...], length: int) -> None:
    """ValueError where a sequence has rows on several ranks."""
    for axis, size in enumerate(cut.sizes):
        inner = 1
        for each in cut.sizes[axis + 1 :]:
            inner *= each
        for i, placement in enumerate(cut.placements):
            if getattr(placement, "dim", None) == axis:
                size = -(-size // cut.mesh.size(i))  # as DTensor cuts a dim
                if (size * inner) % length:
                    raise ValueError(
                        f"{name}: sequence_length must divide the {size * inner} rows of logits of shape {shape} that "
                        f"lie together on a rank, for no sequence is spread over ranks, got {length}"
                    )
