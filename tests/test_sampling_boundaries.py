"""Where top-p and min-p end: rows whose sums meet a boundary, as numbers and as tensors, by all that filters."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from products import pairwise
from sampling_cases import columns

import fused_softmax
from fused_softmax import sample
from fused_softmax.ops.sampling import reference

WAYS = pytest.mark.parametrize("way", ["torch", "kernels"], indirect=True)
# How a parameter is given. A float16 tensor would move a boundary by more than is tolerated.
GIVEN = {
    "a number": lambda p, n, device: p,
    "numpy's": lambda p, n, device: np.float64(p),
    "float32 of a row": lambda p, n, device: torch.full((n,), p, device=device),
    "float32 of all": lambda p, n, device: torch.tensor(p, device=device),
    "float64 of a row": lambda p, n, device: torch.full((n,), p, dtype=torch.float64, device=device),
}


def kept_by(function, probs, name, value, device):
    """Sets of columns that are kept of rows of probabilities."""
    logits = torch.tensor(probs, dtype=torch.float64).log().float().to(device)
    if function == "sample":
        return [columns(bits) for bits in sample(logits, **{name: value}, seed=1, return_kept=True).kept]
    if function == "sample, report":
        asked = {"return_logprobs": "processed", "top_logprobs": logits.shape[1]}
        top = sample(logits, **{name: value}, seed=1, **asked).top_tokens
        return [{c for c in row if c >= 0} for row in top.tolist()]
    if function == "mask":
        left = getattr(fused_softmax, f"{name}_mask_logits")(logits, value) > -math.inf
    else:
        given = torch.tensor(probs, dtype=torch.float32, device=device)
        left = fused_softmax.top_p_renorm_probs(given, value) > 0
    return [set(row.nonzero().flatten().tolist()) for row in left]


FUNCTIONS = "sample", "sample, report", "mask", "renorm"
ROWS = {  # (probabilities, top_p, the columns that are kept)
    "two of three": ([[0.5, 0.3, 0.2]], 0.8, [{0, 1}]),
    "half": ([[0.5, 0.3, 0.2]], 0.5, [{0}]),
    "of equal ones one": ([[0.2] * 5], 0.2, [{0}]),
    "of equal ones three": ([[0.2] * 5], 0.6, [{0, 1, 2}]),
    "of ten nine": ([[0.1] * 10], 0.9, [set(range(9))]),
    # What transformers and vLLM ask of their own filters.
    "transformers": ([[0.3, 0.1, 0.1, 0.5], [0.15, 0.3, 0.3, 0.25]], 0.8, [{0, 3}, {1, 2, 3}]),
    "vLLM": ([[0.2, 0.3, 0.5], [0.5, 0.1, 0.4]], 0.79, [{1, 2}, {0, 2}]),
    "all": ([[0.2, 0.3, 0.5], [0.5, 0.1, 0.4]], 1.0, [{0, 1, 2}] * 2),
    "a hair more": ([[0.5, 0.3, 0.2]], 0.8 * (1 + 2**-19), [{0, 1, 2}]),
    "a hair less": ([[0.5, 0.3, 0.2]], 0.5 * (1 - 2**-19), [{0}]),
}


@pairwise()
@WAYS
@pytest.mark.parametrize("how", GIVEN)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("row", ROWS)
def test_a_sum_that_is_top_p_but_for_float32_has_reached_it(row, function, how, way, device):
    probs, p, wanted = ROWS[row]
    assert kept_by(function, probs, "top_p", GIVEN[how](p, len(probs), device), device) == wanted


@pairwise()
@WAYS
@pytest.mark.parametrize("how", GIVEN)
@pytest.mark.parametrize("function", FUNCTIONS[:3])
@pytest.mark.parametrize(("p", "wanted"), [(0.2, 4), (0.6, 2), (1.0, 1), (0.2 * (1 + 2**-19), 2), (0.6 * 1.001, 1)])
def test_a_share_that_is_min_p_but_for_float32_is_kept(p, wanted, function, how, way, device):
    found = kept_by(function, [[0.5, 0.3, 0.1, 0.1]], "min_p", GIVEN[how](p, 1, device), device)
    assert found == [set(range(wanted))]


@WAYS
@settings(
    max_examples=40, deadline=None, database=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # a way is the same for all examples
)  # fmt: skip
@given(
    counts=st.lists(st.integers(1, 50), min_size=2, max_size=40), place=st.integers(0, 2**30),
    how=st.sampled_from(sorted(GIVEN)), function=st.sampled_from(FUNCTIONS),
)  # fmt: skip
def test_fractions_that_meet_a_boundary(counts, place, how, function, way, device):
    """Probabilities count / total, and top_p the sum of the greatest of them, each the nearest double."""
    counts = sorted(counts, reverse=True)
    n, total = place % (len(counts) - 1) + 1, sum(counts)
    p = float(Fraction(sum(counts[:n]), total))
    found = kept_by(function, [[count / total for count in counts]], "top_p", GIVEN[how](p, 1, device), device)
    assert found == [set(range(n))]


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(seed=st.integers(0, 2**31), n=st.integers(2, 400), spread=st.floats(0.0, 8.0), near=st.integers(-60, 60))
def test_the_reference_is_exact_but_for_what_logits_lose(seed, n, spread, near):
    """top_p is near / 4 times 2^-22 away from a sum, which has reached it within 4 of these."""
    x = (torch.randn(1, n, generator=torch.Generator().manual_seed(seed)) * spread).sort(descending=True).values
    weights = [math.exp(each - x[0, 0].item()) for each in x[0].tolist()]
    place, total = seed % n, math.fsum(weights)
    p = math.fsum(weights[: place + 1]) / total * (1 + near * 2.0**-24)
    if p >= 1 or abs(near - 4) < 2:
        return
    through = [math.fsum(weights[: i + 1]) for i in range(n)]
    wanted = next(i + 1 for i, s in enumerate(through) if s >= p * total * (1 - 2**-22))
    assert int((reference.mask_logits(x, top_p=p) > -math.inf).sum()) == wanted


LONG = {"few lanes": (1.5, 0.3), "many lanes": (1.5, 0.9), "peaked": (5.0, 0.97), "wide": (0.5, 0.5)}


@pairwise()
@pytest.mark.parametrize("order", ["sequential", "joint"])
@pytest.mark.parametrize("top_k", [None, 40, 2500])
@pytest.mark.parametrize("away", [-1, 1])
@pytest.mark.parametrize("n_cols", [33, 1100, 4200])
@pytest.mark.parametrize("rows", LONG)
def test_kernels_differ_only_within_2_to_the_minus_20(rows, n_cols, away, top_k, order, device):
    """A row's sums of a number of columns, as doubles; top_p is 2^-19 of one more or less."""
    spread, share = LONG[rows]
    x = torch.randn(1, n_cols, generator=torch.Generator().manual_seed(n_cols)) * spread
    weights = (x.double() - x.max().double()).exp().sort(descending=True).values[0]
    k = min(top_k or n_cols, n_cols)
    total = weights[:k].sum() if order == "sequential" else weights.sum()
    n = int((weights.cumsum(0) < share * total).sum()) + 1
    n = min(n, k - 1)
    p = (weights[:n].sum() / total).item() * (1 + away * 2.0**-19)
    drawn = sample(x.to(device), top_k=top_k, top_p=p, order=order, seed=1, return_kept=True)
    kept = columns(drawn.kept[0])
    assert len(kept) == n + (away > 0)
    assert kept == set(x[0].sort(descending=True, stable=True).indices[: len(kept)].tolist())


@pytest.mark.parametrize("p", [1e-3, 0.0123, 0.25, 0.75])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 7.0])
def test_min_p_of_kernels_is_exact_to_2_to_the_minus_20(temperature, p, device):
    """One logit a little above the bound, and one a little below it, of rows of many magnitudes."""
    m = torch.tensor([0.25, 3.0, -40.0, 900.0], dtype=torch.float64)
    bound = m + math.log(p) * torch.tensor(temperature).item()
    step = 2.0**-19 * torch.tensor(temperature).item() + bound.abs() * 2.0**-23
    x = torch.stack([m, bound + step, bound - step], 1).float().to(device)
    drawn = sample(x, temperature, min_p=p, seed=1, return_kept=True)
    assert [columns(bits) for bits in drawn.kept] == [{0, 1}] * 4
