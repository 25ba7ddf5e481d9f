"""What the kernels of segments are compiled for, and the bundles of values that their helpers share."""

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, kw_only=True)
class SegmentSpec:
    """How a program covers segments of [outer, n, inner], and what it computes of them.

    segments: of a program's bunch. singles: whether each of these is a row of a tile, if all have one piece.
    pieces: rows of a tile. A row has `deep` times `wide` positions of one segment, of which `wide` are neighbours.
    cols: columns of the inner dim.
    range_deep, range_wide: positions of a step through a segment that is longer than a tile.
    probes: offsets that a search reads in one step. flags: those that the second launch reads at once.
    one_block: whether `cols` columns are all there are. whole: whether every block of columns is full. many: whether
        outer is > 1.
    log, lse: log_softmax and logsumexp; neither for softmax. backward: whether it is the gradient.
    ordered: whether elements are found by an order. nowhere: whether the last segment has the elements that are in
        none.
    scaled: whether the input is multiplied by a number. cast_dtype: the input is rounded to it as it is read.
    ptx: whether the kernel may use inline PTX.
    leads, follows: whether the second launch may begin before the first has ended.
    """

    segments: int
    singles: bool
    pieces: int
    deep: int
    wide: int
    cols: int
    range_deep: int
    range_wide: int
    cast_dtype: Any
    probes: int = 256
    flags: int = 4096
    one_block: bool = False
    whole: bool = False
    many: bool = False
    log: bool = False
    lse: bool = False
    backward: bool = False
    ordered: bool = False
    nowhere: bool = False
    scaled: bool = False
    ptx: bool = False
    leads: bool = False
    follows: bool = False

    @property
    def length(self) -> int:
        """Positions of a piece."""
        return self.deep * self.wide

    @property
    def range_tile(self) -> int:
        return self.range_deep * self.range_wide

    @property
    def sums(self) -> bool:
        """Whether elements are summed. In the gradient of lse the numbers of segments are given."""
        return not (self.lse and self.backward)

    @property
    def writes_elements(self) -> bool:
        return self.backward or not self.lse


class Segments(NamedTuple):
    """One outer index and one block of columns: what is read of it, and what is written.

    order_ptr, dy_ptr, out_ptr, lse_ptr, dlse_ptr: None if a call does without. x is the input, and in the gradient of
    softmax and log_softmax the result.
    n_lse: segments that have a result. stride: elements from one position, or segment, to the next. cols: [cols], from
    the block's first column on. left: how many columns exist from that one on. base: where the first position's first
    column is. of_lse: where the first segment's columns are. factor: the call's scale. nothing: the input that becomes
    -inf when it is multiplied by the factor.
    """

    offsets_ptr: Any
    order_ptr: Any
    x_ptr: Any
    dy_ptr: Any
    out_ptr: Any
    lse_ptr: Any
    dlse_ptr: Any
    n: Any
    n_segments: Any
    n_lse: Any
    stride: Any
    cols: Any
    left: Any
    base: Any
    of_lse: Any
    factor: Any
    nothing: Any
