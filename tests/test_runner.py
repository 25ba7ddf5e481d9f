"""Runs of plans whose programs exchange: every launch has slots for all of its rows."""

import pytest
import torch

from fused_softmax.core import launch, runner, workspace
from fused_softmax.core.kernels.spec import ScoreSpec
from fused_softmax.core.plan import H200, candidate
from fused_softmax.ops.softmax.kernels.forward import _part_forward
from fused_softmax.ops.softmax.scores import PLAIN, scores_against

N_COLS = 4096


def split(n_rows):
    return candidate("split", n_rows, N_COLS, 4, H200, part_cols=1024, copies=2)


class Launched:
    """A launch that notes how many slots it is given."""

    def __init__(self, given):
        self.given = given

    def __call__(self, slots, *tensors):
        self.given.append(slots.numel())

    def again(self, grid, changed):
        return Launched(self.given)


@pytest.mark.parametrize("device", [-1, 0], ids=["one after another", "at once"])
def test_a_run_for_more_rows_has_slots_for_all(device, monkeypatch):
    given = []
    monkeypatch.setattr(launch, "prepare", lambda *arguments, **options: Launched(given))
    monkeypatch.setattr(workspace, "slots", lambda device, n_rows, per_row: torch.zeros(n_rows * per_row))
    x = torch.zeros(2, N_COLS)
    spec = runner.spec_of(ScoreSpec, split(2), x.dtype, -1, itemsize=4)
    tensors = {"x": x, "y": x, "mask": None, "scale": None, "sink": None}
    values = scores_against(PLAIN, tuple(x.shape)).values
    run = runner.prepare(_part_forward, split(2), spec, tensors, values, device=device, plan_for=split)
    run(x, x)
    run.for_rows(6, 2)(x, x)
    launches = 2 if device < 0 else 1
    assert given == [2 * split(2).slots_per_row] * launches + [6 * split(6).slots_per_row] * launches
    assert split(2).slots_per_row == 4 * 2


def test_kept_slots_are_enough_or_made_anew(monkeypatch):
    monkeypatch.setattr(workspace, "_slots", {})
    monkeypatch.setattr(workspace, "_zeros", lambda size, device: torch.zeros(size, dtype=torch.int64))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    first = workspace.slots(0, 4, 8)
    assert first.numel() >= 4 * 8
    assert workspace.slots(0, 3, 8) is first
    assert workspace.slots(0, 4, 4) is not first, "slots belong to one number of slots a row"
    more = workspace.slots(0, 20, 8)
    assert more.numel() >= 20 * 8
    assert workspace.slots(0, 4, 8) is more


@pytest.mark.parametrize("phase", range(4))
def test_a_kernel_is_told_how_far_off_16_bytes_rows_start(phase, monkeypatch):
    """Where it is told wrong, the interpreter computes the same, and a GPU faults."""
    told = {}

    def noted(kernel, grid, tensors, scalars, constexprs, **options):
        names = [name for name in kernel.arg_names if not name.endswith("_ptr") and name != "K"]
        told.update(zip(names, scalars, strict=True))
        return Launched([])

    monkeypatch.setattr(launch, "prepare", noted)
    x = torch.zeros(2 * 1023 + 4)[phase : phase + 2 * 1023].view(2, 1023)
    plan = candidate("row", 2, 1023, 4, H200, alignment="shifted")
    spec = runner.spec_of(ScoreSpec, plan, x.dtype, -1, itemsize=4)
    tensors = {"x": x, "y": x, "mask": None, "scale": None, "sink": None}
    runner.prepare(_part_forward, plan, spec, tensors, scores_against(PLAIN, (2, 1023)).values, device=-1)
    assert (told["misalignment"], told["x_row_stride"], told["n_cols"]) == (phase, 1023, 1023)
