"""The losses of tokens from transposed logits [classes, tokens], one block of classes after another; their gradient.

Traffic: the losses read the logits once (MN). The gradient, which is written over the logits, reads them a second time
(2MN). Token statistics read them once more, in a kernel of their own. A program has a tile of tokens in one part of a
block's classes; another kernel merges the states of the parts.
The bias of a class is added as its logits are read, in the dtype of the arithmetic; K.cast_dtype is then that dtype.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fused_softmax.core.kernels.state import (
    NEG_INF,
    NO_COLUMN,
    exp_at,
    hold_all,
    log_sum_of,
    origin_of,
    scores_of,
    weight_of,
    widen,
)
from fused_softmax.ops.losses.kernels.common import (
    entropy_of,
    exponent_at,
    faded_terms,
    gradient_of_logits,
    logit_of_target,
    logits_of,
    numbers_of,
    per_row,
    power_of,
    shares_of,
    store_losses,
    store_stats,
    target_of,
    weight_total,
    weights_at,
    zero_of,
)


class TokenPart(NamedTuple):
    """A program's tokens [1, tokens], of which those `on` exist, and its classes [start, stop) of a block.

    stride: elements from one class to the next.
    """

    part: Any
    token: Any
    on: Any
    start: Any
    stop: Any
    stride: Any


@triton.jit(do_not_specialize=["first", "n_classes", "n_tokens", "padded", "part_classes", "n_read"])
def _token_states(
    x_ptr, bias_ptr, target_ptr, weight_ptr, numbers_ptr, z_t_ptr, m_ptr, s_ptr, wz_ptr, w_ptr,
    first, n_classes, n_tokens, padded, part_classes, n_read, factor, hidden, cap, K: tl.constexpr,
):  # fmt: skip
    """m and s of one part of a block; with smoothing also sum_c w_c (z_c - m) and sum_c w_c.

    Every lane has a state of its own until the part is read.
    """
    BLOCK_CLASSES: tl.constexpr = K.block_cols
    BLOCK_TOKENS: tl.constexpr = K.block_tokens
    PIECES: tl.constexpr = K.pieces
    P = part_of(n_classes, padded, part_classes, K)
    N = numbers_of(numbers_ptr, factor, cap, 0.0, 0.0, K)
    x_ptr += P.token
    t = tl.load(target_ptr + P.token, mask=P.token < n_tokens, other=0).to(tl.int64) - first
    owns = (P.token < n_tokens) & (t >= P.start) & (t < P.stop)
    z_t_ptr += P.token
    tl.store(z_t_ptr, with_bias(tl.load(x_ptr + t * P.stride, mask=owns), bias_ptr, first + t, owns, K), mask=owns)
    m = tl.full([BLOCK_CLASSES, BLOCK_TOKENS], NEG_INF, K.state_dtype)
    s = tl.zeros([BLOCK_CLASSES, BLOCK_TOKENS], K.state_dtype)
    wz = tl.zeros([BLOCK_CLASSES, BLOCK_TOKENS], K.state_dtype)
    w = tl.zeros([BLOCK_CLASSES, 1], K.state_dtype)
    for at in range(P.start, P.stop, PIECES * BLOCK_CLASSES):
        x = load_finished(x_ptr, bias_ptr, first, at, P, hidden, N, K)
        top = scores_of(x[0], N.factor, K)
        for p in tl.static_range(1, PIECES):
            top = tl.maximum(top, scores_of(x[p], N.factor, K))
        top = tl.maximum(m, top)
        x = hold_all(x, K.ptx)
        scale, base = origin_of(top, K.ptx)
        s *= weight_of(m, top, K.ptx)
        for p in tl.static_range(PIECES):
            s += exp_at(scores_of(x[p], N.factor, K), scale, base, K.ptx)
        if K.smooth:
            zero = tl.where(top == NEG_INF, 0.0, top)
            wz -= w * tl.where(m == NEG_INF, 0.0, zero - m)
            for p in tl.static_range(PIECES):
                row = classes_of(p, K)
                on = row < P.stop - at
                w_row = on.to(K.state_dtype)
                if K.weighted:
                    w_row = tl.load(weight_ptr + first + at + row, mask=on, other=0.0)
                z = scores_of(x[p], N.factor, K)
                wz += tl.where(on, w_row * (z - zero), 0.0)
                w += w_row
        m = top
    m_lane = m
    m = tl.max(m_lane, axis=0)[None, :]
    s = tl.sum(s * weight_of(m_lane, m, K.ptx), axis=0)[None, :]
    at_part = (n_read + P.part) * P.stride + P.token
    tl.store(m_ptr + at_part, m, mask=P.on)
    tl.store(s_ptr + at_part, s, mask=P.on)
    if K.smooth:
        wz = tl.sum(wz - w * tl.where(m_lane == NEG_INF, 0.0, m - m_lane), axis=0)[None, :]
        tl.store(wz_ptr + at_part, wz, mask=P.on)
        if tl.program_id(0) % tl.cdiv(padded, BLOCK_TOKENS) == 0:  # the weights are the same for all tokens
            tl.store(w_ptr + n_read + P.part, tl.sum(tl.sum(w, axis=1), axis=0))


@triton.jit(do_not_specialize=["first", "n_classes", "padded", "part_classes", "n_read"])
def _token_stats(
    x_ptr, bias_ptr, numbers_ptr, m_ptr, u_ptr, found_ptr,
    first, n_classes, padded, part_classes, n_read, factor, hidden, cap, K: tl.constexpr,
):  # fmt: skip
    """The terms u of the entropy and the first likeliest class of one part of a block, whose m is stored already."""
    BLOCK_CLASSES: tl.constexpr = K.block_cols
    BLOCK_TOKENS: tl.constexpr = K.block_tokens
    PIECES: tl.constexpr = K.pieces
    P = part_of(n_classes, padded, part_classes, K)
    N = numbers_of(numbers_ptr, factor, cap, 0.0, 0.0, K)
    at_part = (n_read + P.part) * P.stride + P.token
    m = tl.load(m_ptr + at_part, mask=P.on, other=0.0)
    scale, base = origin_of(m, K.ptx)
    x_ptr += P.token
    u = tl.zeros([BLOCK_CLASSES, BLOCK_TOKENS], K.state_dtype)
    found = tl.full([BLOCK_CLASSES, BLOCK_TOKENS], NO_COLUMN, tl.int32)
    for at in range(P.start, P.stop, PIECES * BLOCK_CLASSES):
        x = load_finished(x_ptr, bias_ptr, first, at, P, hidden, N, K)
        for p in tl.static_range(PIECES):
            row = classes_of(p, K)
            z = scores_of(x[p], N.factor, K)
            e, t = power_of(exponent_at(z, scale, base, K), K)
            u = tl.fma(e, t, u)
            found = tl.minimum(found, tl.where((z == m) & (row < P.stop - at), first + at + row, NO_COLUMN))
    tl.store(u_ptr + at_part, tl.sum(u, axis=0)[None, :], mask=P.on)
    tl.store(found_ptr + at_part, tl.min(found, axis=0)[None, :], mask=P.on)


@triton.jit(do_not_specialize=["n_parts", "n_classes", "n_tokens", "padded", "ignore_index"])
def _token_losses(
    target_ptr, weight_ptr, totals_ptr, w_total_ptr, numbers_ptr, z_t_ptr, m_ptr, s_ptr, wz_ptr, w_ptr,
    loss_ptr, z_ptr, lse_ptr, shares_ptr, place_ptr,
    n_parts, n_classes, n_tokens, padded, ignore_index, factor, cap, smoothing, lse_square_scale, K: tl.constexpr,
):  # fmt: skip
    """The losses of tokens, and what their gradients take, from the states of all parts, K.lanes parts at a time."""
    BLOCK_TOKENS: tl.constexpr = K.block_tokens
    LANES: tl.constexpr = K.lanes
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[None, :]
    live = token < n_tokens
    token = tl.minimum(token, n_tokens - 1)
    N = numbers_of(numbers_ptr, factor, cap, smoothing, lse_square_scale, K)
    T = target_of(token, target_ptr, weight_ptr, n_classes, ignore_index, K)
    z_t = logit_of_target(tl.load(z_t_ptr + token, mask=T.kept, other=0.0), N, K)
    stride = padded.to(tl.int64)
    m = tl.full([1, BLOCK_TOKENS], NEG_INF, K.state_dtype)
    for at in range(0, n_parts, LANES):
        part = at + tl.arange(0, LANES)[:, None]
        m_part = tl.load(m_ptr + part * stride + token, mask=part < n_parts, other=NEG_INF)
        m = tl.maximum(m, tl.max(m_part, axis=0)[None, :])
    s = tl.zeros([1, BLOCK_TOKENS], K.state_dtype)
    wz = tl.zeros([1, BLOCK_TOKENS], K.state_dtype)
    for at in range(0, n_parts, LANES):
        part = at + tl.arange(0, LANES)[:, None]
        m_part = tl.load(m_ptr + part * stride + token, mask=part < n_parts, other=NEG_INF)
        s_part = tl.load(s_ptr + part * stride + token, mask=part < n_parts, other=0.0)
        s += tl.sum(s_part * weight_of(m_part, m, K.ptx), axis=0)[None, :]
        if K.smooth:
            wz_part = tl.load(wz_ptr + part * stride + token, mask=part < n_parts, other=0.0)
            w_part = tl.load(w_ptr + part, mask=part < n_parts, other=0.0)
            wz += tl.sum(wz_part - w_part * tl.where(m_part == NEG_INF, 0.0, m - m_part), axis=0)[None, :]
    ls = log_sum_of(m, s, K.ptx)
    w_total = weight_total(w_total_ptr, n_classes, K)
    if K.smooth:
        wz += w_total * (tl.where(m == NEG_INF, 0.0, m) - zero_of(z_t))
    store_losses(loss_ptr, z_ptr, token, live, m, ls, z_t, zero_of(z_t), T, wz, w_total, n_classes, N, K)
    if lse_ptr is not None:
        tl.store(lse_ptr + token, m + ls, mask=live)
    g, g_z = per_row(totals_ptr, K)
    D = shares_of(m + ls, T.w, w_total, g, g_z, n_classes, N, K)
    tl.store(shares_ptr + token, m, mask=live)
    tl.store(shares_ptr + stride + token, tl.where(T.wrong, float("nan"), D.a) / s, mask=live)
    tl.store(shares_ptr + 2 * stride + token, tl.where(T.kept, D.b, 0.0), mask=live)
    tl.store(shares_ptr + 3 * stride + token, tl.where(T.kept, D.u, 0.0), mask=live)
    tl.store(place_ptr + token, tl.where(T.kept, T.t, tl.where(T.wrong, -1, -2)).to(tl.int32), mask=live)


@triton.jit(do_not_specialize=["n_parts", "n_classes", "n_tokens", "padded"])
def _merge_token_stats(
    m_ptr, s_ptr, u_ptr, found_ptr, entropy_ptr, predicted_ptr, n_parts, n_classes, n_tokens, padded, K: tl.constexpr
):
    """The entropy of tokens and their likeliest class, from all parts."""
    BLOCK_TOKENS: tl.constexpr = K.block_tokens
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    live = token < n_tokens
    token = tl.minimum(token, n_tokens - 1)
    stride = padded.to(tl.int64)
    m = tl.full([BLOCK_TOKENS], NEG_INF, K.state_dtype)
    for part in range(0, n_parts):
        m = tl.maximum(m, tl.load(m_ptr + part * stride + token))
    s = tl.zeros([BLOCK_TOKENS], K.state_dtype)
    u = tl.zeros([BLOCK_TOKENS], K.state_dtype)
    found = tl.full([BLOCK_TOKENS], NO_COLUMN, tl.int32)
    for part in range(0, n_parts):
        at = part * stride + token
        m_part, s_part = tl.load(m_ptr + at), tl.load(s_ptr + at)
        fade = weight_of(m_part, m, K.ptx)
        u += faded_terms(tl.load(u_ptr + at), s_part, m_part, m, fade, K)
        s += s_part * fade
        found = tl.minimum(found, tl.where(m_part == m, tl.load(found_ptr + at), NO_COLUMN))
    entropy = entropy_of(m, s, log_sum_of(m, s, K.ptx), u, K)
    store_stats(entropy_ptr, predicted_ptr, token, live, entropy, found, n_classes)


@triton.jit(do_not_specialize=["first", "n_classes", "padded", "part_classes"])
def _token_gradient(
    x_ptr, bias_ptr, weight_ptr, numbers_ptr, shares_ptr, place_ptr,
    first, n_classes, padded, part_classes, factor, cap, K: tl.constexpr,
):  # fmt: skip
    """The gradient of one part of a block, written over its logits."""
    PIECES: tl.constexpr = K.pieces
    P = part_of(n_classes, padded, part_classes, K)
    N = numbers_of(numbers_ptr, factor, cap, 0.0, 0.0, K)
    m = tl.load(shares_ptr + P.token, mask=P.on, other=0.0)
    a = tl.load(shares_ptr + P.stride + P.token, mask=P.on, other=0.0)
    b = tl.load(shares_ptr + 2 * P.stride + P.token, mask=P.on, other=0.0)
    u = 0.0
    if K.smooth:
        u = tl.load(shares_ptr + 3 * P.stride + P.token, mask=P.on, other=0.0)
    place = tl.load(place_ptr + P.token, mask=P.on, other=-2)
    scale, base = origin_of(m, K.ptx)
    x_ptr += P.token
    for at in range(P.start, P.stop, PIECES * K.block_cols):
        x = load_transposed(x_ptr, bias_ptr, first, at, P, 0.0, K)
        for p in tl.static_range(PIECES):
            row = classes_of(p, K)
            on = row < P.stop - at
            here = first + at + row
            w_row = weights_at(weight_ptr, here, on, K)
            z = logits_of(x[p], N, K)
            at_target = tl.where(here == place, b, 0.0)
            dx = gradient_of_logits(z, exp_at(z, scale, base, K.ptx), a, at_target, u, w_row, N, K)
            dx = tl.where(place > -2, dx, 0.0).to(x_ptr.dtype.element_ty)
            tl.store(x_ptr + at * P.stride + row.to(tl.int64) * P.stride, dx, mask=on & P.on)


@triton.jit
def part_of(n_classes, padded, part_classes, K: tl.constexpr):
    """The TokenPart of a program. Sizes are computed so that the compiler sees whole numbers of vectors."""
    padded = padded // K.vector * K.vector
    blocks = tl.cdiv(padded, K.block_tokens)
    program = tl.program_id(0)
    token = program % blocks * K.block_tokens + tl.arange(0, K.block_tokens)[None, :]
    start = program // blocks * part_classes
    stop = tl.minimum(start + part_classes, n_classes)
    return TokenPart(program // blocks, token, token < padded, start, stop, padded.to(tl.int64))


@triton.jit
def classes_of(p, K: tl.constexpr):
    """[classes, 1]: the classes of piece p, counted from the first class of all pieces."""
    return p * K.block_cols + tl.arange(0, K.block_cols)[:, None]


@triton.jit
def with_bias(x, bias_ptr, classes, on, K: tl.constexpr):
    """Logits plus the bias of their classes, in the dtype of the arithmetic; without a bias, what was read."""
    if bias_ptr is not None:
        return widen(x, K.cast_dtype) + widen(tl.load(bias_ptr + classes, mask=on, other=0.0), K.cast_dtype)
    else:
        return x


@triton.jit
def load_transposed(ptr, bias_ptr, first, at, P, hidden, K: tl.constexpr):
    """Tiles [classes, tokens] from class `at` on, one below another; `hidden` where no class or token is.

    ptr: at the program's tokens. first: the class of the block's first row.
    """
    ptr += at * P.stride
    pieces = ()
    PIECES: tl.constexpr = K.pieces
    for p in tl.static_range(PIECES):
        row = classes_of(p, K)
        piece = tl.load(ptr + row.to(tl.int64) * P.stride, mask=(row < P.stop - at) & P.on, other=hidden)
        piece = with_bias(piece, bias_ptr, first + at + row, row < P.stop - at, K)
        pieces = pieces + (piece,)  # noqa: RUF005  the compiler has no unpacking
    return pieces


@triton.jit
def load_finished(ptr, bias_ptr, first, at, P, hidden, N, K: tl.constexpr):
    """`load_transposed`. With a softcap the tiles hold finished logits."""
    pieces = load_transposed(ptr, bias_ptr, first, at, P, hidden, K)
    if K.capped:
        kept = ()
        for p in tl.static_range(len(pieces)):
            z = tl.where(classes_of(p, K) < P.stop - at, logits_of(pieces[p], N, K), NEG_INF)
            kept = kept + (z,)  # noqa: RUF005
        return kept
    else:
        return pieces
