"""cross_entropy against float64 and against torch's own: every strategy, every option, what peers get wrong by name."""

import math
import os
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import peaked
from products import QUICK, pairwise
from shapes import ALIGNMENTS, STRATEGIES, framed, small

from fused_softmax import linear_cross_entropy
from fused_softmax.core import route
from fused_softmax.core.checks import arithmetic_of
from fused_softmax.core.plan import H200, plan_reduction
from fused_softmax.ops.losses import launches as losses
from fused_softmax.ops.losses import reference as losses_reference
from fused_softmax.ops.losses.cross_entropy import CrossEntropyOutput, cross_entropy
from fused_softmax.ops.losses.options import Loss
from fused_softmax.ops.losses.sums import finish, totals_of
from fused_softmax.ops.softmax import reference

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="without a GPU or the interpreter, CPU tensors take ATen"
)
FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
DTYPES = (FP32, FP16, BF16, FP64)
OPTIONS = {
    "plain": {},
    "weights": {"weight": True},
    "smoothing": {"label_smoothing": 0.1},
    "smoothing, weights": {"label_smoothing": 0.2, "weight": True},
    "z-loss": {"lse_square_scale": 1e-2},
    "softcap": {"softcap": 5.0},
    "scale": {"scale": -0.5},
    "all": {
        "weight": True, "label_smoothing": 0.1, "lse_square_scale": 1e-2, "softcap": 7.0, "scale": 1.5,
    },
}  # fmt: skip
every_alignment = pytest.mark.parametrize("alignment", ALIGNMENTS)
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
every_reduction = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


def targets(n, n_classes, *, ignored=True, device="cpu", seed=0):
    t = torch.randint(0, n_classes, (n,), generator=torch.Generator().manual_seed(seed))
    if ignored:
        t[1::3] = -100
    return t.to(device)


def weights(n_classes, dtype=FP32, device="cpu"):
    return (torch.rand(n_classes, generator=torch.Generator().manual_seed(1)) + 0.1).to(dtype).to(device)


def named(options, n_classes, dtype=FP32, device="cpu"):
    return options | ({"weight": weights(n_classes, dtype, device)} if options.get("weight") else {})


def truth_of(x, target, reduction="mean", dy=None, **options):
    """(loss, gradient) of losses_reference.cross_entropy in fp64."""
    x = x.detach().double().requires_grad_()
    if options.get("weight") is not None:
        options["weight"] = options["weight"].double()
    loss = losses_reference.cross_entropy(x, target, reduction=reduction, **options)[0]
    (dx,) = torch.autograd.grad(loss, x, torch.ones_like(loss) if dy is None else dy.double())
    return loss.detach(), dx


def torchs(x, target, reduction="mean", dy=None, **options):
    """The same as torch computes it in x's own dtype, in fp32 arithmetic."""
    x = x.detach().clone().requires_grad_()
    arithmetic = arithmetic_of(x)
    if options.get("weight") is not None:
        options["weight"] = options["weight"].to(arithmetic)
    loss = losses_reference.cross_entropy(x, target, reduction=reduction, arithmetic=arithmetic, **options)[0]
    (dx,) = torch.autograd.grad(loss, x, torch.ones_like(loss) if dy is None else dy)
    return loss.detach(), dx


def held(ours, dtype, theirs, truth):
    """Off the truth by no more than torch's worst element and a few roundings of the greatest, in `dtype`."""
    assert torch.equal(ours.isnan(), truth.isnan())
    good = truth.isfinite()
    assert torch.equal(ours.isfinite(), good)
    ours, theirs, truth = (each.double()[good] for each in (ours, theirs, truth))
    if truth.numel():
        least = 8 * torch.finfo(dtype).eps * truth.abs().max() + 8 * torch.finfo(FP32 if dtype != FP64 else FP64).eps
        allowed = (theirs - truth).abs().max() + least
        assert (ours - truth).abs().max() <= allowed, f"{(ours - truth).abs().max():.3g} > {allowed:.3g}"


def run(strategy, x, dx, target, loss):
    """Loss of the sum or mean, and dx, by a small plan of a named strategy."""
    totals = totals_of(target, loss, x.shape[1], arithmetic_of(x)) if loss.mean else None
    itemsize = arithmetic_of(x).itemsize if loss.softcap is not None else None
    rows = losses.forward(x, target, loss, totals, dx, plan=small(strategy, x, dx, itemsize=itemsize))
    return finish(rows, totals, loss, arithmetic_of(x))[0]


@pairwise(("strategy", "alignment", "dtype"))
@every_strategy
@every_alignment
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_loss_and_gradient_in_one_pass(strategy, alignment, options, dtype, device):
    n_cols = 616 if alignment == "even" else 613
    x = (peaked(4, n_cols) / 2).to(dtype)
    source, out = framed(alignment, x, device=device)
    target = targets(4, n_cols, device=device)
    options = named(OPTIONS[options], n_cols, device=device)
    mean = strategy != "row"
    y = run(strategy, source.rows, out.rows, target, Loss(reduction="mean" if mean else "sum", **options))
    assert not source.changed(outside=False)
    assert not out.changed()
    how = {"reduction": "mean" if mean else "sum", **options}
    truth, theirs = truth_of(source.rows, target, **how), torchs(source.rows, target, **how)
    held(y, FP32, theirs[0].float(), truth[0])
    held(out.rows, dtype, theirs[1], truth[1])


@pairwise(("parts", "options"), ("alignment", "parts"), strength=1)
@every_alignment
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("options", OPTIONS)
def test_losses_alone(alignment, parts, options, device):
    """Read once, tile by tile; by several programs a row too, whose states are merged."""
    n_cols = 1240 if alignment == "even" else 1237
    x = peaked(5, n_cols) / 2
    source, _ = framed(alignment, x, device=device)
    target = targets(5, n_cols, device=device)
    options = named(OPTIONS[options], n_cols, device=device)
    plan = small("row" if parts == 1 else "split", source.rows, source.rows)
    plan = replace(plan, pieces=min(plan.pieces, 2), full_pieces=0)
    loss = Loss(reduction="none", stats=True, **options)
    rows = losses.forward(source.rows, target, loss, plan=plan)
    truth, theirs = (
        of(source.rows, target, "none", **(options | {"lse_square_scale": 0.0}))[0] for of in (truth_of, torchs)
    )
    held(rows.loss.view(-1), FP32, theirs, truth)
    z = reference.scores(source.rows.double(), -1, options.get("scale"), None, False)
    if options.get("softcap"):
        z = options["softcap"] * torch.tanh(z / options["softcap"])
    counts = target != -100
    lse = z.logsumexp(-1)
    torch.testing.assert_close((rows.m + rows.ls)[counts].double(), lse[counts], rtol=1e-6, atol=1e-6)
    p = torch.softmax(z, -1)
    entropy = lse - torch.where(p == 0, 0.0, p * z).sum(-1)
    torch.testing.assert_close(rows.entropy[counts].double(), entropy[counts], rtol=1e-5, atol=1e-5)
    top = z.float().argmax(-1)
    torch.testing.assert_close(
        z.gather(-1, rows.predicted.unsqueeze(-1))[counts], z.gather(-1, top.unsqueeze(-1))[counts]
    )


@pairwise()
@every_alignment
@pytest.mark.parametrize("n_cols", [40, 613, 3000])
@pytest.mark.parametrize("options", OPTIONS)
def test_gradient_by_a_second_read(alignment, n_cols, options, device):
    n_cols = n_cols // 8 * 8 if alignment == "even" else n_cols
    source, out = framed(alignment, peaked(4, n_cols) / 2, device=device)
    target = targets(4, n_cols, device=device)
    options = named(OPTIONS[options], n_cols, device=device)
    loss = Loss(reduction="none", **options)
    rows = losses.forward(source.rows, target, loss)
    dy = torch.tensor([1.0, 2.0, -0.5, 0.0], device=device)
    losses.backward(source.rows, target, rows.m, rows.ls, loss, dy=dy, dx=out.rows)
    assert not out.changed()
    truth, theirs = (of(source.rows, target, "none", dy=dy, **options)[1] for of in (truth_of, torchs))
    held(out.rows, FP32, theirs, truth)


@pairwise()
@every_reduction
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_public(reduction, options, dtype, device):
    x = (peaked(6, 90) / 2).to(dtype).to(device).requires_grad_()
    target = targets(6, 90, device=device)
    options = named(OPTIONS[options], 90, dtype, device)
    y = cross_entropy(x, target, reduction=reduction, **options)
    assert y.dtype == dtype
    assert y.shape == ((6,) if reduction == "none" else ())
    dy = torch.linspace(0.5, 2.0, y.numel(), device=device).to(dtype).view(y.shape)
    (dx,) = torch.autograd.grad(y, x, dy)
    truth, theirs = truth_of(x, target, reduction, dy, **options), torchs(x, target, reduction, dy, **options)
    held(y, dtype, theirs[0], truth[0])
    held(dx, dtype, theirs[1], truth[1])


@every_reduction
@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.uint8], ids=str)
def test_indices_of_every_dtype(reduction, kind, device):
    x = peaked(6, 90).to(device)
    target = targets(6, 90, ignored=False, device=device)
    y = cross_entropy(x, target.to(kind), reduction=reduction, ignore_index=int(target[2]))
    torch.testing.assert_close(y, F.cross_entropy(x, target, reduction=reduction, ignore_index=int(target[2])))


@every_reduction
@pytest.mark.parametrize("shape", [(3, 7), (3, 7, 5)], ids=str)
def test_indices_of_every_dtype_by_torchs_operations(shape, reduction, monkeypatch):
    """torch's own loss takes no uint8 where logits have more than two dims."""
    monkeypatch.setattr(route, "INTERPRET", False)
    x = peaked(math.prod(shape), 1).view(shape)
    target = targets(x[:, 0].numel(), 7, ignored=False, device="cpu").view(x[:, 0].shape)
    expected = F.cross_entropy(x, target, reduction=reduction)
    for kind in (torch.int64, torch.int32, torch.uint8):
        torch.testing.assert_close(cross_entropy(x, target.to(kind), reduction=reduction), expected)


@pytest.mark.parametrize("shape", [(7,), (3, 7), (3, 7, 5), (2, 7, 3, 4)], ids=str)
@every_reduction
def test_class_dim_is_1_of_any_rank(shape, reduction, device):
    x = peaked(math.prod(shape), 1).view(shape).to(device).requires_grad_()
    of_targets = shape[:1] + shape[2:] if len(shape) > 1 else ()
    target = targets(math.prod(of_targets), 7, device=device, ignored=len(shape) > 1).view(of_targets)
    found = []
    for of in (cross_entropy, F.cross_entropy):
        y = of(x, target, reduction=reduction)
        found += [(y, *torch.autograd.grad(y.sum(), x))]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("n_rows", [4, 3000, 9000])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_mean_is_nan_where_all_weights_that_count_are_0(smoothing, n_rows, device):
    weight = torch.arange(5.0, device=device)
    target = torch.zeros(n_rows, dtype=torch.long, device=device)
    for needs_grad in (False, True):
        x = peaked(n_rows, 5).to(device).requires_grad_(needs_grad)
        for of in (cross_entropy, F.cross_entropy):
            assert of(x, target, weight=weight, label_smoothing=smoothing).isnan()


@every_reduction
@pytest.mark.parametrize("options", ["plain", "smoothing, weights"])
def test_probabilities(reduction, options, device):
    x = peaked(6, 40).to(device).requires_grad_()
    q = torch.softmax(peaked(6, 40, seed=3), -1).to(device).requires_grad_()
    options = named(OPTIONS[options], 40, device=device)
    found = []
    for of in (cross_entropy, F.cross_entropy):
        y = of(x, q, reduction=reduction, **options)
        found += [(y, *torch.autograd.grad(y.sum(), (x, q)))]
    torch.testing.assert_close(*found)


@every_reduction
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, FP32)], ids=str)
@pytest.mark.parametrize("shape", [(40,), (6, 40), (2, 40, 3)], ids=str)
@pytest.mark.parametrize("options", ["plain", "smoothing, weights", "softcap"])
def test_probabilities_are_one_operator_where_compiled(reduction, dtypes, shape, options, device):
    """With the gradients of logits and targets, together and each alone, and a second derivative."""
    dims = [0] if len(shape) == 1 else [1]
    x = peaked(math.prod(shape), 1).view(shape).to(device, dtypes[0]).requires_grad_()
    q = torch.softmax(peaked(math.prod(shape), 1, seed=3).view(shape), *dims).to(device, dtypes[1]).requires_grad_()
    given, made = named(OPTIONS[options], 40, device=device) | {"reduction": reduction}, []

    def backend(module, _):
        made.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module

    torch._dynamo.reset()
    expected = cross_entropy(x, q, **given)
    dy = torch.linspace(0.5, 1.5, expected.numel(), device=device).view(expected.shape).to(expected.dtype)
    rough = {"rtol": 2**-7, "atol": 2**-7} if BF16 in dtypes else {}
    for each in (backend, "aot_eager"):
        found = torch.compile(cross_entropy, backend=each, fullgraph=True)(x, q, **given)
        torch.testing.assert_close(found, expected, **rough)
        for wanted in ((x, q), x, q):
            of_both = (torch.autograd.grad(y, wanted, dy, retain_graph=True) for y in (found, expected))
            torch.testing.assert_close(*of_both, **rough)
    assert made.count("fused_softmax.divergence.default") == 1
    assert not any("softmax.int" in each or "log_softmax" in each or "cross_entropy" in each for each in made)
    second = []
    for y in (torch.compile(cross_entropy, backend=backend, fullgraph=True)(x, q, **given), expected):
        of_x = torch.autograd.grad(y, x, dy, create_graph=True)[0]
        second.append(torch.autograd.grad(of_x.float().square().sum(), x)[0])
    torch.testing.assert_close(*second, **rough)


@pytest.mark.parametrize("n_cols", [60, 700, 5000])
@pytest.mark.parametrize("where", ["leading", "middle", "trailing"])
def test_a_finite_row_with_a_tile_of_minus_infinity_is_finite(n_cols, where, device):
    """flash-attention 1930, and four other peers: NaN."""
    x = peaked(3, n_cols)
    third = n_cols // 3
    start = {"leading": 0, "middle": third, "trailing": 2 * third}[where]
    x[:, start : start + third] = -math.inf
    target = torch.full((3,), (start + third + 1) % n_cols)
    x = x.to(device).requires_grad_()
    for reduction in ("mean", "none"):
        y = cross_entropy(x, target.to(device), reduction=reduction)
        theirs = F.cross_entropy(x, target.to(device), reduction=reduction)
        torch.testing.assert_close(y, theirs)
        torch.testing.assert_close(*(torch.autograd.grad(each.sum(), x)[0] for each in (y, theirs)))


@every_reduction
def test_all_targets_ignored(reduction, device):
    """A mean of nothing is NaN, as torch's; Liger and TE say 0. Its gradient is torch's too."""
    x = peaked(4, 30).to(device).requires_grad_()
    target = torch.full((4,), -100, device=device)
    found = []
    for of in (cross_entropy, F.cross_entropy):
        y = of(x, target, reduction=reduction)
        found += [(y, *torch.autograd.grad(y.sum(), x))]
    torch.testing.assert_close(*found, equal_nan=True)


@pytest.mark.parametrize("options", [{}, {"inplace_backward": True}, {"label_smoothing": 0.1}], ids=str)
@pytest.mark.parametrize("n_classes", [30, 9000])
def test_a_sum_over_no_targets_has_a_gradient_of_0_whatever_it_is_divided_by(n_classes, options, device):
    """As torch's: a step of training of which nothing counts divides by 0."""
    x = peaked(4, n_classes).to(device).requires_grad_()
    y = cross_entropy(x * 1, torch.full((4,), -100, device=device), reduction="sum", **options)
    first = torch.autograd.grad(y / 0, x, retain_graph=True)
    found = first if options.get("inplace_backward") else (*first, *torch.autograd.grad(y * torch.nan, x))
    assert all((each == 0).all() for each in found)


def test_a_gradient_of_one_element_is_scaled(device):
    """Its number is a constant of the kernel, which could not be converted: a CompilationError on GPUs."""
    x = torch.ones(1, 1, device=device, requires_grad=True)
    y = cross_entropy(x, torch.zeros(1, dtype=torch.int64, device=device))
    (dx,) = torch.autograd.grad(y, x, torch.full_like(y, 3.0))
    torch.testing.assert_close(dx, torch.zeros_like(x))


@every_reduction
@pytest.mark.parametrize("shape", [(0, 5), (3, 1)], ids=str)
def test_no_rows_and_one_class(reduction, shape, device):
    x = torch.ones(shape, device=device, requires_grad=True)
    target = torch.zeros(shape[0], dtype=torch.int64, device=device)
    torch.testing.assert_close(
        cross_entropy(x, target, reduction=reduction), F.cross_entropy(x, target, reduction=reduction), equal_nan=True
    )


@every_strategy
@pytest.mark.parametrize("bad", [613, -1, 2**40, -(2**40)])
def test_a_target_that_is_no_class_spoils_its_own_row_alone(strategy, bad, device):
    """QuACK, attorch and Unsloth read out of bounds."""
    source, out = framed("shifted", peaked(3, 613), device=device)
    target = targets(3, 613, ignored=False, device=device)
    target[1] = bad
    y = run(strategy, source.rows, out.rows, target, Loss(reduction="sum"))
    assert y.isnan()
    assert not out.changed()
    assert out.rows.isnan().all(-1).tolist() == [False, True, False]
    good = [0, 2]
    _, dx = truth_of(source.rows[good], target[good], "sum")
    torch.testing.assert_close(out.rows[good].double(), dx, rtol=1e-5, atol=1e-6)


def test_targets_are_checked_where_asked(monkeypatch, device):
    monkeypatch.setattr("fused_softmax.core.route.CHECK", True)
    with pytest.raises(IndexError, match=r"target 9 of row 2 is out of range \[0, 4\]"):
        cross_entropy(torch.ones(3, 5, device=device), torch.tensor([0, -100, 9], device=device))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_second_backward_and_a_changed_first_gradient(reduction, device):
    x = peaked(4, 70).to(device).requires_grad_()
    target = targets(4, 70, device=device)
    y = cross_entropy(x, target, reduction=reduction)
    (first,) = torch.autograd.grad(y, x, torch.tensor(3.0, device=device), retain_graph=True)
    truth = truth_of(x, target, reduction)[1]
    torch.testing.assert_close(first.double(), 3 * truth, rtol=1e-5, atol=1e-6)
    first.fill_(7.0)
    (second,) = torch.autograd.grad(y, x, torch.tensor(0.5, device=device), retain_graph=True)
    torch.testing.assert_close(second.double(), truth / 2, rtol=1e-5, atol=1e-6)
    (third,) = torch.autograd.grad(y, x)
    torch.testing.assert_close(third.double(), truth, rtol=1e-5, atol=1e-6)


@pairwise(strength=1)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("n_classes", [7, 1237])
@pytest.mark.parametrize("dtype", [FP64, FP32, BF16], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_a_second_backward_has_the_bits_of_the_first(options, dtype, n_classes, reduction, device):
    """gradcheck asks for that: as a user calls it, it allows no other rounding."""
    x = peaked(4, n_classes).to(device, dtype).requires_grad_()
    target, dy = targets(4, n_classes, device=device), torch.tensor(1.1, device=device, dtype=dtype)
    options = named(OPTIONS[options], n_classes, dtype if dtype == FP64 else FP32, device)
    found = cross_entropy(x, target, reduction=reduction, return_lse=True, **options)
    first, second, third = (torch.autograd.grad(found.loss, x, dy, retain_graph=True)[0] for _ in range(3))
    assert torch.equal(first, second)
    assert torch.equal(first, third)
    assert first.data_ptr() != second.data_ptr() != third.data_ptr()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("what", ["logits", "target"])
def test_saved_tensors_that_a_hook_lays_out_anew(what, reduction, device):
    """A hook returns what has the same values, and may have other strides."""
    x, target = peaked(4, 37).to(device).requires_grad_(), targets(4, 37, device=device)

    def laid_out_anew(saved):
        if what == "logits" and saved.ndim == 2 and saved.shape[1] == 37:
            return saved.detach().t().contiguous().t()
        if what == "target" and saved.dtype == torch.int64:
            return torch.stack([saved, saved * 0], 1)[:, 0]
        return saved

    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, laid_out_anew):
        loss = cross_entropy(x, target, reduction=reduction)
    wanted = torch.autograd.grad(cross_entropy(x, target, reduction=reduction).sum(), x)[0]
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(loss.sum(), x, retain_graph=True)[0], wanted)


@pytest.mark.parametrize("how", ["laid out anew", "with torch's neg bit", "as they were"])
def test_saved_states_of_rows_that_a_hook_returns(how, device):
    """Of a call whose gradient is kept: m and log s of each row are read by kernels too."""
    x, target = peaked(4, 37).to(device).requires_grad_(), targets(4, 37, device=device)
    dy = torch.linspace(0.5, 2.0, 4, device=device)
    wanted = [torch.autograd.grad(cross_entropy(x, target, reduction="none"), x, dy)[0] for _ in range(2)]
    of_rows = []

    def returned(saved):
        if saved.shape != (4,) or not saved.is_floating_point():
            return saved
        of_rows.append(saved)
        if how == "laid out anew":
            return torch.stack([saved, saved * 0], 1)[:, 0]
        return torch._neg_view(-saved) if how == "with torch's neg bit" else saved

    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, returned):
        loss = cross_entropy(x, target, reduction="none")
    found = torch.autograd.grad(loss, x, dy)[0]
    assert len(of_rows) >= 2
    assert all(torch.equal(each, found) for each in wanted)


@pytest.mark.parametrize("of", ["rows", "a linear layer"])
def test_class_weights_that_were_changed_before_they_are_read_again(of, device):
    """As torch's cross_entropy, rather than to take the new ones."""
    x, target = peaked(4, 37).to(device).requires_grad_(), targets(4, 37, device=device)
    weight = torch.linspace(0.5, 2.0, 37, device=device)
    if of == "rows":
        loss = cross_entropy(x, target, weight)
        torch.autograd.grad(loss, x, retain_graph=True)
    else:
        loss = linear_cross_entropy(x, torch.eye(37, device=device), target, weight=weight, reduction="none").sum()
    weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, x)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_under_vmap(reduction, device):
    x, target = peaked(4, 37).to(device).requires_grad_(), targets(4, 37, device=device)
    loss = cross_entropy(x, target, reduction=reduction)
    dy = torch.tensor([1.0, 2.0, -0.5], device=device)[(...,) + (None,) * loss.ndim].expand(3, *loss.shape)
    found = torch.func.vmap(lambda each: torch.autograd.grad(loss, x, each, retain_graph=True)[0])(dy)
    for one, each in zip(found, dy, strict=True):
        torch.testing.assert_close(one, torch.autograd.grad(loss, x, each, retain_graph=True)[0])


@pairwise(strength=1)
@every_reduction
@pytest.mark.parametrize("options", OPTIONS)
def test_derivatives(reduction, options, device):
    """First and second, of all outputs, in fp64, against finite differences."""
    x = peaked(3, 7).double().to(device).requires_grad_()
    target = targets(3, 7, device=device)
    options = named(OPTIONS[options], 7, FP64, device)

    def of(x):
        found = cross_entropy(x, target, reduction=reduction, return_lse=True, return_z_loss=True, **options)
        return found.loss, found.lse, found.z_loss

    assert torch.autograd.gradcheck(of, x, fast_mode=QUICK)
    assert torch.autograd.gradgradcheck(of, x, fast_mode=QUICK)


def test_logits_are_never_written_unless_asked(device):
    """Liger overwrites them always, in evaluation too."""
    for dtype in (FP32, BF16):
        x = peaked(4, 300).to(dtype).to(device).requires_grad_()
        before = x.detach().clone()
        for reduction in ("mean", "none"):
            cross_entropy(x, targets(4, 300, device=device), reduction=reduction).sum().backward()
        with torch.no_grad():
            cross_entropy(x, targets(4, 300, device=device))
        assert torch.equal(x, before)


@pytest.mark.parametrize("n_cols", [300, 3000])
def test_inplace_backward_takes_the_logits_memory(n_cols, device):
    leaf = peaked(4, n_cols).to(device).requires_grad_()
    target = targets(4, n_cols, device=device)
    logits = leaf * 2
    y = cross_entropy(logits, target, inplace_backward=True)
    truth = truth_of(leaf, target, scale=2.0)
    torch.testing.assert_close(y.double(), truth[0], rtol=1e-5, atol=1e-6)
    y.backward()
    torch.testing.assert_close(leaf.grad.double(), truth[1], rtol=1e-5, atol=1e-6)
    for parameter in (leaf, leaf[1:], leaf.view(2, 2, n_cols)[0]):
        with pytest.raises(RuntimeError, match=r"inplace_backward.*leaf"):
            cross_entropy(parameter, target[: len(parameter)], inplace_backward=True)


@pytest.mark.parametrize("ignored", [-100, 0, 3])
def test_token_statistics(ignored, device):
    x = peaked(6, 200).to(device).requires_grad_()
    target = targets(6, 200, device=device)
    target[target == -100] = ignored
    target[0] = x[0].argmax()
    options = {"ignore_index": ignored, "lse_square_scale": 1e-3}
    found = cross_entropy(x, target, return_token_stats=True, **options)
    assert isinstance(found, CrossEntropyOutput)
    stats = found.token_stats
    counts = target != ignored
    torch.testing.assert_close(stats.loss, F.cross_entropy(x, target, ignore_index=ignored, reduction="none"))
    p = torch.softmax(x, -1)
    torch.testing.assert_close(stats.entropy, torch.where(counts, -(p * p.log()).sum(-1), 0.0))
    assert torch.equal(stats.predicted, torch.where(counts, x.argmax(-1), 0))
    assert torch.equal(stats.correct, counts & (x.argmax(-1) == target))
    found.loss.backward()
    torch.testing.assert_close(x.grad.double(), truth_of(x, target, **options)[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("more", [(), (5,)])
@pytest.mark.parametrize("call", [cross_entropy, F.cross_entropy])
def test_losses_of_rows_may_be_changed_in_place(call, more, device):
    x = peaked(3, 100).view(3, -1, *more).to(device).requires_grad_()
    target = targets(3 * math.prod(more), x.shape[1], device=device).view(3, *more)
    loss = call(x, target, reduction="none")
    loss *= 2
    (found,) = torch.autograd.grad(loss.sum(), x)
    (once,) = torch.autograd.grad(call(x, target, reduction="sum"), x)
    torch.testing.assert_close(found, 2 * once)


def test_no_gradient_is_computed_where_none_is_asked_for(monkeypatch, device):
    x, target = peaked(4, 700).to(device), targets(4, 700, device=device)
    monkeypatch.setattr(losses, "plan_loss", lambda *a, **k: pytest.fail("planned to hold rows for a gradient"))
    cross_entropy(x, target)
    with torch.no_grad():
        cross_entropy(x.requires_grad_(), target)


@pytest.mark.parametrize("n_rows", [1, 40000])
def test_totals_of_many_targets(n_rows, device):
    target, weight = targets(n_rows, 50, device=device), weights(50, device=device)
    totals = totals_of(target, Loss(weight=weight), 50, FP32)
    kept = target[target != -100]
    torch.testing.assert_close(totals[0].sum(), weight[kept].sum())
    assert totals[1].sum() == len(kept)


def test_the_plan_reads_long_rows_by_parts(device):
    assert plan_reduction(8, 32000, 2, H200).parts > 1


BAD = {
    "reduction": ({"reduction": "avg"}, ValueError, "reduction.*avg"),
    "smoothing": ({"label_smoothing": 1.5}, RuntimeError, "label_smoothing.*1.5"),
    "softcap": ({"softcap": 0.0}, ValueError, "softcap.*0.0"),
    "scale": ({"scale": math.inf}, ValueError, "scale.*inf"),
    "scale type": ({"scale": "2"}, TypeError, "scale.*str"),
    "weight length": ({"weight": torch.ones(4)}, RuntimeError, r"weight.*\(3,\).*\(4,\)"),
    "weight dtype": ({"weight": torch.ones(3, dtype=torch.int64)}, RuntimeError, "weight.*float.*int64"),
    "target shape": ({"target": torch.zeros(3, dtype=torch.int64)}, ValueError, r"target.*\(2,\).*\(3,\)"),
    "target dtype": ({"target": torch.zeros(2, dtype=torch.int16)}, RuntimeError, "target.*int16"),
    "probabilities' shape": ({"target": torch.zeros(2)}, RuntimeError, r"target.*\(2, 3\).*\(2,\)"),
    "target type": ({"target": [0, 1]}, TypeError, "target.*list"),
    "input type": ({"input": [0, 1]}, TypeError, "input.*list"),
    "input dtype": ({"input": torch.ones(2, 3, dtype=torch.int64)}, NotImplementedError, "input.*int64"),
    "ignore_index": ({"ignore_index": 1.5}, TypeError, "ignore_index.*1.5"),
    "dtype": ({"dtype": torch.int32}, TypeError, "dtype.*int32"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name, device):
    arguments, error, message = BAD[name]
    arguments = {"input": torch.ones(2, 3), "target": torch.zeros(2, dtype=torch.int64)} | arguments
    arguments = {
        key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in arguments.items()
    }
    with pytest.raises(error, match=f"^cross_entropy: {message}"):
        cross_entropy(**arguments)
