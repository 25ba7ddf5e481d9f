"""A token from all columns of a row of logits, in one launch that reads each logit once.

The parts of a row tell each other their best groups. No part waits: the part that arrives last writes the token.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.state import NEG_INF
from fused_softmax.ops.sampling.kernels.common import (
    GROUPS,
    INF,
    LANES,
    STRETCH,
    TOKENS,
    calls_of,
    column_of,
    draw_of,
    group_of,
    key_of,
    log2_of,
    logits_of,
    max_of_8,
    member_of,
    noise_of,
    score_of,
    sum_of_8,
    survey,
    weight_at,
    words_of,
)

ODD = tl.constexpr(9223372034707292159)  # above the key of every finite score
FAR = tl.constexpr(1024.0)  # scores beyond it are too coarse to tell neighbours apart: the row needs another origin


@triton.jit(
    do_not_specialize=[
        "n_cols", "n_parts", "n_rows", "part_stretches", "seed_low", "seed_high", "position_low", "position_high",
    ]
)  # fmt: skip
def _draw(
    scratch_ptr, logits_ptr, tokens_ptr, valid_ptr, bias_ptr, bitmask_ptr, rows_ptr, temperature_ptr, seed_ptr,
    position_ptr, strides, n_rows, n_cols, n_parts, part_stretches, temperature, seed_low, seed_high, position_low,
    position_high, K: tl.constexpr,
):  # fmt: skip
    """A program has a draw, or a part of one (K.split)."""
    program = tl.program_id(0)
    draw = (program // n_parts).to(tl.int64)
    part = program % n_parts
    D = draw_of(
        logits_ptr, bias_ptr, bitmask_ptr, rows_ptr, temperature_ptr, seed_ptr, position_ptr, strides, n_rows, n_cols,
        temperature, seed_low, seed_high, position_low, position_high, draw, K,
    )  # fmt: skip
    first = tl.load(D.ptr).to(tl.float32)
    origin = tl.where(tl.abs(first) < INF, first, 0.0)
    start = part * part_stretches
    end = tl.minimum(start + part_stretches, tl.cdiv(n_cols, STRETCH))
    key = with_token(D, best_group(D, start, end, origin, K, True), origin, K)
    if K.split:
        state_ptr = scratch_ptr + draw * 2
        tl.atomic_max(state_ptr, key, sem="relaxed")
        last = tl.atomic_add(state_ptr + 1, 1, sem="acq_rel") == n_parts - 1
        if last:
            key = tl.atomic_xchg(state_ptr, 0, sem="relaxed")
            tl.atomic_xchg(state_ptr + 1, 0, sem="relaxed")
            finish_draw(D, key, tokens_ptr + draw * strides[TOKENS], valid_ptr + draw, K)
    else:
        finish_draw(D, key, tokens_ptr + draw * strides[TOKENS], valid_ptr + draw, K)


@triton.jit
def with_token(D, key, origin, K: tl.constexpr):
    """The key with the token that is drawn from its group in the place of the group. It sorts as before."""
    if (key < ODD) & (score_of(key) > NEG_INF):
        token = member_of(D, group_of(key), origin, K)
        key = (key & ~0x7FFFFFFF) | (2147483647 - token)
    return key


@triton.jit
def finish_draw(D, key, token_ptr, valid_ptr, K: tl.constexpr):
    """Store the token of a row's best key. If its scores do not tell, draw from the whole row again."""
    valid = D.valid
    token = tl.zeros([], tl.int64)
    score = score_of(key)
    if (key >= ODD) | ((score < -FAR) & (D.temperature > 0)) | (score == NEG_INF):
        tl.debug_barrier()  # the callee writes shared memory, and Triton puts no barrier before a call
        token, valid = draw_again(D, K)
    else:
        token = group_of(key).to(tl.int64)
    tl.store(token_ptr, tl.where(valid, token, 0))
    tl.store(valid_ptr, valid.to(tl.int8))


@triton.jit(noinline=True)
def draw_again(D, K: tl.constexpr):
    """(token, whether there is one) of a whole row, by one program, with the row's maximum as origin."""
    m, n_inf, at_inf, n_nan = survey(D, K)
    valid = D.valid & (n_nan == 0) & (n_inf <= 1) & (m > NEG_INF)
    token = tl.zeros([], tl.int64)
    if n_inf == 1:
        token = at_inf.to(tl.int64)
    elif valid:
        key = best_group(D, 0, tl.cdiv(D.n_cols, STRETCH), m, K, False)
        token = member_of(D, group_of(key), m, K)
    return token, valid


@triton.jit
def best_group(D, start, end, origin, K: tl.constexpr, WHOLE: tl.constexpr):
    """The key of the best group in the stretches from start to end; ODD if a score is NaN, inf or beyond FAR.

    WHOLE: whether stretches that lie within the row have a loop of their own, without masks, which is faster.
    """
    best = tl.full([K.stretches * LANES], NEG_INF, tl.float32)
    at = tl.zeros([K.stretches * LANES], tl.int32)
    odd = tl.zeros([K.stretches * LANES], tl.float32)  # 1 where a sum is NaN
    whole = start
    if WHOLE:
        whole += tl.maximum(tl.minimum(end, D.n_cols // STRETCH) - start, 0) // K.stretches * K.stretches
        for stretch in range(start, whole, K.stretches):
            best, at, odd = take_groups(D, calls_of(stretch, K), end, origin, best, at, odd, K, True)
    for stretch in range(whole, end, K.stretches):
        best, at, odd = take_groups(D, calls_of(stretch, K), end, origin, best, at, odd, K, False)
    most = tl.where(D.temperature > 0, FAR, INF)
    key = tl.max(key_of(best, at), axis=0)
    return tl.where(tl.max(((odd > 0) | (best >= most)).to(tl.int32), axis=0) > 0, ODD, key)


@triton.jit
def take_groups(D, call, end, origin, best, at, odd, K: tl.constexpr, WHOLE: tl.constexpr):
    """(best, at, odd) of each lane after taking the 32 columns of its call."""
    if not K.greedy:
        words = words_of(D, call, GROUPS)
        all_words = words[0] ^ words[1] ^ words[2] ^ words[3]
    for quarter in tl.static_range(4):
        first = column_of(call, quarter)
        x = logits_of(D, first, call < end * LANES, K, WHOLE)
        if K.greedy:
            score = max_of_8(x)
            odd = tl.where(score == score, odd, 1.0)
        else:
            m = tl.max(x, axis=1)
            s = sum_of_8(weight_at(x, m[:, None], D, K))
            score = (m - origin) * D.factor + log2_of(s, K) + noise_of(words[quarter], all_words, K)
            score = tl.where(D.temperature > 0, score, m)
            odd = tl.where(s == s, odd, 1.0)
        better = score > best
        best = tl.where(better, score, best)
        at = tl.where(better, first // 8, at)
    return best, at, odd
