"""A launch's last arguments: mask, scale and sink of a call as its kernel takes them."""

import torch
from torch import Tensor

from fused_softmax.layout import ScoreLayout, last, scores_against
from fused_softmax.options import Scores, arithmetic_in

SCALE, MASK, SINK = "scale", "mask", "sink"

_MOST_NUMBERS = 64
_numbers: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}


def supplier(scores: Scores, layout: ScoreLayout, dim: int, dtype: torch.dtype, input: Tensor):
    """What makes a launch's last arguments of a call's scale, mask and sink: see `supplied`. None if it has none.

    SCALE, MASK or SINK where that alone, as it is given, is all.
    """
    masked, scaled, sunk = (each is not None for each in (scores.mask, scores.scale, scores.sink))
    if not (masked or scaled or sunk):
        return None
    device, shape, copied = input.device, tuple(input.shape), layout.copied
    moved_shape = tuple(last(input, dim).shape)
    per_row, sinks = isinstance(scores.scale, Tensor), isinstance(scores.sink, Tensor)
    wide = scaled and not per_row and dtype == torch.float64  # a kernel's number has 32 bits
    if not (copied or scores.moved or wide) and masked + scaled + sunk == 1 and (sinks or not sunk):
        return MASK if masked else SCALE if scaled else SINK

    def supply(scale, mask, sink):
        if copied:
            given = Scores(scale if scaled else None, mask, sink=sink).along(dim, shape).exact(dtype, device)
            tensors = scores_against(given, moved_shape).tensors
        else:
            tensors = (mask.to(device),) if masked else ()
            if per_row:
                tensors += (scale.to(device),)
            elif wide:
                tensors += (torch.full((), scale, dtype=torch.float64, device=device),)
            if sunk:
                tensors += (sink.to(device) if sinks else _number(sink, arithmetic_in(dtype), device),)
        return (*tensors, scale) if scaled and not per_row and not wide else tensors

    return supply


def supplied(supply, scale, mask, sink=None) -> tuple:
    """A launch's last arguments."""
    if supply is None:
        return ()
    if supply is SCALE or supply is MASK or supply is SINK:
        return (scale if supply is SCALE else mask if supply is MASK else sink,)
    return supply(scale, mask, sink)


def _number(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number where a kernel reads it. A few are kept for good, for launches of any stream and of any graph."""
    key = (value, dtype, device)
    kept = _numbers.get(key)
    if kept is not None:
        return kept
    # What a graph captures is written when the graph runs, in memory that is the graph's: no other launch may read it.
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if capturing or len(_numbers) >= _MOST_NUMBERS or value != value:  # a NaN is never found again
        return torch.full((), value, dtype=dtype, device=device)
    # A copy from the host is over before this returns; a fill would be on the current stream alone.
    return _numbers.setdefault(key, torch.tensor(value, dtype=dtype, device=device))
