"""attention's kernels for sm_90 where it is hard: rows that one key dominates, equal scores, launches beside others."""

import time

import pytest
import torch
from attention_cases import BF16, FP64, assert_attention, tensors
from hopper_cases import given, on_hopper, watched

import fused_softmax
from fused_softmax.ops.attention import reference as reference_attention
from fused_softmax.ops.attention.plan import hopper as attention_window

pytestmark = [pytest.mark.gpu, on_hopper]


@pytest.fixture
def taken(monkeypatch):
    """Whether each kernel that was prepared was of those for sm_90."""
    return watched(monkeypatch, "hopper", "the forward pass", "dK and dV", "dQ")


# Scores with other keys are up to about half as high: a weight is e^60 times any other's, or more than fp32 holds.
HEIGHTS = [120.0, 1e4]


def with_peaks(height, key_of, dim):
    """Queries whose score with the key that key_of has for them is about height; keys are of 1 and -1."""
    n = len(key_of)
    q, k, v = given(n, n, dim, BF16)
    k.copy_(torch.randn(k.shape, device="cuda").sign())
    q.copy_(k[:, :, key_of] * (height / dim) + q * 0.01)
    return q, k, v


def assert_near(q, k, v, **options):
    """Gradients of scores are differences of great numbers: each counts with the rounding of these in fp32."""
    do = tensors(q.shape, seed=7)[0].to(q)
    found, exact = [], []
    for dtype, of, results in ((BF16, fused_softmax.attention, found), (FP64, reference_attention.attention, exact)):
        leaves = [each.detach().to(dtype).requires_grad_() for each in (q, k, v)]
        y = of(*leaves, **options, return_lse=True, **({"deterministic": True} if dtype == BF16 else {}))
        results += [y.output, y.lse, *torch.autograd.grad(y.output, leaves, do.to(dtype))]
    q, k, v, do = (each.double() for each in (q, k, v, do))
    torch.testing.assert_close(found[1].double(), exact[1], atol=1e-4, rtol=1e-5)
    rounding = 2**-18 * (do.abs() @ v.abs().mT).max()
    allowed = {
        "output": (0, 2**-6), "lse": (0, 2**-6), "dq": (rounding * k.abs().max(), 2**-4),
        "dk": (rounding * q.abs().sum(-2).max(), 2**-4), "dv": (0, 2**-6),
    }  # fmt: skip
    for (name, (slack, share)), each, truth in zip(allowed.items(), found, exact, strict=True):
        assert each.isfinite().all(), name
        off, size = (each.double() - truth.double()).abs().max(), truth.abs().max()
        assert off <= slack + share * size, f"{name}: {off:.3g} off, of {size:.3g}"


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (350, 350)}], ids=str)
@pytest.mark.parametrize("height", HEIGHTS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_rows_that_one_key_dominates(taken, dim, height, options):
    """It lies in the first tile, or anywhere; the same with the sign turned, so that one key counts for nothing."""
    at = torch.arange(700, device="cuda")
    for key_of in (at * 0, at, at * 97 % 700):
        q, k, v = with_peaks(height, key_of, dim)
        assert_near(q, k, v, scale=1.0, **options)
        assert_near(-q, k, v, scale=1.0, **options)
    assert None not in taken


@pytest.mark.parametrize("height", [0.0, 1e4, -1e4], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_rows_whose_scores_are_equal(taken, dim, height):
    """The output is the mean of the values, whatever the score is."""
    q, k, v = given(300, 700, dim, BF16)
    q.zero_()[..., 0] = height
    k[..., 0] = 1.0
    found = assert_attention(q, k, v, scale=1.0)["output"].double()
    mean = v.double().mean(-2, keepdim=True).expand_as(found)
    torch.testing.assert_close(found, mean, atol=2e-3, rtol=8e-3)
    assert None not in taken


OPTIONS = [
    {}, {"is_causal": True}, {"window": (200, None)}, {"softcap": 20.0}, {"is_causal": True, "softcap": 9.0},
    {"window": (127, 0)}, {"window": (20, 30)},
]  # fmt: skip
LAUNCHES, SECONDS = 10_000, 60


def test_launches_of_varying_shapes_on_two_streams(taken, monkeypatch):
    """Forward passes, every second one with its gradients: all have the bits that they have where none runs beside.

    A barrier in the wrong phase, or a tile that is filled while it is read, would show in some of them.
    """
    monkeypatch.setattr(attention_window, "LEAST_TILES", {64: 0, 128: 0})
    monkeypatch.setattr(attention_window, "LEAST_QUERIES", 0)
    generator = torch.Generator().manual_seed(0)

    def some(most):
        return int(torch.randint(most, (), generator=generator))

    def results(case, with_gradients):
        q, k, v, do, options = case
        leaves = [each.detach().requires_grad_(with_gradients) for each in (q, k, v)]
        y = fused_softmax.attention(*leaves, **options, enable_gqa=True, deterministic=True)
        return y.detach(), *(torch.autograd.grad(y, leaves, do) if with_gradients else ())

    cases = []
    for dim in (64, 72, 128, 256):
        for options in OPTIONS:
            q, k, v = given(1 + some(1500), 1 + some(1500), dim, BF16, heads=4)
            case = q, k, v, torch.randn_like(q), options
            alone = results(case, True)
            assert all(map(torch.equal, alone, results(case, True)))
            cases.append((case, alone))
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    differ = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in streams]
    torch.cuda.synchronize()
    began, n = time.monotonic(), 0
    while n < LAUNCHES and time.monotonic() - began < SECONDS:
        stream, count = streams[n % 2], differ[n % 2]
        case, alone = cases[some(len(cases))]
        with torch.cuda.stream(stream):
            for found, expected in zip(results(case, n // 2 % 2 == 1), alone, strict=False):
                count += (found != expected).any()
        n += 1
        if n % 256 == 0:
            torch.cuda.synchronize()  # so that the memory of those that wait is bounded
    torch.cuda.synchronize()
    assert [int(each) for each in differ] == [0, 0]
    assert n == LAUNCHES, f"{n} within {SECONDS} s"
    assert None not in taken
