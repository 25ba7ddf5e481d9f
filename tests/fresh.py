"""Environments that hold what is put into them and nothing of this checkout."""

import os
import subprocess
from pathlib import Path

SMOKE = Path(__file__).with_name("smoke.py")


class Failed(Exception):
    """A command failed; the text is the end of its output."""


def run(*command, cwd=None, timeout=None):
    """The output of a command, which sees neither this checkout nor what the package is told by the environment."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "FUSED_SOFTMAX_INTERPRET", "TRITON_INTERPRET")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    try:
        done = subprocess.run(
            [str(part) for part in command], cwd=cwd, env=environment, timeout=timeout,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Failed(f"no end after {timeout:.0f} s") from None
    if done.returncode:
        raise Failed("\n".join(done.stdout.strip().splitlines()[-15:]))
    return done.stdout.strip()


def smoke(folder, interpreter, version, *requirements, timeout=None):
    """Install requirements for pip into a new environment in `folder`, and take a first look at the package there."""
    run(interpreter, "-m", "venv", folder / "venv")
    python = folder / "venv/bin/python"
    run(python, "-m", "pip", "install", "--quiet", *requirements, cwd=folder, timeout=timeout)
    return run(python, SMOKE, version, cwd=folder, timeout=timeout)
