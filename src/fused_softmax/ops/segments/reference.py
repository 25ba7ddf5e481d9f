"""What softmax of segments is, by torch's operations, with gradients of any order.

y = exp(z - m) / s of each segment's elements z = input * scale, m = max z, s = sum exp(z - m).  lse = m + log s.

Sums are over elements in one order, by segment_reduce, with no atomics, so that every run has the same bits.
Differences of a cumsum would need no order, but would lose the digits of a segment whose sum is small beside all sums
before it. Sums are in float64, over pieces, of which a long segment has many. So a sum does not stop growing at 2^24
ones, and no single thread adds up all of a hub. Sizes follow from shapes alone, so nothing waits for the device.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

PIECE = 256  # elements that are reduced in a row
_NOWHERE = torch.iinfo(torch.int64).max


class Layout(NamedTuple):
    """Which elements each segment has, all int64.

    order: [n], the elements in the order of their segments; None if they are in it. segment: [n], the segment of each
    element. offsets: [n_segments + 1], from 0 to n, where segments begin and end in this order. spoilt: bool
    [n_segments], segments whose results are NaN.
    """

    order: Tensor | None
    segment: Tensor
    offsets: Tensor
    spoilt: Tensor


def segment_softmax(input: Tensor, offsets: Tensor | None = None, **arguments: Any) -> Tensor:
    """fused_softmax.segment_softmax in float64: one rounding from the truth. Arguments: `_computed`."""
    return _computed("segment_softmax", input, offsets, **arguments)


def segment_log_softmax(input: Tensor, offsets: Tensor | None = None, **arguments: Any) -> Tensor:
    """fused_softmax.segment_log_softmax likewise."""
    return _computed("segment_log_softmax", input, offsets, **arguments)


def segment_logsumexp(input: Tensor, offsets: Tensor | None = None, **arguments: Any) -> Tensor:
    """fused_softmax.segment_logsumexp likewise."""
    return _computed("segment_logsumexp", input, offsets, **arguments)


def _computed(
    name: str, input: Tensor, offsets: Tensor | None, *, index: Tensor | None = None, n_segments: int | None = None,
    dim: int = 0, scale: float | None = None, dtype: torch.dtype | None = None,
    arithmetic: torch.dtype = torch.float64,
) -> Tensor:  # fmt: skip
    """arithmetic: the dtype of all but the sums, which are in float64. The others are the public functions'."""
    layout = layout_of(input.shape[dim], offsets, index, n_segments)
    n_segments = len(layout.spoilt) if offsets is not None else n_segments
    return of_layout(name, input, layout, n_segments or 0, dim, scale, dtype or input.dtype, arithmetic)


def of_layout(
    name: str, input: Tensor, layout: Layout, n_segments: int, dim: int, scale: float | None, result: torch.dtype,
    arithmetic: torch.dtype,
) -> Tensor:  # fmt: skip
    """The function `name` of a layout. n_segments: how many segments have a result."""
    z, rest = scores_of(input, dim, scale, result, arithmetic)
    if name == "segment_logsumexp":
        lse: Any = _LogSumExp.apply(z, *layout)
        y: Any = lse.narrow(0, 0, n_segments)
    else:
        y = _Softmax.apply(z, name == "segment_log_softmax", *layout)
    return y.view(y.shape[0], *rest).movedim(0, dim).contiguous().to(result)


def scores_of(input: Tensor, dim: int, scale: float | None, result: torch.dtype, arithmetic: torch.dtype):
    """(input * scale as [n, width], the sizes of the dims that are in width)."""
    z = input.to(result).to(arithmetic).movedim(dim, 0)
    rest = z.shape[1:]
    z = z.reshape(z.shape[0], rest.numel())
    return (z if scale is None else z * scale), rest


def layout_of(n: int, offsets: Tensor | None, index: Tensor | None, n_segments: int | None) -> Layout:
    """The Layout of n elements, from offsets or an index.

    With an index, the last segment has the elements that are in none.
    """
    if offsets is not None:
        return _of_offsets(n, offsets.long())
    assert index is not None
    return of_order(*order_of(index, n_segments))


def _of_offsets(n: int, offsets: Tensor) -> Layout:
    """The Layout of offsets. A segment is spoilt if its offsets are wrong: they must go from 0 to n and never fall."""
    if len(offsets) == 1:
        none = offsets[:0]
        return Layout(None, none, offsets, none.bool())
    inner = offsets[:-1].clamp(0, n).cummax(0).values[1:]
    upto = torch.cat([torch.zeros_like(offsets[:1]), inner, torch.full_like(offsets[:1], n)])
    wrong = offsets != upto
    segment = torch.searchsorted(upto[1:], torch.arange(n, device=offsets.device), right=True)
    return Layout(None, segment, upto, wrong[:-1] | wrong[1:])


def order_of(index: Tensor, n_segments: int | None) -> tuple[Tensor, Tensor]:
    """(offsets, order) of an index: its elements in the order of their segments.

    The last segment has the elements that are in none. Without n_segments, each run of equal ids is a segment, and
    there may be n of them at most.
    """
    n = len(index)
    if n_segments is not None:
        if n_segments < torch.iinfo(torch.int32).max:  # which is sorted in half the time
            index = torch.where((index < 0) | (index >= n_segments), n_segments, index).int()
        else:
            index = torch.where((index < 0) | (index >= n_segments), n_segments, index.long())
        ranks, order = index.sort(stable=True)
    else:
        ids, order = torch.where(index < 0, _NOWHERE, index.long()).sort(stable=True)
        n_segments = n
        begins = torch.cat([torch.zeros_like(ids[:1]), (ids[1:] != ids[:-1]).long()])
        ranks = torch.where(ids == _NOWHERE, n, begins.cumsum(0))
    begin = torch.searchsorted(ranks, torch.arange(n_segments + 1, dtype=ranks.dtype, device=index.device))
    return torch.cat([begin, torch.full_like(begin[:1], n)]), order


def of_order(offsets: Tensor, order: Tensor) -> Layout:
    """The Layout of what `order_of` has found."""
    at, ranks = torch.arange(len(order), device=order.device), torch.arange(len(offsets) - 1, device=order.device)
    segment = torch.zeros_like(order).scatter(0, order, torch.searchsorted(offsets[1:], at, right=True))
    return Layout(order, segment, offsets, ranks == len(ranks) - 1)  # each place once


def _reduced(x: Tensor, how: str, order: Tensor | None, offsets: Tensor) -> Tensor:
    """[n_segments, width] of x [n, width]: the "max" or "sum" of each segment, -inf or 0 where it is empty."""
    n_segments, nothing = len(offsets) - 1, 0.0 if how == "sum" else -torch.inf
    if x.numel() == 0 or n_segments == 0:
        return torch.full((n_segments, x.shape[1]), nothing, dtype=x.dtype, device=x.device)
    dtype = x.dtype
    if how == "sum":
        x = x.double()
    if order is not None:
        x = x.index_select(0, order)
    # No piece has elements of two segments, or more than PIECE.
    cuts = torch.cat([offsets, torch.arange(0, x.shape[0], PIECE, device=x.device)]).sort().values
    for each in (cuts, torch.searchsorted(cuts, offsets)):
        x = torch.segment_reduce(x.contiguous(), how, offsets=each, axis=0, unsafe=True, initial=nothing)
    return x.to(dtype)


def _save(ctx, tensors: Any) -> None:
    """Keep tensors for both modes. Under vmap the rules of both have to be given the same ones."""
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


class _Sum(torch.autograd.Function):
    """The sums of segments. Its transpose, `_Spread`, gives each element the number of its segment."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, order, segment, offsets):
        return _reduced(x, "sum", order, offsets)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _save(ctx, inputs[1:])

    @staticmethod
    def backward(ctx, gradient):
        return _Spread.apply(gradient, *ctx.saved_tensors), None, None, None

    @staticmethod
    def jvp(ctx, tangent, *_):
        return _Sum.apply(tangent, *ctx.saved_tensors)


class _Spread(torch.autograd.Function):
    """For each element, the number of its segment. The gradient needs no atomics, as that of index_select does."""

    generate_vmap_rule = True

    @staticmethod
    def forward(v, order, segment, offsets):
        return v.index_select(0, segment)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _save(ctx, inputs[1:])

    @staticmethod
    def backward(ctx, gradient):
        return _Sum.apply(gradient, *ctx.saved_tensors), None, None, None

    @staticmethod
    def jvp(ctx, tangent, *_):
        return _Spread.apply(tangent, *ctx.saved_tensors)


def _total(x: Tensor, layout: tuple[Tensor, ...]) -> Any:
    """For each element, the sum of its segment."""
    return _Spread.apply(_Sum.apply(x, *layout), *layout)


def gradient_of_elements(dy: Tensor, y: Tensor, log: bool, layout: tuple) -> Any:
    """dz [n, width] of z, from the result of softmax or log_softmax and its gradient.

    layout: a Layout without `spoilt`.
    """
    return dy - y.exp() * _total(dy, layout) if log else (dy - _total(dy * y, layout)) * y


def gradient_of_lse(dlse: Tensor, z: Tensor, lse: Tensor, layout: tuple) -> Any:
    """dz [n, width] of z, from the results [n_segments, width] of logsumexp."""
    return (z - _Spread.apply(lse, *layout)).exp() * _Spread.apply(dlse, *layout)


def _maxima(z: Tensor, order: Tensor | None, offsets: Tensor, spoilt: Tensor) -> Tensor:
    return _reduced(z, "max", order, offsets).masked_fill(spoilt.unsqueeze(1), torch.nan)


class _Softmax(torch.autograd.Function):
    """softmax or its logarithm of [n, width]; its gradient is made of the result alone, as torch's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z, log, order, segment, offsets, spoilt):
        z = z - _maxima(z, order, offsets, spoilt).index_select(0, segment)
        e = z.exp()
        s = _reduced(e, "sum", order, offsets).index_select(0, segment)
        return z - s.log() if log else e / s

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.log, *layout, _ = inputs
        _save(ctx, (output, *layout))

    @staticmethod
    def backward(ctx, dy):
        y, *layout = ctx.saved_tensors
        return gradient_of_elements(dy, y, ctx.log, layout), None, None, None, None, None

    @staticmethod
    def jvp(ctx, dz, *_):
        y, *layout = ctx.saved_tensors
        return dz - _total(y.exp() * dz, layout) if ctx.log else (dz - _total(y * dz, layout)) * y


class _LogSumExp(torch.autograd.Function):
    """lse [n_segments, width] of z [n, width]."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z, order, segment, offsets, spoilt):
        m = _maxima(z, order, offsets, spoilt)
        m = m.masked_fill(m.isinf(), 0.0)
        s = _reduced((z - m.index_select(0, segment)).exp(), "sum", order, offsets)
        return m + s.log()

    @staticmethod
    def setup_context(ctx, inputs, output):
        z, *layout, _ = inputs
        _save(ctx, (z, output, *layout))

    @staticmethod
    def backward(ctx, dlse):
        z, lse, *layout = ctx.saved_tensors
        return gradient_of_lse(dlse, z, lse, layout), None, None, None, None

    @staticmethod
    def jvp(ctx, dz, *_):
        z, lse, *layout = ctx.saved_tensors
        return _Sum.apply((z - _Spread.apply(lse, *layout)).exp() * dz, *layout)
