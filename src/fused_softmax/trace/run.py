"""Makes recordings in this process, which must interpret Triton's kernels."""

import math
from typing import Any

import torch
import triton
from torch import Tensor

from fused_softmax.trace.asked import Asked
from fused_softmax.trace.entries.kernel import kernels
from fused_softmax.trace.recorder.encode import dtype_name, number, tensor_numbers
from fused_softmax.trace.recorder.passes import Passes
from fused_softmax.trace.recorder.recorded import Recorded
from fused_softmax.trace.recorder.recorder import Recorder

SCHEMA = 1


def kernel(asked: Asked, title: str | None = None, late: frozenset[int] = frozenset()) -> dict[str, Any]:
    """The recording of a kernel of the registry. late: programs that start when all others have ended."""
    entry = kernels()[asked.kernel]
    recorder: Any = Passes(entry.story, entry.watch) if entry.watch else Recorder(entry.story, late)
    facts = entry.run(recorder, asked.x.clone(), asked.block)
    n_rows, n_cols = asked.x.shape
    options: dict[str, Any] = (
        {"dtype": dtype_name(asked.x.dtype)} | ({"block": asked.block} if entry.block else {}) | facts
    )
    options |= {"late": [*late]} if late else {}
    where = f"{n_rows} x {n_cols}" + (f", blocks of {asked.block}" if entry.block else "")
    title = title or f"{entry.name}: {entry.title}, {where}"
    made = recording(
        recorder, title, entry.name, entry.operation, entry.summary, options, asked.x if entry.of_rows else None
    )
    if not late:  # what others do in its place is no part of a kernel's formula
        made["traffic"]["formula"] = str(entry.formula)
    return made


def recording(
    recorder: Recorded,
    title: str,
    name: str,
    operation: str,
    summary: str,
    options: dict[str, Any],
    x: Tensor | None,
) -> dict[str, Any]:
    """All that was recorded. x: the matrix [n_rows, n_cols], whose rows are summed up; None if it has no such rows."""
    from fused_softmax import __version__

    return {
        "schema": SCHEMA,
        "title": title,
        "kernel": name,
        "operation": operation,
        "summary": summary,
        "environment": {
            "fused_softmax": __version__,
            "triton": triton.__version__,
            "torch": torch.__version__.partition("+")[0],
        },
        "options": options,
        "sources": [source.entry() for source in recorder.sources],
        "tensors": [held.entry() for held in recorder.memory.tensors],
        "phases": recorder.phases,
        "launches": recorder.launches,
        "frames": recorder.frames,
        "steps": recorder.steps,
        "rows": [] if x is None else _rows(operation, recorder, x),
        "traffic": _traffic(recorder),
    }


def _traffic(recorder: Recorded) -> dict[str, Any]:
    """Elements moved, counted once for each access. Slots and states, which programs exchange, count apart."""
    moved = dict.fromkeys(("reads", "writes", "scratch_reads", "scratch_writes", "floor_reads", "floor_writes"), 0)
    passes = 0
    for at, held in enumerate(recorder.memory.tensors):
        apart = "scratch_" if held.role == "scratch" and not recorder.counts_scratch else ""
        for kind, counts, floor in (("reads", recorder.reads, "input"), ("writes", recorder.writes, "output")):
            if at in counts:
                moved[apart + kind] += int(counts[at].sum())
                moved[f"floor_{kind}"] += int((counts[at] > 0).sum()) if held.role == floor else 0
        if held.role == "input" and at in recorder.reads:
            passes = max(passes, int(recorder.reads[at].max()))
    passes = len(recorder.launches) if recorder.counts_scratch else passes
    return {name: n for name, n in moved.items() if n or "scratch" not in name} | {"passes": passes}


def _rows(operation: str, recorder: Recorded, x: Tensor) -> list[dict[str, Any]]:
    """For each row of softmax of x [n_rows, n_cols] or of its gradient: the kernel's final state, facts of the
    probabilities, and the row's status. Entropy is in nats.

    Of causal attention, x is [tokens, ...], and the rows are those of its scores, in powers of 2.
    """
    y = next((held.view for held in recorder.memory.tensors if held.role == "output"), x)
    if operation == "attention":
        scores = recorder.memory.tensors[0].view.double() * math.log(2)
        x = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -float("inf"))
    p = y.double() if operation == "softmax" else torch.softmax(x.double(), dim=1)
    entropy = -(p * torch.where(p > 0, p.log(), 0.0)).sum(1)
    found = []
    for row in range(x.shape[0]):
        state = recorder.states.get(row, {})
        entry: dict[str, Any] = {"row": row}
        entry |= {name: state[letter] for name, letter in (("max", "m"), ("sum", "s")) if letter in state}
        if operation == "softmax_backward":
            entry["gradient_sum"] = _rounded(y[row].double().sum())
        empty, lost = bool((x[row] == -float("inf")).all()), bool(y[row].isnan().any())
        shown = y[row] if operation == "softmax" else p[row].to(x.dtype)
        entry |= {
            "probability_sum": _rounded(p[row].sum()),
            "status": "empty" if empty else "nan" if lost else "ok",
            "min_probability": tensor_numbers(shown.amin())[0],
            "max_probability": tensor_numbers(shown.amax())[0],
            "entropy": _rounded(entropy[row]),
        }
        found.append(entry)
    return found


def _rounded(value: Tensor) -> Any:
    """A number of seven digits; a sum in float32 has no more."""
    return number(float(f"{value.item():.7g}"), "float64")
