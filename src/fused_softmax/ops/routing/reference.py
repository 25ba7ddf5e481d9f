"""Routing of torch's operations, in float64: the choice of each row, its weights, and the sums over rows.

A row is routed in this order:

    x        the logit plus its noise, in float32
    score    of all experts: softmax(x), sigmoid(x) or sqrt(softplus(x)), in float64
    key      what the choice compares, in float32: score + bias where there is a bias or groups leave experts out, else
             x; x + bias where the choice goes before the score
    groups   the groups_kept best, by the sum of the two best keys of each, or by the best; of equals the lowest
    ids      the k greatest keys of these groups; of equals the lowest
    weight   score[ids], or the score of x[ids] alone; over their sum, times scale

A row without a distribution (a NaN, an inf, or nothing above -inf) is routed nowhere. Nothing waits for a device, no
shape depends on data, and no sum depends on the order in which threads come: results are the same on every run.
Autograd differentiates all of it but the choice.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_softmax.core.checks import arithmetic_of
from fused_softmax.ops.routing.options import Routing


class RouteOutput(NamedTuple):
    """Where rows of logits [..., n_experts] go, and what else was asked for; None for the rest.

    weights: float32 [..., k], of the experts in indices.
    indices: int32 [..., k], the best first; all -1 for a row that is routed nowhere.
    counts: int32 [n_experts], how many rows chose each expert.
    prob_sums: float32 [n_experts], of each expert the sum of its probability over all rows that are routed.
    aux_loss, z_loss: float32 [].
    dense: float32 [..., n_experts], the weights in the places of their experts, and 0 elsewhere.

    >>> out = route(torch.tensor([[0.0, 2.0, 1.0]]), 2)
    >>> out.weights, out.indices, out.counts
    (tensor([[0.7311, 0.2689]]), tensor([[1, 2]], dtype=torch.int32), tensor([0, 1, 1], dtype=torch.int32))
    """

    weights: Tensor
    indices: Tensor
    # `| Any`, and not `| None`: a type checker then lets callers who asked for it use it.
    counts: Tensor | Any = None
    prob_sums: Tensor | Any = None
    aux_loss: Tensor | Any = None
    z_loss: Tensor | Any = None
    dense: Tensor | Any = None


class Sums(NamedTuple):
    """The sums over rows: float64, except counts. Sums of other ranks' rows are added field by field.

    counts: int32 [n_experts]. probs: [n_experts]. n_rows: [], routed rows. lse_squares: [].
    balance, n_sequences: [], the sum of the losses of sequences, and how many have a routed row.
    None for what no result follows from.
    """

    counts: Tensor | Any = None
    probs: Tensor | Any = None
    n_rows: Tensor | Any = None
    lse_squares: Tensor | None = None
    balance: Tensor | None = None
    n_sequences: Tensor | None = None


class Routed(NamedTuple):
    """Of flat rows: weights and indices [n_rows, k], dense [n_rows, n_experts] or None, and their sums."""

    weights: Tensor
    indices: Tensor
    dense: Tensor | None
    sums: Sums


def route(logits: Tensor, k: int, **given: Any) -> RouteOutput:
    """fused_softmax.route of arguments that were checked, and of float64 logits too, which give float64."""
    options = Routing(k=k, **given)
    return output_of(rows_of(logits, options), logits, options)


def output_of(routed: Routed, logits: Tensor, options: Routing) -> RouteOutput:
    """The result of a call on these logits, from its rows, with the sums of all of them."""
    dtype, sums = arithmetic_of(logits), routed.sums
    aux_loss: Tensor | None = None
    if options.return_aux_loss:
        if sums.balance is None or sums.n_sequences is None:
            aux_loss = _balance(sums.counts, sums.probs, sums.n_rows, options.k)
        else:
            aux_loss = sums.balance / sums.n_sequences.clamp(min=1)
    z_loss = None if sums.lse_squares is None else sums.lse_squares / sums.n_rows.clamp(min=1)
    aux_loss, z_loss = (None if each is None else each.to(dtype) for each in (aux_loss, z_loss))
    leading = logits.shape[:-1]
    return RouteOutput(
        routed.weights.view(*leading, options.k),
        routed.indices.view(*leading, options.k),
        sums.counts if options.return_counts else None,
        sums.probs.to(dtype) if options.return_counts else None,
        aux_loss,
        z_loss,
        None if routed.dense is None else routed.dense.view(logits.shape),
    )


def rows_of(logits: Tensor, options: Routing) -> Routed:
    """All of a call but what follows from the sums."""
    n_experts, k, dtype = logits.shape[-1], options.k, arithmetic_of(logits)
    n_rows = logits.shape[:-1].numel()
    x = logits.reshape(n_rows, n_experts).to(dtype)
    if options.noise is not None:
        x = x + options.noise.reshape(n_rows, n_experts).to(dtype)
    best = x.detach().amax(-1)
    valid = (best > -math.inf) & (best < math.inf)  # a NaN is neither
    if options.row_mask is not None:
        valid = valid & options.row_mask.reshape(n_rows)
    x = torch.where(valid[:, None], x, 0.0)
    double = x.double()
    scores = _score(double, options.score)
    wrong = None
    if options.indices is None:
        ids, ordered = _choose(x.detach(), scores.detach().to(dtype), options)
        valid = valid & ordered
    else:
        ids = options.indices.reshape(n_rows, k).long()
        bad = _cannot_be_replayed(ids, n_experts)
        valid, wrong = valid & ~bad, valid & bad
    taken = (ids >= 0) & valid[:, None]
    ids = torch.where(taken, ids, -1)
    weights = _weights(double, scores, ids, taken, options).to(dtype)
    if wrong is not None:
        weights = weights.masked_fill(wrong[:, None], math.nan)
    place = torch.where(taken, ids, n_experts)  # what chose no expert goes beside them
    dense = None
    if options.dense:
        dense = weights.new_zeros(n_rows, n_experts + 1).scatter(1, place, weights)[:, :n_experts]
        if wrong is not None:
            dense = dense.masked_fill(wrong[:, None], math.nan)
    return Routed(weights, ids.to(torch.int32), dense, _sums(double, scores, place, valid, options))


def _score(x: Tensor, score: str) -> Tensor:
    """Of float64 logits, without a NaN, also in the gradient of -inf."""
    if score == "softmax":
        return x.softmax(-1)
    if score == "sigmoid":
        return x.sigmoid()
    y = torch.nn.functional.softplus(x, threshold=40)  # beyond, it is x to the last bit
    some = y > 0
    return torch.where(some, torch.where(some, y, 1.0).sqrt(), 0.0)


def _choose(x: Tensor, scores: Tensor, options: Routing) -> tuple[Tensor, Tensor]:
    """Ids [n_rows, k], and whether nothing that the choice of a row compares is NaN."""
    n_rows, n_experts = x.shape
    key = scores if options.score_first and (options.bias is not None or options.grouped) else x
    if options.bias is not None:
        key = key + options.bias.to(key.dtype)
    key = key + 0.0  # -0.0 is 0.0 where a device sorts by bits
    ordered = ~key.isnan().any(-1)
    if not options.grouped:
        return _first(key, options.k), ordered
    size = n_experts // options.n_groups
    in_groups = key.view(n_rows, options.n_groups, size)
    if options.group_score == "max":
        of_groups = in_groups.amax(-1)
    else:
        of_groups = in_groups.sort(-1, descending=True).values[..., :2].sum(-1)
    ordered = ordered & ~of_groups.isnan().any(-1)
    groups = _first(of_groups + 0.0, options.groups_kept or 1).sort(-1).values
    # Experts of these groups in their order, so that none of another is in reach, whatever its key is.
    within = torch.arange(size, device=x.device)
    experts = (groups[..., None] * size + within).flatten(1)
    return experts.gather(1, _first(key.gather(1, experts), options.k)), ordered


def _first(key: Tensor, k: int) -> Tensor:
    """Where the k greatest of each row are, the greatest first, of equals the lowest."""
    return key.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def _cannot_be_replayed(ids: Tensor, n_experts: int) -> Tensor:
    """Whether a row has an id that is neither an expert nor -1, or an expert twice."""
    ordered = ids.sort(-1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    return ((ids < -1) | (ids >= n_experts)).any(-1) | twice.any(-1)


def _weights(x: Tensor, scores: Tensor, ids: Tensor, taken: Tensor, options: Routing) -> Tensor:
    """float64 [n_rows, k]; 0 where nothing is taken."""
    at = ids.clamp(min=0)
    if options.score_first:
        weights = scores.gather(1, at)
    else:
        chosen = x.gather(1, at)
        if options.score == "softmax":
            chosen = torch.where(taken, chosen, -math.inf)
            some = chosen.detach().amax(-1, keepdim=True) > -math.inf
            weights = torch.where(some, torch.where(some, chosen, 0.0).softmax(-1), 0.0)
        else:
            weights = _score(chosen, options.score)
    weights = torch.where(taken, weights, 0.0)
    if options.renormalize:
        weights = _over_sum(weights)
    return weights * options.scale


def _over_sum(scores: Tensor) -> Tensor:
    """Over the sum of each row; 0 where that is 0 in float32."""
    total = scores.sum(-1, keepdim=True)
    some = total.float() > 0
    return torch.where(some, scores / torch.where(some, total, 1.0), 0.0)


def _sums(x: Tensor, scores: Tensor, place: Tensor, valid: Tensor, options: Routing) -> Sums:
    n_rows, n_experts = x.shape
    probs = scores if options.score == "softmax" else _over_sum(scores)
    probs = torch.where(valid[:, None], probs, 0.0)
    chose = torch.zeros(n_rows, n_experts + 1, dtype=torch.bool, device=x.device).scatter(1, place, 1)[:, :n_experts]

    def added(each: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        n = options.examples
        return each.sum(0, dtype=dtype) if n is None else each.unflatten(0, (n, len(each) // n)).sum(1, dtype=dtype)

    squares = balance = n_sequences = None
    if options.return_z_loss:
        squares = added(torch.where(valid, x.logsumexp(-1).square(), 0.0))
    if options.return_aux_loss and options.sequence_length is not None:
        shape = n_rows // options.sequence_length, options.sequence_length
        of_each = valid.view(shape).sum(-1, dtype=torch.float64)
        losses = _balance(
            chose.view(*shape, n_experts).sum(1), probs.view(*shape, n_experts).sum(1), of_each, options.k
        )
        balance, n_sequences = added(losses), added(of_each > 0, torch.float64)
    return Sums(added(chose, torch.int32), added(probs), added(valid, torch.float64), squares, balance, n_sequences)


def _balance(counts: Tensor, prob_sums: Tensor, n_rows: Tensor, k: int) -> Tensor:
    """n_experts * sum f P, from counts and sums [..., n_experts] of n_rows [...] rows; 0 for no rows."""
    n = n_rows.clamp(min=1)
    return counts.shape[-1] * (counts * prob_sums).sum(-1) / (n * n * k)
