"""torch's neg bit, a negation that is not yet done: gradients that come back with it, inputs and saved tensors with it.

The backward passes of conj and torch.complex make such gradients, so those of complex objectives have them. A kernel
reads memory and sees no bit.
"""

import pytest
import torch
import torch.nn.functional as F
from conftest import kernels, peaked

import fused_softmax
from fused_softmax import (
    attention,
    cross_entropy,
    divergence,
    linear_cross_entropy,
    linear_divergence,
    log_prob,
    log_softmax,
    logsumexp,
    softmax,
)

pytestmark = kernels
T = torch.tensor([3, -100, 0, 7])
LAYER = peaked(9, 9, seed=1) / 4
WEIGHT = torch.linspace(0.5, 1.5, 9)


def of(x, function, **options):
    """A function of x and the tensors above, on x's device."""
    return function(x, T.to(x.device), **options)


def linear(x, target, **options):
    return linear_cross_entropy(x, LAYER.to(x), target, **options)


def overwriting(x, target):
    return cross_entropy(x * 1, target, inplace_backward=True)


CALLS = {
    "softmax": softmax, "softmax over dim 0": lambda x: softmax(x, 0), "log_softmax": log_softmax,
    "softmax, scaled": lambda x: softmax(x, scale=0.5), "softmax, mask": lambda x: softmax(x, mask=(x > 0).detach()),
    "softmax, a sink with a gradient": lambda x: softmax(x, sink=x[:, :1]),
    "logsumexp": lambda x: logsumexp(x, -1), "logsumexp, scaled": lambda x: logsumexp(x, -1, scale=0.5),
    "cross_entropy": lambda x: of(x, cross_entropy), "sum": lambda x: of(x, cross_entropy, reduction="sum"),
    "none": lambda x: of(x, cross_entropy, reduction="none"), "over the logits": lambda x: of(x, overwriting),
    "beside statistics": lambda x: of(x, cross_entropy, return_token_stats=True).loss,
    "lse": lambda x: of(x, cross_entropy, return_lse=True).lse,
    "z-loss": lambda x: of(x, cross_entropy, return_z_loss=True, lse_square_scale=0.1).z_loss,
    "given lse": lambda x: of(x, cross_entropy, lse=torch.ones(4, device=x.device)),
    "linear": lambda x: of(x, linear), "linear, none": lambda x: of(x, linear, reduction="none"),
    "linear, lse": lambda x: of(x, linear, return_lse=True).lse,
    "linear, statistics": lambda x: of(x, linear, return_token_stats=True).loss,
    "log_prob": lambda x: of(x, log_prob), "entropy": lambda x: of(x, log_prob, return_entropy=True).entropy,
    "divergence": lambda x: divergence(x, LAYER.to(x)[:4], reduction="none"),
    "probabilities": lambda x: cross_entropy(x, LAYER.to(x)[:4].softmax(-1)),
    "attention": lambda x: attention(x[None], x[None], x[None]),
    "attention's lse": lambda x: attention(x[None], x[None], x[None], return_lse=True).lse,
    "torch's cross_entropy": lambda x: of(x, F.cross_entropy),
    "torch's cross_entropy, none": lambda x: of(x, F.cross_entropy, reduction="none"),
    "torch's softmax": lambda x: torch.softmax(x, -1), "torch's logsumexp": lambda x: torch.logsumexp(x, -1),
}  # fmt: skip


def objective(y):
    """2 y, whose gradient comes back with the neg bit."""
    z = torch.complex(torch.zeros_like(y), y)
    return (z.conj() * torch.complex(torch.zeros_like(y), torch.full_like(y, 2.0))).real


def negated(x):
    """x as a view of its negative with the bit."""
    return torch._neg_view(-x)


def test_the_objective_gives_back_the_bit():
    seen = []
    y = torch.ones(3).requires_grad_() * 1
    y.register_hook(lambda gradient: seen.append(gradient.is_neg()))
    objective(y).sum().backward()
    assert seen == [True]


def gradient(function, x, of_y, repeated=False, create_graph=False):
    leaf = x.detach().clone().requires_grad_()
    found = []
    for _ in range(1 + repeated):  # the second call is a kept one
        y = function(leaf)
        found.append(torch.autograd.grad(of_y(y).sum(), leaf, create_graph=create_graph)[0])
    return found[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_gradient_with_the_bit(name, dtype, device):
    x = (peaked(4, 9) / 4).to(dtype).to(device)
    with fused_softmax.enabled():
        wanted = gradient(CALLS[name], x, lambda y: 2.0 * y.float() if dtype == torch.float16 else 2.0 * y)
        as_wide = (lambda y: objective(y.float())) if dtype == torch.float16 else objective
        for repeated in (False, True):
            torch.testing.assert_close(gradient(CALLS[name], x, as_wide, repeated), wanted)
        if name != "over the logits":
            torch.testing.assert_close(
                gradient(CALLS[name], x, as_wide, create_graph=True), wanted, rtol=2e-3, atol=1e-3
            )


@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_both_kinds_in_turn(name, device):
    """A kept gradient of one kind is not the other's."""
    x = (peaked(4, 9) / 4).to(device)
    with fused_softmax.enabled():
        for _ in range(2):
            plain, marked = (gradient(CALLS[name], x, of_y) for of_y in (lambda y: -y, lambda y: y * 1))
            torch.testing.assert_close(plain, -marked)
            leaf = x.clone().requires_grad_()
            y = CALLS[name](leaf)
            (found,) = torch.autograd.grad(y, leaf, negated(-torch.ones_like(y)))
            torch.testing.assert_close(found, plain)


@pytest.mark.parametrize("name", CALLS)
def test_an_input_with_the_bit(name, device):
    x = (peaked(4, 9) / 4).to(device)
    with fused_softmax.enabled():
        torch.testing.assert_close(CALLS[name](negated(x).requires_grad_()), CALLS[name](x.clone().requires_grad_()))
        wanted = gradient(CALLS[name], x, lambda y: y)
        torch.testing.assert_close(gradient(lambda leaf: CALLS[name](torch._neg_view(leaf)), -x, lambda y: y), -wanted)


@pytest.mark.parametrize(
    "name",
    [
        "cross_entropy",
        "none",
        "lse",
        "z-loss",
        "given lse",
        "linear",
        "linear, none",
        "entropy",
        "divergence",
        "probabilities",
    ],
)
def test_saved_tensors_with_the_bit(name, device):
    """Hooks of saved tensors may give back what they like, as long as it is equal."""
    x = (peaked(4, 9) / 4).to(device)
    wanted = gradient(CALLS[name], x, lambda y: y)
    unpack = lambda t: negated(t) if t.is_floating_point() else t  # noqa: E731
    leaf = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        y = CALLS[name](leaf)
    torch.autograd.grad(y.sum(), leaf, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), leaf)[0], wanted)


@pytest.mark.parametrize("function", [cross_entropy, linear], ids=["cross_entropy", "linear"])
def test_class_weights_with_the_bit(function, device):
    x, weight = (peaked(4, 9) / 4).to(device), WEIGHT.to(device)
    wanted = function(x, T.to(device), weight=weight)
    torch.testing.assert_close(function(x, T.to(device), weight=negated(weight)), wanted)


@pytest.mark.parametrize("name", ["divergence", "linear_divergence"])
def test_weights_of_rows_with_the_bit(name, device):
    """A single weight is contiguous with the bit, so that no copy does away with it."""

    def found(n, weight, reduction):
        # Of as many columns that a divergence's gradient is written with it.
        x, teacher, layer = ((peaked(rows, 8, seed=i) / 4).to(device) for i, rows in enumerate((n, n, 8)))
        x.requires_grad_()
        given = {"weight": weight, "reduction": reduction}
        if name == "divergence":
            y = divergence(x, teacher, **given)
        else:
            y = linear_divergence(x, layer, teacher, layer.t(), **given)
        return y, *torch.autograd.grad(y.sum(), x)

    for n in (1, 4):
        weight = WEIGHT[:n].to(device)
        for reduction in ("mean", "sum", "none"):
            torch.testing.assert_close(found(n, negated(weight), reduction), found(n, weight, reduction))


def test_temperatures_with_the_bit(device):
    x, temperature = (peaked(4, 9) / 4).to(device), WEIGHT[:4].to(device)
    wanted = log_prob(x, T.to(device), temperature=temperature)
    torch.testing.assert_close(log_prob(x, T.to(device), temperature=negated(temperature)), wanted)
