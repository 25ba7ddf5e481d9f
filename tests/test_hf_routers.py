"""Routers of transformers on route by fused_softmax.hf.apply, and the loss that balances their experts."""

import importlib
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import hf_applied
import hf_models
import transformers
from hf_applied import LOSS, close, inputs, listened, made, pair, trained

from fused_softmax import explain, hf
from fused_softmax.core.route import Route
from fused_softmax.hf import routers
from fused_softmax.ops.routing import route as routing

FLAT = ("AriaText", "Ernie", "GptOss", "Granite")  # which are given rows alone
ROUTER = re.compile(r"^class \w+Top[Kk]Router\b", re.MULTILINE)  # in a source, so that few are imported
MIXTURES = [name for name, (_, _, ran) in hf_applied.MODELS.items() if "route" in ran]


@pytest.fixture(autouse=True)
def _by_torch(monkeypatch):
    """route of torch's operations, by which many small routers take little time; test_route_hf.py has its kernels."""
    monkeypatch.setattr(routing, "route_of", lambda *tensors, **_: Route.COMPOSED)


def classes():
    """Classes of routers of the installed transformers that a recipe names."""
    found = {}
    for folder in hf_models.folders():
        path = f"transformers.models.{folder}.modeling_{folder}"
        file = Path(transformers.__file__).parent / "models" / folder / f"modeling_{folder}.py"
        if not file.exists() or not ROUTER.search(file.read_text()):
            continue
        try:
            home = importlib.import_module(path)
        except ImportError:
            continue
        for name, each in vars(home).items():
            if isinstance(each, type) and each.__module__ == path and routers.recipe_of(each) is not None:
                found[name] = each
    return found


CLASSES = classes()


def router_of(kind):
    """A router that a config of few experts makes; attributes that a config may lack are a small router's."""
    router = kind.__new__(kind)
    torch.nn.Module.__init__(router)
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    router.weight = torch.nn.Parameter(draw(8, 16))
    router.top_k, router.num_experts, router.hidden_dim = 2, 8, 16
    router.norm_topk_prob, router.routed_scaling_factor = True, 1.5
    router.num_group, router.topk_group, router.topk_method = 4, 2, "group_limited_greedy"
    router.norm_min, router.use_sigmoid = 1e-12, True
    router.register_buffer("e_score_correction_bias", draw(8) / 3)
    if kind.__name__ == "GptOssTopKRouter":
        router.bias = torch.nn.Parameter(draw(8))
    if "Ernie" in kind.__name__:
        statics = vars(importlib.import_module(kind.__module__))[kind.__name__.replace("TopKRouter", "Statics")]
        router.moe_statics = statics.__new__(statics)
        torch.nn.Module.__init__(router.moe_statics)
        router.moe_statics.e_score_correction_bias = torch.nn.Parameter(draw(1, 8) / 3, requires_grad=False)
    return router


def test_every_recipe_names_a_class():
    stems = {name.removesuffix("TopKRouter").removesuffix("TopkRouter") for name in CLASSES}
    assert stems == set(routers._RECIPES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CLASSES)
def test_every_class_that_a_recipe_names(name, dtype):
    plain = router_of(CLASSES[name]).to(dtype)
    if "bias" in routers.recipe_of(CLASSES[name]).options(plain):
        plain.e_score_correction_bias = plain.e_score_correction_bias.float()
    ours = router_of(CLASSES[name])
    ours.load_state_dict(plain.state_dict())
    ours.to(dtype)
    ours.e_score_correction_bias = plain.e_score_correction_bias
    routers.check(ours)
    hf.deferred.put(ours, routers.Router)
    x = torch.randn(2, 20, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float32).to(dtype)
    results = []
    with explain() as calls:
        for each in (plain, ours):
            given = x.clone().requires_grad_()
            logits, weights, indices = each(given.flatten(0, 1) if name.startswith(FLAT) else given)
            dense = torch.zeros(len(weights), 8).scatter(-1, indices, weights.float())
            (dense * torch.linspace(-1, 1, 8)).sum().backward()
            results.append((logits, (weights.dtype, indices.dtype), dense, (given.grad, each.weight.grad)))
    assert [each.function for each in calls if "backward" not in each.function] == ["route"]
    loose = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    (w_logits, w_kinds, w_dense, w_gradients), (logits, kinds, dense, gradients) = results
    assert torch.equal(logits, w_logits)
    assert kinds == w_kinds
    torch.testing.assert_close(dense, w_dense, **loose)
    for found, wanted in zip(gradients, w_gradients, strict=True):
        torch.testing.assert_close(found, wanted, **loose)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CLASSES)
def test_dtypes_under_autocast_are_transformers(name, dtype):
    plain, ours = (router_of(CLASSES[name]).to(dtype) for _ in range(2))
    for each in (plain, ours):
        each.e_score_correction_bias = each.e_score_correction_bias.float()
    hf.deferred.put(ours, routers.Router)
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.autocast("cpu", torch.float16):
        wanted, found = plain(x), ours(x)
    assert [each.dtype for each in found] == [each.dtype for each in wanted]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", CLASSES)
def test_a_row_of_nan_has_experts_and_weights_of_nan(name, bad):
    """As transformers', of which a loss is NaN, and a step is skipped. No expert is -1, which none of them takes."""
    plain, ours = (router_of(CLASSES[name]) for _ in range(2))
    hf.deferred.put(ours, routers.Router)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    x[2] = bad
    (_, w_weights, w_indices), (_, weights, indices) = plain(x), ours(x)
    assert w_weights[2].isnan().all()
    torch.testing.assert_close(weights, w_weights, equal_nan=True)
    assert indices.min() >= 0
    rest = [0, 1, 3]
    assert torch.equal(indices[rest], w_indices[rest])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "granite_moe", "ernie4_5_moe"])
def test_the_loss_of_router_logits(name, padded):
    model, plain = pair(name)
    for each in (model, plain):
        each.router_aux_loss_coef = 0.5
    hf.apply(model)
    given = inputs(padded)
    *found, ran = listened(model, given, output_router_logits=True)
    wanted = trained(plain, given, output_router_logits=True)
    close(found, wanted)
    torch.testing.assert_close(found[0].aux_loss, wanted[0].aux_loss, rtol=1e-5, atol=1e-7)
    assert ran["route"] == 2 + 1  # of all layers together, for the loss
    for ours, theirs in zip(found[0].router_logits, wanted[0].router_logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_another_model_of_the_class_keeps_its_own_loss():
    model, plain = pair("mixtral")
    hf.apply(model)
    with explain() as calls:
        trained(plain, inputs(), output_router_logits=True)
    assert list(calls) == []
    assert routers.serving.depth == 0


def test_a_mask_of_another_shape_is_left_to_transformers():
    logits = (torch.randn(12, 8),)
    home = importlib.import_module("transformers.models.mixtral.modeling_mixtral")
    model = made("mixtral")
    applied = hf.apply(model, parts=["routers"])
    routers.serving.depth += 1
    try:
        mask = torch.ones(12, dtype=torch.int64)
        with explain() as calls:
            found = home.load_balancing_loss_func(logits, 8, 2, mask)
        assert list(calls) == []
        torch.testing.assert_close(home.load_balancing_loss_func(logits, 8, 2, mask.view(2, 6)), found)
        assert home.load_balancing_loss_func(None, 8, 2, mask) == 0
    finally:
        routers.serving.depth -= 1
        applied.undo()


@pytest.mark.parametrize("name", MIXTURES)
def test_routers_alone(name):
    model, plain = pair(name)
    hf.apply(model, parts=["routers"])
    *found, ran = listened(model, inputs())
    assert ran == {"route": 2}
    close(found, trained(plain, inputs()))
    assert set(LOSS) & set(ran) == set()
