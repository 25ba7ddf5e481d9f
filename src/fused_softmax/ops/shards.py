"""An operator over some dims of a DTensor: each rank works on its own shard, and only sharded dims among these move."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fused_softmax.distributed import Shards


def on_shards(
    function: Callable[[Tensor], Tensor],
    x: Any,
    whole: tuple[int, ...],
    reduced: tuple[int, ...] = (),
    keepdim: bool = False,
    in_parts: Callable[[Tensor, Shards], Tensor] | None = None,
) -> Tensor:
    """function(x) of a DTensor x, as a DTensor: of x's shape, but for the dims `reduced`, dropped or kept with size 1.

    whole: the dims that a rank needs all of. One that is sharded is gathered first, as torch does it; the gradient goes
        back to the placements of x.
    in_parts: gives the same on all ranks of their shards of a single whole dim, which then stays where it is.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    whole, reduced = _positive(whole, x.ndim), _positive(reduced, x.ndim)
    dropped = () if keepdim else reduced

    def place(placement: Any) -> Any:
        sharded = getattr(placement, "dim", None)
        odd = dropped and sharded is not None and type(placement) is not Shard  # a strided one, that no rule renumbers
        return Replicate() if placement.is_partial() or sharded in whole or odd else placement

    parted = [i for i, each in enumerate(x.placements) if type(each) is Shard and each.dim == whole[0]]
    if in_parts is None or len(whole) != 1 or len(parted) != 1:
        parted = []
    placements = [each if i in parted else place(each) for i, each in enumerate(x.placements)]
    if placements != list(x.placements):
        x = x.redistribute(placements=placements)
    shape = torch.Size(1 if d in reduced else size for d, size in enumerate(x.shape) if d not in dropped)
    of_result: list[Any] = [Replicate() if i in parted else each for i, each in enumerate(placements)]
    if dropped:
        of_result = [
            Shard(each.dim - sum(d < each.dim for d in dropped)) if isinstance(each, Shard) else each
            for each in of_result
        ]  # fmt: skip
    stride = torch.empty(shape, device="meta").stride()
    local = x.to_local()
    if parted and in_parts is not None:
        y = in_parts(local, shards_of_mesh(x.device_mesh, parted[0], x.shape[whole[0]]))
    else:
        y = function(local)
    return DTensor.from_local(y, x.device_mesh, of_result, run_check=False, shape=shape, stride=stride)


def _positive(dims: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    return tuple(d % max(1, ndim) for d in dims)


def shards_of_mesh(mesh: Any, mesh_dim: int, n_classes: int) -> Shards:
    """As DTensor cuts a dim: all shards are as long as the first, until nothing is left."""
    ranks = mesh.size(mesh_dim)
    longest = -(-n_classes // ranks)
    sizes = tuple(max(0, min(longest, n_classes - rank * longest)) for rank in range(ranks))
    return Shards(mesh.get_group(mesh_dim), mesh.get_local_rank(mesh_dim), sizes, n_classes)
