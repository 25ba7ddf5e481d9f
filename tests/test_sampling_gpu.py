"""What takes a GPU to see of `sample`: ten million draws by every filter, and a thousand replays of one graph."""

import pytest
import torch
from sampling_cases import assert_distributed
from test_sampling import FILTERS, IDS, one_row, probabilities

from fused_softmax import sample

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

DRAWS = 10_000_000
SEED = 5  # of rows in which no sum comes within 5e-6 of a top-p
# Rows whose filters need one launch, the second look, or the launches of wide nuclei.
ROWS = {
    "33": (lambda: torch.randn(33) * 2, 1_000_000),
    "wide": (lambda: torch.randn(32000) * 2, 20_000),
    "peaked": (lambda: torch.randn(32000) * 6, 20_000),
}


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("filters", FILTERS, ids=IDS)
def test_ten_million_draws_are_distributed_as_the_row(filters, kind):
    make, chunk = ROWS[kind]
    torch.manual_seed(SEED)
    row = make()
    torch.cuda.reset_peak_memory_stats()
    x, counts = one_row(chunk, row.cuda()), torch.zeros(len(row), dtype=torch.int64, device="cuda")
    for start in range(0, DRAWS, chunk):
        position = torch.arange(start, start + chunk, device="cuda")
        drawn = sample(x, **filters, seed=2026, position=position)
        counts += drawn.tokens.bincount(minlength=len(row))
    assert torch.cuda.max_memory_allocated() < 2**31  # a million draws at a time among them
    tokens = torch.arange(len(row)).repeat_interleave(counts.cpu())
    assert len(tokens) == DRAWS
    assert_distributed(tokens, probabilities(row, **filters))


@pytest.mark.parametrize("filters", FILTERS, ids=IDS)
def test_a_thousand_replays_draw_what_as_many_calls_do(filters):
    x = torch.cat([torch.randn(4, 32000) * 2, torch.randn(4, 32000) * 6]).cuda()
    seed, position = torch.arange(8, device="cuda"), torch.arange(8, device="cuda")

    def step():
        drawn = sample(x, **filters, seed=seed, position=position, return_logprobs="processed")
        position.add_(1)
        return drawn

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    drawn = []
    for replaying in (True, False):
        position.copy_(torch.arange(8))
        told = []
        for _ in range(1000):
            if replaying:
                graph.replay()
            each = found if replaying else step()
            told.append((each.tokens.clone(), each.logprobs.clone(), each.valid.clone()))
        drawn.append([torch.stack(all_) for all_ in zip(*told, strict=True)])
    assert all(torch.equal(a, b) for a, b in zip(*drawn, strict=True))
    tokens, _, valid = drawn[0]
    assert valid.all()
    if filters.get("temperature") != 0 and filters.get("top_k") != 1 and filters.get("min_p") != 1:
        assert (tokens[:-1] != tokens[1:]).any(0)[:4].all()  # of peaked rows some keep one column
