"""Tokens from logits: temperature, top-k, top-p and min-p, and a draw that depends only on its row, seed and position.

token = argmin_c E_c / p_c,  E_c exponential noise of (seed, position, c); `noise` has the words and the map.
Top-p, and top-k of more than 64, judge the first such tokens instead of narrowing p: `arrivals` says how.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fused_softmax.core.calls import find, keep
from fused_softmax.core.launched import Launched
from fused_softmax.core.no_gradient import refusing
from fused_softmax.core.route import Route, is_sharded, is_unwatched, needs_grad, route_of
from fused_softmax.ops.sampling import reference
from fused_softmax.ops.sampling.dtensor import draws_on_shards
from fused_softmax.ops.sampling.launches import (
    FEW,
    MOST_COLUMNS,
    Numbers,
)
from fused_softmax.ops.sampling.one_device import (
    draws_of,
    int64_of,
    penalties_of,
    plain_call,
    position_of,
    positions_of,
    prepared_of,
    seed_of,
    signed,
)
from fused_softmax.ops.sampling.options import (
    OPTIONS,
    PENALTIES,
    Logprobs,
    Order,
    check_logits,
    check_out,
    check_penalties,
    check_random,
    sampling_of,
)
from fused_softmax.ops.sampling.over_ranks import sample_of_shards
from fused_softmax.ops.sampling.penalties import Penalties, kinds_of
from fused_softmax.ops.sampling.reference import SampleOutput
from fused_softmax.ops.sampling.turns import BYTES_OF_A_LOGIT, in_turns, rows_at_a_time
from fused_softmax.ranks.dtensor import Axes, mesh_of
from fused_softmax.ranks.groups import Transport, over_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LOGPROBS = ("logprobs", "top_logprobs")
_OVER = (
    "with group=, -cross_entropy(logits, tokens, reduction='none', group=group) is the raw log-probability with its "
    "gradient"
)
_is_compiling = torch.compiler.is_dynamo_compiling


def sample(
    logits: Tensor,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    *,
    order: Order = "sequential",
    seed: int | Tensor | None = None,
    position: int | Tensor | None = None,
    generator: torch.Generator | None = None,
    logit_bias: Tensor | None = None,
    bitmask: Tensor | None = None,
    row_indices: Tensor | None = None,
    token_ids: Tensor | None = None,
    repetition: float | Tensor = 1.0,
    presence: float | Tensor = 0.0,
    frequency: float | Tensor = 0.0,
    return_logprobs: Logprobs | None = None,
    top_logprobs: int = 0,
    return_kept: bool = False,
    return_rank: bool = False,
    out: Tensor | None = None,
    group: "ProcessGroup | None" = None,
    n_classes: int | None = None,
    shard_sizes: Sequence[int] | None = None,
    transport: Transport | None = None,
) -> SampleOutput:
    """A token of each row of logits.

    The token of a row depends on its logits, its parameters, its seed and its position. It depends neither on other
    rows, their number and their order, nor on strides. Nothing waits for the device. The call can be captured in a CUDA
    graph. In compiled and exported programs it is one operator, which takes no generator.

    Tokens have no gradient. Log-probabilities have those of the logits, of logit_bias and of tensors of temperatures
    and penalties, for the columns that filters keep; torch's log_softmax then computes them, which takes a float32 copy
    of the logits, and their last bits differ from those without a gradient. With a group they have none, and a backward
    pass raises. Without a gradient the kernels give a row's log-probabilities the same bits in any batch.

    logits: [n_rows, vocab], float32, float16 or bfloat16, at any strides.
    temperature: the logits are divided by it; 0 takes the greatest logit, of equals the lowest column.
    top_k: keeps this many columns; all if it is at most 0 or at least vocab.
    top_p: keeps the fewest columns whose probabilities sum up to it; all if it is at least 1. A sum that is less by
        a share of 2^-22 has reached it, for logits carry float32's rounding: 0.8 keeps two of .5, .3 and .2. On a GPU
        sums within 2^-20 of it may fall on either side.
    min_p: keeps columns at least this many times as likely as the likeliest, with the same tolerance; all if it is at
        most 0.
    order: "sequential" applies temperature, top_k, top_p and min_p in this order, each to what the one before left,
        renormalised, as Hugging Face does; "joint" judges all by the tempered distribution, as FlashInfer does. If
        equal logits lie on both sides of a boundary, the lowest columns are kept.
    seed: 64 bits. A number without a position: draw i has position i, so rows are drawn independently. A tensor
        without a position: the position is 0, so draws of one seed have the same noise.
    position: 64 bits, such as the place of the token in its sequence. Each position has noise of its own.
    generator: draws a seed, on the device; draw i then has position i. Without a seed and a generator, the device's own
        generator does.
    logit_bias: [vocab] or [n_draws, vocab], any float dtype, added in float32, first of all.
    bitmask: int32 [n_draws, at least ceil(vocab / 32)]; a column is possible where bit c % 32 of word c // 32 is 1.
    row_indices: int64 or int32 [n_draws], the row of logits of each draw; n_draws is n_rows without it.
    token_ids: int64 or int32 [n_draws, length], the ids so far of each draw, in any order; those outside [0, vocab)
        count nothing, so pad with -1. Their columns are penalized after bias and bitmask, before the temperature. That
        takes a float32 copy of the logits, one for each draw.
    repetition, presence, frequency: as `penalize` has them; they take token_ids.
    return_logprobs: "raw": of log_softmax(logits) as given; "processed": of the distribution that is drawn from.
    top_logprobs: how many of the greatest of these to return.
    return_kept: whether to return which columns were kept.
    return_rank: whether to return how many columns have a greater logit than the token, and 1; of the logits as given
        or of what is drawn from, as return_logprobs says.
    out: int64 [n_draws], any stride but of an expanded tensor, where to write the tokens; it may be one of the
        arguments, or share its memory.
    group: of torch.distributed, over whose ranks the vocabulary lies in shards: each rank gives its own columns of the
        logits and of logit_bias, in rank order, as many as it has; bitmask and token_ids are of the whole vocabulary.
        All ranks give the same rest, and get the tokens that one device draws from whole rows. Each gathers some of the
        rows. Without a seed, a row is drawn by the generator of the rank that gathers it. return_kept is refused.
    n_classes: with group: of all shards together, if not the sum of their columns. Columns past it, at the end of the
        last shards, are padding, and are never drawn.
    shard_sizes: with group: the columns of each rank, in rank order, the same on all ranks; 0 is a size. Without it all
        ranks have as many columns as each other.
    transport: with group: how ranks talk to each other: "collective", by the group's backend, which None takes.

    temperature, the filters, the penalties, seed and position are numbers, or tensors [] or [n_draws] on the logits'
    device: float16 to float64, which count as float32, or int64 and int32.

    DTensors may lie in shards of rows: each rank draws its own rows, as one device does, and the results are DTensors.
    Without a seed, the mesh's first rank draws one for all.

    A row cannot be drawn from, and has token 0 and valid False, if a possible logit is NaN, two are inf or all are
    -inf, if its bitmask has no bit, if its index is out of range, or if a tensor gives it a parameter that is not
    allowed as a number. A single inf is drawn.

    Raises TypeError for an argument of a wrong type or dtype, ValueError for one of a wrong shape or value, such as a
    negative temperature, a top_p of 0 or less, a min_p above 1, a seed with a generator, or a narrow bitmask, and
    RuntimeError for one on another device; each names the argument, before anything runs. With a group, RuntimeError on
    every rank where ranks differ in anything but their columns, seeds and positions, or one refuses its call: on CPUs,
    with FUSED_SOFTMAX_CHECK=1, and on GPUs of one host unless transport="collective".

    Fan et al. (top-k, arXiv 1805.04833); Holtzman et al. (top-p, arXiv 1904.09751); Nguyen et al. (min-p, arXiv
    2407.01082).

    >>> logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]], device="cuda")
    >>> sample(logits, temperature=0.0).tokens
    tensor([2, 0], device='cuda:0')
    >>> sample(logits, 0.7, top_p=0.9, seed=1, position=torch.tensor([17, 4], device="cuda")).tokens
    tensor([2, 0], device='cuda:0')
    >>> sample(logits, 0.0, token_ids=torch.tensor([[2], [-1]], device="cuda"), presence=1.5).tokens
    tensor([1, 0], device='cuda:0')
    """
    name = "sample"
    if token_ids is None and (repetition is not _ONE or presence is not _ZERO or frequency is not _NO):
        check_penalties(name, token_ids, {"repetition": repetition, "presence": presence, "frequency": frequency})
    if group is not None or n_classes is not None or shard_sizes is not None or transport is not None:
        filters = {
            "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "repetition": repetition,
            "presence": presence, "frequency": frequency,
        }  # fmt: skip
        tensors = {"logit_bias": logit_bias, "bitmask": bitmask, "row_indices": row_indices, "token_ids": token_ids}
        asked = {
            "order": order, "return_logprobs": return_logprobs, "top_logprobs": top_logprobs,
            "return_kept": return_kept, "return_rank": return_rank,
        }  # fmt: skip
        over = over_of(group, n_classes, shard_sizes, transport)
        random = seed, position, generator
        of_shards = sample_of_shards(logits, filters, tensors, asked, random, out, over, sample)
        return _refusing_gradients(of_shards, logits, temperature, logit_bias, repetition, presence, frequency)
    if return_logprobs is not None and _differentiates(
        logits, temperature, logit_bias, repetition, presence, frequency
    ):
        processed = return_logprobs == "processed"
        with torch.no_grad():
            given = sample(
                _detached(logits), _detached(temperature), top_k, top_p, min_p, order=order, seed=seed,
                position=position, generator=generator, logit_bias=_detached(logit_bias), bitmask=bitmask,
                row_indices=row_indices, token_ids=token_ids, repetition=_detached(repetition),
                presence=_detached(presence), frequency=_detached(frequency), return_logprobs=return_logprobs,
                top_logprobs=top_logprobs, return_kept=processed if return_kept is False else return_kept,
                return_rank=return_rank, out=out,
            )  # fmt: skip
        penalties = repetition, presence, frequency
        given = reference.with_gradients(
            given, logits, temperature, logit_bias, row_indices, processed, token_ids, penalties
        )
        # Not by _replace, whose result code that torch 2.11 compiles cannot return.
        return given if return_kept else SampleOutput(*given[:5], None, given.rank)
    plain = None
    look: Any = None
    more: tuple[Any, ...] = ()
    bare = top_logprobs.__class__ is int and top_logprobs <= FEW
    if bare and return_kept.__class__ is return_rank.__class__ is bool and not _is_compiling():
        plain = plain_call(logits, temperature, top_k, top_p, min_p, seed, position, generator)
    if plain is not None:
        (t, k, p, least_p, of_seed, of_position), kinds = plain
        kind: Any = (order, return_logprobs, top_logprobs, return_kept, return_rank, k.__class__ is int and k <= FEW)
        can_be_kept = True
        if token_ids is not None:
            more = token_ids, (penalties := Penalties(repetition, presence, frequency))
            of_penalties = kinds_of(logits, token_ids, penalties, row_indices)
            kind, kinds, can_be_kept = ("penalized", *kind), (*kinds, *(of_penalties or ())), of_penalties is not None
        look = (kind, *kinds) if can_be_kept else None
        call = find(name, kind, logits, *kinds, logit_bias, bitmask, row_indices, out) if can_be_kept else None
        if call is not None:
            if of_seed is None:
                of_seed = seed_of(generator, logits.device)
            numbers = Numbers(t, k, p, least_p, of_seed, of_position)
            return call(logits, numbers, logit_bias, bitmask, row_indices, out, *more)
    options = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "order": order,
        "logit_bias": logit_bias, "bitmask": bitmask, "row_indices": row_indices, "return_logprobs": return_logprobs,
        "top_logprobs": top_logprobs, "return_kept": return_kept, "token_ids": token_ids, "repetition": repetition,
        "presence": presence, "frequency": frequency, "return_rank": return_rank,
    }  # fmt: skip
    return _sample(logits, options, (seed, position, generator), out, look)


_ALONE: Any = sample.__kwdefaults__
_ONE, _ZERO, _NO = (_ALONE[name] for name in PENALTIES)  # of which calls mostly give none


def _sample(logits, as_given, random, out, look):
    """look: what tells a call that is kept from others, if it may be kept."""
    name, row_indices, (seed, position, generator) = "sample", as_given["row_indices"], random
    check_logits(name, "logits", logits, "[n_rows, vocab]")
    options = sampling_of(name, logits, **as_given)
    read = options.logit_bias, options.bitmask, options.row_indices
    n_draws = logits.shape[0] if row_indices is None else row_indices.shape[0]
    check_random(name, seed, position, generator, logits, n_draws)
    if out is not None:
        check_out(name, out, logits, torch.int64, "int64", (n_draws,))
    if any(is_sharded(each) for each in (logits, *options.tensors, seed, position, out)):
        mesh_of(name, {"logits": logits, "out": out})
        drawn = _sample_on_shards(logits, as_given, n_draws, random)
        return drawn if out is None else drawn._replace(tokens=out.copy_(drawn.tokens))
    others = [each for each in (seed, position, out) if isinstance(each, Tensor)]
    refused = "" if logits.shape[1] <= MOST_COLUMNS else f"the kernels take at most {MOST_COLUMNS} columns"
    route = route_of(name, logits, *options.tensors, *others, refused=refused, batches=False)
    with torch.no_grad():
        if seed is None:
            seed, position = seed_of(generator, logits.device), None
        else:
            seed, position = signed(seed), position_of(seed, position)
        if route is Route.KERNEL:
            if look is None or not n_draws or not logits.shape[0]:
                return draws_of(logits, options, seed, position, out)
            launched = Launched(prepared_of(logits, options, seed, position, out))
            kind, *kinds = look
            call = keep(launched, name, kind, logits, *kinds, *read, out)
            return call(logits, Numbers.of(options, seed, position), *read, out, *penalties_of(options))
        seeds, positions = int64_of(seed, n_draws, logits.device), positions_of(position, n_draws, logits.device)
        if route is Route.OPERATOR:
            drawn = torch.ops.fused_softmax.sample.default(logits, seeds, positions, *options.traced())
            drawn = options.asked(*drawn)
        elif is_unwatched(logits, *options.tensors, *others):
            drawn = _by_torch(logits, seeds, positions, options)
        else:
            drawn = reference.sample(logits, seeds, positions, **options.options())
        return SampleOutput(drawn[0] if out is None else out.copy_(drawn[0]), *drawn[1:])


def _by_torch(logits, seeds, positions, options):
    """By torch's operations, some draws at a time, because many draws may share one row."""
    named = options.options() | {"logits": logits}
    bias = named["logit_bias"]
    names = ["bitmask", "token_ids", "logits" if named["row_indices"] is None else "row_indices"]
    if bias is not None and bias.ndim == 2:
        names.append("logit_bias")
    of_draws = [named.pop(name) for name in names]
    of_all = {name: named.pop(name) for name in ("logits", "logit_bias") if name in named}

    def draw(seeds, positions, *given, **numbers):
        return reference.sample(
            seed=seeds, position=positions, **dict(zip(names, given, strict=True)), **of_all, **numbers
        )

    most = rows_at_a_time(BYTES_OF_A_LOGIT * max(1, logits.shape[1]))
    return in_turns(draw, (seeds, positions, *of_draws), named, most)


def _sample_on_shards(logits, options, n_draws, random):
    seed, position, generator = random
    of_rows = [name for name, option in OPTIONS.items() if option.by_row or option.type == "Tensor?"]
    given = {"logits": logits, **{name: options[name] for name in of_rows}}
    draw = partial(sample, **{name: options[name] for name in OPTIONS if name not in of_rows})
    bias = options["logit_bias"]
    other: dict[str, Axes] = {} if bias is None or bias.ndim == 2 else {"logit_bias": (None,)}
    if options["row_indices"] is not None:  # which count the rows of all ranks
        other["logits"] = None, None
    return draws_on_shards(
        "sample", draw, given, n_draws, (seed, position, lambda: seed_of(generator, logits.device)), other
    )


def _differentiates(*given: Any) -> bool:
    """Whether log-probabilities of these arguments may be asked for their derivatives."""
    tensors = [each for each in given if isinstance(each, Tensor)]
    if any(map(is_sharded, tensors)):  # each rank's own call is asked again
        return False
    if needs_grad(*tensors):
        return True
    if _is_compiling() or forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(each).tangent is not None for each in tensors)


def _detached(given: Any) -> Any:
    return given.detach() if isinstance(given, Tensor) else given


def _refusing_gradients(drawn: SampleOutput, *given: Any) -> SampleOutput:
    """The draws of shards, whose log-probabilities can be read, and raise in a backward pass."""
    like = next((each for each in given if isinstance(each, Tensor) and needs_grad(each)), None)
    found = {name: getattr(drawn, name) for name in _LOGPROBS if getattr(drawn, name) is not None}
    if like is None or not found:
        return drawn
    return drawn._replace(**dict(zip(found, refusing("sample", [*found], [*found.values()], like, _OVER), strict=True)))
