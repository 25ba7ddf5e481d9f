"""The gradients of a linear layer's log-probabilities by blocks of classes, each of which has all rows.

The forward pass knows the state of every row, by chunks of rows. So a block's logits, made again, give their gradient,
and two products follow. The block's rows of linear_weight's gradient are one product over all rows, to which nothing is
added: no float32 copy of that gradient exists. Only the input's gradient is added up.
Extra memory: a block of logits; a copy of the input, with 0 for rows that have no part; the input's gradient in the
dtype of the arithmetic, if several products are added up in it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fused_softmax.core.checks import arithmetic_of
from fused_softmax.core.plan import VECTOR_BYTES
from fused_softmax.ops.losses.linear_by_classes import add_product, blocks_of_classes, fills, without, write_product
from fused_softmax.ops.losses.linear_by_rows import Linear, elements_of_chunk
from fused_softmax.ops.losses.log_prob_launches import Asked, Gradients
from fused_softmax.ops.losses.options import Kept, LogProb
from fused_softmax.ops.losses.over_ranks.log_prob import OfCall, gradient_of
from fused_softmax.ranks.groups import Shards

_WORD = 32  # columns of a bitmask's word: a block begins with a word


class Way(NamedTuple):
    """How gradients are made.

    classes: of a block at most; None if by chunks of rows. reason: "" if there was no choice.
    """

    classes: int | None
    reason: str


def way_of(
    x: Tensor, w: Tensor, linear: Linear, asked: list[bool], keeps: bool, columns: Kept, of_ranks: bool,
    chunk_size: int | None,
) -> Way:  # fmt: skip
    """The way that takes less memory beside the inputs and the gradients; by rows where both take as much.

    keeps: whether all logits wait for the backward pass. of_ranks: whether w is one rank's part of a layer.
    """
    if of_ranks or not any(asked):  # ranks sum the input's gradient chunk by chunk
        return Way(None, "")
    if keeps:
        return Way(None, "all logits are kept for the backward pass")
    if not asked[1]:
        return Way(None, "gradients are made by chunks of rows, for linear_weight gets none")
    if columns.ids is not None:
        return Way(None, "gradients are made by chunks of rows, for lists of kept columns are of whole rows")
    classes = _block_of(x, w, chunk_size)
    by_rows, by_classes = _bytes_by_rows(x, w, linear), _bytes_by_classes(x, w, linear, asked, classes)
    of_rows, of_classes = (f"{-(-each // 2**20)} MiB" for each in (by_rows, by_classes))
    if fills(classes, w) and by_classes < by_rows:
        return Way(classes, f"gradients are made by blocks of classes: {of_classes}, by chunks of rows {of_rows}")
    return Way(None, f"gradients are made by chunks of rows: {of_rows}, by blocks of classes {of_classes}")


def _block_of(x: Tensor, w: Tensor, chunk_size: int | None) -> int:
    """How many classes a block has at most: it has no more logits than a chunk of rows. 0 where that is too few."""
    most = min(elements_of_chunk(x, len(w), chunk_size) // max(len(x), 1) // _WORD * _WORD, len(w))
    return next((block.stop for block in blocks_of_classes(0, len(w), most)), 0) if most else 0


def _bytes_by_rows(x: Tensor, w: Tensor, linear: Linear) -> int:
    """Bytes besides inputs and gradients: a chunk, its rows, a lowered weight; a sum wider than the gradient."""
    rows, size, of_w = min(linear.chunk_size, len(x)), x.element_size(), w.element_size()
    chunk = rows * (len(w) + x.shape[1]) * size + _lowered(x, w, len(w))
    wide = arithmetic_of(x).itemsize if linear.accumulate and len(x) > rows else of_w
    # In the end the chunk is gone, and the rounded sum is in memory beside the sum.
    return max(chunk + w.numel() * (wide - of_w), w.numel() * wide) if wide > of_w else chunk


def _bytes_by_classes(x: Tensor, w: Tensor, linear: Linear, asked: list[bool], classes: int) -> int:
    size = x.element_size()
    wide = arithmetic_of(x).itemsize if linear.accumulate and classes < len(w) and asked[0] else size
    summed = wide if wide > size else 0
    return len(x) * classes * size + x.numel() * (size + summed) + _lowered(x, w, classes)


def _lowered(x: Tensor, w: Tensor, classes: int) -> int:
    return classes * w.shape[1] * x.element_size() if w.dtype != x.dtype else 0


def gradients_by_classes(
    x: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, temperature: Tensor | None, columns: Kept,
    states: tuple[Tensor, Tensor, Tensor | None], options: LogProb, asked: list[bool], incoming: Gradients,
    classes: int, linear: Linear,
) -> list[Tensor | None]:  # fmt: skip
    """The gradients that are asked for. states: m, ls and the entropy of rows; classes: of a block at most."""
    n, n_classes = len(x), len(w)
    rows = without(x, (target.long() == options.ignore_index).all(-1))
    blocks = blocks_of_classes(0, n_classes, classes)
    sizes = tuple(block.stop - block.first for block in blocks)
    vector = VECTOR_BYTES // x.element_size()
    stride = -(-max(sizes) // vector) * vector  # rows begin on a vector, as whole ones do
    room = torch.empty(n, stride, dtype=x.dtype, device=x.device)
    dw = torch.empty(w.shape, dtype=w.dtype, device=w.device)
    db = torch.empty(n_classes, dtype=arithmetic_of(x), device=x.device) if asked[2] else None
    dx, summed = None, arithmetic_of(x) if linear.accumulate and len(blocks) > 1 else x.dtype
    for i, block in enumerate(blocks):
        here = slice(block.first, block.stop)
        logits, of_block = room[:, : sizes[i]], w[here].to(x.dtype)
        if bias is None:
            torch.mm(x, of_block.t(), out=logits)
        else:
            torch.addmm(bias[here].to(x.dtype), x, of_block.t(), out=logits)
        shards = Shards(None, i, sizes, n_classes)  # a block is to a row what a rank's shard is
        of_call = OfCall(options, shards, Asked())
        gradient_of(logits, target, temperature, states, incoming, of_call, logits, columns)
        if asked[0]:
            dx = add_product(dx, logits, of_block, summed)
        write_product(logits.t(), rows, dw[here])
        if db is not None:
            torch.sum(logits, 0, dtype=db.dtype, out=db[here])
    del room, logits, of_block
    return [None if dx is None else dx.to(x.dtype), dw, None if db is None else db.to(bias.dtype)]  # type: ignore[union-attr]
