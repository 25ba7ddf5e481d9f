"""The launches of attention's kernels for sm_90, prepared for tensors that TMA can read as they lie."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from fused_softmax.core import launch
from fused_softmax.core.device import device_of
from fused_softmax.ops.attention.kernels.hopper.spec import ROW_VECTOR, ROWS, HopperSpec
from fused_softmax.ops.attention.kernels.spec import NO_MASK
from fused_softmax.ops.attention.plan.hopper import VECTOR, HopperTiles, plan_hopper, shift_of

LOG2E = 1.4426950408889634


def prepare_forward(
    c: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, slopes: Tensor | None,
    o: Tensor, lse: Tensor,
) -> Any:  # fmt: skip
    """What launches a call `c` on (query, key, value, bias, sinks, slopes, output, lse), made ready by `c`.

    None where the plain kernel is to compute them.
    """
    plan = _planned(c, "forward", bias)
    if plan is None or {"entropy", "row_max"} & set(c.how.stats) or not tiled(c, {"q": q, "k": k, "v": v}):
        return None
    from fused_softmax.ops.attention.kernels.hopper.forward import _attention_hopper

    reuses = plan.reuses or (bias is not None and max(plan.block_d, plan.block_v) > 64)
    spec = _spec(c, plan, sinks=sinks is not None, reuses=reuses)
    key_heads = c.n_heads // c.group
    maps = (
        of_heads(c, "q", q, (c.n_heads, c.n_queries, c.head_dim), ROWS, plan.block_d),
        of_heads(c, "k", k, (key_heads, c.n_keys, c.head_dim), plan.block, plan.block_d),
        of_heads(c, "v", v, (key_heads, c.n_keys, c.value_dim), plan.block, plan.block_v),
    )
    into = of_rows(o, (c.n_batches * c.n_heads, c.n_queries, c.value_dim), ROWS, plan.block_v)
    programs, *turns = _turns(c, -(-c.n_queries // spec.block_m), c.n_batches * c.n_heads)
    return launch.prepare(
        _attention_hopper, programs, (*maps, _of_bias(c, bias, ROWS, plan.block), sinks, slopes, into, lse),
        (*c.numbers()[1:8], *turns, *_rate(c)), {"K": spec}, device=c.device, num_warps=4, plan=plan,
    )  # fmt: skip


def prepare_keys(
    c: Any, read: Sequence[Any], bias: Tensor | None, do: Tensor, rows: Tensor, record: Tensor, coarse: Tensor,
    dk: Tensor, dv: Tensor, ds: Tensor | None = None, first_head: int = 0,
) -> Any:  # fmt: skip
    """What launches dK and dV of a call on (query, key, value, bias, slopes, dO, rows, record, coarse, dK, dV, dS).

    None where the plain kernel is to compute them. read: query, key, value and slopes. ds: if it is kept, [batch, head
    of queries, query, key], of as many heads from that of the keys' first_head on as are to be computed.
    """
    if not takes(c, "keys", read, bias, do):
        return None
    plan: Any = _planned(c, "keys", bias)
    specs = [_spec(c, plan, of_keys=True, stores_ds=ds is not None, recorded=recorded) for recorded in (False, True)]
    spec = specs[0]
    heads = c.n_heads // c.group if ds is None else ds.shape[1] // c.group
    of_ds = None if ds is None else _descriptor(ds, list(ds.shape), list(ds.stride()), [1, 1, plan.block, ROWS])
    into = [
        of_rows(each, (c.n_batches * (c.n_heads // c.group), c.n_keys, dim), ROWS, block)
        for each, dim, block in ((dk, c.head_dim, plan.block_d), (dv, c.value_dim, plan.block_v))
    ]
    programs, *turns = _turns(c, -(-c.n_keys // spec.block_m), c.n_batches * heads)
    *maps, of_do = _maps(c, plan, (*read[:3], do), plan.block, ROWS)
    numbers = [*c.numbers()[1:8], *turns]
    if plan.wide:
        from fused_softmax.ops.attention.kernels.hopper.wide import _keys_gradient_wide as kernel
    else:
        from fused_softmax.ops.attention.kernels.hopper.gradient import _keys_gradient_hopper as kernel

        maps.append(_of_bias(c, bias, plan.block, ROWS))
        into.append(of_ds)
        numbers += [first_head, heads]
    return both(
        launch.prepare(
            kernel, programs, (*maps, read[3], of_do, _of_floats(rows, plan.block), record, coarse, *into),
            (*numbers, float(c.how.scale), *_rate(c)), {"K": each}, device=c.device, num_warps=4, plan=plan,
        )
        for each in specs
    )  # fmt: skip


def both(launches: Iterable[Any]) -> Any:
    """What launches one kernel after another on the same tensors, of which one has nothing to do."""
    first, second = launches

    def run(*tensors: Tensor) -> None:
        first(*tensors)
        second(*tensors)

    return run


def takes(c: Any, kernel: str, read: Sequence[Any], bias: Tensor | None, do: Tensor) -> bool:
    """Whether a kernel of the gradients, "keys" or "queries", is to compute. read: query, key, value and slopes."""
    planned = _planned(c, kernel, bias) is not None
    return planned and tiled(c, dict(zip(("q", "k", "v", "do"), (*read[:3], do), strict=True)))


def prepare_queries(
    c: Any,
    read: Sequence[Any],
    bias: Tensor | None,
    do: Tensor,
    rows: Tensor,
    record: Tensor,
    coarse: Tensor,
    dq: Tensor,
) -> Any:
    """As `prepare_keys`, of dQ."""
    if not takes(c, "queries", read, bias, do):
        return None
    plan: Any = _planned(c, "queries", bias)
    spec = _spec(c, plan)
    heads = c.n_batches * c.n_heads
    into = of_rows(dq, (heads, c.n_queries, c.head_dim), ROWS, plan.block_d)
    programs, *turns = _turns(c, -(-c.n_queries // spec.block_m), heads)
    *maps, of_do = _maps(c, plan, (*read[:3], do), ROWS, plan.block)
    numbers = (*c.numbers()[1:8], *turns, float(c.how.scale), *_rate(c))
    if plan.wide:
        from fused_softmax.ops.attention.kernels.hopper.wide import _queries_gradient_wide as kernel
    else:
        from fused_softmax.ops.attention.kernels.hopper.gradient import _queries_gradient_hopper as kernel

        maps.append(_of_bias(c, bias, ROWS, plan.block))
    return launch.prepare(
        kernel, programs, (*maps, read[3], of_do, rows, record, coarse, into), numbers, {"K": spec}, device=c.device,
        num_warps=4, plan=plan,
    )  # fmt: skip


def rows_shape(c: Any) -> tuple[int, int, int]:
    """Of what `_delta` stores for these kernels: rows of floats that TMA reads."""
    return c.n_batches * c.n_heads, 2, -(-c.n_queries // ROW_VECTOR) * ROW_VECTOR


def _rate(c: Any) -> tuple[float, float]:
    """(rate, cap) of scores in units of log 2, as `capped` takes them; without a softcap the rate alone is of use.

    With a bias the rate is the scale, for the bias is added in natural units.
    """
    if c.spec.bias:
        return float(c.how.scale), 1.0
    scale, cap = c.how.scale * LOG2E, c.how.softcap
    return (scale, 1.0) if cap is None else (2.0 * scale / cap, cap * LOG2E)


def _spec(c: Any, plan: HopperTiles, **fields: Any) -> HopperSpec:
    if c.spec.bias:
        own = c.patterns["bias"].own
        fields |= {"bias": True, "bias_batches": int(own[1] > 1), "bias_heads": int(own[2] > 1)}
    return HopperSpec(
        consumers=plan.consumers, block=plan.block, stages=plan.stages, registers=plan.registers, block_d=plan.block_d,
        block_v=plan.block_v, left=c.spec.left, right=c.spec.right, ragged=c.n_keys % plan.block != 0,
        softcap=c.spec.softcap, alibi=c.spec.alibi,
        slope_batches=int(c.spec.alibi and c.strides["slopes"][1] != 0), **fields,
    )  # fmt: skip


def _maps(c: Any, plan: HopperTiles, read: Sequence[Tensor], of_queries: int, of_keys: int) -> list[Any]:
    """Of query, key, value and dO, in tiles of so many rows."""
    key_heads = c.n_heads // c.group
    return [
        of_heads(c, name, tensor, (heads, n, dim), rows, block)
        for name, tensor, heads, n, dim, rows, block in (
            ("q", read[0], c.n_heads, c.n_queries, c.head_dim, of_queries, plan.block_d),
            ("k", read[1], key_heads, c.n_keys, c.head_dim, of_keys, plan.block_d),
            ("v", read[2], key_heads, c.n_keys, c.value_dim, of_keys, plan.block_v),
            ("do", read[3], c.n_heads, c.n_queries, c.value_dim, of_queries, plan.block_v),
        )
    ]


def _turns(c: Any, head_tiles: int, heads: int) -> tuple[int, int, int, int]:
    """(programs, tiles of a head, of all heads, shift)"""
    n_tiles = head_tiles * heads
    programs = min(n_tiles, device_of(c.device).sm_count)
    shift = shift_of(head_tiles, heads, programs) if c.how.bounded else 0
    return programs, head_tiles, n_tiles, shift


def _planned(c: Any, kernel: str, bias: Tensor | None) -> HopperTiles | None:
    spec, how = c.spec, c.how
    plain = how.scale > 0 and spec.mask == NO_MASK and (not spec.alibi or _reads_slopes(c))
    if c.device < 0 or not plain or not (c.n_queries and c.n_keys) or not (bias is None or _tiles_bias(c, bias)):
        return None
    window = None if how.left is None or how.right is None else how.left + how.right + 1
    return plan_hopper(
        c.head_dim, c.value_dim, c.dtype.itemsize, c.n_queries, device_of(c.device), kernel, spec.left, spec.bias,
        window, spec.softcap, spec.alibi,
    )  # fmt: skip


def _reads_slopes(c: Any) -> bool:
    """Whether they lie as [heads] or [batches, heads]."""
    _, of_batches, of_heads = c.strides["slopes"]
    return of_heads == (c.n_heads > 1) and of_batches in (0, c.n_heads)


def _tiles_bias(c: Any, bias: Tensor) -> bool:
    """Whether TMA reads it: a row of its own for each query, one element for each key."""
    own, strides = c.patterns["bias"].own, c.strides["bias"]
    if bias.dtype != c.dtype or own[0] > 1 or own[3:] != (c.n_queries, c.n_keys) or bias.data_ptr() % 16:
        return False
    steps = [step for n, step in zip(own[1:4], strides[1:4], strict=True) if n > 1]
    return strides[4] == 1 and not any(step == 0 or step % VECTOR for step in steps)


def tiled(c: Any, tensors: dict[str, Tensor]) -> bool:
    """Whether TMA reads these: batches in one dim, and steps of 16 bytes."""
    if c.inner != c.n_batches:
        return False
    for name, tensor in tensors.items():
        sizes = c.inner, *tensor.shape[-3:-1]
        strides = c.strides[name][1:4]
        steps = [step for n, step in zip(sizes, strides, strict=True) if n > 1]
        if tensor.data_ptr() % 16 or any(step == 0 or step % VECTOR for step in steps):
            return False
    return True


def of_heads(c: Any, name: str, tensor: Tensor, sizes: tuple[int, int, int], rows: int, dims: int) -> Any:
    """[batch, head, row, dim] in tiles of rows x dims."""
    shape = [c.inner, *sizes]
    strides = [step if n > 1 else shape[-1] for n, step in zip(shape, c.strides[name][1:4], strict=False)]
    return _descriptor(tensor, shape, [*strides, 1], [1, 1, rows, dims])


def _of_bias(c: Any, bias: Tensor | None, rows: int, cols: int) -> Any:
    """[batch, head, query, key], where 1 is the size of what it is broadcast over."""
    if bias is None:
        return None
    shape = list(c.patterns["bias"].own[1:])
    strides = [
        step if n > 1 else -(-c.n_keys // VECTOR) * VECTOR
        for n, step in zip(shape, c.strides["bias"][1:4], strict=False)
    ]
    return _descriptor(bias, shape, [*strides, 1], [1, 1, rows, cols])


def of_rows(tensor: Tensor, shape: tuple[int, int, int], rows: int, dims: int) -> Any:
    """[head of all, row, dim] of a contiguous tensor."""
    return _descriptor(tensor, list(shape), [shape[1] * shape[2], shape[2], 1], [1, rows, dims])


def _of_floats(rows: Tensor, block: int) -> Any:
    """[row, float] of a contiguous tensor of 32 bits."""
    from fused_softmax.ops.attention.kernels.hopper.gluon_names import TensorDescriptor, gl

    n = rows.shape[-1]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(rows, [rows.numel() // n, n], [n, 1], [1, block], layout)


def _descriptor(tensor: Tensor, shape: list[int], strides: list[int], block: list[int]) -> Any:
    from fused_softmax.ops.attention.kernels.hopper.gluon_names import TensorDescriptor, gl

    dtype = {"torch.float16": gl.float16, "torch.bfloat16": gl.bfloat16}[str(tensor.dtype)]
    return TensorDescriptor(tensor, shape, strides, block, gl.NVMMASharedLayout.get_default_for(block, dtype))
