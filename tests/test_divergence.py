"""divergence against float64: kinds, options, hard rows, columns, derivatives, and the same bits in any batch.

And cross_entropy of probabilities, which runs on the same kernels, against torch's.
"""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from conftest import kernels, peaked
from products import QUICK, pairwise
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fused_softmax
from fused_softmax import cross_entropy, divergence
from fused_softmax.core import calls, route
from fused_softmax.core.plan import H100, plan_alone
from fused_softmax.ops.losses import divergence as divergence_calls

pytestmark = kernels
FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
NAN, INF = math.nan, math.inf
PART = 65536  # bytes
KINDS = ("kl", "reverse_kl", "jsd", "tvd")
GIVEN = ("logits", "log_probs", "probs")
every_kind = pytest.mark.parametrize("kind", KINDS)


def pair(n_rows, n_classes, dtype=FP32, target_dtype=None, device="cpu", seed=0):
    """A student's logits and a teacher's that are like them."""
    x = peaked(n_rows, n_classes, FP64, seed) / 3
    y = x + peaked(n_rows, n_classes, FP64, seed + 1) / 6
    return x.to(dtype).to(device), y.to(target_dtype or dtype).to(device)


def given_as(y, target_is):
    """The teacher's rows as they are given."""
    if target_is == "logits":
        return y
    return (torch.log_softmax if target_is == "log_probs" else torch.softmax)(y.double(), -1).to(y.dtype)


def logits_of(x, scale, softcap, temperature):
    z = x if scale is None else x * scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.double().unsqueeze(-1)
    return z if temperature is None else z / temperature


def terms(p, log_of_quotient):
    """p times a logarithm, to which p = 0 adds nothing."""
    return torch.where(p > 0, p * torch.where(p > 0, log_of_quotient, 0.0), 0.0).sum(-1)


def logs_of(
    x, y, *, scale=None, softcap=None, temperature=None, target_scale=None, target_softcap=None,
    target_temperature=None, target_is="logits",
):  # fmt: skip
    """The logarithms of both distributions in float64."""
    z = logits_of(x.double(), scale, softcap, temperature)
    log_q, y = z - z.logsumexp(-1, keepdim=True), y.double()
    if target_is == "logits":
        z = logits_of(y, target_scale, target_softcap, target_temperature)
        return log_q, z - z.logsumexp(-1, keepdim=True)
    return log_q, y if target_is == "log_probs" else y.log()


def formula(x, y, *, kind="kl", beta=0.5, target_is="logits", **options):
    """Every row's divergence in float64."""
    log_q, log_t = logs_of(x, y, target_is=target_is, **options)
    q, t = log_q.exp(), y.double() if target_is == "probs" else log_t.exp()
    if kind == "tvd":
        return (q - t).abs().sum(-1) / 2
    if kind == "kl" or (kind == "jsd" and beta == 0):
        return terms(t, log_t - log_q)
    if kind == "reverse_kl" or beta == 1:
        return terms(q, log_q - log_t)
    log_m = (beta * t + (1 - beta) * q).clamp_min(1e-300).log()
    return beta * terms(t, log_t - log_m) + (1 - beta) * terms(q, log_q - log_m)


def assert_right(x, y, *, of=divergence, weights=None, near=None, **options):
    """Divergences and gradients of rows are the formula's, to roundings of the dtypes."""
    leaf, exact = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    found, wanted = of(leaf, y, reduction="none", **options), formula(exact, y, **options)
    arithmetic = FP64 if x.dtype == FP64 else FP32
    assert (found.dtype, found.shape) == (arithmetic, x.shape[:-1])
    near = near or (1e-11 if arithmetic == FP64 and y.dtype == FP64 else 2e-5)
    torch.testing.assert_close(found.double(), wanted, rtol=near, atol=near, equal_nan=True)
    g = torch.linspace(-1, 2, wanted.numel(), dtype=FP64, device=x.device).view(wanted.shape)
    (dx,) = torch.autograd.grad(found, leaf, g.to(found.dtype))
    (truth,) = torch.autograd.grad(wanted, exact, g)
    assert (dx.dtype, dx.shape) == (x.dtype, x.shape)
    near = max(near, 4 * torch.finfo(x.dtype).eps if x.dtype != FP64 else 0.0)
    # Of terms that cancel: where a gradient is a logarithm less the divergence, it has that one's rounding.
    rounding = 1e-3 if arithmetic == FP64 else wanted.detach().nan_to_num(0, 0, 0)[..., None] * 2**-22 / near
    most = truth.nan_to_num(0).abs().amax(-1, keepdim=True).clamp(min=1e-3).maximum(torch.as_tensor(rounding))
    torch.testing.assert_close(dx.double() / most, truth / most, rtol=near, atol=near, equal_nan=True)
    if of is divergence and g.ndim == 1:  # written with the sum, where the kernels hold rows
        w = g.abs() + 1
        (dx_of_sum,) = torch.autograd.grad(of(leaf, y, reduction="sum", weight=w.float(), **options), leaf)
        truth = torch.autograd.grad(formula(exact, y, **options), exact, w)[0]
        most = truth.nan_to_num(0).abs().amax(-1, keepdim=True).clamp(min=1e-3).maximum(torch.as_tensor(rounding) * 3)
        torch.testing.assert_close(dx_of_sum.double() / most, truth / most, rtol=near, atol=near, equal_nan=True)
    return found, dx


ROWS = "of rows"
OPTIONS = {
    "plain": {}, "scale": {"scale": -0.5}, "softcap": {"softcap": 5.0}, "temperature": {"temperature": 0.7},
    "of rows": {"temperature": ROWS}, "all": {"scale": 1.5, "softcap": 5.0, "temperature": ROWS},
}  # fmt: skip


@pairwise(("kind", "target_is"), ("kind", "options", "target_options"))
@every_kind
@pytest.mark.parametrize("target_is", GIVEN)
@pytest.mark.parametrize(
    "dtypes",
    [(FP32, FP32), (BF16, BF16), (BF16, FP32), (FP16, FP16), (FP32, BF16), (FP64, FP64), (FP32, FP64)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("target_options", OPTIONS)
@pytest.mark.parametrize("n_classes", [40, 613])
def test_options(kind, target_is, dtypes, options, target_options, n_classes, device):
    x, y = pair(4, n_classes, *dtypes, device)
    options = OPTIONS[options]
    if target_is == "logits":
        options = options | {f"target_{name}": each for name, each in OPTIONS[target_options].items()}
    rows = torch.tensor([0.3, 1.0, 2.0, 0.9], device=device)
    options = {name: rows.to(y.dtype) if each == ROWS else each for name, each in options.items()}
    assert_right(x, given_as(y, target_is), kind=kind, beta=0.3, target_is=target_is, **options)


@pytest.mark.parametrize("beta", [0, 0.3, 1, 1.0, 0.999])
@pytest.mark.parametrize("target_is", GIVEN)
def test_betas(beta, target_is, device):
    x, y = pair(3, 130, device=device)
    assert_right(x, given_as(y, target_is), kind="jsd", beta=beta, target_is=target_is)


@pairwise(("kind", "n_classes"))
@every_kind
@pytest.mark.parametrize("n_classes", [1, 2, 7, 128, 1000, 4097])
@pytest.mark.parametrize("target_is", GIVEN)
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, FP32), (FP16, FP16)], ids=str)
def test_vocabularies(kind, n_classes, target_is, dtypes, device):
    x, y = pair(3, n_classes, *dtypes, device)
    assert_right(x, given_as(y, target_is), kind=kind, target_is=target_is, temperature=0.8)


@pairwise()
@every_kind
@pytest.mark.parametrize(
    ("n_classes", "dtypes"), [(50257, (FP32, FP32)), (70001, (BF16, FP32)), (PART // 2 * 3 + 8, (BF16, BF16))], ids=str
)
@pytest.mark.parametrize("target_is", GIVEN)
def test_rows_of_several_parts(kind, n_classes, dtypes, target_is, device):
    x, y = pair(2, n_classes, *dtypes, device)
    temperature = torch.tensor([0.5, 1.5], device=device)
    assert_right(x, given_as(y, target_is), kind=kind, target_is=target_is, temperature=temperature)


@every_kind
def test_an_odd_vocabulary_of_many_parts(kind, device):
    x, y = pair(2, 151937, BF16, FP32, device)
    assert_right(x, y, kind=kind, temperature=0.8)


# Rows that are hard.


@every_kind
@pytest.mark.parametrize("n_classes", [72, 20000, 20001])
def test_distant_peaks(kind, n_classes, device):
    """The student is sure of one class and the teacher of another."""
    x, y = (peaked(3, n_classes, seed=seed) for seed in (0, 1))
    x[0, 3], y[0, 5], x[1, 69], y[1, 69], x[2, 0] = 60.0, 70.0, 80.0, 85.0, -80.0
    assert_right(x.to(device), y.to(device), kind=kind, near=2e-4)  # of gradients of 0, by which 1 - 1 is rounded


@every_kind
@pytest.mark.parametrize("who", ["student", "teacher", "both"])
@pytest.mark.parametrize("where", ["leading", "middle", "trailing"])
@pytest.mark.parametrize("n_classes", [64, 20000, 20001])
def test_tiles_of_minus_infinity(kind, who, where, n_classes, device):
    """What has no probability adds nothing, and what only one has makes a divergence infinite or adds its own part."""
    (x, y), third = pair(2, n_classes), n_classes // 3
    start = {"leading": 0, "middle": third, "trailing": 2 * third}[where]
    if who != "teacher":
        x[:, start : start + third] = -INF
    if who != "student":
        y[:, start : start + third] = -INF
    leaf, exact = x.to(device).requires_grad_(), x.double().requires_grad_()
    found, wanted = divergence(leaf, y.to(device), kind=kind, reduction="none"), formula(exact, y, kind=kind)
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=1e-5, atol=1e-5)
    infinite = (kind, who) in {("kl", "student"), ("reverse_kl", "teacher")}
    assert wanted.isinf().all() == infinite
    if not infinite:
        (dx,) = torch.autograd.grad(found.sum(), leaf)
        q, t = x.double().softmax(-1).requires_grad_(), y.double().softmax(-1)
        log_q, log_t, log_m = q.log(), t.log(), ((q + t) / 2).log()
        f = {"kl": -t / q, "reverse_kl": log_q - log_t, "jsd": (log_q - log_m) / 2, "tvd": (q - t).sign() / 2}[kind]
        f = torch.where(q > 0, f, 0.0)
        truth = q * (f - (q * f).sum(-1, keepdim=True))
        torch.testing.assert_close(dx.cpu().double(), truth.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["kl", "reverse_kl"])
@pytest.mark.parametrize("n_classes", [70, 40001])
def test_what_fades_away_before_a_peak(kind, n_classes, device):
    """A class that only the other has, of a probability that is 0 in float32: infinite until the peak is seen."""
    x, y = pair(2, n_classes)
    (first, second) = (y, x) if kind == "kl" else (x, y)
    first[:, -1], second[:, 5] = 300.0, -INF
    found = divergence(x.to(device), y.to(device), kind=kind, reduction="none")
    first[:, 5] = -INF
    torch.testing.assert_close(found.cpu().double(), formula(x, y, kind=kind), rtol=1e-5, atol=1e-5)


@every_kind
def test_the_least_probabilities(kind, device):
    """Of subnormal ones the mixture underflowed to 0, and jsd was infinite."""
    a = torch.tensor([[0.0, -103.0, -95.0, -101.0, -87.5], [0.0, -200.0, -103.2, -103.0, -88.0]], device=device)
    assert_right(a, a.flip(0), kind=kind, beta=0.3)
    probs = torch.softmax(a, -1).flip(0)
    if kind != "reverse_kl":  # whose logarithm of a subnormal probability is as inexact as that is
        assert_right(a, probs, kind=kind, beta=0.3, target_is="probs")


@pytest.mark.parametrize("kind", ["kl", "jsd", "tvd"])
@pytest.mark.parametrize("n_classes", [70, 4100])
def test_probabilities_of_zero(kind, n_classes, device):
    x, y = pair(3, n_classes)
    t = torch.where(y > 0, y.softmax(-1), 0.0)
    t[1] = 0.0
    t[1, 9] = 1.0
    assert_right(x.to(device), t.to(device), kind=kind, target_is="probs")
    log_t = t.log()
    assert log_t.isinf().any()
    assert_right(x.to(device), log_t.to(device), kind=kind, target_is="log_probs")


@every_kind
@pytest.mark.parametrize("target_is", ["log_probs", "probs"])
@pytest.mark.parametrize("n_classes", [72, 20000, 20001])
def test_probabilities_that_do_not_sum_to_1(kind, target_is, n_classes, device):
    x, y = pair(3, n_classes)
    t = y.softmax(-1) * torch.tensor([[0.3], [1.7], [1.0]])
    assert_right(x.to(device), (t if target_is == "probs" else t.log()).to(device), kind=kind, target_is=target_is)


@every_kind
def test_equal_distributions(kind, device):
    x, _ = pair(4, 3001, device=device)
    leaf = x.requires_grad_()
    found = divergence(leaf, x.detach().clone(), kind=kind, reduction="none")
    assert (found.abs() <= 1e-7).all()
    assert (torch.autograd.grad(found.sum(), leaf)[0].abs() <= 1e-6).all()


@pairwise(("kind", "n_classes"))
@pytest.mark.parametrize("kind", [*KINDS, "cross"])
@pytest.mark.parametrize("target_is", ["logits", "probs"])
@pytest.mark.parametrize("n_classes", [300, 40001])
@pytest.mark.parametrize("least", [-1e4, -65504.0, -1e9, -3.4e38])
@pytest.mark.parametrize("masked", [1, 299, -1])
def test_masks_that_are_finite_drown_no_difference(kind, target_is, n_classes, least, masked, device):
    """However far the first logits lie from the others, or all but the last one."""
    x, y = pair(3, n_classes, device=device)
    x[:, :masked], y[:, :masked] = least, least
    leaf, exact = x.requires_grad_(), x.detach().double().requires_grad_()
    if kind == "cross":
        t = torch.softmax(y, 1)
        found, wanted = cross_entropy(leaf, t, reduction="none"), F.cross_entropy(exact, t.double(), reduction="none")
    else:
        y = given_as(y, target_is)
        found = divergence(leaf, y, kind=kind, target_is=target_is, reduction="none")
        wanted = formula(exact, y, kind=kind, target_is=target_is)
    torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=2e-5)
    (dx,), (truth,) = torch.autograd.grad(found.sum(), leaf), torch.autograd.grad(wanted.sum(), exact)
    torch.testing.assert_close(dx.double(), truth, rtol=1e-4, atol=2e-6)


@every_kind
@pytest.mark.parametrize("offset", [0.0, 100.0, 3000.0])
def test_tiny_divergences(kind, offset, device):
    """No further from float64 than torch's; of rounded sums m + log s, tvd was off by a tenth."""
    x = peaked(6, 3001) + offset
    y = x + 1e-2 * torch.randn(6, 3001, generator=torch.Generator().manual_seed(1))
    found = divergence(x.to(device), y.to(device), kind=kind, reduction="none").cpu().double()
    log_q, log_t = torch.log_softmax(x, -1), torch.log_softmax(y, -1)
    theirs = formula(log_q.double(), log_t.double(), kind=kind)  # but for the roundings of their terms and sum
    wanted = formula(x, y, kind=kind)
    of_torch = (theirs - wanted).abs().max()
    assert (found - wanted).abs().max() <= 4 * of_torch + (1e-6 if kind in ("kl", "reverse_kl") else 1e-7)
    leaf, exact = x.to(device).requires_grad_(), x.double().requires_grad_()
    (dx,) = torch.autograd.grad(divergence(leaf, y.to(device), kind=kind, reduction="sum"), leaf)
    (truth,) = torch.autograd.grad(formula(exact, y, kind=kind).sum(), exact)
    torch.testing.assert_close(dx.double().cpu(), truth, rtol=1e-4, atol=5e-7)


@every_kind
def test_gradients_of_large_offsets(kind, device):
    """Of the student's and of the teacher's, which are not the same."""
    x, y = pair(3, 700)
    assert_right((x + 5000).to(device), (y - 9000).to(device), kind=kind)


@every_kind
@pytest.mark.parametrize("who", ["student", "teacher"])
def test_a_row_of_nan_is_nan(kind, who, device):
    """tvd of a teacher's NaN had a gradient of 0."""
    x, y = pair(3, 613, device=device)
    (x if who == "student" else y)[1, 400] = NAN
    leaf = x.requires_grad_()
    found = divergence(leaf, y, kind=kind, reduction="none")
    (dx,) = torch.autograd.grad(found.sum(), leaf)
    assert found.isnan().tolist() == [False, True, False]
    assert dx[1].isnan().any()
    assert dx[::2].isfinite().all()


@every_kind
@pytest.mark.parametrize("way", ["kernels", "torch"])
def test_temperatures_that_are_not_above_0(kind, way, device, monkeypatch):
    if way == "torch":
        if device != "cpu":
            pytest.skip("of CPU tensors")
        monkeypatch.setattr(route, "INTERPRET", False)
    x, y = pair(4, 40, device=device)
    t = torch.tensor([1.0, 0.0, -1.0, NAN], device=device)
    for name in ("temperature", "target_temperature"):
        leaf = x.clone().requires_grad_()
        found = divergence(leaf, y, kind=kind, reduction="none", **{name: t})
        (dx,) = torch.autograd.grad(found.sum(), leaf)
        assert found.isnan().tolist() == dx.isnan().any(-1).tolist() == [False, True, True, True]


# Rows as they count, and as they lie.


@pytest.mark.parametrize("way", ["kernels", "create_graph", "torch"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@every_kind
def test_weights(kind, reduction, way, device, monkeypatch):
    if way == "torch":
        if device != "cpu":
            pytest.skip("of CPU tensors")
        monkeypatch.setattr(route, "INTERPRET", False)
    x, y = pair(5, 70, device=device)
    wanted = formula(exact := x.double().requires_grad_(), y, kind=kind)
    x[1], y[3] = NAN, INF
    w = torch.tensor([0.5, 0.0, 2.0, 0.0, 1.0], device=device)
    leaf = x.requires_grad_()
    found = divergence(leaf, y, kind=kind, weight=w, reduction=reduction)
    of_rows = wanted * w
    wanted = of_rows if reduction == "none" else of_rows.sum() / (w.sum() if reduction == "mean" else 1.0)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
    (dx,) = torch.autograd.grad(found.sum(), leaf, create_graph=way == "create_graph")
    (truth,) = torch.autograd.grad(wanted.sum(), exact)
    torch.testing.assert_close(dx.double(), truth, rtol=1e-5, atol=1e-6)
    assert (dx[[1, 3]] == 0).all()


@pytest.mark.parametrize("dtype", [None, FP32, BF16, FP64], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_reductions_and_dtypes(reduction, dtype, device):
    x, y = pair(6, 40, BF16, FP32, device)
    found = divergence(x.view(2, 3, 40), y.view(2, 3, 40), reduction=reduction, dtype=dtype)
    wanted = formula(x, y).view(2, 3)
    wanted = wanted if reduction == "none" else getattr(wanted, reduction)()
    assert (found.dtype, found.shape) == (dtype or FP32, wanted.shape)
    near = 1e-2 if dtype == BF16 else 1e-5
    torch.testing.assert_close(found.double(), wanted, rtol=near, atol=near)
    assert divergence(x.double(), y, reduction=reduction).dtype == FP64


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)], ids=str)
@pytest.mark.parametrize("columns", [False, True])
def test_no_rows(shape, columns, device):
    x, y = (torch.empty(*shape, 5, device=device) for _ in range(2))
    leaf = x.requires_grad_()
    more = {"columns": torch.zeros(*shape, 3, dtype=torch.int64, device=device)} if columns else {}
    y = y[..., :3] if columns else y
    found = [divergence(leaf, y, reduction=reduction, **more) for reduction in ("none", "sum", "mean")]
    assert found[0].shape == shape
    assert found[1] == 0
    assert found[2].isnan()
    (found[0].sum() + found[1]).backward()
    assert leaf.grad.shape == leaf.shape


@pytest.mark.parametrize("kind", ["kl", "jsd"])
def test_a_sum_of_rows_of_weight_0_has_a_gradient_of_0_whatever_it_is_divided_by(kind, device):
    x, y = (torch.randn(3, 64, device=device, requires_grad=i == 0) for i in range(2))
    total = divergence(x, y, kind=kind, weight=torch.zeros(3, device=device), reduction="sum")
    (total / 0).backward()
    assert (x.grad == 0).all()


LAYOUTS = {
    "one row for all": lambda x: x[:1].expand(6, -1),
    "every second column": lambda x: x.repeat_interleave(2, -1)[:, ::2],
    "columns apart": lambda x: x.t().contiguous().t(),
    "every second row": lambda x: x.repeat_interleave(2, 0)[::2],
    "rows in reverse": lambda x: x.flip(0),
    "one element past 16 bytes": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "rows 75 apart": lambda x: torch.cat([x, x[:, :3]], -1)[:, : x.shape[1]],
    "a dim more": lambda x: x.view(2, 3, -1),
    "two dims more, crossed": lambda x: x.view(1, 2, 3, -1).transpose(1, 2),
    "one row": lambda x: x[0],
    "neg bit": lambda x: torch._neg_view(-x),
}


@pytest.mark.parametrize("target_is", ["logits", "probs"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, target_is, device):
    x, y = pair(6, 72, BF16, FP32, device)
    y = given_as(y, target_is)
    of_x = LAYOUTS[layout](x)
    for found in (LAYOUTS[layout](y), LAYOUTS[layout](y).contiguous()):
        assert_right(of_x, found, target_is=target_is, kind="jsd")
        assert_right(of_x.contiguous(), found, target_is=target_is)
    assert_right(LAYOUTS[layout](y), of_x.float().softmax(-1) if target_is == "probs" else of_x, target_is=target_is)


@pytest.mark.parametrize("layout", ["expanded", "transposed", "every second", "zero", "negated"])
def test_gradients_as_they_lie(layout, device):
    x, y = pair(4, 70, device=device)
    g = {
        "expanded": lambda g: g[:1, :1].expand_as(g), "transposed": lambda g: g.t().contiguous().t(),
        "every second": lambda g: g.repeat_interleave(2, -1)[:, ::2], "zero": lambda g: g * 0,
        "negated": lambda g: torch._neg_view(-g),
    }[layout](torch.linspace(-1, 1, 4, device=device).view(2, 2))  # fmt: skip
    leaf = x.view(2, 2, 70).clone().requires_grad_()
    loss = divergence(leaf, y.view(2, 2, 70), reduction="none")
    (found,) = torch.autograd.grad(loss, leaf, g, retain_graph=True)
    (wanted,) = torch.autograd.grad(loss, leaf, g.resolve_neg().clone(memory_format=torch.contiguous_format))
    assert torch.equal(found, wanted)


# Columns.


def chosen(n_rows, n_classes, k, device="cpu", seed=0):
    """k classes of each row, no two of them the same."""
    order = torch.rand(n_rows, n_classes, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    return order[:, :k].to(device)


def formula_of_columns(x, y, columns, rest, *, target_is, scale=None, softcap=None, temperature=None, **options):
    log_q = torch.log_softmax(logits_of(x.double(), scale, softcap, temperature), -1).gather(-1, columns.long())
    y = y.double()
    if rest == "renormalize":
        log_t = y.log() if target_is == "probs" else y
        return formula(log_q, log_t, **options)
    t = y.exp() if target_is == "log_probs" else y
    left = log_q.exp().sum(-1, keepdim=True)
    log_q = torch.cat([log_q, (1 - left).log()], -1)
    return formula(log_q, torch.cat([t, 1 - t.sum(-1, keepdim=True)], -1), target_is="probs", **options)


@pairwise(("kind", "rest", "target_is"))
@every_kind
@pytest.mark.parametrize("rest", ["renormalize", "lump"])
@pytest.mark.parametrize("target_is", GIVEN)
@pytest.mark.parametrize("k", [1, 5, 33])
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, FP32), (FP64, FP64)], ids=str)
@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("temperature", [None, "of rows"])
def test_columns(kind, rest, target_is, k, dtypes, index, temperature, device):
    if rest == "lump" and target_is == "logits":
        pytest.skip("of a teacher's probabilities")
    x, y = pair(4, 130, *dtypes, device)
    columns = chosen(4, 130, k, device).to(index)
    t = given_as(y, target_is).gather(-1, columns.long())
    options = {"kind": kind, "target_is": target_is, "beta": 0.3, "softcap": 20.0}
    if temperature:
        options["temperature"] = torch.tensor([0.5, 1.0, 2.0, 3.0], device=device)
    leaf, exact = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    found = divergence(leaf, t, columns=columns, rest=rest, reduction="none", **options)
    wanted = formula_of_columns(exact, t, columns, rest, **options)
    near = 1e-9 if dtypes[0] == FP64 else 2e-5
    torch.testing.assert_close(found.double(), wanted, rtol=near, atol=near)
    g = torch.linspace(0.5, 2, 4, device=device, dtype=FP64)
    (dx,), (truth,) = torch.autograd.grad(found, leaf, g.to(found)), torch.autograd.grad(wanted, exact, g)
    near = max(5 * near, 4 * torch.finfo(x.dtype).eps)
    torch.testing.assert_close(dx.double(), truth, rtol=near, atol=near)


@every_kind
@pytest.mark.parametrize("target_is", ["log_probs", "probs"])
def test_columns_that_leave_nothing(kind, target_is, device):
    """The teacher told of all, or the student gives all to what it told of: a divergence that is finite."""
    x, y = pair(3, 33, device=device)
    columns = torch.arange(33, device=device).expand(3, -1)
    t = given_as(y, target_is)
    leaf = x.clone().requires_grad_()
    found = divergence(leaf, t, columns=columns, rest="lump", kind=kind, target_is=target_is, reduction="none")
    torch.testing.assert_close(found.double(), formula(x, y, kind=kind), rtol=1e-4, atol=1e-5)
    (dx,) = torch.autograd.grad(found.sum(), leaf)
    exact = x.double().requires_grad_()
    (truth,) = torch.autograd.grad(formula(exact, y, kind=kind).sum(), exact)
    torch.testing.assert_close(dx.double(), truth, rtol=1e-3, atol=1e-4)
    x[:, 4], y[:, 5] = 60.0, 60.0
    few = torch.tensor([[4, 5]] * 3, device=device)
    t = given_as(y, target_is).gather(-1, few)
    leaf = x.clone().requires_grad_()
    found = divergence(leaf, t, columns=few, rest="lump", kind=kind, target_is=target_is)
    assert found.isfinite()
    assert torch.autograd.grad(found, leaf)[0].isfinite().all()


@every_kind
@pytest.mark.parametrize("rest", ["renormalize", "lump"])
def test_columns_out_of_range_make_their_row_nan(kind, rest, device, monkeypatch):
    x, y = pair(4, 40, device=device)
    columns = chosen(4, 40, 3, device)
    columns[1, 2], columns[2, 0] = 40, -1
    t = given_as(y, "probs").gather(-1, columns.clamp(0, 39))
    monkeypatch.setattr(route, "CHECK", True)
    with pytest.raises(IndexError, match=r"divergence: columns has (40|-1), which is out of range \[0, 39\]"):
        divergence(x, t, columns=columns, rest=rest, target_is="probs", kind=kind)
    monkeypatch.setattr(route, "CHECK", False)
    leaf = x.requires_grad_()
    found = divergence(leaf, t, columns=columns, rest=rest, target_is="probs", kind=kind, reduction="none")
    assert found.isnan().tolist() == [False, True, True, False]
    (dx,) = torch.autograd.grad(found.sum(), leaf)
    assert dx.isnan().any(-1).tolist() == [False, True, True, False]


def test_columns_of_leading_dims_and_weights(device):
    x, y = pair(6, 50, device=device)
    columns = chosen(6, 50, 4, device)
    t = y.gather(-1, columns)
    w = torch.tensor([1.0, 0.0, 2.0, 0.5, 0.0, 1.0], device=device)
    x[1] = NAN
    found = divergence(
        x.view(2, 3, 50), t.view(2, 3, 4), columns=columns.view(2, 3, 4), weight=w.view(2, 3), kind="reverse_kl"
    )
    rows = formula_of_columns(x, t, columns, "renormalize", target_is="logits", kind="reverse_kl")
    torch.testing.assert_close(found.double(), torch.where(w == 0, 0.0, rows * w).sum() / w.sum(), rtol=1e-5, atol=1e-6)


# Checks.

X, Y, C = torch.zeros(3, 7), torch.zeros(3, 7), torch.tensor([[1, 2]] * 3)
WRONG = {
    "a list": ({"input": [1.0]}, TypeError, "input must be a Tensor, not list"),
    "ints": ({"input": X.int()}, NotImplementedError, "input must be of a float dtype, got torch.int32"),
    "sparse": ({"input": X.to_sparse()}, RuntimeError, "input must be a dense strided tensor, got torch.sparse_coo"),
    "no dim": ({"input": X[0, 0]}, ValueError, r"input must have at least one class, got shape \(\)"),
    "no class": ({"input": X[:, :0]}, ValueError, r"input must have at least one class, got shape \(3, 0\)"),
    "no target": ({"target": None}, TypeError, "target must be a Tensor, not NoneType"),
    "a sparse target": ({"target": Y.to_sparse()}, RuntimeError, "target must be a dense strided tensor, got torch.sp"),
    "a target of ints": ({"target": Y.long()}, RuntimeError, "target must be of a float dtype, got torch.int64"),
    "a device": ({"target": Y.to("meta")}, RuntimeError, "target must be on the input's device cpu, got meta"),
    "a gradient": ({"target": Y.clone().requires_grad_()}, RuntimeError, r"target requires grad, .* target.detach\(\)"),
    "shapes": ({"target": Y[:2]}, ValueError, r"target must have the input's shape \(3, 7\), got \(2, 7\)"),
    "classes": ({"target": Y[:, :2]}, ValueError, r"target must have the input's shape \(3, 7\), got \(3, 2\)"),
    "kind": ({"kind": "js"}, ValueError, 'kind is one of "kl", "reverse_kl", "jsd", "tvd"; got \'js\''),
    "no kind": ({"kind": None}, ValueError, 'kind is one of "kl", .*; got None'),
    "a list of kinds": ({"kind": ["kl"]}, ValueError, r"kind is one of .*; got \['kl'\]"),
    "cross": ({"kind": "cross"}, ValueError, 'kind is one of "kl", .*; got \'cross\''),
    "beta": ({"beta": 1.5}, ValueError, r"beta must be in \[0, 1\], got 1.5"),
    "no beta": ({"beta": None}, TypeError, "beta must be a number, not NoneType"),
    "beta of nan": ({"beta": NAN}, ValueError, "beta must be"),
    "scale": ({"scale": INF}, ValueError, "scale must be finite, got inf"),
    "softcap": ({"softcap": 0.0}, ValueError, "softcap must be more than 0, got 0.0"),
    "temperature": ({"temperature": 0.0}, ValueError, "temperature must be more than 0, got 0.0"),
    "temperatures": ({"temperature": torch.ones(2)}, ValueError, r"temperature must have shape \(3,\), got \(2,\)"),
    "their dtype": ({"temperature": torch.ones(3).int()}, RuntimeError, "temperature must be of a float dtype and on"),
    "their gradient": ({"temperature": torch.ones(3).requires_grad_()}, RuntimeError, "temperature requires grad"),
    "target_scale": ({"target_scale": "2"}, TypeError, "target_scale must be a number, not str"),
    "target_softcap": ({"target_softcap": -1.0}, ValueError, "target_softcap must be more than 0, got -1.0"),
    "target_temperature": ({"target_temperature": -1.0}, ValueError, "target_temperature must be more than 0, got -1"),
    "target_temperatures": (
        {"target_temperature": torch.ones(1)}, ValueError, r"target_temperature must have shape \(3,\), got \(1,\)"
    ),
    "of probabilities": (
        {"target_is": "probs", "target_temperature": 1.0}, ValueError,
        'target_temperature is for targets of logits, got target_is="probs"',
    ),
    "target_is": ({"target_is": "p"}, ValueError, 'target_is is one of "logits", "log_probs", "probs"; got \'p\''),
    "rest": ({"rest": "drop"}, ValueError, 'rest must be "renormalize" or "lump", got \'drop\''),
    "rest of all": ({"rest": "lump"}, ValueError, "rest needs columns, got columns=None"),
    "columns' type": ({"columns": [1]}, TypeError, "columns must be a Tensor, not list"),
    "columns' dtype": ({"columns": C.float()}, RuntimeError, "columns must be of int64 or int32, got torch.float32"),
    "columns' device": ({"columns": C.to("meta")}, RuntimeError, "columns must be on the input's device cpu, got meta"),
    "columns' shape": ({"columns": C[:2]}, ValueError, r"columns must have shape \(3, k\), got \(2, 2\)"),
    "no columns": ({"columns": C[:, :0]}, ValueError, r"columns must have shape \(3, k\), got \(3, 0\)"),
    "columns' target": ({"columns": C}, ValueError, r"target must have the columns' shape \(3, 2\), got \(3, 7\)"),
    "lumped logits": (
        {"columns": C, "target": Y[:, :2], "rest": "lump"}, ValueError, 'rest="lump" takes a teacher\'s probabilities'
    ),
    "weight": ({"weight": 1.0}, TypeError, "weight must be a Tensor, not float"),
    "a mask": ({"weight": torch.ones(3).bool()}, RuntimeError, r"weight must be of a float dtype, .* mask.float\(\)"),
    "weights": ({"weight": torch.ones(2)}, ValueError, r"weight must have shape \(3,\), got \(2,\)"),
    "their grad": ({"weight": torch.ones(3).requires_grad_()}, RuntimeError, r"weight requires grad, .* weight.detach"),
    "reduction": ({"reduction": "batchmean"}, ValueError, 'reduction must be "mean", "sum" or "none", got \'batchmean'),
    "dtype": ({"dtype": torch.int32}, TypeError, "dtype must be a float torch.dtype, got torch.int32"),
    "dtype's type": ({"dtype": "float32"}, TypeError, "dtype must be a float torch.dtype, got 'float32'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    wrong, error, message = WRONG[name]
    with pytest.raises(error, match=f"^divergence: {message}"):
        divergence(**{"input": X, "target": Y, **wrong})


def test_columns_out_of_range_raise_where_they_can_be_read(monkeypatch):
    monkeypatch.setattr(route, "INTERPRET", False)
    for bad in (7, -1):
        with pytest.raises(IndexError, match=rf"^divergence: columns has {bad}, which is out of range \[0, 6\]"):
            divergence(X, Y[:, :2], columns=torch.tensor([[1, bad]] * 3))


def test_constants_may_require_grad_where_nothing_is_recorded():
    with torch.no_grad():
        for name in ("target", "temperature", "weight"):
            given = {name: (Y.clone() if name == "target" else torch.ones(3)).requires_grad_()}
            assert divergence(**{"input": X, "target": Y, **given}) == 0


# Derivatives.


@pairwise(("kind", "target_is"))
@every_kind
@pytest.mark.parametrize("target_is", GIVEN)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("temperature", [None, 0.7, "of rows"])
@pytest.mark.parametrize("columns", [None, "renormalize", "lump"])
def test_first_and_second_derivatives(kind, target_is, softcap, temperature, columns, device):
    if columns == "lump" and target_is == "logits":
        pytest.skip("of a teacher's probabilities")
    x = torch.randn(3, 5, dtype=FP64, device=device, requires_grad=True)
    y = given_as(torch.randn(3, 5, dtype=FP64, device=device), target_is)
    if temperature == "of rows":
        temperature = torch.tensor([0.5, 1.0, 2.0], dtype=FP64, device=device)
    more = {}
    if columns:
        more = {"columns": chosen(3, 5, 3, device), "rest": columns}
        y = y.gather(-1, more["columns"])

    def call(x):
        return divergence(
            x, y, kind=kind, beta=0.3, target_is=target_is, softcap=softcap, temperature=temperature, scale=1.5,
            reduction="none", **more,
        )  # fmt: skip

    assert torch.autograd.gradcheck(call, x, fast_mode=QUICK)
    assert torch.autograd.gradgradcheck(call, x, fast_mode=QUICK)


@every_kind
@pytest.mark.parametrize("target_is", GIVEN)
def test_second_derivatives_of_float32(kind, target_is, device):
    x, y = pair(3, 40, device=device)
    y = given_as(y, target_is)
    seconds = []
    for of, leaf in ((divergence, x.clone().requires_grad_()), (formula, x.double().requires_grad_())):
        more = {"reduction": "none", "softcap": 9.0} if of is divergence else {"softcap": 9.0}
        rows = of(leaf, y, kind=kind, target_is=target_is, **more)
        (dx,) = torch.autograd.grad(rows.square().sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad((dx * torch.linspace(-1, 1, 40, device=device)).sum(), leaf)
        seconds += [dx.detach().double(), second.double()]
    torch.testing.assert_close(seconds[:2], seconds[2:], rtol=1e-4, atol=1e-5)


def test_gradients_in_a_batch(device):
    x, y = pair(4, 40, device=device)
    leaf = x.requires_grad_()
    rows = divergence(leaf, y, reduction="none")
    g = torch.stack([torch.ones_like(rows), torch.arange(4.0, device=device)])
    (found,) = torch.autograd.grad(rows, leaf, g, is_grads_batched=True, retain_graph=True)
    wanted = [torch.autograd.grad(rows, leaf, each, retain_graph=True)[0] for each in g]
    torch.testing.assert_close(found, torch.stack(wanted))


def test_an_incoming_gradient_may_begin_anywhere(device):
    """After calls whose gradients begin on 16 bytes: a program of short rows reads several at a time."""
    x, y = pair(8, 40, device=device)
    leaf, g = x.requires_grad_(), torch.arange(9.0, device=device)
    for of_rows in (g[:8], g[:8], g[1:]):
        found = torch.autograd.grad(divergence(leaf, y, reduction="none"), leaf, of_rows)[0]
        wanted = torch.autograd.grad((divergence(leaf, y, reduction="none") * of_rows).sum(), leaf)[0]
        assert torch.equal(found, wanted)


def test_what_is_changed_in_place_is_told(device):
    x, y = pair(4, 40, device=device)
    leaf = x.requires_grad_()
    logits = leaf * 1
    rows = divergence(logits, y, reduction="none")
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(rows.sum(), leaf)
    y.mul_(0.5)
    rows = divergence(logits, y, reduction="none")
    wanted = torch.autograd.grad((rows * 2).exp().sum(), leaf)
    for create_graph in (False, True):
        rows = divergence(leaf * 1, y, reduction="none")
        found = torch.autograd.grad(rows.mul_(2).exp().sum(), leaf, create_graph=create_graph)
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("way", ["checkpoint", "saved on a CPU", "hooks"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_saved_tensors(way, create_graph, device):
    x, y = pair(4, 613, device=device)
    temperature = torch.linspace(0.5, 2, 4, device=device)
    call = lambda x: divergence(x * 1, y, kind="jsd", temperature=temperature)  # noqa: E731
    (wanted,) = torch.autograd.grad(call(leaf := x.clone().requires_grad_()), leaf)
    leaf = x.clone().requires_grad_()
    if way == "checkpoint":
        loss = checkpoint(call, leaf, use_reentrant=False)
    else:
        turned = lambda t: t.t().contiguous().t() if t.ndim == 2 else t  # noqa: E731
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, turned)
        with hooks if way == "hooks" else torch.autograd.graph.save_on_cpu():
            loss = call(leaf)
    (found,) = torch.autograd.grad(loss, leaf, create_graph=create_graph)
    torch.testing.assert_close(found, wanted)


# The same bits.


@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_rows_plan_does_not_follow_from_the_number_of_rows(itemsize):
    for n_classes in (7, 1000, 4097, 50257, 151936):
        plans = {replace(plan_alone(n, n_classes, itemsize, H100), n_rows=1) for n in (1, 7, 132, 4096, 2**20)}
        assert len(plans) == 1, n_classes


@pairwise(("kind", "n_classes"))
@every_kind
@pytest.mark.parametrize(
    ("n_classes", "dtypes"),
    [(2051, (FP32, FP32)), (1000, (BF16, FP32)), (72, (BF16, BF16)), (PART // 2 + 8, (BF16, BF16))], ids=str,
)  # fmt: skip
@pytest.mark.parametrize("target_is", GIVEN)
def test_a_row_has_the_same_bits_in_any_batch(kind, n_classes, dtypes, target_is, device):
    n = {72: 64, PART // 2 + 8: 5}.get(n_classes, 10)
    x, y = pair(n, n_classes, *dtypes, device)
    y = given_as(y, target_is)
    temperature, g = torch.linspace(0.5, 2.0, n, device=device), torch.linspace(-1, 1, n, device=device)

    def results(x, y, which):
        leaf = x.detach().requires_grad_()
        rows = divergence(
            leaf, y, kind=kind, target_is=target_is, temperature=temperature[which], reduction="none"
        )  # fmt: skip
        return rows.detach(), torch.autograd.grad(rows, leaf, g[which])[0]

    wanted = results(x, y, slice(None))
    moved = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)  # one element past 16 bytes
    apart = torch.cat([y, y[:, :3]], 1)[:, :n_classes]  # rows that start on any element
    shuffled = torch.randperm(n)
    for a, b, which in [(x[2:3], y[2:3], slice(2, 3)), (x[shuffled], y[shuffled], shuffled),
                        (moved[3:], y[3:], slice(3, n)), (x[3:], apart[3:], slice(3, n))]:  # fmt: skip
        for found, of_all in zip(results(a, b, which), wanted, strict=True):
            assert torch.equal(found, of_all[which])


# Kept calls.


def differing(device):
    """Calls that one kept call could be taken for another's."""
    of_rows = torch.linspace(0.5, 2.0, 4, device=device)
    return [
        {}, {"scale": 2.0}, {"scale": 3.0}, {"scale": -2.0}, {"scale": 0.0}, {"scale": 1}, {"softcap": 3.0},
        {"softcap": 4.0}, {"temperature": 2.0}, {"temperature": of_rows}, {"temperature": of_rows * 2},
        {"temperature": of_rows.half()}, {"temperature": of_rows.repeat_interleave(2)[::2]},
        {"target_temperature": of_rows}, {"target_temperature": 2.0}, {"target_scale": 0.5}, {"target_softcap": 4.0},
        {"temperature": of_rows, "target_temperature": of_rows.flip(0)}, {"target_scale": 0.0},
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(2))
def test_kept_calls_answer_for_their_like_alone(seed, device):
    generator = torch.Generator().manual_seed(seed)
    pick = lambda values: values[int(torch.randint(len(values), (), generator=generator))]  # noqa: E731
    options_of = differing(device)
    calls.forget()
    for _ in range(60):
        options = pick(options_of) | {"kind": pick(KINDS), "beta": pick([0.3, 0.6])}
        n, dtypes = pick([4, 4, 1]), pick([(FP32, FP32), (BF16, FP32), (FP32, BF16)])
        x, y = pair(4, 40, *dtypes, device, seed)
        if not any(name.startswith("target") for name in options):
            options["target_is"] = pick(GIVEN)
            y = given_as(y, options["target_is"])
        options = {name: each[:n] if isinstance(each, torch.Tensor) else each for name, each in options.items()}
        assert_right(x[:n], y[:n], **options)


def test_a_kept_call_is_checked_no_more_and_answers_no_other(device, monkeypatch):
    """What differs from it in anything is checked as a first call is."""
    x, y = pair(4, 40, device=device)
    ones = torch.ones(4, device=device)
    calls.forget()
    first = divergence(x, y, temperature=ones, weight=ones)
    checked = []
    real = divergence_calls.check_divergence
    monkeypatch.setattr(divergence_calls, "check_divergence", lambda *given: checked.append(0) or real(*given))
    assert torch.equal(divergence(x, y, temperature=ones, weight=ones), first)
    assert not checked
    wrong = [
        ({"kind": "kld"}, ValueError), ({"kind": ["kl"]}, ValueError), ({"beta": 2.0}, ValueError),
        ({"beta": True}, TypeError), ({"reduction": "average"}, ValueError), ({"dtype": "float32"}, TypeError),
        ({"rest": "lump"}, ValueError), ({"target_is": "probabilities"}, ValueError),
        ({"target_is": "probs", "target_scale": 2.0}, ValueError), ({"temperature": 0.0}, ValueError),
        ({"temperature": float("nan")}, ValueError), ({"temperature": torch.ones(3, device=device)}, ValueError),
        ({"temperature": ones.clone().requires_grad_()}, RuntimeError), ({"scale": True}, TypeError),
        ({"weight": ones.bool()}, RuntimeError), ({"weight": 1.0}, TypeError),
        ({"weight": ones.clone().requires_grad_()}, RuntimeError), ({"target": y[:3]}, ValueError),
        ({"target": y.clone().requires_grad_()}, RuntimeError), ({"target": y.long()}, RuntimeError),
        ({"columns": y}, RuntimeError), ({"input": x.long()}, NotImplementedError),
    ]  # fmt: skip
    for each, error in wrong:
        given = {"input": x, "target": y, "temperature": ones, "weight": ones} | each
        with pytest.raises(error, match=r"^divergence: "):
            divergence(**given)
    assert torch.equal(divergence(x, y, temperature=ones, weight=ones), first)


@pytest.mark.parametrize("how", ["laid out anew", "with torch's neg bit", "as they were"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_saved_states_of_rows_that_a_hook_returns(how, reduction, device):
    """Of a call whose gradient is kept: kernels read what the forward pass knew of each row."""
    x, y = pair(4, 37, device=device)
    x.requires_grad_()
    g = torch.linspace(0.5, 2.0, 4, device=device) if reduction == "none" else torch.tensor(3.0, device=device)
    call = lambda: divergence(x, y, kind="jsd", reduction=reduction)  # noqa: E731
    wanted = [torch.autograd.grad(call(), x, g)[0] for _ in range(2)]
    of_rows = []

    def returned(saved):
        if saved.shape != (4,):
            return saved
        of_rows.append(saved)
        if how == "laid out anew":
            return torch.stack([saved, saved * 0], 1)[:, 0]
        return torch._neg_view(-saved) if how == "with torch's neg bit" else saved

    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, returned):
        rows = call()
    found = torch.autograd.grad(rows, x, g)[0]
    assert len(of_rows) >= 5
    assert all(torch.equal(each, found) for each in wanted)


def test_modes_of_autograd(device):
    x, y = pair(3, 40, device=device)
    leaf = x.requires_grad_()
    wanted = divergence(leaf, y)
    assert wanted.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for _ in range(2):
                found = divergence(leaf, y)
        assert not found.requires_grad
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-6, atol=0)  # which the gradient's launch has summed


# Compilers and transforms.


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


@pairwise(("kind", "target_is"))
@every_kind
@pytest.mark.parametrize("target_is", GIVEN)
@pytest.mark.parametrize("temperature", [None, 0.7, "of rows"])
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, FP32)], ids=str)
def test_compiled(kind, target_is, temperature, dtypes, device):
    x, y = pair(6, 70, *dtypes, device)
    y = given_as(y, target_is)
    if temperature == "of rows":
        temperature = torch.linspace(0.5, 2.0, 6, device=device).view(2, 3)
    assert_right(
        x.view(2, 3, 70), y.view(2, 3, 70), of=compiled(divergence), kind=kind, target_is=target_is, softcap=8.0,
        temperature=temperature,
    )  # fmt: skip


@pytest.mark.parametrize("rest", ["renormalize", "lump"])
def test_compiled_with_columns_and_weights(rest, device):
    x, y = pair(6, 50, device=device)
    columns = chosen(6, 50, 4, device)
    t = given_as(y, "probs").gather(-1, columns)
    w = torch.tensor([1.0, 0.0, 2.0, 0.5, 0.0, 1.0], device=device)
    x[1] = NAN
    found = []
    for of in (divergence, compiled(divergence)):
        leaf = x.clone().requires_grad_()
        loss = of(leaf, t, columns=columns, rest=rest, weight=w, target_is="probs", kind="jsd")
        found.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
    assert found[0][0].isfinite()
    torch.testing.assert_close(*found, equal_nan=True)


def test_dynamic_rows_compile_once(device):
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    function = torch.compile(lambda x, y: divergence(x, y, kind="jsd"), backend=counter, fullgraph=True)
    for n in (3, 5, 9, 2):
        x, y = pair(n, 40, device=device)
        leaf = x.requires_grad_()
        loss = function(leaf, y)
        torch.testing.assert_close(loss, divergence(leaf, y, kind="jsd"))
        loss.backward()
    assert counter.frame_count == 2


TRANSFORMS = {
    "grad": lambda f: lambda x: torch.func.grad(lambda x: f(x).sum())(x[0]),
    "vmap": torch.vmap,
    "vmap of grad": lambda f: torch.vmap(torch.func.grad(lambda x: f(x).sum())),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x[0],), (x[1],))[1],
    "hessian": lambda f: lambda x: torch.func.hessian(lambda x: f(x).sum())(x[0]),
}


@every_kind
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_functorchs_transforms(kind, transform, device):
    x, y = pair(6, 20, device=device)
    x, y = x.view(2, 3, 20), y[:3]
    ours = lambda x: divergence(x, y, kind=kind, temperature=0.7, reduction="none")  # noqa: E731
    theirs = lambda x: formula(x, y, kind=kind, temperature=0.7)  # noqa: E731
    found, wanted = (TRANSFORMS[transform](of)(x.to(dtype)) for of, dtype in ((ours, FP32), (theirs, FP64)))
    torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-4, atol=1e-4)


@every_kind
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("grad", [False, True])
def test_vmap_is_a_loop(kind, reduction, grad, device):
    """Over students, teachers, temperatures and weights."""
    x, y = (each.view(3, 2, 20) for each in pair(6, 20, device=device))
    t, w = torch.linspace(0.5, 2.0, 6, device=device).view(3, 2), torch.arange(6.0, device=device).view(3, 2)

    def call(x, y, t, w):
        return divergence(x, y, kind=kind, temperature=t, target_temperature=1.5, weight=w, reduction=reduction)

    def one(x, *given):
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(call(leaf, *given).sum(), leaf)[0] if grad else call(x, *given)

    of = torch.func.grad(lambda *given: call(*given).sum()) if grad else call
    wanted = torch.stack([one(*each) for each in zip(x, y, t, w, strict=True)])
    torch.testing.assert_close(torch.vmap(of)(x, y, t, w), wanted)
    same = torch.vmap(of, in_dims=(0, None, 0, None))(x, y[0], t, w[1])
    torch.testing.assert_close(same, torch.stack([one(x[i], y[0], t[i], w[1]) for i in range(3)]))


@pytest.mark.parametrize("rest", ["renormalize", "lump"])
def test_vmap_of_columns(rest, device):
    x, y = pair(6, 20, device=device)
    columns = chosen(6, 20, 4, device)
    t = given_as(y, "probs").gather(-1, columns)
    wanted = divergence(x, t, columns=columns, rest=rest, target_is="probs", reduction="none")
    given = [each.view(2, 3, -1) for each in (x, t, columns)]
    found = torch.vmap(
        lambda x, t, c: divergence(x, t, columns=c, rest=rest, target_is="probs", reduction="none")
    )(*given)  # fmt: skip
    torch.testing.assert_close(found.view(-1), wanted)


@every_kind
def test_fake_tensors(kind, device):
    x, y = pair(6, 40, FP16, FP32, device)
    x, y = x.view(2, 3, 40), y.view(2, 3, 40)
    with FakeTensorMode() as mode:
        x, y = mode.from_tensor(x), mode.from_tensor(y)
        for reduction, shape in (("none", (2, 3)), ("mean", ()), ("sum", ())):
            found = divergence(x, y, kind=kind, reduction=reduction, dtype=BF16)
            assert (found.shape, found.dtype) == (shape, BF16)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_keeps_the_operator(strict, device):
    class Module(torch.nn.Module):
        def forward(self, x, y):
            return divergence(x, y, kind="jsd", temperature=0.5)

    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(
        Module(), pair(5, 40, device=device), dynamic_shapes=({0: rows}, {0: rows}), strict=strict
    ).run_decompositions()
    assert "fused_softmax.divergence.default" in {str(node.target) for node in program.graph.nodes}
    other = pair(9, 40, device=device, seed=5)
    torch.testing.assert_close(program.module()(*other), Module()(*other))


def test_torchs_path_says_the_same(device, monkeypatch):
    if device != "cpu":
        pytest.skip("of CPU tensors")
    monkeypatch.setattr(route, "INTERPRET", False)
    for dtypes, kind, target_is in product(((FP32, FP32), (BF16, FP32), (FP64, FP64)), KINDS, GIVEN):
        x, y = pair(5, 613, *dtypes)
        assert_right(
            x, given_as(y, target_is), kind=kind, beta=0.3, target_is=target_is, softcap=5.0, scale=-0.5,
            temperature=torch.linspace(0.5, 2.0, 5),
        )  # fmt: skip


# cross_entropy of probabilities.


def assert_as_torchs(x, t, *, g=None, near=None, **options):
    """The loss and both gradients are torch's in float64."""
    found = []
    for of, dtype in ((cross_entropy, None), (F.cross_entropy, FP64)):
        leaves = [each.detach().to(dtype or each.dtype, copy=True).requires_grad_() for each in (x, t)]
        given = {
            name: each.to(dtype or each.dtype) if isinstance(each, torch.Tensor) else each
            for name, each in options.items()
        }
        loss = of(*leaves, **given)
        weights = torch.linspace(-1, 2, loss.numel(), device=x.device, dtype=FP64).view(loss.shape)
        found.append((loss, *torch.autograd.grad(loss, leaves, weights.to(loss.dtype))))
    (loss, dx, dt), wanted = found
    dtypes = torch.promote_types(x.dtype, t.dtype), x.dtype, t.dtype
    for ours, theirs, dtype in zip((loss, dx, dt), wanted, dtypes, strict=True):
        assert (ours.dtype, ours.shape) == (dtype, theirs.shape)
        near_ = near or max(1e-12 if dtype == FP64 else 2e-5, 4 * torch.finfo(dtype).eps)
        most = theirs.nan_to_num(0, 0, 0).abs().amax().clamp(min=1e-3) if theirs.numel() else 1.0
        torch.testing.assert_close(ours.double() / most, theirs / most, rtol=near_, atol=near_, equal_nan=True)


def probabilities(x, class_dim, seed=3):
    t = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=FP64).softmax(class_dim)
    return t.to(x.dtype).to(x.device)


SHAPES = {"one": (33,), "rows": (5, 33), "dims": (2, 7, 3), "more dims": (2, 9, 3, 2)}


@pairwise(("shape", "reduction"))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, FP32), (BF16, BF16), (FP16, FP16), (FP64, FP64)], ids=str)
def test_losses_of_probabilities(shape, reduction, label_smoothing, weighted, dtypes, device):
    shape = SHAPES[shape]
    class_dim = 0 if len(shape) == 1 else 1
    n_classes = shape[class_dim]
    x = (peaked(math.prod(shape) // n_classes, n_classes, FP64) / 3).reshape(shape).to(dtypes[0]).to(device)
    t = probabilities(x, class_dim).to(dtypes[1])
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    if weighted:
        options["weight"] = torch.linspace(0.0, 2.0, n_classes, device=device).to(dtypes[0])
    assert_as_torchs(x, t, **options)


@pairwise()
@pytest.mark.parametrize("n_classes", [1, 2, 7, 128, 1000, 4097, 20001])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_losses_of_probabilities_of_vocabularies(n_classes, label_smoothing, dtype, device):
    x = peaked(3, n_classes).to(dtype).to(device)
    weight = torch.linspace(0.5, 2.0, n_classes, device=device)
    t = probabilities(x, 1) * 1.5  # which need not sum to 1
    assert_as_torchs(x, t, label_smoothing=label_smoothing, weight=weight.to(dtype))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_losses_of_probabilities_of_classes_that_cannot_be(label_smoothing, reduction, device):
    """As torch does: 0 times -inf is NaN, and what has a probability is infinite."""
    x = peaked(4, 70).to(device)
    t = probabilities(x, 1)
    x[1, 3], x[2, 60:], t[2, 60:] = -INF, -INF, 0.0
    found = cross_entropy(x, t, reduction=reduction, label_smoothing=label_smoothing)
    wanted = F.cross_entropy(x.double(), t.double(), reduction=reduction, label_smoothing=label_smoothing)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_losses_of_probabilities_of_large_offsets(device):
    x = peaked(4, 700).to(device)
    t = probabilities(x, 1)
    assert_as_torchs(x + 5000, t, reduction="none")


@pytest.mark.parametrize("wanted", ["x", "t"])
def test_one_gradient_of_probabilities(wanted, device):
    x = peaked(4, 70).to(device)
    t = probabilities(x, 1)
    (x if wanted == "x" else t).requires_grad_()
    cross_entropy(x, t, reduction="none")[1:].sum().backward()
    exact = [each.detach().double().requires_grad_() for each in (x, t)]
    F.cross_entropy(*exact, reduction="none")[1:].sum().backward()
    for ours, theirs in zip((x, t), exact, strict=True):
        if ours.requires_grad:
            torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-5)


def test_second_derivatives_of_probabilities(device):
    x = (peaked(3, 20) / 4).to(device)
    t, seconds = probabilities(x, 1), []
    weight = torch.linspace(0.5, 2.0, 20, device=device)
    for of, dtype in ((cross_entropy, FP32), (F.cross_entropy, FP64)):
        leaves = [each.to(dtype, copy=True).requires_grad_() for each in (x, t)]
        loss = of(*leaves, weight.to(dtype), label_smoothing=0.1, reduction="none")
        first = torch.autograd.grad(loss.square().sum(), leaves, create_graph=True)
        seconds.append(torch.autograd.grad(sum(each.square().sum() for each in first), leaves))
    torch.testing.assert_close([each.double() for each in seconds[0]], list(seconds[1]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "dim" not in name and name != "one row"])
def test_layouts_of_probabilities(layout, device):
    x = peaked(6, 72).to(device)
    t = probabilities(x, 1)
    assert_as_torchs(LAYOUTS[layout](x), t, reduction="none")
    assert_as_torchs(x, LAYOUTS[layout](t), reduction="none")


@pytest.mark.parametrize("options", [{"softcap": 5.0}, {"scale": -0.5}, {"scale": 2.0, "softcap": 5.0}], ids=str)
def test_losses_of_probabilities_with_options(options, device):
    x = peaked(4, 70).to(device)
    t = probabilities(x, 1)
    leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    z = logits_of(exact, options.get("scale"), options.get("softcap"), None)
    found, wanted = cross_entropy(leaf, t, **options), F.cross_entropy(z, t.double())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    (dx,), (truth,) = torch.autograd.grad(found, leaf), torch.autograd.grad(wanted, exact)
    torch.testing.assert_close(dx.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_losses_of_probabilities_under_autocast(dtype, device):
    x = peaked(4, 70).to(dtype).to(device)
    t = probabilities(x, 1)
    with torch.autocast(device, dtype=BF16):
        found, theirs = cross_entropy(x, t), F.cross_entropy(x, t)
    assert found.dtype == theirs.dtype
    torch.testing.assert_close(found.double(), F.cross_entropy(x.double(), t.double()), rtol=1e-5, atol=1e-5)


def test_compiled_losses_of_probabilities(device):
    x = peaked(4, 70).to(device)
    t = probabilities(x, 1)
    torch.testing.assert_close(compiled(cross_entropy)(x, t), F.cross_entropy(x, t))


def test_losses_of_probabilities_take_the_kernels(device):
    x = peaked(4, 70).to(device)
    with fused_softmax.explain() as explained:
        cross_entropy(x, probabilities(x, 1))
    assert [each.route for each in explained] == ["kernel"]
    assert explained[0].kernels == ["_pair_states"]
