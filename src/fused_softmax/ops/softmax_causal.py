"""softmax and log_softmax of causal scores, a row a program: of four lengths, each with code of its own.

What causality hides of a row is not read, and what it becomes is written while the rest is on its way; what lies whole
before the diagonal is read without a mask. With one code for all rows it was instructions that took the time, half of
them for nothing: 8 x 16 x 2048 x 2048 bf16 0.83 of a copy, 0.98 so (MEASURED.md).
Traffic: what is seen is read once (about MN/2), everything is written once (MN).
"""

import triton
import triton.language as tl

from fused_softmax import launch
from fused_softmax.rowwise import (
    NEG_INF,
    body_of,
    broadcast_offset,
    edges_of,
    exp_at,
    factor_of,
    first_max_of,
    head_of,
    hold_all,
    keep_column,
    keep_scores,
    load_scores,
    max_of,
    origin_of,
    result_of,
    scores_of,
    store_results,
    sum_exp_of,
    visible_of,
)

_LENGTHS = 4


def prepare_causal(x, y, plan, scalars, layout, constexprs, options):
    """What runs rows of `plan`, each of a program: `run(x, y)`."""
    constexprs = {name: value for name, value in constexprs.items() if name != "CAUSAL"}
    step = -(-plan.pieces // _LENGTHS)
    return launch.prepare(
        _causal_forward, plan.programs, (x, y, *layout.tensors), scalars, constexprs | {"STEP": step}, **options
    )


@triton.jit(do_not_specialize=["n_cols", "phase", "n_1", "n_2", "n_queries"])
def _causal_forward(
    x_ptr, y_ptr, mask_ptr, scale_ptr, x_row_stride, y_row_stride, n_cols, phase,
    n_1, n_2, mask_0, mask_1, mask_2, mask_col_stride, scale_0, scale_1, scale_2, n_queries, number,
    BLOCK_COLS: tl.constexpr, PIECES: tl.constexpr, FULL_PIECES: tl.constexpr,
    VECTOR: tl.constexpr, SHIFTED: tl.constexpr, CAST: tl.constexpr, LOG: tl.constexpr,
    PTX: tl.constexpr, MASK: tl.constexpr, SCALED: tl.constexpr, GREEDY: tl.constexpr, ZERO: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """A row, of as many pieces as are seen, by STEP: all before the last step are seen whole."""
    program = tl.program_id(0)
    row = program.to(tl.int64)
    head = head_of(row, x_row_stride, phase, VECTOR, SHIFTED)
    visible = visible_of(program, n_cols, n_queries, True)
    factor, hidden, greedy = factor_of(program, number, scale_ptr, n_1, n_2, scale_0, scale_1, scale_2, SCALED, CAST)
    if MASK:
        mask_ptr += broadcast_offset(program, n_1, n_2, mask_0, mask_1, mask_2)
    for first in tl.static_range(0, PIECES, STEP):
        reached = (visible - head > first * BLOCK_COLS) | (first == 0)
        if reached & ((visible - head <= (first + STEP) * BLOCK_COLS) | (first + STEP >= PIECES)):
            _row_up_to(
                x_ptr, y_ptr, mask_ptr, row, x_row_stride, y_row_stride, n_cols, phase, head, visible, factor, hidden,
                greedy, mask_col_stride, BLOCK_COLS, PIECES, FULL_PIECES, VECTOR, SHIFTED, CAST, LOG, PTX, MASK,
                SCALED, GREEDY, ZERO, first, STEP,
            )  # fmt: skip


@triton.jit
def _row_up_to(
    x_ptr, y_ptr, mask_ptr, row, x_row_stride, y_row_stride, n_cols, phase, head, visible, factor, hidden, greedy,
    mask_col_stride, BLOCK_COLS: tl.constexpr, PIECES: tl.constexpr, FULL_PIECES: tl.constexpr,
    VECTOR: tl.constexpr, SHIFTED: tl.constexpr, CAST: tl.constexpr, LOG: tl.constexpr, PTX: tl.constexpr,
    MASK: tl.constexpr, SCALED: tl.constexpr, GREEDY: tl.constexpr, ZERO: tl.constexpr,
    OPEN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The row whose diagonal crosses one of the STEP pieces after the first OPEN."""
    SEEN: tl.constexpr = OPEN + STEP if OPEN + STEP < PIECES else PIECES
    cols = tl.arange(0, BLOCK_COLS)
    body = (n_cols - head) // VECTOR * VECTOR
    y_body = body_of(y_ptr, row, y_row_stride, phase, VECTOR, SHIFTED)
    x = load_scores(
        body_of(x_ptr, row, x_row_stride, phase, VECTOR, SHIFTED), head, cols, body, visible, factor, hidden,
        mask_ptr, mask_col_stride, BLOCK_COLS, SEEN, 0, VECTOR, CAST, MASK, SCALED, True, OPEN,
    )  # fmt: skip
    if SHIFTED:  # loaded before anything waits for the pieces
        edge_cols, on_edge = edges_of(tl.arange(0, 2 * VECTOR), head, body, n_cols, VECTOR)
        edge = tl.load(x_ptr + row * x_row_stride + edge_cols, mask=on_edge & (edge_cols < visible), other=hidden)
        edge = keep_scores(
            edge, edge_cols, on_edge, visible, factor, hidden, mask_ptr, mask_col_stride, CAST, MASK, SCALED, True
        )
    zero = tl.full([], NEG_INF if LOG else 0.0, tl.float32).to(CAST)
    if visible > 0:
        _store_hidden(y_body, zero, cols, body, BLOCK_COLS, SEEN, PIECES)
    HELD: tl.constexpr = x[0].dtype if MASK == 2 else CAST
    TIMES: tl.constexpr = SCALED and MASK != 2  # else the scores are finished as they are loaded
    m = max_of(x, factor, HELD, TIMES)
    if SHIFTED:
        edge = scores_of(edge, factor, HELD, TIMES)
        m = tl.maximum(m, tl.max(edge, axis=0))
    if GREEDY:  # noqa: SIM102  a constexpr, then a value
        if greedy:
            column = first_max_of(x, m, head, cols, factor, BLOCK_COLS, HELD, TIMES)
            if SHIFTED:
                column = tl.minimum(column, tl.min(tl.where(edge == m, edge_cols, 2147483647), axis=0))
                edge = tl.where((edge_cols != column) & (edge == edge), NEG_INF, edge)
            x = keep_column(x, column, greedy, head, cols, BLOCK_COLS)
    x = hold_all(x, PTX)
    scale, base = origin_of(m, PTX)
    s = sum_exp_of(x, scale, base, factor, HELD, TIMES, PTX)
    if SHIFTED:
        s += tl.sum(exp_at(edge, scale, base, PTX), axis=0)
    # Runs once, which the compiler does not know: it would start this pass early, on twice the registers.
    for _ in range(tl.minimum(n_cols, 1)):
        store_results(y_body, x, m, s, factor, cols, body, BLOCK_COLS, FULL_PIECES, CAST, HELD, LOG, TIMES, ZERO, PTX)
    if SHIFTED:
        y = result_of(edge, m, s, CAST, LOG, ZERO, PTX)
        tl.store(y_ptr + row * y_row_stride + edge_cols, y, mask=on_edge)
    other = result_of(tl.full([], NEG_INF, m.dtype), m, s, CAST, LOG, ZERO, PTX)
    if (visible <= 0) | (other != zero):  # a row that NaN is in, or of which nothing is kept
        _store_hidden(y_body, other, cols, body, BLOCK_COLS, SEEN, PIECES)


@triton.jit
def _store_hidden(
    y_ptr, value, cols, size, BLOCK_COLS: tl.constexpr, SEEN: tl.constexpr, PIECES: tl.constexpr
):  # fmt: skip
    """One value in the pieces from SEEN on."""
    y = tl.zeros([BLOCK_COLS], value.dtype) + value
    for p in tl.static_range(SEEN, PIECES):
        tl.store(y_ptr + (p * BLOCK_COLS + cols), y, mask=p * BLOCK_COLS + cols < size, cache_modifier=".cs")
