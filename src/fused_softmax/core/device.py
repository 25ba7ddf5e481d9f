"""The one module that asks hardware questions."""

from functools import cache
from typing import Any

import torch

from fused_softmax.core.plan import H200, Device, tuned

_COPY_BYTES_PER_SECOND = {"NVIDIA H200": H200.copy_bytes_per_second}  # measured/bench.md; floor times need it


@cache
def device_of(index: int) -> Device:
    """The GPU with this index, as the planner sees it; for -1, CPU tensors under the interpreter, an H200 stands in.

    The first question for a GPU reads the user's table of plans, if there is one.
    """
    if index < 0:
        return H200
    found: Any = torch.cuda.get_device_properties(index)
    return Device(
        name=found.name,
        backend="hip" if torch.version.hip else "cuda",
        capability=(found.major, found.minor),
        sm_count=found.multi_processor_count,
        registers=found.regs_per_multiprocessor,
        shared_bytes=found.shared_memory_per_multiprocessor,
        l2_bytes=found.L2_cache_size,
        copy_bytes_per_second=_COPY_BYTES_PER_SECOND.get(found.name),
        table=tuned.table_for(found.name),
    )
