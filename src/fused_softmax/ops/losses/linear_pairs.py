"""Pairs of rows whose student's logits a linear layer makes: divergences, and losses of probabilities.

The logits exist a chunk of rows at a time. A mean and a sum make their gradients in the forward pass: one product for
the student's logits, one for the teacher's if it has a layer too, two for the gradients. Without a reduction, for
float16 and beside lse, the backward pass makes the logits again. If classes lie in shards over ranks, each chunk has
its own exchange, and the input's gradient is sent to the others while the next chunk's products are made.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_softmax.core.checks import arithmetic_of
from fused_softmax.core.no_gradient import saved_of
from fused_softmax.core.route import apart, batched, needs_grad, resolved
from fused_softmax.ops import autocast
from fused_softmax.ops.losses.divergence import reduced
from fused_softmax.ops.losses.divergence_launches import Pair, PairRows
from fused_softmax.ops.losses.divergence_rows import gradients, lse_of, referred, run, with_rows
from fused_softmax.ops.losses.linear_by_rows import Gradients, Linear, chunks, linear_of, lowered, scaled
from fused_softmax.ops.losses.options import Divergence
from fused_softmax.ops.losses.over_ranks.divergence import OfCall, gradients_of, rows_of_all
from fused_softmax.ops.losses.over_ranks.linear import Summing, group_of
from fused_softmax.ops.losses.sums import of_counted
from fused_softmax.ranks.first_derivative import once
from fused_softmax.ranks.groups import Shards


class Layers(NamedTuple):
    """Rows, weight and bias of the student's layer and of the teacher's, and temperatures of rows.

    Without v, h are probabilities of all classes, and `weight` has weights of classes.
    """

    x: Tensor
    w: Tensor
    bias: Tensor | None
    h: Tensor
    v: Tensor | None = None
    of_v: Tensor | None = None
    weight: Tensor | None = None
    temperature: Tensor | None = None
    target_temperature: Tensor | None = None

    @property
    def teachers(self) -> Tensor:
        """The teacher's rows as torch's operations make them."""
        return self.h if self.v is None else whole(self.h, self.v, self.of_v)


_ASKED = 4  # of the tensors above, that may have a gradient


class How(NamedTuple):
    """What a call does, beside its tensors. name: of the function.

    linear: None if torch's operations make the products. reduction: "none" if rows' values are given. shards: of
    classes that lie over ranks, or None. summed: whether the input's gradient is summed over them here. asked: which
    gradients are wanted, of the first tensors. lse: whether that of losses' rows is wanted. reason: in words.
    """

    name: str
    options: Divergence
    linear: Linear | None = None
    reduction: str = "none"
    shards: Shards | None = None
    summed: bool = True
    asked: Sequence[bool] = ()
    lse: bool = False
    reason: str = ""


def of_layers(
    name: str, layers: Layers, options: Divergence, weight: Tensor | None, reduction: str, chunk_size: int | None,
    accumulate: str, shards: Shards | None = None, summed: bool = True, lse: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(the divergences [n] or what they are reduced to, the lse of rows of losses if it is wanted).

    weight: of rows. options: with numbers for temperatures.
    """
    asked = [each is not None and needs_grad(each) for each in layers[:_ASKED]]
    linear = linear_of(layers.x, layers.w, chunk_size, accumulate, asked[1], () if shards is None else shards.sizes)
    # In fp16 a mean's division would make gradients vanish that a scaled loss would have kept: they come later.
    at_once = reduction if layers.x.dtype != torch.float16 else "none"
    how = way_of(How(name, options, linear, at_once, shards, summed, asked, lse), len(layers.x))
    counts = None if weight is None else _counts_of(weight, reduction, layers)
    found, of_rows = _LinearPairs.apply(*layers, counts, how)
    if at_once == "none":
        found = reduced(found, None if weight is None else weight.reshape(-1), reduction)
    elif reduction == "mean" and weight is not None:
        found = torch.where(weight.detach().sum() == 0, float("nan"), found)
    return found, of_rows


def way_of(how: How, n_rows: int) -> How:
    """How a call goes, with the words for it."""
    assert how.linear is not None
    n = -(-n_rows // how.linear.chunk_size)
    said = "all rows are one chunk" if n <= 1 else f"rows go by {n} chunks of {how.linear.chunk_size}"
    if any(how.asked):
        said += ", and their gradients are made "
        said += "in the backward pass" if how.reduction == "none" else "with them"
    return How(*how[:-1], said)  # not by _replace, whose result breaks the graph of code that torch 2.11 compiles


def whole(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x, w.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _arithmetic(layers: Layers) -> torch.dtype:
    return torch.promote_types(arithmetic_of(layers.x), arithmetic_of(layers.h))


def _counts_of(weight: Tensor, reduction: str, layers: Layers) -> Tensor:
    """[n]: the factor of each row in the result; 0 for rows that do not count."""
    w = weight.detach().resolve_neg().reshape(-1).to(_arithmetic(layers))
    return torch.where(w == 0, 0.0, w / w.sum()) if reduction == "mean" else w.contiguous()


def _shares(layers: Layers, counts: Tensor | None, how: How) -> Tensor:
    """`_counts_of` where rows have no weights either."""
    if counts is not None:
        return counts
    n = len(layers.x)
    each = 1.0 / n if how.reduction == "mean" and n else 1.0
    return torch.full((n,), each, dtype=_arithmetic(layers), device=layers.x.device)


class _LinearPairs(torch.autograd.Function):
    """(the divergences of rows, or their sum or mean with the factor of each; the lse of losses' rows, or None)."""

    @staticmethod
    def forward(ctx, *given):
        *tensors, counts, how = given
        layers = Layers(*tensors)
        dvalue = _shares(layers, counts, how) if how.reduction != "none" and any(how.asked) else None
        value, lse, *ctx.found = by_chunks(layers, how, None if counts is None else counts == 0, dvalue)
        ctx.how = how
        ctx.save_for_backward(*layers, counts)
        ctx.set_materialize_grads(False)
        if how.reduction == "none":
            return value, lse
        if counts is not None:
            return torch.where(counts == 0, 0.0, value * counts).sum(), lse
        return reduced(value, None, how.reduction), lse

    @staticmethod
    def backward(ctx, dvalue, dlse):
        backward = _backward if ctx.how.shards is None else once(ctx.how.name)(_backward)
        return backward(ctx, dvalue, dlse)


def _backward(ctx, dvalue, dlse):
    nothing = (None,) * (len(ctx.needs_input_grad) - _ASKED)
    if dvalue is None and dlse is None:
        return (None,) * _ASKED + nothing
    dvalue, dlse = resolved(dvalue, dlse)
    how = ctx.how
    saved = saved_of(ctx, how.name)  # of which hooks may return other strides
    *of_rows, counts = (each if each is None else each.contiguous() for each in saved[6:])
    layers = Layers(*saved[:6], *of_rows)
    if how.shards is None and (torch.is_grad_enabled() or batched(dvalue, dlse)):
        return *differentiable(layers, counts, how, dvalue, dlse), *nothing
    if how.reduction != "none":
        # Given away: whoever has them may change them, and a second backward computes them again.
        (of_layer, of_target), ctx.found = ctx.found, (None, None)
        if of_layer is not None:
            factor = dvalue if counts is None else of_counted(dvalue, counts == 0)
            of_target = None if of_target is None else scaled(of_target, factor)
            return *of_layer.times(factor, *layers[:3]), of_target, *nothing
        dvalue = _shares(layers, counts, how) * dvalue
    elif dvalue is None:
        dvalue = torch.zeros_like(dlse)
    left_out = None if counts is None else counts == 0
    return *gradients_of_rows(layers, how, left_out, dvalue.contiguous(), dlse), *nothing


def gradients_of_rows(
    layers: Layers, how: How, left_out: Tensor | None, dvalue: Tensor, dlse: Tensor | None = None
) -> list[Tensor | None]:
    """The gradients asked for, by logits that are made again."""
    _, _, found, of_target = by_chunks(layers, how, left_out, dvalue, dlse)
    assert found is not None
    return [*found.in_dtypes(*layers[:3]), of_target]


def by_chunks(
    layers: Layers, how: How, left_out: Tensor | None = None, dvalue: Tensor | None = None,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Gradients | None, Tensor | None]:  # fmt: skip
    """(the divergences of rows, the lse of losses' rows, the gradients of the layer and of probabilities).

    Gradients are made if there is a dvalue, that of each row. left_out: rows that have no part in them.
    """
    assert how.linear is not None
    layer, asked = lowered(*layers[:3]), how.asked
    summing: Summing | None = None
    of_target: Tensor | None = None
    if dvalue is not None:
        wide, group = layers.w.dtype != layers.x.dtype, group_of(how.shards, how.summed)
        summing = Summing(*layer, how.linear, group, asked[:3], wide, left_out if asked[1] else None)
        of_target = torch.empty(layers.h.shape, dtype=layers.h.dtype, device=layers.h.device) if asked[3] else None
    values, lse = [], []
    for here, pair in _pairs(layer, layers, how.linear):
        pair, rows = _known(pair, how)
        values.append(rows.value)
        if how.lse:
            lse.append(rows.m + rows.ls)
        if summing is not None and dvalue is not None:
            beside = dvalue[here], None if dlse is None else dlse[here]
            dlogits, part = _gradients(pair, rows, beside, how, of_target is not None)
            summing.add(here.start, dlogits)
            if of_target is not None and part is not None:
                of_target[here] = part
    found = None if summing is None else summing.finish()
    return torch.cat(values), torch.cat(lse) if lse else None, found, of_target


def _pairs(layer: tuple[Tensor, Tensor, Tensor | None], layers: Layers, linear: Linear) -> Iterator[tuple[slice, Pair]]:
    """(rows, the logits of both) of each chunk; one of none where there are no rows."""
    if not len(layers.x):
        of_classes = layers.x.new_empty(0, len(layers.w))
        yield slice(0, 0), Pair(of_classes, layers.h if layers.v is None else of_classes.to(layers.h.dtype), None)
    theirs = None if layers.v is None else chunks(layers.h, layers.v, layers.of_v, linear)
    for start, logits in chunks(*layer, linear):
        here = slice(start, start + len(logits))
        y = layers.h[here] if theirs is None else next(theirs)[1]
        yield here, Pair(logits, y, layers.weight, *(None if each is None else each[here] for each in layers[7:]))


def _known(pair: Pair, how: How) -> tuple[Pair, PairRows]:
    """(the tensors as kernels take them, what is known of whole rows)."""
    if how.shards is None:
        return run(pair, how.options)
    return pair, rows_of_all(pair, OfCall(how.options, how.shards))


def _gradients(
    pair: Pair, rows: PairRows, beside: tuple[Tensor, Tensor | None], how: How, of_target: bool
) -> tuple[Any, Tensor | None]:
    """Those of the logits, over them, and if wanted of the probabilities."""
    if how.shards is None:
        return pair.x, gradients(pair, rows, beside[0], how.options, of_target, pair.x, beside[1])[1]
    return gradients_of(pair, rows, beside, OfCall(how.options, how.shards), (True, of_target), over=True)


def differentiable(
    layers: Layers, counts: Tensor | None, how: How, dvalue: Tensor | None, dlse: Tensor | None = None
) -> list[Tensor | None]:
    """The gradients by torch's operations, for a second derivative or a batch of gradients."""
    again, on = torch.is_grad_enabled(), None if counts is None else counts != 0
    options = with_rows(how.options, Pair(layers.x, layers.h, None, *layers[7:]))
    with autocast.off(layers.x), torch.enable_grad():
        x, w, bias, h = apart(*layers[:_ASKED])
        inputs = [each for each, wants in zip((x, w, bias, h), how.asked, strict=True) if wants]
        rows = x if on is None else torch.where(on.unsqueeze(-1), x, 0.0)
        logits = whole(rows, w, bias)
        found = referred(logits, layers._replace(h=h).teachers, options, on, layers.weight)
        if how.reduction != "none":
            found = reduced(found, None, how.reduction) if counts is None else (found * counts).sum()
        results = [found] if dlse is None else [found, lse_of(logits, options)]
        incoming = [g.to(y.dtype) for y, g in zip(results, (dvalue, dlse), strict=False) if g is not None]
        results = [y for y, g in zip(results, (dvalue, dlse), strict=False) if g is not None]
        of_inputs = iter(torch.autograd.grad(results, inputs, incoming, create_graph=again, materialize_grads=True))
    return [next(of_inputs) if wants else None for wants in how.asked]
