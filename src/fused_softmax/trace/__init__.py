"""Recordings of kernels: what they read, hold and write, line by line, under Triton's interpreter.

    from fused_softmax import trace

    recording = trace.record("hybrid-tiled", [[2.0, -1.0, 3.0, 0.5], [4.0, -3.0, "-inf", 1.0]], block=2)
    recording["rows"][0]["max"]   # 3.0, as the kernel held it
    trace.show("online", x)       # a page that steps through it, in a notebook

Kernels of the registry (`kernels()`) are recorded by name. Any other `@triton.jit` kernel is recorded by a launch:

    recording = trace.record_kernel(my_kernel)[(n_rows,)](x, y, x.stride(0), n_cols, BLOCK_COLS=4)

A recording is a dict that can be stored as JSON. Its schema is 1 (`schema()`, trace/schema.json describes every field):

    sources, tensors, phases    each function's text; each tensor before and after; the names of the phases
    launches, frames            each launch with its grid; each program's calls of the kernel and of its functions
    steps                       each statement that ran: `frame`, `line`, `phase`, the `rows` and `cols` it concerns,
                                the locals it `set`, the values it `computed` on the way, `loads`, `stores`, the tiles
                                that it `holds` of matrices in no memory, the `state` (m, s) of its rows afterwards, a
                                `message` between a row's programs, a `note`
    rows, traffic               each result row's maximum, sum, status and entropy; the elements moved, and their
                                floor

Numbers are the values that the kernel held. Floats are the shortest decimals that read back to the same value of their
dtype, or "inf", "-inf" and "nan" (`read_number` reads them); integers past 2**53 are text. Elements are counted in a
tensor's logical order, row after row. A schema may gain fields; readers ignore fields they do not know.

One process cannot both interpret and compile kernels, because Triton's flag is read once. A process that does not
interpret makes recordings in a worker, which is started once and kept.
"""

import atexit
import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

if importlib.util.find_spec("numpy") is None:
    raise ModuleNotFoundError(
        "fused_softmax.trace needs NumPy, which is not installed: pip install 'fused-softmax[viz]'", name="numpy"
    )

from fused_softmax.trace import asked as _asked
from fused_softmax.trace import custom as _custom
from fused_softmax.trace import run as _run
from fused_softmax.trace.entries.kernel import Kernel, kernels
from fused_softmax.trace.page import Page
from fused_softmax.trace.recorder.encode import read_number
from fused_softmax.trace.recorder.hooks import interpreting
from fused_softmax.trace.recorder.memory import RecordingError
from fused_softmax.trace.server.worker import Late, Worker

__all__ = [
    "Kernel", "Late", "Page", "RecordingError", "kernels", "read_number", "record", "record_kernel", "schema", "show",
]  # fmt: skip


def record(
    kernel: str, matrix: Any, *, block: int | None = None, dtype: Any = None, title: str | None = None
) -> dict[str, Any]:
    """Record a kernel of the registry on a matrix.

    kernel: a name in `kernels()`.
    matrix: [n_rows, n_cols], at most 4096 elements: a tensor, an array, or rows of numbers. "inf", "-inf" and "nan" may
        be floats or text. attention takes [tokens, 3 * dim]: query, key and value of each token, side by side.
    block: columns of a tile, a power of two. By default 4, or less so that a row has more than one tile.
    dtype: a torch dtype or its name. By default the matrix's own if that is floating, else float32.

    Raises ValueError for a bad argument, RecordingError for a run that cannot be recorded.

    >>> record("naive", [[1.0, 2.0]])["traffic"]["reads"]  # 5MN + 2M
    12
    """
    wanted = _asked.asked(kernel, matrix, block, dtype)
    if interpreting() or kernels()[kernel].watch is not None:
        return _run.kernel(wanted, title)
    return _worker().ask(_run.kernel, wanted, title)


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
    """Record a launch of your own kernel: `record_kernel(kernel)[grid](*arguments, **constants)`.

    The launch runs under the interpreter, on copies of its tensors (65536 elements each at most). Yours do not change.

    phases: for each phase, the beginning of the statement that opens it, in the order of the kernel's lines:
        {"maximum": "m = "}. A tuple names successive statements, of which the last opens the phase. By default the
        phases are "load", "compute" and "store".
    outputs: parameters that are only written; they start as NaN. scratch: parameters through which programs talk.
    operation: "softmax" if the result is the first matrix's softmax; the recording then sums up its rows.
    row, m, s: the kernel's locals for a program's row or rows, and for their running maximum and sum.

    Raises TypeError for what is not a @triton.jit function or an argument that cannot be recorded, and RecordingError
    for a kernel that a worker cannot import or a run that cannot be recorded.

    If this process does not interpret, a worker imports the kernel from its module, or from the file that is being run
    (keep that file's actions under `if __name__ == "__main__":`). A kernel that is in neither can be recorded if
    TRITON_INTERPRET=1 is set before Triton is imported.

        @triton.jit
        def double(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
            at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + at, mask=at < n)
            tl.store(y_ptr + at, 2 * x, mask=at < n)

        recording = trace.record_kernel(double, outputs=("y_ptr",))[(2,)](x, torch.empty_like(x), 7, BLOCK=4)
    """
    told = {
        "title": title, "summary": summary, "operation": operation, "phases": phases,
        "outputs": outputs, "scratch": scratch, "row": row, "m": m, "s": s,
    }  # fmt: skip
    return _custom.Launches(kernel, told, lambda *launch: _worker().ask(*launch))


def show(kernel: str | dict[str, Any], matrix: Any = None, *, height: int = 900, **options: Any) -> Page:
    """A page that steps through a recording. A notebook displays it; `str(page)` is its HTML.

    kernel: a recording, or a name to record on `matrix` with the options of `record`.
    height: of the page in a notebook, in pixels.

    Raises as `record`.

    >>> show("online", [[2.0, -1.0, 3.0, 0.5]], block=2)
    """
    recording = kernel if isinstance(kernel, dict) else record(kernel, matrix, **options)
    return Page([recording], height)


def schema() -> dict[str, Any]:
    """The JSON Schema of a recording."""
    return json.loads(Path(__file__).with_name("schema.json").read_text(encoding="utf-8"))


@cache
def _worker() -> Worker:
    worker = Worker()
    atexit.register(worker.close)
    return worker
