"""The k best experts of rows, without sorting the row. Of equal experts the lowest is chosen first.

Each lane of a warp sorts the keys of its own experts, of up to 8 tiles: a list. Each choice is the maximum over the
heads of all lists, which takes one instruction of a warp. The lane that had it then drops that head from its list. If a
logit has at most 19 bits, its key shares a word with the number of its expert, so that no two keys are equal. Otherwise
a second instruction finds the expert.

If a lane has many lists for many choices, it merges them into one list of its 8 best keys (K.merges). A choice from
these lists is right while no lane needs a ninth key. After that, the row is read again, and each choice looks at all
its keys.
"""

import triton
import triton.language as tl

from fused_softmax.ops.routing.kernels.common import (
    LANES,
    LIST,
    experts_of,
    in_lanes,
    lanes,
    number_of,
    of_each,
    over_tiles,
    score_of,
    sortable,
    tiles_of,
)

LOWEST = tl.constexpr(-(2**31))  # a key below that of any number
EXPERT = tl.constexpr(2**13 - 1)  # the bits of a packed key for the expert, all flipped: of equal keys the lowest wins
NONE = tl.constexpr(2**31 - 1)
MOST_LEVELS = tl.constexpr(4)  # of merging the stacked lists of a lane, 4096 / LANES / LIST at most


@triton.jit
def choose(heads, experts, R, m, total, bias_ptr, n_turns, K: tl.constexpr):
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
    if K.merges:
        found, ids, best, at = choose_merged(found, ids, heads, experts, R, m, total, bias_ptr, n_turns, K)
    elif K.packed:
        for turn in range(K.k):
            best = best_head(heads, K)
            found = recorded(found, best, turn)
            heads, experts = after(heads, experts, best, best, K)
    else:
        for turn in range(n_turns):  # K.k, hidden from the compiler, which would unroll the loop
            best = best_head(heads, K)
            at = first_at(heads, experts, best, K)
            found, ids = recorded(found, best, turn), recorded(ids, at, turn)
            heads, experts = after(heads, experts, best, at, K)
    if K.packed:
        ids = experts_of_packed(found)
    return found, ids, best, at


@triton.jit
def choose_merged(found, ids, heads, experts, R, m, total, bias_ptr, n_turns, K: tl.constexpr):
    """`choose` by one list of each lane. Where a list may have too few keys, rows are read again."""
    least = tl.max(tl.max(tl.max(heads[LIST - 1], axis=0), axis=1), axis=0)  # no key that is above it is in no list
    best, at = of_each(LOWEST, tl.int32, K), of_each(-1, tl.int32, K)
    next_best = best_head(heads, K)
    turn = tl.zeros([], tl.int32)
    sure = turn < n_turns
    while sure:
        best = next_best
        found = recorded(found, best, turn)
        if not K.packed:
            at = first_at(heads, experts, best, K)
            ids = recorded(ids, at, turn)
        heads, experts = after(heads, experts, best, at, K)
        next_best = best_head(heads, K)
        turn += 1
        sure = (turn < n_turns) & ((turn < LIST) | (tl.max(next_best, axis=0) > least))
    if turn < n_turns:
        keys, _ = keys_of(tiles_of(R, K), m, total, bias_ptr, K)
        for late in range(turn, n_turns):
            best, at = best_after(keys, best, at, K)
            found = recorded(found, best, late)
            if not K.packed:
                ids = recorded(ids, at, late)
    return found, ids, best, at


@triton.jit
def best_after(keys, last, last_id, K: tl.constexpr):
    """(key, expert) of the choice that follows the last one. If K.packed, the key has the expert."""
    N_CHUNKS: tl.constexpr = K.n_chunks
    CHUNKS: tl.constexpr = K.chunks
    START: tl.constexpr = K.starts
    below = over_tiles(coded(last, last_id, K))
    best = coded(in_lanes(LOWEST, tl.int32, K), NONE, K)
    for c in tl.static_range(N_CHUNKS):
        of_chunk = best_below(keys, below, START[c], CHUNKS[3 * c], CHUNKS[3 * c + 1], CHUNKS[3 * c + 2], K)
        best = tl.maximum(best, of_chunk)
    best = tl.max(best, axis=1)
    if K.packed:
        return best, last_id
    else:
        return (best >> 32).to(tl.int32), (best & NONE).to(tl.int32) ^ NONE


@triton.jit
def best_below(
    keys, below, START: tl.constexpr, FIRST: tl.constexpr, STACKED: tl.constexpr, LENGTH: tl.constexpr, K: tl.constexpr
):
    best = coded(in_lanes(LOWEST, tl.int32, K), NONE, K)
    for t in tl.static_range(LENGTH):
        experts, _ = experts_of(FIRST + t, STACKED, K)
        code = coded(keys[START + t], experts, K)
        best = tl.maximum(best, tl.max(tl.where(code < below, code, coded(LOWEST, NONE, K)), axis=0))
    return best


@triton.jit
def coded(key, expert, K: tl.constexpr):
    """Numbers that sort as choices do: packed keys, or keys followed by the bits of their experts, all flipped."""
    if K.packed:
        return key
    else:
        return ((tl.zeros([], tl.int64) + key) << 32) | (expert ^ NONE)


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
        if K.merges:
            some, of_some = one_list(some, of_some, CHUNKS[3 * c + 1], K)
            if c == 0:
                heads, experts = some, of_some
            else:
                heads, experts = merged(heads, experts, some, of_some, K)
        else:
            heads = heads + some
            experts = experts + of_some
    return heads, experts


@triton.jit
def one_list(heads, experts, STACKED: tl.constexpr, K: tl.constexpr):
    """The stacked lists of a chunk as one list of LIST keys."""
    for _ in tl.static_range(LIST - len(heads)):
        heads = heads + (tl.full(heads[0].shape, LOWEST, tl.int32),)  # noqa: RUF005
        experts = experts + (experts[0],)  # noqa: RUF005
    for level in tl.static_range(MOST_LEVELS):
        if STACKED >> level > 1:
            upper, lower = halves_of(heads)
            of_upper, of_lower = halves_of(experts)
            heads, experts = merged(upper, of_upper, lower, of_lower, K)
    return heads, experts


@triton.jit
def halves_of(stacked):
    """The upper and the lower half of each tensor of stacked tiles."""
    HALF: tl.constexpr = stacked[0].shape[0] // 2
    upper, lower = (), ()
    for i in tl.static_range(len(stacked)):
        a, b = tl.split(tl.permute(tl.reshape(stacked[i], [2, HALF, 1, LANES]), [1, 2, 3, 0]))
        upper, lower = upper + (a,), lower + (b,)  # noqa: RUF005
    return upper, lower


@triton.jit
def merged(heads, experts, others, of_others, K: tl.constexpr):
    """The LIST greatest of two sorted lists, sorted: K. E. Batcher's bitonic merge of 1968."""
    values, of_values = heads, experts
    for i in tl.static_range(LIST):
        two, of_two = (values[i], others[LIST - 1 - i]), (of_values[i], of_others[LIST - 1 - i])
        two, of_two = exchanged(two, of_two, 0, 1, K)
        values, of_values = replaced(values, i, two[0], -1, two[0]), replaced(of_values, i, of_two[0], -1, of_two[0])
    for half in tl.static_range(3):
        for i in tl.static_range(LIST):
            if i & (4 >> half) == 0:
                values, of_values = exchanged(values, of_values, i, i + (4 >> half), K)
    return values, of_values


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
    N_LISTS: tl.constexpr = K.n_lists
    LISTS: tl.constexpr = K.lists
    best = tl.max(heads[0], axis=0)
    for c in tl.static_range(1, N_LISTS):
        best = tl.maximum(best, tl.max(heads[LISTS[2 * c]], axis=0))
    return tl.max(best, axis=1)


@triton.jit
def first_at(heads, experts, best, K: tl.constexpr):
    """The lowest expert among the heads that are `best`."""
    N_LISTS: tl.constexpr = K.n_lists
    LISTS: tl.constexpr = K.lists
    best = over_tiles(best)
    first = tl.min(tl.where(heads[0] == best, experts[0], NONE), axis=0)
    for c in tl.static_range(1, N_LISTS):
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
    N_LISTS: tl.constexpr = K.n_lists
    LISTS: tl.constexpr = K.lists
    rest, of_rest = (), ()
    for c in tl.static_range(N_LISTS):
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
