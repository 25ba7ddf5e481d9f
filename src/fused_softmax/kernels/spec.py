"""The description that a kernel is compiled for, and the bundles of values that its helpers share.

A kernel has one constexpr, K: a frozen Spec made on the host. A launch's arguments are flat. Inside, values that belong
together travel as NamedTuples. Triton 3.6 returns no NamedTuple that holds None, so optional pointers stay in bundles
that are only passed down.
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
    nested: whether the inputs' rows, or outer indices, are numbered over several dims. The stride of each is then
        (n_1, n_2, odd_0, odd_1, odd_2): the sizes of the last two dims, and of all three the stride in vectors, twice
        and 1 more. Triton looks at a tuple's numbers, and knows nothing of odd ones but the 1 of a stride of 0.
    edges_first: whether a tile loads its edges before its pieces, and both get the layout of the pieces.
    cast_dtype: inputs are rounded to it as they are read.
    fp8: the format of an input of bytes, held as fp16. converts_fp8: whether the chip has an instruction that does it.
    axis: of a piece, which is reduced.
    ptx: whether inline PTX may stand in.
    prefetch: whether programs ask L2 for the data of a later program.
    split: whether a row's programs exchange messages. lanes, copies, poll_last_first: the plan's.
    helps: whether a program that waited long computes the missing parts' states. A kernel without it is compiled for
        the number of its registers, and never launched.
    publish, collect: both on a GPU. The interpreter runs programs one after another, so all publish in one launch and
        collect in the next.
    peers: whether programs on other GPUs have parts of the row too; nobody then computes a missing state.
    follows: whether the launch may begin before the one before it has ended, and waits for what that wrote.
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
    helps: bool = True
    publish: bool = True
    collect: bool = True
    peers: bool = False
    follows: bool = False

    @property
    def state_dtype(self):
        """Of m and s, and of the arithmetic."""
        return tl.float64 if self.cast_dtype.is_fp64() else tl.float32

    @property
    def compute_dtype(self):
        """Which dtype a piece is taken for when it is used; overridden where pieces hold finished scores."""
        exact = self.fp8 is not None and not self.cast_dtype.is_fp64()  # every 16-bit dtype holds fp8 as it is
        return tl.float16 if exact else self.cast_dtype

    @property
    def scale_on_use(self):
        """Whether a piece is multiplied by its row's factor each time it is used."""
        return False

    @property
    def lane_cols(self):
        """Columns that a lane reads of a tile whose lanes keep states of their own."""
        return 4 if self.vector == 1 else self.vector

    @property
    def subtract_first(self):
        """Whether exp(x - m) subtracts before it scales."""
        return False

    @property
    def unpack(self):
        """Whether bf16 is unpacked by an instruction an element."""
        return self.ptx


@dataclass(frozen=True, kw_only=True)
class ScoreSpec(Spec):
    """Of rows of scores. z = x * scale + mask: see `options.Scores`.

    log: log_softmax. mask: NO_MASK, BOOL_MASK or ADDED_MASK. greedy: whether a row may have scale 0. hides: whether
    something may be masked, which then has no gradient. zero_masked_rows: a row of which nothing is kept is no NaN.
    sink: whether a row's sum counts one score more.
    shared_dims: rows that share a row of the mask follow each other, and this many inner indices tell them apart.
    causal_step: pieces from one place where the diagonal may lie to the next.
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
        """An added mask makes finished scores of what is read, in the dtype of the arithmetic."""
        return self.state_dtype if self.mask == ADDED_MASK else super().compute_dtype

    @property
    def scale_on_use(self):
        return self.scaled and self.mask != ADDED_MASK


@dataclass(frozen=True, kw_only=True)
class GradientSpec(Spec):
    """Of the gradients of softmax and log_softmax. cast_dtype is that of their output y.

    log, hides: as ScoreSpec's. out_dtype: of the gradient. scaled: whether it is multiplied by a number.
    stream: whether rows are read twice.
    """

    out_dtype: Any
    stream: bool = False
    log: bool = False
    hides: bool = False
    scaled: bool = False

    @property
    def unpack(self):
        """Rows of few pieces are at a bound of registers as they are: bf16 8192 0.99 at 64, 0.98 unpacked at 66."""
        return self.ptx and (self.tile or self.stream or self.log or self.split or self.pieces > 4)


@dataclass(frozen=True, kw_only=True)
class ColumnSpec(Spec):
    """Of reductions over a strided dim: tiles [cols, inner] along contiguous inner positions.

    block_inner: inner positions of a tile; whole: whether blocks of them divide the inner size. log, mask, scaled,
    greedy, hides, zero_masked_rows, out_dtype: as above. positions: how many of them a thread has a state for.
    unpack_bf16: as `unpack`.
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


@dataclass(frozen=True, kw_only=True)
class LossSpec(Spec):
    """Of the losses of rows of logits z = x * scale, or softcap * tanh(x * scale / softcap): see `options.Loss`.

    weighted, smooth, capped, scaled (or capped), z_loss, mean, stats: what the call asks for. totals: parts of the
    targets' totals. gradient: whether it is written too; inplace: over the logits.
    counted: how many targets at most each program counts itself, instead of totals. finishes: whether the program whose
    loss is the last to be written sums them all.
    block_tokens: of a tile [classes, tokens].
    """

    weighted: bool = False
    smooth: bool = False
    scaled: bool = False
    capped: bool = False
    z_loss: bool = False
    mean: bool = False
    totals: int = 1
    stats: bool = False
    gradient: bool = False
    inplace: bool = False
    counted: int = 0
    finishes: bool = False
    greedy: bool = False
    block_tokens: int = 0
    crowds: bool = False

    @property
    def compute_dtype(self):
        """With a softcap pieces hold finished logits, so that no tanh is taken twice."""
        return self.state_dtype if self.capped else self.cast_dtype

    @property
    def scale_on_use(self):
        return self.scaled and not self.capped

    @property
    def unpack(self):
        """Few pieces would take so few registers that programs crowd: bf16 16384 x 8192 0.92, 0.90 with 32 of 48."""
        return self.ptx and not (self.crowds and not self.split and self.pieces <= 4)


@dataclass(frozen=True, kw_only=True)
class SampleSpec:
    """Of draws from rows of logits, and where the parts of a draw's scratch begin, in int64.

    stretches: of 1024 columns, that a program reads at a time. whole_groups: whether no row ends within 8 columns.
    biased, bitmasked: whether a bias is added, and whether a bitmask says which columns there are.
    split: whether a row's programs tell each other their best.
    all_stretches: at least as many as a row has. capacity: lanes of a row that are held, and candidates, at most, that
        are ranked of their logits (ranked: whether top-k or top-p may ask for it).
    joint: whether each filter judges all columns.
    wide: whether launches follow for rows whose boundary is lower. sampled: groups that they are told of it by; listed:
        columns that it is sought among.
    grain_bits: of the order of a logit, those that follow from the others: 16-bit logits have fewer than fp32.
    """

    stretches: int
    whole_groups: bool
    biased: bool = False
    bitmasked: bool = False
    split: bool = False
    all_stretches: int = 1
    capacity: int = 64
    candidates: int = 128
    ranked: bool = True
    joint: bool = False
    wide: bool = False
    sampled: int = 512
    listed: int = 8192
    grain_bits: int = 0
    ptx: bool = False

    @property
    def grain(self) -> int:
        return 1 << self.grain_bits

    @property
    def sums_at(self) -> int:
        """int64: the sum of each stretch. Before them, what is open of a row: see `sample_wide`."""
        return 12

    @property
    def ranked_at(self) -> int:
        """int64: the candidates."""
        return self.sums_at + self.room

    @property
    def maxima_at(self) -> int:
        """fp32: the maximum of each stretch."""
        return self.ranked_at + (self.candidates if self.ranked else 0)

    @property
    def tops_at(self) -> int:
        """fp32: the maximum of each lane."""
        return self.maxima_at + self.room // 2

    @property
    def lanes_at(self) -> int:
        """int32: the lanes that are held."""
        return self.tops_at + 16 * self.room

    @property
    def list_at(self) -> int:
        """int32: the columns among which a low boundary is sought."""
        return self.lanes_at + self.capacity // 2

    @property
    def scratch(self) -> int:
        return self.list_at + (self.listed // 2 if self.wide else 0)

    @property
    def room(self) -> int:
        return max(4, self.all_stretches)  # so that all begin on 16 bytes


class Draw(NamedTuple):
    """A row that is drawn from: where it is, what is added, and by which noise. valid: whether it can be, so far.

    bias_ptr, bitmask_ptr: the draw's own, where there are any (K.biased, K.bitmasked).
    """

    ptr: Any
    bias_ptr: Any
    bitmask_ptr: Any
    n_cols: Any
    temperature: Any
    factor: Any
    seed: Any
    position: Any
    valid: Any


class Bounds(NamedTuple):
    """Of what is kept: the last logit and its column, and the least number above it. Of equal logits the first stay."""

    x: Any
    above: Any
    col: Any


class Filters(NamedTuple):
    """k, 0 for all; p; the order of the least logit that min-p keeps; and the row's maximum and sum, in units."""

    k: Any
    p: Any
    least: Any
    m: Any
    total: Any


class Held(NamedTuple):
    """Logits [lanes, 8] of the four quarters of lanes, by the numbers of their calls."""

    x_0: Any
    x_1: Any
    x_2: Any
    x_3: Any
    call: Any


class Scored(NamedTuple):
    """Scale, mask, causality and sink of a call, as its kernel is given them.

    A row's number splits into up to three indices (n_1 and n_2 are the sizes of the last two); strides are of those.
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
    elements before the body. cols: of a piece, counted from its own start.
    """

    row: Any
    part: Any
    start: Any
    size: Any
    head: Any
    body: Any
    cols: Any


class Parts(NamedTuple):
    """The parts of a row of x, for a program that reads others' too. rest: what else their states depend on."""

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
    """The same of a group's columns."""

    group: Any
    n_cols: Any
    n_inner: Any
    part_cols: Any
    rest: Any


class Numbers(NamedTuple):
    """The numbers of a loss, in the dtype of the arithmetic."""

    factor: Any
    cap: Any
    smoothing: Any
    lse_square_scale: Any


class Target(NamedTuple):
    """A row's class t, whether the row counts, whether there is no such class, and the class's weight."""

    t: Any
    kept: Any
    wrong: Any
    w: Any


class LossRow(NamedTuple):
    """The arguments of a kernel that holds a row of logits, or its part: all but those of the exchange."""

    x: Any
    dx: Any
    target_ptr: Any
    weight_ptr: Any
    totals_ptr: Any
    w_total_ptr: Any
    numbers_ptr: Any
    m_ptr: Any
    ls_ptr: Any
    loss_ptr: Any
    z_ptr: Any
    result_ptr: Any
    ticket_ptr: Any
    n_cols: Any
    n_parts: Any
    part_cols: Any
    ignore_index: Any
    factor: Any
    hidden: Any
    cap: Any
    smoothing: Any
    lse_square_scale: Any


class HeldLoss(NamedTuple):
    """What a program knows of a row of logits, or of its part, before it knows the row's state.

    z_t: the target's logit, for the part that `writes` the row's loss; wz: sum_c w_c (z_c - zero) of the part.
    g, g_z: what a row's loss and its z-loss count in the result.
    """

    target: Any
    z_t: Any
    zero: Any
    wz: Any
    w_total: Any
    writes: Any
    g: Any
    g_z: Any


class Shares(NamedTuple):
    """dloss / dz_c = p_c a - [c = t] b - w_c u."""

    a: Any
    b: Any
    u: Any
