"""What is said of a sink alone, one more logit in the sum of every row. test_contract.py has what it shares."""

import math

import pytest
import torch
from conftest import kernels, peaked
from contract import FAMILY, assert_gradients, assert_scores, composed, every_function, keeping_shape, public
from products import pairwise
from scored import kept, on, sinks, weights
from shapes import DTYPES

import fused_softmax
from fused_softmax import nn
from fused_softmax.ops.softmax import gradients
from fused_softmax.ops.softmax import scores as scored_calls

pytestmark = kernels
FP32, FP16, BF16, FP64 = DTYPES


@every_function
@pytest.mark.parametrize("dtype", [FP32, BF16, FP64], ids=str)
def test_a_sink_of_minus_infinity_gives_the_bits_of_no_sink(function, dtype, nvidia, device):
    for shape in ((3, 40), (2, 1300), (2, 3000)):
        x = peaked(*shape, dtype).to(device)
        assert torch.equal(public(function, x, sink=-math.inf), public(function, x))


@every_function
@pytest.mark.parametrize("n_cols", [40, 4000])
def test_the_sink_of_a_row_that_is_masked_whole_is_exact(function, n_cols, nvidia, device):
    wanted = FAMILY[function].nothing(111.3)
    mask = torch.zeros(n_cols, dtype=torch.bool, device=device)
    for masked_rows in ("nan", "zero"):
        y = public(function, peaked(3, n_cols).to(device), mask=mask, sink=111.3, masked_rows=masked_rows)
        assert torch.equal(y, torch.full_like(y, wanted))


@every_function
def test_a_sink_whose_strides_need_a_copy(function, device):
    """Three dims of strides of their own, and a fourth."""
    x = peaked(48, 40).view(2, 2, 3, 4, 40).transpose(0, 2).to(device)
    scored = {"sink": sinks(3, 1, 2, 1, 1).to(device), "mask": kept(2, 1, 4, 40).to(device)}
    for _ in range(2):
        assert_scores(public(function, x, **scored), function, x, **scored)


# Calls that are kept.


@pairwise(strength=1)
@every_function
@pytest.mark.parametrize("scored", [{}, {"scale": 0.5}, {"scale": 0.0}], ids=str)
def test_a_kept_call_takes_the_numbers_and_values_of_each_call(function, scored, device):
    x, more, sink = peaked(3, 40).to(device), peaked(5, 40).to(device), torch.zeros(1, 1, device=device)
    for value in (0.0, 3.0, -2, math.inf):
        sink.fill_(value)
        for given in (value, sink, sink.clone(), sink.expand(3, 1), None, sink.double()):
            asked = scored | {"sink": given}
            assert_scores(public(function, x, **asked), function, x, **asked)
            if given is None or not isinstance(given, torch.Tensor) or given.shape[0] == 1:
                assert_scores(public(function, more, **asked), function, more, **asked)


def test_few_numbers_are_kept_on_the_device(device, monkeypatch):
    monkeypatch.setattr(scored_calls, "_numbers", {})
    x, place = peaked(2, 40).to(device), torch.device(device)
    made = [scored_calls._number(i / 8, FP32, place) for i in range(70)]
    assert [each.item() for each in made] == [i / 8 for i in range(70)]
    assert len(scored_calls._numbers) == 64
    for i in (0, 63, 64):
        assert (scored_calls._number(i / 8, FP32, place) is made[i]) == (i < 64)
        assert_scores(fused_softmax.softmax(x, sink=i / 8), "softmax", x, sink=i / 8)
    assert scored_calls._number(0.125, FP64, place).dtype == FP64


# Gradients.


@keeping_shape
@pytest.mark.parametrize("scale", [0.0, torch.tensor([[0.0], [2.0], [0.0]], dtype=FP64)], ids=["number", "tensor"])
def test_gradients_of_greedy_rows(function, scale, device):
    """The one column that is kept stands against the sink, so both have gradients; the scale 0 has none."""
    x = (peaked(3, 40, FP64) / 4).to(device)
    x[:, 7] = x.max() - 0.5
    scored = on(device, {"sink": x.amax(-1, keepdim=True).cpu() + torch.tensor([[-1.0], [0.5], [1.0]]), "scale": scale})
    dy = weights(3, 40, dtype=FP64).to(device)
    dy = torch.where(public(function, x, **scored).isfinite(), dy, 0.0)
    found = []
    for of in (public, composed):
        leaves = {
            name: value.clone().requires_grad_()
            for name, value in ({"x": x} | scored).items()
            if isinstance(value, torch.Tensor)
        }
        given = scored | {name: leaf for name, leaf in leaves.items() if name != "x"}
        found.append(torch.autograd.grad(of(function, leaves["x"], **given), list(leaves.values()), dy))
    torch.testing.assert_close(*found)
    assert found[0][0].abs().max() > 1e-3


def test_a_row_of_nan_that_no_loss_uses_leaves_the_sink_its_gradient(device):
    x, sink = peaked(2, 40).to(device), torch.tensor([[-math.inf], [1.0]], device=device).requires_grad_()
    x[0] = -math.inf
    y = fused_softmax.softmax(x, sink=sink)
    assert y[0].isnan().all()
    (found,) = torch.autograd.grad(y[1, 3] * 100, sink)
    assert found[0] == 0
    assert found[1].isfinite()


@keeping_shape
def test_lse_is_taken_where_a_sink_has_a_gradient_alone(function, device, monkeypatch):
    taken = []
    prepare = gradients.prepare_call
    monkeypatch.setattr(gradients, "prepare_call", lambda *args: taken.append(args) or prepare(*args))
    x = peaked(3, 40).to(device).requires_grad_()
    for sink in (2.0, sinks(3, 1).to(device), sinks(1).to(device)):
        public(function, x, sink=sink).sum().backward()
    assert not taken
    sink = sinks(3, 1).to(device).requires_grad_()
    y = public(function, x.detach(), sink=sink)
    assert len(taken) == 1
    monkeypatch.setattr("fused_softmax.ops.softmax.gradients.backward", None)  # nobody asks for the input's
    y.sum().backward()
    assert sink.grad.isfinite().all()


def test_kept_calls_with_gradients(device):
    for n in (3, 5, 3):
        for value in (1.0, 8.0):
            x, sink = peaked(n, 40).to(device), torch.full((n, 1), value, device=device)
            assert_gradients("softmax", {"x": x, "sink": sink}, weights(n, 40).to(device))
            assert_gradients("logsumexp", {"x": x, "sink": sink}, weights(n).to(device))


def test_modules_have_a_sink(device):
    x, sink = peaked(3, 40).to(device), sinks(3, 1).to(device)
    for name, function in (("Softmax", "softmax"), ("LogSoftmax", "log_softmax")):
        module = getattr(nn, name)(-1, sink=2.0)
        assert repr(module) == f"{name}(dim=-1, sink=2.0)"
        assert torch.equal(module(x), public(function, x, sink=2.0))
        assert torch.equal(module(x, sink=sink), public(function, x, sink=sink))


def test_a_sink_over_several_dims_is_refused(device):
    x = peaked(3, 40).to(device)
    for one in (x, x[0, 0]):
        assert_scores(fused_softmax.logsumexp(one, (-1,), sink=1.0), "logsumexp", one, sink=1.0)
    with pytest.raises(ValueError, match="single dim"):
        fused_softmax.logsumexp(peaked(3, 40).to(device), (0, 1), sink=1.0)
