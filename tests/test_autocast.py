"""torch.autocast: results and gradients have torch's dtypes, and no error beyond torch's, on every way to a call."""

import os
import re
import warnings
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from autocasts import BF16, CALLS, CLASSES, FP16, FP32, FP64, OPTIONS, attention, autocast, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from products import one_in
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import fused_softmax
from fused_softmax import nn
from fused_softmax.core import calls
from fused_softmax.ops import autocast as rules
from fused_softmax.ops.attention import operators as attention_rules
from fused_softmax.ops.losses import operators as loss_rules

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
DTYPES, CASTS = (FP32, BF16, FP16, FP64), (None, BF16, FP16)
GRADIENTS = "xhlbqkv"


def dtypes_of(call, g):
    """The dtypes of a result, and of the gradients that it has."""
    y = call(g)
    if not y.requires_grad:
        return (y.dtype,)
    found = torch.autograd.grad(y.sum(), [g[name] for name in GRADIENTS], allow_unused=True)
    return y.dtype, *[None if each is None else each.dtype for each in found]


def needs_a_gpu(name, device, dtype):
    """Whether indexing, which asks the device of a tensor without data too, is in the way: in composed attention."""
    return device == "cuda" and not torch.cuda.is_available() and name.startswith("attention") and dtype == FP64


@pytest.mark.parametrize("given", DTYPES, ids=str)
@pytest.mark.parametrize("cast", CASTS, ids=str)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_results_and_gradients_have_torchs_dtypes(device, cast, given):
    """Of tensors without data, which need no GPU to be on one: torch's own rules of autocast are asked."""
    with FakeTensorMode():
        g = tensors(device, given, fill=False)
        for name, call in CALLS.items():
            if needs_a_gpu(name, device, given):
                continue
            with autocast(device, cast):
                torchs, ours = (dtypes_of(partial(call, by_this_package), g) for by_this_package in (False, True))
            assert ours == torchs, name


@pytest.mark.parametrize("given", DTYPES, ids=str)
@pytest.mark.parametrize("cast", CASTS, ids=str)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_options_that_torch_lacks_change_no_dtype(device, cast, given):
    with FakeTensorMode():
        g = tensors(device, given, fill=False)
        for name, several in OPTIONS.items():
            if needs_a_gpu(name, device, given):
                continue
            with autocast(device, cast):
                torchs = CALLS[name](False, g).dtype
                assert [call(g).dtype for call in several] == [torchs] * len(several), name


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_out_keeps_its_dtype_as_torchs_does(device):
    """torch casts nothing for a call that says where to write."""
    with FakeTensorMode():
        x = torch.empty(3, 8, device=device, dtype=BF16)
        for name in ("softmax", "log_softmax", "logsumexp"):
            shape = (3,) if name == "logsumexp" else (3, 8)
            for of in (torch, fused_softmax):
                out = torch.empty(shape, device=device, dtype=BF16)
                with autocast(device, BF16):
                    assert getattr(of, name)(x, -1, out=out) is out
                assert out.dtype == BF16


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("logits", DTYPES, ids=str)
@pytest.mark.parametrize("probabilities", DTYPES, ids=str)
@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_a_loss_of_probabilities_is_as_wide_as_they_are(device, logits, probabilities, cast):
    with FakeTensorMode(), autocast(device, cast):
        x, p = (torch.empty(4, 8, device=device, dtype=dtype) for dtype in (logits, probabilities))
        h, w = torch.empty(4, 3, device=device, dtype=logits), torch.empty(8, 3, device=device, dtype=logits)
        assert fused_softmax.cross_entropy(x, p).dtype == F.cross_entropy(x, p).dtype
        assert fused_softmax.cross_entropy(x, p, dtype=FP16).dtype == FP16
        of_layer = F.cross_entropy(F.linear(h, w), p).dtype
        assert fused_softmax.linear_cross_entropy(h, w, p).dtype == of_layer


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_mix_of_dtypes_that_autocast_makes_one_is_taken(device):
    """As of rotary embeddings, which leave query and key wider than the value."""
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 2, 5, 8, device=device, dtype=dtype) for dtype in (FP32, FP16, BF16))
        h, w = torch.empty(4, 3, device=device, dtype=FP16), torch.empty(8, 3, device=device)
        t = torch.zeros(4, device=device, dtype=torch.int64)
        with autocast(device, BF16):
            assert fused_softmax.attention(q, k, v).dtype == F.scaled_dot_product_attention(q, k, v).dtype == BF16
            assert fused_softmax.linear_cross_entropy(h, w, t).dtype == FP32
            with pytest.raises(RuntimeError, match="value must have the query's dtype"):
                fused_softmax.attention(q, k, v.double())
            with pytest.raises(RuntimeError, match="linear_weight must be of the input's dtype"):
                fused_softmax.linear_cross_entropy(h, w.double(), t)
        with pytest.raises(RuntimeError, match="key must have the query's dtype"):
            fused_softmax.attention(q, k, v)


def test_the_table_has_every_function():
    functions = {name for name in fused_softmax.__all__ if name.islower() and name != "nn"}
    assert set(rules.TABLE) == functions - {
        "linear_log_prob", "linear_divergence",  # which do as the linear loss does
        "log_prob", "divergence",  # which leave all as it is
        "enable", "disable", "enabled", "explain", "warmup",
    }  # fmt: skip


def test_the_docs_say_what_the_table_does():
    said = {
        (False, None): "nothing", (False, FP32): "float32 result",
        (True, None): "inputs and result in autocast's dtype",
        (True, FP32): "linear layer in autocast's dtype, float32 loss",
    }  # fmt: skip
    text = (Path(__file__).parents[1] / "docs/train.md").read_text()
    section = text.partition("## Under autocast")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    found = {name: tuple(cells) for first, *cells in rows[2:] for name in re.findall("`([a-z_]+)`", first)}
    nothing = rules.Rule()
    expected = {
        name: tuple(
            said[used.lowers, used.result] for used in (rule if d in rule.devices else nothing for d in ("cuda", "cpu"))
        )
        for name, rule in rules.TABLE.items()
    } | dict.fromkeys(("log_prob", "divergence"), ("nothing", "nothing"))  # whose results have dtypes of their own
    assert rows[0][1:] == ["on a GPU", "on a CPU"]
    assert found == expected


@pytest.mark.parametrize("name", rules.TABLE)
def test_autocast_of_another_device_does_nothing(name):
    x = torch.empty(2, 3)
    with autocast("cuda", BF16):
        assert rules.lowered_dtype(name, x) is None
        assert rules.result_dtype(name, x.half()) == FP16
    with autocast("cpu", BF16):
        on_meta = torch.empty(2, 3, device="meta", dtype=FP16)
        assert rules.lowered_dtype(name, on_meta) is None
        assert rules.result_dtype(name, on_meta) == FP16


# Values, of tensors that are there.

VALUES = [name for name in CALLS if not name.startswith("nn.")]


def results_of(call, g, device, cast):
    with autocast(device, cast):
        y = call(g)
    wanted = [g[name] for name in GRADIENTS]
    dy = torch.linspace(0.5, 1.5, y.numel(), dtype=FP64, device=y.device).view(y.shape).to(y.dtype)
    return [y.detach(), *[each for each in torch.autograd.grad(y, wanted, dy, allow_unused=True) if each is not None]]


def check_against_fp64(name, call, g, device, cast):
    """Dtypes are torch's, and errors no greater than torch's, a rounding of the result and one of the arithmetic."""
    exact = {key: each.detach().double() if each.is_floating_point() else each for key, each in g.items()}
    exact = {key: each.requires_grad_(g[key].requires_grad) for key, each in exact.items()}
    truth = results_of(lambda g: CALLS[name](False, g), exact, device, None)
    torchs = results_of(lambda g: CALLS[name](False, g), g, device, cast)
    found = results_of(call, g, device, cast)
    assert [each.dtype for each in found] == [each.dtype for each in torchs], name
    for ours, theirs, true in zip(found, torchs, truth, strict=True):
        size = true.abs().max()
        arithmetic = torch.finfo(FP64 if ours.dtype == FP64 else FP32).eps
        allowed = 1.2 * (theirs - true).abs().max() + 2 * torch.finfo(ours.dtype).eps * size
        allowed = allowed + 8 * arithmetic * size.clamp(min=1.0)
        if cast is not None and name.startswith(("attention", "linear")):  # torch may err less, by chance
            allowed = allowed + 2 * torch.finfo(cast).eps * size
        assert (ours - true).abs().max() <= allowed, name


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(VALUES), given=st.sampled_from(DTYPES), cast=st.sampled_from(CASTS),
    enabled=st.booleans(), by_torchs_name=st.booleans(),
)  # fmt: skip
def test_values_under_cpu_autocast_are_torchs(name, given, cast, enabled, by_torchs_name):
    """By this package's name, and by torch's under enable(), where it does something."""
    g = tensors("cpu", given)
    call = lambda g: CALLS[name](not by_torchs_name, g)  # noqa: E731
    if enabled or by_torchs_name:
        with fused_softmax.enabled(attention=True):
            check_against_fp64(name, call, g, "cpu", cast)
    else:
        check_against_fp64(name, call, g, "cpu", cast)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(("given", "cast"), [(FP32, BF16), (BF16, FP16)], ids=str)
def test_compiled_values_under_cpu_autocast_are_torchs(backend, given, cast):
    g = tensors("cpu", given)
    for name in ("logsumexp", "cross_entropy", "linear_cross_entropy", "attention"):
        torch._dynamo.reset()
        compiled = torch.compile(lambda g, name=name: CALLS[name](True, g), backend=backend, fullgraph=True)
        check_against_fp64(name, compiled, g, "cpu", cast)


@pytest.mark.parametrize("name", VALUES)
def test_a_nested_autocast_that_is_disabled_casts_nothing(name):
    g = tensors("cpu", FP32)
    plain = CALLS[name](True, g)
    with autocast("cpu", BF16), torch.autocast("cpu", enabled=False):
        nested = CALLS[name](True, g)
    assert nested.dtype == plain.dtype
    assert torch.equal(nested, plain)


@contextmanager
def as_on_a_gpu():
    """Of CPU tensors: autocast to bf16 has torch's rules of a GPU for what this package computes.

    There torch casts the operations that cross_entropy is composed of, and not cross_entropy itself.
    """
    through = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of an operator of torch's that is replaced
        through.impl("cross_entropy_loss", torch.library.fallthrough_kernel, "AutocastCPU")
    casts = {name: rule._replace(devices=("cpu",)) for name, rule in rules.TABLE.items() if rule != rules.Rule()}
    try:
        with mock.patch.dict(rules.TABLE, casts), autocast("cpu", BF16):
            yield
    finally:
        through._destroy()


@pytest.mark.skipif(not INTERPRETED, reason="of the kernels")
@pytest.mark.parametrize("given", DTYPES, ids=str)
def test_the_kernels_read_the_input_as_it_is_and_write_float32(given):
    """As softmax's kind does under CUDA autocast, of which a CPU knows nothing."""
    x = tensors("cpu", given)["x"]
    plain = x.detach()
    for name in ("softmax", "log_softmax", "logsumexp"):
        call = partial(getattr(fused_softmax, name), dim=-1)
        exact = getattr(torch, name)(plain.double(), dim=-1).to(FP64 if given == FP64 else FP32)
        with as_on_a_gpu():
            y, without = call(x), call(plain)
            out = torch.empty(exact.shape, dtype=given)
            assert call(plain, out=out) is out
        torch.testing.assert_close(y.detach(), exact, rtol=1e-5, atol=1e-6)
        assert torch.equal(without, y.detach())
        assert torch.equal(out, call(plain)), "out= is written as without autocast"
        assert torch.autograd.grad(y.sum(), x)[0].dtype == given


def over_ranks(group, given):
    """The dtypes of calls over a group, and of DTensors, each with its gradient's."""
    g = tensors("cpu", given)
    rank, n_ranks = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    of_rank = {name: g[name].detach().chunk(n_ranks, dim)[rank].contiguous() for name, dim in (("x", 1), ("l", 0))}
    of_rank = {name: each.requires_grad_() for name, each in of_rank.items()}
    x, w, h, t = of_rank["x"], of_rank["l"], g["h"].detach(), g["t"]
    mesh = init_device_mesh("cpu", (n_ranks,))
    placed = distribute_tensor(g["x"].detach(), mesh, [Shard(1)]).requires_grad_()
    layer = distribute_tensor(g["l"].detach(), mesh, [Shard(0)]).requires_grad_()
    features, targets = (distribute_tensor(each, mesh, [Replicate()]) for each in (h, t))
    calls_of = {
        "softmax": (lambda: fused_softmax.softmax(x, group=group), x),
        "log_softmax": (lambda: fused_softmax.log_softmax(x, group=group), x),
        "logsumexp": (lambda: fused_softmax.logsumexp(x, 1, group=group), x),
        "cross_entropy": (lambda: fused_softmax.cross_entropy(x, t, group=group), x),
        "linear_cross_entropy": (lambda: fused_softmax.linear_cross_entropy(h, w, t, group=group), w),
        "logsumexp of a DTensor": (lambda: fused_softmax.logsumexp(placed, 1), placed),
        "cross_entropy of a DTensor": (lambda: fused_softmax.cross_entropy(placed, t), placed),
        "linear_cross_entropy of a DTensor": (lambda: fused_softmax.linear_cross_entropy(features, layer, t), layer),
    }
    if INTERPRETED:
        calls_of["torch's cross_entropy of a DTensor"] = (lambda: F.cross_entropy(placed, targets), placed)
    found = {}
    with as_on_a_gpu(), fused_softmax.enabled():
        for name, (call, leaf) in calls_of.items():
            y = call()
            found[name] = y.dtype, torch.autograd.grad(y.sum(), leaf)[0].dtype
    return found


@pytest.mark.guard
@pytest.mark.parametrize("given", one_in(4, DTYPES), ids=str)
def test_over_ranks_results_have_the_same_dtypes(given, ranks):
    for found in ranks(2, over_ranks, given):
        assert isinstance(found, dict), found
        for name, dtypes in found.items():
            assert dtypes == (FP64 if given == FP64 else FP32, given), name


@pytest.mark.skipif(not INTERPRETED, reason="enable() is for CPU tensors only where the kernels are interpreted")
def test_torchs_cross_entropy_under_enable_where_autocast_has_not_cast_it():
    """On a GPU torch casts the operations that cross_entropy is composed of, and enable() takes it whole."""
    with as_on_a_gpu():
        for given in DTYPES:
            for reduction in ("none", "mean", "sum"):
                x = tensors("cpu", given)["x"]
                target = torch.arange(len(x))
                expected = FP64 if given == FP64 else FP32
                assert F.cross_entropy(x, target, reduction=reduction).dtype == expected
                with fused_softmax.enabled():
                    loss = F.cross_entropy(x, target, reduction=reduction)
                assert loss.dtype == expected
                exact = F.cross_entropy(x.double(), target, reduction=reduction).to(expected)
                torch.testing.assert_close(loss, exact, rtol=1e-5, atol=1e-5)
                assert torch.autograd.grad(loss.sum(), x)[0].dtype == given


# Autocast around what runs within.


@pytest.mark.skipif(not INTERPRETED, reason="of the kernels; torch's own operations are cast, as everywhere")
@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_backward_pass_within_autocast_keeps_its_arithmetic(chunk_size, reduction):
    g = tensors("cpu", FP32)
    leaves = [g[name] for name in "hlb"]
    options = {"linear_bias": g["b"], "reduction": reduction, "chunk_size": chunk_size}
    losses = [fused_softmax.linear_cross_entropy(g["h"], g["l"], g["t"], **options).sum() for _ in range(2)]
    expected = torch.autograd.grad(losses[0], leaves)
    loss = losses[1]
    with autocast("cpu", BF16):
        found = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.skipif(not INTERPRETED, reason="of the kernels; torch's own operations are cast, as everywhere")
@pytest.mark.parametrize("name", ["attention", "linear_cross_entropy", "cross_entropy", "softmax", "logsumexp"])
def test_a_second_derivative_within_autocast_keeps_its_arithmetic(name):
    g = tensors("cpu", FP32)
    leaves = [g[each] for each in GRADIENTS]

    def second(within):
        y = CALLS[name](True, g).square().sum()
        with autocast("cpu", BF16 if within else None):
            first = torch.autograd.grad(y, leaves, create_graph=True, allow_unused=True)
        return [each for each in first if each is not None]

    found = [second(within) for within in (False, True)]
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("by_kernels", [True, False])
def test_an_operator_computes_in_the_dtypes_that_it_is_given(by_kernels, monkeypatch):
    """By itself an operator has no rule of autocast, and its own products are not to be cast."""
    for module in (attention_rules, loss_rules):
        if not by_kernels:  # as where a program lands that was exported elsewhere
            monkeypatch.setattr(module, "on_device", lambda x: False)
    g = {key: each.detach() for key, each in tensors("cpu", FP32).items()}
    operators = torch.ops.fused_softmax
    k, v = (each.repeat_interleave(2, 1) for each in (g["k"], g["v"]))
    calls = {
        "attention": lambda: operators.attention(g["q"], k, v, None, None, None, None, 0.25),
        "linear_cross_entropy": lambda: operators.linear_cross_entropy(
            g["h"], g["l"], g["t"], g["b"], gradients=[True] * 3
        ),
    }
    for call in calls.values():
        plain = call()
        with autocast("cpu", BF16):
            found = call()
        assert all(torch.equal(*pair) for pair in zip(found, plain, strict=True))


@pytest.mark.skipif(not INTERPRETED, reason="CPU tensors keep calls only where the kernels are interpreted")
def test_kept_calls_of_other_autocasts_are_kept_apart(monkeypatch):
    for guards in (True, False):
        if not guards:
            monkeypatch.setattr(calls, "_TensorGuards", None)
        calls.forget()
        g = tensors("cpu", FP32)
        half = {key: each.detach().half() if each.dtype == FP32 else each for key, each in g.items()}
        for _ in range(2):
            for cast in (None, BF16, FP16, None):
                with autocast("cpu", cast):
                    assert attention(True, g).dtype == (cast or FP32)
                    assert fused_softmax.cross_entropy(half["x"], g["t"]).dtype == (FP16 if cast is None else FP32)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_autocast_leaves_alone_is_the_same_under_it(device, dtype):
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)).mul(3).to(device)
    seen = torch.tensor([[1, 2, 2]]).expand(4, 3).to(device)
    drafts = torch.randint(300, (2, 1), generator=torch.Generator().manual_seed(1)).to(device)
    x, probabilities = logits.to(dtype), logits.softmax(-1).to(dtype)
    functions = {
        "log_prob": lambda: fused_softmax.log_prob(x, seen),
        "divergence": lambda: fused_softmax.divergence(x, logits.flip(0), kind="jsd"),
        "sample": lambda: fused_softmax.sample(x, 0.7, 20, 0.9, seed=1, return_logprobs="processed", top_logprobs=2),
        "speculative_sample": lambda: fused_softmax.speculative_sample(x.view(2, 2, 300), drafts, seed=1),
        "top_k_mask_logits": lambda: fused_softmax.top_k_mask_logits(x, 5),
        "top_p_mask_logits": lambda: fused_softmax.top_p_mask_logits(x, 0.8),
        "min_p_mask_logits": lambda: fused_softmax.min_p_mask_logits(x, 0.1),
        "top_k_renorm_probs": lambda: fused_softmax.top_k_renorm_probs(probabilities, 5),
        "top_p_renorm_probs": lambda: fused_softmax.top_p_renorm_probs(probabilities, 0.8),
        "penalize": lambda: fused_softmax.penalize(x, seen, 1.2, 0.1, 0.2),
        "route": lambda: fused_softmax.route(x, 6, score="sigmoid", return_aux_loss=True, return_z_loss=True),
    }
    assert set(functions) - {"log_prob", "divergence"} == {
        name for name, rule in rules.TABLE.items() if rule == rules.Rule()
    }
    for name, call in functions.items():
        plain = call()
        with autocast(device, BF16):
            found = call()
        pairs = [(found, plain)] if isinstance(found, torch.Tensor) else zip(found, plain, strict=True)
        for a, b in pairs:
            assert (a is None) == (b is None), name
            assert a is None or (a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())), name


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("cast", [BF16, FP16], ids=str)
@pytest.mark.parametrize("given", [FP32, BF16], ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_multihead_attention_has_torchs_dtypes(device, given, cast, need_weights):
    x = torch.randn(2, 5, 16, device=device, dtype=given)
    found = []
    for of in (torch.nn, nn):
        module = of.MultiheadAttention(16, 2, batch_first=True, device=device, dtype=given)
        with autocast(device, cast):
            output, weights = module(x, x, x, need_weights=need_weights)
        gradients = torch.autograd.grad(output.sum(), list(module.parameters()))
        found.append((output.dtype, None if weights is None else weights.dtype, [each.dtype for each in gradients]))
    assert found[0] == found[1]


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("given", DTYPES, ids=str)
@pytest.mark.parametrize("cast", CASTS, ids=str)
@pytest.mark.parametrize("name", VALUES)
def test_values_under_cuda_autocast_are_torchs(name, cast, given):
    g = tensors("cuda", given)
    check_against_fp64(name, lambda g: CALLS[name](True, g), g, "cuda", cast)
    with fused_softmax.enabled(attention=True):
        check_against_fp64(name, lambda g: CALLS[name](True, g), g, "cuda", cast)
        results = results_of(lambda g: CALLS[name](False, g), g, "cuda", cast)
    torchs = results_of(lambda g: CALLS[name](False, g), g, "cuda", cast)
    assert [each.dtype for each in results] == [each.dtype for each in torchs]


@pytest.mark.gpu
@pytest.mark.parametrize("given", [FP32, BF16], ids=str)
@pytest.mark.parametrize("cast", [BF16, FP16], ids=str)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_values_under_cuda_autocast_are_torchs(backend, cast, given):
    g = tensors("cuda", given)
    for name in ("softmax", "logsumexp", "cross_entropy", "linear_cross_entropy", "attention"):
        torch._dynamo.reset()
        compiled = torch.compile(lambda g, name=name: CALLS[name](True, g), backend=backend, fullgraph=True)
        check_against_fp64(name, compiled, g, "cuda", cast)


@pytest.mark.gpu
def test_a_kept_call_on_a_gpu_notices_autocasts_dtype():
    g = tensors("cuda", FP32)
    for _ in range(2):
        for cast in (None, BF16, FP16, None):
            with autocast("cuda", cast):
                assert attention(True, g).dtype == (cast or FP32)
                assert fused_softmax.softmax(g["x"].bfloat16()).dtype == (BF16 if cast is None else FP32)
                assert fused_softmax.logsumexp(g["x"].bfloat16(), -1).dtype == (BF16 if cast is None else FP32)
    assert g["x"].shape[1] == CLASSES
