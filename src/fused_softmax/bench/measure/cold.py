"""First calls, each in a process of its own with an empty cache of kernels."""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from fused_softmax.bench.measure import run, saving
from fused_softmax.bench.results import record
from fused_softmax.bench.results.record import FirstCall, Run
from fused_softmax.bench.show import report
from fused_softmax.bench.show.progress import spinner
from fused_softmax.core import files
from fused_softmax.core.described import number_of

PROCESS = (sys.executable, "-m", "fused_softmax.bench.measure.first_call")


class Failed(RuntimeError):
    """First calls that have no figures, because their processes failed. The message says how."""


@dataclass(frozen=True)
class Asked:
    """What the arguments ask for. points: the names of the first calls. recorded: the options of the run.

    at_once: how many processes run at a time.
    """

    command: str
    points: Collection[str]
    at_once: int = 1
    recorded: dict[str, Any] = field(default_factory=dict)


def measured(
    asked: Asked, console: Console, progress: Console, out: Path | None, resume: bool
) -> tuple[Run, str, Path | None]:
    """As `run.measured`. Raises Failed, after what was measured is saved, where calls have no figures."""
    found = Run(run.environment() | machine(), asked.command)
    old = run.earlier_of(found, out) if resume and out else None
    kept = {each.name: each for each in old.first_calls} if old else {}
    report.print_head(found, console)
    if kept:
        report.say(console, f"{number_of(len(kept), 'first call is', 'first calls are')} kept from the earlier run.")
    failures: list[str] = []
    try:
        _measure(found, asked, kept, failures, out, progress)
    except KeyboardInterrupt:
        return found, run.INTERRUPTED, run.save(found, out)
    found.complete = not failures
    written = run.save(found, out)
    if failures:
        report.print_run(found, console)
        raise Failed("; ".join(failures))
    return found, "", written


def _measure(
    found: Run, asked: Asked, kept: dict[str, FirstCall], failures: list[str], out: Path | None, progress: Console
) -> None:
    """Measure into `found` what is not kept, and keep the partial file up to date."""
    names = asked.points
    left, start = [name for name in names if name not in kept], time.monotonic()
    found.first_calls = list(kept.values())
    with ThreadPoolExecutor(asked.at_once) as threads, progress.status("first calls", spinner=spinner(progress)):
        running = {threads.submit(_measured, name): name for name in left}
        try:
            for number, done in enumerate(as_completed(running), 1):
                name = running[done]
                try:
                    kept[name] = done.result()
                    line = f"{kept[name].seconds:.1f} s, {number_of(len(kept[name].kernels), 'kernel')}"
                except Failed as error:
                    line = f"failed: {error}"
                    failures.append(f"{name} {line}")
                others = [each for name, each in kept.items() if name not in names]
                found.first_calls = [*others, *(kept[each] for each in names if each in kept)]
                if out:
                    saving.save(found, record.partial_path(out))
                rest = (time.monotonic() - start) / number * (len(left) - number)
                note = f" ({report.duration(rest)} left)" if number < len(left) else ""
                progress.print(
                    f"{number}/{len(left)} {name}: {line}{note}", highlight=False, soft_wrap=True, markup=False
                )
        finally:
            threads.shutdown(cancel_futures=True)


def _measured(name: str) -> FirstCall:
    with tempfile.TemporaryDirectory(prefix="fused-softmax-") as folder:
        return measure(name, folder)


def measure(name: str, folder: str | os.PathLike[str], process: Sequence[str] = PROCESS) -> FirstCall:
    """The first calls of that name, made by a new process whose cache of kernels is `folder`. Raises Failed."""
    environment = os.environ | {"TRITON_CACHE_DIR": os.fspath(folder)}
    done = subprocess.run([*process, name], env=environment, capture_output=True, **files.TEXT)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise Failed(record.one_line(said[-1]))
    return record.first_call(json.loads(done.stdout.splitlines()[-1]))


def machine() -> dict[str, Any]:
    """What decides how long a compiler takes, beside versions."""
    return {"processor": _processor(), "cores": len(os.sched_getaffinity(0))}


def _processor() -> str | None:
    """Its model, where Linux names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(**files.TEXT).splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or None)
