"""What takes a GPU to see of `sample`: ten million draws by every filter, and a thousand replays of one graph."""

import math

import pytest
import torch
from sampling_cases import assert_counted, kept_by_sort
from test_sampling import FILTERS, IDS, one_row, probabilities

from fused_softmax import sample
from fused_softmax.ops.sampling import arrivals, reference
from fused_softmax.ops.sampling.kernels import first

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

DRAWS = 10_000_000
SEED = 5  # of rows in which no sum comes near a top-p that decides
# Rows whose filters need one launch, the second look, or the launches of wide nuclei.
ROWS = {
    "33": (lambda: torch.randn(33) * 2, 1_000_000),
    "wide": (lambda: torch.randn(32000) * 2, 20_000),
    "peaked": (lambda: torch.randn(32000) * 6, 20_000),
}
# Draws that are judged afterwards: by a count, by a count and a mass together, by min-p before, and mostly rejected.
FIRST = [
    {"top_k": 100},
    {"top_k": 2000, "temperature": 1.5},
    {"top_k": 200, "top_p": 0.8, "order": "joint"},
    {"top_p": 0.9, "min_p": 0.05},
    {"top_p": 0.05},
]
CASES = [(kind, each) for kind in ROWS for each in FILTERS]
CASES += [(kind, each) for kind in ("wide", "peaked") for each in FIRST]


def counts_of(row, n_draws, chunk, **filters):
    """How often each column of a row on the GPU is drawn, int64 [n_cols], `chunk` draws at a time."""
    x, counts = one_row(chunk, row), torch.zeros(len(row), dtype=torch.int64, device="cuda")
    for start in range(0, n_draws, chunk):
        position = torch.arange(start, start + chunk, device="cuda")
        counts += sample(x, **filters, seed=2026, position=position).tokens.bincount(minlength=len(row))
    assert counts.sum() == n_draws
    return counts


@pytest.mark.parametrize(("kind", "filters"), CASES, ids=str)
def test_ten_million_draws_are_distributed_as_the_row(kind, filters):
    make, chunk = ROWS[kind]
    torch.manual_seed(SEED)
    row = make()
    assert kept_by_sort(row, **filters)[1] > 2**-19  # or float32's sums may keep another column
    torch.cuda.reset_peak_memory_stats()
    counts = counts_of(row.cuda(), DRAWS, chunk, **filters)
    assert torch.cuda.max_memory_allocated() < 2**31  # a million draws at a time among them
    assert_counted(counts, probabilities(row, **filters))


# Rows whose first arrivals nearly always fail, so that they are drawn from again and again.
LONG = 2**18


def one_of_a_plateau():
    """A row of equals but for one, which has 10^-4 of the mass."""
    row = torch.zeros(LONG)
    row[LONG // 2 + 5] = math.log(1e-4 * (LONG - 1))
    return row


def ties():
    return (torch.randn(LONG, generator=torch.Generator().manual_seed(SEED)) * 2).round()


REJECTED = {
    "two of many equals": (lambda: torch.zeros(LONG), {"top_p": 1.5 / LONG}),
    "a tiny top-p": (one_of_a_plateau, {"top_p": 2e-4}),
    "by count, of many equals": (lambda: torch.zeros(LONG), {"top_k": 65}),
    "jointly, ties": (ties, {"top_k": 80, "top_p": 0.03, "order": "joint"}),
    "min-p, ties": (ties, {"top_p": 0.02, "min_p": 0.3}),
}


@pytest.mark.parametrize("kind", REJECTED)
def test_rows_whose_candidates_fail_are_drawn_from_right(kind, monkeypatch):
    make, filters = REJECTED[kind]
    row = make()
    assert kept_by_sort(row, **filters)[1] > 2**-19
    assert_counted(counts_of(row.cuda(), 500_000, 2_000, **filters), probabilities(row, **filters))
    x, position = one_row(200, row.cuda()), torch.arange(200, device="cuda")
    seed = torch.full_like(position, 7)
    wanted = reference.sample(x, seed, position, **filters).tokens
    found = sample(x, **filters, seed=seed, position=position).tokens
    assert (found != wanted).sum() <= 1  # a draw in some million lies within float32's rounding
    monkeypatch.setattr(arrivals, "RETRIES", 0)
    assert (reference.sample(x, seed, position, **filters).tokens != wanted).sum() > 20  # so many were drawn again
    if kind == "two of many equals":  # and some until their boundary was sought
        monkeypatch.setattr(arrivals, "RETRIES", first.RETRIES.value - 1)
        assert not torch.equal(reference.sample(x, seed, position, **filters).tokens, wanted)


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
