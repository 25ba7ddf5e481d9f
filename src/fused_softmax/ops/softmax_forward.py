"""softmax and log_softmax of rows.  y = exp(z - m) / s, or z - m - log s,  m = max z,  s = sum exp(z - m).

z is the input x, or what its Scores make of it: scaled, masked, causal.
Traffic: every element is read once and written once (2MN), however long the row; only rows that the chip cannot hold
are read twice (stream, 3MN). What causality hides is not read.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_softmax import launch, reference, workspace
from fused_softmax.device import device_of
from fused_softmax.ops.arguments import TLDTYPES, alignment_of, as_rows
from fused_softmax.ops.scores import PLAIN, Scores, layout_of
from fused_softmax.ops.softmax_causal import prepare_causal
from fused_softmax.plan import RowPlan, fetches_ahead, most_registers, plan_rows
from fused_softmax.rowwise import (
    NEG_INF,
    body_of,
    broadcast_offset,
    edges_of,
    exchange,
    exp_at,
    factor_of,
    first_max_of,
    head_of,
    hold_all,
    keep_column,
    keep_scores,
    load_edges,
    load_scores,
    max_of,
    merge,
    origin_of,
    prefetch_l2,
    result_of,
    scores_of,
    shared_row,
    store_results,
    sum_exp_of,
    tag_of,
    visible_of,
    weight_of,
)


def softmax_forward(
    x: Tensor, y: Tensor | None = None, plan: RowPlan | None = None, *, log: bool = False, scores: Scores = PLAIN
) -> Tensor:
    """softmax, or its logarithm, over the last dim of x [..., n_cols] into y, by `plan` or the planner's.

    y: same shape, its rows contiguous; a new contiguous tensor of x's dtype if None. `plan` is for the whole of x.
    """
    if y is None:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        x_rows, y_rows = as_rows(x), as_rows(y)
        plan = plan or plan_forward(x_rows, y_rows, scores)
        prepare(x_rows, y_rows, plan, log=log, scores=scores, shape=tuple(x.shape))(x_rows, y_rows)
        if plan.strategy == "stream" and scores.greedy:
            _keep_first_max(x, y, log, scores)
    return y


def _keep_first_max(x: Tensor, y: Tensor, log: bool, scores: Scores) -> None:
    """The rows of scale 0 among rows that stream: what no kernel does for them, of torch's operations."""
    arithmetic = torch.promote_types(y.dtype, torch.float32)
    greedy = reference.log_softmax if log else reference.softmax
    one_hot = greedy(
        x, dtype=y.dtype, scale=0.0, mask=scores.mask, is_causal=scores.is_causal, masked_rows=scores.masked_rows,
        arithmetic=arithmetic,
    )  # fmt: skip
    y.copy_(torch.where(torch.as_tensor(scores.scale, device=x.device) == 0, one_hot, y))


def prepare_forward(x: Tensor, y: Tensor, plan: RowPlan | None = None, *, log: bool = False, scores: Scores = PLAIN):
    """What runs the forward from any tensor like x [..., n_cols] into any like y, alignment included: `run(x, y)`."""
    x_rows, y_rows = as_rows(x), as_rows(y)
    if plan is None:
        plan = plan_forward(x_rows, y_rows, scores)
    return prepare(x_rows, y_rows, plan, log=log, scores=scores, shape=tuple(x.shape))


def plan_forward(x: Tensor, y: Tensor, scores: Scores = PLAIN) -> RowPlan:
    """The planner's choice for rows x and y [n_rows, n_cols]."""
    n_rows, n_cols = x.shape
    # The dtype of what is held: of the arithmetic where that is fp64, or where sums with a mask are held and not x.
    itemsize = 8 if y.dtype == torch.float64 else max(x.element_size(), 4 if scores.added else 0)
    device, alignment = device_of(x.get_device()), alignment_of(x, y)
    causal = scores.is_causal and not scores.greedy  # a greedy row takes more registers
    return plan_rows(n_rows, n_cols, itemsize, device, alignment=alignment, causal=causal)


def prepare(
    x: Tensor,
    y: Tensor,
    plan: RowPlan,
    *,
    log: bool = False,
    scores: Scores = PLAIN,
    shape: tuple[int, ...] | None = None,
):
    """What launches `plan` on x and y [n_rows, n_cols], columns contiguous: `run(x, y)`, for any tensors like these.

    shape: the input's own, against which mask and scale broadcast; x's unless told.
    """
    device = x.get_device()
    gpu = device_of(device)
    ptx = gpu.backend == "cuda" and device >= 0
    layout = layout_of(scores, shape or tuple(x.shape))
    extra = tuple(tensor for tensor in layout.tensors if tensor is not None)
    strides = (x.stride(0), y.stride(0))
    phase = x.data_ptr() // x.element_size() % plan.vector
    constexprs = {
        "BLOCK_COLS": plan.block_cols, "PIECES": plan.pieces, "FULL_PIECES": plan.full_pieces, "VECTOR": plan.vector,
        "SHIFTED": plan.alignment == "shifted", "CAST": TLDTYPES[y.dtype], "LOG": log, "PTX": ptx,
    } | layout.constexprs  # fmt: skip
    ahead = {"PREFETCH": ptx and fetches_ahead(plan, gpu, x.element_size(), causal=scores.is_causal)}
    options: dict[str, Any] = {"device": device, "num_warps": plan.num_warps}

    def with_extra(run):
        return run if not extra else lambda x, y: run(x, y, *extra)

    if plan.strategy == "tile":
        tile = launch.prepare(
            _tile_forward, plan.programs, (x, y, *layout.tensors),
            (*strides, plan.n_rows, plan.n_cols, phase, plan.prefetch, *layout.scalars),
            constexprs | ahead | {"BLOCK_ROWS": plan.block_rows}, **options,
        )  # fmt: skip
        return with_extra(tile)
    if plan.strategy == "row" and scores.is_causal:
        run = prepare_causal(x, y, plan, (*strides, plan.n_cols, phase, *layout.scalars), layout, constexprs, options)
        return with_extra(run)
    if plan.strategy == "stream":
        return _prepare_stream(x, y, plan, strides, phase, layout, constexprs, options)

    if ptx and not (scores.mask is not None or scores.is_causal):  # a mask takes more
        options["most_registers"] = most_registers(plan, gpu)
    n_rows, slots_per_row = plan.n_rows, plan.slots_per_row
    sizes = (plan.n_cols, plan.parts, plan.part_cols, plan.programs, phase, plan.prefetch)
    waiting = {"LANES": plan.lanes, "COPIES": plan.copies, "PATIENT": plan.poll_last_first}

    def parts(slots, publish, collect):
        return launch.prepare(
            _part_forward, plan.programs, (x, y, slots, *layout.tensors), (*strides, *sizes, *layout.scalars),
            constexprs | ahead | waiting | {
                "SPLIT": slots is not None, "PUBLISH": publish, "COLLECT": collect,
                "SHARED": 0 if slots is not None else layout.shared,
            },
            **options,
        )  # fmt: skip

    if plan.strategy == "row":
        return with_extra(parts(None, True, True))
    if device < 0:
        slots = torch.zeros(n_rows * slots_per_row, dtype=torch.int64)
        publish, collect = parts(slots, True, False), parts(slots, False, True)
        return lambda x, y: (publish(x, y, slots, *extra), collect(x, y, slots, *extra))
    both = parts(workspace.slots(device, n_rows, slots_per_row), True, True)
    if extra:
        return lambda x, y: both(x, y, workspace.slots(device, n_rows, slots_per_row), *extra)
    return lambda x, y: both(x, y, workspace.slots(device, n_rows, slots_per_row))


def _prepare_stream(x, y, plan, strides, phase, layout, constexprs, options):
    extra = tuple(tensor for tensor in layout.tensors if tensor is not None)
    sizes = (plan.n_cols, plan.parts, plan.part_cols, phase)
    state_dtype = torch.float64 if y.dtype == torch.float64 else torch.float32
    shape = (2, plan.n_rows, -(-plan.parts // 4) * 4)  # rows of states on 16 bytes, so that m and s are aligned alike
    states = torch.empty(shape, dtype=state_dtype, device=x.device)
    of_state = {name: value for name, value in constexprs.items() if name not in ("GREEDY", "LOG", "ZERO")}
    first = launch.prepare(
        _stream_state, plan.programs, (x, states[0], states[1], *layout.tensors),
        (strides[0], *sizes, *layout.scalars), of_state, **options,
    )  # fmt: skip
    second = launch.prepare(
        _stream_forward, plan.programs, (x, y, states[0], states[1], *layout.tensors),
        (*strides, *sizes, *layout.scalars),
        {name: value for name, value in constexprs.items() if name != "GREEDY"} | {"LANES": plan.lanes}, **options,
    )  # fmt: skip

    def run(x, y):
        states = torch.empty(shape, dtype=state_dtype, device=x.device)
        first(x, states[0], states[1], *extra)
        second(x, y, states[0], states[1], *extra)

    return run


@triton.jit(do_not_specialize=["n_rows", "n_cols", "phase", "ahead", "n_1", "n_2", "n_queries"])
def _tile_forward(
    x_ptr, y_ptr, mask_ptr, scale_ptr, x_row_stride, y_row_stride, n_rows, n_cols, phase, ahead,
    n_1, n_2, mask_0, mask_1, mask_2, mask_col_stride, scale_0, scale_1, scale_2, n_queries, number,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, PIECES: tl.constexpr, FULL_PIECES: tl.constexpr,
    VECTOR: tl.constexpr, SHIFTED: tl.constexpr, CAST: tl.constexpr, LOG: tl.constexpr, PREFETCH: tl.constexpr,
    PTX: tl.constexpr, MASK: tl.constexpr, SCALED: tl.constexpr, GREEDY: tl.constexpr,
    CAUSAL: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """Several short rows a program."""
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    # Rows past the end repeat the last one: the same values to the same place.
    row = tl.minimum(first_row + tl.arange(0, BLOCK_ROWS), n_rows - 1)[:, None]
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    head = head_of(row, x_row_stride, phase, VECTOR, SHIFTED)
    body = (n_cols - head) // VECTOR * VECTOR
    visible = visible_of(row, n_cols, n_queries, CAUSAL)
    factor, hidden, greedy = factor_of(row, number, scale_ptr, n_1, n_2, scale_0, scale_1, scale_2, SCALED, CAST)
    if MASK:
        mask_ptr += broadcast_offset(row, n_1, n_2, mask_0, mask_1, mask_2)
    # Edges first, so that what is made of both gets the layout of the pieces: else they are all laid out anew.
    FIRST: tl.constexpr = SHIFTED and (PIECES > 1 or x_ptr.dtype.element_ty.is_bf16())
    if FIRST:
        edge_cols, on_edge, edge = load_edges(x_ptr, row, x_row_stride, head, body, n_cols, hidden, VECTOR)
    x = load_scores(
        body_of(x_ptr, row, x_row_stride, phase, VECTOR, SHIFTED), head, cols, body, visible, factor, hidden,
        mask_ptr, mask_col_stride, BLOCK_COLS, PIECES, FULL_PIECES, VECTOR, CAST, MASK, SCALED, CAUSAL,
    )  # fmt: skip
    if SHIFTED and not FIRST:
        edge_cols, on_edge, edge = load_edges(x_ptr, row, x_row_stride, head, body, n_cols, hidden, VECTOR)
    HELD: tl.constexpr = x[0].dtype if MASK == 2 else CAST
    TIMES: tl.constexpr = SCALED and MASK != 2  # else the scores are finished as they are loaded
    m = max_of(x, factor, HELD, TIMES)[:, None]
    if SHIFTED:
        if MASK or CAUSAL:
            edge = keep_scores(
                edge, edge_cols, on_edge, visible, factor, hidden, mask_ptr, mask_col_stride,
                CAST, MASK, SCALED, CAUSAL,
            )  # fmt: skip
        edge = scores_of(edge, factor, HELD, TIMES)
        m = tl.maximum(m, tl.max(edge, axis=1)[:, None])
    if GREEDY:
        column = first_max_of(x, m, head, cols, factor, BLOCK_COLS, HELD, TIMES)[:, None]
        if SHIFTED:
            column = tl.minimum(column, tl.min(tl.where(edge == m, edge_cols, 2147483647), axis=1)[:, None])
            edge = tl.where(greedy & (edge_cols != column) & (edge == edge), NEG_INF, edge)
        x = keep_column(x, column, greedy, head, cols, BLOCK_COLS)
    if PREFETCH:
        first = first_row + ahead.to(tl.int64) * BLOCK_ROWS
        n_ahead = tl.minimum(BLOCK_ROWS * x_row_stride, (n_rows - 1 - first) * x_row_stride + n_cols)
        # Past the last row it is negative, and so far below zero at wide strides that it would not fit 32 bits.
        prefetch_l2(x_ptr, phase, first * x_row_stride, tl.maximum(n_ahead, 0))
    x = hold_all(x, PTX)
    scale, base = origin_of(m, PTX)
    s = sum_exp_of(x, scale, base, factor, HELD, TIMES, PTX)[:, None]
    if SHIFTED:
        s += tl.sum(exp_at(edge, scale, base, PTX), axis=1)[:, None]
    y_body = body_of(y_ptr, row, y_row_stride, phase, VECTOR, SHIFTED)
    store_results(y_body, x, m, s, factor, cols, body, BLOCK_COLS, FULL_PIECES, CAST, HELD, LOG, TIMES, ZERO, PTX)
    if SHIFTED:
        tl.store(y_ptr + row * y_row_stride + edge_cols, result_of(edge, m, s, CAST, LOG, ZERO, PTX), mask=on_edge)


@triton.jit(do_not_specialize=[
    "n_cols", "n_parts", "part_cols", "n_programs", "phase", "ahead", "n_1", "n_2", "n_queries"
])  # fmt: skip
def _part_forward(
    x_ptr, y_ptr, slots_ptr, mask_ptr, scale_ptr, x_row_stride, y_row_stride,
    n_cols, n_parts, part_cols, n_programs, phase, ahead,
    n_1, n_2, mask_0, mask_1, mask_2, mask_col_stride, scale_0, scale_1, scale_2, n_queries, number,
    BLOCK_COLS: tl.constexpr, PIECES: tl.constexpr, FULL_PIECES: tl.constexpr,
    VECTOR: tl.constexpr, SHIFTED: tl.constexpr, CAST: tl.constexpr, LOG: tl.constexpr, PREFETCH: tl.constexpr,
    PTX: tl.constexpr, MASK: tl.constexpr, SCALED: tl.constexpr, GREEDY: tl.constexpr,
    CAUSAL: tl.constexpr, ZERO: tl.constexpr, SPLIT: tl.constexpr,
    LANES: tl.constexpr, COPIES: tl.constexpr, PATIENT: tl.constexpr, PUBLISH: tl.constexpr, COLLECT: tl.constexpr,
    SHARED: tl.constexpr = 0,
):  # fmt: skip
    """A row a program, or one part of it (SPLIT). Parts start in order, and the plan lets all fit the chip at once.

    SHARED: rows that one row of the mask is for follow each other, so that it comes from memory once.
    """
    program = tl.program_id(0)
    if SPLIT:
        row = (program // n_parts).to(tl.int64)
        part = program % n_parts
        slots_ptr += row * n_parts * COPIES
        tag = tag_of(tl.load(slots_ptr + part, volatile=True))
        if PUBLISH:
            tag = 1 - tag
        start = part * (part_cols // VECTOR * VECTOR)
    else:
        row = program.to(tl.int64)
        if SHARED:
            row = shared_row(program, n_programs, n_1 * n_2 if SHARED == 2 else n_2)
        part = 0
        start = 0
    cols = tl.arange(0, BLOCK_COLS)
    head = head_of(row, x_row_stride, phase, VECTOR, SHIFTED)
    body = (n_cols - head) // VECTOR * VECTOR
    size = body
    if SPLIT:
        size = tl.minimum(part_cols // VECTOR * VECTOR, body - start)
    visible = visible_of(row, n_cols, n_queries, CAUSAL)
    factor, hidden, greedy = factor_of(row, number, scale_ptr, n_1, n_2, scale_0, scale_1, scale_2, SCALED, CAST)
    if MASK:
        mask_ptr += broadcast_offset(row, n_1, n_2, mask_0, mask_1, mask_2)
    x = load_scores(
        body_of(x_ptr, row, x_row_stride, phase, VECTOR, SHIFTED) + start, head + start, cols, size, visible, factor,
        hidden, mask_ptr, mask_col_stride, BLOCK_COLS, PIECES, FULL_PIECES, VECTOR, CAST, MASK, SCALED, CAUSAL,
    )  # fmt: skip
    if SHIFTED:  # loaded before anything waits for the pieces
        lane = tl.arange(0, 2 * VECTOR)
        edge_cols, on_edge = edges_of(lane, head, body, n_cols, VECTOR)
        # Parts are in the order of their columns, by which the first of equal maxima is found.
        on_edge = on_edge & (part == tl.where(lane < VECTOR, 0, n_parts - 1))
        edge = tl.load(x_ptr + row * x_row_stride + edge_cols, mask=on_edge, other=hidden)
    HELD: tl.constexpr = x[0].dtype if MASK == 2 else CAST
    TIMES: tl.constexpr = SCALED and MASK != 2  # else the scores are finished as they are loaded
    m = max_of(x, factor, HELD, TIMES)
    if SHIFTED:
        if MASK or CAUSAL:
            edge = keep_scores(
                edge, edge_cols, on_edge, visible, factor, hidden, mask_ptr, mask_col_stride,
                CAST, MASK, SCALED, CAUSAL,
            )  # fmt: skip
        edge = scores_of(edge, factor, HELD, TIMES)
        m = tl.maximum(m, tl.max(edge, axis=0))
    if GREEDY:  # noqa: SIM102  a constexpr, then a value
        if greedy:
            column = first_max_of(x, m, head + start, cols, factor, BLOCK_COLS, HELD, TIMES)
            if SHIFTED:
                column = tl.minimum(column, tl.min(tl.where(edge == m, edge_cols, 2147483647), axis=0))
                edge = tl.where((edge_cols != column) & (edge == edge), NEG_INF, edge)
            x = keep_column(x, column, greedy, head + start, cols, BLOCK_COLS)
    if PREFETCH and not SPLIT:
        later_row = row + ahead
        if SHARED:
            later_row = shared_row(program + ahead, n_programs, n_1 * n_2 if SHARED == 2 else n_2)
        prefetch_l2(x_ptr, phase, later_row * x_row_stride, tl.where(program + ahead < n_programs, n_cols, 0))
    x = hold_all(x, PTX)
    scale, base = origin_of(m, PTX)
    s = sum_exp_of(x, scale, base, factor, HELD, TIMES, PTX)
    if SHIFTED:
        s += tl.sum(exp_at(edge, scale, base, PTX), axis=0)
    if PREFETCH and SPLIT:
        later = program + ahead
        later_row = (later // n_parts).to(tl.int64)
        later_start = (later % n_parts) * part_cols
        n_ahead = tl.where(later < n_programs, tl.minimum(part_cols, n_cols - later_start), 0)
        prefetch_l2(x_ptr, phase, later_row * x_row_stride + later_start, n_ahead)
    if SPLIT:
        m, s = exchange(
            m, s, slots_ptr, part, n_parts, tag, LANES, COPIES, PATIENT, PUBLISH, COLLECT, PTX, greedy, GREEDY
        )
    if COLLECT:
        y_body = body_of(y_ptr, row, y_row_stride, phase, VECTOR, SHIFTED) + start
        if SPLIT:
            store_results(
                y_body, x, m, s, factor, cols, size, BLOCK_COLS, FULL_PIECES, CAST, HELD, LOG, TIMES, ZERO, PTX
            )
        else:
            # Runs once, which the compiler does not know: it would start this pass early, on twice the registers.
            for _ in range(tl.minimum(n_cols, 1)):
                store_results(
                    y_body, x, m, s, factor, cols, size, BLOCK_COLS, FULL_PIECES, CAST, HELD, LOG, TIMES, ZERO, PTX
                )
        if SHIFTED:
            y = result_of(edge, m, s, CAST, LOG, ZERO, PTX)
            tl.store(y_ptr + row * y_row_stride + edge_cols, y, mask=on_edge)


@triton.jit(do_not_specialize=["n_cols", "n_parts", "part_cols", "phase", "n_1", "n_2", "n_queries"])
def _stream_state(
    x_ptr, m_ptr, s_ptr, mask_ptr, scale_ptr, x_row_stride, n_cols, n_parts, part_cols, phase,
    n_1, n_2, mask_0, mask_1, mask_2, mask_col_stride, scale_0, scale_1, scale_2, n_queries, number,
    BLOCK_COLS: tl.constexpr, PIECES: tl.constexpr, FULL_PIECES: tl.constexpr,
    VECTOR: tl.constexpr, SHIFTED: tl.constexpr, CAST: tl.constexpr, PTX: tl.constexpr,
    MASK: tl.constexpr, SCALED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """(m, s) of one part of a row, online: tile by tile, each merged into what came before."""
    program = tl.program_id(0)
    row = (program // n_parts).to(tl.int64)
    part = program % n_parts
    start = part.to(tl.int64) * (part_cols // VECTOR * VECTOR)
    cols = tl.arange(0, BLOCK_COLS)
    head = head_of(row, x_row_stride, phase, VECTOR, SHIFTED)
    body = (n_cols - head) // VECTOR * VECTOR
    visible = visible_of(row, n_cols, n_queries, CAUSAL)
    factor, hidden, _ = factor_of(row, number, scale_ptr, n_1, n_2, scale_0, scale_1, scale_2, SCALED, CAST)
    if MASK:
        mask_ptr += broadcast_offset(row, n_1, n_2, mask_0, mask_1, mask_2)
    x_body = body_of(x_ptr, row, x_row_stride, phase, VECTOR, SHIFTED)
    m = tl.full([], NEG_INF, tl.float64 if CAST.is_fp64() else tl.float32)
    s = tl.zeros([], m.dtype)
    HELD: tl.constexpr = m.dtype if MASK == 2 else CAST
    TIMES: tl.constexpr = SCALED and MASK != 2
    for at in range(start, tl.minimum(start + part_cols, tl.minimum(body, visible)), PIECES * BLOCK_COLS):
        x = load_scores(
            x_body + at, head + at, cols, body - at, visible, factor, hidden, mask_ptr, mask_col_stride,
            BLOCK_COLS, PIECES, FULL_PIECES, VECTOR, CAST, MASK, SCALED, CAUSAL,
        )  # fmt: skip
        m_tile = max_of(x, factor, HELD, TIMES)
        scale, base = origin_of(m_tile, PTX)
        m, s = merge(m, s, m_tile, sum_exp_of(hold_all(x, PTX), scale, base, factor, HELD, TIMES, PTX), PTX)
    if SHIFTED:
        edge_cols, on_edge = edges_of(tl.arange(0, 2 * VECTOR), head, body, n_cols, VECTOR)
        on_edge = on_edge & (part == 0)
        edge = tl.load(x_ptr + row * x_row_stride + edge_cols, mask=on_edge, other=hidden)
        if MASK or CAUSAL:
            edge = keep_scores(
                edge, edge_cols, on_edge, visible, factor, hidden, mask_ptr, mask_col_stride,
                CAST, MASK, SCALED, CAUSAL,
            )  # fmt: skip
        edge = scores_of(edge, factor, HELD, TIMES)
        m_edge = tl.max(edge, axis=0)
        scale, base = origin_of(m_edge, PTX)
        m, s = merge(m, s, m_edge, tl.sum(exp_at(edge, scale, base, PTX), axis=0), PTX)
    tl.store(m_ptr + program, m)
    tl.store(s_ptr + program, s)


@triton.jit(do_not_specialize=["n_cols", "n_parts", "part_cols", "phase", "n_1", "n_2", "n_queries"])
def _stream_forward(
    x_ptr, y_ptr, m_ptr, s_ptr, mask_ptr, scale_ptr, x_row_stride, y_row_stride, n_cols, n_parts, part_cols, phase,
    n_1, n_2, mask_0, mask_1, mask_2, mask_col_stride, scale_0, scale_1, scale_2, n_queries, number,
    BLOCK_COLS: tl.constexpr, PIECES: tl.constexpr, FULL_PIECES: tl.constexpr,
    VECTOR: tl.constexpr, SHIFTED: tl.constexpr, CAST: tl.constexpr, LOG: tl.constexpr, PTX: tl.constexpr,
    MASK: tl.constexpr, SCALED: tl.constexpr, CAUSAL: tl.constexpr, ZERO: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """The second read of one part of a row, with the states of all its parts."""
    program = tl.program_id(0)
    row = (program // n_parts).to(tl.int64)
    part = program % n_parts
    j = tl.arange(0, LANES)
    m_parts = tl.load(m_ptr + row * n_parts + j, mask=j < n_parts, other=NEG_INF)
    s_parts = tl.load(s_ptr + row * n_parts + j, mask=j < n_parts, other=0.0)
    m = tl.max(m_parts, axis=0)
    s = tl.sum(s_parts * weight_of(m_parts, m, PTX), axis=0)
    start = part.to(tl.int64) * (part_cols // VECTOR * VECTOR)
    cols = tl.arange(0, BLOCK_COLS)
    head = head_of(row, x_row_stride, phase, VECTOR, SHIFTED)
    body = (n_cols - head) // VECTOR * VECTOR
    visible = visible_of(row, n_cols, n_queries, CAUSAL)
    factor, hidden, _ = factor_of(row, number, scale_ptr, n_1, n_2, scale_0, scale_1, scale_2, SCALED, CAST)
    if MASK:
        mask_ptr += broadcast_offset(row, n_1, n_2, mask_0, mask_1, mask_2)
    HELD: tl.constexpr = m.dtype if MASK == 2 else CAST
    TIMES: tl.constexpr = SCALED and MASK != 2
    x_body = body_of(x_ptr, row, x_row_stride, phase, VECTOR, SHIFTED)
    y_body = body_of(y_ptr, row, y_row_stride, phase, VECTOR, SHIFTED)
    for at in range(start, tl.minimum(start + part_cols, body), PIECES * BLOCK_COLS):
        x = load_scores(
            x_body + at, head + at, cols, body - at, visible, factor, hidden, mask_ptr, mask_col_stride,
            BLOCK_COLS, PIECES, FULL_PIECES, VECTOR, CAST, MASK, SCALED, CAUSAL,
        )  # fmt: skip
        store_results(
            y_body + at, x, m, s, factor, cols, body - at, BLOCK_COLS, FULL_PIECES, CAST, HELD, LOG, TIMES, ZERO, PTX
        )
    if SHIFTED:
        edge_cols, on_edge = edges_of(tl.arange(0, 2 * VECTOR), head, body, n_cols, VECTOR)
        on_edge = on_edge & (part == 0)
        edge = tl.load(x_ptr + row * x_row_stride + edge_cols, mask=on_edge, other=hidden)
        if MASK or CAUSAL:
            edge = keep_scores(
                edge, edge_cols, on_edge, visible, factor, hidden, mask_ptr, mask_col_stride,
                CAST, MASK, SCALED, CAUSAL,
            )  # fmt: skip
        edge = scores_of(edge, factor, HELD, TIMES)
        tl.store(y_ptr + row * y_row_stride + edge_cols, result_of(edge, m, s, CAST, LOG, ZERO, PTX), mask=on_edge)
