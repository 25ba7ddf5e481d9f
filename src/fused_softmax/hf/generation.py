"""Hugging Face's generate() by `sample`: after custom_generate=sampler(), each token is a draw of ours.

transformers' own loop runs. Its last processor of logits here draws, and leaves a token as the only one that is
possible, so that the loop's argmax takes it: a write and a read of [n_rows, vocab] more than the draw.
"""

import copy
import sys
from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from fused_softmax.core.described import described, typed
from fused_softmax.hf.needed import need_transformers
from fused_softmax.ops.sampling.one_device import signed
from fused_softmax.ops.sampling.sample import sample

# Filters by transformers' classes, in the order in which both apply them.
_FILTERS = {
    "TemperatureLogitsWarper": "temperature", "TopKLogitsWarper": "top_k", "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
}  # fmt: skip


def sampler(seed: int | Tensor | None = None) -> Callable[..., Any]:
    """What `model.generate(..., custom_generate=)` takes, for tokens that `fused_softmax.sample` draws.

    The rest of generate() is transformers' own, such as caches, stopping criteria, streamers, scores and left padding.
    do_sample=False takes the greatest score. temperature, top_k, top_p and min_p are `sample`'s, in their order.
    Everything else that changes scores, such as a repetition penalty, a processor of yours, typical_p or a watermark,
    runs as transformers has it, in its place. Filters before such a one that follows them run so too. If equal scores
    lie on both sides of a boundary, the lowest columns are kept, where transformers' top_k keeps all of them.

    seed: 64 bits; row i has seed + i. Or int64 or int32 [n_rows], on any device: a seed for each row, of which there
        are num_return_sequences a prompt. None: torch's generator of the device draws them at each call, so
        `transformers.set_seed` repeats them.

    A token depends on its row's scores, its seed and its place in the sequence, where padding does not count. So a
    sequence has the same tokens in any batch, and if it is continued by another call with the same seed.

    Raises TypeError or ValueError for a wrong seed, and ValueError, before the first token, for what draws no token a
    step (beams, assistants, prompt lookup, contrastive search), and for models with a loop of their own. A row that
    cannot be drawn from, such as one with NaN, raises ValueError. cache_implementation="paged" is another loop of
    transformers, which does not call custom_generate.

    >>> model.generate(**inputs, do_sample=True, top_p=0.9, custom_generate=fused_softmax.hf.sampler(seed=1))
    """
    need_transformers("fused_softmax.hf.sampler")
    if isinstance(seed, bool) or not (seed is None or isinstance(seed, Integral | Tensor)):
        raise TypeError(f"sampler: seed must be an int or a Tensor, not {typed(seed)}")
    if isinstance(seed, Integral) and not -(2**63) <= int(seed) < 2**64:
        raise ValueError(f"sampler: seed must fit in 64 bits, got {seed}")

    def by_sample(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        from transformers.generation import (
            GenerationMixin,
            GenerationMode,
            LogitsProcessorList,
            StoppingCriteriaList,
        )

        given = _kept_by_generate(model, by_sample)
        mode = generation_config.get_generation_mode(given.pop("assistant_model", None))
        if mode not in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH):
            raise ValueError(f"sampler draws one token a step, which {mode.value} does not; leave out custom_generate=")
        if type(model)._sample is not GenerationMixin._sample:
            raise ValueError(f"sampler draws in transformers' own loop, and {type(model).__name__} has another")
        processors = [*logits_processor]
        filters, warpers = {"temperature": 0.0}, list[Any]()
        if mode is GenerationMode.SAMPLE:
            filters, warpers = _filters_at_the_end_of(processors)
        draw = _Draw(filters, _seeds(seed, input_ids), _lengths(model, input_ids, generation_config, model_kwargs))
        criteria = [*stopping_criteria]
        if generation_config.return_dict_in_generate and generation_config.output_scores:
            draw.warpers = LogitsProcessorList(warpers)
            criteria.insert(0, draw.show)  # before any that looks at the scores
        config = copy.copy(generation_config)
        config.do_sample = False
        result = GenerationMixin._sample(
            model, input_ids, logits_processor=LogitsProcessorList([*processors, draw]),
            stopping_criteria=StoppingCriteriaList(criteria), generation_config=config, **given | model_kwargs,
        )  # fmt: skip
        draw.check()
        return result

    return by_sample


class _Draw:
    """A processor of logits: a row's draw in place of its scores.

    filters: as `sample` takes them. seeds: int64 [n_rows]. lengths: int64 [n_rows], of the sequences that were given.
    """

    def __init__(self, filters: dict[str, Any], seeds: Tensor, lengths: Tensor):
        self.filters, self.seeds, self.lengths = filters, seeds, lengths
        self.n_drawn = 0
        self.valid: Tensor | None = None
        self.warpers: Any = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids: int64 [n_rows, length]. scores: [n_rows, vocab]. Returns -inf, and 0 at each row's token."""
        self.check()
        drawn = sample(scores, **self.filters, seed=self.seeds, position=self.lengths + self.n_drawn)
        self.n_drawn += 1
        self.valid = drawn.valid
        self.alone = torch.full_like(scores, -torch.inf).scatter_(1, drawn.tokens[:, None], 0.0)
        if self.warpers is not None:
            self.scores = self.warpers(input_ids, scores)
        return self.alone

    def check(self) -> None:
        """Raise ValueError if a row of the last step could not be drawn from. The loop has waited for that step."""
        if self.valid is not None and not self.valid.all():
            rows = described((~self.valid).nonzero().flatten().tolist())  # a few, of many
            raise ValueError(
                f"sampler: rows {rows} cannot be drawn from at new token {self.n_drawn}: their scores have a NaN, more "
                "than one inf, or nothing above -inf"
            )

    def show(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """A stopping criterion that stops nothing: the tokens are taken, so generate() may have its scores again."""
        self.alone.copy_(self.scores)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _filters_at_the_end_of(processors: list[Any]) -> tuple[dict[str, Any], list[Any]]:
    """Take from a list what `sample` does in its place: (its arguments, what was taken)."""
    filters: dict[str, Any] = {}
    taken: list[Any] = []
    for kind, name in reversed(_FILTERS.items()):
        last = processors[-1] if processors else None
        if type(last).__module__.startswith("transformers.") and type(last).__name__ == kind:
            value = getattr(last, name)
            keeps_one = getattr(last, "min_tokens_to_keep", 1) == 1 or name == "top_k"  # which is at least that
            if value > 0 and keeps_one and getattr(last, "filter_value", -torch.inf) == -torch.inf:
                filters[name] = value
                taken.insert(0, processors.pop())
    return filters, taken


def _seeds(seed: int | Tensor | None, input_ids: Tensor) -> Tensor:
    n_rows, device = len(input_ids), input_ids.device
    if seed is None:
        return torch.randint(2**63 - 1, (n_rows,), device=device)
    if not isinstance(seed, Tensor):
        return torch.arange(n_rows, device=device) + signed(seed)
    if seed.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"sampler: seed must be of int64 or int32, got {seed.dtype}")
    if tuple(seed.shape) != (n_rows,):
        raise ValueError(
            f"sampler: seed must have shape ({n_rows},), one a sequence to generate, got {tuple(seed.shape)}"
        )
    return seed.to(device, torch.int64)


def _lengths(model: Any, input_ids: Tensor, config: Any, model_kwargs: dict[str, Any]) -> Tensor:
    """int64 [n_rows]: how many tokens each sequence has, without its padding."""
    decodes = model.config.is_encoder_decoder
    mask = model_kwargs.get("decoder_attention_mask" if decodes else "attention_mask")
    if mask is not None and mask.ndim == 2:
        return (mask != 0).sum(1).to(input_ids.device)
    length = input_ids.shape[1]
    if not decodes:  # a prompt of embeddings has no ids, and a mask of ones is left out but for its length
        embeddings = model_kwargs.get("inputs_embeds")
        length = max(length, 0 if embeddings is None else embeddings.shape[1], getattr(config, "_mask_length", 0))
    return torch.full((len(input_ids),), length, device=input_ids.device)


def _kept_by_generate(model: Any, custom_generate: Any) -> dict[str, Any]:
    """The arguments that generate() does not pass on to a custom_generate, which no other way leads to.

    A streamer that gets no token would wait forever, and ranks that do not wait for each other would hang.
    """
    frame = sys._getframe(1).f_back
    while frame is not None:
        of = frame.f_locals
        if of.get("custom_generate") is custom_generate and "streamer" in of:
            return model._extract_generation_mode_kwargs(
                None, {}, of["synced_gpus"], of["assistant_model"], of["streamer"]
            )
        frame = frame.f_back
    return {}
