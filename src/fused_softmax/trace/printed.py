"""Reads a matrix from text: lines of numbers, JSON, or as torch and NumPy print it. The page's paste.ts reads the same.

Every error is a ValueError that names the fault and its place.
"""

import json
import math
import re
from typing import Any

from fused_softmax.core.described import number_of

_PRINTED = re.compile(r"(?:[\w.]+\()?\s*(\[.*\])(?:,\s*\w+=.*)?\)?", re.DOTALL)
_NUMBER = re.compile(r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?")
_WORDS = {"inf": math.inf, "infinity": math.inf, "∞": math.inf, "nan": math.nan}


def rows_of(text: str, name: str) -> list[list[float]]:
    """The rows of numbers in a text, all of one length. What follows a # on a line does not count. name: for errors."""
    rows = _rows_of(text, name)
    if not any(rows):
        raise ValueError(f"{name} has no numbers")
    for at, row in enumerate(rows, 1):
        if len(row) != len(rows[0]):
            raise ValueError(
                f"{name}: row {at} has {number_of(len(row), 'number')}, but the first row has {len(rows[0])}"
            )
    return rows


def _rows_of(text: str, name: str) -> list[list[float]]:
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    whole = "\n".join(lines).strip()
    printed = _PRINTED.fullmatch(whole)
    if printed or whole.startswith("["):
        return _in_brackets(printed[1] if printed else whole, name)
    return [
        [_number(field, f"{name}, line {at}, number {column}") for column, field in enumerate(_fields(line), 1)]
        for at, line in enumerate(lines, 1)
        if line
    ]


def _fields(line: str) -> list[str]:
    line = re.sub(r"[,;]\s*$", "", line)
    separator = next((each for each in ";\t," if each in line), None)
    return line.split(separator)  # without one, at spaces


def _number(field: str, where: str) -> float:
    text = field.strip().replace("\u2212", "-").lower()
    sign, word = (text[0], text[1:]) if text[:1] in ("+", "-") else ("", text)
    if not text:
        raise ValueError(f"{where}: the field is empty")
    if word in _WORDS:
        value = _WORDS[word]
    elif not _NUMBER.fullmatch(word):
        raise ValueError(f"{where}: {field.strip()[:40]!r} is not a number")
    elif math.isinf(value := float(word)):
        raise ValueError(f"{where}: {field.strip()[:40]} is too large for any float")
    return -value if sign == "-" else value


def _in_brackets(text: str, name: str) -> list[list[float]]:
    # Python writes inf and nan bare, and ends numbers with a point; NumPy writes no commas.
    quoted = re.sub(r'"[^"]*"|[^\s,\[\]"]+', lambda found: json.dumps(found[0].strip('"')), text)
    try:
        value = json.loads(re.sub(r'(["\]])\s+(?=["\[])', r"\1, ", quoted))
    except (json.JSONDecodeError, RecursionError):
        raise ValueError(f"{name} starts like JSON but is not valid JSON") from None
    rows = value if any(isinstance(each, list) for each in value) else [value]
    return [_row(row, at, name) for at, row in enumerate(rows, 1)]


def _row(row: Any, at: int, name: str) -> list[float]:
    if not isinstance(row, list):
        raise ValueError(f"{name}, row {at}: not a list of numbers")
    found = []
    for column, each in enumerate(row, 1):
        where = f"{name}, row {at}, number {column}"
        if not isinstance(each, str):
            raise ValueError(f"{where}: {json.dumps(each)[:40]} is not a number")
        found.append(_number(each, where))
    return found
