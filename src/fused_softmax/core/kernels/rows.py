"""A row as a program sees it: where it lies, which part of it a program has, and how its elements are read and written.

A row is cut into pieces, power-of-two tiles in a tuple. If rows start off a 16-byte boundary, they have an aligned
body, which is read in whole vectors, and edges before and after it. Each lane reads one element of the edges.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.spec import Edge, Row
from fused_softmax.core.kernels.state import NO_COLUMN, exp_at, load_exact, origin_of, scores_of, sum_exp_of


@triton.jit
def head_of(row, x, K: tl.constexpr):
    """Elements of a row before its first 16-byte boundary."""
    if K.shifted:
        return ((K.vector - (row * x.stride + x.misalignment) % K.vector) % K.vector).to(tl.int32)
    else:
        return 0


@triton.jit
def body_of(x, row, K: tl.constexpr):
    """The first 16-byte boundary of a row, computed so that the compiler sees the alignment."""
    if K.shifted or K.fp8 is not None:  # rows of fp8 that count as even may begin on 8 bytes
        aligned = tl.multiple_of(x.ptr - x.misalignment, K.vector * x.ptr.dtype.element_ty.primitive_bitwidth // 8)
        if x.nest is not None:
            return aligned + (nested_offset(row, x.nest, K) + x.misalignment + K.vector - 1) // K.vector * K.vector
        else:
            return aligned + (row * x.stride + x.misalignment + K.vector - 1) // K.vector * K.vector
    else:
        return x.ptr + row_offset(row, x, K)


@triton.jit
def row_offset(row, x, K: tl.constexpr):
    """Where a row begins that is not shifted, computed so that the compiler sees that it is on 16 bytes."""
    if x.nest is not None:
        return nested_offset(row, x.nest, K)
    else:
        return row * (x.stride // K.vector * K.vector)


@triton.jit
def whole_vectors(n, K: tl.constexpr):
    """n as a multiple of the vector, computed so that the compiler sees it."""
    return n // K.vector * K.vector


@triton.jit
def tile_of(x, n_rows, n_cols, K: tl.constexpr):
    """The rows of a program that has several.

    Rows past the end repeat the last one, and write the same values to the same place. A kernel whose result overwrites
    its input must not store them.
    """
    first_row = tl.program_id(0).to(tl.int64) * K.block_rows
    row = tl.minimum(first_row + tl.arange(0, K.block_rows), n_rows - 1)[:, None]
    head = head_of(row, x, K)
    body = whole_vectors(n_cols - head, K)
    return Row(row, 0, 0, body, head, body, tl.arange(0, K.block_cols)[None, :])


@triton.jit
def part_of(part, row, x, n_cols, part_cols, K: tl.constexpr):
    """A part of `row`, by its number; the whole row if it is not split."""
    start = 0
    if K.split:
        start = part * whole_vectors(part_cols, K)
    else:
        part = 0
    head = head_of(row, x, K)
    body = whole_vectors(n_cols - head, K)
    size = body
    if K.split:
        size = tl.minimum(whole_vectors(part_cols, K), body - start)
    return Row(row, part, start, size, head, body, tl.arange(0, K.block_cols))


@triton.jit
def stream_part(program, x, n_cols, n_parts, part_cols, K: tl.constexpr):
    """The part of a row that is read tile by tile; its columns are numbered in 64 bits.

    The plan gives a part whole tiles, and its size is not cut off at the end of the row.
    """
    row = (program // n_parts).to(tl.int64)
    part = program % n_parts
    start = part.to(tl.int64) * whole_vectors(part_cols, K)
    head = head_of(row, x, K)
    body = whole_vectors(n_cols - head, K)
    return Row(row, part, start, part_cols, head, body, tl.arange(0, K.block_cols))


@triton.jit
def row_of_part(program, n_parts, K: tl.constexpr):
    if K.split:
        return (program // n_parts).to(tl.int64)
    else:
        return program.to(tl.int64)


@triton.jit
def tile_part_of(x, n_rows, n_cols, n_parts, part_cols, K: tl.constexpr):
    """The several rows of a program, or its one part of a row, as a tile that is read piece after piece."""
    program = tl.program_id(0)
    first_row = (program // n_parts).to(tl.int64) * K.block_rows
    part = program % n_parts
    row = tl.minimum(first_row + tl.arange(0, K.block_rows), n_rows - 1)[:, None]
    head = head_of(row, x, K)
    body = whole_vectors(n_cols - head, K)
    start = part.to(tl.int64) * part_cols
    return Row(row, part, start, part_cols, head, body, tl.arange(0, K.block_cols)[None, :])


@triton.jit
def shared_row(program, n_rows, n_inner):
    """The row of a program, if rows that share a row of the mask, and lie n_inner apart, follow each other."""
    n_outer = n_rows // n_inner
    return (program % n_outer).to(tl.int64) * n_inner + program // n_outer


@triton.jit
def broadcast_offset(row, n_1, n_2, stride_0, stride_1, stride_2):
    """Where a row begins in a tensor of such strides.

    Rows are numbered over up to three dims, of which n_1 and n_2 are the sizes of the last two.
    """
    outer = row // n_2
    offset = (outer // n_1).to(tl.int64) * stride_0 + (outer % n_1).to(tl.int64) * stride_1
    return offset + (row % n_2).to(tl.int64) * stride_2


@triton.jit
def nested_offset(row, stride, K: tl.constexpr):
    """`broadcast_offset` for a nested stride (Spec). Rows are fewer than 2**31, so divisions have 32 bits."""
    n_1, n_2, odd_0, odd_1, odd_2 = stride
    V: tl.constexpr = K.vector
    return broadcast_offset(row.to(tl.int32), n_1, n_2, (odd_0 >> 1) * V, (odd_1 >> 1) * V, (odd_2 >> 1) * V)


@triton.jit
def load_pieces(ptr, cols, size, OTHER, K: tl.constexpr, PIECES: tl.constexpr, FULL_PIECES: tl.constexpr):
    """PIECES tiles side by side from ptr, as a tuple. Columns from `size` on are OTHER.

    FULL_PIECES: how many leading tiles end before `size`.
    """
    pieces = ()
    for p in tl.static_range(PIECES):
        if p < FULL_PIECES:
            piece = load_exact(ptr + (p * K.block_cols + cols), None, None, K)
        else:
            piece = load_exact(ptr + (p * K.block_cols + cols), p * K.block_cols + cols < size, OTHER, K)
        pieces = pieces + (piece,)  # noqa: RUF005  the compiler has no unpacking
    return pieces


@triton.jit
def store_piece(ptr, y, p, cols, size, K: tl.constexpr):
    """Store one of a row's pieces up to `size`, as data that is not read again soon."""
    if p < K.full_pieces:
        tl.store(ptr + (p * K.block_cols + cols), y, cache_modifier=".cs")
    else:
        tl.store(ptr + (p * K.block_cols + cols), y, mask=p * K.block_cols + cols < size, cache_modifier=".cs")


@triton.jit
def edges_of(r, n_cols, n_parts, K: tl.constexpr):
    """(columns before and after the body, one a lane; which lanes have one).

    A row's first part has the columns before the body, and its last part those after it. Parts are then in the order of
    their columns, so that the first of equal maxima is found.
    """
    lane = tl.arange(0, 2 * K.vector)
    if K.tile:
        lane = lane[None, :]
    cols = tl.where(lane < K.vector, lane, r.head + r.body + lane - K.vector)
    on = tl.where(lane < K.vector, lane < r.head, cols < n_cols)
    return cols, on & (r.part == tl.where(lane < K.vector, 0, n_parts - 1))


@triton.jit
def load_edge(x, n_cols, n_parts, r, other, K: tl.constexpr):
    """What stands before and after the aligned body of a row; `other` where nothing does."""
    cols, on = edges_of(r, n_cols, n_parts, K)
    return Edge(cols, on, load_exact(x.ptr + r.row * x.stride + cols, on, other, K))


@triton.jit
def of_each_row(values, K: tl.constexpr):
    """A number for each row, in a shape that broadcasts to the pieces."""
    if K.tile:
        return values[:, None]
    else:
        return values


@triton.jit
def prefetch_l2(x, start, n):
    """One thread asks L2 for n elements from `start` on, except those that share 16 bytes with others.

    From sm_90 on.
    """
    itemsize: tl.constexpr = x.ptr.dtype.element_ty.primitive_bitwidth // 8
    vector: tl.constexpr = 16 // itemsize
    begin = (start + x.misalignment + vector - 1) // vector * vector
    n_bytes = ((start + x.misalignment + n - begin) // vector * 16).to(tl.int32)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; setp.gt.and.s32 p, $2, 0, p;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r",
        [x.ptr - x.misalignment + begin, n_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_tile(x, n_rows, n_cols, ahead, K: tl.constexpr):
    """Ask L2 for the rows of the program that is `ahead` programs after this one."""
    first = tl.program_id(0).to(tl.int64) * K.block_rows + ahead.to(tl.int64) * K.block_rows
    n = tl.minimum(K.block_rows * x.stride, (n_rows - 1 - first) * x.stride + n_cols)
    # Past the last row n is negative, and with wide strides it would be too far below zero for 32 bits.
    prefetch_l2(x, first * x.stride, tl.maximum(n, 0))


@triton.jit
def prefetch_part(x, n_cols, n_parts, part_cols, n_programs, ahead, K: tl.constexpr):
    """Ask L2 for the row, or the part of one, of the program that is `ahead` programs after this one."""
    later = tl.program_id(0) + ahead
    if K.split:
        start = (later % n_parts) * part_cols
        n = tl.where(later < n_programs, tl.minimum(part_cols, n_cols - start), 0)
        prefetch_l2(x, (later // n_parts).to(tl.int64) * x.stride + start, n)
    else:
        prefetch_l2(x, later.to(tl.int64) * x.stride, tl.where(later < n_programs, n_cols, 0))


@triton.jit
def sum_of_row(pieces, edge, m, q, K: tl.constexpr):
    """s = sum exp(z - m)."""
    scale, base = origin_of(m, K.ptx)
    s = of_each_row(sum_exp_of(pieces, scale, base, q.factor, K), K)
    if K.shifted:
        s += of_each_row(tl.sum(exp_at(edge.x, scale, base, K.ptx), axis=K.axis), K)
    return s


@triton.jit
def first_max_of(pieces, m, first, cols, factor, K: tl.constexpr):
    """The first column whose score is m; past every column if none is."""
    found = tl.where(scores_of(pieces[0], factor, K) == m, first + cols, NO_COLUMN)
    for p in tl.static_range(1, len(pieces)):
        here = scores_of(pieces[p], factor, K) == m
        found = tl.minimum(found, tl.where(here, first + p * K.block_cols + cols, NO_COLUMN))
    return tl.min(found, axis=len(found.shape) - 1)


@triton.jit
def lanes_of_part(part, row, x, n_cols, part_cols, K: tl.constexpr):
    """The part of a row that is read tile by tile.

    Each lane reads a row of the tile, and keeps a state of its own.
    """
    WIDTH: tl.constexpr = K.lane_cols
    HEIGHT: tl.constexpr = K.block_cols // K.lane_cols
    cols = tl.arange(0, HEIGHT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    head = head_of(row, x, K)
    body = whole_vectors(n_cols - head, K)
    return Row(row, part, part * part_cols, part_cols, head, body, cols)
