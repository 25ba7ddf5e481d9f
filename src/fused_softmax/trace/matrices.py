"""Reads matrices from files."""

import contextlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import MAGIC_PREFIX

from fused_softmax.trace import printed

MOST_BYTES = 2**20  # of a matrix as text


def read_matrix(path: str) -> Any:
    """The matrix in a .npy file, or as text in a file or on standard input ("-").

    A line of text is a row. Commas, semicolons, tabs or spaces separate its numbers, which may be inf, -inf and nan.
    JSON and what torch and NumPy print are read too. Empty lines and everything after a # are skipped. Raises
    ValueError if there is no matrix, OSError if reading fails.
    """
    if path.endswith(".npy"):
        return _array(Path(path))
    if path == "-" and sys.stdin is None:
        raise ValueError("standard input is closed")
    with contextlib.nullcontext(sys.stdin.buffer) if path == "-" else open(path, "rb") as file:
        data = file.read(MOST_BYTES + 1)
    name = "standard input" if path == "-" else Path(path).name
    if len(data) > MOST_BYTES:
        raise ValueError(f"{name} has more than {MOST_BYTES} bytes: a matrix as text is smaller")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{name} is neither text in UTF-8 nor a .npy file") from None
    return printed.rows_of(text, name)


def _array(path: Path) -> np.ndarray:
    """The array of a .npy file. What NumPy says of other files, such as to load them as pickles, is for programmers."""
    with path.open("rb") as file:
        if file.read(len(MAGIC_PREFIX)) != MAGIC_PREFIX:
            raise ValueError(f"{path.name} is not a .npy file as numpy.save writes it")
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception as error:
        what = "holds Python objects, not numbers" if "Python objects" in str(error) else "is cut short or damaged"
        raise ValueError(f"{path.name} {what}") from error
