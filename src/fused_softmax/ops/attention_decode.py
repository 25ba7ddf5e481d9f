"""The launch of attention of few queries over many keys, prepared once."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fused_softmax import workspace
from fused_softmax.kernels.attention_decode import _decode
from fused_softmax.ops.attention_layout import maker
from fused_softmax.plan.attention_decode import plan_decode

_TICKETS = 2  # the use of slots


def prepare_decode(c: Any, tensors: Sequence[Tensor | None], scalars: tuple) -> Callable[..., None] | None:
    """What launches a call, of the tensors that are not None; None where another kernel is to take it.

    c: the call. tensors, scalars: as the forward kernel takes them, of which the last two tensors are statistics.
    """
    if tensors[-2] is not None or tensors[-1] is not None:
        return None
    groups = c.n_batches * c.n_heads // c.group
    plan = plan_decode(c.head_dim, c.value_dim, c.dtype.itemsize, c.n_queries, c.group, groups, c.n_seen, c.gpu)
    if plan is None:
        return None
    programs = groups * plan.parts
    skips = c.spec.skips and not (c.spec.mask_rows or c.strides["mask"][2])  # rows are of several queries and heads
    fields = {"lanes": plan.lanes, "block_r": plan.block_r, "chunk": plan.chunk, "skips": skips}
    tensors = tensors[:-2]
    if plan.parts == 1:
        return c.prepare(_decode, programs, plan.tiles, (*tensors, None, None), (*scalars, plan.parts), plan, **fields)
    size = programs * plan.block_r * (c.spec.block_v + 2)
    device, of_parts = c.device, maker((size,), torch.float32, tensors[0].device)  # type: ignore[union-attr]

    def beside() -> tuple[Tensor, Tensor]:
        """What the parts leave for each other."""
        tickets = (
            workspace.slots(device, groups, 1, _TICKETS)
            if device >= 0
            else torch.zeros(groups, dtype=torch.int64, device="cpu")
        )
        return of_parts(), tickets

    run = c.prepare(_decode, programs, plan.tiles, (*tensors, *beside()), (*scalars, plan.parts), plan, **fields)
    return lambda *tensors: run(*tensors, *beside())
