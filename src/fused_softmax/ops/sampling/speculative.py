"""Speculative decoding: which drafts a target accepts, and the token after them."""

from collections.abc import Sequence
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from fused_softmax.core.calls import find, keep
from fused_softmax.core.described import described, typed
from fused_softmax.core.launched import Launched
from fused_softmax.core.route import Route, is_unwatched, route_of, runs_here
from fused_softmax.ops.sampling import verification
from fused_softmax.ops.sampling.dtensor import draws_on_shards
from fused_softmax.ops.sampling.launches import MOST_COLUMNS, Numbers, is_few
from fused_softmax.ops.sampling.one_device import plain_call, position_of, seed_of, signed
from fused_softmax.ops.sampling.options import (
    LOGITS,
    Logprobs,
    Order,
    check_logits,
    check_random,
    check_shape,
    check_tensor,
    sampling_of,
)
from fused_softmax.ops.sampling.sample import sample
from fused_softmax.ops.sampling.turns import in_turns, rows_at_a_time
from fused_softmax.ops.sampling.verification import SpeculativeOutput, Verify
from fused_softmax.ops.sampling.verified import (
    Given,
    bytes_of_verified,
    flattened,
    of_sequences,
    prepare_speculation,
    rows_of_masks,
)

_INTEGERS, _IN_WORDS = (torch.int64, torch.int32), "int64 or int32"
_OF_ROWS = "temperature", "top_k", "top_p", "min_p"


def speculative_sample(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    *,
    draft_probs: Tensor | None = None,
    draft_lengths: int | Tensor | None = None,
    verify: Verify = "chain",
    parents: Sequence[int] | Tensor | None = None,
    order: Order = "sequential",
    seed: int | Tensor | None = None,
    position: int | Tensor | None = None,
    generator: torch.Generator | None = None,
    logit_bias: Tensor | None = None,
    bitmask: Tensor | None = None,
    return_logprobs: Logprobs | None = None,
) -> SpeculativeOutput:
    """The tokens that drafts leave of sampling from the target: accepted drafts, and one token of the target's.

    Their distribution is that of sampling from the target with these filters, whatever the drafts are. Nothing waits
    for the device, but for a copy of parents that are numbers.

    target_logits: [n, k + 1, vocab], float32, float16 or bfloat16: row j is of the token that draft j proposes. Of a
        tree, row 0 is of the token after the prefix, and row j + 1 of the one after draft j.
    draft_tokens: int64 or int32 [n, k]; an id outside [0, vocab), such as -1, is no draft: it ends those of a chain or
        block, and the branch of a tree.
    draft_logits: [n, k, vocab], of any dtype that target_logits may have: the drafts were drawn from these logits with
        the same filters. Row r is that of the drafts which row r of the target judges: of a chain, row j of draft j.
    draft_probs: [n, k, vocab] likewise, probabilities that the drafts were drawn from, in place of draft_logits. They
        are divided by their sum, and no filter is applied to them.
        Without draft_logits and draft_probs, a draft is accepted where the target's own draw gives it, so the tokens
        are those that `sample` gives for these rows, seeds and positions, and blocks are chains. A deterministic draft
        is accepted as often as it can be. One that `sample` drew with the same seed and position is accepted often, for
        both draws have the same noise.
    temperature, top_k, top_p, min_p, order: as sample's, of both target and draft; numbers or tensors [], [n] or
        [n, k + 1], one for each row of the target.
    draft_lengths: how many drafts there are of each sequence: a number up to k, or int64 or int32 [n]; all without it.
    verify: "chain": draft d is accepted with probability min(1, p(d) / q(d)), and the first that is not is replaced by
        a draw from max(p - q, 0) (Leviathan, Kalman, Matias, 2023, arXiv 2211.17192). "block": all drafts are judged
        together, by which at least as many are accepted (Sun et al., 2025, arXiv 2403.10444). "tree": a row may have
        several drafts, drawn independently, which are tried in the order of their numbers; each that is rejected leaves
        max(p - q, 0), renormalised (Miao et al., 2024, arXiv 2305.09781).
    parents: of a tree, the draft that each follows, -1 for those that follow the prefix: int64 or int32 [n, k] or [k],
        or k numbers, which are copied to the device, as a captured graph cannot. Parents come before their children.
    seed, position: as sample's, numbers or tensors [] or [n]. Token j of a sequence has position + j. Without a
        position, sequence i begins at position i * (k + 1) if the seed is a number, and at 0 if it is a tensor. Drafts
        may be drawn by `sample` with the same seed and positions, because other noise accepts and replaces them;
        siblings of a tree take noise of their own, such as another seed each.
    generator: as sample's; sequence i begins at position i * (k + 1).
    logit_bias, bitmask: as sample's, of the target alone: logit_bias [vocab], [n, vocab] or [n, k + 1, vocab], bitmask
        [n, words] or [n, k + 1, words]. If they constrained the drafts too, draft_logits or draft_probs have them in.
    return_logprobs: "raw" or "processed", as sample's: of each token, by its row of the target, without gradient.

    A sequence whose draft_lengths, or whose parents of drafts that it has, are out of range in a tensor has no drafts,
    token 0, and valid False. A row that cannot be drawn from, as sample has it, ends its sequence with token 0 and
    valid False. So does a row with drafts whose row of draft_logits or draft_probs cannot be drawn from.

    Raises as sample does, and ValueError for a number of draft_lengths or a sequence of parents that is out of range,
    for both draft_logits and draft_probs, for parents without a tree, and for a tree without parents.

    >>> target = torch.tensor([[[0.0, 9.0], [9.0, 0.0], [0.0, 9.0]]], device="cuda")
    >>> speculative_sample(target, torch.tensor([[1, 1]], device="cuda"), temperature=0.0)[:2]
    (tensor([[ 1,  0, -1]], device='cuda:0'), tensor([1], device='cuda:0'))
    """
    asked = {"order": order, "verify": verify, "return_logprobs": return_logprobs}
    look = None
    if not torch.compiler.is_dynamo_compiling():
        plain = plain_call(target_logits, temperature, top_k, top_p, min_p, seed, position, generator)
        numbered = draft_lengths.__class__ is int
        if plain is not None and (parents is None or parents.__class__ is Tensor):
            numbers, kinds = plain
            lengths = None if numbered else draft_lengths
            kind = (*asked.values(), draft_lengths if numbered else None, is_few(numbers.top_k))
            look = (
                kind, draft_tokens, draft_logits, draft_probs, lengths, parents, logit_bias, bitmask, *kinds,
            )  # fmt: skip
            call = find("speculative_sample", look[0], target_logits, *look[1:])
            if call is not None:
                if numbers.seed is None:
                    numbers = numbers._replace(seed=seed_of(generator, target_logits.device))
                with torch.no_grad():
                    given = _given(
                        target_logits, draft_tokens, draft_logits, draft_probs, draft_lengths, parents, logit_bias,
                        bitmask,
                    )  # fmt: skip
                    return call(given, numbers)
    drafts = {
        "draft_tokens": draft_tokens, "draft_logits": draft_logits, "draft_probs": draft_probs,
        "draft_lengths": draft_lengths, "parents": parents,
    }  # fmt: skip
    filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    masks = {"logit_bias": logit_bias, "bitmask": bitmask}
    return _speculative(target_logits, drafts, filters, masks, asked, (seed, position, generator), look)


def _speculative(target_logits, drafts, filters, masks, asked, random, look):
    """look: what tells a call that is kept from others, if it may be kept."""
    name, (seed, position, generator) = "speculative_sample", random
    check_logits(name, "target_logits", target_logits, "[n, k + 1, vocab]")
    n, k_and_1, _ = target_logits.shape
    if not k_and_1:
        raise ValueError(f"{name}: target_logits must have shape [n, k + 1, vocab], got {tuple(target_logits.shape)}")
    _check_drafts(name, target_logits, asked["verify"], **drafts)
    options = sampling_of(
        name, target_logits, **filters, **masks, order=asked["order"], return_logprobs=asked["return_logprobs"]
    )
    check_random(name, seed, position, generator, target_logits, n)
    tensors = {"target_logits": target_logits, **drafts, **filters, **masks}
    of_all = [
        name for name in ("logit_bias", "parents") if isinstance(tensors[name], Tensor) and tensors[name].ndim == 1
    ]
    found = draws_on_shards(
        name, partial(speculative_sample, **asked), tensors, n,
        (seed, position, lambda: seed_of(generator, target_logits.device)), dict.fromkeys(of_all, (None,)),
        k_and_1,
    )  # fmt: skip
    if found is not None:
        return found
    differentiates = torch.is_grad_enabled()
    with torch.no_grad():
        device = target_logits.device
        position = position_of(seed, position)
        seed = seed_of(generator, device) if seed is None else signed(seed)
        numbers = Numbers.of(options, seed, position)
        seeds, positions = of_sequences(numbers, n, k_and_1, device)
        given = _given(target_logits, **drafts, logit_bias=options.logit_bias, bitmask=options.bitmask)
        read = [each for each in (*given, *options.tensors, seeds, positions) if isinstance(each, Tensor)]
        told = given.draft_logits is not None or given.draft_probs is not None
        if not told and torch.compiler.is_compiling():
            return _own_tokens(given, options, seeds, positions)
        refused = "" if target_logits.shape[2] <= MOST_COLUMNS else f"the kernels take at most {MOST_COLUMNS} columns"
        route = route_of(name, *read, refused=refused, batches=False) if n else Route.COMPOSED
        masks = (None if each is None else _of_rows(each, n) for each in (given.logit_bias, given.bitmask))
        sequences, named = (*given[:6], *masks, seeds, positions), options.filters() | asked
        if route is Route.KERNEL:
            most = rows_at_a_time(k_and_1 * max(target_logits.shape[2], bytes_of_verified(n * k_and_1, target_logits)))
            if n > most:
                return SpeculativeOutput(*in_turns(_in_turn, sequences, named, most))
            call = prepare_speculation(given, numbers, **asked)
            if look is not None:
                with torch.set_grad_enabled(differentiates):  # as where the next call is looked up
                    call = keep(Launched(call), name, look[0], target_logits, *look[1:])
            return call(given, numbers)
        if not told and runs_here(*read):
            return _own_tokens(given, options, seeds, positions)
        if is_unwatched(*read):
            return SpeculativeOutput(*in_turns(verification.speculative_sample, sequences, named))
        return verification.speculative_sample(*sequences, **named)


def _given(target_logits, draft_tokens, draft_logits, draft_probs, draft_lengths, parents, logit_bias, bitmask):
    """A call's tensors, of lengths and parents that may be numbers, or parents of all sequences."""
    n, k_and_1, _ = target_logits.shape
    if draft_lengths is not None and not isinstance(draft_lengths, Tensor):
        draft_lengths = torch.full((), draft_lengths, dtype=torch.int64, device=target_logits.device).expand(n)
    if parents is not None:
        if not isinstance(parents, Tensor):
            parents = torch.tensor([int(each) for each in parents], dtype=torch.int64, device=target_logits.device)
        parents = parents.expand(n, -1)
    if k_and_1 == 1:
        draft_logits = draft_probs = None  # of no draft
    return Given(target_logits, draft_tokens, draft_logits, draft_probs, draft_lengths, parents, logit_bias, bitmask)


def _in_turn(*tensors: Any, order: Any, verify: Any, return_logprobs: Any, **filters: Any) -> SpeculativeOutput:
    """The kernels' tokens of some sequences."""
    *of_given, seeds, positions = tensors
    given, numbers = Given(*of_given), Numbers(**filters, seed=seeds, position=positions)
    asked = {"order": order, "verify": verify, "return_logprobs": return_logprobs}
    return prepare_speculation(given, numbers, **asked)(given, numbers)


def _check_drafts(name, target_logits, verify, draft_tokens, draft_logits, draft_probs, draft_lengths, parents):
    n, k_and_1, n_cols = target_logits.shape
    k = k_and_1 - 1
    check_tensor(name, "draft_tokens", draft_tokens, target_logits, _INTEGERS, _IN_WORDS)
    check_shape(name, "draft_tokens", draft_tokens, (n, k))
    for argument, each in (("draft_logits", draft_logits), ("draft_probs", draft_probs)):
        if each is not None:
            check_tensor(name, argument, each, target_logits, LOGITS, "float32, float16 or bfloat16")
            check_shape(name, argument, each, (n, k, n_cols))
    if draft_logits is not None and draft_probs is not None:
        raise ValueError(f"{name}: give draft_logits or draft_probs, not both")
    if isinstance(draft_lengths, Tensor):
        check_tensor(name, "draft_lengths", draft_lengths, target_logits, _INTEGERS, _IN_WORDS)
        check_shape(name, "draft_lengths", draft_lengths, (n,))
    elif draft_lengths is not None:
        _check_number(name, "draft_lengths", draft_lengths, 0, k)
    if verify not in ("chain", "block", "tree"):
        raise ValueError(f'{name}: verify must be "chain", "block" or "tree", got {described(verify)}')
    if (parents is not None) != (verify == "tree"):
        raise ValueError(
            f'{name}: parents and verify="tree" need each other, got verify={described(verify)} and '
            f"parents={described(parents)}"
        )
    if isinstance(parents, Tensor):
        check_tensor(name, "parents", parents, target_logits, _INTEGERS, _IN_WORDS)
        check_shape(name, "parents", parents, (n, k), (k,))
    elif parents is not None:
        if not isinstance(parents, Sequence) or isinstance(parents, str):
            raise TypeError(f"{name}: parents must be a Tensor or a sequence of ints, not {typed(parents)}")
        if len(parents) != k:
            raise ValueError(f"{name}: parents must have {k} elements, one for each draft, got {len(parents)}")
        for j, each in enumerate(parents):
            _check_number(name, f"parents[{j}]", each, -1, j - 1)


def _check_number(name, argument, value, least, most):
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: {argument} must be an int, not {typed(value)}")
    if not least <= value <= most:
        raise ValueError(f"{name}: {argument} must be in [{least}, {most}], got {value}")


def _of_rows(given: Tensor, n: int) -> Tensor:
    """What is given of columns, of sequences or of rows, as [n, 1 or k + 1, ...]."""
    if given.ndim == 3:
        return given
    return (given.expand(n, -1) if given.ndim == 1 else given)[:, None]


def _own_tokens(given, options, seeds, positions):
    """The drafts that are the tokens that `sample` draws of all rows."""
    n, k_and_1, n_cols = given.target_logits.shape
    drafts = verification.drafts_of(given.draft_tokens, given.lengths, given.parents, n_cols)
    named: dict[str, Any] = {
        name: verification.of_rows(getattr(options, name), n, k_and_1) for name in _OF_ROWS
    }  # fmt: skip
    for name in ("logit_bias", "bitmask"):
        named[name] = rows_of_masks(getattr(options, name), n, k_and_1)
    logits, named["row_indices"] = flattened(given.target_logits)
    drawn = sample(
        logits.detach(), **named, order=options.order, seed=seeds[:, None].expand(n, k_and_1).flatten(),
        position=(positions[:, None] + drafts.depth).flatten(), return_logprobs=options.return_logprobs,
    )  # fmt: skip
    own, valid = (each.unflatten(0, (n, k_and_1)) for each in drawn[:2])
    valid = valid & drafts.valid[:, None]
    path = verification.path_of_tokens(own, valid, drafts)
    of_own = None
    if drawn.logprobs is not None:
        logprobs = drawn.logprobs.unflatten(0, (n, k_and_1))
        of_own = lambda row, _: logprobs.gather(1, row)  # noqa: E731
    return verification.output_of(path, own.gather(1, path.row[:, None]).squeeze(1), valid, drafts, of_own)
