"""The gradient of softmax and log_softmax of one rank's columns, by the two launches of rows that are read twice.

The first sums a row's part of y dy (of log_softmax dy), the ranks tell each other their sums, and the second writes
the gradient by the sum of all of them.
Traffic of a shard of N columns: y and dy are read twice, and the gradient is written once (5MN).
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fused_softmax.calls import Prepared, contiguous_strides, find, keep
from fused_softmax.device import device_of
from fused_softmax.kernels.softmax_grad import _stream_backward, _stream_dot
from fused_softmax.kernels.spec import GradientSpec
from fused_softmax.layout import alignment_of, flatten
from fused_softmax.ops.shard_memory import allocator
from fused_softmax.options import DTYPES, arithmetic_in
from fused_softmax.plan import RowPlan, candidate
from fused_softmax.route import runs_here
from fused_softmax.runner import TLDTYPES, prepare, spec_of


def takes(dy: Tensor, y: Tensor, dim: int, dtype: torch.dtype, factor: float | None) -> bool:
    """Whether the kernels make the gradient, in `dtype` and times factor, if any."""
    # A kernel's number has 32 bits; and fp64 in 16 is torch's to round, for the interpreter does it wrongly.
    exact = (factor is None and dtype == y.dtype) or torch.float64 not in (y.dtype, dtype)
    fits = y.numel() > 0 and dim % y.ndim == y.ndim - 1 and y.dtype in DTYPES and dtype in DTYPES
    return fits and exact and dy.dtype == y.dtype and y.is_contiguous() and runs_here(dy, y)


def gradient(
    dy: Tensor, y: Tensor, log: bool, hides: bool, factor: float | None, dtype: torch.dtype,
    summed: Callable[[Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """dx of arguments that it `takes`. summed: gives [n_rows] of all ranks for those of this one."""
    dy = dy if flatten(dy) is not None else dy.contiguous()
    options = log, hides, factor is not None, dtype
    call = find("softmax gradient of shards", options, y, dy)
    if call is None:
        call = keep(_prepare(dy, y, *options), "softmax gradient of shards", options, y, dy)
    return call(dy, y, factor, summed)


def _plan(dy: Tensor, y: Tensor, dx: Tensor) -> RowPlan:
    (n_rows, n_cols), gpu = y.shape, device_of(y.get_device())
    return candidate("stream", n_rows, n_cols, y.element_size(), gpu, alignment=alignment_of(y, dy, dx), inputs=2)


def _prepare(dy: Tensor, y: Tensor, log: bool, hides: bool, scaled: bool, dtype: torch.dtype) -> Prepared:
    """call(dy, y, factor, summed) -> dx"""
    shape, strides = y.shape, contiguous_strides(y.shape)
    empty, state_dtype = allocator(y.device), arithmetic_in(y.dtype)
    rows: list = [flatten(each) for each in (dy, y, empty(tuple(shape), strides, dtype))]
    plan, device = _plan(*rows), y.get_device()
    spec = spec_of(
        GradientSpec, plan, y.dtype, device, itemsize=16 // plan.vector, out_dtype=TLDTYPES[dtype], log=log,
        hides=hides, scaled=scaled, stream=True,
    )  # fmt: skip
    of_parts = (plan.n_rows, plan.parts), (plan.parts, 1)
    tensors = {**dict(zip(("dy", "y", "dx"), rows, strict=True)), "d": empty(*of_parts, state_dtype)}
    of_dot = {name: tensors[name] for name in ("dy", "y", "d")}
    first = prepare(_stream_dot, plan, replace(spec, out_dtype=None, scaled=False), of_dot, device=device).__call__
    numbers = ("factor",) if scaled else ()
    spec = replace(spec, lanes=plan.lanes)
    second = prepare(_stream_backward, plan, spec, tensors, {"factor": 1.0}, device=device, numbers=numbers).__call__

    def call(dy, y, factor, summed):
        d = empty(*of_parts, state_dtype)
        first(dy, y, d)
        if plan.parts == 1:
            d = summed(d.view(-1))
        else:  # one part stands for all
            total = summed(d.sum(1))
            d = torch.zeros_like(d)
            d[:, 0] = total
        dx = empty(tuple(shape), strides, dtype)
        second(dy, y, dx, d, *((factor,) if scaled else ()))
        return dx

    return Prepared(call)
