"""How attention of narrow windows meets sm_90: all keys that a tile of queries sees are in shared memory at once."""

from dataclasses import dataclass

from fused_softmax.plan.attention import padded
from fused_softmax.plan.attention_hopper import CAPABILITY, VECTOR
from fused_softmax.plan.device import Device

ROWS = 64  # of a tile, of queries or keys
# Three consumers spill, and four tiles of keys are no faster than other kernels (MEASURED.md, "Narrow windows").
CONSUMERS, STAGES, REGISTERS, MOST_PIECES = 2, 2, 240, 3
# How many times the keys have room in shared memory, by the power of two that holds a head's dims.
KEY_STAGES = {64: 2, 128: 1}
# Tiles of CONSUMERS * ROWS queries for each multiprocessor, by dims: 32 heads of 2048 x 64 with 8 of keys take 17.9 us,
# and 17.5 by the plain kernel; 16 of 2048 x 128 with 4 of keys 15.6, and 18.6 by the other Gluon kernel.
LEAST_TILES = {64: 4, 128: 1}
# Fewer were not timed. Where one query is new, as in decoding, nearly all of a tile would be empty.
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
) -> WindowPlan | None:  # fmt: skip
    """The plan for windows from `left` keys before a query to `right` keys after it.

    n_heads: of all batches; group: those that share keys. None where windows are wide or unbounded, or queries few.

    >>> from fused_softmax.plan import H200
    >>> plan_window(64, 64, 2, 8192, 128, 8, 127, 0, H200)
    WindowPlan(pieces=3, cut_left=1, key_stages=2, span=8)
    """
    if device.backend != "cuda" or device.capability != CAPABILITY or itemsize != 2:
        return None
    if left is None or right is None or head_dim % VECTOR or value_dim % VECTOR:
        return None
    most = max(64, padded(head_dim), padded(value_dim))
    key_stages = KEY_STAGES.get(most)
    width = left + right + 1
    pieces = -(-(width + ROWS - 1) // ROWS)
    tiles = -(-n_queries // (CONSUMERS * ROWS)) * n_heads
    if key_stages is None or pieces > MOST_PIECES:
        return None
    if n_queries < LEAST_QUERIES or tiles < LEAST_TILES[most] * device.sm_count:
        return None
    # 64 heads of 4096 x 64 take 66 us, and 62 by the plain kernel; of 2 x 64 x 8192 x 64, 210 and 231.
    if most == 64 and pieces == MOST_PIECES and group == 1:
        return None

    def steps(span: int) -> int:
        """Of the busiest program, of which reading the keys is one more for each of its turns."""
        return -(-tiles // span // device.sm_count) * (span + 1)

    span = min((span for span in range(1, group + 1) if group % span == 0), key=steps)
    return WindowPlan(pieces, pieces - width // ROWS, key_stages, span)
