"""From a case to its points: every provider is compared with float64, and what passed is timed."""

import gc
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fused_softmax.bench import check
from fused_softmax.bench.cases import Case
from fused_softmax.bench.providers import NEEDS_GPU, OWN, PROVIDERS, plan_of
from fused_softmax.bench.record import Ceiling, Point, one_line
from fused_softmax.bench.timing import (
    ContextLost,
    Entrant,
    GraphTimer,
    figure,
    host,
    require_context,
    rotation,
    walls,
)
from fused_softmax.bench.verify import interpreting

# Host time says something only where the GPU does not keep the queue full anyway.
SMALL_CALL_US = 100


@dataclass(frozen=True)
class Effort:
    """How long to measure: rounds in turns, and milliseconds for each provider in each.

    named: the providers were chosen, not all taken.
    """

    rounds: int = 3
    budget_ms: float = 25
    seed: int = 0
    time: bool = True
    named: bool = False


def measure(case: Case, names: Sequence[str], effort: Effort) -> list[Point]:
    """One point for every name, in order."""
    return (_measure_gpu if on_gpu() else _measure_cpu)(case, names, effort)


def on_gpu() -> bool:
    return torch.cuda.is_available() and not interpreting()


def _measure_gpu(case: Case, names: Sequence[str], effort: Effort) -> list[Point]:
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    buffers = rotation(case, l2_bytes)
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if refusal := _too_large(case, 2 * buffers + 3, free):
        return [_point(case, name, "skipped", refusal) for name in names]
    xs = check.inputs(case, buffers, "cuda", effort.seed)
    points, entrants = _check_all(case, names, xs[0], effort)
    if effort.time and entrants:
        try:
            points |= _time(case, xs, points, entrants, effort)
        except ContextLost:
            raise
        except Exception as error:
            require_context("timing", xs[0])
            message = f"when timed: {one_line(error)}"
            points |= {name: replace(points[name], status="refused", message=message) for name in entrants}
    if OWN in points:
        points[OWN] = replace(points[OWN], plan=plan_of(xs[0]))
    return [points[name] for name in names]


def _time(
    case: Case, xs: list[Tensor], points: dict[str, Point], entrants: dict[str, Entrant], effort: Effort
) -> dict[str, Point]:
    """The points of the entrants, with figures."""
    timer = GraphTimer(case, xs)
    torch_errors = check.errors(torch.softmax(xs[-1], dim=-1), xs[-1])
    done: dict[str, Point] = {}
    for name, entrant in entrants.items():
        try:
            if wrong := timer.prepare(entrant, check.allowed(torch_errors, xs[-1].dtype, name == OWN)):
                done[name] = replace(points[name], status="wrong", message=wrong)
        except Exception as error:
            require_context(name, xs[0])
            done[name] = replace(points[name], status="refused", message=f"when timed: {one_line(error)}")
    timed = [entrant for name, entrant in entrants.items() if name not in done]
    copies = timer.ceilings()
    timer.rounds([*timed, *copies], effort.rounds, effort.budget_ms)
    best = min(copies, key=lambda copy: statistics.median(copy.samples))
    top = figure(case, best.samples)
    calls = walls(case, timed, xs, effort.budget_ms)
    for entrant in timed:
        kernel = figure(case, entrant.samples)
        done[entrant.name] = replace(
            points[entrant.name],
            status="ok",
            message=entrant.note,
            kernel=kernel,
            call=calls[entrant.name],
            host_us=host(entrant.softmax, xs) if kernel.p50_us < SMALL_CALL_US else None,
            ratio=kernel.gb_per_s / top.gb_per_s,
            ceiling=Ceiling(best.name, top.p50_us, top.gb_per_s),
            method=entrant.method,
            buffers=len(xs),
            rotated_bytes=len(xs) * case.floor_bytes,
        )
    return done


def _too_large(case: Case, tensors: int, free: int) -> str:
    need = tensors * case.tensor_bytes + 6 * 8 * min(check.CHUNK + case.n_cols, case.n_rows * case.n_cols)
    return f"needs {need / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free" if need > free else ""


def _point(case: Case, name: str, status: str, message: str = "", **figures) -> Point:
    return Point(case.n_rows, case.n_cols, case.dtype, name, status, message, **figures)  # type: ignore[arg-type]


def _check_all(
    case: Case, names: Iterable[str], x: Tensor, effort: Effort
) -> tuple[dict[str, Point], dict[str, Entrant]]:
    """A point for every name, and those fit to be timed."""
    points, entrants = {}, {}
    torch_errors = check.errors(torch.softmax(x, dim=-1), x)
    before = check.fingerprint(x)
    for name in names:
        try:
            softmax = PROVIDERS[name]()
        except Exception as error:
            points[name] = _point(case, name, "absent", one_line(error))
            continue
        limits = check.allowed(torch_errors, x.dtype, name == OWN)
        try:
            wrong, found = check.complaint(check.poisoned(softmax, x), x, limits)
            if not wrong and check.fingerprint(x) != before:
                wrong = "wrote into its input"
        except Exception as error:
            points[name] = _point(case, name, "refused", one_line(error))
            require_context(name, x)
            continue
        figures = {"error_allowed": limits[0]}
        if found:
            figures |= {"error": found.largest, "row_sum_error": found.row_sum}
        points[name] = _point(case, name, "wrong" if wrong else "untimed", wrong, **figures)
        if not wrong:
            entrants[name] = Entrant(name, softmax)
        elif check.fingerprint(x) != before:
            x.copy_(check.inputs(case, 1, x.device.type, effort.seed)[0])
    return points, entrants


def _measure_cpu(case: Case, names: Sequence[str], effort: Effort) -> list[Point]:
    if refusal := _too_large(case, 6, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")):
        return [_point(case, name, "skipped", refusal) for name in names]
    left_out = {name: reason for name in names if (reason := _not_on_cpu(name, effort))}
    x = check.inputs(case, 1, "cpu", effort.seed)[0]
    points, entrants = _check_all(case, [name for name in names if name not in left_out], x, effort)
    for name, call in walls(case, [*entrants.values()], [x], 8 * effort.budget_ms).items() if effort.time else ():
        points[name] = replace(points[name], status="ok", call=call)
    for name, reason in left_out.items():
        points[name] = _point(case, name, *_absent_or(name, reason))
    return [points[name] for name in names]


def _not_on_cpu(name: str, effort: Effort) -> str:
    if name in NEEDS_GPU:
        return "a GPU kernel, and there is no GPU"
    if name == OWN and interpreting():
        return "interpreted, and the time of an interpreter says nothing"
    if name == "torch.compile" and not effort.named:
        return "compiled for a CPU only when named by --provider"
    return ""


def _absent_or(name: str, reason: str) -> tuple[str, str]:
    try:
        PROVIDERS[name]()
    except Exception as error:
        return "absent", one_line(error)
    return "untimed", reason
