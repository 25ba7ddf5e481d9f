"""Tokens of rows whose columns lie in shards, against one process; by kernels and by torch's operations."""

import math

import pytest
import torch
import torch.distributed as dist
from products import pairwise
from sharded import SIZES, WAYS, by, logits, over, same_on_all, shard

from fused_softmax import sample
from fused_softmax.core import route

N_ROWS, N_COLS = 5, 37


@pytest.fixture(autouse=True)
def this_process_goes_on_as_before(monkeypatch):
    """It draws from whole rows, by torch or by the kernels."""
    monkeypatch.setattr(route, "INTERPRET", route.INTERPRET)


def rows(n_rows=N_ROWS, dtype=torch.float32):
    x = logits(n_rows, N_COLS, seed=3).to(dtype)
    if n_rows > 3:
        x[1, ::2] = x[1, 4]  # equals, of which the lowest column comes first
        x[2, 5:] = -math.inf  # a row that one rank of some has alone
        x[3, 20] = math.nan
    return x


def drawn(group, way, x, options, padding=0):
    """What `sample` gives of this rank's columns; without a group, of all."""
    by(way)
    options = dict(options)
    if group is not None:
        x = torch.nn.functional.pad(shard(x, group, 1), (0, padding), value=math.inf)
        if options.get("logit_bias") is not None:
            bias = options["logit_bias"]
            options["logit_bias"] = torch.nn.functional.pad(shard(bias, group, bias.ndim - 1), (0, padding))
        options |= over(group) | ({"shard_sizes": [N_COLS + padding]} if padding else {})
        options |= {"n_classes": N_COLS} if padding else {}
    if "generator" in options:
        options["generator"] = torch.Generator().manual_seed(options["generator"])
    if options.pop("out", False):
        out = torch.full((2 * len(x),), -1)[::2]
        assert sample(x, **options, out=out).tokens is out
        return [out]
    return [each for each in sample(x, **options) if each is not None]


def ramp(low, high):
    return torch.linspace(low, high, N_ROWS)


SEEDS = {"seed": torch.arange(7, 7 + N_ROWS), "position": torch.arange(N_ROWS) * 3}
BITS = torch.tensor([[-1, 31], [0x0F0F0F0F, 0], [7, 0], [-1, -1], [0, 0]], dtype=torch.int32)
ASKED: dict[str, dict] = {
    "no filter": {"seed": 11},
    "seeds and positions": SEEDS,
    "greedy": {"temperature": 0.0, "seed": 1},
    "greedy with bias, and filters that keep the greatest": {
        "temperature": 0.0, "seed": 1, "logit_bias": torch.linspace(2, -2, N_COLS), "top_k": 3, "min_p": 0.5,
    },
    "greedy of chosen rows": {"temperature": 0.0, "row_indices": torch.tensor([1, 9, 0]), "logit_bias": torch.ones(37)},
    "greedy by bits": {"temperature": 0.0, "seed": 1, "bitmask": BITS},
    "top-k": {"top_k": 4, "seed": 2, "position": 5},
    "top-p": {"top_p": 0.7, "seed": 3, "return_logprobs": "raw"},
    "min-p and top-p, joint": {
        "top_p": 0.8, "min_p": 0.05, "order": "joint", "seed": 4, "return_logprobs": "processed",
    },
    "parameters of rows": SEEDS | {
        "temperature": ramp(0, 2), "top_k": torch.tensor([3, 0, 40, 1, 7]), "top_p": ramp(0.3, 1),
        "min_p": ramp(0, 0.2),
    },
    "bias": SEEDS | {"logit_bias": torch.linspace(-2, 2, N_COLS), "return_logprobs": "raw", "top_logprobs": 3},
    "biases and bits": SEEDS | {
        "logit_bias": logits(N_ROWS, N_COLS, seed=9).float(), "bitmask": BITS, "top_k": 5,
        "return_logprobs": "processed", "top_logprobs": 4,
    },
    "chosen rows": {"row_indices": torch.tensor([4, 0, 0, -1, 2, 5, 1]), "seed": 5, "position": torch.arange(7)},
    "penalties": SEEDS | {
        "token_ids": torch.arange(N_ROWS * 4).view(N_ROWS, 4) % N_COLS, "repetition": ramp(0.5, 2), "frequency": 0.5,
        "return_logprobs": "raw", "logit_bias": torch.linspace(-2, 2, N_COLS),
    },
    "greedy with penalties": {
        "temperature": 0.0, "seed": 1, "token_ids": torch.arange(N_ROWS * N_COLS).view(N_ROWS, N_COLS) % 20,
        "presence": 9.0,
    },
    "a generator": {"generator": 6},
    "out": {"seed": 8, "out": True},
}  # fmt: skip


@pairwise()
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ASKED)
def test_tokens_are_those_of_one_process_to_the_bit(ranks, name, dtype, way, n):
    x = rows(dtype=dtype)
    found = same_on_all(ranks.values(n, drawn, way, x, ASKED[name]))
    (wanted,) = ranks.values(1, alone, way, x, ASKED[name])
    assert len(found) == len(wanted)
    for ours, truth in zip(found, wanted, strict=True):
        assert ours.dtype == truth.dtype
        torch.testing.assert_close(ours, truth, rtol=0, atol=0, equal_nan=True)


def alone(group, way, x, options):
    return drawn(None, way, x, options)


def test_rows_of_one_seed_are_numbered_over_all_ranks(ranks):
    """Rows that are alike draw what one process draws of each, whichever rank has it."""
    x = torch.zeros(6, N_COLS)
    found = same_on_all(ranks.values(3, drawn, "kernels", x, {"seed": 11}))
    (wanted,) = ranks.values(1, alone, "kernels", x, {"seed": 11})
    assert len(set(wanted[0].tolist())) > 2
    assert torch.equal(found[0], wanted[0])


@pytest.mark.parametrize("way", WAYS)
def test_a_token_depends_on_no_other_row_and_not_on_the_rank_that_draws_it(ranks, way):
    x = rows()
    options = {"seed": SEEDS["seed"], "position": SEEDS["position"], "top_p": 0.9}
    tokens, _ = ranks.values(3, drawn, way, x, options)[0]
    for i in range(N_ROWS):
        here = slice(i, i + 1)
        of_row = options | {"seed": options["seed"][here], "position": options["position"][here]}
        assert ranks.values(4, drawn, way, x[here], of_row)[0][0] == tokens[i]


def read_and_refused(group, x, options):
    """(log-probabilities of logits that require a gradient, what a backward pass through them says)."""
    columns = shard(x, group, 1).requires_grad_()
    drawn = sample(columns, **options, **over(group))
    with pytest.raises(RuntimeError) as said:
        torch.autograd.backward([drawn.logprobs.sum(), drawn.top_logprobs.sum()])
    return drawn.logprobs.detach(), str(said.value)


def test_log_probabilities_of_shards_are_read_and_raise_in_a_backward_pass(ranks):
    x, options = rows(), {"seed": 3, "return_logprobs": "raw", "top_logprobs": 2}
    found, said = ranks.values(2, read_and_refused, x, options)[0]
    torch.testing.assert_close(found, drawn(None, "torch", x, options)[2], equal_nan=True)
    assert said.startswith(("sample: logprobs has no gradient", "sample: top_logprobs has no gradient"))
    assert "with group=, -cross_entropy(" in said


def odd_rows():
    """inf in one shard and in two, NaN, -inf everywhere and nearly, zeros of both signs, equals over all shards."""
    x = torch.zeros(8, N_COLS)
    x[0, 36] = x[1, 3] = x[1, 30] = x[2, 30] = x[2, 31] = math.inf
    x[3, 6], x[3, 30] = math.nan, math.inf
    x[4] = x[5] = -math.inf
    x[5, 13] = -3.0
    x[6, :20] = -0.0
    return x


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_cannot_be_drawn_from_and_rows_of_one_column(ranks, temperature, n):
    options = {"temperature": temperature, "seed": 4}
    tokens, valid = same_on_all(ranks.values(n, drawn, "torch", odd_rows(), options))
    wanted = drawn(None, "torch", odd_rows(), options)
    assert torch.equal(tokens, wanted[0])
    assert valid.tolist() == wanted[1].tolist() == [True, False, False, False, False, True, True, True]


def exchanges(group, temperature):
    """By which calls the ranks exchange what for a token of each of 6 rows."""
    said, exchange = [], dist.all_to_all_single
    dist.all_to_all_single = lambda received, sent, *sizes, **more: (
        said.append((sent.nbytes, received.nbytes)), exchange(received, sent, *sizes, **more),
    )  # fmt: skip
    try:
        sample(shard(logits(6, N_COLS).float(), group, 1), temperature, seed=1, **over(group))
    finally:
        dist.all_to_all_single = exchange
    return said


def test_each_rank_gathers_some_of_the_rows_and_none_for_their_greatest(ranks):
    assert ranks.values(3, exchanges, 1.0) == [[(6 * size * 4, 2 * N_COLS * 4)] for size in SIZES[3]]
    assert ranks.values(3, exchanges, 0.0) == [[]] * 3


@pytest.mark.parametrize("n_rows", [0, 1, 2, 8])
def test_any_number_of_rows(ranks, n_rows):
    x, options = rows(n_rows), {"seed": 3, "position": torch.arange(n_rows), "return_logprobs": "raw"}
    found = same_on_all(ranks.values(3, drawn, "torch", x, options))
    for ours, truth in zip(found, drawn(None, "torch", x, options), strict=True):
        torch.testing.assert_close(ours, truth, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("way", WAYS)
def test_padding_is_never_drawn(ranks, way):
    x, options = rows(), SEEDS | {"logit_bias": torch.linspace(-1, 1, N_COLS), "top_p": 0.95}
    found = ranks.values(1, drawn, way, x, options, 4)[0]
    for ours, truth in zip(found, ranks.values(1, alone, way, x, options)[0], strict=True):
        assert torch.equal(ours, truth)
    tokens = same_on_all(ranks.values(3, padded, way))
    assert all((each < 9).all() for each in tokens)


def padded(group, way):
    """Shards of 4 columns each, of which 9 count: the last has 1 and padding of NaN."""
    by(way)
    x = torch.zeros(6, 4)
    if dist.get_rank(group) == 2:
        x[:, 1:] = math.nan
    found = sample(x, seed=torch.arange(6), group=group, n_classes=9)
    assert found.valid.all()
    return [found.tokens]


def states_after(group, temperature):
    """Of a generator after a call over shards, and after one of whole rows."""
    ours, theirs = (torch.Generator().manual_seed(3) for _ in range(2))
    x = logits(6, N_COLS).float()
    sample(shard(x, group, 1), temperature, generator=ours, **over(group))
    sample(x, temperature, generator=theirs)
    return torch.equal(ours.get_state(), theirs.get_state())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_generator_goes_on_as_after_a_call_of_whole_rows(ranks, temperature):
    assert ranks.values(3, states_after, temperature) == [True] * 3


def refused(group, x, arguments):
    return sample(x, **arguments, group=group)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"return_kept": True}, "ValueError", "return_kept needs whole rows, and with group a rank has some"),
        ({"n_classes": 7}, "ValueError", "the shards hold (3, 3) columns, together fewer than n_classes=7"),
        ({"transport": "pigeon"}, "ValueError", "transport must be None or one of ("),
        ({"logit_bias": torch.zeros(6)}, "ValueError", "logit_bias must have shape (3,) or (2, 3), got (6,)"),
        ({"bitmask": torch.zeros(2, 0, dtype=torch.int32)}, "ValueError", "bitmask must have shape (2, 1), a bit for"),
        ({"return_logprobs": "raw", "top_logprobs": 7}, "ValueError", "top_logprobs must be in [0, 6], got 7"),
        ({"temperature": -1.0}, "ValueError", "temperature must be at least 0 and finite"),
        ({"seed": torch.zeros(3, dtype=torch.long)}, "ValueError", "seed must have shape () or (2,), got (3,)"),
        ({"row_indices": torch.zeros(1, 1, dtype=torch.long)}, "ValueError", "row_indices must have shape [n_draws]"),
        ({"out": torch.zeros(2)}, "TypeError", "out must be of int64"),
        ({"token_ids": torch.zeros(1, 1).long()}, "ValueError", "token_ids must have shape (2, length), got (1, 1)"),
        ({"presence": 1.0}, "ValueError", "presence needs token_ids, got token_ids=None"),
    ],
)
def test_bad_calls_over_a_group(ranks, arguments, error, said):
    for each in ranks(2, refused, torch.zeros(2, 3), arguments):
        assert each.args[0] == error
        assert each.args[1].startswith(f"sample: {said}")


def test_shards_need_a_group():
    with pytest.raises(ValueError, match=r"^sample: n_classes needs group, got group=None$"):
        sample(torch.zeros(2, 3), n_classes=3)


def at_odds(group, odd):
    last = dist.get_rank(group) == dist.get_world_size(group) - 1
    x = torch.zeros(3 if odd == "shape" and last else 2, 3)
    return sample(x, **({odd: 3} if last and odd != "shape" else {}), seed=1, group=group)


@pytest.mark.parametrize("odd", ["top_k", "temperature", "shape", "seeded"])
def test_ranks_that_disagree_are_told_in_what(ranks, odd):
    if odd == "seeded":
        found = ranks(3, seeded_apart)
    else:
        found = ranks(3, at_odds, odd)
    for each in found:
        assert each.args[0] == "RuntimeError"
        assert each.args[1].startswith("sample: the ranks of the group differ in ")
        assert each.args[1].endswith("on rank 2")


def seeded_apart(group):
    return sample(torch.zeros(2, 3), seed=None if dist.get_rank(group) == 2 else 1, group=group)


def as_on_a_gpu(group, odd, temperature):
    """Calls that compare nothing beforehand; in the second, ranks ask for different things."""
    from fused_softmax.ranks import groups as distributed

    waits, distributed._waits_for_nobody = distributed._waits_for_nobody, lambda device: False
    rank, whole, said = dist.get_rank(group), torch.arange(14.0).reshape(2, 7) * 9, None

    def found(**more):
        return sample(whole[:, 3 * rank : 3 * rank + 3], temperature, seed=1, **more, group=group)

    try:
        first = found()
        second = found(**({"top_k": 2 + rank} if odd else {}))
        try:
            found()
        except RuntimeError as error:
            said = str(error)
        return first, second, said, found()
    finally:
        distributed._waits_for_nobody = waits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("odd", [False, True])
def test_what_is_not_compared_beforehand_gives_no_token_and_then_an_error(ranks, odd, temperature):
    for first, second, said, last in ranks.values(2, as_on_a_gpu, odd, temperature):
        for found in (first, last):
            assert found.tokens.tolist() == [5, 5]
            assert found.valid.all()
        assert second.tokens.tolist() == ([0, 0] if odd else [5, 5])
        assert second.valid.tolist() == [not odd] * 2
        assert "differed in their options" in said if odd else said is None
