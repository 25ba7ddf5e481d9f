"""Cross-entropy of input @ linear_weight.T + linear_bias, whose logits exist a chunk of rows at a time.

cuBLAS computes three matrix products, as it would with all logits in memory. Between them the logits of a chunk are
read once, and their gradient is written over them. Extra memory: a chunk of logits, and an accumulator of
linear_weight's gradient. If chunks would be many and short, blocks of classes take their place
(`linear_by_classes.py`), and need no accumulator.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fused_softmax.core.calls import find, keep
from fused_softmax.core.checks import arithmetic_of
from fused_softmax.core.launched import Launched
from fused_softmax.core.no_gradient import LOSS, refuse, refusing, saved_of
from fused_softmax.core.options import by_environment, is_bool, refuse_batch_invariant
from fused_softmax.core.route import Route, apart, batched, checks_values, needs_grad, resolved, route_of
from fused_softmax.ops import autocast
from fused_softmax.ops.losses import launches as losses
from fused_softmax.ops.losses.cross_entropy import (
    check_targets,
    check_targets_of_all,
    composed,
    cross_entropy,
    dtype_of_loss,
    key_of,
    loss_now,
)
from fused_softmax.ops.losses.divergence_rows import losses_of
from fused_softmax.ops.losses.linear_by_classes import by_classes, goes_by_classes
from fused_softmax.ops.losses.linear_by_rows import (
    Gradients,
    Linear,
    as_autocast_has,
    by_rows,
    check_layer,
    chunks,
    counted,
    divides_late,
    keeps_logits,
    linear_of,
    lowered,
    spread,
    whole_logits,
)
from fused_softmax.ops.losses.linear_pairs import Layers, of_layers
from fused_softmax.ops.losses.options import (
    NUMBERS,
    Divergence,
    Loss,
    check_logits,
    loss_of,
    refused_loss,
    weight_for_kernels,
)
from fused_softmax.ops.losses.output import (
    NOTHING_MORE,
    STATISTICS,
    CrossEntropyOutput,
    Wanted,
    output_of,
    shaped,
    stats_of,
)
from fused_softmax.ops.losses.over_ranks.divergence import lacks
from fused_softmax.ops.losses.over_ranks.dtensor import (
    linear_loss_of_probabilities,
    linear_loss_on_shards,
    logits_on_shards,
    loss_of_whole_rows,
    mesh_of_loss,
    own_classes,
)
from fused_softmax.ops.losses.over_ranks.linear import GatheredRows, LinearSharded, OfCall, leading_of_all
from fused_softmax.ops.losses.steps import (
    Kind,
    Steps,
    differentiable_gradients,
    functions_of,
    prepare_steps,
    run_steps,
)
from fused_softmax.ops.losses.sums import finish, left_out_of, of_counted, totals_of
from fused_softmax.ranks.dtensor import as_dtensor
from fused_softmax.ranks.gather import peers_of, told_by
from fused_softmax.ranks.groups import Over, Refusing, Shards, Transport, check_over, over_of, shards_of, sizes_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # which PyTorch may be built without

_NAME = "linear_cross_entropy"


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
    return_lse: bool = False,
    return_z_loss: bool = False,
    return_token_stats: bool = False,
    chunk_size: int | None = None,
    accumulate: str = "fp32",
    skip_ignored: bool = False,
    dtype: torch.dtype | None = None,
    batch_invariant: bool | None = None,
    group: "ProcessGroup | None" = None,
    n_classes: int | None = None,
    shard_sizes: Sequence[int] | None = None,
    transport: Transport | None = None,
    input_sharded: bool = False,
) -> Tensor | CrossEntropyOutput:
    """cross_entropy(linear(input, linear_weight, linear_bias), target, ...), without all logits in memory at once.

    input: [in_features] or [..., in_features]; float32, float16, bfloat16 or float64.
    linear_weight: [n_classes, in_features]; linear_bias: [n_classes]. Each has the input's dtype. If that has 16 bits,
        they may be float32 master weights: products are made in the input's dtype, and their gradients are float32.
        Autocast casts these three as it casts linear's.
    target: class indices of the input's leading shape, of int64, int32 or uint8; or probabilities [..., n_classes],
        which get their gradient too. All logits exist at once for probabilities with token statistics or a class
        weight that requires a gradient; on one device also for float64. These calls take no chunk_size.
    weight, reduction, ignore_index, label_smoothing, softcap, scale, lse_square_scale, dtype: as cross_entropy's.
    return_lse, return_z_loss, return_token_stats: as cross_entropy's. A gradient that comes back to lse, or to the
        z-loss that is returned, makes the logits again. Token stats read the logits once more where a gradient is
        written over them.
    chunk_size: of how many rows the logits exist at a time. None is as many as fill 1 GiB, or fewer, so that chunks are
        equal. It is all rows if that takes no more memory than chunks with the accumulator of linear_weight's gradient.
        Blocks of classes may replace short chunks. Then as many logits exist beside those that lie in the memory of
        linear_weight's gradient.
    accumulate: "fp32" adds chunks of the gradients of linear_weight and linear_bias, or blocks of the input's, in
        float32 (float64 for float64). "input" adds them in their own dtype and allocates no accumulator, except for a
        mean in float16, whose range would not hold the sums.
    skip_ignored: makes no logits for rows that are ignored; their lse and its gradient are then 0. This pays if many
        rows are ignored. It waits for the device, to learn how many they are. Compiled code makes the logits all the
        same.
    batch_invariant: True raises NotImplementedError, for cuBLAS chooses by the number of rows how it makes logits. None
        asks FUSED_SOFTMAX_BATCH_INVARIANT, and False stands against it. Logits that a product of your own makes alike
        in any batch have such a loss by `cross_entropy`.

    group, n_classes, shard_sizes, transport: as cross_entropy's. Each rank gives its own rows of linear_weight, and of
        linear_bias and weight, and its own columns of probabilities. The input is the same on all ranks, and so is its
        gradient, which is summed over them as `accumulate` says, each chunk while the next one's products are made.
        linear_weight and linear_bias may be DTensors in [Shard(0)] over the group. Without group=, a DTensor takes an
        input that is one too, on the same mesh, and probabilities that are.
    input_sharded: with group: each rank gives as many rows [rows, in_features] of the input, in rank order, and gets
        their gradient; targets [ranks * rows] are those of all.

    With reduction "mean" or "sum" the forward pass makes the gradients of the tensors that require one, and no others.
    Where one chunk has all rows, and they are at most in_features, the logits' gradient waits instead, which takes no
    more memory than linear_weight's, and the backward pass makes the products.
    A second backward pass makes the logits again, as "none" does.
    Returns the loss, [] or of the targets' shape; a CrossEntropyOutput if more was asked for.
    Raises as cross_entropy; also ValueError for shapes that do not fit, chunk_size < 1 or an unknown accumulate, and
    RuntimeError for a linear_weight or linear_bias of another dtype or device than the input's, or for a plain tensor
    beside a DTensor.

    >>> linear_cross_entropy(hidden, lm_head.weight, tokens)  # [8192, 4096], [128256, 4096], [8192]
    >>> linear_cross_entropy(hidden, lm_head.weight, tokens, return_lse=True).lse  # [8192], float32
    """
    if batch_invariant is None:
        batch_invariant = by_environment()
    is_bool(_NAME, "batch_invariant", batch_invariant)
    if batch_invariant:
        refuse_batch_invariant(_NAME, "cuBLAS chooses by the number of rows how it makes logits")
    wanted = Wanted(bool(return_lse), bool(return_z_loss), bool(return_token_stats))
    key = None
    alone = group is None and n_classes is None and shard_sizes is None and transport is None and not input_sharded
    if alone and not skip_ignored and (chunk_size is None or type(chunk_size) is int):
        of_call = wanted, dtype, chunk_size, accumulate
        key = key_of(ignore_index, reduction, label_smoothing, softcap, scale, lse_square_scale, of_call)
    if key is not None:
        call = find(_NAME, key, input, linear_weight, target, linear_bias, weight)
        if call is not None:
            numbers = label_smoothing, softcap, scale, lse_square_scale
            return call(input, linear_weight, target, linear_bias, weight, numbers)
    options = {
        "weight": weight, "ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing,
        "softcap": softcap, "scale": scale, "lse_square_scale": lse_square_scale,
    }  # fmt: skip
    how = {
        "wanted": wanted, "chunk_size": chunk_size, "accumulate": accumulate, "skip_ignored": bool(skip_ignored),
    }  # fmt: skip
    if alone:
        return _linear_cross_entropy(input, linear_weight, target, linear_bias, options, how, dtype, key)
    over = over_of(group, n_classes, shard_sizes, transport)
    return _of_shards(input, linear_weight, target, linear_bias, options, how, dtype, over, bool(input_sharded))


@dataclass(frozen=True)
class _Call:
    """A checked call: its tensors, of which products are made, and what it asks of them.

    w, bias: over a group, of this rank's classes. dtype: of the losses that are returned.
    """

    input: Tensor
    w: Tensor
    bias: Tensor | None
    target: Tensor
    loss: Loss
    dtype: torch.dtype
    wanted: Wanted
    chunk_size: int | None
    accumulate: str
    skip_ignored: bool

    @property
    def probabilities(self) -> bool:
        return self.target.is_floating_point()

    @property
    def ignored(self) -> Tensor | None:
        """Of each row, whether it is left out, so that its lse is 0, whoever computes it; None if lse needs no 0."""
        if self.probabilities or not (self.skip_ignored and self.wanted.lse):
            return None
        return self.target.long() == self.loss.ignore_index

    def for_kernels(self) -> "_Call":
        """The same, with the classes' weight as kernels read it."""
        if self.loss.weight is None:
            return self
        weight: Any = weight_for_kernels(self.loss.weight, self.input)
        return replace(self, loss=replace(self.loss, weight=weight.resolve_neg()))


def _checked(
    input, linear_weight, target, linear_bias, options, how: dict[str, Any], dtype, over: Over | None = None,
    input_sharded: bool = False,
) -> _Call:  # fmt: skip
    """options: of the loss. how: the last fields of _Call."""
    check_layer(_NAME, input, linear_weight, linear_bias, how["chunk_size"], how["accumulate"])
    input, linear_weight, linear_bias = as_autocast_has(input, linear_weight, linear_bias)
    if over is not None:
        linear_weight = own_classes(_NAME, "linear_weight", linear_weight, over.group)
        linear_bias = own_classes(_NAME, "linear_bias", linear_bias, over.group)
    columns, leading = linear_weight.shape[0], tuple(input.shape[:-1])
    if over is not None and input_sharded:
        leading = leading_of_all(_NAME, input, target, over.group)
    check_logits(_NAME, "logits", input.dtype, (*leading[:1], columns, *leading[1:]), _for_cross_entropy(target))
    loss = loss_of(_NAME, input, target, columns, dtype, how["wanted"].stats, **options)
    return _Call(input, linear_weight, linear_bias, target, loss, dtype_of_loss(_NAME, input, target, dtype), **how)


def _for_cross_entropy(x: Any) -> Any:
    """Probabilities, or logits, of all classes as cross_entropy takes them: the class dim at 1. Other targets as is."""
    return x.movedim(-1, 1) if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 2 else x


def _linear_cross_entropy(
    input, linear_weight, target, linear_bias, options, how, dtype, key
) -> Tensor | CrossEntropyOutput:
    """A call without a group. key: to keep it by, if it may be kept."""
    weight = options["weight"]
    call = _checked(input, linear_weight, target, linear_bias, options, how, dtype)
    given = {"input": call.input, "linear_weight": call.w, "linear_bias": call.bias}
    mesh = mesh_of_loss(_NAME, given, target, weight)
    refused = refused_loss(call.input, call.dtype, target, call.loss)
    whole = refused if mesh is None else lacks(call.loss)
    if call.chunk_size is not None and call.probabilities and whole:
        raise ValueError(
            f"{_NAME}: chunk_size={call.chunk_size} takes no probabilities here, for which all logits exist at once: "
            f"{whole}"
        )
    if not call.probabilities and checks_values(call.input, target):
        check_targets(_NAME, target, call.w.shape[0], call.loss.ignore_index)
    if mesh is not None:
        return _of_dtensors(call, mesh, whole)
    empty = target.numel() == 0 or call.w.numel() == 0
    tensors = [each for each in (call.input, call.w, target, call.bias, weight) if each is not None]
    refused, holds = ("there are no logits", "") if empty else (refused, "all logits")
    route = route_of(_NAME, *tensors, refused=refused, batches=False, holds=holds)
    if route is Route.COMPOSED:
        return _composed(call)
    if call.probabilities:
        return _of_probabilities(call, traced=route is Route.OPERATOR)
    if route is Route.OPERATOR:
        return _traced(call)
    call = call.for_kernels()
    if call.skip_ignored:
        return _of_targets(call)
    prepared = _prepare_call(call)
    if key is not None and autocast.lowered_dtype(_NAME, input) is None:
        keep(prepared, _NAME, key, input, linear_weight, target, linear_bias, weight)
    numbers = tuple(options[each] for each in NUMBERS)
    return prepared(call.input, call.w, target, call.bias, weight, numbers)


def _of_shards(
    input, linear_weight, target, linear_bias, options, how, dtype, over: Over, input_sharded: bool
) -> Tensor | CrossEntropyOutput:
    """A call whose classes lie over the ranks of a group."""
    with Refusing(_NAME, over, input, linear_weight, target):
        check_over(_NAME, over, input, target, options["weight"])
        call = _checked(input, linear_weight, target, linear_bias, options, how, dtype, over, input_sharded)
        input, w, loss = call.input, call.w, call.loss
        if call.probabilities and lacks(loss):
            raise ValueError(f"{_NAME}: {lacks(loss)}")
        sizes = sizes_of(_NAME, over, w.shape[0])
        if not call.probabilities and checks_values(input, target):
            check_targets_of_all(_NAME, target, sizes, over, loss.ignore_index)
    alike = {
        "operation": _NAME, "dtype": input.dtype, "weight_dtype": w.dtype, "in_features": input.shape[-1],
        **loss.asked(), "statistics": loss.stats, "chunk_size": call.chunk_size, "accumulate": call.accumulate,
        "skip_ignored": call.skip_ignored, "input_sharded": input_sharded, "input_requires_grad": needs_grad(input),
        "weight_requires_grad": needs_grad(w),
        "probabilities": (target.dtype, needs_grad(target)) if call.probabilities else None,
    }  # fmt: skip
    of_all = None if call.probabilities else target  # of probabilities, each rank has its own
    shards = shards_of(_NAME, sizes, input.shape[:-1].numel(), over, input.device, alike, of_all)
    peers = peers_of(_NAME, over.transport, over.group, input, w, target)
    if peers is not None:  # the backend too makes collectives, which a rank must not make alone
        peers.agree(_NAME, (shards.sizes, shards.n_classes, input.shape, target.shape[:1], *alike.items()))
    shards = told_by(peers, _NAME, shards)
    if input_sharded:
        call = replace(call, input=GatheredRows.apply(input, shards, _NAME))
    if shards.held < w.shape[0]:  # padding may be anything, so no product includes it
        call = replace(call, w=w[: shards.held], bias=None if call.bias is None else call.bias[: shards.held])
    if call.probabilities:
        return _of_probabilities(call, shards, summed=not input_sharded)
    return _of_targets(call.for_kernels(), shards, summed=not input_sharded)


def _of_dtensors(call: _Call, mesh: Any, whole: str) -> Tensor | CrossEntropyOutput:
    """whole: why all logits exist at once, of probabilities; "" if they need not."""
    x, w = as_dtensor(call.input, mesh), as_dtensor(call.w, mesh)
    if not call.probabilities:
        return linear_loss_on_shards(
            x, w, call.bias, call.target, call.loss, call.wanted, call.dtype, call.chunk_size, call.accumulate,
            call.skip_ignored,
        )  # fmt: skip
    if whole:
        bias = None if call.bias is None else call.bias.to(x.dtype)
        logits, target = (_for_cross_entropy(each) for each in (logits_on_shards(x, w.to(x.dtype), bias), call.target))
        return loss_of_whole_rows(cross_entropy, logits, target, None, call.loss, call.wanted, call.dtype)

    def of_rank(x, w, bias, target, loss, shards):
        return _loss_of_probabilities(replace(call, input=x, w=w, bias=bias, target=target, loss=loss), shards)

    return linear_loss_of_probabilities(of_rank, x, w, call.bias, call.target, call.loss, call.wanted, call.dtype)


def _composed(call: _Call) -> Tensor | CrossEntropyOutput:
    """By torch's operations, with all logits in memory."""
    x, target, loss = call.input, call.target, call.loss
    logits = _for_cross_entropy(whole_logits(x, call.w, call.bias, target, loss.ignore_index))
    of_target, arithmetic = _for_cross_entropy(target), arithmetic_of(x)
    found: Any = composed(logits, of_target, loss, call.wanted, call.dtype, arithmetic, name=_NAME)
    ignored = call.ignored
    if ignored is None:
        return found
    # Code that torch 2.11 compiles cannot return what _replace makes.
    return CrossEntropyOutput(found.loss, found.lse.masked_fill(ignored, 0.0), *found[2:])


def _traced(call: _Call) -> Tensor | CrossEntropyOutput:
    """By one registered operator, which gives the gradients beside the loss.

    A loop over chunks would be unrolled for one number of rows. A backward pass that made the gradients from the loss
    alone would multiply by linear_weight once more.
    """
    x, wanted = call.input, call.wanted
    y, _, _, _, lse, z, *stats = torch.ops.fused_softmax.linear_cross_entropy.default(
        x.reshape(-1, x.shape[-1]), call.w, call.target.reshape(-1), call.bias, *call.loss.traced(), call.chunk_size,
        call.accumulate, _asked(x, call.w, call.bias), *(wanted[:3] if wanted.beside else ()),
    )  # fmt: skip
    stats = refusing(_NAME, STATISTICS, stats, y, LOSS) if wanted.stats else stats
    return _output(y, lse, z, stats, wanted, call.loss, call.target.shape, call.dtype, call.ignored)


def _of_targets(call: _Call, shards: Shards | None = None, summed: bool = True) -> Tensor | CrossEntropyOutput:
    """By kernels, of classes. shards: who has which; the weight then has this rank's.

    summed: whether the input's gradient is summed over ranks.
    """
    rows, flat = call.input.reshape(-1, call.input.shape[-1]), call.target.reshape(-1).contiguous()
    kept = counted(flat, call.loss.ignore_index) if call.skip_ignored else None
    if kept is not None:
        rows, flat = rows[kept], flat[kept]
    if shards is None:
        found = _apply(rows, call.w, call.bias, flat, call.loss, _how_of(rows, call))
        y, lse, z, *stats = found if call.wanted.beside else (found, None, None)
    else:
        asked = _asked(rows, call.w, call.bias)
        linear = linear_of(rows, call.w, call.chunk_size, call.accumulate, asked[1], shards.sizes)
        over_ranks = OfCall(call.loss, linear, shards, call.dtype, summed=summed)
        y, lse, z, *stats = LinearSharded.apply(rows, call.w, call.bias, flat, over_ranks, asked)
    if kept is not None:
        n, reduced = call.target.numel(), call.loss.reduction != "none"
        y, z = (each if each is None or reduced else spread(each, kept, n) for each in (y, z))
        lse = None if lse is None else spread(lse, kept, n)
        stats = [spread(each, kept, n) for each in stats]
    return _output(y, lse, z, stats, call.wanted, call.loss, call.target.shape, call.dtype, call.ignored)


def _of_probabilities(
    call: _Call, shards: Shards | None = None, summed: bool = True, traced: bool = False
) -> Tensor | CrossEntropyOutput:
    """By kernels, of probabilities. shards, summed: as `_of_targets` has them. traced: by a registered operator."""
    y, lse, z = _loss_of_probabilities(call, shards, summed, traced)
    return _output(y, lse, z, (), call.wanted, call.loss, call.input.shape[:-1], call.dtype, None)


def _loss_of_probabilities(
    call: _Call, shards: Shards | None = None, summed: bool = True, traced: bool = False
) -> tuple[Tensor, Any, Any]:
    """(the loss, lse and z-loss) of rows [n] if not reduced. lse and z-losses are None if nothing needs them."""
    w, bias, target, loss = call.w, call.bias, call.target, call.loss
    rows, options = call.input.reshape(prod(call.input.shape[:-1]), call.input.shape[-1]), Divergence.of_loss(loss)
    of_classes = weight_for_kernels(loss.weight, call.input)
    if shards is not None:  # of which the weight has no padding any more
        of_classes = None if of_classes is None else of_classes[: len(w)]
        target, of_classes = resolved(target[..., : len(w)], of_classes)
    # Not len, by which an export has one number of rows.
    t, beside = target.reshape(rows.shape[0], w.shape[0]), call.wanted.beside or bool(loss.lse_square_scale)
    if traced:
        y, lse = torch.ops.fused_softmax.linear_divergence.default(
            rows, w, bias, t, None, None, *options.traced(), of_classes, loss.label_smoothing, call.chunk_size,
            call.accumulate, *((True,) if beside else ()),
        )  # fmt: skip
        return losses_of(y, lse if beside else None, loss, y.dtype)
    layers, reduction = Layers(rows, w, bias, t, weight=of_classes), "none" if beside else loss.reduction
    y, lse = of_layers(
        _NAME, layers, options, None, reduction, call.chunk_size, call.accumulate, shards, summed, beside
    )
    return losses_of(y, lse, loss, y.dtype) if beside else (y, None, None)


class _How(NamedTuple):
    """What a call does, beside its tensors and numbers.

    asked: which gradients, of input, weight and bias, the forward pass makes or prepares. kind, steps: of a loss whose
    logits are all kept, with their gradient, until the backward pass makes the products.
    """

    linear: Linear
    asked: Sequence[bool]
    wanted: Wanted
    kind: Kind | None = None
    steps: Steps | None = None


def _prepare_call(of: _Call) -> Launched:
    """The call for tensors like these: call(input, linear_weight, target, linear_bias, weight, numbers of the loss)."""
    of_target, features, is_flat = of.target.shape, of.input.shape[-1], of.input.ndim == 2
    wanted, dtype = of.wanted, of.dtype
    rows, alike = of.input.reshape(-1, features), replace(of.loss, weight=None)  # what is kept holds no tensor
    how = _how_of(rows, of)
    if keeps_logits(rows, how.linear, how.asked, of.loss):
        kind = Kind(alike, wanted, dtype, inplace=True, at_once=True)
        logits = torch.empty(len(rows), len(of.w), dtype=rows.dtype, device=rows.device, requires_grad=True)
        steps = functions_of(prepare_steps(kind, logits, of.target.reshape(-1).contiguous(), of.loss))
        how = how._replace(kind=kind, steps=steps)

    def call(input, linear_weight, target, linear_bias, weight, numbers):
        rows = input if is_flat else input.reshape(-1, features)
        flat = (target if is_flat else target.reshape(-1)).contiguous()
        found = _apply(rows, linear_weight, linear_bias, flat, loss_now(alike, weight, input, numbers), how)
        y, lse, z, *stats = found if wanted.beside else (found, None, None)
        return _output(y, lse, z, stats, wanted, alike, of_target, dtype, None)

    return Launched(call)


def _how_of(rows: Tensor, call: _Call) -> _How:
    asked = _asked(rows, call.w, call.bias)
    linear = linear_of(rows, call.w, call.chunk_size, call.accumulate, asked[1])
    return _How(linear, asked if call.loss.reduction != "none" else [False] * 3, call.wanted)


def _output(
    y, lse, z, stats, wanted: Wanted, loss: Loss, shape, dtype: torch.dtype, ignored: Tensor | None
) -> Tensor | CrossEntropyOutput:
    """What the caller asked for, losses in `dtype`."""
    z = z.to(dtype) if wanted.z_loss else None
    lse = lse if ignored is None else lse.masked_fill(ignored.reshape(-1), 0.0)
    return output_of(shaped(y, y.shape, dtype), lse, z, stats, wanted, loss.reduction, shape)


class _LinearCrossEntropy(torch.autograd.Function):
    """The results of `forward`, and gradients of input, linear_weight and linear_bias, chunk by chunk."""

    @staticmethod
    def forward(ctx, x, w, bias, target, loss, how):
        ctx.set_materialize_grads(False)
        ctx.loss, ctx.how, ctx.dlogits = loss, how, None
        if how.steps is None:
            results, totals, gradients = forward(x, w, bias, target, loss, how.linear, how.asked, how.wanted)
        else:
            gradients, ((_, ctx.dlogits),) = None, chunks(*lowered(x, w, bias), how.linear)
            results, _, totals = run_steps(
                how.steps, ctx.dlogits, target, loss, loss.numbers, None, how.kind, ctx.dlogits
            )  # fmt: skip
        ctx.gradients = gradients
        # In fp16 a mean's division would make gradients underflow that a scaled loss would have kept: it comes later.
        ctx.late = None
        if gradients is not None and divides_late(x, loss):  # where every target is ignored there is a gradient, of 0
            ctx.late = 1.0 / torch.where(totals[1].sum() == 0, 1.0, totals[0].sum())  # type: ignore[index]
        if ctx.late is not None and loss.lse_square_scale and loss.weight is not None:
            ctx.gradients = None  # loss and z-loss are divided by totals of their own
        ctx.save_for_backward(x, w, bias, target, totals, loss.weight)
        if not how.wanted.beside:
            return results[0]
        ctx.mark_non_differentiable(*results[5:])
        return results

    @staticmethod
    def backward(ctx, dy, dlse=None, dz=None, *of_stats):
        refuse(_NAME, STATISTICS, of_stats, LOSS)
        linear = ctx.how.linear
        dy, dlse, dz = resolved(dy, dlse, dz)
        x, w, bias, target, totals, weight = saved_of(ctx, _NAME)
        # Hooks of saved tensors may return other strides.
        target, totals = target.contiguous(), totals if totals is None else totals.contiguous()
        loss = ctx.loss if weight is None else replace(ctx.loss, weight=weight.contiguous())
        asked = list(ctx.needs_input_grad[:3])
        nothing = (None,) * 3
        if dy is None and dlse is None and dz is None:
            return (None,) * 3 + nothing
        if torch.is_grad_enabled():
            return *differentiable_gradient(x, w, bias, target, loss, asked, dy, dlse, dz), *nothing
        alone = dlse is None and dz is None
        if alone and ctx.gradients is not None and not batched(dy):
            # Given away: whoever has them may change them, and a second backward computes them again.
            gradients, ctx.gradients = ctx.gradients, None
            factor = of_counted(dy if ctx.late is None else dy * ctx.late, left_out_of(target, loss))
            return *gradients.times(factor, x, w, bias), *nothing
        if alone and ctx.dlogits is not None and not batched(dy):
            dlogits, ctx.dlogits = ctx.dlogits, None
            left_out = left_out_of(target, loss)
            ctx.how.steps.multiply(dlogits, of_counted(dy, left_out))
            wide = w.dtype != x.dtype
            gradients = Gradients(*lowered(x, w, bias), linear, asked, wide=wide, left_out=left_out)
            gradients.add(0, dlogits)
            return *gradients.in_dtypes(x, w, bias), *nothing
        if dy is None:
            dy = torch.zeros((), dtype=arithmetic_of(x), device=x.device)
        if batched(dy, dlse, dz):
            found = torch.ops.fused_softmax.linear_cross_entropy_backward.default(
                dy, x, w, target, bias, *loss.traced(), linear.chunk_size,
                "fp32" if linear.accumulate else "input", asked, *(() if alone else (dlse, dz)),
            )  # fmt: skip
            return *[each if wanted else None for each, wanted in zip(found, asked, strict=True)], *nothing
        if loss.mean and totals is None:  # each program counted for itself
            totals = totals_of(target, loss, w.shape[0], arithmetic_of(x))
        return *backward(x, w, bias, target, totals, loss, linear, asked, dy, dlse, dz), *nothing


# As its apply, without its search for functorch's wrappers: a call under a transform does not come here.
_apply = super(torch.autograd.Function, _LinearCrossEntropy).apply


def _asked(*tensors: Tensor | None) -> list[bool]:
    """Which of the tensors need a gradient."""
    return [each is not None and needs_grad(each) for each in tensors]


def forward(
    x: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, loss: Loss, linear: Linear, asked: Sequence[bool],
    wanted: Wanted = NOTHING_MORE,
) -> "tuple[tuple, Tensor | None, Gradients | None]":  # fmt: skip
    """((loss, lse, z-loss, statistics), a mean's totals, those gradients of x, w and bias that are asked for).

    Results are in the dtype of the arithmetic; what nobody wants may be None or missing, and gradients are None where
    there are none. loss: its weight contiguous, in the dtype of the arithmetic; here and below.
    """
    dtype = arithmetic_of(x)
    totals = totals_of(target, loss, w.shape[0], dtype) if loss.mean else None
    late = any(asked) and divides_late(x, loss)
    gradients, lse = None, None
    # What is divided late may be more than fp16 holds, and by classes nothing wider holds the weight's gradient.
    if any(asked) and asked[1] and not late and goes_by_classes(x, w, linear.chunk_size):
        wide = dtype if linear.accumulate else x.dtype
        rows, lse, made = by_classes(
            x, w, bias, target, loss, totals, linear.chunk_size * len(w), wide, asked, wanted.lse
        )  # fmt: skip
        gradients = Gradients(x, w, bias, linear, asked, made=made)
    else:
        of_chunk, totals_of_chunk = (replace(loss, reduction="sum"), None) if late else (loss, totals)
        factors, gradients = lowered(x, w, bias), None
        if any(asked):
            left_out = left_out_of(target, loss) if asked[1] else None
            gradients = Gradients(*factors, linear, asked, wide=late or w.dtype != x.dtype, left_out=left_out)
        rows = by_rows(*factors, target, of_chunk, totals_of_chunk, linear, gradients, wanted.lse)
        lse = rows.m + rows.ls if wanted.lse else None  # type: ignore[operator]
    if loss.reduction == "none":
        y, z = rows.loss, rows.z
        y = y if z is None else y + z
    else:
        y, z = finish(rows, totals, loss, dtype)
    if wanted.z_loss and z is None:
        z = torch.zeros_like(y)
    return (y, lse, z, *stats_of(rows, target, loss)), totals, gradients and gradients.done()


def backward(
    x: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, totals: Tensor | None, loss: Loss, linear: Linear,
    asked: Sequence[bool], dy: Tensor, dlse: Tensor | None = None, dz: Tensor | None = None,
) -> list[Tensor | None]:  # fmt: skip
    """The gradients that are asked for, by logits that are made again; dy, dlse and dz are of loss, lse and z-loss."""
    left_out, factors = left_out_of(target, loss, dlse) if asked[1] else None, lowered(x, w, bias)
    gradients = Gradients(*factors, linear, asked, wide=w.dtype != x.dtype, left_out=left_out)
    loss = replace(loss, stats=False)
    dz = None if dz is None else dy + dz
    for start, logits in chunks(*factors, linear):
        here = slice(start, start + len(logits))
        rows = losses.forward(logits, target[here], loss, totals)
        of_rows = [each if each is None or each.ndim == 0 else each[here] for each in (dy, dz, dlse)]
        losses.backward(
            logits, target[here], rows.m, rows.ls, loss, totals=totals, dy=of_rows[0], dz=of_rows[1], dlse=of_rows[2],  # type: ignore[arg-type]
            dx=logits,
        )  # fmt: skip
        gradients.add(start, logits)
    return gradients.in_dtypes(x, w, bias)


def differentiable_gradient(
    x: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, loss: Loss, asked: Sequence[bool],
    dy: Tensor | None, dlse: Tensor | None = None, dz: Tensor | None = None,
) -> list[Tensor | None]:  # fmt: skip
    """The gradients, composed of torch's operations, for a second derivative."""
    x, w, bias = apart(x, w, bias)
    inputs = [each for each, wanted in zip((x, w, bias), asked, strict=True) if wanted]
    with autocast.off(x):
        logits = whole_logits(x, w, bias, target, loss.ignore_index)
        found = iter(differentiable_gradients(inputs, logits, target, loss, dy, dlse, dz))
    return [next(found) if wanted else None for wanted in asked]
