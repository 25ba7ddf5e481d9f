"""Split with other exchanges between a row's programs. Rejected.

Tried on rows of 1 Mi bf16 in 64 parts of 16384, 4 warps:
    COUNTER  all programs publish, then poll one arrival counter a row, and read the slots once it is complete
    ANSWER   the last program to arrive merges the slots and answers; the others poll one of COPIES answers
Predicted: polling one word instead of 64 slots takes less L2 traffic, so both come nearer to the bound.

Measured 2026-11-21, NVIDIA H200, driver 580.159, torch 2.11, Triton 3.6.0; ratio to the best copy kernel in the run:
                                                128 x 1 Mi    512 x 1 Mi
    no exchange (wrong results, the bound)      0.962         0.984         162 registers, so 3 programs resident
    every slot polled, 1 copy                   0.889         0.916
    every slot polled, 16 copies                0.907         0.927
    last part first, 16 copies (adopted)        0.923         0.945
    ANSWER, 16 answers                          0.870         0.892
    ANSWER, 2 answers                           0.872         0.892
    COUNTER                                     0.636         0.634

Looking back: with COUNTER, 64 readers poll the word that all programs must write. ANSWER adds a trip through L2 to the
last program and back. More copies and fewer polls help.
This rewrite has no prefetch. It was compiled for sm_90, not run. It imports the device shelf of version 0.1.0.
"""

import torch
import triton
import triton.language as tl
from fused_softmax.rowwise import (
    NEG_INF,
    POLL_LIMIT,
    exp_at,
    hold_all,
    load_pieces,
    max_of,
    origin_of,
    pack_state,
    sum_exp_of,
    tag_of,
    unpack_state,
    wait_for,
    weight_of,
)

COUNTER, ANSWER = tl.constexpr(0), tl.constexpr(1)


@triton.jit
def merged(message, peer):
    m_parts, s_parts = unpack_state(message)
    m = tl.max(tl.where(peer, m_parts, NEG_INF), axis=0)
    return m, tl.sum(tl.where(peer, s_parts * weight_of(m_parts, m, True), 0.0), axis=0)


@triton.jit
def by_counter(m, s, count_ptr, slots_ptr, part, n_parts, tag, LANES: tl.constexpr):
    """The counter is never reset: it grows by n_parts a launch."""
    goal = (tl.load(count_ptr, volatile=True) // n_parts + 1) * n_parts
    tl.atomic_xchg(slots_ptr + part, pack_state(m, s, tag), sem="relaxed")
    tl.atomic_add(count_ptr, 1, sem="relaxed")
    polls = 0
    while (tl.load(count_ptr, volatile=True) < goal) & (polls < POLL_LIMIT):
        polls += 1
    j = tl.arange(0, LANES)
    peer = j < n_parts
    message = tl.load(slots_ptr + j, mask=peer, other=0, volatile=True)
    # relaxed, so the count may be visible before a slot
    return merged(wait_for(slots_ptr + j, message, peer, tag), peer)


@triton.jit
def by_answer(m, s, count_ptr, slots_ptr, part, n_parts, tag, LANES: tl.constexpr, COPIES: tl.constexpr):
    j = tl.arange(0, LANES)
    answers_ptr = slots_ptr + n_parts
    tl.atomic_xchg(slots_ptr + part, pack_state(m, s, tag), sem="relaxed")
    arrived = tl.atomic_add(count_ptr, 1, sem="relaxed") % n_parts
    if arrived == n_parts - 1:
        peer = j < n_parts
        message = tl.load(slots_ptr + j, mask=peer, other=0, volatile=True)
        m_row, s_row = merged(wait_for(slots_ptr + j, message, peer, tag), peer)
        message = pack_state(m_row, s_row, tag) + tl.zeros([LANES], tl.int64)
        tl.atomic_xchg(answers_ptr + j, message, mask=j < COPIES, sem="relaxed")
    else:
        mine = j == part % COPIES
        message = tl.zeros([LANES], tl.int64) + ((1 - tag) << 31)
        m_row, s_row = merged(wait_for(answers_ptr, message, mine, tag), mine)
    return m_row, s_row


@triton.jit
def _split(
    x_ptr, y_ptr, slots_ptr, n_parts, part_cols,
    BLOCK_COLS: tl.constexpr, PIECES: tl.constexpr, LANES: tl.constexpr, COPIES: tl.constexpr, WAY: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row, part = program // n_parts, program % n_parts
    count_ptr = slots_ptr + row * (1 + n_parts + COPIES)
    slots_ptr = count_ptr + 1
    tag = 1 - tag_of(tl.load(slots_ptr + part, volatile=True))
    cols = tl.arange(0, BLOCK_COLS)
    start = program.to(tl.int64) * part_cols
    x = load_pieces(x_ptr + start, cols, part_cols, BLOCK_COLS, PIECES, PIECES)
    m = max_of(x, 1.0, x_ptr.dtype.element_ty, False)
    x = hold_all(x, True)
    scale, base = origin_of(m, True)
    s = sum_exp_of(x, scale, base, 1.0, x_ptr.dtype.element_ty, False, True)
    if WAY == COUNTER:
        m, s = by_counter(m, s, count_ptr, slots_ptr, part, n_parts, tag, LANES)
    else:
        m, s = by_answer(m, s, count_ptr, slots_ptr, part, n_parts, tag, LANES, COPIES)
    scale, base = origin_of(m, True)
    x = hold_all(x, True)
    for p in tl.static_range(PIECES):
        y = exp_at(x[p].to(tl.float32), scale, base, True) / s
        tl.store(y_ptr + start + p * BLOCK_COLS + cols, y.to(y_ptr.dtype.element_ty), cache_modifier=".cs")


def split(x: torch.Tensor, way: tl.constexpr, slots: torch.Tensor, part_cols: int = 16384, copies: int = 16):
    """softmax of contiguous x. slots: int64 zeros [n_rows * (1 + n_parts + copies)], kept between calls."""
    y, parts = torch.empty_like(x), x.shape[1] // part_cols
    blocks = {"BLOCK_COLS": 1024, "PIECES": part_cols // 1024, "LANES": 128, "COPIES": copies}
    _split[(x.shape[0] * parts,)](x, y, slots, parts, part_cols, **blocks, WAY=way, num_warps=4)
    return y
