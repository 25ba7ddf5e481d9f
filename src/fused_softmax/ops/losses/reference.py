"""Cross-entropy of torch's operations: the formulas that the kernels are held to, in any dtype."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_softmax.ops.losses.options import unreadable


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    softcap: float | None = None,
    scale: float = 1.0,
    lse_square_scale: float = 0.0,
    dtype: torch.dtype | None = None,
    arithmetic: torch.dtype = torch.float64,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, lse, z-loss) of fused_softmax.cross_entropy of torch's operations; a target that is no class gives NaN."""
    result = input.dtype if dtype is None else dtype
    class_dim = 0 if input.ndim == 1 else 1
    z = (input.to(arithmetic) * scale).movedim(class_dim, -1)
    n_classes = z.shape[-1]
    t: Any = None
    counts: Any = None
    if not target.is_floating_point():
        t = target.long()
        counts = t != ignore_index
    if lse is None:
        z, known = _spared(z, counts, softcap)
        lse, log_p = torch.logsumexp(z, -1), torch.log_softmax(z, -1)
        lse = lse if known is None else torch.where(counts | known.isfinite(), lse, known)
    else:  # that of longer rows: its value stays as given, and its derivative by z is p
        lse = lse.detach().to(arithmetic)
        z, of_rows = (torch.where(on, each, 0.0) for on, each in ((counts.unsqueeze(-1), z), (counts, lse)))
        z = _capped(z, softcap)
        p = torch.exp(z - of_rows.unsqueeze(-1))
        log_p = z - (of_rows + (p - p.detach()).sum(-1)).unsqueeze(-1)
    weights = torch.ones(n_classes, dtype=arithmetic, device=z.device) if weight is None else weight.to(arithmetic)
    z_loss = lse_square_scale * lse.square()
    if counts is None:
        q = target.to(arithmetic).movedim(class_dim, -1) * (1.0 - label_smoothing) + label_smoothing / n_classes
        loss = -(weights * q * log_p).sum(-1)
        of_loss = of_z = torch.tensor(float(lse.numel()), dtype=arithmetic, device=z.device)
    else:
        wrong = counts & ((t < 0) | (t >= n_classes))
        kept = counts & ~wrong
        t = torch.where(kept, t, 0)
        w = weights.gather(0, t.flatten()).view(t.shape)  # not weights[t], which vmap refuses for one target
        loss = -w * log_p.gather(-1, t.unsqueeze(-1)).squeeze(-1)
        if label_smoothing:
            loss = (1.0 - label_smoothing) * loss - label_smoothing / n_classes * (weights * log_p).sum(-1)
        spoilt = torch.where(wrong, math.nan, 1.0).to(arithmetic)  # multiplied, so that the gradient is NaN too
        loss, z_loss = (each.masked_fill(~counts, 0.0) * spoilt for each in (loss, z_loss))
        of_loss, of_z = (torch.where(kept, w, 0.0).sum() if weight is not None else counts.sum()), counts.sum()
    if reduction != "none":
        loss, z_loss = loss.sum(), z_loss.sum()
    if reduction == "mean":
        loss, z_loss = loss / of_loss, z_loss / of_z
    if lse_square_scale:
        total = loss + z_loss
    else:  # 0 and no product with 0, for an lse may be infinite, and a mean of nothing
        total, z_loss = loss, loss.masked_fill(torch.ones_like(loss, dtype=torch.bool), 0.0)
    return total.to(result), lse, z_loss.to(result)


def _spared(z: Tensor, counts: Tensor | None, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """(z capped, and 0 in rows that do not count and whose lse is not finite; the lse of all rows as it was).

    The gradient of such a row is 0, of which torch's operations would make NaN.
    """
    if counts is None:
        return _capped(z, softcap), None
    known = torch.logsumexp(_capped(z.detach(), softcap), -1)
    return _capped(torch.where((counts | known.isfinite()).unsqueeze(-1), z, 0.0), softcap), known


def _capped(z: Tensor, softcap: float | None) -> Tensor:
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None,
    dtype: torch.dtype | None = None, arithmetic: torch.dtype = torch.float64, **arguments,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, lse, z-loss) of fused_softmax.linear_cross_entropy likewise, all logits at once.

    arguments: `cross_entropy`'s.
    """
    bias = None if linear_bias is None else linear_bias.to(arithmetic)
    z = torch.nn.functional.linear(input.to(arithmetic), linear_weight.to(arithmetic), bias)
    if z.ndim > 2:
        z = z.movedim(-1, 1)
        target = target.movedim(-1, 1) if target.is_floating_point() else target
    return cross_entropy(z, target, dtype=dtype or input.dtype, arithmetic=arithmetic, **arguments)


def token_stats(
    input: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, *, softcap: float | None = None, scale: float = 1.0, lse_square_scale: float = 0.0,
    arithmetic: torch.dtype = torch.float64, **_,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, entropy, likeliest class, whether that is the target) of every target, in the dtype `arithmetic`."""
    with torch.no_grad():
        class_dim = 0 if input.ndim == 1 else 1
        of_tokens, lse, z_loss = cross_entropy(
            input, target, weight, ignore_index, "none", label_smoothing, softcap=softcap, scale=scale,
            lse_square_scale=lse_square_scale, dtype=arithmetic, arithmetic=arithmetic,
        )  # fmt: skip
        logits = input.to(arithmetic) * scale
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        p = torch.softmax(logits, class_dim)
        entropy = lse - torch.where(p == 0, 0.0, p * logits).sum(class_dim)
        predicted = logits.argmax(class_dim)
        if target.is_floating_point():
            counts, best = torch.ones_like(predicted, dtype=torch.bool), target.argmax(class_dim)
        else:
            counts, best = target.long() != ignore_index, target
        of_tokens = of_tokens - z_loss if lse_square_scale else of_tokens
        return (
            of_tokens, entropy.masked_fill(~counts, 0.0), predicted.masked_fill(~counts, 0),
            (predicted == best) & counts,
        )  # fmt: skip


def finished(z: Tensor, scale: float | None, softcap: float | None, temperature: float | Tensor | None) -> Tensor:
    """Logits [..., n_classes] as log_prob has them; NaN where the temperature of a row is not more than 0."""
    z = _capped(z if scale is None else z * scale, softcap)
    if isinstance(temperature, Tensor):
        of_rows = temperature.detach().to(z.dtype).unsqueeze(-1)
        temperature = torch.where(of_rows > 0, of_rows, math.nan)
    return z if temperature is None else z / temperature


def log_prob(
    input: Tensor, target: Tensor, *, scale: float | None = None, softcap: float | None = None,
    temperature: float | Tensor | None = None, ignore_index: int = -100,
    kept: tuple[Tensor, Tensor] | Tensor | None = None, columns: tuple[Tensor, Tensor] | None = None,
    arithmetic: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
    """(log-probabilities, entropy, lse, statistics) of fused_softmax.log_prob of torch's operations.

    target: of the input's leading shape, or with one dim more, [..., k]. columns: what `columns_of` gives of `kept`.
    """
    if kept is not None:
        columns = columns_of(kept, input.shape)
    t = (target if target.ndim == input.ndim else target.unsqueeze(-1)).long()
    counts = t != ignore_index
    wrong = counts & ((t < 0) | (t >= input.shape[-1]))
    known, of_row = counts & ~wrong, counts.any(-1)
    seen = of_row.unsqueeze(-1)
    if columns is not None:
        own, spoilt = columns[0] | columns[1], columns[1]
        seen = seen & own
    z = torch.where(seen, input.to(arithmetic), 0.0)  # 0 times an ignored row's NaN would be NaN
    z = finished(z, scale, softcap, temperature)
    if columns is not None:
        return _truncated(z, t, target.shape, counts, wrong, own, spoilt)
    lse, log_p = torch.logsumexp(z, -1), torch.log_softmax(z, -1)
    p = log_p.exp()
    entropy = -torch.where(p == 0, 0.0, p * torch.where(p == 0, 0.0, log_p)).sum(-1)
    of_targets = log_p.gather(-1, torch.where(known, t, 0)).masked_fill(~counts, 0.0)
    of_targets = of_targets * torch.where(wrong, math.nan, 1.0).to(arithmetic)  # so that the gradient is NaN too
    with torch.no_grad():  # and not detached, by which forward mode would take them for constants
        stats = {
            "log_sum_sq_probs": torch.logsumexp(2 * log_p, -1).masked_fill(~of_row, 0.0),
            "mean_logits": z.mean(-1).masked_fill(~of_row, 0.0),
            "is_top1": (known & (t == z.argmax(-1, keepdim=True))).view(target.shape),
        }
    entropy, lse = entropy.masked_fill(~of_row, 0.0), lse.masked_fill(~of_row, 0.0)
    return of_targets.view(target.shape), entropy, lse, stats


def linear_log_prob(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None,
    arithmetic: torch.dtype = torch.float64, **arguments,
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
    """Those of fused_softmax.linear_log_prob likewise, all logits at once. arguments: `log_prob`'s."""
    bias = None if linear_bias is None else linear_bias.to(arithmetic)
    logits = torch.nn.functional.linear(input.to(arithmetic), linear_weight.to(arithmetic), bias)
    return log_prob(logits, target, arithmetic=arithmetic, **arguments)


def _truncated(z, t, shape, counts, wrong, columns, spoilt) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """`log_prob` of logits z that are normalised over some columns of each row. spoilt: rows [..., 1] that are NaN."""
    of_row, n = counts.any(-1), columns.sum(-1)
    z = z * torch.where(spoilt & of_row.unsqueeze(-1), math.nan, 1.0).to(z.dtype)
    with torch.no_grad():
        mean = torch.where(n > 0, torch.where(columns, z, 0.0).sum(-1) / n, 0.0).masked_fill(~of_row, 0.0)
    z = z.masked_fill(~columns, -math.inf)
    empty = (z == -math.inf).all(-1)
    z = torch.where(empty.unsqueeze(-1), 0.0, z)  # torch's operations would make NaN of -inf alone
    lse, log_p = torch.logsumexp(z, -1), torch.log_softmax(z, -1)
    p = log_p.exp()
    entropy = -torch.where(p == 0, 0.0, p * torch.where(p == 0, 0.0, log_p)).sum(-1)
    inside = counts & ~wrong
    inside = inside & columns.gather(-1, torch.where(inside, t, 0)) & ~empty.unsqueeze(-1)
    elsewhere = torch.where(lse.isnan(), math.nan, -math.inf).to(z.dtype).unsqueeze(-1)
    of_targets = torch.where(inside, log_p.gather(-1, torch.where(inside, t, 0)), elsewhere)
    # Multiplied, so that the gradient is NaN too.
    of_wrong = log_p[..., :1].masked_fill(~wrong, 0.0) * math.nan
    of_targets = torch.where(counts, torch.where(wrong, of_wrong, of_targets), 0.0)
    with torch.no_grad():  # as those of whole rows
        log_sq = torch.logsumexp(2 * log_p, -1).masked_fill(empty, -math.inf).masked_fill(~of_row, 0.0)
        top = (inside & (t == z.argmax(-1, keepdim=True))).view(shape)
    rows = entropy.masked_fill(empty, 0.0), lse.masked_fill(empty, -math.inf)
    entropy, lse = (each.masked_fill(~of_row, 0.0) for each in rows)
    stats = {"log_sum_sq_probs": log_sq, "mean_logits": mean, "is_top1": top}
    return of_targets.view(shape), entropy, lse, stats


def columns_of(kept: tuple[Tensor, Tensor] | Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(the columns of logits of a shape over which rows are normalised; rows [..., 1] whose columns cannot be right).

    If offsets fall, these are the rows up to where offsets reach again what they fell from.
    """
    *leading, n_classes = shape
    n_rows = math.prod(leading)
    if isinstance(kept, Tensor):
        bits = (kept.unsqueeze(-1) >> torch.arange(32, device=kept.device, dtype=kept.dtype)) & 1
        columns = bits.flatten(-2)[..., :n_classes].bool().view(tuple(shape))  # which may be of flattened rows
        return columns, torch.zeros((*leading, 1), dtype=torch.bool, device=kept.device)
    ids, offsets = kept[0].long(), kept[1].long()
    spoilt, upto = unreadable(offsets, ids.shape[0]), offsets.cummax(0).values
    row = torch.searchsorted(upto[1:], torch.arange(ids.shape[0], device=ids.device), right=True)
    inside = (ids >= 0) & (ids < n_classes)
    nowhere = n_rows * n_classes
    at = torch.where((row < n_rows) & inside, row * n_classes + ids, nowhere)
    columns = torch.zeros(nowhere + 1, dtype=torch.bool, device=ids.device).scatter(0, at, True)[:-1]
    with_none = torch.zeros(n_rows + 1, dtype=torch.bool, device=ids.device)
    spoilt = spoilt | with_none.scatter(0, torch.where(inside, n_rows, row), True)[:-1]
    return columns.view(tuple(shape)), spoilt.view(*leading, 1)


def divergence(
    input: Tensor, target: Tensor, *, kind: str = "kl", beta: float = 0.5, scale: float | None = None,
    softcap: float | None = None, temperature: float | Tensor | None = None, target_scale: float | None = None,
    target_softcap: float | None = None, target_temperature: float | Tensor | None = None, target_is: str = "logits",
    arithmetic: torch.dtype = torch.float64,
) -> Tensor:  # fmt: skip
    """The divergence of every row, of fused_softmax.divergence by torch's operations."""
    log_q = torch.log_softmax(finished(input.to(arithmetic), scale, softcap, temperature), -1)
    q, y = log_q.exp(), target.to(arithmetic)
    if target_is == "logits":
        log_t = torch.log_softmax(finished(y, target_scale, target_softcap, target_temperature), -1)
    else:
        log_t = y if target_is == "log_probs" else y.log()
    t = y if target_is == "probs" else log_t.exp()
    if kind == "tvd":
        apart = q - t
        sign = torch.where(apart > 0, 1.0, torch.where(apart < 0, -1.0, apart.detach()))  # that of NaN is NaN
        return (apart * sign).sum(-1) / 2
    if kind == "jsd" and 0 < beta < 1:
        m = beta * t + (1 - beta) * q
        log_m = torch.where(m == 0, 1.0, m).log()
        return beta * _relative(t, log_t, log_m) + (1 - beta) * _relative(q, log_q, log_m)
    forward = kind == "kl" or (kind == "jsd" and beta == 0)
    return _relative(t, log_t, log_q) if forward else _relative(q, log_q, log_t)


def linear_divergence(
    input: Tensor, linear_weight: Tensor, target_input: Tensor, target_weight: Tensor, *,
    linear_bias: Tensor | None = None, target_bias: Tensor | None = None, arithmetic: torch.dtype = torch.float64,
    **arguments,
) -> Tensor:  # fmt: skip
    """That of fused_softmax.linear_divergence likewise, all logits at once. arguments: `divergence`'s."""
    layers = (input, linear_weight, linear_bias), (target_input, target_weight, target_bias)
    of_both = [[None if each is None else each.to(arithmetic) for each in layer] for layer in layers]
    logits = [torch.nn.functional.linear(*layer) for layer in of_both]  # type: ignore[arg-type]
    return divergence(*logits, **arguments, arithmetic=arithmetic)


def _relative(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum p (log p - log q), to which p = 0 adds nothing."""
    return (p * torch.where(p == 0, 0.0, log_p - log_q)).sum(-1)
