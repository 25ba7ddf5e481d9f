"""Which tiles of scores a mask hides as a whole: only the mask of these is read.

A word has a bit for each of 64 tiles, or runs of tiles. The bit is set if some query sees some key. A loop goes over
the bits that are set, so it loads ahead as a loop over all tiles does. With a branch in it, a loop would not load
ahead.
Traffic: if one of the first ROWS queries of a tile sees a key, their part of the mask; if not, the mask once more.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.state import NEG_INF
from fused_softmax.ops.attention.kernels.spec import ADDED_MASK

_ADDED = tl.constexpr(ADDED_MASK)
_BITS = tl.constexpr(64)
_ROWS = tl.constexpr(8)  # queries of a tile that are looked at together
BITS = _BITS


@triton.jit
def keys_to_visit(first, begin, end, place, A, S, K: tl.constexpr):
    """(word, tiles of a bit, tiles of all bits that are set) of keys, for block_m queries from `first` on."""
    n, run, lanes = tiles_and_run(begin, end, K.block_n)
    word = tl.full([], 0, tl.int64)
    for i in tl.range(0, run):
        cols = begin + (lanes * run + i) * K.block_n
        inside = (cols < end) & (((word >> lanes.to(tl.int64)) & 1) == 0)
        word = word | tiles_seen(first + tl.zeros_like(cols), cols, inside, place, A, S, K)
    return word, run, visited(word, n, run)


@triton.jit
def queries_to_visit(begin, end, first, place, A, S, K: tl.constexpr):
    """`keys_to_visit` with queries in place of keys, for block_n keys from `first` on."""
    n, run, lanes = tiles_and_run(begin, end, K.block_m)
    word = tl.full([], 0, tl.int64)
    for i in tl.range(0, run):
        rows = begin + (lanes * run + i) * K.block_m
        inside = (rows < end) & (((word >> lanes.to(tl.int64)) & 1) == 0)
        word = word | tiles_seen(rows, first + tl.zeros_like(rows), inside, place, A, S, K)
    return word, run, visited(word, n, run)


@triton.jit
def tiles_and_run(begin, end, BLOCK: tl.constexpr):
    """(tiles from begin to end, how many of them a bit stands for, the numbers of the bits)"""
    n = tl.cdiv(tl.maximum(end - begin, 0), BLOCK)
    return n, tl.cdiv(n, _BITS), tl.arange(0, _BITS)


@triton.jit
def visited(word, n, run):
    """How many of n tiles have their bit set; the last run may be shorter."""
    runs = tl.cdiv(n, tl.maximum(run, 1))
    last = (word >> tl.maximum(runs - 1, 0).to(tl.int64)) & 1
    return bits_of(word) * run - last.to(tl.int32) * (runs * run - n)


@triton.jit
def bits_of(word):
    """How many bits are set."""
    return tl.sum((word >> tl.arange(0, _BITS).to(tl.int64)) & 1, axis=0).to(tl.int32)


@triton.jit
def tiles_seen(rows, cols, inside, place, A, S, K: tl.constexpr):
    """The word of tiles whose first queries and keys are rows and cols, [64]. inside: which of them are looked at.

    place: the batch and head of all tiles, or of each. With K.block_r, queries are of several heads, between which the
    mask does not differ. Keys of a mask lie side by side. Either K.mask_vector of them are one element of 64 bits, or
    each key is an element.
    """
    BLOCK_M: tl.constexpr = K.block_m
    EACH: tl.constexpr = K.mask_vector  # keys of an element that is loaded
    WIDTH: tl.constexpr = K.block_n // EACH
    ptr = A.mask_ptr
    if EACH > 1:
        ptr = ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    strides = A.mask_strides
    of_head = 0 if K.block_r else place.head.to(tl.int64)
    first = place.outer * strides[0] + place.inner * strides[1] + of_head * strides[2] + cols.to(tl.int64)
    at = ptr + ((first // EACH)[:, None] + tl.arange(0, WIDTH)[None, :])
    there = inside[:, None]
    if K.ragged:
        there = there & (cols[:, None] + tl.arange(0, WIDTH)[None, :] * EACH < S.n_keys)
    if K.mask_rows:
        every, word, row = word_of(inside), tl.full([], 0, tl.int64), 0
        while (row < BLOCK_M) & (word != every):
            seen = tl.zeros([_BITS, WIDTH], ptr.dtype.element_ty)
            for i in tl.static_range(_ROWS):
                query = tl.minimum(rows + (row + i), S.n_queries - 1).to(tl.int64)
                seen = seen | tl.load(at + (query * (strides[3] // EACH))[:, None], mask=there, other=0)
            word = word | word_of(tl.max((seen != 0).to(tl.int32), axis=1))
            row += _ROWS
    elif K.mask == _ADDED:
        seen = tl.load(at, mask=there, other=NEG_INF).to(tl.float32) != NEG_INF
        word = word_of(tl.max(seen.to(tl.int32), axis=1))
    else:
        word = word_of(tl.max((tl.load(at, mask=there, other=0) != 0).to(tl.int32), axis=1))
    return word


@triton.jit
def word_of(bits):
    return tl.sum(bits.to(tl.int64) << tl.arange(0, _BITS).to(tl.int64), axis=0)


@triton.jit
def next_tile(word, i, run):
    """(number of the i-th tile to visit, the word for the next one).

    The tile is in the run of the lowest bit that is set. As a double, this bit has its number as exponent.
    """
    lowest = word & -word
    bit = ((lowest.to(tl.float64).to(tl.int64, bitcast=True) >> 52) & 2047) - 1023
    at = i % run
    return bit.to(tl.int32) * run + at, tl.where(at == run - 1, word ^ lowest, word)
