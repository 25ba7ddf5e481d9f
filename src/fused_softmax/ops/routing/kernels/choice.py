"""The k best experts of rows, without sorting the row. Of equal experts the lowest is chosen first.

Each lane of a warp sorts the keys of its own experts, of up to 8 tiles: a list. Each choice is the maximum over the
heads of all lists, which takes one instruction of a warp. The lane that had it then drops that head from its list. If a
logit has at most 19 bits, its key shares a word with the number of its expert, so that no two keys are equal. Otherwise
a second instruction finds the expert.
"""

import triton
import triton.language as tl

from fused_softmax.ops.routing.kernels.common import (
    LANES,
    experts_of,
    in_lanes,
    lanes,
    number_of,
    of_each,
    over_tiles,
    score_of,
    sortable,
)

LOWEST = tl.constexpr(-(2**31))  # a key below that of any number
EXPERT = tl.constexpr(2**13 - 1)  # the bits of a packed key for the expert, all flipped: of equal keys the lowest wins
NONE = tl.constexpr(2**31 - 1)


@triton.jit
def choose(heads, experts, n_turns, K: tl.constexpr):
    """(found, ids, last, last_id): the K.k best experts of each row, by the lists of `lists_of`.

    found, ids: their keys and experts, a tile [rows, LANES] for each half. last, last_id: key and expert of the last
    choice. If K.packed, the key has the expert, and last_id is not set.
    """
    HALVES: tl.constexpr = K.halves
    found, ids = (), ()
    for _ in tl.static_range(HALVES):
        found = found + (in_lanes(LOWEST, tl.int32, K),)  # noqa: RUF005  the compiler has no unpacking
        ids = ids + (in_lanes(-1, tl.int32, K),)  # noqa: RUF005
    best, at = of_each(LOWEST, tl.int32, K), of_each(-1, tl.int32, K)
    if K.packed:
        for turn in range(K.k):
            best = best_head(heads, K)
            found = recorded(found, best, turn)
            heads, experts = after(heads, experts, best, best, K)
        ids = experts_of_packed(found)
    else:
        for turn in range(n_turns):  # K.k, hidden from the compiler, which would unroll the loop
            best = best_head(heads, K)
            at = first_at(heads, experts, best, K)
            found, ids = recorded(found, best, turn), recorded(ids, at, turn)
            heads, experts = after(heads, experts, best, at, K)
    return found, ids, best, at


@triton.jit
def keys_of(tiles, m, total, bias_ptr, K: tl.constexpr):
    """(keys, ordered): int32 keys of all tiles, which sort as what the choice compares; whether none of that is NaN.

    Keys are LOWEST where no expert may be chosen. m, total: of rows, used if K.of_scores.
    """
    N_CHUNKS: tl.constexpr = K.n_chunks
    CHUNKS: tl.constexpr = K.chunks
    START: tl.constexpr = K.starts
    keys = ()
    bad = in_lanes(0, tl.int32, K)
    for c in tl.static_range(N_CHUNKS):
        of_chunk, of_bad = keys_of_chunk(
            tiles, m, total, bias_ptr, START[c], CHUNKS[3 * c], CHUNKS[3 * c + 1], CHUNKS[3 * c + 2], K
        )
        keys = keys + of_chunk
        bad |= of_bad
    ordered = tl.max(bad, axis=1) == 0
    if K.grouped:
        keys, in_order = within_best_groups(keys, K)
        ordered &= in_order
    return keys, ordered


@triton.jit
def keys_of_chunk(
    tiles, m, total, bias_ptr, START: tl.constexpr, FIRST: tl.constexpr, STACKED: tl.constexpr, LENGTH: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    keys = ()
    bad = in_lanes(0, tl.int32, K)
    for t in tl.static_range(LENGTH):
        experts, there = experts_of(FIRST + t, STACKED, K)
        compared = tiles[START + t]
        if K.of_scores:
            if K.by_softmax:
                compared = tl.exp(compared - over_tiles(m)) / over_tiles(total)
            else:
                compared = score_of(compared, K)
        if bias_ptr is not None:
            compared += tl.load(bias_ptr + experts, mask=there, other=0.0).to(tl.float32)
        compared += 0.0  # -0.0 is 0.0
        bad |= tl.max((compared != compared).to(tl.int32), axis=0)
        key = sortable(compared)
        if K.packed:
            key = (key & ~EXPERT) | (experts ^ EXPERT)
        keys = keys + (tl.where(there, key, LOWEST),)  # noqa: RUF005
    return keys, bad


@triton.jit
def within_best_groups(keys, K: tl.constexpr):
    """(keys, ordered): keys that are LOWEST outside the K.groups_kept best groups of a row; whether no score is NaN."""
    N_GROUPS: tl.constexpr = K.n_groups
    lane = lanes()
    best = in_lanes(LOWEST, tl.int32, K)
    ordered = of_each(1, tl.int32, K) == 1
    for g in tl.static_range(N_GROUPS):
        score = score_of_group(keys, g, K)
        ordered &= score == score
        best = tl.where(lane == g, sortable(score)[:, None], best)
    kept = of_each(0, tl.int32, K)
    for _ in range(K.groups_kept):
        top = tl.max(best, axis=1)
        at = tl.min(tl.where(best == top[:, None], lane, LANES), axis=1)
        kept |= tl.full([], 1, tl.int32) << at
        best = tl.where(lane == at[:, None], LOWEST, best)
    within = ()
    for t in tl.static_range(len(keys)):
        inside = (kept >> (t // K.group_tiles)) & 1
        within = within + (tl.where(over_tiles(inside) == 1, keys[t], LOWEST),)  # noqa: RUF005
    return within, ordered


@triton.jit
def score_of_group(keys, GROUP: tl.constexpr, K: tl.constexpr):
    """The best number of a group, or the sum of its two best. A group has tiles that are not stacked."""
    GROUP_TILES: tl.constexpr = K.group_tiles
    FIRST: tl.constexpr = GROUP * K.group_tiles
    head = keys[FIRST]
    for t in tl.static_range(1, GROUP_TILES):
        head = tl.maximum(head, keys[FIRST + t])
    head = tl.max(head, axis=0)
    best = tl.max(head, axis=1)
    score = number_of(best)
    if K.top2 and K.group_size > 1:
        lane = lanes()
        at = tl.min(tl.where(head == best[:, None], lane, LANES), axis=1)
        # The second best is the next one in the lane that has the best, or the best of another lane.
        second = tl.where(lane == at[:, None], next_in_lane(keys, FIRST, best, K), head)
        score += number_of(tl.max(second, axis=1))
    return score + 0.0


@triton.jit
def next_in_lane(keys, FIRST: tl.constexpr, best, K: tl.constexpr):
    """The greatest key of each lane of a group, leaving out the first key that is `best`."""
    GROUP_TILES: tl.constexpr = K.group_tiles
    found = in_lanes(LOWEST, tl.int32, K)
    seen = in_lanes(0, tl.int32, K)
    for t in tl.static_range(GROUP_TILES):
        key = tl.max(keys[FIRST + t], axis=0)
        first = (key == best[:, None]) & (seen == 0)
        found = tl.maximum(found, tl.where(first, LOWEST, key))
        seen |= first.to(tl.int32)
    return found


@triton.jit
def lists_of(keys, K: tl.constexpr):
    """(heads, experts): the sorted lists of all lanes, the greatest key first, only as long as choices may go."""
    N_CHUNKS: tl.constexpr = K.n_chunks
    CHUNKS: tl.constexpr = K.chunks
    START: tl.constexpr = K.starts
    heads, experts = (), ()
    for c in tl.static_range(N_CHUNKS):
        some, of_some = list_of_chunk(keys, START[c], CHUNKS[3 * c], CHUNKS[3 * c + 1], CHUNKS[3 * c + 2], K)
        heads = heads + some
        experts = experts + of_some
    return heads, experts


@triton.jit
def list_of_chunk(
    keys, START: tl.constexpr, FIRST: tl.constexpr, STACKED: tl.constexpr, LENGTH: tl.constexpr, K: tl.constexpr
):
    MOST: tl.constexpr = K.k
    PAIRS: tl.constexpr = K.pairs
    values, experts = (), ()
    for t in tl.static_range(LENGTH):
        of_tile, _ = experts_of(FIRST + t, STACKED, K)
        values = values + (keys[START + t],)  # noqa: RUF005
        experts = experts + (of_tile + tl.zeros(keys[START + t].shape, tl.int32),)  # noqa: RUF005
    for p in tl.static_range(len(PAIRS) // 2):
        if PAIRS[2 * p + 1] < LENGTH:
            values, experts = exchanged(values, experts, PAIRS[2 * p], PAIRS[2 * p + 1], K)
    first, of_first = (), ()
    for t in tl.static_range(min(LENGTH, MOST)):
        first = first + (values[t],)  # noqa: RUF005
        of_first = of_first + (experts[t],)  # noqa: RUF005
    return first, of_first


@triton.jit
def exchanged(values, experts, I: tl.constexpr, J: tl.constexpr, K: tl.constexpr):
    """The lists with the greater key of places I and J at I; of equal keys, the lower expert."""
    if K.packed:
        greater, lesser = tl.maximum(values[I], values[J]), tl.minimum(values[I], values[J])
        above, below = experts[I], experts[J]
    else:
        swaps = (values[J] > values[I]) | ((values[J] == values[I]) & (experts[J] < experts[I]))
        greater, lesser = tl.where(swaps, values[J], values[I]), tl.where(swaps, values[I], values[J])
        above, below = tl.where(swaps, experts[J], experts[I]), tl.where(swaps, experts[I], experts[J])
    return replaced(values, I, greater, J, lesser), replaced(experts, I, above, J, below)


@triton.jit
def replaced(values, I: tl.constexpr, at_i, J: tl.constexpr, at_j):
    changed = ()
    for t in tl.static_range(len(values)):
        if t == I:
            changed = changed + (at_i,)  # noqa: RUF005
        elif t == J:
            changed = changed + (at_j,)  # noqa: RUF005
        else:
            changed = changed + (values[t],)  # noqa: RUF005
    return changed


@triton.jit
def best_head(heads, K: tl.constexpr):
    N_CHUNKS: tl.constexpr = K.n_chunks
    LISTS: tl.constexpr = K.lists
    best = tl.max(heads[0], axis=0)
    for c in tl.static_range(1, N_CHUNKS):
        best = tl.maximum(best, tl.max(heads[LISTS[2 * c]], axis=0))
    return tl.max(best, axis=1)


@triton.jit
def first_at(heads, experts, best, K: tl.constexpr):
    """The lowest expert among the heads that are `best`."""
    N_CHUNKS: tl.constexpr = K.n_chunks
    LISTS: tl.constexpr = K.lists
    best = over_tiles(best)
    first = tl.min(tl.where(heads[0] == best, experts[0], NONE), axis=0)
    for c in tl.static_range(1, N_CHUNKS):
        of_list = tl.where(heads[LISTS[2 * c]] == best, experts[LISTS[2 * c]], NONE)
        first = tl.minimum(first, tl.min(of_list, axis=0))
    return tl.min(first, axis=1)


@triton.jit
def recorded(halves, of_rows, turn):
    """The halves, with the numbers of_rows at the place of this turn."""
    found = ()
    for h in tl.static_range(len(halves)):
        found = found + (tl.where(lanes() + h * LANES == turn, of_rows[:, None], halves[h]),)  # noqa: RUF005
    return found


@triton.jit
def after(heads, experts, best, at, K: tl.constexpr):
    """The lists, without the head that was chosen: its list moves up by one."""
    N_CHUNKS: tl.constexpr = K.n_chunks
    LISTS: tl.constexpr = K.lists
    rest, of_rest = (), ()
    for c in tl.static_range(N_CHUNKS):
        some, of_some = after_in_list(heads, experts, best, at, LISTS[2 * c], LISTS[2 * c + 1], K)
        rest = rest + some
        of_rest = of_rest + of_some
    return rest, of_rest


@triton.jit
def after_in_list(heads, experts, best, at, START: tl.constexpr, LENGTH: tl.constexpr, K: tl.constexpr):
    won = heads[START] == over_tiles(best)
    if not K.packed:
        won &= experts[START] == over_tiles(at)
    rest, of_rest = (), ()
    for i in tl.static_range(START, START + LENGTH):
        if i + 1 < START + LENGTH:
            rest = rest + (tl.where(won, heads[i + 1], heads[i]),)  # noqa: RUF005
        else:
            rest = rest + (tl.where(won, LOWEST, heads[i]),)  # noqa: RUF005
        if K.packed or i + 1 == START + LENGTH:
            of_rest = of_rest + (experts[i],)  # noqa: RUF005
        else:
            of_rest = of_rest + (tl.where(won, experts[i + 1], experts[i]),)  # noqa: RUF005
    return rest, of_rest


@triton.jit
def experts_of_packed(found):
    ids = ()
    for h in tl.static_range(len(found)):
        ids = ids + ((found[h] & EXPERT) ^ EXPERT,)  # noqa: RUF005
    return ids


@triton.jit
def numbers_of(found, K: tl.constexpr):
    """The numbers that the keys in `found` stand for."""
    numbers = ()
    for h in tl.static_range(len(found)):
        numbers = numbers + (number_found(found[h], K),)  # noqa: RUF005
    return numbers


@triton.jit
def number_found(key, K: tl.constexpr):
    number = number_of(key)
    if K.packed:
        number = (number.to(tl.int32, bitcast=True) & ~EXPERT).to(tl.float32, bitcast=True)
    return number
