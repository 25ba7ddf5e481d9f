"""The calls that a use of this package makes, for `fused-softmax warm --for`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fused_softmax.ops.attention.attention import attention
from fused_softmax.ops.losses.cross_entropy import cross_entropy
from fused_softmax.ops.losses.linear_cross_entropy import linear_cross_entropy
from fused_softmax.ops.sampling.sample import sample
from fused_softmax.ops.softmax.softmax import log_softmax, softmax

Call = Callable[[], Any]
FILTERS: tuple[dict[str, Any], ...] = ({}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.9})


@dataclass(frozen=True, kw_only=True)
class Model:
    """What decides the shapes of a model's calls. rows: tokens of a step; several are each a step of its own."""

    vocab: int
    dtype: torch.dtype
    rows: Sequence[int]
    hidden: int
    heads: int
    key_heads: int
    head_dim: int
    contexts: Sequence[int]

    def made(self, *shape: int, grad: bool = False, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(*shape, dtype=dtype or self.dtype, device="meta", requires_grad=grad)

    def heads_of(self, n: int, queries: int, keys: int, grad: bool = False) -> list[Tensor]:
        sizes = (self.heads, queries), (self.key_heads, keys), (self.key_heads, keys)
        return [self.made(n, *size, self.head_dim, grad=grad) for size in sizes]


def training(of: Model) -> Iterator[Call]:
    """Losses with their gradients, from logits and from hidden states, and causal attention, both passes."""
    for n in of.rows:
        target = of.made(n, dtype=torch.int64)
        yield partial(cross_entropy, of.made(n, of.vocab, grad=True), target)
        yield partial(
            linear_cross_entropy, of.made(n, of.hidden, grad=True), of.made(of.vocab, of.hidden, grad=True), target
        )
    for length in of.contexts:
        options: dict[str, Any] = {"is_causal": True, "enable_gqa": of.heads != of.key_heads}
        yield partial(attention, *of.heads_of(1, length, length, grad=True), **options)


def serving(of: Model) -> Iterator[Call]:
    """Draws by the usual filters, probabilities of whole rows, attention of prompts, and of one token to a context."""
    gqa: dict[str, Any] = {"enable_gqa": of.heads != of.key_heads}
    for n in of.rows:
        logits, whole = of.made(n, of.vocab), of.made(n, dtype=torch.int64)
        for filters in FILTERS:
            yield partial(sample, logits, 0.7, **filters, seed=whole, position=whole)
        yield partial(sample, logits, 0.0)
        yield partial(softmax, logits, -1)
        yield partial(log_softmax, logits, -1, dtype=torch.float32)
        for context in of.contexts:
            yield partial(attention, *of.heads_of(n, 1, context), **gqa)
    for context in of.contexts:
        yield partial(attention, *of.heads_of(1, context, context), is_causal=True, **gqa)


USES = {"train": training, "serve": serving}
ROWS = {"train": (8192,), "serve": tuple(2**i for i in range(10))}
