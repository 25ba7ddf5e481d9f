"""Log-probabilities of chosen classes, the entropy and lse of each row, and the gradient of all three together.

log_prob_i = z_(t_i) - lse,  entropy = lse - sum_c p_c z_c,  z = softcap(x * scale) / temperature.
The gradient of z_c is sum_i g_i ([c = t_i] - p_c) - g_H p_c (log p_c + H) + g_lse p_c, where g_i, g_H and g_lse are
the incoming gradients of log_prob_i, of the entropy H and of lse.
Traffic: the forward pass reads the logits once (MN). The gradient reads them once and is written once (2MN). If a list
says over which columns a row is normalised, both passes read the logits of these columns alone, and the gradient is
written once (MN).
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.rows import body_of, tile_part_of, whole_vectors
from fused_softmax.core.kernels.spec import Rows
from fused_softmax.core.kernels.state import LN2, LOG2E, NEG_INF, log_sum_of, origin_of, rounding_of, scores_of
from fused_softmax.ops.losses.kernels.common import (
    entropy_of,
    exponent_at,
    load_edge_logits,
    load_logits,
    logit_of_target,
    numbers_of,
    power_of,
    slope_of,
)
from fused_softmax.ops.losses.kernels.kept import among, bit_of, bits_from, bits_of_tile, list_of
from fused_softmax.ops.losses.kernels.scan import merge_scanned, scan_logits, store_scanned
from fused_softmax.ops.losses.kernels.spec import Masked, Numbers, Scanned, Targets, Upstream


@triton.jit
def tempered(N, temperature_ptr, row):
    """Numbers of rows that have a temperature each: scale and softcap over it. NaN where it is not above 0."""
    if temperature_ptr is not None:
        t = tl.load(temperature_ptr + row)
        t = tl.where(t > 0.0, t, float("nan"))
        return Numbers(N.factor / t, N.cap / t, N.smoothing, N.lse_square_scale)
    else:
        return N


@triton.jit
def targets_of(target_ptr, row, n_targets, n_cols, ignore_index, origin, n_classes, kept, K: tl.constexpr):
    """The Targets of rows [n, 1].

    kept: the one row's Listed (K.listed), or the rows' Masked (K.masked); else it is not used.
    """
    if not K.shard:
        n_classes = n_cols
    i = tl.arange(0, K.targets)[None, :]
    t = tl.load(target_ptr + row * n_targets + i, mask=i < n_targets, other=ignore_index).to(tl.int64)
    counts = (i < n_targets) & (t != ignore_index)
    inside = (t >= 0) & (t < n_classes)
    found = inside
    spoilt = tl.zeros([1, 1], tl.int1)
    if K.listed:
        found, spoilt = among(kept, t, n_classes, K)
    if K.masked:
        found = bits_from(kept.ptr, t, counts & inside) & 1 == 1
    known = counts & inside
    at = row * n_targets + i
    if K.shard:
        t -= origin
    return Targets(at, t, known & found, counts & (inside == 0), i < n_targets, known & (found == 0), spoilt)


@triton.jit
def own_targets(T, n_cols, K: tl.constexpr):
    """Which kept targets are among these logits' columns: all of them, except in a shard."""
    return T.kept & (T.t >= 0) & (T.t < n_cols) if K.shard else T.kept


@triton.jit
def counts_of(T, K: tl.constexpr):
    """Whether any target of a row counts: [n, 1]."""
    if K.truncated:
        return any_of(T.kept | T.wrong | T.outside)
    else:
        return any_of(T.kept | T.wrong)


@triton.jit
def any_of(on):
    """Whether any of a row is True: [n, 1]."""
    return tl.max(on.to(tl.int32), axis=1)[:, None] > 0


@triton.jit
def store_log_probs(
    x_ptr, target_ptr, m_ptr, ls_ptr, log_prob_ptr, entropy_ptr, lse_ptr, log_sq_ptr, mean_ptr, top_ptr,
    x_row_stride, n_rows, n_cols, n_targets, ignore_index, origin, n_classes, row, S, N, kept, K: tl.constexpr,
):  # fmt: skip
    """Store the results of rows [n, 1] from their Scanned S. A row without a target that counts gets 0.

    In a shard, log-probabilities of classes that other shards have are +inf. In a shard of truncated rows the mean
    takes two numbers: the sum of the kept logits, and, stored after the sums of all rows, the number of kept columns.
    """
    T = targets_of(target_ptr, row, n_targets, n_cols, ignore_index, origin, n_classes, kept, K)
    own = own_targets(T, n_cols, K)
    z_t = logit_of_target(tl.load(x_ptr + row * x_row_stride + T.t, mask=own, other=0.0), N, K)
    ls = log_sum_of(S.m, S.s, K.ptx)
    log_prob = z_t - S.m - ls
    counts = counts_of(T, K)
    seen = counts
    n = n_cols.to(K.state_dtype)
    if K.truncated:  # s is 0 over no columns, or over logits of -inf alone: every probability is 0
        seen = tl.where(S.s != 0.0, counts, False)
        log_prob = tl.where(T.kept & seen, log_prob, tl.where(S.s == S.s, NEG_INF, float("nan")))
        log_prob = tl.where(T.wrong, float("nan"), tl.where(T.kept | T.outside, log_prob, 0.0))
        n = S.n
    else:
        log_prob = tl.where(T.kept, log_prob, tl.where(T.wrong, float("nan"), 0.0))
    if K.shard:
        log_prob = tl.where((T.t >= 0) & (T.t < n_cols), log_prob, float("inf"))
    tl.store(log_prob_ptr + T.at, log_prob, mask=T.there)
    if m_ptr is not None:
        tl.store(m_ptr + row, S.m)
        tl.store(ls_ptr + row, ls)
    if K.stats:
        tl.store(entropy_ptr + row, tl.where(seen, entropy_of(S.m, S.s, ls, S.u, K), 0.0))
    if lse_ptr is not None:
        tl.store(lse_ptr + row, tl.where(counts, S.m + ls, 0.0))
    if log_sq_ptr is not None:
        log_sq = tl.log(S.q) - 2.0 * tl.log(S.s)
        if K.truncated:
            log_sq = tl.where(seen, log_sq, NEG_INF)
        tl.store(log_sq_ptr + row, tl.where(counts, log_sq, 0.0))
    if mean_ptr is not None:
        mean = S.total / n
        if K.truncated and K.shard:
            mean = S.total
            tl.store(mean_ptr + n_rows + row, S.n)
        elif K.truncated:
            mean = tl.where(n > 0.0, mean, 0.0)
        tl.store(mean_ptr + row, tl.where(counts, mean, 0.0))
    if K.finds:
        tl.store(top_ptr + T.at, T.kept & seen & (T.t == S.found), mask=T.there)


@triton.jit(
    do_not_specialize=[
        "n_rows", "n_cols", "n_parts", "part_cols", "misalignment", "n_targets", "ignore_index", "bits_row_stride",
        "n_kept", "first_row", "origin", "n_classes",
    ]
)  # fmt: skip
def _log_probs(
    x_ptr, target_ptr, temperature_ptr, numbers_ptr, ids_ptr, offsets_ptr, bits_ptr, states_ptr, found_ptr,
    m_ptr, ls_ptr, log_prob_ptr, entropy_ptr, lse_ptr, log_sq_ptr, mean_ptr, top_ptr,
    x_row_stride, n_rows, n_cols, n_parts, part_cols, misalignment, n_targets, ignore_index, bits_row_stride,
    origin, n_classes, factor, hidden, cap, n_kept, first_row, K: tl.constexpr,
):  # fmt: skip
    """A program has a row, tile by tile; or, if states_ptr is given, a part of a row, whose state it stores."""
    program = tl.program_id(0)
    row = (program // n_parts).to(tl.int64)
    part = (program % n_parts).to(tl.int64)
    N = tempered(numbers_of(numbers_ptr, factor, cap, 0.0, 0.0, K), temperature_ptr, row)
    kept = bits_ptr
    if K.masked:
        kept = Masked(bits_ptr + row * bits_row_stride, origin)
    if K.listed:
        kept = list_of(ids_ptr, offsets_ptr, first_row + row, n_kept, origin, n_classes, K)
    S = scan_logits(
        x_ptr, x_row_stride, misalignment, row, part, None, 0.0, n_cols, n_parts, part_cols, hidden, N, kept, K
    )  # fmt: skip
    if states_ptr is not None:
        store_scanned(states_ptr, found_ptr, row, part, n_rows, n_parts, S, K)
    else:
        store_log_probs(
            x_ptr, target_ptr, m_ptr, ls_ptr, log_prob_ptr, entropy_ptr, lse_ptr, log_sq_ptr, mean_ptr, top_ptr,
            x_row_stride, n_rows, n_cols, n_targets, ignore_index, origin, n_classes,
            row + tl.zeros([1, 1], tl.int64), S, N, kept, K,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "n_rows", "n_cols", "n_parts", "n_targets", "ignore_index", "bits_row_stride", "origin", "n_classes",
    ]
)  # fmt: skip
def _merge_log_probs(
    x_ptr, target_ptr, temperature_ptr, numbers_ptr, bits_ptr, states_ptr, found_ptr,
    m_ptr, ls_ptr, log_prob_ptr, entropy_ptr, lse_ptr, log_sq_ptr, mean_ptr, top_ptr,
    x_row_stride, n_rows, n_cols, n_parts, n_targets, ignore_index, bits_row_stride, origin, n_classes,
    factor, hidden, cap, K: tl.constexpr,
):  # fmt: skip
    """The results of K.block_rows rows, from the states of their parts."""
    row = tl.program_id(0).to(tl.int64) * K.block_rows + tl.arange(0, K.block_rows)
    row = tl.minimum(row, n_rows - 1)
    S = column_of(merge_scanned(states_ptr, found_ptr, row, n_rows, n_parts, K))
    row = row[:, None]
    N = tempered(numbers_of(numbers_ptr, factor, cap, 0.0, 0.0, K), temperature_ptr, row)
    kept = bits_ptr
    if K.masked:
        kept = Masked(bits_ptr + row * bits_row_stride, origin)
    store_log_probs(
        x_ptr, target_ptr, m_ptr, ls_ptr, log_prob_ptr, entropy_ptr, lse_ptr, log_sq_ptr, mean_ptr, top_ptr,
        x_row_stride, n_rows, n_cols, n_targets, ignore_index, origin, n_classes, row, S, N, kept, K,
    )  # fmt: skip


@triton.jit
def column_of(S):
    """The Scanned of rows [n], with each field as [n, 1]."""
    return Scanned(
        S.m[:, None], S.s[:, None], S.wz[:, None], S.u[:, None], S.q[:, None], S.total[:, None], S.found[:, None],
        S.n[:, None],
    )  # fmt: skip


@triton.jit
def slope_by_entropy(z, U, N, K: tl.constexpr):
    """The gradient of a piece's z without the term g_i [c = t_i] of its targets: p (a - g_H (log p + H)).

    a is g_lse - sum g_i. Where p is 0, p log p is 0.
    """
    scale, base = origin_of(U.m, K.ptx)
    ls, unit = U.ls, 1.0  # nats of one unit of the exponent
    if K.ptx and U.m.dtype == tl.float32:
        ls = ls * LOG2E + rounding_of(U.m, K.ptx)
        unit = LN2
    p, t = power_of(exponent_at(z, scale, base, K) - ls, K)
    of_p = U.a
    if K.stats:
        of_p = (U.a - U.g_entropy * U.entropy) - (U.g_entropy * unit) * t
    return p * of_p


@triton.jit
def own_of(t, r, end, n_parts):
    """Which columns t belong to the part r, which ends at `end` in the body.

    The first part also has the columns before the body, and the last part those after it.
    """
    at_t = t - r.head
    own = (at_t >= r.start) & (at_t < end)
    return own | (at_t < 0) & (r.part == 0) | (at_t >= r.body) & (r.part == n_parts - 1)


@triton.jit
def upstream_of(T, m_ptr, ls_ptr, entropy_ptr, dlog_prob_ptr, dentropy_ptr, dlse_ptr, row, K: tl.constexpr):
    """The Upstream of rows [n, 1] with the Targets T."""
    g = tl.zeros(T.t.shape, K.state_dtype)
    if dlog_prob_ptr is not None:
        g = tl.load(dlog_prob_ptr + T.at, mask=T.kept, other=0.0)
    a = -tl.sum(g, axis=1)[:, None]
    if dlse_ptr is not None:
        a += tl.load(dlse_ptr + row)
    a = tl.where(any_of(T.wrong), float("nan"), a)
    g_entropy = tl.zeros(row.shape, K.state_dtype)
    entropy = tl.zeros(row.shape, K.state_dtype)
    if K.stats:
        g_entropy = tl.load(dentropy_ptr + row)
        entropy = tl.load(entropy_ptr + row)
    m = tl.load(m_ptr + row)
    ls = tl.load(ls_ptr + row)
    counts = counts_of(T, K)
    if K.truncated:
        counts &= ls != NEG_INF
    return Upstream(g, a, g_entropy, entropy, m, ls, counts)


@triton.jit(
    do_not_specialize=[
        "n_rows", "n_cols", "n_parts", "part_cols", "misalignment", "n_targets", "ignore_index", "bits_row_stride",
        "origin", "n_classes",
    ]
)  # fmt: skip
def _log_prob_gradient(
    x_ptr, dx_ptr, target_ptr, temperature_ptr, numbers_ptr, bits_ptr, m_ptr, ls_ptr, entropy_ptr, dlog_prob_ptr,
    dentropy_ptr, dlse_ptr, x_row_stride, dx_row_stride, n_rows, n_cols, n_parts, part_cols, misalignment, n_targets,
    ignore_index, bits_row_stride, origin, n_classes, factor, cap, K: tl.constexpr,
):  # fmt: skip
    """The gradient of one part of a row. The targets' columns are written last, from logits that were loaded first."""
    PIECES: tl.constexpr = K.pieces
    x = Rows(x_ptr, x_row_stride, misalignment)
    dx_rows = Rows(dx_ptr, dx_row_stride, misalignment)
    part_cols = whole_vectors(part_cols, K)
    r = tile_part_of(x, n_rows, n_cols, n_parts, part_cols, K)
    live = (tl.program_id(0) // n_parts).to(tl.int64) * K.block_rows + tl.arange(0, K.block_rows)[:, None] < n_rows
    end = tl.minimum(r.body, r.start + part_cols)
    N = tempered(numbers_of(numbers_ptr, factor, cap, 0.0, 0.0, K), temperature_ptr, r.row)
    kept = bits_ptr
    if K.masked:
        kept = Masked(bits_ptr + r.row * bits_row_stride, origin)
    T = targets_of(target_ptr, r.row, n_targets, n_cols, ignore_index, origin, n_classes, kept, K)
    U = upstream_of(T, m_ptr, ls_ptr, entropy_ptr, dlog_prob_ptr, dentropy_ptr, dlse_ptr, r.row, K)
    own = own_of(T.t, r, end, n_parts) & own_targets(T, n_cols, K) & live
    if K.truncated:
        own &= U.counts
    x_t = tl.load(x_ptr + r.row * x_row_stride + T.t, mask=own, other=0.0)
    tl.debug_barrier()  # no thread writes before all have loaded the targets' logits: dx may be x
    x_body = body_of(x, r.row, K)
    dx_body = body_of(dx_rows, r.row, K)
    for at in range(r.start, tl.minimum(r.start + part_cols, n_cols), PIECES * K.block_cols):
        z = load_logits(x_body + at, r.cols, end - at, 0.0, N, K, PIECES, 0)
        for p in tl.static_range(PIECES):
            z_p = scores_of(z[p], N.factor, K, K.unpack)
            dx = slope_by_entropy(z_p, U, N, K) * slope_of(z_p, N, K)
            on = (p * K.block_cols + r.cols < end - at) & live
            dx = tl.where(U.counts, dx, 0.0)
            if K.masked:
                dx = tl.where(bits_of_tile(kept, r.head + at + p * K.block_cols, n_cols, K), dx, 0.0)
            dx = dx.to(K.cast_dtype)
            tl.store(dx_body + (at + p * K.block_cols + r.cols), dx, mask=on)
    if K.shifted:
        edge = load_edge_logits(x, n_cols, n_parts, r, 0.0, N, K)
        dx = slope_by_entropy(edge.x, U, N, K) * slope_of(edge.x, N, K)
        dx = tl.where(U.counts, dx, 0.0)
        if K.masked:
            dx = tl.where(bit_of(kept, edge.cols, edge.on, K), dx, 0.0)
        dx = dx.to(K.cast_dtype)
        tl.store(dx_ptr + r.row * dx_row_stride + edge.cols, dx, mask=edge.on & live)
    tl.debug_barrier()
    g_t = U.g
    if K.targets > 1:  # noqa: SIM102  both are known when it is compiled
        if dlog_prob_ptr is not None:
            # If several targets of a row name one class, each of them writes the sum of their gradients.
            g_t = tl.zeros(T.t.shape, K.state_dtype)
            for i in range(n_targets):
                at_i = r.row * n_targets + i
                t_i = tl.load(target_ptr + at_i).to(tl.int64)
                if K.shard:
                    t_i -= origin
                g_t += tl.where(T.t == t_i, tl.load(dlog_prob_ptr + at_i), 0.0)
    z_t = logit_of_target(x_t, N, K)
    dx = (slope_by_entropy(z_t, U, N, K) + g_t) * slope_of(z_t, N, K)
    tl.store(dx_ptr + r.row * dx_row_stride + T.t, dx.to(K.cast_dtype), mask=own)
