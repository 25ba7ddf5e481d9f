"""One call that puts this package into a model of transformers: its loss, its attention, its routers."""

import copy
import inspect
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, is_dataclass
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling

from fused_softmax.core.described import described
from fused_softmax.hf import attention as attentions
from fused_softmax.hf import routers
from fused_softmax.hf.deferred import (
    Head,
    Mixin,
    is_mixed,
    is_recorded,
    opened,
    put,
    register_output,
    say,
    settled,
    taken,
)
from fused_softmax.hf.needed import need_transformers
from fused_softmax.ops.losses.linear_by_rows import check_layer

_NAME = "fused_softmax.hf.apply"
PARTS = ("loss", "attention", "routers")
_WIDEST_HEAD = 256
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout", "dropout_rate")
_WIDTHS = ("head_dim", "global_head_dim", "v_head_dim", "qk_head_dim", "d_kv")
# What a model may be given that says nothing of positions.
_OF_TOKENS = {"input_ids", "inputs_embeds", "labels", "num_items_in_batch", "return_dict", "logits_to_keep"}
_POSITIONS = re.compile(r"^ *position_ids = (.*)$", re.MULTILINE)
_NUMBERED = re.compile(
    r"torch\.arange\(\w+\.shape\[1\], device=\w+\.device\) \+ past_seen_tokens|position_ids\.unsqueeze\(0\)"
)
_SOFTCAPS = ("attn_logit_softcapping", "attention_logit_cap")


@dataclass(eq=False)
class Applied:
    """What `apply` has put into a model, and what it has left there. It prints as a table.

    replaced: by part, "loss", "attention" or "routers", what is computed by this package now. left: by part, what stays
    transformers' own, and why.
    """

    replaced: dict[str, list[str]]
    left: dict[str, list[str]]
    _undo: list[Callable[[], None]] = field(repr=False)

    def undo(self) -> None:
        """Give the model back what it had. A second call changes nothing.

        Raises RuntimeError, before it changes anything, if something else has changed the class of a module since, as
        FSDP2's fully_shard does.
        """
        if self._undo:
            self._undo[0]()
        self._undo.clear()

    def __str__(self) -> str:
        lines = [f"{part:<9}  {each}" for part in PARTS for each in self.replaced.get(part, ())]
        lines += [f"{part:<9}  left: {each}" for part in PARTS for each in self.left.get(part, ())]
        return "\n".join(lines)


class Model(Mixin, nn.Module):
    """A model whose head makes no logits in a forward pass with labels.

    has_head: whether that is so. balances: whether its routers are route's, and so the loss that balances experts.
    numbers: whether it numbers the tokens of a row by itself, from first to last, where nobody gives positions.
    """

    has_head: bool
    balances: bool
    numbers: bool

    def __setstate__(self, state: Any) -> None:  # of a copy, or of what was pickled, maybe in another process
        super().__setstate__(state)
        register_outputs(type(self))
        if self.balances:
            _balance(self)
        if self.numbers and _numbers(self):
            attentions.spare_masks()
        for config, models in _parts(self):
            if config._attn_implementation == attentions.NAME:
                attentions.register()
                attentions.choose(config, models)

    @classmethod
    def members_for(cls, base: Any) -> dict[str, Any]:
        plain = base.forward
        names = _parameters(base)

        @wraps(plain)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            run = base.forward  # which somebody may have replaced since
            given = dict(zip(names if run is plain else _parameters(base), args, strict=False)) | kwargs
            heads: tuple[Any, ...] = ()
            if self.has_head and any(each is not None and name.endswith("labels") for name, each in given.items()):
                head = self.get_output_embeddings()
                heads = tuple(each for each in head.modules() if isinstance(each, Head))
                if not heads:
                    say(f"the head of {type(self).__name__} has been replaced since apply(): call it again")
                elif type(head).__name__ == "FullyShardedDataParallel":
                    heads = ()
                    say("all logits are made, as without apply(), because FSDP1 shards the head in a unit of its own")
            serves = 1 if self.balances else 0
            outer = opened.heads, opened.deferred, opened.grad, opened.unpacked
            opened.heads, opened.deferred, opened.grad = heads, False, torch.is_grad_enabled()
            opened.unpacked = False
            if is_compiling() and self.numbers and run is plain:
                of_tokens = (each is None or each is False or name in _OF_TOKENS for name, each in given.items())
                opened.unpacked = all(of_tokens) and _is_as_written(self.base_model)
            routers.serving.depth += serves
            try:
                output = run(self, *args, **kwargs)
                deferred = opened.deferred
            finally:
                routers.serving.depth -= serves
                opened.heads, opened.deferred, opened.grad, opened.unpacked = outer
            if heads and not deferred:
                say(
                    f"all logits are made, as without apply(), because {type(self).__name__}.forward does not call its "
                    "head, or hooks, a checkpoint or another forward of the head look at its output"
                )
            # Of a replica, whose weight is gone then, DataParallel gathers all outputs.
            return settled(output, made=hasattr(self, "_is_replica") or is_recorded()) if heads else output

        # accelerate's unwrap_model() goes by __wrapped__ to the innermost function, and leaves that with the model.
        del forward.__wrapped__
        forward.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]
        return {"forward": forward, "has_head": False, "balances": False, "numbers": False}


def apply(
    model: nn.Module, parts: Iterable[str] | None = None, *, chunk_size: int | None = None, accumulate: str = "fp32"
) -> Applied:
    """Put this package into a language model of transformers: its loss, and its attention and routers where they gain.

    model: any model with an output embedding that is a linear layer, and labels; or what wraps one, as PEFT does.
    parts: which of "loss", "attention" and "routers". None is all that the model has, and the loss is always one.
    chunk_size, accumulate: those of `linear_cross_entropy`. A `chunk_size` of 32 with `accumulate="input"` takes least
        memory; by themselves, chunks of up to 1 GiB of logits, or all, take least time.

    "loss": in a forward pass with labels the head makes no logits. The loss that the model asks for is
        `linear_cross_entropy` of its head's input, which computes them in chunks, with the model's own shifts,
        num_items_in_batch, ignore_index, scale and softcap. The output's logits are made when something first reads
        them, with their gradient if it is enabled then as it was.
        A model whose own code reads them gets them, and a UserWarning says where. Without labels, as in generate(),
        nothing is changed.
    "attention": `attention`, as after `register()`, where transformers has "eager", or "sdpa" for a softcap or for a
        bias of relative positions; unless the model has dropout in attention, or heads of more than 256 dims. The model
        then has a copy of its config, because other models may share the original.
    "routers": `route` in routers of the classes that it knows, and in the loss that balances experts.

    The state dict, saved files and copies are as before. Apply a model before DDP, FSDP2 and torch.compile wrap it;
    PEFT may wrap it before or after.

    Returns an Applied: what was replaced, what was left and why, and `undo()`.
    Raises TypeError for what is no module; ValueError for a model without what was asked for, naming what it looked
    for; RuntimeError for a model that is applied already. The model is then as it was.

    >>> applied = fused_softmax.hf.apply(model)
    >>> print(applied)
    loss       LlamaForCausalLM.lm_head, 128256 classes: linear_cross_entropy
    attention  left: LlamaConfig: "sdpa" is as fast
    >>> applied.undo()
    """
    need_transformers(_NAME)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{_NAME}: model must be a module, not {type(model).__name__}")
    asked = tuple(PARTS if parts is None else parts if isinstance(parts, Iterable) else ())
    if isinstance(parts, str) or not asked or not all(isinstance(each, str) and each in PARTS for each in asked):
        raise ValueError(f"{_NAME}: parts must be some of {PARTS}, got {described(parts)}")
    any_layer = torch.empty(1, 1, device="cpu")
    check_layer(_NAME, any_layer, any_layer, None, chunk_size, accumulate)
    if any(isinstance(each, Mixin) for each in model.modules()):
        raise RuntimeError(
            f"{_NAME}: {type(model).__name__} is applied already; call undo() of what apply() "
            "returned, of a copy before it is copied"
        )
    target = _target(model)
    replaced: dict[str, list[str]] = {}
    left: dict[str, list[str]] = {}
    heads: list[nn.Module] = []
    if "loss" in asked:
        heads, replaced["loss"] = _heads(target)
    of_routers = _routers(target, left) if "routers" in asked else []
    if of_routers:
        counts = Counter(type(each).__name__ for each in of_routers)
        replaced["routers"] = [f"{n} x {name}: route" for name, n in counts.items()]
    configs = _configs(target, left) if "attention" in asked else []
    if configs:
        replaced["attention"] = [f'{type(each).__name__}, which had "{was}": attention' for each, was, _ in configs]
    if parts is not None:
        _check_found(target, asked, replaced, left)
    undo = _commit(model, target, heads, of_routers, configs)
    for each in heads:
        each.__dict__["chunks"] = {"chunk_size": chunk_size, "accumulate": accumulate}
    return Applied(replaced, left, [undo])


def _commit(
    model: nn.Module,
    target: Any,
    heads: list[nn.Module],
    of_routers: list[nn.Module],
    configs: list[tuple[Any, str, list[Any]]],
) -> Callable[[], None]:
    """Change the model, which nothing refuses now, and return what gives it back."""
    register_outputs(type(target))
    balances, numbers = bool(of_routers), _numbers(target)
    mixed = [*((each, Head) for each in heads), *((each, routers.Router) for each in of_routers)]
    if mixed or configs:
        mixed.append((target, Model))
    for module, mixin in mixed:
        put(module, mixin)
    if heads:
        target.has_head = True
    if numbers:
        target.numbers = True
        attentions.spare_masks()
    if balances:
        target.balances = True
        unbalance = _balance(target)
    if configs:
        attentions.register()
        share = _own_configs(model, target)
    for _, _, models in configs:
        attentions.choose(models[0].config, models)

    def undo() -> None:
        # Those that were put, and copies of them that the model has since, as PEFT trains one of a head.
        found: dict[nn.Module, None] = dict.fromkeys(module for module, _ in mixed)
        found |= {each: None for each in target.modules() if isinstance(each, Mixin)}  # type: ignore[misc]
        for module in found:
            if not is_mixed(type(module)):
                raise RuntimeError(
                    f"undo: the class of {type(module).__name__} has been changed since it was applied, as "
                    "fully_shard does; undo() goes before it"
                )
        for module in found:
            taken(module)
            for name in ("has_head", "balances", "numbers", "chunks"):
                module.__dict__.pop(name, None)
        if balances:
            unbalance()
        for _, was, models in configs:
            if models[0].config._attn_implementation == attentions.NAME:
                models[0].config._attn_implementation_internal = was
        if configs:
            share()

    return undo


def _own_configs(model: nn.Module, target: nn.Module) -> Callable[[], None]:
    """Give a model, and what wraps it, copies of its configs, because other models may share the originals.

    The function that it returns puts the originals back, unless a copy has changed since, as by
    resize_token_embeddings().
    """
    from transformers import PreTrainedConfig

    where = next(name for name, each in model.named_modules() if each is target).split(".")
    wraps = [model.get_submodule(".".join(where[:depth])) for depth in range(len(where))]
    copies: dict[int, Any] = {}
    owned = []
    for each in {*wraps, *target.modules()}:
        for name, config in tuple(vars(each).items()):
            if isinstance(config, PreTrainedConfig):
                owned.append((vars(each), name, config, copy.deepcopy(config, copies)))
    for holder, name, _, own in owned:
        holder[name] = own

    def share() -> None:
        if all(own == config for _, _, config, own in owned):
            for holder, name, config, own in owned:
                if holder.get(name) is own:
                    holder[name] = config

    return share


_numbering: dict[type, Any] = {}  # the forward of each class of inner models that numbers tokens, as it was read


def _numbers(target: Any) -> bool:
    """Whether a model's own code gives the tokens of a row the positions 0, 1, 2, ..., and no others."""
    from transformers import PreTrainedModel

    models = [each for each in target.modules() if isinstance(each, PreTrainedModel)]
    if models != [target, target.base_model]:
        return False
    outer = type(target).__bases__[1] if is_mixed(type(target)) else type(target)
    inner = type(target.base_model)
    try:
        found = [each for kind in (outer, inner) for each in _POSITIONS.findall(inspect.getsource(kind))]
    except (OSError, TypeError):
        return False
    if not found or not all(map(_NUMBERED.fullmatch, found)):
        return False
    _numbering[inner] = inner.forward
    return True


def _is_as_written(inner: Any) -> bool:
    """Whether nothing that was not read can give an inner model positions: a hook, or another forward."""
    kind = type(inner)
    hooked = inner._forward_pre_hooks or torch.nn.modules.module._global_forward_pre_hooks
    return not hooked and "forward" not in inner.__dict__ and kind.forward is _numbering.get(kind)


def _balance(target: Any) -> Callable[[], Any]:
    """Put the loss of a model's experts on route, and return what takes it off, as the end of the model does."""
    home = type(target).__module__
    routers.balance(home)
    return weakref.finalize(target, routers.unbalance, home)


def register_outputs(kind: type) -> None:
    """Classes of outputs that a model may return, made before a compiler traces it."""
    from transformers import modeling_outputs
    from transformers.utils import ModelOutput

    modules = [modeling_outputs, *(sys.modules[each.__module__] for each in kind.__mro__)]
    for module in modules:
        for each in tuple(vars(module).values()):
            if isinstance(each, type) and issubclass(each, ModelOutput) and is_dataclass(each):
                register_output(each)


def _parameters(kind: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def _target(model: nn.Module) -> Any:
    """The model of transformers that has the head."""
    from transformers import PreTrainedModel

    found: list[Any] = []
    inner: set[int] = set()
    for each in model.modules():
        if isinstance(each, PreTrainedModel) and id(each) not in inner and _embedding(each) is not None:
            found.append(each)
            inner.update(map(id, each.modules()))
    if len(found) > 1:
        names = ", ".join(type(each).__name__ for each in found)
        raise ValueError(f"{_NAME}: {type(model).__name__} has several language models ({names}); apply each of them")
    if not found:
        raise ValueError(
            f"{_NAME}: {type(model).__name__} has no model of transformers with an output embedding "
            "(get_output_embeddings()), such as AutoModelForCausalLM or AutoModelForSeq2SeqLM make"
        )
    return found[0]


def _embedding(model: Any) -> Any:
    try:
        return model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def _heads(target: Any) -> tuple[list[nn.Module], list[str]]:
    kind, head = type(target).__name__, _embedding(target)
    if not any(name.endswith("labels") for name in _parameters(type(target))):
        raise ValueError(f"{_NAME}: {kind}.forward takes no labels, so that it has no loss to replace")
    where = next((name for name, each in target.named_modules() if each is head), "its head")
    # PEFT trains a copy, and calls that one.
    copies = getattr(head, "modules_to_save", None)
    linear = [head] if copies is None else [head.original_module, *copies.values()]
    for owner, each in ((kind, target), *((f"{kind}.{where}", each) for each in linear)):
        if "forward" in each.__dict__:
            raise ValueError(
                f"{_NAME}: {owner}.forward is a function of this module alone, as device_map=, accelerate's prepare() "
                "and TRL's trainers set one: apply the model before"
            )
    for each in linear:
        if not isinstance(each, nn.Linear) or type(each).forward is not nn.Linear.forward:
            raise ValueError(
                f"{_NAME}: {kind}.{where}, its output embedding, must be torch.nn.Linear with the forward of that "
                f"class, not {type(each).__name__}"
            )
    return linear, [f"{kind}.{where}, {linear[0].out_features} classes: linear_cross_entropy"]


def _routers(target: Any, left: dict[str, list[str]]) -> list[nn.Module]:
    """Routers whose classes are known, after one of each was tried."""
    found = [each for each in target.modules() if routers.recipe_of(type(each)) is not None]
    for kind in {type(each): each for each in found}.values():
        routers.check(kind)
    named = (type(each) for each in target.modules() if type(each).__name__.endswith("Router"))
    unknown = sorted({each.__name__ for each in named if routers.recipe_of(each) is None})
    if unknown:
        left["routers"] = [f"{name}: route does not know it" for name in unknown]
    return found


def _configs(target: Any, left: dict[str, list[str]]) -> list[tuple[Any, str, list[Any]]]:
    """Configs whose attention becomes ours, each with the implementation that it has."""
    found = []
    for config, models in _parts(target):
        was, why = config._attn_implementation, _why_left(config, models)
        if why is None:
            found.append((config, was, models))
        else:
            left.setdefault("attention", []).append(f"{type(config).__name__}: {why}")
    return found


def _parts(target: Any) -> list[tuple[Any, list[Any]]]:
    """Configs of a model's parts, each with the parts that have it."""
    from transformers import PreTrainedModel

    parts: dict[int, list[Any]] = {}
    for each in target.modules():
        if isinstance(each, PreTrainedModel):
            parts.setdefault(id(each.config), []).append(each)
    return [(models[0].config, models) for models in parts.values()]


def _why_left(config: Any, models: list[Any]) -> str | None:
    """Why the attention of models of a config stays as it is; None if it does not."""
    was = config._attn_implementation
    if was not in ("eager", "sdpa"):
        return f'"{was}" was asked for'
    kinds: set[Any] = set(map(type, models))
    if "own" in map(attentions.attention_of, kinds):
        return "code of its own"
    parts = [part for each in models for part in each.modules()]
    if not any("Attention" in type(part).__name__ and getattr(part, "config", config) is config for part in parts):
        return "no attention"
    if any(attentions.has_sinks_of_queries(each) for each in kinds):
        return "sinks that are no parameter [heads]"
    dropout = max(float(_option(config, name) or 0) for name in _DROPOUTS)
    if dropout:
        return f"dropout of {dropout} in attention"
    widths = [each for each in (_option(config, name) for name in _WIDTHS) if each is not None]
    if not all(isinstance(each, int) and each <= _WIDEST_HEAD for each in widths):
        return f"heads of more than {_WIDEST_HEAD} dims, or of several widths"
    capped = any(_option(config, name) for name in _SOFTCAPS)
    biased = any(hasattr(part, "relative_attention_bias") for part in parts)
    return '"sdpa" is as fast' if was == "sdpa" and not capped and not biased else None


def _option(config: Any, name: str) -> Any:
    """An option of a config, None where there is none; an error of transformers if layers have several of it."""
    try:
        return getattr(config, name, None)
    except Exception as error:  # of one class in each version of transformers
        return error


def _check_found(target: Any, asked: tuple[str, ...], replaced: dict, left: dict[str, list[str]]) -> None:
    what = {
        "attention": "an attention that this package computes faster than transformers",
        "routers": "routers of the classes that route knows",
    }
    for part in asked:
        if not replaced.get(part):
            why = f" ({'; '.join(left[part])})" if left.get(part) else ""
            raise ValueError(f"{_NAME}: {type(target).__name__} has no {part}: looked for {what[part]}{why}")
