"""The launch of attention of narrow windows on sm_90, prepared once."""

from collections.abc import Callable, Sequence
from typing import Any

from fused_softmax import launch
from fused_softmax.kernels.attention_hopper_spec import ROWS, WindowSpec
from fused_softmax.kernels.attention_spec import NO_MASK
from fused_softmax.ops.attention_hopper import LOG2E, of_heads, of_rows, tiled
from fused_softmax.plan.attention import padded
from fused_softmax.plan.attention_hopper import LEAST
from fused_softmax.plan.attention_window import REGISTERS, STAGES, plan_window


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
    from fused_softmax.kernels.attention_hopper_window import _window_hopper

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
