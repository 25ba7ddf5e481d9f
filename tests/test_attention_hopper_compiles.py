"""attention's kernels for sm_90, compiled without a GPU: no spills, wgmma, and shared memory that a program has."""

from typing import NamedTuple

import pytest
import triton
import triton.language as tl
from compile_only import TARGETS, Compiled, compile_for
from triton.experimental.gluon._runtime import GluonASTSource

from fused_softmax.core.plan import H200
from fused_softmax.ops.attention.kernels.hopper.ds import _product_and_sum
from fused_softmax.ops.attention.kernels.hopper.forward import SIZES, _attention_hopper
from fused_softmax.ops.attention.kernels.hopper.gluon_names import gl
from fused_softmax.ops.attention.kernels.hopper.gradient import _keys_gradient_hopper, _queries_gradient_hopper
from fused_softmax.ops.attention.kernels.hopper.spec import ROWS, HopperSpec, WindowSpec
from fused_softmax.ops.attention.kernels.hopper.wide import _keys_gradient_wide, _queries_gradient_wide
from fused_softmax.ops.attention.kernels.hopper.window import _window_hopper
from fused_softmax.ops.attention.kernels.spec import AttentionSpec
from fused_softmax.ops.attention.plan.hopper import REGISTERS, STAGES, plan_hopper, plan_window
from fused_softmax.ops.attention.plan.tiles import plan_ds

pytestmark = pytest.mark.compiles


class Stack(NamedTuple):
    """Bytes in local memory of a thread, which are read and written outside of the loops over tiles."""

    keys: int  # a tile of keys, before and after its loop over queries
    queries: int  # a tile of queries of 128 dims, before and after its loop over keys
    large: int  # a tile of 256 dims with a window, and forward with slopes
    slopes: int  # a tile of 256 dims with slopes
    windows: int  # narrow windows of 128 dims and three tiles of keys
    small_windows: int = 0  # narrow windows of fewer dims


STACKS = {
    "3.6": Stack(keys=104, queries=40, large=64, slopes=112, windows=64),
    "3.7": Stack(keys=144, queries=56, large=104, slopes=112, windows=168, small_windows=40),
    "3.9": Stack(keys=104, queries=40, large=64, slopes=168, windows=264),
}
STACK = STACKS.get(triton.__version__[:3], STACKS["3.9"])
DTYPES = {"bf16": gl.bfloat16, "fp16": gl.float16}
KINDS = {
    "full": {"ragged": False},
    "causal": {"right": True},
    "window and sinks": {"left": True, "right": True, "sinks": True},
    "causal softcap": {"right": True, "softcap": True},
    "bias": {"ragged": False, "bias": True, "bias_heads": 1},
    "causal ALiBi": {"right": True, "alibi": True},
    "window and ALiBi": {"left": True, "alibi": True, "slope_batches": 1},
    "causal bias": {"right": True, "bias": True, "bias_batches": 1, "bias_heads": 1},
}


def tiled(dtype, *block):
    layout = gl.NVMMASharedLayout.get_default_for(list(block), DTYPES[dtype])
    return f"tensordesc<{dtype}{list(block)},{layout!r}>"


def compiled(kernel, spec, types):
    names = kernel.arg_names
    given = {name: each for name, each in types.items() if each is not None}
    signature = dict.fromkeys(names, "i32") | dict.fromkeys(types, "constexpr") | given
    constants = {(names.index(name),): None for name in types.keys() - given.keys()} | {(names.index("K"),): spec}
    numbers = {name: "fp32" for name in ("scale", "rate", "cap") if name in names}
    source = GluonASTSource(kernel, signature | numbers | {"K": "constexpr"}, constants, {})
    options = {"enable_fp_fusion": True, "num_warps": 4}
    return Compiled(triton.compile(source, target=TARGETS["sm_90"], options=options))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dim", "length", "dtype"), [(64, 4096, "bf16"), (64, 512, "fp16"), (128, 4096, "bf16"),
                                                      (256, 4096, "bf16")])  # fmt: skip
def test_forward(dim, length, dtype, kind):
    bias = "bias" in KINDS[kind]
    softcap = "softcap" in KINDS[kind]
    alibi = "alibi" in KINDS[kind]
    plan = plan_hopper(dim, dim, 2, length, H200, left="left" in KINDS[kind], bias=bias, softcap=softcap, alibi=alibi)
    if isinstance(plan, str):
        assert (dim, bias) == (256, True) or (dim, alibi) == (64, True)
        return
    spec = HopperSpec(
        consumers=plan.consumers, block=plan.block, stages=plan.stages, registers=plan.registers, block_d=dim,
        block_v=dim, reuses=plan.reuses or (bias and dim > 64), **KINDS[kind],
    )  # fmt: skip
    binary = compiled(
        _attention_hopper, spec,
        {
            "q_map": tiled(dtype, 1, 1, ROWS, dim), "k_map": tiled(dtype, 1, 1, plan.block, dim),
            "v_map": tiled(dtype, 1, 1, plan.block, dim), "o_map": tiled(dtype, 1, ROWS, dim),
            "bias_map": tiled(dtype, 1, 1, ROWS, plan.block) if bias else None,
            "sinks_ptr": "*fp32" if spec.sinks else None, "slopes_ptr": "*fp32" if spec.alibi else None,
            "lse_ptr": "*fp32",
        },
    )  # fmt: skip
    assert set(SIZES) < set(_attention_hopper.arg_names)
    assert binary.stack_bytes <= (STACK.large if alibi and dim > 128 else 0)
    assert binary.ptx.count("wgmma.mma_async") >= 2 * plan.consumers
    assert binary.shared_bytes <= 227 * 1024


@pytest.mark.parametrize("kernel", ["keys", "keys and dS", "queries"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dim", "dtype"), [(64, "bf16"), (128, "bf16"), (128, "fp16"), (256, "bf16")])
def test_gradients(dim, dtype, kind, kernel):
    options = {name: each for name, each in KINDS[kind].items() if name != "sinks"}
    of_keys, stores_ds = kernel != "queries", kernel == "keys and dS"
    if stores_ds and "bias" not in options:
        return
    plan = plan_hopper(
        dim, dim, 2, 4096, H200, kernel.split()[0], "left" in options, "bias" in options, None, "softcap" in options,
        "alibi" in options,
    )  # fmt: skip
    if isinstance(plan, str):
        assert (dim, "bias" in options) == (256, True)
        return
    spec = HopperSpec(
        consumers=plan.consumers, block=plan.block, stages=plan.stages, registers=plan.registers, block_d=dim,
        block_v=dim, of_keys=of_keys, stores_ds=stores_ds, **options,
    )  # fmt: skip
    mine, by, into = tiled(dtype, 1, 1, ROWS, dim), tiled(dtype, 1, 1, plan.block, dim), tiled(dtype, 1, ROWS, dim)
    of_bias = (plan.block, ROWS) if of_keys else (ROWS, plan.block)
    bias_map = {"bias_map": tiled(dtype, 1, 1, *of_bias) if spec.bias else None}
    slopes = {"slopes_ptr": "*fp32" if spec.alibi else None}
    if of_keys:
        rows = f"tensordesc<fp32{[1, plan.block]},{gl.NVMMASharedLayout(0, 32, 2)!r}>"
        types = {
            "q_map": by,
            "k_map": mine,
            "v_map": mine,
            "do_map": by,
            "rows_map": rows,
            "record_ptr": "*fp32",
            "coarse_ptr": "*i64",
            "dk_map": into,
        }
        types |= {"dv_map": into, **slopes}
        if plan.wide:
            binary = compiled(_keys_gradient_wide, spec, types)
        else:
            types |= bias_map | {"ds_map": bias_map["bias_map"] if stores_ds else None}
            binary = compiled(_keys_gradient_hopper, spec, types)
    else:
        types = {
            "q_map": mine,
            "k_map": by,
            "v_map": by,
            "do_map": mine,
            "rows_ptr": "*fp32",
            "record_ptr": "*fp32",
            "coarse_ptr": "*i64",
            "dq_map": into,
        }
        types |= slopes
        if plan.wide:
            binary = compiled(_queries_gradient_wide, spec, types)
        else:
            binary = compiled(_queries_gradient_hopper, spec, types | bias_map)
    of_queries = (STACK.slopes if "alibi" in options else STACK.large) if plan.wide else STACK.queries
    assert binary.stack_bytes <= (STACK.keys if of_keys else of_queries)
    assert binary.ptx.count("wgmma.mma_async") >= 3 * plan.consumers
    assert binary.shared_bytes <= 227 * 1024


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [(127, 0), (119, 0), (63, 0), (30, 33), (0, 0)], ids=str)
@pytest.mark.parametrize(("dim", "dtype"), [(32, "bf16"), (64, "bf16"), (64, "fp16"), (128, "bf16")])
def test_narrow_windows(dim, dtype, window, sinks):
    """All products with keys are under way together, and all with values."""
    plan = plan_window(dim, dim, 2, 8192, 128, 8, *window, H200)
    spec = WindowSpec(
        width=sum(window) + 1, after=window[1], pieces=plan.pieces, cut_left=plan.cut_left, stages=STAGES,
        key_stages=plan.key_stages, registers=REGISTERS, block_d=dim, block_v=dim, sinks=sinks,
    )  # fmt: skip
    mine = tiled(dtype, 1, 1, ROWS, dim)
    types = {"q_map": mine, "k_map": mine, "v_map": mine, "o_map": tiled(dtype, 1, ROWS, dim), "lse_ptr": "*fp32"}
    binary = compiled(_window_hopper, spec, types | {"sinks_ptr": "*fp32" if sinks else None})
    assert binary.stack_bytes <= (STACK.windows if dim == 128 else STACK.small_windows)
    copies = 2 * spec.consumers  # with keys that are all there, and where some are not
    assert binary.ptx.count("wgmma.mma_async") == copies * plan.pieces * (dim // 16 + ROWS // 16)
    assert binary.ptx.count("wgmma.wait_group") <= 3 * copies
    assert binary.shared_bytes <= 227 * 1024


@pytest.mark.parametrize(("keys", "dim"), [(384, 32), (300, 32), (256, 64), (200, 64)])
def test_dq_and_the_sum_of_ds(keys, dim):
    """Loads run ahead, as vectors, and sums stay in registers: where the last tile has fewer keys, all but 80 bytes."""
    plan = plan_ds(dim, keys)
    ragged = keys % plan.block_n != 0
    spec = AttentionSpec(
        block_m=plan.block_m, block_n=plan.block_n, head_dim=dim, value_dim=dim, block_d=dim, block_v=dim,
        dtype=tl.bfloat16, ragged=ragged, pieces=-(-keys // plan.block_n),
    )  # fmt: skip
    pointers = {"ds_ptr": "*bf16", "k_ptr": "*bf16", "dq_ptr": "*bf16", "sums_ptr": "*fp32"}
    types = dict.fromkeys(_product_and_sum.arg_names[:-1], "i32") | pointers
    types |= {"k_strides": ("i32", "i32", "i32"), "scale": "fp32"}
    binary = compile_for(
        _product_and_sum, signature=types, constexprs={"K": spec}, target="sm_90",
        divisible_by_16=[*pointers, *(("k_strides", i) for i in range(3))],
        num_warps=plan.num_warps, num_stages=plan.num_stages,
    )  # fmt: skip
    assert binary.stack_bytes <= (80 if ragged else 0)
    assert binary.shared_bytes <= 227 * 1024
    assert "cp.async.cg" in binary.ptx
    assert "ld.global" not in binary.ptx
    assert "wgmma.mma_async" in binary.ptx


def test_many_keys_are_left_to_torch():
    assert plan_ds(32, 385) is None
    assert plan_ds(64, 257) is None
    assert plan_ds(65, 64) is None
