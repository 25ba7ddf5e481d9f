"""The locals of a kernel as a recording holds them."""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from fused_softmax.trace.encode import dtype_name, number, numbers
from fused_softmax.trace.memory import Memory


def changed(now: dict[str, Any], before: dict[str, Any], memory: Memory) -> dict[str, Any]:
    """Locals that are not the objects they were, as tiles, numbers, bools and strings; tuples part by part."""
    found: dict[str, Any] = {}
    for name, value in now.items():
        old = before.get(name)
        if name in before and value is old:
            continue
        if isinstance(value, tuple | tl.tuple):
            parts, olds = list(value), list(old) if isinstance(old, tuple | tl.tuple) else []
            values = {f"{name}[{at}]": each for at, each in enumerate(parts) if at >= len(olds) or each is not olds[at]}
        else:
            values = {name: value}
        for key, each in values.items():
            encoded = encode(each, memory)
            if encoded is not None:
                found[key] = encoded
    return found


def encode(value: Any, memory: Memory) -> Any:
    """One local; None for what a recording has no room for: functions, modules, descriptors."""
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


def plain(value: Any) -> Any:
    """A number, bool or string as it is, the name of a dtype; None for anything else."""
    if isinstance(value, tl.constexpr):
        value = value.value
    if isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return number(value, "float64")
    return dtype_name(value) if isinstance(value, tl.dtype) else None


def flat(value: Any) -> np.ndarray | None:
    """The numbers of a tile or of a number, or None."""
    if isinstance(value, tl.constexpr):
        value = value.value
    if isinstance(value, tl.tensor) and isinstance(value.handle, TensorHandle):
        return np.asarray(value.handle.data).reshape(-1)
    return np.array([value]) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _pointer(data: np.ndarray, shape: list[int], memory: Memory) -> dict[str, Any] | None:
    """Addresses as the elements that they are of one tensor."""
    tensor, index = memory.locate(data)
    known = tensor[tensor >= 0]
    of = int(known[0]) if known.size else memory.near(int(data.reshape(-1)[0])) if data.size else None
    if of is None:
        return None
    at = [int(i) if t == of else "outside" for t, i in zip(tensor, index, strict=True)]
    return {"shape": shape, "dtype": "pointer", "tensor": of, "data": at}
