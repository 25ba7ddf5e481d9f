"""speculative_sample: what it returns has the target's distribution, whatever the drafts are."""

import math

import pytest
import torch
from products import pairwise
from sampling_cases import BY_BOTH, BY_TORCH, assert_distributed, few

from fused_softmax import sample, speculative_sample
from fused_softmax.ops.sampling import turns

N_COLS, K = 7, 2
FILTERS = [
    {},
    {"temperature": 0.6, "top_k": 5},
    {"top_p": 0.8, "min_p": 0.05},
    {"top_k": 4, "top_p": 0.9, "order": "joint"},
]


def of_rows(n, *shape, device, scale=1.5):
    """Logits [n, *shape] that are one in memory for all n."""
    return (torch.randn(*shape) * scale).to(device).expand(n, *shape)


def processed(row, **filters):
    """The distribution of one row of logits, by `sample` itself."""
    drawn = sample(row[None], **filters, seed=0, return_logprobs="processed", top_logprobs=len(row))
    probs = torch.zeros(len(row), dtype=torch.float64)
    kept = drawn.top_tokens[0].cpu() >= 0
    return probs.scatter(0, drawn.top_tokens[0].cpu()[kept], drawn.top_logprobs[0].cpu()[kept].double().exp())


@BY_TORCH
@pairwise(strength=1)
@pytest.mark.parametrize("n", [4000, pytest.param(100_000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("drafts", ["drawn", "drawn with other noise", "one", "drawn, not told"])
def test_tokens_have_the_distribution_of_the_target(drafts, filters, n, way, device):
    target, draft = of_rows(n, K + 1, N_COLS, device=device), of_rows(n, K, N_COLS, device=device)
    position = torch.arange(n, device=device) * (K + 1)
    seed = 4 if drafts != "drawn with other noise" else 5
    tokens = torch.stack([sample(draft[:, j], **filters, seed=seed, position=position + j).tokens for j in range(K)], 1)
    told = None if drafts in ("one", "drawn, not told") else draft
    tokens = torch.full_like(tokens, 3) if drafts == "one" else tokens
    y = speculative_sample(target, tokens, told, **filters, seed=4, position=position)
    assert y.valid.all()
    assert ((y.tokens >= 0).sum(1) == y.n_accepted + 1).all()
    for j in range(K + 1):
        reached = y.n_accepted >= j  # which the token here does not decide
        assert_distributed(y.tokens[reached, j].cpu(), processed(target[0, j], **filters))
        if j and reached.sum() > 1000:
            # Given the tokens before too: for one accepted draft, the next has the target's distribution.
            most = y.tokens[reached, j - 1].mode().values
            given = reached & (y.tokens[:, j - 1] == most)
            assert_distributed(y.tokens[given, j].cpu(), processed(target[0, j], **filters))
    if told is not None:
        p, q = processed(target[0, 0], **filters), processed(draft[0, 0], **filters)
        rate = torch.minimum(p, q).sum().item()
        assert abs((y.n_accepted > 0).double().mean().item() - rate) < 5 * math.sqrt(rate * (1 - rate) / n + 1e-9)


@BY_TORCH
def test_what_replaces_a_draft_does_not_depend_on_its_noise(way, device):
    """By the draft's own noise the third column would replace it in three cases of four, and not in five of eight."""
    n = 4000
    p, q = (torch.tensor(row, dtype=torch.float64) for row in ([0.2, 0.5, 0.3], [0.6, 0.35, 0.05]))
    target, draft = (row.log().float().to(device).expand(n, 1, 3) for row in (p, q))
    position = torch.arange(n, device=device)
    drafts = sample(draft[:, 0], seed=4, position=position).tokens[:, None]
    target = torch.cat([target, target], 1)
    y = speculative_sample(target, drafts, draft, seed=4, position=position)
    assert_distributed(y.tokens[:, 0].cpu(), p)
    assert_distributed(y.tokens[y.n_accepted == 0, 0].cpu(), (p - q).clamp(min=0) / (p - q).clamp(min=0).sum())


@pytest.mark.parametrize("way", ["torch", "kernels"], indirect=True)
def test_without_draft_logits_tokens_are_those_of_sample(way, device):
    n = few(200, way, 8)
    target = (torch.randn(n, K + 1, N_COLS) * 2).to(device)
    seed, position = torch.arange(n, device=device), torch.randint(2**40, (n,), device=device)
    own = torch.stack([sample(target[:, j], top_k=5, seed=seed, position=position + j).tokens for j in range(K + 1)], 1)
    drafts = torch.where(torch.rand(n, K, device=device) < 0.3, 0, own[:, :K])
    y = speculative_sample(target, drafts, top_k=5, seed=seed, position=position)
    agreed = (drafts == own[:, :K]).long().cumprod(1).sum(1)
    assert torch.equal(y.n_accepted, agreed)
    at = torch.arange(K + 1, device=device)
    assert torch.equal(y.tokens, torch.where(at <= agreed[:, None], own, -1))


@pytest.mark.parametrize("told", [True, False])
def test_a_sequence_does_not_depend_on_its_batch(told, device):
    n = 20
    target, draft = (torch.randn(n, K + 1, 90) * 2).to(device), (torch.randn(n, K, 90) * 2).to(device)
    seed, temperature = torch.arange(n, device=device), torch.rand(n, device=device) + 0.5
    tokens = draft.argmax(2)

    def drawn(rows):
        logits = draft[rows] if told else None
        return speculative_sample(
            target[rows], tokens[rows], logits, temperature[rows], top_p=0.9, seed=seed[rows], position=5
        )

    whole = drawn(slice(None))
    for rows in (slice(3, 4), torch.randperm(n, device=device), slice(0, n, 3)):
        assert all(torch.equal(a, b[rows]) for a, b in zip(drawn(rows)[:3], whole[:3], strict=True))


@pytest.mark.parametrize("told", [True, False])
def test_greedy_sequences_follow_the_targets_maxima(told, device):
    target = torch.tensor([[[0.0, 9.0, 1.0], [9.0, 0.0, 1.0], [0.0, 1.0, 9.0]]], device=device)
    draft = torch.tensor([[[0.0, 9.0, 1.0], [0.0, 9.0, 1.0]]], device=device)

    def of(*tokens):
        y = speculative_sample(target, torch.tensor([tokens], device=device), draft if told else None, 0.0, seed=1)
        return y.tokens[0].tolist(), y.n_accepted.item()

    assert of(1, 1) == ([1, 0, -1], 1)
    assert of(1, 0) == ([1, 0, 2], 2)
    assert of(2, 0) == ([1, -1, -1], 0)


@BY_BOTH
@pytest.mark.parametrize("told", [True, False])
def test_an_id_that_is_no_column_ends_the_drafts(told, way, device):
    n = few(300, way, 30)
    target, draft = of_rows(n, K + 1, N_COLS, device=device), of_rows(n, K, N_COLS, device=device)
    position = torch.arange(n, device=device)
    drafts = torch.full((n, K), N_COLS, device=device)
    drafts[: n // 2] = -1
    y = speculative_sample(target, drafts, draft if told else None, seed=1, position=position)
    assert (y.n_accepted == 0).all()
    assert torch.equal(y.tokens[:, 0], sample(target[:, 0], seed=1, position=position).tokens)


@pytest.mark.parametrize("told", [True, False])
def test_a_row_that_cannot_be_drawn_from_ends_its_sequence(told, device):
    target, draft = torch.zeros(4, K + 1, 5, device=device), torch.zeros(4, K, 5, device=device)
    target[..., 2], draft[..., 2] = 30.0, 30.0
    target[1, 1, 4] = math.nan
    target[2, 0] = -math.inf
    draft[3, 1, 0] = math.nan
    y = speculative_sample(target, torch.full((4, K), 2, device=device), draft if told else None, seed=1)
    assert y.valid.tolist() == [True, False, False, not told]
    assert y.tokens.tolist() == [[2, 2, 2], [2, 0, -1], [0, -1, -1], [2, 0, -1] if told else [2, 2, 2]]


@BY_BOTH
def test_no_drafts_and_no_sequences(way, device):
    x = torch.randn(30, 1, 40, device=device)
    y = speculative_sample(x, torch.empty(30, 0, dtype=torch.int64, device=device), seed=3)
    assert torch.equal(y.tokens[:, 0], sample(x[:, 0], seed=3).tokens)
    y = speculative_sample(x[:0], torch.empty(0, 0, dtype=torch.int64, device=device), x[:0, :0])
    assert y.tokens.shape == (0, 1)


def test_a_generator_gives_sequences_noise_of_their_own(device):
    target = torch.zeros(50, K + 1, 4096, device=device)
    generator = torch.Generator(device).manual_seed(1)
    y = speculative_sample(target, torch.zeros(50, K, dtype=torch.int64, device=device), generator=generator)
    assert len(set(y.tokens[:, 0].tolist())) > 45


@pytest.mark.guard
@pytest.mark.parametrize("told", [True, False])
def test_sequences_of_one_seed_that_is_a_number_share_no_noise(told, device):
    target, draft = torch.zeros(50, K + 1, 4096, device=device), torch.zeros(50, K, 4096, device=device)
    drafts = torch.zeros(50, K, dtype=torch.int64, device=device)
    draft[..., 0] = 9.0  # which is seldom accepted
    y = speculative_sample(target, drafts, draft if told else None, seed=1)
    assert len(set(y.tokens[:, 0].tolist())) > 45
    position = torch.arange(50, device=device) * (K + 1)
    wanted = speculative_sample(target, drafts, draft if told else None, seed=1, position=position)
    assert all(torch.equal(a, b) for a, b in zip(y[:3], wanted[:3], strict=True))
    seed = torch.tensor(1, device=device)
    y = speculative_sample(target, drafts, seed=seed)
    assert len(set(y.tokens[:, 0].tolist())) == 1


X, D = torch.zeros(3, K + 1, 40), torch.zeros(3, K, dtype=torch.int64)
REFUSED = [
    ((X[0], D), {}, ValueError, r"target_logits must have shape \[n, k \+ 1, vocab\], got \(3, 40\)"),
    ((X, D[:, :1]), {}, ValueError, r"draft_tokens must have shape \(3, 2\), got \(3, 1\)"),
    ((X, D.float()), {}, TypeError, "draft_tokens must be of int64 or int32, got torch.float32"),
    ((X, D, X), {}, ValueError, r"draft_logits must have shape \(3, 2, 40\), got \(3, 3, 40\)"),
    ((X, D, X[:, :K].double()), {}, TypeError, "draft_logits must be of float32, float16 or bfloat16"),
    ((X, D), {"top_p": 0.0}, ValueError, "top_p must be more than 0, got 0.0"),
    (
        (X, D), {"temperature": torch.ones(9)}, ValueError,
        r"temperature must have shape \(\) or \(3,\) or \(3, 3\), got \(9,\)",
    ),
    ((X, D), {"seed": 1, "generator": torch.Generator()}, ValueError, "give seed=1 or a generator, not both"),
    ((X, D, X[:, :K]), {"draft_probs": X[:, :K]}, ValueError, "give draft_logits or draft_probs, not both"),
    ((X, D), {"draft_probs": X}, ValueError, r"draft_probs must have shape \(3, 2, 40\), got \(3, 3, 40\)"),
    ((X, D), {"draft_lengths": 3}, ValueError, r"draft_lengths must be in \[0, 2\], got 3"),
    ((X, D), {"draft_lengths": D}, ValueError, r"draft_lengths must have shape \(3,\), got \(3, 2\)"),
    ((X, D), {"draft_lengths": True}, TypeError, "draft_lengths must be an int, not bool"),
    ((X, D), {"verify": "list"}, ValueError, 'verify must be "chain", "block" or "tree", got \'list\''),
    ((X, D), {"verify": "tree"}, ValueError, "parents and .* need each other, got verify='tree' and parents=None"),
    ((X, D), {"parents": [-1, 0]}, ValueError, "parents and verify=.tree. need each other, got verify='chain'"),
    ((X, D), {"verify": "tree", "parents": [-1, 1]}, ValueError, r"parents\[1\] must be in \[-1, 0\], got 1"),
    ((X, D), {"verify": "tree", "parents": [-1]}, ValueError, "parents must have 2 elements, one .* draft, got 1"),
    ((X, D), {"verify": "tree", "parents": [-1, 0.5]}, TypeError, r"parents\[1\] must be an int, not float"),
    ((X, D), {"verify": "tree", "parents": "ab"}, TypeError, "parents must be a Tensor or a sequence of ints, not str"),
    ((X, D), {"verify": "tree", "parents": D[:2]}, ValueError, r"parents must have shape \(3, 2\) or \(2,\), got"),
    ((X, D), {"bitmask": D.int()[:2]}, ValueError, r"bitmask must have shape \(3, 2\) or \(3, 3, 2\), a bit"),
    (
        (X, D), {"logit_bias": X[:2, 0]}, ValueError,
        r"logit_bias must have shape \(40,\) or \(3, 40\) or \(3, 3, 40\), got \(2, 40\)",
    ),
    ((X, D), {"return_logprobs": "all"}, ValueError, 'return_logprobs must be None, "raw" or "processed"'),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "options", "error", "message"), REFUSED, ids=range(len(REFUSED)))
def test_a_wrong_argument_is_named(tensors, options, error, message):
    with pytest.raises(error, match=f"speculative_sample: {message}"):
        speculative_sample(*tensors, **options)


@BY_BOTH
@pytest.mark.parametrize("told", [False, True], ids=["drafts alone", "with their logits"])
def test_few_sequences_at_a_time_give_the_same(told, way, monkeypatch, device):
    """What memory holds at a time changes nothing."""
    target, draft = (torch.randn(5, rows, 60).to(device) for rows in (K + 1, K))
    tokens = torch.randint(0, 60, (5, K), device=device)
    numbers = {"temperature": torch.linspace(0.5, 2, 5, device=device), "top_p": 0.9, "seed": 3}
    whole = speculative_sample(target, tokens, draft if told else None, **numbers)
    monkeypatch.setattr(turns, "_MOST_BYTES", 2 * (K + 1) * 60 * 128)
    found = speculative_sample(target, tokens, draft if told else None, **numbers)
    for ours, wanted in zip(found[:3], whole[:3], strict=True):
        assert torch.equal(ours, wanted)


def test_drafts_alone_take_no_memory_of_the_vocabulary(device):
    """They used to take 130 bytes a logit."""
    if device != "cuda":
        pytest.skip("allocations of a GPU are counted")
    target = torch.randn(64, 5, 50_000, device=device, dtype=torch.bfloat16)
    drafts = torch.zeros(64, 4, dtype=torch.int64, device=device)
    speculative_sample(target, drafts, top_p=0.9, seed=1)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    speculative_sample(target, drafts, top_p=0.9, seed=1)
    assert torch.cuda.max_memory_allocated() - before < 8 * 2**20


def test_compiled_drafts_with_top_p_are_one_graph(device):
    target, tokens = torch.randn(3, 3, 60, device=device), torch.zeros(3, 2, dtype=torch.int64, device=device)
    call = lambda x, t: speculative_sample(x, t, top_p=0.5, seed=1, position=3)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    for ours, wanted in zip(compiled(target, tokens)[:3], call(target, tokens)[:3], strict=True):
        assert torch.equal(ours, wanted)


@pytest.mark.parametrize("way", ["torch", "kernels"], indirect=True)
def test_rows_of_a_slice_are_read_where_they_lie(way, device):
    wide = torch.randn(4, 9, 60, device=device)
    tokens = torch.randint(0, 60, (4, K), device=device)
    for target in (wide[:, -K - 1 :], wide[:, : K + 1], wide[::2, 2 : K + 3], wide[:, :: 9 // (K + 1)][:, : K + 1]):
        given = tokens[: len(target)]
        found = speculative_sample(target, given, top_p=0.9, seed=1, position=5)
        wanted = speculative_sample(target.clone(), given, top_p=0.9, seed=1, position=5)
        assert all(torch.equal(a, b) for a, b in zip(found[:3], wanted[:3], strict=True))
