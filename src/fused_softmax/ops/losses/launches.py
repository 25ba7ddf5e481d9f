"""Prepared calls of the losses of rows of logits and their gradient: the plan, the kernel, allocations and launches.

Traffic: the losses alone read the logits once (MN); if rows are few, many programs share each. Together with the
gradient they read once and write once (2MN); rows that the chip cannot hold are read a second time.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fused_softmax.core import workspace
from fused_softmax.core.calls import allocator, kept
from fused_softmax.core.checks import arithmetic_of
from fused_softmax.core.device import device_of
from fused_softmax.core.launch import together
from fused_softmax.core.launched import Launched, compose
from fused_softmax.core.layout import alignment_alone, alignment_of, rows_alone
from fused_softmax.core.plan import RowPlan, plan_loss, plan_reduction
from fused_softmax.core.runner import overlaps, prepare, spec_of
from fused_softmax.ops.losses.kernels.spec import LossSpec
from fused_softmax.ops.losses.options import LOSS_NUMBERS, READ_NUMBERS, Loss, read_numbers

WHOLE = (32, 256, 1024)  # rows up to which one launch writes the whole loss, and each program counts as many targets


class LossRows(NamedTuple):
    """Of every row: m and ls = log s, whose sum is lse; its loss; its z-loss; its statistics.

    A loss may be in parts that are to be added: loss is [n] or [n, parts].
    """

    m: Tensor | None
    ls: Tensor | None
    loss: Tensor
    z: Tensor | None = None
    entropy: Tensor | None = None
    predicted: Tensor | None = None
    result: Tensor | None = None  # of all rows, where one launch has summed them


class Given(NamedTuple):
    """The tensors of one call, as kernels take them; weight, w_total and numbers are in the arithmetic's dtype."""

    x: Tensor
    dx: Tensor | None
    target: Tensor
    weight: Tensor | None = None
    totals: Tensor | None = None
    w_total: Tensor | None = None
    numbers: Tensor | None = None


def given_of(x: Tensor, dx: Tensor | None, target: Tensor, loss: Loss, totals: Tensor | None) -> Given:
    return Given(x, dx, target, loss.weight, totals, loss.weight_total(), loss.exact_numbers(x))


def forward(
    x: Tensor, target: Tensor, loss: Loss, totals: Tensor | None = None, dx: Tensor | None = None,
    plan: RowPlan | None = None, dtype: torch.dtype | None = None, *, states: bool = True,
) -> LossRows:  # fmt: skip
    """The losses of rows x [n_rows, n_classes], columns contiguous, by targets [n_rows], contiguous.

    dx: where to write the gradient of their sum, or of their mean, if the totals that it needs are given. dtype: of the
    losses; that of the arithmetic if None. states: whether m and ls are wanted.
    """
    given = given_of(x, dx, target, loss, totals)
    if plan is not None:
        return prepare_losses(given, loss, plan, dtype, states)(given, loss.numbers)
    parts = None if totals is None else totals.shape[1]
    over = dx is not None and dx.data_ptr() == x.data_ptr()
    options = *loss.key, parts, over, dtype, states
    tensors = x, target, dx, loss.weight
    call = kept("losses", options, tensors, prepare_losses, given, loss, None, dtype, states)
    return call(given, loss.numbers)


def prepare_losses(
    given: Given, loss: Loss, plan: RowPlan | None = None, dtype: torch.dtype | None = None, states: bool = True,
    result_dtype: torch.dtype | None = None, follows: bool = False,
) -> Launched:  # fmt: skip
    """What runs the kernels on tensors like these: call(given, numbers) -> LossRows. dx is written too if it is given.

    result_dtype: of the result, if the same launch writes it, as for a loss that `is_whole`. follows: whether the
    totals come from the launch right before, which began as usual.
    """
    x, dx = given.x, given.dx
    plan = plan_forward(x, dx, loss) if plan is None else plan
    held = dx is not None and plan.strategy in ("row", "split")
    if plan.strategy == "tile" or held:
        return _held(given, loss, plan, dtype, states, result_dtype, follows)
    return _online(given, loss, plan, dtype, states or dx is not None)


def is_whole(plan: RowPlan, dx: Tensor | None, loss: Loss) -> bool:
    """Whether one launch counts the targets, writes losses and gradient, and sums the losses. plan: `plan_forward`.

    Only few rows have such a launch. If rows are to have the same bits in any batch, none have.
    """
    if loss.batch_invariant or dx is None or loss.reduction == "none" or loss.stats or loss.lse_square_scale:
        return False
    return plan.n_rows <= WHOLE[-1] and plan.strategy in ("row", "split")


def plan_forward(x: Tensor, dx: Tensor | None, loss: Loss) -> RowPlan:
    """The planner's choice for rows [n_rows, n_classes] that come from `rows_for`."""
    itemsize = arithmetic_of(x).itemsize if loss.softcap is not None else x.element_size()
    alone = loss.batch_invariant
    lies, gpu = alignment_alone if alone else alignment_of, device_of(x.get_device())
    planned, (n_rows, n_classes) = partial(plan_reduction, merges=True) if dx is None else plan_loss, x.shape
    alignment = lies(x) if dx is None else lies(x, dx)
    return planned(n_rows, n_classes, itemsize, gpu, alignment=alignment, batch_invariant=alone)


def _spec(x: Tensor, plan: RowPlan, loss: Loss, **fields: Any) -> LossSpec:
    return spec_of(LossSpec, plan, x.dtype, x.get_device(), itemsize=x.element_size(), **loss.kind(), **fields)


def _held(given: Given, loss: Loss, plan: RowPlan, dtype, states, result_dtype, follows) -> Launched:
    """The launch for rows that registers hold until their gradient is written, or that are short."""
    from fused_softmax.ops.losses.kernels.held import _part_loss, _tile_loss

    x, dx, tile = given.x, given.dx, plan.strategy == "tile"
    gradient = {} if dx is None else {
        "gradient": True, "inplace": dx.data_ptr() == x.data_ptr(),
        "totals": 1 if given.totals is None else given.totals.shape[1],
        "follows": follows and overlaps(x.get_device()),
    }  # fmt: skip
    spec = _spec(x, plan, loss, crowds=not tile, **gradient)
    if dx is None:
        spec = replace(spec, mean=False)
    if not tile:
        spec = replace(spec, stats=False)
    if result_dtype:
        spec = replace(spec, finishes=True, counted=counted_by_each(plan.n_rows) if loss.mean else 0)
    parts = plan.parts if loss.smooth and not tile else 1
    rows_of = _rows_maker(x, dtype, loss, states, parts, with_stats=tile, result_dtype=result_dtype)
    rows = rows_of(plan.n_rows)
    names = (*Given._fields, *LossRows._fields)
    tensors = dict(zip(names, (*given, *rows), strict=True))
    device = x.get_device()
    tensors["ticket"] = None if result_dtype is None else ticket_of(device)
    values = loss.values() | ({"dx_row_stride": x.stride(0)} if dx is None else {})
    kernel = _tile_loss if tile else _part_loss
    picked = picked_of((*given, *rows))

    def plan_alike(n):
        counts_alike = not result_dtype or counted_by_each(n) == counted_by_each(plan.n_rows)
        return plan.for_rows(n) if counts_alike else None

    def build(n, launch):
        def call(given, numbers):
            rows = rows_of(n)
            ticket = () if result_dtype is None else (ticket_of(device),)
            launch(*picked((*given, *rows)), *ticket, *numbers)
            return rows

        return call

    launched = prepare(
        kernel, plan, spec, tensors, values, device=device, numbers=LOSS_NUMBERS, plan_for=plan_alike,
        besides=_besides(plan, loss, alone=result_dtype is None),
    )  # fmt: skip
    return compose(build, launched, n=plan.n_rows, like=partial(rows_of, plan.n_rows), by_row=True)


def _besides(plan: RowPlan, loss: Loss, *, alone: bool) -> int:
    """Registers of a thread besides those that hold a row, as compiled. alone: whether another launch sums losses."""
    besides, caps = 20 if alone and plan.itemsize > 2 else 32, loss.softcap is not None
    if plan.alignment == "shifted" and not caps:
        besides += 8
    return besides + 34 * loss.smooth + 14 * caps + 28 * (loss.smooth and caps)


def counted_by_each(n_rows: int) -> int:
    """Targets that each program of a whole loss counts at most; 0 if they are too many."""
    return next((most for most in WHOLE if n_rows <= most), 0)


def ticket_of(device: int) -> Tensor:
    return workspace.ticket(device) if device >= 0 else torch.zeros(1, dtype=torch.int64, device="cpu")


def _rows_maker(
    x: Tensor, dtype, loss: Loss, states: bool, parts: int, with_stats: bool, result_dtype: torch.dtype | None = None
) -> Callable[[int], LossRows]:
    arithmetic, empty = arithmetic_of(x), allocator(x.device)
    dtype, z_loss, stats = dtype or arithmetic, loss.lse_square_scale != 0, loss.stats and with_stats

    def rows_of(n):
        of_row = (n,), (1,)
        return LossRows(
            empty(*of_row, arithmetic) if states else None,
            empty(*of_row, arithmetic) if states else None,
            empty(*of_row, dtype) if parts == 1 else empty((n, parts), (parts, 1), dtype),
            empty(*of_row, arithmetic) if z_loss else None,
            empty(*of_row, arithmetic) if stats else None,
            empty(*of_row, torch.int64) if stats else None,
            None if result_dtype is None else empty((), (), result_dtype),
        )

    return rows_of


def picked_of(tensors):
    """A function that takes from tensors like these those that are not None."""
    places = [i for i, each in enumerate(tensors) if each is not None]
    return itemgetter(*places)


def _online(given: Given, loss: Loss, plan: RowPlan, dtype, states) -> Launched:
    """Losses tile by tile, from the merged states of a row's parts. A gradient takes a second read."""
    from fused_softmax.ops.losses.kernels.online import _merge_losses, _online_loss

    x, device, parts, stats = given.x, given.x.get_device(), plan.parts, loss.stats
    arithmetic, empty = arithmetic_of(x), allocator(x.device)
    spec = replace(
        _spec(x, plan, loss), split=False, lanes=1, copies=1, poll_last_first=False, axis=1, full_pieces=0, mean=False
    )
    rows_of = _rows_maker(x, dtype, loss, states, 1, with_stats=True)

    def states_of(n):
        if parts == 1:
            return None, None
        of_parts = empty((4, n, parts), (n * parts, parts, 1), arithmetic)
        return of_parts, empty((n, parts), (parts, 1), torch.int32) if stats else None

    def arranged(given, states, rows):
        return given.x, given.target, given.weight, given.w_total, given.numbers, *states, *rows

    names = ("x", "target", "weight", "w_total", "numbers", "states", "found", *LossRows._fields)
    tensors = dict(zip(names, arranged(given, states_of(plan.n_rows), rows_of(plan.n_rows)), strict=True))
    options: dict[str, Any] = {"device": device, "numbers": LOSS_NUMBERS}
    preparing = [partial(prepare, _online_loss, plan, spec, tensors, loss.values(), **options)]
    if parts > 1:
        lanes = triton.next_power_of_2(parts)
        block = max(1, min(16, 1024 // lanes))
        merging = replace(spec, block_rows=block, lanes=lanes, block_cols=1, pieces=1, vector=1, shifted=False)
        programs = partial(blocks_of, block)
        preparing.append(
            partial(
                prepare, _merge_losses, plan, merging, tensors, loss.values(), programs=programs, num_warps=4, **options
            )
        )  # fmt: skip
    picked = picked_of(tuple(tensors.values()))
    bare = replace(loss, weight=None)  # a call that is kept holds no tensor

    def build(n, *launches):
        def call(given, numbers):
            rows = rows_of(n)
            arguments = picked(arranged(given, states_of(n), rows))
            for each in launches:
                each(*arguments, *numbers)
            if given.dx is not None:
                _second_read(given, rows, bare, numbers)
            return rows

        return call

    return compose(build, *together(*preparing), n=plan.n_rows, like=partial(rows_of, plan.n_rows), by_row=True)


def with_whole_rows(x: Tensor) -> Tensor:
    """Rows as kernels read them, with contiguous columns."""
    return x if x.shape[1] <= 1 or x.stride(1) == 1 else x.contiguous()


def rows_for(x: Tensor, loss: Loss) -> Tensor:
    """Rows as a loss takes them: `rows_alone` if a row is to have the same bits in any batch."""
    rows = with_whole_rows(x)
    return rows_alone(rows) if loss.batch_invariant and rows.numel() else rows


def blocks_of(block: int, plan: RowPlan) -> int:
    """How many programs there are, with so many rows each."""
    return -(-plan.n_rows // block)


def backward(
    x: Tensor, target: Tensor, m: Tensor, ls: Tensor, loss: Loss, *, totals: Tensor | None = None,
    dy: Tensor | None = None, dz: Tensor | None = None, dlse: Tensor | None = None, dx: Tensor | None = None,
    plan: RowPlan | None = None,
) -> Tensor:  # fmt: skip
    """dx of rows x [n_rows, n_classes], from m and ls [n_rows] of `forward`.

    dy: the factor of each row's loss in the result, one value or one a row; all 1 if None. dz: the same of its z-loss;
    dy if None. dlse: the gradient of each row's lse. With loss.mean, dy and dz are divided by the totals.
    """
    if not x.numel():
        return torch.empty(x.shape, dtype=x.dtype, device=x.device) if dx is None else dx
    dtype = arithmetic_of(x)
    dy, dz, dlse = (None if each is None else each.to(dtype).contiguous() for each in (dy, dz, dlse))
    given = given_of(x, dx, target, loss, totals)
    beside = m, ls, dy, dz, dlse
    if plan is not None:
        return prepare_gradient(given, beside, loss, plan)(given, beside, loss.numbers)
    return _gradient_call(given, beside, loss)(given, beside, loss.numbers)


def _gradient_call(given: Given, beside: tuple, loss: Loss) -> Callable[..., Tensor]:
    """What `prepare_gradient` gives, found or kept."""
    tensors = given.x, given.target, given.dx, given.weight, *beside[2:]
    return kept(*gradient_key(loss, given.totals), tensors, prepare_gradient, given, beside, loss)


def gradient_key(loss: Loss, totals: Tensor | None) -> tuple[str, tuple]:
    """The name and options of a kept gradient."""
    return "loss_gradient", (*loss.key, None if totals is None else totals.shape[1])


def prepare_gradient(given: Given, beside: tuple, loss: Loss, plan: RowPlan | None = None) -> Launched:
    """What writes the gradient: call(given, (m, ls, dy, dz, dlse), numbers) -> dx, which is new if it is not given."""
    from fused_softmax.ops.losses.kernels.gradient import _gradient

    x, totals, writes, empty = given.x, given.totals, given.dx is not None, allocator(given.x.device)
    device, dtype, (n_rows, n_classes) = x.get_device(), x.dtype, x.shape
    dx = given.dx if given.dx is not None else empty((n_rows, n_classes), (n_classes, 1), dtype)
    if plan is None:
        plan = plan_reduction(
            n_rows, n_classes, x.element_size(), device_of(device), alignment=alignment_of(x, dx), writes=True,
            capped=loss.softcap is not None,
        )  # fmt: skip
    spec = _spec(x, plan, replace(loss, stats=False, lse_square_scale=0.0))
    spec = replace(spec, tile=True, axis=1, full_pieces=0, ptx=False, totals=1 if totals is None else totals.shape[1])
    names = (*Given._fields, "m", "ls", "dy", "dz", "dlse")
    arranged = (*given._replace(dx=dx), *beside)
    steps = [0 if each is None or each.numel() == 1 else 1 for each in beside[2:4]]
    values = loss.values() | {"dy_step": steps[0], "dz_step": steps[1]}
    tensors = dict(zip(names, arranged, strict=True))
    picked = picked_of(arranged)

    def build(n, launch):
        def call(given, beside, numbers):
            dx = given.dx if writes else empty((n, n_classes), (n_classes, 1), dtype)
            launch(*picked((given.x, dx, *given[2:], *beside)), *read_numbers(numbers))
            return dx

        return call

    launched = prepare(_gradient, plan, spec, tensors, values, device=device, numbers=READ_NUMBERS)
    return compose(build, launched, n=plan.n_rows, by_row=True)


def _second_read(given: Given, rows: LossRows, loss: Loss, numbers) -> None:
    """The gradient of rows that the chip cannot hold, from their states."""
    beside = rows.m, rows.ls, None, None, None
    _gradient_call(given, beside, replace(loss, weight=given.weight))(given, beside, numbers)
