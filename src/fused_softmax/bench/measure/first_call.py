"""The process of one row of `fused-softmax bench cold`: `python -m fused_softmax.bench.measure.first_call NAME`.

It makes the calls of that name, and prints their `record.FirstCall` as a line of JSON. Neither PyTorch nor Triton is
imported before the clock runs.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fused_softmax.bench.cases import Case
from fused_softmax.bench.entries.first_calls import CALLS, FirstCalls
from fused_softmax.bench.results.record import CompiledKernel, FirstCall


def main() -> None:
    began = time.perf_counter()
    import torch

    from fused_softmax.bench.entries.operations import operation_of  # which imports all operators

    imported = time.perf_counter()
    generator = torch.Generator("cuda").manual_seed(0)
    one = torch.ones(1, device="cuda", requires_grad=True)
    (one + 1).backward(torch.ones_like(one))  # the first one with a gradient imports sympy
    torch.cuda.synchronize()
    made = time.perf_counter()

    def inputs(case: Case) -> tuple[Any, ...]:
        return operation_of(case).inputs(case, generator)

    found = timed(sys.argv[1], CALLS[sys.argv[1]], inputs, torch.cuda.synchronize)
    tell(dataclasses.replace(found, import_s=_rounded(imported - began), context_s=_rounded(made - imported)))


def tell(found: FirstCall) -> None:
    print(json.dumps(dataclasses.asdict(found)), flush=True)


def timed(
    name: str, calls: FirstCalls, inputs: Callable[[Case], tuple[Any, ...]], idle: Callable[[], object]
) -> FirstCall:
    """Make the calls in turn. inputs: makes those of a case. idle: waits for the GPU."""
    from fused_softmax.bench.entries.operations import operation_of

    seconds = []
    with _listening() as (kernels, modules):
        for case in calls.cases:
            call, given = calls.call or operation_of(case).own(case), inputs(case)
            idle()
            start = time.perf_counter()
            call(*given)
            idle()
            seconds.append(_rounded(time.perf_counter() - start))
            del given  # before the next case's are made
    return FirstCall(name, seconds, kernels, modules, 0.0, 0.0)


@contextmanager
def _listening() -> Iterator[tuple[list[CompiledKernel], list[float]]]:
    """Lists that get each kernel that Triton compiles, and the seconds of each C module that it builds."""
    from triton import knobs
    from triton.runtime import build

    kernels, modules = list[CompiledKernel](), list[float]()
    made = build._build

    def compiled(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        if not cache_hit:
            stages = {"source": times.ir_initialization, **dict(times.lowering_stages), "store": times.store_results}
            of_stages = {stage: round(us * 1e-6, 4) for stage, us in stages.items()}
            kernels.append(CompiledKernel(src.name, round(times.total * 1e-6, 4), of_stages))

    def timed_build(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return made(*arguments, **options)
        finally:
            modules.append(_rounded(time.perf_counter() - start))

    knobs.compilation.listener = compiled
    setattr(build, "_build", timed_build)  # noqa: B010  mypy lets nobody assign to a function
    try:
        yield kernels, modules
    finally:
        knobs.compilation.listener = None
        setattr(build, "_build", made)  # noqa: B010


def _rounded(seconds: float) -> float:
    return round(seconds, 4)


if __name__ == "__main__":
    main()
