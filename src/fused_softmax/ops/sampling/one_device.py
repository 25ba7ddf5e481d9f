"""Draws on one device: the arguments of the kernels; seeds and positions as kernels take them."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fused_softmax.core.calls import bump_version
from fused_softmax.core.layout import overlap_like
from fused_softmax.ops.sampling import reference
from fused_softmax.ops.sampling.calls import prepare_report
from fused_softmax.ops.sampling.launches import (
    FEW,
    Numbers,
    Written,
    greatest,
    judged_rows,
    log_probs_at,
    prepare_draws,
    raw_lse,
    rows_of,
)
from fused_softmax.ops.sampling.options import PENALTIES, Sampling
from fused_softmax.ops.sampling.penalties import Penalties, prepare_penalties, strides_of_draws
from fused_softmax.ops.sampling.reference import SampleOutput, per_row, rank_of, unpacked
from fused_softmax.ops.sampling.turns import prepare_sample

_NUMBERS = (float, int)


def draws_of(
    logits: Tensor, options: Sampling, seed: int | Tensor, position: int | Tensor | None, out: Tensor | None = None
) -> SampleOutput:
    """A call by the kernels, of logits that they take."""
    n_draws = logits.shape[0] if options.row_indices is None else options.row_indices.shape[0]
    if not n_draws or not logits.shape[0]:  # nothing to launch, or no row to read
        seeds, positions = int64_of(seed, n_draws, logits.device), positions_of(position, n_draws, logits.device)
        none = reference.sample(logits, seeds, positions, **options.options())
        return SampleOutput(none.tokens if out is None else out.copy_(none.tokens), *none[1:])
    if options.token_ids is not None:
        return _penalized_draws(logits, options, seed, position, out)
    if options.top_logprobs <= FEW:  # more are found by torch's operations
        call = prepared_of(logits, options, seed, position, out)
        numbers = Numbers.of(options, seed, position)
        return call(logits, numbers, options.logit_bias, options.bitmask, options.row_indices, out)
    processed, n_top = options.return_logprobs == "processed", options.top_logprobs
    wanted = replace(options, return_kept=options.return_kept or processed)
    call = prepare_draws(logits, wanted, seed, position, None, logprobs=processed)
    read = wanted.logit_bias, wanted.bitmask, wanted.row_indices
    drawn = call(logits, Numbers.of(wanted, seed, position), *read, None)
    x, of_tokens = rows_of(logits, options), drawn.logprobs
    if processed:
        x = judged_rows(x, options)
        of_token = x.gather(1, drawn.tokens[:, None]).double()
        t = per_row(options.temperature, x)
        top_x, top_tokens = greatest(x, n_top, drawn.kept)
        assert drawn.kept is not None
        rank = rank_of(x, drawn.tokens, drawn.valid, unpacked(drawn.kept, x.shape[1])) if options.return_rank else None
        less = torch.where(top_x == of_token, 0.0, top_x.double() - of_token) / torch.where(t > 0, t, 1.0)
        assert of_tokens is not None
        top = less + of_tokens[:, None].double()
    else:
        of_tokens, top, top_tokens, rank = _raw_log_probs(drawn, logits, options, x)
    top, top_tokens = _in_valid_rows(drawn, top, top_tokens)
    kept = drawn.kept if options.return_kept else None
    tokens = drawn.tokens if out is None else out.copy_(drawn.tokens)
    return SampleOutput(tokens, drawn.valid, of_tokens, top, top_tokens, kept, rank)


def _in_valid_rows(drawn: SampleOutput, top: Tensor, top_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The greatest log-probabilities and their columns, as a call returns them."""
    there = drawn.valid[:, None]
    return top.float().masked_fill(~there, math.nan), torch.where(there & (top > -math.inf), top_tokens, -1)


def _raw_log_probs(
    drawn: SampleOutput, logits: Tensor, options: Sampling, x: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(of the tokens, the greatest, their columns; ranks): log-probabilities of the logits as given, x their rows."""
    lse = raw_lse(logits, options, x)[:, None]
    of_tokens = log_probs_at(x.gather(1, drawn.tokens[:, None]), lse).squeeze(1).float()
    top_x, top_tokens = greatest(x, options.top_logprobs)
    rank = rank_of(x, drawn.tokens, drawn.valid) if options.return_rank else None
    return of_tokens.masked_fill(~drawn.valid, math.nan), log_probs_at(top_x, lse), top_tokens, rank


def _penalized_draws(
    logits: Tensor, options: Sampling, seed: int | Tensor, position: int | Tensor | None, out: Tensor | None
) -> SampleOutput:  # fmt: skip
    """As draws_of, of rows that are penalized first."""
    read = options.logit_bias, options.bitmask, options.row_indices
    ids, penalties = penalties_of(options)
    if options.top_logprobs <= FEW:
        call = prepared_of(logits, options, seed, position, out)
        return call(logits, Numbers.of(options, seed, position), *read, out, ids, penalties)
    x = prepare_penalties(logits, ids, penalties, None, *read, torch.float32)(logits, ids, penalties, None, *read)
    own = _of_penalized(options)
    if options.return_logprobs != "raw":
        return draws_of(x, own, seed, position, out)
    drawn = draws_of(x, own, seed, position)
    of_tokens, top, top_tokens, rank = _raw_log_probs(drawn, logits, options, rows_of(logits, options))
    top, top_tokens = _in_valid_rows(drawn, top, top_tokens)
    tokens = drawn.tokens if out is None else out.copy_(drawn.tokens)
    return SampleOutput(tokens, drawn.valid, of_tokens, top, top_tokens, drawn.kept, rank)


def penalties_of(options: Sampling) -> tuple[Any, ...]:
    """What a call with penalties is given beside all else."""
    return () if options.token_ids is None else (options.token_ids, Penalties(**options.penalties()))


def _of_penalized(options: Sampling) -> Sampling:
    """The rest of a call once each draw has a row of its own, with bias, bitmask and penalties in it.

    Log-probabilities of the logits as given are not of these rows.
    """
    raw: Any = (
        {"return_logprobs": None, "top_logprobs": 0, "return_rank": False} if options.return_logprobs == "raw" else {}
    )
    names = "logit_bias", "bitmask", "row_indices", "token_ids", *PENALTIES
    done: Any = {name: Sampling.DEFAULTS[name] for name in names}
    return replace(options, **done, **raw)


def _prepare_penalized(
    logits: Tensor, options: Sampling, seed: int | Tensor, position: int | Tensor | None, out: Tensor | None
) -> Callable[..., SampleOutput]:  # fmt: skip
    """`prepared_of` for calls with penalties, which take token_ids and Penalties as their last arguments."""
    read = options.logit_bias, options.bitmask, options.row_indices
    ids, numbers = penalties_of(options)
    penalize = prepare_penalties(logits, ids, numbers, None, *read, torch.float32)
    shape = (logits if options.row_indices is None else options.row_indices).shape[0], logits.shape[1]
    x = torch.empty_strided(shape, strides_of_draws(shape[1]), dtype=torch.float32, device=logits.device)
    raw = options.return_logprobs == "raw"
    draw = prepared_of(x, _of_penalized(options), seed, position, None if raw else out)
    report: Any = None
    if raw:
        as_given = Sampling(
            row_indices=options.row_indices, return_logprobs="raw", top_logprobs=options.top_logprobs,
            return_rank=options.return_rank,
        )  # fmt: skip
        report = prepare_report(logits, as_given, seed, position, None, False, None, None)

    def call(logits, numbers, bias, bitmask, rows, out, token_ids, penalties):
        x = penalize(logits, token_ids, penalties, None, bias, bitmask, rows)
        if not raw:
            return draw(x, numbers, None, None, None, out)
        drawn = draw(x, numbers, None, None, None, None)
        found = report(logits, numbers, None, None, rows, Written(tokens=drawn.tokens, valid=drawn.valid))
        tokens = drawn.tokens if out is None else out.copy_(drawn.tokens)  # which may share memory with the logits
        return found._replace(tokens=tokens, kept=drawn.kept)

    return call


def prepared_of(
    logits: Tensor, options: Sampling, seed: int | Tensor, position: int | Tensor | None, out: Tensor | None
) -> Callable[..., SampleOutput]:
    """`prepare_sample`, for which no token is written to `out` where something is still to be read.

    Autograd is told of the writes.
    """
    if options.token_ids is not None:
        return _prepare_penalized(logits, options, seed, position, out)
    call = prepare_sample(logits, options, seed, position, out)
    if out is None:
        return call
    given = logits, *Numbers.of(options, seed, position), options.logit_bias, options.bitmask, options.row_indices
    overlaps, shape, strides = overlap_like(out, *given), out.shape, out.stride()

    def call_into(logits, numbers, bias, bitmask, rows, out):
        if overlaps(out, logits, *numbers, bias, bitmask, rows):  # of a draw that is written, another may be unread
            apart = torch.empty_strided(shape, strides, dtype=torch.int64, device=out.device)
            drawn = call(logits, numbers, bias, bitmask, rows, apart)
            return drawn._replace(tokens=out.copy_(apart))
        drawn = call(logits, numbers, bias, bitmask, rows, out)
        if not out.is_inference():
            bump_version((out,))  # autograd sees no write of a kernel's
        return drawn

    return call_into


def seed_of(generator: torch.Generator | None, device: torch.device) -> Tensor:
    """A seed for all rows, int64."""
    # Drawn on the device: a captured graph advances the generator as it does for torch's own.
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device=device, generator=generator)


def position_of(seed: int | Tensor | None, position: int | Tensor | None) -> int | Tensor | None:
    """The position of draws of a seed; None where draw i has position i, so that rows of one seed are independent."""
    if position is None:
        return 0 if isinstance(seed, Tensor) else None
    return signed(position)


def positions_of(position: int | Tensor | None, n: int, device: torch.device) -> Tensor:
    return torch.arange(n, device=device) if position is None else int64_of(position, n, device)


def plain_call(
    logits: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, seed: Any, position: Any, generator: Any
) -> tuple[Numbers, tuple[Any, ...]] | None:
    """(the numbers of a call, what tells apart calls that differ in other things), for `find`.

    None if an argument has to be looked at more closely. What is neither a number nor a tensor finds no call.
    """
    of_k, of_p, of_least_p, of_seed, of_position = top_k, top_p, min_p, seed, position
    of_temperature = temperature
    if temperature.__class__ in _NUMBERS:
        if not (1e-30 < temperature < 1e30 or temperature == 0):
            return None
        of_temperature = "number" if temperature else "zero"
    if top_k.__class__ is int:
        if not isinstance(logits, Tensor) or not logits.ndim:
            return None
        top_k, of_k = (top_k, "number") if 0 < top_k < logits.shape[-1] else (None, None)
    if top_p.__class__ in _NUMBERS:
        if not top_p > 1e-30:
            return None
        top_p, of_p = (top_p, "number") if top_p < 1 else (None, None)
    if min_p.__class__ in _NUMBERS:
        if not (1e-30 < min_p <= 1 or min_p <= 0):
            return None
        min_p, of_least_p = (min_p, "number") if min_p > 0 else (None, None)
    if seed.__class__ is int:
        if not -(2**63) <= seed < 2**64 or generator is not None:
            return None
        seed, of_seed = _as_int64(seed), "number"
    elif seed is None:
        if position is not None or not _is_of(generator, logits):
            return None
        return Numbers(temperature, top_k, top_p, min_p, None, None), (
            of_temperature, of_k, of_p, of_least_p, "drawn", None,
        )  # fmt: skip
    elif generator is not None:
        return None
    if position is None:
        position, of_position = (None, None) if seed.__class__ is int else (0, "number")
    elif position.__class__ is int:
        if not -(2**63) <= position < 2**64:
            return None
        position, of_position = _as_int64(position), "number"
    return Numbers(temperature, top_k, top_p, min_p, seed, position), (
        of_temperature, of_k, of_p, of_least_p, of_seed, of_position,
    )  # fmt: skip


def _is_of(generator: Any, logits: Any) -> bool:
    """Whether a generator, or none, can draw a seed for logits."""
    if generator is None:
        return True
    return generator.__class__ is torch.Generator and generator.device.type == logits.device.type


def signed(value: Any) -> int | Tensor:
    return value if isinstance(value, Tensor) else _as_int64(value)


def _as_int64(number: int) -> int:
    """The int64 that has the 64 bits of a number."""
    return (int(number) + 2**63) % 2**64 - 2**63


def int64_of(value: int | Tensor, n: int, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.long().expand(n)
    return torch.full((), _as_int64(value), dtype=torch.int64, device=device).expand(n)
