"""Cross-entropy of logits, whose class dim is 1, with class indices or probabilities.

loss = -sum_c w_c q_c (z_c - lse),  z = x * scale, or softcap * tanh(x * scale / softcap),  lse = log sum exp z.
Traffic: reduction mean or sum with a gradient reads the logits once and writes it once, in the forward pass (2MN);
none reads them twice and writes once (3MN); without a gradient they are read once (MN).
"""

import math
import os
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from fused_softmax import reference
from fused_softmax.ops.arguments import DTYPES, batched, needs_grad, runs_here, traced_whole
from fused_softmax.ops.cross_entropy_backward import cross_entropy_backward, multiply
from fused_softmax.ops.cross_entropy_forward import cross_entropy_forward
from fused_softmax.ops.losses import Loss, Rows, arithmetic_of, finish, totals_of

_INDICES = (torch.int64, torch.int32, torch.uint8)
_CHECK = os.environ.get("FUSED_SOFTMAX_CHECK") == "1"


class TokenStats(NamedTuple):
    """Of every target, in their shape and without gradients; 0 and False where it is ignored.

    Its loss, the entropy of its row in nats, the likeliest class, and whether that is the target.
    """

    loss: Tensor
    entropy: Tensor
    predicted: Tensor
    correct: Tensor


class CrossEntropyOutput(NamedTuple):
    """The loss, and what else was asked for; None what was not."""

    loss: Tensor
    lse: Tensor | None = None
    z_loss: Tensor | None = None
    token_stats: TokenStats | None = None


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    softcap: float | None = None,
    scale: float | None = None,
    lse_square_scale: float = 0.0,
    return_lse: bool = False,
    return_z_loss: bool = False,
    return_token_stats: bool = False,
    inplace_backward: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor | CrossEntropyOutput:
    """torch.nn.functional.cross_entropy, with the same results, and more that training asks for.

    input: logits [n_classes], [n, n_classes] or [n, n_classes, d1, ...]; float32, float16, bfloat16 or float64.
    target: class indices of the input's shape without its class dim, of int64, int32 or uint8; or probabilities of the
        input's shape and a float dtype. An index that is no class and not ignore_index makes its loss, its row of the
        gradient and so a sum or mean NaN; with FUSED_SOFTMAX_CHECK=1 in the environment it raises IndexError.
    weight: [n_classes], what each class counts; a mean divides by what its targets count.
    ignore_index: the target that counts nothing; of indices alone.
    reduction: "mean", "sum" or "none". With a gradient, mean and sum write it in the forward pass; but of float16
        logits it is made in the backward pass, where what scales the loss is known.
    label_smoothing: in [0, 1]: how much of the target is spread over all classes.
    scale, softcap: the logits are input * scale, and then softcap * tanh(of that / softcap).
    lse_square_scale: adds lse_square_scale * lse ** 2 of every target to its loss (z-loss); a mean divides it by the
        number of targets that count.
    return_lse: adds lse, float32 or the input's float64, in the targets' shape, with its gradient.
    return_z_loss: adds the z-loss that is in the loss, reduced alike, with its gradient.
    return_token_stats: adds TokenStats, of the same pass over the logits; the gradient then takes a second one.
    inplace_backward: with mean or sum, writes the gradient over the logits and allocates nothing; they are then lost to
        everybody, and there is one backward and no second derivative. Compiled code allocates it all the same.
    dtype: of the loss; the input's if None, as torch. float32 keeps the loss of half precision logits exact.

    Returns the loss, [] or of the targets' shape; a CrossEntropyOutput if more was asked for.
    Raises TypeError, ValueError or RuntimeError as torch for arguments that do not fit, naming the argument.

    >>> cross_entropy(torch.tensor([[0.0, 1.0, 2.0]], device="cuda"), torch.tensor([2], device="cuda"))
    tensor(0.4076, device='cuda:0')
    """
    _check(input, target, weight, ignore_index, reduction, label_smoothing, softcap, scale, lse_square_scale, dtype)
    more = return_lse or return_z_loss or return_token_stats
    scale = 1.0 if scale is None else float(scale)
    result_dtype = dtype or input.dtype
    if input.is_cuda and dtype is None and torch.is_autocast_enabled("cuda") and input.dtype != torch.float64:
        result_dtype = torch.float32
    tensors = [each for each in (input, target, weight) if each is not None]
    takes = input.dtype in DTYPES and result_dtype in DTYPES and not target.is_floating_point() and scale != 0
    takes = takes and input.numel() > 0 and target.numel() > 0
    if not takes or not runs_here(*tensors):
        if takes and traced_whole(*tensors):
            return _traced(
                input, target, weight, ignore_index, reduction, label_smoothing, softcap, scale, lse_square_scale,
                result_dtype, return_lse, return_z_loss, return_token_stats,
            )  # fmt: skip
        plain = scale == 1 and softcap is None and not lse_square_scale and not more and dtype is None
        if plain and target.dtype != torch.int32 and not (input.is_cuda and target.is_floating_point()):
            return torch.nn.functional.cross_entropy(
                input, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
            )
        return _composed(
            input, target, weight, ignore_index, reduction, label_smoothing, softcap, scale, lse_square_scale,
            result_dtype, return_lse, return_z_loss, return_token_stats,
        )  # fmt: skip
    if _CHECK:
        _check_targets(target, input.shape[0 if input.ndim == 1 else 1], ignore_index)
    rows = _rows_of(input)
    if rows.stride(-1) != 1 and rows.shape[-1] > 1:
        rows = rows.contiguous()
    loss = Loss(
        None if weight is None else weight.detach().to(arithmetic_of(input)).contiguous(), ignore_index,
        reduction == "mean", label_smoothing, softcap, scale, lse_square_scale, return_token_stats,
    )  # fmt: skip
    # Of fp16, what loss scaling would have kept is lost before the scaled loss comes back.
    at_once = needs_grad(input) and reduction != "none" and not return_token_stats
    at_once = at_once and (input.dtype != torch.float16 or inplace_backward)
    inplace_backward = inplace_backward and reduction != "none" and needs_grad(input)
    if inplace_backward:
        if input.is_leaf:
            raise RuntimeError(
                "cross_entropy: inplace_backward overwrites the logits, and these are a leaf that requires grad"
            )
        alone = len(rows) == 1 or rows.stride(0) >= rows.shape[1]  # and not one memory for several rows
        if rows.data_ptr() != input.data_ptr() or not alone or return_token_stats:
            raise RuntimeError(
                "cross_entropy: inplace_backward takes logits [n, n_classes] of contiguous rows, without token stats"
            )
    y, lse, z, *stats = _CrossEntropy.apply(
        rows, target.reshape(-1).contiguous(), loss, reduction, result_dtype, return_lse, return_z_loss,
        inplace_backward, at_once,
    )  # fmt: skip
    return _output(y, lse, z if return_z_loss else None, stats if return_token_stats else [], target, reduction)


def _traced(
    input, target, weight, ignore_index, reduction, label_smoothing, softcap, scale, lse_square_scale, result_dtype,
    return_lse, return_z_loss, return_token_stats,
):  # fmt: skip
    """One operator of `library_losses`, which has no place for a gradient over the logits: it gets one of its own."""
    y, z, m, ls, *stats = torch.ops.fused_softmax.cross_entropy.default(
        _rows_of(input), target.reshape(-1), weight, ignore_index, reduction, float(label_smoothing),
        None if softcap is None else float(softcap), scale, float(lse_square_scale), result_dtype, return_token_stats,
    )  # fmt: skip
    lse = m + ls if return_lse else None
    return _output(y, lse, z if return_z_loss else None, stats if return_token_stats else [], target, reduction)


def _rows_of(input: Tensor) -> Tensor:
    if input.ndim == 1:
        return input.unsqueeze(0)
    return input if input.ndim == 2 else input.movedim(1, -1).flatten(0, -2)


def _output(y, lse, z, stats, target, reduction):
    """What the caller asked for, in the shape of the targets."""
    if reduction == "none":
        y, z = y.view(target.shape), None if z is None else z.view(target.shape)
    if lse is None and z is None and not stats:
        return y
    token_stats = TokenStats(*(each.view(target.shape) for each in stats)) if stats else None
    return CrossEntropyOutput(y, None if lse is None else lse.view(target.shape), z, token_stats)


class _CrossEntropy(torch.autograd.Function):
    """(loss, lse, z-loss, statistics) of rows; the gradient of a sum or mean is there when the loss is."""

    @staticmethod
    def forward(ctx, x, target, loss, reduction, result_dtype, return_lse, return_z_loss, inplace_backward, at_once):
        ctx.set_materialize_grads(False)
        totals = totals_of(target, loss, x.shape[1], arithmetic_of(x)) if loss.mean else None
        dx = None
        if at_once:
            dx = x if inplace_backward else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        ctx.dx, ctx.used = dx, False
        plain = reduction == "none" and not loss.stats and not loss.lse_square_scale
        rows = cross_entropy_forward(x, target, loss, totals, dx, dtype=result_dtype if plain else None)
        if inplace_backward:
            ctx.mark_dirty(x)
        ctx.how = loss, reduction, result_dtype
        ctx.save_for_backward(None if inplace_backward else x, target, totals, rows.m, rows.ls)
        if reduction == "none":
            y, z = rows.loss.view(-1), rows.z
            y = (y if z is None else y + z).to(result_dtype)
            z = None if z is None else z.to(result_dtype)
        else:
            y, z = finish(rows, totals, loss, result_dtype)
        lse = rows.m + rows.ls if return_lse else None
        if return_z_loss and z is None:
            z = torch.zeros_like(y)
        stats = stats_of(rows, target, loss)
        if stats:
            ctx.mark_non_differentiable(*stats)
        return y, lse, z, *stats, *([x] if inplace_backward else [])

    @staticmethod
    def backward(ctx, dy, dlse=None, dz=None, *_):
        loss, reduction, _ = ctx.how
        nothing = (None,) * 8
        if dy is None and dlse is None and dz is None:
            return None, *nothing
        x, target, totals, m, ls = ctx.saved_tensors
        alone = dlse is None and dz is None
        if torch.is_grad_enabled():
            if x is None:
                raise RuntimeError("cross_entropy: inplace_backward leaves no logits for a second derivative")
            return _differentiable_gradient(x, target, loss, reduction, dy, dlse, dz), *nothing
        if x is not None and batched(dy, dlse, dz):
            return _one_by_one(x, target, m, ls, loss, reduction, dy, dlse, dz), *nothing
        if ctx.dx is not None and alone:
            # Given away: whoever has it may change it, and a second backward computes it again.
            dx, ctx.dx = ctx.dx, None
            return multiply(dx, dy), *nothing
        if x is None:
            raise RuntimeError("cross_entropy: inplace_backward has one backward, of the loss alone")
        zero = torch.zeros((), dtype=m.dtype, device=m.device)
        dy = zero if dy is None else dy
        total_dz = None if dz is None else dy + dz
        return cross_entropy_backward(x, target, m, ls, loss, totals=totals, dy=dy, dz=total_dz, dlse=dlse), *nothing


def _one_by_one(x, target, m, ls, loss, reduction, dy, dlse, dz):
    """The gradients of a batch, each by the operator, which PyTorch calls for one after the other."""
    return torch.ops.fused_softmax.cross_entropy_backward.default(
        x, target, m, ls, dy, dz, dlse, loss.weight, loss.ignore_index, reduction, loss.label_smoothing, loss.softcap,
        loss.scale, loss.lse_square_scale,
    )  # fmt: skip


def stats_of(rows: Rows, target: Tensor, loss: Loss) -> list[Tensor]:
    """Those of TokenStats, of targets [n], or nothing if `loss` does not ask for them."""
    if rows.entropy is None or rows.predicted is None:
        return []
    counts = target.long() != loss.ignore_index  # of uint8, -100 would be 156
    entropy, predicted = rows.entropy.masked_fill(~counts, 0.0), rows.predicted.masked_fill(~counts, 0)
    return [rows.loss.view(-1).clone(), entropy, predicted, (rows.predicted == target) & counts]


def _differentiable_gradient(x, target, loss, reduction, dy, dlse, dz):
    """The same of torch's operations, for a second derivative."""
    y, lse, z = reference.cross_entropy(
        x, target, loss.weight, loss.ignore_index, reduction, loss.label_smoothing, softcap=loss.softcap,
        scale=loss.scale, lse_square_scale=loss.lse_square_scale, dtype=arithmetic_of(x), arithmetic=arithmetic_of(x),
    )  # fmt: skip
    pairs = [(y, dy), (lse, dlse), (z, dz)]
    outputs, gradients = zip(*[(o, g.to(o.dtype)) for o, g in pairs if g is not None], strict=True)
    return torch.autograd.grad(outputs, x, gradients, create_graph=True)[0]


def _composed(
    input, target, weight, ignore_index, reduction, label_smoothing, softcap, scale, lse_square_scale, result_dtype,
    return_lse, return_z_loss, return_token_stats,
):  # fmt: skip
    """Of torch's operations: on devices without kernels, for probabilities, and under functorch's transforms."""
    arithmetic = torch.float64 if torch.float64 in (input.dtype, result_dtype) else torch.float32
    options = {"softcap": softcap, "scale": scale, "lse_square_scale": lse_square_scale, "arithmetic": arithmetic}
    call = input, target, weight, ignore_index
    loss, lse, z = reference.cross_entropy(*call, reduction, label_smoothing, dtype=result_dtype, **options)
    if not (return_lse or return_z_loss or return_token_stats):
        return loss
    stats = None
    if return_token_stats:
        with torch.no_grad():
            class_dim = 0 if input.ndim == 1 else 1
            of_tokens = reference.cross_entropy(*call, "none", label_smoothing, dtype=arithmetic, **options)[0]
            z_of_tokens = reference.cross_entropy(*call, "none", label_smoothing, dtype=arithmetic, **options)[2]
            logits = input.to(arithmetic) * scale
            logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            p = torch.softmax(logits, class_dim)
            entropy = lse - torch.where(p == 0, 0.0, p * logits).sum(class_dim)
            predicted = logits.argmax(class_dim)
            if target.is_floating_point():
                counts, best = torch.ones_like(predicted, dtype=torch.bool), target.argmax(class_dim)
            else:
                counts, best = target.long() != ignore_index, target
            stats = TokenStats(
                of_tokens - z_of_tokens if lse_square_scale else of_tokens, entropy.masked_fill(~counts, 0.0),
                predicted.masked_fill(~counts, 0), (predicted == best) & counts,
            )  # fmt: skip
    return CrossEntropyOutput(loss, lse if return_lse else None, z if return_z_loss else None, stats)


def _check_targets(target: Tensor, n_classes: int, ignore_index: int) -> None:
    flat = target.reshape(-1).long()
    wrong = (flat != ignore_index) & ((flat < 0) | (flat >= n_classes))
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise IndexError(f"cross_entropy: target {int(flat[row])} of row {row} is out of range [0, {n_classes - 1}]")


def _check(input, target, weight, ignore_index, reduction, label_smoothing, softcap, scale, lse_square_scale, dtype):
    name = "cross_entropy"
    for argument, tensor in (("input", input), ("target", target)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: {argument} must be a Tensor, not {type(tensor).__name__}")
        if tensor.is_nested or tensor.layout != torch.strided:
            raise RuntimeError(f"{name}: {argument} must be a dense strided tensor, got {tensor.layout}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'{name}: reduction must be "mean", "sum" or "none", got {reduction!r}')
    if not input.is_floating_point():
        raise NotImplementedError(f"{name}: input must be of a float dtype, got {input.dtype}")
    if input.ndim == 0:
        raise (RuntimeError if target.ndim == 0 else ValueError)(f"{name}: input must have a class dim, got shape ()")
    shape = tuple(input.shape)
    n_classes = shape[0] if len(shape) == 1 else shape[1]
    of_targets = () if len(shape) == 1 else (shape[0], *shape[2:])
    if target.is_floating_point():
        if tuple(target.shape) != shape:
            raise RuntimeError(
                f"{name}: target of probabilities must have the input's shape {shape}, got {tuple(target.shape)}"
            )
    elif target.dtype not in _INDICES:
        raise (NotImplementedError if target.is_cuda else RuntimeError)(  # as torch
            f"{name}: target must be of int64, int32 or uint8, or of probabilities, got {target.dtype}"
        )
    elif tuple(target.shape) != of_targets:
        # torch's types of error: of the batch, and of what follows it.
        batches = input.ndim < 3 or target.ndim == 0 or target.shape[0] != shape[0]
        raise (ValueError if batches else RuntimeError)(
            f"{name}: target must have shape {of_targets} for input of shape {shape}, got {tuple(target.shape)}"
        )
    if target.device != input.device:
        raise RuntimeError(f"{name}: target must be on the input's device {input.device}, got {target.device}")
    if weight is not None:
        if not isinstance(weight, Tensor):
            raise TypeError(f"{name}: weight must be a Tensor, not {type(weight).__name__}")
        if tuple(weight.shape) != (n_classes,):
            raise RuntimeError(
                f"{name}: weight must have shape ({n_classes},), one of every class, got {tuple(weight.shape)}"
            )
        if weight.device != input.device:
            raise RuntimeError(f"{name}: weight must be on the input's device {input.device}, got {weight.device}")
        if not weight.is_floating_point():
            raise RuntimeError(f"{name}: weight must be of a float dtype, got {weight.dtype}")
    if not isinstance(ignore_index, int) or isinstance(ignore_index, bool):
        raise TypeError(f"{name}: ignore_index must be an int, not {type(ignore_index).__name__} ({ignore_index!r})")
    for argument, value in (("label_smoothing", label_smoothing), ("lse_square_scale", lse_square_scale)):
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name}: {argument} must be a number, not {type(value).__name__} ({value!r})")
    if not 0.0 <= label_smoothing <= 1.0:
        raise RuntimeError(f"{name}: label_smoothing must be in [0, 1], got {label_smoothing}")
    for argument, value in (("softcap", softcap), ("scale", scale)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, Real)):
            raise TypeError(f"{name}: {argument} must be a number, not {type(value).__name__} ({value!r})")
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{name}: {argument} must be finite, got {value}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"{name}: softcap must be more than 0, got {softcap}")
    if dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
        raise TypeError(f"{name}: dtype must be a float torch.dtype, got {dtype!r}")
