"""The gradient of softmax and of log_softmax from their output y and its gradient dy.

softmax      dx = y * (dy - d),       d = sum y * dy
log_softmax  dx = dy - exp(y) * d,    d = sum dy

Traffic: y and dy are read once and dx is written once (3MN), by the strategies of the forward; what the chip cannot
hold is read twice (stream, 5MN).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_softmax import launch, workspace
from fused_softmax.device import device_of
from fused_softmax.ops.arguments import TLDTYPES, alignment_of, as_rows
from fused_softmax.plan import RowPlan, fetches_ahead, most_registers, plan_rows
from fused_softmax.rowwise import (
    body_of,
    collect,
    dot_of,
    edges_of,
    gradient_of,
    head_of,
    hold_all,
    load_pieces,
    prefetch_l2,
    publish,
    tag_of,
)


def softmax_backward(
    dy: Tensor,
    y: Tensor,
    dx: Tensor,
    *,
    log: bool = False,
    hidden: bool = False,
    scale: float = 1.0,
    plan: RowPlan | None = None,
) -> Tensor:
    """The gradient of (log_)softmax over the last dim, into dx, times `scale`.

    dy, y: the gradient of the output, and the output; dx: of any float dtype, its rows contiguous; all [..., n_cols].
    hidden: what a mask hid, and is -inf in a log_softmax for it, has no gradient.
    """
    if y.numel():
        dy_rows, y_rows, dx_rows = as_rows(dy), as_rows(y), as_rows(dx)
        alignment = alignment_of(y_rows, dy_rows, dx_rows)
        if plan is None:
            n_rows, n_cols = y_rows.shape
            gpu = device_of(y.get_device())
            plan = plan_rows(n_rows, n_cols, y.element_size(), gpu, alignment=alignment, inputs=2)
        prepare(dy_rows, y_rows, dx_rows, plan, log=log, hidden=hidden, scale=scale)(dy_rows, y_rows, dx_rows)
    return dx


def prepare(dy: Tensor, y: Tensor, dx: Tensor, plan: RowPlan, *, log: bool, hidden: bool = False, scale: float = 1.0):
    """What launches `plan` on [n_rows, n_cols] tensors: `run(dy, y, dx)`, for any tensors like these."""
    device = y.get_device()
    gpu = device_of(device)
    interpreted = device < 0
    ptx = gpu.backend == "cuda" and not interpreted
    strides = (dy.stride(0), y.stride(0), dx.stride(0))
    phase = y.data_ptr() // y.element_size() % plan.vector
    constexprs = {
        "BLOCK_COLS": plan.block_cols, "PIECES": plan.pieces, "FULL_PIECES": plan.full_pieces, "VECTOR": plan.vector,
        "SHIFTED": plan.alignment == "shifted", "CAST": TLDTYPES[y.dtype], "OUT": TLDTYPES[dx.dtype],
        "LOG": log, "HIDDEN": hidden, "SCALED": scale != 1.0, "PTX": ptx,
    }  # fmt: skip
    ahead = {"PREFETCH": ptx and fetches_ahead(plan, gpu, y.element_size())}
    options: dict[str, Any] = {"device": device, "num_warps": plan.num_warps}
    if plan.strategy == "tile":
        sizes = (plan.n_rows, plan.n_cols, phase, plan.prefetch, float(scale))
        constexprs |= ahead | {"BLOCK_ROWS": plan.block_rows}
        return launch.prepare(_tile_backward, plan.programs, (dy, y, dx), (*strides, *sizes), constexprs, **options)
    if plan.strategy != "stream":
        if ptx:
            options["most_registers"] = most_registers(plan, gpu)
        return _prepare_parts(dy, y, dx, plan, strides, phase, float(scale), constexprs | ahead, options)

    stream_sizes = (plan.n_cols, plan.parts, plan.part_cols, phase)
    state_dtype = torch.float64 if y.dtype == torch.float64 else torch.float32
    d = torch.empty(plan.n_rows, plan.parts, dtype=state_dtype, device=y.device)
    first = launch.prepare(
        _stream_dot, plan.programs, (dy, y, d), (*strides[:2], *stream_sizes),
        {name: value for name, value in constexprs.items() if name not in ("OUT", "SCALED")},
        **options,
    )  # fmt: skip
    second = launch.prepare(
        _stream_backward, plan.programs, (dy, y, dx, d), (*strides, *stream_sizes, float(scale)),
        constexprs | {"LANES": plan.lanes}, **options,
    )  # fmt: skip

    def run(dy, y, dx):
        d = torch.empty(plan.n_rows, plan.parts, dtype=state_dtype, device=y.device)
        first(dy, y, d)
        second(dy, y, dx, d)

    return run


def _prepare_parts(dy, y, dx, plan, strides, phase, scale, constexprs, options):
    device, n_rows, slots_per_row = y.get_device(), plan.n_rows, plan.slots_per_row
    sizes = (plan.n_cols, plan.parts, plan.part_cols, plan.programs, phase, plan.prefetch, scale)
    constexprs |= {"LANES": plan.lanes, "COPIES": plan.copies, "PATIENT": plan.poll_last_first}

    def launcher(slots, publish, collect):
        split = {"SPLIT": slots is not None, "PUBLISH": publish, "COLLECT": collect}
        tensors, absent = ((dy, y, dx, slots), ()) if slots is not None else ((dy, y, dx), (None,))
        return launch.prepare(
            _part_backward, plan.programs, tensors, (*absent, *strides, *sizes), constexprs | split, **options
        )

    if plan.strategy == "row":
        return launcher(None, True, True)
    if device < 0:
        slots = torch.zeros(n_rows * slots_per_row, dtype=torch.int64)
        first, second = launcher(slots, True, False), launcher(slots, False, True)
        return lambda dy, y, dx: (first(dy, y, dx, slots), second(dy, y, dx, slots))
    both = launcher(workspace.slots(device, n_rows, slots_per_row), True, True)
    return lambda dy, y, dx: both(dy, y, dx, workspace.slots(device, n_rows, slots_per_row))


@triton.jit(do_not_specialize=["n_rows", "n_cols", "phase", "ahead"])
def _tile_backward(
    dy_ptr, y_ptr, dx_ptr, dy_row_stride, y_row_stride, dx_row_stride, n_rows, n_cols, phase, ahead, factor,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, PIECES: tl.constexpr, FULL_PIECES: tl.constexpr,
    VECTOR: tl.constexpr, SHIFTED: tl.constexpr, CAST: tl.constexpr, OUT: tl.constexpr, LOG: tl.constexpr,
    HIDDEN: tl.constexpr, SCALED: tl.constexpr, PREFETCH: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Several short rows a program."""
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    # Rows past the end repeat the last one: the same values to the same place.
    row = tl.minimum(first_row + tl.arange(0, BLOCK_ROWS), n_rows - 1)[:, None]
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    head = head_of(row, y_row_stride, phase, VECTOR, SHIFTED)
    body = (n_cols - head) // VECTOR * VECTOR
    y_body = body_of(y_ptr, row, y_row_stride, phase, VECTOR, SHIFTED)
    dy_body = body_of(dy_ptr, row, dy_row_stride, phase, VECTOR, SHIFTED)
    y = load_pieces(y_body, cols, body, BLOCK_COLS, PIECES, FULL_PIECES, 0.0)
    dy = load_pieces(dy_body, cols, body, BLOCK_COLS, PIECES, FULL_PIECES, 0.0)
    d = dot_of(y, dy, CAST, LOG, PTX, -1, HIDDEN)[:, None]
    if SHIFTED:
        edge_cols, on_edge = edges_of(tl.arange(0, 2 * VECTOR)[None, :], head, body, n_cols, VECTOR)
        edge_y = (tl.load(y_ptr + row * y_row_stride + edge_cols, mask=on_edge, other=0.0),)
        edge_dy = (tl.load(dy_ptr + row * dy_row_stride + edge_cols, mask=on_edge, other=0.0),)
        d += dot_of(edge_y, edge_dy, CAST, LOG, PTX, -1, HIDDEN)[:, None]
    if PREFETCH:
        first = first_row + ahead.to(tl.int64) * BLOCK_ROWS
        n_y = tl.minimum(BLOCK_ROWS * y_row_stride, (n_rows - 1 - first) * y_row_stride + n_cols)
        n_dy = tl.minimum(BLOCK_ROWS * dy_row_stride, (n_rows - 1 - first) * dy_row_stride + n_cols)
        prefetch_l2(y_ptr, phase, first * y_row_stride, tl.maximum(n_y, 0))
        prefetch_l2(dy_ptr, phase, first * dy_row_stride, tl.maximum(n_dy, 0))
    dx_body = body_of(dx_ptr, row, dx_row_stride, phase, VECTOR, SHIFTED)
    _store_gradient(
        dx_body, hold_all(y, PTX), hold_all(dy, PTX), d, factor, cols, body, BLOCK_COLS, FULL_PIECES,
        CAST, OUT, LOG, HIDDEN, SCALED, PTX,
    )  # fmt: skip
    if SHIFTED:
        dx = gradient_of(edge_y[0], edge_dy[0], d, factor, CAST, LOG, HIDDEN, SCALED, PTX)
        tl.store(dx_ptr + row * dx_row_stride + edge_cols, dx.to(OUT), mask=on_edge)


@triton.jit(do_not_specialize=["n_cols", "n_parts", "part_cols", "n_programs", "phase", "ahead"])
def _part_backward(
    dy_ptr, y_ptr, dx_ptr, slots_ptr, dy_row_stride, y_row_stride, dx_row_stride,
    n_cols, n_parts, part_cols, n_programs, phase, ahead, factor,
    BLOCK_COLS: tl.constexpr, PIECES: tl.constexpr, FULL_PIECES: tl.constexpr,
    VECTOR: tl.constexpr, SHIFTED: tl.constexpr, CAST: tl.constexpr, OUT: tl.constexpr, LOG: tl.constexpr,
    HIDDEN: tl.constexpr, SCALED: tl.constexpr, PREFETCH: tl.constexpr, PTX: tl.constexpr, SPLIT: tl.constexpr,
    LANES: tl.constexpr, COPIES: tl.constexpr, PATIENT: tl.constexpr, PUBLISH: tl.constexpr, COLLECT: tl.constexpr,
):  # fmt: skip
    """A row a program, or one part of it (SPLIT). Parts start in order, and the plan lets all fit the chip at once."""
    # Rows of few pieces are at a bound of registers as they are: bf16 8192 0.99 at 64, 0.98 unpacked by hand at 66.
    UNPACK: tl.constexpr = PTX and (LOG or SPLIT or PIECES > 4)
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
        part = 0
        start = 0
    cols = tl.arange(0, BLOCK_COLS)
    head = head_of(row, y_row_stride, phase, VECTOR, SHIFTED)
    body = (n_cols - head) // VECTOR * VECTOR
    size = body
    if SPLIT:
        size = tl.minimum(part_cols // VECTOR * VECTOR, body - start)
    y_body = body_of(y_ptr, row, y_row_stride, phase, VECTOR, SHIFTED) + start
    dy_body = body_of(dy_ptr, row, dy_row_stride, phase, VECTOR, SHIFTED) + start
    y = load_pieces(y_body, cols, size, BLOCK_COLS, PIECES, FULL_PIECES, 0.0)
    dy = load_pieces(dy_body, cols, size, BLOCK_COLS, PIECES, FULL_PIECES, 0.0)
    d = dot_of(y, dy, CAST, LOG, UNPACK, -1, HIDDEN)
    if SHIFTED:
        edge_cols, on_edge = edges_of(tl.arange(0, 2 * VECTOR), head, body, n_cols, VECTOR)
        on_edge = on_edge & (part == 0)
        edge_y = (tl.load(y_ptr + row * y_row_stride + edge_cols, mask=on_edge, other=0.0),)
        edge_dy = (tl.load(dy_ptr + row * dy_row_stride + edge_cols, mask=on_edge, other=0.0),)
        d += dot_of(edge_y, edge_dy, CAST, LOG, UNPACK, -1, HIDDEN)
    if PREFETCH:
        later = program + ahead
        later_row = later.to(tl.int64)
        later_start = 0
        n_ahead = tl.where(later < n_programs, n_cols, 0)
        if SPLIT:
            later_row = (later // n_parts).to(tl.int64)
            later_start = (later % n_parts) * part_cols
            n_ahead = tl.where(later < n_programs, tl.minimum(part_cols, n_cols - later_start), 0)
        prefetch_l2(y_ptr, phase, later_row * y_row_stride + later_start, n_ahead)
        prefetch_l2(dy_ptr, phase, later_row * dy_row_stride + later_start, n_ahead)
    if SPLIT:
        if PUBLISH:
            publish(d, tl.zeros([], tl.float32), slots_ptr, part, n_parts, tag, LANES, COPIES)
        if COLLECT:
            d_parts, _, missing = collect(slots_ptr, part, n_parts, tag, LANES, COPIES, PATIENT)
            d = tl.sum(tl.where(missing, float("nan"), d_parts), axis=0)
    if COLLECT:
        dx_body = body_of(dx_ptr, row, dx_row_stride, phase, VECTOR, SHIFTED) + start
        _store_gradient(
            dx_body, hold_all(y, PTX), hold_all(dy, PTX), d, factor, cols, size, BLOCK_COLS, FULL_PIECES,
            CAST, OUT, LOG, HIDDEN, SCALED, UNPACK,
        )  # fmt: skip
        if SHIFTED:
            dx = gradient_of(edge_y[0], edge_dy[0], d, factor, CAST, LOG, HIDDEN, SCALED, UNPACK)
            tl.store(dx_ptr + row * dx_row_stride + edge_cols, dx.to(OUT), mask=on_edge)


@triton.jit
def _store_gradient(
    dx_ptr, y, dy, d, factor, cols, size, BLOCK_COLS: tl.constexpr, FULL_PIECES: tl.constexpr,
    CAST: tl.constexpr, OUT: tl.constexpr, LOG: tl.constexpr, HIDDEN: tl.constexpr, SCALED: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    for p in tl.static_range(len(y)):
        dx = gradient_of(y[p], dy[p], d, factor, CAST, LOG, HIDDEN, SCALED, PTX).to(OUT)
        if p < FULL_PIECES:
            tl.store(dx_ptr + (p * BLOCK_COLS + cols), dx, cache_modifier=".cs")
        else:
            tl.store(dx_ptr + (p * BLOCK_COLS + cols), dx, mask=p * BLOCK_COLS + cols < size, cache_modifier=".cs")


@triton.jit(do_not_specialize=["n_cols", "n_parts", "part_cols", "phase"])
def _stream_dot(
    dy_ptr, y_ptr, d_ptr, dy_row_stride, y_row_stride, n_cols, n_parts, part_cols, phase,
    BLOCK_COLS: tl.constexpr, PIECES: tl.constexpr, FULL_PIECES: tl.constexpr,
    VECTOR: tl.constexpr, SHIFTED: tl.constexpr, CAST: tl.constexpr, LOG: tl.constexpr, HIDDEN: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """d of one part of a row, tile by tile."""
    program = tl.program_id(0)
    row = (program // n_parts).to(tl.int64)
    part = program % n_parts
    start = part.to(tl.int64) * (part_cols // VECTOR * VECTOR)
    cols = tl.arange(0, BLOCK_COLS)
    head = head_of(row, y_row_stride, phase, VECTOR, SHIFTED)
    body = (n_cols - head) // VECTOR * VECTOR
    y_body = body_of(y_ptr, row, y_row_stride, phase, VECTOR, SHIFTED)
    dy_body = body_of(dy_ptr, row, dy_row_stride, phase, VECTOR, SHIFTED)
    d = tl.zeros([], tl.float64 if CAST.is_fp64() else tl.float32)
    for at in range(start, tl.minimum(start + part_cols, body), PIECES * BLOCK_COLS):
        y = load_pieces(y_body + at, cols, body - at, BLOCK_COLS, PIECES, FULL_PIECES, 0.0)
        dy = load_pieces(dy_body + at, cols, body - at, BLOCK_COLS, PIECES, FULL_PIECES, 0.0)
        d += dot_of(y, dy, CAST, LOG, PTX, -1, HIDDEN)
    if SHIFTED:
        edge_cols, on_edge = edges_of(tl.arange(0, 2 * VECTOR), head, body, n_cols, VECTOR)
        on_edge = on_edge & (part == 0)
        edge_y = (tl.load(y_ptr + row * y_row_stride + edge_cols, mask=on_edge, other=0.0),)
        edge_dy = (tl.load(dy_ptr + row * dy_row_stride + edge_cols, mask=on_edge, other=0.0),)
        d += dot_of(edge_y, edge_dy, CAST, LOG, PTX, -1, HIDDEN)
    tl.store(d_ptr + program, d)


@triton.jit(do_not_specialize=["n_cols", "n_parts", "part_cols", "phase"])
def _stream_backward(
    dy_ptr, y_ptr, dx_ptr, d_ptr, dy_row_stride, y_row_stride, dx_row_stride, n_cols, n_parts, part_cols, phase, factor,
    BLOCK_COLS: tl.constexpr, PIECES: tl.constexpr, FULL_PIECES: tl.constexpr,
    VECTOR: tl.constexpr, SHIFTED: tl.constexpr, CAST: tl.constexpr, OUT: tl.constexpr, LOG: tl.constexpr,
    HIDDEN: tl.constexpr, SCALED: tl.constexpr, PTX: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The second read of one part of a row, with the d of all its parts."""
    program = tl.program_id(0)
    row = (program // n_parts).to(tl.int64)
    part = program % n_parts
    j = tl.arange(0, LANES)
    d = tl.sum(tl.load(d_ptr + row * n_parts + j, mask=j < n_parts, other=0.0), axis=0)
    start = part.to(tl.int64) * (part_cols // VECTOR * VECTOR)
    cols = tl.arange(0, BLOCK_COLS)
    head = head_of(row, y_row_stride, phase, VECTOR, SHIFTED)
    body = (n_cols - head) // VECTOR * VECTOR
    y_body = body_of(y_ptr, row, y_row_stride, phase, VECTOR, SHIFTED)
    dy_body = body_of(dy_ptr, row, dy_row_stride, phase, VECTOR, SHIFTED)
    dx_body = body_of(dx_ptr, row, dx_row_stride, phase, VECTOR, SHIFTED)
    for at in range(start, tl.minimum(start + part_cols, body), PIECES * BLOCK_COLS):
        y = load_pieces(y_body + at, cols, body - at, BLOCK_COLS, PIECES, FULL_PIECES, 0.0)
        dy = load_pieces(dy_body + at, cols, body - at, BLOCK_COLS, PIECES, FULL_PIECES, 0.0)
        _store_gradient(
            dx_body + at, y, dy, d, factor, cols, body - at, BLOCK_COLS, FULL_PIECES, CAST, OUT, LOG, HIDDEN, SCALED,
            PTX,
        )  # fmt: skip
    if SHIFTED:
        edge_cols, on_edge = edges_of(tl.arange(0, 2 * VECTOR), head, body, n_cols, VECTOR)
        on_edge = on_edge & (part == 0)
        edge_y = tl.load(y_ptr + row * y_row_stride + edge_cols, mask=on_edge, other=0.0)
        edge_dy = tl.load(dy_ptr + row * dy_row_stride + edge_cols, mask=on_edge, other=0.0)
        dx = gradient_of(edge_y, edge_dy, d, factor, CAST, LOG, HIDDEN, SCALED, PTX)
        tl.store(dx_ptr + row * dx_row_stride + edge_cols, dx.to(OUT), mask=on_edge)
