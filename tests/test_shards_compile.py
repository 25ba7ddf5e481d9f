"""The kernels of shards that a collective joins, compiled for GPUs that need not be present."""

from unittest import mock

import pytest
import torch
from launches import GPUS, launched
from products import pairwise

from fused_softmax.ops.losses import divergence_launches
from fused_softmax.ops.losses.divergence_launches import Pair, PairRows
from fused_softmax.ops.losses.log_prob_launches import Asked
from fused_softmax.ops.losses.options import Divergence, Loss
from fused_softmax.ops.losses.over_ranks import divergence, log_prob
from fused_softmax.ops.losses.over_ranks import launches as calls
from fused_softmax.ops.softmax import over_ranks as softmax_gradient_sharded
from fused_softmax.ops.softmax import over_ranks as softmax_over_ranks
from fused_softmax.ranks.groups import Shards

pytestmark = pytest.mark.compiles
ROWS, HELD = 8192, 64128
SHARDS = Shards(None, 1, (HELD, HELD), 2 * HELD, 7)
LOSSES = {
    "mean": Loss(), "none": Loss(reduction="none", softcap=30.0), "weights": Loss(torch.empty(HELD), scale=0.5),
    "all": Loss(torch.empty(HELD), label_smoothing=0.1, softcap=30.0, lse_square_scale=0.1, stats=True),
}  # fmt: skip


def of_row(*sizes, dtype=torch.float32):
    return torch.empty(*sizes, ROWS, dtype=dtype)


def prepares(given, beside):
    """What runs each kernel on such a shard; beside: whether there are headers, and more gradients than the loss's."""
    loss = given.loss
    smoothed, found = (torch.empty(()), of_row().unsqueeze(1)) if loss.smooth else (None, None)
    stats = (of_row(), of_row(dtype=torch.int64)) if loss.stats else (None, None)
    header, *headers = (torch.empty(4), torch.empty(2, 4), torch.empty(2, 2, 4)) if beside else (None,) * 3
    said = loss.weight, smoothed, of_row(), of_row(), found, *stats, header
    n = 3 + (loss.weight is not None) + 2 * loss.smooth + 2 * loss.stats
    totals = torch.empty(2, 16 if beside else 1) if loss.mean else None
    dy = of_row() if loss.reduction == "none" else torch.empty(())
    graded = loss.weight, smoothed, of_row(4), totals, dy, dy if beside else None, of_row() if beside else None
    return {
        "say": lambda: calls._prepare_say(given, said),
        "merge": lambda: calls.prepare_merge(given, torch.empty(2 * (n * ROWS + 4 * beside)), *headers, 2, lse=beside),
        "share": lambda: calls._prepare_share(given, graded),
        "put": lambda: calls._prepare_put(given, given.x, of_row(dtype=torch.int64), of_row()),
    }


@pairwise()
@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("kernel", ["say", "merge", "share", "put"])
def test_numbers_of_rows(kernel, name, beside, dtype, target):
    x = torch.empty(1, HELD, dtype=dtype).expand(ROWS, HELD)
    given = calls.OfShard(x, of_row(dtype=torch.int64), LOSSES[name], SHARDS)
    run = prepares(given, beside)[kernel]
    with mock.patch.object(torch.Tensor, "get_device", return_value=0):
        (launch,) = launched(GPUS[target], run)
    assert launch.compile(target).spilled_bytes == 0


@pairwise()
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("columns", [64128, 25129])
def test_a_gradient_of_softmax(columns, log, dtype, target):
    y = torch.empty(512, columns, dtype=dtype)
    on_gpu = mock.patch.object(torch.Tensor, "get_device", return_value=0)
    gpu = mock.patch.object(softmax_gradient_sharded, "device_of", return_value=GPUS[target])
    with on_gpu, gpu:
        launches = launched(GPUS[target], lambda: softmax_over_ranks._prepare(y, y, log, False, False, dtype))
    assert len(launches) == 2
    for launch in launches:
        found = launch.compile(target)
        assert found.spilled_bytes == 0
        assert max(found.load_widths) == 16


@pairwise()
@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("asked", [Asked(), Asked(True), Asked(*[True] * 5)], ids=str)
@pytest.mark.parametrize("truncated", [False, True])
def test_log_probabilities_of_whole_rows(truncated, asked, k, dtype, target):
    numbers = 2 + asked.entropy + asked.log_sum_sq_probs + asked.mean_logits * (1 + truncated) + k * (1 + asked.is_top1)
    heard, targets = torch.empty(4, numbers, ROWS, dtype=dtype), torch.empty(ROWS, k, dtype=torch.int64)
    key = 4, -100, 2 * HELD, truncated, *asked
    with mock.patch.object(torch.Tensor, "get_device", return_value=0):
        (launch,) = launched(GPUS[target], lambda: log_prob._prepare_merging(heard, targets, key, asked))
    assert launch.compile(target).spilled_bytes == 0


@pairwise()
@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["kl", "reverse_kl", "tvd", "cross"])
@pytest.mark.parametrize("given", ["logits", "probs"])
def test_divergences_of_whole_rows(kind, given, dtype, target):
    options = Divergence(kind=kind, target_is="probs" if kind == "cross" else given)
    heard = torch.empty(4, len(divergence._told(options)), ROWS, dtype=dtype)
    with mock.patch.object(torch.Tensor, "get_device", return_value=0):
        (launch,) = launched(GPUS[target], lambda: divergence._prepare_merging(heard, options))
    assert launch.compile(target).spilled_bytes == 0


@pairwise(("kind", "given"))
@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("kind", ["kl", "reverse_kl", "jsd", "cross"])
@pytest.mark.parametrize("given", ["logits", "probs"])
@pytest.mark.parametrize("columns", [16000, HELD])
def test_divergences_of_a_shard(columns, given, kind, target):
    options = Divergence(kind=kind, target_is="probs" if kind == "cross" else given, shard=True)
    x = torch.empty(ROWS, columns, dtype=torch.bfloat16)
    pair, row = Pair(x, x), torch.empty(ROWS)
    states = (row, row) if options.target_is == "logits" else (None, None)
    of_pairs = mock.patch.object(divergence_launches, "device_of", return_value=GPUS[target])
    with mock.patch.object(torch.Tensor, "get_device", return_value=0), of_pairs:
        launches = launched(GPUS[target], lambda: divergence_launches.prepare_forward(pair, options))
        if options.twice:
            rows = PairRows(row, row, *states, row, row)
            launches += launched(GPUS[target], lambda: divergence_launches._prepare_sums(pair, rows, options))
    assert len(launches) == 1 + (columns == HELD) + 2 * options.twice
    for launch in launches:
        assert launch.compile(target).spilled_bytes == 0
