"""softmax and log_softmax of rows.  y = exp(z - m) / s, or z - m - log s,  m = max z,  s = sum exp(z - m).

z is the input x, or its scaled and masked scores. A sink is one more term of s, and m is at least the sink.
M rows of N columns. r is a Row, S are the Scored inputs, q the RowScores, K the ScoreSpec (core/kernels/spec.py).
Traffic: every element is read once and written once (2MN), however long the row. Only rows that the chip cannot hold
are read twice (stream, 3MN). Elements that causality hides are not read.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.exchange import collect, merged, merged_greedy, publish, slots_again, slots_of, stand_in
from fused_softmax.core.kernels.rows import (
    body_of,
    load_edge,
    part_of,
    prefetch_l2,
    prefetch_part,
    prefetch_tile,
    row_of_part,
    shared_row,
    stream_part,
    sum_of_row,
    tile_of,
)
from fused_softmax.core.kernels.spec import Edge, Parts, Row, Rows, Scored
from fused_softmax.core.kernels.state import (
    NEG_INF,
    NO_COLUMN,
    exp_at,
    hold_all,
    max_of,
    merge,
    origin_of,
    result_of,
    rounded_product,
    scores_of,
    sum_exp_of,
    weight_of,
    with_sink,
)
from fused_softmax.ops.softmax.kernels.scores import (
    edge_scores,
    keep_first_max,
    load_row,
    load_scores,
    mask_of_row,
    max_of_row,
    only_column,
    scores_of_row,
    sink_of_row,
    store_results,
    store_row,
)


# The compiler learns of strides what K.vector says, and no more. If it knew more, half precision that becomes fp32
# would get wider accesses, and so be summed in another order than fp32. Rows that stream promise no such equality.
@triton.jit(do_not_specialize=[
    "x_row_stride", "y_row_stride", "n_rows", "n_cols", "misalignment", "ahead", "n_1", "n_2", "n_queries"
])  # fmt: skip
def _tile_forward(
    x_ptr, y_ptr, mask_ptr, scale_ptr, sink_ptr, x_row_stride, y_row_stride, n_rows, n_cols, misalignment, ahead,
    n_1, n_2, mask_0, mask_1, mask_2, mask_col_stride, scale_0, scale_1, scale_2, n_queries, scale,
    sink_0, sink_1, sink_2, K: tl.constexpr,
):  # fmt: skip
    """A program has several short rows."""
    S = Scored(
        mask_ptr, scale_ptr, n_1, n_2, mask_0, mask_1, mask_2, mask_col_stride, scale_0, scale_1, scale_2, n_queries,
        scale, sink_ptr, sink_0, sink_1, sink_2,
    )  # fmt: skip
    x = Rows(x_ptr, x_row_stride, misalignment, x_row_stride if K.nested else None)
    y = Rows(y_ptr, y_row_stride, misalignment)
    r = tile_of(x, n_rows, n_cols, K)
    q = scores_of_row(r.row, n_cols, S, K)
    sink = sink_of_row(r.row, S, K)
    z, edge = load_row(x, n_cols, 1, r, q, S, K)
    m, edge = max_of_row(z, edge, r, q, S, K)
    if K.greedy:
        z, edge = keep_first_max(z, edge, m, r, q, K)
    if K.prefetch:
        prefetch_tile(x, n_rows, n_cols, ahead, K)
    z = hold_all(z, K.ptx)
    m, s = with_sink(m, sum_of_row(z, edge, m, q, K), sink, K)
    store_row(y, n_cols, z, edge, m, s, r, q, K)


@triton.jit(do_not_specialize=[
    "x_row_stride", "y_row_stride", "n_cols", "n_parts", "part_cols", "misalignment", "ahead", "n_1", "n_2",
    "n_queries",
])  # fmt: skip
def _part_forward(
    slots_ptr, x_ptr, y_ptr, mask_ptr, scale_ptr, sink_ptr, x_row_stride, y_row_stride,
    n_cols, n_parts, part_cols, misalignment, ahead,
    n_1, n_2, mask_0, mask_1, mask_2, mask_col_stride, scale_0, scale_1, scale_2, n_queries, scale,
    sink_0, sink_1, sink_2, K: tl.constexpr,
):  # fmt: skip
    """A program has a row, or one part of it (K.split). Parts start in order, and the plan lets all fit the chip."""
    S = Scored(
        mask_ptr, scale_ptr, n_1, n_2, mask_0, mask_1, mask_2, mask_col_stride, scale_0, scale_1, scale_2, n_queries,
        scale, sink_ptr, sink_0, sink_1, sink_2,
    )  # fmt: skip
    x = Rows(x_ptr, x_row_stride, misalignment, x_row_stride if K.nested else None)
    y = Rows(y_ptr, y_row_stride, misalignment)
    program = tl.program_id(0)
    n_programs = tl.num_programs(0)
    row = row_of_program(n_parts, S, K)
    row_slots_ptr = slots_ptr
    tag = 0
    if K.split:
        row_slots_ptr, tag = slots_of(slots_ptr, row, program % n_parts, n_parts, K.copies, K)
    q = scores_of_row(row, n_cols, S, K)
    sink = sink_of_row(row, S, K)
    r = part_of(program % n_parts, row, x, n_cols, part_cols, K)
    z, edge, m = load_part(r, x, n_cols, n_parts, q, S, K)
    if K.prefetch and K.shared_dims:
        later = shared_row(program + ahead, n_programs, n_1 * n_2 if K.shared_dims == 2 else n_2)
        prefetch_l2(x, later * x.stride, tl.where(program + ahead < n_programs, n_cols, 0))
    elif K.prefetch and not K.split:
        prefetch_part(x, n_cols, n_parts, part_cols, n_programs, ahead, K)
    z = hold_all(z, K.ptx)
    s = sum_of_row(z, edge, m, q, K)
    if K.prefetch and K.split:
        prefetch_part(x, n_cols, n_parts, part_cols, n_programs, ahead, K)
    if K.split:
        if K.publish:
            publish(m, s, row_slots_ptr, r.part, n_parts, tag, K)
        if K.collect:
            message, left = collect(row_slots_ptr, r.part, n_parts, tag, K)
            if left > 0:
                finish_alone(slots_ptr, x, y, n_cols, n_parts, part_cols, tag, S, K)
            else:
                store_part(y, n_cols, n_parts, z, edge, message, sink, r, q, K)
    else:
        m, s = with_sink(m, s, sink, K)
        store_row(y, n_cols, z, edge, m, s, r, q, K)


@triton.jit
def row_of_program(n_parts, S, K: tl.constexpr):
    program = tl.program_id(0)
    if K.shared_dims:
        return shared_row(program, tl.num_programs(0), S.n_1 * S.n_2 if K.shared_dims == 2 else S.n_2)
    else:
        return row_of_part(program, n_parts, K)


@triton.jit(noinline=True)
def finish_alone(slots_ptr, x, y, n_cols, n_parts, part_cols, tag, S, K: tl.constexpr):
    """Store the results of a part of a row, if messages of other parts are missing.

    Its arguments are those of the kernel: it finds its place and reads its part anew, piece by piece. It holds no part,
    so it takes fewer registers than the kernel does.
    """
    row, part = row_of_program(n_parts, S, K), tl.program_id(0) % n_parts
    given = Parts(row, x, n_cols, n_parts, part_cols, S)
    slots_ptr = slots_again(slots_ptr, row, n_parts, K.copies)
    message = stand_in(slots_ptr, n_parts, tag, state_of_part, given, K)
    r = part_of(part, row, x, n_cols, part_cols, K)
    q = scores_of_row(row, n_cols, S, K)
    _, _, edge, column = scan_part(r, x, n_cols, n_parts, q, S, K)
    sink = sink_of_row(row, S, K)
    if K.greedy:
        m, s = merged_greedy(message, r.part, n_parts, q.greedy, sink, K)
    else:
        m, s = merged(message, n_parts, K)
        m, s = with_sink(m, s, sink, K)
    ptr = body_of(y, row, K) + r.start
    for at in range(0, r.size, K.block_cols):
        z = scores_of(load_kept(at, column, r, x, q, S, K), q.factor, K, K.ptx)
        tl.store(ptr + (at + r.cols), result_of(z, m, s, K), mask=at + r.cols < r.size, cache_modifier=".cs")
    if K.shifted:
        tl.store(y.ptr + row * y.stride + edge.cols, result_of(edge.x, m, s, K), mask=edge.on)


@triton.jit
def scan_part(r, x, n_cols, n_parts, q, S, K: tl.constexpr):
    """(m, s, edge, the column that a greedy row keeps) of a part of a row, read piece by piece several times.

    They have the same bits as where the part is held, because lanes add up in the same order.
    """
    BLOCK_COLS: tl.constexpr = K.block_cols
    top = tl.full([BLOCK_COLS], NEG_INF, K.state_dtype)
    for at in range(0, r.size, BLOCK_COLS):
        top = tl.maximum(top, scores_of(load_piece(at, r, x, q, S, K), q.factor, K))
    m = tl.max(top, axis=0)
    edge = 0
    if K.shifted:
        edge = edge_scores(load_edge(x, n_cols, n_parts, r, q.masked_input, K), r, q, S, K)
        m = tl.maximum(m, tl.max(edge.x, axis=0))
    column = 0
    if K.greedy:
        found = tl.full([BLOCK_COLS], NO_COLUMN, tl.int32)
        for at in range(0, r.size, BLOCK_COLS):
            here = scores_of(load_piece(at, r, x, q, S, K), q.factor, K) == m
            found = tl.minimum(found, tl.where(here, r.head + r.start + at + r.cols, NO_COLUMN))
        column = tl.min(found, axis=0)
        if K.shifted:
            column = tl.minimum(column, tl.min(tl.where(edge.x == m, edge.cols, NO_COLUMN), axis=0))
            edge = Edge(edge.cols, edge.on, only_column(edge.x, edge.cols, column, q, K))
    scale, base = origin_of(m, K.ptx)
    total = tl.zeros([BLOCK_COLS], K.state_dtype)
    for at in range(0, r.size, BLOCK_COLS):
        z = scores_of(load_kept(at, column, r, x, q, S, K), q.factor, K, K.unpack)
        total += exp_at(z, scale, base, K.ptx, K.subtract_first)
    s = tl.sum(total, axis=0)
    if K.shifted:
        s += tl.sum(exp_at(edge.x, scale, base, K.ptx), axis=0)
    return m, s, edge, column


@triton.jit
def load_piece(at, r, x, q, S, K: tl.constexpr):
    """The piece that begins `at` columns after the start of its part."""
    ptr, mask_ptr = body_of(x, r.row, K) + r.start + at, mask_of_row(r.row, S, K)
    return load_scores(ptr, r.head + r.start + at, r.size - at, r, q, S, mask_ptr, K, 1, 0)[0]


@triton.jit
def load_kept(at, column, r, x, q, S, K: tl.constexpr):
    """`load_piece`, without what a greedy row does not keep."""
    z = load_piece(at, r, x, q, S, K)
    if K.greedy:
        z = only_column(z, r.head + r.start + at + r.cols, column, q, K)
    return z


@triton.jit
def store_part(y, n_cols, n_parts, z, edge, message, sink, r, q, K: tl.constexpr):
    """Store the results of a part of a row, given the messages of all parts."""
    if K.greedy:
        m, s = merged_greedy(message, r.part, n_parts, q.greedy, sink, K)
    else:
        m, s = merged(message, n_parts, K)
        m, s = with_sink(m, s, sink, K)
    store_row(y, n_cols, z, edge, m, s, r, q, K)


@triton.jit
def load_part(r, x, n_cols, n_parts, q, S, K: tl.constexpr):
    """(pieces, edge, maximum) of the scores of a row, or of its part. A greedy row keeps its first maximum alone."""
    z, edge = load_row(x, n_cols, n_parts, r, q, S, K)
    m, edge = max_of_row(z, edge, r, q, S, K)
    if K.greedy:  # noqa: SIM102  a constexpr, then a value
        if q.greedy:
            z, edge = keep_first_max(z, edge, m, r, q, K)
    return z, edge, m


@triton.jit
def state_of_part(part, given, K: tl.constexpr):
    """(m, s) of a part of a row."""
    q = scores_of_row(given.row, given.n_cols, given.rest, K)
    r = part_of(part, given.row, given.x, given.n_cols, given.part_cols, K)
    m, s, _, _ = scan_part(r, given.x, given.n_cols, given.n_parts, q, given.rest, K)
    return m, s


@triton.jit(do_not_specialize=["n_cols", "n_parts", "part_cols", "misalignment", "n_1", "n_2", "n_queries"])
def _stream_state(
    x_ptr, m_ptr, s_ptr, mask_ptr, scale_ptr, x_row_stride, n_cols, n_parts, part_cols, misalignment,
    n_1, n_2, mask_0, mask_1, mask_2, mask_col_stride, scale_0, scale_1, scale_2, n_queries, scale,
    K: tl.constexpr,
):  # fmt: skip
    """(m, s) of one part of a row, online: each tile is merged into the state of those before it."""
    S = Scored(
        mask_ptr, scale_ptr, n_1, n_2, mask_0, mask_1, mask_2, mask_col_stride, scale_0, scale_1, scale_2, n_queries,
        scale, None, None, None, None,
    )  # fmt: skip
    PIECES: tl.constexpr = K.pieces
    x = Rows(x_ptr, x_row_stride, misalignment, x_row_stride if K.nested else None)
    program = tl.program_id(0)
    r = stream_part(program, x, n_cols, n_parts, part_cols, K)
    q = scores_of_row(r.row, n_cols, S, K)
    mask_ptr = mask_of_row(r.row, S, K)
    x_body = body_of(x, r.row, K)
    m = tl.full([], NEG_INF, K.state_dtype)
    s = tl.zeros([], m.dtype)
    for at in range(r.start, tl.minimum(r.start + part_cols, tl.minimum(r.body, q.visible)), PIECES * K.block_cols):
        z = load_scores(x_body + at, r.head + at, r.body - at, r, q, S, mask_ptr, K, PIECES, 0)
        m_tile = max_of(z, q.factor, K)
        origin, base = origin_of(m_tile, K.ptx)
        m, s = merge(m, s, m_tile, sum_exp_of(hold_all(z, K.ptx), origin, base, q.factor, K), K.ptx)
    if K.shifted:
        edge = edge_scores(load_edge(x, n_cols, n_parts, r, q.masked_input, K), r, q, S, K)
        m_edge = tl.max(edge.x, axis=0)
        origin, base = origin_of(m_edge, K.ptx)
        m, s = merge(m, s, m_edge, tl.sum(exp_at(edge.x, origin, base, K.ptx), axis=0), K.ptx)
    tl.store(m_ptr + program, m)
    tl.store(s_ptr + program, s)


@triton.jit(do_not_specialize=["n_cols", "n_parts", "part_cols", "misalignment", "n_1", "n_2", "n_queries"])
def _stream_forward(
    x_ptr, y_ptr, m_ptr, s_ptr, mask_ptr, scale_ptr, sink_ptr, x_row_stride, y_row_stride, n_cols, n_parts, part_cols,
    misalignment, n_1, n_2, mask_0, mask_1, mask_2, mask_col_stride, scale_0, scale_1, scale_2, n_queries, scale,
    sink_0, sink_1, sink_2, K: tl.constexpr,
):  # fmt: skip
    """The second read of one part of a row, given the states of all parts."""
    S = Scored(
        mask_ptr, scale_ptr, n_1, n_2, mask_0, mask_1, mask_2, mask_col_stride, scale_0, scale_1, scale_2, n_queries,
        scale, sink_ptr, sink_0, sink_1, sink_2,
    )  # fmt: skip
    PIECES: tl.constexpr = K.pieces
    x = Rows(x_ptr, x_row_stride, misalignment, x_row_stride if K.nested else None)
    y = Rows(y_ptr, y_row_stride, misalignment)
    r = stream_part(tl.program_id(0), x, n_cols, n_parts, part_cols, K)
    j = tl.arange(0, K.lanes)
    m_parts = tl.load(m_ptr + r.row * n_parts + j, mask=j < n_parts, other=NEG_INF)
    s_parts = tl.load(s_ptr + r.row * n_parts + j, mask=j < n_parts, other=0.0)
    m = tl.max(m_parts, axis=0)
    s = tl.sum(rounded_product(s_parts, weight_of(m_parts, m, K.ptx)), axis=0)
    m, s = with_sink(m, s, sink_of_row(r.row, S, K), K)
    q = scores_of_row(r.row, n_cols, S, K)
    mask_ptr = mask_of_row(r.row, S, K)
    x_body = body_of(x, r.row, K)
    y_body = body_of(y, r.row, K)
    for at in range(r.start, tl.minimum(r.start + part_cols, r.body), PIECES * K.block_cols):
        z = load_scores(x_body + at, r.head + at, r.body - at, r, q, S, mask_ptr, K, PIECES, 0)
        here = Row(r.row, r.part, at, r.body - at, r.head, r.body, r.cols)
        store_results(y_body + at, z, m, s, here, q, K)
    if K.shifted:
        edge = edge_scores(load_edge(x, n_cols, n_parts, r, q.masked_input, K), r, q, S, K)
        tl.store(y_ptr + r.row * y_row_stride + edge.cols, result_of(edge.x, m, s, K), mask=edge.on)
