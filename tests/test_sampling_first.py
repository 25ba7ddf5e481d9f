"""Draws that are judged afterwards: the tokens that torch's operations give, distributed as what is kept."""

import os
from dataclasses import replace

import pytest
import torch
import triton.language as tl
from sampling_cases import assert_distributed
from test_sample_kernels import assert_as_reference, drawn_by, random_numbers, rows_of_all_kinds

from fused_softmax import sample
from fused_softmax.core.plan import H200
from fused_softmax.ops.sampling import arrivals, noise, reference
from fused_softmax.ops.sampling.kernels import common, first
from fused_softmax.ops.sampling.launches import FEW, prepare_draws
from fused_softmax.ops.sampling.options import Sampling
from fused_softmax.ops.sampling.plan import plan_draws

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
KERNELS = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="kernels run on a GPU or in the interpreter"
)

JUDGED = {
    "top-p": {"top_p": 0.9},
    "top-p, most are rejected": {"top_p": 0.02},
    "min-p rejects most": {"top_p": 0.9, "min_p": 0.2},
    "top-k": {"top_k": 100},
    "top-k rejects most": {"top_k": 65},
    "joint": {"top_k": 200, "top_p": 0.8, "order": "joint"},
    "equals": {"top_p": 0.5, "temperature": 3.0},
}


def rows(n, n_cols, device, equals=False):
    x = torch.randn(n, n_cols, generator=torch.Generator().manual_seed(n_cols)) * 2
    return (x.round() if equals else x).to(device)


@KERNELS
@pytest.mark.parametrize("stretches", [1, 2])
@pytest.mark.parametrize("filters", JUDGED)
def test_tokens_of_what_filters_keep(filters, stretches, device):
    """With rows that cannot be drawn from, in one part and in several."""
    x = torch.cat([rows(3, 2100, device, filters == "equals"), rows_of_all_kinds(2100, device=device)[3:]])
    plan = plan_draws(len(x), 2100, 4, H200)
    plan = replace(
        plan, stretches=1, num_warps=1, kept_warps=2, bound_warps=2, decide_warps=1, decide_stretches=stretches,
        decide_parts=-(-3 // stretches), redraw_warps=2,
    )  # fmt: skip
    assert_as_reference(x, Sampling(**JUDGED[filters]), plan)


@KERNELS
@pytest.mark.parametrize("retries", [0, 1, 16])
def test_rows_whose_candidates_are_rejected_are_drawn_from_again(retries, monkeypatch, device):
    """As often as is allowed, and then from what is kept."""
    if not INTERPRETED and retries != 16:
        pytest.skip("a compiled kernel has its own limit")
    monkeypatch.setattr(first, "RETRIES", tl.constexpr(retries))
    monkeypatch.setattr(arrivals, "RETRIES", retries)
    x = rows(8, 1500, device) / 2
    seed, position = random_numbers(len(x), x.device)
    judged = reference.judge(x, 1.0, None, 0.05, None, joint=False)
    *_, rejected = arrivals._first_arrivals(
        x, judged.z.exp(), judged.kept, torch.ones_like(judged.kept), seed, position
    )
    assert rejected.any()
    assert_as_reference(x, Sampling(top_p=0.05))


@KERNELS
def test_a_logit_that_has_the_mass_alone_is_the_token(device):
    x = torch.full((2, 1100), -3.0, device=device)
    x[0, 700], x[1, 5], x[1, 900] = 6.0, 5.0, 5.0  # of equals the first is kept
    assert sample(x, top_p=0.05, seed=1).tokens.tolist() == [700, 5]


@KERNELS
def test_equal_logits_are_kept_from_the_lowest_column(device):
    x = torch.zeros(40, 16, device=device)
    tokens = sample(x, top_p=0.3, seed=1).tokens
    assert set(tokens.tolist()) == {0, 1, 2, 3, 4}


@KERNELS
def test_numbers_and_tensors_give_the_same_tokens(device):
    """Whatever other rows ask for: a filter that is off, few columns, top-p of what top-k left."""
    x = rows(6, 1100, device)
    asked = [(0, 0.8), (5, 0.9), (100, 1.0), (100, 0.7), (2000, 0.3), (0, 1.0)]
    k, p = (torch.tensor(each, device=device) for each in zip(*asked, strict=True))
    tokens = sample(x, top_k=k, top_p=p, seed=3, position=7).tokens.tolist()
    assert tokens == [
        sample(x[i : i + 1], top_k=one_k, top_p=one_p, seed=3, position=7).tokens.item()
        for i, (one_k, one_p) in enumerate(asked)
    ]


@KERNELS
@pytest.mark.parametrize("p", [1.0, 0.7])
@pytest.mark.parametrize("k", [0, 5, 100])
def test_every_way_to_give_filters_gives_the_same_tokens(k, p, device):
    x = rows(8, 256, device)
    seed, position = random_numbers(len(x), x.device)
    of_k, of_p = torch.full((8,), k, device=device), torch.full((8,), p, device=device)
    wanted = reference.sample(x, seed, position, 1.0, k, p).tokens
    for top_k in (k, of_k):
        for top_p in (p, of_p):
            assert torch.equal(sample(x, 1.0, top_k, top_p, seed=seed, position=position).tokens, wanted)


@KERNELS
def test_arrivals_below_min_p_are_no_candidates(device):
    x = torch.randn(60, 256, generator=torch.Generator().manual_seed(0)).to(device) * 0.3
    assert_as_reference(x, Sampling(top_p=0.999, min_p=0.8))


def test_under_vmap_tokens_are_the_same():
    x, seed = torch.randn(3, 4, 200), torch.arange(4)
    draw = lambda x: sample(x, 1.0, top_p=0.05, seed=seed, position=1).tokens  # noqa: E731
    assert torch.equal(torch.vmap(draw)(x), torch.stack([draw(each) for each in x]))


@KERNELS
@pytest.mark.parametrize("filters", JUDGED)
def test_a_token_does_not_depend_on_what_is_asked_beside_it(filters, device):
    x = rows(4, 1100, device, filters == "equals")
    bare = sample(x, **JUDGED[filters], seed=5)
    more = sample(x, **JUDGED[filters], seed=5, return_kept=True, return_logprobs="processed", top_logprobs=3)
    assert torch.equal(bare.tokens, more.tokens)
    assert reference.unpacked(more.kept, 1100).gather(1, more.tokens[:, None]).all()
    assert more.logprobs.isfinite().all()


@KERNELS
@pytest.mark.parametrize("filters", ["top-p", "min-p rejects most", "joint"])
def test_a_row_draws_the_same_in_any_batch(filters, device):
    """Alone, among others, in another order, and however rows meet the chip."""
    x = rows(7, 2100, device)
    options = Sampling(**JUDGED[filters])
    seed, position = random_numbers(len(x), x.device)
    whole = drawn_by(prepare_draws(x, options, seed, position, None), x, options).tokens
    order = torch.tensor([3, 0, 6, 2, 5, 1, 4], device=device)
    for at in (order, order[:1], order[2:5]):
        draw = prepare_draws(x[at], options, seed[at], position[at], None)
        assert torch.equal(drawn_by(draw, x[at], options, seed[at], position[at]).tokens, whole[at])


def test_kernels_have_the_limits_of_their_reference():
    for name in ("ARRIVALS", "RECORDS", "RETRIES"):
        assert getattr(first, name).value == getattr(arrivals, name), name
    assert (common.STREAMS.value, FEW) == (noise.STREAMS, reference.FEW)


def test_arrivals_are_independent_draws_from_the_row():
    """Pairs of the first two arrivals, of columns of one lane and of others."""
    weights = torch.zeros(1, 1100, dtype=torch.float64)
    at = torch.tensor([0, 3, 40, 260, 1090])
    weights[0, at] = torch.tensor([0.4, 0.1, 0.2, 0.2, 0.1], dtype=torch.float64)
    n = 20_000
    position = torch.arange(n)
    x, none = torch.zeros(n, 1100), torch.zeros(n, 1100, dtype=torch.bool)
    arrived = []
    judge = arrivals._is_above

    def noted(x, col):
        """Every arrival counts as a record, so that each is noted."""
        arrived.append(col)
        return torch.ones_like(none)

    arrivals._is_above = noted
    try:
        arrivals._first_arrivals(x, weights.expand(n, -1), none, ~none, torch.full((n,), 9), position)
    finally:
        arrivals._is_above = judge
    first_two = torch.stack(arrived[1:3])  # the columns before the second and the third arrival
    of_five = (first_two[:, :, None] == at).long().argmax(2)
    probs = weights[0, at]
    assert_distributed(of_five[0] * 5 + of_five[1], (probs[:, None] * probs).flatten())


@pytest.mark.parametrize("limits", [(8, 4, 16), (1, 1, 16), (2, 1, 0), (8, 1, 1)], ids=str)
@pytest.mark.parametrize("filters", JUDGED)
def test_tokens_are_distributed_as_what_is_kept(filters, limits, monkeypatch):
    """Also where candidates are so few that they are rejected, and rows are drawn from again."""
    for name, limit in zip(("ARRIVALS", "RECORDS", "RETRIES"), limits, strict=True):
        monkeypatch.setattr(arrivals, name, limit)
    options = dict(JUDGED[filters])
    row = torch.randn(1, 300, generator=torch.Generator().manual_seed(2)) * 1.5
    row = row.round() if filters == "equals" else row
    n = 20_000
    drawn = reference.sample(row.expand(n, -1), torch.full((n,), 11), torch.arange(n), **options)
    given = options.get("temperature", 1.0), options.get("top_k"), options.get("top_p"), options.get("min_p")
    judged = reference.judge(row, *given, joint=options.get("order") == "joint")
    assert_distributed(drawn.tokens, judged.probs[0])
