"""The losses where training code puts them: autocast, views of flat parameters, frozen and tied tensors."""

import os

import pytest
import torch
import torch.nn.functional as F
from conftest import peaked
from torch.utils.checkpoint import checkpoint

import fused_softmax
from fused_softmax import cross_entropy, divergence, linear_cross_entropy, log_prob
from fused_softmax.ops.losses import linear_cross_entropy as linear_ops

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="without a GPU or the interpreter, CPU tensors take ATen"
)


def tensors(device, n=6, n_features=16, n_classes=40, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x, w, bias = (
        torch.randn(*shape, generator=generator) for shape in ((n, n_features), (n_classes, n_features), (40,))
    )
    target = torch.randint(n_classes, (n,), generator=generator)
    target[1] = -100
    return *(each.to(device, dtype).requires_grad_() for each in (x, w, bias)), target.to(device)


def composed(x, w, bias, target):
    return F.cross_entropy(F.linear(x, w, bias), target)


def fused(x, w, bias, target, **options):
    return linear_cross_entropy(x, w, target, linear_bias=bias, chunk_size=4, **options)


@pytest.mark.parametrize("accumulate", ["fp32", "input"])
def test_a_weight_that_is_a_view_of_a_flat_parameter(accumulate, device):
    """As FSDP lays parameters out: the gradient comes back through the view, in the flat one's shape."""
    x, w, bias, target = tensors(device)
    flat = torch.cat((torch.zeros(5, device=device), w.detach().flatten(), bias.detach())).requires_grad_()
    gradients = []
    for function in (lambda *a: fused(*a, accumulate=accumulate), composed):
        view = flat[5 : 5 + w.numel()].view(w.shape)
        loss = function(x, view, flat[5 + w.numel() :], target)
        gradients.append(torch.autograd.grad(loss, (x, flat)))
    torch.testing.assert_close(*gradients)
    assert gradients[0][1][:5].eq(0).all()


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1)], ids=str)
def test_frozen_tensors_get_no_gradient_and_cost_no_product(frozen, compile, device, monkeypatch):
    torch._dynamo.reset()
    *leaves, target = tensors(device)
    for i in frozen:
        leaves[i].requires_grad_(False)
    made = []
    gradients = linear_ops.Gradients

    class Counted(gradients):
        def __init__(self, x, w, bias, linear, asked, **options):
            made.append(tuple(asked))
            super().__init__(x, w, bias, linear, asked, **options)

    monkeypatch.setattr(linear_ops, "Gradients", Counted)
    function = torch.compile(fused, backend="aot_eager", fullgraph=True) if compile else fused
    wanted = [each for each in leaves if each.requires_grad]
    result = torch.autograd.grad(function(*leaves, target), wanted)
    torch.testing.assert_close(result, torch.autograd.grad(composed(*leaves, target), wanted))
    assert made == [tuple(i not in frozen for i in range(3))]


def test_a_weight_tied_to_what_made_the_tokens(device):
    x, w, bias, target = tensors(device)
    tokens = torch.arange(6, device=device)
    gradients = [torch.autograd.grad(f(F.embedding(tokens, w) + x, w, bias, target), w) for f in (fused, composed)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("function", ["cross_entropy", "linear_cross_entropy"])
def test_gradients_accumulate_over_steps(function, device):
    """Two backward passes into one .grad, each of a part of the mean, and the sum of two losses of one logits."""
    grads = []
    for ours in (True, False):
        x, w, bias, target = tensors(device)
        linear = fused if ours and function == "linear_cross_entropy" else composed
        loss = cross_entropy if ours else F.cross_entropy
        for part in (slice(0, 3), slice(3, 6)):
            if function == "linear_cross_entropy":
                (linear(x[part], w, bias, target[part]) / 2).backward()
            else:
                logits = F.linear(x[part], w, bias)
                (loss(logits, target[part]) / 2 + loss(logits, target[part], reduction="sum")).backward()
        grads.append((x.grad, w.grad, bias.grad))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_computes_twice_and_gives_the_same(use_reentrant, device):
    x, w, bias, target = tensors(device)
    expected = torch.autograd.grad(composed(x, w, bias, target), (x, w, bias))
    for function in (fused, lambda x, w, b, t: cross_entropy(F.linear(x, w, b), t)):
        leaves = [each.detach().clone().requires_grad_() for each in (x, w, bias)]
        checkpoint(function, *leaves, target, use_reentrant=use_reentrant).backward()
        torch.testing.assert_close(tuple(each.grad for each in leaves), expected)


@pytest.mark.parametrize("name", ["loss of each", "log_prob", "divergence"])
def test_a_checkpoint_around_a_loss_alone_unpacks_once_at_a_first_call(name, device):
    """Before any gradient was kept, a backward pass looked for one with tensors that it unpacked, and again without."""
    *_, target = tensors(device)
    leaf, teacher = (peaked(6, 40, seed=seed).to(device) for seed in (0, 1))
    call = {
        "loss of each": lambda z: cross_entropy(z, target, reduction="none"),
        "log_prob": lambda z: log_prob(z, target),
        "divergence": lambda z: divergence(z, teacher, reduction="none"),
    }[name]
    leaf.requires_grad_()
    of_checkpoint = torch.autograd.grad(checkpoint(lambda x: call(x * 2), leaf, use_reentrant=False).sum(), leaf)
    torch.testing.assert_close(of_checkpoint, torch.autograd.grad(call(leaf * 2).sum(), leaf))


def test_a_backward_kept_twice_is_the_same_twice(device):
    x, w, bias, target = tensors(device)
    for loss in (fused(x, w, bias, target), cross_entropy(F.linear(x, w, bias), target)):
        first = torch.autograd.grad(loss, (x, w, bias), retain_graph=True)
        kept = [each.clone() for each in first]
        for each in first:
            each.zero_()  # whoever has them may change them
        torch.testing.assert_close(torch.autograd.grad(loss, (x, w, bias)), tuple(kept))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_batched_gradients(reduction, device):
    """torch.autograd.grad(is_grads_batched=True), by which torch.autograd.functional vectorizes."""
    x, w, bias, target = tensors(device)
    logits = F.linear(x, w, bias).detach().requires_grad_()
    found = []
    for linear, loss in ((linear_cross_entropy, cross_entropy), (None, F.cross_entropy)):
        if linear is None:
            y = loss(F.linear(x, w), target, reduction=reduction)
        else:
            y = linear(x, w, target, reduction=reduction, chunk_size=4)
        dy = torch.arange(1.0, 1 + 3 * y.numel(), device=device).view(3, *y.shape)
        of_layer = torch.autograd.grad(y, (x, w), dy, is_grads_batched=True)
        y = loss(logits, target, reduction=reduction)
        found.append((*of_layer, *torch.autograd.grad(y, logits, dy, is_grads_batched=True)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("transform", ["grad", "vmap", "grad of vmap", "vmap of grad", "jacrev", "jvp"])
@pytest.mark.parametrize("function", ["cross_entropy", "linear_cross_entropy"])
def test_transforms_of_torch_func(transform, function, device):
    target = torch.tensor([3, -100, 7], device=device)
    w = torch.randn(9, 5, generator=torch.Generator().manual_seed(1)).to(device)
    if function == "cross_entropy":
        ours, theirs = (lambda x, f=f: f(x, target) for f in (cross_entropy, F.cross_entropy))
    else:
        ours = lambda x: linear_cross_entropy(x, w, target)  # noqa: E731
        theirs = lambda x: F.cross_entropy(x @ w.t(), target)  # noqa: E731
    x = torch.randn(2, 3, 9 if function == "cross_entropy" else 5, generator=torch.Generator().manual_seed(0)).to(
        device
    )
    call = {
        "grad": lambda f: torch.func.grad(f)(x[0]),
        "vmap": lambda f: torch.vmap(f)(x),
        "grad of vmap": lambda f: torch.func.grad(lambda x: torch.vmap(f)(x).sum())(x),
        "vmap of grad": lambda f: torch.vmap(torch.func.grad(f))(x),
        "jacrev": lambda f: torch.func.jacrev(f)(x[0]),
        "jvp": lambda f: torch.func.jvp(f, (x[0],), (x[1],)),
    }[transform]
    torch.testing.assert_close(call(ours), call(theirs))


@pytest.mark.skipif(not INTERPRETED, reason="of CPU tensors")
def test_under_autocast_the_loss_is_fp32_and_the_layer_bf16(monkeypatch):
    seen = []
    product = torch.addmm

    def watched(bias, x, w, **given):
        seen.append((x.dtype, w.dtype, bias.dtype))
        return product(bias, x, w, **given)

    monkeypatch.setattr(torch, "addmm", watched)
    x, w, bias, target = tensors("cpu")
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, w, target, linear_bias=bias)
        gradients = torch.autograd.grad(loss, (x, w, bias))
        assert seen == [(torch.bfloat16,) * 3]
        assert loss.dtype == torch.float32
        assert [each.dtype for each in gradients] == [torch.float32] * 3
        logits = F.linear(*(each.bfloat16() for each in (x, w, bias)))
        torch.testing.assert_close(loss, F.cross_entropy(logits.float(), target), rtol=1e-5, atol=1e-5)
        lse = linear_cross_entropy(x, w, target, linear_bias=bias, return_lse=True).lse
        assert lse.dtype == torch.float32
        half = logits.detach().requires_grad_()
        of_logits = cross_entropy(half, target)
        assert of_logits.dtype == torch.float32
        assert torch.autograd.grad(of_logits, half)[0].dtype == torch.bfloat16
        assert cross_entropy(half, target, dtype=torch.bfloat16).dtype == torch.bfloat16
        given = cross_entropy(half, target, lse=lse)
        torch.testing.assert_close(given, loss)
        assert torch.autograd.grad(given, half)[0].dtype == torch.bfloat16
        assert cross_entropy(half.double(), target).dtype == torch.float64


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compile", [False, True])
def test_autocast_on_a_gpu_is_torchs(dtype, compile):
    torch._dynamo.reset()
    x, w, bias, target = tensors("cuda")

    def results(function):
        with torch.autocast("cuda", dtype=dtype):
            loss = function(x, w, bias, target)
        return loss.detach(), *torch.autograd.grad(loss, (x, w, bias))

    expected = results(composed)
    for function in (fused, lambda x, w, b, t: cross_entropy(F.linear(x, w, b), t)):
        found = results(torch.compile(function, fullgraph=True) if compile else function)
        assert [each.dtype for each in found] == [each.dtype for each in expected]
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-3)


def test_inference_mode(device):
    x, w, bias, target = tensors(device)
    with torch.inference_mode():
        logits = F.linear(x, w, bias)
        torch.testing.assert_close(cross_entropy(logits, target), F.cross_entropy(logits, target))
        torch.testing.assert_close(fused(x, w, bias, target), composed(x, w, bias, target))
        torch.testing.assert_close(
            cross_entropy(peaked(3, 9).to(device), target[:3] % 9), fused_softmax.nn.CrossEntropyLoss()(
                peaked(3, 9).to(device), target[:3] % 9
            )
        )  # fmt: skip
