"""What help and lists name, how each name may be spelled, and how soon help is there."""

import json
import re
import time
from importlib import import_module

import pytest
from commands import SHAPE, folder_without_work, fused_softmax, started

from fused_softmax import cli
from fused_softmax.bench import cases, catalog
from fused_softmax.bench.cases import ALIASES, DTYPE, ITEMSIZE
from fused_softmax.bench.entries import operations
from fused_softmax.bench.measure import measure, one, run, sweeps
from fused_softmax.bench.results import record
from fused_softmax.core.plan import H200


@pytest.fixture
def here(monkeypatch, tmp_path):
    return folder_without_work(monkeypatch, tmp_path)


def test_the_catalog_names_what_is_measured():
    assert {name: list(each.providers) for name, each in operations.OPERATIONS.items()} == {
        name: catalog.provider_names([name]) for name in catalog.PEERS
    }


def test_what_makes_each_call_is_a_function_of_its_file():
    for provider in catalog.PROVIDERS:
        for maker in (*provider.makes.values(), *provider.over_ranks.values()):
            file, name = maker.args[0].split(".")
            assert callable(getattr(import_module(f"fused_softmax.bench.entries.{file}"), name)), provider.name


@pytest.mark.parametrize("command", ["bench", "bench one", "bench compare", "bench tune", "profile"])
def test_help_and_list_name_all_there_is_to_choose(command):
    for option in ("--help", "--list"):
        result = fused_softmax(*command.split(), option)
        assert result.exit_code == 0
        words = result.output.split()
        names = [*catalog.PEERS, *ITEMSIZE, *ALIASES, *catalog.PROVIDER_ALIASES, "flashinfer", "chunks"]
        for name in [*names, *(sweeps.SWEEPS if command == "bench" else ())]:
            assert {name, f"{name},"} & set(words), name


@pytest.mark.parametrize("name", ["fused", "triton", "fused-softmax", "FUSED_SOFTMAX", "fused_softmax"])
@pytest.mark.parametrize(
    "command",
    [
        "bench custom --rows 2 --cols 8 --verify-only", "bench custom --M 2 --N 8 --verify-only",
        "bench one --rows 2 --cols 8 --iters 3 --profile-only", "bench one --M 2 --N 8 --iters 3 --profile-only",
        "profile --rows 2 --cols 8", "bench compare results.json results.json",
    ],
)  # fmt: skip
@pytest.mark.parametrize("option", ["--provider", "--backend"])
def test_every_spelling_is_taken_by_every_command(here, monkeypatch, command, option, name):
    seen = []
    monkeypatch.setattr(measure, "measure", lambda case, names, effort: seen.append((case, list(names))) or [])
    monkeypatch.setattr(run, "verify", lambda operations: iter(()))
    monkeypatch.setattr(record, "environment", lambda *_: {"torch": "", "triton": "", "python": "", "gpu": None})
    monkeypatch.setattr(one, "call_once", lambda case, name: seen.append((case, [name])))
    monkeypatch.setattr(cli, "find_device", lambda: (H200, False))
    monkeypatch.setattr("fused_softmax.profile.run.profile", lambda case, name, *_, gpu: seen.append((case, [name])))
    monkeypatch.setattr("fused_softmax.profile.run.print_table", lambda *_: None)
    result = fused_softmax(*command.split(), option, name)
    assert result.exit_code == 0, (result.output, result.exception)
    if "compare" not in command:
        ((case, names),) = seen
        assert (case.shape, case.dtype, names) == ((2, 8), DTYPE, ["fused_softmax"])


@pytest.mark.parametrize("option", ["--provider", "--backend"])
@pytest.mark.parametrize("name", ["fused", "triton", "Fused-Softmax"])
def test_over_ranks_our_spellings_are_both_transports(monkeypatch, option, name):
    seen = []
    monkeypatch.setattr("fused_softmax.bench.measure.shards.run", lambda asked, *_: seen.append(asked.names) or 0)
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(variable, "1")
    assert fused_softmax("bench", "shards", option, f"{name},one-gpu").exit_code == 0
    assert seen == [["fused_softmax collective", "fused_softmax peer", "one GPU"]]


def test_help_has_one_spelling_of_a_name():
    for command in ("bench", "bench one", "bench shards", "profile"):
        said = fused_softmax(*command.split(), "--list").output + fused_softmax(*command.split(), "--help").output
        for alias in (*catalog.PROVIDER_ALIASES, *ALIASES):
            elsewhere = [line for line in said.splitlines() if re.search(rf"\b{alias}\b", line) and "also" not in line]
            assert not [line for line in elsewhere if "default" in line or line.split()[0] == alias]


def test_names_are_found_however_they_are_spelled():
    for text, name in (
        ("Torch-Compile", "torch.compile"),
        ("compile", "torch.compile"),
        ("torch_chunked", "torch chunked"),
    ):
        assert cases.find("provider", text, catalog.provider_names(), catalog.PROVIDER_ALIASES) == name
    assert cases.find("sweep", "cross_entropy", sweeps.SWEEPS) == "cross-entropy"
    assert cases.find("operation", "cross-entropy", catalog.PEERS) == "cross_entropy"
    for known in (catalog.PEERS, sweeps.SWEEPS, catalog.provider_names()):
        assert [cases.find("name", name, known) for name in known] == list(known)
    with pytest.raises(ValueError, match="unknown sweep 'nothing'; known: tutorial"):
        cases.find("sweep", "nothing", sweeps.SWEEPS)


def test_a_single_figure_says_which_path_was_timed(monkeypatch):
    monkeypatch.setattr(measure, "on_gpu", lambda: False)
    monkeypatch.setattr(measure, "interpreting", lambda: False)
    found = json.loads(fused_softmax("bench", "one", *SHAPE, "--iters", 3, "--json").stdout)
    assert found["path"] == "torch's path on the CPU, for there is no GPU: no kernel of this package is timed"
    found = json.loads(fused_softmax("bench", "one", *SHAPE, "--iters", 3, "--backend", "naive", "--json").stdout)
    assert found["path"] == "naive on the CPU"


def seconds(*arguments):
    start = time.perf_counter()
    process = started(*arguments)
    assert process.communicate()[1] == ""
    return time.perf_counter() - start


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", ["", "bench", "report"])
def test_help_is_there_at_once(command):
    """In turns, and the least of several: a busy machine slows one of them alone."""
    pairs = [
        (seconds("-c", "import click"), seconds("-m", "fused_softmax", *command.split(), "--help")) for _ in range(4)
    ]
    click, help = map(min, zip(*pairs, strict=True))
    assert help <= 2 * click + 0.15


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["bench", "--list"], ["bench", "--dtype", "int8"]])
def test_help_and_wrong_names_import_no_pytorch(arguments):
    script = f"""
import sys
from fused_softmax.cli import main
try:
    main({arguments})
except SystemExit:
    pass
assert not {{"torch", "triton", "rich"}} & set(sys.modules)
"""
    process = started("-c", script)
    process.communicate()
    assert process.returncode == 0
