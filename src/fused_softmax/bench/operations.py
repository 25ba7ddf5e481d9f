"""What can be measured: an operation is one entry of OPERATIONS, which a sweep then names."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fused_softmax import softmax
from fused_softmax.bench import ceiling, providers
from fused_softmax.bench.cases import Case
from fused_softmax.bench.providers import COMPILED, NEEDS_GPU, OWN, TORCH, Call, Provider, compiled

Inputs = tuple[Tensor, ...]
SAMPLE = Case((61, 781))  # the tutorial's irregular 1823 x 781, with rows for seconds of interpreting


@dataclass(frozen=True)
class Operation:
    """All the bench has to know.

    inputs: the tensors of one call, on the generator's device; the first is of the case's shape and dtype.
    own: this package's call. formula: the same of torch's functions; of float64 tensors it is the truth, and compiled
        it is the provider torch.compile. eager: torch's own call, where it is not the formula. peers: the others.
    held_bytes: of the inputs and the result. unread_bytes: of those, what need not be moved; the rest is the floor.
    ceilings: the plain kernels that the figures are held against, called with the same inputs.
    parameters: what the case does not say, for the record.
    planned: how many inputs the planner counts, where `plan_rows` alone decides the launch; 0 records no plan.
    own_needs_gpu: our call has no CPU path.
    sample: the case that is checked under Triton's interpreter.
    """

    inputs: Callable[[Case, torch.Generator], Inputs]
    own: Provider
    formula: Provider
    held_bytes: Callable[[Case], int]
    ceilings: Callable[[Case], list[ceiling.Ceiling]]
    eager: Provider | None = None
    peers: Mapping[str, Provider] = field(default_factory=dict)
    unread_bytes: Callable[[Case], int] = lambda case: 0
    parameters: Callable[[Case], dict[str, Any]] = lambda case: {}
    planned: int = 0
    own_needs_gpu: bool = False
    sample: Case = SAMPLE

    @cached_property
    def providers(self) -> dict[str, Provider]:
        return {OWN: self.own, TORCH: self.baseline, COMPILED: compiled(self.formula), **self.peers}

    @property
    def baseline(self) -> Provider:
        """torch's own call, whose errors in the case's dtype are what others are allowed."""
        return self.eager or self.formula

    def floor_bytes(self, case: Case) -> int:
        """What no call can avoid moving. The same for every provider."""
        return self.held_bytes(case) - self.unread_bytes(case)

    def needs_gpu(self, name: str) -> bool:
        return name in NEEDS_GPU or (name == OWN and self.own_needs_gpu)


def operation_of(case: Case) -> Operation:
    return OPERATIONS[case.operation]


def provider_names(names: Iterable[str] = ()) -> list[str]:
    """Who measures any of the operations named, or any at all."""
    return list(dict.fromkeys(who for name in names or OPERATIONS for who in OPERATIONS[name].providers))


def logits(case: Case, generator: torch.Generator) -> Tensor:
    """Peaked logits: twice a normal, and in every row one value far above the rest."""
    device, dtype = generator.device, getattr(torch, case.dtype)
    one_a_row = [1 if axis == case.dim % len(case.shape) else size for axis, size in enumerate(case.shape)]
    x = torch.randn(case.shape, device=device, dtype=dtype, generator=generator).mul_(2)
    column = torch.randint(case.n_cols, one_a_row, device=device, generator=generator)
    height = torch.rand(one_a_row, device=device, generator=generator) * 12 + 4
    return x.scatter_(case.dim, column, height.to(dtype))


def along(function: Call) -> Provider:
    def provide(case: Case) -> Call:
        dim = case.dim
        return lambda x: function(x, dim=dim)

    return provide


def alone(case: Case, generator: torch.Generator) -> Inputs:
    return (logits(case, generator),)


OPERATIONS = {
    "softmax": Operation(
        inputs=alone,
        own=lambda case: softmax,
        formula=along(torch.softmax),
        peers={**providers.CLASSIC, "liger": providers.liger, "quack": providers.quack},
        held_bytes=lambda case: 2 * case.tensor_bytes,
        ceilings=lambda case: ceiling.copies(),
        planned=1,
    ),
}
