"""The modules: torch.nn's own, but for what computes."""

import copy
import pickle
import warnings

import pytest
import torch
from conftest import peaked
from contract import assert_softmax

import fused_softmax
from fused_softmax import nn
from fused_softmax.ops.losses import reference as losses_reference
from fused_softmax.ops.softmax import reference

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


# Losses.


def classes(n, n_classes, device):
    target = torch.randint(n_classes, (n,), generator=torch.Generator().manual_seed(0))
    target[1] = -100
    return target.to(device)


LOSSES = {
    "plain": {},
    "weights": {"weight": torch.linspace(0.5, 2, 70)},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignored, smoothed": {"ignore_index": 3, "label_smoothing": 0.1},
}


@pytest.mark.parametrize("options", LOSSES)
def test_cross_entropy_loss_is_torchs(options, device):
    options = {name: each.to(device) if name == "weight" else each for name, each in LOSSES[options].items()}
    x, target = peaked(5, 70).to(device).requires_grad_(), classes(5, 70, device)
    if "ignore_index" in options:
        target[target == -100] = options["ignore_index"]
    ours, theirs = (module.CrossEntropyLoss(**options) for module in (nn, torch.nn))
    assert isinstance(ours, torch.nn.CrossEntropyLoss)
    results = [(loss, *torch.autograd.grad(loss.sum(), x)) for loss in (ours(x, target), theirs(x, target))]
    torch.testing.assert_close(*results)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(ours.state_dict())


def test_cross_entropy_loss_says_what_was_asked_for_beyond_torch(device):
    assert repr(nn.CrossEntropyLoss()) == repr(torch.nn.CrossEntropyLoss())
    module = nn.CrossEntropyLoss(softcap=5.0, return_lse=True, dtype=torch.float32)
    assert repr(module) == "CrossEntropyLoss(softcap=5.0, return_lse=True, dtype=torch.float32)"
    x, target = peaked(5, 70, torch.bfloat16).to(device), classes(5, 70, device)
    for other in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        out = other(x, target)
        expected, lse, _ = losses_reference.cross_entropy(x, target, softcap=5.0, dtype=torch.float32)
        assert (out.loss.dtype, out.z_loss) == (torch.float32, None)
        torch.testing.assert_close((out.loss, out.lse), (expected, lse.float()))


def test_a_loss_refuses_what_its_function_has_not():
    for make in (nn.CrossEntropyLoss, lambda **options: nn.LinearCrossEntropyLoss(3, 4, **options)):
        with pytest.raises(TypeError, match="cross_entropy has no argument 'temperature'"):
            make(temperature=2.0)
    with pytest.raises(TypeError, match="cross_entropy has no argument 'chunk_size'"):
        nn.CrossEntropyLoss(chunk_size=4)
    with pytest.raises(TypeError, match="linear_cross_entropy has no argument 'inplace_backward'"):
        nn.LinearCrossEntropyLoss(3, 4, inplace_backward=True)
    with pytest.raises(ValueError, match="reduction"):
        nn.LinearCrossEntropyLoss(3, 4, reduction="avg")(torch.ones(2, 3), torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("options", LOSSES)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_cross_entropy_loss_is_a_layer_and_its_loss(options, bias, device):
    options = {name: each.to(device) if name == "weight" else each for name, each in LOSSES[options].items()}
    torch.manual_seed(0)
    module = nn.LinearCrossEntropyLoss(16, 70, bias=bias, chunk_size=2, **options).to(device)
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 70, bias=bias).to(device)
    assert torch.equal(module.linear_weight, layer.weight)
    x, target = torch.randn(5, 16, device=device), classes(5, 70, device)
    if "ignore_index" in options:
        target[target == -100] = options["ignore_index"]
    loss, expected = module(x, target), torch.nn.CrossEntropyLoss(**options)(layer(x), target)
    gradients = torch.autograd.grad(loss.sum(), list(module.parameters()))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.sum(), list(layer.parameters())))


def test_state_repr_and_copies_of_linear_cross_entropy_loss(device):
    module = nn.LinearCrossEntropyLoss(16, 70, bias=True, weight=torch.rand(70), softcap=4.0, dtype=torch.float32)
    assert set(module.state_dict()) == {"linear_weight", "linear_bias", "weight"}
    assert {name for name, _ in module.named_parameters()} == {"linear_weight", "linear_bias"}
    assert repr(module) == "LinearCrossEntropyLoss(in_features=16, num_classes=70, bias=True, softcap=4.0)"
    assert set(nn.LinearCrossEntropyLoss(16, 70).state_dict()) == {"linear_weight"}
    module.to(device)
    x, target = torch.randn(5, 16, device=device), classes(5, 70, device)
    other = nn.LinearCrossEntropyLoss(16, 70, bias=True, weight=torch.rand(70), softcap=4.0).to(device)
    other.load_state_dict(module.state_dict())
    for each in (other, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(each(x, target), module(x, target))


@pytest.mark.parametrize("bias", [False, True])
def test_linear_log_prob_is_a_layer_and_its_log_probabilities(bias, device):
    torch.manual_seed(0)
    module = nn.LinearLogProb(16, 70, bias=bias, temperature=0.5, return_entropy=True).to(device)
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 70, bias=bias).to(device)
    x, target = torch.randn(5, 16, device=device), torch.arange(5, device=device)
    for given, temperature in ((), 0.5), ((2.0,), 2.0), ((torch.full((5,), 0.7, device=device),), 0.7):
        log_p = torch.log_softmax(layer(x) / temperature, -1)
        found = module(x, target, *given)
        torch.testing.assert_close(found.log_prob, log_p[torch.arange(5), target])
        torch.testing.assert_close(found.entropy, -(log_p.exp() * log_p).sum(-1))
        ours = torch.autograd.grad(found.log_prob.sum(), list(module.parameters()))
        theirs = torch.autograd.grad(log_p[torch.arange(5), target].sum(), list(layer.parameters()))
        torch.testing.assert_close(ours, theirs)
    said = f"in_features=16, num_classes=70, bias={bias}, temperature=0.5, return_entropy=True"
    assert repr(module) == f"LinearLogProb({said})"
    with pytest.raises(TypeError, match="linear_log_prob has no argument 'label_smoothing'"):
        nn.LinearLogProb(3, 4, label_smoothing=0.1)


def test_linear_cross_entropy_loss_in_half_precision(device):
    module = nn.LinearCrossEntropyLoss(16, 70, dtype=torch.bfloat16, device=device)
    assert module.linear_weight.dtype == torch.bfloat16
    loss = module(torch.randn(5, 16, device=device, dtype=torch.bfloat16), classes(5, 70, device))
    loss.backward()
    assert (loss.dtype, module.linear_weight.grad.dtype) == (torch.bfloat16,) * 2


def test_a_layer_whose_weight_is_tied_to_an_embedding(device):
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(70, 16).to(device)
    module = nn.LinearCrossEntropyLoss(16, 70).to(device)
    module.linear_weight = embedding.weight
    tokens = classes(6, 70, device).clamp(min=0)
    both = torch.nn.ModuleDict({"embedding": embedding, "loss": module})
    assert len(list(both.parameters())) == 1
    module(embedding(tokens[:-1]), tokens[1:]).backward()
    gradient, embedding.weight.grad = embedding.weight.grad, None
    hidden = torch.nn.functional.embedding(tokens[:-1], embedding.weight)
    torch.nn.functional.cross_entropy(hidden @ embedding.weight.t(), tokens[1:]).backward()
    torch.testing.assert_close(gradient, embedding.weight.grad)
