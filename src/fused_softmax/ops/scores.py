"""What becomes of the input before its softmax: scaled, masked, causal. Checked here, and laid out for the kernels.

z = x * scale + mask.  A bool mask keeps where it is True; causal keeps column j of query i where j - i <= n_keys -
n_queries, so that the last query sees every key (bottom-right aligned). What is not kept is -inf.
A scale of 0 is temperature 0: the first maximum of the row alone is kept, and scaled by 1.
"""

import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from fused_softmax.ops.arguments import DTYPES

NO_MASK, BOOL_MASK, ADDED_MASK = 0, 1, 2
MaskedRows = Literal["nan", "zero"]


@dataclass(frozen=True)
class Scores:
    """scale, mask and causal of one call, in torch's terms.

    scale: a number, or a tensor that broadcasts against the input with its last dim 1.
    mask: bool or of a float dtype; broadcasts against the input, and is never expanded in memory.
    masked_rows: what a row gets of which nothing is kept: NaN, or probabilities of zero.
    never_zero: a scale tensor known to hold no 0.
    """

    scale: float | Tensor | None = None
    mask: Tensor | None = None
    is_causal: bool = False
    masked_rows: MaskedRows = "nan"
    never_zero: bool = False

    @property
    def plain(self) -> bool:
        return self.scale is None and self.mask is None and not self.is_causal and self.masked_rows == "nan"

    @property
    def greedy(self) -> bool:
        """Whether a row may have scale 0."""
        return not self.never_zero if isinstance(self.scale, Tensor) else self.scale == 0

    @property
    def hides(self) -> bool:
        """Whether what is -inf may have been hidden, and so has no gradient."""
        return self.mask is not None or self.is_causal or self.masked_rows == "zero"

    @property
    def added(self) -> bool:
        """Whether the kernels hold sums in fp32, and not what they read."""
        return self.mask is not None and self.mask.dtype != torch.bool

    def as_arguments(self) -> tuple:
        """The last arguments of an operator of `library`; those it goes without are left out."""
        number, per_row = (None, self.scale) if isinstance(self.scale, Tensor) else (self.scale, None)
        return () if self.plain else (number, per_row, self.mask, self.is_causal, self.masked_rows)

    @staticmethod
    def of_arguments(scale=None, row_scale=None, mask=None, is_causal=False, masked_rows="nan") -> "Scores":
        return Scores(scale if row_scale is None else row_scale, mask, is_causal, masked_rows)

    def along(self, dim: int, shape: tuple[int, ...]) -> "Scores":
        """For the input with `dim` moved last: its mask and scale moved likewise, as views."""
        if self.plain or dim % len(shape) == len(shape) - 1:
            return self
        scale, mask = self.scale, self.mask
        if isinstance(scale, Tensor):
            scale = scale.expand(shape).movedim(dim, -1)
        return replace(self, scale=scale, mask=None if mask is None else mask.expand(shape).movedim(dim, -1))


PLAIN = Scores()


def check_scores(name: str, input: Tensor, dim: int, scale: Any, mask: Any, is_causal: Any, masked_rows: Any) -> Scores:
    """The Scores of a call, or an error that names the argument."""
    shape = tuple(input.shape)
    if masked_rows not in ("nan", "zero"):
        raise ValueError(f'{name}: masked_rows must be "nan" or "zero", got {masked_rows!r}')
    if not isinstance(is_causal, bool):
        raise TypeError(f"{name}: is_causal must be a bool, not {type(is_causal).__name__} ({is_causal!r})")
    last = input.ndim > 0 and dim % input.ndim == input.ndim - 1
    if is_causal and input.ndim < 2:
        raise ValueError(f"{name}: is_causal needs at least 2 dims [..., queries, keys], got input of shape {shape}")
    if is_causal and not last:
        raise ValueError(f"{name}: is_causal is over the last dim, got dim={dim} of input of shape {shape}")
    if mask is not None:
        if not isinstance(mask, Tensor):
            raise TypeError(f"{name}: mask must be a Tensor, not {type(mask).__name__}")
        if mask.dtype != torch.bool and mask.dtype not in DTYPES:
            raise TypeError(
                f"{name}: mask must be bool (True keeps) or of 16 to 64 bit floats (added), got {mask.dtype}"
            )
        mask = _broadcast(name, "mask", mask, input, shape)
    if isinstance(scale, Tensor):
        if scale.dtype not in DTYPES:
            raise TypeError(f"{name}: scale must be of 16 to 64 bit floats, got {scale.dtype}")
        scale = _broadcast(name, "scale", scale, input, shape)
        if scale.ndim and input.ndim and (scale.expand(shape).stride(dim) != 0 and shape[dim] != 1):
            along = tuple(1 if i == dim % input.ndim else size for i, size in enumerate(shape))
            got = tuple(scale.shape)
            raise ValueError(f"{name}: a scale tensor holds one value a row: it broadcasts to {along}, got shape {got}")
    elif scale is not None:
        if isinstance(scale, bool) or not isinstance(scale, Real):
            raise TypeError(f"{name}: scale must be a number or a Tensor, not {type(scale).__name__} ({scale!r})")
        scale = None if scale == 1 else float(scale)
    return Scores(scale, mask, is_causal, masked_rows)


def _broadcast(name: str, argument: str, tensor: Tensor, input: Tensor, shape: tuple[int, ...]) -> Tensor:
    """tensor, on the input's device: as for torch's operators, one without dims may come from the CPU."""
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise RuntimeError(f"{name}: {argument} must be a dense strided tensor, got a {kind} one")
    if tensor.device != input.device and (tensor.ndim or tensor.device.type != "cpu"):
        raise RuntimeError(f"{name}: {argument} must be on the input's device {input.device}, got {tensor.device}")
    aligned = tuple(tensor.shape)
    fits = len(aligned) <= len(shape) and all(
        size in (1, whole) for size, whole in zip(reversed(aligned), reversed(shape), strict=False)
    )
    if not fits:
        raise ValueError(f"{name}: {argument} must broadcast to the input's shape {shape}, got shape {aligned}")
    return tensor.to(input.device)


@dataclass(frozen=True)
class Layout:
    """How mask and scale lie against the rows of an input [n_rows, n_cols], for the kernels.

    A row number splits into up to three indices (sizes `outer`, of the last two); strides are of those, and of columns.
    """

    tensors: tuple[Tensor | None, Tensor | None]  # mask, scale
    scalars: tuple[Any, ...]
    constexprs: dict[str, Any]
    shared: int = 0  # how many indices, the last ones, a row of the mask depends on, if not on the one before them


_ABSENT = (None,) * 11
_LEAST = 2.0**-149  # of fp32, above 0
_KEPT_BYTES = 16 << 20  # of a mask that L2 keeps beside what streams through it
_PLAIN_CONSTEXPRS = {"MASK": NO_MASK, "SCALED": False, "GREEDY": False, "CAUSAL": False, "ZERO": False}


def layout_of(scores: Scores, shape: tuple[int, ...], interpreted: bool = False) -> Layout:
    """The Layout of scores for an input of `shape` whose rows run along its last dim."""
    if scores.plain:
        return Layout((None, None), _ABSENT, _PLAIN_CONSTEXPRS)
    mask = scores.mask
    per_row = scores.scale if isinstance(scores.scale, Tensor) else None
    number = 1.0 if scores.scale is None or isinstance(scores.scale, Tensor) else scores.scale
    if 0 < abs(number) < _LEAST:  # a kernel's number has 32 bits, and 0 is another thing than what is next to it
        number = math.copysign(_LEAST, number)
    views = [None if t is None else t.expand(shape) for t in (mask, per_row)]
    sizes, strides = _coalesced(shape[:-1], [(0,) * (len(shape) - 1) if v is None else v.stride()[:-1] for v in views])
    if len(sizes) > 3:  # no three indices describe it
        views = [None if v is None else _dense(v) for v in views]
        sizes, strides = _coalesced(
            shape[:-1], [(0,) * (len(shape) - 1) if v is None else v.stride()[:-1] for v in views]
        )
    shared = 0
    if views[0] is not None and len(sizes) > 1 and strides[0][0] == 0:
        distinct = math.prod(size for size, stride in zip(shape, views[0].stride(), strict=True) if stride)
        shared = len(sizes) - 1 if distinct * views[0].element_size() > _KEPT_BYTES else 0
    sizes = (1,) * (3 - len(sizes)) + sizes
    strides = [(0,) * (3 - len(each)) + each for each in strides]
    mask_view = views[0]
    if mask_view is not None and mask_view.dtype == torch.bool:
        mask_view = mask_view.view(torch.uint8)
    scalars = (
        *sizes[1:], *strides[0], 0 if views[0] is None else views[0].stride(-1), *strides[1],
        shape[-2] if scores.is_causal else 1, number,
    )  # fmt: skip
    constexprs = {
        "MASK": NO_MASK if mask is None else BOOL_MASK if mask.dtype == torch.bool else ADDED_MASK,
        "SCALED": scores.scale is not None,
        "GREEDY": scores.greedy,
        "CAUSAL": scores.is_causal,
        "ZERO": scores.masked_rows == "zero",
    }
    return Layout((mask_view, views[1]), scalars, constexprs, shared)


def _dense(view: Tensor) -> Tensor:
    """A copy that any neighbours of the leading dims merge in, and of the last dim no more than was there."""
    return view.contiguous() if view.stride(-1) else view[..., :1].contiguous().expand(view.shape)


def _coalesced(sizes, strides):
    """Dims of size 1 dropped and neighbours merged wherever every tensor steps through both as through one."""
    merged: list[tuple[int, ...]] = []  # (size, stride of each tensor), outermost first
    for i, size in enumerate(sizes):
        if size == 1:
            continue
        here = tuple(each[i] for each in strides)
        if merged and all(outer == size * inner for outer, inner in zip(merged[-1][1:], here, strict=True)):
            merged[-1] = (merged[-1][0] * size, *here)
        else:
            merged.append((size, *here))
    return tuple(each[0] for each in merged), [tuple(each[i + 1] for each in merged) for i in range(len(strides))]
