"""Faults of losses, peers' by their issue and this package's own: each input gave a wrong result somewhere."""

import math
import os

import pytest
import torch
import torch.nn.functional as F
from conftest import peaked

from fused_softmax.ops.losses import launches as losses
from fused_softmax.ops.losses import reference
from fused_softmax.ops.losses.cross_entropy import cross_entropy
from fused_softmax.ops.losses.linear_cross_entropy import linear_cross_entropy
from fused_softmax.ops.losses.options import Loss

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="without a GPU or the interpreter, CPU tensors take ATen"
)
FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
REDUCTIONS = ("mean", "sum", "none")
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)


def targets(n, n_classes, device):
    return torch.randint(0, n_classes, (n,), generator=torch.Generator().manual_seed(0)).to(device)


def exact(x, target, reduction="mean", **options):
    """(loss, gradient of its sum) in fp64."""
    x = x.detach().double().requires_grad_()
    y = reference.cross_entropy(x, target, reduction=reduction, **options)[0]
    return y.detach(), torch.autograd.grad(y.sum(), x)[0]


def ours(x, target, reduction="mean", **options):
    x = x.detach().clone().requires_grad_()
    y = cross_entropy(x, target, reduction=reduction, **options)
    return y.detach(), torch.autograd.grad(y.sum(), x)[0]


@pytest.mark.parametrize("dtype", [FP32, FP64], ids=str)
@pytest.mark.parametrize("softcap", [30.0, 1e4, 1e8])
def test_a_softcap_far_above_the_logits_changes_them_little(dtype, softcap, device):
    """Of 1 - exp(-2 z / cap) nothing was left: with a cap of 1e8 every logit became 0 or 6."""
    x, target = (peaked(4, 300) / 20).to(dtype).to(device), targets(4, 300, device)
    eps = torch.finfo(dtype).eps
    for found, truth in zip(ours(x, target, softcap=softcap), exact(x, target, softcap=softcap), strict=True):
        torch.testing.assert_close(found.double(), truth, rtol=16 * eps, atol=4 * eps)


def test_the_slope_of_a_capped_logit_holds_close_to_the_cap(device):
    x, target = peaked(2, 64).to(device), targets(2, 64, device)
    found, truth = ours(x, target, softcap=2.5)[1], exact(x, target, softcap=2.5)[1]
    torch.testing.assert_close(found.double(), truth, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("far", [1e4, -3e8])
@pytest.mark.parametrize("n_cols", [60, 3000])
@pytest.mark.parametrize("gradient", [False, True])
def test_smoothing_does_not_see_what_all_logits_share(far, n_cols, gradient, device):
    """sum w lse - sum w z is a difference of two great sums; 18 nats were lost of logits at 3e8."""
    x, target = (peaked(2, n_cols) + far).to(device).requires_grad_(gradient), targets(2, n_cols, device)
    y = cross_entropy(x, target, label_smoothing=0.3)
    torch.testing.assert_close(y.detach().double(), exact(x, target, label_smoothing=0.3)[0], rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("far", [0.0, 1e4, -3e8])
@pytest.mark.parametrize("n_cols", [60, 3000, 20000])
def test_entropy_does_not_see_what_all_logits_share(far, n_cols, device):
    x, target = (peaked(3, n_cols) + far).to(device), targets(3, n_cols, device)
    x[0, target[0]] -= 2e4
    found = cross_entropy(x, target, return_token_stats=True).token_stats.entropy
    log_p = torch.log_softmax(x.double(), -1)
    torch.testing.assert_close(found.double(), -(log_p.exp() * log_p).sum(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-50, -1e-50, 1e-40])
def test_a_scale_too_small_for_32_bits_is_no_nan(scale, device):
    """Columns past the last are -inf, and -inf * 0 is NaN."""
    x, target = peaked(3, 37).to(device), targets(3, 37, device)
    for reduction in REDUCTIONS:
        torch.testing.assert_close(
            ours(x, target, reduction, scale=scale)[0].double(), exact(x, target, reduction, scale=scale)[0],
            rtol=1e-6, atol=1e-6,
        )  # fmt: skip


def test_a_softcap_too_great_for_32_bits_is_none(device):
    x, target = peaked(3, 37).to(device), targets(3, 37, device)
    torch.testing.assert_close(ours(x, target, softcap=1e60), ours(x, target), rtol=1e-5, atol=1e-6)


def test_class_156_of_uint8_is_not_ignored(device):
    """As uint8, -100 is 156."""
    x = peaked(2, 200).to(device)
    target = torch.tensor([156, 3], dtype=torch.uint8, device=device)
    stats = cross_entropy(x, target, return_token_stats=True).token_stats
    assert stats.entropy[0] > 0
    assert stats.predicted[0] == x[0].argmax()
    w = torch.eye(200, device=device)
    torch.testing.assert_close(linear_cross_entropy(x, w, target, skip_ignored=True), F.cross_entropy(x, target))


@every_reduction
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_wrong_target_spoils_its_row_of_every_gradient(reduction, create_graph, device):
    """Differentiably it was 0, and the loss NaN: nothing to see for an optimizer that looks at gradients."""
    x = peaked(3, 20).to(device).requires_grad_()
    target = torch.tensor([1, 20, -100], device=device)
    y = cross_entropy(x, target, reduction=reduction)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=create_graph)
    assert dx.isnan().all(-1).tolist() == [False, True, False]
    assert not dx.isnan()[[0, 2]].any()


def test_of_one_memory_for_several_rows_nothing_is_overwritten(device):
    leaf = peaked(1, 300).to(device).requires_grad_()
    logits = (leaf * 2).expand(4, 300)
    with pytest.raises(RuntimeError, match="inplace_backward"):
        cross_entropy(logits, targets(4, 300, device), inplace_backward=True)


VIEWS = {
    "view": lambda z: z.view(-1, 300), "flatten": lambda z: z.flatten(0, 1), "one of a batch": lambda z: z[1],
    "a stretch": lambda z: z.flatten(0, 1)[1:4],
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"return_lse": True}], ids=["alone", "with lse"])
@pytest.mark.parametrize("view", VIEWS)
def test_views_of_logits_are_overwritten(view, options, device):
    """autograd refused a Function that marks a view as dirty and returns more than that."""
    leaf = peaked(6, 300).view(2, 3, 300).to(device).requires_grad_()
    logits = VIEWS[view](leaf * 1)
    target = targets(len(logits), 300, device)
    y = cross_entropy(logits, target, inplace_backward=True, **options)
    y = y.loss if options else y
    truth, dx = exact(logits_of := VIEWS[view](leaf), target)
    torch.testing.assert_close(y.double(), truth, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits.double(), dx, rtol=1e-5, atol=1e-6)
    (found,) = torch.autograd.grad(y, leaf)
    (expected,) = torch.autograd.grad(logits_of, leaf, dx.float())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


APART = {
    "fewer columns": lambda z: z[:, :, :290].flatten(0, 1), "every second row": lambda z: z.flatten(0, 1)[::2],
    "one of each batch": lambda z: z[:, 1],
}  # fmt: skip


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
@pytest.mark.parametrize("view", APART)
def test_overwritten_rows_that_lie_apart_are_multiplied_by_what_comes_back(view, dtype, device):
    """They were multiplied as if they lay side by side: some were left as they were, and so was not what lay between.

    The factor is one that float16 does not hold, as a scaler's may be.
    """
    factor = torch.tensor(2.0**17, device=device)
    leaf = peaked(6, 300, dtype).view(2, 3, 300).to(device).requires_grad_()
    whole = leaf * 1
    before, logits = whole.detach().clone(), APART[view](whole)
    target = targets(*logits.shape, device)
    y = cross_entropy(logits, target, inplace_backward=True, dtype=FP32)
    (found,) = torch.autograd.grad(y, leaf, factor)
    _, dx = exact(logits_of := APART[view](leaf), target)
    (expected,) = torch.autograd.grad(logits_of, leaf, (dx * factor).to(dtype))
    torch.testing.assert_close(found, expected, rtol=2e-3 if dtype == FP16 else 1e-5, atol=1e-6 * factor.item())
    between = torch.ones_like(before, dtype=torch.bool)
    APART[view](between).fill_(False)
    assert torch.equal(whole.detach()[between], before[between])


@pytest.mark.parametrize("view", VIEWS)
def test_the_gradient_of_an_overwritten_view_can_be_asked_for(view, device):
    """autograd.grad said that it was not used, and retain_grad after the loss left None."""
    leaf = peaked(6, 300).view(2, 3, 300).to(device).requires_grad_()
    target = targets(len(VIEWS[view](leaf)), 300, device)
    _, dx = exact(VIEWS[view](leaf), target)
    for kept in (None, "before", "after"):
        logits = VIEWS[view](leaf * 1)
        if kept == "before":
            logits.retain_grad()
        y = cross_entropy(logits, target, inplace_backward=True)
        if kept == "after":
            logits.retain_grad()
        if kept:
            y.backward()
        found = logits.grad if kept else torch.autograd.grad(y, logits)[0]
        torch.testing.assert_close(found.double(), dx, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("whens", [("before",), ("after",), ("before", "after")], ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_hooks_of_an_overwritten_view(view, whens, device):
    """One that was registered after the loss was a crash."""
    leaf = peaked(6, 300).view(2, 3, 300).to(device).requires_grad_()
    logits = VIEWS[view](leaf * 1)
    target = targets(len(logits), 300, device)
    _, dx = exact(logits, target)
    removed = []
    for when in ("before", "after"):
        if when == "after":
            y = cross_entropy(logits, target, inplace_backward=True)
        if when in whens:
            logits.register_hook(lambda gradient: gradient * 2)
            removed.append(logits.register_hook(lambda gradient: gradient * 7))
            logits.register_hook(lambda gradient: None)
    for each in removed:
        each.remove()
    (found,) = torch.autograd.grad(y, leaf)
    torch.testing.assert_close(VIEWS[view](found).double(), dx * 2 ** len(whens), rtol=1e-5, atol=1e-6)


def test_one_of_several_views_is_refused_as_by_torch(device):
    chunk = (peaked(4, 300).to(device).requires_grad_() * 1).chunk(2)[0]
    with pytest.raises(RuntimeError, match="function that returns multiple views"):
        cross_entropy(chunk, targets(2, 300, device), inplace_backward=True)


def test_a_gradient_in_the_logits_memory_that_was_written_over_raises(device):
    leaf = peaked(4, 300).to(device).requires_grad_()
    logits, target = leaf * 1, targets(4, 300, device)
    y = cross_entropy(logits, target, inplace_backward=True)
    logits.detach().zero_()
    with pytest.raises(RuntimeError, match="inplace_backward left the gradient in the logits' memory"):
        y.backward()


def test_what_kept_the_logits_says_that_they_were_overwritten(device):
    leaf = peaked(4, 300).to(device).requires_grad_()
    logits = leaf.sigmoid()  # which keeps its result for its gradient
    y = cross_entropy(logits[1:], targets(3, 300, device), inplace_backward=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("accumulate", ["fp32", "input"])
def test_a_mean_of_many_float16_rows_does_not_overflow_on_its_way(accumulate, device):
    """The gradient of the sum of 4096 rows is beyond 65504, that of the mean is 30."""
    n = 4096
    x = torch.full((n, 2), 60.0, dtype=FP16, device=device)
    w = torch.zeros(2, 2, dtype=FP16, device=device, requires_grad=True)
    y = linear_cross_entropy(x, w, torch.zeros(n, dtype=torch.int64, device=device), accumulate=accumulate)
    (dw,) = torch.autograd.grad(y, w)
    torch.testing.assert_close(dw, torch.tensor([[-30.0, -30.0], [30.0, 30.0]], dtype=FP16, device=device))


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_linear_gradients_are_0_where_all_targets_are_ignored(dtype, chunk_size, device):
    """As torch's; of fp16 they were NaN."""
    x = peaked(4, 6).to(dtype).to(device).requires_grad_()
    w = peaked(9, 6).to(dtype).to(device).requires_grad_()
    y = linear_cross_entropy(x, w, torch.full((4,), -100, device=device), chunk_size=chunk_size)
    assert y.isnan()
    for gradient in torch.autograd.grad(y, (x, w)):
        assert (gradient == 0).all()


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_linear_gradients_of_no_targets_are_0_whatever_the_loss_is_divided_by(chunk_size, reduction, dtype, device):
    """As torch's; they were NaN."""
    x = peaked(4, 6).to(dtype).to(device).requires_grad_()
    w = peaked(9, 6).to(device).requires_grad_()
    target = torch.full((4,), -100, device=device)
    y = linear_cross_entropy(x, w.to(dtype), target, chunk_size=chunk_size, reduction=reduction)
    for scaled in (y / 0, y * torch.nan):
        for gradient in torch.autograd.grad(scaled, (x, w), retain_graph=True):
            assert (gradient == 0).all()


def test_compiled_linear_gradients_of_no_targets_are_0_whatever_the_loss_is_divided_by(device):
    torch._dynamo.reset()
    loss = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    x, w = (peaked(n, 6).to(device).requires_grad_() for n in (4, 9))
    y = loss(x, w, torch.full((4,), -100, device=device), reduction="sum")
    for gradient in torch.autograd.grad(y / 0, (x, w)):
        assert (gradient == 0).all()
    torch._dynamo.reset()


def test_linear_of_no_features(device):
    x, w = torch.ones(3, 0, device=device), torch.ones(5, 0, device=device)
    y = linear_cross_entropy(x, w, targets(3, 5, device), linear_bias=torch.arange(5.0, device=device))
    torch.testing.assert_close(y, F.cross_entropy(torch.arange(5.0, device=device).expand(3, 5), targets(3, 5, device)))


@every_reduction
@pytest.mark.parametrize("chunk_size", [1, 3, None])
def test_linear_reductions_and_upstream_gradients(reduction, chunk_size, device):
    """Liger 488, 680, 968 and 1298: none was reduced anyway, and gradients that came from above were lost."""
    x, w = peaked(7, 6).to(device).requires_grad_(), (peaked(9, 6) / 9).to(device).requires_grad_()
    target = targets(7, 9, device)
    found = []
    for y in (
        linear_cross_entropy(x, w, target, reduction=reduction, chunk_size=chunk_size),
        F.cross_entropy(x @ w.t(), target, reduction=reduction),
    ):
        dy = torch.linspace(-1, 2, y.numel(), device=device).view(y.shape)
        found.append((y, *torch.autograd.grad(y, (x, w), dy)))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_many_chunks_add_up_in_float32(device):
    """Liger 512, ml-cross-entropy 14: bf16 sums over chunks stand still once they are 256 times what is added."""
    n = 300
    x = torch.ones(n, 1, dtype=BF16, device=device)
    w = torch.zeros(2, 1, dtype=BF16, device=device, requires_grad=True)
    target = torch.zeros(n, dtype=torch.int64, device=device)
    y = linear_cross_entropy(x, w, target, reduction="sum", chunk_size=1)
    (dw,) = torch.autograd.grad(y, w)
    assert dw.flatten().tolist() == [-150.0, 150.0]


@every_reduction
def test_ignored_rows_are_written(reduction, monkeypatch, device):
    """Liger 1338: what was in memory before stood in their place."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)
    for n_cols in (20, 3000):
        x = peaked(4, n_cols).to(device).requires_grad_()
        target = targets(4, n_cols, device)
        target[1:3] = -100
        y = cross_entropy(x, target, reduction=reduction)
        theirs = F.cross_entropy(x, target, reduction=reduction)
        torch.testing.assert_close(y, theirs)
        torch.testing.assert_close(*(torch.autograd.grad(each.sum(), x)[0] for each in (y, theirs)))


def test_two_losses_of_the_same_logits(device):
    """unsloth 5002, Megatron-LM 1594: the first loss's gradient stood in the logits that the second read."""
    leaf = peaked(4, 300).to(device).requires_grad_()
    target = targets(4, 300, device)
    gradients = []
    for of in (cross_entropy, F.cross_entropy):
        logits = leaf * 2
        loss = of(logits, target) + of(logits, target.flip(0), reduction="sum")
        gradients.append(torch.autograd.grad(loss, leaf)[0])
    torch.testing.assert_close(*gradients)


def test_the_gradient_at_a_likely_target_keeps_its_bits(device):
    """Liger 1329: p - 1 was taken of a p already rounded to bf16."""
    x = torch.zeros(1, 50, device=device)
    x[0, 7] = 9.0
    x = x.to(BF16)
    dx = ours(x, torch.tensor([7], device=device))[1]
    torch.testing.assert_close(dx.double(), exact(x, torch.tensor([7], device=device))[1], rtol=2**-8, atol=0)


@every_reduction
def test_same_bits_every_time(reduction, device):
    """pytorch 71367, 17350: nll_loss2d adds with atomics."""
    x, target = peaked(60, 41).to(device).view(5, 41, 12), targets(60, 41, device).view(5, 12)
    first = ours(x, target, reduction)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(ours(x, target, reduction), first, strict=True))


def test_smoothing_is_over_all_classes_of_split_rows(device):
    """Megatron-LM 737, TE: parts smoothed over their own share of the classes."""
    n_cols = 40000
    x, target = peaked(1, n_cols).to(device), targets(1, n_cols, device)
    rows = losses.forward(x, target, Loss(reduction="sum", label_smoothing=0.2), dx=torch.empty_like(x))
    truth = exact(x, target, "sum", label_smoothing=0.2)[0]
    torch.testing.assert_close(rows.loss.sum().double(), truth, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("n_classes", [1, 5, 3000])
def test_scaled_logits_that_stand_high_are_rounded_once(n_classes, device):
    """m - z_t as one multiply-add is not 0 for the greatest logit, but what the rounding of m took: 0.016 here."""
    x = torch.full((4, n_classes), -1e9, device=device)
    x[:, 0] = torch.tensor([3e8, 1e8 / 3, 7e7 / 3, 123456789.0], device=device)
    target = torch.zeros(4, dtype=torch.int64, device=device)
    loss = cross_entropy(x, target, scale=0.001, reduction="none")
    torch.testing.assert_close(loss, torch.zeros_like(loss), atol=1e-6, rtol=0.0)
