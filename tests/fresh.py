"""Environments that hold what is put into them and nothing of this checkout."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SMOKE = Path(__file__).with_name("smoke.py")


class Failed(Exception):
    """A command failed; the text is the end of its output."""


class TooLate(Failed):
    """A command did not end in time."""


def run(*command, cwd=None, timeout=None, errors=True):
    """The output of a command, which sees neither this checkout nor what the package is told by the environment.

    errors: whether what it writes to stderr is part of it.
    """
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "FUSED_SOFTMAX_INTERPRET", "TRITON_INTERPRET")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    with subprocess.Popen(
        [str(part) for part in command], cwd=cwd, env=environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT if errors else subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        try:
            said, _ = process.communicate(timeout=timeout)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # pip for another interpreter is a process of a process
            if isinstance(error, subprocess.TimeoutExpired):
                raise TooLate(f"no end after {timeout:.0f} s") from None
            raise
    if process.returncode:
        raise Failed("\n".join(said.strip().splitlines()[-15:]))
    return said.strip()


def environment(folder, interpreter):
    """The Python of a new environment in `folder`."""
    run(interpreter, "-m", "venv", "--without-pip", folder / "venv")
    return folder / "venv/bin/python"


def install(python, *requirements, **more):
    """By the pip of this interpreter's environment, which takes seconds less than one in each."""
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile")
    run(*pip, *requirements, **more)


def smoke(folder, interpreter, version, *requirements, timeout=None):
    """Install requirements for pip into a new environment in `folder`, and take a first look at the package there.

    timeout: of the installation and the look together.
    """
    ends = time.monotonic() + (timeout or 0)
    python = environment(folder, interpreter)
    install(python, *requirements, cwd=folder, timeout=timeout)
    left = max(1, ends - time.monotonic()) if timeout else None
    return run(python, SMOKE, version, cwd=folder, timeout=left)
