"""linear_cross_entropy, chunk by chunk, against float64 of a layer and its loss; and what it refuses."""

import gc
import os

import pytest
import torch
import torch.nn.functional as F
from conftest import peaked
from products import pairwise
from test_cross_entropy import OPTIONS, named, targets

from fused_softmax import cross_entropy, linear_cross_entropy
from fused_softmax.core import calls, route
from fused_softmax.ops.losses import launches as cross_entropy_calls
from fused_softmax.ops.losses import reference
from fused_softmax.ops.losses.linear_by_rows import linear_of

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="without a GPU or the interpreter, CPU tensors take ATen"
)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
TARGET = torch.tensor([3, -100, 7, 39, 0, -100, 12])


def layer(dtype, device):
    generator = torch.Generator().manual_seed(0)
    shapes = (7, 16), (40, 16), (40,)
    return [(torch.randn(*shape, generator=generator) / 2).to(device, dtype).requires_grad_() for shape in shapes]


@pairwise(("dtype", "reduction"), strength=1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS)
def test_loss_and_gradients_by_chunks(dtype, reduction, options, device):
    """Held to a few roundings of the largest; a last chunk that is short, rows left out, gradients made twice."""
    options, target = named(OPTIONS[options], 40, device=device), TARGET.to(device)
    exact = [each.detach().double().requires_grad_() for each in layer(dtype, device)]
    weight = {"weight": options["weight"].double()} if "weight" in options else {}
    truth = reference.cross_entropy(F.linear(*exact), target, reduction=reduction, **options | weight)[0]
    dy = torch.linspace(0.5, 1.5, truth.numel(), device=device).view(truth.shape).to(dtype)
    expected = (truth, *torch.autograd.grad(truth, exact, dy.double()))
    for chunk_size, skip_ignored in ((None, False), (3, False), (3, True)):
        tensors = layer(dtype, device)
        x, w, bias = tensors
        loss = linear_cross_entropy(
            x, w, target, linear_bias=bias, reduction=reduction, chunk_size=chunk_size, skip_ignored=skip_ignored,
            **options,
        )  # fmt: skip
        for _ in range(2):  # the second makes the logits again
            gradients = torch.autograd.grad(loss, tensors, dy, retain_graph=True)
            for found, want in zip((loss, *gradients), expected, strict=True):
                assert found.dtype == dtype
                least = 0 if dtype == torch.float64 else 1e-7
                allowed = 8 * torch.finfo(dtype).eps * want.abs().max() + least
                assert (found.double() - want).abs().max() <= allowed


@pytest.mark.parametrize("features", [3, 16], ids=["gradients are made at once", "logits are kept"])
def test_the_weights_gradient_of_a_loss_that_is_scaled_and_has_rows_of_nan(features, device):
    """Rows that are ignored hold NaN; more rows than features make the gradients in the forward pass."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, features, generator=generator).to(device) for n in (7, 40))
    target = TARGET.to(device)
    exact = x.double().requires_grad_(), w.double().requires_grad_()
    expected = torch.autograd.grad(3 * F.cross_entropy(F.linear(*exact), target), exact)
    x[target == -100] = float("nan")
    given = x.requires_grad_(), w.requires_grad_()
    for found in (torch.autograd.grad(3 * linear_cross_entropy(*given, target), given) for _ in range(2)):
        torch.testing.assert_close(found, tuple(each.float() for each in expected), rtol=1e-5, atol=1e-6)


MASTERS = {"both": (True, True), "weight": (True, False), "bias": (False, True)}


@pairwise()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("masters", MASTERS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("accumulate", ["fp32", "input"])
@pytest.mark.parametrize("skip_ignored", [False, True])
@pytest.mark.parametrize("options", ["plain", "lse", "weights", "statistics"])
def test_master_weights(dtype, masters, reduction, chunk_size, accumulate, skip_ignored, options, device):
    """The loss of their 16 bits, and gradients in float32, made twice, that were not rounded to 16 bits."""
    more = {
        "plain": {}, "lse": {"return_lse": True}, "statistics": {"return_token_stats": True},
        "weights": {"weight": torch.linspace(0.5, 2, 40, device=device), "lse_square_scale": 0.01},
    }[options]  # fmt: skip
    x, *low = layer(dtype, device)
    pairs = zip(low, MASTERS[masters], strict=True)
    given = [x, *(each.detach().float().requires_grad_() if on else each for each, on in pairs)]
    how = {"reduction": reduction, "chunk_size": chunk_size, "accumulate": accumulate, "skip_ignored": skip_ignored}
    target, how = TARGET.to(device), how | more
    found = linear_cross_entropy(*given[:2], target, linear_bias=given[2], dtype=torch.float32, **how)
    exact = [each.detach().double().requires_grad_() for each in (x, *low)]
    weight = {"weight": more["weight"].double()} if "weight" in more else {}
    arguments = {name: each for name, each in more.items() if not name.startswith("return")} | weight
    truth, lse, _ = reference.cross_entropy(F.linear(*exact), target, reduction=reduction, **arguments)
    truths, results = [truth], [found if isinstance(found, torch.Tensor) else found.loss]
    if options == "lse":
        truths.append(lse.masked_fill(target == -100, 0.0) if skip_ignored else lse)
        results.append(found.lse)
    dy = [torch.linspace(0.5, 1.5, each.numel(), device=device).view(each.shape) for each in results]
    expected = torch.autograd.grad(truths, exact, [each.double() for each in dy])
    eps = torch.finfo(dtype).eps
    for _ in range(2):
        gradients = torch.autograd.grad(results, given, dy, retain_graph=True)
        for ours, of, want in zip((*results, *gradients), (*results, *given), (*truths, *expected), strict=True):
            assert ours.dtype == of.dtype
            assert (ours.double() - want).abs().max() <= 8 * eps * want.abs().max() + 1e-7
        for gradient, of in zip(gradients, given, strict=True):
            assert of.dtype == dtype or not torch.equal(gradient.to(dtype).float(), gradient)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_of_a_master_is_the_accumulator(dtype, device):
    """Which the gradient of a weight of 16 bits is rounded from."""
    low, target = layer(dtype, device), TARGET.to(device)
    x, w, bias = low[0], low[1].detach().float().requires_grad_(), low[2].detach().float().requires_grad_()
    (y, *found), (same, *rounded) = (
        (loss, *torch.autograd.grad(loss, of, loss.new_full((), 1.3)))
        for of in ((x, w, bias), low)
        for loss in (linear_cross_entropy(of[0], of[1], target, linear_bias=of[2], chunk_size=3, reduction="sum"),)
    )
    assert torch.equal(y, same)
    for ours, want in zip(found, rounded, strict=True):
        assert torch.equal(ours.to(dtype), want)


def test_no_copy_of_a_master_waits_for_the_backward_pass(device):
    x, w = (each.detach().requires_grad_() for each in layer(torch.float32, device)[:2])
    x, target = x.detach().bfloat16().repeat(6, 1).requires_grad_(), TARGET.to(device).repeat(6)

    def copies():
        gc.collect()
        of_layer = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.shape == w.shape]
        return [each for each in of_layer if each.dtype == torch.bfloat16]

    loss = linear_cross_entropy(x, w, target, chunk_size=8)
    assert not copies()
    assert torch.autograd.grad(loss, w)[0].dtype == torch.float32


def test_a_second_derivative_of_master_weights(device):
    x, *low = layer(torch.bfloat16, device)
    given = x, *(each.detach().float().requires_grad_() for each in low)

    def second(call, given):
        first = torch.autograd.grad(call(*given), given, create_graph=True)
        return torch.autograd.grad(sum(each.float().square().sum() for each in first), given)

    target = TARGET.to(device)
    found = second(lambda x, w, b: linear_cross_entropy(x, w, target, linear_bias=b, dtype=torch.float32), given)
    wanted = second(lambda *each: F.cross_entropy(F.linear(*(t.bfloat16() for t in each)).float(), target), given)
    for ours, want, of in zip(found, wanted, given, strict=True):
        assert ours.dtype == of.dtype
        torch.testing.assert_close(ours, want, rtol=0.05, atol=0.02 * float(want.abs().max()))


def test_without_gradients_the_logits_alone_are_made(device, monkeypatch):
    products, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda *given, **more: products.append(0) or mm(*given, **more))
    x, w = torch.ones(9, 4, device=device), torch.ones(20, 4, device=device, requires_grad=True)
    target = torch.arange(9, device=device)
    for _ in range(2):  # the second is found
        with torch.no_grad():
            assert not linear_cross_entropy(x, w, target).requires_grad
    assert len(products) == 2
    linear_cross_entropy(x, w, target).backward()
    assert len(products) == 4


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_short_last_chunk_whose_rows_are_split_otherwise(reduction, device, monkeypatch):
    """Smoothing sums logits part by part, and losses in 8 parts and in 32 could not be joined."""
    forward = cross_entropy_calls.forward

    def in_parts(logits, *rest):
        rows = forward(logits, *rest)
        return rows._replace(loss=rows.loss.view(-1, 1).expand(-1, len(logits)) / len(logits))

    monkeypatch.setattr(cross_entropy_calls, "forward", in_parts)
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*shape, generator=generator).to(device).requires_grad_() for shape in ((5, 4), (300, 4)))
    target = torch.tensor([3, -100, 299, 70, 128], device=device)
    options = {"reduction": reduction, "label_smoothing": 0.1}
    found = linear_cross_entropy(x, w, target, chunk_size=3, **options)
    expected = F.cross_entropy(F.linear(x, w), target, **options)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(each, (x, w)) for each in (found, expected)), rtol=1e-5, atol=1e-5)


BAD = {
    "features": ({"linear_weight": torch.ones(4, 2)}, ValueError, r"linear_weight.*\(2, 3\).*\(4, 2\)"),
    "dims": ({"linear_weight": torch.ones(4)}, ValueError, r"linear_weight.*\(4,\)"),
    "bias": ({"linear_bias": torch.ones(3)}, ValueError, r"linear_bias.*\(4,\).*\(3,\)"),
    "bias type": ({"linear_bias": 1.0}, TypeError, "linear_bias.*float"),
    "dtypes": ({"linear_weight": torch.ones(4, 3).half()}, RuntimeError, "linear_weight.*float32.*float16"),
    "a master of 16 bits": (
        {"input": torch.ones(2, 3).half(), "linear_weight": torch.ones(4, 3).bfloat16()},
        RuntimeError,
        "linear_weight.*float16, or float32 beside 16 bits, got torch.bfloat16",
    ),
    "a wider bias": ({"linear_bias": torch.ones(4).double()}, RuntimeError, "linear_bias.*float32.*float64"),
    "chunk_size": ({"chunk_size": 0}, ValueError, "chunk_size.*0"),
    "chunk_size type": ({"chunk_size": 1.5}, TypeError, "chunk_size.*float"),
    "accumulate": ({"accumulate": "fp16"}, ValueError, "accumulate.*fp16"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name, device):
    arguments, error, message = BAD[name]
    given = {"input": torch.ones(2, 3), "linear_weight": torch.ones(4, 3), "target": torch.zeros(2, dtype=torch.int64)}
    given = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in (given | arguments).items()}
    with pytest.raises(error, match=f"^linear_cross_entropy: {message}"):
        linear_cross_entropy(**given)


@pytest.mark.parametrize(
    ("rows", "options", "size"),
    [
        (8192, {}, 8192),  # 2004 MiB of logits, as two chunks and an accumulator take
        (16384, {}, 4096),  # 4008 MiB: equal chunks of 1 GiB at most
        (9000, {"of_weight": False}, 3072),
        (8192, {"accumulate": "input"}, 4096),
        (8192, {"dtype": torch.float16}, 4096),
        (8192, {"master": True}, 4096),  # whose accumulator is its gradient
        (100, {}, 100),
        (8192, {"chunk_size": 700}, 700),
    ],
    ids=str,
)
def test_a_chunk_takes_no_more_memory_than_it_saves(rows, options, size):
    dtype = options.get("dtype", torch.bfloat16)
    of_weight = torch.float32 if "master" in options else dtype
    x, w = torch.empty(1, dtype=dtype).expand(rows, 4096), torch.empty(1, dtype=of_weight).expand(128256, 4096)
    how = {"chunk_size": None, "accumulate": "fp32", "of_weight": True} | options
    how = {name: each for name, each in how.items() if name not in ("dtype", "master")}
    assert linear_of(x, w, **how).chunk_size == size


@pytest.mark.parametrize("function", ["cross_entropy", "linear_cross_entropy"])
@pytest.mark.parametrize("wrong", [9, -3])
@pytest.mark.parametrize("options", [{}, {"return_lse": True}, {"reduction": "none"}, {"softcap": 2.0}], ids=str)
def test_a_target_that_is_no_class_is_said_on_a_cpu(monkeypatch, function, wrong, options):
    monkeypatch.setattr(route, "on_device", lambda tensor: False)
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    call = (
        linear_cross_entropy
        if function == "linear_cross_entropy"
        else lambda x, w, *rest, **more: cross_entropy(x @ w.t(), *rest, **more)
    )
    assert call(x, w, torch.tensor([0, -100, 4]), **options) is not None
    with pytest.raises(IndexError, match=rf"^{function}: target {wrong} of row 2 is out of range \[0, 4\]$"):
        call(x, w, torch.tensor([0, -100, wrong]), **options)
    target = torch.tensor([0, -100, wrong], dtype=torch.int32)
    with pytest.raises(IndexError, match=f"^{function}: target {wrong} of row 2"):
        call(x, w, target, **options)


def test_targets_are_not_looked_at_where_something_watches(monkeypatch):
    monkeypatch.setattr(route, "on_device", lambda tensor: False)
    x, w, target = torch.randn(2, 3, 4), torch.randn(5, 4), torch.tensor([[0, 1, 9], [0, 1, 2]])
    found = torch.func.vmap(lambda x, target: linear_cross_entropy(x, w, target))(x, target)
    assert found.isnan().tolist() == [True, False]
    compiled = torch.compile(lambda *given: linear_cross_entropy(*given), backend="eager", fullgraph=True)
    assert compiled(x[0], w, target[0]).isnan()


def test_targets_are_checked_where_asked(monkeypatch, device):
    monkeypatch.setattr(route, "CHECK", True)
    x, w = torch.ones(3, 4, device=device), torch.ones(5, 4, device=device)
    with pytest.raises(IndexError, match=r"^linear_cross_entropy: target 9 of row 2 is out of range \[0, 4\]"):
        linear_cross_entropy(x, w, torch.tensor([0, -100, 9], device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_another_float_dtype_are_taken_on_a_cpu_as_by_the_kernels(monkeypatch, dtype):
    x, w, target = torch.randn(3, 4, dtype=dtype), torch.randn(5, 4, dtype=dtype), torch.tensor([0, 1, 4])
    weight = torch.tensor([1.0, 2.0, 0.5, 1.0, 0.25], dtype=torch.float64)
    monkeypatch.setattr(route, "on_device", lambda tensor: False)
    for loss in (cross_entropy(x @ w.t(), target, weight), linear_cross_entropy(x, w, target, weight=weight)):
        torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(x @ w.t(), target, weight.to(dtype)))


def test_a_kept_call_answers_for_no_call_that_differs(device):
    """Each of these is made after all others were kept, and is as if it were the first."""
    x, w = (peaked(n, 8, seed=n).to(device).requires_grad_() for n in (6, 37))
    target, low = targets(6, 37, ignored=False, device=device), x.detach().bfloat16().requires_grad_()
    more = {"bias": peaked(1, 37)[0].to(device), "weight": torch.linspace(0.5, 2.0, 37, device=device)}
    changes: list[dict] = [
        {}, {"reduction": "sum"}, {"reduction": "none"}, {"ignore_index": int(target[0])}, {"label_smoothing": 0.1},
        {"label_smoothing": 0.3}, {"softcap": 5.0}, {"softcap": 7.0}, {"scale": 0.5}, {"scale": -0.5}, {"scale": 1.0},
        {"lse_square_scale": 0.1}, {"dtype": torch.float64}, {"chunk_size": 1}, {"chunk_size": 4},
        {"accumulate": "input"}, {"linear_bias": more["bias"]}, {"weight": more["weight"]}, {"skip_ignored": True},
        {"weight": more["weight"], "label_smoothing": 0.1}, {"return_lse": True}, {"return_token_stats": True},
        {"input": low}, {"input": low, "linear_weight": w.detach().bfloat16().requires_grad_()},
        {"input": low, "linear_bias": more["bias"]}, {"input": low, "linear_bias": more["bias"].bfloat16()},
    ]  # fmt: skip

    def call(options):
        given = {"input": x, "linear_weight": w} | options
        found = linear_cross_entropy(target=target, **given)
        loss = found if isinstance(found, torch.Tensor) else found.loss
        return loss, *torch.autograd.grad(loss.sum(), (given["input"], given["linear_weight"]))

    alone = []
    for options in changes:
        calls.forget()
        alone.append(call(options))
    calls.forget()
    for _ in range(2):
        for options, wanted in zip(changes, alone, strict=True):
            found = call(options)
            assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), options
    with pytest.raises(TypeError, match="chunk_size must be an int, not bool"):
        linear_cross_entropy(x, w, target, chunk_size=True)
    with torch.no_grad():
        assert not linear_cross_entropy(x, w, target).requires_grad
    assert linear_cross_entropy(x, w, target).requires_grad


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_differentiable_gradient_of_tied_weights_counts_once(reduction, device):
    weight = torch.randn(9, 4, dtype=torch.float64, device=device, requires_grad=True)
    target = torch.tensor([3, 0, 8], device=device)

    def gradient(of, again):
        y = of(weight[target].tanh()).sum()
        return torch.autograd.grad(y, weight, create_graph=again)[0]

    expected = gradient(lambda x: F.cross_entropy(F.linear(x, weight), target, reduction=reduction), False)
    found = gradient(lambda x: linear_cross_entropy(x, weight, target, reduction=reduction), True)
    torch.testing.assert_close(found, expected)
