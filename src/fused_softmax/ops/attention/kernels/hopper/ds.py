"""What follows from dS where the kernel of dK and dV stores it: dQ, and the gradient of a bias that batches share.

dQ = scale dS K for each batch, and the bias's gradient is the sum of dS over batches. A program has some queries of a
head and all keys, and goes through batches, so both take one read.
Traffic: dS once, keys once for each block_m queries, dQ once, and a part of the sum for each program.
"""

import triton
import triton.language as tl

from fused_softmax.ops.attention.kernels.scores import load_tile, store_tile
from fused_softmax.ops.attention.kernels.spec import Head


@triton.jit(
    do_not_specialize=[
        "n_batches",
        "all_heads",
        "first_head",
        "n_heads",
        "group",
        "n_queries",
        "n_keys",
        "octets",
        "steps",
    ]
)
def _product_and_sum(
    ds_ptr, k_ptr, dq_ptr, sums_ptr, k_strides, n_batches, all_heads, first_head, n_heads, group, n_queries, n_keys,
    octets, steps, scale, K: tl.constexpr,
):  # fmt: skip
    """dQ, and sums of dS [parts, n_heads, queries, keys], for n_heads heads from first_head on.

    ds_ptr: [batches, n_heads, queries, 8 octets]; columns beyond the keys may be anything. k_strides: of batch, head
    and key. steps: batches of a part.
    """
    BLOCK_M: tl.constexpr = K.block_m
    BLOCK_N: tl.constexpr = K.block_n
    BLOCK_D: tl.constexpr = K.block_d
    PIECES: tl.constexpr = K.pieces
    n_tiles = tl.cdiv(n_queries, BLOCK_M)
    program = tl.program_id(0)
    of_head, tile = program // n_tiles, program % n_tiles
    part, head = of_head // n_heads, of_head % n_heads
    first = tile * BLOCK_M
    rows, cols = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
    there, width = first + rows < n_queries, octets * 8
    whole_head = first_head + head
    key_head = (whole_head // group).to(tl.int64)
    sums = ()
    for _ in tl.static_range(PIECES):
        sums = sums + (tl.zeros([BLOCK_M, BLOCK_N], tl.float32),)  # noqa: RUF005  the compiler has no unpacking
    for batch in tl.range(part * steps, tl.minimum((part + 1) * steps, n_batches)):
        number = tl.cast(batch, tl.int64)
        at = ds_ptr + ((number * n_heads + head) * n_queries + first) * width
        k_head = Head(k_ptr + number * k_strides[0] + key_head * k_strides[1], k_strides[2])
        dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        added = ()
        for piece in tl.static_range(PIECES):
            ds, k = piece_of(
                at, k_head, piece * BLOCK_N, rows, there, width, n_keys, K, K.ragged and piece + 1 == PIECES
            )
            added = added + (sums[piece] + ds.to(tl.float32),)  # noqa: RUF005
            dq = tl.dot(ds, k, dq, input_precision="ieee")
        sums = added
        row = (number * all_heads + whole_head) * n_queries
        store_tile(dq_ptr + row * K.head_dim, dq * scale, first, n_queries, BLOCK_M, K.head_dim, BLOCK_D)
    row = of_head.to(tl.int64) * n_queries + first
    for piece in tl.static_range(PIECES):
        col = piece * BLOCK_N + cols
        tl.store(sums_ptr + row * n_keys + (rows * n_keys + col), sums[piece], mask=there & (col < n_keys))


@triton.jit
def piece_of(ds_ptr, k_head, start, rows, there, width, n_keys, K: tl.constexpr, RAGGED: tl.constexpr):
    """dS of rows of a head, and the keys, from the key `start` on; 0 beyond the last."""
    cols = start + tl.arange(0, K.block_n)[None, :]
    at = ds_ptr + (rows * width + cols)
    if RAGGED:  # vectors are loaded up to the end of the rows in memory
        ds = tl.where(cols < n_keys, tl.load(at, mask=there & (cols < width), other=0.0), 0.0)
    else:
        ds = tl.load(at, mask=there, other=0.0)
    return ds, load_tile(k_head, start, n_keys, K.block_n, K.head_dim, K.block_d, RAGGED)
