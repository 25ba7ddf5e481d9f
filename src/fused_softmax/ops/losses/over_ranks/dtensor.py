"""Cross-entropy of a DTensor, and of a linear layer that is one: each rank works on its own shard or classes."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fused_softmax.core.checks import DTYPES, arithmetic_in
from fused_softmax.core.options import by_environment
from fused_softmax.core.route import is_sharded, needs_grad, resolved
from fused_softmax.ops.autocast import result_dtype
from fused_softmax.ops.losses.linear_by_rows import linear_of
from fused_softmax.ops.losses.options import Kept, Loss
from fused_softmax.ops.losses.output import CrossEntropyOutput, TokenStats, Wanted
from fused_softmax.ops.losses.over_ranks.divergence import lacks, probabilities_over_ranks
from fused_softmax.ops.losses.over_ranks.linear import LinearSharded, OfCall
from fused_softmax.ops.losses.over_ranks.peers import in_one_launch, loss_by_peers, states_by, written_at_once
from fused_softmax.ops.losses.over_ranks.steps import sharded
from fused_softmax.ops.losses.steps import as_rows, rows_of
from fused_softmax.ranks import groups as distributed
from fused_softmax.ranks.dtensor import Cut, as_dtensor, mesh_of, replicates_plain, shards_of_mesh, tied
from fused_softmax.ranks.gather import peers_of, told_by
from fused_softmax.ranks.groups import Shards


class Placed(NamedTuple):
    """Where the results of a loss lie on a mesh.

    of_rows: a placement of each mesh dim. classes: the mesh dim over which classes lie in shards, or None.
    shape: of the targets.
    """

    name: str
    mesh: Any
    of_rows: list[Any]
    classes: int | None
    shape: torch.Size

    @property
    def over(self) -> list[int]:
        """The mesh dims over which rows lie in shards."""
        from torch.distributed.tensor import Shard

        return [i for i, each in enumerate(self.of_rows) if isinstance(each, Shard)]

    @property
    def groups(self) -> list[Any]:
        return [self.mesh.get_group(i) for i in self.over]

    def shards(self, n_classes: int) -> Shards:
        if self.classes is None:
            return Shards(None, 0, (n_classes,), n_classes)
        return shards_of_mesh(self.mesh, self.classes, n_classes)

    def targets(self, target: Any, argument: str = "target") -> Tensor:
        """This rank's targets, or another tensor of their leading shape."""
        if self.over and not is_sharded(target):
            raise ValueError(
                f"{self.name}: {argument} must be a DTensor where the rows of the input lie in shards: "
                "a plain tensor may be of all rows, or of this rank's"
            )
        mine = _local(target, self.mesh, self.of_rows)
        self._compare(mine, [i for i in range(self.mesh.ndim) if i not in self.over])
        return mine

    def _compare(self, tensor: Tensor, dims: Sequence[int]) -> None:
        """Where the environment asks for it, raise an error unless ranks along these mesh dims have the same."""
        if distributed.CHECK:
            for i in dims:
                distributed.check_targets_alike(self.name, self.mesh.get_group(i), tensor)

    def columns(self, kept: Any, leading: torch.Size) -> Any:
        """The columns over which this rank's rows are normalised, as the public functions take them.

        Lists are of all rows, of this leading shape, on every rank. leading: of the input.
        """
        from torch.distributed.tensor import Replicate

        if not isinstance(kept, tuple):
            return None if kept is None else self.targets(kept, "kept")
        ids, offsets = (_local(each, self.mesh, [Replicate()] * self.mesh.ndim) for each in kept)
        for each in (ids, offsets):
            self._compare(each, range(self.mesh.ndim))
        if not self.over:
            return ids, offsets
        rows = torch.arange(math.prod(leading), device=ids.device).view(leading)
        mine = Kept(ids, offsets).of_rows(_local(rows, self.mesh, self.of_rows).reshape(-1))
        return mine.ids, mine.offsets

    def weight(self, weight: Any) -> Tensor | None:
        """This rank's classes' weights."""
        from torch.distributed.tensor import Replicate, Shard

        placements = [Shard(0) if i == self.classes else Replicate() for i in range(self.mesh.ndim)]
        return None if weight is None else _local(weight, self.mesh, placements)

    def output(self, y, lse, z, stats, wanted: Wanted, reduction: str) -> Tensor | CrossEntropyOutput:
        """What the caller asked for, as DTensors."""
        y = self._reduced(y, reduction)
        if not wanted.beside:
            return y
        return CrossEntropyOutput(
            y, self._of_targets(lse) if wanted.lse else None, self._reduced(z, reduction) if wanted.z_loss else None,
            TokenStats(*map(self._of_targets, stats)) if wanted.stats else None,
        )  # fmt: skip

    def rows(self, found: Any, leading: torch.Size) -> Any:
        """Results of rows, of this leading shape, and of their targets, as DTensors."""
        of_row = self._replace(shape=leading)
        return tree_map_only(Tensor, lambda y: (self if y.ndim == len(self.shape) else of_row)._of_targets(y), found)

    def total(self, values: Tensor) -> Tensor:
        """The sum of what all rows have."""
        found = values.sum()
        for group in self.groups:
            dist.all_reduce(found, group=group)
        return found

    def summed(self, values: Tensor, total: Any, dtype: torch.dtype) -> Any:
        """The sum of what all rows have, over a total, as a DTensor."""
        from torch.distributed.tensor import DTensor, Partial, Replicate

        placements = [Partial() if i in self.over else Replicate() for i in range(self.mesh.ndim)]
        return DTensor.from_local((values.sum() / total).to(dtype), self.mesh, placements, run_check=False)

    def over_weights(self, found: Tensor, weight: Tensor | None, reduction: str, dtype: torch.dtype) -> Any:
        """What rows count, or by their sum over the total of their weights, as DTensors."""
        if reduction == "none":
            return self._of_targets(found.to(dtype))
        total: Any = 1.0
        if reduction == "mean":
            total = float(math.prod(self.shape)) if weight is None else self.total(weight.detach().to(found.dtype))
        return self.summed(found, total, dtype)

    def _of_targets(self, values: Tensor) -> Any:
        from torch.distributed.tensor import DTensor

        sizes = list(self.shape)
        for i in self.over:
            dim = self.of_rows[i].dim
            sizes[dim] = shards_of_mesh(self.mesh, i, sizes[dim]).held
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            values.view(sizes), self.mesh, self.of_rows, run_check=False, shape=self.shape, stride=stride
        )

    def _reduced(self, values: Tensor, reduction: str) -> Any:
        from torch.distributed.tensor import DTensor, Partial, Replicate

        if reduction == "none":
            return self._of_targets(values)
        if reduction == "mean" and self.over:  # the average over ranks is this sum, and so is each rank's gradient
            ranks = math.prod(self.mesh.size(i) for i in self.over)
            values = values + (values * (ranks - 1)).detach()
        partial = Partial("avg" if reduction == "mean" else "sum")
        placements = [partial if i in self.over else Replicate() for i in range(self.mesh.ndim)]
        return DTensor.from_local(values, self.mesh, placements, run_check=False)


def loss_on_shards(
    input: Any, target: Tensor, loss: Loss, wanted: Wanted, dtype: torch.dtype
) -> Tensor | CrossEntropyOutput:
    """The loss of logits that are a DTensor, as DTensors where torch's own rules place them.

    target, weight: DTensors, or whole tensors that are the same on all ranks. If rows lie in shards, a mean is
    Partial("avg") and a sum Partial("sum"). Otherwise results are Replicate. Results of rows lie as the rows do.
    """
    class_dim = 0 if input.ndim == 1 else 1
    input, kept = cut_once(input, class_dim)
    placed = Placed("cross_entropy", input.device_mesh, _of_rows(input, kept), kept, target.shape)
    (local,), targets = resolved(input.to_local()), placed.targets(target)
    loss, shards = replace(loss, weight=placed.weight(loss.weight)), placed.shards(input.shape[class_dim])
    peers = None if kept is None else peers_of(placed.name, None, shards.group, local, targets)
    merging = peers if peers is not None and in_one_launch(local, targets, loss, shards) else None
    if merging is not None and not placed.over and written_at_once(local, loss, wanted):
        y = loss_by_peers(local, targets, loss, wanted, dtype, shards, merging)
        return placed.output(y, None, None, (), wanted, loss.reduction)
    how = () if merging is None else (states_by(merging, wanted, dtype),)
    shards = told_by(peers, placed.name, shards)
    y, lse, z, *stats = sharded(*as_rows(local, targets), loss, shards, wanted, dtype, placed.groups, *how)
    return placed.output(y, lse, z, stats, wanted, loss.reduction)


def log_prob_on_shards(of_rank: Callable[..., Any], input: Any, target: Any, temperature: Any, kept: Any) -> Any:
    """Log-probabilities of logits that are a DTensor, and the other results, as DTensors that lie as rows do.

    of_rank: gives those of (input, target, temperature, kept, shards), this rank's rows; shards: None if they are
    whole. target, kept, and temperature if it is a tensor: DTensors, or whole tensors that are the same on all ranks.
    """
    name = "log_prob"
    input, of_classes = cut_once(input, input.ndim - 1)
    placed = Placed(name, input.device_mesh, _of_leading(input, of_classes), of_classes, target.shape)
    (local,), t = resolved(input.to_local()), placed.targets(target)
    if isinstance(temperature, Tensor):
        temperature = placed.targets(temperature, "temperature")
    kept, shards = placed.columns(kept, input.shape[:-1]), None
    if of_classes is not None:
        shards = placed.shards(input.shape[-1])
        shards = told_by(peers_of(name, None, shards.group, local, t), name, shards)

    return placed.rows(of_rank(local, t, temperature, kept, shards), input.shape[:-1])


def divergence_on_shards(
    of_rank: Callable[..., Tensor], input: Any, target: Any, columns: Any, of_rows: Mapping[str, Any], reduction: str,
    dtype: torch.dtype,
) -> Any:  # fmt: skip
    """Divergences of logits that are a DTensor, from a target that goes where they lie; with columns, where rows do.

    of_rank: gives those of (input, target, columns, of_rows, shards), this rank's rows; shards: None where they are
    whole. of_rows: "weight" and temperatures, numbers left out where they are no tensors.
    """
    input, kept = cut_once(input, input.ndim - 1)
    placed = Placed("divergence", input.device_mesh, _of_leading(input, kept), kept, input.shape[:-1])
    (local,) = resolved(input.to_local())
    if columns is None:
        (target,) = resolved(_local(target, placed.mesh, list(input.placements)))
    else:
        columns, target = placed.targets(columns, "columns"), placed.targets(target)
    of_rows = {name: placed.targets(each, name) for name, each in of_rows.items() if isinstance(each, Tensor)}
    shards = None
    if kept is not None:
        shards = placed.shards(input.shape[-1])
        shards = told_by(peers_of(placed.name, None, shards.group, local, target), placed.name, shards)
    rows, weight = of_rank(local, target, columns, of_rows, shards), of_rows.get("weight")
    if weight is not None:
        w = weight.detach().to(rows.dtype)
        rows = torch.where(w == 0, 0.0, rows) * w
    return placed.over_weights(rows, weight, reduction, dtype)


def loss_of_whole_rows(
    function: Callable[..., Any], input: Any, target: Any, lse: Any, loss: Loss, wanted: Wanted, dtype: torch.dtype
) -> Tensor | CrossEntropyOutput:
    """The loss of logits that are a DTensor by targets that are probabilities, or by an lse that is given.

    function: cross_entropy. Each rank computes the losses of its own rows, of all classes, or over ranks where the
    classes of logits lie in shards; sums over ranks that hold other rows are Partial("sum").
    """
    class_dim = 0 if input.ndim == 1 else 1
    by_class = not target.is_floating_point()
    whole = by_class or lacks(loss) != ""
    input, kept = cut_once(input, None, class_dim) if whole else cut_once(input, class_dim)
    cut, axes = Cut(input.device_mesh, input.placements, input.shape), list(range(input.ndim))
    rows = [d for d in axes if d != class_dim]
    placed = Placed("cross_entropy", cut.mesh, _of_rows(input, kept), kept, torch.Size(input.shape[d] for d in rows))
    t = placed.targets(target) if by_class else cut.local(target, axes)
    weight = None if loss.weight is None else cut.local(loss.weight, (class_dim,))
    x, given_lse = cut.local(input, axes), {} if lse is None else {"lse": cut.local(lse, rows)}
    if kept is None:
        found = function(
            x, t, **loss.options() | {"weight": weight, "reduction": "none"}, **given_lse, return_lse=True,
            return_z_loss=True, return_token_stats=loss.stats, dtype=arithmetic_in(dtype),
        )  # fmt: skip
    else:
        x, t = resolved(x, t)
        found = _of_own_classes(placed, x, t, replace(loss, weight=weight), input.shape[class_dim], dtype)
    of_rows = tied(found.loss, x, t, weight), found.z_loss
    if loss.reduction != "none":
        total: Any = 1.0
        if loss.mean:
            on = (t != loss.ignore_index) if by_class else torch.ones_like(found.loss)
            if by_class and weight is not None:
                on = torch.where(on, weight.detach()[torch.where(on, t, 0).long()], 0.0)
            total = placed.total(on.to(found.loss.dtype))
        sums = [placed.summed(each, total, dtype) for each in of_rows]
    else:
        sums = [placed._of_targets(each.to(dtype)) for each in of_rows]
    if not wanted.beside:
        return sums[0]
    stats = TokenStats(*map(placed._of_targets, found.token_stats)) if wanted.stats else None
    return CrossEntropyOutput(
        sums[0], placed._of_targets(found.lse) if wanted.lse else None, sums[1] if wanted.z_loss else None, stats
    )


def _of_own_classes(
    placed: Placed, x: Tensor, t: Tensor, loss: Loss, n_classes: int, dtype: torch.dtype
) -> CrossEntropyOutput:
    """The losses of rows by the probabilities of this rank's classes."""
    shards = placed.shards(n_classes)
    shards = told_by(peers_of(placed.name, None, shards.group, x, t), placed.name, shards)
    of_rows = replace(loss, reduction="none")
    y, lse, z = probabilities_over_ranks(rows_of(x), rows_of(t), of_rows, shards, arithmetic_in(dtype))
    shape = x.shape[:1] + x.shape[2:] if x.ndim > 1 else ()
    return CrossEntropyOutput(y.view(shape), lse.view(shape), z.view(shape))


def _of_rows(x: Any, kept: int | None) -> list[Any]:
    """The placements of the rows of logits that `cut_once` has placed."""
    from torch.distributed.tensor import Replicate, Shard

    return [
        Shard(each.dim - (each.dim > 1)) if isinstance(each, Shard) and i != kept else Replicate()
        for i, each in enumerate(x.placements)
    ]


def _of_leading(x: Any, kept: int | None) -> list[Any]:
    """The same of logits whose class dim is the last one."""
    from torch.distributed.tensor import Replicate, Shard

    return [each if isinstance(each, Shard) and i != kept else Replicate() for i, each in enumerate(x.placements)]


def cut_once(x: Any, dim: int | None, *whole: int) -> tuple[Any, int | None]:
    """(x with `dim` in shards over at most one mesh dim, and dims `whole` over none, that mesh dim)."""
    from torch.distributed.tensor import Replicate, Shard

    cut = next((i for i, each in enumerate(x.placements) if type(each) is Shard and each.dim == dim), None)

    def place(i: int, placement: Any) -> Any:
        fits = type(placement) is Shard and placement.dim not in (dim, *whole)  # columns of shards of shards have gaps
        return placement if i == cut or fits else Replicate()

    placements = [place(i, each) for i, each in enumerate(x.placements)]
    return (x if placements == list(x.placements) else x.redistribute(placements=placements)), cut


def loss_as_aten(
    x: Any, target: Any, weight: Any, reduction: int, ignore_index: int, label_smoothing: float
) -> Any | None:
    """ATen's cross_entropy of a DTensor. Its arguments are not checked yet; None if they do not fit."""
    from torch.distributed.tensor import Shard

    class_dim = min(1, x.ndim - 1)
    rows = (x.shape[0], *x.shape[2:]) if x.ndim > 1 else ()
    by_rows = any(isinstance(each, Shard) and each.dim != class_dim for each in x.placements)
    others = [each for each in (target, weight) if each is not None]
    together = all(each.device_mesh == x.device_mesh if is_sharded(each) else replicates_plain() for each in others)
    fits = (
        x.ndim > 0
        and x.dtype in DTYPES
        and target.dtype in (torch.int64, torch.uint8)
        and tuple(target.shape) == rows
        and target.device == x.device
        and reduction in (0, 1, 2)
        and 0.0 <= label_smoothing <= 1.0
        and (weight is None or (tuple(weight.shape), weight.device) == ((x.shape[class_dim],), x.device))
        and not (weight is not None and needs_grad(weight))  # torch raises its own error
        and together
        and not by_environment()  # which asks for what ranks do not have
        and (is_sharded(target) or not by_rows)
    )
    if not fits:
        return None
    loss = Loss(weight, ignore_index, ("none", "mean", "sum")[reduction], label_smoothing=label_smoothing)
    return loss_on_shards(x, target, loss, Wanted(), result_dtype("cross_entropy", x))


def mesh_of_loss(name: str, given: Mapping[str, Any], target: Tensor, weight: Tensor | None) -> Any:
    """The mesh of a loss's DTensors, None where there are none; raises as `mesh_of` does.

    As within torch's loss_parallel, class indices and weights of classes may be plain tensors, the same on all ranks.
    """
    by_class = not target.is_floating_point()
    whole = {"target": target, "weight": weight} if by_class else {"weight": weight}
    return mesh_of(name, given if by_class else {**given, "target": target}, whole)


def _local(tensor: Any, mesh: Any, placements: list) -> Tensor:
    """This rank's part of a DTensor, or of a tensor that every rank has whole."""
    return as_dtensor(tensor, mesh).redistribute(placements=placements).to_local()


def linear_loss_on_shards(
    input: Any, linear_weight: Any, linear_bias: Any, target: Tensor, loss: Loss, wanted: Wanted, dtype: torch.dtype,
    chunk_size: int | None, accumulate: str, skip_ignored: bool = False,
) -> Tensor | CrossEntropyOutput:  # fmt: skip
    """The loss of input @ linear_weight.T + linear_bias, which are DTensors of one mesh, placed as torch does.

    target, the loss's weight: DTensors, or whole tensors that are the same on all ranks.
    skip_ignored: only that the lse of ignored rows is 0: their logits are made all the same.
    """

    placed, x, w, bias, shards = _layer_of("linear_cross_entropy", input, linear_weight, linear_bias, target.shape)
    t = placed.targets(target)
    rows, flat = x.reshape(-1, x.shape[-1]), t.reshape(-1).contiguous()
    linear = linear_of(rows, w, chunk_size, accumulate, needs_grad(w), shards.sizes)
    of_call = OfCall(
        replace(loss, weight=placed.weight(loss.weight)), linear, shards, dtype, summed=True, over=placed.groups
    )  # fmt: skip
    asked = [each is not None and needs_grad(each) for each in (rows, w, bias)]
    y, lse, z, *stats = LinearSharded.apply(rows, w, bias, flat, of_call, asked)
    if skip_ignored and wanted.lse:
        lse = lse.masked_fill(flat.long() == loss.ignore_index, 0.0)
    return placed.output(y, lse, z, stats, wanted, loss.reduction)


def _layer_of(
    name: str, input: Any, linear_weight: Any, linear_bias: Any, shape: torch.Size
) -> tuple[Placed, Tensor, Tensor, Tensor | None, Shards]:
    """(where results lie, this rank's input, weight and bias, who has which classes). shape: of the targets."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    mesh = linear_weight.device_mesh
    weight, kept = cut_once(linear_weight, 0, 1)
    # Rows that lie over the ranks of the classes are gathered: each of these ranks has a part of every row's logits.
    of_rows = [
        each if type(each) is Shard and each.dim < input.ndim - 1 and i != kept else Replicate()
        for i, each in enumerate(input.placements)
    ]
    placed = Placed(name, mesh, of_rows, kept, shape)
    x = input.redistribute(placements=of_rows).to_local()
    # Ranks with other rows have other parts of the gradients of these.
    of_gradient = [Shard(0) if i == kept else Partial() if i in placed.over else Replicate() for i in range(mesh.ndim)]
    w = weight.to_local(grad_placements=of_gradient)
    bias = None
    if linear_bias is not None:
        linear_bias = as_dtensor(linear_bias, mesh)
        bias = linear_bias.redistribute(placements=weight.placements).to_local(grad_placements=of_gradient)
    return placed, x, w, bias, placed.shards(linear_weight.shape[0])


def linear_log_prob_on_shards(
    of_rank: Callable[..., Any], input: Any, linear_weight: Any, linear_bias: Any, target: Any, temperature: Any,
    kept: Any,
) -> Any:  # fmt: skip
    """`log_prob_on_shards` of input @ linear_weight.T + linear_bias, which are DTensors of one mesh.

    of_rank: gives the results of (input, linear_weight, target, linear_bias, temperature, kept, shards).
    """
    placed, x, w, bias, shards = _layer_of("linear_log_prob", input, linear_weight, linear_bias, target.shape)
    t = placed.targets(target)
    if isinstance(temperature, Tensor):
        temperature = placed.targets(temperature, "temperature")
    columns = placed.columns(kept, input.shape[:-1])
    return placed.rows(of_rank(x, w, t, bias, temperature, columns, shards), input.shape[:-1])


def linear_divergence_on_shards(
    of_rank: Callable[..., Tensor], layers: Sequence[Any], of_rows: Mapping[str, Any], reduction: str,
    dtype: torch.dtype,
) -> Any:  # fmt: skip
    """Divergences of linear layers that are DTensors of one mesh; the teacher's go where the student's lie.

    layers: input, weight and bias of the student and of the teacher. of_rank: gives what this rank's rows count, [n] or
    their sum, of (layers, of_rows, reduction, shards). of_rows: as `divergence_on_shards` has them.
    """
    input, linear_weight, linear_bias, target_input, *others = layers
    placed, *of_student, shards = _layer_of(
        "linear_divergence", input, linear_weight, linear_bias, input.shape[:-1]
    )  # fmt: skip
    of_rows = {name: placed.targets(each, name) for name, each in of_rows.items()}
    of_teacher = placed.targets(target_input, "target_input"), *[placed.weight(each) for each in others]
    of_own = "none" if reduction == "none" else "sum"
    found = of_rank((*of_student, *of_teacher), of_rows, of_own, shards)
    return placed.over_weights(found, of_rows.get("weight"), reduction, dtype)


def linear_loss_of_probabilities(
    of_rank: Callable[..., tuple[Tensor, Tensor, Tensor]], input: Any, linear_weight: Any, linear_bias: Any,
    target: Any, loss: Loss, wanted: Wanted, dtype: torch.dtype,
) -> Tensor | CrossEntropyOutput:  # fmt: skip
    """The loss of a linear layer of DTensors by probabilities of all classes, which go where the logits lie.

    of_rank: gives (losses, lse, z-losses) of (input, linear_weight, linear_bias, target, loss, shards), of this rank's
    rows; lse and z-losses may be None where they are not wanted.
    """
    from torch.distributed.tensor import Shard

    leading = input.shape[:-1]
    placed, x, w, bias, shards = _layer_of("linear_cross_entropy", input, linear_weight, linear_bias, leading)
    here = [Shard(input.ndim - 1) if i == placed.classes else each for i, each in enumerate(placed.of_rows)]
    t = _local(target, placed.mesh, here)
    own = replace(loss, weight=placed.weight(loss.weight), reduction="none" if loss.reduction == "none" else "sum")
    y, lse, z = of_rank(x, w, bias, t, own, shards)
    y, z = (None if each is None else placed.over_weights(each, None, loss.reduction, dtype) for each in (y, z))
    if not wanted.beside:
        return y
    return CrossEntropyOutput(y, placed._of_targets(lse) if wanted.lse else None, z if wanted.z_loss else None, None)


def logits_on_shards(input: Any, linear_weight: Any, linear_bias: Any) -> Tensor:
    """input @ linear_weight.T + linear_bias as a DTensor: each rank has all classes of its own rows."""
    from torch.distributed.tensor import Replicate, Shard

    placements = [
        each if type(each) is Shard and each.dim < input.ndim - 1 else Replicate() for each in input.placements
    ]  # torch's own rule flattens rows, which it refuses where they lie unevenly
    cut, axes = Cut(input.device_mesh, tuple(placements), input.shape), [*range(input.ndim - 1), None]
    x, w = cut.local(input, axes), cut.local(linear_weight, (None, None))
    bias = None if linear_bias is None else cut.local(linear_bias, (None,))
    return cut.result(tied(torch.nn.functional.linear(x, w, bias), x, w, bias), axes)


def own_classes(name: str, argument: str, tensor: Any, group: Any) -> Any:
    """This rank's part of a tensor whose classes lie in shards over the ranks of `group`; a plain one is that part."""
    from torch.distributed import get_process_group_ranks
    from torch.distributed.tensor import Shard

    if tensor is None or not is_sharded(tensor):
        return tensor
    mesh, placements = tensor.device_mesh, list(tensor.placements)
    if mesh.ndim != 1 or placements != [Shard(0)]:
        raise ValueError(
            f"{name}: {argument} must lie in [Shard(0)] over a mesh of one dim where group= is given, got {placements} "
            f"over {mesh}"
        )
    if get_process_group_ranks(mesh.get_group()) != get_process_group_ranks(group):
        raise ValueError(
            f"{name}: group= must have the ranks of {argument}'s mesh, {get_process_group_ranks(mesh.get_group())}, in "
            f"their order, got {get_process_group_ranks(group)}"
        )
    return tensor.to_local()
