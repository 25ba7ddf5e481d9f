"""What the kernels of a router share: rows as tiles of experts, scores, and keys that sort as numbers do."""

import triton
import triton.language as tl

from fused_softmax.core.kernels.state import LOG2E, NEG_INF
from fused_softmax.ops.routing.kernels import spec

LANES = tl.constexpr(spec.LANES)
LIST = tl.constexpr(spec.LIST)
FAR = tl.constexpr(-60.0)  # below it a score is exp(x), or its square root, to the last bit
LEAST = tl.constexpr(-150.0)  # log2 of half the least float32 above 0


@triton.jit
def part_of_rows(length, n_parts, part_rows, K: tl.constexpr):
    """(sequence, first, end): the rows of a program, and the sequence that they are of, 0 without sequences."""
    program = tl.program_id(0)
    if K.sequences:  # a division takes as long as a row of few experts
        sequence, part = program // n_parts, program % n_parts
    else:
        sequence, part = program * 0, program
    start, first = sequence * length, part * part_rows
    return sequence, start + first, start + tl.minimum(first + part_rows, length)


@triton.jit
def lanes():
    return tl.arange(0, LANES)[None, :]


@triton.jit
def in_lanes(value, DTYPE: tl.constexpr, K: tl.constexpr):
    """A tile [K.rows, LANES] of one value."""
    ROWS: tl.constexpr = K.rows
    return tl.full([ROWS, LANES], value, DTYPE)


@triton.jit
def of_each(value, DTYPE: tl.constexpr, K: tl.constexpr):
    """[K.rows] of one value."""
    ROWS: tl.constexpr = K.rows
    return tl.full([ROWS], value, DTYPE)


@triton.jit
def experts_of(FIRST: tl.constexpr, STACKED: tl.constexpr, K: tl.constexpr):
    """(experts [STACKED, 1, LANES] of a tile, which of them exist)."""
    tile = FIRST + LIST * tl.arange(0, STACKED)[:, None, None]
    within = tile % K.group_tiles * LANES + tl.arange(0, LANES)[None, None, :]
    return tile // K.group_tiles * K.group_size + within, within < K.group_size


@triton.jit
def logits_at(R, experts, on, K: tl.constexpr):
    """The logits of `experts` with their noise, in float32; -inf where not `on`.

    R's pointers are those of its rows, in a shape that broadcasts against `experts`.
    """
    x = tl.load(R.x_ptr + experts, mask=on, other=NEG_INF).to(tl.float32)
    if R.noise_ptr is not None:
        x += tl.load(R.noise_ptr + experts, mask=on, other=0.0).to(tl.float32)
    return x


@triton.jit
def tiles_of(R, K: tl.constexpr):
    """The logits of rows, tile by tile. R's pointers are [1, rows, 1]."""
    N_CHUNKS: tl.constexpr = K.n_chunks
    CHUNKS: tl.constexpr = K.chunks
    tiles = ()
    for c in tl.static_range(N_CHUNKS):
        tiles = tiles + logits_of_chunk(R, CHUNKS[3 * c], CHUNKS[3 * c + 1], CHUNKS[3 * c + 2], K)
    return tiles


@triton.jit
def logits_of_chunk(R, FIRST: tl.constexpr, STACKED: tl.constexpr, LENGTH: tl.constexpr, K: tl.constexpr):
    tiles = ()
    for t in tl.static_range(LENGTH):
        experts, there = experts_of(FIRST + t, STACKED, K)
        tiles = tiles + (logits_at(R, experts, R.on & there, K),)  # noqa: RUF005  the compiler has no unpacking
    return tiles


@triton.jit
def greatest_of(tiles):
    """The greatest of each row."""
    greatest = tl.max(tiles[0], axis=0)
    for t in tl.static_range(1, len(tiles)):
        greatest = tl.maximum(greatest, tl.max(tiles[t], axis=0))
    return tl.max(greatest, axis=1)


@triton.jit
def total_of(tiles):
    """The sum of each row."""
    total = tl.sum(tiles[0], axis=0)
    for t in tl.static_range(1, len(tiles)):
        total += tl.sum(tiles[t], axis=0)
    return tl.sum(total, axis=1)


@triton.jit
def along_lanes(ids):
    """Ids [rows, LANES], marked so that the compiler keeps a row in the lanes of one warp for the accesses at them.

    It spreads threads along the dim that it believes to be contiguous. Each thread has one id, so the mark has no other
    effect.
    """
    return tl.max_contiguous(ids.to(tl.int64), [1, 2])


@triton.jit
def over_tiles(of_rows):
    """A number of each row, in a shape that broadcasts to tiles."""
    return of_rows[None, :, None]


@triton.jit
def weights_of(tiles, m):
    """exp(x - m) of all tiles."""
    weights = ()
    for t in tl.static_range(len(tiles)):
        weights = weights + (exp_beside(tiles[t], over_tiles(m)),)  # noqa: RUF005
    return weights


@triton.jit
def exp_beside(x, m):
    """exp(x - m); where it is subnormal, it may be 0, which saves three instructions."""
    return tl.exp2((x - m) * LOG2E)


@triton.jit
def sortable(x):
    """int32 keys that sort as the float32 numbers do."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def number_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def sigmoid(x):
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), to the last bits even where it is small (W. Kahan's log1p)."""
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    rest = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.maximum(x, 0.0) + rest


@triton.jit
def score_of(x, K: tl.constexpr):
    """The score of one logit."""
    if K.score == "sigmoid":
        return sigmoid(x)
    else:
        return tl.sqrt(softplus(x))


@triton.jit
def score_beside(x, top, K: tl.constexpr):
    """Scores divided by a factor that is the same for the whole row.

    The factor is 1. If the row's greatest logit `top` is far below 0, it is the score of `top`, so that no score
    underflows.
    """
    faded = tl.where(top == NEG_INF, 0.0, tl.exp((x - top) * K.half))
    return tl.where(top < FAR, faded, score_of(x, K))


@triton.jit
def slope_beside(x, top, K: tl.constexpr):
    """The derivative of a score, divided by the same factor."""
    s = score_beside(x, top, K)
    if K.score == "sigmoid":
        slope = s * sigmoid(-x)
    else:
        slope = tl.where(s > 0, sigmoid(x) / (2.0 * s), 0.0)
    return tl.where(top < FAR, K.half * s, slope)


@triton.jit
def is_some(total, top, K: tl.constexpr):
    """Whether the sum of scores behind a sum of `score_beside` is more than 0 in float32."""
    log = tl.log2(total) + tl.where(top < FAR, top * (K.half * LOG2E), 0.0)
    return (total > 0) & (log > LEAST)


@triton.jit
def over(total, some):
    """1 / total where `some`, else 0."""
    return tl.where(some, 1.0 / tl.where(some, total, 1.0), 0.0)


@triton.jit
def write_zeros(y_ptr, y_row_stride, row, here, value, K: tl.constexpr):
    """Write each row's value [rows], which is 0 or NaN, for all experts of y [n_rows, n_experts]."""
    N_CHUNKS: tl.constexpr = K.n_chunks
    CHUNKS: tl.constexpr = K.chunks
    for c in tl.static_range(N_CHUNKS):
        write_chunk(y_ptr, y_row_stride, row, here, value, CHUNKS[3 * c], CHUNKS[3 * c + 1], CHUNKS[3 * c + 2], K)


@triton.jit
def write_chunk(
    y_ptr,
    y_row_stride,
    row,
    here,
    value,
    FIRST: tl.constexpr,
    STACKED: tl.constexpr,
    LENGTH: tl.constexpr,
    K: tl.constexpr,
):
    for t in tl.static_range(LENGTH):
        experts, there = experts_of(FIRST + t, STACKED, K)
        at = (row * y_row_stride)[None, :, None] + experts
        of_rows = value[None, :, None] + tl.zeros(experts.shape, tl.float32)
        tl.store(y_ptr + at, of_rows.to(y_ptr.dtype.element_ty), mask=here[None, :, None] & there)
