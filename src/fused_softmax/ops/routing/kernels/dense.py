"""Rows as wide as all experts of which few are not alike: one value everywhere, and then a few in its place."""

import triton
import triton.language as tl

from fused_softmax.ops.routing.kernels.common import experts_of


@triton.jit
def write_zeros(y_ptr, y_row_stride, row, here, value, K: tl.constexpr):
    """One value of each row [rows], which is 0 or NaN, in all places of y [n_rows, n_experts]."""
    N_CHUNKS: tl.constexpr = K.n_chunks
    CHUNKS: tl.constexpr = K.chunks
    for c in tl.static_range(N_CHUNKS):
        write_chunk(y_ptr, y_row_stride, row, here, value, CHUNKS[3 * c], CHUNKS[3 * c + 1], CHUNKS[3 * c + 2], K)


@triton.jit
def write_chunk(
    y_ptr,
    y_row_stride,
    row,
    here,
    value,
    FIRST: tl.constexpr,
    STACKED: tl.constexpr,
    LENGTH: tl.constexpr,
    K: tl.constexpr,
):
    for t in tl.static_range(LENGTH):
        experts, there = experts_of(FIRST + t, STACKED, K)
        at = (row * y_row_stride)[None, :, None] + experts
        of_rows = value[None, :, None] + tl.zeros(experts.shape, tl.float32)
        tl.store(y_ptr + at, of_rows.to(y_ptr.dtype.element_ty), mask=here[None, :, None] & there)
