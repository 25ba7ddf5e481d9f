"""How attention meets the chip: a pure function from sizes and a device to a frozen plan.

16-bit rungs were timed on an H200, one kernel's at a time, and are among the best (measured/attention.md, "Attention by
plain kernels"). Those of fp32, and of two things or more done to scores, were not: they hardly spill when compiled for
sm_90.

How few queries over many keys meet the chip: into how many parts the keys of a head are cut, and their tiles.

How short attention meets the chip: all queries and keys of a head are one tile, and a program has many batches.
"""

from dataclasses import dataclass

from fused_softmax.core.plan.device import Device
from fused_softmax.core.plan.sizes import next_power_of_2

# Queries and keys of a tile, warps, stages of the pipeline.
Rung = tuple[int, int, int, int]
# For scores that may be causal; to which one more thing is done; two or more.
Rungs = tuple[Rung, Rung, Rung]

# By the power of two that holds a head's dims; for 16-bit inputs, whose products run on tensor cores.
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
# For fp32, whose products are exact: they run on no tensor core, and each is a loop over registers.
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
# For short heads of few dims, and for narrow windows: tiles that reach less far beyond what is visible.
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

    >>> from fused_softmax.core.plan import H200
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


MOST_ROWS = {2: 64, 4: 16}  # of a tile, by the bytes of a number: more queries are for tiles of queries, or spill

LEAST_KEYS = 256

TILE_BYTES, TILE_KEYS = 32 * 1024, (16, 128)  # of keys and values together; keys, at least and at most

# A program for each multiprocessor, or two where each has so many keys left: on an H200 16 parts of 8192 keys took 15.7
# us and 32 took 18.2, for merging them takes time too; of 16 x 8 heads of 32768 keys 2 took 484, 4 580 and 8 500.
KEYS_OF_TWO = 1024

MOST_PARTS = 128

CHUNK = 8192  # numbers of o that are merged at a time


@dataclass(frozen=True)
class DecodePlan:
    """Tiles of all rows that share a head of keys, and into how many parts its keys are cut.

    block_r, chunk: as AttentionSpec has them.
    """

    tiles: Tiles
    parts: int
    block_r: int
    chunk: int

    @property
    def lanes(self) -> int:
        return next_power_of_2(self.parts)


def plan_decode(
    head_dim: int, value_dim: int, itemsize: int, n_queries: int, group: int, n_heads: int, n_keys: int, device: Device
) -> DecodePlan | str:
    """The plan for n_heads heads of keys, each of which has `group` heads of n_queries queries; or why there is none.

    n_keys: those that are seen.

    >>> from fused_softmax.core.plan import H200
    >>> plan_decode(128, 128, 2, 1, 4, 8, 65536, H200).parts
    32
    """
    n_rows = group * n_queries
    if n_rows > MOST_ROWS[itemsize]:
        return f"{n_rows} rows share a head of keys, more than {MOST_ROWS[itemsize]}"
    if n_keys < LEAST_KEYS:
        return f"{n_keys} keys are seen, fewer than {LEAST_KEYS}"
    dims = blocks_of(head_dim, value_dim, itemsize)
    block_n = min(max(TILE_BYTES // (2 * itemsize * max(dims)), TILE_KEYS[0]), TILE_KEYS[1])
    block_r = next_power_of_2(n_rows)
    tiles = -(-n_keys // block_n)
    parts = max(1, device.sm_count // n_heads, min(2 * device.sm_count // n_heads, n_keys // KEYS_OF_TWO))
    parts = min(tiles, MOST_PARTS, parts)
    # The program that merges the parts reads no more than each part has read.
    while parts > 1 and 4 * parts * block_r * dims[1] > itemsize * sum(dims) * n_keys // parts:
        parts -= 1
    parts = -(-tiles // -(-tiles // parts))
    if parts == 1 and group == 1:
        return "no heads share keys, and there are heads enough without cutting them into parts"
    chunk = max(1, min(next_power_of_2(parts), CHUNK // (block_r * dims[1])))
    num_stages = 2 if device.backend == "hip" else 3
    wide = block_r > LEAST or (itemsize > 2 and max(dims) > 128)  # by 4 warps these spill
    tile = Tiles(max(LEAST, block_r), block_n, 8 if wide else 4, num_stages)
    return DecodePlan(tile, parts, block_r, chunk)


MOST_LENGTH, MOST_DIM = 64, 64

LEAST_HEADS = 8  # a multiprocessor, of all batches

# Warps, stages, programs a multiprocessor. Of 4096 x 4 x 49 x 32 with a shared bias, us on an H200: forward 83, with 2
# stages 97, with 2 warps 91, with 8 142; backward 152, with 2 stages 207, with 8 warps 254 to 343.
FORWARD, BACKWARD = (4, 3, 4), (4, 3, 2)

# The same with a mask for each batch: forward 200, with 2 stages 235, with 8 warps 473; backward 272, with 8 warps 536.
FORWARD_MASKED, BACKWARD_MASKED = (4, 3, 4), (4, 3, 4)

# The same of more dims: these hardly spill when compiled for sm_90, and were not timed.
MEASURED_DIM = 32

FORWARD_OF_MORE, BACKWARD_OF_MORE = (8, 2, 2), (8, 2, 1)


@dataclass(frozen=True)
class ShortPlan:
    """A program goes through `steps` batches of one head. The batches are cut into `parts` such runs."""

    tiles: Tiles
    steps: int
    parts: int


def plan_short(
    kernel: str, head_dim: int, value_dim: int, itemsize: int, n_queries: int, n_keys: int, n_batches: int,
    n_heads: int, device: Device, masked: bool = False,
) -> ShortPlan | str:  # fmt: skip
    """The plan of "forward" or "backward"; or why there is none.

    >>> from fused_softmax.core.plan import H200
    >>> plan_short("forward", 32, 32, 2, 49, 49, 4096, 4, H200).parts
    132
    """
    dims = max(padded(head_dim), padded(value_dim))
    if max(n_queries, n_keys) > MOST_LENGTH or 0 in (n_queries, n_keys):
        return f"{n_queries} queries and {n_keys} keys are not 1 to {MOST_LENGTH} each"
    if dims > MOST_DIM or itemsize > 2:
        return f"heads have more than {MOST_DIM} dims" if itemsize == 2 else f"elements have {itemsize} bytes, not 2"
    if n_batches * n_heads < LEAST_HEADS * device.sm_count:
        return f"{n_batches * n_heads} heads of all batches are fewer than {LEAST_HEADS * device.sm_count}"
    rungs = (FORWARD_MASKED, BACKWARD_MASKED) if masked else (FORWARD, BACKWARD)
    rungs = (FORWARD_OF_MORE, BACKWARD_OF_MORE) if dims > MEASURED_DIM else rungs
    num_warps, num_stages, programs = rungs[kernel == "backward"]
    num_stages = min(num_stages, 2) if device.backend == "hip" else num_stages
    parts = max(1, min(n_batches, programs * device.sm_count // n_heads))
    steps = -(-n_batches // parts)
    tiles = Tiles(_side(n_queries), _side(n_keys), num_warps, num_stages)
    return ShortPlan(tiles, steps, -(-n_batches // steps))


def _side(n: int) -> int:
    return max(LEAST, next_power_of_2(n))
