"""Calls of DTensors: whether their tensors fit together, which axes lie in shards, and each rank's own call on its own.

An axis is what several tensors of a call share, such as batch, heads or rows. A rank works on its part of the sharded
axes alone; no other rank hears of it, forward or backward, unless a tensor has to be redistributed first.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fused_softmax.core.route import is_sharded, needs_grad
from fused_softmax.ranks.groups import Shards

Axes = Sequence[int | None]  # of each dim its axis; None: every rank needs the whole dim


class Cut(NamedTuple):
    """How the ranks of a mesh share the axes of a call.

    placements: of each mesh dim: Shard, whose dim is an axis, or Replicate. sizes: of each axis, over all ranks.
    """

    mesh: Any
    placements: tuple[Any, ...]
    sizes: Sequence[int]

    def local(self, tensor: Tensor, axes: Axes) -> Tensor:
        """This rank's part of a tensor, whose gradient comes back summed over the ranks that use the same part."""
        from torch.distributed.tensor import Partial, Replicate

        wanted, of_gradient = [], []
        for each in self.placements:
            axis = getattr(each, "dim", None)
            dim = None if axis is None or axis not in axes else list(axes).index(axis)
            if axis is not None and dim is not None and tensor.shape[dim] == 1 != self.sizes[axis]:
                dim = None  # broadcast along the axis
            wanted.append(Replicate() if dim is None else _at(each, dim))
            of_gradient.append(Partial() if dim is None and axis is not None else wanted[-1])
        placed: Any = as_dtensor(tensor, self.mesh).redistribute(placements=wanted)
        return placed.to_local(grad_placements=of_gradient)

    def result(self, local: Tensor, axes: Axes) -> Tensor:
        """A rank's part of a result as a DTensor, in the memory format of the part."""
        from torch.distributed.tensor import DTensor, Replicate

        dims = {axis: dim for dim, axis in enumerate(axes) if axis is not None}
        placements = [
            _at(each, dims[each.dim]) if getattr(each, "dim", None) in dims else Replicate() for each in self.placements
        ]
        shape = torch.Size(
            n if axis is None else self.sizes[axis] for n, axis in zip(local.shape, axes, strict=True)
        )  # fmt: skip
        stride, step = [0] * len(shape), 1
        outermost = list(range(len(shape)))
        if not local.is_contiguous():
            outermost = sorted(outermost, key=local.stride, reverse=True)
        for dim in reversed(outermost):
            stride[dim], step = step, step * max(1, shape[dim])
        return DTensor.from_local(local, self.mesh, placements, run_check=False, shape=shape, stride=tuple(stride))


class _Tied(torch.autograd.Function):
    """A result of nothing, by which gradients of 0 come back to what it was made of."""

    @staticmethod
    def forward(ctx, y, *tensors):
        ctx.like = [(each.shape, each.dtype, each.device) for each in tensors]
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        return dy, *[torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like]


def tied(y: Tensor, *tensors: Any) -> Tensor:
    """y, which has a gradient for all of the tensors on every rank.

    A rank without elements may compute y without them. But its backward pass has to take part in what redistributes
    their gradients, or the other ranks wait for it.
    """
    given = [each for each in tensors if isinstance(each, Tensor) and needs_grad(each)]
    if not given or not y.dtype.is_floating_point or all(each.numel() for each in tensors if isinstance(each, Tensor)):
        return y
    return _Tied.apply(y, *given)


def _at(placement: Any, dim: int) -> Any:
    from torch.distributed.tensor import Shard

    return placement if placement.dim == dim else Shard(dim)


def as_dtensor(tensor: Any, mesh: Any) -> Any:
    """A DTensor as it is; of a plain tensor, one that all ranks have whole."""
    from torch.distributed.tensor import DTensor, Replicate

    if is_sharded(tensor):
        return tensor
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def mesh_of(name: str, given: Mapping[str, Any], whole: Mapping[str, Any] | None = None) -> Any:
    """The mesh of the DTensors of a call; None where there are none.

    RuntimeError for a DTensor of another mesh, and where torch raises it: for a plain tensor beside a DTensor, of which
    nobody knows whether all ranks have the same, as under tensor parallelism, or each its own, as under data
    parallelism. One of a single element goes for the same on all ranks, as in torch.

    whole: what a plain tensor may be, for it is known to be the same on all ranks.
    """
    tensors: dict[str, Any] = {argument: each for argument, each in given.items() if isinstance(each, Tensor)}
    of_whole: dict[str, Any] = {argument: each for argument, each in (whole or {}).items() if isinstance(each, Tensor)}
    first = next((argument for argument, each in (tensors | of_whole).items() if is_sharded(each)), None)
    if first is None:
        return None
    dtensor = (tensors | of_whole)[first]
    for argument, each in (tensors | of_whole).items():
        if is_sharded(each):
            if each.device_mesh != dtensor.device_mesh:
                raise RuntimeError(
                    f"{name}: {argument} must lie on the mesh of {first}, {dtensor.device_mesh}, got a DTensor on "
                    f"{each.device_mesh}"
                )
        elif argument in tensors and each.numel() != 1 and not _implicitly_replicated():
            raise RuntimeError(
                f"{name}: {argument} must be a DTensor, as {first} is with {list(dtensor.placements)}, got a plain "
                f"Tensor, which all ranks may share, or each may have its own. If all have the same, give "
                f"DTensor.from_local({argument}, mesh, [Replicate()]); if each has its own rows, [Shard(0)]"
            )
    return dtensor.device_mesh


def _implicitly_replicated() -> bool:
    """Whether torch takes plain tensors for the same on all ranks: within its experimental implicit_replication()."""
    from torch.distributed.tensor import DTensor

    return bool(getattr(getattr(DTensor, "_op_dispatcher", None), "_allow_implicit_replication", False))


def replicates_plain() -> bool:
    """Whether torch's cross_entropy does so: there, or within loss_parallel()."""
    from torch.distributed.tensor import DTensor

    handlers = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", {})
    return torch.ops.aten._log_softmax.default in handlers or _implicitly_replicated()


def cut_of(name: str, given: Mapping[str, tuple[Any, Axes]], sizes: Sequence[int], words: Sequence[str]) -> Cut:
    """The Cut of a call that moves nothing, or an error that names a tensor, its placement and what to do.

    given: DTensors, or what goes for the same on all ranks, with their axes. One that all ranks have whole is cut as
        the others are.
    words: the axes, as the error names them.
    """
    from torch.distributed.tensor import Replicate

    mesh = mesh_of(name, {argument: each for argument, (each, _) in given.items()})
    there = {argument: pair for argument, pair in given.items() if is_sharded(pair[0])}
    placements: list[Any] = []
    for i in range(mesh.ndim):
        found, whose = None, ""
        for argument, (tensor, axes) in there.items():
            placement = tensor.placements[i]
            if placement.is_replicate():
                continue
            axis = axes[placement.dim] if placement.is_shard() else None
            if axis is None or (tensor.shape[placement.dim] == 1 != sizes[axis]):
                raise ValueError(
                    f"{name}: {_lies(argument, tensor, i)}, and only {' and '.join(words)} may lie in shards: "
                    f"{_instead(argument, axes, words)}"
                )
            if found is not None and axis != found.dim:
                raise ValueError(
                    f"{name}: {_lies(argument, tensor, i)}, which is of {words[axis]}, where {whose} has shards of "
                    f"{words[found.dim]}: redistribute one of them, as {argument}.redistribute(placements=...)"
                )
            if found is None:
                found, whose = _at(placement, axis), argument
        placements.append(found or Replicate())
    return Cut(mesh, tuple(placements), sizes)


def _lies(argument: str, tensor: Any, i: int) -> str:
    """A function of its own, called for errors alone: a compiler cannot trace the repr of a placement."""
    return f"{argument} lies in {tensor.placements[i]!r} over mesh dim {i}"


def _instead(argument: str, axes: Axes, words: Sequence[str]) -> str:
    allowed = [f"[Shard({dim})] ({words[axis]})" for dim, axis in enumerate(axes) if axis is not None]
    return f"{argument}.redistribute(placements=...) with {' or '.join([*allowed, '[Replicate()]'])}"


def shard_by_shard(
    cut: Cut, function: Callable[..., Any], given: Mapping[str, tuple[Any, Axes]], axes_of: Callable[[Tensor], Axes]
) -> Any:
    """function(**given) of each rank's parts, every tensor of it a DTensor; what is no tensor is given as it is.

    axes_of: gives those of a tensor of the result.
    """
    local = {
        argument: cut.local(each, axes) if isinstance(each, Tensor) else each
        for argument, (each, axes) in given.items()
    }

    def place(each: Tensor) -> Tensor:
        return cut.result(tied(each, *local.values()) if each.requires_grad else each, axes_of(each))

    return tree_map_only(Tensor, place, function(**local))


def on_shards(
    function: Callable[..., Tensor],
    x: Any,
    whole: tuple[int, ...],
    reduced: tuple[int, ...] = (),
    keepdim: bool = False,
    in_parts: Callable[..., Tensor] | None = None,
    beside: Mapping[str, Tensor] | None = None,
    added: Sequence[str] = (),
) -> Tensor:
    """function(x, **beside) of a DTensor x, as a DTensor: of x's shape, but for the dims `reduced`, dropped or kept.

    whole: the dims that a rank needs all of. One that is sharded is gathered first, as torch does it; the gradient goes
        back to the placements of x.
    in_parts: gives the same on all ranks of their shards of a single whole dim, which then stays where it is.
    beside: tensors that broadcast to x, which go where x lies.
    added: those of them that in_parts adds to what the ranks have merged, so that every rank has their whole gradient;
        of others it has the part of its columns.
    """
    from torch.distributed.tensor import Replicate, Shard

    whole, reduced, beside = _positive(whole, x.ndim), _positive(reduced, x.ndim), beside or {}
    dropped = () if keepdim else reduced

    def place(placement: Any) -> Any:
        sharded = getattr(placement, "dim", None)
        # A strided one, that no rule renumbers.
        odd = (dropped or beside) and sharded is not None and type(placement) is not Shard
        return Replicate() if placement.is_partial() or sharded in whole or odd else placement

    parted = [i for i, each in enumerate(x.placements) if type(each) is Shard and each.dim == whole[0]]
    if in_parts is None or len(whole) != 1 or len(parted) != 1:
        parted = []
    placements = [each if i in parted else place(each) for i, each in enumerate(x.placements)]
    cut = Cut(x.device_mesh, tuple(placements), x.shape)
    axes: list[int | None] = list(range(x.ndim))
    local = cut.local(x, axes)
    merged = cut._replace(placements=tuple(Replicate() if i in parted else each for i, each in enumerate(placements)))
    others = {
        argument: (merged if argument in added else cut).local(each, axes[x.ndim - each.ndim :])
        for argument, each in beside.items()
    }
    if parted and in_parts is not None:
        y = in_parts(local, shards_of_mesh(x.device_mesh, parted[0], x.shape[whole[0]]), **others)
    else:
        y = function(local, **others)
    y = tied(y, local, *others.values())
    return cut.result(y, [None if d in reduced else d for d in axes if d not in dropped])


def _positive(dims: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    return tuple(d % max(1, ndim) for d in dims)


def shards_of_mesh(mesh: Any, mesh_dim: int, n_classes: int) -> Shards:
    """As DTensor cuts a dim: all shards are as long as the first, until nothing is left."""
    ranks = mesh.size(mesh_dim)
    longest = -(-n_classes // ranks)
    sizes = tuple(max(0, min(longest, n_classes - rank * longest)) for rank in range(ranks))
    return Shards(mesh.get_group(mesh_dim), mesh.get_local_rank(mesh_dim), sizes, n_classes)
