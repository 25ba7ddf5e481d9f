"""Log-probabilities of rows whose classes lie over ranks, from the messages of all ranks.

The formulas are in ops/losses/over_ranks/log_prob.py.
Traffic: the targets; the numbers of all ranks, and the results.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.state import NEG_INF
from fused_softmax.ops.losses.kernels.over_ranks import rows_of_program


@triton.jit
def share_of(of_rank, n_rows, live, m, ls):
    """(log of the share that a rank's columns have of a row's probability, the rank's m)."""
    m_r = tl.load(of_rank, mask=live, other=0.0)
    return (m_r - m) + (tl.load(of_rank + n_rows, mask=live, other=0.0) - ls), m_r


@triton.jit(do_not_specialize=["n_rows", "ranks", "n_targets", "n_classes", "ignore_index"])
def _merge_shards(
    heard_ptr, target_ptr, m_ptr, ls_ptr, log_prob_ptr, entropy_ptr, lse_ptr, log_sq_ptr, mean_ptr, top_ptr,
    n_rows, ranks, length, n_targets, n_classes, ignore_index, K: tl.constexpr,
):  # fmt: skip
    """The results of K.block_rows rows, from the messages [ranks, length] of all ranks, merged in rank order."""
    BLOCK_ROWS: tl.constexpr = K.block_rows
    row, live = rows_of_program(n_rows, K)
    m = tl.full([BLOCK_ROWS], NEG_INF, K.state_dtype)
    of_rank = heard_ptr + row
    for _ in range(ranks):
        m = tl.maximum(m, tl.load(of_rank, mask=live, other=0.0))
        of_rank += length
    origin = tl.where(m == NEG_INF, 0.0, m)
    s = tl.zeros([BLOCK_ROWS], K.state_dtype)
    of_rank = heard_ptr + row
    for _ in range(ranks):
        m_r = tl.load(of_rank, mask=live, other=0.0)
        s += tl.exp(tl.load(of_rank + n_rows, mask=live, other=0.0) + (m_r - origin))
        of_rank += length
    ls = tl.log(s)
    of_m, of_ls = m, ls
    if K.truncated:  # if no rank has a kept logit above -inf, each share is 0
        of_m, of_ls = origin, tl.where(s == 0.0, 0.0, ls)
    entropy = tl.zeros([BLOCK_ROWS], K.state_dtype)
    squares = tl.zeros([BLOCK_ROWS], K.state_dtype)
    mean = tl.zeros([BLOCK_ROWS], K.state_dtype)
    count = tl.zeros([BLOCK_ROWS], K.state_dtype)
    of_rank = heard_ptr + row
    for _ in range(ranks):
        log_share, m_r = share_of(of_rank, n_rows, live, of_m, of_ls)
        p = tl.exp(log_share)
        at = of_rank + 2 * n_rows
        if entropy_ptr is not None:
            entropy += tl.where(p == 0.0, 0.0, p * (tl.load(at, mask=live, other=0.0) - log_share))
            at += n_rows
        if log_sq_ptr is not None:
            log_sq_r = tl.load(at, mask=live, other=0.0)
            squares += tl.where(p == 0.0, 0.0, tl.exp(2.0 * log_share + log_sq_r))
            at += n_rows
        if mean_ptr is not None:
            mean += tl.load(at, mask=live, other=0.0)
            if K.truncated:
                count += tl.load(at + n_rows, mask=live, other=0.0)
        of_rank += length
    first = 2  # where the numbers of targets begin in a message
    if entropy_ptr is not None:
        first += 1
    if log_sq_ptr is not None:
        first += 1
    if mean_ptr is not None:
        first += 1
        if K.truncated:
            first += 1
            mean = tl.where(count > 0.0, mean / count, 0.0)
    counts = row < 0
    for i in range(n_targets):
        t = tl.load(target_ptr + row * n_targets + i, mask=live, other=0).to(tl.int64)
        on = t != ignore_index
        counts = counts | on
        log_prob = tl.zeros([BLOCK_ROWS], K.state_dtype)
        top = tl.zeros([BLOCK_ROWS], K.state_dtype)
        found = row < 0
        of_rank = heard_ptr + row
        for _ in range(ranks):
            log_share, m_r = share_of(of_rank, n_rows, live, of_m, of_ls)
            of_target = tl.load(of_rank + (first + i) * n_rows, mask=live, other=0.0)
            own = tl.where(log_share == NEG_INF, log_share, of_target + log_share)
            log_prob += tl.where(of_target == float("inf"), 0.0, own)
            if top_ptr is not None:
                flag = tl.load(of_rank + (first + n_targets + i) * n_rows, mask=live, other=0.0)
                best = (m_r == m) & (flag >= 0.0) & (found == 0)
                top = tl.where(best, flag, top)
                found = found | best
            of_rank += length
        wrong = (t < 0) | (t >= n_classes)
        log_prob = tl.where(on, tl.where(wrong, float("nan"), log_prob), 0.0)
        tl.store(log_prob_ptr + row * n_targets + i, log_prob, mask=live)
        if top_ptr is not None:
            tl.store(top_ptr + row * n_targets + i, top > 0.0, mask=live)
    tl.store(m_ptr + row, m, mask=live)
    tl.store(ls_ptr + row, ls, mask=live)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + row, tl.where(counts, entropy, 0.0), mask=live)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, tl.where(counts, m + ls, 0.0), mask=live)
    if log_sq_ptr is not None:
        tl.store(log_sq_ptr + row, tl.where(counts, tl.log(squares), 0.0), mask=live)
    if mean_ptr is not None:
        tl.store(mean_ptr + row, tl.where(counts, mean, 0.0), mask=live)
