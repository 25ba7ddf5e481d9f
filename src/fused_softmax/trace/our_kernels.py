"""Entries of the registry: the strategies of `ops`, by plans small enough to be read.

The planner's own plans begin at 128 columns. These hold the same fields, for blocks of any size, and read element by
element ("scalar"), so that parts and pieces may begin anywhere.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from fused_softmax.ops import column
from fused_softmax.ops.cross_entropy_forward import cross_entropy_forward
from fused_softmax.ops.losses import Loss, totals_of
from fused_softmax.ops.softmax_backward import softmax_backward
from fused_softmax.ops.softmax_forward import softmax_forward
from fused_softmax.plan import H200, ColumnPlan, RowPlan, Strategy, candidate
from fused_softmax.trace.memory import Role
from fused_softmax.trace.recorder import Recorder
from fused_softmax.trace.registry import Formula, Kernel, Run
from fused_softmax.trace.story import Story, Told

TILE_ROWS = 2
COLUMN_INNER = 4

# What computes only where things are, or does nothing under the interpreter, and what one word of its caller says.
PLACES = frozenset({
    "body_of", "broadcast_offset", "edges_of", "exp_at", "factor_of", "head_of", "hold", "hold_all", "inner_of",
    "logits_of", "multiple_of", "numbers_of", "origin_of", "pack_state", "place_of", "scores_of", "shared_row",
    "slots_of", "tag_of", "unpack_state", "visible_of", "wait_for", "weight_of", "widen",
})  # fmt: skip
_ROLES: dict[str, Role] = {"y_ptr": "output", "dx_ptr": "output"}
_STATES = frozenset({"m_ptr", "s_ptr", "d_ptr", "ls_ptr", "loss_ptr"})
_SMALL = ("slots_ptr", "target_ptr", "totals_ptr")  # beside the matrix
_ROLES |= dict.fromkeys((*_STATES, *_SMALL), "scratch")
_NARROW = ("float32", "float16", "bfloat16")  # messages are fp32


def row_plan(strategy: Strategy, x: Tensor, block: int, *, inputs: int = 1) -> RowPlan:
    """A plan of a strategy for x [n_rows, n_cols] with tiles of `block` columns; rows of split and stream in parts."""
    n_rows, n_cols = x.shape
    like = candidate(strategy, n_rows, n_cols, 4, H200, alignment="scalar", inputs=inputs, num_warps=1, prefetch=0)
    plan = replace(like, itemsize=x.element_size(), block_cols=block, copies=1, poll_last_first=False)
    tiles = -(-n_cols // block)
    if strategy in ("tile", "row"):
        rows = TILE_ROWS if strategy == "tile" else 1
        return replace(plan, block_rows=rows, pieces=tiles, full_pieces=n_cols // block)
    # Of split a tile is a part, so that there are many to wait for; of stream two, so that a part has what to merge.
    part_cols = block if strategy == "split" else 2 * block
    parts = -(-n_cols // part_cols)
    last = n_cols - (parts - 1) * part_cols
    full = last // block if strategy == "split" else 0
    lanes = triton.next_power_of_2(parts)
    return replace(plan, parts=parts, part_cols=part_cols, pieces=1, full_pieces=full, lanes=lanes)


def column_plan(x: Tensor, block: int) -> ColumnPlan:
    """A plan for the dim of x [n_cols, n_inner] that is not contiguous, with tiles of `block` columns."""
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
            softmax_forward(x, y, plan)
        return _facts(plan)

    return run


def _run_column(recorder: Recorder, x: Tensor, block: int) -> dict[str, Any]:
    """The same matrix, laid out column by column: its rows are the strided dim."""
    x = x.t().contiguous()
    y = torch.empty_like(x)
    plan = column_plan(x, block)
    recorder.memory.hold("x", x.t(), "input")
    recorder.memory.hold("y", y.t(), "output")
    views = x[None], y[None]
    with recorder:
        column.prepare_softmax(*views, plan=plan)(*views)
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
        softmax_backward(dy, y, dx, plan=plan)
    return _facts(plan) | {"dy": "1 in column 0, else 0"}


def _run_cross_entropy(recorder: Recorder, x: Tensor, block: int) -> dict[str, Any]:
    n_rows, n_cols = x.shape
    target = torch.arange(n_rows) % n_cols
    dx = torch.empty_like(x)
    plan = row_plan("split", x, block)
    loss = Loss(mean=True)
    totals = totals_of(target, loss, n_cols, torch.float32)
    recorder.memory.hold("x", x, "input")
    recorder.memory.hold("dx", dx, "output")
    with recorder:
        cross_entropy_forward(x, target, loss, totals, dx, plan)
    return _facts(plan) | {"target": "column i of row i"}


def _story(*, waits: bool = False, message: dict[str, str] | None = None, **told: Told) -> Story:
    """message: of each number of a message, the local of `publish` that holds it; that of `collect` is of all parts."""
    message = message or {"m": "m", "s": "s"}
    return Story(
        told,
        roles=_ROLES,
        unset=_STATES,
        step_over=PLACES,
        waits=frozenset({"collect"}) if waits else frozenset(),
        publishes={"publish": message} if waits else {},
        collects={"collect": {name: f"{local}_parts" for name, local in message.items()}} if waits else {},
    )


_ROW = {
    "find the row": "program = tl.program_id",
    "load": "x = load_scores",
    "maximum": "m = max_of",
    "sum": "x = hold_all",
    "output": "if COLLECT:",
}
_PART: dict[str, str | tuple[str, ...]] = {
    "find the part": "program = tl.program_id",
    "load": "x = load_scores",
    "maximum": "m = max_of",
    "sum": "x = hold_all",
    "exchange": ("if PREFETCH and SPLIT", "if SPLIT:"),
    "output": "if COLLECT:",
}
_ALL = {"m, s = exchange(": "From here on the program knows the maximum and sum of the whole row."}
_PUBLISH = Told(
    notes={"tl.atomic_xchg": "One 64-bit message holds all that the others need: written whole, it wants no flag."}
)
_COLLECT = Told(
    notes={
        "j = tl.arange": "Here a program waits until every part of its row has published; the others run meanwhile.",
        "m_parts, s_parts =": "One message of each part, its own among them.",
    }
)

OURS = (
    Kernel(
        name="tile",
        title="several rows a program",
        summary="Short rows: a program takes a tile of several rows, held in registers in pieces. Where rows run out, "
        "the last one is repeated: the same values to the same place.",
        operation="softmax",
        run=_forward("tile"),
        formula=Formula(1, 1),
        story=_story(
            _tile_forward=Told(
                {
                    "find the rows": "first_row = tl.program_id",
                    "load": "x = load_scores",
                    "maximum": "m = max_of",
                    "sum": "x = hold_all",
                    "output": "y_body = body_of",
                },
                notes={"row =": "Rows past the end repeat the last one."},
            )
        ),
    ),
    Kernel(
        name="row",
        title="a row a program, in pieces",
        summary="One program holds one row, cut into power-of-two pieces of which only the last is masked: no block is "
        "padded to the next power of two.",
        operation="softmax",
        run=_forward("row"),
        formula=Formula(1, 1),
        story=_story(_part_forward=Told(_ROW)),
    ),
    Kernel(
        name="split",
        title="a row over several programs",
        summary="A long row is the work of several programs at once. Each keeps its part in registers, publishes its "
        "maximum and sum in one 64-bit message, waits for the others', merges them and writes: still one read.",
        operation="softmax",
        run=_forward("split"),
        formula=Formula(1, 1),
        story=_story(waits=True, publish=_PUBLISH, collect=_COLLECT, _part_forward=Told(_PART, notes=_ALL)),
        dtypes=_NARROW,
        merge=True,
    ),
    Kernel(
        name="stream",
        title="two reads of what the chip cannot hold",
        summary="Rows longer than the chip holds: programs first find the maximum and sum of their parts, online; a "
        "second launch merges the states of a row's parts, reads the row again and writes the output.",
        operation="softmax",
        run=_forward("stream"),
        formula=Formula(2, 1),
        story=_story(
            _stream_state=Told({"find the part": "program = tl.program_id", "maximum and sum": "x_body = body_of"}),
            _stream_forward=Told(
                {"merge": "program = tl.program_id", "output": "start = part"},
                notes={
                    "s = tl.sum": "The states of the row's parts merge: each sum is rescaled to the common maximum."
                },
            ),
            merge=Told(
                notes={"return m": "Each of the two sums is rescaled to the maximum of both, then they add up."}
            ),
        ),
    ),
    Kernel(
        name="column",
        title="softmax over a strided dim",
        summary="The dim to reduce is not the contiguous one. A program reads tiles that are wide along the contiguous "
        "dim, so that accesses are whole, and keeps a maximum and a sum for every position along it.",
        operation="softmax",
        run=_run_column,
        formula=Formula(1, 1),
        story=_story(
            _column_forward=Told(
                {
                    "find the columns": "group, part = place_of",
                    "load": "x_outer_stride, x_col_stride =",
                    "maximum": "m = max_of",
                    "sum": "x = hold_all",
                    "output": ("if SPLIT:", "if COLLECT:", "if COLLECT:"),
                },
                row="inner",
            )
        ),
    ),
    Kernel(
        name="backward",
        title="the gradient, a row over several programs",
        summary="dx = y * (dy - d) with d = sum y * dy. Programs of a row exchange their parts of d, as those of the "
        "forward do m and s; y and dy are read once, dx is written once. Here dy asks for the gradient of the first "
        "probability.",
        operation="softmax_backward",
        run=_run_backward,
        formula=Formula(2, 1),
        story=_story(
            waits=True,
            message={"d": "m"},
            publish=_PUBLISH,
            collect=_COLLECT,
            _part_backward=Told(
                {
                    "find the part": "program = tl.program_id",
                    "load": "y_body = body_of",
                    "sum of y dy": "d = dot_of",
                    "exchange": ("if PREFETCH:", "prefetch_l2(dy_ptr", "if SPLIT:"),
                    "output": ("if COLLECT:", "if COLLECT:"),
                },
                m=(),
                s=(),
                notes={"d = tl.sum": "The parts of d add up; unlike sums of exponentials, they need no rescaling."},
            ),
        ),
        dtypes=_NARROW,
        merge=True,
    ),
    Kernel(
        name="cross-entropy",
        title="the loss and its gradient, in one read",
        summary="The mean cross-entropy of rows whose targets lie on the diagonal. Programs share a row as in split; "
        "with its maximum and sum they know the loss, and write its gradient, p less 1 at the target, while the logits "
        "are still in registers.",
        operation="cross_entropy",
        run=_run_cross_entropy,
        formula=Formula(1, 1, read_m=1, written_m=1),
        story=_story(
            waits=True,
            publish=_PUBLISH,
            collect=_COLLECT,
            _part_loss=Told(
                {
                    "find the part": "program = tl.program_id",
                    "target": "t, kept, wrong, w = target_of",
                    "load": "x_body = body_of",
                    "maximum": "m = max_of",
                    "sum": "x = hold_all",
                    "exchange": ("if PREFETCH:", "if SPLIT:"),
                    "loss": "if COLLECT:",
                    "gradient": "g, g_z = per_row",
                    "gradient at the target": "tl.debug_barrier",
                },
                notes={
                    "dx_t = gradient_of_logits": "Less 1 at the target: one element, written over by its own program."
                },
            ),
        ),
        dtypes=_NARROW,
        merge=True,
    ),
)
