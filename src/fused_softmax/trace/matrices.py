"""Reads matrices from files."""

import contextlib
import sys
from pathlib import Path
from typing import Any

import numpy as np

from fused_softmax.trace import printed

MOST_BYTES = 2**20  # of a matrix as text


def read_matrix(path: str) -> Any:
    """The matrix in a .npy file, or as text in a file or on standard input ("-").

    A line of text is a row. Commas, semicolons, tabs or spaces separate its numbers, which may be inf, -inf and nan.
    JSON and what torch and NumPy print are read too. Empty lines and everything after a # are skipped. Raises
    ValueError if there is no matrix, OSError if reading fails.
    """
    if path.endswith(".npy"):
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{Path(path).name} is not an array of numbers: {error}") from None
    if path == "-" and sys.stdin is None:
        raise ValueError("standard input is closed")
    with contextlib.nullcontext(sys.stdin.buffer) if path == "-" else open(path, "rb") as file:
        data = file.read(MOST_BYTES + 1)
    name = "standard input" if path == "-" else Path(path).name
    if len(data) > MOST_BYTES:
        raise ValueError(f"{name} is larger than {MOST_BYTES} bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{name} is not text") from None
    return printed.rows_of(text, name)
