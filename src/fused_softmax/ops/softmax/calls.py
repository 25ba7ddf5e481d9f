"""Prepared calls of softmax, log_softmax and their gradients: allocations, copies and launches.

The tensors at hand decide once between rows and columns, whether the result is written where it lies, and which tensors
are copied. The prepared call does the same for any tensors like these, and decides nothing.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fused_softmax.core.calls import Prepared, allocator, bump_version, contiguous_strides, find, keep
from fused_softmax.core.layout import (
    as_rows,
    column_dims,
    columns_of,
    is_rows,
    last,
    overlap,
    overlap_like,
    rows_of,
    rows_to_write,
)
from fused_softmax.core.plan import RowPlan, plan_for
from fused_softmax.core.route import INTERPRET
from fused_softmax.core.runner import READ
from fused_softmax.ops.softmax.launches import (
    keep_first_max,
    plan_backward,
    plan_forward,
    prepare_backward,
    prepare_columns,
    prepare_columns_backward,
    prepare_forward,
)
from fused_softmax.ops.softmax.scores import (
    MASK,
    PLAIN,
    SCALE,
    SINK,
    ScoreLayout,
    Scores,
    scores_against,
    scores_against_columns,
    supplied,
    supplier,
)


def forward(log: bool, input: Tensor, dim: int, dtype: torch.dtype, out: Tensor | None = None, scores: Scores = PLAIN):
    """(log_)softmax on the kernels, with no gradient and no checks: what registered operators and stand-ins run."""
    name = "log_softmax_forward" if log else "softmax_forward"
    if not scores.plain:
        prepared = prepare_call(log, input, dim, dtype, out, scores)
        return prepared.call(input, out, scores.scale, scores.mask, scores.sink)
    others = () if out is None else (out,)
    call = find(name, (dim, dtype), input, *others)
    if call is None:
        call = keep(prepare_call(log, input, dim, dtype, out, PLAIN), name, (dim, dtype), input, *others)
    return call(input, out, None, None)


def backward(dy: Tensor, y: Tensor, dim: int, dtype: torch.dtype, log: bool, hides: bool, factor: float) -> Tensor:
    """dx in `dtype`, times a factor; contiguous as y is. hides: elements that were masked have no gradient."""
    name, options = backward_key(log, dim, dtype, hides, factor != 1)
    call = find(name, options, y, dy)
    if call is None:
        call = keep(prepare_backward_call(log, dy, y, dim, dtype, hides, factor != 1), name, options, y, dy)
    return call(dy, y, factor)


def backward_into(dy: Tensor, y: Tensor, out: Tensor, dim: int, log: bool) -> Tensor:
    """The gradient of a plain call, written into out, which is of y's shape and overlaps neither dy nor y."""
    name = "log_softmax_backward_out" if log else "softmax_backward_out"
    call = find(name, dim, y, dy, out)
    if call is None:
        call = keep(_prepare_backward_into(log, dy, y, out, dim), name, dim, y, dy, out)
    return call(dy, y, out)


def _prepare_backward_into(log: bool, dy: Tensor, y: Tensor, out: Tensor, dim: int) -> Prepared:
    moved = [last(each, dim) for each in (dy, y, out)]
    rows = rows_of(*moved[:2]) if y.numel() and is_rows(moved[2]) else None
    if rows is None:
        inner = prepare_backward_call(log, dy, y, dim, out.dtype, False, False).call
        return Prepared(lambda dy, y, out: out.copy_(inner(dy, y, 1.0)))
    dy_rows, y_rows = rows
    launch = prepare_backward(dy_rows, y_rows, rows_to_write(moved[2]), log=log).__call__

    def call(dy, y, out):
        launch(dy, y, out)
        return out

    return Prepared(call)


def backward_key(log: bool, dim: int, dtype: torch.dtype, hides: bool, scaled: bool) -> tuple[str, tuple]:
    """Under what `backward` keeps its calls."""
    return "log_softmax_backward" if log else "softmax_backward", (dim, dtype, hides, scaled)


def forward_by_plan(
    x: Tensor, plan: RowPlan | None = None, *, y: Tensor | None = None, log: bool = False, scores: Scores = PLAIN
) -> Tensor:
    """(log_)softmax over the last dim of x [..., n_cols] by a plan for the whole of x, or the planner's.

    y: of x's shape, its rows contiguous; a new contiguous tensor of x's dtype if None.
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if y is None else y
    if x.numel():
        ((x_rows,), _), y_rows = as_rows(x), rows_to_write(y)
        against = scores.exact(y.dtype, x.device)
        plan = plan or plan_forward(x_rows, y_rows, against)
        scored = scores_against(against, tuple(x.shape)).tensors
        number = (against.number,) if isinstance(against.scale, float) else ()
        run = prepare_forward(x_rows, y_rows, plan, log=log, scores=against, shape=tuple(x.shape))
        run(x_rows, y_rows, *scored, *number)
        if plan.strategy == "stream" and against.greedy:
            keep_first_max(x, y, log, scores)
    return y


def backward_by_plan(
    dy: Tensor, y: Tensor, dx: Tensor, plan: RowPlan | None = None, *, log: bool = False, hides: bool = False,
    factor: float = 1.0,
) -> Tensor:  # fmt: skip
    """The gradient over the last dim into dx, its rows contiguous, by a plan, or the planner's."""
    if y.numel():
        ((dy_rows, y_rows), _), dx_rows = as_rows(dy, y), rows_to_write(dx)
        run = prepare_backward(dy_rows, y_rows, dx_rows, plan, log=log, hides=hides, scaled=factor != 1)
        run(dy_rows, y_rows, dx_rows, *((factor,) if factor != 1 else ()))
    return dx


def prepare_call(
    log: bool, input: Tensor, dim: int, dtype: torch.dtype, out: Tensor | None, scores: Scores
) -> Prepared:
    """The forward for tensors like these: call(input, out, scale, mask, sink) -> result."""
    if input.dtype not in READ or _by_torch(input.dtype, dtype):
        inner = prepare_call(log, input.to(dtype), dim, dtype, out, scores).call
        return Prepared(
            lambda input, out, scale, mask, sink=None: inner(input.to(dtype), out, scale, mask, sink)
        )  # fmt: skip
    if not input.numel():
        return Prepared(
            lambda input, out, scale, mask, sink=None: torch.empty_like(input, dtype=dtype) if out is None else out
        )
    read = input, *scores.tensors
    if out is not None and any(overlap(each, out) for each in read):  # of a row that is written, another may be unread
        return _copied_into(prepare_call(log, input, dim, dtype, None, scores))
    if input.ndim:
        prepared = _over_columns(log, input, dim, dtype, out, scores)
        if prepared is not None:
            return prepared
    return _over_rows(log, input, dim, dtype, out, scores)


def _by_torch(given: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether torch rounds a tensor: Triton's interpreter takes fp64 to bf16 as if that were an integer."""
    return INTERPRET and given == torch.float64 and wanted == torch.bfloat16


def _over_columns(log, input, dim, dtype, out, scores) -> Prepared | None:
    """Along a strided dim as it lies, or None where the tensors have rows, or scores that take them, or need a copy."""
    shape, strides, empty = tuple(input.shape), contiguous_strides(input.shape), allocator(input.device)
    result = empty(shape, strides, dtype) if out is None else out
    columns = columns_of(dim, input, result)
    if columns is None or (columns[0].ndim > 3 and not scores.plain):
        return None
    layout = scores_against_columns(scores.exact(dtype, input.device), shape, dim, column_dims(dim, input, result))
    run = None if layout is None else prepare_columns(*columns, log=log, layout=layout)
    if layout is None or run is None:
        return None
    supply = supplier(scores, layout, dim, dtype, input)
    if out is not None:
        return _written(run.__call__, log, dim, dtype, scores, input, out, supply)
    return _direct(run, input, dtype, strides, supply)


def _over_rows(log, input, dim, dtype, out, scores) -> Prepared:
    source = last(input, dim)
    (rows,), (copies,) = as_rows(source)
    whole, strides, empty = tuple(input.shape), contiguous_strides(input.shape), allocator(input.device)
    result = empty(whole, strides, dtype) if out is None else out
    in_place = is_rows(last(result, dim))
    if out is not None and (copies or not in_place):
        return _copied_into(_over_rows(log, input, dim, dtype, None, scores))

    shape = tuple(source.shape)
    against = (scores.along(dim, input.shape) if input.ndim else scores).exact(dtype, input.device)
    target = last(result, dim) if in_place else torch.empty(shape, dtype=dtype, device=input.device)
    y_rows = rows_to_write(target)
    plan = plan_forward(rows, y_rows, against)
    run = prepare_forward(rows, y_rows, plan, log=log, scores=against, shape=shape)
    layout = scores_against(against, shape)
    supply = supplier(scores, layout, dim, dtype, input)
    if plan.strategy == "stream" and against.greedy:
        write = _first_max_after(run.__call__, supply, log, dim, dtype, scores)
        if out is None:
            return Prepared(lambda input, out, *given: write(input, empty(whole, strides, dtype), *given))
        return _written(write, log, dim, dtype, scores, input, out, lambda *given: given)
    if out is not None:
        return _written(run.__call__, log, dim, dtype, scores, input, out, supply)
    if copies or not in_place:
        return _through_copies(run, supply, dim, dtype, copies, in_place, shape)
    leads = input.ndim > 1 and dim % input.ndim != 0 and not layout.copied
    by_query = scores.is_causal and input.ndim == 2  # its rows are the queries
    if not leads or by_query:
        return _direct(run, input, dtype, strides, supply)
    return _direct(run, input, dtype, strides, supply, plan, leading_of(layout, input.shape[0]))


def _direct(run, input, dtype, strides, supply=None, plan=None, leading=None) -> Prepared:
    """Nothing but an allocation and a launch. plan: of rows, if the call can be made for another number of them."""
    shape, empty = tuple(input.shape), allocator(input.device)

    def made(launch, shape):
        def call(input, out, scale, mask, sink=None):
            result = empty(shape, strides, dtype)
            launch(input, result)
            return result

        def scaled_call(input, out, scale, mask, sink=None):
            result = empty(shape, strides, dtype)
            launch(input, result, scale)
            return result

        def masked_call(input, out, scale, mask, sink=None):
            result = empty(shape, strides, dtype)
            launch(input, result, mask)
            return result

        def sunk_call(input, out, scale, mask, sink=None):
            result = empty(shape, strides, dtype)
            launch(input, result, sink)
            return result

        def scored_call(input, out, scale, mask, sink=None):
            result = empty(shape, strides, dtype)
            launch(input, result, *supply(scale, mask, sink))
            return result

        return {None: call, SCALE: scaled_call, MASK: masked_call, SINK: sunk_call}.get(supply, scored_call)

    def again(n):
        other = plan_for(plan, n * (plan.n_rows // shape[0]))
        found = other and run.again(other, leading(n))
        return made(found.__call__, (n, *shape[1:])) if found else None

    return Prepared(made(run.__call__, shape), again if plan is not None else None)


def leading_of(layout: ScoreLayout, size: int) -> Callable[[int], dict[str, int]]:
    """What gives the kernel's value that counts the rows' leading index, for another leading size than `size`."""
    if layout.leading is None:
        return lambda n: {}
    name, inner = layout.leading, layout.values[layout.leading] // size
    return lambda n: {name: inner * n}


def _written(launch, log, dim, dtype, scores, input, out, supply=None) -> Prepared:
    """Into the caller's tensor, where it lies. It may overlap an argument in one call and not in the next."""
    rules = scores.is_causal, scores.masked_rows
    overlaps = overlap_like(out, input, scores.scale, scores.mask, scores.sink)

    def call(input, out, scale, mask, sink=None):
        if overlaps(out, input, scale, mask, sink):
            of_this = Scores(scale, mask, *rules, sink=sink)
            return prepare_call(log, input, dim, dtype, out, of_this).call(input, out, scale, mask, sink)
        if supply is None:
            launch(input, out)
        else:
            launch(input, out, *supplied(supply, scale, mask, sink))
        if not out.is_inference():
            bump_version((out,))  # autograd sees no write of a kernel's
        return out

    return Prepared(call)


def _copied_into(prepared) -> Prepared:
    """Into a new tensor, and from there into the caller's."""
    inner = prepared.call
    return Prepared(lambda input, out, scale, mask, sink=None: out.copy_(inner(input, None, scale, mask, sink)))


def _through_copies(run, supply, dim, dtype, copies, in_place, moved_shape) -> Prepared:
    """Where no strides describe the rows of the input (copies), or of the result as it should lie (not in_place)."""
    launch = run.__call__

    def call(input, out, scale, mask, sink=None):
        source = last(input, dim).contiguous() if copies else input
        result = torch.empty(input.shape, dtype=dtype, device=input.device)
        target = result if in_place else torch.empty(moved_shape, dtype=dtype, device=input.device)
        launch(source, target, *supplied(supply, scale, mask, sink))
        return result if in_place else result.copy_(target.movedim(-1, dim))

    return Prepared(call)


def _first_max_after(launch, supply, log, dim, dtype, scores):
    """What writes rows that stream and may have scale 0, which torch's operations give their first maximum."""
    rules = scores.is_causal, scores.masked_rows

    def write(input, result, scale, mask, sink=None):
        source, target = last(input, dim), last(result, dim)
        (rows,), _ = as_rows(source)
        moved = target if is_rows(target) else torch.empty(source.shape, dtype=dtype, device=input.device)
        launch(rows, moved, *supplied(supply, scale, mask, sink))
        of_this = Scores(scale, mask, *rules, sink=sink).along(dim, tuple(input.shape))
        keep_first_max(source, moved, log, of_this)
        if moved is not target:
            target.copy_(moved)
        return result

    return write


def prepare_backward_call(
    log: bool, dy: Tensor, y: Tensor, dim: int, dtype: torch.dtype, hides: bool, scaled: bool
) -> Prepared:
    """The gradient for tensors like these: call(dy, y, factor) -> dx."""
    shape, strides, device = tuple(y.shape), contiguous_strides(y.shape), y.device
    empty = allocator(device)
    dx = empty(shape, strides, dtype)
    if not y.numel():
        return Prepared(lambda dy, y, factor: torch.empty_like(y, dtype=dtype))
    if _by_torch(y.dtype, dtype):
        wide = prepare_backward_call(log, dy, y, dim, y.dtype, hides, scaled).call
        return Prepared(lambda dy, y, factor: wide(dy, y, factor).to(dtype))
    if y.ndim:
        columns = columns_of(dim, dy, y, dx)
        run = None
        if columns is not None and (columns[0].ndim == 3 or not (hides or scaled)):
            run = prepare_columns_backward(*columns, log=log, hides=hides, scaled=scaled)
        if run is not None:
            return _direct_backward(run, shape, strides, dtype, empty, scaled)
    moved = [last(each, dim) for each in (dy, y, dx)]
    (dy_rows, y_rows), copies = as_rows(*moved[:2])
    in_place = is_rows(moved[2])
    if not in_place:
        moved[2] = torch.empty(moved[1].shape, dtype=dtype, device=device)
    dx_rows = rows_to_write(moved[2])
    plan = plan_backward(dy_rows, y_rows, dx_rows)
    run = prepare_backward(dy_rows, y_rows, dx_rows, plan, log=log, hides=hides, scaled=scaled)
    if in_place and not any(copies):
        leads = y.ndim > 1 and dim % y.ndim != 0
        return _direct_backward(run, shape, strides, dtype, empty, scaled, plan if leads else None)
    launch, moved_shape = run.__call__, tuple(moved[1].shape)

    def call(dy, y, factor):
        sources = [last(each, dim).contiguous() if copy else each for each, copy in zip((dy, y), copies, strict=True)]
        dx = torch.empty(shape, dtype=dtype, device=device)
        target = dx if in_place else torch.empty(moved_shape, dtype=dtype, device=device)
        launch(*sources, target, *((factor,) if scaled else ()))
        return dx if in_place else dx.copy_(target.movedim(-1, dim))

    return Prepared(call)


def _direct_backward(run, shape, strides, dtype, empty, scaled, plan=None) -> Prepared:
    def made(launch, shape):
        def call(dy, y, factor):
            dx = empty(shape, strides, dtype)
            launch(dy, y, dx)
            return dx

        def scaled_call(dy, y, factor):
            dx = empty(shape, strides, dtype)
            launch(dy, y, dx, factor)
            return dx

        return scaled_call if scaled else call

    def again(n):
        other = plan_for(plan, n * (plan.n_rows // shape[0]))
        found = other and run.again(other)
        return made(found.__call__, (n, *shape[1:])) if found else None

    return Prepared(made(run.__call__, shape), again if plan is not None else None)
