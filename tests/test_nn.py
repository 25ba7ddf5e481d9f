"""The modules: torch.nn's own, but for what computes."""

import copy
import pickle
import warnings

import pytest
import torch
from conftest import peaked
from contract import assert_softmax

import fused_softmax
from fused_softmax import nn, reference

every_module = pytest.mark.parametrize("name", ["Softmax", "LogSoftmax"])
FUNCTIONS = {"Softmax": "softmax", "LogSoftmax": "log_softmax"}


@every_module
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_module_is_its_function(name, dim, device):
    x = peaked(3, 70).to(device)
    module = getattr(nn, name)(dim)
    assert torch.equal(module(x), getattr(fused_softmax, FUNCTIONS[name])(x, dim))
    torch.testing.assert_close(module(x), getattr(torch.nn, name)(dim)(x))


def test_softmax_is_held_to_torch(device):
    x = peaked(3, 70, torch.bfloat16).to(device)
    assert_softmax(nn.Softmax(dim=-1)(x), x)


@every_module
def test_repr_and_type_are_torchs(name):
    ours, theirs = getattr(nn, name), getattr(torch.nn, name)
    for arguments in ((), (None,), (1,), (-1,)):
        assert repr(ours(*arguments)) == repr(theirs(*arguments))
    assert isinstance(ours(dim=1), theirs)
    assert repr(ours(-1, scale=0.5, is_causal=True, masked_rows="zero")) == (
        f"{name}(dim=-1, scale=0.5, is_causal=True, masked_rows='zero')"
    )
    with pytest.raises(TypeError):
        ours(-1, 0.5)


@every_module
@pytest.mark.parametrize("shape", [(), (5,), (3, 5), (2, 3, 5), (2, 3, 4, 5)], ids=str)
def test_without_dim_it_warns_and_chooses_as_torch_does(name, shape, device):
    x = peaked(1, torch.Size(shape).numel()).view(shape).to(device)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        y = getattr(nn, name)()(x)
    assert [(str(warning.message), warning.filename) for warning in seen] == [
        (
            f"Implicit dimension choice for {FUNCTIONS[name]} has been deprecated. "
            "Change the call to include dim=X as an argument.",
            __file__,
        )
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(y, getattr(torch.nn, name)()(x))


@every_module
def test_scale_causal_and_mask(name, device):
    x = peaked(4, 4).view(1, 4, 4).to(device)
    mask = torch.tensor([True, True, False, True], device=device)
    module = getattr(nn, name)(-1, scale=0.5, is_causal=True, masked_rows="zero")
    expected = getattr(reference, FUNCTIONS[name])(
        x, -1, scale=0.5, mask=mask, is_causal=True, masked_rows="zero", arithmetic=torch.float32
    )
    torch.testing.assert_close(module(x, mask=mask), expected)
    torch.testing.assert_close(
        getattr(nn, name)(-1)(x, mask=mask), getattr(reference, FUNCTIONS[name])(x, -1, mask=mask)
    )


@every_module
def test_gradients_state_and_copies(name, device):
    module = torch.nn.Sequential(torch.nn.Linear(5, 7), getattr(nn, name)(-1, scale=2.0)).to(device)
    assert set(module.state_dict()) == {"0.weight", "0.bias"}
    x = torch.randn(3, 5, device=device)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert repr(other) == repr(module)
        assert torch.equal(other(x), module(x))
    module(x).square().sum().backward()
    expected = copy.deepcopy(module)
    expected.zero_grad()
    getattr(torch, FUNCTIONS[name])(expected[0](x) * 2.0, -1).square().sum().backward()
    torch.testing.assert_close(module[0].weight.grad, expected[0].weight.grad)


@every_module
def test_errors_are_the_functions(name, device):
    with pytest.raises(IndexError, match=f"{FUNCTIONS[name]}: dim 2 is out of range"):
        getattr(nn, name)(2)(torch.ones(3, 4, device=device))
