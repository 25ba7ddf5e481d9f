"""logsumexp of rows and its gradient.  lse = m + log s,  dx = exp(z - lse) * dlse.

Traffic: the input is read once (MN), and if rows are few, many programs share each; the gradient reads it again and
writes dx.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.exchange import collect, merged, publish, slots_again, slots_of, stand_in
from fused_softmax.core.kernels.rows import (
    body_of,
    lanes_of_part,
    load_edge,
    prefetch_l2,
    prefetch_tile,
    row_of_part,
    sum_of_row,
    tile_of,
    tile_part_of,
    whole_vectors,
)
from fused_softmax.core.kernels.spec import Parts, Rows, Scored
from fused_softmax.core.kernels.state import (
    NEG_INF,
    exp_at,
    finite_top,
    hold_all,
    lse_of,
    max_of,
    merge,
    origin_of,
    rounded_product,
    scores_of,
    sum_exp_of,
    weight_of,
)
from fused_softmax.ops.softmax.kernels.scores import (
    edge_scores,
    load_row,
    load_scores,
    mask_of_row,
    max_of_row,
    scores_of_row,
    sink_of_row,
    visible_of,
)


@triton.jit(do_not_specialize=["n_rows", "n_cols", "misalignment", "ahead", "n_1", "n_2", "n_queries"])
def _tile_logsumexp(
    x_ptr, lse_ptr, mask_ptr, scale_ptr, sink_ptr, x_row_stride, n_rows, n_cols, misalignment, ahead,
    n_1, n_2, mask_0, mask_1, mask_2, mask_col_stride, scale_0, scale_1, scale_2, n_queries, scale,
    sink_0, sink_1, sink_2, K: tl.constexpr,
):  # fmt: skip
    """A program has several short rows."""
    S = Scored(
        mask_ptr, scale_ptr, n_1, n_2, mask_0, mask_1, mask_2, mask_col_stride, scale_0, scale_1, scale_2, n_queries,
        scale, sink_ptr, sink_0, sink_1, sink_2,
    )  # fmt: skip
    x = Rows(x_ptr, x_row_stride, misalignment, x_row_stride if K.nested else None)
    r = tile_of(x, n_rows, n_cols, K)
    q = scores_of_row(r.row, n_cols, S, K)
    sink = sink_of_row(r.row, S, K)
    z, edge = load_row(x, n_cols, 1, r, q, S, K)
    m, edge = max_of_row(z, edge, r, q, S, K)
    if K.prefetch:
        prefetch_tile(x, n_rows, n_cols, ahead, K)
    m = finite_top(m)
    s = sum_of_row(hold_all(z, K.ptx), edge, m, q, K)
    tl.store(lse_ptr + r.row, lse_of(m, s, q.greedy, sink, K).to(K.cast_dtype))


@triton.jit(do_not_specialize=[
    "n_cols", "n_parts", "part_cols", "n_programs", "misalignment", "ahead", "n_1", "n_2", "n_queries"
])  # fmt: skip
def _part_logsumexp(
    slots_ptr, x_ptr, lse_ptr, mask_ptr, scale_ptr, sink_ptr, x_row_stride,
    n_cols, n_parts, part_cols, n_programs, misalignment, ahead,
    n_1, n_2, mask_0, mask_1, mask_2, mask_col_stride, scale_0, scale_1, scale_2, n_queries, scale,
    sink_0, sink_1, sink_2, K: tl.constexpr,
):  # fmt: skip
    """A program has a row, or one part of it (K.split), online: tile by tile.

    The last part alone waits for the others.
    """
    S = Scored(
        mask_ptr, scale_ptr, n_1, n_2, mask_0, mask_1, mask_2, mask_col_stride, scale_0, scale_1, scale_2, n_queries,
        scale, sink_ptr, sink_0, sink_1, sink_2,
    )  # fmt: skip
    x = Rows(x_ptr, x_row_stride, misalignment, x_row_stride if K.nested else None)
    program = tl.program_id(0)
    row = row_of_part(program, n_parts, K)
    row_slots_ptr = slots_ptr
    tag = 0
    if K.split:
        row_slots_ptr, tag = slots_of(slots_ptr, row, program % n_parts, n_parts, K.copies, K)
    part_cols = whole_vectors(part_cols, K)
    part = 0
    if K.split:
        part = program % n_parts
    q = scores_of_row(row, n_cols, S, K)
    sink = sink_of_row(row, S, K)
    if K.prefetch:
        later = program + ahead
        later_row = (later // n_parts).to(tl.int64)
        later_start = (later % n_parts) * part_cols
        n_ahead = tl.minimum(part_cols, visible_of(later_row, n_cols, n_queries, K) - later_start)
        prefetch_l2(x, later_row * x_row_stride + later_start, tl.where(later < n_programs, n_ahead, 0))
    m, s = state_of_part(part, Parts(row, x, n_cols, n_parts, part_cols, S), K)
    if K.split:
        if K.publish:
            publish(m, s, row_slots_ptr, part, n_parts, tag, K)
        if K.collect:  # noqa: SIM102  a constexpr, then a value
            if part == n_parts - 1:
                message, left = collect(row_slots_ptr, 0, n_parts, tag, K)
                if left > 0:
                    finish_alone(slots_ptr, x, lse_ptr, n_cols, n_parts, part_cols, tag, S, K)
                else:
                    m, s = merged(message, n_parts, K)
                    tl.store(lse_ptr + row, lse_of(m, s, q.greedy, sink, K).to(K.cast_dtype))
    else:
        tl.store(lse_ptr + row, lse_of(m, s, q.greedy, sink, K).to(K.cast_dtype))


@triton.jit(noinline=True)
def finish_alone(slots_ptr, x, lse_ptr, n_cols, n_parts, part_cols, tag, S, K: tl.constexpr):
    """Store lse of a row, if messages of its parts are missing: see `forward.finish_alone`."""
    row = row_of_part(tl.program_id(0), n_parts, K)
    given = Parts(row, x, n_cols, n_parts, part_cols, S)
    slots_ptr = slots_again(slots_ptr, row, n_parts, K.copies)
    m, s = merged(stand_in(slots_ptr, n_parts, tag, state_of_part, given, K), n_parts, K)
    greedy = scores_of_row(row, n_cols, S, K).greedy
    tl.store(lse_ptr + row, lse_of(m, s, greedy, sink_of_row(row, S, K), K).to(K.cast_dtype))


@triton.jit
def state_of_part(part, given, K: tl.constexpr):
    """(m, s) of a row, or of its part."""
    row, x, n_cols, part_cols, S = given.row, given.x, given.n_cols, given.part_cols, given.rest
    q = scores_of_row(row, n_cols, S, K)
    PIECES: tl.constexpr = K.pieces
    HEIGHT: tl.constexpr = K.block_cols // K.lane_cols
    r = lanes_of_part(part, row, x, n_cols, part_cols, K)
    mask_ptr = mask_of_row(row, S, K)
    x_body = body_of(x, row, K)
    m = tl.full([HEIGHT, 1], NEG_INF, K.state_dtype)
    s = tl.zeros([HEIGHT, 1], m.dtype)
    for at in range(r.start, tl.minimum(r.start + part_cols, tl.minimum(r.body, q.visible)), PIECES * K.block_cols):
        size = tl.minimum(r.body, r.start + part_cols) - at
        z = load_scores(x_body + at, r.head + at, size, r, q, S, mask_ptr, K, PIECES, 0)
        m_tile = tl.maximum(m, finite_top(max_of(z, q.factor, K)[:, None]))
        origin, base = origin_of(m_tile, K.ptx)
        s *= weight_of(m, m_tile, K.ptx)
        s += sum_exp_of(hold_all(z, K.ptx), origin, base, q.factor, K)[:, None]
        m = m_tile
    m_lane = m
    m = tl.max(tl.max(m_lane, axis=1), axis=0)
    s = tl.sum(tl.sum(rounded_product(s, weight_of(m_lane, m, K.ptx)), axis=1), axis=0)
    if K.shifted:
        edge = edge_scores(load_edge(x, n_cols, given.n_parts, r, q.masked_input, K), r, q, S, K)
        m_edge = finite_top(tl.max(edge.x, axis=0))
        origin, base = origin_of(m_edge, K.ptx)
        m, s = merge(m, s, m_edge, tl.sum(exp_at(edge.x, origin, base, K.ptx), axis=0), K.ptx)
    return m, s


@triton.jit(do_not_specialize=["n_rows", "n_cols", "n_parts", "part_cols", "misalignment", "n_1", "n_2", "n_queries"])
def _logsumexp_backward(
    x_ptr, lse_ptr, dlse_ptr, dx_ptr, mask_ptr, scale_ptr, x_row_stride, dx_row_stride,
    n_rows, n_cols, n_parts, part_cols, misalignment,
    n_1, n_2, mask_0, mask_1, mask_2, mask_col_stride, scale_0, scale_1, scale_2, n_queries, scale,
    K: tl.constexpr,
):  # fmt: skip
    """exp(z - lse) * dlse of several rows, or of one part of a row."""
    S = Scored(
        mask_ptr, scale_ptr, n_1, n_2, mask_0, mask_1, mask_2, mask_col_stride, scale_0, scale_1, scale_2, n_queries,
        scale, None, None, None, None,
    )  # fmt: skip
    PIECES: tl.constexpr = K.pieces
    x = Rows(x_ptr, x_row_stride, misalignment, x_row_stride if K.nested else None)
    dx_rows = Rows(dx_ptr, dx_row_stride, misalignment)
    part_cols = whole_vectors(part_cols, K)
    r = tile_part_of(x, n_rows, n_cols, n_parts, part_cols, K)
    q = scores_of_row(r.row, n_cols, S, K)
    mask_ptr = mask_of_row(r.row, S, K)
    lse, dlse = tl.load(lse_ptr + r.row).to(K.state_dtype), tl.load(dlse_ptr + r.row).to(K.state_dtype)
    x_body = body_of(x, r.row, K)
    dx_body = body_of(dx_rows, r.row, K)
    for at in range(r.start, tl.minimum(r.start + part_cols, n_cols), PIECES * K.block_cols):
        size = tl.minimum(r.body, r.start + part_cols) - at
        z = load_scores(x_body + at, r.head + at, size, r, q, S, mask_ptr, K, PIECES, 0)
        for p in tl.static_range(PIECES):
            dx = share_of(scores_of(z[p], q.factor, K), lse, dlse, K).to(dx_ptr.dtype.element_ty)
            here = p * K.block_cols + r.cols
            tl.store(dx_body + (at + here), dx, mask=here < size)
    if K.shifted:
        edge = edge_scores(load_edge(x, n_cols, n_parts, r, q.masked_input, K), r, q, S, K)
        dx = share_of(edge.x, lse, dlse, K).to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + r.row * dx_row_stride + edge.cols, dx, mask=edge.on)


@triton.jit
def share_of(z, lse, dlse, K: tl.constexpr):
    """exp(z - lse) * dlse.

    In a row that keeps nothing it is 0 if dlse is 0 (K.hides), or always (K.zero_masked_rows).
    """
    dz = tl.exp(z - lse) * dlse
    if K.hides:
        dz = tl.where(dlse == 0.0, 0.0, dz)
    if K.zero_masked_rows:
        dz = tl.where(lse == NEG_INF, 0.0, dz)
    return dz
