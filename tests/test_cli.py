"""The commands as typed: exit codes, files, and what is said of what could not be measured."""

import json
import re
import sys
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from products import one_in

from fused_softmax.bench.cases import Case
from fused_softmax.bench.entries.operations import OPERATIONS
from fused_softmax.bench.measure import measure, one, run, sweeps, verify
from fused_softmax.bench.results import record
from fused_softmax.bench.show import report
from fused_softmax.cli import bench as bench_commands
from fused_softmax.cli import main


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(measure, "on_gpu", lambda: False)
    monkeypatch.setattr(run, "verify", lambda *_: iter([record.Check("tile", 3, 5, "float32", "ok", 1e-7)]))


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
    assert "On a CPU torch computes" in result.output


def test_absent_and_untimed_providers_are_named_with_the_reason():
    result = bench("--provider", "torch,liger,quack,persistent")
    assert result.exit_code == 0
    for name in ("liger", "quack"):
        assert f"{name}: absent: ModuleNotFoundError" in result.output
    assert "persistent: untimed at 8 x 100 float32: a GPU kernel" in result.output


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--provider", "liger"), "liger: absent: ModuleNotFoundError"),
        (("--provider", "liger,quack"), "liger: absent: ModuleNotFoundError"),
        (("--provider", "persistent"), "persistent: untimed at 8 x 100 float32: a GPU kernel"),
        (("--provider", "torch"), "torch: skipped at 8 x 100 float32: too large"),
    ],
)
def test_a_run_that_measures_nothing_fails_and_says_why(monkeypatch, arguments, why):
    if "torch" in arguments:
        monkeypatch.setattr(measure, "too_large", lambda *_: "too large")
    result = bench(*arguments)
    assert result.exit_code == 1
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert line.startswith(f"Error: nothing was measured: {why}")


def test_a_comparison_alone_is_no_failure_and_is_not_called_timed():
    result = bench("--provider", "torch", "--verify-only")
    assert result.exit_code == 0, result.output
    assert "torch's results are also fused_softmax's" in result.stdout
    assert "nothing was measured" not in result.stderr


def test_kernels_that_cannot_be_interpreted_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    result = bench("--provider", "fused", "--verify-only")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "pip install 'fused-softmax[viz]'" in result.stderr
    assert bench("--provider", "torch", "--verify-only").exit_code == 0  # which has no kernels


def test_steps_of_training_name_the_extra_that_they_need(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = fused_softmax("bench", "step", "--quick")
    assert result.exit_code == 1
    assert result.output == "Error: transformers is missing: pip install 'fused-softmax[hf]'\n"


def test_a_wrong_provider_gets_no_speed_and_fails_the_run(monkeypatch, tmp_path):
    provide(monkeypatch, "softmax", lambda x: torch.softmax(x, -1) * 1.01)
    result = bench("--provider", "torch,naive", "--out", tmp_path / "r.json")
    assert result.exit_code == 1
    assert "torch: wrong at 8 x 100 float32: largest error" in result.output
    wrong, good = record.load(tmp_path / "r.json").points
    assert (wrong.status, wrong.call, wrong.kernel) == ("wrong", None, None)
    assert (good.status, good.call is None) == ("ok", False)


@pytest.mark.guard
# A row of few-rows has 64 Mi columns.
@pytest.mark.parametrize(
    "name",
    [
        *one_in(2, [name for name in sweeps.SWEEPS if name not in (sweeps.CUSTOM, "few-rows")]),
        pytest.param("few-rows", marks=pytest.mark.exhaustive),
    ],
)
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
            first = next(other for other in kept.points if other.message == point.message)
            assert f"fused_softmax: untimed at {first.case} and" in result.output


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
    monkeypatch.setattr(run, "verify", lambda *_: iter([bad]))
    result = bench("--verify-only")
    assert result.exit_code == 1
    assert "split: wrong, largest error 1" in result.output


def test_kernels_are_interpreted_for_who_asks_to_verify_them(monkeypatch):
    asked = []

    def verified(operations, names):
        asked.append((operations, list(names)))
        return iter([record.Check("tile", 3, 5, "float32", "ok", 1e-7)])

    monkeypatch.setattr(run, "verify", verified)
    result = bench("--provider", "fused,torch")
    assert (result.exit_code, asked) == (0, [])
    assert "fused_softmax is timed by them" in result.output
    assert "--verify-only compares them" in result.output
    result = bench("--provider", "fused,torch", "--verify-only")
    assert asked == [(["softmax"], ["fused_softmax", "torch"])]
    assert "tile: ok" in result.output


def test_without_a_gpu_torch_alone_is_timed_for_who_names_nobody(tmp_path):
    result = bench("--out", tmp_path / "r.json")
    assert result.exit_code == 0
    assert [(point.provider, point.status) for point in record.load(tmp_path / "r.json").points] == [("torch", "ok")]
    assert "torch's times are also fused_softmax's" in result.output
    for word in ("untimed", "absent", "refused"):
        assert word not in result.output


def test_a_plot_says_whose_figures_stand_below_its_own(tmp_path):
    other, image = saved(tmp_path / "other.json", 2000), tmp_path / "plot.svg"
    result = bench("--plot", image, "--beside", other)
    assert result.exit_code == 0, result.output
    assert "plot.svg has this run at the top, and figures of NVIDIA H200 below." in result.output
    assert "torch on a CPU" in image.read_text()
    assert "NVIDIA H200" in image.read_text()


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
    result = bench("--shape", "4x50", "--provider", "torch", "--out", out, "--plot", image, "--force")
    assert result.exit_code == 130
    assert out.read_text() == "earlier"
    partial = record.load(tmp_path / "results.partial.json")
    assert [p.n_rows for p in partial.points] == [8]
    assert not partial.complete
    assert result.stderr.endswith("interrupted\n")
    assert "--resume continues from here" in result.stdout
    assert not image.exists()


def stop_after(monkeypatch, count):
    """Ctrl-C at the case after `count` measured ones; the list of what was measured."""
    real, seen = measure.measure, []

    def measured(case, names, effort):
        if len(seen) == count:
            raise KeyboardInterrupt
        seen.append((case.size, list(names)))
        return real(case, names, effort)

    monkeypatch.setattr(measure, "measure", measured)
    return seen


def test_a_stopped_run_is_gone_on_with_where_it_stopped(monkeypatch, tmp_path):
    out = tmp_path / "results.json"
    arguments = ("bench", "custom", "--shape", "8x100,4x50,2x30", "--provider", "torch,naive", "--out", out)
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        assert fused_softmax(*arguments).exit_code == 130
    assert not out.exists()
    first = record.load(tmp_path / "results.partial.json").points
    seen = stop_after(monkeypatch, 10)
    result = fused_softmax(*arguments, "--resume")
    assert result.exit_code == 0, result.output
    assert "4 points are kept from the earlier run" in result.output
    assert seen == [("2 x 30", ["torch", "naive"])]
    kept = record.load(out)
    assert kept.points[:4] == first
    assert [p.n_rows for p in kept.points] == [8, 8, 4, 4, 2, 2]
    assert kept.complete
    assert "--resume" not in kept.command
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_a_finished_run_is_added_to_by_provider_and_by_shape(monkeypatch, tmp_path):
    out = tmp_path / "results.json"
    assert bench("--provider", "torch", "--out", out).exit_code == 0
    seen = stop_after(monkeypatch, 10)
    result = bench("--shape", "4x50", "--provider", "torch,naive", "--out", out, "--resume")
    assert result.exit_code == 0, result.output
    assert seen == [("8 x 100", ["naive"]), ("4 x 50", ["torch", "naive"])]
    kept = record.load(out)
    assert len(kept.points) == 4
    assert kept.command.count("fused-softmax bench") == 2


def test_a_run_of_another_kind_is_not_gone_on_with(monkeypatch, tmp_path):
    out = tmp_path / "results.json"
    assert bench("--provider", "torch", "--out", out).exit_code == 0
    before = out.read_bytes()
    monkeypatch.setattr(measure, "measure", lambda *_: pytest.fail("measured"))
    result = bench("--provider", "torch", "--out", out, "--resume", "--seed", "1")
    assert result.exit_code == 2
    assert "cannot resume results.json: seed 0 then, 1 now" in result.output
    old = record.load(out)
    old.environment["commit"] = "0123456789ab"
    record.save(old, out)
    result = bench("--provider", "torch", "--out", out, "--resume")
    assert result.exit_code == 2
    assert "commit 0123456789ab then, " in result.output
    record.save(replace(old, complete=True), out)
    out.write_bytes(before[:-20])
    result = bench("--provider", "torch", "--out", out, "--resume")
    assert result.exit_code == 2
    assert "results.json is not what `fused-softmax bench --out` writes" in result.output
    assert out.read_bytes() == before[:-20]


def test_why_a_run_is_not_gone_on_with_is_told_by_what_others_follow_from():
    """Of another GPU its name, and of other kernels one digest, not one of each operation."""
    gpu = {"name": "NVIDIA H200", "sm_count": 132, "capability": "9.0"}
    kernels = {"kernels": "1", "kernels_of": {"softmax": "1", "logsumexp": "1"}}
    old = record.Run({"torch": "2.11", "gpu": gpu, **kernels}, "")
    new = record.Run({"torch": "2.11", "gpu": None, "kernels": "2", "kernels_of": {"softmax": "2"}}, "")
    assert record.mismatch(old, new) == "GPU name NVIDIA H200 then, none now; kernels 1 then, 2 now"
    other = record.Run(old.environment | {"gpu": gpu | {"sm_count": 114}}, "")
    assert record.mismatch(old, other) == "GPU sm_count 132 then, 114 now"


def test_a_wrong_point_that_is_kept_fails_the_run_still(monkeypatch, tmp_path):
    out = tmp_path / "results.json"
    with monkeypatch.context() as patch:
        provide(patch, "softmax", lambda x: torch.softmax(x, -1) * 1.01)
        assert bench("--provider", "torch", "--out", out).exit_code == 1
    assert bench("--provider", "torch", "--out", out, "--resume").exit_code == 1


def test_several_sweeps_are_one_run(tmp_path):
    out = tmp_path / "results.json"
    shapes = ("--shape", "8x100", "--dtype", "fp32", "--verify-only", "--provider", "torch")
    result = fused_softmax("bench", "vocab", "logsumexp", "small", *shapes, "--out", out)
    assert result.exit_code == 0, result.output
    assert [(p.operation, p.n_cols) for p in record.load(out).points] == [("softmax", 100), ("logsumexp", 100)]


def test_one_shape_gives_the_average_of_the_middle_of_its_calls():
    shape = ("--M", 64, "--N", "1Ki", "--dtype", "float16", "--backend", "torch")
    result = fused_softmax("bench", "one", *shape, "--iters", 30, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.output)
    assert (facts["provider"], facts["case"]) == ("torch", "64 x 1024 float16")
    assert (facts["elements"], facts["moved_bytes"]) == (65536, 2 * 65536 * 2)
    assert facts["trimmed_at_each_end"] == 3
    assert facts["bandwidth_gb_per_s"] == pytest.approx(facts["moved_bytes"] / facts["average_ms"] * 1e-6)
    assert "average_ms" in fused_softmax("bench", "one", *shape, "--iters", 3).output


@pytest.mark.skipif(verify.interpreting(), reason="the time of an interpreter says nothing")
def test_one_shape_of_this_package_is_the_default():
    result = fused_softmax("bench", "one", "--M", 8, "--N", 100, "--iters", 3, "--json")
    assert json.loads(result.output)["provider"] == "fused_softmax"


def test_one_shape_of_an_interpreted_kernel_has_no_figure(monkeypatch):
    monkeypatch.setattr(measure, "interpreting", lambda: True)
    result = fused_softmax("bench", "one", "--M", 8, "--N", 100)
    assert result.exit_code == 1
    assert "the time of an interpreter says nothing" in result.output


def test_the_average_leaves_a_tenth_out_at_each_end():
    seconds = [1.0, 100.0, *[2.0] * 9, *[4.0] * 9]
    assert one.Times(Case((8, 100)), "torch", 10, seconds).average == 3.0


def test_one_shape_for_a_profiler_is_one_call_and_no_figure(monkeypatch):
    calls = []
    provide(monkeypatch, "softmax", lambda x: calls.append(tuple(x.shape)))
    result = fused_softmax("bench", "one", "--M", 8, "--N", 100, "--backend", "torch", "--profile-only")
    assert result.exit_code == 0, result.output
    assert calls == [(8, 100)]
    assert "average" not in result.output


def test_one_shape_of_a_wrong_provider_has_no_figure(monkeypatch):
    provide(monkeypatch, "softmax", lambda x: torch.softmax(x, -1) * 1.01, "naive")
    result = fused_softmax("bench", "one", "--M", 8, "--N", 100, "--backend", "naive")
    assert result.exit_code == 1
    assert "naive is wrong at 8 x 100 float32: largest error" in result.output
    assert "average_ms" not in result.output


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["--M", "8"], 2, "Missing option '--cols'."),
        (["--M", "0", "--N", "8"], 2, "not a positive size"),
        (["--M", "8", "--N", "8", "--backend", "cudnn"], 2, "unknown provider 'cudnn'"),
        (["--M", "8", "--N", "8", "--backend", "hybrid"], 1, "a GPU kernel, and there is no GPU"),
        (["--M", "8", "--N", "8", "--op", "softmax_causal"], 2, "softmax_causal takes shapes of 4 dims, not of rows"),
        (["--M", "8", "--N", "8", "--op", "logsumexp", "--backend", "liger"], 2, "logsumexp has no provider 'liger'"),
        (["--M", "64Mi", "--N", "64Mi", "--backend", "torch"], 1, "GiB are free"),
    ],
)
def test_one_shape_that_cannot_be_timed_is_a_line(arguments, code, complaint):
    result = fused_softmax("bench", "one", *arguments)
    assert result.exit_code == code
    assert complaint in result.output


def saved(path, gb_per_s, gpu="NVIDIA H200", dtype="float32"):
    environment = {"torch": "2.11", "triton": "3.6", "python": "3.12", "gpu": {"name": gpu}}
    us = 1e3 / gb_per_s
    kernel = record.Figure(us * 0.99, us, us * 1.01, gb_per_s)
    point = record.Point(64, 256, dtype, "fused_softmax", "ok", kernel=kernel)
    record.save(record.Run(environment, "fused-softmax bench", [point], complete=True), path)
    return path


def test_compare_says_what_moved_and_exits_for_ci(tmp_path):
    slow, fast = saved(tmp_path / "slow.json", 2000), saved(tmp_path / "fast.json", 3000)
    worse, better = (fused_softmax("bench", "compare", *pair) for pair in ((fast, slow), (slow, fast)))
    assert (worse.exit_code, better.exit_code) == (1, 0)
    assert re.search(r"64 x 256 float32 +fused_softmax +kernel +0.33 +0.50 +1.500 +slower", worse.output)
    assert re.search(r"softmax +float32 +fused_softmax +kernel +1 +1 +0 +0.667", better.output)
    same = fused_softmax("bench", "compare", slow, slow)
    assert same.exit_code == 0
    assert "64 x 256" not in same.output
    assert "64 x 256" in fused_softmax("bench", "compare", slow, slow, "--all").output
    assert fused_softmax("bench", "compare", fast, slow, "--tolerance", "60").exit_code == 0
    nothing = fused_softmax("bench", "compare", fast, slow, "--provider", "torch,liger")
    assert (nothing.exit_code, nothing.stdout) == (2, "")
    assert nothing.stderr == ("Error: nothing of torch, liger could be compared; no point has a figure in both\n")


def test_compare_says_that_gpus_and_dtypes_differ(tmp_path):
    one, other = saved(tmp_path / "a.json", 2000), saved(tmp_path / "b.json", 2000, "NVIDIA H100", "bfloat16")
    result = fused_softmax("bench", "compare", one, other)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(
        "Error: nothing could be compared; 1 point is only in the first file; 1 point is only in the second file; "
    )
    assert "different GPUs: NVIDIA H200, then NVIDIA H100" in line
    assert "different dtypes: float32, then bfloat16" in line


def test_compare_refuses_what_is_no_result(tmp_path):
    good, bad = saved(tmp_path / "good.json", 2000), tmp_path / "bad.json"
    bad.write_text("[]")
    for path, complaint in ((bad, "bad.json is not what"), (tmp_path / "none.json", "cannot read")):
        for pair in ((good, path), (path, good)):
            result = fused_softmax("bench", "compare", *pair)
            assert result.exit_code == 2
            assert complaint in result.output


def test_a_command_of_bench_is_no_name_of_a_sweep():
    assert not set(bench_commands.commands) & set(sweeps.SWEEPS)
    for name in ("tutorial", "peaks", "one"):
        assert name in fused_softmax("bench", "--help").output


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
        (["--shape", "4x8:2"], "must name a dim from 0 to 1"),
        (["--shape", "4x8:0"], "tutorial takes shapes of 2 dims, along the last one, not 4 x 8 dim 0"),
        (["masked", "--shape", "64x64"], "masked takes shapes of 4 dims"),
        (["nothing"], "unknown sweep 'nothing'; known: tutorial, backward, dims, masked, logsumexp, vocab"),
        (["dims", "--provider", "liger"], "dims has no provider 'liger'; it has fused_softmax, torch, torch.compile"),
        (["--rows", "4", "--elements", "8"], "give only one of them"),
        (["--plot", "figure.txt"], "must end in .png"),
        (["--reps", "0"], "0 is not in the range"),
        (["--resume"], "--resume continues the file that --out names"),
        (["custom"], "custom has no shapes of its own: give --shape"),
        (["custom", "--shape", "8x8", "--rows", "8"], "custom has no shapes of its own: give --shape, or --cols"),
        (["batch", "vocab", "--op", "logsumexp"], "batch has no operation 'logsumexp'"),
        (["--op", "matmul"], "unknown operation 'matmul'; --list names all"),
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
    assert facts == json.loads(fused_softmax("plan", "--rows", "4096", "--N", "32768", "--json").output)
    assert json.loads(fused_softmax("plan", "64", "64", "--json").output)["n_cols"] == 64
    assert facts["floor_bytes"] == 2 * 4096 * 32768 * 4


def test_plan_says_why_and_what_others_would_move():
    facts = json.loads(fused_softmax("plan", "1024", "131072", "--dtype", "bf16", "--json").output)
    matrix = 1024 * 131072 * 2
    assert facts["why"][0].startswith("split: a row of more than 32768 columns")
    assert (facts["traffic_bytes"], facts["torch_bytes"]) == (2 * matrix, 4 * matrix)
    assert facts["naive_bytes"] == 8 * matrix + 4 * 1024 * 2
    assert "split: a row of more than" in fused_softmax("plan", "1024", "131072", "--dtype", "bf16").output


def test_torch_reads_a_row_again_where_it_holds_none():
    assert [report.torch_reads(n, 2) for n in (128, 9216, 24568, 24569, 24576, 32000)] == [1, 1, 1, 3, 3, 3]
    assert [report.torch_reads(n, 4) for n in (9217, 12284, 12288)] == [3, 1, 3]


def test_plan_refuses_what_is_no_shape():
    for arguments in (["0", "4"], ["4", "x"], ["4", "4", "--dtype", "bool"]):
        assert fused_softmax("plan", *arguments).exit_code == 2


def test_env_names_versions_and_no_one():
    facts = json.loads(fused_softmax("env", "--json").output)
    assert {"fused_softmax", "torch", "triton", "python", "gpu"} <= facts.keys()
    assert "/" not in json.dumps({**facts, "gpu": None})
    assert "torch" in fused_softmax("env").output
