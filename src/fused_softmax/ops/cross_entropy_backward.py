"""The gradient of the losses of rows, from the logits and each row's m and log s; and its product with a number.

dx_c = (p_c a - [c = t] b - w_c u) dz_c / dx_c,  p = exp(z - m - log s).
Traffic: the logits are read once and the gradient written once (2MN); a product with 1 moves nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_softmax import launch
from fused_softmax.device import device_of
from fused_softmax.losswise import gradient_of_logits, load_logits, logits_of, numbers_of, per_row, shares_of, target_of
from fused_softmax.ops.arguments import TLDTYPES, alignment_of
from fused_softmax.ops.losses import Loss, arithmetic_of, there
from fused_softmax.plan import RowPlan, plan_reduction
from fused_softmax.rowwise import body_of, edges_of, head_of, scores_of

_SCALED = 4096  # elements that a program multiplies at a time
_SCALERS = 8  # programs a multiprocessor


def cross_entropy_backward(
    x: Tensor, target: Tensor, m: Tensor, ls: Tensor, loss: Loss, *, totals: Tensor | None = None,
    dy: Tensor | None = None, dz: Tensor | None = None, dlse: Tensor | None = None, dx: Tensor | None = None,
    plan: RowPlan | None = None,
) -> Tensor:  # fmt: skip
    """dx of rows x [n_rows, n_classes], from m and ls [n_rows] of `cross_entropy_forward`, none of it skipped.

    dy: what each row's loss counts in the result, one value or one a row; all 1 if None. dz: the same of its z-loss,
    dy's if None. dlse: the gradient of each row's lse. loss.mean divides dy and dz by the totals.
    """
    device, gpu = x.get_device(), device_of(x.get_device())
    n_rows, n_cols = x.shape
    if dx is None:
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if plan is None:
        alignment, capped = alignment_of(x, dx), loss.softcap is not None
        plan = plan_reduction(n_rows, n_cols, x.element_size(), gpu, alignment=alignment, writes=True, capped=capped)
    dtype = arithmetic_of(x)
    dy, dz, dlse = (None if each is None else each.to(dtype).contiguous() for each in (dy, dz, dlse))
    given = (x, dx, target, loss.weight, totals, loss.weight_total(n_cols), loss.numbers(x), m, ls, dy, dz, dlse)
    steps = [0 if each is None or each.numel() == 1 else 1 for each in (dy, dz)]
    run = launch.prepare(
        _gradient, plan.programs, given,
        (x.stride(0), dx.stride(0), n_rows, n_cols, plan.parts, plan.part_cols,
         x.data_ptr() // x.element_size() % plan.vector, *steps, *loss.scalars),
        {
            "ROWS": plan.block_rows, "BLOCK_COLS": plan.block_cols, "PIECES": plan.pieces, "VECTOR": plan.vector,
            "SHIFTED": plan.alignment == "shifted", "CAST": TLDTYPES[x.dtype], "MEAN": loss.mean,
            "TOTALS": 1 if totals is None else totals.shape[1],
        } | loss.constexprs, device=device, num_warps=plan.num_warps,
    )  # fmt: skip
    run(*there(given))
    return dx


def multiply(dx: Tensor, factor: Tensor) -> Tensor:
    """dx, contiguous, times a factor of one element, in place; where that is 1 nothing is read."""
    gpu = device_of(dx.get_device())
    n = dx.numel()
    programs = min(-(-n // _SCALED), _SCALERS * gpu.sm_count)
    run = launch.prepare(
        _multiply, programs, (dx, factor), (n, programs), {"BLOCK": _SCALED}, device=dx.get_device(), num_warps=8
    )
    run(dx, factor)
    return dx


@triton.jit(
    do_not_specialize=["n_rows", "n_cols", "n_parts", "part_cols", "phase", "dy_step", "dz_step", "ignore_index"]
)
def _gradient(
    x_ptr, dx_ptr, target_ptr, weight_ptr, totals_ptr, w_total_ptr, numbers_ptr,
    m_ptr, ls_ptr, dy_ptr, dz_ptr, dlse_ptr,
    x_row_stride, dx_row_stride, n_rows, n_cols, n_parts, part_cols, phase, dy_step, dz_step,
    ignore_index, factor, hidden, cap, smoothing, lse_square_scale,
    ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, PIECES: tl.constexpr, VECTOR: tl.constexpr, SHIFTED: tl.constexpr,
    CAST: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr,
    MEAN: tl.constexpr, TOTALS: tl.constexpr,
):  # fmt: skip
    """The gradient of several rows, or of one part of a row."""
    program = tl.program_id(0)
    first_row = (program // n_parts).to(tl.int64) * ROWS
    part = program % n_parts
    row = (first_row + tl.arange(0, ROWS))[:, None]
    live = row < n_rows
    row = tl.minimum(row, n_rows - 1)
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    part_cols = part_cols // VECTOR * VECTOR
    start = part.to(tl.int64) * part_cols
    head = head_of(row, x_row_stride, phase, VECTOR, SHIFTED)
    body = (n_cols - head) // VECTOR * VECTOR
    WIDE: tl.constexpr = tl.float64 if CAST.is_fp64() else tl.float32
    HELD: tl.constexpr = WIDE if CAPPED else CAST
    TIMES: tl.constexpr = SCALED and not CAPPED
    factor, cap, smoothing, lse_square_scale = numbers_of(numbers_ptr, factor, cap, smoothing, lse_square_scale, WIDE)
    t, kept, wrong, w = target_of(row, target_ptr, weight_ptr, n_cols, ignore_index, WEIGHTED)
    g, g_z = per_row(totals_ptr, TOTALS, MEAN)
    if dy_ptr is not None:
        dy = tl.load(dy_ptr + row * dy_step)
        g *= dy
        if dz_ptr is None:
            g_z *= dy
    if dz_ptr is not None:
        g_z *= tl.load(dz_ptr + row * dz_step)
    w_total = n_cols.to(WIDE)
    if SMOOTH and WEIGHTED:
        w_total = tl.load(w_total_ptr)
    m = tl.load(m_ptr + row)
    ls = tl.load(ls_ptr + row)
    a, b, u = shares_of(m + ls, w, w_total, g, g_z, 0.0, smoothing, lse_square_scale, n_cols, SMOOTH)
    counts = kept | wrong
    if dlse_ptr is not None:  # a row that does not count has no loss, and yet an lse
        a = tl.where(kept, a, 0.0) + tl.load(dlse_ptr + row)
        b = tl.where(kept, b, 0.0)
        u = tl.where(kept, u, 0.0)
        counts = row >= 0
    a = tl.where(wrong, float("nan"), a)
    t = tl.where(kept, t, -1).to(tl.int32)
    x_body = body_of(x_ptr, row, x_row_stride, phase, VECTOR, SHIFTED)
    dx_body = body_of(dx_ptr, row, dx_row_stride, phase, VECTOR, SHIFTED)
    for at in range(start, tl.minimum(start + part_cols, n_cols), PIECES * BLOCK_COLS):
        size = tl.minimum(body, start + part_cols) - at
        x = load_logits(x_body + at, cols, size, factor, 0.0, cap, BLOCK_COLS, PIECES, 0, CAST, SCALED, CAPPED)
        for p in tl.static_range(PIECES):
            here = (head + at).to(tl.int32) + p * BLOCK_COLS + cols
            on = p * BLOCK_COLS + cols < size
            w_cols = tl.load(weight_ptr + here, mask=on, other=0.0) if SMOOTH and WEIGHTED else 1.0
            z = scores_of(x[p], factor, HELD, TIMES)
            dx = gradient_of_logits(
                z, tl.exp(z - m - ls), a, tl.where(here == t, b, 0.0), u, w_cols, factor, cap, SMOOTH, SCALED, CAPPED
            )
            tl.store(dx_body + (at + p * BLOCK_COLS + cols), tl.where(counts, dx, 0.0).to(CAST), mask=on & live)
    if SHIFTED:
        edge_cols, on_edge = edges_of(tl.arange(0, 2 * VECTOR)[None, :], head, body, n_cols, VECTOR)
        on_edge = on_edge & (part == 0)
        edge = tl.load(x_ptr + row * x_row_stride + edge_cols, mask=on_edge, other=0.0)
        z = logits_of(edge, factor, cap, CAST, SCALED, CAPPED)
        w_cols = tl.load(weight_ptr + edge_cols, mask=on_edge, other=0.0) if SMOOTH and WEIGHTED else 1.0
        dx = gradient_of_logits(
            z, tl.exp(z - m - ls), a, tl.where(edge_cols == t, b, 0.0), u, w_cols, factor, cap, SMOOTH, SCALED, CAPPED
        )
        tl.store(dx_ptr + row * dx_row_stride + edge_cols, tl.where(counts, dx, 0.0).to(CAST), mask=on_edge & live)


@triton.jit
def _multiply(dx_ptr, factor_ptr, n, n_programs, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr)
    WIDE: tl.constexpr = tl.float64 if dx_ptr.dtype.element_ty.is_fp64() else tl.float32
    n = tl.where(factor == 1.0, tl.zeros([], tl.int64), n)
    factor = factor.to(WIDE)
    for at in range(tl.program_id(0).to(tl.int64) * BLOCK, n, n_programs * BLOCK):
        i = at + tl.arange(0, BLOCK)
        dx = tl.load(dx_ptr + i, mask=i < n, other=0.0).to(WIDE)
        tl.store(dx_ptr + i, (dx * factor).to(dx_ptr.dtype.element_ty), mask=i < n)
