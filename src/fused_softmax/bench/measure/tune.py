"""Tunes plans for this GPU: times every strategy's choices at widths that matter, and makes ladders of the best.

For each width it first times the warps of a row and the parts of a split. Where both can hold a row, the faster one
decides where the row ladder ends. Then it times how far ahead to prefetch. A width keeps the planner's own choice
unless another beats it by MARGIN.
"""

import gc
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fused_softmax.bench.cases import Case
from fused_softmax.bench.entries.makers import Call
from fused_softmax.bench.entries.operations import operation_of
from fused_softmax.bench.measure import check, measure
from fused_softmax.bench.measure.check import Judge
from fused_softmax.bench.measure.timing import Entrant, GraphTimer, best_of, figure, require_context, rotation
from fused_softmax.core.described import number_of
from fused_softmax.core.plan import (
    HELD_BYTES,
    TUNABLE,
    UNBOUNDED,
    Device,
    Ladder,
    RowPlan,
    Strategy,
    Table,
    built_in,
    candidate,
    most_parts,
    plan_rows,
    table_of,
)
from fused_softmax.ops.softmax.calls import backward_by_plan, forward_by_plan

WIDTHS = tuple(step * 2**power for power in range(9, 19) for step in (2, 3))[:-1]  # 1024, 1536, 2048, ... 524288
ELEMENTS = 128 * 2**20
ROUNDS, BUDGET_MS = 3, 12  # of each plan at a width
MARGIN = 0.01  # below this a change of plan is noise
PREFETCHES = (0, 4 << 20, 8 << 20, 12 << 20, 16 << 20)
OPERATIONS = {"softmax": 1, "softmax_backward": 2}


@dataclass(frozen=True)
class Trial:
    """A plan at a width, its median and its ratio to the ceiling. own: the planner chooses it without a table."""

    plan: RowPlan
    us: float
    ratio: float
    own: bool = False

    @property
    def choice(self) -> tuple[Any, ...]:
        """The part of the plan that a ladder holds."""
        parts = (self.plan.part_cols,) if self.plan.strategy == "split" else ()
        return self.plan.strategy, *parts, self.plan.num_warps


class Interrupted(KeyboardInterrupt):
    """Ctrl-C. table: the ladders of the operations and dtypes that were measured whole."""

    def __init__(self, table: Table):
        super().__init__()
        self.table = table


def candidates(n_rows: int, n_cols: int, itemsize: int, inputs: int, device: Device) -> list[RowPlan]:
    """Every row and split plan that a table may hold for these rows, with the planner's prefetch distance."""
    found = []
    for strategy, part_cols, num_warps in _choices():
        held = (part_cols or n_cols) * itemsize * inputs
        if not 32 * num_warps * 16 <= 2 * held or held > 32 * num_warps * HELD_BYTES:
            continue  # too few bytes for the warps, or too many
        choices: dict[str, Any] = {"num_warps": num_warps} | ({"part_cols": part_cols} if part_cols else {})
        try:
            plan = candidate(strategy, n_rows, n_cols, itemsize, device, inputs=inputs, **choices)
        except ValueError:
            continue
        if strategy == "row" or 1 < plan.parts <= most_parts(plan, device):
            found.append(plan)
    return found


def _choices() -> Iterable[tuple[Strategy, int, int]]:
    for num_warps in (1, 2, 4, 8, 16, 32):
        yield "row", 0, num_warps
    for part_cols in (2048, 4096, 8192, 16384):
        for num_warps in (4, 8):
            yield "split", part_cols, num_warps


def best(trials: Sequence[Trial]) -> Trial:
    """The fastest plan, or the planner's own if that is slower by no more than MARGIN."""
    fastest = min(trials, key=lambda trial: trial.us)
    own = next((trial for trial in trials if trial.own), fastest)
    return own if own.us <= fastest.us * (1 + MARGIN) else fastest


def ladders(winners: Sequence[Trial], inputs: int, itemsize: int) -> dict[tuple[str, int, int], Ladder]:
    """Ladders that hold the winners, in order of their widths. Neighbours with the same choice share a rung.

    The row ladder ends before the first width that split won; all longer rows are split.
    """
    ordered = sorted(winners, key=lambda trial: trial.plan.n_cols)
    rows: list[Trial] = []
    splits: list[Trial] = []
    for trial in ordered:
        (rows if trial.plan.strategy == "row" and not splits else splits).append(trial)
    found = {}
    if rows:
        rungs = _merged([(trial.plan.n_cols, trial.plan.num_warps) for trial in rows])
        found["row_warps", inputs, itemsize] = Ladder(*rungs, note=_note(rows))
    splits = [trial for trial in splits if trial.plan.strategy == "split"]
    if splits:
        # Rows longer than any measured may need parts as long as the built-in ones for the chip to hold them.
        last = next(ladder[-1] for key, ladder in built_in(inputs, itemsize).ladders if key[0] == "split_parts")
        rungs = _merged([*((each.plan.n_cols, *_asked(each.plan)) for each in splits), last])
        found["split_parts", inputs, itemsize] = Ladder(*rungs, note=_note(splits))
    return found


def _asked(plan: RowPlan) -> tuple[int, int]:
    """The columns of a part (a power of two) and the warps that lead to this plan."""
    return 1 << (plan.part_cols - 1).bit_length(), plan.num_warps


def prefetch_ladder(winners: Sequence[tuple[int, int, float]], itemsize: int) -> Ladder:
    """The prefetch ladder. winners: (columns, bytes ahead, ratio), in order of columns."""
    rungs = _merged([(n_cols * itemsize, ahead) for n_cols, ahead, _ in winners])
    note = ", ".join(f"{n_cols} {ratio:.2f}" for n_cols, _, ratio in _few(winners))
    return Ladder(*rungs[:-1], (UNBOUNDED, *rungs[-1][1:]), note=f"tuned: {note}")


def _merged(rungs: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The rungs with each run of equal choices replaced by its last rung."""
    return [rung for i, rung in enumerate(rungs) if i + 1 == len(rungs) or rungs[i + 1][1:] != rung[1:]]


def _note(trials: Sequence[Trial]) -> str:
    return "tuned: " + ", ".join(f"{trial.plan.n_cols} {trial.ratio:.2f}" for trial in _few(trials))


def _few(found: Sequence[Any]) -> list[Any]:
    """The first, the last and two in between."""
    return [found[i] for i in sorted({0, len(found) // 3, 2 * len(found) // 3, len(found) - 1})]


def source(table: Table) -> str:
    """The ladders as source for core/plan/ladders.py."""

    def text(rung: tuple[int, ...]) -> str:
        return f"({', '.join('2**62' if size == UNBOUNDED else str(size) for size in rung)})"

    return "\n".join(
        f"# {name}: {', '.join(TUNABLE[name])}\n({inputs}, {itemsize}): "
        f"Ladder({', '.join(map(text, ladder))}, note={ladder.note!r}),"
        for (name, inputs, itemsize), ladder in table.ladders
    )


def time_plans(case: Case, plans: Sequence[RowPlan], device: Device) -> list[Trial]:
    """Compare each plan with float64, then time the right ones in turns, beside the ceilings."""
    operation = operation_of(case)
    floor = operation.floor_bytes(case)
    buffers = rotation(floor, device.l2_bytes)
    gc.collect()
    torch.cuda.empty_cache()
    if measure.too_large(case, buffers):
        return []
    sets = check.inputs(case, buffers, "cuda", 0)
    timer, judge = GraphTimer(floor, sets), Judge(case, sets[-1])
    right = partial(judge.complaint, limits=judge.allowed(own=True))
    built_in = replace(device, table=None)
    own = plan_rows(case.n_rows, case.n_cols, case.itemsize, built_in, inputs=OPERATIONS[case.operation])
    entrants: dict[str, tuple[Entrant, RowPlan]] = {}
    for plan in dict.fromkeys([*plans, own]):
        entrant = Entrant(str(plan), _call(plan))
        try:
            if not timer.prepare(entrant, right):
                entrants[entrant.name] = entrant, plan
        except Exception:
            require_context(entrant.name, sets[0])
    if not entrants:
        return []
    ceilings = timer.ceilings(operation.ceilings(case))
    timer.rounds([*(entrant for entrant, _ in entrants.values()), *ceilings], ROUNDS, BUDGET_MS)
    top = best_of(ceilings).gb_per_s
    found = []
    for entrant, plan in entrants.values():
        speed = figure(floor, entrant.samples)
        found.append(Trial(plan, speed.p50_us, speed.gb_per_s / top, plan == own))
    return found


def _call(plan: RowPlan) -> Call:
    if plan.inputs == 1:
        return lambda x: forward_by_plan(x, plan)
    return lambda dy, y: backward_by_plan(dy, y, torch.empty_like(y), plan)


def tune(
    device: Device,
    operations: Sequence[str],
    dtypes: Sequence[str],
    widths: Sequence[int],
    elements: int,
    say: Callable[[str], object],
    timed: Callable[[Case, Sequence[RowPlan], Device], list[Trial]] = time_plans,
) -> Table:
    """The table of the fastest plans. timed: measures plans for a case and leaves out wrong and refused ones.

    Raises Interrupted for Ctrl-C.
    """
    found: dict[tuple[str, int, int], Ladder] = {}
    try:
        for operation in operations:
            inputs = OPERATIONS[operation]
            for dtype in dtypes:
                winners, fetched = [], []
                for n_cols in sorted(widths):
                    case = Case((max(1, math.ceil(elements / n_cols)), n_cols), dtype, operation)
                    trials = timed(case, candidates(case.n_rows, n_cols, case.itemsize, inputs, device), device)
                    if not trials:
                        say(f"{case}: no plan could be timed: all were wrong, refused or too large")
                        continue
                    winner = best(trials)
                    winners.append(winner)
                    own = next((trial for trial in trials if trial.own), None)
                    was = f", the planner's own {own.ratio:.3f}" if own and own is not winner else ""
                    of = number_of(len(trials), "plan")
                    say(f"{case}: {' '.join(map(str, winner.choice))} {winner.ratio:.3f}{was}, of {of}")
                    aheads = timed(case, [_ahead(winner.plan, ahead) for ahead in PREFETCHES], device)
                    if aheads:
                        farthest = min(aheads, key=lambda trial: trial.us)
                        fetched.append((n_cols, _ahead_bytes(farthest.plan), farthest.ratio))
                if winners:
                    found |= ladders(winners, inputs, Case((1, 1), dtype).itemsize)
                if fetched:
                    itemsize = Case((1, 1), dtype).itemsize
                    found["prefetch_bytes", inputs, itemsize] = prefetch_ladder(fetched, itemsize)
    except KeyboardInterrupt:
        raise Interrupted(table_of(Table(tuple(found.items())).data())) from None
    return table_of(Table(tuple(found.items())).data())


def _program_bytes(plan: RowPlan) -> int:
    return plan.block_rows * plan.part_cols * plan.itemsize * plan.inputs


def _ahead(plan: RowPlan, ahead: int) -> RowPlan:
    prefetch = ahead // _program_bytes(plan)
    return replace(plan, prefetch=prefetch if prefetch < plan.programs else 0)


def _ahead_bytes(plan: RowPlan) -> int:
    """The entry of PREFETCHES that made this plan."""
    return next(ahead for ahead in PREFETCHES if _ahead(plan, ahead).prefetch == plan.prefetch)
