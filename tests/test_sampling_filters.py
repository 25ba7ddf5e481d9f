"""The filters on their own, and penalties, against a stable sort and transformers' processors."""

import math
import os

import pytest
import torch
from sampling_cases import hard_rows, kept_by_sort
from torch.testing import assert_close
from transformers.generation import logits_process

import fused_softmax
from fused_softmax import penalize
from fused_softmax.ops.sampling import operators, reference, turns
from fused_softmax.ops.sampling.kernels import judged, wide

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FILTERS = [("top_k", 1), ("top_k", 7), ("top_k", 0), ("top_p", 0.3), ("top_p", 0.9), ("top_p", 1.0), ("min_p", 0.1)]
INF, NAN = math.inf, math.nan
INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("argument", "value"), FILTERS)
def test_a_mask_leaves_what_a_stable_sort_keeps(argument, value, dtype, device):
    x = hard_rows(33).to(dtype)
    y = getattr(fused_softmax, f"{argument}_mask_logits")(x.to(device), value)
    assert y.dtype == dtype
    for row, got in zip(x, y.cpu(), strict=True):
        wanted, nearest = kept_by_sort(row.float(), **{argument: value})
        if nearest > 1e-6:
            kept = torch.zeros(33, dtype=torch.bool)
            kept[sorted(wanted)] = True
            assert torch.equal(got, row.masked_fill(~kept, -INF))


@pytest.mark.parametrize(("argument", "name"), [("top_k", "TopK"), ("top_p", "TopP"), ("min_p", "MinP")])
def test_a_mask_is_that_of_transformers(argument, name, device):
    x, value = torch.randn(16, 300) * 3, 20 if argument == "top_k" else 0.3
    wanted = getattr(logits_process, f"{name}LogitsWarper")(value)(None, x)
    assert torch.equal(getattr(fused_softmax, f"{argument}_mask_logits")(x.to(device), value).cpu(), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("argument", "value"), [each for each in FILTERS if each[0] != "min_p"])
def test_probabilities_are_renormalised(argument, value, dtype, device):
    p = (torch.softmax(torch.randn(9, 70) * 2, 1) * 3).to(dtype)
    p[0] = p[0].masked_fill(p[0] < p[0].median(), 0.0)
    y = getattr(fused_softmax, f"{argument}_renorm_probs")(p.to(device), value)
    assert y.dtype == dtype
    for row, got in zip(p.double(), y.cpu(), strict=True):
        wanted, nearest = kept_by_sort(row.log(), **{argument: value})
        if nearest > 1e-6:
            kept = torch.zeros(70, dtype=torch.bool)
            kept[sorted(wanted)] = True
            left = row.masked_fill(~kept, 0.0)
            assert_close(got, (left / left.sum()).to(dtype), rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("filter", [{"top_p": 0.5}, {"top_p": 1.0}, {"top_k": 3}, {"top_k": 100}], ids=str)
@pytest.mark.parametrize("n_cols", [5, 100, 5000, 20000])
@pytest.mark.parametrize("scale", [3e38, 1e38, 1.0, 1e-30, 1e-38, 1e-44])
def test_probabilities_of_any_magnitude_are_renormalised(scale, n_cols, filter, device):
    p = torch.rand(2, n_cols) * scale
    (name, value), wanted = *filter.items(), reference.renorm_probs(p, **filter)
    found = getattr(fused_softmax, f"{name}_renorm_probs")(p.to(device), value).cpu()
    assert_close(found, wanted, rtol=torch.finfo(torch.float32).eps, atol=1e-44)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("filter", [{"top_p": 0.3}, {"top_k": 500}, {"top_k": 64}], ids=str)
def test_of_equal_probabilities_the_lowest_columns_are_kept(filter, dtype, device):
    """Equal probabilities, and close ones, far below 1: in float32 their logarithms would all be the same."""
    p = torch.full((3, 9000), 1 / 9000)
    p[1, ::2] = 0.0
    p[2] += torch.arange(9000) % 7 * 2.0**-36
    p = p.to(dtype)
    ((name, value),) = filter.items()
    found = getattr(fused_softmax, f"{name}_renorm_probs")(p.to(device), value).cpu()
    assert_close(found, reference.renorm_probs(p, **filter), rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("top_k", [5, 50, 500, 20000])
@pytest.mark.parametrize("n_cols", [1500, 30000])
def test_no_row_is_read_again_where_few_columns_are_above_0(n_cols, top_k, dtype, monkeypatch, device):
    """A compiled kernel does not tell, and has to give the same probabilities."""

    def read_again(*_):
        raise AssertionError("the row is read again")

    if INTERPRETED:
        monkeypatch.setattr(judged, "least_in_row", read_again)
        monkeypatch.setattr(wide, "least_in_row", read_again)
    generator = torch.Generator().manual_seed(n_cols)
    p = torch.zeros(5, n_cols)
    for row, n in zip(p, (1, 20, 49, 300, 1200), strict=True):
        row[torch.randperm(n_cols, generator=generator)[:n]] = torch.rand(n, generator=generator)
    p[4, :3] = 2.0**-140 if dtype == torch.float32 else 2.0**-14
    p = p.to(dtype)
    found = fused_softmax.top_k_renorm_probs(p.to(device), top_k).cpu()
    assert_close(found, reference.renorm_probs(p, top_k=top_k), rtol=torch.finfo(dtype).eps, atol=0)


def test_rows_whose_sums_would_overflow_are_torchs(device):
    """2^23 weights of up to 2^40 units each add up to more than int64 holds."""
    x = torch.zeros(1, 2**23, device=device)
    with fused_softmax.explain() as explained:
        y = fused_softmax.min_p_mask_logits(x, 0.5)
    assert (explained[0].route, torch.equal(x, y)) == ("composed", True)


def test_an_operator_leaves_so_many_columns_to_torch(monkeypatch, device):
    """Whoever calls the operator itself, as a graph of other rows does, has asked for no shape."""
    x = torch.randn(3, 40, device=device)
    draw = torch.compile(lambda x: fused_softmax.sample(x, top_p=0.5, seed=1).tokens, backend="eager")
    wanted = draw(x)
    monkeypatch.setattr(operators, "MOST_COLUMNS", 39)
    monkeypatch.setattr(operators, "draws_of", None)
    assert torch.equal(draw(x), wanted)


@pytest.mark.parametrize("name", ["top_k_mask_logits", "top_p_mask_logits", "min_p_mask_logits", "top_k_renorm_probs"])
def test_a_row_is_the_same_in_every_batch(name, monkeypatch, device):
    function, x = getattr(fused_softmax, name), torch.rand(16, 500).to(device)
    given = torch.randint(1, 400, (16,)) if "top_k" in name else torch.rand(16) / 2 + 0.4
    given = given.to(device)
    whole = function(x, given)
    for row in range(16):
        assert torch.equal(function(x[row : row + 1], given[row : row + 1]), whole[row : row + 1])
        assert torch.equal(function(x[row : row + 1], given[row].item()), whole[row : row + 1])
    wide = torch.full((16, 511), NAN, device=device)
    wide[:, 3:503] = x
    assert torch.equal(function(wide[:, 3:503], given), whole)
    monkeypatch.setattr(turns, "_MOST_BYTES", 3 * 500 * 128)  # three rows at a time
    assert torch.equal(function(x, given), whole)


@pytest.mark.parametrize(
    ("name", "row", "value"),
    [
        ("top_k_mask_logits", [NAN, 1.0, 2.0], 2),
        ("top_p_mask_logits", [INF, 1.0, INF], 0.5),
        ("top_p_mask_logits", [0.0, 1.0, 2.0], torch.tensor([0.0])),
        ("min_p_mask_logits", [0.0, 1.0, 2.0], torch.tensor([1.5])),
        ("top_k_renorm_probs", [0.0, 0.0, 0.0], 2),
        ("top_k_renorm_probs", [0.5, -0.5, 1.0], 2),
        ("top_p_renorm_probs", [0.5, NAN, 1.0], 0.5),
        ("top_p_renorm_probs", [0.5, 0.5, 0.0], torch.tensor([-1.0])),
        ("top_p_renorm_probs", [0.5, INF, 0.0], 0.5),
    ],
)
def test_rows_that_cannot_be_filtered_are_nan(name, row, value, device):
    value = value.to(device) if isinstance(value, torch.Tensor) else value
    assert getattr(fused_softmax, name)(torch.tensor([row], device=device), value).isnan().all()


def test_rows_of_inf_are_filtered(device):
    x = torch.tensor([[0.0, INF, 1.0], [-INF, -INF, -INF]], device=device)
    assert fused_softmax.top_p_mask_logits(x, 0.9).tolist() == [[-INF, INF, -INF], [-INF] * 3]
    assert fused_softmax.min_p_mask_logits(x, 0.1).tolist() == [[-INF, INF, -INF], [-INF] * 3]
    assert fused_softmax.top_k_mask_logits(x, 2).tolist() == [[-INF, INF, 1.0], [-INF] * 3]


def test_repetition_is_that_of_transformers(device):
    x, ids = torch.randn(6, 50) * 4, torch.randint(50, (6, 30))
    wanted = logits_process.RepetitionPenaltyLogitsProcessor(1.3)(ids, x)
    assert_close(penalize(x.to(device), ids.to(device), repetition=1.3).cpu(), wanted, rtol=2e-7, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_penalties_are_counted(dtype, device):
    x, ids = (torch.randn(5, 40) * 4).to(dtype), torch.randint(-1, 42, (5, 60), dtype=torch.int32)
    r, once, each = torch.rand(5) + 0.5, torch.randn(5), torch.randn(5)
    wanted = x.float().clone()
    for row in range(5):
        for column in range(40):
            count = int((ids[row] == column).sum())
            if count:
                value = wanted[row, column]
                value = value * r[row] if value < 0 else value / r[row]
                wanted[row, column] = value - each[row] * count - once[row]
    inputs = [tensor.to(device) for tensor in (x, ids, r, once, each)]
    y = penalize(*inputs)
    assert y.dtype == dtype
    assert_close(y.cpu(), wanted.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
    out = inputs[0].clone()
    assert penalize(out, *inputs[1:], out=out) is out
    assert torch.equal(out, y)
    assert torch.equal(inputs[0].cpu(), x)


def test_without_ids_nothing_is_penalized(device):
    x = torch.randn(3, 20, device=device)
    assert torch.equal(penalize(x, torch.full((3, 4), -1, device=device), 2.0, 1.0, 1.0), x)
    assert torch.equal(penalize(x, torch.empty(3, 0, dtype=torch.int64, device=device), 2.0), x)


def test_a_wrong_penalty_on_the_device_spoils_its_row_alone(device):
    x, ids = torch.randn(3, 20, device=device), torch.zeros(3, 1, dtype=torch.int64, device=device)
    y = penalize(x, ids, repetition=torch.tensor([0.0, 1.0, NAN], device=device))
    assert y.isnan().all(1).tolist() == [True, False, True]


X, IDS = torch.zeros(3, 40), torch.zeros(3, 5, dtype=torch.int64)
REFUSED = [
    ("top_k_mask_logits", (X.double(), 1), TypeError, "logits must be of float32"),
    ("top_k_mask_logits", (X, 1.5), TypeError, "top_k must be an int or a Tensor, not float"),
    ("top_p_mask_logits", (X, 0.0), ValueError, "top_p must be more than 0, got 0.0"),
    ("top_p_mask_logits", (X, torch.ones(4)), ValueError, r"top_p must have shape \(\) or \(3,\), got \(4,\)"),
    ("min_p_mask_logits", (X, 2.0), ValueError, "min_p must be at most 1, got 2.0"),
    ("top_k_renorm_probs", (X[0], 1), ValueError, r"probs must have shape \[n_rows, vocab\], got \(40,\)"),
    ("top_p_renorm_probs", (X, -1.0), ValueError, "top_p must be more than 0, got -1.0"),
    ("penalize", (X, IDS[:2]), ValueError, r"token_ids must have shape \(3, length\), got \(2, 5\)"),
    ("penalize", (X, X), TypeError, "token_ids must be of int64 or int32, got torch.float32"),
    ("penalize", (X, IDS, 0.0), ValueError, "repetition must be more than 0 and finite, got 0.0"),
    ("penalize", (X, IDS, 1.0, INF), ValueError, "presence must be finite, got inf"),
    ("penalize", (X, IDS, 1.0, 0.0, "1"), TypeError, "frequency must be a number or a Tensor, not str"),
    ("penalize", (X, IDS, 1.0, 0.0, 0.0, X.half()), TypeError, "out must be of the logits' torch.float32"),
    ("penalize", (X, IDS, 1.0, 0.0, 0.0, X[:2]), ValueError, r"out must have shape \(3, 40\), got \(2, 40\)"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "error", "message"), REFUSED, ids=lambda each: str(each)[:40])
def test_a_wrong_argument_is_named(name, arguments, error, message):
    with pytest.raises(error, match=f"{name}: {message}"):
        getattr(fused_softmax, name)(*arguments)
