"""The kernels that write into other GPUs' memory, compiled for GPUs that need not be present: hardly a spill.

A few bytes may spill about the loop that waits long, which has no time to lose.
"""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from launches import GPUS, launched

from fused_softmax.core.launch import MOST_SPILLED
from fused_softmax.ops.losses.divergence_launches import Pair
from fused_softmax.ops.losses.options import Divergence, Loss
from fused_softmax.ops.losses.output import Wanted
from fused_softmax.ops.losses.over_ranks import divergence_peers as pair_peers
from fused_softmax.ops.losses.over_ranks import peers as loss_peers
from fused_softmax.ops.losses.over_ranks.divergence import OfCall
from fused_softmax.ops.losses.steps import Kind
from fused_softmax.ops.softmax import by_peers as softmax_peers
from fused_softmax.ranks import gather as gather_peers
from fused_softmax.ranks import launches as peer_launches

pytestmark = pytest.mark.compiles
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
NVIDIA = ["sm_80", "sm_90", "sm_100"]
SLOTS = torch.zeros(2, dtype=torch.int64)
REGION = SimpleNamespace(slots=SLOTS, bases=SLOTS, asked=SLOTS, set_size=2**20)
PEERS = SimpleNamespace(rank=1, ranks=2, device=torch.device("cuda", 0), region=lambda group, slots, rows: REGION)


def binary_of(target, run):
    on_gpu = mock.patch.object(torch.Tensor, "get_device", return_value=0)
    of_rows = mock.patch.object(peer_launches, "device_of", return_value=GPUS[target])
    with on_gpu, of_rows:
        (launch,) = launched(GPUS[target], run)
    spec = launch.spec
    assert (spec.peers, spec.ptx, spec.publish, spec.collect) == (True,) * 4
    return launch.compile(target)


def facts(columns):
    return peer_launches.Facts(1, (columns, columns), 2 * columns, None)


@pytest.mark.parametrize("target", NVIDIA)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("columns", [131072, 64128, 25129, 40])
def test_softmax(target, dtype, log, columns):
    x = torch.empty(512, columns, dtype=dtype)
    run = lambda: softmax_peers._prepare_launch(log, x, dtype, facts(columns), PEERS, None, "")  # noqa: E731
    found = binary_of(target, run)
    assert found.spilled_bytes <= MOST_SPILLED
    if columns > 40:
        assert max(found.load_widths) == max(found.store_widths) == 16


@pytest.mark.parametrize("target", NVIDIA)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("kind", [{}, {"softcap": 30.0}], ids=str)
@pytest.mark.parametrize("columns", [131072, 64128, 25129, 40])
@pytest.mark.parametrize("way", ["whole", "of many rows", "states"])
def test_losses(target, dtype, kind, columns, way):
    n_rows = 8192 if way == "of many rows" else 64
    x, dx = (torch.empty(n_rows, columns, dtype=dtype) for _ in range(2))
    loss, of_row = Loss(**kind), torch.empty(n_rows)
    kind = Kind(loss, Wanted(), dtype, False, way != "states")
    of_ranks = loss_peers.OfRanks(kind, facts(columns), columns, torch.empty_strided, "")
    given = {
        "whole": {"totals": None, "loss": of_row, "result": of_row[0], "finishes": True, "counted": 256},
        "of many rows": {"totals": torch.ones(2, 16), "loss": of_row},
        "states": {"totals": None, "loss": None},
    }[way]

    def run():
        target, written = torch.zeros(n_rows, dtype=torch.int64), None if way == "states" else dx
        loss_peers._prepare_launch(of_ranks, x, written, target, PEERS, None, **given)

    ticket = mock.patch.object(loss_peers, "ticket_of", return_value=SLOTS)
    with ticket:
        found = binary_of(target, run)
    assert found.spilled_bytes <= MOST_SPILLED
    if columns > 40:
        assert max(found.load_widths) >= (8 if kind and dtype == BF16 else 16)


@pytest.mark.parametrize("target", NVIDIA)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("kind", ["kl", "jsd", "reverse_kl", "tvd"])
@pytest.mark.parametrize("given", [{}, {"target_is": "probs"}, {"softcap": 30.0}], ids=str)
@pytest.mark.parametrize("columns", [64128, 200000, 40])
def test_sums_of_divergences(target, dtype, kind, given, columns):
    pair, options = Pair(*(torch.empty(512, columns, dtype=dtype) for _ in range(2))), Divergence(kind=kind, **given)
    of_call = OfCall(options, SimpleNamespace(group=None))
    how = pair_peers.How(of_call, "sum", FP32, True, PEERS)
    run = lambda: pair_peers._prepare(pair, None, how, facts(columns))  # noqa: E731
    found = binary_of(target, run)
    assert found.spilled_bytes <= MOST_SPILLED
    if columns > 40:
        assert max(found.load_widths) == max(found.store_widths) == 16
    if (target, dtype, kind, given) == ("sm_90", BF16, "kl", {}):
        assert found.registers <= 64  # eight programs a multiprocessor


@pytest.mark.parametrize("target", NVIDIA)
@pytest.mark.parametrize("dtype", [FP32, torch.float64], ids=str)
def test_gathers(target, dtype):
    message = torch.empty(8, 8192, dtype=dtype)
    words, asked = message.view(-1).view(torch.int32), (message.shape, dtype)
    with mock.patch.object(gather_peers, "has_ptx", return_value=True):
        found = binary_of(target, lambda: gather_peers._prepare(words, message, asked, PEERS, None))
    assert found.spilled_bytes <= MOST_SPILLED
