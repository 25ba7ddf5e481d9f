"""The kernels for sm_90: which calls they take, with tensors that TMA can read as they lie, and their launches.

The gradients of heads of more than 128 dims have kernels of their own, which are launched like the others.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from fused_softmax.ops.attention.call import Backward, Call, Forward, Launch, Pass, Preparing, Tensors
from fused_softmax.ops.attention.kernels.hopper.spec import ROW_VECTOR, ROWS, HopperSpec
from fused_softmax.ops.attention.kernels.spec import NO_MASK
from fused_softmax.ops.attention.layout import blocks
from fused_softmax.ops.attention.plan.hopper import VECTOR, HopperTiles, plan_hopper, shift_of

LOG2E = 1.4426950408889634
_OF_QUERIES, _OF_VALUES = {"q", "do", "o", "dq"}, {"v", "do", "o", "dv"}  # with a row a query; with a value's dims
_RESULTS = {"o", "dq", "dk", "dv"}  # which are contiguous


def forward_plan(asked: Forward) -> HopperTiles | str:
    return asked.call.stats_refused or _plan(asked, "forward", "q", "k", "v")


def keys_plan(asked: Backward) -> HopperTiles | str:
    """The plan of the kernel of dK and dV."""
    return _plan(asked, "keys", "q", "k", "v", "do")


def queries_plan(asked: Backward) -> HopperTiles | str:
    """The plan of the kernel of dQ."""
    if asked.full_beside:
        return f"the gradient of the {asked.full_beside[0]} is dS, which its kernel does not store"
    return _plan(asked, "queries", "q", "k", "v", "do")


def _plan(asked: Pass, kernel: str, *read: str) -> HopperTiles | str:
    """read: the names of what TMA is to read."""
    c, spec = asked.call, asked.call.spec
    if c.device < 0:
        return "the tensors are on no GPU"
    if c.how.scale <= 0:
        return "the scale is not positive"
    if spec.mask != NO_MASK:
        return "attn_mask"
    if spec.alibi and not _reads_slopes(c):
        return "alibi_slopes lie neither as [heads] nor as [batches, heads]"
    if not (c.n_queries and c.n_keys):
        return "there are no queries or no keys"
    if spec.bias and not _tiles_bias(c, asked.tensors["bias"]):
        return "TMA does not read the bias as it lies"
    plan = plan_hopper(
        c.head_dim, c.value_dim, c.dtype.itemsize, c.n_queries, c.gpu, kernel, spec.left, spec.bias, c.window,
        spec.softcap, spec.alibi,
    )  # fmt: skip
    return plan if isinstance(plan, str) else untiled(asked, *read) or plan


def _reads_slopes(c: Call) -> bool:
    """Whether slopes lie as [heads] or [batches, heads]."""
    _, of_batches, of_heads = c.strides_of("slopes")
    return of_heads == (c.n_heads > 1) and of_batches in (0, c.n_heads)


def _tiles_bias(c: Call, bias: Any) -> bool:
    """Whether TMA reads the bias: each query has a row of its own, and each key one element."""
    own, strides = c.patterns["bias"].own, c.strides_of("bias")
    if bias.dtype != c.dtype or own[0] > 1 or own[3:] != (c.n_queries, c.n_keys) or bias.data_ptr() % 16:
        return False
    steps = [step for n, step in zip(own[1:4], strides[1:4], strict=True) if n > 1]
    return strides[4] == 1 and not any(step == 0 or step % VECTOR for step in steps)


def untiled(asked: Pass, *names: str) -> str:
    """Why TMA does not read these tensors; empty if it does. It wants batches in one dim, and steps of 16 bytes."""
    c = asked.call
    if c.inner != c.n_batches:
        return "batches lie in two dims"
    for name in names:
        tensor: Any = asked.tensors[name]
        sizes = c.inner, *tensor.shape[-3:-1]
        steps = [step for n, step in zip(sizes, c.strides_of(name)[1:4], strict=True) if n > 1]
        if tensor.data_ptr() % 16 or any(step == 0 or step % VECTOR for step in steps):
            return f"TMA does not read {name} as it lies"
    return ""


def prepare_forward(asked: Forward, plan: HopperTiles) -> Launch:
    from fused_softmax.ops.attention.kernels.hopper.forward import _attention_hopper

    c = asked.call
    reuses = plan.reuses or (c.spec.bias and max(plan.block_d, plan.block_v) > 64)
    spec, (rate, cap) = _spec(c, plan, sinks=c.spec.sinks, reuses=reuses), _rate(c)
    rows = {"q": ROWS, "k": plan.block, "v": plan.block, "o": ROWS}
    maps = maps_of(c, asked.tensors, rows, plan.block_d, plan.block_v) | _map_of_bias(
        c, asked.tensors, ROWS, plan.block
    )
    turns = _turns(c, blocks(c.n_queries, spec.block_m), c.all_heads)
    return _launch(c, _attention_hopper, plan, spec, asked.tensors, maps, turns | {"scale": rate, "cap": cap})


def prepare_keys(c: Call, plan: HopperTiles, tensors: Tensors, first_head: int | None = None) -> list[Preparing]:
    """What prepares the launches that compute dK and dV.

    first_head: if dS is kept, [batch, head of queries, query, key], the first of the keys' heads that it belongs to.
    """
    if plan.wide:
        from fused_softmax.ops.attention.kernels.hopper.wide import _keys_gradient_wide as kernel
    else:
        from fused_softmax.ops.attention.kernels.hopper.gradient import _keys_gradient_hopper as kernel

    ds: Any = None if first_head is None else tensors["ds"]
    rows = {"q": plan.block, "k": ROWS, "v": ROWS, "do": plan.block, "dk": ROWS, "dv": ROWS}
    maps = maps_of(c, tensors, rows, plan.block_d, plan.block_v) | _map_of_bias(c, tensors, plan.block, ROWS)
    maps["rows"] = _map_of_floats(tensors["rows"], plan.block)
    if ds is not None:
        maps["ds"] = _descriptor(ds, list(ds.shape), list(ds.stride()), [1, 1, plan.block, ROWS])
    heads = c.key_heads if ds is None else ds.shape[1] // c.group
    numbers = {"first_head": first_head or 0, "heads": heads} | _rates(c)
    specs = [_spec(c, plan, of_keys=True, stores_ds=ds is not None, recorded=recorded) for recorded in (False, True)]
    turns = _turns(c, blocks(c.n_keys, specs[0].block_m), c.n_batches * heads)
    return [partial(_launch, c, kernel, plan, spec, tensors, maps, turns | numbers) for spec in specs]


def prepare_queries(c: Call, plan: HopperTiles, tensors: Tensors) -> list[Preparing]:
    """What prepares the launch that computes dQ."""
    if plan.wide:
        from fused_softmax.ops.attention.kernels.hopper.wide import _queries_gradient_wide as kernel
    else:
        from fused_softmax.ops.attention.kernels.hopper.gradient import _queries_gradient_hopper as kernel

    rows = {"q": ROWS, "k": plan.block, "v": plan.block, "do": ROWS, "dq": ROWS}
    maps = maps_of(c, tensors, rows, plan.block_d, plan.block_v) | _map_of_bias(c, tensors, ROWS, plan.block)
    spec = _spec(c, plan)
    turns = _turns(c, blocks(c.n_queries, spec.block_m), c.all_heads)
    return [partial(_launch, c, kernel, plan, spec, tensors, maps, turns | _rates(c))]


def _launch(
    c: Call, kernel: Any, plan: HopperTiles, spec: HopperSpec, tensors: Tensors, maps: Mapping[str, Any],
    numbers: dict[str, Any],
) -> Launch:  # fmt: skip
    programs = min(numbers["n_tiles"], c.gpu.sm_count)
    return c.launch(kernel, programs, spec, tensors, numbers, maps=maps, num_warps=4, plan=plan)


def _turns(c: Call, head_tiles: int, heads: int) -> dict[str, Any]:
    """How programs go through the tiles of all heads."""
    n_tiles = head_tiles * heads
    shift = shift_of(head_tiles, heads, min(n_tiles, c.gpu.sm_count)) if c.how.bounded else 0
    return {"head_tiles": head_tiles, "n_tiles": n_tiles, "shift": shift}


def rows_shape(c: Call) -> tuple[int, int, int]:
    """The shape of what `_delta` stores for these kernels: rows of floats that TMA reads."""
    return c.all_heads, 2, blocks(c.n_queries, ROW_VECTOR) * ROW_VECTOR


def _rate(c: Call) -> tuple[float, float]:
    """(rate, cap) for scores in units of log 2, as `capped` takes them. Without a softcap only the rate is used.

    With a bias the rate is the scale, because the bias is added in natural units.
    """
    if c.spec.bias:
        return float(c.how.scale), 1.0
    scale, cap = c.how.scale * LOG2E, c.how.softcap
    return (scale, 1.0) if cap is None else (2.0 * scale / cap, cap * LOG2E)


def _rates(c: Call) -> dict[str, float]:
    return dict(zip(("rate", "cap"), _rate(c), strict=True))


def _spec(c: Call, plan: HopperTiles, **fields: Any) -> HopperSpec:
    if c.spec.bias:
        own = c.patterns["bias"].own
        fields |= {"bias": True, "bias_batches": int(own[1] > 1), "bias_heads": int(own[2] > 1)}
    return HopperSpec(
        consumers=plan.consumers, block=plan.block, stages=plan.stages, registers=plan.registers, block_d=plan.block_d,
        block_v=plan.block_v, left=c.spec.left, right=c.spec.right, ragged=c.n_keys % plan.block != 0,
        softcap=c.spec.softcap, alibi=c.spec.alibi,
        slope_batches=int(c.spec.alibi and c.strides_of("slopes")[1] != 0), **fields,
    )  # fmt: skip


def maps_of(c: Call, tensors: Tensors, rows: Mapping[str, int], block_d: int, block_v: int) -> dict[str, Any]:
    """Descriptors by name, in tiles of so many rows. A tile is as wide as the power of two that holds the dims.

    [batch, head, row, dim] for what is read, and [head of all, row, dim] for results.
    """
    found = {}
    for name, n in rows.items():
        heads, length = (c.n_heads, c.n_queries) if name in _OF_QUERIES else (c.key_heads, c.n_keys)
        dim, block = (c.value_dim, block_v) if name in _OF_VALUES else (c.head_dim, block_d)
        if name in _RESULTS:
            shape, strides, tile = [c.n_batches * heads, length, dim], [length * dim, dim, 1], [1, n, block]
        else:
            shape, tile = [c.inner, heads, length, dim], [1, 1, n, block]
            strides = _steps(shape, c.strides_of(name)[1:4], dim)
        found[name] = _descriptor(tensors[name], shape, strides, tile)
    return found


def _map_of_bias(c: Call, tensors: Tensors, rows: int, cols: int) -> dict[str, Any]:
    """[batch, head, query, key], with 1 for a dim over which the bias is broadcast."""
    if not c.spec.bias:
        return {}
    shape = list(c.patterns["bias"].own[1:])
    strides = _steps(shape, c.strides_of("bias")[1:4], blocks(c.n_keys, VECTOR) * VECTOR)
    return {"bias": _descriptor(tensors["bias"], shape, strides, [1, 1, rows, cols])}


def _steps(shape: Sequence[int], strides: Sequence[int], of_one: int) -> list[int]:
    """Strides of all dims but the last, which is contiguous. of_one: the stride of a dim of size 1."""
    return [*(step if n > 1 else of_one for n, step in zip(shape, strides, strict=False)), 1]


def _map_of_floats(rows: Any, block: int) -> Any:
    """[row, float] of a contiguous tensor of 32 bits."""
    from fused_softmax.ops.attention.kernels.hopper.gluon_names import TensorDescriptor, gl

    n = rows.shape[-1]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(rows, [rows.numel() // n, n], [n, 1], [1, block], layout)


def _descriptor(tensor: Any, shape: list[int], strides: list[int], block: list[int]) -> Any:
    from fused_softmax.ops.attention.kernels.hopper.gluon_names import TensorDescriptor, gl

    dtype = {"torch.float16": gl.float16, "torch.bfloat16": gl.bfloat16}[str(tensor.dtype)]
    return TensorDescriptor(tensor, shape, strides, block, gl.NVMMASharedLayout.get_default_for(block, dtype))
