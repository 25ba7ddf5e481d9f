"""The divergence of a student's linear layer from a teacher's, from the hidden states of both: see `linear_pairs`."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from fused_softmax.core.checks import arithmetic_of
from fused_softmax.core.described import shape_of
from fused_softmax.core.route import Route, needs_grad, route_of
from fused_softmax.ops.losses.divergence import check_divergence, divergence, reduced
from fused_softmax.ops.losses.divergence_rows import pair_of, refused, with_rows
from fused_softmax.ops.losses.linear_by_rows import as_autocast_has, check_layer
from fused_softmax.ops.losses.linear_pairs import Layers, of_layers, whole
from fused_softmax.ops.losses.options import Divergence
from fused_softmax.ops.losses.over_ranks.dtensor import linear_divergence_on_shards, own_classes
from fused_softmax.ops.losses.over_ranks.linear import GatheredRows
from fused_softmax.ranks.dtensor import as_dtensor, mesh_of
from fused_softmax.ranks.gather import peers_of, told_by
from fused_softmax.ranks.groups import Over, Refusing, Shards, Transport, check_over, over_of, shards_of, sizes_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # which PyTorch may be built without

_NAME = "linear_divergence"
_LAYERS = "input", "linear_weight", "linear_bias", "target_input", "target_weight", "target_bias"


def linear_divergence(
    input: Tensor,
    linear_weight: Tensor,
    target_input: Tensor,
    target_weight: Tensor,
    *,
    linear_bias: Tensor | None = None,
    target_bias: Tensor | None = None,
    kind: str = "kl",
    beta: float = 0.5,
    scale: float | None = None,
    softcap: float | None = None,
    temperature: float | Tensor | None = None,
    target_scale: float | None = None,
    target_softcap: float | None = None,
    target_temperature: float | Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    chunk_size: int | None = None,
    accumulate: str = "fp32",
    dtype: torch.dtype | None = None,
    group: "ProcessGroup | None" = None,
    n_classes: int | None = None,
    shard_sizes: Sequence[int] | None = None,
    transport: Transport | None = None,
    input_sharded: bool = False,
) -> Tensor:
    """divergence(linear(input, linear_weight, linear_bias), linear(target_input, target_weight, target_bias), ...).

    The logits of neither model are ever in memory as a whole.

    input: the student's hidden states [..., in_features]; float32, float16, bfloat16 or float64.
    linear_weight: [n_classes, in_features]; linear_bias: [n_classes]. Each has the input's dtype, or float32 beside
        16 bits: products are in the input's dtype, and the gradient in the weight's.
    target_input: the teacher's hidden states, of the same leading shape; their size and dtype may differ.
    target_weight: [n_classes, target features]; target_bias: [n_classes]; of the target_input's dtype. The teacher gets
        no gradient: a tensor of its that requires one raises RuntimeError.
    kind, beta, scale, softcap, temperature, target_scale, target_softcap, target_temperature, weight, reduction, dtype:
        as `divergence` takes them. A row of weight 0 adds nothing to any gradient, whatever it holds.
    chunk_size: rows whose logits exist at once; by default as many as take about 1 GiB, or one chunk where a second
        copy of the weight's gradient would take more.
    accumulate: "fp32" adds up the weight's gradient over chunks in float32; "input" in the input's dtype.

    group, n_classes, shard_sizes, transport: as divergence's. Each rank gives its own rows of linear_weight and
        target_weight, and of linear_bias and target_bias. The hidden states, temperatures and weights of rows are the
        same on all ranks, and so is the input's gradient, which is summed over them as `accumulate` says, each chunk
        while the next one's products are made. These weights and biases may be DTensors in [Shard(0)] over the group.
        Without group=, a DTensor among the hidden states, weights and biases takes all of them on the same mesh.
    input_sharded: with group: each rank gives as many rows [rows, in_features] of the input and [rows, target features]
        of the target_input, in rank order, and gets their gradient; temperatures, weight and rows of the result
        [ranks * rows] are those of all.

    With mean and sum the gradients are made in the forward pass, but those of float16 and of "none" in the backward
    pass, which makes the logits again. So does the backward pass of compiled code, which has chunks too.
    A row's divergence has the same bits in any batch for which cuBLAS chooses the same kernels.
    Returns the divergence, [] or of the leading shape; float32, or float64 for float64.
    Raises TypeError, ValueError or RuntimeError for arguments that do not fit, naming the argument; with group, also as
    cross_entropy where ranks differ.

    >>> linear_divergence(hidden, student.lm_head.weight, of_teacher, teacher.lm_head.weight, kind="jsd")
    tensor(0.4103, device='cuda:0', grad_fn=<_LinearPairsBackward>)
    """
    given: dict[str, Any] = {
        "kind": kind, "beta": beta, "scale": scale, "softcap": softcap, "temperature": temperature,
        "target_scale": target_scale, "target_softcap": target_softcap, "target_temperature": target_temperature,
        "target_is": "logits",
    }  # fmt: skip
    layers = input, linear_weight, linear_bias, target_input, target_weight, target_bias
    of_call = layers, given, weight, reduction, {"chunk_size": chunk_size, "accumulate": accumulate}, dtype
    if group is None and n_classes is None and shard_sizes is None and transport is None and not input_sharded:
        return _linear_divergence(*of_call)
    return _of_shards(*of_call, over_of(group, n_classes, shard_sizes, transport), bool(input_sharded))


def _linear_divergence(layers, given, weight, reduction, how, dtype) -> Tensor:
    layers, options = _checked(layers, given, weight, reduction, how, dtype)
    of_rows = {"weight": weight, "temperature": options.temperature, "target_temperature": options.target_temperature}
    of_rows = {name: each for name, each in of_rows.items() if isinstance(each, Tensor)}
    mesh = mesh_of(_NAME, dict(zip(_LAYERS, layers, strict=True)), of_rows)
    if mesh is not None:

        def of_rank(layers, of_rows, reduction, shards):
            temperatures = {name: each for name, each in of_rows.items() if name != "weight"}
            of_call = replace(options, **temperatures), of_rows.get("weight"), reduction, how
            return _rows(layers, *of_call, shards)

        of_mesh = [None if each is None else as_dtensor(each, mesh) for each in layers]
        return linear_divergence_on_shards(of_rank, of_mesh, of_rows, reduction, dtype or arithmetic_of(layers[0]))
    input, target_input = layers[0], layers[3]
    leading, empty = input.shape[:-1], not input.numel()
    temperatures = [each for name, each in of_rows.items() if name != "weight"]
    tensors = [each for each in (*layers, *temperatures) if each is not None]
    why = "there are no logits" if empty else refused(input, target_input, options)
    route = route_of(_NAME, *tensors, refused=why, batches=False, holds="" if empty else "all logits")
    if route is Route.COMPOSED:
        if weight is not None:  # whose gradient of 0 times NaN would be NaN
            input = torch.where(weight.detach().unsqueeze(-1) == 0, 0.0, input)
        x, y = whole(input, *layers[1:3]), whole(*layers[3:])
        return divergence(x, y, **given, weight=weight, reduction=reduction, dtype=dtype)
    if route is Route.OPERATOR:
        x, h = _as_rows(layers)
        traced = with_rows(options, pair_of(x, h, options)).traced()
        both = x, *layers[1:3], h, *layers[4:]
        values, _ = torch.ops.fused_softmax.linear_divergence.default(*both, *traced, None, 0.0, *how.values())
        found = reduced(values.view(leading), weight, reduction)
    else:
        found = _rows(layers, options, weight, reduction, how)
        found = found.view(leading) if reduction == "none" else found
    return found.to(dtype or arithmetic_of(input))


def _of_shards(layers, given, weight, reduction, how, dtype, over: Over, input_sharded: bool) -> Tensor:
    """A call whose classes lie over the ranks of a group."""
    with Refusing(_NAME, over, *layers):
        check_over(_NAME, over, layers[0], layers[3], weight, given["temperature"], given["target_temperature"])
        layers, options = _checked(layers, given, weight, reduction, how, dtype, over, input_sharded)
        sizes = sizes_of(_NAME, over, len(layers[1]))
    input, linear_weight, _, target_input, *_ = layers
    alike = {
        "operation": _NAME, "dtype": input.dtype, "weight_dtype": linear_weight.dtype,
        "target_dtype": target_input.dtype, "in_features": input.shape[-1], **options.asked(),
        "weighted": weight is not None, "reduction": reduction, "result": dtype, **how, "input_sharded": input_sharded,
        "require_grad": tuple(each is not None and needs_grad(each) for each in layers[:3]),
    }  # fmt: skip
    shards = shards_of(_NAME, sizes, prod(input.shape[:-1]), over, input.device, alike)
    peers = peers_of(_NAME, over.transport, over.group, input, linear_weight)
    if peers is not None:  # the backend too makes collectives, which a rank must not make alone
        peers.agree(_NAME, (shards.sizes, shards.n_classes, input.shape, *alike.items()))
    shards = told_by(peers, _NAME, shards)
    if input_sharded:
        layers = [GatheredRows.apply(each, shards, _NAME) if i in (0, 3) else each for i, each in enumerate(layers)]
    # Padding may be anything, so no product includes it.
    layers = [each if each is None or i in (0, 3) else each[: shards.held] for i, each in enumerate(layers)]
    found = _rows(layers, options, weight, reduction, how, shards, not input_sharded)
    return (found.view(layers[0].shape[:-1]) if reduction == "none" else found).to(dtype or arithmetic_of(input))


def _as_rows(layers: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """The hidden states [n, features] of both."""
    x, h = (each.reshape(prod(each.shape[:-1]), each.shape[-1]) for each in (layers[0], layers[3]))
    return x, h


def _rows(
    layers: Sequence[Any], options: Divergence, weight: Tensor | None, reduction: str, how: dict[str, Any],
    shards: Shards | None = None, summed: bool = True,
) -> Tensor:  # fmt: skip
    """The divergences [n], or what they are reduced to."""
    x, h = _as_rows(layers)
    _, _, _, temperature, of_target = pair_of(x, h, options)
    _, w, bias, _, v, of_v = layers
    both = Layers(x, w, bias, h, v, of_v, None, temperature, of_target)
    return of_layers(
        _NAME, both, options.with_numbers(), weight, reduction, how["chunk_size"], how["accumulate"], shards, summed
    )[0]


def _checked(
    layers, given, weight, reduction, how, dtype, over: Over | None = None, input_sharded: bool = False
) -> tuple[list[Any], Divergence]:
    """(the layers in the dtype of products, with a group this rank's classes of both; options)."""
    check_layer(_NAME, *layers[:3], *how.values())
    if over is not None:
        of_classes = zip(_LAYERS, layers, strict=True)
        layers = [own_classes(_NAME, *each, over.group) if "input" not in each[0] else each[1] for each in of_classes]
    _check_teacher(layers[0], layers[1], *layers[3:])
    input, leading = layers[0], tuple(layers[0].shape[:-1])
    if input_sharded and over is not None:
        if input.ndim != 2:
            raise ValueError(
                f"{_NAME}: input_sharded takes an input [rows, in_features] of each rank, got {tuple(input.shape)}"
            )
        leading = (dist.get_world_size(over.group) * len(input),)
    options = check_divergence(_NAME, input, (*leading, len(layers[1])), given, weight, reduction, dtype)
    layers = as_autocast_has(*layers)
    return [each if each is None or i < 3 else each.detach() for i, each in enumerate(layers)], options


def _check_teacher(input, linear_weight, target_input, target_weight, target_bias) -> None:
    """An error that names the argument where a teacher's tensors do not fit."""
    given = {"target_input": target_input, "target_weight": target_weight}
    given |= {} if target_bias is None else {"target_bias": target_bias}
    for argument, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{_NAME}: {argument} must be a Tensor, not {type(tensor).__name__}")
        if tensor.is_nested or tensor.layout != torch.strided:
            raise RuntimeError(f"{_NAME}: {argument} must be a dense strided tensor, got {tensor.layout}")
        if not tensor.is_floating_point():
            raise NotImplementedError(f"{_NAME}: {argument} must be of a float dtype, got {tensor.dtype}")
        if tensor.device != input.device:
            raise RuntimeError(f"{_NAME}: {argument} must be on the input's device {input.device}, got {tensor.device}")
        if tensor.dtype != target_input.dtype:
            raise RuntimeError(
                f"{_NAME}: {argument} must be of the target_input's dtype {target_input.dtype}, got {tensor.dtype}"
            )
        if tensor.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(f"{_NAME}: {argument} requires grad, and a teacher gets none; give {argument}.detach()")
    leading, n_classes = tuple(input.shape[:-1]), linear_weight.shape[0]
    if target_input.ndim == 0 or tuple(target_input.shape[:-1]) != leading:
        wanted, got = shape_of(*leading, "target_features"), tuple(target_input.shape)
        raise ValueError(f"{_NAME}: target_input must have shape {wanted}, got {got}")
    expected = n_classes, target_input.shape[-1]
    if tuple(target_weight.shape) != expected:
        raise ValueError(f"{_NAME}: target_weight must have shape {expected}, got {tuple(target_weight.shape)}")
    if target_bias is not None and tuple(target_bias.shape) != (n_classes,):
        raise ValueError(f"{_NAME}: target_bias must have shape ({n_classes},), got {tuple(target_bias.shape)}")
