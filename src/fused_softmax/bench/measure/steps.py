"""Steps of training a whole model, by one provider after another, each of which has a model of its own.

A step is judged by its loss and by its gradients, beside the same step in float32 with the same weights.
"""

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fused_softmax.bench.cases import Case
from fused_softmax.bench.catalog import COMPILING, NAMED, STEPS
from fused_softmax.bench.entries import steps as entries
from fused_softmax.bench.entries.steps import At, Errors, Result, Step
from fused_softmax.bench.measure import run, saving
from fused_softmax.bench.measure.measure import on_gpu
from fused_softmax.bench.measure.timing import ContextLost, figure
from fused_softmax.bench.measure.verify import interpreting
from fused_softmax.bench.results import record
from fused_softmax.bench.results.record import Point, Run, one_line
from fused_softmax.bench.show import report
from fused_softmax.core.described import number_of

ON_CPU = (2, 32, 1024)  # batch x length x vocabulary, where the user gave none
WARMUP = 2  # steps, after the one that is judged
# An error may be OF_BASELINE times the baseline's in the same dtype, and more by a share: of the loss, one rounding to
# bfloat16; of gradients, some roundings of sums that are kept in bfloat16.
OF_BASELINE, OF_LOSS, OF_GRADIENTS = 2.0, 2.0**-9, 2.0**-6


@dataclass(frozen=True)
class Asked:
    """A measurement as its arguments ask for it.

    chosen: each case with its providers. standing: the user gave no shapes, so a machine without a GPU measures small
    ones. named: the user named the providers. steps: timed ones.
    """

    command: str
    chosen: Sequence[tuple[Case, Sequence[str]]]
    standing: bool = True
    named: bool = False
    steps: int = 10
    seed: int = 0

    @property
    def points(self) -> set[tuple[Case, str]]:
        """The cases and providers of the points that a GPU's run has."""
        return {(case, name) for case, names in self.chosen for name in names}

    @property
    def recorded(self) -> dict[str, Any]:
        """The options of the run."""
        return {"steps": self.steps, "seed": self.seed}


def measured(
    asked: Asked, console: Console, progress: Console, out: Path | None, resume: bool
) -> tuple[Run, str, Path | None]:
    """As `run.measured`."""
    found = Run(run.environment(), asked.command, options=asked.recorded)
    old = run.earlier_of(found, out) if resume and out else None
    held = record.Held(old.points if old else ())
    report.print_head(found, console)
    if not on_gpu():
        small = " and few tokens; --shape sets them" if asked.standing else ""
        report.say(console, f"No GPU: a model of {number_of(entries.SMALL.layers, 'layer')}{small}.")
    if held.points:
        report.say(console, f"{number_of(len(held.points), 'point is', 'points are')} kept from the earlier run.")
    stopped = _measure(found, asked, held, out, progress)
    found.complete = not stopped
    return found, stopped, run.save(found, out)


def _measure(found: Run, asked: Asked, held: record.Held, out: Path | None, progress: Console) -> str:
    """Measure into `found`, and keep the partial file up to date. Returns why it ended early, or ""."""
    device, points = "cuda" if on_gpu() else "cpu", list[Point]()
    found.points = held.merged(points)
    try:
        for case, names in asked.chosen:
            if device == "cpu" and asked.standing:
                case = replace(case, shape=ON_CPU)
            there = {(point.case, point.provider) for point in found.points}
            if not (left := [name for name in names if (case, name) not in there]):
                continue
            start = time.monotonic()
            for point in measure(At(case, device, asked.seed), left, asked):
                points.append(point)
                found.points = held.merged(points)
                if out:
                    saving.save(found, record.partial_path(out))
                took = report.duration(time.monotonic() - start)
                report.say(progress, f"{case}, {point.provider}: {told(point)} ({took})")
                start = time.monotonic()
    except KeyboardInterrupt:
        return run.INTERRUPTED
    except ContextLost as error:
        return str(error)
    return ""


def told(point: Point) -> str:
    """A point's figures in words, or its status."""
    if point.call is None:
        return ": ".join(filter(None, (point.status, point.message)))
    memory = "" if point.memory_bytes is None else f", {point.memory_bytes / 2**30:.1f} GiB"
    return f"{point.call.p50_us * 1e-3:.1f} ms{memory}"


@dataclass(frozen=True)
class Judge:
    """The true result of a step, which is the baseline's in float32, and how far from it another may be."""

    at: At
    truth: Result
    allowed: Errors

    @classmethod
    def of(cls, at: At) -> "Judge":
        baseline = NAMED[STEPS[at.case.operation].baseline].steps[at.case.operation]
        found = []
        for dtype in ("float32", at.case.dtype):
            _emptied(at)
            with baseline(replace(at, case=replace(at.case, dtype=dtype))) as step:
                found.append(entries.result_of(step))
            del step
        truth, result = found
        errors = entries.errors_of(result, truth)
        allowed = Errors(
            OF_BASELINE * errors.loss + OF_LOSS, OF_BASELINE * errors.head + OF_GRADIENTS,
            OF_BASELINE * errors.rest + OF_GRADIENTS,
        )  # fmt: skip
        return cls(at, truth, allowed)

    def complaint(self, found: Errors) -> str:
        """What is wrong with a result, "" if nothing is."""
        for what in ("loss", "head", "rest"):
            error, allowed = getattr(found, what), getattr(self.allowed, what)
            if not error <= allowed:
                named = {"loss": "the loss", "head": "the gradient of the head", "rest": "the gradients"}[what]
                return f"{named}: error {error:.2e}, allowed {allowed:.2e}"
        return ""


def measure(at: At, names: Sequence[str], asked: Asked) -> Iterator[Point]:
    """The points of providers, as they are measured."""
    try:
        judge = Judge.of(at)
    except Exception as error:
        _require_context(at, "the step in float32")
        status = "absent" if isinstance(error, ImportError) else "skipped"
        yield from (_point(at, name, status, one_line(error)) for name in names)
        return
    for name in names:
        _emptied(at)
        yield _measured_by(name, judge, asked)


def _measured_by(name: str, judge: Judge, asked: Asked) -> Point:
    at = judge.at
    if why := _left_out(at, name, asked.named):
        return _point(at, name, "untimed", why)
    try:
        with NAMED[name].steps[at.case.operation](at) as step:
            return _judged(judge, name, step, asked.steps)
    except ImportError as error:
        return _point(at, name, "absent", one_line(error))
    except Exception as error:
        _require_context(at, name)
        return _point(at, name, "refused", one_line(error))


def _judged(judge: Judge, name: str, step: Step, steps: int) -> Point:
    errors = entries.errors_of(entries.result_of(step), judge.truth)
    figures: dict[str, Any] = {"error": errors.loss, "error_allowed": judge.allowed.loss}
    if wrong := judge.complaint(errors):
        return _point(judge.at, name, "wrong", wrong, **figures)
    if interpreting():
        return _point(judge.at, name, "untimed", "interpreted: the time of an interpreter says nothing", **figures)
    seconds, memory = _timed(step, judge.at, steps)
    call = figure(_floor_bytes(judge.at), seconds)
    return _point(judge.at, name, "ok", call=call, memory_bytes=memory, **figures)


def _timed(step: Step, at: At, steps: int) -> tuple[list[float], int | None]:
    """Seconds of each step, and on a GPU the most bytes that one allocated beside the weights."""
    gpu, seconds, before = at.device == "cuda", [], 0
    for i in range(WARMUP + steps):
        step.model.zero_grad(set_to_none=True)
        if gpu:
            torch.cuda.synchronize()
            if i == WARMUP:
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        step.loss().backward()
        if gpu:
            torch.cuda.synchronize()
        if i >= WARMUP:
            seconds.append(time.perf_counter() - start)
    return seconds, torch.cuda.max_memory_allocated() - before if gpu else None


def _left_out(at: At, name: str, named: bool) -> str:
    """Why a provider takes no step on a CPU, or ""."""
    if at.device != "cpu":
        return ""
    if NAMED[name].needs_gpu and name != STEPS[at.case.operation].baseline:
        return "a GPU kernel, and there is no GPU"
    return "compiled for a CPU only when named by --provider" if name in COMPILING and not named else ""


def _floor_bytes(at: At) -> int:
    """Of weights that are read and gradients that are written."""
    return 2 * entries.parameters_of(at) * at.case.itemsize


def _point(at: At, name: str, status: str, message: str = "", **figures: Any) -> Point:
    case = at.case
    facts = {**case.parameters, **at.sizes._asdict(), "parameters": entries.parameters_of(at)}
    more = {"operation": case.operation, "parameters": facts, **figures}
    return Point(case.n_rows, case.n_cols, case.dtype, name, status, message, **more)  # type: ignore[arg-type]


def _require_context(at: At, name: str) -> None:
    if at.device == "cuda":
        try:
            torch.cuda.synchronize()
        except Exception as error:
            raise ContextLost(f"{name} broke the CUDA context: {one_line(error)}") from error


def _emptied(at: At) -> None:
    gc.collect()
    if at.device == "cuda":
        torch.cuda.empty_cache()
