"""route beside the routers of transformers' models: choices, weights, gradients, and their load-balancing loss."""

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter, load_balancing_loss_func
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from fused_softmax import route

pytestmark = pytest.mark.guard
HIDDEN, N_EXPERTS, K = 24, 16, 4
SIZE = {"hidden_size": HIDDEN, "num_experts_per_tok": K}
ROUTERS = {
    "mixtral": (MixtralTopKRouter, transformers.MixtralConfig, {"num_local_experts": N_EXPERTS}, {}),
    "qwen3_moe": (
        Qwen3MoeTopKRouter, transformers.Qwen3MoeConfig, {"num_experts": N_EXPERTS, "norm_topk_prob": True}, {},
    ),
    "qwen3_moe, raw": (
        Qwen3MoeTopKRouter, transformers.Qwen3MoeConfig, {"num_experts": N_EXPERTS, "norm_topk_prob": False},
        {"renormalize": False},
    ),
    "deepseek_v2": (
        DeepseekV2TopkRouter, transformers.DeepseekV2Config,
        {
            "n_routed_experts": N_EXPERTS, "n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 16.0, "num_attention_heads": 2,
        },
        {"n_groups": 8, "groups_kept": 3, "group_score": "max", "renormalize": False, "scale": 16.0},
    ),
    "deepseek_v3": (
        DeepseekV3TopkRouter, transformers.DeepseekV3Config,
        {"n_routed_experts": N_EXPERTS, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
        {"score": "sigmoid", "n_groups": 4, "groups_kept": 2, "scale": 2.5},
    ),
    "gpt_oss": (GptOssTopKRouter, transformers.GptOssConfig, {"num_local_experts": N_EXPERTS}, {"score_first": False}),
    "ernie4_5_moe": (
        Ernie4_5_MoeTopKRouter, transformers.Ernie4_5_MoeConfig, {"moe_num_experts": N_EXPERTS, "moe_k": K}, {},
    ),
}  # fmt: skip


def made(name):
    """A router of transformers with random weights, and the options of route that are its own."""
    kind, config, sizes, options = ROUTERS[name]
    router = kind(config(**SIZE | sizes))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for each in (*router.parameters(), *router.buffers()):
            each.copy_(torch.randn(each.shape, generator=generator) / 3)
    if name == "deepseek_v3":
        options = options | {"bias": router.e_score_correction_bias}
    if name == "ernie4_5_moe":
        options = options | {"bias": router.moe_statics.e_score_correction_bias.squeeze().detach()}
    return router, options


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_of_transformers(name, device):
    router, options = made(name)
    router.to(device)
    options = {key: each.to(device) if isinstance(each, torch.Tensor) else each for key, each in options.items()}
    x = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(1)).to(device)
    logits, weights, indices = router(x)
    out = route(logits, K, **options)
    order = indices.argsort(-1)  # DeepSeek's are in no order
    ours = out.indices.long().argsort(-1)
    assert torch.equal(out.indices.long().gather(-1, ours), indices.gather(-1, order))
    torch.testing.assert_close(out.weights.gather(-1, ours), weights.gather(-1, order), rtol=1e-5, atol=1e-7)
    if not name.startswith("deepseek"):
        assert torch.equal(out.indices.long(), indices)
    by_expert = torch.linspace(-1, 1, N_EXPERTS, device=device)
    found, wanted = (
        torch.autograd.grad((w * by_expert[of.long()]).sum(), router.weight, retain_graph=True)[0]
        for w, of in ((out.weights, out.indices), (weights, indices))
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_the_load_balancing_loss_of_transformers(masked, device):
    generator = torch.Generator().manual_seed(2)
    layers = [torch.randn(2 * 12, N_EXPERTS, generator=generator).to(device).requires_grad_() for _ in range(3)]
    mask = (torch.arange(12, device=device) < torch.tensor([[12], [7]], device=device)) if masked else None
    wanted = load_balancing_loss_func(tuple(layers), N_EXPERTS, K, None if mask is None else mask.long())
    routed = [route(each, K, row_mask=None if mask is None else mask.flatten()) for each in layers]
    n_rows = len(layers) * (24 if mask is None else 19)
    counts, prob_sums = sum(each.counts for each in routed), sum(each.prob_sums for each in routed)
    found = N_EXPERTS * (counts / n_rows * (prob_sums / n_rows)).sum()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
    for ours, theirs in zip(torch.autograd.grad(found, layers), torch.autograd.grad(wanted, layers), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-8)
    if mask is None:  # of one layer it is k times the aux loss
        aux = route(layers[0], K, return_aux_loss=True).aux_loss
        torch.testing.assert_close(K * aux, load_balancing_loss_func((layers[0],), N_EXPERTS, K))
