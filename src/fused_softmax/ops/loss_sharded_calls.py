"""Losses of a shard by kernels: beside the launches that read and write its logits, a few of the numbers of rows.

By torch's operations these numbers take more than a hundred launches, and 2 ms of the CPU's time. What they are,
`cross_entropy_sharded` says, which has the same by torch's operations.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_softmax.calls import Prepared, allocator, find, keep
from fused_softmax.distributed import Shards, exchange, headers_of
from fused_softmax.kernels.loss_sharded import _merge, _put, _say, _share
from fused_softmax.kernels.loss_sharded_spec import LossShardSpec, numbers_of
from fused_softmax.ops import cross_entropy_calls as losses
from fused_softmax.options import Loss
from fused_softmax.route import runs_here
from fused_softmax.runner import TLDTYPES, Run, has_ptx, prepare

ELSEWHERE = -100  # kernels/loss_sharded.py
_ROWS = 128  # of a program
_NUMBERS = ("smoothing", "lse_square_scale")


class OfShard(NamedTuple):
    """x: [n, held], without padding, its columns contiguous. target: [n]. loss: its weight [held]."""

    x: Tensor
    target: Tensor
    loss: Loss
    shards: Shards

    @property
    def options(self) -> tuple:
        """What launches depend on, beside tensors."""
        shards = self.shards
        return *self.loss.kind().values(), self.loss.ignore_index, shards.rank, shards.sizes, shards.n_classes


class Merged(NamedTuple):
    """Of whole rows: m, ls, and as far as asked for the target's weight and W [.., n]; losses, and statistics.

    counted: what a row counts in the mean of losses, and in that of z-losses [2, n].
    """

    states: Tensor
    lse: Tensor
    loss: Tensor
    z: Tensor | None
    counted: Tensor | None
    entropy: Tensor | None
    best_at: Tensor | None


def takes(x: Tensor, target: Tensor, loss: Loss) -> bool:
    """Whether kernels make the losses; for fp64 numbers have 64 bits, and torch's operations make them.

    By what is the same on all ranks, those without columns too: only by one way do all get the same bits.
    """
    return len(x) > 0 and loss.scale != 0 and x.dtype != torch.float64 and runs_here(x, target)


def own_loss(loss: Loss) -> Loss:
    """What of a loss is each row's own: its logits and class weights."""
    return Loss(loss.weight, ELSEWHERE, "none", 0.0, loss.softcap, loss.scale)


def told(given: OfShard) -> tuple[Tensor, Tensor | None]:
    """(what all ranks say [ranks, ..], the headers that should stand there), after one read of the shard."""
    x, shards = given.x, given.shards
    gathers = len(shards.sizes) > 1 and shards.by_peers is None
    like = torch.empty((), dtype=torch.float32, device=x.device)
    headers = headers_of(shards, len(x), like) if gathers else None
    said = _said(given, None if headers is None else headers.there[shards.rank])
    if len(shards.sizes) == 1:
        return said.view(1, -1), None
    if shards.by_peers is not None:
        return shards.by_peers(said.view(-1, len(x)), shards), None
    return exchange(said, shards, headers), None if headers is None else headers.there


def _numbers_of(loss: Loss) -> int:
    """Of a row in a message."""
    return numbers_of(weighted=loss.weight is not None, smooth=loss.smooth, stats=loss.stats)


def _said(given: OfShard, header: Tensor | None) -> Tensor:
    """The message of a shard, which is read for it, one number of all rows after the other; and the header."""
    x, target, loss, shards = given
    if not shards.held:
        said = torch.zeros(_numbers_of(loss), len(x), dtype=torch.float32, device=x.device)
        said[:2] = -torch.inf
        return said.view(-1) if header is None else torch.cat((said.view(-1), header))
    own, of_all = own_loss(loss), target
    if loss.smooth:  # the loss of a target of all classes alike is (W lse - sum_c w_c z_c) / C
        own, of_all = replace(own, label_smoothing=1.0), torch.zeros_like(target)
    rows = losses.forward(x, of_all, replace(own, stats=loss.stats))
    of_smooth = (own.weight_total(), rows.loss) if loss.smooth else (None, None)
    beside = loss.weight, of_smooth[0], rows.m, rows.ls, of_smooth[1], rows.entropy, rows.predicted, header
    call = find("what a shard says", given.options, x, target, *beside)
    if call is None:
        call = keep(_prepare_say(given, beside), "what a shard says", given.options, x, target, *beside)
    return call(x, target, beside, loss.numbers())


def merged(given: OfShard, heard: Tensor, headers: Tensor | None) -> Merged:
    """heard: what each rank says; of whole rows, what stands for all of them. headers: which should stand there."""
    _, target, loss, _ = given
    call = find("merged losses", given.options, heard, target, headers)
    if call is None:
        call = keep(_prepare_merge(given, heard, headers), "merged losses", given.options, heard, target, headers)
    return call(heard, target, headers, loss.numbers())


def gradient(
    given: OfShard, states: Tensor, totals: Tensor | None, beside: tuple[Tensor | None, ...], dx: Tensor
) -> None:
    """Write dx [n, held], which may be x. totals: what a mean divides losses and z-losses by [2, 1].

    beside: the gradients of loss, z-loss and lse, each of one value or one a row.
    """
    x, target, loss, shards = given
    if not shards.held:
        return
    beside = tuple(each if each is None or each.ndim == 0 else each.contiguous() for each in beside)
    w_total = loss.weight_total()
    tensors = loss.weight, w_total, states, totals, *beside
    call = find("shares of a shard", given.options, x, target, *tensors)
    if call is None:
        call = keep(_prepare_share(given, tensors), "shares of a shard", given.options, x, target, *tensors)
    local, (m, ls, dy, dlse), own = call(x, target, tensors, loss.numbers())
    of_rows = replace(own_loss(loss), label_smoothing=1.0) if loss.smooth else own_loss(loss)
    losses.backward(x, local, m, ls, of_rows, dy=dy, dlse=dlse, dx=dx)
    if own is not None:
        put = find("gradients of targets", given.options, dx, target)
        if put is None:
            put = keep(_prepare_put(given, dx, local, own), "gradients of targets", given.options, dx, target)
        put(dx, target, local, own)


def _prepare_launch(kernel: Any, given: OfShard, tensors: dict, values: dict, numbers: tuple[str, ...]) -> Run:
    device, n_rows = given.x.get_device(), len(given.x)
    spec = LossShardSpec(
        block_rows=_ROWS, block_cols=1, pieces=1, vector=1, cast_dtype=TLDTYPES[given.x.dtype], ptx=has_ptx(device),
        **given.loss.kind(),
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


def _prepare_say(given: OfShard, beside: tuple) -> Prepared:
    """call(x, target, beside, numbers) -> the message [numbers * n], and the header behind it, if there is one."""
    x, loss, empty = given.x, given.loss, allocator(given.x.device)
    n = _numbers_of(loss) * len(x)
    n += 0 if beside[-1] is None else len(beside[-1])
    names = ("x", "target", "weight", "w_total", "m", "ls", "loss", "entropy", "predicted", "header", "said")
    arranged = x, given.target, *beside, empty((n,), (1,), torch.float32)
    run = _prepare_launch(_say, given, dict(zip(names, arranged, strict=True)), {}, ("factor", "cap")).__call__
    picked = losses.picked_of(arranged)

    def call(x, target, beside, numbers):
        said = empty((n,), (1,), torch.float32)
        run(*picked((x, target, *beside, said)), numbers[0], numbers[2])
        return said

    return Prepared(call)


def _prepare_merge(given: OfShard, heard: Tensor, headers: Tensor | None) -> Prepared:
    """call(heard, target, headers, numbers) -> Merged"""
    loss, empty, n_rows = given.loss, allocator(given.x.device), len(given.x)
    n_states, of_row, dtype = 2 + (loss.weight is not None) + loss.smooth, ((n_rows,), (1,)), torch.float32

    def made() -> Merged:
        return Merged(
            empty((n_states, n_rows), (n_rows, 1), dtype), empty(*of_row, dtype), empty(*of_row, dtype),
            empty(*of_row, dtype) if loss.lse_square_scale else None,
            empty((2, n_rows), (n_rows, 1), dtype) if loss.mean else None,
            empty(*of_row, dtype) if loss.stats else None, empty(*of_row, torch.int64) if loss.stats else None,
        )  # fmt: skip

    names = ("heard", "headers", "target", "states", "lse", "loss", "z", "counted", "entropy", "best")
    arranged = heard, headers, given.target, *made()
    values = {"ranks": len(heard), "length": heard.numel() // len(heard)}
    tensors = dict(zip(names, arranged, strict=True))
    run, picked = _prepare_launch(_merge, given, tensors, values, _NUMBERS).__call__, losses.picked_of(arranged)

    def call(heard, target, headers, numbers):
        found = made()
        run(*picked((heard, headers, target, *found)), *numbers[3:])
        return found

    return Prepared(call)


def _prepare_share(given: OfShard, tensors: tuple) -> Prepared:
    """call(x, target, tensors, numbers) -> (targets, [4, n] of m, ls, dy and dlse, what stands at targets or None)"""
    x, loss, empty, n_rows = given.x, given.loss, allocator(given.x.device), len(given.x)

    def made():
        return (
            empty((n_rows,), (1,), torch.int64), empty((4, n_rows), (n_rows, 1), torch.float32),
            empty((n_rows,), (1,), torch.float32) if loss.smooth else None,
        )  # fmt: skip

    names = (
        "x", "target", "weight", "w_total", "states", "totals", "dy", "dz", "dlse", "local", "rows", "own"
    )  # fmt: skip
    arranged = x, given.target, *tensors, *made()
    steps = {
        f"d{name}_step": 0 if each is None or each.ndim == 0 else 1
        for name, each in zip("yz", tensors[4:6], strict=True)
    }
    by_name = dict(zip(names, arranged, strict=True))
    run = _prepare_launch(_share, given, by_name, steps, ("factor", "cap", *_NUMBERS)).__call__
    picked = losses.picked_of(arranged)

    def call(x, target, tensors, numbers):
        found = made()
        run(*picked((x, target, *tensors, *found)), numbers[0], *numbers[2:])
        return found[0], found[1].unbind(), found[2]

    return Prepared(call)


def _prepare_put(given: OfShard, dx: Tensor, local: Tensor, own: Tensor) -> Prepared:
    """call(dx, target, local, own)"""
    return Prepared(
        _prepare_launch(_put, given, {"dx": dx, "target": given.target, "local": local, "own": own}, {}, ()).__call__
    )
