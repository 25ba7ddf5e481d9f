"""speculative_sample by chain, block and tree: joint distributions of tokens, accepted drafts, and paths."""

import math

import pytest
import torch
from sampling_cases import BY_BOTH, BY_TORCH, assert_counted, assert_distributed, few

from fused_softmax import sample, speculative_sample
from fused_softmax.ops.sampling import turns
from fused_softmax.ops.sampling.reference import judge

V = 4
FILTERS = [{}, {"temperature": 0.6, "top_k": 3}, {"top_p": 0.85}]
TREE = [-1, -1, 0, 1, 0]  # drafts 0 and 1 follow the prefix, 2 and 4 draft 0, and 3 draft 1


class Model:
    """Logits of a token after the tokens before it: of the first, the second and the third."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.logits = [1.2 * torch.randn(*(V,) * (i + 1), generator=generator) for i in range(3)]

    def after(self, *tokens):
        """[n, V] for tokens [n] each."""
        found = self.logits[len(tokens)]
        return found.to(tokens[0].device)[tokens] if tokens else found

    def probs(self, **filters):
        """The distributions of tokens as filters leave them, float64."""
        found = []
        for each in self.logits[:2]:
            rows = each.reshape(-1, V)
            drawn = sample(rows, **filters, seed=0, return_logprobs="processed", top_logprobs=V)
            of_columns = torch.zeros(len(rows), V + 1, dtype=torch.float64)
            of_columns.scatter_(1, drawn.top_tokens % (V + 1), drawn.top_logprobs.double().exp())
            found.append(of_columns[:, :V].reshape(each.shape))
        return found


TARGET, DRAFT = Model(1), Model(2)


def drawn_of(logits, filters, seed):
    """A token of each row, by noise that nothing else has."""
    return sample(logits.contiguous(), **filters, seed=seed, position=torch.arange(len(logits)) + 1_000_000).tokens


def chain_of(n, filters, draw=drawn_of, device="cpu"):
    """(target logits, drafts, draft logits) of two drafts after each other."""
    root, of_root = (model.after().to(device).expand(n, V) for model in (DRAFT, TARGET))
    first = draw(root, filters, 11)
    second = draw(DRAFT.after(first), filters, 12)
    target = torch.stack([of_root, TARGET.after(first), TARGET.after(first, second)], 1)
    return target, torch.stack([first, second], 1), torch.stack([root, DRAFT.after(first)], 1)


def tree_of(n, filters, draw=drawn_of, device="cpu"):
    """The same of TREE; rows of the draft whose token has no child are never read."""
    nowhere = torch.full((n, V), math.nan, device=device)
    root, of_root = (model.after().to(device).expand(n, V) for model in (DRAFT, TARGET))
    c = [draw(root, filters, 21), draw(root, filters, 22)]
    c += [draw(DRAFT.after(c[parent]), filters, 23 + i) for i, parent in enumerate(TREE[2:])]
    rows = [TARGET.after(c[i]) if parent < 0 else TARGET.after(c[parent], c[i]) for i, parent in enumerate(TREE)]
    drafts = [root, DRAFT.after(c[0]), DRAFT.after(c[1]), nowhere, nowhere]
    return torch.stack([of_root, *rows], 1), torch.stack(c, 1), torch.stack(drafts, 1)


def pairs_of(tokens, n_accepted, filters, draw=drawn_of):
    """The first two tokens, the second one drawn of the target where it is still to come."""
    first, second = tokens[:, 0], tokens[:, 1]
    other = draw(TARGET.after(first), filters, 31)
    return first * V + torch.where(n_accepted > 0, second, other)


def mean_is(found, wanted):
    """By five standard deviations."""
    found = found.double()
    assert abs(found.mean().item() - wanted) < 5 * found.std().item() / math.sqrt(len(found)) + 1e-9


def acceptance(verify, p, q):
    """How many of two drafts are accepted on average, as the papers have it."""
    (p_0, p_1), (q_0, q_1) = p, q
    of_first = torch.minimum(p_0, q_0)
    if verify == "chain":
        return (of_first * (1 + torch.minimum(p_1, q_1).sum(1))).sum().item()
    a_1 = (p_0 / q_0).clamp(max=1.0).nan_to_num(0.0)
    a_2 = (a_1[:, None] * p_1 / q_1).clamp(max=1.0).nan_to_num(0.0)
    return ((q_0 * a_1).sum() + (q_0[:, None] * q_1 * a_2).sum()).item()


def acceptance_of_two(p, q):
    """How often one of two independent drafts of a row is accepted."""
    first = torch.minimum(p, q).sum()
    left = (p - q).clamp(min=0)
    second = torch.minimum(left / left.sum(), q).sum() if left.sum() > 0 else torch.zeros(())
    return (first + (1 - first) * second).item()


@BY_TORCH
@pytest.mark.parametrize("n", [20_000, pytest.param(1_000_000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("verify", ["chain", "block"])
@pytest.mark.parametrize("told", ["logits", "probs"])
def test_pairs_of_tokens_have_the_distribution_of_the_target(verify, filters, told, n, way):
    """A residual of a wrong form passes the first token alone."""
    target, tokens, draft = chain_of(n, filters)
    p, q = TARGET.probs(**filters), DRAFT.probs(**filters)
    by = {"draft_logits": draft}
    if told == "probs":
        by = {"draft_probs": (3 * torch.stack([q[0].expand(n, V), q[1][tokens[:, 0]]], 1)).float()}
    y = speculative_sample(target, tokens, **by, **filters, verify=verify, seed=4)
    assert y.valid.all()
    assert y.nodes is None
    assert_distributed(pairs_of(y.tokens, y.n_accepted, filters), (p[0][:, None] * p[1]).flatten())
    mean_is(y.n_accepted, acceptance(verify, p, q))
    both = y.n_accepted == 2
    assert torch.equal(y.tokens[both, :2], tokens[both])
    if "top_p" in filters:  # of which `sample` judges its first token, and a verified row is drawn within what is kept
        return
    third = TARGET.after(tokens[:, 0], tokens[:, 1])
    at_last = torch.arange(n)[both] * 3 + 2  # what follows both is the target's own draw
    assert torch.equal(y.tokens[both, 2], sample(third[both], **filters, seed=4, position=at_last).tokens)


@BY_BOTH
@pytest.mark.parametrize("verify", ["chain", "block"])
def test_a_draft_that_its_own_distribution_has_not_is_judged_by_the_target_alone(verify, way):
    """The first is impossible by both, the second by the draft alone: neither is accepted."""
    low = -math.inf
    target = torch.tensor([[[low, 0.0], [low, 0.0], [0.0, 0.0]]])
    draft = torch.tensor([[[low, 0.0], [0.0, low]]])
    y = speculative_sample(target, torch.tensor([[0, 1]]), draft, verify=verify, seed=1)
    assert (y.tokens.tolist(), y.n_accepted.tolist()) == ([[1, -1, -1]], [0])
    y = speculative_sample(target[:, 1:], torch.tensor([[1]]), draft[:, 1:], verify=verify, seed=1)
    assert (y.tokens[0, 0].item(), y.n_accepted.tolist()) == (1, [1])


def test_a_block_accepts_more_than_a_chain():
    p, q = TARGET.probs(), DRAFT.probs()
    assert acceptance("block", p, q) > acceptance("chain", p, q) + 0.02


@BY_TORCH
@pytest.mark.parametrize("n", [20_000, pytest.param(1_000_000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_pairs_of_tokens_of_a_tree_have_the_distribution_of_the_target(filters, n, way):
    target, tokens, draft = tree_of(n, filters)
    p, q = TARGET.probs(**filters), DRAFT.probs(**filters)
    parents = torch.tensor(TREE)
    y = speculative_sample(target, tokens, draft, **filters, verify="tree", parents=parents, seed=4)
    assert y.valid.all()
    assert_distributed(pairs_of(y.tokens, y.n_accepted, filters), (p[0][:, None] * p[1]).flatten())
    mean_is(y.n_accepted > 0, acceptance_of_two(p[0], q[0]))
    for nodes, mine, n_accepted, row in zip(y.nodes[:200], y.tokens[:200], y.n_accepted[:200], tokens, strict=False):
        path = nodes[:n_accepted].tolist()
        assert nodes[n_accepted:].eq(-1).all()
        assert [TREE[node] for node in path] == [-1, *path][:n_accepted]
        assert torch.equal(mine[:n_accepted], row[path])
        assert mine[n_accepted] >= 0
        assert mine[n_accepted + 1 :].eq(-1).all()


@BY_TORCH
def test_many_siblings_leave_what_each_of_them_left(way):
    """Four independent draws of one row: the residual of a residual of a residual."""
    n, k = 40_000, 4
    p, q = torch.tensor([0.1, 0.2, 0.3, 0.4]).double(), torch.tensor([0.4, 0.35, 0.2, 0.05]).double()
    tokens = torch.multinomial(q.expand(n, V), k, replacement=True, generator=torch.Generator().manual_seed(1))
    target, draft = p.log().float().expand(n, k + 1, V), q.log().float().expand(n, k, V)
    y = speculative_sample(target, tokens, draft, verify="tree", parents=[-1] * k, seed=3)
    assert_distributed(y.tokens[:, 0], p)
    left, none = p, 1.0
    for _ in range(k):
        rate = torch.minimum(left, q).sum().item()
        none, left = none * (1 - rate), (left - q).clamp(min=0)
        left = left / left.sum()
    mean_is(y.n_accepted == 0, none)
    assert_distributed(y.tokens[y.n_accepted == 0, 0], left)


@BY_BOTH
@pytest.mark.parametrize("told", ["logits", None])
def test_a_tree_of_one_branch_is_a_chain(told, way, device):
    n = few(500, way, 20)
    target, tokens, draft = (each.to(device) for each in chain_of(n, {}))
    draft = draft if told else None
    options = {"seed": 5, "top_k": 3, "return_logprobs": "processed"}
    chain = speculative_sample(target, tokens, draft, **options)
    for parents in ([-1, 0], torch.tensor([-1, 0], device=device), torch.tensor([[-1, 0]] * n, device=device).int()):
        tree = speculative_sample(target, tokens, draft, **options, verify="tree", parents=parents)
        assert torch.equal(tree.nodes, torch.where(torch.arange(2, device=device) < tree.n_accepted[:, None],
                                                   torch.arange(2, device=device), -1))  # fmt: skip
        for ours, wanted in zip(tree[:4], chain[:4], strict=True):
            assert torch.equal(ours.nan_to_num(7.0), wanted.nan_to_num(7.0))


@pytest.mark.parametrize("way", ["torch", "kernels"], indirect=True)
@pytest.mark.parametrize("verify", ["chain", "block", "tree"])
def test_drafts_that_are_not_told_leave_the_tokens_of_sample(verify, way, device):
    """Down a tree a token has the position of its depth."""
    n = few(300, way, 12)
    target, tokens, _ = (each.to(device) for each in (chain_of(n, {}) if verify != "tree" else tree_of(n, {})))
    options = {"parents": TREE} if verify == "tree" else {}
    seed = torch.arange(n, device=device)
    y = speculative_sample(target, tokens, top_p=0.9, seed=seed, position=20, verify=verify, **options)
    parents = TREE if verify == "tree" else [-1, 0]
    longest = 0
    for i in range(n):
        row, wanted, path = 0, [], []
        while True:
            own = sample(target[i, row][None], top_p=0.9, seed=i, position=20 + len(path)).tokens.item()
            wanted.append(own)
            child = [j for j, parent in enumerate(parents) if parent + 1 == row and tokens[i, j] == own]
            if not child:
                break
            path.append(child[0])
            row = child[0] + 1
        longest = max(longest, len(path))
        assert y.tokens[i].tolist() == wanted + [-1] * (target.shape[1] - len(wanted))
        assert y.n_accepted[i] == len(path)
    assert longest == 2 or n < 300


@BY_BOTH
@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("verify", ["chain", "block", "tree"])
def test_lengths_cut_drafts_off(verify, told, way, device):
    n = few(300, way, 20)
    target, tokens, draft = (each.to(device) for each in chain_of(n, {}))
    options = {"verify": verify, "seed": 3} | ({"parents": [-1, 0]} if verify == "tree" else {})
    lengths = torch.arange(n, device=device) % 3
    cut = tokens.masked_fill(torch.arange(2, device=device) >= lengths[:, None], -1)
    told = draft if told else None
    wanted = speculative_sample(target, cut, told, **options)
    for given in (lengths, lengths.int()):
        found = speculative_sample(target, tokens, told, **options, draft_lengths=given)
        assert all(torch.equal(a, b) for a, b in zip(found[:3], wanted[:3], strict=True))
    assert (wanted.n_accepted <= lengths).all()
    one = speculative_sample(target, tokens, told, **options, draft_lengths=1)
    other = speculative_sample(
        target, torch.stack([tokens[:, 0], torch.full_like(tokens[:, 0], V)], 1), told, **options
    )
    assert all(torch.equal(a, b) for a, b in zip(one[:3], other[:3], strict=True))


@BY_BOTH
@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("verify", ["chain", "block", "tree"])
@pytest.mark.parametrize("n", [0, 3])
def test_no_drafts_leave_a_token_of_the_target(n, verify, told, way, device):
    target = 2 * torch.randn(n, 1, 9, device=device)
    tokens = torch.zeros(n, 0, dtype=torch.int64, device=device)
    draft = target[:, :0] if told else None
    wanted = sample(target[:, 0], seed=5, return_logprobs="raw")
    trees = [[], tokens, tokens[:1].flatten()] if verify == "tree" else [None]
    for parents in trees:
        y = speculative_sample(target, tokens, draft, verify=verify, parents=parents, seed=5, return_logprobs="raw")
        assert torch.equal(y.tokens, wanted.tokens[:, None])
        assert y.n_accepted.tolist() == [0] * n
        assert torch.allclose(y.logprobs, wanted.logprobs[:, None])
        assert (None if y.nodes is None else y.nodes.shape) == ((n, 0) if verify == "tree" else None)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("verify", ["chain", "block", "tree"])
def test_lengths_and_parents_out_of_range_leave_sequences_that_are_not_valid(verify, told, device):
    target, tokens, draft = (each.to(device) for each in chain_of(5, {}))
    target[..., 2] += 40.0
    draft = draft if told else None
    options = {"parents": torch.tensor([[-1, 0]] * 5, device=device)} if verify == "tree" else {}
    lengths = torch.tensor([0, 1, -1, 3, 2], device=device)
    y = speculative_sample(target, tokens, draft, verify=verify, seed=1, draft_lengths=lengths, **options)
    assert y.valid.tolist() == [True, True, False, False, True]
    assert y.tokens[2:4].tolist() == [[0, -1, -1]] * 2
    assert y.n_accepted[2:4].tolist() == [0, 0]
    if verify == "tree":
        parents = torch.tensor([[-1, 0], [-1, 1], [0, 0], [-1, -2], [-1, 5]], device=device)
        ids = tokens.clone()
        ids[4, 1] = -1  # of what is no draft the parent is not asked
        y = speculative_sample(target, ids, draft, verify="tree", parents=parents, seed=1)
        assert y.valid.tolist() == [True, False, False, False, True]


@BY_BOTH
@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("verify", ["chain", "block", "tree"])
def test_masks_numbers_and_log_probabilities_are_those_of_rows(verify, told, way, device):
    """Each row of the target has a bias, a bitmask and numbers of its own, and is that of a sample."""
    n, n_cols = few(40, way, 6), 70
    generator = torch.Generator().manual_seed(3)
    target = (2 * torch.randn(n, 4, n_cols, generator=generator)).to(device)
    draft = (2 * torch.randn(n, 3, n_cols, generator=generator)).to(device)
    temperature = torch.linspace(0.4, 1.6, 4 * n, device=device).view(n, 4)
    top_k = torch.randint(2, 20, (n, 4), generator=generator).to(device)
    bias = torch.randn(n, 4, n_cols, generator=generator).to(device)
    bitmask = torch.randint(-(2**31), 2**31, (n, 4, 3), generator=generator).int().to(device)
    tokens = draft.argmax(2)
    numbers = {"temperature": temperature, "top_k": top_k, "top_p": 0.95, "seed": 5}
    options = {"verify": verify} | ({"parents": [-1, -1, 0]} if verify == "tree" else {})
    told = draft if told else None
    depth = torch.tensor([0, 1, 1, 2] if verify == "tree" else [0, 1, 2, 3], device=device)
    position = (torch.arange(n, device=device) * 9)[:, None] + depth
    for kind in ("raw", "processed"):
        y = speculative_sample(
            target, tokens, told, **numbers, position=position[:, 0], logit_bias=bias, bitmask=bitmask,
            return_logprobs=kind, **options,
        )  # fmt: skip
        of_rows = sample(
            target.flatten(0, 1), temperature.flatten(), top_k.flatten(), 0.95, seed=5, position=position.flatten(),
            logit_bias=bias.flatten(0, 1), bitmask=bitmask.flatten(0, 1), return_logprobs=kind, top_logprobs=n_cols,
        )  # fmt: skip
        assert y.valid.all()
        assert (y.logprobs.shape, y.logprobs.dtype) == ((n, 4), torch.float32)
        for i in range(n):
            nodes = y.nodes[i].tolist() if verify == "tree" else list(range(3))
            for j in range(4):
                if j > y.n_accepted[i]:
                    assert y.tokens[i, j] == -1
                    assert y.logprobs[i, j].isnan()
                    continue
                row = 4 * i + (0 if j == 0 else nodes[j - 1] + 1)
                place = (of_rows.top_tokens[row] == y.tokens[i, j]).nonzero()
                assert len(place) == 1  # what no filter and no mask has taken away
                assert (y.logprobs[i, j] - of_rows.top_logprobs[row, place[0]]).abs() < 1e-4
                if not j < y.n_accepted[i] and told is None:
                    assert y.tokens[i, j] == of_rows.tokens[row]


def test_what_all_sequences_share_is_as_if_given_of_each(device):
    target, tokens, draft = (each.to(device) for each in chain_of(30, {}))
    bias, bits = torch.linspace(-1, 1, V, device=device), torch.full((30, 1), 0b1101, dtype=torch.int32, device=device)
    for told in (draft, None):
        shared = speculative_sample(target, tokens, told, logit_bias=bias, bitmask=bits, seed=1, temperature=0.5)
        of_each = speculative_sample(
            target, tokens, told, logit_bias=bias.expand(30, V), bitmask=bits[:, None].expand(30, 3, 1), seed=1,
            temperature=torch.full((30, 3), 0.5, device=device),
        )  # fmt: skip
        assert all(torch.equal(a, b) for a, b in zip(shared[:3], of_each[:3], strict=True))
        assert (shared.tokens != 1).all()


@pytest.mark.parametrize("verify", ["chain", "block", "tree"])
def test_rows_that_cannot_be_drawn_from_end_their_sequences(verify, device):
    target, draft = torch.zeros(5, 3, 5, device=device), torch.zeros(5, 2, 5, device=device)
    target[..., 2], draft[..., 2] = 30.0, 30.0
    target[1, 1, 4], target[2, 0], target[3, 2, 0] = math.nan, -math.inf, math.nan
    probs = draft.softmax(2)
    probs[4, 1, 0] = -0.5
    tokens = torch.full((5, 2), 2, device=device)
    options = {"verify": verify, "seed": 1} | ({"parents": [-1, 0]} if verify == "tree" else {})
    y = speculative_sample(target, tokens, draft_probs=probs, return_logprobs="raw", **options)
    assert y.valid.tolist() == [True, False, False, False, False]
    assert y.tokens.tolist() == [[2, 2, 2], [2, 0, -1], [0, -1, -1], [2, 2, 0], [2, 0, -1]]
    assert y.logprobs.isnan().tolist() == [[False] * 3, [False, True, True], [True] * 3, [False, False, True],
                                           [False, True, True]]  # fmt: skip


@pytest.mark.parametrize("verify", ["block", "tree"])
def test_a_sequence_does_not_depend_on_its_batch(verify, device, monkeypatch):
    n = 24
    target, tokens, draft = (each.to(device) for each in (chain_of(n, {}) if verify == "block" else tree_of(n, {})))
    temperature = torch.linspace(0.5, 2, n, device=device)
    parents = torch.tensor(TREE, device=device).expand(n, -1) if verify == "tree" else None

    def drawn(rows):
        return speculative_sample(
            target[rows], tokens[rows], draft[rows], temperature[rows], top_p=0.9, seed=2, position=rows * 3,
            verify=verify, parents=None if parents is None else parents[rows], return_logprobs="processed",
        )  # fmt: skip

    every = torch.arange(n, device=device)
    whole = drawn(every)
    monkeypatch.setattr(turns, "_MOST_BYTES", 2 * target.shape[1] * V * 128)
    for rows in (every, every[3:4], torch.randperm(n, device=device), every[::3]):
        for ours, wanted in zip(drawn(rows), whole, strict=True):
            assert (ours is None and wanted is None) or torch.equal(ours.nan_to_num(7.0), wanted[rows].nan_to_num(7.0))


@pytest.mark.parametrize("told", [True, False])
def test_it_is_compiled_whole(told, device):
    target, tokens, draft = (each.to(device) for each in tree_of(6, {}))
    draft = draft.nan_to_num(0.0) if told else None
    parents = torch.tensor(TREE, device=device)
    call = lambda x, t, p: speculative_sample(  # noqa: E731
        x, t, draft, top_p=0.9, seed=1, position=3, verify="tree", parents=p
    )
    compiled = torch.compile(call, fullgraph=True, backend="eager")(target, tokens, parents)
    wanted = call(target, tokens, parents)
    assert all(torch.equal(a, b) for a, b in zip(compiled[:3], wanted[:3], strict=True))
    assert torch.equal(compiled.nodes, wanted.nodes)


def drawn_by_torch(logits, filters, _seed):
    """As drawn_of, by nothing that is tested here."""
    given = (filters.get(name) for name in ("top_k", "top_p", "min_p"))
    probs = judge(logits, filters.get("temperature", 1.0), *given, joint=False).probs
    return torch.multinomial(probs, 1).squeeze(1)


@pytest.mark.gpu
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("verify", ["chain", "block", "tree"])
def test_pairs_of_tokens_by_kernels_have_the_distribution_of_the_target(verify, filters, device):
    n, chunk = 4_000_000, 10_000  # of which top-p notes 8 GB
    make, options = (tree_of, {"parents": TREE}) if verify == "tree" else (chain_of, {})
    p, q = TARGET.probs(**filters), DRAFT.probs(**filters)
    counts, n_accepted = torch.zeros(V * V, dtype=torch.int64, device=device), []
    for start in range(0, n, chunk):
        target, tokens, draft = make(chunk, filters, drawn_by_torch, device)
        position = torch.arange(start, start + chunk, device=device) * target.shape[1]
        y = speculative_sample(target, tokens, draft, **filters, verify=verify, **options, seed=4, position=position)
        assert y.valid.all()
        counts += pairs_of(y.tokens, y.n_accepted, filters, drawn_by_torch).bincount(minlength=V * V)
        n_accepted.append(y.n_accepted)
    assert_counted(counts, (p[0][:, None] * p[1]).flatten())
    n_accepted = torch.cat(n_accepted)
    if verify == "tree":
        mean_is(n_accepted > 0, acceptance_of_two(p[0], q[0]))
    else:
        mean_is(n_accepted, acceptance(verify, p, q))
