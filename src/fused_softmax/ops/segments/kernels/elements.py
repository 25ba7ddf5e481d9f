"""The elements of segments: where they are, what is read of them, and what becomes of them.

softmax: y = exp(z - m) / s, and its gradient dx = scale * y (dy - d) with d = sum y dy.  z = x * scale.
log_softmax: y = z - m - log s, and dx = scale * (dy - exp(y) d) with d = sum dy.
logsumexp: lse = m + log s of each segment, and dx = scale * exp(z - lse) dlse.

Of each segment two numbers are known before its elements are written: (m, s); d twice; or (lse, dlse).
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.state import NEG_INF, exp_at, natural_exp, origin_of, rounded_product, weight_of, widen


@triton.jit
def side_by_side(S, POSITIONS: tl.constexpr, K: tl.constexpr):
    """Where the elements of positions next to each other are, flat, from the first one of the first on."""
    w = tl.arange(0, POSITIONS * K.cols)
    if K.one_block:
        return w
    else:
        return w // K.cols * S.stride + w % K.cols


@triton.jit
def of_order(S, at, there, K: tl.constexpr):
    """Where the elements [..., cols] are of positions `at` [..., 1] in the order, those that are there."""
    at = tl.load(S.order_ptr + at, mask=there, other=0).to(tl.int64)
    return S.base + at * S.stride + S.cols


@triton.jit
def columns_there(S, there, K: tl.constexpr):
    """Of the elements that `there` says, flat or [..., cols], those whose column is there too."""
    if K.whole:
        return there
    elif K.ordered:
        return there & (S.cols < S.left)
    else:
        return there & (tl.arange(0, there.shape[len(there.shape) - 1]) % K.cols < S.left)


@triton.jit
def read(S, near, far, there, K: tl.constexpr):
    """(z, z), or (y, dy) in the gradient of softmax and log_softmax; what is not there counts for nothing.

    near, far: whose sum is where elements are. Threads share the second, so that an instruction has it.
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
    """(scale, base) of a maximum, by which exp(z - m) is computed. Of lse an inf counts by itself, not by NaN."""
    if K.lse:
        m = tl.where(m == float("inf"), 0.0, m)
    return origin_of(m, K.ptx)


@triton.jit
def weight(m_part, m, K: tl.constexpr):
    """What the s of a part with the maximum m_part counts where the maximum is m."""
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
    """What is written for elements (a, b) of segments whose two numbers are m and s."""
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
    """(lse, dlse) of segments, in the gradient of lse; NaN of one that has no result. segment: [..., 1]."""
    there = there & (segment < S.n_lse)
    if not K.whole:
        there = there & (S.cols < S.left)
    place = segment * S.stride + S.of_lse
    lse = tl.load(S.lse_ptr + place, mask=there, other=float("nan")).to(tl.float32)
    return lse, tl.load(S.dlse_ptr + place, mask=there, other=0.0).to(tl.float32)


@triton.jit
def write_lse(S, segment, there, m, s, K: tl.constexpr):
    """Write lse of segments that have a result. segment, there: [..., 1], m and s with columns."""
    there = there & (segment < S.n_lse)
    if not K.whole:
        there = there & (S.cols < S.left)
    lse = tl.where(m == float("inf"), 0.0, m) + tl.log(s)
    tl.store(S.lse_ptr + segment * S.stride + S.of_lse, lse.to(S.lse_ptr.dtype.element_ty), mask=there)
