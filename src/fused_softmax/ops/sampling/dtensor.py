"""Sampling of DTensors whose rows lie in shards: each rank has its own rows, and no rank hears of another's."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fused_softmax.ranks.dtensor import Axes, as_dtensor, cut_of, mesh_of, shard_by_shard


def rows_on_shards(
    name: str, function: Callable[..., Any], given: Mapping[str, Any], n_rows: int,
    other: Mapping[str, Axes] | None = None,
) -> Any:  # fmt: skip
    """function(**given) of DTensors, as DTensors; None where there are none.

    given: by name tensors [n_rows, ...] or [], and what is no tensor. other: the axes of tensors of another shape.
    """
    if mesh_of(name, given) is None:
        return None
    placed = {argument: (each, _by_row(each)) for argument, each in given.items()}
    placed |= {argument: (given[argument], axes) for argument, axes in (other or {}).items()}
    return shard_by_shard(cut_of(name, placed, (n_rows,), ["rows"]), function, placed, _by_row)


def draws_on_shards(
    name: str, function: Callable[..., Any], given: Mapping[str, Any], n_rows: int, random: tuple[Any, Any, Any],
    other: Mapping[str, Axes] | None = None, step: int = 1,
) -> Any:  # fmt: skip
    """`rows_on_shards` of what draws by random = (seed, position, draw). Rows have the noise that one device gives.

    draw: draws a seed for all rows; the one of the mesh's first rank is that of all. step: how many positions a row
    takes.
    """
    seed, position, draw = random
    mesh = mesh_of(name, {**given, "seed": seed, "position": position})
    if mesh is None:
        return None
    if position is None and isinstance(seed, Tensor):
        position = 0
    if seed is None:
        seed = draw()
        for i in range(mesh.ndim):
            dist.broadcast(seed, group=mesh.get_group(i), group_src=0)
    if position is None:
        of_rows = torch.arange(n_rows, device=mesh.device_type) * step
        position = as_dtensor(of_rows, mesh)
    return rows_on_shards(name, function, {**given, "seed": seed, "position": position}, n_rows, other)


def _by_row(value: Any) -> Axes:
    return (0, None, None)[: value.ndim] if isinstance(value, Tensor) else ()
