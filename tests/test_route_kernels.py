"""The kernels of `route` and of its gradient against torch's operations: options, sizes, sums, layouts, plans, bits."""

import math

import pytest
import torch
from products import pairwise

from fused_softmax import route
from fused_softmax.ops.routing import reference

INF, NAN = math.inf, math.nan
EVERYTHING = {"dense": True, "return_aux_loss": True, "return_z_loss": True}
FLOATS = ("weights", "prob_sums", "aux_loss", "z_loss", "dense")


def rows(n, n_experts, dtype=torch.float32, seed=0):
    return torch.randn(n, n_experts, generator=torch.Generator().manual_seed(seed)).mul(2).to(dtype)


def given(options, x, k):
    """Options with the tensors that they stand for."""
    found, (n, n_experts) = dict(options), x.shape
    made = {
        "bias": lambda: rows(1, n_experts, seed=3)[0] / 8,
        "noise": lambda: rows(n, n_experts, seed=4),
        "row_mask": lambda: torch.arange(n) % 4 != 1,
        "indices": lambda: replayed(n, n_experts, k),
    }
    return found | {name: make() for name, make in made.items() if options.get(name) is True}


def replayed(n, n_experts, k):
    generator = torch.Generator().manual_seed(5)
    ids = torch.stack([torch.randperm(n_experts, generator=generator)[:k] for _ in range(n)]).to(torch.int32)
    ids[0, 0] = -1
    return ids


def on(device, options):
    return {name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in options.items()}


def results(function, x, k, options, asked, device):
    """Results of a call, and the gradient of a sum of some of them."""
    leaf = x.to(device).requires_grad_()
    out = function(leaf, k, **on(device, options))
    generator, total = torch.Generator().manual_seed(9), 0.0
    for name in FLOATS:
        each = getattr(out, name)
        if name in asked and each is not None:
            weight = torch.randn(each.shape, generator=generator).to(device)
            total = total + (torch.where(weight.isnan() | each.isnan(), 0.0, each) * weight).sum()
    return out, torch.autograd.grad(total, leaf)[0]


def assert_same(x, k, options, device, asked=FLOATS):
    ours, dx = results(route, x, k, options, asked, device)
    theirs, wanted = results(reference.route, x, k, options, asked, "cpu")
    for name in theirs._fields:
        a, b = getattr(ours, name), getattr(theirs, name)
        assert (a is None) == (b is None), name
        if b is not None and name in FLOATS:
            torch.testing.assert_close(
                a.cpu(), b, rtol=1e-5, atol=1e-6, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
            )
        elif b is not None:
            assert torch.equal(a.cpu(), b), name
    assert dx.dtype == x.dtype
    step = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}[x.dtype]
    torch.testing.assert_close(dx.cpu(), wanted, rtol=step, atol=step * max(wanted.float().abs().max().item(), 1e-6))


OPTIONS = {
    "plain": {},
    "raw": {"renormalize": False, "scale": 2.5},
    "a scale of 0": {"scale": 0.0},
    "sigmoid": {"score": "sigmoid", "scale": -0.5},
    "raw sigmoid": {"score": "sigmoid", "renormalize": False},
    "sqrtsoftplus": {"score": "sqrtsoftplus"},
    "chosen first": {"score_first": False},
    "chosen first, sqrtsoftplus": {"score_first": False, "score": "sqrtsoftplus", "renormalize": False},
    "bias": {"bias": True},
    "bias, sigmoid": {"bias": True, "score": "sigmoid"},
    "bias, chosen first": {"bias": True, "score_first": False},
    "noise, sigmoid": {"noise": True, "score": "sigmoid"},
    "groups": {"n_groups": 4, "groups_kept": 2},
    "groups by max": {"n_groups": 4, "groups_kept": 2, "group_score": "max", "renormalize": False},
    "V3": {"n_groups": 4, "groups_kept": 2, "score": "sigmoid", "bias": True, "scale": 2.5},
    "groups, chosen first": {"n_groups": 8, "groups_kept": 5, "score_first": False},
    "masked rows": {"row_mask": True},
    "replay": {"indices": True},
    "replay, raw": {"indices": True, "renormalize": False},
    "replay, sigmoid": {"indices": True, "score": "sigmoid"},
    "sequences": {"sequence_length": 3, "row_mask": True},
    "sequences, sqrtsoftplus": {"sequence_length": 2, "score": "sqrtsoftplus"},
}


@pytest.mark.parametrize("asked", [FLOATS, ("weights",), ("dense",), ("aux_loss", "z_loss"), ("prob_sums",)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@pairwise()
def test_options_and_gradients(name, dtype, asked, device):
    x = rows(6, 40, dtype)
    x[1, 3] = NAN
    x[2] = 0.0
    x[3, 5:] = -INF
    x[4, 7] = x[4, 20]
    assert_same(x, 5, given(OPTIONS[name], x, 5) | EVERYTHING, device, asked)
