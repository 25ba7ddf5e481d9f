"""transformers' models by `attention`: after register(), attn_implementation="fused_softmax" is one of theirs."""

import inspect
import re
import sys
import warnings
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

import fused_softmax.register.library  # noqa: F401  # for whoever compiles or exports a model
from fused_softmax.hf.deferred import opened, version_of
from fused_softmax.hf.needed import need_transformers
from fused_softmax.ops.attention.attention import attention

NAME = "fused_softmax"
# Arguments by which a model says which keys are seen, and a kernel of its own obeys.
_UNKNOWN = {
    "cache": "a paged cache, as continuous batching has it",
    "indices": "keys chosen by indices",
    "block_indices": "keys chosen by the indices of their blocks",
    "sinks": "sinks that are no parameter [heads], s_aux",
}
# Code that looks the name up among those that it knows, which are transformers' own alone.
_BY_NAME = re.compile(r"ATTENTION_CLASSES\[|_attn_implementation in \(")
# Types of the configs of models whose own code may add a mask to scores, as if it were that of "eager".
_EAGERS_MASKS: set[type] = set()


class _Hidden(NamedTuple):
    """What a mask hides, told without a number for every query and key.

    padding: [batch, 1, 1, keys], True where a key is kept, or None. left, right: of the window, None is unbounded; its
    last query is aligned with the last key. version: of the mask, which changes if somebody writes to it.
    """

    padding: Tensor | None
    left: int | None
    right: int | None
    version: int | None


def register() -> None:
    """Register attention with transformers, under the name "fused_softmax", for every model that uses its interface.

    A model whose attention is code of its own gets "eager", and a UserWarning names its class.

    Softcaps, sinks and sliding windows are read from the model, and relative position biases keep their gradients.
    The kernels get windows and padding without a mask of all queries and keys, and do not read tiles outside a window.
    Every later call registers it again. Raises ImportError where transformers is not installed.

    A call raises ValueError for dropout in training, for heads of more than 256 dims, and for keys chosen by indices or
    by a paged cache, and for output_attentions, because weights are never in memory. It names the module and what to
    use. A query that sees no key, as one of padding may, gets 0. With "eager" it gets the mean of all values.

    >>> fused_softmax.hf.register()
    >>> AutoModelForCausalLM.from_pretrained("openai/gpt-oss-20b", attn_implementation="fused_softmax")
    """
    need_transformers("fused_softmax.hf.register")
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    chosen = PreTrainedModel.get_correct_attn_implementation
    if not hasattr(chosen, NAME):
        PreTrainedModel.get_correct_attn_implementation = _choosing(chosen, PreTrainedModel)  # type: ignore[method-assign]
        PreTrainedModel.__setstate__ = _restoring(PreTrainedModel.__setstate__)  # type: ignore[method-assign]


def spare_masks() -> None:
    """Have transformers make no mask for rows of one sequence each in a forward pass of an applied model.

    It looks for several sequences in the positions, and makes a mask of all queries and keys where it finds them.
    Traced code cannot wait for what it finds, and would always make the mask. Some versions, as 5.17, make one in all
    traced code, whatever they find.
    """
    from transformers import masking_utils

    def put(name: str, made: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        plain = getattr(masking_utils, name, None)
        if plain is not None and not hasattr(plain, NAME):
            setattr(masking_utils, name, wraps(plain)(made(plain)))
            setattr(getattr(masking_utils, name), NAME, True)

    def looking(look: Callable[..., Any]) -> Callable[..., Any]:
        return lambda position_ids: None if opened.unpacked else look(position_ids)

    def leaving_out(leave_out: Callable[..., Any]) -> Callable[..., Any]:
        def ignore(
            padding_mask: Any, q_length: Any, kv_length: Any, q_offset: Any, kv_offset: Any, window: Any = None
        ) -> bool:
            if opened.unpacked and padding_mask is None and q_length == kv_length:
                return window is None or kv_length < window
            return leave_out(padding_mask, q_length, kv_length, q_offset, kv_offset, window)

        return ignore

    put("find_packed_sequence_indices", looking)
    put("_ignore_causal_mask_sdpa", leaving_out)


def _choosing(choose: Callable[..., str], base: Any) -> Callable[..., str]:
    """The method by which a model checks the name that it was given, with "eager" for a model whose code is its own.

    Of "sdpa" transformers itself makes "eager", if nobody asked for it. Any other registered name it takes unseen.
    """

    @wraps(choose)
    def get_correct_attn_implementation(model: Any, *given: Any, **named: Any) -> str:
        chosen = choose(model, *given, **named)
        if chosen != NAME:
            return chosen
        parts = [each for each in model.modules() if isinstance(each, base) and each.config is model.config]
        attentions = {attention_of(type(each)) for each in parts}  # type: ignore[arg-type]
        if "own" in attentions:
            warnings.warn(
                f'attn_implementation="{NAME}": {type(model).__name__} computes attention by code of its own, without '
                'transformers\' AttentionInterface, so that it gets "eager"',
                stacklevel=2,
            )
            return "eager"
        if "eager's masks" in attentions:
            _EAGERS_MASKS.add(type(model.config))
        return NAME

    setattr(get_correct_attn_implementation, NAME, True)
    return get_correct_attn_implementation


def _restoring(plain: Callable[..., None]) -> Callable[..., None]:
    """The method by which a copy, or what was pickled, gets its state: nobody asks for its implementation again."""

    @wraps(plain)
    def __setstate__(model: Any, state: Any) -> None:
        plain(model, state)
        if model.config._attn_implementation == NAME:
            choose(model.config, [model])

    return __setstate__


@cache
def attention_of(model: Any) -> str:
    """Whose code computes the attention of a class of models: its "own", or the interface's, and by which masks."""
    try:
        source = inspect.getsource(sys.modules[model.__module__])
    except (KeyError, OSError, TypeError):
        return "eager's masks"
    if "ALL_ATTENTION_FUNCTIONS" not in source:
        # Without an attention of its own, it has that of other models, and these are asked too.
        return "own" if re.search(r"^class \w*Attention\w*\(nn\.Module\)", source, re.MULTILINE) else "sdpa's masks"
    if _BY_NAME.search(source):
        return "own"
    # Code that supports "sdpa" or "flex_attention" adds no mask to scores: theirs are bools, or no tensors at all.
    opaque = model._supports_sdpa or (model._supports_attention_backend and model._supports_flex_attn)
    return "sdpa's masks" if opaque and '_attn_implementation == "sdpa"' not in source else "eager's masks"


def has_sinks_of_queries(model: Any) -> bool:
    """Whether a class of models gives attention sinks of every query, which the kernels do not take."""
    try:
        return re.search(r"\bsinks=sinks\b", inspect.getsource(sys.modules[model.__module__])) is not None
    except (KeyError, OSError, TypeError):
        return False


def choose(config: Any, models: list[Any]) -> None:
    """Set this attention for the models of a config, which have been asked whether they can have it."""
    kinds: set[Any] = set(map(type, models))
    if "eager's masks" in map(attention_of, kinds):
        _EAGERS_MASKS.add(type(config))
    config._attn_implementation_internal = NAME


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As transformers calls an attention function: ([batch, queries, heads, value_dim], None for the weights).

    query: [batch, heads, queries, dim]; key and value: [batch, heads or fewer, keys, dim]. attention_mask: of
        `attention_mask`, or any that broadcasts to [batch, heads, queries, keys], a bool or a float that is added.
    s_aux: sinks, [heads]. position_bias: added to the scores.
    """
    for name, what in _UNKNOWN.items():
        if others.get(name) is not None:
            raise ValueError(
                f'attn_implementation="{NAME}" does not take {name}, {what}, of {_name(module)}; take "eager" or "sdpa"'
            )
    if dropout:
        raise ValueError(
            f'attn_implementation="{NAME}" has no dropout, because weights are never in memory; {_name(module)} has '
            f"dropout={dropout}: set it to 0 in the model's config, or call model.eval()"
        )
    if others.get("output_attentions") or _weights_are_collected():
        raise ValueError(
            f'attn_implementation="{NAME}" has no weights for output_attentions=True of {_name(module)}, because they '
            'are never in memory; take "eager"'
        )
    hidden = getattr(attention_mask, NAME, None)
    told: dict[str, Any] = {}
    if hidden is not None and attention_mask is not None and hidden.version == version_of(attention_mask):
        attention_mask = hidden.padding
        if (hidden.left, hidden.right) != (None, None):
            told = {"window": (hidden.left, hidden.right), "causal_align": "bottom_right"}
    elif attention_mask is None and query.shape[2] > 1 and not _has_eagers_masks(getattr(module, "config", None)):
        # Without a mask, one query sees all; more of them than keys before it, if a static cache is still empty.
        # "eager" asks nobody for is_causal, because its causal masks are always there.
        told = {"is_causal": getattr(module, "is_causal", True) if is_causal is None else is_causal}
    try:
        output = attention(
            query, key, value, attention_mask, bias=position_bias, scale=scaling, softcap=softcap, sinks=s_aux,
            enable_gqa=query.shape[1] != key.shape[1], **told,
        )  # fmt: skip
    except ValueError as error:
        raise ValueError(f'{error}, of {_name(module)}; take attn_implementation="eager" or "sdpa"') from error
    return output.transpose(1, 2).contiguous(), None  # type: ignore[union-attr]


def _has_eagers_masks(config: Any) -> bool:
    return type(config) in _EAGERS_MASKS


def _name(module: nn.Module) -> str:
    return type(module).__name__


def _weights_are_collected() -> bool:
    """Whether transformers collects what this call would return as its weights, as a model's forward pass asked."""
    if is_compiling():
        return False
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    return collector is not None and any("attentions" in key for key in collector.get() or ())


def attention_mask(**given: Any) -> Tensor | None:
    """As transformers calls a mask function: that of "sdpa", which also tells `attention_forward` what it hides.

    Of a model that has attention of its own code too, that of "eager".
    """
    from transformers.masking_utils import bidirectional_mask_function, eager_mask, sdpa_mask

    eagers = _has_eagers_masks(given.get("config"))
    mask = (eager_mask if eagers else sdpa_mask)(**given)
    if is_compiling():
        return mask
    if mask is None:
        if eagers or given.get("mask_function") is not bidirectional_mask_function:
            return None
        # Nothing is hidden. As None it would be causal in a module that says so, as Phi-4's vision tower does.
        shape = given["batch_size"], 1, given["q_length"], given["kv_length"]
        mask = torch.ones((), dtype=torch.bool, device=given.get("device")).expand(shape)
        setattr(mask, NAME, _Hidden(None, None, None, version_of(mask)))
        return mask
    hidden = _hidden(mask, **given)
    if hidden is not None:
        setattr(mask, NAME, hidden)
    return mask


def _hidden(
    mask: Tensor,
    q_length: Any = None,
    kv_length: Any = None,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    use_vmap: bool = False,
    **_: Any,
) -> _Hidden | None:
    """None where it takes the mask to say what is hidden."""
    from transformers.masking_utils import bidirectional_mask_function

    if use_vmap or not all(isinstance(each, int) for each in (q_length, kv_length, q_offset, kv_offset)):
        return None
    padding = None
    if attention_mask is not None:
        if tuple(attention_mask.shape) != (mask.shape[0], kv_offset + kv_length):
            return None
        padding = attention_mask[:, None, None, kv_offset:]
    if mask_function is bidirectional_mask_function:
        return _Hidden(padding, None, None, version_of(mask))
    # A skip is allowed for plain causality alone, within a window or a chunk, and of these a window is the config's.
    if not allow_is_causal_skip or q_offset + q_length != kv_offset + kv_length:
        return None
    chunked = getattr(config, "attention_chunk_size", None) is not None
    if local_size is not None and (chunked or local_size != getattr(config, "sliding_window", None)):
        return None
    return _Hidden(padding, None if local_size is None else local_size - 1, 0, version_of(mask))
