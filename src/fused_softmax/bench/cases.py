"""Which shapes are measured: the tutorial's sweep, a quick set, and what the options of `bench` ask for."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
ALIASES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
SUFFIX = {"": 1, "ki": 2**10, "mi": 2**20, "gi": 2**30}


@dataclass(frozen=True)
class Case:
    """One input: a contiguous [n_rows, n_cols] tensor."""

    n_rows: int
    n_cols: int
    dtype: str = "float32"

    @property
    def tensor_bytes(self) -> int:
        return self.n_rows * self.n_cols * ITEMSIZE[self.dtype]

    @property
    def floor_bytes(self) -> int:
        """What softmax cannot avoid moving: one read and one write. The same for every provider."""
        return 2 * self.tensor_bytes

    def __str__(self) -> str:
        return f"{self.n_rows} x {self.n_cols} {self.dtype}"


TUTORIAL_ROWS = 4096
TUTORIAL_COLS = tuple(128 * i for i in range(2, 100))
ELEMENTS = 128 * 2**20
QUICK = (
    Case(65536, 256, "float32"),
    Case(4096, 12672, "float32"),
    Case(128, 1048576, "float32"),
    Case(8, 32000, "bfloat16"),
    Case(2670, 50257, "bfloat16"),
    Case(1024, 131072, "bfloat16"),
)


def build(
    shapes: Sequence[tuple[int, int]] = (),
    rows: Sequence[int] = (),
    cols: Sequence[int] = (),
    dtypes: Sequence[str] = (),
    elements: int | None = None,
    quick: bool = False,
) -> list[Case]:
    """The cases in the order asked, without repeats: a shape list, rows by columns, or one of the two standing sets.

    With columns and no rows, a tensor has as many rows as hold `elements` elements.
    """
    if quick and not (shapes or rows or cols):
        return unique(Case(case.n_rows, case.n_cols, dtype) for case in QUICK for dtype in dtypes or (case.dtype,))
    chosen = list(shapes)
    if rows:
        chosen += [(n_rows, n_cols) for n_rows in rows for n_cols in cols or TUTORIAL_COLS]
    elif cols or elements:
        chosen += [(-(-(elements or ELEMENTS) // n_cols), n_cols) for n_cols in cols or TUTORIAL_COLS]
    elif not shapes:
        chosen += [(TUTORIAL_ROWS, n_cols) for n_cols in TUTORIAL_COLS]
    return unique(Case(n_rows, n_cols, dtype) for dtype in dtypes or ("float32",) for n_rows, n_cols in chosen)


def cut(cases: Iterable[Case], elements: int) -> list[Case]:
    """The same widths with so few rows that no tensor has more than `elements` elements (but at least one row)."""
    return unique(Case(max(1, min(c.n_rows, elements // c.n_cols)), c.n_cols, c.dtype) for c in cases)


def parse_size(text: str) -> int:
    """A positive integer, with an optional Ki, Mi or Gi."""
    match = re.fullmatch(r"(\d+)(ki|mi|gi|)", text.strip().lower())
    if not match or not (size := int(match[1]) * SUFFIX[match[2]]):
        raise ValueError(f"{text!r} is not a positive size such as 4096 or 128Mi")
    return size


def parse_sizes(text: str) -> list[int]:
    """Sizes and ranges between commas. start:stop:step is Python's range: stop is not included."""
    sizes: list[int] = []
    for part in text.split(","):
        if ":" not in part:
            sizes.append(parse_size(part))
            continue
        bounds = part.split(":")
        if len(bounds) not in (2, 3):
            raise ValueError(f"{part!r} is not a range start:stop:step")
        start, stop, step = (*map(parse_size, bounds), 1)[:3]
        if start >= stop:
            raise ValueError(f"range {part!r} is empty: start {start} is not below stop {stop}")
        sizes += range(start, stop, step)
    return sizes


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """Shapes ROWSxCOLS between commas."""
    shapes = []
    for part in text.split(","):
        n_rows, x, n_cols = part.lower().partition("x")
        if not x:
            raise ValueError(f"{part!r} is not a shape ROWSxCOLS such as 4096x32768")
        shapes.append((parse_size(n_rows), parse_size(n_cols)))
    return shapes


def parse_dtype(text: str) -> str:
    name = text.strip().lower().removeprefix("torch.")
    name = ALIASES.get(name, name)
    if name not in ITEMSIZE:
        raise ValueError(f"unknown dtype {text!r}; known: {', '.join(ITEMSIZE)}")
    return name


def unique(cases: Iterable[Case]) -> list[Case]:
    return list(dict.fromkeys(cases))
