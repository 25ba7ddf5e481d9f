"""softmax, log_softmax, their gradient and logsumexp over a strided dim: [n_outer, n_cols, n_inner] along its middle.

softmax and log_softmax take the input, or its scaled and masked scores (`column_tiles.py`).
Tiles of columns by contiguous inner positions keep every access coalesced, and elements that are read once stay in
registers: 2MN forward, 3MN backward, MN for logsumexp. Long columns are split over programs, which exchange a state for
each inner position (`column_tiles.py`).
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.exchange import slots_again, slots_of
from fused_softmax.core.kernels.rows import nested_offset
from fused_softmax.core.kernels.state import (
    GREATEST,
    GREATEST_FP64,
    NEG_INF,
    NO_COLUMN,
    exp_at,
    finite_top,
    hold_all,
    load_exact,
    max_of,
    natural_exp,
    origin_of,
    result_of,
    rounded_product,
    scores_of,
    sum_exp_of,
    widen,
)
from fused_softmax.ops.softmax.kernels.column_tiles import (
    ColumnParts,
    Columns,
    ColumnScores,
    Strided,
    collect_columns,
    keep_columns,
    keep_first_columns,
    merged_columns,
    only_column,
    publish_columns,
    scores_of_columns,
    stand_in_columns,
    states_of_columns,
    summed_columns,
)
from fused_softmax.ops.softmax.kernels.gradient import dot_of, gradient_of, product_of, zero_of_part


@triton.jit(do_not_specialize=["n_cols", "n_inner", "n_parts", "part_cols"])
def _column_forward(
    slots_ptr, x_ptr, y_ptr, mask_ptr, scale_ptr, x_outer_stride, x_col_stride, y_outer_stride, y_col_stride,
    n_cols, n_inner, n_parts, part_cols, mask_outer, mask_col, mask_inner, scale_outer, scale_inner, scale,
    K: tl.constexpr,
):  # fmt: skip
    """A program has the columns of one block of inner positions, or a part of them (K.split)."""
    S = ColumnScores(mask_ptr, scale_ptr, mask_outer, mask_col, mask_inner, scale_outer, scale_inner, scale)
    group, part = place_of(n_parts, K)
    group_slots_ptr = slots_ptr
    tag = 0
    if K.split:
        group_slots_ptr, tag = slots_of(slots_ptr, group, part, n_parts, K.block_inner, K)
    c = columns_of(group, part * part_cols, n_cols, n_inner, K)
    x_strided = Strided(x_ptr, x_outer_stride, x_col_stride)
    x, m, s = hold_columns(x_strided, c, S, K)
    y = Strided(y_ptr, y_outer_stride, y_col_stride)
    if K.split:
        if K.publish:
            publish_columns(m, s, group_slots_ptr, part, n_parts, tag, K)
        if K.collect:
            message, left = collect_columns(group_slots_ptr, n_parts, tag, K)
            if left > 0:
                finish_alone(slots_ptr, x_strided, y, n_cols, n_inner, n_parts, part_cols, tag, S, K)
            else:
                m, s = merged_columns(message, n_parts, K)
                store_results(y, x, m, s, c, S, K)
    else:
        store_results(y, x, m, s, c, S, K)


@triton.jit(do_not_specialize=["n_cols", "n_inner", "n_parts", "part_cols"])
def _column_logsumexp(
    slots_ptr, x_ptr, lse_ptr, x_outer_stride, x_col_stride, lse_outer_stride, lse_col_stride,
    n_cols, n_inner, n_parts, part_cols, K: tl.constexpr,
):  # fmt: skip
    """logsumexp of columns, online: every lane of the tile has a state of its own until all columns are read."""
    group, part = place_of(n_parts, K)
    group_slots_ptr = slots_ptr
    tag = 0
    if K.split:
        group_slots_ptr, tag = slots_of(slots_ptr, group, part, n_parts, K.block_inner, K)
    c = positions_of(group, n_cols, n_inner, K)
    x = Strided(x_ptr, x_outer_stride, x_col_stride)
    m, s = state_of_columns(part, ColumnParts(group, n_cols, n_inner, part_cols, (x, c)), K)
    if K.split:
        if K.publish:
            publish_columns(m, s, group_slots_ptr, part, n_parts, tag, K)
        if K.collect:  # noqa: SIM102  a constexpr, then a value
            if part == n_parts - 1:
                message, left = collect_columns(group_slots_ptr, n_parts, tag, K)
                if left > 0:
                    finish_lse_alone(
                        slots_ptr, x, lse_ptr, lse_outer_stride, n_cols, n_inner, n_parts, part_cols, tag, K
                    )  # fmt: skip
                else:
                    store_lse(lse_ptr + c.outer * lse_outer_stride, message, n_parts, c, K)
    else:
        lse = (m + tl.log(s)).to(K.cast_dtype)
        tl.store(lse_ptr + c.outer * lse_outer_stride + c.inner[None, :], lse, mask=c.on[None, :])


@triton.jit(do_not_specialize=["n_cols", "n_inner", "n_parts", "part_cols"])
def _column_backward(
    slots_ptr, dy_ptr, y_ptr, dx_ptr, dy_outer_stride, dy_col_stride, y_outer_stride, y_col_stride,
    dx_outer_stride, dx_col_stride, n_cols, n_inner, n_parts, part_cols, factor, K: tl.constexpr,
):  # fmt: skip
    """The gradient of softmax or log_softmax of columns."""
    group, part = place_of(n_parts, K)
    group_slots_ptr = slots_ptr
    tag = 0
    if K.split:
        group_slots_ptr, tag = slots_of(slots_ptr, group, part, n_parts, K.block_inner, K)
    c = columns_of(group, part * part_cols, n_cols, n_inner, K)
    y_strided = Strided(y_ptr, y_outer_stride, y_col_stride)
    dy_strided = Strided(dy_ptr, dy_outer_stride, dy_col_stride)
    dx = Strided(dx_ptr, dx_outer_stride, dx_col_stride)
    y, dy, d = hold_both(y_strided, dy_strided, c, K)
    if K.split:
        BLOCK_INNER: tl.constexpr = K.block_inner
        if K.publish:
            publish_columns(d, tl.zeros([1, BLOCK_INNER], tl.float32), group_slots_ptr, part, n_parts, tag, K)
        if K.collect:
            message, left = collect_columns(group_slots_ptr, n_parts, tag, K)
            if left > 0:
                finish_gradient_alone(
                    slots_ptr, dy_strided, y_strided, dx, n_cols, n_inner, n_parts, part_cols, factor, tag, K
                )  # fmt: skip
            else:
                store_gradients(dx, y, dy, summed_columns(message, n_parts, K), factor, c, K)
    else:
        store_gradients(dx, y, dy, d, factor, c, K)


@triton.jit(noinline=True)
def finish_alone(slots_ptr, x, y, n_cols, n_inner, n_parts, part_cols, tag, S, K: tl.constexpr):
    """Store the results of a part of a group, if messages of other parts are missing.

    See `forward.finish_alone`.
    """
    group, part = place_of(n_parts, K)
    given = ColumnParts(group, n_cols, n_inner, part_cols, (x, S))
    slots_ptr = slots_again(slots_ptr, group, n_parts, K.block_inner)
    m, s = merged_columns(stand_in_columns(slots_ptr, n_parts, tag, state_of_held, given, K), n_parts, K)
    c = columns_of(group, part * part_cols, n_cols, n_inner, K)
    q = scores_of_columns(c, S, K)
    _, _, first = scan_columns(x, c, q, S, K)
    for at in range(0, held_size(c, K), K.block_cols):
        here = columns_from(at, c)
        z = scores_of(load_kept(at, first, x, c, q, S, K), q.factor, K, K.unpack)
        y_ptr = at_columns(y.ptr, y.outer_stride, y.col_stride, here, K)
        store_columns(y_ptr, y.col_stride, result_of(z, m, s, K), 0, here, K, 0)


@triton.jit(noinline=True)
def finish_gradient_alone(slots_ptr, dy, y, dx, n_cols, n_inner, n_parts, part_cols, factor, tag, K: tl.constexpr):
    """`finish_alone` for a gradient."""
    group, part = place_of(n_parts, K)
    given = ColumnParts(group, n_cols, n_inner, part_cols, (y, dy))
    slots_ptr = slots_again(slots_ptr, group, n_parts, K.block_inner)
    d = summed_columns(stand_in_columns(slots_ptr, n_parts, tag, dot_of_held, given, K), n_parts, K)
    c = columns_of(group, part * part_cols, n_cols, n_inner, K)
    for at in range(0, held_size(c, K), K.block_cols):
        here = columns_from(at, c)
        dx_ptr = at_columns(dx.ptr, dx.outer_stride, dx.col_stride, here, K)
        grad = gradient_of(load_tile(y, here, 0.0, K), load_tile(dy, here, 0.0, K), d, factor, K)
        store_columns(dx_ptr, dx.col_stride, grad, 0, here, K, 0)


@triton.jit(noinline=True)
def finish_lse_alone(
    slots_ptr, x, lse_ptr, lse_outer_stride, n_cols, n_inner, n_parts, part_cols, tag, K: tl.constexpr
):  # fmt: skip
    """`finish_alone` for logsumexp."""
    group, _ = place_of(n_parts, K)
    c = positions_of(group, n_cols, n_inner, K)
    given = ColumnParts(group, n_cols, n_inner, part_cols, (x, c))
    slots_ptr = slots_again(slots_ptr, group, n_parts, K.block_inner)
    message = stand_in_columns(slots_ptr, n_parts, tag, state_of_columns, given, K)
    store_lse(lse_ptr + c.outer * lse_outer_stride, message, n_parts, c, K)


@triton.jit
def positions_of(group, n_cols, n_inner, K: tl.constexpr):
    """A group's columns, read no wider than a thread has states.

    Each position takes one state, in registers.
    """
    POSITIONS: tl.constexpr = K.positions
    c = columns_of(group, group * 0, n_cols, n_inner, K)
    return Columns(c.outer, tl.max_contiguous(c.inner, POSITIONS), c.on, c.start, c.size)


@triton.jit
def store_lse(lse_ptr, message, n_parts, c, K: tl.constexpr):
    """Store lse of a group, from the messages of all its parts."""
    m_parts, s_parts = states_of_columns(message, n_parts, K)
    m, s = merge_states(tl.maximum(m_parts, -GREATEST), s_parts, 1, K)
    tl.store(lse_ptr + c.inner, (m + tl.log(s)).to(K.cast_dtype), mask=c.on)


@triton.jit
def store_results(y, x, m, s, c, S, K: tl.constexpr):
    """Store the results of the tiles of a program."""
    q = scores_of_columns(c, S, K)
    x = hold_all(x, K.ptx)
    y_ptr = at_columns(y.ptr, y.outer_stride, y.col_stride, c, K)
    for p in tl.static_range(len(x)):
        z = scores_of(x[p], q.factor, K, K.unpack)
        store_columns(y_ptr, y.col_stride, result_of(z, m, s, K), p, c, K, K.full_pieces)


@triton.jit
def store_gradients(dx, y, dy, d, factor, c, K: tl.constexpr):
    """Store the gradients of the tiles of a program."""
    dx_ptr = at_columns(dx.ptr, dx.outer_stride, dx.col_stride, c, K)
    for p in tl.static_range(len(y)):
        store_columns(dx_ptr, dx.col_stride, gradient_of(y[p], dy[p], d, factor, K), p, c, K, K.full_pieces)


@triton.jit
def hold_columns(x, c, S, K: tl.constexpr):
    """(tiles, m, s) of the scores of a program's columns."""
    q = scores_of_columns(c, S, K)
    PIECES: tl.constexpr = K.pieces
    x_ptr = at_columns(x.ptr, x.outer_stride, x.col_stride, c, K)
    x = load_columns(x_ptr, x.col_stride, c, q.masked_input, K, PIECES, K.full_pieces)
    if K.mask:
        x = keep_columns(x, c, q, S, K, K.full_pieces)
    m = max_of(x, q.factor, K)[None, :]  # two dims before any asm, through which layouts do not travel
    if K.greedy:
        x = keep_first_columns(x, m, q, K)
    x = hold_all(x, K.ptx)
    scale, base = origin_of(m, K.ptx, K.subtract_first)
    return x, m, sum_exp_of(x, scale, base, q.factor, K)[None, :]


@triton.jit
def hold_both(y, dy, c, K: tl.constexpr):
    """(tiles of y, tiles of dy, d) of a program's columns."""
    PIECES: tl.constexpr = K.pieces
    y_ptr = at_columns(y.ptr, y.outer_stride, y.col_stride, c, K)
    dy_ptr = at_columns(dy.ptr, dy.outer_stride, dy.col_stride, c, K)
    y = load_columns(y_ptr, y.col_stride, c, 0.0, K, PIECES, K.full_pieces)
    dy = load_columns(dy_ptr, dy.col_stride, c, 0.0, K, PIECES, K.full_pieces)
    d = dot_of(y, dy, K)[None, :]
    return hold_all(y, K.ptx), hold_all(dy, K.ptx), d


@triton.jit
def held_size(c, K: tl.constexpr):
    """How many columns a program has, from where it begins."""
    return tl.minimum(c.size, K.pieces * K.block_cols)


@triton.jit
def columns_from(at, c):
    """The columns of a program without its first `at`."""
    return Columns(c.outer, c.inner, c.on, c.start + at, c.size - at)


@triton.jit
def load_tile(x, c, OTHER, K: tl.constexpr):
    """The first tile of columns."""
    return load_columns(at_columns(x.ptr, x.outer_stride, x.col_stride, c, K), x.col_stride, c, OTHER, K, 1, 0)[0]


@triton.jit
def load_kept(at, first, x, c, q, S, K: tl.constexpr):
    """The tile that begins `at` columns after a program's first, without what greedy inner positions do not keep."""
    here = columns_from(at, c)
    tile = load_scores(x, here, q, S, K)
    if K.greedy:
        tile = only_column(tile, at + tl.arange(0, K.block_cols)[:, None], first, q, K)
    return tile


@triton.jit
def load_scores(x, c, q, S, K: tl.constexpr):
    """The first tile of columns, with what is masked turned to the masked input."""
    tile = load_tile(x, c, q.masked_input, K)
    if K.mask:
        tile = keep_columns((tile,), c, q, S, K, 0)[0]
    return tile


@triton.jit
def scan_columns(x, c, q, S, K: tl.constexpr):
    """(m, s, the column that a greedy inner position keeps) of a program's columns, read tile by tile.

    They have the same bits as where the columns are held, because lanes add up in the same order.
    """
    BLOCK_COLS: tl.constexpr = K.block_cols
    BLOCK_INNER: tl.constexpr = K.block_inner
    top = tl.full([BLOCK_COLS, BLOCK_INNER], NEG_INF, K.state_dtype)
    for at in range(0, held_size(c, K), BLOCK_COLS):
        top = tl.maximum(top, scores_of(load_scores(x, columns_from(at, c), q, S, K), q.factor, K))
    m = tl.max(top, axis=0)[None, :]
    first = 0
    if K.greedy:
        found = tl.full([BLOCK_COLS, BLOCK_INNER], NO_COLUMN, tl.int32)
        for at in range(0, held_size(c, K), BLOCK_COLS):
            here = scores_of(load_scores(x, columns_from(at, c), q, S, K), q.factor, K) == m
            found = tl.minimum(found, tl.where(here, at + tl.arange(0, BLOCK_COLS)[:, None], NO_COLUMN))
        first = tl.min(found, axis=0)[None, :]
    scale, base = origin_of(m, K.ptx, K.subtract_first)
    total = tl.zeros([BLOCK_COLS, BLOCK_INNER], K.state_dtype)
    for at in range(0, held_size(c, K), BLOCK_COLS):
        z = scores_of(load_kept(at, first, x, c, q, S, K), q.factor, K, K.unpack)
        total += exp_at(z, scale, base, K.ptx, K.subtract_first)
    return m, tl.sum(total, axis=0)[None, :], first


@triton.jit
def state_of_held(part, given, K: tl.constexpr):
    """(m, s) of a part of a group's columns."""
    x, S = given.rest[0], given.rest[1]
    c = columns_of(given.group, part * given.part_cols, given.n_cols, given.n_inner, K)
    m, s, _ = scan_columns(x, c, scores_of_columns(c, S, K), S, K)
    return m, s


@triton.jit
def dot_of_held(part, given, K: tl.constexpr):
    """(d, 0) of a part of a group's columns."""
    BLOCK_COLS: tl.constexpr = K.block_cols
    BLOCK_INNER: tl.constexpr = K.block_inner
    y, dy = given.rest[0], given.rest[1]
    c = columns_of(given.group, part * given.part_cols, given.n_cols, given.n_inner, K)
    total = tl.full([BLOCK_COLS, BLOCK_INNER], -0.0, K.state_dtype) + zero_of_part(c.size, K)
    for at in range(0, held_size(c, K), BLOCK_COLS):
        here = columns_from(at, c)
        total += product_of(load_tile(y, here, 0.0, K), load_tile(dy, here, 0.0, K), K)
    d = tl.sum(total, axis=0)[None, :]
    return d, tl.zeros_like(d)


@triton.jit
def state_of_columns(part, given, K: tl.constexpr):
    """(m, s) of a part of a group's columns, online."""
    x, c = given.rest[0], given.rest[1]
    x_ptr = at_columns(x.ptr, x.outer_stride, x.col_stride, c, K)
    x_col_stride = multiple_of(x.col_stride, K).to(tl.int64)
    start = part * given.part_cols
    PIECES: tl.constexpr = K.pieces
    STEP: tl.constexpr = PIECES * K.block_cols
    end = tl.minimum(start + given.part_cols, given.n_cols)
    m, s = empty_state(K)
    whole = start + (end - start) // STEP * STEP
    for at in range(start, whole, STEP):
        tiles = load_whole_columns(x_ptr + at * x_col_stride, x_col_stride, c, K)
        m, s = take_columns(m, s, tiles, K)
    for at in range(whole, end, STEP):  # once at most
        rest = Columns(c.outer, c.inner, c.on, at, end - at)
        tiles = load_columns(x_ptr + at * x_col_stride, x_col_stride, rest, NEG_INF, K, PIECES, K.full_pieces)
        m, s = take_columns(m, s, tiles, K)
    m, s = merge_states(m, s, 0, K)
    return m[None, :], s[None, :]


@triton.jit
def place_of(n_parts, K: tl.constexpr):
    """(group, part) of a program."""
    program = tl.program_id(0)
    if K.split:
        return program // n_parts, program % n_parts
    else:
        return program, program * 0


@triton.jit
def multiple_of(size, K: tl.constexpr):
    """A size that is a multiple of the vector, computed so that the compiler sees it, and makes accesses as wide."""
    return size // K.vector * K.vector


@triton.jit
def columns_of(group, start, n_cols, n_inner, K: tl.constexpr):
    """The columns of a group's inner positions, from `start` on."""
    blocks = tl.cdiv(n_inner, K.block_inner)
    inner = group % blocks * K.block_inner + tl.arange(0, K.block_inner)
    return Columns((group // blocks).to(tl.int64), inner, inner < multiple_of(n_inner, K), start, n_cols - start)


@triton.jit
def at_columns(ptr, outer_stride, col_stride, c, K: tl.constexpr):
    """The address of a group's columns in a tensor, without the inner positions."""
    if K.nested:
        ptr += nested_offset(c.outer, outer_stride, K)
    else:
        ptr += c.outer * multiple_of(outer_stride, K)
    return ptr + c.start.to(tl.int64) * multiple_of(col_stride, K)


@triton.jit
def load_columns(ptr, stride, c, OTHER, K: tl.constexpr, PIECES: tl.constexpr, FULL: tl.constexpr):
    """Tiles [block_cols, block_inner] one below another, as a tuple. Columns past the size are OTHER.

    FULL: how many leading tiles end before the size.
    """
    cols = tl.arange(0, K.block_cols)[:, None]
    stride = multiple_of(stride, K).to(tl.int64)
    at = ptr + (cols.to(tl.int64) * stride + c.inner[None, :])
    pieces = ()
    for p in tl.static_range(PIECES):
        here = at + p * (stride * K.block_cols)
        # The compiler knows nothing of the bound in `on`, which makes accesses of one element: only where it is needed.
        if p < FULL and K.whole:
            piece = load_exact(here, None, None, K)
        elif K.whole:
            piece = load_exact(here, p * K.block_cols + cols < c.size, OTHER, K)
        elif p < FULL:
            piece = load_exact(here, c.on[None, :] & (cols >= 0), OTHER, K)
        else:
            piece = load_exact(here, (p * K.block_cols + cols < c.size) & c.on[None, :], OTHER, K)
        pieces = pieces + (piece,)  # noqa: RUF005  the compiler has no unpacking
    return pieces


@triton.jit
def load_whole_columns(ptr, stride, c, K: tl.constexpr):
    """`load_columns` where no column lies past the size."""
    cols = tl.arange(0, K.block_cols)[:, None]
    at = ptr + (cols.to(tl.int64) * stride + c.inner[None, :])
    pieces = ()
    PIECES: tl.constexpr = K.pieces
    for p in tl.static_range(PIECES):
        here = at + p * (stride * K.block_cols)
        if K.whole:
            piece = load_exact(here, None, None, K)
        else:
            piece = load_exact(here, (p * K.block_cols + cols < PIECES * K.block_cols) & c.on[None, :], NEG_INF, K)
        pieces = pieces + (piece,)  # noqa: RUF005
    return pieces


@triton.jit
def store_columns(ptr, stride, y, p, c, K: tl.constexpr, FULL: tl.constexpr):
    cols = tl.arange(0, K.block_cols)[:, None]
    stride = stride.to(tl.int64)
    if K.ptx and K.whole:  # hidden: else the addresses of all tiles are computed before the wait, and spilled
        stride = tl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [stride], dtype=tl.int64, is_pure=False, pack=1)
    stride = multiple_of(stride, K)
    at = ptr + (cols.to(tl.int64) * stride + c.inner[None, :]) + p * (stride * K.block_cols)
    if p < FULL and K.whole:
        tl.store(at, y, cache_modifier=".cs")
    elif K.whole:
        tl.store(at, y, mask=p * K.block_cols + cols < c.size, cache_modifier=".cs")
    elif p < FULL:
        tl.store(at, y, mask=c.on[None, :] & (cols >= 0), cache_modifier=".cs")
    else:
        tl.store(at, y, mask=(p * K.block_cols + cols < c.size) & c.on[None, :], cache_modifier=".cs")


@triton.jit
def empty_state(K: tl.constexpr):
    """(m, s) of every lane before it has read anything. m is finite and stays finite: -inf - -inf never arises."""
    BLOCK_COLS: tl.constexpr = K.block_cols
    BLOCK_INNER: tl.constexpr = K.block_inner
    if K.cast_dtype.is_fp64():
        m = tl.full([BLOCK_COLS, BLOCK_INNER], -GREATEST_FP64, tl.float64)
    else:
        m = tl.full([BLOCK_COLS, BLOCK_INNER], -GREATEST, tl.float32)
    return m, tl.zeros_like(m)


@triton.jit
def take_columns(m, s, x, K: tl.constexpr):
    """The state of every lane after taking its elements of the tiles x."""
    top = widen(x[0], K.compute_dtype)
    for p in tl.static_range(1, len(x)):
        top = tl.maximum(top, widen(x[p], K.compute_dtype))
    top = finite_top(tl.maximum(m, top))  # m last: among narrow numbers alone, one instruction compares two
    s *= natural_exp(m - top, K.ptx)
    for p in tl.static_range(len(x)):
        s += natural_exp(widen(x[p], K.compute_dtype, K.ptx) - top, K.ptx)
    return top, s


@triton.jit
def merge_states(m_parts, s_parts, AXIS: tl.constexpr, K: tl.constexpr):
    """The merged state of all states along an axis."""
    m = tl.max(m_parts, axis=AXIS)
    weights = natural_exp(m_parts - tl.expand_dims(m, AXIS), K.ptx)
    return m, tl.sum(rounded_product(s_parts, weights), axis=AXIS)
