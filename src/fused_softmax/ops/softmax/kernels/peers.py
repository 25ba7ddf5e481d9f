"""softmax and log_softmax of rows whose columns lie on several GPUs. A program has a part of a row.

Traffic of a shard of N columns: it is read once and written once (2MN); between GPUs 8 bytes a part.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.rows import part_of, prefetch_part, sum_of_row
from fused_softmax.core.kernels.spec import Rows, RowScores, Scored
from fused_softmax.core.kernels.state import NEG_INF, hold_all
from fused_softmax.ops.softmax.kernels.scores import load_row, max_of_row, store_row
from fused_softmax.ranks.kernels import announce, bases_of, collect, state_of, tell, turn_of


@triton.jit(do_not_specialize=[
    "x_row_stride", "y_row_stride", "n_cols", "n_parts", "part_cols", "misalignment", "ahead", "rank", "ranks",
    "digest", "set_size",
])  # fmt: skip
def _peer_forward(
    slots_ptr, bases_ptr, asked_ptr, x_ptr, y_ptr, x_row_stride, y_row_stride, n_cols, n_parts, part_cols,
    misalignment, ahead, rank, ranks, digest, set_size, K: tl.constexpr,
):  # fmt: skip
    x = Rows(x_ptr, x_row_stride, misalignment)
    y = Rows(y_ptr, y_row_stride, misalignment)
    program = tl.program_id(0)
    row = (program // n_parts).to(tl.int64)
    part = program % n_parts
    n_slots = (n_parts + 1) * ranks
    bases = bases_of(bases_ptr, ranks, K)
    start, tag = turn_of(slots_ptr, row * n_slots + rank * n_parts + part, set_size, asked_ptr, rank, K)
    row_at = start + row * n_slots
    S = Scored(
        None, None, None, None, None, None, None, None, None, None, None, None, None, None, None, None, None
    )  # fmt: skip
    q = RowScores(n_cols, 1.0, NEG_INF, False)
    r = part_of(part, row, x, n_cols, part_cols, K)
    z, edge = load_row(x, n_cols, n_parts, r, q, S, K)
    m, edge = max_of_row(z, edge, r, q, S, K)
    z = hold_all(z, K.ptx)
    s = sum_of_row(z, edge, m, q, K)
    if K.publish:
        tell(m, s, s * 0, part == 0, bases, row_at, part, n_parts, rank, ranks, digest, tag, K)
        if program == 0:
            announce(bases_ptr, asked_ptr, rank, ranks, digest, K)
    if K.prefetch:
        prefetch_part(x, n_cols, n_parts, part_cols, tl.num_programs(0), ahead, K)
    if K.collect:
        message = collect(slots_ptr + row_at, bases_ptr, asked_ptr, rank, ranks, n_slots, tag, K)
        m, s, _ = state_of(message, bases_ptr, asked_ptr, row, n_parts, rank, ranks, digest, tag, K)
        store_row(y, n_cols, z, edge, m, s, r, q, K)
