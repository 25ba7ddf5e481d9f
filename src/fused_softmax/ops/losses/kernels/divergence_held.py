"""The divergences of pairs of rows, and the gradient of their sum or mean, written in the same pass.

Traffic: two reads and a write, or two writes where the targets get a gradient. One program holds both rows in
registers, or several hold parts of them and exchange their sums. A message has 64 bits, and a part sends several: the
student's state, the teacher's, and one sum. For jsd and tvd, whose sums need both states first, two sums follow in a
second exchange instead.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.exchange import collect_several, publish, slots_of, states_of
from fused_softmax.core.kernels.rows import body_of, load_pieces, part_of, prefetch_part, row_of_part, store_piece
from fused_softmax.core.kernels.spec import Rows
from fused_softmax.core.kernels.state import (
    LN2,
    LOG2E,
    NEG_INF,
    exp_at,
    hold_all,
    natural_exp,
    origin_of,
    rounded_product,
    widen,
)
from fused_softmax.ops.losses.kernels.common import exponent_at
from fused_softmax.ops.losses.kernels.divergence import (
    both_maxima,
    counted_from,
    fast_log2,
    finished,
    jsd_of,
    known_of,
    merged_pairs,
    numbers_of_pair,
    three_sums,
    two_sums,
    weights_of,
)
from fused_softmax.ops.losses.kernels.spec import BothStates, Exponents, HeldPair, PairSums

LEAST_NORMAL = tl.constexpr(1.1754943508222875e-38)


@triton.jit(do_not_specialize=["n_cols", "n_parts", "part_cols", "misalignment", "ahead"])
def _pair_held(
    slots_ptr, x_ptr, y_ptr, dx_ptr, dy_ptr, weight_ptr, temperature_ptr, target_temperature_ptr, dvalue_ptr, value_ptr,
    x_row_stride, y_row_stride, dx_row_stride, n_cols, n_parts, part_cols, misalignment, ahead,
    factor, cap, target_factor, target_cap, beta, smoothing, share, K: tl.constexpr,
):  # fmt: skip
    """A program holds a pair of rows, or one part of both (K.split), until the gradient is written.

    dvalue_ptr: the factor of each row's divergence in the result; 1 without it. share: a factor of all rows. If their
    product is 0, the row's gradient is 0, whatever the row holds.
    """
    program = tl.program_id(0)
    row = row_of_part(program, n_parts, K)
    if dvalue_ptr is not None:
        share *= tl.load(dvalue_ptr + row)
    P = HeldPair(
        Rows(x_ptr, x_row_stride, misalignment), Rows(y_ptr, y_row_stride, misalignment),
        Rows(dx_ptr, dx_row_stride, misalignment), dy_ptr, weight_ptr, value_ptr, n_cols, n_parts, part_cols,
        numbers_of_pair(factor, cap, target_factor, target_cap, beta, smoothing, temperature_ptr,
                        target_temperature_ptr, row),
        share,
    )  # fmt: skip
    row_slots_ptr = slots_ptr
    tag = 0
    if K.split:
        row_slots_ptr, tag = slots_of(slots_ptr, row, program % n_parts, n_parts, K.copies * K.messages, K)
    r = part_of(program % n_parts, row, P.x, n_cols, part_cols, K)
    x, y = load_pair(r, P, K)
    S = sums_of_held(x, y, r, P, K)
    if K.prefetch:
        prefetch_part(P.x, n_cols, n_parts, part_cols, tl.num_programs(0), ahead, K)
        prefetch_part(P.y, n_cols, n_parts, part_cols, tl.num_programs(0), ahead, K)
    x, y = hold_all(x, K.ptx), hold_all(y, K.ptx)
    if K.split:
        if K.publish:
            publish_sums(S, row_slots_ptr, r.part, n_parts, tag, K)
        if K.collect:
            S, left = collect_sums(row_slots_ptr, r.part, n_parts, tag, K)
            if left > 0:
                pair_alone(row, r.part, row_slots_ptr, tag, P, K)
            else:
                B, value, total = both_of(S, K)
                if K.twice:
                    value, total = shares_of_held(x, y, r, B, P, K)
                    x, y = hold_all(x, K.ptx), hold_all(y, K.ptx)
                    if K.publish_shares:
                        publish_shares(value, total, row_slots_ptr, r.part, n_parts, tag, K)
                    if K.collect_shares:
                        value, total, left = collect_shares(row_slots_ptr, r.part, n_parts, tag, K)
                        if left > 0:
                            pair_alone(row, r.part, row_slots_ptr, tag, P, K)
                        else:
                            finish_held(x, y, r, B, value, total, P, K)
                else:
                    finish_held(x, y, r, B, value, total, P, K)
    else:
        B, value, total = both_of(S, K)
        if K.twice:
            value, total = shares_of_held(x, y, r, B, P, K)
            x, y = hold_all(x, K.ptx), hold_all(y, K.ptx)
        finish_held(x, y, r, B, value, total, P, K)


@triton.jit
def load_pair(r, P, K: tl.constexpr):
    """The pieces of both rows, or of a part of both, as they were read."""
    PIECES: tl.constexpr = K.pieces
    X: tl.constexpr = K.past_x
    Y: tl.constexpr = K.past_y
    x = load_pieces(body_of(P.x, r.row, K) + r.start, r.cols, r.size, X, K, PIECES, K.full_pieces)
    y = load_pieces(body_of(P.y, r.row, K) + r.start, r.cols, r.size, Y, K, PIECES, K.full_pieces)
    return x, y


@triton.jit
def logits_of(x, on, factor, cap, SCALED: tl.constexpr, CAPPED: tl.constexpr, K: tl.constexpr):
    """The finished logits of a piece that is held; -inf past the row's end."""
    z = finished(widen(x, x.dtype, K.ptx), factor, cap, SCALED, CAPPED)
    if SCALED or CAPPED:  # otherwise -inf was read there
        z = tl.where(on, z, NEG_INF)
    return z


@triton.jit
def student_of(x, on, N, K: tl.constexpr):
    return logits_of(x, on, N.factor, N.cap, K.scaled, K.capped, K)


@triton.jit
def teacher_logits_of(y, on, N, K: tl.constexpr):
    return logits_of(y, on, N.target_factor, N.target_cap, K.target_scaled, K.target_capped, K)


@triton.jit
def on_of(p: tl.constexpr, r, K: tl.constexpr):
    """Which columns of piece p lie within the row."""
    if p < K.full_pieces:
        return tl.full(r.cols.shape, True, tl.int1)
    else:
        return p * K.block_cols + r.cols < r.size


@triton.jit
def maxima_of(x, y, r, N, K: tl.constexpr):
    """(the student's greatest logit, the teacher's, or 0 if the teacher gives no logits) of a row, or of its part."""
    m = maxima_of_lanes(x, r, N.factor, N.cap, K.scaled, K.capped, K)
    m_t = m
    if K.given == "logits":
        m_t = maxima_of_lanes(y, r, N.target_factor, N.target_cap, K.target_scaled, K.target_capped, K)
    return whole_maxima(m, m_t, K)


@triton.jit
def whole_maxima(m, m_t, K: tl.constexpr):
    if K.given == "logits":
        return both_maxima(m, m_t, K)
    else:
        return tl.max(m, axis=0), tl.zeros([], tl.float32)


@triton.jit
def maxima_of_lanes(x, r, factor, cap, SCALED: tl.constexpr, CAPPED: tl.constexpr, K: tl.constexpr):
    """The greatest logit in each column of the pieces of a row.

    16-bit logits without scale and softcap are compared without conversion, two in one instruction.
    """
    if K.ptx and x[0].dtype.primitive_bitwidth == 16 and not (SCALED or CAPPED):
        top = x[0]
        for p in tl.static_range(1, len(x)):
            top = packed_maximum(top, x[p])
        return top.to(tl.float32)
    else:
        top = logits_of(x[0], on_of(0, r, K), factor, cap, SCALED, CAPPED, K)
        for p in tl.static_range(1, len(x)):
            top = tl.maximum(top, logits_of(x[p], on_of(p, r, K), factor, cap, SCALED, CAPPED, K))
        return top


@triton.jit
def packed_maximum(a, b):
    if a.dtype.is_bf16():
        return tl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], a.dtype, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise("max.f16x2 $0, $1, $2;", "=r,r,r", [a, b], a.dtype, is_pure=True, pack=2)


@triton.jit
def exponents_of(m, m_t, K: tl.constexpr):
    """The Exponents of both rows, or of a part of both, from their maxima."""
    scale, base = origin_of(m, K.ptx)
    scale_t, base_t = origin_of(m_t, K.ptx)
    return Exponents(scale, base, scale_t, base_t, counted_from(m), counted_from(m_t))


@triton.jit
def terms_of(x, y, w, on, E, P, K: tl.constexpr):
    """(exp(z - m), z - zero, T up to a factor of the row, log T up to a term of the row) of a piece.

    w: the class weights.
    """
    z = student_of(x, on, P.N, K)
    e = exp_at(z, E.scale, E.base, K.ptx)
    if K.given == "logits":
        z_t = teacher_logits_of(y, on, P.N, K)
        return e, z - E.zero, exp_at(z_t, E.scale_t, E.base_t, K.ptx), z_t - E.zero_t
    elif K.given == "log_probs":
        log_t = widen(y, y.dtype, K.ptx)
        return e, z - E.zero, natural_exp(log_t, K.ptx), log_t
    else:
        t = widen(y, y.dtype, K.ptx)
        if K.smooth:
            t = t * (1.0 - P.N.smoothing) + P.N.smoothing / P.n_cols
            t = tl.where(on, t, 0.0)
        if K.divergence == "cross":
            return e, z - E.zero, t * w, t
        else:
            log_2 = tl.log2(t) if K.divergence == "reverse_kl" else fast_log2(t, K.ptx)  # of subnormals too
            return e, z - E.zero, t, log_2 * LN2


@triton.jit
def weights_at_piece(at, on, r, P, K: tl.constexpr):
    return weights_of(P.weight_ptr, r.start + at + r.cols, on, K)


@triton.jit
def add_terms(s, s_t, c, x, y, at, on, r, E, P, K: tl.constexpr):
    """(s, s_t, c) after adding the piece that begins `at` columns after the part's start."""
    e, z, t, log_t = terms_of(x, y, weights_at_piece(at, on, r, P, K), on, E, P, K)
    if K.divergence == "kl":
        c += lane_sums(rounded_product(t, tl.where(tl.abs(t) < LEAST_NORMAL, 0.0, log_t - z)), K)
    elif K.divergence == "cross":
        c -= lane_sums(tl.where(on, rounded_product(t, z), 0.0), K)  # 0 times -inf is NaN, as in torch
    elif K.divergence == "reverse_kl":
        c += lane_sums(rounded_product(e, tl.where(e == 0.0, 0.0, z - log_t)), K)
    return s + lane_sums(e, K), s_t + lane_sums(t, K), c


@triton.jit
def lane_sums(x, K: tl.constexpr):
    """The sum of each lane's columns of a piece. One sum a lane takes fewer registers than one a column.

    Products are rounded first, or the compiler may fuse them with additions here and not in `pair_alone`, which has to
    find the same bits.
    """
    WIDTH: tl.constexpr = K.vector
    return tl.sum(tl.reshape(x, [x.shape[0] // WIDTH, WIDTH]), axis=1)


@triton.jit
def zero_sums(K: tl.constexpr):
    LANES: tl.constexpr = K.block_cols // K.vector
    return tl.zeros([LANES], tl.float32)


@triton.jit
def sums_of_held(x, y, r, P, K: tl.constexpr):
    """The PairSums of a row, or of its part, that is held."""
    m, m_t = maxima_of(x, y, r, P.N, K)
    x, y = hold_all(x, K.ptx), hold_all(y, K.ptx)
    E = exponents_of(m, m_t, K)
    s = zero_sums(K)
    s_t, c = s, s
    for p in tl.static_range(len(x)):
        s, s_t, c = add_terms(s, s_t, c, x[p], y[p], p * K.block_cols, on_of(p, r, K), r, E, P, K)
    s, s_t, c = three_sums(s, s_t, c, K)
    return PairSums(m, s, m_t, s_t, c)


@triton.jit
def exponents_at(x, y, on, E, P, K: tl.constexpr):
    """(log2 Q, log2 T), each up to a term of the row, of a piece."""
    u = exponent_in_log2(student_of(x, on, P.N, K), E.scale, E.base, K)
    if K.given == "logits":
        v = exponent_in_log2(teacher_logits_of(y, on, P.N, K), E.scale_t, E.base_t, K)
    elif K.given == "log_probs":
        v = widen(y, y.dtype, K.ptx) * LOG2E
    else:
        v = fast_log2(widen(y, y.dtype, K.ptx), K.ptx)
    return u, v


@triton.jit
def exponent_in_log2(z, scale, base, K: tl.constexpr):
    if K.ptx:
        return exponent_at(z, scale, base, K)
    else:
        return exponent_at(z, scale, base, K) * LOG2E


@triton.jit
def publish_sums(S, slots_ptr, part, n_parts, tag, K: tl.constexpr):
    """Publish this part's sums to all programs of the row.

    The second number of a message must not be negative, so a sum that may be negative is sent as the first.
    """
    step = K.copies * n_parts
    none = tl.zeros([], tl.float32)
    publish(S.m, S.s, slots_ptr, part, n_parts, tag, K)
    if K.given == "logits":
        publish(S.m_t, S.s_t, slots_ptr + step, part, n_parts, tag, K)
    else:
        publish(S.s_t, none, slots_ptr + step, part, n_parts, tag, K)
    if not K.twice:
        publish(S.c, none, slots_ptr + 2 * step, part, n_parts, tag, K)


@triton.jit
def collect_sums(slots_ptr, part, n_parts, tag, K: tl.constexpr):
    """(the PairSums of a row, from those of its parts; whether a part is still missing)."""
    LANES: tl.constexpr = K.lanes
    of_s, of_t, of_c, missing = collect_several(slots_ptr, K.copies * n_parts, part, n_parts, tag, not K.twice, K)
    m, s = states_of(of_s, n_parts, K)
    m_t, s_t = states_of(of_t, n_parts, K)
    if K.given != "logits":
        m_t, s_t = tl.zeros([LANES], tl.float32), told_of(of_t, n_parts, K)
    c = tl.zeros([LANES], tl.float32)
    if not K.twice:
        c = told_of(of_c, n_parts, K)
    return merged_pairs(PairSums(m, s, m_t, s_t, c), K), missing


@triton.jit
def both_of(S, K: tl.constexpr):
    """(BothStates, divergence, total) of a pair of rows, the last two as `known_of` gives them."""
    ls, m_t, ls_t, value, total = known_of(S, K)
    of_t = tl.zeros_like(ls) + 1.0
    if K.given == "logits":
        of_t = 1.0 / S.s_t
    more = ls - ls_t
    if K.divergence == "jsd":  # in the units of `exponents_at`, and with the rounding of their bases
        more = tl.log2(S.s)
        if K.given == "logits":
            more -= tl.log2(S.s_t)
    return BothStates(S.m, m_t, 1.0 / S.s, of_t, ls, more), value, total


@triton.jit
def told_of(message, n_parts, K: tl.constexpr):
    """The first number of each part's message, one part a lane; 0 past the last part."""
    told, _ = states_of(message, n_parts, K)
    return tl.where(tl.arange(0, K.lanes) < n_parts, told, 0.0)


@triton.jit
def shares_of_held(x, y, r, B, P, K: tl.constexpr):
    """(jsd or tvd, sum Q f) of a row, or of its part, by the BothStates B."""
    E = exponents_of(B.m, B.m_t, K)
    of_t = zero_sums(K)
    of_q = of_t
    for p in tl.static_range(len(x)):
        of_t, of_q = add_shares(of_t, of_q, x[p], y[p], on_of(p, r, K), B, E, P, K)
    of_t, of_q = two_sums(of_t, of_q, K)
    return shares_of_sums(of_t, of_q, B, P.N, K)


@triton.jit
def add_shares(of_t, of_q, x, y, on, B, E, P, K: tl.constexpr):
    """(of_t, of_q) after adding a piece. `shares_of_sums` turns their sums into (jsd or tvd, sum Q f)."""
    if K.divergence == "tvd":
        e, _, t, _ = terms_of(x, y, 1.0, on, E, P, K)
        q, t = rounded_product(e, B.of_s), rounded_product(t, B.of_t)
        return of_t + lane_sums(tl.abs(q - t), K), of_q + lane_sums(signed(q, t), K)
    else:
        u, v = exponents_at(x, y, on, E, P, K)
        f, f_t = jsd_of(u, v, B.more, P.N, K)
        if K.given == "probs":
            t = widen(y, y.dtype, K.ptx)
            t = tl.where(t < 0.0, float("nan"), t)  # as the logarithm of a negative T is
        else:
            t = tl.exp2(v)
        return of_t + lane_sums(rounded_product(t, f_t), K), of_q + lane_sums(rounded_product(tl.exp2(u), f), K)


@triton.jit
def shares_of_sums(of_t, of_q, B, N, K: tl.constexpr):
    if K.divergence == "tvd":
        return 0.5 * of_t, 0.5 * of_q
    else:
        # The tensor comes first: under the interpreter the other factor is a constexpr, and constexpr * tensor fails.
        of_q = rounded_product(of_q, B.of_s * ((1.0 - N.beta) * -LN2))
        value = rounded_product(of_t, B.of_t * (N.beta * -LN2)) + of_q
        return value, tl.where(value == value, of_q, value)  # a gradient of NaN where the divergence is NaN


@triton.jit
def signed(q, t):
    """q times the sign of q - t; 0 where both are equal."""
    return tl.where(q > t, q, tl.where(q < t, -q, q - t))


@triton.jit
def publish_shares(value, of_q, slots_ptr, part, n_parts, tag, K: tl.constexpr):
    step = K.copies * n_parts
    none = tl.zeros([], tl.float32)
    publish(value, none, slots_ptr + 2 * step, part, n_parts, tag, K)
    publish(of_q, none, slots_ptr + 3 * step, part, n_parts, tag, K)


@triton.jit
def collect_shares(slots_ptr, part, n_parts, tag, K: tl.constexpr):
    """(jsd or tvd of a row, its sum Q f, whether a part is still missing)."""
    step = K.copies * n_parts
    of_value, of_q, _, missing = collect_several(slots_ptr + 2 * step, step, part, n_parts, tag, False, K)
    value, total = told_of(of_value, n_parts, K), told_of(of_q, n_parts, K)
    value, total = two_sums(value, total, K)
    return value, total, missing


@triton.jit
def finish_held(x, y, r, B, value, total, P, K: tl.constexpr):
    """Store the gradient of a row, or of its part. The first part also stores the divergence."""
    if r.part == 0:
        tl.store(P.value_ptr + r.row, value)
    dx_body, dy_body = bodies_of(r, P, K)
    if P.dvalue == 0.0:
        for p in tl.static_range(len(x)):
            zeros = tl.zeros(r.cols.shape, tl.float32)
            store_piece(dx_body, zeros.to(P.dx.ptr.dtype.element_ty), p, r.cols, r.size, K)
            if P.dy_ptr is not None:
                store_piece(dy_body, zeros.to(P.dy_ptr.dtype.element_ty), p, r.cols, r.size, K)
    else:
        E = exponents_of(B.m, B.m_t, K)
        for p in tl.static_range(len(x)):
            dx, dy = gradient_of_piece(x[p], y[p], p * K.block_cols, on_of(p, r, K), r, B, E, total, P, K)
            store_piece(dx_body, dx.to(P.dx.ptr.dtype.element_ty), p, r.cols, r.size, K)
            if P.dy_ptr is not None:
                store_piece(dy_body, dy.to(P.dy_ptr.dtype.element_ty), p, r.cols, r.size, K)


@triton.jit
def bodies_of(r, P, K: tl.constexpr):
    """(where to write the gradient of a row, or of its part; where to write the target's gradient, if it is wanted)."""
    dy_body = P.dx.ptr
    if P.dy_ptr is not None:
        dy_body = P.dy_ptr + (r.row * (P.n_cols // K.vector * K.vector) + r.start)
    return body_of(P.dx, r.row, K) + r.start, dy_body


@triton.jit
def gradient_of_piece(x, y, at, on, r, B, E, total, P, K: tl.constexpr):
    """(the gradient of a piece by the student's logits, for "cross" that by the target)."""
    w = weights_at_piece(at, on, r, P, K)
    e, z, t, log_t = terms_of(x, y, w, on, E, P, K)
    g = P.dvalue
    if K.scaled:
        g *= P.N.factor
    of_e = g * B.of_s
    if (K.divergence == "kl") | (K.divergence == "cross"):
        dx = e * (of_e * total) - t * (g * B.of_t)
    elif K.divergence == "reverse_kl":
        dx = e * of_e * tl.where(e == 0.0, 0.0, z - log_t - (B.more + total))
    elif K.divergence == "tvd":
        q = rounded_product(e, B.of_s)
        dx = (0.5 * g) * signed(q, rounded_product(t, B.of_t)) - q * (g * total)
    else:
        u, v = exponents_at(x, y, on, E, P, K)
        f, _ = jsd_of(u, v, B.more, P.N, K)
        dx = tl.exp2(u) * (f * (of_e * (1.0 - P.N.beta) * -LN2) - of_e * total)
    if K.capped:
        size = tl.abs(student_of(x, on, P.N, K))
        dx *= (P.N.cap - size) / P.N.cap * (1.0 + size / P.N.cap)
    return dx, P.dvalue * w * (1.0 - P.N.smoothing) * (B.ls - z)


@triton.jit(noinline=True)
def pair_alone(row, part, slots_ptr, tag, P, K: tl.constexpr):
    """`finish_held` for a row of which this program misses other parts' sums: it computes them all, with the same bits.

    Neither row is overwritten, so every part can still be read. Reading it piece by piece needs few registers.
    """
    LANES: tl.constexpr = K.lanes
    j = tl.arange(0, LANES)
    m = tl.full([LANES], NEG_INF, tl.float32)
    s = tl.zeros([LANES], tl.float32)
    m_t, s_t, c = (m if K.given == "logits" else s), s, s
    for other in range(P.n_parts):
        S = sums_of_part(part_of(other, row, P.x, P.n_cols, P.part_cols, K), P, K)
        here = j == other
        m, s, c = tl.where(here, S.m, m), tl.where(here, S.s, s), tl.where(here, S.c, c)
        m_t, s_t = tl.where(here, S.m_t, m_t), tl.where(here, S.s_t, s_t)
    B, value, total = both_of(merged_pairs(PairSums(m, s, m_t, s_t, c), K), K)
    E = exponents_of(B.m, B.m_t, K)
    if K.twice:
        values = tl.zeros([LANES], tl.float32)
        totals = values
        for other in range(P.n_parts):
            r = part_of(other, row, P.x, P.n_cols, P.part_cols, K)
            value_p = zero_sums(K)
            total_p = value_p
            for at in range(0, r.size, K.block_cols):
                x, y = load_piece(at, r, P, K)
                value_p, total_p = add_shares(value_p, total_p, x, y, at + r.cols < r.size, B, E, P, K)
            value_p, total_p = two_sums(value_p, total_p, K)
            value, total = shares_of_sums(value_p, total_p, B, P.N, K)
            values, totals = tl.where(j == other, value, values), tl.where(j == other, total, totals)
            if K.publish_shares:  # noqa: SIM102  a constexpr, and a tensor
                if other == part:  # every launch has to write all slots of a part
                    publish_shares(value, total, slots_ptr, part, P.n_parts, tag, K)
        value, total = tl.sum(values, axis=0), tl.sum(totals, axis=0)
    if part == 0:
        tl.store(P.value_ptr + row, value)
    r = part_of(part, row, P.x, P.n_cols, P.part_cols, K)
    dx_body, dy_body = bodies_of(r, P, K)
    for at in range(0, r.size, K.block_cols):
        on = at + r.cols < r.size
        x, y = load_piece(at, r, P, K)
        dx, dy = gradient_of_piece(x, y, at, on, r, B, E, total, P, K)
        dx = tl.where(P.dvalue == 0.0, 0.0, dx)
        tl.store(dx_body + (at + r.cols), dx.to(P.dx.ptr.dtype.element_ty), mask=on, cache_modifier=".cs")
        if P.dy_ptr is not None:
            dy = tl.where(P.dvalue == 0.0, 0.0, dy)
            tl.store(dy_body + (at + r.cols), dy.to(P.dy_ptr.dtype.element_ty), mask=on, cache_modifier=".cs")


@triton.jit
def load_piece(at, r, P, K: tl.constexpr):
    """The pieces of both rows that begin `at` columns after the start of their parts."""
    X: tl.constexpr = K.past_x
    Y: tl.constexpr = K.past_y
    x = load_pieces(body_of(P.x, r.row, K) + r.start + at, r.cols, r.size - at, X, K, 1, 0)
    y = load_pieces(body_of(P.y, r.row, K) + r.start + at, r.cols, r.size - at, Y, K, 1, 0)
    return x[0], y[0]


@triton.jit
def sums_of_part(r, P, K: tl.constexpr):
    """`sums_of_held` of a part that is read piece by piece."""
    top = tl.full(r.cols.shape, NEG_INF, tl.float32)
    top_t = top
    for at in range(0, r.size, K.block_cols):
        x, y = load_piece(at, r, P, K)
        top = tl.maximum(top, student_of(x, at + r.cols < r.size, P.N, K))
        if K.given == "logits":
            top_t = tl.maximum(top_t, teacher_logits_of(y, at + r.cols < r.size, P.N, K))
    m, m_t = whole_maxima(top, top_t, K)
    E = exponents_of(m, m_t, K)
    s = zero_sums(K)
    s_t, c = s, s
    for at in range(0, r.size, K.block_cols):
        x, y = load_piece(at, r, P, K)
        s, s_t, c = add_terms(s, s_t, c, x, y, at, at + r.cols < r.size, r, E, P, K)
    s, s_t, c = three_sums(s, s_t, c, K)
    return PairSums(m, s, m_t, s_t, c)
