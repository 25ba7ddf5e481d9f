"""`bench shards`: what ranks agree on, what is compared with float64, and what rank 0 writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from fused_softmax.bench.cases import Case, parse_shapes
from fused_softmax.bench.catalog import PEERS_OF_SHARDS
from fused_softmax.bench.commands import shards as shards_command
from fused_softmax.bench.entries.operations import OPERATIONS
from fused_softmax.bench.measure.measure import Effort
from fused_softmax.bench.results import record
from fused_softmax.cli import main

SRC = Path(__file__).parents[1] / "src"
SHAPES = {"cross_entropy_gradient": (6, 24), "linear_cross_entropy": (6, 4, 24), "softmax": (6, 24)}


def test_every_operation_is_one_of_the_bench_and_has_the_providers_that_help_names():
    from fused_softmax.bench.entries.shards import PROVIDERS

    assert PEERS_OF_SHARDS.keys() == PROVIDERS.keys() == {case for case, *_ in shards_command.CASES}
    for operation, names in PEERS_OF_SHARDS.items():
        assert operation in OPERATIONS
        assert list(names) == list(PROVIDERS[operation])


def measured(group, case, names, time=False, break_on=None, how=""):
    """The points of a case; on rank `break_on` the provider "torch DTensor" fails as `how` says."""
    from fused_softmax.bench.entries import shards as providers_of_shards
    from fused_softmax.bench.measure import shards

    rank = dist.get_rank(group)
    providers = providers_of_shards.PROVIDERS[case.operation]
    held = providers.get("torch DTensor")

    def broken(place):
        call = held(place)
        if how == "absent":
            raise ImportError("no such package")

        def spoilt(*inputs):
            y = call(*inputs)  # in which ranks wait for each other
            if how == "written":
                inputs[0][0, 0] += 1
            if how == "refused":
                raise RuntimeError("too many columns")
            return y * (1.01 if how == "wrong" else 1)

        return spoilt

    if rank == break_on:
        providers["torch DTensor"] = broken
    try:
        at = shards.Ranks(group, group, rank, dist.get_world_size(group), torch.device("cpu"))
        return shards.measure(case, names, Effort(1, 0.1, time=time), at)
    finally:
        if rank == break_on:
            providers["torch DTensor"] = held


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("operation", PEERS_OF_SHARDS)
def test_each_provider_that_is_here_matches_float64_on_every_rank(ranks, operation, n):
    names = [name for name in PEERS_OF_SHARDS[operation] if name not in ("liger", "megatron", "flash-attn")]
    names = [name for name in names if not name.endswith(" peer")]
    first, *others = ranks.values(n, measured, Case(SHAPES[operation], "float32", operation), names)
    assert [point.provider for point in first] == names
    for point in first:
        assert (point.status, point.message) == ("untimed", "")
        assert point.error <= point.error_allowed
        assert point.parameters["ranks"] == n
        assert point.case.shape == SHAPES[operation]
    assert all(points == first for points in others)


def test_a_time_is_the_same_on_every_rank_and_counts_the_bytes_of_a_shard(ranks):
    case = Case((6, 24), "float32", "cross_entropy_gradient")
    first, second = ranks.values(2, measured, case, ["fused_softmax collective", "one GPU"], True)
    assert first == second
    for point in first:
        assert point.status == "ok"
        assert point.call.gb_per_s == pytest.approx((2 * 6 * 12 * 4 + 8 * 6) / point.call.p50_us * 1e-3)


@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("absent", "absent", "rank 1: ImportError: no such package"),
        ("refused", "refused", "rank 1: RuntimeError: too many columns"),
        ("wrong", "wrong", "rank 1: largest error "),
        ("written", "wrong", "rank 1: wrote into its input"),
    ],
)
def test_what_fails_on_one_rank_is_left_out_on_all(ranks, how, status, said):
    case = Case((6, 24), "float32", "softmax")
    found = ranks.values(2, measured, case, ["torch DTensor", "fused_softmax collective"], True, 1, how)
    assert found[0] == found[1]
    for spoilt, good in found:
        assert (spoilt.status, spoilt.call) == (status, None)
        assert spoilt.message.startswith(said)
        assert good.status == "ok"


def test_columns_that_ranks_cannot_share_are_skipped(ranks):
    for (point,) in ranks.values(2, measured, Case((6, 25), "float32", "softmax"), ["one GPU"]):
        assert (point.status, point.message) == ("skipped", "25 columns cannot be shared equally by 2 ranks")


def test_shapes_go_to_the_operations_that_take_them():
    both = shards_command.chosen((), parse_shapes("8x24,8x4x24"), (), quick=False)
    assert {(case.operation, case.shape) for case in both} == {
        ("cross_entropy_gradient", (8, 24)), ("softmax", (8, 24)), ("linear_cross_entropy", (8, 4, 24)),
    }  # fmt: skip
    assert {case.dtype for case in shards_command.chosen((), (), ["float16"], quick=False)} == {"float16"}
    assert len(shards_command.chosen((), (), (), quick=True)) == 2
    for operations, shapes, said in (
        (["softmax"], "8x4x24", "softmax takes shapes of rows x columns; not 8 x 4 x 24"),
        ([], "8x24,8x4x24x2", "a shape is rows x columns, or of linear_cross_entropy .*; not 8 x 4 x 24 x 2"),
        (["softmax"], "8x24,24x8:0", "softmax takes shapes of rows x columns; not 24 x 8 dim 0"),
    ):
        with pytest.raises(click.UsageError, match=f"^{said}$"):
            shards_command.chosen(operations, parse_shapes(shapes), (), quick=False)


def test_the_command_says_what_it_takes_and_how_it_is_run(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    alone = CliRunner().invoke(main, ["bench", "shards", "--shape", "8x24"])
    assert (alone.exit_code, "run `torchrun --nproc-per-node 2" in alone.output) == (2, True)
    listed = CliRunner().invoke(main, ["bench", "shards", "--list"]).output
    assert "cross_entropy_gradient  fused_softmax collective, fused_softmax peer, one GPU, loss_parallel" in listed
    unknown = CliRunner().invoke(main, ["bench", "shards", "--provider", "quack"])
    assert (unknown.exit_code, "unknown provider 'quack'" in unknown.output) == (2, True)
    assert "  shards " in CliRunner().invoke(main, ["bench", "--help"]).output


@pytest.mark.exhaustive
def test_torchrun_starts_the_ranks_and_one_of_them_writes(tmp_path):
    out = tmp_path / "shards.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    asked = ["--shape", "4x24", "--op", "cross-entropy-gradient", "--dtype", "fp32", "--reps", "1", "--out", out]
    environment = {name: value for name, value in os.environ.items() if name != "FUSED_SOFTMAX_INTERPRET"}
    done = subprocess.run(
        [*torchrun, "-m", "fused_softmax", "bench", "shards", *asked], capture_output=True, text=True, timeout=240,
        env=environment | {"PYTHONPATH": str(SRC), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 ranks by gloo; no GPU") == 1
    assert "timed by torch's operations" in done.stdout
    kept = record.read(out)
    assert kept.complete
    assert kept.options["ranks"] == 2
    assert kept.command.endswith("--reps 1 --out shards.json")
    assert str(tmp_path) not in json.dumps(json.loads(out.read_text()))
    statuses = {point.provider: point.status for point in kept.points}
    assert list(statuses) == list(PEERS_OF_SHARDS["cross_entropy_gradient"])
    assert {statuses[name] for name in ("fused_softmax collective", "one GPU", "loss_parallel")} == {"ok"}
