"""The divergence of a teacher's distribution T and a student's Q of each row, and its gradient by the student's logits.

kl = sum T (log T - log Q),  reverse_kl = sum Q (log Q - log T),  tvd = 1/2 sum |Q - T|,
jsd = b sum T (log T - log M) + (1 - b) sum Q (log Q - log M),  M = b T + (1 - b) Q,
cross = -sum w T log Q, where T is spread by a smoothing e: T (1 - e) + e / n_classes.
d/dz_c of kl and cross is S Q_c - w T_c, S = sum w T;  of the others Q_c (f_c - sum Q f), where f is log Q - log T, or
1/2 sign(Q - T), or (1 - b) (log Q - log M).
Traffic: kl, reverse_kl and cross take two reads, jsd and tvd four; the gradient takes two reads and a write.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.rows import body_of, lanes_of_part, tile_part_of, whole_vectors
from fused_softmax.core.kernels.spec import Rows
from fused_softmax.core.kernels.state import (
    LN2,
    LOG2E,
    NEG_INF,
    capped,
    exp_at,
    log_sum_of,
    natural_exp,
    origin_of,
    rounded_product,
    weight_of,
)
from fused_softmax.ops.losses.kernels.scan import side_by_side
from fused_softmax.ops.losses.kernels.spec import OfTeacher, PairNumbers, PairSums


@triton.jit
def finished(x, factor, cap, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    """The finished logits of a piece that was read, in fp32."""
    z = x.to(tl.float32)
    if SCALED:
        z = rounded_product(z, factor)  # fused into a later subtraction, it would not be rounded as m is
    if CAPPED:
        z = capped(z, cap)
    return z


@triton.jit
def numbers_of_pair(factor, cap, target_factor, target_cap, beta, smoothing, temperature_ptr, target_temperature_ptr,
                    row):  # fmt: skip
    """The PairNumbers of rows: scales and softcaps over the temperatures, NaN where one is not above 0."""
    if temperature_ptr is not None:
        t = tl.load(temperature_ptr + row)
        t = tl.where(t > 0.0, t, float("nan"))
        factor, cap = factor / t, cap / t
    if target_temperature_ptr is not None:
        t = tl.load(target_temperature_ptr + row)
        t = tl.where(t > 0.0, t, float("nan"))
        target_factor, target_cap = target_factor / t, target_cap / t
    return PairNumbers(factor, cap, target_factor, target_cap, beta, smoothing)


@triton.jit
def teacher_of(y, w, m, ls, n_cols, N, K: tl.constexpr):
    """(T, log T) of a piece of the teacher's row.

    m, ls: the state of the teacher's logits. w: the class weights of "cross", by which T is multiplied.
    """
    if K.given == "logits":  # one by one: m + ls would be rounded at the size of m
        log_t = finished(y, N.target_factor, N.target_cap, K.target_scaled, K.target_capped) - m - ls
        return OfTeacher(natural_exp(log_t, K.ptx), log_t)
    elif K.given == "log_probs":
        log_t = y.to(tl.float32)
        return OfTeacher(natural_exp(log_t, K.ptx), log_t)
    else:
        t = y.to(tl.float32)
        if K.smooth:
            t = t * (1.0 - N.smoothing) + N.smoothing / n_cols
        if K.divergence == "cross":
            return OfTeacher(t * w, t)
        else:
            return OfTeacher(t, tl.log(t))


@triton.jit
def part_of_one(x_ptr, x_row_stride, misalignment, row, part, n_cols, part_cols, K: tl.constexpr):
    """(the part of a row, where the row's aligned body begins)."""
    x = Rows(x_ptr, x_row_stride, misalignment)
    r = lanes_of_part(part, row, x, n_cols, whole_vectors(part_cols, K), K)
    return side_by_side(r, K), body_of(x, row, K)


@triton.jit
def weights_of(weight_ptr, cols, on, K: tl.constexpr):
    if K.weighted:
        return tl.load(weight_ptr + cols, mask=on, other=0.0)
    else:
        return 1.0


@triton.jit
def faded(c, fade):
    """c * fade, but 0 where fade is 0, even if c is infinite or NaN."""
    return tl.where(fade == 0.0, 0.0, c * fade)


@triton.jit
def counted_from(m):
    """The origin of logits whose maximum is m: m itself, or 0 if that is not finite.

    Logits less this origin keep their small differences, however large they all are.
    """
    return tl.where(tl.abs(m) < float("inf"), m, 0.0)


@triton.jit
def recounted(c, s, s_t, m, m_t, to, to_t, K: tl.constexpr):
    """The sum c of a PairSums, converted from the maxima m and m_t to the new maxima `to` and `to_t`."""
    moved = counted_from(to) - counted_from(m)
    if K.given == "logits":
        moved -= counted_from(to_t) - counted_from(m_t)
    if K.divergence == "reverse_kl":
        return c - tl.where(s == 0.0, 0.0, s * moved)
    elif (K.divergence == "kl") | (K.divergence == "cross"):
        return c + tl.where(s_t == 0.0, 0.0, s_t * moved)
    else:
        return c


@triton.jit
def scan_pair(x_body, y_body, weight_ptr, r, end, n_cols, N, K: tl.constexpr):
    """The PairSums of a part of a row, read tile by tile."""
    HEIGHT: tl.constexpr = K.block_cols // K.lane_cols
    m = tl.full([HEIGHT, 1], NEG_INF, tl.float32)
    s = tl.zeros([HEIGHT, 1], tl.float32)
    m_t = tl.full([HEIGHT, 1], NEG_INF, tl.float32)
    s_t = tl.zeros([HEIGHT, 1], tl.float32)
    c = tl.zeros([HEIGHT, 1], tl.float32)
    for at in range(r.start, end, K.block_cols):
        on = r.cols < end - at
        x = tl.load(x_body + (at + r.cols), mask=on, other=0.0)
        y = tl.load(y_body + (at + r.cols), mask=on, other=0.0)
        z = tl.where(on, finished(x, N.factor, N.cap, K.scaled, K.capped), NEG_INF)
        m_tile = tl.maximum(m, tl.max(z, axis=1)[:, None])
        scale, base = origin_of(m_tile, K.ptx)
        fade = weight_of(m, m_tile, K.ptx)
        e = exp_at(z, scale, base, K.ptx)
        m_t_tile = m_t
        if K.given == "logits":
            z_t = finished(y, N.target_factor, N.target_cap, K.target_scaled, K.target_capped)
            z_t = tl.where(on, z_t, NEG_INF)
            m_t_tile = tl.maximum(m_t, tl.max(z_t, axis=1)[:, None])
            scale_t, base_t = origin_of(m_t_tile, K.ptx)
            fade_t = weight_of(m_t, m_t_tile, K.ptx)
            t = exp_at(z_t, scale_t, base_t, K.ptx)
            log_t = z_t - counted_from(m_t_tile)
        else:
            T = teacher_of(y, weights_of(weight_ptr, at + r.cols, on, K), 0.0, 0.0, n_cols, N, K)
            t, log_t = tl.where(on, T.p, 0.0), T.log_p
            fade_t = 1.0
        z -= counted_from(m_tile)
        c = recounted(c, s, s_t, m, m_t, m_tile, m_t_tile, K)
        if K.divergence == "kl":
            c = faded(c, fade_t) + tl.sum(tl.where(t == 0.0, 0.0, t * (log_t - z)), axis=1)[:, None]
        elif K.divergence == "cross":
            c -= tl.sum(tl.where(on, t * z, 0.0), axis=1)[:, None]  # 0 times -inf is NaN, as in torch
        elif K.divergence == "reverse_kl":
            c = faded(c, fade) + tl.sum(tl.where(e == 0.0, 0.0, e * (z - log_t)), axis=1)[:, None]
        s = s * fade + tl.sum(e, axis=1)[:, None]
        s_t = s_t * fade_t + tl.sum(t, axis=1)[:, None]
        m, m_t = m_tile, m_t_tile
    top, top_t = tl.max(m, axis=0)[:, None], tl.max(m_t, axis=0)[:, None]
    fade, fade_t = weight_of(m, top, K.ptx), weight_of(m_t, top_t, K.ptx)
    c = recounted(c, s, s_t, m, m_t, top, top_t, K)
    if K.divergence == "reverse_kl":
        c = faded(c, fade)
    elif K.given == "logits":
        c = faded(c, fade_t)
    s = tl.sum(s * fade, axis=0)
    if K.given == "logits":
        s_t = s_t * fade_t
    return PairSums(tl.max(m, axis=0), s, tl.max(m_t, axis=0), tl.sum(s_t, axis=0), tl.sum(c, axis=0))


@triton.jit
def known_of(S, K: tl.constexpr):
    """(ls, m_t, ls_t, divergence, total) of rows, from their PairSums.

    The last two are 0 for jsd and tvd, which take a second pass. total is what the gradient needs of the whole row: for
    reverse_kl the divergence itself, for kl and cross the sum of T. m_t and ls_t are 0 if the teacher gives no logits.
    """
    ls = log_sum_of(S.m, S.s, K.ptx)
    ls_t = tl.zeros_like(ls)
    m_t = tl.zeros_like(ls)
    if K.given == "logits":
        ls_t = log_sum_of(S.m_t, S.s_t, K.ptx)
        m_t = S.m_t
    more = ls - ls_t  # lse - lse_t, each less its own row's maximum, as in S.c
    if K.shard:  # logits of -inf alone: the merge knows by the share, and inf - inf would be NaN
        more = tl.where((S.m == NEG_INF) | (m_t == NEG_INF), 0.0, more)
    value = tl.zeros_like(ls)
    total = value
    if K.divergence == "reverse_kl":
        value = S.c / S.s - more
        total = value
    elif (K.divergence == "kl") & (K.given == "logits"):
        value = S.c / S.s_t + more
        total = tl.zeros_like(ls) + 1.0
    elif (K.divergence == "kl") | (K.divergence == "cross"):
        value = S.c + tl.where(S.s_t == 0.0, 0.0, S.s_t * more)
        total = S.s_t
    return ls, m_t, ls_t, value, total


@triton.jit
def store_pair(m_ptr, ls_ptr, m_t_ptr, ls_t_ptr, value_ptr, total_ptr, row, S, K: tl.constexpr):
    """Store what `known_of` finds of rows."""
    ls, m_t, ls_t, value, total = known_of(S, K)
    tl.store(m_ptr + row, S.m)
    tl.store(ls_ptr + row, ls)
    if K.given == "logits":
        tl.store(m_t_ptr + row, m_t)
        tl.store(ls_t_ptr + row, ls_t)
    if not K.twice:
        tl.store(value_ptr + row, value)
        tl.store(total_ptr + row, total)


@triton.jit
def faded_pairs(S, K: tl.constexpr):
    """The PairSums of a row's parts, one part a lane, all counted from the row's maxima, so that sums can be added."""
    m, m_t = both_maxima(S.m, S.m_t, K)
    fade = weight_of(S.m, m, K.ptx)
    fade_t = tl.zeros_like(fade) + 1.0
    if K.given == "logits":
        fade_t = weight_of(S.m_t, m_t, K.ptx)
    c = recounted(S.c, S.s, S.s_t, S.m, S.m_t, m, m_t, K)
    c = faded(c, fade if K.divergence == "reverse_kl" else fade_t)
    return PairSums(m, rounded_product(S.s, fade), m_t, rounded_product(S.s_t, fade_t), c)


@triton.jit
def merged_pairs(S, K: tl.constexpr):
    """The PairSums of a row, from those of its parts, one part a lane."""
    S = faded_pairs(S, K)
    s, s_t, c = three_sums(S.s, S.s_t, S.c, K)
    return PairSums(S.m, s, S.m_t, s_t, c)


@triton.jit
def larger_of_both(a, b, a_2, b_2):
    return tl.maximum(a, a_2), tl.maximum(b, b_2)


@triton.jit
def added_two(a, b, a_2, b_2):
    return a + a_2, b + b_2


@triton.jit
def added_three(a, b, c, a_2, b_2, c_2):
    return a + a_2, b + b_2, c + c_2


@triton.jit
def both_maxima(a, b, K: tl.constexpr):
    """The maxima of two vectors. They are found together, so that warps wait for each other once."""
    if K.ptx:
        return tl.reduce((a, b), 0, larger_of_both)
    else:
        return tl.max(a, axis=0), tl.max(b, axis=0)


@triton.jit
def two_sums(a, b, K: tl.constexpr):
    """The sums of two vectors, found together."""
    if K.ptx:
        return tl.reduce((a, b), 0, added_two)
    else:
        return tl.sum(a, axis=0), tl.sum(b, axis=0)


@triton.jit
def three_sums(a, b, c, K: tl.constexpr):
    """The sums of three vectors, found together."""
    if K.ptx:
        return tl.reduce((a, b, c), 0, added_three)
    else:
        return tl.sum(a, axis=0), tl.sum(b, axis=0), tl.sum(c, axis=0)


@triton.jit(do_not_specialize=["n_rows", "n_cols", "n_parts", "part_cols", "misalignment"])
def _pair_states(
    x_ptr, y_ptr, weight_ptr, temperature_ptr, target_temperature_ptr, states_ptr, m_ptr, ls_ptr, m_t_ptr, ls_t_ptr,
    value_ptr, total_ptr,
    x_row_stride, y_row_stride, n_rows, n_cols, n_parts, part_cols, misalignment,
    factor, cap, target_factor, target_cap, beta, smoothing, K: tl.constexpr,
):  # fmt: skip
    """A program has a row; or, if states_ptr is given, a part of a row, whose sums it stores."""
    program = tl.program_id(0)
    row = (program // n_parts).to(tl.int64)
    part = (program % n_parts).to(tl.int64)
    N = numbers_of_pair(factor, cap, target_factor, target_cap, beta, smoothing, temperature_ptr,
                        target_temperature_ptr, row)  # fmt: skip
    r, x_body = part_of_one(x_ptr, x_row_stride, misalignment, row, part, n_cols, part_cols, K)
    _, y_body = part_of_one(y_ptr, y_row_stride, misalignment, row, part, n_cols, part_cols, K)
    end = tl.minimum(r.start + whole_vectors(part_cols, K), r.body)
    S = scan_pair(x_body, y_body, weight_ptr, r, end, n_cols, N, K)
    if states_ptr is not None:
        j = tl.arange(0, 1)
        at = states_ptr + row * n_parts + part + j
        step = n_rows.to(tl.int64) * n_parts
        tl.store(at, S.m)
        tl.store(at + step, S.s)
        tl.store(at + 2 * step, S.m_t)
        tl.store(at + 3 * step, S.s_t)
        tl.store(at + 4 * step, S.c)
    else:
        store_pair(m_ptr, ls_ptr, m_t_ptr, ls_t_ptr, value_ptr, total_ptr, row + tl.arange(0, 1), S, K)


@triton.jit
def rows_of_block(n_rows, K: tl.constexpr):
    """The rows of a program. Past the last row, the last row again."""
    BLOCK: tl.constexpr = K.block_rows
    return tl.minimum(tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), n_rows - 1)


@triton.jit(do_not_specialize=["n_rows", "n_parts"])
def _merge_pairs(
    states_ptr, m_ptr, ls_ptr, m_t_ptr, ls_t_ptr, value_ptr, total_ptr, n_rows, n_parts, K: tl.constexpr
):  # fmt: skip
    """The results of rows, from the sums of their parts, which are added in the order of their columns."""
    row = rows_of_block(n_rows, K)
    step = n_rows.to(tl.int64) * n_parts
    at = states_ptr + row * n_parts
    m = tl.full(row.shape, NEG_INF, tl.float32)
    m_t = tl.full(row.shape, NEG_INF, tl.float32)
    for p in range(n_parts):
        m = tl.maximum(m, tl.load(at + p))
        m_t = tl.maximum(m_t, tl.load(at + 2 * step + p))
    s = tl.zeros(row.shape, tl.float32)
    s_t = tl.zeros(row.shape, tl.float32)
    c = tl.zeros(row.shape, tl.float32)
    for p in range(n_parts):
        m_p, s_p = tl.load(at + p), tl.load(at + step + p)
        m_t_p, s_t_p = tl.load(at + 2 * step + p), tl.load(at + 3 * step + p)
        fade = weight_of(m_p, m, K.ptx)
        s += s_p * fade
        fade_t = 1.0
        if K.given == "logits":
            fade_t = weight_of(m_t_p, m_t, K.ptx)
        s_t += s_t_p * fade_t
        c_p = recounted(tl.load(at + 4 * step + p), s_p, s_t_p, m_p, m_t_p, m, m_t, K)
        c += faded(c_p, fade if K.divergence == "reverse_kl" else fade_t)
    S = PairSums(m, s, m_t, s_t, c)
    store_pair(m_ptr, ls_ptr, m_t_ptr, ls_t_ptr, value_ptr, total_ptr, row, S, K)


@triton.jit
def fast_log2(x, PTX: tl.constexpr):
    """log2(x). On NVIDIA it is the approximate instruction, which gives -inf for a subnormal x."""
    if PTX:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@triton.jit
def jsd_of(u, v, more, N, K: tl.constexpr):
    """(log2 M - log2 Q, log2 M - log2 T) of a piece, M = beta T + (1 - beta) Q. Neither is NaN.

    u, v: log2 Q and log2 T, each up to a term of the row. more: by how much log2 T - log2 Q exceeds v - u. Both results
    follow from the ratio of the smaller one of T and Q to the larger one, whose logarithm is cut at -100. Beyond that,
    what the smaller one adds to the divergence is 0.
    """
    ratio = v - u + more
    if K.ptx:  # the instruction turns NaN, as -inf less -inf is, into -100
        ratio = tl.minimum(tl.maximum(ratio, -100.0), 100.0)
    else:
        ratio = tl.minimum(tl.where(ratio > -100.0, ratio, -100.0), 100.0)
    by_t = ratio > 0.0
    of_larger, of_smaller = tl.where(by_t, N.beta, 1.0 - N.beta), tl.where(by_t, 1.0 - N.beta, N.beta)
    smaller = tl.exp2(tl.abs(ratio) * -1.0)  # a minus would be compiled into a subtraction from 0
    log_2 = fast_log2(tl.fma(smaller, of_smaller, of_larger), K.ptx)
    return tl.maximum(ratio, 0.0) + log_2, log_2 - tl.minimum(ratio, 0.0)


@triton.jit
def share_of(log_q, T, N, K: tl.constexpr):
    """(f of the gradient Q (f - sum Q f), what the column adds to jsd or tvd)."""
    q = natural_exp(log_q, K.ptx)
    if K.divergence == "tvd":
        sign = tl.where(q > T.p, 1.0, tl.where(q < T.p, -1.0, q - T.p))  # 0 if both are equal, NaN if one is NaN
        return 0.5 * sign, 0.5 * tl.abs(q - T.p)
    elif K.divergence == "jsd":
        f, f_t = jsd_of(log_q * LOG2E, T.log_p * LOG2E, 0.0, N, K)
        f = tl.where(T.log_p == T.log_p, f * ((1.0 - N.beta) * -LN2), float("nan"))
        return f, T.p * f_t * (N.beta * -LN2) + q * f
    else:
        return log_q - T.log_p, 0.0


@triton.jit(do_not_specialize=["n_rows", "n_cols", "n_parts", "part_cols", "misalignment"])
def _pair_sums(
    x_ptr, y_ptr, temperature_ptr, target_temperature_ptr, m_ptr, ls_ptr, m_t_ptr, ls_t_ptr, sums_ptr,
    x_row_stride, y_row_stride, n_rows, n_cols, n_parts, part_cols, misalignment,
    factor, cap, target_factor, target_cap, beta, smoothing, K: tl.constexpr,
):  # fmt: skip
    """(jsd or tvd, sum Q f) of each part of a row, from the states of both rows: [2, n_rows, n_parts]."""
    program = tl.program_id(0)
    row = (program // n_parts).to(tl.int64)
    part = (program % n_parts).to(tl.int64)
    N = numbers_of_pair(factor, cap, target_factor, target_cap, beta, smoothing, temperature_ptr,
                        target_temperature_ptr, row)  # fmt: skip
    r, x_body = part_of_one(x_ptr, x_row_stride, misalignment, row, part, n_cols, part_cols, K)
    _, y_body = part_of_one(y_ptr, y_row_stride, misalignment, row, part, n_cols, part_cols, K)
    end = tl.minimum(r.start + whole_vectors(part_cols, K), r.body)
    m, ls = tl.load(m_ptr + row), tl.load(ls_ptr + row)
    m_t, ls_t = 0.0, 0.0
    if K.given == "logits":
        m_t, ls_t = tl.load(m_t_ptr + row), tl.load(ls_t_ptr + row)
    HEIGHT: tl.constexpr = K.block_cols // K.lane_cols
    value = tl.zeros([HEIGHT], tl.float32)
    of_q = tl.zeros([HEIGHT], tl.float32)
    for at in range(r.start, end, K.block_cols):
        on = r.cols < end - at
        x = tl.load(x_body + (at + r.cols), mask=on, other=0.0)
        y = tl.load(y_body + (at + r.cols), mask=on, other=0.0)
        log_q = finished(x, N.factor, N.cap, K.scaled, K.capped) - m - ls
        f, here = share_of(log_q, teacher_of(y, 1.0, m_t, ls_t, n_cols, N, K), N, K)
        value += tl.sum(tl.where(on, here, 0.0), axis=1)
        of_q += tl.sum(tl.where(on, natural_exp(log_q, K.ptx) * f, 0.0), axis=1)
    at_part = row * n_parts + part
    tl.store(sums_ptr + at_part, tl.sum(value, axis=0))
    tl.store(sums_ptr + n_rows.to(tl.int64) * n_parts + at_part, tl.sum(of_q, axis=0))


@triton.jit(do_not_specialize=["n_rows", "n_parts"])
def _merge_sums(sums_ptr, value_ptr, total_ptr, n_rows, n_parts, K: tl.constexpr):
    """Both sums of rows, from those of their parts, which are added in the order of their columns."""
    row = rows_of_block(n_rows, K)
    value = tl.zeros(row.shape, tl.float32)
    of_q = tl.zeros(row.shape, tl.float32)
    at = sums_ptr + row * n_parts
    for p in range(n_parts):
        value += tl.load(at + p)
        of_q += tl.load(at + n_rows.to(tl.int64) * n_parts + p)
    tl.store(value_ptr + row, value)
    tl.store(total_ptr + row, of_q)


@triton.jit
def gradient_of_pair(x, y, w, m, ls, m_t, ls_t, total, g, n_cols, N, K: tl.constexpr):
    """(the gradient by the student's logits of a piece, log Q).

    g: the incoming gradient of the divergence. If it is 0, so is the result.
    """
    z = finished(x, N.factor, N.cap, K.scaled, K.capped)
    log_q = z - m - ls
    T = teacher_of(y, w, m_t, ls_t, n_cols, N, K)
    q = natural_exp(log_q, K.ptx)
    if (K.divergence == "kl") | (K.divergence == "cross"):
        dz = total * q - T.p
    else:
        f, _ = share_of(log_q, T, N, K)
        dz = tl.where(q == 0.0, 0.0, q * (f - total))
    slope = tl.zeros(z.shape, tl.float32) + 1.0
    if K.scaled:
        slope *= N.factor
    if K.capped:
        size = tl.abs(z)
        slope *= (N.cap - size) / N.cap * (1.0 + size / N.cap)
    return tl.where(g == 0.0, 0.0, g * dz * slope), log_q


@triton.jit(do_not_specialize=["n_rows", "n_cols", "n_parts", "part_cols", "misalignment"])
def _pair_gradient(
    x_ptr, y_ptr, dx_ptr, dy_ptr, weight_ptr, temperature_ptr, target_temperature_ptr, m_ptr, ls_ptr, m_t_ptr, ls_t_ptr,
    total_ptr, dvalue_ptr,
    x_row_stride, y_row_stride, dx_row_stride, n_rows, n_cols, n_parts, part_cols, misalignment,
    factor, cap, target_factor, target_cap, beta, smoothing, K: tl.constexpr,
):  # fmt: skip
    """The gradient of a part of a row by the student's logits; with dy_ptr also that of cross by the probabilities.

    A row whose incoming gradient is 0 gets 0, whatever it holds.
    """
    x_rows = Rows(x_ptr, x_row_stride, misalignment)
    part_cols = whole_vectors(part_cols, K)
    r = tile_part_of(x_rows, n_rows, n_cols, n_parts, part_cols, K)
    N = numbers_of_pair(factor, cap, target_factor, target_cap, beta, smoothing, temperature_ptr,
                        target_temperature_ptr, r.row)  # fmt: skip
    m, ls = tl.load(m_ptr + r.row), tl.load(ls_ptr + r.row)
    total, g = tl.load(total_ptr + r.row), tl.load(dvalue_ptr + r.row)
    m_t, ls_t = tl.zeros(r.row.shape, tl.float32), tl.zeros(r.row.shape, tl.float32)
    if K.given == "logits":
        m_t, ls_t = tl.load(m_t_ptr + r.row), tl.load(ls_t_ptr + r.row)
    y_body = body_of(Rows(y_ptr, y_row_stride, misalignment), r.row, K)
    x_body = body_of(x_rows, r.row, K)
    dx_body = body_of(Rows(dx_ptr, dx_row_stride, misalignment), r.row, K)
    end = tl.minimum(r.body, r.start + part_cols)
    # Rows past the end repeat the last row. They write nothing, because its logits may be overwritten by then.
    live = (tl.program_id(0) // n_parts).to(tl.int64) * K.block_rows + tl.arange(0, K.block_rows)[:, None] < n_rows
    for at in range(r.start, end, K.block_cols):
        on = (r.cols < end - at) & live
        x = tl.load(x_body + (at + r.cols), mask=on, other=0.0)
        y = tl.load(y_body + (at + r.cols), mask=on, other=0.0)
        w = weights_of(weight_ptr, at + r.cols, on, K)
        dx, log_q = gradient_of_pair(x, y, w, m, ls, m_t, ls_t, total, g, n_cols, N, K)
        tl.store(dx_body + (at + r.cols), dx.to(dx_ptr.dtype.element_ty), mask=on)
        if dy_ptr is not None:
            dy = tl.where(g == 0.0, 0.0, g * w * (1.0 - N.smoothing) * -log_q)
            tl.store(dy_ptr + r.row * n_cols + (at + r.cols), dy.to(dy_ptr.dtype.element_ty), mask=on)
