"""The losses under torch.compile, export, fake tensors and modes: one operator, torch's results, kernels that ran."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import peaked
from products import QUICK, pairwise
from test_cross_entropy import OPTIONS, held, named, targets, torchs, truth_of
from test_library import compiled
from test_library import targets as nodes
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fused_softmax import cross_entropy, linear_cross_entropy
from fused_softmax.ops.losses import launches as cross_entropy_calls
from fused_softmax.ops.losses import operators as rules
from fused_softmax.ops.losses import reference
from fused_softmax.ops.losses import steps as cross_entropy_steps

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="without a GPU or the interpreter, CPU tensors take ATen"
)
operators = torch.ops.fused_softmax
FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
every_reduction = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests():
    torch._dynamo.reset()


@pytest.fixture
def ran(monkeypatch):
    """The host functions that launch kernels, in the order of their calls."""
    calls = []

    def count(module, function, name):
        plain = getattr(module, function)

        def counted(*args, **kwargs):
            calls.append(name)
            return plain(*args, **kwargs)

        monkeypatch.setattr(module, function, counted)

    count(cross_entropy_calls, "forward", "forward")
    count(cross_entropy_calls, "backward", "backward")
    count(cross_entropy_steps, "forward", "forward")  # imported there by name
    return calls


def ours(graph):
    return [node.split(".")[1] for node in nodes(graph) if node.startswith("fused_softmax.")]


def with_joint_graphs(function, **options):
    """`function` compiled whole, and the graphs of its forward and backward passes."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_compiler

    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return make_boxed_compiler(lambda g, _: g.forward)(graph, inputs)

    return torch.compile(function, backend=aot_autograd(fw_compiler=keep), fullgraph=True, **options), graphs


# cross_entropy


@pairwise(strength=1)
@every_reduction
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_compiled_one_operator_forward_and_one_backward(reduction, options, dtype, device, ran):
    x = peaked(5, 70, dtype).to(device).requires_grad_()
    target, options = targets(5, 70, device=device), named(OPTIONS[options], 70, device=device)
    function, graphs = with_joint_graphs(lambda x: cross_entropy(x, target, reduction=reduction, **options))
    loss = function(x)
    dy = torch.linspace(0.5, 2, loss.numel(), device=device).view(loss.shape).to(dtype)
    (dx,) = torch.autograd.grad(loss, x, dy)
    assert [ours(graph) for graph in graphs] == [["cross_entropy"], ["cross_entropy_backward"]]
    assert ran == ["forward", "backward"]
    truth = truth_of(x, target, reduction, dy, **options)
    theirs = torchs(x, target, reduction, dy, **options)
    held(loss.detach(), dtype, theirs[0], truth[0])
    held(dx, dtype, theirs[1], truth[1])


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@every_reduction
def test_ignored_rows_under_compile_liger_1338(dtype, reduction, device):
    """Rows that do not count have a loss and a gradient of 0, whatever stands in them and in memory before."""
    x = peaked(6, 300, dtype).to(device)
    target = torch.tensor([-100, 5, -100, 299, -100, -100], device=device)
    x[0], x[4] = float("nan"), float("inf")
    x.requires_grad_()
    function, _ = compiled(lambda x: cross_entropy(x * 2, target, reduction=reduction))
    loss = function(x)
    (dx,) = torch.autograd.grad(loss.sum(), x)
    ignored = target == -100
    assert dx[ignored].eq(0).all()
    kept = x.detach()[~ignored].double().requires_grad_()
    expected = F.cross_entropy(kept * 2, target[~ignored], reduction=reduction)
    (dkept,) = torch.autograd.grad(expected.sum(), kept)
    torch.testing.assert_close(dx[~ignored].double(), dkept, rtol=2e-2, atol=1e-3)
    if reduction == "none":
        assert loss[ignored].eq(0).all()
        loss = loss[~ignored]
    torch.testing.assert_close(loss.double(), expected, rtol=2e-2, atol=1e-4)


def test_all_rows_ignored_under_compile_is_torchs(device):
    x = peaked(3, 70).to(device).requires_grad_()
    target = torch.full((3,), -100, device=device)
    function, _ = compiled(cross_entropy)
    assert function(x, target).isnan()
    assert function(x, target, reduction="sum") == 0


def test_a_target_that_is_no_class_is_nan_under_compile(device):
    x, target = peaked(3, 70).to(device).requires_grad_(), torch.tensor([1, 70, 2], device=device)
    function, _ = compiled(lambda x: cross_entropy(x, target, reduction="none"))
    loss = function(x)
    (dx,) = torch.autograd.grad(loss.sum(), x)
    assert loss.isnan().tolist() == [False, True, False]
    assert dx.isnan().all(1).tolist() == [False, True, False]
    assert not dx[[0, 2]].isnan().any()


def test_everything_that_is_returned_beside_the_loss(device):
    x, target = peaked(2 * 4 * 3, 30).view(2, 4, 3, 30).movedim(-1, 1).to(device), targets(24, 30).view(2, 4, 3)
    target = target.to(device)
    more = {"lse_square_scale": 0.1, "return_lse": True, "return_z_loss": True, "return_token_stats": True}

    def results(function):
        leaf = x.clone().requires_grad_()
        out = function(leaf, target, reduction="mean", label_smoothing=0.1, **more)
        (dx,) = torch.autograd.grad(out.loss + 2 * out.z_loss + out.lse.square().sum(), leaf)
        return *[each.detach() for each in (*out[:3], *out.token_stats)], dx

    function, graphs = with_joint_graphs(cross_entropy)
    result = results(function)
    first, second = (ours(graph) for graph in graphs)
    assert first == ["cross_entropy", "no_gradient", "no_gradient"]  # of the statistics that are floats
    assert sorted(second) == ["cross_entropy_backward", "no_gradient_backward", "no_gradient_backward"]
    assert len(result) == 8
    torch.testing.assert_close(result, results(cross_entropy))


def test_dynamic_rows_compile_once(device):
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(lambda x, t: cross_entropy(x, t, label_smoothing=0.1), backend=counter, fullgraph=True)
    for n in (3, 5, 9, 4, 17, 2):  # the second makes rows dynamic
        x, target = peaked(n, 40).to(device).requires_grad_(), targets(n, 40, device=device)
        torch.testing.assert_close(function(x, target), F.cross_entropy(x, target, label_smoothing=0.1))
        function(x, target).backward()
    assert counter.frame_count == 2


def test_one_row_and_logits_without_rows(device):
    x = peaked(1, 40).to(device)
    function, graphs = compiled(cross_entropy)
    for logits, target in ((x, [3]), (x[0], 3)):
        target = torch.tensor(target, device=device)
        torch.testing.assert_close(function(logits, target), F.cross_entropy(logits, target))
    assert [ours(graph) for graph in graphs] == [["cross_entropy"]] * 2


def test_rows_that_do_not_lie_together(device):
    x, target = peaked(70, 6).to(device).t(), targets(6, 70, device=device)
    function, _ = compiled(cross_entropy)
    torch.testing.assert_close(function(x, target), F.cross_entropy(x, target))


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_keeps_the_operator(strict, device, ran):
    class Loss(torch.nn.Module):
        def forward(self, x, target):
            return cross_entropy(x, target, reduction="sum", softcap=4.0)

    rows = torch.export.Dim("rows", min=2)
    given = peaked(5, 40).to(device), targets(5, 40, device=device)
    program = torch.export.export(Loss(), given, dynamic_shapes=({0: rows}, {0: rows}), strict=strict)
    assert ours(program.run_decompositions().graph_module) == ["cross_entropy"]
    x, target = peaked(9, 40).to(device), targets(9, 40, device=device)
    expected = reference.cross_entropy(x, target, reduction="sum", softcap=4.0)[0]
    torch.testing.assert_close(program.module()(x, target), expected)
    assert ran == ["forward"]


def test_fake_tensors_and_make_fx(device, ran):
    x, target = peaked(3, 40).to(device), targets(3, 40, device=device)

    def gradient(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(cross_entropy(x, target), x)[0]

    traced = make_fx(gradient)(x)
    assert ours(traced) == ["cross_entropy", "cross_entropy_backward"]
    torch.testing.assert_close(traced(x), gradient(x))
    ran.clear()
    with FakeTensorMode() as mode:
        fakes = mode.from_tensor(x), mode.from_tensor(target)
        loss = cross_entropy(*fakes, reduction="none", dtype=FP64)
        weight = mode.from_tensor(torch.ones(7, 40, device=device))
        of_linear = linear_cross_entropy(weight.t()[:3, :7].contiguous(), weight.t().contiguous(), fakes[1])
    assert (type(loss), loss.shape, loss.dtype) == (FakeTensor, (3,), FP64)
    assert (type(of_linear), of_linear.shape) == (FakeTensor, ())
    assert not ran


def test_an_eager_call_goes_to_no_operator(device, monkeypatch):
    def fail(*args):
        raise AssertionError("an operator was called")

    monkeypatch.setattr(operators.cross_entropy, "default", fail)
    monkeypatch.setattr(operators.linear_cross_entropy, "default", fail)
    x, target = peaked(3, 40).to(device).requires_grad_(), targets(3, 40, device=device)
    cross_entropy(x, target).backward()
    linear_cross_entropy(x, torch.ones(9, 40, device=device), targets(3, 9, device=device)).backward()


@pytest.mark.parametrize("transform", ["grad", "vmap", "vmap of grad", "jvp", "hessian"])
@pytest.mark.parametrize("compile", [False, True])
def test_functorchs_transforms(transform, compile, device):
    x, target = peaked(6, 20).view(2, 3, 20).to(device) / 4, targets(3, 20, device=device)
    transforms = {
        "grad": lambda f: lambda x: torch.func.grad(f)(x[0]),
        "vmap": torch.vmap,
        "vmap of grad": lambda f: torch.vmap(torch.func.grad(f)),
        "jvp": lambda f: lambda x: torch.func.jvp(f, (x[0],), (x[1],))[1],
        "hessian": lambda f: lambda x: torch.func.hessian(f)(x[0]),
    }
    ours, theirs = (transforms[transform](lambda x, f=f: f(x, target)) for f in (cross_entropy, F.cross_entropy))
    function = torch.compile(ours, backend="aot_eager", fullgraph=True) if compile else ours
    torch.testing.assert_close(function(x), theirs(x))


def test_vmap_over_single_targets(device):
    """[n_classes] and a target []: each sample's own gradient, which vmap refused to index a weight by."""
    x, target, weight = peaked(5, 20).to(device), targets(5, 20, device=device), torch.rand(20, device=device)
    for options in ({}, {"return_lse": True}, {"weight": weight, "softcap": 30.0}):

        def loss(x, target, options=options):
            found = cross_entropy(x, target, reduction="sum", **options)
            return found.loss if "return_lse" in options else found

        found = torch.vmap(torch.func.grad(loss))(x, target)
        (expected,) = torch.autograd.grad(loss(leaf := x.clone().requires_grad_(), target), leaf)
        torch.testing.assert_close(found, expected)


# linear_cross_entropy


def layer(n, n_features, n_classes, dtype=FP32, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    of = lambda *shape: torch.randn(*shape, generator=generator, dtype=FP64)  # noqa: E731
    x, w, bias = of(n, n_features), of(n_classes, n_features), of(n_classes)
    return [each.to(dtype).to(device).requires_grad_() for each in (x, w, bias)]


def composed(x, w, bias, target, **options):
    return reference.cross_entropy(F.linear(x, w, bias), target, **options)[0]


@pairwise()
@every_reduction
@pytest.mark.parametrize("options", ["plain", "all"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_linear_compiled(reduction, options, dtype, chunk_size, device, ran):
    tensors, target = layer(5, 16, 40, dtype, device), targets(5, 40, device=device)
    options = named(OPTIONS[options], 40, device=device) | {"reduction": reduction}
    function, graphs = with_joint_graphs(
        lambda x, w, b: linear_cross_entropy(x, w, target, linear_bias=b, chunk_size=chunk_size, **options)
    )
    loss = function(*tensors)
    dy = torch.linspace(0.5, 2, loss.numel(), device=device).view(loss.shape).to(dtype)
    gradients = torch.autograd.grad(loss, tensors, dy)
    # With a gradient of the loss alone to multiply by, the products of the forward pass are all there are.
    again = reduction == "none" or dtype == FP16
    assert [ours(graph) for graph in graphs] == [
        ["linear_cross_entropy"],
        ["linear_cross_entropy_backward"] if again else [],
    ]
    assert ("backward" in ran) == again
    exact = [each.detach().double().requires_grad_() for each in tensors]
    truth = composed(*exact, target, **options)
    torch.testing.assert_close(loss.double(), truth, rtol=2e-2 if dtype != FP32 else 1e-5, atol=1e-5)
    of_truth = torch.autograd.grad(truth, exact, dy.double())
    for gradient, of, expected in zip(gradients, tensors, of_truth, strict=True):
        assert gradient.dtype == of.dtype
        atol = 8 * torch.finfo(dtype).eps * expected.abs().max().item()
        torch.testing.assert_close(gradient.double(), expected, rtol=2e-2 if dtype != FP32 else 1e-4, atol=atol)


@pairwise()
@every_reduction
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("on_kernels", [True, False])
def test_linear_master_weights_compiled(reduction, dtype, chunk_size, on_kernels, device, ran, monkeypatch):
    """Their gradients are float32, and no product is rounded; the operators' own torch operations do the same."""
    x, *low = layer(5, 16, 40, dtype, device)
    tensors, target = [x, *(each.detach().float().requires_grad_() for each in low)], targets(5, 40, device=device)
    if not on_kernels:
        monkeypatch.setattr(rules, "_on_kernels", lambda x: False)

    def call(x, w, b):
        return linear_cross_entropy(
            x, w, target, linear_bias=b, chunk_size=chunk_size, reduction=reduction, dtype=FP32
        )  # fmt: skip

    loss = compiled(call)[0](*tensors)
    dy = torch.linspace(0.5, 2, loss.numel(), device=device).view(loss.shape)
    gradients = torch.autograd.grad(loss, tensors, dy)
    assert bool(ran) == on_kernels
    exact = [each.detach().double().requires_grad_() for each in (x, *low)]
    truth = composed(*exact, target, reduction=reduction)
    of_truth = torch.autograd.grad(truth, exact, dy.double())
    for found, of, want in zip((loss, *gradients), (loss, *tensors), (truth, *of_truth), strict=True):
        assert found.dtype == of.dtype
        assert (found.double() - want).abs().max() <= 8 * torch.finfo(dtype).eps * want.abs().max() + 1e-7


@pytest.mark.parametrize(
    "asked", [(True, False, False), (False, True, False), (False, False, True), (True, True, False)], ids=str
)
def test_linear_makes_the_gradients_that_are_asked_for(asked, device):
    tensors, target = layer(5, 16, 40, device=device), targets(5, 40, device=device)
    for each, wanted in zip(tensors, asked, strict=True):
        each.requires_grad_(wanted)
    function, graphs = compiled(lambda x, w, b: linear_cross_entropy(x, w, target, linear_bias=b))
    wanted = [each for each in tensors if each.requires_grad]
    gradients = torch.autograd.grad(function(*tensors) * 3, wanted)
    torch.testing.assert_close(gradients, torch.autograd.grad(composed(*tensors, target) * 3, wanted))
    (node,) = [node for node in graphs[0].graph.nodes if "linear_cross_entropy" in str(node.target)]
    assert list(node.args[-1]) == list(asked)


def test_linear_without_a_gradient_multiplies_once(device, ran):
    tensors, target = layer(5, 16, 40, device=device), targets(5, 40, device=device)
    function, graphs = compiled(lambda x, w, b: linear_cross_entropy(x, w, target, linear_bias=b))
    with torch.no_grad():
        torch.testing.assert_close(function(*tensors), composed(*tensors, target))
    (node,) = [node for node in graphs[0].graph.nodes if "linear_cross_entropy" in str(node.target)]
    assert list(node.args[-1]) == [False] * 3


def test_linear_with_dynamic_rows_and_leading_dims_compiles_once(device):
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(linear_cross_entropy, backend=counter, fullgraph=True)
    for n in (3, 5, 9, 2):
        (x, w, _), target = layer(2 * n, 16, 40, device=device), targets(2 * n, 40, device=device)
        loss = function(x.view(2, n, 16), w, target.view(2, n))
        torch.testing.assert_close(loss, F.cross_entropy(F.linear(x, w), target))
        torch.testing.assert_close(
            torch.autograd.grad(loss, (x, w)), torch.autograd.grad(F.cross_entropy(F.linear(x, w), target), (x, w))
        )
    assert counter.frame_count == 2


def test_linear_ignored_rows_under_compile(device):
    tensors, target = layer(6, 16, 40, device=device), torch.tensor([-100, 3, -100, -100, 39, -100], device=device)
    for skip_ignored in (False, True):
        function, _ = compiled(
            lambda x, w, b, skip=skip_ignored: linear_cross_entropy(x, w, target, linear_bias=b, skip_ignored=skip)
        )
        gradients = torch.autograd.grad(function(*tensors), tensors)
        assert gradients[0][target == -100].eq(0).all()
        torch.testing.assert_close(gradients, torch.autograd.grad(composed(*tensors, target), tensors))


@pytest.mark.parametrize("strict", [False, True])
def test_linear_exported(strict, device):
    class Loss(torch.nn.Module):
        def forward(self, x, w, target):
            return linear_cross_entropy(x, w, target)

    (x, w, _), target = layer(5, 16, 40, device=device), targets(5, 40, device=device)
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(Loss(), (x, w, target), dynamic_shapes=({0: rows}, None, {0: rows}), strict=strict)
    assert ours(program.graph_module) == ["linear_cross_entropy"]
    torch.testing.assert_close(program.module()(x[:3], w, target[:3]), composed(x[:3], w, None, target[:3]))


# The operators themselves.


@every_reduction
def test_first_and_second_derivatives(reduction, device):
    x, target = torch.randn(4, 5, dtype=FP64, device=device, requires_grad=True), targets(4, 5, device=device)

    def call(x):
        loss, z, m, ls, *_ = operators.cross_entropy(x, target, None, -100, reduction, 0.1, 5.0, 2.0, 0.1)
        return loss, z, m + ls

    assert torch.autograd.gradcheck(call, x, fast_mode=QUICK)
    assert torch.autograd.gradgradcheck(call, x, fast_mode=QUICK)
    tensors = layer(4, 3, 5, FP64, device)
    call = lambda x, w, b: operators.linear_cross_entropy(  # noqa: E731
        x, w, target, b, None, -100, reduction, 0.1, None, 1.0, 0.1, 3, "fp32", [True] * 3
    )[0]
    assert torch.autograd.gradcheck(call, tensors, fast_mode=QUICK)
    assert torch.autograd.gradgradcheck(call, tensors, fast_mode=QUICK)


def test_the_derivative_of_the_gradient_operator(device):
    x, target = torch.randn(4, 5, dtype=FP64, device=device, requires_grad=True), targets(4, 5, device=device)
    dy = torch.randn((), dtype=FP64, device=device, requires_grad=True)
    dls = torch.randn(4, dtype=FP64, device=device, requires_grad=True)

    def call(x, dy, dls):
        m = x.detach().amax(-1)
        ls = (x.detach() - m.unsqueeze(-1)).exp().sum(-1).log()
        return operators.cross_entropy_backward(x, target, m, ls, dy, None, dls, None, -100, "mean", 0.1)

    assert torch.autograd.gradcheck(call, (x, dy, dls), fast_mode=QUICK)


def test_where_there_are_no_kernels_they_are_made_of_torchs_operations():
    script = """
import torch, fused_softmax, torch.nn.functional as F
from fused_softmax.core import launch; from fused_softmax.ops.losses import reference
torch.manual_seed(0)
def fail(*a, **k): raise AssertionError("a kernel was prepared")
launch.prepare = fail
fused_softmax.cross_entropy  # the first public name registers the operators
ops, x = torch.ops.fused_softmax, torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
t, weight = torch.tensor([1, -100, 8, 0]), torch.rand(9)
options = dict(label_smoothing=0.1, softcap=3.0, scale=2.0, lse_square_scale=0.1)
for reduction in ("mean", "sum", "none"):
    y, z, m, ls, losses, entropy, predicted, correct = ops.cross_entropy(
        x, t, weight, reduction=reduction, **options, return_token_stats=True)
    e, elsed, ez = reference.cross_entropy(x, t, weight, reduction=reduction, **options)
    g, = torch.autograd.grad((y * 2).sum() + z.sum() + (m + ls).square().sum(), x)
    eg, = torch.autograd.grad((e * 2).sum() + ez.sum() + elsed.square().sum(), x)
    torch.testing.assert_close((y, z, m + ls, g), (e, ez, elsed, eg))
    assert predicted[1] == 0 and entropy[1] == 0 and losses[1] == 0
    w, b = torch.randn(9, 5, requires_grad=True), torch.randn(9, requires_grad=True)
    h = torch.randn(4, 5, requires_grad=True)
    loss, *_ = ops.linear_cross_entropy(h, w, t, b, reduction=reduction, gradients=[True] * 3)
    expected = F.cross_entropy(F.linear(h, w, b), t, reduction=reduction)
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(*(torch.autograd.grad(l.square().sum(), (h, w, b)) for l in (loss, expected))):
        torch.testing.assert_close(ours, theirs)
"""
    environment = {k: v for k, v in os.environ.items() if k not in ("FUSED_SOFTMAX_INTERPRET", "TRITON_INTERPRET")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
