"""Under torch.compile, export, vmap and DTensor: one operator in the graph, torch's results, and kernels that ran."""

import math
from functools import partial

import over_two_ranks
import pytest
import torch
from conftest import INTERPRETED, kernels, peaked
from contract import FAMILY, assert_softmax
from products import QUICK
from scored import sinks
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fused_softmax
from fused_softmax.ops.softmax import calls as softmax_calls
from fused_softmax.ops.softmax import reference

pytestmark = kernels

operators = torch.ops.fused_softmax
FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
NAMES = tuple(FAMILY)
every_function = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests():
    torch._dynamo.reset()


@pytest.fixture
def ran(monkeypatch):
    """How often each of the host functions that launch kernels was called."""
    counts = {}

    def count(module, function, key):
        plain = getattr(module, function)
        counts[key] = 0

        def counted(*args, **kwargs):
            counts[key] += 1
            return plain(*args, **kwargs)

        monkeypatch.setattr(module, function, counted)

    count(softmax_calls, "backward", "gradient")
    forward = softmax_calls.forward
    counts |= {"softmax": 0, "logsumexp": 0}

    def counted_by_name(of, *args, **kwargs):
        counts["logsumexp" if of.reduces else "softmax"] += 1
        return forward(of, *args, **kwargs)

    monkeypatch.setattr(softmax_calls, "forward", counted_by_name)
    return counts


def ours_and_theirs(name):
    return FAMILY[name].ours, FAMILY[name].torchs


def tiny(*shape, dtype=FP32, device="cpu", seed=0):
    return peaked(1, math.prod(shape), dtype, seed).view(shape).to(device)


def compiled(function, **options):
    """`function`, compiled whole, and the graphs it was compiled to."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    return torch.compile(function, backend=backend, fullgraph=True, **options), graphs


def targets(graph):
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


# torch.compile


@every_function
def test_compiled_code_holds_one_operator(name, device, ran):
    ours, theirs = ours_and_theirs(name)
    function, graphs = compiled(lambda x: ours(x * 2, -1) + 1)
    x = tiny(3, 70, device=device)
    torch.testing.assert_close(function(x), theirs(x * 2, -1) + 1)
    (graph,) = graphs
    assert [target for target in targets(graph) if "softmax" in target or "logsumexp" in target] == [
        f"fused_softmax.{name}.default"
    ]
    assert ran["logsumexp" if name == "logsumexp" else "softmax"] == 1


def test_what_kernels_do_not_take_stays_torchs_under_compile(device, ran):
    out = torch.empty(3, 70, device=device)
    for call in (
        lambda x: fused_softmax.softmax(x.to("meta"), -1),
        lambda x: fused_softmax.softmax(x, -1, out=out),
        lambda x: fused_softmax.logsumexp(x.long(), -1),
    ):
        function, graphs = compiled(call)
        assert function(tiny(3, 70, device=device)).shape[0] == 3
        assert not any("fused_softmax" in target for target in targets(graphs[0]))
    assert set(ran.values()) == {0}


@every_function
@pytest.mark.parametrize("marked", [False, True], ids=["automatic", "marked"])
def test_other_row_counts_compile_nothing(name, marked, device):
    ours, theirs = ours_and_theirs(name)
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(lambda x: ours(x, -1) * 2, backend=counter, fullgraph=True)
    for n_rows in (3, 4, 7, 8, 33):
        x = tiny(n_rows, 40, device=device)
        if marked:
            torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(function(x), theirs(x, -1) * 2)
    assert counter.frame_count == (1 if marked else 2)


def test_the_gradient_of_a_compiled_logsumexp_of_nothing(device):
    x = torch.empty(3, 0, device=device, requires_grad=True)
    y = torch.compile(lambda x: fused_softmax.logsumexp(x, 1), backend="eager")(x)
    y.sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gradients_of_compiled_code(dim, device, ran):
    def loss(softmax, log_softmax, logsumexp):
        return lambda x: (
            (softmax(x * 2, dim) * x).sum() + (log_softmax(x, dim) * x.sin()).sum() + logsumexp(x * 3, (0, 1))
        )

    function, graphs = compiled(loss(*(getattr(fused_softmax, name) for name in NAMES)))
    ours, theirs = (tiny(4, 30, device=device).requires_grad_() for _ in range(2))
    function(ours).backward()
    loss(*(getattr(torch, name) for name in NAMES))(theirs).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert len(graphs) == 1
    assert ran == {"softmax": 2, "gradient": 2, "logsumexp": 1}


SCORED = {
    "scale": lambda d: {"scale": 0.5},
    "scale 0": lambda d: {"scale": 0.0},
    "scale per row": lambda d: {"scale": torch.tensor([[0.5], [2.0], [-1.0], [0.0]], device=d)},
    "bool mask": lambda d: {"mask": torch.arange(6, device=d) % 3 > 0, "masked_rows": "zero"},
    "added mask": lambda d: {"mask": tiny(4, 6, device=d, seed=1)},
    "causal": lambda d: {"is_causal": True, "scale": 0.25},
    "nothing kept": lambda d: {"mask": torch.zeros(6, dtype=torch.bool, device=d), "masked_rows": "zero"},
    "sink": lambda d: {"sink": 1.5},
    "sink per row": lambda d: {"sink": torch.tensor([[0.5], [2.0], [-1.0], [0.0]], device=d), "scale": 2.0},
}


@every_function
@pytest.mark.parametrize("which", SCORED)
def test_scores_in_compiled_code(name, which, device, ran):
    scored = SCORED[which](device)
    function, graphs = compiled(lambda x, weight: (getattr(fused_softmax, name)(x, -1, **scored) * weight).sum())
    x = tiny(2, 4, 6, device=device)
    weight = torch.rand(getattr(torch, name)(x, -1).shape, device=device) + 0.5
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    result = function(ours, weight)
    result.backward()
    expected = (getattr(fused_softmax, name)(theirs, -1, **scored) * weight).sum()
    expected.backward()
    torch.testing.assert_close(result, expected, equal_nan=True)
    torch.testing.assert_close(ours.grad, theirs.grad, equal_nan=True)
    assert targets(graphs[0]).count(f"fused_softmax.{name}.default") == 1


@every_function
def test_gradients_of_scale_mask_and_sink_in_compiled_code(name, device):
    def gradients(wrap):
        x, *given = (each.clone().requires_grad_() for each in (tiny(2, 4, 6, device=device), *scores))
        call = wrap(
            lambda x, mask, scale, sink: FAMILY[name].ours(x, -1, mask=mask, scale=scale, sink=sink).square().sum()
        )
        call(x, *given).backward()
        return [each.grad for each in (x, *given)]

    scale, sink = torch.tensor([[0.5], [2.0], [-1.0], [1.5]]), sinks(4, 1)
    scores = tiny(4, 6, device=device, seed=1), scale.to(device), sink.to(device)
    for ours, eager in zip(gradients(lambda f: compiled(f)[0]), gradients(lambda f: f), strict=True):
        torch.testing.assert_close(ours, eager)


@every_function
def test_inputs_of_any_strides_and_dtypes_in_compiled_code(name, device):
    ours, theirs = ours_and_theirs(name)
    x = tiny(3, 4, 10, device=device)
    for dtype in (BF16, FP64):
        for t in (x, x.transpose(0, 2), x.transpose(0, 1), x[:, 1:, ::2], x[:, :2], x[:1].expand(3, 4, 10), x[:0]):
            torch._dynamo.reset()
            t = t.to(dtype)
            function, _ = compiled(lambda t: ours(t, 1))
            result, expected = function(t), theirs(t, 1)
            torch.testing.assert_close(result, theirs(t.double(), 1).to(dtype))  # torch's of bf16 is off near 0
            assert result.stride() == expected.stride()
    if name != "logsumexp":
        function, _ = compiled(lambda t: ours(t, 1, dtype=FP32))
        torch.testing.assert_close(function(x.to(BF16)), theirs(x.to(BF16), 1, dtype=FP32))


def test_deterministic_algorithms(device):
    x = tiny(3, 700, device=device).requires_grad_()
    function, _ = compiled(lambda x: fused_softmax.softmax(x, -1).square().sum())
    torch.use_deterministic_algorithms(True)
    try:
        for call in (function, lambda x: fused_softmax.softmax(x, -1).square().sum()):
            (first,), (second,) = (torch.autograd.grad(call(x), x) for _ in range(2))
            assert torch.equal(first, second)
    finally:
        torch.use_deterministic_algorithms(False)


def test_errors_of_compiled_code_name_the_argument(device):
    function, _ = compiled(lambda x: fused_softmax.softmax(x, 2))
    with pytest.raises(Exception, match="dim 2 is out of range"):
        function(tiny(3, 70, device=device))


@pytest.mark.gpu
@every_function
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_compiled_by_inductor_for_a_gpu(name, dtype, ran):
    ours, theirs = ours_and_theirs(name)
    function = torch.compile(lambda x: ours(x * 2, -1) + 1, fullgraph=True)
    for n_rows, n_cols in ((4, 700), (5, 700), (6, 33000)):
        x = tiny(n_rows, n_cols, dtype=dtype, device="cuda").requires_grad_()
        other = x.detach().clone().requires_grad_()
        result, expected = function(x), theirs(other * 2, -1) + 1
        torch.testing.assert_close(result, expected, rtol=2e-2 if dtype == BF16 else 1e-5, atol=1e-5)
        result.square().sum().backward()
        expected.square().sum().backward()
        truth = other.grad
        if name == "logsumexp":  # the last bit of its result is a factor of its whole gradient: by its own result
            truth = 4 * result.detach().double()[:, None] * (2 * x.detach().double()).softmax(-1)
        torch.testing.assert_close(x.grad, truth.to(dtype), rtol=2e-2, atol=1e-3 if dtype == FP32 else 5e-2)
    assert ran["logsumexp" if name == "logsumexp" else "softmax"] == 3


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES[:2])
def test_autocast_of_compiled_code_is_torchs(name):
    ours, theirs = ours_and_theirs(name)
    function, graphs = compiled(lambda x: ours(x, -1))
    x = tiny(4, 700, dtype=BF16, device="cuda")
    with torch.autocast("cuda", dtype=BF16):
        result, expected = function(x), theirs(x, -1)
    assert result.dtype == expected.dtype == FP32
    torch.testing.assert_close(result, expected)
    assert targets(graphs[0]) == [f"fused_softmax.{name}.default"]


# torch.export


class Model(torch.nn.Module):
    def forward(self, x):
        first, second, third = (getattr(fused_softmax, name) for name in NAMES)
        return first(x, -1), second(x, 0, dtype=FP64), third(x, (0, 1), keepdim=True)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_keeps_the_operators(strict, device, ran):
    x = tiny(5, 40, device=device)
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(Model(), (x,), dynamic_shapes=({0: rows},), strict=strict)
    for exported in (program, program.run_decompositions()):
        assert [target for target in targets(exported.graph_module) if "fused_softmax" in target] == [
            f"fused_softmax.{name}.default" for name in NAMES
        ]
        other = tiny(9, 40, device=device)
        expected = (
            torch.softmax(other, -1),
            torch.log_softmax(other, 0, dtype=FP64),
            torch.logsumexp(other, (0, 1), True),
        )
        torch.testing.assert_close(exported.module()(other), expected)
    assert ran["softmax"] == 4
    assert ran["logsumexp"] == 2


def test_other_tracers_keep_the_operators(device, ran):
    x = tiny(3, 40, device=device)
    Model()(x)  # which keeps calls for tensors like x
    traced = make_fx(lambda x: Model()(x)[:2])(x)
    assert targets(traced)[:1] == ["fused_softmax.softmax.default"]
    assert ran["softmax"] > 0
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        y = fused_softmax.softmax(fake, -1, dtype=BF16, is_causal=True)
    assert (type(y), y.shape, y.dtype, y.stride()) == (FakeTensor, x.shape, BF16, (40, 1))
    with torch.device(device):  # a mode of torch functions, beside that of fake tensors
        function, graphs = compiled(lambda x: fused_softmax.softmax(x, -1))
        torch.testing.assert_close(function(x), torch.softmax(x, -1))
    assert targets(graphs[0]) == ["fused_softmax.softmax.default"]


# The operators themselves.


@every_function
@pytest.mark.parametrize("with_sink", [False, True])
def test_first_and_second_derivatives(with_sink, name, device):
    x = torch.randn(3, 5, dtype=FP64, device=device, requires_grad=True)
    sink = sinks(3, 1, dtype=FP64).to(device).requires_grad_() if with_sink else None
    given = [x, *([sink] if with_sink else [])]
    options = ([1], False) if FAMILY[name].reduces else (1, None)

    def call(x, sink=None):
        return getattr(operators, name)(x, *options, None, None, None, False, "nan", None, sink)

    torch.testing.assert_close(FAMILY[name].ours(x, 1, sink=sink), call(*given))
    assert torch.autograd.gradcheck(call, given, fast_mode=QUICK)
    assert torch.autograd.gradgradcheck(call, given, fast_mode=QUICK)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_the_gradients_and_their_derivatives(name, dim, scale, device):
    dy, x = (torch.randn(3, 5, dtype=FP64, device=device, requires_grad=True) for _ in range(2))
    y = getattr(torch, name)(x, dim)
    result = getattr(operators, f"{name}_backward")(dy, y, dim, FP32, scale)
    (expected,) = torch.autograd.grad(y, x, dy * (scale or 1.0))
    torch.testing.assert_close(result, expected.float())
    y = y.detach().requires_grad_()
    call = lambda dy, y: getattr(operators, f"{name}_backward")(dy, y, dim, None, scale)  # noqa: E731
    assert torch.autograd.gradcheck(call, (dy, y), fast_mode=QUICK)


# vmap and the transforms of torch.func


@every_function
@pytest.mark.parametrize("in_dim", [0, 1, 2, -1])
def test_vmap(name, in_dim, device, ran):
    ours, theirs = ours_and_theirs(name)
    x = tiny(3, 4, 5, device=device)
    for dim in (0, -1):
        ours(x.select(in_dim, 0), dim)  # which keeps a call for tensors like those within
        result, expected = (torch.vmap(partial(f, dim=dim), in_dims=in_dim)(x) for f in (ours, theirs))
        torch.testing.assert_close(result, expected)
        result, expected = (torch.vmap(torch.vmap(partial(f, dim=0)), in_dim)(x) for f in (ours, theirs))
        torch.testing.assert_close(result, expected)
    assert ran["logsumexp" if name == "logsumexp" else "softmax"] == 4


@pytest.mark.parametrize("name", NAMES[:2])
def test_vmap_of_scalars(name, device):
    ours, theirs = ours_and_theirs(name)
    x = tiny(5, device=device)
    torch.testing.assert_close(torch.vmap(lambda t: ours(t, -1))(x), theirs(x.unsqueeze(-1), -1).squeeze(-1))


@every_function
def test_vmap_of_scales_masks_and_sinks(name, device):
    """Batched with the input, without it, and it without them."""
    x, scale = tiny(3, 4, 5, device=device), torch.rand(3, 4, 1, device=device) + 0.5
    mask, sink = torch.arange(60, device=device).view(3, 4, 5) % 4 > 0, sinks(3, 4, 1).to(device)
    call = lambda x, scale, mask, sink: FAMILY[name].ours(x, -1, scale=scale, mask=mask, sink=sink)  # noqa: E731
    for in_dims in (
        (0, 0, 0, 0), (0, None, 0, 0), (0, 0, None, 0), (0, 0, 0, None), (None, 0, 0, 0), (0, None, None, None),
        (None, None, 0, None), (None, None, None, 0),
    ):  # fmt: skip
        given = [t if at == 0 else t[0] for t, at in zip((x, scale, mask, sink), in_dims, strict=True)]
        one = [[t[i] if at == 0 else t for t, at in zip(given, in_dims, strict=True)] for i in range(3)]
        torch.testing.assert_close(
            torch.vmap(call, in_dims)(*given), torch.stack([call(*arguments) for arguments in one])
        )
        alone = [given[0], None, None, given[3]]  # the sink with nothing beside it
        if {in_dims[0], in_dims[3]} != {None}:
            found = torch.vmap(call, (in_dims[0], None, None, in_dims[3]))(*alone)
            expected = [call(each[0], None, None, each[3]) for each in one]
            torch.testing.assert_close(found, torch.stack(expected))
    across = torch.vmap(call, (1, None, None, 0))(x.transpose(0, 1), None, None, sink)
    torch.testing.assert_close(across, call(x, None, None, sink))
    rows = torch.vmap(call)(x, scale[:, 0], mask[:, 0], sink[:, 0])  # of fewer dims than the input
    expected = [call(x[i], scale[i, 0], mask[i, 0], sink[i, 0]) for i in range(3)]
    torch.testing.assert_close(rows, torch.stack(expected))


TRANSFORMS = {
    "grad": lambda f: torch.func.grad(lambda x: f(x).square().sum()),
    "vmap of grad": lambda f: torch.vmap(torch.func.grad(lambda x: f(x).square().sum())),
    "grad of vmap": lambda f: torch.func.grad(lambda x: torch.vmap(f)(x).square().sum()),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x + 1,)),
    "vjp": lambda f: lambda x: torch.func.vjp(f, x)[1](f(x) + 1),
    "jacrev": torch.func.jacrev,
    "jacfwd": torch.func.jacfwd,
    "hessian": torch.func.hessian,
}


@every_function
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(name, transform, device):
    ours, theirs = ((lambda x, f=f: f(x, -1)) for f in ours_and_theirs(name))
    x = tiny(3, 5, device=device)
    for given in (x, x[0]) if "vmap" not in transform else (x,):
        ours(given)  # which keeps a call for tensors like it
        torch.testing.assert_close(TRANSFORMS[transform](ours)(given), TRANSFORMS[transform](theirs)(given))


@pytest.mark.parametrize("transform", ["vmap of grad", "grad of vmap", "jvp", "hessian"])
def test_transforms_within_compiled_code(transform, device):
    ours, theirs = ((lambda x, f=f: f(x, -1)) for f in ours_and_theirs("softmax"))
    x = tiny(3, 5, device=device)
    function, _ = compiled(TRANSFORMS[transform](ours))
    torch.testing.assert_close(function(x), TRANSFORMS[transform](theirs)(x))


def test_vmap_within_compiled_code(device, ran):
    function, graphs = compiled(torch.vmap(lambda t: fused_softmax.softmax(t, 0), in_dims=1))
    x = tiny(3, 5, device=device)
    torch.testing.assert_close(function(x), torch.softmax(x, 0).t())
    assert "fused_softmax.softmax.default" in targets(graphs[0])
    assert ran["softmax"] == 1


@every_function
def test_batched_gradients(name, device):
    gradients = []
    for function in ours_and_theirs(name):
        x = tiny(3, 5, device=device).requires_grad_()
        y = function(x, -1)
        dy = tiny(4, *y.shape, device=device, seed=1)
        gradients += torch.autograd.grad(y, x, dy, is_grads_batched=True)
    torch.testing.assert_close(*gradients)


# DTensor


@pytest.mark.skipif(not INTERPRETED, reason="of CPU tensors")
def test_dtensor_on_two_ranks(tmp_path):
    torch.multiprocessing.spawn(over_two_ranks.run, (str(tmp_path / "store"),), nprocs=2)


def test_references_agree_with_the_operators_scores(device):
    x = tiny(4, 6, device=device)
    for which, scored in SCORED.items():
        y = fused_softmax.softmax(x, -1, **scored(device))
        torch.testing.assert_close(y, reference.softmax(x, -1, **scored(device)), msg=which, equal_nan=True)
        if which == "scale":
            assert_softmax(y, x * 0.5)
