"""Entries of the registry: the kernels of `classic`."""

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from fused_softmax.classic import hybrid, naive, online, persistent
from fused_softmax.classic.rows import value_dtype
from fused_softmax.trace.entries.kernel import Formula, Kernel, Run
from fused_softmax.trace.recorder.recorder import Recorder
from fused_softmax.trace.recorder.story import Story, Told

PROGRAMS = 2  # of persistent: fewer than most examples' rows, so that a program takes several


def _run(call: Callable[[Tensor, int], Any]) -> Run:
    def run(recorder: Recorder, x: Tensor, block: int) -> dict[str, Any]:
        recorder.memory.hold("x", x, "input")
        with recorder:
            call(x, block)
        return {}

    return run


def _tiled(x: Tensor, block: int) -> None:
    if x.shape[1] <= block:
        raise ValueError(
            f"hybrid-tiled takes rows longer than a block, but {x.shape[1]} columns are not longer than {block}; "
            "take a smaller block, or hybrid-fast"
        )
    hybrid.hybrid_softmax(x, block_cap=block)


def _online(x: Tensor, block: int) -> None:
    """online_softmax with a block of any size. Its own configurations begin at 1024 columns."""
    y = torch.empty_like(x)
    options = {"VALUE": value_dtype(x), "BLOCK_SIZE": block, "VEC": 1}
    online._forward[(x.shape[0],)](x, y, x.stride(0), y.stride(0), x.shape[1], **options)


def _story(told: Told) -> Story:
    return Story({"_forward": told}, roles={"y_ptr": "output"})


CLASSIC = (
    Kernel(
        name="naive",
        title="five passes in torch",
        summary="softmax in torch's own operations: maximum, subtraction, exponential, sum, division. Each is a "
        "separate kernel, and every intermediate goes out to memory and comes back.",
        operation="softmax",
        run=_run(lambda x, block: naive.naive_softmax(x)),
        formula=Formula(5, 3, 2, 2),
        story=Story(
            {
                "naive_softmax": Told(
                    {
                        "maximum": "m = x.amax",
                        "subtract": "shifted =",
                        "exponential": "e = torch.exp",
                        "sum": "s = e.sum",
                        "divide": "return e /",
                    },
                    notes={
                        "m = x.amax": "Reads the matrix and writes one number for each row.",
                        "shifted =": "Reads the matrix and the maxima, and writes a whole matrix to memory.",
                        "e = torch.exp": "Reads that matrix back and writes another.",
                        "s = e.sum": "Reads the second matrix and writes one number for each row.",
                        "return e /": "Reads the second matrix again, with the sums, and writes the result.",
                    },
                )
            }
        ),
        block=False,
        watch=naive.naive_softmax,
    ),
    Kernel(
        name="persistent",
        title="programs that walk the rows",
        summary="A few programs stay on the chip. Each takes one whole row after another and holds it in registers, "
        "from its only read to its only write.",
        operation="softmax",
        run=_run(lambda x, block: persistent.persistent_softmax(x, programs=PROGRAMS)),
        formula=Formula(1, 1),
        story=_story(
            Told(
                {
                    "next row": "cols = tl.arange",
                    "load": "x = tl.load",
                    "maximum": "e = tl.exp",
                    "sum": "y = e /",
                    "output": "tl.store",
                },
                row="each",
                m=("max()",),
                s=("sum()",),
                notes={"for each in": "The program takes its next row."},
            )
        ),
        block=False,
    ),
    Kernel(
        name="hybrid-fast",
        title="a row in one block",
        summary="The fast path, for a row that fits in one block. One program reads it once, holds it in registers for "
        "the maximum, the exponentials and the sum, and writes it once.",
        operation="softmax",
        run=_run(lambda x, block: hybrid.hybrid_softmax(x, block_cap=triton.next_power_of_2(x.shape[1]))),
        formula=Formula(1, 1),
        story=_story(
            Told(
                {
                    "find the row": "row = tl.program_id",
                    "load": "in_row =",
                    "maximum": "e = tl.exp",
                    "sum": "s = tl.sum",
                    "output": "tl.store",
                },
                m=("max()",),
            )
        ),
        block=False,
    ),
    Kernel(
        name="hybrid-tiled",
        title="three passes over tiles",
        summary="The tiled path, for a row that is longer than a block. A program goes over it tile by tile three "
        "times: for the maximum, for the sum of exponentials and for the output.",
        operation="softmax",
        run=_run(_tiled),
        formula=Formula(3, 1),
        story=_story(
            Told(
                {
                    "find the row": "row = tl.program_id",
                    "maximum": "m = tl.full",
                    "sum": "total = tl.zeros",
                    "output": ("s = total", "for start in"),
                },
                s=("s", "total"),
                notes={"s = total": "The maximum and sum are known. The row is read a third time to write the output."},
            )
        ),
    ),
    Kernel(
        name="online",
        title="maximum and sum in one pass",
        summary="The online recurrence. One pass keeps a running maximum m and a running sum s. When a tile raises the "
        "maximum to m', it rescales s by exp(m - m'). A second pass writes the output.",
        operation="softmax",
        run=_run(_online),
        formula=Formula(2, 1),
        story=_story(
            Told(
                {"find the row": "row = tl.program_id", "maximum and sum": "m = tl.full", "output": "scale ="},
                notes={
                    "origin =": "While every value so far is -inf, a finite origin gives exact zeros. "
                    "-inf would give NaN.",
                    "scale =": "One pass has found the maximum and sum. The row is read again to write the output.",
                    "s = s *": "The old sum is multiplied by exp(m - origin), then the tile's terms are added.",
                },
            )
        ),
    ),
)
