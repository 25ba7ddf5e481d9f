"""What kernels over a strided dim are compiled for, and the bundles of values that their helpers share.

Programs that share columns over a strided dim exchange one message for each inner position. The message, its tag and
the wait for it are those of `exchange.py`, and a function that is named after one there does the same. A group's slots
are [block_inner, n_parts], and are read as a tile [block_inner, lanes].

Scores over a strided dim: scale and mask are applied to held tiles [block_cols, block_inner]. Both are read where they
lie. If a mask is the same for all columns, or for all inner positions, a program reads only one row or one column of
the mask for each tile.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from fused_softmax.core.kernels.exchange import in_any_warp, pack_state, tag_of, unpack_state, wait_for
from fused_softmax.core.kernels.spec import ADDED_MASK, NO_MASK, RowScores, Spec
from fused_softmax.core.kernels.state import NEG_INF, NO_COLUMN, rounded_product, scores_of, weight_of, widen
from fused_softmax.ops.softmax.kernels.scores import only_column, scores_by


@dataclass(frozen=True, kw_only=True)
class ColumnSpec(Spec):
    """For reductions over a strided dim: tiles [cols, inner] along contiguous inner positions.

    block_inner: inner positions of a tile. whole: whether blocks of them divide the inner size. positions: how many of
    them a thread has states for. unpack_bf16: as `unpack`.
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
        """For 2-byte elements, of which a thread has twice as many inner positions.

        With one number for each position, and not two, three programs fit.
        """
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
    """A block of inner positions, of which those `on` exist, and the columns of it that a program has, from `start`."""

    outer: Any
    inner: Any
    on: Any
    start: Any
    size: Any


class ColumnParts(NamedTuple):
    """`Parts` for the columns of a group."""

    group: Any
    n_cols: Any
    n_inner: Any
    part_cols: Any
    rest: Any


@triton.jit
def publish_columns(m, s, slots_ptr, part, n_parts, tag, K: tl.constexpr):
    """`publish` with a message for each inner position."""
    tl.debug_barrier()  # a warp that shares no column may be late, and has yet to read the tag that this flips
    slot_ptrs = slots_ptr + part + tl.arange(0, K.block_inner)[None, :] * n_parts
    tl.atomic_xchg(slot_ptrs, pack_state(m, s, tag), sem="relaxed")


@triton.jit
def slots_of_columns(slots_ptr, n_parts, K: tl.constexpr):
    """(addresses [block_inner, lanes] of the slots of a group, which of them belong to a part)."""
    part = tl.arange(0, K.lanes)[None, :]
    inner = tl.arange(0, K.block_inner)[:, None]
    return slots_ptr + part + inner * n_parts, (part < n_parts) & (inner >= 0)


@triton.jit
def collect_columns(slots_ptr, n_parts, tag, K: tl.constexpr):
    """`collect`, as [block_inner, lanes].

    Parts lie along another axis than columns do, so that the compiler changes the layout of the result, and not that of
    the columns. They lie side by side, so that few threads of one warp share an inner position, and reduce it without
    shared memory.
    """
    LANES: tl.constexpr = K.lanes
    BLOCK_INNER: tl.constexpr = K.block_inner
    slot_ptrs, peer = slots_of_columns(slots_ptr, n_parts, K)
    message = tl.zeros([BLOCK_INNER, LANES], tl.int64) + ((1 - tag) << 31)
    message, left = wait_for(slot_ptrs, message, peer, tag)
    return message, in_any_warp(left, K)


@triton.jit
def stand_in_columns(slots_ptr, n_parts, tag, STATE: tl.constexpr, given, K: tl.constexpr):
    """`stand_in`, for every inner position."""
    BLOCK_INNER: tl.constexpr = K.block_inner
    LANES: tl.constexpr = K.lanes
    slot_ptrs, peer = slots_of_columns(slots_ptr, n_parts, K)
    message = tl.zeros([BLOCK_INNER, LANES], tl.int64) + ((1 - tag) << 31)
    message, part = next_missing_columns(slot_ptrs, message, tl.zeros([], tl.int32), n_parts, tag, K)
    while part < n_parts:
        m, s = STATE(part, given, K)
        tl.debug_barrier()  # no slot is read before the data was
        message = tl.load(slot_ptrs, mask=peer & (tag_of(message) != tag), other=message, volatile=True)
        missing = (tl.arange(0, LANES)[None, :] == part) & (tag_of(message) != tag)
        message = tl.where(missing, tl.trans(pack_state(m, s, tag)), message)
        message, part = next_missing_columns(slot_ptrs, message, part + 1, n_parts, tag, K)
    return message


@triton.jit
def next_missing_columns(slot_ptrs, message, part, n_parts, tag, K: tl.constexpr):
    """`next_missing`, for parts of which a warp misses the state of any inner position."""
    lanes = tl.arange(0, K.lanes)[None, :]
    missing = tl.zeros([], tl.int32)
    while (part < n_parts) & (missing == 0):
        message = tl.load(slot_ptrs, mask=(lanes < n_parts) & (tag_of(message) != tag), other=message, volatile=True)
        missing = in_any_warp(tl.max(((lanes == part) & (tag_of(message) != tag)).to(tl.int32), axis=None), K)
        part += 1 - missing
    return message, part


@triton.jit
def states_of_columns(message, n_parts, K: tl.constexpr):
    """`states_of`, as [block_inner, lanes]."""
    peer = tl.arange(0, K.lanes)[None, :] < n_parts
    m_parts, s_parts = unpack_state(message)
    return tl.where(peer, m_parts, NEG_INF), tl.where(peer, s_parts, 0.0)


@triton.jit
def merged_columns(message, n_parts, K: tl.constexpr):
    """`merged`, for every inner position."""
    m_parts, s_parts = states_of_columns(message, n_parts, K)
    m = tl.max(m_parts, axis=1)
    weights = weight_of(m_parts, m[:, None], K.ptx and not K.subtract_first)
    s = tl.sum(rounded_product(s_parts, weights), axis=1)
    return m[None, :], s[None, :]


@triton.jit
def summed_columns(message, n_parts, K: tl.constexpr):
    """`summed`, for every inner position."""
    d_parts, _ = unpack_state(message)
    return tl.sum(tl.where(tl.arange(0, K.lanes)[None, :] < n_parts, d_parts, 0.0), axis=1)[None, :]


@triton.jit
def scores_of_columns(c, S, K: tl.constexpr):
    """What the scores of each inner position depend on; single numbers if they are the same for all."""
    if K.scaled:
        factor = S.scale
        if S.scale_ptr is not None:
            at = S.scale_ptr + c.outer * S.scale_outer
            if K.scale_inner:
                at += c.inner[None, :].to(tl.int64) * S.scale_inner
                factor = tl.load(at, mask=c.on[None, :], other=1.0)
            else:
                factor = tl.load(at)
        return scores_by(factor, 0, K)
    else:
        return RowScores(0, 1.0, NEG_INF, False)


@triton.jit
def keep_columns(tiles, c, q, S, K: tl.constexpr, FULL: tl.constexpr):
    """The tiles, with what is masked turned to the masked input. FULL: see `load_columns`.

    An added mask turns them into finished scores, in the dtype of the arithmetic.
    """
    wide: tl.constexpr = tl.float64 if tiles[0].dtype.is_fp64() else tl.float32
    kept = ()
    for p in tl.static_range(len(tiles)):
        if p == 0 or K.mask_cols:
            mask = mask_of_columns(p, c, S, K, FULL)
        x = tiles[p]
        if K.mask == 2:
            x = widen(x, K.cast_dtype)
            if K.scaled:
                x *= q.factor
            x += mask.to(x.dtype)
        else:
            x = tl.where(mask != 0, x, (tl.zeros([], wide) + q.masked_input).to(x.dtype))
        kept = kept + (x,)  # noqa: RUF005  the compiler has no unpacking
    return kept


@triton.jit
def mask_of_columns(p, c, S, K: tl.constexpr, FULL: tl.constexpr):
    """The mask of a tile: of its shape, or one row, one column or one number of it. 0 outside the tensor."""
    VECTOR: tl.constexpr = K.vector
    cols = tl.arange(0, K.block_cols)[:, None]
    inner = tl.max_contiguous(c.inner, VECTOR)[None, :]  # no wider than x, so that a thread has the same positions
    here = S.mask_ptr + c.outer * in_vectors(S.mask_outer, K)
    if K.mask_cols:
        stride = in_vectors(S.mask_col, K).to(tl.int64)
        here += c.start.to(tl.int64) * stride
        at = cols.to(tl.int64) * stride
        if K.mask_inner:
            at += inner.to(tl.int64) * S.mask_inner
        here = here + at + p * (stride * K.block_cols)
        if p < FULL and (K.whole or not K.mask_inner):
            return tl.load(here)
        elif K.whole or not K.mask_inner:
            return tl.load(here, mask=p * K.block_cols + cols < c.size, other=0)
        elif p < FULL:
            return tl.load(here, mask=c.on[None, :] & (cols >= 0), other=0)
        else:
            return tl.load(here, mask=(p * K.block_cols + cols < c.size) & c.on[None, :], other=0)
    elif K.mask_inner:
        here += inner.to(tl.int64) * S.mask_inner
        return tl.load(here, mask=c.on[None, :], other=0)
    else:
        return tl.load(here)


@triton.jit
def in_vectors(stride, K: tl.constexpr):
    """A stride of the mask, computed so that the compiler sees how wide its accesses may be."""
    return stride // K.mask_vector * K.mask_vector


@triton.jit
def keep_first_columns(tiles, m, q, K: tl.constexpr):
    """The tiles, in which greedy inner positions keep their first maximum alone."""
    cols = tl.arange(0, K.block_cols)[:, None]
    found = tl.where(scores_of(tiles[0], q.factor, K) == m, cols, NO_COLUMN)
    for p in tl.static_range(1, len(tiles)):
        here = scores_of(tiles[p], q.factor, K) == m
        found = tl.minimum(found, tl.where(here, p * K.block_cols + cols, NO_COLUMN))
    first = tl.min(found, axis=0)[None, :]
    kept = ()
    for p in tl.static_range(len(tiles)):
        kept = kept + (only_column(tiles[p], p * K.block_cols + cols, first, q, K),)  # noqa: RUF005
    return kept
