"""The device shelf alone: each function in a kernel of its own, held to float64 and to the recurrence in plain Python.

The interpreter runs the branches without PTX, which AMD takes too; those with PTX run on a GPU and nowhere else.
"""

import math
from itertools import product

import pytest
import torch
import triton
import triton.language as tl
from conftest import INTERPRETED, kernels
from hypothesis import given, settings
from hypothesis import strategies as st
from products import QUICK

from fused_softmax.core.kernels.exchange import pack_state, slots_of, tag_of, unpack_state, wait_for
from fused_softmax.core.kernels.rows import body_of, edges_of, head_of, load_pieces, whole_vectors
from fused_softmax.core.kernels.spec import Row, Rows, Spec
from fused_softmax.core.kernels.state import (
    NEG_INF,
    exp_at,
    hold_all,
    max_of,
    merge,
    origin_of,
    sum_exp_of,
    weight_of,
    widen,
)
from fused_softmax.ops.softmax.reference import online_steps

pytestmark = kernels

FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
INF, NAN = math.inf, math.nan
HUGE = 2.0**30  # from here on origin_of has another scale
LOWEST = torch.finfo(FP32).min
EPS = {dtype: torch.finfo(dtype).eps for dtype in (FP32, FP64)}
CAST = {FP32: tl.float32, FP16: tl.float16, BF16: tl.bfloat16, FP64: tl.float64}

held = settings(max_examples=50 if QUICK else 150, derandomize=True, print_blob=True, deadline=None, database=None)


@pytest.fixture(
    scope="module", params=[False] if INTERPRETED else [False, True], ids=lambda ptx: "ptx" if ptx else "plain"
)
def ptx(request):
    return request.param


def launch(kernel, inputs, outputs, *scalars, grid=1, device, **constexprs):
    """The outputs, poisoned before and back on the CPU, of inputs moved to `device`."""
    results = [torch.full(shape, NAN if dtype.is_floating_point else -77, dtype=dtype) for shape, dtype in outputs]
    results = [result.to(device) for result in results]
    kernel[(grid,)](*[each.to(device) for each in inputs], *results, *scalars, **constexprs)
    return [result.cpu() for result in results]


def next_to(x, towards):
    return torch.nextafter(torch.tensor(x), torch.tensor(float(towards))).item()


# Values.


@triton.jit
def _widen(x_ptr, y_ptr, LANES: tl.constexpr, CAST: tl.constexpr):
    j = tl.arange(0, LANES)
    tl.store(y_ptr + j, widen(tl.load(x_ptr + j), CAST).to(tl.float64))


@pytest.mark.parametrize(
    ("dtype", "cast"),
    [*product((FP32, FP16, BF16), (FP32, FP16, BF16)), *[(dtype, FP64) for dtype in CAST], (FP64, FP32)],
    ids=str,
)
def test_widen_rounds_to_the_cast_and_computes_in_fp32_or_fp64(dtype, cast, device):
    halfway = [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 2.0**-24, 1 + 2.0**-30, 65520.0, 3e38]
    x = [0.0, -0.0, 1 / 3, -1e-3, 1e-40, 2.0**-133, INF, -INF, NAN, *halfway, *[-each for each in halfway]]
    x = torch.tensor(x + [0.0] * (32 - len(x)), dtype=FP64).to(dtype)
    (y,) = launch(_widen, [x], [((32,), FP64)], LANES=32, CAST=CAST[cast], device=device)
    torch.testing.assert_close(y, x.to(cast).double(), rtol=0, atol=0, equal_nan=True)


@triton.jit
def _exp_at(x_ptr, m_ptr, y_ptr, top_ptr, LANES: tl.constexpr, PTX: tl.constexpr):
    j = tl.arange(0, LANES)
    m = tl.load(m_ptr + j)
    scale, base = origin_of(m, PTX)
    tl.store(y_ptr + j, exp_at(tl.load(x_ptr + j), scale, base, PTX))
    tl.store(top_ptr + j, exp_at(m, scale, base, PTX))


def exps(x, m, dtype, ptx, device):
    """exp(x - m), and the factor that all x of an m share, in fp64."""
    lanes = 1 << (len(x) - 1).bit_length()
    x, m = (torch.tensor(list(each) + [0.0] * (lanes - len(each)), dtype=dtype) for each in (x, m))
    outputs = [((lanes,), dtype)] * 2
    y, top = launch(_exp_at, [x, m], outputs, LANES=lanes, PTX=ptx, device=device)
    return x.double(), m.double(), y.double(), top.double()


@pytest.mark.parametrize("dtype", [FP32, FP64], ids=str)
def test_exp_of_what_is_below_the_maximum(dtype, ptx, device):
    maxima = [0.0, 1.5, -3.25, 88.8, -1000.5, 16384.25, -16384.25, 2.0**24, next_to(HUGE, 0), -next_to(HUGE, 0), 1e-30]
    steps = [0.0, 1e-3, 0.5, 1.0, 10.0, 64.0, 80.0, 500.0, 2.0**20]
    pairs = [(m - step, m) for m in maxima for step in steps]
    x, m, y, top = exps(*zip(*pairs, strict=True), dtype, ptx, device)
    assert (top > 0).all()
    assert top.isfinite().all(), "the shared factor overflows"
    truth = torch.exp(x - m)
    # The exponent is rounded once, to eps of itself, and exp to a few units.
    allowed = truth * ((x - m).abs() + 8) * EPS[dtype] + torch.finfo(dtype).smallest_normal / top
    assert ((y / top - truth).abs() <= allowed).all()
    if not ptx:
        assert (top == 1).all()


@pytest.mark.parametrize("m", [HUGE, next_to(HUGE, INF), 2.0**31, 1e20, -LOWEST])
def test_exp_where_fp32_is_coarse_is_0_or_1(m, ptx, device):
    for top in (m, -m):
        below = [top, next_to(top, -INF) if top != LOWEST else -INF, -INF, LOWEST if top != LOWEST else -INF]
        _, _, y, _ = exps(below, [top] * 4, FP32, ptx, device)
        # The next value below is at least 64 less; with PTX its exponential is of 2, for the scale is 1.
        torch.testing.assert_close(y, torch.tensor([1.0, 0, 0, 0], dtype=FP64), rtol=0, atol=2.0**-60)


def test_exp_at_a_maximum_that_is_no_number(ptx, device):
    for dtype in (FP32, FP64):
        cases = {
            (-INF, -INF): 0.0, (0.0, -INF): 1.0, (NAN, -INF): NAN,  # no such x but NaN; any finite base is right
            (0.0, INF): 0.0, (LOWEST, INF): 0.0, (-INF, INF): 0.0, (INF, INF): NAN, (NAN, INF): NAN,
            (0.0, NAN): NAN, (-INF, NAN): NAN, (NAN, NAN): NAN, (NAN, 0.0): NAN, (-INF, 0.0): 0.0,
        }  # fmt: skip
        _, _, y, _ = exps(*zip(*cases, strict=True), dtype, ptx, device)
        wanted = torch.tensor(list(cases.values()), dtype=FP64)
        torch.testing.assert_close(y[: len(cases)], wanted, rtol=0, atol=0, equal_nan=True)


@triton.jit
def _weight_of(m_part_ptr, m_ptr, w_ptr, LANES: tl.constexpr, PTX: tl.constexpr):
    j = tl.arange(0, LANES)
    tl.store(w_ptr + j, weight_of(tl.load(m_part_ptr + j), tl.load(m_ptr + j), PTX))


def weights(pairs, dtype, ptx, device):
    lanes = 1 << (len(pairs) - 1).bit_length()
    parts, tops = zip(*pairs, *[(0.0, 0.0)] * (lanes - len(pairs)), strict=True)
    inputs = [torch.tensor(parts, dtype=dtype), torch.tensor(tops, dtype=dtype)]
    (w,) = launch(_weight_of, inputs, [((lanes,), dtype)], LANES=lanes, PTX=ptx, device=device)
    return w.double()[: len(pairs)]


@pytest.mark.parametrize("dtype", [FP32, FP64], ids=str)
def test_weight_of_a_part(dtype, ptx, device):
    tops = [0.0, 1.5, -3.25, 100.0, -2000.5, 16384.25]
    pairs = [(top - step, top) for top in tops for step in (0.0, 1e-2, 1.0, 30.0, 80.0, 1000.0)]
    pairs += [(-INF, top) for top in (*tops, HUGE, LOWEST)]
    # The scales of 2 ** 30 and more, of less, and of one on either side.
    pairs += [(HUGE, HUGE), (next_to(HUGE, 0), HUGE), (0.0, HUGE), (LOWEST, -LOWEST), (-HUGE, 0.0), (LOWEST, LOWEST)]
    parts, tops = (torch.tensor(each, dtype=dtype).double() for each in zip(*pairs, strict=True))
    truth = torch.exp(parts - tops)
    # With PTX, what both maxima were rounded to in their scale shows here, and cancels in what was summed with it.
    magnitude = 8 + torch.where(tops.abs() < HUGE, tops.abs() + parts.abs(), 0.0).nan_to_num(posinf=0.0)
    allowed = truth * magnitude * EPS[dtype] + 2.0**-90
    assert ((weights(pairs, dtype, ptx, device) - truth).abs() <= allowed).all()


def test_weight_in_a_row_of_no_finite_maximum(ptx, device):
    for dtype in (FP32, FP64):
        # Beside +inf a finite part counts as 0 or NaN: the part that has the +inf makes the row NaN.
        assert weights([(INF, INF), (NAN, NAN)], dtype, ptx, device).isnan().all()
        assert weights([(-INF, -INF)], dtype, ptx, device).tolist() == [1.0], "every part is empty, and its s stays 0"


# States.


@triton.jit
def _fold(m_ptr, s_ptr, out_ptr, n, PTX: tl.constexpr):
    """Into out: (m, s) of all n states, merged from the left, from the right, and each pair first."""
    m, s = tl.load(m_ptr), tl.load(s_ptr)
    for i in range(1, n):
        m, s = merge(m, s, tl.load(m_ptr + i), tl.load(s_ptr + i), PTX)
    tl.store(out_ptr, m)
    tl.store(out_ptr + 1, s)
    m, s = tl.load(m_ptr + n - 1), tl.load(s_ptr + n - 1)
    for i in range(1, n):
        m, s = merge(tl.load(m_ptr + n - 1 - i), tl.load(s_ptr + n - 1 - i), m, s, PTX)
    tl.store(out_ptr + 2, m)
    tl.store(out_ptr + 3, s)
    m, s = tl.full([], NEG_INF, m.dtype), tl.zeros([], s.dtype)
    for i in range(0, n, 2):
        odd = i + 1 < n
        m_next = tl.load(m_ptr + i + 1, mask=odd, other=NEG_INF)
        s_next = tl.load(s_ptr + i + 1, mask=odd, other=0.0)
        m_pair, s_pair = merge(tl.load(m_ptr + i), tl.load(s_ptr + i), m_next, s_next, PTX)
        m, s = merge(m, s, m_pair, s_pair, PTX)
    tl.store(out_ptr + 4, m)
    tl.store(out_ptr + 5, s)


def check_merges(blocks, ptx, device, dtype=FP32):
    """Any order of merging the blocks of a row gives the state that the recurrence has after the whole row."""
    blocks = torch.tensor(blocks, dtype=dtype).double().tolist()
    row = [x for block in blocks for x in block]
    *_, last = online_steps(row, len(blocks[0]))
    states = [list(online_steps(block, len(block)))[-1] for block in blocks]
    m = torch.tensor(
        [NAN if all(map(math.isnan, block)) else state.m_after for block, state in zip(blocks, states, strict=True)],
        dtype=dtype,
    )
    s = torch.tensor([state.s_after for state in states], dtype=dtype)
    # With PTX, a maximum is rounded in its scale, and s is not of that rounding here.
    allowed = EPS[dtype] * (4 * len(blocks) + max((abs(x) for x in row if abs(x) < HUGE), default=0.0))
    (merged,) = launch(_fold, [m, s], [((3, 2), dtype)], len(blocks), PTX=ptx, device=device)
    for m, s in merged.double().tolist():
        if math.isnan(last.s_after):
            assert math.isnan(s)
        else:
            assert m == last.m_after
            assert abs(s - last.s_after) <= allowed * last.s_after


NOTHING, FINITE, LOW = [-INF, -INF], [1.25, -3.5], [-90.0, -INF]


@pytest.mark.parametrize("dtype", [FP32, FP64], ids=str)
@pytest.mark.parametrize(
    "blocks",
    [
        [FINITE], [NOTHING], [NOTHING, NOTHING], [NOTHING, FINITE], [FINITE, NOTHING], [FINITE, NOTHING, LOW],
        [NOTHING, NOTHING, FINITE, NOTHING, LOW, NOTHING], [LOW, FINITE], [FINITE, LOW], [FINITE, FINITE, FINITE],
        [[0.0, 0.0], [1e4, 1e4], [0.0, 0.0]], [[LOWEST, LOWEST], NOTHING], [[LOWEST, LOWEST], FINITE],
        [[2.0**31, 0.0], [2.0**31, 2.0**31], FINITE], [FINITE, [-(2.0**31), -INF]],
        [FINITE, [NAN, 0.0], FINITE], [[NAN, NAN], FINITE], [FINITE, [NAN, NAN]], [NOTHING, [NAN, -INF], NOTHING],
        [[NAN, NAN], NOTHING], [FINITE, [INF, 0.0], FINITE], [NOTHING, [INF, INF]], [[INF, 0.0], [INF, 0.0], NOTHING],
        [[INF, NAN], FINITE],
    ],
    ids=str,
)  # fmt: skip
def test_merges_of(blocks, dtype, ptx, device):
    check_merges(blocks, ptx, device, dtype)


numbers = st.floats(-40, 40, width=32) | st.floats(-20_000, 20_000, width=32) | st.just(-INF)
rare = st.sampled_from([-INF] * 8 + [NAN, INF])
a_row = st.integers(1, 3).flatmap(
    lambda size: st.lists(
        st.lists(numbers, min_size=size, max_size=size) | rare.map(lambda x: [x] * size), min_size=1, max_size=9
    )
)


@held
@given(blocks=a_row)
def test_merging_is_associative(blocks, ptx, device):
    check_merges(blocks, ptx, device)


@triton.jit
def _pack(m_ptr, s_ptr, tag_ptr, message_ptr, m_out_ptr, s_out_ptr, tag_out_ptr, LANES: tl.constexpr):
    j = tl.arange(0, LANES)
    message = pack_state(tl.load(m_ptr + j), tl.load(s_ptr + j), tl.load(tag_ptr + j))
    tl.store(message_ptr + j, message)
    m, s = unpack_state(message)
    tl.store(m_out_ptr + j, m)
    tl.store(s_out_ptr + j, s)
    tl.store(tag_out_ptr + j, tag_of(message))


def test_a_message_carries_every_state_and_either_tag(device):
    tiny = 2.0**-149
    m = torch.tensor([-INF, INF, NAN, 0.0, -0.0, 1.0, -1.0, tiny, -tiny, LOWEST, -LOWEST, 3.14159])
    s = torch.tensor([0.0, tiny, 2.0**-126, 1.0, 1 / 3, 2.0**21, -LOWEST, INF, NAN])
    m, s, tag = (each.flatten() for each in torch.meshgrid(m, s, torch.tensor([0.0, 1.0]), indexing="ij"))
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (2, 512 - len(m)), generator=generator).int()
    m = torch.cat([m.view(torch.int32), bits[0]])
    s = torch.cat([s.view(torch.int32), bits[1] & 0x7FFFFFFF])  # s has no sign
    tag = torch.cat([tag.long(), torch.arange(512 - len(tag)) % 2])
    outputs = [((512,), dtype) for dtype in (torch.int64, FP32, FP32, torch.int64)]
    inputs = [m.view(FP32), s.view(FP32), tag]
    message, m_out, s_out, tag_out = launch(_pack, inputs, outputs, LANES=512, device=device)
    assert torch.equal(tag_out, tag)
    assert torch.equal(m_out.view(torch.int32), m)
    assert torch.equal(s_out.view(torch.int32), s)
    assert torch.equal(message, m.long() << 32 | tag << 31 | s.long()), "every bit has one place"


@triton.jit
def _tags(slots_ptr, tag_ptr, at_ptr, K: tl.constexpr):
    program = tl.program_id(0)
    slots, tag = slots_of(slots_ptr, program // 2, program % 2, 2, 1, K)
    tl.store(tag_ptr + program, tag.to(tl.int64))
    tl.store(at_ptr + program, slots.to(tl.int64) - slots_ptr.to(tl.int64))


@pytest.mark.parametrize("publishes", [False, True])
def test_a_launch_that_publishes_has_the_tag_that_its_slots_have_not(publishes, device):
    held = torch.tensor([0, 0, 1, 1])
    slots = held << 31 | torch.arange(4) << 32 | 12345
    spec = Spec(block_cols=1, pieces=1, vector=1, cast_dtype=tl.float32, split=True, publish=publishes)
    outputs = [((4,), torch.int64), ((4,), torch.int64)]
    tag, at = launch(_tags, [slots], outputs, K=spec, grid=4, device=device)
    assert torch.equal(tag, 1 - held if publishes else held)
    assert at.tolist() == [0, 0, 16, 16], "each group has slots of its own"


@triton.jit(do_not_specialize=["tag"])
def _wait(slots_ptr, wanted_ptr, got_ptr, left_ptr, tag, LANES: tl.constexpr):
    j = tl.arange(0, LANES)
    message = tl.zeros([LANES], tl.int64) + ((1 - tag).to(tl.int64) << 31)
    message, left = wait_for(slots_ptr + j, message, tl.load(wanted_ptr + j) != 0, tag)
    tl.store(got_ptr + j, message)
    tl.store(left_ptr, left.to(tl.int64))


def wait(slots, wanted, tag, device):
    """(what was read, whether a message is missing still)."""
    outputs = [((len(slots),), torch.int64), ((1,), torch.int64)]
    got, left = launch(_wait, [slots, wanted], outputs, tag, LANES=len(slots), device=device)
    return got, left.item()


@pytest.mark.parametrize("tag", [0, 1])
def test_what_is_wanted_is_read_until_it_carries_the_tag(tag, device):
    wanted = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1])
    slots = torch.arange(8) << 32 | tag << 31 | 7
    got, left = wait(slots, wanted, tag, device)
    assert torch.equal(got, torch.where(wanted != 0, slots, (1 - tag) << 31))
    assert left == 0


@pytest.mark.timeout(30)
@pytest.mark.parametrize("tag", [0, 1])
def test_what_never_comes_is_awaited_for_a_while_and_is_missing(tag, device):
    wanted = torch.tensor([1, 1, 0, 1])
    slots = torch.arange(4) << 32 | torch.tensor([tag, 1 - tag, 1 - tag, tag]) << 31 | 7
    got, left = wait(slots, wanted, tag, device)
    assert torch.equal(got, torch.where(wanted != 0, slots, (1 - tag) << 31))
    assert left == 1


# Rows.


@triton.jit(do_not_specialize=["first_cols", "row_stride", "misalignment"])
def _aligned_parts(x_ptr, start_ptr, body_ptr, edge_ptr, first_cols, row_stride, misalignment, K: tl.constexpr):
    """For rows of first_cols + program columns: bytes from x_ptr to the body, its length, columns on edges or -1."""
    n_cols = first_cols + tl.program_id(0)
    x = Rows(x_ptr, row_stride, misalignment)
    row = tl.arange(0, K.block_rows)[:, None].to(tl.int64)
    head = head_of(row, x, K)
    at = tl.program_id(0) * K.block_rows + tl.arange(0, K.block_rows)[:, None]
    tl.store(start_ptr + at, body_of(x, row, K).to(tl.int64) - x_ptr.to(tl.int64))
    body = whole_vectors(n_cols - head, K)
    ROWS: tl.constexpr = K.block_rows
    tl.store(body_ptr + at, tl.zeros([ROWS, 1], tl.int32) + body)
    if K.shifted:
        r = Row(row, 0, 0, body, head, body, tl.arange(0, K.block_cols)[None, :])
        cols, on_edge = edges_of(r, n_cols, 1, K)
        tl.store(edge_ptr + at * 2 * K.vector + tl.arange(0, 2 * K.vector)[None, :], tl.where(on_edge, cols, -1))


def aligned_parts(dtype, first_cols, n_lengths, row_stride, phase, shifted, device):
    """(n_cols, row, byte of the body, its columns, columns on edges) of eight rows of each length."""
    vector, rows = 16 // dtype.itemsize, 8
    buffer = torch.empty(64 + vector, dtype=dtype, device=device)
    assert buffer.data_ptr() % 16 == 0
    outputs = [((n_lengths, rows), torch.int64), ((n_lengths, rows), torch.int32)]
    outputs.append(((n_lengths, rows, 2 * vector), torch.int32))
    spec = Spec(
        block_rows=rows, block_cols=16, pieces=1, vector=vector, cast_dtype=CAST[dtype], tile=True, axis=1,
        shifted=shifted,
    )  # fmt: skip
    start, body, edge = launch(
        _aligned_parts, [buffer[phase:]], outputs, first_cols, row_stride, phase, K=spec, grid=n_lengths, device=device,
    )  # fmt: skip
    for i, row in product(range(n_lengths), range(rows)):
        columns = [column for column in edge[i, row].tolist() if column >= 0]
        yield first_cols + i, row, start[i, row].item(), body[i, row].item(), columns


@pytest.mark.parametrize("dtype", [BF16, FP32, FP64], ids=str)
def test_body_and_edges_hold_each_column_once(dtype, device):
    vector, itemsize = 16 // dtype.itemsize, dtype.itemsize
    # From the shortest row on that a head fits, past two vectors and an odd rest.
    lengths = range(vector, 4 * vector + 2)
    for phase in range(vector):
        for row_stride in (5 * vector, 5 * vector + 1, 6 * vector - 1, 2**33 // itemsize + 3):
            found = aligned_parts(dtype, lengths[0], len(lengths), row_stride, phase, True, device)
            for n_cols, row, start, body, edges in found:
                assert (phase * itemsize + start) % 16 == 0, "the body starts on 16 bytes"
                assert body % vector == 0
                first = start // itemsize - row * row_stride
                columns = [*edges, *range(first, first + body)]
                assert sorted(columns) == list(range(n_cols)), (phase, row_stride, n_cols, row)


@pytest.mark.parametrize("dtype", [BF16, FP32, FP64], ids=str)
def test_an_even_row_is_all_body(dtype, device):
    vector = 16 // dtype.itemsize
    for row_stride in (3 * vector, 2**33 // dtype.itemsize + vector):
        for n_cols, row, start, body, _ in aligned_parts(dtype, vector, 2 * vector + 1, row_stride, 0, False, device):
            assert start == row * row_stride * dtype.itemsize
            assert body == n_cols // vector * vector


@triton.jit
def _state(x_ptr, pieces_ptr, m_ptr, s_ptr, row_stride, size, K: tl.constexpr):
    """The pieces of a tile's rows, and the state (m, s) of each row."""
    PIECES: tl.constexpr = K.pieces
    row = tl.arange(0, K.block_rows)[:, None]
    cols = tl.arange(0, K.block_cols)[None, :]
    x = load_pieces(x_ptr + row * row_stride, cols, size, NEG_INF, K, PIECES, K.full_pieces)
    m = max_of(x, 1.0, K)
    x = hold_all(x, K.ptx)
    for p in tl.static_range(PIECES):
        tl.store(pieces_ptr + row * PIECES * K.block_cols + p * K.block_cols + cols, x[p])
    scale, base = origin_of(m[:, None], K.ptx)
    tl.store(m_ptr + tl.arange(0, K.block_rows), m)
    tl.store(s_ptr + tl.arange(0, K.block_rows), sum_exp_of(x, scale, base, 1.0, K))


def states(x, n_cols, cast, ptx, device, *, pieces, block=16):
    """The pieces, m and s of the first n_cols columns of x."""
    state = FP64 if cast == FP64 else FP32
    rows = len(x)
    outputs = [((rows, pieces * block), x.dtype), ((rows,), state), ((rows,), state)]
    spec = Spec(
        block_rows=rows, block_cols=block, pieces=pieces, full_pieces=n_cols // block, vector=1, cast_dtype=CAST[cast],
        tile=True, axis=1, ptx=ptx,
    )  # fmt: skip
    return launch(_state, [x], outputs, x.stride(0), n_cols, K=spec, device=device)


@pytest.mark.parametrize("dtype", [BF16, FP32, FP64], ids=str)
@pytest.mark.parametrize("n_cols", [1, 15, 16, 17, 47, 48, 49, 63, 64])
def test_pieces_end_with_the_row(n_cols, dtype, ptx, device):
    x = torch.full((4, 80), NAN, dtype=dtype)  # what a piece reads past the row
    x[:, :n_cols] = torch.randn(4, n_cols, generator=torch.Generator().manual_seed(0)).to(dtype)
    pieces, m, s = states(x, n_cols, dtype, ptx, device, pieces=4)
    assert torch.equal(pieces[:, :n_cols], x[:, :n_cols])
    assert (pieces[:, n_cols:] == -INF).all()
    assert torch.equal(m, x[:, :n_cols].amax(1).to(m.dtype))
    assert s.isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "cast"), [(BF16, BF16), (FP16, FP32), (FP32, FP32), (FP32, BF16), (FP64, FP64)], ids=str
)
def test_the_state_of_a_row_is_that_of_the_recurrence(dtype, cast, ptx, device):
    n_cols, block = 59, 16
    x = torch.randn(16, n_cols, generator=torch.Generator().manual_seed(0), dtype=FP64) * 3
    x[1:4] *= 1000
    x[4, :block], x[5, block : 2 * block], x[6, 3 * block :], x[7, 1:] = -INF, -INF, -INF, -INF
    x[8], x[9], x[10, 20], x[11], x[12, 40] = -INF, 7.0, NAN, NAN, INF
    x[13, 5], x[13, 50], x[14], x[15, ::3] = NAN, INF, -60000.0, -INF
    x = x.to(dtype)
    _, m, s = states(x, n_cols, cast, ptx, device, pieces=4, block=block)
    for values, m_row, s_row in zip(x.to(cast).double().tolist(), m.tolist(), s.tolist(), strict=True):
        *_, last = online_steps(values, n_cols)
        if math.isnan(last.s_after):
            assert math.isnan(s_row)
            continue
        assert m_row == last.m_after
        # With PTX, s counts in the rounding of m times the scale.
        allowed = EPS[FP64 if cast == FP64 else FP32] * (n_cols + (abs(m_row) if m_row > -INF else 0))
        assert abs(s_row - last.s_after) <= allowed * last.s_after
