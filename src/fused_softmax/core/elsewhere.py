"""Calls for a GPU that need not be here: the host's own path, on tensors without memory, up to its launches.

`stand_in_for` puts stand-ins into this package's modules and into torch.Tensor, so it is for a process that ends with
the work.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton import JITFunction

from fused_softmax.core import launch, workspace
from fused_softmax.core.plan import Device


def like(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, requires_grad: bool = False, offset: int = 0
) -> Tensor:
    """A tensor of these facts without memory. It begins `offset` elements after an address aligned to 16 bytes."""
    last = -1 if 0 in shape else sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    made = torch.empty(offset + last + 1, dtype=dtype, device="meta").as_strided(tuple(shape), tuple(strides), offset)
    return made.detach().requires_grad_(requires_grad)


def shapes_of(make: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
    """The tensors that a function makes on the CPU, but without memory, so that they have no data."""
    with _fakes():
        made = make()
    return [like(each.shape, each.stride(), each.dtype, offset=int(each.storage_offset())) for each in made]


@cache
def _fakes() -> FakeTensorMode:
    """One mode for all calls, because a function that makes tensors may keep some of them for its next call."""
    return FakeTensorMode()


@dataclass(frozen=True)
class Job:
    """A launch that the host path requested: the arguments of `core.launch.prepare`.

    public: whether they are arguments of Triton's own `kernel[grid](...)` instead.
    """

    kernel: Any
    grid: Any
    tensors: Sequence[Any]
    scalars: Sequence[Any]
    constexprs: Mapping[str, Any]
    options: Mapping[str, Any]
    public: bool = False


class _Nothing:
    """A launch that launches nothing, for any grid."""

    resources = None

    def __call__(self, *arguments: Any) -> None:
        pass

    def again(self, grid: Any, changed: Any) -> "_Nothing":
        return self


def stand_in_for(device: Device, found: list[Job] | None = None) -> None:
    """From now on tensors without memory pass for tensors on `device`, as number 0, and nothing watches a call.

    found: the list to which launches are appended, instead of being made.
    """

    def prepare(kernel, grid, tensors, scalars, constexprs, *, device, numbers=(), plan=None, **options) -> Any:
        if device != 0:
            raise RuntimeError(f"{kernel.__name__} was planned for device {device}, where no tensor is")
        found.append(Job(kernel, grid, tensors, scalars, constexprs, options))  # type: ignore[union-attr]
        return _Nothing()

    def slots(index: int, n_rows: int, slots_per_row: int, of: int = 0) -> Tensor:
        return like((n_rows * slots_per_row,), (1,), torch.int64)

    stand_ins: dict[str, Callable[..., Any]] = {
        "device_of": lambda index: device, "runs_here": lambda *tensors: True, "watcher_of": lambda *tensors: None,
        "on_device": lambda tensor: True,
    }  # fmt: skip
    for name, of_gpu in (("get_device", _get_device), ("data_ptr", _data_ptr), ("is_cuda", property(_is_cuda))):
        setattr(Tensor, name, of_gpu)
    setattr(workspace, "slots", slots)  # noqa: B010  mypy lets nobody assign to a function
    if found is not None:
        setattr(launch, "prepare", prepare)  # noqa: B010
    for name, module in list(sys.modules.items()):
        if name.startswith(__name__.partition(".")[0] + "."):
            for attribute, stand_in in stand_ins.items():
                if hasattr(module, attribute):
                    setattr(module, attribute, stand_in)


@contextmanager
def noting_public_launches(found: list[Job]) -> Iterator[None]:
    """In here, a launch by Triton's own `kernel[grid](...)` is appended to `found`, and not made."""

    def note(kernel, *arguments, grid, warmup, **options) -> None:
        n = next((i for i, each in enumerate(arguments) if not isinstance(each, Tensor)), len(arguments))
        found.append(Job(kernel, grid, arguments[:n], arguments[n:], {}, options, public=True))

    run = JITFunction.run
    setattr(JITFunction, "run", note)  # noqa: B010
    try:
        yield
    finally:
        setattr(JITFunction, "run", run)  # noqa: B010


_methods: Any = Tensor.get_device, Tensor.data_ptr, vars(torch._C.TensorBase)["is_cuda"].__get__
_storages: dict[int, int] = {}  # a number for each storage, so that no two addresses overlap


def _get_device(tensor: Tensor) -> int:
    return 0 if tensor.is_meta else _methods[0](tensor)


def _data_ptr(tensor: Tensor) -> int:
    if not tensor.is_meta:
        return _methods[1](tensor)
    number = _storages.setdefault(tensor.untyped_storage()._cdata, len(_storages) + 1)
    return number * 2**40 + int(tensor.storage_offset()) * tensor.element_size()


def _is_cuda(tensor: Tensor) -> bool:
    return tensor.is_meta or _methods[2](tensor)


def run(call: Callable[[], Any]) -> None:
    """A call, and the backward pass of its first tensor alone: the results beside it may refuse one."""
    first = next(_tensors(call()), None)
    if first is not None and first.requires_grad:
        torch.autograd.backward(first, like(first.shape, first.stride(), first.dtype))


def _tensors(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, (list, tuple, Mapping)):
        for each in found.values() if isinstance(found, Mapping) else found:
            yield from _tensors(each)
