"""Losses over ranks where their routes could part: what test_losses_seams.py and its like ask of one device."""

import math

import pytest
import torch
from sharded import N_CLASSES, WAYS, by, close, graded_of, logits, over, shard

from fused_softmax import cross_entropy, linear_cross_entropy, log_softmax, logsumexp, softmax

TARGET = torch.tensor([0, 36, -100, 13, 0, -100, 30, -100, 0])
IGNORED = TARGET == -100
KINDS = ("rows", "linear")


def call(kind, group, x, weight=None, target=TARGET, **options):
    """(what a loss gave, its leaves) for logits x, or for an input x of 6 features."""
    weight = None if weight is None else shard(weight, group, 0)
    if kind == "rows":
        leaf = shard(x, group, 1).requires_grad_()
        return cross_entropy(leaf, target, weight, **over(group), **options), [leaf]
    w = shard(logits(N_CLASSES, 6, seed=6).float() / 3, group, 0).requires_grad_()
    bias = shard(torch.linspace(-1, 1, N_CLASSES), group, 0).requires_grad_()
    leaf = x.clone().requires_grad_()
    options = {"weight": weight, "linear_bias": bias, "chunk_size": 4, **over(group), **options}
    return linear_cross_entropy(leaf, w, target, **options), [leaf, w, bias]


def given(kind):
    return logits().float() if kind == "rows" else logits(9, 6, seed=5).float() / 3


def gradients(group, way, kind, x, options, of=None, nothing_of_loss=False):
    """nothing_of_loss: a gradient of 0 comes back to the loss, and not none."""
    by(way)
    weight = options.pop("weight", None)
    y, leaves = call(kind, group, x, weight, **options)
    graded = graded_of(y)
    chosen = graded if of is None else [getattr(y, name) for name in of]
    back = [torch.ones_like(each) for each in chosen]
    if nothing_of_loss:
        chosen, back = [*chosen, y.loss], [*back, torch.zeros_like(y.loss)]
    return torch.autograd.grad(chosen, leaves, back)


def spoilt(x):
    x = x.clone()
    x[2], x[5, 1], x[7, :2] = math.nan, math.inf, torch.tensor([-math.inf, math.inf])
    return x


@pytest.mark.parametrize(
    "options", [{}, {"reduction": "none"}, {"label_smoothing": 0.2, "lse_square_scale": 0.1}], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_ignored_rows_have_no_part_in_any_gradient(ranks, way, kind, options):
    x = given(kind)
    found = ranks.values(3, gradients, way, kind, spoilt(x), dict(options))
    wanted = ranks.values(3, gradients, way, kind, x, dict(options))
    for ours, truth in zip(found, wanted, strict=True):
        for a, b in zip(ours, truth, strict=True):
            close(a, b)
        assert (ours[0][IGNORED] == 0).all()


@pytest.mark.parametrize("nothing_of_loss", [False, True])
@pytest.mark.parametrize("of", [("lse",), ("z_loss",), ("lse", "z_loss")], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_what_stands_beside_a_mean_of_weight_0_has_a_finite_gradient(ranks, way, kind, of, nothing_of_loss):
    weight = torch.zeros(N_CLASSES)
    options = {"weight": weight, "return_lse": True, "return_z_loss": True, "lse_square_scale": 0.1}
    x = given(kind)
    found = ranks.values(2, gradients, way, kind, x, dict(options), of, nothing_of_loss)
    leaf = x.double().requires_grad_()
    z = leaf
    if kind == "linear":
        z = leaf @ (logits(N_CLASSES, 6, seed=6).float() / 3).double().t() + torch.linspace(-1, 1, N_CLASSES).double()
    lse = torch.logsumexp(z, 1)
    parts = {"lse": lse.sum(), "z_loss": 0.1 * lse[~IGNORED].square().mean()}
    (wanted,) = torch.autograd.grad(sum(parts[each] for each in of), leaf)
    whole = torch.cat([each[0] for each in found], 1) if kind == "rows" else found[0][0]
    close(whole, wanted)


def of_z_loss(group, way, kind, targets, reduction):
    by(way)
    y, leaves = call(kind, group, given(kind), target=targets, return_z_loss=True, reduction=reduction)
    return y.z_loss.detach(), torch.autograd.grad(y.z_loss.sum(), leaves)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("target", [-100, N_CLASSES + 3], ids=["none count", "wrong"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_z_loss_of_scale_0_is_0(ranks, way, kind, target, reduction):
    if way == "torch" and target > 0:
        pytest.skip("IndexError")
    for z, dx in ranks.values(2, of_z_loss, way, kind, torch.full_like(TARGET, target), reduction):
        assert (z == 0).all()
        assert target > 0 or all((each == 0).all() for each in dx)


def objective(y):
    """2 y, whose gradient comes back with torch's neg bit."""
    z = torch.complex(torch.zeros_like(y), y)
    return (z.conj() * torch.complex(torch.zeros_like(y), torch.full_like(y, 2.0))).real


CALLS = {
    "rows": lambda x, group: cross_entropy(x, TARGET, **over(group)),
    "rows, none": lambda x, group: cross_entropy(x, TARGET, reduction="none", **over(group)),
    "rows, lse": lambda x, group: cross_entropy(x, TARGET, return_lse=True, **over(group)).lse,
    "softmax": lambda x, group: softmax(x, **over(group)),
    "log_softmax": lambda x, group: log_softmax(x, **over(group)),
    "logsumexp": lambda x, group: logsumexp(x, -1, **over(group)),
}  # fmt: skip


def with_the_bit(group, way, name, x):
    """(of a plain gradient, of one with the bit, of an input with it) the result and the gradient"""
    by(way)
    mine, found = shard(x, group, 1), []
    for leaf, view, of in (
        (mine.clone(), lambda t: t, lambda y: 2.0 * y), (mine.clone(), lambda t: t, objective),
        (-mine, torch._neg_view, lambda y: 2.0 * y),
    ):  # fmt: skip
        leaf.requires_grad_()
        y = CALLS[name](view(leaf), group)
        found.append((y.detach(), torch.autograd.grad(of(y).sum(), leaf)[0]))
    return found


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("way", WAYS)
def test_the_neg_bit_of_gradients_and_inputs(ranks, way, name):
    for plain, gradient, input in ranks.values(2, with_the_bit, way, name, logits().float()):
        close(gradient[1], plain[1])
        close(input[0], plain[0])
        close(-input[1], plain[1])


def weighted(group, way, x, view):
    by(way)
    leaf = shard(x, group, 1).requires_grad_()
    weight = view(shard(torch.linspace(0.5, 1.5, N_CLASSES), group, 0))
    y = cross_entropy(leaf, TARGET, weight, reduction="sum", **over(group))  # a mean is the same by negated weights
    return y.detach(), torch.autograd.grad(y, leaf)[0]


def with_bit(x):
    return torch._neg_view(-x)


@pytest.mark.parametrize("way", WAYS)
def test_the_neg_bit_of_class_weights(ranks, way):
    plain, found = (ranks.values(2, weighted, way, logits().float(), view) for view in (torch.clone, with_bit))
    for ours, truth in zip(found, plain, strict=True):
        for a, b in zip(ours, truth, strict=True):
            close(a, b)


def through_a_statistic(group, way, kind, statistic):
    by(way)
    y, leaves = call(kind, group, given(kind), return_token_stats=True)
    value = getattr(y.token_stats, statistic)
    value.mean().item(), value.detach().numpy()
    torch.autograd.grad(y.loss, leaves, retain_graph=True)
    torch.autograd.grad(y.loss + value.sum(), leaves)


def with_learnt_weights(group, way, kind):
    by(way)
    weight = torch.ones(N_CLASSES).requires_grad_()
    call(kind, group, given(kind), weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_what_has_no_gradient_raises(ranks, way, kind):
    for statistic in ("entropy", "loss"):
        for each in ranks(2, through_a_statistic, way, kind, statistic):
            assert f"token_stats.{statistic} has no gradient" in each.args[1]
    for each in ranks(2, with_learnt_weights, way, kind):
        assert "weight requires grad" in each.args[1]


def read_after_the_write(group, way, view):
    """Two losses of one memory, of which the first one's gradient takes it, and the second one reads it afterwards."""
    by(way)
    z = shard(logits().float(), group, 1).requires_grad_() * 1
    z = z[1:] if view else z
    first, second = (
        cross_entropy(z, TARGET[-len(z) :], **over(group), inplace_backward=inplace) for inplace in (True, False)
    )
    first.backward(retain_graph=True)
    second.backward()


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_loss_whose_logits_another_one_has_written_over_raises(ranks, way, view):
    """Of a view nobody knew, and the gradient was that of gradients."""
    for each in ranks(2, read_after_the_write, way, view):
        assert "cross_entropy: the logits" in each.args[1]
        assert "modified by an inplace operation" in each.args[1]
