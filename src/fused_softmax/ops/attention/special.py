"""Launches of attention that take other kernels than the general one, each prepared once.

Short: all queries and keys of a head are one tile. Decode: few queries over many keys, whose parts are merged. Window:
narrow windows on sm_90.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fused_softmax.core import launch, workspace
from fused_softmax.ops.attention.hopper import LOG2E, of_heads, of_rows, tiled
from fused_softmax.ops.attention.kernels.decode import _decode
from fused_softmax.ops.attention.kernels.hopper.spec import ROWS, WindowSpec
from fused_softmax.ops.attention.kernels.short import _short, _short_gradient
from fused_softmax.ops.attention.kernels.spec import NO_MASK
from fused_softmax.ops.attention.layout import maker
from fused_softmax.ops.attention.plan.hopper import LEAST, REGISTERS, STAGES, plan_window
from fused_softmax.ops.attention.plan.tiles import padded, plan_decode, plan_short


def prepare_short(c: Any, tensors: Sequence[Tensor | None], scalars: tuple) -> Callable[..., None] | None:
    """What launches a call, of the tensors that are not None; None where another kernel is to take it.

    c: the call. tensors, scalars: as the forward kernel takes them, of which the last two tensors are statistics.
    """
    plan = _planned("forward", c)
    if plan is None or tensors[-2] is not None or tensors[-1] is not None:
        return None
    return c.prepare(
        _short, c.n_heads * plan.parts, plan.tiles, tensors[:-2], (*scalars, c.n_batches, plan.steps), plan, **_held(c)
    )


def prepare_short_backward(
    c: Any, read: Sequence[Tensor | None], dlse: Tensor | None, scalars: tuple, asked: Sequence[bool]
) -> Callable[..., tuple] | None:
    """What computes the gradients that are asked for; None where other kernels are to.

    read: query, key, value, mask, bias, slopes, dO and lse.
    """
    plan = _planned("backward", c)
    wanted = [name for name, asks in zip(("mask", "bias"), asked[3:5], strict=True) if asks]
    if plan is None or c.group != 1 or c.spec.sinks or len(wanted) > 1:
        return None
    if wanted and c.patterns[wanted[0]].own != (1, 1, c.n_heads, c.n_queries, c.n_keys):
        return None
    parts, device = plan.parts, read[0].device  # type: ignore[union-attr]
    keys = (*c.lead, c.n_heads, c.n_keys)
    shapes = (*c.rows, c.head_dim), (*keys, c.head_dim), (*keys, c.value_dim)
    makers = [maker(shape, c.dtype, device) for shape in shapes]
    if wanted:
        makers.append(maker((parts, c.n_heads, c.n_queries, c.n_keys), torch.float32, device))

    def made() -> list[Tensor]:
        return [make() for make in makers]

    like = (*made(), None)[:4]
    run = c.prepare(
        _short_gradient, c.n_heads * parts, plan.tiles, (*read, dlse, *like), (*scalars, c.n_batches, plan.steps), plan,
        stores_ds=bool(wanted), **_held(c),
    )  # fmt: skip

    def call(do: Tensor, dlse: Tensor | None, output: Tensor, lse: Tensor, *given: Tensor | None) -> tuple:
        q, k, v, mask, bias, _, slopes = c.readied(given)
        every = q, k, v, mask, bias, slopes, c.of("do", do), lse, dlse
        dq, dk, dv, *sums = found = made()
        run(*[each for each in every if each is not None], *found)
        of_added = [
            sums[0].sum(0).to(each.dtype).view(each.shape) if each is not None and name in wanted else None
            for name, each in zip(("mask", "bias"), given[3:5], strict=True)
        ]
        return dq if asked[0] else None, dk if asked[1] else None, dv if asked[2] else None, *of_added, None

    return call


def _planned(kernel: str, c: Any):
    return plan_short(
        kernel, c.head_dim, c.value_dim, c.dtype.itemsize, c.n_queries, c.n_keys, c.n_batches, c.n_heads, c.gpu,
        c.spec.mask != NO_MASK,
    )  # fmt: skip


def _held(c: Any) -> dict[str, bool]:
    """A bias that all batches share is read once."""
    held = c.spec.bias and not any(c.strides["bias"][:2])
    return {"held": held, "bias": c.spec.bias and not held}


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


def prepare_window(c: Any, tensors: Sequence[Any]) -> Callable[..., None] | None:
    """What launches a call, of the tensors that are not None; None where another kernel is to take it.

    c: the call. tensors: as the plain forward kernel takes them.
    """
    q, k, v, _, _, sinks, _, o, lse, *stats = tensors
    if c.device < 0 or not c.spec.folds or c.spec.mask != NO_MASK or any(each is not None for each in stats):
        return None
    heads, key_heads = c.n_batches * c.n_heads, c.n_heads // c.group
    plan = plan_window(
        c.head_dim, c.value_dim, c.dtype.itemsize, c.n_queries, heads, c.group, c.how.left, c.how.right, c.gpu
    )  # fmt: skip
    if plan is None or not c.n_keys or not tiled(c, {"q": q, "k": k, "v": v}):
        return None
    from fused_softmax.ops.attention.kernels.hopper.window import _window_hopper

    block_d, block_v = max(LEAST, padded(c.head_dim)), max(LEAST, padded(c.value_dim))
    spec = WindowSpec(
        width=c.how.left + c.how.right + 1, after=c.how.right, pieces=plan.pieces, cut_left=plan.cut_left,
        stages=STAGES, key_stages=plan.key_stages, registers=REGISTERS, block_d=block_d, block_v=block_v,
        sinks=sinks is not None,
    )  # fmt: skip
    maps = (
        of_heads(c, "q", q, (c.n_heads, c.n_queries, c.head_dim), ROWS, block_d),
        of_heads(c, "k", k, (key_heads, c.n_keys, c.head_dim), ROWS, block_d),
        of_heads(c, "v", v, (key_heads, c.n_keys, c.value_dim), ROWS, block_v),
    )
    into = of_rows(o, (heads, c.n_queries, c.value_dim), ROWS, block_v)
    head_tiles = -(-c.n_queries // spec.block_m)
    n_tiles = head_tiles * heads // plan.span
    numbers = (*c.numbers()[1:5], c.numbers()[7], head_tiles, n_tiles, plan.span)
    return launch.prepare(
        _window_hopper, min(n_tiles, c.gpu.sm_count), (*maps, sinks, into, lse), (*numbers, c.how.scale * LOG2E),
        {"K": spec}, device=c.device, num_warps=4, plan=plan,
    )  # fmt: skip
