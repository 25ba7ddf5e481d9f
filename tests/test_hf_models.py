"""Which attention a model of transformers gets by the name "fused_softmax", and that it computes what "eager" does."""

import warnings

import pytest
import torch

pytest.importorskip("transformers")

import hf_models
import transformers
from transformers import PreTrainedModel

from fused_softmax.core.route import Route
from fused_softmax.hf import attention as hf
from fused_softmax.ops.attention import attention as attention_ops

# Of each way to come by attention, one whose fault would show: its own code, its own code by name, the interface beside
# code of its own, the interface beside code that asks for the name, a cache and a vision tower, an encoder with a bias.
KINDS = {
    "bloom": "eager",
    "mpt": "eager",
    "roformer": "eager",
    "git": "eager",
    "deepseek_v32": "eager",
    "deepseek_v4": hf.NAME,
    "gemma4": hf.NAME,
    "clip": hf.NAME,
}
SMALL = {
    "vocab_size": 60, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 32,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setattr(attention_ops, "route_of", lambda *tensors, **_: Route.COMPOSED)
    hf.register()


def class_of(folder):
    """The folder's model that generates, or its first that can be built."""
    found = [each for each in hf_models.classes_of(folder) if each.__name__ in hf_models.BUILT]
    return next((each for each in found if each.__name__.endswith("ForCausalLM")), found[0])


@pytest.mark.parametrize("folder", KINDS)
def test_outputs_gradients_and_tokens_are_eagers(folder):
    assert hf_models.check(class_of(folder))


@pytest.mark.parametrize("folder", KINDS)
def test_own_code_gets_eager_and_a_warning_says_so(folder):
    of = class_of(folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = hf_models.made(of, 8, hf.NAME)
    assert model.config._attn_implementation == KINDS[folder]
    said = [str(each.message) for each in caught if hf.NAME in str(each.message)]
    assert any(of.__name__ + " computes attention by code of its own" in each for each in said) == (
        KINDS[folder] == "eager"
    )


def test_a_part_gets_eager_and_the_others_do_not():
    vision = transformers.ViTConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    text = transformers.BloomConfig(vocab_size=60, hidden_size=16, n_layer=1, n_head=2)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, text)
    with pytest.warns(UserWarning, match="BloomForCausalLM computes attention by code of its own"):
        model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation=hf.NAME)
    assert model.encoder.config._attn_implementation == hf.NAME
    assert model.decoder.config._attn_implementation == "eager"


def test_own_code_keeps_eager_where_the_name_is_set_later():
    model = hf_models.made(class_of("git"), 8, "eager")
    with pytest.warns(UserWarning, match="GitForCausalLM computes attention by code of its own"):
        model.set_attn_implementation(hf.NAME)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("kept", [1, 2])
def test_the_last_queries_alone_see_what_eagers_see(kept):
    """Gemma 4 takes the last queries' rows of a mask, where it knows that there is one."""
    shared = {"num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 2, "head_dim": 8, "global_head_dim": 8}
    shared |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 60}
    logits = []
    for implementation in ("eager", hf.NAME):
        config = transformers.Gemma4TextConfig(**SMALL, **shared, attn_implementation=implementation)
        model = transformers.Gemma4ForCausalLM(config).eval()
        hf_models.widen(model)
        tokens = torch.randint(5, 60, (2, 8), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            logits.append(model(tokens, logits_to_keep=kept).logits)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_a_model_whose_source_is_not_there_gets_eagers_masks(monkeypatch):
    """As one that is written in a notebook, of which transformers knows as little."""

    class Unseen(transformers.LlamaForCausalLM):
        pass

    monkeypatch.setattr(Unseen, "__module__", "nowhere")
    monkeypatch.setattr(hf, "_EAGERS_MASKS", set())
    config = transformers.LlamaConfig(**SMALL)
    config._attn_implementation = hf.NAME
    Unseen(config)
    given = {"batch_size": 1, "q_length": 3, "kv_length": 3, "dtype": torch.float32, "config": config}
    assert hf.attention_mask(**given).dtype == torch.float32
    monkeypatch.setattr(hf, "_EAGERS_MASKS", set())
    transformers.LlamaForCausalLM(config)
    assert hf.attention_mask(**given) is None


def test_no_mask_hides_nothing_where_the_masks_are_eagers(monkeypatch):
    """Eager's causal masks are always there; BridgeTower's images have none, and yet a module that says is_causal."""
    monkeypatch.setattr(hf, "_EAGERS_MASKS", {transformers.BridgeTowerConfig})
    module = torch.nn.Module()
    module.is_causal = True
    query, key, value = torch.randn(3, 1, 2, 4, 8)
    for config, causal in ((transformers.BridgeTowerConfig(), False), (transformers.LlamaConfig(), True)):
        module.config = config
        found, _ = hf.attention_forward(module, query, key, value, None)
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
        torch.testing.assert_close(found, expected.transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_a_vision_tower_that_says_it_is_causal_is_not():
    """Phi-4's has no mask without padding, and a module with is_causal, which eager's attention does not read."""
    of = transformers.models.phi4_multimodal.modeling_phi4_multimodal.Phi4MultimodalVisionModel
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    pictures, found = torch.randn(1, 3, 16, 16), []
    for implementation in ("eager", hf.NAME):
        config = of.config_class(**sizes, image_size=16, patch_size=4, attn_implementation=implementation)
        model = of(config).eval()
        hf_models.widen(model)
        with torch.no_grad():
            found.append(model(pictures).last_hidden_state)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Llama", "GPT2"])  # GPT-2's attention is not told that they are asked for
def test_weights_that_are_asked_for_raise(name):
    config = getattr(transformers, f"{name}Config")(**SMALL, attn_implementation=hf.NAME)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match=rf"no weights for output_attentions=True of {name}Attention.*eager"):
        model(torch.ones(1, 3, dtype=torch.int64), output_attentions=True)


def test_wide_heads_are_refused_by_an_error_that_names_the_model():
    config = transformers.LlamaConfig(**SMALL, head_dim=264, attn_implementation=hf.NAME)
    with pytest.raises(ValueError, match=r'at most 256.*of LlamaAttention; take attn_implementation="eager" or "sdpa"'):
        transformers.LlamaForCausalLM(config)(torch.ones(1, 3, dtype=torch.int64))


def test_register_wraps_the_choice_once():
    chosen = PreTrainedModel.get_correct_attn_implementation
    hf.register()
    assert PreTrainedModel.get_correct_attn_implementation is chosen
    assert not hasattr(chosen.__wrapped__, hf.NAME)
