"""Every model of transformers' auto classes that has labels and can be built tiny: by apply() as without it."""

import inspect
import warnings

import pytest
import torch

pytest.importorskip("transformers")

import hf_applied
import hf_models
import transformers
from transformers.models.auto import modeling_auto

from fused_softmax import hf
from fused_softmax.core.route import Route
from fused_softmax.ops.attention import attention as attention_ops
from fused_softmax.ops.routing import route as routing

AUTOS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ", "MASKED_LM")
# Whose own code reads their logits: of n-grams in log_softmax, or by a product of two weights of the head.
READ = {"ProphetNetForCausalLM", "ProphetNetForConditionalGeneration", "MobileBertForMaskedLM"}
# Whose output embedding is no linear layer.
REFUSED = {"FSMTForConditionalGeneration": "must be torch.nn.Linear with the forward of that class, not Embedding"}


def names():
    found = set()
    for auto in AUTOS:
        for each in getattr(modeling_auto, f"MODEL_FOR_{auto}_MAPPING_NAMES").values():
            found |= set(each) if isinstance(each, (tuple, list)) else {each}
    return sorted(found.intersection(dir(transformers)))


def plain_pair(of):
    """(a model, the same one with "eager" where "sdpa" leaves out a softcap, what its forward pass takes)."""
    model, factor, given = hf_models.tiny(of)
    model = hf_models.made(of, factor, None)
    hf_models.widen(model)
    parts = [model.config, *(getattr(model.config, name, None) for name in model.config.sub_configs)]
    capped = any(getattr(each, "attn_logit_softcapping", None) for each in parts)
    plain = hf_models.made(of, factor, "eager" if capped else None)
    plain.load_state_dict(model.state_dict())
    for at, each in plain.named_buffers():
        each.copy_(model.get_buffer(at))
    tokens = given["decoder_input_ids" if "decoder_input_ids" in given else "input_ids"]
    labels = torch.where(torch.arange(tokens.shape[1]) < 2, hf_applied.IGNORED, tokens)
    mask = given.get("attention_mask")
    if mask is not None and mask.shape == labels.shape:
        labels = torch.where(mask.bool(), labels, hf_applied.IGNORED)
    return model.train(), plain.train(), given | {"labels": labels}


def outcome(run, model, given):
    torch.manual_seed(3)
    return run(model, given)


@pytest.mark.parametrize("name", names())
def test_every_model_is_as_without_apply(name, monkeypatch):
    for room in (attention_ops, routing):
        monkeypatch.setattr(room, "route_of", lambda *tensors, **_: Route.COMPOSED)
    of = getattr(transformers, name)
    if "labels" not in inspect.signature(of.forward).parameters:
        pytest.skip("its forward pass has no labels")
    try:
        model, plain, given = plain_pair(of)
        wanted = outcome(hf_applied.trained, plain, given)
    except Exception as error:  # of transformers' own, before ours is asked
        pytest.skip(f"no tiny model: {error}")
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]):
            hf.apply(model)
        return
    hf.deferred._warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        applied = hf.apply(model)
        *found, ran = outcome(hf_applied.listened, model, given)
    said = [each for each in caught if "all logits are made, as without apply()" in str(each.message)]
    assert bool(said) == (name in READ)
    assert ran.get("linear_cross_entropy", 0) == (name not in READ)
    assert ("attention" in ran) == ("attention" in applied.replaced)
    assert ("route" in ran) == ("routers" in applied.replaced)
    hf_applied.close(found, wanted)
    logits, theirs = found[0].logits, wanted[0].logits
    assert type(logits) is torch.Tensor
    mask = given.get("attention_mask")
    keep = mask.bool() if mask is not None and mask.shape == logits.shape[:2] else slice(None)
    torch.testing.assert_close(logits[keep], theirs[keep], rtol=1e-3, atol=1e-3)
    applied.undo()
    assert outcome(hf_applied.listened, model, given)[2] == {}
