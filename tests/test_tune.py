"""Tuned plans: the table of ladders, who reads it and when, and the ladders that measurements make."""

import json
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from test_imports import python

from fused_softmax import cli
from fused_softmax.bench.commands import commands
from fused_softmax.bench.measure import measure, tune
from fused_softmax.bench.measure.tune import Trial
from fused_softmax.core import device
from fused_softmax.core.plan import (
    H200,
    HELD_BYTES,
    UNBOUNDED,
    Ladder,
    built_in,
    candidate,
    parts_held,
    plan_rows,
    table_of,
    tuned,
)

ROWS = {"name": "row_warps", "inputs": 1, "itemsize": 2, "rungs": [[2048, 2], [16384, 16]], "note": "tuned: 2048 0.99"}
PARTS = {"name": "split_parts", "inputs": 1, "itemsize": 2, "rungs": [[65536, 4096, 8], [None, 8192, 4]]}
AHEAD = {"name": "prefetch_bytes", "inputs": 1, "itemsize": 2, "rungs": [[None, 2**20]]}


def on(*ladders):
    return replace(H200, table=table_of(list(ladders)))


def test_the_planner_follows_a_table_where_it_has_one_and_its_own_ladders_elsewhere():
    tuned_gpu = on(ROWS, PARTS, AHEAD)
    assert plan_rows(4096, 4096, 2, tuned_gpu).num_warps == 16
    assert plan_rows(4096, 4096, 2, H200).num_warps == 8
    long = plan_rows(4096, 32768, 2, tuned_gpu)
    assert (long.strategy, long.part_cols, long.num_warps) == ("split", 4096, 8)
    assert plan_rows(4096, 32768, 2, H200).strategy == "row"
    assert plan_rows(4096, 2**20, 2, tuned_gpu).part_cols == 8192
    assert long.prefetch == 2**20 // (4096 * 2)
    reasons = plan_rows(4096, 4096, 2, tuned_gpu).reasons
    assert reasons[1] == "16 warps for rows of at most 16384 columns (tuned: 2048 0.99)"
    for arguments in ((4096, 4096, 4), (4096, 131072, 4)):
        assert plan_rows(*arguments, tuned_gpu) == plan_rows(*arguments, H200)


def test_a_table_never_lets_more_programs_wait_than_the_chip_holds():
    for rungs in ([[None, 64, 1]], [[None, 16384, 4]], [[None, 64, 32]]):
        gpu = on(ROWS, PARTS | {"rungs": rungs})
        for n_cols in (32768, 2**20, 2**23):
            plan = plan_rows(4096, n_cols, 2, gpu)
            assert plan.strategy == "stream" or plan.parts <= parts_held(plan, gpu)


def test_a_table_goes_through_json():
    table = table_of([ROWS, PARTS, AHEAD])
    assert table_of(json.loads(json.dumps(table.data()))) == table
    assert table.get("split_parts", 1, 2) == Ladder((65536, 4096, 8), (UNBOUNDED, 8192, 4))
    for inputs in (1, 2):
        for itemsize in (2, 4, 8):
            own = built_in(inputs, itemsize)
            assert table_of(own.data()) == own
            assert plan_rows(4096, 4096, itemsize, replace(H200, table=own), inputs=inputs) == plan_rows(
                4096, 4096, itemsize, H200, inputs=inputs
            )


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ({}, "a table is a list"),
        ([3], "a ladder's name is one of"),
        ([{"name": "tiles"}], "a ladder's name is one of"),
        ([ROWS | {"itemsize": 3}], "row_warps is for"),
        ([ROWS | {"inputs": [1]}], "row_warps is for"),
        ([PARTS | {"itemsize": 8}], "split_parts is for"),
        ([ROWS, ROWS], "each once"),
        ([ROWS | {"rungs": []}], "a list of rungs of columns, warps"),
        ([ROWS | {"rungs": [[1024]]}], "a list of rungs of columns, warps"),
        ([ROWS | {"rungs": [[1024, 2.5]]}], "whole numbers"),
        ([ROWS | {"rungs": [[1024, True]]}], "whole numbers"),
        ([ROWS | {"rungs": [[1024, -2]]}], "whole numbers"),
        ([ROWS | {"rungs": [[2048, 2], [1024, 4]]}], "rising sizes"),
        ([ROWS | {"rungs": [[None, 2]]}], "the last rung of row_warps is bounded"),
        ([PARTS | {"rungs": [[65536, 4096, 8]]}], "the last rung of split_parts is for all sizes"),
        ([ROWS | {"rungs": [[1024, 3]]}], "1, 2, 4, 8, 16 or 32 warps; got 3"),
        ([ROWS | {"rungs": [[65536, 2]]}], "2 warps do not hold 65536 columns of 1 x 2 bytes"),
        ([PARTS | {"rungs": [[None, 100, 4]]}], "multiples of 64"),
        ([PARTS | {"rungs": [[None, 0, 4]]}], "do not hold 0 columns"),
    ],
)
def test_a_table_that_no_planner_could_follow_is_refused(data, complaint):
    with pytest.raises(ValueError, match=complaint.replace("(", r"\(")):
        table_of(data)


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "plans.json"
    monkeypatch.setenv(tuned.VARIABLE, str(path))
    return path


def written(path, *ladders, gpu="NVIDIA H200"):
    tuned.save(path, gpu, table_of(list(ladders)), {"torch": "2.11"})


def test_all_users_of_a_machine_can_read_a_table(file):
    written(file, ROWS)
    plain = file.parent / "plain"
    plain.write_text("")
    assert file.stat().st_mode == plain.stat().st_mode


def test_where_the_table_is(monkeypatch, tmp_path):
    monkeypatch.setenv(tuned.VARIABLE, "/some/plans.json")
    assert str(tuned.path()) == "/some/plans.json"
    monkeypatch.delenv(tuned.VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert tuned.path() == tmp_path / "fused-softmax/plans.json"
    monkeypatch.setenv("XDG_CONFIG_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuned.path() == tmp_path / ".config/fused-softmax/plans.json"


def test_a_gpu_finds_its_own_table_and_no_other(file):
    assert tuned.table_for("NVIDIA H200") is None
    written(file, ROWS)
    written(file, PARTS, gpu="NVIDIA H100")
    assert tuned.table_for("NVIDIA H200") == table_of([ROWS])
    assert tuned.table_for("NVIDIA H100") == table_of([PARTS])
    assert tuned.table_for("NVIDIA B200") is None
    written(file, AHEAD)
    assert tuned.load(file) == {"NVIDIA H200": table_of([AHEAD]), "NVIDIA H100": table_of([PARTS])}
    assert [path.name for path in file.parent.iterdir()] == ["plans.json"]


BAD = [
    "",
    "{",
    "[]",
    '{"schema": 2, "gpus": {}}',
    '{"schema": 1}',
    '{"schema": 1, "gpus": {"NVIDIA H200": 3}}',
    "\udcff",
]


@pytest.mark.parametrize("text", BAD)
def test_a_bad_table_is_warned_about_passed_over_and_not_written_over(file, text):
    content = text.encode(errors="surrogateescape")
    file.write_bytes(content)
    with pytest.warns(RuntimeWarning, match="the built-in ladders are: plans.json"):
        assert tuned.table_for("NVIDIA H200") is None
    with pytest.raises(ValueError, match=r"plans.json"):
        written(file, ROWS)
    assert file.read_bytes() == content


def test_a_device_reads_the_table_once_when_it_is_first_asked_for(file, monkeypatch):
    facts = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, regs_per_multiprocessor=65536,
        shared_memory_per_multiprocessor=233472, L2_cache_size=62914560,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
    device.device_of.cache_clear()
    try:
        file.write_text("{")
        with pytest.warns(RuntimeWarning) as seen:
            assert device.device_of(0).table is None
        assert len(seen) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert device.device_of(0).table is None
        device.device_of.cache_clear()
        file.unlink()
        written(file, ROWS)
        assert plan_rows(4096, 4096, 2, device.device_of(0)).num_warps == 16
        assert device.device_of(-1).table is None
    finally:
        device.device_of.cache_clear()


def test_an_import_reads_no_table(tmp_path):
    (tmp_path / "plans.json").write_text("{")
    python(f"""
import os, sys, warnings
os.environ["{tuned.VARIABLE}"] = {str(tmp_path / "plans.json")!r}
warnings.simplefilter("error")
opened = []
sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)
import fused_softmax, fused_softmax.cli
assert not [path for path in opened if "plans.json" in path]
""")


def model(case, plans, gpu):
    """Trials of a GPU that likes 4 columns of 16 bytes a thread in rows to 16384, then parts of 4096 by 8 warps."""
    own = plan_rows(case.n_rows, case.n_cols, case.itemsize, replace(gpu, table=None))

    def us(plan):
        if plan.strategy == "row":
            held = plan.n_cols * plan.itemsize / (32 * plan.num_warps)
            time = 100 + abs(held - 64) / 8 + (50 if plan.n_cols > 16384 else 0)
        else:
            time = 110 + 4 * abs(plan.part_cols - 4096) / 4096 + 2 * (plan.num_warps == 4)
        return time + abs((plan.prefetch * tune._program_bytes(plan) >> 20) - 8) / 100

    return [Trial(plan, us(plan), 100 / us(plan), plan == own) for plan in dict.fromkeys([*plans, own])]


def test_the_ladders_are_those_of_the_fastest_and_the_planner_takes_them():
    said = []
    widths = (1024, 2048, 4096, 16384, 32768, 65536, 262144)
    table = tune.tune(H200, ["softmax"], ["bfloat16"], widths, 2**27, said.append, model)
    assert table.get("row_warps", 1, 2) == Ladder((1024, 1), (2048, 2), (4096, 4), (16384, 16))
    assert table.get("split_parts", 1, 2) == Ladder((262144, 4096, 8), (UNBOUNDED, 16384, 4))
    assert table.get("prefetch_bytes", 1, 2) == Ladder((UNBOUNDED, 8 << 20))
    assert len(said) == len(widths)
    assert "tuned: 1024 1.00" in table.get("row_warps", 1, 2).note
    gpu = replace(H200, table=table)
    for n_cols in widths:
        n_rows = 2**27 // n_cols
        case, plan = tune.Case((n_rows, n_cols), "bfloat16"), plan_rows(n_rows, n_cols, 2, gpu)
        fastest = tune.best(model(case, tune.candidates(n_rows, n_cols, 2, 1, H200), H200)).plan
        assert (plan.strategy, plan.num_warps, plan.part_cols) == (
            fastest.strategy, fastest.num_warps, fastest.part_cols
        )  # fmt: skip
    text = tune.source(table)
    assert "(1, 2): Ladder((1024, 1), (2048, 2), (4096, 4), (16384, 16), note='tuned:" in text
    assert "Ladder((262144, 4096, 8), (2**62, 16384, 4), note='tuned:" in text


def test_what_is_faster_by_less_than_noise_changes_nothing():
    plans = [candidate("row", 4096, 4096, 2, H200, num_warps=warps) for warps in (4, 8)]
    own, other = Trial(plans[1], 100.5, 0.99, own=True), Trial(plans[0], 100, 1.0)
    assert tune.best([own, other]) is own
    assert tune.best([replace(own, us=103), other]).plan is other.plan


def test_candidates_fit_registers_and_the_chip():
    for itemsize, inputs in ((2, 1), (4, 1), (2, 2), (4, 2)):
        for n_cols in tune.WIDTHS:
            plans = tune.candidates(2**27 // n_cols, n_cols, itemsize, inputs, H200)
            assert plans
            for plan in plans:
                held = (n_cols if plan.strategy == "row" else plan.part_cols) * itemsize * inputs
                assert held <= 32 * plan.num_warps * HELD_BYTES
                assert plan.strategy == "row" or plan.parts <= parts_held(plan, H200)
    assert tune.WIDTHS[:3] == (1024, 1536, 2048)
    assert tune.WIDTHS[-1] == 2**19


def test_without_a_gpu_the_built_in_ladders_are_shown_and_nothing_is_written(monkeypatch, file):
    monkeypatch.setattr(commands, "find_device", lambda: (H200, False))
    result = CliRunner().invoke(cli.main, ["bench", "tune", "--dtype", "bf16"])
    assert result.exit_code == 1
    assert "(1, 2): Ladder((1024, 1), (2048, 2), (3072, 4), (32768, 8), note=" in result.output
    assert "no GPU" in result.output
    assert not file.exists()


def test_the_command_writes_the_table_beside_others(monkeypatch, file):
    monkeypatch.setattr(commands, "find_device", lambda: (H200, True))
    monkeypatch.setattr(tune, "tune", lambda *arguments: table_of([ROWS]))
    written(file, PARTS, gpu="NVIDIA H100")
    command = ["bench", "tune", "--dtype", "bf16"]
    assert CliRunner().invoke(cli.main, [*command, "--print-only"]).exit_code == 0
    assert set(tuned.load(file)) == {"NVIDIA H100"}
    result = CliRunner().invoke(cli.main, command)
    assert result.exit_code == 0, result.output
    assert set(tuned.load(file)) == {"NVIDIA H100", "NVIDIA H200"}
    result = CliRunner().invoke(cli.main, command)
    assert result.exit_code == 2
    assert "plans.json has plans for NVIDIA H200; --force replaces them" in result.output
    assert CliRunner().invoke(cli.main, [*command, "--force"]).exit_code == 0
    file.write_text("{")
    result = CliRunner().invoke(cli.main, [*command, "--force"])
    assert result.exit_code == 2
    assert "plans.json is no JSON" in result.output
    assert file.read_text() == "{"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [(["--op", "logsumexp"], "logsumexp is not tuned"), (["--cols", "0"], "not a positive size")],
)
def test_a_bad_value_is_one_line_and_exit_code_2(arguments, complaint):
    result = CliRunner().invoke(cli.main, ["bench", "tune", *arguments])
    assert result.exit_code == 2
    assert complaint in result.output


@pytest.mark.gpu
@pytest.mark.skipif(not measure.on_gpu(), reason="needs a CUDA GPU")
def test_plans_are_timed_on_a_gpu():
    gpu = device.device_of(0)
    table = tune.tune(gpu, ["softmax", "softmax_backward"], ["bfloat16"], [2048, 65536], 2**24, print)
    assert {name for (name, _, _), _ in table.ladders} == {"row_warps", "split_parts", "prefetch_bytes"}
