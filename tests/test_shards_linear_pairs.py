"""linear_divergence, and linear_cross_entropy of probabilities, of classes in shards over ranks, against float64."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peered import in_parts
from products import pairwise
from sharded import N_CLASSES, SIZES, WAYS, by, close, graded_of, logits, over, same_on_all, shard
from test_divergence import KINDS, formula
from test_shards_divergence import probabilities
from test_shards_dtensor import mesh_of
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fused_softmax import explain, linear_cross_entropy, linear_divergence
from fused_softmax.nn import LinearDivergence

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
N, FEATURES, OF_TEACHER = 12, 6, 5
every_way = pytest.mark.parametrize("way", WAYS)
TRANSPORTS = pytest.mark.parametrize("transport", ["collective", "peer"])
CLASSES = "linear_weight", "linear_bias", "target_weight", "target_bias"  # of which each rank gives its own rows


def layers(biased=True, dtype=FP32, of_teacher=FP32, master=False):
    """The tensors of both layers by their arguments' names; the logits differ by about 3."""
    own = FP32 if master else dtype
    found = {
        "input": (logits(N, FEATURES, 5) / 3).to(dtype),
        "linear_weight": (logits(N_CLASSES, FEATURES, 6) / 3).to(dtype).to(own),
        "target_input": (logits(N, OF_TEACHER, 7) / 3).to(of_teacher),
        "target_weight": (logits(N_CLASSES, OF_TEACHER, 8) / 3).to(of_teacher),
    }
    if biased:
        found["linear_bias"] = torch.linspace(-1, 1, N_CLASSES).to(dtype).to(own)
        found["target_bias"] = torch.linspace(1, -1, N_CLASSES).to(of_teacher)
    return found


def parts_like(graded, of=1.0):
    return [of * torch.linspace(-0.5, 1.5, each.numel()).view(each.shape).to(each.dtype) for each in graded]


def student_of(given, frozen=()):
    """The student's tensors of a call, which get a gradient but for the frozen."""
    names = [name for name in ("input", "linear_weight", "linear_bias") if name in given and name not in frozen]
    return [given[name].requires_grad_() for name in names]


def divergence_of_shards(group, way, given, options, frozen=(), of=1.0):
    in_parts() if options.get("transport") == "peer" else by(way)
    given = {name: shard(each, group, 0) if name in CLASSES else each.clone() for name, each in given.items()}
    if options.get("input_sharded"):
        rank, n = dist.get_rank(group), dist.get_world_size(group)
        given |= {name: given[name].chunk(n)[rank].clone() for name in ("input", "target_input")}
    leaves = student_of(given, frozen)
    y = linear_divergence(**given, **options, **over(group))
    if not leaves:
        assert not y.requires_grad
        return y.detach(), []
    again = torch.autograd.grad(y, leaves, parts_like([y], of), retain_graph=True)
    gradients = torch.autograd.grad(y, leaves, parts_like([y], of))
    eps = torch.finfo(given["input"].dtype).eps
    for first, second in zip(again, gradients, strict=True):
        assert (first - second).norm() <= (4 * eps + 1e-6) * second.norm()
    return y.detach(), gradients


def divergence_of_whole(given, options, frozen=(), of=1.0):
    given = {name: each.double() for name, each in given.items()}
    leaves = student_of(given, frozen)
    x = F.linear(given["input"], given["linear_weight"], given.get("linear_bias"))
    y = F.linear(given["target_input"], given["target_weight"], given.get("target_bias"))
    of_rows = {"chunk_size", "accumulate", "weight", "reduction", "transport", "input_sharded"}
    found = formula(x, y, **{name: each for name, each in options.items() if name not in of_rows})
    weight, reduction = options.get("weight"), options.get("reduction", "mean")
    w = torch.ones_like(found) if weight is None else weight.double()
    found = torch.where(w == 0, 0.0, found) * w
    if reduction != "none":
        found = found.sum() / (w.sum() if reduction == "mean" else 1.0)
    return found.detach(), torch.autograd.grad(found, leaves, parts_like([found], of)) if leaves else []


def near(found, wanted, tolerance):
    assert (found.double() - wanted).norm() <= tolerance * wanted.norm() + 1e-12


def are_right(found, wanted, tolerance=2e-5, sharded=False, frozen=()):
    """found: (the divergences, the gradients) of each rank, of which the first is the input's unless it is frozen."""
    whole = () if sharded or "input" in frozen else (0,)
    same = same_on_all([[value, *[gradients[i] for i in whole if gradients]] for value, gradients in found])
    close(same[0], wanted[0], tolerance)
    for i, truth in enumerate(wanted[1]):
        ours = same[1] if i in whole else torch.cat([gradients[i] for _, gradients in found])
        near(ours, truth, 10 * tolerance)


@pairwise(("kind", "way", "n"), ("kind", "reduction"), ("transport", "way"))
@pytest.mark.parametrize("n", SIZES)
@every_way
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 5])
@pytest.mark.parametrize("accumulate", ["fp32", "input"])
@pytest.mark.parametrize("options", [{}, {"scale": 0.7, "softcap": 4.0, "target_scale": -0.5, "target_softcap": 5.0}])
@pytest.mark.parametrize("temperature", [None, 0.7, "of rows"])
@pytest.mark.parametrize("sharded", [False, True])
@TRANSPORTS
def test_divergences_are_those_of_one_device(
    ranks, n, way, kind, reduction, weighted, biased, chunk_size, accumulate, options, temperature, sharded, transport
):
    """Weights of which some are 0; rows of which each rank gives some."""
    of_rows = torch.linspace(0.5, 2, N)
    options = options | {"kind": kind, "beta": 0.3, "reduction": reduction, "transport": transport}
    options |= {"temperature": of_rows if temperature == "of rows" else temperature}
    options |= {"target_temperature": of_rows.flip(0) if temperature == "of rows" else None}
    options |= {"weight": torch.linspace(0, 2, N).where(torch.arange(N) != 3, 0)} if weighted else {}
    how = {"chunk_size": chunk_size, "accumulate": accumulate, "input_sharded": sharded}
    given = layers(biased)
    found = ranks.values(n, divergence_of_shards, way, given, options | how)
    are_right(found, divergence_of_whole(given, options), sharded=sharded)


@pairwise(("dtypes", "way"))
@every_way
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("kind", ["kl", "tvd"])
@pytest.mark.parametrize(
    "dtypes", [(FP64, FP64), (BF16, BF16), (BF16, BF16, True), (FP16, FP16), (FP16, FP32, True), (FP32, FP64)], ids=str
)
def test_dtypes_of_divergences(ranks, dtypes, kind, reduction, way):
    given = layers(True, *dtypes)
    of = 2.0**8 if dtypes[0] == FP16 else 1.0
    options = {"kind": kind, "reduction": reduction, "chunk_size": 5}
    found = ranks.values(3, divergence_of_shards, way, given, options, (), of)
    value, gradients = divergence_of_whole(given, options, (), of)
    eps = torch.finfo(dtypes[0]).eps
    for ours, name in zip(found[0][1], ("input", "linear_weight", "linear_bias"), strict=True):
        assert ours.dtype == given[name].dtype
    assert found[0][0].dtype == (FP64 if dtypes[0] == FP64 else FP32)
    tolerance = 1e-11 if dtypes[0] == FP64 else 1e-6 + 4 * eps
    are_right(found, (value, gradients), tolerance)


@every_way
@pytest.mark.parametrize("frozen", [("input",), ("linear_weight",), ("input", "linear_weight")])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_frozen_tensors(ranks, frozen, reduction, way):
    given, options = layers(False), {"kind": "jsd", "chunk_size": 5, "reduction": reduction}
    found = ranks.values(3, divergence_of_shards, way, given, options, frozen)
    are_right(found, divergence_of_whole(given, options, frozen), frozen=frozen)


@every_way
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_rows_of_weight_0_may_hold_anything(ranks, reduction, way):
    given, weight = layers(), torch.ones(N)
    weight[[3, 7]] = 0
    options = {"kind": "reverse_kl", "weight": weight, "reduction": reduction, "chunk_size": 5}
    wanted = divergence_of_whole(given, options)
    given["input"][3], given["target_input"][7] = math.nan, math.inf
    are_right(ranks.values(3, divergence_of_shards, way, given, options), wanted)


@every_way
def test_no_weight_at_all_has_no_mean_and_no_gradient(ranks, way):
    for y, gradients in ranks.values(2, divergence_of_shards, way, layers(), {"weight": torch.zeros(N)}):
        assert y.isnan()
        assert not any(each.any() for each in gradients)


@every_way
@pytest.mark.parametrize("n_classes", [36, 12])
def test_classes_past_n_classes_are_padding(ranks, n_classes, way):
    given = layers()
    whole = {name: each[:n_classes] if name in CLASSES else each for name, each in given.items()}
    options = {"kind": "jsd", "chunk_size": 5}
    value, (dx, *others) = divergence_of_whole(whole, options)
    for name in CLASSES:
        given[name] = given[name].clone()
        given[name][n_classes:] = math.nan
    padding = N_CLASSES - n_classes
    wanted = value, (dx, *[F.pad(each, (*(0, 0) * (each.ndim - 1), 0, padding)) for each in others])
    are_right(ranks.values(3, divergence_of_shards, way, given, options | {"n_classes": n_classes}), wanted)


@every_way
def test_no_rows(ranks, way):
    given = {name: each if name in CLASSES else each[:0] for name, each in layers().items()}
    for y, (dx, *others) in ranks.values(4, divergence_of_shards, way, given, {"reduction": "sum"}):
        assert y == 0
        assert dx.shape == (0, FEATURES)
        assert not any(each.any() for each in others)


def chunks_of_memory(group, given):
    """A call whose chunks are what fits in little memory, of which a long shard holds fewer rows."""
    from fused_softmax.ops.losses import linear_by_rows

    held, linear_by_rows._CHUNK_BYTES = linear_by_rows._CHUNK_BYTES, 4 * 12 * 4
    try:
        return divergence_of_shards(group, "torch", given, {})
    finally:
        linear_by_rows._CHUNK_BYTES = held


def test_all_ranks_take_the_same_chunks(ranks):
    given = layers()
    are_right(ranks.values(4, chunks_of_memory, given), divergence_of_whole(given, {}))


def second_derivative(group, name):
    by("kernels")
    given = {key: shard(each, group, 0) if key in CLASSES else each.clone() for key, each in layers().items()}
    if name == "linear_divergence":
        y = linear_divergence(**given | {"input": given["input"].requires_grad_()}, **over(group))
    else:
        t = shard(probabilities(N).float(), group, 1)
        y = linear_cross_entropy(given["input"].requires_grad_(), given["linear_weight"], t, **over(group))
    (dx,) = torch.autograd.grad(y, given["input"], create_graph=True)
    with pytest.raises(RuntimeError, match=f"{name}: there is no second derivative over the ranks of a group"):
        dx.sum().backward()
    return True


@pytest.mark.parametrize("name", ["linear_divergence", "linear_cross_entropy"])
def test_gradients_have_no_gradient(ranks, name):
    assert all(ranks.values(2, second_derivative, name))


def compiled(group):
    by("kernels")
    given = {key: shard(each, group, 0) if key in CLASSES else each.clone() for key, each in layers().items()}
    leaves, of_group, x = student_of(given), over(group), given.pop("input")
    y = torch.compile(lambda x: linear_divergence(x * 1, **given, kind="jsd", **of_group), backend="eager")(x)
    return y.detach(), torch.autograd.grad(y, leaves, parts_like([y]))


def test_a_compiler_leaves_the_call_out_of_its_graphs(ranks):
    are_right(ranks.values(2, compiled), divergence_of_whole(layers(), {"kind": "jsd"}))


def transformed(group):
    given = layers()
    x, h = (given.pop(name)[None] for name in ("input", "target_input"))
    return torch.func.vmap(lambda x, h: linear_divergence(x, target_input=h, **given, group=group))(x, h)


def test_a_transform_is_refused(ranks):
    for each in ranks(2, transformed):
        assert each.args[0] == "RuntimeError"


def explained(group):
    by("kernels")
    given = {key: shard(each, group, 0) if key in CLASSES else each for key, each in layers().items()}
    student_of(given)
    with explain() as calls:
        linear_divergence(**given, chunk_size=5, **over(group)).backward()
    return [(each.function, each.route, each.reason) for each in calls]


def test_explain_says_how_it_went(ranks):
    for (function, route, reason), (backward, *_) in ranks.values(2, explained):
        assert (function, route, backward) == ("linear_divergence", "sharded", "linear_divergence backward")
        assert reason.startswith("group= is given")
        assert reason.endswith("; rows go by 3 chunks of 5, and their gradients are made with them")


def under_autocast(group, given):
    by("kernels")
    given = {key: shard(each, group, 0) if key in CLASSES else each.clone() for key, each in given.items()}
    leaves = student_of(given)
    with torch.autocast("cpu", BF16):
        y = linear_divergence(**given, **over(group))
    return y.detach(), torch.autograd.grad(y, leaves, parts_like([y]))


def test_autocast_lowers_the_layers(ranks):
    given = layers()
    found = ranks.values(2, under_autocast, given)
    assert [each.dtype for each in (found[0][0], *found[0][1])] == [FP32] * 4
    wanted = divergence_of_whole({name: each.to(BF16) for name, each in given.items()}, {})
    are_right(found, wanted, 1e-2)
    assert any((each[0] - wanted[0]).abs() > 1e-5 for each in found)  # of logits of 16 bits


def of_module(group, given):
    by("torch")
    module = LinearDivergence(FEATURES, len(shard(given["linear_weight"], group, 0)), kind="tvd", **over(group))
    with torch.no_grad():
        module.linear_weight.copy_(shard(given["linear_weight"], group, 0))
    return module(given["input"], given["target_input"], shard(given["target_weight"], group, 0)).detach()


def test_a_module(ranks):
    given = layers(False)
    wanted, _ = divergence_of_whole(given, {"kind": "tvd"})
    for y in ranks.values(3, of_module, given):
        close(y, wanted)


def called(group, arguments, on):
    """A call, with other arguments on the last rank, or on all."""
    by("torch")
    last = dist.get_rank(group) == dist.get_world_size(group) - 1
    given = {"input": torch.zeros(2, 5), "linear_weight": torch.zeros(4, 5)}
    given |= {"target_input": torch.zeros(2, 3), "target_weight": torch.zeros(4, 3)}
    given |= arguments if last or on == "all" else {}
    return linear_divergence(**{"group": group} | given)


WRONG = [
    ({"target_weight": torch.zeros(3, 3)}, "ValueError", "target_weight must have shape (4, 3), got (3, 3)"),
    ({"target_bias": torch.zeros(3)}, "ValueError", "target_bias must have shape (4,), got (3,)"),
    ({"linear_bias": torch.zeros(3)}, "ValueError", "linear_bias must have shape (4,), got (3,)"),
    ({"target_input": torch.zeros(3, 3)}, "ValueError", "target_input must have shape (2, target_features)"),
    ({"target_input": [1]}, "TypeError", "target_input must be a Tensor, not list"),
    ({"weight": torch.ones(3)}, "ValueError", "weight must have shape (2,), got (3,)"),
    ({"kind": "js"}, "ValueError", "kind is one of"),
    ({"shard_sizes": (4,)}, "ValueError", "shard_sizes must have 3 sizes, one for each rank, got (4,)"),
    ({"n_classes": 13}, "ValueError", "the shards hold (4, 4, 4) columns, together fewer than n_classes=13"),
    ({"transport": "mail"}, "ValueError", "transport must be None or one of "),
    ({"input_sharded": True, "weight": torch.ones(2)}, "ValueError", "weight must have shape (6,), got (2,)"),
    (
        {"input_sharded": True, "input": torch.zeros(2, 1, 5), "target_input": torch.zeros(2, 1, 3)}, "ValueError",
        "input_sharded takes an input [rows, in_features] of each rank, got (2, 1, 5)",
    ),
]  # fmt: skip


@pytest.mark.parametrize("on", ["last", "all"])
@pytest.mark.parametrize(("arguments", "error", "said"), WRONG, ids=[str(each[0]) for each in WRONG])
def test_a_wrong_argument_is_an_error_on_every_rank(ranks, arguments, error, said, on):
    *others, last = ranks(3, called, arguments, on)
    assert last.args[0] == error
    assert last.args[1].startswith(f"linear_divergence: {said}")
    for each in others:
        if on == "all":
            assert each.args[0] == error
        else:
            refused = f"linear_divergence: rank 2 refused its call: {error}: {last.args[1]}"
            assert each.args[:2] == ("RuntimeError", refused)


def test_shards_need_a_group():
    with pytest.raises(ValueError, match=r"^linear_divergence: n_classes needs group, got group=None$"):
        linear_divergence(**layers(), n_classes=37)
    with pytest.raises(ValueError, match=r"^linear_divergence: input_sharded needs group, got group=None$"):
        linear_divergence(**layers(), input_sharded=True)


ODD = {
    "kind": {"kind": "tvd"}, "temperature": {"temperature": 2.0}, "reduction": {"reduction": "sum"},
    "weighted": {"weight": torch.ones(2)}, "chunk_size": {"chunk_size": 1}, "accumulate": {"accumulate": "input"},
    "result": {"dtype": BF16}, "in_features": {"input": torch.zeros(2, 6), "linear_weight": torch.zeros(4, 6)},
    "target_dtype": {"target_input": torch.zeros(2, 3).half(), "target_weight": torch.zeros(4, 3).half()},
    "require_grad": {"linear_weight": torch.zeros(4, 5, requires_grad=True)},
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_ranks_that_differ_are_told_in_what(ranks, odd):
    for each in ranks(2, called, ODD[odd], "last"):
        assert each.args[0] == "RuntimeError"
        assert each.args[1].startswith("linear_divergence: the ranks of the group differ in ")
        assert f" {odd}: " in each.args[1]


def loss_of_shards(group, way, tensors, weight, options, asked, of=1.0):
    in_parts() if options.get("transport") == "peer" else by(way)
    x, w, bias, t = tensors
    if options.get("input_sharded"):
        x = x.chunk(dist.get_world_size(group))[dist.get_rank(group)]
    leaves = [x.clone(), shard(w, group, 0), shard(bias, group, 0), shard(t, group, -1)]
    leaves = [each.requires_grad_(wants) for each, wants in zip(leaves, asked, strict=True)]
    weight = None if weight is None else shard(weight, group, 0)
    y = linear_cross_entropy(*leaves[:2], leaves[3], linear_bias=leaves[2], weight=weight, **options, **over(group))
    return loss_and_gradients(y, [each for each, wants in zip(leaves, asked, strict=True) if wants], of)


def loss_and_gradients(y, leaves, of):
    values = [y] if isinstance(y, torch.Tensor) else [each for each in y[:3] if each is not None]
    graded = graded_of(y)
    assert bool(graded) == bool(leaves)
    if not leaves:
        return [each.detach() for each in values], []
    parts = parts_like(graded, of)
    again = torch.autograd.grad(graded, leaves, parts, retain_graph=True)
    gradients = torch.autograd.grad(graded, leaves, parts)
    for first, second in zip(again, gradients, strict=True):
        near(first, second.double(), 4 * torch.finfo(second.dtype).eps + 1e-6)
    return [each.detach() for each in values], gradients


def loss_of_whole(tensors, weight, options, asked, of=1.0):
    x, w, bias, t = (each.double().requires_grad_(wants) for each, wants in zip(tensors, asked, strict=True))
    options = {name: each for name, each in options.items() if name not in ("chunk_size", "transport", "input_sharded")}
    weight = None if weight is None else weight.double()
    y = linear_cross_entropy(x, w, t, linear_bias=bias, weight=weight, **options | {"dtype": FP64})
    return loss_and_gradients(y, [each for each, wants in zip((x, w, bias, t), asked, strict=True) if wants], of)


def losses_are_right(found, wanted, asked, tolerance=2e-5, sharded=False):
    dims = [i for i, wants in enumerate(asked) if wants]
    whole = 0 in dims and not sharded
    same = same_on_all([[*values, *gradients[: int(whole)]] for values, gradients in found])
    for ours, truth in zip(same, wanted[0], strict=False):
        assert ours.shape == truth.shape
        close(ours, truth, tolerance)
    for i, (at, truth) in enumerate(zip(dims, wanted[1], strict=True)):
        ours = same[-1] if at == 0 and whole else torch.cat([each[1][i] for each in found], -1 if at == 3 else 0)
        near(ours, truth, 10 * tolerance)


def of_loss(dtype=FP32, target=FP32, master=False):
    own = FP32 if master else dtype
    x, w = (logits(N, FEATURES, 5) / 3).to(dtype), (logits(N_CLASSES, FEATURES, 6) / 3).to(dtype).to(own)
    return x, w, torch.linspace(-1, 1, N_CLASSES).to(dtype).to(own), probabilities(N).to(target)


@pairwise(("n", "way", "smoothing"), ("reduction", "beside", "way"), ("asked", "beside"))
@pytest.mark.parametrize("n", SIZES)
@every_way
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 5])
@pytest.mark.parametrize("more", [{}, {"scale": -0.7, "softcap": 4.0}], ids=len)
@pytest.mark.parametrize(
    "beside", [{}, {"lse_square_scale": 0.02}, {"return_lse": True, "return_z_loss": True, "lse_square_scale": 0.02}]
)
@pytest.mark.parametrize("asked", [(1, 1, 1, 1), (1, 1, 1, 0), (0, 1, 0, 0), (1, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 0)])
@pytest.mark.parametrize("sharded", [False, True])
@TRANSPORTS
def test_losses_of_probabilities_are_those_of_one_device(
    ranks, n, way, reduction, smoothing, weighted, chunk_size, more, beside, asked, sharded, transport
):
    """Of which some are 0, and which do not sum to 1."""
    tensors, asked = of_loss(), [bool(each) for each in asked]
    options = {"reduction": reduction, "label_smoothing": smoothing, "transport": transport} | more | beside
    weight = torch.linspace(0, 2, N_CLASSES) if weighted else None
    how = {"chunk_size": chunk_size, "input_sharded": sharded}
    found = ranks.values(n, loss_of_shards, way, tensors, weight, options | how, asked)
    losses_are_right(found, loss_of_whole(tensors, weight, options, asked), asked, sharded=sharded)


@every_way
@pytest.mark.parametrize("dtypes", [(FP64, FP64), (BF16, FP32), (BF16, BF16, True), (FP16, FP32)], ids=str)
def test_dtypes_of_losses_of_probabilities(ranks, dtypes, way):
    tensors, asked = of_loss(*dtypes), [True] * 4
    of = 2.0**8 if dtypes[0] == FP16 else 1.0
    found = ranks.values(3, loss_of_shards, way, tensors, None, {"chunk_size": 5}, asked, of)
    assert [each.dtype for each in found[0][1]] == [each.dtype for each in tensors]
    assert found[0][0][0].dtype == torch.promote_types(*dtypes[:2])
    tolerance = 1e-11 if dtypes[0] == FP64 else 4 * max(torch.finfo(each).eps for each in dtypes[:2])
    losses_are_right(found, loss_of_whole(tensors, None, {}, asked, of), asked, tolerance)


@every_way
@pytest.mark.parametrize("shape", [(), (3, 4), (0,)], ids=str)
def test_leading_dims_of_losses_of_probabilities(ranks, shape, way):
    x, w, bias, t = of_loss()
    n = math.prod(shape)
    tensors = x[:n].reshape(*shape, FEATURES), w, bias, t[:n].reshape(*shape, N_CLASSES)
    found = ranks.values(4, loss_of_shards, way, tensors, None, {"reduction": "none", "chunk_size": 5}, [True] * 4)
    flat = x[:n], w, bias, t[:n]
    (value,), gradients = loss_of_whole(flat, None, {"reduction": "none"}, [True] * 4)
    dx, *of_layer, dt = gradients
    wanted = [value.view(shape)], [dx.view(tensors[0].shape), *of_layer, dt.view(tensors[3].shape)]
    losses_are_right(found, wanted, [True] * 4)


@every_way
@pytest.mark.parametrize("n_classes", [36, 12])
def test_losses_of_probabilities_leave_out_padding(ranks, n_classes, way):
    x, w, bias, t = of_loss()
    weight, asked = torch.linspace(0.2, 2, N_CLASSES), [True] * 4
    options = {"label_smoothing": 0.2, "chunk_size": 5}
    cut = x, w[:n_classes], bias[:n_classes], t[:, :n_classes]
    value, (dx, dw, db, dt) = loss_of_whole(cut, weight[:n_classes], options, asked)
    w[n_classes:], bias[n_classes:], t[:, n_classes:], weight[n_classes:] = [math.nan] * 4
    options["n_classes"] = n_classes
    found = ranks.values(3, loss_of_shards, way, (x, w, bias, t), weight, options, asked)
    pad = N_CLASSES - n_classes
    wanted = value, (dx, F.pad(dw, (0, 0, 0, pad)), F.pad(db, (0, pad)), F.pad(dt, (0, pad)))
    losses_are_right(found, wanted, asked)


def odd_loss(group, odd):
    rank = dist.get_rank(group)
    given = {"input": torch.zeros(2, 5), "linear_weight": torch.zeros(4, 5), "target": torch.full((2, 4), 0.1)}
    given |= odd if rank else {}
    return linear_cross_entropy(**given, group=group)


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"target": torch.full((2, 4), 0.1, dtype=FP64)}, "differ in probabilities: "),
        ({"target": torch.full((2, 4), 0.1, requires_grad=True)}, "differ in probabilities: "),
        ({"target": torch.zeros(2, dtype=torch.long)}, "differ in probabilities: "),
        ({"label_smoothing": 0.1}, "differ in label_smoothing: 0.0 on rank 0, 0.1 on rank 1"),
    ],
)
def test_ranks_whose_losses_of_probabilities_differ_are_told_in_what(ranks, odd, said):
    for each in ranks(2, odd_loss, odd):
        assert each.args[0] == "RuntimeError"
        assert each.args[1].startswith(f"linear_cross_entropy: the ranks of the group {said}")


def divergence_of_dtensors(group, way, mesh, of_x, of_w, given, of_rows, options):
    by(way)
    mesh = mesh_of(mesh)
    given = {name: distribute_tensor(each, mesh, of_w if name in CLASSES else of_x) for name, each in given.items()}
    leaves = student_of(given)
    rows = [a if isinstance(a, Shard) and b == Replicate() else Replicate() for a, b in zip(of_x, of_w, strict=True)]
    of_rows = {name: distribute_tensor(each, mesh, rows) for name, each in of_rows.items()}
    y = linear_divergence(**given, chunk_size=4, **of_rows, **options)
    if options["reduction"] == "none":
        assert list(y.placements) == rows
        (part,) = parts_like([torch.empty(y.shape)])
        gradients = torch.autograd.grad(y, leaves, distribute_tensor(part, mesh, rows))
    else:
        y = y.full_tensor()
        gradients = torch.autograd.grad(y, leaves, parts_like([y]))
    return [each.full_tensor().detach() if hasattr(each, "full_tensor") else each.detach() for each in (y, *gradients)]


LIE = [
    ((4,), [Replicate()], [Shard(0)]), ((4,), [Shard(0)], [Shard(0)]), ((4,), [Shard(0)], [Replicate()]),
    ((2, 2), [Shard(0), Replicate()], [Replicate(), Shard(0)]),
    ((2, 2), [Shard(1), Shard(0)], [Replicate(), Shard(0)]),
]  # fmt: skip


@pairwise(("lie", "reduction"))
@every_way
@pytest.mark.parametrize("lie", LIE, ids=str)
@pytest.mark.parametrize("kind", ["kl", "jsd"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_divergences_of_dtensors(ranks, lie, kind, weighted, reduction, way):
    given, options = layers(), {"kind": kind, "reduction": reduction}
    given |= {name: given[name][:8].reshape(4, 2, -1) for name in ("input", "target_input")}
    of_rows = {"temperature": torch.linspace(0.5, 2, 8).view(4, 2), "weight": torch.linspace(0, 2, 8).view(4, 2)}
    of_rows = of_rows if weighted else {}
    value, gradients = divergence_of_whole(given, options | of_rows)
    for found in ranks.values(4, divergence_of_dtensors, way, *lie, given, of_rows, options):
        for ours, truth in zip(found, (value, *gradients), strict=True):
            close(ours, truth, 2e-5)


def loss_of_dtensors(group, way, mesh, of_x, of_w, tensors, weight, options):
    by(way)
    mesh = mesh_of(mesh)
    x, w, bias, t = tensors
    rows = [a if isinstance(a, Shard) and b == Replicate() else Replicate() for a, b in zip(of_x, of_w, strict=True)]
    placed = of_x, of_w, of_w, [Shard(t.ndim - 1) if b == Shard(0) else a for a, b in zip(rows, of_w, strict=True)]
    leaves = [distribute_tensor(each, mesh, of) for each, of in zip((x, w, bias, t), placed, strict=True)]
    leaves = [each.detach().requires_grad_() for each in leaves]
    y = linear_cross_entropy(*leaves[:2], leaves[3], linear_bias=leaves[2], weight=weight, chunk_size=4, **options)
    values = [y] if not isinstance(y, tuple) else [each for each in y[:3] if each is not None]
    whole = [each.full_tensor() for each in values]
    gradients = torch.autograd.grad(whole, leaves, parts_like(whole))
    return [each.detach() for each in whole] + [each.full_tensor() for each in gradients]


@pairwise(("lie", "reduction"))
@every_way
@pytest.mark.parametrize("lie", LIE, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("more", [{}, {"lse_square_scale": 0.02, "return_lse": True, "return_z_loss": True}], ids=len)
@pytest.mark.parametrize("weighted", [False, True])
def test_losses_of_probabilities_of_dtensors(ranks, lie, reduction, more, weighted, way):
    x, w, bias, t = of_loss()
    tensors = x[:8].reshape(4, 2, FEATURES), w, bias, t[:8].reshape(4, 2, N_CLASSES)
    options = {"reduction": reduction, "label_smoothing": 0.1} | more
    weight = torch.linspace(0.2, 2, N_CLASSES) if weighted else None
    values, gradients = loss_of_whole(tensors, weight, options, [True] * 4)
    for found in ranks.values(4, loss_of_dtensors, way, *lie, tensors, weight, options):
        for ours, truth in zip(found, (*values, *gradients), strict=True):
            close(ours, truth, 2e-5)


def weights_of_the_group(group, given):
    by("torch")
    mesh = mesh_of((4,))
    given = {name: distribute_tensor(each[:36], mesh, [Shard(0)]) if name in CLASSES else each
             for name, each in given.items()}  # fmt: skip
    leaves = student_of(given)
    y = linear_divergence(**given, group=group)
    dx, *others = torch.autograd.grad(y, leaves, parts_like([y]))
    return [y.detach(), dx, *[each.full_tensor() for each in others]]


def test_weights_that_are_dtensors_over_the_group(ranks):
    given = layers()
    whole = {name: each[:36] if name in CLASSES else each for name, each in given.items()}
    value, gradients = divergence_of_whole(whole, {})
    for found in ranks.values(4, weights_of_the_group, given):
        for ours, truth in zip(found, (value, *gradients), strict=True):
            close(ours, truth)
