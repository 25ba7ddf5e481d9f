"""Calls of very many draws, some at a time, so that the scratch of their kernels takes bounded memory."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fused_softmax.core.device import device_of
from fused_softmax.ops.sampling import calls as sample_reports
from fused_softmax.ops.sampling.launches import Numbers, spec_of
from fused_softmax.ops.sampling.options import Sampling
from fused_softmax.ops.sampling.plan import plan_draws
from fused_softmax.ops.sampling.reference import SampleOutput

_MOST_BYTES = 2**29  # of scratch: 2500 rows of 2**20 columns, or 7400 short ones, which keep every chip busy
BYTES_OF_A_LOGIT = 128  # that torch's operations take at a time
_ALIGNED = 16  # draws: after so many, a row of any dtype and length is aligned as the first one is


def in_turns(
    function: Callable[..., Any], given: tuple[Tensor | None, ...], numbers: dict[str, Any],
    most: int | None = None,
) -> Any:  # fmt: skip
    """The results of a function of rows, called for some rows at a time: a tensor of rows, or a tuple of such.

    given: tensors of rows, or None. numbers: those that are tensors [n_rows] are of rows too. most: rows at a time;
    None for as many as torch's operations take in `_MOST_BYTES`.
    """
    rows = given[0]
    assert rows is not None
    n_rows = len(rows)
    if most is None:
        most = rows_at_a_time(BYTES_OF_A_LOGIT * max(1, rows[:1].numel()))
    if n_rows <= most:
        return function(*given, **numbers)
    found = []
    for begin in range(0, n_rows, most):
        here = slice(begin, begin + most)
        own = {name: each[here] if isinstance(each, Tensor) and each.ndim else each for name, each in numbers.items()}
        found.append(function(*(None if each is None else each[here] for each in given), **own))
    if isinstance(found[0], Tensor):
        return torch.cat(found)
    return tuple(None if each[0] is None else torch.cat(each) for each in zip(*found, strict=True))


def rows_at_a_time(bytes_of_each: int) -> int:
    return max(1, _MOST_BYTES // bytes_of_each)


def prepare_sample(
    logits: Tensor, options: Sampling, seed: int | Tensor, position: int | Tensor | None, out: Tensor | None
) -> Callable[[Tensor, Numbers, Tensor | None, Tensor | None, Tensor | None, Tensor | None], SampleOutput]:
    """As `calls.prepare_sample`."""
    n_draws = logits.shape[0] if options.row_indices is None else options.row_indices.shape[0]
    most = _draws_at_a_time(logits, options, n_draws)
    if n_draws <= most:
        return sample_reports.prepare_sample(logits, options, seed, position, out)
    bias, bitmask = (_of_draws(each, n_draws) for each in (options.logit_bias, options.bitmask))
    given = (
        logits, Numbers.of(options, seed, position), bias, bitmask, options.row_indices,
        torch.empty(n_draws, dtype=torch.int64, device=logits.device) if out is None else out,
    )  # fmt: skip
    turns = [slice(begin, min(begin + most, n_draws)) for begin in range(0, n_draws, most)]
    calls = {here.stop - here.start: _prepare_turn(here, options, *given) for here in (turns[0], turns[-1])}

    def call(logits, numbers, bias, bitmask, rows, out):
        bias, bitmask = _of_draws(bias, n_draws), _of_draws(bitmask, n_draws)
        tokens = torch.empty(n_draws, dtype=torch.int64, device=logits.device) if out is None else out
        found = [
            calls[here.stop - here.start](*_of_turn(here, logits, numbers, bias, bitmask, rows, tokens))
            for here in turns
        ]  # fmt: skip
        rest: Any = zip(*(each[1:] for each in found), strict=True)
        valid, *others = (None if each[0] is None else torch.cat(each) for each in rest)
        return SampleOutput(tokens, valid, *others)  # type: ignore[arg-type]

    return call


def _of_draws(mask: Tensor | None, n_draws: int) -> Tensor | None:
    """A bias or a bitmask with a row for each draw. A row that several draws share is repeated."""
    if mask is None or mask.ndim == 1 or mask.shape[0] == n_draws:
        return mask
    return mask.repeat_interleave(n_draws // mask.shape[0], 0)


def _draws_at_a_time(logits: Tensor, options: Sampling, n_draws: int) -> int:
    of_filters = options.top_k, options.top_p, options.min_p, options.return_logprobs
    if not options.return_kept and all(each is None for each in of_filters):
        return n_draws  # which have no scratch
    index = logits.get_device()
    plan = plan_draws(n_draws, logits.shape[1], logits.element_size(), device_of(index))
    reports = options.return_kept or options.return_logprobs == "processed"
    spec = spec_of(plan, options, index, True, logits.dtype, reports)
    return max(1, _MOST_BYTES // (8 * spec.scratch * _ALIGNED)) * _ALIGNED


def _prepare_turn(here: slice, options: Sampling, *given) -> Callable[..., SampleOutput]:
    logits, numbers, bias, bitmask, rows, out = _of_turn(here, *given)
    temperature, top_k, top_p, min_p, seed, position = numbers
    own = replace(
        options, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, logit_bias=bias, bitmask=bitmask,
        row_indices=rows,
    )  # fmt: skip
    return sample_reports.prepare_sample(logits, own, seed, position, out)


def _of_turn(
    here: slice, logits: Tensor, numbers: Numbers, bias: Tensor | None, bitmask: Tensor | None, rows: Tensor | None,
    out: Tensor,
) -> tuple:  # fmt: skip
    """What a call is given, of these draws alone."""
    own = [each[here] if isinstance(each, Tensor) and each.ndim else each for each in numbers]
    if numbers.position is None:
        own[-1] = torch.arange(here.start, here.stop, device=out.device)
    return (
        logits[here] if rows is None else logits, Numbers(*own), bias if bias is None or bias.ndim == 1 else bias[here],
        None if bitmask is None else bitmask[here], None if rows is None else rows[here], out[here],
    )  # fmt: skip
