"""Cases: a case is one measured call. Also parses shapes, dtypes and names."""

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
ALIASES = {
    "fp64": "float64", "double": "float64", "fp32": "float32", "float": "float32", "bf16": "bfloat16",
    "fp16": "float16", "half": "float16",
}  # fmt: skip
LARGEST = 2**62  # elements
MOST_SIZES = 10_000  # of a range
MOST_SAID = 22  # names in an error
DTYPE = "float32"  # of a command that is given none
SUFFIX = {"": 1, "ki": 2**10, "mi": 2**20, "gi": 2**30}


@dataclass(frozen=True)
class Case:
    """One operation on a contiguous tensor of `shape` (its first input), along `dim`.

    dim: -1, or another dim counted from the front. operation: a name in `operations.OPERATIONS`.
    A row is the n_cols elements that are reduced to one sum; there are n_rows of them.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    operation: str = "softmax"
    dim: int = -1

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def n_cols(self) -> int:
        return self.shape[self.dim]

    @property
    def n_rows(self) -> int:
        return self.elements // self.n_cols

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def tensor_bytes(self) -> int:
        return self.elements * self.itemsize

    @property
    def parameters(self) -> dict[str, Any]:
        """The facts that n_rows, n_cols and dtype do not give, for the record."""
        return {} if len(self.shape) == 2 and self.dim == -1 else {"shape": list(self.shape), "dim": self.dim}

    @property
    def size(self) -> str:
        return " x ".join(map(str, self.shape)) + ("" if self.dim == -1 else f" dim {self.dim}")

    def __str__(self) -> str:
        return ("" if self.operation == "softmax" else f"{self.operation} ") + f"{self.size} {self.dtype}"


def in_time(case: Case) -> bool:
    """Whether matrix products bound the case, so that its figure is a time and not GB/s."""
    return case.operation.startswith(("linear_", "attention", "step_"))


def parse_size(text: str) -> int:
    """A positive integer, with an optional Ki, Mi or Gi."""
    match = re.fullmatch(r"([0-9]{1,30})(ki|mi|gi|)", text.strip().lower())
    if not match or not (size := int(match[1]) * SUFFIX[match[2]]):
        raise ValueError(f"{text!r} is not a positive size such as 4096 or 128Mi")
    if size >= LARGEST:
        raise ValueError(f"{text!r} is larger than any tensor")
    return size


def parse_sizes(text: str) -> list[int]:
    """Sizes and ranges, separated by commas. start:stop:step is Python's range: stop is excluded."""
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
        if len(range(start, stop, step)) > MOST_SIZES:
            raise ValueError(f"range {part!r} has more than {MOST_SIZES} sizes: give a larger step")
        sizes += range(start, stop, step)
    return sizes


def parse_shapes(text: str) -> list[Case]:
    """Shapes, separated by commas: ROWSxCOLS, or any number of sizes with the dim after a colon if not the last."""
    shapes = []
    for part in text.split(","):
        sizes, colon, dim = part.lower().partition(":")
        if "x" not in sizes:
            raise ValueError(f"{part!r} is not a shape such as 4096x32768, or 64x4096x512:1 for dim 1")
        shape = tuple(map(parse_size, sizes.split("x")))
        if colon and (not dim.isdecimal() or int(dim) >= len(shape)):
            raise ValueError(f"{part!r} must name a dim from 0 to {len(shape) - 1} after its colon")
        shapes.append(Case(shape, dim=-1 if not colon or int(dim) == len(shape) - 1 else int(dim)))
    return shapes


def parse_dtype(text: str) -> str:
    return find("dtype", text.strip().lower().removeprefix("torch."), ITEMSIZE, ALIASES)


def find(what: str, text: str, known: Iterable[str], aliases: Mapping[str, str] | None = None) -> str:
    """The known name that a text spells, whatever its case, hyphens, underscores, dots and spaces, or by an alias.

    Raises ValueError for a text that spells none. It has all names, or if they are many, the nearest.
    """
    names = list(known)
    spelled = {_key(name): name for name in names}
    spelled |= {_key(alias): name for alias, name in (aliases or {}).items() if name in names}
    if (found := spelled.get(_key(text))) is None:
        known_names = f"{near(text, names)}; --list names all" if names[MOST_SAID:] else f"; known: {', '.join(names)}"
        raise ValueError(f"unknown {what} {text.strip()!r}{known_names}")
    return found


def near(text: str, names: Iterable[str]) -> str:
    """The names most like a text, in words, or ""."""
    spelled = {_key(name): name for name in names}
    found = [spelled[key] for key in difflib.get_close_matches(_key(text), spelled)]
    return f"; near it: {', '.join(found)}" if found else ""


def _key(text: str) -> str:
    return re.sub(r"[-_. ]", "", text.lower())


def unique(cases: Iterable[Case]) -> list[Case]:
    return list(dict.fromkeys(cases))
