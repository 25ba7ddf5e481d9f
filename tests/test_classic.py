"""The classic kernels and the references, run: on a GPU, or in Triton's interpreter with FUSED_SOFTMAX_INTERPRET=1."""

import math
from functools import partial

import pytest
import torch
from conftest import peaked

from fused_softmax.classic import hybrid_softmax, naive_softmax, naive_traffic, online_softmax, persistent_softmax
from fused_softmax.classic.online import CONFIGS
from fused_softmax.classic.persistent import Multiprocessor, occupancy, pipeline_stages
from fused_softmax.classic.rows import block_warps
from fused_softmax.ops.softmax import reference

# NumPy, which the interpreter computes with, warns of the very NaN and infinity that some tests ask for.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SMALLEST_TILE = "512x2-w4-s1"

# Every way through the kernels, by name. Tiles of 1024 columns or fewer, so that 3072 columns are three tiles.
KERNELS = {
    "naive": naive_softmax,
    "persistent": persistent_softmax,
    "persistent one wave": partial(persistent_softmax, programs=64),
    "persistent several rows a program": partial(persistent_softmax, programs=2),
    "hybrid fast": partial(hybrid_softmax, block_cap=4096),
    "hybrid tiled": partial(hybrid_softmax, block_cap=256),
    "hybrid fast float64": partial(hybrid_softmax, block_cap=4096, accumulate="float64"),
    "hybrid tiled float64": partial(hybrid_softmax, block_cap=256, accumulate="float64"),
    "online": online_softmax,
    "online smallest tile": partial(online_softmax, config=SMALLEST_TILE),
}
FUSED = {name: kernel for name, kernel in KERNELS.items() if name != "naive"}
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

every_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
every_fused = pytest.mark.parametrize("kernel", FUSED.values(), ids=FUSED.keys())


def assert_accurate(y, x, roundings=1):
    """The largest error is at most torch's in the same dtype, and so many roundings of the output.

    Four at least in float32, where a GPU's exp is an approximation right to 2^-22, and in float64, where the truth is
    itself computed in float64.
    """
    truth = reference.softmax_fp64(x)
    error = (y.double() - truth).abs().max()
    torch_error = (torch.softmax(x, dim=1).double() - truth).abs().max()
    if x.dtype in (torch.float32, torch.float64):
        roundings = max(roundings, 8)  # truth is rounded as well, and its sums are in another order
    allowed = torch_error + roundings * torch.finfo(x.dtype).eps * truth.max()
    assert y.dtype == x.dtype
    assert y.shape == x.shape
    assert truth.max() > 0.3, "an input this flat would pass with the wrong maximum"
    assert error <= allowed


def assert_like_torch(y, x):
    torch.testing.assert_close(y, torch.softmax(x, dim=1), rtol=1e-5, atol=1e-6, equal_nan=True)


@every_kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_irregular_shape(kernel, dtype, device):
    x = peaked(1823 if device == "cuda" else 11, 781, dtype).to(device)
    # naive rounds each of its intermediates to the dtype.
    assert_accurate(kernel(x), x, roundings=4 if kernel is naive_softmax else 1)


@every_kernel
@pytest.mark.parametrize("n_cols", [1, 2, 255, 256, 257, 1024, 1025])
def test_block_edges(kernel, n_cols, device):
    x = peaked(3, n_cols).to(device)
    assert_accurate(kernel(x), x)


@every_kernel
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_empty(kernel, shape, device):
    assert kernel(torch.empty(shape, device=device)).shape == shape


@every_kernel
def test_strides(kernel, device):
    whole = peaked(6, 700).to(device)
    for x in (whole[:, 3:], whole[::2], whole[:, ::2], whole.t()[:300], whole[:1].expand(4, -1)):
        y = kernel(x)
        assert_like_torch(y, x)
        assert y.is_contiguous() or kernel is naive_softmax


@every_kernel
def test_input_is_not_written(kernel, device):
    x = peaked(3, 500).to(device)
    before = x.clone()
    kernel(x)
    assert torch.equal(x, before)


@every_kernel
@pytest.mark.parametrize("where", ["leading", "middle", "trailing"])
def test_tile_of_minus_infinity(kernel, where, device):
    x = peaked(2, 3072).to(device)
    tile = ["leading", "middle", "trailing"].index(where)
    x[:, tile * 1024 : (tile + 1) * 1024] = -math.inf
    y = kernel(x)
    assert y.isfinite().all()
    assert_accurate(y, x)


@every_kernel
@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan], ids=str)
@pytest.mark.parametrize("cols", [slice(None), slice(0, 1), slice(1500, 1501), slice(1024, 2048), slice(3071, 3072)])
def test_special_values_give_what_torch_gives(kernel, value, cols, device):
    x = peaked(3, 3072).to(device)
    x[1, cols] = value
    y = kernel(x)
    assert_like_torch(y, x)
    assert y[::2].isfinite().all()
    assert y[1].isnan().all() == (value != -math.inf or cols == slice(None))


@every_fused
def test_a_row_so_wide_apart_that_most_of_it_vanishes(kernel, device):
    x = torch.tensor([[-3e38, 3e38, 0.0], [88.8, 1e4, 1e4], [-1e30, -1e30, -1e30]], device=device)
    assert_like_torch(kernel(x), x)


EXAMPLE = (
    (2.0, -1.0, 3.0, 0.5, -0.5, 1.5, -2.0, 1.0),
    (4.0, -3.0, 2.5, 1.0, -1.5, 0.0, -0.5, 2.0),
    (-1.0, 3.5, -2.5, 1.5, 0.0, -3.0, 2.5, -0.5),
)
BLOCK_MAXIMA = ((3.0, 1.5), (4.0, 2.0), (3.5, 2.5))
MAXIMA = (3.0, 4.0, 3.5)
BLOCK_SUMS = ((1.468, 0.395), (1.274, 0.169), (1.149, 0.418))
SUMS = (1.864, 1.443, 1.567)
OUTPUTS = (
    (0.197, 0.010, 0.537, 0.044, 0.016, 0.120, 0.004, 0.073),
    (0.693, 0.001, 0.155, 0.035, 0.003, 0.013, 0.008, 0.094),
    (0.007, 0.638, 0.002, 0.086, 0.019, 0.001, 0.235, 0.012),
)

# What the post that set the example prints. Row 0 is right but for two last digits, rounded from rounded parts: the sum
# (1.468 + 0.395) and the last output. Of rows 1 and 2 only the maxima are right: their sums are two and three times the
# truth, their outputs are neither the truth nor what the printed sums give, and row 1's outputs add up to 0.909.
PUBLISHED_SUMS = (1.863, 3.717, 4.982)
PUBLISHED_OUTPUTS = (
    (0.197, 0.010, 0.537, 0.044, 0.016, 0.120, 0.004, 0.072),
    (0.546, 0.001, 0.184, 0.041, 0.003, 0.015, 0.009, 0.110),
    (0.012, 0.665, 0.003, 0.083, 0.030, 0.001, 0.203, 0.018),
)


def test_worked_example_three_passes():
    for row, block_maxima, m, block_sums, s, y in zip(
        EXAMPLE, BLOCK_MAXIMA, MAXIMA, BLOCK_SUMS, SUMS, OUTPUTS, strict=True
    ):
        steps = list(reference.three_pass_steps(row, 4))
        maximum, total, write = steps[:2], steps[2:4], steps[4:]
        assert [(step.start, step.stop) for step in steps] == [(0, 4), (4, 8)] * 3
        assert tuple(step.block_max for step in maximum) == block_maxima
        assert maximum[-1].m == m
        assert tuple(round(step.block_sum, 3) for step in total) == block_sums
        assert round(total[-1].s, 3) == s
        assert tuple(round(value, 3) for step in write for value in step.y) == y


def test_worked_example_online():
    for row, block_maxima, m, s in zip(EXAMPLE, BLOCK_MAXIMA, MAXIMA, SUMS, strict=True):
        first, last = reference.online_steps(row, 4)
        assert (first.block_max, last.block_max) == block_maxima
        assert (first.m_before, first.s_before, first.rescale) == (-math.inf, 0.0, 0.0)
        assert (last.m_before, last.s_before) == (first.m_after, first.s_after)
        assert last.m_after == m
        assert round(last.s_after, 3) == s


@every_kernel
def test_worked_example_in_kernels(kernel, device):
    y = kernel(torch.tensor(EXAMPLE, device=device)).tolist()
    assert tuple(tuple(round(value, 3) for value in row) for row in y) == OUTPUTS


def test_worked_example_in_tiles_of_four(device):
    y = hybrid_softmax(torch.tensor(EXAMPLE, device=device), block_cap=4).tolist()
    assert tuple(tuple(round(value, 3) for value in row) for row in y) == OUTPUTS


def test_worked_example_as_published():
    assert PUBLISHED_SUMS[0] == pytest.approx(SUMS[0], abs=1.01e-3)
    assert PUBLISHED_OUTPUTS[0] == pytest.approx(OUTPUTS[0], abs=1.01e-3)
    for row, m, printed_sum, printed in zip(
        EXAMPLE[1:], MAXIMA[1:], PUBLISHED_SUMS[1:], PUBLISHED_OUTPUTS[1:], strict=True
    ):
        truth = sum(math.exp(x - m) for x in row)
        assert printed_sum > 2 * truth
        assert max(printed) != pytest.approx(1 / truth, abs=0.01)
        assert max(printed) != pytest.approx(1 / printed_sum, abs=0.01)
    assert sum(PUBLISHED_OUTPUTS[1]) == pytest.approx(0.909)


def test_naive_traffic():
    m, n = 4096, 781
    traffic = naive_traffic(m, n)
    assert traffic.reads == 5 * m * n + 2 * m
    assert traffic.writes == 3 * m * n + 2 * m
    assert [(each.name, each.reads, each.writes) for each in traffic.passes] == [
        ("maximum", m * n, m),
        ("subtract", m * n + m, m * n),
        ("exp", m * n, m * n),
        ("sum", m * n, m),
        ("divide", m * n + m, m * n),
    ]


H200 = Multiprocessor("cuda", "90", 132, registers=65536, shared_bytes=232448, threads=2048, warp_size=32)
MI300X = Multiprocessor("hip", "gfx942", 304, registers=65536, shared_bytes=65536, threads=2048, warp_size=64)
RX7900 = Multiprocessor("hip", "gfx1100", 96, registers=65536, shared_bytes=65536, threads=2048, warp_size=32)


@pytest.mark.parametrize(
    ("on", "registers", "shared_bytes", "num_warps", "programs"),
    [
        pytest.param(H200, 64, 0, 8, 4, id="nvidia: registers, 65536 / (64 * 32) = 32 warps"),
        pytest.param(H200, 33, 0, 8, 6, id="nvidia: 33 registers take the room of 40"),
        pytest.param(H200, 16, 0, 8, 8, id="nvidia: threads, 64 warps"),
        pytest.param(H200, 32, 98368, 8, 2, id="nvidia: shared memory"),
        pytest.param(H200, 255, 0, 16, 1, id="nvidia: never less than one"),
        pytest.param(MI300X, 128, 0, 8, 2, id="CDNA: twice the registers reported, 16 waves"),
        pytest.param(MI300X, 51, 0, 8, 4, id="CDNA: threads, 32 waves"),
        pytest.param(MI300X, 51, 32768, 8, 2, id="CDNA: shared memory"),
        pytest.param(RX7900, 128, 0, 8, 2, id="other AMD: the registers reported, 16 waves"),
        pytest.param(RX7900, 256, 0, 8, 1, id="other AMD: 8 waves"),
    ],
)
def test_occupancy(on, registers, shared_bytes, num_warps, programs):
    assert occupancy(on, registers=registers, shared_bytes=shared_bytes, num_warps=num_warps) == programs


def test_occupancy_reads_the_architecture_with_its_features():
    with_features = Multiprocessor("hip", "gfx942:sramecc+:xnack-", 304, 65536, 65536, 2048, 64)
    assert occupancy(with_features, registers=128, shared_bytes=0, num_warps=8) == 2


@pytest.mark.parametrize(
    ("block_bytes", "shared_bytes", "stages"),
    [(4096, 232448, 4), (64 * 1024, 232448, 4), (128 * 1024, 232448, 2), (256 * 1024, 232448, 1), (4096, 0, 1)],
)
def test_pipeline_stages(block_bytes, shared_bytes, stages):
    assert pipeline_stages(block_bytes, shared_bytes) == stages


def test_block_warps():
    assert [block_warps(kib * 1024, 32) for kib in (0, 8, 32, 64, 128, 4096)] == [4, 4, 8, 16, 32, 32]
    assert block_warps(128 * 1024, 16) == 16


def test_persistent_grid_does_not_change_the_result(device):
    x = peaked(7, 300).to(device)
    results = [persistent_softmax(x, programs=programs) for programs in (1, 2, 7, 100)]
    assert all(torch.equal(results[0], other) for other in results[1:])


def sum_of_one_and_many_small(device):
    # Each of the 256 small terms is 2^-24 of the first: alone it is lost in float32, together they are 1.5e-5.
    x = torch.full((1, 257), -24 * math.log(2), device=device)
    x[:, 0] = 0.0
    return x


def test_hybrid_tiled_float64_keeps_what_float32_loses(device):
    x = sum_of_one_and_many_small(device)
    truth = reference.softmax_fp64(x)[0, 0].item()
    single = hybrid_softmax(x, block_cap=1)[0, 0].item()
    double = hybrid_softmax(x, block_cap=1, accumulate="float64")[0, 0].item()
    assert abs(single - truth) > 1e-5
    assert abs(double - truth) < 1e-6


def test_hybrid_fast_float64_is_right_to_a_rounding(device):
    x = sum_of_one_and_many_small(device)
    y = hybrid_softmax(x, accumulate="float64")
    assert abs(y[0, 0].item() - reference.softmax_fp64(x)[0, 0].item()) < 2.5e-7


@pytest.mark.parametrize("accumulate", ["float32", "float64"])
def test_hybrid_of_float64_is_float64_on_both_paths(accumulate, device):
    x = peaked(2, 500, torch.float64).to(device)
    for block_cap in (512, 128):
        y = hybrid_softmax(x, block_cap=block_cap, accumulate=accumulate)
        assert (y - torch.softmax(x, dim=1)).abs().max() < 1e-15


def test_online_has_the_ten_published_configurations():
    kwargs = [config.all_kwargs() for config in CONFIGS.values()]
    assert [(each["BLOCK_SIZE"], each["VEC"], each["num_warps"], each["num_stages"]) for each in kwargs] == [
        (512, 2, 4, 1),
        (1024, 2, 4, 2),
        (1024, 4, 4, 1),
        (2048, 4, 8, 2),
        (512, 4, 8, 1),
        (4096, 4, 8, 2),
        (8192, 4, 8, 2),
        (8192, 4, 16, 2),
        (16384, 4, 8, 3),
        (4096, 4, 16, 3),
    ]


@pytest.mark.parametrize("config", CONFIGS)
def test_online_configuration(config, device):
    x = 2 * peaked(2, 20000, torch.float16).to(device)
    assert_accurate(online_softmax(x, config=config), x)


@every_kernel
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_wrong_dtype(kernel, dtype, device):
    with pytest.raises(TypeError, match=f"got {dtype}"):
        kernel(torch.zeros(2, 2, dtype=dtype, device=device))


@every_kernel
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)], ids=str)
def test_not_two_dimensional(kernel, shape, device):
    with pytest.raises(ValueError, match=r"must be 2-D.* got shape"):
        kernel(torch.zeros(shape, device=device))


def test_longer_than_the_design_can_do(device):
    with pytest.raises(ValueError, match="1048577 elements, more than 1048576: a row must be one block"):
        persistent_softmax(torch.zeros(1, 1, device=device).expand(1, 2**20 + 1))
    for kernel in (hybrid_softmax, online_softmax):
        with pytest.raises(ValueError, match="columns are indexed in 32 bits"):
            kernel(torch.zeros(1, 1, device=device).expand(1, 2**30 + 1))
        with pytest.raises(ValueError, match="2147483648 rows"):
            kernel(torch.zeros(1, 1, device=device).expand(2**31, 1))


@pytest.mark.parametrize("block_cap", [0, -4, 3, 2**21])
def test_wrong_block_cap(block_cap, device):
    with pytest.raises(ValueError, match=f"block_cap must be a power of two .* got {block_cap}"):
        hybrid_softmax(torch.zeros(1, 4, device=device), block_cap=block_cap)


def test_wrong_names(device):
    x = torch.zeros(1, 4, device=device)
    with pytest.raises(ValueError, match="accumulate must be 'float32' or 'float64', got 'float16'"):
        hybrid_softmax(x, accumulate="float16")
    with pytest.raises(ValueError, match=r"config must be one of 512x2-w4-s1, .* got 'big'"):
        online_softmax(x, config="big")
    with pytest.raises(ValueError, match="programs must be at least 1, got 0"):
        persistent_softmax(x, programs=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_reference_softmax(dtype, dim):
    x = peaked(4, 6, dtype)
    assert reference.softmax_fp64(x, dim).dtype == torch.float64
    assert reference.softmax(x, dim).dtype == dtype
    assert reference.softmax(x, dim, dtype=torch.float32).dtype == torch.float32
    torch.testing.assert_close(reference.softmax(x, dim), torch.softmax(x, dim))
    torch.testing.assert_close(reference.softmax_fp64(x, dim).sum(dim), torch.ones(x.sum(dim).shape).double())


def test_reference_softmax_takes_integers_with_a_dtype():
    x = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(reference.softmax(x, dtype=torch.float32), torch.softmax(x, -1, dtype=torch.float32))
    with pytest.raises(TypeError, match=r"no result of dtype torch\.int64"):
        reference.softmax(x)


def online_state(row, block):
    steps = list(reference.online_steps(row, block))
    return steps[-1].m_after, steps[-1].s_after


@pytest.mark.parametrize("block", [1, 3, 8, 100])
def test_online_steps_end_where_one_block_does(block):
    row = peaked(1, 50)[0].tolist()
    m, s = online_state(row, block)
    assert m == max(row)
    assert s == pytest.approx(sum(math.exp(x - m) for x in row), rel=1e-14)


def test_online_steps_cover_a_row_that_is_no_multiple_of_the_block():
    steps = list(reference.online_steps(range(10), 4))
    assert [(step.start, step.stop) for step in steps] == [(0, 4), (4, 8), (8, 10)]
    assert steps[1].rescale == math.exp(-4)
    assert steps[1].s_after == steps[1].s_before * steps[1].rescale + steps[1].block_sum


def test_online_steps_of_special_rows():
    assert online_state([-math.inf, -math.inf, 1.0, 1.0], 2) == (1.0, 2.0)
    assert online_state([1.0, 1.0, -math.inf, -math.inf], 2) == (1.0, 2.0)
    assert online_state([-math.inf] * 4, 2) == (-math.inf, 0.0)
    for row in ([0.0, math.nan, 1.0, 2.0], [math.nan] * 4, [0.0, 1.0, math.inf, 2.0]):
        assert math.isnan(online_state(row, 2)[1])
    assert list(reference.online_steps([], 2)) == []


def test_three_pass_steps_of_a_row_of_minus_infinity():
    steps = list(reference.three_pass_steps([-math.inf] * 4, 2))
    assert all(math.isnan(value) for step in steps[-2:] for value in step.y)


def test_steps_need_a_block():
    with pytest.raises(ValueError, match="block must be at least 1, got 0"):
        list(reference.online_steps([1.0], 0))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["persistent", "hybrid fast", "hybrid tiled", "online smallest tile"])
def test_rows_past_two_to_the_31_elements(name):
    stride = 2**30 + 16
    memory = torch.empty(3 * stride, dtype=torch.float16, device="cuda")
    x = memory.as_strided((3, 2048), (stride, 1))
    x.copy_(peaked(3, 2048, torch.float16))
    assert_accurate(KERNELS[name](x), x)
