"""The elements of segments: where they are, how they are read, and what is written for them.

softmax: y = exp(z - m) / s, and its gradient dx = scale * y (dy - d) with d = sum y dy.  z = x * scale.
log_softmax: y = z - m - log s, and dx = scale * (dy - exp(y) d) with d = sum dy.
logsumexp: lse = m + log s of each segment, and dx = scale * exp(z - lse) dlse.

Two numbers of each segment are known before its elements are written: (m, s); d twice; or (lse, dlse).
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.state import NEG_INF, exp_at, natural_exp, origin_of, rounded_product, weight_of, widen


@triton.jit
def side_by_side(S, POSITIONS: tl.constexpr, K: tl.constexpr):
    """Offsets of the elements of neighbouring positions, flat, from the first element on."""
    w = tl.arange(0, POSITIONS * K.cols)
    if K.one_block:
        return w
    else:
        return w // K.cols * S.stride + w % K.cols


@triton.jit
def of_order(S, at, there, K: tl.constexpr):
    """Offsets of the elements [..., cols] at positions `at` [..., 1] of the order."""
    at = tl.load(S.order_ptr + at, mask=there, other=0).to(tl.int64)
    return S.base + at * S.stride + S.cols


@triton.jit
def columns_there(S, there, K: tl.constexpr):
    """Which elements are `there`, flat or [..., cols], and in a column that exists."""
    if K.whole:
        return there
    elif K.ordered:
        return there & (S.cols < S.left)
    else:
        return there & (tl.arange(0, there.shape[len(there.shape) - 1]) % K.cols < S.left)


@triton.jit
def read(S, near, far, there, K: tl.constexpr):
    """(z, z), or (y, dy) in the gradient of softmax and log_softmax. An element that is not `there` adds nothing.

    near + far: the offsets of elements. All threads have the same `far`, so it becomes a part of the instruction.
    """
    if K.backward and K.sums:
        y = load(S.x_ptr + near + far, there, NEG_INF if K.log else 0.0).to(tl.float32)
        return y, load(S.dy_ptr + near + far, there, 0.0).to(tl.float32)
    else:
        z = widen(load(S.x_ptr + near + far, there, S.nothing), K.cast_dtype)
        if K.scaled:
            z = rounded_product(z, S.factor)
        return z, z


@triton.jit
def load(ptr, there, other):
    if there is None:
        return tl.load(ptr)
    else:
        return tl.load(ptr, mask=there, other=other)


@triton.jit
def write(S, near, far, there, y, K: tl.constexpr):
    y = tl.reshape(y, (near + far).shape).to(S.out_ptr.dtype.element_ty)
    if there is None:
        tl.store(S.out_ptr + near + far, y)
    else:
        tl.store(S.out_ptr + near + far, y, mask=there)


@triton.jit
def origin(m, K: tl.constexpr):
    """(scale, base) of the maximum m, for exp(z - m).

    For lse, an inf counts as m = 0, so that exp gives inf and not NaN.
    """
    if K.lse:
        m = tl.where(m == float("inf"), 0.0, m)
    return origin_of(m, K.ptx)


@triton.jit
def weight(m_part, m, K: tl.constexpr):
    """The factor of the s of a part with maximum m_part, if the maximum of all is m."""
    if K.lse:
        return tl.where(m == float("inf"), 1.0, weight_of(m_part, m, K.ptx))
    else:
        return weight_of(m_part, m, K.ptx)


@triton.jit
def term(a, b, K: tl.constexpr):
    """What an element adds to d."""
    if K.log:
        return b
    else:
        return rounded_product(a, b)


@triton.jit
def written(S, a, b, m, s, K: tl.constexpr):
    """What is written for elements (a, b) of segments with the two numbers m and s."""
    if K.backward:
        if K.lse:
            dx = natural_exp(a - m, K.ptx) * s
        elif K.log:
            dx = b - natural_exp(a, K.ptx) * s
        else:
            dx = a * (b - s)
        if K.scaled:
            dx *= S.factor
        return dx
    elif K.log:
        return a - m - tl.log(s)
    else:
        scale, base = origin_of(m, K.ptx)
        return exp_at(a, scale, base, K.ptx) * (1.0 / s)


@triton.jit
def given_of(S, segment, there, K: tl.constexpr):
    """(lse, dlse) of segments, for the gradient of lse; NaN if a segment has no result. segment: [..., 1]."""
    there = there & (segment < S.n_lse)
    if not K.whole:
        there = there & (S.cols < S.left)
    place = segment * S.stride + S.of_lse
    lse = tl.load(S.lse_ptr + place, mask=there, other=float("nan")).to(tl.float32)
    return lse, tl.load(S.dlse_ptr + place, mask=there, other=0.0).to(tl.float32)


@triton.jit
def write_lse(S, segment, there, m, s, K: tl.constexpr):
    """Write lse of segments that have a result. segment, there: [..., 1]; m and s have columns."""
    there = there & (segment < S.n_lse)
    if not K.whole:
        there = there & (S.cols < S.left)
    lse = tl.where(m == float("inf"), 0.0, m) + tl.log(s)
    tl.store(S.lse_ptr + segment * S.stride + S.of_lse, lse.to(S.lse_ptr.dtype.element_ty), mask=there)
