"""FlashInfer's samplers, with probabilities made into logits. deterministic= does nothing: results always are here."""

import torch

import fused_softmax

_ORDERS = {"top_k_first": "sequential", "joint": "joint"}


def _logits(probs):
    """The greatest is 0, so that logits near a boundary of top-k or min-p keep their distances."""
    return (probs / probs.amax(-1, keepdim=True)).log()


def _draw(
    logits, top_k=None, top_p=None, min_p=None, indices=None, deterministic=True, generator=None, check_nan=False,
    seed=None, offset=None, return_valid=False, filter_apply_order="joint",
):  # fmt: skip
    if check_nan and logits.isnan().any():
        raise ValueError("Input contains NaN.")
    position = None
    if seed is not None:
        generator, n_draws = None, len(logits if indices is None else indices)
        position = torch.arange(n_draws, device=logits.device) + (0 if offset is None else offset)
    drawn = fused_softmax.sample(
        logits, 1.0, top_k, top_p, min_p, order=_ORDERS[filter_apply_order], seed=seed, position=position,
        generator=generator, row_indices=indices,
    )  # fmt: skip
    tokens = drawn.tokens.to(torch.int32 if indices is None else indices.dtype)
    return (tokens, drawn.valid) if return_valid else tokens


def softmax(logits, temperature=None, enable_pdl=None):
    temperature = 1.0 if temperature is None else temperature
    scale = 1 / (temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature)
    return fused_softmax.softmax(logits, -1, scale=scale)


def sampling_from_logits(logits, indices=None, *args, **options):
    return _draw(logits, None, None, None, indices, *args, **options)


def sampling_from_probs(probs, indices=None, *args, **options):
    return _draw(_logits(probs), None, None, None, indices, *args, **options)


def top_p_sampling_from_probs(probs, top_p, indices=None, *args, **options):
    return _draw(_logits(probs), None, top_p, None, indices, *args, **options)


def top_k_sampling_from_probs(probs, top_k, indices=None, *args, **options):
    return _draw(_logits(probs), top_k, None, None, indices, *args, **options)


def min_p_sampling_from_probs(probs, min_p, indices=None, *args, **options):
    return _draw(_logits(probs), None, None, min_p, indices, *args, **options)


def top_k_top_p_sampling_from_logits(
    logits, top_k, top_p, indices=None, filter_apply_order="top_k_first", *args, **options
):
    return _draw(logits, top_k, top_p, None, indices, *args, filter_apply_order=filter_apply_order, **options)


def top_k_top_p_sampling_from_probs(
    probs, top_k, top_p, indices=None, filter_apply_order="top_k_first", *args, **options
):
    return top_k_top_p_sampling_from_logits(_logits(probs), top_k, top_p, indices, filter_apply_order, *args, **options)


def top_p_renorm_probs(probs, top_p, is_deterministic=False):
    return fused_softmax.top_p_renorm_probs(probs, top_p)


def top_k_renorm_probs(probs, top_k):
    return fused_softmax.top_k_renorm_probs(probs, top_k)


def top_k_mask_logits(logits, top_k):
    return fused_softmax.top_k_mask_logits(logits, top_k)


def chain_speculative_sampling(
    draft_probs, draft_token_ids, target_probs, maybe_output_accepted_token_num=None,
    maybe_output_emitted_draft_token_num=None, deterministic=True, generator=None, seed=None, offset=None,
):  # fmt: skip
    """How many drafts could be accepted one by one is not known here. Both counts are of drafts that are accepted."""
    drawn = fused_softmax.speculative_sample(
        target_probs.log(), draft_token_ids, draft_probs=draft_probs, seed=seed, position=offset, generator=generator
    )
    counts = [
        drawn.n_accepted.int() if given is None else given.add_(drawn.n_accepted)
        for given in (maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num)
    ]
    return drawn.tokens.int(), *counts
