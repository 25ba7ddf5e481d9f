"""The rules of attention as a registered operator: what runs, fakes, gradients, vmap.

functorch's other transforms and devices without kernels take torch's operations, and so does a second derivative.
"""

from typing import Any, cast

import torch
from torch import Tensor

from fused_softmax.core.checks import arithmetic_of
from fused_softmax.core.one_dim import in_front, one_by_one
from fused_softmax.core.route import on_device
from fused_softmax.ops.attention import attention as ops
from fused_softmax.ops.attention.call import Inputs, Results
from fused_softmax.ops.attention.calls import prepare_forward
from fused_softmax.ops.attention.options import KERNEL_DTYPES, STATS, Attention

_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? bias, Tensor? sinks, Tensor? alibi_slopes"
_HOW = Attention.schema()
# Query, key and value have the same leading shape. Results that are not asked for are empty.
ATTENTION = f"({_INPUTS}, {_HOW}) -> (Tensor output, Tensor lse, Tensor entropy, Tensor row_max, Tensor column_sums)"
ATTENTION_BACKWARD = (
    f"(Tensor doutput, Tensor? dlse, Tensor output, Tensor lse, {_INPUTS}, bool[] gradients, {_HOW}) -> "
    "(Tensor dquery, Tensor dkey, Tensor dvalue, Tensor dattn_mask, Tensor dbias, Tensor dsinks)"
)
_N_INPUTS, _N_DIFFERENTIABLE = 7, 6
_SINKS = 5  # their place among the inputs


def _runs(given: Inputs) -> bool:
    dims = given.query.shape[-1], given.value.shape[-1]
    return on_device(given.query) and given.query.dtype in KERNEL_DTYPES and min(dims) > 0


def attention(*arguments):
    given, how = Inputs(*arguments[:_N_INPUTS]), Attention.of_traced(arguments[_N_INPUTS:])
    with torch._C.DisableTorchFunction():  # a mode of functions has seen the call
        if _runs(given):
            found: Any = prepare_forward(given, how)(*given)
            found = found._replace(output=found.output.contiguous())
        else:
            more: dict[str, Any] = {"return_lse": True, "return_stats": how.stats}
            output, lse, stats = cast(Any, ops.composed(given, how, arithmetic_of(given.query), **more))
            found = Results(output.contiguous(), lse.contiguous(), *[stats.get(name) for name in STATS])
        return tuple(found.lse.new_empty(0) if each is None else each for each in found)


def fake_attention(*arguments):
    given, how = Inputs(*arguments[:_N_INPUTS]), Attention.of_traced(arguments[_N_INPUTS:])
    query, value = given.query, given.value
    rows = query.shape[:-1]
    columns = (*query.shape[:-2], value.shape[-2])
    beside = torch.float64 if query.dtype == torch.float64 else torch.float32
    shapes = {"entropy": rows, "row_max": rows, "column_sums": columns}
    return (
        query.new_empty((*rows, value.shape[-1])), query.new_empty(rows, dtype=beside),
        *[query.new_empty(shapes[name] if getattr(how, name) else [0], dtype=beside) for name in STATS],
    )  # fmt: skip


def attention_backward(do, dlse, output, lse, *arguments):
    given, asked = Inputs(*arguments[:_N_INPUTS]), list(arguments[_N_INPUTS])
    how = Attention.of_traced(arguments[_N_INPUTS + 1 :])
    with torch._C.DisableTorchFunction():
        if _runs(given):
            found: Any = ops.backward(given, how, do, dlse, output.contiguous(), lse.contiguous(), tuple(asked))
        else:
            detached: list[Any] = [None if each is None else each.detach() for each in given]
            leaves: Any = Inputs(*detached)
            for each, wanted in zip(leaves, asked, strict=False):
                if wanted:
                    each.requires_grad_()
            found = ops.differentiable_gradients(leaves, how, do, dlse, asked)
        return tuple(output.new_empty(0) if each is None else each.detach().contiguous() for each in found)


def fake_attention_backward(do, dlse, output, lse, *arguments):
    given, asked = arguments[:_N_DIFFERENTIABLE], arguments[_N_INPUTS]
    return tuple(
        each.new_empty(each.shape) if wanted else output.new_empty(0) for each, wanted in zip(given, asked, strict=True)
    )


# What is counted: two operations for each multiplication and addition, of all queries with all keys. As in torch's own
# formulas, causality, windows and masks take nothing off, and heads that share keys count like those that do not.


def flops_of_attention(query, key, value, *_, **__) -> int:
    """Scores, and the products of the weights with the value."""
    return _products(query, key) * (query.shape[-1] + value.shape[-1])


def flops_of_attention_backward(do, dlse, output, lse, query, key, value, *_, out_val, **__) -> int:
    """Scores, which are made again, the weights' gradient, and the gradients of query, key and value."""
    dim, value_dim = query.shape[-1], value.shape[-1]
    of_query, of_key, of_value, *of_others = (each.numel() > 0 for each in out_val)
    of_weights = of_query or of_key or any(of_others)
    return _products(query, key) * (dim * (1 + of_query + of_key) + value_dim * (of_weights + of_value))


def _products(query, key) -> int:
    return 2 * query.shape[:-1].numel() * key.shape[-2]


def save_attention(ctx, inputs, output):
    ctx.given = inputs[_N_INPUTS:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:_N_INPUTS], *output[:2])
    ctx.mark_non_differentiable(*output[2:])


def attention_gradient(ctx, do, dlse, *_):
    *given, output, lse = ctx.saved_tensors
    how, rest = Attention.of_traced(ctx.given), len(ctx.needs_input_grad) - _N_DIFFERENTIABLE
    asked = ctx.needs_input_grad[:_N_DIFFERENTIABLE]
    return *ops.gradients(Inputs(*given), how, do, dlse, output, lse, asked), *[None] * rest


# vmap: the batch is one more leading dim. Sinks belong to heads alone, so a batch of them takes a launch for each.


def batched_attention(operator, info, in_dims, *arguments):
    if in_dims[_SINKS] is not None:
        return one_by_one(operator, info, in_dims, arguments)
    found = operator(*_folded(info, in_dims, arguments, (False,) * _N_DIFFERENTIABLE), *arguments[_N_INPUTS:])
    return found, _dims_of(found)


def batched_attention_backward(operator, info, in_dims, *arguments):
    (results, given), (of_results, of_given) = ((each[:4], each[4:]) for each in (arguments, in_dims))
    asked = given[_N_INPUTS]
    if of_given[_SINKS] is not None or asked[_SINKS]:
        return one_by_one(operator, info, in_dims, arguments)
    results = [
        None if each is None else in_front(each, at, info.batch_size)
        for each, at in zip(results, of_results, strict=True)
    ]
    found = list(operator(*results, *_folded(info, of_given, given, asked), *given[_N_INPUTS:]))
    for i in (3, 4):  # of a mask and a bias, whose dims of 1 are in front no more
        if asked[i]:
            own = given[i].ndim - (of_given[i] is not None)
            found[i] = found[i].reshape(info.batch_size, *found[i].shape[found[i].ndim - own :])
    return tuple(found), _dims_of(found)


def _folded(info, in_dims, arguments, asked) -> list[Tensor | None]:
    """The inputs with the batch in front. A mask and a bias have it if they differ in it, or their gradients do."""
    query, key, value = (in_front(arguments[i], in_dims[i], info.batch_size) for i in range(3))
    found: list[Tensor | None] = [query, key, value]
    for i in (3, 4):
        mask = arguments[i]
        if mask is not None and (in_dims[i] is not None or asked[i]):
            mask = in_front(mask, in_dims[i], info.batch_size)
            mask = mask.reshape(info.batch_size, *[1] * (query.ndim - mask.ndim), *mask.shape[1:])
        found.append(mask)
    sinks, slopes = arguments[_SINKS:_N_INPUTS]
    if slopes is not None and (in_dims[_SINKS + 1] is not None or slopes.ndim > 1):
        slopes = in_front(slopes, in_dims[_SINKS + 1], info.batch_size)
        slopes = slopes.reshape(info.batch_size, *[1] * (query.ndim - 2 - slopes.ndim), *slopes.shape[1:])
        slopes = slopes.expand(query.shape[:-2])
    return [*found, sinks, slopes]


def _dims_of(found) -> tuple[int | None, ...]:
    """Where results have their batch; those that were not asked for have none."""
    return tuple(None if each.shape == (0,) else 0 for each in found)
