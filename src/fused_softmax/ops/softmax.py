"""softmax over one dim.  y = exp(x - m) / s,  m = max x,  s = sum exp(x - m).

Traffic: every element is read once and written once (2MN), however long the row; only rows that the chip cannot hold
are read twice (stream, 3MN).
"""

from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.overrides import has_torch_function_unary

from fused_softmax import launch, workspace
from fused_softmax.device import device_of
from fused_softmax.ops.arguments import alignment_of, as_rows, check, is_rows, overlap, runs_here
from fused_softmax.plan import RowPlan, plan_rows
from fused_softmax.rowwise import (
    NEG_INF,
    body_of,
    edges_of,
    exchange,
    exp_at,
    head_of,
    hold_all,
    load_pieces,
    max_of,
    merge,
    origin_of,
    prefetch_l2,
    sum_exp_of,
    tag_of,
    weight_of,
    widen,
)

_MOST_CALLS = 4096  # shapes whose launches are kept
_calls: dict[tuple, tuple[Callable, tuple[int, ...] | None]] = {}

_is_compiling = torch.compiler.is_dynamo_compiling
_functorch_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_autocast = torch.is_autocast_enabled
_grad_enabled = torch.is_grad_enabled
_empty_like = torch.empty_like
# Inductor's allocator, at half of empty_like's cost; it allocates on the current device, so one device alone uses it.
_empty_strided: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def softmax(input: Tensor, dim: int = -1, *, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
    """softmax of `input` along `dim`, as torch.softmax: same results, NaN and infinities included.

    input: any shape; float32, float16, bfloat16 or float64. CUDA tensors run on this package's kernels, read once and
        written once whatever the length of `dim`; CPU tensors, tensors that require grad, and calls under
        torch.compile, functorch or dispatch modes take torch's own path.
    dim: the dimension that sums to 1. The last one is read in place, at any row stride; others through a copy.
    dtype: the dtype of the result; the input is rounded to it as it is read, with no copy. Needed for integer inputs.
    out: where to write; of the input's shape, the result's dtype, the input's device.

    Raises TypeError for what is not a tensor; IndexError for a dim out of range; NotImplementedError for a sparse input
    or an integer one without dtype; RuntimeError for a nested input, or an out of another shape, dtype or device.

    >>> softmax(torch.tensor([[0.0, 1.0, 2.0]], device="cuda"))
    tensor([[0.0900, 0.2447, 0.6652]], device='cuda:0')
    """
    # A call seen before, on a plain tensor with nothing listening, costs what torch's own does: one lookup, one launch.
    if (
        type(input) is Tensor
        and type(dim) is int  # True and 1.0 equal 1, and would find what was kept for it
        and dtype is None
        and out is None
        and not _is_compiling()
        and not _functorch_active()
        and not _dispatch_modes()
        and not _function_modes()
        and not _autocast()
        and not (input.requires_grad and _grad_enabled())
    ):
        try:
            stride, kind = input.stride(), input.dtype
            call = _calls.get((input.shape, stride, kind, input.get_device(), input.data_ptr() & 15, dim))
        except (RuntimeError, TypeError):  # no strides (sparse, nested), or a dim of another type: errors for _check
            call = None
        if call is not None and not input.is_neg() and forward_ad._current_level < 0:
            run, shape = call
            result = _empty_like(input) if shape is None else _empty_strided(shape, stride, kind)
            run(input, result)
            return result
    return _softmax(input, dim, dtype, out)


def _softmax(input, dim, dtype, out):
    if not isinstance(input, Tensor) and has_torch_function_unary(input):  # a proxy of torch.fx, for one
        return torch.softmax(input, dim, dtype=dtype, out=out)
    if not isinstance(dim, int) and isinstance(dim, Integral):  # NumPy's, which torch takes too
        dim = int(dim)
    result_dtype = check("softmax", input, dim, dtype, out)
    if not runs_here(input, result_dtype, out):
        return torch.softmax(input, dim, dtype=dtype, out=out)
    if dtype is None and input.is_cuda and torch.is_autocast_enabled("cuda") and input.dtype != torch.float64:
        result_dtype = torch.float32  # where autocast is on, torch's softmax gives fp32
    if not input.dtype.is_floating_point or input.dtype.itemsize == 1:
        input = input.to(result_dtype)
    if out is not None and out.numel() == 0 and out.shape != input.shape:
        out.resize_(input.shape)  # as torch: an empty out takes the shape of the result

    last = input if input.ndim == 0 else input.movedim(dim, -1)
    if out is None and input.is_contiguous() and result_dtype == input.dtype and last.is_contiguous() and input.numel():
        result = _empty_like(input)
        run = _prepare_forward(last, result if input.ndim == 0 else result.movedim(dim, -1))
        if len(_calls) >= _MOST_CALLS:
            _calls.clear()
        shape = tuple(input.shape) if input.is_cuda and _empty_strided and torch.cuda.device_count() == 1 else None
        _calls[input.shape, input.stride(), input.dtype, input.get_device(), input.data_ptr() & 15, dim] = run, shape
        run(last, result)
        return result
    if out is not None and not overlap(input, out) and is_rows(out if out.ndim == 0 else out.movedim(dim, -1)):
        softmax_forward(last, out if out.ndim == 0 else out.movedim(dim, -1))
        if not out.is_inference():
            increment_version(out)  # autograd sees no write of a kernel's
        return out
    result = torch.empty(last.shape, dtype=result_dtype, device=input.device)
    softmax_forward(last, result)
    if input.ndim:
        result = result.movedim(-1, dim)
    return result.contiguous() if out is None else out.copy_(result)


def softmax_forward(x: Tensor, y: Tensor | None = None, plan: RowPlan | None = None) -> Tensor:
    """softmax over the last dim of x [..., n_cols] into y, by `plan` or the planner's; any leading dims.

    y: same shape, its rows contiguous; a new contiguous tensor of x's dtype if None. `plan` is for the whole of x.
    """
    if y is None:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        x, y_rows = as_rows(x), as_rows(y)
        _prepare_forward(x, y_rows, plan)(x, y_rows)
    return y


def _prepare_forward(x: Tensor, y: Tensor, plan: RowPlan | None = None):
    """What runs softmax from any tensor like x into any like y, alignment included: `run(x, y)`."""
    x_rows, y_rows = as_rows(x), as_rows(y)
    if plan is None:
        gpu = device_of(x.get_device())
        n_rows, n_cols = x_rows.shape
        itemsize = 8 if y.dtype == torch.float64 else x.element_size()  # the arithmetic's, where it is fp64
        plan = plan_rows(n_rows, n_cols, itemsize, gpu, alignment=alignment_of(x_rows, y_rows))
    return prepare(x_rows, y_rows, plan)


def prepare(x: Tensor, y: Tensor, plan: RowPlan):
    """What launches `plan` on x and y [n_rows, n_cols], columns contiguous: `run(x, y)`, for any tensors like these."""
    device = x.get_device()
    gpu = device_of(device)
    interpreted = device < 0
    ptx = gpu.backend == "cuda" and not interpreted
    strides = (x.stride(0), y.stride(0))
    phase = x.data_ptr() // x.element_size() % plan.vector
    blocks = {"BLOCK_COLS": plan.block_cols, "PIECES": plan.pieces, "FULL_PIECES": plan.full_pieces}
    layout = {"VECTOR": plan.vector, "SHIFTED": plan.alignment == "shifted", "CAST": _TLDTYPES[y.dtype]}
    ahead = {"PREFETCH": bool(plan.prefetch) and ptx and gpu.capability >= (9, 0), "PTX": ptx}
    options = {"device": device, "num_warps": plan.num_warps}

    if plan.strategy == "tile":
        sizes = (plan.n_rows, plan.n_cols, phase, plan.prefetch)
        return launch.prepare(
            _tile_forward, plan.programs, (x, y), (*strides, *sizes),
            {"BLOCK_ROWS": plan.block_rows} | blocks | layout | ahead, **options,
        )  # fmt: skip
    if plan.strategy == "row":
        sizes = (plan.n_cols, plan.programs, phase, plan.prefetch)
        return launch.prepare(
            _row_forward, plan.programs, (x, y), (*strides, *sizes), blocks | layout | ahead, **options
        )  # fmt: skip
    if plan.strategy == "split":
        return _prepare_split(x, y, plan, strides, phase, blocks | layout | ahead, options)
    return _prepare_stream(x, y, plan, strides, phase, blocks | layout | {"PTX": ptx}, options)


def _prepare_split(x, y, plan, strides, phase, constexprs, options):
    device, slots_per_row = x.get_device(), plan.slots_per_row
    sizes = (plan.n_cols, plan.parts, plan.part_cols, plan.programs, phase, plan.prefetch)
    constexprs = constexprs | {"LANES": plan.lanes, "COPIES": plan.copies, "PATIENT": plan.patient}

    def launcher(slots, publish, collect):
        return launch.prepare(
            _split_forward, plan.programs, (x, y, slots), (*strides, *sizes),
            constexprs | {"PUBLISH": publish, "COLLECT": collect}, **options,
        )  # fmt: skip

    if device < 0:
        slots = torch.zeros(plan.n_rows * slots_per_row, dtype=torch.int64)
        publish, collect = launcher(slots, True, False), launcher(slots, False, True)
        return lambda x, y: (publish(x, y, slots), collect(x, y, slots))
    both, n_rows = launcher(workspace.slots(device, plan.n_rows, slots_per_row), True, True), plan.n_rows
    return lambda x, y: both(x, y, workspace.slots(device, n_rows, slots_per_row))


def _prepare_stream(x, y, plan, strides, phase, constexprs, options):
    sizes = (plan.n_cols, plan.parts, plan.part_cols, phase)
    state_dtype = torch.float64 if y.dtype == torch.float64 else torch.float32
    shape = (2, plan.n_rows, -(-plan.parts // 4) * 4)  # rows of states on 16 bytes, so that m and s are aligned alike
    states = torch.empty(shape, dtype=state_dtype, device=x.device)
    first = launch.prepare(
        _stream_state, plan.programs, (x, states[0], states[1]), (strides[0], *sizes), constexprs, **options
    )
    second = launch.prepare(
        _stream_forward, plan.programs, (x, y, states[0], states[1]), (*strides, *sizes),
        constexprs | {"LANES": plan.lanes}, **options,
    )  # fmt: skip

    def run(x, y):
        states = torch.empty(shape, dtype=state_dtype, device=x.device)
        first(x, states[0], states[1])
        second(x, y, states[0], states[1])

    return run


@triton.jit(do_not_specialize=["n_rows", "n_cols", "phase", "ahead"])
def _tile_forward(
    x_ptr, y_ptr, x_row_stride, y_row_stride, n_rows, n_cols, phase, ahead,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, PIECES: tl.constexpr, FULL_PIECES: tl.constexpr,
    VECTOR: tl.constexpr, SHIFTED: tl.constexpr, CAST: tl.constexpr, PREFETCH: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Several short rows a program."""
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    # Rows past the end repeat the last one: the same values to the same place.
    row = tl.minimum(first_row + tl.arange(0, BLOCK_ROWS), n_rows - 1)[:, None]
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    head = head_of(row, x_row_stride, phase, VECTOR, SHIFTED)
    body = (n_cols - head) // VECTOR * VECTOR
    x = load_pieces(
        body_of(x_ptr, row, x_row_stride, phase, VECTOR, SHIFTED), cols, body, BLOCK_COLS, PIECES, FULL_PIECES
    )
    m = max_of(x, CAST)[:, None]
    if SHIFTED:
        edge_cols, on_edge = edges_of(tl.arange(0, 2 * VECTOR)[None, :], head, body, n_cols, VECTOR)
        edge = widen(tl.load(x_ptr + row * x_row_stride + edge_cols, mask=on_edge, other=NEG_INF), CAST)
        m = tl.maximum(m, tl.max(edge, axis=1)[:, None])
    if PREFETCH:
        first = first_row + ahead.to(tl.int64) * BLOCK_ROWS
        n_ahead = tl.minimum(BLOCK_ROWS * x_row_stride, (n_rows - 1 - first) * x_row_stride + n_cols)
        # Past the last row it is negative, and so far below zero at wide strides that it would not fit 32 bits.
        prefetch_l2(x_ptr, phase, first * x_row_stride, tl.maximum(n_ahead, 0))
    x = hold_all(x, PTX)
    scale, base = origin_of(m, PTX)
    s = sum_exp_of(x, scale, base, CAST, PTX)[:, None]
    if SHIFTED:
        s += tl.sum(exp_at(edge, scale, base, PTX), axis=1)[:, None]
    y_body = body_of(y_ptr, row, y_row_stride, phase, VECTOR, SHIFTED)
    _store_pieces(y_body, x, scale, base, 1.0 / s, cols, body, BLOCK_COLS, FULL_PIECES, CAST, PTX)
    if SHIFTED:
        y = exp_at(edge, scale, base, PTX) * (1.0 / s)
        tl.store(y_ptr + row * y_row_stride + edge_cols, y.to(CAST), mask=on_edge)


@triton.jit(do_not_specialize=["n_cols", "n_programs", "phase", "ahead"])
def _row_forward(
    x_ptr, y_ptr, x_row_stride, y_row_stride, n_cols, n_programs, phase, ahead,
    BLOCK_COLS: tl.constexpr, PIECES: tl.constexpr, FULL_PIECES: tl.constexpr,
    VECTOR: tl.constexpr, SHIFTED: tl.constexpr, CAST: tl.constexpr, PREFETCH: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_COLS)
    head = head_of(row, x_row_stride, phase, VECTOR, SHIFTED)
    body = (n_cols - head) // VECTOR * VECTOR
    x = load_pieces(
        body_of(x_ptr, row, x_row_stride, phase, VECTOR, SHIFTED), cols, body, BLOCK_COLS, PIECES, FULL_PIECES
    )
    m = max_of(x, CAST)
    if SHIFTED:
        edge_cols, on_edge = edges_of(tl.arange(0, 2 * VECTOR), head, body, n_cols, VECTOR)
        edge = widen(tl.load(x_ptr + row * x_row_stride + edge_cols, mask=on_edge, other=NEG_INF), CAST)
        m = tl.maximum(m, tl.max(edge, axis=0))
    if PREFETCH:
        prefetch_l2(x_ptr, phase, (row + ahead) * x_row_stride, tl.where(row + ahead < n_programs, n_cols, 0))
    x = hold_all(x, PTX)
    scale, base = origin_of(m, PTX)
    s = sum_exp_of(x, scale, base, CAST, PTX)
    if SHIFTED:
        s += tl.sum(exp_at(edge, scale, base, PTX), axis=0)
    y_body = body_of(y_ptr, row, y_row_stride, phase, VECTOR, SHIFTED)
    # Runs once, which the compiler does not know: it would start this pass early, on twice the registers.
    for _ in range(tl.minimum(n_cols, 1)):
        _store_pieces(y_body, x, scale, base, 1.0 / s, cols, body, BLOCK_COLS, FULL_PIECES, CAST, PTX)
    if SHIFTED:
        y = exp_at(edge, scale, base, PTX) * (1.0 / s)
        tl.store(y_ptr + row * y_row_stride + edge_cols, y.to(CAST), mask=on_edge)


@triton.jit(do_not_specialize=["n_cols", "n_parts", "part_cols", "n_programs", "phase", "ahead"])
def _split_forward(
    x_ptr, y_ptr, slots_ptr, x_row_stride, y_row_stride, n_cols, n_parts, part_cols, n_programs, phase, ahead,
    BLOCK_COLS: tl.constexpr, PIECES: tl.constexpr, FULL_PIECES: tl.constexpr,
    VECTOR: tl.constexpr, SHIFTED: tl.constexpr, CAST: tl.constexpr, PREFETCH: tl.constexpr, PTX: tl.constexpr,
    LANES: tl.constexpr, COPIES: tl.constexpr, PATIENT: tl.constexpr, PUBLISH: tl.constexpr, COLLECT: tl.constexpr,
):  # fmt: skip
    """One part of a row a program. The parts of a row start in order, and the plan lets all fit the chip at once."""
    program = tl.program_id(0)
    row = (program // n_parts).to(tl.int64)
    part = program % n_parts
    slots_ptr += row * n_parts * COPIES
    tag = tag_of(tl.load(slots_ptr + part, volatile=True))
    if PUBLISH:
        tag = 1 - tag
    start = part * (part_cols // VECTOR * VECTOR)
    cols = tl.arange(0, BLOCK_COLS)
    head = head_of(row, x_row_stride, phase, VECTOR, SHIFTED)
    body = (n_cols - head) // VECTOR * VECTOR
    size = tl.minimum(part_cols // VECTOR * VECTOR, body - start)
    x_body = body_of(x_ptr, row, x_row_stride, phase, VECTOR, SHIFTED) + start
    x = load_pieces(x_body, cols, size, BLOCK_COLS, PIECES, FULL_PIECES)
    m = max_of(x, CAST)
    if SHIFTED:
        edge_cols, on_edge = edges_of(tl.arange(0, 2 * VECTOR), head, body, n_cols, VECTOR)
        on_edge = on_edge & (part == 0)
        edge = widen(tl.load(x_ptr + row * x_row_stride + edge_cols, mask=on_edge, other=NEG_INF), CAST)
        m = tl.maximum(m, tl.max(edge, axis=0))
    x = hold_all(x, PTX)
    scale, base = origin_of(m, PTX)
    s = sum_exp_of(x, scale, base, CAST, PTX)
    if SHIFTED:
        s += tl.sum(exp_at(edge, scale, base, PTX), axis=0)
    if PREFETCH:
        later = program + ahead
        later_start = (later % n_parts) * part_cols
        n_ahead = tl.where(later < n_programs, tl.minimum(part_cols, n_cols - later_start), 0)
        prefetch_l2(x_ptr, phase, (later // n_parts).to(tl.int64) * x_row_stride + later_start, n_ahead)
    m, s = exchange(m, s, slots_ptr, part, n_parts, tag, LANES, COPIES, PATIENT, PUBLISH, COLLECT, PTX)
    if COLLECT:
        scale, base = origin_of(m, PTX)
        y_body = body_of(y_ptr, row, y_row_stride, phase, VECTOR, SHIFTED) + start
        _store_pieces(y_body, x, scale, base, 1.0 / s, cols, size, BLOCK_COLS, FULL_PIECES, CAST, PTX)
        if SHIFTED:
            y = exp_at(edge, scale, base, PTX) * (1.0 / s)
            tl.store(y_ptr + row * y_row_stride + edge_cols, y.to(CAST), mask=on_edge)


@triton.jit
def _store_pieces(
    y_ptr,
    x,
    scale,
    base,
    inv_s,
    cols,
    size,
    BLOCK_COLS: tl.constexpr,
    FULL_PIECES: tl.constexpr,
    CAST: tl.constexpr,
    PTX: tl.constexpr,
):
    x = hold_all(x, PTX)
    for p in tl.static_range(len(x)):
        y = (exp_at(widen(x[p], CAST), scale, base, PTX) * inv_s).to(CAST)
        if p < FULL_PIECES:
            tl.store(y_ptr + (p * BLOCK_COLS + cols), y, cache_modifier=".cs")
        else:
            tl.store(y_ptr + (p * BLOCK_COLS + cols), y, mask=p * BLOCK_COLS + cols < size, cache_modifier=".cs")


@triton.jit(do_not_specialize=["n_cols", "n_parts", "part_cols", "phase"])
def _stream_state(
    x_ptr, m_ptr, s_ptr, x_row_stride, n_cols, n_parts, part_cols, phase,
    BLOCK_COLS: tl.constexpr, PIECES: tl.constexpr, FULL_PIECES: tl.constexpr,
    VECTOR: tl.constexpr, SHIFTED: tl.constexpr, CAST: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """(m, s) of one part of a row, online: tile by tile, each merged into what came before."""
    program = tl.program_id(0)
    row = (program // n_parts).to(tl.int64)
    part = program % n_parts
    start = part.to(tl.int64) * (part_cols // VECTOR * VECTOR)
    cols = tl.arange(0, BLOCK_COLS)
    head = head_of(row, x_row_stride, phase, VECTOR, SHIFTED)
    body = (n_cols - head) // VECTOR * VECTOR
    x_body = body_of(x_ptr, row, x_row_stride, phase, VECTOR, SHIFTED)
    m = tl.full([], NEG_INF, tl.float64 if CAST.is_fp64() else tl.float32)
    s = tl.zeros([], m.dtype)
    for at in range(start, tl.minimum(start + part_cols, body), PIECES * BLOCK_COLS):
        x = load_pieces(x_body + at, cols, body - at, BLOCK_COLS, PIECES, FULL_PIECES)
        m_tile = max_of(x, CAST)
        scale, base = origin_of(m_tile, PTX)
        m, s = merge(m, s, m_tile, sum_exp_of(hold_all(x, PTX), scale, base, CAST, PTX), PTX)
    if SHIFTED:
        edge_cols, on_edge = edges_of(tl.arange(0, 2 * VECTOR), head, body, n_cols, VECTOR)
        on_edge = on_edge & (part == 0)
        edge = widen(tl.load(x_ptr + row * x_row_stride + edge_cols, mask=on_edge, other=NEG_INF), CAST)
        m_edge = tl.max(edge, axis=0)
        scale, base = origin_of(m_edge, PTX)
        s_edge = tl.sum(exp_at(edge, scale, base, PTX), axis=0)
        m, s = merge(m, s, m_edge, s_edge, PTX)
    tl.store(m_ptr + program, m)
    tl.store(s_ptr + program, s)


@triton.jit(do_not_specialize=["n_cols", "n_parts", "part_cols", "phase"])
def _stream_forward(
    x_ptr, y_ptr, m_ptr, s_ptr, x_row_stride, y_row_stride, n_cols, n_parts, part_cols, phase,
    BLOCK_COLS: tl.constexpr, PIECES: tl.constexpr, FULL_PIECES: tl.constexpr,
    VECTOR: tl.constexpr, SHIFTED: tl.constexpr, CAST: tl.constexpr, PTX: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The second read of one part of a row, with the states of all its parts."""
    program = tl.program_id(0)
    row = (program // n_parts).to(tl.int64)
    part = program % n_parts
    j = tl.arange(0, LANES)
    m_parts = tl.load(m_ptr + row * n_parts + j, mask=j < n_parts, other=NEG_INF)
    s_parts = tl.load(s_ptr + row * n_parts + j, mask=j < n_parts, other=0.0)
    m = tl.max(m_parts, axis=0)
    inv_s = 1.0 / tl.sum(s_parts * weight_of(m_parts, m, PTX), axis=0)
    scale, base = origin_of(m, PTX)
    start = part.to(tl.int64) * (part_cols // VECTOR * VECTOR)
    cols = tl.arange(0, BLOCK_COLS)
    head = head_of(row, x_row_stride, phase, VECTOR, SHIFTED)
    body = (n_cols - head) // VECTOR * VECTOR
    x_body = body_of(x_ptr, row, x_row_stride, phase, VECTOR, SHIFTED)
    y_body = body_of(y_ptr, row, y_row_stride, phase, VECTOR, SHIFTED)
    for at in range(start, tl.minimum(start + part_cols, body), PIECES * BLOCK_COLS):
        x = load_pieces(x_body + at, cols, body - at, BLOCK_COLS, PIECES, FULL_PIECES)
        _store_pieces(y_body + at, x, scale, base, inv_s, cols, body - at, BLOCK_COLS, FULL_PIECES, CAST, PTX)
    if SHIFTED:
        edge_cols, on_edge = edges_of(tl.arange(0, 2 * VECTOR), head, body, n_cols, VECTOR)
        on_edge = on_edge & (part == 0)
        edge = widen(tl.load(x_ptr + row * x_row_stride + edge_cols, mask=on_edge, other=NEG_INF), CAST)
        tl.store(
            y_ptr + row * y_row_stride + edge_cols, (exp_at(edge, scale, base, PTX) * inv_s).to(CAST), mask=on_edge
        )


_TLDTYPES = {
    torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float64: tl.float64,
}  # fmt: skip
