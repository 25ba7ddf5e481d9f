"""The losses of rows of logits, and the gradient of their sum or mean, written in the same pass.

Traffic: with the gradient, the logits are read once and the gradient is written once (2MN). One program holds a row in
registers, or several hold its parts and exchange (m, s) as in softmax. Rows that do not count are read too: to skip
them, every program would have to wait for its target before it requests its row.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.exchange import collect, merged, publish, slots_again, slots_of, stand_in
from fused_softmax.core.kernels.rows import (
    body_of,
    edges_of,
    first_max_of,
    load_edge,
    part_of,
    prefetch_part,
    row_of_part,
    store_piece,
    sum_of_row,
    tile_of,
    whole_vectors,
)
from fused_softmax.core.kernels.spec import Parts, Rows, RowScores
from fused_softmax.core.kernels.state import (
    NEG_INF,
    NO_COLUMN,
    exp_at,
    hold_all,
    log_sum_of,
    max_of,
    origin_of,
    rounded_product,
    scores_of,
)
from fused_softmax.ops.losses.kernels.common import (
    entropy_of,
    exponent_at,
    finish_edge,
    gradient_of_logits,
    load_edge_logits,
    load_logits,
    load_target_logit,
    numbers_of,
    per_row,
    per_row_counted,
    power_of,
    shares_of,
    store_losses,
    store_stats,
    sum_of,
    sum_of_edge,
    sums_and_terms,
    target_of,
    terms_of,
    weight_total,
    weights_at,
    zero_of,
)
from fused_softmax.ops.losses.kernels.spec import HeldLoss, LossRow


@triton.jit(do_not_specialize=["n_rows", "n_cols", "misalignment", "ignore_index"])
def _tile_loss(
    x_ptr, dx_ptr, target_ptr, weight_ptr, totals_ptr, w_total_ptr, numbers_ptr, m_ptr, ls_ptr, loss_ptr, z_ptr,
    entropy_ptr, predicted_ptr, x_row_stride, dx_row_stride, n_rows, n_cols, misalignment,
    ignore_index, factor, hidden, cap, smoothing, lse_square_scale, K: tl.constexpr,
):  # fmt: skip
    """A program has several short rows; it also writes their gradient if K.gradient."""
    PIECES: tl.constexpr = K.pieces
    x = Rows(x_ptr, x_row_stride, misalignment)
    dx_rows = Rows(dx_ptr, dx_row_stride, misalignment)
    r = tile_of(x, n_rows, n_cols, K)
    live = tl.program_id(0).to(tl.int64) * K.block_rows + tl.arange(0, K.block_rows)[:, None] < n_rows
    N = numbers_of(numbers_ptr, factor, cap, smoothing, lse_square_scale, K)
    T = target_of(r.row, target_ptr, weight_ptr, n_cols, ignore_index, K)
    z_t = load_target_logit(x_ptr + r.row * x_row_stride, T, T.kept, N, K)
    zero = zero_of(z_t)
    edge = 0
    if K.shifted:  # edges are loaded first, so that what combines both gets the layout of the pieces
        edge = load_edge(x, n_cols, 1, r, hidden, K)
    z = load_logits(body_of(x, r.row, K), r.cols, r.size, hidden, N, K, PIECES, K.full_pieces)
    m = max_of(z, N.factor, K)[:, None]
    if K.inplace:  # m waits for z_t, so that z_t is loaded before the gradient overwrites it
        m = tl.maximum(m, tl.where(T.kept, z_t, NEG_INF))
    if K.shifted:
        edge = finish_edge(edge, N, K)
        m = tl.maximum(m, tl.max(edge.x, axis=1)[:, None])
    z = hold_all(z, K.ptx)
    s = sum_of_row(z, edge, m, RowScores(n_cols, N.factor, hidden, False), K)
    ls = log_sum_of(m, s, K.ptx)
    wz = 0.0
    if K.smooth:
        wz = sum_of(z, r.head, r.cols, r.size, weight_ptr, zero, N, K)[:, None]
        if K.shifted:
            wz += sum_of_edge(edge, weight_ptr, zero, 1, K)[:, None]
    w_total = weight_total(w_total_ptr, n_cols, K)
    if m_ptr is not None:
        tl.store(m_ptr + r.row, m, mask=live)
        tl.store(ls_ptr + r.row, ls, mask=live)
    store_losses(loss_ptr, z_ptr, r.row, live, m, ls, z_t, zero, T, wz, w_total, n_cols, N, K)
    scale, base = origin_of(m, K.ptx)
    if K.stats:
        _, u = sums_and_terms(z, scale, base, N, K)
        u = u[:, None]
        found = first_max_of(z, m, r.head, r.cols, N.factor, K)[:, None]
        if K.shifted:
            e, t = power_of(exponent_at(edge.x, scale, base, K), K)
            u += tl.sum(rounded_product(e, t), axis=1)[:, None]
            at = tl.where(edge.on & (edge.x == m), edge.cols, NO_COLUMN)
            found = tl.minimum(found, tl.min(at, axis=1)[:, None])
        store_stats(entropy_ptr, predicted_ptr, r.row, live, entropy_of(m, s, ls, u, K), found, n_cols)
    if K.gradient:
        g, g_z = per_row(totals_ptr, K)
        D = shares_of(m + ls, T.w, w_total, g, g_z, n_cols, N, K)
        a = tl.where(T.wrong, float("nan"), D.a) / s
        t = tl.where(T.kept, T.t, -1).to(tl.int32)
        counts = T.kept | T.wrong
        dx_body = body_of(dx_rows, r.row, K)
        z = hold_all(z, K.ptx)
        for p in tl.static_range(PIECES):
            here = r.head + p * K.block_cols + r.cols
            on = p * K.block_cols + r.cols < r.size
            z_p = scores_of(z[p], N.factor, K)
            b = tl.where(here == t, D.b, 0.0)
            w_cols = weights_at(weight_ptr, here, on, K)
            dx = gradient_of_logits(z_p, exp_at(z_p, scale, base, K.ptx), a, b, D.u, w_cols, N, K)
            dx = tl.where(counts, dx, 0.0).to(K.cast_dtype)
            tl.store(dx_body + (p * K.block_cols + r.cols), dx, mask=on & live, cache_modifier=".cs")
        if K.shifted:
            b = tl.where(edge.cols == t, D.b, 0.0)
            w_cols = weights_at(weight_ptr, edge.cols, edge.on, K)
            dx = gradient_of_logits(edge.x, exp_at(edge.x, scale, base, K.ptx), a, b, D.u, w_cols, N, K)
            dx = tl.where(counts, dx, 0.0).to(K.cast_dtype)
            tl.store(dx_ptr + r.row * dx_row_stride + edge.cols, dx, mask=edge.on & live)


@triton.jit(do_not_specialize=["n_cols", "n_parts", "part_cols", "misalignment", "ahead", "ignore_index"])
def _part_loss(
    slots_ptr, x_ptr, dx_ptr, target_ptr, weight_ptr, totals_ptr, w_total_ptr, numbers_ptr,
    m_ptr, ls_ptr, loss_ptr, z_ptr, result_ptr, ticket_ptr,
    x_row_stride, dx_row_stride, n_cols, n_parts, part_cols, misalignment, ahead,
    ignore_index, factor, hidden, cap, smoothing, lse_square_scale, K: tl.constexpr,
):  # fmt: skip
    """A program holds a row, or one part of it (K.split), until its gradient is written."""
    L = LossRow(
        Rows(x_ptr, x_row_stride, misalignment), Rows(dx_ptr, dx_row_stride, misalignment),
        target_ptr, weight_ptr, totals_ptr, w_total_ptr, numbers_ptr, m_ptr, ls_ptr, loss_ptr, z_ptr, result_ptr,
        ticket_ptr, n_cols, n_parts, part_cols, ignore_index, factor, hidden, cap, smoothing, lse_square_scale,
    )  # fmt: skip
    program = tl.program_id(0)
    row = row_of_part(program, n_parts, K)
    row_slots_ptr = slots_ptr
    tag = 0
    if K.split:
        row_slots_ptr, tag = slots_of(slots_ptr, row, program % n_parts, n_parts, K.copies, K)
    r = part_of(program % n_parts, row, L.x, n_cols, part_cols, K)
    z, edge, m, s, H = hold_part(r, L, K)
    if K.prefetch:
        prefetch_part(L.x, n_cols, n_parts, part_cols, tl.num_programs(0), ahead, K)
    if K.split:
        if K.publish:
            publish(m, s, row_slots_ptr, r.part, n_parts, tag, K)
        if K.collect:
            message, left = collect(row_slots_ptr, r.part, n_parts, tag, K)
            if left > 0:
                finish_alone(slots_ptr, tag, L, K)
            else:
                m, s = merged(message, n_parts, K)
                finish_part(z, edge, m, s, H, r, L, K)
    else:
        finish_part(z, edge, m, s, H, r, L, K)


@triton.jit(noinline=True)
def finish_alone(slots_ptr, tag, L, K: tl.constexpr):
    """`finish_part` for a row of which this program misses other parts' messages.

    See `finish_alone` of softmax's forward.py.
    """
    row, part = row_of_part(tl.program_id(0), L.n_parts, K), tl.program_id(0) % L.n_parts
    given = Parts(row, L.x, L.n_cols, L.n_parts, L.part_cols, L)
    slots_ptr = slots_again(slots_ptr, row, L.n_parts, K.copies)
    m, s = merged(stand_in(slots_ptr, L.n_parts, tag, state_of_part, given, K), L.n_parts, K)
    N = numbers_of(L.numbers_ptr, L.factor, L.cap, L.smoothing, L.lse_square_scale, K)
    r = part_of(part, row, L.x, L.n_cols, L.part_cols, K)
    edge, H = scan_loss(r, L, N, K)
    a, D = finish_row(m, s, H, r, L, N, K)
    T = H.target
    counts = T.kept | T.wrong
    scale, base = origin_of(m, K.ptx)
    dx_ptr = body_of(L.dx, row, K) + r.start
    for at in range(0, r.size, K.block_cols):
        on = at + r.cols < r.size
        w_cols = weights_at(L.weight_ptr, r.head + r.start + at + r.cols, on, K)
        z = scores_of(load_piece(at, r, L, N, K), N.factor, K)
        dx = gradient_of_logits(z, exp_at(z, scale, base, K.ptx), a, 0.0, D.u, w_cols, N, K)
        tl.store(dx_ptr + (at + r.cols), tl.where(counts, dx, 0.0).to(K.cast_dtype), mask=on, cache_modifier=".cs")
    if counts:
        store_rest(L.dx, L.weight_ptr, edge, m, H.z_t, a, D, T, T.kept & H.writes, r, N, K)
    elif K.shifted:
        cols, on = edges_of(r, L.n_cols, L.n_parts, K)
        tl.store(L.dx.ptr + row * L.dx.stride + cols, (cols * 0).to(K.cast_dtype), mask=on)


@triton.jit
def load_piece(at, r, L, N, K: tl.constexpr):
    """The piece that begins `at` columns after the start of its part."""
    return load_logits(body_of(L.x, r.row, K) + r.start + at, r.cols, r.size - at, L.hidden, N, K, 1, 0)[0]


@triton.jit
def scan_loss(r, L, N, K: tl.constexpr):
    """(edge, HeldLoss) of a part of a row, as `hold_part` finds them, but read piece by piece."""
    BLOCK_COLS: tl.constexpr = K.block_cols
    T = target_of(r.row, L.target_ptr, L.weight_ptr, L.n_cols, L.ignore_index, K)
    writes = writes_of(T, r, L, K)
    z_t = load_target_logit(L.x.ptr + r.row * L.x.stride, T, asks_of(T, writes, K), N, K)
    zero = zero_of(z_t)
    edge = 0
    if K.shifted:
        edge = load_edge_logits(L.x, L.n_cols, L.n_parts, r, L.hidden, N, K)
    wz = 0.0
    if K.smooth:
        if K.split and K.inplace:
            zero = zero_of(max_of_pieces(edge, r, L, N, K))
        total = tl.zeros([BLOCK_COLS], K.state_dtype)
        for at in range(0, r.size, BLOCK_COLS):
            first = r.head + r.start + at
            total += terms_of(load_piece(at, r, L, N, K), first, r.cols, r.size - at, L.weight_ptr, zero, N, K)
        wz = tl.sum(total, axis=0)
        if K.shifted:
            wz += sum_of_edge(edge, L.weight_ptr, zero, 0, K)
    g = 1.0
    g_z = 1.0
    if K.counted:
        n_rows = tl.num_programs(0) // L.n_parts
        g, g_z = per_row_counted(targets_of(n_rows, L, K), L.weight_ptr, n_rows, L.n_cols, L.ignore_index, K)
    return edge, HeldLoss(T, z_t, zero, wz, weight_total(L.w_total_ptr, L.n_cols, K), writes, g, g_z)


@triton.jit
def max_of_pieces(edge, r, L, N, K: tl.constexpr):
    """The greatest logit of a part."""
    BLOCK_COLS: tl.constexpr = K.block_cols
    top = tl.full([BLOCK_COLS], NEG_INF, K.state_dtype)
    for at in range(0, r.size, BLOCK_COLS):
        top = tl.maximum(top, scores_of(load_piece(at, r, L, N, K), N.factor, K))
    m = tl.max(top, axis=0)
    if K.shifted:
        m = tl.maximum(m, tl.max(edge.x, axis=0))
    return m


@triton.jit
def state_of_part(part, given, K: tl.constexpr):
    """(m, s) of a part of a row, read piece by piece, with the same bits as where the part is held."""
    BLOCK_COLS: tl.constexpr = K.block_cols
    L = given.rest
    N = numbers_of(L.numbers_ptr, L.factor, L.cap, L.smoothing, L.lse_square_scale, K)
    r = part_of(part, given.row, L.x, L.n_cols, L.part_cols, K)
    edge = 0
    if K.shifted:
        edge = load_edge_logits(L.x, L.n_cols, L.n_parts, r, L.hidden, N, K)
    m = max_of_pieces(edge, r, L, N, K)
    scale, base = origin_of(m, K.ptx)
    total = tl.zeros([BLOCK_COLS], K.state_dtype)
    for at in range(0, r.size, BLOCK_COLS):
        z = scores_of(load_piece(at, r, L, N, K), N.factor, K, K.unpack)
        total += exp_at(z, scale, base, K.ptx, K.subtract_first)
    s = tl.sum(total, axis=0)
    if K.shifted:
        s += tl.sum(exp_at(edge.x, scale, base, K.ptx), axis=0)
    return m, s


@triton.jit
def writes_of(T, r, L, K: tl.constexpr):
    """Whether a part has the target's column; of a row that does not count, whether it is the first part.

    This part stores the row's loss. It also overwrites the gradient at the target's column.
    """
    owner = tl.where(T.kept, tl.minimum((T.t - r.head) // whole_vectors(L.part_cols, K), L.n_parts - 1), 0)
    return r.part == tl.maximum(owner, 0)


@triton.jit
def asks_of(T, writes, K: tl.constexpr):
    """Whether a part reads the target's logit.

    The part that `writes` does. With smoothing every part does, as the origin of its sum, unless the gradient of
    another part may have overwritten it.
    """
    if K.smooth and not (K.split and K.inplace):
        return T.kept
    else:
        return T.kept & writes


@triton.jit
def targets_of(n_rows, L, K: tl.constexpr):
    """The targets of all rows, [K.counted]."""
    j = tl.arange(0, K.counted)
    return tl.load(L.target_ptr + j, mask=j < n_rows, other=0).to(tl.int64)


@triton.jit
def hold_part(r, L, K: tl.constexpr):
    """(pieces, edge, m, s, HeldLoss) of a row of logits, or of its part."""
    N = numbers_of(L.numbers_ptr, L.factor, L.cap, L.smoothing, L.lse_square_scale, K)
    T = target_of(r.row, L.target_ptr, L.weight_ptr, L.n_cols, L.ignore_index, K)
    n_rows = tl.num_programs(0) // L.n_parts
    if K.counted:  # requested before the row, and counted after it
        targets = targets_of(n_rows, L, K)
    z, edge = load_part(r, L, N, K)
    writes = writes_of(T, r, L, K)
    asked = asks_of(T, writes, K)
    z_t = load_target_logit(L.x.ptr + r.row * L.x.stride, T, asked, N, K)
    zero = zero_of(z_t)
    m = max_of_part(z, edge, N, K)  # waits for the part, so the target's logit is requested before
    if K.inplace:  # m waits for z_t, so that z_t is loaded before the gradient overwrites it
        m = tl.maximum(m, tl.where(asked, z_t, NEG_INF))
    z = hold_all(z, K.ptx)
    s = sum_of_row(z, edge, m, RowScores(L.n_cols, N.factor, L.hidden, False), K)
    wz = 0.0
    if K.smooth and K.split and K.inplace:
        zero = zero_of(m)  # if this part starts late, another may have overwritten the target's logit
    if K.smooth:
        wz = sum_of(z, r.head + r.start, r.cols, r.size, L.weight_ptr, zero, N, K)
        if K.shifted:
            wz += sum_of_edge(edge, L.weight_ptr, zero, 0, K)
    w_total = weight_total(L.w_total_ptr, L.n_cols, K)
    g = 1.0
    g_z = 1.0
    if K.counted:
        g, g_z = per_row_counted(targets, L.weight_ptr, n_rows, L.n_cols, L.ignore_index, K)
    return z, edge, m, s, HeldLoss(T, z_t, zero, wz, w_total, writes, g, g_z)


@triton.jit
def finish_part(z, edge, m, s, H, r, L, K: tl.constexpr):
    """Store the gradient of a part, given the state of its row. The part that `writes` also stores the loss."""
    N = numbers_of(L.numbers_ptr, L.factor, L.cap, L.smoothing, L.lse_square_scale, K)
    a, D = finish_row(m, s, H, r, L, N, K)
    T = H.target
    z = hold_all(z, K.ptx)
    if T.kept | T.wrong:
        store_part(L.dx, L.weight_ptr, z, edge, m, H.z_t, a, D, T, T.kept & H.writes, r, N, K)
    else:
        store_zeros(L.dx, L.n_cols, L.n_parts, r, K)


@triton.jit
def finish_row(m, s, H, r, L, N, K: tl.constexpr):
    """(the Shares' a over s, the Shares), given the row's state. The part that `writes` stores the loss."""
    T = H.target
    ls = log_sum_of(m, s, K.ptx)
    zero = H.zero
    wz = H.wz
    if K.smooth and K.split and K.inplace:
        zero = zero_of(m)
        wz += weights_of_part(L.weight_ptr, L.n_cols, L.n_parts, r, K) * (H.zero - zero)
    loss_ptr = L.loss_ptr
    if K.split and K.smooth:
        loss_ptr += r.row * L.n_parts + r.part
    else:
        loss_ptr += r.row
    if H.writes:
        if L.m_ptr is not None:
            tl.store(L.m_ptr + r.row, m)
            tl.store(L.ls_ptr + r.row, ls)
        z_ptr = L.z_ptr
        if K.z_loss:
            z_ptr += r.row
        store_losses(loss_ptr, z_ptr, 0, r.part >= 0, m, ls, H.z_t, zero, T, wz, H.w_total, L.n_cols, N, K)
    elif K.smooth:
        tl.store(loss_ptr, tl.where(T.kept, -N.smoothing / L.n_cols * wz, 0.0))
    g = H.g
    g_z = H.g_z
    if not K.counted:
        g, g_z = per_row(L.totals_ptr, K)
    if K.finishes:
        if K.smooth and K.split:
            sum_losses(L, tl.num_programs(0), g, K)  # each part has stored a share of the loss
        elif H.writes:
            sum_losses(L, tl.num_programs(0) // L.n_parts, g, K)
    D = shares_of(m + ls, T.w, H.w_total, g, g_z, L.n_cols, N, K)
    return tl.where(T.wrong, float("nan"), D.a) / s, D


@triton.jit
def sum_losses(L, n_losses, g, K: tl.constexpr):
    """The program that draws the last ticket stores the result, and sets the ticket back to 0."""
    # Releases this program's loss, and acquires those of all others.
    if tl.atomic_add(L.ticket_ptr, 1, sem="acq_rel") == n_losses - 1:
        BLOCK: tl.constexpr = 1024
        total = tl.zeros([BLOCK], K.state_dtype)
        for at in range(0, n_losses, BLOCK):
            j = at + tl.arange(0, BLOCK)
            total += tl.load(L.loss_ptr + j, mask=j < n_losses, other=0.0, volatile=True)
        tl.store(L.result_ptr, tl.sum(total, axis=0) * g)
        tl.atomic_xchg(L.ticket_ptr, 0, sem="relaxed")


@triton.jit
def load_part(r, L, N, K: tl.constexpr):
    """(pieces, edge) of the logits of a row, or of its part."""
    PIECES: tl.constexpr = K.pieces
    z = load_logits(body_of(L.x, r.row, K) + r.start, r.cols, r.size, L.hidden, N, K, PIECES, K.full_pieces)
    edge = 0
    if K.shifted:
        edge = load_edge_logits(L.x, L.n_cols, L.n_parts, r, L.hidden, N, K)
    return z, edge


@triton.jit
def max_of_part(z, edge, N, K: tl.constexpr):
    m = max_of(z, N.factor, K)
    if K.shifted:
        m = tl.maximum(m, tl.max(edge.x, axis=0))
    return m


@triton.jit
def weights_of_part(weight_ptr, n_cols, n_parts, r, K: tl.constexpr):
    """sum w_c over the columns of a part of a row; without weights, the number of its columns."""
    EDGES: tl.constexpr = 2 * K.vector
    total = 0.0
    if K.weighted:
        for p in tl.static_range(K.pieces):
            at = p * K.block_cols + r.cols
            total += tl.sum(tl.load(weight_ptr + r.head + r.start + at, mask=at < r.size, other=0.0), axis=0)
    else:
        total += tl.maximum(r.size, 0)
    if K.shifted:
        cols, on = edges_of(r, n_cols, n_parts, K)
        ones = tl.full([EDGES], 1.0, K.state_dtype)
        total += tl.sum(
            tl.where(on, tl.load(weight_ptr + cols, mask=on, other=0.0) if K.weighted else ones, 0.0), axis=0
        )
    return total


@triton.jit
def store_part(dx_rows, weight_ptr, z, edge, m, z_t, a, D, T, owns, r, N, K: tl.constexpr):
    """Store the gradient of a row's part as if no column were the target's.

    The part that `owns` the target then writes the gradient at its column.
    """
    scale, base = origin_of(m, K.ptx)
    body = body_of(dx_rows, r.row, K) + r.start
    for p in tl.static_range(len(z)):
        on = p * K.block_cols + r.cols < r.size
        w_cols = weights_at(weight_ptr, r.head + r.start + p * K.block_cols + r.cols, on, K)
        z_p = scores_of(z[p], N.factor, K)
        dx = gradient_of_logits(z_p, exp_at(z_p, scale, base, K.ptx), a, 0.0, D.u, w_cols, N, K)
        store_piece(body, dx.to(K.cast_dtype), p, r.cols, r.size, K)
    store_rest(dx_rows, weight_ptr, edge, m, z_t, a, D, T, owns, r, N, K)


@triton.jit
def store_rest(dx_rows, weight_ptr, edge, m, z_t, a, D, T, owns, r, N, K: tl.constexpr):
    """`store_part` for a part's edge, and then for the target's column."""
    scale, base = origin_of(m, K.ptx)
    dx_ptr = dx_rows.ptr + r.row * dx_rows.stride
    if K.shifted:
        w_cols = weights_at(weight_ptr, edge.cols, edge.on, K)
        dx = gradient_of_logits(edge.x, exp_at(edge.x, scale, base, K.ptx), a, 0.0, D.u, w_cols, N, K)
        tl.store(dx_ptr + edge.cols, dx.to(K.cast_dtype), mask=edge.on)
    tl.debug_barrier()
    if owns:
        w_t = tl.load(weight_ptr + T.t) if K.smooth and K.weighted else 1.0
        dx_t = gradient_of_logits(z_t, exp_at(z_t, scale, base, K.ptx), a, D.b, D.u, w_t, N, K)
        tl.store(dx_ptr + T.t, dx_t.to(K.cast_dtype))


@triton.jit
def store_zeros(dx_rows, n_cols, n_parts, r, K: tl.constexpr):
    """Store 0 as the gradient of a part of a row that does not count."""
    BLOCK_COLS: tl.constexpr = K.block_cols
    PIECES: tl.constexpr = K.pieces
    EDGES: tl.constexpr = 2 * K.vector
    body = body_of(dx_rows, r.row, K) + r.start
    zeros = tl.zeros([BLOCK_COLS], dx_rows.ptr.dtype.element_ty)
    for p in tl.static_range(PIECES):
        at = p * BLOCK_COLS + r.cols
        tl.store(body + at, zeros, mask=at < r.size, cache_modifier=".cs")
    if K.shifted:
        cols, on = edges_of(r, n_cols, n_parts, K)
        tl.store(dx_rows.ptr + r.row * dx_rows.stride + cols, tl.zeros([EDGES], K.cast_dtype), mask=on)
