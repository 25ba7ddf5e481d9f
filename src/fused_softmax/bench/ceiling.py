"""The ceiling: what plain copy kernels reach on the same bytes. y = x, one read and one write.

Flat over contiguous elements, so an odd row length does not matter: every access is 16 bytes. The last n % 16 elements
are left out; sizes stay divisible by 16, without which Triton would load scalars.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Copy:
    """One way to copy. `waves` > 0: a grid of that many programs per multiprocessor strides over the blocks."""

    block: int
    num_warps: int
    streaming: bool = False
    waves: int = 0

    @property
    def name(self) -> str:
        hints = (".cs" if self.streaming else "") + (f" persistent {self.waves}" if self.waves else "")
        return f"copy {self.block} w{self.num_warps}{hints}"

    def __call__(self, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        groups = x.numel() // 16
        blocks = triton.cdiv(groups * 16, self.block)
        if blocks == 0:
            return y
        programs = blocks
        if self.waves:
            programs = min(blocks, self.waves * torch.cuda.get_device_properties(x.device).multi_processor_count)
        _copy[(programs,)](
            x, y,
            groups,
            BLOCK=self.block, PERSISTENT=self.waves > 0, STREAMING=self.streaming, num_warps=self.num_warps,
        )  # fmt: skip
        return y


def copies() -> list[Copy]:
    shapes = [(1024, 4), (2048, 4), (4096, 4), (4096, 8), (8192, 4), (8192, 8), (16384, 8)]
    plain = [Copy(block, warps, streaming) for block, warps in shapes for streaming in (False, True)]
    return [*plain, Copy(2048, 4, waves=16), Copy(4096, 8, waves=8), Copy(8192, 8, True, waves=8)]


@triton.jit(do_not_specialize=["groups"])
def _copy(x_ptr, y_ptr, groups, BLOCK: tl.constexpr, PERSISTENT: tl.constexpr, STREAMING: tl.constexpr):
    n = groups.to(tl.int64) * 16
    if PERSISTENT:
        for block in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
            _copy_block(x_ptr, y_ptr, block, n, BLOCK, STREAMING)
    else:
        _copy_block(x_ptr, y_ptr, tl.program_id(0), n, BLOCK, STREAMING)


@triton.jit
def _copy_block(x_ptr, y_ptr, block, n, BLOCK: tl.constexpr, STREAMING: tl.constexpr):
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if STREAMING:
        x = tl.load(x_ptr + at, mask=at < n, eviction_policy="evict_first")
        tl.store(y_ptr + at, x, mask=at < n, cache_modifier=".cs")
    else:
        x = tl.load(x_ptr + at, mask=at < n)
        tl.store(y_ptr + at, x, mask=at < n)
