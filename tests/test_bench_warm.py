"""`bench --warm`: a measurement then compiles nothing, all its calls are planned, and nonsense is refused."""

import re
from dataclasses import replace

import pytest
import torch
from commands import fused_softmax as command
from test_warm import later

from fused_softmax.ahead import Kernel
from fused_softmax.bench.commands.commands import asked_of
from fused_softmax.bench.committed import COMMITTED
from fused_softmax.bench.entries import segments
from fused_softmax.bench.entries.operations import OPERATIONS
from fused_softmax.bench.measure import ahead, check, measure, run, verify
from fused_softmax.bench.renew import Renewal
from fused_softmax.core.elsewhere import shapes_of
from fused_softmax.core.route import INTERPRET

compiling = pytest.mark.skipif(INTERPRET, reason="the interpreter compiles nothing")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
OPS = "cross_entropy_gradient,sample_min_p"
SMALL = ("custom", "--op", OPS, "--shape", "64x4096", "--dtype", "bfloat16")
CARD = ("--warm", "--device", "h100")


@compiling
@without_gpu
@pytest.mark.compiles
@pytest.mark.timeout(900)
@pytest.mark.one_triton
def test_a_measurement_after_it_compiles_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    result = command("bench", *SMALL, *CARD)
    assert result.exit_code == 0, result.output
    said = r"2 cases take (\d+) kernels: (\d+) compiled in [\d.]+ s; no GPU: nothing was measured\n"
    kernels, compiled = map(int, re.fullmatch(said, result.output).groups())
    assert compiled == kernels > 30  # of which most are ceilings
    asked, compiled, said = later(tmp_path, bench=SMALL)
    assert compiled == 0, said
    assert asked >= kernels


@pytest.mark.parametrize("name", OPERATIONS)
def test_inputs_are_those_that_a_measurement_has_but_without_memory(name):
    case = replace(OPERATIONS[name].sample, operation=name)
    (given,) = check.inputs(case, 1, "cpu", 0)
    segments.offsets_of.cache_clear()  # with memory, or without
    try:
        found = shapes_of(lambda: OPERATIONS[name].inputs(case, torch.Generator("cpu")))
    finally:
        segments.offsets_of.cache_clear()
    facts = [[(x.shape, x.stride(), x.dtype, x.requires_grad) for x in each] for each in (found, given)]
    assert facts[0] == facts[1]
    assert all(x.is_meta for x in found)


def test_a_view_stays_as_far_from_its_start():
    (found,) = shapes_of(lambda: [torch.randn(4, 9)[1:, 3:]])
    assert (found.shape, found.stride(), found.storage_offset()) == ((3, 6), (9, 1), 12)


def test_of_a_measurement_all_cases_of_this_package_count_once():
    asked = [asked_of(COMMITTED[f"h200_{name}"].arguments, "x.json") for name in ("linear_cross_entropy", "vocab")]
    cases = ahead.ours([*asked, *asked])
    assert set(cases) == {case for each in asked for case in each.chosen}
    names = "fused_softmax", "in one chunk", "chunks of 256", "summed in place", "32 in place"
    assert {each for case, each in cases.items() if case.operation == "linear_cross_entropy"} == {names}
    assert {each for case, each in cases.items() if case.operation == "softmax"} == {("fused_softmax",)}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--device", "h100"], "--device names the card that --warm compiles for: give --warm too"),
        (["all", "--dry-run", "--out", "x", "--device", "h100"], "--device names the card that --warm compiles for"),
        (["all", "--dry-run", *CARD], "--dry-run begins nothing and --warm compiles"),
        (["--warm", "--device", "h300"], "'h300' is not one of 'h100', 'h200'"),
        (["nothing", *CARD], "unknown sweep 'nothing'"),
        *((words, said) for words, said in [
            (["--quick", "--warm"], "there is no GPU here: name the card by --device"),
            (["--quick", "--provider", "torch", *CARD], "--warm has nothing to compile"),
            (["all", "--only", "h100_cold", *CARD], "--warm has nothing to compile"),
        ] if not INTERPRET and not torch.cuda.is_available()),
        *([(["--quick", *CARD], "interpreted in this process")] if INTERPRET else []),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)  # fmt: skip
def test_what_makes_no_sense_is_refused_in_one_line(monkeypatch, given, said):
    monkeypatch.setattr(ahead, "compiled", lambda *_: pytest.fail("compiled"))
    result = command("bench", *given)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert said in result.stderr


@pytest.fixture
def compiled(monkeypatch):
    """What was to be compiled, for which card. Nothing is, and the second case raises."""
    found = []

    def stand_in(cases, device, failed):
        found.append((list(cases), device))
        for case in list(cases)[1:2]:
            failed(case, "ValueError: of two\nlines")
        return [Kernel("one", 1.0, False), Kernel("two", 0.1, True)]

    monkeypatch.setattr(ahead, "compiled", stand_in)
    return found


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(verify, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")


def test_a_case_that_cannot_be_planned_is_named_and_the_others_go_on(monkeypatch, compiled):
    monkeypatch.setattr(verify, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = command("bench", *SMALL, *CARD)
    assert result.exit_code == 1
    assert result.stderr == "note: sample_min_p 64 x 4096 bfloat16 is not compiled ahead: ValueError: of two lines\n"
    assert result.stdout.startswith("2 cases take 2 kernels: 1 compiled in 0.")
    ((cases, device),) = compiled
    assert device == "h100"
    assert [case.operation for case in cases] == OPS.split(",")
    only = command("bench", *SMALL[:2], "sample_min_p", *SMALL[3:], *CARD)
    assert (only.exit_code, only.stderr) == (0, "")


def test_a_measurement_follows_and_its_record_says_nothing_of_it(monkeypatch, compiled, gpu):
    asked = []
    monkeypatch.setattr(run, "bench", lambda each, *_, **__: asked.append((each, len(compiled))) or 0)
    for words in (["--warm"], ["--warm", "--device", "h200"], ["--device=h200", "--warm"], []):
        result = command("bench", *SMALL, *words)
        assert (result.exit_code, result.stdout) == (0, ""), result.output
    assert [count for _, count in asked] == [1, 2, 3, 3]
    assert {each.command for each, _ in asked} == {f"fused-softmax bench {' '.join(SMALL)}"}
    assert [device for _, device in compiled] == [None, "h200", "h200"]
    result = command("bench", *SMALL, *CARD)
    assert result.exit_code == 2
    assert result.stderr == (
        "Error: --device h100 is no NVIDIA H200, which would be measured: leave it out, or hide this GPU to compile "
        "only\n"
    )


def test_of_committed_files_what_is_not_current_is_compiled_before_it_is_measured(monkeypatch, compiled, gpu, tmp_path):
    from fused_softmax.bench import renew
    from fused_softmax.bench.committed import State

    measured = []
    monkeypatch.setattr(measure, "on_gpu", lambda: True)
    monkeypatch.setattr(run, "environment", lambda: {"gpu": {"name": "NVIDIA H200"}})
    monkeypatch.setattr(Renewal, "state", lambda each, _: State("current" if "dims" in each.name else "stale"))
    monkeypatch.setattr(renew, "renew", lambda chosen, *_: measured.append([each.name for each in chosen]) or 0)
    result = command("bench", "all", "--only", "h200_dims,h200_vocab,h200_cold", "--out", tmp_path, "--warm")
    assert result.exit_code == 0, result.output
    assert {case.operation for case in compiled[0][0]} == {"softmax", "softmax_float32"}
    assert measured == [["h200_dims", "h200_vocab", "h200_cold"]]
    assert command("bench", "all", "--warm").exit_code == 2  # where are results to go?


def test_without_a_gpu_committed_files_of_the_named_card_are_compiled_for(monkeypatch, compiled):
    monkeypatch.setattr(verify, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = command("bench", "all", *CARD)
    assert result.exit_code == 1, result.output  # for the case that raised
    ((cases, device),) = compiled
    assert device == "h100"
    asked = [asked_of(row.arguments, "x.json") for name, row in COMMITTED.items() if name.startswith("h100")]
    assert set(cases) == set(ahead.ours([each for each in asked if isinstance(each, run.Asked)]))
