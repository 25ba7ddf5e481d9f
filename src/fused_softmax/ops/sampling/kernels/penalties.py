"""Penalties of repetition: rows of logits are read once and written once, and nothing is allocated beside them.

    y = x r where x < 0, x / r elsewhere, less frequency * count and presence, in the columns among a row's ids

The first launch copies the logits, a block a program. In place there is no such launch. In the second launch a program
has a part of a row, and visits only the columns among the row's ids. It counts them in the memory where their results
will stand, which no other program reads or writes. Only so many rows take both launches at a time that L2 still has
what the first launch wrote. If several ids name one column, the one that was counted first writes the result.
Traffic of a row of N columns: N are read and N are written, and each part reads the ids three times. For each id, L2
takes a zero, an addition, a count, a logit and a result. In place, the N columns are neither read nor written. A part
then reads the ids once more, and holds the logits of its columns until these are counted.

There may be more ids than a lane can mark as first, or more than it can hold logits of (K.by_block). Then one launch
does it all: a program holds each block that has ids, and counts in the block's own memory, with a zero and a count for
every column. Counts are integers, so a row has the same bits in any batch.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.exchange import let_next_begin, wait_for_launch_before
from fused_softmax.core.kernels.state import NEG_INF, widen
from fused_softmax.ops.sampling.kernels.common import INF, number_at, row_of


@triton.jit(
    do_not_specialize=["ids_row_stride", "ids_col_stride", "n_rows", "n_draws", "part_cols", "first_draw", "length"]
)  # fmt: skip
def _penalize(
    out_ptr, logits_ptr, ids_ptr, bias_ptr, bitmask_ptr, rows_ptr, repetition_ptr, presence_ptr, frequency_ptr,
    out_row_stride, logits_row_stride, bias_row_stride, bitmask_row_stride, repetition_stride, presence_stride,
    frequency_stride, ids_row_stride, ids_col_stride, n_rows, n_cols, n_draws, part_cols, first_draw, length,
    repetition, presence, frequency, K: tl.constexpr,
):  # fmt: skip
    """A program writes blocks of a draw's row, with any bias and bitmask (K.streams), or the columns among its ids."""
    if K.streams:
        part_cols = K.block
    n_parts = tl.cdiv(n_cols, part_cols)
    draw = (first_draw + tl.program_id(0) // n_parts).to(tl.int64)
    start = tl.program_id(0) % n_parts * part_cols
    n = tl.minimum(n_cols - start, part_cols)
    if draw >= n_draws:
        return
    row, there = row_of(rows_ptr, draw, n_rows)
    r = number_at(repetition_ptr, repetition_stride, repetition, draw)
    once = number_at(presence_ptr, presence_stride, presence, draw)
    each = number_at(frequency_ptr, frequency_stride, frequency, draw)
    good = there & (r > 0) & (r < INF) & (tl.abs(once) < INF) & (tl.abs(each) < INF)
    logits_ptr += row * logits_row_stride + start
    out_ptr += draw * out_row_stride + start
    ids_ptr += draw * ids_row_stride
    if K.biased:
        bias_ptr += draw * bias_row_stride + start
    if K.bitmasked:
        bitmask_ptr += draw * bitmask_row_stride + start // 8
    let_next_begin(K.leads)
    wait_for_launch_before(K.follows)
    if K.streams | (not good) & K.in_place:  # in place no other launch writes NaN for a draw that is not good
        whole = n // K.block * K.block
        for at in range(0, whole, K.block):
            write_block(
                out_ptr, logits_ptr, ids_ptr, bias_ptr, bitmask_ptr, ids_col_stride, length, start, at, K.block, r,
                once, each, good, K, True,
            )  # fmt: skip
        if whole < n:
            write_block(
                out_ptr, logits_ptr, ids_ptr, bias_ptr, bitmask_ptr, ids_col_stride, length, start, whole, n - whole,
                r, once, each, good, K, False,
            )  # fmt: skip
    if good & (not K.streams):
        write_penalized(
            out_ptr, logits_ptr, ids_ptr, bias_ptr, bitmask_ptr, ids_col_stride, length, start, n, r, once, each, K
        )


@triton.jit
def write_block(
    out_ptr, logits_ptr, ids_ptr, bias_ptr, bitmask_ptr, ids_col_stride, length, start, at, n, r, once, each, good,
    K: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Write n columns from `start` + `at` on; penalize them if K.by_block.

    WHOLE: whether the row goes on to the end of the block, so that nothing is masked.
    """
    first = tl.arange(0, K.block // 8) * 8
    cols = first[:, None] + tl.arange(0, 8)[None, :]
    if WHOLE:
        on, on_byte = None, None
    elif K.whole_groups:  # a bound in whole groups allows accesses of 16 bytes
        on_byte = (first < n)[:, None]
        on = on_byte & (tl.arange(0, 8) >= 0)[None, :]
    else:
        on_byte, on = (first < n)[:, None], cols < n
    found = good
    if good & K.by_block:
        found = any_within(ids_ptr, ids_col_stride, length, start + at, n, K)
    if (not K.in_place) | found | (not good):
        x = logits_at(logits_ptr, bias_ptr, bitmask_ptr, at + cols, at // 8 + first[:, None] // 8, on, on_byte, K)
        if found & K.by_block:
            counts = tl.zeros_like(cols)
            for begin in range(0, length, K.counted):
                counts += counts_of(out_ptr + at, cols, on, ids_ptr, ids_col_stride, begin, length, start + at, n, K)
            x = penalized(x, counts, r, once, each)
        tl.store(out_ptr + at + cols, tl.where(good, x, float("nan")), mask=on)


@triton.jit
def logits_at(logits_ptr, bias_ptr, bitmask_ptr, cols, byte, on, on_byte, K: tl.constexpr):
    """Logits with their bias and bitmask. byte: where a column's bit is. on, on_byte: which columns and bytes exist."""
    x = widen(tl.load(logits_ptr + cols, mask=on), tl.float32, K.ptx)
    if K.biased:
        x += tl.load(bias_ptr + cols, mask=on).to(tl.float32)
    if K.bitmasked:
        bits = tl.load(bitmask_ptr + byte, mask=on_byte).to(tl.int32)
        x = tl.where((bits >> cols % 8) & 1 == 1, x, NEG_INF)
    return x


@triton.jit
def write_penalized(
    out_ptr, logits_ptr, ids_ptr, bias_ptr, bitmask_ptr, ids_col_stride, length, start, n, r, once, each,
    K: tl.constexpr,
):  # fmt: skip
    """Write the results of the columns among a row's ids, of the n columns from `start` on."""
    T: tl.constexpr = K.tile
    BITS: tl.constexpr = 16 if K.packed else 32
    HELD: tl.constexpr = 64 // BITS  # logits that 64 bits hold
    counter_ptr = counters_at(out_ptr, K)
    n_tiles = tl.cdiv(length, T)
    held = tl.zeros([T], tl.int64)  # in place, the logits of the first HELD tiles, as bits
    more = tl.zeros([T], tl.int64)  # those of the next HELD tiles
    if K.in_place:
        for tile in range(n_tiles):
            col, within = ids_at(ids_ptr, ids_col_stride, tile * T, length, start, n, K)
            bits = tl.load(counter_ptr + col, mask=within, other=0).to(tl.int64) << tile % HELD * BITS
            held |= tl.where(tile < HELD, bits, 0)
            more |= tl.where(tile < HELD, 0, bits)
    tl.debug_barrier()  # in place, all threads have read the logits that counters overwrite
    for tile in range(n_tiles):
        col, within = ids_at(ids_ptr, ids_col_stride, tile * T, length, start, n, K)
        tl.store(counter_ptr + col, tl.zeros([T], counter_ptr.dtype.element_ty), mask=within)
    tl.debug_barrier()
    firsts = tl.zeros([T], tl.int64)  # a bit for each tile: whether the lane's id was counted first in its column
    for tile in range(n_tiles):
        col, within = ids_at(ids_ptr, ids_col_stride, tile * T, length, start, n, K)
        before = count(counter_ptr + col, within, K)
        firsts |= (within & (before == 0)).to(tl.int64) << tile
    tl.debug_barrier()
    for tile in range(n_tiles):
        col, _ = ids_at(ids_ptr, ids_col_stride, tile * T, length, start, n, K)
        first = (firsts >> tile) & 1 == 1
        counts = tl.load(counter_ptr + col, mask=first, other=0, cache_modifier=".cg")  # from L2, where atomics add
        if K.in_place:
            bits = tl.where(tile < HELD, held, more) >> tile % HELD * BITS
            x = bits.to(counter_ptr.dtype.element_ty).to(out_ptr.dtype.element_ty, bitcast=True).to(tl.float32)
        else:
            x = logits_at(logits_ptr, bias_ptr, bitmask_ptr, col, col // 8, first, first, K)
        tl.store(out_ptr + col, penalized(x, counts, r, once, each), mask=first)


@triton.jit
def penalized(x, counts, r, once, each):
    """The logits, penalized where their count is more than 0. An infinite logit stays what it is."""
    scaled = tl.where(x < 0, x * r, tl.div_rn(x, r + tl.zeros_like(x)))
    y = tl.where(tl.abs(x) < INF, scaled, x)
    # The fma rounds the product, as torch does. A product that is fused into the subtraction is not rounded.
    y = y - tl.fma(tl.zeros_like(x) + each, counts.to(tl.float32), 0.0) - once
    return tl.where(counts > 0, y, x)


@triton.jit
def any_within(ids_ptr, ids_col_stride, length, start, n, K: tl.constexpr):
    """Whether any of a row's ids is among the n columns from `start` on."""
    T: tl.constexpr = K.tile
    found = tl.zeros([T], tl.int32)
    for at in range(0, length, T):
        _, within = ids_at(ids_ptr, ids_col_stride, at, length, start, n, K)
        found |= within.to(tl.int32)
    return tl.max(found, axis=0) > 0


@triton.jit
def ids_at(ids_ptr, ids_col_stride, at, length, start, n, K: tl.constexpr):
    """(a tile of ids, counted from column `start`; which of them are among the n columns from there on)."""
    i = at + tl.arange(0, K.tile)
    ids = tl.load(ids_ptr + i.to(tl.int64) * ids_col_stride, mask=i < length, other=-1)
    within = (ids >= start) & (ids < start + n)
    return tl.where(within, ids.to(tl.int32) - start, 0), within


@triton.jit
def counts_of(out_ptr, cols, on, ids_ptr, ids_col_stride, begin, length, start, n, K: tl.constexpr):
    """How often each column of a block stands among K.counted ids from `begin` on.

    The counters are in the memory of the results.
    """
    T: tl.constexpr = K.tile
    counter_ptr = counters_at(out_ptr, K)
    end = tl.minimum(begin + K.counted, length)
    tl.debug_barrier()  # all threads have read the logits, which counters may overwrite
    tl.store(counter_ptr + cols, tl.zeros_like(cols).to(counter_ptr.dtype.element_ty), mask=on)
    tl.debug_barrier()
    for at in range(begin, end, T):
        col, within = ids_at(ids_ptr, ids_col_stride, at, end, start, n, K)
        count(counter_ptr + col, within, K)
    tl.debug_barrier()
    counts = tl.load(counter_ptr + cols, mask=on, cache_modifier=".cg").to(tl.int32)
    tl.debug_barrier()  # all threads have read the counts
    return counts


@triton.jit
def counters_at(out_ptr, K: tl.constexpr):
    """The memory of the results as counters, which have as many bits as a result."""
    return out_ptr.to(tl.pointer_type(tl.uint16 if K.packed else tl.uint32), bitcast=True)


@triton.jit
def count(counter_ptr, within, K: tl.constexpr):
    """Add 1 to each counter. Returns what they were before."""
    if K.packed:
        # Atomics add to 32 bits at least: to the word that the counter is one half of. The other half may belong to
        # another program, or lie outside the tensor. It keeps its value: 0 is added to it, and no counter overflows.
        address = counter_ptr.to(tl.int64)
        shift = (address & 2).to(tl.int32) * 8
        word_ptr = (address - (address & 2)).to(tl.pointer_type(tl.int32))
        words = tl.atomic_add(word_ptr, tl.full(within.shape, 1, tl.int32) << shift, mask=within, sem="relaxed")
        return (words >> shift) & 0xFFFF
    else:
        return tl.atomic_add(counter_ptr, 1, mask=within, sem="relaxed")
