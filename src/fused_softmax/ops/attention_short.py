"""Launches of attention of short lengths, prepared once."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fused_softmax.kernels.attention_short import _short, _short_gradient
from fused_softmax.kernels.attention_spec import NO_MASK
from fused_softmax.ops.attention_layout import maker
from fused_softmax.plan.attention_short import plan_short


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
