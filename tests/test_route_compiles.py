"""Routing compiled for GPUs that need not be present: registers, nothing spilled, and rows that stay in their warps."""

import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
import triton
from launches import GPUS, specialised

from fused_softmax.core.launch import MOST_SPILLED
from fused_softmax.ops.routing import launches
from fused_softmax.ops.routing.options import Routing

pytestmark = pytest.mark.compiles

PLAIN = {"return_counts": False}
LOSSES = {"return_aux_loss": True, "return_z_loss": True}
BIAS = torch.zeros(256)
V3 = {"score": "sigmoid", "bias": BIAS, "n_groups": 8, "groups_kept": 4, "scale": 2.5, **PLAIN}
# Rows, experts, k, options, and how many registers a thread takes at most. With 64 all programs of a plan
# with sums are resident at once; Triton 3.9 takes more. In fp32 a few numbers are spilled.
CALLS = {
    "64 experts": (16384, 64, 6, PLAIN, 40),
    "128 experts": (16384, 128, 8, PLAIN, 40),
    "256 experts": (16384, 256, 8, PLAIN, 48),
    "384 experts": (16384, 384, 8, PLAIN, 56),
    "512 experts": (16384, 512, 10, PLAIN, 64),
    "2304 experts": (8192, 2304, 36, PLAIN, 160),
    "few rows": (64, 256, 8, PLAIN, 56),
    "few rows by groups": (64, 256, 8, V3, 80),
    "counts": (16384, 256, 8, {}, 64),
    "losses": (16384, 256, 8, LOSSES, 64),
    "losses of 512 experts": (16384, 512, 10, LOSSES, 128),
    "losses of sequences": (16384, 256, 8, LOSSES | {"sequence_length": 4096, "score": "sigmoid"}, 64),
    "losses by groups": (16384, 256, 8, LOSSES | V3, 104),
    "losses of 64 experts": (16384, 64, 6, LOSSES, 56),
    "losses of 128 experts": (16384, 128, 8, LOSSES, 64),
    "losses of 2304 experts": (8192, 2304, 36, LOSSES, 255),
}


def listening(found):
    def prepare(kernel, grid, tensors, scalars, constexprs, *, device, numbers=(), plan=None, **options):
        launched = specialised(kernel, tensors, scalars, constexprs, options)
        aligned = [name for name in launched.divisible_by_16 if name.endswith("_ptr")]
        found.append(replace(launched, divisible_by_16=frozenset(aligned)))  # of sizes the kernels ask nothing
        return mock.MagicMock()

    return mock.patch.object(launches.launch, "prepare", prepare)


def forward_of(target, n_rows, n_experts, k, options, dtype):
    found: list = []
    options = Routing(k=k, **options)
    gpu = {"device_of": lambda _: GPUS[target], "has_ptx": lambda _: target != "gfx942"}
    with listening(found), mock.patch.multiple(launches, **gpu):
        given = launches.rows_of_call(torch.empty(n_rows, n_experts, dtype=dtype), options)
        launches.prepare_route(given, options, False)
    return found[0].compile(target)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.exhaustive), torch.bfloat16], ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_registers_of_routing(call, dtype):
    *sizes, most = CALLS[call]
    binary = forward_of("sm_90", *sizes, dtype)
    sums = Routing(k=1, **sizes[3]).sums
    newer = sums and not triton.__version__.startswith("3.6.")
    assert binary.stack_bytes <= (MOST_SPILLED if newer else 32 if sums and dtype == torch.float32 else 0)
    assert dtype == torch.float32 or binary.registers <= most + 32 * newer
    assert "redux.sync" in binary.ptx
    if not sums:
        assert binary.shared_bytes == 0  # a row is in the lanes of one warp from its first load to its last store


GRADIENTS = {
    "weights": (256, 8, {}, ("weights",), 40),
    "everything": (256, 8, LOSSES, ("weights", "aux_loss", "z_loss"), 56),
    "sigmoid": (256, 8, LOSSES | {"score": "sigmoid"}, ("weights", "dense", "aux_loss", "prob_sums"), 80),
    "wide": (2304, 36, LOSSES, ("weights", "aux_loss", "z_loss"), 255),
}


@pytest.mark.parametrize("call", GRADIENTS)
def test_registers_of_gradients(call):
    n_experts, k, options, asked, most = GRADIENTS[call]
    found: list = []
    options, n = Routing(k=k, **options), 16384
    x, empty = torch.empty(n, n_experts, dtype=torch.bfloat16), torch.empty
    shapes = {"weights": (n, k), "prob_sums": (n_experts,), "aux_loss": (), "z_loss": (), "dense": (n, n_experts)}
    of_results = launches.OfResults(**{name: empty(shape) if name in asked else None for name, shape in shapes.items()})
    of_rows = empty(n, k), empty(n, k, dtype=torch.int32), empty(n_experts, dtype=torch.int32)
    states = empty(n, 2 if options.score == "softmax" else 3)
    rows = launches.RoutedRows(*of_rows, None, None, None, None, states, None, empty(3))
    with listening(found), mock.patch.object(launches, "device_of", return_value=GPUS["sm_90"]):
        launches.prepare_gradient(launches.rows_of_call(x, options), rows, of_results, options)
    binary = found[0].compile("sm_90")
    assert binary.stack_bytes == 0
    assert binary.registers <= most
    assert call == "wide" or not re.search(r"ld\.shared|st\.shared", binary.ptx)


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("call", CALLS)
def test_routing_compiles_for_every_gpu(call, target):
    *sizes, _ = CALLS[call]
    forward_of(target, *sizes, torch.bfloat16)
