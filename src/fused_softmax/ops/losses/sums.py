"""What a loss needs over all rows: targets are counted, losses are added, a gradient is multiplied.

Traffic: 8 bytes a target and 4 a loss; a gradient is read and written once more unless its factor is 1.
"""

from functools import partial

import torch
from torch import Tensor

from fused_softmax.core import launch
from fused_softmax.core.calls import allocator, kept
from fused_softmax.core.device import device_of
from fused_softmax.core.launched import Launched, compose, of_rows
from fused_softmax.core.runner import TLDTYPES, overlapping, overlaps
from fused_softmax.ops.losses.kernels.spec import LossSpec
from fused_softmax.ops.losses.launches import LossRows, picked_of, ticket_of
from fused_softmax.ops.losses.options import Loss

_COUNTED = 2048  # targets that a program counts at a time
_ADDED = 8192  # values that one program adds; more are added by _ADDERS
_ADDERS = 64
_MULTIPLIED = 4096  # elements that a program multiplies at a time
_MULTIPLIERS = 8  # programs a multiprocessor


def totals_of(target: Tensor, loss: Loss, n_classes: int, dtype: torch.dtype) -> Tensor:
    """[2, parts]: for every part of the targets, the sum of weights and the number of targets that count."""
    options, tensors = (loss.ignore_index, n_classes, dtype), (target, loss.weight)
    return kept("totals", options, tensors, prepare_totals, target, loss, n_classes, dtype)(*tensors)


def prepare_totals(target: Tensor, loss: Loss, n_classes: int, dtype: torch.dtype) -> Launched:
    """What counts targets like these: call(target, weight) -> totals."""
    from fused_softmax.ops.losses.kernels.gradient import _totals

    n_rows, empty = target.numel(), allocator(target.device)
    parts = totals_parts(n_rows)
    totals = empty((2, parts), (parts, 1), dtype)
    counting = launch.prepare(
        _totals, parts, (target, loss.weight, totals), (n_rows, -(-n_rows // parts), n_classes, loss.ignore_index),
        {"BLOCK": _COUNTED, "LEADS": overlaps(target.get_device())}, device=target.get_device(), num_warps=8,
    )  # fmt: skip

    def for_targets(n):
        return counting.again(parts, {0: n, 1: -(-n // parts)}) if totals_parts(n) == parts else None

    def build(_, launch):
        def call(target, weight):
            totals = empty((2, parts), (parts, 1), dtype)
            launch(*((target, totals) if weight is None else (target, weight, totals)))
            return totals

        return call

    return compose(
        build, of_rows(counting, for_targets, n_rows), n=n_rows, like=partial(empty, (2, parts), (parts, 1), dtype)
    )


def totals_parts(n_rows: int) -> int:
    return next(parts for parts in (1, 16, 128) if n_rows <= parts * _COUNTED or parts == 128)


def finish(rows: LossRows, totals: Tensor | None, loss: Loss, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The sum or mean of all losses, and of the z-losses in it."""
    values, z = rows.loss, rows.z
    summed = LossRows(None, None, values, z), totals, None, loss, 0, dtype
    call = kept("finish", (loss.mean, dtype), (values, z, totals), prepare_finish, *summed)
    return call(values, z, totals, None, None)


def counts_targets(target: Tensor, mean: bool, gradient: bool) -> bool:
    """Whether the launch that sums losses also counts their targets, which no gradient has needed before."""
    return mean and not gradient and target.numel() <= _COUNTED


def prepare_finish(
    rows: LossRows, totals: Tensor | None, target: Tensor | None, loss: Loss, n_classes: int, dtype: torch.dtype
) -> Launched:
    """What sums losses like these: call(values, z, totals, target, weight) -> (sum or mean, that of the z-losses).

    target: to be counted for a mean, instead of totals.
    """
    from fused_softmax.ops.losses.kernels.gradient import _finish

    values, z = rows.loss, rows.z
    weight = None if target is None else loss.weight
    empty, device, summed = allocator(values.device), values.get_device(), values.dtype
    many, with_z, counts = values.numel() > _ADDED, z is not None, target is not None
    spec = LossSpec(
        block_cols=1, pieces=1, vector=1, cast_dtype=TLDTYPES[values.dtype], mean=loss.mean and not counts,
        totals=1 if totals is None else totals.shape[1], finishes=many, lanes=_ADDERS if many else 1,
        follows=overlaps(device),
    )  # fmt: skip

    def written():
        parts = empty((2, _ADDERS), (_ADDERS, 1), summed) if many else None
        ticket = ticket_of(device) if many else None
        return empty((), (), dtype), empty((), (), dtype) if with_z else None, parts, ticket

    arranged = (values, z, totals, target, weight, *written())
    sizes = values.numel(), 0 if z is None else z.numel(), 0 if target is None else target.numel(), n_classes
    block = _COUNTED if counts else _ADDED // 2 if many else _ADDED
    summing = launch.prepare(
        _finish, spec.lanes, arranged, (*sizes, loss.ignore_index), {"K": spec, "BLOCK": block}, device=device,
        num_warps=8 if many else 16, **overlapping(spec.follows),
    )  # fmt: skip
    picked, per_row = picked_of(arranged), values.numel() // max(values.shape[0], 1)

    def for_losses(n):
        if (n * per_row > _ADDED) != many or (counts and n > _COUNTED):
            return None
        return summing.again(spec.lanes, {0: n * per_row, 1: n if with_z else 0, 2: n if counts else 0})

    def build(_, launch):
        def call(values, z, totals, target, weight):
            outputs = written()
            launch(*picked((values, z, totals, target, weight, *outputs)))
            return outputs[:2]

        return call

    n = max(values.shape[0], 1)
    return compose(build, of_rows(summing, for_losses, n), n=n, by_row=True)


def left_out_of(target: Tensor, loss: Loss, dlse: Tensor | None = None) -> Tensor:
    """Which rows [n] have no part in a gradient: ignored rows whose lse has no incoming gradient."""
    ignored = target.long() == loss.ignore_index
    return ignored if dlse is None else ignored & (dlse == 0)


def of_counted(dy: Tensor, left_out: Tensor) -> Tensor:
    """The gradient of a sum or mean; 0 if all rows are left out.

    A division by how many rows count then makes it inf, and inf times the gradient of 0 would be NaN.
    """
    return dy.masked_fill(left_out.all(), 0.0)


def multiply(dx: Tensor, factor: Tensor) -> Tensor:
    """dx times a factor of one element, in place; where that is 1 and dx is contiguous, nothing is read."""
    kept("multiply", None, (dx, factor), prepare_multiply, dx, factor)(dx, factor)
    return dx


def prepare_multiply(dx: Tensor, factor: Tensor) -> Launched:
    """What multiplies in place: call(dx, factor)."""
    from fused_softmax.ops.losses.kernels.gradient import _multiply

    if not dx.is_contiguous():  # logits whose rows lie apart, and are overwritten
        return compose(lambda _: _multiply_apart, n=len(dx))
    sm_count, per_row = device_of(dx.get_device()).sm_count, dx.numel() // max(dx.shape[0], 1)

    def programs_of(n):
        return min(-(-n // _MULTIPLIED), _MULTIPLIERS * sm_count)

    n = dx.numel()
    multiplying = launch.prepare(
        _multiply, programs_of(n), (dx, factor), (n, programs_of(n)), {"BLOCK": _MULTIPLIED},
        device=dx.get_device(), num_warps=8,
    )  # fmt: skip

    def for_rows(n_rows):
        n = n_rows * per_row
        return multiplying.again(programs_of(n), {0: n, 1: programs_of(n)})

    return of_rows(multiplying, for_rows, max(dx.shape[0], 1))


def _multiply_apart(dx: Tensor, factor: Tensor) -> None:
    # By data, because the version of logits counts others' writes. A number of one dim, because without dims its dtype
    # would be dx's, which may not hold it.
    dx.data.mul_(factor.view(1))
