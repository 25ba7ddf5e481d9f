"""What is measured of rows in shards over ranks: this package by each transport, torch, one GPU, and other packages.

A provider is a function of a `Place`. It imports what it needs and returns `call(*inputs)`, which takes this rank's
shard and gives its part of the result. One GPU takes and gives the whole.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fused_softmax
from fused_softmax.bench.cases import Case
from fused_softmax.bench.catalog import ONE_GPU, OWN, PEERS_OF_SHARDS
from fused_softmax.bench.entries.losses import loss_gradient
from fused_softmax.bench.entries.operation import Inputs, widest
from fused_softmax.bench.entries.operations import OPERATIONS
from fused_softmax.bench.entries.providers import Call

Provider = Callable[["Place"], Call]


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


def own(transport: str, function: Callable[[Place, str], Call]) -> Provider:
    def provide(place: Place) -> Call:
        if transport == "peer" and place.device.type != "cuda":
            raise ImportError("the transport 'peer' is for GPUs of one host")
        return function(place, transport)

    return provide


def _own_softmax(place: Place, transport: Any) -> Call:
    return lambda x: fused_softmax.softmax(x, group=place.group, transport=transport)


def _own_loss(place: Place, transport: Any) -> Call:
    return loss_gradient(partial(fused_softmax.cross_entropy, group=place.group, transport=transport))(place.case)


def _own_linear(place: Place, transport: Any) -> Call:
    return _layer(place, partial(fused_softmax.linear_cross_entropy, group=place.group, transport=transport))


def _layer(place: Place, function: Call) -> Call:
    """The gradient of this rank's classes; that of the tokens, which all ranks have, is summed into the first one."""

    def call(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        with torch.enable_grad():
            x, w = (each.detach().requires_grad_() for each in (x, w))
            dx, dw = torch.autograd.grad(function(x, w, target), (x, w))
        dw[0] += dx.sum(0, dtype=widest(dx)) * dx.shape[0] ** -0.5
        return dw

    return call


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
        dw[0] += dx.sum(0, dtype=widest(dx)) * dx.shape[0] ** -0.5
        return dw

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


_FUNCTIONS = {
    "softmax": (_own_softmax, {"torch DTensor": gathered}),
    "cross_entropy_gradient": (
        _own_loss,
        {"loss_parallel": loss_parallel, "liger": liger, "megatron": megatron, "flash-attn": flash_attn},
    ),
    "linear_cross_entropy": (_own_linear, {"loss_parallel": loss_parallel_of_layer}),
}


def _providers(operation: str) -> dict[str, Provider]:
    function, others = _FUNCTIONS[operation]
    ours = {f"{OWN} {transport}": own(transport, function) for transport in ("collective", "peer")}
    found: dict[str, Provider] = {**ours, ONE_GPU: one_gpu, **others}
    return {name: found[name] for name in PEERS_OF_SHARDS[operation]}


PROVIDERS = {operation: _providers(operation) for operation in PEERS_OF_SHARDS}
