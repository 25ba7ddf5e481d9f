"""softmax, log_softmax, their gradient and logsumexp over a strided dim: [n_outer, n_cols, n_inner] along its middle.

Tiles of columns by contiguous inner positions keep every access coalesced, and what is read once stays in registers:
2MN forward, 3MN backward, MN for logsumexp. Long columns are split over programs, which exchange a state for each
inner position.
"""

import itertools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_softmax import launch, workspace
from fused_softmax.columnwise import (
    collect_columns,
    empty_state,
    inner_of,
    load_columns,
    merge_states,
    multiple_of,
    place_of,
    publish_columns,
    slots_of,
    store_columns,
    take_columns,
)
from fused_softmax.device import device_of
from fused_softmax.ops.arguments import TLDTYPES
from fused_softmax.plan import COLUMN_POSITIONS, H200, VECTOR_BYTES, ColumnPlan, most_column_registers, plan_columns
from fused_softmax.rowwise import (
    GREATEST,
    NEG_INF,
    dot_of,
    gradient_of,
    hold_all,
    max_of,
    origin_of,
    result_of,
    sum_exp_of,
    weight_of,
    widen,
)

Order = tuple[tuple[int, ...], tuple[int, ...]]


def columns_of(x: Tensor, dim: int) -> tuple[Tensor, Order] | None:
    """x as a view [n_outer, n_cols, n_inner], `dim` in the middle and n_inner contiguous, or None if there is none.

    With it the order of the other dims within n_outer and n_inner, which all tensors of a call must share.
    """
    dim %= x.ndim
    inner: list[int] = []
    others = sorted((d for d in range(x.ndim) if d != dim and x.shape[d] != 1), key=lambda d: (x.stride(d), -d))
    size = 1
    while others and x.stride(others[0]) == size:
        size *= x.shape[others[0]]
        inner.append(others.pop(0))
    if not inner or x.shape[dim] == 1:
        return None
    if any(x.stride(b) != x.stride(a) * x.shape[a] for a, b in itertools.pairwise(others)):
        return None
    n_outer = math.prod(x.shape[d] for d in others)
    view = x.as_strided((n_outer, x.shape[dim], size), (x.stride(others[0]) if others else 0, x.stride(dim), 1))
    return view, (tuple(others), tuple(inner))


def prepare_softmax(x: Tensor, y: Tensor, *, log: bool = False, plan: ColumnPlan | None = None):
    """What runs the forward on views [n_outer, n_cols, n_inner]: `run(x, y)`; None where no plan holds the columns."""
    # Measured on sm_90, where log_softmax lost by it; for sm_80 Triton 3.6 spills.
    unpack = not log and device_of(x.get_device()).capability[0] == H200.capability[0]
    return _prepare(_column_forward, (x,), y, {"LOG": log, "UNPACK": unpack}, plan)


def prepare_logsumexp(x: Tensor, lse: Tensor, *, plan: ColumnPlan | None = None):
    """The same for lse [n_outer, 1, n_inner]."""
    return _prepare(_column_logsumexp, (x,), lse, {"POSITIONS": COLUMN_POSITIONS}, plan)


def prepare_backward(dy: Tensor, y: Tensor, dx: Tensor, *, log: bool = False, plan: ColumnPlan | None = None):
    """The same for the gradient dx: `run(dy, y, dx)`."""
    return _prepare(_column_backward, (dy, y), dx, {"LOG": log, "OUT": TLDTYPES[dx.dtype]}, plan)


def _prepare(kernel, inputs, output, how, plan):
    x = inputs[-1]
    device = x.get_device()
    gpu = device_of(device)
    strides = tuple(stride for tensor in (*inputs, output) for stride in tensor.stride()[:2])
    vector = 1
    # Reads alone of 4 bytes lost by it: 64 x 4001 x 300 fp32 by elements 3421 GB/s, by 16 bytes 2911.
    if (kernel is not _column_logsumexp or x.element_size() < 4) and all(
        tensor.data_ptr() % VECTOR_BYTES == 0 for tensor in (*inputs, output)
    ):
        narrowest = min(tensor.element_size() for tensor in (*inputs, output))
        vector = math.gcd(VECTOR_BYTES // narrowest, x.shape[2], *strides)
    if plan is None:
        itemsize = 8 if output.dtype == torch.float64 else x.element_size()
        n_outer, n_cols, n_inner = x.shape
        holds = kernel is not _column_logsumexp
        plan = plan_columns(n_outer, n_cols, n_inner, itemsize, gpu, inputs=len(inputs), holds=holds, access=vector)
        if plan is None:
            return None
    sizes = (plan.n_cols, plan.n_inner, plan.parts, plan.part_cols)
    constexprs = how | {
        "BLOCK_COLS": plan.block_cols, "BLOCK_INNER": plan.block_inner, "PIECES": plan.pieces,
        "FULL_PIECES": plan.full_pieces, "WHOLE": plan.n_inner % plan.block_inner == 0, "VECTOR": vector,
        "CAST": TLDTYPES[x.dtype if kernel is _column_backward else output.dtype],
        "PTX": gpu.backend == "cuda" and device >= 0, "SPLIT": plan.parts > 1, "LANES": plan.lanes,
    }  # fmt: skip
    options = {"device": device, "num_warps": plan.num_warps}
    if constexprs["PTX"] and (most_registers := most_column_registers(plan, gpu)):
        options["most_registers"] = most_registers

    def launcher(slots, publish, collect):
        return launch.prepare(
            kernel, plan.programs, (*inputs, output, slots), (*strides, *sizes),
            constexprs | {"PUBLISH": publish, "COLLECT": collect}, **options,
        )  # fmt: skip

    if plan.parts == 1:
        return launcher(None, True, True)
    if device < 0:
        slots = torch.zeros(plan.groups * plan.slots_per_group, dtype=torch.int64)
        first, second = launcher(slots, True, False), launcher(slots, False, True)
        return lambda *tensors: (first(*tensors, slots), second(*tensors, slots))
    both = launcher(workspace.slots(device, plan.groups, plan.slots_per_group), True, True)
    groups, slots_per_group = plan.groups, plan.slots_per_group
    return lambda *tensors: both(*tensors, workspace.slots(device, groups, slots_per_group))


@triton.jit(do_not_specialize=["n_cols", "n_inner", "n_parts", "part_cols"])
def _column_forward(
    x_ptr, y_ptr, slots_ptr, x_outer_stride, x_col_stride, y_outer_stride, y_col_stride,
    n_cols, n_inner, n_parts, part_cols,
    BLOCK_COLS: tl.constexpr, BLOCK_INNER: tl.constexpr, PIECES: tl.constexpr, FULL_PIECES: tl.constexpr,
    WHOLE: tl.constexpr, VECTOR: tl.constexpr, CAST: tl.constexpr, LOG: tl.constexpr, UNPACK: tl.constexpr,
    PTX: tl.constexpr, SPLIT: tl.constexpr, LANES: tl.constexpr, PUBLISH: tl.constexpr, COLLECT: tl.constexpr,
):  # fmt: skip
    """The columns of one block of inner positions, or a part of them (SPLIT)."""
    # Of 2 bytes a thread has twice as many inner positions, and one number for each must do: 3 programs fit, not 2.
    APART: tl.constexpr = CAST.primitive_bitwidth == 16
    group, part = place_of(n_parts, SPLIT)
    if SPLIT:
        slots_ptr, tag = slots_of(slots_ptr, group, part, n_parts, BLOCK_INNER, PUBLISH)
    outer, inner, on = inner_of(group, n_inner, BLOCK_INNER, VECTOR)
    start = part * part_cols
    x_outer_stride, x_col_stride = multiple_of(x_outer_stride, VECTOR), multiple_of(x_col_stride, VECTOR)
    x_ptr += outer * x_outer_stride + start.to(tl.int64) * x_col_stride
    x = load_columns(x_ptr, x_col_stride, inner, on, n_cols - start, NEG_INF, BLOCK_COLS, PIECES, FULL_PIECES, WHOLE)
    m = max_of(x, 1.0, CAST, False, 0)[None, :]  # two dims before any asm, past which layouts do not travel
    x = hold_all(x, PTX)
    scale, base = origin_of(m, PTX, APART)
    s = sum_exp_of(x, scale, base, 1.0, CAST, False, PTX, 0, APART, UNPACK)[None, :]
    if SPLIT:
        if PUBLISH:
            publish_columns(m, s, slots_ptr, part, n_parts, tag, BLOCK_INNER)
        if COLLECT:
            m_parts, s_parts = collect_columns(slots_ptr, n_parts, tag, LANES, BLOCK_INNER)
            m_parts = tl.where(tl.arange(0, LANES)[None, :] < n_parts, m_parts, NEG_INF)
            m = tl.max(m_parts, axis=1)
            s = tl.sum(s_parts * weight_of(m_parts, m[:, None], PTX and not APART), axis=1)[None, :]
            m = m[None, :]
    if COLLECT:
        x = hold_all(x, PTX)
        y_outer_stride, y_col_stride = multiple_of(y_outer_stride, VECTOR), multiple_of(y_col_stride, VECTOR)
        y_ptr += outer * y_outer_stride + start.to(tl.int64) * y_col_stride
        for p in tl.static_range(PIECES):
            y = result_of(widen(x[p], CAST, PTX and UNPACK), m, s, CAST, LOG, False, PTX, APART)
            store_columns(y_ptr, y_col_stride, inner, on, n_cols - start, y, p, BLOCK_COLS, p < FULL_PIECES, WHOLE)


@triton.jit(do_not_specialize=["n_cols", "n_inner", "n_parts", "part_cols"])
def _column_logsumexp(
    x_ptr, lse_ptr, slots_ptr, x_outer_stride, x_col_stride, lse_outer_stride, lse_col_stride,
    n_cols, n_inner, n_parts, part_cols,
    BLOCK_COLS: tl.constexpr, BLOCK_INNER: tl.constexpr, PIECES: tl.constexpr, FULL_PIECES: tl.constexpr,
    WHOLE: tl.constexpr, VECTOR: tl.constexpr, POSITIONS: tl.constexpr, CAST: tl.constexpr, PTX: tl.constexpr,
    SPLIT: tl.constexpr, LANES: tl.constexpr, PUBLISH: tl.constexpr, COLLECT: tl.constexpr,
):  # fmt: skip
    """logsumexp of the same, online: every lane of the tile keeps a state of its own until all columns are read."""
    group, part = place_of(n_parts, SPLIT)
    if SPLIT:
        slots_ptr, tag = slots_of(slots_ptr, group, part, n_parts, BLOCK_INNER, PUBLISH)
    outer, inner, on = inner_of(group, n_inner, BLOCK_INNER, VECTOR)
    inner = tl.max_contiguous(inner, POSITIONS)  # no wider are accesses, and each position takes a state of registers
    start = part * part_cols
    x_outer_stride, x_col_stride = multiple_of(x_outer_stride, VECTOR), multiple_of(x_col_stride, VECTOR)
    x_ptr += outer * x_outer_stride
    m, s = empty_state(BLOCK_COLS, BLOCK_INNER, CAST)
    end = tl.minimum(start + part_cols, n_cols)
    STEP: tl.constexpr = PIECES * BLOCK_COLS
    whole = start + (end - start) // STEP * STEP
    x_col_stride = x_col_stride.to(tl.int64)
    for at in range(start, whole, STEP):
        at_ptr = x_ptr + at * x_col_stride
        x = load_columns(at_ptr, x_col_stride, inner, on, STEP, NEG_INF, BLOCK_COLS, PIECES, PIECES, WHOLE)
        m, s = take_columns(m, s, x, CAST, PTX)
    for at in range(whole, end, STEP):  # once at most
        at_ptr = x_ptr + at * x_col_stride
        x = load_columns(at_ptr, x_col_stride, inner, on, end - at, NEG_INF, BLOCK_COLS, PIECES, 0, WHOLE)
        m, s = take_columns(m, s, x, CAST, PTX)
    m, s = merge_states(m, s, 0, PTX)
    m, s = m[None, :], s[None, :]
    if SPLIT:
        if PUBLISH:
            publish_columns(m, s, slots_ptr, part, n_parts, tag, BLOCK_INNER)
        if COLLECT:  # noqa: SIM102  a constexpr, then a value
            if part == n_parts - 1:
                m_parts, s_parts = collect_columns(slots_ptr, n_parts, tag, LANES, BLOCK_INNER)
                m_parts = tl.where(tl.arange(0, LANES)[None, :] < n_parts, m_parts, -GREATEST)
                m_group, s_group = merge_states(m_parts, s_parts, 1, PTX)
                lse = (m_group + tl.log(s_group)).to(CAST)
                tl.store(lse_ptr + outer * lse_outer_stride + inner, lse, mask=on)
    else:
        lse = (m + tl.log(s)).to(CAST)
        tl.store(lse_ptr + outer * lse_outer_stride + inner[None, :], lse, mask=on[None, :])


@triton.jit(do_not_specialize=["n_cols", "n_inner", "n_parts", "part_cols"])
def _column_backward(
    dy_ptr, y_ptr, dx_ptr, slots_ptr, dy_outer_stride, dy_col_stride, y_outer_stride, y_col_stride,
    dx_outer_stride, dx_col_stride, n_cols, n_inner, n_parts, part_cols,
    BLOCK_COLS: tl.constexpr, BLOCK_INNER: tl.constexpr, PIECES: tl.constexpr, FULL_PIECES: tl.constexpr,
    WHOLE: tl.constexpr, VECTOR: tl.constexpr, CAST: tl.constexpr, OUT: tl.constexpr, LOG: tl.constexpr,
    PTX: tl.constexpr, SPLIT: tl.constexpr, LANES: tl.constexpr, PUBLISH: tl.constexpr, COLLECT: tl.constexpr,
):  # fmt: skip
    """The gradient of the same."""
    group, part = place_of(n_parts, SPLIT)
    if SPLIT:
        slots_ptr, tag = slots_of(slots_ptr, group, part, n_parts, BLOCK_INNER, PUBLISH)
    outer, inner, on = inner_of(group, n_inner, BLOCK_INNER, VECTOR)
    start = part * part_cols
    y_outer_stride, y_col_stride = multiple_of(y_outer_stride, VECTOR), multiple_of(y_col_stride, VECTOR)
    dy_outer_stride, dy_col_stride = multiple_of(dy_outer_stride, VECTOR), multiple_of(dy_col_stride, VECTOR)
    y_ptr += outer * y_outer_stride + start.to(tl.int64) * y_col_stride
    dy_ptr += outer * dy_outer_stride + start.to(tl.int64) * dy_col_stride
    y = load_columns(y_ptr, y_col_stride, inner, on, n_cols - start, 0.0, BLOCK_COLS, PIECES, FULL_PIECES, WHOLE)
    dy = load_columns(dy_ptr, dy_col_stride, inner, on, n_cols - start, 0.0, BLOCK_COLS, PIECES, FULL_PIECES, WHOLE)
    d = dot_of(y, dy, CAST, LOG, PTX, 0)[None, :]
    y = hold_all(y, PTX)
    dy = hold_all(dy, PTX)
    if SPLIT:
        if PUBLISH:
            publish_columns(d, tl.zeros([1, BLOCK_INNER], tl.float32), slots_ptr, part, n_parts, tag, BLOCK_INNER)
        if COLLECT:
            d_parts, late = collect_columns(slots_ptr, n_parts, tag, LANES, BLOCK_INNER)
            d = tl.sum(d_parts + late, axis=1)[None, :]
    if COLLECT:
        dx_outer_stride, dx_col_stride = multiple_of(dx_outer_stride, VECTOR), multiple_of(dx_col_stride, VECTOR)
        dx_ptr += outer * dx_outer_stride + start.to(tl.int64) * dx_col_stride
        for p in tl.static_range(PIECES):
            dx = gradient_of(y[p], dy[p], d, 1.0, CAST, LOG, False, False, PTX).to(OUT)
            store_columns(dx_ptr, dx_col_stride, inner, on, n_cols - start, dx, p, BLOCK_COLS, p < FULL_PIECES, WHOLE)
