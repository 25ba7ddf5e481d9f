"""What the bench knows of an operation, and what the operations' families share."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fused_softmax.bench.cases import Case
from fused_softmax.bench.catalog import COMPILED, NEEDS_GPU, OWN, TORCH
from fused_softmax.bench.entries.ceiling import Ceiling
from fused_softmax.bench.entries.makers import Call, Maker, compiled
from fused_softmax.core.plan import Device

if TYPE_CHECKING:
    from fused_softmax.bench.entries.filters import Filters

Inputs = tuple[Tensor, ...]
SAMPLE = Case((61, 781))  # the tutorial's irregular 1823 x 781 with fewer rows, for seconds of interpreting


@dataclass(frozen=True)
class Operation:
    """Everything the bench knows about an operation.

    inputs: the tensors of one call, on the generator's device. The first has the case's dtype, and its shape or first
        dims.
    own: this package's call.
    formula: the same in torch's functions. On float64 tensors it is the truth; compiled, it is the provider
        torch.compile.
    eager: torch's own call, if it is not the formula. peers: the other providers, of `catalog`.
    held_bytes: bytes of the inputs and the result. unread_bytes: the part that need not move; the rest is the floor.
    ceilings: the plain kernels that the figures are compared with, called with the same inputs.
    parameters: facts that the case does not give, for the record.
    planned: how many inputs the planner counts, if `plan_rows` alone decides the launch. 0 records no plan.
    joined: of a call that returns several results, the one tensor that is compared. It is not timed.
    whole: a row of the result depends on more than its row of inputs, so the whole result is compared at once.
    compared: pairs of a part of a result and what it has to be, both in float64, of a case and its inputs, where a
        comparison is not cut along an axis.
    checking_bytes: bytes of the comparison beside inputs and results, if the case's elements do not give them.
    own_needs_gpu: our call has no CPU path.
    of_torchs: how many times torch's error is accepted.
    own_error: of our call, the largest error that is accepted beside a rounding, if torch's own is no measure.
    who: of our call, who computes each pass on a device, for the record; None where the kernels do.
    draws: the filters of a sampler, whose tokens no formula gives; its formula is a sampler of torch's operations.
    sample: the case that is checked under Triton's interpreter.
    """

    inputs: Callable[[Case, torch.Generator], Inputs]
    own: Maker
    formula: Maker
    held_bytes: Callable[[Case], int]
    ceilings: Callable[[Case], list[Ceiling]]
    eager: Maker | None = None
    peers: Mapping[str, Maker] = field(default_factory=dict)
    unread_bytes: Callable[[Case], int] = lambda case: 0
    parameters: Callable[[Case], dict[str, Any]] = lambda case: {}
    planned: int = 0
    joined: Callable[[Case, Any], Tensor] | None = None
    whole: bool = False
    compared: Callable[[Case, Inputs, Tensor], Iterator[tuple[Tensor, Tensor]]] | None = None
    checking_bytes: Callable[[Case], int] | None = None
    own_needs_gpu: bool = False
    of_torchs: float = 1.0
    own_error: float | None = None
    who: Callable[[Case, Device], dict[str, str]] | None = None
    draws: "Filters | None" = None
    sample: Case = SAMPLE

    @cached_property
    def providers(self) -> dict[str, Maker]:
        return {OWN: self.own, TORCH: self.baseline, COMPILED: compiled(self.formula), **self.peers}

    @property
    def baseline(self) -> Maker:
        """torch's own call. Its errors in the case's dtype bound the others'."""
        return self.eager or self.formula

    def floor_bytes(self, case: Case) -> int:
        """The bytes that every call must move; the same for every provider."""
        return self.held_bytes(case) - self.unread_bytes(case)

    def needs_gpu(self, name: str) -> bool:
        return name in NEEDS_GPU or (name == OWN and self.own_needs_gpu)


def logits(case: Case, generator: torch.Generator) -> Tensor:
    """Peaked logits: normal with deviation 2, and one value in every row far above the rest."""
    device, dtype = generator.device, getattr(torch, case.dtype)
    one_a_row = [1 if axis == case.dim % len(case.shape) else size for axis, size in enumerate(case.shape)]
    x = torch.randn(case.shape, device=device, dtype=dtype, generator=generator).mul_(2)
    column = torch.randint(case.n_cols, one_a_row, device=device, generator=generator)
    height = torch.rand(one_a_row, device=device, generator=generator) * 12 + 4
    return x.scatter_(case.dim, column, height.to(dtype))


def along(function: Call) -> Maker:
    def provide(case: Case) -> Call:
        dim = case.dim
        return lambda x: function(x, dim=dim)

    return provide


def alone(case: Case, generator: torch.Generator) -> Inputs:
    return (logits(case, generator),)


def widest(x: Tensor) -> torch.dtype:
    """The dtype of the arithmetic: at least float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
