"""Cross-entropy of a linear layer that is a DTensor: each rank multiplies by its own classes."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fused_softmax.ops.cross_entropy_output import CrossEntropyOutput, Wanted
from fused_softmax.ops.linear_by_rows import linear_of
from fused_softmax.ops.linear_sharded import LinearSharded, OfCall
from fused_softmax.ops.loss_on_shards import Placed, cut_once
from fused_softmax.options import Loss
from fused_softmax.route import is_sharded, needs_grad


def linear_loss_on_shards(
    input: Any, linear_weight: Any, linear_bias: Any, target: Tensor, loss: Loss, wanted: Wanted, dtype: torch.dtype,
    chunk_size: int | None, accumulate: str, skip_ignored: bool = False,
) -> Tensor | CrossEntropyOutput:  # fmt: skip
    """The loss of input @ linear_weight.T + linear_bias, of which linear_weight is a DTensor, placed as torch does.

    input, linear_bias, target, the loss's weight: DTensors, or whole tensors that are the same on all ranks.
    skip_ignored: only that the lse of ignored rows is 0: their logits are made all the same.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = linear_weight.device_mesh
    if not is_sharded(input):
        input = DTensor.from_local(input, mesh, [Replicate()] * mesh.ndim, run_check=False)
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
        if not is_sharded(linear_bias):
            linear_bias = DTensor.from_local(linear_bias, mesh, [Replicate()] * mesh.ndim, run_check=False)
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
