"""Prepared calls of logsumexp and its gradient: the plan, the kernel, allocations and copies."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from fused_softmax.core.calls import Prepared, allocator, bump_version, contiguous_strides, find, keep
from fused_softmax.core.checks import sized
from fused_softmax.core.device import device_of
from fused_softmax.core.kernels.spec import ScoreSpec
from fused_softmax.core.layout import (
    alignment_of,
    as_rows,
    columns_of,
    held_bytes,
    overlap,
    overlap_like,
    rows_to_write,
    sizes_of,
)
from fused_softmax.core.plan import COLUMN_POSITIONS, RowPlan, plan_for, plan_reduction
from fused_softmax.core.runner import READ, Run, format_of, prepare, spec_of
from fused_softmax.ops.softmax.calls import leading_of
from fused_softmax.ops.softmax.kernels.columns import _column_logsumexp
from fused_softmax.ops.softmax.kernels.logsumexp import _logsumexp_backward, _part_logsumexp, _tile_logsumexp
from fused_softmax.ops.softmax.launches import run_columns
from fused_softmax.ops.softmax.plan import ColumnPlan
from fused_softmax.ops.softmax.scores import PLAIN, Scores, kind_of_scale, scores_against, supplied, supplier


def forward(
    input: Tensor, dims: tuple[int, ...], keepdim: bool, out: Tensor | None = None, scores: Scores = PLAIN,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """logsumexp on the kernels, with no gradient and no checks: what registered operators and stand-ins run."""
    if not scores.plain or dtype not in (None, input.dtype):
        prepared = prepare_call(input, dims, keepdim, out, scores, dtype)
        return prepared.call(input, out, scores.scale, scores.mask, scores.sink)
    call = find("logsumexp_forward", (dims, keepdim), input, out)
    if call is None:
        prepared = prepare_call(input, dims, keepdim, out, PLAIN)
        call = keep(prepared, "logsumexp_forward", (dims, keepdim), input, out)
    return call(input, out, None, None)


def prepare_call(
    input: Tensor, dims: tuple[int, ...], keepdim: bool, out: Tensor | None, scores: Scores,
    dtype: torch.dtype | None = None,
) -> Prepared:  # fmt: skip
    """The forward for tensors like these: call(input, out, scale, mask, sink) -> lse. dims: as torch takes them.

    dtype: what the input is rounded to as it is read, and of the result; the input's own unless told.
    """
    dtype = dtype or input.dtype
    # No plan has fewer bytes than its states.
    if dtype == torch.float64 != input.dtype or input.dtype not in READ:
        inner = prepare_call(input.to(dtype), dims, keepdim, out, scores).call
        return Prepared(lambda input, out, scale, mask, sink=None: inner(input.to(dtype), out, scale, mask, sink))
    # On "meta" torch finds fault with dims, and says the shape.
    like = torch.empty_like(input, device="meta", requires_grad=False)
    shape = tuple(torch.logsumexp(like, dims[0] if len(dims) == 1 else dims, keepdim).shape)
    dims = tuple(d % input.ndim for d in dims)
    read = input, *scores.tensors
    if out is not None and (
        out.dtype != dtype
        or tuple(out.shape) != shape
        or not out.is_contiguous()
        or any(overlap(each, out) for each in read)  # of a row that is written, another may still be unread
    ):
        inner = prepare_call(input, dims, keepdim, None, scores, dtype).call
        return Prepared(
            lambda input, out, scale, mask, sink=None: sized(out, shape).copy_(inner(input, None, scale, mask, sink))
        )
    empty, strides = allocator(input.device), contiguous_strides(shape)
    result = empty(shape, strides, dtype) if out is None else out
    overlaps = None if out is None else overlap_like(out, input, scores.scale, scores.mask, scores.sink)
    if scores.plain and (run := _over_columns(input, result, dims)) is not None:
        return _made(run.__call__, dtype, shape, input.device, None, overlaps)

    against = scores.along(dims[-1], tuple(input.shape)).exact(dtype, input.device)
    source = rows_last(input, dims)
    (rows,), (copies,) = as_rows(source)
    copies |= source.data_ptr() != input.data_ptr()
    plan = plan_forward(rows, against)
    run = prepare_forward(rows, result, plan, scores=against, shape=tuple(source.shape))
    layout = scores_against(against, tuple(source.shape))
    supply = supplier(scores, layout, dims[-1], dtype, input)
    if copies:
        launch = run.__call__

        def launch_on_copy(x, lse, *scored):
            launch(rows_last(x, dims).contiguous(), lse, *scored)

        return _made(launch_on_copy, dtype, shape, input.device, supply, overlaps)
    made = _made(run.__call__, dtype, shape, input.device, supply, overlaps)
    leads = input.ndim > 1 and 0 not in dims and out is None and not layout.copied
    by_query = scores.is_causal and input.ndim == 2
    if not leads or by_query:
        return made
    input_shape, device = tuple(input.shape), input.device
    leading = leading_of(layout, input.shape[0])

    def again(n):
        other = plan_for(plan, n * (plan.n_rows // input_shape[0]))
        found = other and run.again(other, leading(n))
        if not found:
            return None
        return _made(found.__call__, dtype, (n, *shape[1:]), device, supply).call

    return made._replace(again=again)


def _made(launch, dtype, shape, device, supply=None, overlaps=None) -> Prepared:
    """Into a new tensor; or with `overlaps`, which tells of an out whether it overlaps what is read, into that."""
    strides, empty = contiguous_strides(shape), allocator(device)

    def call(input, out, scale, mask, sink=None):
        result = empty(shape, strides, dtype)
        if supply is None:
            launch(input, result)
        else:
            launch(input, result, *supplied(supply, scale, mask, sink))
        return result

    if overlaps is None:
        return Prepared(call)

    def into(input, out, scale, mask, sink=None):
        if overlaps(out, input, scale, mask, sink):
            return out.copy_(call(input, None, scale, mask, sink))
        launch(input, out, *supplied(supply, scale, mask, sink))
        if not out.is_inference():
            bump_version((out,))  # autograd sees no write of a kernel's
        return out

    return Prepared(into)


def _over_columns(x: Tensor, lse: Tensor, dims: tuple[int, ...]) -> Run | None:
    """What reduces neighbouring strided dims of x as they lie; None where they are no such dims."""
    first, end = min(dims), max(dims) + 1
    if end - first != len(dims):
        return None
    try:
        x = x.view(*x.shape[:first], math.prod(x.shape[first:end]), *x.shape[end:])
    except RuntimeError:  # no one stride describes them
        return None
    columns = columns_of(first, x, lse.view(*x.shape[:first], 1, *x.shape[first + 1 :]))
    return None if columns is None else prepare_columns(columns[0], lse.view(-1, 1, columns[0].shape[-1]))


def prepare_columns(x: Tensor, lse: Tensor, *, plan: ColumnPlan | None = None) -> Run | None:
    """What reduces views [n_outer, n_cols, n_inner] to lse [n_outer, 1, n_inner]; None where no plan holds them."""
    how = {"positions": COLUMN_POSITIONS, "holds": False}
    return run_columns(_column_logsumexp, {"x": x}, {"lse": lse}, lse.dtype, how, plan)


def rows_last(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """x with `dims` moved last and made one."""
    moved = x.movedim(dims, tuple(range(-len(dims), 0)))
    return moved if len(dims) == 1 else moved.flatten(-len(dims))


def plan_forward(x: Tensor, scores: Scores = PLAIN) -> RowPlan:
    """The planner's choice for rows x [n_rows, n_cols]."""
    itemsize = max(held_bytes(x), 4 if scores.added else 0)
    n_rows, n_cols = sizes_of(x)
    return plan_reduction(n_rows, n_cols, itemsize, device_of(x.get_device()), alignment=alignment_of(x))


def prepare_forward(
    x: Tensor, lse: Tensor, plan: RowPlan | None = None, *, scores: Scores = PLAIN, shape: tuple[int, ...] | None = None
) -> Run:
    """What reduces rows x [n_rows, n_cols] into lse, contiguous: run(x, lse, mask, scale, sink), less None.

    x: as `layout.rows_of` has it, here and below. It is rounded to lse's dtype as it is read.
    shape: the input's own, against which mask, scale and sink broadcast; x's unless told. A scale that is a number
    comes last, with each run. A sink is a tensor (`Scores.exact`).
    """
    plan = plan_forward(x, scores) if plan is None else plan
    layout = scores_against(scores, shape or tuple(x.shape))
    device = x.get_device()
    kind = {name: value for name, value in layout.kind.items() if name != "zero_masked_rows"}
    spec = spec_of(ScoreSpec, plan, lse.dtype, device, itemsize=x.element_size(), **kind, **format_of(x))
    # The bodies of short odd rows that are one piece keep their layout beside edges that are loaded after them.
    spec = replace(spec, full_pieces=0, edges_first=spec.tile and spec.shifted and plan.pieces > 1)
    tensors = {"x": x, "lse": lse, "mask": layout.mask, "scale": layout.scale, "sink": layout.sink}
    numbers = ("scale",) if isinstance(scores.scale, float) else ()
    kernel = _tile_logsumexp
    if plan.strategy != "tile":
        kernel, spec = _part_logsumexp, replace(spec, axis=1, prefetch=spec.prefetch and plan.prefetch > 0)
    return prepare(kernel, plan, spec, tensors, layout.values, device=device, numbers=numbers)


def backward(
    x: Tensor, lse: Tensor, dlse: Tensor, dims: tuple[int, ...], *, scores: Scores = PLAIN,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """exp(z - lse) * dlse of x's shape, in `dtype` or x's: the gradient of the scores z.

    A sink is no part of it: lse counts it already.
    """
    dtype = dtype or x.dtype
    options = dims, dtype, scores.is_causal, scores.masked_rows
    others = lse, dlse, kind_of_scale(scores.scale), scores.mask
    call = find("logsumexp_backward", options, x, *others)
    if call is None:
        prepared = prepare_backward_call(x, lse, dlse, dims, scores, dtype)
        call = keep(prepared, "logsumexp_backward", options, x, *others)
    return call(x, lse, dlse, scores.scale, scores.mask)


def prepare_backward_call(x, lse, dlse, dims, scores, dtype) -> Prepared:
    """The gradient for tensors like these: call(x, lse, dlse, scale, mask) -> dz."""
    against = scores.along(dims[-1], tuple(x.shape)).exact(x.dtype, x.device)
    source = rows_last(x, dims)
    moved_shape, device = tuple(source.shape), x.device
    (rows,), (copies,) = as_rows(source)
    copies |= source.data_ptr() != x.data_ptr()
    in_place = len(dims) == 1 and dims[0] == x.ndim - 1
    result = torch.empty(moved_shape, dtype=dtype, device=device)
    dx = rows_to_write(result)
    plan = plan_backward(rows, dx, against)
    run = prepare_backward(rows, lse.contiguous(), dlse.contiguous(), dx, plan, scores=against, shape=moved_shape)
    layout = scores_against(against, moved_shape)
    supply = supplier(scores, layout, dims[-1], x.dtype, x)
    ends, sizes = tuple(range(-len(dims), 0)), [x.shape[d] for d in dims]

    def made(launch, shape):
        def call(x, lse, dlse, scale, mask):
            dz = torch.empty(shape, dtype=dtype, device=device)
            rows = rows_last(x, dims).contiguous() if copies else x
            launch(rows, lse.contiguous(), dlse.contiguous(), dz, *supplied(supply, scale, mask))
            if in_place:
                return dz
            return (dz if len(dims) == 1 else dz.unflatten(-1, sizes)).movedim(ends, dims)

        return call

    def again(n):
        other = plan_for(plan, n * (plan.n_rows // moved_shape[0]))
        found = other and run.again(other, leading(n))
        return made(found.__call__, (n, *moved_shape[1:])) if found else None

    by_query = scores.is_causal and x.ndim == 2
    leads = x.ndim > 1 and in_place and not copies and not layout.copied and not by_query
    leading = leading_of(layout, moved_shape[0]) if leads else lambda n: {}
    return Prepared(made(run.__call__, moved_shape), again if leads else None)


def plan_backward(x: Tensor, dx: Tensor, scores: Scores = PLAIN) -> RowPlan:
    """The planner's choice for rows x and dx [n_rows, n_cols]."""
    itemsize = max(x.element_size(), 4 if scores.added else 0)
    n_rows, n_cols = sizes_of(x)
    gpu = device_of(x.get_device())
    return plan_reduction(n_rows, n_cols, itemsize, gpu, alignment=alignment_of(x, dx), writes=True)


def prepare_backward(
    x: Tensor, lse: Tensor, dlse: Tensor, dx: Tensor, plan: RowPlan | None = None, *, scores: Scores = PLAIN,
    shape: tuple[int, ...] | None = None,
) -> Run:  # fmt: skip
    """What writes exp(z - lse) * dlse of rows [n_rows, n_cols]: run(x, lse, dlse, dx, mask, scale), less None."""
    device = x.get_device()
    plan = plan_backward(x, dx, scores) if plan is None else plan
    layout = scores_against(scores, shape or tuple(x.shape))
    kind = layout.kind | {"greedy": False, "hides": scores.hides}
    spec = spec_of(ScoreSpec, plan, x.dtype, device, itemsize=x.element_size(), **kind)
    spec = replace(spec, tile=True, axis=1, full_pieces=0, ptx=False, edges_first=False)
    tensors = {"x": x, "lse": lse, "dlse": dlse, "dx": dx, "mask": layout.mask, "scale": layout.scale}
    numbers = ("scale",) if isinstance(scores.scale, float) else ()
    return prepare(_logsumexp_backward, plan, spec, tensors, layout.values, device=device, numbers=numbers)
