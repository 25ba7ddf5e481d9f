"""How short attention meets the chip: all queries and keys of a head are one tile, and a program has many batches."""

from dataclasses import dataclass

from fused_softmax.plan.attention import LEAST, Tiles, padded
from fused_softmax.plan.device import Device
from fused_softmax.plan.sizes import next_power_of_2

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
    """A program goes through `steps` batches of one head; of such parts of the batches there are `parts`."""

    tiles: Tiles
    steps: int
    parts: int


def plan_short(
    kernel: str, head_dim: int, value_dim: int, itemsize: int, n_queries: int, n_keys: int, n_batches: int,
    n_heads: int, device: Device, masked: bool = False,
) -> ShortPlan | None:  # fmt: skip
    """The plan of "forward" or "backward"; None where heads are too long, or too few.

    >>> from fused_softmax.plan import H200
    >>> plan_short("forward", 32, 32, 2, 49, 49, 4096, 4, H200).parts
    132
    """
    dims = max(padded(head_dim), padded(value_dim))
    if max(n_queries, n_keys) > MOST_LENGTH or dims > MOST_DIM or itemsize > 2 or 0 in (n_queries, n_keys):
        return None
    if n_batches * n_heads < LEAST_HEADS * device.sm_count:
        return None
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
