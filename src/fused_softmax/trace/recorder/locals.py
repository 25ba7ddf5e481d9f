"""Encodes a kernel's locals for a recording."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from fused_softmax.trace.recorder.encode import dtype_name, number, numbers
from fused_softmax.trace.recorder.memory import Memory


def changed(now: dict[str, Any], before: dict[str, Any], memory: Memory) -> dict[str, Any]:
    """Locals that are new objects, as tiles, numbers, bools and strings; tuples are split into their parts."""
    found: dict[str, Any] = {}
    for name, value in now.items():
        if name in before and value is before[name]:
            continue
        olds = dict(parts(name, before.get(name)))
        for key, each in parts(name, value):
            encoded = None if key in olds and each is olds[key] else encode(each, memory)
            if encoded is not None:
                found[key] = encoded
    return found


def parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a local by their names in the kernel: "x[0]" of a tuple, "r.row" of a NamedTuple."""
    if not isinstance(value, tuple | tl.tuple):
        yield name, value
        return
    keys = getattr(value, "_fields", None)
    for at, each in enumerate(value):
        yield from parts(f"{name}.{keys[at]}" if keys else f"{name}[{at}]", each)


def named(now: dict[str, Any], name: str) -> Any:
    """The local with a name, or a field of one: "row", "r.row". None if there is none."""
    name, *path = name.split(".")
    value = now.get(name)
    for each in path:
        value = getattr(value, each, None)
    return value


def encode(value: Any, memory: Memory) -> Any:
    """One local, or None for functions, modules, descriptors and other objects that a recording leaves out."""
    if isinstance(value, tl.tensor) and isinstance(value.handle, TensorHandle):
        shape = [int(size) for size in value.shape]
        data = np.asarray(value.handle.data)
        data = np.broadcast_to(data.reshape(shape) if data.size > 1 or not shape else data, shape)
        if value.dtype.is_ptr():
            return _pointer(data, shape, memory)
        dtype = dtype_name(value.dtype)
        encoded = numbers(data, dtype)
        if not shape and not value.dtype.is_floating():
            return encoded[0]
        return {"shape": shape, "dtype": dtype, "data": encoded}
    return plain(value)


def constants(name: str, value: Any) -> dict[str, Any]:
    """A constexpr as plain values: of a dataclass its fields, by the names that a kernel has for them."""
    value = value.value if isinstance(value, tl.constexpr) else value
    if is_dataclass(value) and not isinstance(value, type):
        return {f"{name}.{each.name}": plain(getattr(value, each.name)) for each in fields(value)}
    return {name: plain(value)}


def plain(value: Any) -> Any:
    """A number, bool or string as it is, a dtype's name, or None for anything else."""
    if isinstance(value, tl.constexpr):
        value = value.value
    if isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return number(value, "float64")
    return dtype_name(value) if isinstance(value, tl.dtype) else None


def flat(value: Any) -> np.ndarray | None:
    """The numbers of a tile, or one number, as an array. None for anything else."""
    if isinstance(value, tl.constexpr):
        value = value.value
    if isinstance(value, tl.tensor) and isinstance(value.handle, TensorHandle):
        return np.asarray(value.handle.data).reshape(-1)
    return np.array([value]) if isinstance(value, int | float) and not isinstance(value, bool) else None


def item(value: Any, at: int = 0) -> np.ndarray:
    """One number of a tile, or the number itself."""
    found = flat(value)
    if found is None:
        raise TypeError(f"no number: {value!r}")
    return found[at]


def positions(now: dict[str, Any], names: str) -> np.ndarray | None:
    """The numbers of a local, or of a sum of locals such as "first + rows". None if one of them has none."""
    total: Any = 0
    for name in names.split(" + "):
        found = flat(named(now, name))
        if found is None:
            return None
        total = total + found
    return total


def _pointer(data: np.ndarray, shape: list[int], memory: Memory) -> dict[str, Any] | None:
    """Addresses as indices of one tensor's elements."""
    tensor, index = memory.locate(data)
    known = tensor[tensor >= 0]
    of = int(known[0]) if known.size else memory.near(int(data.reshape(-1)[0])) if data.size else None
    if of is None:
        return None
    at = [int(i) if t == of else "outside" for t, i in zip(tensor, index, strict=True)]
    return {"shape": shape, "dtype": "pointer", "tensor": of, "data": at}
