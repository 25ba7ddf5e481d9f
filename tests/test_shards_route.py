"""route of DTensors: each rank routes its rows, and counts, sums and losses are those of all ranks' rows."""

import contextlib
import math
from unittest import mock

import pytest
import torch
from products import pairwise
from test_shards_dtensor import WAYS, mesh_of
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from fused_softmax import explain, route
from fused_softmax.core import route as routes
from fused_softmax.ops.routing import dtensor, reference

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


def routed(group, way, shape, placements, options):
    routes.INTERPRET = way == "kernels"
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
@pytest.mark.parametrize("way", WAYS)
def test_routing_of_shards_is_that_of_all_rows(ranks, way, shape, placements, length):
    if length and shape in ((10,), (6,)):
        shape = (*shape[:-1], 12) if len(placements) == 2 else (8,)
    options = {"sequence_length": length}
    tensors, others = arguments(shape)
    leaf = tensors.pop("logits").requires_grad_()
    out = route(leaf, K, **tensors, **others, **options)
    wanted = [*(each.detach() for each in out), gradient_of(out, leaf, lambda each: each)]
    everywhere = [R] * len(placements)
    for found, where in ranks.values(4, routed, way, shape, placements, options):
        assert torch.equal(found[1], wanted[1])
        assert torch.equal(found[2], wanted[2])
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        by_row, of_all = [list(each) for each in where[:2] + where[6:]], [list(each) for each in where[2:6]]
        assert by_row == [placements] * 3
        assert of_all == [everywhere] * 4


SUMS = {"return_aux_loss": True, "return_z_loss": True}
CASES = {
    "softmax": {**SUMS, "dense": True},
    "scores of all": {**SUMS, "renormalize": False, "scale": 1.5},
    "sequences": {**SUMS, "score": "sigmoid", "sequence_length": 2},
    "the choice first": {**SUMS, "score_first": False, "score": "sqrtsoftplus", "bias": True, "noise": True},
    "replay": {**SUMS, "dense": True, "indices": True},
    "one loss": {"return_aux_loss": True, "return_counts": False},
    "no sums": {"return_counts": False},
    "16 bits": {**SUMS, "n_groups": 4, "groups_kept": 2, "dtype": torch.bfloat16},
}  # fmt: skip


def hard_rows(n, options):
    """Logits and the tensors of options, of rows of which some are masked, some NaN, and some of no distribution."""
    options = dict(options)
    logits = (2 * tensor(n, N_EXPERTS)).to(options.pop("dtype", torch.float32))
    logits[1, 2], logits[3], logits[0, :2] = math.nan, -math.inf, -math.inf
    made = {
        "bias": lambda: tensor(N_EXPERTS, seed=1) / 4, "noise": lambda: tensor(n, N_EXPERTS, seed=2),
        "indices": lambda: tensor(n, N_EXPERTS, seed=4).argsort(-1)[:, :K].int(),
    }  # fmt: skip
    tensors = {name: make() for name, make in made.items() if options.pop(name, False)}
    if "indices" in tensors:
        tensors["indices"][0] = -1  # a row that is routed to nobody
        tensors["indices"][2, 1] = tensors["indices"][2, 0]
    return logits, tensors | {"row_mask": torch.arange(n) % 6 != 4}, options


def graded(out, leaf, place):
    """The results of a call, and the gradient of all that has one."""
    total = 0.0
    for i, each in enumerate(out):
        if each is not None and each.dtype.is_floating_point:
            weight = torch.linspace(-1, 2 + i, each.numel(), dtype=torch.float64).view(each.shape).to(each.dtype)
            total = total + (each.nan_to_num() * place(weight, each)).sum()
    return [*(each for each in out if each is not None), torch.autograd.grad(total, leaf)[0]]


def hard(group, n, name, masked):
    routes.INTERPRET = True
    mesh = mesh_of((4,))
    logits, tensors, options = hard_rows(n, CASES[name])
    tensors["row_mask"][:masked] = False
    mine = {key: distribute_tensor(each, mesh, [R if key == "bias" else Shard(0)]) for key, each in tensors.items()}
    leaf = distribute_tensor(logits, mesh, [Shard(0)]).requires_grad_()
    with mock.patch.object(dtensor, "_of_all", wraps=dtensor._of_all) as told, explain() as calls:
        out = route(leaf, K, **mine, **options)
    found = graded(out, leaf, lambda weight, like: distribute_tensor(weight, mesh, like.placements))
    return [each.full_tensor().detach() for each in found], told.call_count, calls[-1].route, len(leaf.to_local())


@pairwise()
@pytest.mark.parametrize("masked", [0, 4, 16])  # of the first rows: none, at least those of a rank, all
@pytest.mark.parametrize("n", [16, 10, 6])  # 4 rows a rank; 3, 3, 3 and 1; 2, 2, 2 and none
@pytest.mark.parametrize("name", CASES)
def test_kernels_route_a_ranks_rows_whatever_these_hold(ranks, name, n, masked):
    if name == "sequences" and n == 10:
        n = 14
    logits, tensors, options = hard_rows(n, CASES[name])
    tensors["row_mask"][:masked] = False
    leaf = logits.double().requires_grad_()
    wanted = graded(reference.route(leaf, K, **tensors, **options), leaf, lambda weight, _: weight)
    moved = {"no sums": 0, "one loss": 3, "sequences": 6}.get(name, 4)
    rtol = 1e-2 if logits.dtype is torch.bfloat16 else 1e-5
    for found, told, way, held in ranks.values(4, hard, n, name, masked):
        assert (told, way) == (moved, "kernel" if held else "composed")
        assert found[-1].dtype == logits.dtype
        for ours, truth in zip(found, wanted, strict=True):
            near = {"rtol": rtol, "atol": rtol / 10} if ours is found[-1] else {"rtol": 1e-5, "atol": 1e-6}
            torch.testing.assert_close(ours.double(), truth.double(), **near, equal_nan=True)


def twice(group, way):
    routes.INTERPRET = way == "kernels"
    mesh = mesh_of((4,))
    leaf = distribute_tensor(2 * tensor(6, N_EXPERTS), mesh, [Shard(0)]).requires_grad_()
    return twice_graded(leaf, lambda each: distribute_tensor(each, mesh, [Shard(0)])).full_tensor()


def twice_graded(leaf, place):
    out = route(leaf, K, score="sigmoid", **SUMS)
    total = (out.weights * place(tensor(6, K, seed=1))).sum() + 3 * out.aux_loss + 5 * out.z_loss
    (dx,) = torch.autograd.grad(total, leaf, create_graph=True)
    return torch.autograd.grad((dx * place(tensor(6, N_EXPERTS, seed=2))).sum(), leaf)[0]


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_of_the_gradient(ranks, way):
    wanted = twice_graded((2 * tensor(6, N_EXPERTS)).requires_grad_(), lambda each: each)
    for found in ranks.values(4, twice, way):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def compiled(group, way):
    """(results, gradient) of an eager call and of a compiled one, made whole."""
    routes.INTERPRET = way == "kernels"
    mesh, found = mesh_of((2,)), []
    tensors, others = arguments((16,))
    mine = {name: distribute_tensor(each, mesh, [R if name == "bias" else Shard(0)]) for name, each in tensors.items()}
    leaf = mine.pop("logits").requires_grad_()
    for call in (route, torch.compile(route, backend="aot_eager")):
        out = call(leaf, K, **mine, **others)
        dx = gradient_of(out, leaf, lambda each: distribute_tensor(each, mesh, [Shard(0)]))
        found.append([each.full_tensor().detach() for each in (*out, dx)])
    return found


@pytest.mark.parametrize("way", WAYS)
def test_compiled_shards_are_routed_alike(ranks, way):
    for eager, traced in ranks.values(2, compiled, way):
        torch.testing.assert_close(traced, eager)


def explained(group, n_experts, k, watched):
    routes.INTERPRET = True
    leaf = distribute_tensor(tensor(6, n_experts), mesh_of((4,)), [Shard(0)]).requires_grad_()
    with explain() as calls, CommDebugMode() if watched else contextlib.nullcontext():
        route(leaf, k, return_aux_loss=True).aux_loss.backward()
    return [(each.function, each.route, each.reason, each.kernels, each.depth) for each in calls]


WHO = {
    "kernels": (N_EXPERTS, K, False, ""),
    "too many": (70, 65, False, "no kernel has more than 4096 experts, or a k of more than 64"),
    "a mode": (N_EXPERTS, K, True, "CommDebugMode, a TorchDispatchMode, watches the call"),
}


@pytest.mark.parametrize("who", WHO)
def test_explain_says_who_routed_a_ranks_rows(ranks, who):
    *asked, refused = WHO[who]
    plain = "plain tensors, with nothing watching"
    for rank, (outer, *inner) in enumerate(ranks.values(4, explained, *asked)):
        assert outer == ("route", "sharded", "the input is a DTensor", [], 0)
        if rank < 3 and not refused:
            assert inner == [
                ("route", "kernel", plain, ["_route"], 1), ("route backward", "kernel", plain, ["_route_gradient"], 0),
            ]  # fmt: skip
        else:
            why = "there are no rows" if rank == 3 else refused
            assert inner == [("route", "composed", why, [], 1)]


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
            f"route: sequence_length must divide the 2 rows of logits of shape (8, {N_EXPERTS}) that lie together on a "
            "rank, for no sequence is spread over ranks, got 4",
        ),
        (
            (2, 8), [Shard(1)], {"sequence_length": 8, "return_aux_loss": True}, "ValueError",
            f"route: sequence_length must divide the 2 rows of logits of shape (2, 8, {N_EXPERTS}) that lie together "
            "on a rank, for no sequence is spread over ranks, got 8",
        ),
        ((8,), [Shard(0)], {"bias": torch.zeros(N_EXPERTS)}, "RuntimeError", "route: bias must be a DTensor"),
    ],
    ids=["experts", "partial", "sequence", "sequence-of-a-dim", "plain"],
)  # fmt: skip
def test_what_does_not_fit_in_shards_raises_on_every_rank(ranks, shape, placements, options, error, words):
    for each in ranks(4, refused, shape, placements, options):
        assert each.args[0] == error
        assert each.args[1].startswith(words)
