"""What kernels over a strided dim are compiled for, and the bundles of values that their helpers share."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from fused_softmax.kernels.spec import ADDED_MASK, NO_MASK, Spec


@dataclass(frozen=True, kw_only=True)
class ColumnSpec(Spec):
    """Of reductions over a strided dim: tiles [cols, inner] along contiguous inner positions.

    block_inner: inner positions of a tile; whole: whether blocks of them divide the inner size. positions: how many of
    them a thread has a state for. unpack_bf16: as `unpack`.
    log, mask, scaled, greedy, hides, zero_masked_rows: as ScoreSpec's. out_dtype: as GradientSpec's.
    mask_cols, mask_inner, scale_inner: whether mask and scale differ along the columns and along inner positions.
    mask_vector: elements of the mask that lie side by side at an aligned address.
    """

    block_inner: int
    whole: bool
    log: bool = False
    out_dtype: Any = None
    positions: int = 0
    unpack_bf16: bool = True
    holds: bool = False
    mask: int = NO_MASK
    scaled: bool = False
    greedy: bool = False
    hides: bool = False
    zero_masked_rows: bool = False
    mask_cols: bool = False
    mask_inner: bool = False
    mask_vector: int = 1
    scale_inner: bool = False

    @property
    def compute_dtype(self):
        return self.state_dtype if self.mask == ADDED_MASK else super().compute_dtype

    @property
    def scale_on_use(self):
        return self.scaled and self.mask != ADDED_MASK

    @property
    def unpack(self):
        return self.ptx and self.unpack_bf16

    @property
    def subtract_first(self):
        """In 2 bytes a thread has twice as many inner positions, and one number for each must do: 3 programs fit."""
        return self.holds and self.cast_dtype.primitive_bitwidth == 16


class Strided(NamedTuple):
    """A tensor [n_outer, n_cols, n_inner] whose inner positions are contiguous."""

    ptr: Any
    outer_stride: Any
    col_stride: Any


class ColumnScores(NamedTuple):
    """Mask and scale of a call over a strided dim, by their strides along [n_outer, n_cols, n_inner]."""

    mask_ptr: Any
    scale_ptr: Any
    mask_outer: Any
    mask_col: Any
    mask_inner: Any
    scale_outer: Any
    scale_inner: Any
    scale: Any


class Columns(NamedTuple):
    """A block of inner positions (where `on`) and the columns of it that a program has, from `start` on."""

    outer: Any
    inner: Any
    on: Any
    start: Any
    size: Any


class ColumnParts(NamedTuple):
    """`Parts`, of a group's columns."""

    group: Any
    n_cols: Any
    n_inner: Any
    part_cols: Any
    rest: Any
