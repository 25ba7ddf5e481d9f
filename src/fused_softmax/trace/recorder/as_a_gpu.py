"""Corrects Triton's interpreter where it computes differently from a GPU and would hide a fault or invent one.

CORRECTIONS: (holder, name of its attribute, function from the old attribute to the new one). They are in place while a
recording is made, and in the tests from the start.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from fused_softmax.trace.recorder.encode import widened

_TORCH = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def _rounding(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A GPU rounds to bf16. The interpreter truncates fp32, and reads bf16 as its bits in casts from and to fp64."""

    def cast(builder: Any, source: TensorHandle, wanted: Any) -> Any:
        kinds = source.dtype.scalar, wanted.scalar
        if tl.bfloat16 not in kinds or kinds[0] == kinds[1] or not all(kind.name in _TORCH for kind in kinds):
            return plain(builder, source, wanted)
        values = torch.from_numpy(np.array(source.data))
        values = values.view(torch.bfloat16) if kinds[0] == tl.bfloat16 else values
        values = values.to(_TORCH[kinds[1].name])
        return TensorHandle((values.view(torch.uint16) if kinds[1] == tl.bfloat16 else values).numpy(), wanted.scalar)

    return cast


def _arguments(plain: Callable[..., Any]) -> Callable[..., Any]:
    """On a GPU, a float argument of a launch has 32 bits. The interpreter keeps a Python float of 64."""

    def convert(value: Any) -> Any:
        if type(value) is float:
            return tl.tensor(TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)
        return plain(value)

    return convert


def _of_numbers(function: Any) -> Callable[..., Any]:
    """On a GPU, the maximum of NaN and a number is the number. The interpreter's is NaN, which hides a lost NaN."""
    return lambda plain: lambda builder, a, b: builder.binary_op(a, b, function)


def _rounded_once(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A fused multiply-add has one rounding."""

    def fma(builder: Any, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        once = x.data.astype(np.float64) * y.data + z.data  # a product of two fp32 is exact in fp64
        return TensorHandle(once.astype(z.data.dtype), z.dtype.scalar)

    return fma


def _indices(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Triton 3.6 uses an array of one element as a number, which NumPy no longer allows."""

    def patch(tensor: Any, scope: Any) -> None:
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    return patch


def _of_bf16(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter multiplies matrices of bf16 by their bits."""

    def exact(x: TensorHandle) -> TensorHandle:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle(widened(x.data), tl.float32)

    def dot(builder: Any, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
        return plain(builder, exact(a), exact(b), *rest)

    return dot


def _of_bits(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A block of a bit has bits. The interpreter gives it numbers of 32 bits, which Triton 3.9 takes for no mask."""

    def splat(builder: Any, kind: Any, value: TensorHandle) -> TensorHandle:
        block = plain(builder, kind, value)
        return TensorHandle(block.data.astype(bool), block.dtype) if value.data.dtype == bool else block

    return splat


CORRECTIONS: tuple[tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]], ...] = (
    (InterpreterBuilder, "cast_impl", _rounding),
    (InterpreterBuilder, "create_maxnumf", _of_numbers(np.fmax)),
    (InterpreterBuilder, "create_minnumf", _of_numbers(np.fmin)),
    (InterpreterBuilder, "create_fma", _rounded_once),
    (interpreter, "_patch_lang_tensor", _indices),
    (interpreter, "_implicit_cvt", _arguments),
    (InterpreterBuilder, "create_dot", _of_bf16),
    (InterpreterBuilder, "create_splat", _of_bits),
)
