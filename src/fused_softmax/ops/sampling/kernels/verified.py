"""Which drafts a target accepts, and the token after them, from rows that are judged: see `judged`, `verification`.

One program a sequence follows the drafts to the row where they end. There a token is drawn from scale p - less q, cut
at 0, where p is the target's row and q the draft's row; or from p, if less is 0. Several programs draw it, in a launch
of its own. For blocks two launches come in between: they sum what would be left at each row, and find the row where the
drafts end.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fused_softmax.core.kernels.exchange import let_next_begin, wait_for_launch_before
from fused_softmax.core.kernels.state import NEG_INF
from fused_softmax.ops.sampling.kernels.common import (
    BIAS,
    BITMASK,
    GROUPS,
    LANES,
    LOGITS,
    MEMBERS,
    NO_COLUMN,
    STRETCH,
    TEMPERATURE,
    UNIT,
    calls_of,
    column_of,
    draw_of,
    group_of,
    key_of,
    log2_of,
    log_of_prob,
    noise_of,
    score_of,
    sum_of_8,
)
from fused_softmax.ops.sampling.kernels.judged import judged_row, log_shares_at, share_of, shares_at

ACCEPTED, RESIDUAL_GROUPS, RESIDUAL_MEMBERS = tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)  # streams of noise
# int64 numbers of a sequence: the row where its drafts end, how many are accepted, whether the row can be drawn from;
# the key of the best group, and how many parts of the row are done; of a block, how many drafts there are.
ROW, N_ACCEPTED, VALID, KEY, TICKET, END = (tl.constexpr(i) for i in range(6))
NUMBERS = tl.constexpr(8)  # int64 numbers of a sequence
SCALE, LESS = tl.constexpr(0), tl.constexpr(1)  # fp32 numbers of a sequence; after them, a of each row of a block
SEEDS, POSITIONS, DRAFTS, DRAFT, LENGTHS, PARENTS, PARENT = (tl.constexpr(i) for i in range(7))  # strides


class Rows(NamedTuple):
    """Judged rows, of the target or of drafts: arguments of `draw_of`, their records, and which can be drawn from."""

    scratch_ptr: Any
    valid_ptr: Any
    logits_ptr: Any
    bias_ptr: Any
    bitmask_ptr: Any
    rows_ptr: Any
    temperature_ptr: Any
    strides: Any
    n_rows: Any
    n_cols: Any
    temperature: Any


class Drafts(NamedTuple):
    """The drafts of a sequence, [most].

    col: their columns. there: which of them exist. right: whether the sequence's numbers are in range.
    """

    i: Any
    col: Any
    there: Any
    right: Any


@triton.jit
def of_drafts(temperature, K: tl.constexpr):
    """The temperature of drafts: 1 if they are probabilities."""
    if K.draft.of_probs:
        return temperature * 0.0 + 1.0
    else:
        return temperature


@triton.jit
def row_at(R, draw, K: tl.constexpr):
    """The Judged row of this number."""
    D = draw_of(
        R.logits_ptr, R.bias_ptr, R.bitmask_ptr, R.rows_ptr, R.temperature_ptr, None, None, R.strides, R.n_rows,
        R.n_cols, R.temperature, 0, 0, 0, 0, draw, K,
    )  # fmt: skip
    return judged_row(D, R.scratch_ptr, draw, K)


@triton.jit
def probabilities_at(R, draws, cols, on, K: tl.constexpr):
    """The probability of one column in each of several rows; 0 where not `on`."""
    x, temperature = logits_at(R, draws, cols, on, K)
    return shares_at(R.scratch_ptr, draws, x, cols, temperature, on, K)


@triton.jit
def logits_at(R, draws, cols, on, K: tl.constexpr):
    """(the logit of one column in each of several rows, the temperatures of these rows)."""
    row = draws
    if R.rows_ptr is not None:
        row = tl.load(R.rows_ptr + draws, mask=on, other=0).to(tl.int64)
    x = tl.load(R.logits_ptr + row * R.strides[LOGITS] + cols, mask=on, other=NEG_INF).to(tl.float32) + 0.0
    if K.of_probs:
        x = log_of_prob(x)
    if K.biased:
        bias_ptr = R.bias_ptr + draws // K.bias_draws * R.strides[BIAS]
        x += tl.load(bias_ptr + cols, mask=on, other=0.0).to(tl.float32)
    if K.bitmasked:
        bitmask_ptr = R.bitmask_ptr + draws // K.bitmask_draws * R.strides[BITMASK]
        bits = tl.load(bitmask_ptr + cols // 8, mask=on, other=0).to(tl.int32)
        x = tl.where((bits >> (cols % 8).to(tl.int32)) & 1 == 1, x, NEG_INF)
    temperature = (draws * 0).to(tl.float32) + R.temperature
    if R.temperature_ptr is not None:
        temperature = tl.load(R.temperature_ptr + draws * R.strides[TEMPERATURE], mask=on, other=1.0).to(tl.float32)
    return x, temperature


@triton.jit
def drafts_of(drafts_ptr, lengths_ptr, parents_ptr, strides, sequence, n_cols, K: tl.constexpr):
    i = tl.arange(0, K.most)
    on = i < K.rows - 1
    col = tl.load(drafts_ptr + sequence * strides[DRAFTS] + i * strides[DRAFT], mask=on, other=-1).to(tl.int64)
    there = on & (col >= 0) & (col < n_cols)
    right = sequence >= 0
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + sequence * strides[LENGTHS]).to(tl.int32)
        there = there & (i < length)
        right = (length >= 0) & (length < K.rows)
    if parents_ptr is not None:
        parent = tl.load(parents_ptr + sequence * strides[PARENTS] + i * strides[PARENT], mask=on, other=-1)
        wrong = there & ((parent < -1) | (parent >= i))
        right = right & (tl.max(wrong.to(tl.int32), axis=0) == 0)
    return Drafts(i, tl.where(there, col, 0), there & right, right)


@triton.jit
def uniform_at(seed, position, counter, K: tl.constexpr):
    """u of `noise`, by which a draft is judged. position and counter have one shape."""
    zero = (position * 0).to(tl.uint32)
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    words = tl.philox(seed, zero + counter.to(tl.uint32), zero + ACCEPTED, zero + low, zero + high)
    u = words[0].to(tl.float32) * 2.3283064365386963e-10
    u += (words[1] ^ words[2] ^ words[3]).to(tl.float32) * 5.421010862427522e-20
    return tl.minimum(u + 2.710505431213761e-20, 0.99999994)


@triton.jit(do_not_specialize=["target_rows", "draft_rows", "n_cols"])
def _follow(
    scratch_ptr, valid_ptr, logits_ptr, bias_ptr, bitmask_ptr, rows_ptr, temperature_ptr, draft_scratch_ptr,
    draft_valid_ptr, draft_logits_ptr, draft_rows_ptr, draft_temperature_ptr, drafts_ptr, lengths_ptr, seed_ptr,
    position_ptr, tokens_ptr, numbers_ptr, scales_ptr, lefts_ptr, strides, draft_strides, sequence_strides, target_rows,
    draft_rows, n_cols, temperature, K: tl.constexpr,
):  # fmt: skip
    """A program finds how far a chain is accepted, or, for a block, by what its drafts will be judged."""
    wait_for_launch_before(K.follows)
    let_next_begin(K.leads)
    TARGET: tl.constexpr = K.target
    DRAFT: tl.constexpr = K.draft
    sequence = tl.program_id(0).to(tl.int64)
    T = Rows(
        scratch_ptr, valid_ptr, logits_ptr, bias_ptr, bitmask_ptr, rows_ptr, temperature_ptr, strides, target_rows,
        n_cols, temperature,
    )  # fmt: skip
    G = Rows(
        draft_scratch_ptr, draft_valid_ptr, draft_logits_ptr, None, None, draft_rows_ptr, draft_temperature_ptr,
        draft_strides, draft_rows, n_cols, of_drafts(temperature, K),
    )  # fmt: skip
    F = drafts_of(drafts_ptr, lengths_ptr, None, sequence_strides, sequence, n_cols, K)
    i = F.i
    draws, drafted = sequence * K.rows + i, sequence * (K.rows - 1) + i
    valid = (tl.load(valid_ptr + draws, mask=i < K.rows, other=0) > 0) & F.right
    valid = valid & ((tl.load(draft_valid_ptr + drafted, mask=F.there, other=0) > 0) | (F.there.to(tl.int32) == 0))
    on = F.there & valid
    p = probabilities_at(T, draws, F.col, on, TARGET)
    q = probabilities_at(G, drafted, F.col, on, DRAFT)
    end = tl.min(tl.where(on, K.most, i), axis=0)
    if K.block:
        ratio = tl.where(q > 0, p / tl.where(q > 0, q, 1.0), tl.where(p > 0, 1e38, 0.0))
        a, of_rows = tl.full([], 1.0, tl.float32), tl.full([K.most], 1.0, tl.float32)
        for j in range(K.rows - 1):
            a = tl.minimum(a * tl.sum(tl.where(i == j, ratio, 0.0), axis=0), 1.0)
            of_rows = tl.where(i == j + 1, a, of_rows)
        tl.store(scales_ptr + sequence * K.scales + 2 + i, of_rows)
        tl.store(lefts_ptr + sequence * K.most + i, tl.full([K.most], 0, tl.int64))
        tl.store(numbers_ptr + sequence * NUMBERS + END, end.to(tl.int64))
        tl.store(tokens_ptr + sequence * K.rows + i, valid.to(tl.int64), mask=i < K.rows)  # for `_settle`
    else:
        seed, position = tl.load(seed_ptr + sequence * sequence_strides[SEEDS]), position_of(
            position_ptr, sequence, sequence_strides
        )  # fmt: skip
        accepted = on & (uniform_at(seed, position + i, i * 0, K) * q < p)
        n = tl.min(tl.where(accepted, K.most, i), axis=0)
        settle(tokens_ptr, numbers_ptr, scales_ptr, sequence, F, n, 1.0, n < end, valid, K)


@triton.jit
def position_of(position_ptr, sequence, strides):
    return tl.load(position_ptr + sequence * strides[POSITIONS])


@triton.jit
def settle(tokens_ptr, numbers_ptr, scales_ptr, sequence, F, n, scale, goes_on, valid, K: tl.constexpr):
    """Leave a chain or block, of which n drafts are accepted, to `_draw_left`.

    goes_on: whether another draft follows, which is rejected.
    """
    i = F.i
    tl.store(tokens_ptr + sequence * K.rows + i, tl.where(i < n, F.col, tl.where(i == n, 0, -1)), mask=i < K.rows)
    can_be = tl.max(tl.where(i == n, valid.to(tl.int32), 0), axis=0)
    leave(numbers_ptr, scales_ptr, sequence, n, n, scale, tl.where(goes_on, 1.0, 0.0), can_be, K)


@triton.jit
def leave(numbers_ptr, scales_ptr, sequence, row, n, scale, less, can_be, K: tl.constexpr):
    number_ptr, scale_ptr = numbers_ptr + sequence * NUMBERS, scales_ptr + sequence * K.scales
    zero = tl.zeros([], tl.int64)
    tl.store(number_ptr + ROW, zero + row)
    tl.store(number_ptr + N_ACCEPTED, zero + n)
    tl.store(number_ptr + VALID, zero + can_be)
    tl.store(number_ptr + KEY, zero)
    tl.store(number_ptr + TICKET, zero)
    tl.store(scale_ptr + SCALE, tl.zeros([], tl.float32) + scale)
    tl.store(scale_ptr + LESS, tl.zeros([], tl.float32) + less)


@triton.jit(do_not_specialize=["target_rows", "draft_rows", "n_cols", "n_parts", "part_stretches"])
def _sum_left(
    scratch_ptr, logits_ptr, bias_ptr, bitmask_ptr, rows_ptr, temperature_ptr, draft_scratch_ptr, draft_logits_ptr,
    draft_rows_ptr, draft_temperature_ptr, numbers_ptr, scales_ptr, lefts_ptr, strides, draft_strides, target_rows,
    draft_rows, n_cols, n_parts, part_stretches, temperature, K: tl.constexpr,
):  # fmt: skip
    """The mass of what would be left at a block's row, from one part of the row."""
    wait_for_launch_before(K.follows)
    let_next_begin(K.leads)
    TARGET: tl.constexpr = K.target
    DRAFT: tl.constexpr = K.draft
    program = tl.program_id(0)
    part, of_rows = program % n_parts, program // n_parts
    row, sequence = (1 + of_rows % (K.rows - 2)).to(tl.int64), (of_rows // (K.rows - 2)).to(tl.int64)
    if row < tl.load(numbers_ptr + sequence * NUMBERS + END):
        T = Rows(
            scratch_ptr, None, logits_ptr, bias_ptr, bitmask_ptr, rows_ptr, temperature_ptr, strides, target_rows,
            n_cols, temperature,
        )  # fmt: skip
        G = Rows(
            draft_scratch_ptr, None, draft_logits_ptr, None, None, draft_rows_ptr, draft_temperature_ptr, draft_strides,
            draft_rows, n_cols, of_drafts(temperature, K),
        )  # fmt: skip
        P = row_at(T, sequence * K.rows + row, TARGET)
        Q = row_at(G, sequence * (K.rows - 1) + row, DRAFT)
        a = tl.load(scales_ptr + sequence * K.scales + 2 + row)
        start = part * part_stretches
        end = tl.minimum(start + part_stretches, tl.cdiv(n_cols, STRETCH))
        mass = mass_left(P, Q, a, 1.0, start, end, K)
        tl.atomic_add(lefts_ptr + sequence * K.most + row, mass, sem="relaxed")


@triton.jit
def mass_left(P, Q, scale, less, start, end, K: tl.constexpr):
    """The mass, in units, of what is left in the stretches of a row from start to end."""
    mass = tl.zeros([K.stretches * LANES], tl.int64)
    for stretch in range(start, end, K.stretches):
        call = calls_of(stretch, K)
        there = call < end * LANES
        for quarter in tl.static_range(4):
            w = left_of(P, Q, column_of(call, quarter), there, scale, less, K)
            mass += (sum_of_8(w) * UNIT).to(tl.int64)
    return tl.sum(mass, axis=0)


@triton.jit
def left_of(P, Q, first, there, scale, less, K: tl.constexpr):
    """scale p - less q of groups [lanes, 8], cut at 0; p if less is 0."""
    TARGET: tl.constexpr = K.target
    DRAFT: tl.constexpr = K.draft
    p = share_of(P, first, there, TARGET)
    if K.rows > 1:
        asked = there.to(tl.int32) * tl.where(less > 0, 1, 0) > 0
        q = share_of(Q, first, asked, DRAFT)
        return tl.where(less > 0, tl.maximum(p * scale - q * less, 0.0), p)
    else:
        return p


@triton.jit(do_not_specialize=["n_cols"])
def _settle(
    drafts_ptr, lengths_ptr, seed_ptr, position_ptr, tokens_ptr, numbers_ptr, scales_ptr, lefts_ptr, sequence_strides,
    n_cols, K: tl.constexpr,
):  # fmt: skip
    """A program finds how far a block is accepted."""
    wait_for_launch_before(K.follows)
    let_next_begin(K.leads)
    sequence = tl.program_id(0).to(tl.int64)
    F = drafts_of(drafts_ptr, lengths_ptr, None, sequence_strides, sequence, n_cols, K)
    i = F.i
    end = tl.load(numbers_ptr + sequence * NUMBERS + END)
    valid = tl.load(tokens_ptr + sequence * K.rows + i, mask=i < K.rows, other=0)
    a = tl.load(scales_ptr + sequence * K.scales + 2 + i)
    left = (tl.load(lefts_ptr + sequence * K.most + i).to(tl.float64) / UNIT).to(tl.float32)
    rest = left + (1.0 - a)
    h = tl.where(i < end, tl.where(rest > 0, left / tl.where(rest > 0, rest, 1.0), 1.0), a)
    seed, position = tl.load(seed_ptr + sequence * sequence_strides[SEEDS]), position_of(
        position_ptr, sequence, sequence_strides
    )  # fmt: skip
    u = uniform_at(seed, position + i - 1, i * 0, K)
    accepted = (i > 0) & (i <= end) & (u < h)
    n = tl.max(tl.where(accepted, i, 0), axis=0)
    tl.debug_barrier()  # all threads have read what `settle` overwrites
    settle(tokens_ptr, numbers_ptr, scales_ptr, sequence, F, n, tl.sum(tl.where(i == n, a, 0.0)), n < end, valid, K)


@triton.jit(do_not_specialize=["target_rows", "draft_rows", "n_cols"])
def _climb(
    scratch_ptr, valid_ptr, logits_ptr, bias_ptr, bitmask_ptr, rows_ptr, temperature_ptr, draft_scratch_ptr,
    draft_valid_ptr, draft_logits_ptr, draft_rows_ptr, draft_temperature_ptr, drafts_ptr, lengths_ptr, parents_ptr,
    seed_ptr, position_ptr, tokens_ptr, nodes_ptr, numbers_ptr, scales_ptr, strides, draft_strides, sequence_strides,
    target_rows, draft_rows, n_cols, temperature, K: tl.constexpr,
):  # fmt: skip
    """A program finds which drafts of a tree are accepted, one draft after the other."""
    wait_for_launch_before(K.follows)
    let_next_begin(K.leads)
    TARGET: tl.constexpr = K.target
    DRAFT: tl.constexpr = K.draft
    sequence = tl.program_id(0).to(tl.int64)
    T = Rows(
        scratch_ptr, valid_ptr, logits_ptr, bias_ptr, bitmask_ptr, rows_ptr, temperature_ptr, strides, target_rows,
        n_cols, temperature,
    )  # fmt: skip
    G = Rows(
        draft_scratch_ptr, draft_valid_ptr, draft_logits_ptr, None, None, draft_rows_ptr, draft_temperature_ptr,
        draft_strides, draft_rows, n_cols, of_drafts(temperature, K),
    )  # fmt: skip
    F = drafts_of(drafts_ptr, lengths_ptr, parents_ptr, sequence_strides, sequence, n_cols, K)
    i = F.i
    parent = tl.load(
        parents_ptr + sequence * sequence_strides[PARENTS] + i * sequence_strides[PARENT], mask=i < K.rows - 1,
        other=-1,
    )  # fmt: skip
    of_row = tl.where(F.there, parent.to(tl.int32) + 1, -1)
    seed = tl.load(seed_ptr + sequence * sequence_strides[SEEDS])
    position = position_of(position_ptr, sequence, sequence_strides)
    tl.store(tokens_ptr + sequence * K.rows + i, tl.full([K.most], -1, tl.int64), mask=i < K.rows)
    tl.store(nodes_ptr + sequence * (K.rows - 1) + i, tl.full([K.most], -1, tl.int64), mask=i < K.rows - 1)
    tl.debug_barrier()
    row, n, tried = tl.zeros([], tl.int32), tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    less, mass = tl.zeros([], tl.float32), tl.full([], 1.0, tl.float32)
    can_be = can_be_drawn(T, G, F, of_row, sequence, row, K)
    for j in range(K.rows - 1):
        mine = tl.max(tl.where(i == j, of_row, -1), axis=0)
        if (mine == row) & can_be:
            col = tl.sum(tl.where(i == j, F.col, 0), axis=0)
            draw, drafted = sequence * K.rows + row, sequence * (K.rows - 1) + row
            if tried > 0:
                P, Q = row_at(T, draw, TARGET), row_at(G, drafted, DRAFT)
                left = mass_left(P, Q, 1.0, less, 0, tl.cdiv(n_cols, STRETCH), K)
                mass = (left.to(tl.float64) / UNIT).to(tl.float32)
            p = probabilities_at(T, draw, col, can_be, TARGET)
            q = probabilities_at(G, drafted, col, can_be, DRAFT)
            if uniform_at(seed, position + n, tried, K) * mass * q < p - less * q:
                tl.store(tokens_ptr + sequence * K.rows + n, col)
                tl.store(nodes_ptr + sequence * (K.rows - 1) + n, tl.zeros([], tl.int64) + j)
                row, n, tried = row * 0 + j + 1, n + 1, tried * 0
                less, mass = less * 0.0, less * 0.0 + 1.0
                can_be = can_be_drawn(T, G, F, of_row, sequence, row, K)
            else:
                less, tried = less + mass, tried + 1
    tl.store(tokens_ptr + sequence * K.rows + n, tl.zeros([], tl.int64))
    leave(numbers_ptr, scales_ptr, sequence, row, n, 1.0, less, can_be.to(tl.int32), K)


@triton.jit
def can_be_drawn(T, G, F, of_row, sequence, row, K: tl.constexpr):
    """Whether a row of the target can be drawn from, and the row of its drafts too, if it has any."""
    valid = (tl.load(T.valid_ptr + sequence * K.rows + row) > 0) & F.right
    asked = tl.max((of_row == row).to(tl.int32), axis=0) > 0
    drafted = tl.load(G.valid_ptr + sequence * (K.rows - 1) + row, mask=asked, other=1) > 0
    return valid & drafted


@triton.jit(do_not_specialize=["target_rows", "draft_rows", "n_cols", "n_parts", "part_stretches"])
def _draw_left(
    scratch_ptr, logits_ptr, bias_ptr, bitmask_ptr, rows_ptr, temperature_ptr, draft_scratch_ptr, draft_logits_ptr,
    draft_rows_ptr, draft_temperature_ptr, seed_ptr, position_ptr, tokens_ptr, numbers_ptr, scales_ptr, strides,
    draft_strides, sequence_strides, target_rows, draft_rows, n_cols, n_parts, part_stretches, temperature,
    K: tl.constexpr,
):  # fmt: skip
    """A program draws from a part of what is left of a row.

    The part that arrives last writes the token. No part waits.
    """
    wait_for_launch_before(K.follows)
    let_next_begin(K.leads)
    TARGET: tl.constexpr = K.target
    DRAFT: tl.constexpr = K.draft
    program = tl.program_id(0)
    part, sequence = program % n_parts, (program // n_parts).to(tl.int64)
    number_ptr = numbers_ptr + sequence * NUMBERS
    if tl.load(number_ptr + VALID) > 0:
        T = Rows(
            scratch_ptr, None, logits_ptr, bias_ptr, bitmask_ptr, rows_ptr, temperature_ptr, strides, target_rows,
            n_cols, temperature,
        )  # fmt: skip
        G = Rows(
            draft_scratch_ptr, None, draft_logits_ptr, None, None, draft_rows_ptr, draft_temperature_ptr, draft_strides,
            draft_rows, n_cols, of_drafts(temperature, K),
        )  # fmt: skip
        row, n = tl.load(number_ptr + ROW), tl.load(number_ptr + N_ACCEPTED)
        scale, less = tl.load(scales_ptr + sequence * K.scales), tl.load(scales_ptr + sequence * K.scales + LESS)
        P = row_at(T, sequence * K.rows + row, TARGET)
        Q = P
        if K.rows > 1:
            Q = row_at(G, sequence * (K.rows - 1) + tl.minimum(row, K.rows - 2), DRAFT)
        seed = tl.load(seed_ptr + sequence * sequence_strides[SEEDS])
        position = position_of(position_ptr, sequence, sequence_strides) + n
        stream = tl.where(less > 0, RESIDUAL_GROUPS, GROUPS)
        last_stretch = tl.cdiv(n_cols, STRETCH)
        start = part * part_stretches
        end = tl.minimum(start + part_stretches, last_stretch)
        key = best_left(P, Q, scale, less, seed, position, stream, start, end, K)
        tl.atomic_max(number_ptr + KEY, key, sem="relaxed")
        if tl.atomic_add(number_ptr + TICKET, 1, sem="acq_rel") == n_parts - 1:
            key = tl.atomic_max(number_ptr + KEY, 0, sem="relaxed")
            if score_of(key) == NEG_INF:  # two equal distributions leave nothing
                less = less * 0.0
                key = best_left(P, Q, scale, less, seed, position, stream, 0, last_stretch, K)
            member = tl.where(stream == GROUPS, MEMBERS, RESIDUAL_MEMBERS)
            token = member_left(P, Q, scale, less, seed, position, member, group_of(key), K)
            tl.store(tokens_ptr + sequence * K.rows + n, token)


@triton.jit
def best_left(P, Q, scale, less, seed, position, stream, start, end, K: tl.constexpr):
    """The key of the best group of what is left in the stretches of a row from start to end."""
    best = tl.zeros([K.stretches * LANES], tl.int64)
    for stretch in range(start, end, K.stretches):
        call = calls_of(stretch, K)
        there = call < end * LANES
        words = words_of_stream(seed, position, call, stream)
        all_words = words[0] ^ words[1] ^ words[2] ^ words[3]
        for quarter in tl.static_range(4):
            first = column_of(call, quarter)
            s = sum_of_8(left_of(P, Q, first, there, scale, less, K))
            score = tl.where(s > 0, log2_of(s, K) + noise_of(words[quarter], all_words, K), NEG_INF)
            best = tl.maximum(best, key_of(score, first // 8))
    return tl.max(best, axis=0)


@triton.jit
def member_left(P, Q, scale, less, seed, position, stream, group, K: tl.constexpr):
    """The column that is drawn from a group of what is left."""
    cols = group * 8 + tl.arange(0, 8)
    first, one = group * 8 + tl.zeros([1], tl.int32), tl.full([1], 1, tl.int1)
    w = tl.reshape(left_of(P, Q, first, one, scale, less, K), [8])
    words = words_of_stream(seed, position, cols, stream)
    z = log2_of(w, K) + noise_of(words[0], words[0] ^ words[1] ^ words[2] ^ words[3], K)
    z = tl.where(w > 0, z, NEG_INF)
    return tl.min(tl.where(z == tl.max(z, axis=0), cols, NO_COLUMN), axis=0).to(tl.int64)


@triton.jit
def words_of_stream(seed, position, counter, stream):
    c0 = counter.to(tl.uint32)
    zero = c0 * 0
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    return tl.philox(seed, c0, zero + stream.to(tl.uint32), zero + low, zero + high)


@triton.jit(do_not_specialize=["target_rows", "n_cols"])
def _report_tokens(
    scratch_ptr, valid_ptr, logits_ptr, bias_ptr, bitmask_ptr, rows_ptr, temperature_ptr, tokens_ptr, nodes_ptr,
    numbers_ptr, logprobs_ptr, strides, target_rows, n_cols, temperature, K: tl.constexpr,
):  # fmt: skip
    """The log-probabilities of a sequence's tokens, from rows that may be judged otherwise than for draws."""
    wait_for_launch_before(K.follows)
    let_next_begin(K.leads)
    TARGET: tl.constexpr = K.target
    sequence = tl.program_id(0).to(tl.int64)
    T = Rows(
        scratch_ptr, valid_ptr, logits_ptr, bias_ptr, bitmask_ptr, rows_ptr, temperature_ptr, strides, target_rows,
        n_cols, temperature,
    )  # fmt: skip
    i = tl.arange(0, K.most)
    n = tl.load(numbers_ptr + sequence * NUMBERS + N_ACCEPTED)
    there = (i < n) | (i < n + tl.load(numbers_ptr + sequence * NUMBERS + VALID))
    row = i.to(tl.int64)
    if nodes_ptr is not None:
        row = tl.load(nodes_ptr + sequence * (K.rows - 1) + i - 1, mask=there & (i > 0), other=-1) + 1
    draws = sequence * K.rows + row
    there = there & (tl.load(valid_ptr + draws, mask=there, other=0) > 0)
    token = tl.load(tokens_ptr + sequence * K.rows + i, mask=there, other=0)
    x, temperatures = logits_at(T, draws, token, there, TARGET)
    log = log_shares_at(scratch_ptr, draws, x, token, temperatures, there, TARGET)
    tl.store(logprobs_ptr + sequence * K.rows + i, tl.where(there, log, float("nan")), mask=i < K.rows)
