"""Scores over a strided dim: masks and scales read where they lie, without a copy of what they are done to."""

import pytest
import torch
from conftest import INTERPRETED, kernels, peaked
from products import pairwise

import fused_softmax
from fused_softmax.core import calls
from fused_softmax.core.launched import Launched
from fused_softmax.core.plan import H200
from fused_softmax.ops.softmax import calls as softmax_calls
from fused_softmax.ops.softmax import launches as softmax_rows
from fused_softmax.ops.softmax import reference
from fused_softmax.ops.softmax.column_plan import plan_columns
from fused_softmax.ops.softmax.scores import Scores, scores_against_columns

pytestmark = kernels

INF, NAN = float("inf"), float("nan")
SHAPE = (2, 21, 3, 10)
MASKS = {
    "none": None, "one": (), "outer": (2, 1, 1, 1), "columns": (1, 21, 1, 1), "positions": (1, 1, 3, 10),
    "outer and positions": (2, 1, 3, 10), "outer and columns": (2, 21, 1, 1), "all": SHAPE,
}  # fmt: skip
SCALES = {
    "none": None, "number": 0.5, "negative": -2.0, "outer": (2, 1, 1, 1), "positions": (3, 10), "greedy": "greedy",
}  # fmt: skip


@pytest.fixture
def in_place(monkeypatch):
    """Every call over its columns as they lie, or an error."""

    def refuse(*arguments, **options):
        raise AssertionError("through rows")

    monkeypatch.setattr(softmax_calls._Call, "over_rows", refuse)
    monkeypatch.setattr(softmax_calls, "prepare_backward", refuse)


def cube(dtype=torch.float32, device="cpu", shape=SHAPE):
    """Logits of a shape whose dim 1 is reduced, with -inf and a NaN."""
    x = peaked(shape[0] * shape[2] * shape[3], shape[1], seed=3).view(shape[0], shape[2], shape[3], shape[1])
    x = x.permute(0, 3, 1, 2).contiguous()
    x[0, 4, 0, :3] = x[1, -1, 2] = -INF
    x[1, 2, 1, 4] = NAN
    return x.to(device, dtype)


def mask_of(shape, added, device, dtype=torch.float32):
    if shape is None:
        return None
    generator = torch.Generator().manual_seed(1)
    kept = torch.rand(shape, generator=generator) > 0.4
    mask = torch.randn(shape, generator=generator).masked_fill(~kept, -INF).to(dtype) if added else kept
    return mask.to(device)


def scale_of(kind, device):
    given = SCALES[kind]
    if given == "greedy":
        return torch.tensor([0.0, 1.5], device=device)[:, None, None, None]
    if isinstance(given, tuple):
        return torch.linspace(-1, 1.5, torch.Size(given).numel(), device=device).view(given)
    return given


def truth(name, x, **scores):
    return getattr(reference, name)(x.double(), 1, **scores)


def close(y, expected, dtype):
    bound = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(y.double(), expected.double(), rtol=bound, atol=bound, equal_nan=True)


@pairwise(("mask", "added"))
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("added", [False, True], ids=["bool", "added"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_every_broadcast(name, dtype, mask, added, scale, in_place, device):
    x = cube(dtype, device)
    given = {"mask": mask_of(MASKS[mask], added, device, dtype), "scale": scale_of(scale, device)}
    y = getattr(fused_softmax, name)(x, 1, **given)
    assert y.is_contiguous()
    close(y, truth(name, x, **given), dtype)


@pairwise()
@pytest.mark.parametrize("mask", ["columns", "outer and positions", "all"])
@pytest.mark.parametrize("added", [False, True], ids=["bool", "added"])
@pytest.mark.parametrize("scale", ["none", "number"])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradient_is_that_of_rows(name, dtype, mask, added, scale, device, monkeypatch):
    """Where all is masked, too, and where something is -inf or NaN."""
    given = {"mask": mask_of(MASKS[mask], added, device, dtype), "scale": scale_of(scale, device)}
    dy = torch.randn(SHAPE, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    dy[0, :, 0, 0] = 0.0
    results = []
    for way in ("columns", "rows"):
        calls.forget()
        with monkeypatch.context() as patch:
            if way == "rows":
                patch.setattr(softmax_calls._Call, "over_columns", lambda *given: None)
                patch.setattr(softmax_calls, "prepare_columns_backward", lambda *given, **options: None)
            else:
                patch.setattr(softmax_calls._Call, "over_rows", None)
                patch.setattr(softmax_calls, "prepare_backward", None)
            x = cube(dtype, device).requires_grad_()
            y = getattr(fused_softmax, name)(x, 1, **given)
            results.append(torch.autograd.grad(y, x, dy)[0])
    close(results[0], results[1], dtype)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_columns_of_which_nothing_is_kept(name, in_place, device):
    x, mask = cube(device=device), torch.ones(2, 1, 3, 10, dtype=torch.bool, device=device)
    mask[0, 0, 1] = False
    for masked_rows in ("nan", "zero"):
        y = getattr(fused_softmax, name)(x, 1, mask=mask, masked_rows=masked_rows)
        hidden = torch.tensor(NAN if masked_rows == "nan" else 0.0 if name == "softmax" else -INF, device=device)
        torch.testing.assert_close(y[0, :, 1], hidden.expand(21, 10), equal_nan=True)
        close(y, truth(name, x, mask=mask, masked_rows=masked_rows), torch.float32)


def test_the_first_of_equal_maxima(in_place, device):
    """Of scale 0: within one tile of columns, and over tiles."""
    x = torch.zeros(1, 21, 1, 10, device=device)
    x[0, 3:5] = x[0, 17] = 2.0
    scale = torch.zeros(10, device=device)
    scale[5:] = 1.0
    y = fused_softmax.softmax(x, 1, scale=scale)
    one_hot = torch.zeros(21, 5, device=device)
    one_hot[3] = 1.0
    assert torch.equal(y[0, :, 0, :5], one_hot)
    close(y, truth("softmax", x, scale=scale), torch.float32)


def test_what_masks_nothing_and_scales_exactly_changes_no_bit(in_place, device):
    x = cube(device=device)
    plain = fused_softmax.softmax(x, 1)
    ones = torch.ones(SHAPE, dtype=torch.bool, device=device)
    for given in ({"mask": ones}, {"mask": ones[:1, :, :1, :1]}, {"mask": torch.zeros(3, 10, device=device)}):
        assert same(fused_softmax.softmax(x, 1, **given), plain)
    assert same(fused_softmax.softmax(x, 1, scale=0.25), fused_softmax.softmax(x * 0.25, 1))
    mask = mask_of(MASKS["all"], True, device)
    y, apart = fused_softmax.softmax(x, 1, scale=3.0, mask=mask), fused_softmax.softmax(x * 3.0 + mask, 1)
    if INTERPRETED:
        assert same(y, apart)
    else:  # a GPU multiplies and adds with one rounding
        torch.testing.assert_close(y, apart, rtol=2e-5, atol=1e-30, equal_nan=True)


def same(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_layouts_that_have_such_strides(in_place, device):
    """A mask of other strides, an input of others, fp8, another dtype, a result that is given."""
    x, mask = cube(device=device), mask_of(MASKS["all"], True, device)
    apart = torch.stack([mask, mask], -1)[..., 0]  # inner positions two elements apart
    turned = mask.transpose(0, 1).contiguous().transpose(0, 1)
    for each in (apart, turned, mask[:, :, :, :1].expand(SHAPE)[:, :, :1, :1]):
        close(fused_softmax.softmax(x, 1, mask=each), truth("softmax", x, mask=each), torch.float32)
    of_positions = mask_of((2, 1, 3, 10), False, device)
    out = torch.full_like(x, NAN)
    assert fused_softmax.softmax(x, 1, mask=of_positions, out=out) is out
    close(out, truth("softmax", x, mask=of_positions), torch.float32)
    half = x.to(torch.bfloat16)
    y = fused_softmax.softmax(half, 1, mask=of_positions, scale=0.5, dtype=torch.float32)
    close(y, truth("softmax", half, mask=of_positions, scale=0.5), torch.float32)
    small = x.nan_to_num(0, 0, 0).to(torch.float8_e4m3fn)
    y = fused_softmax.softmax(small, 1, mask=of_positions, dtype=torch.float16)
    close(y, truth("softmax", small, mask=of_positions), torch.float16)


def test_a_kept_call_takes_any_number(in_place, device):
    x, mask = cube(device=device), mask_of(MASKS["columns"], False, device)
    for scale in (0.5, -3.0, 1e-42, 2):
        y = fused_softmax.softmax(x, 1, mask=mask, scale=scale)
        close(y, truth("softmax", x, mask=mask, scale=scale), torch.float32)


@pytest.mark.parametrize("mask", ["none", "columns", "positions", "all"])
@pytest.mark.parametrize("added", [False, True], ids=["bool", "added"])
@pytest.mark.parametrize("log", [False, True])
def test_by_parts(log, mask, added, device):
    """Of columns that several programs share; and one past the last of a tile, and inner positions past the last."""
    for n_inner in (8, 7):
        shape = (2, 601, 1, n_inner)
        x = cube(device=device, shape=(2, 601, 3, n_inner))[:, :, :1].contiguous()
        shapes = {"none": None, "columns": (1, 601, 1), "positions": (2, 1, n_inner), "all": (2, 601, n_inner)}
        given = mask_of(shapes[mask], added, device)
        x = x.view(2, 601, n_inner)
        layout = scores_against_columns(Scores(0.5, given), (shape[0], 601, n_inner), 1, ((0,), (2,)))
        plan = plan_columns(2, 601, n_inner, 4, H200, held_bytes=8192, access=4 if n_inner == 8 else 1)
        assert plan.parts > 1
        y = torch.full_like(x, NAN)
        run = softmax_rows.prepare_columns(x, y, log=log, layout=layout, plan=plan)
        run(x, y, *(() if given is None else (given,)), 0.5)
        close(y, truth("log_softmax" if log else "softmax", x, mask=given, scale=0.5), torch.float32)


def test_a_gradient_by_parts_with_a_factor(device):
    x = cube(device=device, shape=(2, 601, 3, 8))[:, :, 0].contiguous().nan_to_num(0, 0, 0)
    plan = plan_columns(2, 601, 8, 4, H200, inputs=2, held_bytes=16384, access=4)
    assert plan.parts > 1
    dy, dx = x.flip(1).contiguous(), torch.full_like(x, NAN)
    y = torch.softmax(x.double(), 1).float()
    run = softmax_rows.prepare_columns_backward(dy, y, dx, hides=True, scaled=True, plan=plan)
    run(dy, y, dx, -0.5)
    wide = y.double() * (dy.double() - (y.double() * dy.double()).sum(1, keepdim=True)) * -0.5
    torch.testing.assert_close(dx.double(), wide, rtol=1e-4, atol=1e-5)


def test_what_has_no_such_strides_goes_through_rows(device, monkeypatch):
    x, seen = cube(device=device).nan_to_num(0, 0, 0), []
    over_rows = softmax_calls._Call.over_rows
    monkeypatch.setattr(softmax_calls._Call, "over_rows", lambda *given: seen.append(given) or over_rows(*given))
    long = torch.rand(1, 40000, 8, device=device)
    several = torch.rand(1, 1, 8, device=device)  # which may hold a 0, whose first maximum no part knows
    shapes = [(2, 1, 3, 1), (1, 21, 1, 10)]  # half of the inner positions
    given = [{"mask": mask_of(shape, False, device)} for shape in shapes]
    given += [{"sink": 1.0}, {"sink": torch.ones(2, 1, 1, 1, device=device), "scale": 0.5}]
    for i, each in enumerate(given):
        close(fused_softmax.softmax(x, 1, **each), truth("softmax", x, **each), torch.float32)
        assert len(seen) == i + 1
    layout = scores_against_columns(Scores(several), tuple(long.shape), 1, ((0,), (2,)))
    assert softmax_rows.prepare_columns(long, torch.empty_like(long), layout=layout) is None


@pytest.mark.parametrize("scores", ["bool", "added", "number"])
def test_nothing_is_copied(scores, device, monkeypatch):
    """A call and its gradient allocate their results, and do nothing else but launch."""
    monkeypatch.setattr(softmax_rows, "prepare", lambda *given, **options: Launched(lambda *tensors: None))
    mask = None if scores == "number" else mask_of((2, 1, 3, 10), scores == "added", device)
    given = {"mask": mask, "scale": 0.5 if scores == "number" else None}
    x, dy = cube(device=device).requires_grad_(), torch.ones(SHAPE, device=device)
    torch.autograd.grad(fused_softmax.softmax(x, 1, **given), x, dy)  # the call is then kept
    with torch.autograd.profiler.profile() as seen:
        y = fused_softmax.softmax(x, 1, **given)
        y.backward(dy)
    names = {event.name for event in seen.function_events}
    assert names & {"aten::copy_", "aten::clone", "aten::contiguous", "aten::to", "aten::mul"} == set()
