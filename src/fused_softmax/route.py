"""Who computes a call: this package's kernels, a registered operator, a DTensor's shards, or torch's operations."""

import os
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

INTERPRET = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"  # CPU tensors run on the kernels, interpreted
_TRACED_TYPES = (Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)


class Route(Enum):
    KERNEL = auto()  # on plain tensors, with nothing watching
    OPERATOR = auto()  # a compiler, export, vmap or a mode watches: one node of torch.ops.fused_softmax
    SHARDS = auto()  # a DTensor: each rank works on its own shard
    COMPOSED = auto()  # of torch's operations


def route_of(*tensors: Tensor, takes: bool = True, batches: bool = True, shards: bool = False) -> Route:
    """The route of a call on these tensors, the input first.

    takes: whether the kernels have these dtypes and sizes. batches: whether the operator has a rule for vmap. shards:
    whether a DTensor's shards can be worked on one by one.
    """
    if takes and runs_here(*tensors):
        return Route.KERNEL
    if shards and len(tensors) == 1 and is_sharded(tensors[0]):
        return Route.SHARDS
    if takes and (batches or not within_functorch()) and _traced(*tensors):
        return Route.OPERATOR
    return Route.COMPOSED


def runs_here(input: Tensor, *others: Tensor) -> bool:
    """Whether these kernels take a call on these tensors as it stands."""
    return (
        not torch.compiler.is_compiling()  # first, for dynamo follows none of the others
        and type(input) is Tensor
        and all(type(other) in (Tensor, torch.nn.Parameter) and not other.is_neg() for other in others)
        and on_device(input)
        and not input.is_neg()
        and not torch._C._functorch.is_legacy_batchedtensor(input)  # batched gradients, in torch.autograd.grad
        and forward_ad._current_level < 0
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
    )


def readable(target: Tensor) -> bool:
    """Whether a call may look at the values of its targets: on a CPU, where nobody waits, and with nothing watching."""
    return (
        not torch.compiler.is_compiling()
        and type(target) is Tensor
        and target.device.type == "cpu"
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._len_torch_dispatch_stack()
    )


def on_device(tensor: Tensor) -> bool:
    return tensor.is_cuda or (INTERPRET and tensor.device.type == "cpu")


def needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def resolved(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Without torch's neg bit, which a kernel does not see: the imaginary part of a conjugate is a view that has it."""
    return tuple([each.resolve_neg() if each is not None and each.is_neg() else each for each in tensors])


def batched(*tensors: Tensor | None) -> bool:
    """Whether one stands for many: a gradient of torch.autograd.grad(is_grads_batched=True), or in torch.func.vmap."""
    of_torch = torch._C._functorch
    return any(
        each is not None and (of_torch.is_legacy_batchedtensor(each) or of_torch.is_batchedtensor(each))
        for each in tensors
    )


def is_sharded(x: Tensor) -> bool:
    """Whether x is a DTensor, told by its attributes: its module takes a second to import."""
    return type(x) is not Tensor and hasattr(type(x), "to_local")


def _traced(*tensors: Tensor) -> bool:
    """Whether a call becomes a registered operator, for a compiler, export, vmap or a mode watches it."""
    if not all(type(tensor) in _TRACED_TYPES and on_device(tensor) for tensor in tensors):
        return False
    if torch.compiler.is_compiling():
        return not _transformed()
    watched = (
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or any(type(tensor) is FakeTensor for tensor in tensors)
    )
    return bool(watched) and not torch.jit.is_tracing() and not _transformed()


def _transformed() -> bool:
    """Whether something differentiates by rules that operators cannot have: functorch's grad and jvp, forward mode."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return forward_ad._current_level >= 0 or any(level.key() != TransformType.Vmap for level in levels)


def within_functorch() -> bool:
    """Whether a transform of functorch's runs; its own functionalization, by which AOTAutograd traces, is none."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() != TransformType.Functionalize for level in levels)


# As torch.compiler.assume_constant_result, which imports dynamo: it asks while it traces, and guards on the answer.
_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]
within_functorch._dynamo_marked_constant = True  # type: ignore[attr-defined]
