"""A row as a program sees it: where it lies, which part is read, its scores, and the writing of its result.

A row is cut into pieces, power-of-two tiles in a tuple. Rows that start off a 16-byte boundary have an aligned body,
read in whole vectors, and edges before and after it, of which each lane reads one element.
"""

import triton
import triton.language as tl

from fused_softmax.kernels.spec import Edge, Row, RowScores
from fused_softmax.kernels.state import (
    NEG_INF,
    NO_COLUMN,
    exp_at,
    hold_all,
    load_exact,
    max_of,
    origin_of,
    result_of,
    scores_of,
    sum_exp_of,
    widen,
)

LEAST = tl.constexpr(2.0**-149)  # of fp32, above 0


@triton.jit
def head_of(row, x, K: tl.constexpr):
    """Elements of a row before its first 16-byte boundary."""
    if K.shifted:
        return ((K.vector - (row * x.stride + x.misalignment) % K.vector) % K.vector).to(tl.int32)
    else:
        return 0


@triton.jit
def body_of(x, row, K: tl.constexpr):
    """The first 16-byte boundary of a row, in a form that shows the compiler that it is one."""
    if K.shifted or K.fp8 is not None:  # bytes may begin on 8 that are even
        aligned = tl.multiple_of(x.ptr - x.misalignment, K.vector * x.ptr.dtype.element_ty.primitive_bitwidth // 8)
        if x.nest is not None:
            return aligned + (nested_offset(row, x.nest, K) + x.misalignment + K.vector - 1) // K.vector * K.vector
        else:
            return aligned + (row * x.stride + x.misalignment + K.vector - 1) // K.vector * K.vector
    else:
        return x.ptr + row_offset(row, x, K)


@triton.jit
def row_offset(row, x, K: tl.constexpr):
    """Where a row begins that is not shifted, in a form that shows that it starts on 16 bytes."""
    if x.nest is not None:
        return nested_offset(row, x.nest, K)
    else:
        return row * (x.stride // K.vector * K.vector)


@triton.jit
def whole_vectors(n, K: tl.constexpr):
    """n as a multiple of the vector, in a form that shows the compiler that it is one."""
    return n // K.vector * K.vector


@triton.jit
def tile_of(x, n_rows, n_cols, K: tl.constexpr):
    """The rows of a program of several. Rows past the end repeat the last one: the same values to the same place."""
    first_row = tl.program_id(0).to(tl.int64) * K.block_rows
    row = tl.minimum(first_row + tl.arange(0, K.block_rows), n_rows - 1)[:, None]
    head = head_of(row, x, K)
    body = whole_vectors(n_cols - head, K)
    return Row(row, 0, 0, body, head, body, tl.arange(0, K.block_cols)[None, :])


@triton.jit
def part_of(part, row, x, n_cols, part_cols, K: tl.constexpr):
    """A part of `row`, by its number; all of the row unless it is split."""
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
    """The part of a row that is read tile by tile; its columns are numbered in 64 bits."""
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
    """The rows of a program of several, or one part of a row: of either, as a tile that is read piece after piece."""
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
    """The row of a program where rows that lie n_inner apart, and share a row of the mask, follow each other."""
    n_outer = n_rows // n_inner
    return (program % n_outer).to(tl.int64) * n_inner + program // n_outer


@triton.jit
def broadcast_offset(row, n_1, n_2, stride_0, stride_1, stride_2):
    """Where a row, numbered over up to three dims (the last two of n_1 and n_2), begins in a tensor of such strides."""
    outer = row // n_2
    offset = (outer // n_1).to(tl.int64) * stride_0 + (outer % n_1).to(tl.int64) * stride_1
    return offset + (row % n_2).to(tl.int64) * stride_2


@triton.jit
def nested_offset(row, stride, K: tl.constexpr):
    """The same for a stride that is nested (Spec): of fewer than 2**31 rows, whose numbers divide in 32 bits."""
    n_1, n_2, odd_0, odd_1, odd_2 = stride
    V: tl.constexpr = K.vector
    return broadcast_offset(row.to(tl.int32), n_1, n_2, (odd_0 >> 1) * V, (odd_1 >> 1) * V, (odd_2 >> 1) * V)


@triton.jit
def visible_of(row, n_cols, n_queries, K: tl.constexpr):
    """How many leading columns of a row causality does not hide."""
    if K.causal:
        return tl.maximum(tl.minimum(n_cols, (row % n_queries).to(tl.int32) + 1 + n_cols - n_queries), 0)
    else:
        return n_cols


@triton.jit
def scores_of_row(row, n_cols, S, K: tl.constexpr):
    """What the scores of a row depend on. The factor of a greedy row, whose scale is 0, is 1."""
    visible = visible_of(row, n_cols, S.n_queries, K)
    if K.scaled:
        factor = S.scale
        if S.scale_ptr is not None:
            factor = tl.load(S.scale_ptr + broadcast_offset(row, S.n_1, S.n_2, S.scale_0, S.scale_1, S.scale_2))
        return scores_by(factor, visible, K)
    else:
        return RowScores(visible, 1.0, NEG_INF, False)


@triton.jit
def scores_by(factor, visible, K: tl.constexpr):
    """The same by the scale as it is given."""
    # By way of integers: the interpreter forgets that a comparison of scalar floats is a truth value.
    sign = tl.where(factor < 0, -1, tl.where(factor == 0, 0, 1))
    if factor.dtype.is_fp64() and not K.cast_dtype.is_fp64():  # 0 is another thing than its neighbours
        factor = factor.to(tl.float32)
        factor = tl.where(factor == 0, LEAST * sign.to(tl.float32), factor)
    factor = factor.to(K.state_dtype)
    masked_input = tl.where(sign == -1, float("inf"), NEG_INF)
    return RowScores(visible, tl.where(sign == 0, 1.0, factor), masked_input, sign == 0)


@triton.jit
def mask_of_row(row, S, K: tl.constexpr):
    """The row of the mask that belongs to a row; 0 if there is no mask."""
    if K.mask:
        return S.mask_ptr + broadcast_offset(row, S.n_1, S.n_2, S.mask_0, S.mask_1, S.mask_2)
    else:
        return 0


@triton.jit
def sink_of_row(row, S, K: tl.constexpr):
    """The sink of a row, in the dtype of its state; a number that nothing reads if there is none."""
    if K.sink:
        offset = broadcast_offset(row, S.n_1, S.n_2, S.sink_0, S.sink_1, S.sink_2)
        return tl.load(S.sink_ptr + offset).to(K.state_dtype)
    else:
        return 0.0


@triton.jit
def load_pieces(ptr, cols, size, OTHER, K: tl.constexpr, PIECES: tl.constexpr, FULL_PIECES: tl.constexpr):
    """PIECES tiles side by side from ptr, as a tuple; columns from `size` on are OTHER; FULL_PIECES end before it."""
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
    """One of a row's pieces, which is not read again soon; what it has past `size` is not written."""
    if p < K.full_pieces:
        tl.store(ptr + (p * K.block_cols + cols), y, cache_modifier=".cs")
    else:
        tl.store(ptr + (p * K.block_cols + cols), y, mask=p * K.block_cols + cols < size, cache_modifier=".cs")


@triton.jit
def edges_of(r, n_cols, n_parts, K: tl.constexpr):
    """(columns before and after the body, one a lane; which lanes have one).

    A row's first part has those before the body and its last part those after: parts are in the order of their columns,
    by which the first of equal maxima is found.
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
def keep_scores(x, cols, on, q, S, mask_ptr, K: tl.constexpr, CAUSAL: tl.constexpr):
    """What was read from columns `cols` of a row (where `on`), all that is masked turned to the masked input.

    An added mask makes of it the finished scores, in the dtype of the arithmetic.
    """
    wide: tl.constexpr = tl.float64 if x.dtype.is_fp64() else tl.float32
    keep = on
    masked_input = q.masked_input
    if K.mask == 2:
        x = widen(x, K.cast_dtype)
        if K.scaled:
            x *= q.factor
        x += tl.load(mask_ptr + cols.to(tl.int64) * S.mask_col_stride, mask=on, other=0.0).to(x.dtype)
        masked_input = NEG_INF
    if K.mask == 1:
        keep = keep & (tl.load(mask_ptr + cols.to(tl.int64) * S.mask_col_stride, mask=on, other=0) != 0)
    if CAUSAL:
        keep = keep & (cols < q.visible)
    return tl.where(keep, x, (tl.zeros([], wide) + masked_input).to(x.dtype))


@triton.jit
def load_scores(ptr, first, size, r, q, S, mask_ptr, K: tl.constexpr, PIECES: tl.constexpr, OPEN: tl.constexpr = 0):
    """Pieces from column `first` of a row on, masked and causal; what causality hides is not read.

    OPEN: how many leading pieces causality hides nothing of.
    """
    if K.causal:
        read = tl.minimum(size, (q.visible - first + K.vector - 1) // K.vector * K.vector)
        pieces = load_pieces(ptr, r.cols, read, q.masked_input, K, PIECES, OPEN)
    else:
        read = size
        pieces = load_pieces(ptr, r.cols, size, q.masked_input, K, PIECES, K.full_pieces)
    if K.mask or K.causal:
        kept = ()
        for p in tl.static_range(PIECES):
            if K.mask or p >= OPEN:
                at = p * K.block_cols + r.cols
                piece = keep_scores(pieces[p], first + at, at < read, q, S, mask_ptr, K, K.causal and p >= OPEN)
            else:
                piece = pieces[p]
            kept = kept + (piece,)  # noqa: RUF005  the compiler has no unpacking
        return kept
    else:
        return pieces


@triton.jit
def load_row(x, n_cols, n_parts, r, q, S, K: tl.constexpr):
    """(pieces, edge) of the scores of a row, or of a tile of rows; the edge is a number where there is none.

    The edge is asked for before anything waits for the pieces.
    """
    PIECES: tl.constexpr = K.pieces
    mask_ptr = mask_of_row(r.row, S, K)
    edge = 0
    if K.edges_first:
        edge = load_edge(x, n_cols, n_parts, r, q.masked_input, K)
    pieces = load_scores(body_of(x, r.row, K) + r.start, r.head + r.start, r.size, r, q, S, mask_ptr, K, PIECES)
    if K.shifted and not K.edges_first:
        edge = load_edge(x, n_cols, n_parts, r, q.masked_input, K)
    return pieces, edge


@triton.jit
def edge_scores(edge, r, q, S, K: tl.constexpr):
    """The edge with its finished scores in the place of what was read."""
    z = edge.x
    if K.mask or K.causal:
        z = keep_scores(z, edge.cols, edge.on, q, S, mask_of_row(r.row, S, K), K, K.causal)
    return Edge(edge.cols, edge.on, scores_of(z, q.factor, K))


@triton.jit
def of_each_row(values, K: tl.constexpr):
    """A number for each row, as it broadcasts to the pieces."""
    if K.tile:
        return values[:, None]
    else:
        return values


@triton.jit
def max_of_row(pieces, edge, r, q, S, K: tl.constexpr):
    """(m, edge), the edge's finished scores in the place of what was read."""
    m = of_each_row(max_of(pieces, q.factor, K), K)
    if K.shifted:
        edge = edge_scores(edge, r, q, S, K)
        m = tl.maximum(m, of_each_row(tl.max(edge.x, axis=K.axis), K))
    return m, edge


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
def keep_first_max(pieces, edge, m, r, q, K: tl.constexpr):
    """Of a greedy row the first maximum alone: all else becomes -inf, but where it is NaN."""
    wide: tl.constexpr = tl.float64 if pieces[0].dtype.is_fp64() else tl.float32
    first = r.head + r.start
    column = of_each_row(first_max_of(pieces, m, first, r.cols, q.factor, K), K)
    if K.shifted:
        column = tl.minimum(column, of_each_row(tl.min(tl.where(edge.x == m, edge.cols, NO_COLUMN), axis=K.axis), K))
        hide = q.greedy & (edge.cols != column) & (edge.x == edge.x)
        edge = Edge(edge.cols, edge.on, tl.where(hide, NEG_INF, edge.x))
    kept = ()
    for p in tl.static_range(len(pieces)):
        x = pieces[p]
        hide = q.greedy & (first + p * K.block_cols + r.cols != column) & (x.to(wide) == x.to(wide))
        kept = kept + (tl.where(hide, tl.full([], NEG_INF, wide).to(x.dtype), x),)  # noqa: RUF005
    return kept, edge


@triton.jit
def store_results(ptr, pieces, m, s, r, q, K: tl.constexpr):
    """The results of all pieces, side by side from ptr, by their row's state."""
    pieces = hold_all(pieces, K.ptx)
    for p in tl.static_range(len(pieces)):
        y = result_of(scores_of(pieces[p], q.factor, K, K.ptx), m, s, K)
        store_piece(ptr, y, p, r.cols, r.size, K)


@triton.jit
def store_row(y, n_cols, pieces, edge, m, s, r, q, K: tl.constexpr):
    """The results of a row, or of a tile of rows, and of its edge."""
    body = body_of(y, r.row, K) + r.start
    if K.tile or K.split:
        store_results(body, pieces, m, s, r, q, K)
    else:
        # Runs once, which the compiler does not know: it would start this pass early, on twice the registers.
        for _ in range(tl.minimum(n_cols, 1)):
            store_results(body, pieces, m, s, r, q, K)
    if K.shifted:
        tl.store(y.ptr + r.row * y.stride + edge.cols, result_of(edge.x, m, s, K), mask=edge.on)


@triton.jit
def prefetch_l2(x, start, n):
    """One thread asks L2 for n elements from `start` on, less those that share 16 bytes with others. From sm_90 on."""
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
    """The rows of the program that is `ahead` of this one."""
    first = tl.program_id(0).to(tl.int64) * K.block_rows + ahead.to(tl.int64) * K.block_rows
    n = tl.minimum(K.block_rows * x.stride, (n_rows - 1 - first) * x.stride + n_cols)
    # Past the last row it is negative, and at wide strides so far below zero that it would not fit 32 bits.
    prefetch_l2(x, first * x.stride, tl.maximum(n, 0))


@triton.jit
def prefetch_part(x, n_cols, n_parts, part_cols, n_programs, ahead, K: tl.constexpr):
    """The row, or the part of one, of the program that is `ahead` of this one."""
    later = tl.program_id(0) + ahead
    if K.split:
        start = (later % n_parts) * part_cols
        n = tl.where(later < n_programs, tl.minimum(part_cols, n_cols - start), 0)
        prefetch_l2(x, (later // n_parts).to(tl.int64) * x.stride + start, n)
    else:
        prefetch_l2(x, later.to(tl.int64) * x.stride, tl.where(later < n_programs, n_cols, 0))
