"""The ceilings: plain kernels that move as many bytes in the same way and do nothing with them.

copies  y = x: one read and one write; `result` converts the written values, `share` leaves a part of x unread
adds    c = a + b: two reads and one write
reads   every program combines its elements into one number
products  not a matter of bytes: the three matrix products that a linear layer's loss needs, by cuBLAS
squares   nor these: a product of square matrices, by cuBLAS, for what attention's products take

The kernels run flat over contiguous elements, so an odd row length does not matter. Accesses have 16 bytes, or fewer if
a block gives its threads fewer. The last n % 16 elements (bytes, in reads) are left out, because Triton would load
scalars if sizes were not divisible.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_softmax.core.device import device_of

SHARES = 64


@dataclass(frozen=True)
class Shape:
    """How a ceiling's programs are cut, in elements.

    waves: if > 0, a grid of that many programs per multiprocessor strides over the blocks.
    """

    block: int
    num_warps: int
    streaming: bool = False
    waves: int = 0

    def __str__(self) -> str:
        hints = (".cs" if self.streaming else "") + (f" persistent {self.waves}" if self.waves else "")
        return f"{self.block} w{self.num_warps}{hints}"

    def programs(self, n: int, x: Tensor) -> int:
        blocks = triton.cdiv(n, self.block)
        return min(blocks, self.waves * device_of(x.get_device()).sm_count) if self.waves else blocks


@dataclass(frozen=True)
class Copy:
    """y = x in the dtype `result`, or x's. `share` of every 64 blocks are read; zeros replace the others."""

    shape: Shape
    result: torch.dtype | None = None
    share: int = SHARES

    @property
    def name(self) -> str:
        to = f" to {str(self.result).removeprefix('torch.')}" if self.result else ""
        return f"copy {self.shape}{to}" + (f" reads {self.share}/{SHARES}" if self.share < SHARES else "")

    def moved_bytes(self, x: Tensor, *_: Tensor) -> int:
        return x.nbytes * self.share // SHARES + x.numel() * (self.result or x.dtype).itemsize

    def __call__(self, x: Tensor, *_: Tensor) -> Tensor:
        y = torch.empty_like(x, dtype=self.result)
        groups = x.numel() // 16
        if groups:
            _copy[(self.shape.programs(groups * 16, x),)](
                x, y,
                groups,
                BLOCK=self.shape.block, PERSISTENT=self.shape.waves > 0, STREAMING=self.shape.streaming,
                SHARE=self.share, SHARES=SHARES, num_warps=self.shape.num_warps,
            )  # fmt: skip
        return y


@dataclass(frozen=True)
class Add:
    """c = a + b, both with the same shape and dtype."""

    shape: Shape

    @property
    def name(self) -> str:
        return f"add {self.shape}"

    def moved_bytes(self, a: Tensor, *_: Tensor) -> int:
        return 3 * a.nbytes

    def __call__(self, a: Tensor, b: Tensor, *_: Tensor) -> Tensor:
        c = torch.empty_like(a)
        groups = a.numel() // 16
        if groups:
            _add[(self.shape.programs(groups * 16, a),)](
                a, b, c,
                groups,
                BLOCK=self.shape.block, PERSISTENT=self.shape.waves > 0, STREAMING=self.shape.streaming,
                num_warps=self.shape.num_warps,
            )  # fmt: skip
        return c


@dataclass(frozen=True)
class Read:
    """The exclusive or of each program's 4-byte words, which depends on every bit. Blocks count words."""

    shape: Shape

    @property
    def name(self) -> str:
        return f"read {self.shape}"

    def moved_bytes(self, x: Tensor, *_: Tensor) -> int:
        return x.nbytes + 4 * self.shape.programs(x.nbytes // 4, x)

    def __call__(self, x: Tensor, *_: Tensor) -> Tensor:
        groups = x.nbytes // 16
        result = torch.empty(self.shape.programs(groups * 4, x), dtype=torch.int32, device=x.device)
        if groups:
            words = x.view(-1)[: groups * 16 // x.element_size()].view(torch.int32)
            _read[(result.numel(),)](
                words, result,
                groups,
                BLOCK=self.shape.block, PERSISTENT=self.shape.waves > 0, STREAMING=self.shape.streaming,
                num_warps=self.shape.num_warps,
            )  # fmt: skip
        return result


@dataclass(frozen=True)
class Products:
    """logits = x w', then their products with w and with x: a linear layer's loss without the loss.

    Of two layers, the second one's logits too.
    """

    name: str = "3 GEMMs"

    def moved_bytes(self, x: Tensor, w: Tensor, *others: Tensor) -> int:
        return x.nbytes + 2 * w.nbytes + sum(each.nbytes for each in others)

    def __call__(self, x: Tensor, w: Tensor, *others: Tensor) -> Tensor:
        if len(others) == 2:
            torch.mm(others[0], others[1].t())
        logits = x @ w.t()
        torch.mm(logits, w)
        return logits.t() @ x


@dataclass(frozen=True)
class Square:
    """The product of two square matrices that lie where the first two inputs do.

    floor_bytes, flops: of the call that it stands beside. Its bytes are so many that the ratio of GB/s is one of flops.
    """

    floor_bytes: int
    flops: float
    name: str = "cuBLAS"

    @staticmethod
    def side(x: Tensor, y: Tensor) -> int:
        side = min(8192, math.isqrt(min(x.numel(), y.numel())))
        return side // 128 * 128 or side

    def moved_bytes(self, x: Tensor, y: Tensor, *_: Tensor) -> int:
        return round(self.floor_bytes * 2 * self.side(x, y) ** 3 / self.flops)

    def __call__(self, x: Tensor, y: Tensor, *_: Tensor) -> Tensor:
        side = self.side(x, y)
        a, b = (each.view(-1)[: side * side].view(side, side) for each in (x, y))
        return a @ b


Ceiling = Copy | Add | Read | Products | Square


def copies(result: torch.dtype | None = None, share: float = 1.0) -> list[Ceiling]:
    """Copy kernels. share: the part of x that is read, to the nearest 64th."""
    sizes = [(1024, 4), (2048, 4), (4096, 4), (4096, 8), (8192, 4), (8192, 8), (16384, 8)]
    plain = [Shape(block, warps, streaming) for block, warps in sizes for streaming in (False, True)]
    shapes = [*plain, Shape(2048, 4, waves=16), Shape(4096, 8, waves=8), Shape(8192, 8, True, waves=8)]
    return [Copy(shape, result, max(1, round(share * SHARES))) for shape in shapes]


def adds() -> list[Ceiling]:
    sizes = [(512, 4), (1024, 4), (2048, 4), (4096, 4), (4096, 8), (8192, 8)]
    plain = [Shape(block, warps, streaming) for block, warps in sizes for streaming in (False, True)]
    return [Add(shape) for shape in (*plain, Shape(2048, 4, waves=16), Shape(4096, 8, waves=8))]


def products(of_two_layers: bool = False) -> list[Ceiling]:
    return [Products("4 GEMMs") if of_two_layers else Products()]


def reads() -> list[Ceiling]:
    sizes = [(512, 4), (1024, 4), (2048, 4), (4096, 4), (4096, 8), (8192, 8), (16384, 8)]
    plain = [Shape(block, warps, streaming) for block, warps in sizes for streaming in (False, True)]
    persistent = [Shape(1024, 4, waves=16), Shape(2048, 4, waves=16), Shape(4096, 4, waves=8), Shape(8192, 8, waves=8)]
    return [Read(shape) for shape in (*plain, *persistent)]


@triton.jit
def _copy_block(
    x_ptr, y_ptr, block, n, BLOCK: tl.constexpr, STREAMING: tl.constexpr, SHARE: tl.constexpr, SHARES: tl.constexpr
):
    at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    read = at < n
    if SHARE < SHARES:
        read = read & (block % SHARES < SHARE)
    if STREAMING:
        x = tl.load(x_ptr + at, mask=read, other=0.0, eviction_policy="evict_first")
        tl.store(y_ptr + at, x, mask=at < n, cache_modifier=".cs")
    else:
        x = tl.load(x_ptr + at, mask=read, other=0.0)
        tl.store(y_ptr + at, x, mask=at < n)


@triton.jit(do_not_specialize=["groups"])
def _copy(
    x_ptr, y_ptr, groups,
    BLOCK: tl.constexpr, PERSISTENT: tl.constexpr, STREAMING: tl.constexpr, SHARE: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    n = groups.to(tl.int64) * 16
    if PERSISTENT:
        for block in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
            _copy_block(x_ptr, y_ptr, block, n, BLOCK, STREAMING, SHARE, SHARES)
    else:
        _copy_block(x_ptr, y_ptr, tl.program_id(0), n, BLOCK, STREAMING, SHARE, SHARES)


@triton.jit
def _add_block(a_ptr, b_ptr, c_ptr, block, n, BLOCK: tl.constexpr, STREAMING: tl.constexpr):
    at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if STREAMING:
        a = tl.load(a_ptr + at, mask=at < n, eviction_policy="evict_first")
        b = tl.load(b_ptr + at, mask=at < n, eviction_policy="evict_first")
        tl.store(c_ptr + at, a + b, mask=at < n, cache_modifier=".cs")
    else:
        a = tl.load(a_ptr + at, mask=at < n)
        b = tl.load(b_ptr + at, mask=at < n)
        tl.store(c_ptr + at, a + b, mask=at < n)


@triton.jit(do_not_specialize=["groups"])
def _add(a_ptr, b_ptr, c_ptr, groups, BLOCK: tl.constexpr, PERSISTENT: tl.constexpr, STREAMING: tl.constexpr):
    n = groups.to(tl.int64) * 16
    if PERSISTENT:
        for block in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
            _add_block(a_ptr, b_ptr, c_ptr, block, n, BLOCK, STREAMING)
    else:
        _add_block(a_ptr, b_ptr, c_ptr, tl.program_id(0), n, BLOCK, STREAMING)


@triton.jit
def _load_block(x_ptr, block, n, BLOCK: tl.constexpr, STREAMING: tl.constexpr):
    at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if STREAMING:
        return tl.load(x_ptr + at, mask=at < n, other=0, eviction_policy="evict_first")
    else:
        return tl.load(x_ptr + at, mask=at < n, other=0)


@triton.jit(do_not_specialize=["groups"])
def _read(x_ptr, result_ptr, groups, BLOCK: tl.constexpr, PERSISTENT: tl.constexpr, STREAMING: tl.constexpr):
    n = groups.to(tl.int64) * 4
    if PERSISTENT:
        total = tl.zeros([BLOCK], tl.int32)
        for block in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
            total ^= _load_block(x_ptr, block, n, BLOCK, STREAMING)
    else:
        total = _load_block(x_ptr, tl.program_id(0), n, BLOCK, STREAMING)
    tl.store(result_ptr + tl.program_id(0), tl.xor_sum(total, axis=0))
