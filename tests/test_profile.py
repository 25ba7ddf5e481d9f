"""Profiles: the commands, what is read off what profilers print, the table, and what is known without counters.

The files in profiles/ have the form that ncu prints; their figures are made up.
"""

import csv
import itertools
import json
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from fused_softmax import cli
from fused_softmax.bench.cases import Case
from fused_softmax.bench.entries.operations import OPERATIONS
from fused_softmax.core.plan import H200
from fused_softmax.profile import command, parse, run, table
from fused_softmax.profile.parse import Kernel

PROFILES = Path(__file__).parent / "profiles"
FLOOR = 512 * 2**20  # of one_kernel.csv: 1024 x 131072 of 2 bytes


def printed(name):
    return (PROFILES / name).read_text()


def profile_of(name, provider="fused_softmax"):
    return table.Profile(provider, "counters (ncu)", tuple(parse.ncu(printed(name))))


def test_ncu_is_asked_for_the_call_alone_and_changes_no_clock():
    argv = command.ncu("/opt/ncu", "out.csv", command.target("python", ("softmax", "8x100", "float32"), "torch"))
    assert argv[0] == "/opt/ncu"
    assert argv[-7:] == ["python", "-m", "fused_softmax.profile.target", "softmax", "8x100", "float32", "torch"]
    asked = dict(itertools.pairwise(argv))
    assert (asked["--page"], asked["--log-file"], asked["--profile-from-start"]) == ("raw", "out.csv", "off")
    assert asked["--clock-control"] == "none"
    metrics = asked["--metrics"].split(",")
    assert len(set(metrics)) == len(metrics)
    assert not any(" " in metric for metric in metrics)


def test_a_raw_page_is_read_in_bytes_and_microseconds():
    (kernel,) = parse.ncu(printed("one_kernel.csv"))
    assert (kernel.name, kernel.block, kernel.grid) == ("_part_forward", 128, 16384)
    assert kernel.time_us == pytest.approx(134.816)
    assert kernel.dram_bytes == 268_512_256 + 267_911_680
    assert (kernel.registers, kernel.shared_bytes, kernel.waves) == (56, 1040, 13.79)
    assert (kernel.occupancy, kernel.occupancy_limit, kernel.limited_by) == (52.90, 56.25, "registers")
    assert (kernel.loads, kernel.stores) == ("16", "16")
    assert kernel.stalls[:3] == (("long_scoreboard", 11.42), ("membar", 2.31), ("barrier", 1.07))
    assert "not_selected" not in dict(kernel.stalls)  # n/a is no figure


def test_every_kernel_of_a_call_is_read_and_summed():
    found = profile_of("three_kernels.csv", "naive")
    assert [kernel.grid for kernel in found.kernels] == [4096] * 3
    assert found.time_us == pytest.approx(68.032 + 133.504 + 72.128)
    assert found.total("dram_bytes") == sum(kernel.dram_bytes for kernel in found.kernels) == 671_137_792
    assert found.longest.name.startswith("void at::native::elementwise_kernel<128, 2")
    assert found.longest.limited_by == "registers and warps"
    assert found.longest.loads == "4"


def test_the_long_form_is_read_too_and_units_are_taken_out():
    first, second = parse.ncu(printed("long_form.csv"))
    assert (first.name, second.name) == ("_tile_forward", "_part_forward")
    assert (first.time_us, second.time_us) == (1250, 3.2)
    assert first.dram_bytes == pytest.approx(67.11e6 + 512e3)
    assert (second.dram_bytes, second.registers, second.stalls) == (None, None, ())


def test_commas_and_quotes_within_a_name_are_the_names():
    rows = list(csv.reader(printed("three_kernels.csv").splitlines()[2:-1]))
    assert [kernel.name for kernel in parse.ncu(printed("three_kernels.csv"))] == [row[4] for row in rows[2:]]


@pytest.mark.parametrize("text", ["", "==PROF== Connected\n", printed("no_permission.txt")])
def test_without_a_table_there_are_no_kernels(text):
    with pytest.raises(ValueError, match="no table"):
        parse.ncu(text)


def test_why_there_are_no_counters_is_said():
    said = parse.problem(printed("no_permission.txt"), 1)
    assert "ERR_NVGPUCTRPERM" in said
    assert "NVreg_RestrictProfilingToAdminUsers=0" in said
    assert parse.problem("==ERROR== Unknown metric x\n==ERROR== other\n", 1) == "ncu: Unknown metric x"
    assert parse.problem("==WARNING== No kernels were profiled.\n", 0) == "ncu saw no kernel in the call"
    assert parse.problem("", 9) == "ncu ended with exit code 9"
    assert parse.problem("", 0) == ""


def test_protons_tree_gives_times_of_what_ran_in_the_call_alone():
    def node(name, *children, **metrics):
        return {"frame": {"name": name, "type": "function"}, "metrics": metrics, "children": list(children)}

    fill = node("fill", **{"time (ns)": 9e6, "count": 20})
    kernels = [
        node("_stream_state", **{"time (ns)": 4e4, "count": 20}),
        node("_stream_forward", **{"time (ns)": 6e4, "count": 20}),
    ]
    again = node("call", node("_stream_state", **{"time (ns)": 2e4, "count": 10}), **{"time (ns)": 2e4})
    tree = [node("ROOT", fill, node("call", *kernels), again), {"CUDA": {"0": {"arch": "90"}}}]
    assert parse.proton(json.dumps(tree), "call") == {"_stream_state": (60, 30), "_stream_forward": (60, 20)}
    with pytest.raises(ValueError, match="Expecting"):
        parse.proton("", "call")


def test_occupancy_is_what_the_scarcest_thing_allows():
    assert table.occupancy(H200, 56, 16, 128) == (56.25, "registers")
    assert table.occupancy(H200, 32, 0, 64) == (100, "registers and warps and programs")
    assert table.occupancy(H200, 40, 100 * 1024, 256) == (25, "shared memory")
    assert table.occupancy(H200, 32, 0, 1024) == (100, "registers and warps")
    assert table.occupancy(H200, 16, 0, 32) == (50, "programs")
    assert table.occupancy(H200, 57, 0, 256)[0] == 50  # 57 registers are handed out as 64


def test_the_table_holds_what_is_known_and_no_more():
    profiles = [
        profile_of("one_kernel.csv"),
        profile_of("three_kernels.csv", "naive"),
        table.Profile("quack", "", (), "why"),
    ]
    lines = dict(table.rows(profiles, FLOOR, H200))
    assert lines["time"] == ["134.8 us", "273.7 us", ""]
    assert lines["floor bandwidth"][0] == f"{FLOOR / 134.816e-6 * 1e-9:.4g} GB/s"
    assert lines["DRAM moved"][0] == "511.6 MiB (1.00 of the floor)"
    assert lines["of a copy's"][0] == f"{FLOOR / 134.816e-6 / 4.2e12:.4g}"
    assert lines["occupancy at most"][0] == "56 %, by registers"
    assert lines["grid"] == ["16,384 programs", "4,096 programs", ""]
    assert lines["stalls"][0] == "long_scoreboard 11.4, membar 2.3, barrier 1.1"
    assert "of a copy's" not in dict(table.rows(profiles, FLOOR, None))
    assert table.rows(profiles[2:], FLOOR, H200) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "long_scoreboard: warps wait for data from memory"),
        ({"spilled_bytes": 4096.0}, "4 KiB spilled"),
        ({"dram_bytes": 1.5 * FLOOR}, "moves 1.50 times the floor"),
        ({"dram_percent": 91.0}, "at 91 % of the memory's peak"),
        ({"loads": "2"}, "accesses of 2 bytes a thread"),
        ({"loads": "16 x2, 2 x8"}, "accesses of 2 bytes a thread"),
        ({"grid": 64}, "64 programs leave 68 multiprocessors idle"),
        ({"grid": 1}, "1 program leaves 131 multiprocessors idle"),
        ({"grid": 131}, "131 programs leave 1 multiprocessor idle"),
        ({"loads": "1"}, "accesses of 1 byte a thread"),
        ({"stalls": (), "occupancy_limit": 12.5, "limited_by": "shared memory"}, "shared memory lets 12 % of the"),
        ({"stalls": (), "occupancy_limit": 12.5, "limited_by": None}, "the GPU's resources let 12 % of the warps"),
        ({"stalls": (), "occupancy_limit": 12.5}, "registers let 12 % of the warps reside"),
        ({"stalls": (), "loads": "16 x8, 2 x1"}, "nothing in the binary stands out"),
    ],
)
def test_the_sentence_names_the_most_telling_fact(changes, sentence):
    (kernel,) = parse.ncu(printed("one_kernel.csv"))
    assert table.advice(table.Profile("x", "", (replace(kernel, **changes),)), FLOOR, H200).startswith(sentence)


def test_every_stall_that_is_asked_for_has_a_sentence():
    for name in command.STALLS:
        kernel = Kernel("k", stalls=((name, 1.0),))
        assert table.advice(table.Profile("x", "", (kernel,)), FLOOR, None) == f"{name}: {command.STALLS[name]}"


@pytest.mark.parametrize(
    ("operation", "shape", "name"),
    [
        pytest.param("softmax", (64, 4096), "_part_forward", marks=pytest.mark.exhaustive),
        pytest.param("softmax_backward", (64, 4096), "_part_backward", marks=pytest.mark.exhaustive),
        pytest.param("logsumexp", (64, 4096), "_part_logsumexp", marks=pytest.mark.exhaustive),
        pytest.param("softmax_dim", (64, 512, 256), "_column_forward", marks=pytest.mark.exhaustive),
        ("softmax", (4096, 256), "_tile_forward"),
        ("sample", (64, 1024), "_draw"),  # of whose arguments some are tuples
    ],
)
def test_without_a_gpu_the_kernels_are_compiled_and_read(operation, shape, name):
    (kernel,), why = run.by_binary(Case(shape, "bfloat16", operation, dim=1 if len(shape) == 3 else -1), H200)
    assert (kernel.name, why) == (name, "")
    assert kernel.spilled_bytes == 0
    assert kernel.loads.startswith("16 x")
    assert 16 <= kernel.registers <= 255
    assert kernel.time_us is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_kernels_of_every_operation_are_compiled(operation):
    kernels, why = run.by_binary(replace(OPERATIONS[operation].sample, operation=operation), H200)
    assert kernels, why


def test_a_profile_that_found_nothing_out_fails(no_gpu):
    result = fused_softmax("--rows", "8", "--cols", "8", "--provider", "torch")
    assert (result.exit_code, result.output.splitlines()[1:]) == (
        1, ["torch: no counters: there is no GPU; only this package's kernels are compiled"]
    )  # fmt: skip
    assert result.output.startswith("8 x 8 float32 compiled for the built-in NVIDIA H200, as there is no GPU; ")


@pytest.mark.exhaustive
def test_two_kernels_of_a_call_are_both_compiled():
    kernels, _ = run.by_binary(Case((4, 2**23), "bfloat16"), H200)
    assert [kernel.name for kernel in kernels] == ["_stream_state", "_stream_forward"]


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch):
    """An ncu on PATH that says what it is told to, and keeps its arguments."""

    def install(csv_text, code=0):
        (tmp_path / "text").write_text(csv_text)
        script = tmp_path / "ncu"
        script.write_text(
            f"#!{sys.executable}\nimport pathlib, sys\n"
            f"here = pathlib.Path({str(tmp_path)!r})\n"
            "(here / 'arguments').write_text('\\n'.join(sys.argv[1:]))\n"
            "pathlib.Path(sys.argv[sys.argv.index('--log-file') + 1]).write_text((here / 'text').read_text())\n"
            f"sys.exit({code})\n"
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        return tmp_path / "arguments"

    return install


CASE = Case((1024, 131072), "bfloat16")
COMPILES_SOON = Case((1024, 4096), "bfloat16")


def test_counters_are_taken_where_ncu_gives_them(fake_ncu):
    arguments = fake_ncu(printed("three_kernels.csv"))
    found = run.profile(CASE, "naive", H200, gpu=True)
    assert (found.how, len(found.kernels), found.why) == ("counters (ncu)", 3, "")
    assert arguments.read_text().splitlines()[-4:] == ["softmax", "1024x131072", "bfloat16", "naive"]


def test_without_permission_the_binary_and_the_reason_are_given(fake_ncu):
    fake_ncu(printed("no_permission.txt"), 1)
    found = run.profile(COMPILES_SOON, "fused_softmax", H200, gpu=True)
    timed = torch.cuda.is_available()  # then by Proton
    assert found.how == ("Proton's times and the binary" if timed else "the binary for NVIDIA H200")
    assert "ERR_NVGPUCTRPERM" in found.why
    assert found.longest.registers
    found = run.profile(COMPILES_SOON, "torch", H200, gpu=True)
    assert timed or found.kernels == ()
    assert "ERR_NVGPUCTRPERM" in found.why


def test_protons_times_are_laid_over_the_binary(fake_ncu, monkeypatch):
    fake_ncu(printed("no_permission.txt"), 1)
    monkeypatch.setattr(run, "by_proton", lambda case, provider: {"_part_forward": (131.5, 1.0)})
    found = run.profile(COMPILES_SOON, "fused_softmax", H200, gpu=True)
    assert found.how == "Proton's times and the binary"
    assert (found.time_us, found.longest.registers is not None) == (131.5, True)
    found = run.profile(COMPILES_SOON, "torch", H200, gpu=True)
    assert (found.how, found.longest.registers) == ("Proton's times", None)


def test_without_ncu_that_is_the_reason():
    assert run.by_counters(CASE, "torch", None) == ([], "ncu is not on PATH: it comes with the CUDA toolkit")
    assert run.by_counters(CASE, "torch", "/nowhere/ncu") == ([], "ncu: No such file or directory")


def fused_softmax(*arguments):
    return CliRunner().invoke(cli.main, ["profile", *map(str, arguments)], prog_name="fused-softmax")


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(cli, "find_device", lambda: (H200, False))


def test_the_command_prints_one_table_and_why_counters_are_missing(no_gpu):
    result = fused_softmax("--M", 1024, "--N", 131072, "--dtype", "bf16", "--provider", "fused,torch")
    assert result.exit_code == 0, result.output
    for part in ("no call can move less than 512 MiB", "registers", "load widths", "16 x16", "there is no GPU"):
        assert part in result.output
    facts = json.loads(fused_softmax("--M", 64, "--N", 4096, "--provider", "fused", "--json").output)
    (found,) = facts["profiles"]
    assert found["kernels"][0]["registers"] > 0
    assert (facts["case"], facts["floor_bytes"]) == ("64 x 4096 float32", 2 * 4 * 64 * 4096)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--M", "8"], "Missing option '--cols'."),
        (["--M", "8", "--N", "8", "--op", "softmax_causal"], "takes shapes of 4 dims"),
        (["--M", "8", "--N", "8", "--op", "logsumexp", "--provider", "hybrid"], "logsumexp has no provider 'hybrid'"),
        (["--M", "8", "--N", "8", "--provider", "cudnn"], "unknown provider 'cudnn'"),
    ],
)
def test_a_bad_value_is_one_line_and_exit_code_2(no_gpu, arguments, complaint):
    result = fused_softmax(*arguments)
    assert result.exit_code == 2
    assert complaint in result.output
