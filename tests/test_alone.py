"""Programs of a split row that the others keep waiting: each reads the missing parts itself, to the same bits.

Under the interpreter a launch that publishes and collects at once is the worst case: a program starts when those before
it are done, so the first has the states of all others to compute, and the last of none.
"""

import math
import os
from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from conftest import peaked
from products import pairwise
from shapes import ALIGNMENTS, framed, small
from triton.runtime.interpreter import interpreter_builder

from fused_softmax.core import calls, runner
from fused_softmax.core.kernels.exchange import pack_state, stand_in
from fused_softmax.core.kernels.spec import Spec
from fused_softmax.core.plan import H200, candidate
from fused_softmax.ops.losses import reference
from fused_softmax.ops.losses.kernels import held as loss
from fused_softmax.ops.losses.launches import Given, prepare_losses
from fused_softmax.ops.losses.options import Loss
from fused_softmax.ops.softmax import launches as softmax_rows
from fused_softmax.ops.softmax.calls import backward_by_plan, forward_by_plan
from fused_softmax.ops.softmax.column_plan import plan_columns
from fused_softmax.ops.softmax.kernels import columns, logsumexp
from fused_softmax.ops.softmax.kernels import forward as softmax
from fused_softmax.ops.softmax.kernels import gradient as softmax_grad
from fused_softmax.ops.softmax.kernels.column_tiles import ColumnSpec, stand_in_columns
from fused_softmax.ops.softmax.launches import prepare_columns, prepare_columns_backward
from fused_softmax.ops.softmax.scores import Scores, scores_against, scores_against_columns, scores_of

pytestmark = pytest.mark.skipif(
    os.environ.get("FUSED_SOFTMAX_INTERPRET") != "1", reason="on a GPU nobody decides which programs start"
)
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
N_ROWS, N_COLS = 3, 1200  # five parts of 256 columns
NAN = math.nan


@pytest.fixture
def alike(monkeypatch):
    """A function: that another one gives the same bits where programs stand in for others and where none does."""
    asked = []
    for module in (softmax, softmax_grad, logsumexp, loss, columns):
        name = "stand_in_columns" if module is columns else "stand_in"
        monkeypatch.setattr(module, name, partial(_noted, asked, name, getattr(module, name)))

    def compare(function, *orders):
        wanted = function()
        assert not asked, "a message went astray"
        for order in orders:
            asked.clear()
            with monkeypatch.context() as patch:
                patch.setitem(runner.prepare.__kwdefaults__, "turns", ({},))
                if order == "backwards":
                    place = partial(_place_backwards, interpreter_builder.set_grid_idx)
                    patch.setattr(interpreter_builder, "set_grid_idx", place)
                calls.forget()
                result = function()
            calls.forget()
            assert asked, "no program stood in for another"
            same(result, wanted)
        return wanted

    return compare


def _place_backwards(place, x, y, z):
    place(interpreter_builder.grid_dim[0] - 1 - x, y, z)


def _noted(notes, note, function, *arguments, **options):
    notes.append(note)
    return function(*arguments, **options)


def same(a, b):
    a, b = (each if isinstance(each, tuple) else (each,) for each in (a, b))
    for one, other in zip(a, b, strict=True):
        assert torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


# What stands in.


@triton.jit
def _state_told_late(part, given, K: tl.constexpr):
    """A part's (m, s). Before it is computed two parts tell their own."""
    slots_ptr, n_parts, tag = given[0], given[1], given[2]
    late = tl.arange(0, 2) * 3 + 1
    tl.store(slots_ptr + (late % K.copies) * n_parts + late, pack_state(late + 50.0, late + 0.5, tag))
    none = tl.zeros([], tl.float32)
    return none + part + 100.0, none + part + 0.25


@triton.jit(do_not_specialize=["n_parts", "tag"])
def _stand_in(slots_ptr, message_ptr, n_parts, tag, K: tl.constexpr):
    tag = tag.to(tl.int64)
    given = slots_ptr, n_parts, tag
    message = stand_in(slots_ptr, n_parts, tag, _state_told_late, given, K)
    tl.store(message_ptr + tl.arange(0, K.lanes), message)


def messages(m, s, tag):
    m, s = (torch.as_tensor(each, dtype=FP32).contiguous().view(torch.int32).long() for each in (m, s))
    return m << 32 | tag << 31 | s


def of_rows(slots, tag):
    """The messages of the parts of a row, by one that stands in; slots [copies, parts]."""
    copies, parts = slots.shape
    spec = Spec(block_cols=1, pieces=1, vector=1, cast_dtype=tl.float32, split=True, lanes=8, copies=copies)
    told = torch.empty(8, dtype=torch.int64)
    _stand_in[(1,)](slots, told, parts, tag, K=spec)
    return told[:parts]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("tag", [0, 1])
def test_what_parts_tell_is_kept_and_the_others_are_computed(tag):
    """Of seven parts 0 and 5 have told their states. 1 and 4 do so while that of 1 is computed."""
    j, copies = torch.arange(7.0), 3
    stale = messages(j + 7, j + 7, 1 - tag)
    slots = torch.stack([stale] * copies)
    for copy in range(copies):
        slots[copy, ::5] = messages(j + copy, j + 1, tag)[::5]
    before = slots.clone()
    told = of_rows(slots, tag)
    before[1, 1:5:3] = messages(j + 50, j + 0.5, tag)[1:5:3]
    assert torch.equal(slots, before), "a slot is its part's, and nobody else's"
    read = slots[0]  # any copy does; of a part that is missing, its own does alone
    read[1:5:3] = slots[1, 1:5:3]
    computed = messages(j + 100, j + 0.25, tag)
    assert torch.equal(told, torch.where(read >> 31 & 1 == tag, read, computed))


@triton.jit
def _states_told_late(part, given, K: tl.constexpr):
    """(m, s) of a part, at every inner position. Before it is computed part 3 tells its own of the last position."""
    slots_ptr, tag = given[0], given[1]
    none = tl.zeros([], tl.float32)
    tl.store(slots_ptr + 3 * 5 + 3, pack_state(none + 50.0, none + 0.5, tag))
    inner = tl.arange(0, 4)[None, :]
    return part + 100.0 * inner, part + 0.25 * inner


@triton.jit(do_not_specialize=["n_parts", "tag"])
def _stand_in_columns(slots_ptr, message_ptr, n_parts, tag, K: tl.constexpr):
    tag = tag.to(tl.int64)
    message = stand_in_columns(slots_ptr, n_parts, tag, _states_told_late, (slots_ptr, tag), K)
    tl.store(message_ptr + tl.arange(0, 4)[:, None] * 8 + tl.arange(0, 8)[None, :], message)


def of_columns(slots, tag):
    """The same; slots [4 inner positions, 5 parts]."""
    spec = ColumnSpec(
        block_cols=1, pieces=1, vector=1, cast_dtype=tl.float32, split=True, lanes=8, block_inner=4, whole=True
    )
    told = torch.empty(4, 8, dtype=torch.int64)
    _stand_in_columns[(1,)](slots, told, 5, tag, K=spec)
    return told[:, :5]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("tag", [0, 1])
def test_the_same_of_every_inner_position(tag):
    """Of five parts 0 has told its states, 2 those of two positions of four, and 3 tells one meanwhile."""
    j, inner = torch.arange(5.0), torch.arange(4.0)[:, None]
    slots = messages((j + 7 + inner), (j + 7 + inner), 1 - tag)
    slots[:, 0] = messages(inner, inner + 1, tag)[:, 0]
    slots[1:3, 2] = messages(inner + 2, inner + 3, tag)[1:3, 0]
    before = slots.clone()
    told = of_columns(slots, tag)
    before[3, 3] = messages(50.0, 0.5, tag)
    assert torch.equal(slots, before), "a slot is its part's, and nobody else's"
    computed = messages(j + 100 * inner, j + 0.25 * inner, tag)
    assert torch.equal(told, torch.where(before >> 31 & 1 == tag, before, computed))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "run",
    [
        partial(of_rows, torch.zeros(1, 7, dtype=torch.int64)),
        partial(of_columns, torch.zeros(4, 5, dtype=torch.int64)),
    ],
    ids=["rows", "columns"],
)
def test_between_the_data_and_the_slots_there_is_a_barrier(run, monkeypatch):
    """The interpreter does nothing at one. Where a state is computed here, something is written."""
    steps = []
    for name, step in (("masked_store", "state"), ("barrier", "barrier"), ("masked_load", "slots")):
        does = getattr(interpreter_builder, f"create_{name}")
        monkeypatch.setattr(interpreter_builder, f"create_{name}", partial(_noted, steps, step, does))
    run(1)
    computed = steps.count("barrier")
    assert computed > 0
    told = "".join(f"{step} " for step in steps)
    assert told.replace("slots state barrier slots ", "").replace("slots ", "") == "state ", told


# Operators.


SCORES = {
    "plain": {}, "scale 0": {"scale": 0.0}, "scale": {"scale": -0.7},
    "bool mask": {"mask": torch.rand(N_ROWS, N_COLS, generator=torch.Generator().manual_seed(1)) > 0.5},
    "added mask": {"mask": torch.randn(1, N_COLS, generator=torch.Generator().manual_seed(2))},
    "causal": {"is_causal": True},
    "zero scales": {"scale": torch.tensor([[0.0], [1.0], [-2.0]])},
    "sinks": {"sink": torch.tensor([[3.0], [14.0], [20.0]])},
}  # fmt: skip


def scored(function, name, x):
    given = {"scale": None, "mask": None, "is_causal": False, "masked_rows": "nan", "sink": None} | SCORES[name]
    return scores_of(function, x, -1, *given.values())


def ties(x):
    """With the greatest value of each row in two parts, and a part of nothing but -inf."""
    x[:, 300] = x[:, 900] = x.amax(-1) + 1
    x[1, 512:768] = -math.inf
    return x


@pairwise(("scores", "log"))
@pytest.mark.parametrize("order", ["forwards", "backwards"])
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_softmax(dtype, alignment, log, scores, order, alike, nvidia, device):
    source, target = framed(alignment, ties(peaked(N_ROWS, N_COLS, dtype)), device=device)
    of = scored("softmax", scores, source.rows)
    plan = small("split", source.rows, target.rows, itemsize=4 if scores == "added mask" else None, copies=3)
    assert plan.parts > 4

    def run():
        target.rows.fill_(NAN)
        return forward_by_plan(source.rows, plan, y=target.rows, log=log, scores=of).clone()

    alike(run, order)
    assert not target.changed()


@pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_gradient(alignment, log, alike, nvidia, device):
    y, dx = framed(alignment, torch.softmax(peaked(N_ROWS, N_COLS), -1), device=device)
    dy, _ = framed(alignment, peaked(N_ROWS, N_COLS, seed=1), device=device)
    plan = small("split", y.rows, dx.rows, inputs=2, copies=3)
    assert plan.parts > 4

    def run():
        dx.rows.fill_(NAN)
        return backward_by_plan(dy.rows, y.rows, dx.rows, plan, log=log).clone()

    alike(run, "forwards")


@pytest.mark.parametrize("scores", ["zero scales", "plain", "bool mask", "causal", "sinks"])
def test_logsumexp(scores, alike, nvidia, device):
    x = ties(peaked(N_ROWS, N_COLS)).to(device)
    of = scored("logsumexp", scores, x)
    tensors = scores_against(of, tuple(x.shape)).tensors
    plan = candidate("split", N_ROWS, N_COLS, 4, H200, num_warps=1, part_cols=256, copies=3)

    def run():
        lse = torch.full((N_ROWS,), NAN, device=device)
        softmax_rows.prepare_logsumexp(x, lse, plan, scores_against(of, tuple(x.shape)))(x, lse, *tensors)
        return lse

    alike(run, "backwards")


LOSSES = {
    "mean": {}, "sum, weights": {"reduction": "sum", "weight": torch.linspace(0.5, 2.0, N_COLS)},
    "smoothing": {"label_smoothing": 0.2},
    "smoothing, weights": {"label_smoothing": 0.2, "weight": torch.linspace(0.5, 2.0, N_COLS)},
    "softcap, z-loss": {"softcap": 5.0, "lse_square_scale": 0.1, "scale": 0.5},
    "one that does not count": {"ignore_index": 7},
}  # fmt: skip
TARGETS = torch.tensor([7, 1199, 600])


def writes_losses(options, alignment, inplace, logits, device):
    """What writes the losses of logits and their gradient, in rows of five parts."""
    x, dx = framed(alignment, logits, device=device)
    if inplace:
        x = dx
    target, logits, loss = TARGETS.to(device), logits.to(device), Loss(**LOSSES[options])
    plan = small("split", x.rows, dx.rows, copies=3)
    assert plan.parts > 4
    totals = torch.full((2, 1), 3.0, device=device) if loss.mean else None

    def run():
        dx.rows.fill_(NAN)
        x.fill(logits)
        given = Given(x.rows, dx.rows, target, loss.weight, totals, loss.weight_total(), loss.exact_numbers(x.rows))
        rows = prepare_losses(given, loss, plan)(given, loss.numbers)
        return rows.loss, *([] if rows.z is None else [rows.z]), dx.rows.clone()

    return run


@pytest.mark.parametrize("inplace", [False, True], ids=["apart", "in place"])
@pytest.mark.parametrize("options", LOSSES)
@pytest.mark.parametrize("alignment", ["even", "shifted"])
def test_losses_and_their_gradient(alignment, options, inplace, alike, nvidia, device):
    logits = peaked(N_ROWS, N_COLS)
    parts, *z, _ = alike(writes_losses(options, alignment, inplace, logits, device), "forwards")
    of_torch, _, _ = reference.cross_entropy(logits, TARGETS, **LOSSES[options] | {"reduction": "none"})
    torch.testing.assert_close(sum(z, parts.view(N_ROWS, -1).sum(1)).cpu(), of_torch.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", ["mean", "smoothing"])
def test_losses_of_logits_below_the_gradient_that_is_written_over_them(options, alike, nvidia, device):
    """A part that starts after the target's has finished finds a gradient in the place of the target's logit."""
    alike(writes_losses(options, "even", True, peaked(N_ROWS, N_COLS) - 500.0, device), "forwards", "backwards")


@pytest.mark.parametrize("options", ["mean", "smoothing, weights"])
def test_a_loss_that_one_launch_sums(options, alike, nvidia, device):
    x, dx = framed("even", peaked(N_ROWS, N_COLS), device=device)
    target, loss = TARGETS.to(device), Loss(**LOSSES[options])
    plan = small("split", x.rows, dx.rows)

    def run():
        dx.rows.fill_(NAN)
        given = Given(x.rows, dx.rows, target, loss.weight, None, loss.weight_total(), loss.exact_numbers(x.rows))
        return prepare_losses(given, loss, plan, None, False, FP32)(given, loss.numbers).result

    result = alike(run, "forwards", "backwards")
    of_torch = torch.nn.functional.cross_entropy(x.rows.cpu(), TARGETS, **LOSSES[options])
    torch.testing.assert_close(result.cpu(), of_torch, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("what", ["gradient", "softmax", "log_softmax", "logsumexp", "masked", "added"])
@pytest.mark.parametrize("n_inner", [8, 5])
def test_over_a_strided_dim(n_inner, what, alike, nvidia, device):
    x, dy = (peaked(700 * n_inner, 2, seed=i).view(2, 700, n_inner).to(device) for i in range(2))
    x[:, 10] = x[:, 690] = 15.0
    inputs = 2 if what == "gradient" else 1
    plan = plan_columns(2, 700, n_inner, 4, H200, inputs=inputs, holds=what != "logsumexp", held_bytes=4096 * inputs)
    if what == "logsumexp":
        prepare, given, result = softmax_rows.prepare_logsumexp_columns, (x,), x.new_empty(2, 1, n_inner)
    elif what == "gradient":
        prepare, given, result = prepare_columns_backward, (dy, torch.softmax(x, 1)), torch.empty_like(x)
    else:
        prepare, given, result = partial(prepare_columns, log=what == "log_softmax"), (x,), torch.empty_like(x)
    scored = ()
    if what in ("masked", "added"):
        mask = (dy > -3) if what == "masked" else dy
        layout = scores_against_columns(Scores(0.5, mask), tuple(x.shape), 1, ((0,), (2,)))
        prepare, scored = partial(prepare, layout=layout), (mask, 0.5)
    assert plan.parts > 1

    def run():
        result.fill_(NAN)
        prepare(*given, result, plan=plan)(*given, result, *scored)
        return result.clone()

    alike(run, *(["backwards"] if what == "logsumexp" else ["forwards", "backwards"]))
