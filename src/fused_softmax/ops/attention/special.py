"""Attention by kernels for special cases: which calls they take, and their launches, each prepared once.

Short: all queries and keys of a head are one tile. Decode: few queries over many keys, whose parts are merged. Window:
narrow windows on sm_90.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_softmax.core import workspace
from fused_softmax.ops.attention.call import NAMES, Backward, Call, Forward, Gradients, Launch, Wanted
from fused_softmax.ops.attention.hopper import LOG2E, maps_of, untiled
from fused_softmax.ops.attention.kernels.hopper.spec import ROWS, WindowSpec
from fused_softmax.ops.attention.kernels.spec import NO_MASK
from fused_softmax.ops.attention.layout import blocks, maker
from fused_softmax.ops.attention.plan.hopper import LEAST, REGISTERS, STAGES, WindowPlan, plan_window
from fused_softmax.ops.attention.plan.tiles import DecodePlan, ShortPlan, padded, plan_decode, plan_short

_TICKETS = 2  # the use of slots


def decode_plan(asked: Forward) -> DecodePlan | str:
    c = asked.call
    groups = c.n_batches * c.key_heads
    return c.stats_refused or plan_decode(
        c.head_dim, c.value_dim, c.dtype.itemsize, c.n_queries, c.group, groups, c.n_seen, c.gpu
    )


def prepare_decode(asked: Forward, plan: DecodePlan) -> Launch:
    from fused_softmax.ops.attention.kernels.decode import _decode

    c = asked.call
    groups = c.n_batches * c.key_heads
    skips = c.spec.skips and not (c.spec.mask_rows or c.strides_of("mask")[2])  # rows are of several queries and heads
    fields: dict[str, Any] = {"lanes": plan.lanes, "block_r": plan.block_r, "chunk": plan.chunk, "skips": skips}
    programs, numbers = groups * plan.parts, {"n_parts": plan.parts}
    if plan.parts == 1:
        return c.prepare(_decode, programs, plan.tiles, asked.tensors, numbers, plan=plan, **fields)
    size = programs * plan.block_r * (c.spec.block_v + 2)
    between = _Between(c.device, groups, maker((size,), torch.float32, asked.given.query.device))
    own = dict(zip(("parts", "tickets"), between(), strict=True))
    launch = c.prepare(_decode, programs, plan.tiles, asked.tensors, numbers, own=own, plan=plan, **fields)
    return launch._replace(run=lambda *tensors: launch.run(*tensors, *between()))


@dataclass(frozen=True)
class _Between:
    """What the parts of each of `groups` store for each other.

    These are their states, and the tickets that tell which part is last.
    """

    device: int
    groups: int
    of_parts: Callable[[], Tensor]

    def __call__(self) -> tuple[Tensor, Tensor]:
        if self.device < 0:
            return self.of_parts(), torch.zeros(self.groups, dtype=torch.int64, device="cpu")
        return self.of_parts(), workspace.slots(self.device, self.groups, 1, _TICKETS)


def short_plan(asked: Forward) -> ShortPlan | str:
    plan = _short_plan("forward", asked.call)
    return plan if isinstance(plan, str) else asked.call.stats_refused or plan


def prepare_short(asked: Forward, plan: ShortPlan) -> Launch:
    from fused_softmax.ops.attention.kernels.short import _short

    c = asked.call
    return c.prepare(
        _short, c.n_heads * plan.parts, plan.tiles, asked.tensors, {"steps": plan.steps}, plan=plan, **_held(c)
    )


def _short_plan(kernel: str, c: Call) -> ShortPlan | str:
    return plan_short(
        kernel, c.head_dim, c.value_dim, c.dtype.itemsize, c.n_queries, c.n_keys, c.n_batches, c.n_heads, c.gpu,
        c.spec.mask != NO_MASK,
    )  # fmt: skip


def _held(c: Call) -> dict[str, Any]:
    """A bias that all batches share is read once."""
    held = c.spec.bias and not any(c.strides_of("bias")[:2])
    return {"held": held, "bias": c.spec.bias and not held}


def short_gradient_plan(asked: Backward) -> ShortPlan | str:
    c, beside, plan = asked.call, asked.wanted_beside, _short_plan("backward", asked.call)
    if isinstance(plan, str):
        return plan
    if c.group != 1 or c.spec.sinks:
        return "it knows no sinks, and no heads that share keys"
    if len(beside) > 1:
        return "mask and bias both have a gradient"
    if beside and c.patterns[beside[0]].own != (1, 1, c.n_heads, c.n_queries, c.n_keys):
        return f"the {beside[0]}, which has a gradient, is not one of each head that all batches share"
    return plan


def prepare_short_gradient(asked: Backward, plan: ShortPlan) -> "_ShortGradient":
    from fused_softmax.ops.attention.kernels.short import _short_gradient

    c, device = asked.call, asked.given.query.device
    keys = (*c.lead, c.n_heads, c.n_keys)
    shapes = (*c.rows, c.head_dim), (*keys, c.head_dim), (*keys, c.value_dim)
    makers = [maker(shape, c.dtype, device) for shape in shapes]
    if asked.wanted_beside:
        makers.append(maker((plan.parts, c.n_heads, c.n_queries, c.n_keys), torch.float32, device))
    own = dict(zip(("dq", "dk", "dv", "dbias"), (make() for make in makers), strict=False))
    launch = c.prepare(
        _short_gradient, c.n_heads * plan.parts, plan.tiles, asked.tensors, {"steps": plan.steps}, own=own, plan=plan,
        stores_ds=bool(asked.wanted_beside), **_held(c),
    )  # fmt: skip
    return _ShortGradient(c, launch, makers, asked.wanted, asked.wanted_beside)


@dataclass(frozen=True)
class _ShortGradient:
    """The gradients of short heads by one launch. makers: of what it writes, in the kernel's order."""

    call: Call
    launch: Launch
    makers: list[Callable[[], Tensor]]
    wanted: Wanted
    beside: list[str]

    def __call__(
        self, do: Tensor, dlse: Tensor | None, output: Tensor, lse: Tensor, *given: Tensor | None
    ) -> Gradients:
        c, wanted = self.call, self.wanted
        dq, dk, dv, *sums = found = [make() for make in self.makers]
        self.launch.run(*self.launch.takes((*c.readied(given), c.of("do", do), output, lse, dlse)), *found)
        added: dict[str, Tensor] = {}
        for name in self.beside:
            like: Any = given[NAMES.index(name)]
            added[name] = sums[0].sum(0).to(like.dtype).view(like.shape)
        return Gradients(
            dq if wanted.query else None, dk if wanted.key else None, dv if wanted.value else None, added.get("mask"),
            added.get("bias"), None,
        )  # fmt: skip


def window_plan(asked: Forward) -> WindowPlan | str:
    c = asked.call
    if c.device < 0:
        return "the tensors are on no GPU"
    if not c.spec.folds or c.spec.mask != NO_MASK:
        return "its scores are query times key times a positive scale, and no more"
    plan = c.stats_refused or plan_window(
        c.head_dim, c.value_dim, c.dtype.itemsize, c.n_queries, c.all_heads, c.group, c.how.left, c.how.right, c.gpu
    )
    return plan if isinstance(plan, str) else untiled(asked, "q", "k", "v") or plan


def prepare_window(asked: Forward, plan: WindowPlan) -> Launch:
    from fused_softmax.ops.attention.kernels.hopper.window import _window_hopper

    c, left, right = asked.call, asked.how.left, asked.how.right
    assert left is not None  # as the plan has it
    assert right is not None
    block_d, block_v = max(LEAST, padded(c.head_dim)), max(LEAST, padded(c.value_dim))
    spec = WindowSpec(
        width=left + right + 1, after=right, pieces=plan.pieces, cut_left=plan.cut_left,
        stages=STAGES, key_stages=plan.key_stages, registers=REGISTERS, block_d=block_d, block_v=block_v,
        sinks=c.spec.sinks,
    )  # fmt: skip
    maps = maps_of(c, asked.tensors, dict.fromkeys(("q", "k", "v", "o"), ROWS), block_d, block_v)
    head_tiles = blocks(c.n_queries, spec.block_m)
    n_tiles = head_tiles * c.all_heads // plan.span
    numbers = {"head_tiles": head_tiles, "n_tiles": n_tiles, "span": plan.span, "scale": c.how.scale * LOG2E}
    return c.launch(
        _window_hopper, min(n_tiles, c.gpu.sm_count), spec, asked.tensors, numbers, maps=maps, num_warps=4, plan=plan
    )
