"""Split with an online state in each thread, instead of a block-wide maximum before the first exponential. Rejected.

Tried: every thread keeps (m, s) of its own elements, GROUP pieces at a time, and the block merges the states once.
Predicted: the wait for the block's maximum goes, and exponentials begin while later pieces are still on their way.

Measured 2026-11-21, NVIDIA H200, driver 580.159, torch 2.11, Triton 3.6.0; bf16, parts of 16384, 4 warps, prefetch
10 MiB ahead, every slot polled at once; ratio to the best copy kernel in the run; "no" is the adopted kernel:
    GROUP               no      4       2       1
    2048 x 65536        0.962   0.957   0.953   0.947
    1024 x 131072       0.957   0.947   0.944   0.940
    512 x 262144        0.949   0.947   0.939   0.927
    256 x 524288        0.921   0.927   0.924   0.906
    128 x 1048576       0.909   0.896   0.888   0.887
    512 x 1048576       0.926   0.923   0.911   0.909

Looking back: no gain at any width except 524288 (+0.6 %). Registers stayed at 95 or 96, so no more programs reside. The
other resident programs already hide the wait that this saves, and rescaling s takes extra instructions.
This rewrite has no prefetch. It was compiled for sm_90, not run. It imports the device shelf of version 0.1.0.
"""

import triton
import triton.language as tl
from fused_softmax.rowwise import exchange, exp_at, hold, load_pieces, origin_of, tag_of, weight_of, widen


@triton.jit
def online_state(x, GROUP: tl.constexpr, CAST: tl.constexpr):
    """(m, s) of pieces [rows of threads, a thread's elements], GROUP pieces at a time, merged over the block."""
    m = tl.max(widen(x[0], CAST), axis=1)
    s = tl.zeros_like(m)
    for first in tl.static_range(0, len(x), GROUP):
        top = widen(x[first], CAST)
        for p in tl.static_range(first + 1, min(first + GROUP, len(x))):
            top = tl.maximum(top, widen(x[p], CAST))
        before, m = m, tl.maximum(m, tl.max(top, axis=1))
        scale, base = origin_of(m, True)
        s *= tl.where(before == float("-inf"), 0.0, weight_of(before, m, True))
        for p in tl.static_range(first, min(first + GROUP, len(x))):
            s += tl.sum(exp_at(widen(hold(x[p], True), CAST), scale[:, None], base[:, None], True), axis=1)
    m_block = tl.max(m, axis=0)
    return m_block, tl.sum(tl.where(m == float("-inf"), 0.0, s * weight_of(m, m_block, True)), axis=0)


@triton.jit
def _split(
    x_ptr, y_ptr, slots_ptr, n_parts, part_cols,
    BLOCK_COLS: tl.constexpr, PIECES: tl.constexpr, LANES: tl.constexpr, COPIES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    vector: tl.constexpr = 128 // dtype.primitive_bitwidth
    program = tl.program_id(0)
    row, part = program // n_parts, program % n_parts
    slots_ptr += row * n_parts * COPIES
    tag = 1 - tag_of(tl.load(slots_ptr + part, volatile=True))
    # One thread loads a row of a piece at once, so axis 1 is reduced within threads.
    cols = tl.arange(0, BLOCK_COLS // vector)[:, None] * vector + tl.arange(0, vector)[None, :]
    start = program.to(tl.int64) * part_cols
    x = load_pieces(x_ptr + start, cols, part_cols, BLOCK_COLS, PIECES, PIECES)
    m, s = online_state(x, GROUP, dtype)
    m, s = exchange(m, s, slots_ptr, part, n_parts, tag, LANES, COPIES, False, True, True, True)
    scale, base = origin_of(m, True)
    for p in tl.static_range(PIECES):
        y = exp_at(widen(hold(x[p], True), dtype), scale, base, True) / s
        tl.store(y_ptr + start + p * BLOCK_COLS + cols, y.to(dtype), cache_modifier=".cs")
