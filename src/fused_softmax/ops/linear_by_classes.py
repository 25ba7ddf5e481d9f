"""Loss and gradients of a linear layer by blocks of classes, whose logits lie in the memory of the weight's gradient.

Logits are made transposed, [classes, tokens], so that those of any block of classes are contiguous. All are made once
for the loss, block after block over each other, and those of the last block are kept; the others are made again for
the gradient. Each row of linear_weight's gradient is then one product over all tokens, which nothing is added to.
Traffic: all logits are read once, and once more read and written. Extra memory: a chunk's elements at most, and where
several products are added up in a wider dtype, the input's gradient in it; the states of tokens before that.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fused_softmax.ops.cross_entropy_transposed import MULTIPLE, Tokens, padded_of
from fused_softmax.ops.losses import Loss, arithmetic_of

_CHUNKS = 8  # fewer add the weight's gradient up in less time than logits take that are made again
# As do longer ones: on an H200 that sum takes 256 / rows of what the products take, logits made again up to a third;
# and of 4 bytes and more an order less, for the products take as much longer.
_CHUNK_ROWS = {2: 1024, 4: 64, 8: 64}
_CLASSES = 256  # fewer at a time do not fill the chip


class Block(NamedTuple):
    """Classes [first, stop). apart: whether its product, or its logits, lie in memory of their own."""

    first: int
    stop: int
    apart: bool = False


class Steps(NamedTuple):
    """Blocks in their order: of the states, the last one's logits kept; of the kept logits; of those made again."""

    states: list[Block]
    kept: list[Block]
    again: list[Block]
    scratch: int  # elements that those apart need


def steps_of(n_classes: int, features: int, tokens: int, most: int) -> Steps:
    """By a scratch of `most` elements, which hold the features or the tokens' logits of a class at least."""
    kept = n_classes * features // tokens
    kept = n_classes if kept >= n_classes else _rounded(kept)
    first = stop = n_classes - kept
    states = [*_blocks(0, first, kept), Block(first, n_classes)]
    of_kept, again, scratch = [], [], 0
    # Logits of class c are at (c - first) * tokens, and its features' gradients at c * features: written from the last
    # class on, where nothing lies that is still to be read, or apart and then copied over what has been read.
    stop = n_classes
    while stop > first:
        rest = stop - first
        size, size_apart = min(rest, stop - -(-rest * tokens // features)), min(rest, most // features)
        apart, begin = size < size_apart, stop - max(size, size_apart)
        of_kept.append(Block(begin, stop, apart))
        scratch = max(scratch, (stop - begin) * features * apart)
        stop = begin
    # The logits of others lie before their gradients' place, as long as there is more room than apart.
    while stop > 0:
        size = stop * features // (tokens + features)
        if size < min(most // tokens, stop):
            again += [block._replace(apart=True) for block in reversed(_blocks(0, stop, most // tokens))]
            scratch = max(scratch, (again[-1].stop - again[-1].first) * tokens)
            break
        again.append(Block(stop - _rounded(size), stop))
        stop = again[-1].first
    return Steps(states, of_kept, again, scratch)


def _rounded(n: int) -> int:
    return n // MULTIPLE * MULTIPLE or n


def _blocks(first: int, stop: int, most: int) -> list[Block]:
    """Classes [first, stop) in equal blocks of `most` at most, the first the longest."""
    if stop == first:
        return []
    size = -(-(stop - first) // -(-(stop - first) // most))
    size = min(-(-size // MULTIPLE) * MULTIPLE, most)
    return [Block(at, min(at + size, stop)) for at in range(first, stop, size)]


def goes_by_classes(x: Tensor, w: Tensor, chunk_size: int) -> bool:
    """Whether it takes less time so than by chunks of so many rows, where a gradient of w is asked for."""
    most = chunk_size * len(w)
    return (
        -(-len(x) // chunk_size) >= _CHUNKS
        and chunk_size <= min(_CHUNK_ROWS[x.element_size()], w.shape[1])
        and most >= _CLASSES * max(padded_of(x), w.shape[1])
    )


def by_classes(
    x: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, loss: Loss, totals: Tensor | None,
    most: int, dtype: torch.dtype, asked: list[bool],
) -> tuple[Tensor, Tensor | None, tuple[Tensor | None, Tensor, Tensor | None]]:  # fmt: skip
    """(losses, z-losses, gradients of x, w and bias) of rows x; that of x in `dtype` where it is a sum of several.

    most: elements of scratch. asked: which gradients are wanted, that of w among them.
    """
    x, w, bias = x.detach(), w.detach(), None if bias is None else bias.detach()
    n_classes, features = w.shape
    tokens = Tokens(x, target, loss, totals, n_classes)
    steps = steps_of(n_classes, features, tokens.padded, most)
    dw = torch.empty(n_classes, features, dtype=x.dtype, device=x.device)
    db = torch.empty(n_classes, dtype=arithmetic_of(x), device=x.device) if asked[2] else None
    dx = None

    def logits_of_block(block: Block, memory: Tensor) -> Tensor:
        size = block.stop - block.first
        # Rows of a whole number of vectors: of others matrix products are slow too.
        logits = memory[: size * tokens.padded].view(size, tokens.padded)[:, : len(x)]
        if bias is None:
            return torch.mm(w[block.first : block.stop], x.t(), out=logits)
        return torch.addmm(bias[block.first : block.stop, None], w[block.first : block.stop], x.t(), out=logits)

    def make_gradient(logits: Tensor, block: Block) -> None:
        nonlocal dx
        tokens.write_gradient(logits, block.first)
        if asked[0]:
            several = dtype if steps.again else x.dtype
            dx = add_product(dx, logits.t(), w[block.first : block.stop], several)
        if db is not None:
            torch.sum(logits, 1, dtype=db.dtype, out=db[block.first : block.stop])

    flat = dw.view(-1)
    tokens.make_room([block.stop - block.first for block in steps.states])
    for block in steps.states:
        logits = logits_of_block(block, flat)
        tokens.read(logits, block.first)
    losses, z = tokens.finish()

    scratch = torch.empty(steps.scratch, dtype=x.dtype, device=x.device)
    kept = steps.states[-1]
    make_gradient(logits, kept)
    for block in steps.kept:
        dlogits, rows = logits[block.first - kept.first : block.stop - kept.first], dw[block.first : block.stop]
        if block.apart:
            rows.copy_(torch.mm(dlogits, x, out=scratch[: rows.numel()].view(rows.shape)))
        else:
            torch.mm(dlogits, x, out=rows)
    for block in steps.again:
        logits = logits_of_block(block, scratch if block.apart else flat)
        make_gradient(logits, block)
        torch.mm(logits, x, out=dw[block.first : block.stop])
    return losses, z, (dx, dw, db)


def add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """total + a @ b in `dtype`, which may be wider than theirs; in place where there is a total."""
    if dtype == a.dtype:
        return torch.mm(a, b) if total is None else total.addmm_(a, b)
    if not a.is_cuda:
        return torch.mm(a.to(dtype), b.to(dtype)) if total is None else total.addmm_(a.to(dtype), b.to(dtype))
    if total is None:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.addmm(total, a, b, out_dtype=dtype, out=total)
