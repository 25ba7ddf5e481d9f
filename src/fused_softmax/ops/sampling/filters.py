"""The filters of sampling on their own, which mask logits or renormalise probabilities, and penalties of repetition.

The result for a row is the same in every batch, and nothing waits for the device. Autograd differentiates all of them,
by what they keep: which columns these are has no gradient.

All of them have kernels. Where a gradient is wanted, torch's operations compute them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fused_softmax.core.calls import find, keep
from fused_softmax.core.launched import Launched
from fused_softmax.core.route import Route, is_unwatched, needs_grad, route_of, runs_here
from fused_softmax.ops.sampling import reference
from fused_softmax.ops.sampling.dtensor import rows_on_shards
from fused_softmax.ops.sampling.judged import prepare_filter
from fused_softmax.ops.sampling.launches import MOST_COLUMNS, is_few
from fused_softmax.ops.sampling.one_device import plain_call
from fused_softmax.ops.sampling.options import (
    check_ids,
    check_logits,
    check_out,
    min_p_of,
    penalty_of,
    top_k_of,
    top_p_of,
)
from fused_softmax.ops.sampling.penalties import Penalties, kinds_of, prepare_penalties
from fused_softmax.ops.sampling.turns import in_turns
from fused_softmax.ranks.dtensor import mesh_of

_GRADIENT = "a gradient is wanted, which torch's operations have"
_CHECKS: dict[str, Callable[..., Any]] = {"top_k": top_k_of, "top_p": top_p_of, "min_p": min_p_of}


def top_k_mask_logits(logits: Tensor, top_k: int | Tensor) -> Tensor:
    """The logits, with -inf in place of all but the top_k greatest of each row; of equals the lowest columns are kept.

    logits: [n_rows, vocab], float32, float16 or bfloat16, at any strides.
    top_k: an int, or int64 or int32 [] or [n_rows]; at most 0, or at least vocab: all are kept.

    Returns a new tensor of the logits' shape and dtype. A row with a NaN is NaN.
    Raises TypeError, ValueError or RuntimeError for arguments that do not fit, naming the argument.

    >>> top_k_mask_logits(torch.tensor([[1.0, 3.0, 3.0]]), 1)
    tensor([[-inf, 3., -inf]])
    """
    return _kept("top_k_mask_logits", "logits", logits, reference.mask_logits, top_k=top_k)


def top_p_mask_logits(logits: Tensor, top_p: float | Tensor) -> Tensor:
    """The logits, with -inf in place of all but the fewest of each row whose softmax sums up to top_p.

    logits: [n_rows, vocab], float32, float16 or bfloat16, at any strides.
    top_p: a number above 0, or a float tensor [] or [n_rows], which counts as float32; at least 1: all are kept.

    Returns a new tensor of the logits' shape and dtype; of equal logits at the boundary the lowest columns are kept. A
    row with a NaN, with two inf or with a top_p of 0 or less is NaN. With a number of at least 1, a row with two inf
    stays as it is.
    Raises TypeError, ValueError or RuntimeError for arguments that do not fit, naming the argument.

    >>> top_p_mask_logits(torch.tensor([[0.0, 2.0, 1.0]]), 0.8)
    tensor([[-inf, 2., 1.]])
    """
    return _kept("top_p_mask_logits", "logits", logits, reference.mask_logits, top_p=top_p)


def min_p_mask_logits(logits: Tensor, min_p: float | Tensor) -> Tensor:
    """The logits, with -inf in place of those less than min_p times as likely as the likeliest of their row.

    logits: [n_rows, vocab], float32, float16 or bfloat16, at any strides.
    min_p: a number up to 1, or a float tensor [] or [n_rows], which counts as float32; at most 0: all are kept.

    Returns a new tensor of the logits' shape and dtype. A row with a NaN, with two inf or with a min_p above 1 is NaN.
    With a number of at most 0, a row with two inf stays as it is.
    Raises TypeError, ValueError or RuntimeError for arguments that do not fit, naming the argument.

    >>> min_p_mask_logits(torch.tensor([[0.0, 2.0, 1.0]]), 0.3)
    tensor([[-inf, 2., 1.]])
    """
    return _kept("min_p_mask_logits", "logits", logits, reference.mask_logits, min_p=min_p)


def top_k_renorm_probs(probs: Tensor, top_k: int | Tensor) -> Tensor:
    """The top_k greatest probabilities of each row over their sum, and 0 elsewhere; of equals the lowest columns.

    probs: [n_rows, vocab], float32, float16 or bfloat16, at any strides; a row need not sum up to 1.
    top_k: an int, or int64 or int32 [] or [n_rows]; at most 0, or at least vocab: all are kept.

    Returns a new tensor of the probabilities' shape and dtype, rounded once. The kernels' sum of a row is off by less
    than n_cols * 2^-39 times its greatest probability, and that of 16-bit ones by less than 2^-22 of itself more. A row
    is NaN if it has a NaN, an inf, a negative or nothing above 0.
    Raises TypeError, ValueError or RuntimeError for arguments that do not fit, naming the argument.

    >>> top_k_renorm_probs(torch.tensor([[0.25, 0.25, 0.5]]), 2)
    tensor([[0.3333, 0.0000, 0.6667]])
    """
    return _kept("top_k_renorm_probs", "probs", probs, reference.renorm_probs, top_k=top_k)


def top_p_renorm_probs(probs: Tensor, top_p: float | Tensor) -> Tensor:
    """The fewest probabilities of each row that sum up to top_p of its sum, over their own sum, and 0 elsewhere.

    probs: [n_rows, vocab], float32, float16 or bfloat16, at any strides; a row need not sum up to 1.
    top_p: a number above 0, or a float tensor [] or [n_rows], which counts as float32; at least 1: all are kept.

    Returns a new tensor of the probabilities' shape and dtype, rounded once; of equals at the boundary the lowest
    columns are kept. The kernels' sum of a row is off by less than n_cols * 2^-39 times its greatest probability, and
    that of 16-bit ones by less than 2^-22 of itself more. A row is NaN if it has a NaN, an inf, a negative, nothing
    above 0, or a top_p of 0 or less.
    Raises TypeError, ValueError or RuntimeError for arguments that do not fit, naming the argument.

    >>> top_p_renorm_probs(torch.tensor([[0.125, 0.25, 0.625]]), 0.75)
    tensor([[0.0000, 0.2857, 0.7143]])
    """
    return _kept("top_p_renorm_probs", "probs", probs, reference.renorm_probs, top_p=top_p)


def _kept(name: str, argument: str, rows: Tensor, keep_of: Callable[..., Tensor], **filters: Any) -> Tensor:
    """What `keep_of` makes of rows by one filter, both checked."""
    ((filter, value),) = filters.items()
    look = None
    if value is not None and not torch.compiler.is_dynamo_compiling():
        top_k, top_p, min_p = (filters.get(each) for each in ("top_k", "top_p", "min_p"))
        plain = plain_call(rows, 1.0, top_k, top_p, min_p, 0, 0, None)
        if plain is not None:
            look = is_few(value), *plain[1]
            call = find(name, look[0], rows, *look[1:])
            if call is not None:
                return call(rows, getattr(plain[0], filter))
    check_logits(name, argument, rows, "[n_rows, vocab]")
    again = lambda **local: _kept(name, argument, local[argument], keep_of, **{filter: local[filter]})  # noqa: E731
    found = rows_on_shards(name, again, {argument: rows, filter: value}, rows.shape[0])
    if found is not None:
        return found
    checked = {filter: _CHECKS[filter](name, value, rows, (rows.shape[0],))}
    tensors = [each for each in checked.values() if isinstance(each, Tensor)]
    refused = "" if rows.shape[1] <= MOST_COLUMNS else f"the kernels take at most {MOST_COLUMNS} columns"
    if needs_grad(rows, *tensors):
        refused = _GRADIENT
    if route_of(name, rows, *tensors, refused=refused, batches=False) is Route.KERNEL:
        with torch.no_grad():
            call = prepare_filter(rows, filter, checked[filter], keep_of is reference.renorm_probs)
            if look is not None:
                call = keep(Launched(call), name, look[0], rows, *look[1:])
            return call(rows, checked[filter])
    if needs_grad(rows, *tensors) or not is_unwatched(rows, *tensors):
        return keep_of(rows, **checked)
    return in_turns(keep_of, (rows,), checked)


def penalize(
    logits: Tensor,
    token_ids: Tensor,
    repetition: float | Tensor = 1.0,
    presence: float | Tensor = 0.0,
    frequency: float | Tensor = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """The logits with penalties for columns that stand among token_ids.

    repetition comes first, as in Hugging Face's: a logit below 0 is multiplied by it, any other is divided by it
    (Keskar et al., "CTRL", arXiv 1909.05858). Then, as in vLLM's, frequency is subtracted as often as the column stands
    among token_ids, and presence once.

    logits: [n_rows, vocab], float32, float16 or bfloat16, at any strides.
    token_ids: int64 or int32 [n_rows, length], in any order; ids outside [0, vocab) count nothing, so pad with -1.
    repetition: above 0. repetition, presence and frequency: numbers, or float tensors [] or [n_rows].
    out: of the logits' shape and dtype, where to write; it may be the logits, of which parts without an id are left.

    Returns the logits' shape and dtype, computed in float32 and rounded once. A row whose parameter would not be
    allowed as a number is NaN, so that `sample` says it is not valid.
    Raises TypeError, ValueError or RuntimeError for arguments that do not fit, naming the argument.

    >>> penalize(torch.tensor([[2.0, -2.0, 1.0]]), torch.tensor([[0, 1, 1, -1]]), repetition=2.0, frequency=0.5)
    tensor([[ 0.5000, -5.0000,  1.0000]])
    """
    penalties = Penalties(repetition, presence, frequency)
    kinds = None if torch.compiler.is_dynamo_compiling() else kinds_of(logits, token_ids, penalties)
    if kinds is not None:
        call = find("penalize", None, logits, *kinds, out)
        if call is not None:
            return call(logits, token_ids, penalties, out, None, None, None)
    return _penalize(logits, token_ids, penalties, out, kinds)


def _penalize(logits, token_ids, penalties, out, kinds):
    """kinds: what tells a call that is kept from others, if it may be kept."""
    name = "penalize"
    check_logits(name, "logits", logits, "[n_rows, vocab]")
    n_rows = logits.shape[0]
    check_ids(name, token_ids, logits, n_rows)
    given = penalties._asdict()
    checked = {argument: penalty_of(name, argument, value, logits, (n_rows,)) for argument, value in given.items()}
    tensors = [each for each in (logits, *checked.values()) if isinstance(each, Tensor)]
    if out is not None:
        check_out(name, out, logits, logits.dtype, f"the logits' {logits.dtype}", tuple(logits.shape))
        if needs_grad(*tensors, out):
            raise RuntimeError(f"{name}: out= takes no part in autograd, but an argument requires grad")
    mesh_of(name, {"logits": logits, "token_ids": token_ids, **given, "out": out})
    result = rows_on_shards(name, penalize, {"logits": logits, "token_ids": token_ids, **given}, n_rows)
    if result is None:
        others = [*tensors[1:], token_ids] if out is None else [*tensors[1:], token_ids, out]
        differentiated = needs_grad(*tensors)
        if differentiated:
            route_of(name, logits, refused=_GRADIENT)  # which says so to explain()
        if not differentiated and runs_here(logits, *others):
            numbers = Penalties(**checked)
            call = prepare_penalties(logits, token_ids, numbers, out)
            if kinds is not None:
                call = keep(Launched(call), name, None, logits, *kinds, out)
            with torch.no_grad():
                return call(logits, token_ids, numbers, out, None, None, None)
        result = reference.penalize(logits, token_ids, **checked)
    return result if out is None else out.copy_(result)
