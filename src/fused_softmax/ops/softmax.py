"""softmax over one dim.  y = exp(x - m) / s,  m = max x,  s = sum exp(x - m)."""

import torch
from torch import Tensor


def softmax(input: Tensor, dim: int = -1, *, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
    return torch.softmax(input, dim, dtype=dtype, out=out)
