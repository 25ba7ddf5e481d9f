"""The two clocks.

kernel  graph replay over rotating inputs and outputs, together larger than four times L2 if the count allows
call    eager wall time of back-to-back calls and, separately, the time to enqueue one

Providers and ceilings share the inputs, write to the same output addresses (one graph pool) and take turns in several
rounds, each in an order of its own, so that clocks and addresses favour none of them. Where a power cap lowers clocks,
they follow what ran in the tenth of a second before. There a provider runs untimed for as long first.
"""

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from fused_softmax.bench.entries.ceiling import Ceiling
from fused_softmax.bench.entries.makers import Call
from fused_softmax.bench.entries.operation import Inputs
from fused_softmax.bench.results import record
from fused_softmax.bench.results.record import Figure, one_line

MAX_BUFFERS = 256
MAX_CALLS = 256
ROTATION_BYTES = 3 * 2**30
GRAPH_SECONDS = 2e-3
LONGEST_SECONDS = 20e-3  # of a pass of a slow provider, unless one round of the sets takes longer
FINALISTS = 3
WALL_BATCHES = 7


def rotation(floor_bytes: int, l2_bytes: int) -> int:
    """How many sets of inputs and outputs to rotate: more than four times L2, at least two, within the caps."""
    cold = 4 * l2_bytes // floor_bytes + 1
    return max(2, min(cold, MAX_BUFFERS, ROTATION_BYTES // floor_bytes))


@dataclass
class Entrant:
    """A provider that passed the check, or a ceiling and the bytes it moves. samples: seconds per call."""

    name: str
    call: Call
    moved_bytes: int = 0
    enqueue: Callable[[], object] = lambda: None
    calls: int = 1
    method: Literal["graph", "events"] = "graph"
    note: str = ""
    graph: torch.cuda.CUDAGraph | None = None
    samples: list[float] = field(default_factory=list)


class ContextLost(RuntimeError):
    """A provider broke the process's CUDA context, so nothing more can run in it."""


class GraphTimer:
    """Captures and replays entrants over the sets of inputs."""

    def __init__(self, floor_bytes: int, sets: list[Inputs]):
        self.sets = sets
        self.stream = _capture_stream()
        self.pool = torch.cuda.graph_pool_handle()
        guess = floor_bytes / 3e12 + 1.5e-6
        cycles = max(1, min(round(GRAPH_SECONDS / guess), MAX_CALLS) // len(sets))
        self.order = [i % len(sets) for i in range(cycles * len(sets))]

    def prepare(self, entrant: Entrant, complaint: Callable[[object], tuple[str, object]] | None = None) -> str:
        """Capture one pass over the sets, or fall back to eager passes. Returns the last output's complaint or ""."""
        ys: list[Tensor | None] = [None] * len(self.sets)
        outer = torch.cuda.current_stream()
        self.stream.wait_stream(outer)  # where the inputs were made
        with torch.cuda.stream(self.stream):
            for inputs in self.sets[:2]:
                torch.cuda.synchronize()
                start = time.perf_counter()
                entrant.call(*inputs)
        torch.cuda.synchronize()
        order = shortened(self.order, len(self.sets), time.perf_counter() - start)

        def one_pass() -> None:
            for i in order:
                ys[i] = None  # its block is free for this call, so exactly len(sets) outputs rotate
                ys[i] = entrant.call(*self.sets[i])

        entrant.calls = len(order)
        try:
            entrant.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(entrant.graph, pool=self.pool, stream=self.stream):
                one_pass()
            entrant.enqueue = entrant.graph.replay
        except Exception as error:
            torch.cuda.set_stream(outer)
            require_context(entrant.name, self.sets[0])
            self.pool = torch.cuda.graph_pool_handle()
            entrant.graph, entrant.method = None, "events"
            entrant.note = f"timed by events, not captured: {one_line(error.__context__ or error)}"
            entrant.enqueue = one_pass
            one_pass()
        last = ys[-1]
        if complaint is None or last is None:
            return ""
        for part in last if isinstance(last, tuple) else (last,):
            part.fill_(math.nan if part.is_floating_point() else -1)
        torch.cuda.synchronize()
        entrant.enqueue()
        torch.cuda.synchronize()
        wrong, _ = complaint(ys[-1])
        return wrong and f"on replay: {wrong}"

    def ceilings(self, kernels: Sequence[Ceiling]) -> list[Entrant]:
        """The fastest kernels of a short trial, made once for each size of tensor. The rounds decide between them."""
        first = self.sets[0][0]
        key = tuple(kernels), first.dtype, round(8 * math.log2(first.nbytes))
        trial = [Entrant(each.name, each, each.moved_bytes(*self.sets[0])) for each in _finalists.get(key) or kernels]
        for entrant in trial:
            self.prepare(entrant)
        if key not in _finalists:
            for entrant in trial:
                sample(entrant, 3)
            trial = sorted(trial, key=lambda entrant: min(entrant.samples) / entrant.moved_bytes)[:FINALISTS]
            _finalists[key] = [entrant.call for entrant in trial]
        for entrant in trial:
            entrant.samples.clear()
        return trial

    def rounds(
        self,
        entrants: list[Entrant],
        rounds: int,
        budget_ms: float,
        watch: Callable[[], object] = lambda: None,
        settle_ms: float = 0,
    ) -> None:
        """Sample all entrants in turns: `budget_ms` of each in every round, after untimed passes of `settle_ms`.

        watch: called once in each round, while the GPU is busy with a pass that is not timed.
        """
        counts, untimed = {}, {}
        for entrant in entrants:
            sample(entrant, 2)
            seconds = min(entrant.samples) * entrant.calls
            counts[entrant.name] = max(3, min(200, int(budget_ms * 1e-3 / seconds)))
            untimed[entrant.name] = max(1, math.ceil(settle_ms * 1e-3 / seconds))
            entrant.samples.clear()
        for turn in range(rounds):
            for i in in_turn(len(entrants), turn):
                sample(entrants[i], counts[entrants[i].name], untimed[entrants[i].name])
            entrants[0].enqueue()
            watch()
            torch.cuda.synchronize()


def shortened(order: list[int], sets: int, seconds: float) -> list[int]:
    """A pass over the sets, of as few rounds of them as a call of so many seconds makes long."""
    rounds = int(LONGEST_SECONDS / seconds) // sets
    return order[: max(1, rounds) * sets]


def in_turn(n: int, turn: int) -> list[int]:
    """The order of n entrants in a round: drawn, so that none always follows the same one."""
    return random.Random(turn).sample(range(n), n)


def sample(entrant: Entrant, count: int, untimed: int = 1) -> None:
    """Enqueue untimed passes, then `count` timed ones, so that the GPU never waits for the host between events."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    for _ in range(untimed):
        entrant.enqueue()
    for event in events[:-1]:
        event.record()
        entrant.enqueue()
    events[-1].record()
    torch.cuda.synchronize()
    for start, end in itertools.pairwise(events):
        entrant.samples.append(start.elapsed_time(end) * 1e-3 / entrant.calls)


def walls(floor_bytes: int, entrants: Sequence[Entrant], sets: Sequence[Inputs], budget_ms: float) -> dict[str, Figure]:
    """Eager wall time of each entrant: batches of back-to-back calls, in turns. The device is idle around a batch."""

    def seconds(call: Call, calls: int) -> float:
        arguments = list(itertools.islice(itertools.cycle(sets), calls))
        idle(sets[0][0])
        start = time.perf_counter()
        for inputs in arguments:
            call(*inputs)
        idle(sets[0][0])
        return (time.perf_counter() - start) / calls

    calls = {entrant.name: partial(seconds, entrant.call) for entrant in entrants}
    samples = in_batches(calls, WALL_BATCHES, budget_ms * 1e-3 / WALL_BATCHES)
    return {name: figure(floor_bytes, values) for name, values in samples.items()}


def in_batches(passes: Mapping[str, Callable[[int], float]], batches: int, budget_s: float) -> dict[str, list[float]]:
    """Seconds of a pass, in batches that take turns. passes: what makes so many and gives the seconds of one.

    budget_s: of a batch. How many passes it has is decided by two that are not counted.
    """
    counts = {}
    for name, seconds in passes.items():
        seconds(2)
        counts[name] = max(1, min(1000, int(budget_s / seconds(2))))
    samples: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(batches):
        for name, seconds in passes.items():
            samples[name].append(seconds(counts[name]))
    return samples


def idle(x: Tensor) -> None:
    """Wait until the device that has x has nothing to do."""
    if x.is_cuda:
        torch.cuda.synchronize()


def host(call: Call, sets: Sequence[Inputs], calls: int = 64, batches: int = 9) -> float:
    """Microseconds to enqueue one call while the queue is never full."""
    arguments = list(itertools.islice(itertools.cycle(sets), calls))
    times = []
    for _ in range(batches):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for inputs in arguments:
            call(*inputs)
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(times) / calls * 1e6


def figure(moved_bytes: int, seconds: Sequence[float]) -> Figure:
    p20, p50, p80 = (q * 1e6 for q in quantiles(seconds))
    return Figure(p20, p50, p80, moved_bytes / p50 * 1e-3)


def best_of(ceilings: Sequence[Entrant]) -> record.Ceiling:
    """The fastest of the ceilings that were timed."""
    tops = {each.name: figure(each.moved_bytes, each.samples) for each in ceilings}
    best = max(tops, key=lambda name: tops[name].gb_per_s)
    return record.Ceiling(best, tops[best].p50_us, tops[best].gb_per_s)


def quantiles(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered[round(q * (len(ordered) - 1))] for q in (0.2, 0.5, 0.8)]


def require_context(name: str, inputs: Inputs) -> None:
    if not inputs[0].is_cuda:
        return
    try:
        torch.cuda.synchronize()
    except Exception as error:
        raise ContextLost(f"{name} broke the CUDA context: {one_line(error)}") from error


_finalists: dict[tuple[tuple[Ceiling, ...], torch.dtype, int], list] = {}
_streams: list[torch.cuda.Stream] = []


def _capture_stream() -> torch.cuda.Stream:
    """One stream for all, because a pool's memory can be reused only on the stream it was allocated on."""
    if not _streams:
        _streams.append(torch.cuda.Stream())
    return _streams[0]
