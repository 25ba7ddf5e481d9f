"""Recordings of kernels: what they really read, hold and write, line by line, under Triton's interpreter.

    from fused_softmax import trace

    recording = trace.record("hybrid-tiled", [[2.0, -1.0, 3.0, 0.5], [4.0, -3.0, "-inf", 1.0]], block=2)
    recording["rows"][0]["max"]   # 3.0, as the kernel held it
    trace.show("online", x)       # a page that steps through it, in a notebook

Kernels of the registry (`kernels()`) are recorded by name, any other `@triton.jit` kernel by a launch:

    recording = trace.record_kernel(my_kernel)[(n_rows,)](x, y, x.stride(0), n_cols, BLOCK_COLS=4)

A recording is a dict that JSON holds, of schema 1 (`schema()`, trace/schema.json, which describes every field):

    sources, tensors, phases    the text of each function; each tensor before and after; names of what goes on
    launches, frames            each launch with its grid; each call of a kernel or of one of its functions, by program
    steps                       each statement that was run: `frame`, `line`, `phase`, the `rows` and `cols` it
                                concerns, what it `set`, `computed` on its way, `loads`, `stores`, the `state` (m, s)
                                known of its rows after it, a `message` between programs of one row, a `note`
    rows, traffic               of each row of the result: maximum, sum, status, entropy; elements moved, and their
                                floor

Numbers are those that the kernel held: floats are the shortest decimals that read back to the same value of their
dtype, or "inf", "-inf" and "nan" (`read_number` reads them); integers past 2**53 are text. Elements are counted in a
tensor's logical order, row after row. Fields may be added to a schema, and readers ignore what they do not know.

One process cannot both interpret and compile kernels, for Triton's flag is read once. Where this one does not
interpret, recordings are made in a worker, which is started once and kept.
"""

import atexit
import json
from functools import cache
from pathlib import Path
from typing import Any

from fused_softmax.trace import asked as _asked
from fused_softmax.trace import custom as _custom
from fused_softmax.trace import run as _run
from fused_softmax.trace.encode import read_number
from fused_softmax.trace.hooks import interpreting
from fused_softmax.trace.memory import RecordingError
from fused_softmax.trace.page import Page
from fused_softmax.trace.registry import Kernel, kernels
from fused_softmax.trace.worker import Late, Worker

__all__ = [
    "Kernel", "Late", "Page", "RecordingError", "kernels", "read_number", "record", "record_kernel", "schema", "show",
]  # fmt: skip


def record(
    kernel: str, matrix: Any, *, block: int | None = None, dtype: Any = None, title: str | None = None
) -> dict[str, Any]:
    """The recording of a kernel of the registry on a matrix.

    kernel: a name of `kernels()`.
    matrix: [n_rows, n_cols], at most 4096 elements: a tensor, an array, or rows of numbers, with "inf", "-inf" and
        "nan" as they are or as text.
    block: columns of a tile, a power of two; 4 unless told, or less, so that a row is more than one tile.
    dtype: of torch, or its name; the matrix's own where that is floating, else float32, unless told.

    Raises ValueError for what cannot be asked, RecordingError for what cannot be recorded.

    >>> record("naive", [[1.0, 2.0]])["traffic"]["reads"]  # 5MN + 2M
    12
    """
    wanted = _asked.asked(kernel, matrix, block, dtype)
    if interpreting() or kernels()[kernel].watch is not None:
        return _run.kernel(wanted, title)
    return _worker().ask(wanted.request() | {"title": title})


def record_kernel(
    kernel: Any,
    *,
    title: str | None = None,
    summary: str = "",
    operation: str = "custom",
    phases: dict[str, str | tuple[str, ...]] | None = None,
    outputs: tuple[str, ...] = (),
    scratch: tuple[str, ...] = (),
    row: str = "row",
    m: str = "m",
    s: str = "s",
) -> Any:
    """What records launches of a kernel of your own: `record_kernel(kernel)[grid](*arguments, **constants)`.

    The launch runs on copies of its tensors, of 65536 elements at most, under the interpreter; yours stay as they are.

    phases: by name, how the statement that opens it begins, in the order of the kernel's lines: {"maximum": "m = "}.
        Of several statements, that follow each other, the last opens it. Without: "load", "compute" and "store".
    outputs: parameters that are only written: they are NaN before. scratch: what programs talk through.
    operation: "softmax" where the result is that of the first matrix, so that its rows are summed up.
    row, m, s: the kernel's locals with a program's row, or rows, and their running maximum and sum.

    Where this process does not interpret, a worker imports the kernel by its module, or by the file that is run (keep
    what that file does under `if __name__ == "__main__":`). A kernel that is in neither is recorded where
    TRITON_INTERPRET=1 is set before Triton is imported.

        @triton.jit
        def double(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
            at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + at, mask=at < n)
            tl.store(y_ptr + at, 2 * x, mask=at < n)

        recording = trace.record_kernel(double, outputs=("y_ptr",))[(2,)](x, torch.empty_like(x), 7, BLOCK=4)
    """
    told = {
        "title": title, "summary": summary, "operation": operation, "phases": phases or {},
        "outputs": list(outputs), "scratch": list(scratch), "row": row, "m": m, "s": s,
    }  # fmt: skip
    return _custom.Launches(kernel, lambda request: _worker().ask(request), **told)


def show(kernel: str | dict[str, Any], matrix: Any = None, *, height: int = 900, **options: Any) -> Page:
    """A page that steps through a recording, shown where a notebook displays it; `str(page)` is its HTML.

    kernel: a name, recorded on `matrix` with the options of `record`; or a recording.
    """
    recording = kernel if isinstance(kernel, dict) else record(kernel, matrix, **options)
    return Page([recording], height)


def schema() -> dict[str, Any]:
    """The JSON Schema of a recording."""
    return json.loads(Path(__file__).with_name("schema.json").read_text())


@cache
def _worker() -> Worker:
    worker = Worker()
    atexit.register(worker.close)
    return worker
