"""A run, from its options to its files: the loop over cases, progress on stderr, the table on stdout."""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fused_softmax.bench.cases import Case
from fused_softmax.bench.catalog import TORCH, provider_names
from fused_softmax.bench.measure import measure, saving, sweeps
from fused_softmax.bench.measure.timing import ContextLost
from fused_softmax.bench.measure.verify import verify
from fused_softmax.bench.results import record
from fused_softmax.bench.results.record import CannotResume, Held, Point, Run, earlier, mismatch
from fused_softmax.bench.show import report
from fused_softmax.bench.show.plot import plot as draw
from fused_softmax.bench.show.progress import busy, spinner
from fused_softmax.bench.show.summary import machine_of
from fused_softmax.core.described import number_of
from fused_softmax.core.device import device_of

# Elements of a tensor of a sweep's own shapes on a CPU. Shapes that the user gives are measured as they are.
CPU_ELEMENTS = 2**20
INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Asked:
    """A measurement as its arguments ask for it.

    chosen: the cases. names: the providers, or none for all of them. reps: rounds, if not as many as `quick` says.
    standing: the user gave no shapes, so a machine without a GPU measures smaller ones.
    """

    command: str
    chosen: Sequence[Case]
    names: Sequence[str] = ()
    standing: bool = False
    quick: bool = False
    verify_only: bool = False
    reps: int | None = None
    seed: int = 0

    @property
    def operations(self) -> list[str]:
        return list(dict.fromkeys(case.operation for case in self.chosen))

    @property
    def providers(self) -> Sequence[str]:
        return self.names or provider_names(self.operations)

    def providers_on(self, gpu: bool) -> Sequence[str]:
        """Those that are measured: without a GPU torch, which all computes by there, unless the user named others."""
        return self.providers if gpu or self.names or self.verify_only else (TORCH,)

    @property
    def effort(self) -> measure.Effort:
        rounds, budget_ms = (2, 12) if self.quick else (3, 25)
        return measure.Effort(self.reps or rounds, budget_ms, self.seed, not self.verify_only, bool(self.names))

    @property
    def recorded(self) -> dict[str, Any]:
        """The options of the run."""
        return self.effort.recorded()

    @property
    def points(self) -> set[tuple[Case, str]]:
        """The cases and providers of the points that a GPU's run has."""
        return {(case, name) for case in self.chosen for name in measure.known(case, self.providers)}


def bench(
    asked: Asked,
    console: Console,
    progress: Console,
    *,
    out: Path | None,
    plot: Path | None,
    resume: bool = False,
    beside: Run | None = None,
) -> int:
    """Measure, print, save. The exit code: 1 if one is wrong, ours fails or nothing is measured, 130 if interrupted.

    beside: an earlier run, whose figures the plot has below those of this one.
    Raises CannotResume, before anything is measured, for a file that cannot be continued, and NotSaved, after what was
    measured is printed, for a file that cannot be written.
    """
    try:
        run, stopped, written = measured(asked, console, progress, out, resume)
    except saving.NotSaved as error:
        if error.run:
            report.print_run(error.run, console)
        raise
    report.print_run(run, console)
    if plot and (stopped or not any(point.status == "ok" for point in run.points)):
        plot = None
        report.say(console, "no plot: the run stopped early" if stopped else "no plot: nothing was timed")
    elif plot:
        with busy("drawing"):
            draw(run, plot, beside)
    report.print_end(run, console, stopped, [path for path in (written, plot) if path])
    if plot and beside:
        report.say(console, f"{plot.name} has this run at the top, and figures of {machine_of(beside)} below.")
    report.say_if_nothing(run, progress, stopped)
    return exit_code(run, stopped)


def measured(
    asked: Asked, console: Console, progress: Console, out: Path | None, resume: bool
) -> tuple[Run, str, Path | None]:
    """Measure and save. The run, why it ended early or "", and the file with its points.

    resume: keep the points of `out`, or of the partial file that an interrupted run left beside it.
    Raises CannotResume, before anything is measured, for a file that cannot be continued, and NotSaved for a file that
    cannot be written: at once, for nothing that is measured later could be kept either.
    """
    gpu, chosen = measure.on_gpu(), asked.chosen
    run = Run(environment(), asked.command, options=asked.recorded)
    old = earlier_of(run, out) if resume and out else None
    held = Held(old.points if old else ())
    providers = asked.providers_on(gpu)
    report.print_head(run, console)
    if not gpu:
        report.print_who_computes(console, providers, timed=not asked.verify_only)
    if not gpu and asked.standing:
        chosen = sweeps.cut(chosen, CPU_ELEMENTS)
        note = (
            f"No GPU: tensors have fewer rows, {CPU_ELEMENTS // 2**20} Mi elements each; --shape or --rows sets them."
        )
        report.say(console, note)
    if held.points:
        report.say(console, f"{number_of(len(held.points), 'point is', 'points are')} kept from the earlier run.")
    stopped = run_cases(run, chosen, providers, asked.effort, out, progress, held)
    if not gpu and not stopped and asked.verify_only:
        stopped = check_kernels(run, asked, progress)
    run.complete = not stopped
    return run, stopped, save(run, out)


def earlier_of(run: Run, out: Path) -> Run | None:
    """The run that this one continues. CannotResume if its source, machine or effort differs from this run's."""
    old = earlier(out)
    if old is None:
        return None
    if difference := mismatch(old, run):
        raise CannotResume(f"cannot resume {out.name}: {difference}. Give another --out, or leave out --resume")
    if old.command != run.command:
        run.command = f"{old.command} && {run.command}"
    return old


def run_cases(
    run: Run,
    chosen: Sequence[Case],
    names: Sequence[str],
    effort: measure.Effort,
    out: Path | None,
    console: Console,
    held: Held,
) -> str:
    """Measure into `run`, and keep the partial file up to date. Returns why it ended early, or ""."""
    left = [(case, missing) for case in chosen if (missing := held.missing(case, measure.known(case, names)))]
    measured: list[Point] = []
    run.points = held.merged(measured)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    start = time.monotonic()
    with Progress(*columns, *times, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(left))
        try:
            for number, (case, missing) in enumerate(left, 1):
                progress.update(task, description=str(case))
                try:
                    points = measure.measure(case, missing, effort)
                except ContextLost as error:
                    skipped = [measure.point(case, name, "skipped", str(error)) for name in missing]
                    run.points = held.merged([*measured, *skipped])
                    return str(error)
                measured += points
                run.points = held.merged(measured)
                if out:
                    saving.save(run, record.partial_path(out))
                progress.advance(task)
                if not console.is_terminal:
                    line = ", ".join(f"{point.provider} {report.cell(point)}" for point in points)
                    rest = (time.monotonic() - start) / number * (len(left) - number)
                    note = f" ({report.duration(rest)} left)" if number < len(left) else ""
                    console.print(f"{number}/{len(left)} {case}: {line}{note}", highlight=False, soft_wrap=True)
        except KeyboardInterrupt:
            return INTERRUPTED
    return ""


def check_kernels(run: Run, asked: Asked, console: Console) -> str:
    try:
        with console.status("kernels under Triton's interpreter", spinner=spinner(console)):
            for check in verify(asked.operations, asked.names):
                run.checks.append(check)
    except KeyboardInterrupt:
        return INTERRUPTED
    return ""


def save(run: Run, out: Path | None) -> Path | None:
    """Write a finished run to its file. A run that stopped early goes beside it, and the earlier file stays."""
    if out is None:
        return None
    partial = record.partial_path(out)
    if not run.complete:
        saving.save(run, partial)
        return partial
    saving.save(run, out)
    partial.unlink(missing_ok=True)
    return out


def exit_code(run: Run, stopped: str) -> int:
    if stopped:
        return 130 if stopped == INTERRUPTED else 1
    failed = record.failures(run) or any(check.status in ("wrong", "failed") for check in run.checks)
    return int(bool(failed) or record.found_nothing(run))


def environment() -> dict[str, Any]:
    """What results are recorded with."""
    with busy("reading the environment"):
        return record.environment(*gpu_facts())


def gpu_facts() -> tuple[dict[str, Any] | None, str | None]:
    """Facts of the GPU from torch, and the id that nvidia-smi knows it by (not recorded)."""
    if not torch.cuda.is_available():
        return None, None
    properties = torch.cuda.get_device_properties(0)
    facts = {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "sm_count": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
    }
    if table := device_of(0).table:  # a table replaces the built-in plans
        facts["plans"] = hashlib.sha256(repr(table).encode()).hexdigest()[:12]
    return facts, str(getattr(properties, "uuid", "")) or None
