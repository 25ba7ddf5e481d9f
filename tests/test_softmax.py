"""softmax of the input alone: every strategy, dtype, alignment and stride. What it shares is in test_contract.py."""

import math

import pytest
import torch
from conftest import INTERPRETED, kernels, peaked
from contract import assert_softmax
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from products import QUICK, pairwise
from shapes import ALIGNMENTS, DTYPES, FEW, MANY, STRATEGIES, Frame, framed, planned, small, widths

import fused_softmax
from fused_softmax.core.plan import H200, candidate
from fused_softmax.ops.softmax.calls import forward_by_plan

pytestmark = kernels

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


@pairwise()
@pytest.mark.parametrize("given", DTYPES, ids=str)
@pytest.mark.parametrize("wanted", DTYPES, ids=str)
@pytest.mark.parametrize("n_cols", [9000, 33000, 70000])
def test_dtype_of_long_rows(given, wanted, n_cols, device):
    """A row of half precision that is computed in fp64 has the states of fp64, whatever its input's width."""
    x = peaked(1, n_cols, given).to(device)
    assert_softmax(softmax(x, dtype=wanted), x, dtype=wanted)


# Strides.


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


# out=


@every_strategy
@every_alignment
def test_out_of_every_alignment_by_every_strategy(strategy, alignment, device):
    for n_cols in (64, 1000):
        source, target = framed(alignment, peaked(4, n_cols), device=device)
        assert_softmax(run(strategy, source, target), source.rows)


# The launches that are kept.


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
