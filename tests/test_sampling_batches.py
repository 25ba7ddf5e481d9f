"""Rows drawn from alone, among others and in any order: the same tokens and the same bits of log-probabilities."""

import os
from dataclasses import replace

import pytest
import torch

from fused_softmax import sample
from fused_softmax.ops.sampling import calls, launches
from fused_softmax.ops.sampling.plan import plan_draws

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
kernels = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="kernels run on a GPU or in the interpreter"
)

ASKED = {
    "no filter, as given": {"return_logprobs": "raw"},
    "top-k, as given": {"top_k": 20, "return_logprobs": "raw"},
    "top-p": {"top_p": 0.9, "return_logprobs": "processed"},
    "min-p": {"min_p": 0.05, "temperature": 0.8, "return_logprobs": "processed"},
}


def rows(n, n_cols):
    """Rows [n, n_cols] of random logits, peaked ones and ties in turn."""
    x = torch.randn(n, n_cols, generator=torch.Generator().manual_seed(n_cols))
    x[0::3] *= 2
    x[1::3] *= 6
    x[2::3] = (x[2::3] * 2).round()
    return x


def assert_alike(x, batches, asked):
    """batches: (size, count) of those that are drawn from of shuffled rows, against all rows in order."""
    seed, position = torch.arange(len(x), device=x.device) * 77 - 5, torch.arange(len(x), device=x.device) * 2**33 + 3
    draw = lambda at: sample(x[at], **asked, top_logprobs=4, seed=seed[at], position=position[at])  # noqa: E731
    whole = draw(slice(None))
    assert whole.valid.all()
    assert whole.logprobs.isfinite().all()
    for size, count in batches:
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(size)).to(x.device)
        for at in order.split(size)[:count]:
            for found, wanted in zip(draw(at)[:5], whole[:5], strict=True):
                assert torch.equal(found, wanted[at])


@kernels
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("cut", [False, True], ids=["by plan", "few rows in many parts"])
def test_rows_have_the_same_bits_in_any_batch(asked, cut, device, monkeypatch):
    def in_parts(n_draws, n_cols, *others):
        plan, n = plan_draws(n_draws, n_cols, *others), -(-n_cols // 1024)
        return plan if n_draws > 7 else replace(
            plan, stretches=1, num_warps=1, parts=n, part_stretches=1, above_stretches=1, above_warps=1, decide_warps=1,
            decide_parts=n, decide_stretches=1, wide_parts=n, wide_stretches=1,
        )  # fmt: skip

    if cut:
        for each in (launches, calls):
            monkeypatch.setattr(each, "plan_draws", in_parts)
    x = rows(9, 2100) if cut else rows(64, 40)
    assert_alike(x.to(device), [(9, 1), (7, 1), (1, 3)] if cut else [(64, 1), (7, 2), (1, 3)], ASKED[asked])


@pytest.mark.gpu
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("n_cols", [1000, 128256])
def test_long_rows_have_the_same_bits_in_any_batch(asked, n_cols, device):
    """Of few rows each has many programs."""
    assert_alike(rows(512, n_cols).to(device), [(512, 1), (64, 8), (7, 6), (1, 8)], ASKED[asked])
