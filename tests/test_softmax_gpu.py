"""softmax where only a GPU will do: real sizes, streams, graphs, threads, and what one call costs."""

import gc
import math
import timeit
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from contract import assert_softmax

import fused_softmax
from fused_softmax.core.device import device_of
from fused_softmax.core.layout import alignment_of
from fused_softmax.core.plan import candidate, plan_rows
from fused_softmax.ops.softmax.calls import forward_by_plan

# A wait of one program for another that never comes ends as NaN after seconds, and a launch that hangs ends here.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300, method="thread")]

FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
softmax = fused_softmax.softmax
many_cases = pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)

WIDTHS = (
    128, 256, 781, 1024, 1152, 4096, 8192, 12672, 16384, 20000, 32000, 32768,
    65536, 128256, 131072, 151936, 262144, 524288, 1048576, 2097152, 50257, 100003, 8388608,
)  # fmt: skip
FEW_ROWS = ((1, 32768), (1, 131072), (1, 1048576), (8, 32000), (32, 128256), (132, 32768))

# One shape a strategy, small, and (rows, columns, dtype) of all kinds.
BY_STRATEGY = {"tile": (64, 256, BF16), "row": (64, 4096, BF16), "split": (8, 131072, BF16), "stream": (3, 40000, FP64)}
SHAPES = (
    *BY_STRATEGY.values(), (200, 131, BF16), (33, 781, FP32), (64, 1024, FP32), (5, 12672, FP16), (1, 32768, BF16),
    (1, 131072, FP32), (1, 1048576, BF16), (8, 32000, FP32), (32, 128256, BF16), (132, 32768, FP16), (3, 50257, BF16),
    (7, 100003, FP32), (300, 65536, BF16), (2, 2097152, BF16), (150, 65537, FP32), (1, 3, FP32),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _room():
    yield
    gc.collect()
    torch.cuda.empty_cache()


def logits(n_rows, n_cols, dtype, seed=0):
    """Peaked logits made on the GPU, in place as far as it goes."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(n_rows, n_cols, generator=generator, dtype=dtype, device="cuda").mul_(3)
    places = torch.randint(n_cols, (n_rows, 3), generator=generator, device="cuda")
    heights = 10 + 4 * torch.rand(n_rows, 3, generator=generator, device="cuda")
    return x.scatter_(1, places, heights.to(dtype))


def check(y, x, sample=16):
    """Each row's sum, and of a sample of rows, the first and the last among them, every element."""
    n_rows, n_cols = x.shape
    slack = torch.finfo(y.dtype).eps * 4 + n_cols * torch.finfo(y.dtype).smallest_normal * torch.finfo(y.dtype).eps
    step = max(1, 2**26 // n_cols)
    for first in range(0, n_rows, step):
        sums = y[first : first + step].sum(-1, dtype=FP64)
        assert ((sums - 1).abs() <= slack).all(), f"rows from {first} on sum to {sums.min()} ... {sums.max()}"
    rows = sorted({0, n_rows - 1, *torch.linspace(0, n_rows - 1, max(1, min(sample, 2**25 // n_cols))).long().tolist()})
    for row in rows:
        assert_softmax(y[row], x[row])


def poisoned(x):
    """softmax of x into memory that is NaN before; what it allocates next is what was freed."""
    trash = torch.full_like(x, math.nan)
    del trash
    return softmax(x)


@many_cases
@pytest.mark.parametrize("n_cols", WIDTHS)
def test_real_widths(n_cols, dtype):
    n_rows = max(2, 2**26 // n_cols)
    x = logits(n_rows, n_cols, dtype)
    check(poisoned(x), x)
    check(softmax(x), x, sample=4)


@pytest.mark.parametrize("n_cols", [128, 781, 1024, 4096, 12672, 16384, 16385, 50257, 131072])
def test_real_widths_of_fp64(n_cols):
    x = logits(max(2, 2**24 // n_cols), n_cols, FP64)
    check(poisoned(x), x, sample=4)


@many_cases
@pytest.mark.parametrize(("n_rows", "n_cols"), FEW_ROWS)
def test_few_rows(n_rows, n_cols, dtype):
    x = logits(n_rows, n_cols, dtype)
    for _ in range(20):
        y = poisoned(x)
    check(y, x)


@many_cases
def test_one_row_of_64_mi(dtype):
    x = logits(1, 2**26, dtype)
    check(poisoned(x), x)


@pytest.mark.parametrize("strategy", ["tile", "row", "split", "stream"])
@pytest.mark.parametrize("n_cols", [1024, 1027, 4096, 30001])
@pytest.mark.parametrize("n_rows", [1, 131, 1000])
def test_a_named_strategy_at_many_rows(strategy, n_cols, n_rows):
    if strategy == "tile" and n_cols > 4096:
        pytest.skip("a tile of so many pieces is a minute's work for the compiler, and no plan")
    x = logits(n_rows, n_cols, BF16)
    y = torch.full_like(x, math.nan)
    alignment = alignment_of(x, y)
    choices = {"split": {"part_cols": 1024}, "stream": {"part_cols": 4096}}.get(strategy, {})
    plan = candidate(strategy, n_rows, n_cols, 2, device_of(0), alignment=alignment, **choices)
    check(forward_by_plan(x, plan, y=y), x)


# Past 2**31 elements.


@pytest.mark.parametrize(
    ("n_rows", "n_cols"), [(65537, 32769), (20, 2**27), (2**21 + 5, 1024), (16_777_300, 129), (21_500, 100_003)]
)
def test_past_2_31_elements(n_rows, n_cols):
    assert n_rows * n_cols > 2**31
    x = torch.zeros(n_rows, n_cols, dtype=BF16, device="cuda")
    rows = [0, 1, n_rows // 2, 2**31 // n_cols - 1, 2**31 // n_cols, n_rows - 2, n_rows - 1]
    rows = sorted({min(row, n_rows - 1) for row in rows})
    for i, row in enumerate(rows):
        x[row] = logits(1, n_cols, BF16, seed=i)[0]
    y = torch.full_like(x, math.nan)
    assert softmax(x, out=y) is y
    for row in rows:
        assert_softmax(y[row], x[row])
    for first in range(0, n_rows, max(1, n_rows // 16)):
        assert not y[first].isnan().any()


@pytest.mark.parametrize("n_cols", [256, 250, 781, 1024, 4096])
def test_rows_that_lie_far_apart(n_cols):
    """Their last lies 2**32 bytes and more behind the first, and what is fetched ahead must end with the last."""
    whole = torch.full((70_000, 65_536), math.nan, dtype=BF16, device="cuda")
    x = whole[:, -n_cols:]
    x.copy_(logits(len(whole), n_cols, BF16))
    y = softmax(x)
    torch.cuda.synchronize()
    check(y, x)


def test_a_row_stride_past_2_31_elements():
    whole = torch.empty(2**31 + 2**20, dtype=BF16, device="cuda")
    for n_cols in (512, 5000, 100_000):
        x = whole.as_strided((2, n_cols), (2**31, 1))
        x.copy_(logits(2, n_cols, BF16))
        check(softmax(x), x)
        y = torch.full((2, n_cols), math.nan, dtype=BF16, device="cuda")
        softmax(x, out=y)
        check(y, x)


def test_grids_past_2_16_programs_in_each_strategy():
    for n_rows, n_cols in ((300_000, 8), (300_000, 700), (70_000, 1100)):
        x = logits(n_rows, n_cols, BF16)
        check(softmax(x), x)


# Many launches, streams, threads. The same input gives the same bits, so one checked result stands for all later ones,
# and each comparison adds to a count on the device: nothing waits before the end.


@pytest.fixture(scope="module")
def references():
    pairs = []
    for i, (n_rows, n_cols, dtype) in enumerate(SHAPES):
        x = logits(n_rows, n_cols, dtype, seed=i)
        y = softmax(x)
        check(y, x, sample=4)
        pairs.append((x, y))
    torch.cuda.synchronize()
    return pairs


def differing(y, expected):
    return (y != expected).any().long()  # NaN differs from all


def test_10_000_launches_on_changing_shapes(references):
    wrong = torch.zeros(len(references), dtype=torch.int64, device="cuda")
    for i in range(10_000):
        which = i * 7 % len(references)
        x, expected = references[which]
        y = softmax(x)
        if i % 5 == 0 or i > 9_000:
            wrong[which] += differing(y, expected)
    assert wrong.tolist() == [0] * len(references)


def on_streams(references, n_streams, n_launches, step=7):
    streams = [torch.cuda.Stream() for _ in range(n_streams)]
    wrong = [torch.zeros(len(references), dtype=torch.int64, device="cuda") for _ in streams]
    torch.cuda.synchronize()
    for i in range(n_launches):
        which = (i * step + i % n_streams) % len(references)
        x, expected = references[which]
        with torch.cuda.stream(streams[i % n_streams]):
            y = softmax(x)
            if i % 4 < 2:
                wrong[i % n_streams][which] += differing(y, expected)
    torch.cuda.synchronize()
    assert [count.tolist() for count in wrong] == [[0] * len(references)] * n_streams


def test_10_000_launches_on_two_streams_at_once(references):
    on_streams(references, 2, 10_000)


def test_split_on_two_streams_at_once(references):
    on_streams([pair for pair in references if is_split(pair[0])], 2, 4_000)


def test_split_on_eight_streams_at_once(references):
    on_streams([pair for pair in references if is_split(pair[0])], 8, 4_000)


def is_split(x):
    alignment = alignment_of(x, torch.empty_like(x))
    return plan_rows(*x.shape, x.element_size(), device_of(0), alignment=alignment).strategy == "split"


def test_split_beside_kernels_that_fill_the_gpu(references):
    other = torch.cuda.Stream()
    a = torch.randn(8192, 8192, dtype=BF16, device="cuda")
    out = torch.empty_like(a)
    pairs = [pair for pair in references if is_split(pair[0])]
    wrong = torch.zeros(len(pairs), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for i in range(1_000):
        if i % 10 == 0:
            with torch.cuda.stream(other):
                torch.mm(a, a, out=out)
                torch.softmax(a, -1, out=out)
        x, expected = pairs[i % len(pairs)]
        wrong[i % len(pairs)] += differing(softmax(x), expected)
    assert wrong.tolist() == [0] * len(pairs)


def test_the_longest_rows_that_split_on_two_streams(references):
    """Two launches whose every row takes as many programs as the planner ever gives one."""
    gpu = device_of(0)
    inputs = []
    for itemsize, dtype in ((2, BF16), (4, FP32)):
        sizes = [2**power for power in range(17, 27) if plan_rows(4, 2**power, itemsize, gpu).strategy == "split"]
        inputs += [logits(4, sizes[-1], dtype, seed) for seed in range(2)]
    pairs = [(x, softmax(x)) for x in inputs]
    for x, y in pairs:
        check(y, x, sample=1)
    on_streams(pairs, 2, 400, step=1)


def test_threads(references):
    def work(seed):
        stream = torch.cuda.Stream()
        wrong = torch.zeros(len(references), dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for i in range(300):
                which = (i * 7 + seed) % len(references)
                x, expected = references[which]
                wrong[which] += differing(softmax(x), expected)
            stream.synchronize()
        return wrong.tolist()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [[0] * len(references)] * 8


def test_threads_on_one_stream(references):
    def work(seed):
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for i in range(300):
            x, expected = references[(i * 7 + seed) % len(references)]
            wrong += differing(softmax(x), expected)
        return wrong.item()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [0] * 8


def test_rows_of_split_that_come_and_go():
    """More rows than before take fresh slots, fewer leave some as they were; both meet again later."""
    x = logits(400, 65536, BF16)
    expected = softmax(x)
    check(expected, x, sample=4)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(1_000):
        n_rows = 1 + i * 37 % 400
        wrong += differing(softmax(x[:n_rows]), expected[:n_rows]) if n_rows > 132 else 0
        if n_rows <= 132:  # few rows are split otherwise, and so rounded otherwise
            wrong += (softmax(x[:n_rows]).sum(-1, dtype=FP32) - 1).abs().gt(0.01).any().long()
    assert wrong.item() == 0


def test_splits_that_share_slots():
    """Plans with as many slots a row, of other parts and copies, take turns on the same memory."""
    gpu = device_of(0)
    x = logits(50, 65536, BF16)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    plans = [
        candidate("split", 50, 65536, 2, gpu, part_cols=65536 // parts, copies=64 // parts, num_warps=4)
        for parts in (64, 32, 16, 8)
    ]
    assert {plan.slots_per_row for plan in plans} == {64}
    y = torch.empty_like(x)
    for i in range(2_000):
        y.fill_(math.nan)
        forward_by_plan(x, plans[i * 3 % 4], y=y)
        wrong += (y.sum(-1, dtype=FP32) - 1).abs().gt(0.01).any().long() + y.isnan().any()
    assert wrong.item() == 0
    check(y, x)


def test_it_runs_after_what_the_stream_has_still_to_do():
    for n_rows, n_cols, dtype in BY_STRATEGY.values():
        fresh = logits(n_rows, n_cols, dtype, seed=9)
        x = torch.full_like(fresh, math.nan)
        softmax(x)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            x.copy_(fresh)
            y = softmax(x)
            x.fill_(math.nan)
        stream.synchronize()
        check(y, fresh, sample=2)


def test_no_call_waits_for_the_gpu():
    inputs = [logits(*shape) for shape in SHAPES]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):  # the first call of a shape neither
            for x in inputs:
                softmax(x)
                softmax(x, 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# CUDA graphs.


def captured(inputs, pool=None, stream=None):
    graph, outputs = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        outputs.extend(softmax(x) for x in inputs)
    return graph, outputs


def contents(seed, shapes=None):
    return [logits(*shape, seed=seed + i) for i, shape in enumerate(shapes or BY_STRATEGY.values())]


def test_100_replays_of_a_graph_of_every_strategy():
    inputs = contents(0)
    for x in inputs:
        softmax(x)
    graph, outputs = captured(inputs)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(100):
        fresh = contents(10 * (i % 8))
        expected = [softmax(x) for x in fresh]  # eager launches between replays, split ones among them
        for x, new in zip(inputs, fresh, strict=True):
            x.copy_(new)
        for y in outputs:
            y.fill_(math.nan)
        graph.replay()
        for y, right in zip(outputs, expected, strict=True):
            wrong += differing(y, right)
    assert wrong.item() == 0
    for x, y in zip(inputs, outputs, strict=True):
        check(y, x, sample=2)


def test_replays_back_to_back():
    inputs = contents(5)
    graph, outputs = captured(inputs)
    expected = [softmax(x) for x in inputs]
    for _ in range(1_001):
        graph.replay()
    assert [differing(y, right).item() for y, right in zip(outputs, expected, strict=True)] == [0] * 4


def test_two_graphs_captured_on_one_stream_and_replayed_on_two():
    shapes = (BY_STRATEGY["split"], (1, 131072, FP32), (4, 65536, BF16), BY_STRATEGY["split"])
    stream = torch.cuda.Stream()
    sets = [contents(20, shapes), contents(40, shapes)]
    expected = [[softmax(x) for x in inputs] for inputs in sets]
    graphs = [captured(inputs, stream=stream) for inputs in sets]
    streams = [torch.cuda.Stream() for _ in range(3)]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in streams]
    eager_x, eager_y = sets[0][0].clone(), expected[0][0]
    torch.cuda.synchronize()
    for _ in range(500):
        for i, (graph, outputs) in enumerate(graphs):
            with torch.cuda.stream(streams[i]):
                for y in outputs:
                    y.fill_(math.nan)
                graph.replay()
                for y, right in zip(outputs, expected[i], strict=True):
                    wrong[i] += differing(y, right)
        with torch.cuda.stream(streams[2]):
            wrong[2] += differing(softmax(eager_x), eager_y)
    torch.cuda.synchronize()
    assert [count.item() for count in wrong] == [0, 0, 0]


def test_capture_of_a_shape_that_no_call_has_had():
    """Its kernel is compiled, for other numbers of rows; nothing of its own was prepared."""
    for n_rows, n_cols, dtype in BY_STRATEGY.values():
        softmax(logits(n_rows, n_cols, dtype))
        x = logits(n_rows + 3, n_cols, dtype)
        graph, (y,) = captured([x])
        for _ in range(3):
            y.fill_(math.nan)
            graph.replay()
            check(y, x, sample=2)


def test_capture_of_a_shape_whose_kernel_is_not_compiled():
    for n_rows, n_cols, dtype in ((3, 311, FP16), (3, 5333, FP16), (2, 77_777, FP16), (2, 44_444, FP64)):
        x = logits(n_rows, n_cols, dtype)
        graph, (y,) = captured([x])
        for _ in range(3):
            y.fill_(math.nan)
            graph.replay()
            check(y, x, sample=2)


def test_more_rows_late_in_a_capture():
    """The slots that the first launches of a capture were given go on serving them."""
    shapes = [(n_rows, 131072, BF16) for n_rows in (140, 200, 600, 150)]
    inputs = contents(60, shapes)
    graph, outputs = captured(inputs)
    expected = [softmax(x) for x in inputs]
    for _ in range(20):
        for y in outputs:
            y.fill_(math.nan)
        graph.replay()
    assert [differing(y, right).item() for y, right in zip(outputs, expected, strict=True)] == [0] * 4


def test_capture_on_two_streams_of_one_graph():
    inputs = contents(80, [BY_STRATEGY["split"]] * 2)
    expected = [softmax(x) for x in inputs]
    side, graph, outputs = torch.cuda.Stream(), torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        for _ in range(5):
            outputs.append(softmax(inputs[0]))
            with torch.cuda.stream(side):
                outputs.append(softmax(inputs[1]))
        main.wait_stream(side)
    for _ in range(50):
        for y in outputs:
            y.fill_(math.nan)
        graph.replay()
    assert [differing(y, expected[i % 2]).item() for i, y in enumerate(outputs)] == [0] * 10


def test_graphs_that_are_gone_leave_their_successors_alone():
    inputs = contents(100)
    expected = [softmax(x) for x in inputs]
    for _ in range(10):
        graph, outputs = captured(inputs)
        for _ in range(3):
            graph.replay()
        assert [differing(y, right).item() for y, right in zip(outputs, expected, strict=True)] == [0] * 4
        del graph, outputs


def test_capture_on_every_stream_of_the_pool():
    """torch hands the same 32 streams out in turns: none of them is the one that a capture's slots are zeroed on."""
    (x,) = contents(140, [BY_STRATEGY["split"]])
    expected = softmax(x)
    for _ in range(40):
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.graph(graph, stream=stream):
            y = softmax(x)
        graph.replay()
        assert differing(y, expected).item() == 0


def test_slots_of_a_graph_are_ready_when_its_first_replay_overtakes_other_streams():
    """A stream busy for long must not hold back what zeroes the slots of a new graph."""
    inputs = contents(120, [(9, 131072, BF16), (3, 262144, FP32)])
    expected = [softmax(x) for x in inputs]
    torch.cuda.synchronize()
    # Memory that the slots may get is full of what no launch has left there.
    torch.full((2**22,), -1, dtype=torch.int64, device="cuda")
    graph, outputs = captured(inputs)
    graph.replay()
    assert [differing(y, right).item() for y, right in zip(outputs, expected, strict=True)] == [0, 0]


# What a call costs.


def kernels_of(call):
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        call()
        torch.cuda.synchronize()
    return [event.name for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("strategy", BY_STRATEGY)
def test_one_launch_a_call(strategy):
    x = logits(*BY_STRATEGY[strategy])
    if not kernels_of(lambda: torch.softmax(x, -1)):
        pytest.skip("the profiler sees no kernels here")
    for _ in range(2):  # the first call zeroes slots
        kernels = kernels_of(lambda: softmax(x))
    assert len(kernels) == (2 if strategy == "stream" else 1), kernels
    assert all("_forward" in name or "_stream_state" in name for name in kernels)


def test_host_time_of_a_call_is_reported(capsys, record_property):
    x = torch.randn(64, 1024, device="cuda")
    softmax(x)

    def best_of(call, number=2000):
        torch.cuda.synchronize()
        times = []
        for _ in range(15):
            times.append(timeit.timeit(call, number=number) / number)
            torch.cuda.synchronize()
        return min(times) * 1e6

    ours, theirs = best_of(lambda: softmax(x)), best_of(lambda: torch.softmax(x, -1))
    record_property("host_us", f"{ours:.2f}")
    record_property("torch_host_us", f"{theirs:.2f}")
    with capsys.disabled():
        print(f"\nhost time of a call on 64 x 1024: {ours:.2f} us, torch.softmax {theirs:.2f} us")


# PyTorch around it.


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32, FP64], ids=str)
def test_autocast_gives_what_torch_gives(dtype):
    for n_cols in (700, 5000, 100_000):
        x = logits(3, n_cols, dtype)
        softmax(x)
        with torch.autocast("cuda", dtype=BF16):
            y = softmax(x)
            assert_softmax(y, x)
            assert y.dtype == (FP64 if dtype == FP64 else FP32)
            assert_softmax(softmax(x, dtype=FP16), x, dtype=FP16)
            out = torch.empty_like(x)
            assert softmax(x, out=out) is out
        assert_softmax(out, x)
    with torch.autocast("cuda"), pytest.raises(NotImplementedError):
        softmax(torch.ones(3, dtype=torch.int64, device="cuda"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_a_device_that_is_not_the_current_one():
    assert torch.cuda.current_device() == 0
    for n_rows, n_cols, dtype in BY_STRATEGY.values():
        x = logits(n_rows, n_cols, dtype)
        y = softmax(x)
        for _ in range(2):
            there = softmax(x.to("cuda:1"))
            assert there.device == torch.device("cuda:1")
            assert torch.equal(there.to("cuda:0"), y)
    assert torch.cuda.current_device() == 0


def test_out_on_the_cpu_is_refused():
    with pytest.raises(RuntimeError, match=r"out.*cuda.*cpu"):
        softmax(torch.ones(3, 4, device="cuda"), out=torch.ones(3, 4))


def test_cpu_tensors_take_aten():
    x = torch.randn(3, 700)
    assert torch.equal(softmax(x), torch.softmax(x, -1))


def test_compiled_by_inductor():
    compiled = torch.compile(lambda x: softmax(x * 2, -1), fullgraph=True)
    for n_cols in (700, 5000):
        x = logits(4, n_cols, FP32)
        softmax(x)
        torch.testing.assert_close(compiled(x), torch.softmax(x * 2, -1))


def test_within_a_default_device():
    x = logits(4, 700, FP32)
    expected = softmax(x)
    with torch.device("cuda"):
        torch.testing.assert_close(softmax(x), expected)


def test_allocations_are_the_outputs_alone():
    x = logits(64, 131072, BF16)
    softmax(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = softmax(x)
    assert torch.cuda.max_memory_allocated() - before == y.nbytes
