"""Who computes a call: this package's kernels, a registered operator, a DTensor's shards, or torch's operations."""

import os
import warnings
from enum import Enum, auto
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from fused_softmax.core.checks import CHECK

INTERPRET = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"  # CPU tensors run on the kernels, interpreted
_TRACED_TYPES = (Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)

_is_seen = torch._C._is_torch_function_mode_enabled  # False where torch's functions are switched off
_said: set[tuple[str, str]] = set()


class Route(Enum):
    KERNEL = auto()  # on plain tensors, with nothing watching
    OPERATOR = auto()  # a compiler, export, vmap or a mode watches: one node of torch.ops.fused_softmax
    SHARDS = auto()  # a DTensor: each rank works on its own shard
    COMPOSED = auto()  # of torch's operations


class Decision(NamedTuple):
    """A call's route, why it goes there, and what would keep it on the kernels, if anything does."""

    route: Route
    reason: str
    remedy: str = ""


def route_of(
    name: str, *tensors: Tensor, refused: str = "", batches: bool = True, shards: bool = False, holds: str = ""
) -> Route:
    """The route of a call of the function `name` on these tensors, the input first.

    refused: why the kernels do not take these dtypes, sizes or options, if they do not. batches: whether the operator
    has a rule for vmap. shards: whether a DTensor's shards can be worked on one by one. holds: what torch's operations
    would have in memory, of which a call on a device with kernels warns, once for each reason.
    """
    route, reason, remedy = decide(*tensors, refused=refused, batches=batches, shards=shards)
    if route is Route.COMPOSED and holds and on_device(tensors[0]):
        _say_once(name, holds, reason, remedy)
    return route


def decide(*tensors: Tensor, refused: str = "", batches: bool = True, shards: bool = False) -> Decision:
    """As route_of, with the reason."""
    watcher = None if refused else watcher_of(*tensors)
    if not refused and watcher is None:
        return Decision(Route.KERNEL, "plain tensors, with nothing watching")
    if shards and is_sharded(tensors[0]):
        return Decision(Route.SHARDS, "the input is a DTensor")
    if watcher is None:
        return Decision(Route.COMPOSED, refused)
    if watcher is _ON_CPU:
        return _COMPOSED_ON_CPU
    if not batches and within_functorch():
        return Decision(Route.COMPOSED, "torch.func transforms the call, and the operator has no rule for it")
    untraced = _untraced(*tensors)
    if untraced is None:
        return Decision(Route.OPERATOR, watcher.reason)
    return Decision(Route.COMPOSED, *(untraced or watcher))


def runs_here(input: Tensor, *others: Tensor) -> bool:
    """Whether these kernels take a call on these tensors as it stands."""
    return watcher_of(input, *others) is None


class Watcher(NamedTuple):
    """What keeps a call from the kernels, and what to do about it."""

    reason: str
    remedy: str = ""


_COMPILER = Watcher("torch.compile or torch.export traces the call")
_NEGATED = Watcher("a tensor has torch's neg bit", "call resolve_neg() on it first")
_BATCHED = Watcher("torch.autograd.grad(is_grads_batched=True) batches it")
_FORWARD_AD = Watcher("forward-mode AD is on, for which there are no rules")
_JIT = Watcher("torch.jit traces the call")
_TRANSFORM = Watcher("torch.func transforms the call")
_OUTSIDE = "call it outside of the mode"


def watcher_of(input: Tensor, *others: Tensor) -> Watcher | None:
    """What watches or transforms a call on these tensors, or computes it in place of the kernels.

    None if the kernels run as it stands.
    """
    if torch.compiler.is_compiling():  # first, because dynamo follows none of the others
        return _COMPILER
    kind = type(input)
    if (kind is Tensor or is_plain(kind)) and not on_device(input):  # early: torch's way has a host path of its own
        return _ON_CPU if input.is_cpu else _without_kernels(input.device.type)
    for each in (input, *others):
        if not is_plain(type(each)):
            return Watcher(f"an argument is a {type(each).__name__}, not a plain tensor", "give plain tensors")
        if each.is_neg():
            return _NEGATED
    if torch._C._functorch.is_legacy_batchedtensor(input):  # batched gradients, in torch.autograd.grad
        return _BATCHED
    if forward_ad._current_level >= 0:
        return _FORWARD_AD
    if torch.jit.is_tracing():
        return _JIT
    if torch._C._are_functorch_transforms_active():
        return _TRANSFORM
    if torch._C._len_torch_dispatch_stack():
        return Watcher(f"{_dispatch_mode()} watches the call", _OUTSIDE)
    mode = function_mode()
    if mode is not None:
        return Watcher(f"{type(mode).__name__}, a TorchFunctionMode, watches the call", _OUTSIDE)
    return None


@cache
def _without_kernels(device: str) -> Watcher:
    return Watcher(f"there are no kernels for tensors on {device}")


_ON_CPU = _without_kernels("cpu")
_COMPOSED_ON_CPU = Decision(Route.COMPOSED, _ON_CPU.reason)


def is_plain(kind: type) -> bool:
    """Whether torch's functions treat tensors of a type as they treat a Tensor.

    A Parameter is such a type, and so is one that adds no rules.
    """
    return kind is Tensor or kind is torch.nn.Parameter or _adds_no_rule(kind)


@cache
def _adds_no_rule(kind: type) -> bool:
    of_functions = getattr(kind, "__torch_function__", None) is torch._C._disabled_torch_function_impl
    return of_functions and getattr(kind, "__torch_dispatch__", None) is Tensor.__torch_dispatch__


def function_mode() -> Any:
    """The mode of functions that watches a call, or None.

    A default device (torch.set_default_device, `with torch.device(...)`) is a mode too, which only says where factory
    functions without a device allocate. It watches nothing: every factory function of this package has a device.
    """
    if not _is_seen():
        return None
    stack = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return next((mode for mode in stack if type(mode) is not DeviceContext), None)


def _dispatch_mode() -> str:
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return f"{type(modes[-1]).__name__}, a TorchDispatchMode," if modes else "a TorchDispatchMode"


def readable(target: Tensor) -> bool:
    """Whether a call may look at the values of its targets: on a CPU, where nobody waits, if nothing is watching."""
    return (
        not torch.compiler.is_compiling()
        and type(target) is Tensor
        and target.device.type == "cpu"
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._len_torch_dispatch_stack()
    )


def is_unwatched(input: Tensor, *others: Tensor) -> bool:
    """Whether torch's operations may compute a call on these tensors some rows at a time."""
    return runs_here(input, *others) or all(map(readable, (input, *others)))


def checks_values(input: Tensor, *values: Tensor | None) -> bool:
    """Whether a call raises for wrong values: on a CPU, where nobody waits, and with FUSED_SOFTMAX_CHECK=1.

    What cannot be read is never checked.
    """
    if CHECK:
        return all(each is None or _has_values(each) for each in values)
    return not on_device(input) and all(each is None or readable(each) for each in values)


def _has_values(tensor: Tensor) -> bool:
    """Whether a tensor has values that can be read, if need be after a wait for its device."""
    return (
        not torch.compiler.is_compiling()
        and is_plain(type(tensor))
        and not tensor.is_meta
        and not torch.jit.is_tracing()
        and not any(level.key() == TransformType.Vmap for level in torch._C._functorch.get_interpreter_stack() or ())
        and not any(mode.is_infra_mode() for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack())
        and not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def on_device(tensor: Tensor) -> bool:
    return tensor.is_cuda or (INTERPRET and tensor.device.type == "cpu")


def needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def resolved(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Without torch's neg bit, which a kernel does not see: the imaginary part of a conjugate is a view that has it."""
    return tuple([each.resolve_neg() if each is not None and each.is_neg() else each for each in tensors])


def apart(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Views that each have a gradient of their own, even if one tensor was made from another or is the same."""
    return tuple([each if each is None else each.view_as(each) for each in tensors])


def batched(*tensors: Tensor | None) -> bool:
    """Whether a tensor stands for many.

    It does in torch.autograd.grad(is_grads_batched=True), and in torch.func.vmap.
    """
    of_torch = torch._C._functorch
    return any(
        each is not None and (of_torch.is_legacy_batchedtensor(each) or of_torch.is_batchedtensor(each))
        for each in tensors
    )


def is_sharded(x: Any) -> bool:
    """Whether x is a DTensor, told by its attributes: its module takes a second to import."""
    return type(x) is not Tensor and hasattr(type(x), "to_local")


def _untraced(*tensors: Tensor) -> Watcher | tuple[()] | None:
    """Why a call becomes no registered operator; None if it does, for a compiler, export, vmap or a mode watches.

    () where nothing but what `watcher_of` found keeps it from that.
    """
    if torch.compiler.is_compiling():
        if not all(type(tensor) in _TRACED_TYPES for tensor in tensors):
            return _NOT_TRACED
        if not all(on_device(tensor) for tensor in tensors):
            return _NO_KERNELS
        return _DIFFERENTIATED if _transformed() else None
    if not all(type(tensor) in _TRACED_TYPES and on_device(tensor) for tensor in tensors):
        return ()
    watched = (
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or any(type(tensor) is FakeTensor for tensor in tensors)
    )
    if not watched or torch.jit.is_tracing():
        return ()
    return _DIFFERENTIATED if _transformed() else None


_NOT_TRACED = Watcher("an argument is no plain tensor where a compiler traces the call", "give plain tensors")
_NO_KERNELS = Watcher("there are no kernels for the device of these tensors")
_DIFFERENTIATED = Watcher("torch.func.grad, jvp or forward-mode AD differentiates it, for which there are no rules")


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


def _say_once(name: str, holds: str, reason: str, remedy: str) -> None:
    """Warn that torch's operations compute a call: once for each function and reason."""
    if (name, reason) not in _said:
        _said.add((name, reason))
        warnings.warn(
            f"fused_softmax.{name}: torch's operations compute this call, with {holds} in memory, since {reason}"
            f"{'; ' if remedy else ''}{remedy}",
            RuntimeWarning,
            stacklevel=5,  # whoever calls the public function
        )


# A compiler that traces a call runs it once, with what the call says.
_say_once._dynamo_marked_constant = True  # type: ignore[attr-defined]
