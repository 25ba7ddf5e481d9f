"""Which calls of attention the kernels for sm_90 take, and their tiles; a pure function, as `plan_attention` is.

How attention of narrow windows meets sm_90: all keys that a tile of queries sees are in shared memory at once.
"""

from dataclasses import dataclass

from fused_softmax.core.plan.device import Device
from fused_softmax.ops.attention.plan.tiles import padded

CAPABILITY = (9, 0)
# Consumers, rows of a tile that they go over, tiles in shared memory, registers of a consumer's thread.
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
# Of the gradients: the kernel of dK and dV goes over queries, that of dQ over keys. Heads of more than 128 dims have
# kernels of their own: for dK and dV two warpgroups share one consumer's keys; for dQ keys and values share one ring.
GRADIENTS: dict[str, dict[int, Rung]] = {
    "keys": {64: (2, 128, 2, 240), 128: (2, 64, 2, 240), 256: (1, 64, 2, 240)},
    "queries": {64: (2, 128, 2, 240), 128: (2, 128, 2, 240), 256: (2, 64, 3, 240)},
}
# With a bias, whose tiles take shared memory.
BIASED: dict[str, dict[int, Rung]] = {
    "forward": {64: (2, 128, 2, 240), 128: (2, 128, 2, 240)},
    "keys": {64: (2, 128, 2, 240), 128: (2, 64, 2, 240)},
    "queries": {64: (2, 128, 2, 240), 128: (2, 64, 2, 240)},
}
# With a left bound of windows, a softcap or slopes, larger tiles spill in the gradients. With windows they also reach
# too far beyond what is visible.
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
        """Whether results share the place of inputs in shared memory."""
        return max(self.block_d, self.block_v) > 128 and self.block_d == self.block_v

    @property
    def wide(self) -> bool:
        """Whether the gradients are those of the kernels for large heads."""
        return self.block_d > 128


def plan_hopper(
    head_dim: int, value_dim: int, itemsize: int, n_queries: int, device: Device, kernel: str = "forward",
    left: bool = False, bias: bool = False, window: int | None = None, softcap: bool = False,
    alibi: bool = False,
) -> HopperTiles | str:  # fmt: skip
    """The tiles of a kernel, "forward", "keys" or "queries"; or why the plain one is to compute.

    left: whether the window has a bound there. window: keys that each query sees, where it has one on both sides.
    bias, softcap, alibi: whether scores have one, or slopes.

    >>> from fused_softmax.core.plan import H200
    >>> plan_hopper(128, 128, 2, 4096, H200)
    HopperTiles(consumers=2, block=128, stages=2, registers=240, block_d=128, block_v=128)
    """
    refused = _no_kernel(head_dim, value_dim, itemsize, device)
    if refused:
        return refused
    dims = max(LEAST, padded(head_dim)), max(LEAST, padded(value_dim))
    if max(dims) > 128 and dims[0] != dims[1]:
        return f"heads of {head_dim} dims have values of {value_dim}"
    if bias + softcap + alibi > 1:
        return "more than one of a bias, a softcap and slopes is added"
    most = max(64, *dims)
    rung: Rung | None = None
    if kernel != "forward":
        rung = (BIASED if bias else GRADIENTS)[kernel].get(most)
        spills = left or (kernel == "keys" and (softcap or alibi)) or (alibi and most == 128)
        if rung is not None and most <= 128 and spills:
            rung = SMALL
    elif most == 64 and (alibi or (window is not None and window < NARROW)):
        return "the plain kernel is faster with slopes and narrow windows at heads of at most 64 dims"
    elif bias:
        rung = BIASED[kernel].get(most) if max(dims) >= LEAST_BIASED else None
    else:
        rung = WINDOWED_FORWARD if left and most == 64 else FORWARD[most, n_queries < LONG]
    return f"no tiles are planned for a bias at heads of {head_dim} dims" if rung is None else HopperTiles(*rung, *dims)


def _no_kernel(head_dim: int, value_dim: int, itemsize: int, device: Device) -> str:
    """Why no kernel for sm_90 takes such heads on a device; empty if one may."""
    if device.backend != "cuda" or device.capability != CAPABILITY:
        return f"{device.name} is no sm_90"
    if itemsize != 2:
        return f"elements have {itemsize} bytes, not 2"
    if head_dim % VECTOR or value_dim % VECTOR:
        return f"{head_dim} and {value_dim} dims are no multiples of {VECTOR}"
    return ""


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
    """The work of the busiest program, in tiles of keys. A tile of queries costs as much as one more."""
    work = [0] * programs
    for tile in range(head_tiles * heads):
        turn, place = divmod(tile, programs)
        head, i = divmod(tile, head_tiles)
        backwards = (heads - 1 - head) % 2 == 0
        work[(place - turn * shift) % programs] += 1 + (head_tiles - i if backwards else i + 1)
    return max(work)


ROWS = 64  # of a tile, of queries or keys

# Three consumers spill, and four tiles of keys are no faster than other kernels (measured/attention.md, "Narrow
# windows").
CONSUMERS, STAGES, REGISTERS, MOST_PIECES = 2, 2, 240, 3

# How many times the keys have room in shared memory, by the power of two that holds a head's dims.
KEY_STAGES = {64: 2, 128: 1}

# Tiles of CONSUMERS * ROWS queries for each multiprocessor, by dims: 32 heads of 2048 x 64 with 8 of keys take 17.9 us,
# and 17.5 by the plain kernel; 16 of 2048 x 128 with 4 of keys 15.6, and 18.6 by the other Gluon kernel.
LEAST_TILES = {64: 4, 128: 1}

# Fewer were not timed. With one new query, as in decoding, nearly all of a tile would be empty.
LEAST_QUERIES = 1024


@dataclass(frozen=True)
class WindowPlan:
    """Each consumer sees `pieces` tiles of keys, of which the window's left bound cuts the first cut_left.

    key_stages: how many times the keys have room. A program goes through `span` heads that share keys.
    """

    pieces: int
    cut_left: int
    key_stages: int
    span: int


def plan_window(
    head_dim: int, value_dim: int, itemsize: int, n_queries: int, n_heads: int, group: int, left: int | None,
    right: int | None, device: Device,
) -> WindowPlan | str:  # fmt: skip
    """The plan for windows from `left` keys before a query to `right` keys after it.

    n_heads: of all batches; group: those that share keys. Or why there is none.

    >>> from fused_softmax.core.plan import H200
    >>> plan_window(64, 64, 2, 8192, 128, 8, 127, 0, H200)
    WindowPlan(pieces=3, cut_left=1, key_stages=2, span=8)
    """
    if left is None or right is None:
        return "no window has a bound on both sides"
    refused = _no_kernel(head_dim, value_dim, itemsize, device)
    if refused:
        return refused
    most = max(64, padded(head_dim), padded(value_dim))
    key_stages = KEY_STAGES.get(most)
    width = left + right + 1
    pieces = -(-(width + ROWS - 1) // ROWS)
    tiles = -(-n_queries // (CONSUMERS * ROWS)) * n_heads
    if key_stages is None:
        return f"heads have more than {max(KEY_STAGES)} dims"
    if pieces > MOST_PIECES:
        return f"windows of {width} keys are not narrow"
    if n_queries < LEAST_QUERIES or tiles < LEAST_TILES[most] * device.sm_count:
        return f"{n_queries} queries of {n_heads} heads are too few"
    # 64 heads of 4096 x 64 take 66 us, and 62 by the plain kernel; of 2 x 64 x 8192 x 64, 210 and 231.
    if most == 64 and pieces == MOST_PIECES and group == 1:
        return "another kernel is faster where no heads share keys"

    def steps(span: int) -> int:
        """Steps of the busiest program. Reading the keys counts as one more for each of its turns."""
        return -(-tiles // span // device.sm_count) * (span + 1)

    span = min((span for span in range(1, group + 1) if group % span == 0), key=steps)
    return WindowPlan(pieces, pieces - width // ROWS, key_stages, span)
