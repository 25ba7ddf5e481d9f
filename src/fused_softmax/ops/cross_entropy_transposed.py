"""The losses of tokens by transposed logits [classes, tokens], a block of classes after another, and their gradient.

Traffic: the losses read the logits once (MN), and the gradient, which is written over them, a second time (2MN). A
program has a tile of tokens of one part of a block's classes; the states of all parts meet in a kernel of their own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_softmax import launch
from fused_softmax.device import device_of
from fused_softmax.losswise import (
    gradient_of_logits,
    load_transposed,
    logit_of_target,
    logits_of,
    numbers_of,
    per_row,
    shares_of,
    store_losses,
    target_of,
    zero_of,
)
from fused_softmax.ops.arguments import TLDTYPES
from fused_softmax.ops.losses import Loss, arithmetic_of, there
from fused_softmax.plan import VECTOR_BYTES
from fused_softmax.rowwise import NEG_INF, exp_at, hold_all, log_sum_of, origin_of, scores_of, weight_of

MULTIPLE = 128  # of classes, that matrix products like; and of what a program reads at a time
_TOKENS = 128  # of a tile
_PROGRAMS = 16  # a multiprocessor
_WARPS = 4


def padded_of(x: Tensor) -> int:
    """The tokens x [tokens, features] as a whole number of vectors."""
    vector = VECTOR_BYTES // x.element_size()
    return -(-len(x) // vector) * vector


class Tokens:
    """The columns of blocks of logits [classes, tokens], a row of which takes `padded` elements, and their losses."""

    def __init__(self, x: Tensor, target: Tensor, loss: Loss, totals: Tensor | None, n_classes: int):
        self.n, self.padded, self.n_classes = len(x), padded_of(x), n_classes
        self.x, self.target, self.loss, self.totals = x, target, loss, totals
        self.device, self.dtype = x.get_device(), arithmetic_of(x)
        self.gpu, self.numbers = device_of(self.device), loss.numbers(x)
        self.vector = VECTOR_BYTES // x.element_size()
        self.constexprs = {
            "BLOCK_TOKENS": _TOKENS, "VECTOR": self.vector, "CAST": TLDTYPES[x.dtype],
            "PTX": self.gpu.backend == "cuda" and self.device >= 0,
        } | loss.constexprs  # fmt: skip
        # Of each token: m, and a, b and u of its gradient; the class of its target, -1 if there is none such, or -2.
        self.shares = self._empty(4, self.padded)
        self.place = self._empty(self.padded, dtype=torch.int32)

    def make_room(self, sizes: list[int]) -> None:
        """For the states of blocks of so many classes, a part of a block and a token each, and the targets' logits."""
        parts = sum(self._parts(size)[0] for size in sizes)
        m, s = self._empty(2, parts, self.padded)
        wz = self._empty(parts, self.padded) if self.loss.label_smoothing > 0 else None
        self.states = m, s, wz, self._empty(parts)
        self.z_t, self.n_read = self._empty(self.padded, dtype=self.x.dtype), 0

    def read(self, logits: Tensor, first: int) -> None:
        """The states of a block of logits from class `first` on."""
        parts, part_classes = self._parts(len(logits))
        pieces = 4 if self.loss.softcap is not None or self.loss.label_smoothing > 0 else 8
        self._launch(
            _token_states, parts * self._blocks,
            (logits, self.target, self.loss.weight, self.numbers, self.z_t, *self.states),
            (first, len(logits), self.n, self.padded, part_classes, self.n_read),
            {"PIECES": pieces, "BLOCK_CLASSES": self._tile},
        )  # fmt: skip
        self.n_read += parts

    def finish(self) -> tuple[Tensor, Tensor | None]:
        """The losses and z-losses, and what the gradient needs of the tokens, by all states."""
        loss = self.loss
        losses, z = self._empty(self.n), self._empty(self.n) if loss.lse_square_scale else None
        given = (
            self.target, loss.weight, self.totals, loss.weight_total(self.n_classes), self.numbers, self.z_t,
            *self.states, losses, z, self.shares, self.place,
        )  # fmt: skip
        self._launch(
            _token_losses, -(-self.n // 32), given, (self.n_read, self.n_classes, self.n, self.padded),
            {
                "BLOCK_TOKENS": 32, "BLOCK_PARTS": 16, "ZLOSS": z is not None, "MEAN": loss.mean,
                "TOTALS": 1 if self.totals is None else self.totals.shape[1],
            }, num_warps=4,
        )  # fmt: skip
        del self.states, self.z_t
        return losses, z

    def write_gradient(self, logits: Tensor, first: int) -> None:
        """That of the logits, over them."""
        parts, part_classes = self._parts(len(logits))
        given = (logits, self.loss.weight, self.numbers, self.shares, self.place)
        self._launch(
            _token_gradient, parts * self._blocks, given, (first, len(logits), self.padded, part_classes),
            {"PIECES": 4, "BLOCK_CLASSES": self._tile},
        )  # fmt: skip

    @property
    def _tile(self) -> int:  # classes: one vector a thread
        return 32 * _WARPS * self.vector // _TOKENS

    @property
    def _blocks(self) -> int:
        return -(-self.padded // _TOKENS)

    def _parts(self, n_classes: int) -> tuple[int, int]:
        """How many parts of how many classes."""
        parts = max(1, _PROGRAMS * self.gpu.sm_count // self._blocks)
        size = -(-n_classes // (parts * MULTIPLE)) * MULTIPLE
        return -(-n_classes // size), size

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.x.device)

    def _launch(self, kernel, programs, given, sizes, how, num_warps=_WARPS):
        run = launch.prepare(
            kernel, programs, given, (*sizes, *self.loss.scalars), self.constexprs | how,
            device=self.device, num_warps=num_warps,
        )  # fmt: skip
        run(*there(given))


@triton.jit
def _place_of(padded, BLOCK_TOKENS: tl.constexpr, VECTOR: tl.constexpr):
    """(part, tokens [1, BLOCK_TOKENS], which are there, the stride of a class); of whole vectors, as is to be seen."""
    padded = padded // VECTOR * VECTOR
    blocks = tl.cdiv(padded, BLOCK_TOKENS)
    program = tl.program_id(0)
    token = program % blocks * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[None, :]
    return program // blocks, token, token < padded, padded.to(tl.int64)


@triton.jit(do_not_specialize=["first", "n_classes", "n_tokens", "padded", "part_classes", "n_read", "ignore_index"])
def _token_states(
    x_ptr, target_ptr, weight_ptr, numbers_ptr, z_t_ptr, m_ptr, s_ptr, wz_ptr, w_ptr,
    first, n_classes, n_tokens, padded, part_classes, n_read,
    ignore_index, factor, hidden, cap, smoothing, lse_square_scale,
    BLOCK_CLASSES: tl.constexpr, BLOCK_TOKENS: tl.constexpr, PIECES: tl.constexpr, VECTOR: tl.constexpr,
    CAST: tl.constexpr, PTX: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """m, s and, if SMOOTH, sum_c w_c (z_c - m) and sum_c w_c of one part of a block, online, a lane by itself."""
    part, token, there, stride = _place_of(padded, BLOCK_TOKENS, VECTOR)
    start = part * part_classes
    stop = tl.minimum(start + part_classes, n_classes)
    WIDE: tl.constexpr = tl.float64 if CAST.is_fp64() else tl.float32
    HELD: tl.constexpr = WIDE if CAPPED else CAST
    TIMES: tl.constexpr = SCALED and not CAPPED
    factor, cap, smoothing, lse_square_scale = numbers_of(numbers_ptr, factor, cap, smoothing, lse_square_scale, WIDE)
    x_ptr += token
    t = tl.load(target_ptr + token, mask=token < n_tokens, other=0).to(tl.int64) - first
    owns = (token < n_tokens) & (t >= start) & (t < stop)
    tl.store(z_t_ptr + token, tl.load(x_ptr + t * stride, mask=owns), mask=owns)
    m = tl.full([BLOCK_CLASSES, BLOCK_TOKENS], NEG_INF, WIDE)
    s = tl.zeros([BLOCK_CLASSES, BLOCK_TOKENS], WIDE)
    wz = tl.zeros([BLOCK_CLASSES, BLOCK_TOKENS], WIDE)
    w = tl.zeros([BLOCK_CLASSES, 1], WIDE)
    for at in range(start, stop, PIECES * BLOCK_CLASSES):
        x = load_transposed(
            x_ptr + at * stride, stride, stop - at, there, factor, hidden, cap, BLOCK_CLASSES, PIECES, CAST, SCALED,
            CAPPED,
        )  # fmt: skip
        top = scores_of(x[0], factor, HELD, TIMES)
        for p in tl.static_range(1, PIECES):
            top = tl.maximum(top, scores_of(x[p], factor, HELD, TIMES))
        top = tl.maximum(m, top)
        x = hold_all(x, PTX)
        scale, base = origin_of(top, PTX)
        s *= weight_of(m, top, PTX)
        for p in tl.static_range(PIECES):
            s += exp_at(scores_of(x[p], factor, HELD, TIMES), scale, base, PTX)
        if SMOOTH:
            zero = tl.where(top == NEG_INF, 0.0, top)
            wz -= w * tl.where(m == NEG_INF, 0.0, zero - m)
            for p in tl.static_range(PIECES):
                row = p * BLOCK_CLASSES + tl.arange(0, BLOCK_CLASSES)[:, None]
                w_row = (row < stop - at).to(WIDE)
                if WEIGHTED:
                    w_row = tl.load(weight_ptr + first + at + row, mask=row < stop - at, other=0.0)
                z = scores_of(x[p], factor, HELD, TIMES)
                wz += tl.where(row < stop - at, w_row * (z - zero), 0.0)
                w += w_row
        m = top
    m_lane = m
    m = tl.max(m_lane, axis=0)[None, :]
    s = tl.sum(s * weight_of(m_lane, m, PTX), axis=0)[None, :]
    at_part = (n_read + part) * stride + token
    tl.store(m_ptr + at_part, m, mask=there)
    tl.store(s_ptr + at_part, s, mask=there)
    if SMOOTH:
        wz = tl.sum(wz - w * tl.where(m_lane == NEG_INF, 0.0, m - m_lane), axis=0)[None, :]
        tl.store(wz_ptr + at_part, wz, mask=there)
        if tl.program_id(0) % tl.cdiv(padded, BLOCK_TOKENS) == 0:
            tl.store(w_ptr + n_read + part, tl.sum(tl.sum(w, axis=1), axis=0))


@triton.jit(do_not_specialize=["n_parts", "n_classes", "n_tokens", "padded", "ignore_index"])
def _token_losses(
    target_ptr, weight_ptr, totals_ptr, w_total_ptr, numbers_ptr, z_t_ptr, m_ptr, s_ptr, wz_ptr, w_ptr,
    loss_ptr, z_ptr, shares_ptr, place_ptr,
    n_parts, n_classes, n_tokens, padded, ignore_index, factor, hidden, cap, smoothing, lse_square_scale,
    BLOCK_TOKENS: tl.constexpr, BLOCK_PARTS: tl.constexpr, VECTOR: tl.constexpr, CAST: tl.constexpr,
    PTX: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr,
    ZLOSS: tl.constexpr, MEAN: tl.constexpr, TOTALS: tl.constexpr,
):  # fmt: skip
    """The losses of tokens by the states of all parts, and what their gradients take."""
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[None, :]
    live = token < n_tokens
    token = tl.minimum(token, n_tokens - 1)
    WIDE: tl.constexpr = tl.float64 if CAST.is_fp64() else tl.float32
    factor, cap, smoothing, lse_square_scale = numbers_of(numbers_ptr, factor, cap, smoothing, lse_square_scale, WIDE)
    t, kept, wrong, w = target_of(token, target_ptr, weight_ptr, n_classes, ignore_index, WEIGHTED)
    z_t = tl.load(z_t_ptr + token, mask=kept, other=0.0)
    z_t = logit_of_target(z_t, factor, cap, CAST, SCALED, CAPPED, PTX)
    stride = padded.to(tl.int64)
    m = tl.full([1, BLOCK_TOKENS], NEG_INF, WIDE)
    for at in range(0, n_parts, BLOCK_PARTS):
        part = at + tl.arange(0, BLOCK_PARTS)[:, None]
        m_part = tl.load(m_ptr + part * stride + token, mask=part < n_parts, other=NEG_INF)
        m = tl.maximum(m, tl.max(m_part, axis=0)[None, :])
    s = tl.zeros([1, BLOCK_TOKENS], WIDE)
    wz = tl.zeros([1, BLOCK_TOKENS], WIDE)
    for at in range(0, n_parts, BLOCK_PARTS):
        part = at + tl.arange(0, BLOCK_PARTS)[:, None]
        m_part = tl.load(m_ptr + part * stride + token, mask=part < n_parts, other=NEG_INF)
        s_part = tl.load(s_ptr + part * stride + token, mask=part < n_parts, other=0.0)
        s += tl.sum(s_part * weight_of(m_part, m, PTX), axis=0)[None, :]
        if SMOOTH:
            wz_part = tl.load(wz_ptr + part * stride + token, mask=part < n_parts, other=0.0)
            w_part = tl.load(w_ptr + part, mask=part < n_parts, other=0.0)
            wz += tl.sum(wz_part - w_part * tl.where(m_part == NEG_INF, 0.0, m - m_part), axis=0)[None, :]
    ls = log_sum_of(m, s, PTX)
    w_total = n_classes.to(WIDE)
    if SMOOTH:
        if WEIGHTED:
            w_total = tl.load(w_total_ptr)
        wz += w_total * (tl.where(m == NEG_INF, 0.0, m) - zero_of(z_t))
    store_losses(
        loss_ptr, z_ptr, token, live, m, ls, z_t, kept, wrong, w, wz, w_total, smoothing, lse_square_scale, n_classes,
        SMOOTH, ZLOSS,
    )  # fmt: skip
    g, g_z = per_row(totals_ptr, TOTALS, MEAN)
    a, b, u = shares_of(m + ls, w, w_total, g, g_z, 0.0, smoothing, lse_square_scale, n_classes, SMOOTH)
    tl.store(shares_ptr + token, m, mask=live)
    tl.store(shares_ptr + stride + token, tl.where(wrong, float("nan"), a) / s, mask=live)
    tl.store(shares_ptr + 2 * stride + token, tl.where(kept, b, 0.0), mask=live)
    tl.store(shares_ptr + 3 * stride + token, tl.where(kept, u, 0.0), mask=live)
    tl.store(place_ptr + token, tl.where(kept, t, tl.where(wrong, -1, -2)).to(tl.int32), mask=live)


@triton.jit(do_not_specialize=["first", "n_classes", "padded", "part_classes", "ignore_index"])
def _token_gradient(
    x_ptr, weight_ptr, numbers_ptr, shares_ptr, place_ptr, first, n_classes, padded, part_classes,
    ignore_index, factor, hidden, cap, smoothing, lse_square_scale,
    BLOCK_CLASSES: tl.constexpr, BLOCK_TOKENS: tl.constexpr, PIECES: tl.constexpr, VECTOR: tl.constexpr,
    CAST: tl.constexpr, PTX: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """The gradient of one part of a block, over its logits."""
    part, token, there, stride = _place_of(padded, BLOCK_TOKENS, VECTOR)
    start = part * part_classes
    stop = tl.minimum(start + part_classes, n_classes)
    WIDE: tl.constexpr = tl.float64 if CAST.is_fp64() else tl.float32
    factor, cap, smoothing, lse_square_scale = numbers_of(numbers_ptr, factor, cap, smoothing, lse_square_scale, WIDE)
    m = tl.load(shares_ptr + token, mask=there, other=0.0)
    a = tl.load(shares_ptr + stride + token, mask=there, other=0.0)
    b = tl.load(shares_ptr + 2 * stride + token, mask=there, other=0.0)
    u = 0.0
    if SMOOTH:
        u = tl.load(shares_ptr + 3 * stride + token, mask=there, other=0.0)
    place = tl.load(place_ptr + token, mask=there, other=-2)
    scale, base = origin_of(m, PTX)
    x_ptr += token
    for at in range(start, stop, PIECES * BLOCK_CLASSES):
        at_ptr = x_ptr + at * stride
        x = load_transposed(
            at_ptr, stride, stop - at, there, factor, 0.0, cap, BLOCK_CLASSES, PIECES, CAST, SCALED, False
        )  # fmt: skip
        for p in tl.static_range(PIECES):
            row = p * BLOCK_CLASSES + tl.arange(0, BLOCK_CLASSES)[:, None]
            here = first + at + row
            w_row = 1.0
            if SMOOTH and WEIGHTED:
                w_row = tl.load(weight_ptr + here, mask=row < stop - at, other=0.0)
            z = logits_of(x[p], factor, cap, CAST, SCALED, CAPPED)
            dx = gradient_of_logits(
                z, exp_at(z, scale, base, PTX), a, tl.where(here == place, b, 0.0), u, w_row, factor, cap, SMOOTH,
                SCALED, CAPPED,
            )  # fmt: skip
            dx = tl.where(place > -2, dx, 0.0).to(CAST)
            tl.store(at_ptr + row.to(tl.int64) * stride, dx, mask=(row < stop - at) & there)
