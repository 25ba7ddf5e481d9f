"""attention: scaled_dot_product_attention, with a bias, sinks, a softcap, windows and ALiBi, and their gradients.

Weights are in no memory: the forward pass keeps lse, and the backward pass computes the weights again from it. No
program adds to what another one writes, so every gradient of the kernels has the same bits at every run.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fused_softmax.core.calls import find, keep
from fused_softmax.core.checks import arithmetic_of, is_causal_bias
from fused_softmax.core.launched import Launched
from fused_softmax.core.no_gradient import ATTENTION, refuse, refusing
from fused_softmax.core.route import Route, apart, batched, is_sharded, needs_grad, route_of
from fused_softmax.ops import autocast
from fused_softmax.ops.attention import reference as reference_attention
from fused_softmax.ops.attention import sdpa as attention_sdpa
from fused_softmax.ops.attention.call import Gradients, Inputs, Wanted
from fused_softmax.ops.attention.calls import prepare_backward, prepare_forward
from fused_softmax.ops.attention.options import (
    KERNEL_DTYPES,
    NAME,
    STATS,
    Attention,
    Beside,
    attention_of,
    broadcast,
    without_causal_bias,
)
from fused_softmax.ops.attention.over_ranks import attention_on_shards
from fused_softmax.ops.attention.reference import AttentionOutput

__all__ = ["AttentionOutput", "attention"]

STATISTICS = tuple(f'stats["{name}"]' for name in STATS)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    is_causal: bool = False,
    causal_align: str = "top_left",
    scale: float | None = None,
    enable_gqa: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    return_stats: str | tuple[str, ...] = (),
) -> Tensor | AttentionOutput:
    """softmax(scores) @ value with scores = softcap(scale query @ key.T) + bias + attn_mask + ALiBi.

    Layout and meaning are those of torch.nn.functional.scaled_dot_product_attention.

    query: [..., heads, queries, dim]; key: [..., heads, keys, dim]; value: [..., heads, keys, value_dim]. float16,
        bfloat16, float32 or float64, all alike, unless autocast makes them so; dim and value_dim up to 256; leading
        sizes broadcast. Their last dim is read as it lies if it is contiguous, and copied first otherwise.
    attn_mask: broadcasts to [..., heads, queries, keys]; bool, where True keeps a key, or a float that is added. Or
        torch.nn.attention.bias's causal_upper_left or causal_lower_right of (queries, keys), which becomes causality.
    bias: a float that is added, which broadcasts alike; it may stand beside a mask or causality. A mask or bias is
        never expanded in memory, and its gradient is summed without atomics.
    is_causal: hides keys after the query; takes no attn_mask. causal_align: whether the diagonal begins at the first
        key, "top_left", or ends at the last one, "bottom_right", as in decoding with a cache.
    scale: 1 / sqrt(dim) if None.
    enable_gqa: key and value may have fewer heads than query, each of them for the same number of query's heads.
    window: (left, right): query i sees keys from i - left to i + right, aligned as causality is; None on a side is
        unbounded.
    softcap: scores of query and key become softcap * tanh(score / softcap).
    sinks: [heads], floats: one more score for each row, without a value. It is neither scaled nor capped, and counts in
        lse.
    alibi_slopes: [heads] or [..., heads], floats: slope * |i - j| is subtracted, aligned as causality is. Its gradient
        takes torch's operations.
    dropout_p: 0.
    deterministic: every gradient has the same bits at every run. Without it, this holds for all gradients but those of
        plain attention that cuDNN computes. torch.use_deterministic_algorithms(True) asks for it too.
    return_lse: adds the logsumexp of the scores, [..., heads, queries], float32 (float64 for float64), with its
        gradient. The results of parts of the keys can be merged by it.
    return_stats: names among "entropy" (of a row's weights, its sink's among them, in nats), "row_max" (the greatest
        score, sinks aside), both [..., heads, queries], and "column_sums" (how much each key is looked at)
        [..., heads, keys]. They have no gradient: a backward pass through one raises RuntimeError; to keep one, or for
        NumPy, take its detach().

    The output of a query that sees no key is 0, its lse is -inf, and it has no part in any gradient. Products of
    float32 are exact to float32. On a CPU, in float64 and for a second derivative, torch's operations compute, with all
    scores in memory. cuDNN, as torch calls it, computes passes of plain attention (query, key and value, causal or not,
    and lse) on GPUs of compute capability 9.0, in 16 bits, for heads of at most 128 dims.
    Returns the output [..., heads, queries, value_dim], contiguous, or laid out like the query where cuDNN computes; an
    AttentionOutput if more was asked for.
    DTensors may lie in shards of batch and heads: each rank computes its own, and the results are DTensors.
    Raises RuntimeError for dtypes, devices and shapes that do not fit, for is_causal with attn_mask, and for a plain
    tensor beside a DTensor; TypeError for an argument of a wrong type; ValueError for a value that is not allowed, such
    as a dropout_p other than 0, and for DTensors in other shards.

    Dao et al., "FlashAttention" (arXiv 2205.14135); Press et al., "Train Short, Test Long" (ALiBi, arXiv 2108.12409);
    Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (arXiv 2309.17453).

    >>> attention(q, k, v, bias=table[None], scale=1.0)  # T5's: [16, 12, 1024, 64], bias [1, 12, 1024, 1024]
    >>> attention(q, k, v, is_causal=True, window=(127, 0), sinks=sinks, enable_gqa=True)  # a layer of gpt-oss
    """
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    # Whether it is on is asked before what it does: a kept call looks no further.
    is_cast = torch.is_autocast_enabled("cuda" if getattr(query, "is_cuda", False) else "cpu")
    cast = autocast.lowered_dtype(NAME, query) if is_cast and isinstance(query, Tensor) else None
    if type(window) is list:
        window = tuple(window)
    if type(return_stats) is list:
        return_stats = tuple(return_stats)
    look = None
    if (window is None or type(window) is tuple) and type(return_stats) in (tuple, str):
        numbers = (
            is_causal, causal_align, scale, enable_gqa, window, softcap, dropout_p, return_lse, return_stats,
            deterministic, attention_sdpa.switch(), cast,
        )  # fmt: skip
        look = NAME, numbers, query, key, value, attn_mask, bias, sinks, alibi_slopes
        call = find(*look)
        if call is not None:
            return call(query, key, value, attn_mask, bias, sinks, alibi_slopes)
    beside = Beside(attn_mask, bias, sinks, alibi_slopes)
    if is_causal_bias(attn_mask) or is_causal_bias(bias):
        beside, is_causal, causal_align = without_causal_bias(query, key, beside, is_causal, causal_align, window, cast)
        return attention(
            query, key, value, beside.attn_mask, bias=beside.bias, is_causal=is_causal, causal_align=causal_align,
            scale=scale, enable_gqa=enable_gqa, window=window, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes,
            dropout_p=dropout_p, deterministic=deterministic, return_lse=return_lse, return_stats=return_stats,
        )  # fmt: skip
    options = (
        is_causal, causal_align, scale, enable_gqa, window, softcap, dropout_p, return_stats, deterministic, cast
    )  # fmt: skip
    return _attention(query, key, value, beside, enable_gqa, options, cast, bool(return_lse), look)


def _attention(query, key, value, beside, enable_gqa, options, cast, return_lse, look):
    how = attention_of(query, key, value, beside, *options)
    as_given = Inputs(query, key, value, *beside)
    lead = broadcast(query, key, value, enable_gqa)
    if any(each is not None and is_sharded(each) for each in as_given):
        more = {"deterministic": how.deterministic, "return_lse": return_lse, "return_stats": how.stats}
        return attention_on_shards(partial(attention, **how.arguments(), **more), as_given._asdict(), lead)
    readied = _readied(as_given, lead, enable_gqa, cast)
    given = as_given if readied is None else readied(*as_given)
    slopes, refused = given.alibi_slopes, ""
    if given.query.dtype not in KERNEL_DTYPES:
        refused = f"no kernel has {given.query.dtype}"
    elif query.shape[-1] == 0 or value.shape[-1] == 0:
        refused = "a dim is 0"
    elif slopes is not None and needs_grad(slopes):
        refused = "alibi_slopes requires grad"
    present = [each for each in given if each is not None]
    # Within vmap nobody is told whether slopes require a gradient.
    route = route_of(NAME, *present, refused=refused, batches=slopes is None, holds="all scores")
    if route is Route.KERNEL:
        made = _prepare(given, how, return_lse, needs_grad(*present), bool(lead))
        if readied is not None:
            made = _after(readied, made)
        return (made if look is None else keep(Launched(made), *look))(*as_given)
    if route is Route.OPERATOR:
        output, lse, *stats = torch.ops.fused_softmax.attention.default(*given, *how.traced())
        by_name = _refusing({name: each for name, each in zip(STATS, stats, strict=True) if getattr(how, name)}, lse)
        stats = [by_name.get(name) for name in STATS]
        return _output(output, lse, stats, how, return_lse, bool(lead))
    arithmetic = arithmetic_of(given.query)
    more = {"return_lse": return_lse, "return_stats": how.stats}
    found = composed(given, how, arithmetic, **more)
    if isinstance(found, Tensor):
        return found if lead else found.squeeze(0)
    # Code that torch 2.11 compiles cannot return what _replace makes.
    found = AttentionOutput(found.output, found.lse, _refusing(found.stats, found.output))
    return found if lead else _without_heads(found)


def composed(given: Inputs, how: Attention, arithmetic: torch.dtype, **more: Any) -> Tensor | AttentionOutput:
    """By torch's operations."""
    with autocast.off(given.query):
        return reference_attention.attention(**given._asdict(), **how.arguments(), **more, arithmetic=arithmetic)


def _refusing(stats: dict[str, Tensor], beside: Tensor) -> dict[str, Tensor]:
    names = [f'stats["{name}"]' for name in stats]
    return dict(zip(stats, refusing(NAME, names, list(stats.values()), beside, ATTENTION), strict=True))


def _readied(
    given: Inputs, lead: tuple[int, ...], enable_gqa: bool, cast: torch.dtype | None
) -> Callable[..., Inputs] | None:
    """What makes tensors like these ready; None if they are ready.

    They get autocast's dtype, and a dim of heads. query, key and value get the same leading shape, by views.
    """
    dtype = None if all(each.dtype == cast for each in given[:3]) else cast
    led = lead or (1,)
    of_keys = (*led[:-1], given.key.shape[-3]) if enable_gqa else led
    shapes = [(*own, *each.shape[-2:]) for own, each in zip((led, of_keys, of_keys), given[:3], strict=True)]
    if all(each.shape == shape for each, shape in zip(given[:3], shapes, strict=True)):
        shapes = []
    if dtype is None and not shapes:
        return None

    def ready(*given: Tensor | None) -> Inputs:
        dense: Any = given[:3]
        if dtype is not None:
            dense = [each.to(dtype) for each in dense]
        if shapes:
            dense = [each.expand(shape) for each, shape in zip(dense, shapes, strict=True)]
        return Inputs(*dense, *given[3:])

    return ready


def _after(ready: Callable[..., Inputs], call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: call(*ready(*given))


def _prepare(given: Inputs, how: Attention, return_lse: bool, with_gradient: bool, headed: bool):
    """What computes a call on the kernels."""
    forward = prepare_forward(given, how, with_lse=return_lse or with_gradient)
    if not with_gradient:

        def call(*given):
            output, lse, *stats = forward(*given)
            return _output(output, lse, stats, how, return_lse, headed)

        return call
    name = f"{NAME}_backward"

    def differentiable(*given):
        output, lse, *stats = _apply(*given, (forward, how, name))
        return _output(output, lse, stats, how, return_lse, headed)

    return differentiable


def _output(output: Tensor, lse: Tensor, stats: Any, how: Attention, return_lse: bool, headed: bool):
    if not return_lse and not how.stats:
        return output if headed else output.squeeze(0)
    by_name = dict(zip(("entropy", "row_max", "column_sums"), stats, strict=True))
    found = AttentionOutput(output, lse if return_lse else None, {each: by_name[each] for each in how.stats})
    return found if headed else _without_heads(found)


def _without_heads(found: AttentionOutput) -> AttentionOutput:
    lse = None if found.lse is None else found.lse.squeeze(0)
    return AttentionOutput(found.output.squeeze(0), lse, {name: each.squeeze(0) for name, each in found.stats.items()})


class _Attention(torch.autograd.Function):
    """(output, lse, entropy, row maxima, column sums), with the gradients of the first two."""

    @staticmethod
    def forward(ctx, query, key, value, attn_mask, bias, sinks, alibi_slopes, call):
        forward, ctx.how, ctx.name = call
        ctx.set_materialize_grads(False)
        given = query, key, value, attn_mask, bias, sinks, alibi_slopes
        found = forward(*given)
        ctx.save_for_backward(*given, *found[:2])
        return tuple(found)

    @staticmethod
    def backward(ctx, do, dlse, *of_stats):
        refuse(NAME, STATISTICS, of_stats, ATTENTION)
        *given, output, lse = ctx.saved_tensors
        return *gradients(Inputs(*given), ctx.how, do, dlse, output, lse, ctx.needs_input_grad[:6]), None, None


# As its apply, without its search for functorch's wrappers: a call under a transform does not come here.
_apply = super(torch.autograd.Function, _Attention).apply


def gradients(
    given: Inputs, how: Attention, do: Tensor | None, dlse: Tensor | None, output: Tensor, lse: Tensor, asked: Any
) -> tuple[Tensor | None, ...]:
    """The gradients that are asked for, of query, key, value, attn_mask, bias and sinks."""
    asked = [bool(each) for each in asked]
    if do is None and dlse is None:
        return (None,) * 6
    if torch.is_grad_enabled():
        return differentiable_gradients(given, how, do, dlse, asked)
    do, lse = torch.zeros_like(output) if do is None else do, lse.contiguous()  # hooks may return other strides
    call = find(*_looked_up(given, how, do, dlse, output, lse, tuple(asked)))
    if call is not None:  # nothing watches it, and it takes do and dlse as they are
        return call(do, dlse, output, lse, *given)
    present = [each for each in (*given, do, dlse, output, lse) if each is not None]
    if not batched(do, dlse) and route_of(f"{NAME}_backward", *present) is Route.KERNEL:
        return backward(given, how, do, dlse, output, lse, tuple(asked))
    operator = torch.ops.fused_softmax.attention_backward.default
    found = operator(do, dlse, output, lse, *given, asked, *how.traced())
    return tuple(each if wanted else None for each, wanted in zip(found, asked, strict=True))


def backward(
    given: Inputs, how: Attention, do: Tensor, dlse: Tensor | None, output: Tensor, lse: Tensor, asked: tuple[bool, ...]
) -> Gradients:
    """By what is kept for a pass like this one, or is prepared for it."""
    do = do.to(output.dtype)
    if dlse is not None:
        dlse = dlse.to(lse.dtype).contiguous()
    look = _looked_up(given, how, do, dlse, output, lse, asked)
    call = find(*look)
    if call is None:
        call = keep(Launched(prepare_backward(given, how, do, dlse, output, lse, Wanted(*asked))), *look)
    return call(do, dlse, output, lse, *given)


def _looked_up(given: Inputs, how: Attention, do, dlse, output, lse, asked: tuple[bool, ...]) -> tuple[Any, ...]:
    """What tells a kept call of the gradients."""
    return f"{NAME}_backward", (how, asked, attention_sdpa.switch()), *given, do, dlse, output, lse


def differentiable_gradients(
    given: Inputs, how: Attention, do: Tensor | None, dlse: Tensor | None, asked: list[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients, composed of torch's operations, for a second derivative."""
    with torch.enable_grad(), autocast.off(given.query):
        given = Inputs(*apart(*given))
        output, lse, _ = composed(given, how, arithmetic_of(given.query), return_lse=True)
        results: list[Any] = [
            (result, dresult) for result, dresult in ((output, do), (lse, dlse)) if dresult is not None
        ]
        leaves: list[Any] = [each for each, wanted in zip(given[:6], asked, strict=True) if wanted]
        found = iter(
            torch.autograd.grad(
                [each for each, _ in results], leaves, [each for _, each in results], create_graph=True,
                materialize_grads=True,
            )
        )  # fmt: skip
    return tuple(next(found) if wanted else None for wanted in asked)
