"""Losses of a linear layer whose classes lie in shards over ranks, against one process; by kernels and by torch."""

import math

import pytest
import torch
import torch.distributed as dist
from products import pairwise
from sharded import INDICES, N_CLASSES, SIZES, WAYS, by, close, flat, graded_of, logits, over, same_on_all, shard

from fused_softmax import linear_cross_entropy, linear_log_prob
from fused_softmax.ops.losses.over_ranks.linear import GatheredRows
from fused_softmax.ranks.groups import Shards


def linear_losses(group, way, x, w, bias, target, weight, options, of=1.0):
    by(way)
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    x = (x.chunk(n)[rank] if options.get("input_sharded") else x).clone().requires_grad_()
    w, bias = (None if each is None else shard(each, group, 0).requires_grad_() for each in (w, bias))
    weight = None if weight is None else shard(weight, group, 0)
    output = linear_cross_entropy(x, w, target, linear_bias=bias, weight=weight, **options, **over(group))
    tensors = flat(output)
    graded = graded_of(output)
    parts = [of * torch.linspace(0.5, 1.5, each.numel()).view(each.shape).to(each.dtype) for each in graded]
    inputs = [each for each in (x, w, bias) if each is not None]
    again = torch.autograd.grad(graded, inputs, parts, retain_graph=True)
    gradients = torch.autograd.grad(graded, inputs, parts)
    for first, second in zip(again, gradients, strict=True):  # of logits' gradients of the input's dtype
        assert (first - second).norm() <= (4 * torch.finfo(x.dtype).eps + 1e-6) * second.norm()
    return [each.detach() for each in tensors], gradients


LINEAR = {
    "plain": {},
    "none": {"reduction": "none"},
    "sum, one chunk": {"reduction": "sum", "chunk_size": 12},
    "weights": {"weighted": True},
    "bias": {"biased": True, "chunk_size": 3},
    "ignored rows are left out": {"skip_ignored": True, "return_lse": True},
    "the input lies in shards": {"input_sharded": True, "biased": True, "weighted": True},
    "all": {
        "biased": True, "weighted": True, "label_smoothing": 0.2, "softcap": 5.0, "scale": 1.2,
        "lse_square_scale": 0.02, "return_z_loss": True, "return_lse": True, "return_token_stats": True,
    },
}  # fmt: skip


@pairwise()
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", LINEAR)
def test_linear_losses_are_those_of_one_process(ranks, options, way, n):
    options = {"chunk_size": 5} | LINEAR[options]
    weighted, biased = (options.pop(key, False) for key in ("weighted", "biased"))
    x, w = logits(12, 6, seed=5).float() / 3, logits(N_CLASSES, 6, seed=6).float() / 3
    bias = torch.linspace(-1, 1, N_CLASSES) if biased else None
    weight = torch.linspace(0.2, 2, N_CLASSES) if weighted else None
    target = torch.tensor([0, 36, 12, 13, 7, -100, 30, 29, 3, 20, -100, 1])
    found = ranks.values(n, linear_losses, way, x, w, bias, target, weight, options)
    inputs = [each.double().requires_grad_() for each in (x, w, bias) if each is not None]
    options.pop("input_sharded", None)
    output = linear_cross_entropy(
        *inputs[:2], target, linear_bias=inputs[2] if biased else None,
        weight=None if weight is None else weight.double(), **options,
    )  # fmt: skip
    wanted = flat(output)
    graded = graded_of(output)
    parts = [torch.linspace(0.5, 1.5, each.numel()).view(each.shape).to(each.dtype) for each in graded]
    dx, *others = torch.autograd.grad(graded, inputs, parts)
    for ours, truth in zip(same_on_all([each[0] for each in found]), wanted, strict=True):
        close(ours, truth)
    if LINEAR.get("the input lies in shards") and len(found[0][1][0]) < len(x):
        close(torch.cat([each[1][0] for each in found]), dx)
    else:
        close(same_on_all([each[1][:1] for each in found])[0], dx)
    for i, truth in enumerate(others, 1):
        close(torch.cat([each[1][i] for each in found]), truth)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("master", [False, True])
def test_dtypes_of_linear_losses(ranks, dtype, master, weighted, way):
    if master and dtype == torch.float64:
        pytest.skip("a master is wider than the input")
    x, low = logits(12, 6, seed=5).to(dtype), logits(N_CLASSES, 6, seed=6).to(dtype)
    w = low.float() if master else low
    target, weight = torch.arange(12) * 3, torch.linspace(0.2, 2, N_CLASSES) if weighted else None
    of = 2.0**8 if dtype == torch.float16 else 1.0
    options = {"chunk_size": 4, "dtype": torch.float32, "lse_square_scale": 1e-3}
    found = ranks.values(3, linear_losses, way, x, w, None, target, weight, options, of)
    inputs = [each.double().requires_grad_() for each in (x, low)]
    weight = None if weight is None else weight.double()
    y = linear_cross_entropy(*inputs, target, weight=weight, lse_square_scale=1e-3)
    dx, dw = torch.autograd.grad(y, inputs, torch.tensor(of).double() * 0.5)
    eps = torch.finfo(dtype).eps
    close(found[0][0][0], y, 1e-5 + eps)
    for ours, truth, of in ((found[0][1][0], dx, x), (torch.cat([each[1][1] for each in found]), dw, w)):
        assert ours.dtype == of.dtype
        assert (ours.double() - truth).norm() <= (4 * eps + 1e-6) * truth.norm()


def a_master_on_one_rank(group, function):
    x, w = torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(4, 3, dtype=torch.bfloat16)
    w = w.float() if dist.get_rank(group) == 1 else w
    return function(x.requires_grad_(), w.requires_grad_(), INDICES, accumulate="input", group=group)


@pytest.mark.parametrize("function", [linear_cross_entropy, linear_log_prob])
def test_ranks_whose_weights_differ_in_dtype_are_told(ranks, function):
    """Their sums over ranks would not be of one dtype."""
    said = "differ in weight_dtype: torch.bfloat16 on rank 0, torch.float32 on rank 1"
    for each in ranks(2, a_master_on_one_rank, function):
        assert each.args[:2] == ("RuntimeError", f"{function.__name__}: the ranks of the group {said}")


def chunks_of_memory(group, x, w, target):
    """A call whose chunks are what fits in little memory, of which a long shard holds fewer rows."""
    from fused_softmax.ops.losses import linear_by_rows

    held, linear_by_rows._CHUNK_BYTES = linear_by_rows._CHUNK_BYTES, 128 * 12 * 4
    try:
        return linear_losses(group, "torch", x, w, None, target, None, {})
    finally:
        linear_by_rows._CHUNK_BYTES = held


def test_all_ranks_take_the_same_chunks(ranks):
    x, w = logits(300, 6, seed=5).float() / 3, logits(N_CLASSES, 6, seed=6).float() / 3
    target = torch.arange(300) % N_CLASSES
    found = ranks.values(4, chunks_of_memory, x, w, target)
    close(found[0][0][0], linear_cross_entropy(x.double(), w.double(), target))


def exchanges_of(group, arguments):
    """What a linear loss raised, and how many times this rank had talked to the others by then."""
    from fused_softmax.ranks import groups as distributed

    said, gathers = [], distributed._all_gather
    distributed._all_gather = lambda *args, **kwargs: said.append(gathers(*args, **kwargs))
    try:
        linear_cross_entropy(torch.zeros(2, 3), torch.zeros(4, 3), **arguments, group=group)
    except Exception as error:
        return type(error).__name__, str(error), len(said)
    finally:
        distributed._all_gather = gathers


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"target": INDICES, "weight": torch.ones(3)}, "RuntimeError", "weight must have shape (4,)"),
        ({"target": INDICES[:1]}, "ValueError", "target must have shape (2,)"),
        ({"target": torch.zeros(2, 3)}, "ValueError", "target must have shape (2, 4)"),
        (
            {"target": torch.zeros(2, 4), "return_token_stats": True},
            "ValueError",
            "return_token_stats takes targets of class indices with group=, got probabilities",
        ),
        (
            {"target": torch.zeros(2, 4), "weight": torch.ones(4, requires_grad=True)},
            "ValueError",
            "weight requires grad, and with group= it is a constant; give weight.detach()",
        ),
        ({"target": INDICES, "reduction": "max"}, "ValueError", "reduction must be"),
        ({"target": INDICES, "input_sharded": True}, "ValueError", "input_sharded takes [rows, in_features]"),
    ],
)
def test_linear_losses_check_before_any_exchange_but_one_that_says_so(ranks, arguments, error, said):
    for kind, text, exchanges in ranks.values(2, exchanges_of, arguments):
        assert (kind, exchanges) == (error, 1)
        assert text.startswith(f"linear_cross_entropy: {said}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_mean_of_targets_that_weigh_nothing_has_no_gradient(ranks, dtype):
    x, w = logits(12, 6, seed=5).to(dtype), logits(N_CLASSES, 6, seed=6).to(dtype)
    for (y,), gradients in ranks.values(2, weightless, x, w):
        assert y.isnan()
        assert all(each.isnan().all() for each in gradients)


def weightless(group, x, w):
    x, w = x.clone().requires_grad_(), shard(w, group, 0).requires_grad_()
    y = linear_cross_entropy(x, w, torch.arange(12), weight=torch.zeros(len(w)), **over(group))
    return [y.detach()], torch.autograd.grad(y, (x, w))


def padded_linear(group, way, x, w, bias, n_classes):
    by(way)
    x, w, bias = x.requires_grad_(), shard(w, group, 0).requires_grad_(), shard(bias, group, 0).requires_grad_()
    y = linear_cross_entropy(x, w, torch.arange(12) % n_classes, linear_bias=bias, **over(group), n_classes=n_classes)
    return y.detach(), *torch.autograd.grad(y, (x, w, bias))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n_classes", [36, 13, 5])
def test_padding_of_a_linear_layer_is_in_no_product(ranks, n_classes, way):
    x, w, bias = logits(12, 6, seed=5).float(), logits(N_CLASSES, 6, seed=6).float(), torch.linspace(-1, 1, N_CLASSES)
    w[n_classes:] = bias[n_classes:] = math.nan
    found = ranks.values(3, padded_linear, way, x, w, bias, n_classes)
    inputs = [each.double().requires_grad_() for each in (x, w[:n_classes], bias[:n_classes])]
    y = linear_cross_entropy(*inputs[:2], torch.arange(12) % n_classes, linear_bias=inputs[2])
    dx, *others = torch.autograd.grad(y, inputs)
    close(found[0][0], y)
    close(found[0][1], dx)
    for i, wanted in enumerate(others, 2):
        ours = torch.cat([each[i] for each in found])
        close(ours[:n_classes], wanted)
        assert (ours[n_classes:] == 0).all()


def sent_backward(group, x, w):
    """By name, the elements that this rank sends for the gradient of its rows, and that gradient."""
    from torch.distributed.tensor.debug import CommDebugMode

    rank, n = dist.get_rank(group), dist.get_world_size(group)
    mine, w = x.chunk(n)[rank].clone().requires_grad_(), shard(w, group, 0)
    y = linear_cross_entropy(mine, w, torch.arange(len(x)), **over(group), input_sharded=True, reduction="none")
    with CommDebugMode() as sent:
        parts = GatheredRows.apply(mine, Shards(group, rank, SIZES[n], N_CLASSES), "linear_cross_entropy")
        (own,) = torch.autograd.grad(parts, mine, x * (rank + 1))
    assert len(y) == len(x)
    return {str(name): count for name, count in sent.get_comm_counts().items()}, own


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_gradient_of_rows_in_shards_is_scattered_and_not_told_to_all(ranks, n):
    x, w = logits(12, 6, seed=5).float(), logits(N_CLASSES, 6, seed=6).float()
    found = ranks.values(n, sent_backward, x, w)
    for sent, _ in found:
        assert not any("all_reduce" in name or "allreduce" in name for name in sent)
        assert sum(count for name, count in sent.items() if "reduce_scatter" in name) == 1
    close(torch.cat([own for _, own in found]), x * sum(range(1, n + 1)))


def gradients_of_no_targets(group, way):
    by(way)
    x = logits(4, 6).float().requires_grad_()
    w = shard(logits(N_CLASSES, 6).float(), group, 0).requires_grad_()
    y = linear_cross_entropy(x, w, torch.full((4,), -100), reduction="sum", **over(group))
    return torch.autograd.grad(y / 0, (x, w))


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_no_targets_are_0_whatever_the_loss_is_divided_by(ranks, way):
    for found in ranks.values(2, gradients_of_no_targets, way):
        assert all((each == 0).all() for each in found)
