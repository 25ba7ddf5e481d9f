"""A linear layer's logits by chunks of rows, which all use one buffer, and the gradients of its tensors by chunk."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_softmax.core.checks import arithmetic_of
from fused_softmax.core.described import described
from fused_softmax.core.route import on_device, readable
from fused_softmax.ops import autocast
from fused_softmax.ops.losses import launches as losses
from fused_softmax.ops.losses.launches import LossRows
from fused_softmax.ops.losses.linear_by_classes import add_product, without
from fused_softmax.ops.losses.options import Loss
from fused_softmax.ops.losses.sums import multiply

OF_LAYERS = "linear_cross_entropy"  # its row of autocast's table serves all functions of a linear layer
_CHUNK_BYTES = 2**30  # of logits: with fewer chunks there is less to accumulate, and a chunk's products fill the chip
_CHUNK_ROWS = 128  # rows of a chunk are a multiple of it, for fast matrix products


@dataclass(frozen=True)
class Linear:
    """How a call makes its products. accumulate: whether chunks add up in the dtype of the arithmetic."""

    chunk_size: int
    accumulate: bool


def as_autocast_has(input: Tensor, *others: Any) -> list[Any]:
    """A layer's tensors, which fit together, in the dtype of products where autocast is on; None stays None."""
    cast = autocast.lowered_dtype(OF_LAYERS, input)
    return [each if each is None or cast is None else each.to(cast) for each in (input, *others)]


def check_layer(name: str, input: Any, linear_weight: Any, linear_bias: Any, chunk_size: Any, accumulate: Any) -> None:
    """An error that names the argument where a linear layer's tensors do not fit.

    A weight and a bias may be of float32 beside an input of 16 bits.
    """
    of_layer = [("input", input), ("linear_weight", linear_weight)]
    of_layer += [] if linear_bias is None else [("linear_bias", linear_bias)]
    for argument, tensor in of_layer:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: {argument} must be a Tensor, not {type(tensor).__name__}")
        if tensor.is_nested or tensor.layout != torch.strided:
            kind = "nested" if tensor.is_nested else str(tensor.layout)
            raise RuntimeError(f"{name}: {argument} must be a dense strided tensor, got a {kind} one")
    if not input.dtype.is_floating_point:
        raise NotImplementedError(f"{name}: input must be of a float dtype, got {input.dtype}")
    if input.ndim == 0 or linear_weight.ndim != 2 or linear_weight.shape[1] != input.shape[-1]:
        raise ValueError(
            f"{name}: linear_weight must have shape [n_classes, in_features] for input of shape {tuple(input.shape)}, "
            f"got {tuple(linear_weight.shape)}"
        )
    if linear_bias is not None and tuple(linear_bias.shape) != (linear_weight.shape[0],):
        raise ValueError(
            f"{name}: linear_bias must have shape ({linear_weight.shape[0]},), got {tuple(linear_bias.shape)}"
        )
    # Autocast gives all of them one dtype, but leaves float64 alone.
    is_cast = autocast.lowered_dtype(OF_LAYERS, input) is not None
    masters = input.element_size() == 2
    for argument, tensor in of_layer[1:]:
        if tensor.device != input.device:
            raise RuntimeError(f"{name}: {argument} must be on the input's device {input.device}, got {tensor.device}")
        fits = tensor.dtype == input.dtype or (is_cast and autocast.lowers(tensor))
        if not fits and not (masters and tensor.dtype == torch.float32):
            raise RuntimeError(
                f"{name}: {argument} must be of the input's dtype {input.dtype}, or float32 beside 16 bits, got "
                f"{tensor.dtype}"
            )
    if chunk_size is not None and (not isinstance(chunk_size, int) or isinstance(chunk_size, bool)):
        raise TypeError(f"{name}: chunk_size must be an int, not {type(chunk_size).__name__}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"{name}: chunk_size must be at least 1, got {chunk_size}")
    if accumulate not in ("fp32", "input"):
        raise ValueError(f'{name}: accumulate must be "fp32" or "input", got {described(accumulate)}')


def linear_of(
    x: Tensor, w: Tensor, chunk_size: int | None, accumulate: str, of_weight: bool, sizes: Sequence[int] = ()
) -> Linear:  # fmt: skip
    """The chunks of a call. of_weight: whether w's gradient is wanted. Several chunks then take an accumulator.

    sizes: of all ranks' shards of w, if it is one. Every rank takes the chunks of the longest shard, so that all
    exchange equally often.
    """
    n_classes = max(sizes, default=w.shape[0])
    if chunk_size is None:
        row_bytes = max(n_classes, 1) * x.element_size()
        fits = _CHUNK_BYTES // row_bytes
        chunk_size = max(fits // _CHUNK_ROWS * _CHUNK_ROWS, min(fits, _CHUNK_ROWS), 1)
        if of_weight and accumulate == "fp32" and x.dtype == w.dtype == torch.bfloat16:
            # Several take a chunk and two gradients' bytes; in the end, their rounded sum beside them, three. The sum
            # of a master weight's is its gradient.
            w_bytes = n_classes * w.shape[1] * x.element_size()
            at_once = max(_CHUNK_BYTES + w_bytes, 2 * w_bytes)
            chunk_size = x.shape[0] if x.shape[0] * row_bytes <= at_once else chunk_size
        equal = -(-x.shape[0] // max(-(-x.shape[0] // chunk_size), 1))
        chunk_size = min(chunk_size, -(-equal // _CHUNK_ROWS) * _CHUNK_ROWS)
    return Linear(max(min(chunk_size, x.shape[0]), 1), accumulate == "fp32")


def elements_of_chunk(x: Tensor, n_classes: int, chunk_size: int | None) -> int:
    """How many logits are in memory at a time."""
    return _CHUNK_BYTES // x.element_size() if chunk_size is None else chunk_size * n_classes


def keeps_logits(x: Tensor, linear: Linear, asked: Sequence[bool], loss: Loss) -> bool:
    """Whether all logits, with their gradient, wait for the backward pass, which then makes the products.

    It saves launches, and takes no more memory if there are no more rows than w has columns: w's gradient would wait
    instead. In fp16 the factor that scales the loss could overflow the logits' gradient.
    """
    few = x.shape[0] <= min(linear.chunk_size, x.shape[1])
    return few and asked[1] and x.dtype != torch.float16 and not loss.stats


def lowered(x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """What products are made of: a master weight and bias in the dtype of the input."""
    x, w, bias = x.detach(), w.detach(), None if bias is None else bias.detach()
    return x, w if w.dtype == x.dtype else w.to(x.dtype), bias if bias is None else bias.to(x.dtype)


def by_rows(
    x: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, loss: Loss, totals: Tensor | None, linear: Linear,
    gradients: "Gradients | None", states: bool,
) -> LossRows:  # fmt: skip
    """What is known of all rows, with m and ls if `states`.

    If there are `gradients`, those of the rows are added to them.
    """
    found = []
    for start, logits in chunks(x, w, bias, linear):
        part = target[start : start + logits.shape[0]]
        # Statistics come from a pass that holds no rows for a gradient, so a second pass writes that.
        at_once = gradients is not None and not loss.stats
        rows = losses.forward(logits, part, loss, totals, logits if at_once else None)
        if gradients is not None:
            if not at_once:
                losses.backward(logits, part, rows.m, rows.ls, loss, totals=totals, dx=logits)  # type: ignore[arg-type]
            gradients.add(start, logits)
        found.append(rows if states else rows._replace(m=None, ls=None))
    if len(found) == 1:
        return found[0]
    if len({rows.loss.shape[1:] for rows in found}) > 1:  # another number of rows may be cut into other parts
        found = [rows._replace(loss=rows.loss.view(len(rows.loss), -1).sum(1)) for rows in found]
    of_all = [None if each[0] is None else torch.cat(each) for each in zip(*found, strict=True)]
    return LossRows(*of_all)  # type: ignore[arg-type]


def chunks(x: Tensor, w: Tensor, bias: Tensor | None, linear: Linear) -> Iterator[tuple[int, Tensor]]:
    """(first row, logits [rows, n_classes]) of each chunk, all in one buffer."""
    buffer = torch.empty(linear.chunk_size, w.shape[0], dtype=x.dtype, device=x.device)
    for start in range(0, x.shape[0], linear.chunk_size):
        rows = _part(x, start, start + linear.chunk_size)
        logits = _part(buffer, 0, rows.shape[0])
        if bias is None:
            torch.mm(rows, w.t(), out=logits)
        else:
            torch.addmm(bias, rows, w.t(), out=logits)
        yield start, logits


def _part(x: Tensor, start: int, stop: int) -> Tensor:
    return x if start == 0 and stop >= x.shape[0] else x[start:stop]


def whole_logits(x: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int) -> Tensor:
    """linear(x, w, bias) by torch's operations, with masters lowered.

    Ignored rows that hold NaN or infinity have no part in a gradient, and their logits are NaN.
    """
    linear = torch.nn.functional.linear
    w, bias = w.to(x.dtype), None if bias is None else bias.to(x.dtype)
    if target.is_floating_point():
        return linear(x, w, bias)
    ignored = target.long() == ignore_index
    if readable(target) and not (ignored.any() and not x.detach()[ignored].isfinite().all()):
        return linear(x, w, bias)
    spoilt = ignored & ~x.detach().isfinite().all(-1)
    return linear(without(x, spoilt), w, bias).masked_fill(spoilt.unsqueeze(-1), torch.nan)


def counted(targets: Tensor, ignore_index: int) -> Tensor | None:
    """The indices of the rows of targets [n] or [n, k] that count; None if all or none do. It waits for the device."""
    on = targets.long() != ignore_index
    rows = (on if on.ndim == 1 else on.any(-1)).nonzero().squeeze(-1)
    return rows if 0 < len(rows) < len(targets) else None


def spread(of_rows: Tensor, rows: Tensor, n: int) -> Tensor:
    """Values of these rows, placed among n rows with 0 elsewhere."""
    return of_rows.new_zeros(n, *of_rows.shape[1:]).index_put((rows,), of_rows)


def divides_late(x: Tensor, loss: Loss) -> bool:
    """Whether gradients are divided by a mean's total only once the factor that scales the loss is known."""
    return x.dtype == torch.float16 and loss.mean


class Gradients:
    """The gradients asked for, of input, linear_weight and linear_bias, made from those of chunks of logits.

    x, w, bias: the tensors of the products, `lowered`.
    """

    def __init__(
        self, x: Tensor, w: Tensor, bias: Tensor | None, linear: Linear, asked: Sequence[bool], wide: bool = False,
        left_out: Tensor | None = None, made: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    ):  # fmt: skip
        """wide: whether sums over rows have the dtype of the arithmetic.

        They do if the input's dtype may not hold them, or if w is a master. left_out: `left_out_of`, for chunks that
        are added. made: the gradients that exist already.
        """
        self.left_out = left_out
        self.x, self.w, self.asked, self.linear = x, w, asked, linear
        several = x.shape[0] > linear.chunk_size
        self.dtype = arithmetic_of(x) if wide or (linear.accumulate and several) else x.dtype
        self.dx, self.dw, self.db = made

    def add(self, start: int, dlogits: Tensor) -> None:
        stop = start + dlogits.shape[0]
        if self.asked[0]:
            if self.dx is None:
                self.dx = torch.empty_like(self.x, memory_format=torch.contiguous_format)
            torch.mm(dlogits, self.w, out=_part(self.dx, start, stop))
        if self.asked[1]:
            rows = _part(self.x, start, stop)
            rows = rows if self.left_out is None else without(rows, _part(self.left_out, start, stop))
            self.dw = add_product(self.dw, dlogits.t(), rows, self.dtype)
        if self.asked[2]:
            db = dlogits.sum(0, dtype=arithmetic_of(dlogits))
            self.db = db if self.db is None else self.db.add_(db)

    def done(self) -> "Gradients":
        """Itself, without the tensors of the products: a master's copy would wait for the backward pass."""
        del self.x, self.w, self.left_out
        return self

    def times(self, factor: Tensor | None, *tensors: Tensor | None) -> list[Tensor | None]:
        """The gradients times a factor of one element, in the dtypes of these: input, weight and bias as given."""
        found: list[Tensor | None] = []
        for gradient, of in zip((self.dx, self.dw, self.db), tensors, strict=True):
            if gradient is not None and gradient.dtype == of.dtype:  # type: ignore[union-attr]
                gradient = gradient if factor is None else scaled(gradient, factor)
            elif gradient is not None:
                rounded = torch.empty(gradient.shape, dtype=of.dtype, device=of.device)  # type: ignore[union-attr]
                one = gradient.new_ones(()) if factor is None else factor
                gradient = torch.mul(gradient, one, out=rounded)  # read and written once
            found.append(gradient)
        return found

    def in_dtypes(self, *tensors: Tensor | None) -> list[Tensor | None]:
        """The gradients in the dtypes of these: input, weight and bias as given."""
        return self.times(None, *tensors)


def scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """A gradient times a factor of one element, in place."""
    return multiply(gradient, factor) if on_device(gradient) else gradient.mul_(factor)
