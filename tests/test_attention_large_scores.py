"""attention of scores of any size: where an lse in float32 holds no digit of a sum, outputs and gradients still do.

Queries and keys are small integers times a power of two, so that products are exact and many scores are equal: what
differs from float64 is not the rounding of scores.
"""

import pytest
import torch
import triton
import triton.language as tl
from attention_cases import BF16, FP16, FP32, FP64, PLANS

import fused_softmax
from fused_softmax.core.route import INTERPRET
from fused_softmax.ops.attention import call as attention_call
from fused_softmax.ops.attention import reference as reference_attention
from fused_softmax.ops.attention.kernels.scores import less_maximum


def bias_of(heads, lengths, factor):
    """As large as 16 bits hold it."""
    return min(factor**2, 2.0**13) * torch.randint(-4, 5, (1, heads, *lengths))


# By kind: (batches, heads, heads of keys, queries, keys, dims), and how options are made for these and a factor.
KINDS = {
    "plain": ((1, 4, 2, 70, 90, 16), lambda *_: {}),
    "causal": ((2, 2, 2, 70, 70, 16), lambda *_: {"is_causal": True}),
    "window": ((1, 4, 2, 100, 100, 16), lambda *_: {"is_causal": True, "window": (20, 0)}),
    "slopes": ((1, 4, 4, 70, 90, 16), lambda heads, _, factor: {"alibi_slopes": factor**2 * torch.rand(heads)}),
    "sinks": ((1, 4, 2, 70, 90, 16), lambda heads, *_: {"sinks": torch.randn(heads)}),
    "large sinks": (
        (1, 4, 2, 70, 90, 16),
        lambda heads, _, factor: {"sinks": factor**2 * (torch.randint(-4, 20, (heads,)) + 0.37)},
    ),
    "mask": ((1, 4, 4, 70, 90, 16), lambda _, lengths, __: {"attn_mask": torch.rand(lengths) > 0.3}),
    "bias": (
        (2, 4, 4, 70, 96, 16),
        lambda heads, lengths, factor: {"bias": bias_of(heads, lengths, factor)},
    ),
    "wide": ((1, 2, 2, 70, 70, 136), lambda *_: {"is_causal": True}),
    "dims that differ": ((1, 2, 2, 70, 70, (40, 8)), lambda *_: {}),
    "cap": ((1, 2, 2, 70, 70, 16), lambda *_: {"softcap": 2e4}),
}  # fmt: skip
SHORT = {
    "short": ((1200, 4, 4, 49, 49, 32), lambda *_: {}),
    "short bias": (
        (1200, 4, 4, 49, 49, 32),
        lambda heads, lengths, factor: {
            "bias": min(factor**2, 2**13) * torch.randint(-4, 5, (1, heads, *lengths)).float()
        },
    ),
}
DECODED = ((2, 8, 2, 1, 4000, 64), lambda *_: {})


def case(kind, dtype, factor, device, times=1):
    """(query, key, value, options) of scores of some factor ** 2; lengths that many times longer."""
    (n, heads, key_heads, n_queries, n_keys, dim), make = kind
    dims = dim if isinstance(dim, tuple) else (dim, dim)
    n_queries, n_keys = n_queries * times, n_keys * times
    made = [
        torch.randint(-3, 4, (n, heads, n_queries, dims[0])) * factor,
        torch.randint(-3, 4, (n, key_heads, n_keys, dims[0])) * factor,
        torch.randn(n, key_heads, n_keys, dims[1]),
    ]  # fmt: skip
    options = make(heads, (n_queries, n_keys), factor)
    tensors = {name: each for name, each in options.items() if isinstance(each, torch.Tensor)}
    if "bias" in tensors:
        tensors["bias"] = tensors["bias"].to(dtype)
    options |= {name: each.to(device) for name, each in tensors.items()}
    return [each.to(dtype).to(device) for each in made], options | {"enable_gqa": heads != key_heads}


def assert_exact(given, options, tolerance, stats=()):
    of_bias = [options["bias"].requires_grad_()] if "bias" in options else []
    leaves = [each.requires_grad_() for each in given]
    exact = [each.detach().double().requires_grad_() for each in leaves]
    in_full = {
        name: each.double() if isinstance(each, torch.Tensor) and each.is_floating_point() else each
        for name, each in options.items()
    }
    found = fused_softmax.attention(*leaves, **options, return_lse=True, return_stats=stats, deterministic=True)
    truth = reference_attention.attention(*exact, **in_full, return_lse=True, return_stats=stats)
    dy = torch.randn_like(found.output)
    gradients = torch.autograd.grad(found.output, leaves + of_bias, dy)
    wanted = torch.autograd.grad(truth.output, exact, dy.double())
    near = {"output": (found.output, truth.output), "value": (gradients[2], wanted[2])}
    near |= {name: (found.stats[name], truth.stats[name]) for name in stats if name == "column_sums"}
    for name, (each, want) in near.items():
        assert (each - want).norm() <= tolerance * want.norm(), name
    # The kernels for sm_90 compute tanh as a difference from 1: a score is a softcap's rounding off.
    atol = 1e-4 if leaves[0].dtype == FP32 else max(1e-4, options.get("softcap", 0.0) * torch.finfo(FP32).eps / 2)
    if "alibi_slopes" in options:  # a product and a slope's term, each rounded, may cancel
        products = exact[0].detach() @ exact[1].detach().mT * exact[0].shape[-1] ** -0.5
        atol = max(atol, torch.finfo(FP32).eps * products.abs().max().item())
    torch.testing.assert_close(found.lse.double(), truth.lse, rtol=2e-6, atol=atol)
    for each in gradients:
        assert each.isfinite().all()
    size = (dy.double().norm() * exact[2].norm() * max(each.norm() for each in exact[:2])).item()
    for each, want in zip(gradients[:2], wanted[:2], strict=True):
        assert (each - want).norm() <= tolerance * want.norm() + tolerance * 1e-3 * size


@pytest.mark.parametrize("factor", [1 / 4, 16, 256, 8192])
@pytest.mark.parametrize("kind", KINDS)
def test_large_scores(monkeypatch, device, kind, factor):
    if device == "cpu":
        monkeypatch.setattr(attention_call, "plan_attention", lambda *_: PLANS["oblong"])
    given, options = case(KINDS[kind], FP32, factor, device)
    assert_exact(given, options, 5e-3 if kind in ("cap", "slopes") else 2e-5, ("column_sums",))


@pytest.mark.skipif(not INTERPRET, reason="the kernels' own arithmetic, of few batches")
@pytest.mark.parametrize("kind", SHORT)
def test_large_scores_of_short_heads(monkeypatch, kind):
    from fused_softmax.ops.attention.plan import tiles as attention_short

    monkeypatch.setattr(attention_short, "LEAST_HEADS", 0)
    (_, *sizes), make = SHORT[kind]
    given, options = case(((3, *sizes), make), FP16, 1024, "cpu")
    assert_exact(given, options, 1e-2)


@triton.jit
def _less_maximum(z_ptr, m_ptr, x_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x_ptr + at, less_maximum(tl.load(z_ptr + at), tl.load(m_ptr + at)))


@pytest.mark.skipif(not INTERPRET, reason="a kernel of this test alone")
def test_a_score_that_rounding_lifts_above_its_maximum_is_the_maximum():
    """The next float above 2 ** 24 is 2 more, which would be a weight of e ** 2. An m of 0 records no maximum."""
    m = torch.tensor([2.0**24] * 5 + [-(2.0**24), 0.0, 0.0])
    z = m + torch.tensor([2.0, 0.0, -1.0, -4.0, -64.0, -2.0, 3.0, -3.0])
    x = torch.empty_like(m)
    _less_maximum[(1,)](z, m, x, 8)
    assert x.tolist() == [0.0, 0.0, 0.0, -4.0, -64.0, 0.0, 3.0, -3.0]


@pytest.mark.skipif(not INTERPRET, reason="every launch's flag lies on the host")
def test_one_large_call_leaves_the_next_its_own_kernel(monkeypatch):
    """Which of two kernels computes is told from call to call."""
    monkeypatch.setattr(attention_call, "plan_attention", lambda *_: PLANS["oblong"])
    for factor in (1 / 4, 256, 1 / 4):
        torch.manual_seed(1)
        given, options = case(KINDS["causal"], FP32, factor, "cpu")
        assert_exact(given, options, 2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("factor", [1 / 4, 16, 1024, 2**14])
@pytest.mark.parametrize("kind", [*KINDS, *SHORT])
def test_large_scores_on_a_gpu(kind, factor, dtype):
    """By Hopper's kernels too: scores of 1e9 gave NaN, and gradients of 1e6 were off by a tenth."""
    (sizes, make), times = (KINDS | SHORT)[kind], 1 if kind in SHORT else 8
    tolerance = 0.05 if kind == "slopes" else 1e-2 if dtype != FP32 else 5e-4
    for dim in (sizes[-1],) if isinstance(sizes[-1], tuple) or kind in (*SHORT, "wide") else (32, 64, 128):
        given, options = case(
            ((*sizes[:-1], dim), make), dtype, min(factor, 2**12) if dtype == FP16 else factor, "cuda", times
        )
        assert_exact(given, options, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("factor", [1 / 4, 16, 1024, 2**14])
def test_large_scores_of_few_queries_on_a_gpu(factor):
    (q, k, v), options = case(DECODED, BF16, factor, "cuda")
    found = fused_softmax.attention(q, k, v, **options)
    truth = reference_attention.attention(q.double(), k.double(), v.double(), **options)
    assert (found - truth).norm() <= 1e-2 * truth.norm()


SAMPLE = (8, 16, 24, 40, 64, 72, 104, 128, 136, 192, 200, 256)
ODD = ((1, 20), (7, 64), (33, 129), (50, 8), (100, 100), (129, 3), (250, 20))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", SAMPLE)
def test_dims_of_queries_and_values_on_a_gpu(dim, causal):
    """All pairs of SAMPLE, and odd ones: by kernels that read no vectors, dims 200 and 8 gave wrong outputs."""
    for i, (dim_of_one, value_dim) in enumerate([*((dim, each) for each in SAMPLE), *(ODD if dim == 8 else ())]):
        key_heads = (1, 2, 4)[i % 3]
        q, k, v = (torch.randn(1, *size, device="cuda", dtype=BF16).requires_grad_() for size in (
            (4, 130, dim_of_one), (key_heads, 150, dim_of_one), (key_heads, 150, value_dim)))  # fmt: skip
        exact = [each.detach().double().requires_grad_() for each in (q, k, v)]
        options = {"is_causal": causal, "enable_gqa": key_heads < 4}
        y = fused_softmax.attention(q, k, v, **options, deterministic=True)
        truth = reference_attention.attention(*exact, **options)
        dy = torch.randn_like(y)
        found = (y, *torch.autograd.grad(y, (q, k, v), dy))
        wanted = (truth, *torch.autograd.grad(truth, exact, dy.to(FP64)))
        for each, want in zip(found, wanted, strict=True):
            assert (each - want).norm() < 6e-3 * want.norm(), (dim_of_one, value_dim)
