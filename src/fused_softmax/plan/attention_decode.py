"""How few queries over many keys meet the chip: into how many parts the keys of a head are cut, and their tiles."""

from dataclasses import dataclass

from fused_softmax.plan.attention import LEAST, Tiles, blocks_of
from fused_softmax.plan.device import Device
from fused_softmax.plan.sizes import next_power_of_2

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
) -> DecodePlan | None:
    """The plan for n_heads heads of keys, of which each has group heads of n_queries queries; None if it is not short.

    n_keys: those that are seen.

    >>> from fused_softmax.plan import H200
    >>> plan_decode(128, 128, 2, 1, 4, 8, 65536, H200).parts
    32
    """
    n_rows = group * n_queries
    if n_rows > MOST_ROWS[itemsize] or n_keys < LEAST_KEYS:
        return None
    dims = blocks_of(head_dim, value_dim, itemsize)
    block_n = min(max(TILE_BYTES // (2 * itemsize * max(dims)), TILE_KEYS[0]), TILE_KEYS[1])
    block_r = next_power_of_2(n_rows)
    tiles = -(-n_keys // block_n)
    parts = max(1, device.sm_count // n_heads, min(2 * device.sm_count // n_heads, n_keys // KEYS_OF_TWO))
    parts = min(tiles, MOST_PARTS, parts)
    # Who merges the parts reads no more than each has read.
    while parts > 1 and 4 * parts * block_r * dims[1] > itemsize * sum(dims) * n_keys // parts:
        parts -= 1
    parts = -(-tiles // -(-tiles // parts))
    if parts == 1 and group == 1:
        return None
    chunk = max(1, min(next_power_of_2(parts), CHUNK // (block_r * dims[1])))
    num_stages = 2 if device.backend == "hip" else 3
    wide = block_r > LEAST or (itemsize > 2 and max(dims) > 128)  # by 4 warps these spill
    tile = Tiles(max(LEAST, block_r), block_n, 8 if wide else 4, num_stages)
    return DecodePlan(tile, parts, block_r, chunk)
