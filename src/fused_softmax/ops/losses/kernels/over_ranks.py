"""The few numbers of each row in losses whose classes lie over ranks.

`_say` makes a rank's message about its own classes. `_merge` makes the losses from the messages of all ranks. `_share`
makes what the gradient of a shard's logits takes of each row, and `_put` writes the gradient at the targets' columns.
These launches stand beside those that read and write the logits. They replace a hundred small ones, whose host time was
longer than the reads. A program has K.block_rows rows.
Traffic: the logits of the targets, and the numbers.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.state import NEG_INF
from fused_softmax.ops.losses.kernels.common import load_target_logit, logits_of, numbers_of, slope_of, weight_total
from fused_softmax.ops.losses.kernels.spec import Target

HEADER = tl.constexpr(4)  # numbers after a message, by which ranks notice that their calls differ
ELSEWHERE = tl.constexpr(-100)  # in place of a target that is not among a shard's classes
HIGHEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def rows_of_program(n_rows, K: tl.constexpr):
    """(rows, which of them exist)."""
    BLOCK_ROWS: tl.constexpr = K.block_rows
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    return row, row < n_rows


@triton.jit
def local_of(row, live, target_ptr, first, n_cols, ignore_index):
    """(targets counted from the shard's first class, which of them are among its n_cols classes)."""
    t = tl.load(target_ptr + row, mask=live, other=0).to(tl.int64)
    return t - first, live & (t != ignore_index) & (t >= first) & (t < first + n_cols)


@triton.jit(do_not_specialize=["n_rows", "n_cols", "first", "ignore_index"])
def _say(
    x_ptr, target_ptr, weight_ptr, w_total_ptr, m_ptr, ls_ptr, loss_ptr, entropy_ptr, predicted_ptr, header_ptr,
    said_ptr, x_row_stride, n_rows, n_cols, first, ignore_index, factor, cap, K: tl.constexpr,
):  # fmt: skip
    """The message of `states.States`, one number after the other, and then the header.

    loss_ptr: with smoothing, the loss whose target is spread over all classes alike. first: the shard's first class
    among all.
    """
    BLOCK_ROWS: tl.constexpr = K.block_rows
    row, live = rows_of_program(n_rows, K)
    N = numbers_of(None, factor, cap, 0.0, 0.0, K)
    t, here = local_of(row, live, target_ptr, first, n_cols, ignore_index)
    x_row = x_ptr + row * x_row_stride
    m = tl.load(m_ptr + row, mask=live, other=0.0)
    ls = tl.load(ls_ptr + row, mask=live, other=0.0)
    z_t = load_target_logit(x_row, Target(t, here, here, 1.0), here, N, K)
    at = said_ptr + row
    tl.store(at, m, mask=live)
    tl.store(at + n_rows, ls, mask=live)
    tl.store(at + 2 * n_rows, tl.where(here, z_t, 0.0), mask=live)
    at += 3 * n_rows
    if K.weighted:
        tl.store(at, tl.load(weight_ptr + t, mask=here, other=0.0), mask=live)
        at += n_rows
    if K.smooth:
        w_total = weight_total(w_total_ptr, n_cols, K)
        # Its target is class 0, with the factor 0, and 0 times an infinite z_0 is NaN. The sum is then z_0.
        z_0 = logits_of(tl.load(x_row, mask=live, other=0.0), N, K)
        if K.weighted:
            z_0 *= tl.load(weight_ptr)
        loss = tl.load(loss_ptr + row, mask=live, other=0.0)
        tl.store(at, tl.where(tl.abs(z_0) == float("inf"), z_0, w_total * (m + ls) - n_cols * loss), mask=live)
        tl.store(at + n_rows, tl.zeros([BLOCK_ROWS], K.state_dtype) + w_total, mask=live)
        at += 2 * n_rows
    if K.stats:
        entropy = tl.load(entropy_ptr + row, mask=live, other=0.0)
        tl.store(at, tl.where(m + ls == NEG_INF, 0.0, m + ls - entropy), mask=live)
        best_at = tl.load(predicted_ptr + row, mask=live, other=0) + first
        tl.store(at + n_rows, best_at.to(m.dtype), mask=live)
    if header_ptr is not None:
        j = tl.arange(0, HEADER)
        tl.store(said_ptr + K.numbers * n_rows + j, tl.load(header_ptr + j), mask=(j >= 0) & (tl.program_id(0) == 0))


@triton.jit(do_not_specialize=["n_rows", "ranks", "n_classes", "ignore_index", "length"])
def _merge(
    heard_ptr, headers_ptr, notice_ptr, target_ptr, states_ptr, lse_ptr, loss_ptr, z_ptr, counted_ptr, entropy_ptr,
    best_ptr, n_rows, ranks, length, n_classes, ignore_index, smoothing, lse_square_scale, K: tl.constexpr,
):  # fmt: skip
    """The losses of rows, from the messages [ranks, length] of all ranks, merged in rank order.

    states_ptr: m, ls, and where the call needs them the target's weight and W [.., n_rows]. counted_ptr: what a row
    adds to the divisors of the mean of losses and of the mean of z-losses [2, n_rows]. If a rank's header differs from
    headers_ptr's, the results are NaN, and notice_ptr, which the host reads, gets the headers that were expected and
    those that were heard [2, ranks, HEADER].
    """
    BLOCK_ROWS: tl.constexpr = K.block_rows
    row, live = rows_of_program(n_rows, K)
    N = numbers_of(None, 1.0, 1.0, smoothing, lse_square_scale, K)
    bad = 0
    if headers_ptr is not None:
        j = tl.arange(0, HEADER)
        of_rank = heard_ptr + length - HEADER
        for rank in range(ranks):
            differs = tl.load(of_rank + j) != tl.load(headers_ptr + rank * HEADER + j)
            bad += tl.sum(differs.to(tl.int32), axis=0)
            of_rank += length
        if (bad > 0) & (tl.program_id(0) == 0):
            of_rank = heard_ptr + length - HEADER
            for rank in range(ranks):
                tl.store(notice_ptr + rank * HEADER + j, tl.load(headers_ptr + rank * HEADER + j))
                tl.store(notice_ptr + (ranks + rank) * HEADER + j, tl.load(of_rank + j))
                of_rank += length
    m = tl.full([BLOCK_ROWS], NEG_INF, K.state_dtype)
    best_at = tl.zeros([BLOCK_ROWS], K.state_dtype)
    of_rank = heard_ptr + row
    for _ in range(ranks):
        m_r = tl.load(of_rank, mask=live, other=0.0)
        if K.stats:  # the likeliest class, from the first rank that has the greatest logit
            best_r = tl.load(of_rank + (K.numbers - 1) * n_rows, mask=live, other=0.0)
            best_at = tl.where(m_r > m, best_r, best_at)
        m = tl.maximum(m, m_r)
        of_rank += length
    origin = tl.where(m == NEG_INF, 0.0, m)
    s = tl.zeros([BLOCK_ROWS], K.state_dtype)
    logit = tl.zeros([BLOCK_ROWS], K.state_dtype)
    w = tl.zeros([BLOCK_ROWS], K.state_dtype)
    weighted = tl.zeros([BLOCK_ROWS], K.state_dtype)
    w_total = tl.zeros([BLOCK_ROWS], K.state_dtype)
    of_rank = heard_ptr + row
    for _ in range(ranks):
        at = of_rank
        m_r = tl.load(at, mask=live, other=0.0)
        ls_r = tl.load(at + n_rows, mask=live, other=0.0)
        s += tl.exp(ls_r + (m_r - origin))
        logit += tl.load(at + 2 * n_rows, mask=live, other=0.0)
        at += 3 * n_rows
        if K.weighted:
            w += tl.load(at, mask=live, other=0.0)
            at += n_rows
        if K.smooth:
            weighted += tl.load(at, mask=live, other=0.0)
            w_total += tl.load(at + n_rows, mask=live, other=0.0)
        of_rank += length
    ls = tl.where(bad > 0, float("nan"), tl.log(s))
    lse = m + ls
    t = tl.load(target_ptr + row, mask=live, other=0).to(tl.int64)
    on = t != ignore_index
    wrong = on & ((t < 0) | (t >= n_classes))
    spoilt = tl.where(wrong, float("nan"), 1.0)
    loss = m - logit + ls  # one by one: m + ls would be rounded at the size of m
    if K.weighted:
        loss *= w
    if K.smooth:
        loss = (1.0 - N.smoothing) * loss + N.smoothing / n_classes * (w_total * lse - weighted)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, lse, mask=live)
    tl.store(loss_ptr + row, tl.where(on, loss * spoilt, 0.0), mask=live)
    if K.z_loss:
        tl.store(z_ptr + row, tl.where(on, N.lse_square_scale * lse * lse * spoilt, 0.0), mask=live)
    tl.store(states_ptr + row, m, mask=live)
    tl.store(states_ptr + n_rows + row, ls, mask=live)
    at = states_ptr + 2 * n_rows + row
    if K.weighted:
        tl.store(at, w, mask=live)
        at += n_rows
    if K.smooth:
        tl.store(at, w_total, mask=live)
    if counted_ptr is not None:
        counts = tl.where(on & (t >= 0) & (t < n_classes), w, 0.0)
        tl.store(counted_ptr + row, counts, mask=live)
        tl.store(counted_ptr + n_rows + row, tl.where(on, 1.0, 0.0).to(K.state_dtype), mask=live)
    if K.stats:
        expected = tl.zeros([BLOCK_ROWS], K.state_dtype)
        of_rank = heard_ptr + row
        for _ in range(ranks):
            lse_r = tl.load(of_rank, mask=live, other=0.0) + tl.load(of_rank + n_rows, mask=live, other=0.0)
            p = tl.exp(lse_r - lse)
            expected_r = tl.load(of_rank + (K.numbers - 2) * n_rows, mask=live, other=0.0)
            expected += tl.where(p == 0.0, 0.0, p * expected_r)
            of_rank += length
        tl.store(entropy_ptr + row, tl.where(on, lse - expected, 0.0), mask=live)
        tl.store(best_ptr + row, tl.where(on & (bad == 0), best_at, 0.0).to(tl.int64), mask=live)


@triton.jit(do_not_specialize=[
    "n_rows", "n_cols", "n_classes", "first", "ignore_index", "dy_step", "dz_step"
])  # fmt: skip
def _share(
    x_ptr, target_ptr, weight_ptr, w_total_ptr, states_ptr, totals_ptr, dy_ptr, dz_ptr, dlse_ptr, local_ptr,
    of_m_ptr, of_ls_ptr, of_dy_ptr, of_dlse_ptr, own_ptr, x_row_stride, n_rows, n_cols, n_classes, first, ignore_index,
    dy_step, dz_step, factor, cap, smoothing, lse_square_scale, K: tl.constexpr,
):  # fmt: skip
    """What `launches.backward` takes of a shard's rows: targets (local_ptr), m, ls, dy and dlse (of_m_ptr and so on).

    The gradient of a row's logits z is p_c a - [c = t] w_t b - w_c u. With smoothing, `backward` computes p_c a - w_c u
    in all columns, as for a target that is spread over all classes alike. own_ptr gets the gradient at the target's
    column, for `_put`.
    """
    BLOCK_ROWS: tl.constexpr = K.block_rows
    row, live = rows_of_program(n_rows, K)
    N = numbers_of(None, factor, cap, smoothing, lse_square_scale, K)
    t, here = local_of(row, live, target_ptr, first, n_cols, ignore_index)
    on = t + first != ignore_index
    wrong = on & ((t + first < 0) | (t + first >= n_classes))
    m = tl.load(states_ptr + row, mask=live, other=0.0)
    ls = tl.load(states_ptr + n_rows + row, mask=live, other=0.0)
    at = states_ptr + 2 * n_rows + row
    g = tl.zeros([BLOCK_ROWS], K.state_dtype)
    g_z = tl.zeros([BLOCK_ROWS], K.state_dtype)
    of_loss = 1.0
    of_z = 1.0
    if K.mean:
        PARTS: tl.constexpr = K.totals
        j = tl.arange(0, PARTS)
        of_loss = tl.sum(tl.load(totals_ptr + j), axis=0)
        of_z = tl.sum(tl.load(totals_ptr + PARTS + j), axis=0)
    if dy_ptr is not None:
        dy = tl.load(dy_ptr + row * dy_step, mask=live, other=0.0).to(K.state_dtype)
        g += tl.where(dy == 0.0, 0.0, dy / of_loss)
        g_z += tl.where(dy == 0.0, 0.0, dy / of_z)
    if dz_ptr is not None:
        dz = tl.load(dz_ptr + row * dz_step, mask=live, other=0.0).to(K.state_dtype)
        g_z += tl.where(dz == 0.0, 0.0, dz / of_z)
    g = tl.where(on, tl.where(wrong, float("nan"), g), 0.0)
    b = g
    if K.smooth:
        b = (1.0 - N.smoothing) * g
    a = b
    if K.weighted:
        a = b * tl.load(at, mask=live, other=0.0)
        at += n_rows
    asked = b != 0.0
    u = tl.zeros([BLOCK_ROWS], K.state_dtype)
    if K.smooth:
        u = N.smoothing / n_classes * g
        a += u * tl.load(at, mask=live, other=0.0)
        asked = asked | (u != 0.0)
    if K.z_loss:
        a += tl.where(on, 2.0 * N.lse_square_scale * (m + ls) * g_z, 0.0)
    if dlse_ptr is not None:
        a += tl.load(dlse_ptr + row, mask=live, other=0.0).to(K.state_dtype)
    # A row without an incoming gradient gets 0, whatever its logits are. With HIGHEST as m, -inf gives p = 0.
    asked = asked | (a != 0.0)
    w = 1.0
    if K.weighted:
        w = tl.load(weight_ptr + t, mask=here, other=0.0)
    if K.smooth:
        z = logits_of(tl.load(x_ptr + row * x_row_stride + t, mask=here, other=0.0), N, K)
        own = (tl.exp(z - m - ls) * a - (u + b) * w) * slope_of(z, N, K)
        tl.store(own_ptr + row, own, mask=live)
        t = tl.zeros([BLOCK_ROWS], tl.int64)
        a -= u * weight_total(w_total_ptr, n_cols, K)
        dy = u * n_cols
    else:
        t = tl.where(here, t, ELSEWHERE)
        a -= tl.where(here, b * w, 0.0)
        dy = b
    tl.store(local_ptr + row, tl.where(asked, t, ELSEWHERE), mask=live)
    tl.store(of_m_ptr + row, tl.where(asked, m, HIGHEST), mask=live)
    tl.store(of_ls_ptr + row, tl.where(asked, ls, 0.0), mask=live)
    tl.store(of_dy_ptr + row, dy, mask=live)
    tl.store(of_dlse_ptr + row, a, mask=live)


@triton.jit(do_not_specialize=["n_rows", "n_cols", "first", "ignore_index"])
def _put(dx_ptr, target_ptr, local_ptr, own_ptr, dx_row_stride, n_rows, n_cols, first, ignore_index, K: tl.constexpr):
    """The gradient at the targets' columns, of rows that have an incoming gradient."""
    row, live = rows_of_program(n_rows, K)
    t, here = local_of(row, live, target_ptr, first, n_cols, ignore_index)
    asked = tl.load(local_ptr + row, mask=live, other=ELSEWHERE) != ELSEWHERE
    own = tl.load(own_ptr + row, mask=live, other=0.0)
    tl.store(dx_ptr + row * dx_row_stride + t, own.to(dx_ptr.dtype.element_ty), mask=here & asked)
