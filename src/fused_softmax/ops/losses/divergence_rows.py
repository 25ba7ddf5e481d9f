"""The divergences of rows of a student and of a teacher, the cross-entropy of probabilities, and their gradients."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_softmax.core.calls import find
from fused_softmax.core.checks import DTYPES, arithmetic_of
from fused_softmax.core.launch import together
from fused_softmax.core.launched import Call, Launched, compose
from fused_softmax.core.no_gradient import saved_of, unpacked
from fused_softmax.core.route import apart, batched, needs_grad, resolved
from fused_softmax.ops.losses import reference
from fused_softmax.ops.losses.divergence_launches import (
    GRADIENT,
    OF_PAIR,
    Pair,
    PairRows,
    at_once,
    backward,
    forward,
    gradient_of_rows,
    in_vectors,
    plan_held,
    prepare_at_once,
    prepare_forward,
)
from fused_softmax.ops.losses.options import Divergence, Loss
from fused_softmax.ops.losses.sums import multiply, of_counted, prepare_multiply


def refused(input: Tensor, target: Tensor, options: Divergence) -> str:
    """Why the kernels do not take a call; "" if they do."""
    for dtype in (input.dtype, target.dtype):
        if dtype not in DTYPES or dtype == torch.float64:
            return f"no kernel has {dtype}"
    if options.scale == 0 or options.target_scale == 0:
        return "scale is 0"
    return "" if input.numel() else "there are no logits"


def differentiated(pair: Pair, options: Divergence) -> Tensor:
    """The divergences of rows, float32, with their gradients."""
    return (with_gradient if needs_grad(pair.x, pair.y) else without_gradient)(pair, options, "none", None)


def with_gradient(pair: Pair, options: Divergence, reduction: str, run: Call | None) -> Tensor:
    """The divergences of rows, or their mean or sum, with a gradient.

    run: what was prepared for tensors like these.
    """
    return _apply(*pair, (options, reduction, run))


def without_gradient(pair: Pair, options: Divergence, reduction: str, run: Call | None) -> Tensor:
    """`with_gradient` for tensors that need none."""
    return _reduced(_rows_of(pair, options, run).value, reduction)


class AtOnce(NamedTuple):
    """What `summed` runs: the divergences and gradients of rows, and a student's gradient times a number."""

    rows: Call
    multiply: Call


def prepare_reduced(pair: Pair, options: Divergence, weight: Tensor | None, reduction: str) -> Launched:
    """The divergences of rows like these, or their sum or mean: call(pair, options, weight) -> Tensor, float32.

    weight: of rows.
    """
    at_once = reduction != "none" and is_written_at_once(pair)
    parts = _prepare_summed(pair, options, weight) if at_once else _prepare_rows(pair, options)
    function = with_gradient if needs_grad(pair.x, pair.y) else without_gradient
    way = reduction if weight is None else "none"

    def build(_, *parts):
        run: Any = None if not parts else AtOnce(*parts) if at_once else parts[0]

        def call(pair, options, weight):
            if at_once:
                return summed(pair, options, weight, reduction, run)
            found = function(pair, options, way, run)
            return found if weight is None else reduced(found, weight.reshape(-1), reduction)

        return call

    return compose(build, *parts, n=len(pair.x), by_row=True)


def _prepare_rows(pair: Pair, options: Divergence) -> tuple[Launched, ...]:
    """What runs the kernels on rows like these; nothing where they read copies."""
    of_call = _detached(pair)
    return (prepare_forward(of_call, options, needs_grad(pair.x, pair.y)),) if _in_place(of_call, pair) else ()


def _prepare_summed(pair: Pair, options: Divergence, weight: Tensor | None) -> tuple[Launched, ...]:
    """An AtOnce for rows like these; nothing where kernels read copies."""
    of_call = _detached(pair)
    if not _in_place(of_call, pair):
        return ()
    counts, x = counts_of(pair, weight, "sum")[0], of_call.x
    # Logits stand for a gradient like them: it is as large, and the first call shall not hold it twice.
    dx = x if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    factor = x.new_empty((), dtype=torch.float32)
    return tuple(
        together(
            partial(prepare_at_once, of_call, counts, options, needs_grad(pair.y)),
            partial(prepare_multiply, dx, factor),
        )
    )


def _in_place(of_call: Pair, pair: Pair) -> bool:
    """Whether kernels read the rows themselves, and no copies."""
    return all(a.data_ptr() == b.data_ptr() for a, b in zip(of_call[:2], pair[:2], strict=True))


def reduced(rows: Tensor, weight: Tensor | None, reduction: str) -> Tensor:
    """Rows' divergences, reduced with their weights; a row of weight 0 adds 0."""
    if weight is None:
        return _reduced(rows, reduction)
    w = weight.detach().to(rows.dtype)
    rows = torch.where(w == 0, 0.0, rows) * w
    return rows if reduction == "none" else rows.sum() / w.sum() if reduction == "mean" else rows.sum()


def _rows_of(pair: Pair, options: Divergence, prepared: Call | None) -> PairRows:
    return run(pair, options)[1] if prepared is None else prepared(pair, options.numbers)


def _reduced(value: Tensor, reduction: str) -> Tensor:
    return value if reduction == "none" else value.mean() if reduction == "mean" else value.sum()


def is_written_at_once(pair: Pair) -> bool:
    """Whether `summed` takes rows like these, in the present mode of autograd.

    Not in fp16: gradients would underflow that loss scaling would have kept, before the scaled result comes back.
    """
    if not needs_grad(pair.x, pair.y) or torch.float16 in (pair.x.dtype, pair.y.dtype):
        return False
    return plan_held(pair) is not None


def summed(pair: Pair, options: Divergence, weight: Tensor | None, reduction: str, run: AtOnce | None) -> Tensor:
    """The sum or mean of rows' divergences, float32, whose gradients are written in the same pass.

    weight: of rows. A row of weight 0 adds 0, whatever it holds. run: what was prepared for tensors like these.
    """
    counts, share = counts_of(pair, weight, reduction)
    return _apply_summed(*pair, counts, (options, reduction == "mean", share, run))


def counts_of(pair: Pair, weight: Tensor | None, reduction: str) -> tuple[Tensor | None, float]:
    """(the weights of rows as kernels take them, the factor of all rows in their sum or mean)."""
    if weight is None:
        return None, 1 / pair.x.shape[0] if reduction == "mean" else 1.0
    return weight.detach().resolve_neg().reshape(-1).to(torch.float32).contiguous(), 1.0


def of_mean(counts: Tensor) -> tuple[Tensor, Tensor]:
    """(the factor of each row in a mean by these weights, their sum)."""
    total = counts.sum()
    return torch.where(counts == 0, 0.0, counts / total), total


def sum_of(value: Tensor, counts: Tensor | None, mean: bool, total: Tensor | None) -> Tensor:
    """The sum or mean of rows' divergences. counts, total: as `of_mean` gives them for a mean."""
    if counts is None:
        return value.mean() if mean else value.sum()
    found = torch.where(counts == 0, 0.0, counts * value).sum()
    return found if total is None else torch.where(total == 0, total / total, found)  # NaN of no weight at all


def losses_of(rows: Tensor, lse: Tensor | None, loss: Loss, dtype: torch.dtype) -> tuple[Tensor, Any, Any]:
    """(loss, lse, z-loss) by the cross-entropies of rows; without their lse (loss, None, None)."""
    z: Tensor | None = None
    if lse is not None:
        z = loss.lse_square_scale * lse.square() if loss.lse_square_scale else torch.zeros_like(rows)
        rows = rows + z if loss.lse_square_scale else rows
    if loss.reduction != "none":
        rows, z = (each if each is None else each.mean() if loss.mean else each.sum() for each in (rows, z))  # type: ignore[assignment]
    return rows.to(dtype), lse, None if z is None else z.to(dtype)


def pair_of(x: Tensor, y: Tensor, options: Divergence) -> Pair:
    """Rows with the temperatures of each, as kernels take them."""
    arithmetic = torch.promote_types(arithmetic_of(x), arithmetic_of(y))
    temperature, of_target = (
        of_rows(each.resolve_neg(), arithmetic) if isinstance(each, Tensor) else None
        for each in (options.temperature, options.target_temperature)
    )
    return Pair(x, y, None, temperature, of_target)


def of_rows(temperature: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor | None:
    """Temperatures as kernels take them."""
    return None if temperature is None else temperature.detach().reshape(-1).to(dtype).contiguous()


def with_rows(options: Divergence, pair: Pair) -> Divergence:
    """With the temperatures of rows, where there are any."""
    if pair.temperature is not None:
        options = replace(options, temperature=pair.temperature)
    if pair.target_temperature is not None:
        options = replace(options, target_temperature=pair.target_temperature)
    return options


def _in_vectors(pair: Pair) -> Pair:
    return pair._replace(x=in_vectors(pair.x, pair.y), y=in_vectors(pair.y, pair.x))


def _detached(pair: Pair) -> Pair:
    return _in_vectors(pair._replace(x=pair.x.detach(), y=pair.y.detach()))


def run(pair: Pair, options: Divergence) -> tuple[Pair, PairRows]:
    """(the tensors as kernels took them, what is known of their rows)."""
    pair = _detached(pair)
    return pair, forward(pair, options)


def gradients(
    pair: Pair, rows: PairRows, dvalue: Tensor, options: Divergence, of_target: bool = False, dx: Tensor | None = None,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The gradients by the kernels: of the student's rows; if wanted of the teacher's rows.

    dx: where the first is written; it may be the student's rows, and the pair must be as kernels take it. None: a new
    tensor.
    dlse: the incoming gradient of the lse of rows of "cross", if there is one.
    """
    of_rows, g = rows, dvalue
    if dlse is not None:
        of_rows, g = _beside_lse(rows, dvalue, dlse)
    dx, dy = backward(_in_vectors(pair) if dx is None else pair, of_rows, g, options, of_target, dx)
    if dy is not None and dlse is not None:  # in which the lse has no part
        alone = dvalue == 0
        dy.mul_(torch.where(alone, 1.0, dvalue / g).unsqueeze(1)).masked_fill_(alone.unsqueeze(1), 0.0)
    return dx, dy


_LEAST = 2.0**-60  # a share of an lse's gradient that is rounded away beside it


def _beside_lse(rows: PairRows, g: Tensor, h: Tensor) -> tuple[PairRows, Tensor]:
    """(rows, their incoming gradient), changed so that the kernel's gradient has the part of the lse in it.

    dz = g (total q - p) + h q = g ((total + h / g) q - p). Where g is negligible beside h, so small a share of h
    replaces it that the part of p is rounded away.
    """
    g, h = g.to(torch.float32), h.to(torch.float32)
    g = torch.where(g.abs() < h.abs() * _LEAST, h * _LEAST, g)
    return rows._replace(total=rows.total + torch.where(g == 0, 0.0, h / g)), g


def with_lse(pair: Pair, options: Divergence) -> tuple[Tensor, Tensor]:
    """(the cross-entropies of rows by probabilities, their lse), float32, both with gradients."""
    if needs_grad(pair.x, pair.y):
        return _WithLse.apply(*pair, options)
    rows = run(pair, options)[1]
    return rows.value, rows.m + rows.ls


class _Divergence(torch.autograd.Function):
    """The divergences of rows [n, n_classes], or their mean or sum, float32."""

    @staticmethod
    def forward(ctx, x, y, weight, temperature, target_temperature, how):
        ctx.options, ctx.reduction, prepared = how
        pair = Pair(x, y, weight, temperature, target_temperature)
        rows = _rows_of(pair, ctx.options, prepared)
        # Without the values, which a caller may change in place.
        ctx.save_for_backward(*pair, rows.m, rows.ls, rows.m_t, rows.ls_t, None, rows.total)
        return _reduced(rows.value, ctx.reduction)

    @staticmethod
    def backward(ctx, dvalue):
        saved: tuple[Any, ...] = unpacked(ctx, "divergence")
        if not ctx.needs_input_grad[1] and not torch.is_grad_enabled() and not batched(dvalue):
            dx = _found_gradient(ctx, saved, dvalue)
            if dx is not None:
                return dx, None, None, None, None, None
        (dvalue,) = resolved(dvalue)
        x, y, *others = resolved(*saved)
        # Hooks of saved tensors may return other strides.
        others = [each if each is None else each.contiguous() for each in others]
        pair, rows = Pair(x, y, *others[: OF_PAIR - 2]), PairRows(*others[OF_PAIR - 2 :])
        dvalue = _of_each(dvalue, ctx.reduction, len(pair.x))
        wanted = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled() or batched(dvalue):
            dx, dy = differentiable_gradient(pair, ctx.options, dvalue, wanted=wanted)
        else:
            dx, dy = gradients(pair, rows, dvalue, ctx.options, of_target=wanted[1])
        return dx, dy, None, None, None, None


def _of_each(dvalue: Tensor, reduction: str, n: int) -> Tensor:
    """The gradient of each row's divergence, from that of their mean or sum."""
    if reduction == "none":
        return dvalue
    return (dvalue / n if reduction == "mean" else dvalue).expand(n)


def _found_gradient(ctx, saved: tuple, dvalue: Tensor) -> Tensor | None:
    """The gradient by a kept call, with little Python, which takes long in autograd's thread; None if none is kept."""
    x, y, weight, temperature, target_temperature, *of_rows = saved
    for each in of_rows:  # no guard looks at what hooks of saved tensors return
        if each is not None and (each.is_neg() or not each.is_contiguous()):
            return None
    if dvalue.is_neg():
        return None
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    options, pair = ctx.options, Pair(x, y, weight, temperature, target_temperature)
    call = find(GRADIENT, options.key, *pair, dx, None)
    if call is None:
        return None
    dvalue = gradient_of_rows(_of_each(dvalue, ctx.reduction, x.shape[0]))
    call(pair, PairRows(*of_rows), dvalue, dx, None, options.numbers)
    return dx


class _WithLse(torch.autograd.Function):
    """(the cross-entropies of rows [n, n_classes], their lse), float32."""

    @staticmethod
    def forward(ctx, x, y, weight, temperature, target_temperature, options):
        ctx.set_materialize_grads(False)
        pair = Pair(x, y, weight, temperature, target_temperature)
        rows, ctx.options = run(pair, options)[1], options
        ctx.save_for_backward(*pair, rows.m, rows.ls, rows.total)
        return rows.value, rows.m + rows.ls

    @staticmethod
    def backward(ctx, dvalue, dlse):
        nothing, wanted = (None,) * 4, ctx.needs_input_grad[:2]
        if dvalue is None and dlse is None:
            return None, None, *nothing
        x, y, *others = saved_of(ctx, "cross_entropy")
        # Hooks of saved tensors may return other strides.
        saved: list[Any] = [each if each is None else each.contiguous() for each in others]
        *of_pair, m, ls, total = saved
        pair, rows = Pair(x, y, *of_pair), PairRows(m, ls, None, None, None, total)
        dvalue, dlse = resolved(torch.zeros_like(m) if dvalue is None else dvalue, dlse)
        if torch.is_grad_enabled() or batched(dvalue, dlse):
            return *differentiable_gradient(pair, ctx.options, dvalue, wanted=wanted, dlse=dlse), *nothing
        dx, dy = gradients(pair, rows, dvalue, ctx.options, of_target=wanted[1], dlse=dlse)
        return dx if wanted[0] else None, dy, *nothing


class _Summed(torch.autograd.Function):
    """The sum or mean of the divergences of rows [n, n_classes]. The gradient is made together with it."""

    @staticmethod
    def forward(ctx, x, y, weight, temperature, target_temperature, counts, how):
        options, mean, share, run = how
        pair, total = Pair(x, y, weight, temperature, target_temperature), None
        if mean and counts is not None:
            counts, total = of_mean(counts)
        if run is None:
            value, *ctx.gradients = at_once(_detached(pair), counts, share, options, ctx.needs_input_grad[1])
        else:
            value, *ctx.gradients = run.rows(pair, counts, (*options.numbers, share))
        of_x_alone = run is not None and counts is None and not ctx.needs_input_grad[1]
        ctx.how, ctx.multiply = (options, share), run.multiply if of_x_alone else None
        ctx.save_for_backward(x, y, weight, temperature, target_temperature, counts)
        return sum_of(value, counts, mean, total)

    @staticmethod
    def backward(ctx, dresult):
        (dresult,) = resolved(dresult)
        if ctx.multiply is not None and ctx.gradients and not torch.is_grad_enabled() and not batched(dresult):
            (dx, _), ctx.gradients = ctx.gradients, None
            ctx.multiply(dx, dresult)
            return dx, None, None, None, None, None, None
        x, y, *others = saved_of(ctx, "divergence")
        # Hooks of saved tensors may return other strides.
        *others, counts = (each if each is None else each.contiguous() for each in others)
        pair, (options, share), wanted = Pair(x, y, *others), ctx.how, ctx.needs_input_grad[:2]
        if torch.is_grad_enabled() or batched(dresult):
            of_rows = (dresult * share).expand(len(x)) if counts is None else counts * dresult
            return *differentiable_gradient(pair, options, of_rows, wanted=wanted), *[None] * 5
        # Given away: whoever has them may change them, and a second backward writes them again.
        found, ctx.gradients = ctx.gradients, None
        if found is None:
            found = at_once(_detached(pair), counts, share, options, wanted[1])[1:]
        factor = dresult.contiguous() if counts is None else of_counted(dresult, counts == 0)
        dx, dy = (None if each is None else multiply(each, factor) for each in found)
        return dx if wanted[0] else None, dy, *[None] * 5


# As their apply, without its search for functorch's wrappers: a call under a transform does not come here.
_apply = super(torch.autograd.Function, _Divergence).apply
_apply_summed = super(torch.autograd.Function, _Summed).apply


def differentiable_gradient(
    pair: Pair, options: Divergence, dvalue: Tensor, value: Tensor | None = None, wanted=(True, False),
    dlse: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients by torch's operations, for a second derivative or a batch of gradients.

    Rows that get no gradient are left out if their divergence is not finite, because 0 times it would be NaN.
    """
    counts, of_lse, lse_counts = None, dlse is not None, None
    if not batched(dvalue, dlse):
        if value is None:
            with torch.no_grad():
                value = referred(pair.x, pair.y, with_rows(options, pair), weight=pair.weight)
        counts = (dvalue != 0) | value.isfinite()
        lse_counts = None if dlse is None else (dlse != 0) | value.isfinite()
    with torch.enable_grad():
        x, y = apart(*(each if each.requires_grad else each.detach().requires_grad_() for each in pair[:2]))
        rows = [referred(x, y, with_rows(options, pair), counts, pair.weight)]
        rows += [lse_of(x, options, lse_counts)] if of_lse else []
    asked = [each for each, wants in zip((x, y), wanted, strict=True) if wants]
    incoming = [g.to(y.dtype) for y, g in zip(rows, (dvalue, dlse), strict=False) if g is not None]
    again = torch.is_grad_enabled()
    found = iter(torch.autograd.grad(rows, asked, incoming, create_graph=again, materialize_grads=of_lse))
    dx, dy = (next(found) if wants else None for wants in wanted)
    return dx, dy


def lse_of(x: Tensor, options: Divergence, counts: Tensor | None = None) -> Tensor:
    """The lse of rows of kind "cross", by torch's operations."""
    x = x if counts is None else torch.where(counts.unsqueeze(-1), x, 0.0)
    return torch.logsumexp(reference.finished(x.to(arithmetic_of(x)), options.scale, options.softcap, None), -1)


def referred(
    input: Tensor, target: Tensor, options: Divergence, counts: Tensor | None = None, weight: Tensor | None = None
) -> Tensor:
    """The formula of rows in the dtype of the arithmetic; 0 for rows that do not count."""
    arithmetic = torch.promote_types(arithmetic_of(input), arithmetic_of(target))
    if counts is not None:
        of_rows = counts.unsqueeze(-1)
        input, target = torch.where(of_rows, input, 0.0), torch.where(of_rows, target, 0.0)
    if options.kind == "cross":
        rows = reference.cross_entropy(
            input, target, weight, reduction="none", label_smoothing=options.label_smoothing, softcap=options.softcap,
            scale=options.scale, dtype=arithmetic, arithmetic=arithmetic,
        )[0]  # fmt: skip
    else:
        rows = reference.divergence(input, target, **options.options(), arithmetic=arithmetic)
    return rows if counts is None else torch.where(counts, rows, 0.0)
