"""route of DTensors: each rank routes its rows, and counts, sums and losses are those of all ranks' rows."""

import pytest
import torch
from products import pairwise
from test_shards_dtensor import mesh_of
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from fused_softmax import route

R = Replicate()
N_EXPERTS, K = 8, 3
EVERYTHING = {"dense": True, "return_aux_loss": True, "return_z_loss": True}


def tensor(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def arguments(shape):
    tensors = {
        "logits": 2 * tensor(*shape, N_EXPERTS), "bias": tensor(N_EXPERTS, seed=1) / 4,
        "noise": tensor(*shape, N_EXPERTS, seed=2), "row_mask": tensor(*shape, seed=3) > -1,
    }  # fmt: skip
    return tensors, {"score": "sigmoid", "n_groups": 4, "groups_kept": 2, "scale": 2.0, **EVERYTHING}


def gradient_of(out, leaf, place):
    """The gradient of all that has one; place: puts a weight of the weights where they lie."""
    of_weights = place(torch.linspace(-1, 1, out.weights.numel()).view(out.weights.shape))
    total = (out.weights * of_weights).sum() + out.dense.square().sum() + out.prob_sums[2]
    return torch.autograd.grad(total + 3 * out.aux_loss + 5 * out.z_loss, leaf)[0]


def routed(group, shape, placements, options):
    mesh = mesh_of((4,) if len(placements) == 1 else (2, 2))
    tensors, others = arguments(shape)
    mine = {
        argument: distribute_tensor(each, mesh, [R] * mesh.ndim if argument == "bias" else placements)
        for argument, each in tensors.items()
    }
    leaf = mine.pop("logits").requires_grad_()
    out = route(leaf, K, **mine, **others, **options)
    dx = gradient_of(out, leaf, lambda each: distribute_tensor(each, mesh, placements))
    return [each.full_tensor().detach() for each in (*out, dx)], [each.placements for each in out]


@pairwise()
@pytest.mark.parametrize("length", [None, 2])
@pytest.mark.parametrize(
    ("shape", "placements"),
    [
        ((10,), [Shard(0), R]), ((16,), [Shard(0)]), ((16,), [Shard(0), Shard(0)]), ((6,), [Shard(0)]),
        ((4, 6), [Shard(0), R]), ((2, 8), [Shard(0), Shard(1)]), ((4, 6), [R, R]),
    ],
    ids=str,
)  # fmt: skip
def test_routing_of_shards_is_that_of_all_rows(ranks, shape, placements, length):
    if length and shape in ((10,), (6,)):
        shape = (*shape[:-1], 12) if len(placements) == 2 else (8,)
    options = {"sequence_length": length}
    tensors, others = arguments(shape)
    leaf = tensors.pop("logits").requires_grad_()
    out = route(leaf, K, **tensors, **others, **options)
    wanted = [*(each.detach() for each in out), gradient_of(out, leaf, lambda each: each)]
    everywhere = [R] * len(placements)
    for found, where in ranks.values(4, routed, shape, placements, options):
        assert torch.equal(found[1], wanted[1])
        assert torch.equal(found[2], wanted[2])
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        by_row, of_all = [list(each) for each in where[:2] + where[6:]], [list(each) for each in where[2:6]]
        assert by_row == [placements] * 3
        assert of_all == [everywhere] * 4


def refused(group, shape, placements, options):
    mesh = mesh_of((4,))
    return route(distribute_tensor(tensor(*shape, N_EXPERTS), mesh, placements), K, **options)


@pytest.mark.parametrize(
    ("shape", "placements", "options", "error", "words"),
    [
        ((8,), [Shard(1)], {}, "ValueError", "route: logits lies in Shard(dim=1) over mesh dim 0, and only rows"),
        ((8,), [Partial()], {}, "ValueError", "route: logits lies in Partial"),
        (
            (8,), [Shard(0)], {"sequence_length": 4, "return_aux_loss": True}, "ValueError",
            "route: sequence_length must divide the 2 rows that lie together on a rank",
        ),
        (
            (2, 8), [Shard(1)], {"sequence_length": 8, "return_aux_loss": True}, "ValueError",
            "route: sequence_length must divide the 2 rows that lie together on a rank",
        ),
        ((8,), [Shard(0)], {"bias": torch.zeros(N_EXPERTS)}, "RuntimeError", "route: bias must be a DTensor"),
    ],
    ids=["experts", "partial", "sequence", "sequence-of-a-dim", "plain"],
)  # fmt: skip
def test_what_does_not_fit_in_shards_raises_on_every_rank(ranks, shape, placements, options, error, words):
    for each in ranks(4, refused, shape, placements, options):
        assert each.args[0] == error
        assert each.args[1].startswith(words)
