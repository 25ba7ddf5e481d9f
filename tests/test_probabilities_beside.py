"""Losses by probabilities with lse and z-loss beside them, and the gradients that come back to all three."""

import contextlib
import math
import os

import pytest
import torch
from conftest import peaked
from products import pairwise
from torch.utils.flop_counter import FlopCounterMode

from fused_softmax import cross_entropy, explain, linear_cross_entropy
from fused_softmax.ops.losses import reference

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="without a GPU or the interpreter, CPU tensors take ATen"
)
FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
N, FEATURES, CLASSES = 7, 6, 44
OPTIONS = {
    "plain": {}, "softcap": {"softcap": 5.0, "scale": -0.7},
    "weights": {"weight": torch.linspace(0.1, 1.0, CLASSES), "label_smoothing": 0.2},
}  # fmt: skip
# Incoming gradients of rows: of the loss, of lse, of the z-loss. In some rows one of them comes alone.
GRADIENTS = {
    "all": torch.tensor([[1.0, 0, 2, -1, 0, 1e-30, 3], [0.5, 2, 0, 1, 0, 1, -1e20], [1, 0, -1, 0, 0, 2, 1.0]]),
    "lse": torch.tensor([[0.0] * N, [0.5, 2, 0, 1, -3, 1, 1], [0.0] * N]),
    "loss": torch.tensor([[1.0, 0, 2, -1, 0, 1, 3], [0.0] * N, [0.0] * N]),
}


def tensors(device, dtypes, linear):
    q = torch.softmax(peaked(N, CLASSES, seed=3), -1)
    q[:, 3] = 0.0
    if linear:
        x = [peaked(N, FEATURES) / 4, peaked(CLASSES, FEATURES, seed=1) / 4, torch.linspace(-1.0, 1.0, CLASSES)]
    else:
        x = [peaked(N, CLASSES)]
    return [each.to(device, dtypes[0]) for each in x], q.to(device, dtypes[1])


def call_of(linear, z, options, reduction="none", chunk_size=3):
    """What gives (loss, lse, z-loss) of the tensors of `tensors`, in their order."""
    more = options | {"lse_square_scale": z, "reduction": reduction, "return_lse": True, "return_z_loss": True}
    if not linear:
        return lambda x, q: cross_entropy(x, q, **more)[:3]
    return lambda x, w, b, q: linear_cross_entropy(x, w, q, linear_bias=b, chunk_size=chunk_size, **more)[:3]


@pairwise()
@pytest.mark.parametrize("incoming", GRADIENTS)
@pytest.mark.parametrize("z", [0.0, 1e-2])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, FP32), (BF16, BF16)], ids=str)
@pytest.mark.parametrize("linear", [False, True], ids=["logits", "layer"])
@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_rows_and_their_gradients_are_those_of_float64(incoming, z, options, dtypes, linear, way, device):
    x, q = tensors(device, dtypes, linear)
    options = {name: each.to(device) if name == "weight" else each for name, each in OPTIONS[options].items()}
    leaves = [each.requires_grad_() for each in (*x, q)]
    exact = [each.detach().double().requires_grad_() for each in leaves]
    logits = exact[0] if not linear else torch.nn.functional.linear(*exact[:3])
    wanted = reference.cross_entropy(
        logits, exact[-1], reduction="none", lse_square_scale=z, dtype=FP64,
        **{name: each.double() if name == "weight" else each for name, each in options.items()},
    )  # fmt: skip
    call = call_of(linear, z, options)
    if way == "compiled":
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    with explain() as explained:
        found = call(*leaves)
    if way == "eager":
        assert explained[0].route == "kernel"
    of_bf16 = 2**-4 if linear else 2**-6  # exponentials of rounded logits are further off
    rough = {"rtol": of_bf16, "atol": of_bf16} if BF16 in dtypes else {"rtol": 1e-5, "atol": 1e-5}
    for ours, truth in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), truth, **rough)
    given = [each.to(device) for each in GRADIENTS[incoming]]
    given[2] = given[2] if z else torch.zeros_like(given[2])
    truths = torch.autograd.grad(
        wanted, exact, [each.double() for each in given], allow_unused=True, materialize_grads=True
    )
    pairs = [(y, g) for y, g in zip(found, given, strict=True) if y.requires_grad and (g != 0).any()]
    gradients = torch.autograd.grad(
        [y for y, _ in pairs], leaves, [g.to(y.dtype) for y, g in pairs], materialize_grads=True
    )
    for ours, truth in zip(gradients, truths, strict=True):
        size = truth.abs().amax(-1, keepdim=True).clamp(min=1.0) if truth.ndim > 1 else truth.abs().amax().clamp(min=1)
        torch.testing.assert_close(ours.double() / size, truth / size, **rough)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("linear", [False, True], ids=["logits", "layer"])
def test_a_z_loss_is_reduced_with_the_loss(reduction, linear, device):
    x, q = tensors(device, (FP32, FP32), linear)
    leaves = [each.requires_grad_() for each in (*x, q)]
    of_rows = call_of(linear, 1e-2, {})(*leaves)
    found = call_of(linear, 1e-2, {}, reduction)(*leaves)
    wanted = [getattr(of_rows[0], reduction)(), of_rows[1], getattr(of_rows[2], reduction)()]
    torch.testing.assert_close(list(found), wanted)
    torch.testing.assert_close(torch.autograd.grad(found[0], leaves), torch.autograd.grad(wanted[0], leaves))


@pytest.mark.parametrize("linear", [False, True], ids=["logits", "layer"])
def test_a_second_derivative_is_that_of_torchs_operations(linear, device):
    x, q = tensors(device, (FP32, FP32), linear)
    x[0] = x[0].clamp(min=-3.0)
    leaves = [each.requires_grad_() for each in (*x, q)]
    found = []
    for twice in (False, True):
        given = [each.detach().double().requires_grad_() for each in leaves] if twice else leaves
        loss, lse, _ = call_of(linear, 1e-2, {}, chunk_size=None if twice else 3)(*given)  # float64 takes no chunks
        first = torch.autograd.grad(loss.sum() + lse.square().sum(), given, create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(each.square().sum() for each in first), given)])
    for ours, truth in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("watched", [False, True], ids=["eager", "an operator"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_gradient_of_lse_alone_sees_no_infinite_loss(create_graph, watched, device):
    x, q = torch.tensor([[-math.inf, 1.0, 2.0], [0.5, 1.0, 2.0]]), torch.full((2, 3), 1 / 3)
    leaves = [each.to(device).requires_grad_() for each in (x, q)]
    with FlopCounterMode(display=False) if watched else contextlib.nullcontext():
        found = cross_entropy(*leaves, reduction="none", return_lse=True)
        dx, dq = torch.autograd.grad(found.lse.sum(), leaves, create_graph=create_graph, materialize_grads=True)
    torch.testing.assert_close(dx, leaves[0].softmax(1))
    assert not dq.any()


def test_exported_they_are_one_operator(device):
    class Module(torch.nn.Module):
        def forward(self, x, q):
            return cross_entropy(x, q, reduction="none", lse_square_scale=1e-2, return_lse=True)[:2]

    (x,), q = tensors(device, (FP32, FP32), False)
    exported = torch.export.export(Module(), (x, q), strict=True).module()
    torch.testing.assert_close(exported(x, q), Module()(x, q))
    assert "fused_softmax.divergence.default" in {str(node.target) for node in exported.graph.nodes}
