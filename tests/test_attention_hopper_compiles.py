"""attention's kernel for sm_90, compiled without a GPU: no spills, wgmma, and shared memory that a program may take."""

import pytest
import triton
from compile_only import TARGETS, Compiled
from triton.experimental.gluon._runtime import GluonASTSource

from fused_softmax.kernels.attention_hopper import SIZES, _attention_hopper
from fused_softmax.kernels.attention_hopper_spec import ROWS, HopperSpec
from fused_softmax.kernels.gluon_names import gl
from fused_softmax.plan import H200
from fused_softmax.plan.attention_hopper import plan_hopper

pytestmark = pytest.mark.compiles
DTYPES = {"bf16": gl.bfloat16, "fp16": gl.float16}
KINDS = {
    "full": {"ragged": False},
    "causal": {"right": True},
    "window and sinks": {"left": True, "right": True, "sinks": True},
}


def tiled(dtype, *block):
    layout = gl.NVMMASharedLayout.get_default_for(list(block), DTYPES[dtype])
    return f"tensordesc<{dtype}{list(block)},{layout!r}>"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dim", "length", "dtype"), [(64, 4096, "bf16"), (64, 512, "fp16"), (128, 4096, "bf16"),
                                                      (256, 4096, "bf16")])  # fmt: skip
def test_forward(dim, length, dtype, kind):
    plan = plan_hopper(dim, dim, 2, length, H200)
    spec = HopperSpec(
        consumers=plan.consumers, block=plan.block, stages=plan.stages, registers=plan.registers, block_d=dim,
        block_v=dim, reuses=plan.reuses, **KINDS[kind],
    )  # fmt: skip
    names = _attention_hopper.arg_names
    signature = dict.fromkeys(names, "i32") | {
        "q_map": tiled(dtype, 1, 1, ROWS, dim), "k_map": tiled(dtype, 1, 1, plan.block, dim),
        "v_map": tiled(dtype, 1, 1, plan.block, dim), "o_map": tiled(dtype, 1, ROWS, dim),
        "sinks_ptr": "*fp32" if spec.sinks else "constexpr", "lse_ptr": "*fp32", "scale": "fp32", "K": "constexpr",
    }  # fmt: skip
    constants = {(names.index("K"),): spec} | ({} if spec.sinks else {(names.index("sinks_ptr"),): None})
    source = GluonASTSource(_attention_hopper, signature, constants, {})
    options = {"enable_fp_fusion": True, "num_warps": 4}
    binary = Compiled(triton.compile(source, target=TARGETS["sm_90"], options=options))
    assert set(SIZES) < set(names)
    assert binary.stack_bytes == 0
    assert binary.ptx.count("wgmma.mma_async") >= 2 * plan.consumers
    assert binary.shared_bytes <= 227 * 1024
