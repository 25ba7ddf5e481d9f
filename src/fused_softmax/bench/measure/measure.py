"""Measures a case: compares every provider with float64, then times those that pass."""

import gc
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from fused_softmax.bench.cases import Case
from fused_softmax.bench.catalog import COMPILED, OWN
from fused_softmax.bench.entries.ceiling import Products, Square
from fused_softmax.bench.entries.makers import Call, plan_of
from fused_softmax.bench.entries.operation import Inputs
from fused_softmax.bench.entries.operations import operation_of
from fused_softmax.bench.measure import check, clocks
from fused_softmax.bench.measure.check import Judge, JudgeOfDraws, judge_of
from fused_softmax.bench.measure.timing import (
    ContextLost,
    Entrant,
    GraphTimer,
    best_of,
    figure,
    host,
    require_context,
    rotation,
    walls,
)
from fused_softmax.bench.measure.verify import interpreting
from fused_softmax.bench.results.record import Ceiling, Figure, Point, one_line
from fused_softmax.core.device import device_of

# Host time matters only if the GPU does not keep the queue full anyway.
SMALL_CALL_US = 100
SETTLE_MS = 100  # beside matrix products, which take all the power that the chip may have


@dataclass(frozen=True)
class Effort:
    """How long to measure: rounds in which providers take turns, and milliseconds for each provider in a round.

    named: the user named the providers; by default all are taken.
    """

    rounds: int = 3
    budget_ms: float = 25
    seed: int = 0
    time: bool = True
    named: bool = False

    def recorded(self) -> dict[str, Any]:
        """The facts that two runs must share for their figures to be in one file."""
        return {"rounds": self.rounds, "budget_ms": self.budget_ms, "seed": self.seed, "timed": self.time}


def measure(case: Case, names: Sequence[str], effort: Effort) -> list[Point]:
    """One point for every name that is a provider of the case's operation, in order."""
    return (_measure_gpu if on_gpu() else _measure_cpu)(case, known(case, names), effort)


def known(case: Case, names: Iterable[str]) -> list[str]:
    """The names that are providers of the case's operation."""
    return [name for name in names if name in operation_of(case).providers]


def on_gpu() -> bool:
    return torch.cuda.is_available() and not interpreting()


def _measure_gpu(case: Case, names: Sequence[str], effort: Effort) -> list[Point]:
    operation = operation_of(case)
    buffers = rotation(operation.floor_bytes(case), torch.cuda.get_device_properties(0).L2_cache_size)
    gc.collect()
    torch.cuda.empty_cache()
    if refusal := too_large(case, buffers):
        return [point(case, name, "skipped", refusal) for name in names]
    sets = check.inputs(case, buffers, "cuda", effort.seed)
    points, entrants = _check_all(case, names, sets[0], effort)
    if effort.time and entrants:
        try:
            points |= _time(case, sets, points, entrants, effort)
        except ContextLost:
            raise
        except Exception as error:
            require_context("timing", sets[0])
            message = f"when timed: {one_line(error)}"
            points |= {name: replace(points[name], status="refused", message=message) for name in entrants}
    if OWN in points and operation.planned:
        points[OWN] = replace(points[OWN], plan=plan_of(case, sets[0][0], operation.planned))
    if OWN in points and operation.who:
        points[OWN] = replace(points[OWN], plan={"who": operation.who(case, device_of(0))})
    return [points[name] for name in names]


def _time(
    case: Case, sets: list[Inputs], points: dict[str, Point], entrants: dict[str, Entrant], effort: Effort
) -> dict[str, Point]:
    """The entrants' points, with figures."""
    operation = operation_of(case)
    floor = operation.floor_bytes(case)
    timer = GraphTimer(floor, sets)
    judge = judge_of(case, sets[-1])
    done: dict[str, Point] = {}
    for name, entrant in entrants.items():
        try:
            limits = judge.allowed(name == OWN)
            if wrong := timer.prepare(entrant, partial(judge.complaint, limits=limits)):
                done[name] = replace(points[name], status="wrong", message=wrong)
        except Exception as error:
            require_context(name, sets[0])
            done[name] = replace(points[name], status="refused", message=f"when timed: {one_line(error)}")
    timed = [entrant for name, entrant in entrants.items() if name not in done]
    ceilings = timer.ceilings(operation.ceilings(case))
    readings: list[dict[str, Any]] = []
    of_products = any(isinstance(each.call, Products | Square) for each in ceilings)
    timer.rounds(
        [*timed, *ceilings], effort.rounds, effort.budget_ms, lambda: readings.append(_clocks().read()),
        SETTLE_MS if of_products else 0,
    )  # fmt: skip
    best = best_of(ceilings)
    calls = walls(floor, timed, sets, effort.budget_ms)
    for entrant in timed:
        found = with_figures(points[entrant.name], entrant, floor, len(sets), calls[entrant.name], best)
        small = found.kernel and found.kernel.p50_us < SMALL_CALL_US
        host_us = host(entrant.call, sets) if small else None
        done[entrant.name] = replace(found, host_us=host_us, clocks=clocks.summary(readings))
    return done


def with_figures(point: Point, entrant: Entrant, floor: int, buffers: int, call: Figure, best: Ceiling | None) -> Point:
    """The point of an entrant that was timed. best: of the ceilings, if there are any."""
    kernel = figure(floor, entrant.samples)
    return replace(
        point,
        status="ok",
        message=entrant.note,
        kernel=kernel,
        call=call,
        ratio=kernel.gb_per_s / best.gb_per_s if best else None,
        ceiling=best,
        method=entrant.method,
        buffers=buffers,
        rotated_bytes=buffers * floor,
    )


@cache
def _clocks() -> clocks.Clocks:
    return clocks.Clocks(str(getattr(torch.cuda.get_device_properties(0), "uuid", "")) or None)


def too_large(case: Case, sets: int) -> str:
    """Why `sets` of inputs and results do not fit into memory beside the tensors of the check, or ""."""
    if on_gpu():
        free = torch.cuda.mem_get_info()[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    operation = operation_of(case)
    if operation.checking_bytes:
        beside = operation.checking_bytes(case)
    else:
        beside = 4 * case.tensor_bytes + check.comparison_bytes(case)
    need = sets * operation.held_bytes(case) + beside
    return f"needs {need / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free" if need > free else ""


def point(case: Case, name: str, status: str, message: str = "", **figures) -> Point:
    parameters = case.parameters | operation_of(case).parameters(case)
    more = {"operation": case.operation, "parameters": parameters, **figures}
    return Point(case.n_rows, case.n_cols, case.dtype, name, status, message, **more)  # type: ignore[arg-type]


def _check_all(
    case: Case, names: Iterable[str], inputs: Inputs, effort: Effort
) -> tuple[dict[str, Point], dict[str, Entrant]]:
    """A point for every name, and the entrants that may be timed."""
    points, entrants = {}, {}
    judge = judge_of(case, inputs)
    before = check.fingerprint(inputs)
    for name in names:
        try:
            call = operation_of(case).providers[name](case)
        except Exception as error:
            points[name] = point(case, name, "absent", one_line(error))
            continue
        limits = judge.allowed(name == OWN)
        try:
            y, memory = with_memory(judge, call)
            wrong, found = judge.complaint(y, limits)
            del y
            wrong = wrong or judge.habit(call, name == OWN)
            if not wrong and check.fingerprint(inputs) != before:
                wrong = "wrote into its input"
        except Exception as error:
            points[name] = point(case, name, "refused", one_line(error))
            require_context(name, inputs)
            continue
        figures: dict[str, Any] = {"error_allowed": limits[0], "memory_bytes": memory}
        if found:
            figures |= {"error": found.largest, "row_sum_error": found.row_sum}
        points[name] = point(case, name, "wrong" if wrong else "untimed", wrong, **figures)
        if not wrong:
            entrants[name] = Entrant(name, call)
        elif check.fingerprint(inputs) != before:
            for spoilt, fresh in zip(inputs, check.inputs(case, 1, inputs[0].device.type, effort.seed)[0], strict=True):
                spoilt.copy_(fresh)
    return points, entrants


def with_memory(
    judge: Judge | JudgeOfDraws, call: Call, idle: Callable[[], object] = lambda: None
) -> tuple[object, int | None]:
    """The call's result, and on a GPU the most bytes that the call allocated. idle: waits for what a call leaves."""
    if not judge.inputs[0].is_cuda:
        return judge.poisoned(call), None
    judge.poisoned(call)  # compilers and caches allocate on the first call
    idle()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = judge.poisoned(call)
    idle()
    return y, torch.cuda.max_memory_allocated() - before


def _measure_cpu(case: Case, names: Sequence[str], effort: Effort) -> list[Point]:
    if refusal := too_large(case, 1):
        return [point(case, name, "skipped", refusal) for name in names]
    left_out = {name: reason for name in names if (reason := not_on_cpu(case, name, effort.named))}
    inputs = check.inputs(case, 1, "cpu", effort.seed)[0]
    points, entrants = _check_all(case, [name for name in names if name not in left_out], inputs, effort)
    if effort.time:
        floor = operation_of(case).floor_bytes(case)
        for name, call in walls(floor, [*entrants.values()], [inputs], 8 * effort.budget_ms).items():
            points[name] = replace(points[name], status="ok", call=call)
    for name, reason in left_out.items():
        points[name] = point(case, name, *_absent_or(case, name, reason))
    return [points[name] for name in names]


def not_on_cpu(case: Case, name: str, named: bool) -> str:
    """Why a provider has no time on a CPU, or "". named: the user asked for it by name."""
    if operation_of(case).needs_gpu(name):
        return "a GPU kernel, and there is no GPU"
    if name == OWN and interpreting():
        return "interpreted, and the time of an interpreter says nothing"
    if name == COMPILED and not named:
        return "compiled for a CPU only when named by --provider"
    return ""


def _absent_or(case: Case, name: str, reason: str) -> tuple[str, str]:
    try:
        operation_of(case).providers[name](case)
    except Exception as error:
        return "absent", one_line(error)
    return "untimed", reason
