"""The losses of rows whose classes lie on several GPUs, and the gradient of this GPU's logits, in one pass.

A row's loss needs the logit of its target. The rank that has this logit tells it to all others. The gradient does not
need it.
Traffic of a shard of N columns: it is read once, and its gradient is written once (2MN); between GPUs 8 bytes a part,
and 8 a row.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.rows import part_of, prefetch_part, sum_of_row, whole_vectors
from fused_softmax.core.kernels.spec import Rows, RowScores
from fused_softmax.core.kernels.state import NEG_INF, hold_all, log_sum_of
from fused_softmax.ops.losses.kernels.common import (
    load_target_logit,
    numbers_of,
    per_row,
    per_row_counted,
    shares_of,
    store_losses,
    target_of,
)
from fused_softmax.ops.losses.kernels.held import load_part, max_of_part, store_part, store_zeros
from fused_softmax.ops.losses.kernels.spec import LossRow, Target
from fused_softmax.ranks.kernels import announce, bases_of, collect, state_of, sum_of_pairs, tell, turn_of


@triton.jit(do_not_specialize=[
    "x_row_stride", "dx_row_stride", "n_cols", "n_parts", "part_cols", "misalignment", "ahead", "rank", "ranks",
    "digest", "n_classes", "first", "ignore_index", "set_size",
])  # fmt: skip
def _peer_loss(
    slots_ptr, bases_ptr, asked_ptr, x_ptr, dx_ptr, target_ptr, totals_ptr, states_ptr, loss_ptr, result_ptr,
    ticket_ptr, x_row_stride, dx_row_stride, n_cols, n_parts, part_cols, misalignment, ahead,
    rank, ranks, digest, n_classes, first, ignore_index, set_size, factor, hidden, cap, K: tl.constexpr,
):  # fmt: skip
    """A program has a part of a row, and writes its gradient if K.gradient.

    first: this rank's first class among all n_classes. states_ptr: m and ls of rows [2, n_rows]; without loss_ptr also
    the targets' logits [3, n_rows].
    """
    L = LossRow(
        Rows(x_ptr, x_row_stride, misalignment), Rows(dx_ptr, dx_row_stride, misalignment),
        target_ptr, None, totals_ptr, None, None, None, None, loss_ptr, None, result_ptr, ticket_ptr,
        n_cols, n_parts, part_cols, ignore_index, factor, hidden, cap, 0.0, 0.0,
    )  # fmt: skip
    program = tl.program_id(0)
    row = (program // n_parts).to(tl.int64)
    part = program % n_parts
    n_rows = tl.num_programs(0) // n_parts
    n_slots = (n_parts + 1) * ranks
    bases = bases_of(bases_ptr, ranks, K)
    start, tag = turn_of(slots_ptr, row * n_slots + rank * n_parts + part, set_size, asked_ptr, rank, K)
    row_at = start + row * n_slots
    r = part_of(part, row, L.x, n_cols, part_cols, K)
    N = numbers_of(None, factor, cap, 0.0, 0.0, K)
    T = target_of(row, target_ptr, None, n_classes, ignore_index, K)
    t = T.t - first
    here = T.kept & (t >= 0) & (t < n_cols)
    # The part with the target's column tells the logit, and writes the loss and the gradient at that column. Columns
    # after the body belong to the last part, however short the body is.
    owner = tl.where(t < r.head + r.body, tl.maximum((t - r.head) // whole_vectors(part_cols, K), 0), n_parts - 1)
    heads = part == tl.where(here, owner, 0)
    z_t = load_target_logit(x_ptr + row * x_row_stride, Target(t, T.kept, T.wrong, T.w), here & heads, N, K)
    if K.counted:  # requested before the row, and counted after it
        j = tl.arange(0, K.counted)
        targets = tl.load(target_ptr + j, mask=j < n_rows, other=0).to(tl.int64)
    z, edge = load_part(r, L, N, K)
    m = max_of_part(z, edge, N, K)
    if K.inplace:  # m waits for z_t, so that z_t is loaded before the gradient overwrites it
        m = tl.maximum(m, tl.where(here & heads, z_t, NEG_INF))
    z = hold_all(z, K.ptx)
    s = sum_of_row(z, edge, m, RowScores(n_cols, N.factor, hidden, False), K)
    if K.publish:
        tell(m, s, z_t, heads, bases, row_at, part, n_parts, rank, ranks, digest, tag, K)
        if program == 0:
            announce(bases_ptr, asked_ptr, rank, ranks, digest, K)
    if K.prefetch:
        prefetch_part(L.x, n_cols, n_parts, part_cols, tl.num_programs(0), ahead, K)
    g = 1.0
    g_z = 1.0
    if K.counted:
        g, g_z = per_row_counted(targets, None, n_rows, n_classes, ignore_index, K)
    if K.collect:
        message = collect(slots_ptr + row_at, bases_ptr, asked_ptr, rank, ranks, n_slots, tag, K)
        m, s, logit = state_of(message, bases_ptr, asked_ptr, row, n_parts, rank, ranks, digest, tag, K)
        ls = log_sum_of(m, s, K.ptx)
        if heads:
            tl.store(states_ptr + row, m)
            tl.store(states_ptr + n_rows + row, ls)
            if loss_ptr is None:
                tl.store(states_ptr + 2 * n_rows + row, logit)
            else:
                store_losses(loss_ptr, None, row, part >= 0, m, ls, logit, 0.0, T, 0.0, 0.0, n_classes, N, K)
        if K.gradient:
            if not K.counted:
                g, g_z = per_row(totals_ptr, K)
            if K.finishes:  # noqa: SIM102  a constexpr, then a value
                if heads:
                    sum_alike(L, n_rows, g, K)
            D = shares_of(m + ls, T.w, 0.0, g, g_z, n_classes, N, K)
            a = tl.where(T.wrong, float("nan"), D.a) / s
            z = hold_all(z, K.ptx)
            if T.kept | T.wrong:
                own = Target(t, T.kept, T.wrong, T.w)
                store_part(L.dx, None, z, edge, m, z_t, a, D, own, here & heads, r, N, K)
            else:
                store_zeros(L.dx, n_cols, n_parts, r, K)


@triton.jit
def sum_alike(L, n_losses, g, K: tl.constexpr):
    """`sum_losses` with the same bits on all ranks.

    The ranks' kernels differ, because their shards lie differently, so the order of the sum is fixed.
    """
    if tl.atomic_add(L.ticket_ptr, 1, sem="acq_rel") == n_losses - 1:
        BLOCK: tl.constexpr = 1024
        total = tl.zeros([BLOCK], K.state_dtype)
        for at in range(0, n_losses, BLOCK):
            j = at + tl.arange(0, BLOCK)
            total += tl.load(L.loss_ptr + j, mask=j < n_losses, other=0.0, volatile=True)
        tl.store(L.result_ptr, sum_of_pairs(total) * g)
        tl.atomic_xchg(L.ticket_ptr, 0, sem="relaxed")
