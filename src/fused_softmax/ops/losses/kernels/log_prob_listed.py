"""The gradient of log-probabilities of rows that are normalised over a list of classes, in two launches.

The first launch reads only the logits of listed columns. It writes their gradients to a buffer, in the order of the
list. The second launch fills a part of a row with 0, and then copies the gradients of the part's listed columns from
the buffer, while the part is in L2. The buffer has the gradients of targets too, so the second launch needs no targets.
The gradient may overwrite the logits, because the first launch has read all that are needed before the second one
writes.
If an offset is less than the one before it, lists overlap, and several rows may write the same places of the buffer.
The first launch then sets one number, which the programs of all rows read, to NaN. The second launch adds this number,
otherwise 0, to every gradient from the buffer.
fill: first that number, then what each row is filled with, 0 or NaN.
Traffic of rows of N columns, of which k are listed: k sectors are read, k elements are written and read, and N elements
are written. Each part reads the list from L2.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.rows import body_of, edges_of, tile_part_of, whole_vectors
from fused_softmax.core.kernels.spec import Rows
from fused_softmax.ops.losses.kernels.common import logits_of, numbers_of, slope_of
from fused_softmax.ops.losses.kernels.kept import columns_at, falls_at, list_of
from fused_softmax.ops.losses.kernels.log_prob import slope_by_entropy, targets_of, tempered, upstream_of


@triton.jit(
    do_not_specialize=[
        "n_programs_of_row", "n_cols", "n_targets", "ignore_index", "origin", "n_classes", "n_kept", "first_row",
    ]
)  # fmt: skip
def _listed_gradient(
    x_ptr, values_ptr, fill_ptr, target_ptr, temperature_ptr, numbers_ptr, ids_ptr, offsets_ptr, m_ptr, ls_ptr,
    entropy_ptr, dlog_prob_ptr, dentropy_ptr, dlse_ptr, x_row_stride, n_programs_of_row, n_cols, n_targets,
    ignore_index, origin, n_classes, factor, cap, n_kept, first_row, K: tl.constexpr,
):  # fmt: skip
    """The gradients of a row's listed columns, and the fill of all its other columns: 0, or NaN if the list is wrong.

    The n_programs_of_row programs of a row take the tiles of its list in turn.
    """
    T_COLS: tl.constexpr = K.list_cols
    first = tl.program_id(0) % n_programs_of_row * K.list_cols
    row = (tl.program_id(0) // n_programs_of_row).to(tl.int64)
    L = list_of(ids_ptr, offsets_ptr, first_row + row, n_kept, origin, n_classes, K)
    if (first == 0) | (first < L.size):
        one = row + tl.zeros([1, 1], tl.int64)
        N = tempered(numbers_of(numbers_ptr, factor, cap, 0.0, 0.0, K), temperature_ptr, one)
        T = targets_of(target_ptr, one, n_targets, n_cols, ignore_index, origin, n_classes, L, K)
        U = upstream_of(T, m_ptr, ls_ptr, entropy_ptr, dlog_prob_ptr, dentropy_ptr, dlse_ptr, one, K)
        if first == 0:
            fill = tl.where(T.spoilt & U.counts, float("nan"), 0.0)
            tl.store(fill_ptr + 1 + one, fill)
            if falls_at(offsets_ptr, first_row + row):
                tl.store(fill_ptr, float("nan"))
        for at in range(first, L.size, n_programs_of_row * K.list_cols):
            i = at + tl.arange(0, T_COLS)[:, None]
            c = columns_at(L, i, n_cols, K)
            own = (c >= 0) & (c < n_cols)
            z = logits_of(tl.load(x_ptr + row * x_row_stride + c, mask=own, other=0.0), N, K)
            of_targets = tl.sum(tl.where((c == T.t.to(tl.int32)) & T.kept, U.g, 0.0), axis=1)[:, None]
            dx = (slope_by_entropy(z, U, N, K) + of_targets) * slope_of(z, N, K)
            tl.store(values_ptr + L.first + i, tl.where(U.counts, dx, 0.0).to(K.cast_dtype), mask=own)


@triton.jit(
    do_not_specialize=[
        "n_rows", "n_cols", "n_parts", "part_cols", "misalignment", "origin", "n_classes", "n_kept", "first_row",
    ]
)  # fmt: skip
def _write_listed(
    dx_ptr, values_ptr, fill_ptr, ids_ptr, offsets_ptr, dx_row_stride, n_rows, n_cols, n_parts, part_cols,
    misalignment, origin, n_classes, n_kept, first_row, K: tl.constexpr,
):  # fmt: skip
    """One part of a row: the row's fill everywhere, and then the first launch's gradients at the listed columns."""
    T_COLS: tl.constexpr = K.list_cols
    dx_rows = Rows(dx_ptr, dx_row_stride, misalignment)
    part_cols = whole_vectors(part_cols, K)
    r = tile_part_of(dx_rows, n_rows, n_cols, n_parts, part_cols, K)
    end = tl.minimum(r.body, r.start + part_cols)
    row = (tl.program_id(0) // n_parts).to(tl.int64)
    L = list_of(ids_ptr, offsets_ptr, first_row + row, n_kept, origin, n_classes, K)
    fill = tl.load(fill_ptr + 1 + row).to(K.cast_dtype)
    shared = tl.load(fill_ptr).to(K.cast_dtype)
    dx_body = body_of(dx_rows, r.row, K)
    for at in range(r.start, tl.minimum(r.start + r.size, n_cols), K.block_cols):
        tl.store(dx_body + (at + r.cols), fill, mask=r.cols < end - at, cache_modifier=".cg")
    if K.shifted:
        cols, on = edges_of(r, n_cols, n_parts, K)
        tl.store(dx_ptr + r.row * dx_row_stride + cols, fill, mask=on)
    tl.debug_barrier()  # listed columns are written after the fill
    for at in range(0, L.size, K.list_cols):
        i = at + tl.arange(0, T_COLS)[:, None]
        c = columns_at(L, i, n_cols, K)
        at_c = c - r.head
        own = (at_c >= r.start.to(tl.int32)) & (at_c < end.to(tl.int32))
        if K.shifted:
            own |= (at_c < 0) & (r.part == 0) | (at_c >= r.body) & (r.part == n_parts - 1)
        own &= (c >= 0) & (c < n_cols)
        dx = tl.load(values_ptr + L.first + i, mask=own, other=0.0) + shared
        tl.store(dx_ptr + r.row * dx_row_stride + c, dx, mask=own)
