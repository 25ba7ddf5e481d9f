"""Any call of cross_entropy and linear_cross_entropy against float64 and torch, drawn by hypothesis as in test_fuzz."""

import math
import os
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import peaked
from hypothesis import given
from hypothesis import strategies as st
from losses import wanted
from shapes import DTYPES, STRATEGIES, Frame, small
from test_fuzz import examples, extremes, generated, laid_out, layouts, same

from fused_softmax.core.checks import arithmetic_of
from fused_softmax.ops.losses import launches as cross_entropy_calls
from fused_softmax.ops.losses import reference
from fused_softmax.ops.losses.cross_entropy import cross_entropy
from fused_softmax.ops.losses.linear_cross_entropy import linear_cross_entropy
from fused_softmax.ops.losses.options import Loss
from fused_softmax.ops.losses.sums import finish, totals_of

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="without a GPU or the interpreter, CPU tensors take ATen"
)
FP32, FP16, BF16, FP64 = DTYPES
REDUCTIONS = ("mean", "sum", "none")
every_arithmetic = pytest.mark.parametrize("arithmetic", ["nvidia", "other"])


@pytest.fixture
def arithmetic(request):
    if request.param == "nvidia":
        request.getfixturevalue("nvidia")
    return request.param


@st.composite
def logits(draw, n_rows, n_cols):
    """[n_rows, n_cols] in fp32: peaked, moved or with heights far off, with tiles of -inf, NaN and infinities."""
    x = peaked(n_rows, n_cols, seed=draw(st.integers(0, 9)))
    kind = draw(st.sampled_from(["plain", "plain", "moved", "height", "tile", "extremes"]))
    far = draw(st.sampled_from([1e4, -1e4, 3e8, -3e8]))
    if kind == "moved":
        x = x + far
    elif kind == "height":
        x[:, draw(st.integers(0, n_cols - 1))] = far
    elif kind == "tile":
        start = draw(st.integers(0, n_cols - 1))
        x[:, start : start + draw(st.integers(1, n_cols))] = -math.inf
    elif kind == "extremes":
        x = extremes(draw, x)
    return x


@st.composite
def options(draw, n_cols, dtype, device):
    """What cross_entropy and Loss both take."""
    weight = None
    if draw(st.booleans()):
        weight = torch.rand(n_cols, generator=torch.Generator().manual_seed(draw(st.integers(0, 9)))) + 0.1
        weight[draw(st.integers(0, n_cols - 1))] = draw(st.sampled_from([0.0, 1.0, 1e4]))
        weight = weight.to(dtype).to(device)
    return {
        "weight": weight,
        "label_smoothing": draw(st.sampled_from([0.0, 0.0, 0.1, 1e-3, 1.0])),
        "softcap": draw(st.sampled_from([None, None, None, 0.5, 30.0, 1e5])),
        "scale": draw(st.sampled_from([1.0, 1.0, 1.0, 0.5, -2.0, 1e-3, -1e-30])),
        "lse_square_scale": draw(st.sampled_from([0.0, 0.0, 1e-4, 0.5])),
        "ignore_index": draw(st.sampled_from([-100, -100, n_cols // 2, n_cols + 3])),
    }


@st.composite
def targets(draw, n, n_cols, ignore_index):
    """Classes, of which some are ignored, and some none."""
    kind = draw(st.sampled_from([torch.int64, torch.int64, torch.int32, torch.uint8]))
    t = torch.randint(0, n_cols, (n,), generator=torch.Generator().manual_seed(draw(st.integers(0, 9))))
    if draw(st.booleans()):
        t[draw(st.integers(0, max(0, n - 1))) :: draw(st.integers(1, 3))] = ignore_index
    if draw(st.integers(0, 3)) == 0:
        t[draw(st.integers(0, max(0, n - 1))) :: 3] = draw(st.sampled_from([n_cols, -1, 2**31 - 1, 2**40, -(2**40)]))
    return t.to(kind)


@every_arithmetic
@examples(60)
@given(st.data())
def test_any_rows_by_any_strategy(arithmetic, request, device, data):
    draw = data.draw
    strategy, dtype = draw(st.sampled_from(STRATEGIES)), draw(st.sampled_from(DTYPES))
    strategy = "row" if dtype == FP64 and strategy == "split" else strategy
    n_rows, n_cols = draw(st.integers(1, 4)), draw(st.integers(1, 1200))
    how = draw(options(n_cols, arithmetic_of(torch.empty(0, dtype=dtype)), device))
    target = draw(targets(n_rows, n_cols, how["ignore_index"])).to(device)
    x = draw(logits(n_rows, n_cols)).to(dtype)
    phases = draw(st.tuples(st.integers(0, 7), st.integers(0, 7)))
    paddings = draw(st.tuples(st.integers(0, 9), st.integers(0, 9)))
    alike = draw(st.booleans())
    source = Frame(n_rows, n_cols, dtype, device, row_stride=n_cols + paddings[0], phase=phases[0])
    source.fill(x)
    out = Frame(n_rows, n_cols, dtype, device, row_stride=n_cols + paddings[not alike], phase=phases[not alike])
    choices = {"num_warps": draw(st.sampled_from([1, 2]))}
    if strategy in ("split", "stream"):
        choices["part_cols"] = draw(st.sampled_from([64, 200, 512]))
    if strategy == "tile":
        choices = {"block_rows": draw(st.sampled_from([1, 2, 4]))}
    itemsize = arithmetic_of(x).itemsize if how["softcap"] is not None else None
    plan = small(strategy, source.rows, out.rows, itemsize=itemsize, **choices)
    form = draw(st.sampled_from(["one pass", "alone", "second read"]))
    reduction = draw(st.sampled_from(REDUCTIONS[:2] if form == "one pass" else REDUCTIONS))
    loss = Loss(reduction=reduction, stats=form == "alone", **how)
    totals = totals_of(target, loss, n_cols, arithmetic_of(x)) if loss.mean else None
    dy = dlse = dz = None
    if form == "one pass":
        rows = cross_entropy_calls.forward(source.rows, target, loss, totals, out.rows, plan=plan)
    else:
        if strategy != "tile":
            plan = replace(plan, pieces=min(plan.pieces, 4), full_pieces=0)
        rows = cross_entropy_calls.forward(source.rows, target, loss, totals, plan=plan)
    if form == "second read":
        seed = draw(st.integers(0, 9))
        size = (n_rows,) if reduction == "none" else ()
        wide = arithmetic_of(x)
        dy = generated(size, seed, torch.randn).to(wide).to(device)
        dlse = generated((n_rows,), seed + 1, torch.randn).to(wide).to(device) if draw(st.booleans()) else None
        dz = generated(size, seed + 2, torch.randn).to(wide).to(device) if draw(st.booleans()) else None
        again = small("tile" if strategy == "tile" else "stream", source.rows, out.rows, **SMALL_AGAIN[strategy])
        cross_entropy_calls.backward(
            source.rows, target, rows.m, rows.ls, loss, totals=totals, dy=dy, dz=None if dz is None else dy + dz,
            dlse=dlse, dx=out.rows, plan=again,
        )  # fmt: skip
    assert not source.changed(outside=False)
    assert not out.changed()
    found = wanted(source.rows, target, reduction, dy=dy, dlse=dlse, dz=dz, **how)
    if reduction == "none":
        y, z = rows.loss.view(n_rows, -1).sum(1), rows.z
        y = y if z is None else y + z
        spoilt = found.wrong
    else:
        y, z = finish(rows, totals, loss, arithmetic_of(x))
        spoilt = found.wrong.any()
    found.check("loss", y, spoilt=spoilt)
    if z is not None:
        found.check("z", z, spoilt=spoilt)
    if form != "alone":
        found.check("dx", out.rows)
    if form != "one pass":
        found.check("lse", rows.m + rows.ls)
    if form == "alone":
        check_statistics(rows.entropy, rows.predicted, source.rows, found, how)


SMALL_AGAIN = {
    "tile": {"block_rows": 2}, "row": {"num_warps": 1}, "split": {"num_warps": 1, "part_cols": 64},
    "stream": {"num_warps": 2, "part_cols": 512},
}  # fmt: skip


def check_statistics(entropy, predicted, x, found, how):
    """Entropy and the likeliest class, of rows that are finite."""
    z = (x.to(arithmetic_of(x)) * how["scale"]).double()
    z = z if how["softcap"] is None else how["softcap"] * torch.tanh(z / how["softcap"])
    good = found.kept & ~z.isnan().any(-1) & z.amax(-1).isfinite()
    z, entropy, predicted = z[good], entropy[good].double(), predicted[good]
    if len(z) == 0:
        return
    assert ((predicted >= 0) & (predicted < z.shape[1])).all()
    eps = torch.finfo(arithmetic_of(x)).eps
    heights = torch.where(z.isfinite(), z, 0.0).abs().amax(-1)
    assert (
        z.gather(-1, predicted[:, None])[:, 0] >= z.amax(-1) - 16 * eps * heights * (how["softcap"] is not None)
    ).all()
    log_p = torch.log_softmax(z, -1)
    truth = -torch.where(log_p == -math.inf, 0.0, log_p.exp() * log_p).sum(-1)
    spread = 1.0 if how["softcap"] is None else 1.0 + heights
    assert ((entropy - truth).abs() <= 64 * eps * (1 + truth) * spread).all(), (entropy, truth)


@st.composite
def shapes(draw, most=900):
    """Of logits of any rank, whose class dim is 1, and their class dim."""
    n_classes = draw(st.sampled_from([1, 2, 5, 16, 33, 130, 300]))
    others = draw(st.lists(st.sampled_from([0, 1, 2, 3, 7]), max_size=3))
    while math.prod(others) * n_classes > most:
        others[others.index(max(others))] //= 2
    return [*others[:1], n_classes, *others[1:]], 0 if not others else 1


def as_rows(x, class_dim):
    return x.movedim(class_dim, -1).reshape(-1, x.shape[class_dim])


@examples(70)
@given(st.data())
def test_any_call(device, data):
    draw = data.draw
    shape, class_dim = draw(shapes())
    n_classes, n = shape[class_dim], math.prod(shape) // shape[class_dim]
    of_targets = shape[:class_dim] + shape[class_dim + 1 :]
    dtype, reduction = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(REDUCTIONS))
    how = draw(options(n_classes, dtype, device))
    target = draw(targets(n, n_classes, how["ignore_index"])).view(of_targets)
    target = laid_out(target, draw(layouts(target.ndim)), device, poison=0)
    x = draw(logits(n, n_classes)).to(dtype).view(*of_targets, n_classes).movedim(-1, class_dim)
    x = laid_out(x, draw(layouts(x.ndim)), device).requires_grad_()
    more = {name: True for name in ("return_lse", "return_z_loss", "return_token_stats") if draw(st.booleans())}
    if draw(st.booleans()):
        more["dtype"] = draw(st.sampled_from([FP32, dtype]))
    read = [each for each in (x, target, how["weight"]) if each is not None]
    before = [each.detach().clone() for each in read]
    found = cross_entropy(x, target, reduction=reduction, **how, **more)
    y, lse, z, stats = found if isinstance(found, tuple) else (found, None, None, None)
    assert y.dtype == more.get("dtype", dtype)
    assert y.shape == (torch.Size(of_targets) if reduction == "none" else ())
    seed = draw(st.integers(0, 9))
    outputs = [each for each in (y, lse, z) if each is not None and each.requires_grad]
    outputs = outputs[draw(st.integers(0, len(outputs) - 1)) :] if outputs else []
    gradients = [generated(each.shape, seed, torch.randn).to(each) for each in outputs]
    dx = torch.autograd.grad(outputs, x, gradients, retain_graph=True)[0] if outputs else None
    given_back = dict(zip(map(id, outputs), gradients, strict=True))
    dy, dlse, dz = (given_back.get(id(each)) for each in (y, lse, z))
    dy = torch.zeros_like(y) if dy is None else dy
    of_result = (-1,) if reduction == "none" else ()
    shaped = {"dy": of_result, "dlse": (-1,), "dz": of_result}
    given_back = {
        name: None if each is None else each.detach().reshape(shaped[name])
        for name, each in (("dy", dy), ("dlse", dlse), ("dz", dz))
    }
    if n == 0:
        return
    true = wanted(as_rows(x.detach(), class_dim), target.reshape(-1), reduction, **given_back, **how)
    spoilt = true.wrong if reduction == "none" else true.wrong.any()
    for name, ours in (("loss", y), ("z", z if how["lse_square_scale"] else None)):
        if ours is not None:
            true.check(name, ours.detach().reshape(of_result), spoilt=spoilt)
    if lse is not None:
        true.check("lse", lse.detach().reshape(-1))
    if dx is not None:
        assert dx.dtype == dtype
        true.check("dx", as_rows(dx, class_dim))
        again = torch.autograd.grad(outputs, x, gradients)[0]  # made anew where the first was ready
        true.check("dx", as_rows(again, class_dim))
    assert all(same(each.detach(), was) for each, was in zip(read, before, strict=True)), "an argument was written"
    if stats is not None:
        check_statistics(
            *(each.reshape(-1) for each in (stats.entropy, stats.predicted)), as_rows(x.detach(), class_dim), true, how
        )
    plain = how["softcap"] is None and how["scale"] == 1 and not how["lse_square_scale"]
    if plain and not true.wrong.any() and target.dtype == torch.int64:
        torchs = {name: how[name] for name in ("weight", "label_smoothing", "ignore_index")}
        theirs = F.cross_entropy(x.detach(), target, reduction=reduction, **torchs)
        assert torch.equal(y.detach().isnan(), theirs.isnan())
    with torch.no_grad():
        alone = cross_entropy(x, target, reduction=reduction, **how, **more)
        alone = alone if isinstance(alone, tuple) else (alone,)
        true.check("loss", alone[0].reshape(of_result), spoilt=spoilt)


@examples(60)
@given(st.data())
def test_any_linear_call(device, data):
    draw = data.draw
    leading = draw(st.lists(st.sampled_from([1, 2, 3, 7]), max_size=2))
    n, in_features, n_classes = math.prod(leading), draw(st.integers(1, 9)), draw(st.sampled_from([1, 3, 17, 64, 130]))
    dtype, reduction = draw(st.sampled_from([FP32, FP32, FP64, BF16, FP16])), draw(st.sampled_from(REDUCTIONS))
    how = draw(options(n_classes, dtype, device))
    how["scale"] = draw(st.sampled_from([1.0, -0.5]))
    how["softcap"] = draw(st.sampled_from([None, 30.0]))
    target = draw(targets(n, n_classes, how["ignore_index"])).view(leading).to(device)
    seed = draw(st.integers(0, 9))
    parts = {
        "input": generated([*leading, in_features], seed, torch.randn),
        "linear_weight": generated([n_classes, in_features], seed + 1, torch.randn),
        "linear_bias": generated([n_classes], seed + 2, torch.randn) if draw(st.booleans()) else None,
    }
    parts = {name: None if each is None else each.to(dtype).to(device) for name, each in parts.items()}
    moving = [name for name, each in parts.items() if each is not None and draw(st.integers(0, 3))]
    chunks = {
        "chunk_size": draw(st.sampled_from([None, 1, 2, 5, 100])),
        "accumulate": draw(st.sampled_from(["fp32", "input"])),
        "skip_ignored": draw(st.booleans()),
    }

    def run(of, to, **more):
        given_parts = {name: None if each is None else each.to(to) for name, each in parts.items()}
        leaves = [given_parts[name].clone().requires_grad_() for name in moving]
        given_parts |= dict(zip(moving, leaves, strict=True))
        y = of(target=target, reduction=reduction, **given_parts, **how, **more)
        dy = generated(y.shape, seed, torch.randn).to(y)
        return y.detach(), torch.autograd.grad(y, leaves, dy) if leaves else ()

    def plainly(input, linear_weight, linear_bias, target, weight, **rest):
        z = F.linear(input, linear_weight, linear_bias)
        z = z.movedim(-1, 1) if z.ndim > 2 else z
        return reference.cross_entropy(z, target, weight, arithmetic=z.dtype, **rest)[0]

    y, gradients = run(linear_cross_entropy, dtype, **chunks)
    true, exact = run(plainly, FP64)
    theirs, torchs = run(plainly, dtype)
    target = target.long()
    wrong = (target != how["ignore_index"]) & ((target < 0) | (target >= n_classes))
    if wrong.any():
        assert y.isnan().any()
        return
    assert torch.equal(y.isnan(), true.isnan())
    rounding = torch.finfo(dtype).eps
    for name, ours, truth, other in zip(
        ["loss", *moving], (y, *gradients), (true, *exact), (theirs, *torchs), strict=True
    ):
        assert ours.shape == truth.shape
        assert ours.dtype == dtype
        assert torch.equal(ours.isnan(), truth.isnan()), name
        error, torchs_error = ((each.double() - truth).abs().nan_to_num() for each in (ours, other))
        least = 64 * rounding * (1 + truth.abs().nan_to_num().max()) * (1 + 1e4 * (how["weight"] is not None))
        assert (error <= 2 * torchs_error.max() + least).all(), (name, error.max(), torchs_error.max(), least)
