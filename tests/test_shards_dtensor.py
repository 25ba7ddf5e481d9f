"""Losses of a DTensor whose classes lie in shards: placed as torch places them, with the numbers of one process."""

import contextlib
from unittest import mock

import pytest
import torch
from products import pairwise
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import loss_parallel

import fused_softmax
from fused_softmax import cross_entropy, linear_cross_entropy
from fused_softmax.core import route
from fused_softmax.ops.losses import sums as loss_sums

WAYS = ["kernels", "torch"]


def logits(*shape, seed=0):
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


MESHES = {}


def mesh_of(shape):
    if shape not in MESHES:
        MESHES[shape] = init_device_mesh("cpu", shape)
    return MESHES[shape]


def of_dtensor(group, way, function, shape, placements, x, target, weight, options, plain_target=False):
    route.INTERPRET = way == "kernels"
    mesh = mesh_of(shape)
    mine = distribute_tensor(x, mesh, placements).requires_grad_()
    if not plain_target:
        rows = [
            Shard(each.dim - (each.dim > 1)) if isinstance(each, Shard) and each.dim != 1 else Replicate()
            for each in placements
        ]
        target = distribute_tensor(target, mesh, rows)
    if weight is not None:
        weight = distribute_tensor(weight, mesh, [Replicate()] * mesh.ndim)
    with CommDebugMode() as communication:
        y = function(mine, target, weight, **options)
    of = (torch.arange(y.numel()) + 1.0).view(y.shape) / y.numel()
    (dx,) = torch.autograd.grad(
        y,
        mine,
        distribute_tensor(
            of.to(y.dtype), mesh, [each if isinstance(each, Shard) else Replicate() for each in y.placements]
        ),
    )
    return y.full_tensor().detach(), dx.full_tensor(), y.placements, dx.placements, communication.get_total_counts()


def whole(function, x, target, weight, options):
    x = x.double().requires_grad_()
    y = function(x, target, None if weight is None else weight.double(), **options)
    of = (torch.arange(y.numel()) + 1.0).view(y.shape) / y.numel()
    return y.detach(), *torch.autograd.grad(y, x, of.double())


PLACED = [
    ((4,), [Shard(1)]), ((4,), [Replicate()]), ((4,), [Shard(0)]), ((2, 2), [Replicate(), Shard(1)]),
    ((2, 2), [Shard(1), Replicate()]), ((2, 2), [Shard(0), Shard(1)]), ((2, 2), [Shard(1), Shard(0)]),
    ((2, 2), [Shard(1), Shard(1)]), ((2, 2), [Shard(0), Shard(0)]),
]  # fmt: skip


@pairwise()
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("mesh", "placements"), PLACED)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "ignore_index": 3, "weighted": True}])
def test_placements_and_numbers(ranks, options, mesh, placements, reduction, way):
    options = options | {"reduction": reduction}
    weight = torch.linspace(0.2, 2, 13) if options.pop("weighted", False) else None
    x, target = logits(6, 13).float(), torch.tensor([0, 12, 3, 4, 5, 9])
    y, dx = whole(torch.nn.functional.cross_entropy, x, target, weight, options)
    for ours, of_x, placed, placed_dx, _ in ranks.values(
        4, of_dtensor, way, cross_entropy, mesh, placements, x, target, weight, options
    ):
        torch.testing.assert_close(ours.double(), y, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(of_x.double(), dx, rtol=1e-5, atol=1e-6)
        kind = {"mean": "avg", "sum": "sum"}.get(reduction)
        for i, each in enumerate(placements):
            if each == Shard(0):
                assert placed[i] == Shard(0) if reduction == "none" else placed[i].is_partial(kind)
            else:
                assert placed[i] == Replicate()
        assert list(placed_dx) == list(placements)


def unwatched(group, x, target):
    """A mean and its gradient by kernels, which no mode watches; 3 targets take several programs to count, 2 one."""
    route.INTERPRET, mesh = True, mesh_of((2, 2))
    mine = distribute_tensor(x, mesh, [Shard(0), Shard(1)]).requires_grad_()
    with mock.patch.object(loss_sums, "_COUNTED", 2):
        y = cross_entropy(mine, distribute_tensor(target, mesh, [Shard(0), Replicate()]))
    (dx,) = torch.autograd.grad(y, mine)
    return y.full_tensor().detach(), dx.full_tensor()


@pytest.mark.parametrize("rows", [5, 1])
def test_a_mean_of_rows_that_lie_unevenly(ranks, rows):
    """Also where one rank counts its targets by more programs than another, and where one has no row."""
    x, target = logits(rows, 13).float(), torch.tensor([0, 12, 3, -100, 5])[:rows]
    y, dx = whole(torch.nn.functional.cross_entropy, x, target, None, {})
    for ours, of_x in ranks.values(4, unwatched, x, target):
        torch.testing.assert_close(ours.double(), y, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(of_x.double(), dx, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n_classes", [5, 3, 1])
def test_shards_of_few_classes_and_none(ranks, n_classes, way):
    x, target = logits(6, n_classes).float(), torch.arange(6) % n_classes
    y, dx = whole(torch.nn.functional.cross_entropy, x, target, None, {})
    for ours, of_x, *_ in ranks.values(4, of_dtensor, way, cross_entropy, (4,), [Shard(1)], x, target, None, {}):
        torch.testing.assert_close(ours.double(), y, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(of_x.double(), dx, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("placements", [[Shard(0), Shard(1)], [Shard(1), Shard(2)], [Shard(3), Replicate()]])
def test_targets_of_several_dims(ranks, placements):
    x, target = logits(4, 6, 2, 4).float(), torch.arange(32).reshape(4, 2, 4) % 6
    for reduction in ("none", "mean"):
        options = {"reduction": reduction}
        y, dx = whole(torch.nn.functional.cross_entropy, x, target, None, options)
        for ours, of_x, *_ in ranks.values(
            4, of_dtensor, "kernels", cross_entropy, (2, 2), placements, x, target, None, options
        ):
            torch.testing.assert_close(ours.double(), y, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(of_x.double(), dx, rtol=1e-5, atol=1e-6)


def test_one_gather_a_loss(ranks):
    """Of few numbers a row, forward; and of nothing, backward."""
    x, target = logits(6, 13).float(), torch.arange(6)
    for _, _, _, _, collectives in ranks.values(
        4, of_dtensor, "kernels", counted, (4,), [Shard(1)], x, target, None, {}, True
    ):
        assert collectives == 1


def counted(x, target, weight):
    y = cross_entropy(x, target, weight)
    torch.autograd.grad(y, x, retain_graph=True)
    return y


def as_titan_does(group, way, enable, parallel, mesh, placements, x, target):
    """Code that knows nothing of this package, but for one call of enable()."""
    route.INTERPRET = way == "kernels"
    found = []
    with fused_softmax.enabled() if enable else contextlib.nullcontext():
        for reduction in ("sum", "mean", "none"):
            mine = distribute_tensor(x, mesh_of(mesh), placements).requires_grad_()
            given = target if parallel else distribute_tensor(target, mesh_of(mesh), [Replicate()])
            with loss_parallel() if parallel else contextlib.nullcontext(), CommDebugMode() as communication:
                y = torch.nn.functional.cross_entropy(mine, given, reduction=reduction)
                y.sum().backward()
            # Torch 2.11 also gathers the gradient of a leaf whose shards differ in size, by a functional collective.
            moves = sum(n for each, n in communication.get_comm_counts().items() if str(each).startswith("c10d."))
            found.append((y.full_tensor().detach(), mine.grad.full_tensor(), y.placements, moves))
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("parallel", [False, True])
def test_code_of_torch_runs_unchanged(ranks, parallel, way):
    x, target = logits(6, 13).float(), torch.tensor([0, 12, 3, -100, 5, 9])
    for enable in (False, True):
        for found in ranks.values(4, as_titan_does, way, enable, parallel, (4,), [Shard(1)], x, target):
            for reduction, (y, dx, placements, moves) in zip(("sum", "mean", "none"), found, strict=True):
                truth = x.double().requires_grad_()
                wanted = torch.nn.functional.cross_entropy(truth, target, reduction=reduction)
                wanted.sum().backward()
                torch.testing.assert_close(y.double(), wanted.detach(), rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(dx.double(), truth.grad, rtol=1e-5, atol=1e-6)
                assert placements == (Replicate(),)
                if enable and way == "kernels":
                    assert moves == 1


def everything(group, x, target, options):
    mesh = mesh_of((2, 2))
    mine = distribute_tensor(x, mesh, [Shard(0), Shard(1)])
    targets = distribute_tensor(target, mesh, [Shard(0), Replicate()])
    found = cross_entropy(mine, targets, **options)
    parts = [found.loss, found.lse, found.z_loss, *found.token_stats]
    return [each.full_tensor() for each in parts], [each.placements for each in parts]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_what_else_is_returned(ranks, reduction):
    x, target = logits(6, 13).float(), torch.tensor([0, 12, 3, -100, 5, 9])
    options = {
        "reduction": reduction, "return_lse": True, "return_z_loss": True, "lse_square_scale": 0.01,
        "return_token_stats": True, "softcap": 4.0,
    }  # fmt: skip
    wanted = cross_entropy(x.double(), target, **options)
    for found, placements in ranks.values(4, everything, x, target, options):
        for ours, truth in zip(found, [wanted.loss, wanted.lse, wanted.z_loss, *wanted.token_stats], strict=True):
            torch.testing.assert_close(ours.double(), truth.double(), rtol=1e-5, atol=1e-6)
        assert all(each == (Shard(0), Replicate()) for each in [placements[1], *placements[3:]])


def plain_target(group, x, target):
    return cross_entropy(distribute_tensor(x, mesh_of((2, 2)), [Shard(0), Shard(1)]), target)


def test_a_plain_target_of_rows_in_shards_may_be_of_all_or_of_some(ranks):
    for each in ranks(4, plain_target, logits(6, 13), torch.arange(6)):
        assert each.args[0] == "ValueError"
        assert each.args[1].startswith(
            "cross_entropy: target must be a DTensor where the rows of the input lie in shards"
        )


def lse_of_shards(group, way, placements, x, keepdim):
    route.INTERPRET = way == "kernels"
    mine = distribute_tensor(x, mesh_of((2, 2)), placements).requires_grad_()
    with CommDebugMode() as communication:
        y = fused_softmax.logsumexp(mine, 1, keepdim)
    (dx,) = torch.autograd.grad(y, mine, torch.ones_like(y))
    assert dx.placements == mine.placements
    return y.full_tensor().detach(), dx.full_tensor(), y.placements, communication.get_total_counts()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(
    ("placements", "placed", "moves"),
    [
        ([Replicate(), Shard(1)], [Replicate(), Replicate()], 1),
        ([Shard(0), Shard(1)], [Shard(0), Replicate()], 1),
        ([Shard(1), Shard(1)], [Replicate(), Replicate()], 2),
        ([Shard(0), Replicate()], [Shard(0), Replicate()], 0),
    ],
)
def test_logsumexp_of_shards_moves_numbers_of_rows(ranks, placements, placed, moves, keepdim, way):
    x = logits(6, 13).float()
    truth = x.double().requires_grad_()
    wanted = torch.logsumexp(truth, 1, keepdim)
    (dx,) = torch.autograd.grad(wanted, truth, torch.ones_like(wanted))
    for y, of_x, ours, counts in ranks.values(4, lse_of_shards, way, placements, x, keepdim):
        torch.testing.assert_close(y.double(), wanted.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(of_x.double(), dx, rtol=1e-5, atol=1e-6)
        assert (list(ours), counts) == (placed, moves)


def linear_of_dtensor(group, way, mesh, of_x, of_w, x, w, bias, target, weight, options):
    route.INTERPRET = way == "kernels"
    mesh = mesh_of(mesh)
    x = distribute_tensor(x, mesh, of_x).requires_grad_()
    w, bias = (distribute_tensor(each, mesh, of_w).requires_grad_() for each in (w, bias))
    rows = [
        each if isinstance(each, Shard) and each_w == Replicate() else Replicate()
        for each, each_w in zip(of_x, of_w, strict=True)
    ]
    y = linear_cross_entropy(x, w, distribute_tensor(target, mesh, rows), linear_bias=bias, weight=weight, **options)
    of = torch.ones_like(y)
    if y.ndim:
        of = distribute_tensor((torch.arange(y.numel()) + 1.0).view(y.shape) / y.numel(), mesh, y.placements)
    dx, dw, db = torch.autograd.grad(y, (x, w, bias), of)
    return [each.full_tensor().detach() for each in (y, dx, dw, db)], y.placements, dx.placements == x.placements


@pairwise()
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    ("mesh", "of_x", "of_w"),
    [
        ((4,), [Replicate()], [Shard(0)]),
        ((4,), [Shard(0)], [Shard(0)]),
        ((4,), [Shard(0)], [Replicate()]),
        ((2, 2), [Shard(0), Replicate()], [Replicate(), Shard(0)]),
        ((2, 2), [Shard(1), Shard(0)], [Replicate(), Shard(0)]),
    ],
)
def test_linear_losses_of_shards(ranks, mesh, of_x, of_w, reduction, way):
    x, w, bias = logits(3, 4, 6, seed=5).float() / 3, logits(5, 6, seed=6).float() / 3, torch.linspace(-1, 1, 5)
    target, weight = torch.arange(12).reshape(3, 4) % 5, torch.linspace(0.2, 2, 5)
    target[0, 1] = -100
    options = {"reduction": reduction, "chunk_size": 4, "label_smoothing": 0.1}
    inputs = [each.double().requires_grad_() for each in (x, w, bias)]
    y = linear_cross_entropy(*inputs[:2], target, linear_bias=inputs[2], weight=weight.double(), **options)
    of = ((torch.arange(y.numel()) + 1.0).view(y.shape) / y.numel()).double() if y.ndim else torch.ones_like(y)
    wanted = [y.detach(), *torch.autograd.grad(y, inputs, of)]
    for found, _, same in ranks.values(
        4, linear_of_dtensor, way, mesh, of_x, of_w, x, w, bias, target, weight, options
    ):
        assert same
        for ours, truth in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=2e-6)


def of_a_mesh_and_a_group(group, name):
    x = distribute_tensor(logits(6, 12), mesh_of((4,)), [Shard(1)])
    arguments = {"cross_entropy": (torch.arange(6),), "linear_cross_entropy": (logits(3, 12), torch.arange(6))}
    return getattr(fused_softmax, name)(x, *arguments.get(name, (1,)), group=group)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp", "cross_entropy", "linear_cross_entropy"])
def test_a_group_takes_no_dtensor(ranks, name):
    for each in ranks(4, of_a_mesh_and_a_group, name):
        assert each.args[0] == "TypeError"
        assert each.args[1].startswith(f"{name}: group= takes this rank's columns as a plain tensor, got a DTensor")


def lse_of_skipped(group, x, w, target):
    mesh = mesh_of((4,))
    w, x = distribute_tensor(w, mesh, [Shard(0)]), distribute_tensor(x, mesh, [Replicate()])
    return linear_cross_entropy(x, w, target, return_lse=True, skip_ignored=True).lse.full_tensor()


def test_the_lse_of_rows_that_are_skipped_is_0(ranks):
    x, w, target = logits(6, 4), logits(13, 4, seed=1), torch.tensor([0, -100, 3, -100, 5, 9])
    wanted = linear_cross_entropy(x, w, target, return_lse=True, skip_ignored=True).lse
    for lse in ranks.values(4, lse_of_skipped, x, w, target):
        torch.testing.assert_close(lse, wanted)
