"""Kernels for rows and columns of several strides, compiled: what they spill, how wide they read, what they take."""

import pytest
import torch
from launches import ABOUT_THE_CALL, GPUS, Rows, launched, rows_as
from products import one_in, pairwise
from test_family_compiles import ABOUT_THE_CALL_OF_COLUMNS, Cube

from fused_softmax.core.plan import parts_held, plan_reduction, plan_rows
from fused_softmax.ops.softmax import launches as softmax_rows
from fused_softmax.ops.softmax.scores import Scores, scores_against

pytestmark = pytest.mark.compiles
TARGETS = ["sm_90", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("sm_80", "sm_100"))]
FP32, BF16 = torch.float32, torch.bfloat16
MANY = 4096
# By columns. One warp holds 40 of them; even at 216 registers nine are resident, and ask for 180 KiB at a time.
MORE_REGISTERS = {40: 48, 4096: 16}


class Nested(Rows):
    """As much as the host path looks at of what `rows_of` and `columns_of` return where one stride is not enough."""

    def __init__(self, shape, strides, dtype, phase=0):
        super().__init__(0, 0, dtype, phase=phase)
        self.shape, self.strides = shape, strides

    def stride(self, dim=None):
        return self.strides if dim is None else self.strides[dim]


def heads(n_rows, n_cols, dtype, phase=0):
    """[batch, positions, heads, n_cols] with positions and heads swapped."""
    n_heads, n_positions = 8, 64
    step = n_heads * n_cols
    strides = (n_positions * step, n_cols, step, 1)
    return Nested((n_rows // n_heads // n_positions, n_heads, n_positions, n_cols), strides, dtype, phase)


def part(shape, dtype, room):
    """[n_outer, n_cols, n_inner], of images `room` times as wide, eight rows of each."""
    n_outer, n_cols, n_inner = shape
    row = room * n_inner
    return Nested((n_outer // 8, 1, 8, n_cols, n_inner), (8 * n_cols * row, 0, row, 8 * row, 1), dtype)


def of_both(target, prepare, plain, nested):
    """Pairs of binaries: of what `prepare` launches for plain tensors, and for nested ones."""
    launches = [launched(GPUS[target], lambda: prepare(*tensors)) for tensors in (plain, nested)]  # noqa: B023
    for ordinary, other in zip(*launches, strict=True):
        assert (ordinary.spec.nested, other.spec.nested) == (False, True)
        assert not other.spec.prefetch
        yield ordinary.compile(target), other.compile(target)


def as_lean(ordinary, other, plan=None, target="sm_90"):
    """Registers are granted by eight: a few more strides take two such steps at most, and no resident part of a row."""
    assert other.spilled_bytes <= max(ordinary.spilled_bytes, ABOUT_THE_CALL if plan and plan.parts > 1 else 0)
    assert other.registers <= ordinary.registers + 16
    if plan is not None and plan.strategy == "split":
        gpu, registers = GPUS[target], -(-other.registers // 8) * 8
        resident = min(32, 64 // plan.num_warps, gpu.registers // (32 * plan.num_warps * registers))
        assert plan.parts <= parts_held(plan, gpu) <= gpu.sm_count * resident
    assert set(other.load_widths) == set(ordinary.load_widths)
    assert set(other.store_widths) == set(ordinary.store_widths)


@pairwise()
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("n_cols", one_in(2, [256, 4096, 131072, 2**26]))
def test_rows(target, dtype, n_cols):
    x, y = rows_as("even", MANY, n_cols, dtype)
    lies = heads(MANY, n_cols, dtype)
    plan = plan_rows(MANY, n_cols, dtype.itemsize, GPUS[target])
    for pair in of_both(target, lambda x: softmax_rows.prepare_forward(x, y, plan), [x], [lies]):
        as_lean(*pair, plan, target)
    plan = plan_rows(MANY, n_cols, dtype.itemsize, GPUS[target], inputs=2)
    for pair in of_both(target, lambda x: softmax_rows.prepare_backward(x, x, y, plan), [x], [lies]):
        as_lean(*pair, plan, target)
    if n_cols > 2**20:
        return
    plan = plan_reduction(MANY, n_cols, dtype.itemsize, GPUS[target])
    for pair in of_both(target, lambda x: softmax_rows.prepare_logsumexp(x, y, plan), [x], [lies]):
        as_lean(*pair)
    plan = plan_reduction(MANY, n_cols, dtype.itemsize, GPUS[target], writes=True)
    for pair in of_both(target, lambda x: softmax_rows.prepare_logsumexp_backward(x, y, y, y, plan), [x], [lies]):
        as_lean(*pair)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_causal_rows(dtype):
    x, y = rows_as("even", MANY, 2048, dtype)
    plan = plan_rows(MANY, 2048, dtype.itemsize, GPUS["sm_90"], causal=True)
    layout = scores_against(Scores(scale=0.5, is_causal=True), (8, 8, 64, 2048))
    prepare = lambda x: softmax_rows.prepare_forward(x, y, plan, layout)  # noqa: E731
    for pair in of_both("sm_90", prepare, [x], [heads(MANY, 2048, dtype)]):
        as_lean(*pair)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_rows_read_element_by_element(dtype):
    x, y = rows_as("scalar", MANY, 1001, dtype)
    plan = plan_rows(MANY, 1001, dtype.itemsize, GPUS["sm_90"], alignment="scalar")
    prepare = lambda x: softmax_rows.prepare_forward(x, y, plan)  # noqa: E731
    for pair in of_both("sm_90", prepare, [x], [heads(MANY, 1001, dtype, phase=1)]):
        as_lean(*pair)


@pairwise()
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("n_cols", [40, 4096])
def test_columns(target, dtype, n_cols):
    shape = (64, n_cols, 512)
    x, lse = Cube(shape, dtype), Cube((64, 1, 512), dtype)
    lies, result = part(shape, dtype, 2), part(shape, dtype, 1)
    cases = [
        (softmax_rows.prepare_columns, [x, x], [lies, result]),
        (softmax_rows.prepare_columns_backward, [x, x, x], [lies, result, result]),
        (softmax_rows.prepare_logsumexp_columns, [x, lse], [lies, lse]),
    ]
    for prepare, plain, nested in cases:
        for ordinary, other in of_both(target, prepare, plain, nested):
            assert other.spilled_bytes <= ABOUT_THE_CALL_OF_COLUMNS
            assert other.registers <= ordinary.registers + MORE_REGISTERS[n_cols]
            assert max(other.load_widths) == max(ordinary.load_widths)
            assert min(other.load_widths) >= 8


def test_nothing_is_compiled_in_of_strides_but_a_0():
    """Layouts of like sizes are one kernel, and what is read is as wide for each."""
    y = rows_as("even", MANY, 256, BF16)[1]
    plan = plan_rows(MANY, 256, 2, GPUS["sm_90"])
    found = set()
    for step in (256, 264, 4096, 8 * 1021):
        x = Nested((8, 8, 64, 256), (64 * 8 * step, step, 8 * step, 1), BF16)
        (launch,) = launched(GPUS["sm_90"], lambda: softmax_rows.prepare_forward(x, y, plan))  # noqa: B023
        found.add(launch)
    assert len(found) == 1
