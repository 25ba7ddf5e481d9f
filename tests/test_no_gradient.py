"""Statistics are read as any tensor, and a backward pass through one raises and names it, on every route."""

import os
import re
import warnings

import pytest
import torch
from conftest import peaked
from products import pairwise

from fused_softmax import attention, cross_entropy, linear_cross_entropy, log_prob
from fused_softmax.core import route

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="without a GPU or the interpreter, CPU tensors take ATen"
)
ROUTES = ("kernels", "compiled", "torch", "torch compiled")
LOSSES = ("cross_entropy", "none", "probabilities", "linear", "linear skipped", "linear probabilities")


def loss(kind, device):
    target, w = torch.tensor([3, -100, 0, 7], device=device), (peaked(9, 9, seed=1) / 4).to(device)
    p, more = torch.softmax(w[:4], 1), {"return_token_stats": True, "return_lse": True}
    return {
        "cross_entropy": lambda x: cross_entropy(x, target, **more),
        "none": lambda x: cross_entropy(x, target, reduction="none", **more),
        "probabilities": lambda x: cross_entropy(x, p, **more),
        "linear": lambda x: linear_cross_entropy(x, w, target, chunk_size=3, **more),
        "linear skipped": lambda x: linear_cross_entropy(x, w, target, skip_ignored=True, **more),
        "linear probabilities": lambda x: linear_cross_entropy(x, w, p, **more),
    }[kind]


def on(way, function, monkeypatch, device):
    if device != "cpu" and ("compiled" in way or way == "inductor"):
        pytest.skip("compiled code raises by an assertion on the device, after which its CUDA context is of no use")
    if way.startswith("torch"):
        if device != "cpu":
            pytest.skip("of CPU tensors")
        monkeypatch.setattr(route, "INTERPRET", False)
    if way in ("compiled", "inductor", "torch compiled"):
        torch._dynamo.reset()
        return torch.compile(function, backend="inductor" if way == "inductor" else "aot_eager", fullgraph=True)
    return function


def raises(name, statistic):
    return pytest.raises(RuntimeError, match=re.escape(f"{name}: {statistic} has no gradient"))


@pairwise()
@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("way", ROUTES)
def test_a_backward_pass_through_token_stats_raises_and_names_what_has_a_gradient(way, kind, device, monkeypatch):
    if "compiled" in way:
        kind = kind.removesuffix(" skipped")  # for which a call would have to wait
    function, name = loss(kind, device), "linear_cross_entropy" if kind.startswith("linear") else "cross_entropy"
    (expected,) = torch.autograd.grad(function(x := (peaked(4, 9) / 4).to(device).requires_grad_()).loss.sum(), x)
    function = on(way, function, monkeypatch, device)
    for statistic in ("entropy", "loss"):
        out = function(x)
        stat = getattr(out.token_stats, statistic)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            stat.mean().item(), stat.float(), stat.detach().cpu().numpy(), stat.tolist()
        torch.testing.assert_close(torch.autograd.grad(out.loss.sum(), x, retain_graph=True)[0], expected)
        with raises(name, f"token_stats.{statistic}"):
            torch.autograd.grad(stat.sum(), x, retain_graph=True)
        with raises(name, f"token_stats.{statistic}") as raised:
            torch.autograd.grad(out.loss.sum() - 0.01 * stat.mean(), x)
        assert "loss, lse and z_loss have one" in str(raised.value)
    assert not function(x.detach()).token_stats.entropy.requires_grad
    assert not out.token_stats.predicted.requires_grad


@pytest.mark.parametrize("way", ["compiled", pytest.param("inductor", marks=pytest.mark.exhaustive), "torch compiled"])
def test_a_statistic_that_compiled_code_adds_to_a_loss_raises(way, device, monkeypatch):
    of = loss("cross_entropy", device)
    function = on(
        way, lambda x: (lambda out: out.loss - 0.01 * out.token_stats.entropy.mean())(of(x)), monkeypatch, device
    )
    y = function((peaked(4, 9) / 4).to(device).requires_grad_())
    with raises("cross_entropy", "token_stats.entropy"):
        y.backward()


@pytest.mark.parametrize("kind", ["cross_entropy", "linear"])
def test_transforms_of_torch_func(kind, device):
    of, x = loss(kind, device), (peaked(4, 9) / 4).to(device)
    entropy = lambda x: of(x).token_stats.entropy.sum()  # noqa: E731
    for call in (torch.func.grad(entropy), torch.func.grad(lambda x: torch.vmap(entropy)(x[None]).sum())):
        with raises("linear_cross_entropy" if kind == "linear" else "cross_entropy", "token_stats.entropy"):
            call(x)
    beside = torch.func.grad(lambda x: (lambda out: (out.loss, out.token_stats.entropy))(of(x)), has_aux=True)
    torch.testing.assert_close(beside(x)[1], of(x).token_stats.entropy)
    torch.testing.assert_close(torch.vmap(beside)(x[None])[1][0], of(x).token_stats.entropy)


@pytest.mark.parametrize("kind", ["cross_entropy", "linear", "log_prob", "kept", "attention"])
def test_forward_mode_has_the_derivatives_of_statistics(kind, device):
    """A tangent cannot be refused where it is used, so it is true; a backward pass through it raises all the same."""
    x, tangent = ((peaked(4, 9, torch.float64, seed=seed) / 8).to(device) for seed in (0, 1))
    target, names = torch.tensor([3, 1, 0, 7], device=device), ("log_sum_sq_probs", "mean_logits")
    bits = torch.full((4, 1), 0b111111011, dtype=torch.int32, device=device)
    calls = {
        "log_prob": lambda x: log_prob(x, target, return_stats=names),
        "kept": lambda x: log_prob(x, target, return_stats=names, kept=bits),
        "attention": lambda x: attention(x[None], x[None], x[None], return_stats=("entropy", "column_sums")),
    }

    def of(x):
        if kind == "cross_entropy":
            out = cross_entropy(x, target, return_token_stats=True)
            return out.loss, out.token_stats.loss, out.token_stats.entropy
        if kind == "linear":
            out = linear_cross_entropy(x, tangent, target % 4, return_token_stats=True)
            return out.loss, out.token_stats.loss, out.token_stats.entropy
        out = calls[kind](x)
        return out[0], *(out.stats.values() if kind == "attention" else out.stats[:2])

    _, found = torch.func.jvp(of, (x,), (tangent,))
    step = 1e-6 * tangent
    expected = [(above - below) / 2e-6 for above, below in zip(of(x + step), of(x - step), strict=True)]
    torch.testing.assert_close(list(found), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="has no gradient, and a backward pass came to it"):
        torch.func.grad(lambda x: torch.func.jvp(lambda x: of(x)[2].sum(), (x,), (tangent,))[1])(x)


@pytest.mark.parametrize("statistic", ["log_sum_sq_probs", "mean_logits"])
@pytest.mark.parametrize("way", ROUTES)
def test_a_backward_pass_through_the_statistics_of_rows_raises(way, statistic, device, monkeypatch):
    target, names = torch.tensor([3, -100, 0, 7], device=device), ("is_top1", "log_sum_sq_probs", "mean_logits")
    function = on(way, lambda x: log_prob(x, target, return_stats=names), monkeypatch, device)
    out = function((peaked(4, 9) / 4).to(device).requires_grad_())
    stat = getattr(out.stats, statistic)
    stat.tolist()
    assert not out.stats.is_top1.requires_grad
    with raises("log_prob", f"stats.{statistic}") as raised:
        (out.log_prob.sum() - 0.01 * stat.mean()).backward()
    assert "log_prob, entropy and lse have one" in str(raised.value)


def qkv(device, dtype=torch.float32):
    return [(peaked(20, 8, seed=i) / 4).view(1, 2, 10, 8).to(dtype).to(device).requires_grad_() for i in range(3)]


@pairwise()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["entropy", "row_max", "column_sums"])
@pytest.mark.parametrize("way", ROUTES)
def test_a_backward_pass_through_attentions_statistics_raises(way, name, dtype, device, monkeypatch):
    given = qkv(device, dtype)
    expected = torch.autograd.grad(attention(*given, is_causal=True).sum(), given)
    function = on(way, lambda *given: attention(*given, is_causal=True, return_stats=name), monkeypatch, device)
    out = function(*given)
    out.stats[name].mean().item(), out.stats[name].detach().cpu().numpy()
    torch.testing.assert_close(torch.autograd.grad(out.output.sum(), given, retain_graph=True), expected)
    with raises("attention", f'stats["{name}"]') as raised:
        torch.autograd.grad(out.output.sum() + out.stats[name].sum(), given)
    assert "output and lse have one" in str(raised.value)
    assert not function(*[each.detach() for each in given]).stats[name].requires_grad
