"""Losses of rows in shards over ranks, against one process that has all classes; by kernels and by torch."""

import math

import pytest
import torch
from products import pairwise
from sharded import INF, N_CLASSES, N_ROWS, SIZES, WAYS, by, close, differentiated, logits, over, same_on_all, shard

import fused_softmax
from fused_softmax import cross_entropy
from fused_softmax.ops.losses.options import Loss
from fused_softmax.ops.losses.over_ranks.states import States, merged


def losses(group, way, x, target, weight, options, of=1.0):
    by(way)
    mine = shard(x, group, 1).requires_grad_()
    given = mine * 1 if options.get("inplace_backward") else mine
    weight = None if weight is None else shard(weight, group, 0)
    output = cross_entropy(given, target, weight, **options, **over(group))
    return differentiated(output, mine, of)


LOSSES = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.1},
    "smoothing alone": {"label_smoothing": 1.0, "reduction": "none"},
    "softcap": {"softcap": 4.0},
    "scale": {"scale": 0.6, "reduction": "sum"},
    "z-loss": {"lse_square_scale": 0.01, "return_z_loss": True},
    "lse": {"return_lse": True},
    "in place": {"inplace_backward": True},
    "statistics": {"return_token_stats": True},
    "a class is ignored": {"ignore_index": 3},
    "all": {
        "label_smoothing": 0.2, "softcap": 5.0, "scale": 1.2, "lse_square_scale": 0.02, "return_z_loss": True,
        "return_lse": True, "return_token_stats": True, "ignore_index": 7,
    },
}  # fmt: skip


def test_every_option_of_a_loss_is_tried():
    """One that a part of the way over ranks forgets would be left out of the loss without a word."""
    assert {name for name in Loss.FORMULA if not any(name in each for each in LOSSES.values())} == {"weight"}


@pairwise()
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("options", LOSSES)
def test_losses_are_those_of_one_process(ranks, options, weighted, way, n):
    options = LOSSES[options]
    x = logits().float()
    target = torch.tensor([0, 36, 12, 13, 7, -100, 30, 29, 3])  # in every shard, at its first and last columns
    target[5] = options.get("ignore_index", -100)
    weight = torch.linspace(0.2, 2, N_CLASSES) if weighted else None
    found = ranks.values(n, losses, way, x, target, weight, options)
    whole = x.double().requires_grad_()
    of_one = {key: each for key, each in options.items() if key != "inplace_backward"}
    output = cross_entropy(whole, target, None if weight is None else weight.double(), **of_one)
    *wanted, dx = differentiated(output, whole, 1.0)
    for ours, truth in zip(same_on_all([each[:-1] for each in found]), wanted, strict=True):
        close(ours, truth)
    close(torch.cat([each[-1] for each in found], 1), dx)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes_of_losses(ranks, dtype, way):
    x, target = logits().to(dtype), torch.arange(N_ROWS) * 4
    of = 2.0**12 if dtype == torch.float16 else 1.0  # loss scaling, without which a mean's gradients vanish
    found = ranks.values(3, losses, way, x, target, None, {"dtype": torch.float32, "label_smoothing": 0.1}, of)
    whole = x.double().requires_grad_()
    y, dx = differentiated(cross_entropy(whole, target, label_smoothing=0.1), whole, of)
    close(same_on_all([each[:1] for each in found])[0], y)
    mine = torch.cat([each[1] for each in found], 1)
    assert mine.dtype == dtype
    torch.testing.assert_close(mine.double(), dx, rtol=2 * torch.finfo(dtype).eps + 1e-6, atol=of * 1e-8)


@pytest.mark.parametrize("way", WAYS)
def test_a_target_that_is_no_class_and_rows_that_are_all_ignored(ranks, way):
    x, target = logits().float(), torch.full((N_ROWS,), -100)
    for reduction in ("mean", "sum", "none"):
        for y, dx in ranks.values(3, losses, way, x, target, None, {"reduction": reduction}):
            assert y.isnan().all() if reduction == "mean" else (y == 0).all()
            assert (dx == 0).all()
    target[2], target[3] = 37, 5
    found = ranks(3, losses, way, x, target, None, {"reduction": "none"})
    if way == "torch":
        assert {each.args[:2] for each in found} == {
            ("IndexError", "cross_entropy: target 37 of row 2 is out of range [0, 36]")
        }
        return
    for y, dx in found:
        assert y.isnan().tolist() == [i == 2 for i in range(N_ROWS)]
        assert dx.isnan().all(1).tolist() == [i == 2 for i in range(N_ROWS)]


@pytest.mark.parametrize("way", WAYS)
def test_shards_of_losses_of_minus_infinity(ranks, way):
    x, target = logits(4).float(), torch.tensor([20, 20, 20, 3])
    x[0, :12], x[1, 13:], x[2, 12], x[3] = -INF, -INF, -INF, -INF
    found = ranks.values(3, losses, way, x, target, None, {"reduction": "none", "return_lse": True})
    whole = x.double().requires_grad_()
    y, lse, dx = differentiated(cross_entropy(whole, target, reduction="none", return_lse=True), whole, 1.0)
    close(found[0][0], y)
    close(found[0][1], lse)
    close(torch.cat([each[2] for each in found], 1)[:3], dx[:3])


def padded(group, way, x, target, weight, n_classes, options):
    by(way)
    mine, own_weight = shard(x, group, 1).requires_grad_(), shard(weight, group, 0)
    given = mine * 1
    y, dx = differentiated(
        cross_entropy(given, target, own_weight, **over(group), n_classes=n_classes, **options), mine, 1.0
    )
    p = fused_softmax.softmax(shard(x, group, 1), 1, **over(group), n_classes=n_classes)
    lse = fused_softmax.logsumexp(shard(x, group, 1), 1, **over(group), n_classes=n_classes)
    return y, lse, dx, p


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n_classes", [36, 13, 12, 5])
@pytest.mark.parametrize("inplace", [False, True])
def test_columns_past_n_classes_are_padding(ranks, inplace, n_classes, way):
    x, target, weight = logits().float(), torch.arange(N_ROWS) % n_classes, torch.linspace(0.2, 2, N_CLASSES)
    x[:, n_classes:] = math.nan
    weight[n_classes:] = math.nan
    options = {"label_smoothing": 0.1, "inplace_backward": inplace}
    found = ranks.values(3, padded, way, x, target, weight, n_classes, options)
    whole = x[:, :n_classes].double().requires_grad_()
    y, dx = differentiated(cross_entropy(whole, target, weight[:n_classes].double(), label_smoothing=0.1), whole, 1.0)
    close(found[0][0], y)
    close(found[0][1], torch.logsumexp(whole.detach(), 1))
    for i, wanted in ((2, dx), (3, torch.softmax(whole.detach(), 1))):
        ours = torch.cat([each[i] for each in found], 1)
        close(ours[:, :n_classes], wanted)
        assert (ours[:, n_classes:] == 0).all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(N_CLASSES,), (2, N_CLASSES, 3), (0, N_CLASSES)])
def test_logits_of_any_shape(ranks, shape, way):
    x = logits(1, math.prod(shape)).reshape(shape).float()
    target = torch.zeros(shape[:1] + shape[2:] if len(shape) > 1 else (), dtype=torch.long) + 13
    found = ranks.values(3, of_shape, way, x, target)
    whole = x.double().requires_grad_()
    y, lse, dx = differentiated(cross_entropy(whole, target, reduction="none", return_lse=True), whole, 1.0)
    for ours, wanted in zip(found[0], (y, lse), strict=False):
        assert ours.shape == wanted.shape
        close(ours, wanted)
    close(torch.cat([each[2] for each in found], 0 if len(shape) == 1 else 1), dx)


def of_shape(group, way, x, target):
    by(way)
    mine = shard(x, group, 0 if x.ndim == 1 else 1).requires_grad_()
    return differentiated(cross_entropy(mine, target, reduction="none", return_lse=True, **over(group)), mine, 1.0)


def over_the_logits(group, way, x, target):
    by(way)
    leaf = shard(x, group, 1).requires_grad_()
    given = leaf * 1
    cross_entropy(given, target, inplace_backward=True, **over(group)).backward()
    return leaf.grad, given.detach()


def twice_over_the_logits(group, way, x, target, whose):
    """A backward of logits that another one has written over: that of the same loss, or of another."""
    by(way)
    given = shard(x, group, 1).requires_grad_() * 1
    given = given[1:] if whose == "a view's" else given
    loss = lambda: cross_entropy(given, target[-len(given) :], inplace_backward=True, **over(group))  # noqa: E731
    first = loss()
    if whose == "its own":
        first.backward(retain_graph=True)
        first.backward()
    else:
        loss()


@pytest.mark.parametrize("way", WAYS)
def test_logits_that_are_gone_make_no_second_gradient(ranks, way):
    for whose in ("its own", "another's", "a view's"):
        said = "one backward" if whose == "its own" else "has given the memory of these logits"
        for each in ranks(2, twice_over_the_logits, way, logits().float(), torch.arange(N_ROWS), whose):
            assert each.args[0] == "RuntimeError"
            assert said in each.args[1]


def over_two_views(group, way, x, target, n_classes):
    by(way)
    leaf, views = shard(x, group, 1).requires_grad_(), (slice(0, 4), slice(4, None))
    given, of = leaf * 1, {"reduction": "sum", "n_classes": n_classes, **over(group)}
    for y in [cross_entropy(given[rows], target[rows], inplace_backward=True, **of) for rows in views]:
        y.backward(retain_graph=True)
    return leaf.grad


@pytest.mark.parametrize("way", WAYS)
def test_two_losses_write_over_a_part_of_the_logits_each(ranks, way):
    """Also where some of their columns are padding."""
    x, target, n_classes = logits(), torch.arange(N_ROWS), N_CLASSES - 3
    given = x.clone().requires_grad_()
    torch.nn.functional.cross_entropy(given[:, :n_classes], target, reduction="sum").backward()
    close(torch.cat(ranks.values(2, over_two_views, way, x.float(), target, n_classes), 1), given.grad)


@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_takes_the_place_of_the_logits(ranks, way):
    for dx, given in ranks.values(2, over_the_logits, way, logits().float(), torch.arange(N_ROWS)):
        assert given.equal(dx)


@pairwise()
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", [math.nan, INF, -INF])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"lse_square_scale": 0.1}, {"reduction": "sum"}])
def test_the_logits_of_an_ignored_row_have_no_gradient(ranks, options, value, way):
    x, target = logits().float(), torch.arange(N_ROWS) * 4
    x[5], target[5] = value, -100
    found = ranks.values(3, losses, way, x, target, None, options)
    whole = x.double()
    whole[5] = 0
    y, dx = differentiated(cross_entropy(whole.requires_grad_(), target, **options), whole, 1.0)
    close(found[0][0], y)
    close(torch.cat([each[1] for each in found], 1), dx)


@pairwise()
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", [INF, -INF])
@pytest.mark.parametrize("column", [0, 12, 20])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_infinite_logits_of_losses(ranks, smoothing, column, value, way):
    x, target = logits().float(), torch.arange(N_ROWS) * 4
    x[3, column] = value
    options = {"reduction": "none", "label_smoothing": smoothing}
    found = ranks.values(3, losses, way, x, target, None, options)
    whole = x.double().requires_grad_()
    y, dx = differentiated(torch.nn.functional.cross_entropy(whole, target, **options), whole, 1.0)
    close(found[0][0], y)
    close(torch.cat([each[1] for each in found], 1), dx)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [{"softcap": 1e39}, {"softcap": 1e-50}, {"scale": 1e-45}, {"scale": -2.0}])
def test_numbers_that_32_bits_do_not_hold(ranks, options, way):
    options = options | {"return_token_stats": True}
    x, target = logits().float(), torch.arange(N_ROWS) * 4
    found = ranks.values(3, losses, way, x, target, None, options)
    whole = x.double().requires_grad_()
    y, *_, dx = differentiated(cross_entropy(whole, target, **options), whole, 1.0)
    close(found[0][0], y)
    close(torch.cat([each[-1] for each in found], 1), dx)


def test_statistics_take_nothing_from_the_host(monkeypatch):
    """No copy to a device, for which the host would wait, and which a graph cannot capture."""
    monkeypatch.setattr(torch, "tensor", None)
    of_ranks = torch.tensor_split(logits(2, 6).float(), 2, 1)
    at = torch.stack([each.argmax(1) + 3 * rank for rank, each in enumerate(of_ranks)]).float()
    m = torch.stack([each.amax(1) for each in of_ranks])
    heard = States(m, torch.zeros_like(m), m, expected=m, best_at=at)
    assert merged(heard).best_at.equal(logits(2, 6).argmax(1))


@pytest.mark.parametrize("way", WAYS)
def test_a_small_loss_of_great_logits_keeps_its_digits(ranks, way):
    """lse alone would have rounded them away: at 10000 it is a multiple of 0.001."""
    x, target = logits().float() / 3, torch.arange(N_ROWS) * 4
    x[torch.arange(N_ROWS), target] += 8
    x += 10000
    found = ranks.values(3, losses, way, x, target, None, {"reduction": "none"})
    whole = x.double().requires_grad_()
    y, dx = differentiated(cross_entropy(whole, target, reduction="none"), whole, 1.0)
    assert y.max() < 0.2
    torch.testing.assert_close(found[0][0].double(), y, rtol=1e-4, atol=0)
    close(torch.cat([each[1] for each in found], 1), dx, 1e-6)
