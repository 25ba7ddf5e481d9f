"""An operator over some dims of a DTensor: each rank works on its own shard, and only sharded dims among these move."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def on_shards(
    function: Callable[[Tensor], Tensor],
    x: Any,
    whole: tuple[int, ...],
    reduced: tuple[int, ...] = (),
    keepdim: bool = False,
) -> Tensor:
    """function(x) of a DTensor x, as a DTensor: of x's shape, but for the dims `reduced`, dropped or kept with size 1.

    whole: the dims that a rank needs all of. One that is sharded is gathered first, as torch does it; the gradient goes
        back to the placements of x.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    whole, reduced = _positive(whole, x.ndim), _positive(reduced, x.ndim)
    dropped = () if keepdim else reduced

    def place(placement: Any) -> Any:
        sharded = getattr(placement, "dim", None)
        odd = dropped and sharded is not None and type(placement) is not Shard  # a strided one, that no rule renumbers
        return Replicate() if placement.is_partial() or sharded in whole or odd else placement

    placements = [place(placement) for placement in x.placements]
    if placements != list(x.placements):
        x = x.redistribute(placements=placements)
    shape = torch.Size(1 if d in reduced else size for d, size in enumerate(x.shape) if d not in dropped)
    if dropped:
        placements = [
            Shard(placement.dim - sum(d < placement.dim for d in dropped))
            if isinstance(placement, Shard)
            else placement
            for placement in placements
        ]
    stride = torch.empty(shape, device="meta").stride()
    y = function(x.to_local())
    return DTensor.from_local(y, x.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def _positive(dims: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    return tuple(d % max(1, ndim) for d in dims)
