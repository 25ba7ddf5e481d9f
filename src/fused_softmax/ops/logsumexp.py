"""logsumexp over one or several dims, of the input or of its scaled, masked, causal scores.

lse = m + log s,  m = max z,  s = sum exp(z - m);  its gradient dx = exp(z - lse) * dlse.
Traffic: the input is read once (MN), few rows by many programs each; the gradient reads it again and writes (2MN).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from fused_softmax import launch, reference, workspace
from fused_softmax.device import device_of
from fused_softmax.ops import column
from fused_softmax.ops.arguments import DTYPES, TLDTYPES, alignment_of, as_rows, needs_grad, overlap, runs_here, traced
from fused_softmax.ops.replay import Calls, keep, recall, replay
from fused_softmax.ops.scores import PLAIN, MaskedRows, Scores, check_scores, layout_of
from fused_softmax.ops.shards import is_sharded, on_shards
from fused_softmax.plan import RowPlan, fetches_ahead, plan_reduction
from fused_softmax.rowwise import (
    NEG_INF,
    body_of,
    broadcast_offset,
    edges_of,
    exchange,
    exp_at,
    factor_of,
    finite_top,
    head_of,
    hold_all,
    keep_scores,
    load_edges,
    load_scores,
    lse_of,
    max_of,
    merge,
    origin_of,
    prefetch_l2,
    scores_of,
    sum_exp_of,
    tag_of,
    visible_of,
    weight_of,
    widen,
)

_calls: dict[bool, Calls] = {False: {}, True: {}}  # by keepdim


def logsumexp(
    input: Tensor,
    dim: int | Sequence[int],
    keepdim: bool = False,
    *,
    out: Tensor | None = None,
    scale: float | Tensor | None = None,
    mask: Tensor | None = None,
    is_causal: bool = False,
    masked_rows: MaskedRows = "nan",
) -> Tensor:
    """log sum exp(input * scale + mask) over `dim`, as torch.logsumexp: same results, NaN and infinities included.

    input: any shape; float32, float16, bfloat16 or float64, or integers, which become the default dtype. CUDA tensors
        run on this package's kernels, which read it once; CPU tensors take torch's own path. Differentiable, twice too.
    dim: one dim or several. The last are read in place, at any row stride; others through a copy.
    keepdim: whether the result keeps `dim` with size 1.
    out: where to write, of any floating dtype; resized to the result's shape.
    scale, mask, is_causal: as softmax's, for a single dim. A row of scale 0 gives its maximum.
    masked_rows: a row of which nothing is kept gives -inf; its gradient is NaN ("nan"; 0 if no loss uses it), or zero.

    Raises torch's errors, and those of softmax's scale, mask and is_causal.

    >>> logsumexp(torch.tensor([[0.0, 1.0, 2.0]], device="cuda"), 1)
    tensor([2.4076], device='cuda:0')
    """
    plainly = scale is None and mask is None and is_causal is False and masked_rows == "nan"
    if plainly and out is None and (keepdim is False or keepdim is True):
        result = replay(_calls[keepdim], input, dim)  # type: ignore[arg-type]
        if result is not None:
            return result
    scored: dict[str, Any] = {"scale": scale, "mask": mask, "is_causal": is_causal, "masked_rows": masked_rows}
    if not isinstance(dim, int) and isinstance(dim, Integral):  # NumPy's, which torch takes too
        dim = int(dim)
    if not isinstance(input, Tensor) or input.is_nested or input.layout != torch.strided:
        return torch.logsumexp(input, dim, keepdim, **({} if out is None else {"out": out}))  # type: ignore[arg-type]
    single = dim if isinstance(dim, int) else dim[0] if len(dim) == 1 else None
    scores = PLAIN
    if not plainly:
        if single is None:
            raise ValueError(f"logsumexp: scale, mask and is_causal are for a single dim, got dim={tuple(dim)}")  # type: ignore[arg-type]
        scores = check_scores("logsumexp", input, single, scale, mask, is_causal, masked_rows)
        if not input.dtype.is_floating_point and not input.dtype.is_complex:
            input = input.to(torch.get_default_dtype())
    tensors = [each for each in (input, out, scores.mask, scores.scale) if isinstance(each, Tensor)]
    if out is not None:
        _check_out(input, out)
        if needs_grad(*tensors):
            raise RuntimeError("logsumexp: out= takes no part in autograd, but an argument requires grad")
    if not runs_here(*tensors) or input.dtype not in DTYPES or input.ndim == 0 or input.numel() == 0:
        dims = (dim,) if isinstance(dim, int) else tuple(dim)
        if out is None and len(tensors) == 1 and is_sharded(input) and input.ndim and dims:
            on_shard = partial(logsumexp, dim=dim, keepdim=keepdim, **scored)
            return on_shards(on_shard, input, (*dims, -2) if is_causal else dims, dims, keepdim)
        if out is None and input.dtype in DTYPES and input.ndim and dims and traced(*tensors):
            return torch.ops.fused_softmax.logsumexp.default(input, dims, keepdim, *scores.as_arguments())
        if plainly:
            return torch.logsumexp(input, dim, keepdim, **({} if out is None else {"out": out}))  # type: ignore[arg-type]
        arithmetic = torch.float64 if input.dtype == torch.float64 else torch.float32
        result = reference.logsumexp(input, dim, keepdim, **scored, arithmetic=arithmetic)
        return result if out is None else out.resize_(result.shape).copy_(result)
    if not needs_grad(*tensors):
        return _forward(input, dim, keepdim, out, scores)
    return _LogSumExp.apply(input, scores.mask, scores.scale, scores, dim, keepdim)


def _check_out(input: Tensor, out: Tensor) -> None:
    if not isinstance(out, Tensor):
        raise TypeError(f"logsumexp: out must be a Tensor, not {type(out).__name__}")
    if not out.dtype.is_floating_point and not out.dtype.is_complex:
        raise RuntimeError(f"logsumexp: out must have a floating dtype, got {out.dtype}")
    if out.device != input.device:
        raise RuntimeError(f"logsumexp: out must be on the input's device {input.device}, got {out.device}")


def _forward(input: Tensor, dim: int | Sequence[int], keepdim: bool, out: Tensor | None, scores: Scores) -> Tensor:
    kept = dim if out is None and scores.plain and isinstance(dim, int) else None
    if kept is not None:
        result = recall(_calls[keepdim], input, kept)
        if result is not None:
            return result
    # On "meta" torch finds fault with dim, and says the shape.
    like = torch.empty_like(input, device="meta", requires_grad=False)
    shape = torch.logsumexp(like, dim, keepdim).shape  # type: ignore[arg-type]
    dims = tuple(d % input.ndim for d in ((dim,) if isinstance(dim, int) else dim))
    read = [each for each in (input, scores.mask, scores.scale) if isinstance(each, Tensor)]
    if out is None:
        result = input.new_empty(shape)
    elif out.dtype != input.dtype or any(overlap(each, out) for each in read):
        # Of a row that is written, another may still be unread.
        result = _forward(input, dim, keepdim, None, scores)
        return (out if out.shape == shape else out.resize_(shape)).copy_(result)
    else:
        result = out if out.shape == shape else out.resize_(shape)
    if scores.plain and result.is_contiguous() and (run := _prepare_columns(input, result, dims)):
        if kept is not None:
            keep(_calls[keepdim], input, kept, run, result)
        run(input, result)
        return _written(result, out)
    last = _rows_last(input, dims)
    scores = _in_kernel_dtype(scores.along(dims[-1], tuple(input.shape)), input)
    target = result if result.is_contiguous() else result.new_empty(shape)
    run = prepare_forward(last, target, scores=scores)
    if kept is not None and (last.shape, last.stride()) == (input.shape, input.stride()):
        keep(_calls[keepdim], input, kept, run, result)
    run(last, target)
    if target is not result:
        result.copy_(target)
    return _written(result, out)


def _written(result: Tensor, out: Tensor | None) -> Tensor:
    if out is not None and not out.is_inference():
        increment_version(out)  # autograd sees no write of a kernel's
    return result


def _prepare_columns(x: Tensor, lse: Tensor, dims: tuple[int, ...]):
    """What reduces neighbouring dims of a contiguous x, not the last, as they lie; None where they are no such dims."""
    first, last = min(dims), max(dims)
    if last == x.ndim - 1 or last - first + 1 != len(dims) or not x.is_contiguous():
        return None
    n_inner = math.prod(x.shape[last + 1 :])
    if n_inner == 1 or math.prod(x.shape[first : last + 1]) == 1:
        return None
    n_outer = math.prod(x.shape[:first])
    return column.prepare_logsumexp(x.view(n_outer, -1, n_inner), lse.view(n_outer, 1, n_inner))


def _rows_last(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """x with `dims` moved last and made one."""
    moved = x.movedim(dims, tuple(range(-len(dims), 0)))
    return moved if len(dims) == 1 else moved.flatten(-len(dims))


def _in_kernel_dtype(scores: Scores, x: Tensor) -> Scores:
    if isinstance(scores.scale, float) and x.dtype == torch.float64:  # a kernel's number has 32 bits
        number = torch.full((), scores.scale, dtype=torch.float64, device=x.device)
        return replace(scores, scale=number, never_zero=scores.scale != 0)
    return scores


class _LogSumExp(torch.autograd.Function):
    """lse with the gradient of input, of an added mask and of a scale tensor, from input and lse."""

    @staticmethod
    def forward(ctx, input, mask, scale, scores, dim, keepdim):
        lse = _forward(input, dim, keepdim, None, scores)
        save_for_gradients(ctx, input, dim, lse, scores)
        return lse

    @staticmethod
    def backward(ctx, dlse):
        return *gradients(ctx, dlse, *ctx.needs_input_grad[:3]), None, None, None


def save_for_gradients(ctx, input: Tensor, dim: int | Sequence[int], lse: Tensor, scores: Scores) -> None:
    ctx.save_for_backward(input, lse, scores.mask, scores.scale if isinstance(scores.scale, Tensor) else None)
    ctx.how = scores, tuple(d % input.ndim for d in ((dim,) if isinstance(dim, int) else dim))


def gradients(ctx, dlse: Tensor, for_input: bool, for_mask: bool, for_scale: bool):
    """Those of input, mask and scale that are asked for, of what `save_for_gradients` kept."""
    input, lse, mask, scale = ctx.saved_tensors
    scores, dims = ctx.how
    factor = scale if scale is not None else scores.scale if scores.scale is not None else 1.0
    keepdim_shape = [1 if d in dims else size for d, size in enumerate(input.shape)]
    if isinstance(factor, Tensor) or factor == 0:
        factor = torch.where(torch.as_tensor(factor, device=input.device) == 0, 1.0, factor)
    # One rounding where dx is all that is asked; the others are reductions of dz, in the dtype of the arithmetic.
    alone = isinstance(factor, float) and factor == 1.0 and not for_mask
    dz_dtype = input.dtype if alone else torch.promote_types(input.dtype, torch.float32)
    if torch.is_grad_enabled() or scores.greedy or not runs_here(dlse, input):
        # Element by element: a compiler fuses it into what stands around it.
        single = dims if len(dims) > 1 else dims[0]
        z = reference.scores(
            input.to(dz_dtype), single, scale if scale is not None else scores.scale, mask, scores.is_causal
        )
        whole = lse.view(keepdim_shape)
        if scores.masked_rows == "zero":
            whole = whole.masked_fill(whole == -float("inf"), float("inf"))
        dz = (z - whole).exp() * dlse.view(keepdim_shape)
        if scores.hides:
            dz = dz.masked_fill((dlse == 0).view(keepdim_shape), 0.0)  # of nothing kept it is NaN
    else:
        dz = logsumexp_backward(input, lse, dlse, dims, scores=scores, dtype=dz_dtype)
    dx = dmask = dscale = None
    if for_input:
        dx = (dz if isinstance(factor, float) and factor == 1.0 else dz * factor).to(input.dtype)
    if for_mask:
        dmask = dz.sum_to_size(mask.shape)
    if for_scale:
        # What is hidden may be NaN, and has no part.
        dscale = (dz * input.to(dz.dtype).masked_fill(dz == 0, 0.0)).sum_to_size(scale.shape).to(scale.dtype)
    return dx, dmask, dscale


def logsumexp_backward(
    x: Tensor, lse: Tensor, dlse: Tensor, dims: tuple[int, ...], *, scores: Scores = PLAIN,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """exp(z - lse) * dlse of x's shape, in `dtype` or x's: the gradient of the scores z."""
    last = _rows_last(x, dims)
    scores = _in_kernel_dtype(scores.along(dims[-1], tuple(x.shape)), x)
    result = torch.empty(last.shape, dtype=dtype or x.dtype, device=x.device)
    _prepare_backward(last, result, scores)(as_rows(last), lse.contiguous(), dlse.contiguous(), as_rows(result))
    if len(dims) > 1:
        result = result.unflatten(-1, [x.shape[d] for d in dims])
    return result.movedim(tuple(range(-len(dims), 0)), dims)


def prepare_forward(x: Tensor, lse: Tensor, plan: RowPlan | None = None, *, scores: Scores = PLAIN):
    """What reduces any tensor like x [..., n_cols] into any like lse, contiguous, a value a row: `run(x, lse)`."""
    rows = as_rows(x)
    device, gpu = x.get_device(), device_of(x.get_device())
    if plan is None:
        itemsize = max(x.element_size(), 4 if scores.added else 0)
        plan = plan_reduction(rows.shape[0], rows.shape[1], itemsize, gpu, alignment=alignment_of(rows))
    ptx = gpu.backend == "cuda" and device >= 0
    layout = layout_of(scores, tuple(x.shape))
    extra = tuple(tensor for tensor in layout.tensors if tensor is not None)
    constexprs, phase = _constexprs(rows, plan, layout, ptx)
    options = {"device": device, "num_warps": plan.num_warps}
    ahead = {"PREFETCH": ptx and fetches_ahead(plan, gpu, x.element_size())}
    flat = rows if rows.data_ptr() == x.data_ptr() else None
    if plan.strategy == "tile":
        tile = launch.prepare(
            _tile_logsumexp, plan.programs, (rows, lse, *layout.tensors),
            (rows.stride(0), plan.n_rows, plan.n_cols, phase, plan.prefetch, *layout.scalars),
            constexprs | ahead | {"BLOCK_ROWS": plan.block_rows}, **options,
        )  # fmt: skip
        return _on_rows(lambda x, lse: tile(x, lse, *extra), flat) if extra or flat is None else tile

    sizes = (plan.n_cols, plan.parts, plan.part_cols, plan.programs, phase, plan.prefetch)
    n_rows, slots_per_row = plan.n_rows, plan.slots_per_row

    def parts(slots, publish, collect):
        return launch.prepare(
            _part_logsumexp, plan.programs, (rows, lse, slots, *layout.tensors),
            (rows.stride(0), *sizes, *layout.scalars),
            constexprs | ahead
            | {"LANES": plan.lanes, "SPLIT": slots is not None, "PUBLISH": publish, "COLLECT": collect}, **options,
        )  # fmt: skip

    if plan.strategy == "row":
        row = parts(None, True, True)
        return _on_rows(lambda x, lse: row(x, lse, *extra), flat) if extra or flat is None else row
    if device < 0:
        slots = torch.zeros(n_rows * slots_per_row, dtype=torch.int64)
        first, second = parts(slots, True, False), parts(slots, False, True)
        return _on_rows(lambda x, lse: (first(x, lse, slots, *extra), second(x, lse, slots, *extra)), flat)
    both = parts(workspace.slots(device, n_rows, slots_per_row), True, True)
    return _on_rows(lambda x, lse: both(x, lse, workspace.slots(device, n_rows, slots_per_row), *extra), flat)


def _on_rows(run, flat):
    """run, given rows: where they are no view of the tensor, as a copy of it."""
    return run if flat is not None else lambda x, lse: run(as_rows(x), lse)


def _constexprs(rows, plan, layout, ptx):
    phase = rows.data_ptr() // rows.element_size() % plan.vector
    constexprs = {
        "BLOCK_COLS": plan.block_cols, "PIECES": plan.pieces, "VECTOR": plan.vector,
        "SHIFTED": plan.alignment == "shifted", "CAST": TLDTYPES[rows.dtype], "PTX": ptx,
    } | {name: value for name, value in layout.constexprs.items() if name != "ZERO"}  # fmt: skip
    return constexprs, phase


def _prepare_backward(x: Tensor, dx: Tensor, scores: Scores):
    rows, dx_rows = as_rows(x), as_rows(dx)
    device, gpu = x.get_device(), device_of(x.get_device())
    itemsize = max(x.element_size(), 4 if scores.added else 0)
    plan = plan_reduction(
        rows.shape[0], rows.shape[1], itemsize, gpu, alignment=alignment_of(rows, dx_rows), writes=True
    )
    layout = layout_of(scores, tuple(x.shape))
    extra = tuple(tensor for tensor in layout.tensors if tensor is not None)
    constexprs, phase = _constexprs(rows, plan, layout, gpu.backend == "cuda" and device >= 0)
    constexprs = {name: value for name, value in constexprs.items() if name not in ("GREEDY", "PTX")}
    constexprs |= {"HIDDEN": scores.hides, "ZERO": scores.masked_rows == "zero", "ROWS": plan.block_rows}
    values = torch.empty(plan.n_rows, dtype=x.dtype, device=x.device)
    run = launch.prepare(
        _logsumexp_backward, plan.programs, (rows, values, values, dx_rows, *layout.tensors),
        (rows.stride(0), dx_rows.stride(0), plan.n_rows, plan.n_cols, plan.parts, plan.part_cols, phase,
         *layout.scalars),
        constexprs, device=device, num_warps=plan.num_warps,
    )  # fmt: skip
    return lambda x, lse, dlse, dx: run(x, lse, dlse, dx, *extra)


@triton.jit(do_not_specialize=["n_rows", "n_cols", "phase", "ahead", "n_1", "n_2", "n_queries"])
def _tile_logsumexp(
    x_ptr, lse_ptr, mask_ptr, scale_ptr, x_row_stride, n_rows, n_cols, phase, ahead,
    n_1, n_2, mask_0, mask_1, mask_2, mask_col_stride, scale_0, scale_1, scale_2, n_queries, number,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, PIECES: tl.constexpr,
    VECTOR: tl.constexpr, SHIFTED: tl.constexpr, CAST: tl.constexpr, PREFETCH: tl.constexpr, PTX: tl.constexpr,
    MASK: tl.constexpr, SCALED: tl.constexpr, GREEDY: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Several short rows a program."""
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    # Rows past the end repeat the last one: the same values to the same place.
    row = tl.minimum(first_row + tl.arange(0, BLOCK_ROWS), n_rows - 1)[:, None]
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    head = head_of(row, x_row_stride, phase, VECTOR, SHIFTED)
    body = (n_cols - head) // VECTOR * VECTOR
    visible = visible_of(row, n_cols, n_queries, CAUSAL)
    factor, hidden, greedy = factor_of(row, number, scale_ptr, n_1, n_2, scale_0, scale_1, scale_2, SCALED, CAST)
    if MASK:
        mask_ptr += broadcast_offset(row, n_1, n_2, mask_0, mask_1, mask_2)
    if SHIFTED and PIECES > 1:  # edges first: what is made of both then has the layout of the pieces
        edge_cols, on_edge, edge = load_edges(x_ptr, row, x_row_stride, head, body, n_cols, hidden, VECTOR)
    x = load_scores(
        body_of(x_ptr, row, x_row_stride, phase, VECTOR, SHIFTED), head, cols, body, visible, factor, hidden,
        mask_ptr, mask_col_stride, BLOCK_COLS, PIECES, 0, VECTOR, CAST, MASK, SCALED, CAUSAL,
    )  # fmt: skip
    if SHIFTED and PIECES == 1:
        edge_cols, on_edge, edge = load_edges(x_ptr, row, x_row_stride, head, body, n_cols, hidden, VECTOR)
    HELD: tl.constexpr = x[0].dtype if MASK == 2 else CAST
    TIMES: tl.constexpr = SCALED and MASK != 2
    m = max_of(x, factor, HELD, TIMES)[:, None]
    if SHIFTED:
        if MASK or CAUSAL:
            edge = keep_scores(
                edge, edge_cols, on_edge, visible, factor, hidden, mask_ptr, mask_col_stride,
                CAST, MASK, SCALED, CAUSAL,
            )  # fmt: skip
        edge = scores_of(edge, factor, HELD, TIMES)
        m = tl.maximum(m, tl.max(edge, axis=1)[:, None])
    if PREFETCH:
        first = first_row + ahead.to(tl.int64) * BLOCK_ROWS
        n_ahead = tl.minimum(BLOCK_ROWS * x_row_stride, (n_rows - 1 - first) * x_row_stride + n_cols)
        prefetch_l2(x_ptr, phase, first * x_row_stride, tl.maximum(n_ahead, 0))
    m = finite_top(m)
    scale, base = origin_of(m, PTX)
    s = sum_exp_of(hold_all(x, PTX), scale, base, factor, HELD, TIMES, PTX)[:, None]
    if SHIFTED:
        s += tl.sum(exp_at(edge, scale, base, PTX), axis=1)[:, None]
    lse = lse_of(m, s, greedy, GREEDY, PTX)
    tl.store(lse_ptr + row, lse.to(CAST))


@triton.jit(do_not_specialize=[
    "n_cols", "n_parts", "part_cols", "n_programs", "phase", "ahead", "n_1", "n_2", "n_queries"
])  # fmt: skip
def _part_logsumexp(
    x_ptr, lse_ptr, slots_ptr, mask_ptr, scale_ptr, x_row_stride,
    n_cols, n_parts, part_cols, n_programs, phase, ahead,
    n_1, n_2, mask_0, mask_1, mask_2, mask_col_stride, scale_0, scale_1, scale_2, n_queries, number,
    BLOCK_COLS: tl.constexpr, PIECES: tl.constexpr, VECTOR: tl.constexpr, SHIFTED: tl.constexpr,
    CAST: tl.constexpr, PREFETCH: tl.constexpr, PTX: tl.constexpr,
    MASK: tl.constexpr, SCALED: tl.constexpr, GREEDY: tl.constexpr, CAUSAL: tl.constexpr,
    SPLIT: tl.constexpr, LANES: tl.constexpr, PUBLISH: tl.constexpr, COLLECT: tl.constexpr,
):  # fmt: skip
    """A row a program, or one part of it (SPLIT), online: tile by tile. The last part alone waits for the others."""
    program = tl.program_id(0)
    row = program.to(tl.int64)
    part = 0
    tag = 0
    if SPLIT:
        row = (program // n_parts).to(tl.int64)
        part = program % n_parts
        slots_ptr += row * n_parts
        tag = tag_of(tl.load(slots_ptr + part, volatile=True))
        if PUBLISH:
            tag = 1 - tag
    part_cols = part_cols // VECTOR * VECTOR
    start = part * part_cols
    # A row of the tile a lane, which keeps a state of its own: lanes meet once, at the end.
    WIDTH: tl.constexpr = 4 if VECTOR == 1 else VECTOR
    HEIGHT: tl.constexpr = BLOCK_COLS // WIDTH
    cols = tl.arange(0, HEIGHT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    head = head_of(row, x_row_stride, phase, VECTOR, SHIFTED)
    body = (n_cols - head) // VECTOR * VECTOR
    visible = visible_of(row, n_cols, n_queries, CAUSAL)
    factor, hidden, greedy = factor_of(row, number, scale_ptr, n_1, n_2, scale_0, scale_1, scale_2, SCALED, CAST)
    if MASK:
        mask_ptr += broadcast_offset(row, n_1, n_2, mask_0, mask_1, mask_2)
    x_body = body_of(x_ptr, row, x_row_stride, phase, VECTOR, SHIFTED)
    m = tl.full([HEIGHT, 1], NEG_INF, tl.float64 if CAST.is_fp64() else tl.float32)
    s = tl.zeros([HEIGHT, 1], m.dtype)
    HELD: tl.constexpr = m.dtype if MASK == 2 else CAST
    TIMES: tl.constexpr = SCALED and MASK != 2
    if PREFETCH:
        later = program + ahead
        later_row = (later // n_parts).to(tl.int64)
        later_start = (later % n_parts) * part_cols
        n_ahead = tl.minimum(part_cols, visible_of(later_row, n_cols, n_queries, CAUSAL) - later_start)
        prefetch_l2(x_ptr, phase, later_row * x_row_stride + later_start, tl.where(later < n_programs, n_ahead, 0))
    for at in range(start, tl.minimum(start + part_cols, tl.minimum(body, visible)), PIECES * BLOCK_COLS):
        x = load_scores(
            x_body + at, head + at, cols, tl.minimum(body, start + part_cols) - at, visible, factor, hidden,
            mask_ptr, mask_col_stride, BLOCK_COLS, PIECES, 0, VECTOR, CAST, MASK, SCALED, CAUSAL,
        )  # fmt: skip
        m_tile = tl.maximum(m, finite_top(max_of(x, factor, HELD, TIMES)[:, None]))
        scale, base = origin_of(m_tile, PTX)
        s *= weight_of(m, m_tile, PTX)
        s += sum_exp_of(hold_all(x, PTX), scale, base, factor, HELD, TIMES, PTX)[:, None]
        m = m_tile
    m_lane = m
    m = tl.max(tl.max(m_lane, axis=1), axis=0)
    s = tl.sum(tl.sum(s * weight_of(m_lane, m, PTX), axis=1), axis=0)
    if SHIFTED:
        edge_cols, on_edge = edges_of(tl.arange(0, 2 * VECTOR), head, body, n_cols, VECTOR)
        on_edge = on_edge & (part == 0)
        edge = tl.load(x_ptr + row * x_row_stride + edge_cols, mask=on_edge, other=hidden)
        if MASK or CAUSAL:
            edge = keep_scores(
                edge, edge_cols, on_edge, visible, factor, hidden, mask_ptr, mask_col_stride,
                CAST, MASK, SCALED, CAUSAL,
            )  # fmt: skip
        edge = scores_of(edge, factor, HELD, TIMES)
        m_edge = finite_top(tl.max(edge, axis=0))
        scale, base = origin_of(m_edge, PTX)
        m, s = merge(m, s, m_edge, tl.sum(exp_at(edge, scale, base, PTX), axis=0), PTX)
    if SPLIT:
        if PUBLISH:
            m, s = exchange(m, s, slots_ptr, part, n_parts, tag, LANES, 1, False, True, False, PTX)
        if COLLECT:  # noqa: SIM102  a constexpr, then a value
            if part == n_parts - 1:
                m, s = exchange(m, s, slots_ptr, 0, n_parts, tag, LANES, 1, False, False, True, PTX)
                tl.store(lse_ptr + row, lse_of(m, s, greedy, GREEDY, PTX).to(CAST))
    else:
        tl.store(lse_ptr + row, lse_of(m, s, greedy, GREEDY, PTX).to(CAST))


@triton.jit(do_not_specialize=["n_rows", "n_cols", "n_parts", "part_cols", "phase", "n_1", "n_2", "n_queries"])
def _logsumexp_backward(
    x_ptr, lse_ptr, dlse_ptr, dx_ptr, mask_ptr, scale_ptr, x_row_stride, dx_row_stride,
    n_rows, n_cols, n_parts, part_cols, phase,
    n_1, n_2, mask_0, mask_1, mask_2, mask_col_stride, scale_0, scale_1, scale_2, n_queries, number,
    ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, PIECES: tl.constexpr, VECTOR: tl.constexpr, SHIFTED: tl.constexpr,
    CAST: tl.constexpr, MASK: tl.constexpr, SCALED: tl.constexpr, CAUSAL: tl.constexpr,
    HIDDEN: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """exp(z - lse) * dlse of several rows, or of one part of a row."""
    program = tl.program_id(0)
    first_row = (program // n_parts).to(tl.int64) * ROWS
    part = program % n_parts
    row = tl.minimum(first_row + tl.arange(0, ROWS), n_rows - 1)[:, None]
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    part_cols = part_cols // VECTOR * VECTOR
    start = part * part_cols
    head = head_of(row, x_row_stride, phase, VECTOR, SHIFTED)
    body = (n_cols - head) // VECTOR * VECTOR
    visible = visible_of(row, n_cols, n_queries, CAUSAL)
    factor, hidden, _ = factor_of(row, number, scale_ptr, n_1, n_2, scale_0, scale_1, scale_2, SCALED, CAST)
    if MASK:
        mask_ptr += broadcast_offset(row, n_1, n_2, mask_0, mask_1, mask_2)
    HELD: tl.constexpr = (tl.float64 if CAST.is_fp64() else tl.float32) if MASK == 2 else CAST
    TIMES: tl.constexpr = SCALED and MASK != 2
    lse = widen(tl.load(lse_ptr + row), CAST)
    dlse = widen(tl.load(dlse_ptr + row), CAST)
    x_body = body_of(x_ptr, row, x_row_stride, phase, VECTOR, SHIFTED)
    dx_body = body_of(dx_ptr, row, dx_row_stride, phase, VECTOR, SHIFTED)
    for at in range(start, tl.minimum(start + part_cols, n_cols), PIECES * BLOCK_COLS):
        size = tl.minimum(body, start + part_cols) - at
        x = load_scores(
            x_body + at, head + at, cols, size, visible, factor, hidden, mask_ptr, mask_col_stride,
            BLOCK_COLS, PIECES, 0, VECTOR, CAST, MASK, SCALED, CAUSAL,
        )  # fmt: skip
        for p in tl.static_range(PIECES):
            dx = share_of(scores_of(x[p], factor, HELD, TIMES), lse, dlse, HIDDEN, ZERO).to(dx_ptr.dtype.element_ty)
            tl.store(dx_body + (at + p * BLOCK_COLS + cols), dx, mask=p * BLOCK_COLS + cols < size)
    if SHIFTED:
        edge_cols, on_edge = edges_of(tl.arange(0, 2 * VECTOR)[None, :], head, body, n_cols, VECTOR)
        on_edge = on_edge & (part == 0)
        edge = tl.load(x_ptr + row * x_row_stride + edge_cols, mask=on_edge, other=hidden)
        if MASK or CAUSAL:
            edge = keep_scores(
                edge, edge_cols, on_edge, visible, factor, hidden, mask_ptr, mask_col_stride,
                CAST, MASK, SCALED, CAUSAL,
            )  # fmt: skip
        dx = share_of(scores_of(edge, factor, HELD, TIMES), lse, dlse, HIDDEN, ZERO).to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + row * dx_row_stride + edge_cols, dx, mask=on_edge)


@triton.jit
def share_of(z, lse, dlse, HIDDEN: tl.constexpr, ZERO: tl.constexpr):
    """exp(z - lse) * dlse; of a row of which nothing is kept 0 where dlse is (HIDDEN), or always (ZERO)."""
    dz = tl.exp(z - lse) * dlse
    if HIDDEN:
        dz = tl.where(dlse == 0.0, 0.0, dz)
    if ZERO:
        dz = tl.where(lse == NEG_INF, 0.0, dz)
    return dz
