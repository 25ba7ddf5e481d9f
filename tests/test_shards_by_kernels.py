"""Calls over ranks by kernels: how few launches they take, and what the launches of their own have that others lack."""

import collections
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from sharded import close, differentiated, logits, same_on_all

import fused_softmax
from fused_softmax import cross_entropy, log_prob, logsumexp
from fused_softmax.core import route
from fused_softmax.core.runner import launch
from fused_softmax.ops.softmax import over_ranks as softmax_gradient_sharded
from fused_softmax.ops.softmax import over_ranks as softmax_over_ranks
from fused_softmax.ranks import groups as distributed


def mine(whole, group):
    return whole.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].clone()


def gradient_of(y, x):
    y = y if isinstance(y, torch.Tensor) else y.loss
    return torch.autograd.grad(y, [x], ONES[: y.numel()].view(y.shape))


ONES = torch.ones(8 * 64)
CALLS = {
    "loss": lambda x, t, group: gradient_of(cross_entropy(x, t, group=group), x),
    "smoothing": lambda x, t, group: gradient_of(cross_entropy(x, t, label_smoothing=0.1, group=group), x),
    "weights": lambda x, t, group: gradient_of(cross_entropy(x, t, torch.ones(x.shape[1]), group=group), x),
    "statistics": lambda x, t, group: gradient_of(cross_entropy(x, t, return_token_stats=True, group=group), x),
    "log_prob": lambda x, t, group: gradient_of(log_prob(x, t, group=group), x),
    "entropy": lambda x, t, group: gradient_of(log_prob(x, t, return_entropy=True, group=group).entropy, x),
    "softmax": lambda x, t, group: gradient_of(fused_softmax.softmax(x, group=group), x),
    "logsumexp": lambda x, t, group: gradient_of(logsumexp(x, 1, group=group), x),
}


def launches(group, name):
    """(kernels, torch's operations that are no views, of these those of the shard's size) of a call as on a GPU."""
    from torch.utils._python_dispatch import TorchDispatchMode

    kernels, operations = [], collections.Counter()
    x = mine(logits(8, 64).float(), group).requires_grad_()
    target = torch.arange(8) * 7
    prepare = launch.prepare

    def counted(kernel, *args, **options):
        prepared = prepare(kernel, *args, **options)
        return SimpleNamespace(__call__=lambda *tensors: kernels.append(kernel), again=prepared.again)

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            if not function.is_view and "empty" not in str(function):
                operations["small"] += 1
                operations["large"] += any(
                    isinstance(each, torch.Tensor) and each.shape == x.shape and each.device.type == "cpu"
                    for each in args
                )
            return found

    with (
        mock.patch.object(launch, "prepare", counted),
        mock.patch.object(distributed, "_waits_for_nobody", return_value=False),
        mock.patch.object(distributed, "raise_doubts"),
        mock.patch.object(torch._C, "_len_torch_dispatch_stack", return_value=0),
    ):
        route.INTERPRET = True
        fused_softmax.core.calls.forget()
        for _ in range(2):
            CALLS[name](x, target, group)
        kernels.clear()
        with Counting():
            CALLS[name](x, target, group)
    fused_softmax.core.calls.forget()
    distributed._doubts.clear()
    return len(kernels), operations["small"], operations["large"]


@pytest.mark.parametrize(
    ("name", "kernels", "small"),
    [("loss", 7, 4), ("smoothing", 8, 8), ("weights", 6, 10), ("statistics", 7, 12), ("softmax", 4, 26),
     ("log_prob", 4, 20), ("entropy", 4, 21),
     ("logsumexp", 2, 14)],
)  # fmt: skip
def test_a_call_and_its_gradient_take_few_launches_and_none_of_torchs_reads_the_shard(ranks, name, kernels, small):
    for found in ranks.values(2, launches, name):
        assert found[0] == kernels
        assert found[1] <= small
        assert not found[2]


def losses(group, x, target, options):
    route.INTERPRET = True
    rank, sizes = dist.get_rank(group), (5, 12, 0, 23)
    given = x.split(sizes, 1)[rank].clone().requires_grad_()
    options = {key: each.split(sizes)[rank] if key == "weight" else each for key, each in options.items()}
    return differentiated(cross_entropy(given, target, **options, group=group, shard_sizes=sizes), given, 1.0)


EVERYTHING = {
    "weight": torch.linspace(0.2, 2, 40), "label_smoothing": 0.2, "softcap": 6.0, "scale": 1.2,
    "lse_square_scale": 0.02, "return_lse": True, "return_z_loss": True, "return_token_stats": True,
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, EVERYTHING, {"weight": EVERYTHING["weight"], "reduction": "none"}])
def test_losses_of_uneven_shards_of_which_one_is_empty(ranks, options):
    x, target = logits(7, 40).float(), torch.tensor([0, 4, 5, 16, -100, 17, 39])
    found = ranks.values(4, losses, x, target, options)
    whole = x.double().requires_grad_()
    of_one = {key: each.double() if key == "weight" else each for key, each in options.items()}
    *wanted, dx = differentiated(cross_entropy(whole, target, **of_one), whole, 1.0)
    for ours, truth in zip(same_on_all([each[:-1] for each in found]), wanted, strict=True):
        close(ours, truth)
    close(torch.cat([each[-1] for each in found], 1), dx)


def softmaxes(group, name, x, dy, options):
    route.INTERPRET = True
    given = mine(x, group).requires_grad_()
    y = getattr(fused_softmax, name)(given, 1, **options, group=group)
    with mock.patch.object(softmax_gradient_sharded, "_prepare", wraps=softmax_over_ranks._prepare) as prepared:
        (dx,) = torch.autograd.grad(y, [given], mine(dy, group))
    return y.detach(), dx, prepared.call_count


@pytest.mark.parametrize("options", [{}, {"scale": 0.5}], ids=str)
@pytest.mark.parametrize("columns", [600, 18000])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_gradients_of_softmax_in_one_part_and_in_several(ranks, name, columns, options):
    x, dy = logits(2, columns), logits(2, columns, 1).float()
    found = ranks.values(2, softmaxes, name, x.float(), dy, options)
    assert [each[2] for each in found] == [1, 1]
    x.requires_grad_()
    y = getattr(fused_softmax, name)(x, 1, **options)
    (dx,) = torch.autograd.grad(y, [x], dy.double())
    close(torch.cat([each[0] for each in found], 1), y.detach())
    close(torch.cat([each[1] for each in found], 1), dx, 3e-5)


def hidden(group, x, dy):
    """log_softmax of rows that a mask hides, and in part."""
    route.INTERPRET = True
    given = mine(x, group).requires_grad_()
    y = fused_softmax.log_softmax(given, 1, mask=mine(x > 0, group), masked_rows="zero", group=group)
    return torch.autograd.grad(y, [given], mine(dy, group))


def test_a_gradient_is_0_where_a_mask_hides(ranks):
    x, dy = logits(5, 40), logits(5, 40, 1).float()
    x[0], x[1, :20] = -1.0, -1.0
    dx = torch.cat([each[0] for each in ranks.values(2, hidden, x.float(), dy)], 1)
    assert not dx[x <= 0].any()
    x.requires_grad_()
    y = fused_softmax.log_softmax(x, 1, mask=x > 0, masked_rows="zero")
    close(dx, torch.autograd.grad(y, [x], dy.double())[0])


def log_sums(group, x, dlse):
    route.INTERPRET = True
    given = mine(x, group).requires_grad_()
    lse = logsumexp(given, 1, group=group)
    return lse.detach(), *torch.autograd.grad(lse, [given], dlse.to(lse.dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_gradient_of_logsumexp_is_by_the_lse_that_no_dtype_has_rounded(ranks, dtype):
    x, dlse = (logits(5, 40) + 60).to(dtype), torch.tensor([1.0, -2.0, 0.0, 0.5, 1.0])
    x[1, :20] = -torch.inf
    x[2] = -torch.inf  # which no loss uses
    found = ranks.values(2, log_sums, x, dlse)
    whole = x.double().requires_grad_()
    wanted = torch.logsumexp(whole, 1)
    (lse,) = same_on_all([each[:1] for each in found])
    ulp = max(torch.finfo(dtype).eps, 1e-5)
    close(lse, wanted.detach(), ulp)
    (dx,) = torch.autograd.grad(wanted, [whole], dlse.double())
    dx[2] = 0
    close(torch.cat([each[1] for each in found], 1), dx, ulp)
