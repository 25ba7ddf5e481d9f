"""Draws compiled for GPUs that need not be present: nothing spills, and logits are read 16 bytes at a time."""

from unittest import mock

import pytest
import torch
from launches import GPUS, specialised

from fused_softmax.ops.sampling import calls as sample_reports
from fused_softmax.ops.sampling import judged, penalties, verified
from fused_softmax.ops.sampling import launches as sample_calls
from fused_softmax.ops.sampling.options import Sampling

pytestmark = pytest.mark.compiles

CALLS = {
    "no filter": ({}, {"_draw": 80}),
    "greedy": ({"temperature": 0.0}, {"_draw": 80}),
    "top-k": ({"top_k": 50}, {"_stretches": 64, "_choose": 128}),
    "top-p": ({"top_p": 0.9}, {"_stretches": 64, "_propose": 160, "_decide": 96, "_redraw": 128}),
    # 128 registers by 3.6, which was measured; by 3.7 and 3.9 up to 190, and half as many programs are resident.
    "top-p of top-k": (
        {"top_k": 100, "top_p": 0.9},
        {"_stretches": 64, "_choose": 192, "_weigh": 80, "_bound": 128, "_decide": 64},
    ),
    "min-p": ({"min_p": 0.05}, {"_stretches": 64, "_draw_above": 128}),
    "log-probabilities": ({"return_logprobs": "raw", "top_logprobs": 20}, {"_stretches": 64, "_report": 128}),
    "log-probabilities beside top-p": (
        {"top_p": 0.9, "return_logprobs": "raw", "top_logprobs": 20},
        {"_stretches": 80, "_report": 128},
    ),
}
# Bytes, of programs whose rows are read again; none of what reads all logits. `_bound` has 16 of 8192 codes a thread.
SPILLED = {"_choose": 16, "_bound": 100, "_weigh": 16, "_report": 16, "_draw_above": 16, "_redraw": 100}


def compiled(target, dtype, options):
    """Each kernel that a call launches, by name."""
    found = {}

    def prepare(kernel, grid, tensors, scalars, constexprs, *, device, numbers=(), **rest):
        found[kernel.__name__] = specialised(kernel, tensors, scalars, constexprs, rest)
        return mock.Mock()

    logits, position = torch.empty(256, 128256, dtype=dtype), torch.zeros(256, dtype=torch.int64)
    with (
        mock.patch.object(sample_calls.launch, "prepare", prepare),
        mock.patch.object(sample_calls, "device_of", return_value=GPUS[target]),
        mock.patch.object(sample_reports, "device_of", return_value=GPUS[target]),
        mock.patch.object(sample_calls, "has_ptx", return_value=target != "gfx942"),
    ):
        sample_reports.prepare_sample(logits, Sampling(**{"temperature": 0.8, **options}), 1, position, None)
    return {name: launch.compile(target) for name, launch in found.items()}


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.exhaustive), torch.bfloat16], ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_registers_and_accesses_of_draws(call, dtype):
    options, most = CALLS[call]
    for name, binary in compiled("sm_90", dtype, options).items():
        if name in most:
            assert binary.registers <= most[name], name
            assert binary.spilled_bytes <= SPILLED.get(name, 0), name
            assert name == "_bound" or max(binary.load_widths) == 16, name


VERIFIED = {
    "chain": ({}, {"_judge": 128, "_follow": 64, "_draw_left": 128}),
    "chain, top-p": ({"top_p": 0.9}, {"_judge": 192, "_weigh": 80, "_bound": 128, "_draw_left": 128}),
    "chain, top-p and min-p": ({"top_p": 0.9, "min_p": 0.1}, {"_judge": 192, "_bound": 128, "_sum_kept": 96}),
    "block": ({"verify": "block"}, {"_follow": 64, "_sum_left": 128, "_settle": 64, "_draw_left": 128}),
    "tree": ({"verify": "tree"}, {"_judge": 128, "_climb": 255, "_draw_left": 128}),
    "told chain": ({"told": True}, {"_place": 64, "_trace": 64}),
    "told tree": ({"told": True, "verify": "tree"}, {"_place": 64, "_trace": 96}),
    "mask": ({"alone": "mask"}, {"_stretches": 64, "_judge": 192, "_write_kept": 80}),
    "renormalised": ({"alone": "probs"}, {"_stretches": 64, "_judge": 192, "_bound": 128, "_write_kept": 80}),
}


def compiled_of_drafts(target, dtype, top_p=None, min_p=None, verify="chain", told=False, alone=None):
    """Each kernel that a call launches, by name: of drafts, or of one filter alone."""
    found = {}

    def prepare(kernel, grid, tensors, scalars, constexprs, *, device, numbers=(), **rest):
        found[kernel.__name__] = specialised(kernel, tensors, scalars, constexprs, rest)
        return mock.Mock()

    n, k, n_cols, seed = 64, 4, 128256, torch.zeros(64, dtype=torch.int64)
    target_logits, drafted = torch.empty(n, k + 1, n_cols, dtype=dtype), torch.empty(n, k, n_cols, dtype=dtype)
    parents = torch.zeros(n, k, dtype=torch.int64) if verify == "tree" else None
    tokens = torch.zeros(n, k, dtype=torch.int64)
    given = verified.Given(target_logits, tokens, None if told else drafted, None, None, parents, None, None)
    with (
        mock.patch.object(sample_calls.launch, "prepare", prepare),
        mock.patch.multiple(sample_calls, device_of=lambda _: GPUS[target], has_ptx=lambda _: target != "gfx942"),
        mock.patch.object(sample_reports, "device_of", return_value=GPUS[target]),
        mock.patch.object(judged, "device_of", return_value=GPUS[target]),
        mock.patch.multiple(verified, device_of=lambda _: GPUS[target], has_ptx=lambda _: target != "gfx942"),
    ):
        if alone is not None:
            judged.prepare_filter(drafted[:, 0], "top_p", 0.9, alone == "probs")
        else:
            numbers = sample_calls.Numbers(0.8, None, top_p, min_p, seed, seed)
            verified.prepare_speculation(given, numbers, verify=verify)
    return {name: launch.compile(target) for name, launch in found.items()}


@pytest.mark.guard  # a case takes ten seconds
@pytest.mark.parametrize("call", VERIFIED)
def test_registers_of_verification(call):
    given, most = VERIFIED[call]
    found = compiled_of_drafts("sm_90", torch.bfloat16, **given)
    assert most.keys() <= found.keys()
    for name, binary in found.items():
        assert binary.registers <= most.get(name, 255), name
        assert binary.spilled_bytes <= {"_judge": 16, **SPILLED}.get(name, 0), name
        if name in ("_draw_left", "_sum_left", "_sum_kept", "_write_kept"):
            assert max(binary.load_widths) == 16, name


IDS = torch.zeros(256, 1000, dtype=torch.int64)
BIAS, BITS = torch.zeros(256, 128256, dtype=torch.bfloat16), torch.zeros(256, 4008, dtype=torch.int32)
PENALIZED = {
    "new": {},
    "in place": {"in_place": True},
    "few rows": {"n_rows": 8},
    "many ids": {"ids": IDS[:, :1].expand(256, 32769)},
    "many ids in place": {"ids": IDS[:, :1].expand(256, 16385), "in_place": True},
    "of a draw": {"bias": BIAS, "bitmask": BITS, "result": torch.float32},
    "a row that ends within a group": {"n_cols": 50257, "row_stride": 50304, "in_place": True},
}


def penalizing(target, dtype, n_rows=256, n_cols=128256, row_stride=None, in_place=False, ids=IDS, **given):
    """The kernels that write blocks, and those that go to the columns among ids."""
    found = [], []

    def prepare(kernel, grid, tensors, scalars, constexprs, *, device, num_warps, numbers, plan):
        launch = specialised(kernel, tensors, scalars, constexprs, {"num_warps": num_warps})
        found[not constexprs["K"].streams].append(launch)
        return mock.Mock()

    x = torch.empty(n_rows, row_stride or n_cols, dtype=dtype)[:, :n_cols]
    given = {"bias": None, "bitmask": None} | given
    numbers = penalties.Penalties(1.1, torch.zeros(n_rows), 0.5)
    arguments = x, ids[:n_rows], numbers, x if in_place else None, given["bias"], given["bitmask"], None
    with (
        mock.patch.object(penalties.launch, "prepare", prepare),
        mock.patch.object(penalties, "has_ptx", return_value=target != "gfx942"),
    ):
        penalties.prepare_penalties(*arguments, dtype=given.get("result"))(*arguments)
    return [[each.compile(target) for each in kind] for kind in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("call", PENALIZED)
def test_registers_and_accesses_of_penalties(call, dtype):
    blocks, of_ids = penalizing("sm_90", dtype, **PENALIZED[call])
    by_block = "many ids" in call
    assert (len(blocks), len(of_ids)) == (int(by_block or "in_place" not in PENALIZED[call]), int(not by_block))
    for binary in blocks:
        assert binary.registers <= (128 if by_block else 48)
        assert max(binary.store_widths) == max(binary.load_widths) == 16
        assert not binary.spilled_bytes
    for binary in of_ids:
        assert binary.registers <= 96
        assert binary.spilled_bytes <= 32


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
def test_draws_compile_for_other_gpus(target):
    assert len(compiled(target, torch.bfloat16, {"top_p": 0.9})) == 4
    assert len(compiled(target, torch.bfloat16, {})) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
def test_penalties_compile_for_other_gpus(target):
    blocks, of_ids = penalizing(target, torch.bfloat16)
    assert max(each.registers for each in (*blocks, *of_ids)) <= 128
