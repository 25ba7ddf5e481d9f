"""What the loss kernels share: a row's target, its loss from the state of its logits, and the gradient of one piece.

Logits z are the input x, or x * scale, or softcap * tanh(x * scale / softcap). A row with target t and weight w has
loss = (1 - e) w (lse - z_t) + e / C (W lse - sum_c w_c z_c), W = sum_c w_c;  z-loss = lse_square_scale * lse ** 2;
dloss / dz_c = p_c a - [c = t] b - w_c u,  p = exp(z - lse),  with the Shares a, b and u.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.exchange import wait_for_launch_before
from fused_softmax.core.kernels.rows import load_edge, load_pieces
from fused_softmax.core.kernels.spec import Edge
from fused_softmax.core.kernels.state import (
    LN2,
    NEG_INF,
    capped,
    origin_of,
    rounded_product,
    rounding_of,
    scores_of,
    widen,
)
from fused_softmax.ops.losses.kernels.spec import Numbers, Shares, Target

VANISHED = tl.constexpr(-2048.0)  # 2 ** VANISHED and exp(VANISHED) are 0 in fp32 and in fp64


@triton.jit
def numbers_of(numbers_ptr, factor, cap, smoothing, lse_square_scale, K: tl.constexpr):
    """A call's Numbers in the dtype of the arithmetic: the arguments as given, or in fp64 those at numbers_ptr."""
    if numbers_ptr is not None:
        return Numbers(
            tl.load(numbers_ptr), tl.load(numbers_ptr + 1), tl.load(numbers_ptr + 2), tl.load(numbers_ptr + 3)
        )
    else:
        zero = tl.zeros([], K.state_dtype)
        return Numbers(zero + factor, zero + cap, zero + smoothing, zero + lse_square_scale)


@triton.jit
def logits_of(x, N, K: tl.constexpr):
    """The finished logits of a piece that was read: scaled and capped, in the dtype of the arithmetic."""
    z = widen(x, K.cast_dtype)
    if K.scaled:
        z *= N.factor
    if K.capped:
        z = capped(z, N.cap)
    return z


@triton.jit
def logit_of_target(x, N, K: tl.constexpr):
    """`logits_of`, rounded as m is.

    The compiler might fuse the scaling into m - z_t as one multiply-add. Where z_t is m, the loss would then be what
    rounding took from m.
    """
    z = logits_of(x, N, K)
    if K.scaled and K.ptx and z.dtype == tl.float32:
        z = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1)
    return z


@triton.jit
def load_target_logit(x_ptr, T, wanted, N, K: tl.constexpr):
    """The logit of a row's target where `wanted`, else that of 0. x_ptr points to the row's first logit."""
    return logit_of_target(tl.load(x_ptr + T.t, mask=wanted, other=0.0), N, K)


@triton.jit
def load_logits(ptr, cols, size, hidden, N, K: tl.constexpr, PIECES: tl.constexpr, FULL_PIECES: tl.constexpr):
    """`load_pieces` of x. With a softcap the pieces hold finished logits."""
    pieces = load_pieces(ptr, cols, size, hidden, K, PIECES, FULL_PIECES)
    if K.capped:
        kept = ()
        for p in tl.static_range(PIECES):
            z = logits_of(pieces[p], N, K)
            kept = kept + (tl.where(p * K.block_cols + cols < size, z, NEG_INF),)  # noqa: RUF005
        return kept
    else:
        return pieces


@triton.jit
def finish_edge(edge, N, K: tl.constexpr):
    """The edge with finished logits in place of what was read."""
    return Edge(edge.cols, edge.on, tl.where(edge.on, logits_of(edge.x, N, K), NEG_INF))


@triton.jit
def load_edge_logits(x, n_cols, n_parts, r, hidden, N, K: tl.constexpr):
    """The finished logits before and after a row's aligned body."""
    return finish_edge(load_edge(x, n_cols, n_parts, r, hidden, K), N, K)


@triton.jit
def slope_of(z, N, K: tl.constexpr):
    """dz / dx; 1.0 without scale and softcap."""
    slope = 1.0
    if K.scaled:
        slope = N.factor
    if K.capped:
        size = tl.abs(z)
        slope *= (N.cap - size) / N.cap * (1.0 + size / N.cap)  # cap - size is exact where |z| is near the cap
    return slope


@triton.jit
def target_of(row, target_ptr, weight_ptr, n_classes, ignore_index, K: tl.constexpr):
    """The Target of rows."""
    t = tl.load(target_ptr + row).to(tl.int64)
    counts = t != ignore_index
    inside = (t >= 0) & (t < n_classes)
    wrong = counts & ((t < 0) | (t >= n_classes))
    if K.weighted:
        w = tl.load(weight_ptr + t, mask=inside, other=0.0)
    else:
        w = 1.0
    return Target(t, counts & inside, wrong, w)


@triton.jit
def per_row(totals_ptr, K: tl.constexpr):
    """(g, g_z): the factors of a row's loss and of its z-loss in the result. In a mean they are 1 over the totals."""
    if K.mean:
        wait_for_launch_before(K.follows)
        PARTS: tl.constexpr = K.totals
        j = tl.arange(0, PARTS)
        return 1.0 / tl.sum(tl.load(totals_ptr + j), axis=0), 1.0 / tl.sum(tl.load(totals_ptr + PARTS + j), axis=0)
    else:
        return 1.0, 1.0


@triton.jit
def per_row_counted(t, weight_ptr, n_rows, n_classes, ignore_index, K: tl.constexpr):
    """`per_row` where this program counts the targets t of all rows, [K.counted], itself."""
    on = (tl.arange(0, K.counted) < n_rows) & (t != ignore_index)
    n = tl.sum(on.to(K.state_dtype), axis=0)
    if K.weighted:
        known = on & (t >= 0) & (t < n_classes)
        return 1.0 / tl.sum(tl.load(weight_ptr + t, mask=known, other=0.0), axis=0), 1.0 / n
    else:
        return 1.0 / n, 1.0 / n


@triton.jit
def weight_total(w_total_ptr, n_classes, K: tl.constexpr):
    """W, the sum of the classes' weights, where smoothing needs it."""
    w_total = n_classes.to(K.state_dtype)
    if K.smooth and K.weighted:
        w_total = tl.load(w_total_ptr)
    return w_total


@triton.jit
def weights_at(weight_ptr, cols, on, K: tl.constexpr):
    """The class weights of columns, where smoothing needs them; else 1."""
    return tl.load(weight_ptr + cols, mask=on, other=0.0) if K.smooth and K.weighted else 1.0


@triton.jit
def sum_of(pieces, first, cols, size, weight_ptr, zero, N, K: tl.constexpr):
    """sum_c w_c (z_c - zero) over the last axis of all pieces. Columns from `size` on add nothing."""
    total = tl.zeros(pieces[0].shape, K.state_dtype)
    for p in tl.static_range(len(pieces)):
        total += terms_of(pieces[p], first, p * K.block_cols + cols, size, weight_ptr, zero, N, K)
    return tl.sum(total, axis=K.axis)


@triton.jit
def terms_of(x, first, cols, size, weight_ptr, zero, N, K: tl.constexpr):
    """w_c (z_c - zero) of each column of a piece; 0 from column `size` on."""
    on = cols < size
    z = tl.where(on, scores_of(x, N.factor, K) - zero, 0.0)
    if K.weighted:
        z = rounded_product(z, tl.load(weight_ptr + first + cols, mask=on, other=0.0))
    return z


@triton.jit
def sum_of_edge(edge, weight_ptr, zero, AXIS: tl.constexpr, K: tl.constexpr):
    """`sum_of` for an edge."""
    terms = tl.where(edge.on, edge.x - zero, 0.0)
    if K.weighted:
        terms = rounded_product(terms, tl.load(weight_ptr + edge.cols, mask=edge.on, other=0.0))
    return tl.sum(terms, axis=AXIS)


@triton.jit
def zero_of(z_t):
    """The origin from which a row's logits are summed: its target's logit, or 0 if that is not finite.

    Differences from it keep their digits where all logits of the row are large.
    """
    return tl.where((z_t > NEG_INF) & (z_t < float("inf")), z_t, 0.0)


@triton.jit
def loss_of(m, ls, z_t, zero, T, wz, w_total, n_classes, N, K: tl.constexpr):
    """A row's loss from its state: m and ls = log s, which are never added to lse.

    Their sum would be rounded at the size of m, which may be far greater than the loss. wz: sum_c w_c (z_c - zero).
    """
    loss = T.w * (m - z_t + ls)
    if K.smooth:
        smoothed = w_total * (m - zero + ls) - wz
        loss = (1.0 - N.smoothing) * loss + N.smoothing / n_classes * smoothed
    return loss


@triton.jit
def store_losses(loss_ptr, z_ptr, row, live, m, ls, z_t, zero, T, wz, w_total, n_classes, N, K: tl.constexpr):
    """Store the losses of the rows that are `live`: NaN if the target is no class, 0 if the row does not count."""
    loss = loss_of(m, ls, z_t, zero, T, wz, w_total, n_classes, N, K)
    tl.store(loss_ptr + row, tl.where(T.kept, loss, tl.where(T.wrong, float("nan"), 0.0)), mask=live)
    if K.z_loss:
        z = N.lse_square_scale * (m + ls) * (m + ls)
        tl.store(z_ptr + row, tl.where(T.kept, z, tl.where(T.wrong, float("nan"), 0.0)), mask=live)


@triton.jit
def shares_of(lse, w, w_total, g, g_z, n_classes, N, K: tl.constexpr):
    """The Shares of a row's gradient. g, g_z: the factors of its loss and of its z-loss in the result."""
    a = g * w
    b = g * w
    u = 0.0
    if K.smooth:
        u = g * N.smoothing / n_classes
        a = a * (1.0 - N.smoothing) + u * w_total
        b = b * (1.0 - N.smoothing)
    return Shares(a + 2.0 * N.lse_square_scale * lse * g_z, b, u)


@triton.jit
def gradient_of_logits(z, p, a, b, u, w_cols, N, K: tl.constexpr):
    """dx of one piece, from p = exp(z - lse).

    Or from p = exp(z - m), if a is divided by s already. b: 0 in all columns but the target's.
    """
    dx = p * a - b
    if K.smooth:
        dx -= u * w_cols
    return dx * slope_of(z, N, K)


@triton.jit
def exponent_at(z, scale, base, K: tl.constexpr):
    """The exponent t of exp(z - m), which is 2 ** t in fp32 on NVIDIA, and e ** t elsewhere.

    (scale, base): `origin_of` m.
    """
    if K.ptx and z.dtype == tl.float32:
        return tl.fma(z, scale, -base)
    else:
        return z - base


@triton.jit
def power_of(t, K: tl.constexpr):
    """(e, t) for an exponent t of `exponent_at`: e is 2 ** t or exp(t), and the t returned is VANISHED or more.

    So e * t is 0, and not NaN, for a t of -inf. A t of NaN gives an e of NaN.
    """
    e = tl.exp2(t) if K.ptx and t.dtype == tl.float32 else tl.exp(t)
    return e, tl.maximum(t, VANISHED)


@triton.jit
def sums_and_terms(pieces, scale, base, N, K: tl.constexpr):
    """(sum e, sum e t) over the last axis of all pieces, (e, t) from `power_of`. A logit of -inf adds nothing."""
    s, t = power_of(exponent_at(scores_of(pieces[0], N.factor, K, K.unpack), scale, base, K), K)
    u = rounded_product(s, t)
    for p in tl.static_range(1, len(pieces)):
        e, t = power_of(exponent_at(scores_of(pieces[p], N.factor, K, K.unpack), scale, base, K), K)
        s += e
        u = tl.fma(e, t, u)
    return tl.sum(s, axis=K.axis), tl.sum(u, axis=K.axis)


@triton.jit
def faded_terms(u, s, m_part, m, fade, K: tl.constexpr):
    """The sum u = sum e t of a part, converted from the part's maximum m_part to the row's maximum m.

    s: the part's sum of e. fade: `weight_of` m_part.
    """
    _, base_part = origin_of(m_part, K.ptx)
    _, base = origin_of(m, K.ptx)
    return rounded_product(u + tl.maximum(base_part - base, VANISHED) * s, fade)


@triton.jit
def entropy_of(m, s, ls, u, K: tl.constexpr):
    """The entropy of rows in nats, from u = sum e t.

    Where the scale of `origin_of` is 1, every e is 0 or 1 and every e t is 0, so the unit of t does not matter.
    """
    if K.ptx and m.dtype == tl.float32:
        u = (u - rounded_product(rounding_of(m, K.ptx), s)) * LN2
    return ls - u / s


@triton.jit
def store_stats(entropy_ptr, predicted_ptr, row, live, entropy, found, n_classes):
    """Store the entropy of rows in nats, and their likeliest class."""
    tl.store(entropy_ptr + row, entropy, mask=live)
    tl.store(predicted_ptr + row, tl.where(found < n_classes, found, 0).to(tl.int64), mask=live)
