"""The kernels that are recorded by name. To add one, add an entry to one of the files that `kernels` reads."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fused_softmax.trace.recorder.recorder import Recorder
from fused_softmax.trace.recorder.story import Story

Run = Callable[[Recorder, Tensor, int], dict[str, Any]]

DTYPES = ("float32", "float16", "bfloat16", "float64")
NARROW = DTYPES[:3]


@dataclass(frozen=True)
class Formula:
    """Elements that a kernel reads and writes for M rows by N columns, as multiples of MN and of M."""

    read_mn: int
    written_mn: int
    read_m: int = 0
    written_m: int = 0

    def reads(self, n_rows: int, n_cols: int) -> int:
        return self.read_mn * n_rows * n_cols + self.read_m * n_rows

    def writes(self, n_rows: int, n_cols: int) -> int:
        return self.written_mn * n_rows * n_cols + self.written_m * n_rows

    def __str__(self) -> str:
        """In words: "5MN + 2M read, 3MN + 2M written"."""

        def text(mn: int, m: int) -> str:
            return " + ".join(f"{n if n > 1 else ''}{of}" for n, of in ((mn, "MN"), (m, "M")) if n)

        return f"{text(self.read_mn, self.read_m)} read, {text(self.written_mn, self.written_m)} written"


@dataclass(frozen=True)
class Kernel:
    """An entry of the registry.

    run: `run(recorder, x, block)` with x [n_rows, n_cols] contiguous on the CPU. It puts the call's tensors into the
        recorder's memory, runs the kernel in the recorder's context, and returns facts that a reader may want.
    formula: the traffic, which a test compares with the recorded traffic; in words where it is no multiple of MN and M.
    story: the recorder's knowledge of the kernel's lines.
    block: whether `block` changes anything. If not, a row is one block, or there are no blocks.
    dtypes: the dtypes that x may have.
    check: raises a ValueError for an x that the kernel does not take.
    of_rows: whether rows of x are what is summed up.
    watch: for kernels made of torch's operations, the function that contains them.
    """

    name: str
    title: str
    summary: str
    operation: str
    run: Run
    formula: Formula | str
    story: Story = field(default_factory=Story)
    block: bool = True
    dtypes: tuple[str, ...] = DTYPES
    check: Callable[[Tensor], None] | None = None
    of_rows: bool = True
    watch: Callable[..., Any] | None = None


def kernels() -> dict[str, Kernel]:
    """All kernels by name, in the order in which to learn them."""
    from fused_softmax.trace.entries.attention import ATTENTION
    from fused_softmax.trace.entries.classic import CLASSIC
    from fused_softmax.trace.entries.routing import ROUTES
    from fused_softmax.trace.entries.rows import OURS
    from fused_softmax.trace.entries.sampling import DRAWS
    from fused_softmax.trace.entries.segments import SEGMENTS

    return {kernel.name: kernel for kernel in (*CLASSIC, *OURS, *DRAWS, *ROUTES, *SEGMENTS, *ATTENTION)}
