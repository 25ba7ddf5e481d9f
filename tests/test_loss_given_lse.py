"""cross_entropy of rows whose lse, that of longer rows, is given: all ways it takes against float64, and its errors."""

import os
import subprocess
import sys

import pytest
import torch
from conftest import peaked
from products import QUICK, pairwise
from shapes import ALIGNMENTS, framed
from test_cross_entropy import held, named, targets
from test_library import compiled
from test_library import targets as nodes
from torch._dynamo.testing import CompileCounterWithBackend

from fused_softmax import cross_entropy, nn
from fused_softmax.core import calls
from fused_softmax.ops.losses import given_lse as cross_entropy_given_lse
from fused_softmax.ops.losses import launches as cross_entropy_calls
from fused_softmax.ops.losses import reference

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
kernels = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="without a GPU or the interpreter, CPU tensors take ATen"
)
FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
OPTIONS = {
    "plain": {}, "weights": {"weight": True}, "softcap": {"softcap": 5.0}, "scale": {"scale": -0.5},
    "all": {"weight": True, "softcap": 7.0, "scale": 1.5},
}  # fmt: skip
every_reduction = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


def longer(x, n_more=30, **options):
    """The lse of rows of which x is a part."""
    z = torch.cat((x.detach(), peaked(len(x), n_more, seed=9).to(x)), 1).double() * options.get("scale", 1.0)
    z = z if options.get("softcap") is None else options["softcap"] * torch.tanh(z / options["softcap"])
    return torch.logsumexp(z, 1).to(FP64 if x.dtype == FP64 else FP32)


def exact(x, target, lse, reduction, dy, *, weight=None, softcap=None, scale=1.0, arithmetic=FP64):
    """(loss, gradient) by the formulas themselves."""
    x, lse, dy = x.detach().to(arithmetic), lse.to(arithmetic), dy.to(arithmetic)
    z, slope = x * scale, torch.full_like(x, scale)
    if softcap is not None:
        z, slope = softcap * torch.tanh(z / softcap), slope / torch.cosh(z / softcap) ** 2
    kept = target != -100
    t = torch.where(kept, target, 0)
    w = (torch.ones(x.shape[1], dtype=arithmetic, device=x.device) if weight is None else weight.to(arithmetic))[t]
    w = torch.where(kept, w, 0.0)
    loss = w * (lse - z.gather(1, t[:, None])[:, 0])
    total = w.sum() if weight is not None else kept.sum()
    share = w * dy / (total if reduction == "mean" else 1)
    dx = torch.exp(z - lse[:, None]).scatter_add(1, t[:, None], torch.full_like(lse, -1.0)[:, None])
    loss = loss if reduction == "none" else loss.sum() / (total if reduction == "mean" else 1)
    return loss, dx * share[:, None] * slope


@kernels
@pairwise(("dtype", "reduction"), strength=1)
@every_reduction
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16, FP64], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("inplace", [False, True])
def test_loss_and_gradient(reduction, dtype, options, inplace, device):
    x = (peaked(6, 90) / 2).to(dtype).to(device).requires_grad_()
    target = targets(6, 90, device=device)
    options = named(OPTIONS[options], 90, dtype, device)
    lse = longer(x, **options)
    logits = x * 1 if inplace else x
    y = cross_entropy(logits, target, reduction=reduction, lse=lse, inplace_backward=inplace, **options)
    assert (y.dtype, y.shape) == (dtype, (6,) if reduction == "none" else ())
    dy = torch.linspace(0.5, 2.0, y.numel(), device=device).to(dtype).view(y.shape)
    (dx,) = torch.autograd.grad(y, x, dy)
    truth = exact(x, target, lse, reduction, dy, **options)
    theirs = exact(x, target, lse, reduction, dy, **options, arithmetic=FP64 if dtype == FP64 else FP32)
    held(y, dtype, theirs[0].to(dtype), truth[0])
    held(dx, dtype, theirs[1].to(dtype), truth[1])


@kernels
@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_rows_however_they_lie(alignment, device):
    n_cols = 616 if alignment == "even" else 613
    source, _ = framed(alignment, peaked(4, n_cols), device=device)
    x = source.rows.requires_grad_()
    target, lse = targets(4, n_cols, device=device), longer(source.rows)
    y = cross_entropy(x, target, lse=lse.repeat_interleave(2)[::2], reduction="none")
    (dx,) = torch.autograd.grad(y.sum(), x)
    truth = exact(x, target, lse, "none", torch.ones_like(lse))
    torch.testing.assert_close((y.double(), dx.double()), truth, rtol=1e-5, atol=1e-5)
    assert not source.changed(outside=False)


@kernels
@pytest.mark.parametrize("n", [1, 127, 300])
def test_rows_of_several_programs(n, device):
    x, target = peaked(n, 8).to(device), targets(n, 8, device=device)
    lse = longer(x)
    y = cross_entropy(x, target, lse=lse, reduction="none")
    torch.testing.assert_close(y.double(), exact(x, target, lse, "none", lse)[0], rtol=1e-5, atol=1e-5)


@kernels
@every_reduction
def test_of_whole_rows_it_is_the_loss(reduction, device):
    """Of any rank, and with the lse that another call returned."""
    for shape in ((7,), (3, 7), (3, 7, 5)):
        of_targets = shape[:1] + shape[2:] if len(shape) > 1 else ()
        n = torch.Size(of_targets).numel()
        x = peaked(n, 7).view(*of_targets, 7).movedim(-1, min(1, len(shape) - 1)).to(device).requires_grad_()
        target = targets(n, 7, device=device, ignored=False).view(of_targets)
        whole = cross_entropy(x, target, reduction=reduction, return_lse=True)
        found = cross_entropy(x, target, reduction=reduction, lse=whole.lse)
        torch.testing.assert_close(found, whole.loss)
        torch.testing.assert_close(
            *(torch.autograd.grad(y.sum(), x)[0] for y in (found, whole.loss)), rtol=1e-5, atol=1e-6
        )


@kernels
def test_shards_of_classes_make_the_gradient_of_the_whole(device):
    x, target = peaked(5, 60).to(device).requires_grad_(), targets(5, 60, device=device)
    whole = cross_entropy(x, target, reduction="sum", return_lse=True)
    (expected,) = torch.autograd.grad(whole.loss, x)
    total, dx = 0.0, []
    for first in (0, 20, 40):
        here = (target >= first) & (target < first + 20)
        shard = x.detach()[:, first : first + 20].clone().requires_grad_()
        at = torch.where(here, target - first, 0)
        rows = cross_entropy(shard, at, reduction="none", lse=whole.lse)
        total = total + torch.where(here, rows, 0.0).sum()
        dx.append(torch.autograd.grad(torch.where(here, rows, 0.0).sum(), shard)[0])
    torch.testing.assert_close(total, whole.loss)
    mine = torch.zeros_like(x, dtype=torch.bool)
    for row, t in enumerate(target.tolist()):
        if t >= 0:
            mine[row, t // 20 * 20 : t // 20 * 20 + 20] = True
    torch.testing.assert_close(torch.cat(dx, 1), torch.where(mine, expected, 0.0), rtol=1e-5, atol=1e-6)


@kernels
def test_of_the_logits_those_of_the_targets_alone_are_read(device):
    x, target = peaked(5, 40).to(device), targets(5, 40, device=device, ignored=False)
    lse = longer(x)
    spoilt = torch.full_like(x, float("nan")).scatter(1, target[:, None], x.gather(1, target[:, None]))
    target[2] = -100
    spoilt[2] = float("nan")
    assert torch.equal(cross_entropy(spoilt, target, lse=lse), cross_entropy(x, target, lse=lse))


@kernels
@every_reduction
def test_ignored_wrong_and_no_targets(reduction, device):
    x = peaked(4, 30).to(device).requires_grad_()
    lse, target = longer(x), torch.tensor([3, -100, 30, 7], device=device)
    y = cross_entropy(x, target, reduction=reduction, lse=lse)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx.isnan().all(-1).tolist() == [False, False, True, False]
    assert dx[1].eq(0).all()
    assert y.isnan().tolist() == ([False, False, True, False] if reduction == "none" else True)
    y = cross_entropy(x, torch.full_like(target, -100), reduction=reduction, lse=lse)
    assert y.isnan() if reduction == "mean" else y.eq(0).all()
    assert cross_entropy(x[:0], target[:0], reduction="sum", lse=lse[:0]) == 0


def test_lse_is_a_constant(device):
    x, target = peaked(4, 30).to(device).requires_grad_(), targets(4, 30, device=device)
    lse = longer(x).requires_grad_()
    found = cross_entropy(x, target, lse=lse * 1, return_lse=True, return_z_loss=True)
    assert found.loss.requires_grad
    assert not found.lse.requires_grad
    assert found.z_loss == 0
    torch.testing.assert_close(found.lse, lse.detach(), rtol=0, atol=0)
    (none,) = torch.autograd.grad(found.loss, lse, allow_unused=True)
    assert none is None
    assert not cross_entropy(x.detach(), target, lse=lse).requires_grad
    half = cross_entropy(x, target, lse=lse.half(), return_lse=True)
    assert half.lse.dtype == FP16
    torch.testing.assert_close(half.loss, found.loss, rtol=1e-3, atol=1e-3)


@every_reduction
@pytest.mark.parametrize("options", OPTIONS)
def test_derivatives(reduction, options, device):
    """The first with the lse of what x is; the second with a lse that stays."""
    x = (peaked(3, 7) / 4).double().to(device).requires_grad_()
    target, options = targets(3, 7, device=device), named(OPTIONS[options], 7, FP64, device)

    def loss(x):
        return cross_entropy(x, target, reduction=reduction, lse=longer(x, **options), **options)

    assert torch.autograd.gradcheck(loss, x, fast_mode=QUICK)
    lse = longer(x, **options)

    def gradient(x):
        y = cross_entropy(x, target, reduction=reduction, lse=lse, **options)
        return torch.autograd.grad(y.sum(), x, create_graph=True)[0]

    assert torch.autograd.gradcheck(gradient, x, fast_mode=QUICK)
    y = cross_entropy(x, target, reduction=reduction, lse=lse, **options)
    (plain,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    torch.testing.assert_close(plain, gradient(x), rtol=1e-10, atol=1e-12)
    dy = torch.stack((torch.ones_like(y), torch.full_like(y, 2.0)))
    (batch,) = torch.autograd.grad(y, x, dy, is_grads_batched=True)
    torch.testing.assert_close(batch, torch.stack((plain, 2 * plain)), rtol=1e-10, atol=1e-12)


@kernels
@pairwise()
@every_reduction
@pytest.mark.parametrize("options", ["plain", "all"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_compiled_it_is_one_operator_and_its_gradient_another(reduction, options, dtype, device):
    torch._dynamo.reset()
    x = peaked(5, 70, dtype).to(device).requires_grad_()
    target, options = targets(5, 70, device=device), named(OPTIONS[options], 70, device=device)
    lse = longer(x, **options).requires_grad_()
    function, graphs = compiled(lambda x, lse: cross_entropy(x, target, reduction=reduction, lse=lse, **options))
    results = []
    for of in (function, lambda x, lse: cross_entropy(x, target, reduction=reduction, lse=lse, **options)):
        y = of(x, lse)
        results.append((y, torch.autograd.grad(y.sum(), x)[0]))
    torch.testing.assert_close(*results)
    ours = [node.split(".")[1] for node in nodes(graphs[0]) if node.startswith("fused_softmax.")]
    assert ours == ["cross_entropy_given_lse"]
    found = torch.compile(cross_entropy, backend="aot_eager", fullgraph=True)(
        x, target, lse=lse, return_lse=True, return_z_loss=True
    )
    torch.testing.assert_close(found.lse, lse.detach())
    assert not found.lse.requires_grad


@kernels
def test_any_number_of_rows_compiles_once(device):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(lambda x, t, lse: cross_entropy(x, t, lse=lse), backend=counter, fullgraph=True)
    for n in (3, 5, 9, 4):  # the second makes rows dynamic
        x, target = peaked(n, 40).to(device).requires_grad_(), targets(n, 40, device=device)
        lse = longer(x)
        found, plain = function(x, target, lse), cross_entropy(x, target, lse=lse)
        torch.testing.assert_close(found, plain)
        torch.testing.assert_close(*(torch.autograd.grad(each, x)[0] for each in (found, plain)))
    assert counter.frame_count == 2


@pytest.mark.parametrize("transform", ["grad", "vmap", "vmap of grad", "jvp"])
@pytest.mark.parametrize("compile", [False, True])
def test_functorchs_transforms(transform, compile, device):
    torch._dynamo.reset()
    x, target = peaked(6, 20).view(2, 3, 20).to(device) / 4, targets(3, 20, device=device)
    lse = longer(x[0])
    transforms = {
        "grad": lambda f: lambda x: torch.func.grad(f)(x[0]),
        "vmap": torch.vmap,
        "vmap of grad": lambda f: torch.vmap(torch.func.grad(f)),
        "jvp": lambda f: lambda x: torch.func.jvp(f, (x[0],), (x[1],))[1],
    }
    call = transforms[transform](lambda x: cross_entropy(x, target, lse=lse))
    found = (torch.compile(call, backend="aot_eager", fullgraph=True) if compile else call)(x)

    def of(x):
        x = x.clone().requires_grad_()
        y = cross_entropy(x, target, lse=lse)
        return y.detach(), torch.autograd.grad(y, x)[0]

    each = [of(row) for row in x]
    expected = {
        "grad": lambda: each[0][1], "vmap": lambda: torch.stack([y for y, _ in each]),
        "vmap of grad": lambda: torch.stack([dx for _, dx in each]), "jvp": lambda: (each[0][1] * x[1]).sum(),
    }  # fmt: skip
    torch.testing.assert_close(found, expected[transform]())


@kernels
def test_an_eager_call_reads_no_rows_in_its_forward_pass(device, monkeypatch):
    def fail(*arguments, **options):
        raise AssertionError("rows were read")

    monkeypatch.setattr(cross_entropy_calls, "prepare", fail)
    monkeypatch.setattr(torch.ops.fused_softmax.cross_entropy_given_lse, "default", fail)
    x, target = peaked(3, 40).to(device).requires_grad_(), targets(3, 40, device=device)
    for reduction in ("mean", "sum", "none"):
        assert cross_entropy(x, target, lse=longer(x), reduction=reduction).requires_grad


@kernels
def test_a_kept_call_takes_another_lse_and_another_number_of_rows(device, monkeypatch):
    calls.forget()
    for n in (3, 5):
        x, target = peaked(n, 40).to(device), targets(n, 40, device=device)
        lse = longer(x)
        first = cross_entropy(x, target, lse=lse, softcap=9.0)
        monkeypatch.setattr(cross_entropy_given_lse, "prepare_given_lse", None)
        monkeypatch.setattr("fused_softmax.core.launch.prepare", None)
        torch.testing.assert_close(cross_entropy(x, target, lse=lse + 1.0, softcap=9.0), first + 1.0)


def test_deterministic(device):
    x, target = peaked(4, 30).to(device).requires_grad_(), targets(4, 30, device=device)
    lse = longer(x)
    y = cross_entropy(x, target, lse=lse)
    torch.use_deterministic_algorithms(True)
    try:
        again = cross_entropy(x, target, lse=lse)
        assert torch.equal(again, y)
        assert torch.equal(*(torch.autograd.grad(each, x)[0] for each in (y, again)))
    finally:
        torch.use_deterministic_algorithms(False)


def test_as_a_module(device):
    x, target = peaked(4, 30).to(device), targets(4, 30, device=device)
    lse = longer(x)
    torch.testing.assert_close(nn.CrossEntropyLoss()(x, target, lse=lse), cross_entropy(x, target, lse=lse))
    with pytest.raises(TypeError, match="cross_entropy has no argument 'lse'"):
        nn.CrossEntropyLoss(lse=lse)


BAD = {
    "type": ({"lse": 1.0}, TypeError, "lse.*float"),
    "dtype": ({"lse": torch.ones(2, dtype=torch.int64)}, TypeError, "lse.*float.*int64"),
    "shape": ({"lse": torch.ones(3)}, ValueError, r"lse.*\(2,\).*\(3,\)"),
    "dims": ({"lse": torch.ones(2, 1)}, ValueError, r"lse.*\(2,\).*\(2, 1\)"),
    "device": ({"lse": torch.ones(2, device="meta")}, RuntimeError, "lse.*meta"),
    "layout": ({"lse": torch.ones(2).to_sparse()}, RuntimeError, "lse.*dense"),
    "probabilities": ({"target": torch.ones(2, 3) / 3, "lse": torch.ones(2)}, ValueError, "lse.*probabilities"),
    "smoothing": ({"label_smoothing": 0.1}, ValueError, "label_smoothing.*lse"),
    "z-loss": ({"lse_square_scale": 1e-4}, ValueError, "lse_square_scale.*lse"),
    "statistics": ({"return_token_stats": True}, ValueError, "return_token_stats.*lse"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name, device):
    arguments, error, message = BAD[name]
    given = {"input": torch.ones(2, 3), "target": torch.zeros(2, dtype=torch.int64), "lse": torch.ones(2)} | arguments
    moved = {k: v for k, v in given.items() if isinstance(v, torch.Tensor) and v.device.type != "meta"}
    given |= {k: v.to(device) for k, v in moved.items()}
    for _ in range(2):
        with pytest.raises(error, match=f"^cross_entropy: {message}"):
            cross_entropy(**given)


def test_where_there_are_no_kernels_it_is_made_of_torchs_operations():
    script = """
import torch, fused_softmax
from fused_softmax import cross_entropy; from fused_softmax.core import launch
def fail(*a, **k): raise AssertionError("a kernel was prepared")
launch.prepare = fail
torch.manual_seed(0)
x, t, weight = torch.randn(4, 9, dtype=torch.float64, requires_grad=True), torch.tensor([1, -100, 8, 0]), torch.rand(9)
lse = torch.logsumexp(2 * x.detach(), 1) + 0.3
for reduction in ("mean", "sum", "none"):
    options = dict(weight=weight, reduction=reduction, scale=2.0)
    op = torch.ops.fused_softmax.cross_entropy_given_lse(x, t, lse, **options)
    ours = fused_softmax.cross_entropy(x, t, lse=lse, **options)
    w = weight.double()[t.clamp(0)] * (t >= 0)
    rows = w * (lse - 2 * x.detach().gather(1, t.clamp(0)[:, None])[:, 0])
    truth = rows if reduction == "none" else rows.sum() / (w.sum() if reduction == "mean" else 1)
    share = 2 * w / (w.sum() if reduction == "mean" else 1)
    dx = (2 * x.detach() - lse[:, None]).exp() - torch.nn.functional.one_hot(t.clamp(0), 9)
    for y in (op, ours):
        torch.testing.assert_close(y.detach(), truth)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], dx * share[:, None])
out = fused_softmax.cross_entropy(x, t, lse=lse, return_lse=True)
assert torch.equal(out.lse, lse)
torch.compile(fused_softmax.cross_entropy, backend="aot_eager", fullgraph=True)(x, t, lse=lse).backward()
"""
    environment = {k: v for k, v in os.environ.items() if k not in ("FUSED_SOFTMAX_INTERPRET", "TRITON_INTERPRET")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_reference_is_the_formula(device):
    x, target = peaked(4, 30).double().to(device).requires_grad_(), targets(4, 30, device=device)
    lse, weight = longer(x, scale=0.5), torch.rand(30, dtype=FP64, device=device)
    y, given, z = reference.cross_entropy(x, target, weight, scale=0.5, lse=lse)
    (dx,) = torch.autograd.grad(y, x)
    truth = exact(x, target, lse, "mean", torch.ones_like(y), weight=weight, scale=0.5)
    torch.testing.assert_close((y.detach(), dx), truth, rtol=1e-12, atol=1e-12)
    assert torch.equal(given, lse)
    assert z == 0
