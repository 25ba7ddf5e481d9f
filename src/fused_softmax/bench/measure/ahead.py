"""The kernels that a benchmark's cases take, compiled ahead: `fused-softmax bench --warm`.

The calls of a case are made on tensors without memory by the processes of `fused_softmax.ahead`.
"""

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from fused_softmax.ahead import Kernel, compiling
from fused_softmax.bench.cases import Case
from fused_softmax.bench.catalog import OWN, VARIANTS
from fused_softmax.bench.entries import sampling
from fused_softmax.bench.entries.filters import VOCABULARY
from fused_softmax.bench.entries.operations import operation_of
from fused_softmax.bench.measure import measure
from fused_softmax.bench.measure.run import Asked
from fused_softmax.core.elsewhere import shapes_of

_made: set[tuple[Any, ...]] = set()


def ours(asked: Iterable[Asked]) -> dict[Case, tuple[str, ...]]:
    """The cases that have providers of this package, each with these providers."""
    found: dict[Case, dict[str, None]] = {}
    for each in asked:
        for case in each.chosen:
            names = [name for name in measure.known(case, each.providers) if name == OWN or name in VARIANTS]
            if names:
                found.setdefault(case, {}).update(dict.fromkeys(names))
    return {case: tuple(names) for case, names in found.items()}


def compiled(
    cases: dict[Case, tuple[str, ...]], device: str | None, failed: Callable[[Case, str], object]
) -> list[Kernel]:
    """Compile the kernels of cases on all cores. device: as warmup's. failed: gets each case that raises, and why."""
    calls, order = [partial(calls_of, case, names) for case, names in cases.items()], list(cases)
    cores = len(os.sched_getaffinity(0))
    return list(compiling(calls, device, cores, failed=lambda i, why: failed(order[i], why)))


def calls_of(case: Case, names: Iterable[str]) -> None:
    """Make the calls that a measurement of a case makes, of providers and ceilings, in a process that only plans."""
    operation = operation_of(case)
    inputs: Any = shapes_of(lambda: operation.inputs(case, torch.Generator("cpu")))
    for name in names:
        call = operation.providers[name](case)
        call(*inputs)
        if operation.draws and operation.draws.temperature:
            row = torch.empty(VOCABULARY, dtype=inputs[0].dtype, device="meta")
            call(*sampling.draws_of(row, sampling.number_of_draws(torch.device("cuda"), own=True)))
    ceilings = operation.ceilings(case)
    if (alike := (inputs[0].dtype, *ceilings)) not in _made:  # whose kernels are the same for any size
        _made.add(alike)
        for each in ceilings:
            each(*inputs)
