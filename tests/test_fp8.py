"""Inputs of 8-bit floats: read as they lie, and the bits that their copies in float16, which is exact, would give."""

import os

import pytest
import torch
import triton
import triton.language as tl
from conftest import peaked
from contract import assert_softmax
from products import pairwise
from shapes import SMALL, framed, small

import fused_softmax
from fused_softmax.core import launch
from fused_softmax.core.kernels.spec import Spec
from fused_softmax.core.kernels.state import load_exact
from fused_softmax.core.layout import alignment_of
from fused_softmax.core.runner import format_of
from fused_softmax.ops.softmax.calls import LOGSUMEXP, forward, forward_by_plan
from fused_softmax.ops.softmax.scores import PLAIN, Scores

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="kernels run on a GPU or in the interpreter"
)

FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
FUNCTIONS = (fused_softmax.softmax, fused_softmax.log_softmax)
every_format = pytest.mark.parametrize("given", FORMATS, ids=str)
every_result = pytest.mark.parametrize("wanted", [FP16, BF16, FP32, FP64], ids=str)


def equal(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def near(dtype):
    """How far sums in another order may be off."""
    eps = torch.finfo(dtype).eps
    return {"rtol": 4 * eps, "atol": 4 * eps}


@pytest.fixture
def read(monkeypatch):
    """The addresses of all tensors that launches are given."""
    found, prepare = set(), launch.prepare

    def noting(*arguments, **options):
        launched = prepare(*arguments, **options)
        call = launched.__call__

        def noted(*given):
            found.update(each.data_ptr() for each in given if isinstance(each, torch.Tensor))
            call(*given)

        launched.__call__ = noted
        return launched

    monkeypatch.setattr(launch, "prepare", noting)
    return found


@triton.jit
def _load(x_ptr, y_ptr, n, K: tl.constexpr):
    i = tl.arange(0, 512)
    tl.store(y_ptr + i, load_exact(x_ptr + i, i < n, -float("inf"), K))
    tl.store(y_ptr + 512 + i, load_exact(x_ptr + i % 256, None, None, K))


@every_format
def test_every_byte_is_the_float16_of_the_same_value(given, device):
    x = torch.arange(256, dtype=torch.uint8, device=device).repeat(2).view(given)
    y = torch.empty(1024, dtype=FP16, device=device)
    fields = format_of(x)
    for spec in [fields, fields | {"converts_fp8": False}]:
        K = Spec(block_cols=1, pieces=1, vector=1, cast_dtype=tl.float16, **spec)
        _load[(1,)](x.view(torch.uint8), y, 256, K=K)
        equal(y[:256], x[:256].to(FP16))
        assert (y[256:512] == -float("inf")).all()
        equal(y[512:], x.to(FP16))


@every_format
@every_result
def test_every_byte_in_a_row(given, wanted, device):
    """NaN and infinities among them."""
    x = peaked(256, 33).to(given)
    x[:, 7] = torch.arange(256, dtype=torch.uint8).view(given)
    x = x.to(device)
    for function in FUNCTIONS:
        equal(function(x, dtype=wanted), function(x.to(FP16), dtype=wanted))
    assert_softmax(fused_softmax.softmax(x, dtype=wanted), x, dtype=wanted)


@pairwise(("given", "wanted"))
@every_format
@every_result
@pytest.mark.parametrize("n_cols", [1, 33, 1000, 1024, 4097, 40000])
def test_rows_of_any_length(given, wanted, n_cols, device, read):
    x = peaked(3, n_cols).to(given).to(device)
    for function in FUNCTIONS:
        ours = function(x, dtype=wanted)
        assert x.data_ptr() in read
        assert ours.dtype == wanted
        equal(ours, function(x.to(FP16), dtype=wanted))


@every_format
@pytest.mark.parametrize("alignment", ["even", "shifted", "scalar"])
@pytest.mark.parametrize("strategy", SMALL)
def test_every_strategy_wherever_rows_begin(strategy, alignment, given, device):
    """Rows are told by elements of what is held: bytes that begin on 8 are even."""
    for wanted in (BF16, FP32):
        source, target = framed(alignment, peaked(3, 1544).to(given), wanted, device=device)
        plan = small(strategy, source.rows, target.rows, itemsize=2)
        assert plan.strategy == strategy
        forward_by_plan(source.rows, plan, y=target.rows)
        assert_softmax(target.rows, source.rows, dtype=wanted)
        assert not target.changed()
        assert not source.changed(outside=False)
        copied, like = framed(alignment, source.rows.to(FP16), wanted, device=device)
        forward_by_plan(copied.rows, plan, y=like.rows)
        equal(target.rows, like.rows)


@every_format
@pytest.mark.parametrize("phase", [0, 1, 7, 8, 16])
def test_rows_off_16_bytes(given, phase, device, read):
    for n_cols, row_stride in ((1032, 1032), (1032, 1040), (1029, 1029), (200, 216), (4104, 4104)):
        values = peaked(4, row_stride + 16).to(given).to(device)
        x = values.flatten()[phase:].as_strided((4, n_cols), (row_stride, 1))
        y = fused_softmax.softmax(x, dtype=FP16)
        assert x.data_ptr() in read
        assert_softmax(y, x, dtype=FP16)
        if phase % 8 == row_stride % 8 == n_cols % 8 == 0:
            assert alignment_of(x, y) == "even"


N_COLS = 1100
SCORES = {
    "a number": lambda d: {"scale": 0.7},
    "a scale a row": lambda d: {"scale": torch.tensor([[0.5], [0.0], [-2.0]], device=d)},
    "a bool mask": lambda d: {"mask": torch.rand(3, 1, generator=torch.Generator().manual_seed(1)).to(d) > 0.5},
    "columns that a mask keeps": lambda d: {"mask": torch.arange(N_COLS, device=d) % 3 > 0},
    "an added mask": lambda d: {"mask": torch.randn(N_COLS, generator=torch.Generator().manual_seed(1)).to(d)},
    "causal": lambda d: {"is_causal": True, "scale": 0.5},
    "a sink": lambda d: {"sink": 3.0},
    "rows of which nothing is kept": lambda d: {
        "mask": torch.tensor([[True], [False], [True]], device=d), "masked_rows": "zero",
    },
}  # fmt: skip


@pairwise()
@every_format
@every_result
@pytest.mark.parametrize("scores", SCORES)
def test_scores(given, wanted, scores, device, read):
    x = peaked(3, N_COLS).to(given).to(device)
    scored = SCORES[scores](device)
    for function in FUNCTIONS:
        ours = function(x, dtype=wanted, **scored)
        assert x.data_ptr() in read
        equal(ours, function(x.to(FP16), dtype=wanted, **scored))


@pairwise()
@every_format
@every_result
@pytest.mark.parametrize("shape", [(2, 40, 64), (3, 21, 7), (1, 300, 24), (2, 9, 264)], ids=str)
def test_a_strided_dim(given, wanted, shape, device, read):
    x = peaked(shape[0] * shape[1], shape[2]).view(shape).to(given).to(device)
    for function in FUNCTIONS:
        ours = function(x, 1, dtype=wanted)
        assert x.data_ptr() in read
        torch.testing.assert_close(ours, function(x.to(FP16), 1, dtype=wanted), **near(wanted))
    if wanted != FP64:
        assert_softmax(fused_softmax.softmax(x, 1, dtype=wanted), x, 1, dtype=wanted)


@every_format
@pytest.mark.parametrize("wanted", [FP16, BF16, FP32], ids=str)
def test_logsumexp(given, wanted, device, read):
    """Which no public call asks for, but the gradient of a sink."""
    scores = Scores(scale=0.5)
    for n_rows, n_cols in ((3, 1), (3, 33), (200, 264), (3, 5003), (3, 40000)):
        x = peaked(n_rows, n_cols).to(given).to(device)
        for of in (PLAIN, scores):
            ours = forward(LOGSUMEXP, x, (1,), wanted, None, of)
            assert x.data_ptr() in read
            equal(ours, forward(LOGSUMEXP, x.to(FP16), (1,), wanted, None, of))
    x = peaked(80, 64).view(2, 40, 64).to(given).to(device)
    ours = forward(LOGSUMEXP, x, (1,), wanted, None, PLAIN)
    assert x.data_ptr() in read
    torch.testing.assert_close(ours, torch.logsumexp(x.to(FP32), 1).to(wanted))


@every_format
def test_the_gradient_of_a_sink_reads_them_too(given, device, read):
    x, dy = peaked(3, 40).to(given).to(device), peaked(3, 40, seed=1).to(device)
    sink = torch.tensor(2.0, device=device, requires_grad=True)
    for wanted in (FP16, FP32):
        y = fused_softmax.softmax(x, dtype=wanted, sink=sink)
        assert x.data_ptr() in read
        (ours,) = torch.autograd.grad(y, sink, dy.to(wanted))
        y = fused_softmax.softmax(x.to(FP16), dtype=wanted, sink=sink)
        (theirs,) = torch.autograd.grad(y, sink, dy.to(wanted))
        equal(ours, theirs)


@every_format
@pytest.mark.parametrize("scored", [{}, {"scale": 0.5}, {"is_causal": True}, {"scale": 0.0}], ids=str)
def test_their_own_gradient_is_of_their_dtype(given, scored, device):
    dy = peaked(3, 40, seed=1).to(device)
    for function, wanted in ((fused_softmax.softmax, FP16), (fused_softmax.log_softmax, FP32)):
        x = peaked(3, 40).to(given).to(device).requires_grad_()
        for _ in range(2):
            (ours,) = torch.autograd.grad(function(x, dtype=wanted, **scored), x, dy.to(wanted))
            wide = x.detach().to(FP32).requires_grad_()
            (theirs,) = torch.autograd.grad(function(wide, dtype=wanted, **scored), wide, dy.to(wanted))
            assert ours.dtype == given
            equal(ours.to(FP32), theirs.to(given).to(FP32))


def test_calls_of_the_two_formats_are_told_apart(device):
    x = torch.arange(0, 64, dtype=torch.uint8, device=device).view(4, 16)
    for _ in range(2):
        for given in FORMATS:
            assert_softmax(fused_softmax.softmax(x.view(given), dtype=FP32), x.view(given), dtype=FP32)


def test_a_format_that_no_kernel_reads_is_converted(device):
    for given in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        x = peaked(3, 300).to(given).to(device)
        sink = torch.tensor(2.0, device=device, requires_grad=True)
        assert_softmax(fused_softmax.softmax(x, dtype=FP32), x.to(FP32))
        equal(
            fused_softmax.softmax(x, dtype=FP32, sink=sink).detach(), fused_softmax.softmax(x.to(FP32), sink=2.0)
        )  # fmt: skip


@every_format
def test_permuted_rows_are_read_as_they_lie(given, device):
    x = peaked(30, 64).to(device).view(2, 3, 5, 64).to(given).transpose(1, 2)
    with torch.no_grad():
        equal(fused_softmax.softmax(x, -1, dtype=FP16), fused_softmax.softmax(x.to(FP16).contiguous(), -1))
        equal(fused_softmax.softmax(x[..., 1:], -1, dtype=FP16), fused_softmax.softmax(x.to(FP16)[..., 1:], -1))
