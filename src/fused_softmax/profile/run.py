"""Profiles one call of each provider under ncu, or without counters says why and finds out what it can."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from fused_softmax.bench.cases import Case
from fused_softmax.bench.catalog import OWN
from fused_softmax.bench.results.record import one_line
from fused_softmax.bench.show.report import say, show
from fused_softmax.core.files import TEXT
from fused_softmax.core.plan import Device
from fused_softmax.profile import command, parse, table
from fused_softmax.profile.parse import Kernel
from fused_softmax.profile.target import PROTON_CALLS, SCOPE

INTERPRETERS = ("FUSED_SOFTMAX_INTERPRET", "TRITON_INTERPRET")
SECONDS = 600  # for one run of a profiler; ncu runs the call some forty times


def arguments(case: Case) -> tuple[str, str, str]:
    """The case as command-line arguments of the processes."""
    shape = "x".join(map(str, case.shape)) + ("" if case.dim == -1 else f":{case.dim}")
    return case.operation, shape, case.dtype


def by_counters(case: Case, provider: str, program: str | None) -> tuple[list[Kernel], str]:
    """The kernels of one call, or the reason why there are none. program: ncu's path."""
    if program is None:
        return [], "ncu is not on PATH: it comes with the CUDA toolkit"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        target = command.target(sys.executable, arguments(case), provider)
        done = _run(command.ncu(program, str(log), target))
        text = log.read_text(**TEXT) if log.exists() else ""
    if isinstance(done, str):
        return [], done
    try:
        if kernels := parse.ncu(text):
            return kernels, ""
    except ValueError:
        pass
    said = done.stderr.strip().splitlines()
    return [], parse.problem(text + done.stdout, done.returncode) or (said[-1] if said else "ncu gave no table")


def by_proton(case: Case, provider: str) -> dict[str, tuple[float, float]]:
    """Each kernel's microseconds a launch and launches a call, by Triton's own profiler; {} if that fails."""
    with tempfile.TemporaryDirectory() as folder:
        name = Path(folder) / "call"
        done = _run(command.target(sys.executable, arguments(case), provider, "--proton", str(name)))
        path = name.with_suffix(".hatchet")
        if isinstance(done, str) or done.returncode or not path.exists():
            return {}
        try:
            found = parse.proton(path.read_text(encoding="utf-8"), SCOPE)
        except (ValueError, TypeError, AttributeError):
            return {}
    return {kernel: (us / count, count / PROTON_CALLS) for kernel, (us, count) in found.items()}


def by_binary(case: Case, device: Device) -> tuple[list[Kernel], str]:
    """This package's kernels for a case, compiled for a device, or the reason why they cannot be."""
    if device.backend != "cuda":
        return [], f"profile compiles kernels only for NVIDIA's GPUs, not for {device.name}"
    process = [sys.executable, "-m", "fused_softmax.profile.compiled", *arguments(case)]
    facts = dataclasses.asdict(replace(device, table=None)) | {"table": device.table and device.table.data()}
    done = _run(process, json.dumps(facts))
    if isinstance(done, str):
        return [], done
    kernels = [Kernel(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not kernels:
        said = done.stderr.strip().splitlines()
        return [], f"not compiled: {one_line(said[-1])}" if said else "nothing is launched for this case"
    return [replace(kernel, stalls=()) for kernel in kernels], ""


def profile(case: Case, provider: str, device: Device, *, gpu: bool) -> table.Profile:
    """Profile a provider's call by the best means available. gpu: the machine has the device."""
    kernels, why = by_counters(case, provider, shutil.which("ncu")) if gpu else ([], "there is no GPU")
    if kernels:
        return table.Profile(provider, "counters (ncu)", tuple(kernels))
    binaries, not_compiled = (
        by_binary(case, device) if provider == OWN else ([], "only this package's kernels are compiled")
    )
    times = by_proton(case, provider) if gpu else {}
    if times:
        known = {kernel.name: kernel for kernel in binaries}
        timed = tuple(
            replace(known.get(name, Kernel(name)), time_us=us)
            for name, (us, count) in times.items()
            for _ in range(max(1, round(count)))
        )
        how = "Proton's times" + (" and the binary" if known else "")
        return table.Profile(provider, how, timed, why)
    if binaries:
        return table.Profile(provider, f"the binary for {device.name}", tuple(binaries), why)
    return table.Profile(provider, "", (), f"{why}; {not_compiled}")


def print_table(
    case: Case, profiles: Sequence[table.Profile], floor_bytes: int, device: Device, console: Console, *, gpu: bool
) -> None:
    """Print a row for each fact and a column for each provider, why counters are missing, and what to look at."""
    where = f"on {device.name}" if gpu else f"compiled for the built-in {device.name}, as there is no GPU"
    say(console, f"{case} {where}; no call can move less than {table.size(floor_bytes)}")
    lines = table.rows(profiles, floor_bytes, device)
    if lines:
        grid = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
        for head in ("", *(each.provider for each in profiles)):
            grid.add_column(head, overflow="fold")
        for name, cells in lines:
            grid.add_row(name, *cells)
        show(console, grid)
    for each in profiles:
        if each.why:
            say(console, f"{each.provider}: no counters: {each.why}")
    for each in profiles:
        if sentence := table.advice(each, floor_bytes, device):
            say(console, f"{each.provider}: {sentence}")


def _run(arguments: Sequence[str], given: str = "") -> subprocess.CompletedProcess[str] | str:
    """The finished process, or why it did not finish. It never interprets, because the subject is a binary."""
    here = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    environment = {name: value for name, value in os.environ.items() if name not in INTERPRETERS}
    environment["PYTHONPATH"] = paths
    try:
        return subprocess.run(arguments, env=environment, input=given, capture_output=True, timeout=SECONDS, **TEXT)
    except subprocess.TimeoutExpired:
        return f"{Path(arguments[0]).name} took longer than {SECONDS} s"
    except OSError as error:
        return f"{Path(arguments[0]).name}: {error.strerror or error}"
