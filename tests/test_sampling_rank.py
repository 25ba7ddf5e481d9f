"""return_rank of sample: 1, and as many as columns have a greater logit than the token."""

import math

import pytest
import torch
from products import pairwise
from sampling_cases import hard_rows

from fused_softmax import explain, sample

FILTERS = [{}, {"temperature": 0.7}, {"top_k": 20}, {"top_k": 90, "top_p": 0.9}, {"top_p": 0.8}, {"min_p": 0.02}]
BESIDE = ["nothing", "bias", "bitmask", "penalties", "row_indices"]


def given_of(beside, n, n_cols, device):
    generator = torch.Generator().manual_seed(8)
    return {
        "nothing": {},
        "bias": {"logit_bias": torch.randn(n, n_cols, generator=generator).to(device)},
        "bitmask": {"bitmask": torch.randint(-(2**31), 2**31, (n, -(-n_cols // 32)), generator=generator).int()},
        "penalties": {
            "token_ids": torch.randint(0, n_cols, (n, 9), generator=generator), "repetition": 1.5, "presence": 0.5,
        },
        "row_indices": {"row_indices": torch.arange(n).flip(0)},
    }[beside]  # fmt: skip


@pairwise(("filters", "kind", "beside"), ("way", "top_logprobs", "kind"))
@pytest.mark.parametrize("way", ["torch", "kernels"], indirect=True)
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("kind", ["raw", "processed"])
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("top_logprobs", [0, 3, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_count_greater_logits(way, filters, kind, beside, top_logprobs, dtype, device):
    n_cols = 300
    x = hard_rows(n_cols).to(dtype).to(device)
    n = len(x)
    given = {name: each.to(device) if isinstance(each, torch.Tensor) else each
             for name, each in given_of(beside, n, n_cols, device).items()}  # fmt: skip
    with explain() as explained:
        drawn = sample(
            x, **filters, **given, seed=3, return_logprobs=kind, top_logprobs=top_logprobs, return_rank=True
        )  # fmt: skip
    assert explained[0].route == ("kernel" if way == "kernels" else explained[0].route)
    assert (drawn.rank.dtype, drawn.rank.shape) == (torch.int64, (n,))
    # By what is asked beside it: all columns, the greatest first.
    order = sample(x, **filters, **given, seed=3, return_logprobs=kind, top_logprobs=n_cols)
    assert torch.equal(drawn.tokens, order.tokens)
    rows = x if "row_indices" not in given else x[given["row_indices"]]
    for i in range(n):
        if not drawn.valid[i]:
            assert drawn.rank[i] == 0
            continue
        if kind == "raw":
            wanted = 1 + (rows[i] > rows[i, drawn.tokens[i]]).sum()
        else:
            wanted = 1 + (order.top_logprobs[i] > order.logprobs[i] + 1e-4).sum()
            most = 1 + (order.top_logprobs[i] > order.logprobs[i] - 1e-4).sum()
            assert wanted <= drawn.rank[i] <= most
            continue
        assert drawn.rank[i] == wanted


@pytest.mark.parametrize("way", ["torch", "kernels"], indirect=True)
def test_ranks_of_rows_with_infinities_and_of_hidden_ones(way, device):
    x = torch.tensor([[0.0, math.inf, 2.0], [math.nan, 1.0, 3.0], [2.0, 5.0, 1.0], [-math.inf] * 3], device=device)
    bits = torch.tensor([[7], [6], [5], [7]], dtype=torch.int32, device=device)
    raw = sample(x, 0.0, bitmask=bits, seed=1, return_logprobs="raw", return_rank=True)
    assert raw.tokens.tolist() == [1, 2, 0, 0]
    assert raw.rank.tolist() == [1, 1, 2, 0]
    processed = sample(x, 0.0, bitmask=bits, seed=1, return_logprobs="processed", return_rank=True)
    assert processed.rank.tolist() == [1, 1, 1, 0]
    assert sample(x, 0.0, bitmask=bits, seed=1, return_logprobs="raw").rank is None


def test_ranks_with_a_gradient_are_as_without(device):
    x = torch.randn(5, 60, device=device)
    wanted = sample(x, seed=1, return_logprobs="raw", return_rank=True)
    found = sample(x.requires_grad_(), seed=1, return_logprobs="raw", return_rank=True)
    assert torch.equal(found.rank, wanted.rank)
    assert found.logprobs.requires_grad


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"return_rank": True}, ValueError, 'return_rank needs return_logprobs="raw" or "processed", got None'),
        ({"return_rank": 1, "return_logprobs": "raw"}, TypeError, "return_rank must be a bool, not int"),
    ],
)
def test_a_wrong_argument_is_named(options, error, message):
    with pytest.raises(error, match=f"sample: {message}"):
        sample(torch.zeros(2, 5), **options)
