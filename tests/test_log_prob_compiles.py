"""The kernels of log-probabilities compiled for GPUs that need not be present: no spill, wide accesses."""

from unittest import mock

import pytest
import torch
from launches import GPUS
from products import pairwise
from test_losses_compile import BF16, FP32, binaries

from fused_softmax.ops.losses import log_prob_launches as launches
from fused_softmax.ops.losses.options import LogProb

pytestmark = pytest.mark.compiles


@pairwise()
@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("kind", ["plain", "softcap", "temperatures"])
@pytest.mark.parametrize("k", [1, 5])
def test_log_probs(target, dtype, kind, k):
    for n_cols in (1000, 4096, 50257, 151936):
        t = torch.ones(512) if kind == "temperatures" else None
        options = LogProb(softcap=30.0 if kind == "softcap" else None, temperature=1.0 if t is None else t)
        x, targets, row = torch.empty(512, n_cols, dtype=dtype), torch.zeros(512, k, dtype=torch.int64), torch.ones(512)
        given = launches.given_of(x, targets, t, options)
        asked = launches.Asked(entropy=True, lse=True, log_sum_sq_probs=k > 1, is_top1=k > 1, states=True)
        of_results = launches.Gradients(torch.ones(512, k), row, row)

        def run():
            launches.forward(given, options, asked)  # noqa: B023
            launches.backward(given, row, row, row, of_results, options)  # noqa: B023

        with mock.patch.object(launches, "device_of", return_value=GPUS[target]):
            found = binaries(target, run)
        for name, binary in found.items():
            assert binary.spilled_bytes <= (16 if kind == "softcap" else 0), (n_cols, name)
            wide = n_cols % 8 == 0 or name == "_log_prob_gradient"
            if target != "gfx942" and name != "_merge_log_probs" and wide:
                assert max(binary.load_widths) >= (8 if kind == "softcap" and dtype == BF16 else 16), (n_cols, name)
