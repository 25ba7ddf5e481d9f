"""attention of short lengths: one tile a head, and programs that go through batches."""

import os

import pytest
import torch
from attention_cases import BF16, FP16, PLANS, assert_attention, qkv, tensors

import fused_softmax
from fused_softmax.core.plan import H200
from fused_softmax.ops.attention import call as attention_call
from fused_softmax.ops.attention import reference as reference_attention
from fused_softmax.ops.attention import special as attention_short
from fused_softmax.ops.attention.plan.tiles import LEAST_HEADS, MOST_LENGTH, ShortPlan, Tiles, plan_short

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
needs_kernels = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="without a GPU or the interpreter, torch computes"
)


@pytest.fixture
def short(monkeypatch):
    """Parts of two batches, of which the last has one; the kernels that it is for."""
    taken = []

    def plan(kernel, head_dim, value_dim, itemsize, n_queries, n_keys, n_batches, *_):
        taken.append(kernel)
        side = 16 if max(n_queries, n_keys) <= 16 else 32
        return ShortPlan(Tiles(side, side, 4, 1), 2, -(-n_batches // 2))

    monkeypatch.setattr(attention_short, "plan_short", plan)
    monkeypatch.setattr(attention_call, "plan_attention", lambda *_: PLANS["square"])
    yield
    assert set(taken) == {"forward", "backward"}


def heads(n_queries, n_keys, dtype=BF16, device="cpu", lead=(3,), n=2, **sizes):
    return qkv(n_queries, n_keys, lead=lead, heads=n, dtype=dtype, device=device, **sizes)


@needs_kernels
@pytest.mark.parametrize("lengths", [(1, 1), (7, 16), (16, 7), (20, 31), (32, 32)], ids=str)
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_lengths(short, lengths, dtype, device):
    assert_attention(*heads(*lengths, dtype, device, dim=20, value_dim=24))


@needs_kernels
@pytest.mark.parametrize("n_batches", [1, 2, 3, 4])
def test_a_bias_that_batches_share_has_its_gradient(short, n_batches, device):
    """Summed over parts of two batches."""
    (bias,) = (each.to(device) for each in tensors((1, 2, 20, 31), seed=3))
    given = heads(20, 31, device=device, lead=(n_batches,))
    assert_attention(*given, bias=bias)
    assert_attention(*given, attn_mask=bias[0], softcap=3.0)


@needs_kernels
@pytest.mark.parametrize("shape", [(3, 2, 20, 31), (2, 1, 1), (1, 31), (3, 1, 20, 31)], ids=str)
def test_other_biases(short, shape, device):
    """Of each batch, and of several heads: their gradients are other kernels' work."""
    (bias,) = (each.to(device) for each in tensors(shape, seed=3))
    given = heads(20, 31, device=device)
    assert_attention(*given, bias=bias)
    found = fused_softmax.attention(*given, bias=bias, attn_mask=bias > 0)
    exact = fused_softmax.attention(*[each.double() for each in given], bias=bias.double(), attn_mask=bias > 0)
    torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=2e-2)


OPTIONS = {
    "causal": {"is_causal": True, "causal_align": "bottom_right"},
    "window": {"window": (4, 6)},
    "softcap": {"softcap": 2.0},
    "negative scale": {"scale": -0.5},
}


@needs_kernels
@pytest.mark.parametrize("option", OPTIONS)
def test_options(short, option, device):
    slopes = torch.tensor([0.5, 0.125], device=device)
    keep = (tensors((3, 1, 20, 31), seed=5)[0] > -0.5).to(device)
    keep[0, 0, 3] = False
    given = heads(20, 31, device=device)
    assert_attention(*given, alibi_slopes=slopes, **OPTIONS[option])
    if "is_causal" not in OPTIONS[option]:
        assert_attention(*given, attn_mask=keep, **OPTIONS[option])


@needs_kernels
def test_sinks_and_shared_heads_forward(short, device):
    """Of whose gradients other kernels have some."""
    given = heads(20, 31, device=device, n=4, key_heads=2)
    assert_attention(*given, sinks=torch.tensor([0.5, -float("inf"), 1.0, 0.0], device=device), enable_gqa=True)


@needs_kernels
def test_sinks_at_any_stride(short, device):
    (table,) = (each.to(device) for each in tensors((2, 3), seed=3))
    given = [each.requires_grad_() for each in heads(20, 31, device=device)]

    def results(sinks):
        found = fused_softmax.attention(*given, sinks=sinks, return_lse=True)
        return found.output, found.lse, *torch.autograd.grad(found.output.float().sum(), given)

    expected, found = results(table[:, 1].contiguous()), results(table[:, 1])
    assert all(torch.equal(*each) for each in zip(found, expected, strict=True))


@needs_kernels
def test_gradients_that_are_other_kernels_work(short, device):
    """Of keys that heads share, of sinks, and of a mask and a bias at once."""
    bias, mask = (each.to(device) for each in tensors((1, 7, 16), (2, 1, 7, 1), seed=3))
    shared = heads(7, 16, device=device, lead=(1,), n=4, key_heads=2)
    given = heads(7, 16, device=device, lead=(2,), n=1)
    assert_attention(*shared, enable_gqa=True)
    assert_attention(*given, sinks=torch.tensor([0.5], device=device))
    assert_attention(*given, attn_mask=bias, bias=mask)


@needs_kernels
def test_statistics_are_for_the_plain_kernel(short, device):
    q, k, v = heads(20, 31, device=device)
    for name in ("entropy", "row_max"):
        found = fused_softmax.attention(q, k, v, return_stats=(name,)).stats[name]
        exact = reference_attention.attention(q.double(), k.double(), v.double(), return_stats=(name,)).stats[name]
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)
    assert_attention(q, k, v)


@needs_kernels
def test_rows_that_see_nothing(short, device):
    keep = torch.ones(20, 31, dtype=torch.bool, device=device)
    keep[[0, 19]] = False
    q, k, v = (each.requires_grad_() for each in heads(20, 31, device=device))
    found = fused_softmax.attention(q, k, v, keep, return_lse=True)
    dlse = torch.where(found.lse.isinf(), float("nan"), 1.0)
    got = torch.autograd.grad([found.output, found.lse], [q, k, v], [torch.ones_like(found.output), dlse])
    assert all(each.isfinite().all() for each in got)
    assert (got[0][..., [0, 19], :] == 0).all()


@needs_kernels
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("hides", ["mask", "causality"])
@pytest.mark.parametrize("lengths", [(20, 20), (7, 16), (20, 31)], ids=str)
def test_a_shared_bias_of_what_is_hidden_is_not_looked_at(short, lengths, value, hides, device):
    """As that of each batch is not, and as longer heads do not."""
    given = [each.requires_grad_() for each in heads(*lengths, device=device)]
    hidden = torch.ones(*lengths, dtype=torch.bool, device=device).triu(1)
    options = {"is_causal": True} if hides == "causality" else {"attn_mask": ~hidden}
    bias = torch.zeros(1, 2, *lengths, device=device)

    def results(bias):
        found = fused_softmax.attention(*given, bias=bias, **options)
        return found, *torch.autograd.grad(found.float().sum(), given)

    expected, found = results(bias), results(bias.masked_fill(hidden, value))
    assert all(torch.equal(*each) for each in zip(found, expected, strict=True))


@needs_kernels
def test_layouts_and_the_same_bits(short, device):
    """Query, key and value as parts of one product, as models make them."""
    q, k, v = heads(20, 20, device=device)
    together = torch.full((3, 20, 3, 2, 19), float("nan"), dtype=BF16, device=device)[..., 1:-2]
    together.copy_(torch.stack((q, k, v)).permute(1, 3, 0, 2, 4))
    (bias,) = (each.to(device) for each in tensors((1, 2, 20, 20), seed=3))
    expected = assert_attention(q, k, v, bias=bias)
    found = assert_attention(*together.permute(2, 0, 3, 1, 4), bias=bias)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_plans(kernel):
    """Parts have all batches, and none is empty; what is long, few or of fp32 is for other kernels."""
    for n_batches, n_heads in ((4096, 4), (1000, 7), (64, 32), (2, 2000)):
        plan = plan_short(kernel, 32, 32, 2, 49, 49, n_batches, n_heads, H200)
        assert (plan.parts - 1) * plan.steps < n_batches <= plan.parts * plan.steps
        assert min(plan.tiles.block_m, plan.tiles.block_n) >= 49
    many = LEAST_HEADS * H200.sm_count
    assert (
        plan_short(kernel, 32, 32, 2, 49, 49, many - 1, 1, H200)
        == f"{many - 1} heads of all batches are fewer than {many}"
    )
    assert (
        plan_short(kernel, 32, 32, 2, MOST_LENGTH + 1, 49, many, 1, H200)
        == "65 queries and 49 keys are not 1 to 64 each"
    )
    assert plan_short(kernel, 32, 32, 4, 49, 49, many, 1, H200) == "elements have 4 bytes, not 2"
    assert plan_short(kernel, 32, 128, 2, 49, 49, many, 1, H200) == "heads have more than 64 dims"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
class TestOnAGpu:
    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.parametrize("dim", [32, 64])
    def test_the_planned_tiles(self, dim, masked):
        """Windows of 7 x 7, with a bias of each head, and a mask of each window as it is where windows are shifted."""
        given = qkv(49, 49, lead=(600,), heads=4, dim=dim, dtype=BF16, device="cuda")
        (bias,) = tensors((1, 4, 49, 49), dtype=BF16, seed=3)
        options = {"attn_mask": (tensors((600, 1, 49, 49), seed=5)[0] > -1).cuda()} if masked else {}
        assert_attention(*given, bias=bias.cuda(), **options)
