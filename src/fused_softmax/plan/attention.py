"""How attention meets the chip: a pure function from sizes and a device to a frozen plan.

16-bit rungs were timed on an H200, one kernel's at a time, and are among the best (MEASURED.md, "Attention by plain
kernels"). Those of fp32, and of two things or more done to scores, were not: they hardly spill when compiled for sm_90.
"""

from dataclasses import dataclass

from fused_softmax.plan.device import Device
from fused_softmax.plan.sizes import next_power_of_2

# Queries and keys of a tile, warps, stages of the pipeline.
Rung = tuple[int, int, int, int]
# Of scores that may be causal, those to which one thing more is done, and two or more.
Rungs = tuple[Rung, Rung, Rung]

# By the power of two that holds a head's dims; of 16-bit inputs, whose products tensor cores take.
HALF: dict[str, dict[int, Rungs]] = {
    "forward": {
        64: ((128, 64, 8, 3), (128, 128, 8, 3), (128, 64, 8, 3)),
        128: ((128, 64, 8, 3), (128, 64, 8, 3), (64, 32, 8, 2)),
        256: ((128, 64, 8, 2), (128, 64, 8, 2), (32, 32, 8, 2)),
    },
    "keys": {
        64: ((32, 128, 8, 2), (32, 128, 8, 2), (32, 128, 8, 2)),
        128: ((32, 128, 8, 2), (32, 64, 8, 2), (32, 32, 8, 2)),
        256: ((32, 32, 8, 1), (32, 32, 8, 1), (16, 32, 8, 2)),
    },
    "queries": {
        64: ((128, 64, 8, 3), (128, 64, 8, 3), (64, 64, 8, 2)),
        128: ((128, 64, 8, 3), (64, 64, 8, 2), (64, 32, 8, 2)),
        256: ((64, 32, 8, 2), (64, 32, 8, 2), (32, 32, 8, 2)),
    },
    "bias": {
        64: ((128, 64, 8, 2), (128, 64, 8, 2), (64, 64, 8, 2)),
        128: ((128, 64, 8, 2), (128, 64, 8, 2), (64, 32, 8, 2)),
        256: ((64, 32, 8, 1), (64, 32, 8, 1), (32, 32, 8, 2)),
    },
    "sums": {64: ((64, 64, 8, 2),) * 3, 128: ((64, 64, 8, 2),) * 3, 256: ((64, 32, 8, 1),) * 3},
}
# Of fp32, whose products are exact: no tensor core takes them, and each is a loop over registers.
FULL: dict[str, dict[int, Rungs]] = {
    "forward": {
        64: ((32, 32, 8, 1), (32, 32, 8, 1), (16, 32, 4, 1)),
        128: ((32, 32, 8, 1), (32, 32, 8, 1), (16, 16, 4, 1)),
        256: ((16, 32, 8, 1),) * 3,
    },
    "keys": {64: ((32, 32, 8, 1),) * 3, 128: ((16, 32, 4, 1),) * 3, 256: ((16, 16, 8, 1),) * 3},
    "queries": {64: ((32, 32, 8, 1),) * 3, 128: ((16, 32, 8, 1),) * 3, 256: ((16, 16, 8, 1),) * 3},
    "bias": {64: ((32, 32, 8, 1),) * 3, 128: ((32, 32, 8, 1),) * 3, 256: ((16, 32, 8, 1),) * 3},
    "sums": {64: ((32, 32, 8, 1),) * 3, 128: ((32, 32, 8, 1),) * 3, 256: ((16, 32, 8, 1),) * 3},
}
# Of short heads whose dims are few, and of narrow windows: tiles that reach less far beyond what is visible.
SHORT, SHORT_KEYS = (64, 64, 4, 3), 512
LEAST, SWIZZLE = 16, 64  # of a side of a product; dims of 16 bits, whose rows fill the widest pattern
# Of the kernel that reads stored dS once: a tile, and how many of them a program has at most, by the dims of a head.
OF_DS, MOST_OF_DS = (64, 128, 8, 3), {32: 3, 64: 2}


@dataclass(frozen=True)
class Tiles:
    """block_m queries and block_n keys of a program of num_warps warps; loads run num_stages - 1 tiles ahead."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class AttentionPlan:
    """The tiles of each kernel: of the output, of dK and dV, of dQ, of a broadcast bias's gradient, of column sums."""

    forward: Tiles
    keys: Tiles
    queries: Tiles
    bias: Tiles
    sums: Tiles


def plan_attention(
    head_dim: int, value_dim: int, itemsize: int, n_queries: int, n_keys: int, device: Device, extras: int = 0,
    window: int | None = None,
) -> AttentionPlan:  # fmt: skip
    """The plan for n_queries queries and n_keys keys of heads of head_dim, values of value_dim.

    extras: how many things are done to scores beside hiding what comes after a query. window: keys that each query
    sees, where that has a bound on both sides.

    >>> from fused_softmax.plan import H200
    >>> plan_attention(128, 128, 2, 4096, 4096, H200).forward
    Tiles(block_m=128, block_n=64, num_warps=8, num_stages=3)
    """
    dims = blocks_of(head_dim, value_dim, itemsize)
    found = {}
    for kernel, ladder in (FULL if itemsize > 2 else HALF).items():
        rung = ladder[max(64, *dims)][min(extras, 2)]
        seen = n_keys if window is None else min(n_keys, window)
        if kernel == "forward" and itemsize == 2 and seen <= SHORT_KEYS and n_keys > 64 and max(dims) <= 64:
            rung = SHORT
        found[kernel] = _fitted(kernel, rung, dims, itemsize, n_queries, n_keys, device)
    return AttentionPlan(**found)


def plan_ds(head_dim: int, n_keys: int) -> Tiles | None:
    """The tiles of the kernel that makes dQ and a sum of stored dS of 16 bits; a program takes some tiles side by side.

    None where keys are too many for the registers of one program.
    """
    dim = padded(head_dim)
    if -(-n_keys // OF_DS[1]) > MOST_OF_DS.get(max(32, dim), 0):
        return None
    return Tiles(*OF_DS)


def padded(dim: int) -> int:
    """The power of two that holds a head's dims, and that a product takes."""
    return max(LEAST, next_power_of_2(dim))


def blocks_of(head_dim: int, value_dim: int, itemsize: int) -> tuple[int, int]:
    """The powers of two that hold a head's dims and a value's, for tiles of one kernel.

    Tiles of 16 bits less than SWIZZLE dims wide lie in shared memory in a pattern of their own. Where two tiles follow
    each other in one place in two patterns, ptxas 12.8, which comes with Triton 3.6 and 3.7, mixes up their addresses:
    dims 200 and 8, whose rows no vectors load, gave wrong outputs. So both have one pattern.

    >>> blocks_of(200, 8, 2), blocks_of(128, 16, 4), blocks_of(32, 32, 2)
    ((256, 64), (128, 16), (32, 32))
    """
    dims = padded(head_dim), padded(value_dim)
    if itemsize != 2:
        return dims
    least = min(SWIZZLE, max(dims))
    return max(dims[0], least), max(dims[1], least)


def _fitted(
    kernel: str, rung: Rung, dims: tuple[int, int], itemsize: int, n_queries: int, n_keys: int, device: Device
) -> Tiles:
    """The rung, less what short lengths and little shared memory leave no place for."""
    block_m, block_n, num_warps, num_stages = rung
    block_m = min(block_m, max(LEAST, next_power_of_2(n_queries)))
    block_n = min(block_n, max(LEAST, next_power_of_2(n_keys)))
    if max(dims) <= 64 and 2 * block_m * block_n <= rung[0] * rung[1]:
        num_warps = min(num_warps, 4)
    if device.backend == "hip":
        num_stages = min(num_stages, 2)
    room = min(device.shared_bytes, 228 * 1024) - 4096  # less what the system and a reduction take of it

    def taken() -> int:
        if kernel == "keys":
            return itemsize * sum(dims) * (block_n + num_stages * block_m)
        held = dims[0] if kernel == "forward" else sum(dims)
        return itemsize * (held * block_m + num_stages * sum(dims) * block_n)

    while num_stages > 1 and taken() > room:
        num_stages -= 1
    while min(block_m, block_n) > LEAST and taken() > room:
        block_m, block_n = (block_m // 2, block_n) if block_m > block_n else (block_m, block_n // 2)
    return Tiles(block_m, block_n, num_warps, num_stages)
