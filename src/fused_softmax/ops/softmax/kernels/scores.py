"""The scores of a row: what they depend on, the reading of them, their maximum and sum, and the writing of results.

A score is z = x * scale + mask, or -inf where a mask or causality hides it. A row of scale 0 is greedy, and keeps its
first maximum alone. Pieces hold what was read, and are multiplied where they are used. With an added mask they hold z.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.rows import (
    body_of,
    broadcast_offset,
    first_max_of,
    load_edge,
    load_pieces,
    of_each_row,
    store_piece,
)
from fused_softmax.core.kernels.spec import Edge, RowScores
from fused_softmax.core.kernels.state import (
    NEG_INF,
    NO_COLUMN,
    hold_all,
    max_of,
    result_of,
    scores_of,
    widen,
)

LEAST = tl.constexpr(2.0**-149)  # of fp32, above 0


@triton.jit
def visible_of(row, n_cols, n_queries, K: tl.constexpr):
    """How many leading columns of a row causality does not hide."""
    if K.causal:
        return tl.maximum(tl.minimum(n_cols, (row % n_queries).to(tl.int32) + 1 + n_cols - n_queries), 0)
    else:
        return n_cols


@triton.jit
def scores_of_row(row, n_cols, S, K: tl.constexpr):
    """What the scores of a row depend on. A greedy row, whose scale is 0, has factor 1."""
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
    """`scores_of_row` for a scale as it was loaded."""
    # Integers, because the interpreter forgets that a comparison of scalar floats is a truth value.
    sign = tl.where(factor < 0, -1, tl.where(factor == 0, 0, 1))
    if factor.dtype.is_fp64() and not K.cast_dtype.is_fp64():  # rounding must not make a scale 0
        factor = factor.to(tl.float32)
        factor = tl.where(factor == 0, LEAST * sign.to(tl.float32), factor)
    factor = factor.to(K.state_dtype)
    masked_input = tl.where(sign == -1, float("inf"), NEG_INF)
    return RowScores(visible, tl.where(sign == 0, 1.0, factor), masked_input, sign == 0)


@triton.jit
def mask_of_row(row, S, K: tl.constexpr):
    """The address of a row's mask; 0 if there is no mask."""
    if K.mask:
        return S.mask_ptr + broadcast_offset(row, S.n_1, S.n_2, S.mask_0, S.mask_1, S.mask_2)
    else:
        return 0


@triton.jit
def sink_of_row(row, S, K: tl.constexpr):
    """The sink of a row, in the dtype of its state; if there is none, a number that nothing reads."""
    if K.sink:
        offset = broadcast_offset(row, S.n_1, S.n_2, S.sink_0, S.sink_1, S.sink_2)
        return tl.load(S.sink_ptr + offset).to(K.state_dtype)
    else:
        return 0.0


@triton.jit
def keep_scores(x, cols, on, q, S, mask_ptr, K: tl.constexpr, CAUSAL: tl.constexpr):
    """What was read from columns `cols` of a row, with what is masked, or not `on`, turned to the masked input.

    An added mask turns it into finished scores, in the dtype of the arithmetic.
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
def load_scores(ptr, first, size, r, q, S, mask_ptr, K: tl.constexpr, PIECES: tl.constexpr, OPEN: tl.constexpr):
    """Pieces of a row from column `first` on, masked and causal. What causality hides is not read.

    OPEN: how many leading pieces end before `size`, and have nothing that causality hides.
    """
    read = size
    if K.causal:
        read = tl.minimum(size, (q.visible - first + K.vector - 1) // K.vector * K.vector)
    pieces = load_pieces(ptr, r.cols, read, q.masked_input, K, PIECES, OPEN)
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
    """(pieces, edge) of the scores of a row, or of a tile of rows. The edge is a number if there is none.

    It is requested before anything waits for the pieces.
    """
    PIECES: tl.constexpr = K.pieces
    OPEN: tl.constexpr = 0 if K.causal else K.full_pieces
    mask_ptr = mask_of_row(r.row, S, K)
    edge = 0
    if K.edges_first:
        edge = load_edge(x, n_cols, n_parts, r, q.masked_input, K)
    pieces = load_scores(body_of(x, r.row, K) + r.start, r.head + r.start, r.size, r, q, S, mask_ptr, K, PIECES, OPEN)
    if K.shifted and not K.edges_first:
        edge = load_edge(x, n_cols, n_parts, r, q.masked_input, K)
    return pieces, edge


@triton.jit
def edge_scores(edge, r, q, S, K: tl.constexpr):
    """The edge with finished scores in place of what was read."""
    z = edge.x
    if K.mask or K.causal:
        z = keep_scores(z, edge.cols, edge.on, q, S, mask_of_row(r.row, S, K), K, K.causal)
    return Edge(edge.cols, edge.on, scores_of(z, q.factor, K))


@triton.jit
def max_of_row(pieces, edge, r, q, S, K: tl.constexpr):
    """(m, the edge with finished scores in place of what was read)."""
    m = of_each_row(max_of(pieces, q.factor, K), K)
    if K.shifted:
        edge = edge_scores(edge, r, q, S, K)
        m = tl.maximum(m, of_each_row(tl.max(edge.x, axis=K.axis), K))
    return m, edge


@triton.jit
def keep_first_max(pieces, edge, m, r, q, K: tl.constexpr):
    """(pieces, edge), in which a greedy row keeps its first maximum alone."""
    first = r.head + r.start
    column = of_each_row(first_max_of(pieces, m, first, r.cols, q.factor, K), K)
    if K.shifted:
        column = tl.minimum(column, of_each_row(tl.min(tl.where(edge.x == m, edge.cols, NO_COLUMN), axis=K.axis), K))
        edge = Edge(edge.cols, edge.on, only_column(edge.x, edge.cols, column, q, K))
    kept = ()
    for p in tl.static_range(len(pieces)):
        here = first + p * K.block_cols + r.cols
        kept = kept + (only_column(pieces[p], here, column, q, K),)  # noqa: RUF005
    return kept, edge


@triton.jit
def only_column(x, cols, column, q, K: tl.constexpr):
    """x at columns `cols`, of which a greedy row keeps `column`, and NaN anywhere. All else becomes -inf."""
    wide: tl.constexpr = tl.float64 if x.dtype.is_fp64() else tl.float32
    hide = q.greedy & (cols != column) & (x.to(wide) == x.to(wide))
    return tl.where(hide, tl.full([], NEG_INF, wide).to(x.dtype), x)


@triton.jit
def store_results(ptr, pieces, m, s, r, q, K: tl.constexpr):
    """Store the results of all pieces, side by side from ptr, from their row's state."""
    pieces = hold_all(pieces, K.ptx)
    for p in tl.static_range(len(pieces)):
        y = result_of(scores_of(pieces[p], q.factor, K, K.ptx), m, s, K)
        store_piece(ptr, y, p, r.cols, r.size, K)


@triton.jit
def store_row(y, n_cols, pieces, edge, m, s, r, q, K: tl.constexpr):
    """Store the results of a row, or of a tile of rows, and of its edge."""
    body = body_of(y, r.row, K) + r.start
    if K.tile or K.split:
        store_results(body, pieces, m, s, r, q, K)
    else:
        # The loop hides from the compiler that this runs once: it would start early, and take twice the registers.
        for _ in range(tl.minimum(n_cols, 1)):
            store_results(body, pieces, m, s, r, q, K)
    if K.shifted:
        tl.store(y.ptr + r.row * y.stride + edge.cols, result_of(edge.x, m, s, K), mask=edge.on)
