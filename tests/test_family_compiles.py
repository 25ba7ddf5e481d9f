"""Gradients, scores, logsumexp and strided dims compiled for GPUs that need not be present: spills, wide accesses."""

import pytest
import torch
from launches import ABOUT_THE_CALL, GPUS, Rows, launched, rows_as
from products import one_in, pairwise

from fused_softmax.core.plan import plan_reduction, plan_rows
from fused_softmax.ops.softmax import launches as softmax_rows
from fused_softmax.ops.softmax.scores import Scores, scores_against, scores_against_columns

pytestmark = pytest.mark.compiles
FP32, BF16 = torch.float32, torch.bfloat16
MANY = 4096


class Cube(Rows):
    """As much of a CUDA tensor [n_outer, n_cols, n_inner] as the host path looks at."""

    def __init__(self, shape, dtype):
        super().__init__(shape[0], shape[1], dtype)
        self.shape = shape

    def stride(self, dim=None):
        strides = (self.shape[1] * self.shape[2], self.shape[2], 1)
        return strides if dim is None else strides[dim]


def compiled(target, prepare):
    """The binaries of what `prepare` launches."""
    return [launch.compile(target) for launch in launched(GPUS[target], prepare)]


OF_THREE_PROGRAMS = 168  # registers of a thread
ABOUT_THE_CALL_OF_COLUMNS = 148  # which have an address for each of 32 tiles at the end; 108 for sm_90


def assert_lean(binaries, target, even):
    for binary in binaries:
        assert binary.spilled_bytes <= ABOUT_THE_CALL
        if even and target != "gfx942":  # blocks are sized for warps of 32 lanes
            assert max(binary.load_widths) == 16


@pairwise()
@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("alignment", ["even", "shifted"])
def test_backward(target, dtype, alignment):
    for n_cols in (256, 1000, 4096, 16384, 32000, 131072, 2**20, 2**26):
        n_cols += alignment == "shifted"
        plan = plan_rows(MANY, n_cols, dtype.itemsize, GPUS[target], alignment=alignment, inputs=2)
        x, y = rows_as(alignment, MANY, n_cols, dtype)
        for log in (False, True):
            prepare = lambda: softmax_rows.prepare_backward(x, y, y, plan, log=log)  # noqa: B023, E731
            binaries = compiled(target, prepare)
            assert_lean(binaries, target, alignment == "even")


@pytest.mark.parametrize("n_cols", [65536, 524288])
@pytest.mark.parametrize("log", [False, True])
def test_six_parts_of_a_gradient_are_resident(n_cols, log):
    x = rows_as("even", MANY, n_cols, BF16)[0]
    plan = plan_rows(MANY, n_cols, 2, GPUS["sm_90"], inputs=2)
    (binary,) = compiled("sm_90", lambda: softmax_rows.prepare_backward(x, x, x, plan, log=log))
    assert binary.registers <= 80
    assert binary.spilled_bytes <= ABOUT_THE_CALL


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("scores", ["number", "tensor", "bool", "added", "causal"])
def test_scores(target, scores):
    shape = (8, 512, 2048)
    mask = torch.ones(1, 512, 2048, dtype=torch.bool)
    kinds = {
        "number": Scores(scale=0.5), "tensor": Scores(scale=torch.ones(8, 512, 1)), "bool": Scores(mask=mask),
        "added": Scores(mask=mask.to(BF16)), "causal": Scores(scale=0.5, is_causal=True),
    }  # fmt: skip
    for dtype in (FP32, BF16):
        itemsize = 4 if scores == "added" else dtype.itemsize
        x, y = rows_as("even", MANY, 2048, dtype)
        plan = plan_rows(MANY, 2048, itemsize, GPUS[target])
        prepare = lambda: softmax_rows.prepare_forward(x, y, plan, layout=scores_against(kinds[scores], shape))  # noqa: B023, E731
        for binary in compiled(target, prepare):
            assert binary.spilled_bytes == 0


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("dtype", one_in(2, [BF16, FP32]), ids=str)
@pytest.mark.parametrize("alignment", ["even", "shifted"])
def test_a_sink(target, dtype, alignment):
    """By every strategy of rows, a causal and a greedy one among them."""
    head = torch.ones(8, 1, 1)
    cases = [
        (MANY, 256, Scores(sink=head)), (MANY, 2048, Scores(sink=head, scale=0.0)), (64, 131072, Scores(sink=head)),
        (MANY, 2048, Scores(sink=head, is_causal=True, scale=0.5)), (MANY, 2**26, Scores(sink=head)),
    ]  # fmt: skip
    strategies = set()
    for n_rows, n_cols, scores in cases:
        n_cols += alignment == "shifted"
        shape, (x, y) = (8, n_rows // 8, n_cols), rows_as(alignment, n_rows, n_cols, dtype)
        plan = plan_rows(
            n_rows, n_cols, dtype.itemsize, GPUS[target], alignment=alignment, causal=scores.is_causal
        )  # fmt: skip
        strategies.add(plan.strategy)
        prepare = lambda: softmax_rows.prepare_forward(x, y, plan, scores_against(scores, shape))  # noqa: B023, E731
        launches = launched(GPUS[target], prepare)
        assert launches[-1].spec.sink
        assert_lean([each.compile(target) for each in launches], target, alignment == "even")
        if scores.scale is None:
            plan = plan_reduction(n_rows, n_cols, dtype.itemsize, GPUS[target], alignment=alignment)
            prepare = lambda: softmax_rows.prepare_logsumexp(x, y, plan, scores_against(scores, shape))  # noqa: B023, E731
            assert_lean(compiled(target, prepare), target, alignment == "even")
    assert strategies == {"tile", "row", "split", "stream"}


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_logsumexp(target, dtype):
    for n_cols in (128, 1024, 4096, 131072):
        for n_rows in (3, MANY):
            x, lse = rows_as("even", n_rows, n_cols, dtype)
            plan = plan_reduction(n_rows, n_cols, dtype.itemsize, GPUS[target])
            binaries = compiled(target, lambda: softmax_rows.prepare_logsumexp(x, lse, plan))  # noqa: B023
            assert_lean(binaries, target, True)


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("shape", [(64, 4096, 512), (32, 1024, 2048), (64, 40, 512)], ids=str)
def test_strided_dims(target, dtype, shape):
    x = Cube(shape, dtype)
    lse = Cube((shape[0], 1, shape[2]), dtype)
    for width, prepare in (
        (16, lambda: softmax_rows.prepare_columns(x, x)),
        (16, lambda: softmax_rows.prepare_columns_backward(x, x, x)),
        (4 * dtype.itemsize, lambda: softmax_rows.prepare_logsumexp_columns(x, lse)),  # a state for each position
    ):
        for binary in compiled(target, prepare):
            assert binary.spilled_bytes <= ABOUT_THE_CALL_OF_COLUMNS
            if target != "gfx942":  # so wide of a tensor, 8 bytes of a message, and nothing by elements
                assert min(binary.load_widths) >= 8
                assert max(binary.load_widths) == width


@pytest.mark.parametrize(("n_inner", "elements"), [(300, 4), (302, 2), (200, 8), (301, 1)])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_strided_dims_of_any_inner_size_are_as_wide_as_it_divides(n_inner, elements, dtype):
    """And spill nothing: a cap on registers, which holds three programs resident, is left out where it would."""
    shape = (64, 4001, n_inner)
    x, width = Cube(shape, dtype), min(16, elements * dtype.itemsize)
    for prepare in (lambda: softmax_rows.prepare_columns(x, x), lambda: softmax_rows.prepare_columns_backward(x, x, x)):
        (binary,) = compiled("sm_90", prepare)
        assert set(binary.store_widths) == {width}
        assert binary.spilled_bytes <= ABOUT_THE_CALL or elements <= 2  # addresses take all registers


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_three_programs_over_a_strided_dim_are_resident(dtype):
    x = Cube((64, 4096, 512), dtype)
    (binary,) = compiled("sm_90", lambda: softmax_rows.prepare_columns(x, x))
    assert binary.registers <= OF_THREE_PROGRAMS
    assert binary.spilled_bytes <= ABOUT_THE_CALL_OF_COLUMNS


class Mask(Cube):
    """The same of a mask [n_outer, n_cols, n_inner], each of its own size or 1."""

    def __init__(self, shape, dtype):
        super().__init__(shape, dtype)
        self._strides = tuple(0 if n == 1 else k for n, k in zip(shape, super().stride(), strict=True))

    def stride(self, dim=None):
        return self._strides if dim is None else self._strides[dim]

    def expand(self, shape):
        return self


@pytest.mark.parametrize("kind", ["bool", "added"])
@pytest.mark.parametrize("over", one_in(3, ["all", "columns", "positions"]))
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("n_cols", [21, 40, 4096])
def test_a_mask_over_a_strided_dim(n_cols, dtype, over, kind):
    """Spills nothing, reads rows of it in vectors, and lets as many programs be resident where they share columns."""
    shape = (64, n_cols, 512)
    of_mask = {"columns": (1, n_cols, 1), "positions": (64, 1, 512), "all": shape}[over]
    scores = Scores(scale=0.5, mask=Mask(of_mask, torch.bool if kind == "bool" else dtype))
    layout = scores_against_columns(scores, shape, 1, ((0,), (2,)))
    x = Cube(shape, dtype)
    (binary,) = compiled("sm_90", lambda: softmax_rows.prepare_columns(x, x, layout=layout))
    assert binary.spilled_bytes <= (ABOUT_THE_CALL if n_cols == 4096 else 0)
    assert binary.registers <= OF_THREE_PROGRAMS
    assert max(binary.load_widths) >= 8
    assert over == "columns" or kind == "added" or 1 not in binary.load_widths


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("log", [False, True])
def test_the_gradient_of_a_mask_over_a_strided_dim(log, dtype):
    for n_cols in (21, 40, 4096):
        x = Cube((64, n_cols, 512), dtype)
        prepare = lambda: softmax_rows.prepare_columns_backward(x, x, x, log=log, hides=True, scaled=True)  # noqa: B023, E731
        (binary,) = compiled("sm_90", prepare)
        assert n_cols == 40 or binary.registers <= OF_THREE_PROGRAMS  # two warps hold those, and need no third program
        assert binary.spilled_bytes <= (ABOUT_THE_CALL if n_cols == 4096 else 0)
