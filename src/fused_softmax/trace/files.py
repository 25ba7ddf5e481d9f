"""Reads matrices from files. Writes pages and recordings whole, and overwrites a file only if forced."""

import contextlib
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

MOST_BYTES = 2**20  # of a matrix as text

_WORDS = {"inf": "inf", "+inf": "inf", "-inf": "-inf", "nan": "nan", "infinity": "inf", "-infinity": "-inf"}


def read_matrix(path: str) -> Any:
    """The matrix in a .npy file, or as rows of numbers in a text file or on standard input ("-").

    A line of text is a row. Commas, semicolons or spaces separate its numbers, which may be inf, -inf and nan. Empty
    lines and everything after a # are skipped. Raises ValueError if there is no matrix, OSError if reading fails.
    """
    if path.endswith(".npy"):
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{Path(path).name} is not an array of numbers: {error}") from None
    with contextlib.nullcontext(sys.stdin.buffer) if path == "-" else open(path, "rb") as file:
        data = file.read(MOST_BYTES + 1)
    name = "standard input" if path == "-" else Path(path).name
    if len(data) > MOST_BYTES:
        raise ValueError(f"{name} is larger than {MOST_BYTES} bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{name} is not text") from None
    rows = [_row(line, f"{name}, line {at}") for at, line in enumerate(text.splitlines(), 1)]
    return [row for row in rows if row]


def _row(line: str, where: str) -> list[float]:
    words = [word for word in re.split(r"[,;\s]+", line.partition("#")[0]) if word]
    row = []
    for at, word in enumerate(words, 1):
        try:
            row.append(float(word))
        except ValueError:
            raise ValueError(f"{where}, number {at}: {word[:40]!r} is not a number") from None
        if row[-1] in (np.inf, -np.inf) and word.lower() not in _WORDS:
            raise ValueError(f"{where}, number {at}: {word[:40]} is too large for any float")
    return row


def write(path: Path, text: str, *, force: bool = False) -> None:
    """Write a file whole: beside its place, then into it. Raises FileExistsError if it exists, unless forced.

    Any other OSError names the file.
    """
    if path.exists() and not force:
        raise FileExistsError(f"{path} exists")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(descriptor, "w") as temporary:
                temporary.write(text)
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(name, 0o666 & ~mask)
            if force:
                os.replace(name, path)
            else:
                os.link(name, path)  # fails if the file has appeared in the meantime
                os.unlink(name)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
