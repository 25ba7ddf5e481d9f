"""The launches of the gradient of a bias that is broadcast, prepared once."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fused_softmax.ops.attention.kernels.gradient import _bias_gradient

_PART_BYTES = 2**26  # of the parts of a gradient, at most
_PROGRAMS = 2  # a multiprocessor, that the parts of a gradient are to give


def prepare_bias(c: Any, name: str, read: tuple, strides: list, dtype: torch.dtype) -> Callable[..., Tensor]:
    """What computes the gradient of a mask or bias that is broadcast, in the shape that it is laid out in."""
    pattern, tiles, device = c.patterns[name], c.plan.bias, read[0].device
    sizes, own = list(pattern.sizes), list(pattern.own)
    for d, block in ((3, tiles.block_m), (4, tiles.block_n)):
        sizes[d], own[d] = blocks(sizes[d], block), 1 if own[d] < sizes[d] else blocks(own[d], block)
    repeats = tuple(n // each if each else 0 for n, each in zip(sizes, own, strict=True))
    programs, steps, n = math.prod(own), math.prod(repeats), math.prod(pattern.own)
    shape = c.own[name]
    if 0 in pattern.sizes:
        return lambda read: torch.zeros(shape, dtype=dtype, device=device)
    parts = _PROGRAMS * c.gpu.sm_count // programs
    parts = max(1, min(parts, steps, _PART_BYTES // (4 * n)))
    made_dtype = dtype if parts == 1 else torch.float32
    of_dbias = (n, *pattern.strides)
    like = torch.empty(1, dtype=made_dtype, device=device)
    run = c.prepare(
        _bias_gradient, programs * parts, tiles, (*read, like), (*strides, of_dbias, repeats, tuple(own), parts,
        *c.numbers()),
        sums_rows=pattern.own[3] < pattern.sizes[3], sums_cols=pattern.own[4] < pattern.sizes[4],
    )  # fmt: skip

    def call(read: list[Tensor]) -> Tensor:
        found = torch.empty((parts, *shape), dtype=made_dtype, device=device)
        run(*read, found)
        return found[0] if parts == 1 else found.sum(0).to(dtype)

    return call


def blocks(n: int, block: int) -> int:
    return -(-n // block)
