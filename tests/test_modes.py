"""A default device, Parameters and their like keep the kernels; what does not says so once, with the reason."""

import ast
import contextlib
import warnings
from itertools import product
from pathlib import Path

import pytest
import torch
from conftest import peaked
from torch.overrides import TorchFunctionMode

import fused_softmax
from fused_softmax import nn
from fused_softmax.core import calls, route

SOURCE = Path(fused_softmax.__file__).parent
FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand",
    "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip
# These run in processes of their own, and make their inputs on a CPU or a GPU as they say.
INSTRUMENTS = {"bench", "classic", "profile", "trace", "cli.py"}


@contextlib.contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def within_both(device):
    with default_device("meta"), torch.device(device), torch.device("meta"):
        yield


MODES = {
    "set_default_device": default_device,
    "a context": torch.device,
    "both": within_both,
    "inference_mode": lambda _: torch.inference_mode(),
    "no_grad": lambda _: torch.no_grad(),
}


def inputs(device):
    generator = torch.Generator().manual_seed(0)
    x, w = peaked(12, 70).to(device), peaked(40, 70, seed=1).to(device)
    return {
        "x": x,
        "w": w / 8,
        "target": torch.randint(40, (12,), generator=generator).to(device),
        "q": peaked(24, 16, seed=2).view(1, 2, 12, 16).to(device) / 4,
        "mask": (torch.rand(12, 12, generator=generator) < 0.5).to(device).fill_diagonal_(True),
        "penalized": torch.randint(70, (12, 3), generator=generator).to(device),
    }


CALLS = {
    "softmax": lambda i: fused_softmax.softmax(i["x"]),
    "softmax of columns": lambda i: fused_softmax.softmax(i["x"], 0, scale=0.5),
    "softmax, causal with a sink": lambda i: fused_softmax.softmax(i["x"], is_causal=True, sink=1.0),
    "log_softmax": lambda i: fused_softmax.log_softmax(i["x"]),
    "logsumexp": lambda i: fused_softmax.logsumexp(i["x"], 1),
    "logsumexp of both dims": lambda i: fused_softmax.logsumexp(i["x"], (0, 1)),
    "cross_entropy": lambda i: fused_softmax.cross_entropy(i["x"], i["target"]),
    "cross_entropy, none": lambda i: fused_softmax.cross_entropy(i["x"], i["target"], reduction="none"),
    "cross_entropy, weighted": lambda i: fused_softmax.cross_entropy(
        i["x"], i["target"], i["x"][0].detach().abs(), label_smoothing=0.1, return_token_stats=True
    ).loss,
    "linear_cross_entropy": lambda i: fused_softmax.linear_cross_entropy(i["x"], i["w"], i["target"]),
    "linear_cross_entropy, chunks": lambda i: fused_softmax.linear_cross_entropy(
        i["x"], i["w"], i["target"], chunk_size=5, return_lse=True, skip_ignored=True, ignore_index=3
    ).loss,
    "log_prob": lambda i: fused_softmax.log_prob(
        i["x"], i["target"], temperature=i["x"].detach()[:, 0].abs(), return_entropy=True
    ).entropy,
    "divergence": lambda i: fused_softmax.divergence(
        i["x"], i["w"][:12].detach(), kind="jsd", temperature=i["x"].detach()[:, 0].abs(),
        weight=i["w"].detach()[:12, 0],
    ),
    "attention": lambda i: fused_softmax.attention(i["q"], i["q"], i["q"]),
    "attention, masked": lambda i: fused_softmax.attention(i["q"], i["q"], i["q"], i["mask"], softcap=5.0),
    "attention, one query": lambda i: fused_softmax.attention(i["q"][:, :, -1:], i["q"], i["q"]),
    "attention, statistics": lambda i: fused_softmax.attention(
        i["q"], i["q"], i["q"], return_lse=True, return_stats=("entropy", "column_sums")
    ).output,
    "segment_softmax": lambda i: fused_softmax.segment_softmax(i["x"], index=i["target"]),
    "segment_logsumexp": lambda i: fused_softmax.segment_logsumexp(i["x"], index=i["target"], n_segments=40),
    "nn.Softmax": lambda i: nn.Softmax(-1)(i["x"]),
}  # fmt: skip
SAMPLES = {
    "sample": lambda i: fused_softmax.sample(i["x"], 0.7, seed=1).tokens,
    "sample, filters": lambda i: (
        fused_softmax.sample(
            i["x"], 0.7, 5, 0.9, seed=1, top_logprobs=3, return_logprobs="processed", return_kept=True
        ).top_logprobs
    ),
    "sample, greedy": lambda i: (
        fused_softmax.sample(i["x"], 0.0, seed=1, return_logprobs="raw", top_logprobs=30).top_tokens
    ),
    "speculative_sample": lambda i: (
        fused_softmax.speculative_sample(i["x"].view(4, 3, 70), i["penalized"][:4, :2], seed=2).tokens
    ),
    "penalize": lambda i: fused_softmax.penalize(i["x"], i["penalized"], 1.2, 0.1, 0.3),
    "route": lambda i: fused_softmax.route(i["x"], 4, n_groups=7, groups_kept=3, dense=True).dense,
    "route, losses": lambda i: fused_softmax.route(i["x"], 4, return_aux_loss=True, sequence_length=6).aux_loss,
    "top_p_mask_logits": lambda i: fused_softmax.top_p_mask_logits(i["x"], 0.8),
    "top_k_renorm_probs": lambda i: fused_softmax.top_k_renorm_probs(i["x"].softmax(-1), 5),
}
COMPOSED = {"top_p_mask_logits", "top_k_renorm_probs"}


def routes_of(name, given):
    """speculative_sample is a call of sample in one of its own; penalties with a gradient are torch's operations."""
    if name == "speculative_sample":
        return {"composed", "kernel"}
    differentiated = name == "penalize" and given["x"].requires_grad
    return {"composed" if name in COMPOSED or differentiated else "kernel"}


def with_gradients(call, given):
    leaves = {name: each.detach().requires_grad_(each.is_floating_point()) for name, each in given.items()}
    y = call(leaves)
    if y.requires_grad:
        y.backward(
            torch.ones_like(y) if y.ndim == 0 else torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape)
        )
    return [y.detach(), *[each.grad for each in leaves.values()]]


def assert_same(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.device == theirs.device
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *[(name, "both") for name in (*CALLS, *SAMPLES)],
        *product(["softmax", "cross_entropy", "linear_cross_entropy", "sample"], ["set_default_device", "a context"]),
    ],
)
def test_a_default_device_keeps_kernels_and_results(name, mode, device):
    call, given = (CALLS | SAMPLES)[name], inputs(device)
    wanted = with_gradients(call, given)
    calls.forget()
    with MODES[mode]("meta"):  # kernels' own memory is where the input is, not where factories allocate
        first = with_gradients(call, given)
        second = with_gradients(call, given)  # by the calls that the first one kept
        with fused_softmax.explain() as explained:
            call(given)
    assert_same(first, wanted)
    assert_same(second, wanted)
    assert {each.route for each in explained} == routes_of(name, given)


@pytest.mark.parametrize("name", ["softmax", "cross_entropy", "logsumexp"])
def test_under_a_default_device_a_kept_call_is_found(name, device, monkeypatch):
    given = inputs(device)
    CALLS[name](given)

    def none(*_, **__):
        raise AssertionError("a kept call decides nothing")

    monkeypatch.setattr(route, "decide", none)
    with torch.device("meta"):
        CALLS[name](given)
    with torch.device(device), torch.autograd.forward_ad.dual_level(), pytest.raises(AssertionError, match="decides"):
        CALLS[name](given)


@pytest.mark.parametrize("order", ["above", "below", "alone"])
@pytest.mark.parametrize("kept", [False, True])
def test_another_mode_beside_a_default_device_is_seen(order, kept, device):
    class Listener(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    seen, x = [], inputs(device)["x"]
    wanted = torch.softmax(x, -1)
    if kept:
        fused_softmax.softmax(x)
    modes = {"above": [torch.device("cpu"), Listener()], "below": [Listener(), torch.device("cpu")]}
    with contextlib.ExitStack() as stack:
        for mode in modes.get(order, [Listener()]):
            stack.enter_context(mode)
        y = fused_softmax.softmax(x)
        called = list(seen)
        with torch._C.DisableTorchFunction(), fused_softmax.explain() as explained:  # as torch's functions have it
            fused_softmax.softmax(x)
    assert torch.softmax in called
    torch.testing.assert_close(y, wanted)
    assert [each.route for each in explained] == ["kernel"]


def test_a_dispatch_mode_beside_a_default_device_sees_the_operator(device):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Listener(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    seen, x = [], inputs(device)["x"]
    with torch.device("cpu"), Listener():
        y = fused_softmax.softmax(x)
    assert "fused_softmax.softmax.default" in seen
    assert_same([y], [fused_softmax.softmax(x)])


class Weights(torch.nn.Parameter):
    """A Parameter that knows more than a Parameter, as those of inference engines do."""


class Bare(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl


KINDS = {
    "Parameter": torch.nn.Parameter,
    "a Parameter without a gradient": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "a subclass of Parameter": Weights,
    "Buffer": torch.nn.Buffer,
    "a subclass that adds no rule": lambda x: x.as_subclass(Bare),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *[(name, "Parameter") for name in (*CALLS, *SAMPLES)],
        *product(["softmax", "linear_cross_entropy", "attention"], [each for each in KINDS if each != "Parameter"]),
    ],
)
def test_parameters_and_buffers_keep_the_kernels(name, kind, device):
    call, given = (CALLS | SAMPLES)[name], inputs(device)
    wanted = call(given)
    made = {key: KINDS[kind](each) if each.is_floating_point() else each for key, each in given.items()}
    for _ in range(2):
        found = call(made)
        if name in SAMPLES:  # with a gradient wanted, torch's operations round as they do
            torch.testing.assert_close(found.detach(), wanted, rtol=1e-6, atol=1e-6)
        else:
            assert_same([found.detach()], [wanted])
        assert type(found) is torch.Tensor
    with fused_softmax.explain() as explained:
        call(made)
    assert {each.route for each in explained} == routes_of(name, made)


def test_a_parameters_gradient(device):
    x = inputs(device)["x"]
    leaf, weights = x.clone().requires_grad_(), torch.nn.Parameter(x.clone())
    for each in (leaf, weights):
        for _ in range(2):
            fused_softmax.softmax(each).square().sum().backward()
    assert_same([weights.grad], [leaf.grad])
    other = torch.nn.Parameter(peaked(12, 70, seed=5).to(device))
    wanted = fused_softmax.softmax(other.detach())
    torch.utils.swap_tensors(weights, other)
    assert_same([fused_softmax.softmax(weights).detach()], [wanted])


def test_a_subclass_with_rules_of_its_own_gets_its_say(device):
    class Rules(torch.nn.Parameter):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(function)
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))

    seen = []
    fused_softmax.softmax(Rules(inputs(device)["x"]))
    assert torch.softmax in seen


@pytest.mark.parametrize("mode", ["inference_mode", "no_grad"])
def test_modes_of_autograd_keep_the_kernels(mode, device):
    given = inputs(device)
    wanted = CALLS["softmax"](given)
    with MODES[mode](device), fused_softmax.explain() as explained:
        found = CALLS["softmax"](given)
    assert_same([found], [wanted])
    assert [each.route for each in explained] == ["kernel"]


@pytest.mark.parametrize("name", ["softmax", "cross_entropy", "linear_cross_entropy", "attention"])
@pytest.mark.parametrize("mode", ["set_default_device", "a context"])
def test_compiled_code_under_a_default_device(name, mode, device):
    torch._dynamo.reset()
    given = inputs(device)
    wanted = with_gradients(CALLS[name], given)
    compiled = torch.compile(CALLS[name], backend="aot_eager", fullgraph=True)
    with MODES[mode](device):
        found = with_gradients(compiled, given)
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["softmax", "attention"])
def test_vmap_under_a_default_device(name, device):
    given = inputs(device)
    many = torch.stack([given["x"], given["x"] * 2]) if name == "softmax" else torch.stack([given["q"], given["q"] * 2])
    one = fused_softmax.softmax if name == "softmax" else lambda q: fused_softmax.attention(q, q, q)
    with torch.device("meta"), fused_softmax.explain() as explained:
        found = torch.func.vmap(one)(many)
    torch.testing.assert_close(found, torch.stack([one(each) for each in many]))
    assert {each.route for each in explained} == {"operator"}


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "cross_entropy"])
def test_torchs_names_under_enable_and_a_default_device(name, device):
    functional, given = torch.nn.functional, inputs(device)
    more = (given["target"],) if name == "cross_entropy" else (-1,)
    leaf = given["x"].clone().requires_grad_()
    with fused_softmax.enabled(), torch.device("meta"), fused_softmax.explain() as explained:
        y = getattr(functional, name)(leaf, *more)
        y.sum().backward()
    assert {each.route for each in explained} == {"kernel"}
    torch.testing.assert_close(y, getattr(functional, name)(given["x"], *more))


def sharded(group, x, target):
    with torch.device("meta"):
        y = fused_softmax.softmax(x, group=group)
        x = x.requires_grad_()
        loss = fused_softmax.cross_entropy(x, target, group=group)
    loss.backward()
    return y, loss.detach(), x.grad


def test_shards_under_a_default_device(ranks):
    x, target = peaked(6, 40).chunk(2, 1), torch.tensor([0, 39, 20, 19, 5, 30])
    found = ranks.values(2, sharded_here, [each.clone() for each in x], target)
    whole = torch.cat(x, 1).requires_grad_()
    torch.testing.assert_close(torch.cat([each[0] for each in found], 1), torch.softmax(whole.detach(), -1))
    loss = torch.nn.functional.cross_entropy(whole, target)
    (dx,) = torch.autograd.grad(loss, whole)
    for each in found:
        torch.testing.assert_close(each[1], loss.detach())
    torch.testing.assert_close(torch.cat([each[2] for each in found], 1), dx)


def sharded_here(group, shards, target):
    return sharded(group, shards[torch.distributed.get_rank(group)], target)


def test_every_factory_function_says_its_device():
    """Under a default device one that does not would allocate there: on another GPU, on "meta" or on the CPU."""
    silent = []
    for path in sorted(SOURCE.rglob("*.py")):
        if path.relative_to(SOURCE).parts[0] in INSTRUMENTS or "kernels" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            function = node.func if isinstance(node, ast.Call) else None
            if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
                factory = function.value.id == "torch" and function.attr in FACTORIES
                if factory and not any(keyword.arg in ("device", None) for keyword in node.keywords):
                    silent.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert silent == []


# What is composed of torch's operations says so, where it costs memory.


@pytest.fixture
def said(monkeypatch):
    monkeypatch.setattr(route, "_said", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lambda: [str(each.message) for each in caught if "torch's operations compute" in str(each.message)]


def test_a_mode_that_costs_memory_is_named_once(said, device):
    class Tracer(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    given = inputs(device)
    with Tracer():
        for _ in range(3):
            for name in ("softmax", "cross_entropy", "linear_cross_entropy", "attention"):
                CALLS[name](given)
    assert said() == [
        f"fused_softmax.{name}: torch's operations compute this call, with {what} in memory, since Tracer, a "
        "TorchFunctionMode, watches the call; call it outside of the mode"
        for name, what in (("linear_cross_entropy", "all logits"), ("attention", "all scores"))
    ]


REASONS = {
    "float64": (lambda i: fused_softmax.attention(*[i["q"].double()] * 3), "no kernel has torch.float64"),
    "probabilities": (
        lambda i: fused_softmax.linear_cross_entropy(
            i["x"], i["w"], i["w"][:12, :40].softmax(-1), return_token_stats=True
        ),
        "targets are probabilities, and token statistics are wanted",
    ),
    "a subclass": (
        lambda i: fused_softmax.attention(i["q"], i["q"].as_subclass(type("Mine", (torch.Tensor,), {})), i["q"]),
        "an argument is a Mine, not a plain tensor; give plain tensors",
    ),
    "torch.func.grad": (
        lambda i: torch.func.grad(lambda q: fused_softmax.attention(q, q, q).sum())(i["q"]),
        "torch.func.grad, jvp or forward-mode AD differentiates it, for which there are no rules",
    ),
    "vmap": (
        lambda i: torch.func.vmap(lambda x: fused_softmax.linear_cross_entropy(x, i["w"], i["target"]))(i["x"][None]),
        "torch.func transforms the call, and the operator has no rule for it",
    ),
    "jvp": (
        lambda i: torch.func.jvp(lambda q: fused_softmax.attention(q, q, q), (i["q"],), (i["q"],)),
        "forward-mode AD",
    ),
    "slopes": (
        lambda i: fused_softmax.attention(
            i["q"], i["q"], i["q"], alibi_slopes=torch.ones(2, device=i["q"].device, requires_grad=True)
        ),
        "alibi_slopes requires grad",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_costs_memory_gives_its_reason(name, said, device):
    call, reason = REASONS[name]
    given = inputs(device)
    for _ in range(2):
        call(given)
    (message,) = said()
    assert reason in message


def test_compiled_code_warns_as_it_is_traced(said, device):
    torch._dynamo.reset()
    given = inputs(device)
    torch.compile(REASONS["float64"][0], backend="eager", fullgraph=True)(given)
    assert [each for each in said() if "no kernel has torch.float64" in each]


def test_nothing_is_said_where_there_are_no_kernels_or_no_memory_is_taken(said, device, monkeypatch):
    given = inputs(device)
    empty = {name: each[:0] for name, each in given.items()} | {"w": given["w"]}
    fused_softmax.linear_cross_entropy(empty["x"], empty["w"], empty["target"])
    CALLS["linear_cross_entropy"](given)
    CALLS["attention"](given)
    monkeypatch.setattr(route, "INTERPRET", False)
    on_cpu = inputs("cpu")
    for call in (*CALLS.values(), *[each for each, _ in REASONS.values()]):
        call(on_cpu)
    assert said() == []
