"""Losses where their routes could part: ignored rows of NaN, weights of 0, learnt weights, logits that are changed."""

import gc
import math
import os

import pytest
import torch
import torch.nn.functional as F
from conftest import peaked
from loss_routes import ROUTES, gradients
from products import pairwise

import fused_softmax
from fused_softmax import cross_entropy, linear_cross_entropy
from fused_softmax.core import route
from fused_softmax.ops.losses import linear_cross_entropy as linear_ops

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="without a GPU or the interpreter, CPU tensors take ATen"
)
FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
NAN, INF = math.nan, math.inf
N, C, IN = 7, 20, 6


@pytest.fixture
def ways(device, monkeypatch):
    """The routes of this device, and what makes gradients on one."""

    def of(way, function, leaves, of=lambda y: y):
        with monkeypatch.context() as patched:
            if way.startswith("torch") and way != "torch.func" and device != "cpu":
                pytest.skip("of CPU tensors")
            return gradients(way, function, leaves, of, patched)

    return of


def logits(device, dtype=FP32):
    return (peaked(N, C) / 4).to(dtype).to(device)


def target_of(device, ignored=-100):
    return torch.tensor([3, ignored, ignored, 0, ignored, 19, ignored], device=device)


IGNORED = torch.tensor([1, 2, 4, 6])


def spoilt(x):
    """x with NaN, an infinity, both, or nothing but -inf in ignored rows."""
    x = x.clone()
    x[1], x[2, 1], x[4, :2] = NAN, INF, torch.tensor([-INF, INF], device=x.device)
    x[6] = -INF
    return x


OPTIONS = {
    "plain": {}, "sum": {"reduction": "sum"}, "none": {"reduction": "none"}, "smoothing": {"label_smoothing": 0.2},
    "softcap": {"softcap": 4.0}, "scale": {"scale": -0.5}, "z-loss": {"lse_square_scale": 0.1},
    "beside lse": {"return_lse": True}, "statistics": {"return_token_stats": True},
}  # fmt: skip


def loss_of(y):
    return y if isinstance(y, torch.Tensor) else y.loss


@pairwise()
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("way", ROUTES)
def test_ignored_rows_have_a_gradient_of_0_whatever_they_contain(way, options, ways, device):
    x, target = logits(device), target_of(device)
    call = lambda x: cross_entropy(x, target, **OPTIONS[options])  # noqa: E731
    (found,) = ways(way, call, [spoilt(x)], loss_of)
    (wanted,) = gradients("kernels", call, [x], loss_of)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert (found[IGNORED] == 0).all()


@pytest.mark.parametrize("way", ROUTES)
def test_ignored_rows_of_a_given_lse(way, ways, device):
    x, target = logits(device), target_of(device)
    lse = torch.logsumexp(x, 1) + 0.5
    spoilt_lse = lse.clone()
    spoilt_lse[1], spoilt_lse[2] = NAN, -INF
    (found,) = ways(way, lambda x: cross_entropy(x, target, lse=spoilt_lse), [spoilt(x)])
    (wanted,) = gradients("kernels", lambda x: cross_entropy(x, target, lse=lse), [x])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ROUTES)
def test_a_row_of_nan_that_counts_keeps_it(way, ways, device):
    x, target = logits(device), target_of(device)
    x[3] = NAN
    (found,) = ways(way, lambda x: cross_entropy(x, target), [x])
    assert found.isnan().all(1).tolist() == [False, False, False, True, False, False, False]


@pairwise()
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("layout", ["rows", "chunks", "none", "lse", "skipped"])
@pytest.mark.parametrize("way", ROUTES)
def test_ignored_rows_of_a_linear_layer_have_no_part_in_any_gradient(way, layout, dtype, ways, device):
    """The gradient of the layer's weight is a product with the input, of which 0 times NaN would be NaN."""
    x, w = (peaked(N, IN) / 4).to(dtype).to(device), (peaked(C, IN, seed=1) / 4).to(dtype).to(device)
    bias, target = torch.linspace(-1, 1, C, dtype=dtype, device=device), target_of(device)
    options = {
        "rows": {}, "chunks": {"chunk_size": 3}, "none": {"reduction": "none"},
        "lse": {"return_lse": True}, "skipped": {"skip_ignored": True},
    }[layout]  # fmt: skip
    if way in ("torch.func", "vmap", "compiled", "torch compiled") and layout == "skipped":
        options = {}  # for which a call would have to wait
    counts = target != -100

    def of(y):  # lse of those that count: to the others' nothing comes back
        return y if layout != "lse" or not options else torch.where(counts, y.lse, 0.0) + y.loss

    call = lambda x, w, b: linear_cross_entropy(x, w, target, linear_bias=b, **options)  # noqa: E731
    found = ways(way, call, [spoilt(x), w, bias], of)
    wanted = gradients("kernels", call, [x, w, bias], of)
    tolerance = 1e-5 if dtype == FP32 else 6e-2
    torch.testing.assert_close(tuple(found), tuple(wanted), rtol=tolerance, atol=tolerance)
    assert (found[0][IGNORED] == 0).all()


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_ignored_tokens_of_blocks_of_classes_have_no_part_in_any_gradient(dtype, device, monkeypatch):
    monkeypatch.setattr(linear_ops, "goes_by_classes", lambda *_: True)
    x, w = (peaked(N, IN) / 4).to(dtype).to(device), (peaked(C, IN, seed=1) / 4).to(dtype).to(device)
    bias, target = torch.linspace(-1, 1, C, dtype=dtype, device=device), target_of(device)
    call = lambda x, w, b: linear_cross_entropy(x, w, target, linear_bias=b)  # noqa: E731
    found, wanted = (gradients("kernels", call, [each, w, bias]) for each in (spoilt(x), x))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy"])
def test_a_second_derivative_passes_ignored_rows_by(name, device):
    target, w = target_of(device), (peaked(C, IN, seed=1) / 4).to(device)
    x = logits(device) if name == "cross_entropy" else (peaked(N, IN) / 4).to(device)
    found = []
    for given in (x, spoilt(x)):
        leaf, of = given.clone().requires_grad_(), w.clone().requires_grad_()
        y = cross_entropy(leaf, target) if name == "cross_entropy" else linear_cross_entropy(leaf, of, target)
        leaves = [leaf] if name == "cross_entropy" else [leaf, of]
        first = torch.autograd.grad(y, leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(each.square().sum() for each in first), leaves))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


# Class weights.


def weighted(name, device):
    x, target, p = logits(device), target_of(device), torch.softmax(logits(device), 1)
    w = (peaked(C, C, seed=1) / 4).to(device)
    return {
        "cross_entropy": lambda weight, **options: cross_entropy(x, target, weight, **options),
        "smoothed": lambda weight, **options: cross_entropy(x, target, weight, label_smoothing=0.1, **options),
        "none": lambda weight, **options: cross_entropy(x, target, weight, reduction="none", **options).sum(),
        "given lse": lambda weight, **options: cross_entropy(x, target, weight, lse=torch.logsumexp(x, 1)),
        "with a gradient": lambda weight: cross_entropy(x.clone().requires_grad_(), target, weight),
        "linear": lambda weight: linear_cross_entropy(x, w, target, weight=weight),
        "module": lambda weight: fused_softmax.nn.CrossEntropyLoss(weight)(x, target),
        "linear module": lambda weight: fused_softmax.nn.LinearCrossEntropyLoss(C, C, weight=weight, device=device)(
            x, target
        ),
        "torch's": lambda weight: F.cross_entropy(x, target, weight),
        "torch's, smoothed": lambda weight: F.cross_entropy(x, target, weight, label_smoothing=0.1),
        "probabilities": lambda weight: cross_entropy(x, p, weight),
        "linear, probabilities": lambda weight: linear_cross_entropy(x, w, p, weight=weight),
    }[name]  # fmt: skip


COMPILED = ("cross_entropy", "linear", "torch's")
BY_INDEX = (
    "cross_entropy", "smoothed", "none", "given lse", "with a gradient", "linear", "module", "linear module", "torch's",
    "torch's, smoothed",
)  # fmt: skip


@pairwise()
@pytest.mark.parametrize("name", BY_INDEX)
@pytest.mark.parametrize("way", ["kernels", "kept", "compiled", "torch.func", "torch"])
def test_class_weights_that_require_a_gradient_raise(way, name, device, monkeypatch):
    """As torch's: they got none, without a word."""
    if way == "torch":
        monkeypatch.setattr(route, "INTERPRET", False)
    call, weight = weighted(name, device), torch.linspace(0.5, 1.5, C, device=device)
    if way == "compiled" and name not in COMPILED:
        pytest.skip("one of each function is enough")
    if way == "torch.func" and name == "with a gradient":
        pytest.skip("requires_grad_ is not for transforms")
    if way == "compiled":
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    with fused_softmax.enabled():
        if way == "kept":
            call(weight)
        differentiated = torch.func.grad(call) if way == "torch.func" else lambda w: call(w.clone().requires_grad_())
        with pytest.raises(RuntimeError, match=r"weight.*requires grad|argument 'weight'|Observed exception"):
            differentiated(weight)
        with torch.no_grad():
            call(weight.clone().requires_grad_())


@pytest.mark.parametrize("name", ["probabilities", "linear, probabilities"])
def test_class_weights_beside_probabilities_have_torchs_gradient(name, device):
    weight = torch.linspace(0.5, 1.5, C, device=device).requires_grad_()
    x, p, w = logits(device), torch.softmax(logits(device), 1), (peaked(C, C, seed=1) / 4).to(device)
    z = x if name == "probabilities" else x @ w.t()
    wanted = torch.autograd.grad(F.cross_entropy(z, p, weight), weight)
    torch.testing.assert_close(torch.autograd.grad(weighted(name, device)(weight), weight), wanted)


# A mean whose counted weights sum to 0: the loss is NaN, and gradients of what stands beside it are not.

BESIDE = {
    "lse": lambda y: y.lse, "z-loss": lambda y: y.z_loss, "both": lambda y: y.lse.sum() + y.z_loss,
    "part of lse": lambda y: y.lse[:2],
}  # fmt: skip


@pairwise()
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("way", ROUTES)
def test_what_stands_beside_a_mean_of_weight_0_has_a_finite_gradient(way, linear, beside, ways, device):
    if way == "torch compiled":
        pytest.skip("torch hands zeros to the loss, and divides them by 0")
    target, weight = torch.tensor([0, -100, 0, 0, -100, 0, 0], device=device), torch.ones(C, device=device)
    weight[0] = 0.0
    options = {"weight": weight, "return_lse": True, "return_z_loss": True, "lse_square_scale": 0.1}
    w = (peaked(C, IN, seed=1) / 4).to(device)
    x = (peaked(N, IN) / 4).to(device) if linear else logits(device)
    call = (lambda x: linear_cross_entropy(x, w, target, **options)) if linear else (
        lambda x: cross_entropy(x, target, **options)
    )  # fmt: skip
    (found,) = ways(way, call, [x], BESIDE[beside])

    leaf = x.double().requires_grad_()
    lse = torch.logsumexp(leaf @ w.double().t() if linear else leaf, 1)
    z = 0.1 * lse[target == 0].square().mean()
    of = {"lse": lse, "z-loss": z, "both": lse.sum() + z, "part of lse": lse[:2]}[beside]
    (wanted,) = torch.autograd.grad(of.sum(), leaf)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
    assert loss_of(call(x)).isnan()


# z-loss.


@pairwise()
@pytest.mark.parametrize("scale", [0.0, NAN])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("targets", ["some", "none count", "a wrong one", "an infinite logit"])
@pytest.mark.parametrize("way", ["kernels", "compiled", "torch.func", "torch", "linear", "linear torch", "given lse"])
def test_a_z_loss_of_scale_0_is_0_and_of_nan_is_nan(way, targets, reduction, scale, device, monkeypatch):
    if way.endswith("torch"):
        monkeypatch.setattr(route, "INTERPRET", False)
    x, target = logits(device), target_of(device)
    if targets == "none count":
        target = torch.full_like(target, -100)
    if targets == "a wrong one" and device == "cpu" and way.endswith("torch"):
        pytest.skip("IndexError")
    if targets == "a wrong one":
        target[0] = C + 3
    if targets == "an infinite logit":
        x[0, 0] = INF
    options = {"reduction": reduction, "return_z_loss": True, "lse_square_scale": scale}

    def call(x):
        if way == "given lse":
            return cross_entropy(x, target, lse=torch.logsumexp(x, 1).detach(), **options)
        if way.startswith("linear"):
            return linear_cross_entropy(x, torch.eye(C, device=device), target, **options)
        return cross_entropy(x, target, **options)

    if way == "given lse" and scale != 0:
        pytest.skip("needs more of the row")
    if way == "torch.func":
        z = torch.func.grad(lambda x: (lambda y: (y.loss.sum(), y.z_loss))(call(x)), has_aux=True)(x)[1]
    else:
        torch._dynamo.reset()
        z = (torch.compile(call, backend="aot_eager", fullgraph=True) if way == "compiled" else call)(x).z_loss
    wanted = torch.zeros(() if reduction != "none" else (N,), device=device)
    if scale != 0:
        counts = target != -100
        wanted = torch.where(counts, NAN, wanted) if reduction == "none" else wanted + NAN
        if reduction == "sum" and targets == "none count":
            wanted = torch.zeros((), device=device)
    assert torch.equal(z.isnan(), wanted.isnan())
    assert torch.equal(z.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("way", ["kernels", "compiled", "torch"])
def test_a_z_loss_of_scale_0_has_a_gradient_of_0(way, ways, device):
    x, target = logits(device), target_of(device)
    x[0, 0] = INF
    call = lambda x: cross_entropy(x, target, return_z_loss=True)  # noqa: E731
    (found,) = ways(way, call, [x], lambda y: y.z_loss)
    assert (found[1:] == 0).all()


# Logits that change between a loss and its backward pass.


@pytest.mark.parametrize("torchs", [False, True], ids=["ours", "torch's name"])
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_logits_changed_in_place_give_torchs_gradient_or_an_error_that_names_the_loss(reduction, dtype, torchs, device):
    x, target = logits(device, dtype), target_of(device)

    def changed(function):
        leaf = x.clone().requires_grad_()
        z = leaf * 2
        loss = function(z, target, reduction=reduction).float().sum()
        with torch.no_grad():
            z.div_(3.0)
        return torch.autograd.grad(loss, leaf)[0]

    wanted = changed(F.cross_entropy)
    with fused_softmax.enabled():
        function = F.cross_entropy if torchs else cross_entropy
        if reduction == "none" or dtype == FP16:
            with pytest.raises(RuntimeError, match=r"^cross_entropy: .*modified by an inplace operation.*logits / t"):
                changed(function)
        else:
            torch.testing.assert_close(changed(function), wanted, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("what", ["logits", "hidden", "layer", "target"])
def test_a_loss_names_itself_where_what_it_reads_again_was_changed(what, device):
    x, w, target = (peaked(N, IN) / 4).to(device), (peaked(C, IN) / 4).to(device), target_of(device).clone()
    leaf, of = x.requires_grad_() * 1, w.requires_grad_() * 1
    if what == "logits":
        z = (leaf @ of.t()) * 1
        loss = cross_entropy(z, target)
        torch.autograd.grad(loss, x, retain_graph=True)  # a second backward pass reads them
        with torch.no_grad():
            z.mul_(2.0)
    else:
        loss = linear_cross_entropy(leaf, of, target)
        with torch.no_grad():
            {"hidden": leaf, "layer": of, "target": target}[what].add_(1)
    name = "cross_entropy" if what == "logits" else "linear_cross_entropy"
    with pytest.raises(RuntimeError, match=rf"^{name}: .*modified by an inplace operation"):
        loss.backward()


# inplace_backward gives a memory once.


def overwriting(z, target):
    return cross_entropy(z, target, inplace_backward=True)


VIEWS = {
    "itself": (lambda z: z, lambda z: z), "a view": (lambda z: z.view(-1, C),) * 2,
    "two views": (lambda z: z.view(-1, C), lambda z: z[:, :]), "it and a view": (lambda z: z, lambda z: z[1:]),
    "rows that meet": (lambda z: z[:4], lambda z: z[3:]), "columns that meet": (lambda z: z[:, :9], lambda z: z[:, 8:]),
    "rows of a whole": (lambda z: z[::2], lambda z: z),
}  # fmt: skip


@pytest.mark.parametrize("views", VIEWS)
def test_a_second_loss_over_the_same_logits_raises(views, device):
    """Of a view nobody knew, and the second loss was that of the first one's gradient."""
    leaf = logits(device).requires_grad_()
    z, target = leaf * 1, target_of(device) % 8
    first, second = (view(z) for view in VIEWS[views])
    overwriting(first, target[: len(first)])
    with pytest.raises(RuntimeError, match="inplace_backward has given the memory of these logits"):
        overwriting(second, target[: len(second)])


APART = {
    "rows": (lambda z: z[:3], lambda z: z[3:]), "columns": (lambda z: z[:, :8], lambda z: z[:, 8:]),
    "every second row": (lambda z: z[::2], lambda z: z[1::2]),
}  # fmt: skip


@pytest.mark.parametrize("views", APART)
def test_losses_over_other_parts_of_one_memory_do_not_disturb_each_other(views, device):
    leaf, found = logits(device).requires_grad_(), []
    target = target_of(device) % 8
    for loss in (overwriting, cross_entropy):
        z = leaf * 1
        total = sum(
            factor * loss(part, target[: len(part)])
            for factor, part in zip((2.0, 3.0), (view(z) for view in APART[views]), strict=True)
        )
        found.append(torch.autograd.grad(total, leaf)[0])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("view", [lambda z: z, lambda z: z.view(-1, C), lambda z: z[1:]])
def test_a_view_whose_memory_was_written_to_since_raises(view, device):
    z = logits(device).requires_grad_() * 1
    part = view(z)
    loss = overwriting(part, target_of(device)[: len(part)])
    z.detach().zero_()
    with pytest.raises(RuntimeError, match="inplace_backward left the gradient in the logits' memory"):
        loss.backward()


def test_a_memory_that_was_filled_again_can_be_given_again(device):
    x, target = logits(device), target_of(device)
    memory = torch.empty_like(x)
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        memory = memory.detach()
        z = memory.copy_(leaf)
        overwriting(z.view(-1, C), target).backward()
        torch.testing.assert_close(leaf.grad, gradients("kernels", lambda x: cross_entropy(x, target), [x])[0])


def test_a_loss_that_has_had_its_backward_pass_holds_no_logits(device):
    z = logits(device).requires_grad_() * 1
    memory = z.untyped_storage()._weak_ref()
    loss = overwriting(z.view(-1, C), target_of(device))
    loss.backward()
    del z
    gc.collect()
    assert torch.UntypedStorage._expired(memory)
    assert loss.grad_fn is not None
