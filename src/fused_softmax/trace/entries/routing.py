"""Entries of the registry: a router's choice of experts."""

from typing import Any

from torch import Tensor

from fused_softmax.ops.routing.launches import forward, rows_of_call
from fused_softmax.ops.routing.options import Routing
from fused_softmax.trace.entries.kernel import NARROW, Formula, Kernel
from fused_softmax.trace.recorder.recorder import Recorder
from fused_softmax.trace.recorder.story import Story, Told

CHOSEN = 2

# Functions of tiles, lists and keys: a word of the caller says what they do.
_PLACES = frozenset({
    "after", "along_lanes", "best_head", "first_at", "in_lanes", "is_row_of_numbers", "keys_of", "lanes", "lists_of",
    "logits_of_taken", "nothing_held", "number_found", "numbers_of", "of_each", "over", "part_of_rows", "recorded",
    "taken_of", "tiles_of",
})  # fmt: skip


def _run_route(recorder: Recorder, x: Tensor, block: int) -> dict[str, Any]:
    options = Routing(k=min(CHOSEN, x.shape[1]), return_counts=False)
    recorder.memory.hold("x", x, "input")
    with recorder:
        forward(rows_of_call(x, options), options, False)
    return {"k": options.k, "renormalize": True}


ROUTES = (
    Kernel(
        name="route",
        title="the two best experts of each token",
        summary="A row has a token's logits, one for each expert. Its two best experts get the token. Each choice is a "
        "maximum over what is left; nothing is sorted in memory. The weights are the softmax of the chosen logits "
        "alone, so the row's other numbers are not added up. The row is read once, and each choice is written: an "
        "expert and its weight.",
        operation="route",
        run=_run_route,
        formula=Formula(1, 0, written_m=2 * CHOSEN),
        story=Story(
            {
                "_route": Told(
                    {"find the token": "sequence, first, end"},
                    row="first",
                    m=(),
                    s=(),
                    silent=("held = nothing_held",),
                    unused=("held",),
                ),
                "route_rows": Told(
                    {
                        "find the token": "row = (first",
                        "load": "tiles = tiles_of",
                        "choose": "wrong = of_each",
                        "check": "valid &= (m >",
                        "weights": "weights = weights_of_taken",
                        "write": "j = lanes",
                    },
                    m=(),
                    s=(),
                    notes={
                        "tiles = tiles_of": "A lane for each expert. A warp has 32, so the others here hold -inf.",
                        "keys, ordered = keys_of": "The logits become integers that sort as they do.",
                        "found, ids, last": "The chosen experts lie in the first lanes, the best one first.",
                        "weights = weights_of_taken": "The softmax of the chosen logits alone: they add up to 1.",
                    },
                    silent=(
                        "HALVES",
                        "m, total = of_each",
                        "wrong = of_each",
                        "scores, of_scores = tiles",
                        "wrong &= valid",
                        "valid &= wrong",
                        "R = Given",
                    ),
                    unused=(
                        "n_turns",
                        "scale",
                        "noise_row_stride",
                        "dense_row_stride",
                        "total",
                        "of_scores",
                        "wrong",
                        "last",
                        "last_id",
                        "held",
                        "scores",
                    ),
                ),
                "choose": Told(
                    {"choose": "found, ids = ()"},
                    notes={
                        "at = first_at": "The greatest of all heads is the next choice. Of equal ones the lowest "
                        "expert has it.",
                        "heads, experts = after(heads, experts, best, at": "The lane that had the best goes on to its "
                        "next.",
                    },
                    silent=(
                        "HALVES",
                        "found, ids = (), ()",
                        "found = found + (in_lanes",
                        "ids = ids + (in_lanes",
                        "best, at = of_each",
                    ),
                    unused=("n_turns",),
                ),
                "weights_of_taken": Told(
                    {"weights": "top = m"},
                    notes={
                        "factor *= over(sum_of_scores, some)": "One division for each row; each weight is multiplied.",
                    },
                    silent=("HALVES", "scores = ()", "weights = ()"),
                    unused=("m", "total", "scale"),
                ),
            },
            roles={"weights_ptr": "output", "indices_ptr": "output"},
            step_over=_PLACES,
        ),
        block=False,
        dtypes=NARROW,
    ),
)
