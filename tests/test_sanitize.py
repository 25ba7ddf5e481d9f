"""What `make sanitize` launches, without the tools that need a GPU; and what it says where they are missing."""

import subprocess
import sys

import pytest
import sanitize
import sanitize_calls
import torch
from sanitize import ALIGNMENTS, DTYPES, SHAPES, launch


@pytest.mark.skipif(not sanitize.INTERPRET and not torch.cuda.is_available(), reason="no GPU and no interpreter")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("strategy", SHAPES)
def test_what_it_launches_is_right(strategy, alignment, dtype, device):
    launch(strategy, alignment, dtype, device)


@pytest.mark.skipif(not sanitize.INTERPRET and not torch.cuda.is_available(), reason="no GPU and no interpreter")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", sanitize_calls.NAMES)
def test_what_it_calls_is_right(name, dtype, device):
    sanitize_calls.call(name, dtype, device)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with a GPU and a compute-sanitizer that records how it is called; which of both is for the test."""
    ran = []

    def run(command, env):
        ran.append((command, env))
        return subprocess.CompletedProcess(command, 0)

    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.touch(mode=0o755)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(subprocess, "run", run)
    return tool, ran


def test_each_tool_runs_the_launches_in_a_process_that_does_not_interpret(machine, capsys):
    tool, ran = machine
    sanitize.main([])
    (plain, _), *under = ran
    assert plain[0] == sys.executable
    assert plain[-1] == "--launch"
    assert [command[:3] for command, _ in under] == [[str(tool), "--tool", name] for name in ("memcheck", "racecheck")]
    for command, environment in under:
        assert command[-len(plain) :] == plain
        assert environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
        assert not environment.keys() & {"FUSED_SOFTMAX_INTERPRET", "TRITON_INTERPRET"}
    assert capsys.readouterr().out.endswith("nothing found\n")


def test_one_tool_alone(machine):
    sanitize.main(["--tool", "racecheck"])
    assert ["memcheck" in command for command, _ in machine[1]] == [False, False]


def test_what_a_tool_finds_fails_the_run(machine, monkeypatch):
    monkeypatch.setattr(
        subprocess, "run", lambda command, env: subprocess.CompletedProcess(command, "racecheck" in command)
    )
    with pytest.raises(SystemExit, match="racecheck failed"):
        sanitize.main([])


def test_a_missing_tool_is_named(machine, monkeypatch):
    monkeypatch.setattr(sanitize, "sanitizer", lambda: None)
    with pytest.raises(SystemExit, match="compute-sanitizer is neither on PATH nor in"):
        sanitize.main([])
    assert not machine[1]


def test_a_missing_gpu_is_named(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="torch sees no NVIDIA GPU"):
        sanitize.main([])
    assert not machine[1]
