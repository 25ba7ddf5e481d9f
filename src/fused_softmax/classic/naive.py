"""softmax over the last dim as torch spells it, one operation a pass.  y = exp(x - max x) / sum exp(x - max x)

Traffic: reads 5MN + 2M elements, writes 3MN + 2M, where a fused kernel needs MN and MN: about four times too much.
Every intermediate is rounded to the dtype of x on its way through memory.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fused_softmax.classic.rows import check_rows


def naive_softmax(x: Tensor) -> Tensor:
    """softmax over the last dim of x [n_rows, n_cols], on any device. The passes are those of `naive_traffic`."""
    check_rows(x)
    if x.numel() == 0:
        return torch.empty_like(x)
    m = x.amax(dim=1)
    shifted = x - m[:, None]
    e = torch.exp(shifted)
    s = e.sum(dim=1)
    return e / s[:, None]


@dataclass(frozen=True)
class Pass:
    """One operation over the matrix, and the elements it moves."""

    name: str
    reads: int
    writes: int


@dataclass(frozen=True)
class Traffic:
    passes: tuple[Pass, ...]

    @property
    def reads(self) -> int:
        """Elements read."""
        return sum(each.reads for each in self.passes)

    @property
    def writes(self) -> int:
        """Elements written."""
        return sum(each.writes for each in self.passes)


def naive_traffic(n_rows: int, n_cols: int) -> Traffic:
    """The elements that `naive_softmax` moves: 5MN + 2M read, 3MN + 2M written, pass by pass."""
    matrix, column = n_rows * n_cols, n_rows
    return Traffic(
        (
            Pass("maximum", matrix, column),
            Pass("subtract", matrix + column, matrix),
            Pass("exp", matrix, matrix),
            Pass("sum", matrix, column),
            Pass("divide", matrix + column, matrix),
        )
    )
