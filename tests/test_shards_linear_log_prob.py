"""linear_log_prob of classes in shards over ranks, against the formula of whole rows; by kernels and by torch."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peered import in_parts
from products import pairwise
from sharded import N_CLASSES, N_ROWS, SIZES, WAYS, by, close, logits, over, same_on_all, shard
from test_log_prob import ALL, formula, gradients_like, targets
from test_shards_dtensor import mesh_of
from test_shards_log_prob import WRONG, results
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fused_softmax
from fused_softmax import linear_log_prob
from fused_softmax.core import route
from fused_softmax.ops.losses.options import LogProb

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
FEATURES = 6
WANTS = [{}, {"return_entropy": True}, ALL]


def layer(dtype=FP32, master=False):
    """(input, weight, bias) whose logits differ by about 3."""
    x, w = logits(N_ROWS, FEATURES, 5) / 3, logits(N_CLASSES, FEATURES, 6) / 3
    of_layer = FP32 if master else dtype
    return x.to(dtype), w.to(of_layer), torch.linspace(-1, 1, N_CLASSES).to(of_layer)


def graded_of(output):
    """Those of the results that have a gradient."""
    return [output] if isinstance(output, torch.Tensor) else [each for each in output[:3] if each is not None]


def of_shards(group, way, x, w, bias, target, options):
    by(way)
    leaves = [x.clone(), shard(w, group, 0), *([] if bias is None else [shard(bias, group, 0)])]
    leaves = [each.requires_grad_() for each in leaves]
    y = linear_log_prob(*leaves[:2], target, linear_bias=None if bias is None else leaves[2], **options, **over(group))
    return [each.detach() for each in results(y)], gradients_of(y, leaves)


def gradients_of(y, leaves):
    graded = graded_of(y)
    parts = [of.to(each.dtype) for of, each in zip(gradients_like(graded), graded, strict=True)]
    return torch.autograd.grad(graded, leaves, parts)


def of_whole(x, w, bias, target, options):
    """(results, gradients) by the formula, of float64."""
    leaves = [each.double().requires_grad_() for each in (x, w, bias) if each is not None]
    z = torch.nn.functional.linear(*leaves)
    found = formula(z, target, **{key: each for key, each in options.items() if key in LogProb.OPTIONS})
    graded = [found[0], *[found[i] for i, name in ((1, "entropy"), (2, "lse")) if options.get(f"return_{name}")]]
    stats = found[3:] if "return_stats" in options else ()
    return [each.detach() for each in (*graded, *stats)], torch.autograd.grad(graded, leaves, gradients_like(graded))


def are_right(found, wanted, near=1e-5):
    """found: (results, gradients) of each rank."""
    same = same_on_all([[*values, gradients[0]] for values, gradients in found])
    for ours, truth in zip(same, [*wanted[0], wanted[1][0]], strict=True):
        close(ours, truth, near)
    for i, truth in enumerate(wanted[1][1:], 1):
        close(torch.cat([gradients[i] for _, gradients in found]), truth, near)


@pairwise()
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("chunk_size", [None, 4, 9])
@pytest.mark.parametrize("kept", ["auto", "keep", "recompute"])
@pytest.mark.parametrize("accumulate", ["fp32", "input"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("options", [{}, {"scale": 0.6, "softcap": 4.0}, {"ignore_index": 3}], ids=str)
@pytest.mark.parametrize("temperature", [None, 0.7, "of rows"])
@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize("wanted", WANTS, ids=len)
def test_results_are_those_of_whole_rows(
    ranks, n, way, chunk_size, kept, accumulate, biased, options, temperature, k, wanted
):
    x, w, bias = layer()
    temperature = torch.linspace(0.3, 2, N_ROWS) if temperature == "of rows" else temperature
    options = options | wanted | {"temperature": temperature}
    target, bias = targets(logits(), k, ignore_index=options.get("ignore_index", -100)), bias if biased else None
    how = {"chunk_size": chunk_size, "logits": kept, "accumulate": accumulate}
    found = ranks.values(n, of_shards, way, x, w, bias, target, options | how)
    are_right(found, of_whole(x, w, bias, target, options))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("dtype", "master"), [(BF16, False), (BF16, True), (FP64, False)], ids=str)
def test_dtypes(ranks, dtype, master, way):
    x, w, bias = layer(dtype, master)
    target = targets(logits())
    found = ranks.values(3, of_shards, way, x, w, bias, target, ALL | {"chunk_size": 4})
    assert [each.dtype for each in found[0][1]] == [each.dtype for each in (x, w, bias)]
    are_right(found, of_whole(x, w.to(dtype), bias.to(dtype), target, ALL), 1e-11 if dtype == FP64 else 4e-2)


def of_rows_in_shards(group, way, x, w, bias, target, options, sharded):
    in_parts() if options["transport"] == "peer" else by(way)
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    leaves = [(x.chunk(n)[rank] if sharded else x).clone(), shard(w, group, 0), shard(bias, group, 0)]
    leaves = [each.requires_grad_() for each in leaves]
    y = linear_log_prob(*leaves[:2], target, linear_bias=leaves[2], input_sharded=sharded, **options, **over(group))
    return [each.detach() for each in results(y)], gradients_of(y, leaves)


@pairwise(("n", "way", "sharded", "skips"))
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("sharded", "skips"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize("temperature", [None, "of rows"])
@pytest.mark.parametrize("dtype", ["fp32", "master"])
@pytest.mark.parametrize("how", [{}, {"chunk_size": 5, "logits": "recompute"}], ids=str)
@pytest.mark.parametrize("transport", ["collective", "peer"])
def test_rows_in_shards_and_rows_left_out(ranks, n, way, sharded, skips, k, temperature, dtype, how, transport):
    of_products = BF16 if dtype == "master" else FP32
    x, low = ((logits(rows, FEATURES, seed) / 3).to(of_products) for rows, seed in ((12, 5), (N_CLASSES, 6)))
    bias = torch.linspace(-1, 1, N_CLASSES).bfloat16().float()
    target = targets(logits(12), k)
    target.view(12, -1)[[0, 5, 7]] = -100
    options = ALL | how | {"skip_ignored": skips, "transport": transport}
    options |= {"temperature": torch.linspace(0.3, 2, 12) if temperature else None}
    found = ranks.values(n, of_rows_in_shards, way, x, low.float(), bias, target, options, sharded)
    values, gradients = of_whole(x, low, bias, target, options)
    if sharded:
        dx = torch.cat([each[0] for _, each in found])
        found = [(each, (dx, *others)) for each, (_, *others) in found]
    are_right(found, (values, gradients), 4e-2 if dtype == "master" else 1e-5)


def rows_that_do_not_fit(group, x, target):
    by("torch")
    linear_log_prob(x, torch.zeros(4, 5), target, group=group, input_sharded=True)


def test_rows_in_shards_that_do_not_fit_their_targets(ranks):
    said = "linear_log_prob: input_sharded takes [rows, in_features] of each rank and target [ranks * rows], got "
    for x, target in ((torch.zeros(2, 5), torch.zeros(2).long()), (torch.zeros(2, 1, 5), torch.zeros(4, 1).long())):
        for each in ranks(2, rows_that_do_not_fit, x, target):
            assert each.args[0] == "ValueError"
            assert each.args[1].startswith(said)


def second_of_rows_in_shards(group, x, target):
    by("torch")
    leaf, w = x.clone().requires_grad_(), torch.ones(4, 5).requires_grad_()
    y = linear_log_prob(leaf, w, target, group=group, input_sharded=True)
    (dx,) = torch.autograd.grad(y.sum(), leaf, create_graph=True)
    dx.sum().backward()


def test_rows_in_shards_have_no_second_derivative(ranks):
    said = "linear_log_prob: there is no second derivative over the ranks of a group"
    for each in ranks(2, second_of_rows_in_shards, torch.ones(2, 5), torch.arange(4)):
        assert each.args[:2] == ("RuntimeError", said)


def of_a_subset(group, way, x, w, target, which):
    by(way)
    leaves = [x.clone().requires_grad_("x" in which), shard(w, group, 0).requires_grad_("w" in which)]
    y = linear_log_prob(*leaves, target, **over(group))
    return y.requires_grad, [] if not which else gradients_of(y, [each for each in leaves if each.requires_grad])


@pytest.mark.parametrize("way", WAYS)
def test_a_frozen_layer_or_input(ranks, way):
    x, w, _ = layer()
    target = targets(logits())
    _, (dx, dw) = of_whole(x, w, None, target, {})
    for which in ("", "x", "w"):
        found = ranks.values(3, of_a_subset, way, x, w, target, which)
        assert all(graded == bool(which) for graded, _ in found)
        if which == "x":
            for _, (ours,) in found:
                close(ours, dx)
        elif which:
            close(torch.cat([ours for _, (ours,) in found]), dw)


def padded(group, way, x, w, target, n_classes):
    by(way)
    leaves = [x.clone().requires_grad_(), shard(w, group, 0).requires_grad_()]
    y = linear_log_prob(*leaves, target, chunk_size=4, return_entropy=True, **over(group), n_classes=n_classes)
    return [each.detach() for each in results(y)], gradients_of(y, leaves)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n_classes", [36, 12])
def test_classes_past_n_classes_are_padding(ranks, n_classes, way):
    x, w, _ = layer()
    w[n_classes:] = torch.nan
    target = torch.arange(N_ROWS) % n_classes
    found = ranks.values(3, padded, way, x, w, target, n_classes)
    values, (dx, dw) = of_whole(x, w[:n_classes], None, target, {"return_entropy": True})
    are_right(found, (values, (dx, torch.nn.functional.pad(dw, (0, 0, 0, N_CLASSES - n_classes)))))


@pytest.mark.parametrize("way", WAYS)
def test_no_rows(ranks, way):
    x, w, bias = layer()
    target = torch.zeros(0, dtype=torch.long)
    for values, (dx, dw, db) in ranks.values(2, of_shards, way, x[:0], w, bias, target, ALL):
        assert values[0].shape == (0,)
        assert dx.shape == (0, FEATURES)
        assert not dw.any()
        assert not db.any()


def twice(group, way, x, w, target, kept):
    """Two backward passes, of which the second makes kept logits again; and a second derivative."""
    by(way)
    leaf, w = x.clone().requires_grad_(), shard(w, group, 0).requires_grad_()
    y = linear_log_prob(leaf, w, target, logits=kept, **over(group)).sum()
    y.backward(retain_graph=True)
    y.backward(retain_graph=True)
    (dx,) = torch.autograd.grad(y, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="linear_log_prob: there is no second derivative over the ranks of a group"):
        dx.sum().backward()
    return leaf.grad


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kept", ["keep", "recompute"])
def test_two_backward_passes(ranks, kept, way):
    x, w, _ = layer()
    target = targets(logits())
    leaf = x.double().requires_grad_()
    formula(leaf @ w.double().t(), target)[0].sum().backward()
    for dx in ranks.values(2, twice, way, x, w, target, kept):
        close(dx, 2 * leaf.grad)


def by_peers(group, x, w, target):
    in_parts()
    leaves = [x.clone().requires_grad_(), shard(w, group, 0).requires_grad_()]
    y = linear_log_prob(*leaves, target, chunk_size=4, transport="peer", **ALL, **over(group))
    return [each.detach() for each in results(y)], gradients_of(y, leaves)


def test_ranks_exchange_by_peers_too(ranks):
    x, w, _ = layer()
    target = targets(logits(), 3)
    are_right(ranks.values(3, by_peers, x, w, target), of_whole(x, w, None, target, ALL))


def called(group, arguments, on):
    """A call, with other arguments on the last rank, or on all."""
    by("torch")
    last = dist.get_rank(group) == dist.get_world_size(group) - 1
    given = {"input": torch.zeros(2, 5), "weight": torch.zeros(4, 5), "target": torch.zeros(2, dtype=torch.long)}
    given |= arguments if last or on == "all" else {}
    return linear_log_prob(given.pop("input"), given.pop("weight"), given.pop("target"), **given, group=group)


OF_LAYER = [
    *[each for each in WRONG if "input" not in each[0]],
    ({"weight": torch.zeros(4, 6)}, "ValueError", "linear_weight must have shape [n_classes, in_features] for input"),
    ({"logits": "some"}, "ValueError", 'logits must be "auto", "keep" or "recompute", got \'some\''),
    ({"chunk_size": 0}, "ValueError", "chunk_size must be at least 1, got 0"),
]  # fmt: skip


@pytest.mark.parametrize("on", ["last", "all"])
@pytest.mark.parametrize(("arguments", "error", "said"), OF_LAYER, ids=[str(each[0]) for each in OF_LAYER])
def test_a_wrong_argument_is_an_error_on_every_rank(ranks, arguments, error, said, on):
    *others, last = ranks(3, called, arguments, on)
    assert last.args[0] == error
    assert last.args[1].startswith(f"linear_log_prob: {said}")
    for each in others:
        if on == "all":
            assert each.args[0] == error
        else:
            refused = f"linear_log_prob: rank 2 refused its call: {error}: {last.args[1]}"
            assert each.args[:2] == ("RuntimeError", refused)


ODD = {
    "chunk_size": {"chunk_size": 1}, "logits": {"logits": "keep"}, "accumulate": {"accumulate": "input"},
    "temperature": {"temperature": 2.0}, "wanted": {"return_lse": True}, "result": {"dtype": BF16},
    "targets": {"target": torch.zeros(2, 1, dtype=torch.long)},
    "require_grad": {"weight": torch.zeros(4, 5, requires_grad=True)},
    "in_features": {"input": torch.zeros(2, 6), "weight": torch.zeros(4, 6)},
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_ranks_that_differ_are_told_in_what(ranks, odd):
    for each in ranks(2, called, ODD[odd], "last"):
        assert each.args[0] == "RuntimeError"
        assert each.args[1].startswith("linear_log_prob: the ranks of the group differ in ")
        assert f" {odd}: " in each.args[1]


def of_module(group, x, w, target):
    by("torch")
    how = {"input_sharded": True, "skip_ignored": True}
    module = fused_softmax.nn.LinearLogProb(FEATURES, len(shard(w, group, 0)), **how, **over(group))
    with torch.no_grad():
        module.linear_weight.copy_(shard(w, group, 0))
    return module(x.chunk(dist.get_world_size(group))[dist.get_rank(group)], target).detach()


def test_a_module(ranks):
    x, w, _ = layer()
    target = targets(logits())
    for y in ranks.values(3, of_module, x, w, target):
        close(y, formula((x @ w.t()).double(), target)[0])


def of_dtensors(group, way, mesh, of_x, of_w, tensors, target, options):
    by(way)
    mesh = mesh_of(mesh)
    x, w, bias = tensors
    leaves = [distribute_tensor(x, mesh, of_x), *[distribute_tensor(each, mesh, of_w) for each in (w, bias)]]
    leaves = [each.detach().requires_grad_() for each in leaves]
    rows = [
        a if isinstance(a, Shard) and a.dim < x.ndim - 1 and b == Replicate() else Replicate()
        for a, b in zip(of_x, of_w, strict=True)
    ]
    y = linear_log_prob(
        *leaves[:2], distribute_tensor(target, mesh, rows), linear_bias=leaves[2], chunk_size=4, **options
    )
    assert all(list(each.placements) == rows for each in results(y))
    parts = [distribute_tensor(each.float(), mesh, rows) for each in gradients_like(graded_of(y))]
    gradients = torch.autograd.grad(graded_of(y), leaves, parts)
    assert gradients[0].placements == leaves[0].placements
    return [each.full_tensor().detach() for each in (*results(y), *gradients)]


LIE = [
    ((4,), [Replicate()], [Shard(0)]), ((4,), [Shard(0)], [Shard(0)]), ((4,), [Shard(0)], [Replicate()]),
    ((2, 2), [Shard(0), Replicate()], [Replicate(), Shard(0)]),
    ((2, 2), [Shard(1), Shard(0)], [Replicate(), Shard(0)]),
]  # fmt: skip


@pairwise()
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("mesh", "of_x", "of_w"), LIE)
@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("wanted", [{}, ALL], ids=len)
def test_dtensors(ranks, mesh, of_x, of_w, k, wanted, way):
    x, w, bias = layer()
    x = x[:8].reshape(4, 2, FEATURES)
    target = targets(x.new_zeros(4, 2, N_CLASSES), k)
    values, gradients = of_whole(x, w, bias, target, wanted)
    for found in ranks.values(4, of_dtensors, way, mesh, of_x, of_w, (x, w, bias), target, wanted):
        for ours, truth in zip(found, (*values, *gradients), strict=True):
            close(ours, truth)


def of_targets_that_are_checked(group, tensors, target):
    (x, w), mesh = tensors, mesh_of((2,))
    with mock.patch.object(route, "CHECK", True):
        x, w, target = (
            distribute_tensor(each, mesh, [at]) for each, at in ((x, Shard(0)), (w, Replicate()), (target, Shard(0)))
        )
        return linear_log_prob(x, w, target).full_tensor()


def test_targets_that_are_dtensors_are_not_looked_at(ranks):
    x, w, _ = layer()
    target = torch.full((len(x),), 3).index_fill(0, torch.tensor([1]), N_CLASSES)
    for found in ranks.values(2, of_targets_that_are_checked, (x, w), target):
        assert found.isnan().nonzero().tolist() == [[1]]


def a_weight_of_the_group(group, x, w, target):
    by("torch")
    weight = distribute_tensor(w[:36], mesh_of((4,)), [Shard(0)]).requires_grad_()
    y = linear_log_prob(x, weight, target, group=group)
    (dw,) = torch.autograd.grad(y.sum(), weight)
    assert isinstance(dw, DTensor)
    return y.detach(), dw.full_tensor()


def test_a_weight_that_is_a_dtensor_over_the_group(ranks):
    x, w, _ = layer()
    target = targets(logits()) % 36
    leaf = w[:36].double().requires_grad_()
    wanted = formula(x.double() @ leaf.t(), target)[0]
    wanted.sum().backward()
    for y, dw in ranks.values(4, a_weight_of_the_group, x, w, target):
        close(y, wanted.detach())
        close(dw, leaf.grad)
