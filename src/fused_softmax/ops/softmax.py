"""softmax and log_softmax along one dim, of the input or of its scaled, masked, causal scores.

Forward in `softmax_forward`, gradient in `softmax_backward`: each reads every element once and writes it once.
"""

from dataclasses import replace
from functools import partial
from numbers import Integral

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.overrides import has_torch_function_unary

from fused_softmax import reference
from fused_softmax.ops import column
from fused_softmax.ops.arguments import DTYPES, check, is_rows, needs_grad, overlap, runs_here, traced
from fused_softmax.ops.replay import Calls, keep, recall, replay
from fused_softmax.ops.scores import PLAIN, MaskedRows, Scores, check_scores
from fused_softmax.ops.shards import is_sharded, on_shards
from fused_softmax.ops.softmax_backward import softmax_backward
from fused_softmax.ops.softmax_forward import prepare_forward, softmax_forward

_calls: Calls = {}
_log_calls: Calls = {}


def softmax(
    input: Tensor,
    dim: int = -1,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    scale: float | Tensor | None = None,
    mask: Tensor | None = None,
    is_causal: bool = False,
    masked_rows: MaskedRows = "nan",
) -> Tensor:
    """softmax of `input * scale + mask` along `dim`, as torch.softmax: same results, NaN and infinities included.

    input: any shape; float32, float16, bfloat16 or float64. CUDA tensors run on this package's kernels, read once and
        written once whatever the length of `dim`; CPU tensors take torch's own path. Differentiable, twice too.
    dim: the dimension that sums to 1. The last one is read in place at any row stride, others in contiguous tensors;
        what no stride describes goes through a copy.
    dtype: the dtype of the result; the input is rounded to it as it is read, with no copy. Needed for integer inputs.
    out: where to write; of the input's shape, the result's dtype, the input's device.
    scale: a number, or a tensor that broadcasts to the input with size 1 in `dim` (a temperature's inverse for every
        row). Scale 0 stands for temperature 0: 1 at the first maximum of the row, 0 elsewhere.
    mask: broadcasts to the input and is never expanded in memory. bool: True keeps. Of a float dtype: added.
    is_causal: of scores [..., queries, keys] only keys up to each query's own are kept, the last query seeing all
        (bottom-right aligned); nothing above that diagonal is read.
    masked_rows: what a row gets of which nothing is kept: "nan" as torch, or "zero".

    Raises TypeError for an argument of another type, or a mask of integers; IndexError for a dim out of range;
    ValueError for a mask or scale that does not broadcast, or is_causal on fewer than 2 dims or another than the last;
    NotImplementedError for a sparse input or an integer one without dtype; RuntimeError for a nested input, or an out
    of another shape, dtype or device.

    >>> softmax(torch.tensor([[0.0, 1.0, 2.0]], device="cuda"))
    tensor([[0.0900, 0.2447, 0.6652]], device='cuda:0')
    """
    if dtype is None and out is None and scale is None and mask is None and is_causal is False and masked_rows == "nan":
        result = replay(_calls, input, dim)
        if result is not None:
            return result
    return _softmax(False, input, dim, dtype, out, scale, mask, is_causal, masked_rows)


def log_softmax(
    input: Tensor,
    dim: int = -1,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    scale: float | Tensor | None = None,
    mask: Tensor | None = None,
    is_causal: bool = False,
    masked_rows: MaskedRows = "nan",
) -> Tensor:
    """The logarithm of softmax along `dim`, as torch.log_softmax: z - m - log s. Arguments and errors are softmax's.

    A row of which nothing is kept is -inf everywhere with masked_rows="zero".

    >>> log_softmax(torch.tensor([[0.0, 1.0, 2.0]], device="cuda"))
    tensor([[-2.4076, -1.4076, -0.4076]], device='cuda:0')
    """
    if dtype is None and out is None and scale is None and mask is None and is_causal is False and masked_rows == "nan":
        result = replay(_log_calls, input, dim)
        if result is not None:
            return result
    return _softmax(True, input, dim, dtype, out, scale, mask, is_causal, masked_rows)


def _softmax(log, input, dim, dtype, out, scale, mask, is_causal, masked_rows):
    name = "log_softmax" if log else "softmax"
    plainly = scale is None and mask is None and is_causal is False and masked_rows == "nan"
    if not isinstance(input, Tensor) and has_torch_function_unary(input) and plainly:  # a proxy of torch.fx, for one
        return getattr(torch, name)(input, dim, dtype=dtype, **({} if out is None else {"out": out}))
    if not isinstance(dim, int) and isinstance(dim, Integral):  # NumPy's, which torch takes too
        dim = int(dim)
    result_dtype = check(name, input, dim, dtype, out)
    scores = PLAIN if plainly else check_scores(name, input, dim, scale, mask, is_causal, masked_rows)
    if dtype is None and input.is_cuda and torch.is_autocast_enabled("cuda") and input.dtype != torch.float64:
        result_dtype = torch.float32  # where autocast is on, torch's softmax gives fp32
    tensors = [each for each in (input, out, scores.mask, scores.scale) if isinstance(each, Tensor)]
    if not plainly and result_dtype not in DTYPES:
        raise NotImplementedError(f"{name}: not implemented for {result_dtype}; give a dtype of 16 to 64 bit floats")
    if not plainly and out is not None and needs_grad(*tensors):
        raise RuntimeError(f"{name}: out= takes no part in autograd, but an argument requires grad")
    if not runs_here(*tensors) or result_dtype not in DTYPES:
        if out is None and len(tensors) == 1 and is_sharded(input):
            scored = {"scale": scale, "is_causal": is_causal, "masked_rows": masked_rows}
            on_shard = partial(log_softmax if log else softmax, dim=dim, dtype=dtype, **scored)
            return on_shards(on_shard, input, (dim, -2) if is_causal else (dim,))
        if out is None and result_dtype in DTYPES and traced(*tensors):
            operator = torch.ops.fused_softmax.log_softmax if log else torch.ops.fused_softmax.softmax
            return operator.default(input, dim, result_dtype, *scores.as_arguments())
        if plainly:
            return getattr(torch, name)(input, dim, dtype=dtype, **({} if out is None else {"out": out}))
        result = getattr(reference, name)(
            input, dim, dtype=result_dtype, scale=scores.scale, mask=scores.mask, is_causal=is_causal,
            masked_rows=masked_rows,
            arithmetic=torch.float64 if result_dtype == torch.float64 else torch.float32,
        )  # fmt: skip
        return result if out is None else out.resize_(result.shape).copy_(result)
    if needs_grad(*tensors):
        if out is not None:
            raise RuntimeError(f"{name}: out= takes no part in autograd, but an argument requires grad")
        return _Softmax.apply(input, scores.mask, scores.scale, scores, dim, result_dtype, log)
    if out is not None and out.numel() == 0 and out.shape != input.shape:
        out.resize_(input.shape)  # as torch: an empty out takes the shape of the result
    return _forward(log, input, dim, result_dtype, out, scores)


def _forward(log: bool, input: Tensor, dim: int, result_dtype: torch.dtype, out: Tensor | None, scores: Scores):
    if not input.dtype.is_floating_point or input.dtype.itemsize == 1:
        input = input.to(result_dtype)
    if out is None and not input.numel():
        return torch.empty(input.shape, dtype=result_dtype, device=input.device)
    if out is None and scores.plain and result_dtype == input.dtype:
        result = recall(_log_calls if log else _calls, input, dim)
        if result is not None:
            return result
    if input.ndim:
        scores = scores.along(dim, input.shape)
    if scores.plain and input.ndim and input.numel() and (out is None or not overlap(input, out)):
        result = _forward_columns(log, input, dim, result_dtype, out)
        if result is not None:
            return result
    last, same = _last(input, dim), input.is_contiguous() and result_dtype == input.dtype
    if out is None and same and scores.plain and last.is_contiguous() and input.numel():
        result = torch.empty_like(input)
        run = prepare_forward(last, _last(result, dim), log=log)
        keep(_log_calls if log else _calls, input, dim, run, result)
        run(last, result)
        return result
    read = [each for each in (input, scores.mask, scores.scale) if isinstance(each, Tensor)]
    if out is not None and not any(overlap(each, out) for each in read) and is_rows(_last(out, dim)):
        _into(last, _last(out, dim), log, scores)
        if not out.is_inference():
            increment_version(out)  # autograd sees no write of a kernel's
        return out
    # The result is no view, of which autograd would let nobody change a thing.
    result = torch.empty(input.shape, dtype=result_dtype, device=input.device)
    if is_rows(_last(result, dim)):
        _into(last, _last(result, dim), log, scores)
    else:
        rows = torch.empty(last.shape, dtype=result_dtype, device=input.device)
        _into(last, rows, log, scores)
        result.copy_(rows.movedim(-1, dim))
    return result if out is None else out.copy_(result)


def _forward_columns(log: bool, input: Tensor, dim: int, result_dtype: torch.dtype, out: Tensor | None):
    """The forward along a strided dim as it lies, or None where rows are what it has, or a copy is needed."""
    source = column.columns_of(input, dim)
    if source is None:
        return None
    result = torch.empty(input.shape, dtype=result_dtype, device=input.device) if out is None else out
    target = column.columns_of(result, dim)
    if target is None or target[1] != source[1]:
        return None
    run = column.prepare_softmax(source[0], target[0], log=log)
    if run is None:
        return None
    if out is None and result_dtype == input.dtype:
        keep(_log_calls if log else _calls, input, dim, run, result)
    run(input, result)
    if out is not None and not out.is_inference():
        increment_version(out)
    return result


def _last(x: Tensor, dim: int) -> Tensor:
    return x if x.ndim == 0 else x.movedim(dim, -1)


def _into(x: Tensor, y: Tensor, log: bool, scores: Scores) -> None:
    """The forward over the last dim of x into y, a scale per row that may be 0 included where rows stream."""
    if isinstance(scores.scale, float) and y.dtype == torch.float64:
        # A kernel's number has 32 bits.
        number = torch.full((), scores.scale, dtype=torch.float64, device=x.device)
        scores = replace(scores, scale=number, never_zero=scores.scale != 0)
    softmax_forward(x, y, log=log, scores=scores)


class _Softmax(torch.autograd.Function):
    """y with the gradient of input, of an added mask and of a scale tensor, from y and dy."""

    @staticmethod
    def forward(ctx, input, mask, scale, scores, dim, result_dtype, log):
        y = _forward(log, input, dim, result_dtype, None, scores)
        save_for_gradients(ctx, log, input, dim, y, scores)
        return y

    @staticmethod
    def backward(ctx, dy):
        return *gradients(ctx, dy, *ctx.needs_input_grad[:3]), None, None, None, None


def save_for_gradients(ctx, log: bool, input: Tensor, dim: int, y: Tensor, scores: Scores) -> None:
    scale = scores.scale if isinstance(scores.scale, Tensor) else None
    ctx.save_for_backward(y, scale, input if scale is not None and scale.requires_grad else None)
    ctx.how = dim, log, scores, input.dtype, None if scores.mask is None else scores.mask.shape


def gradients(ctx, dy: Tensor, for_input: bool, for_mask: bool, for_scale: bool):
    """Those of input, mask and scale that are asked for, of what `save_for_gradients` kept."""
    y, scale, input = ctx.saved_tensors
    dim, log, scores, input_dtype, mask_shape = ctx.how
    factor = scale if scale is not None else scores.scale if scores.scale is not None else 1.0
    # One rounding where dx is all that is asked; the others are reductions of the gradient of the scores, in the dtype
    # of the arithmetic. A kernel's number has 32 bits, too few for fp64.
    in_kernel = not isinstance(factor, Tensor) and not for_mask and (factor == 1 or y.dtype != torch.float64)
    arithmetic = torch.promote_types(y.dtype, torch.float32)
    dz_dtype, dz_factor = (input_dtype, factor) if in_kernel else (arithmetic, 1.0)
    if not torch.is_grad_enabled() and runs_here(dy, y):
        dz = torch.empty_like(y, dtype=dz_dtype, memory_format=torch.contiguous_format)
        dz = _backward(dy, y, dz, dim, log, scores, dz_factor)
    elif not torch.is_grad_enabled() and traced(dy, y):
        operator = torch.ops.fused_softmax.log_softmax_backward if log else torch.ops.fused_softmax.softmax_backward
        if scores.hides or dz_factor == 1:
            dz = operator.default(dy, y, dim, dz_dtype, dz_factor if scores.hides else None)
        else:
            dz = (operator.default(dy, y, dim, arithmetic, None) * dz_factor).to(dz_dtype)
    else:
        dz = _differentiable_backward(dy, y, dim, log, scores, arithmetic) * dz_factor
    if log and scores.greedy:  # a logarithm of 1 or of 0, wherever the scores move
        dz = dz.masked_fill(torch.as_tensor(factor, device=dz.device) == 0, 0.0)
    dx = dmask = dscale = None
    if for_input:
        dx = (dz if in_kernel else dz * factor).to(input_dtype)
    if for_mask:
        dmask = dz.sum_to_size(mask_shape)
    if for_scale:
        # What is hidden may be NaN, and has no part.
        dscale = dz * input.to(dz.dtype).masked_fill(y == (-float("inf") if log else 0.0), 0.0)
        dscale = dscale.sum_to_size(scale.shape).to(scale.dtype)
    return dx, dmask, dscale


def _backward(dy: Tensor, y: Tensor, dx: Tensor, dim: int, log: bool, scores: Scores, factor: float) -> Tensor:
    if scores.plain and y.ndim and y.numel():
        views = [column.columns_of(each, dim) for each in (dy, y, dx)]
        if views[0] and views[1] and views[2] and views[0][1] == views[1][1] == views[2][1]:
            run = column.prepare_backward(views[0][0], views[1][0], views[2][0], log=log)
            if run is not None:
                run(dy, y, dx)
                return dx
    dy_last, y_last = _last(dy, dim), _last(y, dim)
    if is_rows(_last(dx, dim)):
        softmax_backward(dy_last, y_last, _last(dx, dim), log=log, hidden=scores.hides, scale=factor)
        return dx
    result = torch.empty(y_last.shape, dtype=dx.dtype, device=y.device)
    softmax_backward(dy_last, y_last, result, log=log, hidden=scores.hides, scale=factor)
    return dx.copy_(result.movedim(-1, dim))


def _differentiable_backward(
    dy: Tensor, y: Tensor, dim: int, log: bool, scores: Scores, dtype: torch.dtype | None = None
) -> Tensor:
    """The same of torch's operations, for a second derivative; in `dtype`, or y's."""
    function = torch.ops.aten._log_softmax_backward_data if log else torch.ops.aten._softmax_backward_data
    arithmetic = torch.promote_types(y.dtype, torch.float32)
    dz = function(dy.to(arithmetic), y.to(arithmetic), dim, arithmetic).to(dtype or y.dtype)
    if not scores.hides:
        return dz
    # Of a row of which nothing is kept y is NaN, and so is dz, though the row has no part in what follows.
    dz = dz.masked_fill((dy == 0).all(dim, keepdim=True), 0.0)
    return dz.masked_fill(y == -float("inf"), 0.0) if log else dz
