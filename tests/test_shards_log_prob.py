"""Log-probabilities of rows in shards over ranks, against the formula of whole rows; by kernels and by torch."""

import contextlib
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peered import PART_COLS, WIDE, in_parts
from products import pairwise
from sharded import INF, N_CLASSES, N_ROWS, SIZES, WAYS, by, close, logits, over, same_on_all, shard
from test_log_prob import ALL, formula, gradients_like, targets
from test_shards_dtensor import mesh_of
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from fused_softmax import log_prob
from fused_softmax.ops.losses.log_prob import STATS
from fused_softmax.ops.losses.options import LogProb
from fused_softmax.ops.losses.over_ranks import dtensor as on_shards
from fused_softmax.ranks import groups as distributed
from fused_softmax.ranks.peers import UNEVEN

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
FEW = 4  # rows, where a test makes many calls


def results(output):
    """log_prob, entropy, lse and statistics, as far as they were asked for."""
    found = [output] if isinstance(output, torch.Tensor) else [*output[:3], *(output.stats or ())]
    return [each for each in found if each is not None]


def differentiated(output, leaf):
    """Results, and the gradient of the leaf by numbers that tell them apart."""
    found = results(output)
    graded = [] if isinstance(output, torch.Tensor) else output[1:3]
    graded = [found[0], *[each for each in graded if each is not None]]
    parts = [of.to(y.dtype) for of, y in zip(gradients_like(graded), graded, strict=True)]
    return *[each.detach() for each in found], *torch.autograd.grad(graded, [leaf], parts)


def of_shards(group, way, x, target, options):
    by(way)
    leaf = shard(x, group, -1).requires_grad_()
    given = leaf * 1 if options.get("inplace_backward") else leaf
    return differentiated(log_prob(given, target, **over(group), **options), leaf)


def of_whole(x, target, options):
    """The same by the formula, of float64."""
    leaf = x.double().requires_grad_()
    found = formula(leaf, target, **{key: each for key, each in options.items() if key in LogProb.OPTIONS})
    wants = [options.get(f"return_{name}", False) for name in ("entropy", "lse")]
    graded = [found[0], *[each for each, wanted in zip(found[1:3], wants, strict=True) if wanted]]
    stats = dict(zip(STATS, found[3:], strict=True))
    wanted = [*graded, *[stats[name] for name in STATS if name in options.get("return_stats", ())]]
    return *[each.detach() for each in wanted], *torch.autograd.grad(graded, [leaf], gradients_like(graded))


def are_right(found, wanted, dtype=FP32, near=1e-5):
    near = near if dtype != FP64 else 1e-11
    for ours, truth in zip(same_on_all([each[:-1] for each in found]), wanted[:-1], strict=True):
        assert ours.shape == truth.shape
        close(ours, truth, near)
    dx = torch.cat([each[-1] for each in found], -1)
    assert dx.dtype == dtype
    close(dx, wanted[-1], max(near, 4 * torch.finfo(dtype).eps))


@pairwise()
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16, FP64], ids=str)
@pytest.mark.parametrize("scale", [None, 1.5, -0.5])
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("temperature", [None, 0.7, "of rows"])
@pytest.mark.parametrize("k", [None, 1, 5])
@pytest.mark.parametrize("ignore_index", [-100, 3])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("wanted", [{}, {"return_entropy": True}, {"return_lse": True}, ALL], ids=len)
def test_results_are_those_of_whole_rows(
    ranks, n, way, dtype, scale, softcap, temperature, k, ignore_index, inplace, wanted
):
    x = logits().to(dtype)
    if temperature == "of rows":
        temperature = torch.linspace(0.3, 2, N_ROWS)
    options = {"scale": scale, "softcap": softcap, "temperature": temperature, "ignore_index": ignore_index, **wanted}
    target = targets(x, k, ignore_index=ignore_index)
    found = ranks.values(n, of_shards, way, x, target, options | {"inplace_backward": inplace})
    are_right(found, of_whole(x, target, options), dtype)


def test_every_option_is_tried():
    """One that a part of the way over ranks forgets would be left out of the results without a word."""
    assert set(LogProb.OPTIONS) == {"scale", "softcap", "temperature", "ignore_index"}
    assert {f"return_{name}" for name in ("entropy", "lse", "stats")} == set(ALL)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stat", STATS)
def test_each_statistic_alone(ranks, stat, way):
    x = logits().float()
    target, options = x.topk(3).indices, {"return_stats": (stat,)}
    are_right(ranks.values(3, of_shards, way, x, target, options), of_whole(x, target, options))


@pytest.mark.parametrize("way", WAYS)
def test_the_first_of_equals_is_the_likeliest_whichever_ranks_have_them(ranks, way):
    x = torch.zeros(6, N_CLASSES)
    best = [(0, 12), (12, 13), (13, 36), (5,), (11, 12, 13), (36,)]
    for row, columns in enumerate(best):
        x[row, list(columns)] = 2.0
    target = torch.tensor([[*columns, 7, 7, 7][:3] for columns in best])
    for n in (3, 4):
        for *_, top, _ in ranks.values(n, of_shards, way, x, target, {"return_stats": ("is_top1",)}):
            assert top.tolist() == [[i == 0 for i in range(3)] for _ in best]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(N_CLASSES,), (2, 3, N_CLASSES), (0, N_CLASSES)], ids=str)
@pytest.mark.parametrize("k", [None, 2])
def test_logits_of_any_shape(ranks, shape, k, way):
    x = logits(1, math.prod(shape)).reshape(shape).float()
    target = torch.full((*shape[:-1], *([] if k is None else [k])), 13)
    are_right(ranks.values(4, of_shards, way, x, target, ALL), of_whole(x, target, ALL))


@pytest.mark.parametrize("way", WAYS)
def test_rows_that_are_ignored_and_targets_that_are_no_class(ranks, way):
    x = logits().float()
    target = targets(x, 3)
    target[2], target[5] = -100, -100
    clean = of_whole(x, target, ALL)
    x[2], x[5, 1], x[5, 30] = math.nan, INF, -INF
    are_right(ranks.values(3, of_shards, way, x, target, ALL), clean)
    target[3, 0] = 37
    found = ranks(3, of_shards, way, x, target, {})
    if way == "torch":
        said = "log_prob: target 37 of row 9 is out of range [0, 36]"
        assert {each.args[:2] for each in found} == {("IndexError", said)}
        return
    for y, dx in found:
        assert y.isnan().nonzero().tolist() == [[3, 0]]
        assert dx.isnan().all(1).tolist() == [i == 3 for i in range(N_ROWS)]
        assert dx.isnan().any(1).tolist() == [i == 3 for i in range(N_ROWS)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [{}, {"return_entropy": True, "return_lse": True}], ids=len)
def test_shards_of_minus_infinity(ranks, options, way):
    x, target = logits(4).float(), torch.tensor([20, 3, 20, 11])
    x[0, :12], x[1, 13:], x[2, 12], x[3, :12] = -INF, -INF, -INF, -INF
    are_right(ranks.values(3, of_shards, way, x, target, options), of_whole(x, target, options))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", [math.nan, INF, -INF, "temperature"])
def test_rows_of_which_nothing_is_known(ranks, value, way):
    x, target, options = logits(4).float(), torch.tensor([20, 3, 20, 11]), ALL
    if value == "temperature":
        options = ALL | {"temperature": torch.tensor([1.0, 0.0, 2.0, -1.0])}
    else:
        x[1] = value
    found = same_on_all([each[:3] for each in ranks.values(4, of_shards, way, x, target, options)])
    wanted = log_prob(x.double(), target, **options)
    assert wanted.log_prob[1].isnan()
    for ours, truth in zip(found, wanted[:3], strict=True):
        close(ours, truth)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("temperature", [None, "of rows"])
def test_great_logits_keep_the_digits_of_small_results(ranks, temperature, way):
    """lse alone would have rounded them away: at 10000 it is a multiple of 0.001."""
    x, target = logits().float() / 3, torch.arange(N_ROWS) * 4
    x[torch.arange(N_ROWS), target] += 8
    x += 10000
    options = {"return_entropy": True, "return_stats": ("log_sum_sq_probs",)}
    if temperature:
        options["temperature"] = torch.ones(N_ROWS)
    found, wanted = ranks.values(3, of_shards, way, x, target, options), of_whole(x, target, options)
    assert wanted[0].min() > -0.2
    for ours, truth in zip(found[0][:-1], wanted[:-1], strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=1e-7)
    close(torch.cat([each[-1] for each in found], 1), wanted[-1], 1e-6)


def behind_an_empty_shard(group, way, x, target):
    by(way)
    own = x if dist.get_rank(group) else x[:, :0]
    return log_prob(own, target, return_stats=("is_top1",), group=group, shard_sizes=(0, x.shape[1])).stats.is_top1


@pytest.mark.parametrize("way", WAYS)
def test_a_shard_without_columns_has_no_likeliest_class(ranks, way):
    """Even where all logits are as small as the greatest of no column."""
    x, target = torch.full((3, 5), -INF), torch.tensor([0, 1, 2])
    x[1, 1] = 0
    for top in ranks.values(2, behind_an_empty_shard, way, x, target):
        assert top.tolist() == [True, True, False]


def padded(group, way, x, target, n_classes, options):
    by(way)
    leaf = shard(x, group, 1).requires_grad_()
    return differentiated(log_prob(leaf * 1, target, **over(group), n_classes=n_classes, **options), leaf)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n_classes", [36, 13, 12, 5])
@pytest.mark.parametrize("inplace", [False, True])
def test_columns_past_n_classes_are_padding(ranks, inplace, n_classes, way):
    x, target = logits().float(), torch.arange(N_ROWS) % n_classes
    x[:, n_classes:] = math.nan
    found = ranks.values(3, padded, way, x, target, n_classes, ALL | {"inplace_backward": inplace})
    *wanted, dx = of_whole(x[:, :n_classes], target, ALL)
    are_right(found, (*wanted, torch.nn.functional.pad(dx, (0, N_CLASSES - n_classes))))


def over_the_logits(group, way, x, target):
    by(way)
    leaf = shard(x, group, 1).requires_grad_()
    given = leaf * 1
    y = log_prob(given, target, inplace_backward=True, **over(group))
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with pytest.raises(RuntimeError, match="a leaf that requires grad"):
        log_prob(leaf, target, inplace_backward=True, group=group)
    return leaf.grad, given.detach()


@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_takes_the_place_of_the_logits(ranks, way):
    for dx, given in ranks.values(1, over_the_logits, way, logits().float(), torch.arange(N_ROWS)):
        assert given.equal(dx)


def without_a_second_derivative(group, way, x, target):
    by(way)
    leaf = shard(x, group, 1).requires_grad_()
    found = log_prob(leaf, target, return_stats=("mean_logits",), **over(group))
    with pytest.raises(RuntimeError, match="mean_logits"):
        found.stats.mean_logits.sum().backward()
    (dx,) = torch.autograd.grad(found.log_prob.sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="log_prob: there is no second derivative over the ranks of a group"):
        dx.sum().backward()
    return dx.detach()


@pytest.mark.parametrize("way", WAYS)
def test_statistics_and_gradients_have_no_gradient(ranks, way):
    x, target = logits().float(), torch.arange(N_ROWS)
    leaf = x.double().requires_grad_()
    formula(leaf, target)[0].sum().backward()
    close(torch.cat(ranks.values(2, without_a_second_derivative, way, x, target), 1), leaf.grad)


def transformed(group, x, target):
    return torch.func.vmap(lambda x, target: log_prob(x, target, group=group))(x, target)


def test_a_transform_is_refused(ranks):
    for each in ranks(2, transformed, logits(2, 6).float(), torch.zeros(2, dtype=torch.long)):
        assert each.args[0] == "RuntimeError"


def compiled(group, x, target):
    by("kernels")
    leaf = shard(x, group, 1).requires_grad_()
    of_group = over(group)
    call = torch.compile(lambda x: log_prob(x * 2, target, **of_group).sum(), backend="eager")
    (dx,) = torch.autograd.grad(call(leaf), leaf)
    return dx


def test_a_compiler_leaves_the_call_out_of_its_graphs(ranks):
    x, target = logits().float(), torch.arange(N_ROWS)
    leaf = x.double().requires_grad_()
    formula(leaf * 2, target)[0].sum().backward()
    close(torch.cat(ranks.values(2, compiled, x, target), 1), leaf.grad)


ASKED = [
    {}, {"scale": 0.5}, {"scale": 1.5}, {"softcap": 4.0}, {"softcap": 9.0}, {"temperature": 0.5},
    {"temperature": torch.linspace(0.3, 2, FEW)}, {"temperature": torch.linspace(2, 0.3, FEW)},
    {"ignore_index": 3}, {"return_entropy": True}, {"return_lse": True}, {"return_stats": STATS}, {"scale": 0.0},
    {"return_stats": ("mean_logits",)},
]  # fmt: skip


def in_turn(group, as_on_gpu, cases):
    """Every case twice over equal shards and over others, between calls of this rank's columns alone."""
    by("kernels")
    over_ranks, alone, rank = [], [], dist.get_rank(group)
    waits = mock.patch.object(distributed, "_waits_for_nobody", return_value=False)
    with waits if as_on_gpu else contextlib.nullcontext():
        for x, target, options in cases * 2:
            even = x[:, : N_CLASSES - 1].chunk(2, 1)[rank].clone()
            for given, of_group in ((even, {"group": group}), (even, None), (shard(x, group, 1), over(group))):
                leaf = given.requires_grad_()
                t = target if of_group else target % even.shape[1]
                found = over_ranks if of_group else alone
                found.append(differentiated(log_prob(leaf, t, **options, **(of_group or {})), leaf))
    return over_ranks, alone


@pytest.mark.parametrize("as_on_gpu", [False, True])
def test_calls_that_differ_in_one_thing_take_turns(ranks, as_on_gpu):
    x, target = logits(FEW).float(), torch.tensor([0, 35, 18, 17])
    cases = [(x, target, options) for options in ASKED]
    cases += [(x, target.view(-1, 1), {}), (x[:3], target[:3], {}), (x.bfloat16(), target, {}), (x, target.int(), {})]
    of_ranks = ranks.values(2, in_turn, as_on_gpu, cases)
    for i, (given, t, options) in enumerate(cases * 2):
        whole = given[:, : N_CLASSES - 1], given
        for x, *found in zip(whole, *[over_ranks[2 * i :] for over_ranks, _ in of_ranks], strict=False):
            are_right(found, of_whole(x, t, options), x.dtype)
        half = (N_CLASSES - 1) // 2
        for own, (_, alone) in zip(whole[0].split(half, 1), of_ranks, strict=True):
            for ours, truth in zip(alone[i], of_whole(own, t % half, options), strict=True):
                close(ours, truth, max(1e-5, 4 * torch.finfo(given.dtype).eps))


def by_peers(group, x, target, options):
    in_parts(PART_COLS)
    rank, sizes = dist.get_rank(group), WIDE[dist.get_world_size(group)]
    leaf, found = x.split(sizes, 1)[rank].clone().requires_grad_(), []
    for _ in range(2):  # the second is found
        y = log_prob(leaf, target, **options, group=group, shard_sizes=sizes, transport="peer")
        found.append(differentiated(y, leaf))
    assert all(a.equal(b) for a, b in zip(*found, strict=True))
    return found[0]


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "options"), [(FP32, {}), (FP32, ALL), (FP64, ALL)], ids=str)
def test_ranks_exchange_by_peers_too(ranks, dtype, options, n):
    x = logits(8, 331).to(dtype)
    target = torch.tensor([0, 330, 129, 130, 200, 201, -100, 128]).unsqueeze(1).expand(-1, 2).contiguous()
    are_right(ranks.values(n, by_peers, x, target, options), of_whole(x, target, options), dtype)


NEEDS_GROUP = "log_prob: {} needs group, got group=None"


@pytest.mark.parametrize("arguments", [{"n_classes": 3}, {"transport": "peer"}, {"shard_sizes": [3]}], ids=str)
def test_arguments_of_shards_need_a_group(arguments):
    with pytest.raises(ValueError, match=f"^{NEEDS_GROUP.format(*arguments)}$"):
        log_prob(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long), **arguments)


def called(group, arguments, on):
    """A call, with other arguments on the last rank, or on all."""
    by("torch")
    last = dist.get_rank(group) == dist.get_world_size(group) - 1
    given = {"input": torch.zeros(2, 4), "target": torch.zeros(2, dtype=torch.long)}
    given |= arguments if last or on == "all" else {}
    return log_prob(given.pop("input"), given.pop("target"), **given, group=group)


WRONG = [
    ({"n_classes": 0}, "ValueError", "n_classes must be at least 1, got 0"),
    ({"n_classes": 13}, "ValueError", "the shards hold (4, 4, 4) columns, together fewer than n_classes=13. " + UNEVEN),
    ({"shard_sizes": [3, 3, 3]}, "ValueError", "shard_sizes=(3, 3, 3) gives rank"),
    ({"shard_sizes": "444"}, "TypeError", "shard_sizes must be a sequence of ints, one for each rank, got str"),
    ({"transport": "pigeon"}, "ValueError", "transport must be None or one of ('peer', 'collective'), got 'pigeon'"),
    ({"target": torch.zeros(3, dtype=torch.long)}, "ValueError", "target must have shape (2,) or (2, k) for logits"),
    ({"target": torch.zeros(2)}, "RuntimeError", "target must be of int64, int32 or uint8, got torch.float32"),
    ({"target": torch.tensor([0, 12])}, "IndexError", "target 12 of row 1 is out of range [0, 11], of the columns of"),
    ({"temperature": 0.0}, "ValueError", "temperature must be more than 0, got 0.0"),
    ({"temperature": torch.ones(3)}, "ValueError", "temperature must have shape (2,), got (3,)"),
    ({"return_stats": ("top5",)}, "ValueError", "return_stats must be names among log_sum_sq_probs, mean_logits, "),
    ({"input": torch.zeros(2, 4, dtype=torch.long)}, "NotImplementedError", "input must be of a float dtype, got"),
    ({"softcap": "4"}, "TypeError", "softcap must be a number, not str ('4')"),
    ({"kept": 3}, "TypeError", "kept must be a tuple (ids, offsets) or a Tensor that is a bitmask, not 3"),
]  # fmt: skip


@pytest.mark.parametrize("on", ["last", "all"])
@pytest.mark.parametrize(("arguments", "error", "said"), WRONG, ids=[str(each[0]) for each in WRONG])
def test_a_wrong_argument_is_an_error_on_every_rank(ranks, arguments, error, said, on):
    *others, last = ranks(3, called, arguments, on)
    assert last.args[0] == error
    assert last.args[1].startswith(f"log_prob: {said}")
    for each in others:
        if on == "all":
            assert each.args[0] == error
        else:
            assert each.args[:2] == ("RuntimeError", f"log_prob: rank 2 refused its call: {error}: {last.args[1]}")


ODD = {
    "dtype": {"input": torch.zeros(2, 4, dtype=FP64)}, "scale": {"scale": 2.0}, "temperature": {"temperature": 2.0},
    "softcap": {"softcap": 2.0}, "ignore_index": {"ignore_index": 1}, "wanted": {"return_lse": True},
    "result": {"dtype": BF16}, "targets": {"target": torch.zeros(2, 1, dtype=torch.long)},
    "rows": {"input": torch.zeros(3, 4), "target": torch.zeros(3, dtype=torch.long)},
    "kept": {"kept": torch.zeros(2, 1, dtype=torch.int32)},
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_ranks_that_differ_are_told_in_what(ranks, odd):
    for each in ranks(2, called, ODD[odd], "last"):
        assert each.args[0] == "RuntimeError"
        assert each.args[1].startswith("log_prob: the ranks of the group differ in ")
        assert f" {odd}: " in each.args[1]


def nan_and_then_an_error(group, way, odd):
    """As on a GPU, where nothing is compared beforehand; the second of four calls differs."""
    by(way)
    rank, found = dist.get_rank(group), []
    x, target = logits(3, 8).float().chunk(2, 1)[rank], torch.tensor([0, 5, 7])
    with mock.patch.object(distributed, "_waits_for_nobody", return_value=False):
        for i in range(4):
            try:
                found.append(log_prob(x, target, group=group, **(odd if i == 1 and rank else {})).isnan().tolist())
            except RuntimeError as error:
                found.append(str(error))
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("odd", [{"temperature": 2.0}, {"ignore_index": 3}], ids=str)
def test_what_is_not_compared_beforehand_gives_nan_and_then_an_error(ranks, odd, way):
    for first, second, said, last in ranks.values(2, nan_and_then_an_error, way, odd):
        assert (first, second, last) == ([False] * 3, [True] * 3, [False] * 3)
        assert said == "log_prob: an earlier call gave NaN, because the ranks of the group differed in their options"


def of_dtensor(group, way, mesh, placements, x, target, temperature, options):
    by(way)
    mesh = mesh_of(mesh)
    rows = [each if isinstance(each, Shard) and each.dim < x.ndim - 1 else Replicate() for each in placements]
    leaf = distribute_tensor(x, mesh, placements).requires_grad_()
    target = distribute_tensor(target, mesh, rows)
    if temperature is not None:
        options = options | {"temperature": distribute_tensor(temperature, mesh, rows)}
    output = log_prob(leaf, target, **options)
    found = results(output)
    assert all(list(each.placements) == rows for each in found)
    graded = found[:1] if isinstance(output, torch.Tensor) else found[:3]
    parts = [distribute_tensor(each.to(FP32), mesh, rows) for each in gradients_like(graded)]
    (dx,) = torch.autograd.grad(graded, [leaf], parts)
    assert dx.placements == leaf.placements
    return [each.full_tensor().detach() for each in (*found, dx)]


PLACED = [
    ((4,), [Shard(2)]), ((4,), [Replicate()]), ((4,), [Shard(0)]), ((2, 2), [Replicate(), Shard(2)]),
    ((2, 2), [Shard(0), Shard(2)]), ((2, 2), [Shard(2), Shard(1)]), ((2, 2), [Shard(2), Shard(2)]),
]  # fmt: skip


@pairwise()
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("mesh", "placements"), PLACED)
@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("of_rows", [False, True])
@pytest.mark.parametrize("wanted", [{}, ALL], ids=len)
@pytest.mark.parametrize("n_classes", [13, 3])
def test_dtensors(ranks, mesh, placements, k, of_rows, wanted, way, n_classes):
    x = logits(6, n_classes).float().reshape(3, 2, n_classes)
    target, temperature = targets(x, k), torch.linspace(0.5, 2, 6).reshape(3, 2) if of_rows else None
    whole = of_whole(x, target, wanted | {"temperature": temperature})
    for found in ranks.values(4, of_dtensor, way, mesh, placements, x, target, temperature, wanted):
        for ours, truth in zip(found, whole, strict=True):
            close(ours, truth)


def told_by_peers(group, x, target):
    """On GPUs a DTensor's ranks choose peers where they can; on CPUs they have to be told."""
    in_parts()
    chosen = on_shards.peers_of
    with mock.patch.object(on_shards, "peers_of", lambda name, transport, *rest: chosen(name, "peer", *rest)):
        return log_prob(distribute_tensor(x, mesh_of((4,)), [Shard(1)]), target).full_tensor()


def test_a_dtensors_ranks_exchange_by_peers_too(ranks):
    x, target = logits(4, 13).float(), torch.tensor([0, 12, -100, 5])
    for ours in ranks.values(4, told_by_peers, x, target):
        close(ours, formula(x.double(), target)[0])


def plain_beside(group, what):
    x, target = logits(6, 12).float(), torch.arange(6)
    x = distribute_tensor(x, mesh_of((2, 2)), [Replicate() if what == "whole" else Shard(0), Shard(1)])
    if what == "group":
        return log_prob(x, target, group=group)
    if what == "temperature":
        target = distribute_tensor(target, mesh_of((2, 2)), [Shard(0), Replicate()])
    return log_prob(x, target, temperature=torch.full((6,), 2.0)).full_tensor()


def test_plain_tensors_beside_a_dtensor(ranks):
    for ours in ranks.values(4, plain_beside, "whole"):
        close(ours, formula(logits(6, 12) / 2, torch.arange(6))[0])
    said = " must be a DTensor where the rows of the input lie in shards"
    for what in ("target", "temperature"):
        for each in ranks(4, plain_beside, what):
            assert each.args[0] == "ValueError"
            assert each.args[1].startswith(f"log_prob: {what}{said}")
    for each in ranks(4, plain_beside, "group"):
        assert each.args[0] == "TypeError"
        assert each.args[1].startswith("log_prob: group= takes this rank's columns as a plain tensor, got a DTensor")


def partial_logits(group, x, target):
    by("kernels")
    mesh = mesh_of((4,))
    given = torch.distributed.tensor.DTensor.from_local(x / 4, mesh, [Partial()], run_check=False)
    return log_prob(given, target).full_tensor()


def test_partial_logits_are_summed_first(ranks):
    x, target = logits(6, 12).float(), torch.arange(6)
    for ours in ranks.values(4, partial_logits, x, target):
        close(ours, formula(x.double(), target)[0])
