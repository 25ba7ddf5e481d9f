"""Loss and gradients of a linear layer by blocks of classes, whose logits lie in the memory of the weight's gradient.

Logits are made transposed, [classes, tokens], so that the logits of any block of classes are contiguous. For the loss
all logits are made once, each block over the one before it. The last block is kept; the others are made again for the
gradient. Each row of linear_weight's gradient is then one product over all tokens, to which nothing is added.
A linear_bias of 16 bits is one more column of linear_weight, by a feature of 1. So logits are rounded once, as torch's
linear rounds them; by addmm cuBLAS adds the bias to the rounded product. The kernels add a wider bias as they read.
Traffic: all logits are read once, and once more read and written. Extra memory: at most a chunk's elements; a copy of
the input, with 0 for ignored tokens; with a bias of 16 bits another, and one of _WIDENED rows of linear_weight; where
several products are added up in a wider dtype, also the input's gradient in that dtype, and before that the states of
tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_softmax.core.checks import arithmetic_of
from fused_softmax.core.device import device_of
from fused_softmax.core.plan import VECTOR_BYTES
from fused_softmax.core.runner import TLDTYPES, has_ptx, prepare
from fused_softmax.ops.losses.kernels.spec import LossSpec
from fused_softmax.ops.losses.launches import LossRows
from fused_softmax.ops.losses.options import Loss
from fused_softmax.ops.losses.sums import left_out_of

MULTIPLE = 128  # of classes, for fast matrix products; and of the classes that a program reads at a time
_CHUNKS = 8  # with fewer, adding up the weight's gradient takes less time than making logits again
# So it does with longer chunks: on an H200 that sum takes 256 / rows of the time of the products, and making logits
# again up to a third. With 4 bytes and more the sum's share is ten times less, because products take so much longer.
_CHUNK_ROWS = {2: 1024, 4: 64, 8: 64}
_CLASSES = 256  # fewer at a time do not fill the chip
_TOKENS = 128  # of a tile
_PROGRAMS = 16  # a multiprocessor
_WARPS = 4
_WIDENED = 8192  # rows of linear_weight that are copied at a time, each with its bias


class Block(NamedTuple):
    """Classes [first, stop). apart: whether their product, or their logits, lie in memory of their own."""

    first: int
    stop: int
    apart: bool = False


class Steps(NamedTuple):
    """Blocks, in the order in which they are taken.

    states: for the states; the logits of the last block are kept. kept: for the gradient of these logits. again: for
    the gradient of logits that are made again.
    """

    states: list[Block]
    kept: list[Block]
    again: list[Block]
    scratch: int  # elements that blocks apart need


def steps_of(n_classes: int, features: int, tokens: int, most: int) -> Steps:
    """The Steps with a scratch of `most` elements, which can hold the features or the logits of one class at least."""
    kept = n_classes * features // tokens
    kept = n_classes if kept >= n_classes else _rounded(kept)
    first = stop = n_classes - kept
    states = [*blocks_of_classes(0, first, kept), Block(first, n_classes)]
    of_kept, again, scratch = [], [], 0
    # The logits of class c are at (c - first) * tokens, and the gradients of its features at c * features. They are
    # written from the last class on, where nothing is still to be read, or apart and then copied over what was read.
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
            again += [block._replace(apart=True) for block in reversed(blocks_of_classes(0, stop, most // tokens))]
            scratch = max(scratch, (again[-1].stop - again[-1].first) * tokens)
            break
        again.append(Block(stop - _rounded(size), stop))
        stop = again[-1].first
    return Steps(states, of_kept, again, scratch)


def _rounded(n: int) -> int:
    return n // MULTIPLE * MULTIPLE or n


def fills(classes: int, w: Tensor) -> bool:
    """Whether a block of so many of w's classes fills the chip, or is all of them."""
    return classes >= min(_CLASSES, len(w))


def blocks_of_classes(first: int, stop: int, most: int) -> list[Block]:
    """Classes [first, stop) in equal blocks of `most` at most, the first the longest."""
    if stop == first:
        return []
    size = -(-(stop - first) // -(-(stop - first) // most))
    size = min(-(-size // MULTIPLE) * MULTIPLE, most)
    return [Block(at, min(at + size, stop)) for at in range(first, stop, size)]


def goes_by_classes(x: Tensor, w: Tensor, chunk_size: int) -> bool:
    """Whether this takes less time than chunks of so many rows, where a gradient of w is asked for."""
    most, room = chunk_size * w.shape[0], w.shape[1] * w.element_size() // x.element_size()
    return (
        -(-x.shape[0] // chunk_size) >= _CHUNKS
        and chunk_size <= min(_CHUNK_ROWS[x.element_size()], w.shape[1])
        and most >= _CLASSES * max(padded_of(x), room)
    )


def by_classes(
    x: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, loss: Loss, totals: Tensor | None,
    most: int, dtype: torch.dtype, asked: Sequence[bool], with_lse: bool = False,
) -> tuple[LossRows, Tensor | None, tuple[Tensor | None, Tensor, Tensor | None]]:  # fmt: skip
    """(what is known of rows x, their lse, gradients of x, w and bias). That of x is in `dtype` if it is a sum.

    w, bias: may be masters; w then has its gradient in its own dtype. most: elements of scratch. asked: which gradients
    are wanted, that of w among them.
    """
    dw = torch.empty(w.shape, dtype=w.dtype, device=x.device)
    x, w, bias = x.detach(), w.detach().to(x.dtype), None if bias is None else bias.detach().to(x.dtype)
    rows = without(x, left_out_of(target, loss))
    n_classes = len(w)
    product = _Biased(x, w, bias) if bias is not None and x.element_size() == 2 else None
    tokens = Tokens(x, target, loss, totals, n_classes, None if product else bias)
    flat = dw.view(-1).view(x.dtype)  # room for logits
    steps = steps_of(n_classes, flat.numel() // n_classes, tokens.padded, most)
    db = torch.empty(n_classes, dtype=arithmetic_of(x), device=x.device) if asked[2] else None
    dx = None

    def logits_of_block(block: Block, memory: Tensor) -> Tensor:
        size = block.stop - block.first
        # Rows are a whole number of vectors: other rows make matrix products slow too.
        logits = memory[: size * tokens.padded].view(size, tokens.padded)[:, : len(x)]
        if product is not None:
            return product.of_classes(block.first, block.stop, logits)
        return torch.mm(w[block.first : block.stop], x.t(), out=logits)

    def make_gradient(logits: Tensor, block: Block) -> None:
        nonlocal dx
        tokens.write_gradient(logits, block.first)
        if asked[0]:
            several = dtype if steps.again else x.dtype
            dx = add_product(dx, logits.t(), w[block.first : block.stop], several)
        if db is not None:
            torch.sum(logits, 1, dtype=db.dtype, out=db[block.first : block.stop])

    tokens.make_room([block.stop - block.first for block in steps.states])
    for block in steps.states:
        logits = logits_of_block(block, flat)
        tokens.read(logits, block.first)
    results, lse = tokens.finish(with_lse)

    scratch = torch.empty(steps.scratch, dtype=x.dtype, device=x.device)
    kept = steps.states[-1]
    make_gradient(logits, kept)
    for block in steps.kept:
        dlogits, of_w = logits[block.first - kept.first : block.stop - kept.first], dw[block.first : block.stop]
        if block.apart:
            room = scratch[: len(of_w) * flat.numel() // n_classes].view(dw.dtype)
            of_w.copy_(write_product(dlogits, rows, room.view(of_w.shape)))
        else:
            write_product(dlogits, rows, of_w)
    for block in steps.again:
        logits = logits_of_block(block, scratch if block.apart else flat)
        make_gradient(logits, block)
        write_product(logits, rows, dw[block.first : block.stop])
    return results, lse, (dx, dw, db)


def padded_of(x: Tensor) -> int:
    """The tokens x [tokens, features] as a whole number of vectors."""
    vector = VECTOR_BYTES // x.element_size()
    return -(-len(x) // vector) * vector


class _Biased:
    """w @ x.t() + bias, rounded once: the bias is the weight of a feature of 1.

    Other features that fill the vector are 0.
    """

    def __init__(self, x: Tensor, w: Tensor, bias: Tensor):
        self.w, self.bias, pad = w, bias, VECTOR_BYTES // x.element_size()
        self.x = torch.cat([x, x.new_ones(len(x), 1), x.new_zeros(len(x), pad - 1)], 1)
        self.room = w.new_zeros(min(_WIDENED, len(w)), self.x.shape[1])

    def of_classes(self, first: int, stop: int, out: Tensor) -> Tensor:
        features = self.w.shape[1]
        for at in range(first, stop, len(self.room)):
            until = min(at + len(self.room), stop)
            wide = self.room[: until - at]
            wide[:, :features] = self.w[at:until]
            wide[:, features] = self.bias[at:until]
            torch.mm(wide, self.x.t(), out=out[at - first : until - first])
        return out


class Tokens:
    """The losses of tokens by blocks of logits [classes, tokens], whose rows take `padded` elements.

    In this order: make_room; read of every block; finish; write_gradient of every block.
    loss: its weight contiguous, in the dtype of the arithmetic. bias: of classes; the blocks do not include it.
    """

    def __init__(
        self, x: Tensor, target: Tensor, loss: Loss, totals: Tensor | None, n_classes: int, bias: Tensor | None = None
    ):  # fmt: skip
        self.n, self.padded, self.n_classes = len(x), padded_of(x), n_classes
        self.x, self.target, self.loss, self.totals = x, target, loss, totals
        self.device, self.dtype = x.get_device(), arithmetic_of(x)
        self.numbers = loss.exact_numbers(x)
        self.bias = None if bias is None else bias.contiguous()
        self.logit_dtype = x.dtype if bias is None else self.dtype  # of logits as they are kept: with their bias
        vector = VECTOR_BYTES // x.element_size()
        # States and gradients are the same for a mean, a sum and a z-loss: one kernel does for all.
        self.spec = LossSpec(
            block_cols=32 * _WARPS * vector // _TOKENS, block_tokens=_TOKENS, pieces=4, vector=vector,
            cast_dtype=TLDTYPES[self.logit_dtype], ptx=has_ptx(self.device),
            **loss.kind() | {"mean": False, "z_loss": False},
        )  # fmt: skip
        self.blocks = -(-self.padded // _TOKENS)
        # Of each token: m, and a, b and u of its gradient; its target's class, or -1 if it is no class, or -2 if the
        # token does not count.
        self.shares = self._empty(4, self.padded)
        self.place = self._empty(self.padded, dtype=torch.int32)

    def make_room(self, sizes: list[int]) -> None:
        """Memory for the states of blocks of so many classes, one for every token and part, and the targets' logits."""
        parts = sum(self._parts(size)[0] for size in sizes)
        m, s = self._empty(2, parts, self.padded)
        wz = self._empty(parts, self.padded) if self.loss.smooth else None
        self.states = {"m": m, "s": s, "wz": wz, "w": self._empty(parts)}
        if self.loss.stats:
            u, found = self._empty(parts, self.padded), self._empty(parts, self.padded, dtype=torch.int32)
            self.stats = {"u": u, "found": found}
        self.z_t, self.n_read = self._empty(self.padded, dtype=self.logit_dtype), 0

    def read(self, logits: Tensor, first: int) -> None:
        """Take the states of a block of logits from class `first` on."""
        from fused_softmax.ops.losses.kernels.transposed import _token_states, _token_stats

        parts, part_classes = self._parts(len(logits))
        tensors = {
            "x": logits, "bias": self.bias, "target": self.target, "weight": self.loss.weight,
            "numbers": self.numbers, "z_t": self.z_t,
        }  # fmt: skip
        sizes = {"first": first, "n_classes": len(logits), "part_classes": part_classes, "n_read": self.n_read}
        spec = self.spec if self.spec.capped or self.spec.smooth else replace(self.spec, pieces=8)
        self._launch(_token_states, parts * self.blocks, tensors | self.states, sizes, spec)
        if self.loss.stats:
            tensors = {
                "x": logits, "bias": self.bias, "numbers": self.numbers, "m": self.states["m"], **self.stats,
            }  # fmt: skip
            self._launch(_token_stats, parts * self.blocks, tensors, sizes, self.spec)
        self.n_read += parts

    def finish(self, with_lse: bool = False) -> tuple[LossRows, Tensor | None]:
        """The losses and all else but m and ls, and lse, from all states. It also makes what the gradient needs."""
        from fused_softmax.ops.losses.kernels.transposed import _token_losses

        loss = self.loss
        losses, z = self._empty(self.n), self._empty(self.n) if loss.lse_square_scale else None
        lse = self._empty(self.n) if with_lse else None
        tensors = {
            "target": self.target, "weight": loss.weight, "totals": self.totals, "w_total": loss.weight_total(),
            "numbers": self.numbers, "z_t": self.z_t, **self.states,
            "loss": losses, "z": z, "lse": lse, "shares": self.shares, "place": self.place,
        }  # fmt: skip
        spec = replace(
            self.spec, block_tokens=32, lanes=16, mean=loss.mean, z_loss=z is not None,
            totals=1 if self.totals is None else self.totals.shape[1],
        )  # fmt: skip
        sizes = {"n_parts": self.n_read, "n_classes": self.n_classes}
        self._launch(_token_losses, -(-self.n // spec.block_tokens), tensors, sizes, spec)
        rows = LossRows(None, None, losses, z, *(self._merged_stats() if loss.stats else ()))
        del self.states, self.z_t
        return rows, lse

    def _merged_stats(self) -> tuple[Tensor, Tensor]:
        """The entropy and the likeliest class of every token."""
        from fused_softmax.ops.losses.kernels.transposed import _merge_token_stats

        entropy, predicted = self._empty(self.n), self._empty(self.n, dtype=torch.int64)
        states = {"m": self.states["m"], "s": self.states["s"], **self.stats}
        tensors = {**states, "entropy": entropy, "predicted": predicted}
        sizes = {"n_parts": self.n_read, "n_classes": self.n_classes}
        self._launch(_merge_token_stats, -(-self.n // _TOKENS), tensors, sizes, self.spec)
        del self.stats
        return entropy, predicted

    def write_gradient(self, logits: Tensor, first: int) -> None:
        """The gradient of a block of logits from class `first` on, over them."""
        from fused_softmax.ops.losses.kernels.transposed import _token_gradient

        parts, part_classes = self._parts(len(logits))
        tensors = {
            "x": logits, "bias": self.bias, "weight": self.loss.weight, "numbers": self.numbers,
            "shares": self.shares, "place": self.place,
        }  # fmt: skip
        sizes = {"first": first, "n_classes": len(logits), "part_classes": part_classes}
        self._launch(_token_gradient, parts * self.blocks, tensors, sizes, self.spec)

    def _parts(self, n_classes: int) -> tuple[int, int]:
        """How many parts of how many classes."""
        parts = max(1, _PROGRAMS * device_of(self.device).sm_count // self.blocks)
        size = -(-n_classes // (parts * MULTIPLE)) * MULTIPLE
        return -(-n_classes // size), size

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.x.device)

    def _launch(
        self, kernel: Any, programs: int, tensors: Mapping[str, Tensor | None], sizes: dict[str, int], spec: LossSpec
    ) -> None:
        values = {"n_tokens": self.n, "padded": self.padded, **self.loss.values(), **sizes}
        run = prepare(
            kernel, None, spec, tensors, values, device=self.device, programs=lambda _: programs, num_warps=_WARPS
        )
        run(*[each for each in tensors.values() if each is not None])


def without(x: Tensor, rows: Tensor) -> Tensor:
    """x [n, features] with 0 in these rows.

    The gradient of their logits is 0, and 0 times NaN or infinity would be NaN.
    """
    return torch.where(rows.unsqueeze(-1), 0.0, x)


def add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """total + a @ b in `dtype`, which may be wider than theirs; in place if there is a total."""
    if total is None:
        return write_product(a, b, torch.empty(a.shape[0], b.shape[1], dtype=dtype, device=a.device))
    a, b, wide = _factors(a, b, dtype)
    return torch.addmm(total, a, b, out=total, **wide)


def write_product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Write a @ b into a tensor, whose dtype may be wider than theirs."""
    a, b, wide = _factors(a, b, out.dtype)
    # A backward pass may run under autocast, which casts no operation with an `out`.
    return torch.mm(a, b, out=out, **wide)


def _factors(a: Tensor, b: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """What torch multiplies, and how, for a product in `dtype`."""
    if dtype == a.dtype:
        return a, b, {}
    # Tensors without memory stand for a GPU's. torch 2.11 makes no product of them in another dtype.
    return (a, b, {"out_dtype": dtype}) if a.device.type == "cuda" else (a.to(dtype), b.to(dtype), {})
