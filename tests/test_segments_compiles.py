"""Kernels of segments compiled for GPUs that need not be present: registers, spills, accesses."""

import importlib.metadata
from unittest import mock

import pytest
import torch
from launches import GPUS, specialised

from fused_softmax.ops.segments import launches
from fused_softmax.ops.segments.launches import Cut

pytestmark = pytest.mark.compiles

FP32, BF16 = torch.float32, torch.bfloat16
CALLS = {  # positions, segments, columns
    "long, of one column": (2**20, 2000, 1, FP32),
    "of one column": (2**20, 26000, 1, FP32),
    "short, of one column": (2**20, 230000, 1, FP32),
    "long, of 8 columns": (2**18, 500, 8, FP32),
    "of 8 columns": (2**18, 5000, 8, FP32),
    "short, of 4 columns": (2**18, 37000, 4, BF16),
    "of 64 columns": (2**14, 1000, 64, FP32),
}
# Bytes that a thread spills, forward and backward; others spill none. What was measured is of 3.6; by 3.7 to 3.9 the
# addresses of pieces of one column take more registers.
SPILLED = (
    {"short, of one column": (0, 44)}
    if importlib.metadata.version("triton").startswith("3.6")
    else {"long, of one column": (116, 296), "of one column": (0, 12), "short, of one column": (108, 244)}
)


def compiled(target, call, name="segment_softmax", backward=False, ordered=False):
    """Each kernel that a call launches, by name."""
    n, n_segments, cols, dtype = CALLS[call]
    found = {}

    def prepare(kernel, grid, tensors, scalars, constexprs, *, device, plan, **rest):
        found[kernel.__name__] = specialised(kernel, tensors, scalars, constexprs, rest)
        return mock.Mock()

    x, lse = torch.empty(n, cols, dtype=dtype), torch.empty(n_segments, cols, dtype=dtype)
    cut = Cut(torch.empty(n_segments + 1 + ordered), torch.empty(n, dtype=torch.int64) if ordered else None)
    cut = cut._replace(offsets=cut.offsets.long())
    with (
        mock.patch.object(launches.launch, "prepare", prepare),
        mock.patch.object(launches, "device_of", return_value=GPUS[target]),
        mock.patch.object(launches, "has_ptx", return_value=target != "gfx942"),
        mock.patch.object(launches, "overlaps", return_value=target in ("sm_90", "sm_100")),
    ):
        if not backward:
            launches.forward(name, x, cut, 0, None, dtype)
        elif name == "segment_logsumexp":
            launches.lse_backward(lse, x, lse, cut, 0, None)
        else:
            launches.backward(name, x, x, cut, 0, None, dtype)
    return {name: launch.compile(target) for name, launch in found.items()}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_registers_and_accesses(call, backward):
    _, _, cols, dtype = CALLS[call]
    found = compiled("sm_90", call, backward=backward)
    for binary in found.values():
        assert binary.registers <= 168
        assert binary.spilled_bytes <= SPILLED.get(call, (0, 0))[backward]
        assert max(binary.load_widths) == 16  # of steps through long segments too, where one may begin anywhere
    assert max(found["_compute"].store_widths) >= min(16, cols * dtype.itemsize)
    assert max(found["_finish"].store_widths) == 16


@pytest.mark.parametrize("name", ["segment_log_softmax", "segment_logsumexp"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_the_other_functions_and_orders_compile(name, backward, ordered):
    for call in ("of one column", "of 8 columns"):
        for binary in compiled("sm_90", call, name, backward, ordered).values():
            assert binary.spilled_bytes <= 200


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
def test_other_gpus(target):
    for backward in (False, True):
        assert len(compiled(target, "of 8 columns", backward=backward, ordered=backward)) == 2
