"""The gradient of the losses of rows, from the logits and each row's m and log s; and helper kernels of sums and means.

dx_c = (p_c a - [c = t] b - w_c u) dz_c / dx_c,  p = exp(z - m - log s).
Traffic: the logits are read once and the gradient is written once (2MN); a product with 1 moves nothing.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.exchange import let_next_begin, wait_for_launch_before
from fused_softmax.core.kernels.rows import body_of, tile_part_of, whole_vectors
from fused_softmax.core.kernels.spec import Rows
from fused_softmax.core.kernels.state import scores_of
from fused_softmax.ops.losses.kernels.common import (
    gradient_of_logits,
    load_edge_logits,
    load_logits,
    numbers_of,
    per_row,
    shares_of,
    target_of,
    weight_total,
    weights_at,
)


@triton.jit(
    do_not_specialize=["n_rows", "n_cols", "n_parts", "part_cols", "misalignment", "dy_step", "dz_step", "ignore_index"]
)
def _gradient(
    x_ptr, dx_ptr, target_ptr, weight_ptr, totals_ptr, w_total_ptr, numbers_ptr,
    m_ptr, ls_ptr, dy_ptr, dz_ptr, dlse_ptr,
    x_row_stride, dx_row_stride, n_rows, n_cols, n_parts, part_cols, misalignment, dy_step, dz_step,
    ignore_index, factor, cap, smoothing, lse_square_scale, K: tl.constexpr,
):  # fmt: skip
    """The gradient of several rows, or of one part of a row."""
    PIECES: tl.constexpr = K.pieces
    x = Rows(x_ptr, x_row_stride, misalignment)
    dx_rows = Rows(dx_ptr, dx_row_stride, misalignment)
    part_cols = whole_vectors(part_cols, K)
    r = tile_part_of(x, n_rows, n_cols, n_parts, part_cols, K)
    live = (tl.program_id(0) // n_parts).to(tl.int64) * K.block_rows + tl.arange(0, K.block_rows)[:, None] < n_rows
    N = numbers_of(numbers_ptr, factor, cap, smoothing, lse_square_scale, K)
    T = target_of(r.row, target_ptr, weight_ptr, n_cols, ignore_index, K)
    g, g_z = per_row(totals_ptr, K)
    if dy_ptr is not None:  # g is infinite in a mean of total weight 0, and times 0 it would be NaN
        dy = tl.load(dy_ptr + r.row * dy_step)
        g = tl.where(dy == 0.0, 0.0, g * dy)
        if dz_ptr is None:
            g_z = tl.where(dy == 0.0, 0.0, g_z * dy)
    if dz_ptr is not None:
        dz = tl.load(dz_ptr + r.row * dz_step)
        g_z = tl.where(dz == 0.0, 0.0, g_z * dz)
    w_total = weight_total(w_total_ptr, n_cols, K)
    m = tl.load(m_ptr + r.row)
    ls = tl.load(ls_ptr + r.row)
    D = shares_of(m + ls, T.w, w_total, g, g_z, n_cols, N, K)
    a = D.a
    b = D.b
    u = D.u
    counts = T.kept | T.wrong
    if dlse_ptr is not None:  # an ignored row has no loss, but an lse, which may have a gradient
        a = tl.where(T.kept, a, 0.0) + tl.load(dlse_ptr + r.row)
        b = tl.where(T.kept, b, 0.0)
        u = tl.where(T.kept, u, 0.0)
        counts |= a != 0
    a = tl.where(T.wrong, float("nan"), a)
    t = tl.where(T.kept, T.t, -1).to(tl.int32)
    x_body = body_of(x, r.row, K)
    dx_body = body_of(dx_rows, r.row, K)
    for at in range(r.start, tl.minimum(r.start + part_cols, n_cols), PIECES * K.block_cols):
        size = tl.minimum(r.body, r.start + part_cols) - at
        z = load_logits(x_body + at, r.cols, size, 0.0, N, K, PIECES, 0)
        for p in tl.static_range(PIECES):
            here = (r.head + at).to(tl.int32) + p * K.block_cols + r.cols
            on = p * K.block_cols + r.cols < size
            w_cols = weights_at(weight_ptr, here, on, K)
            z_p = scores_of(z[p], N.factor, K)
            dx = gradient_of_logits(z_p, tl.exp(z_p - m - ls), a, tl.where(here == t, b, 0.0), u, w_cols, N, K)
            dx = tl.where(counts, dx, 0.0).to(K.cast_dtype)
            tl.store(dx_body + (at + p * K.block_cols + r.cols), dx, mask=on & live)
    if K.shifted:
        edge = load_edge_logits(x, n_cols, n_parts, r, 0.0, N, K)
        w_cols = weights_at(weight_ptr, edge.cols, edge.on, K)
        at_target = tl.where(edge.cols == t, b, 0.0)
        dx = gradient_of_logits(edge.x, tl.exp(edge.x - m - ls), a, at_target, u, w_cols, N, K)
        dx = tl.where(counts, dx, 0.0).to(K.cast_dtype)
        tl.store(dx_ptr + r.row * dx_row_stride + edge.cols, dx, mask=edge.on & live)


@triton.jit
def _multiply(dx_ptr, factor_ptr, n, n_programs, BLOCK: tl.constexpr):
    """dx times a factor, in place."""
    factor = tl.load(factor_ptr)
    WIDE: tl.constexpr = tl.float64 if dx_ptr.dtype.element_ty.is_fp64() else tl.float32
    n = tl.where(factor == 1.0, tl.zeros([], tl.int64), n)
    factor = factor.to(WIDE)
    for at in range(tl.program_id(0).to(tl.int64) * BLOCK, n, n_programs * BLOCK):
        i = at + tl.arange(0, BLOCK)
        dx = tl.load(dx_ptr + i, mask=i < n, other=0.0).to(WIDE)
        tl.store(dx_ptr + i, (dx * factor).to(dx_ptr.dtype.element_ty), mask=i < n)


@triton.jit(do_not_specialize=["n_rows", "part_rows", "n_classes", "ignore_index"])
def _totals(
    target_ptr, weight_ptr, totals_ptr, n_rows, part_rows, n_classes, ignore_index, BLOCK: tl.constexpr,
    LEADS: tl.constexpr,
):  # fmt: skip
    """The sum of the weights and the number of the targets that count, in one part of all targets."""
    let_next_begin(LEADS)
    part = tl.program_id(0)
    start = part.to(tl.int64) * part_rows
    weights, counts = count_targets(
        target_ptr, weight_ptr, start, tl.minimum(start + part_rows, n_rows), n_classes, ignore_index,
        totals_ptr.dtype.element_ty, BLOCK,
    )  # fmt: skip
    tl.store(totals_ptr + part, weights)
    tl.store(totals_ptr + tl.num_programs(0) + part, counts)


@triton.jit
def count_targets(
    target_ptr, weight_ptr, start, stop, n_classes, ignore_index, DTYPE: tl.constexpr, BLOCK: tl.constexpr
):
    """(sum of the weights, number) of the targets [start, stop) that count."""
    weights = tl.zeros([BLOCK], DTYPE)
    counts = tl.zeros([BLOCK], DTYPE)
    for at in range(start, stop, BLOCK):
        row = at + tl.arange(0, BLOCK)
        t = tl.load(target_ptr + row, mask=row < stop, other=0).to(tl.int64)
        on = (row < stop) & (t != ignore_index)
        counts += on.to(DTYPE)
        if weight_ptr is not None:
            weights += tl.load(weight_ptr + t, mask=on & (t >= 0) & (t < n_classes), other=0.0)
    n = tl.sum(counts, axis=0)
    if weight_ptr is not None:
        return tl.sum(weights, axis=0), n
    else:
        return n, n


@triton.jit(do_not_specialize=["n_losses", "n_z", "n_rows", "n_classes", "ignore_index"])
def _finish(
    loss_ptr, z_ptr, totals_ptr, target_ptr, weight_ptr, result_ptr, z_result_ptr, parts_ptr, ticket_ptr,
    n_losses, n_z, n_rows, n_classes, ignore_index, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum or mean of all losses, and that of the z-losses in it. With target_ptr it counts the targets first.

    One program adds all, or each of K.lanes programs adds a share (K.finishes). The last of these to end adds the
    shares.
    """
    wait_for_launch_before(K.follows)
    LANES: tl.constexpr = K.lanes
    DTYPE: tl.constexpr = loss_ptr.dtype.element_ty
    if target_ptr is not None:
        weights, counts = count_targets(target_ptr, weight_ptr, 0, n_rows, n_classes, ignore_index, DTYPE, BLOCK)
        g = 1.0 / weights
        g_z = 1.0 / counts
    else:
        g, g_z = per_row(totals_ptr, K)
    if K.mean or target_ptr is not None:
        # Where all weights that count are 0 the mean is NaN, though smoothing may add to the sum.
        g = tl.where(g == float("inf"), float("nan"), g)
    program = tl.program_id(0)
    total = sum_of_share(loss_ptr, program, n_losses, K, BLOCK)
    z_total = tl.zeros([], DTYPE)
    if z_ptr is not None:
        z_total = sum_of_share(z_ptr, program, n_z, K, BLOCK)
    if K.finishes:
        tl.store(parts_ptr + program, total)
        tl.store(parts_ptr + LANES + program, z_total)
        # Releases this program's sums, and acquires those of all others.
        if tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == LANES - 1:
            j = tl.arange(0, LANES)
            total = tl.sum(tl.load(parts_ptr + j, volatile=True), axis=0)
            z_total = tl.sum(tl.load(parts_ptr + LANES + j, volatile=True), axis=0)
            store_result(result_ptr, z_result_ptr, total * g, z_total * g_z)
            tl.atomic_xchg(ticket_ptr, 0, sem="relaxed")
    else:
        store_result(result_ptr, z_result_ptr, total * g, z_total * g_z)


@triton.jit
def sum_of_share(ptr, program, n, K: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of a program's share of n values: one of K.lanes equal shares, in whole blocks."""
    share = tl.cdiv(n, K.lanes * BLOCK) * BLOCK
    start = program * share
    total = tl.zeros([BLOCK], ptr.dtype.element_ty)
    for at in range(start, tl.minimum(start + share, n), BLOCK):
        j = at + tl.arange(0, BLOCK)
        total += tl.load(ptr + j, mask=j < n, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def store_result(result_ptr, z_result_ptr, result, z):
    if z_result_ptr is not None:
        tl.store(z_result_ptr, z)
        result += z
    tl.store(result_ptr, result)
