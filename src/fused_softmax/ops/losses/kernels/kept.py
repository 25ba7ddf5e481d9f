"""The columns over which a row of logits is normalised, if it is not over all: those of a list, or of a bitmask.

Lists and bitmasks name columns of the whole row. A shard has consecutive columns of it, and counts its own from 0.
"""

import triton
import triton.language as tl

from fused_softmax.ops.losses.kernels.spec import Listed

ELSEWHERE = tl.constexpr(-2)  # a column of another shard


@triton.jit
def list_of(ids_ptr, offsets_ptr, row, n_kept, origin, n_classes, K: tl.constexpr):
    """The Listed of a row. row: counted from the first offset."""
    if not K.shard:  # a NamedTuple with None cannot be returned
        origin = 0
        n_classes = 0
    begin = tl.load(offsets_ptr + row).to(tl.int64)
    end = tl.load(offsets_ptr + row + 1).to(tl.int64)
    right = (begin >= 0) & (begin <= end) & (end <= n_kept) & ((begin == 0) | (row > 0))
    return Listed(ids_ptr, tl.where(right, begin, 0), tl.where(right, end - begin, 1), right, origin, n_classes)


@triton.jit
def falls_at(offsets_ptr, row):
    """Whether the offset after `row` is less than its own: rows before and after may then share places of the list."""
    return tl.load(offsets_ptr + row + 1) < tl.load(offsets_ptr + row)


@triton.jit
def ids_at(L, i):
    """The ids at places i of a list, int32.

    -1 past the end of the list, in a list that cannot be read, and for an int64 that is no id.
    """
    c = tl.load(L.ids_ptr + L.first + i, mask=(i < L.size) & L.right, other=-1)
    if c.dtype == tl.int64:
        c = tl.where(c >> 31 == 0, c, -1).to(tl.int32)
    return c


@triton.jit
def columns_at(L, i, n_cols, K: tl.constexpr):
    """`ids_at` as columns of these logits. In a shard, columns of others are ELSEWHERE, and what is no column is -1."""
    c = ids_at(L, i)
    if K.shard:
        own = (c >= L.origin) & (c < L.origin + n_cols)
        c = tl.where(own, c - L.origin, tl.where((c >= 0) & (c < L.n_classes), ELSEWHERE, -1))
    return c


@triton.jit
def among(L, t, n_classes, K: tl.constexpr):
    """(which of the targets [1, K.targets] are in a list, whether the list has an id that is no column)."""
    i = tl.arange(0, K.list_cols)[:, None]
    t_32 = tl.where(t >> 31 == 0, t, -2).to(tl.int32)
    found = tl.zeros(t.shape, tl.int32)
    spoilt = tl.zeros([1, 1], tl.int32)
    for at in range(0, L.size, K.list_cols):
        c = ids_at(L, at + i)
        found |= tl.max((c == t_32).to(tl.int32), axis=0)[None, :]
        none = (at + i < L.size) & ((c < 0) | (c >= n_classes))
        spoilt |= tl.max(none.to(tl.int32), axis=0)[None, :]
    return found > 0, spoilt > 0


@triton.jit
def bits_from(bits_ptr, cols, on):
    """The byte of a bitmask that has column `cols`, shifted so that this column is the lowest bit; 0 where not `on`."""
    return tl.load(bits_ptr + cols // 8, mask=on, other=0).to(tl.int32) >> (cols % 8).to(tl.int32)


@triton.jit
def bit_of(M, cols, on, K: tl.constexpr):
    """Whether a bitmask has columns of these logits; False where not `on`."""
    if K.shard:
        cols += M.origin
    return bits_from(M.ptr, cols, on) & 1 == 1


@triton.jit
def bits_on(M, first, end, K: tl.constexpr):
    """The bits of up to 8 columns from each `first` on; 0 from column `end` on.

    One access loads the bits of all 8, where they share a byte.
    """
    cols, last = first, end
    if K.shard:
        cols, last = first + M.origin, end + M.origin
    bits = bits_from(M.ptr, cols, cols < last)
    if K.shifted | K.crosses:  # the 8 bits may lie in two bytes
        after = cols // 8 * 8 + 8
        bits |= bits_from(M.ptr, after, after < last) << (after - cols).to(tl.int32)
    return bits


@triton.jit
def bits_of_tile(M, start, n_cols, K: tl.constexpr):
    """Which of a tile's columns, from `start` on, the bitmasks of rows [n, 1] have. An access loads up to 8 bits."""
    WIDTH: tl.constexpr = K.bits_at_once
    first = start + tl.arange(0, K.block_cols // K.bits_at_once)[None, :] * WIDTH
    bits = bits_on(M, first, n_cols, K)
    on = (bits[:, :, None] >> tl.arange(0, WIDTH)[None, None, :]) & 1
    return tl.reshape(on, [K.block_rows, K.block_cols]) == 1
