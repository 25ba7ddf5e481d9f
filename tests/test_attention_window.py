"""attention of narrow windows: which calls their kernel for sm_90 takes, and its results held to float64 on one."""

import pytest
import torch
from attention_cases import BF16, FP16, assert_attention
from hopper_cases import assert_near, given, on_hopper, watched

import fused_softmax
from fused_softmax.core.plan import H200, Device
from fused_softmax.ops.attention.kernels.hopper.spec import ROWS, WindowSpec
from fused_softmax.ops.attention.plan import hopper as attention_window
from fused_softmax.ops.attention.plan import hopper as plan_hopper
from fused_softmax.ops.attention.plan.hopper import plan_window
from fused_softmax.ops.attention.plan.tiles import plan_attention

WINDOWS = [(127, 0), (128, 0), (0, 0), (63, 0), (64, 0), (30, 33), (0, 64), (3, 100)]


@pytest.fixture
def taken(monkeypatch):
    """Of each call that reached the windows' kernel, however few its tiles: None where it went elsewhere."""
    monkeypatch.setattr(attention_window, "LEAST_TILES", {64: 0, 128: 0})
    monkeypatch.setattr(attention_window, "LEAST_QUERIES", 0)
    return watched(monkeypatch, "window", "the forward pass")


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("dim", [32, 64, 72, 128])
@pytest.mark.parametrize("lengths", [(200, 200), (257, 130), (70, 500), (1000, 1000), (384, 3)], ids=str)
def test_forward(taken, lengths, dim, window, align):
    """Some queries see no key, and heads of queries share keys."""
    options = {"window": window, "causal_align": align}
    assert_near(*given(*lengths, dim, BF16, heads=6, key_heads=2), **options)
    sinks = torch.randn(4, device="cuda")
    assert_near(*given(*lengths, dim, FP16, heads=4), **options, sinks=sinks)
    assert len(taken) == 2
    assert None not in taken


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("heads", [(16, 8), (16, 2), (15, 5), (7, 1)], ids=str)
def test_more_tiles_than_programs(taken, heads, sinks):
    """Programs go on to other queries and other heads of keys; by the plan each has one head, or several."""
    q, k, v = given(2500, 2500, 64, BF16, *heads)
    assert_near(q, k, v, window=(127, 0), **({"sinks": torch.randn(heads[0], device="cuda")} if sinks else {}))
    assert None not in taken


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("scale", [4.0, 1e-3])
def test_peaked_and_equal_scores(taken, scale):
    assert_near(*given(600, 600, 64, BF16, 4, 2), window=(100, 20), scale=scale)
    assert None not in taken


@pytest.mark.gpu
@on_hopper
def test_high_and_low_sinks(taken):
    """Rows that see no key have a lse of their sink; a high sink takes nearly all, one of -inf nothing."""
    q, k, v = given(300, 60, 64, BF16, 4, 2)
    sinks = torch.tensor([1.5, -float("inf"), 200.0, 0.0], device="cuda")
    assert_near(q, k, v, window=(127, 0), sinks=sinks)
    assert None not in taken


@pytest.mark.gpu
@on_hopper
def test_dims_of_values_that_differ(taken):
    q, k, _ = given(300, 300, 64, BF16, 4, 2)
    for value_dim in (32, 40, 128):
        assert_near(q, k, given(300, 300, value_dim, BF16, 4, 2)[2], window=(63, 0))
    assert None not in taken


@pytest.mark.gpu
@on_hopper
def test_gradients_of_what_it_computed(taken):
    q, k, v = given(500, 500, 64, BF16, 4, 2)
    sinks = torch.randn(4, device="cuda")
    assert_attention(q, k, v, enable_gqa=True, window=(127, 0), sinks=sinks)
    assert None not in taken


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    "beside", ["softcap", "bias", "mask", "alibi", "entropy", "fp32", "wide", "one side", "own keys"]
)  # fmt: skip
def test_what_goes_elsewhere(taken, beside):
    dtype = torch.float32 if beside == "fp32" else BF16
    q, k, v = given(300, 300, 64, dtype, 4, 1 if beside != "own keys" else 4)
    window = {"wide": (140, 0), "one side": (10, None)}.get(beside, (127, 0))
    more = {
        "softcap": {"softcap": 5.0},
        "bias": {"bias": torch.zeros(300, 300, device="cuda", dtype=dtype)},
        "mask": {"attn_mask": torch.ones(300, 300, device="cuda", dtype=torch.bool)},
        "alibi": {"alibi_slopes": torch.ones(4, device="cuda")},
        "entropy": {"return_stats": "entropy"},
    }
    fused_softmax.attention(q, k, v, window=window, enable_gqa=True, **more.get(beside, {}))
    assert set(taken) == {None}


def plan(left=127, right=0, dim=64, value_dim=64, itemsize=2, n_queries=8192, n_heads=128, group=8, device=H200):
    return plan_window(dim, value_dim, itemsize, n_queries, n_heads, group, left, right, device)


@pytest.mark.parametrize(
    ("left", "right", "cuts"),
    [(127, 0, (3, 1)), (128, 0, (3, 1)), (126, 0, (3, 2)), (0, 0, (1, 1)), (64, 0, (2, 1)), (0, 63, (2, 1)),
     (63, 66, (4, 2))],
)  # fmt: skip
def test_tiles_that_the_window_cuts(left, right, cuts, monkeypatch):
    """Of 64 queries and the tiles of keys that they see, by looking at each pair."""
    monkeypatch.setattr(attention_window, "MOST_PIECES", 4)
    found = plan(left, right)
    seen = torch.zeros(64, found.pieces * 64, dtype=torch.bool)
    for query in range(64):
        own = query + found.pieces * 64 - 64 - right  # the last query sees the last key
        seen[query, max(0, own - left) : own + right + 1] = True
    tiles = seen.split(64, dim=1)
    assert all(tile.any() for tile in tiles)
    assert all(tile.all() for tile in tiles[found.cut_left : -1])
    assert (found.pieces, found.cut_left) == cuts


def test_plan_and_kernel_mean_the_same_tiles():
    assert (WindowSpec.consumers, ROWS) == (plan_hopper.CONSUMERS, plan_hopper.ROWS)


@pytest.mark.parametrize("window", [1, 64, 65, 500])
def test_windows_that_other_kernels_take_have_tiles_of_short_reach(window):
    """Those of 64 keys and fewer once had the tiles of long sequences."""
    wide = plan_attention(64, 64, 2, 8192, 8192, H200, 1, window=513).forward
    assert plan_attention(64, 64, 2, 8192, 8192, H200, 1, window=window).forward.block_n < wide.block_n


def test_heads_that_a_program_goes_through():
    assert plan().span == 8
    assert plan(n_queries=1536).span == 4  # 384 tiles are more equal shares of 132 programs than 192
    assert plan(group=1, left=60).span == 1
    assert plan(n_heads=2 * 63, group=63, n_queries=1024).span == 9  # 8 would be less, but 63 heads have no such parts


@pytest.mark.parametrize("n_queries", [1, 4, 129])
@pytest.mark.parametrize("dim", [64, 128])
def test_few_queries_of_many_heads_go_elsewhere(dim, n_queries):
    """A step of decoding 128 sequences: each tile would hold one query of a head."""
    assert isinstance(plan(n_queries=n_queries, n_heads=128 * 64, dim=dim), str)


def test_what_the_plan_leaves_to_other_kernels():
    assert not isinstance(plan(), str)
    assert isinstance(plan(n_queries=1024, n_heads=64), str)
    assert not isinstance(plan(n_queries=1024, n_heads=64, dim=128), str)
    assert isinstance(plan(n_queries=1024, n_heads=16, dim=128), str)
    assert isinstance(plan(group=1), str)
    assert not isinstance(plan(group=1, dim=128), str)
    assert isinstance(plan(left=None), str)
    assert isinstance(plan(right=None), str)
    assert isinstance(plan(left=200), str)
    assert isinstance(plan(dim=256), str)
    assert isinstance(plan(dim=60), str)
    assert isinstance(plan(itemsize=4), str)
    assert isinstance(plan(device=Device("NVIDIA B200", "cuda", (10, 0), 148)), str)
