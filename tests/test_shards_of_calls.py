"""Attention, sampling and its filters of DTensors, shard by shard, against whole tensors; and what is refused."""

import pytest
import torch
import torch.distributed as dist
from products import pairwise
from test_shards_dtensor import WAYS, mesh_of
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._pytree import tree_map_only

import fused_softmax
from fused_softmax import attention, penalize, sample, speculative_sample
from fused_softmax.core import route


def tensor(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def placed(x, mesh, placements):
    """x as a DTensor; where it is Partial, the first rank has it and the others add nothing."""
    if not any(each.is_partial() for each in placements):
        return distribute_tensor(x, mesh, placements)
    (i,) = [i for i, each in enumerate(placements) if each.is_partial()]
    mine = x if mesh.get_coordinate()[i] == 0 else torch.zeros_like(x)
    return DTensor.from_local(mine.clone(), mesh, placements, run_check=False)


QUERY, KEY = (
    (3, 4, 5, 8),
    (3, 4, 6, 8),
)  # three batches are shards of two and of one, and four ranks have a rank without
TENSORS = {
    "plain": {},
    "bias": {"bias": (4, 5, 6)},
    "sinks": {"sinks": (4,), "bias": (3, 1, 1, 6)},
    "slopes": {"alibi_slopes": (3, 4)},
    "gqa": {"key": (3, 2, 6, 8), "value": (3, 2, 6, 8), "enable_gqa": True},
    "mqa": {"key": (1, 1, 6, 8), "value": (1, 1, 6, 8), "enable_gqa": True},
    "mask": {"attn_mask": (3, 1, 5, 6)},
}
B, H, R = Shard(0), Shard(1), Replicate()


def arguments_of(case, dtype=torch.float32):
    given = {"query": QUERY, "key": KEY, "value": KEY} | TENSORS[case]
    options = {name: each for name, each in given.items() if not isinstance(each, tuple)}
    shapes = {name: each for name, each in given.items() if isinstance(each, tuple)}
    tensors = {name: tensor(*shape, seed=seed, dtype=dtype) for seed, (name, shape) in enumerate(shapes.items())}
    if "attn_mask" in tensors:
        tensors["attn_mask"] = tensors["attn_mask"] > -1
    if case == "plain":
        options |= {"return_lse": True, "return_stats": ("entropy", "column_sums"), "is_causal": True}
    return tensors, options


def attended(tensors, options, of=None):
    """(results, gradients) of a call, by numbers that tell their elements apart."""
    leaves = [each.requires_grad_() for each in tensors.values() if each.is_floating_point()]
    found = attention(**tensors, **options)
    results = [found] if isinstance(found, torch.Tensor) else [found.output, found.lse, *found.stats.values()]
    graded = results[:2]  # the output and its lse; statistics have no gradient
    parts = [torch.linspace(0.5, 1.5, each.numel()).view(each.shape).to(each.dtype) for each in graded]
    if of is not None:
        parts = [distribute_tensor(each, of, [Replicate()] * of.ndim) for each in parts]
    gradients = torch.autograd.grad(sum((y * part).sum() for y, part in zip(graded, parts, strict=True)), leaves)
    return results, gradients


def attention_of_shards(group, way, case, shape, placements):
    route.INTERPRET, mesh = way == "kernels", mesh_of(shape)
    tensors, options = arguments_of(case)
    mine = {name: distribute_tensor(each, mesh, [Replicate()] * mesh.ndim) for name, each in tensors.items()}
    mine["query"] = distribute_tensor(tensors["query"], mesh, placements)
    if tensors["key"].shape[0] > 1:  # else it is broadcast along the batch, and lies whole on every rank
        mine["key"] = distribute_tensor(tensors["key"], mesh, placements)
    with CommDebugMode() as communication, torch.no_grad():
        attention(**mine, **options)
    results, gradients = attended(mine, options, mesh)
    of_query = [each.placements for each in (results[0], gradients[0])]
    return [each.full_tensor().detach() for each in (*results, *gradients)], of_query, communication.get_total_counts()


@pytest.mark.parametrize(
    ("case", "shape", "placements"),
    [
        ("plain", (4,), [B]), ("plain", (2, 2), [B, H]), ("plain", (2, 2), [H, H]), ("plain", (2, 2), [R, R]),
        ("bias", (4,), [H]), ("bias", (2, 2), [R, H]), ("sinks", (2, 2), [H, B]), ("slopes", (2, 2), [B, H]),
        ("gqa", (2, 2), [B, H]), ("mqa", (4,), [H]), ("mqa", (2, 2), [B, H]), ("mask", (2, 2), [H, B]),
        ("mask", (4,), [B]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("way", WAYS)
def test_attention_of_shards_is_that_of_whole_tensors(ranks, case, shape, placements, way):
    tensors, options = arguments_of(case, torch.float64)
    results, gradients = attended(tensors, options)
    wanted = [each.detach() for each in (*results, *gradients)]
    for found, of_query, moves in ranks.values(4, attention_of_shards, way, case, shape, placements):
        assert moves == 0
        assert all(list(each) == placements for each in of_query)
        for ours, truth in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours.double(), truth.double(), rtol=2e-5, atol=2e-5)


def refused_attention(group, placements):
    mesh = mesh_of((2, 2))
    given = {}
    for name, size in (("query", 4), ("key", 3 if "uneven" in placements else 4)):
        each = placements.get(name, [R, R])
        x = tensor(2, 6 if name == "query" and "uneven" in placements else size, 6, 8)
        given[name] = x if each is None else placed(x, mesh, each)
    options = {"enable_gqa": True} if "uneven" in placements else {}
    return attention(given["query"], given["key"], given["key"], **options)


@pytest.mark.parametrize(
    ("placements", "error", "said"),
    [
        ({"query": [Shard(2), R]}, "ValueError", "query lies in Shard(dim=2) over mesh dim 0, and only batch and"),
        ({"key": [R, Shard(3)]}, "ValueError", "key lies in Shard(dim=3) over mesh dim 1, and only batch and heads"),
        ({"key": [R, Partial()]}, "ValueError", "key lies in Partial(sum) over mesh dim 1, and only batch and heads"),
        (
            {"query": [Shard(0), R], "key": [Shard(1), R]}, "ValueError",
            "key lies in Shard(dim=1) over mesh dim 0, which is of heads, where query has shards of batch",
        ),
        ({"key": None}, "RuntimeError", "key must be a DTensor, as query is with [Replicate(), Replicate()], got"),
        ({"query": None}, "RuntimeError", "query must be a DTensor, as key is with [Replicate(), Replicate()], got"),
        (
            {"query": [H, R], "key": [H, R], "uneven": None}, "ValueError",
            "key must have heads of which 2 ranks hold as many each, got 3 heads of key for 6 of query: redistribute",
        ),
    ],
)  # fmt: skip
def test_attention_refuses_other_placements(ranks, placements, error, said):
    for each in ranks(4, refused_attention, placements):
        assert each.args[0] == error
        assert each.args[1].startswith(f"attention: {said}")


ROWS, COLUMNS = 5, 40  # five rows are shards of two, two, one and none, or of three and two


def sampling_calls(name):
    """(function, tensors by name, other arguments) of a call of each function."""
    logits, rows = 3 * tensor(ROWS, COLUMNS), torch.arange(ROWS)
    per_row = {"top_k": rows + 1, "top_p": torch.linspace(0.5, 1.0, ROWS), "min_p": torch.linspace(0.0, 0.3, ROWS)}
    seeds = {"seed": rows * 7 + 1, "position": rows + 3}
    if name == "sample":
        beside = {"temperature": torch.linspace(0.5, 1.5, ROWS), "logit_bias": tensor(COLUMNS, seed=3)}
        return sample, {"logits": logits, **per_row, **seeds, **beside}, {"return_logprobs": "raw", "top_logprobs": 2}
    if name == "sample of one seed":  # whose draws have their numbers among all
        return sample, {"logits": logits}, {"seed": 5, "return_kept": True, "top_k": 8}
    if name == "sample, penalized":
        ids = {"token_ids": torch.arange(3 * ROWS).view(ROWS, 3), "repetition": torch.linspace(1.0, 2.0, ROWS)}
        return sample, {"logits": logits, **ids, **seeds}, {"presence": 0.5, "return_logprobs": "raw"}
    if name == "speculative_sample":
        tensors = {"target_logits": 2 * tensor(ROWS, 3, 9), "draft_tokens": torch.arange(2 * ROWS).view(ROWS, 2) % 9}
        return speculative_sample, {**tensors, **seeds, "top_p": per_row["top_p"]}, {}
    if name == "speculative_sample of a tree":
        tensors = {
            "target_logits": 2 * tensor(ROWS, 4, 9), "draft_tokens": torch.arange(3 * ROWS).view(ROWS, 3) % 9,
            "draft_probs": tensor(ROWS, 3, 9, seed=1).softmax(2), "draft_lengths": torch.arange(ROWS) % 4,
            "parents": torch.tensor([[-1, -1, 0], [-1, 0, 1]]).repeat(ROWS, 1)[:ROWS],
            "temperature": torch.linspace(0.5, 2.0, 4 * ROWS).view(ROWS, 4), "logit_bias": tensor(ROWS, 4, 9, seed=2),
            "bitmask": torch.full((ROWS, 1), 0b101101111, dtype=torch.int32),
        }  # fmt: skip
        return speculative_sample, tensors, {"verify": "tree", "seed": 3, "return_logprobs": "processed"}
    if name == "penalize":
        ids = torch.arange(3 * ROWS).view(ROWS, 3)
        tensors = {"logits": logits, "token_ids": ids, "repetition": torch.linspace(1.0, 2.0, ROWS)}
        return penalize, tensors, {"presence": 0.5}
    first, filter = ("probs" if "renorm" in name else "logits"), name[:5]
    rows = logits.softmax(1) if first == "probs" else logits
    return getattr(fused_softmax, name), {first: rows, filter: per_row[filter]}, {}


def sampled(group, name, way, placements):
    route.INTERPRET, mesh = way == "kernels", mesh_of((4,) if len(placements) == 1 else (2, 2))
    function, tensors, others = sampling_calls(name)
    mine = {}
    for i, (argument, each) in enumerate(tensors.items()):  # what is not the first lies in shards, or whole
        by_rows = len(each) == ROWS and i % 2 == 0
        mine[argument] = distribute_tensor(each, mesh, placements if by_rows else [R] * mesh.ndim)
    with CommDebugMode() as communication:
        found = function(**mine, **others)
    first = next(each for each in (found if isinstance(found, tuple) else [found]))
    whole = tree_map_only(torch.Tensor, lambda each: each.full_tensor(), found)
    return whole, first.placements, communication.get_total_counts()


FILTERS = [
    "top_k_mask_logits", "top_p_mask_logits", "min_p_mask_logits", "top_k_renorm_probs", "top_p_renorm_probs",
    "penalize",
]  # fmt: skip


@pairwise()
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("placements", [[Shard(0)], [Shard(0), R], [Shard(0), Shard(0)]])
@pytest.mark.parametrize("name", [
    "sample", "sample of one seed", "sample, penalized", "speculative_sample", "speculative_sample of a tree", *FILTERS,
])  # fmt: skip
def test_sampling_of_shards_is_that_of_whole_rows(ranks, name, placements, way):
    if way == "kernels" and not name.startswith(("sample", "penalize")):
        pytest.skip("no kernel of this function")
    function, tensors, others = sampling_calls(name)
    if name == "sample of one seed":
        others |= {"position": torch.arange(ROWS)}
    wanted = function(**tensors, **others)
    for found, of_rows, moves in ranks.values(4, sampled, name, way, placements):
        assert (list(of_rows), moves) == (placements, 0)
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6, equal_nan=True)


def drawn_by_generators(group):
    """Tokens of 200 equal rows, of generators whose states differ by rank; and out=."""
    mesh = mesh_of((2, 2))
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    logits = distribute_tensor(torch.zeros(200, 50), mesh, [Shard(0), Replicate()])
    out = distribute_tensor(torch.zeros(200, dtype=torch.int64), mesh, [Shard(0), Replicate()])
    tokens = sample(logits, generator=generator, out=out).tokens
    assert tokens is out
    return tokens.full_tensor(), sample(logits, generator=generator).tokens.to_local()


@pytest.mark.exhaustive
def test_without_a_seed_ranks_with_the_same_rows_draw_the_same_tokens(ranks):
    found = ranks.values(4, drawn_by_generators)
    wanted = sample(torch.zeros(200, 50), generator=torch.Generator().manual_seed(0)).tokens
    for tokens, _ in found:
        torch.testing.assert_close(tokens, wanted)
    locals_of = [local for _, local in found]
    assert torch.equal(locals_of[0], locals_of[1])
    assert torch.equal(locals_of[2], locals_of[3])
    assert not torch.equal(locals_of[0], locals_of[2])


def refused_sampling(group, name, placements, plain):
    function, tensors, others = sampling_calls(name)
    mesh = mesh_of((4,))
    names = list(tensors)
    whole = {argument: distribute_tensor(each, mesh, [Replicate()]) for argument, each in tensors.items()}
    if plain:
        whole[names[1]] = tensors[names[1]]
    else:
        whole[names[0]] = placed(tensors[names[0]], mesh, placements)
    return function(**whole, **others)


@pytest.mark.parametrize("name", ["sample", "speculative_sample", *FILTERS])
@pytest.mark.parametrize("placement", [Shard(-1), Partial(), None])
def test_sampling_refuses_shards_of_the_vocabulary_and_plain_tensors(ranks, name, placement):
    _, tensors, _ = sampling_calls(name)
    first, second, *_ = tensors
    last = tensors[first].ndim - 1
    where = Shard(last) if placement == Shard(-1) else placement
    for each in ranks(4, refused_sampling, name, [where], placement is None):
        error, said = each.args[:2]
        if placement is None:
            assert error == "RuntimeError"
            assert said.startswith(f"{name}: {second} must be a DTensor, as {first} is with [Replicate()], got a plain")
        else:
            assert error == "ValueError"
            assert said.startswith(f"{name}: {first} lies in {where!r} over mesh dim 0, and only rows may lie in")
            assert said.endswith(f"{first}.redistribute(placements=...) with [Shard(0)] (rows) or [Replicate()]")


def of_another_mesh(group):
    one, other = mesh_of((2, 2)), init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
    logits = distribute_tensor(tensor(ROWS, COLUMNS), one, [Replicate(), Replicate()])
    return sample(logits, top_k=distribute_tensor(torch.arange(ROWS), other, [Replicate()]), seed=1)


def test_a_dtensor_of_another_mesh_is_refused(ranks):
    for each in ranks(4, of_another_mesh):
        assert each.args[0] == "RuntimeError"
        assert each.args[1].startswith("sample: top_k must lie on the mesh of logits, DeviceMesh((2, 2)")


def implicitly(group):
    from torch.distributed.tensor.experimental import implicit_replication

    logits = distribute_tensor(tensor(ROWS, COLUMNS), mesh_of((4,)), [Shard(0)])
    with implicit_replication():
        return fused_softmax.top_k_mask_logits(logits, torch.arange(ROWS) + 1).full_tensor()


def test_within_implicit_replication_a_plain_tensor_is_the_same_on_all_ranks(ranks):
    wanted = fused_softmax.top_k_mask_logits(tensor(ROWS, COLUMNS), torch.arange(ROWS) + 1)
    for found in ranks.values(4, implicitly):
        torch.testing.assert_close(found, wanted)
