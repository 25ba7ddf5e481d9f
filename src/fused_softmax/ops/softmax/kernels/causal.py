"""softmax and log_softmax of causal scores, one row for each program, with code of its own for each of four lengths.

Hidden elements of a row are not read, and their result is written while the others are on their way. Pieces that lie
wholly before the diagonal are read without a mask. A single code for all rows wasted half of its instructions: 8 x 16 x
2048 x 2048 in bf16 reached 0.83 of a copy, and 0.98 with four (measured/softmax.md).
Traffic: the visible half is read once (about MN/2), and everything is written once (MN).
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.rows import body_of, edges_of, head_of, sum_of_row, whole_vectors
from fused_softmax.core.kernels.spec import Edge, Row, Rows, Scored
from fused_softmax.core.kernels.state import NEG_INF, hold_all, load_exact, result_of, with_sink
from fused_softmax.ops.softmax.kernels.scores import (
    keep_first_max,
    load_scores,
    mask_of_row,
    max_of_row,
    scores_of_row,
    sink_of_row,
    store_row,
)


@triton.jit(do_not_specialize=["n_cols", "misalignment", "n_1", "n_2", "n_queries"])
def _causal_forward(
    x_ptr, y_ptr, mask_ptr, scale_ptr, sink_ptr, x_row_stride, y_row_stride, n_cols, misalignment,
    n_1, n_2, mask_0, mask_1, mask_2, mask_col_stride, scale_0, scale_1, scale_2, n_queries, scale,
    sink_0, sink_1, sink_2, K: tl.constexpr,
):  # fmt: skip
    """A program has a row. Each run of K.causal_step pieces in which the diagonal may lie has code of its own."""
    S = Scored(
        mask_ptr, scale_ptr, n_1, n_2, mask_0, mask_1, mask_2, mask_col_stride, scale_0, scale_1, scale_2, n_queries,
        scale, sink_ptr, sink_0, sink_1, sink_2,
    )  # fmt: skip
    PIECES: tl.constexpr = K.pieces
    STEP: tl.constexpr = K.causal_step
    x = Rows(x_ptr, x_row_stride, misalignment, x_row_stride if K.nested else None)
    y = Rows(y_ptr, y_row_stride, misalignment)
    program = tl.program_id(0)
    row = program.to(tl.int64)
    head = head_of(row, x, K)
    q = scores_of_row(program, n_cols, S, K)
    sink = sink_of_row(program, S, K)
    for first in tl.static_range(0, PIECES, STEP):
        reached = (q.visible - head > first * K.block_cols) | (first == 0)
        if reached & ((q.visible - head <= (first + STEP) * K.block_cols) | (first + STEP >= PIECES)):
            row_up_to(x, y, row, program, n_cols, head, q, sink, S, K, first)


@triton.jit
def row_up_to(x, y, row, program, n_cols, head, q, sink, S, K: tl.constexpr, OPEN: tl.constexpr):
    """A row whose diagonal crosses one of the K.causal_step pieces after the first OPEN pieces."""
    SEEN: tl.constexpr = OPEN + K.causal_step if OPEN + K.causal_step < K.pieces else K.pieces
    body = whole_vectors(n_cols - head, K)
    r = Row(row, 0, 0, body, head, body, tl.arange(0, K.block_cols))
    y_body = body_of(y, row, K)
    z = load_scores(body_of(x, row, K), head, body, r, q, S, mask_of_row(program, S, K), K, SEEN, OPEN)
    edge = 0
    if K.shifted:  # requested before anything waits for the pieces
        cols, on = edges_of(r, n_cols, 1, K)
        at = load_exact(x.ptr + row * x.stride + cols, on & (cols < q.visible), q.masked_input, K)
        edge = Edge(cols, on, at)
    zero = tl.full([], NEG_INF if K.log else 0.0, tl.float32).to(K.cast_dtype)
    if q.visible > 0:
        store_hidden(y_body, zero, r, K, SEEN)
    m, edge = max_of_row(z, edge, r, q, S, K)
    if K.greedy:  # noqa: SIM102  a constexpr, then a value
        if q.greedy:
            z, edge = keep_first_max(z, edge, m, r, q, K)
    z = hold_all(z, K.ptx)
    m, s = with_sink(m, sum_of_row(z, edge, m, q, K), sink, K)
    store_row(y, n_cols, z, edge, m, s, r, q, K)
    hidden = result_of(tl.full([], NEG_INF, m.dtype), m, s, K)
    if (q.visible <= 0) | (hidden != zero):  # the row has a NaN, or nothing of it is kept
        store_hidden(y_body, hidden, r, K, SEEN)


@triton.jit
def store_hidden(ptr, value, r, K: tl.constexpr, SEEN: tl.constexpr):
    """Store one value in the pieces from SEEN on."""
    BLOCK_COLS: tl.constexpr = K.block_cols
    PIECES: tl.constexpr = K.pieces
    y = tl.zeros([BLOCK_COLS], value.dtype) + value
    for p in tl.static_range(SEEN, PIECES):
        at = p * BLOCK_COLS + r.cols
        tl.store(ptr + at, y, mask=at < r.size, cache_modifier=".cs")
