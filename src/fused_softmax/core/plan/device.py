"""A GPU as the planner sees it."""

from dataclasses import dataclass
from typing import Literal

from fused_softmax.core.plan.ladders import Table


@dataclass(frozen=True)
class Device:
    """The facts of a GPU that plans depend on. `registers` (32-bit) and `shared_bytes` are per multiprocessor."""

    name: str
    backend: Literal["cuda", "hip"]
    capability: tuple[int, int]
    sm_count: int
    registers: int = 65536
    shared_bytes: int = 228 * 1024
    l2_bytes: int = 50 * 2**20
    copy_bytes_per_second: float | None = None
    table: Table | None = None  # ladders that were measured on this very GPU


H100 = Device("NVIDIA H100 80GB HBM3", "cuda", (9, 0), 132)
H200 = Device("NVIDIA H200", "cuda", (9, 0), 132, l2_bytes=60 * 2**20, copy_bytes_per_second=4.2e12)
