"""Rows whose columns lie in shards over ranks, against one process that has all columns; by kernels and by torch."""

import gc
import math
import weakref

import pytest
import torch
import torch.distributed as dist
from ranks import pool

import fused_softmax
from fused_softmax import cross_entropy, linear_cross_entropy, reference, route
from fused_softmax.distributed import Shards
from fused_softmax.ops.cross_entropy_sharded import States, merged

INF = math.inf
# Uneven, and of 0 and 1 columns.
SIZES = {1: (37,), 2: (30, 7), 3: (12, 1, 24), 4: (5, 0, 15, 17)}
N_ROWS, N_CLASSES = 9, 37
WAYS = ["kernels", "torch"]


@pytest.fixture(scope="module")
def ranks():
    with pool() as found:
        yield found


def shard(whole, group, dim):
    """This rank's columns, as memory of its own."""
    rank, sizes = dist.get_rank(group), SIZES[dist.get_world_size(group)]
    return whole.narrow(dim, sum(sizes[:rank]), sizes[rank]).clone()


def by(way):
    """Whether this process runs kernels, from here on."""
    route.INTERPRET = way == "kernels"


def logits(rows=N_ROWS, columns=N_CLASSES, seed=0):
    return 3 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(found, wanted, tolerance=1e-5):
    torch.testing.assert_close(found.double(), wanted.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


def same_on_all(found):
    """What the ranks gave, which is one and the same to the bit."""
    for each in found[1:]:
        for ours, first in zip(each, found[0], strict=True):
            assert torch.equal(ours.isnan(), first.isnan())
            assert torch.equal(ours.nan_to_num(), first.nan_to_num())
    return found[0]


# softmax, log_softmax, logsumexp


def softmaxes(group, way, name, x, dim, dtype, scored, dy):
    by(way)
    function = getattr(fused_softmax, name)
    scored = {key: shard(each, group, dim) if key == "mask" else each for key, each in scored.items()}
    graded = [each.requires_grad_() for each in floats(scored).values()]
    mine = shard(x, group, dim).requires_grad_()
    y = function(mine, dim, **({} if name == "logsumexp" else {"dtype": dtype}), **scored, group=group)
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
    y = getattr(fused_softmax, name)(shard(x, group, 1), 1, masked_rows=masked_rows, group=group)
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


# cross_entropy


def flat(output):
    """The tensors that a loss gave, the differentiable ones first."""
    if isinstance(output, torch.Tensor):
        return [output]
    return [each for each in (*output[:3], *(output.token_stats or ())) if each is not None]


def differentiated(output, x, of):
    """What a loss gave, and the gradient of x by numbers that tell its parts apart."""
    tensors = flat(output)
    graded = [each for each in tensors if each.requires_grad]
    parts = [of * torch.linspace(0.5, 1.5, each.numel()).view(each.shape).to(each.dtype) for each in graded]
    (dx,) = torch.autograd.grad(graded, [x], parts)
    return *[each.detach() for each in tensors], dx


def losses(group, way, x, target, weight, options, of=1.0):
    by(way)
    mine = shard(x, group, 1).requires_grad_()
    given = mine * 1 if options.get("inplace_backward") else mine
    weight = None if weight is None else shard(weight, group, 0)
    output = cross_entropy(given, target, weight, **options, group=group)
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
        cross_entropy(given, target, own_weight, group=group, n_classes=n_classes, **options), mine, 1.0
    )
    p = fused_softmax.softmax(shard(x, group, 1), 1, group=group, n_classes=n_classes)
    lse = fused_softmax.logsumexp(shard(x, group, 1), 1, group=group, n_classes=n_classes)
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
    return differentiated(cross_entropy(mine, target, reduction="none", return_lse=True, group=group), mine, 1.0)


def over_the_logits(group, way, x, target):
    by(way)
    leaf = shard(x, group, 1).requires_grad_()
    given = leaf * 1
    cross_entropy(given, target, inplace_backward=True, group=group).backward()
    return leaf.grad, given.detach()


@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_takes_the_place_of_the_logits(ranks, way):
    for dx, given in ranks.values(2, over_the_logits, way, logits().float(), torch.arange(N_ROWS)):
        assert given.equal(dx)


# linear_cross_entropy


def linear_losses(group, way, x, w, bias, target, weight, options, of=1.0):
    by(way)
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    x = (x.chunk(n)[rank] if options.get("input_sharded") else x).clone().requires_grad_()
    w, bias = (None if each is None else shard(each, group, 0).requires_grad_() for each in (w, bias))
    weight = None if weight is None else shard(weight, group, 0)
    output = linear_cross_entropy(x, w, target, linear_bias=bias, weight=weight, **options, group=group)
    tensors = flat(output)
    graded = [each for each in tensors if each.requires_grad]
    parts = [of * torch.linspace(0.5, 1.5, each.numel()).view(each.shape).to(each.dtype) for each in graded]
    inputs = [each for each in (x, w, bias) if each is not None]
    again = torch.autograd.grad(graded, inputs, parts, retain_graph=True)
    gradients = torch.autograd.grad(graded, inputs, parts)
    for first, second in zip(again, gradients, strict=True):
        assert (first - second).norm() <= (4 * torch.finfo(first.dtype).eps + 1e-6) * second.norm()
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
    graded = [each for each in wanted if each.requires_grad]
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
def test_dtypes_of_linear_losses(ranks, dtype, weighted, way):
    x, w = logits(12, 6, seed=5).to(dtype), logits(N_CLASSES, 6, seed=6).to(dtype)
    target, weight = torch.arange(12) * 3, torch.linspace(0.2, 2, N_CLASSES) if weighted else None
    of = 2.0**8 if dtype == torch.float16 else 1.0
    options = {"chunk_size": 4, "dtype": torch.float32, "lse_square_scale": 1e-3}
    found = ranks.values(3, linear_losses, way, x, w, None, target, weight, options, of)
    inputs = [each.double().requires_grad_() for each in (x, w)]
    weight = None if weight is None else weight.double()
    y = linear_cross_entropy(*inputs, target, weight=weight, lse_square_scale=1e-3)
    dx, dw = torch.autograd.grad(y, inputs, torch.tensor(of).double() * 0.5)
    eps = torch.finfo(dtype).eps
    close(found[0][0][0], y, 1e-5 + eps)
    for ours, truth in ((found[0][1][0], dx), (torch.cat([each[1][1] for each in found]), dw)):
        assert ours.dtype == dtype
        assert (ours.double() - truth).norm() <= (4 * eps + 1e-6) * truth.norm()


# What ranks and groups may get wrong


def outside(group, name):
    mine = dist.new_group([0])
    return getattr(fused_softmax, name)(torch.zeros(2, 3), *of(name), group=mine).shape


def of(name):
    return (torch.zeros(2, dtype=torch.long),) if name == "cross_entropy" else (1,)


NAMES = ["softmax", "log_softmax", "logsumexp", "cross_entropy"]


@pytest.mark.parametrize("name", NAMES)
def test_a_group_that_this_rank_is_not_in(ranks, name):
    inside, *others = ranks(4, outside, name)
    assert isinstance(inside, torch.Size)
    assert {each.args[:2] for each in others} == {("ValueError", f"{name}: this rank is not in the group")}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"n_classes": 3}, ValueError, "n_classes and transport are of shards, which need group="),
        ({"transport": "collective"}, ValueError, "n_classes and transport are of shards, which need group="),
        ({"transport": "pigeon"}, ValueError, "transport must be None or one of ('collective',), got 'pigeon'"),
        ({"n_classes": 2.0}, TypeError, "n_classes must be an int, not float (2.0)"),
        ({"n_classes": 0}, ValueError, "n_classes must be at least 1, got 0"),
        ({"group": object()}, RuntimeError, "group= needs torch.distributed.init_process_group() before the call"),
    ],
)
def test_bad_arguments_of_shards(name, arguments, error, said):
    with pytest.raises(error) as raised:
        getattr(fused_softmax, name)(torch.zeros(2, 3), *of(name), **arguments)
    assert str(raised.value) == f"{name}: {said}"


def refused(group, name, x, rest, arguments):
    return getattr(fused_softmax, name)(x, *rest, **arguments, group=group)


INDICES = torch.zeros(2, dtype=torch.long)


@pytest.mark.parametrize(
    ("name", "rest", "arguments", "error", "said"),
    [
        ("softmax", (1,), {"is_causal": True}, "ValueError", "is_causal is of whole rows, and group= gives a part"),
        ("softmax", (1,), {"scale": 0}, "ValueError", "a scale of 0 keeps one column of whole rows"),
        ("softmax", (1,), {"out": torch.zeros(2, 3)}, "ValueError", "out= is not for group="),
        ("softmax", (2,), {}, "IndexError", "dim 2 is out of range"),
        ("logsumexp", ((0, 1),), {}, "ValueError", "group= is for a single dim"),
        ("cross_entropy", (INDICES,), {"lse": torch.zeros(2)}, "ValueError", "lse and group= exclude each other"),
        ("cross_entropy", (torch.zeros(2, 3),), {}, "ValueError", "group= takes targets of class indices"),
        ("cross_entropy", (INDICES,), {"n_classes": 7}, "ValueError", "the shards hold (3, 3) columns, together fewer"),
        ("cross_entropy", (INDICES, torch.ones(4)), {}, "RuntimeError", "weight must have shape (3,)"),
    ],
)
def test_bad_calls_over_a_group(ranks, name, rest, arguments, error, said):
    for each in ranks(2, refused, name, torch.zeros(2, 3), rest, arguments):
        assert each.args[0] == error
        assert each.args[1].startswith(f"{name}: {said}")


def at_odds(group, name, odd):
    last = dist.get_rank(group) == dist.get_world_size(group) - 1
    x, target, arguments = torch.zeros(2, 3), torch.zeros(2, dtype=torch.long), {}
    if last and odd == "rows":
        x, target = torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)
    if last and odd == "dtype":
        x = x.double()
    if last and odd == "n_classes":
        arguments["n_classes"] = 8
    if last and odd == "scale":
        arguments["scale"] = 2.0
    return getattr(fused_softmax, name)(x, *((target,) if name == "cross_entropy" else (1,)), **arguments, group=group)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("odd", ["rows", "dtype", "n_classes", "scale"])
def test_ranks_that_disagree_are_told_in_what(ranks, name, odd):
    key = {"scale": "scaled"}.get(odd, odd) if name != "cross_entropy" else odd
    for each in ranks(3, at_odds, name, odd):
        assert each.args[0] == "RuntimeError"
        assert each.args[1].startswith(f"{name}: the ranks of the group differ in ")
        assert f" {key}: " in each.args[1] or (odd == "rows" and " shape: " in each.args[1])
        assert each.args[1].endswith("on rank 2")


def checked_targets(group):
    from fused_softmax import distributed

    distributed.CHECK = True
    try:
        cross_entropy(torch.zeros(2, 3), torch.tensor([0, dist.get_rank(group)]), group=group)
    finally:
        distributed.CHECK = False


def test_targets_are_compared_where_the_environment_asks_for_it(ranks):
    for each in ranks(2, checked_targets):
        assert each.args[0] == "RuntimeError"
        assert each.args[1].startswith("cross_entropy: the ranks of the group differ in target: ")


def as_on_a_gpu(group, odd):
    """Calls that compare nothing beforehand, as where it would cost a wait for the device; the third ones differ."""
    from fused_softmax import distributed

    waits, distributed._waits_for_nobody = distributed._waits_for_nobody, lambda device: False
    rank, target = dist.get_rank(group), torch.tensor([1, 4])
    x = torch.arange(12.0).reshape(2, 6)[:, 3 * rank : 3 * rank + 3]
    try:
        found = [cross_entropy(x, target, group=group, scale=scale) for scale in (None, 2.0)]
        scale = 3.0 if odd and rank else 2.0
        found.append(cross_entropy(x, target, group=group, scale=scale))
        try:
            cross_entropy(x, target, group=group)
        except RuntimeError as error:
            return found, str(error)
        return found, None
    finally:
        distributed._waits_for_nobody = waits


@pytest.mark.parametrize("odd", [False, True])
def test_what_is_not_compared_beforehand_gives_nan_and_then_an_error(ranks, odd):
    whole, target = torch.arange(12.0).reshape(2, 6), torch.tensor([1, 4])
    for found, said in ranks.values(2, as_on_a_gpu, odd):
        for y, scale in zip(found, (1.0, 2.0, math.nan if odd else 2.0), strict=True):
            close(y, torch.nn.functional.cross_entropy(whole * scale, target))
        assert said == (
            "cross_entropy: an earlier call gave NaN, because the ranks of the group differed in their options"
            if odd
            else None
        )


def second_derivatives(group, name, scored):
    x, w = (logits(3, 4, seed=seed).float().requires_grad_() for seed in (0, 1))
    if name == "linear_cross_entropy":
        y = linear_cross_entropy(x, w, torch.arange(3), group=group)
    elif name == "cross_entropy":
        y = cross_entropy(x, torch.arange(3), group=group)
    else:
        scale = {"scale": torch.ones(3, 1, requires_grad=True)} if scored else {}
        y = getattr(fused_softmax, name)(x, 1, **scale, group=group)
    penalty = x.square().sum()  # by which there is another way to x
    (dx,) = torch.autograd.grad(y.square().sum() + penalty, x, create_graph=True)
    torch.autograd.grad((dx * dx).sum() + penalty, x)


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("name", [*NAMES, "linear_cross_entropy"])
def test_a_second_derivative_raises(ranks, name, scored):
    for each in ranks(2, second_derivatives, name, scored):
        assert each.args[0] == "RuntimeError"
        assert each.args[1].endswith(": there is no second derivative over the ranks of a group")


def chunks_of_memory(group, x, w, target):
    """A call whose chunks are what fits in little memory, of which a long shard holds fewer rows."""
    from fused_softmax.ops import linear_by_rows

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


def graded_on_some(group, name, argument):
    last = dist.get_rank(group) == dist.get_world_size(group) - 1
    x, w, scale = torch.zeros(2, 3), torch.zeros(3, 3), torch.ones(2, 1)
    {"input": x, "weight": w, "scale": scale}[argument].requires_grad_(not last)
    if name == "linear_cross_entropy":
        return linear_cross_entropy(x, w, INDICES, group=group)
    return getattr(fused_softmax, name)(x, 1, **({"scale": scale} if argument == "scale" else {}), group=group)


@pytest.mark.parametrize(
    ("name", "argument", "said"),
    [
        ("softmax", "input", "requires_grad"),
        ("log_softmax", "input", "requires_grad"),
        ("softmax", "scale", "requires_grad"),
        ("linear_cross_entropy", "input", "input_requires_grad"),
        ("linear_cross_entropy", "weight", "weight_requires_grad"),
    ],
)
def test_gradients_that_take_an_exchange_are_asked_for_by_all_ranks(ranks, name, argument, said):
    for each in ranks(3, graded_on_some, name, argument):
        assert each.args[:2] == (
            "RuntimeError",
            f"{name}: the ranks of the group differ in {said}: True on rank 0, False on rank 2",
        )


@pytest.mark.parametrize("name", ["logsumexp", "cross_entropy"])
def test_gradients_without_an_exchange_are_each_rank_s_own(ranks, name):
    assert ranks.values(3, graded_on_one, name) == [True, False, False]


def graded_on_one(group, name):
    x = torch.zeros(2, 3, requires_grad=dist.get_rank(group) == 0)
    y = getattr(fused_softmax, name)(x, *((INDICES,) if name == "cross_entropy" else (1,)), group=group)
    return bool(y.requires_grad and torch.autograd.grad(y.sum(), x)[0].any())


def exchanges_of(group, arguments):
    """What a linear loss raised, and how many times this rank had talked to the others by then."""
    from fused_softmax import distributed

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
        ({"target": torch.zeros(2, 4)}, "ValueError", "group= takes targets of class indices, got probabilities"),
        ({"target": INDICES, "reduction": "max"}, "ValueError", "reduction must be"),
        ({"target": INDICES, "input_sharded": True}, "ValueError", "input_sharded takes [rows, in_features]"),
    ],
)
def test_linear_losses_check_before_any_exchange(ranks, arguments, error, said):
    for kind, text, exchanges in ranks.values(2, exchanges_of, arguments):
        assert (kind, exchanges) == (error, 0)
        assert text.startswith(f"linear_cross_entropy: {said}")


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


def ended(group):
    mine = dist.new_group([0, 1])
    fused_softmax.softmax(torch.zeros(2, 3), 1, group=mine)
    dist.destroy_process_group(mine)
    alive = weakref.ref(mine)
    del mine
    gc.collect()
    return alive() is None


def test_a_group_that_has_ended_is_held_by_nobody(ranks):
    assert all(ranks.values(4, at_most_two, ended))


def at_most_two(group, function):
    """function on ranks 0 and 1; others take part in making its groups."""
    if dist.get_rank(group) < 2:
        return function(group)
    dist.new_group([0, 1])
    return True


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_mean_of_targets_that_weigh_nothing_has_no_gradient(ranks, dtype):
    x, w = logits(12, 6, seed=5).to(dtype), logits(N_CLASSES, 6, seed=6).to(dtype)
    for (y,), gradients in ranks.values(2, weightless, x, w):
        assert y.isnan()
        assert all(each.isnan().all() for each in gradients)


def weightless(group, x, w):
    x, w = x.clone().requires_grad_(), shard(w, group, 0).requires_grad_()
    y = linear_cross_entropy(x, w, torch.arange(12), weight=torch.zeros(len(w)), group=group)
    return [y.detach()], torch.autograd.grad(y, (x, w))


def padded_linear(group, way, x, w, bias, n_classes):
    by(way)
    x, w, bias = x.requires_grad_(), shard(w, group, 0).requires_grad_(), shard(bias, group, 0).requires_grad_()
    y = linear_cross_entropy(x, w, torch.arange(12) % n_classes, linear_bias=bias, group=group, n_classes=n_classes)
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


def test_statistics_take_nothing_from_the_host(monkeypatch):
    """No copy to a device, for which the host would wait, and which a graph cannot capture."""
    monkeypatch.setattr(torch, "tensor", None)
    of_ranks = torch.tensor_split(logits(2, 6).float(), 2, 1)
    at = torch.stack([each.argmax(1) for each in of_ranks]).float()
    states = torch.stack([each.logsumexp(1) for each in of_ranks])
    best = torch.stack([each.amax(1) for each in of_ranks])
    heard = States(states, states, expected=states, best=best, best_at=at)
    assert merged(heard, Shards(None, 0, (3, 3), 6)).best_at.equal(logits(2, 6).argmax(1))


def cold(group, name, x, scale):
    return (getattr(fused_softmax, name)(shard(x, group, 1), 1, scale=scale, group=group),)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_a_row_whose_scale_is_0_gives_nan(ranks, name):
    x, scale = logits().float(), torch.ones(N_ROWS, 1)
    scale[2] = 0
    wanted = getattr(torch, name)(x, 1)
    wanted[2] = math.nan
    found = ranks.values(3, cold, name, x, scale)
    close(found[0][0] if name == "logsumexp" else torch.cat([each[0] for each in found], 1), wanted)
