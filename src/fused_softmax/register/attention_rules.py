"""The rules of attention as a registered operator: what runs, fakes, gradients.

vmap, functorch's transforms and devices without kernels take torch's operations, and so does a second derivative.
"""

from typing import Any, cast

import torch

from fused_softmax.ops import attention as ops
from fused_softmax.ops.attention_calls import Inputs, Results
from fused_softmax.options import arithmetic_of
from fused_softmax.options_attention import KERNEL_DTYPES, STATS, Attention
from fused_softmax.route import on_device

_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? bias, Tensor? sinks, Tensor? alibi_slopes"
_HOW = (
    "float scale, float? softcap=None, int? left=None, int? right=None, bool bottom_right=False, "
    "bool enable_gqa=False, bool entropy=False, bool row_max=False, bool column_sums=False, bool deterministic=False"
)
# Query, key and value have the same leading shape. Results that are not asked for are empty.
ATTENTION = f"({_INPUTS}, {_HOW}) -> (Tensor output, Tensor lse, Tensor entropy, Tensor row_max, Tensor column_sums)"
ATTENTION_BACKWARD = (
    f"(Tensor doutput, Tensor? dlse, Tensor output, Tensor lse, {_INPUTS}, bool[] gradients, {_HOW}) -> "
    "(Tensor dquery, Tensor dkey, Tensor dvalue, Tensor dattn_mask, Tensor dbias, Tensor dsinks)"
)
_N_INPUTS, _N_DIFFERENTIABLE = 7, 6


def _runs(given: Inputs) -> bool:
    dims = given.query.shape[-1], given.value.shape[-1]
    return on_device(given.query) and given.query.dtype in KERNEL_DTYPES and min(dims) > 0


def attention(*arguments):
    given, how = Inputs(*arguments[:_N_INPUTS]), Attention.of_operator(*arguments[_N_INPUTS:])
    with torch._C.DisableTorchFunction():  # a mode of functions has seen the call
        if _runs(given):
            found: Any = ops.prepare(given, how)(*given)
            found = found._replace(output=found.output.contiguous())
        else:
            more: dict[str, Any] = {"return_lse": True, "return_stats": how.stats}
            output, lse, stats = cast(Any, ops.composed(given, how, arithmetic_of(given.query), **more))
            found = Results(output.contiguous(), lse.contiguous(), *[stats.get(name) for name in STATS])
        return tuple(found.lse.new_empty(0) if each is None else each for each in found)


def fake_attention(*arguments):
    given, how = Inputs(*arguments[:_N_INPUTS]), Attention.of_operator(*arguments[_N_INPUTS:])
    query, value = given.query, given.value
    rows = query.shape[:-1]
    columns = (*query.shape[:-2], value.shape[-2])
    beside = torch.float64 if query.dtype == torch.float64 else torch.float32
    shapes = {"entropy": rows, "row_max": rows, "column_sums": columns}
    return (
        query.new_empty((*rows, value.shape[-1])), query.new_empty(rows, dtype=beside),
        *[query.new_empty(shapes[name] if name in how.stats else [0], dtype=beside) for name in STATS],
    )  # fmt: skip


def attention_backward(do, dlse, output, lse, *arguments):
    given, asked = Inputs(*arguments[:_N_INPUTS]), list(arguments[_N_INPUTS])
    how = Attention.of_operator(*arguments[_N_INPUTS + 1 :])
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


def save_attention(ctx, inputs, output):
    ctx.given = inputs[_N_INPUTS:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:_N_INPUTS], *output[:2])
    ctx.mark_non_differentiable(*output[2:])


def attention_gradient(ctx, do, dlse, *_):
    *given, output, lse = ctx.saved_tensors
    how, rest = Attention.of_operator(*ctx.given), len(ctx.needs_input_grad) - _N_DIFFERENTIABLE
    asked = ctx.needs_input_grad[:_N_DIFFERENTIABLE]
    return *ops.gradients(Inputs(*given), how, do, dlse, output, lse, asked), *[None] * rest
