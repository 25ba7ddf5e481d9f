"""softmax over the last dim in torch's operations, one pass for each.  y = exp(x - max x) / sum exp(x - max x)

Traffic: reads 5MN + 2M elements, writes 3MN + 2M. A fused kernel reads MN and writes MN, about a quarter of that.
Every intermediate goes through memory and is rounded to x's dtype on the way.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fused_softmax.classic.rows import check_rows


def naive_softmax(x: Tensor) -> Tensor:
    """softmax over the last dim of x [n_rows, n_cols], on any device. `naive_traffic` lists its passes."""
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
    """The elements that `naive_softmax` moves, pass by pass: 5MN + 2M read, 3MN + 2M written."""
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
