"""How .venv is made: what is shown meanwhile, and what of it each target of make asks for."""

import importlib.util
import io
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Stands for the environment's Python, of which pip alone is asked.
PYTHON = """#!/bin/sh
echo "$@" > asked
echo "Collecting torch==2.13.0"
echo "  Downloading https://a.example/torch-2.13.0-cp311-cp311-linux_x86_64.whl.metadata (31 kB)"
echo "  Downloading https://a.example/torch-2.13.0-cp311-cp311-linux_x86_64.whl (187.5 MB)"
echo "Collecting rich>=13 (from fused-softmax)"
echo "  Downloading rich-15.0.0-py3-none-any.whl (512 kB)"
if [ -e broken ]; then echo "ERROR: no such release"; exit 3; fi
echo "Installing collected packages: rich, torch"
for name in rich-15.0.0 torch-2.13.0; do
  mkdir -p ".venv/lib/python3.11/site-packages/$name.dist-info"
  touch ".venv/lib/python3.11/site-packages/$name.dist-info/RECORD"
done
sleep 0.5
"""


@pytest.fixture
def make_env(monkeypatch, tmp_path):
    """The script, in a folder whose environment has the stand-in."""
    spec = importlib.util.spec_from_file_location("make_env", ROOT / "make_env.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.chdir(tmp_path)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    (tmp_path / ".venv/bin/pip").touch()
    return module


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_elsewhere_than_on_a_terminal_each_stage_is_a_line(make_env, capsys):
    assert make_env.main("cli,viz", ".venv/.demo") == 0
    first, second, third = capsys.readouterr().err.splitlines()
    assert first == "making .venv, once: pip downloads PyTorch, Triton and what measures and draws"
    assert second == "installing 2 packages; 188 MB were downloaded"
    assert third.startswith("made .venv in ")
    assert Path("asked").read_text().split()[-1] == ".[cli,viz]"
    assert Path(".venv/.demo").exists()


def test_on_a_terminal_one_line_says_what_is_collected_and_a_bar_what_is_installed(make_env, monkeypatch):
    monkeypatch.setattr(make_env.sys, "stderr", screen := Terminal())
    monkeypatch.setenv("COLUMNS", "100")
    assert make_env.main("dev,docs", ".venv/.ready") == 0
    shown = screen.getvalue().split("\r\x1b[2K")
    assert any("collecting packages: 2, 188 MB, now rich" in each for each in shown)
    assert any("installing [########################] 2 of 2" in each for each in shown)
    assert all("\n" not in each for each in shown[2:-1]), "the line moves down"
    assert (
        shown[1]
        == "making .venv, once: pip downloads PyTorch, Triton and what measures and draws, tests and documents\n"
    )


def test_what_pip_says_of_a_failure_is_shown_and_the_environment_is_not_ready(make_env, capsys):
    Path("broken").touch()
    assert make_env.main("cli,viz", ".venv/.demo") == 3
    assert "ERROR: no such release" in capsys.readouterr().err
    assert not Path(".venv/.demo").exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_demo_asks_for_what_it_needs_or_for_what_is_there(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)

    def asked(*words):
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PY"))}
        done = subprocess.run(
            ["make", "-n", *words], cwd=tmp_path, env=plain, capture_output=True, text=True, check=True
        )
        return [line.split()[2:] for line in done.stdout.splitlines() if "make_env.py" in line]

    assert asked("demo") == [["cli,viz", ".venv/.demo"]]
    assert asked("lint") == [["dev,docs", ".venv/.ready"]]
    assert asked("demo", "PY=python3") == []
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/.demo").touch()
    assert asked("demo") == []
    (tmp_path / ".venv/.ready").touch()
    (tmp_path / ".venv/.demo").unlink()
    assert asked("demo") == []
