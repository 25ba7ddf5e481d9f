"""softmax, log_softmax and logsumexp with a sink, one more logit in the sum of every row: held to float64's cat."""

import math
import re
from dataclasses import replace

import products
import pytest
import torch
from conftest import peaked
from contract import assert_gradients, assert_scores, composed, public
from products import pairwise
from shapes import ALIGNMENTS, DTYPES, STRATEGIES, framed
from test_library import compiled
from test_library import targets as nodes
from test_scores import DTYPE_PAIRS, VALUES, added, hide, kept, pytestmark, run, skip_impossible  # noqa: F401

import fused_softmax
from fused_softmax import nn
from fused_softmax.core.plan import H200, candidate, plan_reduction
from fused_softmax.ops.softmax import gradients
from fused_softmax.ops.softmax import launches as softmax_rows
from fused_softmax.ops.softmax import scores as scored_calls
from fused_softmax.ops.softmax.calls import forward_by_plan
from fused_softmax.ops.softmax.scores import Scores, scores_against

FP32, FP16, BF16, FP64 = DTYPES
FUNCTIONS = ("softmax", "log_softmax", "logsumexp")

every_function = pytest.mark.parametrize("function", FUNCTIONS)
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
every_alignment = pytest.mark.parametrize("alignment", ALIGNMENTS)
not_reducing = pytest.mark.parametrize("function", FUNCTIONS[:2])


def on(device, scored):
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in scored.items()}


def sinks(*shape, dtype=FP32, seed=7):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 6 + 4).to(dtype)


def _empty(n):
    """A row of which nothing is kept, beside others."""
    mask = kept(2, 2, n)
    mask[1, 0] = False
    return mask


# Rows are [2, 2, n]: two of each sort of broadcasting.
SCORES = {
    "number": lambda n: {"sink": 9.5},
    "no dims": lambda n: {"sink": torch.tensor(-3.0, dtype=FP64)},
    "a head, scaled": lambda n: {"sink": sinks(2, 1, 1, dtype=BF16), "scale": -1.5},
    "a scale a row": lambda n: {"sink": sinks(2, 1), "scale": torch.tensor([[0.5], [-2.0]]).unsqueeze(-1)},
    "scale 0": lambda n: {"sink": sinks(2, 2, 1), "scale": 0.0},
    "scale 0 of some": lambda n: {"sink": 13.0, "scale": torch.tensor([[0.0, 2.0], [-1.25, 0.0]]).unsqueeze(-1)},
    "masked": lambda n: {"sink": sinks(2, 1, 1), "mask": _empty(n)},
    "masked, empty rows zero": lambda n: {
        "sink": torch.tensor([[3.0, 12.0], [-math.inf, 8.0]]).unsqueeze(-1), "mask": _empty(n), "masked_rows": "zero",
    },
    "masked, scale 0": lambda n: {"sink": sinks(2, 1), "mask": _empty(n), "scale": 0.0},
    "added": lambda n: {"sink": sinks(2, 2, 1, dtype=FP16), "mask": added(2, n), "scale": 0.7},
    "-inf, inf and NaN": lambda n: {
        "sink": torch.tensor([[-math.inf, math.inf], [math.nan, 3.0]]).unsqueeze(-1), "mask": _empty(n),
    },
    "-inf and inf, scale 0": lambda n: {
        "sink": torch.tensor([[-math.inf, math.inf], [math.nan, 3.0]]).unsqueeze(-1), "scale": 0.0,
    },
}  # fmt: skip


@pairwise(("strategy", "alignment"))
@every_strategy
@every_alignment
@pytest.mark.parametrize(("function", "dtype"), [("softmax", FP32), ("log_softmax", BF16), ("log_softmax", FP32)])
@pytest.mark.parametrize("name", SCORES)
def test_every_strategy(strategy, alignment, function, dtype, name, device):
    n_cols = 616 if alignment == "even" else 613
    scored = SCORES[name](n_cols)
    x = hide(peaked(4, n_cols).unflatten(0, (2, 2)), scored).flatten(0, 1).to(dtype)
    scored = on(device, scored)
    source, target = framed(alignment, x, device=device)
    choices = {"block_rows": 2} if strategy == "tile" else {}
    x, y = run(strategy, function, source, target, (2, 2), choices=choices, **scored)
    assert_scores(y, function, x, **scored)


@pairwise()
@pytest.mark.parametrize("n_cols", [40, 613, 2500])  # several rows a program, and parts of one
@pytest.mark.parametrize("like", [4, 4096], ids=["few", "many"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP64], ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_logsumexp_by_every_strategy(n_cols, like, dtype, name, device):
    scored = SCORES[name](n_cols)
    x = hide(peaked(4, n_cols).unflatten(0, (2, 2)), scored).to(dtype).to(device)
    scored = on(device, scored)
    scores, lse = Scores(**scored).exact(dtype, x.device), torch.empty(2, 2, dtype=dtype, device=device)
    held = max(dtype.itemsize, 4 if scores.added else 0)
    alignment = "even" if n_cols % 8 == 0 else "scalar"
    plan = replace(plan_reduction(like, n_cols, held, H200, alignment=alignment), n_rows=4)
    layout = scores_against(scores, tuple(x.shape))
    number = (scores.number,) if isinstance(scores.scale, float) else ()
    rows = x.flatten(0, 1)
    launch = softmax_rows.prepare_logsumexp(rows, lse, plan, layout)
    launch(rows, lse, *layout.tensors, *number)
    assert_scores(lse, "logsumexp", x, **scored)


@pairwise()
@every_strategy
@pytest.mark.parametrize("alignment", ["even", "shifted"])
@pytest.mark.parametrize(("given", "wanted"), DTYPE_PAIRS, ids=str)
@pytest.mark.parametrize("of_sink", DTYPES, ids=str)
def test_dtypes(strategy, alignment, given, wanted, of_sink, device):
    """The sink is rounded to the dtype of the arithmetic, whatever the input is rounded to."""
    skip_impossible(strategy, given, wanted)
    x = peaked(2, 600 if alignment == "even" else 597, given)
    scored = {"sink": sinks(2, 1, dtype=of_sink).to(device)}
    source, target = framed(alignment, x, wanted, device=device)
    x, y = run(strategy, "log_softmax", source, target, **scored)
    assert_scores(y, "log_softmax", x, dtype=wanted, **scored)


@pairwise(strength=1)
@every_strategy
@pytest.mark.parametrize("sink", [-math.inf, 5.0, math.inf, math.nan])
@not_reducing
def test_special_values(strategy, sink, function, nvidia, device):
    x = peaked(len(VALUES), 613)
    for row, changes in enumerate(VALUES.values()):
        for cols, value in changes:
            x[row, cols] = value
    source, target = framed("shifted", x, device=device)
    x, y = run(strategy, function, source, target, sink=sink)
    assert_scores(y, function, x, sink=sink)
    if sink == -math.inf:
        assert_scores(y, function, x)


@every_function
@pytest.mark.parametrize("dtype", [FP32, BF16, FP64], ids=str)
def test_a_sink_of_minus_infinity_gives_the_bits_of_no_sink(function, dtype, nvidia, device):
    for shape in ((3, 40), (2, 1300), (2, 3000)):
        x = peaked(*shape, dtype).to(device)
        assert torch.equal(public(function, x, sink=-math.inf), public(function, x))


@every_function
@pytest.mark.parametrize("n_cols", [40, 4000])
def test_the_sink_of_a_row_that_is_masked_whole_is_exact(function, n_cols, nvidia, device):
    wanted = {"softmax": 0.0, "log_softmax": -math.inf, "logsumexp": 111.3}[function]
    mask = torch.zeros(n_cols, dtype=torch.bool, device=device)
    for masked_rows in ("nan", "zero"):
        y = public(function, peaked(3, n_cols).to(device), mask=mask, sink=111.3, masked_rows=masked_rows)
        assert torch.equal(y, torch.full_like(y, wanted))


@pairwise(strength=1)
@every_strategy
@pytest.mark.parametrize("scored", [{}, {"scale": 0.0}, {"scale": -0.5, "masked_rows": "zero"}], ids=str)
@pytest.mark.parametrize(("n_queries", "n_keys"), [(20, 12), (5, 613), (1, 70)])
@not_reducing
def test_causal(strategy, scored, n_queries, n_keys, function, device):
    """Queries that see no key have a sink all the same."""
    scored = scored | {"is_causal": True, "sink": sinks(2, 1, 1).to(device)}
    x = hide(peaked(2 * n_queries, n_keys).unflatten(0, (2, n_queries)), scored).flatten(0, 1)
    source, target = framed("even" if n_keys % 4 == 0 else "shifted", x, device=device)
    choices = {"part_cols": 64} if strategy == "split" else {}
    x, y = run(strategy, function, source, target, (2, n_queries), choices=choices, **scored)
    assert_scores(y, function, x, **scored)


def test_rows_that_share_a_large_mask_follow_each_other(device, monkeypatch):
    monkeypatch.setattr("fused_softmax.ops.softmax.scores._KEPT_BYTES", 0)
    x, mask = peaked(12, 700).view(2, 2, 3, 700).to(device), added(1, 3, 700).to(device)
    scores = Scores(mask=mask, sink=sinks(2, 1, 1).to(device))
    assert scores_against(scores, tuple(x.shape)).shared_dims == 2
    plan = candidate("row", 12, 700, 4, H200, num_warps=2, prefetch=2)
    assert_scores(forward_by_plan(x, plan, scores=scores), "softmax", x, mask=mask, sink=scores.sink)


@pairwise(strength=1)
@pytest.mark.parametrize(
    ("shape", "dim", "of_sink"),
    [
        ((), 0, ()), ((70,), 0, (1,)), ((3, 70), 1, (3, 1)), ((3, 70), 1, (1,)), ((40, 3), 0, (1, 3)),
        ((2, 3, 5, 40), -1, (3, 1, 1)), ((2, 40, 5), 1, (5,)), ((2, 40, 5), -2, (2, 1, 1)), ((3, 1), 1, (3, 1)),
        ((0, 40), 1, (1, 1)), ((2, 3, 4, 3, 40), -1, (2, 1, 4, 1, 1)),
    ],
    ids=str,
)  # fmt: skip
@every_function
def test_shapes_and_dims(shape, dim, of_sink, function, device):
    x = peaked(1, math.prod(shape)).view(shape).to(device)
    for sink in (sinks(*of_sink).to(device), 2):
        for scored in ({"sink": sink}, {"sink": sink, "scale": 0.5, "masked_rows": "zero"}):
            assert_scores(public(function, x, dim, **scored), function, x, dim, **scored)


@every_function
def test_a_sink_of_odd_strides_or_of_another_place(function, device):
    x = peaked(24, 40).view(2, 3, 4, 40).to(device)
    for sink in (sinks(4, 3, 2, 1).permute(2, 1, 0, 3), sinks(1).expand(2, 3, 4, 1), sinks(6, 1, 1)[::2]):
        scored = {"sink": sink.to(device), "scale": torch.full((2, 1, 1, 1), 0.5, device=device)}
        assert_scores(public(function, x, **scored), function, x, **scored)
    # Three dims of strides of their own and a fourth go through copies.
    x = peaked(48, 40).view(2, 2, 3, 4, 40).transpose(0, 2).to(device)
    scored = {"sink": sinks(3, 1, 2, 1, 1).to(device), "mask": kept(2, 1, 4, 40).to(device)}
    for _ in range(2):
        assert_scores(public(function, x, **scored), function, x, **scored)


@not_reducing
def test_out_may_be_the_input_or_lie_over_the_sink(function, device):
    x, memory = peaked(3, 40).to(device), torch.zeros(3, 41, device=device)
    memory[:, 40:] = sink = sinks(3, 1).to(device)
    expected = public(function, x, sink=sink)
    own = x.clone()
    assert public(function, own, sink=sink, out=own) is own
    torch.testing.assert_close(own, expected)
    for _ in range(2):
        out = memory.view(-1)[3:].as_strided((3, 40), (40, 1), 2)
        sink_of_it = memory[:, 40:].copy_(sink)
        torch.testing.assert_close(public(function, x, sink=sink_of_it, out=out), expected)


# Calls that are kept.


@pairwise(strength=1)
@every_function
@pytest.mark.parametrize("scored", [{}, {"scale": 0.5}, {"scale": 0.0}], ids=str)
def test_a_kept_call_takes_the_numbers_and_values_of_each_call(function, scored, device):
    x, more, sink = peaked(3, 40).to(device), peaked(5, 40).to(device), torch.zeros(1, 1, device=device)
    for value in (0.0, 3.0, -2, math.inf):
        sink.fill_(value)
        for given in (value, sink, sink.clone(), sink.expand(3, 1), None, sink.double()):
            asked = scored | {"sink": given}
            assert_scores(public(function, x, **asked), function, x, **asked)
            if given is None or not isinstance(given, torch.Tensor) or given.shape[0] == 1:
                assert_scores(public(function, more, **asked), function, more, **asked)


def test_a_repeated_call_plans_nothing(device, monkeypatch):
    x, sink = peaked(3, 40).to(device), sinks(3, 1).to(device)
    for given in (sink, 2.0):
        fused_softmax.softmax(x, sink=given)
    monkeypatch.setattr("fused_softmax.ops.softmax.softmax._softmax", None)
    for given in (sink.clone(), 3, 4.5):
        assert_scores(fused_softmax.softmax(x, sink=given), "softmax", x, sink=given)


def test_few_numbers_are_kept_on_the_device(device, monkeypatch):
    monkeypatch.setattr(scored_calls, "_numbers", {})
    x, place = peaked(2, 40).to(device), torch.device(device)
    made = [scored_calls._number(i / 8, FP32, place) for i in range(70)]
    assert [each.item() for each in made] == [i / 8 for i in range(70)]
    assert len(scored_calls._numbers) == 64
    for i in (0, 63, 64):
        assert (scored_calls._number(i / 8, FP32, place) is made[i]) == (i < 64)
        assert_scores(fused_softmax.softmax(x, sink=i / 8), "softmax", x, sink=i / 8)
    assert scored_calls._number(0.125, FP64, place).dtype == FP64


# Gradients.


def weights(*shape, dtype=FP32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=FP64).to(dtype)


OF_SINK = {"no dims": (), "one": (1,), "a head": (3, 1, 1), "a query": (4, 1), "a row": (2, 3, 4, 1)}
OTHERS = {
    "alone": lambda: {},
    "number": lambda: {"scale": -0.5},
    "scale a head": lambda: {"scale": torch.tensor([0.5, -1.0, 2.0]).view(3, 1, 1)},
    "masked": lambda: {"mask": kept(4, 40) | (torch.arange(40) == 3)},
    "added": lambda: {"mask": weights(4, 40), "scale": 0.7},
}


@pairwise()
@every_function
@pytest.mark.parametrize("of_sink", OF_SINK)
@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("of_sink_dtype", [None, FP32], ids=str)
def test_gradients(function, of_sink, others, dtype, of_sink_dtype, device):
    x = peaked(24, 40, dtype).view(2, 3, 4, 40).to(device)
    scored = on(device, OTHERS[others]()) | {"sink": sinks(*OF_SINK[of_sink], dtype=of_sink_dtype or dtype).to(device)}
    y = public(function, x, **scored)
    dy = torch.where(y.isfinite(), weights(*y.shape, dtype=dtype).to(device), 0.0)
    assert_gradients(function, {"x": x, **scored}, dy)


@every_function
@pytest.mark.parametrize(("given", "wanted"), [(BF16, FP32), (FP32, BF16), (FP64, FP32), (FP32, FP64), (FP16, BF16)])
def test_gradients_of_results_of_another_dtype(function, given, wanted, device):
    if function == "logsumexp":
        pytest.skip("its result has the input's dtype")
    x, dy = peaked(3, 40, given).to(device), weights(3, 40, dtype=wanted).to(device)
    assert_gradients(function, {"x": x, "sink": sinks(3, 1).to(device)}, dy, dtype=wanted)


@not_reducing
@pytest.mark.parametrize("scale", [0.0, torch.tensor([[0.0], [2.0], [0.0]], dtype=FP64)], ids=["number", "tensor"])
def test_gradients_of_greedy_rows(function, scale, device):
    """The one column that is kept stands against the sink, so both have gradients; the scale 0 has none."""
    x = (peaked(3, 40, FP64) / 4).to(device)
    x[:, 7] = x.max() - 0.5
    scored = on(device, {"sink": x.amax(-1, keepdim=True).cpu() + torch.tensor([[-1.0], [0.5], [1.0]]), "scale": scale})
    dy = weights(3, 40, dtype=FP64).to(device)
    dy = torch.where(public(function, x, **scored).isfinite(), dy, 0.0)
    found = []
    for of in (public, composed):
        leaves = {
            name: value.clone().requires_grad_()
            for name, value in ({"x": x} | scored).items()
            if isinstance(value, torch.Tensor)
        }
        given = scored | {name: leaf for name, leaf in leaves.items() if name != "x"}
        found.append(torch.autograd.grad(of(function, leaves["x"], **given), list(leaves.values()), dy))
    torch.testing.assert_close(*found)
    assert found[0][0].abs().max() > 1e-3


@pairwise(strength=1)
@every_function
@pytest.mark.parametrize("others", ["alone", "number", "masked"])
@pytest.mark.parametrize("of_sink", [(), (3, 1), (1, 1)], ids=str)
def test_derivatives(function, others, of_sink, device):
    """First and second, in fp64, against finite differences."""
    x = (peaked(3, 4, FP64) / 4).to(device).requires_grad_()
    sink = sinks(*of_sink, dtype=FP64).div(4).to(device).requires_grad_()
    scored = {"alone": {}, "number": {"scale": -1.5}}.get(others, {"mask": kept(3, 4, of=0.8).to(device)})

    def of(x, sink):
        y = public(function, x, sink=sink, **scored)
        return torch.where(y.isfinite(), y, 0.0)

    assert torch.autograd.gradcheck(of, (x, sink), fast_mode=products.QUICK)
    assert torch.autograd.gradgradcheck(of, (x, sink), fast_mode=products.QUICK)


@every_function
def test_gradients_of_a_row_that_is_masked_whole(function, device):
    mask = torch.tensor([[True], [False], [True]], device=device)
    for sink, masked_rows in ((2.0, "nan"), (2.0, "zero"), (-math.inf, "zero")):
        found = []
        for of in (public, composed):
            x, s = peaked(3, 40).to(device).requires_grad_(), torch.full((3, 1), sink, device=device).requires_grad_()
            y = of(function, x, mask=mask, sink=s, masked_rows=masked_rows)
            seen = torch.where(y.isfinite(), y * weights(*y.shape).to(device), 0.0)
            found.append(torch.autograd.grad(seen.sum(), (x, s)))
        torch.testing.assert_close(*found)
        assert all(each.isfinite().all() for each in found[0])


def test_a_row_of_nan_that_no_loss_uses_leaves_the_sink_its_gradient(device):
    x, sink = peaked(2, 40).to(device), torch.tensor([[-math.inf], [1.0]], device=device).requires_grad_()
    x[0] = -math.inf
    y = fused_softmax.softmax(x, sink=sink)
    assert y[0].isnan().all()
    (found,) = torch.autograd.grad(y[1, 3] * 100, sink)
    assert found[0] == 0
    assert found[1].isfinite()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_lse_is_taken_where_a_sink_has_a_gradient_alone(function, device, monkeypatch):
    taken = []
    prepare = gradients.prepare_call
    monkeypatch.setattr(gradients, "prepare_call", lambda *args: taken.append(args) or prepare(*args))
    if function == "logsumexp":
        pytest.skip("it is the result")
    x = peaked(3, 40).to(device).requires_grad_()
    for sink in (2.0, sinks(3, 1).to(device), sinks(1).to(device)):
        public(function, x, sink=sink).sum().backward()
    assert not taken
    sink = sinks(3, 1).to(device).requires_grad_()
    y = public(function, x.detach(), sink=sink)
    assert len(taken) == 1
    monkeypatch.setattr("fused_softmax.ops.softmax.gradients.backward", None)  # nobody asks for the input's
    y.sum().backward()
    assert sink.grad.isfinite().all()


def test_kept_calls_with_gradients(device):
    for n in (3, 5, 3):
        for value in (1.0, 8.0):
            x, sink = peaked(n, 40).to(device), torch.full((n, 1), value, device=device)
            assert_gradients("softmax", {"x": x, "sink": sink}, weights(n, 40).to(device))
            assert_gradients("logsumexp", {"x": x, "sink": sink}, weights(n).to(device))


# In PyTorch.


@pytest.mark.parametrize("function", products.one_in(3, FUNCTIONS))
@pytest.mark.parametrize("dtype", products.one_in(2, [BF16, FP32]), ids=str)
def test_compiled_code(function, dtype, device):
    x, dim = peaked(6, 40, dtype).view(2, 3, 40).to(device), -1
    torch._dynamo.reset()  # the same line compiled for every function is more code than it allows

    def call(x, sink):
        return public(function, x * 2, dim, sink=sink)

    run_compiled, graphs = compiled(call)
    torch.testing.assert_close(run_compiled(x, 1.5), call(x, 1.5))
    assert nodes(graphs[0]).count(f"fused_softmax.{function}.default") == 1
    found = []
    for of in (compiled(call)[0], call):
        leaves = [x.detach().clone().requires_grad_(), sinks(3, 1).to(device).requires_grad_()]
        y = of(*leaves)
        found.append((y, *torch.autograd.grad(y, leaves, weights(*y.shape, dtype=dtype).to(device))))
    torch.testing.assert_close(*found)


@every_function
def test_second_derivatives_of_the_operators(function, device):
    operator = getattr(torch.ops.fused_softmax, function).default
    x, sink = (peaked(2, 3, FP64) / 4).to(device).requires_grad_(), sinks(2, 1, dtype=FP64).to(device).requires_grad_()
    dim, third = ([1], False) if function == "logsumexp" else (1, None)

    def of(x, sink):
        return operator(x, dim, third, None, None, None, False, "nan", None, sink)

    assert torch.autograd.gradcheck(of, (x, sink), fast_mode=products.QUICK)
    assert torch.autograd.gradgradcheck(of, (x, sink), fast_mode=products.QUICK)


@every_function
@pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (None, 0), (1, 0)])
def test_vmap(function, in_dims, device):
    x, sink = peaked(12, 40).view(3, 4, 40).to(device), sinks(3, 1 if in_dims == (0, None) else 4, 1).to(device)
    x = x[0] if in_dims[0] is None else x.transpose(0, 1) if in_dims[0] == 1 else x
    sink = sink[0] if in_dims[1] is None else sink

    def call(x, sink):
        return public(function, x, -1, sink=sink)

    pick = [
        (lambda i, t=t, at=at: t if at is None else t.select(at, i)) for t, at in zip((x, sink), in_dims, strict=True)
    ]
    expected = torch.stack([call(*(each(i) for each in pick)) for i in range(3)])
    torch.testing.assert_close(torch.vmap(call, in_dims)(x, sink), expected)


@every_function
def test_what_torch_composes(function, device):
    """Forward mode, of which the kernels have no rule."""
    x, sink = peaked(3, 5, FP64).to(device), sinks(3, 1, dtype=FP64).to(device)
    tangents = weights(3, 5, dtype=FP64).to(device), weights(3, 1, dtype=FP64).to(device)
    found = [
        torch.func.jvp(lambda x, s, of=of: of(function, x, -1, sink=s), (x, sink), tangents)
        for of in (public, composed)
    ]
    torch.testing.assert_close(*found)


def test_modules_have_a_sink(device):
    x, sink = peaked(3, 40).to(device), sinks(3, 1).to(device)
    for name, function in (("Softmax", "softmax"), ("LogSoftmax", "log_softmax")):
        module = getattr(nn, name)(-1, sink=2.0)
        assert repr(module) == f"{name}(dim=-1, sink=2.0)"
        assert torch.equal(module(x), public(function, x, sink=2.0))
        assert torch.equal(module(x, sink=sink), public(function, x, sink=sink))


BAD = [
    (True, TypeError, "sink must be a number or a Tensor, not bool (True)"),
    ("2", TypeError, "sink must be a number or a Tensor, not str ('2')"),
    (torch.tensor([1, 2, 3]).view(3, 1), TypeError, "sink must be of 16 to 64 bit floats, got torch.int64"),
    (torch.ones(2, 1), ValueError, "sink must broadcast to the input's shape (3, 40), got shape (2, 1)"),
    (torch.ones(40), ValueError, "a sink tensor holds one value a row: it broadcasts to (3, 1), got shape (40,)"),
    (torch.ones(3, 1).to_sparse(), RuntimeError, "sink must be a dense strided tensor, got a torch.sparse_coo one"),
    (torch.ones(3, 1, device="meta"), RuntimeError, "sink must be on the input's device"),
]


@every_function
@pytest.mark.parametrize(("sink", "error", "says"), BAD, ids=lambda each: None if isinstance(each, str) else "")
def test_a_bad_sink_is_refused_by_its_name(function, sink, error, says, device):
    x = peaked(3, 40).to(device)
    if isinstance(sink, torch.Tensor) and sink.device.type == "cpu" and sink.layout == torch.strided:
        sink = sink.to(device)
    with pytest.raises(error, match=re.escape(f"{function}: {says}")):
        public(function, x, sink=sink)


def test_a_sink_over_several_dims_is_refused(device):
    x = peaked(3, 40).to(device)
    for one in (x, x[0, 0]):
        assert_scores(fused_softmax.logsumexp(one, (-1,), sink=1.0), "logsumexp", one, sink=1.0)
    with pytest.raises(ValueError, match="single dim"):
        fused_softmax.logsumexp(peaked(3, 40).to(device), (0, 1), sink=1.0)


@not_reducing
def test_out_takes_no_part_in_the_gradient_of_a_sink(function, device):
    x, sink = peaked(3, 40).to(device), sinks(3, 1).to(device).requires_grad_()
    with pytest.raises(RuntimeError, match="out= takes no part in autograd"):
        public(function, x, sink=sink, out=torch.empty_like(x))
