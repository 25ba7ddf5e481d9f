"""Divergences of rows in shards over ranks, and the cross-entropy of probabilities, against one process in float64."""

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peered import PART_COLS, WIDE, in_parts
from products import pairwise
from sharded import INF, N_CLASSES, N_ROWS, SIZES, WAYS, by, close, logits, over, same_on_all, shard
from test_divergence import GIVEN, KINDS, formula, given_as
from test_shards_dtensor import mesh_of
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from fused_softmax import cross_entropy, divergence
from fused_softmax.ops.losses.options import Divergence
from fused_softmax.ops.losses.over_ranks import dtensor as on_shards
from fused_softmax.ranks import gather
from fused_softmax.ranks import groups as distributed
from fused_softmax.ranks.peers import UNEVEN

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ROWS = "of rows"
every_kind = pytest.mark.parametrize("kind", KINDS)
every_way = pytest.mark.parametrize("way", WAYS)


def pair(rows=N_ROWS, columns=N_CLASSES, target_is="logits"):
    """A student's logits, and a teacher's that are like them."""
    x = logits(rows, columns)
    return x, given_as(x + logits(rows, columns, 1) / 2, target_is)


def numbers(n):
    return torch.linspace(-1, 2, n, dtype=FP64)


def of_shards(group, way, x, y, options):
    by(way)
    leaf = shard(x, group, -1).requires_grad_()
    whole = "columns" in options
    found = divergence(leaf, y if whole else shard(y, group, -1), **over(group), **options)
    (dx,) = torch.autograd.grad(found, leaf, numbers(found.numel()).view(found.shape).to(found.dtype))
    return found.detach(), dx


def of_whole(x, y, options):
    """The same by the formula, of float64, or by one process of float64 where there are columns."""
    leaf, options = x.double().requires_grad_(), dict(options)
    if "columns" in options:
        found = divergence(leaf, y.double(), **options)
    else:
        weight, reduction = options.pop("weight", None), options.pop("reduction", "mean")
        found = formula(leaf, y, **options)
        w = torch.ones_like(found) if weight is None else weight.double()
        found = torch.where(w == 0, 0.0, found) * w
        if reduction != "none":
            found = found.sum() / (w.sum() if reduction == "mean" else 1.0)
    (dx,) = torch.autograd.grad(found, leaf, numbers(found.numel()).view(found.shape))
    return found.detach(), dx


def are_right(found, wanted, dtype=FP32, near=2e-5):
    near = 1e-11 if dtype == FP64 else near
    (value,), (truth, of_x) = same_on_all([each[:1] for each in found]), wanted
    assert value.shape == truth.shape
    close(value, truth, near)
    dx = torch.cat([each[1] for each in found], -1)
    assert dx.dtype == dtype
    most = of_x.nan_to_num(0).abs().amax(-1, keepdim=True).clamp(min=1e-3)  # of terms that cancel
    close(dx.double() / most, of_x / most, max(near if dtype == FP64 else 2e-4, 4 * torch.finfo(dtype).eps))


@pairwise(("kind", "target_is", "way"), ("kind", "target_is", "n"))
@pytest.mark.parametrize("n", SIZES)
@every_way
@every_kind
@pytest.mark.parametrize("target_is", GIVEN)
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, FP32), (FP16, FP16), (FP32, FP64), (FP64, FP64)], ids=str)
@pytest.mark.parametrize("scale", [None, -0.5])
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("temperature", [None, 0.7, ROWS])
@pytest.mark.parametrize("of_target", [None, "numbers", ROWS])
@pytest.mark.parametrize("weight", [None, ROWS])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_results_are_those_of_whole_rows(
    ranks, n, way, kind, target_is, dtypes, scale, softcap, temperature, of_target, weight, reduction
):
    x, y = pair(target_is=target_is)
    x, y = x.to(dtypes[0]), y.to(dtypes[1])
    of_rows = torch.linspace(0.4, 2, N_ROWS)
    options = {"kind": kind, "beta": 0.3, "target_is": target_is, "scale": scale, "softcap": softcap}
    options |= {"temperature": of_rows if temperature == ROWS else temperature, "reduction": reduction}
    if target_is == "logits" and of_target is not None:
        options |= {"target_scale": 0.7, "target_softcap": 5.0}
        options["target_temperature"] = 1.3 if of_target == "numbers" else of_rows.flip(0)
    if weight is not None:
        options["weight"] = torch.linspace(0, 2, N_ROWS)
    found = ranks.values(n, of_shards, way, x, y, options)
    are_right(found, of_whole(x, y, options), dtypes[0])


def test_every_option_is_tried():
    """One that a part of the way over ranks forgets would be left out of the results without a word."""
    assert set(Divergence.OPTIONS) == {
        "kind", "beta", "scale", "softcap", "temperature", "target_scale", "target_softcap", "target_temperature",
        "target_is",
    }  # fmt: skip


@every_way
@pytest.mark.parametrize("beta", [0, 1.0, 0.999])
def test_betas(ranks, way, beta):
    x, y = (each.float() for each in pair())
    options = {"kind": "jsd", "beta": beta, "reduction": "none"}
    are_right(ranks.values(3, of_shards, way, x, y, options), of_whole(x, y, options))


@pairwise()
@every_way
@every_kind
@pytest.mark.parametrize("shape", [(N_CLASSES,), (2, 3, N_CLASSES), (0, N_CLASSES)], ids=str)
def test_logits_of_any_shape(ranks, shape, kind, way):
    x, y = (each.reshape(shape).float() for each in pair(math.prod(shape[:-1])))
    options = {"kind": kind, "reduction": "none"}
    are_right(ranks.values(4, of_shards, way, x, y, options), of_whole(x, y, options))


HARD = {
    "student": lambda x, y: x[0, :12].fill_(-INF), "teacher": lambda x, y: y[0, :12].fill_(-INF),
    "both": lambda x, y: (x[0, :12].fill_(-INF), y[0, :12].fill_(-INF)),
    "the student's last": lambda x, y: x[0, 13:].fill_(-INF), "the teacher's last": lambda x, y: y[0, 13:].fill_(-INF),
    "the student's all": lambda x, y: x[0].fill_(-INF), "the teacher's all": lambda x, y: y[0].fill_(-INF),
    "a NaN": lambda x, y: x[0, 3].fill_(math.nan), "the teacher's NaN": lambda x, y: y[0, 3].fill_(math.nan),
    "an infinity": lambda x, y: x[0, 12].fill_(INF),
    "disjoint": lambda x, y: (x[0, :13].fill_(-INF), y[0, 13:].fill_(-INF)),
    "the lowest": lambda x, y: (x[0, :12].fill_(-3e38), y[0, :12].fill_(-3e38)),
    "one class": lambda x, y: (x[0, 1:].fill_(-INF), y[0, 1:].fill_(-INF)),
}  # fmt: skip


@pairwise(("kind", "hard", "way"))
@every_way
@every_kind
@pytest.mark.parametrize("target_is", GIVEN)
@pytest.mark.parametrize("hard", HARD)
def test_hard_rows(ranks, hard, kind, target_is, way):
    """Row 0 is masked, wholly or where one shard has it, or holds what is no number: as by one process's kernels."""
    x, y = (each.float() for each in pair(4))
    HARD[hard](x, y)
    y = given_as(y, target_is)
    options = {"kind": kind, "beta": 0.3, "target_is": target_is, "reduction": "none"}
    leaf = x.clone().requires_grad_()
    wanted = divergence(leaf, y, **options)
    (dx,) = torch.autograd.grad(wanted, leaf, numbers(4).float())
    are_right(ranks.values(3, of_shards, way, x, y, options), (wanted.detach(), dx))


@every_way
@every_kind
def test_a_row_of_weight_0_is_left_out_whatever_it_holds(ranks, kind, way):
    x, y = (each.float() for each in pair(4))
    options = {"kind": kind, "weight": torch.tensor([1.0, 0.0, 0.0, 2.0])}
    wanted = of_whole(x, y, options)
    x[1], x[2, 3], y[2] = math.nan, INF, -INF
    are_right(ranks.values(3, of_shards, way, x, y, options), wanted)


@every_way
@every_kind
@pytest.mark.parametrize("far", [1e4, -3e4])
def test_great_logits_keep_the_digits_of_small_results(ranks, kind, far, way):
    """lse alone would have rounded them away: at 10000 it is a multiple of 0.001."""
    x = logits().float() / 3 + far
    y = x + logits(seed=1).float() / 50
    options = {"kind": kind, "reduction": "none"}
    found, wanted = ranks.values(3, of_shards, way, x, y, options), of_whole(x, y, options)
    torch.testing.assert_close(found[0][0].double(), wanted[0], rtol=0, atol=2e-6)
    close(torch.cat([each[1] for each in found], 1), wanted[1], 2e-6)


def padded(group, way, x, y, n_classes, options):
    by(way)
    leaf = shard(x, group, 1).requires_grad_()
    found = divergence(leaf, shard(y, group, 1), **over(group), n_classes=n_classes, **options)
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    try:
        (dx,) = torch.autograd.grad(found, leaf, numbers(len(x)).to(found.dtype))
    finally:
        torch.use_deterministic_algorithms(False)
    return found.detach(), dx


@pairwise()
@every_way
@every_kind
@pytest.mark.parametrize("target_is", GIVEN)
@pytest.mark.parametrize("n_classes", [36, 13, 12, 5])
def test_columns_past_n_classes_are_padding(ranks, n_classes, target_is, kind, way):
    x, y = pair()
    y = given_as(y[:, :n_classes], target_is)
    x, y = x.float(), F.pad(y, (0, N_CLASSES - n_classes), value=math.nan).float()
    x[:, n_classes:] = math.nan
    options = {"kind": kind, "target_is": target_is, "reduction": "none"}
    found = ranks.values(3, padded, way, x, y, n_classes, options)
    value, dx = of_whole(x[:, :n_classes], y[:, :n_classes], options)
    are_right(found, (value, F.pad(dx, (0, N_CLASSES - n_classes))))


TOLD = torch.tensor([[0, 36, 12], [1, 2, 3], [13, 12, 11], [30, 5, 20]])


@pairwise(("kind", "rest", "target_is"), ("way", "rest"))
@every_way
@every_kind
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize(
    ("target_is", "rest"), [*[(each, "renormalize") for each in GIVEN], *[(each, "lump") for each in GIVEN[1:]]]
)
@pytest.mark.parametrize("temperature", [None, ROWS])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_columns_that_the_teacher_has_told_of(ranks, dtype, temperature, target_is, rest, n, kind, way):
    x, y = pair(4)
    y = (y if target_is == "logits" else given_as(y, "log_probs")).gather(1, TOLD)
    y = (y.exp() if target_is == "probs" else y).float()
    options = {"kind": kind, "target_is": target_is, "rest": rest, "columns": TOLD, "reduction": "none", "scale": 0.7}
    options["temperature"] = None if temperature is None else torch.linspace(0.5, 2, 4)
    x = x.to(dtype)
    are_right(ranks.values(n, of_shards, way, x, y, options), of_whole(x, y, options), dtype, 5e-5)


@every_way
@pytest.mark.parametrize("rest", ["renormalize", "lump"])
def test_a_column_that_is_no_class(ranks, rest, way):
    x, y = (each.float() for each in pair(4))
    columns = TOLD.clone()
    columns[2, 1] = 37
    options = {"columns": columns, "rest": rest, "target_is": "log_probs", "reduction": "none"}
    found = ranks(3, of_shards, way, x, y.log_softmax(1).gather(1, TOLD), options)
    if way == "torch":
        said = "divergence: columns has 37, which is out of range [0, 36]"
        assert {each.args[:2] for each in found} == {("IndexError", said)}
        return
    for value, _ in found:
        assert value.isnan().tolist() == [False, False, True, False]
    whole = torch.cat([each[1] for each in found], 1)
    assert whole.isnan().any(1).tolist() == [False, False, True, False]


def without_a_second_derivative(group, way, x, y, options):
    by(way)
    leaf = shard(x, group, 1).requires_grad_()
    found = divergence(leaf, y if "columns" in options else shard(y, group, 1), **options, **over(group))
    (dx,) = torch.autograd.grad(found, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="divergence: there is no second derivative over the ranks of a group"):
        dx.sum().backward()
    return found.detach(), dx.detach()


@every_way
def test_gradients_have_no_gradient(ranks, way):
    x, y = (each.float() for each in pair())
    are_right(ranks.values(2, without_a_second_derivative, way, x, y, {}), _mean(x, y, {}))
    told = {"columns": TOLD.repeat(3, 1)[:N_ROWS]}
    y = y.gather(1, told["columns"])
    are_right(ranks.values(2, without_a_second_derivative, way, x, y, told), _mean(x, y, told))


def _mean(x, y, options):
    leaf = x.double().requires_grad_()
    found = divergence(leaf, y.double(), **options)
    return found.detach(), *torch.autograd.grad(found, leaf)


def transformed(group, x, y):
    return torch.func.vmap(lambda x, y: divergence(x, y, group=group))(x, y)


def test_a_transform_is_refused(ranks):
    for each in ranks(2, transformed, *(each.float() for each in pair(2, 6))):
        assert each.args[0] == "RuntimeError"


def compiled(group, x, y):
    by("kernels")
    leaf, own = shard(x, group, 1).requires_grad_(), shard(y, group, 1)
    of_group = over(group)
    call = torch.compile(lambda x: divergence(x * 2, own, kind="jsd", **of_group), backend="eager")
    found = call(leaf)
    return found.detach(), *torch.autograd.grad(found, leaf)


def test_a_compiler_leaves_the_call_out_of_its_graphs(ranks):
    x, y = (each.float() for each in pair())
    leaf = x.double().requires_grad_()
    wanted = formula(leaf * 2, y, kind="jsd").mean()
    are_right(ranks.values(2, compiled, x, y), (wanted.detach(), *torch.autograd.grad(wanted, leaf)))


ASKED = [
    {}, {"kind": "reverse_kl"}, {"kind": "jsd"}, {"kind": "jsd", "beta": 0.2}, {"kind": "tvd"}, {"scale": 0.5},
    {"scale": 1.5}, {"softcap": 4.0}, {"temperature": 0.5}, {"temperature": torch.linspace(0.3, 2, 4)},
    {"target_temperature": torch.linspace(0.3, 2, 4)}, {"target_scale": 2.0}, {"scale": 0.0}, {"target_is": "probs"},
    {"target_is": "log_probs", "kind": "tvd"}, {"reduction": "sum"}, {"reduction": "none"},
]  # fmt: skip


def in_turn(group, as_on_gpu, cases):
    """Every case twice over shards, between calls of this rank's columns alone."""
    by("kernels")
    over_ranks, alone = [], []
    waits = mock.patch.object(distributed, "_waits_for_nobody", return_value=not as_on_gpu)
    with waits:
        for x, y, options in cases * 2:
            for of_group in (over(group), None):
                leaf, own = shard(x, group, 1).requires_grad_(), shard(y, group, 1)
                found = divergence(leaf, own, **options, **(of_group or {}))
                (dx,) = torch.autograd.grad(found, leaf, numbers(found.numel()).view(found.shape).to(found.dtype))
                (over_ranks if of_group else alone).append((found.detach(), dx, leaf.detach(), own))
    return over_ranks, alone


@pytest.mark.parametrize("as_on_gpu", [False, True])
def test_calls_that_differ_in_one_thing_take_turns(ranks, as_on_gpu):
    cases = []
    for options in ASKED:
        x, y = pair(4, target_is=options.get("target_is", "logits"))
        cases.append((x.float(), y.float(), options))
    x, y = pair(4)
    cases += [(x[:3].float(), y[:3].float(), {}), (x.bfloat16(), y.float(), {}), (x.float(), y.bfloat16(), {})]
    of_ranks = ranks.values(2, in_turn, as_on_gpu, cases)
    for i, (x, y, options) in enumerate(cases * 2):
        are_right([over_ranks[i][:2] for over_ranks, _ in of_ranks], of_whole(x, y, options), x.dtype)
        for _, alone in of_ranks:
            value, dx, own, target = alone[i]
            are_right([(value, dx)], of_whole(own, target, options), x.dtype)


def by_peers(group, x, y, options):
    in_parts(PART_COLS)
    rank, sizes = dist.get_rank(group), WIDE[dist.get_world_size(group)]
    leaf, own = (each.split(sizes, 1)[rank].clone() for each in (x, y if "columns" not in options else x))
    leaf, found = leaf.requires_grad_(), []
    for _ in range(2):  # the second is found
        value = divergence(
            leaf, y if "columns" in options else own, **options, group=group, shard_sizes=sizes, transport="peer"
        )  # fmt: skip
        found.append((value.detach(), *torch.autograd.grad(value, leaf)))
    assert all(a.equal(b) for a, b in zip(*found, strict=True))
    return found[0]


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("dtype", [FP32, FP64])
@pytest.mark.parametrize(
    "options",
    [{}, {"kind": "jsd"}, {"columns": TOLD}, {"columns": TOLD, "rest": "lump", "target_is": "probs"}],
    ids=["kl", "jsd", "columns", "lump"],
)
def test_ranks_exchange_by_peers_too(ranks, options, dtype, n):
    x, y = (each.to(dtype) for each in pair(4, 331))
    if "columns" in options:
        y = y.softmax(1).gather(1, TOLD)
    are_right(ranks.values(n, by_peers, x, y, options), _mean(x, y, options), dtype)


AT_ONCE = {1: (336,), 2: (192, 144), 3: (136, 8, 192), 4: (136, 8, 16, 176)}  # whole vectors; parts of 128


def at_once(group, x, y, options, n_classes=None):
    """A sum or mean by peers, its gradient twice, and how many gathers it took."""
    in_parts(PART_COLS)
    rank, sizes = dist.get_rank(group), AT_ONCE[dist.get_world_size(group)]
    x, y = (each.split(sizes, 1)[rank].clone() for each in (x, y))
    of = {"group": group, "shard_sizes": sizes, "n_classes": n_classes, "transport": "peer"}
    leaf, gathers = x.requires_grad_(), mock.patch.object(gather, "_gathered", wraps=gather._gathered)
    with gathers as gathered:
        for _ in range(2):  # the second is found
            found = divergence(leaf, y, **options, **of)
    (dx,) = torch.autograd.grad(found, leaf, torch.tensor(0.75), retain_graph=True)
    (again,) = torch.autograd.grad(found, leaf, torch.tensor(0.75))
    return found.detach(), dx, again, divergence(x.detach(), y, **options, **of), gathered.call_count


def are_at_once(found, x, y, options, dtype, near=2e-5):
    leaf = x.double().requires_grad_()
    weight, of_rows = options.get("weight"), {k: v for k, v in options.items() if k not in ("weight", "reduction")}
    wanted = formula(leaf, y, **of_rows)
    w = torch.ones_like(wanted) if weight is None else weight.double()
    wanted = (torch.where(w == 0, 0.0, wanted) * w).sum() / (1.0 if options.get("reduction") == "sum" else w.sum())
    truth = 0.75 * torch.autograd.grad(wanted, leaf)[0]
    same_on_all([[each[0], each[3]] for each in found])
    for value, dx, again, alone, gathers in found:
        assert gathers == 0
        close(value, wanted.detach(), near)
        assert torch.equal(alone, value)  # without a gradient
        assert dx.dtype == again.dtype == dtype
    most = truth.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    for each in (1, 2):
        dx = torch.cat([of_rank[each] for of_rank in found], 1).double()
        close(dx / most, truth / most, max(2e-4, 4 * torch.finfo(dtype).eps))


@pairwise(("kind", "target_is"), ("kind", "n"), ("kind", "dtypes"))
@pytest.mark.parametrize("n", [3, 2, 4, 1])
@pytest.mark.parametrize("kind", ["jsd", "kl", "reverse_kl", "tvd"])
@pytest.mark.parametrize("target_is", GIVEN)
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, BF16), (BF16, FP32), (FP32, BF16)], ids=str)
@pytest.mark.parametrize("finish", [{}, {"softcap": 4.0, "scale": -0.5}, {"temperature": ROWS}], ids=str)
@pytest.mark.parametrize("weight", [None, ROWS])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_by_peers_a_sum_takes_one_launch(ranks, n, kind, target_is, dtypes, finish, weight, reduction):
    x, y = pair(5, 336, target_is)
    x, y = x.to(dtypes[0]), y.to(dtypes[1])
    of_rows = torch.linspace(0.4, 2, 5)
    options = {"kind": kind, "beta": 0.3, "target_is": target_is, "reduction": reduction, **finish}
    if finish.get("temperature") == ROWS:
        options["temperature"] = of_rows
    if weight is not None:
        options["weight"] = torch.linspace(0, 2, 5)
    are_at_once(ranks.values(n, at_once, x, y, options), x, y, options, dtypes[0])


@every_kind
def test_by_peers_hard_rows_take_one_launch(ranks, kind):
    """Rows of weight 0 hold anything, and a shard has logits of -inf alone."""
    x, y = (each.float() for each in pair(5, 336))
    x[1, :136], y[2, 136:144] = -INF if kind != "kl" else -30.0, -INF if kind != "reverse_kl" else -30.0
    options = {"kind": kind, "weight": torch.tensor([1.0, 1.0, 1.0, 0.0, 2.0])}
    x[3, 7], y[3] = math.nan, -INF
    clean = [each.clone() for each in (x, y)]
    for each in clean:
        each[3] = 0.0
    found = ranks.values(3, at_once, x, y, options)
    are_at_once(found, *clean, options, FP32)


@every_kind
def test_by_peers_columns_past_n_classes_take_one_launch(ranks, kind):
    """The last shard has padding, and so has another."""
    x, y = (each.float() for each in pair(5, 336))
    x[:, 304:] = y[:, 304:] = math.nan
    found = ranks.values(2, at_once, x, y, {"kind": kind}, 304)
    assert (found[1][1][:, 112:] == 0).all()
    assert (found[1][2][:, 112:] == 0).all()
    found = [(each[0], each[1][:, :n], each[2][:, :n], *each[3:]) for each, n in zip(found, (192, 112), strict=True)]
    are_at_once(found, x[:, :304], y[:, :304], {"kind": kind}, FP32)


WEIGHT = torch.tensor([1.0, 0.5, 2.0])
ODD_SUMS = {
    "temperature": ({"temperature": 2.0}, {"temperature": 3.0}),
    "scale": ({"scale": -1.0}, {"scale": -2.0}),  # numbers that Python hashes alike
    "kinds": ({"kind": "kl"}, {"kind": "tvd"}), "exchanges": ({"kind": "jsd"}, {"kind": "kl"}),
    "reduction": ({"weight": WEIGHT, "reduction": "sum"}, {"weight": WEIGHT}), "result": ({"dtype": BF16}, {}),
}  # fmt: skip


def odd_sum(group, x, y, odd):
    """By peers, each rank asks for something else, and then for the same."""
    in_parts(PART_COLS)
    rank, sizes = dist.get_rank(group), AT_ONCE[2]
    x, y = (each.split(sizes, 1)[rank].clone() for each in (x, y))
    leaf, of, found = x.requires_grad_(), {"group": group, "shard_sizes": sizes, "transport": "peer"}, []
    for options in ({}, ODD_SUMS[odd][rank], {}, {"kind": "jsd"}, {"kind": "tvd"}):
        try:
            found.append(divergence(leaf, y, **options, **of).detach())
        except RuntimeError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("odd", ODD_SUMS)
def test_by_peers_ranks_that_differ_in_a_sum_recover(ranks, odd):
    x, y = (each.float() for each in pair(3, 336))
    for first, differed, told, *right in ranks.values(2, odd_sum, x, y, odd):
        close(first, formula(x, y).mean())
        assert differed.isnan()
        assert told.startswith("divergence: an earlier call gave NaN, because ")
        for found, kind in zip(right, ("jsd", "tvd"), strict=True):
            close(found, formula(x, y, kind=kind).mean())


NEEDS_GROUP = "divergence: {} needs group, got group=None"


@pytest.mark.parametrize("arguments", [{"n_classes": 3}, {"transport": "peer"}, {"shard_sizes": [3]}], ids=str)
def test_arguments_of_shards_need_a_group(arguments):
    with pytest.raises(ValueError, match=f"^{NEEDS_GROUP.format(*arguments)}$"):
        divergence(torch.zeros(2, 3), torch.zeros(2, 3), **arguments)


def called(group, arguments, on):
    """A call, with other arguments on the last rank, or on all; then a right one."""
    by("torch")
    last = dist.get_rank(group) == dist.get_world_size(group) - 1
    given = {"input": torch.zeros(2, 4), "target": torch.zeros(2, 4)}
    given |= arguments if last or on == "all" else {}
    try:
        divergence(given.pop("input"), given.pop("target"), **given, group=group)
    except Exception as error:
        right = divergence(torch.zeros(2, 4), torch.zeros(2, 4), group=group)
        return type(error).__name__, str(error), float(right)
    return None


WRONG = [
    ({"n_classes": 0}, "ValueError", "n_classes must be at least 1, got 0"),
    ({"n_classes": 13}, "ValueError", "the shards hold (4, 4, 4) columns, together fewer than n_classes=13. " + UNEVEN),
    ({"shard_sizes": [3, 3, 3]}, "ValueError", "shard_sizes=(3, 3, 3) gives rank"),
    ({"shard_sizes": "444"}, "TypeError", "shard_sizes must be a sequence of ints, one for each rank, got str"),
    ({"transport": "pigeon"}, "ValueError", "transport must be None or one of ('peer', 'collective'), got 'pigeon'"),
    ({"transport": "peer"}, "ValueError", "transport='peer' cannot take this call: there are no kernels for"),
    ({"target": torch.zeros(2, 3)}, "ValueError", "target must have the input's shape (2, 4), got (2, 3)"),
    ({"target": torch.zeros(2, 12)}, "ValueError", "target must have the input's shape (2, 4), got (2, 12)"),
    ({"target": torch.zeros(2, 4).long()}, "RuntimeError", "target must be of a float dtype, got torch.int64"),
    ({"target": torch.zeros(2, 4, requires_grad=True)}, "RuntimeError", "target requires grad, and a teacher gets"),
    ({"input": torch.zeros(2, 4, dtype=torch.long)}, "NotImplementedError", "input must be of a float dtype, got"),
    ({"kind": "cross"}, "ValueError", 'kind is one of "kl", "reverse_kl", "jsd", "tvd"; got \'cross\''),
    ({"temperature": 0.0}, "ValueError", "temperature must be more than 0, got 0.0"),
    ({"target_temperature": torch.ones(3)}, "ValueError", "target_temperature must have shape (2,), got (3,)"),
    ({"weight": torch.ones(4)}, "ValueError", "weight must have shape (2,), got (4,)"),
    ({"reduction": "all"}, "ValueError", 'reduction must be "mean", "sum" or "none", got \'all\''),
    ({"columns": torch.zeros(2, 3)}, "RuntimeError", "columns must be of int64 or int32, got torch.float32"),
    (
        {"columns": torch.tensor([[0, 1], [3, 12]]), "target": torch.zeros(2, 2)}, "IndexError",
        "columns has 12, which is out of range [0, 11]",
    ),
]  # fmt: skip


@pytest.mark.parametrize("on", ["last", "all"])
@pytest.mark.parametrize(("arguments", "error", "said"), WRONG, ids=[str(each[0]) for each in WRONG])
def test_a_wrong_argument_is_an_error_on_every_rank_and_the_next_call_works(ranks, arguments, error, said, on):
    if arguments.get("transport") == "peer" and on == "last":
        pytest.skip("ranks differ in transport, and are told that")
    *others, last = ranks.values(3, called, arguments, on)
    assert last[0] == error
    assert last[1].startswith(f"divergence: {said}")
    for each in others:
        if on == "all":
            assert each[0] == error
        else:
            assert each[:2] == ("RuntimeError", f"divergence: rank 2 refused its call: {error}: {last[1]}")
    assert {each[2] for each in (*others, last)} == {0.0}


ODD = {
    "dtype": {"input": torch.zeros(2, 4, dtype=FP64)}, "target_dtype": {"target": torch.zeros(2, 4, dtype=FP64)},
    "kind": {"kind": "tvd"}, "beta": {"beta": 0.25}, "scale": {"scale": 2.0}, "softcap": {"softcap": 2.0},
    "temperature": {"temperature": torch.ones(2)}, "target_scale": {"target_scale": 2.0},
    "target_softcap": {"target_softcap": 2.0}, "target_temperature": {"target_temperature": 2.0},
    "target_is": {"target_is": "probs"}, "result": {"dtype": BF16},
    "columns_of_rows": {"columns": torch.zeros(2, 4, dtype=torch.long)},
    "rows": {"input": torch.zeros(3, 4), "target": torch.zeros(3, 4)},
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_ranks_that_differ_are_told_in_what(ranks, odd):
    for name, said, right in ranks.values(2, called, ODD[odd], "last"):
        assert (name, right) == ("RuntimeError", 0.0)
        assert said.startswith("divergence: the ranks of the group differ in ")
        assert f" {odd}: " in said


def nan_and_then_an_error(group, way, transport, kind):
    """As on a GPU, where nothing is compared beforehand; the second of four calls differs."""
    by(way)
    rank, found = dist.get_rank(group), []
    x, y = (each.float().chunk(2, 1)[rank] for each in pair(3, 8))
    with mock.patch.object(distributed, "_waits_for_nobody", return_value=False):
        for i in range(4):
            odd = {"scale": 2.0} if i == 1 and rank else {}
            try:
                value = divergence(x, y, kind=kind, reduction="none", group=group, transport=transport, **odd)
                found.append(value.isnan().tolist())
            except RuntimeError as error:
                found.append(str(error))
    return found


@every_kind
@pytest.mark.parametrize(
    ("way", "transport"), [("kernels", "collective"), ("torch", "collective"), ("kernels", "peer")]
)
def test_what_is_not_compared_beforehand_gives_nan_and_then_an_error(ranks, kind, way, transport):
    compares = mock.patch.object(distributed, "_compares", return_value=False)
    with compares:
        found = ranks.values(2, nan_and_then_an_error, way, transport, kind)
    for first, second, said, last in found:
        assert (first, second, last) == ([False] * 3, [True] * 3, [False] * 3)
        assert said.startswith("divergence: an earlier call gave NaN, because ")


def kinds_at_odds(group):
    """By peers, one rank exchanges once and the other twice; then calls of both that are right."""
    in_parts()
    rank = dist.get_rank(group)
    x, y = (each.float().chunk(2, 1)[rank] for each in pair(3, 8))
    of, found = {"group": group, "transport": "peer", "reduction": "none"}, []
    for kind in ("kl", "jsd" if rank else "kl", "jsd", "jsd", "kl"):
        try:
            found.append(divergence(x, y, kind=kind, **of))
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_by_peers_ranks_that_exchange_once_and_twice_recover(ranks):
    x, y = (each.float() for each in pair(3, 8))
    for first, odd, told, *right in ranks.values(2, kinds_at_odds):
        close(first, formula(x, y))
        assert odd.isnan().all()
        assert told.startswith("divergence: an earlier call gave NaN, because ")
        for found, kind in zip(right, ("jsd", "kl"), strict=True):
            close(found, formula(x, y, kind=kind))


def of_dtensor(group, way, mesh, placements, x, y, columns, of_rows, options):
    by(way)
    mesh = mesh_of(mesh)
    rows = [each if isinstance(each, Shard) and each.dim < x.ndim - 1 else Replicate() for each in placements]
    leaf = distribute_tensor(x, mesh, placements).requires_grad_()
    target = distribute_tensor(y, mesh, rows)  # which goes where the input lies
    given = {name: distribute_tensor(each, mesh, rows) for name, each in of_rows.items()}
    if columns is not None:
        given["columns"] = distribute_tensor(columns, mesh, rows)
    found = divergence(leaf, target, **options, **given)
    if options["reduction"] == "none":
        assert list(found.placements) == rows
        found.backward(distribute_tensor(numbers(found.numel()).view(found.shape).to(FP32), mesh, rows))
    else:
        assert all(
            each.is_partial() == isinstance(row, Shard) for each, row in zip(found.placements, rows, strict=True)
        )
        found = found.full_tensor()
        found.backward(torch.full((), -1.0))
    assert leaf.grad.placements == leaf.placements
    whole = found if options["reduction"] != "none" else found.full_tensor()
    return [each.detach() for each in (whole, leaf.grad.full_tensor())]


PLACED = [
    ((4,), [Shard(2)]), ((4,), [Replicate()]), ((4,), [Shard(0)]), ((2, 2), [Replicate(), Shard(2)]),
    ((2, 2), [Shard(0), Shard(2)]), ((2, 2), [Shard(2), Shard(1)]), ((2, 2), [Shard(2), Shard(2)]),
]  # fmt: skip


@pairwise(("placed", "told"), ("placed", "reduction", "weighted"))
@every_way
@pytest.mark.parametrize("placed", range(len(PLACED)))
@every_kind
@pytest.mark.parametrize("told", [None, "renormalize", "lump"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("n_classes", [13, 3])
def test_dtensors(ranks, placed, kind, told, weighted, reduction, way, n_classes):
    x, y = (each.float().reshape(3, 2, n_classes) for each in pair(6, n_classes))
    options, columns = {"kind": kind, "reduction": reduction}, None
    if told:
        columns = (5 * torch.arange(6).reshape(3, 2, 1) + torch.tensor([0, 1])) % n_classes
        y = y.log_softmax(-1).gather(-1, columns)
        options |= {"rest": told, "target_is": "log_probs"}
    of_rows = {"temperature": torch.linspace(0.5, 2, 6).reshape(3, 2)} if weighted else {}
    if weighted:
        of_rows["weight"] = torch.linspace(0, 2, 6).reshape(3, 2)
    whole = of_whole(x, y, options | of_rows | ({} if columns is None else {"columns": columns}))
    for found in ranks.values(4, of_dtensor, way, *PLACED[placed], x, y, columns, of_rows, options):
        for ours, truth in zip(found, whole, strict=True):
            close(ours, truth, 5e-5)


def told_by_peers(group, x, y):
    """On GPUs a DTensor's ranks choose peers where they can; on CPUs they have to be told."""
    in_parts()
    chosen, mesh = on_shards.peers_of, mesh_of((4,))
    with mock.patch.object(on_shards, "peers_of", lambda name, transport, *rest: chosen(name, "peer", *rest)):
        x, y = (distribute_tensor(each, mesh, [Shard(1)]) for each in (x, y))
        return divergence(x, y, kind="tvd", reduction="none").full_tensor()


def test_a_dtensors_ranks_exchange_by_peers_too(ranks):
    x, y = (each.float() for each in pair(4, 13))
    for ours in ranks.values(4, told_by_peers, x, y):
        close(ours, formula(x, y, kind="tvd"))


def beside_a_dtensor(group, what):
    by("kernels")
    x, y = (each.float() for each in pair(6, 12))
    mesh = mesh_of((2, 2))
    given = distribute_tensor(x, mesh, [Shard(0) if what in ("weight", "columns") else Replicate(), Shard(1)])
    if what == "partial":
        whole = torch.distributed.tensor.DTensor.from_local(y / 4, mesh, [Partial(), Partial()], run_check=False)
        return divergence(given, whole).full_tensor()
    if what == "target":
        return divergence(given, y)
    if what == "group":
        return divergence(given, y, group=group)
    if what == "plain weight":
        return divergence(given, distribute_tensor(y, mesh, [Replicate()] * 2), weight=torch.ones(6)).full_tensor()
    if what == "columns":
        return divergence(given, y[:, :2], columns=torch.zeros(6, 2, dtype=torch.long))
    return divergence(given, distribute_tensor(y, mesh, [Shard(0), Shard(1)]), weight=torch.ones(6))


def test_other_tensors_beside_a_dtensor(ranks):
    for what in ("partial", "plain weight"):
        for ours in ranks.values(4, beside_a_dtensor, what):
            close(ours, formula(*pair(6, 12)).mean())
    refused = {
        "target": ("RuntimeError", "target must be a DTensor, as input is with "),
        "group": ("TypeError", "group= takes this rank's columns as a plain tensor, got a DTensor"),
        "weight": ("ValueError", "weight must be a DTensor where the rows of the input lie in shards"),
        "columns": ("ValueError", "columns must be a DTensor where the rows of the input lie in shards"),
    }
    for what, (error, said) in refused.items():
        for each in ranks(4, beside_a_dtensor, what):
            assert each.args[0] == error
            assert each.args[1].startswith(f"divergence: {said}")


def probabilities(rows=N_ROWS, columns=N_CLASSES):
    """That do not sum to 1, some of them 0."""
    t = 1.2 * torch.softmax(logits(rows, columns, 2), 1)
    return torch.where(t < 1e-3, 0.0, t)


def results(output):
    return [output] if isinstance(output, torch.Tensor) else [each for each in output if each is not None]


def loss_and_gradients(output, inputs):
    found = results(output)
    graded = [each for each in found if each.requires_grad]
    parts = [numbers(each.numel()).view(each.shape).to(each) + 0.1 * i for i, each in enumerate(graded)]
    return [each.detach() for each in found], torch.autograd.grad(graded, inputs, parts)


def loss_of_shards(group, way, x, t, weight, options, asks):
    by(way)
    dim = 0 if x.ndim == 1 else 1
    leaf, own = shard(x, group, dim).requires_grad_(), shard(t, group, dim).requires_grad_(asks)
    weight = None if weight is None else shard(weight, group, 0)
    found = cross_entropy(leaf, own, weight, **options, **over(group))
    return loss_and_gradients(found, [leaf, own] if asks else [leaf])


def loss_of_whole(x, t, weight, options, asks):
    leaf, own = x.double().requires_grad_(), t.double().requires_grad_(asks)
    weight = None if weight is None else weight.double()
    return loss_and_gradients(cross_entropy(leaf, own, weight, **options), [leaf, own] if asks else [leaf])


def losses_are_right(found, wanted, dtypes, dim=1):
    near = 1e-11 if dtypes[0] == FP64 else 2e-5
    for ours, truth in zip(same_on_all([each[0] for each in found]), wanted[0], strict=True):
        assert ours.shape == truth.shape
        close(ours, truth, near)
    for i, truth in enumerate(wanted[1]):
        ours = torch.cat([each[1][i] for each in found], dim)
        assert ours.dtype == dtypes[i]
        close(ours, truth, max(near, 4 * torch.finfo(dtypes[i]).eps))


@pairwise(("asks", "smoothing", "way"), ("n", "smoothing"))
@pytest.mark.parametrize("n", SIZES)
@every_way
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, FP32), (FP16, FP16), (FP64, FP64)], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("more", [{}, {"scale": -0.5}, {"softcap": 4.0}, {"lse_square_scale": 0.01}], ids=str)
@pytest.mark.parametrize("beside", [{}, {"return_lse": True}, {"return_lse": True, "return_z_loss": True}], ids=len)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("asks", [False, True])
def test_losses_of_probabilities(ranks, n, way, dtypes, smoothing, weighted, more, beside, reduction, asks):
    x, t = logits().to(dtypes[0]), probabilities().to(dtypes[1])
    weight = torch.linspace(0.2, 2, N_CLASSES) if weighted else None
    options = {"label_smoothing": smoothing, "reduction": reduction, "dtype": FP64 if dtypes[0] == FP64 else FP32}
    options |= more | beside
    found = ranks.values(n, loss_of_shards, way, x, t, weight, options, asks)
    losses_are_right(found, loss_of_whole(x, t, weight, options | {"dtype": FP64}, asks), dtypes)


@every_way
@pytest.mark.parametrize("shape", [(N_CLASSES,), (3, N_CLASSES, 2), (0, N_CLASSES)], ids=str)
def test_losses_of_probabilities_of_any_shape(ranks, shape, way):
    n = math.prod(shape) // N_CLASSES
    x, t = (each.float() for each in (logits(n), probabilities(n)))
    if len(shape) == 3:
        x, t = (each.view(3, 2, N_CLASSES).movedim(2, 1) for each in (x, t))
    x, t = x.reshape(shape), t.reshape(shape)
    options = {"reduction": "none", "label_smoothing": 0.2, "return_lse": True}
    found = ranks.values(4, loss_of_shards, way, x, t, None, options, True)
    losses_are_right(found, loss_of_whole(x, t, None, options, True), (FP32, FP32), 0 if x.ndim == 1 else 1)


@every_way
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_losses_of_masked_logits_are_torchs(ranks, smoothing, way):
    """0 times -inf is NaN there, whichever rank has it, and a probability of what cannot be makes infinity."""
    x, t = logits(6).float(), probabilities(6).float() + 0.01
    x[0, :12], x[1, 12], x[2], x[3, 20] = -INF, -INF, -INF, -INF
    t[0, 3], t[3, 20], t[4] = 0.0, 0.0, 0.0
    options = {"reduction": "none", "label_smoothing": smoothing}
    wanted = F.cross_entropy(x.double(), t.double(), **options)
    for (value,), _ in ranks.values(3, loss_of_shards, way, x, t, None, options, False):
        close(value, wanted)


def padded_loss(group, way, x, t, weight, n_classes, options):
    by(way)
    leaf, own = (shard(each, group, 1).requires_grad_() for each in (x, t))
    weight = shard(weight, group, 0)
    found = cross_entropy(leaf, own, weight, **options, **over(group), n_classes=n_classes)
    return loss_and_gradients(found, [leaf, own])


@every_way
@pytest.mark.parametrize("n_classes", [36, 13, 5])
def test_losses_of_probabilities_leave_out_padding(ranks, n_classes, way):
    x, t, weight = logits().float(), probabilities().float(), torch.linspace(0.2, 2, N_CLASSES)
    options = {"label_smoothing": 0.2, "return_lse": True}
    values, gradients = loss_of_whole(x[:, :n_classes], t[:, :n_classes], weight[:n_classes], options, True)
    x[:, n_classes:], t[:, n_classes:], weight[n_classes:] = math.nan, math.nan, math.nan
    found = ranks.values(3, padded_loss, way, x, t, weight, n_classes, options)
    wanted = values, [F.pad(each, (0, N_CLASSES - n_classes)) for each in gradients]
    losses_are_right(found, wanted, (FP32, FP32))


def loss_by_peers(group, x, t, options):
    in_parts(PART_COLS)
    rank, sizes = dist.get_rank(group), WIDE[dist.get_world_size(group)]
    leaf, own = (each.split(sizes, 1)[rank].clone().requires_grad_() for each in (x, t))
    y = cross_entropy(leaf, own, **options, group=group, shard_sizes=sizes, transport="peer")
    return loss_and_gradients(y, [leaf, own])


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("dtype", [FP32, FP64])
def test_losses_of_probabilities_by_peers(ranks, dtype, n):
    x, t, options = logits(4, 331).to(dtype), probabilities(4, 331).to(dtype), {"label_smoothing": 0.1}
    found = ranks.values(n, loss_by_peers, x, t, options)
    losses_are_right(found, loss_of_whole(x, t, None, options, True), (dtype, dtype))


def once_alone(group, x, t):
    by("kernels")
    leaf = shard(x, group, 1).requires_grad_()
    y = cross_entropy(leaf, shard(t, group, 1), **over(group))
    (dx,) = torch.autograd.grad(y, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="cross_entropy: there is no second derivative over the ranks of a group"):
        dx.sum().backward()
    return True


def test_losses_of_probabilities_have_one_derivative(ranks):
    assert all(ranks.values(2, once_alone, logits().float(), probabilities().float()))


def odd_loss(group, odd):
    rank = dist.get_rank(group)
    t = torch.full((2, 3), 0.2, dtype=FP64 if odd == "target_dtype" and rank else FP32)
    options = {"label_smoothing": 0.1 * rank} if odd == "label_smoothing" else {}
    if odd == "wanted" and rank:
        t = torch.zeros(2, dtype=torch.long)
    return cross_entropy(torch.zeros(2, 3), t, group=group, **options)


@pytest.mark.parametrize("odd", ["target_dtype", "label_smoothing", "wanted"])
def test_ranks_whose_losses_of_probabilities_differ_are_told_in_what(ranks, odd):
    for each in ranks(2, odd_loss, odd):
        assert each.args[0] == "RuntimeError"
        said = "target_dtype" if odd == "wanted" else odd
        assert each.args[1].startswith(f"cross_entropy: the ranks of the group differ in {said}: ")


def loss_of_dtensors(group, way, x, t, weight, placements, options):
    by(way)
    mesh = mesh_of((4,) if len(placements) == 1 else (2, 2))
    leaf, own = (distribute_tensor(each, mesh, placements).requires_grad_() for each in (x, t))
    given = {"weight": distribute_tensor(weight, mesh, [Replicate()] * mesh.ndim)}
    with torch.distributed.tensor.debug.CommDebugMode() as heard:
        y = cross_entropy(leaf, own, **given, **options)
    y.backward() if options["reduction"] == "mean" else y.sum().backward()
    counted = {str(each).rsplit(".", 1)[-1]: n for each, n in heard.get_comm_counts().items() if n}
    return [y.full_tensor().detach(), leaf.grad.full_tensor(), own.grad.full_tensor()], counted


@pairwise()
@every_way
@pytest.mark.parametrize("placements", [[Shard(1)], [Shard(0), Shard(1)], [Replicate(), Shard(1)]], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("lse_square_scale", [0.0, 0.01])
def test_dtensors_of_probabilities_stay_where_they_lie(ranks, placements, reduction, lse_square_scale, way):
    x, t, weight = logits(6, 13).float(), probabilities(6, 13).float(), torch.linspace(0.5, 1.5, 13)
    options = {"reduction": reduction, "label_smoothing": 0.1, "lse_square_scale": lse_square_scale}
    leaf, own = x.double().requires_grad_(), t.double().requires_grad_()
    wanted = cross_entropy(leaf, own, weight.double(), **options)
    gradients = torch.autograd.grad(wanted.sum(), [leaf, own])
    for found, counted in ranks.values(4, loss_of_dtensors, way, x, t, weight, placements, options):
        for ours, truth in zip(found, (wanted.detach(), *gradients), strict=True):
            close(ours, truth)
        assert set(counted) <= {"_allgather_base_", "allgather_into_tensor_coalesced_", "allreduce_"}, counted
