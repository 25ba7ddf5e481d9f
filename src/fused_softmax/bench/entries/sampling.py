"""Samplers that are measured beside this package's, their inputs, and what tells a right one from a wrong one.

A provider gives tokens [n_rows] of logits [n_rows, vocab]; the seeds and positions beside them are for ours alone.
Tokens are random, so no formula gives them. Each has to be one that its filters keep, and the tokens of many draws from
one row have to be spread like its probabilities.
"""

import math
import os

import torch
from torch import Tensor

from fused_softmax import sample
from fused_softmax.bench.cases import Case
from fused_softmax.bench.entries import ceiling
from fused_softmax.bench.entries.filters import FILTERS, VOCABULARY, Filters
from fused_softmax.bench.entries.makers import Call
from fused_softmax.bench.entries.operation import Operation
from fused_softmax.ops.sampling import reference

FLASHINFER_LONG = 65536  # columns from which its top-k goes before all else, and takes logits of 16 bits
# By how much a sum may miss top_p, relative to it: our boundaries are exact, others add 128256 numbers in float32.
OWN_SLACK, OTHERS_SLACK = 1e-5, 1e-3


def inputs(case: Case, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Normal logits, and a seed and a position for every row."""
    device, dtype, deviation = generator.device, getattr(torch, case.dtype), FILTERS[case.operation].deviation
    x = torch.randn(case.shape, device=device, dtype=dtype, generator=generator).mul_(deviation)
    seed = torch.randint(2**62, (case.n_rows,), device=device, generator=generator)
    return x, seed, torch.arange(case.n_rows, device=device)


def bytes_of(case: Case) -> int:
    """Bytes of the logits, seeds, positions and tokens."""
    return case.tensor_bytes + 3 * 8 * case.n_rows


# The samplers.


def own(case: Case) -> Call:
    given = FILTERS[case.operation].given
    return lambda x, seed, position: sample(x, **given, seed=seed, position=position).tokens


def by_torch(case: Case) -> Call:
    """By topk or sort where one is needed, softmax and multinomial."""
    filters = FILTERS[case.operation]
    temperature, k, p, min_p = filters.temperature, filters.top_k, filters.top_p, filters.min_p

    def call(x, seed, position):
        x = x.float()
        if temperature == 0:
            return x.argmax(-1)
        x = x if temperature == 1 else x / temperature
        cols = None
        if k is not None:
            x, cols = x.topk(k)
        elif p is not None:
            x, cols = x.sort(descending=True)
        probs = x.softmax(-1)
        if p is not None:
            probs = probs.masked_fill(probs.cumsum(-1) - probs >= p, 0.0)
        if min_p is not None:
            probs = probs.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), 0.0)
        at = torch.multinomial(probs, 1)
        return (at if cols is None else cols.gather(-1, at)).squeeze(-1)

    return call


def by_transformers(case: Case) -> Call:
    """As generate() draws: its warpers in their order, then softmax and multinomial."""
    from transformers.generation import logits_process as warpers

    filters = FILTERS[case.operation]
    chain = [
        getattr(warpers, f"{name}LogitsWarper")(value)
        for name, value in (("TopK", filters.top_k), ("TopP", filters.top_p), ("MinP", filters.min_p))
        if value is not None
    ]

    def call(x, seed, position):
        scores = x.float()
        if filters.temperature == 0:
            return scores.argmax(-1)
        for warper in chain:
            scores = warper(None, scores)
        return torch.multinomial(scores.softmax(-1), 1).squeeze(1)

    return call


def by_vllm(case: Case) -> Call:
    """As its sampler draws: its own top-k and top-p, and probabilities over exponential noise. Min-p comes first."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p, random_sample

    filters = FILTERS[case.operation]

    def call(x, seed, position):
        if filters.temperature == 0:
            return x.float().argmax(-1)
        logits = x.to(torch.float32, copy=True)  # which it may overwrite
        if filters.min_p is not None:
            probs = logits.softmax(-1)
            logits.masked_fill_(probs < filters.min_p * probs.amax(-1, keepdim=True), -math.inf)
        k, p = (
            None if value is None else torch.full((len(x),), value, device=x.device)
            for value in (filters.top_k, filters.top_p)
        )
        return random_sample(apply_top_k_top_p(logits, k, p).softmax(-1, dtype=torch.float32), {})

    return call


def by_flashinfer(case: Case) -> Call:
    """By its fastest way. Its seeds are tensors, because it cannot be captured in a graph with a generator's."""
    from flashinfer import sampling

    filters = FILTERS[case.operation]
    k, p, min_p = filters.top_k, filters.top_p, filters.min_p

    def call(x, seed, position):
        given = {"seed": seed[:1], "offset": position[:1]}  # of all rows: it tells rows apart by their numbers
        if k is not None:
            x = x if x.shape[1] >= FLASHINFER_LONG else x.float()
            return sampling.top_k_top_p_sampling_from_logits(
                x, k, 1.0 if p is None else p, filter_apply_order="top_k_first", **given
            )
        x = x.float()
        if p is not None:
            return sampling.top_p_sampling_from_probs(sampling.softmax(x), p, **given)
        if min_p is not None:
            return sampling.min_p_sampling_from_probs(sampling.softmax(x), min_p, **given)
        return sampling.sampling_from_logits(x, **given)

    return call


# What tells a right one from a wrong one.


def kept(filters: Filters, x: Tensor, slack: float) -> Tensor:
    """Bool, like x: which columns of rows of logits the filters may keep.

    slack: of top_p and min_p. Ours takes the lowest of equal columns; others may take any of them.
    """
    x = x.float() + 0.0
    p, min_p = filters.top_p, filters.min_p
    judged = reference.judge(
        x, filters.temperature, filters.top_k, None if p is None else p * (1 + slack),
        None if min_p is None else min_p * (1 - slack), joint=False,
    )  # fmt: skip
    if slack > OWN_SLACK:
        return judged.kept | (x >= x.masked_fill(~judged.kept, math.inf).amin(1, keepdim=True))
    return judged.kept


def strays(kept: Tensor, tokens: Tensor) -> Tensor:
    """Bool [n_rows]: whether a row's token is none of the columns that its filters keep."""
    token = tokens.long()[:, None]
    outside = (token < 0) | (token >= kept.shape[1])
    return (outside | ~kept.gather(1, token.clamp(0, kept.shape[1] - 1))).squeeze(1)


def number_of_draws(device: torch.device, own: bool) -> int:
    """How many draws tell a distribution: few where each takes an interpreter milliseconds."""
    if device.type != "cpu":
        return 100_000
    return 4 if own and os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1" else 2000


def draws_of(row: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs of a call that draws n tokens from one row."""
    x = row.expand(n, -1).contiguous()
    return x, torch.full((n,), 1, device=row.device), torch.arange(n, device=row.device)


def misspread(filters: Filters, call: Call, dtype: torch.dtype, device: torch.device, own: bool) -> str:
    """What is wrong with the tokens of many draws from one short row, or "": by chi-square, within 5 deviations."""
    if filters.temperature == 0:
        return ""
    n, generator = number_of_draws(device, own), torch.Generator().manual_seed(0)
    row = (torch.randn(VOCABULARY, generator=generator) * 1.5).to(dtype)  # of which no column has most of the weight
    tokens = call(*draws_of(row.to(device), n)).long().cpu()
    if not ((tokens >= 0) & (tokens < VOCABULARY)).all():
        return f"a token is outside [0, {VOCABULARY})"
    given = (filters.temperature, filters.top_k, filters.top_p, filters.min_p)
    expected = reference.judge(row.float()[None], *given, joint=False).probs[0] * n
    count = tokens.bincount(minlength=VOCABULARY).double()
    if count[expected == 0].any():
        return "a token that has no probability is drawn"
    rare = expected < 5  # these together are one class
    count, expected = (torch.cat((each[~rare], each[rare].sum()[None])) for each in (count, expected))
    there = expected > 0
    chi = ((count - expected).square() / expected)[there].sum().item()
    freedom = max(int(there.sum()) - 1, 1)
    allowed = freedom + 5 * math.sqrt(2 * freedom)
    return "" if chi <= allowed else f"{n} draws have a chi-square of {chi:.0f}, at most {allowed:.0f} is expected"


ENTRIES = {
    name: Operation(
        inputs=inputs,
        own=own,
        formula=by_torch,
        held_bytes=bytes_of,
        ceilings=lambda case: ceiling.reads(),
        parameters=lambda case, filters=filters: {**filters.given, "deviation": filters.deviation},  # type: ignore[misc]
        draws=filters,
        sample=Case((3, 781)),
    )
    for name, filters in FILTERS.items()
}
