"""The device shelf of losses: a row's target, its loss by the state of its logits, and the gradient of one piece.

Logits z are the input x, or x * scale, or softcap * tanh(x * scale / softcap). Of a row with target t and weight w:
loss = (1 - e) w (lse - z_t) + e / C (W lse - sum_c w_c z_c), W = sum_c w_c;  z-loss = lse_square_scale * lse ** 2;
dloss / dz_c = p_c a - [c = t] b - w_c u,  p = exp(z - lse),  with the a, b and u of `shares_of`.
"""

import triton
import triton.language as tl

from fused_softmax.rowwise import NEG_INF, exp_at, load_pieces, scores_of

NONE = tl.constexpr(2147483647)


@triton.jit
def numbers_of(numbers_ptr, factor, cap, smoothing, lse_square_scale, WIDE: tl.constexpr):
    """The numbers of a call in the dtype of the arithmetic: as given, or read where they have 64 bits."""
    if numbers_ptr is not None:
        return tl.load(numbers_ptr), tl.load(numbers_ptr + 1), tl.load(numbers_ptr + 2), tl.load(numbers_ptr + 3)
    else:
        zero = tl.zeros([], WIDE)
        return zero + factor, zero + cap, zero + smoothing, zero + lse_square_scale


@triton.jit
def capped(z, cap):
    """cap * tanh(z / cap); near 0 by a polynomial, for 1 - exp(-2 z / cap) would lose all digits there."""
    size = tl.abs(z)
    y = size / cap
    q = y * y
    if z.dtype.is_fp64():  # of (tanh(y) / y - 1) / y ** 2 up to y = 0.55, to 2e-18; of fp32 to 4e-9
        c = q * -2.06027653763663395e-5 + 8.51131368557767122e-5
        c = c * q - 2.34634741088723713e-4
        c = c * q + 5.88936052007405776e-4
        c = c * q - 1.45566183010071603e-3
        c = c * q + 3.59211037868902388e-3
        c = c * q - 8.86323439781435484e-3
        c = c * q + 2.18694884936669419e-2
        c = c * q - 5.39682539674340145e-2
        c = c * q + 1.33333333333327148e-1
        c = c * q - 3.33333333333333326e-1
    else:
        c = q * -6.61022783111473421e-3 + 2.13093886644434736e-2
        c = c * q - 5.39094288274605454e-2
        c = c * q + 1.33331137290208719e-1
        c = c * q - 3.33333320079769797e-1
    e = tl.exp(-2.0 * y)
    top = tl.where(y < 0.55, size + size * (q * c), cap - cap * (2.0 * e / (1.0 + e)))
    return tl.where(z < 0, -top, tl.where(z == z, top, z))


@triton.jit
def logits_of(x, factor, cap, CAST: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    """z of a piece of x, in the dtype of the arithmetic."""
    z = scores_of(x, factor, CAST, SCALED)
    if CAPPED:
        z = capped(z, cap)
    return z


@triton.jit
def logit_of_target(
    x, factor, cap, CAST: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """logits_of, rounded as m is: if m - z_t became one multiply-add, what rounding took of m would be the loss."""
    z = logits_of(x, factor, cap, CAST, SCALED, CAPPED)
    if SCALED and PTX and z.dtype == tl.float32:
        z = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1)
    return z


@triton.jit
def slope_of(z, factor, cap, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    """dz / dx where it is not 1."""
    slope = 1.0
    if SCALED:
        slope = factor
    if CAPPED:
        size = tl.abs(z)
        slope *= (cap - size) / cap * (1.0 + size / cap)  # cap - size is exact where little is left
    return slope


@triton.jit
def load_logits(
    ptr, cols, size, factor, hidden, cap, BLOCK_COLS: tl.constexpr, PIECES: tl.constexpr, FULL_PIECES: tl.constexpr,
    CAST: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """load_pieces of x, and with a cap the finished logits: tanh is not taken twice."""
    pieces = load_pieces(ptr, cols, size, BLOCK_COLS, PIECES, FULL_PIECES, hidden)
    if CAPPED:
        kept = ()
        for p in tl.static_range(PIECES):
            z = logits_of(pieces[p], factor, cap, CAST, SCALED, CAPPED)
            kept = kept + (tl.where(p * BLOCK_COLS + cols < size, z, NEG_INF),)  # noqa: RUF005  the compiler has no unpacking
        return kept
    else:
        return pieces


@triton.jit
def load_transposed(
    ptr, stride, size, there, factor, hidden, cap, BLOCK_CLASSES: tl.constexpr, PIECES: tl.constexpr,
    CAST: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """The same of logits [classes, tokens], tiles one below another, by the pointers [1, tokens] to their first class.

    there: which of the tokens are. Classes from `size` on are hidden.
    """
    pieces = ()
    for p in tl.static_range(PIECES):
        row = p * BLOCK_CLASSES + tl.arange(0, BLOCK_CLASSES)[:, None]
        piece = tl.load(ptr + row.to(tl.int64) * stride, mask=(row < size) & there, other=hidden)
        if CAPPED:
            piece = tl.where(row < size, logits_of(piece, factor, cap, CAST, SCALED, CAPPED), NEG_INF)
        pieces = pieces + (piece,)  # noqa: RUF005  the compiler has no unpacking
    return pieces


@triton.jit
def target_of(row, target_ptr, weight_ptr, n_classes, ignore_index, WEIGHTED: tl.constexpr):
    """(t, kept, wrong, w) of rows: the class, whether the row counts, whether there is no such class, its weight."""
    t = tl.load(target_ptr + row).to(tl.int64)
    counts = t != ignore_index
    inside = (t >= 0) & (t < n_classes)
    wrong = counts & ((t < 0) | (t >= n_classes))
    if WEIGHTED:
        w = tl.load(weight_ptr + t, mask=inside, other=0.0)
    else:
        w = 1.0
    return t, counts & inside, wrong, w


@triton.jit
def per_row(totals_ptr, PARTS: tl.constexpr, MEAN: tl.constexpr):
    """(g, g_z): what a row's loss and its z-loss count in the result; of a mean, by the totals of all targets."""
    if MEAN:
        j = tl.arange(0, PARTS)
        return 1.0 / tl.sum(tl.load(totals_ptr + j), axis=0), 1.0 / tl.sum(tl.load(totals_ptr + PARTS + j), axis=0)
    else:
        return 1.0, 1.0


@triton.jit
def sum_of(
    pieces, first, cols, size, weight_ptr, factor, zero, BLOCK_COLS: tl.constexpr, CAST: tl.constexpr,
    SCALED: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """sum_c w_c (z_c - zero) over the last axis of all pieces, of which the first `size` columns count."""
    total = tl.zeros(pieces[0].shape, tl.float64 if CAST.is_fp64() else tl.float32)
    for p in tl.static_range(len(pieces)):
        on = p * BLOCK_COLS + cols < size
        z = tl.where(on, scores_of(pieces[p], factor, CAST, SCALED) - zero, 0.0)
        if WEIGHTED:
            z *= tl.load(weight_ptr + first + p * BLOCK_COLS + cols, mask=on, other=0.0)
        total += z
    return tl.sum(total, axis=len(total.shape) - 1)


@triton.jit
def zero_of(z_t):
    """From where a row's logits are summed: from its target's, so that what they all share does not drown the sum."""
    return tl.where((z_t > NEG_INF) & (z_t < float("inf")), z_t, 0.0)


@triton.jit
def loss_of(m, ls, z_t, w, wz, w_total, smoothing, n_classes, SMOOTH: tl.constexpr):
    """A row's loss by its m and ls = log s, whose sum is lse: apart, for m may be far greater than the loss."""
    loss = w * (m - z_t + ls)
    if SMOOTH:
        loss = (1.0 - smoothing) * loss + smoothing / n_classes * (w_total * (m - zero_of(z_t) + ls) - wz)
    return loss


@triton.jit
def store_losses(
    loss_ptr, z_ptr, row, live, m, ls, z_t, kept, wrong, w, wz, w_total, smoothing, lse_square_scale, n_classes,
    SMOOTH: tl.constexpr, ZLOSS: tl.constexpr,
):  # fmt: skip
    """The losses of the live among rows: NaN where there is no such class, 0 where the row does not count."""
    loss = loss_of(m, ls, z_t, w, wz, w_total, smoothing, n_classes, SMOOTH)
    tl.store(loss_ptr + row, tl.where(kept, loss, tl.where(wrong, float("nan"), 0.0)), mask=live)
    if ZLOSS:
        z = lse_square_scale * (m + ls) * (m + ls)
        tl.store(z_ptr + row, tl.where(kept, z, tl.where(wrong, float("nan"), 0.0)), mask=live)


@triton.jit
def shares_of(lse, w, w_total, g, g_z, dlse, smoothing, lse_square_scale, n_classes, SMOOTH: tl.constexpr):
    """(a, b, u) of a row's gradient, for what its loss (g), its z-loss (g_z) and its lse (dlse) count in the result."""
    a = g * w
    b = g * w
    u = 0.0
    if SMOOTH:
        u = g * smoothing / n_classes
        a = a * (1.0 - smoothing) + u * w_total
        b = b * (1.0 - smoothing)
    return a + 2.0 * lse_square_scale * lse * g_z + dlse, b, u


@triton.jit
def gradient_of_logits(
    z, p, a, b, u, w_cols, factor, cap, SMOOTH: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr
):  # fmt: skip
    """dx of one piece by its p = exp(z - lse), or by exp(z - m) where a has the rest of p. b: 0 but at the target."""
    dx = p * a - b
    if SMOOTH:
        dx -= u * w_cols
    return dx * slope_of(z, factor, cap, SCALED, CAPPED)


@triton.jit
def entropy_terms(pieces, scale, base, factor, m, HELD: tl.constexpr, TIMES: tl.constexpr, PTX: tl.constexpr):
    """sum exp(z - m) (z - m) over the last axis of all pieces; what is -inf counts nothing."""
    total = tl.zeros(pieces[0].shape, tl.float64 if HELD.is_fp64() else tl.float32)
    for p in tl.static_range(len(pieces)):
        z = scores_of(pieces[p], factor, HELD, TIMES)
        total += tl.where(z == NEG_INF, 0.0, exp_at(z, scale, base, PTX) * (z - m))
    return tl.sum(total, axis=len(total.shape) - 1)


@triton.jit
def faded_terms(u, s, m_part, m, fade):
    """The entropy_terms u of a part, whose own m and s they were summed with, by the m of the whole."""
    return tl.where(fade > 0.0, (u + tl.where(s > 0.0, m_part - m, 0.0) * s) * fade, 0.0)
