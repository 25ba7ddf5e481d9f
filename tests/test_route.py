"""route: choices, weights, sums and losses against loops in float64; NaN, inf, ties, masks, replay; gradients."""

import math

import pytest
import torch
from conftest import peaked
from routed import naive

import fused_softmax
from fused_softmax import nn, route
from fused_softmax.ops.routing import reference

INF, NAN = math.inf, math.nan
EVERYTHING = {"dense": True, "return_aux_loss": True, "return_z_loss": True}
SIZES = [
    (1, 1), (2, 1), (2, 2), (3, 2), (8, 2), (60, 4), (64, 6), (160, 6), (288, 8), (384, 8), (896, 16), (2304, 36),
]  # fmt: skip


@pytest.fixture(autouse=True, params=["kernels", "torch"])
def way(request, monkeypatch):
    """Who computes: the kernels, where there are any for the device, or torch's operations."""
    if request.param == "torch":
        monkeypatch.setattr(
            fused_softmax.ops.routing.route, "refused_sizes", lambda *_: "torch's operations are asked for"
        )


def rows(n, n_experts, dtype=torch.float32, seed=0):
    return torch.randn(n, n_experts, generator=torch.Generator().manual_seed(seed)).mul(2).to(dtype)


def assert_output(found, wanted):
    """float32 found of the float64 wanted: choices and counts alike, the rest to the rounding of float32."""
    for name in ("indices", "counts"):
        ours, theirs = getattr(found, name).cpu(), getattr(wanted, name)
        assert ours.dtype == torch.int32
        assert torch.equal(ours, theirs), name
    for name in ("weights", "dense", "prob_sums", "aux_loss", "z_loss"):
        ours, theirs = getattr(found, name), getattr(wanted, name)
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            assert ours.dtype == torch.float32
            torch.testing.assert_close(ours.cpu().double(), theirs, rtol=3e-6, atol=1e-7)


OPTIONS = {
    "plain": {},
    "sigmoid": {"score": "sigmoid"},
    "sqrtsoftplus": {"score": "sqrtsoftplus"},
    "raw": {"renormalize": False, "scale": 2.5},
    "raw sigmoid": {"renormalize": False, "score": "sigmoid", "scale": -0.5},
    "chosen first": {"score_first": False},
    "chosen first, sigmoid": {"score_first": False, "score": "sigmoid", "renormalize": False},
    "chosen first, sqrtsoftplus": {"score_first": False, "score": "sqrtsoftplus", "scale": 3.0},
    "bias": {"bias": True},
    "bias, sigmoid": {"bias": True, "score": "sigmoid", "scale": 2.5},
    "bias, chosen first": {"bias": True, "score_first": False},
    "noise": {"noise": True},
    "groups": {"n_groups": 4, "groups_kept": 2},
    "groups by max": {"n_groups": 4, "groups_kept": 2, "group_score": "max"},
    "groups, sigmoid, bias": {"n_groups": 4, "groups_kept": 1, "score": "sigmoid", "bias": True, "scale": 2.5},
    "groups, chosen first": {"n_groups": 8, "groups_kept": 3, "score_first": False},
    "all groups": {"n_groups": 4, "groups_kept": 4},
    "groups without a number": {"n_groups": 8},
    "sequences": {"sequence_length": 3},
    "sequences, sigmoid": {"sequence_length": 6, "score": "sigmoid"},
    "everything": {
        "score": "sqrtsoftplus", "bias": True, "noise": True, "n_groups": 8, "groups_kept": 3, "scale": 0.7,
        "row_mask": True, "sequence_length": 2,
    },
}  # fmt: skip


def given(options, logits):
    made = {
        "bias": rows(1, logits.shape[-1], seed=7)[0] / 4,
        "noise": rows(len(logits), logits.shape[-1], seed=8),
        "row_mask": torch.arange(len(logits)) % 4 != 1,
    }
    return options | {name: each.to(logits.device) for name, each in made.items() if options.get(name) is True}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, dtype, device):
    x = rows(12, 64, dtype)
    options = given(OPTIONS[name], x)
    found = route(x.to(device), 6, **given(OPTIONS[name], x.to(device)), **EVERYTHING)
    assert_output(found, naive(x, 6, **options, **EVERYTHING))


@pytest.mark.parametrize(("n_experts", "k"), SIZES)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_sizes(n_experts, k, score, device):
    x = rows(5, n_experts, seed=n_experts)
    assert_output(route(x.to(device), k, score=score, **EVERYTHING), naive(x, k, score=score, **EVERYTHING))


@pytest.mark.parametrize("shape", [(16,), (0, 16), (4, 3, 16), (2, 1, 2, 16)], ids=str)
def test_shapes(shape, device):
    x = rows(max(1, math.prod(shape[:-1])), 16)[: math.prod(shape[:-1])].view(shape)
    found = route(x.to(device), 3, **EVERYTHING)
    assert found.weights.shape == found.indices.shape == (*shape[:-1], 3)
    assert found.dense.shape == shape
    if x.numel():
        assert_output(found, naive(x, 3, **EVERYTHING))
    else:
        assert found.aux_loss == found.z_loss == 0


def test_strides_do_not_matter(device):
    x = rows(12, 16).to(device)
    wanted = route(x, 3, **EVERYTHING)
    for each in (x.t().contiguous().t(), torch.cat([x, x], 1)[:, :16], x.repeat_interleave(2, 0)[::2]):
        for ours, theirs in zip(route(each, 3, **EVERYTHING), wanted, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"score": "sigmoid"}, {"score_first": False}, {"n_groups": 4, "groups_kept": 2},
        {"n_groups": 4, "groups_kept": 2, "group_score": "max"},
    ],
    ids=str,
)  # fmt: skip
def test_equal_logits_go_to_the_lowest_experts(options, device):
    x = torch.zeros(3, 16, device=device)
    x[1, 1::2] = -0.0  # which is 0.0
    x[2] = 3.0
    found = route(x, 5, **options)
    assert found.indices.tolist() == [[0, 1, 2, 3, 4]] * 3
    torch.testing.assert_close(found.weights, torch.full((3, 5), 0.2, device=device))


def test_an_underflow_is_no_tie(device):
    x = torch.tensor([[0.0, -200.0, -150.0, -300.0, -120.0]], device=device)
    assert route(x, 4).indices.tolist() == [[0, 4, 2, 1]]
    # With a bias scores are compared, and those of float32 are 0.
    assert route(x, 4, bias=torch.zeros(5, device=device)).indices.tolist() == [[0, 1, 2, 3]]


def test_only_the_choice_hears_of_the_bias(device):
    x = rows(6, 16).to(device)
    bias = torch.zeros(16, device=device)
    bias[[3, 9]] = torch.tensor([50.0, 60.0], device=device)
    found = route(x, 2, score="sigmoid", bias=bias, renormalize=False)
    assert found.indices.tolist() == [[9, 3]] * 6
    torch.testing.assert_close(found.weights, x[:, [9, 3]].sigmoid())


@pytest.mark.parametrize("options", [{}, {"score_first": False}, {"bias": True}], ids=str)
def test_no_expert_of_a_foreign_group_is_chosen(options, device):
    x = torch.full((1, 8), -INF)
    x[0, 4] = 1.0  # of its group the others have -inf, as all of the lower group
    options = options | {"bias": torch.full((8,), -INF).index_fill(0, torch.tensor([4]), 0.0)} if options else options
    options = {key: each.to(device) if isinstance(each, torch.Tensor) else each for key, each in options.items()}
    found = route(x.to(device), 3, n_groups=2, groups_kept=1, group_score="max", **options)
    assert found.indices.tolist() == [[4, 5, 6]]
    assert found.weights.tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("score_first", [True, False])
def test_rows_without_a_distribution_are_routed_nowhere(score, score_first, device):
    x = rows(6, 8)
    x[0, 3], x[2, 5], x[4], x[5, 1:] = NAN, INF, -INF, -INF
    options = {"score": score, "score_first": score_first, **EVERYTHING}
    leaf = x.to(device).requires_grad_()
    found = route(leaf, 3, **options)
    assert_output(found, naive(x, 3, **options))
    gone = [0, 2, 4]
    assert (found.indices[gone] == -1).all()
    assert (found.weights[gone] == 0).all()
    assert (found.dense[gone] == 0).all()
    weight = torch.linspace(-1, 1, 18, device=device).view(6, 3)
    total = (
        (found.weights * weight).sum() + found.aux_loss + found.z_loss + found.prob_sums[1] + found.dense[:, 2].sum()
    )
    (dx,) = torch.autograd.grad(total, leaf)
    assert dx.isfinite().all()
    assert (dx[gone] == 0).all()
    assert (dx[[1, 3]] != 0).any()


def test_noise_comes_before_all_else(device):
    x, noise = rows(5, 16).to(device), rows(5, 16, seed=3).to(device)
    noise[2, 7] = NAN
    found, wanted = route(x, 3, noise=noise, **EVERYTHING), route(x + noise, 3, **EVERYTHING)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs)
    assert found.indices[2].tolist() == [-1, -1, -1]


def test_a_bias_without_order_routes_nothing(device):
    bias = torch.zeros(8, device=device)
    bias[5] = NAN
    found = route(rows(3, 8).to(device), 2, bias=bias, **EVERYTHING)
    assert (found.indices == -1).all()
    assert not found.weights.any()
    assert not found.counts.any()
    assert found.aux_loss == found.z_loss == 0


@pytest.mark.parametrize("filled", [0.0, NAN])
def test_rows_that_are_masked_count_nowhere(filled, device):
    x = rows(12, 16)
    mask = torch.tensor([True, False, True, True, False, False] * 2)
    kept = route(x[mask].to(device), 3, return_aux_loss=True, return_z_loss=True)
    x[~mask] = filled
    leaf = x.to(device).requires_grad_()
    found = route(leaf, 3, row_mask=mask.to(device), return_aux_loss=True, return_z_loss=True)
    assert torch.equal(found.weights[mask], kept.weights)
    assert torch.equal(found.indices[mask], kept.indices)
    assert (found.indices[~mask] == -1).all()
    assert not found.weights[~mask].any()
    assert torch.equal(found.counts, kept.counts)
    for name in ("prob_sums", "aux_loss", "z_loss"):
        torch.testing.assert_close(getattr(found, name), getattr(kept, name))
    (dx,) = torch.autograd.grad(found.aux_loss + found.z_loss + found.weights[:, 0].sum(), leaf)
    assert not dx[~mask].any()


def test_balance_is_one_and_sequences_have_each_their_own(device):
    x = 20 * torch.eye(8, device=device)
    torch.testing.assert_close(route(x, 1, return_aux_loss=True).aux_loss.item(), 1.0)
    same = x[:1].expand(8, 8)
    torch.testing.assert_close(route(same, 1, return_aux_loss=True).aux_loss.item(), 8.0, rtol=1e-5, atol=0)
    both = torch.cat([x, same])
    found = route(both, 1, return_aux_loss=True, sequence_length=8)
    torch.testing.assert_close(found.aux_loss.item(), 4.5, rtol=1e-5, atol=0)
    assert torch.equal(found.counts, route(both, 1).counts)
    mask = torch.arange(16, device=device) < 8  # the second sequence is padding
    found = route(both, 1, return_aux_loss=True, sequence_length=8, row_mask=mask)
    torch.testing.assert_close(found.aux_loss.item(), 1.0)


REPLAYED = torch.tensor([[3, 0, 7], [-1, 5, -1], [-1, -1, -1], [2, 6, 1]])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"score_first": False}, {"score": "sigmoid", "scale": 2.0}, {"renormalize": False}],
    ids=str,
)
def test_replay(options, dtype, device):
    x = rows(4, 8)
    found = route(x.to(device), 3, indices=REPLAYED.to(device, dtype), **options, **EVERYTHING)
    assert_output(found, naive(x, 3, indices=REPLAYED, **options, **EVERYTHING))
    assert found.indices.tolist() == REPLAYED.tolist()


def test_what_was_chosen_is_replayed_with_its_gradient(device):
    x = rows(6, 16).to(device)
    mask = torch.arange(6, device=device) != 2
    bias = rows(1, 16, seed=5)[0].to(device)
    options = {"score": "sigmoid", "row_mask": mask, **EVERYTHING}
    indices, found = None, []
    for more in ({"bias": bias, "n_groups": 4, "groups_kept": 2}, {}):
        leaf = x.clone().requires_grad_()
        out = route(leaf, 4, **options, **more, indices=indices)
        total = (out.weights * torch.arange(4, device=device)).sum() + out.aux_loss + out.z_loss
        found.append((*out, *torch.autograd.grad(total, leaf)))
        indices = out.indices
    for ours, theirs in zip(*found, strict=True):  # rows of groups are added up in another order
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("row", [[1, 8, 2], [1, -2, 2], [1, 2, 1], [2**31 - 1, 0, 1]], ids=str)
def test_foreign_and_repeated_ids(row, device, monkeypatch):
    indices = torch.tensor([[0, 1, 2], row, [-1, -1, 4]], dtype=torch.int32)
    x, mask = rows(3, 8), torch.tensor([True, False, True])
    with monkeypatch.context() as patched:
        patched.setattr(fused_softmax.ops.routing.route, "checks_values", lambda *_: False)
        found = route(x.to(device), 3, indices=indices.to(device), **EVERYTHING)
    others = naive(x, 3, indices=torch.where(mask[:, None], indices, -1), row_mask=mask, **EVERYTHING)
    assert found.weights[1].isnan().all()
    assert found.dense[1].isnan().all()
    assert found.indices[1].tolist() == [-1, -1, -1]
    of_row = mask.to(device)[:, None]
    assert_output(
        found._replace(weights=found.weights.where(of_row, 0.0), dense=found.dense.where(of_row, 0.0)), others
    )
    for name in ("CHECK", "readable"):
        with monkeypatch.context() as patched:
            patched.setattr(fused_softmax.core.route, name, True if name == "CHECK" else lambda _: True)
            patched.setattr(fused_softmax.core.route, "on_device", lambda _: False)
            with pytest.raises(IndexError, match=r"route: indices of shape \(3, 3\) must "):
                route(x.to(device), 3, indices=indices.to(device))
            route(x.to(device), 3, indices=indices.to(device), row_mask=mask.to(device))  # the row does not count


@pytest.mark.parametrize("name", ["plain", "raw sigmoid", "chosen first", "groups, sigmoid, bias", "sqrtsoftplus"])
def test_a_row_is_routed_the_same_in_any_batch(name, device):
    x = peaked(67, 160, torch.bfloat16).to(device)
    options = {key: each for key, each in given(OPTIONS[name], x).items() if key != "noise"}
    whole = route(x, 6, **options, dense=True)
    for part in (slice(0, 1), slice(5, 6), slice(3, 40), slice(66, 67)):
        found = route(x[part].clone(), 6, **options, dense=True)
        for field in ("weights", "indices", "dense"):
            assert torch.equal(getattr(found, field), getattr(whole, field)[part]), field


GRADIENTS = [
    {},
    {"score": "sigmoid", "renormalize": False, "scale": 1.5},
    {"score": "sqrtsoftplus", "sequence_length": 2},
    {"score_first": False},
    {"score_first": False, "score": "sigmoid"},
    {"score": "sigmoid", "n_groups": 2, "groups_kept": 1, "bias": torch.linspace(-0.1, 0.1, 6)},
    {"noise": torch.linspace(-1, 1, 24).view(4, 6), "row_mask": torch.tensor([True, True, False, True])},
    {"indices": torch.tensor([[4, 0], [-1, 3], [-1, -1], [1, 2]])},
    {"indices": torch.tensor([[4, 0], [-1, 3], [-1, -1], [1, 2]]), "score_first": False},
]


@pytest.mark.parametrize("options", GRADIENTS, ids=[str(i) for i in range(len(GRADIENTS))])
def test_gradients(options):
    x = rows(4, 6).double().requires_grad_()

    def differentiable(x):
        out = reference.route(x, 2, **options, **EVERYTHING)
        return out.weights, out.prob_sums, out.aux_loss, out.z_loss, out.dense

    assert torch.autograd.gradcheck(differentiable, x)
    assert torch.autograd.gradgradcheck(differentiable, x)


def test_the_gradient_has_the_logits_dtype_and_what_has_none_says_so(device):
    x = rows(4, 8, torch.bfloat16).to(device).requires_grad_()
    out = route(x, 2, **EVERYTHING)
    assert not out.indices.requires_grad
    assert not out.counts.requires_grad
    (out.weights[:, 0].sum() + out.aux_loss).backward()
    assert x.grad.dtype == torch.bfloat16
    for name, each in (("bias", torch.zeros(8)), ("noise", torch.zeros(4, 8))):
        constant = each.to(device).requires_grad_()
        with pytest.raises(RuntimeError, match=f"route: {name} of shape .* requires grad"):
            route(x, 2, **{name: constant})
        with torch.no_grad():
            route(x, 2, **{name: constant})


def taken(x):
    out = route(x, 3, score="sigmoid", n_groups=4, groups_kept=2, dense=True, return_aux_loss=True, return_z_loss=True)
    return out.weights, out.indices, out.counts, out.prob_sums, out.aux_loss, out.z_loss, out.dense


@pytest.mark.parametrize("way", ["vmap", "compile", "func.grad", "deterministic"])
def test_transforms(way, device):
    x = rows(12, 16).to(device)
    if way == "vmap":
        many = x.view(3, 4, 16)
        found, wanted = (
            torch.func.vmap(taken)(many),
            [torch.stack(each) for each in zip(*map(taken, many), strict=True)],
        )
    elif way == "compile":
        torch._dynamo.reset()
        found, wanted = torch.compile(taken, backend="aot_eager", fullgraph=True)(x), taken(x)
    elif way == "func.grad":
        total = lambda x: taken(x)[0][:, 0].sum() + taken(x)[4]  # noqa: E731
        leaf = x.clone().requires_grad_()
        found, wanted = [torch.func.grad(total)(x)], torch.autograd.grad(total(leaf), leaf)
    else:
        torch.use_deterministic_algorithms(True)
        try:
            found, wanted = taken(x), taken(x)
        finally:
            torch.use_deterministic_algorithms(False)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dynamic", [True, None])
def test_compiled_code_takes_any_sizes_and_numbers(dynamic, device):
    def weights(x, k, length):
        return route(x, k, score="sigmoid", sequence_length=length, return_aux_loss=True)[:5]

    torch._dynamo.reset()
    compiled = torch.compile(weights, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for n, k, length in [(8, 2, 2), (12, 3, 4), (16, 4, 8)]:
        x = rows(n, 16).to(device)
        for ours, theirs in zip(compiled(x, k, length), weights(x, k, length), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_torch_jit_traces_torchs_operations(device):
    x = rows(4, 8).to(device)
    traced = torch.jit.trace(lambda x: route(x, 2)[:4], (x,), check_trace=False)
    for ours, theirs in zip(traced(-x), route(-x, 2)[:4], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_the_module(device):
    x = rows(10, 12).view(2, 5, 12).to(device)
    module = nn.Router(12, 16, 3, bias=True, choice_bias=True, score="sigmoid", scale=2.0, **EVERYTHING).to(device)
    module.choice_bias += rows(1, 16, seed=2)[0].to(device)
    mask = torch.arange(10, device=device).view(2, 5) % 3 != 0
    logits = torch.nn.functional.linear(x, module.linear_weight, module.linear_bias)
    noise = rows(10, 16, seed=4).view(2, 5, 16).to(device)
    wanted = route(
        logits, 3, bias=module.choice_bias, score="sigmoid", scale=2.0, noise=noise, row_mask=mask, **EVERYTHING
    )
    for ours, theirs in zip(module(x, noise=noise, row_mask=mask), wanted, strict=True):
        assert torch.equal(ours, theirs)
    again = module(x, indices=wanted.indices, noise=noise, row_mask=mask)
    torch.testing.assert_close(again.weights, wanted.weights)
    assert set(module.state_dict()) == {"linear_weight", "linear_bias", "choice_bias"}
    assert set(nn.Router(12, 16, 3).state_dict()) == {"linear_weight"}
    assert repr(nn.Router(12, 16, 3, score="sigmoid")) == (
        "Router(in_features=12, num_experts=16, k=3, bias=False, choice_bias=False, score='sigmoid')"
    )
    single = nn.Router(12, 16, 3, device=device, dtype=torch.float32)
    wanted = route(torch.nn.functional.linear(x.bfloat16().float(), single.linear_weight), 3)
    assert torch.equal(single(x.bfloat16()).weights, wanted.weights)
    for option in ("experts", "indices", "row_mask", "noise"):
        with pytest.raises(TypeError, match=option):
            nn.Router(12, 16, 3, **{option: None})
