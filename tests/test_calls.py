"""Calls seen before: they plan, flatten and prepare nothing, and no call is taken for another."""

import gc
import os
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import INTERPRETED, kernels
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import fused_softmax
from fused_softmax.core import calls
from fused_softmax.core.launched import Launched
from fused_softmax.core.plan import RowPlan
from fused_softmax.ops.losses import launches as losses
from fused_softmax.ops.losses.options import Loss

pytestmark = kernels

FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
N = 3  # the leading size
FUNCTIONS = ("softmax", "log_softmax", "logsumexp")


def rand(*shape, seed=0, dtype=FP32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FP64).to(dtype)


# A kind of call, made anew for every seed and leading size: tensors of other values, and other numbers.


@dataclass(frozen=True)
class Kind:
    """A call with its gradient, if `grad`.

    call: what is called with the tensors and options. tensors: its arguments, by functions of (n, seed). options: the
    others; functions of (n, seed) among them give tensors and numbers. lay: how the input lies.
    """

    call: Any
    tensors: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    grad: bool = False
    lay: Any = None

    def made(self, device, seed=0, n=N):
        """(tensors of the call, what makes the call and returns its results and gradients)."""
        given = {name: make(n, seed) for name, make in self.tensors.items()}
        options = {name: value(n, seed) if callable(value) else value for name, value in self.options.items()}
        options = tree_map_only(torch.Tensor, lambda each: each.to(device), options)
        given = {name: tensor.to(device) for name, tensor in given.items()}
        first = next(iter(given))
        given[first] = given[first] if self.lay is None else self.lay(given[first])
        if self.grad:
            given[first].requires_grad_()

        def run():
            result = self.call(*given.values(), **options)
            results = [each for each in (result if isinstance(result, tuple) else [result]) if each is not None]
            if not self.grad:
                return flat(results)
            x, y = given[first], results[0]
            return [*flat(results), *torch.autograd.grad(y, x, rand(*y.shape, seed=seed + 5).to(y))]

        held = [*given.values(), *[each for each in options.values() if isinstance(each, torch.Tensor)]]
        return held, run


def flat(results):
    """The tensors among results, their tuples and dicts."""
    within = [each.values() if isinstance(each, dict) else each for each in results]
    within = [each for result in within for each in ([result] if isinstance(result, torch.Tensor) else result)]
    return [each.detach() for each in within if each is not None]


def padded(x):
    """The same values, rows apart."""
    room = torch.full((*x.shape[:-1], x.shape[-1] + 8), float("nan"), dtype=x.dtype, device=x.device)
    room[..., : x.shape[-1]] = x
    return room[..., : x.shape[-1]]


def crossed(x):
    """The same values, the first two dims the other way round in memory: no one stride describes the rows."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def part(x):
    """The same values in a larger second dim: two strides, whatever the first dim's size."""
    room = torch.full((x.shape[0], x.shape[1] + 2, *x.shape[2:]), float("nan"), dtype=x.dtype, device=x.device)
    room[:, : x.shape[1]] = x
    return room[:, : x.shape[1]]


def apart(x):
    """The same values with every second column: no strides describe the rows."""
    return x.repeat_interleave(2, -1)[..., ::2]


def mask_of(*shape):
    return lambda n, seed: rand(*[n if size is None else size for size in shape], seed=seed + 1) > -1


def added_of(*shape):
    return lambda n, seed: rand(*[n if size is None else size for size in shape], seed=seed + 1)


SCORES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": lambda n, seed: 0.5 + seed},
    "scale tensor": {"scale": lambda n, seed: rand(n, 4, 1, seed=seed + 2).abs() + 0.1},
    "bool mask": {"mask": mask_of(4, 40)},
    "bool mask of every row": {"mask": mask_of(None, 4, 40)},
    "added mask": {"mask": added_of(4, 40), "scale": lambda n, seed: 0.5 + seed},
    "added mask of every row": {"mask": added_of(None, 4, 40)},
    "causal": {"is_causal": True},
    "causal, scaled and masked": {"is_causal": True, "mask": mask_of(40), "scale": lambda n, seed: 0.5 + seed},
    "masked rows zero": {"masked_rows": "zero", "mask": mask_of(None, 1, 40)},
    "dim 0": {"dim": 0},
    "dim 1": {"dim": 1},
    "bf16": {"of": BF16},
    "fp64, scaled": {"of": FP64, "scale": lambda n, seed: 0.5 + seed},
    "row stride": {"lay": padded},
    "a part of two dims": {"lay": part},
    "dims swapped": {"lay": crossed},
    "a copy": {"lay": apart},
    "rows that stream": {"of": FP64, "n_cols": 20000},
}
# Of a leading size that is no number of rows of one plan.
WITHOUT_ROWS = ("dim 0", "dim 1", "a copy", "dims swapped", "rows that stream", "linear_cross_entropy")


def of_scores(function, name, grad, call=None):
    options = {"dim": -1} | SCORES[name]
    dtype, n_cols, lay = options.pop("of", FP32), options.pop("n_cols", 40), options.pop("lay", None)
    shape = (4, n_cols) if n_cols == 40 else (1, n_cols)
    call = call or getattr(fused_softmax, function)
    return Kind(call, {"x": lambda n, seed: rand(n, *shape, seed=seed, dtype=dtype)}, options, grad, lay)


def of_out(function):
    shape = (4,) if function == "logsumexp" else (4, 40)
    options = {"dim": -1, "out": lambda n, seed: torch.full((n, *shape), float("nan"))}
    return Kind(getattr(fused_softmax, function), {"x": lambda n, seed: rand(n, 4, 40, seed=seed)}, options)


LOSSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "weight": {"weight": lambda n, seed: rand(70, seed=seed + 3).abs() + 0.1},
    "label smoothing": {"label_smoothing": lambda n, seed: 0.1 + 0.1 * seed},
    "weight, smoothing": {
        "weight": lambda n, seed: rand(70, seed=seed + 3).abs() + 0.1, "label_smoothing": lambda n, seed: 0.1,
    },
    "softcap": {"softcap": lambda n, seed: 5.0 + seed},
    "scale": {"scale": lambda n, seed: 0.5 + seed},
    "z-loss": {"lse_square_scale": lambda n, seed: 1e-3 + 1e-4 * seed},
    "lse": {"return_lse": True},
    "statistics": {"return_token_stats": True},
    "given lse": {"lse": lambda n, seed: rand(n, seed=seed + 7) + 8},
    "given lse, weight": {
        "lse": lambda n, seed: rand(n, seed=seed + 7) + 8, "softcap": lambda n, seed: 5.0 + seed,
        "weight": lambda n, seed: rand(70, seed=seed + 3).abs() + 0.1,
    },
    "dtype": {"of": BF16, "dtype": FP32},
    "fp16": {"of": FP16},
    "fp64": {"of": FP64, "scale": lambda n, seed: 0.5 + seed},
    "images": {"shape": (70, 5)},
    "row stride": {"lay": padded},
    "rows that stream": {"of": FP64, "shape": (20000,)},
}  # fmt: skip


def of_loss(name, reduction, grad, call=fused_softmax.cross_entropy):
    options = {"reduction": reduction} | LOSSES[name]
    dtype, shape, lay = options.pop("of", FP32), options.pop("shape", (70,)), options.pop("lay", None)

    def target(n, seed):
        generator = torch.Generator().manual_seed(seed)
        target = torch.randint(shape[0], (n, *shape[1:]), generator=generator)
        target.view(-1)[seed % target.numel()] = -100
        return target

    tensors = {"x": lambda n, seed: rand(n, *shape, seed=seed, dtype=dtype), "target": target}
    return Kind(call, tensors, options, grad, lay)


LINEAR: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"linear_bias": lambda n, seed: rand(70, seed=seed + 4)},
    "weight, smoothing": {
        "weight": lambda n, seed: rand(70, seed=seed + 3).abs() + 0.1,
        "label_smoothing": lambda n, seed: 0.1 + 0.1 * seed,
    },
    "numbers": {
        "softcap": lambda n, seed: 5.0 + seed, "scale": lambda n, seed: 0.5 + seed,
        "lse_square_scale": lambda n, seed: 1e-3 + 1e-4 * seed,
    },
    "lse, in chunks": {"return_lse": True, "chunk_size": 2},
    "statistics": {"return_token_stats": True},
}  # fmt: skip


def of_linear(name, reduction, grad):
    tensors = {
        "x": lambda n, seed: rand(n, 8, seed=seed), "linear_weight": lambda n, seed: rand(70, 8, seed=seed + 6),
        "target": lambda n, seed: torch.randint(70, (n,), generator=torch.Generator().manual_seed(seed)),
    }  # fmt: skip
    return Kind(fused_softmax.linear_cross_entropy, tensors, {"reduction": reduction} | LINEAR[name], grad)


def inplace(x, target, **options):
    return fused_softmax.cross_entropy(x * 1, target, inplace_backward=True, **options)


def within(call):
    """A call of torch's own function, with our kernels in ATen's place."""

    def enabled(*arguments, **options):
        with fused_softmax.enabled():
            return call(*arguments, **options)

    return enabled


def operators():
    ops, x = torch.ops.fused_softmax, {"x": lambda n, seed: rand(n, 4, 40, seed=seed)}
    yield "operator softmax", Kind(lambda x: ops.softmax(x, -1, FP32), x)
    yield "operator softmax, gradient", Kind(lambda x: ops.softmax(x, -1, FP32), x, grad=True)
    yield "operator log_softmax", Kind(lambda x: ops.log_softmax(x, -1, FP32), x)
    yield "operator logsumexp", Kind(lambda x: ops.logsumexp(x, [-1], False), x)
    yield "operator logsumexp, gradient", Kind(lambda x: ops.logsumexp(x, [-1], False), x, grad=True)


KINDS = {
    f"{function}, {name}{', gradient' if grad else ''}": of_scores(function, name, grad)
    for function, name, grad in product(FUNCTIONS, SCORES, (False, True))
}
KINDS |= {f"{function}, out": of_out(function) for function in FUNCTIONS}
KINDS |= {
    f"{function}, dtype": Kind(
        getattr(fused_softmax, function), {"x": lambda n, seed: rand(n, 4, 40, seed=seed, dtype=BF16)},
        {"dim": -1, "dtype": FP32}, grad,
    )
    for function, grad in product(FUNCTIONS[:2], (False, True))
}  # fmt: skip
KINDS |= {
    f"cross_entropy, {name}, {reduction}{', gradient' if grad else ''}": of_loss(name, reduction, grad)
    for name, reduction, grad in product(LOSSES, ("mean", "sum", "none"), (False, True))
}
KINDS |= {
    f"linear_cross_entropy, {name}, {reduction}{', gradient' if grad else ''}": of_linear(name, reduction, grad)
    for name, reduction, grad in product(LINEAR, ("mean", "none"), (False, True))
}
LOG_PROBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "numbers": {
        "scale": lambda n, seed: 0.5 + seed, "softcap": lambda n, seed: 5.0 + seed,
        "temperature": lambda n, seed: 0.7 + seed,
    },
    "temperatures": {"temperature": lambda n, seed: rand(n, seed=seed + 3).abs() + 0.1},
    "statistics": {"return_stats": ("log_sum_sq_probs", "mean_logits", "is_top1"), "return_lse": True},
    "entropy, fp64": {"of": FP64, "return_entropy": True, "scale": lambda n, seed: 0.5 + seed},
    "row stride, bf16": {"of": BF16, "lay": padded},
    "several parts": {"of": FP64, "n_cols": 20000, "return_entropy": True},
    "bitmask": {"kept": lambda n, seed: (torch.arange(3 * n, dtype=torch.int32) * (seed + 2**29 + 9)).view(n, 3)},
    "lists": {"kept": lambda n, seed: lists_of(n, 5 + seed)},
}  # fmt: skip


def lists_of(n, n_kept):
    """As many columns of each of n rows."""
    return torch.arange(n * n_kept) * 11 % 70, torch.arange(n + 1) * n_kept


def of_log_prob(name, grad, call=fused_softmax.log_prob):
    options = dict(LOG_PROBS[name])
    dtype, n_cols, lay = options.pop("of", FP32), options.pop("n_cols", 70), options.pop("lay", None)
    tensors = {
        "x": lambda n, seed: rand(n, n_cols, seed=seed, dtype=dtype),
        "target": lambda n, seed: torch.randint(70, (n, 2), generator=torch.Generator().manual_seed(seed)),
    }
    return Kind(call, tensors, options, grad, lay)


def over_the_logits(x, target, **options):
    return fused_softmax.log_prob(x * 1, target, inplace_backward=True, **options)


KINDS |= {
    f"log_prob, {name}{', gradient' if grad else ''}": of_log_prob(name, grad)
    for name, grad in product(LOG_PROBS, (False, True))
}
DIVERGENCES: dict[str, dict[str, Any]] = {
    "mean": {},
    "mean of whole vectors": {"n_cols": 72},
    "sum of whole vectors, numbers": {
        "n_cols": 72, "reduction": "sum", "kind": "jsd", "beta": lambda n, seed: 0.25 + seed / 8,
        "scale": lambda n, seed: 0.5 + seed, "target_temperature": lambda n, seed: 1.5 + seed,
    },
    "weight, whole vectors": {"n_cols": 72, "weight": lambda n, seed: rand(n, seed=seed + 3).abs() + 0.1},
    "temperatures, whole vectors": {
        "n_cols": 72, "temperature": lambda n, seed: rand(n, seed=seed + 3).abs() + 0.1, "kind": "tvd",
    },
    "row stride of whole vectors": {"n_cols": 72, "lay": padded, "kind": "reverse_kl"},
    "none, jsd": {"reduction": "none", "kind": "jsd", "beta": lambda n, seed: 0.25 + seed / 8},
    "sum, numbers": {
        "reduction": "sum", "scale": lambda n, seed: 0.5 + seed, "softcap": lambda n, seed: 5.0 + seed,
        "temperature": lambda n, seed: 0.7 + seed, "target_temperature": lambda n, seed: 1.5 + seed,
    },
    "temperatures": {
        "temperature": lambda n, seed: rand(n, seed=seed + 3).abs() + 0.1,
        "target_temperature": lambda n, seed: rand(n, seed=seed + 4).abs() + 0.1,
    },
    "weight": {"weight": lambda n, seed: rand(n, seed=seed + 3).abs() + 0.1},
    "row stride, bf16": {"of": BF16, "lay": padded, "kind": "reverse_kl"},
    "several parts": {"n_cols": 20000, "kind": "tvd", "reduction": "none"},
}  # fmt: skip


def of_divergence(name, grad):
    options = dict(DIVERGENCES[name])
    dtype, n_cols, lay = options.pop("of", FP32), options.pop("n_cols", 70), options.pop("lay", None)
    tensors = {
        "x": lambda n, seed: rand(n, n_cols, seed=seed, dtype=dtype),
        "target": lambda n, seed: rand(n, n_cols, seed=seed + 9),
    }
    call = lambda x, target, **options: fused_softmax.divergence(x, target.detach(), **options)  # noqa: E731
    return Kind(call, tensors, options, grad, lay)


KINDS |= {
    f"divergence, {name}{', gradient' if grad else ''}": of_divergence(name, grad)
    for name, grad in product(DIVERGENCES, (False, True))
}
PROBABILITIES: dict[str, dict[str, Any]] = {
    "mean": {},
    "mean of constants": {"constant": True},
    "mean of bf16 and fp32": {"of": BF16, "n_cols": 72, "constant": True},
    "sum, numbers": {
        "reduction": "sum", "label_smoothing": lambda n, seed: 0.1 + 0.1 * seed, "constant": True, "n_cols": 72,
        "scale": lambda n, seed: 0.5 + seed, "softcap": lambda n, seed: 5.0 + seed,
    },
    "none, weight": {"reduction": "none", "weight": lambda n, seed: LOSSES["weight"]["weight"](n, seed)},
    "lse, z-loss": {"return_lse": True, "lse_square_scale": lambda n, seed: 1e-3 + 1e-4 * seed},
    "row stride": {"lay": padded},
}  # fmt: skip


def of_probabilities(name, grad):
    options = dict(PROBABILITIES[name])
    dtype, n_cols, lay = options.pop("of", FP32), options.pop("n_cols", 70), options.pop("lay", None)
    constant = options.pop("constant", False)
    tensors = {
        "x": lambda n, seed: rand(n, n_cols, seed=seed, dtype=dtype),
        "target": lambda n, seed: rand(n, n_cols, seed=seed + 9).softmax(1),
    }

    def call(x, target, **options):
        return fused_softmax.cross_entropy(x, target.detach() if constant else target, **options)

    return Kind(call, tensors, options, grad, lay)


KINDS |= {
    f"cross_entropy of probabilities, {name}{', gradient' if grad else ''}": of_probabilities(name, grad)
    for name, grad in product(PROBABILITIES, (False, True))
}
KINDS["log_prob, inplace"] = of_log_prob("plain", True, over_the_logits)
KINDS["cross_entropy, inplace"] = of_loss("plain", "mean", True, inplace)
KINDS["cross_entropy, given lse, inplace"] = of_loss("given lse", "mean", True, inplace)
KINDS |= {
    f"torch.{function}, enabled{', gradient' if grad else ''}": of_scores(
        function, "plain", grad, within(getattr(torch, function))
    )
    for function, grad in product(FUNCTIONS, (False, True))
}
KINDS |= {
    f"torch's cross_entropy, enabled, {name}{', gradient' if grad else ''}": of_loss(
        name, "mean", grad, within(torch.nn.functional.cross_entropy)
    )
    for name, grad in product(("plain", "weight", "label smoothing"), (False, True))
}
KINDS |= dict(operators())

# Calls whose leading size counts rows of one plan.
BY_ROWS = {
    name: kind
    for name, kind in KINDS.items()
    if not name.startswith(("torch", "operator"))
    and not any(each in name for each in (*WITHOUT_ROWS, "images", "inplace", "out", "weight, smoothing"))
}

BY_ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "heads that share keys": {"key": (2, 2, 9, 8), "enable_gqa": True},
    "heads that share keys, one query": {"query": (2, 4, 1, 8), "key": (2, 2, 300, 8), "enable_gqa": True},
    "sizes that broadcast": {"key": (1, 1, 9, 8)},
    "without heads": {"query": (5, 8), "key": (9, 8)},
    "window in a list": {"window": [2, 0], "return_stats": ["entropy"]},
    "sinks": {"sinks": lambda n, seed: rand(4, seed=seed + 3), "return_lse": True},
}


def autocast(call):
    def casting(x, *others, **options):
        with torch.autocast(x.device.type, BF16):
            return call(x, *others, **options)

    return casting


def with_value(query, key, **options):
    return fused_softmax.attention(query, key, key + 1, **options)


def of_one_tensor(query, key, **options):
    return fused_softmax.attention(query, query, query, **options)


def of_attention(name, grad, call=with_value):
    options = dict(BY_ATTENTION[name])
    shapes = options.pop("query", (2, 4, 7, 8)), options.pop("key", (2, 4, 9, 8))
    tensors = {
        str(i): lambda n, seed, i=i, shape=shape: rand(*shape, seed=seed + i, dtype=BF16)
        for i, shape in enumerate(shapes)
    }
    return Kind(call, tensors, options, grad)


KINDS |= {
    f"attention, {name}{', gradient' if grad else ''}": of_attention(name, grad)
    for name, grad in product(BY_ATTENTION, (False, True))
}
KINDS["attention, one tensor"] = of_attention("plain", False, of_one_tensor)
KINDS["attention, one tensor, gradient"] = of_attention("plain", True, of_one_tensor)
KINDS["attention, autocast"] = of_attention("plain", True, autocast(with_value))


def each_of(kinds):
    """Names of kinds; those that take the same way through the host as others are for the whole suite."""
    for name in kinds:
        alike = ("log_softmax" in name or ", sum" in name) and "plain" not in name
        yield pytest.param(name, marks=pytest.mark.exhaustive) if alike else name


# What a call runs of the package.

PACKAGE = f"{Path(fused_softmax.__file__).parent}{os.sep}"
PLANNED = {"for_rows", "with_rows", *[name for name in dir(RowPlan) if isinstance(getattr(RowPlan, name), property)]}


@contextmanager
def functions_called():
    """Every function of the package that runs, as "file:name"."""
    found = set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            found.add(f"{frame.f_code.co_filename[len(PACKAGE) :]}:{frame.f_code.co_name}")

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


def decides(called, name):
    """What of the planner, of the layout and of the preparation of a launch was called."""
    copies = "a copy" in name or "dim 0" in name or "dim 1" in name
    allowed = {"core/layout.py:overlaps", "core/layout.py:as_bytes", *(["core/layout.py:last"] if copies else [])}
    prepares = {
        f"core/{each}" for each in ("runner.py:prepare", "runner.py:spec_of", "launch.py:prepare", "launch.py:again")
    }
    return {
        each for each in called if each.startswith(("core/plan/", "core/layout.py:")) or each in prepares
    } - allowed  # fmt: skip


def same(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.dtype, a.shape, a.stride(), a.requires_grad) == (b.dtype, b.shape, b.stride(), b.requires_grad)
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def alone(kind, device, **how):
    """What a call gives that finds nothing."""
    calls.forget()
    result = kind.made(device, **how)[1]()
    calls.forget()
    return result


@pytest.mark.parametrize("name", list(each_of(KINDS)))
def test_a_repeated_call_decides_nothing(name, device):
    kind = KINDS[name]
    truth = alone(kind, device, seed=1)
    kind.made(device, seed=0)[1]()
    _held, run = kind.made(device, seed=1)
    with functions_called() as called:
        found = run()
    same(found, truth)
    assert not decides(called, name)


@pytest.mark.parametrize("name", list(each_of(BY_ROWS)))
def test_a_call_of_other_rows_asks_the_planner_for_nothing_but_their_number(name, device):
    kind = BY_ROWS[name]
    truth = alone(kind, device, seed=1, n=N + 2)
    kind.made(device, seed=0)[1]()
    _held, run = kind.made(device, seed=1, n=N + 2)
    with functions_called() as called:
        found = run()
    same(found, truth)
    assert {each.partition(":")[2] for each in called if each.startswith("plan/")} <= PLANNED
    assert "runner.py:prepare" not in called


@pytest.mark.parametrize("function", [*FUNCTIONS, "cross_entropy", "log_prob"])
def test_a_call_of_other_rows_is_kept_when_it_comes_a_second_time(function, device):
    """For what is kept and never found would be all that the garbage collector sees."""

    def call(n):
        x, beside = rand(n, 40, seed=n).to(device), -1 if function in FUNCTIONS else torch.arange(n, device=device)
        return getattr(fused_softmax, function)(x, beside)

    calls.forget()
    call(N)
    before = len(calls._kept)
    first = call(N + 2)
    assert len(calls._kept) == before
    same([call(N + 2)], [first])
    assert len(calls._kept) > before
    with functions_called() as called:
        same([call(N + 2)], [first])
    assert not decides(called, "") | {each for each in called if "of_other_size" in each}


BESIDE = {
    "mask": (None, 4, 40), "mask that is the input": (None, 4, 40), "mask of one row": (1, 4, 40), "mask of 40": (40,),
    "scale": (None, 4, 1),
    "sink": (None, 4, 1), "sink of 4": (4, 1),
}  # fmt: skip


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_stands_beside_rows_has_its_gradient_whatever_their_number(function, beside, device):
    argument, sizes, alone = beside.partition(" ")[0], BESIDE[beside], "the input" in beside

    def gradients(n):
        x = rand(n, 4, 40, seed=n).to(device).requires_grad_()
        other = rand(*[n if size is None else size for size in sizes], seed=n + 1).to(device).requires_grad_()
        y = getattr(fused_softmax, function)(x, -1, **{argument: x if alone else other})
        leaves = [x] if alone else [x, other]
        return torch.autograd.grad(y, leaves, rand(*y.shape, seed=n + 2).to(y))

    calls.forget()
    numbers = (5, 2, 7, 3)
    found = [gradients(n) for n in numbers]
    for n, each in zip(numbers, found, strict=True):
        calls.forget()
        same(each, gradients(n))


@pytest.fixture(scope="module")
def little_to_collect():
    """Of all that there was before, no collection takes notice, and so it takes no time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def routed(x, **options):
    out = fused_softmax.route(x, 2, **options)
    if x.requires_grad:
        (out.weights[..., 0].sum() + out.aux_loss).backward()
    return [each for each in out if each is not None]


def told(target, tokens, draft, bias, **options):
    return fused_softmax.speculative_sample(target, tokens, draft, 0.7, logit_bias=bias, **options)


# Other calls, which have to hold no tensor either: each of tensors, made anew.
HOLDING = {
    "route": (routed, lambda: (rand(20, 16),), lambda: {
        "bias": rand(16), "noise": rand(20, 16), "row_mask": torch.ones(20, dtype=torch.bool), "return_aux_loss": True,
    }),
    "route, gradient": (routed, lambda: (rand(20, 16).requires_grad_(),), lambda: {
        "bias": rand(16), "return_aux_loss": True,
    }),
    "route, replay": (routed, lambda: (rand(20, 16),), lambda: {"indices": torch.tensor([[0, 1]] * 20)}),
    "sample with log-probabilities": (fused_softmax.sample, lambda: (rand(4, 40),), lambda: {
        "temperature": torch.full((4,), 0.7), "logit_bias": rand(4, 40), "row_indices": torch.tensor([1, 0, 3, 2]),
        "seed": 1, "return_logprobs": "raw", "top_logprobs": 3, "return_rank": True,
    }),
    "drafts": (told, lambda: (rand(2, 3, 40), torch.ones(2, 2, dtype=torch.int64), rand(2, 2, 40), rand(40)), lambda: {
        "seed": torch.tensor([1, 2]), "return_logprobs": "processed", "verify": "tree",
        "parents": torch.tensor([-1, 0]),
    }),
    "drafts without a distribution": (
        told, lambda: (rand(2, 3, 40), torch.ones(2, 2, dtype=torch.int64), None, rand(2, 40)),
        lambda: {"seed": torch.tensor([1, 2]), "return_logprobs": "raw"},
    ),
    "mask": (fused_softmax.top_p_mask_logits, lambda: (rand(4, 40), torch.full((4,), 0.5)), dict),
}  # fmt: skip


def made_of_holding(name, device):
    """(tensors of the call, what makes the call and returns its results)."""
    function, positional, named = HOLDING[name]
    given = [each if each is None else each.detach().to(device).requires_grad_(each.requires_grad)
             for each in positional()]  # fmt: skip
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in named().items()}
    held = [each for each in (*given, *options.values()) if isinstance(each, torch.Tensor)]

    def run():
        out = function(*given, **options)
        return [each for each in (out if isinstance(out, tuple | list) else [out]) if each is not None]

    return held, run


@pytest.mark.parametrize("dtype", [BF16, pytest.param(FP64, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", [*each_of(KINDS), *HOLDING])
def test_torchs_default_dtype_changes_nothing(name, dtype, default_dtype, device):
    _held, run = made_of_holding(name, device) if name in HOLDING else KINDS[name].made(device)
    truth = run()
    default_dtype(dtype)
    found = run()
    calls.forget()
    for results in (found, run(), run()):
        same(results, truth)


@pytest.mark.parametrize("name", [*each_of(KINDS), *HOLDING])
def test_what_is_kept_holds_no_tensor(name, little_to_collect, device):
    held, run = made_of_holding(name, device) if name in HOLDING else KINDS[name].made(device)
    results = run()
    assert calls._kept
    gone = [weakref.ref(each) for each in (*held, *results)]
    del held, run, results
    gc.collect()
    until = time.monotonic() + 5  # on a GPU, autograd's thread may not be done with a gradient that has come
    while any(ref() is not None for ref in gone) and time.monotonic() < until:
        time.sleep(0.01)
    assert [ref() for ref in gone] == [None] * len(gone)


def test_rows_whose_gradient_is_written_over_them_are_found(device, monkeypatch):
    """A guard takes no tensor twice, so every chunk of linear_cross_entropy was prepared anew."""

    def call():
        x, target = rand(3, 40).to(device), torch.tensor([3, -100, 39], device=device)
        rows = losses.forward(x, target, Loss(reduction="sum"), dx=x)
        logits = rand(3, 40).to(device)
        return rows.loss, x, losses.backward(logits, target, rows.m, rows.ls, Loss(reduction="sum"), dx=logits)

    first = call()
    monkeypatch.setattr(losses, "prepare", None)
    same(call(), first)
    torch.testing.assert_close(first[1], first[2])


# Calls that differ.


def at(x, offset):
    """The same values, `offset` elements from where memory is aligned."""
    room = torch.zeros(x.numel() + offset, dtype=x.dtype, device=x.device)
    return room[offset:].view(x.shape).copy_(x)


def outcome(call):
    """The results of a call, whether they can be differentiated, or the error that it raises."""
    try:
        result = call()
    except Exception as error:
        return type(error), str(error)
    results = result if isinstance(result, tuple) else (result,)
    return [(each, each.grad_fn is not None, each.is_inference()) for each in results if each is not None]


def check_apart(variants):
    """In any order the calls give what each gives where nothing was kept."""
    truths = {}
    for name, call in variants.items():
        calls.forget()
        truths[name] = outcome(call)
    names = list(variants)
    for order in ((*names, *names[::2]), (*reversed(names), *names[1::2])):  # which call is kept first, and found
        calls.forget()
        for name in order:
            found, truth = outcome(variants[name]), truths[name]
            assert type(found) is type(truth), name
            if isinstance(truth, tuple):
                assert found == truth, name
                continue
            assert [each[1:] for each in found] == [each[1:] for each in truth], name
            same([each[0].detach() for each in found], [each[0].detach() for each in truth])


def under(context, call):
    def run():
        with context():
            return call()

    return run


@contextmanager
def deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


MODES = {
    "no_grad": torch.no_grad, "inference": torch.inference_mode, "deterministic": deterministic,
    "autocast": lambda: torch.autocast("cuda", torch.bfloat16) if torch.cuda.is_available() else torch.no_grad(),
}  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
def test_calls_that_differ_in_input_or_mode_are_kept_apart(function, device):
    of = getattr(fused_softmax, function)
    x = rand(4, 40).to(device)
    leaf = x.clone().requires_grad_()
    variants = {
        "plain": lambda: of(x, 1), "requires grad": lambda: of(leaf, 1), "bf16": lambda: of(x.bfloat16(), 1),
        "fp64": lambda: of(x.double(), 1), "fp16": lambda: of(x.half(), 1), "off 16 bytes": lambda: of(at(x, 1), 1),
        "off by 8 bytes": lambda: of(at(x, 2), 1), "row stride": lambda: of(padded(x), 1),
        "transposed": lambda: of(x.T.contiguous().T, 1), "dim 0": lambda: of(x, 0), "dim -1": lambda: of(x, -1),
        "dim True": lambda: of(x, True), "dim 1.0": lambda: of(x, 1.0), "negated": lambda: of(torch._neg_view(x), 1),
        "another shape": lambda: of(x[:, :36], 1), "another rank": lambda: of(x[None], 1),
        "fewer rows": lambda: of(x[:3], 1), "one row": lambda: of(x[:1], 1), "no rows": lambda: of(x[:0], 1),
        "is_causal 1": lambda: of(x, 1, is_causal=1), "causal": lambda: of(x, 1, is_causal=True),
    }  # fmt: skip
    if function == "logsumexp":
        variants |= {"keepdim": lambda: of(x, 1, True), "both dims": lambda: of(x, (0, 1))}
    else:
        variants |= {"dtype": lambda: of(x, 1, dtype=FP64), "dtype of its own": lambda: of(x, 1, dtype=FP32)}
    variants |= {mode: under(context, variants["requires grad"]) for mode, context in MODES.items()}
    check_apart(variants)


def test_one_tensor_in_other_places_is_another_call(device):
    x, y, z = (rand(2, 4, 7, 8, seed=i).to(device).requires_grad_(i == 0) for i in range(3))
    triples = product((x, y, z), repeat=3)
    check_apart({i: lambda given=given: fused_softmax.attention(*given) for i, given in enumerate(triples)})
    a, b, c = (rand(4, 40, seed=i).to(device) for i in range(3))
    masks = {"plain": {}, "mask": {"mask": a}, "another mask": {"mask": b}, "view": {"mask": a.view(4, 40)}}
    outs = {"": {}, ", out": {"out": c}}
    check_apart({
        f"{mask}{out}": lambda given=masks[mask] | outs[out]: fused_softmax.softmax(a, -1, **given)
        for mask in masks for out in outs
    })  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
def test_calls_that_differ_in_their_scores_are_kept_apart(function, device):
    of = getattr(fused_softmax, function)
    x, more = rand(4, 4, 40).to(device), rand(5, 4, 40).to(device)
    mask, scale = (rand(4, 40, seed=1) > -1).to(device), (rand(4, 1, seed=2).abs() + 0.1).to(device)
    scores = {
        "plain": {}, "0": {"scale": 0.0}, "1": {"scale": 1}, "2": {"scale": 2}, "-0.5": {"scale": -0.5},
        "-0.0": {"scale": -0.0}, "1.0": {"scale": 1.0}, "another mask": {"mask": ~mask},
        "added fp64": {"mask": mask.double()}, "causal and added": {"is_causal": True, "mask": mask[0].float()},
        "True": {"scale": True}, "a string": {"scale": "2"}, "nan": {"scale": float("nan")}, "scale": {"scale": scale},
        "scale of no dims": {"scale": torch.tensor(0.7, device=device)}, "scale of bf16": {"scale": scale.bfloat16()},
        "scale of integers": {"scale": scale.long()}, "scale of every element": {"scale": scale.expand(4, 40).clone()},
        "mask": {"mask": mask}, "mask of a row": {"mask": mask[0]}, "mask of columns": {"mask": mask[:, :1]},
        "mask transposed": {"mask": mask.T.contiguous().T}, "mask off 16 bytes": {"mask": at(mask, 1)},
        "added": {"mask": mask.float()}, "added bf16": {"mask": mask.bfloat16()}, "integers": {"mask": mask.long()},
        "too short": {"mask": mask[:, :36]}, "too long": {"mask": mask.repeat(1, 2)}, "no tensor": {"mask": True},
        "mask with a gradient": {"mask": mask.float().requires_grad_()}, "zero": {"mask": mask, "masked_rows": "zero"},
        "of one input": {"mask": mask[None]}, "of two inputs": {"mask": mask.expand(2, 4, 40).contiguous()},
        "of four inputs": {"mask": mask.expand(4, 4, 40).contiguous()}, "causal": {"is_causal": True},
        "of five inputs": {"mask": mask.expand(5, 4, 40).contiguous()}, "both": {"mask": mask, "scale": scale},
        "causal and masked": {"is_causal": True, "mask": mask}, "masked_rows 0": {"masked_rows": 0},
    }  # fmt: skip
    made = {name: lambda x, scored=scored: of(x, -1, **scored) for name, scored in scores.items()}
    check_apart({
        f"{name}, {len(each)}": lambda call=call, each=each: call(each)
        for name, call in made.items() for each in (x, more)
    })  # fmt: skip


def test_a_loss_without_gradients_is_not_the_one_kept_with_its_gradient(device):
    """Which writes that too. Its lanes sum otherwise, so some losses of some rows differ by a bit."""
    leaves, target = [rand(4, 10, seed=seed).to(device).requires_grad_() for seed in range(40)], torch.arange(4)
    losses_of_rows = lambda: torch.stack([  # noqa: E731
        fused_softmax.cross_entropy(leaf, target.to(device), reduction="sum") for leaf in leaves
    ])  # fmt: skip
    check_apart({"gradients": losses_of_rows, "no gradients": under(torch.no_grad, losses_of_rows)})


def test_losses_that_differ_are_kept_apart(device):
    of = fused_softmax.cross_entropy
    x, weight = rand(4, 10).to(device), (rand(10, seed=3).abs() + 0.1).to(device)
    target = torch.tensor([3, 9, 0, -100], device=device)
    five, fives = rand(5, 10, seed=4).to(device), torch.tensor([3, 9, 0, 2, -100], device=device)
    leaf = x.clone().requires_grad_()
    variants = {
        "plain": lambda: of(x, target), "requires grad": lambda: of(leaf, target),
        "sum": lambda: of(x, target, None, -100, "sum"),
        "none": lambda: of(x, target, reduction="none"), "another reduction": lambda: of(x, target, reduction="max"),
        "int32": lambda: of(x, target.int()), "uint8": lambda: of(x, target.clamp(0).byte()),
        "int16": lambda: of(x, target.short()), "too few targets": lambda: of(x, target[:3]),
        "probabilities": lambda: of(x, x.softmax(1)), "target strided": lambda: of(x, target.repeat_interleave(2)[::2]),
        "weight": lambda: of(x, target, weight), "weight of fp64": lambda: of(x, target, weight.double()),
        "weight of 9": lambda: of(x, target, weight[:9]), "weight of 4": lambda: of(x, target, weight[:4]),
        "weight strided": lambda: of(x, target, weight.repeat_interleave(2)[::2]),
        "weight of integers": lambda: of(x, target, weight.long()), "weight off": lambda: of(x, target, at(weight, 1)),
        "five rows": lambda: of(five, fives), "five rows, weight": lambda: of(five, fives, weight),
        "five rows, weight of 5": lambda: of(five, fives, weight[:5]),
        "five rows, weight of 9": lambda: of(five, fives, weight[:9]),
        "ignores 3": lambda: of(x, target.clamp(0), ignore_index=3),
        "ignores True": lambda: of(x, target, ignore_index=True),
        "smoothing": lambda: of(x, target, label_smoothing=0.1),
        "smoothing True": lambda: of(x, target, label_smoothing=True),
        "smoothing 2": lambda: of(x, target, label_smoothing=2.0), "softcap": lambda: of(x, target, softcap=3.0),
        "softcap 0": lambda: of(x, target, softcap=0.0), "scale": lambda: of(x, target, scale=0.5),
        "scale 1": lambda: of(x, target, scale=1.0), "scale 0": lambda: of(x, target, scale=0.0),
        "scale inf": lambda: of(x, target, scale=float("inf")), "scale True": lambda: of(x, target, scale=True),
        "z": lambda: of(x, target, lse_square_scale=0.1), "lse": lambda: of(x, target, return_lse=True),
        "dtype": lambda: of(x, target, dtype=FP64), "bf16": lambda: of(x.bfloat16(), target),
        "dtype of integers": lambda: of(x, target, dtype=torch.int64), "off 16 bytes": lambda: of(at(x, 1), target),
        "row stride": lambda: of(padded(x), target), "transposed": lambda: of(x.T.contiguous().T, target),
        "statistics": lambda: tuple(of(x, target, return_token_stats=True).token_stats),
        "one row": lambda: of(x[0], target[0]), "no rows": lambda: of(x[:0], target[:0]),
    }  # fmt: skip
    lse, lses = (rand(n, seed=5).to(device) + 8 for n in (4, 5))
    variants |= {
        "given lse": lambda: of(x, target, lse=lse),
        "given lse, requires grad": lambda: of(leaf, target, lse=lse),
        "given another lse": lambda: of(x, target, lse=lse + 1),
        "given lse of fp64": lambda: of(x, target, lse=lse.double()),
        "given lse of bf16": lambda: of(x, target, lse=lse.bfloat16()),
        "given lse off 16 bytes": lambda: of(x, target, lse=at(lse, 1)),
        "given lse with a gradient": lambda: of(x, target, lse=lse.clone().requires_grad_()),
        "given lse strided": lambda: of(x, target, lse=lse.repeat_interleave(2)[::2]),
        "given lse of integers": lambda: of(x, target, lse=lse.long()),
        "given lse, too few": lambda: of(x, target, lse=lse[:3]),
        "given lse, weight": lambda: of(x, target, weight, lse=lse),
        "given lse that is no tensor": lambda: of(x, target, lse=8.0),
        "given lse, returned": lambda: of(x, target, lse=lse, return_lse=True),
        "given lse, smoothing": lambda: of(x, target, lse=lse, label_smoothing=0.1),
        "given lse, scale": lambda: of(x, target, lse=lse, scale=0.5),
        "given lse, none": lambda: of(x, target, lse=lse, reduction="none"),
        "given lse of five rows": lambda: of(five, fives, lse=lses),
        "given lse of five rows, too few": lambda: of(five, fives, lse=lse),
    }  # fmt: skip
    variants |= {mode: under(context, variants["requires grad"]) for mode, context in MODES.items()}
    check_apart(variants)


def test_tensors_that_come_and_go_at_the_same_address(device):
    for i in range(60):
        shape, dtype = ((3, 40), (3, 36), (2, 40), (3, 4, 40))[i % 4], (FP32, BF16, FP64)[i % 3]
        x = at(rand(*shape, seed=i, dtype=dtype).to(device), i % 5 % 3)
        mask = (rand(shape[-1], seed=i + 1) > 0).to(device)
        mask[0] = True
        found = fused_softmax.softmax(x, mask=mask)
        truth = torch.softmax(x.double().masked_fill(~mask, -float("inf")), -1)
        torch.testing.assert_close(found.double(), truth, rtol=0, atol=2 * torch.finfo(dtype).eps)
        del x, mask, found


def test_the_calls_that_are_kept_have_a_bound(monkeypatch, device):
    monkeypatch.setattr(calls, "MOST_CALLS", 8)
    for n in (*range(1, 20), *range(1, 20)):
        x = rand(n, 10, seed=n).to(device).requires_grad_()
        target = torch.arange(n, device=device) % 10
        loss = fused_softmax.cross_entropy(x, target)
        torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(x.detach(), target), check_stride=False)
        torch.autograd.grad(loss, x)
        for name in ("softmax", "logsumexp"):
            ours, theirs = (getattr(of, name)(x, 1).detach() for of in (fused_softmax, torch))
            torch.testing.assert_close(ours, theirs)
        assert 0 < len(calls._kept) <= 8
        assert len(calls._came) <= 8


@pytest.fixture
def one_launch_at_a_time(monkeypatch):
    """Triton's interpreter keeps one grid position for the process; all around a launch runs in many threads."""
    if INTERPRETED:
        from triton.runtime.interpreter import GridExecutor

        lock, launch = threading.Lock(), GridExecutor.__call__

        def alone(self, *arguments, **options):
            with lock:
                return launch(self, *arguments, **options)

        monkeypatch.setattr(GridExecutor, "__call__", alone)


def test_eight_threads(one_launch_at_a_time, monkeypatch, device):
    monkeypatch.setattr(calls, "MOST_CALLS", 12)  # which empties it now and then
    names = [name for name in KINDS if not name.startswith(("torch", "operator")) and "stream" not in name][::9]
    truths = {(name, seed): alone(KINDS[name], device, seed=seed) for name in names for seed in (0, 1)}
    turns = [(name, seed) for name in names for seed in (0, 1)] * 4

    def work(turn):
        name, seed = turn
        return turn, KINDS[name].made(device, seed=seed)[1]()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as pool:
            for turn, found in pool.map(work, turns):
                same(found, truths[turn])
    finally:
        sys.setswitchinterval(before)


def test_calls_of_one_shape_have_a_bound(device):
    x = rand(3, 10).to(device)
    for padding in range(1, 20):
        room = torch.zeros(3, 10 + padding, device=device)
        fused_softmax.softmax(room[:, :10].copy_(x))
    assert 1 < max(len(each) for each in calls._kept.values()) <= calls._MOST_ALIKE


def test_the_plain_guard_keeps_calls_apart(monkeypatch, device):
    """That of a PyTorch without the guards of its compiler."""
    monkeypatch.setattr(calls, "_TensorGuards", None)
    test_calls_that_differ_in_input_or_mode_are_kept_apart("softmax", device)
    test_losses_that_differ_are_kept_apart(device)


@pytest.fixture
def look_in_c(monkeypatch):
    """Calls are looked up as on a GPU."""
    monkeypatch.setattr(calls, "_look", calls._look_in_c())
    assert calls._look is not calls._look_in_python


def test_the_look_up_in_c_keeps_calls_apart(look_in_c, device):
    test_calls_that_differ_in_input_or_mode_are_kept_apart("softmax", device)
    test_calls_that_differ_in_their_scores_are_kept_apart("logsumexp", device)
    test_losses_that_differ_are_kept_apart(device)
    test_one_tensor_in_other_places_is_another_call(device)


@pytest.mark.parametrize(
    "name",
    [
        "softmax, plain",
        "softmax, bool mask, gradient",
        "cross_entropy, weight, mean",
        "attention, sinks",
        "attention, one tensor",
    ],
)
def test_the_look_up_in_c_finds_what_was_kept(name, look_in_c, device):
    test_a_repeated_call_decides_nothing(name, device)


def test_where_something_watches_the_look_up_in_c_finds_nothing(look_in_c, device):
    x = rand(3, 10).to(device)
    kept = calls.keep(Launched(lambda: None), "a name", 1, x)
    assert calls.find("a name", 1, x) is kept
    with torch.overrides.BaseTorchFunctionMode():
        assert calls.find("a name", 1, x) is None
    with torch.autograd.forward_ad.dual_level():
        assert calls.find("a name", 1, x) is None
    assert calls.find("a name", 1, x) is kept


def test_what_is_no_tensor_and_no_option_is_not_found(look_in_c, device):
    x = rand(3, 10).to(device)
    calls.keep(Launched(lambda: None), "a name", 1, x)
    for arguments in [(1, None), (1, 2.0), ([1], x), (1, x, 2.0), (1, x.to_sparse()), (2, x)]:
        assert calls.find("a name", *arguments) is None


def test_under_the_plain_guard_a_mode_sees_a_call_that_was_kept(monkeypatch, device):
    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            seen.append(function)
            return function(*arguments, **(options or {}))

    monkeypatch.setattr(calls, "_TensorGuards", None)
    seen, x = [], rand(3, 10).to(device)
    fused_softmax.softmax(x)
    with Noting():
        fused_softmax.softmax(x)
    assert torch.ops.fused_softmax.softmax.default in seen


@pytest.mark.parametrize("way", ["guards of the compiler", "plain guard", "look-up in C"])
def test_a_call_is_found_for_tensors_like_its_own_alone(way, monkeypatch, device):
    """Also where another alignment gives the same numbers: the interpreter has no accesses of 16 bytes."""
    if way == "plain guard":
        monkeypatch.setattr(calls, "_TensorGuards", None)
    monkeypatch.setattr(calls, "_look", calls._look_in_c() if way == "look-up in C" else calls._look_in_python)
    x, mask, leaf = rand(4, 40).to(device), rand(40).to(device), rand(4, 40).to(device).requires_grad_()
    kept = Launched(lambda: "kept", lambda n, of: lambda: n)

    def found(*arguments):
        call = calls.find("a name", *arguments)
        return None if call is None else call()

    calls.keep(kept, "a name", (1, "nan"), x)
    assert found((1, "nan"), x) == "kept"
    assert found((1, "nan"), rand(5, 40).to(device)) == 5
    others = {
        "options": ((1, "zero"), x), "alignment": ((1, "nan"), at(x, 1)), "dtype": ((1, "nan"), x.half()),
        "strides": ((1, "nan"), padded(x)), "gradient": ((1, "nan"), leaf), "columns": ((1, "nan"), x[:, :36]),
        "alignment of other rows": ((1, "nan"), at(rand(5, 40).to(device), 1)), "mask": ((1, "nan"), x, mask),
        "dtype of other rows": ((1, "nan"), rand(5, 40).to(device).half()),
    }  # fmt: skip
    assert {name: found(*arguments) for name, arguments in others.items()} == dict.fromkeys(others)

    y, five, fives = (rand(n, 40, seed=1).to(device) for n in (4, 5, 5))
    calls.keep(kept, "a name", 1, x, mask)
    calls.keep(kept, "a name", 2, x, y)
    assert [found(1, x, mask), found(1, five, mask), found(2, x, y), found(2, five, fives)] == ["kept", 5, "kept", 5]
    others = {
        "alignment": (1, x, at(mask, 1)), "dtype": (1, x, mask.half()), "size": (1, x, mask[:36]), "none": (1, x, None),
        "alignment of other rows": (1, five, at(mask, 1)), "fewer rows": (2, five, y), "more rows": (2, x, fives),
        "dtype of other rows": (1, five, mask.half()), "one row": (2, x[:1], y[:1]),
    }  # fmt: skip
    assert {name: found(*arguments) for name, arguments in others.items()} == dict.fromkeys(others)

    with torch.no_grad():
        calls.keep(kept, "a name", 3, leaf)
        assert found(3, leaf) == "kept"
    assert found(3, leaf) is None


@pytest.mark.parametrize("function", [*FUNCTIONS, "cross_entropy"])
def test_what_was_called_without_gradients_is_differentiated_with_them(function, device):
    of, leaves = getattr(fused_softmax, function), [rand(n, 40).to(device).requires_grad_() for n in (4, 5)]
    arguments = [(torch.arange(len(leaf), device=device),) if function == "cross_entropy" else (1,) for leaf in leaves]
    with torch.no_grad():
        assert not any(of(leaf, *rest).requires_grad for leaf, rest in zip(leaves, arguments, strict=True))
    for leaf, rest in zip(leaves, arguments, strict=True):
        y = of(leaf, *rest)
        assert y.requires_grad
        torchs = getattr(torch.nn.functional if function == "cross_entropy" else torch, function)(leaf, *rest)
        grads = [torch.autograd.grad(each, leaf, torch.ones_like(each))[0] for each in (y, torchs)]
        torch.testing.assert_close(*grads)
