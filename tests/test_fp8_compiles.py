"""Kernels that read 8-bit floats, compiled for GPUs that need not be present: accesses, conversions, spills."""

import pytest
import torch
from launches import ABOUT_THE_CALL, GPUS, Rows, launched, rows_as
from test_family_compiles import Cube

from fused_softmax.ops.softmax import launches as softmax_rows
from fused_softmax.ops.softmax.scores import Scores, scores_against

pytestmark = pytest.mark.compiles

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CONVERSIONS = {E4M3: "cvt.rn.f16x2.e4m3x2", E5M2: "cvt.rn.f16x2.e5m2x2"}
MANY = 4096


def binaries(target, prepare):
    found = launched(GPUS[target], prepare)
    assert all(each.spec.fp8 is not None for each in found)
    assert all(dict(each.signature)["x_ptr"] == "*u8" for each in found)
    return [each.compile(target) for each in found]


@pytest.mark.parametrize("target", ["sm_90", pytest.param("sm_80", marks=pytest.mark.guard)])
@pytest.mark.parametrize("given", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("wanted", [BF16, FP32], ids=str)
def test_rows_are_read_8_bytes_at_a_time_and_written_16(given, wanted, target):
    """Even rows are bytes that begin on 8. Before sm_89 no instruction converts them."""
    for phase in (0, 8):
        x, y = Rows(MANY, 4096, given, phase=phase), Rows(MANY, 4096, wanted)
        (binary,) = binaries(target, lambda: softmax_rows.prepare_forward(x, y))  # noqa: B023
        assert set(binary.load_widths) == {8}
        assert set(binary.store_widths) == {16}
        assert binary.spilled_bytes == 0
        assert (CONVERSIONS[given] in binary.ptx) == (target == "sm_90")


def test_odd_rows_have_a_body_of_8_bytes_at_a_time():
    x, y = rows_as("even", MANY, 4097, E4M3, BF16)
    (binary,) = binaries("sm_90", lambda: softmax_rows.prepare_forward(x, y))
    assert set(binary.load_widths) == {1, 8}
    assert set(binary.store_widths) == {2, 16}
    assert binary.load_widths.count(1) <= 2
    assert binary.spilled_bytes == 0


@pytest.mark.parametrize("n_cols", [256, 1024, 4096])
def test_their_rows_take_the_registers_of_float16(n_cols):
    """So as many programs fit. Of 32768 columns one fits alone, at 170 registers; two of float16, at 128."""
    found = []
    for given in (E4M3, FP16):
        x, y = rows_as("even", MANY, n_cols, given, FP16)
        (each,) = launched(GPUS["sm_90"], lambda: softmax_rows.prepare_forward(x, y))  # noqa: B023
        binary = each.compile("sm_90")
        assert binary.spilled_bytes == 0
        found.append(-(-binary.registers // 8) * 8)
    assert found[0] <= found[1]


def test_they_are_fetched_ahead_from_sm_90_on():
    x, y = rows_as("even", MANY, 4096, E4M3, BF16)
    for target in ("sm_90", "sm_80"):
        (each,) = launched(GPUS[target], lambda: softmax_rows.prepare_forward(x, y))
        assert each.spec.prefetch == (target == "sm_90")


@pytest.mark.parametrize("target", ["sm_90", pytest.param("sm_80", marks=pytest.mark.guard)])
@pytest.mark.parametrize("scores", ["bool", "added", "causal"])
def test_scores(scores, target):
    shape = (8, 512, 2048)
    mask = torch.ones(1, 512, 2048, dtype=torch.bool)
    kinds = {
        "bool": Scores(mask=mask), "added": Scores(mask=mask.to(BF16)), "causal": Scores(scale=0.5, is_causal=True)
    }  # fmt: skip
    x, y = rows_as("even", MANY, 2048, E4M3, BF16)
    for binary in binaries(
        target, lambda: softmax_rows.prepare_forward(x, y, layout=scores_against(kinds[scores], shape))
    ):
        assert binary.spilled_bytes == 0


@pytest.mark.parametrize("target", ["sm_90", pytest.param("gfx942", marks=pytest.mark.guard)])
def test_logsumexp_and_strided_dims(target):
    for n_cols in (128, 4096, 131072):
        x, lse = rows_as("even", MANY, n_cols, E4M3, FP32)
        for binary in binaries(target, lambda: softmax_rows.prepare_logsumexp(x, lse)):  # noqa: B023
            assert binary.spilled_bytes <= ABOUT_THE_CALL
            assert target != "sm_90" or max(binary.load_widths) == 8
    x, y = Cube((64, 40, 512), E4M3), Cube((64, 40, 512), FP16)
    (binary,) = binaries(target, lambda: softmax_rows.prepare_columns(x, y))
    assert binary.spilled_bytes == 0
    assert target != "sm_90" or (set(binary.load_widths), set(binary.store_widths)) == ({8}, {16})
    lse = Cube((64, 1, 512), FP16)
    (binary,) = binaries(target, lambda: softmax_rows.prepare_logsumexp_columns(x, lse))
    assert binary.spilled_bytes <= ABOUT_THE_CALL
