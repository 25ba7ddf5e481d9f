"""Tiny models of transformers by apply(), held to plain ones: losses, gradients, logits."""

import contextlib
from unittest import mock

import torch
import torch.nn.functional as F
import transformers

import fused_softmax

VOCABULARY, LENGTH, IGNORED = 40, 9, -100
TEXT = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "vocab_size": VOCABULARY, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0,
}  # fmt: skip
EXPERTS = {"num_local_experts": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
SEQ2SEQ = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": VOCABULARY, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "dropout": 0.0,
}  # fmt: skip
DEEPSEEK = TEXT | {
    "num_key_value_heads": 2, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 8, "n_group": 4, "topk_group": 2, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 0, "head_dim": 4,
}  # fmt: skip
# By name: the class, its config, and how often each of ours runs in a forward pass.
LOSS = {"linear_cross_entropy": 1}
MODELS = {
    "llama": ("LlamaForCausalLM", TEXT, LOSS),
    "llama, tied": ("LlamaForCausalLM", TEXT | {"tie_word_embeddings": True}, LOSS),
    "qwen3": ("Qwen3ForCausalLM", TEXT, LOSS),
    "mistral": ("MistralForCausalLM", TEXT | {"sliding_window": 4}, LOSS),
    "phi, a head with bias": ("PhiForCausalLM", TEXT | {"resid_pdrop": 0, "embd_pdrop": 0}, LOSS),
    "gpt2": ("GPT2LMHeadModel", {
        "n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": VOCABULARY, "n_positions": 32, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    }, LOSS),
    "gemma2": ("Gemma2ForCausalLM", TEXT | {
        "final_logit_softcapping": 0.7, "attn_logit_softcapping": 1.5, "sliding_window": 32,
    }, LOSS | {"attention": 2}),
    "gemma3": ("Gemma3ForCausalLM", TEXT | {"final_logit_softcapping": 0.7, "sliding_window": 32}, LOSS),
    "cohere, a scale": ("CohereForCausalLM", TEXT | {"logit_scale": 3.0}, LOSS),
    "granite, a divisor": ("GraniteForCausalLM", TEXT | {"logits_scaling": 0.3}, LOSS),
    "t5": ("T5ForConditionalGeneration", {
        "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY,
        "dropout_rate": 0.0, "relative_attention_num_buckets": 8, "decoder_start_token_id": 1, "pad_token_id": 0,
        "eos_token_id": 2, "tie_word_embeddings": True,
    }, LOSS | {"attention": 6}),
    "bart, a bias added": ("BartForConditionalGeneration", SEQ2SEQ, LOSS),
    "gpt_oss": ("GptOssForCausalLM", TEXT | EXPERTS | {
        "experts_implementation": "eager", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }, LOSS | {"attention": 2, "route": 2}),
    "mixtral": ("MixtralForCausalLM", TEXT | EXPERTS, LOSS | {"route": 2}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", TEXT | EXPERTS, LOSS | {"route": 2}),
    "granite_moe": ("GraniteMoeForCausalLM", TEXT | EXPERTS, LOSS | {"route": 2}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", DEEPSEEK | {"topk_method": "group_limited_greedy"}, LOSS | {"route": 2}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", DEEPSEEK, LOSS | {"route": 2}),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", TEXT | {
        "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 8, "moe_layer_start_index": 0,
        "moe_num_shared_experts": 1,
    }, LOSS | {"route": 2}),
}  # fmt: skip


def made(name, implementation=None):
    """A model whose weights are such that a wrong loss, mask or choice shows."""
    kind, options, _ = MODELS[name]
    of = getattr(transformers, kind)
    if implementation is not None:
        options = options | {"attn_implementation": implementation}
    model = of(of.config_class(**options))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for at, each in (*model.named_parameters(), *model.named_buffers()):
            if each.is_floating_point() and "inv_freq" not in at and "scale" not in at:
                each.copy_(torch.randn(each.shape, generator=generator) / max(each.shape[-1], 4) ** 0.5)
    return model


def pair(name):
    """(a model, another with the same weights that stays plain).

    transformers' "sdpa" leaves out softcaps of attention, as it says, so that the plain one has "eager" there.
    """
    return made(name), made(name, "eager" if "attention" in MODELS[name][2] else None)


def inputs(padded=True):
    """Two rows of tokens, of which the second has padding at its end, and their labels."""
    tokens = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    labels = tokens.clone()
    labels[0, :2] = IGNORED
    if padded:
        mask[1, -3:] = 0
        labels[1, -3:] = IGNORED
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def trained(model, given, **named):
    """(output, gradients) of a forward and a backward pass."""
    model.zero_grad()
    output = model(**given, **named)
    output.loss.backward()
    return output, {at: each.grad.clone() for at, each in model.named_parameters() if each.grad is not None}


def listened(model, given, **named):
    """(output, gradients, how often each of ours ran)."""
    with fused_softmax.explain() as calls:
        found = trained(model, given, **named)
    ran = {}
    for each in calls:
        if not each.function.endswith("backward"):
            ran[each.function] = ran.get(each.function, 0) + 1
    return *found, ran


@contextlib.contextmanager
def products():
    """How many rows of logits a head makes within the block, product by product."""
    rows, linear = [], F.linear

    def counted(input, weight, bias=None):
        if weight.shape[0] == VOCABULARY:
            rows.append(input.shape[:-1].numel())
        return linear(input, weight, bias)

    with mock.patch.object(F, "linear", counted):
        yield rows


def close(found, wanted, rtol=1e-4, atol=1e-5):
    """Losses, and gradients beside the largest of all."""
    torch.testing.assert_close(found[0].loss, wanted[0].loss, rtol=rtol, atol=atol)
    assert found[1].keys() == wanted[1].keys()
    largest = max(each.abs().max().item() for each in wanted[1].values())
    for at, each in wanted[1].items():
        torch.testing.assert_close(found[1][at], each, rtol=10 * rtol, atol=10 * atol * largest, msg=f"{at}: not close")
