"""Reductions over a strided dim by plans of several tiles and of several parts, which tensors of tests do not reach."""

from dataclasses import replace

import pytest
import torch
from conftest import kernels, peaked

from fused_softmax.core.plan import H200
from fused_softmax.ops.softmax import launches as softmax_rows
from fused_softmax.ops.softmax.column_plan import plan_columns

pytestmark = kernels

FEW = replace(H200, sm_count=4)
EDGES = {"first": slice(0, 3), "last": slice(-3, None), "middle": slice(700, 703)}


def columns(n_outer, n_cols, n_inner, device, high="last"):
    """[n_outer, n_cols, n_inner], a few columns far above the others."""
    x = peaked(n_outer * n_inner, n_cols).view(n_outer, n_inner, n_cols).transpose(1, 2).contiguous() / 2
    x[:, EDGES[high]] += 60
    return x.to(device)


@pytest.mark.parametrize("high", EDGES)
@pytest.mark.parametrize("n_inner", [8, 7])
def test_logsumexp_tile_by_tile(n_inner, high, device):
    x = columns(8, 1500, n_inner, device, high)
    lse = torch.full((8, 1, n_inner), float("nan"), device=device)
    access = 4 if n_inner == 8 else 1
    plan = plan_columns(8, 1500, n_inner, 4, FEW, holds=False, access=access)
    assert plan.parts > 1
    assert plan.part_cols > plan.pieces * plan.block_cols, "more than one tile a part"
    run = softmax_rows.prepare_logsumexp_columns(x, lse, plan=plan)
    run(x, lse)
    torch.testing.assert_close(lse.double(), torch.logsumexp(x.double(), 1, keepdim=True), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("high", EDGES)
@pytest.mark.parametrize("log", [False, True])
def test_softmax_and_its_gradient_by_parts(log, high, device):
    x = columns(2, 1500, 8, device, high)
    y, dx = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))
    dy = columns(2, 1500, 8, device, "first") / 60
    plans = [plan_columns(2, 1500, 8, 4, H200, inputs=inputs, held_bytes=16384, access=4) for inputs in (1, 2)]
    assert all(plan.parts > 1 for plan in plans)
    softmax_rows.prepare_columns(x, y, log=log, plan=plans[0])(x, y)
    softmax_rows.prepare_columns_backward(dy, y, dx, log=log, plan=plans[1])(dy, y, dx)
    function = torch.log_softmax if log else torch.softmax
    wide = x.double().requires_grad_()
    truth = function(wide, 1)
    torch.testing.assert_close(y.double(), truth.detach(), rtol=1e-5, atol=1e-5)
    (truth,) = torch.autograd.grad(truth, wide, dy.double())
    torch.testing.assert_close(dx.double(), truth, rtol=1e-4, atol=1e-4)


def test_logsumexp_of_low_numbers_in_parts(device):
    """Lanes without a part count nothing, though 0 is far above every number."""
    x = torch.rand(1, 5000, 8, device=device) - 200.0
    plan = plan_columns(1, 5000, 8, 4, H200, holds=False)
    assert 1 < plan.parts < plan.lanes
    lse = torch.full((1, 1, 8), float("nan"), device=device)
    softmax_rows.prepare_logsumexp_columns(x, lse, plan=plan)(x, lse)
    torch.testing.assert_close(lse, torch.logsumexp(x, 1, keepdim=True))
