"""The gradient of the logits from those of weights, dense, sums of probabilities and both losses, in one launch.

    a = score[ids], v = da * da/dx for each choice; q = p, or score / sum score, and for all experts of a row
    dx = v[ids] + (c - sum c q) * dq/dx + 2 dz lse / n * p, with c = dprob_sums + daux * share * count

Traffic: the gradient is written once. Logits are read once if experts that were not chosen have a gradient (K.full).
Otherwise softmax reads no logits, and the other scores read those of the choices alone.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.state import NEG_INF
from fused_softmax.ops.routing.kernels.common import (
    LANES,
    along_lanes,
    exp_beside,
    experts_of,
    in_lanes,
    is_some,
    lanes,
    of_each,
    over,
    over_tiles,
    part_of_rows,
    score_beside,
    slope_beside,
    tiles_of,
    total_of,
    write_zeros,
)
from fused_softmax.ops.routing.kernels.forward import logits_of_taken
from fused_softmax.ops.routing.kernels.spec import Given, Priced, Slopes


@triton.jit(do_not_specialize=[
    "x_row_stride", "noise_row_stride", "dx_row_stride", "length", "n_parts", "part_rows"
])  # fmt: skip
def _route_gradient(
    x_ptr, noise_ptr, weights_ptr, indices_ptr, states_ptr, of_sequences_ptr, shares_ptr, dweights_ptr, ddense_ptr,
    dprob_sums_ptr, daux_loss_ptr, dz_loss_ptr, dx_ptr, x_row_stride, noise_row_stride, dx_row_stride, length, n_parts,
    part_rows, scale, K: tl.constexpr,
):  # fmt: skip
    """A program has a part of the rows of a sequence. Without sequences, all rows are one."""
    HALVES: tl.constexpr = K.halves
    sequence, first, end = part_of_rows(length, n_parts, part_rows, K)
    aux, of_z = tl.zeros([], tl.float32), tl.zeros([], tl.float32)
    if K.priced:
        aux = tl.load(daux_loss_ptr) * tl.load(shares_ptr + 1) * tl.load(shares_ptr + 2 + sequence)
        of_sequences_ptr += sequence.to(tl.int64) * K.n_experts
    if dz_loss_ptr is not None:
        of_z = 2.0 * tl.load(dz_loss_ptr) * tl.load(shares_ptr)
    P = Priced(dprob_sums_ptr, of_sequences_ptr, aux)
    prices = prices_of(P, K)
    for at in range(first, end, K.rows):
        row = (at + tl.arange(0, K.rows)).to(tl.int64)
        here = row < end
        ids, slopes, inner = of_choices(
            x_ptr, noise_ptr, weights_ptr, indices_ptr, states_ptr, dweights_ptr, ddense_ptr, x_row_stride,
            noise_row_stride, row, here, scale, K,
        )  # fmt: skip
        if K.full:
            R = Given(
                x_ptr + (row * x_row_stride)[None, :, None],
                None if noise_ptr is None else noise_ptr + (row * noise_row_stride)[None, :, None],
                x_row_stride, noise_row_stride, row, here[None, :, None],
            )  # fmt: skip
            tiles = tiles_of(R, K)
            G = of_all(tiles, prices, states_ptr, row, here, inner, of_z, K)
            write_slopes(dx_ptr, dx_row_stride, tiles, prices, row, here, G, K)
            x = logits_of_taken(x_ptr, noise_ptr, x_row_stride, noise_row_stride, row, ids, K)
            slopes = with_all(slopes, x, ids, P, G, K)
        else:
            write_zeros(dx_ptr, dx_row_stride, row, here, of_each(0, tl.float32, K), K)
        tl.debug_barrier()  # all threads have written their experts before any writes the choices
        for h in tl.static_range(HALVES):
            at_ids = dx_ptr + row[:, None] * dx_row_stride + along_lanes(ids[h])
            tl.store(at_ids, slopes[h].to(dx_ptr.dtype.element_ty), mask=here[:, None] & (ids[h] >= 0))


@triton.jit
def of_choices(
    x_ptr, noise_ptr, weights_ptr, indices_ptr, states_ptr, dweights_ptr, ddense_ptr, x_row_stride, noise_row_stride,
    row, here, scale, K: tl.constexpr,
):  # fmt: skip
    """(ids, slopes, inner): the choices [rows, LANES] of each half, and what the gradient of their weights gives.

    slopes: the gradient of the choices' own logits. inner: what every expert of the row loses, times its probability.
    """
    HALVES: tl.constexpr = K.halves
    ids, given, weights = (), (), ()
    for h in tl.static_range(HALVES):
        j = lanes() + h * LANES
        there = here[:, None] & (j < K.k)
        at = row[:, None] * K.k + j
        id = tl.load(indices_ptr + at, mask=there, other=-1)
        taken = id >= 0
        d = in_lanes(0, tl.float32, K)
        if dweights_ptr is not None:
            d += tl.load(dweights_ptr + at, mask=taken, other=0.0)
        if ddense_ptr is not None:
            d += tl.load(ddense_ptr + row[:, None] * K.n_experts + along_lanes(id), mask=taken, other=0.0)
        ids = ids + (id,)  # noqa: RUF005  the compiler has no unpacking
        given = given + (d,)  # noqa: RUF005
        weights = weights + (tl.load(weights_ptr + at, mask=taken, other=0.0),)  # noqa: RUF005
    inner = of_each(0, tl.float32, K)
    slopes = ()
    if dweights_ptr is None and ddense_ptr is None:
        slopes = given
    elif K.alone:
        share = tl.where(scale == 0, 0.0, 1.0 / tl.where(scale == 0, 1.0, scale))
        mean = of_each(0, tl.float32, K)
        for h in tl.static_range(HALVES):
            mean += tl.sum(given[h] * (weights[h] * share), axis=1)
        for h in tl.static_range(HALVES):
            slopes = slopes + (weights[h] * (given[h] - mean[:, None]),)  # noqa: RUF005
    elif K.by_softmax:
        x = logits_of_taken(x_ptr, noise_ptr, x_row_stride, noise_row_stride, row, ids, K)
        m = tl.load(states_ptr + row * K.states, mask=here, other=0.0)
        total = tl.load(states_ptr + row * K.states + 1, mask=here, other=0.0)
        share = over(total, total > 0) * scale
        for h in tl.static_range(HALVES):
            weighed = tl.where(ids[h] >= 0, tl.exp(x[h] - m[:, None]), 0.0) * share[:, None] * given[h]
            slopes = slopes + (weighed,)  # noqa: RUF005
            inner += tl.sum(weighed, axis=1)
    else:
        x = logits_of_taken(x_ptr, noise_ptr, x_row_stride, noise_row_stride, row, ids, K)
        slopes = slopes_of_scores(x, ids, given, scale, K)
    return ids, slopes, inner


@triton.jit
def slopes_of_scores(x, ids, given, scale, K: tl.constexpr):
    """The gradient of the choices' logits from that of their weights, for sigmoid and sqrtsoftplus."""
    HALVES: tl.constexpr = K.halves
    top = of_each(NEG_INF, tl.float32, K)
    if K.renormalize:
        for h in tl.static_range(HALVES):
            top = tl.maximum(top, tl.max(tl.where(ids[h] >= 0, x[h], NEG_INF), axis=1))
    else:
        top = of_each(0, tl.float32, K)  # the factor of `score_beside` is 1
    total, mean = of_each(0, tl.float32, K), of_each(0, tl.float32, K)
    factor = of_each(0, tl.float32, K) + scale
    if K.renormalize:
        for h in tl.static_range(HALVES):
            score = tl.where(ids[h] >= 0, score_beside(x[h], top[:, None], K), 0.0)
            total += tl.sum(score, axis=1)
            mean += tl.sum(score * given[h], axis=1)
        share = over(total, is_some(total, top, K))
        mean *= share
        factor *= share
    slopes = ()
    for h in tl.static_range(HALVES):
        slope = slope_beside(x[h], top[:, None], K) * (given[h] - mean[:, None]) * factor[:, None]
        slopes = slopes + (tl.where(ids[h] >= 0, slope, 0.0),)  # noqa: RUF005
    return slopes


@triton.jit
def price_of(P, expert, on, K: tl.constexpr):
    """The price of an expert: the derivative of the results by the sum of its probabilities."""
    price = tl.zeros(expert.shape, tl.float32)
    if P.dprob_sums_ptr is not None:
        price += tl.load(P.dprob_sums_ptr + expert, mask=on, other=0.0)
    if K.priced:
        price += P.aux * tl.load(P.counts_ptr + expert, mask=on, other=0).to(tl.float32)
    return price


@triton.jit
def prices_of(P, K: tl.constexpr):
    """The prices of all experts, tile by tile [stacked, 1, LANES]."""
    N_CHUNKS: tl.constexpr = K.n_chunks
    CHUNKS: tl.constexpr = K.chunks
    prices = ()
    if K.full:
        for c in tl.static_range(N_CHUNKS):
            prices = prices + prices_of_chunk(P, CHUNKS[3 * c], CHUNKS[3 * c + 1], CHUNKS[3 * c + 2], K)
    return prices


@triton.jit
def prices_of_chunk(P, FIRST: tl.constexpr, STACKED: tl.constexpr, LENGTH: tl.constexpr, K: tl.constexpr):
    prices = ()
    for t in tl.static_range(LENGTH):
        expert, there = experts_of(FIRST + t, STACKED, K)
        prices = prices + (price_of(P, expert, there, K),)  # noqa: RUF005
    return prices


@triton.jit
def of_all(tiles, prices, states_ptr, row, here, inner, of_z, K: tl.constexpr):
    """The Slopes of these rows, from which the gradient of every expert follows."""
    m = tl.load(states_ptr + row * K.states, mask=here, other=0.0)
    total = tl.load(states_ptr + row * K.states + 1, mask=here, other=0.0)
    lse = m + tl.log(tl.where(total > 0, total, 1.0))
    of_p = tl.where(total > 0, of_z * lse, 0.0) - inner
    of_scores = total
    if not K.by_softmax:
        of_scores = tl.load(states_ptr + row * K.states + 2, mask=here, other=0.0)
    share, of_scores = over(total, total > 0), over(of_scores, of_scores > 0)
    weighed = ()
    for t in tl.static_range(len(tiles)):
        if K.by_softmax:
            q = exp_beside(tiles[t], over_tiles(m)) * over_tiles(share)
        else:
            q = score_beside(tiles[t], over_tiles(m), K) * over_tiles(of_scores)
        weighed = weighed + (tl.where(over_tiles(total) > 0, q * prices[t], 0.0),)  # noqa: RUF005
    mean = total_of(weighed)
    if K.by_softmax:  # whose scores are p
        of_p -= mean
    return Slopes(m, share, of_scores, of_p, mean)


@triton.jit
def slope_of(x, price, m, share, of_scores, of_p, mean, K: tl.constexpr):
    """The gradient of an expert's logit, without what its weight as a choice gives; 0 in a row that is not routed."""
    p = exp_beside(x, m) * share
    if K.by_softmax:
        slope = p * (price + of_p)
    else:
        slope = slope_beside(x, m, K) * of_scores * (price - mean) + p * of_p
    return tl.where(share > 0, slope, 0.0)


@triton.jit
def with_all(slopes, x, ids, P, G, K: tl.constexpr):
    """The whole gradient of the choices: `slopes`, and what every expert gets."""
    HALVES: tl.constexpr = K.halves
    whole = ()
    for h in tl.static_range(HALVES):
        price = price_of(P, along_lanes(ids[h]), ids[h] >= 0, K)
        slope = slope_of(
            x[h], price, G.m[:, None], G.share[:, None], G.of_scores[:, None], G.of_p[:, None], G.mean[:, None], K
        )
        whole = whole + (slopes[h] + slope,)  # noqa: RUF005
    return whole


@triton.jit
def write_slopes(dx_ptr, dx_row_stride, tiles, prices, row, here, G, K: tl.constexpr):
    """Write the gradient of all experts, without what the weights give the choices."""
    N_CHUNKS: tl.constexpr = K.n_chunks
    CHUNKS: tl.constexpr = K.chunks
    START: tl.constexpr = K.starts
    for c in tl.static_range(N_CHUNKS):
        write_slopes_of_chunk(
            dx_ptr,
            dx_row_stride,
            tiles,
            prices,
            row,
            here,
            G,
            START[c],
            CHUNKS[3 * c],
            CHUNKS[3 * c + 1],
            CHUNKS[3 * c + 2],
            K,
        )


@triton.jit
def write_slopes_of_chunk(
    dx_ptr, dx_row_stride, tiles, prices, row, here, G, START: tl.constexpr, FIRST: tl.constexpr, STACKED: tl.constexpr,
    LENGTH: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    for t in tl.static_range(LENGTH):
        experts, there = experts_of(FIRST + t, STACKED, K)
        dx = slope_of(
            tiles[START + t], prices[START + t], over_tiles(G.m), over_tiles(G.share), over_tiles(G.of_scores),
            over_tiles(G.of_p), over_tiles(G.mean), K,
        )  # fmt: skip
        at = (row * dx_row_stride)[None, :, None] + experts
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=here[None, :, None] & there)
