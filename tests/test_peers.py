"""Ranks whose kernels write into each other's memory, by files that all map, against one process."""

import math

import pytest
import torch
import torch.distributed as dist
from peered import PART_COLS, in_parts, loss, softmax, wide_shard
from products import pairwise
from sharded import INF, close, differentiated, logits, same_on_all

from fused_softmax import cross_entropy
from fused_softmax.ops.losses.over_ranks import peers as loss_peers

COLUMNS = 331
SOFTMAXES = ["softmax", "log_softmax"]
TARGETS = [0, 330, 129, 130, 200, 201, -100, 128]  # in every shard, at its first and last columns


def wide(rows=8, seed=0):
    return logits(rows, COLUMNS, seed)


def softmaxes(group, name, x, part_cols, dy, dtype=None):
    in_parts(part_cols)
    mine = wide_shard(x, group).requires_grad_()
    found = []
    for _ in range(2):  # the second is found
        y = softmax(mine, group, name, dtype=dtype)
        (dx,) = torch.autograd.grad(y, [mine], wide_shard(dy, group).to(y.dtype))
        found.append((y.detach(), dx))
    assert all(a.equal(b) for a, b in zip(*found, strict=True))
    return found[0]


@pairwise()
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("part_cols", [PART_COLS, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SOFTMAXES)
def test_softmaxes_are_those_of_one_process(ranks, name, dtype, part_cols, n):
    x, dy = wide(3).to(dtype), wide(3, seed=1)
    found = ranks.values(n, softmaxes, name, x, part_cols, dy)
    y, dx = (torch.cat([each[i] for each in found], 1) for i in (0, 1))
    whole = x.double().requires_grad_()
    wanted = getattr(torch, name)(whole, 1)
    wanted.backward(dy)
    assert y.dtype == dx.dtype == dtype
    ulp = max(torch.finfo(dtype).eps, 1e-6)
    close(y, wanted.detach(), 4 * ulp)
    close(dx, whole.grad, 8 * ulp)


@pytest.mark.parametrize("shape", [(COLUMNS,), (2, 2, COLUMNS)], ids=str)
def test_any_leading_dims_and_another_dtype(ranks, shape):
    x = wide(4)[: math.prod(shape[:-1])].reshape(shape)
    found = ranks.values(2, softmaxes, "softmax", x.bfloat16(), PART_COLS, torch.ones(shape), torch.float32)
    y = torch.cat([each[0] for each in found], -1)
    assert y.dtype == torch.float32
    close(y, torch.softmax(x.bfloat16().double(), -1))


def of_infinities(group, name, x):
    in_parts()
    return (softmax(wide_shard(x, group), group, name),)


@pytest.mark.parametrize("name", SOFTMAXES)
def test_shards_parts_and_rows_of_minus_infinity(ranks, name):
    x = wide(6).float()
    x[0], x[1, :130], x[2, 130:], x[3, 5], x[4, 64:128], x[5, 330] = -INF, -INF, -INF, INF, -INF, math.nan
    found = ranks.values(3, of_infinities, name, x)
    wanted = getattr(torch, name)(x.double(), 1)
    wanted[3] = math.nan  # as of one row with an inf
    close(torch.cat([each[0] for each in found], 1), wanted)


def losses(group, x, target, part_cols, options, of=1.0):
    in_parts(part_cols)
    mine = wide_shard(x, group).requires_grad_()
    found = []
    for _ in range(2):  # the second is found
        given = mine * 1 if options.get("inplace_backward") else mine
        found.append(differentiated(loss(given, target, group, **options), mine, of))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    return found[0]


LOSSES = {
    "plain": {}, "sum": {"reduction": "sum"}, "none": {"reduction": "none"}, "softcap": {"softcap": 4.0},
    "scale": {"scale": 0.6, "reduction": "sum"}, "negative scale": {"scale": -0.5},
    "z-loss": {"lse_square_scale": 0.01, "return_z_loss": True}, "lse": {"return_lse": True},
    "in place": {"inplace_backward": True}, "in fp32": {"dtype": torch.float32}, "ignored": {"ignore_index": 3},
    "z-loss alone": {"lse_square_scale": 0.01},
}  # fmt: skip


def of_one(x, target, options, of=1.0):
    whole = x.double().requires_grad_()
    options = {key: each for key, each in options.items() if key not in ("inplace_backward", "dtype")}
    return differentiated(cross_entropy(whole, target, **options), whole, of)


@pairwise()
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("options", LOSSES)
def test_losses_are_those_of_one_process(ranks, options, n):
    options, x = LOSSES[options], wide().float()
    target = torch.tensor(TARGETS)
    target[6] = options.get("ignore_index", -100)
    found = ranks.values(n, losses, x, target, PART_COLS, options)
    *wanted, dx = of_one(x, target, options)
    for ours, truth in zip(same_on_all([each[:-1] for each in found]), wanted, strict=True):
        close(ours, truth)
    close(torch.cat([each[-1] for each in found], 1), dx)


@pairwise()
@pytest.mark.parametrize("part_cols", [PART_COLS, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_dtypes_of_losses(ranks, dtype, reduction, part_cols):
    x, target = wide().to(dtype), torch.tensor(TARGETS)
    of = 2.0**12 if dtype == torch.float16 else 1.0  # loss scaling, without which a mean's gradients vanish
    options = {"dtype": torch.float32, "reduction": reduction}
    found = ranks.values(3, losses, x, target, part_cols, options, of)
    y, dx = of_one(x, target, options, of)
    close(same_on_all([each[:1] for each in found])[0], y)
    mine = torch.cat([each[1] for each in found], 1)
    assert mine.dtype == dtype
    torch.testing.assert_close(mine.double(), dx, rtol=2 * torch.finfo(dtype).eps + 1e-6, atol=of * 1e-8)


def without_gradient(group, x, target, reduction):
    in_parts()
    with torch.no_grad():
        return (loss(wide_shard(x, group), target, group, reduction=reduction),)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_without_a_gradient(ranks, reduction):
    x, target = wide(), torch.tensor(TARGETS)
    found = ranks.values(2, without_gradient, x.float(), target, reduction)
    wanted = torch.nn.functional.cross_entropy(x, target, reduction=reduction)
    close(same_on_all(found)[0], wanted)


def many_rows(group, x, target, reduction):
    """More than one launch sums: here that is any."""
    most, loss_peers.WHOLE = loss_peers.WHOLE, (0,)
    try:
        return losses(group, x, target, None, {"reduction": reduction})
    finally:
        loss_peers.WHOLE = most


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_rows_that_a_launch_of_their_own_sums(ranks, reduction):
    x, target = wide().float(), torch.tensor(TARGETS)
    found = ranks.values(2, many_rows, x, target, reduction)
    y, dx = of_one(x, target, {"reduction": reduction})
    close(same_on_all([each[:1] for each in found])[0], y)
    close(torch.cat([each[1] for each in found], 1), dx)


def test_rows_that_do_not_count_and_a_target_that_is_no_class(ranks):
    x, target = wide().float(), torch.full((len(TARGETS),), -100)
    x[0], x[1, 5], x[2] = math.nan, INF, -INF
    for reduction in ("mean", "sum"):
        for y, dx in ranks.values(3, losses, x, target, PART_COLS, {"reduction": reduction}):
            assert y.isnan().all() if reduction == "mean" else (y == 0).all()
            assert (dx == 0).all()
    target[3] = 200
    for y, dx in ranks.values(3, losses, x, target, PART_COLS, {}):
        close(y, -torch.log_softmax(x[3].double(), 0)[200])
        assert (dx[[i != 3 for i in range(len(x))]] == 0).all()
        assert dx.isfinite().all()
    target[4] = COLUMNS
    for y, dx in ranks.values(3, losses, x, target, PART_COLS, {"reduction": "sum"}):
        assert y.isnan()
        assert dx.isnan().all(1).tolist() == [i == 4 and dx.shape[1] > 0 for i in range(len(x))]


def test_shards_of_losses_of_minus_infinity(ranks):
    x, target = wide(4).float(), torch.tensor([200, 200, 3, 200])
    x[0, :130], x[1, 131:200], x[2, 130:], x[3, 200] = -INF, -INF, -INF, -INF
    y, dx = of_one(x, target, {"reduction": "none"})
    found = ranks.values(3, losses, x, target, PART_COLS, {"reduction": "none"})
    close(found[0][0], y)
    close(torch.cat([each[1] for each in found], 1), dx)
    y, dx = of_one(x, target, {"reduction": "sum"})
    found = ranks.values(3, losses, x, target, PART_COLS, {"reduction": "sum"})
    close(found[0][0], y)
    close(torch.cat([each[1] for each in found], 1), dx)


def padded(group, x, target, n_classes, inplace):
    in_parts()
    mine = wide_shard(x, group).requires_grad_()
    y, dx = differentiated(loss(mine * 1, target, group, n_classes=n_classes, inplace_backward=inplace), mine, 1.0)
    return y, dx, *[softmax(wide_shard(x, group), group, name, n_classes=n_classes) for name in SOFTMAXES]


def of_classes(group, x, target, numbers):
    in_parts()
    return [loss(wide_shard(x, group), target, group, n_classes=n) for n in numbers]


def test_calls_of_other_classes_take_turns(ranks):
    x, target, numbers = wide().float(), torch.tensor(TARGETS).clamp(0, 130), (330, 131, 330, 131)
    for found in ranks.values(3, of_classes, x, target, numbers):
        for y, n in zip(found, numbers, strict=True):
            close(y, of_one(x[:, :n], target, {})[0])


@pytest.mark.parametrize("n_classes", [330, 131, 130, 5])
@pytest.mark.parametrize("inplace", [False, True])
def test_columns_past_n_classes_are_padding(ranks, inplace, n_classes):
    x, target = wide().float(), torch.tensor(TARGETS).clamp(0, n_classes - 1)
    x[:, n_classes:] = math.nan
    found = ranks.values(3, padded, x, target, n_classes, inplace)
    y, dx = of_one(x[:, :n_classes], target, {})
    close(same_on_all([each[:1] for each in found])[0], y)
    softmaxes = [getattr(torch, name)(x[:, :n_classes].double(), 1) for name in SOFTMAXES]
    for i, (wanted, padding) in enumerate(zip((dx, *softmaxes), (0, 0, -INF), strict=True), 1):
        ours = torch.cat([each[i] for each in found], 1)
        close(ours[:, :n_classes], wanted)
        assert (ours[:, n_classes:] == padding).all()


def strided(group, x, target):
    in_parts()
    rank = dist.get_rank(group)
    given = x if rank else x[:, :100]  # rows 300 apart, and columns that are not contiguous
    mine = given.t().contiguous().t().requires_grad_() if rank else given.detach().requires_grad_()
    y, dx = differentiated(loss(mine, target, group, shard_sizes=[100, 300]), mine, 1.0)
    return y, dx, softmax(mine.detach(), group, shard_sizes=[100, 300])


def test_shards_that_lie_in_other_ways(ranks):
    x, target = logits(4, 300).float(), torch.tensor([0, 99, 100, 399])
    found = ranks.values(2, strided, x, target)
    whole = torch.cat([x[:, :100], x], 1)
    y, dx = of_one(whole, target, {})
    close(same_on_all([each[:1] for each in found])[0], y)
    close(torch.cat([each[1] for each in found], 1), dx)
    close(torch.cat([each[2] for each in found], 1), torch.softmax(whole.double(), 1))


def over_shapes(group, seed):
    """Launches of other rows, parts and operations, one after the other, of which none reset anything."""
    generator = torch.Generator().manual_seed(seed)
    worst, found = 0.0, []
    for _ in range(12):
        rows, parts = (int(torch.randint(1, most, (), generator=generator)) for most in (5, 4))
        x, target = (
            logits(rows, COLUMNS, int(torch.randint(100, (), generator=generator))),
            torch.arange(rows) * 100 % 331,
        )
        in_parts((64, 128, 8192)[parts - 1])
        mine = wide_shard(x.float(), group).requires_grad_()
        if parts == 2:
            y = softmax(mine.detach(), group)
            worst = max(worst, float((y - wide_shard(torch.softmax(x, 1), group)).abs().amax()) if y.numel() else 0.0)
        else:
            y, dx = differentiated(loss(mine, target, group), mine, 1.0)
            whole = x.requires_grad_()
            wanted, of_whole = differentiated(torch.nn.functional.cross_entropy(whole, target), whole, 1.0)
            worst = max(worst, float((y - wanted).abs()), float((dx - wide_shard(of_whole, group)).abs().sum()))
            found.append(y)
    return torch.tensor(worst), torch.stack(found)


@pytest.mark.parametrize("n", [2, 3])
def test_launches_over_changing_shapes(ranks, n):
    found = ranks.values(n, over_shapes, n)
    assert max(float(each[0]) for each in found) < 1e-5
    same_on_all([each[1:] for each in found])


def again(group, x, target):
    in_parts()
    mine = wide_shard(x, group).requires_grad_()
    y = loss(mine, target, group)
    dx = [torch.autograd.grad(y, [mine], torch.tensor(2.0), retain_graph=True)[0] for _ in range(2)]
    said = []
    for name in ("loss", "softmax"):
        of = loss(mine, target, group) if name == "loss" else softmax(mine, group).square().sum()
        (first,) = torch.autograd.grad(of, [mine], create_graph=True)
        try:
            first.sum().backward()
        except RuntimeError as error:
            said.append(str(error))
    return *dx, said


def test_a_second_backward_and_no_second_derivative(ranks):
    x, target = wide().float(), torch.tensor(TARGETS)
    found = ranks.values(2, again, x, target)
    _, dx = of_one(x, target, {}, 4.0)
    for i in (0, 1):
        close(torch.cat([each[i] for each in found], 1), dx)
    for *_, said in found:
        assert said == [
            f"{of}: there is no second derivative over the ranks of a group" for of in ("cross_entropy", "softmax")
        ]


def again_by_other_numbers(group, x, target, kinds):
    """The gradients of a second backward of calls of which one is kept for all."""
    in_parts()
    found = []
    for kind in kinds:
        mine = wide_shard(x, group).requires_grad_()
        y = loss(mine, target, group, **kind)
        found += [torch.autograd.grad(y, [mine], retain_graph=True)[0] for _ in range(2)]
    return found


@pytest.mark.parametrize("kinds", [({"scale": 0.5}, {"scale": 2.0}), ({"softcap": 30.0}, {"softcap": 2.0})], ids=str)
def test_a_second_backward_has_the_numbers_of_its_call(ranks, kinds):
    x, target = wide().float(), torch.tensor(TARGETS)
    found = ranks.values(2, again_by_other_numbers, x, target, kinds)
    for i, kind in enumerate(kinds):
        _, dx = of_one(x, target, kind, 2.0)
        for j in (2 * i, 2 * i + 1):
            close(torch.cat([each[j] for each in found], 1), dx)


def of_other_rows(group, x, target):
    """Calls for other numbers of rows, made from those that are kept."""
    in_parts()
    found = []
    for rows in (20, 18, 40):
        mine = wide_shard(x[:rows], group).requires_grad_()
        y, dx = differentiated(loss(mine, target[:rows], group), mine, 1.0)
        found.append((y, dx, softmax(mine.detach(), group)))
    return found


def test_calls_for_other_numbers_of_rows(ranks):
    x, target = wide(40).float(), torch.tensor(TARGETS).repeat(5)
    (found,) = ranks.values(1, of_other_rows, x, target)
    for rows, (y, dx, p) in zip((20, 18, 40), found, strict=True):
        wanted, of_whole = of_one(x[:rows], target[:rows], {})
        close(y, wanted)
        close(dx, of_whole)
        close(p, torch.softmax(x[:rows].double(), 1))
