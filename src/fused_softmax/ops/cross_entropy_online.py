"""The losses of rows of logits alone, without their gradient: read once (MN), few rows by many programs each."""

import torch
import triton
import triton.language as tl

from fused_softmax import launch
from fused_softmax.losswise import (
    NONE,
    entropy_terms,
    faded_terms,
    load_logits,
    logit_of_target,
    logits_of,
    numbers_of,
    store_losses,
    sum_of,
    target_of,
    zero_of,
)
from fused_softmax.ops.losses import arithmetic_of, there
from fused_softmax.rowwise import (
    NEG_INF,
    body_of,
    edges_of,
    exp_at,
    first_max_of,
    head_of,
    hold_all,
    log_sum_of,
    max_of,
    merge,
    origin_of,
    sum_exp_of,
    weight_of,
)


def prepare_online(given, of_rows, plan, phase, loss, constexprs, options):
    """What runs _online_loss, and where a row has several parts _merge_losses; `of_rows` makes what they write to."""
    x, n_rows, n_cols, parts, stats = given[0], plan.n_rows, plan.n_cols, plan.parts, loss.stats
    dtype, device = arithmetic_of(x), x.device

    def of_states():
        if parts == 1:
            return None, None
        states = torch.empty(4, n_rows, parts, dtype=dtype, device=device)
        return states, torch.empty(n_rows, parts, dtype=torch.int32, device=device) if stats else None

    def tensors_of(tensors, states, rows):
        x, _, target, weight, _, weight_total, numbers = tensors
        return x, target, weight, weight_total, numbers, *states, *rows

    all_given = tensors_of(given, of_states(), of_rows())
    constexprs = {name: value for name, value in constexprs.items() if name != "FULL_PIECES"}
    constexprs |= {"STATS": stats}
    launches = [
        launch.prepare(
            _online_loss, plan.programs, all_given,
            (x.stride(0), n_rows, n_cols, parts, plan.part_cols, phase, *loss.scalars),
            constexprs | {"SPLIT": parts > 1}, **options,
        )
    ]  # fmt: skip
    if parts > 1:
        lanes = triton.next_power_of_2(parts)
        block = max(1, min(16, 1024 // lanes))
        names = ("SCALED", "CAPPED", "WEIGHTED", "SMOOTH", "CAST", "ZLOSS", "PTX", "STATS")
        launches.append(
            launch.prepare(
                _merge_losses, -(-n_rows // block), all_given, (x.stride(0), n_rows, n_cols, parts, *loss.scalars),
                {name: constexprs[name] for name in names} | {"BLOCK_ROWS": block, "LANES": lanes},
                device=options["device"], num_warps=4,
            )
        )  # fmt: skip

    def run(tensors):
        rows = of_rows()
        given = there(tensors_of(tensors, of_states(), rows))
        for each in launches:
            each(*given)
        return rows

    return run


@triton.jit(do_not_specialize=["n_rows", "n_cols", "n_parts", "part_cols", "phase", "ignore_index"])
def _online_loss(
    x_ptr, target_ptr, weight_ptr, w_total_ptr, numbers_ptr, states_ptr, found_ptr,
    m_ptr, ls_ptr, loss_ptr, z_ptr, entropy_ptr, predicted_ptr,
    x_row_stride, n_rows, n_cols, n_parts, part_cols, phase,
    ignore_index, factor, hidden, cap, smoothing, lse_square_scale,
    BLOCK_COLS: tl.constexpr, PIECES: tl.constexpr, VECTOR: tl.constexpr, SHIFTED: tl.constexpr, CAST: tl.constexpr,
    PTX: tl.constexpr, ZLOSS: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, SCALED: tl.constexpr,
    CAPPED: tl.constexpr, SPLIT: tl.constexpr, STATS: tl.constexpr,
):  # fmt: skip
    """The loss of a row a program, tile by tile, or the state of one part of it (SPLIT)."""
    program = tl.program_id(0)
    row = (program // n_parts).to(tl.int64)
    part = program % n_parts
    part_cols = part_cols // VECTOR * VECTOR
    start = part.to(tl.int64) * part_cols
    WIDE: tl.constexpr = tl.float64 if CAST.is_fp64() else tl.float32
    HELD: tl.constexpr = WIDE if CAPPED else CAST
    TIMES: tl.constexpr = SCALED and not CAPPED
    factor, cap, smoothing, lse_square_scale = numbers_of(numbers_ptr, factor, cap, smoothing, lse_square_scale, WIDE)
    t, kept, wrong, w = target_of(row, target_ptr, weight_ptr, n_cols, ignore_index, WEIGHTED)
    if SMOOTH:
        z_t = tl.load(x_ptr + row * x_row_stride + t, mask=kept, other=0.0)
        z_t = logit_of_target(z_t, factor, cap, CAST, SCALED, CAPPED, PTX)
        zero = zero_of(z_t)
    # A row of the tile a lane, which keeps a state of its own: lanes meet once, at the end.
    WIDTH: tl.constexpr = 4 if VECTOR == 1 else VECTOR
    HEIGHT: tl.constexpr = BLOCK_COLS // WIDTH
    cols = tl.arange(0, HEIGHT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    head = head_of(row, x_row_stride, phase, VECTOR, SHIFTED)
    body = (n_cols - head) // VECTOR * VECTOR
    x_body = body_of(x_ptr, row, x_row_stride, phase, VECTOR, SHIFTED)
    if SHIFTED:  # loaded before anything waits for the pieces
        lane = tl.arange(0, 2 * VECTOR)
        edge_cols, on_edge = edges_of(lane, head, body, n_cols, VECTOR)
        on_edge = on_edge & (part == tl.where(lane < VECTOR, 0, n_parts - 1))
        edge = tl.load(x_ptr + row * x_row_stride + edge_cols, mask=on_edge, other=hidden)
    m = tl.full([HEIGHT, 1], NEG_INF, WIDE)
    s = tl.zeros([HEIGHT, 1], WIDE)
    wz = tl.zeros([HEIGHT, 1], WIDE)
    u = tl.zeros([HEIGHT, 1], WIDE)
    found = tl.full([HEIGHT, 1], NONE, tl.int32)
    end = tl.minimum(start + part_cols, body)
    for at in range(start, end, PIECES * BLOCK_COLS):
        size = end - at
        x = load_logits(x_body + at, cols, size, factor, hidden, cap, BLOCK_COLS, PIECES, 0, CAST, SCALED, CAPPED)
        m_tile = tl.maximum(m, max_of(x, factor, HELD, TIMES)[:, None])
        scale, base = origin_of(m_tile, PTX)
        fade = weight_of(m, m_tile, PTX)
        held = hold_all(x, PTX)
        if SMOOTH:
            wz += sum_of(x, head + at, cols, size, weight_ptr, factor, zero, BLOCK_COLS, HELD, TIMES, WEIGHTED)[:, None]
        if STATS:
            here = first_max_of(x, m_tile, (head + at).to(tl.int32), cols, factor, BLOCK_COLS, HELD, TIMES)[:, None]
            found = tl.where(m_tile > m, here, tl.minimum(found, here))
            u = (
                faded_terms(u, s, m, m_tile, fade)
                + entropy_terms(held, scale, base, factor, m_tile, HELD, TIMES, PTX)[:, None]
            )
        s = s * fade + sum_exp_of(held, scale, base, factor, HELD, TIMES, PTX)[:, None]
        m = m_tile
    if not SMOOTH:  # the first read need not wait for the target
        z_t = tl.load(x_ptr + row * x_row_stride + t, mask=kept, other=0.0)
        z_t = logit_of_target(z_t, factor, cap, CAST, SCALED, CAPPED, PTX)
    m_lane = m
    m = tl.max(tl.max(m_lane, axis=1), axis=0)
    fade = weight_of(m_lane, m, PTX)
    u = tl.sum(tl.sum(faded_terms(u, s, m_lane, m, fade), axis=1), axis=0)
    s = tl.sum(tl.sum(s * fade, axis=1), axis=0)
    wz = tl.sum(tl.sum(wz, axis=1), axis=0)
    found = tl.min(tl.min(tl.where(m_lane == m, found, NONE), axis=1), axis=0)
    if SHIFTED:
        edge = tl.where(on_edge, logits_of(edge, factor, cap, CAST, SCALED, CAPPED), NEG_INF)
        m_edge = tl.max(edge, axis=0)
        scale, base = origin_of(m_edge, PTX)
        e = exp_at(edge, scale, base, PTX)
        m_body, s_body, s_edge = m, s, tl.sum(e, axis=0)
        m, s = merge(m, s, m_edge, s_edge, PTX)
        if SMOOTH:
            terms = tl.where(on_edge, edge - zero, 0.0)
            if WEIGHTED:
                terms *= tl.load(weight_ptr + edge_cols, mask=on_edge, other=0.0)
            wz += tl.sum(terms, axis=0)
        if STATS:
            u_edge = tl.sum(tl.where(edge == NEG_INF, 0.0, e * (edge - m_edge)), axis=0)
            u = faded_terms(u, s_body, m_body, m, weight_of(m_body, m, PTX))
            u += faded_terms(u_edge, s_edge, m_edge, m, weight_of(m_edge, m, PTX))
            found = tl.where(m_body == m, found, NONE)
            found = tl.minimum(found, tl.min(tl.where(on_edge & (edge == m), edge_cols, NONE), axis=0))
    if SPLIT:
        states_ptr += row * n_parts + part
        step = n_rows.to(tl.int64) * n_parts
        tl.store(states_ptr, m)
        tl.store(states_ptr + step, s)
        tl.store(states_ptr + 2 * step, wz)
        if STATS:
            tl.store(states_ptr + 3 * step, u)
            tl.store(found_ptr + row * n_parts + part, found)
    else:
        w_total = n_cols.to(WIDE)
        if SMOOTH and WEIGHTED:
            w_total = tl.load(w_total_ptr)
        ls = log_sum_of(m, s, PTX)
        tl.store(m_ptr + row, m)
        tl.store(ls_ptr + row, ls)
        store_losses(
            loss_ptr, z_ptr, row, part >= 0, m, ls, z_t, kept, wrong, w, wz, w_total, smoothing, lse_square_scale,
            n_cols, SMOOTH, ZLOSS,
        )  # fmt: skip
        if STATS:
            tl.store(entropy_ptr + row, ls - u / s)
            tl.store(predicted_ptr + row, tl.where(found < n_cols, found, 0).to(tl.int64))


@triton.jit(do_not_specialize=["n_rows", "n_cols", "n_parts", "ignore_index"])
def _merge_losses(
    x_ptr, target_ptr, weight_ptr, w_total_ptr, numbers_ptr, states_ptr, found_ptr,
    m_ptr, ls_ptr, loss_ptr, z_ptr, entropy_ptr, predicted_ptr,
    x_row_stride, n_rows, n_cols, n_parts, ignore_index, factor, hidden, cap, smoothing, lse_square_scale,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, CAST: tl.constexpr,
    ZLOSS: tl.constexpr, PTX: tl.constexpr, STATS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The losses of rows by the states of their parts."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row = tl.minimum(row, n_rows - 1)
    WIDE: tl.constexpr = tl.float64 if CAST.is_fp64() else tl.float32
    factor, cap, smoothing, lse_square_scale = numbers_of(numbers_ptr, factor, cap, smoothing, lse_square_scale, WIDE)
    t, kept, wrong, w = target_of(row, target_ptr, weight_ptr, n_cols, ignore_index, WEIGHTED)
    j = tl.arange(0, LANES)[None, :]
    on = j < n_parts
    step = n_rows.to(tl.int64) * n_parts
    states_ptr += row[:, None] * n_parts + j
    m_parts = tl.load(states_ptr, mask=on, other=NEG_INF)
    m = tl.max(m_parts, axis=1)
    fade = weight_of(m_parts, m[:, None], PTX)
    s_parts = tl.load(states_ptr + step, mask=on, other=0.0)
    s = tl.sum(s_parts * fade, axis=1)
    wz = tl.sum(tl.load(states_ptr + 2 * step, mask=on, other=0.0), axis=1)
    z_t = tl.load(x_ptr + row * x_row_stride + t, mask=kept, other=0.0)
    z_t = logit_of_target(z_t, factor, cap, CAST, SCALED, CAPPED, PTX)
    w_total = n_cols.to(WIDE)
    if SMOOTH and WEIGHTED:
        w_total = tl.load(w_total_ptr)
    ls = log_sum_of(m, s, PTX)
    tl.store(m_ptr + row, m)
    tl.store(ls_ptr + row, ls)
    store_losses(
        loss_ptr, z_ptr, row, row >= 0, m, ls, z_t, kept, wrong, w, wz, w_total, smoothing, lse_square_scale, n_cols,
        SMOOTH, ZLOSS,
    )  # fmt: skip
    if STATS:
        u_parts = tl.load(states_ptr + 3 * step, mask=on, other=0.0)
        u = tl.sum(faded_terms(u_parts, s_parts, m_parts, m[:, None], fade), axis=1)
        found = tl.load(found_ptr + row[:, None] * n_parts + j, mask=on, other=NONE)
        found = tl.min(tl.where(m_parts == m[:, None], found, NONE), axis=1).to(tl.int64)
        tl.store(entropy_ptr + row, ls - u / s)
        tl.store(predicted_ptr + row, tl.where(found < n_cols, found, 0))
