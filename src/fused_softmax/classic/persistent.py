"""softmax over the last dim by programs that stay on the chip and walk the rows.  y = exp(x - m) / s

Traffic: reads MN elements, writes MN. A row is one block, the next power of two of n_cols, and one program holds it in
registers. The grid has as many programs as the chip holds at once. The compiled kernel's registers and shared memory
decide that number. Program p takes rows p, p + programs, ... Its loop over them is pipelined: it fetches later rows
while it computes one.

The limit is one program's registers. On NVIDIA the longest row that fits has 128 KiB of values (32768 columns, 16384 of
float64), with at most 24 bytes of stack a thread. Longer rows are right but spill: 150 to 350 bytes a thread at twice
that length, 10 KB at 1048576 columns, which is Triton's own limit.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from fused_softmax.classic.rows import (
    MAX_BLOCK,
    block_warps,
    interpreted,
    kernel_rows,
    value_bytes,
    value_dtype,
)

# The interpreter runs programs one after another; with so few, each takes several rows.
INTERPRETED_PROGRAMS = 4

# On these GPUs a wave may also use the accumulation registers, which are as many again as the driver reports.
CDNA = ("gfx908", "gfx90a", "gfx940", "gfx941", "gfx942")


def persistent_softmax(x: Tensor, *, programs: int | None = None) -> Tensor:
    """softmax over the last dim of x [n_rows, n_cols].

    programs: the size of the grid. By default, as many programs as the device holds at once.
    """
    x = kernel_rows(x, max_cols=MAX_BLOCK, why="a row must be one block")
    if programs is not None and programs < 1:
        raise ValueError(f"programs must be at least 1, got {programs}")
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return y
    with torch.cuda.device_of(x):
        if programs is None:
            programs = INTERPRETED_PROGRAMS if interpreted() else _resident_programs(x, y)
        _forward[(min(programs, x.shape[0]),)](*_arguments(x, y), **_options(x))
    return y


@dataclass(frozen=True)
class Multiprocessor:
    """One multiprocessor's resources, with registers as the driver counts them. count: the device's multiprocessors."""

    backend: str
    arch: str
    count: int
    registers: int
    shared_bytes: int
    threads: int
    warp_size: int


def occupancy(on: Multiprocessor, *, registers: int, shared_bytes: int, num_warps: int) -> int:
    """How many programs one multiprocessor holds at once. registers: of a thread. shared_bytes: of a program."""
    if on.backend == "hip":
        available = on.registers * 2 if on.arch.split(":")[0] in CDNA else on.registers
    else:
        available = on.registers
        registers = -(-registers // 8) * 8  # registers are handed to a warp in units of 256
    warps = min(available // (max(registers, 1) * on.warp_size), on.threads // on.warp_size)
    programs = warps // num_warps
    if shared_bytes:
        programs = min(programs, on.shared_bytes // shared_bytes)
    return max(programs, 1)


def pipeline_stages(block_bytes: int, shared_bytes: int) -> int:
    """How many rows the loop has in flight, at most four: one in registers, the others in shared memory if they fit.

    block_bytes: one row as it is stored. shared_bytes: one program's limit; 1 KB of it stays for the reductions.
    """
    return min(4, 1 + max(shared_bytes - 1024, 0) // block_bytes)


def _multiprocessor(device: torch.device) -> Multiprocessor:
    target = driver.active.get_current_target()
    reported = driver.active.utils.get_device_properties(device.index)
    return Multiprocessor(
        backend=target.backend,
        arch=str(target.arch),
        count=reported["multiprocessor_count"],
        registers=reported["max_num_regs"],
        shared_bytes=reported["max_shared_mem"],
        threads=torch.cuda.get_device_properties(device).max_threads_per_multi_processor,
        warp_size=target.warp_size,
    )


_multiprocessors: dict[torch.device, Multiprocessor] = {}
_programs: dict[tuple[object, ...], int] = {}


def _multiprocessor_of(x: Tensor) -> Multiprocessor:
    found = _multiprocessors.get(x.device)
    if found is None:
        found = _multiprocessors[x.device] = _multiprocessor(x.device)
    return found


def _resident_programs(x: Tensor, y: Tensor) -> int:
    # The key holds everything that Triton specialises on, because each binary needs its own number of registers.
    key = (x.device, x.dtype, x.shape[1], x.stride(0), x.data_ptr() % 16)
    found = _programs.get(key)
    if found is None:
        on, options = _multiprocessor_of(x), _options(x)
        kernel = _forward.warmup(*_arguments(x, y), **options, grid=(1,))
        kernel._init_handles()  # the driver counts registers when it loads the binary
        held = occupancy(
            on, registers=kernel.n_regs, shared_bytes=kernel.metadata.shared, num_warps=options["num_warps"]
        )
        found = _programs[key] = on.count * held
    return found


def _arguments(x: Tensor, y: Tensor) -> tuple[object, ...]:
    return x, y, x.stride(0), y.stride(0), x.shape[0], x.shape[1]


def _options(x: Tensor) -> dict[str, Any]:
    block_cols = triton.next_power_of_2(x.shape[1])
    shared_bytes = 0 if interpreted() else _multiprocessor_of(x).shared_bytes
    return {
        "VALUE": value_dtype(x),
        "BLOCK_COLS": block_cols,
        "STAGES": pipeline_stages(block_cols * x.element_size(), shared_bytes),
        "num_warps": block_warps(block_cols * value_bytes(x)),
        "enable_fp_fusion": True,
    }


# n_rows only bounds the loop, so a separate binary for 1 or for multiples of 16 would gain nothing.
@triton.jit(do_not_specialize=["n_rows"])
def _forward(
    x_ptr,
    y_ptr,
    x_row_stride,
    y_row_stride,
    n_rows,
    n_cols,
    VALUE: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    STAGES: tl.constexpr,
):
    cols = tl.arange(0, BLOCK_COLS)
    in_row = cols < n_cols
    for each in tl.range(tl.program_id(0), n_rows, tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(each, tl.int64)
        x = tl.load(x_ptr + row * x_row_stride + cols, mask=in_row, other=float("-inf")).to(VALUE)
        e = tl.exp(x - tl.max(x, axis=0))
        y = e / tl.sum(e, axis=0)
        tl.store(y_ptr + row * y_row_stride + cols, y, mask=in_row)
