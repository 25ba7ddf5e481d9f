"""Entries of the registry: softmax of segments, with a tile and blocks small enough to read.

The planner's tiles have at least 512 elements. Here a piece has half a `block` of positions, a tile 4 pieces, a step
through a longer segment one `block`, and what is longer than 4 is a hub.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fused_softmax.core.plan import H200
from fused_softmax.ops.segments.kernels.bunches import _compute, _finish
from fused_softmax.ops.segments.kernels.spec import SegmentSpec
from fused_softmax.ops.segments.plan import plan_segments
from fused_softmax.trace.entries.kernel import NARROW, Kernel
from fused_softmax.trace.recorder.encode import dtype_name
from fused_softmax.trace.recorder.memory import Role
from fused_softmax.trace.recorder.recorder import Recorder
from fused_softmax.trace.recorder.story import Story, Told

PIECES = BUNCH = 4
HUB = 4  # blocks

# Functions that only compute positions, look one up, or are clear from one word of the caller.
_PLACES = frozenset({
    "columns_there", "exp_at", "extent_of", "extents_of", "inside", "is_inside", "let_next_begin", "load",
    "max_of_pieces", "members_of", "of_columns", "of_last", "of_order", "of_rows", "offsets_of", "origin",
    "origin_of", "pieces_of", "places_of", "range_places", "read", "read_range", "rounded_product", "segment_at",
    "side_by_side", "slot_of", "sum_of_pieces", "wait_for_launch_before", "weight", "weight_of", "widen", "write",
    "written",
})  # fmt: skip
# Numbers of both kernels that their lines make plain.
_UNTOLD = (
    "block", "factor", "n", "n_inner", "n_groups", "n_bunches", "n_blocks", "n_menders", "n_segments",
)  # fmt: skip
_ROLES: dict[str, Role] = {
    "out_ptr": "output", "offsets_ptr": "scratch", "slots_ptr": "scratch", "hubs_ptr": "scratch",
    "sound_ptr": "scratch",
}  # fmt: skip


def lengths_of(n_cols: int) -> list[int]:
    """How a row is cut: four short segments, one of them empty; a quarter of the row in one; and half in one."""
    hub = n_cols // 2 + 1
    long = min(n_cols // 4 + 1, n_cols - hub)
    short = n_cols - hub - long
    first = short // 2
    one = min(1, short - first)
    return [first, one, 0, short - first - one, long, hub]


def _run_segments(recorder: Recorder, x: Tensor, block: int) -> dict[str, Any]:
    (n_rows, n), piece, memory = x.shape, max(1, block // 2), recorder.memory
    offsets = torch.tensor([0, *lengths_of(n)]).cumsum(0)
    plan = plan_segments(
        n, len(offsets) - 1, n_rows, 1, 4, H200, singles=False, tile=PIECES * piece, block=HUB * block, num_warps=1,
        piece=piece, segments=BUNCH,
    )  # fmt: skip
    y = torch.empty_like(x)
    memory.hold("x", x, "input")
    memory.hold("y", y, "output")
    spec = {
        "cols": 1, "range_deep": 1, "range_wide": block, "cast_dtype": getattr(tl, dtype_name(x.dtype)), "probes": 8,
        "flags": 8, "one_block": True, "whole": True, "many": n_rows > 1,
    }  # fmt: skip
    first = SegmentSpec(segments=BUNCH, singles=False, pieces=PIECES, deep=1, wide=piece, **spec)
    second = SegmentSpec(segments=1, singles=False, pieces=1, deep=1, wide=1, **spec)
    n_slots = max(1, n_rows * plan.n_blocks * 2)  # an empty tensor has no memory of its own
    slots, hubs = torch.empty(2 * n_slots), torch.empty(n_slots, dtype=torch.int64)
    sound = torch.empty(plan.n_bunches, dtype=torch.bool)
    tensors = offsets, None, x, None, y, None, None, slots, hubs, sound
    sizes = n, plan.n_segments, 1, n_rows, plan.n_bunches, plan.n_blocks, 1, plan.block, 1.0
    with recorder:
        _compute[(n_rows * (plan.n_bunches + plan.n_blocks),)](*tensors, *sizes, K=first)
        _finish[(n_rows * max(1, plan.n_blocks),)](*tensors, *sizes, K=second)
    return {"offsets": offsets.tolist()}


SEGMENTS = (
    Kernel(
        name="segments",
        title="columns that offsets cut into segments",
        summary="Offsets cut each row into segments of any length, and each gets a softmax of its own. Short ones are "
        "cut into pieces of one length, so that a tile has as many segments as fit: these are read once. A longer one "
        "is read in steps, twice. The longest, a hub, is cut into blocks that several programs read: each writes its "
        "part's maximum and sum to a slot, and a second launch puts these together and reads the hub again.",
        operation="segment_softmax",
        run=_run_segments,
        formula="x once in a tile, twice in a longer segment; the output once",
        story=Story(
            {
                "_compute": Told(
                    {"find the work": "group, which = tl.program_id"},
                    row="group",
                    m=(),
                    s=(),
                    silent=("let_next_begin", "n, n_lse, stride", "S = Segments", "turn = ", "b = which"),
                    unused=_UNTOLD,
                ),
                "tell_parts": Told(
                    {"find the hub": "from_ = b.to", "tell": "slot_ptrs = "},
                    notes={
                        "is_hub = ": "A hub is longer than a block, so its parts are read by several programs.",
                        "m, s = reduce_range": "The maximum and the sum of what the hub has in this block.",
                    },
                    silent=("slot = ",),
                    unused=("n_groups", "n_blocks", "block", "group"),
                ),
                "of_bunch": Told(
                    {"offsets": "i = bunch.to", "pieces": "pieces = pieces_of", "long segments": "long = "},
                    notes={
                        "pieces = pieces_of": "Each segment is cut into pieces of one length. An empty one has none.",
                        "mine = ": "What has more pieces than a tile is left for later.",
                    },
                    silent=("sound = ", "return tl.min"),
                    unused=("block",),
                ),
                "of_pieces": Told(
                    {"pieces": "upto = tl.cumsum"},
                    notes={"which = tl.where": "A row of the tile is a piece. This is the segment that it is of."},
                    silent=("total = ", "row, done", "ahead = ", "lives = ", "done = after"),
                ),
                "of_tile": Told(
                    {"load": "near, far, there", "maximum": "m = tl.max", "sum": "scale, base", "write": "m, s = m["},
                    notes={
                        "a, b = read(": "All segments of the tile are read at once, and only once.",
                        "m = max_of_pieces": "Pieces of one segment are next to each other: each now has the maximum "
                        "of all of them.",
                    },
                    silent=("lives = ", "a, b = of_rows", "several = ", "begins, last", "m, s = m[", "scale, base"),
                    unused=("b",),
                ),
                "of_range": Told(
                    {"read in steps": "m, s = reduce_range", "write": "write_range"},
                    silent=("segments = ", "s = tl.where"),
                    unused=("spoilt",),
                ),
                "reduce_range": Told(
                    {"read in steps": "m = tl.full"},
                    notes={
                        "s = s * weight": "Each lane has a maximum and a sum of its own. Where the maximum has risen, "
                        "the old sum is multiplied by exp of the old maximum minus the new one.",
                    },
                    silent=("scale, base",),
                    unused=("b",),
                ),
                "write_range": Told(
                    {"write": "first, last"},
                    notes={
                        "tile = last - 1 - back": "The last step comes first: it was read last, and caches have it."
                    },
                    silent=("near, far, there",),
                    unused=("b",),
                ),
                "_finish": Told(
                    {"find the work": "n_programs = "},
                    row="group",
                    m=(),
                    s=(),
                    silent=(
                        "n, n_lse, stride",
                        "S = Segments",
                        "wait_for_launch",
                        "share = ",
                        "end = ",
                        "hubs = tl.full",
                        "sound = tl.full",
                    ),
                    unused=_UNTOLD,
                ),
                "write_parts": Told(
                    {"find the hub": "from_ = ", "put together": "m, s = heard", "write": "s = tl.where"},
                    silent=("s = tl.where",),
                    unused=("n_groups", "n_blocks", "block", "group"),
                ),
                "heard_of_hub": Told(
                    {"put together": "first, last"},
                    notes={
                        "s = rounded_product": "The sums of the hub's parts, each multiplied by exp of its maximum "
                        "minus the larger one.",
                    },
                    silent=("plane = ", "there = ", "tail = ", "slot_ptrs = ", "m = top"),
                    unused=("n_groups", "n_blocks", "block", "group"),
                ),
            },
            phases=(
                "find the work",
                "find the hub",
                "offsets",
                "pieces",
                "load",
                "maximum",
                "sum",
                "long segments",
                "read in steps",
                "tell",
                "put together",
                "write",
            ),
            roles=_ROLES,
            unset=frozenset({"slots_ptr", "hubs_ptr", "sound_ptr"}),
            step_over=_PLACES,
        ),
        dtypes=NARROW,
        of_rows=False,
    ),
)
