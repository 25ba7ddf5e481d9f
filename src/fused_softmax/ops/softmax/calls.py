"""Prepared calls of softmax, log_softmax, logsumexp and their gradients: allocations, copies and launches.

One pipeline computes every function of rows. The tensors at hand decide once between rows and columns, whether the
result is written where it lies, and which tensors are copied. The prepared call does the same for any tensors like
these, and decides nothing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from fused_softmax.core.calls import allocator, bump_version, contiguous_strides, kept
from fused_softmax.core.checks import sized
from fused_softmax.core.launched import Launched, compose
from fused_softmax.core.layout import (
    as_rows,
    column_dims,
    columns_of,
    is_rows,
    last,
    overlap,
    overlap_like,
    rows_alone,
    rows_of,
    rows_to_write,
)
from fused_softmax.core.plan import RowPlan
from fused_softmax.core.route import INTERPRET
from fused_softmax.core.runner import READ
from fused_softmax.ops.softmax.launches import (
    keep_first_max,
    plan_backward,
    plan_forward,
    plan_logsumexp,
    prepare_backward,
    prepare_columns,
    prepare_columns_backward,
    prepare_forward,
    prepare_logsumexp,
    prepare_logsumexp_backward,
    prepare_logsumexp_columns,
)
from fused_softmax.ops.softmax.scores import (
    MASK,
    PLAIN,
    SCALE,
    SINK,
    ScoreLayout,
    Scores,
    kind_of_scale,
    scores_against_columns,
    supplied,
    supplier,
)

Dims = tuple[int, ...]


@dataclass(frozen=True)
class RowFunction:
    """A function of rows, as the pipeline computes it.

    plan: (rows, result, layout of scores, batch_invariant) -> the planner's choice. over_rows: (rows, result, plan,
    layout) -> what launches it. over_columns: (input, result, layout) of views [n_outer, n_cols, n_inner] -> what
    launches it, or None. reads: (the input's dtype, the result's) -> whether kernels read the input as it is; if not,
    it is converted first.
    reduces: whether a row becomes one value. greedy: computes rows of scale 0 among rows that stream, if such a
    function is needed.
    """

    name: str
    plan: Callable[..., RowPlan]
    over_rows: Callable[..., Launched]
    over_columns: Callable[..., Launched | None]
    reads: Callable[[torch.dtype, torch.dtype], bool]
    reduces: bool = False
    greedy: Callable[[Tensor, Tensor, Scores], None] | None = None

    @cached_property
    def forward(self) -> str:
        """By what name `forward` keeps its calls."""
        return f"{self.name} forward"

    def shape(self, input: Tensor, dims: Dims, keepdim: bool) -> tuple[int, ...]:
        """The shape of the result, or torch's error for the dims."""
        if not self.reduces:
            return tuple(input.shape)
        n = input.dim()
        places = {dim % n for dim in dims if type(dim) is int and -n <= dim < n} if n else set()
        if places and len(places) == len(dims) and input.numel() and input.is_floating_point():
            sizes = enumerate(input.shape)
            return tuple(1 if i in places else size for i, size in sizes if keepdim or i not in places)
        like = torch.empty_like(input, device="meta", requires_grad=False)  # which imports sympy
        return tuple(torch.logsumexp(like, dims[0] if len(dims) == 1 else dims, keepdim).shape)


def _by_torch(given: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether torch rounds a tensor: Triton's interpreter takes fp64 to bf16 as if that were an integer."""
    return INTERPRET and given == torch.float64 and wanted == torch.bfloat16


def _of_softmax(log: bool) -> RowFunction:
    return RowFunction(
        "log_softmax" if log else "softmax", plan_forward, partial(prepare_forward, log=log),
        partial(prepare_columns, log=log),
        reads=lambda given, wanted: given in READ and not _by_torch(given, wanted),
        greedy=partial(keep_first_max, log=log),
    )  # fmt: skip


SOFTMAX, LOG_SOFTMAX = _of_softmax(log=False), _of_softmax(log=True)
LOGSUMEXP = RowFunction(
    "logsumexp",
    lambda rows, lse, layout, batch_invariant: plan_logsumexp(rows, layout, batch_invariant),
    prepare_logsumexp,
    lambda x, lse, layout: prepare_logsumexp_columns(x, lse),
    reads=lambda given, wanted: given in READ and not wanted == torch.float64 != given,  # no plan is of fewer bytes
    reduces=True,
)


def forward(
    of: RowFunction, input: Tensor, dims: Dims, dtype: torch.dtype, out: Tensor | None = None, scores: Scores = PLAIN,
    keepdim: bool = False,
) -> Tensor:  # fmt: skip
    """A function of rows on the kernels, with no gradient and no checks: what registered operators and stand-ins run.

    Plain calls are kept by the name of.forward and the options (dims, dtype, keepdim, batch_invariant).
    """
    if not scores.plain:
        call: Callable = prepare_call(of, input, dims, dtype, out, scores, keepdim)
    else:
        options = dims, dtype, keepdim, scores.batch_invariant
        call = kept(of.forward, options, (input, out), prepare_call, of, input, dims, dtype, out, scores, keepdim)
    return call(input, out, scores.scale, scores.mask, scores.sink)


def prepare_call(
    of: RowFunction, input: Tensor, dims: Dims, dtype: torch.dtype, out: Tensor | None, scores: Scores,
    keepdim: bool = False,
) -> Launched:  # fmt: skip
    """The function for tensors like these: call(input, out, scale, mask, sink) -> result, in `dtype`."""
    if not of.reads(input.dtype, dtype):
        inner = prepare_call(of, input.to(dtype), dims, dtype, out, scores, keepdim).__call__
        return Launched(
            lambda input, out, scale, mask, sink=None: inner(input.to(dtype), out, scale, mask, sink)
        )  # fmt: skip
    shape = of.shape(input, dims, keepdim)
    if not input.numel() and not of.reduces:
        return Launched(
            lambda input, out, scale, mask, sink=None: torch.empty_like(input, dtype=dtype) if out is None else out
        )
    call = _Call(of, input, tuple(d % max(1, input.ndim) for d in dims), dtype, out, scores, keepdim, shape)
    if out is not None and not call.may_write():
        return call.copied_into()
    return call.over_columns() or call.over_rows()


class _Call:
    """A call as it is prepared. What it returns holds none of its tensors."""

    def __init__(
        self, of: RowFunction, input: Tensor, dims: Dims, dtype: torch.dtype, out: Tensor | None, scores: Scores,
        keepdim: bool, shape: tuple[int, ...],
    ):  # fmt: skip
        self.of, self.input, self.dims, self.dtype, self.out = of, input, dims, dtype, out
        self.scores, self.keepdim, self.shape = scores, keepdim, shape
        self.empty, self.strides = allocator(input.device), contiguous_strides(shape)
        self.result = self.empty(shape, self.strides, dtype) if out is None else out

    @property
    def beside(self) -> tuple[torch.dtype, ...]:
        """The dtypes of rows that are written."""
        return () if self.of.reduces else (self.dtype,)

    def may_write(self) -> bool:
        """Whether kernels may write the caller's tensor: not if it overlaps what another program may still read."""
        out = self.result
        if out.dtype != self.dtype or tuple(out.shape) != self.shape or (self.of.reduces and not out.is_contiguous()):
            return False
        return not any(overlap(each, out) for each in (self.input, *self.scores.tensors))

    def copied_into(self) -> Launched:
        """Compute into a new tensor, and copy that into the caller's."""
        new = prepare_call(self.of, self.input, self.dims, self.dtype, None, self.scores, self.keepdim).__call__
        shape = self.shape
        return Launched(
            lambda input, out, scale, mask, sink=None: sized(out, shape).copy_(new(input, None, scale, mask, sink))
        )

    def over_columns(self) -> Launched | None:
        """The call along strided dims as they lie; None if there are rows, or scores that need rows, or copies.

        The plan of columns follows from all sizes. So a row that is to have the same bits in any batch is moved.
        """
        of, (x, first) = self.of, _merged(self.input, self.dims)
        if self.scores.batch_invariant or x is None or (of.reduces and not self.scores.plain):
            return None
        result = written = self.result
        if of.reduces:
            written = result.view(*x.shape[:first], 1, *x.shape[first + 1 :])
        columns = columns_of(first, x, written)
        if columns is None or (columns[0].ndim > 3 and not self.scores.plain):
            return None
        if of.reduces:
            columns = columns[0], result.view(-1, 1, columns[0].shape[-1])
        order = column_dims(first, x, written)
        layout = scores_against_columns(self.scores.exact(self.dtype, x.device), tuple(x.shape), first, order)
        launched = None if layout is None else of.over_columns(*columns, layout)
        if layout is None or launched is None:
            return None
        supply = supplier(self.scores, layout, first, self.dtype, self.input)
        return self.direct(launched, supply) if self.out is None else self.into(launched, supply)

    def over_rows(self) -> Launched:
        of, dim, input = self.of, self.dims[-1], self.input
        alone = self.scores.batch_invariant
        source = rows_last(input, self.dims)
        target, in_place = self.result, True
        if not of.reduces:
            target, in_place = _to_write(last(self.result, dim))
        if alone:
            rows = rows_alone(source, *self.beside)
            copied = rows.data_ptr() != input.data_ptr()
            in_place = in_place and (of.reduces or rows_alone(target, input.dtype).data_ptr() == target.data_ptr())
        else:
            (rows,), (copied,) = as_rows(source)
            copied = copied or source.data_ptr() != input.data_ptr()
        if self.out is not None and (copied or not in_place):
            return self.copied_into()
        layout = self.scores.laid_out(dim, tuple(input.shape), self.dtype, input.device)
        plan = of.plan(rows, target, layout, alone)
        launched = of.over_rows(rows, target, plan, layout)
        supply = supplier(self.scores, layout, dim, self.dtype, input)
        if plan.strategy == "stream" and layout.scores.greedy and of.greedy is not None:
            return self.first_max_after(launched, supply, of.greedy)
        if self.out is not None:
            return self.into(launched, supply)
        if copied or not in_place:
            return self.through_copies(launched, supply, copied, in_place)
        # The rows of a causal input of two dims are its queries, of which another number is another call.
        leads = input.ndim > 1 and 0 not in self.dims and not (self.scores.is_causal and input.ndim == 2)
        return self.direct(launched, supply, input.shape[0] if leads and not layout.copied else None)

    def direct(self, launched: Launched, supply, n: int | None = None) -> Launched:
        """The call that takes nothing but an allocation and a launch."""
        dtype, empty, of_this = self.dtype, self.empty, (self.shape, self.strides)

        def build(n, launch):
            shape, strides = of_this
            if n is not None:
                shape = n, *shape[1:]  # whose strides are the same

            # One function for each kind of scores: unpacking last arguments would cost every small call.
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

        return compose(build, launched, n=n)

    def into(self, launched: Launched, supply) -> Launched:
        """The call that writes into the caller's tensor. It may overlap an argument in one call and not in the next."""
        of, dims, dtype, keepdim, launch = self.of, self.dims, self.dtype, self.keepdim, launched.__call__
        rules = self.scores.rules
        overlaps = overlap_like(self.result, self.input, self.scores.scale, self.scores.mask, self.scores.sink)

        def call(input, out, scale, mask, sink=None):
            if overlaps(out, input, scale, mask, sink):
                of_this = Scores(scale, mask, sink=sink, **rules)
                return prepare_call(of, input, dims, dtype, out, of_this, keepdim)(input, out, scale, mask, sink)
            if supply is None:
                launch(input, out)
            else:
                launch(input, out, *supplied(supply, scale, mask, sink))
            if not out.is_inference():
                bump_version((out,))  # autograd sees no write of a kernel's
            return out

        return Launched(call)

    def through_copies(self, launched: Launched, supply, copied: bool, in_place: bool) -> Launched:
        """The call that copies: no strides describe the rows of the input (copied), or of the result (not in_place)."""
        launch, dims, shape, strides, dtype = launched.__call__, self.dims, self.shape, self.strides, self.dtype
        moved, empty, device = tuple(rows_last(self.input, dims).shape), self.empty, self.input.device
        alone, beside = self.scores.batch_invariant, self.beside

        def call(input, out, scale, mask, sink=None):
            source = input
            if copied:
                source = rows_last(input, dims)
                source = rows_alone(source, *beside) if alone else source.contiguous()
            result = empty(shape, strides, dtype)
            target = result if in_place else torch.empty(moved, dtype=dtype, device=device)
            launch(source, target, *supplied(supply, scale, mask, sink))
            return result if in_place else result.copy_(target.movedim(-1, dims[0]))

        return Launched(call)

    def first_max_after(self, launched: Launched, supply, greedy: Callable[[Tensor, Tensor, Scores], None]) -> Launched:
        """The call for rows that stream and may have scale 0.

        torch's operations give rows of scale 0 their first maximum.
        """
        launch, dtype, (dim,) = launched.__call__, self.dtype, self.dims
        rules, empty, shape, strides = self.scores.rules, self.empty, self.shape, self.strides
        alone, beside = self.scores.batch_invariant, self.beside

        def write(input, result, scale, mask, sink=None):
            source, target = last(input, dim), last(result, dim)
            rows = rows_alone(source, *beside) if alone else as_rows(source)[0][0]
            moved = target if is_rows(target) else torch.empty(source.shape, dtype=dtype, device=source.device)
            launch(rows, moved, *supplied(supply, scale, mask, sink))
            of_this = Scores(scale, mask, sink=sink, **rules).along(dim, tuple(input.shape))
            greedy(source, moved, of_this)
            if moved is not target:
                target.copy_(moved)
            return result

        if self.out is None:
            return Launched(lambda input, out, *scored: write(input, empty(shape, strides, dtype), *scored))
        return self.into(Launched(write), lambda *scored: scored)


def _to_write(x: Tensor) -> tuple[Tensor, bool]:
    """(rows to write, whether they are x's own): x as a view [n_rows, n_cols], or a new tensor where x has no rows."""
    in_place = is_rows(x)
    return rows_to_write(x if in_place else torch.empty(x.shape, dtype=x.dtype, device=x.device)), in_place


def rows_last(x: Tensor, dims: Dims) -> Tensor:
    """x with `dims` moved last and made one."""
    if len(dims) == 1:
        return last(x, dims[0])
    return x.movedim(dims, tuple(range(-len(dims), 0))).flatten(-len(dims))


def _merged(x: Tensor, dims: Dims) -> tuple[Tensor | None, int]:
    """(x with neighbouring dims made one, which one it is), or None where no one stride describes them."""
    first, end = min(dims), max(dims) + 1
    if not x.ndim or end - first != len(dims):
        return None, first
    if len(dims) == 1:
        return x, first
    try:
        return x.view(*x.shape[:first], math.prod(x.shape[first:end]), *x.shape[end:]), first
    except RuntimeError:
        return None, first


def backward(
    dy: Tensor, y: Tensor, dim: int, dtype: torch.dtype, log: bool, hides: bool, factor: float,
    batch_invariant: bool = False,
) -> Tensor:  # fmt: skip
    """dx in `dtype`, times a factor; contiguous as y is. hides: whether elements that were masked have no gradient."""
    name, options = backward_key(log, dim, dtype, hides, factor != 1, batch_invariant)
    how = dim, dtype, hides, factor != 1, batch_invariant
    call = kept(name, options, (y, dy), prepare_backward_call, log, dy, y, *how)
    return call(dy, y, factor)


def backward_key(
    log: bool, dim: int, dtype: torch.dtype, hides: bool, scaled: bool, batch_invariant: bool = False
) -> tuple[str, tuple]:
    """Under what `backward` keeps its calls."""
    return "log_softmax_backward" if log else "softmax_backward", (dim, dtype, hides, scaled, batch_invariant)


def backward_into(dy: Tensor, y: Tensor, out: Tensor, dim: int, log: bool, batch_invariant: bool = False) -> Tensor:
    """The gradient of a plain call, written into out, which is of y's shape and overlaps neither dy nor y."""
    if batch_invariant:
        return out.copy_(backward(dy, y, dim, out.dtype, log, False, 1.0, True))
    name = "log_softmax_backward_out" if log else "softmax_backward_out"
    return kept(name, dim, (y, dy, out), _prepare_backward_into, log, dy, y, out, dim)(dy, y, out)


def _prepare_backward_into(log: bool, dy: Tensor, y: Tensor, out: Tensor, dim: int) -> Launched:
    moved = [last(each, dim) for each in (dy, y, out)]
    rows = rows_of(*moved[:2]) if y.numel() and is_rows(moved[2]) else None
    if rows is None:
        inner = prepare_backward_call(log, dy, y, dim, out.dtype, False, False).__call__
        return Launched(lambda dy, y, out: out.copy_(inner(dy, y, 1.0)))
    dy_rows, y_rows = rows
    launch = prepare_backward(dy_rows, y_rows, rows_to_write(moved[2]), log=log).__call__

    def call(dy, y, out):
        launch(dy, y, out)
        return out

    return Launched(call)


def prepare_backward_call(
    log: bool, dy: Tensor, y: Tensor, dim: int, dtype: torch.dtype, hides: bool, scaled: bool,
    batch_invariant: bool = False,
) -> Launched:  # fmt: skip
    """The gradient for tensors like these: call(dy, y, factor) -> dx."""
    shape, strides, device = tuple(y.shape), contiguous_strides(y.shape), y.device
    empty = allocator(device)
    dx = empty(shape, strides, dtype)
    if not y.numel():
        return Launched(lambda dy, y, factor: torch.empty_like(y, dtype=dtype))
    if _by_torch(y.dtype, dtype):
        wide = prepare_backward_call(log, dy, y, dim, y.dtype, hides, scaled, batch_invariant).__call__
        return Launched(lambda dy, y, factor: wide(dy, y, factor).to(dtype))

    def build(n, launch):
        size = shape if n is None else (n, *shape[1:])
        strides = contiguous_strides(size)

        def call(dy, y, factor):
            dx = empty(size, strides, dtype)
            launch(dy, y, dx)
            return dx

        def scaled_call(dy, y, factor):
            dx = empty(size, strides, dtype)
            launch(dy, y, dx, factor)
            return dx

        return scaled_call if scaled else call

    columns = columns_of(dim, dy, y, dx) if y.ndim and not batch_invariant else None
    if columns is not None and (columns[0].ndim == 3 or not (hides or scaled)):
        launched = prepare_columns_backward(*columns, log=log, hides=hides, scaled=scaled)
        if launched is not None:
            return compose(build, launched)
    moved = [last(each, dim) for each in (dy, y, dx)]
    beside = y.dtype, dtype
    if batch_invariant:
        dy_rows, y_rows = (rows_alone(each, *beside) for each in moved[:2])
        copies = tuple(a.data_ptr() != b.data_ptr() for a, b in ((dy_rows, dy), (y_rows, y)))
    else:
        (dy_rows, y_rows), copies = as_rows(*moved[:2])
    in_place = is_rows(moved[2])
    if not in_place:
        moved[2] = torch.empty(moved[1].shape, dtype=dtype, device=device)
    dx_rows = rows_to_write(moved[2])
    plan = plan_backward(dy_rows, y_rows, dx_rows, True) if batch_invariant else None
    rows = prepare_backward(dy_rows, y_rows, dx_rows, plan, log=log, hides=hides, scaled=scaled)
    if in_place and not any(copies):
        return compose(build, rows, n=shape[0] if y.ndim > 1 and dim % y.ndim != 0 else None)
    launch, moved_shape = rows.__call__, tuple(moved[1].shape)

    def call(dy, y, factor):
        sources = [dy, y]
        for i, copy in enumerate(copies):
            if copy:
                moved = last(sources[i], dim)
                sources[i] = rows_alone(moved, *beside) if batch_invariant else moved.contiguous()
        dx = empty(shape, strides, dtype)
        target = dx if in_place else torch.empty(moved_shape, dtype=dtype, device=device)
        launch(*sources, target, *((factor,) if scaled else ()))
        return dx if in_place else dx.copy_(target.movedim(-1, dim))

    return Launched(call)


def logsumexp_backward(
    x: Tensor, lse: Tensor, dlse: Tensor, dims: Dims, *, scores: Scores = PLAIN, dtype: torch.dtype | None = None,
    hides: bool = False,
) -> Tensor:  # fmt: skip
    """exp(z - lse) * dlse of x's shape, in `dtype` or x's: the gradient of the scores z.

    A sink has no part in it, because lse counts it already. hides: whether rows whose dlse is 0 get 0, whatever they
    hold.
    """
    dtype = dtype or x.dtype
    if not x.numel():  # of which lse may have elements
        return torch.empty_like(x, dtype=dtype)
    options = dims, dtype, scores.is_causal, scores.masked_rows, hides
    tensors = x, lse, dlse, kind_of_scale(scores.scale), scores.mask
    prepared = x, lse, dlse, dims, scores, dtype, hides
    call = kept("logsumexp_backward", options, tensors, _prepare_logsumexp_backward, *prepared)
    return call(x, lse, dlse, scores.scale, scores.mask)


def _prepare_logsumexp_backward(
    x: Tensor, lse: Tensor, dlse: Tensor, dims: Dims, scores: Scores, dtype: torch.dtype, hides: bool
) -> Launched:
    """The gradient for tensors like these: call(x, lse, dlse, scale, mask) -> dz."""
    layout: ScoreLayout = scores.laid_out(dims[-1], tuple(x.shape), x.dtype, x.device)
    source = rows_last(x, dims)
    moved_shape, device = tuple(source.shape), x.device
    (rows,), (copied,) = as_rows(source)
    copied = copied or source.data_ptr() != x.data_ptr()
    in_place = len(dims) == 1 and dims[0] == x.ndim - 1
    dx = rows_to_write(torch.empty(moved_shape, dtype=dtype, device=device))
    launched = prepare_logsumexp_backward(rows, lse.contiguous(), dlse.contiguous(), dx, layout=layout, hides=hides)
    supply = supplier(scores, layout, dims[-1], x.dtype, x)
    ends, sizes = tuple(range(-len(dims), 0)), [x.shape[d] for d in dims]

    def build(n, launch):
        shape = moved_shape if n is None else (n, *moved_shape[1:])

        def call(x, lse, dlse, scale, mask):
            dz = torch.empty(shape, dtype=dtype, device=device)
            rows = rows_last(x, dims).contiguous() if copied else x
            launch(rows, lse.contiguous(), dlse.contiguous(), dz, *supplied(supply, scale, mask))
            if in_place:
                return dz
            return (dz if len(dims) == 1 else dz.unflatten(-1, sizes)).movedim(ends, dims)

        return call

    by_query = scores.is_causal and x.ndim == 2
    leads = x.ndim > 1 and in_place and not copied and not layout.copied and not by_query
    return compose(build, launched, n=moved_shape[0] if leads else None, by_row=True)


def forward_by_plan(
    x: Tensor, plan: RowPlan | None = None, *, y: Tensor | None = None, log: bool = False, scores: Scores = PLAIN
) -> Tensor:
    """(log_)softmax over the last dim of x [..., n_cols] by a plan for the whole of x, or the planner's.

    y: of x's shape, its rows contiguous; a new contiguous tensor of x's dtype if None.
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if y is None else y
    if x.numel():
        ((x_rows,), _), y_rows = as_rows(x), rows_to_write(y)
        layout = scores.laid_out(-1, tuple(x.shape), y.dtype, x.device)
        plan = plan or plan_forward(x_rows, y_rows, layout)
        number = [layout.scores.number for _ in layout.numbers]
        prepare_forward(x_rows, y_rows, plan, layout, log=log)(x_rows, y_rows, *layout.tensors, *number)
        if plan.strategy == "stream" and layout.scores.greedy:
            keep_first_max(x, y, scores, log=log)
    return y


def backward_by_plan(
    dy: Tensor, y: Tensor, dx: Tensor, plan: RowPlan | None = None, *, log: bool = False, hides: bool = False,
    factor: float = 1.0,
) -> Tensor:  # fmt: skip
    """The gradient over the last dim into dx, its rows contiguous, by a plan, or the planner's."""
    if y.numel():
        ((dy_rows, y_rows), _), dx_rows = as_rows(dy, y), rows_to_write(dx)
        launched = prepare_backward(dy_rows, y_rows, dx_rows, plan, log=log, hides=hides, scaled=factor != 1)
        launched(dy_rows, y_rows, dx_rows, *((factor,) if factor != 1 else ()))
    return dx
