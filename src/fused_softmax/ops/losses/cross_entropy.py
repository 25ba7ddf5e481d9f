"""Cross-entropy of logits, whose class dim is 1, with class indices or probabilities.

loss = -sum_c w_c q_c (z_c - lse),  z = x * scale, or softcap * tanh(x * scale / softcap),  lse = log sum exp z.
Traffic: with a gradient, reduction mean or sum reads the logits once and writes the gradient once, in the forward pass
(2MN); reduction none reads the logits twice and writes once (3MN). Without a gradient the logits are read once (MN).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fused_softmax.core.calls import find, keep
from fused_softmax.core.checks import CHECK
from fused_softmax.core.launched import Launched, compose
from fused_softmax.core.no_gradient import LOSS, refusing
from fused_softmax.core.options import by_environment, refuse_batch_invariant
from fused_softmax.core.route import Route, checks_values, needs_grad, on_device, readable, resolved, route_of
from fused_softmax.ops import autocast
from fused_softmax.ops.losses import reference
from fused_softmax.ops.losses.divergence_launches import Pair
from fused_softmax.ops.losses.divergence_rows import losses_of, prepare_reduced
from fused_softmax.ops.losses.divergence_rows import with_lse as pair_with_lse
from fused_softmax.ops.losses.given_lse import lse_of_rows
from fused_softmax.ops.losses.launches import rows_for
from fused_softmax.ops.losses.options import (
    NUMBERS,
    WITHOUT_ROWS,
    Divergence,
    Loss,
    check_logits,
    check_lse,
    loss_of,
    refused_loss,
    weight_for_kernels,
)
from fused_softmax.ops.losses.output import STATISTICS, CrossEntropyOutput, TokenStats, Wanted, output_of, shaped
from fused_softmax.ops.losses.over_ranks.divergence import lacks, probabilities_over_ranks
from fused_softmax.ops.losses.over_ranks.dtensor import loss_of_whole_rows, loss_on_shards, mesh_of_loss
from fused_softmax.ops.losses.over_ranks.peers import in_one_launch, prepare_loss, states_by, written_at_once
from fused_softmax.ops.losses.over_ranks.steps import sharded
from fused_softmax.ops.losses.overwritten import begin_overwriting, check_overwritten
from fused_softmax.ops.losses.steps import Kind, Steps, as_rows, differentiated, prepare_steps, rows_of, run_steps
from fused_softmax.ops.softmax.scores import kind_of_scale
from fused_softmax.ranks.dtensor import as_dtensor
from fused_softmax.ranks.gather import peers_of, told_by
from fused_softmax.ranks.groups import Over, Refusing, Transport, check_over, over_of, shards_of, sizes_of
from fused_softmax.ranks.peers import UNEVEN, Peers, known

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # which PyTorch may be built without


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
    lse: Tensor | None = None,
    batch_invariant: bool | None = None,
    group: "ProcessGroup | None" = None,
    n_classes: int | None = None,
    shard_sizes: Sequence[int] | None = None,
    transport: Transport | None = None,
) -> Tensor | CrossEntropyOutput:
    """torch.nn.functional.cross_entropy, with the same results, and more that training asks for.

    input: logits [n_classes], [n, n_classes] or [n, n_classes, d1, ...]; float32, float16, bfloat16 or float64.
    target: class indices of the input's shape without its class dim, of int64, int32 or uint8; or probabilities of the
        input's shape and a float dtype. An index that is neither a class nor ignore_index makes its loss and its row of
        the gradient NaN, and so a sum or mean. On a CPU, and with FUSED_SOFTMAX_CHECK=1 in the environment, it raises
        IndexError.
    weight: [n_classes] of any float dtype, the weight of each class; a mean divides by the sum of the targets' weights.
        A constant beside class indices: one that requires a gradient raises RuntimeError, as in torch.
    ignore_index: targets of this value do not count; for class indices only.
    reduction: "mean", "sum" or "none". If a gradient is wanted, mean and sum write it in the forward pass. That of
        float16 logits is made in the backward pass, because what scales the loss is known only there.
    label_smoothing: in [0, 1]: how much of the target is spread over all classes.
    scale, softcap: the logits are input * scale, and then softcap * tanh(of that / softcap).
    lse_square_scale: adds lse_square_scale * lse ** 2 of every target to its loss (z-loss); a mean divides it by the
        number of targets that count.
    return_lse: adds lse, float32 or the input's float64, in the targets' shape, with its gradient, which is 0 or NaN
        where the lse of an ignored row is not finite.
    return_z_loss: adds the z-loss that is in the loss, reduced alike, with its gradient; 0 if lse_square_scale is.
    return_token_stats: adds TokenStats, from the same pass over the logits; the gradient then takes a second pass. A
        backward pass through them raises RuntimeError.
    inplace_backward: with mean or sum, writes the gradient over the logits and allocates nothing. The logits are then
        lost, and there is one backward pass and no second derivative. Compiled code allocates it all the same. As with
        torch's operations in place, a leaf and one of several views of an operation (chunk, unbind) raise. So does a
        second such loss of the same logits.
    dtype: of the loss; the input's if None, as in torch. float32 keeps the loss of half precision logits exact.
    lse: the log-sum-exp of longer rows, of which the input is a part (sampled classes, or a shard of them), in the
        targets' shape and a float dtype. The loss is lse - z of the target, and its gradient exp(z - lse), less 1 at
        the target. lse is a constant: it gets no gradient, and a second derivative holds it. The loss reads the
        targets' logits alone, and the gradient is made in the backward pass. A target that is not among the input's
        classes has to be ignored, and its row gets no gradient. return_lse returns the given lse.
    batch_invariant: as softmax's. A row's loss, lse, z-loss and statistics have the same bits in any batch, and so has
        its row of the gradient, where the same gradient comes back to it. A sum or mean adds the losses of all rows,
        and a mean divides by their number: these follow from the batch. Rows are summed in one order if their loss
        alone is computed, and may be in another if its gradient is written with it (mean and sum).

    group: of torch.distributed, over whose ranks the classes lie in shards: each rank gives its own columns of the
        logits, of weight and of probabilities, in rank order, as many as it has. Targets that are classes are among
        all, the same on all ranks. So is the loss; each rank's incoming gradient is that of this one loss, which is
        never summed over ranks. Every rank of the group makes the same call. There is no second derivative. With
        probabilities, return_token_stats and a weight that requires a gradient raise ValueError.
        It takes no batch_invariant.
    n_classes: with group: of all shards together, if not the sum of their columns. Columns past it, at the end of the
        last shards, are padding without a gradient.
    shard_sizes: with group: the classes of each rank, in rank order, the same on all ranks; 0 is a size. Without it all
        ranks have as many as each other.
    transport: with group: how ranks talk to each other: "collective" by one all_gather of the group's backend; "peer"
        by memory that GPUs of one host write into each other's: in the launch that reads the logits, or in one of its
        own with class weights, label_smoothing, return_token_stats or probabilities. None takes "peer" on up to four
        GPUs where it can.

    With lse, label_smoothing, lse_square_scale, return_token_stats and probabilities raise ValueError, because they
    need more of the row.

    Returns the loss, [] or of the targets' shape; a CrossEntropyOutput if more was asked for.
    Raises TypeError, ValueError or RuntimeError as torch for arguments that do not fit, naming the argument; with
    group, on CPUs and with FUSED_SOFTMAX_CHECK=1, which compares the targets too, RuntimeError on every rank where
    ranks differ or one of them refuses its call. On GPUs such a call gives NaN, and the group's next call raises
    RuntimeError once; by a collective, where messages then differ in length, the backend's timeout ends the job.

    Szegedy et al. (label smoothing, arXiv 1512.00567); Chowdhery et al., "PaLM" (z-loss, arXiv 2204.02311); "Gemma 2"
    (softcap, arXiv 2408.00118).

    >>> cross_entropy(torch.tensor([[0.0, 1.0, 2.0]], device="cuda"), torch.tensor([2], device="cuda"))
    tensor(0.4076, device='cuda:0')
    >>> cross_entropy(logits, target, group=torch.distributed.group.WORLD)  # [8192, 64128] on each of two ranks, [8192]
    """
    if batch_invariant is None:
        batch_invariant = by_environment()
    if group is not None or n_classes is not None or shard_sizes is not None or transport is not None:
        wanted = Wanted(bool(return_lse), bool(return_z_loss), bool(return_token_stats), bool(inplace_backward), dtype)
        options = {
            "weight": weight, "ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing,
            "softcap": softcap, "scale": scale, "lse_square_scale": lse_square_scale,
            "batch_invariant": batch_invariant,
        }  # fmt: skip
        return _of_shards(input, target, options, wanted, lse, over_of(group, n_classes, shard_sizes, transport))
    key = key_of(
        ignore_index, reduction, label_smoothing, softcap, scale, lse_square_scale,
        # Without gradients a loss alone is another call, which reads the logits and writes none.
        (return_lse, return_z_loss, return_token_stats, inplace_backward, dtype, torch.is_grad_enabled()),
        batch_invariant,
    )  # fmt: skip
    if key is not None:
        if lse is None:
            call = find("cross_entropy", key, input, target, weight)
        else:
            call = find("cross_entropy", key, input, target, weight, lse)
        if call is not None:
            return call(input, target, weight, label_smoothing, softcap, scale, lse_square_scale, lse)
    wanted = Wanted(bool(return_lse), bool(return_z_loss), bool(return_token_stats), bool(inplace_backward), dtype)
    options = {
        "weight": weight, "ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing,
        "softcap": softcap, "scale": scale, "lse_square_scale": lse_square_scale, "batch_invariant": batch_invariant,
    }  # fmt: skip
    return _cross_entropy(input, target, options, wanted, lse, key)


def key_of(
    ignore_index, reduction, label_smoothing, softcap, scale, lse_square_scale, wanted, batch_invariant=False
) -> Any:  # fmt: skip
    """All that a kept call depends on, except tensors and the values of numbers; None if a number has to be checked."""
    if CHECK or type(ignore_index) is not int or type(batch_invariant) is not bool:
        return None
    if label_smoothing == 0 and softcap is None and scale is None and lse_square_scale == 0:
        plain = type(label_smoothing) is not bool and type(lse_square_scale) is not bool
        return (ignore_index, reduction, wanted, batch_invariant) if plain else None
    if type(label_smoothing) is not float or not 0.0 <= label_smoothing <= 1.0:
        return None
    if softcap is not None and (type(softcap) is not float or not 0.0 < softcap < float("inf")):
        return None
    if scale is not None and (type(scale) is not float or scale == 0 or not -float("inf") < scale < float("inf")):
        return None
    if type(lse_square_scale) is not float:
        return None
    kind = label_smoothing > 0, softcap is not None, kind_of_scale(scale), lse_square_scale != 0
    return ignore_index, reduction, wanted, batch_invariant, kind


def _cross_entropy(input, target, options, wanted, lse, key):
    name = "cross_entropy"
    loss, n_classes = _checked(input, target, options, wanted)
    if lse is not None:
        check_lse(name, lse, target, loss)
    dtype = dtype_of_loss(name, input, target, wanted.dtype)
    mesh = mesh_of_loss(name, {"input": input, "lse": lse}, target, loss.weight)
    if mesh is not None:
        return _of_mesh(as_dtensor(input, mesh), target, loss, n_classes, wanted, dtype, lse)
    refused = refused_loss(input, dtype, target, loss)
    if input.numel() == 0 or target.numel() == 0:
        refused = "there are no logits"
    tensors = [each for each in (input, target, loss.weight, lse) if each is not None]
    route = route_of(name, *tensors, refused=refused, batches=False)
    probabilities = target.is_floating_point()
    if not probabilities and checks_values(input, target):
        check_targets(name, target, n_classes, loss.ignore_index)
    if route not in (Route.OPERATOR, Route.KERNEL):
        return _by_torch(input, target, loss, wanted, dtype, lse)
    if route is Route.OPERATOR and probabilities:
        return _traced_of_probabilities(input, target, loss, wanted, dtype)
    if route is Route.OPERATOR:
        return _traced(input, target, loss, wanted, dtype, lse)
    numbers = tuple(options[name] for name in NUMBERS)
    if probabilities:
        launched = _prepare_of_probabilities(input, target, loss, wanted, dtype)
    else:
        launched = _prepare_call(_kind_of(input, loss, wanted, dtype, lse), input, target, loss.weight, numbers, lse)
    if key is not None:
        keep(launched, name, key, input, target, loss.weight, *(() if lse is None else (lse,)))
    return launched(input, target, loss.weight, *numbers, lse)


def _of_mesh(input, target, loss, n_classes, wanted, dtype, lse):
    """The loss of a DTensor."""
    name, probabilities = "cross_entropy", target.is_floating_point()
    if loss.batch_invariant:
        refuse_batch_invariant(name, "the logits are a DTensor")
    if not probabilities and checks_values(input, target):
        check_targets(name, target, n_classes, loss.ignore_index)
    if wanted.inplace and loss.reduction != "none" and needs_grad(input):
        check_overwritten(name, input)
    if lse is None and not probabilities:
        return loss_on_shards(input, target, loss, wanted, dtype)
    return loss_of_whole_rows(cross_entropy, input, target, lse, loss, wanted, dtype)


def _by_torch(input, target, loss, wanted, dtype, lse):
    """The loss by torch's function where that does what is asked, and else by torch's operations."""
    if loss.batch_invariant and on_device(input) and input.numel():
        refuse_batch_invariant("cross_entropy", "torch's operations compute it")
    plain = loss.plain and wanted == Wanted() and lse is None
    if not plain or target.dtype == torch.int32 or (input.is_cuda and target.is_floating_point()):
        arithmetic = torch.float64 if torch.float64 in (input.dtype, dtype) else torch.float32
        return composed(input, target, loss, wanted, dtype, arithmetic, lse)
    weight = None if loss.weight is None else loss.weight.to(input.dtype)  # which torch alone asks to be one
    if target.dtype == torch.uint8 and input.ndim > 2:  # which torch takes of one dim alone
        target = target.long()
    return torch.nn.functional.cross_entropy(
        _spared(input, target, loss.ignore_index), target, weight, ignore_index=loss.ignore_index,
        reduction=loss.reduction, label_smoothing=loss.label_smoothing,
    )  # fmt: skip


def _kind_of(input, loss, wanted, dtype, lse) -> Kind:
    """What the kernels of a call compute, and when."""
    summed = loss.reduction != "none" and needs_grad(input)
    inplace = wanted.inplace and summed
    if inplace:
        _check_inplace(input, rows_for(rows_of(input), loss), wanted)
    # In fp16, gradients underflow that loss scaling would have kept, before the scaled loss comes back.
    # If lse is given, the forward pass holds no rows from which a gradient could be made.
    at_once = summed and not wanted.stats and (inplace or (input.dtype != torch.float16 and lse is None))
    return Kind(replace(loss, weight=None), wanted, dtype, inplace, at_once)


def _prepare_of_probabilities(
    input: Tensor, target: Tensor, loss: Loss, wanted: Wanted, dtype: torch.dtype
) -> Launched:  # fmt: skip
    """The call for targets that are probabilities: call(input, target, weight, and the loss's numbers, lse)."""
    given, beside = replace(loss, weight=None), wanted.beside or bool(loss.lse_square_scale)
    alike, flat = Divergence.of_loss(given), input.ndim == 2
    pair = Pair(rows_of(input), rows_of(target), weight_for_kernels(loss.weight, input))
    prepared = None if beside else prepare_reduced(pair, alike, None, loss.reduction)

    def build(_, run):
        def call(
            input, target, weight, label_smoothing=0.0, softcap=None, scale=None, lse_square_scale=0.0, given_lse=None
        ):
            loss = loss_now(given, weight, input, (label_smoothing, softcap, scale, lse_square_scale))
            asked = alike if loss is given else Divergence.of_loss(loss)
            pair = Pair(input, target, loss.weight) if flat else Pair(rows_of(input), rows_of(target), loss.weight)
            shape = _shape_of_rows(input) if beside or loss.reduction == "none" else ()
            if run is not None:
                return shaped(run(pair, asked, None), shape, dtype)
            return output_of(*losses_of(*pair_with_lse(pair, asked), loss, dtype), (), wanted, loss.reduction, shape)

        return call

    return compose(build, prepared, n=input.shape[0] if flat else None)


def _traced_of_probabilities(
    input: Tensor, target: Tensor, loss: Loss, wanted: Wanted, dtype: torch.dtype
) -> Tensor | CrossEntropyOutput:
    """One registered operator, which cannot write gradients beside the loss."""
    asked, weight = Divergence.of_loss(loss), weight_for_kernels(loss.weight, input)
    rows, m, ls, *_ = torch.ops.fused_softmax.divergence.default(
        rows_of(input), rows_of(target), *asked.traced(), weight, asked.label_smoothing
    )
    lse = m + ls if wanted.beside or loss.lse_square_scale else None
    return output_of(*losses_of(rows, lse, loss, dtype), (), wanted, loss.reduction, _shape_of_rows(input))


def _shape_of_rows(input: Tensor) -> tuple[int, ...]:
    """The shape of the losses of logits [n_classes] or [n, n_classes, ...]."""
    return (*input.shape[:1], *input.shape[2:]) if input.ndim > 1 else ()


def dtype_of_loss(name: str, input: Tensor, target: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a loss: of probabilities as wide as they are, as torch's."""
    found = autocast.result_dtype(name, input, dtype)
    return torch.promote_types(found, target.dtype) if dtype is None and target.is_floating_point() else found


def _checked(input, target, options, wanted) -> tuple[Loss, int]:
    """(what a call asks of its losses, columns), or an error that names the argument."""
    name = "cross_entropy"
    if not isinstance(input, Tensor):
        raise TypeError(f"{name}: input must be a Tensor, not {type(input).__name__}")
    if input.is_nested or input.layout != torch.strided:
        raise RuntimeError(f"{name}: input must be a dense strided tensor, got {input.layout}")
    check_logits(name, "input", input.dtype, tuple(input.shape), target)
    n_classes = input.shape[0 if input.ndim == 1 else 1]
    return loss_of(name, input, target, n_classes, wanted.dtype, wanted.stats, **options), n_classes


def _of_shards(input, target, options, wanted, lse, over):
    """A call whose classes lie over the ranks of a group."""
    name, (group, n_classes, shard_sizes, transport) = "cross_entropy", over
    weight, softcap, scale = options["weight"], options["softcap"], options["scale"]
    key = peers = None
    if weight is None and lse is None and transport != "collective" and not CHECK:
        peers = known(group, getattr(input, "device", None))
        of_call = *wanted, torch.is_grad_enabled(), n_classes, shard_sizes, transport
        key = key_of(**{name: value for name, value in options.items() if name != "weight"}, wanted=of_call)
    if isinstance(peers, Peers) and key is not None:
        call = find("cross_entropy by peers", (peers.number, key), input, target)
        if call is not None:
            peers.ready(name)
            return call(peers, group, input, target, softcap, scale)
    with Refusing(name, over, input, target):
        check_over(name, over, input, target, weight)
        loss, columns = _checked(input, target, options, wanted)
        if loss.batch_invariant:
            refuse_batch_invariant(name, "ranks cut their rows as their number asks, with group=")
        input, target = resolved(input, target)
        if lse is not None:
            raise ValueError(f"{name}: lse and group= exclude each other: the group's ranks make lse")
        probabilities = target.is_floating_point()
        if probabilities and lacks(loss):
            raise ValueError(f"{name}: {lacks(loss)}")
        if not probabilities and wanted.inplace and loss.reduction != "none" and needs_grad(input):
            _check_inplace(input, rows_of(input), wanted)
        sizes = sizes_of(name, over, columns)
        if not probabilities and checks_values(input, target):
            check_targets_of_all(name, target, sizes, over, loss.ignore_index)
    asked = {"operation": name, "dtype": input.dtype, **loss.asked(), "wanted": tuple(wanted)}
    if probabilities:
        return _of_own_probabilities(input, target, loss, wanted, asked, sizes, over)
    shards = shards_of(name, sizes, target.numel(), over, input.device, asked, target)
    result_dtype = autocast.result_dtype(name, input, wanted.dtype)
    peers = peers_of(name, transport, group, input, target)
    merging = peers if peers is not None and in_one_launch(input, target, loss, shards) else None
    if merging is not None and written_at_once(input, loss, wanted):
        launched = prepare_loss(input, target, loss, wanted, result_dtype, shards, merging)
        if key is not None:
            keep(launched, "cross_entropy by peers", (merging.number, key), input, target)
        return launched(merging, group, input, target, softcap, scale)
    how = () if merging is None else ((), states_by(merging, wanted, result_dtype))
    shards = told_by(peers, name, shards)
    y, of_rows, z, *stats = sharded(*as_rows(input, target), loss, shards, wanted, result_dtype, *how)
    return output_of(y, of_rows, z, stats, wanted, loss.reduction, tuple(target.shape))


def _of_own_probabilities(input, target, loss: Loss, wanted: Wanted, asked: dict, sizes: tuple[int, ...], over: Over):
    """A loss of probabilities, of which each rank has its own columns, as it has of the logits."""
    name, shape = "cross_entropy", _shape_of_rows(input)
    asked = asked | {"target_dtype": target.dtype}
    shards = shards_of(name, sizes, math.prod(shape), over, input.device, asked)
    shards = told_by(peers_of(name, over.transport, over.group, input, target), name, shards)
    dtype = dtype_of_loss(name, input, target, wanted.dtype)
    found = probabilities_over_ranks(rows_of(input), rows_of(target), loss, shards, dtype)
    return output_of(*found, (), wanted, loss.reduction, shape)


def prepare_plain(
    input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, label_smoothing: float
) -> Launched:
    """torch's own cross_entropy, for arguments that were checked: call(input, target, weight, label_smoothing, ...)."""
    loss = Loss(
        ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing,
        batch_invariant=by_environment(),
    )  # fmt: skip
    at_once = needs_grad(input) and reduction != "none" and input.dtype != torch.float16
    # Below autograd, autocast has cast nothing yet. On a GPU torch casts the operations of which it composes this one.
    kind = Kind(loss, Wanted(), autocast.result_dtype("cross_entropy", input), False, at_once)
    return _prepare_call(kind, input, target, weight, tuple(getattr(loss, name) for name in NUMBERS))


def _prepare_call(
    kind: Kind, input: Tensor, target: Tensor, weight: Tensor | None, numbers: tuple, lse: Tensor | None = None
) -> Launched:
    """The call for tensors like these: call(input, target, weight, and the loss's numbers, lse)."""
    differentiates, given = needs_grad(input), kind.loss
    simple = input.ndim == 2 and (input.stride(1) == 1 or input.shape[1] == 1) and target.is_contiguous()
    simple = simple and rows_for(input, given).data_ptr() == input.data_ptr()
    of_rows = None if lse is None else lse_of_rows(lse, input)
    rows, flat = as_rows(input, target)
    steps = prepare_steps(kind, rows_for(rows, given), flat, loss_now(given, weight, input, numbers), of_rows)

    def build(n, *steps):
        steps, shape = Steps(*steps), target_shape if n is None else (n,)

        def call(
            input, target, weight, label_smoothing=0.0, softcap=None, scale=None, lse_square_scale=0.0, given_lse=None
        ):
            claim = begin_overwriting(input) if kind.inplace else None
            rows, flat = input, target
            if not simple:
                rows, flat = as_rows(input, target)
                rows = rows_for(rows, given)
            of_rows = None if given_lse is None else lse_of_rows(given_lse, input)
            loss = loss_now(given, weight, input, (label_smoothing, softcap, scale, lse_square_scale))
            of_call = loss, loss.numbers, of_rows
            if differentiates:
                results = differentiated(rows, flat, of_call, (kind, steps, claim, None))
                if not kind.wanted.beside:
                    return results if given.reduction != "none" else shaped(results, shape)
                y, lse, z, *stats = results
            else:
                y, lse, z, *stats = run_steps(steps, rows, flat, *of_call, kind, None)[0]
            lse = lse if given_lse is None else given_lse.detach()
            return output_of(y, lse, z, stats, kind.wanted, given.reduction, shape)

        return call

    target_shape = tuple(target.shape)
    return compose(build, *steps, n=target_shape[0] if simple and target.ndim == 1 else None, by_row=True)


def loss_now(loss: Loss, weight: Tensor | None, input: Tensor, numbers: tuple) -> Loss:
    """A kept call's loss with the weight and the numbers of one call."""
    if weight is None and loss.constant:
        return loss
    label_smoothing, softcap, scale, lse_square_scale = numbers
    return Loss(
        weight=weight_for_kernels(weight, input), ignore_index=loss.ignore_index, reduction=loss.reduction,
        label_smoothing=label_smoothing if loss.smooth else 0.0, softcap=None if loss.softcap is None else softcap,
        scale=1.0 if scale is None else scale, lse_square_scale=lse_square_scale if loss.lse_square_scale else 0.0,
        batch_invariant=loss.batch_invariant, stats=loss.stats,
    )  # fmt: skip


def composed(
    input, target, loss: Loss, wanted: Wanted, dtype: torch.dtype, arithmetic: torch.dtype,
    given_lse: Tensor | None = None, name: str = "cross_entropy",
) -> Tensor | CrossEntropyOutput:  # fmt: skip
    """By torch's operations: on devices without kernels, under functorch's transforms, and for what kernels refuse."""
    arguments = {"reduction": loss.reduction, **loss.reference_arguments(), "dtype": dtype, "arithmetic": arithmetic}
    y, lse, z = reference.cross_entropy(input, target, **arguments, lse=given_lse)
    if not wanted.beside:
        return y
    lse = lse if given_lse is None else given_lse.detach()
    stats = None
    if wanted.stats:
        of_tokens = reference.token_stats(input, target, **arguments)
        stats = TokenStats(*refusing(name, STATISTICS, of_tokens, y, LOSS))
    return CrossEntropyOutput(y, lse if wanted.lse else None, z if wanted.z_loss else None, stats)


def _traced(input, target, loss: Loss, wanted: Wanted, dtype: torch.dtype, given_lse: Tensor | None):
    """One registered operator. It cannot write the gradient over the logits, and allocates one."""
    if given_lse is not None:
        y = torch.ops.fused_softmax.cross_entropy_given_lse.default(
            rows_of(input), target.reshape(-1), given_lse.detach().reshape(-1), *loss.traced(WITHOUT_ROWS),
            dtype,
        )  # fmt: skip
        z = torch.zeros_like(y) if wanted.z_loss else None
        return output_of(y, given_lse.detach(), z, (), wanted, loss.reduction, target.shape)
    y, z, m, ls, *stats = torch.ops.fused_softmax.cross_entropy.default(
        rows_of(input),
        target.reshape(-1),
        *loss.traced(),
        dtype,
        wanted.stats,
        *((True,) if loss.batch_invariant else ()),
    )
    stats = refusing("cross_entropy", STATISTICS, stats, y, LOSS) if wanted.stats else stats
    return output_of(y, m + ls if wanted.lse else None, z, stats, wanted, loss.reduction, target.shape)


def _spared(input: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Logits with 0 in ignored rows. Otherwise torch makes NaN of their gradient of 0, if they hold NaN or an infinity.

    If a call may look at values, logits are copied only if there is such a row.
    """
    if target.is_floating_point():
        return input
    ignored, class_dim = target.long() == ignore_index, 0 if input.ndim == 1 else 1
    if readable(target):
        if not needs_grad(input) or not ignored.any():
            return input
        if input.detach().movedim(class_dim, -1)[ignored].isfinite().all():
            return input
    return torch.where(ignored.unsqueeze(class_dim), 0.0, input)


def _check_inplace(input: Tensor, rows: Tensor, wanted: Wanted) -> None:
    check_overwritten("cross_entropy", input)
    alone = len(rows) == 1 or rows.stride(0) >= rows.shape[1]  # and not one memory for several rows
    contiguous = rows.stride(-1) == 1 or rows.shape[-1] <= 1
    if rows.data_ptr() != input.data_ptr() or not alone or not contiguous or wanted.stats:
        raise RuntimeError(
            "cross_entropy: inplace_backward takes logits [n, n_classes] of contiguous rows, without token stats; with "
            "batch_invariant, of rows that need no copy to be read alike"
        )


def check_targets_of_all(name: str, target: Tensor, sizes: tuple[int, ...], over: Over, ignore_index: int) -> None:
    """`check_targets` among the classes of all ranks, of which each has so many columns."""
    try:
        check_targets(name, target, over.n_classes or sum(sizes), ignore_index)
    except IndexError as error:
        if over.shard_sizes is not None:
            raise
        raise IndexError(f"{error}, of the columns of equal shards {sizes}. {UNEVEN}") from None


def check_targets(name: str, target: Tensor, n_classes: int, ignore_index: int) -> None:
    """IndexError for an index that is neither a class nor ignore_index."""
    flat = target.reshape(-1).long()
    wrong = (flat != ignore_index) & ((flat < 0) | (flat >= n_classes))
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise IndexError(f"{name}: target {int(flat[row])} of row {row} is out of range [0, {n_classes - 1}]")
