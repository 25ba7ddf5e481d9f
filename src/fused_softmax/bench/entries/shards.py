"""What is measured of rows in shards over ranks: this package by each transport, torch, one GPU, and other packages.

`call(*inputs)` takes this rank's shard and gives its part of the result. One GPU takes and gives the whole.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fused_softmax
from fused_softmax.bench.cases import Case
from fused_softmax.bench.catalog import NAMED, PEERS_OF_SHARDS, Maker
from fused_softmax.bench.entries.layers import layer_gradient, with_sum
from fused_softmax.bench.entries.losses import loss_gradient
from fused_softmax.bench.entries.makers import Call
from fused_softmax.bench.entries.operation import Inputs
from fused_softmax.bench.entries.operations import OPERATIONS


@dataclass(frozen=True)
class Place:
    """A rank, and the case of whole rows of which it has a part as large as each other's."""

    case: Case
    group: Any
    rank: int
    ranks: int
    device: torch.device

    @property
    def columns(self) -> int:
        return self.case.shape[-1] // self.ranks

    @property
    def first(self) -> int:
        return self.rank * self.columns

    @property
    def shard(self) -> Case:
        return replace(self.case, shape=(*self.case.shape[:-1], self.columns))

    @property
    def class_axis(self) -> int:
        """Of the result: classes are the rows of a linear layer's gradient."""
        return 0 if self.case.operation == "linear_cross_entropy" else 1

    @property
    def _sharded(self) -> tuple[int, int]:
        """(which input lies in shards, along which dim)."""
        return (1, 0) if self.case.operation == "linear_cross_entropy" else (0, 1)

    def cut(self, inputs: Inputs) -> Inputs:
        """This rank's shard, and whatever else there is, such as targets, whole."""
        which, dim = self._sharded
        part = inputs[which].narrow(dim, self.first, self.columns).contiguous()
        return *inputs[:which], part, *inputs[which + 1 :]

    def own_first(self, inputs: Inputs) -> Inputs:
        """The whole, turned so that this rank's columns stand first; targets follow."""
        which, dim = self._sharded
        turned = list(inputs)
        turned[which] = inputs[which].roll(-self.first, dim)
        if self.case.operation != "softmax":
            turned[-1] = (inputs[-1] - self.first) % self.case.shape[-1]
        return tuple(turned)


def own(place: Place, transport: Any) -> Call:
    """This package by a transport. Of a linear layer the gradient of this rank's classes and of all tokens."""
    if transport == "peer" and place.device.type != "cuda":
        raise ImportError("the transport 'peer' is for GPUs of one host")
    given: dict[str, Any] = {"group": place.group, "transport": transport}
    if place.case.operation == "softmax":
        return partial(fused_softmax.softmax, **given)
    if place.case.operation == "linear_cross_entropy":
        return layer_gradient(partial(fused_softmax.linear_cross_entropy, **given))(place.case)
    return loss_gradient(partial(fused_softmax.cross_entropy, **given))(place.case)


def _mesh(place: Place) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(place.group, place.device.type)


def loss_parallel(place: Place) -> Call:
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import loss_parallel as parallel

    mesh = _mesh(place)

    def call(x: Tensor, target: Tensor) -> Tensor:
        with torch.enable_grad(), parallel():
            x = x.detach().requires_grad_()
            logits = DTensor.from_local(x, mesh, [Shard(1)], run_check=False)
            torch.nn.functional.cross_entropy(logits, target).backward()
        return x.grad  # type: ignore[return-value]

    return call


def loss_parallel_of_layer(place: Place) -> Call:
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import loss_parallel as parallel

    mesh = _mesh(place)

    def loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        logits = torch.nn.functional.linear(x, DTensor.from_local(w, mesh, [Shard(0)], run_check=False))
        return torch.nn.functional.cross_entropy(logits, target)

    def call(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        with torch.enable_grad(), parallel():
            x, w = (each.detach().requires_grad_() for each in (x, w))
            loss(x, w, target).backward()
        dx, dw = x.grad, w.grad
        assert dx is not None
        assert dw is not None
        return with_sum(dx, dw)

    return call


def gathered(place: Place) -> Call:
    """torch's softmax of a DTensor, which gathers the rows."""
    from torch.distributed.tensor import DTensor, Shard

    mesh = _mesh(place)

    def call(x: Tensor) -> Tensor:
        y: Any = torch.softmax(DTensor.from_local(x, mesh, [Shard(1)], run_check=False), 1)
        return y.redistribute(placements=[Shard(1)]).to_local()

    return call


def one_gpu(place: Place) -> Call:
    """This package on the whole, which no rank shares."""
    return OPERATIONS[place.case.operation].own(place.case)


def liger(place: Place) -> Call:
    from liger_kernel.transformers import LigerVocabParallelCrossEntropy

    loss = LigerVocabParallelCrossEntropy()
    of_rows = lambda x, target: loss(x.unsqueeze(1), target.unsqueeze(1), place.group).mean()  # noqa: E731
    return loss_gradient(of_rows)(place.case)


def megatron(place: Place) -> Call:
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    def of_rows(x: Tensor, target: Tensor) -> Tensor:
        # It overwrites logits of float32, which others read too.
        x = x.clone() if x.dtype == torch.float32 else x
        return fused_vocab_parallel_cross_entropy(x.unsqueeze(1), target.unsqueeze(1), place.group).mean()

    return loss_gradient(of_rows)(place.case)


def flash_attn(place: Place) -> Call:
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    return loss_gradient(lambda x, target: cross_entropy_loss(x, target, process_group=place.group)[0].mean())(
        place.case
    )


PROVIDERS: dict[str, dict[str, Maker]] = {
    operation: {name: NAMED[name].over_ranks[operation] for name in names}
    for operation, names in PEERS_OF_SHARDS.items()
}
