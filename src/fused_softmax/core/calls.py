"""The cache of prepared calls: `find` looks one up, `keep` stores one, and `kept` does both.

A call is kept as a function of its tensors and numbers, which allocates the result and launches: it flattens nothing,
plans nothing and prepares nothing. With it is kept what makes the same call for another number of rows, so that a
server's next batch size costs little more.

A call is found by its operator, its options and its input's shape. Then a guard compares everything else that it
depends on: strides, dtypes, devices, whether a gradient is wanted, and the modes that change what a call means
(autocast, inference, functorch's transforms). The cache holds no tensor and no address. Numbers that change from call
to call are no part of it. If anything watches or transforms a call, nothing is found.
"""

from collections.abc import Callable
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fused_softmax.core.launched import Call, Launched
from fused_softmax.core.native import build
from fused_softmax.core.route import function_mode

MOST_CALLS = 4096  # shapes for which calls are kept
_MOST_ALIKE = 8  # calls of one shape: other strides, dtypes, alignments

_kept: dict[tuple, list[tuple]] = {}
_came: set[int] = set()  # hashes of keys, of calls that were made from others
_lock = Lock()

_is_compiling = torch.compiler.is_dynamo_compiling
_function_modes = torch._C._is_torch_function_mode_enabled
_no_torch_functions = torch._C.DisableTorchFunction
# Dynamo's guards compare shape, strides, dtype, device, gradient and dispatch keys by one call of 0.13 us.
_TensorGuards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
# Inductor's allocator, at half of empty_like's cost; it allocates on the current device, so one device alone uses it.
_empty_strided_cuda: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def kept(name: str, options: Any, tensors: tuple, prepare: Callable[..., Launched], *arguments: Any) -> Call:
    """The call kept for one like this, or what `prepare` makes of the arguments, which is kept. See `find`."""
    call = find(name, options, *tensors)
    return keep(prepare(*arguments), name, options, *tensors) if call is None else call


def find(name: str, options: Any, input: Tensor, *others: Any) -> Call | None:
    """The call kept for one like this, or None.

    options: all but tensors and numbers that change from call to call; hashable, and of types that tell apart what must
        be. others: tensors, None, or strings that stand for numbers. One tensor may stand in several places.
    """
    if _is_compiling():
        return None
    call = _look(name, options, input, others)
    return _look_further(name, options, input, others) if call is None else call


def _look_further(name, options, input, others):
    """A call that `_look` does not see: one under a default device, or one made from a call of another size."""
    if forward_ad._current_level >= 0:
        return None
    if not _function_modes():
        return _of_other_size(name, options, input, others)
    if function_mode() is not None:
        return None
    with _no_torch_functions():  # or each attribute of a tensor would go through the mode
        call = find(name, options, input, *others)
    return call and _unseen(call)


def _unseen(call: Call) -> Call:
    def without_modes(*arguments):
        with _no_torch_functions():
            return call(*arguments)

    return without_modes


def _look_in_python(name, options, input, others):
    """The call kept for tensors like these, or None."""
    try:
        if _is_watched():
            return None
        tensors, kinds = _sorted(input, others)
        for check, places, call in _kept.get((name, options, input.shape, *kinds), ()):
            if check(*tensors) and _places(tensors) == places:
                return call
    except (AttributeError, RuntimeError, TypeError):  # no shape, no address, or an option that is none: an error later
        pass
    return None


_look: Callable[..., Call | None] = _look_in_python


def _is_watched() -> bool:
    return forward_ad._current_level >= 0 or _function_modes()


@cache
def _look_in_c() -> Callable[..., Call | None]:
    """`_look_in_python` by lookup.c; `_look_in_python` itself if that cannot be built."""
    native = build("lookup")
    return _look_in_python if native is None else native.Lookup(_kept, forward_ad, _function_modes, Tensor)


def _sorted(input, others):
    """(the tensors, each once; what the key has in the place of each of the others).

    The key has None or a string as it is, the type Tensor for a tensor, and for a tensor that came before, its index.
    """
    tensors: list[Tensor] = [input]
    kinds: list[Any] = []
    for other in others:
        if other is None or other.__class__ is str:
            kinds.append(other)
            continue
        # Dynamo's guards refuse one tensor given twice, and a number without a stand-in, of which no call is kept.
        before = next((i for i, tensor in enumerate(tensors) if tensor is other), None)
        kinds.append(Tensor if before is None else before)
        if before is None:
            tensors.append(other)
    return tensors, kinds


def _of_other_size(name, options, input, others):
    """The call made from one that differs only in the leading size; None if there is no such call.

    It is kept when it comes a second time. Otherwise the garbage collector would have to pass calls that never come
    again.
    """
    try:
        shape = input.shape
        if len(shape) < 2:
            return None
        tensors, kinds = _sorted(input, others)
        for check, places, launched, of, led in _kept.get((name, options, "rows", shape[1:], *kinds), ()):
            n = shape[0]
            if n < 2 or not check(*tensors) or places != _places(tensors):
                continue
            alone = led == (0,)  # the key has the input's shape, so that this guard serves for the new number too
            if not alone and not all(tensors[i].shape[0] == n for i in led):
                continue
            call = launched.for_rows(n, of)
            if call is not None:
                key = name, options, shape, *kinds
                if hash(key) in _came:
                    _put(key, (check if alone else _guard(tensors), places, call))
                elif len(_came) >= MOST_CALLS:
                    _came.clear()
                _came.add(hash(key))
                return call
    except (AttributeError, RuntimeError, TypeError):
        pass
    return None


def keep(launched: Launched, name: str, options: Any, input: Tensor, *others: Any) -> Call:
    """Keep a call for others like it, and return its function."""
    global _look
    call = launched.__call__
    if _is_compiling() or forward_ad._current_level >= 0 or function_mode() is not None:
        return call
    if input.is_cuda:  # a launch takes a few microseconds, and its look-up should not
        _look = _look_in_c()
    tensors, kinds = _sorted(input, others)
    try:
        places = _places(tensors)
        _put((name, options, input.shape, *kinds), (_guard(tensors), places, call))
        if launched.of_any_rows and _has_rows(input, launched.by_row):
            led = tuple(i for i, tensor in enumerate(tensors) if _is_led(tensor, input, launched.by_row))
            entry = _guard(tensors, led), places, launched, input.shape[0], led
            _put((name, options, "rows", input.shape[1:], *kinds), entry)
    except (AttributeError, RuntimeError, TypeError):
        pass
    return call


def forget() -> None:
    """Forget every call."""
    with _lock:
        _kept.clear()
        _came.clear()


def _put(key: tuple, entry: tuple) -> None:
    with _lock:
        if len(_kept) >= MOST_CALLS:
            _kept.clear()
        _kept[key] = [entry, *_kept.get(key, ())][:_MOST_ALIKE]


def _places(tensors) -> tuple[int, ...]:
    return tuple([tensor.data_ptr() & 15 for tensor in tensors])


def _has_rows(input: Tensor, by_row: bool) -> bool:
    """Whether a call has a leading size of its own. Otherwise a class weight could pass for one value a row."""
    n, *others = input.shape or (0,)
    return n > 1 and bool(others) and not (by_row and n in others)


def _is_led(tensor: Tensor, input: Tensor, by_row: bool) -> bool:
    """Whether a tensor's leading size is the input's: it has as many dims, or one dim less and one value a row."""
    values = by_row and tensor.ndim == input.ndim - 1
    return (tensor.ndim == input.ndim or values) and tensor.shape[:1] == input.shape[:1]


def _guard(tensors, led: tuple[int, ...] = ()) -> Callable[..., bool]:
    """Whether tensors are like these, and modes as they are now. led: the tensors that may have any leading size."""
    sizes = [[None if i in led and d == 0 else n for d, n in enumerate(t.shape)] for i, t in enumerate(tensors)]
    strides = [list(tensor.stride()) for tensor in tensors]
    if _TensorGuards is None:
        return _plain_guard(tensors, sizes)
    check = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    if torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return check
    # It compares requires_grad alone, and this call has no gradient only because the mode has none.
    return lambda *tensors: not torch.is_grad_enabled() and check(*tensors)


def _plain_guard(tensors, sizes) -> Callable[..., bool]:
    facts = [_facts(tensor) for tensor in tensors]
    modes = _modes()

    def check(*tensors):
        return modes == _modes() and all(
            _facts(tensor) == fact and all(a in (None, b) for a, b in zip(size, tensor.shape, strict=True))
            for tensor, fact, size in zip(tensors, facts, sizes, strict=True)
        )

    return check


def _facts(tensor: Tensor) -> tuple:
    grad = torch.is_grad_enabled() and tensor.requires_grad
    return type(tensor), tensor.ndim, tensor.stride(), tensor.dtype, tensor.device, grad, tensor.is_neg()


def _modes() -> tuple:
    return (
        torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled(),
        torch._C._are_functorch_transforms_active(), torch._C._len_torch_dispatch_stack(),
    )  # fmt: skip


def allocator(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """What allocates a tensor of a shape, strides and dtype on a device."""
    if device.type == "cuda" and _empty_strided_cuda is not None and torch.cuda.device_count() == 1:
        return _empty_strided_cuda

    def empty(shape, strides, dtype):
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return empty


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


bump_version = torch._C._increment_version
