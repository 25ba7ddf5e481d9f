"""softmax and log_softmax along one dim, of the input or of its scaled, masked, causal scores.

Each reads every element once and writes it once, and so does its gradient, except for rows that the chip cannot hold.
"""

from collections.abc import Sequence
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.overrides import has_torch_function_unary

from fused_softmax.core.calls import find, keep
from fused_softmax.core.checks import DTYPES, arithmetic_in, check, dense_mask, sized
from fused_softmax.core.options import by_environment, is_bool, refuse_batch_invariant
from fused_softmax.core.route import Route, needs_grad, on_device, resolved, route_of
from fused_softmax.ops import autocast
from fused_softmax.ops.segments.nested import is_jagged, of_nested
from fused_softmax.ops.softmax import reference
from fused_softmax.ops.softmax.by_peers import in_one_launch, kept_softmax, softmax_by_peers
from fused_softmax.ops.softmax.calls import LOG_SOFTMAX, SOFTMAX, prepare_call
from fused_softmax.ops.softmax.gradients import with_gradient
from fused_softmax.ops.softmax.over_ranks import scores_of_shard, shards_of_dim, softmax_of_shards
from fused_softmax.ops.softmax.scores import MaskedRows, is_plain, kind_of_scale, kind_of_sink, scores_of
from fused_softmax.ranks.dtensor import mesh_of, on_shards
from fused_softmax.ranks.gather import peers_of, told_by
from fused_softmax.ranks.groups import Refusing, Transport, check_over, over_of, sizes_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # which PyTorch may be built without


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
    sink: float | Tensor | None = None,
    batch_invariant: bool | None = None,
    group: "ProcessGroup | None" = None,
    n_classes: int | None = None,
    shard_sizes: Sequence[int] | None = None,
    transport: Transport | None = None,
) -> Tensor:
    """softmax of `input * scale + mask` along `dim`, as torch.softmax: same results, NaN and infinities included.

    input: any shape; float32, float16, bfloat16 or float64, and with `dtype` float8_e4m3fn or float8_e5m2. CUDA tensors
        run on this package's kernels, read once and written once whatever the length of `dim`; CPU tensors take torch's
        own path. Differentiable, twice too. A nested tensor of layout jagged is taken over its ragged dim, with no
        other options than dtype and a number as scale, by segment_softmax's operations; one with holes raises.
    dim: the dimension that sums to 1. The input is read in place if `dim` is contiguous, or strided beside a contiguous
        dim, and at most three strides describe the other dims; so permuted, sliced and expanded tensors are. Other
        inputs are copied first, and so is an input with a sink if `dim` is not the last one.
    dtype: the dtype of the result; the input is rounded to it as it is read, with no copy. Needed for inputs of 8-bit
        floats, and for integers, which are copied first.
    out: where to write; of the input's shape, the result's dtype, the input's device.
    scale: a number, or a tensor that broadcasts to the input with size 1 in `dim` (a temperature's inverse for every
        row). Scale 0 stands for temperature 0: 1 at the first maximum of the row, 0 elsewhere.
    mask: broadcasts to the input and is never expanded in memory. bool: True keeps. Of a float dtype: added. torch's
        CausalBias counts as the bool mask that it stands for.
    is_causal: of scores [..., queries, keys] each query keeps the keys up to its own, and the last query sees all
        (bottom-right aligned); nothing above that diagonal is read.
    masked_rows: what a row gets if none of its elements is kept: "nan" as in torch, or "zero".
    sink: one more logit in the sum of every row, without a column: softmax(cat([scores, sink], dim)) without the last
        column. A number, or a tensor of 16 to 64 bit floats that broadcasts as a scale does, such as [heads, 1, 1]. It
        is neither scaled nor masked; a row of which nothing else is kept gives 0, with any masked_rows. A sink of -inf
        counts nothing: such a row gives what masked_rows says. If its gradient is wanted, the forward pass reads the
        input once more, for the sum.
    batch_invariant: a row has the same bits in any batch, at any place in it, and so has its row of the input's
        gradient: how it is summed follows from its length, the dtypes, the options and the GPU alone. Without it, few
        long rows are cut into more parts than many. Rows that do not lie so that all can be read alike, such as those
        along another dim than the last, are copied first. None is True if FUSED_SOFTMAX_BATCH_INVARIANT=1 stood in the
        environment at the import. CPU tensors take torch's own path all the same.

    group: of torch.distributed, over whose ranks the columns of `dim` lie in shards. Each rank gives its own columns of
        the input and of mask, in rank order, as many as it has, and gets the same columns of the result. Every rank of
        the group makes the same call. No is_causal, no scale of 0 (in a tensor, its row gives NaN), no out, no
        batch_invariant, no second derivative.
    n_classes: with group: how many columns of all shards count, if not all; the columns past it, at the end of the last
        shards, are padding and get 0.
    shard_sizes: with group: the columns of each rank, in rank order, the same on all ranks; 0 is a size. Without it all
        ranks have as many columns as each other.
    transport: with group: how ranks talk to each other: "collective", by all_gather; or "peer", by memory that GPUs of
        one host write into each other's: over the last dim and without scale, mask, sink and masked_rows in one launch.
        None takes "peer" on up to four GPUs where it can.

    Raises TypeError for an argument of another type, or a mask of integers; IndexError for a dim out of range;
    ValueError for a mask, scale or sink that does not broadcast, or is_causal on fewer than 2 dims or another than the
    last; NotImplementedError for a sparse input or an integer one without dtype, and for batch_invariant of GPU tensors
    where torch's operations would compute, as they do a second derivative and the gradient of a scale or sink;
    RuntimeError for another nested input, or an out of another shape, dtype or device.

    Parts of a row are merged as in Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv
    1805.02867).

    >>> softmax(torch.tensor([[0.0, 1.0, 2.0]], device="cuda"))
    tensor([[0.0900, 0.2447, 0.6652]], device='cuda:0')
    >>> softmax(torch.tensor([[0.0, 1.0, 2.0]], device="cuda"), sink=2.0)
    tensor([[0.0541, 0.1470, 0.3995]], device='cuda:0')
    """
    if batch_invariant is None:
        batch_invariant = by_environment()
    if group is not None or n_classes is not None or shard_sizes is not None or transport is not None:
        over = over_of(group, n_classes, shard_sizes, transport)
        scored = scale, mask, is_causal, masked_rows, sink
        return _over_group("softmax", input, dim, dtype, out, scored, over, batch_invariant)
    if (
        type(dim) is int and type(is_causal) is bool and type(batch_invariant) is bool
    ):  # True and 1.0 equal 1, and would find what was kept for it
        options = dim, dtype, is_causal, masked_rows, batch_invariant
        if scale is None and mask is None and out is None and sink is None:
            call = find("softmax", options, input)
        else:
            call = find("softmax", options, input, out, kind_of_scale(scale), mask, kind_of_sink(sink))
        if call is not None:
            return call(input, out, scale, mask, sink)
    return _softmax("softmax", input, dim, dtype, out, scale, mask, is_causal, masked_rows, sink, batch_invariant)


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
    sink: float | Tensor | None = None,
    batch_invariant: bool | None = None,
    group: "ProcessGroup | None" = None,
    n_classes: int | None = None,
    shard_sizes: Sequence[int] | None = None,
    transport: Transport | None = None,
) -> Tensor:
    """The logarithm of softmax along `dim`, as torch.log_softmax: z - m - log s. Arguments and errors are softmax's.

    Here z are the row's scores, m is their maximum, and s is sum exp(z - m). A row of which nothing is kept is -inf
    everywhere with masked_rows="zero", or with a sink above -inf.

    >>> log_softmax(torch.tensor([[0.0, 1.0, 2.0]], device="cuda"))
    tensor([[-2.4076, -1.4076, -0.4076]], device='cuda:0')
    """
    if batch_invariant is None:
        batch_invariant = by_environment()
    if group is not None or n_classes is not None or shard_sizes is not None or transport is not None:
        over = over_of(group, n_classes, shard_sizes, transport)
        scored = scale, mask, is_causal, masked_rows, sink
        return _over_group("log_softmax", input, dim, dtype, out, scored, over, batch_invariant)
    if type(dim) is int and type(is_causal) is bool and type(batch_invariant) is bool:
        options = dim, dtype, is_causal, masked_rows, batch_invariant
        if scale is None and mask is None and out is None and sink is None:
            call = find("log_softmax", options, input)
        else:
            call = find("log_softmax", options, input, out, kind_of_scale(scale), mask, kind_of_sink(sink))
        if call is not None:
            return call(input, out, scale, mask, sink)
    return _softmax("log_softmax", input, dim, dtype, out, scale, mask, is_causal, masked_rows, sink, batch_invariant)


def _over_group(name, input, dim, dtype, out, scored, over, batch_invariant):
    """A call whose columns lie over the ranks of a group."""
    if over.transport != "collective" and out is None and is_plain(*scored) and batch_invariant is False:
        y = kept_softmax(name, input, dim, dtype, over)
        if y is not None:
            return y
    with Refusing(name, over, input):
        check_over(name, over, input, *scored)
        is_bool(name, "batch_invariant", batch_invariant)
        if batch_invariant:
            refuse_batch_invariant(name, "ranks cut their rows as their number asks, with group=")
        result_dtype = check(name, input, dim, dtype, out)
        (input,) = resolved(input)
        if out is not None:
            raise ValueError(f"{name}: out and group exclude each other")
        scores = scores_of_shard(name, input, dim, *scored)
        sizes = sizes_of(name, over, input.shape[dim])
    if dtype is None:
        result_dtype = autocast.result_dtype(name, input)
    shards = shards_of_dim(name, input, dim, result_dtype, scores, sizes, over)
    peers = peers_of(name, over.transport, over.group, input, *scores.tensors)
    if peers is not None and in_one_launch(input, dim, result_dtype, scores, shards):
        return softmax_by_peers(name, input, dim, dtype, result_dtype, shards, peers, over)
    log = name == "log_softmax"
    of_one = log_softmax if log else softmax
    return softmax_of_shards(of_one, log, input, dim, result_dtype, scores, told_by(peers, name, shards))


def _softmax(name, input, dim, dtype, out, scale, mask, is_causal, masked_rows, sink, batch_invariant):
    if mask is not None and isinstance(input, Tensor):
        mask = dense_mask(name, "mask", mask, input.device)
    plain = is_plain(scale, mask, is_causal, masked_rows, sink)
    if (
        not isinstance(input, Tensor) and has_torch_function_unary(input) and plain and not batch_invariant
    ):  # a proxy of torch.fx, for one
        return getattr(torch, name)(input, dim, dtype=dtype, **({} if out is None else {"out": out}))
    if not isinstance(dim, int) and isinstance(dim, Integral):  # NumPy's, which torch takes too
        dim = int(dim)
    if is_jagged(input):
        filled = None if masked_rows == "nan" else masked_rows
        not_for_it = {"out": out, "mask": mask, "is_causal": is_causal, "masked_rows": filled, "sink": sink}
        not_for_it["batch_invariant"] = batch_invariant
        return of_nested(name, input, dim, dtype, scale=scale, others=not_for_it)
    result_dtype = check(name, input, dim, dtype, out)
    scores = scores_of(name, input, dim, scale, mask, is_causal, masked_rows, sink, batch_invariant)
    if dtype is None and out is None:
        result_dtype = autocast.result_dtype(name, input)
    tensors = [*(each for each in (input, out) if each is not None), *scores.tensors]
    if not plain and result_dtype not in DTYPES:
        raise NotImplementedError(f"{name}: not implemented for {result_dtype}; give a dtype of 16 to 64 bit floats")
    mesh_of(name, {"input": input, "out": out, **scores.by_name})
    refused = "" if result_dtype in DTYPES else f"no kernel writes {result_dtype}"
    route = route_of(name, *tensors, refused=refused, shards=out is None)
    differentiates = needs_grad(*tensors)
    if out is not None and differentiates and (route is Route.KERNEL or not plain):
        raise RuntimeError(f"{name}: out= takes no part in autograd, but an argument requires grad")

    if route is Route.KERNEL:
        out = None if out is None else sized(out, input.shape)
        log = name == "log_softmax"
        launched = prepare_call(LOG_SOFTMAX if log else SOFTMAX, input, (dim,), result_dtype, out, scores)
        if differentiates:
            launched = with_gradient(launched, log, input, dim, result_dtype, scores)
        bare = scale is None and mask is None and out is None and sink is None
        others = () if bare else (out, kind_of_scale(scale), mask, kind_of_sink(sink))
        call = keep(launched, name, (dim, dtype, is_causal, masked_rows, batch_invariant), input, *others)
        return call(input, out, scale, mask, sink)
    if route is Route.SHARDS:
        function = softmax if name == "softmax" else log_softmax
        on_shard = partial(function, dim=dim, dtype=dtype, **scores.options())
        return on_shards(on_shard, input, (dim, -2) if is_causal else (dim,), beside=scores.by_name)
    if route is Route.OPERATOR and (out is None or not plain):  # torch's own writes out without a copy
        operator = getattr(torch.ops.fused_softmax, name)
        result = operator.default(input, dim, result_dtype, *scores.operator_arguments(), **scores.of_kernels)
    elif batch_invariant and on_device(input) and input.numel():
        refuse_batch_invariant(name, "torch's operations compute it")
    elif plain:
        return getattr(torch, name)(input, dim, dtype=dtype, **({} if out is None else {"out": out}))
    else:
        arithmetic, composed = arithmetic_in(result_dtype), getattr(reference, name)
        result = composed(input, dim, dtype=result_dtype, **scores.formula(), arithmetic=arithmetic)
    return result if out is None else sized(out, result.shape).copy_(result)
