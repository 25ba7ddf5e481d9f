"""The gradient of softmax and of log_softmax, from their output y and its gradient dy.

softmax      dx = y * (dy - d),       d = sum y * dy
log_softmax  dx = dy - exp(y) * d,    d = sum dy

M rows of N columns. r is a Row, K the ScoreSpec (core/kernels/spec.py).
Traffic: y and dy are read once and dx is written once (3MN), by the strategies of the forward pass. Rows that the chip
cannot hold are read twice (stream, 5MN).
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.exchange import collect, publish, slots_again, slots_of, stand_in, summed
from fused_softmax.core.kernels.rows import (
    body_of,
    load_edge,
    load_pieces,
    of_each_row,
    part_of,
    prefetch_part,
    prefetch_tile,
    row_of_part,
    store_piece,
    stream_part,
    tile_of,
)
from fused_softmax.core.kernels.spec import Parts, Rows
from fused_softmax.core.kernels.state import NEG_INF, hold_all, natural_exp, widen


@triton.jit(do_not_specialize=["n_rows", "n_cols", "misalignment", "ahead"])
def _tile_backward(
    dy_ptr, y_ptr, dx_ptr, dy_row_stride, y_row_stride, dx_row_stride, n_rows, n_cols, misalignment, ahead, factor,
    K: tl.constexpr,
):  # fmt: skip
    """A program has several short rows."""
    dy_rows = Rows(dy_ptr, dy_row_stride, misalignment, dy_row_stride if K.nested else None)
    y_rows = Rows(y_ptr, y_row_stride, misalignment, y_row_stride if K.nested else None)
    dx_rows = Rows(dx_ptr, dx_row_stride, misalignment)
    r = tile_of(y_rows, n_rows, n_cols, K)
    y, dy = load_both(y_rows, dy_rows, r, K)
    d, edge_y, edge_dy = dot_of_row(y, dy, y_rows, dy_rows, n_cols, 1, r, K)
    if K.prefetch:
        prefetch_tile(y_rows, n_rows, n_cols, ahead, K)
        prefetch_tile(dy_rows, n_rows, n_cols, ahead, K)
    store_gradient(dx_rows, hold_all(y, K.ptx), hold_all(dy, K.ptx), edge_y, edge_dy, d, factor, r, K)


@triton.jit(do_not_specialize=["n_cols", "n_parts", "part_cols", "n_programs", "misalignment", "ahead"])
def _part_backward(
    slots_ptr, dy_ptr, y_ptr, dx_ptr, dy_row_stride, y_row_stride, dx_row_stride,
    n_cols, n_parts, part_cols, n_programs, misalignment, ahead, factor, K: tl.constexpr,
):  # fmt: skip
    """A program has a row, or one part of it (K.split). Parts start in order, and the plan lets all fit the chip."""
    dy_rows = Rows(dy_ptr, dy_row_stride, misalignment, dy_row_stride if K.nested else None)
    y_rows = Rows(y_ptr, y_row_stride, misalignment, y_row_stride if K.nested else None)
    dx_rows = Rows(dx_ptr, dx_row_stride, misalignment)
    program = tl.program_id(0)
    row = row_of_part(program, n_parts, K)
    row_slots_ptr = slots_ptr
    tag = 0
    if K.split:
        row_slots_ptr, tag = slots_of(slots_ptr, row, program % n_parts, n_parts, K.copies, K)
    r = part_of(program % n_parts, row, y_rows, n_cols, part_cols, K)
    y, dy = load_both(y_rows, dy_rows, r, K)
    d, edge_y, edge_dy = dot_of_row(y, dy, y_rows, dy_rows, n_cols, n_parts, r, K)
    if K.prefetch:
        prefetch_part(y_rows, n_cols, n_parts, part_cols, n_programs, ahead, K)
        prefetch_part(dy_rows, n_cols, n_parts, part_cols, n_programs, ahead, K)
    if K.split:
        if K.publish:
            publish(d, tl.zeros([], tl.float32), row_slots_ptr, r.part, n_parts, tag, K)
        if K.collect:
            message, left = collect(row_slots_ptr, r.part, n_parts, tag, K)
            if left > 0:
                finish_alone(slots_ptr, dy_rows, y_rows, dx_rows, n_cols, n_parts, part_cols, factor, tag, K)
            else:
                d = summed(message, n_parts, K)
                store_gradient(dx_rows, hold_all(y, K.ptx), hold_all(dy, K.ptx), edge_y, edge_dy, d, factor, r, K)
    else:
        store_gradient(dx_rows, hold_all(y, K.ptx), hold_all(dy, K.ptx), edge_y, edge_dy, d, factor, r, K)


@triton.jit(do_not_specialize=["n_cols", "n_parts", "part_cols", "misalignment"])
def _stream_dot(
    dy_ptr, y_ptr, d_ptr, dy_row_stride, y_row_stride, n_cols, n_parts, part_cols, misalignment, K: tl.constexpr,
):  # fmt: skip
    """d of one part of a row, tile by tile."""
    PIECES: tl.constexpr = K.pieces
    dy_rows = Rows(dy_ptr, dy_row_stride, misalignment, dy_row_stride if K.nested else None)
    y_rows = Rows(y_ptr, y_row_stride, misalignment, y_row_stride if K.nested else None)
    program = tl.program_id(0)
    r = stream_part(program, y_rows, n_cols, n_parts, part_cols, K)
    y_body = body_of(y_rows, r.row, K)
    dy_body = body_of(dy_rows, r.row, K)
    d = tl.zeros([], K.state_dtype)
    for at in range(r.start, tl.minimum(r.start + part_cols, r.body), PIECES * K.block_cols):
        y = load_pieces(y_body + at, r.cols, r.body - at, 0.0, K, PIECES, 0)
        dy = load_pieces(dy_body + at, r.cols, r.body - at, 0.0, K, PIECES, 0)
        d += dot_of(y, dy, K)
    if K.shifted:
        edge_y = load_edge(y_rows, n_cols, n_parts, r, 0.0, K)
        edge_dy = load_edge(dy_rows, n_cols, n_parts, r, 0.0, K)
        d += dot_of((edge_y.x,), (edge_dy.x,), K)
    tl.store(d_ptr + program, d)


@triton.jit(do_not_specialize=["n_cols", "n_parts", "part_cols", "misalignment"])
def _stream_backward(
    dy_ptr, y_ptr, dx_ptr, d_ptr, dy_row_stride, y_row_stride, dx_row_stride, n_cols, n_parts, part_cols, misalignment,
    factor, K: tl.constexpr,
):  # fmt: skip
    """The second read of one part of a row, given the d of all parts."""
    PIECES: tl.constexpr = K.pieces
    dy_rows = Rows(dy_ptr, dy_row_stride, misalignment, dy_row_stride if K.nested else None)
    y_rows = Rows(y_ptr, y_row_stride, misalignment, y_row_stride if K.nested else None)
    dx_rows = Rows(dx_ptr, dx_row_stride, misalignment)
    r = stream_part(tl.program_id(0), y_rows, n_cols, n_parts, part_cols, K)
    j = tl.arange(0, K.lanes)
    d = tl.sum(tl.load(d_ptr + r.row * n_parts + j, mask=j < n_parts, other=0.0), axis=0)
    y_body = body_of(y_rows, r.row, K)
    dy_body = body_of(dy_rows, r.row, K)
    dx_body = body_of(dx_rows, r.row, K)
    for at in range(r.start, tl.minimum(r.start + part_cols, r.body), PIECES * K.block_cols):
        y = load_pieces(y_body + at, r.cols, r.body - at, 0.0, K, PIECES, 0)
        dy = load_pieces(dy_body + at, r.cols, r.body - at, 0.0, K, PIECES, 0)
        store_pieces(dx_body + at, y, dy, d, factor, r.cols, r.body - at, K)
    if K.shifted:
        edge_y = load_edge(y_rows, n_cols, n_parts, r, 0.0, K)
        edge_dy = load_edge(dy_rows, n_cols, n_parts, r, 0.0, K)
        store_edge(dx_rows, edge_y, edge_dy, d, factor, r, K)


@triton.jit
def load_both(y_rows, dy_rows, r, K: tl.constexpr):
    """The pieces of y and of dy of a row, or of a tile of rows."""
    PIECES: tl.constexpr = K.pieces
    y = load_pieces(body_of(y_rows, r.row, K) + r.start, r.cols, r.size, 0.0, K, PIECES, K.full_pieces)
    dy = load_pieces(body_of(dy_rows, r.row, K) + r.start, r.cols, r.size, 0.0, K, PIECES, K.full_pieces)
    return y, dy


@triton.jit
def dot_of_row(y, dy, y_rows, dy_rows, n_cols, n_parts, r, K: tl.constexpr):
    """(d of a row or of its part, edge of y, edge of dy). The edges are numbers if there are none."""
    d = of_each_row(dot_of(y, dy, K), K)
    edge_y = 0
    edge_dy = 0
    if K.shifted:
        edge_y = load_edge(y_rows, n_cols, n_parts, r, 0.0, K)
        edge_dy = load_edge(dy_rows, n_cols, n_parts, r, 0.0, K)
        d += of_each_row(dot_of((edge_y.x,), (edge_dy.x,), K), K)
    return d, edge_y, edge_dy


@triton.jit(noinline=True)
def finish_alone(slots_ptr, dy_rows, y_rows, dx_rows, n_cols, n_parts, part_cols, factor, tag, K: tl.constexpr):
    """Store the gradient of a part of a row, if messages of other parts are missing.

    See `forward.finish_alone`.
    """
    row, part = row_of_part(tl.program_id(0), n_parts, K), tl.program_id(0) % n_parts
    given = Parts(row, y_rows, n_cols, n_parts, part_cols, dy_rows)
    slots_ptr = slots_again(slots_ptr, row, n_parts, K.copies)
    d = summed(stand_in(slots_ptr, n_parts, tag, dot_of_part, given, K), n_parts, K)
    r = part_of(part, row, y_rows, n_cols, part_cols, K)
    dx_ptr = body_of(dx_rows, row, K) + r.start
    for at in range(0, r.size, K.block_cols):
        dx = gradient_of(load_piece(at, y_rows, r, K), load_piece(at, dy_rows, r, K), d, factor, K)
        tl.store(dx_ptr + (at + r.cols), dx, mask=at + r.cols < r.size, cache_modifier=".cs")
    if K.shifted:
        edge_y = load_edge(y_rows, n_cols, n_parts, r, 0.0, K)
        edge_dy = load_edge(dy_rows, n_cols, n_parts, r, 0.0, K)
        store_edge(dx_rows, edge_y, edge_dy, d, factor, r, K)


@triton.jit
def dot_of_part(part, given, K: tl.constexpr):
    """(d, 0) of a part of a row, read piece by piece. d has the same bits as where the part is held."""
    BLOCK_COLS: tl.constexpr = K.block_cols
    y_rows, dy_rows = given.x, given.rest
    r = part_of(part, given.row, y_rows, given.n_cols, given.part_cols, K)
    total = tl.full([BLOCK_COLS], -0.0, K.state_dtype) + zero_of_part(r.size, K)
    for at in range(0, r.size, BLOCK_COLS):
        total += product_of(load_piece(at, y_rows, r, K), load_piece(at, dy_rows, r, K), K)
    d = tl.sum(total, axis=0)
    if K.shifted:
        edge_y = load_edge(y_rows, given.n_cols, given.n_parts, r, 0.0, K)
        edge_dy = load_edge(dy_rows, given.n_cols, given.n_parts, r, 0.0, K)
        d += dot_of((edge_y.x,), (edge_dy.x,), K)
    return d, tl.zeros([], tl.float32)


@triton.jit
def zero_of_part(size, K: tl.constexpr):
    """The start of a sum over a part: -0.0, which changes no number.

    It is 0.0 if the part is shorter than its pieces: where the part is held, masked columns add 0.0 to the sum.
    """
    return tl.where(size < K.pieces * K.block_cols, 0.0, -0.0)


@triton.jit
def load_piece(at, x, r, K: tl.constexpr):
    """The piece that begins `at` columns after the start of its part."""
    return load_pieces(body_of(x, r.row, K) + r.start + at, r.cols, r.size - at, 0.0, K, 1, 0)[0]


@triton.jit
def dot_of(y, dy, K: tl.constexpr):
    """sum y * dy of all pieces along the axis that is reduced; for log_softmax sum dy."""
    total = product_of(y[0], dy[0], K)
    for p in tl.static_range(1, len(dy)):
        total += product_of(y[p], dy[p], K)
    return tl.sum(total, axis=K.axis)


@triton.jit
def product_of(y, dy, K: tl.constexpr):
    """What one piece adds to d."""
    dy = widen(dy, K.cast_dtype, K.unpack)
    if K.log:
        return dy
    elif K.hides:
        return tl.where(dy == 0.0, 0.0, widen(y, K.cast_dtype, K.unpack) * dy)
    else:
        return widen(y, K.cast_dtype, K.unpack) * dy


@triton.jit
def gradient_of(y, dy, d, factor, K: tl.constexpr):
    """The gradient of one piece of x, from its row's d, times factor if K.scaled.

    With K.hides it is 0 where log_softmax is -inf, and in a row of NaN whose dy are all 0.
    """
    y = widen(y, K.cast_dtype, K.unpack)
    dy = widen(dy, K.cast_dtype, K.unpack)
    if K.log:
        share = natural_exp(y, K.unpack) * d
        if K.hides:
            share = tl.where(dy == 0.0, tl.where(d == 0.0, 0.0, share), share)
        dx = dy - share
        if K.hides:
            dx = tl.where(y == NEG_INF, 0.0, dx)
    else:
        dx = y * (dy - d)
        if K.hides:
            dx = tl.where(dy == d, 0.0, dx)
    if K.scaled:
        dx *= factor
    return dx.to(K.out_dtype)


@triton.jit
def store_gradient(dx_rows, y, dy, edge_y, edge_dy, d, factor, r, K: tl.constexpr):
    """Store the gradient of a row, or of a tile of rows, and of its edge."""
    store_pieces(body_of(dx_rows, r.row, K) + r.start, y, dy, d, factor, r.cols, r.size, K)
    if K.shifted:
        store_edge(dx_rows, edge_y, edge_dy, d, factor, r, K)


@triton.jit
def store_pieces(ptr, y, dy, d, factor, cols, size, K: tl.constexpr):
    for p in tl.static_range(len(y)):
        store_piece(ptr, gradient_of(y[p], dy[p], d, factor, K), p, cols, size, K)


@triton.jit
def store_edge(dx_rows, edge_y, edge_dy, d, factor, r, K: tl.constexpr):
    dx = gradient_of(edge_y.x, edge_dy.x, d, factor, K)
    tl.store(dx_rows.ptr + r.row * dx_rows.stride + edge_y.cols, dx, mask=edge_y.on)
