"""vmap of route, held to a loop in float64: what is batched, nested, differentiated, and how often kernels run."""

import math

import pytest
import torch
from conftest import kernels

from fused_softmax import explain, route
from fused_softmax.ops.routing import operators, reference
from fused_softmax.ops.routing import rows as rows_of_kernels

BATCH, N, EXPERTS, K = 3, 4, 12, 2
EVERYTHING = {"dense": True, "return_aux_loss": True, "return_z_loss": True}
FLOATS = ("weights", "prob_sums", "aux_loss", "z_loss", "dense")
# Options, and by name the dim of the batch, None where there is none.
CASES = {
    "logits": ({}, {"logits": 0}),
    "raw, in front of experts": ({"renormalize": False, "scale": 2.5}, {"logits": 1}),
    "sigmoid, last": ({"score": "sigmoid"}, {"logits": -1}),
    "sqrtsoftplus, chosen first": ({"score": "sqrtsoftplus", "score_first": False}, {"logits": 0}),
    "groups and noise": ({"n_groups": 4, "groups_kept": 2}, {"logits": 0, "noise": 1}),
    "sequences": ({"sequence_length": 2}, {"logits": 0, "row_mask": 1}),
    "a mask of all": ({}, {"logits": 0, "row_mask": None}),
    "noise and a bias of all": ({"score": "sigmoid"}, {"logits": 0, "noise": None, "bias": None}),
    "bias": ({"sequence_length": 2}, {"logits": 0, "bias": 1}),
    "replay": ({"renormalize": False}, {"logits": 1, "indices": 2}),
    "logits of all": ({}, {"logits": None, "indices": 0, "row_mask": 0}),
    "logits of all, biased": ({}, {"logits": None, "bias": 0}),
    "few outputs": ({"return_counts": False, "return_aux_loss": False}, {"logits": 0}),
    "weights alone": (
        {"return_counts": False, "return_aux_loss": False, "return_z_loss": False, "dense": False}, {"logits": 0},
    ),
}  # fmt: skip


@pytest.fixture(params=["kernels", "torch"])
def way(request, monkeypatch):
    """The operators' rules with kernels, or on a device without."""
    if request.param == "torch":
        monkeypatch.setattr(operators, "on_device", lambda tensor: False)
    return request.param


@pytest.fixture
def ran(monkeypatch):
    """The passes that kernels made."""
    calls = []
    for module, name in ((operators, "forward"), (rows_of_kernels, "backward")):
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *given, real=real, name=name, **how: (calls.append(name), real(*given, **how))[1]
        )
    return calls


def tensors_of(dims, device):
    """Those of a call: an example has a NaN, one has nothing to route where there is a mask."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, N, EXPERTS, generator=generator) * 2
    x[1, 2, 3], x[2, 1, :5] = math.nan, -math.inf
    mask = torch.rand(BATCH, N, generator=generator) < 0.7
    mask[1] = False
    made = {
        "logits": x, "noise": torch.randn(BATCH, N, EXPERTS, generator=generator), "row_mask": mask,
        "bias": torch.randn(BATCH, EXPERTS, generator=generator) / 4,
        "indices": torch.rand(BATCH, N, EXPERTS, generator=generator).argsort(-1)[..., :K],
    }  # fmt: skip
    made["indices"][0, 0, 0] = -1
    found = [made[name][0] if at is None else made[name].movedim(0, at) for name, at in dims.items()]
    return [each.to(device) for each in found]


def call(of, names, options):
    def function(*given):
        found = of(k=K, **dict(zip(names, given, strict=True)), **EVERYTHING | options)
        return {name: each for name, each in found._asdict().items() if each is not None}

    return function


def looped(function, given, in_dims, n=BATCH):
    each = [
        function(*[t if at is None else t.select(at, i) for t, at in zip(given, in_dims, strict=True)])
        for i in range(n)
    ]
    return {name: torch.stack([one[name] for one in each]) for name in each[0]}


def exactly(function):
    """A loop's function on float64 logits."""
    return lambda logits, *given: function(logits.double(), *given)


def weighted(found, names=FLOATS):
    total = 0.0
    for name in names:
        if name in found:
            each = found[name]
            weight = torch.arange(each.numel(), dtype=torch.float64, device=each.device).cos().view(each.shape)
            total = total + (each * weight.to(each.dtype)).sum()
    return total


def close(found, wanted):
    assert found.keys() == wanted.keys()
    for name, each in found.items():
        assert each.dtype == (torch.float32 if name in FLOATS else torch.int32)
        torch.testing.assert_close(
            each, wanted[name].to(each.dtype), rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def close_gradients(found, wanted, leaf, names=FLOATS):
    ours, theirs = (torch.autograd.grad(weighted(each, names), leaf)[0] for each in (found, wanted))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@kernels
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_a_loops(case, way, device):
    options, dims = CASES[case]
    given, in_dims = tensors_of(dims, device), tuple(dims.values())
    given[0].requires_grad_()
    with explain() as calls:
        found = torch.vmap(call(route, dims, options), in_dims)(*given)
    assert [each.route for each in calls] == ["operator"]
    wanted = looped(exactly(call(reference.route, dims, options)), given, in_dims)
    close(found, wanted)
    close_gradients(found, wanted, given[0])


@kernels
@pytest.mark.parametrize(
    "asked", [*[(name,) for name in FLOATS], ("aux_loss", "weights"), ("z_loss", "prob_sums")], ids=str
)
@pytest.mark.parametrize("case", ["noise and a bias of all", "sequences"])
def test_gradients_of_some_results(case, asked, device):
    options, dims = CASES[case]
    given, in_dims = tensors_of(dims, device), tuple(dims.values())
    given[0].requires_grad_()
    found = torch.vmap(call(route, dims, options), in_dims)(*given)
    close_gradients(found, looped(exactly(call(reference.route, dims, options)), given, in_dims), given[0], asked)


@kernels
@pytest.mark.parametrize(("case", "launches"), [("logits", 1), ("sequences", 1), ("bias", BATCH)])
def test_kernels_run_once_for_all(case, launches, ran, device):
    """But for biases that differ."""
    options, dims = CASES[case]
    given = tensors_of(dims, device)
    found = torch.vmap(call(route, dims, options), tuple(dims.values()))(given[0].requires_grad_(), *given[1:])
    assert ran == ["forward"] * launches
    ran.clear()
    weighted(found).backward()
    assert ran == ["backward"] * launches


@kernels
@pytest.mark.parametrize("case", ["logits", "sequences", "noise and a bias of all", "bias", "replay"])
def test_an_empty_batch(case, device):
    options, dims = CASES[case]
    given, in_dims = tensors_of(dims, device), tuple(dims.values())
    shapes = torch.vmap(call(route, dims, options), in_dims)(*given)
    given = [each if at is None else each.narrow(at, 0, 0) for each, at in zip(given, in_dims, strict=True)]
    leaf = given[0] = given[0].detach().requires_grad_()
    found = torch.vmap(call(route, dims, options), in_dims)(*given)
    assert {name: (*each.shape, each.dtype) for name, each in found.items()} == {
        name: (0, *each.shape[1:], each.dtype) for name, each in shapes.items()
    }
    (dx,) = torch.autograd.grad(weighted(found), leaf)
    assert (dx.shape, dx.dtype) == (leaf.shape, leaf.dtype)


@kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype, device):
    options, dims = CASES["logits"]
    (x,) = tensors_of(dims, device)
    x = x.to(dtype).requires_grad_()
    found, wanted = (
        torch.vmap(call(route, dims, options))(x),
        looped(exactly(call(reference.route, dims, options)), (x,), (0,)),
    )
    close(found, wanted)
    ours, theirs = (torch.autograd.grad(weighted(each), x)[0] for each in (found, wanted))
    assert ours.dtype == dtype
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(ours, theirs, rtol=step, atol=step / 8)


@kernels
def test_batches_within_batches(way, device):
    x = torch.randn(2, N, EXPERTS, 3, generator=torch.Generator().manual_seed(2)).to(device).requires_grad_()
    bias = torch.randn(EXPERTS, generator=torch.Generator().manual_seed(3)).to(device)

    def each(of):
        return call(of, ("logits", "bias"), {"sequence_length": 2})

    found = torch.vmap(torch.vmap(each(route), (-1, None)), (0, None))(x, bias)
    one = lambda x, bias: looped(exactly(each(reference.route)), (x, bias), (-1, None), 3)  # noqa: E731
    wanted = looped(one, (x, bias), (0, None), 2)
    close(found, wanted)
    close_gradients(found, wanted, x)


@kernels
def test_gradients_of_each_one_and_of_gradients(device):
    """By torch.func, which leaves them to torch's operations, and a second derivative of what kernels computed."""
    (x,) = tensors_of({"logits": 0}, device)
    x = x.nan_to_num(0.5)

    def loss(of):
        return lambda x: weighted(call(of, ("logits",), {})(x))

    first, second = (torch.func.grad(lambda x, of=of: loss(of)(x)) for of in (route, reference.route))
    torch.testing.assert_close(torch.vmap(first)(x), torch.stack([second(each) for each in x]), rtol=1e-4, atol=1e-5)
    jacobian = torch.vmap(torch.func.jacrev(lambda x: route(x, K).weights))(x)
    wanted = [torch.func.jacrev(lambda x: reference.route(x, K).weights)(each) for each in x]
    torch.testing.assert_close(jacobian, torch.stack(wanted), rtol=1e-4, atol=1e-5)

    leaf = x.requires_grad_()
    of_all = (
        torch.vmap(call(route, ("logits",), {}))(leaf),
        looped(call(reference.route, ("logits",), {}), (leaf,), (0,)),
    )
    twice = []
    for found in of_all:
        (dx,) = torch.autograd.grad(weighted(found), leaf, create_graph=True)
        twice.append(torch.autograd.grad(dx.square().sum(), leaf)[0])
    torch.testing.assert_close(*twice, rtol=1e-4, atol=1e-4)


@kernels
def test_many_gradients_take_one_launch(ran, device):
    """The gradient's own rule: what comes back is batched, and the rows are not."""
    (x,) = tensors_of({"logits": None}, device)
    leaf = x.requires_grad_()
    found = torch.vmap(call(route, ("logits",), {}))(leaf[None])
    weights = torch.randn(2, 1, generator=torch.Generator().manual_seed(4)).to(device)
    for name in ("aux_loss", "z_loss"):
        ran.clear()
        ours = torch.vmap(lambda d, y=found[name]: torch.autograd.grad(y, leaf, d, retain_graph=True)[0])(weights)
        assert ran == ["backward"]
        wanted = [torch.autograd.grad(found[name], leaf, d, retain_graph=True)[0] for d in weights]
        torch.testing.assert_close(ours, torch.stack(wanted))


@kernels
@pytest.mark.parametrize("of_batch", [True, False], ids=["vmap", "rows"])
def test_within_compiled_code(of_batch, device):
    """One operator, compiled once for any number of rows and any batch."""
    torch._dynamo.reset()
    options, dims = CASES["sequences"]
    one, graphs = call(route, dims, options), []
    given = torch.vmap(one, (0, 1)) if of_batch else lambda x, mask: one(x, mask.T)

    def backend(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if "fused_softmax" in str(node.target)])
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    function = torch.compile(lambda *tensors: given(*tensors), backend=backend, fullgraph=True, dynamic=True)
    x, mask = tensors_of(dims, device)
    counts = []
    for n in (BATCH, BATCH + 2, BATCH + 1):
        leaf, of_leaf = x.repeat(2, 1, 1)[:n].requires_grad_(), mask.repeat(1, 2)[:, :n]
        found, wanted = function(leaf, of_leaf), given(leaf, of_leaf)
        close(found, wanted)
        close_gradients(found, wanted, leaf)
        counts.append(len(graphs))
    assert graphs[0] == ["fused_softmax.route.default"]
    assert counts[0] == counts[-1]
