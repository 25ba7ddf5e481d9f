"""The launches of the gradient of a bias that is broadcast, prepared once."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_softmax.ops.attention.call import Call, Launch, Tensors
from fused_softmax.ops.attention.layout import blocks

_PART_BYTES = 2**26  # of the parts of a gradient, at most
_PROGRAMS = 2  # a multiprocessor, that the parts of a gradient are to give


@dataclass(frozen=True)
class BiasGradient:
    """The gradient of a mask or bias that is broadcast, in the shape that it is laid out in.

    launch: None if there is nothing to sum. parts: of the sum; a launch writes each of them in made_dtype.
    """

    launch: Launch | None
    shape: tuple[int, ...]
    parts: int
    dtype: torch.dtype
    made_dtype: torch.dtype
    device: torch.device

    def __call__(self, tensors: tuple) -> Tensor:
        if self.launch is None:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        found = torch.empty((self.parts, *self.shape), dtype=self.made_dtype, device=self.device)
        self.launch.run(*self.launch.takes(tensors), found)
        return found[0] if self.parts == 1 else found.sum(0).to(self.dtype)


def prepare_bias(c: Call, name: str, tensors: Tensors, dtype: torch.dtype, device: torch.device) -> BiasGradient:
    """name: "mask" or "bias", whose gradient is made, in this dtype."""
    from fused_softmax.ops.attention.kernels.gradient import _bias_gradient

    pattern, tiles, shape = c.patterns[name], c.plan.bias, c.own[name]
    if 0 in pattern.sizes:
        return BiasGradient(None, shape, 1, dtype, dtype, device)
    sizes, own = list(pattern.sizes), list(pattern.own)
    for d, block in ((3, tiles.block_m), (4, tiles.block_n)):
        sizes[d], own[d] = blocks(sizes[d], block), 1 if own[d] < sizes[d] else blocks(own[d], block)
    repeats = tuple(n // each for n, each in zip(sizes, own, strict=True))
    programs, steps, n = math.prod(own), math.prod(repeats), math.prod(pattern.own)
    parts = max(1, min(_PROGRAMS * c.gpu.sm_count // programs, steps, _PART_BYTES // (4 * n)))
    made_dtype = dtype if parts == 1 else torch.float32
    numbers = {"dbias_strides": (n, *pattern.strides), "repeats": repeats, "tiles": tuple(own), "n_parts": parts}
    launch = c.prepare(
        _bias_gradient, programs * parts, tiles, tensors, numbers,
        own={"dbias": torch.empty(1, dtype=made_dtype, device=device)},
        sums_rows=pattern.own[3] < pattern.sizes[3], sums_cols=pattern.own[4] < pattern.sizes[4],
    )  # fmt: skip
    return BiasGradient(launch, shape, parts, dtype, made_dtype, device)
