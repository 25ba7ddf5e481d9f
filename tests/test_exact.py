"""Results that are exact: a row with one visible element, and the bits that an input of another dtype gives."""

import math

import pytest
import torch
from conftest import kernels
from products import pairwise
from shapes import ALIGNMENTS, DTYPES, STRATEGIES, framed, small
from torch.testing import assert_close

import fused_softmax
from fused_softmax.ops.softmax.calls import forward_by_plan

pytestmark = kernels
FP32, FP16, BF16, FP64 = DTYPES
FUNCTIONS = {"softmax": 1.0, "log_softmax": 0.0}
N_ROWS = 24


def finite(n, dtype, seed=0):
    """Numbers of every magnitude that a dtype has."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.empty(n, dtype=FP64).uniform_(-3, math.log10(torch.finfo(dtype).max) - 0.01, generator=generator)
    return (torch.randn(n, dtype=FP64, generator=generator).sign() * 10**exponents).to(dtype)


def alone(n_rows, n_cols, dtype):
    """(rows of -inf but for one number each, which is at some place of every part of a row; the places)."""
    places = torch.arange(n_rows) * (n_cols - 1) // max(n_rows - 1, 1)
    x = torch.full((n_rows, n_cols), -math.inf, dtype=dtype)
    x[torch.arange(n_rows), places] = finite(n_rows, dtype)
    return x, places


def one_hot(x, places, log):
    wanted = torch.full(x.shape, -math.inf if log else 0.0, dtype=x.dtype)
    wanted[torch.arange(len(x)), places] = 0.0 if log else 1.0
    return wanted


@pairwise(("strategy", "log"))
@pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_row_with_one_finite_element_is_one_hot(strategy, alignment, dtype, log, nvidia, device):
    if strategy == "split" and dtype == FP64:
        pytest.skip("programs exchange fp32 states, so the planner never splits fp64 rows")
    x, places = alone(N_ROWS, 200 if strategy == "tile" else 1104, dtype)
    source, target = framed(alignment, x, device=device)
    forward_by_plan(source.rows, small(strategy, source.rows, target.rows), y=target.rows, log=log)
    assert torch.equal(target.rows.cpu(), one_hot(x, places, log))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("hidden", ["bool mask", "added mask", "causal", "dim 0", "one column"])
def test_what_hides_all_but_one_leaves_one(hidden, function, nvidia, device):
    x = finite(64, FP32).view(4, 16).to(device)
    keep = torch.zeros(4, 16, dtype=torch.bool, device=device)
    keep[torch.arange(4), torch.tensor([0, 7, 8, 15])] = True
    of, one = getattr(fused_softmax, function), FUNCTIONS[function]
    if hidden == "causal":  # the first of as many queries as keys sees one
        y = of(finite(256, FP32).view(16, 16).to(device), -1, is_causal=True)[:1, :1]
    elif hidden == "dim 0":
        y = of(x.masked_fill(~keep, -math.inf).T.contiguous(), 0).T[keep]
    elif hidden == "one column":
        y = of(x.view(64, 1), -1)
    else:
        added = torch.zeros_like(x).masked_fill(~keep, -math.inf)
        y = of(x, -1, mask=keep if hidden == "bool mask" else added)[keep]
    assert (y == one).all()


def test_a_loss_of_one_class_is_0(nvidia, device):
    x = finite(64, FP32).view(64, 1).to(device).requires_grad_()
    loss = fused_softmax.cross_entropy(x, torch.zeros(64, dtype=torch.int64, device=device), reduction="none")
    (dx,) = torch.autograd.grad(loss.sum(), x)
    assert (loss == 0).all()
    assert (dx == 0).all()
    assert torch.equal(fused_softmax.logsumexp(x, -1), x[:, 0])


@pairwise()
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("n_cols", [1, 7, 31, 33, 64, 100, 129, 197, 256, 500, 777, 1000, 1024])
def test_half_precision_to_float32_has_the_bits_of_float32(n_cols, dtype, function, nvidia, device):
    """As PyTorch's test_softmax asks of its own."""
    of, x = getattr(fused_softmax, function), (torch.randn(5, n_cols) * 3).to(dtype).to(device)
    assert torch.equal(of(x, -1, dtype=FP32), of(x.float(), -1))
    assert torch.equal(of(x, 0, dtype=FP32), of(x.float(), 0))


def test_small_results_beside_one_that_is_nearly_1_are_right(nvidia, device):
    """Their sum rounds to the share of the greatest, as it does where that is alone."""
    x = torch.tensor([[100.3, 82.0, 70.0, 20.0], [-7.7, -30.0, -28.1, -91.0]], device=device)
    # An exponent of 137 is rounded to 2 ** -17 by fp32.
    assert_close(fused_softmax.softmax(x, -1), torch.softmax(x.double(), -1).float(), rtol=2.0**-16, atol=0)
    assert_close(fused_softmax.log_softmax(x, -1), torch.log_softmax(x.double(), -1).float(), rtol=1e-6, atol=1e-7)
