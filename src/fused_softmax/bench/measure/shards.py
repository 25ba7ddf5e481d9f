"""Rows whose columns lie in shards: one process a rank, which all make the same calls in the same order.

Every rank makes the whole inputs from one seed and takes its shard, so each can compare its part of a result with
float64. What decides what happens next is agreed on by all: whether a provider is there, its result is right, and how
often it is called. A time is that of the slowest rank.
"""

import datetime
import gc
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from fused_softmax.bench.cases import Case
from fused_softmax.bench.catalog import ONE_GPU, OWN, PEERS_OF_SHARDS
from fused_softmax.bench.entries.makers import Call
from fused_softmax.bench.entries.operation import Inputs
from fused_softmax.bench.entries.operations import OPERATIONS
from fused_softmax.bench.entries.shards import PROVIDERS, Place
from fused_softmax.bench.measure import check, saving, sweeps
from fused_softmax.bench.measure.check import Judge
from fused_softmax.bench.measure.measure import Effort, point, with_figures, with_memory
from fused_softmax.bench.measure.run import CPU_ELEMENTS, Asked, gpu_facts
from fused_softmax.bench.measure.timing import WALL_BATCHES, Entrant, best_of, figure, host, in_batches, rotation
from fused_softmax.bench.results import record
from fused_softmax.bench.results.record import Point, one_line
from fused_softmax.bench.show import report
from fused_softmax.core.described import number_of

CALLS_AT_ONCE = 8  # of which the host time is taken: large ones, and the slowest provider's, fit into the queue
WAITS = datetime.timedelta(minutes=5)  # for a rank that says nothing


@dataclass(frozen=True)
class Ranks:
    """group: of the measured calls. talk: of gloo, by which ranks agree without a word on the measured one."""

    group: Any
    talk: Any
    rank: int
    n: int
    device: torch.device

    def most(self, value: float) -> float:
        """The greatest of all ranks' values; all ranks are here when it returns."""
        told = torch.tensor(float(value), dtype=torch.float64)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self.talk)
        return told.item()

    def first_word(self, said: str) -> str:
        """What the first rank that says something says; "" if none does."""
        words: list[Any] = [None] * self.n
        dist.all_gather_object(words, said, group=self.talk)
        return next((f"rank {rank}: {word}" for rank, word in enumerate(words) if word), "")

    def idle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextmanager
def ranks_of_torchrun() -> Iterator[Ranks]:
    """The ranks that torchrun started: by NCCL where there are GPUs, one for each rank of a host, else by gloo."""
    on_gpu = torch.cuda.is_available() and os.environ.get("FUSED_SOFTMAX_INTERPRET") != "1"
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=WAITS, device_id=device if on_gpu else None)
    try:
        talk = dist.new_group(backend="gloo", timeout=WAITS)
        yield Ranks(dist.group.WORLD, talk, dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


class JudgeOfShard(Judge):
    """Judges this rank's part of a result.

    inputs: whole ones, in which this rank's columns stand first. The errors of torch on the whole bound the others'.
    """

    def __init__(self, case: Case, inputs: Inputs, axis: int, columns: int):
        self.part: tuple[int, int] | None = None
        super().__init__(case, inputs)
        self.part = axis, columns
        vars(self).pop("whole_truth", None)  # that of whole rows
        self.shape = torch.Size(columns if d == axis else size for d, size in enumerate(self.shape))

    def truth(self, inputs: Inputs) -> Tensor:
        whole = super().truth(inputs)
        return whole if self.part is None else whole.narrow(self.part[0], 0, self.part[1])


def measure(case: Case, names: Sequence[str], effort: Effort, ranks: Ranks) -> list[Point]:
    """One point for each name, the same on every rank. case: whole rows."""
    if case.n_cols % ranks.n:
        why = f"{case.n_cols} columns cannot be shared equally by {ranks.n} ranks"
        return [_point(case, name, ranks, "skipped", why) for name in names]
    place = Place(case, ranks.group, ranks.rank, ranks.n, ranks.device)
    floor = OPERATIONS[case.operation].floor_bytes(place.shard)
    count = _sets(case, floor, ranks)
    said, sets = "", None
    try:
        sets = Sets.of(place, count, effort.seed)
        judge = JudgeOfShard(case, sets.whole[0], place.class_axis, place.columns)
    except Exception as error:
        said = one_line(error)
    if said := ranks.first_word(said):
        return [_point(case, name, ranks, "skipped", said) for name in names]
    assert sets
    points: dict[str, Point] = {}
    entrants: list[Entrant] = []
    for name in names:
        points[name], entrant = _checked(name, sets, judge, place, effort.seed, ranks)
        if entrant:
            entrants.append(entrant)
    del judge
    if effort.time:
        _time(sets, floor, points, entrants, effort, ranks, place)
    gc.collect()
    return [points[name] for name in names]


@dataclass(frozen=True)
class Sets:
    """Inputs of calls that rotate: of whole rows, with this rank's columns first in the first set, and of its shard."""

    whole: list[Inputs]
    shard: list[Inputs]

    @classmethod
    def of(cls, place: Place, count: int, seed: int) -> "Sets":
        whole = check.inputs(place.case, count, str(place.device), seed)
        shard = [place.cut(each) for each in whole]
        return cls([place.own_first(whole[0]), *whole[1:]], shard)

    def of_provider(self, name: str) -> list[Inputs]:
        return self.whole if name == ONE_GPU else self.shard


def _sets(case: Case, floor: int, ranks: Ranks) -> int:
    """How many sets of inputs rotate on every rank."""
    count = 1
    if ranks.device.type == "cuda":
        count = rotation(floor, torch.cuda.get_device_properties(ranks.device).L2_cache_size)
        whole = 2 * OPERATIONS[case.operation].held_bytes(case)
        count = max(1, min(count, torch.cuda.mem_get_info(ranks.device)[0] // 4 // whole))
    return int(-ranks.most(-count))


def _checked(
    name: str, sets: Sets, judge: Judge, place: Place, seed: int, ranks: Ranks
) -> tuple[Point, Entrant | None]:
    case = place.case
    call, said = None, ""
    try:
        call = PROVIDERS[case.operation][name](place)
    except Exception as error:
        said = one_line(error)
    if (said := ranks.first_word(said)) or call is None:
        return _point(case, name, ranks, "absent", said), None
    inputs = sets.of_provider(name)
    limits = judge.allowed(name.startswith(OWN))
    before, found, memory = check.fingerprint(inputs[0]), None, None
    try:
        y, memory = with_memory(judge, lambda *_: call(*inputs[0]), ranks.idle)
        if name == ONE_GPU and isinstance(y, Tensor):
            y = y.narrow(place.class_axis, 0, place.columns)
        wrong, found = judge.complaint(y, limits)
        del y
        if not wrong and check.fingerprint(inputs[0]) != before:
            wrong = "wrote into its input"
        refused = ""
    except Exception as error:
        wrong, refused = "", one_line(error)
    if check.fingerprint(inputs[0]) != before:  # which others read too
        for spoilt, fresh in zip(inputs[0], Sets.of(place, 1, seed).of_provider(name)[0], strict=True):
            spoilt.copy_(fresh)
    if said := ranks.first_word(refused):
        return _point(case, name, ranks, "refused", said), None
    wrong = ranks.first_word(wrong)
    figures: dict[str, Any] = {"error_allowed": ranks.most(limits[0])}
    errors = [ranks.most(each) for each in ((found.largest, found.row_sum) if found else (0.0, 0.0))]
    if not wrong:
        figures |= dict(zip(("error", "row_sum_error"), errors, strict=True))
    if memory is not None:
        figures["memory_bytes"] = int(ranks.most(memory))
    made = _point(case, name, ranks, "wrong" if wrong else "untimed", wrong, **figures)
    return made, None if wrong else _entrant(name, call, inputs)


def _entrant(name: str, call: Call, sets: Sequence[Inputs], moved_bytes: int = 0) -> Entrant:
    """Of eager passes over the sets."""

    def one_pass() -> None:
        for inputs in sets:
            call(*inputs)

    return Entrant(name, call, moved_bytes, one_pass, calls=len(sets))


def _time(
    sets: Sets, floor: int, points: dict[str, Point], entrants: list[Entrant], effort: Effort, ranks: Ranks,
    place: Place,
) -> None:  # fmt: skip
    """Put figures into the points of the entrants: eager calls, and on GPUs graphs of them beside a plain kernel."""
    _rounds(entrants, effort, ranks)
    eager = {each.name: figure(floor, each.samples) for each in entrants}
    if ranks.device.type != "cuda":
        for name, call in eager.items():
            points[name] = replace(points[name], status="ok", call=call)
        return
    for entrant in entrants:
        _capture(entrant, ranks)
    ceilings = _plain(place, sets, ranks)
    _rounds([*entrants, *ceilings], effort, ranks)
    best = best_of(ceilings) if ceilings else None
    for each in entrants:
        host_us = ranks.most(host(each.call, sets.of_provider(each.name), CALLS_AT_ONCE))
        found = with_figures(points[each.name], each, floor, each.calls, eager[each.name], best)
        points[each.name] = replace(found, host_us=host_us)


def _plain(place: Place, sets: Sets, ranks: Ranks) -> list[Entrant]:
    """The plain kernels that all ranks have, over shards of this size."""
    found = []
    for each in OPERATIONS[place.case.operation].ceilings(place.shard):
        said = ""
        try:
            each(*sets.shard[0])
            ranks.idle()
        except Exception as error:
            said = one_line(error)
        if not ranks.first_word(said):
            found.append(_entrant(each.name, each, sets.shard, each.moved_bytes(*sets.shard[0])))
    return found


def _capture(entrant: Entrant, ranks: Ranks) -> None:
    """A graph of one pass over the sets; where any rank cannot, all go on with eager passes."""
    graph, said, outer = torch.cuda.CUDAGraph(), "", torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # a thread of NCCL's asks for its events
            entrant.enqueue()
    except Exception as error:
        torch.cuda.set_stream(outer)
        said = one_line(error.__context__ or error)
    if said := ranks.first_word(said):
        entrant.note, entrant.method = f"not captured: {said}", "events"
    else:
        entrant.graph, entrant.enqueue = graph, graph.replay
        graph.replay()
    ranks.idle()


def _rounds(entrants: Sequence[Entrant], effort: Effort, ranks: Ranks) -> None:
    """Sample all entrants, as the slowest rank has them, in batches that take turns."""

    def seconds(entrant: Entrant, times: int) -> float:
        ranks.idle()
        ranks.most(0.0)  # all begin together
        start = time.perf_counter()
        for _ in range(times):
            entrant.enqueue()
        ranks.idle()
        return ranks.most(time.perf_counter() - start) / times  # the same on every rank

    passes = {each.name: partial(seconds, each) for each in entrants}
    samples = in_batches(passes, effort.rounds * WALL_BATCHES, effort.budget_ms * 1e-3)
    for each in entrants:
        each.samples = [found / each.calls for found in samples[each.name]]


def _point(case: Case, name: str, ranks: Ranks, status: str, message: str = "", **figures: Any) -> Point:
    made = point(case, name, status, message, **figures)
    made.parameters["ranks"] = ranks.n
    return made


def run(asked: Asked, out: Path | None, console: Console) -> int:
    """Measure, and on rank 0 print and save. The exit code, the same on every rank: 1 if a result is wrong."""
    with ranks_of_torchrun() as ranks:
        gpu = ranks.device.type == "cuda"
        speaks = ranks.rank == 0
        done = record.Run(record.environment(*gpu_facts() if gpu else ()), asked.command)
        done.options = asked.recorded
        done.options["ranks"] = ranks.n
        if speaks:
            _print_head(done, ranks, asked.standing, console)
        cases = asked.chosen if gpu or not asked.standing else sweeps.cut(asked.chosen, CPU_ELEMENTS)
        for case in cases:
            mine = [
                name for name in asked.names or PEERS_OF_SHARDS[case.operation] if name in PROVIDERS[case.operation]
            ]
            done.points += measure(case, mine, asked.effort, ranks)
            if speaks and out:
                saving.save(done, out)  # as far as it is, for a machine may be lent for minutes
        done.complete = True
        if speaks:
            report.print_run(done, console)
            if out:
                saving.save(done, out)
            report.print_end(done, console, "", [out] if out else [])
    failed = [p for p in done.points if p.status == "wrong" or (p.provider.startswith(OWN) and p.status == "refused")]
    return int(bool(failed))


def _print_head(done: record.Run, ranks: Ranks, standing: bool, console: Console) -> None:
    versions = ", ".join(f"{name} {done.environment[name]}" for name in ("torch", "triton", "python"))
    where = done.environment["gpu"]["name"] if done.environment["gpu"] else "no GPU"
    report.say(console, f"{number_of(ranks.n, 'rank')} by {dist.get_backend(ranks.group)}; {where}; {versions}")
    report.say(console, "Times are the slowest rank's. GB/s count what a rank must read and write of its shard.")
    if ranks.device.type != "cuda":
        by = "fused_softmax is timed by torch's operations, which it takes on a CPU, and the exchange by gloo."
        report.say(console, f"{by} {ONE_GPU} is one process with whole rows.")
        if standing:
            report.say(console, "No GPU: tensors have fewer rows; --shape sets them.")
