"""Launches of the kernels of segments: softmax, log_softmax and logsumexp, and their gradients, two launches each."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_softmax.core import launch
from fused_softmax.core.device import device_of
from fused_softmax.core.runner import TLDTYPES, has_ptx, overlapping, overlaps
from fused_softmax.ops.segments.kernels.spec import SegmentSpec
from fused_softmax.ops.segments.plan import FINISHING_WARPS, plan_segments


class Cut(NamedTuple):
    """Which elements each segment has.

    offsets: [n_segments + 1], int32 or int64. order: [n], int32 or int64, the elements in the order of their segments;
    None if they lie in this order. With an order, the last segment has the elements that are in none.
    """

    offsets: Tensor
    order: Tensor | None

    @property
    def n_results(self) -> int:
        """Segments that have a result."""
        return len(self.offsets) - 1 - (self.order is not None)


class Given(NamedTuple):
    """What the kernels read and write, contiguous. x: the input, or in the gradient of softmax the result.

    dy: of the result's elements. lse, dlse: of segments. out: of elements.
    """

    x: Tensor
    dy: Tensor | None = None
    out: Tensor | None = None
    lse: Tensor | None = None
    dlse: Tensor | None = None


def refused(input: Tensor, dtype: torch.dtype) -> str:
    """Why the kernels do not take an input for a result of this dtype; "" if they do."""
    both = {input.dtype, dtype}
    if torch.float64 in both:
        return "kernels of segments compute in float32, and float64 is asked for"
    return "" if both <= {*TLDTYPES} else f"there are no kernels of segments for {input.dtype}"


def forward(name: str, input: Tensor, cut: Cut, dim: int, scale: float | None, dtype: torch.dtype) -> Tensor:
    """The function `name` of input [..., n, ...], with its dtype."""
    if name == "segment_logsumexp":
        shape = *input.shape[:dim], cut.n_results, *input.shape[dim + 1 :]
        y = torch.empty(shape, dtype=dtype, device=input.device)
        given = Given(input.contiguous(), lse=y)
    else:
        y = torch.empty(input.shape, dtype=dtype, device=input.device)
        given = Given(input.contiguous(), out=y)
    _run(name, given, cut, dim, scale, dtype)
    return y


def backward(name: str, dy: Tensor, y: Tensor, cut: Cut, dim: int, scale: float | None, dtype: torch.dtype) -> Tensor:
    """The gradient of the input of segment_softmax or segment_log_softmax, in a dtype, by the result y."""
    dx = torch.empty(y.shape, dtype=dtype, device=y.device)
    _run(name, Given(y.contiguous(), dy.contiguous(), dx), cut, dim, scale, y.dtype, backward=True)
    return dx


def lse_backward(dlse: Tensor, input: Tensor, lse: Tensor, cut: Cut, dim: int, scale: float | None) -> Tensor:
    """The gradient of the input of segment_logsumexp."""
    dx = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    given = Given(input.contiguous(), out=dx, lse=lse.contiguous(), dlse=dlse.contiguous())
    _run("segment_logsumexp", given, cut, dim, scale, lse.dtype, backward=True)
    return dx


def _run(
    name: str, given: Given, cut: Cut, dim: int, scale: float | None, cast_dtype: torch.dtype, backward: bool = False
) -> None:
    from fused_softmax.ops.segments.kernels.bunches import _compute, _finish

    x, index = given.x, given.x.get_device()
    n, n_segments = x.shape[dim], len(cut.offsets) - 1
    outer, inner = prod(x.shape[:dim]), prod(x.shape[dim + 1 :])
    if not outer * inner * n_segments:
        return
    ordered = cut.order is not None
    plan = plan_segments(n, n_segments, outer, inner, x.element_size(), device_of(index), ordered=ordered)
    early = overlaps(index)
    spec = SegmentSpec(
        segments=plan.segments, singles=plan.singles, pieces=plan.pieces, deep=plan.deep, wide=plan.wide,
        cols=plan.cols, range_deep=plan.range_deep, range_wide=plan.range_wide, cast_dtype=TLDTYPES[cast_dtype],
        one_block=plan.cols == inner, whole=inner % plan.cols == 0, many=outer > 1, log=name == "segment_log_softmax",
        lse=name == "segment_logsumexp", backward=backward, ordered=ordered, nowhere=ordered,
        scaled=scale is not None, ptx=has_ptx(index),
    )  # fmt: skip
    n_slots = plan.n_groups * plan.n_blocks * 2
    slots = torch.empty(2 * n_slots * plan.cols if spec.sums else 0, dtype=torch.float32, device=x.device)
    hubs = torch.empty(n_slots, dtype=torch.int64, device=x.device)
    sound = torch.empty(plan.n_bunches, dtype=torch.bool, device=x.device)
    tensors = cut.offsets, cut.order, *given, slots, hubs, sound
    scalars = (
        n, n_segments, inner, plan.n_groups, plan.n_bunches, plan.n_blocks, plan.n_menders, plan.block,
        1.0 if scale is None else float(scale),
    )  # fmt: skip
    capped = {"maxnreg": plan.registers} if spec.ptx and plan.registers else {}
    there = [each for each in tensors if each is not None]
    finishing = replace(
        spec, segments=1, singles=False, pieces=1, deep=1, wide=1, range_wide=plan.finishing_wide, follows=early
    )

    def preparing(kernel: Any, programs: int, num_warps: int, spec: SegmentSpec, **options: bool) -> Callable[[], Any]:
        return partial(
            launch.prepare, kernel, plan.n_groups * programs, tensors, scalars, {"K": spec}, device=index,
            num_warps=num_warps, plan=plan, **capped, **options,
        )  # fmt: skip

    for each in launch.together(
        preparing(_compute, plan.n_bunches + plan.n_blocks, plan.num_warps, replace(spec, leads=early)),
        preparing(_finish, plan.n_finishers, FINISHING_WARPS, finishing, **overlapping(early)),
    ):
        each(*there)
