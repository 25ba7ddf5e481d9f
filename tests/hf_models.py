"""transformers' models, made tiny: a config, weights under which a wrong mask shows, and inputs with padding."""

import importlib
import inspect
import re
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from fused_softmax.hf import attention as hf

VOCABULARY, LENGTH = 120, 12
FACTORS = (16, 8, 4, 2, 1)  # by which sizes are divided: the first under which a model can be built
LARGEST = 60_000_000  # parameters of what is built at all
SIZES = re.compile(
    r"(size|sizes|dim|dims|rank|width|channels|features|d_model|d_ff|d_kv|n_embd|n_inner|d_inner|d_state|d_head"
    r"|hidden|embd|filters|planes|dim_feedforward|mrope_section)$"
)
# Sizes of what goes in, of windows and of groups of layers: they stay, and so does all that is not named a size.
KEPT = re.compile(
    r"vocab|kernel|patch_size|image_size|window|chunk|batch|stride|num_channels|in_channels|max_|min_|tile|tubelet|temporal"
    r"|merge|grid|crop|block_size|group|pool|downsample|upsample|queue|img_size|_length|spatial|input_size|num_mel|cell"
    r"|fft|hop|frame_size|resolution|in_chans|num_labels|bucket|shrink|context_size|feat_extract|input_feat|input_dim"
    r"|feature_size|mel|num_classes|codebook_size|sampling|pretrained_window|conv_dim$|bbox"
)
LAYERS = re.compile(
    r"(num_hidden_layers|num_layers|n_layers?|encoder_layers|decoder_layers|num_decoder_layers|num_encoder_layers|depth"
    r"|layers)$"
)
DROPPED = (
    "model_type", "transformers_version", "architectures", "_name_or_path", "torch_dtype", "dtype", "id2label",
    "label2id", "per_layer_config",
)  # fmt: skip
# A part that takes a mask from its model, and without one is causal by "sdpa" alone.
PARTS = {"BltGlobalTransformer"}
# Options without a default that a model can be built with.
NEEDED = {"prediction_length": 4, "vocab_size": VOCABULARY, "n_routed_experts": 8, "n_shared_experts": 1}
HEADS = re.compile(
    r"PreTrainedModel$|PretrainedModel$|Wrapper$|Backbone$|DoubleHeads|Pretrained\w*Model$"
    r"|For(?!mer|CausalLM|ConditionalGeneration|SpeechSeq|Seq2Seq)\w+$|LMHead(?!Model$)"
)


def folders() -> list[str]:
    """transformers' folders of models, by whose names the tests are told apart. Nothing is imported."""
    return sorted(path.parent.name for path in Path(transformers.__file__).parent.glob("models/*/__init__.py"))


def classes_of(folder: str) -> list[type]:
    """The classes of models in a folder, without the heads that add no attention."""
    found = []
    for path in sorted((Path(transformers.__file__).parent / "models" / folder).glob("modeling_*.py")):
        module = importlib.import_module(f"transformers.models.{folder}.{path.stem}")
        found += [
            each
            for name, each in vars(module).items()
            if isinstance(each, type) and issubclass(each, PreTrainedModel) and each.__module__ == module.__name__
            if each.config_class is not None and not HEADS.search(name) and name not in PARTS
        ]
    return found


# Their own code hands a bool mask to BERT. "eager" adds it to the scores, what transformers takes by itself obeys it.
# The outputs of the decoder begin with a choice of the highest scores, which rounding may change.
# Nemotron's takes a float mask for a bool one, so that "eager" gives NaN.
OBEYED = {
    "GroundingDinoModel": ".encoder_last_hidden_state",
    "MMGroundingDinoModel": ".encoder_last_hidden_state",
    "NemotronAsrStreamingEncoder": "",
}
# Their attention cannot be computed, as docs/patch.md says.
REFUSED = {"Inkling2TextModel", "Inkling2ForCausalLM", "Inkling2Model", "Inkling2ForConditionalGeneration"}
# Classes of which a tiny model can be built, and fed without a processor's outputs. Others are tried too.
BUILT = set((Path(__file__).parent / "data" / "hf_built.txt").read_text().split())


class CannotBuildError(Exception):
    """Why there is no tiny model of a class, or no inputs for one."""


def check(of: type) -> bool:
    """Outputs, gradients and generated tokens by attention, held to those by "eager". False: nothing was built."""
    why = None
    try:
        model, factor, given = tiny(of)
        expected = outcome(model, given)
    except (AssertionError, CannotBuildError, RuntimeError, ValueError) as error:  # of "eager", before ours is asked
        why = error
    if why is not None:
        assert of.__name__ not in BUILT, f"not built: {of.__name__}: {why}"
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of models that get "eager"
        ours = made(of, factor, hf.NAME)
    ours.load_state_dict(model.state_dict())
    for at, each in ours.named_buffers():
        each.copy_(model.get_buffer(at))
    if of.__name__ in REFUSED:
        with pytest.raises(ValueError, match=r'of Inkling2\w*Attention; take "eager"'):
            ours(**given)
        return True
    with torch.no_grad():
        ours(**given)  # as the other has done, for code that keeps what it finds
    _close(outcome(ours, given), expected, of.__name__)
    _check_weights(model, ours, given)
    if model.can_generate() and "input_ids" in given and "attention_mask" in given:
        for cache in ("dynamic", "static"):
            _check_tokens(model, ours, given, cache)
    return True


def tiny(of: type):
    """The model by "eager", the factor of its sizes and inputs that it takes."""
    why = ""
    for factor in FACTORS:
        try:
            with torch.device("meta"):
                size = sum(each.numel() for each in made(of, factor, "eager").parameters())
        except Exception as error:  # whatever a config of other sizes may run into
            why = f"{type(error).__name__}: {error}"
            if "meta" not in why:
                continue
            size = 0
        if size > LARGEST:
            continue
        try:
            model = made(of, factor, None if of.__name__ in OBEYED else "eager")
            widen(model)
            return model, factor, _taken(model)
        except Exception as error:
            if why == (why := f"{type(error).__name__}: {error}"):
                break
    raise CannotBuildError(why or "too large")


def _taken(model) -> dict:
    errors = []
    for mask, images in ((True, False), (True, True), (False, False), (False, True)):
        try:
            given = inputs_of(model, mask, images)
            with torch.no_grad():
                model(**given)
        except Exception as error:
            errors.append(error)
        else:
            return given
    raise errors[0]


def made(of: type, factor: int, implementation: str | None):
    config = config_of(of, factor)
    config._attn_implementation = implementation
    torch.manual_seed(0)
    return of(config).eval()


def outcome(model, given: dict) -> tuple[dict, dict]:
    """Outputs where no token is padding, and the gradients of all parameters."""
    torch.manual_seed(2)
    model.zero_grad()
    keep, outputs = given.get("attention_mask"), {}
    for at, each in _tensors(model(**given)).items():
        told = each.is_floating_point() and "past_key" not in at and "attention" not in at
        if told and at.startswith(OBEYED.get(type(model).__name__, "")):
            outputs[at] = each[keep.bool()] if keep is not None and each.shape[:2] == keep.shape else each
    finite = [each[each.isfinite()] for each in outputs.values() if each.requires_grad]
    if not finite:
        return outputs, {}
    sum((each * torch.linspace(-1, 1, each.numel())).sum() for each in finite).backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {at: each.detach() for at, each in outputs.items()}, gradients


def _tensors(given, at: str = "") -> dict:
    if torch.is_tensor(given):
        return {at: given}
    if isinstance(given, (list, tuple)):
        given = dict(enumerate(given))
    items = given.items() if hasattr(given, "items") else ()
    return {key: each for name, part in items for key, each in _tensors(part, f"{at}.{name}").items()}


def _close(found: tuple[dict, dict], expected: tuple[dict, dict], of: str) -> None:
    """Outputs within 1e-3 of their largest, gradients too, or of a thirtieth of the largest gradient of all."""
    largest = max((each.abs().max().item() for each in expected[1].values() if each.numel()), default=0.0)
    for parts, floor in ((0, 1e-3), (1, max(largest / 30, 1e-6))):
        assert found[parts].keys() == expected[parts].keys(), of
        for at, each in expected[parts].items():
            if each.numel():
                scale = each[each.isfinite()].abs().max().item() if each.isfinite().any() else 0.0
                difference = {"rtol": 0, "atol": 1e-3 * (scale + floor), "equal_nan": True}
                said = f"{of}{at}: not close"
                torch.testing.assert_close(found[parts][at], each, **difference, msg=said)


def _check_weights(model, ours, given) -> None:
    """Weights that were asked for are there, or an error says that they are not."""
    counts = []
    for each in (model, ours):
        for asked in ({}, {"output_attentions": True}):
            try:
                found = _tensors(each(**given, **asked))
            except TypeError:
                return  # it takes no such argument
            except ValueError as error:
                if each is ours and "output_attentions=True" in str(error):
                    return
                raise
            counts.append(sum("attention" in at for at in found))
    asked, unasked = counts[1] - counts[0], counts[3] - counts[2]
    assert asked == unasked, type(model).__name__


def _check_tokens(model, ours, given: dict, cache: str) -> None:
    """Greedy tokens after prompts with padding on the left."""
    options = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4, "num_beams": 1, "disable_compile": True}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    if cache == "static":
        options["cache_implementation"] = "static"
    prompt = {name: each for name, each in given.items() if name not in ("attention_mask", "decoder_input_ids")}
    found = []
    for each in (model, ours):
        generation = each.generation_config
        generation.eos_token_id, generation.pad_token_id = None, 0
        generation.bos_token_id = 1 if generation.bos_token_id is None else generation.bos_token_id
        if each.config.is_encoder_decoder:
            generation.decoder_start_token_id = 1
        torch.manual_seed(3)
        try:
            found.append(each.generate(attention_mask=given["attention_mask"].flip(1), **prompt, **options))
        except Exception:  # what generate() does not do by "eager" either
            if each is ours:
                raise
            return
    assert torch.equal(*[each.sequences for each in found]), (type(model).__name__, cache)
    logits = [torch.stack(each.logits) for each in found]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-3 * logits[0][logits[0].isfinite()].abs().max().item())


def config_of(model: type, factor: int):
    """The model's default config with its sizes divided by a factor, few layers and no dropout."""
    return model.config_class(**_shrunk(model.config_class().to_dict(), factor))


def _shrunk(given: dict, factor: int, layers: int = 2) -> dict:
    kinds = given.get("layer_types")
    if isinstance(kinds, (list, tuple)) and kinds:
        kinds = list(dict.fromkeys(kinds))
        kinds *= 2 if len(kinds) == 1 else 1
        layers = len(kinds)
    if given.get("out_indices") or given.get("out_features"):
        layers = 1000  # a backbone gives the outputs of layers by number
    made = {"global_head_dim": 512 // factor} if given.get("per_layer_config") else {}  # of which it is made
    for name, value in given.items():
        if name in DROPPED:
            continue
        if isinstance(value, dict):
            made[name] = value if any(not isinstance(key, str) for key in value) else _shrunk(value, factor, layers)
            if "model_type" in value:
                made[name]["model_type"] = value["model_type"]
        elif name == "layer_types":
            made[name] = kinds
        else:
            made[name] = _one(name, value, factor, layers)
    return made


def _one(name: str, value, factor: int, layers: int):
    if name == "attn_layer_indices":
        return [1]
    if value is None and name in NEEDED:
        return NEEDED[name]
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)) and re.search(r"_layer_types$|layers_block_type|no_rope_layers", name):
        return (list(value) * 9)[:layers]
    if re.search(r"_ids?$|_token_index$|_index$", name):
        return _each(value, lambda token: token if token < VOCABULARY - 20 else VOCABULARY - 1 - token % 17)
    if isinstance(value, float):
        return 0.0 if re.search(r"drop|mask_time|mask_feature|jitter", name) else value
    if "vocab_size" in name and "type" not in name:
        return _each(value, lambda size: min(size, VOCABULARY))
    if name in ("sliding_window", "attention_chunk_size", "local_attention") and isinstance(value, int) and value > 16:
        return 4
    if LAYERS.search(name) and "feat" not in name and isinstance(value, int):
        return min(value, layers)
    if name in ("num_frames", "frames_per_clip"):
        return min(value, 4)
    if re.search(r"num_(local_)?experts$|n_routed_experts", name) and isinstance(value, int):
        return min(value, 32)
    if name in ("attn_layer_period", "attn_layer_offset"):
        return {"attn_layer_period": 2, "attn_layer_offset": 1}[name]
    if re.search(r"max_position|n_positions|n_ctx|max_source|max_target", name) and isinstance(value, int):
        return min(value, 512)
    if SIZES.search(name) and not KEPT.search(name):
        return _each(value, lambda size: size // factor if size >= factor and size % factor == 0 else size)
    return value


def _each(value, change):
    """The change of each int in a list of lists."""
    if isinstance(value, (list, tuple)):
        return [_each(each, change) for each in value]
    return change(value) if isinstance(value, int) and not isinstance(value, bool) else value


def widen(model) -> None:
    """Weights under which scores differ enough that a wrong mask shows, while outputs of layers stay of order one."""
    torch.manual_seed(0)
    for name, each in model.named_parameters():
        if not each.is_floating_point() or each.numel() == 0:
            continue
        if each.ndim > 1:
            wide = 1.0 if "embed" in name and each.ndim == 2 else 1.3 / each[0].numel() ** 0.5
            torch.nn.init.normal_(each, std=wide)
        elif "sink" in name or "bias" in name:
            torch.nn.init.normal_(each, std=1.0 if "sink" in name else 0.1)


def inputs_of(model, mask: bool, images: bool) -> dict:
    """What the forward pass takes, by the names of its parameters: two rows, of which the second has padding."""
    config, main = model.config, model.main_input_name
    parameters = inspect.signature(model.forward).parameters
    needed = {name for name, each in parameters.items() if each.default is inspect.Parameter.empty}
    torch.manual_seed(1)
    given = {}
    keep = torch.ones(2, LENGTH, dtype=torch.long)
    keep[1, LENGTH - 4 :] = 0
    tokens = torch.randint(5, min(_vocabulary(config), VOCABULARY - 20), (2, LENGTH))
    hidden = _first(config, "hidden_size", "d_model", "n_embd", "embed_dim", default=32)
    if "input_ids" in parameters and (main != "pixel_values" or "input_ids" in needed):
        given["input_ids"] = tokens
    for name in ("hidden_states", "inputs_embeds"):
        if name in needed or (name in parameters and not {"input_ids", "pixel_values", main} & set(parameters)):
            given[name] = torch.randn(2, LENGTH, hidden)
    if mask and given and "attention_mask" in parameters:
        given["attention_mask"] = keep
    if "decoder_input_ids" in parameters:
        given["decoder_input_ids"] = tokens[:, :6]
    if "encoder_hidden_states" in needed:
        given["encoder_hidden_states"] = torch.randn(2, LENGTH, hidden)
    if "bbox" in parameters:
        given["bbox"] = torch.randint(0, 9, (2, LENGTH, 4)).cumsum(-1)
    if "grid_thw" in needed:  # patches of images, one after another
        grid = torch.tensor([[1, 4, 4], [1, 4, 8]])
        patch = _first(config, "temporal_patch_size", default=1) * _first(config, "patch_size", default=1) ** 2
        patches = torch.randn(
            int(grid.prod(-1).sum()), _first(config, "in_channels", "num_channels", default=3) * patch
        )
        given = {"grid_thw": grid, ("hidden_states" if "hidden_states" in parameters else main): patches}
    if "codebook_idx" in needed:
        given |= {"codebook_idx": 1, "input_ids": tokens[..., None].repeat(1, 1, 8)}
    if "pixel_values" in parameters and (main == "pixel_values" or images or not given):
        given["pixel_values"] = _images(config)
    frames = _first(config, "num_frames", "frames_per_clip", default=4 if main == "pixel_values_videos" else None)
    if frames and main.startswith("pixel_values"):
        given[main] = _images(config)[:, None].repeat(1, frames, 1, 1, 1)
    heard = [config, *(getattr(config, name, None) for name in ("audio_config", "encoder_config", "encoder"))]
    names = ("num_mel_bins", "input_feat_per_channel", "n_mels", "feature_projection_input_dim")
    mels = next((found for each in heard if (found := _first(each, *names))), None)
    if main == "input_values":
        length = _first(config, "max_length", default=128)
        given["input_values"] = torch.randn(2, length, mels) if mels else torch.randn(2, 4000)
    if main == "input_features":
        length = next((found for each in heard if (found := _first(each, "max_source_positions"))), None)
        given["input_features"] = torch.randn(2, mels or 80, 2 * length) if length else torch.randn(2, 64, mels or 80)
    return given


def _vocabulary(config) -> int:
    try:
        found = getattr(config.get_text_config(), "vocab_size", VOCABULARY)
    except ValueError:  # several configs of text
        found = VOCABULARY
    return found if isinstance(found, int) and found > 30 else VOCABULARY


def _images(config):
    for name in ("vision_config", "backbone_config", "encoder", "image_config"):
        part = getattr(config, name, None)
        if part is not None and _first(config, "image_size", "img_size") is None and not isinstance(part, (int, str)):
            config = part
    size = _first(config, "image_size", "img_size", "input_size", "crop_size", default=64)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return torch.randn(2, _first(config, "num_channels", "in_channels", "in_chans", default=3), height, width)


def _first(config, *names: str, default=None):
    """The first of these options that the config has."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return default
