"""The table of first calls, which the terminal, the report and the page of results show. Standard library only."""

from collections.abc import Sequence
from typing import NamedTuple

from fused_softmax.bench.entries.first_calls import CALLS
from fused_softmax.bench.results.record import FirstCall

TITLE = "First calls of a new process whose cache of kernels is empty"
ABOUT = (
    "Seconds until the GPU is idle, with all that the calls compile, build and load. They leave out imports and CUDA's "
    "context. The compiler's seconds are the sum over the kernels compiled; the columns after it are its stages. C "
    "modules are Triton's one and this package's two, which are built at the same time. The rest is the seconds less "
    "the compiler's: loading, waiting for C modules, and the work itself."
)


class Table(NamedTuple):
    heads: list[str]
    rows: list[list[str]]


def table(first_calls: Sequence[FirstCall]) -> Table:
    """A row for each process, and one for all together if there are several. The outer columns are words."""
    stages = list(dict.fromkeys(stage for each in first_calls for stage in each.stages))
    heads = ["first call", "calls", "seconds", "slowest call", "kernels", "compiler", *stages, "C modules", "rest"]
    rows = [[about(each.name), *_cells([each], stages), _slowest(each)] for each in first_calls]
    if first_calls[1:]:
        rows.append(["all", *_cells(first_calls, stages), ""])
    return Table([*heads, "slowest kernel"], rows)


def about(name: str) -> str:
    return CALLS[name].about if name in CALLS else name


def _cells(of: Sequence[FirstCall], stages: Sequence[str]) -> list[str]:
    kernels = [kernel for each in of for kernel in each.kernels]
    calls = [seconds for each in of for seconds in each.call_s]
    compiler = sum(kernel.seconds for kernel in kernels)
    modules = sum(seconds for each in of for seconds in each.module_s)
    by_stage = (sum(kernel.stages.get(stage, 0.0) for kernel in kernels) for stage in stages)
    times = (f"{seconds:.2f}" for seconds in (compiler, *by_stage, modules, sum(calls) - compiler))
    return [str(len(calls)), f"{sum(calls):.2f}", f"{max(calls):.2f}", str(len(kernels)), *times]


def _slowest(of: FirstCall) -> str:
    slowest = max(of.kernels, key=lambda kernel: kernel.seconds, default=None)
    return f"{slowest.name} {slowest.seconds:.2f}" if slowest else ""


def apart(first_calls: Sequence[FirstCall]) -> str:
    """What is no part of the calls' seconds, in words."""
    spans = [
        sorted({f"{each:.1f}" for each in seconds}, key=float)
        for seconds in ([each.import_s for each in first_calls], [each.context_s for each in first_calls])
    ]
    imports, context = (" to ".join(dict.fromkeys((span[0], span[-1]))) + " s" for span in spans)
    return f"Before its first call, a process took {imports} to import, and {context} to make CUDA's context."
