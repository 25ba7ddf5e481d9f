"""Divergences whose gradient is written with their sum: the same as of rows, in any batch, by parts that go alone."""

import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import INTERPRETED, kernels
from products import pairwise
from test_divergence import BF16, FP32, GIVEN, every_kind, given_as, logs_of, pair

from fused_softmax import cross_entropy, divergence
from fused_softmax.core import calls
from fused_softmax.core.plan import H100, plan_pairs
from fused_softmax.ops.losses import divergence_launches as launches
from fused_softmax.ops.losses.options import Divergence

pytestmark = kernels
ROW, SPLIT, MANY = 4096, 20000, 140000  # columns; of MANY, warps poll parts of their own


def by_both(x, y, kind, target_is, weight=None, **options):
    """(a sum and its gradient by the one launch, the same by rows and then their gradient)."""
    options = {"kind": kind, "target_is": target_is, "weight": weight, **options}
    leaf = x.detach().requires_grad_()
    at_once, of_rows = divergence(leaf, y, reduction="sum", **options), divergence(leaf, y, reduction="none", **options)
    gradients = [torch.autograd.grad(each.sum(), leaf)[0] for each in (at_once, of_rows)]
    return (at_once.detach(), gradients[0]), (of_rows.detach().sum(), gradients[1])


@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_rows_plan_does_not_follow_from_the_number_of_rows(itemsize):
    for n_cols, strategy in ((8, "row"), (ROW, "row"), (SPLIT, "split"), (151936, "split")):
        plans = {replace(plan_pairs(n, n_cols, itemsize, H100), n_rows=1, prefetch=0) for n in (1, 7, 132, 4096, 2**20)}
        assert {plan.strategy for plan in plans} == {strategy}
        assert len(plans) == 1, n_cols
    assert plan_pairs(8, 151937, itemsize, H100) is None
    assert plan_pairs(8, 2**24, itemsize, H100) is None


@pairwise(("kind", "target_is"), ("kind", "n_cols"))
@every_kind
@pytest.mark.parametrize("target_is", GIVEN)
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, BF16), (BF16, FP32), (FP32, BF16)], ids=str)
@pytest.mark.parametrize("n_cols", [8, 264, ROW, ROW + 8, SPLIT])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"softcap": 5.0, "scale": -0.5}], ids=str)
def test_rows_and_parts(kind, target_is, dtypes, n_cols, options, device):
    x, y = pair(5, n_cols, *dtypes, device)
    y, weight = given_as(y, target_is), torch.tensor([1.0, 0.5, 2.0, 0.0, 3.0], device=device)
    if target_is == "logits":
        options = options | {"target_temperature": torch.linspace(0.5, 2, 5, device=device)}
    (found, dx), (wanted, truth) = by_both(x, y, kind, target_is, weight, **options)
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=1e-5)
    near, rows = 1e-2 if x.dtype == BF16 else 5e-5, torch.ones(5, dtype=torch.bool, device=device)
    if kind == "tvd":  # whose gradient jumps where both probabilities are equal, and with it the sum over the row
        log_q, log_t = logs_of(x, y, target_is=target_is, **options)
        rows = ~(((log_q - log_t).abs() < 1e-6) & (log_q > -9)).any(-1)
    assert rows.sum() > 2
    dx_of, truth = dx[rows].float(), truth[rows].float()
    torch.testing.assert_close(dx_of, truth, rtol=near, atol=near * truth.abs().max().item())
    assert (dx[3] == 0).all()


@pytest.mark.parametrize("kind", ["kl", "jsd"])
@pytest.mark.parametrize(("n_cols", "strategy"), [(8192, "row"), (8200, "split"), (MANY, "split")])
def test_long_rows_of_16_bits(kind, n_cols, strategy, device):
    x, y = pair(3, n_cols, BF16, BF16, device)
    plan = plan_pairs(3, n_cols, 2, H100)
    assert (plan.strategy, plan.lanes > 32 and plan.strategy == "split") == (strategy, n_cols == MANY)
    weight = torch.tensor([1.0, 0.0, 2.0], device=device)
    (found, dx), (wanted, truth) = by_both(x, y, kind, "logits", weight)
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=1e-5)
    torch.testing.assert_close(dx.float(), truth.float(), rtol=1e-2, atol=1e-2 * truth.abs().max().item())


@pytest.mark.parametrize("dtypes", [(BF16, FP32), (FP32, BF16), (BF16, BF16), (FP32, FP32)], ids=str)
@pytest.mark.parametrize("n_cols", [4, 8, 12, 20, ROW + 4])
@pytest.mark.parametrize("of_student", [True, False])
def test_rows_on_any_boundary(dtypes, n_cols, of_student, device):
    x, y = pair(5, n_cols, *dtypes, device)
    apart = (x if of_student else y).new_empty(5, n_cols + 1)[:, :n_cols]
    apart.copy_(x if of_student else y)
    x, y = (apart, y) if of_student else (x, apart)
    (found, dx), (wanted, truth) = by_both(x, y, "kl", "logits")
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=1e-5)
    torch.testing.assert_close(dx.float(), truth.float(), rtol=1e-2, atol=1e-2 * truth.abs().max().item())


@pytest.mark.parametrize("dtypes", [(BF16, FP32), (FP32, BF16), (FP32, FP32)], ids=str)
@pytest.mark.parametrize("width", [8, 12, 13, 16])
def test_gradients_into_rows_that_lie_apart(dtypes, width, device):
    x, y = pair(5, 8, *dtypes, device)
    given, g = launches.Pair(x, y), torch.linspace(0.5, 2, 5, device=device)
    rows = launches.forward(given, Divergence())
    wanted = launches.backward(given, rows, g, Divergence())[0]
    found = x.new_full((5, width), 7.0)
    launches.backward(given, rows, g, Divergence(), dx=found[:, :8])
    assert torch.equal(found[:, :8], wanted)
    assert (found[:, 8:] == 7).all()


@pytest.mark.parametrize("kind", ["kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("n_cols", [ROW, ROW + 1])
def test_negative_probabilities_make_their_row_nan(kind, n_cols, device):
    x, y = pair(2, n_cols, device=device)
    y = y.softmax(-1)
    y[1, 5] = -0.25
    found = divergence(
        x.requires_grad_(), y, kind=kind, target_is="probs", weight=torch.tensor([0.0, 1.0], device=device)
    )
    assert found.isnan()


@every_kind
@pytest.mark.parametrize("target_is", GIVEN)
@pytest.mark.parametrize("n_cols", [ROW, SPLIT])
def test_the_same_bits_in_any_batch(kind, target_is, n_cols, device):
    x, y = pair(7, n_cols, BF16, BF16, device)
    y = given_as(y, target_is)

    def gradient(which):
        leaf = x[which].detach().requires_grad_()
        return torch.autograd.grad(divergence(leaf, y[which], kind=kind, target_is=target_is, reduction="sum"), leaf)[0]

    wanted, shuffled = gradient(slice(None)), torch.randperm(7)
    assert torch.equal(gradient(shuffled), wanted[shuffled])
    assert torch.equal(gradient(slice(4, 5)), wanted[4:5])


@pytest.mark.skipif(not INTERPRETED, reason="programs one after another, of which all but a row's last miss others")
@pairwise()
@pytest.mark.parametrize("kind", ["kl", "reverse_kl", "jsd", "tvd", "cross"])
@pytest.mark.parametrize("target_is", GIVEN)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_parts_that_miss_others_go_alone_with_the_same_bits(kind, target_is, dtype, monkeypatch):
    x, y = pair(2, SPLIT, dtype, dtype)
    target_is = "probs" if kind == "cross" else target_is
    given = (
        launches.Pair(x, given_as(y, target_is)),
        torch.tensor([0.5, 2.0]),
        2.0,
        Divergence(kind=kind, target_is=target_is),
    )
    wanted = launches.at_once(*given, kind == "cross")
    calls.forget()
    monkeypatch.setattr(launches, "IN_TURN", ({},))
    monkeypatch.setattr(launches, "IN_TURN_TWICE", ({},))
    for found, of_all in zip(launches.at_once(*given, kind == "cross"), wanted, strict=True):
        assert (found is None and of_all is None) or torch.equal(found, of_all)


HASTY = """
import hashlib, sys
import torch, triton.language as tl
from fused_softmax.core.kernels import exchange
exchange.POLLS = tl.constexpr(int(sys.argv[1]))
from fused_softmax import divergence
torch.manual_seed(0)
x, y = (torch.randn(300, 60000, device="cuda", dtype=torch.bfloat16).mul_(2) for _ in range(2))
for kind in ("kl", "reverse_kl", "jsd", "tvd"):
    leaf = x.clone().requires_grad_()
    found = divergence(leaf, y, kind=kind, reduction="sum")
    found.backward()
    print(kind, found.item(), hashlib.md5(leaf.grad.view(torch.int16).cpu().numpy().tobytes()).hexdigest())
"""


INTERPRETED = """
import torch
from fused_softmax import divergence
torch.manual_seed(0)
for n_cols, of in ((264, ("logits", "log_probs", "probs")), (8200, ("logits",))):
    for given in of:
        for kind in ("kl", "reverse_kl", "jsd", "tvd"):
            x, y = torch.randn(2, n_cols), torch.randn(2, n_cols)
            y = {"logits": y, "log_probs": y.log_softmax(1), "probs": y.softmax(1)}[given]
            options = {"kind": kind, "target_is": given, "beta": 0.3, "reduction": "sum"}
            found = []
            for dtype in (torch.float32, torch.float64):
                leaf = x.to(dtype).requires_grad_()
                value = divergence(leaf, y.to(dtype), **options)
                found.append((value.detach().double(), torch.autograd.grad(value, leaf)[0].double()))
            for ours, truth in zip(*found):
                torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-6)
print("all right")
"""


def test_tritons_own_interpreter_computes_them():
    """As users run it: the other tests change the interpreter, so that it takes less time."""
    environment = os.environ | {"FUSED_SOFTMAX_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", INTERPRETED]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert run.stdout == "all right\n", run.stderr[-2000:]


@pytest.mark.gpu
def test_programs_that_wait_for_nobody_find_the_same_bits():
    """Those that poll never go alone, if they come before others of their row."""
    waiting, hasty = (
        subprocess.run([sys.executable, "-c", HASTY, polls], capture_output=True, text=True, check=True, timeout=100)
        for polls in ("512", "0")
    )
    assert waiting.stdout.count("\n") == 4
    assert hasty.stdout == waiting.stdout


@every_kind
@pytest.mark.parametrize("n_cols", [ROW, SPLIT])
def test_rows_of_weight_0_hold_anything(kind, n_cols, device):
    x, y = pair(3, n_cols, device=device)
    weight = torch.tensor([1.0, 0.0, 2.0], device=device)
    wanted = by_both(x, y, kind, "logits", weight)[0]
    x[1], y[1] = torch.nan, torch.inf
    for found, before in zip(by_both(x, y, kind, "logits", weight)[0], wanted, strict=True):
        assert torch.equal(found, before)


@pytest.mark.parametrize("n_cols", [ROW, SPLIT + 1])
def test_no_weight_at_all_has_no_mean_and_no_gradient(n_cols, device):
    x, y = pair(3, n_cols, device=device)
    loss = divergence(leaf := x.requires_grad_(), y, weight=torch.zeros(3, device=device))
    assert loss.isnan()
    assert not torch.autograd.grad(loss, leaf)[0].any()


@pytest.mark.parametrize("rest", ["renormalize", "lump"])
def test_rows_of_weight_0_with_columns_hold_anything(rest, device):
    x, y = pair(3, 40, device=device)
    columns = torch.arange(8, device=device).expand(3, 8)
    target = y.softmax(-1)[:, :8]
    weight = torch.tensor([1.0, 0.0, 2.0], device=device)
    x[1] = torch.nan
    options = {"columns": columns, "rest": rest, "target_is": "probs", "weight": weight}
    (dx,) = torch.autograd.grad(divergence(leaf := x.requires_grad_(), target, **options), leaf)
    assert dx.isfinite().all()
    assert not dx[1].any()


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_jsd_of_distributions_apart(beta, device):
    """It is the entropy of beta."""
    x, y = torch.zeros(1, ROW, device=device), torch.zeros(1, ROW, device=device)
    x[0, 7], y[0, 9] = 500.0, 400.0
    wanted = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
    found = divergence(x.requires_grad_(), y, kind="jsd", beta=beta)
    assert abs(found.item() - wanted) < 1e-6 * wanted


@pytest.mark.parametrize("n_cols", [ROW, SPLIT])
def test_a_second_backward_pass_writes_the_gradient_again(n_cols, device):
    x, y = pair(3, n_cols, device=device)
    loss = divergence(leaf := x.requires_grad_(), y)
    (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    kept = first.clone()
    first.zero_()  # it is the caller's
    (second,) = torch.autograd.grad(3 * loss, leaf, retain_graph=True)
    torch.testing.assert_close(second, 3 * kept)
    assert torch.equal(torch.autograd.grad(loss, leaf)[0], kept)


@pytest.mark.parametrize("n_cols", [ROW, SPLIT])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_of_probabilities(n_cols, dtype, reduction, smoothing, device):
    x, y = pair(3, n_cols, dtype, dtype, device)
    p, weight = given_as(y, "probs"), torch.linspace(0.5, 2, n_cols, device=device)
    inputs = [each.detach().requires_grad_() for each in (x, p)]
    exact = [each.detach().double().requires_grad_() for each in (x, p)]
    options = {"reduction": reduction, "label_smoothing": smoothing}
    found = cross_entropy(*inputs, weight, **options)
    wanted = torch.nn.functional.cross_entropy(*exact, weight.double(), **options)
    near = 1e-2 if dtype == BF16 else 2e-5
    torch.testing.assert_close(found.double(), wanted, rtol=near, atol=near)
    for dx, truth in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(wanted, exact), strict=True):
        torch.testing.assert_close(dx.double(), truth, rtol=near, atol=near * truth.abs().max().item())


@every_kind
@pytest.mark.parametrize("who", ["student", "teacher"])
@pytest.mark.parametrize("n_cols", [ROW, SPLIT])
def test_a_row_of_nan_gets_a_gradient_of_nan(kind, who, n_cols, device):
    x, y = pair(3, n_cols, device=device)
    (x if who == "student" else y)[1, 5] = math.nan
    weight = torch.tensor([1.0, 2.0, 3.0], device=device)
    for found, dx in by_both(x, y, kind, "logits", weight):
        assert found.isnan()
        assert dx.isnan().any(-1).tolist() == [False, True, False]


@pytest.mark.parametrize("kind", ["kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("n_cols", [ROW, SPLIT])
def test_subnormal_probabilities(kind, n_cols, device):
    """By a logarithm that takes them for 0, reverse_kl was infinite."""
    x, y = pair(2, n_cols, device=device)
    y = y.softmax(-1)
    y[:, 7], y[:, 9] = 1e-39, 1e-42
    (found, dx), (wanted, truth) = by_both(x, y, kind, "probs")
    assert found.isfinite()
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=1e-5)
    torch.testing.assert_close(dx, truth, rtol=5e-5, atol=5e-5 * truth.abs().max().item())


@every_kind
@pytest.mark.parametrize("n_cols", [ROW, SPLIT])
def test_equal_rows_diverge_by_nothing(kind, n_cols, device):
    x, _ = pair(3, n_cols, device=device)
    for found, dx in by_both(x, x.clone(), kind, "logits"):
        torch.testing.assert_close(found, torch.zeros_like(found), rtol=0, atol=1e-6)
        torch.testing.assert_close(dx, torch.zeros_like(dx), rtol=0, atol=1e-7)
