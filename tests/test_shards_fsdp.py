"""Losses of heads that fully_shard has cut, and of heads whose classes lie in shards: right, or an error."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from products import pairwise
from test_shards_dtensor import mesh_of
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

from fused_softmax import cross_entropy, linear_cross_entropy
from fused_softmax.nn import LinearCrossEntropyLoss
from fused_softmax.ranks import groups as distributed

ROWS, IN, CLASSES = 7, 8, 12
MEAN_OVER = 4  # ranks, by which fully_shard divides gradients


class Head(torch.nn.Linear):
    def forward(self, x, target=None):
        return super().forward(x) if target is None else linear_cross_entropy(x, self.weight, target)


class Model(torch.nn.Module):
    """A body and a head; the loss is the head's, or made within the model's forward, where that is asked for."""

    def __init__(self, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = torch.nn.Linear(IN, IN), Head(IN, CLASSES, bias=False)
        self.embedding = torch.nn.Embedding(CLASSES, IN)
        if tied:
            self.embedding.weight = self.head.weight

    def forward(self, tokens, target=None, by="model"):
        hidden = self.body(self.embedding(tokens))
        if target is None:
            return hidden
        return self.head(hidden, target) if by == "head" else linear_cross_entropy(hidden, self.head.weight, target)


def own(rank):
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randint(CLASSES, (ROWS,), generator=generator) for _ in range(2)]


def of_all_ranks(tied):
    """(each rank's loss, the gradient of the head's weight by their mean)."""
    model = Model(tied)
    losses = [F.cross_entropy(model.head(model(own(r)[0])), own(r)[1]) for r in range(MEAN_OVER)]
    (sum(losses) / MEAN_OVER).backward()
    return [each.item() for each in losses], model.head.weight.grad


def trained(group, units, by, tied, hybrid):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if hybrid else mesh_of((4,))
    model, (tokens, target) = Model(tied), own(dist.get_rank(group))
    for unit in units:
        fully_shard(getattr(model, unit) if unit else model, mesh=mesh)
    if by == "outside":
        hidden = model(tokens)
        with pytest.raises(RuntimeError, match="got mixed"):
            F.linear(hidden, model.head.weight)
        return linear_cross_entropy(hidden, model.head.weight, target)
    loss = model(tokens, target, by)
    loss.backward()
    return loss.item(), model.head.weight.grad.full_tensor()


@pytest.mark.parametrize(
    ("units", "by", "tied", "hybrid"),
    [
        (("head",), "head", False, False), (("body", "head", ""), "head", False, False),
        (("",), "model", False, False), (("",), "model", True, False), (("body", ""), "model", True, True),
        (("head", ""), "head", False, True),
    ],
)  # fmt: skip
def test_a_loss_within_the_forward_of_the_unit_is_each_rank_s_own(ranks, units, by, tied, hybrid):
    losses, gradient = of_all_ranks(tied)
    for rank, (loss, found) in enumerate(ranks.values(4, trained, units, by, tied, hybrid)):
        assert loss == pytest.approx(losses[rank], rel=1e-5)
        torch.testing.assert_close(found, gradient if "" in units else found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("units", "tied", "hybrid"),
    [(("head",), False, False), (("head", ""), False, False), (("body", "head", ""), False, True)],
)
def test_the_weight_of_a_head_that_is_not_gathered_is_refused(ranks, units, tied, hybrid):
    for each in ranks(4, trained, units, "outside", tied, hybrid):
        assert each.args[0] == "RuntimeError"
        assert each.args[1].startswith("linear_cross_entropy: input must be a DTensor, as linear_weight is with [")
        assert "got a plain Tensor" in each.args[1]
        assert "DTensor.from_local(input, mesh, [Replicate()])" in each.args[1]


def x_and_w():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(n, IN, generator=generator, dtype=torch.float64) for n in (ROWS, CLASSES)]


def mixed(group, odd):
    mesh = mesh_of((4,))
    (x, w), (_, target) = x_and_w(), own(0)
    given = {"input": x, "linear_weight": w, "linear_bias": torch.zeros(CLASSES, dtype=torch.float64)}
    placements = {"input": [Replicate()], "linear_weight": [Shard(0)], "linear_bias": [Shard(0)]}
    lie = {
        name: each if name == odd else distribute_tensor(each, mesh, placements[name]) for name, each in given.items()
    }
    if odd == "mesh":
        other = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
        lie["linear_weight"] = distribute_tensor(w, other, [Shard(0)])
    if odd == "head alone":
        lie = {"input": x, "linear_weight": w}
        target = distribute_tensor(target, mesh, [Replicate()])
    return linear_cross_entropy(target=target, **lie)


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ("input", "input must be a DTensor, as linear_weight is with [Shard(dim=0)], got a plain Tensor"),
        ("linear_weight", "linear_weight must be a DTensor, as input is with [Replicate()], got a plain Tensor"),
        ("linear_bias", "linear_bias must be a DTensor, as input is with [Replicate()], got a plain Tensor"),
        ("mesh", "linear_weight must lie on the mesh of input, DeviceMesh((4,)"),
        ("head alone", "input must be a DTensor, as target is with [Replicate()], got a plain Tensor"),
    ],
)
def test_a_plain_tensor_beside_a_dtensor_is_refused_by_name(ranks, odd, said):
    for each in ranks(4, mixed, odd):
        assert each.args[0] == "RuntimeError"
        assert each.args[1].startswith(f"linear_cross_entropy: {said}")


def shared_by(group, how):
    """A head whose classes lie in shards, by every way in which the call says that ranks share the input."""
    from torch.distributed.tensor.experimental import implicit_replication

    mesh, (x, w), (_, target) = mesh_of((4,)), x_and_w(), own(0)
    x.requires_grad_()
    head = distribute_tensor(w, mesh, [Shard(0)]).requires_grad_()
    if how == "group":
        loss = linear_cross_entropy(x, head, target, group=mesh.get_group())
    elif how == "Replicate":
        given = DTensor.from_local(x, mesh, [Replicate()])
        loss = linear_cross_entropy(given, head, target).full_tensor()
    else:
        with implicit_replication() if how == "implicit" else contextlib.nullcontext():
            loss = linear_cross_entropy(x, head, target).full_tensor()
    dx, dw = torch.autograd.grad(loss, (x, head))
    assert list(dw.placements) == [Shard(0)]
    return loss.detach(), dx, dw.full_tensor()


@pytest.mark.parametrize("how", ["group", "Replicate", "implicit"])
def test_a_head_in_shards_takes_an_input_that_ranks_share(ranks, how):
    (x, w), (_, target) = [each.requires_grad_() for each in x_and_w()], own(0)
    y = F.cross_entropy(F.linear(x, w), target)
    wanted = y.detach(), *torch.autograd.grad(y, (x, w))
    for found in ranks.values(4, shared_by, how):
        for ours, truth in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, truth)


def of_a_group(group, odd):
    mesh, (x, w), (_, target) = mesh_of((4,)), x_and_w(), own(0)
    lie = {"placements": [Replicate()]}.get(odd, [Shard(0)])
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    over = pairs[dist.get_rank(group) // 2] if odd == "ranks" else group
    if odd == "mesh":
        mesh, lie = mesh_of((2, 2)), [Replicate(), Shard(0)]
    return linear_cross_entropy(x, distribute_tensor(w, mesh, lie), target, group=over)


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ("placements", "linear_weight must lie in [Shard(0)] over a mesh of one dim where group= is given, got [Repl"),
        (
            "mesh",
            "linear_weight must lie in [Shard(0)] over a mesh of one dim where group= is given, got [Replicate(), S",
        ),
        ("ranks", "group= must have the ranks of linear_weight's mesh, [0, 1, 2, 3], in their order, got ["),
    ],
)
def test_a_head_over_other_ranks_than_the_group_s_is_refused(ranks, odd, said):
    for each in ranks(4, of_a_group, odd):
        assert each.args[0] == "ValueError"
        assert each.args[1].startswith(f"linear_cross_entropy: {said}")


def with_other_targets(group, name, plain):
    mesh, (x, w) = mesh_of((2, 2)), x_and_w()
    target = own(dist.get_rank(group))[1]
    if not plain:  # each rank's own, said to be the same on all
        target = DTensor.from_local(target, mesh, [Replicate(), Replicate()], run_check=False)
    distributed.CHECK = True
    try:
        if name == "cross_entropy":
            return cross_entropy(distribute_tensor(x @ w.t(), mesh, [Replicate(), Shard(1)]), target)
        lie = [Replicate(), Replicate()]
        return linear_cross_entropy(
            distribute_tensor(x, mesh, lie), distribute_tensor(w, mesh, [lie[0], Shard(0)]), target
        )
    finally:
        distributed.CHECK = False


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy"])
def test_targets_are_compared_where_the_environment_asks_for_it(ranks, name, plain):
    for each in ranks(4, with_other_targets, name, plain):
        assert each.args[0] == "RuntimeError"
        assert each.args[1].startswith(f"{name}: the ranks of the group differ in target: ")


LOSSES = {
    "probabilities": {}, "smoothed": {"label_smoothing": 0.1, "lse_square_scale": 0.01}, "lse": {}, "scale of 0": {},
}  # fmt: skip


def loss_of(kind, linear, x, w, target, weight, lse, reduction):
    options = LOSSES[kind] | {"reduction": reduction}
    if kind == "lse":
        options["lse"] = lse
    if kind == "scale of 0":
        options["scale"] = 0.0
    if linear:
        return linear_cross_entropy(x, w, target, **options)
    return cross_entropy(x, target, weight, **options)


def whole_rows(kind, linear):
    x, target = 3 * torch.randn(5, 6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64), None
    w = torch.randn(4, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    target = torch.arange(15).view(5, 3) % 6
    if linear:
        target = torch.arange(30).view(5, 6) % 4
    if kind in ("probabilities", "smoothed"):
        target = (F.one_hot(target, 4) if linear else F.one_hot(target, 6).movedim(-1, 1)).double() * 0.75 + 0.05
    return x, w, target, torch.linspace(0.5, 1.5, 6, dtype=torch.float64), torch.logsumexp(x, 1) + 0.25


def of_whole_rows(group, kind, linear, reduction, shape, placements):
    mesh = mesh_of(shape)
    x, w, target, weight, lse = whole_rows(kind, linear)
    rows = [R if each == Shard(1) and not linear else each for each in placements]
    if not linear:
        rows = [Shard(1) if each == Shard(2) else each for each in rows]
    lies = placements if target.is_floating_point() else rows
    x, w = distribute_tensor(x, mesh, placements).requires_grad_(), distribute_tensor(w, mesh, [R] * mesh.ndim)
    target, lse = distribute_tensor(target, mesh, lies), distribute_tensor(lse, mesh, [R] * mesh.ndim)
    y = loss_of(kind, linear, x, w, target, distribute_tensor(weight, mesh, [R] * mesh.ndim), lse, reduction)
    (dx,) = torch.autograd.grad(y.sum(), x)
    return y.full_tensor().detach(), dx.full_tensor()


R = Replicate()


@pairwise()
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    ("linear", "shape", "placements"),
    [
        (False, (4,), [Shard(0)]), (False, (2, 2), [Shard(1), Shard(2)]), (False, (2, 2), [Shard(0), Shard(1)]),
        (False, (4,), [R]), (True, (2, 2), [Shard(0), Shard(1)]), (True, (4,), [R]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", list(LOSSES))
def test_losses_that_take_whole_rows(ranks, kind, linear, shape, placements, reduction):
    if linear and kind in ("lse", "scale of 0"):
        pytest.skip("linear_cross_entropy takes no lse")
    x, w, target, weight, lse = whole_rows(kind, linear)
    x.requires_grad_()
    y = loss_of(kind, linear, x, w, target, weight, lse, reduction)
    (dx,) = torch.autograd.grad(y.sum(), x)
    for ours, of_x in ranks.values(4, of_whole_rows, kind, linear, reduction, shape, placements):
        torch.testing.assert_close(ours, y.detach())
        torch.testing.assert_close(of_x, dx)


SCORES = {
    "mask": {"mask": torch.arange(18).view(3, 6) % 4 > 0},
    "bias": {"mask": torch.linspace(-1, 1, 30, dtype=torch.float64).view(5, 1, 6)},
    "scale": {"scale": torch.linspace(0.1, 1, 15, dtype=torch.float64).view(5, 3, 1)},
    "sink": {"sink": torch.linspace(-1, 1, 3, dtype=torch.float64).view(3, 1)},
    "causal": {"is_causal": True, "sink": torch.linspace(-1, 1, 3, dtype=torch.float64).view(3, 1), "scale": 0.5},
    "zero": {"mask": torch.arange(15).view(5, 3, 1) % 2 > 0, "masked_rows": "zero"},
    "scale of 0": {"scale": torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64).view(3, 1)},
}


def scored(function, x, given, of):
    from fused_softmax import logsumexp, softmax

    leaves = [x, *[each for each in given.values() if isinstance(each, torch.Tensor) and each.is_floating_point()]]
    y = {"softmax": softmax, "logsumexp": logsumexp}[function](x.requires_grad_(), -1, **given)
    return y, *torch.autograd.grad((y * of(y)).sum(), leaves)


def numbers(y):
    return torch.linspace(0.5, 1.5, y.numel(), dtype=torch.float64).view(y.shape)


def scored_on_shards(group, function, kind, shape, placements):
    mesh = mesh_of(shape)

    def place(each):
        if not isinstance(each, torch.Tensor):
            return each
        found = distribute_tensor(each, mesh, [R] * mesh.ndim)
        return found.requires_grad_() if each.is_floating_point() else found

    x = distribute_tensor(3 * whole_rows("lse", False)[0].view(5, 3, 6), mesh, placements)
    given = {name: place(each) for name, each in SCORES[kind].items()}
    found = scored(function, x, given, lambda y: distribute_tensor(numbers(y), mesh, [R] * mesh.ndim))
    assert found[1].placements == x.placements
    return [each.full_tensor().detach() for each in found]


@pairwise()
@pytest.mark.parametrize("kind", list(SCORES))
@pytest.mark.parametrize(
    ("shape", "placements"),
    [((4,), [Shard(2)]), ((4,), [Shard(1)]), ((2, 2), [Shard(0), Shard(2)]), ((2, 2), [Shard(2), Shard(2)])],
)
@pytest.mark.parametrize("function", ["softmax", "logsumexp"])
def test_scales_masks_and_sinks_go_where_the_input_lies(ranks, function, shape, placements, kind):
    given = {
        name: each.clone().requires_grad_() if isinstance(each, torch.Tensor) and each.is_floating_point() else each
        for name, each in SCORES[kind].items()
    }
    wanted = scored(function, 3 * whole_rows("lse", False)[0].view(5, 3, 6), given, numbers)
    for found in ranks.values(4, scored_on_shards, function, kind, shape, placements):
        for ours, truth in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, truth.detach())


def plain_beside(group, function):
    import fused_softmax

    x = distribute_tensor(torch.zeros(4, 6), mesh_of((4,)), [Shard(0)])
    if function == "cross_entropy":
        return cross_entropy(x, torch.zeros(4, 6).softmax(1))
    return getattr(fused_softmax, function)(x, 1, mask=torch.ones(4, 6, dtype=torch.bool))


@pytest.mark.parametrize("function", ["softmax", "log_softmax", "logsumexp", "cross_entropy"])
def test_a_plain_mask_or_plain_probabilities_are_refused(ranks, function):
    argument = "target" if function == "cross_entropy" else "mask"
    for each in ranks(4, plain_beside, function):
        assert each.args[0] == "RuntimeError"
        assert each.args[1].startswith(
            f"{function}: {argument} must be a DTensor, as input is with [Shard(dim=0)], got a"
        )


def partial_logits(group):
    mesh, (x, w), (_, target) = mesh_of((4,)), x_and_w(), own(0)
    logits = DTensor.from_local((x @ w.t()) / 4, mesh, [Partial()], run_check=False)
    return cross_entropy(logits, target).full_tensor()


def test_partial_logits_are_summed_first(ranks):
    (x, w), (_, target) = x_and_w(), own(0)
    for found in ranks.values(4, partial_logits):
        torch.testing.assert_close(found, F.cross_entropy(x @ w.t(), target))


def plain_target_under_enable(group, parallel):
    from torch.distributed.tensor.parallel import loss_parallel

    import fused_softmax

    mesh, (x, w) = mesh_of((4,)), x_and_w()
    logits = distribute_tensor(x @ w.t(), mesh, [Shard(1)])
    with fused_softmax.enabled(), loss_parallel() if parallel else contextlib.nullcontext():
        return F.cross_entropy(logits, own(0)[1]).full_tensor()


@pytest.mark.parametrize("parallel", [False, True])
def test_under_enable_a_plain_target_is_torch_s_to_take_or_to_refuse(ranks, parallel):
    (x, w), (_, target) = x_and_w(), own(0)
    for found in ranks(4, plain_target_under_enable, parallel):
        if parallel:
            torch.testing.assert_close(found, F.cross_entropy(x @ w.t(), target))
        else:
            assert found.args[0] == "RuntimeError"
            assert "got mixed torch.Tensor and DTensor" in found.args[1]


def module_within_fsdp(group):
    loss = LinearCrossEntropyLoss(IN, CLASSES)
    fully_shard(loss, mesh=mesh_of((4,)))
    x, _ = x_and_w()
    return loss(x.float() + dist.get_rank(group), own(dist.get_rank(group))[1]).item()


def test_the_module_of_a_linear_loss_is_a_unit_of_its_own(ranks):
    assert len(set(ranks.values(4, module_within_fsdp))) == 4
