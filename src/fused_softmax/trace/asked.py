"""Checks a request for a recording before anything runs: a kernel, a matrix, a block, a dtype.

Every error is a ValueError that names the fault and its place. Nothing here runs, imports or opens its input.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fused_softmax.core.described import described, number_of
from fused_softmax.trace.entries.kernel import DTYPES, kernels
from fused_softmax.trace.recorder.encode import dtype_name

MOST_ELEMENTS = 4096
MOST_BLOCK = 4096
_DTYPES = {name: getattr(torch, name) for name in DTYPES}
_NOT_FINITE = {"inf": math.inf, "+inf": math.inf, "-inf": -math.inf, "nan": math.nan}


@dataclass(frozen=True)
class Asked:
    """x [n_rows, n_cols] on the CPU, contiguous."""

    kernel: str
    x: Tensor
    block: int


def asked(kernel: Any, matrix: Any, block: Any = None, dtype: Any = None) -> Asked:
    """The checked request, or a ValueError.

    matrix: a tensor or array [n_rows, n_cols], or rows of numbers, in which "inf", "-inf" and "nan" may be text.
    block: columns of a tile, a power of two. By default 4, or less so that a row has more than one tile.
    """
    if not isinstance(kernel, str) or kernel not in kernels():
        raise ValueError(f"unknown kernel {_shown(kernel)}; known: {', '.join(kernels())}")
    entry = kernels()[kernel]
    x = to_matrix(matrix, dtype)
    name = dtype_name(x.dtype)
    if name not in entry.dtypes:
        raise ValueError(f"{kernel} takes {', '.join(entry.dtypes)}, not {name}: give one of these as dtype")
    if entry.check is not None:
        entry.check(x)
    if block is None:
        block = min(4, 1 << max(0, (x.shape[1] - 1).bit_length() - 1))
    if not isinstance(block, int) or isinstance(block, bool) or not 1 <= block <= MOST_BLOCK or block & (block - 1):
        raise ValueError(f"block must be a power of two from 1 to {MOST_BLOCK}, got {_shown(block)}")
    return Asked(kernel, x, block)


def to_matrix(matrix: Any, dtype: Any = None) -> Tensor:
    """A matrix as a tensor of `dtype`; by default of its own dtype if that is floating, else of float32."""
    wanted = None if dtype is None else _dtype(dtype)
    if hasattr(matrix, "__array__") and not isinstance(matrix, Tensor):
        _check_shape(tuple(getattr(matrix, "shape", ())))
        array = np.array(matrix)
        try:
            matrix = torch.as_tensor(array)
        except TypeError:
            raise ValueError(f"matrix must hold numbers, got an array of {array.dtype.name}") from None
    if isinstance(matrix, Tensor):
        x = matrix.detach().cpu()
        own = x.dtype if x.dtype in _DTYPES.values() else torch.float32
        _check_shape(tuple(x.shape))
        if x.dtype.is_complex:
            raise ValueError(f"matrix must hold real numbers, got {x.dtype}")
        return _fit(x.double(), wanted or own).clone(memory_format=torch.contiguous_format)
    rows = _rows(matrix)
    return _fit(torch.tensor(rows, dtype=torch.float64), wanted or torch.float32)


def _rows(matrix: Any) -> list[list[float]]:
    if not isinstance(matrix, Sequence) or isinstance(matrix, str | bytes):
        raise ValueError(f"matrix must be a list of rows of numbers, got {_kind(matrix)}")
    for at, row in enumerate(matrix):
        if not isinstance(row, Sequence) or isinstance(row, str | bytes):
            raise ValueError(f"row {at} must be a list of numbers, got {_kind(row)}")
    n_cols = len(matrix[0]) if matrix else 0
    for at, row in enumerate(matrix):
        if len(row) != n_cols:
            first = number_of(n_cols, "column")
            raise ValueError(f"all rows must have the same length: row 0 has {first}, row {at} has {len(row)}")
    _check_shape((len(matrix), n_cols))
    return [[_number(value, at, col) for col, value in enumerate(row)] for at, row in enumerate(matrix)]


def _number(value: Any, row: int, col: int) -> float:
    where = f"row {row}, column {col}"
    if isinstance(value, str):
        if value.lower() not in _NOT_FINITE:
            raise ValueError(f'{where}: {_shown(value)} is not a number, and not "inf", "-inf" or "nan"')
        return _NOT_FINITE[value.lower()]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where}: must be a number, got {_kind(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{where}: an integer too large for any float") from None


def _fit(x: Tensor, dtype: torch.dtype) -> Tensor:
    fitted = x.to(dtype)
    lost = (x.isfinite() & ~fitted.isfinite()).nonzero()
    if len(lost):
        row, col = lost[0].tolist()
        value, most = x[row, col].item(), torch.finfo(dtype).max
        raise ValueError(f"row {row}, column {col}: {value:g} is past {most:g}, the largest {dtype_name(dtype)}")
    return fitted


def _check_shape(shape: tuple[int, ...]) -> None:
    if len(shape) != 2:
        raise ValueError(f"matrix must be 2-D, [rows, columns], got {len(shape)}-D")
    if not all(shape):
        raise ValueError(f"matrix must have at least one row and one column, got {shape[0]} x {shape[1]}")
    if shape[0] * shape[1] > MOST_ELEMENTS:
        raise ValueError(
            f"matrix has {shape[0]} x {shape[1]} = {shape[0] * shape[1]} elements; a recording holds everything that "
            f"happens to each of them, so a matrix may have at most {MOST_ELEMENTS}"
        )


def _dtype(dtype: Any) -> torch.dtype:
    name = dtype_name(dtype) if isinstance(dtype, torch.dtype | str) else None
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {_shown(dtype)}")
    return _DTYPES[name]


def _shown(value: Any) -> str:
    """A value for a message: short, on one line, and of a tensor no numbers."""
    if isinstance(value, int) and abs(value) > 10**30:
        return "a huge integer"
    text = " ".join(described(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "nothing"}
    return names.get(type(value), type(value).__name__)
