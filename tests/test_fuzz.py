"""Any call of softmax, log_softmax and logsumexp against float64, drawn by hypothesis.

The same examples every run. FUSED_SOFTMAX_FUZZ=20000 draws that many new ones a test instead; a failure prints the
seed for `--hypothesis-seed`, and the call it was shrunk to.
"""

import math
import os

import torch
from conftest import kernels, peaked
from contract import assert_gradients, assert_scores, public
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from products import QUICK
from shapes import DTYPES, STRATEGIES, Frame, small

from fused_softmax.ops.softmax import reference
from fused_softmax.ops.softmax.calls import forward_by_plan
from fused_softmax.ops.softmax.scores import Scores

pytestmark = kernels

FP32, FP16, BF16, FP64 = DTYPES
FUNCTIONS = ("softmax", "log_softmax", "logsumexp")
LONG = int(os.environ.get("FUSED_SOFTMAX_FUZZ", "0"))


def examples(number):
    return settings(
        max_examples=LONG or (number // 5 if QUICK else number),
        derandomize=not LONG, print_blob=True, deadline=None, database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip


# Of what no product with a scale of SCALES leaves fp32.
EXTREMES = (math.nan, math.inf, -math.inf, -1e36, 1e30, -1e30, 88.7, -104.0, 0.0, -0.0, 1e-40)
SCALES = (1.0, 0.5, -2.0, 0.0, -0.0, 1e-3, -1e-30, 50.0)
SINKS = (0.0, 9.0, -20.0, 60.0, 1e30, -math.inf, math.inf, math.nan)


@st.composite
def shapes(draw, most=3000):
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 16, 33, 130]), max_size=5))
    if draw(st.integers(0, 3)) == 0:
        shape = [*shape[:2], draw(st.integers(500, 1300))]
    while math.prod(shape) > most:
        shape[shape.index(max(shape[:-1] or shape))] //= 2
    return shape


@st.composite
def layouts(draw, ndim):
    """How a tensor of ndim dims lies in memory: the order of its dims, and a step and a start in each."""
    plain = draw(st.booleans())
    order = list(range(ndim)) if plain else draw(st.permutations(range(ndim)))
    steps = [1 if plain else draw(st.sampled_from([1, 1, 1, 2, 3])) for _ in range(ndim)]
    starts = [0 if plain else draw(st.integers(0, 3)) for _ in range(ndim)]
    return order, steps, starts


def laid_out(values, layout, device, poison=math.nan):
    order, steps, starts = layout
    sizes = [values.shape[i] * steps[i] + starts[i] for i in order]
    view = torch.full(sizes, poison, dtype=values.dtype, device=device)
    view = view.permute([list(order).index(i) for i in range(values.ndim)]) if values.ndim else view
    for i in range(values.ndim):
        view = view.narrow(i, starts[i], values.shape[i] * steps[i])
        view = view[(slice(None),) * i + (slice(None, None, steps[i]),)]
    return view.copy_(values)


def repeated(draw, x):
    """x, or what expand makes of the first index of some of its dims."""
    dims = draw(st.sets(st.integers(0, x.ndim - 1), max_size=2)) if x.numel() and x.ndim and draw(st.booleans()) else ()
    for dim in dims:
        x = x.narrow(dim, 0, 1).expand(x.shape)
    return x


@st.composite
def broadcasts(draw, shape):
    """A shape that broadcasts to `shape`, and which of its dims to expand again."""
    kept = [size if draw(st.booleans()) else 1 for size in shape]
    while kept and kept[0] == 1 and draw(st.booleans()):
        kept.pop(0)
    return kept


def generated(shape, seed, make):
    return make(list(shape), generator=torch.Generator().manual_seed(seed))


@st.composite
def scores(draw, shape, dim, device):
    """scale, sink, mask, is_causal and masked_rows for an input of `shape`, on the device."""
    scored = {}
    for name, of in (("scale", SCALES), ("sink", SINKS)):
        kind = draw(st.sampled_from(["none", "none", "number", "tensor", "tensor"]))
        if kind == "number":
            scored[name] = draw(st.sampled_from(of))
        elif kind == "tensor":
            along = [1 if i == dim % len(shape) else size for i, size in enumerate(shape)] if shape else []
            along = draw(broadcasts(along))
            seed = draw(st.integers(0, 9))
            picks = generated(along, seed, lambda s, generator: torch.randint(8, s, generator=generator))
            values = torch.tensor(of, dtype=draw(st.sampled_from([FP32, FP64, BF16])))[picks]
            scored[name] = laid_out(values, draw(layouts(values.ndim)), device)
    kind = draw(st.sampled_from(["none", "bool", "bool", "added"]))
    if kind != "none":
        size, seed = draw(broadcasts(shape)), draw(st.integers(0, 9))
        values = generated(size, seed, torch.rand)
        if kind == "bool":
            values = values < draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))
        else:
            values = (values * 8 - 4).masked_fill(values < draw(st.sampled_from([0.0, 0.3, 1.0])), -math.inf)
            values = values.to(draw(st.sampled_from([FP32, FP64, BF16])))
        scored["mask"] = laid_out(values, draw(layouts(values.ndim)), device, poison=0)
    if len(shape) > 1 and dim % len(shape) == len(shape) - 1:
        scored["is_causal"] = draw(st.booleans())
    scored["masked_rows"] = draw(st.sampled_from(["nan", "zero"]))
    return scored


def extremes(draw, x):
    if draw(st.booleans()):
        x = x.round()  # so that maxima are equal
    for _ in range(draw(st.integers(0, 4)) if x.numel() else 0):
        start, step = draw(st.integers(0, x.numel() - 1)), draw(st.integers(1, 40))
        x.flatten()[start::step] = draw(st.sampled_from(EXTREMES))
    return x


def poisoned(x, dim, scored):
    """x with NaN wherever it is hidden."""
    mask = scored.get("mask")
    keeps = mask.cpu() if mask is not None and mask.dtype == torch.bool else None
    hidden = reference.scores(torch.zeros_like(x), dim, None, keeps, scored.get("is_causal", False)) == -math.inf
    return x.masked_fill(hidden, math.nan)


def same(a, b):
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@examples(250)
@given(st.data())
def test_any_call(device, data):
    draw = data.draw
    function, shape = draw(st.sampled_from(FUNCTIONS)), draw(shapes())
    dim = draw(st.integers(-max(1, len(shape)), max(1, len(shape)) - 1))
    scored = draw(scores(shape, dim, device))
    x = extremes(draw, peaked(1, math.prod(shape), seed=draw(st.integers(0, 9))).view(shape))
    if draw(st.booleans()):
        x = poisoned(x, dim, scored)
    x = repeated(draw, laid_out(x.to(draw(st.sampled_from(DTYPES))), draw(layouts(x.ndim)), device))
    options = {"dtype": draw(st.sampled_from([None, None, *DTYPES]))} if function != "logsumexp" else {}
    read = [each for each in (x, *scored.values()) if isinstance(each, torch.Tensor)]
    before = [each.clone() for each in read]
    y = public(function, x, dim, **options, **scored)
    assert all(same(each, was) for each, was in zip(read, before, strict=True)), "an argument was written"
    assert_scores(y, function, x, dim, **options, **scored)
    if function != "logsumexp":
        assert y.is_contiguous()
        out = laid_out(torch.full_like(y, 7), draw(layouts(y.ndim)), device)
        assert public(function, x, dim, **options, **scored, out=out) is out
        assert_scores(out, function, x, dim, **options, **scored)  # of other addresses, and so of other roundings


@examples(120)
@given(st.data())
def test_any_rows_by_any_strategy(nvidia, device, data):
    draw = data.draw
    strategy, log = draw(st.sampled_from(STRATEGIES)), draw(st.booleans())
    given_dtype, wanted = draw(st.sampled_from(DTYPES[:3])), draw(st.sampled_from(DTYPES[:3]))
    n_cols = draw(st.integers(1, 1200))
    shape = [draw(st.integers(1, 3)), draw(st.integers(1, 3)), n_cols]
    n_rows = shape[0] * shape[1]
    scored = draw(scores(shape, -1, device))
    x = extremes(draw, peaked(n_rows, n_cols).view(shape))
    x = poisoned(x, -1, scored).flatten(0, 1) if draw(st.booleans()) else x.flatten(0, 1)
    phases = draw(st.tuples(st.integers(0, 7), st.integers(0, 7)))
    paddings = draw(st.tuples(st.integers(0, 9), st.integers(0, 9)))
    alike = draw(st.booleans())
    source = Frame(n_rows, n_cols, given_dtype, device, row_stride=n_cols + paddings[0], phase=phases[0])
    source.fill(x.to(given_dtype))
    target = Frame(
        n_rows, n_cols, wanted, device, row_stride=n_cols + paddings[not alike], phase=phases[not alike]
    )  # fmt: skip
    choices = {"num_warps": draw(st.sampled_from([1, 2]))}
    if strategy in ("split", "stream"):
        choices["part_cols"] = draw(st.sampled_from([64, 200, 512]))
    if strategy == "tile":
        choices = {"block_rows": draw(st.sampled_from([1, 2, 4]))}
    itemsize = 4 if "mask" in scored and scored["mask"].dtype != torch.bool else None
    plan = small(strategy, source.rows, target.rows, itemsize=itemsize, **choices)
    x, y = source.rows.unflatten(0, shape[:2]), target.rows.unflatten(0, shape[:2])
    forward_by_plan(x, plan, y=y, log=log, scores=Scores(**scored))
    assert not source.changed(outside=False)
    assert not target.changed()
    assert_scores(y, "log_softmax" if log else "softmax", x, dtype=wanted, **scored)


@examples(80)
@given(st.data())
def test_any_gradient(device, data):
    draw = data.draw
    function = draw(st.sampled_from(FUNCTIONS))
    shape = draw(shapes(most=1500).filter(lambda shape: math.prod(shape) > 0))
    dim = draw(st.integers(-max(1, len(shape)), max(1, len(shape)) - 1))
    scored = draw(scores(shape, dim, device))
    # Where what is hidden is seen in the gradient torch's formulas differ, and so does what follows from a scale of 0.
    scored["masked_rows"] = "zero"
    if isinstance(scored.get("scale"), torch.Tensor):
        scored["scale"] = torch.where(scored["scale"] == 0, 1.5, scored["scale"])
    elif scored.get("scale") == 0:
        scored["scale"] = 1.5
    if isinstance(scored.get("sink"), torch.Tensor):
        scored["sink"] = torch.where(scored["sink"].isfinite() & (scored["sink"] < 100), scored["sink"], 1.5)
    elif not -math.inf < scored.get("sink", 0.0) < 100:
        scored["sink"] = 1.5
    given_dtype = draw(st.sampled_from(DTYPES))
    x = peaked(1, math.prod(shape), seed=draw(st.integers(0, 9))).view(shape)
    x = repeated(draw, laid_out(x.to(given_dtype), draw(layouts(x.ndim)), device))
    options = {"dtype": draw(st.sampled_from([None, *DTYPES]))} if function != "logsumexp" else {}
    options = {name: value for name, value in options.items() if value is not None}
    y = public(function, x, dim, **options, **scored)
    dy = generated(y.shape, draw(st.integers(0, 9)), torch.randn)
    dy = laid_out(torch.where(y.isfinite(), dy.to(device), 0.0), draw(layouts(dy.ndim)), device)
    numbers = {name: value for name, value in scored.items() if name in ("is_causal", "masked_rows")}
    arguments = {"x": x, **{name: value for name, value in scored.items() if name not in numbers}}
    assert_gradients(function, arguments, dy, dim, **options, **numbers)
