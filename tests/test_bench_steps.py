"""`bench step`: what a step computes by each provider, how it is judged, and what becomes of its figures."""

import json
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from click.testing import CliRunner
from products import one_in

from fused_softmax.bench import catalog, readme, tables
from fused_softmax.bench.cases import Case, in_time, parse_shapes
from fused_softmax.bench.commands import steps as command
from fused_softmax.bench.commands.commands import asked_of
from fused_softmax.bench.committed import COMMITTED
from fused_softmax.bench.entries import steps as entries
from fused_softmax.bench.measure import measure, run
from fused_softmax.bench.measure import steps as measuring
from fused_softmax.bench.results import fingerprint, record
from fused_softmax.bench.results.record import Figure
from fused_softmax.bench.show import summary
from fused_softmax.cli import main

ROOT = Path(__file__).parents[1]
SHAPE = (2, 12, 96)
LLAMA, GRPO = catalog.STEPS
ON_CPU = {LLAMA: ("fused_softmax", "torch", "32 in place"), GRPO: ("fused_softmax", "trl")}


def case_of(step, shape=SHAPE):
    return Case(shape, "bfloat16", step)


def need(step):
    pytest.importorskip("transformers")
    if step == GRPO:
        pytest.importorskip("trl")


def asked(step, names, **options):
    return measuring.Asked("fused-softmax bench step", [(case_of(step), names)], standing=False, steps=1, **options)


def points(step, names, **options):
    return list(measuring.measure(entries.At(case_of(step), "cpu"), names, asked(step, names, **options)))


def test_a_step_is_named_wherever_operations_are():
    assert catalog.PEERS_OF_STEPS.keys() == catalog.STEPS.keys() == command.CASES.keys()
    assert not catalog.STEPS.keys() & catalog.OPERATIONS.keys()
    functions = fingerprint.functions()
    for name, step in catalog.STEPS.items():
        names = catalog.PEERS_OF_STEPS[name]
        assert {catalog.OWN, step.baseline} <= set(names)
        assert functions[name] == functions[step.operation]
        assert summary.title_of(name) == step.title
        assert in_time(case_of(name))


def test_the_commands_cases_compile_once_and_last():
    found = command.chosen((), (), (), quick=False)
    compiled = [(case, names) for case, names in found if set(names) & set(catalog.COMPILING)]
    assert compiled == [(Case((4, 2048, 128256), "bfloat16", LLAMA), [*catalog.COMPILING])] == found[-1:]
    assert [case.shape for case, _ in found[:-1]] == [(4, 2048, 128256), (1, 8192, 128256), (8, 1024, 128256)]
    every = {(case.operation, name) for case, names in found for name in names}
    assert every == {(step, name) for step, names in catalog.PEERS_OF_STEPS.items() for name in names}
    quick = command.chosen((), (), (), quick=True)
    assert [case.shape for case, _ in quick] == [(4, 2048, 128256), (8, 1024, 128256)]
    assert not {name for _, names in quick for name in names} & set(catalog.COMPILING)


def test_given_shapes_and_providers_are_taken_as_they_are():
    shapes = parse_shapes("2x8x100,1x9x100")
    found = command.chosen([LLAMA], shapes, ["torch", "torch.compile"], quick=True)
    assert [(case.shape, names) for case, names in found] == [
        ((2, 8, 100), ["torch"]),
        ((1, 9, 100), ["torch"]),
        ((2, 8, 100), ["torch.compile"]),
        ((1, 9, 100), ["torch.compile"]),
    ]


def test_the_committed_file_is_what_the_command_makes():
    made = asked_of(COMMITTED["h200_step"].arguments, "h200_step.json")
    assert made.command == "fused-softmax bench step --out h200_step.json"
    assert made.recorded == {"steps": 10, "seed": 0}
    assert made.points == {(case, name) for case, names in command.chosen((), (), (), quick=False) for name in names}


@pytest.mark.parametrize("step", one_in(2, ON_CPU))
def test_each_provider_of_a_cpu_computes_the_step(step):
    need(step)
    found = points(step, ON_CPU[step])
    assert [point.provider for point in found] == list(ON_CPU[step])
    interpreted = measuring.interpreting()
    for point in found:
        assert point.status == ("untimed" if interpreted else "ok"), point.message
        assert bool(point.call) != interpreted
        assert point.error <= point.error_allowed
        assert point.case == case_of(step)
        assert (point.parameters["layers"], point.parameters["parameters"]) == (2, 80192)


def test_the_number_of_parameters_is_the_models():
    need(LLAMA)
    at = entries.At(case_of(LLAMA), "cpu")
    model = entries.llama(at)
    assert entries.parameters_of(at) == sum(each.numel() for each in model.parameters())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    of_1b = entries.At(case_of(LLAMA, (1, 2, 128256)), "cuda")
    assert of_1b.sizes == entries.LLAMA_1B
    assert entries.parameters_of(of_1b) == 1_235_814_400  # as published


def test_weights_in_float32_are_those_in_bfloat16():
    need(LLAMA)
    low, high = (
        entries.llama(entries.At(replace(case_of(LLAMA), dtype=dtype), "cpu")) for dtype in ("bfloat16", "float32")
    )
    for (name, mine), true in zip(low.named_parameters(), high.parameters(), strict=True):
        assert mine.dtype == torch.bfloat16, name
        assert torch.equal(mine.float(), true), name


@pytest.mark.parametrize("what", ["loss", "head", "NaN", *one_in(3, [None, "rest", "none"])[1:]])
def test_a_wrong_step_has_no_figure(what, monkeypatch):
    """Whatever part of it is wrong, by as little as a tenth."""
    need(LLAMA)

    @contextmanager
    def spoilt(at):
        with entries.plain(at) as step:
            head = step.model.get_output_embeddings().weight
            for each in step.model.parameters():
                if what == ("head" if each is head else "rest"):
                    each.register_hook(lambda grad: grad * 1.1)
            if what == "none":
                step.model.model.norm.weight.requires_grad_(False)

            def loss():
                found = step.loss()
                # Its gradient stays.
                return found + found.detach() * {"loss": 0.1, "NaN": float("nan")}.get(what, 0.0)

            yield replace(step, loss=loss)

    provider = replace(catalog.NAMED["torch"], steps={LLAMA: spoilt})
    right = measuring.Judge.of(entries.At(case_of(LLAMA), "cpu"))
    monkeypatch.setattr(measuring.Judge, "of", lambda at: right)
    monkeypatch.setitem(measuring.NAMED, "torch", provider)
    (point,) = points(LLAMA, ["torch"])
    said = {"head": "the gradient of the head: error", "rest": "the gradients: error", "none": "RuntimeError: a param"}
    assert point.status == ("refused" if what == "none" else "wrong")
    assert point.message.startswith(said.get(what, "the loss: error"))
    assert point.call is None


def test_what_is_not_installed_is_absent(monkeypatch):
    need(LLAMA)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setattr(measuring, "_left_out", lambda *_: "")
    torchs, ligers = points(LLAMA, ["torch", "liger"])
    assert torchs.status in ("ok", "untimed")
    assert (ligers.status, ligers.call) == ("absent", None)
    assert "liger_kernel" in ligers.message
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "trl", None)
    for step, names in ON_CPU.items():
        assert {(point.status, point.call) for point in points(step, names)} == {("absent", None)}


def test_what_a_cpu_has_no_time_for_is_said():
    need(LLAMA)
    names = ["liger", "torch.compile", "own compiled"]
    said = [(point.status, point.message) for point in points(LLAMA, names)]
    compiled = "compiled for a CPU only when named by --provider"
    assert said == [("untimed", "a GPU kernel, and there is no GPU"), *[("untimed", compiled)] * 2]
    at = entries.At(case_of(LLAMA), "cpu")
    assert measuring._left_out(at, "torch.compile", named=True) == ""
    assert measuring._left_out(entries.At(case_of(GRPO), "cpu"), "trl", named=False) == ""


def test_liger_is_taken_back(monkeypatch):
    """It replaces functions of transformers for all models of the process."""
    need(LLAMA)
    from transformers.models.llama import modeling_llama

    liger = ModuleType("liger_kernel.transformers")
    own = modeling_llama.apply_rotary_pos_emb

    def replaced(*args, **kwargs):
        calls.append(1)
        return own(*args, **kwargs)

    def apply_liger_kernel_to_llama(model):
        assert type(model).__name__ == "LlamaForCausalLM"
        modeling_llama.apply_rotary_pos_emb = replaced

    calls = []
    liger.apply_liger_kernel_to_llama = apply_liger_kernel_to_llama
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", liger)
    monkeypatch.setattr(measuring, "_left_out", lambda *_: "")
    (point,) = points(LLAMA, ["liger"])
    assert point.status in ("ok", "untimed"), point.message
    assert calls
    assert modeling_llama.apply_rotary_pos_emb is own


def test_ours_takes_trls_place_while_it_is_measured(monkeypatch):
    need(GRPO)
    from fused_softmax.register import trl as of_trl

    seen = []
    own = of_trl.linear_log_prob
    monkeypatch.setattr(of_trl, "linear_log_prob", lambda *args, **kwargs: seen.append(1) or own(*args, **kwargs))
    at = entries.At(case_of(GRPO), "cpu")
    for maker, taken in ((entries.trl, False), (entries.own_of_trl, True)):
        with maker(at) as step:
            step.loss().backward()
        assert bool(seen) == taken
        assert not of_trl._replaced


def test_ours_makes_no_logits_in_the_way_that_is_named(monkeypatch):
    need(LLAMA)
    from fused_softmax.hf import deferred

    seen = []
    own = deferred.linear_cross_entropy

    def linear_cross_entropy(*args, **kwargs):
        seen.append((kwargs["chunk_size"], kwargs["accumulate"]))
        return own(*args, **kwargs)

    monkeypatch.setattr(deferred, "linear_cross_entropy", linear_cross_entropy)
    at = entries.At(case_of(LLAMA), "cpu")
    for name in ("fused_softmax", "32 in place", "torch"):
        with catalog.NAMED[name].steps[LLAMA](at) as step:
            step.loss()
    assert seen == [(None, "fp32"), (32, "input")]


def test_a_compiled_step_computes_the_same(monkeypatch):
    need(LLAMA)
    seen = []

    def compiled(model, dynamic):
        seen.append(dynamic)
        return lambda **given: model(**given)

    monkeypatch.setattr(torch, "compile", compiled)
    for point in points(LLAMA, ["torch.compile", "own compiled"], named=True):
        assert point.status in ("ok", "untimed"), point.message
    assert seen == [False, False]


def bench(*arguments):
    return CliRunner().invoke(main, ["bench", "step", *map(str, arguments)], prog_name="fused-softmax")


def test_the_command_measures_writes_and_goes_on(monkeypatch, tmp_path):
    need(LLAMA)
    out = tmp_path / "step.json"
    result = bench("--op", LLAMA, "--provider", "fused,torch", "--reps", 1, "--out", out)
    assert result.exit_code == 0, result.output
    assert "No GPU: a model of 2 layers and few tokens" in result.output
    run_of = record.read(out)
    assert run_of.complete
    case = Case(measuring.ON_CPU, "bfloat16", LLAMA)
    assert [(point.case, point.provider) for point in run_of.points] == [(case, "fused_softmax"), (case, "torch")]
    assert str(case) in result.output
    assert bench("--out", out).exit_code == 2
    monkeypatch.setattr(measuring, "_measured_by", lambda name, judge, asked: pytest.fail("measured again"))
    again = bench("--op", LLAMA, "--provider", "fused,torch", "--reps", 1, "--out", out, "--resume")
    assert again.exit_code == 0, again.output
    assert "2 points are kept" in again.output
    other = bench("--op", LLAMA, "--provider", "torch", "--reps", 2, "--out", out, "--resume")
    assert (other.exit_code, "steps 1 then, 2 now" in other.output) == (2, True)


def test_ctrl_c_keeps_what_was_measured(monkeypatch, tmp_path):
    need(LLAMA)
    done = []

    def measured(name, judge, asked):
        if done:
            raise KeyboardInterrupt
        done.append(name)
        return measuring._point(judge.at, name, "ok", call=Figure(1.0, 2.0, 3.0, 4.0))

    monkeypatch.setattr(measuring, "_measured_by", measured)
    out = tmp_path / "step.json"
    result = bench("--op", LLAMA, "--out", out)
    assert result.exit_code == 130
    assert not out.exists()
    kept = record.read(record.partial_path(out))
    assert [point.provider for point in kept.points] == done
    assert not kept.complete


def measured_on_gpu(complete=True):
    """A run as an H200 makes it, with other figures."""
    ms = {"fused_softmax": 200.4, "torch": 250.0, "32 in place": 210.0, "trl": 300.0, "own compiled": 150.0}

    def point(case, name):
        facts = {"parameters": {**case.parameters, "parameters": 1_235_814_400}, "operation": case.operation}
        if name not in ms:
            return record.Point(case.n_rows, case.n_cols, "bfloat16", name, "absent", "ModuleNotFoundError", **facts)
        us = ms[name] * 1e3
        return record.Point(
            case.n_rows, case.n_cols, "bfloat16", name, "ok", call=Figure(us, us, us, 1.0), memory_bytes=3 * 2**29,
            error=1e-5, error_allowed=2e-3, **facts,
        )  # fmt: skip

    found = [point(case, name) for case, names in command.chosen((), (), (), quick=False) for name in names]
    environment = {"torch": "2.11.0", "triton": "3.6.0", "gpu": {"name": "NVIDIA H200"}, "kernels": "0123"}
    return record.Run(environment, "fused-softmax bench step --out h200_step.json", found, complete=complete)


def test_a_page_gets_a_table(tmp_path, capsys):
    results, page = tmp_path / "h200_step.json", tmp_path / "results.md"
    text = "\n".join(["before", *tables.markers("step"), "", "after", ""])
    record.save(measured_on_gpu(), results)
    page.write_text(text)
    arguments = [str(results), str(page), "--place", "step"]
    assert readme.main([*arguments, "--check"]) == 1
    assert page.read_text() == text
    assert readme.main(arguments) == 0
    written = page.read_text()
    assert written.endswith("\n\nafter\n")
    assert readme.main([*arguments, "--check"]) == 0
    lines = written.splitlines()
    heads, _, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines if line.startswith("|")]
    assert heads[1:] == [
        "this package",
        "under torch.compile",
        "in chunks of 32 tokens, summed in place",
        "torch",
        "TRL",
    ]
    found = {row[0]: dict(zip(heads[1:], row[1:], strict=True)) for row in rows}
    of_llama = found["a training step of a Llama, 4 x 2048 x 128256"]
    assert of_llama["this package"] == "200 ms, 1.5 GiB"
    assert (of_llama["under torch.compile"], of_llama["TRL"]) == ("150 ms, 1.5 GiB", "")
    assert found["a step of GRPO with a Llama, 8 x 1024 x 128256"]["TRL"] == "300 ms, 1.5 GiB"
    (said,) = [line for line in lines if "random weights" in line]
    assert "liger: absent: ModuleNotFoundError" in said
    assert "1.24 billion random weights" in said
    assert said.endswith("NVIDIA H200, torch 2.11.0, Triton 3.6.0, kernels 0123. Made by `fused-softmax bench step "
                         "--out h200_step.json`.")  # fmt: skip
    record.save(measured_on_gpu(complete=False), results)
    with pytest.raises(SystemExit, match="2"):
        readme.main(arguments)
    assert "stopped early" in capsys.readouterr().err
    assert page.read_text() == written


def test_the_page_of_results_has_the_committed_steps():
    results = ROOT / "benchmarks/results/h200_step.json"
    assert readme.main([str(results), str(ROOT / "docs/results.md"), "--place", "step", "--check"]) == 0


def test_a_report_has_the_steps(tmp_path):
    pytest.importorskip("altair")
    from fused_softmax.bench.show import page

    path = tmp_path / "h200_step.json"
    record.save(measured_on_gpu(), path)
    part = page.part(path)
    assert part.title == COMMITTED["h200_step"].title
    assert {chart.name for group in part.groups for chart in group.charts} == {
        f"h200_step_{step}_bfloat16_{kind}" for step in catalog.STEPS for kind in ("speed", "speed_up", "memory")
    }
    assert catalog.STEPS[LLAMA].title in page.render([part], "title")


def test_bench_all_makes_it(monkeypatch, tmp_path):
    need(LLAMA)
    monkeypatch.setattr(measure, "on_gpu", lambda: True)
    monkeypatch.setattr(run, "gpu_facts", lambda: ({"name": "NVIDIA H200", "l2_bytes": 2**20}, None))
    seen = []

    def measured(at, names, asked):
        seen.append(at.case)
        for name in names:
            yield measuring._point(replace(at, device="cpu"), name, "ok", call=Figure(1.0, 2.0, 3.0, 4.0))

    monkeypatch.setattr(measuring, "on_gpu", lambda: True)
    monkeypatch.setattr(measuring, "measure", measured)
    arguments = ["bench", "all", "--only", "h200_step", "--out", str(tmp_path)]
    for more, said in (([], "measured now: 14 points"), (["--resume"], "h200_step: current")):
        result = CliRunner().invoke(main, [*arguments, *more], prog_name="fused-softmax")
        assert result.exit_code == 0, result.output
        assert said in result.stdout
    assert len(seen) == 4
    content = json.loads((tmp_path / "h200_step.json").read_text())
    assert content["command"] == "fused-softmax bench step --out h200_step.json"
