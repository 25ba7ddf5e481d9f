"""Draws by the kernels against those of torch's operations: the same tokens, kept columns and log-probabilities."""

import math
import os
from dataclasses import replace
from unittest import mock

import pytest
import torch

from fused_softmax import sample
from fused_softmax.core import launch
from fused_softmax.core.plan import H200
from fused_softmax.ops.sampling import one_device, reference
from fused_softmax.ops.sampling.calls import prepare_sample
from fused_softmax.ops.sampling.kernels import kept as sample_kept
from fused_softmax.ops.sampling.kernels import wide as sample_wide
from fused_softmax.ops.sampling.launches import Numbers, greatest, prepare_draws
from fused_softmax.ops.sampling.options import Sampling
from fused_softmax.ops.sampling.plan import plan_draws

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="kernels run on a GPU or in the interpreter"
)

FILTERS = {
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.6},
    "min-p": {"min_p": 0.1},
    "all": {"top_k": 20, "top_p": 0.7, "min_p": 0.02},
    "joint": {"top_k": 20, "top_p": 0.3, "order": "joint"},
    "greedy": {"temperature": 0.0, "top_p": 0.3},
    "greedy, no other": {"temperature": 0.0},
    "greedy, min-p": {"temperature": 0.0, "min_p": 0.1},
    "none": {},
}


def rows_of_all_kinds(n_cols, dtype=torch.float32, device="cpu"):
    """Nine rows: three of random logits, then NaN, one inf, two inf, one that is possible, none, and all equal."""
    x = torch.randn(9, n_cols, generator=torch.Generator().manual_seed(n_cols)) * 2
    x[3, 0], x[4, n_cols // 2], x[5, :2], x[6, 1:], x[7], x[8] = math.nan, math.inf, math.inf, -math.inf, -math.inf, 2.0
    return x.to(device, dtype)


def random_numbers(n, device):
    return torch.arange(n, device=device) * 77 - 5, torch.arange(n, device=device) * 2**33 + 3


def drawn_by(draw, x, options, seed=None, position=None):
    if seed is None:
        seed, position = random_numbers(len(x) if options.row_indices is None else len(options.row_indices), x.device)
    numbers = Numbers.of(options, seed, position)
    return draw(x, numbers, options.logit_bias, options.bitmask, options.row_indices, None)


def assert_as_reference(x, options, plan=None):
    seed, position = random_numbers(len(x), x.device)
    options = replace(options, return_kept=options.return_kept or options.return_logprobs is not None)
    logprobs = options.return_logprobs == "processed"
    drawn = drawn_by(prepare_draws(x, options, seed, position, None, logprobs=logprobs, plan=plan), x, options)
    wanted = reference.sample(x, seed, position, **options.options())
    assert torch.equal(drawn.valid, wanted.valid)
    assert torch.equal(drawn.tokens, wanted.tokens)
    if options.return_kept:
        assert torch.equal(drawn.kept, wanted.kept)
    if logprobs:
        torch.testing.assert_close(drawn.logprobs, wanted.logprobs, rtol=1e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("temperature", [0.7, 0.0])
@pytest.mark.parametrize("n_cols", [1, 33, 2100])
def test_draws_without_filters(n_cols, temperature, device):
    if n_cols == 1:
        x = torch.tensor([[0.5], [math.inf], [-math.inf], [math.nan]], device=device)
    else:
        x = rows_of_all_kinds(n_cols, device=device)
    for parts in (1, 3):
        plan = plan_draws(len(x), n_cols, 4, H200)
        plan = replace(plan, stretches=1, parts=parts, part_stretches=-(-3 // parts))
        assert_as_reference(x, Sampling(temperature), plan)


@pytest.mark.parametrize("held", [True, False], ids=["few lanes hold the boundary", "the row is read again"])
@pytest.mark.parametrize("filters", FILTERS)
def test_filters(filters, held, device):
    """The same by both ways: fewer lanes than a boundary takes make the kernel read the row again."""
    x = rows_of_all_kinds(1100, device=device)[[0, 3, 4, 5, 6, 7, 8]]
    plan = replace(plan_draws(len(x), 1100, 4, H200), capacity=64 if held else 2, stretches=2, kept_warps=2)
    assert_as_reference(x, Sampling(**FILTERS[filters], return_logprobs="processed"), plan)


WIDE = {
    "top-p": {"top_p": 0.9},
    "top-p, ties": {"top_p": 0.9, "temperature": 2.0},
    "top-k": {"top_k": 900},
    "top-k, then top-p": {"top_k": 300, "top_p": 0.8},
    "few of top-k, then top-p": {"top_k": 60, "top_p": 0.2},
    "a boundary of all, not of top-k": {"top_k": 1000, "top_p": 0.9},
    "many of top-k, then top-p": {"top_k": 3000, "top_p": 0.8},
    "joint": {"top_k": 2000, "top_p": 0.9, "order": "joint"},
    "min-p": {"min_p": 0.001},
}


@pytest.mark.parametrize("listed", [1024, 64], ids=["a sample finds the boundary", "a sample misleads"])
@pytest.mark.parametrize("filters", WIDE)
def test_boundaries_below_what_is_held(filters, listed, device):
    """Rows of more logits than are listed: where a boundary is not among these, the row is read again."""
    x = torch.randn(3, 4200, generator=torch.Generator().manual_seed(5)).to(device) * 2
    x = x.round() / 2 if "ties" in filters else x
    plan = plan_draws(len(x), 4200, 4, H200)
    plan = replace(
        plan, stretches=1, kept_warps=2, bound_warps=2, parts=2, part_stretches=3, num_warps=1, listed=listed
    )
    assert_as_reference(x, Sampling(**WIDE[filters], return_logprobs="processed"), plan)


@pytest.mark.parametrize("filters", [{"top_p": 0.9}, {"top_k": 60000}], ids=["top-p", "top-k"])
def test_a_low_boundary_among_many_columns_is_found_by_its_sample(filters, monkeypatch, device):
    """Rows used to be read again. A compiled kernel does not tell, and has to give the same tokens."""

    def read_again(*_):
        raise AssertionError("the row is read again")

    if INTERPRETED:
        monkeypatch.setattr(sample_wide, "least_in_row", read_again)
    x = torch.randn(2, 262144, generator=torch.Generator().manual_seed(3)).to(device) * 2
    assert_as_reference(x, Sampling(**filters))


@pytest.mark.parametrize("filters", [{"top_p": 0.95}, {"top_k": 190}, {"top_k": 199, "top_p": 0.99}], ids=str)
def test_a_boundary_among_twice_as_many_lanes_takes_a_second_look(filters, monkeypatch, device):
    """A compiled kernel does not tell that it looked again, and has to give the same tokens."""
    found = []
    again = sample_kept.choose_among_more

    def more(*given):
        found.append(again(*given))
        return found[-1]

    if INTERPRETED:
        monkeypatch.setattr(sample_kept, "choose_among_more", more)
        monkeypatch.setattr(sample_kept, "open_row", mock.Mock(side_effect=AssertionError("the row is left open")))
    x = torch.full((2, 128256), -20.0)
    x[:, torch.randperm(4008, generator=torch.Generator().manual_seed(1))[:200] * 32] = -torch.arange(200) / 50
    assert_as_reference(x.to(device), Sampling(**filters, return_logprobs="processed"))
    assert found or not INTERPRETED


@pytest.mark.parametrize("filters", [{"top_p": 0.9}, {"top_p": 0.9, "min_p": 1e-4}], ids=str)
def test_rows_whose_nucleus_is_wide_are_not_looked_at_by_lanes(filters, monkeypatch, device):
    """All maxima of lanes together say so. With min-p, which may end above, a row is looked at first."""
    looked = []
    among = sample_kept.choose_among

    def look(*given):
        looked.append(1)
        return among(*given)

    if INTERPRETED:
        monkeypatch.setattr(sample_kept, "choose_among", look)
    x = torch.randn(2, 9000, generator=torch.Generator().manual_seed(4)).to(device)
    assert_as_reference(x, Sampling(**filters, return_logprobs="processed"))
    assert (len(looked) == (2 if "min_p" in filters else 0)) or not INTERPRETED


ABOVE = {
    "few": {"min_p": 0.3},
    "many": {"min_p": 0.001},
    "all": {"temperature": 0.6},
    "of a tensor": {"min_p": torch.tensor([0.1, 0.2, 0.02, 2.0, 0.0, 0.1, 0.1, 0.5, 0.1])},
}


@pytest.mark.parametrize("stretches", [1, 2])
@pytest.mark.parametrize("kept", ABOVE)
def test_what_a_rows_maximum_decides_is_drawn_in_parts(kept, stretches, device):
    """Parts without a kept logit, and with more lanes of them than a program takes at a time; memory holds anything."""
    x = rows_of_all_kinds(2100, device=device)
    options = Sampling(**ABOVE[kept], return_logprobs="processed", return_kept=True)
    if isinstance(options.min_p, torch.Tensor):
        options = replace(options, min_p=options.min_p.to(device))
    plan = replace(plan_draws(len(x), 2100, 4, H200), above_stretches=stretches, above_warps=1)
    torch.use_deterministic_algorithms(True)
    try:
        assert_as_reference(x, options, plan)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_logits_with_bias_bitmask_and_rows(dtype, device):
    x = rows_of_all_kinds(77, dtype, device)
    rows = torch.tensor([2, 0, 9, -1, 1, 2, 4], device=device)
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(7, 77, generator=generator).to(device, torch.bfloat16)
    bitmask = torch.randint(-(2**31), 2**31 - 1, (7, 4), generator=generator, dtype=torch.int32).to(device)
    bitmask[4] = 0
    options = Sampling(
        torch.linspace(0, 2, 7, device=device), torch.arange(7, device=device) * 5, logit_bias=bias, bitmask=bitmask,
        row_indices=rows, return_kept=True,
    )  # fmt: skip
    seed, position = random_numbers(7, device)
    drawn = drawn_by(prepare_draws(x, options, seed, position, None), x, options)
    wanted = reference.sample(x, seed, position, **options.options())
    for name in ("valid", "tokens", "kept"):
        assert torch.equal(getattr(drawn, name), getattr(wanted, name)), name


@pytest.mark.parametrize("large", [1e6, 3e38], ids=["an offset", "near the greatest number"])
def test_far_logits_are_drawn_as_near_ones(large, device):
    """Scores by another origin: fp32 has no two neighbours of 1e6 that differ by less than 1 / 16."""
    x = torch.full((64, 40), large, device=device)
    x[:, 1::2] = -large
    seed, position = 11, torch.arange(64, device=device)
    drawn = sample(x, seed=seed, position=position)
    wanted = reference.sample(x, torch.full((64,), 11, device=device), position)
    assert drawn.valid.all()
    assert torch.equal(drawn.tokens, wanted.tokens)
    assert len(drawn.tokens.unique()) > 10


def test_some_rows_have_temperature_0(device):
    x = rows_of_all_kinds(300, device=device)
    temperature = torch.tensor([0.0, 1.0, 0.5, 0.0, 1.0, 0.0, 2.0, 0.0, 1.0], device=device)
    assert_as_reference(x, Sampling(temperature))


def test_numbers_are_given_anew_with_every_call(device):
    x = rows_of_all_kinds(200, device=device)[:3]
    options = Sampling(1.0, 5, 0.9)
    draw = prepare_draws(x, options, 1, 2**40, None)
    for seed, position, temperature, k in ((1, 2**40, 1.0, 5), (-(2**62) - 3, 7, 0.3, 2), (2**31, -1, 2.0, 100)):
        options = Sampling(temperature, k, 0.9)
        many = [torch.full((3,), number, device=device) for number in (seed, position)]
        assert torch.equal(
            drawn_by(draw, x, options, seed, position).tokens, reference.sample(x, *many, **options.options()).tokens
        )


REPORTS = {
    "of the logits as given": {"return_logprobs": "raw"},
    "as given, by top-p": {"return_logprobs": "raw", "top_p": 0.8, "temperature": 0.6},
    "as given, by top-k": {"return_logprobs": "raw", "top_k": 9, "temperature": 1.7},
    "as given, by min-p": {"return_logprobs": "raw", "min_p": 0.1, "temperature": 0.6},
    "as given, of the greatest one": {"return_logprobs": "raw", "top_p": 0.8, "temperature": 0.0},
    "of all columns": {"return_logprobs": "processed", "temperature": 0.6},
    "of what filters kept": {"return_logprobs": "processed", "top_k": 9, "temperature": 0.7},
    "of the greatest one": {"return_logprobs": "processed", "temperature": 0.0},
}


@pytest.mark.parametrize(
    ("n_top", "held"), [(0, True), (5, True), (64, True), (5, False), (64, False)],
    ids=["the token's", "5 of few lanes", "64 of few lanes", "5 of a row read again", "64 of a row read again"],
)  # fmt: skip
@pytest.mark.parametrize("of", REPORTS)
def test_log_probabilities_of_tokens_and_of_the_greatest(of, n_top, held, device):
    x = rows_of_all_kinds(1100, device=device)
    x[2] = x[2].round()  # many of one logit
    options = Sampling(**REPORTS[of], top_logprobs=n_top, return_rank=True)
    plan = replace(plan_draws(len(x), 1100, 4, H200), capacity=64 if held else 2, stretches=1, kept_warps=2)
    assert_reported(x, options, plan)


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 200, "top_p": 0.9}, {"min_p": 0.05}], ids=str
)
def test_logits_are_not_read_again_for_log_probabilities(filters, device, monkeypatch):
    """Unless they are other logits than those that were drawn from."""
    x = rows_of_all_kinds(1100, device=device)
    prepared: list = []
    prepare = launch.prepare
    monkeypatch.setattr(launch, "prepare", lambda kernel, *a, **b: prepared.append(kernel) or prepare(kernel, *a, **b))

    def reads(**options):
        prepared.clear()
        assert_reported(x, Sampling(0.7, **filters, top_logprobs=5, **options))
        return sum(kernel.__name__ in ("_draw", "_stretches") for kernel in prepared)

    bias = torch.zeros(1100, device=device)
    assert (reads(return_logprobs="raw"), reads(return_logprobs="raw", logit_bias=bias)) == (1, 2)
    assert (reads(return_logprobs="processed"), reads(return_logprobs="processed", logit_bias=bias)) == (1, 1)


@pytest.mark.parametrize("capacity", [64, 1], ids=["few lanes hold the greatest", "the row is read again"])
def test_log_probabilities_with_bias_bitmask_and_rows(capacity, device):
    """What a bitmask hides counts in the distribution of the logits as given, and in no other."""
    x = rows_of_all_kinds(77, torch.bfloat16, device)
    generator = torch.Generator().manual_seed(1)
    bitmask = torch.randint(-(2**31), 2**31 - 1, (7, 4), generator=generator, dtype=torch.int32).to(device)
    bias = torch.randn(7, 77, generator=generator).to(device)
    rows = torch.tensor([2, 0, 9, 3, 1, 2, 4], device=device)
    for kind in ("raw", "processed"):
        options = Sampling(
            0.5, 30, logit_bias=bias, bitmask=bitmask, row_indices=rows, return_logprobs=kind, top_logprobs=20
        )
        assert_reported(x, options, replace(plan_draws(7, 77, 2, H200), capacity=capacity))


def test_the_logits_as_given_have_what_a_bitmask_hides(device):
    """A second inf, or a NaN: what is left can be drawn from, and its log-probability is NaN."""
    x = rows_of_all_kinds(77, device=device)[[5, 3]]
    bitmask = torch.tensor([[~2, -1, -1], [~1, -1, -1]], dtype=torch.int32, device=device)
    for kind in ("raw", "processed"):
        assert_reported(x, Sampling(bitmask=bitmask, return_logprobs=kind, top_logprobs=3))


def test_memory_that_is_new_holds_anything(device):
    """Torch fills it here, with NaN and the greatest integers."""
    x = rows_of_all_kinds(1100, device=device)[[0, 6, 7]]
    plan = replace(plan_draws(len(x), 1100, 4, H200), capacity=2, stretches=1, kept_warps=2)
    torch.use_deterministic_algorithms(True)
    try:
        assert_reported(x, Sampling(**REPORTS["of the logits as given"], top_logprobs=5), plan)
    finally:
        torch.use_deterministic_algorithms(False)


def assert_reported(x, options, plan=None):
    seed, position = random_numbers(len(x) if options.row_indices is None else len(options.row_indices), x.device)
    drawn = drawn_by(prepare_sample(x, options, seed, position, None, plan), x, options)
    wanted = reference.sample(x, seed, position, **options.options())
    assert torch.equal(drawn.tokens, wanted.tokens)
    assert torch.equal(drawn.valid, wanted.valid)
    assert drawn.kept is None
    near = {"rtol": 1e-5, "atol": 2e-5, "equal_nan": True}
    torch.testing.assert_close(drawn.logprobs, wanted.logprobs, **near)
    if options.return_rank:
        assert torch.equal(drawn.rank, wanted.rank)
    if options.top_logprobs:
        torch.testing.assert_close(drawn.top_logprobs, wanted.top_logprobs, **near)
        assert torch.equal(drawn.top_tokens, wanted.top_tokens)


def test_the_greatest_are_those_of_a_stable_sort(device):
    x = rows_of_all_kinds(50, device=device)[[0, 4, 6, 8]].round()
    values, cols = greatest(x, 7)
    wanted = x.sort(dim=1, descending=True, stable=True)
    assert torch.equal(values, wanted.values[:, :7])
    assert torch.equal(cols, wanted.indices[:, :7])


def test_a_call_is_kept_whatever_its_numbers_are(device):
    x = rows_of_all_kinds(120, device=device)[:3]
    position = torch.arange(3, device=device)
    for temperature, k, p, seed in ((1.0, 5, 0.9, 1), (0.5, 9, 0.5, -7), (0.0, 119, 0.1, 2**63), (1e-40, 3, 1e-40, 4)):
        y = sample(x, temperature, k, p, seed=seed, position=position)
        seeds = torch.full((3,), (seed + 2**63) % 2**64 - 2**63, device=device)
        wanted = reference.sample(x, seeds, position, temperature, k, p)
        assert torch.equal(y.tokens, wanted.tokens), (temperature, k, p, seed)
    with pytest.raises(ValueError, match="temperature must be at least 0"):
        sample(x, -1.0, 5, 0.9, seed=1, position=position)
    with pytest.raises(ValueError, match="top_p must be more than 0"):
        sample(x, 1.0, 5, 0.0, seed=1, position=position)


def test_a_temperature_of_0_finds_no_call_of_another(device):
    """It once did where min-p was the only filter: a column was drawn, not the greatest."""
    x = rows_of_all_kinds(120, device=device)[[0, 8]]
    position = torch.arange(2, device=device)
    for temperature in (1.0, 0.0):
        y = sample(x, temperature, min_p=0.01, seed=3, position=position, return_logprobs="processed")
    assert torch.equal(y.tokens, x.argmax(1))
    assert torch.equal(y.logprobs, torch.zeros(2, device=device))


def test_a_call_without_a_seed_is_prepared_once(device, monkeypatch):
    """By a generator too: its seeds are tensors, which a kept call takes anew."""
    prepared = []

    def counted(*arguments, **options):
        prepared.append(arguments)
        return prepare_sample(*arguments, **options)

    monkeypatch.setattr(one_device, "prepare_sample", counted)
    x = torch.zeros(2, 900, device=device)
    generator = torch.Generator(device).manual_seed(1)
    first, second, third = (sample(x, top_k=800, generator=each).tokens for each in (generator, generator, None))
    assert len(prepared) == 1
    assert torch.equal(sample(x, top_k=800, generator=generator.manual_seed(1)).tokens, first)
    assert len({tuple(each.tolist()) for each in (first, second, third)}) == 3
