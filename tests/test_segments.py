"""Softmax of segments: each as torch's of its elements alone, in float64; gradients, bad offsets, nested tensors."""

import itertools
import os
import re
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from conftest import kernels
from products import pairwise
from torch import Tensor

import fused_softmax
from fused_softmax import log_softmax, logsumexp, segment_log_softmax, segment_logsumexp, segment_softmax, softmax
from fused_softmax.core import route as core_route
from fused_softmax.ops.segments import options, reference, segments

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
EPS = {FP32: 2**-23, FP16: 2**-10, BF16: 2**-7, FP64: 2**-52}
OF_ELEMENTS = {segment_softmax: torch.softmax, segment_log_softmax: torch.log_softmax}
ALL = (*OF_ELEMENTS, segment_logsumexp)
named = pytest.mark.parametrize("function", ALL, ids=lambda each: each.__name__)
PIECE = reference.PIECE
SIZES = {
    "one": [7],
    "one element": [1],
    "all empty": [0, 0, 0],
    "no elements and no segments": [],
    "alternating 0 and 1": [0, 1] * 20,
    "one at each end": [1, 0, 5, 0, 0, 1],
    "ends on edges of pieces": [PIECE, 1, PIECE - 1, 2 * PIECE, 0, PIECE + 1],
    "a hub": [1, 1, 0, 9 * PIECE + 3, 1, 2, 1],
    "mixed": [3, 0, 17, 1, 40, 2, 2, 0],
}


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"


@pytest.fixture
def on_a_device(monkeypatch):
    """What a CPU tensor stands for: nobody looks at its values."""
    monkeypatch.setattr(options, "checks_values", lambda *_: False)


def peaked(*shape, dtype=FP32, seed=0):
    """Of which a wrong maximum overflows, and a wrong segment is seen."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=FP64) * 30).to(dtype)


def offsets_of(sizes, dtype=torch.int64):
    return torch.tensor([0, *itertools.accumulate(sizes)], dtype=dtype)


def index_of(sizes, dtype=torch.int64, seed=None):
    index = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes, dtype=torch.int64)).to(dtype)
    return index if seed is None else index[torch.randperm(len(index), generator=torch.Generator().manual_seed(seed))]


def by_loop(function, x: Tensor, index: Tensor, n_segments: int, dim=0, scale=1.0) -> Tensor:
    """Segment after segment, in float64."""
    x = x.to(FP64).movedim(dim, 0) * scale
    if function is segment_logsumexp:
        rows = [torch.logsumexp(x[index == i], 0) for i in range(n_segments)]
        return (torch.stack(rows) if rows else x[:0]).movedim(0, dim)
    y = torch.full_like(x, 7.0)
    for i in range(n_segments):
        y[index == i] = OF_ELEMENTS[function](x[index == i], 0)
    return y.movedim(0, dim)


def assert_close(found, wanted, dtype=None):
    """One rounding of the result, and those of scores up to 150 in the arithmetic."""
    dtype = dtype or found.dtype
    assert found.dtype == dtype
    assert found.is_contiguous()
    of_scores = 150 * EPS[FP64 if dtype == FP64 else FP32]
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    torch.testing.assert_close(
        found.to(FP64).cpu(), wanted, rtol=EPS[dtype] + of_scores, atol=of_scores + least, equal_nan=True
    )


@pairwise()
@named
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("way", ["offsets", "offsets of 32 bits", "index", "index of 32 bits", "unsorted index"])
def test_each_segment_is_as_alone(function, sizes, dtype, way, device):
    x = peaked(sum(sizes), 3, dtype=dtype)
    seed = 1 if way == "unsorted index" else None
    index = index_of(sizes, torch.int32 if "32" in way else torch.int64, seed)
    wanted = by_loop(function, x, index, len(sizes))
    if way.startswith("offsets"):
        given = {"offsets": offsets_of(sizes, torch.int32 if "32" in way else torch.int64).to(device)}
    else:
        given = {"index": index.to(device), "n_segments": len(sizes)}
    assert_close(function(x.to(device), **given), wanted, dtype)


@named
@pytest.mark.parametrize("shape", [(9,), (9, 1), (2, 9), (2, 9, 4), (3, 2, 9), (9, 2, 3), (9, 0), (0, 9)], ids=str)
def test_any_dim_with_leading_and_trailing_sizes(function, shape, device):
    dim, sizes = shape.index(9), [4, 0, 5]
    x, scale = peaked(*shape), -0.3
    wanted = by_loop(function, x, index_of(sizes), 3, dim, scale)
    for at in (dim, dim - len(shape)):
        assert_close(function(x.to(device), offsets_of(sizes).to(device), dim=at, scale=scale), wanted)
    strided = x.to(device).transpose(0, -1).contiguous().transpose(0, -1)
    assert_close(function(strided, offsets_of(sizes).to(device), dim=dim, scale=scale), wanted)


@pytest.mark.parametrize("function", OF_ELEMENTS, ids=lambda each: each.__name__)
def test_an_index_alone_needs_no_number_of_segments(function, device):
    x, index = peaked(8, 2), torch.tensor([5, 900, 5, 2**40, 0, 900, 5, 0])
    wanted = by_loop(function, x, index.unique(return_inverse=True)[1], 4)
    assert_close(function(x.to(device), index=index.to(device)), wanted)


@named
@pytest.mark.parametrize("dtype", [FP32, FP64], ids=str)
def test_special_values_do_in_a_segment_what_they_do_in_a_row(function, dtype, device):
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([0, 1, inf, 1, -inf, -inf, 2, -inf, nan, 1, -inf, inf, inf, -1e30, 1e30, 3], dtype=dtype)
    sizes = [2, 2, 2, 2, 3, 2, 2, 1]
    wanted = by_loop(function, x, index_of(sizes), len(sizes))
    assert_close(function(x.to(device), offsets_of(sizes).to(device)), wanted)
    at = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    given = {"index": index_of(sizes)[at].to(device), "n_segments": len(sizes)}
    found = function(x[at].to(device), **given)
    assert_close(found, wanted if function is segment_logsumexp else wanted[at])


@named
def test_the_dtype_is_of_the_result_and_the_input_is_rounded_to_it(function, device):
    x, sizes = peaked(9, 2), [4, 5]
    wanted = by_loop(function, x.to(FP16), index_of(sizes), 2)
    assert_close(function(x.to(device), offsets_of(sizes).to(device), dtype=FP16), wanted, FP16)
    wanted = by_loop(function, x.to(torch.int32), index_of(sizes), 2)
    assert_close(function(x.to(torch.int32).to(device), offsets_of(sizes).to(device), dtype=FP32), wanted, FP32)


def long_ways(device):
    """Torch's operations in the dtype of a call, and on a GPU the kernels: interpreted, they take 20 seconds."""
    return [True, False] if device == "cuda" else [True]


def test_a_long_segment_of_equals_sums_to_one(device):
    """A sum in float32, one after another, stops at 2**24 ones."""
    n = 2**24 + 2**21
    x, offsets = torch.zeros(n, device=device), torch.tensor([0, n], device=device)
    for composed in long_ways(device):
        lse = reference.segment_logsumexp(x, offsets, arithmetic=FP32) if composed else segment_logsumexp(x, offsets)
        assert lse.item() == pytest.approx(torch.tensor(float(n)).log().item(), abs=2e-6)


def test_a_long_segment_is_as_exact_as_a_short_one(device):
    """A sum of four million in float32, one after another, is off by far more than a rounding."""
    x = torch.rand(2**22, generator=torch.Generator().manual_seed(0)).to(device)
    offsets, wanted = torch.tensor([0, len(x)], device=device), torch.softmax(x.double(), 0)
    for composed in long_ways(device):
        y = reference.segment_softmax(x, offsets, arithmetic=FP32) if composed else segment_softmax(x, offsets)
        torch.testing.assert_close(y.double(), wanted, rtol=(2 if composed else 4) * EPS[FP32], atol=0)


@pytest.mark.gpu
@named
@pytest.mark.parametrize("way", ["offsets", "index"])
def test_nothing_waits_for_the_device(function, way):
    """Nor does a captured graph, or a backward pass."""
    x, index = peaked(5000, 4).cuda().requires_grad_(), index_of([5, 0, 4995], seed=1).cuda()
    given = {"offsets": offsets_of([5, 0, 4995]).cuda()} if way == "offsets" else {"index": index, "n_segments": 3}
    torch.autograd.grad(function(x, **given).sum(), x)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(function(x, **given).sum(), x)
    finally:
        torch.cuda.set_sync_debug_mode(before)


@named
def test_padding_of_others_is_not_read(function, device):
    """Elements of another segment do not spoil one, whatever they are."""
    x, sizes = peaked(40, 2), [10, 20, 10]
    clean = function(x.to(device), offsets_of(sizes).to(device))
    x[10:30] = float("nan")
    spoilt = function(x.to(device), offsets_of(sizes).to(device))
    keep = [0, 2] if function is segment_logsumexp else [*range(10), *range(30, 40)]
    assert torch.equal(spoilt[keep], clean[keep])
    assert spoilt[1 if function is segment_logsumexp else slice(10, 30)].isnan().all()


@named
def test_the_same_bits_in_every_run_and_by_index_as_by_offsets(function, device):
    x, sizes = peaked(300, 2).to(device), SIZES["mixed"] + [300 - sum(SIZES["mixed"])]
    by_offsets = function(x, offsets_of(sizes).to(device))
    assert torch.equal(by_offsets, function(x, index=index_of(sizes).to(device), n_segments=len(sizes)))
    at = index_of(sizes, seed=2).argsort(stable=True)  # elements of a segment keep their order
    shuffled = function(x, index=index_of(sizes, seed=2).to(device), n_segments=len(sizes))
    again = function(x[at.to(device)], offsets_of(sizes).to(device))
    assert torch.equal(shuffled if function is segment_logsumexp else shuffled[at.to(device)], again)


# Gradients.


@named
@pytest.mark.parametrize("way", ["offsets", "index", "a middle dim"])
def test_gradients_of_any_order(function, way, device):
    sizes = [2, 1, 3] if function is segment_logsumexp else [2, 0, 1, 3]
    x = (peaked(6, 2, dtype=FP64) / 20).to(device)
    given = {"offsets": offsets_of(sizes).to(device)}
    if way == "index":
        given = {"index": index_of(sizes, seed=3).to(device), "n_segments": len(sizes)}
    if way == "a middle dim":
        x, given["dim"] = x.view(1, 6, 2), 1
    x.requires_grad_()

    def call(x):
        return function(x, scale=0.7, **given)

    assert torch.autograd.gradcheck(call, (x,), check_batched_grad=True)
    assert torch.autograd.gradgradcheck(call, (x,))


@named
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_gradients_are_those_of_each_segment_alone(function, dtype, device):
    sizes = [*SIZES["mixed"], 2 * PIECE]
    x, index = peaked(sum(sizes), 2, dtype=dtype), index_of(sizes, seed=4)
    leaf, whole = x.to(device, copy=True).requires_grad_(), x.to(FP64).requires_grad_()
    y = function(leaf, index=index.to(device), n_segments=len(sizes))
    wanted = by_loop(function, whole, index, len(sizes))
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(5), dtype=FP64).to(dtype)
    if function is segment_logsumexp:
        empty = torch.tensor(sizes) == 0
        y, wanted, dy = y[~empty.to(device)], wanted[~empty], dy[~empty]
    y.backward(dy.to(device))
    wanted.backward(dy.to(FP64))
    assert leaf.grad.dtype == dtype
    atol = (1 + dy.abs().sum().item() / 50) * 8 * EPS[FP32]
    if function is not segment_logsumexp and dtype != FP32:
        atol += EPS[dtype] / 2  # it is made of the rounded result, as torch's
    rtol = 2 * EPS[dtype] + 150 * EPS[FP32]  # an lse of 150 is rounded to 32 bits
    torch.testing.assert_close(leaf.grad.to(FP64).cpu(), whole.grad, rtol=rtol, atol=atol)


@named
@pytest.mark.parametrize("way", ["offsets", "index"])
def test_a_gradient_of_what_hooks_keep_at_other_strides(function, way, device):
    cut = {"offsets": offsets_of([2, 0, 3])} if way == "offsets" else {"index": index_of([2, 0, 3], seed=1)}
    cut = {name: each.to(device) for name, each in cut.items()} | {"n_segments": 3}
    x, found = peaked(5, 2).div(10).to(device).requires_grad_(), []
    for pack in (lambda each: each, lambda each: torch.stack([each, each], -1)[..., 0]):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
            y = function(x, **cut)
        weights = torch.arange(float(y.numel()), device=device).view(y.shape)
        found.append(torch.autograd.grad(y.masked_fill(y.isinf(), 0.0), x, weights)[0])
    assert torch.equal(*found)


@named
def test_a_gradient_has_the_same_bits_in_every_run(function, device):
    x, index = peaked(500, 3).to(device).requires_grad_(), index_of([200, 0, 300], seed=6).to(device)
    dy = None
    found = []
    for _ in range(3):
        y = function(x, index=index, n_segments=3)
        dy = torch.linspace(-1, 1, y.numel(), device=device).view(y.shape) if dy is None else dy
        found.append(torch.autograd.grad(y, x, dy)[0])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@named
def test_transforms_and_compilers(function, device):
    x, offsets = peaked(4, 9, dtype=FP64).to(device), offsets_of([4, 5]).to(device)
    wanted = torch.stack([function(row, offsets) for row in x])
    torch.testing.assert_close(torch.func.vmap(lambda row: function(row, offsets))(x), wanted)
    gradient = torch.func.grad(lambda x: function(x, offsets, dim=1).square().sum())(x)
    leaf = x.clone().requires_grad_()
    function(leaf, offsets, dim=1).square().sum().backward()
    torch.testing.assert_close(gradient, leaf.grad)
    compiled = torch.compile(lambda x: function(x, offsets, dim=1), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), wanted)


@named
@pytest.mark.parametrize("by", ["offsets", "index"])
def test_forward_mode(by, function, device):
    """By torch's operations; alone, over a batch, and over a gradient."""
    x, tangent = ((peaked(9, 4, dtype=FP64, seed=seed) / 4).to(device) for seed in (0, 1))
    index = torch.tensor([2, 0, 2, 0, 0, 2, 0, 2, 2], device=device)
    cut = {"offsets": offsets_of([4, 0, 5]).to(device)} if by == "offsets" else {"index": index, "n_segments": 4}

    def of(x):
        return function(x, **cut, scale=0.5).nan_to_num(0.0, neginf=0.0)  # logsumexp of an empty segment is -inf

    def tangent_of(x):
        return torch.func.jvp(of, (x,), (tangent,))[1]

    def total(x):
        return of(x).sin().sum()

    step, found = 1e-6 * tangent, tangent_of(x)
    torch.testing.assert_close(found, (of(x + step) - of(x - step)) / 2e-6, rtol=1e-5, atol=1e-7)
    with torch.autograd.forward_ad.dual_level():
        dual = of(torch.autograd.forward_ad.make_dual(x.clone().requires_grad_(), tangent))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, found)
    torch.testing.assert_close(torch.func.vmap(tangent_of)(torch.stack([x + 1, x]))[1], found)
    torch.testing.assert_close(torch.func.hessian(total)(x), torch.func.jacrev(torch.func.jacrev(total))(x))


@kernels
def test_explain_says_who_computes(device):
    offsets = torch.tensor([0, 4], device=device)
    with fused_softmax.explain() as explained:
        x = torch.ones(4, device=device, requires_grad=True)
        segment_softmax(x, offsets).sum().backward()
        segment_softmax(x.detach().double(), offsets)
    of_kernels, back, composed = explained
    assert (of_kernels.function, of_kernels.route) == ("segment_softmax", "kernel")
    assert of_kernels.shapes == ((4,), (2,))
    assert of_kernels.kernels == back.kernels == ["_compute", "_finish"]
    assert [each.n for each in of_kernels.plan] == [4]
    assert (back.function, back.route) == ("segment_softmax backward", "kernel")
    assert (composed.route, composed.reason.split(",")[1]) == ("composed", " and float64 is asked for")


# Offsets and indices that no segments have.

BAD_OFFSETS = {
    "fall": ([0, 5, 3, 8], [5, 6, 7], [1, 2], r"offsets\[2\] is 3 after 5"),
    "fall and come back": ([0, 4, 2, 4, 8], [], [1, 2], r"offsets\[2\] is 2 after 4"),
    "begin past 0": ([2, 5, 8], [0, 1, 2, 3, 4], [0], "got 2 and 8"),
    "begin below 0": ([-3, 5, 8], [0, 1, 2, 3, 4], [0], "got -3 and 8"),
    "end before n": ([0, 5, 6], [5, 6, 7], [1], "got 0 and 6"),
    "end past n": ([0, 5, 2**40], [5, 6, 7], [1], "got 0 and 1099511627776"),
    "all past n": ([0, 90, 95, 8], [*range(8)], [0, 1, 2], r"offsets\[3\] is 8 after 95"),
}
BAD_INDICES = {
    "below 0": ([0, 1, -1, 1, 0], 2, [2], r"in \[0, 2\), for n_segments=2, got -1 at \[2\]"),
    "from n_segments on": ([0, 2, 1, 1, 0], 2, [1], r"in \[0, 2\), for n_segments=2, got 2 at \[1\]"),
    "all": ([7, 7, 7, 7, 7], 2, [0, 1, 2, 3, 4], r"in \[0, 2\), for n_segments=2, got 7 at \[0\]"),
    "of no segments": ([0, 0, 0, 0, 0], 0, [0, 1, 2, 3, 4], r"in \[0, 0\), for n_segments=0, got 0 at \[0\]"),
}


@named
@pytest.mark.parametrize("bad", BAD_OFFSETS)
@pytest.mark.parametrize("dtype", [FP32, FP64], ids=str)  # by kernels, and by torch's operations
def test_bad_offsets_spoil_their_segment_on_a_device(function, bad, dtype, on_a_device, device):
    offsets, elements, segments, _ = BAD_OFFSETS[bad]
    x = peaked(8, dtype=dtype).to(device).requires_grad_()
    y = function(x, torch.tensor(offsets, device=device))
    wanted = segments if function is segment_logsumexp else elements
    assert y.isnan().nonzero().flatten().tolist() == wanted
    dx = torch.autograd.grad(y, x, torch.ones_like(y))[0]
    assert dx.isnan().nonzero().flatten().tolist() == elements


@named
@pytest.mark.parametrize("bad", BAD_INDICES)
def test_a_bad_index_spoils_its_element_on_a_device(function, bad, on_a_device, device):
    index, n_segments, elements, _ = BAD_INDICES[bad]
    x, index = peaked(5), torch.tensor(index)
    y = function(x.to(device), index=index.to(device), n_segments=n_segments).cpu()
    wanted = by_loop(function, x, index, n_segments).float()
    if function is not segment_logsumexp:
        wanted[elements] = float("nan")
    torch.testing.assert_close(y, wanted, equal_nan=True)


def test_an_index_below_0_spoils_its_element_without_a_number_of_segments(on_a_device, device):
    y = segment_softmax(torch.zeros(4, device=device), index=torch.tensor([3, -1, 3, -2], device=device))
    assert y.isnan().tolist() == [False, True, False, True]
    assert y[[0, 2]].tolist() == [0.5, 0.5]


@named
@pytest.mark.parametrize("way", ["on a CPU", "with FUSED_SOFTMAX_CHECK=1"])
def test_where_values_are_looked_at_they_are_errors(function, way, monkeypatch, device):
    monkeypatch.setattr(core_route, "CHECK", way != "on a CPU")
    monkeypatch.setattr(core_route, "on_device", lambda tensor: way != "on a CPU")
    if way == "on a CPU":
        device = "cpu"
    name = function.__name__
    for offsets, _, _, says in BAD_OFFSETS.values():
        with pytest.raises(ValueError, match=rf"^{name}: offsets of shape \({len(offsets)},\) must .*{says}"):
            function(torch.zeros(8, device=device), torch.tensor(offsets, device=device))
    for index, n_segments, _, says in BAD_INDICES.values():
        with pytest.raises(IndexError, match=rf"^{name}: index of shape \(5,\) must be {says}"):
            function(torch.zeros(5, device=device), index=torch.tensor(index, device=device), n_segments=n_segments)
    if function is not segment_logsumexp:
        says = r"index of shape \(2,\) must be at least 0, got -4 at \[1\]"
        with pytest.raises(IndexError, match=rf"^{name}: {says}"):
            function(torch.zeros(2, device=device), index=torch.tensor([0, -4], device=device))


X, OFFSETS, INDEX = torch.zeros(5, 2), torch.tensor([0, 2, 5]), torch.tensor([0, 0, 1, 1, 1])
OF = "input of shape (5, 2)"
GOT_OFFSETS, GOT_INDEX = "Tensor of shape (3,), torch.int64 on cpu", "Tensor of shape (5,), torch.int64 on cpu"
BY_OFFSETS, BY_INDEX = {"offsets": OFFSETS}, {"index": INDEX, "n_segments": 2}
MISUSES = {  # the arguments, the error, and what it says after the function's name
    "both": (
        {"offsets": OFFSETS, "index": INDEX}, ValueError,
        f"give offsets or index, one of the two, for {OF}, got both, {GOT_OFFSETS} and {GOT_INDEX}",
    ),
    "neither": ({}, ValueError, f"give offsets or index, one of the two, for {OF}, got neither"),
    "a list": (
        {"offsets": [0, 5]}, TypeError, "offsets must be a Tensor of int64 or int32, not list ([0, 5])",
    ),
    **{
        f"offsets of {dtype}": (
            {"offsets": OFFSETS.to(dtype)}, TypeError,
            f"offsets must be of int64 or int32, got Tensor of shape (3,), {dtype} on cpu",
        )
        for dtype in (FP32, torch.int16, torch.bool)
    },
    **{
        f"offsets of shape {tuple(each.shape)}": (
            {"offsets": each}, ValueError,
            f"offsets must have shape (n_segments + 1,) for {OF}, got {tuple(each.shape)}",
        )
        for each in (OFFSETS[None], OFFSETS[:0], OFFSETS[0])
    },
    "offsets of no segment": (
        {"offsets": OFFSETS[:1]}, ValueError,
        f"offsets must have at least one segment for the 5 elements of dim 0 of {OF}, got shape (1,)",
    ),
    "offsets elsewhere": (
        {"offsets": OFFSETS.to("meta")}, RuntimeError,
        "offsets must be on the device of the input, cpu, got Tensor of shape (3,), torch.int64 on meta",
    ),
    "sparse offsets": (
        {"offsets": OFFSETS.to_sparse()}, RuntimeError,
        "offsets must be a dense strided tensor, got a torch.sparse_coo one of shape (3,)",
    ),
    "an index that is a list": (
        {"index": [0] * 5, "n_segments": 2}, TypeError,
        "index must be a Tensor of int64 or int32, not list ([0, 0, 0, 0, 0])",
    ),
    **{
        f"an index of {dtype}": (
            {"index": INDEX.to(dtype), "n_segments": 2}, TypeError,
            f"index must be of int64 or int32, got Tensor of shape (5,), {dtype} on cpu",
        )
        for dtype in (FP32, torch.uint8, torch.bool)
    },
    **{
        f"an index of shape {tuple(each.shape)}": (
            {"index": each, "n_segments": 2}, ValueError,
            f"index must have shape (5,), one for each element of dim 0 of {OF}, got {tuple(each.shape)}",
        )
        for each in (INDEX[1:], X.long(), INDEX[0], INDEX[None])
    },
    "an index elsewhere": (
        {"index": INDEX.to("meta"), "n_segments": 2}, RuntimeError,
        "index must be on the device of the input, cpu, got Tensor of shape (5,), torch.int64 on meta",
    ),
    "another number of segments": (
        BY_OFFSETS | {"n_segments": 3}, ValueError,
        "n_segments must be 2 or None for offsets of shape (3,), got 3",
    ),
    **{
        f"{n} segments": (
            BY_INDEX | {"n_segments": n}, ValueError,
            f"n_segments must be at least 0 and below 2**63 - 1 for {OF}, got {n}",
        )
        for n in (-1, 2**63 - 1, 10**30)
    },
    **{
        f"{n!r} segments": (BY_INDEX | {"n_segments": n}, TypeError, f"n_segments must be an int, not {said}")
        for n, said in [(1.5, "float (1.5)"), (True, "bool (True)"), (INDEX, GOT_INDEX)]
    },
    **{
        f"dim {dim}": (BY_OFFSETS | {"dim": dim}, IndexError, f"dim {dim} is out of range [-2, 1] for {OF}")
        for dim in (2, -3)
    },
    "a dim that is none": (BY_OFFSETS | {"dim": 0.0}, TypeError, "dim must be an int, not float (0.0)"),
    **{
        f"a scale of {scale}"[:20]: (
            BY_OFFSETS | {"scale": scale}, ValueError, f"scale must be finite and not 0, got {str(scale)[:20]}",
        )
        for scale in (0, float("nan"), float("inf"), 10**400)
    },
    "a scale tensor": (
        BY_OFFSETS | {"scale": X}, TypeError,
        "scale must be a number, not Tensor of shape (5, 2), torch.float32 on cpu",
    ),
    **{
        f"a dtype of {dtype}": (
            BY_OFFSETS | {"dtype": dtype}, NotImplementedError,
            f"not implemented for dtype={dtype} of input of dtype torch.float32 and shape (5, 2); give a ",
        )
        for dtype in (torch.int64, torch.float8_e5m2, torch.complex64)
    },
    "a dtype that is none": (
        BY_OFFSETS | {"dtype": "half"}, TypeError, "dtype must be a torch.dtype, not str ('half')",
    ),
    "an input that is a list": (BY_OFFSETS | {"input": [1.0]}, TypeError, "input must be a Tensor, not list ([1.0])"),
    **{
        f"an input of {dtype}": (
            BY_OFFSETS | {"input": X.to(dtype)}, NotImplementedError,
            f"not implemented for input of dtype {dtype} and shape (5, 2) without dtype=; give a ",
        )
        for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e5m2)
    },
    "an input without dims": (
        BY_OFFSETS | {"input": X[0, 0]}, ValueError, "input must have at least one dim, got shape ()",
    ),
    "a sparse input": (
        BY_OFFSETS | {"input": X.to_sparse()}, NotImplementedError,
        "input must be a dense strided tensor, got a torch.sparse_coo one of shape (5, 2)",
    ),
    "an input elsewhere": (
        BY_OFFSETS | {"input": X.to("meta")}, RuntimeError,
        f"offsets must be on the device of the input, meta, got {GOT_OFFSETS}",
    ),
}  # fmt: skip


@named
@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_is_an_error_that_names_the_argument(function, misuse, monkeypatch):
    """The error names the argument, the shape and the value, and nothing runs before it."""
    arguments, error, says = MISUSES[misuse]
    monkeypatch.setattr(segments, "route_of", None)
    with pytest.raises(error, match="^" + re.escape(f"{function.__name__}: {says}")):
        function(**{"input": X} | arguments)


@named
def test_nested_inputs_are_for_softmax(function):
    says = r"input must be a dense strided tensor, got a nested one of shape \(2, j\d+, 2\)"
    with pytest.raises(RuntimeError, match=rf"^{function.__name__}: {says}"):
        function(torch.nested.nested_tensor_from_jagged(X, OFFSETS), OFFSETS)


class Sharded(Tensor):
    """A tensor with the attribute that tells a DTensor."""

    def to_local(self):
        return self.as_subclass(Tensor)


@pytest.mark.parametrize("argument", ["input", "offsets", "index"])
def test_shards_are_refused(argument):
    arguments = BY_INDEX if argument == "index" else BY_OFFSETS
    sharded = ({"input": X} | arguments)[argument].as_subclass(Sharded)
    says = f"{argument} must be a plain tensor, not a DTensor of shape {tuple(sharded.shape)}; give its local tensor"
    with pytest.raises(NotImplementedError, match="^" + re.escape(f"segment_softmax: {says}")):
        segment_softmax(**{"input": X} | arguments | {argument: sharded})


def test_logsumexp_of_an_index_needs_the_number_of_segments():
    says = "n_segments must be an int with index of shape (5,), for it is the size of the result, got None"
    with pytest.raises(ValueError, match="^" + re.escape(f"segment_logsumexp: {says}")):
        segment_logsumexp(X, index=INDEX)


@named
@pytest.mark.parametrize("dtype", [FP32, FP64], ids=str)  # by kernels, and by torch's operations
def test_numbers_of_other_libraries_are_numbers(function, dtype, device):
    x, index = peaked(2, 5, dtype=dtype).to(device), INDEX.to(device)
    options = {"n_segments": np.int64(2), "dim": np.int64(1), "scale": Fraction(1, 2)}
    assert torch.equal(function(x, index=index, **options), function(x, index=index, n_segments=2, dim=1, scale=0.5))


# Nested tensors of layout jagged.

NESTED = {softmax: segment_softmax, log_softmax: segment_log_softmax, logsumexp: segment_logsumexp}
of_nested = pytest.mark.parametrize("function", NESTED, ids=lambda each: each.__name__)


def jagged(values, sizes, **options):
    return torch.nested.nested_tensor_from_jagged(values, offsets_of(sizes).to(values.device), **options)


@of_nested
@pytest.mark.parametrize("transposed", [False, True])
def test_the_ragged_dim_of_a_nested_tensor(function, transposed, device):
    sizes = [3, 1, 5]
    values = peaked(9, 2).to(device).requires_grad_()
    nested, dim = jagged(values, sizes), 1
    if transposed:
        nested, dim = nested.transpose(1, 2), 2
    wanted = NESTED[function](values, offsets_of(sizes).to(device), scale=0.5)
    for at in (dim, dim - 3):
        found = function(nested, at, scale=0.5)
        if function is logsumexp:
            assert torch.equal(found, wanted)
            assert function(nested, at, keepdim=True).shape == ((3, 1, 2) if dim == 1 else (3, 2, 1))
        else:
            assert found.shape == nested.shape
            assert torch.equal(found.values(), wanted.T if transposed else wanted)
            assert (found + nested).shape == nested.shape
    results = found if function is logsumexp else found.values()
    dx = torch.autograd.grad(results.square().sum(), values)[0]
    torch.testing.assert_close(dx, torch.autograd.grad(wanted.square().sum(), values)[0])


def test_softmax_of_a_nested_tensor_is_torchs(device):
    nested = jagged(peaked(9, 2).to(device), [3, 1, 5])
    torch.testing.assert_close(softmax(nested, 1).values(), torch.softmax(nested, 1).values())


@pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="CPU tensors keep ATen's kernels")
@pytest.mark.parametrize("dtype", [FP32, FP64], ids=str)  # by kernels, and by torch's operations
def test_torchs_softmax_of_a_nested_tensor_under_enable(dtype, device):
    """Nothing is padded, and the gradient is right, which torch's own is not."""
    values = peaked(9, 2, dtype=dtype).to(device).requires_grad_()
    nested, weights = jagged(values, [3, 1, 5]), torch.arange(18.0, device=device).view(9, 2)
    wanted = segment_softmax(values, offsets_of([3, 1, 5]).to(device))
    with fused_softmax.enabled(), fused_softmax.explain() as explained:
        found = torch.softmax(nested, 1)
        dx = torch.autograd.grad((found.values() * weights).sum(), values)[0]
        assert (found + nested).shape == nested.shape
    assert torch.equal(found.values(), wanted)
    assert torch.equal(dx, torch.autograd.grad((wanted * weights).sum(), values)[0])
    assert torch.equal(torch.softmax(nested.detach(), 1).values().isnan(), wanted.isnan())
    if dtype == FP32:
        names = [each.function for each in explained]
        assert names == ["aten::softmax", "segment_softmax", "aten::softmax_backward"]
        assert {each.route for each in explained} == {"kernel"}


@pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="CPU tensors keep ATen's kernels")
def test_torchs_softmax_of_another_dim_of_a_nested_tensor_under_enable(device):
    nested = jagged(peaked(9, 2).to(device), [3, 1, 5])
    with fused_softmax.enabled():
        torch.testing.assert_close(torch.softmax(nested, 2).values(), torch.softmax(nested.values(), 1))
        with pytest.raises(RuntimeError, match="ragged_idx > 1"):
            torch.softmax(nested.transpose(1, 2), 2)
        with pytest.raises(RuntimeError, match="ragged"):
            torch.log_softmax(nested, 1)


@of_nested
def test_what_is_not_for_nested_tensors(function, device):
    name, nested = function.__name__, jagged(peaked(9, 2).to(device), [3, 1, 5])
    holes = torch.nested.nested_tensor_from_jagged(
        torch.ones(9, 2, device=device), offsets_of([3, 1, 5]).to(device), torch.tensor([2, 1, 4], device=device)
    )
    shape = r"of shape \(3, j\d+, 2\)"
    with pytest.raises(RuntimeError, match=f"^{name}: input {shape} is a nested tensor with holes"):
        function(holes, 1)
    for dim in (0, 2):
        says = f"dim must be the ragged dim 1 of a nested input {shape}, got {dim}"
        with pytest.raises(RuntimeError, match=f"^{name}: {says}"):
            function(nested, dim)
    with pytest.raises(IndexError, match=rf"^{name}: dim 3 is out of range \[-3, 2\] for a nested input {shape}"):
        function(nested, 3)
    with pytest.raises(TypeError, match=rf"^{name}: dim must be an int for a nested input {shape}, not float \(1.0\)"):
        function(nested, 1.0)
    for argument, value, said in [
        ("sink", 1.0, "1.0"), ("is_causal", True, "True"), ("mask", X, r"Tensor of shape \(5, 2\)"),
        ("masked_rows", "zero", "'zero'"), ("out", X, r"Tensor of shape \(5, 2\)"), ("batch_invariant", True, "True"),
    ]:  # fmt: skip
        says = f"{argument}= is not for a nested input {shape}, got {said}"
        with pytest.raises(NotImplementedError, match=f"^{name}: {says}"):
            function(nested, 1, **{argument: value})
    with pytest.raises(ValueError, match=f"^{name}: scale must be finite and not 0, got 0"):  # of segments
        function(nested, 1, scale=0)
    integers = jagged(torch.ones(9, 2, dtype=torch.int64, device=device), [3, 1, 5])
    says = r"not implemented for input of dtype torch.int64 and shape \(9, 2\) without dtype="
    with pytest.raises(NotImplementedError, match=f"^{name}: {says}"):
        function(integers, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strided = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device=device)
    with pytest.raises((RuntimeError, NotImplementedError)):
        function(strided, 1)
