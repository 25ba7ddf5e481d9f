"""attention of few queries over many keys: parts of the keys that merge, every option, the same bits, and tickets."""

import os

import pytest
import torch
from attention_cases import BF16, FP16, FP32, PLANS, assert_attention, qkv, tensors

import fused_softmax
from fused_softmax.core.plan import H200
from fused_softmax.ops.attention import call as attention_call
from fused_softmax.ops.attention import reference as reference_attention
from fused_softmax.ops.attention import special as attention_decode
from fused_softmax.ops.attention.plan.tiles import LEAST_KEYS, DecodePlan, Tiles, plan_decode

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
needs_kernels = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="without a GPU or the interpreter, torch computes"
)
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.fixture(params=[3])
def parts(request, monkeypatch):
    """So many parts of whatever has few rows, and tiles of which they have several."""
    taken = []

    def plan(head_dim, value_dim, itemsize, n_queries, group, *_):
        block_r = 1 << (n_queries * group - 1).bit_length()
        taken.append(n_queries * group)
        return DecodePlan(Tiles(max(16, block_r), 16, 4, 1), request.param, block_r, chunk=2)

    monkeypatch.setattr(attention_decode, "plan_decode", plan)
    monkeypatch.setattr(attention_call, "plan_attention", lambda *_: PLANS["square"])
    yield request.param
    assert taken


@needs_kernels
@pytest.mark.parametrize("parts", [1, 2, 3, 9], indirect=True)
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
def test_parts(parts, dtype, device):
    """As many as there are tiles, fewer, and more; and rows that no power of two holds exactly."""
    assert_attention(*qkv(1, 70, lead=(1,), dim=20, value_dim=24, dtype=dtype, device=device))
    assert_attention(*qkv(2, 33, lead=(1,), heads=3, key_heads=1, dtype=dtype, device=device), enable_gqa=True)


@needs_kernels
@pytest.mark.parametrize("n_keys", [0, 1, 15, 16, 17, 48, 49])
def test_lengths(parts, n_keys, device):
    assert_attention(*qkv(1, n_keys, lead=(1,), heads=2, key_heads=1, device=device), enable_gqa=True)


OPTIONS = {
    "causal": {"is_causal": True, "causal_align": "bottom_right"},
    "top left": {"is_causal": True},
    "window": {"window": (20, 0), "causal_align": "bottom_right"},
    "left": {"window": (30, None), "causal_align": "bottom_right"},
    "right": {"window": (None, 7)},
    "softcap": {"softcap": 2.0},
    "negative scale": {"scale": -0.5},
}


@needs_kernels
@pytest.mark.parametrize("option", OPTIONS)
def test_options(parts, option, device):
    """Of heads that share keys, with more than one query, the rows of a tile are queries of several heads."""
    given = qkv(3, 50, heads=4, key_heads=2, device=device)
    assert_attention(*given, **OPTIONS[option], enable_gqa=True)


@needs_kernels
@pytest.mark.parametrize("shape", [(50,), (2, 1, 1, 50), (1, 4, 1, 50), (1, 1, 3, 1), (2, 4, 3, 50)], ids=str)
def test_biases_and_masks(parts, shape, device):
    (bias,) = (each.to(device) for each in tensors(shape, seed=3))
    given = qkv(3, 50, heads=4, key_heads=2, device=device)
    assert_attention(*given, bias=bias, attn_mask=bias > -1, enable_gqa=True)
    assert_attention(*given, attn_mask=bias, enable_gqa=True)


@needs_kernels
def test_everything_together(parts, device):
    bias, mask, sinks = (each.to(device) for each in tensors((2, 1, 3, 50), (1, 4, 1, 50), (4,), seed=3))
    sinks[1] = -float("inf")
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)
    given = qkv(3, 50, heads=4, key_heads=2, dim=20, value_dim=12, device=device)
    assert_attention(*given, attn_mask=mask, bias=bias, sinks=sinks, alibi_slopes=slopes, softcap=5.0, window=(30, 8),
                     enable_gqa=True, causal_align="bottom_right")  # fmt: skip


@needs_kernels
def test_parts_and_rows_that_see_nothing(parts, device):
    """Of one part, of all parts, and of a row with a sink."""
    keep = torch.ones(3, 50, dtype=torch.bool, device=device)
    keep[0, 20:], keep[1] = False, False
    given = qkv(3, 50, device=device)
    found = assert_attention(*given, attn_mask=keep)
    assert (found["lse"][..., 1] == -float("inf")).all()
    assert (found["output"][..., 1, :] == 0).all()
    assert_attention(*given, attn_mask=keep, sinks=torch.zeros(2, device=device))


@needs_kernels
def test_layouts_and_poison(parts, device):
    """[batch, length, heads, dim], within tensors full of NaN."""
    plain = qkv(2, 40, heads=4, key_heads=2, device=device)
    expected = assert_attention(*plain, enable_gqa=True)

    def within(t):
        big = torch.full((t.shape[0], t.shape[2] + 2, t.shape[1] + 1, t.shape[3] + 3), float("nan"), device=device)
        return big[:, 1:-1, 1:, 1:-2].transpose(1, 2).copy_(t)

    found = assert_attention(*[within(each) for each in plain], enable_gqa=True)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@needs_kernels
def test_the_same_bits_and_tickets_that_start_anew(parts, device):
    given = qkv(1, 70, heads=4, key_heads=2, dtype=BF16, device=device)
    found = [fused_softmax.attention(*given, enable_gqa=True, return_lse=True) for _ in range(3)]
    assert all(torch.equal(each.output, found[0].output) and torch.equal(each.lse, found[0].lse) for each in found)


@needs_kernels
def test_tickets_are_0_again(parts, device, monkeypatch):
    """At the end of a launch, for the next one takes them as they are."""
    prepare, tickets = attention_call.Call.prepare, []

    def spied(self, *given, **fields):
        launch = prepare(self, *given, **fields)
        return launch._replace(run=lambda *tensors: launch.run(*tensors) or tickets.append(tensors[-1]))

    monkeypatch.setattr(attention_call.Call, "prepare", spied)
    fused_softmax.attention(*qkv(1, 70, heads=4, key_heads=2, device=device), enable_gqa=True)
    assert len(tickets) == 1
    assert tickets[0].dtype == torch.int64
    assert not tickets[0].any()


SEEN = {
    "all": ({}, 50),
    "causal": ({"is_causal": True, "causal_align": "bottom_right"}, 50),
    "top left": ({"is_causal": True}, 3),
    "window": ({"window": (20, 0), "causal_align": "bottom_right"}, 23),
    "left": ({"window": (30, None), "causal_align": "bottom_right"}, 33),
    "right": ({"window": (None, 7)}, 10),
}


@needs_kernels
@pytest.mark.parametrize("option", SEEN)
def test_plans_are_of_the_keys_that_are_seen(option, device, monkeypatch):
    """By some of three queries, of 50 keys."""
    planned = []
    monkeypatch.setattr(attention_decode, "plan_decode", lambda *given: planned.append(given[6]) or "no plan")
    options, seen = SEEN[option]
    fused_softmax.attention(*qkv(3, 50, lead=(1,), device=device), **options)
    assert planned == [seen]


def test_statistics_are_for_the_plain_kernel(device, monkeypatch):
    taken = []
    monkeypatch.setattr(attention_decode, "plan_decode", lambda *given: taken.append(given) or "no plan")
    given = qkv(1, 50, lead=(1,), device=device)
    for names in ("entropy", "row_max"):
        fused_softmax.attention(*given, return_stats=names)
    assert not taken
    fused_softmax.attention(*given, return_stats="column_sums")  # whose kernel reads lse
    assert len(taken) == 1


@pytest.mark.parametrize("n_heads", [1, 8, 32, 128, 1000])
@pytest.mark.parametrize("n_keys", [LEAST_KEYS, 1000, 8192, 65536])
@pytest.mark.parametrize("group", [1, 4, 16])
def test_plans(group, n_keys, n_heads):
    """Every part has keys; together they have all; merging reads no more than a part does."""
    plan = plan_decode(128, 128, 2, 1, group, n_heads, n_keys, H200)
    if isinstance(plan, str):
        assert group == 1
        return
    tiles = -(-n_keys // plan.tiles.block_n)
    of_each = -(-tiles // plan.parts)
    assert (plan.parts - 1) * of_each < tiles <= plan.parts * of_each
    assert plan.parts == 1 or 4 * plan.parts * plan.block_r * 128 <= 2 * 256 * n_keys / plan.parts + 512
    assert plan.lanes % plan.chunk == 0
    assert plan_decode(128, 128, 2, 65, 1, n_heads, n_keys, H200) == "65 rows share a head of keys, more than 64"
    assert "keys are seen, fewer than" in plan_decode(128, 128, 2, 1, group, n_heads, LEAST_KEYS - 1, H200)


def test_tiles_of_dims_that_differ():
    """A tile's sides are powers of two, whatever the dims of keys and values add up to."""
    for dims in ((16, 256), (64, 128), (96, 40)):
        plan = plan_decode(*dims, 2, 1, 4, 8, 8192, H200)
        assert plan.tiles.block_n in (16, 32, 64, 128)


def decoded(n_batches, n_keys, seed=0, heads=8, key_heads=2, n_queries=1):
    q, k, v = qkv(n_queries, n_keys, lead=(n_batches,), heads=heads, key_heads=key_heads, dim=64, dtype=BF16,
                  device="cuda")  # fmt: skip
    return (q, k, v), fused_softmax.attention(q.float(), k.float(), v.float(), enable_gqa=True)


class TestOnAGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("heads", [(32, 8), (16, 1), (4, 4)], ids=str)
    @pytest.mark.parametrize("n_keys", [257, 1000, 8192])
    @pytest.mark.parametrize("dim", [64, 96, 128, 256])
    def test_the_planned_parts(self, dim, n_keys, heads):
        """No further from float64 than twice what torch's operations in bf16 are."""
        q, k, v = qkv(2, n_keys, heads=heads[0], key_heads=heads[1], dim=dim, dtype=BF16, device="cuda")
        options = {"is_causal": True, "causal_align": "bottom_right", "enable_gqa": True, "return_lse": True}
        found = fused_softmax.attention(q, k, v, **options)
        exact = reference_attention.attention(q.double(), k.double(), v.double(), **options)
        theirs = reference_attention.attention(q, k, v, **options, arithmetic=BF16)
        error, allowed = ((each.output.double() - exact.output).abs().max() for each in (found, theirs))
        assert error <= 2 * allowed
        torch.testing.assert_close(found.lse.double(), exact.lse, rtol=1e-4, atol=1e-4)

    def test_a_graph_is_replayed(self):
        given, exact = decoded(2, 5000)
        fused_softmax.attention(*given, enable_gqa=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = fused_softmax.attention(*given, enable_gqa=True)
        first = None
        for _ in range(5):
            found.fill_(float("nan"))
            graph.replay()
            torch.testing.assert_close(found.float(), exact, rtol=2e-2, atol=2e-2)
            first = found.clone() if first is None else first
            assert torch.equal(found, first)

    def test_ten_thousand_launches_on_two_streams(self):
        """Of shapes whose groups and parts differ, side by side: each has the bits that it has alone."""
        shapes = [(1, 300), (3, 1000), (1, 5000), (7, 257), (2, 2048), (16, 700), (1, 20000)]
        cases = [decoded(*shape)[0] for shape in shapes]
        alone = [fused_softmax.attention(*given, enable_gqa=True) for given in cases]
        streams = torch.cuda.Stream(), torch.cuda.Stream()
        wrong = torch.zeros(2, dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        for i in range(5000):
            for j, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    at = (i * (j + 1) + i // 7) % len(cases)
                    found = fused_softmax.attention(*cases[at], enable_gqa=True)
                    if i % 10 < 2:
                        wrong[j] += (found != alone[at]).sum()
        torch.cuda.synchronize()
        assert wrong.tolist() == [0, 0]
