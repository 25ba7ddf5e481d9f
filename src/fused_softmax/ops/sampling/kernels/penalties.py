"""Penalties of repetition: rows of logits are read once and written once, and nothing is allocated beside them.

    y = x r where x < 0, x / r elsewhere, less frequency * count and presence, of the columns among a row's ids

A program has a slice of one row. It holds the slice's logits in registers, and meanwhile counts ids in the memory where
its results will stand: nobody else reads or writes there. Traffic of a slice of S columns: S read and S written, and
the row's ids from L2. Where ids are in the slice, S zeros and S counts go to L2 and back. In place, a slice without ids
is neither read nor written. Counts are integers, so a row has the same bits in any batch.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.state import NEG_INF, widen
from fused_softmax.ops.sampling.kernels.common import INF, number_at, row_of

MOST_PACKED = tl.constexpr(
    32768
)  # ids that are counted at a time where a count has 16 bits: no neighbour is carried to


@triton.jit(do_not_specialize=["ids_row_stride", "ids_col_stride", "n_rows", "n_slices", "length"])
def _penalize(
    out_ptr, logits_ptr, ids_ptr, bias_ptr, bitmask_ptr, rows_ptr, repetition_ptr, presence_ptr, frequency_ptr,
    out_row_stride, logits_row_stride, bias_row_stride, bitmask_row_stride, repetition_stride, presence_stride,
    frequency_stride, ids_row_stride, ids_col_stride, n_rows, n_cols, n_slices, length, repetition, presence,
    frequency, K: tl.constexpr,
):  # fmt: skip
    """A slice of a draw's row, with its bias and bitmask first, if there are any."""
    program = tl.program_id(0)
    draw = (program // n_slices).to(tl.int64)
    start = program % n_slices * K.slice
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
    n = tl.minimum(n_cols - start, K.slice)  # columns of this slice
    found = good
    if good:
        found = any_within(ids_ptr, ids_col_stride, length, start, n, K)
    if (not K.in_place) | found | (not good):
        if n == K.slice:
            penalize_slice(
                out_ptr, logits_ptr, ids_ptr, bias_ptr, bitmask_ptr, ids_col_stride, length, start, n, r, once, each,
                good, found, K, True,
            )  # fmt: skip
        else:
            penalize_slice(
                out_ptr, logits_ptr, ids_ptr, bias_ptr, bitmask_ptr, ids_col_stride, length, start, n, r, once, each,
                good, found, K, False,
            )  # fmt: skip


@triton.jit
def penalize_slice(
    out_ptr, logits_ptr, ids_ptr, bias_ptr, bitmask_ptr, ids_col_stride, length, start, n, r, once, each, good, found,
    K: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """WHOLE: whether the row goes on to the slice's end, so that nothing is masked."""
    G: tl.constexpr = K.slice // 8
    first = tl.arange(0, G) * 8
    cols = first[:, None] + tl.arange(0, 8)[None, :]
    if WHOLE:
        on = None
    elif K.whole_groups:  # a bound of whole groups leaves accesses of 16 bytes
        on = (first < n)[:, None] & (tl.arange(0, 8) >= 0)[None, :]
    else:
        on = cols < n
    x = widen(tl.load(logits_ptr + cols, mask=on), tl.float32, K.ptx)
    if K.biased:
        x += tl.load(bias_ptr + cols, mask=on).to(tl.float32)
    if K.bitmasked:
        if WHOLE:
            bits = tl.load(bitmask_ptr + first // 8).to(tl.int32)
        else:
            bits = tl.load(bitmask_ptr + first // 8, mask=first < n, other=0).to(tl.int32)
        x = tl.where((bits[:, None] >> tl.arange(0, 8)[None, :]) & 1 == 1, x, NEG_INF)
    if found:
        counts = counts_of(out_ptr, cols, on, ids_ptr, ids_col_stride, 0, length, start, n, K)
        if K.packed:
            for at in range(MOST_PACKED, length, MOST_PACKED):
                counts += counts_of(out_ptr, cols, on, ids_ptr, ids_col_stride, at, length, start, n, K)
        x = penalized(x, counts, r, once, each)
    x = tl.where(good, x, float("nan"))
    tl.store(out_ptr + cols, x, mask=on)


@triton.jit
def penalized(x, counts, r, once, each):
    """Logits with penalties where they are counted; an infinite one stays what it is."""
    scaled = tl.where(x < 0, x * r, tl.div_rn(x, r + tl.zeros_like(x)))
    y = tl.where(tl.abs(x) < INF, scaled, x)
    # 0.0: a product that is folded into the subtraction would not be rounded as torch's is.
    y = y - tl.fma(tl.zeros_like(x) + each, counts.to(tl.float32), 0.0) - once
    return tl.where(counts > 0, y, x)


@triton.jit
def any_within(ids_ptr, ids_col_stride, length, start, n, K: tl.constexpr):
    """Whether any of a row's ids is in a slice."""
    T: tl.constexpr = K.tile
    found = tl.zeros([T], tl.int32)
    for at in range(0, length, T):
        _, within = ids_at(ids_ptr, ids_col_stride, at, length, start, n, K)
        found |= within.to(tl.int32)
    return tl.max(found, axis=0) > 0


@triton.jit
def ids_at(ids_ptr, ids_col_stride, at, length, start, n, K: tl.constexpr):
    """(the columns within the slice of a tile of ids, which of them are within it)."""
    i = at + tl.arange(0, K.tile)
    ids = tl.load(ids_ptr + i.to(tl.int64) * ids_col_stride, mask=i < length, other=-1)
    within = (ids >= start) & (ids < start + n)
    return tl.where(within, ids.to(tl.int32) - start, 0), within


@triton.jit
def counts_of(out_ptr, cols, on, ids_ptr, ids_col_stride, begin, length, start, n, K: tl.constexpr):
    """How often each column of a slice stands among ids from `begin` on, counted where the results will stand."""
    T: tl.constexpr = K.tile
    if K.packed:
        end = tl.minimum(begin + MOST_PACKED, length)
        counter_ptr = out_ptr.to(tl.pointer_type(tl.uint16), bitcast=True)
    else:
        end = length
        counter_ptr = out_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.debug_barrier()  # all have read the logits, which may stand there
    tl.store(counter_ptr + cols, tl.zeros_like(cols).to(counter_ptr.dtype.element_ty), mask=on)
    tl.debug_barrier()
    for at in range(begin, end, T):
        col, within = ids_at(ids_ptr, ids_col_stride, at, end, start, n, K)
        if K.packed:
            # No atomic addition has 16 bits: it is of the 32 around them, and leaves the other half as it is.
            address = (counter_ptr + col).to(tl.int64)
            half = address & 2
            word_ptr = (address - half).to(tl.pointer_type(tl.int32))
            tl.atomic_add(word_ptr, tl.full([T], 1, tl.int32) << (half.to(tl.int32) * 8), mask=within, sem="relaxed")
        else:
            tl.atomic_add(counter_ptr + col, 1, mask=within, sem="relaxed")
    tl.debug_barrier()
    counts = tl.load(counter_ptr + cols, mask=on, cache_modifier=".cg").to(tl.int32)  # L2 has what was added
    tl.debug_barrier()  # all have read the counts
    return counts
