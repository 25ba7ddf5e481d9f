"""Installs this checkout into .venv by pip, and shows how far it is: `python make_env.py cli,viz .venv/.demo`.

The arguments are the extras, and the file that says that it is done. On a terminal one line moves; elsewhere each stage
is a line. Standard library only: nothing else is installed yet.
"""

import contextlib
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

VENV = Path(".venv")
WIDTH = 24  # of the bar


class Line:
    """What is going on. update: often, on a terminal. stage: a line of its own elsewhere."""

    def __init__(self, terminal):
        self.terminal, self.began = terminal, time.monotonic()

    @property
    def seconds(self):
        return f"{time.monotonic() - self.began:.0f} s"

    def update(self, text):
        if self.terminal:
            most = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"\r\x1b[2K{f'{self.seconds}  {text}'[:most]}")
            sys.stderr.flush()

    def stage(self, text):
        if not self.terminal:
            self.say(text)

    def say(self, text):
        sys.stderr.write(f"\r\x1b[2K{text}\n" if self.terminal else f"{text}\n")
        sys.stderr.flush()


class Pip:
    """What pip's lines say: the packages that it collected, their megabytes, and those that it then installs."""

    def __init__(self):
        self.collected, self.megabytes, self.current, self.installing = 0, 0.0, "", 0

    def read(self, line):
        if match := re.match(r"Collecting ([\w.-]+)", line):
            self.collected, self.current = self.collected + 1, match[1]
        elif match := re.match(r"\s*Downloading (\S+)-\d\S* \(([\d.]+) (kB|MB|GB)\)", line):
            if not line.split(" (")[0].endswith(".metadata"):
                self.current = match[1].rpartition("/")[2]
                self.megabytes += float(match[2]) * {"kB": 1e-3, "MB": 1, "GB": 1e3}[match[3]]
        elif line.startswith("Installing collected packages: "):
            self.installing = line.count(",") + 1

    def text(self, installed):
        """installed: how many packages are there by now."""
        if not self.installing:
            of = f", {self.megabytes:.0f} MB" if self.megabytes >= 1 else ""
            return f"collecting packages: {self.collected}{of}, now {self.current or 'pip'}"
        filled = WIDTH * min(installed, self.installing) // self.installing
        return f"installing [{'#' * filled}{'-' * (WIDTH - filled)}] {installed} of {self.installing}"


def installed():
    """The packages of the environment: each that is there whole has a list of its files, which pip writes last."""
    return set(VENV.glob("lib/python*/site-packages/*.dist-info/RECORD"))


def install(extras, line):
    """pip's exit status."""
    # Compiling all modules takes half of the time, and Python compiles those that it imports.
    command = [VENV / "bin/python", "-m", "pip", "install", "--no-compile", "--constraint", "constraints.txt"]
    command += ["--no-input", "--disable-pip-version-check", "--editable", f".[{extras}]"]
    before, pip, said = installed(), Pip(), []
    lines = queue.SimpleQueue()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, **pipes, env=os.environ | {"LC_ALL": "C.UTF-8"}) as process:
        reader = threading.Thread(target=lambda: [lines.put(each) for each in process.stdout], daemon=True)
        reader.start()
        while reader.is_alive() or not lines.empty():
            with contextlib.suppress(queue.Empty):
                said.append(lines.get(timeout=0.2))
                had = pip.installing
                pip.read(said[-1])
                if pip.installing and not had:
                    line.stage(f"installing {pip.installing} packages; {pip.megabytes:.0f} MB were downloaded")
            line.update(pip.text(len(installed() - before)))
    if process.returncode:
        line.say("".join(said[-20:]) + "pip could not make .venv; what it said is above")
    return process.returncode


def main(extras, done):
    line = Line(sys.stderr.isatty())
    what = "PyTorch, Triton and what measures and draws" + (", tests and documents" if "dev" in extras else "")
    line.say(f"making .venv, once: pip downloads {what}")
    try:
        if not (VENV / "bin/pip").exists():
            line.update("making an empty environment")
            subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
        if status := install(extras, line):
            return status
    except subprocess.CalledProcessError as error:  # it says what is missing, as pip on Debian
        return error.returncode
    except KeyboardInterrupt:
        line.say("interrupted: make goes on from here")
        return 130
    Path(done).touch()
    taken = sum(path.lstat().st_size for path in VENV.rglob("*") if not path.is_dir())
    line.say(f"made .venv in {line.seconds}: {taken / 1e9:.1f} GB")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
