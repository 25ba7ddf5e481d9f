"""Losses that torch.export takes with any number of rows."""

import os

import pytest
import torch
from conftest import peaked

from fused_softmax import cross_entropy, divergence, linear_cross_entropy, linear_divergence, linear_log_prob

pytestmark = pytest.mark.skipif(
    os.environ.get("FUSED_SOFTMAX_INTERPRET") != "1" and not torch.cuda.is_available(),
    reason="without a GPU or the interpreter, CPU tensors take ATen",
)
CALLS = {
    "probabilities": lambda x, w, t: cross_entropy(x, t.unsqueeze(1).softmax(1).expand(-1, 6), return_lse=True)[:2],
    "layer of probabilities": lambda x, w, t: linear_cross_entropy(x, w, (x @ w.t()).softmax(1)),
    "layer's log_prob": lambda x, w, t: linear_log_prob(x, w, t.long(), temperature=0.7),
    "divergence": lambda x, w, t: divergence(x, x.flip(1)),
    "layer's divergence": lambda x, w, t: linear_divergence(x, w, x, w / 2),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("of", CALLS)
def test_an_export_takes_any_number_of_rows(of, strict, device):
    class Module(torch.nn.Module):
        def forward(self, x, w, t):
            return CALLS[of](x, w, t)

    def given(n):
        return peaked(n, 6).to(device) / 4, peaked(9, 6, seed=1).to(device) / 4, torch.arange(n, device=device) / 2

    rows = {0: torch.export.Dim("rows")}
    exported = torch.export.export(Module(), given(5), dynamic_shapes=(rows, None, rows), strict=strict).module()
    for n in (5, 11):
        torch.testing.assert_close(exported(*given(n)), Module()(*given(n)))
