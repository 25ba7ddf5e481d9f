"""The command lines of the examples: a wrong value gives a one-line error and exit code 2 before any work begins.

On a terminal a sign turns for as long as an example runs, because the import of PyTorch alone takes seconds.
"""

import argparse
import atexit
import itertools
import math
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NoReturn


def _turn(ended: threading.Event) -> None:
    """The next line of output overwrites the sign."""
    signs = itertools.cycle("|/-\\")
    while not ended.is_set():
        print(f"{next(signs)}\r", end="", file=sys.stderr, flush=True)
        ended.wait(0.2)
    print(" \r", end="", file=sys.stderr, flush=True)


if sys.stderr is not None and sys.stderr.isatty():
    _ended = threading.Event()
    _turning = threading.Thread(target=_turn, args=(_ended,), daemon=True)
    _turning.start()

    @atexit.register
    def _end() -> None:
        _ended.set()
        _turning.join()


import torch  # noqa: E402  (the sign turns already)

FORMATS = (".png", ".svg", ".pdf")
MOST = 2**31 - 1  # what sizes of 32 bits hold
BEST_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def in_one_line(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """The hook for errors that end an example. Python's own shows those that are a fault of the example."""
    if issubclass(kind, KeyboardInterrupt):
        said = "interrupted"
    elif isinstance(error, ModuleNotFoundError) and error.name:
        said = (
            f"{error.name.partition('.')[0]} is missing; `pip install 'fused-softmax[dev]'` installs what examples need"
        )
    elif isinstance(error, OSError) and error.strerror:
        said = f"{error.strerror}: {Path(error.filename).name}" if error.filename else error.strerror
    elif issubclass(kind, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
        said = f"too little memory: {str(error).rpartition('DefaultCPUAllocator: ')[2].partition('. ')[0]}"
    else:
        return sys.__excepthook__(kind, error, traceback)
    print(f"{Path(sys.argv[0]).name}: error: {said}", file=sys.stderr)


sys.excepthook = in_one_line  # at once, for what an example imports next may be missing


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line. picture: the file that is written unless -o names another."""

    def __init__(self, about: str | None, picture: str | None = None):
        super().__init__(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
        if picture:
            formats = ", ".join(FORMATS)
            self.add_argument("-o", "--out", type=file_of_picture, default=picture, help=f"the picture: {formats}")
            self.add_argument("--force", action="store_true", help="overwrite the picture if it exists")

    def parse(self, arguments: list[str] | None) -> argparse.Namespace:
        given = self.parse_args(arguments)
        if "out" in given and (given.out.exists() or given.out.is_symlink()) and not given.force:
            self.error(f"{given.out.name} exists; --force overwrites it")
        return given

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def whole(least: int = 1, most: int = MOST) -> Callable[[str], int]:
    """The type of an option that takes a whole number from `least` to `most`."""

    def number(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,20}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, got {text[:40]!r}")
        return int(text)

    return number


def real(least: float, most: float) -> Callable[[str], float]:
    """The type of an option that takes a number from `least` to `most`."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be a number from {least} to {most}, got {text[:40]!r}")
        return value

    return number


def device(text: str) -> str:
    """cpu, cuda or cuda:N, if this machine has that device."""
    found = re.fullmatch(r"cpu|cuda(?::([0-9]{1,3}))?", text)
    if not found:
        raise argparse.ArgumentTypeError(f"must be cpu, cuda or cuda:N, got {text[:40]!r}")
    if text != "cpu" and int(found[1] or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(f"this machine has no {text}")
    return text


def file_of_picture(text: str) -> Path:
    """A file that can be written, in a folder that exists. Its suffix names the format."""
    path = Path(text)
    if path.suffix not in FORMATS:
        raise argparse.ArgumentTypeError(f"must end in one of {', '.join(FORMATS)}, got {path.name}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent.name}")
    try:
        if path.exists() and not path.is_file():
            raise argparse.ArgumentTypeError(f"{path.name} is no file")
        if path.exists() and not os.access(path, os.W_OK):
            raise argparse.ArgumentTypeError(f"{path.name} may not be written")
        tempfile.TemporaryFile(dir=path.parent).close()  # /proc has folders whose modes allow a file, and takes none
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {path.name[:40]}: {error.strerror}") from None
    return path
