"""The commands as typed: exit codes, files, and what is said of what could not be measured."""

import json

import pytest
import torch
from click.testing import CliRunner

from fused_softmax.bench import measure, record, run, sweeps
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


@pytest.mark.parametrize("name", sweeps.SWEEPS)
def test_every_sweep_runs_without_a_gpu_and_says_what_it_did_not_time(monkeypatch, tmp_path, name):
    monkeypatch.setattr(run, "CPU_ELEMENTS", 2**14)
    out = tmp_path / "results.json"
    result = fused_softmax("bench", name, "--quick", "--verify-only", "--provider", "fused_softmax,torch", "--out", out)
    assert result.exit_code == 0, result.output
    kept = record.load(out)
    assert {point.operation for point in kept.points} == set(sweeps.SWEEPS[name].dtypes)
    assert kept.command.startswith(f"fused-softmax bench {name} --quick")
    for point in kept.points:
        assert point.status == "untimed"
        if point.provider == "torch":
            assert point.error <= point.error_allowed
        elif OPERATIONS[point.operation].own_needs_gpu:
            assert point.message == "a GPU kernel, and there is no GPU"
            assert f"fused_softmax: untimed at {kept.points[0].case} and" in result.output


def test_a_sweep_times_and_draws_what_has_a_cpu_path(tmp_path):
    out, image = tmp_path / "results.json", tmp_path / "plot.png"
    shapes = ("--shape", "4x64x8:1,8x100", "--provider", "torch")
    result = fused_softmax("bench", "logsumexp", *shapes, "--out", out, "--plot", image)
    assert result.exit_code == 0, result.output
    kept = record.load(out).points
    assert len(kept) == 4
    assert all(point.status == "ok" and point.call for point in kept)
    assert kept[0].case.shape == (4, 64, 8)
    assert (kept[0].n_rows, kept[0].n_cols, kept[0].parameters) == (32, 64, {"shape": [4, 64, 8], "dim": 1})
    assert image.stat().st_size > 1000


def test_a_wrong_provider_of_a_sweep_gets_no_speed_and_fails_the_run(monkeypatch, tmp_path):
    provide(monkeypatch, "softmax_backward", lambda dy, y: y * dy)
    result = fused_softmax("bench", "backward", "--shape", "8x100", "--provider", "torch", "--out", tmp_path / "r.json")
    assert result.exit_code == 1
    assert "torch: wrong at softmax_backward 8 x 100 float32" in result.output
    for point in record.load(tmp_path / "r.json").points:
        wrong = point.operation == "softmax_backward"
        assert (point.status, point.call is None) == (("wrong", True) if wrong else ("ok", False))


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
        (["masked", "--shape", "64x64"], "masked takes shapes of 4 dims"),
        (["nothing"], "unknown sweep 'nothing'; known: tutorial, backward, dims, masked, logsumexp, vocab"),
        (["dims", "--provider", "liger"], "dims has no provider 'liger'; it has fused_softmax, torch, torch.compile"),
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
