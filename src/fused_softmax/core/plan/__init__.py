"""Which kernel, with which blocks, for which shape: pure functions from sizes and a device to a frozen plan.

Standard library only. `ladders.py` and `tiles.py` are data: a measurement changes a rung there and nothing else.
"""

from fused_softmax.core.plan.device import H100, H200, Device
from fused_softmax.core.plan.ladders import COLUMN_POSITIONS, HELD_BYTES, TUNABLE, Ladder, Table, built_in, table_of
from fused_softmax.core.plan.rows import (
    candidate,
    fetches_ahead,
    most_parts,
    parts_held,
    plan_alone,
    plan_loss,
    plan_pairs,
    plan_reduction,
    plan_rows,
    reduction_rung_ends,
    row_rung_ends,
)
from fused_softmax.core.plan.sizes import UNBOUNDED, VECTOR_BYTES
from fused_softmax.core.plan.strategies import Alignment, RowPlan, Strategy

__all__ = [
    "COLUMN_POSITIONS", "H100", "H200", "HELD_BYTES", "TUNABLE", "UNBOUNDED", "VECTOR_BYTES", "Alignment",
    "Device", "Ladder", "RowPlan", "Strategy", "Table", "built_in", "candidate", "fetches_ahead",
    "most_parts", "parts_held", "plan_alone", "plan_loss", "plan_pairs", "plan_reduction", "plan_rows",
    "reduction_rung_ends", "row_rung_ends", "table_of",
]  # fmt: skip
