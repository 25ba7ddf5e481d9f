"""Times one provider at one shape, call after call: for a single quick figure, or to run under a profiler.

Every call is timed alone, on the same inputs, with an empty queue before it. So launch latency counts, and inputs that
fit into L2 are read from there. `fused-softmax bench --shape` measures kernels without either, and beside a ceiling.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fused_softmax.bench.cases import Case
from fused_softmax.bench.catalog import OWN
from fused_softmax.bench.entries.makers import Call
from fused_softmax.bench.entries.operation import Inputs
from fused_softmax.bench.entries.operations import operation_of
from fused_softmax.bench.measure import check, measure
from fused_softmax.bench.measure.check import judge_of
from fused_softmax.bench.measure.timing import idle, quantiles
from fused_softmax.bench.results.record import one_line

TRIMMED = 0.1  # of the times at each end


class NoFigure(RuntimeError):
    """The provider cannot be called here, or its result is wrong."""


@dataclass(frozen=True)
class Times:
    """Seconds of each call, in order."""

    case: Case
    provider: str
    moved_bytes: int
    seconds: Sequence[float]

    @property
    def trimmed(self) -> int:
        """How many calls are left out at each end."""
        return int(TRIMMED * len(self.seconds))

    @property
    def average(self) -> float:
        """Seconds: the mean of the middle 80 %."""
        return statistics.fmean(sorted(self.seconds)[self.trimmed : len(self.seconds) - self.trimmed])

    def facts(self) -> dict[str, Any]:
        p20, p50, p80 = (1e6 * seconds for seconds in quantiles(self.seconds))
        return {
            "provider": self.provider,
            "path": path_of(self.case, self.provider),
            "case": str(self.case),
            "iterations": len(self.seconds),
            "trimmed_at_each_end": self.trimmed,
            "average_ms": 1e3 * self.average,
            "bandwidth_gb_per_s": self.moved_bytes / self.average * 1e-9,
            "elements": self.case.elements,
            "moved_bytes": self.moved_bytes,
            "p20_us": p20,
            "p50_us": p50,
            "p80_us": p80,
        }


def path_of(case: Case, name: str) -> str:
    """What computes the provider's call on this machine, in words."""
    if measure.on_gpu():
        return f"{'the kernels of this package' if name == OWN else name} on {torch.cuda.get_device_name()}"
    if name != OWN:
        return f"{name} on the CPU"
    return "torch's path on the CPU, for there is no GPU: no kernel of this package is timed"


def prepared(case: Case, name: str, seed: int = 0) -> tuple[Call, Inputs]:
    """The provider's call and its inputs, on the GPU if there is one. NoFigure if it has no call."""
    operation = operation_of(case)
    if name not in operation.providers:
        raise NoFigure(f"{case.operation} has no provider {name!r}; it has {', '.join(operation.providers)}")
    if not measure.on_gpu() and (reason := measure.not_on_cpu(case, name, named=True)):
        raise NoFigure(f"{name}: {reason}")
    if refusal := measure.too_large(case, 1):
        raise NoFigure(f"{case}: {refusal}")
    try:
        call = operation.providers[name](case)
    except Exception as error:
        raise NoFigure(f"{name} is absent: {one_line(error)}") from error
    return call, check.inputs(case, 1, "cuda" if measure.on_gpu() else "cpu", seed)[0]


def call_once(case: Case, name: str, seed: int = 0) -> None:
    """Make exactly one call, unchecked, for a profiler that wraps this process."""
    call, inputs = prepared(case, name, seed)
    try:
        call(*inputs)
        idle(inputs[0])
    except Exception as error:
        raise NoFigure(f"{name} failed at {case}: {one_line(error)}") from error


def time_calls(case: Case, name: str, warmup: int, iterations: int, seed: int = 0) -> Times:
    """The times of `iterations` calls, or of those before Ctrl-C.

    NoFigure if the first result is further from float64 than allowed.
    """
    call, inputs = prepared(case, name, seed)
    judge = judge_of(case, inputs)
    try:
        wrong, _ = check.verdict(judge, call, name == OWN)
        if wrong:
            raise NoFigure(f"{name} is wrong at {case}: {wrong}")
        for _ in range(warmup):
            call(*inputs)
        one = _events_around if inputs[0].is_cuda else _wall_around
        seconds: list[float] = []
        try:
            for _ in range(iterations):
                seconds.append(one(lambda: call(*inputs)))
        except KeyboardInterrupt:
            if not seconds:
                raise
    except NoFigure:
        raise
    except Exception as error:
        raise NoFigure(f"{name} failed at {case}: {one_line(error)}") from error
    return Times(case, name, operation_of(case).floor_bytes(case), seconds)


def _events_around(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e-3


def _wall_around(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
