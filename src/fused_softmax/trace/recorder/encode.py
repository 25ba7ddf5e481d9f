"""Encodes values as JSON: the shortest decimals that read back to the same value of their dtype.

JSON has neither infinities nor NaN, so these are "inf", "-inf" and "nan". A page's numbers are doubles, so integers
past 2**53 are strings of digits.
"""

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

Number = float | int | bool | str

_EXACT = 2**53  # up to here a double holds every integer


def dtype_name(dtype: Any) -> str:
    """torch's name of a torch, NumPy or Triton dtype: "float32", "bfloat16", "int64", "bool"."""
    text = str(dtype).removeprefix("torch.")
    short = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int1": "bool"}
    return short.get(text, text)


def numbers(values: np.ndarray, dtype: str) -> list[Number]:
    """Values of a dtype as JSON. bfloat16 values are given as their 16 bits in unsigned integers, or as float32.

    >>> numbers(np.array([0.1, np.inf], np.float32), "float32")
    [0.1, 'inf']
    """
    values = np.asarray(values).reshape(-1)
    if dtype == "bfloat16":
        values = widened(values) if values.dtype == np.uint16 else values.astype(np.float32)
        return [_short_bfloat16(value) if value else value for value in values.tolist()]
    if values.dtype.kind == "f":
        # Zeros skip the cache, for which -0.0 equals 0.0.
        return [_short(value, values.dtype.itemsize) if value else value for value in values.tolist()]
    if values.dtype.kind == "b":
        return [bool(value) for value in values.tolist()]
    return [value if abs(value) <= _EXACT else str(value) for value in map(int, values.tolist())]


def tensor_numbers(tensor: Tensor) -> list[Number]:
    """The elements of a tensor in logical, row-major order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.dtype == torch.bfloat16:
        flat = flat.float()
    return numbers(flat.numpy(), dtype_name(tensor.dtype))


def number(value: float, dtype: str = "float32") -> Number:
    """One value as JSON."""
    return numbers(np.array([value], np.float64 if dtype == "float64" else np.float32), dtype)[0]


def read_number(value: Any) -> float:
    """The float that `numbers` wrote.

    >>> read_number("-inf")
    -inf
    """
    return float(value)


def read_numbers(values: Iterable[Any]) -> list[float]:
    """The floats that `numbers` wrote."""
    return [read_number(value) for value in values]


@lru_cache(maxsize=65536)
def _short(value: float, itemsize: int) -> Number:
    if not math.isfinite(value):
        return str(value)
    return float(str({2: np.float16, 4: np.float32, 8: np.float64}[itemsize](value)))


@lru_cache(maxsize=65536)
def _short_bfloat16(value: float) -> Number:
    if not math.isfinite(value):
        return str(value)
    for digits in range(1, 9):
        short = float(f"{value:.{digits}g}")
        if torch.tensor(short, dtype=torch.float64).to(torch.bfloat16).item() == value:
            return short
    return value


def widened(bits: np.ndarray) -> np.ndarray:
    """bfloat16's bits as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
