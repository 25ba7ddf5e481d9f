"""The gradients of the softmax family: every strategy, layout and dtype, first and second, held to float64."""

import math

import pytest
import torch
from conftest import kernels, peaked
from contract import FAMILY, assert_gradients, composed, every_function, gradients, keeping_shape, public
from products import QUICK, pairwise
from scored import kept, on, sinks, weights
from shapes import ALIGNMENTS, DTYPES, SMALL, STRATEGIES, Frame
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import fused_softmax
from fused_softmax.core.layout import alignment_of
from fused_softmax.core.plan import H200, VECTOR_BYTES, candidate
from fused_softmax.ops.softmax import reference
from fused_softmax.ops.softmax.calls import backward_by_plan

pytestmark = kernels

FP32, FP16, BF16, FP64 = DTYPES

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
every_alignment = pytest.mark.parametrize("alignment", ALIGNMENTS)


def formula(dy, y, function, hidden=False):
    """The gradient from what was rounded to y and dy, in fp64."""
    dy, y = dy.double(), y.double()
    if function == "softmax":
        return y * (dy - (y * dy).sum(-1, keepdim=True))
    dx = dy - y.exp() * dy.sum(-1, keepdim=True)
    return dx.masked_fill(y == -math.inf, 0.0) if hidden else dx


def assert_gradient(dx, dy, y, function, *, scale=1.0, hidden=False, result=None):
    """dx is one rounding from fp64's gradient of the same y and dy, where it and they are fp32 or wider: some.

    d is a sum, and its error is to the sum of what it adds; so is that of dy - d.
    """
    truth = formula(dy, y, function, hidden) * scale
    assert dx.dtype == (result or y.dtype)
    assert torch.equal(dx.isnan(), truth.isnan())
    arithmetic = torch.finfo(FP64 if y.dtype == FP64 else FP32).eps
    weight = y.double() if function == "softmax" else y.double().exp()
    terms = (dy.double() * (weight if function == "softmax" else 1.0)).abs().sum(-1, keepdim=True)
    allowed = 4 * arithmetic * (terms * weight + dy.double().abs() * (weight if function == "softmax" else 1.0))
    allowed = allowed * abs(scale) + torch.finfo(dx.dtype).eps * truth.abs() + torch.finfo(dx.dtype).tiny
    bad = (dx.double() - truth).abs() > allowed
    assert not bad.any(), f"{((dx.double() - truth).abs() / allowed).max():.3g} times what is allowed"


# Strategies, by name.


def frames(alignment, values, out_dtype, device):
    """Frames of dy, y and a poisoned dx that lie against each other as `alignment` says, with rows apart."""
    n_rows, n_cols = values[0].shape
    vector = VECTOR_BYTES // values[0].element_size()
    padding = 2 * vector if alignment == "even" else 5
    phases = {"even": (0, 0, 0), "shifted": (3 % vector,) * 3, "scalar": (1, 0, 0)}[alignment]
    made = []
    for x, phase in zip((*values, None), phases, strict=True):
        dtype = out_dtype if x is None else x.dtype
        frame = Frame(n_rows, n_cols, dtype, device, row_stride=n_cols + padding, phase=phase)
        if x is not None:
            frame.fill(x.to(device))
        made.append(frame)
    return made


def run(strategy, function, dy, y, alignment, device, *, out_dtype=None, choices=None, **options):
    dy_frame, y_frame, dx_frame = frames(alignment, (dy, y), out_dtype or y.dtype, device)
    n_rows, n_cols = y.shape
    found = alignment_of(y_frame.rows, dy_frame.rows, dx_frame.rows)
    assert n_cols < 32 or found == alignment
    plan = candidate(
        strategy, n_rows, n_cols, y.element_size(), H200, alignment=found, inputs=2, **SMALL[strategy] | (choices or {})
    )
    assert plan.strategy == strategy
    backward_by_plan(dy_frame.rows, y_frame.rows, dx_frame.rows, plan, log=function == "log_softmax", **options)
    assert not dy_frame.changed(outside=False), "dy was written, or what lies around it"
    assert not y_frame.changed(outside=False), "y was written, or what lies around it"
    assert not dx_frame.changed(), "something outside the rows of dx was written"
    return dx_frame.rows, dy_frame.rows, y_frame.rows


@pairwise(("strategy", "alignment", "dtype"))
@every_strategy
@every_alignment
@keeping_shape
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_strategy(strategy, alignment, function, dtype, device):
    if strategy == "split" and dtype == FP64:
        pytest.skip("programs exchange fp32 states, so the planner never splits fp64 rows")
    n_cols = 616 if alignment == "even" else 613
    y = getattr(torch, function)(peaked(3, n_cols, dtype), -1)
    choices = {"block_rows": 2} if strategy == "tile" else {}
    dx, dy, y = run(strategy, function, weights(3, n_cols, dtype=dtype), y, alignment, device, choices=choices)
    assert_gradient(dx, dy, y, function)


@pairwise()
@every_strategy
@every_alignment
@pytest.mark.parametrize("n_cols", [1, 2, 7, 16, 33, 129, 512, 1025])
def test_short_and_odd_rows(strategy, alignment, n_cols, device):
    for dtype, function in ((FP32, "log_softmax"), (BF16, "softmax")):
        vector = 16 // dtype.itemsize
        width = -(-n_cols // vector) * vector if alignment == "even" else n_cols
        y = getattr(torch, function)(peaked(3, width, dtype), -1)
        dx, dy, y = run(strategy, function, weights(3, width, dtype=dtype), y, alignment, device)
        assert_gradient(dx, dy, y, function)


@pairwise(strength=1)
@every_alignment
@pytest.mark.parametrize("parts", [1, 2, 7, 33])
def test_split_in_few_and_many_parts(alignment, parts, device):
    n_cols = parts * 64 + (-8 if alignment == "even" else -5)
    y = torch.softmax(peaked(2, n_cols, BF16), -1)
    for copies, lanes, poll_last_first in ((1, 64, False), (3, 128, True)):
        choices = {"part_cols": 64, "num_warps": 2, "copies": copies, "lanes": lanes}
        choices |= {"poll_last_first": poll_last_first}
        dx, dy, y_rows = run("split", "softmax", weights(2, n_cols, dtype=BF16), y, alignment, device, choices=choices)
        assert_gradient(dx, dy, y_rows, "softmax")


@pairwise(("strategy", "of", "into"))
@every_strategy
@every_alignment
@pytest.mark.parametrize(
    ("of", "into"), [(FP32, FP16), (FP32, BF16), (BF16, FP32), (FP32, FP64), (FP64, FP32)], ids=str
)
def test_a_result_of_another_dtype_and_scaled(strategy, alignment, of, into, device):
    """As for an input in half precision with an output in fp32, whose gradient is rounded once."""
    if strategy == "split" and of == FP64:
        pytest.skip("programs exchange fp32 states, so the planner never splits fp64 rows")
    n_cols = 616 if alignment == "even" else 613
    y = torch.softmax(peaked(2, n_cols, of), -1)
    dx, dy, y = run(
        strategy, "softmax", weights(2, n_cols, dtype=of), y, alignment, device, out_dtype=into, factor=-0.375
    )
    assert_gradient(dx, dy, y, "softmax", scale=-0.375, result=into)


@pairwise()
@every_strategy
@every_alignment
@keeping_shape
def test_hidden_columns_have_no_gradient(strategy, alignment, function, device):
    """Rows whose leading, middle or trailing tiles are hidden, and one of which nothing is kept."""
    n_cols = 616 if alignment == "even" else 613
    mask = torch.rand(4, n_cols, generator=torch.Generator().manual_seed(3)) < 0.7
    mask[0, :300] = mask[1, 200:520] = mask[2, 250:] = mask[3] = False
    y = getattr(reference, function)(peaked(4, n_cols), mask=mask, masked_rows="zero")
    dx, dy, y = run(strategy, function, weights(4, n_cols), y, alignment, device, hides=True)
    assert (dx[~mask.to(device)] == 0).all()
    assert_gradient(dx, dy, y, function, hidden=True)


@pairwise()
@every_strategy
@every_alignment
@keeping_shape
def test_nan_stays_in_its_row(strategy, alignment, function, device):
    n_cols = 616 if alignment == "even" else 613
    x, dy = peaked(6, n_cols), weights(6, n_cols)
    x[1, 300] = dy[3, -1] = dy[5, 0] = math.nan
    dx, dy, y = run(strategy, function, dy, getattr(torch, function)(x, -1), alignment, device)
    assert dx[1::2].isnan().all()
    assert_gradient(dx[::2], dy[::2], y[::2], function)


@every_strategy
def test_rows_that_start_at_every_phase(strategy, device):
    for phase in range(4):
        values = (weights(5, 517), torch.softmax(peaked(5, 517), -1))
        made = [Frame(5, 517, FP32, device, row_stride=stride, phase=phase) for stride in (518, 522, 526)]
        for frame, x in zip(made, values, strict=False):
            frame.fill(x.to(device))
        dy, y, dx = (frame.rows for frame in made)
        plan = candidate(strategy, 5, 517, 4, H200, alignment=alignment_of(y, dy, dx), inputs=2, **SMALL[strategy])
        assert plan.alignment == "shifted"
        backward_by_plan(dy, y, dx, plan)
        assert not any(frame.changed(outside=frame is not made[2]) for frame in made[:2])
        assert not made[2].changed()
        assert_gradient(dx, dy, y, "softmax")


# Through the public functions, against torch's operations composed in fp64.


SCORES = {
    "plain": {},
    "scale": {"scale": -0.4},
    "scale a row": {"scale": torch.tensor([[0.5], [-2.0], [1.5]])},
    "scale of no dims": {"scale": torch.tensor(0.75)},
    "scale a batch": {"scale": torch.tensor([-0.5, 2.0]).view(2, 1, 1)},
    "mask": {"mask": kept(3, 40, of=0.7)},
    "mask, zero": {"mask": kept(2, 1, 40, of=0.7) & torch.tensor([True, False]).view(2, 1, 1), "masked_rows": "zero"},
    "added": {"mask": weights(3, 40)},
    "added keys": {"mask": weights(40)},
    "added a query, scaled": {"mask": weights(3, 1), "scale": 0.5},
    "added a batch, scale a row": {"mask": weights(2, 1, 40), "scale": torch.tensor([[0.5], [-2.0], [1.5]])},
    "added in one value": {"mask": weights(1), "scale": torch.tensor([0.3])},
    "causal": {"is_causal": True, "scale": 0.5},
    "causal, added": {"is_causal": True, "mask": weights(1, 40)},
}


# Its shape, and its dtype if that is not the input's.
SINKS = {
    "no sink": None,
    "a sink": ((), None),
    "a sink of one dim": ((1,), FP32),
    "a sink a batch": ((2, 1, 1), None),
    "a sink a query": ((3, 1), FP32),
    "a sink a row": ((2, 3, 1), None),
    "a sink a row of fp32": ((2, 3, 1), FP32),
}


@pairwise()
@every_function
@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (FP32, None), (BF16, FP32), (FP16, None), (BF16, None), (FP64, None), (FP32, BF16), (FP64, FP32), (FP32, FP64),
        (FP16, BF16),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("name", SCORES)
def test_scores(function, name, sink, given, wanted, device):
    """Of input, mask, scale and sink, reduced over what these were broadcast along."""
    arguments = {"x": peaked(6, 40, given).view(2, 3, 40), **SCORES[name]}
    if name.startswith("added") and given in (FP16, BF16):
        arguments["mask"] = arguments["mask"].to(given)  # what the truth is of is what is given
    if SINKS[sink] is not None:
        shape, dtype = SINKS[sink]
        arguments["sink"] = sinks(*shape, dtype=dtype or given)
    arguments = on(device, arguments)
    options = {"dtype": wanted} if wanted is not None and FAMILY[function].takes_dtype else {}
    y = public(function, arguments["x"], **_but_x(arguments), **options)
    dy = torch.where(y.isfinite(), weights(*y.shape).to(device), 0.0)  # what is -inf has no part in a loss
    assert_gradients(function, arguments, dy, **options)


@every_function
def test_any_dim(function, device):
    x = peaked(12, 35).view(3, 4, 5, 7).to(device)
    for dim in range(-4, 4):
        along = [1 if i == dim % 4 else size for i, size in enumerate(x.shape)]
        for scored in (
            {},
            {"scale": weights(*along), "mask": weights(4, 1, 7)},
            {"scale": -0.5, "mask": kept(4, 1, 7, of=0.7), "masked_rows": "zero"},
            {"sink": sinks(*along), "scale": 0.5},
        ):
            scored = on(device, scored)
            y = public(function, x, dim, **scored)
            dy = torch.where(y.isfinite(), weights(*y.shape).to(device), 0.0)
            assert_gradients(function, {"x": x, **scored}, dy, dim)


@every_function
@pytest.mark.parametrize(("n_cols", "dtype"), [(600, BF16), (1100, FP32), (9000, BF16), (8200, FP64)], ids=str)
def test_what_the_planner_chooses_for_long_rows(function, n_cols, dtype, device):
    x, mask = peaked(2, n_cols, dtype).to(device), kept(n_cols, of=0.7).to(device)
    arguments = on(device, {"x": x, "scale": torch.tensor([[0.5], [-1.0]]), "mask": mask})
    dy = weights(2).to(device) if FAMILY[function].reduces else weights(2, n_cols).to(device) * mask
    for each in (arguments, {"x": x}, {"x": x, "sink": sinks(2, 1).to(device)}):
        assert_gradients(function, each, dy)


@keeping_shape
def test_layouts_of_the_input_and_of_the_gradient(function, device):
    """dy as autograd hands it on: expanded by a sum, transposed, sliced, of other strides than the output."""
    buffer = peaked(12, 64).to(device)
    inputs = (
        buffer[:6, :60].view(2, 3, 60),
        buffer[:6, 3:].unflatten(0, (2, 3)),
        buffer[:6, ::2].view(2, 3, 32),
        buffer[:2].unsqueeze(1).expand(2, 3, 64),
        buffer[:6].view(3, 2, 64).transpose(0, 1),
        buffer.view(64, 12)[:60].view(20, 3, 12).permute(2, 1, 0)[:2],
    )
    for x in inputs:
        n = x.shape[-1]
        whole = weights(4, 6, 2 * n).to(device)
        for dy in (
            whole[0, :, :n].view(2, 3, n),
            whole[:2, :3, ::2],
            whole[:2, ::2, 1 : n + 1],
            whole[0, 0, :n].expand(2, 3, n),
            whole[0, 0, 0].expand(2, 3, n),
            whole[:2, :3, :1].expand(2, 3, n),
            whole.flatten()[: 6 * n].view(n, 3, 2).permute(2, 1, 0),
            whole.flatten()[1 : 6 * n + 1].view(2, 3, n),
        ):
            before = dy.clone()
            assert_gradients(function, {"x": x, "scale": 0.5}, dy)
            assert torch.equal(dy, before)
        assert_gradients(function, {"x": x, "scale": 0.5}, whole[:2, ::2, 1 : n + 1], 1)


def test_a_leaf_that_is_expanded_gets_the_sum(device):
    row = peaked(1, 40).to(device).requires_grad_()
    dy = weights(5, 40).to(device)
    (fused_softmax.softmax(row.expand(5, 40), scale=0.5) * dy).sum().backward()
    theirs = row.detach().clone().requires_grad_()
    (torch.softmax(theirs.expand(5, 40) * 0.5, -1) * dy).sum().backward()
    torch.testing.assert_close(row.grad, theirs.grad)


@every_function
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 1), (0, 5), (5, 0)], ids=str)
def test_no_dims_one_column_and_empty(shape, function, device):
    for scored in ({}, {"scale": 2.0}, {"scale": torch.tensor(2.0, device=device, requires_grad=True)}):
        x = torch.full(shape, 3.0, device=device, requires_grad=True)
        public(function, x, **scored).sum().backward()
        assert x.grad.shape == shape
        assert (x.grad == (scored.get("scale", 1.0) if FAMILY[function].reduces else 0.0)).all()


@every_function
@pytest.mark.parametrize(("n_cols", "dtype"), [(60, FP32), (613, BF16)], ids=str)
def test_what_is_read_is_never_written(function, n_cols, dtype, device):
    given = {"x": peaked(4, n_cols, dtype), "mask": weights(n_cols), "scale": weights(4, 1), "sink": sinks(4, 1)}
    leaves = [each.requires_grad_() for each in on(device, given).values()]
    y = public(function, leaves[0], **dict(zip(list(given)[1:], leaves[1:], strict=True)))
    dy = weights(*y.shape, dtype=dtype).to(device)
    read = (*leaves, dy, y)
    before = [tensor.detach().clone() for tensor in read]
    torch.autograd.grad(y, leaves, dy)
    assert all(torch.equal(tensor, was) for tensor, was in zip(read, before, strict=True))


@keeping_shape
def test_reductions_are_not_rounded_to_half_precision_on_the_way(function, device):
    """A bias or temperature in fp32 that many rows of bf16 share gets the gradient that fp32 has of y and dy."""
    x, dy = peaked(500, 40, BF16).to(device), weights(500, 40, dtype=BF16).to(device) + 1
    mask = weights(40).to(device).requires_grad_()
    scale = torch.tensor([[0.3]], device=device, requires_grad=True)
    y = public(function, x, mask=mask, scale=scale)
    ours = torch.autograd.grad(y, (mask, scale), dy)
    dz = formula(dy, y.detach(), function)
    torch.testing.assert_close(ours[0].double(), dz.sum(0), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(ours[1].double(), (dz * x.double()).sum().view(1, 1), rtol=1e-4, atol=1e-2)


@every_function
def test_a_gradient_in_fp64_is_not_scaled_in_fp32(function, device):
    x = peaked(3, 40, FP64).to(device)
    dy = weights(*public(function, x).shape, dtype=FP64).to(device)
    ours = gradients(function, {"x": x, "scale": 0.1}, dy)["x"]
    torch.testing.assert_close(
        ours, gradients(function, {"x": x, "scale": 0.1}, dy, of=composed)["x"], rtol=1e-12, atol=1e-14
    )


@keeping_shape
@pytest.mark.parametrize("scale", [0.0, [[0.0], [2.0]]], ids=str)
def test_rows_of_scale_0_have_no_gradient(function, scale, device):
    """The first maximum is a step: neither the scores nor the scale move what is 1 there and 0 elsewhere."""
    x, dy = peaked(2, 40).to(device), weights(2, 40).to(device)
    number = isinstance(scale, float)
    arguments = {
        "x": x,
        "mask": weights(40).to(device),
        "scale": scale if number else torch.tensor(scale, device=device),
    }
    rows = slice(None) if number else slice(0, 1)
    for create_graph in (False, True):
        leaves = {
            name: value.clone().requires_grad_() for name, value in arguments.items() if isinstance(value, torch.Tensor)
        }
        y = public(function, leaves["x"], mask=leaves["mask"], scale=leaves.get("scale", scale))
        found = dict(
            zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy, create_graph=create_graph), strict=True)
        )
        assert (found["x"][rows] == 0).all()
        assert (found["scale"][rows] == 0).all() if not number else (found["mask"] == 0).all()
    if not number:
        assert_gradients(function, arguments, dy)


@every_function
def test_a_hidden_nan_reaches_no_gradient(function, device):
    """Not the input's, not an added mask's, not the scale's."""
    mask, scale = kept(3, 40, of=0.7).to(device), weights(3, 1).to(device)
    clean = peaked(3, 40).to(device)
    poison = torch.tensor([math.nan, math.inf, -math.inf], device=device).view(3, 1)
    x = torch.where(mask, clean, poison)
    dy = weights(3).to(device) if FAMILY[function].reduces else weights(3, 40).to(device) * mask
    ours = gradients(function, {"x": x, "mask": mask, "scale": scale}, dy)
    plain = gradients(function, {"x": clean.masked_fill(~mask, 0.0), "mask": mask, "scale": scale}, dy)
    for name in ours:
        torch.testing.assert_close(ours[name], plain[name])


@every_function
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_row_of_which_nothing_is_kept_has_no_gradient(function, create_graph, device):
    """Its result is NaN, or of logsumexp -inf, as torch's: left out of the loss it gives the gradient 0, as torch's.

    With a sink, it is the sink that such a row has.
    """
    mask = torch.tensor([True, False, True], device=device).view(3, 1)
    # Of more queries than keys the first see nothing.
    for shape, scored, sink in (
        ((2, 3, 4), {"mask": mask}, None),
        ((2, 6, 2), {"is_causal": True}, None),
        ((3, 40), {"mask": mask}, 2.0),
        ((3, 40), {"mask": mask, "masked_rows": "zero"}, 2.0),
        ((3, 40), {"mask": mask, "masked_rows": "zero"}, -math.inf),
    ):
        found = []
        for of in (public, composed):
            leaves = {"x": peaked(6, 40).flatten()[: math.prod(shape)].view(shape)}
            if sink is not None:
                leaves["sink"] = torch.full((3, 1), sink)
            leaves = {name: leaf.to(device).requires_grad_() for name, leaf in leaves.items()}
            y = of(function, leaves["x"], **scored, **({} if sink is None else {"sink": leaves["sink"]}))
            assert sink is not None or not y.isfinite().all()
            seen = torch.where(y.isfinite(), y * weights(*y.shape).to(device), 0.0)
            found.append(torch.autograd.grad(seen.sum(), list(leaves.values()), create_graph=create_graph))
        torch.testing.assert_close(*found)
        assert all(each.isfinite().all() for each in found[0])


@keeping_shape
@pytest.mark.parametrize("asked", [(1.0, -1.0), (1.0, 2.0)], ids=["sums to 0", "does not"])
def test_what_is_asked_of_a_row_of_nothing_is_not_handed_on(function, asked, device):
    """Its hidden inputs have no gradient: 0 by torch's operations, or NaN as the result is, but never dy."""
    x, mask = peaked(3, 40).to(device), torch.tensor([True, False, True], device=device).view(3, 1)
    dy = weights(3, 40).to(device)
    dy[1] = 0.0
    dy[1, :2] = torch.tensor(asked, device=device)
    found = gradients(function, {"x": x, "mask": mask}, dy)["x"]
    assert (found[1].isnan() | (found[1] == 0.0)).all()
    torch.testing.assert_close(found[::2], gradients(function, {"x": x[::2], "mask": mask[::2]}, dy[::2])["x"])


def test_reductions_of_logsumexps_gradient_are_not_rounded_to_half_precision_on_the_way(device):
    x, dy = peaked(500, 40, BF16).to(device), weights(500, dtype=BF16).to(device) + 1
    mask = weights(40).to(device).requires_grad_()
    y = public("logsumexp", x, mask=mask)
    (ours,) = torch.autograd.grad(y, mask, dy)
    z = x.double() + mask.detach().double()
    dz = (z - z.logsumexp(-1, keepdim=True)).exp() * dy.double().unsqueeze(-1)
    torch.testing.assert_close(ours.double(), dz.sum(0), rtol=1e-4, atol=1e-3)


@keeping_shape
def test_an_input_of_minus_infinity_that_no_mask_hides_has_torchs_gradient(function, device):
    x = peaked(3, 40).to(device)
    x[1, :20] = -math.inf
    for scored in ({}, {"scale": 2.0}, {"scale": torch.full((3, 1), 0.5, device=device)}):
        x_ours, x_theirs = (x.clone().requires_grad_() for _ in range(2))
        dy = weights(3, 40).to(device)
        (ours,) = torch.autograd.grad(public(function, x_ours, **scored), x_ours, dy)
        (theirs,) = torch.autograd.grad(getattr(torch, function)(x_theirs * scored.get("scale", 1.0), -1), x_theirs, dy)
        torch.testing.assert_close(ours, theirs)


@keeping_shape
@pytest.mark.parametrize("given", [torch.int64, torch.float8_e4m3fn, FP64], ids=str)
def test_an_input_of_another_kind_of_number_than_the_output(function, given, device):
    """The scale's gradient is of the input as it is read, and an integer input has none."""
    x = peaked(3, 40).to(given).to(device)
    scale, dy = weights(3, 1).to(device).requires_grad_(), weights(3, 40).to(device)
    (ours,) = torch.autograd.grad(public(function, x, scale=scale, dtype=FP32), scale, dy)
    (theirs,) = torch.autograd.grad(public(function, x.to(FP32), scale=scale), scale, dy)
    torch.testing.assert_close(ours, theirs)


# Autograd's own ways.


def _but_x(given):
    return {name: value for name, value in given.items() if name != "x"}


@every_function
def test_only_what_asks_for_a_gradient_gets_one(function, device):
    given = {"x": peaked(3, 40), "mask": weights(40), "scale": weights(3, 1), "sink": sinks(3, 1)}
    given = on(device, given)
    dy = weights(*public(function, given["x"]).shape).to(device)
    whole = gradients(function, given, dy)
    for wanted in given:
        leaves = {name: value.clone().requires_grad_(name == wanted) for name, value in given.items()}
        y = public(function, leaves["x"], **_but_x(leaves))
        assert y.requires_grad
        y.backward(dy)
        assert [name for name, leaf in leaves.items() if leaf.grad is not None] == [wanted]
        torch.testing.assert_close(leaves[wanted].grad, whole[wanted])
    with torch.no_grad():
        assert not public(function, leaves["x"], **_but_x(leaves)).requires_grad


@every_function
def test_a_retained_graph_gives_the_same_gradient_twice(function, device):
    x = peaked(3, 613).to(device).requires_grad_()
    scale = torch.tensor([[0.5]], device=device, requires_grad=True)
    y = public(function, x, scale=scale)
    dy = weights(*y.shape).to(device)
    first = torch.autograd.grad(y, (x, scale), dy, retain_graph=True)
    again = torch.autograd.grad(y, (x, scale), dy)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, (x, scale), dy)


@every_function
def test_gradients_add_up_in_a_leaf(function, device):
    x = peaked(3, 40).to(device).requires_grad_()
    for _ in range(2):
        y = public(function, x)
        y.backward(weights(*y.shape).to(device))
    once = gradients(function, {"x": x.detach()}, weights(*y.shape).to(device))["x"]
    torch.testing.assert_close(x.grad, 2 * once)


@keeping_shape
def test_an_output_may_be_changed_in_place_and_backward_finds_out(function, device):
    """As torch's: nothing is refused until a gradient is asked for that needs what was there."""
    for dim in (-1, 0):
        for shape in ((3, 40), (1, 40), (3, 1)):
            for scored in ({}, {"scale": 0.5}):
                for enabled in (False, True):
                    x = peaked(1, math.prod(shape)).view(shape).to(device).requires_grad_()
                    y = public(function, x, dim, **scored)
                    assert not y._is_view()
                    with torch.set_grad_enabled(enabled):
                        y.mul_(2)
                    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                        y.sum().backward()


@every_function
def test_create_graph_gives_the_same_first_gradient(function, device):
    for scored in (
        {}, {"scale": -0.5, "mask": kept(3, 40, of=0.7)}, {"scale": weights(3, 1), "mask": weights(40)},
        {"sink": sinks(3, 1), "scale": 0.5},
    ):  # fmt: skip
        x, scored = peaked(3, 40).to(device).requires_grad_(), on(device, scored)
        for value in scored.values():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value.requires_grad_()
        leaves = [x, *(value for value in scored.values() if isinstance(value, torch.Tensor) and value.requires_grad)]
        y = public(function, x, **scored)
        dy = weights(*y.shape).to(device)
        first = torch.autograd.grad(y, leaves, dy, retain_graph=True)
        again = torch.autograd.grad(y, leaves, dy, create_graph=True)
        for a, b in zip(first, again, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert all(each.requires_grad for each in again)


@keeping_shape
@pytest.mark.parametrize("given", [FP16, BF16], ids=str)
def test_a_second_derivative_of_half_precision(function, given, device):
    """A gradient penalty, in half precision or from half precision into fp32."""
    for dtype in (None, FP32):
        second = []
        for of, cast in ((public, given), (composed, FP64)):
            x = peaked(3, 40, given).to(device).to(cast).requires_grad_()
            y = of(function, x, scale=0.5, **({} if dtype is None or cast == FP64 else {"dtype": dtype}))
            (dx,) = torch.autograd.grad(y, x, weights(3, 40).to(device).to(y.dtype), create_graph=True)
            (ddx,) = torch.autograd.grad(dx.square().sum(), x)
            second.append(ddx.double())
        torch.testing.assert_close(*second, rtol=0.1, atol=0.05 * float(second[1].abs().max()))


def tiny(device, *shape, seed=0):
    return weights(*shape, dtype=FP64, seed=seed).to(device)


CHECKED = {
    "plain": lambda d: {},
    "scale": lambda d: {"scale": -0.7},
    "scale a row": lambda d: {"scale": tiny(d, 2, 1, seed=1)},
    "scale of no dims": lambda d: {"scale": tiny(d, seed=1)},
    "mask": lambda d: {"mask": kept(2, 3, of=0.7).to(d) | torch.tensor([True, False, False]).to(d), "scale": 0.5},
    "empty rows zero": lambda d: {"mask": torch.tensor([[True], [False]]).to(d), "masked_rows": "zero"},
    "added": lambda d: {"mask": tiny(d, 3, seed=2), "scale": tiny(d, 2, 1, seed=1)},
    "added a row": lambda d: {"mask": tiny(d, 2, 1, seed=2), "scale": 2.0},
    "causal": lambda d: {"is_causal": True, "scale": tiny(d, 1, 1, seed=1)},
    "sink": lambda d: {"sink": tiny(d, seed=3)},
    "sink of all rows": lambda d: {"sink": tiny(d, 1, 1, seed=3), "scale": -1.5},
    "sink a row, masked": lambda d: {"sink": tiny(d, 2, 1, seed=3), "mask": kept(2, 3, of=0.8).to(d)},
}


@pairwise(strength=1)
@every_function
@pytest.mark.parametrize("name", CHECKED)
def test_gradcheck_and_gradgradcheck(function, name, device):
    """First and second derivatives, and those of forward mode, against finite differences."""
    scored = CHECKED[name](device)
    names = [key for key, value in scored.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]

    def of(x, *tensors):
        y = public(function, x, **scored | dict(zip(names, tensors, strict=True)))
        # What is hidden is -inf in a log_softmax, and no difference of that is finite.
        return torch.where(y.isfinite(), y, 0.0)

    leaves = [tiny(device, 2, 3).requires_grad_(), *(scored[name].requires_grad_() for name in names)]
    assert gradcheck(of, leaves, check_forward_ad=True, fast_mode=QUICK)
    assert gradgradcheck(of, leaves, fast_mode=True)


@every_function
def test_gradcheck_and_gradgradcheck_of_another_dim(function, device):
    shapes = [(3, 2), (1, 2), (3, 1), (1, 2)]
    leaves = [tiny(device, *shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]

    def of(x, scale, mask, sink):
        return public(function, x, 0, scale=scale, mask=mask) + public(function, x, 0, sink=sink)

    assert gradcheck(of, leaves, fast_mode=QUICK)
    assert gradgradcheck(of, leaves, fast_mode=True)


@every_function
@pytest.mark.parametrize("n_cols", [600, 1100])
def test_gradcheck_of_longer_rows(function, n_cols, device):
    x = tiny(device, 1, n_cols).requires_grad_()
    assert gradcheck(lambda x: public(function, x, scale=0.5), x, fast_mode=True)
    assert gradgradcheck(lambda x: public(function, x, scale=0.5), x, fast_mode=True, atol=1e-4)


@every_function
def test_forward_mode_over_backward(function, device):
    """A Hessian-vector product."""
    x, v = tiny(device, 2, 5), tiny(device, 2, 5, seed=1)

    def loss(x, of):
        return of(function, x, scale=0.5).square().sum()

    ours, theirs = (
        torch.func.jvp(torch.func.grad(lambda x, of=of: loss(x, of)), (x,), (v,))[1] for of in (public, composed)
    )  # fmt: skip
    torch.testing.assert_close(ours, theirs)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.requires_grad_(), v)
        y = public(function, dual, scale=0.5)
        assert forward_ad.unpack_dual(y).tangent is not None


def test_checkpointing_runs_the_forward_again(device):
    from torch.utils.checkpoint import checkpoint

    x = peaked(3, 613).to(device).requires_grad_()
    dy = weights(3, 613).to(device)
    (ours,) = torch.autograd.grad(
        checkpoint(lambda x: fused_softmax.softmax(x, scale=0.5), x, use_reentrant=False), x, dy
    )
    assert torch.equal(ours, torch.autograd.grad(fused_softmax.softmax(x, scale=0.5), x, dy)[0])


def test_log_softmax_of_a_mask_has_gradients_where_the_share_is_0(device):
    """exp(y) is 0 of what lies far below the maximum, and dy counts there all the same."""
    x, dy = torch.randn(4, 50, device=device), torch.randn(4, 50, device=device)
    x[:, 0] = 300.0
    keep = torch.ones(4, 50, dtype=torch.bool, device=device)
    keep[:, 7] = False
    dy[:, 7] = 0.0
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    fused_softmax.log_softmax(ours, -1, mask=keep).backward(dy)
    torch.log_softmax(theirs.masked_fill(~keep, -math.inf), -1).backward(dy)
    torch.testing.assert_close(ours.grad, theirs.grad)
