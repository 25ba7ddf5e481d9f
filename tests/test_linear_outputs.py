"""What linear_cross_entropy returns beside its loss, by every way it takes, against float64 of a layer and its loss."""

import os

import pytest
import torch
import torch.nn.functional as F
from products import QUICK, pairwise
from test_cross_entropy import OPTIONS, named
from test_library import compiled
from test_library import targets as nodes
from torch._dynamo.testing import CompileCounterWithBackend

from fused_softmax import linear_cross_entropy
from fused_softmax.core import calls
from fused_softmax.ops.losses import linear_by_classes as by_classes
from fused_softmax.ops.losses import linear_cross_entropy as linear_ops
from fused_softmax.ops.losses import reference
from fused_softmax.ops.losses.output import CrossEntropyOutput, TokenStats

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="without a GPU or the interpreter, CPU tensors take ATen"
)
FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
MORE = {"return_lse": True, "return_z_loss": True, "return_token_stats": True}
every_reduction = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


def layer(dtype, device, n=9):
    """(tensors, target) of a layer whose rows have a likeliest class that no rounding changes."""
    generator = torch.Generator().manual_seed(0)
    x, w, bias = (torch.randn(*shape, generator=generator) / 2 for shape in ((n, 16), (40, 16), (40,)))
    target = torch.randint(40, (n,), generator=generator)
    bias[7] += 4
    target[0], target[1::3] = 7, -100
    return [each.to(device, dtype).requires_grad_() for each in (x, w, bias)], target.to(device)


def truth_of(tensors, target, reduction, **options):
    """(loss, lse, z-loss), statistics and leaves, in float64."""
    exact = [each.detach().double().requires_grad_() for each in tensors]
    x, w, bias = exact
    if "weight" in options:
        options["weight"] = options["weight"].double()
    results = reference.linear_cross_entropy(x, w, target, linear_bias=bias, reduction=reduction, **options)
    return results, reference.token_stats(F.linear(*exact), target, **options), exact


def near(found, truth, dtype):
    least = 0 if dtype == FP64 else 2e-6
    assert found.shape == truth.shape
    assert (found.double() - truth).abs().max() <= 16 * torch.finfo(dtype).eps * truth.abs().max() + least


def check(results, tensors, target, reduction, dtype, options, *, grads=(True, True, True), skipped=False):
    """A CrossEntropyOutput and the gradients of some of its outputs, `grads`, together."""
    (loss, lse, z), stats, exact = truth_of(tensors, target, reduction, **options)
    assert isinstance(results, CrossEntropyOutput)
    counts = target != -100
    if skipped:
        lse = lse * counts
    arithmetic = FP64 if dtype == FP64 else FP32
    assert [each.dtype for each in results[:3]] == [dtype, arithmetic, dtype]
    for found, truth in zip(results[:3], (loss, lse, z), strict=True):
        near(found.detach(), truth.detach(), dtype)
    for name, found, truth in zip(TokenStats._fields, results.token_stats, stats, strict=True):
        found = found.detach()
        if name in ("loss", "entropy"):
            assert found.dtype == arithmetic
            near(found, truth, dtype)
        else:
            assert torch.equal(found, truth), name
    of, dys = [], []
    for found, truth, wanted in zip(results[:3], (loss, lse, z), grads, strict=True):
        if wanted:
            of.append((found, truth))
            dys.append(torch.linspace(0.5, 1.5, truth.numel(), device=found.device).view(truth.shape).to(dtype))
    expected = torch.autograd.grad([each[1] for each in of], exact, [dy.double() for dy in dys])
    dys = [dy.to(found.dtype) for dy, (found, _) in zip(dys, of, strict=True)]
    for _ in range(2):
        gradients = torch.autograd.grad([each[0] for each in of], tensors, dys, retain_graph=True)
        for found, truth, tensor in zip(gradients, expected, tensors, strict=True):
            assert found.dtype == tensor.dtype
            near(found, truth, dtype)


@pairwise(("dtype", "reduction"), strength=1)
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16, FP64], ids=str)
@every_reduction
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("skip_ignored", [False, True])
@pytest.mark.parametrize("grads", [(True, True, True), (True, False, False), (False, True, False)], ids=str)
def test_by_rows(dtype, reduction, options, chunk_size, skip_ignored, grads, device):
    tensors, target = layer(dtype, device)
    options = named(OPTIONS[options], 40, device=device)
    x, w, bias = tensors
    found = linear_cross_entropy(
        x, w, target, linear_bias=bias, reduction=reduction, chunk_size=chunk_size, skip_ignored=skip_ignored, **MORE,
        **options,
    )  # fmt: skip
    check(found, tensors, target, reduction, dtype, options, grads=grads, skipped=skip_ignored)


@pytest.fixture
def short_chunks_go_by_classes(monkeypatch):
    taken = []
    monkeypatch.setattr(by_classes, "_CHUNKS", 2)
    monkeypatch.setattr(by_classes, "_CLASSES", 1)
    monkeypatch.setattr(by_classes, "MULTIPLE", 4)
    steps_of = by_classes.steps_of
    monkeypatch.setattr(by_classes, "steps_of", lambda *sizes: taken.append(sizes) or steps_of(*sizes))
    return taken


@pairwise(strength=1)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP64], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("more", [("return_lse",), ("return_lse", "return_z_loss"), ("return_z_loss",), tuple(MORE)])
def test_where_short_chunks_go_by_classes(dtype, reduction, options, more, device, short_chunks_go_by_classes):
    tensors, target = layer(dtype, device)
    options = named(OPTIONS[options], 40, device=device)
    x, w, bias = tensors
    found = linear_cross_entropy(
        x, w, target, linear_bias=bias, reduction=reduction, chunk_size=2, **dict.fromkeys(more, True), **options
    )  # fmt: skip
    assert len(short_chunks_go_by_classes) == 1
    truth, stats, exact = truth_of(tensors, target, reduction, **options)
    of = [(each, true) for each, true in zip(found[:3], truth, strict=True) if each is not None]
    assert len(of) == 1 + ("return_lse" in more) + ("return_z_loss" in more)
    for each, true in of:
        near(each.detach(), true.detach(), dtype)
    for each, true in zip(found.token_stats or (), stats, strict=False):
        if each.is_floating_point():
            near(each, true, dtype)
        else:
            assert torch.equal(each, true)
    for outputs in (of[:1], of):
        gradients = torch.autograd.grad([each.sum() for each, _ in outputs], tensors, retain_graph=True)
        expected = torch.autograd.grad([true.sum() for _, true in outputs], exact, retain_graph=True)
        for each, true in zip(gradients, expected, strict=True):
            near(each, true, dtype)


@every_reduction
def test_shapes_of_several_dims_and_none(reduction, device):
    (x, w, bias), target = layer(FP32, device, n=12)
    for leading in ((3, 4), (2, 3, 2), (12,)):
        given = x.view(*leading, 16), w, target.view(leading)
        found = linear_cross_entropy(*given, linear_bias=bias, reduction=reduction, **MORE)
        lse = torch.logsumexp(F.linear(x, w, bias), -1).view(leading)
        torch.testing.assert_close(found.lse, lse)
        assert found.z_loss.shape == found.loss.shape == (leading if reduction == "none" else ())
        assert found.z_loss.eq(0).all()
        assert all(each.shape == leading for each in found.token_stats)
    found = linear_cross_entropy(x[0], w, target[0], linear_bias=bias, reduction=reduction, **MORE)
    torch.testing.assert_close(found.lse, torch.logsumexp(F.linear(x[0], w, bias), -1))
    assert found.token_stats.correct.shape == ()


@pytest.mark.parametrize("name", MORE)
def test_one_thing_more(name, device):
    (x, w, bias), target = layer(FP32, device)
    found = linear_cross_entropy(x, w, target, linear_bias=bias, **{name: True})
    alone = linear_cross_entropy(x, w, target, linear_bias=bias)
    torch.testing.assert_close(found.loss, alone)
    there = [field for field, value in zip(found._fields, found, strict=True) if value is not None]
    assert there == ["loss", name.removeprefix("return_")]
    assert isinstance(alone, torch.Tensor)


@pytest.mark.parametrize("skip_ignored", [False, True])
def test_rows_that_do_not_count_and_their_gradients(skip_ignored, device):
    (x, w, bias), target = layer(FP32, device)
    ignored = target == -100
    found = linear_cross_entropy(x, w, target, linear_bias=bias, skip_ignored=skip_ignored, **MORE)
    (dx,) = torch.autograd.grad(found.lse.sum(), x)
    assert found.lse[ignored].ne(0).all() == (not skip_ignored)
    assert dx[ignored].ne(0).any(-1).all() == (not skip_ignored)
    if skip_ignored:
        assert dx[ignored].eq(0).all()
    for each in found.token_stats:
        assert each[ignored].eq(0).all()
    nothing = linear_cross_entropy(
        x, w, torch.full_like(target, -100), linear_bias=bias, reduction="sum", skip_ignored=skip_ignored, **MORE
    )
    assert nothing.loss == 0
    assert nothing.token_stats.predicted.eq(0).all()
    assert nothing.lse.eq(0).all() == skip_ignored
    assert torch.autograd.grad(nothing.lse.sum(), x)[0].eq(0).all() == skip_ignored


@pytest.mark.parametrize("way", ["compiled", "composed"])
def test_lse_of_rows_left_out_is_0_whoever_computes_it(way, device):
    torch._dynamo.reset()
    (x, w, bias), target = layer(FP32, device)

    def of(x):
        return linear_cross_entropy(x, w, target, linear_bias=bias, skip_ignored=True, return_lse=True).lse

    expected = torch.where(target == -100, 0.0, torch.logsumexp(F.linear(x, w, bias), -1))
    strided = linear_cross_entropy(
        x.view(3, 3, 16).transpose(0, 1), w, target.view(3, 3).t(), linear_bias=bias, skip_ignored=True, return_lse=True
    )
    torch.testing.assert_close(strided.lse, expected.view(3, 3).t())
    function = torch.compile(of, backend="aot_eager", fullgraph=True) if way == "compiled" else torch.vmap(of)
    found = function(x if way == "compiled" else x[None]).view(-1)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(each.sum(), x)[0] for each in (found, expected)))


def test_frozen_tensors_and_no_gradient_at_all(device):
    (x, w, bias), target = layer(FP32, device)
    with torch.no_grad():
        found = linear_cross_entropy(x, w, target, linear_bias=bias, **MORE)
    assert not any(each.requires_grad for each in (*found[:3], *found.token_stats))
    found = linear_cross_entropy(x.detach(), w, target, linear_bias=bias.detach(), **MORE)
    (dw,) = torch.autograd.grad(found.loss + found.lse.sum(), w)
    logits = F.linear(x, w, bias)
    expected = F.cross_entropy(logits, target) + torch.logsumexp(logits, -1).sum()
    torch.testing.assert_close(dw, torch.autograd.grad(expected, w)[0], rtol=1e-5, atol=1e-5)


@pairwise(strength=1)
@every_reduction
@pytest.mark.parametrize("options", ["plain", "all"])
def test_derivatives(reduction, options, device):
    tensors, target = layer(FP64, device, n=4)
    tensors = [each.detach()[..., :3].clone().requires_grad_() for each in tensors[:2]]
    options = named(OPTIONS[options], 40, FP64, device)

    def of(x, w):
        found = linear_cross_entropy(
            x, w, target, reduction=reduction, return_lse=True, return_z_loss=True, chunk_size=3, **options
        )  # fmt: skip
        return found.loss, found.lse, found.z_loss

    assert torch.autograd.gradcheck(of, tensors, nondet_tol=1e-12, fast_mode=QUICK)
    assert torch.autograd.gradgradcheck(of, tensors, fast_mode=QUICK)


def test_gradients_in_a_batch(device):
    (x, w, bias), target = layer(FP64, device)
    found = linear_cross_entropy(x, w, target, linear_bias=bias, chunk_size=4, lse_square_scale=1e-2, **MORE)
    dlse = torch.eye(len(x), dtype=FP64, device=device)
    batch = torch.autograd.grad(found.lse, (x, w), dlse, is_grads_batched=True, retain_graph=True)
    alone = [torch.autograd.grad(found.lse, (x, w), each, retain_graph=True) for each in dlse]
    torch.testing.assert_close(batch, tuple(torch.stack(each) for each in zip(*alone, strict=True)))


@pairwise(strength=1)
@every_reduction
@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
@pytest.mark.parametrize("options", ["plain", "all"])
def test_compiled_it_is_one_operator(reduction, dtype, options, device):
    torch._dynamo.reset()
    tensors, target = layer(dtype, device)
    options = named(OPTIONS[options], 40, device=device)
    function, graphs = compiled(
        lambda x, w, b: linear_cross_entropy(
            x, w, target, linear_bias=b, reduction=reduction, chunk_size=4, **MORE, **options
        )
    )
    check(function(*tensors), tensors, target, reduction, dtype, options)
    made = [node.split(".")[1] for node in nodes(graphs[0]) if "fused_softmax" in node]
    assert made == ["linear_cross_entropy", *["no_gradient"] * 2]  # of the statistics that are floats
    check(function(*tensors), tensors, target, reduction, dtype, options, grads=(False, True, False))


def test_any_number_of_rows_compiles_once(device):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(linear_cross_entropy, backend=counter, fullgraph=True)
    for n in (3, 5, 9, 2):
        (x, w, bias), target = layer(FP32, device, n=2 * n)
        found = function(x.view(2, n, 16), w, target.view(2, n), linear_bias=bias, **MORE)
        torch.testing.assert_close(found.lse, torch.logsumexp(F.linear(x, w, bias), -1).view(2, n))
        assert found.token_stats.predicted.shape == (2, n)
        torch.autograd.grad(found.lse.sum() + found.loss, (x, w, bias))
    assert counter.frame_count == 2


def test_under_functorchs_transforms(device):
    (x, w, bias), target = layer(FP32, device)
    both = torch.stack((x, x.flip(0))).detach()

    def of(x):
        found = linear_cross_entropy(x, w.detach(), target, linear_bias=bias.detach(), **MORE)
        return found.loss, found.lse, *found.token_stats

    batch = torch.vmap(of)(both)
    torch.testing.assert_close(batch, tuple(torch.stack(each) for each in zip(*map(of, both), strict=True)))
    gradient = torch.func.grad(lambda x: of(x)[1].sum())(both[0])
    torch.testing.assert_close(gradient, torch.autograd.grad(torch.logsumexp(F.linear(x, w, bias), -1).sum(), x)[0])


def test_probabilities(device):
    (x, w, bias), _ = layer(FP32, device)
    target = torch.softmax(F.linear(x, w).flip(0), -1).detach()
    found = linear_cross_entropy(x, w, target, linear_bias=bias, **MORE)
    torch.testing.assert_close(found.loss, F.cross_entropy(F.linear(x, w, bias), target))
    torch.testing.assert_close(found.lse, torch.logsumexp(F.linear(x, w, bias), -1))


def test_the_simple_call_makes_no_more_than_before(device, monkeypatch):
    """No states of rows outlive their chunk."""
    (x, w, bias), target = layer(FP32, device)
    kept, by_rows = [], linear_ops.by_rows

    def watched(*arguments):
        kept.append(by_rows(*arguments))
        return kept[-1]

    monkeypatch.setattr(linear_ops, "by_rows", watched)
    linear_cross_entropy(x, w, target, linear_bias=bias, chunk_size=4)
    (rows,) = kept
    assert [name for name, each in zip(rows._fields, rows, strict=True) if each is not None] == ["loss"]


@pytest.mark.parametrize("more", [{}, {"return_lse": True}, MORE], ids=str)
def test_a_repeated_call_prepares_nothing(more, device, monkeypatch):
    (x, w, bias), target = layer(FP32, device)

    def call():
        found = linear_cross_entropy(x, w, target, linear_bias=bias, chunk_size=4, **more)
        loss = found.loss + found.lse.sum() if more else found
        return loss, *torch.autograd.grad(loss, (x, w, bias))

    calls.forget()
    first = call()
    monkeypatch.setattr("fused_softmax.ops.losses.launches.prepare", None)
    monkeypatch.setattr("fused_softmax.core.launch.prepare", None)
    torch.testing.assert_close(call(), first, rtol=0, atol=0)
