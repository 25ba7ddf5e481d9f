"""The description that a kernel is compiled for, and the bundles of values that the helpers of rows share.

A kernel has one constexpr, K: a frozen Spec made on the host. A launch's arguments are flat. Inside, values that belong
together travel as NamedTuples. Triton 3.6 returns no NamedTuple that holds None, so optional pointers stay in bundles
that are only passed down.

Here is what kernels of several rooms take. What one room alone takes is in its own `kernels/spec.py`, or in
`column_tiles.py` for strided dims.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton.language as tl

NO_MASK, BOOL_MASK, ADDED_MASK = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class Spec:
    """How a program covers its rows, and what the chip can do.

    block_rows, block_cols, pieces, full_pieces, vector: the plan's.
    tile: whether a program has several rows, [rows, cols] in registers.
    shifted: whether rows start off 16 bytes, and have an aligned body with guarded edges.
    nested: whether the inputs' rows, or outer indices, are numbered over several dims. The stride of each input is then
        (n_1, n_2, odd_0, odd_1, odd_2): the sizes of the last two dims, and for each of the three dims 2 v + 1, where v
        is its stride in vectors. Triton specialises on the numbers of a tuple, but learns nothing from odd ones, except
        from the 1 of a stride of 0.
    edges_first: whether a tile loads its edges before its pieces, and both get the layout of the pieces.
    cast_dtype: inputs are rounded to it as they are read.
    fp8: the format of an input of bytes, held as fp16. converts_fp8: whether the chip has an instruction for that.
    axis: the axis of a piece along which it is reduced.
    ptx: whether the kernel may use inline PTX.
    prefetch: whether programs ask L2 for the data of a later program.
    split: whether a row's programs exchange messages. lanes, copies, poll_last_first: the plan's.
    publish, collect: both on a GPU. The interpreter runs programs one after another, so all publish in one launch and
        collect in the next.
    peers: whether programs on other GPUs have parts of the row too; nobody then computes a missing state.
    follows: whether the launch may begin before the one before it has ended, and then waits for it.
    """

    block_cols: int
    pieces: int
    vector: int
    cast_dtype: Any
    fp8: Any = None
    converts_fp8: bool = False
    block_rows: int = 1
    full_pieces: int = 0
    tile: bool = False
    edges_first: bool = False
    shifted: bool = False
    nested: bool = False
    axis: int = 0
    ptx: bool = False
    prefetch: bool = False
    split: bool = False
    lanes: int = 1
    copies: int = 1
    poll_last_first: bool = False
    publish: bool = True
    collect: bool = True
    peers: bool = False
    follows: bool = False

    @property
    def state_dtype(self):
        """The dtype of m and s, and of the arithmetic."""
        return tl.float64 if self.cast_dtype.is_fp64() else tl.float32

    @property
    def compute_dtype(self):
        """The dtype of a piece when it is used; overridden where pieces hold finished scores."""
        exact = self.fp8 is not None and not self.cast_dtype.is_fp64()  # every 16-bit dtype holds fp8 as it is
        return tl.float16 if exact else self.cast_dtype

    @property
    def scale_on_use(self):
        """Whether a piece is multiplied by its row's factor each time it is used."""
        return False

    @property
    def lane_cols(self):
        """Columns that a lane reads of a tile, if each lane keeps a state of its own."""
        return 4 if self.vector == 1 else self.vector

    @property
    def subtract_first(self):
        """Whether exp(x - m) subtracts before it scales."""
        return False

    @property
    def unpack(self):
        """Whether bf16 is unpacked with one instruction an element."""
        return self.ptx


@dataclass(frozen=True, kw_only=True)
class ScoreSpec(Spec):
    """For rows of scores z = x * scale + mask: see `ops/softmax/scores.py`.

    log: log_softmax. mask: NO_MASK, BOOL_MASK or ADDED_MASK. greedy: whether a row may have scale 0. hides: whether
    elements may be masked, which then have no gradient. zero_masked_rows: whether a row that keeps nothing is 0 and not
    NaN. sink: whether a row's sum has one more score.
    shared_dims: if not 0, a row of the mask depends on this many of the last indices alone, and rows that share it
    follow each other.
    causal_step: the kernel has code of its own for the diagonal in each run of so many pieces.
    """

    log: bool = False
    mask: int = NO_MASK
    scaled: bool = False
    greedy: bool = False
    causal: bool = False
    hides: bool = False
    zero_masked_rows: bool = False
    sink: bool = False
    shared_dims: int = 0
    causal_step: int = 0

    @property
    def compute_dtype(self):
        """With an added mask pieces hold finished scores, in the dtype of the arithmetic."""
        return self.state_dtype if self.mask == ADDED_MASK else super().compute_dtype

    @property
    def scale_on_use(self):
        return self.scaled and self.mask != ADDED_MASK


@dataclass(frozen=True, kw_only=True)
class GradientSpec(Spec):
    """For the gradients of softmax and log_softmax. cast_dtype is that of their output y.

    log, hides: as ScoreSpec's. out_dtype: of the gradient. scaled: whether it is multiplied by a number. stream:
    whether rows are read twice.
    """

    out_dtype: Any
    stream: bool = False
    log: bool = False
    hides: bool = False
    scaled: bool = False

    @property
    def unpack(self):
        """As Spec's, but False for rows of few pieces, which are at a bound of registers already.

        bf16 8192: 0.99 with 64 registers, 0.98 unpacked with 66.
        """
        return self.ptx and (self.tile or self.stream or self.log or self.split or self.pieces > 4)


class Scored(NamedTuple):
    """Scale, mask, causality and sink of a call, as its kernel is given them.

    A row's number splits into up to three indices, of which n_1 and n_2 are the sizes of the last two. Strides are
    along these indices.
    """

    mask_ptr: Any
    scale_ptr: Any
    n_1: Any
    n_2: Any
    mask_0: Any
    mask_1: Any
    mask_2: Any
    mask_col_stride: Any
    scale_0: Any
    scale_1: Any
    scale_2: Any
    n_queries: Any
    scale: Any
    sink_ptr: Any
    sink_0: Any
    sink_1: Any
    sink_2: Any


class Rows(NamedTuple):
    """A tensor [n_rows, n_cols]. misalignment: elements from a 16-byte boundary to its first one.

    nest: the stride of rows that are numbered over several dims (Spec.nested), or None.
    """

    ptr: Any
    stride: Any
    misalignment: Any
    nest: Any = None


class Row(NamedTuple):
    """The rows of a program, or its part of one.

    row: int64, or [rows, 1]. start, size: where the part begins in the row's aligned body, and how long it is. head:
    elements before the body. body: elements of the body. cols: columns of a piece, counted from its own start.
    """

    row: Any
    part: Any
    start: Any
    size: Any
    head: Any
    body: Any
    cols: Any


class Parts(NamedTuple):
    """The parts of a row of x, for a program that reads others' parts too. rest: what else their states depend on."""

    row: Any
    x: Any
    n_cols: Any
    n_parts: Any
    part_cols: Any
    rest: Any


class RowScores(NamedTuple):
    """What a row's scores depend on.

    visible: leading columns that causality does not hide. masked_input: the x that becomes -inf. greedy: scale was 0.
    """

    visible: Any
    factor: Any
    masked_input: Any
    greedy: Any


class Edge(NamedTuple):
    """The elements before and after the aligned body, one a lane, where `on`."""

    cols: Any
    on: Any
    x: Any
