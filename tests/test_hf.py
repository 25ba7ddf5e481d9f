"""transformers' models by attention, held to their own eager attention: logits, gradients, tokens of generate()."""

import sys

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers import AttentionInterface, masking_utils

import fused_softmax.hf
from fused_softmax.core.route import Route
from fused_softmax.hf import attention as hf
from fused_softmax.ops.attention import attention as attention_ops

PAD = 0
TEXT = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 30, "max_position_embeddings": 32, "pad_token_id": PAD,
    "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
MODELS = {
    "gpt2": ("GPT2LMHeadModel", {
        "n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 30, "n_positions": 32, "resid_pdrop": 0, "embd_pdrop": 0,
        "attn_pdrop": 0, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": None,
    }),
    "gemma2": ("Gemma2ForCausalLM", TEXT | WINDOWS | {"attn_logit_softcapping": 1.5}),
    "gpt_oss": ("GptOssForCausalLM", TEXT | WINDOWS | {
        "num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }),
    "llama4": ("Llama4ForCausalLM", TEXT | {
        "layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 3, "num_local_experts": 1,
        "intermediate_size_mlp": 8, "no_rope_layers": [1, 0], "moe_layers": [],
    }),
    "bert": ("BertForMaskedLM", {
        "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 30,
        "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0,
    }),
    "t5": ("T5ForConditionalGeneration", {
        "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 2, "vocab_size": 30, "dropout_rate": 0,
        "relative_attention_num_buckets": 8, "decoder_start_token_id": 1, "pad_token_id": PAD, "eos_token_id": None,
    }),
    "swin": ("SwinForImageClassification", {
        "image_size": 8, "patch_size": 1, "num_channels": 1, "embed_dim": 4, "depths": [2], "num_heads": [2],
        "window_size": 4, "num_labels": 3, "drop_path_rate": 0, "hidden_dropout_prob": 0,
        "attention_probs_dropout_prob": 0,
    }),
}  # fmt: skip
DECODERS = ["gpt2", "gemma2", "gpt_oss", "llama4"]
PADDINGS = {"none": (), "left": (0, 1), "right": (4, 5)}


@pytest.fixture(autouse=True)
def _registered():
    hf.register()


@pytest.fixture
def torchs(monkeypatch):
    """attention of torch's operations, by which many small models take little time."""
    monkeypatch.setattr(attention_ops, "route_of", lambda *tensors, **_: Route.COMPOSED)


@pytest.fixture
def asked(monkeypatch):
    """What attention was asked for, call by call: (attn_mask, the arguments after it)."""
    calls = []

    def watched(query, key, value, attn_mask, **arguments):
        calls.append((attn_mask, arguments))
        return fused_softmax.attention(query, key, value, attn_mask, **arguments)

    monkeypatch.setattr(hf, "attention", watched)
    return calls


def model_of(name, device, **options):
    """Wide weights, so that a wrong mask or bias shows."""
    of, arguments = MODELS[name]
    of = getattr(transformers, of)
    config = of.config_class(**arguments | options)
    torch.manual_seed(0)
    model = of(config).to(device)
    for at, parameter in model.named_parameters():
        if parameter.ndim > 1 or "sinks" in at:
            torch.nn.init.normal_(parameter, std=0.4)
    return model.train()


def given_to(name, padding, device):
    """Two rows of six tokens, of which the first has padding, and of labels those that see a token."""
    if name == "swin":
        return {"pixel_values": torch.randn(2, 1, 8, 8, device=device), "labels": torch.tensor([0, 2], device=device)}
    tokens, keep = torch.randint(2, 30, (2, 6), device=device), torch.ones(2, 6, dtype=torch.int64, device=device)
    keep[0, PADDINGS[padding]] = 0
    labels = tokens.masked_fill(keep == 0, -100)
    if padding == "left":
        labels[0, 2] = -100  # predicted where only padding is seen
    if name == "t5":
        labels = tokens[:, :4].contiguous()
    return {"input_ids": tokens.masked_fill(keep == 0, PAD), "attention_mask": keep, "labels": labels}


def outcome(model, given, implementation):
    """Logits where a token stands, the loss and the gradients."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    result = model(**given)
    result.loss.backward()
    logits, keep = result.logits.detach(), given.get("attention_mask")
    if keep is not None and logits.shape[1] == keep.shape[1]:
        logits = logits[keep.bool()]
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return logits, result.loss.detach(), {name: each.clone() for name, each in gradients.items()}


def check(name, padding, device, **options):
    model, given = model_of(name, device, **options), given_to(name, padding, device)
    expected = outcome(model, given, "eager")
    torch.testing.assert_close(outcome(model, given, hf.NAME), expected, rtol=1e-4, atol=1e-5)
    return expected[2]


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", [*DECODERS, "bert", "t5"])
def test_logits_and_gradients_are_eagers(name, padding, torchs, asked, device):
    check(name, padding, device)
    assert asked


def test_a_window_of_images_with_its_bias(torchs, asked, device):
    """Of which the second layer's is shifted: its bias is a mask for every window too."""
    gradients = check("swin", "none", device)
    assert [tuple(mask.shape) for mask, _ in asked] == [(1, 2, 16, 16), (8, 2, 16, 16)]
    tables = [each for name, each in gradients.items() if "relative_position_bias_table" in name]
    assert len(tables) == 2
    assert all(each.abs().max() > 0 for each in tables)


@pytest.mark.parametrize(("name", "padding"), [("gemma2", "left"), ("gpt_oss", "right"), ("t5", "left")])
def test_by_the_kernels(name, padding, asked, device):
    one = {"num_layers": 1} if name == "t5" else {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    gradients = check(name, padding, device, **one)
    of = {"gemma2": "q_proj", "gpt_oss": "sinks", "t5": "relative_attention_bias"}[name]
    found = [each for at, each in gradients.items() if of in at]
    assert len(found) == len(asked) - (name == "t5")  # which has a bias in each self-attention
    assert all(each.abs().max() > 1e-4 for each in found)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", [*DECODERS, "t5"])
def test_generate_gives_eagers_tokens(name, cache, torchs, asked, device):
    model, given = model_of(name, device).eval(), given_to(name, "left", device)
    del given["labels"]
    options = {"do_sample": False, "max_new_tokens": 5, "disable_compile": True, "return_dict_in_generate": True}
    if cache == "static":
        options["cache_implementation"] = "static"
    found = []
    for implementation in ("eager", hf.NAME):
        model.set_attn_implementation(implementation)
        found.append(model.generate(**given, **options, output_logits=True))
    assert torch.equal(*[each.sequences for each in found])
    torch.testing.assert_close(*[torch.stack(each.logits) for each in found], rtol=1e-4, atol=1e-5)
    assert asked


def test_windows_and_padding_take_no_mask_of_all_queries_and_keys(torchs, asked, device):
    model, given = model_of("gemma2", device), given_to("gemma2", "right", device)
    outcome(model, given, hf.NAME)
    assert [tuple(mask.shape) for mask, _ in asked] == [(2, 1, 1, 6)] * 2
    assert [each["window"] for _, each in asked] == [(2, 0), (None, 0)]
    asked.clear()
    del given["attention_mask"]
    outcome(model, given, hf.NAME)
    assert [mask for mask, _ in asked] == [None] * 2
    assert asked[0][1]["window"] == (2, 0)
    assert asked[1][1]["is_causal"]
    assert asked[0][1]["softcap"] == 1.5


def test_what_is_no_window_keeps_its_mask(torchs, asked, device):
    """Sequences that are packed into a row, and a mask of the user's."""
    model, given = model_of("gemma2", device), given_to("gemma2", "none", device)
    packed = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1]] * 2, device=device), "use_cache": False}
    keep = (torch.rand(2, 1, 6, 6, device=device) > 0.4) | torch.eye(6, dtype=torch.bool, device=device)
    for mask in (None, torch.where(keep, 0.0, torch.finfo(torch.float32).min)):
        asked.clear()
        logits = []
        for implementation in ("eager", hf.NAME):
            model.set_attn_implementation(implementation)
            logits.append(model(given["input_ids"], attention_mask=mask, **packed).logits)
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
        assert [tuple(each.shape) for each, _ in asked] == [(2, 1, 6, 6)] * 2


def mask_of(**options):
    config = transformers.Gemma2Config(**MODELS["gemma2"][1])
    config._attn_implementation = hf.NAME
    given = {"inputs_embeds": torch.zeros(2, 6, 8), "attention_mask": None, "past_key_values": None}
    return masking_utils.create_sliding_window_causal_mask(config, **given | options)


def call(mask, *, queries=6, **options):
    query = torch.randn(2, 2, queries, 4)
    key, value = torch.randn(2, 2, 2, 6, 4)
    return query, key, value, hf.attention_forward(torch.nn.Module(), query, key, value, mask, **options)[0]


def test_a_mask_that_was_changed_counts(torchs):
    keep = torch.tensor([[True] * 6, [True] * 5 + [False]])
    for change in ("none", "written", "combined"):
        mask = mask_of(attention_mask=keep)
        assert hasattr(mask, hf.NAME)
        if change == "written":
            mask[..., 5, 4] = False
        elif change == "combined":
            mask = mask & (torch.arange(6) != 4)
        query, key, value, found = call(mask)
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)
        torch.testing.assert_close(found, expected.transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_a_mask_with_a_function_of_the_users_is_a_mask():
    mask = mask_of(and_mask_function=lambda batch, head, q, k: k != 4)
    assert not hasattr(mask, hf.NAME)
    assert not mask[..., 4].any()


def test_a_chunk_as_long_as_the_window_is_none():
    config = transformers.Gemma2Config(**MODELS["gemma2"][1], attention_chunk_size=3)
    config._attn_implementation = hf.NAME
    mask = masking_utils.create_chunked_causal_mask(config, torch.zeros(2, 6, 8), None, None)
    assert not mask[0, 0, 4, 2]
    assert not hasattr(mask, hf.NAME)


@pytest.mark.parametrize(("q_offset", "told"), [(2, False), (5, True)])
def test_keys_after_the_last_query_are_hidden_by_a_mask(q_offset, told):
    """As a static cache has them."""
    mask = hf.attention_mask(batch_size=2, q_length=3, kv_length=8, q_offset=q_offset)
    assert hasattr(mask, hf.NAME) == told
    query, key, value = torch.randn(2, 2, 3, 4), *torch.randn(2, 2, 2, 8, 4)
    found, _ = hf.attention_forward(torch.nn.Module(), query, key, value, mask)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.1}, r"no dropout, .* dropout=0.1: set it to 0 in the model's config, or call model.eval\(\)"),
        ({"indices": torch.zeros(1)}, "does not take indices, keys chosen by indices"),
        ({"cache": object()}, "does not take cache, a paged cache"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=f'attn_implementation="fused_softmax" .*{message}'):
        call(None, **options)


def test_training_with_dropout_is_refused_and_eval_is_not(torchs, device):
    model, given = model_of("gpt2", device, attn_pdrop=0.1), given_to("gpt2", "none", device)
    with pytest.raises(ValueError, match=r"dropout=0\.1"):
        outcome(model, given, hf.NAME)
    outcome(model.eval(), given, hf.NAME)


@pytest.mark.parametrize("name", ["apply", "register", "sampler"])
def test_without_transformers_a_call_says_what_to_install(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "transformers", None)
    arguments = [torch.nn.Linear(2, 2)] if name == "apply" else []
    with pytest.raises(ImportError) as raised:
        getattr(fused_softmax.hf, name)(*arguments)
    assert str(raised.value) == (
        f"fused_softmax.hf.{name} needs the transformers package, which is not installed: "
        "pip install 'fused-softmax[hf]'"
    )


def test_a_second_register_changes_nothing():
    hf.register()
    assert AttentionInterface()[hf.NAME] is hf.attention_forward
