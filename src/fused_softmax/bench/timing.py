"""The two clocks.

kernel  graph replay over rotating inputs and outputs, together larger than four times L2 where the count allows.
call    eager wall time of back-to-back calls, and apart from it the time to enqueue one.

Providers and copy kernels share the inputs, write the same output addresses (one graph pool) and take turns in several
rounds, so that clocks and addresses favour no one.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fused_softmax.bench import check
from fused_softmax.bench.cases import Case
from fused_softmax.bench.record import Figure, one_line

Softmax = Callable[..., Tensor]
MAX_BUFFERS = 256
MAX_CALLS = 256
ROTATION_BYTES = 3 * 2**30
GRAPH_SECONDS = 2e-3
FINALISTS = 3
WALL_BATCHES = 7


def rotation(case: Case, l2_bytes: int) -> int:
    """How many distinct input and output pairs: more than four times L2, two at least, within the caps."""
    cold = 4 * l2_bytes // case.floor_bytes + 1
    return max(2, min(cold, MAX_BUFFERS, ROTATION_BYTES // case.floor_bytes))


@dataclass
class Entrant:
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


class GraphTimer:
    """Captures and replays entrants over the inputs xs."""

    def __init__(self, case: Case, xs: list[Tensor]):
        self.xs = xs
        self.stream = _capture_stream()
        self.pool = torch.cuda.graph_pool_handle()
        guess = case.floor_bytes / 3e12 + 1.5e-6
        cycles = max(1, min(round(GRAPH_SECONDS / guess), MAX_CALLS) // len(xs))
        self.order = [i % len(xs) for i in range(cycles * len(xs))]

    def prepare(self, entrant: Entrant, limits: tuple[float, float] | None = None) -> str:
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
            require_context(entrant.name, self.xs[0])
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

    def ceilings(self) -> list[Entrant]:
        """The fastest copies of a short trial, one for all tensors of about a size; the rounds decide between them."""
        from fused_softmax.bench.ceiling import copies

        size = self.xs[0].dtype, round(8 * math.log2(self.xs[0].nbytes))
        trial = [Entrant(copy.name, copy) for copy in _finalists.get(size) or copies()]
        for entrant in trial:
            self.prepare(entrant)
        if size not in _finalists:
            for entrant in trial:
                sample(entrant, 3)
            trial = sorted(trial, key=lambda entrant: min(entrant.samples))[:FINALISTS]
            _finalists[size] = [entrant.softmax for entrant in trial]
        for entrant in trial:
            entrant.samples.clear()
        return trial

    def rounds(self, entrants: list[Entrant], rounds: int, budget_ms: float) -> None:
        """Samples of all, in turns: in every round `budget_ms` of each, every round beginning with another."""
        counts = {}
        for entrant in entrants:
            sample(entrant, 2)
            seconds = min(entrant.samples) * entrant.calls
            counts[entrant.name] = max(3, min(200, int(budget_ms * 1e-3 / seconds)))
            entrant.samples.clear()
        for turn in range(rounds):
            first = turn * len(entrants) // rounds
            for entrant in entrants[first:] + entrants[:first]:
                sample(entrant, counts[entrant.name])


def sample(entrant: Entrant, count: int) -> None:
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


def walls(case: Case, entrants: Sequence[Entrant], xs: Sequence[Tensor], budget_ms: float) -> dict[str, Figure]:
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


def require_context(name: str, x: Tensor) -> None:
    if not x.is_cuda:
        return
    try:
        torch.cuda.synchronize()
    except Exception as error:
        raise ContextLost(f"{name} broke the CUDA context: {one_line(error)}") from error


_finalists: dict[tuple[torch.dtype, int], list] = {}
_streams: list[torch.cuda.Stream] = []


def _capture_stream() -> torch.cuda.Stream:
    """One stream for all: the memory of a pool can be reused only on the stream it was allocated on."""
    if not _streams:
        _streams.append(torch.cuda.Stream())
    return _streams[0]
