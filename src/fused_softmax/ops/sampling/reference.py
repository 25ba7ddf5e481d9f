"""Sampling of torch's operations, in float64: filters, draws and penalties.

A row is judged in this order:

    x   the logit, in float32, plus its bias, rounded to float32; -inf where the bitmask has 0; less its penalties
    z   (x - max x) / temperature
    k   the first top_k columns in the order of x descending, column ascending
    p   the first columns in that order until their exp(z) sum up to top_p of the sum over k
    min exp(z) >= min_p

`joint` takes the sum of p over all columns. Each of k, p and min is a prefix of one order, but for equal z. Tensors of
parameters count as float32, and so does a temperature; a top_p or min_p that is a number keeps its double. What falls
short of top_p or min_p by a share of 2^-22 has reached it: probabilities of .5, .3 and .2 are given by logits that are
rounded to float32, and top_p=0.8 keeps two of them. Sums are exact in any order (`running_sum`), so a boundary does not
depend on the batch or the device. Nothing here waits for a device, and no shape depends on data.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_softmax.ops.sampling import noise
from fused_softmax.ops.sampling.arrivals import draw_first

REACHED = 1 - 2.0**-22  # a share of top_p or min_p that reaches it: logits rounded to float32 may miss it by so little
Number = float | Tensor  # a parameter: one for all rows, or [n_rows]


class Judged(NamedTuple):
    """The distributions of rows: kept [n, n_cols]; z likewise; weights exp(z) where kept, their sum [n]; valid [n]."""

    kept: Tensor
    z: Tensor
    weights: Tensor
    total: Tensor
    valid: Tensor

    @property
    def log_probs(self) -> Tensor:
        return torch.where(self.kept, self.z, -math.inf) - self.total.log()[:, None]

    @property
    def probs(self) -> Tensor:
        return self.weights / self.total[:, None]


class SampleOutput(NamedTuple):
    """Of n_draws draws, their tokens and what else was asked for; None for the rest.

    tokens: int64 [n_draws]; 0 where a row cannot be drawn from.
    valid: bool [n_draws], whether it can.
    logprobs: float32 [n_draws], in nats, that of the token; NaN where valid is False.
    top_logprobs, top_tokens: float32 and int64 [n_draws, top_logprobs], the greatest first, of equals the lowest column
        first. Where fewer columns have a probability, -inf and -1; where valid is False, NaN and -1.
    kept: int32 [n_draws, ceil(vocab / 32)]; bit c % 32 of word c // 32 says whether column c could be drawn.
    rank: int64 [n_draws], 1 and as many as columns have a greater logit than the token; 0 where valid is False.

    >>> out = sample(torch.tensor([[0.0, 1.0, 2.0]]), temperature=0.0, return_logprobs="raw")
    >>> out.tokens, out.valid, out.logprobs
    (tensor([2]), tensor([True]), tensor([-0.4076]))
    """

    tokens: Tensor
    valid: Tensor
    # `| Any`, and not `| None`: a type checker then lets callers who asked for it use it.
    logprobs: Tensor | Any = None
    top_logprobs: Tensor | Any = None
    top_tokens: Tensor | Any = None
    kept: Tensor | Any = None
    rank: Tensor | Any = None


def sample(
    logits: Tensor, seed: Tensor, position: Tensor, temperature: Number = 1.0, top_k: Number | None = None,
    top_p: Number | None = None, min_p: Number | None = None, *, order: str = "sequential",
    logit_bias: Tensor | None = None, bitmask: Tensor | None = None, row_indices: Tensor | None = None,
    return_logprobs: str | None = None, top_logprobs: int = 0, return_kept: bool = False,
    token_ids: Tensor | None = None, repetition: Number = 1.0, presence: Number = 0.0, frequency: Number = 0.0,
    return_rank: bool = False,
) -> SampleOutput:  # fmt: skip
    """fused_softmax.sample for seeds and positions [n_draws], int64."""
    n_rows, n_cols = logits.shape
    in_range = None if row_indices is None else (row_indices >= 0) & (row_indices < n_rows)
    raw = rows_of_draws(logits, row_indices)
    x = raw if logit_bias is None else raw + logit_bias.float()
    if bitmask is not None:
        x = torch.where(unpacked(bitmask, n_cols), x, -math.inf)
    if token_ids is not None:
        x = penalize(x, token_ids, repetition, presence, frequency)
    judged = judge(x, temperature, top_k, top_p, min_p, joint=order == "joint")
    valid = judged.valid if in_range is None else judged.valid & in_range
    tokens = drawn(x, judged, temperature, top_k, top_p, min_p, order, seed, position)
    tokens = torch.where(valid, tokens, 0)
    of_tokens = top = top_tokens = None
    if return_logprobs is not None:
        logprobs = judged.log_probs if return_logprobs == "processed" else log_softmax(raw)
        of_tokens = logprobs.gather(1, tokens[:, None]).squeeze(1).masked_fill(~valid, math.nan).float()
        if top_logprobs:
            # By the logits: of equal logarithms the greater logit stands first, as the order of a filter has it.
            ordered = torch.where(judged.kept, x, -math.inf) if return_logprobs == "processed" else raw
            top_tokens = ordered.sort(dim=1, descending=True, stable=True).indices[:, :top_logprobs]
            top = logprobs.gather(1, top_tokens)
            top_tokens = torch.where(valid[:, None] & (top > -math.inf), top_tokens, -1)
            top = top.masked_fill(~valid[:, None], math.nan).float()
    kept = packed(judged.kept & valid[:, None]) if return_kept else None
    rank = rank_of(raw if return_logprobs == "raw" else x, tokens, valid) if return_rank else None
    return SampleOutput(tokens, valid, of_tokens, top, top_tokens, kept, rank)


def rank_of(x: Tensor, tokens: Tensor, valid: Tensor, kept: Tensor | None = None) -> Tensor:
    """How many logits [n, n_cols], of those that are kept, are greater than the token's, and 1; 0 where not valid."""
    greater = x > x.gather(1, tokens[:, None])
    if kept is not None:
        greater = greater & kept
    return torch.where(valid, greater.sum(1) + 1, 0)


FEW = 64  # of top-k, which is found before the draw


def drawn(
    x: Tensor, judged: Judged, temperature: Number, top_k: Number | None, top_p: Number | None, min_p: Number | None,
    order: str, seed: Tensor, position: Tensor,
) -> Tensor:  # fmt: skip
    """The tokens of rows x that were judged: drawn first, or from what is kept, if the boundary is needed anyway.

    It is needed if top-k keeps at most FEW columns, or if top-p judges what top-k left.
    """
    of_kept = noise.draw(judged.weights, seed, position)
    if top_p is None and (top_k is None or (isinstance(top_k, int) and top_k <= FEW)):
        return of_kept
    k = torch.zeros((), dtype=torch.int64, device=x.device) if top_k is None else per_row(top_k, x, torch.int64)
    k = torch.where((k > 0) & (k < x.shape[1]), k, 0)
    by_p = torch.zeros_like(k, dtype=torch.bool) if top_p is None else double_of(top_p, x) < 1
    first = torch.where(k > 0, (k > FEW) & ((order == "joint") | ~by_p), by_p)
    possible = torch.isfinite(judged.z)
    if min_p is not None:
        possible = possible & (judged.z >= least_score(min_p, x))
    of_arrivals = draw_first(x, judged.z.exp(), judged.kept, possible, seed, position)
    return torch.where(first.reshape(-1), of_arrivals, of_kept)


def rows_of_draws(logits: Tensor, row_indices: Tensor | None) -> Tensor:
    """float32 [n_draws, n_cols], the row of each draw; any row where its index is out of range."""
    if row_indices is not None:
        n_rows, n_cols = logits.shape
        if n_rows:
            logits = logits.index_select(0, row_indices.clamp(0, n_rows - 1))
        else:
            logits = logits.new_zeros(len(row_indices), n_cols)
    return logits.float().contiguous() + 0.0  # -0.0 is 0.0 wherever columns are ordered


def with_gradients(
    drawn: SampleOutput, logits: Tensor, temperature: Number, logit_bias: Tensor | None, row_indices: Tensor | None,
    processed: bool, token_ids: Tensor | None = None, penalties: tuple[Number, ...] = (),
) -> SampleOutput:  # fmt: skip
    """The draws, with log-probabilities that autograd differentiates. processed: over the columns in `drawn.kept`.

    A row that cannot be drawn from has gradient 0.
    """
    tokens, valid, _, top, top_tokens, kept, rank = drawn
    there = valid[:, None]
    x = rows_of_draws(logits, row_indices)
    if processed and kept is not None:
        x = x if logit_bias is None else x + logit_bias.float()
        if token_ids is not None:  # of a wrong penalty the gradient would be NaN
            right = [torch.where(valid, number, 1.0) for number in penalties]
            x = penalize(x, token_ids, *right)
        x = torch.where(unpacked(kept, x.shape[1]), x, -math.inf)
    x = torch.where(there, x, 0.0)
    m = x.detach().amax(1, keepdim=True)
    x = torch.where(m == math.inf, torch.where(x == m, 0.0, -math.inf), x)
    if processed:
        t = per_row(temperature, x).float()
        gap = x - torch.where(m == math.inf, 0.0, m)
        possible = gap > -math.inf  # of others t has no gradient, and -inf times 0 would be NaN
        gap = torch.where(possible, gap, 0.0) / torch.where(there & (t > 0), t, 1.0)
        x = torch.where(possible, gap, -math.inf)
    logprobs = x.log_softmax(1)
    of_tokens = logprobs.gather(1, tokens[:, None]).squeeze(1).masked_fill(~valid, math.nan)
    if top_tokens is not None:
        top = torch.where(top_tokens >= 0, logprobs.gather(1, top_tokens.clamp(min=0)), -math.inf)
        top = top.masked_fill(~there, math.nan)
    return SampleOutput(tokens, valid, of_tokens, top, top_tokens, kept, rank)


def judge(
    x: Tensor, temperature: Number, top_k: Number | None, top_p: Number | None, min_p: Number | None, joint: bool,
) -> Judged:  # fmt: skip
    """The distribution of each row of x [n, n_cols], float32. A row that cannot be drawn from is judged as zeros."""
    t = per_row(temperature, x)
    m = x.amax(1, keepdim=True)
    valid = ~x.isnan().any(1, keepdim=True) & (m > -math.inf) & ((x == math.inf).sum(1, keepdim=True) <= 1)
    valid = valid & (t >= 0) & (t < math.inf)
    if top_p is not None:
        valid = valid & (per_row(top_p, x) > 0)
    if min_p is not None:
        valid = valid & (per_row(min_p, x) <= 1)
    x = torch.where((m == math.inf) & (x < m), -math.inf, x)  # beside inf nothing can be drawn
    x, m = torch.where(valid, x, 0.0), torch.where(valid, m, 0.0)
    t = torch.where(valid, t, 1.0)
    greedy = t == 0
    first = torch.zeros_like(x, dtype=torch.bool).scatter(1, x.argmax(1, keepdim=True), True)
    z = torch.where(x == m, 0.0, x.double() - m.double()) / torch.where(greedy, 1.0, t)
    z = torch.where(greedy & ~first, -math.inf, z)
    weights = z.exp()
    kept = keep(torch.where(greedy & ~first, -math.inf, x), weights, top_k, top_p, joint)
    if min_p is not None:
        kept = kept & (z >= least_score(min_p, x))
    weights = torch.where(kept, weights, 0.0)
    return Judged(kept, z, weights, exact_sum(weights).squeeze(1), valid.squeeze(1))


def keep(x: Tensor, weights: Tensor, top_k: Number | None, top_p: Number | None, joint: bool) -> Tensor:
    """Which columns top_k and top_p leave of rows ordered by x, of weights in [0, 1]: bool, False where x is -inf."""
    possible = x > -math.inf
    if top_k is None and top_p is None:
        return possible
    order = x.sort(dim=1, descending=True, stable=True).indices
    kept = in_k = torch.ones_like(possible)
    if top_k is not None:
        k = per_row(top_k, x, torch.int64)
        in_k = (torch.arange(x.shape[1], device=x.device) < k) | (k <= 0)
        kept = in_k
    if top_p is not None:
        p = double_of(top_p, x)
        weights = weights.gather(1, order)
        running = running_sum(weights if joint else torch.where(in_k, weights, 0.0))
        before = torch.nn.functional.pad(running, (1, -1))
        kept = kept & ((before < p * REACHED * running[:, -1:]) | (p >= 1))
    return torch.zeros_like(possible).scatter(1, order, kept.expand_as(order)) & possible


def running_sum(weights: Tensor) -> Tensor:
    """Cumulative sums over the last dim of float64 weights in [0, 1], to 2^-80 and the same in any order of addition.

    Two integers hold each weight, one its first 62 - log2(n_cols) binary places, one as many more.
    """
    high, low, scale = integers_of(weights)
    return (high.cumsum(-1).double() + low.cumsum(-1).double() / scale) / scale


def exact_sum(weights: Tensor) -> Tensor:
    """The last element of `running_sum`, [..., 1], with the gradient of a sum."""
    high, low, scale = integers_of(weights.detach())
    total = (high.sum(-1, keepdim=True).double() + low.sum(-1, keepdim=True).double() / scale) / scale
    differentiable = weights.sum(-1, keepdim=True)
    return total + (differentiable - differentiable.detach())


def integers_of(weights: Tensor) -> tuple[Tensor, Tensor, float]:
    """(high, low, scale) of weights: int64, which are high / scale + low / scale^2."""
    scale = 2.0 ** (62 - weights.shape[-1].bit_length())
    scaled = weights * scale
    high = scaled.floor()
    return high.long(), ((scaled - high) * scale).floor().long(), scale


def log_softmax(x: Tensor) -> Tensor:
    """log_softmax over the last dim of float32 [n, n_cols], in float64; a row with one inf has 0 there."""
    m = x.amax(-1, keepdim=True)
    z = torch.where((x == m) & (m > -math.inf), 0.0, x.double() - m.double())
    spoilt = z.isnan().any(-1, keepdim=True) | ((x == math.inf).sum(-1, keepdim=True) > 1)
    total = exact_sum(z.nan_to_num(0.0, 0.0, -math.inf).exp())
    return (z - total.log()).masked_fill(spoilt, math.nan)


def per_row(number: Number, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """A parameter as [n_rows, 1] or [1, 1]: of float32 in float64, or of int64."""
    if not isinstance(number, Tensor):
        number = torch.full((), number, dtype=dtype, device=x.device)
    number = number.to(dtype).reshape(-1, 1)
    return number if dtype == torch.int64 else number.double()


def double_of(number: Number, x: Tensor) -> Tensor:
    """A parameter as [n_rows, 1] or [1, 1], float64: a number as it is, a tensor as float32 has it."""
    if isinstance(number, Tensor):
        return per_row(number, x)
    return torch.full((1, 1), number, dtype=torch.float64, device=x.device)


def least_score(min_p: Number, x: Tensor) -> Tensor:
    """The least z that min_p keeps, [n_rows, 1] or [1, 1]."""
    return (double_of(min_p, x).clamp(0, 1) * REACHED).log()


def unpacked(bitmask: Tensor, n_cols: int) -> Tensor:
    """An int32 bitmask [n, words] as bool [n, n_cols]: bit c % 32 of word c // 32 is column c."""
    bits = (bitmask[:, :, None] >> torch.arange(32, device=bitmask.device, dtype=torch.int32)) & 1
    return bits.flatten(1)[:, :n_cols].bool()


def packed(kept: Tensor) -> Tensor:
    """Bool [n, n_cols] as an int32 bitmask [n, ceil(n_cols / 32)]."""
    words = -(-kept.shape[1] // 32)
    bits = torch.nn.functional.pad(kept, (0, words * 32 - kept.shape[1])).unflatten(1, (words, 32))
    word = (bits.long() << torch.arange(32, device=kept.device)).sum(2)
    return torch.where(word >= 2**31, word - 2**32, word).int()


def mask_logits(
    logits: Tensor, top_k: Number | None = None, top_p: Number | None = None, min_p: Number | None = None
) -> Tensor:
    """The logits, -inf where a filter keeps nothing; NaN in a row that has one, or whose parameter is wrong."""
    x = logits.detach().float().contiguous() + 0.0
    m = x.amax(1, keepdim=True)
    z = torch.where(x == m, 0.0, x.double() - m.double())
    bad = x.isnan().any(1, keepdim=True)
    if top_p is not None:
        bad = bad | ~(per_row(top_p, x) > 0) | ((x == math.inf).sum(1, keepdim=True) > 1)
    if min_p is not None:
        bad = bad | ~(per_row(min_p, x) <= 1) | ((x == math.inf).sum(1, keepdim=True) > 1)
    kept = keep(x.masked_fill(bad, 0.0), z.masked_fill(bad, 0.0).exp(), top_k, top_p, joint=False)
    if min_p is not None:
        kept = kept & (z >= least_score(min_p, x))
    return logits.masked_fill(~(kept | bad), -math.inf) * nan_where(bad, logits.dtype)


def renorm_probs(probs: Tensor, top_k: Number | None = None, top_p: Number | None = None) -> Tensor:
    """The probabilities that a filter keeps over their sum, 0 elsewhere; NaN in a row that has no such sum."""
    given = probs.double().contiguous() + 0.0
    p = given.detach()
    most = p.amax(1, keepdim=True)
    bad = ~(p >= 0).all(1, keepdim=True) | ~((most > 0) & (most < math.inf))
    if top_p is not None:
        bad = bad | ~(per_row(top_p, p) > 0)
    weights = given / torch.where(bad, 1.0, most)
    kept = keep(torch.where(bad, 0.0, p), torch.where(bad, 1.0, weights.detach()), top_k, top_p, joint=False)
    weights = torch.where(kept | bad, weights, 0.0)
    return (weights / exact_sum(weights) * nan_where(bad, weights.dtype)).to(probs.dtype)


def nan_where(bad: Tensor, dtype: torch.dtype) -> Tensor:
    """A factor of rows that makes bad rows and their gradients NaN."""
    return torch.where(bad, math.nan, 1.0).to(dtype)


def penalize(
    logits: Tensor, token_ids: Tensor, repetition: Number = 1.0, presence: Number = 0.0, frequency: Number = 0.0
) -> Tensor:
    """The logits of ids [n, length] over or times repetition, less presence and frequency times their counts."""
    n_cols = logits.shape[1]
    ids = token_ids.long()
    ids = torch.where((ids >= 0) & (ids < n_cols), ids, n_cols)
    counts = torch.zeros(len(logits), n_cols + 1, dtype=torch.int32, device=logits.device)
    counts = counts.scatter_add(1, ids, torch.ones_like(ids, dtype=torch.int32))[:, :n_cols]
    r, once, each = (per_row(number, logits).float() for number in (repetition, presence, frequency))
    bad = ~((r > 0) & (r < math.inf)) | ~once.isfinite() | ~each.isfinite()
    x = logits.float()
    present = counts > 0
    # An infinite logit stays what it is. What is not chosen is finite: infinity times a gradient of 0 would be NaN.
    scaled = present & x.isfinite()
    finite = torch.where(scaled, x, 0.0)
    x = torch.where(scaled, torch.where(finite < 0, finite * r, finite / r), x)
    x = torch.where(present, x - each * counts - once, x)
    return (x * nan_where(bad, x.dtype)).to(logits.dtype)
