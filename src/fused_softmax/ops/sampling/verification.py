"""Drafts against their target, of torch's operations in float64: chains, blocks and trees of them.

Row r of the target, distribution p, follows the drafts that lead to it, and was drafted of with distribution q. A chain
is a tree whose drafts follow one another. At a row its drafts are tried in order:

    left = p - less q, cut at 0    less: the mass of what was left at each rejection before; 0 at first, so left is p
    a draft d is accepted where u mass(left) q(d) < left(d)

If none is accepted, what is left is drawn from. With one draft a row that is chain acceptance (Leviathan, Kalman,
Matias, "Fast inference from transformers via speculative decoding", ICML 2023, arXiv 2211.17192); with several it is
multi-step acceptance (Miao et al., "SpecInfer", ASPLOS 2024, arXiv 2305.09781), whose residuals, each of the one before
less q, are all of the form above.

A block is accepted as far as possible at once (Sun et al., "Block verification accelerates speculative decoding", ICLR
2025, arXiv 2403.10444): with a_0 = 1 and a_i = min(1, a_(i-1) p(d_i) / q(d_i)) of the rows that drafts lead to,

    Z_i = sum of (a_i p - q, cut at 0) of row i    h_i = Z_i / (Z_i + 1 - a_i), of the last row h_i = a_i

drafts are accepted up to the last i where u_i < h_i, and a_i p - q, cut at 0, is drawn from.

Of drafts whose distribution is not told, those are accepted that are the target's own tokens.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fused_softmax.ops.sampling import noise
from fused_softmax.ops.sampling.reference import Number, drawn, exact_sum, judge, log_softmax, unpacked

Verify = Literal["chain", "block", "tree"]


class SpeculativeOutput(NamedTuple):
    """For each of n sequences: its tokens, how many of them are accepted drafts, and whether the last could be drawn.

    tokens: int64 [n, k + 1]: the accepted drafts, one token more, and -1 behind it.
    n_accepted: int64 [n], from 0 to k.
    valid: bool [n]; where False, the token after the accepted drafts is 0, because its row cannot be drawn from.
    logprobs: float32 [n, k + 1], in nats, that of each token by the target; NaN where there is none. None unless asked.
    nodes: int64 [n, k], of a tree: which drafts were accepted, in order, and -1 behind them. None otherwise.

    >>> out = speculative_sample(target_logits, draft_tokens, seed=1, position=17)  # [8, 4, 128256], [8, 3]
    >>> out.tokens, out.n_accepted  # [8, 4], [8]
    """

    tokens: Tensor
    n_accepted: Tensor
    valid: Tensor
    # `| Any`, and not `| None`: a type checker then lets callers who asked for it use it.
    logprobs: Tensor | Any = None
    nodes: Tensor | Any = None


class Drafts(NamedTuple):
    """Of n sequences with k drafts each.

    column: int64 [n, k], 0 where there is no draft. there: bool [n, k], whether there is. row: int64 [n, k], the row of
    the target that judges it. depth: int64 [n, k + 1], how many drafts lead to each row of the target. valid: bool [n],
    whether lengths and parents are in range. is_tree: whether a row may have several.
    """

    column: Tensor
    there: Tensor
    row: Tensor
    depth: Tensor
    valid: Tensor
    is_tree: bool


class Path(NamedTuple):
    """How far sequences came. n_accepted [n]; nodes [n, k], the accepted drafts, then -1; row [n], the last row."""

    n_accepted: Tensor
    nodes: Tensor
    row: Tensor


def drafts_of(draft_tokens: Tensor, lengths: Tensor | None, parents: Tensor | None, n_cols: int) -> Drafts:
    """lengths: [n]. parents: [n, k], of a tree."""
    n, k = draft_tokens.shape
    at = torch.arange(k + 1, device=draft_tokens.device)
    there = (draft_tokens >= 0) & (draft_tokens < n_cols)
    valid = torch.ones_like(at[:1], dtype=torch.bool).expand(n)
    if lengths is not None:
        there = there & (at[:-1] < lengths[:, None])
        valid = (lengths >= 0) & (lengths <= k)
    row, depth = at[:-1].expand(n, k), at.expand(n, k + 1)
    if parents is not None:
        right = (parents >= -1) & (parents < at[:-1])
        valid = valid & (right | ~there).all(1)
        row = torch.where(right, parents.long() + 1, 0)
        depth = at[:1].expand(n, 1)
        for j in range(k):
            depth = torch.cat([depth, depth.gather(1, row[:, j : j + 1]) + 1], 1)
    there = there & valid[:, None]
    return Drafts(torch.where(there, draft_tokens, 0).long(), there, row, depth, valid, parents is not None)


def speculative_sample(
    target_logits: Tensor, draft_tokens: Tensor, draft_logits: Tensor | None, draft_probs: Tensor | None,
    draft_lengths: Tensor | None, parents: Tensor | None, logit_bias: Tensor | None, bitmask: Tensor | None,
    seed: Tensor, position: Tensor, temperature: Number = 1.0, top_k: Number | None = None,
    top_p: Number | None = None, min_p: Number | None = None, *, order: str = "sequential", verify: Verify = "chain",
    return_logprobs: str | None = None,
) -> SpeculativeOutput:  # fmt: skip
    """fused_softmax.speculative_sample for seeds and positions [n], int64; a row has position + its depth.

    temperature and filters: numbers, or tensors [n] or [n, k + 1]. logit_bias, bitmask: [n, 1 or k + 1, ...].
    """
    n, n_rows, n_cols = target_logits.shape
    drafts = drafts_of(draft_tokens, draft_lengths, parents, n_cols)
    seeds, positions = seed[:, None].expand(n, n_rows), position[:, None] + drafts.depth
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    numbers: dict[str, Any] = {name: of_rows(number, n, n_rows) for name, number in given.items()}
    raw = x = target_logits.float().reshape(n * n_rows, n_cols) + 0.0
    if logit_bias is not None:
        x = x + logit_bias.float().expand(n, n_rows, n_cols).reshape(n * n_rows, n_cols)
    if bitmask is not None:
        x = torch.where(unpacked(bitmask.expand(n, n_rows, -1).flatten(0, 1), n_cols), x, -math.inf)
    target = judge(x, **numbers, joint=order == "joint")
    valid = target.valid.unflatten(0, (n, n_rows)) & drafts.valid[:, None]
    if draft_logits is None and draft_probs is None:
        own = drawn(x, target, **numbers, order=order, seed=seeds.flatten(), position=positions.flatten())
        own = own.unflatten(0, (n, n_rows))
        path = path_of_tokens(own, valid, drafts)
        last = own.gather(1, path.row[:, None]).squeeze(1)
    else:
        few = {name: of_rows(number, n, n_rows, n_rows - 1) for name, number in given.items()}
        q, drafted = _drafted(draft_logits, draft_probs, few, order)
        asked = torch.zeros_like(positions).scatter_add(1, drafts.row, drafts.there.long()) > 0
        valid = valid & (drafted | ~asked)
        p = target.probs.unflatten(0, (n, n_rows))
        follow = _of_block if verify == "block" else _of_tree
        path, scale, less = follow(p, q, drafts, valid, seed, positions)
        at = positions.gather(1, path.row[:, None]).squeeze(1)
        p, q = _row_of(p, path.row), _row_of(q, path.row)
        left = (scale[:, None] * p - less[:, None] * q).clamp(min=0.0)
        left = torch.where((left > 0).any(1, keepdim=True), left, p)  # of two equal distributions nothing is left
        other = noise.draw(left, seed, at, noise.RESIDUAL_GROUPS, noise.RESIDUAL_MEMBERS)
        last = torch.where(less > 0, other, noise.draw(p, seed, at))
    found = None
    if return_logprobs is not None:
        of_columns = (log_softmax(raw) if return_logprobs == "raw" else target.log_probs).view(n, n_rows * n_cols)
        found = lambda row, token: of_columns.gather(1, row * n_cols + token)  # noqa: E731
    return output_of(path, last, valid, drafts, found)


def _drafted(logits: Tensor | None, probs: Tensor | None, numbers: dict[str, Any], order: str) -> tuple[Tensor, Tensor]:
    """(the distributions [n, k + 1, n_cols] that drafts were drawn from, which rows have one).

    The last row has none.
    """
    if probs is None:
        assert logits is not None
        n, k, n_cols = logits.shape
        judged = judge(logits.float().reshape(n * k, n_cols) + 0.0, **numbers, joint=order == "joint")
        q, there = judged.probs.unflatten(0, (n, k)), judged.valid.unflatten(0, (n, k))
    else:
        most = probs.double().amax(2, keepdim=True)
        good = ((probs >= 0).all(2, keepdim=True)) & (most > 0) & (most < math.inf)
        q = torch.where(good, probs.double() / torch.where(good, most, 1.0), 0.0)
        q, there = q / torch.where(good, exact_sum(q), 1.0), good.squeeze(2)
    pad = torch.nn.functional.pad
    return pad(q, (0, 0, 0, 1)), pad(there, (0, 1))


def path_of_tokens(own: Tensor, valid: Tensor, drafts: Drafts) -> Path:
    """The drafts that are the target's own tokens [n, k + 1]."""
    k = drafts.column.shape[1]
    at = torch.arange(k, device=own.device)
    if not drafts.is_tree:
        accepted = (own == torch.nn.functional.pad(drafts.column, (0, 1), value=-1)) & valid
        accepted = accepted[:, :-1] & drafts.there
        n_accepted = accepted.long().cumprod(1).sum(1)
        return Path(n_accepted, torch.where(at < n_accepted[:, None], at, -1), n_accepted)
    path = _begin(drafts)
    is_own = own.gather(1, drafts.row) == drafts.column
    for j in range(k):
        path = _onward(path, j, is_own[:, j] & _is_tried(path, j, drafts, valid))
    return path


def _begin(drafts: Drafts) -> Path:
    zero = torch.zeros_like(drafts.depth[:, 0])
    return Path(zero, torch.full_like(drafts.column, -1), zero)


def _is_tried(path: Path, j: int, drafts: Drafts, valid: Tensor) -> Tensor:
    return drafts.there[:, j] & (drafts.row[:, j] == path.row) & valid.gather(1, path.row[:, None]).squeeze(1)


def _onward(path: Path, j: int, accepted: Tensor) -> Path:
    """The path, by draft j where it is accepted."""
    place = path.n_accepted.clamp(max=path.nodes.shape[1] - 1)[:, None]
    nodes = path.nodes.scatter(1, place, torch.where(accepted[:, None], j, path.nodes.gather(1, place)))
    return Path(path.n_accepted + accepted, nodes, torch.where(accepted, j + 1, path.row))


def _of_tree(
    p: Tensor, q: Tensor, drafts: Drafts, valid: Tensor, seed: Tensor, positions: Tensor
) -> tuple[Path, Tensor, Tensor]:
    """(the path, and what is left at its last row: scale [n] times p, less [n] times q)."""
    path, tried = _begin(drafts), torch.zeros_like(drafts.depth[:, :1])
    mass = torch.ones_like(p[:, 0, 0])
    less = torch.zeros_like(mass)
    for j in range(drafts.column.shape[1]):
        here = _is_tried(path, j, drafts, valid)
        of_p, of_q = _at(p, path.row, drafts.column[:, j]), _at(q, path.row, drafts.column[:, j])
        accepted = here & (_uniform(seed, positions, path.row, tried) * mass * of_q < of_p - less * of_q)
        rejected = here & ~accepted
        path = _onward(path, j, accepted)
        tried = torch.where(accepted[:, None], 0, tried + rejected[:, None])
        less = torch.where(accepted, 0.0, torch.where(rejected, less + mass, less))
        if drafts.is_tree:
            left = (_row_of(p, path.row) - less[:, None] * _row_of(q, path.row)).clamp(min=0.0)
            mass = torch.where(less > 0, exact_sum(left).squeeze(1), 1.0)
    return path, torch.ones_like(less), less


def _of_block(
    p: Tensor, q: Tensor, drafts: Drafts, valid: Tensor, seed: Tensor, positions: Tensor
) -> tuple[Path, Tensor, Tensor]:
    """As _of_tree."""
    k = drafts.column.shape[1]
    at = torch.arange(k, device=p.device)
    n_accepted, scale = torch.zeros_like(drafts.depth[:, 0]), torch.ones_like(p[:, 0, 0])
    a, first = scale, torch.zeros_like(drafts.depth[:, :1])
    drafted = torch.nn.functional.pad(drafts.there & valid[:, :-1], (0, 1)).long().cumprod(1) > 0
    for i in range(k):
        row = torch.full_like(n_accepted, i)
        of_p, of_q = p[:, i].gather(1, drafts.column[:, i, None]), q[:, i].gather(1, drafts.column[:, i, None])
        most = torch.where(of_p > 0, 1e38, 0.0)  # of a draft that q has not; 0 times it is 0
        ratio = torch.where(of_q > 0, of_p / torch.where(of_q > 0, of_q, 1.0), most)
        a = torch.where(drafted[:, i], (a * ratio.squeeze(1)).clamp(max=1.0), a)
        left = exact_sum((a[:, None] * p[:, i + 1] - q[:, i + 1]).clamp(min=0.0)).squeeze(1)
        rest = left + (1.0 - a)
        h = torch.where(rest > 0, left / torch.where(rest > 0, rest, 1.0), 1.0)
        h = torch.where(drafted[:, i + 1], h, a)
        accepted = drafted[:, i] & (_uniform(seed, positions, row, first) < h)
        n_accepted, scale = torch.where(accepted, i + 1, n_accepted), torch.where(accepted, a, scale)
    path = Path(n_accepted, torch.where(at < n_accepted[:, None], at, -1), n_accepted)
    goes_on = drafted.gather(1, n_accepted[:, None]).squeeze(1)
    return path, scale, goes_on.double()


def _uniform(seed: Tensor, positions: Tensor, row: Tensor, tried: Tensor) -> Tensor:
    """u [n], by which a draft of a row is judged after so many others were tried."""
    at = positions.gather(1, row[:, None]).squeeze(1)
    return noise.uniform(noise.words_at(seed, at, tried, noise.ACCEPTED), 0).squeeze(1)


def _row_of(rows: Tensor, row: Tensor) -> Tensor:
    return rows[torch.arange(len(rows), device=rows.device), row]


def _at(rows: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return rows[torch.arange(len(rows), device=rows.device), row, column]


def output_of(
    path: Path, last: Tensor, valid: Tensor, drafts: Drafts, logprobs: Callable[[Tensor, Tensor], Tensor] | None = None
) -> SpeculativeOutput:
    """The output for paths and the tokens `last` [n] after them, from rows [n, k + 1] that are valid or not.

    logprobs: of the rows and tokens [n, k + 1] of the target.
    """
    at, end = torch.arange(valid.shape[1], device=last.device), path.n_accepted[:, None]
    there = valid.gather(1, path.row[:, None])
    nodes = torch.nn.functional.pad(path.nodes, (0, 1), value=-1)
    columns = torch.nn.functional.pad(drafts.column, (0, 1)).gather(1, nodes.clamp(min=0))
    tokens = torch.where(at < end, columns, torch.where(there, last[:, None], 0))
    of_tokens = None
    if logprobs is not None:
        of_tokens = logprobs(torch.nn.functional.pad(path.nodes + 1, (1, 0)), tokens).float()
        of_tokens = torch.where((at < end) | ((at == end) & there), of_tokens, math.nan)
    tokens = tokens.masked_fill(at > end, -1)
    return SpeculativeOutput(
        tokens, path.n_accepted, there.squeeze(1), of_tokens, path.nodes if drafts.is_tree else None
    )


def of_rows(number: Number | None, n: int, n_rows: int, first: int | None = None) -> Number | None:
    """A parameter as one of the rows [n * n_rows], or of the first of each sequence."""
    if not _is_of_rows(number):
        return number
    assert isinstance(number, Tensor)
    spread = number[:, None].expand(n, n_rows) if number.ndim == 1 else number
    return spread[:, :first].flatten()


def _is_of_rows(number: Any) -> bool:
    return isinstance(number, Tensor) and number.ndim > 0
