"""Makes recordings in this process, which must interpret Triton's kernels."""

from typing import Any

import torch
import triton

from fused_softmax.trace import results
from fused_softmax.trace.asked import Asked
from fused_softmax.trace.entries.catalogue import kernels
from fused_softmax.trace.recorder.encode import dtype_name
from fused_softmax.trace.recorder.passes import Passes
from fused_softmax.trace.recorder.recorder import Recorder

SCHEMA = 1


def kernel(asked: Asked, title: str | None = None) -> dict[str, Any]:
    """The recording of a kernel of the registry."""
    entry = kernels()[asked.kernel]
    recorder: Any = Recorder(entry.story, merge=entry.merge)
    if entry.watch is not None:
        recorder = Passes(entry.story, entry.watch)
    facts = entry.run(recorder, asked.x.clone(), asked.block)
    n_rows, n_cols = asked.x.shape
    options = {"dtype": dtype_name(asked.x.dtype)} | ({"block": asked.block} if entry.block else {}) | facts
    where = f"{n_rows} x {n_cols}" + (f", blocks of {asked.block}" if entry.block else "")
    return (
        heading(title or f"{entry.name}: {entry.title}, {where}", entry.name, entry.operation, entry.summary, options)
        | content(recorder)
        | {"rows": results.rows(entry.operation, recorder, asked.x)}
        | {"traffic": results.traffic(recorder) | {"formula": str(entry.formula)}}
    )


def heading(title: str, name: str, operation: str, summary: str, options: dict[str, Any]) -> dict[str, Any]:
    """The first fields of a recording."""
    return {
        "schema": SCHEMA,
        "title": title,
        "kernel": name,
        "operation": operation,
        "summary": summary,
        "environment": environment(),
        "options": options,
    }


def content(recorder: Any) -> dict[str, Any]:
    """The recorded fields."""
    return {
        "sources": [source.entry() for source in recorder.sources],
        "tensors": [held.entry() for held in recorder.memory.tensors],
        "phases": recorder.phases,
        "launches": recorder.launches,
        "frames": recorder.frames,
        "steps": recorder.steps,
    }


def environment() -> dict[str, str]:
    """The versions of this package, Triton and torch."""
    from fused_softmax import __version__

    return {"fused_softmax": __version__, "triton": triton.__version__, "torch": str(torch.__version__).split("+")[0]}
