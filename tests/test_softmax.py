"""softmax: every strategy, dtype, alignment and stride, on a GPU or in Triton's interpreter, held to torch."""

import math
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from conftest import peaked
from contract import assert_softmax
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from products import QUICK, pairwise
from shapes import ALIGNMENTS, DTYPES, FEW, MANY, STRATEGIES, Frame, framed, planned, small, widths
from torch.autograd import forward_ad

import fused_softmax
from fused_softmax.core import calls, launch
from fused_softmax.core.plan import H200, candidate
from fused_softmax.ops.softmax.calls import forward_by_plan

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="without a GPU or the interpreter, CPU tensors take ATen"
)

FP32, FP16, BF16, FP64 = DTYPES
LOWEST = torch.finfo(FP32).min
softmax = fused_softmax.softmax

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
every_alignment = pytest.mark.parametrize("alignment", ALIGNMENTS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def run(strategy, source, target, **choices):
    """softmax by a named strategy, in small pieces and parts, from one frame into the other: nothing else changes."""
    plan = small(strategy, source.rows, target.rows, **choices)
    assert plan.strategy == strategy
    y = forward_by_plan(source.rows, plan, y=target.rows)
    assert y is target.rows
    assert not source.changed(outside=False), "the input was written, or what lies around it"
    assert not target.changed(), "something outside the output's rows was written"
    return y


def by_strategy(strategy, x, **choices):
    """softmax of contiguous x [n_rows, n_cols] by a named strategy, into memory that is NaN before."""
    y = torch.full_like(x, math.nan)
    return forward_by_plan(x, small(strategy, x, y, **choices), y=y)


def skip_impossible(strategy, dtype):
    if strategy == "split" and dtype == FP64:
        pytest.skip("programs exchange fp32 states, so the planner never splits fp64 rows")


# Strategies, by name.


@pairwise(("strategy", "alignment", "dtype"))
@every_strategy
@every_dtype
@every_alignment
@pytest.mark.parametrize("n_cols", [1024, 1000])
def test_every_strategy(strategy, dtype, alignment, n_cols, device):
    skip_impossible(strategy, dtype)
    n_cols += alignment != "even"
    x = peaked(3, n_cols, dtype)
    source, target = framed(alignment, x, device=device)
    assert_softmax(run(strategy, source, target), source.rows)


@pairwise()
@every_strategy
@every_alignment
@pytest.mark.parametrize("n_cols", [1, 2, 3, 7, 16, 31, 64, 65, 129, 511, 512, 513, 767, 769, 1025])
def test_short_and_odd_rows_by_every_strategy(strategy, alignment, n_cols, device):
    for dtype in (FP32, BF16):
        vector = 16 // dtype.itemsize
        width = -(-n_cols // vector) * vector if alignment == "even" else n_cols
        source, target = framed(alignment, peaked(3, width, dtype), device=device)
        assert_softmax(run(strategy, source, target), source.rows)


@pytest.mark.parametrize("n_rows", [1, 2, 3, 7, 8, 9, 17])
@pytest.mark.parametrize("n_cols", [8, 136, 131])
def test_tile_with_rows_left_over(n_rows, n_cols, device):
    x = peaked(n_rows, n_cols, BF16)
    source, target = framed("even" if n_cols % 8 == 0 else "shifted", x, device=device)
    assert_softmax(run("tile", source, target), source.rows)


@pairwise(strength=1)
@every_alignment
@pytest.mark.parametrize("parts", [1, 2, 3, 7, 33, pytest.param(64, marks=pytest.mark.exhaustive)])
def test_split_in_few_and_many_parts(alignment, parts, device):
    # With copies of the slots that do and do not divide the programs, one poll for all warps or one for each.
    n_cols = parts * 64 + (-8 if alignment == "even" else -5)
    x = peaked(2, n_cols, BF16)
    for copies, lanes, poll_last_first in ((1, 64, False), (3, 128, True)):
        source, target = framed(alignment, x, device=device)
        choices = {"part_cols": 64, "num_warps": 2, "copies": copies, "lanes": lanes}
        choices |= {"poll_last_first": poll_last_first}
        assert_softmax(run("split", source, target, **choices), source.rows)


@pairwise()
@every_alignment
@pytest.mark.parametrize("n_cols", [512, 520, 2047, 2048, 2056, 2561])
@pytest.mark.parametrize("part_cols", [512, 1024, 4096])
def test_stream_at_the_ends_of_its_parts(alignment, n_cols, part_cols, device):
    n_cols += alignment == "shifted" and n_cols % 8 == 0
    source, target = framed(
        alignment if n_cols % 8 == 0 or alignment != "even" else "shifted", peaked(2, n_cols), device=device
    )
    assert_softmax(run("stream", source, target, part_cols=part_cols), source.rows)


@every_strategy
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_rows_that_start_at_every_phase(strategy, dtype, device):
    """A row stride that is no multiple of 16 bytes starts each row at another phase, and each gets its own edges."""
    vector = 16 // dtype.itemsize
    for phase in range(0, vector, vector - 1 if QUICK else 1):  # the rows start at every phase whichever is the first's
        for stride in (2, vector - 1):
            x = peaked(vector + 1, 517, dtype)
            row_stride = 517 + (stride - 517) % vector
            source = Frame(*x.shape, dtype, device, row_stride=row_stride, phase=phase)
            source.fill(x)
            target = Frame(*x.shape, dtype, device, row_stride=row_stride + vector, phase=phase)
            plan = small(strategy, source.rows, target.rows)
            assert plan.alignment == "shifted"
            y = run(strategy, source, target)
            assert_softmax(y, source.rows)


@pairwise()
@pytest.mark.parametrize("like", [FEW, MANY], ids=["few rows", "many rows"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP64], ids=str)
@every_alignment
@pytest.mark.parametrize(
    "every", [pytest.param(1, marks=pytest.mark.exhaustive), 5], ids=["every width", "every fifth width"]
)
def test_what_the_planner_chooses_around_every_edge(like, dtype, alignment, every, device):
    seen = set()
    # Few rows are split into so many parts that the interpreter takes seconds over a long one.
    for n_cols in widths(dtype.itemsize, alignment, most=140_000 if like == MANY else 60_000)[::-every]:
        n_rows = 3 if n_cols < 1100 else 2 if n_cols < 5000 else 1
        source, target = framed(alignment, peaked(n_rows, n_cols, dtype), device=device)
        plan = planned(n_rows, like, n_cols, dtype.itemsize, alignment)
        forward_by_plan(source.rows, plan, y=target.rows)
        assert_softmax(target.rows, source.rows)
        assert not target.changed()
        seen.add(plan.strategy)
    assert seen >= {"tile", "row"}
    assert dtype == FP64 or "split" in seen


@pytest.mark.parametrize("dtype", [FP32, BF16, FP64], ids=str)
def test_the_planner_alone(dtype, device):
    for n_rows, n_cols in ((1, 1), (70, 33), (5, 1024), (4, 1025), (2, 12672), (1, 32769)):
        x = peaked(n_rows, n_cols, dtype).to(device)
        assert_softmax(softmax(x), x)


# Values.

SPECIAL = {
    "nothing": (),
    "NaN first": ((0, math.nan),),
    "NaN in the middle": ((517, math.nan),),
    "NaN last": ((-1, math.nan),),
    "all NaN": ((slice(None), math.nan),),
    "+inf": ((300, math.inf),),
    "two +inf": ((3, math.inf), (-1, math.inf)),
    "all +inf": ((slice(None), math.inf),),
    "+inf and NaN": ((3, math.inf), (700, math.nan)),
    "all -inf": ((slice(None), -math.inf),),
    "-inf but for the first": ((slice(1, None), -math.inf),),
    "-inf but for the last": ((slice(None, -1), -math.inf),),
    "-inf but for one": ((slice(None, 600), -math.inf), (slice(601, None), -math.inf)),
    "-inf leading": ((slice(None, 600), -math.inf),),
    "-inf in the middle": ((slice(256, 768), -math.inf),),
    "-inf trailing": ((slice(400, None), -math.inf),),
    "every second -inf": ((slice(None, None, 2), -math.inf),),
    "-inf leading, then NaN": ((slice(None, 600), -math.inf), (600, math.nan)),
    "-inf and one NaN": ((slice(None), -math.inf), (517, math.nan)),
    "-inf and one +inf": ((slice(None), -math.inf), (517, math.inf)),
    "NaN within -inf": ((slice(128, 900), -math.inf), (517, math.nan)),
    "NaN trailing after -inf": ((slice(256, None), -math.inf), (-1, math.nan)),
    "masked by the lowest": ((slice(256, None), LOWEST),),
    "all the lowest": ((slice(None), LOWEST),),
    "all the highest": ((slice(None), -LOWEST),),
    "the lowest and -inf": ((slice(None), -math.inf), (slice(100, 900), LOWEST)),
    "the lowest and the highest": ((slice(None), LOWEST), (517, -LOWEST)),
    "1e30": ((slice(400, 410), 1e30),),
    "all 1e30": ((slice(None), 1e30),),
    "all -1e30": ((slice(None), -1e30),),
    "below 2^30": ((slice(500, 700), 2.0**30 - 64),),
    "2^30": ((slice(500, 700), 2.0**30 - 64), (600, 2.0**30)),
    "above 2^30": ((slice(500, 700), 2.0**30), (600, 2.0**30 + 128), (20, 2.0**30 - 64)),
    "-2^30": ((slice(None), -(2.0**30)), (slice(0, 1000, 3), -(2.0**30) + 64), (600, -(2.0**30) - 128)),
    "all 2^29 + 32": ((slice(None), 2.0**29 + 32), (3, 2.0**29)),
    "thousands": ((slice(None, None, 5), 12345.678), (77, 12346.5)),
    "denormal": ((slice(None), 1e-40), (5, -1e-41), (700, 2e-38)),
    "denormal outputs": ((slice(None), -100.0), (5, 0.0), (6, -88.0)),
    "zeros of both signs": ((slice(None), 0.0), (slice(None, None, 2), -0.0)),
}


@pairwise()
@every_strategy
@every_alignment
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16, FP64], ids=str)
@pytest.mark.parametrize("third", [0, 1, 2])
def test_special_values(strategy, alignment, dtype, third, device):
    """One row each of a third of all kinds between rows of none, so that a NaN that leaves its row shows."""
    skip_impossible(strategy, dtype)
    n_cols = 1024 if alignment == "even" else 1027
    special = dict(list(SPECIAL.items())[third::3])
    x = peaked(2 * len(special), n_cols, FP32)
    for row, changes in enumerate(special.values()):
        for cols, value in changes:
            x[2 * row, cols] = value
    highest = torch.finfo(dtype).max
    if dtype == FP16:  # what is finite stays so
        x = torch.where(x.isfinite(), x.clamp(-highest, highest), x)
    source, target = framed(alignment, x.to(dtype), device=device)
    y = run(strategy, source, target)
    theirs = torch.softmax(source.rows, -1)
    for row, name in enumerate(special):
        both = slice(2 * row, 2 * row + 2)
        assert torch.equal(y[both].isnan(), theirs[both].isnan()), name
        try:
            assert_softmax(y[both], source.rows[both])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@pairwise(strength=1)
@every_strategy
@every_alignment
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_one_nan_makes_the_whole_row_nan_wherever_it_stands(strategy, alignment, value, device):
    """Also where the rest of its thread's, its warp's or its program's columns is -inf."""
    n_cols = 1024 if alignment == "even" else 1027
    places = [0, 1, 4, 127, 128, 255, 256, 511, 512, 517, 900, n_cols - 4, n_cols - 1]
    x = peaked(2 * len(places), n_cols, FP32)
    for row, place in enumerate(places):
        x[2 * row : 2 * row + 2, place % 128 :: 128] = -math.inf
        x[2 * row + 1, place // 512 * 512 : place // 512 * 512 + 512] = -math.inf
        x[2 * row : 2 * row + 2, place] = value
    source, target = framed(alignment, x, device=device)
    assert run(strategy, source, target).isnan().all()


@pairwise()
@every_strategy
@every_alignment
@pytest.mark.parametrize("where", ["leading", "middle", "trailing"])
def test_tiles_of_minus_infinity_leave_the_row_finite(strategy, alignment, where, device):
    n_cols = 1024 if alignment == "even" else 1027
    x = peaked(3, n_cols)
    x[:, {"leading": slice(0, 512), "middle": slice(256, 768), "trailing": slice(512, None)}[where]] = -math.inf
    source, target = framed(alignment, x, device=device)
    y = run(strategy, source, target)
    assert y.isfinite().all()
    assert (y[x.to(device) == -math.inf] == 0).all()
    assert_softmax(y, source.rows)


@every_strategy
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_the_lowest_value_is_uniform(strategy, dtype, device):
    skip_impossible(strategy, dtype)
    x = torch.full((2, 1024), torch.finfo(dtype).min, dtype=dtype, device=device)
    assert (by_strategy(strategy, x) == 1 / 1024).all()


@every_strategy
def test_rows_sum_to_one(strategy, device):
    x = peaked(4, 3000).to(device)
    torch.testing.assert_close(
        by_strategy(strategy, x).double().sum(-1), torch.ones(4, dtype=FP64, device=device), rtol=0, atol=1e-6
    )


@every_strategy
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_inputs_give_the_same_bits(strategy, dtype, device):
    skip_impossible(strategy, dtype)
    x = peaked(3, 2001, dtype).to(device)
    first = by_strategy(strategy, x)
    for _ in range(1 if QUICK else 3 if INTERPRETED else 50):
        assert torch.equal(by_strategy(strategy, x), first)


# dtype=


@pairwise(("strategy", "given", "wanted"))
@every_strategy
@every_alignment
@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (FP16, FP32), (BF16, FP32), (FP32, BF16), (FP32, FP16), (FP16, BF16), (BF16, FP16),
        (FP64, FP32), (FP64, BF16), (FP32, FP64), (BF16, FP64),
    ],
    ids=str,
)  # fmt: skip
def test_dtype_by_every_strategy(strategy, alignment, given, wanted, device):
    if strategy == "split" and FP64 in (given, wanted):
        pytest.skip("programs exchange fp32 states, so the planner never splits rows computed in fp64")
    n_cols = 1024 if alignment == "even" else 1027
    source, target = framed(alignment, peaked(3, n_cols, given), wanted, device=device)
    assert_softmax(run(strategy, source, target), source.rows, dtype=wanted)


@pairwise(strength=1)
@pytest.mark.parametrize("wanted", DTYPES, ids=str)
@pytest.mark.parametrize(
    "given", [*DTYPES, torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool, torch.float8_e4m3fn], ids=str
)
def test_dtype(given, wanted, device):
    x = peaked(3, 700).to(given).to(device)
    y = softmax(x, dtype=wanted)
    assert_softmax(y, x, dtype=wanted)
    assert y.is_contiguous()
    assert_softmax(softmax(x, 0, dtype=wanted), x, 0, dtype=wanted)


@pairwise()
@pytest.mark.parametrize("given", DTYPES, ids=str)
@pytest.mark.parametrize("wanted", DTYPES, ids=str)
@pytest.mark.parametrize("n_cols", [9000, 33000, 70000])
def test_dtype_of_long_rows(given, wanted, n_cols, device):
    """A row of half precision that is computed in fp64 has the states of fp64, whatever its input's width."""
    x = peaked(1, n_cols, given).to(device)
    assert_softmax(softmax(x, dtype=wanted), x, dtype=wanted)


def test_the_input_is_rounded_to_dtype_before_anything_else(device):
    x = torch.tensor([[1.0009765625, 1.0], [70000.0, 1.0], [-1e-30, 0.0]], device=device)
    for dtype in (FP16, BF16):
        assert torch.equal(softmax(x, dtype=dtype).isnan(), torch.softmax(x, -1, dtype=dtype).isnan())
        assert_softmax(softmax(x, dtype=dtype), x, dtype=dtype)


# Shapes and strides.


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_any_dim_of_any_shape(dtype, device):
    shapes = [
        (7,),
        (1,),
        (3, 5),
        (1, 9),
        (9, 1),
        (2, 3, 65),
        (4, 8, 1),
        (1, 8, 1),
        (4, 1, 8),
        (2, 1, 3, 5),
        (3, 4, 2, 1),
    ]
    for shape in shapes:
        x = peaked(1, math.prod(shape), dtype).view(shape).to(device)
        for dim in range(-len(shape), len(shape)):
            for _ in range(2):  # the second call takes the launch that the first one kept
                y = softmax(x, dim)
                assert_softmax(y, x, dim)
                assert y.is_contiguous(), (shape, dim)


def _layouts(x):
    """Tensors of many strides made from x [6, 700], by name."""
    return {
        "contiguous": x,
        "columns from the second on": x[:, 1:],
        "columns to the last but one": x[:, :-1],
        "columns from the eighth on": x[:, 8:688],
        "every second row": x[::2],
        "every second column": x[:, ::2],
        "transposed": x.t()[:300],
        "expanded": x[:1].expand(4, -1),
        "expanded in the middle": x[:4].view(2, 2, 700)[:, :1].expand(2, 3, 700),
        "expanded first": x[:2].expand(3, 2, 700),
        "expanded columns": x[:, :1].expand(6, 50),
        "three dims": x.view(2, 3, 700),
        "three dims, sliced": x.view(2, 3, 700)[:, 1:, 3:],
        "three dims, permuted": x.view(2, 3, 700).permute(1, 0, 2),
        "three dims, dim in front": x.view(2, 3, 700).permute(2, 0, 1),
        "four dims": x.view(2, 3, 7, 100),
        "four dims, permuted": x.view(2, 3, 7, 100).permute(0, 2, 1, 3),
        "windows": x.flatten().unfold(0, 500, 3)[:20],
        "one column": x[:, 3:4],
        "channels last": x.view(2, 3, 7, 100).contiguous(memory_format=torch.channels_last),
        "one element": x[0, 0],
        "one row": x[3],
        "strided row": x[:, 3],
    }


@pairwise(strength=1)
@pytest.mark.parametrize("dtype", [FP32, FP16, FP64], ids=str)
@pytest.mark.parametrize("layout", _layouts(torch.empty(6, 700)))
def test_strides(layout, dtype, device):
    x = _layouts(peaked(6, 700, dtype).to(device))[layout]
    before = x.clone()
    for dim in {-1, 0, -x.ndim} if x.ndim else {-1, 0}:
        assert_softmax(softmax(x, dim), x, dim)
        assert_softmax(softmax(x, dim), x, dim)
    assert torch.equal(x, before)


@every_strategy
@pytest.mark.parametrize("row_stride", [0, 1, 517, 518, 1024, 4096])
def test_row_strides_by_every_strategy(strategy, row_stride, device):
    """Rows that are all one row, that overlap, that touch, that lie far apart."""
    n_rows, n_cols = 5, 517
    source = Frame(n_rows, n_cols, FP32, device, row_stride=max(row_stride, n_cols))
    source.fill(peaked(n_rows, n_cols))
    x = source.buffer.as_strided((n_rows, n_cols), (row_stride, 1), source.rows.storage_offset())
    y = torch.full((n_rows, n_cols), math.nan, device=device)
    forward_by_plan(x, small(strategy, x, y), y=y)
    if row_stride < n_cols:  # of a buffer that has values and no NaN between the rows
        assert_softmax(y, x.clone())
    else:
        assert_softmax(y, x)
        assert y.isfinite().all(), "what lies between the rows leaked in"
    assert not source.changed(outside=False)


@pytest.mark.parametrize("phase", [0, 1, 2, 3])
def test_a_base_that_is_not_aligned_is_not_taken_for_one_that_is(phase, device):
    """Same shape, strides and dtype as a call before, but another phase: it takes a launch of its own."""
    buffer = peaked(1, 3 * 1024 + 8).flatten().to(device)
    for offset in (0, phase, 4 - phase, 4):
        x = buffer[offset : offset + 3 * 1024].view(3, 1024)
        assert_softmax(softmax(x), x)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (0, 0), (2, 0, 3), (2, 3, 0)], ids=str)
def test_empty(shape, device):
    for dim in range(-len(shape), len(shape)):
        for dtype in (None, FP16):
            x = torch.empty(shape, device=device)
            y = softmax(x, dim, dtype=dtype)
            theirs = torch.softmax(x, dim, dtype=dtype)
            assert (y.shape, y.dtype) == (theirs.shape, theirs.dtype)


@pytest.mark.parametrize("value", [3.0, -math.inf, math.inf, math.nan, LOWEST], ids=str)
def test_zero_dimensions_and_one_column(value, device):
    for x in (
        torch.tensor(value, device=device),
        torch.full((4, 1), value, device=device),
        torch.full((1,), value, device=device),
    ):
        for dim in (0, -1):
            assert_softmax(softmax(x, dim), x, dim)
            assert softmax(x, dim).shape == x.shape


# out=


@every_strategy
@every_alignment
def test_out_of_every_alignment_by_every_strategy(strategy, alignment, device):
    for n_cols in (64, 1000):
        source, target = framed(alignment, peaked(4, n_cols), device=device)
        assert_softmax(run(strategy, source, target), source.rows)


@pairwise()
@pytest.mark.parametrize("shape", [(5, 700), (3, 7), (2, 3, 65), (1, 1), (4,)], ids=str)
@pytest.mark.parametrize("given", [FP32, BF16], ids=str)
@pytest.mark.parametrize("wanted", [None, FP32, FP16], ids=str)
def test_out(shape, given, wanted, device):
    x = peaked(1, math.prod(shape), given).view(shape).to(device)
    for dim in range(-len(shape), len(shape)):
        out = torch.full(shape, math.nan, dtype=wanted or given, device=device)
        assert softmax(x, dim, dtype=wanted, out=out) is out
        assert_softmax(out, x, dim, dtype=wanted)


def test_out_with_strides_of_its_own_is_written_and_nothing_beside_it(device):
    x = peaked(4, 300).to(device)
    views = {
        "row-strided": lambda b: b[:1280].view(4, 320)[:, :300],
        "row-strided, shifted": lambda b: b[3:1263].view(4, 315)[:, 5:305],
        "every second column": lambda b: b[:2400].view(4, 600)[:, ::2],
        "transposed": lambda b: b[:1200].view(300, 4).t(),
        "one off": lambda b: b[1:1201].view(4, 300),
    }
    for name, view in views.items():
        buffer = torch.full((3000,), math.nan, device=device)
        out = view(buffer)
        for dim in (-1, 0):
            assert softmax(x, dim, out=out) is out
            assert_softmax(out, x, dim)
        out.fill_(math.nan)
        assert buffer.isnan().all(), name


def test_out_that_is_the_input_or_overlaps_it(device):
    for n_cols in (5, 300, 1100):
        for dim in (-1, 0):
            x = peaked(4, n_cols).to(device)
            theirs = torch.softmax(x, dim)
            assert softmax(x, dim, out=x) is x
            torch.testing.assert_close(x, theirs, rtol=1e-5, atol=1e-7)
            buffer = peaked(1, 5 * n_cols).flatten().to(device)
            x, out = buffer[: 4 * n_cols].view(4, -1), buffer[n_cols - 2 : 5 * n_cols - 2].view(4, -1)
            theirs = torch.softmax(x, dim)
            softmax(x, dim, out=out)
            torch.testing.assert_close(out, theirs, rtol=1e-5, atol=1e-7)


def test_out_of_zero_elements_takes_the_shape_of_the_result(device):
    for shape in ((3, 5), (0, 5), (5, 0), (2, 0, 3), ()):
        for empty in ((0,), (0, 5), (5, 0), (0, 7)):
            x = torch.randn(shape, device=device)
            out = torch.empty(empty, device=device)
            assert softmax(x, -1, out=out) is out
            assert out.shape == shape
            assert_softmax(out, x)


def test_out_counts_as_written_for_autograd(device):
    """What a backward pass saved must not be overwritten behind its back."""
    out = torch.randn(3, 700, device=device)
    weight = torch.ones(3, 700, device=device, requires_grad=True)
    loss = (weight * out).sum()
    softmax(torch.randn(3, 700, device=device), out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_out_with_the_negative_bit_gets_the_result(device):
    x = peaked(3, 700).to(device)
    out = torch._neg_view(torch.zeros(3, 700, device=device))
    softmax(x, out=out)
    assert_softmax(out, x)


def test_out_that_overlaps_itself_is_refused_as_by_torch(device):
    x = torch.randn(3, 64, device=device)
    out = torch.empty(1, 64, device=device).expand(3, 64)
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.softmax(x, -1, out=out)
    with pytest.raises(RuntimeError, match="single memory location"):
        softmax(x, out=out)


# Bad input.


@pytest.fixture
def no_launch(monkeypatch):
    def fail(*args, **options):
        pytest.fail("a kernel was prepared for a call that is refused")

    monkeypatch.setattr(launch, "prepare", fail)


BAD = {
    "a list": (lambda d: ([1.0, 2.0],), {}, "input.*list"),
    "None": (lambda d: (None,), {}, "input.*NoneType"),
    "a NumPy array": (lambda d: (np.ones(3), 0), {}, "input.*ndarray"),
    "int64": (lambda d: (torch.ones(3, 4, dtype=torch.int64, device=d),), {}, "int64"),
    "int32": (lambda d: (torch.ones(3, 4, dtype=torch.int32, device=d),), {}, "int32"),
    "uint8": (lambda d: (torch.ones(3, 4, dtype=torch.uint8, device=d),), {}, "uint8"),
    "bool": (lambda d: (torch.ones(3, 4, dtype=torch.bool, device=d),), {}, "bool"),
    "dtype int64": (lambda d: (torch.ones(3, 4, device=d),), {"dtype": torch.int64}, "int64"),
    "dtype bool": (lambda d: (torch.ones(3, 4, device=d),), {"dtype": torch.bool}, "bool"),
    "dtype a string": (lambda d: (torch.ones(3, 4, device=d),), {"dtype": "float32"}, "dtype.*float32"),
    "dim too large": (lambda d: (torch.ones(3, 4, device=d), 2), {}, r"dim 2.*\[-2, 1\].*\(3, 4\)"),
    "dim too small": (lambda d: (torch.ones(3, 4, device=d), -3), {}, r"dim -3.*\[-2, 1\].*\(3, 4\)"),
    "dim of no dims": (lambda d: (torch.ones((), device=d), 1), {}, r"dim 1.*\[-1, 0\]"),
    "dim a float": (lambda d: (torch.ones(3, 4, device=d), 1.0), {}, "dim.*float.*1.0"),
    "dim a bool": (lambda d: (torch.ones(3, 4, device=d), True), {}, "dim.*bool.*True"),
    "dim None": (lambda d: (torch.ones(3, 4, device=d), None), {}, "dim.*NoneType"),
    "dim a list": (lambda d: (torch.ones(3, 4, device=d), [1]), {}, r"dim.*list.*\[1\]"),
    "dim a string": (lambda d: (torch.ones(3, 4, device=d), "a"), {}, "dim.*str"),
    "out of another dtype": (
        lambda d: (torch.ones(3, 4, device=d), -1), {"out": lambda d: torch.ones(3, 4, dtype=FP16, device=d)},
        "out.*float32.*float16",
    ),
    "out of the input's dtype and not dtype's": (
        lambda d: (torch.ones(3, 4, device=d), -1),
        {"dtype": FP16, "out": lambda d: torch.ones(3, 4, device=d)},
        "out.*float16.*float32",
    ),
    "out of another device": (
        lambda d: (torch.ones(3, 4, device=d), -1), {"out": lambda d: torch.ones(3, 4, device="meta")}, "out.*meta",
    ),
    "out a list": (lambda d: (torch.ones(3, 4, device=d), -1), {"out": lambda d: [1.0]}, "out.*list"),
    "sparse": (
        lambda d: (torch.ones(3, 4, device=d).to_sparse(),), {"out": lambda d: torch.ones(3, 4, device=d)}, "sparse",
    ),
    "sparse rows": (lambda d: (torch.ones(3, 4, device=d).to_sparse_csr(),), {}, "sparse_csr"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_with_torchs_error_before_any_launch(name, no_launch, device):
    make, options, message = BAD[name]
    options = {k: v(device) if callable(v) else v for k, v in options.items()}
    arguments = make(device)
    torchs = (*arguments, -1)[:2] if len(arguments) == 1 else arguments
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Exception) as theirs:  # noqa: PT011  whatever torch raises
            torch.softmax(*torchs, **options)
        with pytest.raises(Exception, match=f"(?s)softmax: .*{message}") as ours:
            softmax(*arguments, **options)
    # torch 2.11 takes a dim that is no number for a name, and says RuntimeError.
    assert ours.type is theirs.type or (name in ("dim None", "dim a string") and ours.type is TypeError)


def test_a_dim_that_equals_another_is_not_taken_for_it(device):
    """True == 1.0 == 1, and all hash alike: a launch that was kept for 1 is not for them."""
    x = torch.randn(3, 4, device=device)
    softmax(x, 1)
    softmax(x, 0)
    for dim in (True, False, 1.0, 0.0, -1.0):
        with pytest.raises(TypeError, match=f"dim.*{type(dim).__name__}"):
            softmax(x, dim)


def test_a_dim_of_numpy_is_an_int_as_for_torch(device):
    x = torch.randn(3, 4, device=device)
    assert_softmax(softmax(x, np.int64(0)), x, 0)
    assert_softmax(softmax(x, np.int32(-1)), x, -1)


@pytest.mark.parametrize("shape", [(3,), (4, 3), (3, 5), (1, 3, 4), ()], ids=str)
def test_out_of_another_shape_is_refused(shape, no_launch, device):
    """torch resizes it with a warning that this will be an error."""
    with pytest.raises(RuntimeError, match=r"softmax: out.*\(3, 4\)"):
        softmax(torch.ones(3, 4, device=device), out=torch.ones(shape, device=device))


def test_nested_is_refused(device):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device=device)
    with pytest.raises(RuntimeError, match=r"softmax: .*nested"):
        softmax(nested, out=torch.ones(3))


def test_refused_calls_leave_the_output_alone(device):
    out = torch.full((3, 4), 7.0, device=device)
    with pytest.raises(NotImplementedError):
        softmax(torch.ones(3, 4, dtype=torch.int64, device=device), dtype=torch.int64, out=out)
    with pytest.raises(RuntimeError):
        softmax(torch.ones(4, 3, device=device), out=out)
    assert (out == 7).all()


# Everything that listens in, or that is no plain tensor, takes torch's path.


def test_complex_input_takes_torchs_path(device):
    x = torch.randn(3, 4, dtype=torch.complex64, device=device)
    try:
        theirs = torch.softmax(x, -1)
    except Exception as error:
        with pytest.raises(type(error)):
            softmax(x)
    else:
        torch.testing.assert_close(softmax(x), theirs)


def test_meta(device):
    y = softmax(torch.ones(3, 4, device="meta"), 0, dtype=FP16)
    assert (y.shape, y.dtype, y.device.type) == ((3, 4), FP16, "meta")


def test_requires_grad_gets_torchs_gradients(device):
    x = torch.randn(3, 700, device=device)
    softmax(x)  # keeps a launch for tensors like x
    weights = torch.randn(3, 700, device=device)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    (softmax(ours) * weights).sum().backward()
    (torch.softmax(theirs, -1) * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    with torch.no_grad():
        assert not softmax(ours).requires_grad
        assert_softmax(softmax(ours), ours)
    with torch.inference_mode():
        assert softmax(ours).is_inference()


def test_parameters_buffers_and_views_of_them(device):
    weight = torch.nn.Parameter(torch.randn(3, 700, device=device))
    assert softmax(weight).requires_grad
    with torch.no_grad():
        assert_softmax(softmax(weight), weight)
        assert type(softmax(weight)) is torch.Tensor
    assert_softmax(softmax(weight.data), weight.data)


def test_functorch(device):
    x = torch.randn(4, 3, 70, device=device)
    softmax(x[0])
    softmax(x[0, 0])
    torch.testing.assert_close(torch.vmap(softmax)(x), torch.softmax(x, -1))
    torch.testing.assert_close(torch.vmap(lambda t: softmax(t, 0), in_dims=2, out_dims=2)(x), torch.softmax(x, 0))

    def loss(f):
        return lambda t: (f(t, -1) ** 2).sum()

    row = x[0, 0]
    torch.testing.assert_close(torch.func.grad(loss(softmax))(row), torch.func.grad(loss(torch.softmax))(row))
    torch.testing.assert_close(
        torch.func.jacfwd(lambda t: softmax(t))(row), torch.func.jacfwd(lambda t: torch.softmax(t, -1))(row)
    )


def test_forward_mode_gradients(device):
    x, tangent = torch.randn(3, 70, device=device), torch.randn(3, 70, device=device)
    softmax(x)
    with forward_ad.dual_level():
        ours = forward_ad.unpack_dual(softmax(forward_ad.make_dual(x, tangent))).tangent
        theirs = forward_ad.unpack_dual(torch.softmax(forward_ad.make_dual(x, tangent), -1)).tangent
    assert ours is not None
    assert torch.equal(ours, theirs)


def test_dispatch_modes_see_a_softmax(device):
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Listener(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x = torch.randn(3, 70, device=device)
    softmax(x)
    with Listener():
        y = softmax(x)
    assert any("softmax" in name for name in seen)
    assert_softmax(y, x)


def test_function_modes_see_a_softmax(device):
    from torch.overrides import TorchFunctionMode

    seen = []

    class Listener(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    x = torch.randn(3, 70, device=device)
    softmax(x)
    with Listener():
        y = softmax(x)
    assert torch.softmax in seen
    assert_softmax(y, x)


def test_tensor_subclasses_stay_what_they_are(device):
    class Mine(torch.Tensor):
        pass

    x = torch.randn(3, 70, device=device)
    y = softmax(x.as_subclass(Mine))
    assert type(y) is Mine
    assert_softmax(y.as_subclass(torch.Tensor), x)


def test_what_overrides_torch_functions_without_being_a_tensor_gets_its_say(device):
    class Wrapper:
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return function

    assert softmax(Wrapper(), -1) is torch.softmax
    graph = torch.fx.symbolic_trace(lambda x: softmax(x, -1))
    x = torch.randn(3, 70, device=device)
    assert_softmax(graph(x), x)


def test_fake_tensors(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        y = softmax(mode.from_tensor(torch.randn(3, 70, device=device)), dtype=FP16)
    assert (y.shape, y.dtype) == ((3, 70), FP16)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_sees_through_it_without_a_graph_break(dynamic, device):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: softmax(x * 2, -1) + 1, backend="eager", fullgraph=True, dynamic=dynamic)
    for n_cols in (70, 71):
        x = torch.randn(3, n_cols, device=device)
        softmax(x * 2)
        torch.testing.assert_close(compiled(x), torch.softmax(x * 2, -1) + 1)
    x = torch.randn(3, 70, device=device, requires_grad=True)
    compiled(x).square().sum().backward()
    assert x.grad is not None


def test_export_and_make_fx(device):
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.randn(3, 70, device=device)
    softmax(x)
    traced = make_fx(lambda t: softmax(t, -1))(x)
    assert any("softmax" in str(node.target) for node in traced.graph.nodes)

    class Model(torch.nn.Module):
        def forward(self, t):
            return softmax(t, 0)

    program = torch.export.export(Model(), (x,))
    torch.testing.assert_close(program.module()(x), torch.softmax(x, 0))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_trace_records_a_softmax(device):
    x = torch.randn(3, 70, device=device)
    softmax(x)
    traced = torch.jit.trace(lambda t: softmax(t, -1), x)
    other = torch.randn(3, 70, device=device)
    assert_softmax(traced(other), other)


def test_views_with_the_negative_bit(device):
    z = torch.randn(3, 70, dtype=torch.complex64, device=device)
    x = z.conj().imag
    assert x.is_neg()
    torch.testing.assert_close(softmax(x), torch.softmax(-z.imag, -1))
    contiguous = torch.randn(3, 70, device=device)
    softmax(contiguous)
    torch.testing.assert_close(softmax(torch._neg_view(contiguous)), torch.softmax(-contiguous, -1))


# The launches that are kept.


def test_repeated_calls_take_the_launch_that_was_kept(monkeypatch, device):
    x = peaked(3, 700).to(device)
    first = softmax(x)
    assert [key for key in calls._kept if key[0] == "softmax" and x.shape in key]
    monkeypatch.setattr(launch, "prepare", lambda *arguments: pytest.fail("not by the kept launch"))
    monkeypatch.setattr(
        "fused_softmax.ops.softmax.softmax._softmax", lambda *arguments: pytest.fail("not by the kept call")
    )
    again = softmax(x.clone())
    assert torch.equal(again, first)
    assert again.data_ptr() != first.data_ptr()


def test_launches_are_kept_apart(device):
    """By dtype, shape, strides, alignment and dim."""
    buffer = peaked(1, 6000).flatten().to(device)
    calls = [
        (buffer[:1024].view(2, 512), -1),
        (buffer[:1024].view(2, 512).to(BF16), -1),
        (buffer[:1024].view(2, 512).double(), -1),
        (buffer[1:1025].view(2, 512), -1),
        (buffer[2:1026].view(2, 512), -1),
        (buffer[:1024].view(512, 2), -1),
        (buffer[:1024].view(512, 2), 0),
        (buffer[:1024].view(2, 512), 0),
        (buffer[:2048].view(2, 1024)[:, :512], -1),
        (buffer[:2046].view(2, 1023)[:, 1:513], -1),
        (buffer[:1024].view(2, 512).t(), -1),
        (buffer[:1024].view(2, 1, 512), -1),
        (buffer[:1024].view(2, 1, 512), 1),
        (buffer[:1024].view(2, 512, 1), 1),
        (buffer[:512].expand(2, 512), -1),
        (buffer[:1024], 0),
    ]
    for _ in range(3):
        for x, dim in calls:
            y = softmax(x, dim)
            assert_softmax(y, x, dim)
            assert y.is_contiguous()
        calls.reverse()


def test_the_kept_launches_have_a_bound(monkeypatch, device):
    monkeypatch.setattr(calls, "MOST_CALLS", 4)
    for n_cols in (*range(1, 12), *range(1, 12)):
        x = peaked(2, n_cols).to(device)
        assert_softmax(softmax(x), x)
        assert 0 < len(calls._kept) <= 4


def test_a_kept_launch_holds_no_tensor_of_a_call(device):
    import weakref

    for n_cols, dtype in ((100, FP32), (5000, FP32), (40000, FP32), (40000, FP64)):
        x = torch.randn(2, n_cols, dtype=dtype, device=device)
        y = softmax(x)
        gone = [weakref.ref(x), weakref.ref(y)]
        del x, y
        assert [ref() for ref in gone] == [None, None]


def test_threads(device):
    from concurrent.futures import ThreadPoolExecutor

    inputs = [peaked(3, n_cols).to(device) for n_cols in (5, 70, 700, 1500)]
    if INTERPRETED:
        pytest.skip("Triton's interpreter keeps one grid position for the process")
    with ThreadPoolExecutor(8) as pool:
        for x, y in pool.map(lambda i: (inputs[i % 4], softmax(inputs[i % 4])), range(400)):
            assert_softmax(y, x)


@pytest.mark.parametrize("dtype", [None, FP64], ids=str)
def test_cpu_tensors_take_aten_without_the_interpreter(dtype):
    """Bit for bit, for every kind of call."""
    script = f"""
import torch, fused_softmax
from fused_softmax.core import launch
def fail(*a, **k): raise AssertionError("a kernel was prepared")
launch.prepare = fail
x = torch.randn(5, 33, 40)
for t in (x, x[:, 1:, 3:], x.bfloat16(), x.permute(2, 0, 1), x[:0], x[0, 0, 0]):
    for dim in range(-t.ndim, t.ndim):
        for _ in range(2):
            assert torch.equal(fused_softmax.softmax(t, dim, dtype={dtype}), torch.softmax(t, dim, dtype={dtype}))
out = torch.empty(0)
y = fused_softmax.softmax(x, out=out)
assert y is out and torch.equal(out, torch.softmax(x, -1))
"""
    environment = {k: v for k, v in os.environ.items() if k not in ("FUSED_SOFTMAX_INTERPRET", "TRITON_INTERPRET")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Properties. The same examples every run; what fails prints a blob to reproduce it.

held = settings(
    max_examples=15 if QUICK else 60, derandomize=True, print_blob=True, deadline=None, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
EXTREMES = (math.nan, math.inf, -math.inf, LOWEST, -LOWEST, 1e30, -1e30, 2.0**30, 88.7, -104.0, 0.0, 1e-40)


@st.composite
def tensors(draw):
    """A tensor of any rank, strides, dtype and extremes, on the CPU, and how to lay it out on a device."""
    shape = draw(st.lists(st.one_of(st.integers(0, 4), st.sampled_from([5, 16, 33, 130])), min_size=0, max_size=4))
    while math.prod(shape) > 3000:
        shape[shape.index(max(shape))] //= 2
    x = peaked(1, math.prod(shape), seed=draw(st.integers(0, 9))).view(shape)
    for _ in range(draw(st.integers(0, 4)) if x.numel() else 0):
        x.flatten()[draw(st.integers(0, x.numel() - 1)) :: draw(st.integers(1, 40))] = draw(st.sampled_from(EXTREMES))
    order = draw(st.permutations(range(x.ndim)))
    steps = [draw(st.sampled_from([1, 1, 1, 2, 3])) for _ in shape]
    starts = [draw(st.integers(0, 3)) for _ in shape]
    expand = draw(st.booleans()) and x.ndim > 0 and x.numel() > 0
    return x.to(draw(st.sampled_from(DTYPES))), order, steps, starts, expand


def laid_out(x, order, steps, starts, expand, device):
    """x on the device, its dims in memory in `order`, each with a step and a start within a NaN-poisoned buffer."""
    sizes = [x.shape[i] * steps[i] + starts[i] for i in order]
    buffer = torch.full(sizes, math.nan, dtype=x.dtype, device=device)
    view = buffer.permute([list(order).index(i) for i in range(x.ndim)]) if x.ndim else buffer
    for i in range(x.ndim):
        view = view.narrow(i, starts[i], x.shape[i] * steps[i])
        view = view[(slice(None),) * i + (slice(None, None, steps[i]),)]
    view.copy_(x)
    return view[:1].expand_as(x) if expand else view


@held
@given(tensors(), st.data())
def test_any_tensor_any_dim(device, drawn, data):
    x = laid_out(*drawn, device)
    dim = data.draw(st.integers(-max(1, x.ndim), max(1, x.ndim) - 1))
    dtype = data.draw(st.sampled_from([None, None, *DTYPES]))
    before = x.clone()
    assert_softmax(softmax(x, dim, dtype=dtype), x, dim, dtype=dtype)
    assert torch.equal(x.nan_to_num(7), before.nan_to_num(7))


@held
@given(tensors(), tensors(), st.data())
def test_any_tensor_any_out(device, drawn, drawn_out, data):
    x = laid_out(*drawn, device)
    dim = data.draw(st.integers(-max(1, x.ndim), max(1, x.ndim) - 1))
    _, order, steps, starts, _ = drawn_out
    order = [i for i in order if i < x.ndim] + [i for i in range(x.ndim) if i not in order]
    steps, starts = (steps + [1] * 4)[: x.ndim], (starts + [0] * 4)[: x.ndim]
    out = laid_out(torch.full(x.shape, math.nan, dtype=x.dtype), order, steps, starts, False, device)
    assert softmax(x, dim, out=out) is out
    assert_softmax(out, x, dim)


@settings(held, max_examples=20 if QUICK else 80)
@given(
    strategy=st.sampled_from(STRATEGIES),
    dtype=st.sampled_from([FP32, FP16, BF16]),
    n_rows=st.integers(1, 5),
    n_cols=st.integers(1, 1200),
    phases=st.tuples(st.integers(0, 7), st.integers(0, 7), st.booleans()),
    padding=st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()),
    holes=st.lists(st.tuples(st.integers(0, 1200), st.integers(1, 700), st.sampled_from(EXTREMES)), max_size=3),
    part=st.sampled_from([64, 128, 200, 512]),
    num_warps=st.sampled_from([1, 2]),
)
def test_any_rows_by_any_strategy(device, strategy, dtype, n_rows, n_cols, phases, padding, holes, part, num_warps):
    x = peaked(n_rows, n_cols)
    for start, size, value in holes:
        x[start % n_rows, start % n_cols : start % n_cols + size] = value
    x_phase, y_phase, same_phase = phases
    x_padding, y_padding, same_padding = padding
    source = Frame(n_rows, n_cols, dtype, device, row_stride=n_cols + x_padding, phase=x_phase)
    source.fill(x.to(dtype))
    target = Frame(
        n_rows, n_cols, dtype, device,
        row_stride=n_cols + (x_padding if same_padding else y_padding), phase=x_phase if same_phase else y_phase,
    )  # fmt: skip
    choices = {"tile": {}, "row": {"num_warps": num_warps}}.get(strategy, {"num_warps": num_warps, "part_cols": part})
    assert_softmax(run(strategy, source, target, **choices), source.rows)


def test_a_strategy_that_is_not_possible_is_refused():
    with pytest.raises(ValueError, match="split exchanges fp32 states; itemsize is 8"):
        candidate("split", 3, 1000, 8, H200)
