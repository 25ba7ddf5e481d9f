"""What the kernels of segments are compiled for, and the bundles of values that their helpers share."""

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, kw_only=True)
class SegmentSpec:
    """How a program covers segments of [outer, n, inner], and what it computes of them.

    segments: of a program's bunch. singles: whether these are rows of a tile as they are, if all are one piece.
    pieces: rows of a tile, each of `deep` times `wide` positions of one segment, of which `wide` are next to each
        other. cols: of the inner dim.
    range_deep, range_wide: positions of a step through what is longer.
    probes: offsets that a search looks at in one step. flags: that the second launch reads at once.
    one_block: whether `cols` columns are all. whole: whether no block of columns has less. many: whether outer is > 1.
    log, lse: log_softmax and logsumexp; neither of softmax. backward: whether it is the gradient.
    ordered: whether elements are found by an order. nowhere: whether the last segment is of elements that are in none.
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
        """Whether all elements of a segment make a number: of the gradient of lse its results are there."""
        return not (self.lse and self.backward)

    @property
    def writes_elements(self) -> bool:
        return self.backward or not self.lse


class Segments(NamedTuple):
    """One outer index and one block of columns: what is read and written of it.

    order_ptr, dy_ptr, out_ptr, lse_ptr, dlse_ptr: None where a call goes without. x is the input, and in the gradient
    of softmax and log_softmax the result.
    n_lse: segments that have a result. stride: elements from a position, or a segment, to the next. cols: [cols], from
    the block's first on. left: how many columns there are from it on. base: where the first position's first column is.
    of_lse: where the first segment's columns are. factor: the call's scale. nothing: the input that is -inf
    once it is multiplied by it.
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
