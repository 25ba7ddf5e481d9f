"""What tests of attention's kernels for sm_90 share: tensors full of NaN beside what counts, and who took a call."""

import pytest
import torch
from attention_cases import FP64

import fused_softmax
from fused_softmax.ops.attention import calls as _calls  # noqa: F401  # its tables hold what tests replace later
from fused_softmax.ops.attention import reference as reference_attention
from fused_softmax.ops.attention import ways

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs an sm_90")


def watched(monkeypatch, name, *passes):
    """A list that gets the choice of each of these passes that reached a way: None where it left the pass to others."""
    found, chosen = [], ways.chosen

    def spy(of, table, asked):
        choice = chosen(of, table, asked)
        if of in passes and name in (choice.way.name, *choice.refused):
            found.append(choice if choice.way.name == name else None)
        return choice

    monkeypatch.setattr(ways, "chosen", spy)
    return found


def given(n_queries, n_keys, dim, dtype, heads=2, key_heads=2):
    """Tensors laid out as [batch, length, heads, dim], with NaN after the last row."""
    found = []
    for n, each in ((n_queries, heads), (n_keys, key_heads), (n_keys, key_heads)):
        memory = torch.full((2, n + 128, each, dim), float("nan"), device="cuda", dtype=dtype)
        memory[:, :n] = 1.5 * torch.randn(2, n, each, dim, device="cuda")
        found.append(memory[:, :n].transpose(1, 2))
    return found


def assert_near(q, k, v, **options):
    """The output is off float64's by at most twice what its rounding alone makes; lse by little."""
    options["enable_gqa"] = q.shape[1] != k.shape[1]
    found = fused_softmax.attention(q, k, v, **options, deterministic=True, return_lse=True)  # by no other's kernel
    exact = reference_attention.attention(q.double(), k.double(), v.double(), **options, return_lse=True)
    rounded = reference_attention.attention(q, k, v, **options, arithmetic=FP64)
    error = (found.output.double() - exact.output).norm()
    assert error <= 2 * (rounded.double() - exact.output).norm() + 1e-6 * exact.output.norm()
    torch.testing.assert_close(found.lse.double(), exact.lse, atol=1e-4, rtol=1e-5)
