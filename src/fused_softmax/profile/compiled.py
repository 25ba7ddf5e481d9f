"""Compiles this package's kernels for a case and a GPU that need not be present. Prints a line of JSON for each kernel.

    python -m fused_softmax.profile.compiled softmax 4096x32768 bfloat16 < device.json

The operator's own host path runs on tensors without memory that claim to be on that GPU. Its launches are compiled
instead of launched. That needs stand-ins in the operator's modules, so it runs in a process of its own, which must not
interpret.
"""

import argparse
import dataclasses
import json
import math
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget

from fused_softmax.bench.cases import Case
from fused_softmax.bench.entries.operations import operation_of
from fused_softmax.core.elsewhere import Job, stand_in_for
from fused_softmax.core.plan import Device, table_of
from fused_softmax.profile.binary import Compiled, compile_for
from fused_softmax.profile.parse import Kernel, widths
from fused_softmax.profile.table import occupancy
from fused_softmax.profile.target import parse_case

_TYPES = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float64: "*fp64",
    torch.int64: "*i64", torch.int32: "*i32", torch.uint8: "*u8", torch.bool: "*i1",
    torch.float8_e4m3fn: "*u8", torch.float8_e5m2: "*u8",
}  # fmt: skip


class Nowhere(torch.Generator):
    """A generator whose tensors have no memory."""

    device = torch.device("meta")


class Listed(Job):
    """A launch that the host path asked for."""

    @property
    def programs(self) -> int:
        return self.grid if isinstance(self.grid, int) else math.prod(self.grid)

    def compile(self, target: GPUTarget) -> Compiled:
        """The binary, specialised like Triton's JIT does: for aligned pointers, multiples of 16, and ones."""
        names = self.kernel.arg_names
        unspecialised = {param.name for param in self.kernel.params if param.do_not_specialize}
        signature, constants, divisible = dict[str, Any](), dict[Any, Any](self.constexprs), set[Any]()
        for name, tensor in zip(names, self.tensors, strict=False):
            if tensor is None:
                constants[name] = None
                continue
            signature[name] = _TYPES[tensor.dtype]
            if tensor.data_ptr() % 16 == 0:
                divisible.add(name)
        for name, value in zip(names[len(self.tensors) :], self.scalars, strict=False):
            fixed = name in unspecialised
            if isinstance(value, tuple):  # whose elements no parameter fixes
                signature[name] = tuple(_type_of(each) for each in value)
                constants |= {(name, i): each for i, each in enumerate(value) if each == 1}
                divisible |= {(name, i) for i, each in enumerate(value) if each % 16 == 0}
            elif value is None or _type_of(value, fixed) == "constexpr":
                constants[name] = value
            else:
                signature[name] = _type_of(value, fixed)
                if isinstance(value, int) and value % 16 == 0 and not fixed:
                    divisible.add(name)
        return compile_for(
            self.kernel, signature=signature, constexprs=constants, target=target, divisible_by_16=divisible,
            **self.options,
        )  # fmt: skip


def _type_of(value: int | float, fixed: bool = False) -> str:
    """As Triton types a number; "constexpr" of what it compiles in. fixed: nothing of it is compiled in."""
    if isinstance(value, float):
        return "fp32"
    if value == 1 and not fixed:
        return "constexpr"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def listed(case: Case, device: Device) -> list[Listed]:
    """This package's launches for a case on a device. Changes the process for good."""
    found: list[Job] = []
    stand_in_for(device, found)
    inputs = operation_of(case).inputs(case, Nowhere())
    operation_of(case).own(case)(*inputs)
    return [Listed(**vars(each)) for each in found]


def kernel_of(each: Listed, device: Device) -> Kernel:
    major, minor = device.capability
    binary = each.compile(GPUTarget("cuda", 10 * major + minor, 32))
    block = 32 * each.options["num_warps"]
    limit, limited_by = occupancy(device, binary.registers, binary.shared_bytes, block)
    return Kernel(
        name=each.kernel.fn.__name__,
        grid=each.programs,
        block=block,
        occupancy_limit=limit,
        limited_by=limited_by,
        registers=binary.registers,
        shared_bytes=binary.shared_bytes,
        spilled_bytes=binary.spilled_bytes,
        loads=widths(binary.load_widths),
        stores=widths(binary.store_widths),
    )


def device_from(facts: dict[str, Any]) -> Device:
    """The device that `run.by_binary` wrote."""
    table = facts.pop("table")
    return Device(
        **facts | {"capability": tuple(facts["capability"])}, table=None if table is None else table_of(table)
    )


def main() -> int:
    parser = argparse.ArgumentParser("python -m fused_softmax.profile.compiled")
    for name in ("operation", "shape", "dtype"):
        parser.add_argument(name)
    options = parser.parse_args()
    device = device_from(json.load(sys.stdin))
    for each in listed(parse_case(options.operation, options.shape, options.dtype), device):
        print(json.dumps(dataclasses.asdict(kernel_of(each, device))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
