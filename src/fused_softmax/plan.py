"""Which kernel, with which blocks, for which shape: a pure function from sizes and a device to a frozen plan.

Standard library only. A ladder is a module constant, each rung beside the measurement that set it (MEASURED.md).
Allocation, launch, tests, the bench and `fused-softmax plan` all read the one record that `plan_rows` returns.
"""

from dataclasses import dataclass
from typing import Literal

Strategy = Literal["tile", "row", "split", "stream"]
Alignment = Literal["even", "shifted", "scalar"]


@dataclass(frozen=True)
class Device:
    """What the planner needs to know of a GPU. `registers` and `shared_bytes` are per multiprocessor."""

    name: str
    backend: Literal["cuda", "hip"]
    capability: tuple[int, int]
    sm_count: int
    registers: int = 65536
    shared_bytes: int = 228 * 1024
    l2_bytes: int = 50 * 2**20
    copy_bytes_per_second: float | None = None


H200 = Device("NVIDIA H200", "cuda", (9, 0), 132, l2_bytes=60 * 2**20, copy_bytes_per_second=3.72e12)


@dataclass(frozen=True)
class RowPlan:
    """One decision. A program covers `block_rows` rows by `chunk_cols` columns, as `pieces` pieces of `block_cols`.

    full_pieces: how many leading pieces need no mask in any program.
    chunks: programs that share one row (1 except in split and stream).
    prefetch: how many programs ahead, in launch order, a program asks L2 to fetch; 0 is none.
    alignment: "even", every row starts and ends on 16 bytes; "shifted", an aligned body with guarded edges;
        "scalar", rows of input and output are not aligned alike.
    """

    strategy: Strategy
    n_rows: int
    n_cols: int
    itemsize: int
    block_rows: int
    block_cols: int
    pieces: int
    full_pieces: int
    chunks: int
    chunk_cols: int
    num_warps: int
    prefetch: int
    alignment: Alignment

    @property
    def programs(self) -> int:
        """Programs in the grid."""
        return -(-self.n_rows // self.block_rows) * self.chunks

    @property
    def reads(self) -> int:
        """Elements read from memory, counting every read of the input."""
        return self.n_rows * self.n_cols * (2 if self.strategy == "stream" else 1)

    @property
    def writes(self) -> int:
        """Elements written to memory."""
        return self.n_rows * self.n_cols
