"""The ceilings compiled for a GPU that need not be present: whole accesses, nothing spilled."""

import pytest
import torch
from compile_only import compile_for
from products import pairwise

from fused_softmax.bench.entries import ceiling

pytestmark = pytest.mark.compiles

KINDS = {
    "copy": ceiling.copies(),
    "convert": ceiling.copies(torch.float32),
    "share": ceiling.copies(share=0.5),
    "add": ceiling.adds(),
    "read": ceiling.reads(),
}
WIDTH = {"fp32": 4, "bf16": 2, "i32": 4}


def compiled(kernel, dtype):
    shape = kernel.shape
    constexprs = {"BLOCK": shape.block, "PERSISTENT": shape.waves > 0, "STREAMING": shape.streaming}
    if isinstance(kernel, ceiling.Copy):
        function, constexprs = ceiling._copy, constexprs | {"SHARE": kernel.share, "SHARES": ceiling.SHARES}
        pointers = {"x_ptr": dtype, "y_ptr": "fp32" if kernel.result else dtype}
    elif isinstance(kernel, ceiling.Add):
        function, pointers = ceiling._add, dict.fromkeys(("a_ptr", "b_ptr", "c_ptr"), dtype)
    else:
        function, pointers = ceiling._read, {"x_ptr": "i32", "result_ptr": "i32"}
    return compile_for(
        function,
        signature={name: f"*{kind}" for name, kind in pointers.items()} | {"groups": "i32"},
        constexprs=constexprs,
        target="sm_90",
        divisible_by_16=pointers,
        num_warps=shape.num_warps,
    )


CASES = [(kind, dtype) for kind in KINDS for dtype in ("fp32", "bf16") if dtype == "bf16" or kind != "convert"]


@pairwise()
@pytest.mark.parametrize("which", [0, 1, -3, -2, -1])
@pytest.mark.parametrize(("kind", "dtype"), [case for case in CASES if case != ("read", "bf16")])
def test_accesses_are_whole_and_nothing_spills(kind, dtype, which):
    kernel = KINDS[kind][which]
    binary = compiled(kernel, dtype)
    width = 4 if kind == "read" else WIDTH[dtype]
    whole = min(16, kernel.shape.block // (32 * kernel.shape.num_warps) * width)
    assert binary.stack_bytes == 0
    assert set(binary.load_widths) == {whole}
    if kind != "read":
        assert set(binary.store_widths) == {16 if kind == "convert" else whole}
