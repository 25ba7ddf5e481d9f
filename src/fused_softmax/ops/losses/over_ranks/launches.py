"""Losses of a shard by kernels, prepared: launches that read and write its logits, and a few for numbers of rows.

By torch's operations these numbers would take more than a hundred launches, and 2 ms of the CPU's time. `states` says
what they are, and makes the same by torch's operations.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_softmax.core.calls import kept
from fused_softmax.core.launched import Call, Launched
from fused_softmax.core.route import runs_here
from fused_softmax.core.runner import TLDTYPES, has_ptx, prepare
from fused_softmax.ops.losses import launches as losses
from fused_softmax.ops.losses.kernels.spec import LossShardSpec, numbers_of
from fused_softmax.ops.losses.launches import Given
from fused_softmax.ops.losses.options import READ_NUMBERS, Loss, LossNumbers, read_numbers
from fused_softmax.ranks.groups import Shards, exchange, headers_of
from fused_softmax.ranks.launches import allocator

ELSEWHERE = -100  # ops/losses/kernels/over_ranks.py
HEADER = 4  # numbers behind a message
_ROWS = 128  # of a program
_NUMBERS = ("smoothing", "lse_square_scale")


class OfShard(NamedTuple):
    """x: [n, held], without padding, its columns contiguous. target: [n]. loss: its weight [held]."""

    x: Tensor
    target: Tensor
    loss: Loss
    shards: Shards

    @property
    def gathers(self) -> bool:
        """Whether ranks tell each other by the group's backend."""
        return len(self.shards.sizes) > 1 and self.shards.by_peers is None

    @property
    def headed(self) -> bool:
        """Whether a header stands behind each message."""
        return self.gathers and self.shards.digest is not None

    @property
    def length(self) -> int:
        """Numbers of a message."""
        return _numbers_of(self.loss) * len(self.x) + HEADER * self.headed


def takes(x: Tensor, target: Tensor, loss: Loss) -> bool:
    """Whether kernels make the losses. Not in fp64, whose numbers have 64 bits.

    It follows from what is the same on all ranks, also on ranks without columns: all have to go one way to get the same
    bits.
    """
    return len(x) > 0 and loss.scale != 0 and x.dtype != torch.float64 and runs_here(x, target)


def own_loss(loss: Loss) -> Loss:
    """The part of a loss that is of each row alone: its logits and class weights."""
    return replace(loss.without_rows(), ignore_index=ELSEWHERE, reduction="none", stats=False)


def rows_numbers(loss: Loss, numbers: LossNumbers) -> LossNumbers:
    """The numbers of `_rows_loss`, by those of the whole loss."""
    return numbers._replace(smoothing=1.0 if loss.smooth else 0.0, lse_square_scale=0.0)


def _rows_loss(loss: Loss) -> Loss:
    """`own_loss`; with smoothing, its target is spread over all classes alike: (W lse - sum_c w_c z_c) / C."""
    return replace(own_loss(loss), label_smoothing=1.0) if loss.smooth else own_loss(loss)


def _numbers_of(loss: Loss) -> int:
    """Numbers of a row in a message."""
    return numbers_of(weighted=loss.weight is not None, smooth=loss.smooth, stats=loss.stats)


def prepare_telling(given: OfShard) -> Call:
    """call(x, target, weight, numbers, shards) -> (the messages of all ranks, the headers that they should have)

    The headers may be None. numbers: of the loss, and `rows_numbers`.
    """
    x, _, _, (_, rank, sizes, *_) = given
    ranks, n_rows, device, empty = len(sizes), len(x), x.device, allocator(x.device)
    gathers, headed, length = given.gathers, given.headed, given.length
    say = _prepare_saying(given) if given.shards.held else _prepare_silence(given)

    def call(x, target, weight, numbers, shards):
        headers = headers_of(shards, n_rows, torch.float32, device) if headed else None
        said = say(x, target, weight, numbers, None if headers is None else headers.of_ranks[rank])
        if gathers:
            heard = empty((ranks * length,), (1,), torch.float32)
            exchange(heard, said, shards)
            return heard, None if headers is None else headers.there
        return (said if ranks == 1 else shards.by_peers(said.view(-1, n_rows), shards)), None

    return call


def _prepare_silence(given: OfShard) -> Call:
    """What a shard without columns says: call(x, target, weight, numbers, header)"""
    said_of_row, n_rows, device = _numbers_of(given.loss), len(given.x), given.x.device

    def call(x, target, weight, numbers, header):
        said = torch.zeros(said_of_row, n_rows, dtype=torch.float32, device=device)
        said[:2] = -torch.inf
        return said.view(-1) if header is None else torch.cat((said.view(-1), header))

    return call


def _prepare_saying(given: OfShard) -> Call:
    """What a shard says, which is read for it: call(x, target, weight, numbers, header)"""
    x, target, loss, _ = given
    own, smooth, weighted = _rows_loss(loss), loss.smooth, loss.weight is not None
    own = replace(own, stats=loss.stats)
    of_all, w_total = torch.zeros_like(target) if smooth else target, loss.weight_total()
    # As the losses of one GPU keep it: for another number of rows it costs little.
    read = kept(
        "losses", (*own.key, None, False, None, True), (x, of_all, None, own.weight),
        losses.prepare_losses, Given(x, None, of_all, own.weight, None, w_total), own,
    )  # fmt: skip
    # Of what is written anew in each call only the dtype matters.
    of_row = torch.empty(len(x), dtype=torch.float32, device=x.device)
    found = (of_row, of_row.long()) if loss.stats else (None, None)
    header = torch.empty(HEADER, dtype=torch.float32, device=x.device) if given.headed else None
    say = _prepare_say(given, (loss.weight, w_total, of_row, of_row, of_row if smooth else None, *found, header))

    def call(x, target, weight, numbers, header):
        of_all, w_total = target, None
        if smooth:
            of_all, w_total = torch.zeros_like(target), weight.sum(dtype=weight.dtype) if weighted else None
        rows = read(Given(x, None, of_all, weight, None, w_total), numbers[1])
        beside = weight, w_total, rows.m, rows.ls, rows.loss if smooth else None, rows.entropy, rows.predicted, header
        return say(x, target, beside, numbers[0])

    return call


def prepare_gradient(
    given: OfShard, states: Tensor, totals: Tensor | None, beside: tuple[Tensor | None, ...], dx: Tensor
) -> Call:
    """call(x, target, weight, states, totals, beside, numbers, dx), which writes dx [n, held], which may be x.

    totals: what a mean divides losses and z-losses by [2, parts]. beside: the gradients of loss, z-loss and lse, each
    of one value or one a row. numbers: of the loss, and `rows_numbers`.
    """
    x, loss = given.x, given.loss
    weighted, smooth = loss.weight is not None, loss.smooth
    w_total, of_rows = loss.weight_total(), _rows_loss(loss)
    share = _prepare_share(given, (loss.weight, w_total, states, totals, *beside))
    local, m, ls, dy, dlse, own = _shares_maker(given)()
    # As the gradient of one GPU keeps it: for another number of rows it costs little.
    write = kept(
        "loss_gradient", (*of_rows.key, None, False),
        (x, local, dx, loss.weight, dy, None, dlse), losses.prepare_gradient,
        Given(x, dx, local, loss.weight, None, w_total), (m, ls, dy, None, dlse), of_rows,
    )  # fmt: skip
    put = None if own is None else _prepare_put(given, dx, local, own)

    def call(x, target, weight, states, totals, beside, numbers, dx):
        w_total = weight.sum(dtype=weight.dtype) if weighted and smooth else None
        local, m, ls, dy, dlse, own = share(x, target, (weight, w_total, states, totals, *beside), numbers[0])
        write(Given(x, dx, local, weight, None, w_total), (m, ls, dy, None, dlse), numbers[1])
        if put is not None:
            put(dx, target, local, own)

    return call


def _prepare_launch(
    kernel: Any, given: OfShard, tensors: dict, values: dict, numbers: tuple[str, ...], totals: int = 1
) -> Launched:
    device, n_rows = given.x.get_device(), len(given.x)
    spec = LossShardSpec(
        block_rows=_ROWS, block_cols=1, pieces=1, vector=1, cast_dtype=TLDTYPES[given.x.dtype], ptx=has_ptx(device),
        **given.loss.kind(), totals=totals,
    )  # fmt: skip
    shards = given.shards
    values = {
        "n_rows": n_rows, "n_cols": shards.held, "first": shards.first, "n_classes": shards.n_classes,
        **given.loss.values(), **values,
    }  # fmt: skip
    return prepare(
        kernel, None, spec, tensors, values, device=device, numbers=numbers, programs=lambda plan: -(-n_rows // _ROWS),
        num_warps=4,
    )  # fmt: skip


def _prepare_say(given: OfShard, beside: tuple) -> Call:
    """call(x, target, beside, numbers) -> the message [numbers * n], and the header behind it, if there is one."""
    from fused_softmax.ops.losses.kernels.over_ranks import _say

    x, loss, empty = given.x, given.loss, allocator(given.x.device)
    n = _numbers_of(loss) * len(x)
    n += 0 if beside[-1] is None else len(beside[-1])
    names = ("x", "target", "weight", "w_total", "m", "ls", "loss", "entropy", "predicted", "header", "said")
    arranged = x, given.target, *beside, empty((n,), (1,), torch.float32)
    run = _prepare_launch(_say, given, dict(zip(names, arranged, strict=True)), {}, ("factor", "cap")).__call__
    picked = losses.picked_of(arranged)

    def call(x, target, beside, numbers):
        said = empty((n,), (1,), torch.float32)
        run(*picked((x, target, *beside, said)), numbers.factor, numbers.cap)
        return said

    return call


def prepare_merge(
    given: OfShard, heard: Tensor, headers: Tensor | None, notice: Tensor | None, ranks: int, lse: bool
) -> Call:
    """call(heard, headers, notice, target, numbers) -> (states, lse, loss, z, counted, entropy, best)

    states: of whole rows: m, ls, and where the call needs them the target's weight and W [.., n]. counted: with class
    weights, what a row adds to the divisors of the mean of losses and of that of z-losses [2, n]. What is not asked for
    is None.
    heard: the messages of all ranks; of whole rows, one that stands for all. headers: those that messages should have.
    notice: where headers that differ are written. lse: whether it is wanted.
    """
    from fused_softmax.ops.losses.kernels.over_ranks import _merge

    loss, empty, n_rows = given.loss, allocator(given.x.device), len(given.x)
    counts, z_loss, stats = loss.mean and loss.weight is not None, loss.lse_square_scale != 0, loss.stats
    n_states, of_row, dtype = 2 + (loss.weight is not None) + loss.smooth, ((n_rows,), (1,)), torch.float32

    def made():
        return (
            empty((n_states, n_rows), (n_rows, 1), dtype), empty(*of_row, dtype) if lse else None,
            empty(*of_row, dtype), empty(*of_row, dtype) if z_loss else None,
            empty((2, n_rows), (n_rows, 1), dtype) if counts else None,
            empty(*of_row, dtype) if stats else None, empty(*of_row, torch.int64) if stats else None,
        )  # fmt: skip

    names = ("heard", "headers", "notice", "target", "states", "lse", "loss", "z", "counted", "entropy", "best")
    arranged = heard, headers, notice, given.target, *made()
    values = {"ranks": ranks, "length": heard.numel() // ranks}
    tensors = dict(zip(names, arranged, strict=True))
    run, picked = _prepare_launch(_merge, given, tensors, values, _NUMBERS).__call__, losses.picked_of(arranged)

    def call(heard, headers, notice, target, numbers):
        found = made()
        run(*picked((heard, headers, notice, target, *found)), numbers.smoothing, numbers.lse_square_scale)
        return found

    return call


def _shares_maker(given: OfShard) -> Callable[[], tuple[Any, ...]]:
    """What allocates targets, m, ls, dy and dlse of rows, and, with smoothing, what stands at targets."""
    of_row, dtype = ((len(given.x),), (1,)), torch.float32
    empty, smooth = allocator(given.x.device), given.loss.smooth

    def made():
        return (
            empty(*of_row, torch.int64), empty(*of_row, dtype), empty(*of_row, dtype), empty(*of_row, dtype),
            empty(*of_row, dtype), empty(*of_row, dtype) if smooth else None,
        )  # fmt: skip

    return made


def _prepare_share(given: OfShard, tensors: tuple) -> Call:
    """call(x, target, tensors, numbers) -> (targets, m, ls, dy, dlse, what stands at targets or None)"""
    from fused_softmax.ops.losses.kernels.over_ranks import _share

    x, made = given.x, _shares_maker(given)
    names = (
        "x", "target", "weight", "w_total", "states", "totals", "dy", "dz", "dlse", "local", "of_m", "of_ls", "of_dy",
        "of_dlse", "own",
    )  # fmt: skip
    arranged = x, given.target, *tensors, *made()
    steps = {
        f"d{name}_step": 0 if each is None or each.ndim == 0 else 1
        for name, each in zip("yz", tensors[4:6], strict=True)
    }
    by_name = dict(zip(names, arranged, strict=True))
    parts = 1 if tensors[3] is None else tensors[3].shape[1]
    run = _prepare_launch(_share, given, by_name, steps, READ_NUMBERS, parts).__call__
    picked = losses.picked_of(arranged)

    def call(x, target, tensors, numbers):
        found = made()
        run(*picked((x, target, *tensors, *found)), *read_numbers(numbers))
        return found

    return call


def _prepare_put(given: OfShard, dx: Tensor, local: Tensor, own: Tensor) -> Call:
    """call(dx, target, local, own)"""
    from fused_softmax.ops.losses.kernels.over_ranks import _put

    tensors = {"dx": dx, "target": given.target, "local": local, "own": own}
    return _prepare_launch(_put, given, tensors, {}, ()).__call__
