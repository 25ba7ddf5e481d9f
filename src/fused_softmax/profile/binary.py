"""Compiles a kernel for a GPU that need not be present, and reads resources and access widths off the binary.

    kernel = compile_for(
        softmax._forward,
        signature={"x_ptr": "*bf16", "y_ptr": "*bf16", "x_row_stride": "i32", "y_row_stride": "i32", "n_cols": "i32"},
        constexprs={"BLOCK_COLS": 4096},
        target="sm_90",
        divisible_by_16=("x_ptr", "y_ptr", "x_row_stride", "y_row_stride", "n_cols"),
        num_warps=8,
    )
    assert kernel.stack_bytes == 0 and set(kernel.load_widths) == {16}

The process must not run under TRITON_INTERPRET. This module uses Triton's private interface, which is the same in
Triton 3.6, 3.7 and 3.9.
"""

import re
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fused_softmax.core.files import TEXT
from fused_softmax.core.launch import MOST_SPILLED, granted
from fused_softmax.profile.parse import amd_widths, local_bytes, ptx_widths, usage

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


def compile_for(
    fn: Any,
    *,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    target: str | GPUTarget,
    divisible_by_16: Collection[str] = (),
    most_registers: int | None = None,
    registers_of: Mapping[str, Any] | None = None,
    **options: Any,
) -> "Compiled":
    """The binary of fn, which only `triton.jit` decorates, for one target.

    signature: the type of each runtime argument by name: "*bf16", "*fp32", "i32", "i64", "fp32", or a tuple of these.
    constexprs: the value of every other argument. An integer argument of 1 belongs here, because the JIT makes it one.
        An element of a tuple is (name, index) here and below, and "constexpr" in the signature.
    target: a name in TARGETS, or any GPUTarget.
    divisible_by_16: the pointers that are aligned to 16 bytes and the integers that are multiples of 16. In a launch
        the JIT detects them. Leave one out to see the binary of a launch whose value is not divisible.
    most_registers: maxnreg, unless the kernel would spill more than MOST_SPILLED bytes with it.
    registers_of: other constexprs, with which the kernel takes the registers that it may take.
    options: a launch's other options: num_warps, num_stages, num_ctas, maxnreg.
    """
    if registers_of is not None:
        how: dict[str, Any] = {"target": target, "divisible_by_16": divisible_by_16, "most_registers": most_registers}
        like = compile_for(fn, signature=signature, constexprs={**constexprs, **registers_of}, **how, **options)
        most_registers = None
        if not like.is_amd:
            options["maxnreg"] = granted(like.registers)
    if most_registers is not None:
        given: dict[str, Any] = {"signature": signature, "constexprs": constexprs, "target": target}
        capped = compile_for(fn, **given, divisible_by_16=divisible_by_16, maxnreg=most_registers, **options)
        if capped.stack_bytes <= MOST_SPILLED:
            return capped
    within = {name for name in (*constexprs, *divisible_by_16) if isinstance(name, tuple)}  # (name, index) of a tuple's
    constexprs, elements = {n: v for n, v in constexprs.items() if n not in within}, constexprs
    missing = set(fn.arg_names) ^ (signature.keys() | constexprs.keys())
    both = signature.keys() & constexprs.keys()
    stray = set(divisible_by_16) - within - signature.keys()
    if missing or both or stray:
        raise ValueError(
            f"{fn.__name__}: every argument must be in signature or in constexprs, and divisible_by_16 must name "
            f"arguments in signature; missing or unknown {sorted(missing)}, in both {sorted(both)}, not in signature "
            f"{sorted(stray)}"
        )
    source = ASTSource(
        fn,
        {name: signature.get(name, "constexpr") for name in fn.arg_names},
        {_path(fn, name): value for name, value in elements.items()},
        {_path(fn, name): [["tt.divisibility", 16]] for name in divisible_by_16},
    )
    target = TARGETS[target] if isinstance(target, str) else target
    return Compiled(triton.compile(source, target=target, options={"enable_fp_fusion": True, **options}))


def _path(fn, name):
    name, *index = name if isinstance(name, tuple) else (name,)
    return (fn.arg_names.index(name), *index)


@dataclass(frozen=True)
class Compiled:
    """A binary and the facts read off it. `kernel` is Triton's own CompiledKernel."""

    kernel: Any

    @property
    def is_amd(self) -> bool:
        return "amdgcn" in self.kernel.asm

    @property
    def ptx(self) -> str:
        """NVIDIA only."""
        return self.kernel.asm["ptx"]

    @property
    def amdgcn(self) -> str:
        """AMD only."""
        return self.kernel.asm["amdgcn"]

    @property
    def shared_bytes(self) -> int:
        """Shared memory of one program."""
        return self.kernel.metadata.shared

    @property
    def registers(self) -> int:
        """Registers of one thread; on AMD the vector registers, including accumulation registers in use."""
        return self._amd_field("vgpr_count") if self.is_amd else self._nvidia_usage["REG"]

    @property
    def stack_bytes(self) -> int:
        """Bytes that one thread has in local memory, with those of the functions that the kernel calls."""
        return self._amd_field("private_segment_fixed_size") if self.is_amd else self._nvidia_usage["STACK"]

    @property
    def spilled_bytes(self) -> int:
        """Bytes of one thread's values that found no register, outside functions that the kernel calls."""
        if self.is_amd or not self.stack_bytes:
            return self.stack_bytes
        return local_bytes(self._run("nvdisasm"))

    @property
    def load_widths(self) -> list[int]:
        """Bytes that one thread loads at a time, for each global load (and cp.async) in program order."""
        return amd_widths(self.amdgcn, "load") if self.is_amd else ptx_widths(self.ptx, "ld")

    @property
    def store_widths(self) -> list[int]:
        """Bytes that one thread writes at a time, for each global store in program order."""
        return amd_widths(self.amdgcn, "store") if self.is_amd else ptx_widths(self.ptx, "st")

    def _amd_field(self, name: str) -> int:
        found = re.search(rf"^\s*\.{name}:\s*(\d+)", self.amdgcn, re.MULTILINE)
        if not found:
            raise ValueError(f"no .{name} in the kernel's metadata")
        return int(found[1])

    @cached_property
    def _nvidia_usage(self) -> dict[str, int]:
        # ptxas reports spills of 32-bit registers under STACK; LOCAL stays 0 for kernels without a call.
        return usage(self._run("cuobjdump", "-res-usage"))

    def _run(self, tool: str, *options: str) -> str:
        """What one of the tools that come with Triton prints of the cubin."""
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder) / "kernel.cubin"
            cubin.write_bytes(self.kernel.asm["cubin"])
            command = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
            return subprocess.run([command, *options, cubin], capture_output=True, check=True, **TEXT).stdout
