"""What the operator would launch on a GPU that need not be present: its own kernels, arguments and constants."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton
from compile_only import Compiled, compile_for

from fused_softmax.core import runner
from fused_softmax.core.kernels.spec import Spec
from fused_softmax.core.plan import Device, RowPlan
from fused_softmax.ops.losses import launches as cross_entropy_calls
from fused_softmax.ops.losses import sums as loss_sums
from fused_softmax.ops.softmax import launches as softmax_rows

GPUS = {
    "sm_80": Device("NVIDIA A100", "cuda", (8, 0), 108, shared_bytes=164 * 1024, l2_bytes=40 * 2**20),
    "sm_90": Device("NVIDIA H200", "cuda", (9, 0), 132, l2_bytes=60 * 2**20),
    "sm_100": Device("NVIDIA B200", "cuda", (10, 0), 148, l2_bytes=126 * 2**20),
    "gfx942": Device("AMD Instinct MI300X", "hip", (9, 4), 304, registers=131072, shared_bytes=64 * 1024),
}
_TYPES = {
    torch.bool: "*u8",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*u8",
    torch.float8_e5m2: "*u8",
}


class Rows:
    """As much of a CUDA tensor [n_rows, n_cols] as the host path looks at; it starts `phase` elements off 16 bytes."""

    device = torch.device("cpu")  # where the operator's own buffers are made

    def __init__(self, n_rows, n_cols, dtype, *, row_stride=None, phase=0):
        self.shape, self.dtype = (n_rows, n_cols), dtype
        self._row_stride = n_cols if row_stride is None else row_stride
        self._address = 2**32 + phase * dtype.itemsize

    def stride(self, dim):
        return (self._row_stride, 1)[dim]

    def data_ptr(self):
        return self._address

    def element_size(self):
        return self.dtype.itemsize

    def get_device(self):
        return 0


# Bytes in local memory about the call of what stands in for the missing parts of a row: of Triton 3.6 and 3.7, and 3.9.
ABOUT_THE_CALL = 44 if triton.__version__ >= "3.9" else 24


@dataclass(frozen=True)
class Launch:
    """One kernel and all that its binary depends on."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constexprs: tuple[tuple[str, Any], ...]
    divisible_by_16: frozenset[str]
    options: tuple[tuple[str, Any], ...]

    @property
    def spec(self) -> Spec:
        return dict(self.constexprs)["K"]

    def compile(self, target: str) -> Compiled:
        return compile_for(
            self.kernel,
            signature=dict(self.signature),
            constexprs=dict(self.constexprs),
            target=target,
            divisible_by_16=list(self.divisible_by_16),
            **{name: dict(value) if name == "registers_of" else value for name, value in self.options},
        )


def rows_as(alignment, n_rows, n_cols, dtype, out_dtype=None):
    """Contiguous input and output rows that lie against each other as `alignment` says."""
    x = Rows(n_rows, n_cols, dtype, phase=1 if alignment == "scalar" else 0)
    y = Rows(n_rows, n_cols, out_dtype or dtype)
    return x, y


def launched(gpu: Device, run: Callable[[], Any]) -> list[Launch]:
    """What `run` launches on `gpu`, specialised as Triton's JIT does."""
    recorded = []

    def prepare(kernel, grid, tensors, scalars, constexprs, *, device, numbers=(), **options):
        recorded.append(specialised(kernel, tensors, scalars, constexprs, options))
        return _nothing

    with ExitStack() as replaced:
        for module in (runner, softmax_rows, cross_entropy_calls, loss_sums):
            replaced.enter_context(mock.patch.object(module, "device_of", return_value=gpu))
        slots = Rows(1, 64, torch.int64)
        replaced.enter_context(mock.patch.object(runner.workspace, "slots", return_value=slots))
        replaced.enter_context(mock.patch.object(runner.launch, "prepare", prepare))
        run()
    return recorded


def _nothing(*tensors):
    pass


def launches(plan: RowPlan, gpu: Device, x: Rows, y: Rows) -> list[Launch]:
    """What softmax launches for a plan."""
    return launched(gpu, lambda: softmax_rows.prepare_forward(x, y, plan))


def _type_of(value, one=True):
    """Of an integer. one: whether a 1 is compiled in, as it is in a tuple."""
    return "constexpr" if one and value == 1 else "i32" if -(2**31) <= value < 2**31 else "i64"


def specialised(kernel, tensors, scalars, constexprs, options):
    names = kernel.arg_names
    tensor_names, scalar_names = names[: len(tensors)], names[len(tensors) : len(tensors) + len(scalars)]
    fixed = {kernel.params[i].name for i in range(len(names)) if kernel.params[i].do_not_specialize}
    given = {name: tensor for name, tensor in zip(tensor_names, tensors, strict=True) if tensor is not None}
    signature = [(name, _TYPES[tensor.dtype]) for name, tensor in given.items()]
    divisible = {name for name, tensor in given.items() if tensor.data_ptr() % 16 == 0}
    constants = dict(constexprs) | dict.fromkeys(set(tensor_names) - given.keys())
    for name, value in zip(scalar_names, scalars, strict=True):
        if isinstance(value, tuple):
            signature.append((name, tuple(_type_of(each) for each in value)))
            constants |= {(name, i): 1 for i, each in enumerate(value) if each == 1}
            divisible |= {(name, i) for i, each in enumerate(value) if each % 16 == 0}
            continue
        if value is None or (value == 1 and name not in fixed and type(value) is int):
            constants[name] = value
            continue
        if isinstance(value, float):
            signature.append((name, "fp32"))
            continue
        signature.append((name, _type_of(value, one=False)))
        if value % 16 == 0 and name not in fixed:
            divisible.add(name)
    given_options = (
        (name, tuple(value.items()) if isinstance(value, dict) else value) for name, value in options.items()
    )
    return Launch(kernel, tuple(signature), tuple(constants.items()), frozenset(divisible), tuple(given_options))
