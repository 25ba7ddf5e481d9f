"""What tests of attention's kernels for sm_90 share: tensors full of NaN beside what counts, and who took a call."""

import pytest
import torch

from fused_softmax.ops import attention_hopper

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs an sm_90")


def watched(monkeypatch, *names):
    """A list that gets what these functions of `attention_hopper` return: None where they leave a call to others."""
    found = []

    def watch(name, prepare):
        def spy(*given):
            found.append(prepare(*given))
            return found[-1]

        monkeypatch.setattr(attention_hopper, name, spy)

    for name in names:
        watch(name, getattr(attention_hopper, name))
    return found


def given(n_queries, n_keys, dim, dtype, heads=2, key_heads=2):
    """Tensors laid out as [batch, length, heads, dim], with NaN after the last row."""
    found = []
    for n, each in ((n_queries, heads), (n_keys, key_heads), (n_keys, key_heads)):
        memory = torch.full((2, n + 128, each, dim), float("nan"), device="cuda", dtype=dtype)
        memory[:, :n] = 1.5 * torch.randn(2, n, each, dim, device="cuda")
        found.append(memory[:, :n].transpose(1, 2))
    return found
