"""log_prob against float64: options, gradients, ignored rows, logits overwritten, and the same bits in any batch."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from conftest import kernels, peaked
from products import QUICK, pairwise
from shapes import framed
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from fused_softmax import log_prob
from fused_softmax.core import calls, route
from fused_softmax.core.plan import H100, H200, plan_alone
from fused_softmax.ops.losses.log_prob import STATS, LogProbOutput

pytestmark = kernels
FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
NAN, INF = math.nan, math.inf
PART = 65536  # bytes
ALL = {"return_entropy": True, "return_lse": True, "return_stats": STATS}
HEIGHTS = [0.0, 100.0, 12345.0, 3e8, 2.0**31]
every_dtype = pytest.mark.parametrize("dtype", [FP32, FP16, BF16, FP64], ids=str)


@pytest.fixture(params=["own", "nvidia"])
def arithmetic(request):
    if request.param == "nvidia":
        request.getfixturevalue("nvidia")


def targets(x, k=None, *, ignore_index=-100, seed=0):
    """k classes of each row, one twice and one ignored; or one of each, every third row ignored."""
    shape = (*x.shape[:-1], *([] if k is None else [k]))
    t = torch.randint(x.shape[-1], shape, generator=torch.Generator().manual_seed(seed))
    if k is None:
        t.view(-1)[1::3] = ignore_index
    elif k > 2:
        t[..., 1], t[..., 2] = t[..., 0], ignore_index
    return t.to(x.device)


def formula(x, target, *, scale=None, softcap=None, temperature=None, ignore_index=-100):
    """(log_prob, entropy, lse, log_sum_sq_probs, mean_logits, is_top1) in float64."""
    z = x if scale is None else x * scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    if temperature is not None:
        z = z / (temperature.double().unsqueeze(-1) if isinstance(temperature, torch.Tensor) else temperature)
    lse = torch.logsumexp(z, -1)
    log_p = z - lse.unsqueeze(-1)
    t = (target if target.ndim == x.ndim else target.unsqueeze(-1)).long()
    counts = t != ignore_index
    of_targets = torch.where(counts, log_p.gather(-1, torch.where(counts, t, 0)), 0.0)
    p = log_p.exp()
    of_row = counts.any(-1)
    entropy = -torch.where(p == 0, 0.0, p * torch.where(p == 0, 0.0, log_p)).sum(-1)
    rows = [torch.where(of_row, each, 0.0) for each in (entropy, lse, p.square().sum(-1).log(), z.mean(-1))]
    return of_targets.view(target.shape), *rows, (counts & (t == z.argmax(-1, keepdim=True))).view(target.shape)


def gradients_like(results, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(each.shape, generator=generator, dtype=FP64).to(each.device) for each in results]


def assert_right(x, target, *, dtype=None, of=log_prob, **options):
    """Results and the gradient of log_prob, entropy and lse together are the formula's, to roundings of the dtypes."""
    leaf, exact = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    found, wanted = of(leaf, target, dtype=dtype, **ALL, **options), formula(exact, target, **options)
    result_dtype = dtype or (FP64 if x.dtype == FP64 else FP32)
    assert {each.dtype for each in (*found[:3], *found.stats[:2])} == {result_dtype}
    of_results = gradients_like(wanted[:3])
    (dx,) = torch.autograd.grad(found[:3], leaf, [each.to(result_dtype) for each in of_results])
    (truth,) = torch.autograd.grad(wanted[:3], exact, of_results)
    assert (dx.dtype, dx.shape) == (x.dtype, x.shape)
    near = max(64 * torch.finfo(result_dtype).eps, 1e-5 if x.dtype != FP64 else 1e-12)
    for ours, theirs in zip((*found[:3], *found.stats), wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=near, atol=near, equal_nan=True)
    near = max(near, 4 * torch.finfo(x.dtype).eps)
    most = truth.nan_to_num(0).abs().amax(-1, keepdim=True).clamp(min=1)  # of terms that cancel
    torch.testing.assert_close(dx.double() / most, truth / most, rtol=near, atol=near, equal_nan=True)


@pairwise()
@pytest.mark.parametrize("dtype", [FP32, BF16, FP64], ids=str)
@pytest.mark.parametrize("scale", [None, 1.5, -0.5])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("temperature", [None, 0.7, "of rows"])
@pytest.mark.parametrize("k", [None, 1, 5])
@pytest.mark.parametrize("ignore_index", [-100, 3])
@pytest.mark.parametrize("result", [None, FP32, BF16])
@pytest.mark.parametrize("n_classes", [40, 613])
def test_options(dtype, scale, softcap, temperature, k, ignore_index, result, n_classes, device):
    x = (peaked(5, n_classes) / 2).to(dtype).to(device)
    if temperature == "of rows":
        temperature = torch.tensor([0.3, 1.0, 2.0, 0.9, 5.0], device=device, dtype=FP32 if dtype == FP64 else dtype)
    target = targets(x, k, ignore_index=ignore_index)
    assert_right(
        x, target, dtype=result, scale=scale, softcap=softcap, temperature=temperature, ignore_index=ignore_index
    )


def vocabularies():
    return [1, 2, 3, 5, 7, 8, 9, 31, 64, 65, 127, 130, 1000, 1023, 2048, 2051, 4095, 4097]


@pairwise()
@every_dtype
@pytest.mark.parametrize("n_classes", vocabularies())
def test_vocabularies(n_classes, dtype, device):
    x = peaked(4, n_classes).to(dtype).to(device)
    assert_right(x, targets(x, 3), temperature=0.8)


@pytest.mark.parametrize(("n_classes", "dtype"), [(50257, FP32), (151937, BF16), (PART // 2 * 3 + 8, FP16)], ids=str)
def test_rows_of_several_parts(n_classes, dtype, device):
    x = peaked(2, n_classes).to(dtype).to(device)
    target = torch.tensor([[0, n_classes - 1, 0, -100], [1, n_classes // 2, PART // 4, PART // 4]], device=device)
    assert_right(x, target, temperature=torch.tensor([0.5, 1.5], device=device))


@pytest.mark.parametrize("n_classes", [60, 613, PART // 4 * 2 + 4])
@pytest.mark.parametrize("height", HEIGHTS)
def test_high_rows_in_the_arithmetic_of_nvidia(n_classes, height, nvidia, device):
    """How far a row stands from 0 costs its entropy nothing, though all exponents share what rounding took of m."""
    x = (peaked(3, n_classes) + height).to(device)
    assert_right(x, targets(x, 3))


@pytest.mark.parametrize("dtype", [BF16, FP64], ids=str)
@pytest.mark.parametrize("options", [{}, {"scale": 3.0}, {"softcap": 20.0}], ids=str)
@pytest.mark.parametrize("n_classes", [60, 613, PART // 2 + 4])
def test_dtypes_and_options_in_the_arithmetic_of_nvidia(n_classes, options, dtype, nvidia, device):
    x = (peaked(2, n_classes) + 100).to(dtype).to(device)
    assert_right(x, targets(x, 3), **options)


@pytest.mark.parametrize("n_classes", [60, 613, PART // 4 * 2 + 4])
@pytest.mark.parametrize("height", HEIGHTS)
def test_rows_all_equal_and_of_one_class(n_classes, height, arithmetic, device):
    """Of which the entropy is log n_classes and 0, and its gradient nothing."""
    x = torch.full((2, n_classes), height, device=device)
    x[1, : n_classes - 1] = -1e4 - height
    leaf = x.requires_grad_()
    out = log_prob(leaf, torch.tensor([n_classes // 2, n_classes - 1], device=device), return_entropy=True)
    most = math.log(n_classes)
    torch.testing.assert_close(out.entropy.tolist(), [most, 0.0], rtol=2e-6, atol=0.0)
    torch.testing.assert_close(out.log_prob.tolist(), [-most, 0.0], rtol=2e-6, atol=0.0)
    (dx,) = torch.autograd.grad(out.entropy.sum(), leaf)
    torch.testing.assert_close(dx, torch.zeros_like(dx), rtol=0.0, atol=1e-5 / n_classes)


@pytest.mark.parametrize("k", [17, 1100])
def test_many_targets_of_a_row(k, device):
    """Of more than 1024, the kernel had a tile of more elements than Triton takes."""
    x = peaked(2, 700).to(device)
    assert_right(x, targets(x, k))


@pairwise()
@pytest.mark.parametrize("n_classes", [33, 613])
def test_every_class_is_a_target(n_classes, device):
    """Rows start at every distance from 16 bytes: before the first boundary and after the last one too."""
    x = torch.randn(5, n_classes, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    every = torch.arange(n_classes, device=device).expand(5, -1)
    weights = torch.linspace(-1, 2, 5 * n_classes, device=device).view(5, -1)
    (found,) = torch.autograd.grad(log_prob(x, every), x, weights)
    expected = weights.double() - x.detach().double().softmax(-1) * weights.double().sum(-1, keepdim=True)
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-4)


def test_numbers_that_change_nothing_are_kept_apart(device):
    """A factor of 1 takes another kernel: it is that of scale over temperature."""
    x, target = (
        torch.randn(4, 90, generator=torch.Generator().manual_seed(0)).to(device),
        torch.arange(4, device=device),
    )
    for _ in range(2):
        for scale, temperature in ((1.0, 1.0), (2.0, 2.0), (2.0, 1.0), (3.0, 2.0), (1.0, None), (0.5, None)):
            found = log_prob(x, target, scale=scale, temperature=temperature)
            logits = x * scale / (temperature or 1.0)
            torch.testing.assert_close(found, torch.log_softmax(logits, -1)[torch.arange(4), target])


@pytest.mark.parametrize("alignment", ["even", "shifted", "scalar"])
@pytest.mark.parametrize("n_classes", [56, 613, 2056])
@every_dtype
def test_rows_as_they_lie(alignment, n_classes, dtype, device):
    n_classes = n_classes // 8 * 8 if alignment == "even" else n_classes
    source, _ = framed(alignment, peaked(5, n_classes).to(dtype), device=device)
    assert_right(source.rows, targets(source.rows, 3))
    assert not source.changed(outside=False)


LAYOUTS = {
    "one row for all": lambda x: x[:1].expand(6, -1),
    "every second column": lambda x: x.repeat_interleave(2, -1)[:, ::2],
    "columns apart": lambda x: x.t().contiguous().t(),
    "every second row": lambda x: x.repeat_interleave(2, 0)[::2],
    "rows in reverse": lambda x: x.flip(0),
    "one element past 16 bytes": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "a dim more": lambda x: x.view(2, 3, -1),
    "two dims more, crossed": lambda x: x.view(1, 2, 3, -1).transpose(1, 2),
    "one row": lambda x: x[0],
}


@pytest.mark.parametrize("k", [None, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, k, device):
    x = LAYOUTS[layout](peaked(6, 72).to(device))
    t = targets(x, k)
    t = torch.tensor(5, device=device) if x.ndim == 1 and k is None else t
    assert_right(x, t)
    if k:
        assert_right(x, t.repeat_interleave(2, -1)[..., ::2])


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)], ids=str)
@pytest.mark.parametrize("k", [None, 3])
def test_no_rows(shape, k, device):
    x = torch.empty(*shape, 5, device=device, requires_grad=True)
    t = torch.zeros(*shape, *([] if k is None else [k]), device=device, dtype=torch.int64)
    out = log_prob(x, t, **ALL)
    assert (out.log_prob.shape, out.entropy.shape, out.stats.is_top1.shape) == (t.shape, x.shape[:-1], t.shape)
    (out.log_prob.sum() + out.lse.sum()).backward()
    assert x.grad.shape == x.shape


def test_what_is_returned(device):
    x, t = peaked(3, 9).to(device), torch.tensor([1, 2, 3], device=device)
    assert type(log_prob(x, t)) is torch.Tensor
    for names in ([], ["mean_logits"], list(STATS)):
        out = log_prob(x, t, return_lse=True, return_stats=names)
        assert (type(out), out.entropy, out.lse is None) == (LogProbOutput, None, False)
        assert (out.stats is None) == (not names)
        assert [name for name in STATS if names and getattr(out.stats, name) is not None] == [
            name for name in STATS if name in names
        ]
    assert (log_prob(x.half(), t).dtype, log_prob(x.half(), t, dtype=FP16).dtype) == (FP32, FP16)


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.uint8], ids=str)
@pytest.mark.parametrize("ignore_index", [-100, 255, 2, 2**40])
def test_indices_of_every_dtype(kind, ignore_index, device):
    x = peaked(4, 300).to(device)
    t = torch.tensor([[1, 2], [255, 2], [254, 255], [0, 0]], device=device)
    assert_right(x, t.to(kind), ignore_index=ignore_index)


# Rows that are hard.


@pytest.mark.parametrize("n_classes", [60, 700, PART // 4 * 2 + 4])
@pytest.mark.parametrize("where", ["leading", "middle", "trailing"])
def test_a_tile_of_minus_infinity(n_classes, where, arithmetic, device):
    x, third = peaked(2, n_classes), n_classes // 3
    start = {"leading": 0, "middle": third, "trailing": 2 * third}[where]
    x[:, start : start + third] = -INF
    t = torch.full((2,), (start + third + 1) % n_classes)
    leaf = x.to(device).requires_grad_()
    out = log_prob(leaf, t.to(device), return_entropy=True, return_lse=True)
    exact = x.double().requires_grad_()
    log_p = torch.log_softmax(exact, -1)
    entropy = -torch.special.xlogy(p := log_p.exp(), torch.where(p == 0, 1.0, p)).sum(-1)
    torch.testing.assert_close(out.entropy.double().cpu(), entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.log_prob.double().cpu(), log_p[range(2), t], rtol=1e-5, atol=1e-5)
    (dx,) = torch.autograd.grad(out.log_prob.sum() + out.entropy.sum(), leaf)
    assert dx.isfinite().all()
    assert (dx[:, start : start + third] == 0).all()


def test_one_class_that_is_seen(arithmetic, device):
    """Its probability is 1, whatever else is asked; a class of -inf has log-probability -inf and a gradient that is."""
    x = torch.full((2, 70), -INF, device=device)
    x[:, 5] = 3.0
    leaf = x.requires_grad_()
    out = log_prob(leaf, torch.tensor([5, 9], device=device), return_entropy=True, return_lse=True)
    assert out.log_prob.tolist() == [0.0, -INF]
    assert (out.entropy.tolist(), out.lse.tolist()) == ([0.0, 0.0], [3.0, 3.0])
    (dx,) = torch.autograd.grad(out.log_prob.sum() + out.entropy.sum(), leaf)
    expected = torch.zeros_like(dx)
    expected[1, 5], expected[1, 9] = -1.0, 1.0
    assert torch.equal(dx, expected)


@pytest.mark.parametrize("of", ["log_prob", "entropy", "lse", "all"])
@pytest.mark.parametrize("k", [None, 2])
def test_ignored_rows_of_nan(k, of, arithmetic, device):
    x = peaked(4, 613).to(device)
    x[1], x[2, 3] = NAN, INF
    t = torch.tensor([3, -100, -100, 612], device=device)
    t = t if k is None else t.unsqueeze(-1).repeat(1, k)
    leaf = x.requires_grad_()
    out = log_prob(leaf, t, **ALL)
    found = out[:3] if of == "all" else [getattr(out, of)]
    given = [torch.where((t if each.shape == t.shape else t.view(4, -1)[:, 0]) == -100, NAN, 1.0) for each in found]
    (dx,) = torch.autograd.grad(found, leaf, given)
    for each in (*out[:3], *out.stats, dx):
        assert (each[1:3] == 0).all()
        assert not each[[0, 3]].isnan().any()


@pytest.mark.parametrize("what", [NAN, INF])
@pytest.mark.parametrize("at", [0, 300, 612])
def test_what_is_no_number_makes_its_row_nan(at, what, arithmetic, device):
    """Before, among or after a row's whole vectors."""
    x = peaked(3, 613).to(device)
    x[1, at] = what
    leaf = x.requires_grad_()
    out = log_prob(leaf, torch.tensor([3, 3, 4], device=device), return_entropy=True)
    (dx,) = torch.autograd.grad(out.log_prob.sum() + out.entropy.sum(), leaf)
    for each in (*out[:2], dx):
        assert each.isnan().view(3, -1).all(-1).tolist() == [False, True, False]
        assert each[[0, 2]].isfinite().all()


def test_one_target_of_a_row_that_counts(device):
    x = peaked(1, 40).to(device)
    assert_right(x, torch.tensor([[-100, -100, 7]], device=device))


def test_a_target_that_is_no_class_makes_its_row_nan(device):
    """Its gradient was 0 where a probability is."""
    x = torch.tensor([[0.0, -300.0, 5.0, -INF]] * 3, device=device, requires_grad=True)
    out = log_prob(x, torch.tensor([[1, 4], [-1, -100], [0, 2]], device=device), return_lse=True)
    assert out.log_prob.isnan().tolist() == [[False, True], [True, False], [False, False]]
    (dx,) = torch.autograd.grad(out.log_prob.sum(), x)
    assert dx[:2].isnan().all()
    assert dx[2].isfinite().all()


def test_a_gradient_of_nan_is_not_lost(arithmetic, device):
    x = torch.tensor([[0.0, -300.0, 5.0]], device=device, requires_grad=True)
    out = log_prob(x, torch.tensor([2], device=device), return_entropy=True, return_lse=True)
    for each in out[:3]:
        (dx,) = torch.autograd.grad(each, x, torch.full_like(each, NAN), retain_graph=True)
        assert dx.isnan().all()


@pytest.mark.parametrize("way", ["kernels", "create_graph", "torch"])
def test_temperatures_that_are_not_above_0(way, device, monkeypatch):
    if way == "torch":
        if device != "cpu":
            pytest.skip("of CPU tensors")
        monkeypatch.setattr(route, "INTERPRET", False)
    x, t = peaked(5, 40).to(device).requires_grad_(), torch.tensor([1, 2, 3, 4, -100], device=device)
    out = log_prob(x, t, temperature=torch.tensor([1.0, 0.0, -1.0, NAN, -1.0], device=device), return_entropy=True)
    (dx,) = torch.autograd.grad(out.log_prob.sum() + out.entropy.sum(), x, create_graph=way == "create_graph")
    for each in (out.log_prob, out.entropy, dx[:, 0], dx[:, 39]):
        assert each.isnan().tolist() == [False, True, True, True, False]


def test_of_equals_the_first_is_the_likeliest(device):
    for n_classes, first, second in ((70, 3, 40), (PART, 5, PART - 3), (613, 0, 612)):
        x = torch.zeros(1, n_classes, device=device)
        x[0, [first, second]] = 4.0
        t = torch.tensor([[second, first, -100]], device=device)
        assert log_prob(x, t, return_stats=("is_top1",)).stats.is_top1.tolist() == [[False, True, False]]


# Checks.


def test_targets_out_of_range_raise_where_they_can_be_read(monkeypatch):
    monkeypatch.setattr(route, "INTERPRET", False)
    x = torch.zeros(2, 3, 5)
    for bad in (5, -1):
        with pytest.raises(IndexError, match=f"log_prob: target {bad} "):
            log_prob(x, torch.full((2, 3), bad))
        with pytest.raises(IndexError, match=f"log_prob: target {bad} "):
            log_prob(x, torch.tensor([0, bad]).expand(2, 3, 2))
    assert log_prob(x, torch.full((2, 3), 7), ignore_index=7).eq(0).all()


X, T = torch.zeros(3, 7), torch.tensor([1, 2, 3])
WRONG = {
    "a list": ({"input": [1.0]}, TypeError, "input must be a Tensor, not list"),
    "an input of ints": ({"input": X.int()}, NotImplementedError, "input must be of a float dtype, got torch.int32"),
    "no class dim": ({"input": X[0, 0]}, ValueError, r"input must have a class dim, got shape \(\)"),
    "no classes": ({"input": X[:, :0]}, ValueError, r"input must have at least one class, got shape \(3, 0\)"),
    "sparse": ({"input": X.to_sparse()}, RuntimeError, "input must be a dense strided tensor, got torch.sparse_coo"),
    "no target": ({"target": None}, TypeError, "target must be a Tensor, not NoneType"),
    "floats": ({"target": T.float()}, RuntimeError, "target must be of int64, int32 or uint8, got torch.float32"),
    "another length": ({"target": T[:2]}, ValueError, r"target must have shape \(3,\) or .* got \(2,\)"),
    "no k": ({"target": T[:, None][:, :0]}, ValueError, r"target must have shape .* got \(3, 0\)"),
    "dims": ({"target": T.view(3, 1, 1)}, ValueError, r"target must have shape .* got \(3, 1, 1\)"),
    "a device": ({"target": T.to("meta")}, RuntimeError, "target must be on the input's device cpu, got meta"),
    "scale": ({"scale": INF}, ValueError, "scale must be finite, got inf"),
    "a scale's type": ({"scale": torch.ones(())}, TypeError, "scale must be a number, not Tensor"),
    "softcap": ({"softcap": 0.0}, ValueError, "softcap must be more than 0, got 0.0"),
    "temperature": ({"temperature": 0.0}, ValueError, "temperature must be more than 0, got 0.0"),
    "a temperature's type": ({"temperature": [1.0]}, TypeError, r"temperature must be a number, not list \(\[1.0\]\)"),
    "temperatures": ({"temperature": torch.ones(2)}, ValueError, r"temperature must have shape \(3,\), got \(2,\)"),
    "their dtype": ({"temperature": T}, RuntimeError, "temperature must be of a float dtype .* got torch.int64 on cpu"),
    "their layout": ({"temperature": X[:, 0].to_sparse()}, RuntimeError, "temperature must be a dense strided tensor"),
    "their gradient": ({"temperature": X[:, 0].clone().requires_grad_()}, RuntimeError, "temperature requires grad"),
    "ignore_index": ({"ignore_index": 1.0}, TypeError, r"ignore_index must be an int, not float \(1.0\)"),
    "no ignore_index": ({"ignore_index": None}, TypeError, "ignore_index must be an int, not NoneType"),
    "of many bits": ({"ignore_index": 2**63}, ValueError, "ignore_index must fit in 64 bits, got 9223372036854775808"),
    "statistics": ({"return_stats": ("entropy",)}, ValueError, "return_stats must be names among .*, got 'entropy'"),
    "a name": ({"return_stats": "is_top1"}, TypeError, "return_stats must be a sequence of names, not 'is_top1'"),
    "no names": ({"return_stats": None}, TypeError, "return_stats must be a sequence of names, not None"),
    "dtype": ({"dtype": torch.int32}, TypeError, "dtype must be a float torch.dtype, got torch.int32"),
    "dtype's type": ({"dtype": "float32"}, TypeError, "dtype must be a float torch.dtype, got 'float32'"),
}  # fmt: skip


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name, kept):
    wrong, error, message = WRONG[name]
    if kept:
        log_prob(X, T)
    with pytest.raises(error, match=f"^log_prob: {message}"):
        log_prob(**{"input": X, "target": T, **wrong})


# Derivatives.


@pairwise()
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("temperature", [None, 0.7, "of rows"])
@pytest.mark.parametrize("k", [None, 3])
def test_first_and_second_derivatives(softcap, temperature, k, device):
    x = torch.randn(3, 5, dtype=FP64, device=device, requires_grad=True)
    if temperature == "of rows":
        temperature = torch.tensor([0.5, 1.0, 2.0], dtype=FP64, device=device)
    target = targets(x, k)

    def call(x):
        return log_prob(
            x, target, scale=1.5, softcap=softcap, temperature=temperature, return_entropy=True, return_lse=True
        )[:3]

    assert torch.autograd.gradcheck(call, x, fast_mode=QUICK)
    assert torch.autograd.gradgradcheck(call, x, fast_mode=QUICK)


ASKED = [asked for asked in product([False, True], repeat=3) if any(asked)]


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_gradients_of_some_results(asked, device):
    x = peaked(4, 70).to(device)
    t = targets(x, 3)
    found, wanted = [], []
    for of, results, leaf in (
        (log_prob, found, x.clone().requires_grad_()),
        (formula, wanted, x.double().requires_grad_()),
    ):
        out = of(leaf, t, **(ALL if of is log_prob else {}))
        (dx,) = torch.autograd.grad(sum(y.square().sum() for y, wants in zip(out, asked, strict=False) if wants), leaf)
        results.append(dx.double())
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


GIVEN = {
    "expanded": lambda g: g[:1, :1].expand_as(g), "transposed": lambda g: g.t().contiguous().t(),
    "every second": lambda g: g.repeat_interleave(2, -1)[:, ::2], "zero": lambda g: g * 0,
    "negated": lambda g: torch._neg_view(-g),
}  # fmt: skip


@pytest.mark.parametrize("layout", GIVEN)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_gradients_as_they_lie(layout, dtype, device):
    x = peaked(4, 70).to(device).requires_grad_()
    t = targets(x, 4)
    y = log_prob(x, t, dtype=dtype)
    g = GIVEN[layout](torch.linspace(-1, 1, 16, device=device).view(4, 4).to(dtype))
    (found,) = torch.autograd.grad(y, x, g, retain_graph=True)
    (wanted,) = torch.autograd.grad(y, x, g.resolve_neg().clone(memory_format=torch.contiguous_format))
    assert torch.equal(found, wanted)


def test_gradients_in_a_batch(device):
    x = peaked(4, 40).to(device).requires_grad_()
    y = log_prob(x, targets(x))
    g = torch.stack([torch.ones_like(y), torch.arange(4.0, device=device)])
    (found,) = torch.autograd.grad(y, x, g, is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(
        found, torch.stack([torch.autograd.grad(y, x, each, retain_graph=True)[0] for each in g])
    )


@pytest.mark.parametrize("columns", [33, 40])
def test_derivatives_of_rows_that_are_copied_first(columns, device):
    """Whose targets had a shape of their own in a first derivative's way, where a second one and a batch compare it."""
    x = (peaked(4, columns, FP64) / 4).to(device).t().contiguous().t().requires_grad_()
    t = targets(x)
    y = log_prob(x, t, return_entropy=True)
    wanted = formula(x, t)
    for found, expected in zip(y[:2], wanted[:2], strict=True):
        found, expected = (torch.autograd.grad(each.sum(), x, create_graph=True)[0] for each in (found, expected))
        torch.testing.assert_close(found, expected)
        found, expected = (torch.autograd.grad(each.square().sum(), x, retain_graph=True) for each in (found, expected))
        torch.testing.assert_close(found, expected)
    g = torch.stack([torch.ones_like(y[0]), torch.arange(4.0, dtype=FP64, device=device)])
    found, expected = (
        torch.autograd.grad(each, x, g, is_grads_batched=True, retain_graph=True) for each in (y[0], wanted[0])
    )
    torch.testing.assert_close(found, expected)


def test_results_that_are_changed_in_place(device):
    x = peaked(4, 40).to(device).requires_grad_()
    t = targets(x, ignore_index=-1).clamp(min=0)
    wanted = torch.autograd.grad((log_prob(x, t) * 2).exp().sum(), x)
    y = log_prob(x, t)
    torch.testing.assert_close(torch.autograd.grad(y.mul_(2).exp().sum(), x), wanted)
    out = log_prob(x, t, return_entropy=True)
    out.entropy.mul_(2)  # which the backward pass reads
    with pytest.raises(RuntimeError, match=r"log_prob: .* modified by an inplace operation"):
        out.entropy.sum().backward()


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("way", ["checkpoint", "saved on a CPU", "hooks"])
def test_saved_tensors(way, inplace, device):
    x, t = peaked(4, 613).to(device), torch.tensor([[1, 1], [612, -100], [0, 5], [-100, -100]], device=device)
    temperature = torch.linspace(0.5, 2, 4, device=device)

    def call(x):
        return log_prob(
            x * 1, t, temperature=temperature, return_entropy=True, inplace_backward=inplace
        ).entropy.sum()  # fmt: skip

    (wanted,) = torch.autograd.grad(call(leaf := x.clone().requires_grad_()), leaf)
    leaf = x.clone().requires_grad_()
    if way == "checkpoint":
        y = checkpoint(call, leaf, use_reentrant=False)
    elif way == "hooks":
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: t, lambda t: t.t().contiguous().t() if t.ndim == 2 else t
        ):
            y = call(leaf)
    else:
        with torch.autograd.graph.save_on_cpu():
            y = call(leaf)
    torch.testing.assert_close(torch.autograd.grad(y, leaf)[0], wanted)


@pytest.mark.parametrize("how", ["laid out anew", "with torch's neg bit", "as they were"])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("lists", [False, True])
def test_saved_states_of_rows_that_a_hook_returns(how, entropy, lists, device):
    """Of a call whose gradient is kept: kernels read m, log s and the entropy of each row too, and kept columns."""
    x, t = peaked(4, 37).to(device).requires_grad_(), torch.tensor([1, 36, 0, 5], device=device)
    g = torch.linspace(0.5, 2.0, 4, device=device)
    ids, offsets = torch.arange(20, device=device) * 7 % 37, torch.arange(5, device=device) * 5

    def call():
        out = log_prob(x, t, return_entropy=entropy, kept=(ids, offsets) if lists else None)
        return out[1] if entropy else out

    wanted = [torch.autograd.grad(call(), x, g)[0] for _ in range(2)]
    of_rows = []

    def returned(saved):
        if saved.ndim != 1 or (saved.shape == t.shape and not saved.is_floating_point()):
            return saved
        of_rows.append(saved)
        if how == "laid out anew":
            return torch.stack([saved, saved * 0], 1)[:, 0]
        return torch._neg_view(-saved) if how == "with torch's neg bit" else saved

    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, returned):
        y = call()
    found = torch.autograd.grad(y, x, g)[0]
    assert len(of_rows) >= 2 + entropy + 2 * lists
    assert all(torch.equal(each, found) for each in wanted)


# The logits' memory.


@pairwise()
@every_dtype
@pytest.mark.parametrize("n_classes", [8, 33, 613, 2056, 20001])
@pytest.mark.parametrize("options", ["plain", "softcap"])
@pytest.mark.parametrize("shift", [0, 1])
def test_inplace_backward(n_classes, dtype, options, shift, device):
    """The same bits, in the memory of the logits, of rows of every alignment."""
    options = {"plain": {}, "softcap": {"softcap": 3.0, "temperature": 0.5}}[options]
    flat = peaked(1, 6 * n_classes + shift).to(dtype).to(device).view(-1)
    found = []
    t = targets(flat[shift:].view(6, n_classes), 5)
    t[:, -1], t[:, -2], t[3] = n_classes - 1, 0, -100
    for inplace in (False, True):
        logits = (flat.clone().requires_grad_() * 1)[shift:].view(6, n_classes)
        out = log_prob(logits, t, return_entropy=True, inplace_backward=inplace, **options)
        total = (out.log_prob * torch.arange(1.0, 6.0, device=device)).sum() + out.entropy.sum()
        (dx,) = torch.autograd.grad(total, logits)
        found.append(dx)
        assert (dx.data_ptr() == logits.data_ptr()) == inplace
    assert torch.equal(*found)


def test_inplace_backward_is_refused_where_logits_are_needed(device):
    leaf, t = peaked(4, 40).to(device).requires_grad_(), torch.tensor([1, 2, 3, -100], device=device)
    for kept in (False, True):  # a leaf has the same kept call
        if kept:
            log_prob((leaf * 1).view(4, 40), t, inplace_backward=True)
        for each in (leaf, leaf.view(4, 40), leaf[:]):
            with pytest.raises(RuntimeError, match="log_prob: inplace_backward overwrites the logits"):
                log_prob(each, t, inplace_backward=True)
    with pytest.raises(RuntimeError, match="log_prob: inplace_backward takes contiguous logits"):
        log_prob((leaf * 1)[:, ::2], t, inplace_backward=True)
    assert torch.equal(leaf.detach(), peaked(4, 40).to(device))
    log_prob(leaf.detach(), t, inplace_backward=True)
    with torch.no_grad():
        log_prob(leaf, t, inplace_backward=True)


@pytest.mark.parametrize("who", ["twice", "create_graph", "a loss", "exp", "changed"])
def test_who_else_needs_the_logits_is_told(who, device):
    leaf, t = peaked(4, 40).to(device).requires_grad_(), torch.tensor([1, 2, 3, -100], device=device)
    logits = leaf.exp() if who == "exp" else leaf * 1
    y, other = log_prob(logits, t, inplace_backward=True).sum(), log_prob(logits, t).sum()
    if who == "changed":
        with torch.no_grad():
            logits.mul_(2)
    elif who == "twice":
        torch.autograd.grad(y, logits, retain_graph=True)
    elif who == "a loss":
        torch.autograd.grad(y, logits)
        y = other
    with pytest.raises(RuntimeError, match="inplace"):
        torch.autograd.grad(y, leaf, create_graph=who == "create_graph")


# The same bits.


@pytest.mark.parametrize("device_of", [H100, H200], ids=["H100", "H200"])
@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_a_rows_plan_does_not_follow_from_the_number_of_rows(itemsize, device_of):
    for n_classes in (*vocabularies(), 32000, 50257, 128256, 151936, 151937, 2**20):
        plans = {replace(plan_alone(n, n_classes, itemsize, device_of), n_rows=1) for n in (1, 2, 7, 132, 4096, 2**20)}
        assert len(plans) == 1, n_classes


@pytest.mark.parametrize(
    ("n_classes", "dtype"),
    [(2048, FP32), (2051, BF16), (1000, FP16), (50257 // 8, FP32), (PART // 2 + 8, BF16), (PART // 4 + 1, FP32)],
    ids=str,
)
def test_a_row_has_the_same_bits_in_any_batch(n_classes, dtype, device):
    n = 64 if n_classes == 2051 else 10
    x = peaked(n, n_classes).to(dtype).to(device)
    t, temperature = targets(x, 3), torch.linspace(0.5, 2.0, n, device=device)

    def results(x, which, grad=False):
        out = log_prob(x.detach().requires_grad_(grad), t[which], temperature=temperature[which], **ALL)
        return [each.detach() for each in (*out[:3], *out.stats)]

    wanted = results(x, slice(None))
    moved = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)  # one element past 16 bytes
    apart = torch.cat([x, x[:, :3]], 1)[:, :n_classes]  # rows that start on any element
    shuffled = torch.randperm(n)
    for given, which in [(x[2:3], slice(2, 3)), (x[shuffled], shuffled), (moved[3:], slice(3, n)),
                         (apart[3:10], slice(3, 10))]:  # fmt: skip
        for a, b in zip(results(given, which, grad=given.shape[0] == 7), wanted, strict=True):
            assert torch.equal(a, b[which])


# Kept calls.


def differing(device):
    """Calls that one kept call could be taken for another's, each with what it is of."""
    of_rows = torch.linspace(0.5, 2.0, 4, device=device)
    return [
        {}, {"scale": 2.0}, {"scale": 3.0}, {"scale": -2.0}, {"scale": 0.0}, {"scale": 1.0}, {"scale": 2},
        {"softcap": 3.0}, {"softcap": 4.0}, {"temperature": 2.0}, {"temperature": 0.5}, {"temperature": of_rows},
        {"temperature": of_rows * 2}, {"temperature": of_rows.half()}, {"temperature": of_rows.expand(2, 4)[1]},
        {"temperature": of_rows.repeat_interleave(2)[::2]}, {"scale": 0.5, "temperature": 0.5}, {"ignore_index": 3},
        {"ignore_index": 2},
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_kept_calls_answer_for_their_like_alone(seed, device):
    generator = torch.Generator().manual_seed(seed)
    pick = lambda values: values[int(torch.randint(len(values), (), generator=generator))]  # noqa: E731
    options_of = differing(device)
    calls.forget()
    for _ in range(60):
        options, k, dtype = pick(options_of), pick([None, 1, 3]), pick([FP32, FP32, BF16])
        n, grad = pick([4, 4, 1, 0]), pick([False, True])
        x = peaked(4, 40, seed=seed).to(dtype).to(device)
        t = targets(x, k, seed=seed)
        t = t.int() if pick([False, True]) else t
        if n != 4:
            x, t = x[:n], t[:n]
            options = {
                name: each[:n] if isinstance(each, torch.Tensor) else each for name, each in options.items()
            }  # fmt: skip
        t = torch.where(t == -100, options.get("ignore_index", -100), t).to(t.dtype)
        asked = {"return_entropy": pick([False, True]), "return_lse": pick([False, True])}
        asked["return_stats"] = pick([(), ("is_top1",), ("mean_logits",), STATS])
        result = pick([None, None, FP64])
        leaf = x.clone().requires_grad_(grad)
        out = log_prob(leaf, t, dtype=result, **asked, **options)
        out = out if isinstance(out, LogProbOutput) else LogProbOutput(out)
        exact = x.double().requires_grad_()
        wanted = formula(exact, t, **options)
        stats = out.stats or (None,) * 3
        of_call = asked["return_entropy"], asked["return_lse"], *[name in asked["return_stats"] for name in STATS]
        assert [each is not None for each in (*out[1:3], *stats)] == list(of_call)
        for ours, theirs in zip((*out[:3], *stats), wanted, strict=True):
            if ours is not None:
                torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-4, atol=1e-4)
                assert ours.dtype in (result or FP32, torch.bool)
        assert out.log_prob.requires_grad == grad
        if grad and n:
            (dx,), (truth,) = (
                torch.autograd.grad(y.sum(), of) for y, of in ((out.log_prob, leaf), (wanted[0], exact))
            )  # fmt: skip
            torch.testing.assert_close(dx.double(), truth, rtol=3e-2, atol=1e-5 if dtype == FP32 else 6e-2)


def test_a_kept_call_does_not_pass_temperatures_that_require_grad(device):
    x, t, temperature = peaked(3, 40).to(device), torch.tensor([1, 2, 3], device=device), torch.ones(3, device=device)
    for leaf in (x, x.clone().requires_grad_()):
        log_prob(leaf, t, temperature=temperature)
        with pytest.raises(RuntimeError, match="log_prob: temperature requires grad"):
            log_prob(leaf, t, temperature=temperature.clone().requires_grad_())
    with torch.no_grad():
        log_prob(x, t, temperature=temperature.clone().requires_grad_())


def test_modes_of_autograd(device):
    x, t = peaked(3, 40).to(device).requires_grad_(), torch.tensor([1, 2, 3], device=device)
    wanted = log_prob(x, t, **ALL)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for _ in range(2):
                out = log_prob(x, t, **ALL)
        assert not any(each.requires_grad for each in (*out[:3], *out.stats))
        torch.testing.assert_close((*out[:3], *out.stats), (*wanted[:3], *wanted.stats), rtol=0, atol=0)
    assert log_prob(x, t).requires_grad


# Compilers and transforms.


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


@pairwise()
@pytest.mark.parametrize("temperature", [None, 0.7, "of rows"])
@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("inplace", [False, True])
def test_compiled(temperature, k, dtype, inplace, device):
    x = peaked(6, 70).view(2, 3, 70).to(dtype).to(device)
    if temperature == "of rows":
        temperature = torch.linspace(0.5, 2.0, 6, device=device).view(2, 3)

    def call(x, target, inplace_backward=inplace, **options):
        return log_prob(x * 1, target, inplace_backward=inplace_backward, **options)

    assert_right(x, targets(x, k), of=compiled(call), softcap=4.0, temperature=temperature)


def test_dynamic_rows_compile_once(device):
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    function = torch.compile(lambda x, t: log_prob(x, t, return_entropy=True), backend=counter, fullgraph=True)
    for n in (3, 5, 9, 2):
        x = peaked(n, 40).to(device).requires_grad_()
        t = targets(x)
        out = function(x, t)
        torch.testing.assert_close(out[:2], log_prob(x, t, return_entropy=True)[:2])
        out.entropy.sum().backward()
    assert counter.frame_count == 2


TRANSFORMS = {
    "grad": lambda f: lambda x: torch.func.grad(lambda x: f(x).sum())(x[0]),
    "vmap": torch.vmap,
    "vmap of grad": lambda f: torch.vmap(torch.func.grad(lambda x: f(x).sum())),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x[0],), (x[1],))[1],
    "hessian": lambda f: lambda x: torch.func.hessian(lambda x: f(x).sum())(x[0]),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_functorchs_transforms(transform, device):
    x = (peaked(6, 20) / 4).view(2, 3, 20).to(device)
    t = targets(x[0], 3)
    ours = lambda x: (lambda out: out.log_prob.sum(-1) + out.entropy)(  # noqa: E731
        log_prob(x, t, temperature=0.7, return_entropy=True)
    )
    theirs = lambda x: (lambda out: out[0].sum(-1) + out[1])(formula(x, t, temperature=0.7))  # noqa: E731
    found, wanted = (TRANSFORMS[transform](of)(x.to(dtype)) for of, dtype in ((ours, FP32), (theirs, FP64)))
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


def test_fake_tensors(device):
    x, t = peaked(3, 40).to(device).half().requires_grad_(), torch.tensor([[1, 2]] * 3, device=device)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out = log_prob(mode.from_tensor(x), mode.from_tensor(t), **ALL, dtype=BF16)
        assert [(*each.shape, each.dtype) for each in (*out[:3], *out.stats)] == [
            (3, 2, BF16), (3, BF16), (3, BF16), (3, BF16), (3, BF16), (3, 2, torch.bool),
        ]  # fmt: skip


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_keeps_the_operator(strict, device):
    class Module(torch.nn.Module):
        def forward(self, x, target):
            return log_prob(x, target, temperature=0.5, return_entropy=True).entropy

    rows, x = torch.export.Dim("rows", min=2), peaked(5, 40).to(device)
    program = torch.export.export(
        Module(), (x, targets(x)), dynamic_shapes=({0: rows}, {0: rows}), strict=strict
    ).run_decompositions()  # fmt: skip
    assert "fused_softmax.log_prob.default" in {str(node.target) for node in program.graph.nodes}
    other = peaked(9, 40, seed=1).to(device)
    torch.testing.assert_close(program.module()(other, targets(other)), Module()(other, targets(other)))


def test_torchs_path_says_the_same(device, monkeypatch):
    if device != "cpu":
        pytest.skip("of CPU tensors")
    monkeypatch.setattr(route, "INTERPRET", False)
    for dtype, k in product((FP32, BF16, FP64), (None, 3)):
        x = (peaked(5, 613) / 2).to(dtype)
        assert_right(x, targets(x, k), softcap=5.0, scale=-0.5, temperature=torch.linspace(0.5, 2.0, 5))
