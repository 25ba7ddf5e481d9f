"""Which of a short list of logits top-k and top-p keep: sums over the sorted list say where each filter ends."""

import triton
import triton.language as tl

from fused_softmax.ops.sampling.kernels.common import COLUMN_BITS, LOWEST, UNIT, value_of, weight_at

AT_ONCE = tl.constexpr(8)  # codes with which all others are compared at a time
NOWHERE = tl.constexpr(9223372036854775807)


@triton.jit
def least_of_ranked(list_ptr, n, count, mass, D, F, K: tl.constexpr):
    """(the code of the last logit that top-k and top-p keep, whether top-k ends in the list, whether top-p does).

    The list has the codes of n logits, K.candidates at most, in any order. count, mass: of all logits above these.
    """
    i = tl.arange(0, K.candidates)
    on = i < n
    code = sort_listed(list_ptr, n, K)
    weight = tl.where(on, mass_of_code(code, D, F, K), 0)
    through = mass + tl.cumsum(weight, axis=0)
    by_k = (F.k > 0) & (count < F.k) & (count + n >= F.k)
    kept = on & ((count + i < F.k) | (F.k == 0))
    if K.joint:
        of_target = F.total
    else:
        of_target = tl.where(F.k > 0, mass + tl.sum(tl.where(kept, weight, 0), axis=0), F.total)
    target = F.p.to(tl.float64) * of_target.to(tl.float64)
    begins = tl.where(mass.to(tl.float64) < target, 1, 0) > 0
    by_p = (F.p < 1) & begins & (tl.max(through, axis=0).to(tl.float64) >= target)
    if by_p:
        kept = kept & ((through - weight).to(tl.float64) < target)
    least = tl.min(tl.where(kept, code, NOWHERE), axis=0)
    return tl.where(by_k | by_p, least, nothing_listed()), by_k, by_p


@triton.jit
def sort_listed(list_ptr, n, K: tl.constexpr):
    """The n listed codes, the greatest first. The place of a code is the number of codes above it."""
    N: tl.constexpr = K.candidates
    i = tl.arange(0, N)
    code = tl.load(list_ptr + i, mask=i < n, other=nothing_listed())
    above = tl.zeros([N, AT_ONCE], tl.int32)
    for start in range(0, n, 4 * AT_ONCE):
        for turn in tl.static_range(4):  # the loads of four rounds are in flight together
            j = start + turn * AT_ONCE + tl.arange(0, AT_ONCE)
            other = tl.load(list_ptr + j, mask=j < n, other=nothing_listed())
            above += (other[None, :] > code[:, None]).to(tl.int32)
    tl.debug_barrier()  # all threads have read the list, which is now overwritten
    tl.store(list_ptr + tl.sum(above, axis=1), code, mask=i < n)
    tl.debug_barrier()
    return tl.load(list_ptr + i, mask=i < n, other=nothing_listed())


@triton.jit
def nothing_listed():
    """A code below that of any logit that may be kept."""
    return (tl.zeros([], tl.int64) + LOWEST) << COLUMN_BITS


@triton.jit
def mass_of_code(code, D, F, K: tl.constexpr):
    """The mass of a code's logit, in units; 0 where nothing is listed."""
    return (weight_at(value_of((code >> COLUMN_BITS).to(tl.int32)), F.m, D, K) * UNIT).to(tl.int64)
