"""The plan of rows whose columns lie on several GPUs, whose programs exchange over all of them.

All ranks cut the largest shard's columns alike, and so number parts alike; a smaller shard's last parts are short, or
empty.
"""

from dataclasses import replace
from functools import lru_cache

from fused_softmax.core.plan.device import Device
from fused_softmax.core.plan.ladders import PAIR_PARTS
from fused_softmax.core.plan.sizes import next_power_of_2
from fused_softmax.core.plan.strategies import RowPlan, build, rows_of
from fused_softmax.core.plan.tiles import Alignment

# (columns of a part, parts of a single row at most), the first that fits. Only 8192 and 4 warps were timed.
PEER_PARTS = ((8192, 64), (16384, 64))
PEER_WARPS = 4
PAIR_MOST_PARTS = 128  # of a pair of rows
FEW_ROWS_PARTS = (2048, 4096)  # where rows and parts are no more than FEW_PROGRAMS a multiprocessor
FEW_PROGRAMS = 4
MOST_LANES = 1024  # slots of a row that a program polls


@lru_cache(1024)
def plan_peers(
    n_rows: int,
    n_cols: int,
    most_cols: int,
    ranks: int,
    itemsize: int,
    device: Device,
    *,
    alignment: Alignment = "even",
    part_cols: int | None = None,
    inputs: int = 1,
) -> RowPlan | None:
    """The plan of one rank of `ranks`, with n_cols of the most_cols that a rank has; None where there are too many.

    part_cols: as asked, the same on every rank. Its parts and their length depend on nothing that ranks differ in.
    inputs: 2 for pairs of rows. Their parts do not depend on n_rows.

    >>> plan_peers(8192, 64128, 64128, 2, 2, H200).parts
    8
    """
    wanted = part_cols or (_part_cols(n_rows, most_cols, ranks, device) if inputs == 1 else _of_pair(most_cols, ranks))
    if wanted is None:
        return None
    parts = max(1, -(-most_cols // wanted))
    lanes = max(32 * PEER_WARPS, next_power_of_2(ranks * (parts + 1)))
    rows = rows_of(n_rows, max(n_cols, 1), itemsize, inputs, alignment, device, "loss" if inputs == 1 else None)
    part_cols = -(-max(most_cols, 1) // (64 * parts)) * 64
    choices = {
        "part_cols": part_cols, "num_warps": PEER_WARPS, "copies": 1, "lanes": lanes, "poll_last_first": False,
    }  # fmt: skip
    because = f"columns on {ranks} ranks, each cut into parts of {part_cols} columns"
    plan = build("split", rows, because, choices, said="the programs of a row exchange over all ranks")
    pieces = -(-part_cols // plan.block_cols)
    least_body = rows.body - (rows.vector if rows.alignment == "shifted" else 0)
    shortest = min(part_cols, least_body - (parts - 1) * part_cols)
    ahead = plan.prefetch * plan.part_cols // part_cols  # of as many bytes
    return replace(
        plan, n_cols=n_cols, parts=parts, part_cols=part_cols, pieces=pieces, same_rows=(n_rows, n_rows),
        full_pieces=max(0, min(pieces, shortest // plan.block_cols)), prefetch=ahead if n_rows * parts > ahead else 0,
    )  # fmt: skip


def _part_cols(n_rows: int, most_cols: int, ranks: int, device: Device) -> int | None:
    for part_cols in FEW_ROWS_PARTS:
        few = n_rows * -(-most_cols // part_cols) <= FEW_PROGRAMS * device.sm_count
        if few and most_cols > part_cols and _fitting(part_cols, most_cols, ranks, 64):
            return part_cols
    for part_cols, most_parts in PEER_PARTS:
        if _fitting(part_cols, most_cols, ranks, most_parts):
            return part_cols
    return None


def _of_pair(most_cols: int, ranks: int) -> int | None:
    part_cols, _ = PAIR_PARTS
    return part_cols if _fitting(part_cols, most_cols, ranks, PAIR_MOST_PARTS) else None


def _fitting(part_cols: int, most_cols: int, ranks: int, most_parts: int) -> bool:
    parts = -(-most_cols // part_cols)
    return parts <= most_parts and ranks * (parts + 1) <= MOST_LANES
