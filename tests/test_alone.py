"""Programs of a split row that the others keep waiting: each reads the missing parts itself, to the same bits.

Under the interpreter a launch that publishes and collects at once is the worst case: a program starts when those before
it are done, so the first has the states of all others to compute, and the last of none.
"""

import math
import os
from functools import partial

import pytest
import torch
from conftest import peaked
from products import pairwise
from shapes import ALIGNMENTS, framed, small
from triton.runtime.interpreter import interpreter_builder

from fused_softmax import calls, reference, runner
from fused_softmax.ops import logsumexp_calls
from fused_softmax.ops.cross_entropy_calls import Given, prepare_losses
from fused_softmax.ops.softmax_calls import backward_by_plan, forward_by_plan
from fused_softmax.ops.softmax_rows import prepare_columns, prepare_columns_backward
from fused_softmax.options import Loss, scores_of
from fused_softmax.plan import H200, candidate, plan_columns

pytestmark = pytest.mark.skipif(
    os.environ.get("FUSED_SOFTMAX_INTERPRET") != "1", reason="on a GPU nobody decides which programs start"
)
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
N_ROWS, N_COLS = 3, 1200  # five parts of 256 columns


@pytest.fixture
def together(monkeypatch):
    """A function that runs another one with all of a launch in one go, and says that programs did stand in."""

    def run(function, last_first=False):
        with monkeypatch.context() as patch:
            patch.setattr(runner, "IN_TURN", ({},))
            if last_first:
                place = interpreter_builder.set_grid_idx
                backwards = lambda x, y, z: place(interpreter_builder.grid_dim[0] - 1 - x, y, z)  # noqa: E731
                patch.setattr(interpreter_builder, "set_grid_idx", backwards)
            calls.forget()
            result = function()
        calls.forget()
        return result

    return run


def same(a, b):
    a, b = (each if isinstance(each, tuple) else (each,) for each in (a, b))
    for one, other in zip(a, b, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


SCORES = {
    "plain": {}, "scale 0": {"scale": 0.0}, "scale": {"scale": -0.7},
    "bool mask": {"mask": torch.rand(N_ROWS, N_COLS, generator=torch.Generator().manual_seed(1)) > 0.5},
    "added mask": {"mask": torch.randn(1, N_COLS, generator=torch.Generator().manual_seed(2))},
    "causal": {"is_causal": True},
    "zero scales": {"scale": torch.tensor([[0.0], [1.0], [-2.0]])},
}  # fmt: skip


def ties(x):
    """With the greatest value of each row in two parts, and a part of nothing but -inf."""
    x[:, 300] = x[:, 900] = x.amax(-1) + 1
    x[1, 512:768] = -math.inf
    return x


@pairwise(("scores", "log"))
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_softmax(dtype, alignment, log, scores, together, nvidia, device):
    source, target = framed(alignment, ties(peaked(N_ROWS, N_COLS, dtype)), device=device)
    given = {"scale": None, "mask": None, "is_causal": False} | SCORES[scores]
    of = scores_of("softmax", source.rows, -1, *given.values(), "nan")
    plan = small("split", source.rows, target.rows, itemsize=4 if scores == "added mask" else None)
    assert plan.parts > 4

    def run():
        return forward_by_plan(source.rows, plan, y=target.rows, log=log, scores=of).clone()

    wanted = run()
    same(together(run), wanted)
    assert not target.changed()


@pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_gradient(alignment, log, together, nvidia, device):
    y, dx = framed(alignment, torch.softmax(peaked(N_ROWS, N_COLS), -1), device=device)
    dy, _ = framed(alignment, peaked(N_ROWS, N_COLS, seed=1), device=device)
    plan = small("split", y.rows, dx.rows, inputs=2)
    assert plan.parts > 4

    def run():
        return backward_by_plan(dy.rows, y.rows, dx.rows, plan, log=log).clone()

    wanted = run()
    same(together(run), wanted)


@pytest.mark.parametrize("scores", ["plain", "bool mask", "causal", "zero scales"])
def test_logsumexp(scores, together, nvidia, device):
    x = ties(peaked(N_ROWS, N_COLS)).to(device)
    given = {"scale": None, "mask": None, "is_causal": False} | SCORES[scores]
    of = scores_of("logsumexp", x, -1, *given.values(), "nan")
    plan = candidate("split", N_ROWS, N_COLS, 4, H200, num_warps=1, part_cols=256)

    def run():
        lse = torch.empty(N_ROWS, device=device)
        prepared = logsumexp_calls.prepare_forward(x, lse, plan, scores=of)
        tensors = [each for each in (of.mask, of.per_row) if each is not None]
        prepared(x, lse, *tensors)
        return lse

    wanted = run()
    same(together(run, last_first=True), wanted)


LOSSES = {
    "mean": {}, "sum, weights": {"reduction": "sum", "weight": torch.linspace(0.5, 2.0, N_COLS)},
    "smoothing": {"label_smoothing": 0.2},
    "smoothing, weights": {"label_smoothing": 0.2, "weight": torch.linspace(0.5, 2.0, N_COLS)},
    "softcap, z-loss": {"softcap": 5.0, "lse_square_scale": 0.1, "scale": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("inplace", [False, True], ids=["apart", "in place"])
@pytest.mark.parametrize("options", LOSSES)
@pytest.mark.parametrize("alignment", ["even", "shifted"])
def test_losses_and_their_gradient(alignment, options, inplace, together, nvidia, device):
    x, dx = framed(alignment, peaked(N_ROWS, N_COLS), device=device)
    if inplace:
        x = dx
    target, logits = torch.tensor([7, 1199, 600], device=device), peaked(N_ROWS, N_COLS).to(device)
    loss = Loss(**LOSSES[options])
    plan = small("split", x.rows, dx.rows)
    assert plan.parts > 4
    totals = torch.full((2, 1), 3.0, device=device) if loss.mean else None

    def run():
        x.fill(logits)
        given = Given(x.rows, dx.rows, target, loss.weight, totals, loss.weight_total(), loss.exact_numbers(x.rows))
        rows = prepare_losses(given, loss, plan).call(given, loss.numbers())
        return rows.loss.sum(1) + (0.0 if rows.z is None else rows.z), dx.rows.clone()

    wanted = run()
    same(together(run), wanted)
    of_torch, _, _ = reference.cross_entropy(logits, target, **LOSSES[options] | {"reduction": "none"})
    torch.testing.assert_close(wanted[0], of_torch.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("what", ["softmax", "log_softmax", "gradient", "logsumexp"])
@pytest.mark.parametrize("n_inner", [8, 5])
def test_over_a_strided_dim(n_inner, what, together, nvidia, device):
    x, dy = (peaked(700 * n_inner, 2, seed=i).view(2, 700, n_inner).to(device) for i in range(2))
    x[:, 10] = x[:, 690] = 50.0
    inputs = 2 if what == "gradient" else 1
    plan = plan_columns(2, 700, n_inner, 4, H200, inputs=inputs, holds=what != "logsumexp", held_bytes=4096 * inputs)
    if what == "logsumexp":
        prepare, given, result = logsumexp_calls.prepare_columns, (x,), x.new_empty(2, 1, n_inner)
    elif what == "gradient":
        prepare, given, result = prepare_columns_backward, (dy, torch.softmax(x, 1)), torch.empty_like(x)
    else:
        prepare, given, result = partial(prepare_columns, log=what == "log_softmax"), (x,), torch.empty_like(x)
    assert plan.parts > 1

    def run():
        prepare(*given, result, plan=plan)(*given, result)
        return result.clone()

    wanted = run()
    same(together(run), wanted)
    same(together(run, last_first=True), wanted)
