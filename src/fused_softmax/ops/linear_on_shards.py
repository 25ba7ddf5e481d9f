"""Cross-entropy of a linear layer that is a DTensor: each rank multiplies by its own classes."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fused_softmax.ops.cross_entropy_output import CrossEntropyOutput, Wanted
from fused_softmax.ops.linear_by_rows import linear_of
from fused_softmax.ops.linear_sharded import LinearSharded, OfCall
from fused_softmax.ops.loss_on_shards import Placed, cut_once
from fused_softmax.ops.shards import Cut, as_dtensor, tied
from fused_softmax.options import Loss
from fused_softmax.route import is_sharded, needs_grad


def linear_loss_on_shards(
    input: Any, linear_weight: Any, linear_bias: Any, target: Tensor, loss: Loss, wanted: Wanted, dtype: torch.dtype,
    chunk_size: int | None, accumulate: str, skip_ignored: bool = False,
) -> Tensor | CrossEntropyOutput:  # fmt: skip
    """The loss of input @ linear_weight.T + linear_bias, which are DTensors of one mesh, placed as torch does.

    target, the loss's weight: DTensors, or whole tensors that are the same on all ranks.
    skip_ignored: only that the lse of ignored rows is 0: their logits are made all the same.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    mesh = linear_weight.device_mesh
    weight, kept = cut_once(linear_weight, 0, 1)
    # Rows over the ranks among which the classes lie are gathered: each rank has a part of every row's logits.
    of_rows = [
        each if type(each) is Shard and each.dim < input.ndim - 1 and i != kept else Replicate()
        for i, each in enumerate(input.placements)
    ]
    placed = Placed("linear_cross_entropy", mesh, of_rows, kept, target.shape)
    x, t = input.redistribute(placements=of_rows).to_local(), placed.targets(target)
    # Ranks that have other rows have another part of the gradient of these.
    of_gradient = [Shard(0) if i == kept else Partial() if i in placed.over else Replicate() for i in range(mesh.ndim)]
    w = weight.to_local(grad_placements=of_gradient)
    bias = None
    if linear_bias is not None:
        linear_bias = as_dtensor(linear_bias, mesh)
        bias = linear_bias.redistribute(placements=weight.placements).to_local(grad_placements=of_gradient)

    rows, flat = x.reshape(-1, x.shape[-1]), t.reshape(-1).contiguous()
    shards = placed.shards(linear_weight.shape[0])
    linear = linear_of(rows, w, chunk_size, accumulate, needs_grad(w), shards.sizes)
    of_call = OfCall(
        replace(loss, weight=placed.weight(loss.weight)), linear, shards, dtype, summed=True, over=placed.groups
    )  # fmt: skip
    asked = [each is not None and needs_grad(each) for each in (rows, w, bias)]
    y, lse, z, *stats = LinearSharded.apply(rows, w, bias, flat, of_call, asked)
    if skip_ignored and wanted.lse:
        lse = lse.masked_fill(flat.long() == loss.ignore_index, 0.0)
    return placed.output(y, lse, z, stats, wanted, loss.reduction)


def logits_on_shards(input: Any, linear_weight: Any, linear_bias: Any) -> Tensor:
    """input @ linear_weight.T + linear_bias as a DTensor: each rank has all classes of its own rows."""
    from torch.distributed.tensor import Replicate, Shard

    placements = [
        each if type(each) is Shard and each.dim < input.ndim - 1 else Replicate() for each in input.placements
    ]  # torch's own rule flattens rows, which it refuses where they lie unevenly
    cut, axes = Cut(input.device_mesh, tuple(placements), input.shape), [*range(input.ndim - 1), None]
    x, w = cut.local(input, axes), cut.local(linear_weight, (None, None))
    bias = None if linear_bias is None else cut.local(linear_bias, (None,))
    return cut.result(tied(torch.nn.functional.linear(x, w, bias), x, w, bias), axes)


def own_classes(name: str, argument: str, tensor: Any, group: Any) -> Any:
    """This rank's part of a tensor whose classes lie in shards over the ranks of `group`; a plain one is that part."""
    from torch.distributed import get_process_group_ranks
    from torch.distributed.tensor import Shard

    if tensor is None or not is_sharded(tensor):
        return tensor
    mesh, placements = tensor.device_mesh, list(tensor.placements)
    if mesh.ndim != 1 or placements != [Shard(0)]:
        raise ValueError(
            f"{name}: {argument} must lie in [Shard(0)] over a mesh of one dim where group= is given, got {placements} "
            f"over {mesh}"
        )
    if get_process_group_ranks(mesh.get_group()) != get_process_group_ranks(group):
        raise ValueError(
            f"{name}: group= must have the ranks of {argument}'s mesh, {get_process_group_ranks(mesh.get_group())}, in "
            f"their order, got {get_process_group_ranks(group)}"
        )
    return tensor.to_local()
