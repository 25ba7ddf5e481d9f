"""Routers of transformers' mixtures of experts by `route`, and their load-balancing loss by its counts and sums."""

import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fused_softmax.hf.deferred import Mixin
from fused_softmax.ops.routing.route import route

BALANCE = "load_balancing_loss_func"


def _product(router: Any, hidden: Tensor) -> Tensor:
    return F.linear(hidden, router.weight, getattr(router, "bias", None))


def _wide_product(router: Any, hidden: Tensor) -> Tensor:
    return F.linear(hidden.float(), router.weight.float())


def _widened_product(router: Any, hidden: Tensor) -> Tensor:
    return F.linear(hidden, router.weight).float()


def _product_as_weight(router: Any, hidden: Tensor) -> Tensor:
    return F.linear(hidden.to(router.weight.dtype), router.weight)


def _product_without_autocast(router: Any, hidden: Tensor) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        return _wide_product(router, hidden)


class Recipe(NamedTuple):
    """How a class of routers computes.

    options: those of route, from the router. product: its logits, from the router and its input. lowered: whose dtype
    its weights get, that of its "logits" or of its "input", or None for float32.
    """

    options: Callable[[Any], dict[str, Any]]
    product: Callable[[Any, Tensor], Tensor] = _product
    lowered: str | None = None


def _renormalized(router: Any) -> dict[str, Any]:
    return {"renormalize": bool(getattr(router, "norm_topk_prob", True))}


def _chosen_first(router: Any) -> dict[str, Any]:
    return {"score_first": False}


def _deepseek_v3(router: Any) -> dict[str, Any]:
    return _renormalized(router) | {
        "score": "sigmoid", "bias": router.e_score_correction_bias, "n_groups": router.num_group,
        "groups_kept": router.topk_group, "scale": router.routed_scaling_factor,
    }  # fmt: skip


def _deepseek_v2(router: Any) -> dict[str, Any]:
    found = {"renormalize": False, "scale": router.routed_scaling_factor}
    if router.topk_method == "group_limited_greedy":
        found |= {"n_groups": router.num_group, "groups_kept": router.topk_group, "group_score": "max"}
    return found


def _ernie(router: Any) -> dict[str, Any]:
    return {"bias": router.moe_statics.e_score_correction_bias.squeeze(0).detach()}


def _sigmoid(router: Any) -> dict[str, Any]:
    return {"score": "sigmoid", "bias": router.e_score_correction_bias}


_QWEN3 = Recipe(_renormalized, lowered="logits")
_DEEPSEEK_V3 = Recipe(_deepseek_v3, _wide_product, "logits")
_DEEPSEEK_V2 = Recipe(_deepseek_v2, _wide_product)
_RECIPES = {
    **dict.fromkeys(("Mixtral", "MiniMax"), Recipe(_renormalized)),
    **dict.fromkeys(
        (
            "FlexOlmo", "Mellum", "Olmoe", "Qwen2Moe", "Qwen3Moe", "Qwen3Next", "Qwen3OmniMoeThinkerText",
            "Qwen3OmniMoeTalkerText", "Qwen4ExpText", "Qwen3_5Moe", "Qwen3OmniMoeText", "Qwen3VLMoeText",
        ),
        _QWEN3,
    ),
    "LaraMini": Recipe(_renormalized, _wide_product, "input"),
    **dict.fromkeys(("GptOss", "AriaText"), Recipe(_chosen_first, lowered="logits")),
    **dict.fromkeys(
        ("GraniteMoe", "GraniteMoeSWA", "GraniteMoeHybrid", "GraniteMoeShared"),
        Recipe(_chosen_first, _widened_product, "input"),
    ),
    **dict.fromkeys(
        (
            "AXK1", "BailingHybrid", "DeepseekV3", "DeepseekV32", "Dots1", "Dots3NoteText", "ExaoneMoe", "Glm4Moe",
            "Glm4MoeLite", "Glm4vMoeText", "Glm5NextText", "GlmMoeDsa", "HYV4", "HYV4VL", "KimiLinear", "MiMoV2Flash",
            "NemotronH", "SolarOpen",
        ),
        _DEEPSEEK_V3,
    ),
    **dict.fromkeys(("DeepseekV2", "DeepseekOcr2Text", "UnlimitedOcrText"), _DEEPSEEK_V2),
    **dict.fromkeys(("Ernie4_5_Moe", "Ernie4_5_VLMoeMoe"), Recipe(_ernie, _product_without_autocast, "input")),
    **dict.fromkeys(("MiniMaxM3VL", "Step3p7"), Recipe(_sigmoid, _product_as_weight)),
}  # fmt: skip


def recipe_of(kind: type) -> Recipe | None:
    """How a class of transformers' own routes; None for a class that this file does not know."""
    name, in_transformers = kind.__name__, kind.__module__.startswith("transformers.models.")
    stem = next((name.removesuffix(end) for end in ("TopKRouter", "TopkRouter") if name.endswith(end)), None)
    return _RECIPES.get(stem) if stem is not None and in_transformers else None


class Router(Mixin, nn.Module):
    """A router whose choice and weights are route's. Its logits are made as before, and returned as before."""

    @classmethod
    def members_for(cls, base: Any) -> dict[str, Any]:
        recipe, plain = recipe_of(base), base.forward
        assert recipe is not None

        @wraps(plain)
        def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            if hidden_states.dtype == torch.float64:  # which route does not take
                return base.forward(self, hidden_states)
            return routed(self, hidden_states, recipe)

        return {"forward": forward}


def routed(router: Any, hidden: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, weights, indices) of a router of transformers, which gives every row some experts.

    route gives none to a row of NaN or inf, whose weights are NaN here, as transformers'.
    """
    logits = recipe.product(router, hidden.reshape(-1, hidden.shape[-1]))
    out = route(logits, router.top_k, return_counts=False, **recipe.options(router))
    dtype = {None: torch.float32, "logits": logits.dtype, "input": hidden.dtype}[recipe.lowered]
    weights = out.weights.masked_fill(out.indices < 0, torch.nan)
    return logits, weights.to(dtype), out.indices.clamp(min=0).long()


@torch.no_grad()
def check(router: Any) -> None:
    """Raise RuntimeError if a class does not route as its recipe says, as one of another transformers may not.

    It is tried on a router of the same options, with small random tensors on the CPU in place of its own.
    """
    kind = type(router)
    recipe = recipe_of(kind)
    assert recipe is not None
    generator = torch.Generator("cpu").manual_seed(0)
    tried = _with_random_tensors(router, generator)
    hidden = torch.randn(64, router.weight.shape[-1], generator=generator, device="cpu")
    theirs, ours = kind.forward(tried, hidden), routed(tried, hidden, recipe)
    wanted, found = (
        torch.zeros_like(logits).scatter_(-1, at, of.to(logits.dtype)) for logits, of, at in (theirs, ours)
    )
    if not torch.allclose(found, wanted, rtol=1e-4, atol=1e-5):
        raise RuntimeError(
            f"fused_softmax.hf.apply: {kind.__name__} of the installed transformers does not route as route does by "
            f"{recipe.options(tried)}; leave routers out of parts"
        )


def _with_random_tensors(module: nn.Module, generator: torch.Generator) -> Any:
    made = object.__new__(type(module))
    made.__dict__.update(module.__dict__)
    for name in ("_parameters", "_buffers"):
        tensors = getattr(module, name)
        made.__dict__[name] = {
            key: each if each is None else torch.randn(each.shape, generator=generator, device="cpu") / 3
            for key, each in tensors.items()
        }
    made.__dict__["_modules"] = {k: _with_random_tensors(each, generator) for k, each in module._modules.items()}  # type: ignore[arg-type]
    return made


class _Serving(threading.local):
    """How many forward passes of models with routers of ours are open in this thread."""

    def __init__(self) -> None:
        self.depth = 0


serving = _Serving()
_stand_ins: dict[str, list[Any]] = {}  # module: [how many models, its own function]


def balance(module: str) -> None:
    """Put the loss of a module of transformers on route, for models that are served."""
    home = sys.modules[module]
    plain = getattr(home, BALANCE, None)
    if plain is None:
        return
    if module in _stand_ins:
        _stand_ins[module][0] += 1
        return
    _stand_ins[module] = [1, plain]

    @wraps(plain)
    def load_balancing_loss_func(
        gate_logits: Any, num_experts: int | None = None, top_k: int = 2, attention_mask: Tensor | None = None
    ) -> Any:
        plain_mask = attention_mask is None or attention_mask.ndim == 2
        takes = isinstance(gate_logits, tuple) and all(each.dtype != torch.float64 for each in gate_logits)
        if not serving.depth or not takes or not plain_mask:
            return plain(gate_logits, num_experts, top_k, attention_mask)
        return balanced(gate_logits, top_k, attention_mask)

    setattr(home, BALANCE, load_balancing_loss_func)


def unbalance(module: str) -> None:
    """Undo one `balance`."""
    if module not in _stand_ins:
        return
    _stand_ins[module][0] -= 1
    if not _stand_ins[module][0]:
        setattr(sys.modules[module], BALANCE, _stand_ins.pop(module)[1])


def balanced(layers: tuple[Tensor, ...], k: int, attention_mask: Tensor | None) -> Tensor:
    """transformers' loss of all layers together: n_experts * sum(f * P), f without the 1 / k of `route`'s aux loss.

    layers: logits [batch * length, n_experts] of each. attention_mask: [batch, length], 0 at padding.
    """
    logits = torch.cat([each.to(layers[0].device) for each in layers])
    mask = None
    n_rows: Any = logits.shape[0]
    if attention_mask is not None:
        mask = (attention_mask.to(logits.device).reshape(-1) != 0).repeat(len(layers))
        n_rows = mask.sum()
    out = route(logits, k, row_mask=mask)
    return logits.shape[-1] * (out.counts / n_rows * (out.prob_sums / n_rows)).sum()
