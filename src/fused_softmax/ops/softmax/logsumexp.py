"""logsumexp over one or several dims, of the input or of its scaled, masked, causal scores.

lse = m + log s,  m = max z,  s = sum exp(z - m).  Its gradient is dx = exp(z - lse) * dlse.
The lse in the gradient has the dtype of the arithmetic: if an lse of 50 were rounded to 16 bits, gradients would be 10
% too large.
Traffic: the input is read once (MN); the gradient reads it again and writes dx (2MN).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fused_softmax.core.calls import find, keep
from fused_softmax.core.checks import DTYPES, arithmetic_of, check, dense_mask, sized
from fused_softmax.core.described import typed
from fused_softmax.core.launched import Launched, compose
from fused_softmax.core.options import by_environment, is_bool, refuse_batch_invariant
from fused_softmax.core.route import Route, needs_grad, on_device, route_of, runs_here
from fused_softmax.ops import autocast
from fused_softmax.ops.segments.nested import is_jagged, of_nested
from fused_softmax.ops.softmax import reference
from fused_softmax.ops.softmax.calls import LOGSUMEXP, logsumexp_backward, prepare_call
from fused_softmax.ops.softmax.over_ranks import logsumexp_of_shards, scores_of_shard, shards_of_dim
from fused_softmax.ops.softmax.scores import MaskedRows, Scores, is_plain, kind_of_scale, kind_of_sink, scores_of
from fused_softmax.ranks.dtensor import mesh_of, on_shards
from fused_softmax.ranks.gather import peers_of, told_by
from fused_softmax.ranks.groups import Refusing, Transport, check_over, over_of, sizes_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # which PyTorch may be built without


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
    sink: float | Tensor | None = None,
    batch_invariant: bool | None = None,
    group: "ProcessGroup | None" = None,
    n_classes: int | None = None,
    shard_sizes: Sequence[int] | None = None,
    transport: Transport | None = None,
) -> Tensor:
    """log sum exp(input * scale + mask) over `dim`, as torch.logsumexp: same results, NaN and infinities included.

    input: any shape; float32, float16, bfloat16 or float64, or integers, which become the default dtype. CUDA tensors
        run on this package's kernels, which read it once; CPU tensors take torch's own path. Differentiable, twice too.
        Nested tensors are taken as softmax takes them, and give [batch, ...].
    dim: one dim or several. Neighbouring dims that one stride describes are read in place, as softmax's dim is. Others
        are copied first, and so are strided ones in the gradient.
    keepdim: whether the result keeps `dim` with size 1.
    out: where to write, of any floating dtype; resized to the result's shape.
    scale, mask, is_causal, sink: as softmax's, for a single dim. A row of scale 0 gives its maximum. The sink counts:
        logsumexp(cat([scores, sink], dim)), which is the sink itself where nothing else is kept.
    masked_rows: a row of which nothing is kept gives -inf. Its gradient is NaN with "nan" (0 if no loss uses the row),
        and 0 with "zero".
    batch_invariant: as softmax's. A gradient of the input has no sums, and never depends on other rows.

    group, n_classes, shard_sizes, transport: as softmax's, for a single dim. Every rank gets the same result. Each
        rank's incoming gradient is that of this one result, which is never summed over ranks.

    Returns the input's shape without `dim`, or with size 1 there.

    Raises torch's errors, and those of softmax's scale, mask, is_causal and sink.

    >>> logsumexp(torch.tensor([[0.0, 1.0, 2.0]], device="cuda"), 1)
    tensor([2.4076], device='cuda:0')
    >>> logsumexp(torch.tensor([[0.0, 1.0, 2.0]], device="cuda"), 1, sink=2.0)
    tensor([2.9176], device='cuda:0')
    """
    if batch_invariant is None:
        batch_invariant = by_environment()
    if group is not None or n_classes is not None or shard_sizes is not None or transport is not None:
        over = over_of(group, n_classes, shard_sizes, transport)
        scored = scale, mask, is_causal, masked_rows, sink
        return _over_group(input, dim, bool(keepdim), out, scored, over, batch_invariant)
    if type(dim) is int and type(keepdim) is bool and type(is_causal) is bool and type(batch_invariant) is bool:
        options = dim, keepdim, is_causal, masked_rows, batch_invariant
        if scale is None and mask is None and out is None and sink is None:
            call = find("logsumexp", options, input)
        else:
            call = find("logsumexp", options, input, out, kind_of_scale(scale), mask, kind_of_sink(sink))
        if call is not None:
            return call(input, out, scale, mask, sink)
    return _logsumexp(input, dim, keepdim, out, scale, mask, is_causal, masked_rows, sink, batch_invariant)


def _over_group(input, dim, keepdim, out, scored, over, batch_invariant):
    """A call whose columns lie over the ranks of a group."""
    name = "logsumexp"
    with Refusing(name, over, input):
        check_over(name, over, input, *scored)
        is_bool(name, "batch_invariant", batch_invariant)
        if batch_invariant:
            refuse_batch_invariant(name, "ranks cut their rows as their number asks, with group=")
        if out is not None:
            raise ValueError(f"{name}: out and group exclude each other")
        if isinstance(dim, Sequence):
            if len(dim) != 1:
                raise ValueError(f"{name}: group takes a single dim, got dim={tuple(dim)}")
            (dim,) = dim
        check(name, input, dim, None, None)
        scores = scores_of_shard(name, input, dim, *scored)
        sizes = sizes_of(name, over, input.shape[dim])
    dtype = autocast.result_dtype(name, input)
    shards = shards_of_dim(name, input, dim, dtype, scores, sizes, over)
    shards = told_by(peers_of(name, over.transport, over.group, input), name, shards)
    return logsumexp_of_shards(input, dim, keepdim, scores, shards, dtype)


def _logsumexp(input, dim, keepdim, out, scale, mask, is_causal, masked_rows, sink, batch_invariant):
    if mask is not None and isinstance(input, Tensor):
        mask = dense_mask("logsumexp", "mask", mask, input.device)
    plain = is_plain(scale, mask, is_causal, masked_rows, sink)
    if not isinstance(dim, int) and isinstance(dim, Integral):  # NumPy's, which torch takes too
        dim = int(dim)
    if is_jagged(input):
        filled = None if masked_rows == "nan" else masked_rows
        not_for_it = {"out": out, "mask": mask, "is_causal": is_causal, "masked_rows": filled, "sink": sink}
        not_for_it["batch_invariant"] = batch_invariant
        return of_nested("logsumexp", input, dim, None, bool(keepdim), scale, not_for_it)
    if not isinstance(input, Tensor) or input.is_nested or input.layout != torch.strided:
        return torch.logsumexp(input, dim, keepdim, **({} if out is None else {"out": out}))
    dims = _dims_of(dim)
    if not plain and len(dims) != 1:
        raise ValueError(f"logsumexp: scale, mask, is_causal and sink take a single dim, got dim={dims}")
    scored = scale, mask, is_causal, masked_rows, sink, batch_invariant
    scores = scores_of("logsumexp", input, 0 if plain else dims[0], *scored)
    if not plain and not input.dtype.is_floating_point and not input.dtype.is_complex:
        input = input.to(torch.get_default_dtype())
    tensors = [*(each for each in (input, out) if isinstance(each, Tensor)), *scores.tensors]
    differentiates = needs_grad(*tensors)
    if out is not None:
        _check_out(input, out)
        if differentiates:
            raise RuntimeError("logsumexp: out= takes no part in autograd, but an argument requires grad")
    dtype = input.dtype if out is not None else autocast.result_dtype("logsumexp", input)
    of_kernel = arithmetic_of(input) if differentiates else dtype
    mesh_of("logsumexp", {"input": input, "out": out, **scores.by_name})
    several = input.ndim > 0 and len(dims) > 0
    refused = "" if several else "there is no dim to sum over"
    if input.dtype not in DTYPES:
        refused = f"no kernel reads {input.dtype}"
    route = route_of("logsumexp", *tensors, refused=refused, shards=out is None and several)
    if route is Route.KERNEL and input.numel():
        launched = prepare_call(LOGSUMEXP, input, dims, of_kernel, out, scores, bool(keepdim))
        if differentiates:
            launched = _with_gradient(launched, input, dims, scores, dtype)
        bare = scale is None and mask is None and out is None and sink is None
        others = () if bare else (out, kind_of_scale(scale), mask, kind_of_sink(sink))
        options = dim, keepdim, is_causal, masked_rows, batch_invariant
        call = keep(launched, "logsumexp", options, input, *others)
        return call(input, out, scale, mask, sink)
    if route is Route.SHARDS:
        on_shard = partial(logsumexp, dim=dim, keepdim=keepdim, **scores.options())
        whole = (*dims, -2) if is_causal else dims

        def in_parts(x, shards, **beside):
            return logsumexp_of_shards(x, dims[0], bool(keepdim), replace(scores, **beside), shards, dtype)

        parts = None if scores.greedy or batch_invariant else in_parts
        return on_shards(on_shard, input, whole, dims, keepdim, parts, scores.by_name, added=("sink",))
    if route is Route.OPERATOR and (out is None or not plain):
        operator, arguments = torch.ops.fused_softmax.logsumexp.default, scores.operator_arguments()
        result = operator(input, dims, keepdim, *arguments, dtype=of_kernel, **scores.of_kernels).to(dtype)
    elif batch_invariant and on_device(input) and input.numel():
        refuse_batch_invariant("logsumexp", "torch's operations compute it")
    # torch's own gradient of 16 bits takes an lse that was rounded to them.
    elif plain and (out is not None or input.dtype not in (torch.float16, torch.bfloat16)):
        return torch.logsumexp(input, dim, keepdim, **({} if out is None else {"out": out}))
    else:
        compute = partial(reference.logsumexp, dtype=dtype, arithmetic=arithmetic_of(input))
        result = compute(input, dim, keepdim, **scores.formula())
    return result if out is None else sized(out, result.shape).copy_(result)


def _dims_of(dim: Any) -> tuple[int, ...]:
    if isinstance(dim, int):
        return (dim,)
    if isinstance(dim, str) or not isinstance(dim, Sequence):
        raise TypeError(f"logsumexp: dim must be an int or a sequence of ints, not {typed(dim)}")
    return tuple(dim)


def _check_out(input: Tensor, out: Tensor) -> None:
    if not isinstance(out, Tensor):
        raise TypeError(f"logsumexp: out must be a Tensor, not {type(out).__name__}")
    if not out.dtype.is_floating_point and not out.dtype.is_complex:
        raise RuntimeError(f"logsumexp: out must have a floating dtype, got {out.dtype}")
    if out.device != input.device:
        raise RuntimeError(f"logsumexp: out must be on the input's device {input.device}, got {out.device}")


class Differentiated(NamedTuple):
    """What the gradient of a call depends on, beside its tensors and numbers."""

    dims: tuple[int, ...]
    is_causal: bool
    masked_rows: MaskedRows
    batch_invariant: bool


def _with_gradient(
    launched: Launched, input: Tensor, dims: tuple[int, ...], scores: Scores, dtype: torch.dtype
) -> Launched:
    """A prepared call as one that autograd differentiates. dtype: of its result."""
    kind = Differentiated(tuple(d % input.ndim for d in dims), *scores.rules.values())
    rounds = dtype != arithmetic_of(input)

    def build(n, forward):
        def call(input, out, scale, mask, sink):
            per_row, number = (scale, None) if isinstance(scale, Tensor) else (None, scale)
            of_rows, same = (sink, None) if isinstance(sink, Tensor) else (None, sink)
            lse = _apply(input, mask, per_row, of_rows, (forward, number, same, kind))
            return lse.to(dtype) if rounds else lse

        return call

    return compose(build, launched, n=input.shape[0] if launched.of_any_rows else None)


class _LogSumExp(torch.autograd.Function):
    """lse with the gradient of input, of an added mask, of a scale and of a sink tensor, from input and lse.

    It has the dtype of the arithmetic. It is an output that is saved, so that a second derivative goes through it.
    """

    @staticmethod
    def forward(ctx, input, mask, scale, sink, how):
        forward, number, same, kind = how
        lse = forward(input, None, number if scale is None else scale, mask, same if sink is None else sink)
        ctx.save_for_backward(input, lse, mask, scale, sink)
        ctx.number, ctx.sink, ctx.kind = number, same, kind
        return lse

    @staticmethod
    def backward(ctx, dlse):
        return *gradients(ctx, dlse, *ctx.needs_input_grad[:4]), None


# As _LogSumExp.apply, without its search for functorch's wrappers: a call under a transform does not come here.
_apply = super(torch.autograd.Function, _LogSumExp).apply


def save_for_gradients(ctx, input: Tensor, dims: Sequence[int], lse: Tensor, scores: Scores) -> None:
    """What `gradients` takes, for the registered operator."""
    sink = scores.sink if isinstance(scores.sink, Tensor) else None
    ctx.save_for_backward(input, lse, scores.mask, scores.per_row, sink)
    ctx.kind = Differentiated(tuple(d % input.ndim for d in dims), *scores.rules.values())
    ctx.number = None if scores.per_row is not None else scores.scale
    ctx.sink = None if sink is not None else scores.sink


def gradients(ctx, dlse: Tensor, for_input: bool, for_mask: bool, for_scale: bool, for_sink: bool = False):
    """Those of input, mask, scale and sink that are asked for."""
    input, lse, mask, scale, sink = ctx.saved_tensors
    dims, arithmetic = ctx.kind.dims, arithmetic_of(input)
    given = scale if scale is not None else None if ctx.number is None or ctx.number == 1 else float(ctx.number)
    _, is_causal, masked_rows, batch_invariant = ctx.kind
    scores = Scores(given, mask, is_causal, masked_rows, batch_invariant=batch_invariant)
    factor: Any = 1.0 if given is None else given
    keepdim_shape = [1 if d in dims else size for d, size in enumerate(input.shape)]
    if isinstance(factor, Tensor) or factor == 0:
        factor = torch.where(torch.as_tensor(factor, device=input.device) == 0, 1.0, factor)
    # dx alone is rounded once. The others are reductions of dz, in the dtype of the arithmetic.
    alone = isinstance(factor, float) and factor == 1.0 and not for_mask
    if lse.dtype.itemsize < arithmetic.itemsize:  # the registered operator's, where no dtype was given
        whole_scores = replace(scores, sink=ctx.sink if sink is None else sink)
        operator = torch.ops.fused_softmax.logsumexp.default
        arguments = whole_scores.operator_arguments()
        lse = operator(input, dims, True, *arguments, dtype=arithmetic, **whole_scores.of_kernels)
    whole = lse.view(keepdim_shape)
    if torch.is_grad_enabled() or scores.greedy or not runs_here(dlse, input):
        # Element by element: a compiler fuses it into what stands around it.
        single = dims if len(dims) > 1 else dims[0]
        z = reference.scores(input.to(arithmetic), single, scores.scale, mask, scores.is_causal)
        known = whole
        if scores.masked_rows == "zero":
            known = whole.masked_fill(whole == -float("inf"), float("inf"))
        dz = (z - known).exp() * dlse.view(keepdim_shape)
        if scores.hides:
            dz = dz.masked_fill((dlse == 0).view(keepdim_shape), 0.0)  # a row of which nothing is kept has NaN
    else:
        dz = logsumexp_backward(input, lse, dlse, dims, scores=scores, dtype=input.dtype if alone else arithmetic)
    dx = dmask = dscale = dsink = None
    if for_input:
        dx = (dz if isinstance(factor, float) and factor == 1.0 else dz * factor).to(input.dtype)
    if for_mask:
        dmask = dz.sum_to_size(mask.shape)
    if for_scale:
        # A masked element may be NaN, and has no part. A maximum that stands for a scale of 0 moves with no scale.
        dscale = (dz * input.to(dz.dtype).masked_fill(dz == 0, 0.0)).sum_to_size(scale.shape)
        dscale = dscale.masked_fill(scale.to(dscale.device) == 0, 0.0).to(scale.dtype)
    if for_sink:
        at = sink.to(dlse.device, arithmetic)
        p = (at - whole).exp().masked_fill(at == -float("inf"), 0.0)
        dsink = (p * dlse.view(keepdim_shape)).sum_to_size(sink.shape).to(sink.dtype)
    return dx, dmask, dscale, dsink
