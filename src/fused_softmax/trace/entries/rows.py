"""Entries of the registry: the strategies of `ops`, with plans small enough to read.

The planner's own plans begin at 128 columns. These plans have the same fields, for blocks of any size. They read
element by element ("scalar"), so parts and pieces may begin anywhere.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from fused_softmax.core.plan import H200, RowPlan, Strategy, candidate
from fused_softmax.ops.losses import launches as cross_entropy_calls
from fused_softmax.ops.losses.kernels.spec import Numbers
from fused_softmax.ops.losses.options import Loss
from fused_softmax.ops.losses.sums import totals_of
from fused_softmax.ops.softmax.calls import backward_by_plan, forward_by_plan
from fused_softmax.ops.softmax.column_plan import ColumnPlan
from fused_softmax.ops.softmax.launches import prepare_columns
from fused_softmax.trace.entries.kernel import NARROW, Formula, Kernel, Run
from fused_softmax.trace.recorder.memory import Role
from fused_softmax.trace.recorder.recorder import Recorder
from fused_softmax.trace.recorder.story import Story, Told

TILE_ROWS = 2
COLUMN_INNER = 4

# Functions that only compute positions, do nothing under the interpreter, or are clear from one word of the caller.
PLACES = frozenset({
    "asks_of", "at_columns", "body_of", "columns_of", "exp_at", "hold_all", "in_any_warp", "load_exact",
    "load_kept", "load_piece", "load_target_logit", "mask_of_row", "multiple_of", "next_missing", "numbers_of",
    "of_each_row", "origin_of", "pack_state", "part_of", "place_of", "rounded_product", "row_of_part", "row_of_program",
    "scores_of", "scores_of_columns", "scores_of_row", "sink_of_row", "slope_of", "slots_again", "slots_of",
    "store_piece", "stream_part", "tag_of", "tile_of", "unpack_state", "wait_for", "weight_of", "weight_total",
    "weights_at", "whole_vectors", "widen", "with_sink", "writes_of", "zero_of",
})  # fmt: skip
# Functions that pass a row's pieces, and its edge if it has one, to the functions that do the work.
_THROUGH = frozenset({
    "dot_of_row", "load_logits", "load_row", "load_scores", "max_of_row", "store_gradient", "store_row", "sum_of_row",
})  # fmt: skip
_ROLES: dict[str, Role] = {"y_ptr": "output", "dx_ptr": "output"}
_STATES = frozenset({"m_ptr", "s_ptr", "d_ptr", "ls_ptr", "loss_ptr"})
_SMALL = ("slots_ptr", "target_ptr", "totals_ptr")  # beside the matrix
_ROLES |= dict.fromkeys((*_STATES, *_SMALL), "scratch")


def row_plan(strategy: Strategy, x: Tensor, block: int, *, inputs: int = 1) -> RowPlan:
    """A strategy's plan for x [n_rows, n_cols] with tiles of `block` columns; split and stream cut rows into parts."""
    n_rows, n_cols = x.shape
    like = candidate(strategy, n_rows, n_cols, 4, H200, alignment="scalar", inputs=inputs, num_warps=1, prefetch=0)
    plan = replace(like, itemsize=x.element_size(), block_cols=block, copies=1, poll_last_first=False)
    tiles = -(-n_cols // block)
    if strategy in ("tile", "row"):
        rows = TILE_ROWS if strategy == "tile" else 1
        return replace(plan, block_rows=rows, pieces=tiles, full_pieces=n_cols // block)
    # In split a part is one tile, so that a program waits for many. In stream it is two, so that a part merges them.
    part_cols = block if strategy == "split" else 2 * block
    parts = -(-n_cols // part_cols)
    last = n_cols - (parts - 1) * part_cols
    full = last // block if strategy == "split" else 0
    lanes = triton.next_power_of_2(parts)
    return replace(plan, parts=parts, part_cols=part_cols, pieces=1, full_pieces=full, lanes=lanes)


def column_plan(x: Tensor, block: int) -> ColumnPlan:
    """A plan for the strided dim of x [n_cols, n_inner], with tiles of `block` columns."""
    n_cols, n_inner = x.shape
    return ColumnPlan(
        n_outer=1, n_cols=n_cols, n_inner=n_inner, itemsize=x.element_size(), inputs=1, block_cols=block,
        block_inner=min(COLUMN_INNER, triton.next_power_of_2(n_inner)), pieces=-(-n_cols // block),
        full_pieces=n_cols // block, parts=1, part_cols=n_cols, lanes=1, num_warps=1,
    )  # fmt: skip


def _facts(plan: RowPlan | ColumnPlan) -> dict[str, Any]:
    names = ("strategy", "block_rows", "block_cols", "block_inner", "pieces", "parts", "part_cols")
    return {"plan": {name: getattr(plan, name) for name in names if hasattr(plan, name)}}


def _forward(strategy: Strategy) -> Run:
    def run(recorder: Recorder, x: Tensor, block: int) -> dict[str, Any]:
        y = torch.empty_like(x)
        plan = row_plan(strategy, x, block)
        recorder.memory.hold("x", x, "input")
        recorder.memory.hold("y", y, "output")
        with recorder:
            forward_by_plan(x, plan, y=y)
        return _facts(plan)

    return run


def _run_column(recorder: Recorder, x: Tensor, block: int) -> dict[str, Any]:
    """Run softmax on the same matrix laid out column by column, so that its rows are strided."""
    x = x.t().contiguous()
    y = torch.empty_like(x)
    plan = column_plan(x, block)
    recorder.memory.hold("x", x.t(), "input")
    recorder.memory.hold("y", y.t(), "output")
    views = x[None], y[None]
    run = prepare_columns(*views, plan=plan)
    assert run is not None  # a given plan holds any columns
    with recorder:
        run(*views)
    return _facts(plan)


def _run_backward(recorder: Recorder, x: Tensor, block: int) -> dict[str, Any]:
    y, dx = torch.softmax(x, dim=1), torch.empty_like(x)
    dy = torch.zeros_like(x)
    dy[:, 0] = 1
    plan = row_plan("split", x, block, inputs=2)
    recorder.memory.hold("y", y, "input")
    recorder.memory.hold("dy", dy, "input")
    recorder.memory.hold("dx", dx, "output")
    with recorder:
        backward_by_plan(dy, y, dx, plan)
    return _facts(plan) | {"dy": "1 in column 0, 0 elsewhere"}


def _run_cross_entropy(recorder: Recorder, x: Tensor, block: int) -> dict[str, Any]:
    n_rows, n_cols = x.shape
    target = torch.arange(n_rows) % n_cols
    dx = torch.empty_like(x)
    plan = row_plan("split", x, block)
    loss = Loss()
    totals = totals_of(target, loss, n_cols, torch.float32)
    recorder.memory.hold("x", x, "input")
    recorder.memory.hold("dx", dx, "output")
    with recorder:
        cross_entropy_calls.forward(x, target, loss, totals, dx, plan)
    return _facts(plan) | {"target": "column i in row i"}


def _story(
    *, phases: tuple[str, ...] = (), waits: bool = False, message: dict[str, str] | None = None, **told: Told
) -> Story:
    """message: for each number of a message, the local of `publish` that holds it; `states_of` adds "_parts" to it."""
    message = message or {"m": "m", "s": "s"}
    if waits:
        told |= {"publish": _PUBLISH, "collect": _COLLECT, "states_of": _STATES_OF}
    return Story(
        told,
        phases=phases,
        roles=_ROLES,
        unset=_STATES,
        step_over=PLACES,
        step_through=_THROUGH,
        waits=frozenset({"collect"}) if waits else frozenset(),
        publishes={"publish": message} if waits else {},
        collects={"states_of": {name: f"{local}_parts" for name, local in message.items()}} if waits else {},
    )


_NO_SINK = ("sink = sink_of_row", "m, s = with_sink(m, s")
_SLOTS = ("row_slots_ptr = slots_ptr", "tag = 0")  # `slots_of` gives both, where programs exchange
_PART_FORWARD = Told(
    {
        "find the part": "program = tl.program_id",
        "load": "z, edge, m = load_part",
        "sum": "z = hold_all",
        "exchange": ("if K.prefetch and K.split", "if K.split:"),
        "output": "store_row(",  # of a row that is whole; parts have store_part
    },
    silent=(*_NO_SINK, *_SLOTS, "n_programs ="),
)
_ROW_FORWARD = replace(_PART_FORWARD, phases={
    "find the row": "program = tl.program_id",
    "load": "z, edge, m = load_part",
    "sum": "z = hold_all",
    "output": "store_row(",
})  # fmt: skip
_LOAD_PART = Told({"load": "z, edge = load_row", "maximum": "m, edge = max_of_row"}, row="r.row", state=True)
_ALL = "From here on the program knows the whole row's maximum and sum."
_STORE_PART = Told(
    {"output": "store_row("},
    row="r.row",
    notes={"m, s = merged(": _ALL},
    silent=_NO_SINK[1:],
    unused=("sink",),
    state=True,
)
_AS_N = tuple(f"L.{name}" for name in Numbers._fields)  # `numbers_of` makes one N of them
_PUBLISH = Told(
    notes={"tl.atomic_xchg": "One 64-bit message holds everything the others need. Written whole, it needs no flag."}
)
_COLLECT = Told(
    notes={
        "j = tl.arange": "The program waits for its row's other parts, and lets those run that can.",
        "message, left = wait_for": "While a message is missing, the program looks again, 512 times at most. A part "
        "that is missing then it computes itself.",
    }
)
# Of a program that has waited for a part in vain, and reads it.
_ALONE = Told(
    {"exchange": "row, part = row_of_program", "output": "ptr = body_of"},
    state=True,
    notes={"_, _, edge, column = scan_part": "It holds no part here, so it reads its own again, too."},
    silent=("given = Parts", "sink = sink_of_row", "m, s = with_sink"),
    unused=("S", "_"),
)
_STAND_IN = Told(
    notes={
        "m, s = STATE(": "The part that has told nothing: the program reads it, and has its maximum and sum.",
        "message = tl.where((j == part)": "What the missing message would have said takes its place. The slot stays as "
        "it is: its own program may still come.",
    },
    silent=("LANES",),
)
_STATES_OF = Told(notes={"m_parts, s_parts =": "The state of each part, its own included."})

OURS = (
    Kernel(
        name="tile",
        title="several rows for each program",
        summary="For short rows. A program takes a tile of several rows and holds it in registers, in pieces. Where "
        "rows run out, it repeats the last one and writes the same values to the same place.",
        operation="softmax",
        run=_forward("tile"),
        formula=Formula(1, 1),
        story=_story(
            _tile_forward=Told(
                {
                    "find the rows": "r = tile_of",
                    "load": "z, edge = load_row",
                    "maximum": "m, edge = max_of_row",
                    "sum": "z = hold_all",
                    "output": "store_row(",
                },
                row="r.row",
                notes={
                    "r = tile_of": "Rows past the end repeat the last one.",
                    "m, s = with_sink": "No sink is given, so the sum is that of the row.",
                },
                silent=_NO_SINK[:1],
            )
        ),
    ),
    Kernel(
        name="row",
        title="one row for each program, in pieces",
        summary="One program holds one row, cut into power-of-two pieces. Only the last piece is masked, so the row is "
        "not padded to the next power of two.",
        operation="softmax",
        run=_forward("row"),
        formula=Formula(1, 1),
        story=_story(
            _part_forward=_ROW_FORWARD,
            load_part=_LOAD_PART,
        ),
    ),
    Kernel(
        name="split",
        title="one row over several programs",
        summary="For long rows. Several programs share a row. Each keeps its part in registers, publishes its maximum "
        "and sum in one 64-bit message, waits for the others' messages, merges them and writes. The row is read only "
        "once.",
        operation="softmax",
        run=_forward("split"),
        formula=Formula(1, 1),
        story=_story(
            waits=True,
            _part_forward=_PART_FORWARD,
            load_part=_LOAD_PART,
            store_part=_STORE_PART,
            finish_alone=_ALONE,
            stand_in=_STAND_IN,
        ),
        dtypes=NARROW,  # messages are fp32
    ),
    Kernel(
        name="stream",
        title="two reads of rows that the chip cannot hold",
        summary="For rows that are too long for the chip. Programs first find the maximum and sum of their parts, "
        "online. A second launch merges the states of a row's parts, reads the row again and writes the output.",
        operation="softmax",
        run=_forward("stream"),
        formula=Formula(2, 1),
        story=_story(
            _stream_state=Told(
                {"find the part": "program = tl.program_id", "maximum and sum": "x_body = body_of"}, row="r.row"
            ),
            _stream_forward=Told(
                {"merge": "j = tl.arange", "output": "q = scores_of_row"},
                row="r.row",
                notes={
                    "s = tl.sum": "The states of the row's parts merge. Each sum is multiplied by exp of its maximum "
                    "minus the row's."
                },
                silent=_NO_SINK[1:],
            ),
            merge=Told(
                notes={
                    "return m": "Each sum is multiplied by exp of its maximum minus the larger one, then both "
                    "are added."
                }
            ),
        ),
    ),
    Kernel(
        name="column",
        title="softmax over a strided dim",
        summary="The reduced dim is not the contiguous one. A program reads tiles that are wide along the contiguous "
        "dim, so that its accesses are contiguous. It keeps a maximum and a sum for every position along that dim.",
        operation="softmax",
        run=_run_column,
        formula=Formula(1, 1),
        story=_story(
            _column_forward=Told(
                {
                    "find the columns": "group, part = place_of",
                    "load": "x, m, s = hold_columns",
                    "output": "y = Strided",
                },
                row="c.inner",
                silent=("group_slots_ptr = slots_ptr", "tag = 0"),
            ),
            hold_columns=Told(
                {"load": "x = load_columns", "maximum": "m = max_of", "sum": "x = hold_all"}, row="c.inner", state=True
            ),
        ),
    ),
    Kernel(
        name="backward",
        title="the gradient, one row over several programs",
        summary="dx = y * (dy - d) with d = sum y * dy. A row's programs exchange their parts of d, as the forward's "
        "programs exchange m and s. y and dy are read once, and dx is written once. Here dy asks for the gradient of "
        "the first probability.",
        operation="softmax_backward",
        run=_run_backward,
        formula=Formula(2, 1),
        story=_story(
            waits=True,
            message={"d": "m"},
            _part_backward=Told(
                {
                    "find the part": "program = tl.program_id",
                    "load": "y, dy = load_both",
                    "sum of y dy": "d, edge_y, edge_dy = dot_of_row",
                    "exchange": ("if K.prefetch:", "if K.split:"),
                    "output": "store_gradient(",
                },
                m=(),
                s=(),
                silent=_SLOTS,
            ),
            summed=Told(
                notes={
                    "return tl.sum": "The parts of d are added. Unlike sums of exponentials, they need no rescaling."
                }
            ),
        ),
        dtypes=NARROW,  # messages are fp32
    ),
    Kernel(
        name="cross-entropy",
        title="the loss and its gradient, in one read",
        summary="The mean cross-entropy of rows whose targets lie on the diagonal. Programs share a row as in split. "
        "The row's maximum and sum give them the loss. They write its gradient while the logits are still in "
        "registers: p minus 1 at the target and p elsewhere, divided by the number of rows.",
        operation="cross_entropy",
        run=_run_cross_entropy,
        formula=Formula(1, 1, read_m=1, written_m=1),
        story=_story(
            phases=("find the part", "target", "load", "target's logit", "maximum", "sum", "exchange", "loss"),
            waits=True,
            _part_loss=Told(
                {"find the part": "program = tl.program_id", "exchange": ("if K.prefetch:", "if K.split:")},
                notes={"m, s = merged(": _ALL},
                silent=(*_SLOTS, "L = LossRow"),
            ),
            hold_part=Told(
                {
                    "target": "T = target_of",
                    "load": "z, edge = load_part",
                    "target's logit": "writes = writes_of",
                    "maximum": "m = max_of_part",
                    "sum": "z = hold_all",
                },
                row="r.row",
                silent=("n_rows =", "g = 1.0", "g_z = 1.0"),
                unused=_AS_N,
                state=True,
            ),
            load_part=Told({"load": "z = load_logits"}, row="r.row", state=True),
            max_of_part=Told({"maximum": "m = max_of"}, row="r.row", state=True),
            finish_part=Told(
                {"loss": "a, D = finish_row", "gradient": "z = hold_all"},
                silent=("N = numbers_of", "T = H.target"),
                unused=_AS_N,
            ),
            finish_row=Told(
                {"loss": "ls = log_sum_of", "gradient": "g, g_z = per_row"},
                silent=(
                    "T = H.target",
                    "zero = H.zero",
                    "wz = H.wz",
                    "loss_ptr = L.loss_ptr",
                    "z_ptr = L.z_ptr",
                    "g = H.g",
                    "g_z = H.g_z",
                ),
                unused=("H.g", "H.g_z", *_AS_N),
            ),
            store_part=Told(
                {"gradient": "scale, base = origin_of"},
            ),
            store_rest=Told(
                {"gradient at the target": "tl.debug_barrier"},
                notes={
                    "dx_t = gradient_of_logits": "At the target, 1 is subtracted from p. Its program overwrites "
                    "this one element."
                },
            ),
        ),
        dtypes=NARROW,  # messages are fp32
    ),
)
