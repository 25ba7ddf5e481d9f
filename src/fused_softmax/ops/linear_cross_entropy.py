"""Cross-entropy of input @ linear_weight.T + linear_bias, of which a chunk of rows exists at a time.

Three matrix products by cuBLAS, as with all logits in memory; between them the logits of a chunk are read once and
their gradient written over them. Extra memory: a chunk of logits, and an accumulator of linear_weight's gradient. Where
chunks are many and short, blocks of classes take their place (`linear_by_classes.py`), and no accumulator.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fused_softmax import reference
from fused_softmax.ops.arguments import DTYPES, batched, needs_grad, runs_here, traced_whole
from fused_softmax.ops.cross_entropy import _check
from fused_softmax.ops.cross_entropy_backward import cross_entropy_backward, multiply
from fused_softmax.ops.cross_entropy_forward import cross_entropy_forward
from fused_softmax.ops.linear_by_classes import add_product, by_classes, goes_by_classes
from fused_softmax.ops.losses import Loss, Rows, arithmetic_of, finish, totals_of

_CHUNK_BYTES = 2**30  # of logits: fewer chunks accumulate less often, and a chunk's products fill the chip
_CHUNK_ROWS = 128  # a multiple that matrix products like


@dataclass(frozen=True)
class Linear:
    """What a call says of its products. accumulate: whether chunks add up in the dtype of the arithmetic."""

    chunk_size: int
    accumulate: bool


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    scale: float | None = None,
    lse_square_scale: float = 0.0,
    chunk_size: int | None = None,
    accumulate: str = "fp32",
    skip_ignored: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """cross_entropy(linear(input, linear_weight, linear_bias), target, ...), without all logits in memory at once.

    input: [in_features] or [..., in_features]; float32, float16, bfloat16 or float64.
    linear_weight: [n_classes, in_features], linear_bias: [n_classes], of the input's dtype.
    target: class indices of the input's leading shape, of int64, int32 or uint8; or probabilities [..., n_classes], for
        which all logits are made.
    weight, reduction, ignore_index, label_smoothing, softcap, scale, lse_square_scale, dtype: as cross_entropy's.
    chunk_size: rows whose logits exist at a time; if None as many as fill 1 GiB, or fewer, so that chunks are equal; or
        all, where that takes no more memory than chunks with the accumulator of linear_weight's gradient would.
        Short chunks may be blocks of classes instead, of as many logits beside those in linear_weight's gradient's own
        memory.
    accumulate: "fp32" adds the chunks of the gradients of weight and bias, or blocks of the input's, in float32
        (float64 of float64); "input" in their own dtype, and allocates no accumulator but for a mean of float16, whose
        sums its range would not hold.
    skip_ignored: makes no logits for rows that are ignored. Worth it where they are many; asks the device how many, and
        so waits for it. Compiled code makes them.

    With reduction mean or sum the gradients are made in the forward pass, of those tensors alone that require one; a
    second backward, and reduction none, make the logits again. Returns the loss, [] or of the targets' shape.
    Raises as cross_entropy, and ValueError for shapes that do not fit, chunk_size < 1 or an unknown accumulate.

    >>> linear_cross_entropy(hidden, lm_head.weight, tokens)  # [8192, 4096], [128256, 4096], [8192]
    """
    _check_linear(input, linear_weight, linear_bias, chunk_size, accumulate)
    if input.is_cuda and torch.is_autocast_enabled("cuda") and input.dtype != torch.float64:
        cast = torch.get_autocast_dtype("cuda")
        dtype = dtype or torch.float32
        input, linear_weight = input.to(cast), linear_weight.to(cast)
        linear_bias = None if linear_bias is None else linear_bias.to(cast)
    n_classes = linear_weight.shape[0]
    logits_like = torch.empty(1, device=input.device, dtype=input.dtype).expand(*input.shape[:-1], n_classes)
    class_dim_at_1 = logits_like if input.ndim < 3 else logits_like.movedim(-1, 1)
    of_target = (
        target.movedim(-1, 1)
        if isinstance(target, Tensor) and target.is_floating_point() and input.ndim > 2
        else target
    )
    _check(
        class_dim_at_1,
        of_target,
        weight,
        ignore_index,
        reduction,
        label_smoothing,
        softcap,
        scale,
        lse_square_scale,
        dtype,
    )
    scale = 1.0 if scale is None else float(scale)
    result_dtype = dtype or input.dtype
    tensors = [each for each in (input, linear_weight, target, linear_bias, weight) if each is not None]
    takes = input.dtype in DTYPES and result_dtype in DTYPES and not target.is_floating_point() and scale != 0
    takes = takes and target.numel() > 0 and linear_weight.numel() > 0
    if not takes or not runs_here(*tensors):
        if takes and traced_whole(*tensors):
            # One operator, which gives the gradients beside the loss: a loop over chunks would be unrolled for one
            # number of rows, and what were made of the loss alone would multiply by the weight once more.
            asked = [torch.is_grad_enabled() and each is not None and each.requires_grad for each in (
                input, linear_weight, linear_bias
            )]  # fmt: skip
            y = torch.ops.fused_softmax.linear_cross_entropy.default(
                input.reshape(-1, input.shape[-1]), linear_weight, target.reshape(-1), linear_bias, weight,
                ignore_index, reduction, float(label_smoothing), None if softcap is None else float(softcap), scale,
                float(lse_square_scale), chunk_size, accumulate, asked,
            )[0]  # fmt: skip
            return (y if reduction != "none" else y.view(target.shape)).to(result_dtype)
        logits = torch.nn.functional.linear(input, linear_weight, linear_bias)
        logits = logits if logits.ndim < 3 else logits.movedim(-1, 1)
        return reference.cross_entropy(
            logits, of_target, weight, ignore_index, reduction, label_smoothing, softcap=softcap, scale=scale,
            lse_square_scale=lse_square_scale, dtype=result_dtype, arithmetic=arithmetic_of(input),
        )[0]  # fmt: skip
    loss = Loss(
        None if weight is None else weight.detach().to(arithmetic_of(input)).contiguous(), ignore_index,
        reduction == "mean", label_smoothing, softcap, scale, lse_square_scale,
    )  # fmt: skip
    rows, flat = input.reshape(-1, input.shape[-1]), target.reshape(-1).contiguous()
    kept = None
    if skip_ignored:
        kept = (flat.long() != ignore_index).nonzero().squeeze(-1)
        if 0 < len(kept) < len(flat):
            rows, flat = rows[kept], flat[kept]
        else:
            kept = None
    linear = linear_of(rows, linear_weight, chunk_size, accumulate, needs_grad(linear_weight))
    at_once = reduction != "none" and needs_grad(
        *[each for each in (rows, linear_weight, linear_bias) if each is not None]
    )
    y = _LinearCrossEntropy.apply(rows, linear_weight, linear_bias, flat, loss, linear, reduction, at_once)
    if reduction == "none":
        y = y if kept is None else y.new_zeros(target.numel()).index_put((kept,), y)
        y = y.view(target.shape)
    return y.to(result_dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss in the dtype of the arithmetic; gradients of input, linear_weight and linear_bias, chunk by chunk."""

    @staticmethod
    def forward(ctx, x, w, bias, target, loss, linear, reduction, at_once):
        asked = [at_once and each is not None and each.requires_grad for each in (x, w, bias)]
        y, totals, gradients = forward(x, w, bias, target, loss, linear, reduction, asked)
        ctx.gradients = gradients
        # In fp16 what a mean divides would vanish, where a scaled loss would have kept it: divided later.
        ctx.late = None
        if gradients is not None and divides_late(x, loss):  # of nothing but ignored targets there is a gradient, of 0
            ctx.late = 1.0 / torch.where(totals[1].sum() == 0, 1.0, totals[0].sum())
        if ctx.late is not None and loss.lse_square_scale and loss.weight is not None:
            ctx.gradients = None  # loss and z-loss are divided by totals of their own
        ctx.how = loss, linear, reduction
        ctx.save_for_backward(x, w, bias, target, totals)
        return y

    @staticmethod
    def backward(ctx, dy):
        loss, linear, reduction = ctx.how
        x, w, bias, target, totals = ctx.saved_tensors
        asked = list(ctx.needs_input_grad[:3])
        nothing = (None,) * 5
        if torch.is_grad_enabled():
            return *_differentiable(x, w, bias, target, loss, reduction, dy, asked), *nothing
        if batched(dy):
            found = torch.ops.fused_softmax.linear_cross_entropy_backward.default(
                dy, x, w, target, bias, loss.weight, loss.ignore_index, reduction, loss.label_smoothing, loss.softcap,
                loss.scale, loss.lse_square_scale, linear.chunk_size, "fp32" if linear.accumulate else "input", asked,
            )  # fmt: skip
            return *[each if wanted else None for each, wanted in zip(found, asked, strict=True)], *nothing
        if ctx.gradients is not None:
            # Given away: whoever has them may change them, and a second backward computes them again.
            gradients, ctx.gradients = ctx.gradients, None
            return *gradients.times(dy if ctx.late is None else dy * ctx.late), *nothing
        return *backward(x, w, bias, target, totals, loss, linear, reduction, dy, asked), *nothing


def forward(x, w, bias, target, loss, linear, reduction, asked):
    """(loss in the dtype of the arithmetic, totals of a mean, gradients that are asked for or None)."""
    dtype = arithmetic_of(x)
    totals = totals_of(target, loss, w.shape[0], dtype) if loss.mean else None
    late = any(asked) and divides_late(x, loss)
    gradients = None
    # What is divided late may be more than fp16 holds, and by classes nothing wider holds the weight's gradient.
    if asked[1] and not late and goes_by_classes(x, w, linear.chunk_size):
        wide = dtype if linear.accumulate else x.dtype
        of_rows, z_of_rows, made = by_classes(
            x, w, bias, target, loss, totals, linear.chunk_size * len(w), wide, asked
        )  # fmt: skip
        gradients = Gradients(x, w, bias, linear, asked, made=made)
    else:
        values, z = [], []
        gradients = Gradients(x, w, bias, linear, asked, wide=late) if any(asked) else None
        for start, logits in chunks(x, w, bias, linear):
            stop = start + len(logits)
            rows = cross_entropy_forward(
                logits, target[start:stop], replace(loss, mean=loss.mean and not late), None if late else totals,
                None if gradients is None else logits,
            )  # fmt: skip
            values.append(rows.loss)
            z.append(rows.z)
            if gradients is not None:
                gradients.add(start, logits)
        of_rows = torch.cat(values)
        z_of_rows = torch.cat(z) if loss.lse_square_scale else None  # type: ignore[arg-type]
    if reduction == "none":
        y = of_rows.view(-1) if z_of_rows is None else of_rows.view(-1) + z_of_rows
    else:
        y, _ = finish(Rows(of_rows, of_rows, of_rows, z_of_rows), totals, loss, dtype)
    return y, totals, gradients


def backward(x, w, bias, target, totals, loss, linear, reduction, dy, asked):
    """The gradients that are asked for, the logits made again."""
    gradients = Gradients(x, w, bias, linear, asked)
    for start, logits in chunks(x, w, bias, linear):
        part = target[start : start + len(logits)]
        rows = cross_entropy_forward(logits, part, loss, totals)
        dy_rows = dy if reduction != "none" else dy[start : start + len(logits)]
        cross_entropy_backward(logits, part, rows.m, rows.ls, loss, totals=totals, dy=dy_rows, dx=logits)
        gradients.add(start, logits)
    return gradients.times(None)


def divides_late(x: Tensor, loss: Loss) -> bool:
    return x.dtype == torch.float16 and loss.mean


def linear_of(x: Tensor, w: Tensor, chunk_size: int | None, accumulate: str, of_weight: bool) -> Linear:
    """of_weight: whether the gradient of w is asked for: several chunks need an accumulator for it, one does not."""
    if chunk_size is None:
        row_bytes = w.shape[0] * x.element_size()
        fits = _CHUNK_BYTES // row_bytes
        chunk_size = max(fits // _CHUNK_ROWS * _CHUNK_ROWS, min(fits, _CHUNK_ROWS), 1)
        if of_weight and accumulate == "fp32" and x.dtype == torch.bfloat16:
            # Several take a chunk and two gradients' bytes; in the end, their rounded sum beside them, three.
            w_bytes = w.numel() * x.element_size()
            at_once = max(_CHUNK_BYTES + w_bytes, 2 * w_bytes)
            chunk_size = len(x) if len(x) * row_bytes <= at_once else chunk_size
        equal = -(-len(x) // max(-(-len(x) // chunk_size), 1))
        chunk_size = min(chunk_size, -(-equal // _CHUNK_ROWS) * _CHUNK_ROWS)
    return Linear(min(chunk_size, len(x)), accumulate == "fp32")


def chunks(x: Tensor, w: Tensor, bias: Tensor | None, linear: Linear):
    """(first row, logits [rows, n_classes]) of each chunk, all in one buffer."""
    buffer = torch.empty(linear.chunk_size, w.shape[0], dtype=x.dtype, device=x.device)
    for start in range(0, len(x), linear.chunk_size):
        rows = x[start : start + linear.chunk_size]
        logits = buffer[: len(rows)]
        if bias is None:
            torch.mm(rows, w.t(), out=logits)
        else:
            torch.addmm(bias, rows, w.t(), out=logits)
        yield start, logits


class Gradients:
    """Those of input, linear_weight and linear_bias that are asked for, by the gradients of chunks of logits."""

    def __init__(
        self, x: Tensor, w: Tensor, bias: Tensor | None, linear: Linear, asked: list[bool], wide=False,
        made: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    ):  # fmt: skip
        """made: those that are there already.

        wide: sums over rows are of the dtype of the arithmetic, for they may be more than the input's holds.
        """
        self.x, self.w, self.bias = x.detach(), w.detach(), bias
        self.asked, self.linear = asked, linear
        several = len(x) > linear.chunk_size
        self.dtype = arithmetic_of(x) if wide or (linear.accumulate and several) else x.dtype
        self.dx, self.dw, self.db = made

    def add(self, start: int, dlogits: Tensor) -> None:
        stop = start + len(dlogits)
        if self.asked[0]:
            if self.dx is None:
                self.dx = torch.empty(self.x.shape, dtype=self.x.dtype, device=self.x.device)
            torch.mm(dlogits, self.w, out=self.dx[start:stop])
        if self.asked[1]:
            self.dw = add_product(self.dw, dlogits.t(), self.x[start:stop], self.dtype)
        if self.asked[2]:
            db = dlogits.sum(0, dtype=arithmetic_of(dlogits))
            self.db = db if self.db is None else self.db.add_(db)

    def times(self, factor: Tensor | None) -> list[Tensor | None]:
        """The gradients, in the dtypes of what they are of, times a factor of one element."""
        found: list[Tensor | None] = []
        for gradient, of in ((self.dx, self.x), (self.dw, self.w), (self.db, self.bias)):
            if gradient is not None and gradient.dtype == of.dtype:  # type: ignore[union-attr]
                gradient = gradient if factor is None else multiply(gradient, factor)
            elif gradient is not None:
                rounded = torch.empty(gradient.shape, dtype=of.dtype, device=of.device)  # type: ignore[union-attr]
                one = gradient.new_ones(()) if factor is None else factor
                gradient = torch.mul(gradient, one, out=rounded)  # read and written once
            found.append(gradient)
        return found


def _differentiable(x, w, bias, target, loss, reduction, dy, asked):
    """The same of torch's operations, for a second derivative."""
    logits = torch.nn.functional.linear(x, w, bias)
    y = reference.cross_entropy(
        logits, target, loss.weight, loss.ignore_index, reduction, loss.label_smoothing, softcap=loss.softcap,
        scale=loss.scale, lse_square_scale=loss.lse_square_scale, dtype=arithmetic_of(x), arithmetic=arithmetic_of(x),
    )[0]  # fmt: skip
    inputs = [each for each, wanted in zip((x, w, bias), asked, strict=True) if wanted]
    found = iter(torch.autograd.grad(y, inputs, dy, create_graph=True))
    return [next(found) if wanted else None for wanted in asked]


def _check_linear(input, linear_weight, linear_bias, chunk_size, accumulate):
    name = "linear_cross_entropy"
    for argument, tensor in (("input", input), ("linear_weight", linear_weight)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: {argument} must be a Tensor, not {type(tensor).__name__}")
    if input.ndim == 0 or linear_weight.ndim != 2 or linear_weight.shape[1] != input.shape[-1]:
        raise ValueError(
            f"{name}: linear_weight must have shape [n_classes, in_features] for input of shape {tuple(input.shape)}, "
            f"got {tuple(linear_weight.shape)}"
        )
    if linear_bias is not None and not isinstance(linear_bias, Tensor):
        raise TypeError(f"{name}: linear_bias must be a Tensor, not {type(linear_bias).__name__}")
    if linear_bias is not None and tuple(linear_bias.shape) != (linear_weight.shape[0],):
        raise ValueError(
            f"{name}: linear_bias must have shape ({linear_weight.shape[0]},), got {tuple(linear_bias.shape)}"
        )
    for argument, tensor in (("linear_weight", linear_weight), ("linear_bias", linear_bias)):
        if tensor is not None and tensor.device != input.device:
            raise RuntimeError(f"{name}: {argument} must be on the input's device {input.device}, got {tensor.device}")
        if tensor is not None and tensor.dtype != input.dtype and not torch.is_autocast_enabled(input.device.type):
            raise RuntimeError(f"{name}: {argument} must be of the input's dtype {input.dtype}, got {tensor.dtype}")
    if chunk_size is not None and (not isinstance(chunk_size, int) or isinstance(chunk_size, bool)):
        raise TypeError(f"{name}: chunk_size must be an int, not {type(chunk_size).__name__}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"{name}: chunk_size must be at least 1, got {chunk_size}")
    if accumulate not in ("fp32", "input"):
        raise ValueError(f'{name}: accumulate must be "fp32" or "input", got {accumulate!r}')
