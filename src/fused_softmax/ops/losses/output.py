"""The results of a cross-entropy: its loss alone, or a CrossEntropyOutput of all that was asked for."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_softmax.ops.losses.launches import LossRows
from fused_softmax.ops.losses.options import Loss


class TokenStats(NamedTuple):
    """Facts of every target, each in the targets' shape; 0 and False where a target is ignored.

    They have no gradient: a backward pass through the loss or the entropy raises RuntimeError. To keep them, or for
    NumPy, take their detach().

    loss: of the target alone. entropy: of its row's softmax, in nats. predicted: the likeliest class, int64.
    correct: bool, whether that is the target.

    >>> stats = cross_entropy(torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([1]), return_token_stats=True).token_stats
    >>> stats.predicted, stats.correct
    (tensor([2]), tensor([False]))
    """

    loss: Tensor
    entropy: Tensor
    predicted: Tensor
    correct: Tensor


STATISTICS = tuple(f"token_stats.{name}" for name in TokenStats._fields)


class CrossEntropyOutput(NamedTuple):
    """The loss, and what else was asked for; None for the rest.

    loss: [], or of the targets' shape with reduction "none". lse: of the targets' shape, float32 (float64 for float64).
    z_loss: reduced as the loss is. token_stats: a TokenStats.

    >>> cross_entropy(torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([2]), return_lse=True).lse
    tensor([2.4076])
    """

    loss: Tensor
    # `| Any`, and not `| None`: a type checker then lets callers who asked for it use it.
    lse: Tensor | Any = None
    z_loss: Tensor | Any = None
    token_stats: TokenStats | Any = None


class Wanted(NamedTuple):
    """What a call returns beside its loss, and how."""

    lse: bool = False
    z_loss: bool = False
    stats: bool = False
    inplace: bool = False
    dtype: torch.dtype | None = None

    @property
    def beside(self) -> bool:
        """Whether more than the loss is returned."""
        return self.lse or self.z_loss or self.stats


NOTHING_MORE = Wanted()


def output_of(y, lse, z, stats, wanted: Wanted, reduction: str, shape) -> Tensor | CrossEntropyOutput:
    """What the caller asked for, in the shape of the targets."""
    if reduction == "none":
        y, z = shaped(y, shape), None if z is None else shaped(z, shape)
    if not wanted.beside:
        return y
    return CrossEntropyOutput(
        y, shaped(lse, shape) if wanted.lse else None, z if wanted.z_loss else None,
        TokenStats(*[shaped(each, shape) for each in stats]) if wanted.stats else None,
    )  # fmt: skip


def shaped(y: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """In a shape and dtype; each step that a tensor does without is none of the backward pass either."""
    y = y if y.shape == shape else y.view(shape)
    return y if dtype is None or y.dtype == dtype else y.to(dtype)


def stats_of(rows: LossRows, target: Tensor, loss: Loss) -> list[Tensor]:
    """The TokenStats of targets [n], or nothing if `loss` does not ask for them. What rows have of them is used up."""
    if rows.entropy is None or rows.predicted is None:
        return []
    ignored = target.long() == loss.ignore_index  # of uint8, -100 would be 156
    predicted = rows.predicted.masked_fill_(ignored, 0)
    correct = predicted == target
    if loss.ignore_index == 0:  # an ignored target of another value is not that 0
        correct.masked_fill_(ignored, False)
    losses = rows.loss.clone() if loss.reduction == "none" else rows.loss  # which may be the result itself
    return [losses, rows.entropy.masked_fill_(ignored, 0.0), predicted, correct]
