"""Kernels of segments, by a small plan that takes every way through them: as torch's operations in float64."""

import itertools

import pytest
import torch
from conftest import kernels
from products import pairwise

from fused_softmax import explain, segment_log_softmax, segment_logsumexp, segment_softmax
from fused_softmax.core.plan import H200
from fused_softmax.ops.segments import launches, options, plan, reference

pytestmark = kernels
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
FUNCTIONS = {each.__name__: each for each in (segment_softmax, segment_log_softmax, segment_logsumexp)}
named = pytest.mark.parametrize("name", FUNCTIONS)
PIECE, TILE, BLOCK, SEGMENTS = 8, 128, 256, 16
PLAN = {"piece": PIECE, "tile": TILE, "segments": SEGMENTS, "lanes": 2, "num_warps": 1, "block": BLOCK}
# What a program does with segments of these sizes.
WAYS = {
    "of one piece": [1, 8, 3, 0, 2, 7] * 8,
    "of any number of pieces": [3, 17, 0, 1, 40, 2, 127, 128, 5, 16, 65, 30, 8],
    "tiles with empty rows": [7] * 9 + [50, 20, 9] * 7,
    "ends on edges": [4, 4, 120, 128, 124, 4, 128],
    "longer than a tile": [1, 129, 200, 0, 256, 3],
    "a hub": [2, 0, 1000, 1],
    "hubs that meet": [300, 257, 700, 0, 1],
    "hubs from a block's begin": [256, 512, 600],
    "hubs within others": [90, 1, 3, 400, 130, 7, 0, 500, 2, 2],
    "a hub among many": [3] * 40 + [300] + [2] * 60,
    "many empty": [0] * 170 + [5] + [0] * 150,
    "all empty": [0] * 5,
    "no elements and no segments": [],
}
TRAILING = ((), (1,), (3,), (8,), (64,), (70,), (128,))


@pytest.fixture
def small(monkeypatch):
    """The plan that names its ways, and memory in which everything that is not written shows."""
    real, empty = plan.plan_segments, torch.empty
    plans = []

    def planned(*sizes, **how):
        plans.append(real(*sizes, **how, **PLAN))
        return plans[-1]

    def poisoned(*shape, **how):
        made = empty(*shape, **how)
        return made.fill_(1 if made.dtype == torch.bool else float("nan") if made.is_floating_point() else 99)

    monkeypatch.setattr(launches, "plan_segments", planned)
    monkeypatch.setattr(torch, "empty", poisoned)
    return plans


def offsets_of(sizes, dtype=torch.int64):
    return torch.tensor([0, *itertools.accumulate(sizes)], dtype=dtype)


def peaked(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 20


def both(name, x, given, dtype=None, dim=0, scale=None, seed=1):
    """((ours, its gradient), the same of the reference in float64), of an input with the device's."""
    ours, truth = x.clone().requires_grad_(), x.double().requires_grad_()
    with explain() as explained:
        y = FUNCTIONS[name](ours, dim=dim, scale=scale, dtype=dtype, **given)
    assert [each.route for each in explained] == ["kernel"]
    rounded = truth if dtype is None else truth + (x.to(dtype).double() - truth).detach()
    wanted = getattr(reference, name)(rounded, dim=dim, scale=scale, **given)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(y)
    dy = dy.masked_fill(wanted == -float("inf"), 0) if name == "segment_logsumexp" else dy
    if not y.numel():
        return (y.detach(), None), (wanted.detach(), None)
    dx, dtruth = torch.autograd.grad(y, ours, dy)[0], torch.autograd.grad(wanted, truth, dy.double())[0]
    if name == "segment_logsumexp":  # of an empty segment the reference has 0 times NaN
        dtruth = dtruth.nan_to_num(0.0) if not dx.isnan().any() else dtruth
    return (y.detach(), dx), (wanted.detach(), dtruth)


@named
def test_torchs_default_dtype_changes_nothing(name, small, default_dtype, device):
    """Of segments in several parts, whose states lie in memory."""
    sizes = WAYS["hubs that meet"]
    x, offsets = peaked(sum(sizes), 3).to(device).requires_grad_(), offsets_of(sizes).to(device)
    dy = torch.ones_like(FUNCTIONS[name](x, offsets))

    def call():
        y = FUNCTIONS[name](x, offsets)
        return y, *torch.autograd.grad(y, x, dy)

    wanted = call()
    default_dtype(BF16)
    assert all(torch.equal(*each) for each in zip(call(), wanted, strict=True))


def assert_alike(found, wanted, rtol=2e-5, atol=2e-5):
    for one, other in zip(found, wanted, strict=True):
        if one is not None:
            torch.testing.assert_close(one.double(), other, rtol=rtol, atol=atol, equal_nan=True)


def given_of(sizes, how, device, seed=3):
    if how != "unsorted":
        return {"offsets": offsets_of(sizes, torch.int32 if how == "int32" else torch.int64).to(device)}
    index = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes, dtype=torch.int64))
    index = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(seed))]
    return {"index": index.to(device), "n_segments": len(sizes)}


@pairwise(("name", "way"))
@named
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("trailing", TRAILING, ids=str)
@pytest.mark.parametrize("how", ["offsets", "int32", "unsorted"])
@pytest.mark.parametrize("scale", [None, -0.3])
@pytest.mark.parametrize("singles", [False, True])
def test_results_and_gradients_by_every_way(name, way, trailing, how, scale, singles, small, monkeypatch, device):
    monkeypatch.setitem(PLAN, "singles", singles)
    sizes = WAYS[way]
    x = peaked(sum(sizes), *trailing).to(device)
    assert_alike(*both(name, x, given_of(sizes, how, device), scale=scale))
    for each in small:
        assert (each.deep * each.wide, each.pieces, each.segments) == (PIECE, TILE // PIECE, SEGMENTS)
        assert (each.singles, each.block) == (singles, BLOCK)


def test_the_ways_are_what_they_are_called():
    longest = {way: max(sizes, default=0) for way, sizes in WAYS.items()}
    assert longest["of one piece"] == PIECE < longest["of any number of pieces"] == TILE
    assert TILE < longest["longer than a tile"] <= BLOCK
    assert all(longest[way] > BLOCK for way in WAYS if "hub" in way)
    assert len(WAYS["many empty"]) > 3 * SEGMENTS


@named
@pytest.mark.parametrize("shape", [(3, 300), (2, 300, 5), (2, 2, 300), (1, 300, 1, 9)], ids=str)
def test_any_dim(name, shape, small, device):
    dim = shape.index(300)
    assert_alike(*both(name, peaked(*shape).to(device), given_of([7, 0, 280, 1, 12], "offsets", device), dim=dim))
    assert small[0].n_groups == torch.Size(shape[:dim]).numel()


@pairwise()
@named
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("of", ["input", "result"])
@pytest.mark.parametrize("trailing", [(), (4,)], ids=str)
def test_dtypes(name, dtype, of, trailing, small, device):
    """The gradient is made of the rounded result, as torch's."""
    sizes = [3, 100, 0, 40, 300, 1]
    x = peaked(sum(sizes), *trailing).to(device) / 10
    given = given_of(sizes, "offsets", device)
    eps = torch.finfo(dtype).eps
    found, wanted = both(name, x.to(dtype) if of == "input" else x, given, dtype if of == "result" else None)
    assert found[0].dtype == dtype
    assert found[1].dtype == (dtype if of == "input" else FP32)
    assert_alike(found[:1], wanted[:1], eps, 1e-6)
    assert_alike(found[1:], wanted[1:], 2 * eps, eps if name == "segment_softmax" else 8 * eps)


@named
def test_special_values(name, small, device):
    inf, nan = float("inf"), float("nan")
    x = peaked(1100)
    x[[5, 140, 300, 700]] = torch.tensor([inf, nan, -inf, inf])
    x[7:9], x[400:620] = -inf, -inf
    sizes = [6, 1, 2, 20, 5, 110, 156, 0, 300, 20, 80, 400]  # of which some are all -inf
    assert sum(sizes) == 1100
    for way in ("offsets", "unsorted"):
        y = FUNCTIONS[name](x.to(device), **given_of(sizes, way, device))
        wanted = getattr(reference, name)(x.double().to(device), **given_of(sizes, way, device))
        torch.testing.assert_close(y.double(), wanted, rtol=2e-5, atol=2e-5, equal_nan=True)


BAD = {
    "fall among hubs": [0, 300, 200, 900, 900, 1000],
    "fall far from where it matters": [0, 3, 7, 500, 501, 500, 700, 1000],
    "begin past 0": [4, 400, 500, 1000],
    "end before n": [0, 200, 600],
    "end past n, at a hub": [0, 600, 2**40],
    "below 0": [0, -5, 7, 130, 1000],
    "far before others": [0, 20, 700, *range(60, 1000, 20), 1000],
    "all at once": [9, 2**40, -3, 500, 400, 450, 999],
}


@named
@pytest.mark.parametrize("bad", BAD)
def test_wrong_offsets_spoil_their_segments_alone(name, bad, small, monkeypatch, device):
    monkeypatch.setattr(options, "checks_values", lambda *_: False)  # nobody looks at values
    offsets = torch.tensor(BAD[bad], device=device)
    x = peaked(1000, 2).to(device).requires_grad_()
    truth = x.detach().double().requires_grad_()
    y, wanted = FUNCTIONS[name](x, offsets), getattr(reference, name)(truth, offsets)
    assert wanted.isnan().any()
    dy = torch.linspace(-1, 1, y.numel(), device=device).view(y.shape)
    dx, dtruth = torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(wanted, truth, dy.double())[0]
    assert_alike((y.detach(), dx), (wanted.detach(), dtruth))


@named
def test_an_index_of_no_segment_is_nan_alone(name, small, monkeypatch, device):
    """Also where these are a hub, are read twice, or have a row of a tile."""
    monkeypatch.setattr(options, "checks_values", lambda *_: False)
    index = torch.arange(900) % 7
    index[index == 3], index[index == 5] = 9, -1
    index[:400] = 12
    for some in (index, index[:300], index[200:500], index[350:500]):
        x = peaked(len(some), 3).to(device)
        found, wanted = both(name, x, {"index": some.to(device), "n_segments": 7})
        assert_alike(found[:1], wanted[:1])
        away = (some < 0) | (some >= 7)
        assert torch.equal(found[1].isnan().any(1).cpu(), away)
        assert_alike((found[1][~away.to(device)],), (wanted[1][~away.to(device)],))


@named
def test_what_lies_beside_a_segment_does_not_change_its_bits(name, small, device):
    """Of a segment of one piece, at any place of a tile."""
    x = peaked(PIECE, 3).to(device) / 20  # of which no element is all of a sum
    alone = FUNCTIONS[name](x, torch.tensor([0, PIECE], device=device))
    for before in (1, 3, 30, 31, 64, 125):
        around = torch.cat([peaked(before, 3, seed=5).to(device), x, peaked(9, 3, seed=6).to(device)])
        offsets = offsets_of([before, PIECE, 4, 5]).to(device)
        y = FUNCTIONS[name](around, offsets)
        assert torch.equal(y[1:2] if name == "segment_logsumexp" else y[before : before + PIECE], alone)


@named
def test_equal_bits_in_every_run(name, small, device):
    sizes = WAYS["hubs within others"]
    x = peaked(sum(sizes), 2).to(device)
    runs = [both(name, x, given_of(sizes, "unsorted", device))[0] for _ in range(2)]
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)


@named
def test_what_a_compiler_traces_is_one_operator_that_runs_the_kernels(name, small, device):
    x = peaked(200, 2).to(device)
    for how in ("offsets", "unsorted"):
        given = given_of([3, 0, 150, 47], how, device)
        function = torch.compile(FUNCTIONS[name], backend="aot_eager", fullgraph=True)
        leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        with explain() as explained:
            y = function(leaf, **given)
            torch.autograd.grad(y.square().nan_to_num(0, 0, 0).sum(), leaf)
        assert {each.route for each in explained} == {"operator"}
        assert torch.equal(y, FUNCTIONS[name](other, **given))


def test_the_plans_own_kernels_are_right_too(device):
    """By the plan for these sizes, whose tile holds them all."""
    sizes = [3, 500, 0, 64, 65, 1]
    for name in FUNCTIONS:
        assert_alike(*both(name, peaked(sum(sizes), 8).to(device), given_of(sizes, "offsets", device)))


def test_plans_cover_all_sizes():
    for n, n_segments, outer, inner, itemsize in itertools.product(
        (1, 1000, 2**27, 2**33), (1, 300, 2**26), (1, 3), (1, 3, 8, 64, 1000), (2, 4)
    ):
        found = plan.plan_segments(n, n_segments, outer, inner, itemsize, H200)
        assert found.block >= found.pieces * found.deep * found.wide
        assert found.n_bunches * found.segments >= n_segments
        assert found.n_blocks * found.block >= n or n <= found.block
        if n * outer * inner * itemsize < 2**38:  # which a GPU has
            assert found.n_groups * (found.n_bunches + found.n_blocks) < 2**31
        assert found.pieces * found.deep * found.wide * found.cols <= 2**17  # elements of a tensor that Triton takes
        assert found.pieces == found.segments or not found.singles
        assert found.n_menders <= found.n_finishers <= max(found.n_menders, found.n_blocks)


@pytest.mark.gpu
@named
def test_a_captured_graph_computes_anew(name):
    sizes = [5, 3000, 0, 200_000, 1]
    x, offsets = peaked(sum(sizes)).cuda().requires_grad_(), offsets_of(sizes).cuda()

    def call():
        y = FUNCTIONS[name](x, offsets)
        return y, torch.autograd.grad(y.masked_fill(y.isinf(), 0).sum(), x)[0]

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call()
    with torch.no_grad():
        x.copy_(peaked(sum(sizes), seed=8))
    graph.replay()
    for one, other in zip(made, call(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_positions_past_2_to_31():
    n = 2**31 + 2**20
    x = torch.zeros(n, dtype=BF16, device="cuda")
    x[-3:] = torch.tensor([1.0, 2.0, 3.0])
    offsets = torch.tensor([0, 2**31 + 5, n - 3, n], device="cuda")
    y = segment_softmax(x, offsets)
    assert torch.equal(y[-3:], torch.softmax(x[-3:], 0))
    assert y[:5].tolist() == [1 / (2**31 + 5)] * 5 or (y[:5].float() * 2**31 - 1).abs().max() < 0.01
    assert segment_logsumexp(x.view(-1, 1), offsets, dtype=FP32)[0].item() == pytest.approx(21.4876, abs=1e-3)
