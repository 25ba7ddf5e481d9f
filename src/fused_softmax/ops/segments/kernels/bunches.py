"""Softmax, log_softmax and logsumexp of segments, and their gradients: the two launches of each.

Traffic: x is read once, y is written once, and offsets are read once; the gradient takes two reads and a write. A
segment that is longer than a tile is read twice.

First launch. A program has a bunch of segments. It cuts them into pieces of one length, and takes as many segments at a
time as fill a tile with pieces (`tile.py`), however long each is. If a segment is longer than a tile, the program reads
it in steps, twice, the second time from the caches (`ranges.py`). If it is longer still, it is a hub, and is left to
other programs. For hubs, positions are cut into blocks. No hub is shorter than a block, so a block has parts of two
hubs at most. The program of a block writes the two numbers of each part to a slot.

Second launch. A program has some blocks. For each hub in a block it merges the numbers of all parts of the hub, in
order, and then writes the block's part.

No program waits for another, and no result depends on which comes first. If offsets fall, or do not go from 0 to n,
some program of the first launch notices. The second launch then computes everything anew, in a slow way.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.exchange import let_next_begin, wait_for_launch_before
from fused_softmax.core.kernels.state import NEG_INF, rounded_product
from fused_softmax.ops.segments.kernels.elements import given_of, weight, write_lse
from fused_softmax.ops.segments.kernels.ranges import reduce_range, whole_of, write_range
from fused_softmax.ops.segments.kernels.spec import Segments
from fused_softmax.ops.segments.kernels.tile import of_tile

_SIZES = ["n", "n_segments", "n_inner", "n_groups", "n_bunches", "n_blocks", "n_menders", "block"]


@triton.jit(do_not_specialize=_SIZES)
def _compute(
    offsets_ptr, order_ptr, x_ptr, dy_ptr, out_ptr, lse_ptr, dlse_ptr, slots_ptr, hubs_ptr, sound_ptr, n, n_segments,
    n_inner, n_groups, n_bunches, n_blocks, n_menders, block, factor, K: tl.constexpr,
):  # fmt: skip
    group, which = tl.program_id(0) % n_groups, tl.program_id(0) // n_groups
    let_next_begin(K.leads)
    n, n_lse, stride, cols, left, base, of_lse, nothing = extents_of(n, n_segments, n_inner, group, factor, K)
    S = Segments(
        offsets_ptr, order_ptr, x_ptr, dy_ptr, out_ptr, lse_ptr, dlse_ptr, n, n_segments, n_lse, stride, cols, left,
        base, of_lse, factor, nothing,
    )  # fmt: skip
    turn = (n_bunches + n_blocks) // tl.maximum(n_blocks, 1)  # blocks lie among bunches, which run while blocks wait
    b = which // turn
    if (which % turn == 0) & (b < n_blocks):
        tell_parts(S, slots_ptr, hubs_ptr, group, b, n_groups, n_blocks, block, K)
    else:
        bunch = which - tl.minimum(tl.cdiv(which, turn), n_blocks)
        sound = of_bunch(S, bunch, block, K)
        tl.store(sound_ptr + bunch, sound.to(tl.uint8), mask=group == 0)


@triton.jit
def extents_of(n, n_segments, n_inner, group, factor, K: tl.constexpr):
    """All numbers of Segments, except two, for a program's group: an outer index and a block of columns."""
    first_col, outer, n_col_blocks = tl.zeros([], tl.int64), tl.zeros([], tl.int64), 1
    stride = tl.zeros([], tl.int64) + K.cols
    if not K.one_block:
        n_col_blocks = tl.cdiv(n_inner, K.cols)
        first_col += group % n_col_blocks * K.cols
        stride = tl.zeros([], tl.int64) + n_inner
        if K.whole:  # shows the compiler that rows begin on 16 bytes
            stride = stride // K.cols * K.cols
    if K.many:
        outer += group // n_col_blocks
    nothing = tl.full([], NEG_INF, tl.float32)
    if K.scaled:
        nothing = tl.where(factor < 0, float("inf"), NEG_INF)
    n, n_lse = tl.zeros([], tl.int64) + n, n_segments - 1 if K.nowhere else n_segments
    cols = tl.arange(0, K.cols)
    base, of_lse = outer * n * stride + first_col, outer * n_lse * stride + first_col + cols
    return n, n_lse, stride, cols, n_inner - first_col, base, of_lse, nothing


@triton.jit
def inside(offset, S):
    """An offset, moved into the tensor.

    Wrong offsets then give wrong results, which the second launch replaces, but no access outside the tensor.
    """
    return tl.minimum(tl.maximum(offset.to(tl.int64), 0), S.n)


@triton.jit
def offsets_of(S, segment, there):
    """Where segments begin and end, according to the offsets."""
    raw = tl.load(S.offsets_ptr + segment, mask=there, other=0).to(tl.int64)
    return raw, tl.load(S.offsets_ptr + segment + 1, mask=there, other=0).to(tl.int64)


@triton.jit
def extent_of(S, raw, raw_end, there):
    """(begin, size) of segments; 0 and -1 of those that do not exist."""
    begin, end = inside(raw, S), inside(raw_end, S)
    return begin, tl.where(there, tl.minimum(end - begin, 2147483647), -1).to(tl.int32)


@triton.jit
def of_bunch(S, bunch, block, K: tl.constexpr):
    """Write the results of a bunch, except its hubs. Returns 1 if its offsets are right, and 0 if not."""
    i = bunch.to(tl.int64) * K.segments
    at = i + tl.arange(0, K.segments)
    raw, raw_end = offsets_of(S, at, at < S.n_segments)
    begin, size = extent_of(S, raw, raw_end, at < S.n_segments)
    sound = (raw <= raw_end) & ((at > 0) | (raw == 0)) & ((at != S.n_segments - 1) | (raw_end == S.n))
    if K.lse and not K.backward:
        nothing = tl.full([K.segments, K.cols], NEG_INF, tl.float32)
        write_lse(S, at[:, None], (size == 0)[:, None], nothing, tl.exp(nothing), K)
    pieces = pieces_of(size, K)
    mine = (size > 0) & (pieces <= K.pieces)
    pieces = tl.where(mine, pieces, 0)
    if K.singles:
        if tl.max(pieces, axis=0) > 1:
            of_pieces(S, i, pieces, K)
        else:
            none = at.to(tl.int32) * 0
            of_tile(S, at, begin, tl.where(mine, size, -1), none, none, K)
    else:
        of_pieces(S, i, pieces, K)
    long = (size > 0) & (mine == 0)
    if tl.max(long.to(tl.int32), axis=0) > 0:
        count, members = members_of(long & (size <= block), K)
        for nth in range(0, count):
            segment = i + tl.sum(tl.where(tl.arange(0, K.segments) == nth, members, 0), axis=0)
            raw_1, end_1 = offsets_of(S, segment, True)
            begin_1, size_1 = extent_of(S, raw_1, end_1, True)
            of_range(S, segment, begin_1, begin_1 + size_1, segment >= S.n_lse, K)
    return tl.min(sound.to(tl.int32), axis=0)


@triton.jit
def pieces_of(size, K: tl.constexpr):
    """How many pieces segments have."""
    return tl.cdiv(size, K.length)


@triton.jit
def of_pieces(S, i, pieces, K: tl.constexpr):
    """Write the results of those segments of the bunch at i that have pieces, as many at a time as fit in a tile."""
    upto = tl.cumsum(pieces, axis=0)
    total = tl.max(upto, axis=0)
    row, done = tl.arange(0, K.pieces), total * 0
    while done < total:
        after = tl.max(tl.where(upto <= done + K.pieces, upto, 0), axis=0)
        ahead = tl.maximum(upto - done, 0)
        lives = row < after - done
        # A row's segment comes after all those whose pieces end at the row or before.
        which = tl.where(lives, tl.cumsum(tl.histogram(ahead, K.pieces, mask=ahead < K.pieces), axis=0), 0)
        nth = tl.where(lives, row + done - tl.gather(upto - pieces, which, 0), 0)
        raw, raw_end = offsets_of(S, i + which, lives)
        begin, size = extent_of(S, raw, raw_end, lives)
        left = tl.where(lives, pieces_of(size, K) - 1 - nth, 0)
        of_tile(S, i + which, begin, size, nth, left, K)
        done = after


@triton.jit
def members_of(mine, K: tl.constexpr):
    """(how many of a bunch are `mine`, the places of these in the bunch).

    It takes a histogram and a gather: comparing all with all would take the layout of a tile, and hundreds of
    registers.
    """
    upto = tl.cumsum(mine.to(tl.int32), axis=0)
    members = tl.cumsum(tl.histogram(upto, K.segments, mask=upto < K.segments), axis=0)
    return tl.max(upto, axis=0), members


@triton.jit
def of_range(S, segment, begin, end, spoilt, K: tl.constexpr):
    """Write the results of one segment, by one program; NaN if it is spoilt."""
    segments = tl.zeros([1, 1], tl.int64) + segment
    if K.sums:
        m, s = reduce_range(S, begin, end, K)
    else:
        m, s = given_of(S, segments, segments >= 0, K)
    s = tl.where(spoilt, float("nan"), s)
    if K.writes_elements:
        write_range(S, begin, end, m, s, K)
    else:
        write_lse(S, segments, segments >= 0, m, s, K)


# Hubs.


@triton.jit
def segment_at(S, first, last, K: tl.constexpr):
    """The segments that two positions are in.

    With wrong offsets too the search ends, at segments that exist.
    """
    a, b = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    most_a, most_b = a + S.n_segments, b + S.n_segments
    while (a < most_a) | (b < most_b):  # counts the offsets after the first one that are not past a position
        a, most_a = narrowed(S, a, most_a, first, K)
        b, most_b = narrowed(S, b, most_b, last, K)
    return tl.minimum(a, S.n_segments - 1), tl.minimum(b, S.n_segments - 1)


@triton.jit
def narrowed(S, least, most, position, K: tl.constexpr):
    step = tl.maximum(tl.cdiv(most - least, K.probes), 1)
    at = least + (tl.arange(0, K.probes) + 1) * step - 1
    there = at < most
    offset = tl.load(S.offsets_ptr + at + 1, mask=there, other=0)
    upto = tl.sum((there & (offset <= position)).to(tl.int32), axis=0)
    return least + upto * step, tl.minimum(least + (upto + 1) * step - 1, most)


@triton.jit
def tell_parts(S, slots_ptr, hubs_ptr, group, b, n_groups, n_blocks, block, K: tl.constexpr):
    """Store the two numbers of each part that hubs have in a block. Without K.sums, write the parts' results.

    The parts are of the hub at the block's first position, and of another at its last. Their numbers are stored too,
    for the second launch; -1 is no hub.
    """
    from_ = b.to(tl.int64) * block
    upto = tl.minimum(from_ + block, S.n)
    one, other = segment_at(S, from_, upto - 1, K)
    for tail in range(0, 2):
        segment = tl.where(tail == 0, one, other)
        raw, raw_end = offsets_of(S, segment, True)
        begin, size = extent_of(S, raw, raw_end, True)
        is_hub = (size > block) & ((tail == 0) | (other != one))
        slot = slot_of(group, b, tail, n_blocks)
        tl.store(hubs_ptr + slot, tl.where(is_hub, segment, -1))
        if is_hub:
            first, last = tl.maximum(begin, from_), tl.minimum(begin + size, upto)
            if K.sums:
                m, s = reduce_range(S, first, last, K)
                slot_ptrs = slots_ptr + slot * K.cols + S.cols[None, :]
                tl.store(slot_ptrs, s)
                if not K.backward:
                    tl.store(slot_ptrs + n_groups.to(tl.int64) * n_blocks * 2 * K.cols, m)
            else:
                of_range(S, segment, first, last, False, K)


@triton.jit
def slot_of(group, b, tail, n_blocks):
    return (group.to(tl.int64) * n_blocks + b) * 2 + tail


@triton.jit
def heard_of_hub(S, slots_ptr, group, begin, end, n_groups, n_blocks, block, K: tl.constexpr):
    """The two numbers of a hub, merged from its parts in their order. Every program gets the same bits."""
    first, last = begin // block, (end - 1) // block
    m = tl.full([K.range_wide, K.cols], NEG_INF, tl.float32)
    s = tl.full([K.range_wide, K.cols], 0, tl.float32)
    plane = n_groups.to(tl.int64) * n_blocks * 2 * K.cols
    for start in range(first, last + 1, K.range_wide):
        b = start + tl.arange(0, K.range_wide)[:, None]
        there = b <= last
        tail = ((b == first) & (begin > b * block)).to(tl.int64)
        slot_ptrs = slots_ptr + slot_of(group, b, tail, n_blocks) * K.cols + S.cols[None, :]
        s_b = tl.load(slot_ptrs, mask=there, other=0.0)
        if K.backward:
            s += s_b
        else:
            m_b = tl.load(slot_ptrs + plane, mask=there, other=NEG_INF)
            top = tl.maximum(m, m_b)
            s = rounded_product(s, weight(m, top, K)) + rounded_product(s_b, weight(m_b, top, K))
            m = top
    return whole_of(m, s, K)


@triton.jit(do_not_specialize=_SIZES)
def _finish(
    offsets_ptr, order_ptr, x_ptr, dy_ptr, out_ptr, lse_ptr, dlse_ptr, slots_ptr, hubs_ptr, sound_ptr, n, n_segments,
    n_inner, n_groups, n_bunches, n_blocks, n_menders, block, factor, K: tl.constexpr,
):  # fmt: skip
    n_programs = tl.num_programs(0) // n_groups
    group, which = tl.program_id(0) % n_groups, n_programs - 1 - tl.program_id(0) // n_groups
    n, n_lse, stride, cols, left, base, of_lse, nothing = extents_of(n, n_segments, n_inner, group, factor, K)
    S = Segments(
        offsets_ptr, order_ptr, x_ptr, dy_ptr, out_ptr, lse_ptr, dlse_ptr, n, n_segments, n_lse, stride, cols, left,
        base, of_lse, factor, nothing,
    )  # fmt: skip
    wait_for_launch_before(K.follows)
    share = tl.cdiv(n_blocks, n_programs)
    first, last = which * share, tl.minimum((which + 1) * share, n_blocks)
    hubs = tl.full([K.probes], -1, tl.int64)
    if K.sums:
        end = slot_of(group, last, 0, n_blocks)
        for start in range(first, last, K.probes // 2):
            at = slot_of(group, start, 0, n_blocks) + tl.arange(0, K.probes)
            hubs = tl.maximum(hubs, tl.load(hubs_ptr + at, mask=at < end, other=-1))
    has_hubs = tl.max(hubs, axis=0) >= 0
    if (which < n_menders) | has_hubs:
        sound = tl.full([K.flags], 1, tl.uint8)
        for start in range(0, n_bunches, K.flags):
            j = start + tl.arange(0, K.flags)
            sound &= tl.load(sound_ptr + j, mask=j < n_bunches, other=1)
        if tl.min(sound.to(tl.int32), axis=0) == 0:
            if which < n_menders:
                make_anew(S, which, n_menders, K)
        elif has_hubs:
            for b in range(first, last):
                write_parts(S, slots_ptr, hubs_ptr, group, b, n_groups, n_blocks, block, K)


@triton.jit
def write_parts(S, slots_ptr, hubs_ptr, group, b, n_groups, n_blocks, block, K: tl.constexpr):
    """Write the results of the parts that hubs have in a block."""
    from_ = tl.full([], 0, tl.int64) + b * block
    for tail in range(0, 2):
        segment = tl.load(hubs_ptr + slot_of(group, b, tail, n_blocks))
        if segment >= 0:
            begin, end = offsets_of(S, segment, True)
            m, s = heard_of_hub(S, slots_ptr, group, begin, end, n_groups, n_blocks, block, K)
            if K.writes_elements:
                s = tl.where(segment >= S.n_lse, float("nan"), s)
                write_range(S, tl.maximum(begin, from_), tl.minimum(end, from_ + block), m, s, K)
            else:
                segments = tl.zeros([1, 1], tl.int64) + segment
                write_lse(S, segments, (segments >= 0) & (begin >= from_), m, s, K)


# If offsets fall, or do not go from 0 to n.


@triton.jit
def make_anew(S, which, n_menders, K: tl.constexpr):
    """Write the results of one of n_menders parts of all segments, as `reference` has them.

    Segments are taken from offsets that are raised so that they never fall. A segment whose own offsets differ from
    these is NaN.
    """
    share = tl.cdiv(S.n_segments, n_menders)
    first = which.to(tl.int64) * share
    top = tl.zeros([], tl.int64)
    for start in range(0, first + 1, K.probes):
        at = start + tl.arange(0, K.probes)
        top = tl.maximum(top, tl.max(inside(tl.load(S.offsets_ptr + at, mask=at <= first, other=0), S), axis=0))
    for i in range(first, tl.minimum(first + share, S.n_segments)):
        raw, raw_end = tl.load(S.offsets_ptr + i), tl.load(S.offsets_ptr + i + 1)
        begin = tl.where(i == 0, 0, top)
        top = tl.maximum(top, inside(raw_end, S))
        end = tl.where(i + 1 == S.n_segments, S.n, top)
        of_range(S, i, begin, end, (raw != begin) | (raw_end != end), K)
