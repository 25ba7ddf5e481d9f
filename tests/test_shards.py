"""softmax, log_softmax and logsumexp of rows in shards over ranks, against one process; by kernels and by torch."""

import gc
import math
import weakref

import pytest
import torch
import torch.distributed as dist
from products import pairwise
from sharded import INF, N_CLASSES, N_ROWS, SIZES, WAYS, by, close, logits, over, same_on_all, shard

import fused_softmax
from fused_softmax.ops.softmax import reference


def softmaxes(group, way, name, x, dim, dtype, scored, dy):
    by(way)
    function = getattr(fused_softmax, name)
    scored = {key: shard(each, group, dim) if key == "mask" else each for key, each in scored.items()}
    graded = [each.requires_grad_() for each in floats(scored).values()]
    mine = shard(x, group, dim).requires_grad_()
    y = function(mine, dim, **({} if name == "logsumexp" else {"dtype": dtype}), **scored, **over(group))
    dy = dy if name == "logsumexp" else shard(dy, group, dim)
    gradients = torch.autograd.grad(y, [mine, *graded], dy.to(y.dtype), materialize_grads=True)
    return y.detach(), *gradients


def floats(scored):
    return {key: each for key, each in scored.items() if isinstance(each, torch.Tensor) and each.is_floating_point()}


def whole_softmaxes(name, x, dim, scored, dy):
    of_floats = {key: each.double().requires_grad_() for key, each in floats(scored).items()}
    scored, graded = scored | of_floats, list(of_floats.values())
    x = x.double().requires_grad_()
    y = getattr(reference, name)(x, dim, **scored)
    return y.detach(), *torch.autograd.grad(y, [x, *graded], dy.double())


SCORED = {
    "plain": {},
    "scale": {"scale": 0.7},
    "scale of rows": {"scale": torch.linspace(0.5, 1.5, N_ROWS).unsqueeze(1)},
    "bool mask": {"mask": logits(seed=3) > 0},
    "added mask": {"mask": logits(1, seed=4).float()},
    "sink": {"sink": 0.4},
    "sinks": {"sink": torch.linspace(-2, 4, N_ROWS).unsqueeze(1)},
    "all": {"scale": 1.3, "mask": logits(seed=3) > 1, "sink": torch.tensor(0.3)},
}


@pairwise()
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scored", SCORED)
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_softmaxes_are_those_of_one_process(ranks, name, scored, way, n):
    x = logits().float()
    dy = logits(seed=1) if name != "logsumexp" else logits(1, N_ROWS, seed=1)[0]
    found = ranks.values(n, softmaxes, way, name, x, 1, torch.float32, SCORED[scored], dy)
    y, dx, *others = whole_softmaxes(name, x, 1, SCORED[scored], dy)
    if name == "logsumexp":
        same_on_all([each[:1] for each in found])
        close(found[0][0], y)
    else:
        close(torch.cat([each[0] for each in found], 1), y)
    close(torch.cat([each[1] for each in found], 1), dx)
    for i, wanted in enumerate(others, 2):
        if scored == "added mask":
            close(torch.cat([each[i] for each in found], 1), wanted)
        elif name == "logsumexp" and scored in ("sinks", "all"):
            close(found[0][i], wanted)  # each rank has the whole gradient of the one result
        else:
            close(sum(each[i] for each in found), wanted)  # each rank has its columns' part


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_any_dim_lies_in_shards(ranks, name, dim, way):
    shape = [3, 4, 5]
    shape[dim] = N_CLASSES
    x = logits(1, math.prod(shape)).reshape(shape).float()
    y = getattr(torch, name)(x.double(), dim)
    found = ranks.values(3, softmaxes, way, name, x, dim, torch.float32, {}, torch.ones_like(y))
    close(found[0][0] if name == "logsumexp" else torch.cat([each[0] for each in found], dim), y)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("input_dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_of_softmax(ranks, way, input_dtype, dtype):
    if way == "kernels" and input_dtype == torch.float64 != dtype:
        pytest.skip("the interpreter casts float64 to 16 bits wrongly")
    x, dy = logits().to(input_dtype), logits(seed=1).to(dtype)
    found = ranks.values(2, softmaxes, way, "softmax", x, 1, dtype, {}, dy)
    whole = x.double().to(dtype).requires_grad_()
    wanted = torch.softmax(whole.double(), 1)
    wanted.backward(dy.double())
    y, dx = (torch.cat([each[i] for each in found], 1) for i in (0, 1))
    assert (y.dtype, dx.dtype) == (dtype, input_dtype)
    # A rounding of the result; and of the gradient, which is made of rounded probabilities.
    ulp = max(torch.finfo(dtype).eps, 1e-6)
    close(y, wanted.detach(), ulp)
    close(dx, whole.grad, 4 * max(ulp, torch.finfo(input_dtype).eps))


def hollow(group, way, name, masked_rows, x):
    by(way)
    y = getattr(fused_softmax, name)(shard(x, group, 1), 1, masked_rows=masked_rows, **over(group))
    return (y,)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("masked_rows", ["nan", "zero"])
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_shards_and_rows_of_minus_infinity(ranks, name, masked_rows, way):
    x = logits(4).float()
    x[0], x[1, :12], x[2, 12:], x[3, 5] = -INF, -INF, -INF, INF
    found = ranks.values(3, hollow, way, name, masked_rows, x)
    wanted = getattr(fused_softmax, name)(x, 1, masked_rows=masked_rows)
    close(found[0][0] if name == "logsumexp" else torch.cat([each[0] for each in found], 1), wanted)


def kept_mask(group, name):
    mask = torch.ones(2, 3, dtype=torch.bool)
    y = getattr(fused_softmax, name)(torch.zeros(2, 3, requires_grad=True), 1, mask=mask, group=group)
    alive = weakref.ref(mask)
    del mask
    gc.collect()
    return alive() is None and y.requires_grad


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_a_mask_is_not_kept_for_the_gradient(ranks, name):
    assert all(ranks.values(2, kept_mask, name))


def cold(group, name, x, scale):
    return (getattr(fused_softmax, name)(shard(x, group, 1), 1, scale=scale, **over(group)),)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_a_row_whose_scale_is_0_gives_nan(ranks, name):
    x, scale = logits().float(), torch.ones(N_ROWS, 1)
    scale[2] = 0
    wanted = getattr(torch, name)(x, 1)
    wanted[2] = math.nan
    found = ranks.values(3, cold, name, x, scale)
    close(found[0][0] if name == "logsumexp" else torch.cat([each[0] for each in found], 1), wanted)


def sum_over_new_groups(group):
    total = torch.ones(())
    dist.all_reduce(total, group=dist.new_group(list(range(dist.get_world_size(group)))))
    return total.item()


def test_new_groups_of_some_ranks_and_then_of_others(ranks):
    """Ranks that other questions leave out name their next group as the others do."""
    for n in (2, 4, 2, 3, 4):
        assert ranks.values(n, sum_over_new_groups) == [float(n)] * n
