"""sample: what is kept, how often each column is drawn, and that a token depends on its own row alone."""

import math

import pytest
import torch
from conftest import peaked
from products import pairwise
from sampling_cases import BY_BOTH, assert_distributed, columns, few, hard_rows, kept_by_sort
from torch.testing import assert_close
from transformers.generation import logits_process

import fused_softmax
from fused_softmax import sample

FILTERS = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.0, "top_p": 0.5},
    {"top_k": 1},
    {"top_k": 7, "temperature": 2.0},
    {"top_p": 0.3},
    {"top_p": 0.9, "temperature": 1.5},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 12, "top_p": 0.8},
    {"top_k": 12, "top_p": 0.8, "order": "joint"},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.1, "temperature": 1.3},
]
IDS = ["-".join(f"{k}={v}" for k, v in each.items()) or "none" for each in FILTERS]


def one_row(n, row):
    """n rows that are one in memory."""
    return row.expand(n, row.shape[-1])


@BY_BOTH
@pairwise()
@pytest.mark.parametrize("filters", FILTERS, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n_cols", [2, 33, 100])
def test_kept_columns_are_those_of_a_stable_sort(n_cols, dtype, filters, way, device):
    assert_kept_by_sort(hard_rows(n_cols).to(dtype), filters, device)


@pytest.mark.parametrize("filters", [FILTERS[5], FILTERS[7], FILTERS[9]], ids=[IDS[5], IDS[7], IDS[9]])
def test_columns_that_kernels_keep_are_those_of_a_stable_sort(filters, device):
    """Of a peaked row, two plateaus, signed zeros, a row with holes and one of equals."""
    assert_kept_by_sort(hard_rows(33)[[4, 8, 9, 11, 12, 14]], filters, device)


def assert_kept_by_sort(x, filters, device):
    drawn = sample(x.to(device), **filters, seed=1, return_kept=True)
    assert drawn.valid.all()
    for row, bits, token in zip(x.float(), drawn.kept, drawn.tokens, strict=True):
        wanted, nearest = kept_by_sort(row, **filters)
        if nearest > 1e-6:
            assert columns(bits) == wanted
        assert token.item() in columns(bits)


@BY_BOTH
def test_top_k_of_one_is_argmax_at_ties(way, device):
    x = hard_rows(50).to(device)
    assert torch.equal(sample(x, top_k=1, seed=3).tokens, sample(x, temperature=0.0).tokens)
    assert torch.equal(sample(x, top_k=1, seed=3).tokens.cpu(), x.cpu().argmax(1))


@pytest.mark.parametrize("way", ["torch", "kernels"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n_cols", [1, 2, 33, 5000])
def test_temperature_0_takes_the_first_of_the_greatest(n_cols, dtype, way, device):
    x = torch.randn(7, n_cols).round().to(dtype)  # with ties
    x[1, n_cols // 2 :] = math.inf if n_cols < 4 else 9.0
    x[2, -1] = math.inf
    x[3, n_cols // 2] = math.nan
    x[4] = -math.inf
    x[5] = torch.tensor([-0.0, 0.0]).repeat(n_cols)[:n_cols]
    x[6, -1] = -math.inf
    drawn = sample(x.to(device), temperature=0.0)
    valid = torch.tensor([True, True, True, False, False, True, n_cols > 1])
    valid &= (x == math.inf).sum(1) <= 1
    assert torch.equal(drawn.valid.cpu(), valid)
    assert torch.equal(drawn.tokens.cpu(), torch.where(valid, x.float().argmax(1), 0))


@pairwise(strength=1)
@pytest.mark.parametrize("way", ["torch", "kernels"], indirect=True)
@pytest.mark.parametrize(
    ("filters", "processors"),
    [
        ({"temperature": 0.7}, [("Temperature", 0.7)]),
        ({"top_k": 10}, [("TopK", 10)]),
        ({"top_p": 0.8}, [("TopP", 0.8)]),
        ({"min_p": 0.1}, [("MinP", 0.1)]),
        (
            {"temperature": 1.7, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
            [("Temperature", 1.7), ("TopK", 40), ("TopP", 0.9), ("MinP", 0.02)],
        ),
    ],
    ids=str,
)
def test_logprobs_are_those_of_transformers(filters, processors, way, device):
    n = few(8, way, 2)
    x = torch.cat([torch.randn(n, 200) * 2, peaked(n, 200)])
    processed = x
    for name, value in processors:
        processed = getattr(logits_process, f"{name}LogitsWarper")(value)(None, processed)
    wanted = processed.log_softmax(1)
    drawn = sample(x.to(device), **filters, seed=0, return_logprobs="processed", top_logprobs=200)
    got = torch.full_like(wanted, -math.inf)
    tokens, values = drawn.top_tokens.cpu(), drawn.top_logprobs.cpu()
    for row in range(len(x)):
        kept = tokens[row] >= 0
        got[row, tokens[row][kept]] = values[row][kept]
    assert_close(got, wanted, atol=2e-6, rtol=1e-5)
    assert_close(drawn.logprobs.cpu(), wanted.gather(1, drawn.tokens.cpu()[:, None]).squeeze(1), atol=2e-6, rtol=1e-5)


def probabilities(row, **filters):
    kept, _ = kept_by_sort(row, **filters)
    z = torch.full((len(row),), -math.inf, dtype=torch.float64)
    kept = sorted(kept)
    z[kept] = row.double()[kept] / (filters.get("temperature", 1.0) or 1.0)
    return z.softmax(0)


@BY_BOTH
@pytest.mark.parametrize("n_draws", [4000, pytest.param(100_000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("filters", FILTERS, ids=IDS)
def test_columns_are_drawn_as_often_as_they_are_likely(filters, n_draws, way, device):
    row, n_draws = torch.randn(33) * 2, few(n_draws, way, n_draws // 100)
    drawn = sample(one_row(n_draws, row.to(device)), **filters, seed=11, position=torch.arange(n_draws, device=device))
    assert_distributed(drawn.tokens.cpu(), probabilities(row, **filters))


@BY_BOTH
@pytest.mark.parametrize(("n_cols", "n_draws"), [(1300, 2000), pytest.param(50257, 4000, marks=pytest.mark.exhaustive)])
def test_rare_columns_of_long_rows_are_drawn(n_cols, n_draws, way, device):
    """One column stands above all others, which together are as likely: each is rare in its group and in its call."""
    row = torch.full((n_cols,), -math.log(n_cols - 1.0))
    row[5] = 0.0
    row[6:400] -= 2.0
    chunk = 500
    tokens = torch.cat(
        [
            sample(
                one_row(chunk, row.to(device)), seed=5, position=torch.arange(start, start + chunk, device=device)
            ).tokens.cpu()
            for start in range(0, n_draws, chunk)
        ]
    )
    classes = torch.where(tokens == 5, 0, torch.where((tokens > 5) & (tokens < 400), 1, 2 + tokens * 8 // n_cols))
    of_columns = torch.arange(n_cols)
    classes_of = torch.where(
        of_columns == 5, 0, torch.where((of_columns > 5) & (of_columns < 400), 1, 2 + of_columns * 8 // n_cols)
    )
    probs = torch.zeros(10, dtype=torch.float64).scatter_add(0, classes_of, row.double().softmax(0))
    assert_distributed(classes, probs)


@BY_BOTH
@pytest.mark.exhaustive
def test_columns_far_below_another_are_drawn(way, device):
    """At a gap of 14, 10^5 columns together are drawn 8 times in 100: 49 of 600 draws are expected."""
    row = torch.full((100_000,), -14.0)
    row[777] = 0.0
    wins, x, draws = 0, one_row(20, row.to(device)), 600
    for start in range(0, draws, 20):
        position = torch.arange(start, start + 20, device=device)
        wins += int((sample(x, seed=9, position=position).tokens != 777).sum())
    expected = draws * (1 - row.double().softmax(0)[777].item())
    assert abs(wins - expected) < 5 * math.sqrt(expected)


@pairwise(strength=1)
@pytest.mark.parametrize("way", ["torch", "kernels"], indirect=True)
@pytest.mark.parametrize("filters", [{}, FILTERS[1], FILTERS[-1]], ids=[IDS[0], IDS[1], IDS[-1]])
def test_a_token_depends_on_its_own_row_alone(filters, way, device):
    n_cols, n = 700, few(64, way, 6)
    first, other = (0, 17) if n > 17 else (0, 4)
    x, seed, position = torch.randn(n, n_cols) * 2, torch.randint(2**62, (n,)), torch.randint(2**62, (n,))
    x, seed, position = x.to(device), seed.to(device), position.to(device)

    def drawn(x, seed, position):
        return sample(x, **filters, seed=seed, position=position, return_logprobs="processed", return_kept=True)

    def same(one, other, rows):
        return all(torch.equal(a, b[rows]) for a, b in zip(one, other, strict=True) if a is not None)

    whole = drawn(x, seed, position)
    for row in (first, other):
        rows = slice(row, row + 1)
        assert same(drawn(x[rows], seed[rows], position[rows]), whole, rows)
    neighbours = torch.randn(5, n_cols, device=device)
    neighbours[3] = x[other]
    seeds, positions = seed[:5].clone(), position[:5].clone()
    seeds[3], positions[3] = seed[other], position[other]
    assert drawn(neighbours, seeds, positions).tokens[3] == whole.tokens[other]
    order = torch.randperm(n, device=device)
    assert same(drawn(x[order], seed[order], position[order]), whole, order)
    wide = torch.full((n, n_cols + 13), math.nan, device=device)
    wide[:, 5 : n_cols + 5] = x
    assert same(drawn(wide[:, 5 : n_cols + 5], seed, position), whole, slice(None))
    assert same(drawn(x.T.contiguous().T, seed, position), whole, slice(None))
    assert same(drawn(x, seed.clone(), position.clone()), whole, slice(None))


@pytest.mark.parametrize("way", ["torch", "kernels"], indirect=True)
def test_a_row_with_its_filters_off_is_drawn_as_without(way, device):
    n = few(40, way, 6)
    x = (torch.randn(n, 300) * 2).to(device)
    plain = sample(x, seed=2, position=torch.arange(n, device=device))
    off = torch.arange(n, device=device) % 2 == 0
    drawn = sample(
        x, top_k=torch.where(off, 0, 5), top_p=torch.where(off, 1.0, 0.5), min_p=torch.where(off, -1.0, 0.2),
        seed=2, position=torch.arange(n, device=device),
    )  # fmt: skip
    assert torch.equal(drawn.tokens[off], plain.tokens[off])
    off = {"top_k": 300, "top_p": 1.5, "min_p": 0.0}
    assert torch.equal(sample(x, **off, seed=2, position=torch.arange(n, device=device)).tokens, plain.tokens)


@pytest.mark.parametrize("way", ["torch", "kernels"], indirect=True)
@pytest.mark.parametrize("order", ["sequential", "joint"])
def test_numbers_and_tensors_are_one(order, way, device):
    n = few(50, way, 5)
    x = (torch.randn(n, 90) * 2).to(device)
    numbers = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "seed": -3, "position": 2**63 + 5}
    tensors = {k: torch.tensor([v if v < 2**63 else v - 2**64] * n, device=device) for k, v in numbers.items()}
    scalars = {k: v[0] for k, v in tensors.items()}
    options = {
        "order": order,
        "return_kept": True,
        "return_logprobs": "processed",
        "top_logprobs": 4,
        "return_rank": True,
    }
    first, *others = [sample(x, **each, **options) for each in (numbers, tensors, scalars)]
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("way", ["torch", "kernels"], indirect=True)
def test_seeds_and_positions_are_64_bits(way, device):
    x = torch.zeros(1, 4096, device=device)
    tokens = {sample(x, seed=s, position=p).tokens.item() for s, p in [(0, 0), (1, 0), (2**32, 0), (0, 1), (0, 2**32)]}
    assert len(tokens) == 5
    assert torch.equal(sample(x, seed=-1).tokens, sample(x, seed=2**64 - 1, position=0).tokens)


@pytest.mark.parametrize("way", ["torch", "kernels"], indirect=True)
@pytest.mark.parametrize("filters", [{}, {"top_k": 2000}, {"top_p": 0.9}, {"min_p": 0.5}], ids=str)
def test_rows_of_one_seed_that_is_a_number_are_independent(filters, way, device):
    """Draw i has position i: the first call, one that is kept, one by chosen rows, and what is asked beside tokens."""
    n = few(64, way, 8)
    x = one_row(n, torch.zeros(4096, device=device))
    wanted = sample(x, **filters, seed=7, position=torch.arange(n, device=device)).tokens
    assert len(set(wanted.tolist())) > 0.85 * n
    for _ in range(2):
        assert torch.equal(sample(x, **filters, seed=7).tokens, wanted)
        assert len(set(sample(x, **filters, seed=7, position=0).tokens.tolist())) == 1
    rows = torch.zeros(n, dtype=torch.int64, device=device)
    assert torch.equal(sample(x[:1], **filters, seed=7, row_indices=rows).tokens, wanted)
    assert torch.equal(sample(x, **filters, seed=7, return_logprobs="raw", top_logprobs=2).tokens, wanted)
    assert torch.equal(sample(x, **filters, seed=7, return_logprobs="raw", top_logprobs=70).tokens, wanted)


@pytest.mark.parametrize("way", ["torch", "kernels"], indirect=True)
def test_a_seed_in_a_tensor_has_position_0(way, device):
    x = one_row(4, torch.zeros(4096, device=device))
    for seed in (torch.tensor(7, device=device), torch.full((4,), 7, device=device)):
        for _ in range(2):
            assert torch.equal(sample(x, seed=seed).tokens, sample(x, seed=7, position=0).tokens)


@pytest.mark.parametrize("way", ["torch", "kernels"], indirect=True)
def test_a_generator_draws_rows_of_their_own_and_advances(way, device):
    row, n = torch.zeros(4096), few(64, way, 8)
    x = one_row(n, row.to(device))
    generator = torch.Generator(device).manual_seed(5)
    first, second = (sample(x, generator=generator).tokens for _ in range(2))
    assert len(set(first.tolist())) > 0.85 * n
    assert not torch.equal(first, second)
    assert torch.equal(sample(x, generator=generator.manual_seed(5)).tokens, first)
    torch.manual_seed(6)
    first, second = sample(x).tokens, sample(x).tokens
    assert not torch.equal(first, second)
    torch.manual_seed(6)
    assert torch.equal(sample(x).tokens, first)


@BY_BOTH
@pytest.mark.parametrize("n_cols", [1, 2, 33, 32000, 50257])
def test_vocabularies(n_cols, way, device):
    x = (torch.randn(3, n_cols) * 2).to(device)
    for filters in ({}, {"top_k": 50, "top_p": 0.9}):
        drawn = sample(x, **filters, seed=4, position=torch.arange(3, device=device), return_kept=True)
        assert drawn.kept.shape == (3, -(-n_cols // 32))
        assert ((drawn.tokens >= 0) & (drawn.tokens < n_cols)).all()
    assert torch.equal(sample(x, 0.0).tokens, x.argmax(1))


def test_no_rows(device):
    drawn = sample(torch.empty(0, 9, device=device), top_k=3, seed=1, return_logprobs="raw", top_logprobs=2)
    assert [tuple(each.shape) for each in drawn if each is not None] == [(0,), (0,), (0,), (0, 2), (0, 2)]


def test_every_name_is_public():
    for name in ("sample", "speculative_sample", "penalize", "top_k_mask_logits", "SampleOutput"):
        assert name in fused_softmax.__all__
