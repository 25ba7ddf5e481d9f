"""From a case to its points: check against float64, then time what passed.

kernel  graph replay over rotating inputs and outputs, together larger than four times L2 where the count allows.
call    eager wall time of back-to-back calls, and apart from it the time to enqueue one.

Providers and copy kernels share the inputs, write the same output addresses (one graph pool) and take turns in several
rounds, so that clocks and addresses favour no one.
"""

import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from fused_softmax.bench import check
from fused_softmax.bench.cases import Case
from fused_softmax.bench.providers import NEEDS_GPU, OWN, PROVIDERS, plan_of
from fused_softmax.bench.record import Ceiling, Figure, Point, one_line
from fused_softmax.bench.verify import interpreting

Softmax = Callable[[Tensor], Tensor]
MAX_BUFFERS = 256
MAX_CALLS = 256
WALL_BATCHES = 7
ROTATION_BYTES = 3 * 2**30
GRAPH_SECONDS = 2e-3
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


@dataclass
class _Entrant:
    """One that passed the check, and its samples in seconds per call."""

    name: str
    softmax: Softmax
    enqueue: Callable[[], object] = lambda: None
    calls: int = 1
    method: Literal["graph", "events"] = "graph"
    note: str = ""
    graph: torch.cuda.CUDAGraph | None = None
    samples: list[float] = field(default_factory=list)


class ContextLost(RuntimeError):
    """A provider broke the process's CUDA context: nothing more can run in it."""


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
            points |= _GraphTimer(case, xs, effort).run(points, entrants)
        except Exception as error:
            _require_context("timing", xs[0])
            message = f"when timed: {one_line(error)}"
            points |= {name: replace(points[name], status="refused", message=message) for name in entrants}
    if OWN in points:
        points[OWN] = replace(points[OWN], plan=plan_of(xs[0]))
    return [points[name] for name in names]


def rotation(case: Case, l2_bytes: int) -> int:
    """How many distinct input and output pairs: more than four times L2, two at least, within the caps."""
    cold = 4 * l2_bytes // case.floor_bytes + 1
    return max(2, min(cold, MAX_BUFFERS, ROTATION_BYTES // case.floor_bytes))


def _too_large(case: Case, tensors: int, free: int) -> str:
    need = tensors * case.tensor_bytes + 6 * 8 * min(check.CHUNK + case.n_cols, case.n_rows * case.n_cols)
    return f"needs {need / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free" if need > free else ""


def _point(case: Case, name: str, status: str, message: str = "", **figures) -> Point:
    return Point(case.n_rows, case.n_cols, case.dtype, name, status, message, **figures)  # type: ignore[arg-type]


def _check_all(
    case: Case, names: Iterable[str], x: Tensor, effort: Effort
) -> tuple[dict[str, Point], dict[str, _Entrant]]:
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
            _require_context(name, x)
            continue
        figures = {"error_allowed": limits[0]}
        if found:
            figures |= {"error": found.largest, "row_sum_error": found.row_sum}
        points[name] = _point(case, name, "wrong" if wrong else "untimed", wrong, **figures)
        if not wrong:
            entrants[name] = _Entrant(name, softmax)
        elif check.fingerprint(x) != before:
            x.copy_(check.inputs(case, 1, x.device.type, effort.seed)[0])
    return points, entrants


def _require_context(name: str, x: Tensor) -> None:
    if not x.is_cuda:
        return
    try:
        torch.cuda.synchronize()
    except Exception as error:
        raise ContextLost(f"{name} broke the CUDA context: {one_line(error)}") from error


class _GraphTimer:
    def __init__(self, case: Case, xs: list[Tensor], effort: Effort):
        self.case, self.xs, self.effort = case, xs, effort
        self.stream = _capture_stream()
        self.pool = torch.cuda.graph_pool_handle()
        self.torch_errors = check.errors(torch.softmax(xs[-1], dim=-1), xs[-1])
        guess = case.floor_bytes / 3e12 + 1.5e-6
        cycles = max(1, min(round(GRAPH_SECONDS / guess), MAX_CALLS) // len(xs))
        self.order = [i % len(xs) for i in range(cycles * len(xs))]

    def run(self, points: dict[str, Point], entrants: dict[str, _Entrant]) -> dict[str, Point]:
        """The points of the entrants, with figures."""
        done: dict[str, Point] = {}
        for name, entrant in entrants.items():
            try:
                if wrong := self.prepare(entrant, check.allowed(self.torch_errors, self.xs[-1].dtype, name == OWN)):
                    done[name] = replace(points[name], status="wrong", message=wrong)
            except Exception as error:
                _require_context(name, self.xs[0])
                done[name] = replace(points[name], status="refused", message=f"when timed: {one_line(error)}")
        timed = [entrant for name, entrant in entrants.items() if name not in done]
        ceilings = self.ceilings()
        self.rounds([*timed, *ceilings])
        best = min(ceilings, key=lambda copy: statistics.median(copy.samples))
        top = figure(self.case, best.samples)
        ceiling = Ceiling(best.name, top.p50_us, top.gb_per_s)
        calls = walls(self.case, timed, self.xs, self.effort.budget_ms)
        for entrant in timed:
            kernel = figure(self.case, entrant.samples)
            done[entrant.name] = replace(
                points[entrant.name],
                status="ok",
                message=entrant.note,
                kernel=kernel,
                call=calls[entrant.name],
                host_us=host(entrant.softmax, self.xs) if kernel.p50_us < SMALL_CALL_US else None,
                ratio=kernel.gb_per_s / ceiling.gb_per_s,
                ceiling=ceiling,
                method=entrant.method,
                buffers=len(self.xs),
                rotated_bytes=len(self.xs) * self.case.floor_bytes,
            )
        return done

    def prepare(self, entrant: _Entrant, limits: tuple[float, float] | None = None) -> str:
        """Capture one pass over the inputs, or fall back to eager passes; say what is wrong with its last output."""
        ys: list[Tensor | None] = [None] * len(self.xs)

        def one_pass() -> None:
            for i in self.order:
                ys[i] = None  # its block is free for this call, so exactly len(xs) outputs rotate
                ys[i] = entrant.softmax(self.xs[i])

        entrant.calls = len(self.order)
        outer = torch.cuda.current_stream()
        self.stream.wait_stream(outer)  # where the inputs were made
        with torch.cuda.stream(self.stream):
            for x in self.xs[:2]:
                entrant.softmax(x)
        torch.cuda.synchronize()
        try:
            entrant.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(entrant.graph, pool=self.pool, stream=self.stream):
                one_pass()
            entrant.enqueue = entrant.graph.replay
        except Exception as error:
            torch.cuda.set_stream(outer)
            _require_context(entrant.name, self.xs[0])
            self.pool = torch.cuda.graph_pool_handle()
            entrant.graph, entrant.method = None, "events"
            entrant.note = f"timed by events, not captured: {one_line(error.__context__ or error)}"
            entrant.enqueue = one_pass
            one_pass()
        last = ys[-1]
        if limits is None or last is None:
            return ""
        last.fill_(float("nan"))
        torch.cuda.synchronize()
        entrant.enqueue()
        torch.cuda.synchronize()
        wrong, _ = check.complaint(ys[-1], self.xs[-1], limits)
        return wrong and f"on replay: {wrong}"

    def ceilings(self) -> list[_Entrant]:
        """The three fastest copies of a short trial; the rounds decide between them."""
        from fused_softmax.bench.ceiling import copies

        trial = [_Entrant(copy.name, copy) for copy in copies()]
        for entrant in trial:
            self.prepare(entrant)
            sample(entrant, 3)
        trial.sort(key=lambda entrant: min(entrant.samples))
        for entrant in trial:
            entrant.samples.clear()
        return trial[:3]

    def rounds(self, entrants: list[_Entrant]) -> None:
        counts = {}
        for entrant in entrants:
            sample(entrant, 2)
            seconds = min(entrant.samples) * entrant.calls
            counts[entrant.name] = max(3, min(200, int(self.effort.budget_ms * 1e-3 / seconds)))
            entrant.samples.clear()
        for turn in range(self.effort.rounds):
            first = turn * len(entrants) // self.effort.rounds
            for entrant in entrants[first:] + entrants[:first]:
                sample(entrant, counts[entrant.name])


def sample(entrant: _Entrant, count: int) -> None:
    """Queue one pass to fill the queue and then `count` timed ones: between events the GPU never waits for the host."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    entrant.enqueue()
    for event in events[:-1]:
        event.record()
        entrant.enqueue()
    events[-1].record()
    torch.cuda.synchronize()
    for start, end in itertools.pairwise(events):
        entrant.samples.append(start.elapsed_time(end) * 1e-3 / entrant.calls)


def walls(case: Case, entrants: Sequence[_Entrant], xs: Sequence[Tensor], budget_ms: float) -> dict[str, Figure]:
    """Eager wall time of each: batches of back-to-back calls, in turns, the device idle before and after a batch."""
    idle = torch.cuda.synchronize if xs[0].is_cuda else lambda: None

    def seconds(softmax: Softmax, calls: int) -> float:
        arguments = list(itertools.islice(itertools.cycle(xs), calls))
        idle()
        start = time.perf_counter()
        for x in arguments:
            softmax(x)
        idle()
        return (time.perf_counter() - start) / calls

    counts = {}
    for entrant in entrants:
        seconds(entrant.softmax, 2)
        one = seconds(entrant.softmax, 2)
        counts[entrant.name] = max(1, min(1000, int(budget_ms * 1e-3 / WALL_BATCHES / one)))
    samples: dict[str, list[float]] = {entrant.name: [] for entrant in entrants}
    for _ in range(WALL_BATCHES):
        for entrant in entrants:
            samples[entrant.name].append(seconds(entrant.softmax, counts[entrant.name]))
    return {name: figure(case, values) for name, values in samples.items()}


def host(softmax: Softmax, xs: Sequence[Tensor], calls: int = 64, batches: int = 9) -> float:
    """Microseconds to enqueue one call, the queue never full."""
    arguments = list(itertools.islice(itertools.cycle(xs), calls))
    times = []
    for _ in range(batches):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for x in arguments:
            softmax(x)
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(times) / calls * 1e6


def figure(case: Case, seconds: Sequence[float]) -> Figure:
    p20, p50, p80 = (q * 1e6 for q in quantiles(seconds))
    return Figure(p20, p50, p80, case.floor_bytes / p50 * 1e-3)


def quantiles(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered[round(q * (len(ordered) - 1))] for q in (0.2, 0.5, 0.8)]


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


_streams: list[torch.cuda.Stream] = []


def _capture_stream() -> torch.cuda.Stream:
    """One stream for all: the memory of a pool can be reused only on the stream it was allocated on."""
    if not _streams:
        _streams.append(torch.cuda.Stream())
    return _streams[0]
