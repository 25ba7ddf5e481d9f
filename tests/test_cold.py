"""First calls: which are measured, what a process of them records, and what `bench cold` keeps, prints and refuses."""

import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import stub_driver
import torch
from click.testing import CliRunner

from fused_softmax.bench import readme
from fused_softmax.bench.commands.commands import asked_of
from fused_softmax.bench.committed import COMMITTED, Row, state
from fused_softmax.bench.entries.first_calls import CALLS
from fused_softmax.bench.entries.operations import operation_of
from fused_softmax.bench.measure import cold, first_call, measure, run, verify
from fused_softmax.bench.results import record
from fused_softmax.bench.results.record import CompiledKernel, FirstCall, Run
from fused_softmax.cli import main
from fused_softmax.core.route import INTERPRET

SCRIPT = Path(__file__).with_name("cold_calls.py")
ENVIRONMENT = {"gpu": {"name": "NVIDIA H100"}, "torch": "2.11.0", "triton": "3.6.0", "python": "3.12.3"}
SMALL = {2: (4, 64), 3: (4, 8, 16), 4: (1, 8, 16, 16)}


def first(name="softmax", seconds=(2.0,), kernels=(("_row_forward", 1.0),)):
    found = [CompiledKernel(kernel, s, {"source": s / 4, "ptx": s / 2}) for kernel, s in kernels]
    return FirstCall(name, list(seconds), found, [0.25], 5.0, 0.5)


@pytest.mark.compiles
@pytest.mark.skipif(INTERPRET, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    ("name", "kernels", "calls"),
    [("softmax_trained", {"_part_forward", "_part_backward"}, 1), ("softmax_batches_bf16", {"_part_forward"}, 3)],
)
def test_a_process_records_what_it_compiles_and_a_later_one_nothing(monkeypatch, tmp_path, name, kernels, calls):
    for variable, value in stub_driver.environment(tmp_path).items():
        monkeypatch.setenv(variable, value)
    found = cold.measure(name, tmp_path / "cache", (sys.executable, str(SCRIPT)))
    assert found.name == name
    assert {kernel.name for kernel in found.kernels} == kernels
    on_disk = list((tmp_path / "cache").rglob("*.cubin"))
    assert len(found.kernels) == len(on_disk) > 1
    for kernel in found.kernels:
        assert list(kernel.stages) == ["source", "ttir", "ttgir", "llir", "ptx", "cubin", "store"]
        assert all(seconds > 0 for seconds in kernel.stages.values())
        assert sum(kernel.stages.values()) == pytest.approx(kernel.seconds, abs=1e-3)
    assert found.module_s
    assert len(found.call_s) == calls
    compiled = sum(kernel.seconds for kernel in found.kernels)
    assert compiled < found.seconds
    assert found.stages["ptx"] == pytest.approx(sum(kernel.stages["ptx"] for kernel in found.kernels))
    later = cold.measure(name, tmp_path / "cache", (sys.executable, str(SCRIPT)))
    assert (later.kernels, later.module_s, len(later.call_s)) == ([], [], calls)
    assert later.seconds < compiled


def test_the_list_has_every_operator_a_servers_batches_and_contexts():
    for part in (
        "softmax", "softmax_trained", "log_softmax", "logsumexp", "cross_entropy_gradient",
        "cross_entropy_none_trained", "cross_entropy_statistics", "linear_cross_entropy", "sample_greedy",
        "sample_temperature", "sample_top_k", "sample_top_p", "sample_min_p", "speculative_sample", "filters",
        "attention_causal", "attention_causal_gradient", "attention_decode",
    ):  # fmt: skip
        assert part in CALLS
    for dtype in ("bf16", "fp32"):
        batches = {case.shape[0] for case in CALLS[f"softmax_batches_{dtype}"].cases}
        assert batches >= {2**i for i in range(10)}
        assert any(n % 2 and n > 1 for n in batches)
        contexts = CALLS[f"attention_decode_contexts_{dtype}"].cases
        assert len({case.shape[2] for case in contexts}) == 24


@pytest.mark.parametrize("name", CALLS)
def test_every_call_can_be_made_with_the_inputs_it_is_given(name):
    calls, seen = CALLS[name], []
    cases = [replace(case, shape=SMALL[len(case.shape)]) for case in calls.cases[:2]]

    def inputs(case):
        seen.append(case)
        return operation_of(case).inputs(case, torch.Generator().manual_seed(0))

    found = first_call.timed(name, replace(calls, cases=cases), inputs, lambda: None)
    assert seen == cases
    assert len(found.call_s) == len(cases)
    assert found.kernels == []


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine with a GPU on which `told` says what each process finds; returns the names that were measured."""
    monkeypatch.setattr(measure, "on_gpu", lambda: True)
    monkeypatch.setattr(run, "gpu_facts", lambda: ({"name": "NVIDIA H100"}, None))
    monkeypatch.chdir(tmp_path)
    measured = []

    def told(name, folder):
        assert os.listdir(folder) == []
        measured.append(name)
        return first(name)

    monkeypatch.setattr(cold, "measure", told)
    return measured


def bench_cold(*arguments):
    return CliRunner().invoke(main, ["bench", "cold", *arguments], prog_name="fused-softmax")


def test_the_command_writes_what_it_measures(gpu, tmp_path):
    result = bench_cold("--only", "softmax,log-softmax", "--out", "cold.json")
    assert result.exit_code == 0, result.output
    assert gpu == ["softmax", "log_softmax"]
    found = record.read(tmp_path / "cold.json")
    assert found.command == "fused-softmax bench cold --only softmax,log-softmax --out cold.json"
    assert found.complete
    assert found.first_calls == [first("softmax"), first("log_softmax")]
    assert {"kernels", "source", "processor", "cores"} <= found.environment.keys()
    assert os.listdir(tmp_path) == ["cold.json"]
    assert "1/2 softmax: 2.0 s, 1 kernel" in result.stderr
    assert re.search(r"^all +2 +4.00 +2.00 +2 +2.00 +0.50 +1.00 +0.50", result.stdout, re.M)
    assert "a process took 5.0 s to import, and 0.5 s to make CUDA's context" in result.stdout


def test_all_are_measured_unless_some_are_named(gpu):
    assert bench_cold().exit_code == 0
    assert gpu == list(CALLS)


def test_first_calls_import_no_sympy():
    script = Path(__file__).with_name("imports_of_calls.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_several_processes_at_once_record_all_in_their_order(gpu, monkeypatch, tmp_path):
    together = threading.Barrier(2, timeout=60)

    def told(name, folder):
        together.wait()
        return first(name)

    monkeypatch.setattr(cold, "measure", told)
    result = bench_cold("--only", "softmax,log-softmax", "--at-once", "2", "--out", "cold.json")
    assert result.exit_code == 0, result.output
    found = record.read(tmp_path / "cold.json")
    assert found.first_calls == [first("softmax"), first("log_softmax")]
    assert "--at-once 2" in found.command
    assert bench_cold("--at-once", "0").exit_code == 2


def test_what_was_measured_before_ctrl_c_is_kept_and_not_measured_again(gpu, monkeypatch, tmp_path):
    told = cold.measure
    monkeypatch.setattr(cold, "measure", lambda name, folder: told(name, folder) if not gpu else interrupt())
    names = ("--only", "softmax,logsumexp", "--out", "cold.json")
    result = bench_cold(*names)
    assert result.exit_code == 130
    assert os.listdir(tmp_path) == ["cold.partial.json"]
    assert not record.read(tmp_path / "cold.partial.json").complete
    monkeypatch.setattr(cold, "measure", told)
    result = bench_cold(*names, "--resume")
    assert result.exit_code == 0, result.output
    assert gpu == ["softmax", "logsumexp"]
    assert [each.name for each in record.read(tmp_path / "cold.json").first_calls] == gpu
    assert os.listdir(tmp_path) == ["cold.json"]


def interrupt():
    raise KeyboardInterrupt


def test_rows_of_an_earlier_run_are_kept_whatever_is_asked_for_now(gpu, tmp_path):
    assert bench_cold("--only", "log-softmax", "--out", "cold.json").exit_code == 0
    result = bench_cold("--only", "softmax", "--out", "cold.json", "--resume")
    assert result.exit_code == 0, result.output
    assert gpu == ["log_softmax", "softmax"]
    assert {each.name for each in record.read(tmp_path / "cold.json").first_calls} == {"softmax", "log_softmax"}


def test_a_process_that_fails_is_named_and_the_others_are_measured(gpu, monkeypatch, tmp_path):
    told = cold.measure

    def failing(name, folder):
        if name == "softmax":
            raise cold.Failed("RuntimeError: no kernel image")
        return told(name, folder)

    monkeypatch.setattr(cold, "measure", failing)
    result = bench_cold("--only", "softmax,logsumexp", "--out", "cold.json")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "Error: softmax failed: RuntimeError: no kernel image"
    assert [each.name for each in record.read(tmp_path / "cold.partial.json").first_calls] == ["logsumexp"]


def test_a_process_says_why_it_failed(tmp_path):
    code = "import sys; sys.exit('line\\nRuntimeError: ' + sys.argv[1])"
    with pytest.raises(cold.Failed, match=r"^RuntimeError: softmax$"):
        cold.measure("softmax", tmp_path, (sys.executable, "-c", code))


@pytest.mark.parametrize(
    ("interpreted", "said"),
    [
        (False, "no GPU: nothing was measured"),
        (True, "kernels are interpreted in this process (FUSED_SOFTMAX_INTERPRET=1), so they cannot be timed"),
    ],
)
def test_without_a_gpu_it_refuses_in_one_line(monkeypatch, tmp_path, interpreted, said):
    monkeypatch.setattr(measure, "on_gpu", lambda: False)
    monkeypatch.setattr(verify, "interpreting", lambda: interpreted)
    result = bench_cold("--out", str(tmp_path / "cold.json"))
    assert (result.exit_code, result.stderr) == (1, f"Error: {said}\n")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "damage",
    [{"call_s": []}, {"call_s": ["1"]}, {"call_s": [-1.0]}, {"name": 1}, {"kernels": [{}]}, {"module_s": None}],
    ids=str,
)
def test_a_damaged_record_is_no_result(tmp_path, damage):
    path = tmp_path / "cold.json"
    kept = Run(ENVIRONMENT, "fused-softmax bench cold", complete=True, first_calls=[first()])
    record.save(kept, path)
    assert record.read(path) == kept
    data = json.loads(path.read_text())
    data["first_calls"][0] |= damage
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="is not what"):
        record.read(path)


def test_a_committed_file_is_made_anew_when_it_is_not_current(gpu, monkeypatch, tmp_path):
    for name in list(COMMITTED):
        monkeypatch.delitem(COMMITTED, name)
    monkeypatch.setitem(COMMITTED, "h100_cold", Row("First calls", "cold --only softmax"))
    bench_all = ["bench", "all", "--out", str(tmp_path), "--resume"]
    result = CliRunner().invoke(main, bench_all)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[:1] == ["h100_cold: missing"]
    assert re.search(r"h100_cold: measured now: 1 first call in \d+ s", result.stdout)
    assert CliRunner().invoke(main, bench_all).stdout == "h100_cold: current: of the kernels of this source\n"
    assert gpu == ["softmax"]
    path, environment = tmp_path / "h100_cold.json", run.environment()
    assert record.read(path).command == "fused-softmax bench cold --only softmax --out h100_cold.json"
    more = asked_of("cold --only softmax,logsumexp", "h100_cold.json")
    assert state(path, environment, more.points, more.recorded).why == "lacks 1 of its 2 points"
    changed = environment | {"kernels": "another"}
    assert state(path, changed, ["softmax"], {}).word == "stale"


def test_the_report_has_a_table_of_them(tmp_path):
    pytest.importorskip("fused_softmax.bench.show.page", reason="the report's extra is not installed")
    path = tmp_path / "cold.json"
    calls = [first(), first("softmax_batches_bf16", (1.0, 0.5), (("_part_forward", 0.5), ("_slow", 0.75)))]
    record.save(Run(ENVIRONMENT, "fused-softmax bench cold", complete=True, first_calls=calls), path)
    out = tmp_path / "page.html"
    result = CliRunner().invoke(main, ["report", str(path), "-o", str(out)])
    assert result.exit_code == 0, result.output
    text = out.read_text()
    (table,) = re.findall(r'<table class="first-calls">.*?</table>', text, re.DOTALL)
    rows = [re.findall(r"<t[dh].*?>(.*?)</t[dh]>", row) for row in re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)]
    assert rows == [
        ["first call", "calls", "seconds", "slowest call", "kernels", "compiler", "source", "ptx", "C modules",
         "rest", "slowest kernel"],
        ["softmax", "1", "2.00", "2.00", "1", "1.00", "0.25", "0.50", "0.25", "1.00", "_row_forward 1.00"],
        ["softmax, 19 batches, bf16", "2", "1.50", "1.00", "2", "1.25", "0.31", "0.62", "0.25", "0.25", "_slow 0.75"],
        ["all", "3", "3.50", "2.00", "3", "2.25", "0.56", "1.12", "0.50", "1.25", ""],
    ]  # fmt: skip
    assert "2 processes, 3 kernels compiled" in text
    assert "All figures" not in text


def test_a_page_of_the_docs_can_show_them():
    environment = ENVIRONMENT | {"processor": "A processor", "cores": 16}
    text = readme.render(Run(environment, "fused-softmax bench cold", complete=True, first_calls=[first()]))
    assert (
        "NVIDIA H100, torch 2.11.0, Triton 3.6.0, A processor (16 cores). Made by\n`fused-softmax bench cold`" in text
    )
    assert "| softmax | 1 | 2.00 | 2.00 | 1 | 1.00 | 0.25 | 0.50 | 0.25 | 1.00 | _row_forward 1.00 |" in text
