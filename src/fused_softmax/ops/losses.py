"""What a call says of its losses, and what a sum or mean of them takes: the targets' totals, and the sum itself."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_softmax import launch
from fused_softmax.losswise import per_row

_COUNTED = 2048  # targets that a program counts at a time
_FINISHED = 65536  # values that one program sums
_LEAST, _GREATEST = 2.0**-126, float(torch.finfo(torch.float32).max)  # of fp32, and normal


@dataclass(frozen=True)
class Loss:
    """What a call says of its losses, beside logits and targets.

    weight: [n_classes] of the dtype of the arithmetic, or None. stats: whether entropy and top-1 are wanted too.
    """

    weight: Tensor | None = None
    ignore_index: int = -100
    mean: bool = False
    label_smoothing: float = 0.0
    softcap: float | None = None
    scale: float = 1.0
    lse_square_scale: float = 0.0
    stats: bool = False

    @cached_property
    def kind(self):
        """What the launches of a call depend on."""
        weight = None if self.weight is None else self.weight.data_ptr() % 16
        return (
            weight, self.ignore_index, self.mean, self.label_smoothing, self.softcap, self.scale, self.lse_square_scale,
            self.stats,
        )  # fmt: skip

    @property
    def constexprs(self):
        return {
            "WEIGHTED": self.weight is not None, "SMOOTH": self.label_smoothing > 0,
            "SCALED": self.scale != 1.0 or self.softcap is not None, "CAPPED": self.softcap is not None,
        }  # fmt: skip

    @property
    def scalars(self):
        # A kernel's number has 32 bits, where another is 0 or infinite: -inf times 0 would be NaN.
        scale = math.copysign(min(max(abs(self.scale), _LEAST), _GREATEST), self.scale)
        softcap = min(max(self.softcap or 1.0, _LEAST), _GREATEST)
        return (
            self.ignore_index, scale, float("-inf") if self.scale >= 0 else float("inf"),
            softcap, float(self.label_smoothing), float(self.lse_square_scale),
        )  # fmt: skip

    def numbers(self, x: Tensor) -> Tensor | None:
        """The numbers among the scalars in fp64, where the logits have it: a kernel's own have 32 bits."""
        if x.dtype != torch.float64:
            return None
        numbers = (self.scale, self.softcap or 1.0, self.label_smoothing, self.lse_square_scale)
        return torch.stack([torch.full((), number, dtype=x.dtype, device=x.device) for number in numbers])

    def weight_total(self, n_classes: int) -> Tensor | None:
        return self.weight.sum(dtype=self.weight.dtype) if self.weight is not None and self.label_smoothing else None


class Rows(NamedTuple):
    """Of every row: m and ls = log s, whose sum is lse; its loss, in parts to be added; its z-loss; its statistics."""

    m: Tensor
    ls: Tensor
    loss: Tensor
    z: Tensor | None
    entropy: Tensor | None = None
    predicted: Tensor | None = None


def arithmetic_of(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def totals_of(target: Tensor, loss: Loss, n_classes: int, dtype: torch.dtype) -> Tensor:
    """[2, parts]: of every part of the targets, the weights and the number of those that count."""
    n_rows = target.numel()
    parts = next(parts for parts in (1, 16, 128) if n_rows <= parts * _COUNTED or parts == 128)
    totals = torch.empty(2, parts, dtype=dtype, device=target.device)
    run = launch.prepare(
        _totals, parts, (target, loss.weight, totals), (n_rows, -(-n_rows // parts), n_classes, loss.ignore_index),
        {"BLOCK": _COUNTED, "WEIGHTED": loss.weight is not None}, device=target.get_device(), num_warps=8,
    )  # fmt: skip
    run(*[each for each in (target, loss.weight, totals) if each is not None])
    return totals


def finish(rows: Rows, totals: Tensor | None, loss: Loss, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The sum or mean of all losses, and that of the z-losses in it."""
    values, z = rows.loss, rows.z
    if values.numel() > _FINISHED:
        values = values.sum().view(1)
        z = None if z is None else z.sum().view(1)
    result = torch.empty(2, dtype=dtype, device=values.device)
    given = (values, z, totals, result)
    run = launch.prepare(
        _finish, 1, given, (values.numel(), 0 if z is None else z.numel()),
        {
            "BLOCK": 8192, "ZLOSS": z is not None, "MEAN": loss.mean,
            "TOTALS": 1 if totals is None else totals.shape[1],
        }, device=values.get_device(), num_warps=16,
    )  # fmt: skip
    run(*there(given))
    return result[0], result[1] if rows.z is not None else None


def there(tensors):
    return [each for each in tensors if each is not None]


@triton.jit(do_not_specialize=["n_rows", "part_rows", "n_classes", "ignore_index"])
def _totals(
    target_ptr, weight_ptr, totals_ptr, n_rows, part_rows, n_classes, ignore_index,
    BLOCK: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """The weights and the number of the targets that count, of one part of them."""
    part = tl.program_id(0)
    start = part.to(tl.int64) * part_rows
    dtype: tl.constexpr = totals_ptr.dtype.element_ty
    weights = tl.zeros([BLOCK], dtype)
    counts = tl.zeros([BLOCK], dtype)
    for at in range(start, tl.minimum(start + part_rows, n_rows), BLOCK):
        row = at + tl.arange(0, BLOCK)
        t = tl.load(target_ptr + row, mask=row < tl.minimum(start + part_rows, n_rows), other=0).to(tl.int64)
        on = (row < tl.minimum(start + part_rows, n_rows)) & (t != ignore_index)
        counts += on.to(dtype)
        if WEIGHTED:
            weights += tl.load(weight_ptr + t, mask=on & (t >= 0) & (t < n_classes), other=0.0)
    n = tl.sum(counts, axis=0)
    tl.store(totals_ptr + part, tl.sum(weights, axis=0) if WEIGHTED else n)
    tl.store(totals_ptr + tl.num_programs(0) + part, n)


@triton.jit(do_not_specialize=["n_losses", "n_z"])
def _finish(
    loss_ptr, z_ptr, totals_ptr, result_ptr, n_losses, n_z,
    BLOCK: tl.constexpr, ZLOSS: tl.constexpr, MEAN: tl.constexpr, TOTALS: tl.constexpr,
):  # fmt: skip
    g, g_z = per_row(totals_ptr, TOTALS, MEAN)
    total = tl.zeros([BLOCK], loss_ptr.dtype.element_ty)
    for at in range(0, n_losses, BLOCK):
        j = at + tl.arange(0, BLOCK)
        total += tl.load(loss_ptr + j, mask=j < n_losses, other=0.0)
    result = tl.sum(total, axis=0) * g
    if ZLOSS:
        total = tl.zeros([BLOCK], loss_ptr.dtype.element_ty)
        for at in range(0, n_z, BLOCK):
            j = at + tl.arange(0, BLOCK)
            total += tl.load(z_ptr + j, mask=j < n_z, other=0.0)
        z = tl.sum(total, axis=0) * g_z
        tl.store(result_ptr + 1, z)
        result += z
    tl.store(result_ptr, result)
