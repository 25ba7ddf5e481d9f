"""The losses' kernels compiled for GPUs that need not be present: no spill, wide accesses."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from launches import GPUS, _specialised

from fused_softmax.ops import cross_entropy_backward as backward
from fused_softmax.ops import cross_entropy_forward as forward
from fused_softmax.ops import cross_entropy_online as online
from fused_softmax.ops.losses import Loss

pytestmark = pytest.mark.compiles
FP32, BF16 = torch.float32, torch.bfloat16
KINDS = {
    "plain": {}, "smoothing": {"label_smoothing": 0.1}, "softcap": {"softcap": 30.0},
    "weights, z-loss": {"lse_square_scale": 1e-4, "weight": True},
}  # fmt: skip


def binaries(target, run):
    """Of what `run` launches, as on a GPU: launches that the interpreter makes two are one, with inline PTX."""
    recorded = {}

    def record(kernel, grid, tensors, scalars, constexprs, *, device, **options):
        cuda = GPUS[target].backend == "cuda"
        on_gpu = {"PTX": cuda, "PREFETCH": cuda and target != "sm_80", "PUBLISH": True, "COLLECT": True}
        constexprs = {name: on_gpu.get(name, value) for name, value in constexprs.items()}
        recorded[kernel.__name__] = _specialised(kernel, tensors, scalars, constexprs, options)
        return lambda *tensors: None

    instead = {"launch": SimpleNamespace(prepare=record), "device_of": lambda _: GPUS[target]}
    alone = mock.patch.object(online, "launch", instead["launch"])
    with mock.patch.multiple(forward, **instead), mock.patch.multiple(backward, **instead), alone:
        run()
    return {name: launch.compile(target) for name, launch in recorded.items()}


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_losses(target, dtype, kind):
    for n_cols in (128, 1000, 4096, 32000, 128256):
        loss = Loss(mean=True, **KINDS[kind] | ({"weight": torch.ones(n_cols)} if "weight" in KINDS[kind] else {}))
        x, targets = torch.empty(512, n_cols, dtype=dtype), torch.zeros(512, dtype=torch.int64)
        totals, row = torch.ones(2, 1), torch.ones(512)

        def run():
            forward.cross_entropy_forward(x, targets, loss, totals, torch.empty_like(x))  # noqa: B023
            forward.cross_entropy_forward(x, targets, loss)  # noqa: B023
            backward.cross_entropy_backward(x, targets, row, row, loss, totals=totals, dy=row)  # noqa: B023

        for name, binary in binaries(target, run).items():
            assert binary.stack_bytes == 0, (n_cols, name)
            if target != "gfx942" and name in ("_part_loss", "_online_loss", "_gradient"):
                assert max(binary.load_widths) >= (8 if kind == "softcap" and dtype == BF16 else 16), (n_cols, name)
