"""transformers' generate() by sample: greedy tokens, distributions and scores are its own; seeds; what is refused."""

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

import transformers
from conftest import kernels
from sampling_cases import assert_distributed
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

import fused_softmax
from fused_softmax.core.route import Route
from fused_softmax.hf import generation, sampler
from fused_softmax.ops.sampling import sample as sampling

VOCAB, PAD, EOS = 30, 0, 7
LLAMA = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 4, "vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": PAD,
    "bos_token_id": 1, "eos_token_id": EOS,
}  # fmt: skip
MODELS = {
    "gpt2": ("GPT2LMHeadModel", {
        "n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": VOCAB, "n_positions": 64, "pad_token_id": PAD,
        "bos_token_id": 1, "eos_token_id": EOS,
    }),
    "llama": ("LlamaForCausalLM", LLAMA),
    "t5": ("T5ForConditionalGeneration", {
        "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 2, "vocab_size": VOCAB,
        "decoder_start_token_id": 1, "pad_token_id": PAD, "eos_token_id": EOS,
    }),
}  # fmt: skip
SAMPLED = {"do_sample": True, "top_k": 0}


@pytest.fixture
def torchs(monkeypatch):
    """Draws by torch's operations, of which many take little time."""
    monkeypatch.setattr(sampling, "route_of", lambda *tensors, **_: Route.COMPOSED)


def model_of(name, device="cpu"):
    """Wide weights, so that tokens and their distributions differ."""
    of, arguments = MODELS[name]
    of = getattr(transformers, of)
    torch.manual_seed(0)
    model = of(of.config_class(**arguments)).to(device).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def prompts(device="cpu"):
    """Three of 5, 3 and 4 tokens, padded on the left."""
    ids = torch.randint(8, VOCAB, (3, 5), generator=torch.Generator().manual_seed(3)).to(device)
    keep = torch.ones_like(ids)
    keep[1, :2], keep[2, :1] = 0, 0
    return {"input_ids": ids.masked_fill(keep == 0, PAD), "attention_mask": keep}


def one_of(given, row):
    """A prompt alone, without its padding."""
    keep = given["attention_mask"][row].bool()
    return {"input_ids": given["input_ids"][row, keep][None]}


@pytest.mark.parametrize("options", [
    {}, {"cache_implementation": "static", "disable_compile": True}, {"use_cache": False}, {"min_new_tokens": 6},
    {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2}, {"suppress_tokens": [9, 11]}, {"forced_eos_token_id": 5},
    {"temperature": 0.5, "top_k": 3, "top_p": 0.5},
], ids=lambda options: next(iter(options), "plain"))  # fmt: skip
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_and_scores_are_transformers_own(name, options, torchs):
    model, given = model_of(name), prompts()
    options = {"do_sample": False, "max_new_tokens": 8} | options
    told = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    theirs = model.generate(**given, **options, **told)
    ours = model.generate(**given, **options, **told, custom_generate=sampler(0))
    assert type(ours) is type(theirs)
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(ours.scores, theirs.scores, rtol=0, atol=0)
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=0, atol=0)
    assert torch.equal(model.generate(**given, **options, custom_generate=sampler(0)), theirs.sequences)


class WithoutGreatest(transformers.LogitsProcessor):
    """A processor of a user's: after the warpers it would leave other tokens than before them."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, scores.topk(3).indices, -torch.inf)


FILTERS = {
    "none": {}, "temperature": {"temperature": 0.6}, "top_k": {"top_k": 5}, "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2}, "all": {"temperature": 1.7, "top_k": 12, "top_p": 0.9, "min_p": 0.08},
    "top_k then top_p": {"top_k": 6, "top_p": 0.6}, "penalty": {"repetition_penalty": 2.5, "temperature": 0.6},
    "one is kept": {"top_p": 1e-6}, "none by top_p": {"top_p": 0.0},
}  # fmt: skip
OTHERS = {
    "typical_p": {"temperature": 1.5, "top_k": 20, "typical_p": 0.6}, "eta": {"eta_cutoff": 0.03},
    "epsilon": {"top_p": 0.95, "epsilon_cutoff": 0.02},
    "processor": {"top_k": 4, "logits_processor": LogitsProcessorList([WithoutGreatest()])},
    "normalised": {"temperature": 0.7, "top_k": 9, "renormalize_logits": True},
    "watermark": {"temperature": 0.7, "watermarking_config": {"bias": 3.0}},
    "warper of a user": {"top_k": 9, "logits_processor": LogitsProcessorList([
        transformers.TopPLogitsWarper(0.8), transformers.TemperatureLogitsWarper(2.0)
    ])},
    "keeps four": {"logits_processor": LogitsProcessorList([transformers.MinPLogitsWarper(0.9, min_tokens_to_keep=4)])},
}  # fmt: skip


@pytest.mark.parametrize("options", [*FILTERS.values(), *OTHERS.values()], ids=[*FILTERS, *OTHERS])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_tokens_have_the_distribution_of_transformers_processed_scores(name, options, torchs):
    model, given = model_of(name), one_of(prompts(), 0)
    options = SAMPLED | {"max_new_tokens": 1} | options
    theirs = model.generate(**given, **options, return_dict_in_generate=True, output_scores=True)
    told = {"return_dict_in_generate": True, "output_scores": True}
    ours = model.generate(**given, **options, **told, custom_generate=sampler(5))
    torch.testing.assert_close(ours.scores, theirs.scores, rtol=0, atol=0)
    expected = theirs.scores[0][0].double().softmax(0)
    draws = model.generate(**given, **options, num_return_sequences=50_000, custom_generate=sampler(5))
    assert_distributed(draws[:, -1], expected)


@pytest.mark.parametrize(("options", "asked"), [
    (FILTERS["all"], FILTERS["all"]),
    ({"top_k": 5, "repetition_penalty": 1.5}, {"top_k": 5}),
    ({"top_k": 5, "typical_p": 0.5}, {}),
    ({"do_sample": False}, {"temperature": 0.0}),
])  # fmt: skip
def test_filters_are_samples(options, asked, monkeypatch, torchs):
    """Those at the end of transformers' list; of others and of what stands before them, sample sees the scores."""
    calls = []

    def watched(scores, *, seed, position, **filters):
        calls.append(filters)
        return fused_softmax.sample(scores, seed=seed, position=position, **filters)

    monkeypatch.setattr(generation, "sample", watched)
    model_of("gpt2").generate(**prompts(), **SAMPLED | options, max_new_tokens=2, custom_generate=sampler(0))
    assert calls == [asked] * 2


def test_a_token_is_sample_of_its_row_seed_and_place(torchs):
    """Of a plain call, so that whoever knows these can draw it again; padding has no place."""
    model, given, seeds = model_of("llama"), prompts(), torch.tensor([5, 2**62, -3])
    out = model.generate(
        **given, **SAMPLED, top_p=0.9, max_new_tokens=4, custom_generate=sampler(seeds), output_logits=True,
        return_dict_in_generate=True, eos_token_id=-1,
    )  # fmt: skip
    for i, logits in enumerate(out.logits):
        places = given["attention_mask"].sum(1) + i
        drawn = fused_softmax.sample(logits, top_p=0.9, seed=seeds, position=places)
        assert torch.equal(drawn.tokens, out.sequences[:, 5 + i])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_prompt_has_its_tokens_in_any_batch_and_in_two_calls(name, cache, torchs):
    model, given = model_of(name), prompts()
    options = SAMPLED | {"temperature": 0.9, "top_p": 0.95, "eos_token_id": -1}
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    together = model.generate(**given, **options, max_new_tokens=8, custom_generate=sampler(11))
    assert len(set(map(tuple, together[:, 5:].tolist()))) == 3
    for row in range(3):
        alone = one_of(given, row)
        for new_tokens in (3, 5):
            ids = model.generate(**alone, **options, max_new_tokens=new_tokens, custom_generate=sampler(11 + row))
            alone = {"input_ids": ids}
        assert ids[0, -8:].tolist() == together[row, -8:].tolist()


def test_a_prompt_of_embeddings_has_the_tokens_of_its_ids(torchs):
    model, given = model_of("llama"), prompts()
    options = SAMPLED | {"max_new_tokens": 4, "eos_token_id": -1, "custom_generate": sampler(2)}
    by_ids = model.generate(**given, **options)[:, 5:]
    embeddings = model.get_input_embeddings()(given["input_ids"])
    assert torch.equal(
        model.generate(inputs_embeds=embeddings, attention_mask=given["attention_mask"], **options), by_ids
    )
    alone = one_of(given, 0)
    by_ids = model.generate(**alone, **options)[:, 5:]
    embeddings = model.get_input_embeddings()(alone["input_ids"])
    assert torch.equal(model.generate(inputs_embeds=embeddings, **options), by_ids)


def test_seeds_repeat_and_differ(torchs):
    model, given = model_of("gpt2"), one_of(prompts(), 0)
    options = SAMPLED | {"max_new_tokens": 8, "eos_token_id": -1}

    def tokens(seed, **more):
        return model.generate(**given, **options, **more, custom_generate=sampler(seed)).tolist()

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)
    assert tokens(2**64 - 1) == tokens(-1)
    assert tokens(np.int64(1)) == tokens(1)
    both = tokens(1, num_return_sequences=2)
    assert both == tokens(1) + tokens(2) == tokens(torch.tensor([1, 2], dtype=torch.int32), num_return_sequences=2)
    again = sampler()
    found = []
    for seed in (3, 3, 4):
        transformers.set_seed(seed)
        found.append(model.generate(**given, **options, custom_generate=again).tolist())
    assert found[0] == found[1] != found[2]
    assert found[2] != model.generate(**given, **options, custom_generate=again).tolist()


def test_a_sequence_ends_at_eos_and_is_padded(torchs):
    model, given = model_of("llama"), prompts()
    model.get_output_embeddings().weight.data[EOS] *= 3
    options = SAMPLED | {"max_new_tokens": 12}
    out = model.generate(**given, **options, custom_generate=sampler(3))[:, 5:]
    whole = model.generate(**given, **options, eos_token_id=-1, custom_generate=sampler(3))[:, 5:]
    ends = [row.index(EOS) if EOS in row else 12 for row in whole.tolist()]
    assert min(ends) < 11
    for row, of_whole, end in zip(out.tolist(), whole.tolist(), ends, strict=True):
        assert row[: end + 1] == of_whole[: end + 1]
        assert set(row[end + 1 :]) <= {PAD}


class Streamer(transformers.generation.BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_a_streamer_gets_each_token_and_the_end(torchs):
    """generate() does not give it to a custom_generate."""
    streamer = Streamer()
    options = SAMPLED | {"max_new_tokens": 4, "custom_generate": sampler(3)}
    out = model_of("gpt2").generate(**one_of(prompts(), 0), **options, streamer=streamer)
    assert (streamer.tokens, streamer.ended) == (out[0].tolist(), True)


def test_a_stopping_criterion_sees_transformers_scores(torchs):
    seen = []

    class Watch(transformers.StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            seen.append(scores[-1].clone())
            return torch.full((len(input_ids),), len(seen) == 3)

    options = SAMPLED | {"top_k": 5, "max_new_tokens": 9, "return_dict_in_generate": True, "output_scores": True}
    given = prompts()
    out = model_of("gpt2").generate(
        **given, **options, stopping_criteria=StoppingCriteriaList([Watch()]), custom_generate=sampler(3)
    )
    assert out.sequences.shape[1] == 8
    torch.testing.assert_close(tuple(seen), out.scores, rtol=0, atol=0)
    assert all((scores > -torch.inf).sum(1).tolist() == [5] * 3 for scores in seen)


@kernels
def test_generate_draws_by_the_kernels(device):
    model, given = model_of("gpt2", device), prompts(device)
    with fused_softmax.explain() as explained:
        out = model.generate(**given, **SAMPLED, top_p=0.8, max_new_tokens=2, custom_generate=sampler(0))
    assert out.shape == (3, 7)
    assert [each.function for each in explained] == ["sample"] * 2
    assert [each.route for each in explained] == ["kernel"] * 2


@pytest.mark.parametrize(("options", "message"), [
    ({"num_beams": 2}, "beam_search does not"), ({"num_beams": 2, "do_sample": True}, "beam_sample does not"),
    ({"prompt_lookup_num_tokens": 2}, "assisted_generation does not"),
    ({"assistant_model": "a model"}, "assisted_generation does not"),
    ({"penalty_alpha": 0.5, "top_k": 4}, "contrastive_search does not"),
])  # fmt: skip
def test_what_draws_no_token_a_step_is_refused(options, message, torchs):
    model = model_of("gpt2")
    if "assistant_model" in options:
        options = {"assistant_model": model_of("gpt2")}
    with pytest.raises(ValueError, match=f"sampler draws one token a step, which {message}"):
        model.generate(**one_of(prompts(), 0), max_new_tokens=3, custom_generate=sampler(0), **options)


def test_a_model_with_a_loop_of_its_own_is_refused():
    class Own(transformers.GPT2LMHeadModel):
        def _sample(self, *given, **named):
            raise AssertionError

    model = Own(transformers.GPT2Config(**MODELS["gpt2"][1]))
    with pytest.raises(ValueError, match="draws in transformers' own loop, and Own has another"):
        model.generate(**prompts(), max_new_tokens=3, custom_generate=sampler(0))


@pytest.mark.parametrize(("seed", "error", "message"), [
    (True, TypeError, r"seed must be an int or a Tensor, not bool \(True\)"), (0.5, TypeError, "not float"),
    ([1, 2], TypeError, "not list"), (2**64, ValueError, "seed must fit in 64 bits"),
    (torch.zeros(2, dtype=torch.int64), ValueError, r"seed must have shape \(3,\), one a sequence.*got \(2,\)"),
    (torch.zeros(3), TypeError, "seed must be of int64 or int32, got torch.float32"),
])  # fmt: skip
def test_wrong_seeds_are_named(seed, error, message):
    with pytest.raises(error, match=message):
        model_of("gpt2").generate(**prompts(), **SAMPLED, max_new_tokens=1, custom_generate=sampler(seed))


@pytest.mark.parametrize("when", [0, 2])
def test_a_row_that_cannot_be_drawn_from_raises(when, torchs):
    """At the next step, or at the end."""

    class Spoil(transformers.LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] == 5 + when:
                scores[1] = torch.nan
            return scores

    options = SAMPLED | {"max_new_tokens": 3, "logits_processor": LogitsProcessorList([Spoil()])}
    with pytest.raises(ValueError, match=rf"rows \[1\] cannot be drawn from at new token {when + 1}: .*NaN"):
        model_of("gpt2").generate(**prompts(), **options, custom_generate=sampler(0))


def test_a_generation_config_is_not_changed(torchs):
    config = GenerationConfig(do_sample=True, top_k=4, max_new_tokens=2, pad_token_id=PAD)
    before = config.to_dict()
    model = model_of("gpt2")
    of_model = model.generation_config.to_dict()
    model.generate(**prompts(), generation_config=config, custom_generate=sampler(0))
    assert (config.to_dict(), model.generation_config.to_dict()) == (before, of_model)
