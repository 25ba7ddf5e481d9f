"""The losses of rows of logits, and the gradient of their sum or mean written in the same pass.

Traffic: the losses alone read the logits once (MN), few rows by many programs each. With the gradient they read once
and write once (2MN): a row waits in registers, of one program or of several that exchange (m, s), as in softmax; rows
that the chip cannot hold are read a second time. Rows that do not count are read too: to leave them out, every program
would await its target before it asks for its row.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_softmax import launch, workspace
from fused_softmax.device import device_of
from fused_softmax.losswise import (
    NONE,
    entropy_terms,
    gradient_of_logits,
    load_logits,
    logit_of_target,
    logits_of,
    numbers_of,
    per_row,
    shares_of,
    store_losses,
    sum_of,
    target_of,
    zero_of,
)
from fused_softmax.ops.arguments import TLDTYPES, alignment_of
from fused_softmax.ops.cross_entropy_backward import cross_entropy_backward
from fused_softmax.ops.cross_entropy_online import prepare_online
from fused_softmax.ops.losses import Loss, Rows, arithmetic_of, there
from fused_softmax.plan import RowPlan, fetches_ahead, plan_loss, plan_reduction
from fused_softmax.rowwise import (
    NEG_INF,
    body_of,
    edges_of,
    exchange,
    exp_at,
    first_max_of,
    head_of,
    hold_all,
    load_edges,
    log_sum_of,
    max_of,
    origin_of,
    prefetch_l2,
    scores_of,
    sum_exp_of,
    tag_of,
)

_MOST_FORWARDS = 4096  # kinds of calls that are kept


def cross_entropy_forward(
    x: Tensor, target: Tensor, loss: Loss, totals: Tensor | None = None, dx: Tensor | None = None,
    plan: RowPlan | None = None, dtype: torch.dtype | None = None,
) -> Rows:  # fmt: skip
    """The losses of rows x [n_rows, n_classes], columns contiguous, by targets [n_rows], contiguous.

    dx: where the gradient of their sum goes, or, with the totals that loss.mean needs, of their mean.
    dtype: of the losses; that of the arithmetic if None.
    """
    key = (
        x.shape, x.stride(0), x.dtype, x.get_device(), x.data_ptr() % 16, target.dtype, target.data_ptr() % 16,
        loss.kind, totals is not None and totals.shape[1],
        dx is not None and (dx.stride(0), dx.data_ptr() % 16, dx.data_ptr() == x.data_ptr()), plan, dtype,
    )  # fmt: skip
    forward = _forwards.get(key)
    if forward is None:
        forward = _prepared(x, target, loss, totals, dx, plan, dtype)
        if x.is_cuda:
            if len(_forwards) >= _MOST_FORWARDS:
                _forwards.clear()
            _forwards[key] = forward
    rows = forward.run((x, dx, target, loss.weight, totals, loss.weight_total(x.shape[1]), loss.numbers(x)))
    if dx is not None and not forward.writes:
        cross_entropy_backward(x, target, rows.m, rows.ls, loss, totals=totals, dx=dx)
    return rows


class _Forward(NamedTuple):
    run: Callable[[tuple], Rows]
    writes: bool  # the gradient too


_forwards: dict[tuple, _Forward] = {}


def _prepared(x, target, loss, totals, dx, plan, result_dtype) -> _Forward:
    """What runs the kernels on the tensors of a call like this one."""
    device, gpu = x.get_device(), device_of(x.get_device())
    n_rows, n_cols = x.shape
    dtype = arithmetic_of(x)
    itemsize = dtype.itemsize if loss.softcap is not None else x.element_size()
    alignment = alignment_of(x) if dx is None else alignment_of(x, dx)
    if plan is None and dx is None:
        plan = plan_reduction(n_rows, n_cols, itemsize, gpu, alignment=alignment)
    elif plan is None:
        plan = plan_loss(n_rows, n_cols, itemsize, gpu, alignment=alignment)
    ptx = gpu.backend == "cuda" and device >= 0
    vector = min(plan.vector, 16 // x.element_size()) if plan.alignment != "scalar" else 1
    phase = x.data_ptr() // x.element_size() % vector
    constexprs = {
        "BLOCK_COLS": plan.block_cols, "PIECES": plan.pieces, "FULL_PIECES": plan.full_pieces, "VECTOR": vector,
        "SHIFTED": plan.alignment == "shifted", "CAST": TLDTYPES[x.dtype], "PTX": ptx,
        "ZLOSS": loss.lse_square_scale != 0,
    } | loss.constexprs  # fmt: skip
    of_gradient = {
        "MEAN": loss.mean, "TOTALS": 1 if totals is None else totals.shape[1],
        "INPLACE": dx is not None and dx.data_ptr() == x.data_ptr(),
    }  # fmt: skip
    options = {"device": device, "num_warps": plan.num_warps}
    strides = x.stride(0), x.stride(0) if dx is None else dx.stride(0)
    sizes = (n_cols, plan.parts, plan.part_cols, plan.programs, phase, plan.prefetch, *loss.scalars)
    given = (x, dx, target, loss.weight, totals, loss.weight_total(n_cols), loss.numbers(x))

    # Kept with the launches, so of what they are made of it holds no tensor.
    of_rows = partial(
        _rows, n_rows, result_dtype or dtype, dtype, x.device, bool(loss.lse_square_scale), loss.stats
    )  # fmt: skip

    if plan.strategy == "tile":
        launched = launch.prepare(
            _tile_loss, plan.programs, (*given, *of_rows()), (*strides, n_rows, n_cols, phase, *loss.scalars),
            constexprs | of_gradient | {
                "BLOCK_ROWS": plan.block_rows, "GRADIENT": dx is not None, "STATS": loss.stats,
            }, **options,
        )  # fmt: skip

        def run_tile(tensors):
            rows = of_rows()
            launched(*there((*tensors, *rows)))
            return rows

        return _Forward(run_tile, True)
    if dx is None or plan.strategy not in ("row", "split"):
        return _Forward(prepare_online(given, of_rows, plan, phase, loss, constexprs, options), dx is None)

    of_parts = partial(of_rows, parts=plan.parts if loss.label_smoothing > 0 else 1)

    def prepare(slots, publish, collect):
        ahead = ptx and fetches_ahead(plan, gpu, x.element_size())
        return launch.prepare(
            _part_loss, plan.programs, (slots, *given, *of_parts()[:4]), (*strides, *sizes),
            constexprs | of_gradient | {
                "LANES": plan.lanes, "COPIES": plan.copies, "PATIENT": plan.poll_last_first, "SPLIT": slots is not None,
                "PUBLISH": publish, "COLLECT": collect, "PREFETCH": ahead,
            }, **options,
        )  # fmt: skip

    def slots_of():
        if plan.strategy == "row":
            return None
        if device < 0:
            return torch.zeros(n_rows * plan.slots_per_row, dtype=torch.int64)
        return workspace.slots(device, n_rows, plan.slots_per_row)

    # The interpreter runs one program after another: all publish before any collects.
    launches = [prepare(slots_of(), True, True)]
    if plan.strategy == "split" and device < 0:
        launches = [prepare(slots_of(), True, False), prepare(slots_of(), False, True)]

    def run_parts(tensors):
        slots, rows = slots_of(), of_parts()
        for each in launches:
            each(*there((slots, *tensors, *rows[:4])))
        return rows

    return _Forward(run_parts, True)


def _rows(n_rows, dtype, arithmetic, device, z_loss, stats, parts=1):
    def of(*shape, dtype=arithmetic):
        return torch.empty(shape, dtype=dtype, device=device)

    return Rows(
        of(n_rows), of(n_rows), of(n_rows, parts, dtype=dtype), of(n_rows) if z_loss else None,
        *((of(n_rows), of(n_rows, dtype=torch.int64)) if stats else (None, None)),
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_rows", "n_cols", "phase", "ignore_index"])
def _tile_loss(
    x_ptr, dx_ptr, target_ptr, weight_ptr, totals_ptr, w_total_ptr, numbers_ptr, m_ptr, ls_ptr, loss_ptr, z_ptr,
    entropy_ptr, predicted_ptr, x_row_stride, dx_row_stride, n_rows, n_cols, phase,
    ignore_index, factor, hidden, cap, smoothing, lse_square_scale,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, PIECES: tl.constexpr, FULL_PIECES: tl.constexpr,
    VECTOR: tl.constexpr, SHIFTED: tl.constexpr, CAST: tl.constexpr, PTX: tl.constexpr, ZLOSS: tl.constexpr,
    WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr,
    GRADIENT: tl.constexpr, MEAN: tl.constexpr, TOTALS: tl.constexpr, STATS: tl.constexpr, INPLACE: tl.constexpr,
):  # fmt: skip
    """Several short rows a program, and the gradient if GRADIENT."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    live = row < n_rows
    row = tl.minimum(row, n_rows - 1)
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    head = head_of(row, x_row_stride, phase, VECTOR, SHIFTED)
    body = (n_cols - head) // VECTOR * VECTOR
    WIDE: tl.constexpr = tl.float64 if CAST.is_fp64() else tl.float32
    HELD: tl.constexpr = WIDE if CAPPED else CAST
    TIMES: tl.constexpr = SCALED and not CAPPED
    factor, cap, smoothing, lse_square_scale = numbers_of(numbers_ptr, factor, cap, smoothing, lse_square_scale, WIDE)
    t, kept, wrong, w = target_of(row, target_ptr, weight_ptr, n_cols, ignore_index, WEIGHTED)
    z_t = tl.load(x_ptr + row * x_row_stride + t, mask=kept, other=0.0)
    z_t = logit_of_target(z_t, factor, cap, CAST, SCALED, CAPPED, PTX)
    zero = zero_of(z_t)
    if SHIFTED:  # edges first: what is made of both then has the layout of the pieces
        edge_cols, on_edge, edge = load_edges(x_ptr, row, x_row_stride, head, body, n_cols, hidden, VECTOR)
    x_body = body_of(x_ptr, row, x_row_stride, phase, VECTOR, SHIFTED)
    x = load_logits(x_body, cols, body, factor, hidden, cap, BLOCK_COLS, PIECES, FULL_PIECES, CAST, SCALED, CAPPED)
    m = max_of(x, factor, HELD, TIMES)[:, None]
    if INPLACE:  # z_t is read before anything is written over it
        m = tl.maximum(m, tl.where(kept, z_t, NEG_INF))
    if SHIFTED:
        edge = tl.where(on_edge, logits_of(edge, factor, cap, CAST, SCALED, CAPPED), NEG_INF)
        m = tl.maximum(m, tl.max(edge, axis=1)[:, None])
    x = hold_all(x, PTX)
    scale, base = origin_of(m, PTX)
    s = sum_exp_of(x, scale, base, factor, HELD, TIMES, PTX)[:, None]
    if SHIFTED:
        s += tl.sum(exp_at(edge, scale, base, PTX), axis=1)[:, None]
    ls = log_sum_of(m, s, PTX)
    wz = 0.0
    w_total = n_cols.to(WIDE)
    if SMOOTH:
        wz = sum_of(x, head, cols, body, weight_ptr, factor, zero, BLOCK_COLS, HELD, TIMES, WEIGHTED)[:, None]
        if SHIFTED:
            terms = tl.where(on_edge, edge - zero, 0.0)
            if WEIGHTED:
                terms *= tl.load(weight_ptr + edge_cols, mask=on_edge, other=0.0)
            wz += tl.sum(terms, axis=1)[:, None]
        if WEIGHTED:
            w_total = tl.load(w_total_ptr)
    tl.store(m_ptr + row, m, mask=live)
    tl.store(ls_ptr + row, ls, mask=live)
    store_losses(
        loss_ptr, z_ptr, row, live, m, ls, z_t, kept, wrong, w, wz, w_total, smoothing, lse_square_scale, n_cols,
        SMOOTH, ZLOSS,
    )  # fmt: skip
    if STATS:
        u = entropy_terms(x, scale, base, factor, m, HELD, TIMES, PTX)[:, None]
        found = first_max_of(x, m, head, cols, factor, BLOCK_COLS, HELD, TIMES)[:, None]
        if SHIFTED:
            u += tl.sum(tl.where(edge == NEG_INF, 0.0, exp_at(edge, scale, base, PTX) * (edge - m)), axis=1)[:, None]
            found = tl.minimum(found, tl.min(tl.where(on_edge & (edge == m), edge_cols, NONE), axis=1)[:, None])
        tl.store(entropy_ptr + row, ls - u / s, mask=live)
        tl.store(predicted_ptr + row, tl.where(found < n_cols, found, 0).to(tl.int64), mask=live)
    if GRADIENT:
        g, g_z = per_row(totals_ptr, TOTALS, MEAN)
        a, b, u = shares_of(m + ls, w, w_total, g, g_z, 0.0, smoothing, lse_square_scale, n_cols, SMOOTH)
        a = tl.where(wrong, float("nan"), a) / s
        t = tl.where(kept, t, -1).to(tl.int32)
        counts = kept | wrong
        dx_body = body_of(dx_ptr, row, dx_row_stride, phase, VECTOR, SHIFTED)
        x = hold_all(x, PTX)
        for p in tl.static_range(PIECES):
            here = head + p * BLOCK_COLS + cols
            on = p * BLOCK_COLS + cols < body
            w_cols = tl.load(weight_ptr + here, mask=on, other=0.0) if SMOOTH and WEIGHTED else 1.0
            z = scores_of(x[p], factor, HELD, TIMES)
            dx = gradient_of_logits(
                z,
                exp_at(z, scale, base, PTX),
                a,
                tl.where(here == t, b, 0.0),
                u,
                w_cols,
                factor,
                cap,
                SMOOTH,
                SCALED,
                CAPPED,
            )
            dx = tl.where(counts, dx, 0.0).to(CAST)
            tl.store(dx_body + (p * BLOCK_COLS + cols), dx, mask=on & live, cache_modifier=".cs")
        if SHIFTED:
            w_cols = tl.load(weight_ptr + edge_cols, mask=on_edge, other=0.0) if SMOOTH and WEIGHTED else 1.0
            dx = gradient_of_logits(
                edge, exp_at(edge, scale, base, PTX), a, tl.where(edge_cols == t, b, 0.0), u, w_cols, factor, cap,
                SMOOTH, SCALED, CAPPED,
            )  # fmt: skip
            tl.store(dx_ptr + row * dx_row_stride + edge_cols, tl.where(counts, dx, 0.0).to(CAST), mask=on_edge & live)


@triton.jit(do_not_specialize=["n_cols", "n_parts", "part_cols", "n_programs", "phase", "ahead", "ignore_index"])
def _part_loss(
    slots_ptr, x_ptr, dx_ptr, target_ptr, weight_ptr, totals_ptr, w_total_ptr, numbers_ptr,
    m_ptr, ls_ptr, loss_ptr, z_ptr,
    x_row_stride, dx_row_stride, n_cols, n_parts, part_cols, n_programs, phase, ahead,
    ignore_index, factor, hidden, cap, smoothing, lse_square_scale,
    BLOCK_COLS: tl.constexpr, PIECES: tl.constexpr, FULL_PIECES: tl.constexpr, VECTOR: tl.constexpr,
    SHIFTED: tl.constexpr, CAST: tl.constexpr, PTX: tl.constexpr, ZLOSS: tl.constexpr, WEIGHTED: tl.constexpr,
    SMOOTH: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, LANES: tl.constexpr, COPIES: tl.constexpr,
    PATIENT: tl.constexpr, SPLIT: tl.constexpr, PUBLISH: tl.constexpr, COLLECT: tl.constexpr,
    PREFETCH: tl.constexpr, MEAN: tl.constexpr, TOTALS: tl.constexpr, INPLACE: tl.constexpr,
):  # fmt: skip
    """A row a program, or one part of it (SPLIT), held until its gradient is written."""
    program = tl.program_id(0)
    row = program.to(tl.int64)
    part = 0
    start = 0
    if SPLIT:
        row = (program // n_parts).to(tl.int64)
        part = program % n_parts
        start = part * (part_cols // VECTOR * VECTOR)
    cols = tl.arange(0, BLOCK_COLS)
    head = head_of(row, x_row_stride, phase, VECTOR, SHIFTED)
    body = (n_cols - head) // VECTOR * VECTOR
    size = body
    if SPLIT:
        size = tl.minimum(part_cols // VECTOR * VECTOR, body - start)
    WIDE: tl.constexpr = tl.float64 if CAST.is_fp64() else tl.float32
    HELD: tl.constexpr = WIDE if CAPPED else CAST
    TIMES: tl.constexpr = SCALED and not CAPPED
    factor, cap, smoothing, lse_square_scale = numbers_of(numbers_ptr, factor, cap, smoothing, lse_square_scale, WIDE)
    t, kept, wrong, w = target_of(row, target_ptr, weight_ptr, n_cols, ignore_index, WEIGHTED)
    dx_body = body_of(dx_ptr, row, dx_row_stride, phase, VECTOR, SHIFTED) + start
    lane = tl.arange(0, 2 * VECTOR)
    edge_cols, on_edge = edges_of(lane, head, body, n_cols, VECTOR)
    on_edge = on_edge & (part == tl.where(lane < VECTOR, 0, n_parts - 1))
    losses = 1
    if SPLIT and SMOOTH:
        losses = n_parts
    loss_ptr += row * losses
    counts = kept | wrong
    if SPLIT:
        slots_ptr += row * n_parts * COPIES
        tag = tag_of(tl.load(slots_ptr + part, volatile=True))
        if PUBLISH:
            tag = 1 - tag
    x_body = body_of(x_ptr, row, x_row_stride, phase, VECTOR, SHIFTED) + start
    x = load_logits(x_body, cols, size, factor, hidden, cap, BLOCK_COLS, PIECES, FULL_PIECES, CAST, SCALED, CAPPED)
    # The part with the target's column writes the loss and, over what it has written, the gradient there.
    owner = tl.where(kept, tl.minimum((t - head) // (part_cols // VECTOR * VECTOR), n_parts - 1), 0)
    writes = part == tl.maximum(owner, 0)
    asked = kept & writes
    if SMOOTH:
        asked = kept  # by all that sum logits
    z_t = tl.load(x_ptr + row * x_row_stride + t, mask=asked, other=0.0)
    z_t = logit_of_target(z_t, factor, cap, CAST, SCALED, CAPPED, PTX)
    zero = zero_of(z_t)
    m = max_of(x, factor, HELD, TIMES)
    if INPLACE:  # z_t is read before anything is written over it
        m = tl.maximum(m, tl.where(asked, z_t, NEG_INF))
    if SHIFTED:
        edge = tl.load(x_ptr + row * x_row_stride + edge_cols, mask=on_edge, other=hidden)
        edge = tl.where(on_edge, logits_of(edge, factor, cap, CAST, SCALED, CAPPED), NEG_INF)
        m = tl.maximum(m, tl.max(edge, axis=0))
    x = hold_all(x, PTX)
    scale, base = origin_of(m, PTX)
    # Few pieces would take so few registers that programs crowd: bf16 16384 x 8192 0.92, 0.90 with 32 of 48.
    s = sum_exp_of(x, scale, base, factor, HELD, TIMES, PTX, UNPACK=SPLIT or PIECES > 4)
    if SHIFTED:
        s += tl.sum(exp_at(edge, scale, base, PTX), axis=0)
    wz = 0.0
    w_total = n_cols.to(WIDE)
    if SMOOTH:
        wz = sum_of(x, head + start, cols, size, weight_ptr, factor, zero, BLOCK_COLS, HELD, TIMES, WEIGHTED)
        if SHIFTED:
            terms = tl.where(on_edge, edge - zero, 0.0)
            if WEIGHTED:
                terms *= tl.load(weight_ptr + edge_cols, mask=on_edge, other=0.0)
            wz += tl.sum(terms, axis=0)
        if WEIGHTED:
            w_total = tl.load(w_total_ptr)
    if PREFETCH:
        later = program + ahead
        later_row = later.to(tl.int64)
        later_start = 0
        n_ahead = n_cols
        if SPLIT:
            later_row = (later // n_parts).to(tl.int64)
            later_start = (later % n_parts) * part_cols
            n_ahead = tl.minimum(part_cols, n_cols - later_start)
        n_ahead = tl.where(later < n_programs, n_ahead, 0)
        prefetch_l2(x_ptr, phase, later_row * x_row_stride + later_start, n_ahead)
    if SPLIT:
        m, s = exchange(m, s, slots_ptr, part, n_parts, tag, LANES, COPIES, PATIENT, PUBLISH, COLLECT, PTX)
    if COLLECT:
        ls = log_sum_of(m, s, PTX)
        if writes:
            tl.store(m_ptr + row, m)
            tl.store(ls_ptr + row, ls)
            store_losses(
                loss_ptr + part * (losses > 1), z_ptr + row if ZLOSS else z_ptr, 0, part >= 0, m, ls, z_t, kept, wrong,
                w, wz, w_total, smoothing, lse_square_scale, n_cols, SMOOTH, ZLOSS,
            )  # fmt: skip
        elif SMOOTH:
            tl.store(loss_ptr + part, tl.where(kept, -smoothing / n_cols * wz, 0.0))
        g, g_z = per_row(totals_ptr, TOTALS, MEAN)
        a, b, u = shares_of(m + ls, w, w_total, g, g_z, 0.0, smoothing, lse_square_scale, n_cols, SMOOTH)
        a = tl.where(wrong, float("nan"), a) / s
        scale, base = origin_of(m, PTX)
        x = hold_all(x, PTX)
        if counts:
            for p in tl.static_range(PIECES):
                here = head + start + p * BLOCK_COLS + cols
                on = p * BLOCK_COLS + cols < size
                w_cols = tl.load(weight_ptr + here, mask=on, other=0.0) if SMOOTH and WEIGHTED else 1.0
                z = scores_of(x[p], factor, HELD, TIMES)
                e = exp_at(z, scale, base, PTX)
                dx = gradient_of_logits(z, e, a, 0.0, u, w_cols, factor, cap, SMOOTH, SCALED, CAPPED).to(CAST)
                if p < FULL_PIECES:
                    tl.store(dx_body + (p * BLOCK_COLS + cols), dx, cache_modifier=".cs")
                else:
                    tl.store(dx_body + (p * BLOCK_COLS + cols), dx, mask=on, cache_modifier=".cs")
            if SHIFTED:
                w_cols = tl.load(weight_ptr + edge_cols, mask=on_edge, other=0.0) if SMOOTH and WEIGHTED else 1.0
                e = exp_at(edge, scale, base, PTX)
                dx = gradient_of_logits(edge, e, a, 0.0, u, w_cols, factor, cap, SMOOTH, SCALED, CAPPED)
                tl.store(dx_ptr + row * dx_row_stride + edge_cols, dx.to(CAST), mask=on_edge)
            tl.debug_barrier()
            if kept & writes:
                w_t = tl.load(weight_ptr + t) if SMOOTH and WEIGHTED else 1.0
                e_t = exp_at(z_t, scale, base, PTX)
                dx_t = gradient_of_logits(z_t, e_t, a, b, u, w_t, factor, cap, SMOOTH, SCALED, CAPPED)
                tl.store(dx_ptr + row * dx_row_stride + t, dx_t.to(CAST))
        else:
            _store_zeros(dx_body, cols, size, BLOCK_COLS, PIECES)
            if SHIFTED:
                tl.store(dx_ptr + row * dx_row_stride + edge_cols, tl.zeros([2 * VECTOR], CAST), mask=on_edge)


@triton.jit
def _store_zeros(ptr, cols, size, BLOCK_COLS: tl.constexpr, PIECES: tl.constexpr):
    zeros = tl.zeros([BLOCK_COLS], ptr.dtype.element_ty)
    for p in tl.static_range(PIECES):
        tl.store(ptr + (p * BLOCK_COLS + cols), zeros, mask=p * BLOCK_COLS + cols < size, cache_modifier=".cs")
