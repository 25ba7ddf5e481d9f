"""The runner of other projects' tests, on a checkout that is made up; of their own tests none is run here."""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from peers import run

FILE = "tests/test_made_up.py"
TESTS = """
import attorch, pytest, torch

def test_before():
    assert attorch.Softmax(-1)(torch.zeros(2)).tolist() == [0.5, 0.5]

def test_that_loses_cuda():
    raise RuntimeError("CUDA error: device-side assert triggered\\nlast words")

def test_afterwards():
    assert attorch.Softmax.__module__ == "attorch"

@pytest.mark.skip
def test_that_is_skipped(): ...
"""
SUITE = run.Suite("somebody/attorch", (FILE,), "attorch")

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture
def checkouts(tmp_path):
    """A folder with one checkout, whose test file is committed."""
    folder = tmp_path / "checkouts" / "attorch"
    (folder / FILE).parent.mkdir(parents=True)
    (folder / FILE).write_text(TESTS)
    identity = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.com", "-c", "commit.gpgsign=false")
    for command in (("init", "-q"), ("add", "."), (*identity, "commit", "-q", "-m", "A test")):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder.parent


def ran(checkouts, suites, *arguments):
    out = checkouts.parent / "peers.json"
    failed = run.main([str(checkouts), "--out", str(out), *arguments], suites)
    return failed, json.loads(out.read_text())


def test_a_suite_that_is_there_and_one_that_is_not(checkouts, capsys):
    suites = {"there": SUITE, "missing": replace(SUITE, repository="somebody/else")}
    suites["moved"] = replace(SUITE, files=("tests/test_moved.py",))
    failed, results = ran(checkouts, suites)
    assert failed
    assert results.pop("missing") == {"status": "absent: no checkout of somebody/else"}
    moved = results.pop("moved")["status"]
    assert moved.startswith("absent: somebody/attorch: ")
    assert "tests/test_moved.py" in moved
    result = results.pop("there")
    result.pop("seconds")
    assert result == {
        "status": "ended", "collected": 4, "chosen": 4, "passed": 2, "failed": 1, "skipped": 1, "not_run": 0,
        "failures": [{"id": f"{FILE}::test_that_loses_cuda", "last": "last words"}],
    }  # fmt: skip
    assert not results
    assert "1 failed" in capsys.readouterr().out


def test_a_suite_that_takes_too_long_is_stopped(checkouts):
    failed, results = ran(checkouts, {"slow": SUITE}, "--seconds", "0.5")
    assert not failed
    assert results["slow"]["status"] == "stopped after 0 s"
    assert results["slow"]["passed"] == 0


def test_pytest_that_does_not_start_is_a_failure(checkouts):
    failed, results = ran(checkouts, {"odd": replace(SUITE, arguments=("--no-such-option",))})
    assert failed
    assert results["odd"]["status"].startswith("pytest exited with 4: ")


def test_an_unknown_suite_is_named(checkouts, capsys):
    with pytest.raises(SystemExit):
        run.main([str(checkouts), "--only", "quak"])
    assert "no suite quak; there are quack, " in capsys.readouterr().err


@pytest.mark.parametrize("name", run.SUITES)
def test_a_suites_shim_is_there(name):
    assert (Path(run.HERE) / "shims" / run.SUITES[name].shim).is_dir()
