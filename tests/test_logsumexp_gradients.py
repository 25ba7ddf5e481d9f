"""The gradients of logsumexp of 16 bits: the lse in them is not rounded, whoever computes."""

import pytest
import torch
from contract import public
from torch.autograd import grad

import fused_softmax
from fused_softmax.core import calls
from fused_softmax.ops.softmax import reference
from fused_softmax.ops.softmax.scores import scores_of

FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64

# What is asked beside the input, of rows whose lse is `top` and more: bf16 is 0.25 apart at 50, fp16 16 at 3e4.
KINDS = {
    "plain": lambda top: {},
    "a number": lambda top: {"scale": 1.03},
    "negative": lambda top: {"scale": -1.03},
    "a scale": lambda top: {"scale": torch.tensor([[1.03], [0.777], [1.5], [0.5]], requires_grad=True)},
    "a scale of 0": lambda top: {"scale": torch.tensor([[1.03], [0.0], [1.5], [0.5]], requires_grad=True)},
    "a bool mask": lambda top: {"mask": torch.arange(40) % 3 != 0},
    "an added mask": lambda top: {"mask": torch.linspace(-1, 1, 40).requires_grad_()},
    "a sink": lambda top: {"sink": torch.full((4, 1), float(top), requires_grad=True)},
    "a number as sink": lambda top: {"sink": float(top)},
    "causal": lambda top: {"is_causal": True},
    "zero": lambda top: {"mask": torch.arange(4)[:, None].ne(2).expand(4, 40), "masked_rows": "zero"},
    "all": lambda top: {
        "scale": torch.full((4, 1), 1.03, requires_grad=True), "mask": torch.linspace(-1, 1, 40).requires_grad_(),
        "sink": torch.full((), float(top), requires_grad=True),
    },
}  # fmt: skip


def given_of(kind, top, dtype, device):
    x = (top + torch.randn(4, 40, generator=torch.Generator().manual_seed(3))).to(device, dtype).requires_grad_()
    options = {}
    for name, each in KINDS[kind](top).items():
        wants = isinstance(each, torch.Tensor) and each.requires_grad
        options[name] = each.detach().to(device).requires_grad_(wants) if isinstance(each, torch.Tensor) else each
    return x, options


def leaves_of(x, options):
    return [x, *(each for each in options.values() if isinstance(each, torch.Tensor) and each.requires_grad)]


def truth_of(x, options, dlse):
    """The gradients in fp64 of the same values."""
    wide = x.detach().double().requires_grad_()
    of_wide = {
        name: each.detach().double().requires_grad_()
        if isinstance(each, torch.Tensor) and each.requires_grad else each
        for name, each in options.items()
    }  # fmt: skip
    y = reference.logsumexp(wide, -1, **of_wide)
    return grad(y, leaves_of(wide, of_wide), dlse.double())


def assert_gradients(found, truth, dtype):
    """Each is off by one rounding of its dtype, and by what fp32's scores and lse of up to 6e4 leave in exp."""
    for ours, right in zip(found, truth, strict=True):
        worst = torch.finfo(ours.dtype).eps + (2e-2 if dtype == FP16 else 3e-5)
        bad = (ours.double() - right).abs() > worst * right.abs().max() + torch.finfo(ours.dtype).tiny
        assert not bad.any(), f"{ours.double()[bad][:3].tolist()}, right {right[bad][:3].tolist()}"


def operator_of(x, options):
    """The registered operator, as an exported program of an earlier release has it: of the input's dtype."""
    plain = {"scale": None, "mask": None, "is_causal": False, "masked_rows": "nan", "sink": None}
    scores = scores_of("logsumexp", x, -1, *(plain | options).values())
    return torch.ops.fused_softmax.logsumexp.default(x, [-1], False, *scores.operator_arguments())


WAYS = {
    "eager": lambda x, options: public("logsumexp", x, -1, **options),
    "operator": operator_of,
    "compiled": lambda x, options: torch.compile(
        lambda x: fused_softmax.logsumexp(x, -1, **options), backend="aot_eager", fullgraph=True
    )(x),
    "differentiable": lambda x, options: fused_softmax.logsumexp(x, -1, **options),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "top"), [(BF16, 50), (FP16, 30000), (BF16, -300)], ids=str)
def test_gradients_take_an_lse_of_32_bits(way, kind, dtype, top, device):
    if way == "compiled" and (dtype == FP16 or kind in ("negative", "zero", "a number as sink")):
        pytest.skip("others show it, and a compiler takes long")
    torch._dynamo.reset()
    x, options = given_of(kind, top, dtype, device)
    dlse = torch.tensor([1.0, -0.5, 2.0, 0.25], device=device)
    for _ in range(2):  # a call that is kept too
        lse = WAYS[way](x, options)
        assert lse.dtype == dtype
        found = grad(lse, leaves_of(x, options), dlse.to(dtype), create_graph=way == "differentiable")
        assert_gradients(found, truth_of(x, options, dlse), dtype)


@pytest.mark.parametrize("dims", [0, 1, (0, 1), (1, 2), (0, 2)])
def test_gradients_along_any_dims(dims, device):
    x = (50 + torch.randn(3, 4, 8)).to(device, BF16).requires_grad_()
    wide = x.detach().double().requires_grad_()
    dlse = (torch.logsumexp(wide, dims).detach() / 50).to(BF16).double()
    (right,) = grad(torch.logsumexp(wide, dims), wide, dlse)
    for keepdim in (False, True):
        lse = public("logsumexp", x, dims, keepdim=keepdim)
        assert_gradients(grad(lse, x, dlse.view(lse.shape).to(BF16)), [right], BF16)


def test_the_result_is_that_of_a_call_without_gradient(device):
    for dtype in (BF16, FP16):
        x = (50 + torch.randn(4, 40)).to(device, dtype)
        for options in ({}, {"scale": 1.03}, {"sink": 50.0}, {"mask": x > 50}):
            calls.forget()
            bare = public("logsumexp", x, -1, **options)
            with_gradient = public("logsumexp", x.clone().requires_grad_(), -1, **options)
            assert torch.equal(bare, with_gradient.detach())


def test_a_result_of_infinity_has_a_finite_gradient(device):
    """65504 is fp16's greatest number, and the lse of two of them is more."""
    x = torch.tensor([[65504.0, 65504.0, 1.0]], dtype=FP16, device=device, requires_grad=True)
    lse = fused_softmax.logsumexp(x, -1, scale=1.5)
    lse.backward(torch.ones_like(lse))
    assert lse.isinf().all()
    torch.testing.assert_close(x.grad, torch.tensor([[0.75, 0.75, 0.0]], dtype=FP16, device=device), rtol=4e-3, atol=0)


def test_second_derivatives_go_through_the_lse_that_was_not_rounded(device):
    x = (50 + torch.randn(3, 20)).to(device, BF16).requires_grad_()
    wide = x.detach().double().requires_grad_()
    v = torch.randn(3, 20, device=device)
    seconds = []
    for leaf, function in ((x, fused_softmax.logsumexp), (wide, torch.logsumexp)):
        (first,) = grad(function(leaf, -1).sum(), leaf, create_graph=True)
        seconds += grad((first * v.to(leaf.dtype)).sum(), leaf)
    torch.testing.assert_close(seconds[0].double(), seconds[1], rtol=3e-2, atol=3e-3)


def test_transforms_and_batched_gradients(device):
    x = (50 + torch.randn(5, 20)).to(device, BF16)
    p = torch.softmax(x.double(), -1)
    near = {"rtol": 1e-2, "atol": 1e-4, "check_dtype": False}
    torch.testing.assert_close(torch.func.grad(lambda x: fused_softmax.logsumexp(x, -1).sum())(x), p, **near)
    of_row = torch.func.vmap(torch.func.grad(lambda row: fused_softmax.logsumexp(row, -1)))
    torch.testing.assert_close(of_row(x), p, **near)
    leaf = x.clone().requires_grad_()
    torch.func.vmap(lambda row: fused_softmax.logsumexp(row, -1))(leaf).sum().backward()
    torch.testing.assert_close(leaf.grad, p, **near)
    leaf = x.clone().requires_grad_()
    lse = fused_softmax.logsumexp(leaf, -1)
    (rows,) = grad(lse, leaf, torch.eye(5, dtype=BF16, device=device), is_grads_batched=True)
    torch.testing.assert_close(rows.sum(0), p, **near)
