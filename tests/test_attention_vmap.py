"""vmap of attention, held to a Python loop: what is batched, nested, differentiated, and how often kernels run."""

import os
from functools import partial

import pytest
import torch
from attention_cases import tensors

import fused_softmax
from fused_softmax.core.route import Route
from fused_softmax.ops.attention import attention as attention_ops
from fused_softmax.ops.attention import operators
from fused_softmax.ops.attention import operators as attention_rules
from fused_softmax.ops.attention import reference as reference_attention

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
BATCH, HEADS, QUERIES, KEYS, DIM = 2, 2, 4, 5, 4
SHAPES = {
    "query": (1, HEADS, QUERIES, DIM), "key": (1, HEADS, KEYS, DIM), "value": (1, HEADS, KEYS, DIM),
    "attn_mask": (QUERIES, KEYS), "bias": (HEADS, 1, KEYS), "sinks": (HEADS,), "alibi_slopes": (HEADS,),
}  # fmt: skip
# By name, the dim of the batch: which arguments a call has, and which of these are batched.
CASES = {
    "query, key and value": {"query": 0, "key": 0, "value": 0},
    "query": {"query": 2},
    "keys in other dims": {"key": 1, "value": -1, "bias": None},
    "mask": {"attn_mask": 0, "bias": None},
    "bias": {"query": 0, "attn_mask": None, "bias": 1},
    "mask and bias": {"attn_mask": 2, "bias": 3},
    "beside sinks and slopes": {"query": 0, "sinks": None, "alibi_slopes": None},
    "slopes": {"query": 0, "alibi_slopes": 1},
    "sinks": {"query": 1, "bias": None, "sinks": 0},
    "all": {"query": 0, "key": 1, "value": 2, "attn_mask": 1, "bias": 0, "sinks": 1, "alibi_slopes": 0},
}  # fmt: skip


kernels = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="kernels run on a GPU or interpreted"
)


@pytest.fixture(params=["torch", "operator"])
def way(request, monkeypatch):
    """torch's operations, or the operators' rules on a device without kernels: of many cases both take little time."""
    real = attention_ops.route_of

    def route_of(*tensors, **options):
        found = real(*tensors, **options)
        return found if request.param == "operator" and found is not Route.KERNEL else ways[request.param]

    ways = {"torch": Route.COMPOSED, "operator": Route.OPERATOR}
    monkeypatch.setattr(attention_ops, "route_of", route_of)
    monkeypatch.setattr(attention_rules, "on_device", lambda tensor: False)
    return request.param


@pytest.fixture
def ran(monkeypatch):
    """The passes that were prepared and run by kernels."""
    calls = []
    places = (operators, "prepare_forward"), (attention_ops, "prepare_forward"), (attention_ops, "backward")
    for module, name in places:
        real = getattr(module, name)

        def run(*given, _real=real, _name=name, **options):
            calls.append(_name)
            return _real(*given, **options)

        monkeypatch.setattr(module, name, run)
    return calls


def arguments_of(case, device):
    """(names, tensors, in_dims) of a case; slopes are not differentiated."""
    names = [
        "query",
        "key",
        "value",
        *[each for each in SHAPES if each in case and each not in ("query", "key", "value")],
    ]
    in_dims = [case.get(name) for name in names]
    shapes = []
    for name, at in zip(names, in_dims, strict=True):
        shape = list(SHAPES[name])
        if at is not None:
            shape.insert(at % (len(shape) + 1), BATCH)
        shapes.append(shape)
    made = [each.to(device) for each in tensors(*shapes)]
    made = [each.abs() if name == "alibi_slopes" else each for name, each in zip(names, made, strict=True)]
    return names, made, tuple(in_dims)


def call(names, of=fused_softmax.attention, **options):
    def function(*given):
        found = of(**dict(zip(names, given, strict=True)), return_lse=True, **options)
        return found.output, found.lse

    return function


def exact(names, **options):
    return call(names, reference_attention.attention, arithmetic=torch.float32, **options)


def looped(function, given, in_dims):
    each = [
        function(*[t if at is None else t.select(at, i) for t, at in zip(given, in_dims, strict=True)])
        for i in range(BATCH)
    ]
    return tuple(torch.stack(results) for results in zip(*each, strict=True))


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_a_loops(case, way, device):
    names, given, in_dims = arguments_of(CASES[case], device)
    leaves = [each.requires_grad_() for name, each in zip(names, given, strict=True) if name != "alibi_slopes"]
    found = torch.vmap(call(names), in_dims)(*given)
    expected = looped(exact(names), given, in_dims)
    close(found, expected)
    weights = tensors(*[each.shape for each in expected], seed=7)
    weights = [each.to(device) for each in weights]
    close(torch.autograd.grad(found, leaves, weights), torch.autograd.grad(expected, leaves, weights))


@pytest.mark.parametrize("case", ["query", "mask and bias", "sinks"])
def test_gradients_of_each_one(case, way, device):
    """vmap over grad: of what is not batched, too."""
    names, given, in_dims = arguments_of(CASES[case], device)

    bounds = {"is_causal": True, "causal_align": "bottom_right"} if case == "query" else {}

    def gradient_of(function):
        def loss(*given):
            output, lse = function(*given)
            return output.square().sum() + lse.sum()

        return torch.func.grad(loss, tuple(range(len(given))))

    found = torch.vmap(gradient_of(call(names, **bounds)), in_dims)(*given)
    close(found, looped(gradient_of(exact(names, **bounds)), given, in_dims))


@pytest.mark.parametrize("case", ["query", "mask", "beside sinks and slopes", "all"])
def test_many_gradients_of_one_call(case, way, device):
    """The gradient's own rule: doutput is batched, and perhaps nothing else."""
    names, given, _ = arguments_of(dict.fromkeys(CASES[case]), device)
    leaves = [each.requires_grad_() for name, each in zip(names, given, strict=True) if name != "alibi_slopes"]
    results, expected = call(names)(*given), exact(names)(*given)
    weights = [each.to(device) for each in tensors(*[(BATCH, *each.shape) for each in results], seed=7)]

    def gradient(results, *weights):
        return torch.autograd.grad(results, leaves, weights, retain_graph=True)

    expected = looped(partial(gradient, expected), weights, (0, 0))
    close(torch.vmap(partial(gradient, results))(*weights), expected)
    close(torch.autograd.grad(results, leaves, weights, is_grads_batched=True), expected)


def test_nested(way, device):
    """A batch of queries over a batch of biases, each with its dim elsewhere."""
    query, key, value, bias = (
        each.to(device).requires_grad_()
        for each in tensors((3, 2, QUERIES, DIM), (2, KEYS, DIM), (2, KEYS, DIM), (2, 2, 1, KEYS))
    )

    def one(query, bias):
        return fused_softmax.attention(query, key, value, bias=bias)

    found = torch.vmap(torch.vmap(one, (0, None), 1), (None, 1), -1)(query, bias)
    expected = reference_attention.attention(
        query[..., None, :, :, :], key, value, bias=bias.movedim(1, 0), arithmetic=torch.float32
    ).permute(2, 0, 3, 4, 1)
    assert found.shape == (2, 3, QUERIES, DIM, 2)
    close(found, expected)
    leaves, do = (query, key, value, bias), torch.randn(expected.shape, device=device)
    close(torch.autograd.grad(found, leaves, do), torch.autograd.grad(expected, leaves, do))


def test_a_batch_without_heads_and_heads_that_share_keys(way, device):
    query, key, value = (each.to(device) for each in tensors((3, 4, 4), (3, 5, 4), (5, 4)))
    found = torch.vmap(fused_softmax.attention, (0, 0, None))(query, key, value)
    close(found, torch.stack([fused_softmax.attention(q, k, value) for q, k in zip(query, key, strict=True)]))
    query, key = (each.to(device) for each in tensors((3, 4, 4, 4), (3, 2, 5, 4)))

    def shared(query, key):
        return fused_softmax.attention(query, key, key, enable_gqa=True, window=(2, 1))

    close(torch.vmap(shared)(query, key), torch.stack([shared(q, k) for q, k in zip(query, key, strict=True)]))


def test_stats_and_slopes_of_every_row(way, device):
    _, given, _ = arguments_of({"query": 0}, device)
    slopes = torch.rand(1, HEADS, device=device)
    every = ("entropy", "row_max", "column_sums")

    def one(query, stats):
        found = fused_softmax.attention(query, *given[1:], alibi_slopes=slopes, return_stats=stats)
        return found.output, found.stats

    for stats in (every, every[:1]):
        found = torch.vmap(lambda query, stats=stats: one(query, stats))(given[0])
        singles = [one(query, stats) for query in given[0]]
        close(found[0], torch.stack([each for each, _ in singles]))
        for name in stats:
            close(found[1][name], torch.stack([each[name] for _, each in singles]))


def test_a_gradient_of_slopes(way, device):
    names, given, in_dims = arguments_of(CASES["slopes"], device)
    slopes = given[-1].requires_grad_()
    found, expected = torch.vmap(call(names), in_dims)(*given), looped(exact(names), given, in_dims)
    close(torch.autograd.grad(found[0].sum(), slopes), torch.autograd.grad(expected[0].sum(), slopes))


@kernels
@pytest.mark.parametrize(("case", "launches"), [("bias", 1), ("mask", 1), ("sinks", BATCH)])
def test_kernels_run_once_for_all(case, launches, ran, device):
    """But for sinks that differ."""
    names, given, in_dims = arguments_of(CASES[case], device)
    leaves = [each.requires_grad_() for each in given]
    (output, _), (expected, _) = torch.vmap(call(names), in_dims)(*given), looped(exact(names), given, in_dims)
    assert ran == ["prepare_forward"] * launches
    close(output, expected)
    ran.clear()
    found = torch.autograd.grad(output.square().sum(), leaves)
    assert ran == ["backward"] * launches
    close(found, torch.autograd.grad(expected.square().sum(), leaves))


@kernels
def test_many_gradients_take_one_launch(ran, device):
    names, given, _ = arguments_of(dict.fromkeys(CASES["mask and bias"]), device)
    leaves = [each.requires_grad_() for each in given]
    found, expected = (
        torch.vmap(lambda do, y=y: torch.autograd.grad(y, leaves, do, retain_graph=True))(
            torch.ones(BATCH, *y.shape, device=device)
        )
        for y in (function(names)(*given)[0] for function in (call, exact))
    )
    assert ran == ["prepare_forward", "backward"]
    close(found, expected)


@kernels
def test_a_mask_for_all_is_not_expanded(monkeypatch, device):
    names, given, in_dims = arguments_of(CASES["bias"], device)
    seen = []
    real = attention_rules.Inputs
    monkeypatch.setattr(attention_rules, "Inputs", lambda *given: seen.append(given) or real(*given))
    torch.vmap(call(names), in_dims)(*given)
    assert [tuple(each.shape) for each in seen[-1][3:5]] == [(QUERIES, KEYS), (BATCH, 1, HEADS, 1, KEYS)]
