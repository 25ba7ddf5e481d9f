"""The same bits of a row in any batch, at any place in it: plans, kernels, results and gradients, and what refuses.

`batch_kernels.py` lists the kernels of calls for a GPU that need not be here.
"""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import products
import pytest
import torch
from batch_kernels import instructions
from conftest import kernels, peaked
from products import pairwise
from torch.nn import functional

import fused_softmax
from fused_softmax import cross_entropy, linear_cross_entropy, log_softmax, logsumexp, softmax
from fused_softmax.core import options
from fused_softmax.core.plan import (
    H100,
    H200,
    UNBOUNDED,
    Device,
    plan_loss,
    plan_reduction,
    plan_rows,
    reduction_rung_ends,
    row_rung_ends,
    rows,
    strategies,
)
from fused_softmax.core.plan.ladders import table_of
from fused_softmax.nn import CrossEntropyLoss, Softmax
from fused_softmax.ops.losses import launches as loss_launches
from fused_softmax.ops.softmax import launches as softmax_launches

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
# In which order a row is summed: by which elements a thread has, how many threads and parts there are, and how these
# are merged. copies, poll_last_first and prefetch say when something is read, and n_rows how large the grid is.
ORDER = (
    "strategy", "vector", "block_rows", "block_cols", "pieces", "full_pieces", "parts", "part_cols", "lanes",
    "num_warps",
)  # fmt: skip
PLANNERS = {
    "softmax": plan_rows,
    "its gradient": partial(plan_rows, inputs=2),
    "causal": partial(plan_rows, causal=True),
    "loss with its gradient": plan_loss,
    "logsumexp": plan_reduction,
    "loss alone": partial(plan_reduction, merges=True),
    "gradient from lse": partial(plan_reduction, writes=True),
}
N_ROWS = (1, 2, 7, 64, 132, 133, 512, 1056, 8192, 2**20)


# Plans.


def widths(itemsize):
    ends = {end for inputs in (1, 2) for end in row_rung_ends(itemsize, H200, inputs)} | {
        *reduction_rung_ends(itemsize)
    }
    ends |= {50257, 128256, 151936, 262144, 2**24}
    return sorted({end + step for end in ends for step in (0, 1, 8)})


def orders(planner, n_cols, itemsize, device, **how):
    plans = [planner(n, n_cols, itemsize, device, alignment="even", **how) for n in N_ROWS]
    return {tuple(getattr(plan, name) for name in ORDER) for plan in plans}, plans


@pytest.mark.parametrize("device_of", [H100, H200, Device("tiny", "cuda", (7, 5), 1)], ids=["H100", "H200", "tiny"])
@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("name", PLANNERS)
def test_the_order_of_a_rows_sums_does_not_follow_from_the_number_of_rows(name, itemsize, device_of):
    for n_cols in widths(itemsize):
        found, plans = orders(PLANNERS[name], n_cols, itemsize, device_of, batch_invariant=True)
        assert len(found) == 1, n_cols
        assert {plan.alignment for plan in plans} <= {"even", "scalar"}, (
            "rows that start anywhere differ in their heads"
        )
        assert all(plan.batch_invariant and plan.n_rows == n for plan, n in zip(plans, N_ROWS, strict=True))
        assert {plan.same_rows for plan in plans} == {(1, UNBOUNDED)}
        assert "the same bits in any batch" in plans[0].reasons[-1]


@pytest.mark.parametrize("name", [name for name in PLANNERS if name != "gradient from lse"])
def test_without_it_the_order_follows_from_the_number_of_rows(name):
    for n_cols in (16384, 32000, 128256, 262144):
        found, plans = orders(PLANNERS[name], n_cols, 2, H200)
        assert len(found) > 1, n_cols
        assert not any(plan.batch_invariant for plan in plans)


def test_many_rows_that_are_held_keep_their_plan():
    """What is even and fills the GPU loses nothing."""
    for planner in (plan_rows, partial(plan_rows, inputs=2), plan_loss):
        for n_cols in (512, 4096, 32768, 65536, 128256, 262144):
            assert planner(2**20, n_cols, 2, H200, batch_invariant=True) == planner(2**20, n_cols, 2, H200)


# Kernels.


def kernels_apart(*how):
    script = Path(__file__).with_name("batch_kernels.py")
    environment = {name: value for name, value in os.environ.items() if "INTERPRET" not in name}
    done = subprocess.run([sys.executable, script, *how], env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_one_kernel_is_launched_for_every_batch():
    assert kernels_apart("alone") == {}
    assert len(kernels_apart("any")) > 20


def test_instructions_are_the_same_from_another_checkout():
    """Triton's cache holds kernels of all checkouts of a machine, which differ in the names of their files."""
    ptx = """
.visible .entry _tile_forward(
)
{{
	.loc	1 84 4                          // {0}:84:4
	ret;
}}
	.file	1 "{0}"
	.section	.debug_info
	{{
.b32 {1}                                // Length of Unit
	}}
	.section	.debug_loc	{{	}}
"""
    one, other = (instructions(ptx.format(name, len(name))) for name in ("/one/forward.py", "/another/forward.py"))
    assert one == other
    assert "ret;" in one
    assert one != instructions(ptx.format("/one/forward.py", 15).replace("ret;", "trap;"))


@pytest.mark.compiles
@pytest.mark.one_triton
def test_one_kernel_is_compiled_for_every_place_of_a_batch():
    """Of the kernels that differ in where addresses start alone, the instructions are the same."""
    odd = "50257"  # whose rows start anywhere
    assert kernels_apart("alone", "ptx", *([odd] if products.QUICK else [])) == {}


# Results.

SMALL = Device(
    "small", "cuda", (9, 0), 1,
    table=table_of(
        [
            {"name": name, "inputs": inputs, "itemsize": itemsize, "rungs": rungs}
            for inputs in (1, 2)
            for itemsize in (2, 4)
            for name, rungs in (("row_warps", [[1024, 1]]), ("split_parts", [[None, 512, 1]]))
        ]
    ),
)  # fmt: skip


@pytest.fixture
def small(monkeypatch):
    """A GPU whose programs hold 512 columns and whose chip a few thousand: longer rows are split, or read twice."""
    for module in (softmax_launches, loss_launches):
        monkeypatch.setattr(module, "device_of", lambda index: SMALL)
    for module in (rows, strategies):
        monkeypatch.setattr(module, "ALONE_BYTES", 4096)


def of_rows(function, **values):
    def call(x, which):
        given = {name: each[which] if isinstance(each, torch.Tensor) else each for name, each in values.items()}
        x = x.detach().requires_grad_()
        y = function(x, -1, **given, batch_invariant=True)
        dy = torch.linspace(-1.0, 2.0, y.shape[-1], device=x.device).to(y.dtype).expand(y.shape)
        (dx,) = torch.autograd.grad(y, x, dy if y.ndim > 1 else torch.ones_like(y))
        return y.detach(), dx

    return call


def of_loss(reduction, **values):
    def call(x, which):
        x = x.detach().requires_grad_()
        target = (torch.arange(512, device=x.device) * 7 % x.shape[1])[which]
        found = cross_entropy(x, target, reduction=reduction, return_lse=True, **values, batch_invariant=True)
        (dx,) = torch.autograd.grad(found.loss.sum(), x)
        return dx, found.lse.detach(), *([found.loss.detach()] if reduction == "none" else [])

    return call


def same_in_any_batch(call, n, n_cols, dtype, device, batches=(1, 7, 64)):
    x = peaked(n, n_cols).to(dtype).to(device)
    whole = call(x, slice(0, n))
    shuffled = torch.randperm(n)
    moved = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)  # one element past 16 bytes
    apart = torch.cat([x, x[:, :3]], 1)[:, :n_cols]  # rows that start on any element
    given = [(x[i : i + size], slice(i, min(i + size, n))) for size, i in zip(batches, (n - 1, 3, 0), strict=False)]
    given += [(x[shuffled], shuffled), (moved[3:], slice(3, n)), (apart[2:9], slice(2, 9)), (apart[4:5], slice(4, 5))]
    for rows_of, which in given:
        for a, b in zip(call(rows_of, which), whole, strict=True):
            assert torch.equal(a, b[which])


def of_scores(x, which):
    scale, sink = torch.linspace(0.5, 2.0, 512, device=x.device)[:, None], torch.linspace(0.0, 9.0, 512)[:, None]
    mask = torch.rand(512, x.shape[1], generator=torch.Generator().manual_seed(3)).to(x.device) * 4
    return (softmax(x, -1, scale=scale[which], mask=mask[which], sink=sink.to(x)[which], batch_invariant=True),)


OPERATORS = {
    "softmax": of_rows(softmax), "log_softmax": of_rows(log_softmax), "logsumexp": of_rows(logsumexp),
    "softmax of scores": of_scores, "losses": of_loss("none"), "sum": of_loss("sum"),
    "sum, smoothed": of_loss("sum", label_smoothing=0.1, softcap=20.0, lse_square_scale=1e-3),
}  # fmt: skip


@kernels
@pairwise(strength=1)
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(("n_cols", "dtype"), [(5, BF16), (40, FP32), (130, FP32), (1000, FP16), (300, FP64)], ids=str)
def test_short_rows_have_the_same_bits_in_any_batch(name, n_cols, dtype, device):
    same_in_any_batch(OPERATORS[name], 512 if n_cols <= 40 else 20, n_cols, dtype, device, (1, 7, 64, 512))


@kernels
@pairwise(strength=1)
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(
    ("n_cols", "dtype", "taken"),
    [
        (1000, FP32, "row"),
        (2048, BF16, "split"),
        (2051, BF16, "split"),
        (20000, FP32, "stream"),
        (20001, BF16, "stream"),
    ],
    ids=str,
)
def test_long_rows_have_the_same_bits_in_any_batch(name, n_cols, dtype, taken, device, small):
    with fused_softmax.explain() as calls:
        softmax(peaked(2, n_cols).to(dtype).to(device), -1, batch_invariant=True)
    assert (calls[0].plan[0].strategy, calls[0].plan[0].parts > 1) == (taken, taken != "row")
    same_in_any_batch(OPERATORS[name], 10, n_cols, dtype, device)


@kernels
def test_results_are_those_of_float64(device, small):
    for n_cols in (7, 513, 2051, 20001):
        x = peaked(5, n_cols).to(device)
        for function in (softmax, log_softmax, logsumexp):
            ours, wanted = function(x, -1, batch_invariant=True), getattr(torch, function.__name__)(x, -1)
            torch.testing.assert_close(ours, wanted)
        target = torch.arange(5, device=device)
        for reduction in ("none", "sum", "mean"):
            grads = []
            for f, how in ((cross_entropy, {"batch_invariant": True}), (functional.cross_entropy, {})):
                leaf = x.clone().requires_grad_()
                f(leaf, target, reduction=reduction, **how).sum().backward()
                grads.append(leaf.grad)
            torch.testing.assert_close(*grads)


@kernels
def test_a_dim_that_is_strided_has_the_bits_of_rows(device):
    x = peaked(33, 24).to(device)
    y = softmax(x, -1, batch_invariant=True)
    for n in (1, 7, 33):
        leaf = x[:n].t().contiguous().requires_grad_()
        columns = softmax(leaf, 0, batch_invariant=True)
        assert columns.is_contiguous()
        assert torch.equal(columns.t(), y[:n])
        (dx,) = torch.autograd.grad(columns, leaf, x[:n].t())
        rows_leaf = x[:n].clone().requires_grad_()
        (wanted,) = torch.autograd.grad(softmax(rows_leaf, -1, batch_invariant=True), rows_leaf, x[:n])
        assert torch.equal(dx.t(), wanted)
        assert torch.equal(logsumexp(leaf.detach(), 0, batch_invariant=True), logsumexp(x[:n], 1, batch_invariant=True))


@kernels
def test_results_are_written_where_they_are_asked_for(device):
    x = peaked(6, 41).to(device)
    y = softmax(x, -1, batch_invariant=True)
    for room in (41, 48, 50):
        out = torch.full((6, room), 7.0, device=device)[:, :41]
        assert softmax(x, -1, out=out, batch_invariant=True) is out
        assert torch.equal(out, y)


# Which mode a call is in.


def modes_of(function):
    """(without it, with it) of calls whose bits differ by it."""
    without, alone = function(batch_invariant=False), function(batch_invariant=True)
    assert not all(torch.equal(a, b) for a, b in zip(without, alone, strict=True)), "the test would see nothing"
    return without, alone


def equal(found, wanted):
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def near_zero(n_rows, device):
    """Rows whose lse is 0 but for rounding. A greater lse has too few bits to show in which order it was summed."""
    x = peaked(n_rows, 2051)
    return (x - x.logsumexp(1, keepdim=True)).to(device)


def graded(y, leaf):
    return torch.autograd.grad(y, leaf, torch.linspace(0.5, 1.0, y.numel(), device=y.device).view(y.shape))


CALLS = {
    "softmax": lambda x, **how: softmax(x, -1, **how),
    "log_softmax": lambda x, **how: log_softmax(x, -1, **how),
    "logsumexp": lambda x, **how: logsumexp(x, -1, **how),
    "softmax of scores": lambda x, **how: softmax(x, -1, scale=0.5, is_causal=True, **how),
    "losses": lambda x, **how: cross_entropy(x, torch.arange(len(x), device=x.device), reduction="none", **how),
    "a loss": lambda x, **how: cross_entropy(x, torch.arange(len(x), device=x.device), softcap=30.0, **how),
}


def of_both_passes(name, device):
    x = near_zero(9, device)

    def call(**how):
        leaf = x.clone().requires_grad_()
        y = CALLS[name](leaf, **how)
        (dx,) = graded(y, leaf)
        return CALLS[name](x, **how), y.detach(), dx

    return call


@kernels
@pytest.mark.parametrize("name", CALLS)
def test_no_call_is_kept_for_the_other_mode(name, device, monkeypatch):
    call = of_both_passes(name, device)
    for _ in range(2):
        without, alone = modes_of(call)
        equal(call(), without)
        monkeypatch.setattr(options, "_asked", True)
        equal(call(), alone)
        equal(call(batch_invariant=False), without)
        monkeypatch.setattr(options, "_asked", False)
        equal(call(), without)


@pytest.mark.parametrize("value", ["1", "0", None])
def test_the_environment_is_read_at_the_import(value):
    code = "import fused_softmax.core.options as o, fused_softmax; print(o.by_environment())"
    environment = {name: each for name, each in os.environ.items() if name != options.BATCH_INVARIANT}
    environment |= {} if value is None else {options.BATCH_INVARIANT: value}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == str(value == "1")


@kernels
def test_what_enable_takes_asks_the_environment(device, monkeypatch):
    x, target = near_zero(9, device), torch.arange(9, device=device)

    def call():
        found = []
        for function in (
            lambda t: torch.softmax(t, -1),
            lambda t: torch.log_softmax(t, -1),
            lambda t: torch.logsumexp(t, -1),
            lambda t: functional.cross_entropy(t, target),
        ):
            leaf = x.clone().requires_grad_()
            y = function(leaf)
            found += [
                y.detach(),
                *graded(y, leaf),
            ]
        return found

    with fused_softmax.enabled():
        without = call()
        monkeypatch.setattr(options, "_asked", True)
        alone = call()
        monkeypatch.setattr(options, "_asked", False)
        equal(call(), without)
    assert [torch.equal(a, b) for a, b in zip(without, alone, strict=True)].count(False) >= 6
    leaf = x.clone().requires_grad_()
    y = softmax(leaf, -1, batch_invariant=True)
    equal(
        alone[:2],
        (y.detach(), *graded(y, leaf)),
    )


@kernels
@pytest.mark.parametrize("name", CALLS)
def test_compiled_code_has_the_bits_of_eager_code(name, device):
    call = of_both_passes(name, device)
    _, alone = modes_of(call)
    x = near_zero(9, device)
    torch._dynamo.reset()
    compiled = torch.compile(partial(CALLS[name], batch_invariant=True), backend="aot_eager", fullgraph=True)
    equal((compiled(x),), alone[:1])
    leaf = x.clone().requires_grad_()
    y = compiled(leaf)
    (dx,) = graded(y, leaf)
    if name not in ("a loss", "logsumexp"):  # of which other operations make the gradient, without a sum
        equal((dx,), alone[2:])
    torch.testing.assert_close(dx, alone[2])


@kernels
def test_vmap_and_autocast_keep_it(device):
    x = peaked(12, 2051).to(device)
    wanted = softmax(x, -1, batch_invariant=True)
    assert torch.equal(
        torch.vmap(lambda t: softmax(t, -1, batch_invariant=True))(x.view(3, 4, 2051)).view(12, 2051), wanted
    )
    half = x.bfloat16()
    with torch.autocast(device, dtype=BF16):
        found = softmax(half, -1, batch_invariant=True)
    assert torch.equal(found, softmax(half, -1, dtype=found.dtype, batch_invariant=True))


@kernels
def test_explain_and_modules_have_it(device):
    x = peaked(3, 40).to(device)
    with fused_softmax.explain() as calls:
        softmax(x, -1, batch_invariant=True)
        softmax(x, -1, batch_invariant=False)
        cross_entropy(x, torch.zeros(3, dtype=torch.long, device=device), batch_invariant=True)
    assert [each.plan[0].batch_invariant for each in calls] == [True, False, True]
    assert [str(each).count("the same bits in any batch") for each in calls] == [1, 0, 1]
    assert repr(Softmax(-1, batch_invariant=True)) == "Softmax(dim=-1, batch_invariant=True)"
    x = peaked(9, 2051).to(device)
    _, alone = modes_of(lambda **how: (softmax(x, -1, **how),))
    assert torch.equal(Softmax(-1, batch_invariant=True)(x), alone[0])
    target = torch.zeros(9, dtype=torch.long, device=device)
    wanted = cross_entropy(x, target, reduction="none", batch_invariant=True)
    assert torch.equal(CrossEntropyLoss(reduction="none", batch_invariant=True)(x, target), wanted)


# What refuses.


def differentiated_twice(function, x):
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(function(leaf).sum(), leaf, create_graph=True)


def moved(x):
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


REFUSED = {
    "a second derivative": lambda x, t: differentiated_twice(lambda z: softmax(z, -1, batch_invariant=True), x),
    "of a loss": lambda x, t: differentiated_twice(lambda z: cross_entropy(z, t, batch_invariant=True), x),
    "functorch": lambda x, t: torch.func.grad(lambda z: log_softmax(z, -1, batch_invariant=True).sum())(x),
    "functorch, logsumexp": lambda x, t: torch.func.grad(lambda z: logsumexp(z, -1, batch_invariant=True).sum())(x),
    "functorch, loss": lambda x, t: torch.func.grad(lambda z: cross_entropy(z, t, batch_invariant=True))(x),
    "scale": lambda x, t: softmax(x, -1, scale=x[:, :1].clone().requires_grad_(), batch_invariant=True),
    "sink": lambda x, t: logsumexp(x, -1, sink=x[:, :1].clone().requires_grad_(), batch_invariant=True),
    "a layer": lambda x, t: linear_cross_entropy(x, x, t, batch_invariant=True),
}


@kernels
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_not_keep_it_says_so(name, device, monkeypatch):
    x, target = peaked(4, 40).to(device), torch.arange(4, device=device)
    with pytest.raises(
        NotImplementedError, match=r"batch_invariant is not for this call, since .*batch_invariant=False"
    ):
        REFUSED[name](x, target)


@kernels
def test_the_environment_refuses_too_and_false_stands_against_it(device, monkeypatch):
    monkeypatch.setattr(options, "_asked", True)
    x, target = peaked(4, 40).to(device), torch.arange(4, device=device)
    with pytest.raises(NotImplementedError, match="linear_cross_entropy: batch_invariant"):
        linear_cross_entropy(x, x, target)
    assert linear_cross_entropy(x, x, target, batch_invariant=False).ndim == 0
    with pytest.raises(NotImplementedError, match="softmax: batch_invariant"):
        differentiated_twice(lambda z: softmax(z, -1), x)
    assert differentiated_twice(lambda z: softmax(z, -1, batch_invariant=False), x)


@kernels
def test_logits_that_would_be_copied_are_not_overwritten(device):
    def gradient_over(x):
        logits = x.clone().requires_grad_() * 1.0
        logits = logits if x.data_ptr() % 16 == 0 else moved(logits)
        cross_entropy(logits, target, reduction="sum", inplace_backward=True, batch_invariant=True).backward()
        return logits.detach()

    x, target = peaked(4, 40).to(device), torch.arange(4, device=device)
    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(cross_entropy(leaf, target, reduction="sum", batch_invariant=True), leaf)
    assert torch.equal(gradient_over(x), wanted)
    with pytest.raises(RuntimeError, match="inplace_backward takes logits"):
        gradient_over(moved(x))


@pytest.mark.parametrize("value", [1, "1", torch.tensor(True)], ids=repr)
def test_other_values_are_no_bools(value):
    x, target = torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)
    for name, call in {
        "softmax": partial(softmax, x, -1), "log_softmax": partial(log_softmax, x, -1),
        "logsumexp": partial(logsumexp, x, -1), "cross_entropy": partial(cross_entropy, x, target),
        "linear_cross_entropy": partial(linear_cross_entropy, x, x, target),
    }.items():  # fmt: skip
        with pytest.raises(TypeError, match=f"{name}: batch_invariant must be a bool"):
            call(batch_invariant=value)


# On a GPU, where a sum's order follows from warps and lanes too.


@pytest.mark.gpu
@pytest.mark.timeout(300, method="thread")
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("n_cols", [40, 1000, 1001, 4096, 8200, 32000, 50257, 128256, 262144])
@pytest.mark.parametrize("name", OPERATORS)
def test_rows_have_the_same_bits_in_batches_up_to_8192(name, n_cols, dtype, device):
    call, many = OPERATORS[name], 8192 if n_cols < 50000 or name == "softmax" else 1024
    few = peaked(512, n_cols, dtype).to(device)
    wanted = call(few, slice(None))
    for size in (1, 7, 64):
        for i in (0, 3, 512 - size):
            for a, b in zip(call(few[i:][:size], slice(i, i + size)), wanted, strict=True):
                assert torch.equal(a, b[i:][:size]), (size, i)
    shuffled = torch.randperm(512)
    for a, b in zip(call(few[shuffled.to(device)], shuffled), wanted, strict=True):
        assert torch.equal(a, b[shuffled.to(device)])
    which = torch.arange(many) % 512
    for a, b in zip(call(few.repeat(many // 512, 1), which), wanted, strict=True):
        assert torch.equal(a.view(-1, 512, *a.shape[1:]), b.expand(many // 512, *b.shape))
