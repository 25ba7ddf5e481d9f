"""Every kernel that the planner can ask for, compiled for GPUs that need not be present: what it spills and moves."""

import re
from functools import cache
from itertools import product

import pytest
import torch
from launches import ABOUT_THE_CALL, GPUS, launches, rows_as
from products import QUICK, pairwise, share
from shapes import ALIGNMENTS, FEW, MANY, PRIME, edges, widths

from fused_softmax.core.plan import RowPlan, parts_held, plan_rows

pytestmark = pytest.mark.compiles

FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
LONGEST = (2**20, 2**21, 2**26)
# Input and output: what is cast on the way has the plans of its input, or of fp64 where that is the output.
CASTS = ((FP16, FP32), (BF16, FP32), (FP32, BF16), (FP64, FP32), (BF16, FP64), (FP32, FP64))


@cache
def plans_of(target: str, itemsize: int, alignment: str) -> list[RowPlan]:
    """The planner's choices at its ladders' edges and far beyond, on either side of each edge for one target."""
    vector = 16 // itemsize
    if target == "sm_90" and alignment != "scalar":
        sizes = widths(itemsize, alignment)
    elif alignment == "even":
        sizes = [edge for edge in edges(itemsize) if edge % vector == 0] + [PRIME // vector * vector]
    else:
        sizes = [edge + 1 for edge in edges(itemsize, alignment) if edge >= 2 * vector] + [PRIME]
    sizes = [*sizes, *[size + (alignment != "even") for size in LONGEST]]
    return [
        plan_rows(n_rows, n_cols, itemsize, GPUS[target], alignment=alignment)
        for n_cols in sizes
        for n_rows in (FEW, MANY)
    ]


def compiled(target, alignment, dtype, out_dtype=None):
    """(plan, launch, binary) of every kernel of these, each once."""
    found = {}
    plans = plans_of(target, dtype.itemsize, alignment)
    if out_dtype is not None:  # a few of each strategy
        itemsize = 8 if out_dtype == FP64 else dtype.itemsize
        sizes = [size + (alignment != "even") for size in (128, 784, 4096, 16384, 32768, 131072, 2**26)]
        plans = [plan_rows(MANY, size, itemsize, GPUS[target], alignment=alignment) for size in sizes]
    for plan in plans:
        for launch in launches(plan, GPUS[target], *rows_as(alignment, plan.n_rows, plan.n_cols, dtype, out_dtype)):
            found.setdefault(launch, plan)
    for launch, plan in share(found.items()):
        yield plan, launch, launch.compile(target)


def accesses(binary, launch, itemsize):
    """Widths in bytes of the loads and stores of elements, without those of states and of slots."""
    loads, stores = list(binary.load_widths), list(binary.store_widths)
    name = launch.kernel.fn.__name__
    if name == "_stream_state":
        stores = stores[:0]
    elif name == "_stream_forward":
        loads = [width for width in loads if width == max(loads)]  # what is narrower may be states
    elif name == "_part_forward" and launch.spec.split and itemsize != 8:
        loads = [width for width in loads if width != 8]  # slots
    return loads, stores


def where(plan, launch):
    return f"{launch.kernel.fn.__name__} for {plan.n_rows} x {plan.n_cols}: {dict(launch.constexprs)}"


def check_registers(target, plan, launch, binary):
    """Nothing spills but about a call, and programs that share a row fit the chip by their real registers."""
    # At 96 registers of 255, Triton 3.9's ptxas keeps one word of two of these in memory: fp32, 3 x 1048577 for sm_90,
    # and 3 x 1048576 for sm_80.
    few = 8 if plan.alignment == "scalar" or target == "sm_80" else 0
    if launch.spec.split:
        few = 96 if target == "gfx942" else ABOUT_THE_CALL  # there what is called saves the registers that it takes
    assert binary.spilled_bytes <= few, where(plan, launch)
    if plan.strategy == "split" and target != "gfx942":
        gpu, registers = GPUS[target], -(-binary.registers // 8) * 8
        resident = min(32, 64 // plan.num_warps, gpu.registers // (32 * plan.num_warps * registers))
        assert plan.parts <= parts_held(plan, gpu) <= gpu.sm_count * resident, where(plan, launch)


# fp16 takes the plans of bf16.
PLANS = [*product(GPUS, (FP32, BF16, FP64), ALIGNMENTS), ("sm_90", FP16, "even")]
GUARDED = [("sm_90", *plans) for plans in ((FP32, "shifted"), (BF16, "even"), (BF16, "shifted"), (FP64, "even"))]


@pytest.mark.guard
@pytest.mark.parametrize(
    ("target", "dtype", "alignment"),
    [pytest.param(*plans, marks=() if plans in GUARDED else pytest.mark.exhaustive) for plans in PLANS],
    ids=str,
)
def test_every_plan(target, dtype, alignment):
    # Blocks are sized for warps of 32 lanes; of the 64 on AMD each moves half as much, and of short rows a quarter.
    widest, least = (8, 4) if target == "gfx942" else (16, 8)
    found = 0
    for plan, launch, binary in compiled(target, alignment, dtype):
        found += 1
        check_registers(target, plan, launch, binary)
        loads, stores = accesses(binary, launch, dtype.itemsize)
        if plan.alignment == "even":
            assert min(loads, default=16) >= widest, where(plan, launch)
            assert min(stores, default=16) >= widest, where(plan, launch)
        elif plan.alignment == "shifted":
            # Edges element by element, one or a few of them a thread, and the body in wide accesses.
            for widths_found in (loads, stores):
                assert min(set(widths_found) - {dtype.itemsize}, default=16) >= least, where(plan, launch)
                assert dtype == FP64 or widths_found.count(dtype.itemsize) <= 8, where(plan, launch)
    assert found >= (2 if QUICK else 5)


@pytest.mark.guard
@pairwise(strength=1)
@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("dtypes", CASTS, ids=str)
def test_every_plan_with_a_cast(target, dtypes):
    for alignment in ("even", "shifted") if target == "sm_90" else ("even",):
        for case in compiled(target, alignment, *dtypes):
            check_registers(target, *case)


def test_fetching_ahead_is_of_sm_90_on():
    names = {}
    for target, gpu in GPUS.items():
        plan = plan_rows(MANY, 4096, 2, gpu)
        (launch,) = launches(plan, gpu, *rows_as("even", MANY, 4096, BF16))
        binary = launch.compile(target)
        names[target] = "cp.async.bulk.prefetch" in (binary.amdgcn if binary.is_amd else binary.ptx)
    assert names == {"sm_80": False, "sm_90": True, "sm_100": True, "gfx942": False}


def test_rows_are_addressed_in_64_bits():
    for n_cols in (256, 4096, 131072):
        for dtype in (BF16, FP64):
            plan = plan_rows(MANY, n_cols, dtype.itemsize, GPUS["sm_90"])
            for launch in launches(plan, GPUS["sm_90"], *rows_as("even", MANY, n_cols, dtype)):
                ttir = launch.compile("sm_90").kernel.asm["ttir"]
                offsets = list(offsets_of_rows(ttir))
                assert {name for name, _ in offsets} == set(launch_tensors(ttir))
                assert all("i64" in kind for _, kind in offsets), offsets


def launch_tensors(ttir):
    """The rows that a kernel reads and writes."""
    return [name for name in ("%x_ptr", "%y_ptr") if f"{name}: !tt.ptr" in ttir]


def offsets_of_rows(ttir):
    """(tensor, type of the offset) wherever a row is found in a tensor of rows; but what is subtracted finds none."""
    kernel = ttir[ttir.index("tt.func public") :].partition("tt.func private")[0]  # functions name values anew
    made = dict(re.findall(r"(%\w+) = (.*)", kernel))
    tensors = {name: name for name in launch_tensors(ttir)}
    tensors |= {name: tensors[of[1]] for name, how in made.items() if (of := re.match(r"tt\.splat (%[xy]_ptr) ", how))}
    for how in made.values():
        added = re.match(r"tt\.addptr (%\w+), (%\w+) : [^,]*, (\S+)", how)
        if added and added[1] in tensors and not made.get(added[2], "").startswith("arith.subi"):
            yield tensors[added[1]], added[3]


@pytest.mark.parametrize("n_cols", [129, 159, 161, 223])
def test_pieces_of_odd_rows_are_laid_out_once(n_cols):
    """Loaded before them, the edges of a row leave what is made of both the layout of the pieces."""
    x, y = rows_as("shifted", MANY, n_cols, BF16)
    plan = plan_rows(MANY, n_cols, 2, GPUS["sm_90"], alignment="shifted")
    (launch,) = launches(plan, GPUS["sm_90"], x, y)
    lines = launch.compile("sm_90").kernel.asm["ttgir"].splitlines()
    piece = f"tensor<{plan.block_rows}x{plan.block_cols}x"
    assert [line for line in lines if "tt.load" in line and piece in line]
    assert not [line for line in lines if "convert_layout" in line and piece in line]
