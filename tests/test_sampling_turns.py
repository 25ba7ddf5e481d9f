"""Calls of very many draws, whose kernels take some of them at a time: as if all were taken at once."""

import os

import pytest
import torch

from fused_softmax import sample, speculative_sample, top_p_mask_logits, top_p_renorm_probs
from fused_softmax.core import calls, route
from fused_softmax.ops.sampling import calls as sample_reports
from fused_softmax.ops.sampling import filters, reference, verification
from fused_softmax.ops.sampling import turns as sample_turns

pytestmark = pytest.mark.skipif(
    os.environ.get("FUSED_SOFTMAX_INTERPRET") != "1" and not torch.cuda.is_available(),
    reason="kernels run on a GPU or in the interpreter",
)
N = 37  # turns of 16, 16 and 5


def given(kind, device):
    """(logits, arguments) of N draws."""
    logits = 2 * torch.randn(N, 40)
    logits[20, 3], logits[30] = torch.nan, -torch.inf
    filters = {"top_k": 7, "top_p": 0.8}
    tensors = {
        "temperature": torch.linspace(0, 2, N), "top_k": torch.arange(N) % 9, "top_p": torch.linspace(0.3, 1.2, N),
        "seed": torch.arange(N) * 7,
    }  # fmt: skip
    more = {
        "numbers": {"seed": 3, "position": 5, **filters},
        "one seed": {"seed": 3, **filters},
        "tensors": {"position": torch.arange(N).flip(0), **tensors},
        "bias and bitmask": {
            "seed": 3, "position": torch.arange(N), "logit_bias": torch.randn(N, 40), **filters,
            "bitmask": torch.randint(-(2**31), 2**31, (N, 2)).int(),
        },
        "rows and a bias of all": {
            "seed": torch.arange(N), "row_indices": torch.randint(-1, N, (N,)), "logit_bias": torch.randn(40),
            "min_p": 0.1,
        },
        "reports": {"seed": torch.arange(N), "return_logprobs": "processed", "top_logprobs": 3, "return_kept": True,
                    **filters},
        "raw": {"seed": torch.arange(N), "return_logprobs": "raw", "top_logprobs": 2},
    }[kind]  # fmt: skip
    return logits.to(device), {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in more.items()}


@pytest.fixture
def turns(monkeypatch):
    """How many draws each of the prepared calls makes."""
    prepare, found = sample_reports.prepare_sample, []

    def watched(logits, options, *rest):
        found.append(len(logits) if options.row_indices is None else len(options.row_indices))
        return prepare(logits, options, *rest)

    monkeypatch.setattr(sample_reports, "prepare_sample", watched)
    return found


KINDS = "numbers", "one seed", "tensors", "bias and bitmask", "rows and a bias of all", "reports", "raw"


@pytest.mark.parametrize(("kind", "kept"), [*((kind, False) for kind in KINDS), ("numbers", True), ("one seed", True)])
def test_draws_are_those_of_one_turn(monkeypatch, turns, device, kind, kept):
    logits, arguments = given(kind, device)
    wanted = sample(logits, **arguments)
    assert turns == [N]
    monkeypatch.setattr(sample_turns, "_MOST_BYTES", 1)
    out = torch.full((2 * N,), -1, device=device)[::2]
    for _ in range(1 + kept):
        found = sample(logits, **arguments, out=out)
    assert turns[1:] == [16, 5]
    assert found.tokens is out
    for ours, each in zip(found, wanted, strict=True):
        assert (ours is None) == (each is None)
        if each is not None:
            torch.testing.assert_close(ours, each, rtol=0, atol=0, equal_nan=True)


def test_a_generators_draws_are_those_of_one_turn(monkeypatch, turns, device):
    logits, _ = given("numbers", device)
    generators = [torch.Generator(device).manual_seed(4) for _ in range(2)]
    wanted = sample(logits, top_k=4, generator=generators[0])
    monkeypatch.setattr(sample_turns, "_MOST_BYTES", 1)
    found = sample(logits.clone().T.contiguous().T, top_k=4, generator=generators[1])
    assert torch.equal(found.tokens, wanted.tokens)
    assert turns == [N, 16, 5]


def test_draws_of_which_nothing_is_noted_take_one_turn(monkeypatch, turns, device):
    monkeypatch.setattr(sample_turns, "_MOST_BYTES", 1)
    sample(given("numbers", device)[0], seed=1)
    assert turns == [N]


@pytest.fixture
def on_a_cpu(monkeypatch):
    """Torch's operations compute all, as they do on a CPU without the interpreter."""
    monkeypatch.setattr(route, "on_device", lambda tensor: False)
    calls.forget()
    yield
    calls.forget()


def counted(monkeypatch, module, name):
    """A list that gets an element whenever the function is called."""
    function, found = getattr(module, name), []

    def call(*args, **kwargs):
        found.append(1)
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, call)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_cpu_takes_some_draws_at_a_time(monkeypatch, on_a_cpu, kind):
    logits, arguments = given(kind, "cpu")
    wanted = sample(logits, **arguments)
    monkeypatch.setattr(sample_turns, "_MOST_BYTES", 16 * 40 * 128)
    count = counted(monkeypatch, reference, "sample")
    for ours, each in zip(sample(logits, **arguments), wanted, strict=True):
        assert (ours is None) == (each is None)
        if each is not None:
            torch.testing.assert_close(ours, each, rtol=0, atol=0, equal_nan=True)
    assert len(count) == 3


def test_a_cpu_takes_some_rows_at_a_time(monkeypatch, on_a_cpu):
    x, target, tokens = torch.rand(N, 40), torch.randn(N, 3, 40), torch.randint(40, (N, 2))
    whole = top_p_renorm_probs(x, 0.7), top_p_mask_logits(x, 0.7), speculative_sample(target, tokens, seed=1).tokens
    monkeypatch.setattr(sample_turns, "_MOST_BYTES", 16 * 40 * 128)
    counts = [counted(monkeypatch, filters.reference, name) for name in ("renorm_probs", "mask_logits")]
    counts.append(counted(monkeypatch, verification, "speculative_sample"))
    found = top_p_renorm_probs(x, 0.7), top_p_mask_logits(x, 0.7), speculative_sample(target, tokens, seed=1).tokens
    for ours, each in zip(found, whole, strict=True):
        assert torch.equal(ours, each)
    assert [len(count) for count in counts] == [3, 3, 8]
