"""Which calls of attention the kernels for sm_90 take, and their tiles; a pure function, as `plan_attention` is."""

from dataclasses import dataclass

from fused_softmax.plan.attention import padded
from fused_softmax.plan.device import Device

CAPABILITY = (9, 0)
# Consumers, rows of a tile that goes by, tiles in shared memory, registers of a consumer's thread.
Rung = tuple[int, int, int, int]
# By the power of two that holds a head's dims, and whether queries are fewer than LONG.
FORWARD: dict[tuple[int, bool], Rung] = {
    (64, False): (3, 128, 2, 160),
    (64, True): (2, 128, 2, 240),
    (128, False): (2, 128, 2, 240),
    (128, True): (2, 128, 2, 240),
    (256, False): (2, 64, 2, 240),
    (256, True): (2, 64, 2, 240),
}
# Of the gradients: for dK and dV queries are what goes by, for dQ keys. Heads of more than 128 dims have kernels of
# their own: of dK and dV two warpgroups share one consumer's keys, and for dQ keys and values go by in one ring.
GRADIENTS: dict[str, dict[int, Rung]] = {
    "keys": {64: (2, 128, 2, 240), 128: (2, 64, 2, 240), 256: (1, 64, 2, 240)},
    "queries": {64: (2, 128, 2, 240), 128: (2, 128, 2, 240), 256: (2, 64, 3, 240)},
}
# Those of a bias, whose tiles take shared memory.
BIASED: dict[str, dict[int, Rung]] = {
    "forward": {64: (2, 128, 2, 240), 128: (2, 128, 2, 240)},
    "keys": {64: (2, 128, 2, 240), 128: (2, 64, 2, 240)},
    "queries": {64: (2, 128, 2, 240), 128: (2, 64, 2, 240)},
}
# Where windows have a left bound, keys' scores a softcap, or scores slopes, larger tiles spill in the gradients; and
# those of windows reach too far beyond what is visible.
SMALL, WINDOWED_FORWARD = (2, 64, 2, 240), (2, 128, 2, 240)
# Keys that each query sees; of fewer, at most 64 dims, the plain forward kernel is faster. So it is with ALiBi: 8 x 16
# heads of 4096 x 64, causal, 1042 us, and 1218 by (3, 128, 2, 160).
NARROW = 512
LEAST_BIASED = 64  # dims of a tile for which the forward kernel with a bias is faster than the plain one
LONG = 2048
LEAST = 32  # dims that a tile is made for
MOST_SIMULATED = 8192  # tiles, whose shares are looked at one by one
VECTOR = 8  # elements of 16 bytes, that sizes and strides are multiples of


@dataclass(frozen=True)
class HopperTiles:
    """Consumers of 64 rows each, tiles of `block` rows, `stages` of them, and registers of a consumer's thread."""

    consumers: int
    block: int
    stages: int
    registers: int
    block_d: int
    block_v: int

    @property
    def reuses(self) -> bool:
        """Whether shared memory has no place of its own for results."""
        return max(self.block_d, self.block_v) > 128 and self.block_d == self.block_v

    @property
    def wide(self) -> bool:
        """Whether the gradients are those of the kernels for large heads."""
        return self.block_d > 128


def plan_hopper(
    head_dim: int, value_dim: int, itemsize: int, n_queries: int, device: Device, kernel: str = "forward",
    left: bool = False, bias: bool = False, window: int | None = None, softcap: bool = False,
    alibi: bool = False,
) -> HopperTiles | None:  # fmt: skip
    """The tiles of a kernel, "forward", "keys" or "queries", or None where the plain one is to compute.

    left: whether the window has a bound there. window: keys that each query sees, where it has one on both sides.
    bias, softcap, alibi: whether scores have one, or slopes.

    >>> from fused_softmax.plan import H200
    >>> plan_hopper(128, 128, 2, 4096, H200)
    HopperTiles(consumers=2, block=128, stages=2, registers=240, block_d=128, block_v=128)
    """
    if device.backend != "cuda" or device.capability != CAPABILITY or itemsize != 2:
        return None
    if head_dim % VECTOR or value_dim % VECTOR:
        return None
    dims = max(LEAST, padded(head_dim)), max(LEAST, padded(value_dim))
    if (max(dims) > 128 and dims[0] != dims[1]) or bias + softcap + alibi > 1:
        return None
    most = max(64, *dims)
    rung: Rung | None = None
    if kernel != "forward":
        rung = (BIASED if bias else GRADIENTS)[kernel].get(most)
        spills = left or (kernel == "keys" and (softcap or alibi)) or (alibi and most == 128)
        if rung is not None and most <= 128 and spills:
            rung = SMALL
    elif most == 64 and (alibi or (window is not None and window < NARROW)):
        return None
    elif bias:
        rung = BIASED[kernel].get(most) if max(dims) >= LEAST_BIASED else None
    else:
        rung = WINDOWED_FORWARD if left and most == 64 else FORWARD[most, n_queries < LONG]
    return None if rung is None else HopperTiles(*rung, *dims)


def shift_of(head_tiles: int, heads: int, programs: int) -> int:
    """How many places each program moves on from one turn to the next, so that all get an equal share of causal tiles.

    A head has head_tiles tiles, which see 1, 2, ... head_tiles tiles of keys; every second head goes backwards. Half a
    period on, a tile sees as much more as the one before saw less. Where the step of a turn is a good one already, no
    shift is better.
    """
    half = (head_tiles - programs) % (2 * head_tiles)
    half -= 2 * head_tiles * (half > head_tiles)
    if head_tiles * heads > MOST_SIMULATED:
        return half % programs
    return min((half % programs, 0), key=lambda shift: most_work(head_tiles, heads, programs, shift))


def most_work(head_tiles: int, heads: int, programs: int, shift: int) -> int:
    """Of a program, in tiles of keys; a tile of queries costs another."""
    work = [0] * programs
    for tile in range(head_tiles * heads):
        turn, place = divmod(tile, programs)
        head, i = divmod(tile, head_tiles)
        backwards = (heads - 1 - head) % 2 == 0
        work[(place - turn * shift) % programs] += 1 + (head_tiles - i if backwards else i + 1)
    return max(work)
