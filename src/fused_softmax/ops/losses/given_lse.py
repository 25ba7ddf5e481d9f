"""Prepared losses of rows whose log-sum-exp is given: a short launch that reads only the targets' logits."""

from operator import itemgetter

import torch
from torch import Tensor

from fused_softmax.core import launch
from fused_softmax.core.calls import allocator, kept
from fused_softmax.core.checks import arithmetic_of
from fused_softmax.core.launched import Launched, compose, of_rows
from fused_softmax.core.runner import TLDTYPES, has_ptx
from fused_softmax.ops.losses.kernels.spec import LossSpec
from fused_softmax.ops.losses.launches import Given, LossRows, given_of
from fused_softmax.ops.losses.options import Loss

_ROWS = 128  # of a program


def lse_of_rows(lse: Tensor, x: Tensor) -> Tensor:
    """An lse in the targets' shape as kernels take it: a constant [n_rows], in the dtype of the arithmetic."""
    return lse.detach().reshape(-1).to(arithmetic_of(x)).contiguous()


def forward_given_lse(x: Tensor, target: Tensor, lse: Tensor, loss: Loss, dtype: torch.dtype | None) -> LossRows:
    """The losses of rows x [n_rows, n_classes] by targets [n_rows] and lse [n_rows].

    m is lse, and there is no ls. dtype: of the losses; that of the arithmetic if None.
    """
    given = given_of(x, None, target, loss, None)
    options = *loss.key, dtype
    tensors = x, target, loss.weight, lse
    call = kept("losses_given_lse", options, tensors, prepare_given_lse, given, lse, loss, dtype)
    return call(given, loss.numbers, lse)


def prepare_given_lse(given: Given, lse: Tensor, loss: Loss, dtype: torch.dtype | None) -> Launched:
    """What runs the kernel on tensors like these: call(given, numbers, lse) -> LossRows."""
    from fused_softmax.ops.losses.kernels.online import _loss_given_lse

    x, device = given.x, given.x.get_device()
    n_rows, n_classes = x.shape
    dtype, empty = dtype or arithmetic_of(x), allocator(x.device)

    def rows_of(n, lse):
        return LossRows(lse, None, empty((n,), (1,), dtype))

    def arranged(given, lse, losses):
        return given.x, given.target, given.weight, given.numbers, lse, losses

    spec = LossSpec(
        block_rows=_ROWS, block_cols=1, pieces=1, vector=1, cast_dtype=TLDTYPES[x.dtype], ptx=has_ptx(device),
        **loss.kind() | {"mean": False},
    )  # fmt: skip
    numbers = loss.numbers
    tensors = arranged(given, lse, rows_of(n_rows, lse).loss)
    scalars = x.stride(0), n_rows, n_classes, loss.ignore_index, numbers.factor, numbers.cap
    reading = launch.prepare(
        _loss_given_lse, -(-n_rows // _ROWS), tensors, scalars, {"K": spec}, device=device, num_warps=4, numbers=(4, 5)
    )
    picked = itemgetter(*[i for i, each in enumerate(tensors) if each is not None])

    def build(n, launch):
        def call(given, numbers, lse):
            rows = rows_of(n, lse)
            launch(*picked(arranged(given, lse, rows.loss)), numbers.factor, numbers.cap)
            return rows

        return call

    launched = of_rows(reading, lambda n: reading.again(-(-n // _ROWS), {1: n}), n_rows)
    return compose(build, launched, n=n_rows, like=lambda: rows_of(n_rows, None), by_row=True)
