"""The kernels of `route` and of its gradient against torch's operations: options, sizes, sums, layouts, plans, bits."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import peaked
from products import pairwise

from fused_softmax import explain, route
from fused_softmax.core.plan import H200
from fused_softmax.ops.routing import launches, reference
from fused_softmax.ops.routing.kernels.spec import RouteSpec
from fused_softmax.ops.routing.options import Routing
from fused_softmax.ops.routing.plan import plan_route

INF, NAN = math.inf, math.nan
EVERYTHING = {"dense": True, "return_aux_loss": True, "return_z_loss": True}
FLOATS = ("weights", "prob_sums", "aux_loss", "z_loss", "dense")


def rows(n, n_experts, dtype=torch.float32, seed=0):
    return torch.randn(n, n_experts, generator=torch.Generator().manual_seed(seed)).mul(2).to(dtype)


def given(options, x, k):
    """Options with the tensors that they stand for."""
    found, (n, n_experts) = dict(options), x.shape
    made = {
        "bias": lambda: rows(1, n_experts, seed=3)[0] / 8,
        "noise": lambda: rows(n, n_experts, seed=4),
        "row_mask": lambda: torch.arange(n) % 4 != 1,
        "indices": lambda: replayed(n, n_experts, k),
    }
    return found | {name: make() for name, make in made.items() if options.get(name) is True}


def replayed(n, n_experts, k):
    generator = torch.Generator().manual_seed(5)
    ids = torch.stack([torch.randperm(n_experts, generator=generator)[:k] for _ in range(n)]).to(torch.int32)
    ids[0, 0] = -1
    return ids


def on(device, options):
    return {name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in options.items()}


def results(function, x, k, options, asked, device):
    """Results of a call, and the gradient of a sum of some of them."""
    leaf = x.to(device).requires_grad_()
    out = function(leaf, k, **on(device, options))
    generator, total = torch.Generator().manual_seed(9), 0.0
    for name in FLOATS:
        each = getattr(out, name)
        if name in asked and each is not None:
            weight = torch.randn(each.shape, generator=generator).to(device)
            total = total + (torch.where(weight.isnan() | each.isnan(), 0.0, each) * weight).sum()
    return out, torch.autograd.grad(total, leaf)[0]


def assert_same(x, k, options, device, asked=FLOATS):
    ours, dx = results(route, x, k, options, asked, device)
    theirs, wanted = results(reference.route, x, k, options, asked, "cpu")
    for name in theirs._fields:
        a, b = getattr(ours, name), getattr(theirs, name)
        assert (a is None) == (b is None), name
        if b is not None and name in FLOATS:
            torch.testing.assert_close(
                a.cpu(), b, rtol=1e-5, atol=1e-6, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
            )
        elif b is not None:
            assert torch.equal(a.cpu(), b), name
    assert dx.dtype == x.dtype
    step = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}[x.dtype]
    torch.testing.assert_close(dx.cpu(), wanted, rtol=step, atol=step * max(wanted.float().abs().max().item(), 1e-6))


OPTIONS = {
    "plain": {},
    "raw": {"renormalize": False, "scale": 2.5},
    "a scale of 0": {"scale": 0.0},
    "sigmoid": {"score": "sigmoid", "scale": -0.5},
    "raw sigmoid": {"score": "sigmoid", "renormalize": False},
    "sqrtsoftplus": {"score": "sqrtsoftplus"},
    "chosen first": {"score_first": False},
    "chosen first, sqrtsoftplus": {"score_first": False, "score": "sqrtsoftplus", "renormalize": False},
    "bias": {"bias": True},
    "bias, sigmoid": {"bias": True, "score": "sigmoid"},
    "bias, chosen first": {"bias": True, "score_first": False},
    "noise, sigmoid": {"noise": True, "score": "sigmoid"},
    "groups": {"n_groups": 4, "groups_kept": 2},
    "groups by max": {"n_groups": 4, "groups_kept": 2, "group_score": "max", "renormalize": False},
    "V3": {"n_groups": 4, "groups_kept": 2, "score": "sigmoid", "bias": True, "scale": 2.5},
    "groups, chosen first": {"n_groups": 8, "groups_kept": 5, "score_first": False},
    "masked rows": {"row_mask": True},
    "replay": {"indices": True},
    "replay, raw": {"indices": True, "renormalize": False},
    "replay, sigmoid": {"indices": True, "score": "sigmoid"},
    "sequences": {"sequence_length": 3, "row_mask": True},
    "sequences, sqrtsoftplus": {"sequence_length": 2, "score": "sqrtsoftplus"},
}


@pytest.mark.parametrize("asked", [FLOATS, ("weights",), ("dense",), ("aux_loss", "z_loss"), ("prob_sums",)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@pairwise()
def test_options_and_gradients(name, dtype, asked, device):
    x = rows(6, 40, dtype)
    x[1, 3] = NAN
    x[2] = 0.0
    x[3, 5:] = -INF
    x[4, 7] = x[4, 20]
    assert_same(x, 5, given(OPTIONS[name], x, 5) | EVERYTHING, device, asked)


SIZES = [
    (1, 1), (2, 2), (3, 1), (8, 8), (31, 4), (33, 4), (60, 4), (64, 6), (160, 6), (288, 8), (384, 8), (512, 10),
    (896, 16), (1030, 40), (2304, 36),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("n_experts", "k"), SIZES)
def test_sizes(n_experts, k, dtype, device):
    assert_same(rows(3, n_experts, dtype), k, EVERYTHING, device)


@pytest.mark.parametrize(
    ("n_experts", "n_groups", "kept", "k"),
    [(12, 12, 5, 3), (96, 3, 2, 7), (160, 8, 3, 6), (140, 2, 1, 9), (80, 2, 1, 40), (64, 32, 4, 6)],
)
@pytest.mark.parametrize("group_score", ["top2", "max"])
def test_groups_of_any_size(n_experts, n_groups, kept, k, group_score, device):
    x = rows(4, n_experts, torch.bfloat16)
    x[1] = 1.0
    x[2, :: n_groups + 1] = 7.0
    options = {"n_groups": n_groups, "groups_kept": kept, "group_score": group_score}
    assert_same(x, k, options | EVERYTHING, device)


def test_the_two_best_of_a_group_may_share_a_lane(device):
    x = torch.zeros(1, 192)
    x[0, [0, 64, 96]] = torch.tensor([5.0, 5.0, 6.0])  # the first group has 10, the second 6
    out = route(x.to(device), 2, n_groups=2, groups_kept=1, score_first=False)
    assert out.indices.tolist() == [[0, 64]]


def test_the_greatest_k_and_number_of_experts(device):
    x = rows(2, 4096, torch.bfloat16)
    assert_same(x, 64, {"return_counts": False}, device, ("weights",))


# Where the best experts are: those of one lane of 32, so that its list of eight keys has too few of them.
CROWDED = {
    "one lane": lambda x: x[:, 5::32].add_(20),
    "two lanes": lambda x: (x[:, 5::32].add_(20), x[:, 31::32].add_(20)),
    "nine of a lane": lambda x: x[:, 5::32][:, :9].add_(20),
    "eight of a lane": lambda x: x[:, 5::32][:, :8].add_(20),
    "equal": lambda x: x.zero_(),
    "equal in a lane": lambda x: x[:, 5::32].fill_(20),
    "a few values": lambda x: x.round_(),
    "one expert of a number": lambda x: x[:, 1:].fill_(-INF),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("n_experts", "k"), [(544, 22), (545, 64), (896, 16), (2049, 8), (2304, 36), (4096, 64)])
@pytest.mark.parametrize("crowded", CROWDED)
@pairwise()
def test_a_merged_list_that_has_too_few(crowded, n_experts, k, dtype, device):
    x = rows(3, n_experts, dtype)
    CROWDED[crowded](x)
    assert_same(x, k, {"return_counts": False}, device, ("weights",))


def test_where_lists_are_merged():
    def merges(n_experts, k, **others):
        return RouteSpec(
            n_experts=n_experts, k=k, rows=1, score="softmax", score_first=True, renormalize=True, stacks=True, **others
        ).merges

    assert [merges(n, 32) for n in (512, 544, 2304)] == [False, True, True]
    assert [merges(n, 8) for n in (1024, 2304)] == [False, True]
    assert not merges(4096, 7)
    assert not merges(2304, 16, n_groups=4, groups_kept=2)


STRATEGIES = {"held": launches.HELD, "read again": 0}  # how programs add up their rows, by the HELD that asks for it


def of_plan(x, options, device, **plan):
    """What rows give by a plan of our own."""
    given = launches.rows_of_call(x.to(device), options)
    planned = plan_route(*x.shape, options.sequence_length or len(x), H200, options.sums)
    sizes = {"rows": planned.rows, "part_rows": planned.part_rows, **plan}
    length = planned.length
    planned = type(planned)(
        len(x), x.shape[1], length, sizes["rows"], sizes["part_rows"], -(-length // sizes["part_rows"]), sizes["rows"],
        sizes.get("sum_rows", 2), sizes.get("sum_cols", planned.sum_cols), None, planned.alone and sizes["rows"] == 1,
    )  # fmt: skip
    return launches.prepare_route(given, options, True, planned)(*given), given, planned


PLANS = {
    "a row a program": {"rows": 1, "part_rows": 1},
    "a row at a time": {"rows": 1, "part_rows": 5},
    "two rows at a time": {"rows": 2, "part_rows": 4},
    "four, all rows": {"rows": 4, "part_rows": 64, "sum_rows": 8},
    "sums by blocks of experts": {"rows": 4, "part_rows": 8, "sum_rows": 4, "sum_cols": 32},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sequences", [None, 7])
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pairwise(("strategy", "sequences", "name"))
def test_plans(strategy, name, sequences, dtype, device, monkeypatch):
    monkeypatch.setattr(launches, "HELD", STRATEGIES[strategy])
    x = rows(14, 80, dtype)
    x[3, 2] = NAN
    options = Routing(k=5, sequence_length=sequences, **EVERYTHING)
    found, given, plan = of_plan(x, options, device, **PLANS[name])
    leaf = x.clone().requires_grad_()
    wanted = reference.route(leaf, 5, sequence_length=sequences, **EVERYTHING)
    total = wanted.weights.sum() + wanted.aux_loss + wanted.z_loss + (wanted.dense * wanted.dense.detach()).sum()
    for field in ("weights", "prob_sums", "aux_loss", "z_loss", "dense"):
        torch.testing.assert_close(getattr(found, field).cpu(), getattr(wanted, field), rtol=1e-5, atol=1e-6)
    assert torch.equal(found.indices.cpu(), wanted.indices)
    assert torch.equal(found.counts.cpu(), wanted.counts)
    ones = launches.OfResults(torch.ones_like(found.weights), None, *[torch.ones((), device=device)] * 2, found.dense)
    dx = [
        launches.prepare_gradient(given, found, ones, options, each)(given, found, ones)
        for each in (plan, plan_route(14, 80, sequences or 14, H200))
    ]
    assert torch.equal(*dx)
    step = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(dx[0].cpu(), torch.autograd.grad(total, leaf)[0], rtol=step, atol=step / 20)


SUMS = {  # experts, k, options
    "counts alone": (80, 5, {}),
    "sequences": (80, 5, {"sequence_length": 7, "row_mask": True, **EVERYTHING}),
    "sequences of sigmoid": (40, 5, {"sequence_length": 2, "score": "sigmoid", **EVERYTHING}),
    "noise": (80, 5, {"noise": True, **EVERYTHING}),
    "sigmoid with bias": (70, 40, {"score": "sigmoid", "bias": True, **EVERYTHING}),
    "sqrtsoftplus": (33, 4, {"score": "sqrtsoftplus", **EVERYTHING}),
    "groups": (140, 9, {"n_groups": 4, "groups_kept": 2, **EVERYTHING}),
    "V3": (80, 5, {"n_groups": 4, "groups_kept": 2, "score": "sigmoid", "bias": True, **EVERYTHING}),
    "replay": (80, 5, {"indices": True, "row_mask": True, **EVERYTHING}),
    "replay by groups": (140, 9, {"indices": True, "n_groups": 4, "groups_kept": 2, **EVERYTHING}),
    "tiles that are stacked": (512, 10, {"row_mask": True, **EVERYTHING}),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("turn", [{"rows": 1, "part_rows": 5}, {"rows": 4, "part_rows": 8}], ids=["one", "four"])
@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pairwise(("strategy", "name"))
def test_sums_by_several_turns(strategy, name, turn, dtype, device, monkeypatch):
    """Rows that are not routed, ties at the last choice, and turns and parts with rows left over."""
    monkeypatch.setattr(launches, "HELD", STRATEGIES[strategy])
    n_experts, k, options = SUMS[name]
    x = rows(14, n_experts, dtype)
    x[3, 2], x[6], x[9, 1] = NAN, -INF, INF
    x[4], x[8, 7:] = 0.0, -INF
    x[11, 1::2] = x[11].max()
    options = given(options, x, k)
    asked = Routing(k=k, **on(device, options))
    found, tensors, plan = of_plan(x, asked, device, **turn)
    assert launches._spec(tensors, asked, plan, True).held == (strategy == "held")
    wanted = reference.route(x, k, **options)
    assert torch.equal(found.indices.cpu(), wanted.indices)
    assert torch.equal(found.counts.cpu(), wanted.counts)
    for field in ("prob_sums", "aux_loss", "z_loss"):
        ours, theirs = getattr(found, field), getattr(wanted, field)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-6)


def test_registers_hold_the_sums_of_512_experts_and_no_more():
    for n_experts, groups, held in [
        (1, 1, True),
        (512, 1, True),
        (513, 1, False),
        (512, 16, True),
        (17 * 4, 17, False),
    ]:
        options = Routing(k=1, n_groups=groups, groups_kept=1)
        tensors = launches.rows_of_call(torch.zeros(2, n_experts), options)
        plan = plan_route(2, n_experts, 2, H200, sums=True)
        assert launches._spec(tensors, options, plan, True).held == held
        assert not launches._spec(tensors, options, plan, False).held


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("n_experts", [480, 500, 512, 513])
def test_a_row_has_the_same_bits_in_few_rows_and_in_many(n_experts, sums, device):
    """Weights that are not renormalized, states, and the gradient of all experts, in whatever tiles a row lies."""
    x = rows(6, n_experts, torch.bfloat16)
    options = Routing(k=8, renormalize=False, return_counts=sums, return_aux_loss=sums)
    given = launches.rows_of_call(x.to(device), options)
    held = launches._held_tiles(n_experts, options) if sums else 0
    found = []
    for n in (6, 5000):
        of_rows = [plan_route(n, n_experts, n, H200, sums, held), plan_route(n, n_experts, n, H200, True)]
        forward, backward = (
            replace(each, n_rows=6, length=6, part_rows=each.rows, parts=-(-6 // each.rows)) for each in of_rows
        )
        y = launches.prepare_route(given, options, True, forward)(*given)
        one = torch.ones((), device=device) if sums else None
        d = launches.OfResults(torch.ones_like(y.weights), None, one, None, None)
        found.append((y.weights, y.states, launches.prepare_gradient(given, y, d, options, backward)(given, y, d)))
    for few, many in zip(*found, strict=True):
        assert torch.equal(few, many)


def test_a_row_has_a_warp_whatever_the_plan():
    for n_rows in (1, 100, 1057, 5000, 16384, 131072):
        for n_experts in (1, 64, 256, 1023, 1024, 4096):
            for sums, held in ((False, 0), (True, 0), (True, 8), (True, 16)):
                plan = plan_route(n_rows, n_experts, n_rows, H200, sums, held)
                assert plan.rows == plan.num_warps
                assert plan.parts * plan.part_rows >= n_rows > (plan.parts - 1) * plan.part_rows
                assert plan.part_rows % plan.rows == 0
                assert not sums or plan.parts <= max(16 * H200.sm_count, 1)


@pytest.mark.parametrize("n", range(1, 9))
def test_the_network_sorts(n):
    pairs = RouteSpec(n_experts=n, k=1, rows=1, score="softmax", score_first=True, renormalize=True).pairs
    for number in range(2**n):  # what sorts all zeros and ones sorts all (Knuth's 0-1 principle)
        values = [number >> i & 1 for i in range(n)]
        for i, j in zip(pairs[::2], pairs[1::2], strict=True):
            if j < n and values[i] < values[j]:
                values[i], values[j] = values[j], values[i]
        assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_ties_signs_of_zero_and_small_numbers(dtype, device):
    least = torch.finfo(dtype).smallest_normal
    x = torch.zeros(5, 70, dtype=dtype)
    x[0, 1::2] = -0.0
    x[1, 5], x[1, 60], x[1, 3] = least, 2 * least, -least
    x[2] = torch.arange(70).flip(0) // 9 - 3
    x[3] = -INF
    x[3, 69] = torch.finfo(dtype).min
    x[4, 64:] = torch.finfo(dtype).max / 4
    out = route(x.to(device), 9)
    wanted = reference.route(x, 9)
    assert torch.equal(out.indices.cpu(), wanted.indices)
    torch.testing.assert_close(out.weights.cpu(), wanted.weights, rtol=1e-5, atol=1e-6)


LOW = {
    "sigmoid": {"score": "sigmoid"},
    "sqrtsoftplus": {"score": "sqrtsoftplus"},
    "a choice without the greatest": {"indices": torch.tensor([[1, 2], [2, 3]])},
    "one of which nothing is left": {"indices": torch.tensor([[5, 4], [4, 5]]), "score": "sigmoid"},
    "the same of a softmax": {"indices": torch.tensor([[5, 4], [4, 5]])},
}


@pytest.mark.parametrize("name", LOW)
def test_scores_that_are_nearly_0(name, device):
    """Their ratios are right as long as a float32 is left of their sum, and 0 from there on."""
    x = torch.tensor([[-85.0, -86.0, -88.0, -95.0, -110.0, -300.0], [0.0, -90.0, -95.0, -97.0, -120.0, -200.0]])
    assert_same(x, 2, LOW[name] | {"dense": True}, device, ("weights", "dense"))


def test_layouts(device):
    """Rows apart, at odd strides and over two dims, and what stands beside them."""
    whole = peaked(2 * 6, 2 * 50, torch.bfloat16)
    views = {
        "apart": whole[:, :50], "odd": whole[:, 1:50], "turned": whole.t()[:12, :12],
        "of two dims": whole.view(2, 6, 100), "one row": whole[0],
        "a slice of dims": whole.view(2, 6, 100)[:, ::2, :40],
    }  # fmt: skip
    for name, x in views.items():
        mask = torch.ones(x.shape[:-1], dtype=torch.bool)
        noise = rows(x.numel() // x.shape[-1], x.shape[-1]).view(x.shape)
        options = {"noise": noise, "row_mask": mask, **EVERYTHING}
        for _ in range(2):  # the second by the call that is kept
            out = route(x.to(device), 4, **on(device, options))
        wanted = reference.route(x, 4, **options)
        assert torch.equal(out.indices.cpu(), wanted.indices), name
        torch.testing.assert_close(out.dense.cpu(), wanted.dense, rtol=1e-5, atol=1e-6)


def test_a_kept_call_serves_other_numbers_of_rows_and_hears_of_its_options(device):
    x = rows(40, 24, torch.bfloat16).to(device)
    for n in (40, 7, 8, 9, 7, 8, 40, 2, 24):
        for options in ({}, {"scale": 2.0}, {"bias": torch.ones(24, device=device)}, {"score": "sigmoid"}):
            out, wanted = (f(x[:n], 3, return_aux_loss=True, **options) for f in (route, reference.route))
            assert torch.equal(out.indices, wanted.indices)
            torch.testing.assert_close(tuple(out[:1] + out[3:5]), tuple(wanted[:1] + wanted[3:5]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"score": "sigmoid", "n_groups": 4, "groups_kept": 2, "bias": True}], ids=str)
def test_a_second_derivative_is_of_torchs_operations(options, device):
    x = rows(4, 16)
    options = given(options, x, 3)
    found = []
    for function, where in ((route, device), (reference.route, "cpu")):
        leaf = x.to(where).requires_grad_()
        out = function(leaf, 3, return_aux_loss=True, return_z_loss=True, **on(where, options))
        total = out.weights[:, 0].square().sum() + out.aux_loss + out.z_loss + out.prob_sums[2]
        (dx,) = torch.autograd.grad(total, leaf, create_graph=True)
        found += [torch.autograd.grad(dx.square().sum(), leaf)[0].cpu()]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_compiled_with_its_gradient(device):
    def step(x):
        out = route(x, 3, return_aux_loss=True, return_z_loss=True, dense=True)
        total = (out.weights * torch.arange(3, device=device)).sum() + out.aux_loss + out.z_loss + out.dense[:, 1].sum()
        return total, out.indices, out.counts

    x = rows(6, 16).to(device)
    found = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        leaf = x.clone().requires_grad_()
        total, *rest = function(leaf)
        total.backward()
        found.append((total.detach(), *rest, leaf.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_explain_lists_the_kernels_and_what_they_refuse(device):
    x = rows(3, 8).to(device).requires_grad_()
    with explain() as calls:
        route(x, 2).weights.sum().backward()
        route(rows(0, 8).to(device), 2)
        route(rows(3, 5000).to(device), 2)
        route(rows(2, 100).to(device), 2, n_groups=50, groups_kept=5)
    assert [each.route for each in calls if each.function == "route"] == ["kernel", "composed", "composed", "composed"]
    assert [each.kernels for each in calls][:2] == [["_route"], ["_route_gradient"]]
    reasons = ["no rows", "4096 experts", "50 groups of 2 experts"]
    assert all(word in each.reason for word, each in zip(reasons, calls[2:], strict=True))


def test_the_slots_are_0_again(device, monkeypatch):
    """What programs add to is left as it was found, for the next launch on the stream."""
    slots = torch.zeros(launches.COPIES * (2 * 24 + launches.BESIDE), dtype=torch.int64, device=device)
    monkeypatch.setattr(launches, "_slots", lambda *_: slots)
    x = rows(9, 24).to(device)
    for options in ({}, {"sequence_length": 3}, {"score": "sigmoid"}):
        route(x, 3, return_aux_loss=True, return_z_loss=True, **options)
        assert not slots.any()
