"""Routes and segments on a GPU beside other launches: the same bits on any run, stream and replay."""

from itertools import islice

import pytest
import torch

from fused_softmax import route, segment_logsumexp, segment_softmax, softmax

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def rows(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, dtype=dtype, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def routed(n, n_experts, k, **options):
    """A function that routes the same rows: all results, and the gradient of the weights and losses."""
    x = rows(n, n_experts).requires_grad_()
    of_weights, one = rows(n, k, dtype=torch.float32, seed=1), torch.ones((), device="cuda")

    def run():
        out = route(x, k, return_aux_loss=True, return_z_loss=True, **options)
        dx = torch.autograd.grad((out.weights, out.aux_loss, out.z_loss), x, (of_weights, one, one))
        return *[each.detach() for each in out[:6]], *dx

    return run


def of_segments(function, sizes, *trailing):
    x = rows(sum(sizes), *trailing, dtype=torch.float32).requires_grad_()
    offsets = torch.tensor([0, *sizes], device="cuda").cumsum(0)

    def run():
        y = function(x, offsets)
        return y.detach(), *torch.autograd.grad(y.masked_fill(y.isinf(), 0.0).square().sum(), x)

    return run


RUNS = {
    "route, many programs": lambda: routed(16384, 256, 8),
    "route, experts past the registers": lambda: routed(3000, 1024, 12),
    "route, one warp a program": lambda: routed(4096, 512, 10),
    "route by sequences": lambda: routed(4096, 64, 6, sequence_length=512),
    "route, few rows": lambda: routed(7, 60, 4),
    "segments, a hub": lambda: of_segments(segment_softmax, [1] * 5000 + [400_000] + [3] * 5000),
    "segments of heads": lambda: of_segments(segment_softmax, [17, 0, 300, 1] * 500, 8),
    "logsumexp of segments": lambda: of_segments(segment_logsumexp, [5, 90_000, 0, 700]),
}


def same_bits(some, others):
    return all(
        torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
        for a, b in zip(some, others, strict=True)
    )


def differences(some, others):
    """How many of the results differ in a bit, on the device."""
    each = [(a.view(torch.uint8) != b.view(torch.uint8)).any() for a, b in zip(some, others, strict=True) if a.ndim]
    return torch.stack(each).sum()


@pytest.mark.parametrize("name", RUNS)
def test_every_run_has_the_same_bits(name):
    run = RUNS[name]()
    first = run()
    assert all(same_bits(first, run()) for _ in range(50))


@pytest.mark.parametrize("launches", [2000, pytest.param(100_000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", RUNS)
def test_replays_on_two_streams_beside_other_launches(name, launches):
    """A graph of one stream replayed beside the same one of another, and beside rows that many programs share."""
    streams, made = [torch.cuda.Stream(), torch.cuda.Stream()], []
    shared = rows(64, 128256)
    expected = softmax(shared, -1)
    for stream in streams:
        with torch.cuda.stream(stream):
            run = RUNS[name]()
            wanted = run()
            wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(10):
                wrong += differences(run(), wanted)
        made.append((graph, wrong, wanted))
    for _ in range(launches // 20):  # a forward and a backward launch of each run
        for stream, (graph, _, _) in zip(streams, made, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        y = softmax(shared, -1)
    torch.cuda.synchronize()
    assert [int(wrong) for _, wrong, _ in made] == [0, 0]
    assert torch.equal(y, expected)


def test_calls_in_turn_on_two_streams():
    """What programs leave for each other belongs to a stream."""
    runs = [make() for make in islice(RUNS.values(), 4)]
    wanted = [run() for run in runs]
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream(), torch.cuda.Stream()], []
    for turn in range(200):
        with torch.cuda.stream(streams[turn // 4 % 2]):
            found.append(runs[turn % 4]())
    torch.cuda.synchronize()
    assert all(same_bits(each, wanted[turn % 4]) for turn, each in enumerate(found))


def test_a_captured_route_routes_new_rows():
    x = rows(2048, 128).requires_grad_()

    def run():
        out = route(x, 6, return_aux_loss=True, return_z_loss=True)
        dx = torch.autograd.grad(out.weights.square().sum() + out.aux_loss + out.z_loss, x)
        return *[each.detach() for each in out[:6]], *dx

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run()
    for seed in range(1, 4):
        with torch.no_grad():
            x.copy_(rows(2048, 128, seed=seed))
        graph.replay()
        assert same_bits(made, run())
