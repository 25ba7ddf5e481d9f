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
from fused_softmax.profile import run as profiling
from fused_softmax.profile import table
from fused_softmax.profile.parse import Kernel


@pytest.fixture
def here(monkeypatch, tmp_path):
    return folder_without_work(monkeypatch, tmp_path)


def test_the_catalog_names_what_is_measured():
    assert {name: list(each.providers) for name, each in operations.OPERATIONS.items()} == {
        name: catalog.provider_names([name]) for name in catalog.PEERS
    }


def test_what_makes_each_call_is_a_function_of_its_file():
    for provider in catalog.PROVIDERS:
        for maker in (*provider.makes.values(), *provider.over_ranks.values(), *provider.steps.values()):
            file, name = maker.args[0].split(".")
            assert callable(getattr(import_module(f"fused_softmax.bench.entries.{file}"), name)), provider.name


OPERATIONS, PROVIDERS = [*catalog.PEERS], [*catalog.PROVIDER_ALIASES, "flashinfer", "chunks"]
OF_ROWS = [name for name in OPERATIONS if sweeps.ndim_of(name) in (2, None)]
OF_OTHERS = [name for name in OPERATIONS if name not in OF_ROWS]
DTYPES = [*ITEMSIZE, *ALIASES]


@pytest.mark.parametrize(
    ("command", "names", "others"),
    [
        ("bench", [*OPERATIONS, *PROVIDERS, *DTYPES, *sweeps.SWEEPS], ()),
        ("bench one", [*OF_ROWS, *PROVIDERS[:-1], *DTYPES], ["few-rows", "xformers", *OF_OTHERS]),
        ("bench compare", PROVIDERS, ["softmax_backward", *DTYPES]),
        ("bench tune", ["softmax", "softmax_backward", *DTYPES], ["logsumexp", "liger"]),
        ("profile", [*OF_ROWS, *PROVIDERS[:-1], *DTYPES], ["few-rows", "xformers", *OF_OTHERS]),
    ],
)
def test_help_and_list_name_all_there_is_to_choose_and_nothing_else(command, names, others):
    for option in ("--help", "--list"):
        result = fused_softmax(*command.split(), option)
        assert result.exit_code == 0
        words = {word.rstrip(",") for word in result.output.split()}
        assert not [name for name in names if name not in words]
        assert not [name for name in others if name in words]


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
    monkeypatch.setattr(run, "verify", lambda *_: iter(()))
    monkeypatch.setattr(record, "environment", lambda *_: {"torch": "", "triton": "", "python": "", "gpu": None})
    monkeypatch.setattr(one, "call_once", lambda case, name: seen.append((case, [name])))
    monkeypatch.setattr(cli, "find_device", lambda: (H200, False))
    found = table.Profile("", "", (Kernel("k"),))
    monkeypatch.setattr(profiling, "profile", lambda case, name, *_, gpu: seen.append((case, [name])) or found)
    monkeypatch.setattr(profiling, "print_table", lambda *_, **__: None)
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


def test_of_many_names_the_nearest_are_said():
    said = "^unknown operation 'cross entropies'; near it: cross_entropy, [a-z_, ]+; --list names all$"
    with pytest.raises(ValueError, match=said):
        cases.find("operation", "cross entropies", catalog.PEERS)
    with pytest.raises(ValueError, match=r"^unknown operation '#'; --list names all$"):
        cases.find("operation", "#", catalog.PEERS)
    result = fused_softmax("bench", "all", "--out", "x", "--only", "h200_softmx")
    assert result.stderr.endswith(
        "named 'h200_softmx'; near it: h200_softmax, h100_softmax, h200_step; --dry-run lists them all\n"
    )


@pytest.mark.parametrize("command", ["bench one", "profile", "bench"])
def test_errors_name_an_option_as_help_does(command):
    """--M, --N and --backend are taken, and no help knows them."""
    for arguments in (
        ("--rows", "x", "--cols", "8"),
        ("--M", "8", "--N", "x"),
        ("--backend", "cudnn"),
        ("--rows", "8"),
    ):
        said = fused_softmax(*command.split(), *arguments, *(("--resume",) if command == "bench" else ())).stderr
        assert said.startswith("Error: ")
        assert not re.search("--(M|N|backend)\\b", said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("bench", "one", *SHAPE, "--iters", "x"), "'--iters': 'x' is not a valid integer."),
        (("serve", "--port", "x"), "'--port': 'x' is not a valid integer."),
        (("warm", "--for", "train", "--vocab", "x"), "'--vocab': 'x' is not a valid integer."),
        (("bench", "compare", "a", "b", "--tolerance", "x"), "'--tolerance': 'x' is not a valid number."),
        (("bench", "compare", "a", "b", "--tolerance", "nan"), "'--tolerance': 'nan' is not a finite number."),
    ],
)
def test_what_is_no_number_is_not_called_a_range(arguments, said):
    result = fused_softmax(*arguments)
    assert (result.exit_code, result.stderr) == (2, f"Error: Invalid value for {said}\n")


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
