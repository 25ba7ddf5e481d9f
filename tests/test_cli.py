"""The commands as typed: exit codes, files, and what is said of what could not be measured."""

import json

import pytest
import torch
from click.testing import CliRunner

from fused_softmax.bench import measure, record, run
from fused_softmax.bench.operations import OPERATIONS
from fused_softmax.cli import main


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(measure, "on_gpu", lambda: False)
    monkeypatch.setattr(run, "verify", lambda operations: iter([record.Check("tile", 3, 5, "float32", "ok", 1e-7)]))


def fused_softmax(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="fused-softmax")


def bench(*arguments):
    return fused_softmax("bench", "--shape", "8x100", *arguments)


def provide(monkeypatch, operation, call, name="torch"):
    monkeypatch.setitem(OPERATIONS[operation].providers, name, lambda case: call)


def test_bench_measures_prints_and_records(tmp_path):
    out, image = tmp_path / "new" / "results.json", tmp_path / "plot.png"
    result = bench("--provider", "torch,naive", "--dtype", "fp32", "--dtype", "bf16", "--out", out, "--plot", image)
    assert result.exit_code == 0, result.output
    kept = record.load(out)
    assert [(p.provider, p.dtype, p.status) for p in kept.points] == [
        (name, dtype, "ok") for dtype in ("float32", "bfloat16") for name in ("torch", "naive")
    ]
    assert all(p.call and p.kernel is None for p in kept.points)
    assert kept.complete
    assert kept.command.endswith("--out results.json --plot plot.png")
    assert image.stat().st_size > 1000
    assert "not timed" in result.output
    assert "tile: ok" in result.output


def test_absent_and_untimed_providers_are_named_with_the_reason():
    result = bench("--provider", "torch,liger,quack,persistent")
    assert result.exit_code == 0
    for name in ("liger", "quack"):
        assert f"{name}: absent: ModuleNotFoundError" in result.output
    assert "persistent: untimed at 8 x 100 float32: a GPU kernel" in result.output


def test_a_wrong_provider_gets_no_speed_and_fails_the_run(monkeypatch, tmp_path):
    provide(monkeypatch, "softmax", lambda x: torch.softmax(x, -1) * 1.01)
    result = bench("--provider", "torch,naive", "--out", tmp_path / "r.json")
    assert result.exit_code == 1
    assert "torch: wrong at 8 x 100 float32: largest error" in result.output
    wrong, good = record.load(tmp_path / "r.json").points
    assert (wrong.status, wrong.call, wrong.kernel) == ("wrong", None, None)
    assert (good.status, good.call is None) == ("ok", False)


def test_a_provider_that_raises_is_recorded_with_its_message(monkeypatch):
    def refuse(x):
        raise RuntimeError("too many columns")

    provide(monkeypatch, "softmax", refuse)
    result = bench("--provider", "torch,naive")
    assert result.exit_code == 0
    assert "torch: refused at 8 x 100 float32: RuntimeError: too many columns" in result.output


def test_a_wrong_kernel_under_the_interpreter_fails_the_run(monkeypatch):
    bad = record.Check("split", 3, 5, "float32", "wrong", message="largest error 1")
    monkeypatch.setattr(run, "verify", lambda operations: iter([bad]))
    result = bench("--provider", "torch")
    assert result.exit_code == 1
    assert "split: wrong, largest error 1" in result.output


def test_verify_only_times_nothing(tmp_path):
    result = bench("--provider", "torch", "--verify-only", "--out", tmp_path / "r.json")
    assert result.exit_code == 0
    (point,) = record.load(tmp_path / "r.json").points
    assert (point.status, point.call) == ("untimed", None)
    assert point.error is not None


def test_an_interrupted_run_keeps_its_points_and_the_earlier_file(monkeypatch, tmp_path):
    out = tmp_path / "results.json"
    out.write_text("earlier")
    real, seen = measure.measure, []

    def interrupted(case, names, effort):
        if seen:
            raise KeyboardInterrupt
        seen.append(case)
        return real(case, names, effort)

    monkeypatch.setattr(measure, "measure", interrupted)
    image = tmp_path / "plot.png"
    result = bench("--shape", "4x50", "--provider", "torch", "--out", out, "--plot", image)
    assert result.exit_code == 130
    assert out.read_text() == "earlier"
    partial = record.load(tmp_path / "results.partial.json")
    assert [p.n_rows for p in partial.points] == [8]
    assert not partial.complete
    assert "interrupted" in result.output
    assert not image.exists()


@pytest.mark.parametrize("option", ["--out", "--plot"])
def test_an_unwritable_file_is_found_before_measuring(monkeypatch, tmp_path, option):
    monkeypatch.setattr(measure, "measure", lambda *_: pytest.fail("measured"))
    (tmp_path / "file").write_text("kept")
    (tmp_path / "directory.png").mkdir()
    for path in (tmp_path / "file" / "r.png", tmp_path / "directory.png"):
        result = bench(option, path)
        assert result.exit_code == 2
        assert "cannot write" in result.output
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--provider", "cudnn"], "unknown provider 'cudnn'"),
        (["--dtype", "int8"], "unknown dtype 'int8'"),
        (["--rows", "-4"], "'-4' is not a positive size"),
        (["--cols", "8:4"], "range '8:4' is empty"),
        (["--cols", "1:2:3:4"], "is not a range"),
        (["--shape", "4096"], "is not a shape"),
        (["--shape", "4x8:2"], "names no dim of 0 to 1"),
        (["--shape", "4x8:0"], "tutorial takes shapes of 2 dims, along the last one, not 4 x 8 dim 0"),
        (["--rows", "4", "--elements", "8"], "give one of them"),
        (["--plot", "figure.txt"], "must end in .png"),
        (["--reps", "0"], "0 is not in the range"),
    ],
)
def test_a_bad_value_is_one_line_and_exit_code_2(arguments, complaint):
    result = fused_softmax("bench", *arguments)
    assert result.exit_code == 2
    assert complaint in result.output
    assert "Traceback" not in result.output


def test_plan_prints_the_plan_its_traffic_and_its_floor():
    result = fused_softmax("plan", 4096, 32768, "--dtype", "float32")
    assert result.exit_code == 0, result.output
    for name in ("strategy", "traffic_bytes", "floor_us"):
        assert name in result.output
    facts = json.loads(fused_softmax("plan", "4096", "32768", "--json").output)
    assert facts["floor_bytes"] == 2 * 4096 * 32768 * 4


def test_plan_refuses_what_is_no_shape():
    for arguments in (["0", "4"], ["4", "x"], ["4", "4", "--dtype", "bool"]):
        assert fused_softmax("plan", *arguments).exit_code == 2


def test_env_names_versions_and_no_one():
    facts = json.loads(fused_softmax("env", "--json").output)
    assert {"fused_softmax", "torch", "triton", "python", "gpu"} <= facts.keys()
    assert "/" not in json.dumps({**facts, "gpu": None})
    assert "torch" in fused_softmax("env").output
