"""The attentions that are measured, and the floating-point operations of their products. Standard library only."""

import math
from dataclasses import dataclass
from typing import Any

from fused_softmax.bench.cases import Case


@dataclass(frozen=True)
class Kind:
    """What is done to scores, and what is asked for.

    bias: one for each head, for all of a batch, with its gradient. window: how many keys before itself a query sees.
    group: how many heads of queries share one of keys. gradient: of all inputs, with the forward pass.
    decode: one query against a cache. The case then has the keys' shape.
    """

    is_causal: bool = False
    bias: bool = False
    softcap: float | None = None
    window: int | None = None
    sinks: bool = False
    group: int = 1
    gradient: bool = False
    decode: bool = False

    @property
    def plain(self) -> bool:
        """Whether torch's function has it, but for a bias."""
        return self.softcap is None and self.window is None and not self.sinks

    @property
    def parameters(self) -> dict[str, Any]:
        """What is not as it is by default."""
        return {name: value for name, value in vars(self).items() if value != getattr(Kind(), name)}


_KINDS = {
    "attention": Kind(),
    "attention_causal": Kind(is_causal=True),
    "attention_biased": Kind(bias=True),
    "attention_softcap": Kind(is_causal=True, softcap=50.0),
    "attention_sinks": Kind(is_causal=True, window=127, sinks=True, group=8),
}
KINDS = {
    name + suffix: Kind(**vars(kind) | {"gradient": bool(suffix)})
    for name, kind in _KINDS.items()
    for suffix in ("", "_gradient")
} | {"attention_decode": Kind(group=4, decode=True)}


def flops(case: Case) -> float | None:
    """Of the products of attention: two, and five more of a gradient. Half of what is causal; None of others.

    A single query is bound by the keys that it reads, and has None too.
    """
    kind = KINDS.get(case.operation)
    if kind is None or kind.decode:
        return None
    *lead, length, dim = case.shape
    pairs = length * length / (2 if kind.is_causal else 1)
    if kind.window is not None:
        pairs = sum(min(i, kind.window) + 1 for i in range(length))
    return 4.0 * math.prod(lead) * pairs * dim * (3.5 if kind.gradient else 1)
