"""Divergences of rows whose classes lie over ranks, from the messages of all ranks.

The formulas are in ops/losses/over_ranks/divergence.py.
Traffic: the numbers of all ranks, and those of whole rows.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.state import NEG_INF
from fused_softmax.ops.losses.kernels.log_prob_over_ranks import share_of
from fused_softmax.ops.losses.kernels.over_ranks import rows_of_program


@triton.jit
def state_over(of_rank, n_rows, live, ranks, length, K: tl.constexpr):
    """(m, log sum exp(z - m)) of whole rows, from those of each rank. Messages of ranks lie `length` apart."""
    BLOCK_ROWS: tl.constexpr = K.block_rows
    m = tl.full([BLOCK_ROWS], NEG_INF, K.state_dtype)
    at = of_rank
    for _ in range(ranks):
        m = tl.maximum(m, tl.load(at, mask=live, other=0.0))
        at += length
    origin = tl.where(m == NEG_INF, 0.0, m)
    s = tl.zeros([BLOCK_ROWS], K.state_dtype)
    at = of_rank
    for _ in range(ranks):
        m_r = tl.load(at, mask=live, other=0.0)
        s += tl.exp(tl.load(at + n_rows, mask=live, other=0.0) + (m_r - origin))
        at += length
    return m, tl.log(s)


@triton.jit(do_not_specialize=["n_rows", "ranks", "length"])
def _merge_pairs_of_ranks(
    heard_ptr, m_ptr, ls_ptr, m_t_ptr, ls_t_ptr, value_ptr, total_ptr, n_rows, ranks, length, K: tl.constexpr
):
    """The divergences of K.block_rows rows, from the messages [ranks, length] of all ranks, merged in rank order.

    Without value_ptr only the states of whole rows are stored.
    """
    row, live = rows_of_program(n_rows, K)
    of_rank = heard_ptr + row
    m, ls = state_over(of_rank, n_rows, live, ranks, length, K)
    tl.store(m_ptr + row, m, mask=live)
    tl.store(ls_ptr + row, ls, mask=live)
    m_t, ls_t = tl.zeros_like(m), tl.zeros_like(m)
    told = of_rank + 2 * n_rows
    if K.given == "logits":
        m_t, ls_t = state_over(told, n_rows, live, ranks, length, K)
        tl.store(m_t_ptr + row, m_t, mask=live)
        tl.store(ls_t_ptr + row, ls_t, mask=live)
        told += 2 * n_rows
    if value_ptr is not None:
        value = tl.zeros_like(m)
        total = tl.zeros_like(m)
        for _ in range(ranks):
            own = tl.load(told, mask=live, other=0.0)
            log_q, _m = share_of(of_rank, n_rows, live, m, ls)
            log_t = tl.zeros_like(m)
            if K.given == "logits":
                log_t, _m = share_of(of_rank + 2 * n_rows, n_rows, live, m_t, ls_t)
            if K.divergence == "reverse_kl":
                q = tl.exp(log_q)
                value += tl.where(q == 0.0, 0.0, q * (own + (log_q - log_t)))
            elif K.given == "logits":
                t = tl.exp(log_t)
                value += tl.where(t == 0.0, 0.0, t * (own + (log_t - log_q)))
            else:
                t = tl.load(told + n_rows, mask=live, other=0.0)
                value += own - tl.where(t == 0.0, 0.0, t * log_q)
                total += t
            of_rank += length
            told += length
        if K.divergence == "reverse_kl":
            total = value
        elif K.given == "logits":
            total += 1.0
        tl.store(value_ptr + row, value, mask=live)
        tl.store(total_ptr + row, total, mask=live)
