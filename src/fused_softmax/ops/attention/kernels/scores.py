"""What attention's kernels share: where a head lies, which tiles are visible, and the scores of one tile.

scores = softcap(scale q k) + bias + mask - slope |i + offset - j|; -inf where hidden. exp is exp2 of scores in units of
log 2. One multiplication turns scores into these, fused with the subtraction of the maximum. For the maximum itself the
product is rounded, so its own weight is 2^e, where e is what the rounding has lost. e is the same for the whole row,
and cancels with the sum. For a maximum above HUGE, 2^e could leave the range of floats. The scores of such a row are
scaled by a power of two instead. That loses nothing: neighbouring floats are so far apart there that each weight is 0
or 1.
Tiles come as [queries, keys] or as [keys, queries]: rows and cols broadcast against each other.
"""

import triton
import triton.language as tl

from fused_softmax.core.kernels.state import LOG2E, NEG_INF, capped
from fused_softmax.ops.attention.kernels.spec import ADDED_MASK, BOOL_MASK, Head, Place

_ADDED, _BOOL = tl.constexpr(ADDED_MASK), tl.constexpr(BOOL_MASK)
HUGE = tl.constexpr(2.0**28)  # a maximum in units of log 2, at which e is 8 at most


@triton.jit
def place_of(number, n_inner, n_heads):
    """The Place of a head that is numbered over batches and heads.

    Numbers get 64 bits after the divisions, each of which would be a call in 64 bits.
    """
    batch = number // n_heads
    return Place((batch // n_inner).to(tl.int64), (batch % n_inner).to(tl.int64), number % n_heads)


@triton.jit
def head_at(ptr, strides, place, head):
    return ptr + place.outer * strides[0] + place.inner * strides[1] + tl.cast(head, tl.int64) * strides[2]


@triton.jit
def dense_head(ptr, strides, place, head, K: tl.constexpr):
    """A head of query, key, value or dO. The compiler sees that its strides are whole vectors, and loads vectors."""
    V: tl.constexpr = K.vector
    at = place.outer * (strides[0] // V) + place.inner * (strides[1] // V) + tl.cast(head, tl.int64) * (strides[2] // V)
    return Head(ptr + at * V, strides[3] // V * V)


@triton.jit
def load_tile(
    head, first, n, BLOCK: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, GUARD: tl.constexpr = True
):
    """Rows of a head [n, DIM] from `first` on, as [BLOCK, BLOCK_DIM]; 0 beyond DIM and, with GUARD, beyond n."""
    rows, dims = tl.arange(0, BLOCK), tl.arange(0, BLOCK_DIM)
    at = head.ptr + tl.cast(first, tl.int64) * head.stride + (rows[:, None] * head.stride + dims[None, :])
    if GUARD and DIM != BLOCK_DIM:
        return tl.load(at, mask=((first + rows) < n)[:, None] & (dims < DIM)[None, :], other=0.0)
    elif GUARD:
        return tl.load(at, mask=((first + rows) < n)[:, None], other=0.0)
    elif DIM != BLOCK_DIM:
        return tl.load(at, mask=(dims < DIM)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def store_tile(ptr, x, first, n, BLOCK: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Store rows from `first` on of a contiguous head [n, DIM], rounded to its dtype."""
    rows, dims = tl.arange(0, BLOCK), tl.arange(0, BLOCK_DIM)
    at = ptr + tl.cast(first, tl.int64) * DIM + (rows[:, None] * DIM + dims[None, :])
    tl.store(at, x.to(ptr.dtype.element_ty), mask=((first + rows) < n)[:, None] & (dims < DIM)[None, :])


@triton.jit
def load_added(ptr, strides, place, T, S, ROWS: tl.constexpr, GUARD: tl.constexpr):
    """A mask or bias at a tile's queries and keys. Queries beyond the last are the last.

    Offsets within the tile have 32 bits. Otherwise rows that are not aligned to each other would hold an address for
    each element.
    """
    base = head_at(ptr, strides, place, place.head) + tl.cast(T.start, tl.int64) * strides[4]
    at = T.cols * strides[4]
    if ROWS:
        base += tl.cast(T.first, tl.int64) * strides[3]
        at = tl.minimum(T.rows, S.n_queries - 1 - T.first) * strides[3] + at
    if GUARD:
        return tl.load(base + at, mask=T.start + T.cols < S.n_keys, other=0)
    else:
        return tl.load(base + at)


@triton.jit
def scores_of(a, b, T, A, place, S, K: tl.constexpr, EDGE: tl.constexpr, GUARD: tl.constexpr):
    """(scores, capped scores) of the rows of a and b, which are queries and keys, or keys and queries.

    With K.folds, scores are not scaled yet. Capped scores are used with K.softcap alone. EDGE: whether something may be
    hidden. GUARD: whether keys may end within the tile.
    """
    rows, cols = T.first + T.rows, T.start + T.cols
    # Loaded before the product: reductions get the layout of what comes last, and are slow in that of these loads.
    if K.bias:
        bias = load_added(A.bias_ptr, A.bias_strides, place, T, S, K.bias_rows, GUARD)
    if K.mask:
        mask = load_added(A.mask_ptr, A.mask_strides, place, T, S, K.mask_rows, GUARD)
    qk = tl.dot(a, tl.trans(b), input_precision="ieee")
    c = qk
    if K.softcap:
        c = qk * A.scale
        if K.exact:
            c = capped(c, A.cap)
        else:
            c = A.cap - 2.0 * A.cap / (tl.exp2(c * (2.0 * LOG2E / A.cap)) + 1.0)
        z = c
    elif K.folds:
        z = qk
    elif K.in_log2:
        z = qk * (A.scale * LOG2E)
    else:
        z = qk * A.scale
    if K.bias:
        z += bias.to(tl.float32)
    if K.mask == _ADDED:
        z += mask.to(tl.float32)
    if K.alibi:
        slope = tl.load(head_at(A.slopes_ptr, A.slopes_strides, place, place.head)).to(tl.float32)
        if K.in_log2:
            slope *= LOG2E
        z -= slope * tl.abs(rows + S.offset - cols).to(tl.float32)
    if K.mask == _BOOL:
        z = tl.where(mask != 0, z, NEG_INF)
    if K.bias or K.held or K.mask == _ADDED:  # queries beyond the last have its mask and bias, so they get its position
        rows = tl.minimum(rows, S.n_queries - 1)
    if EDGE and K.left:
        z = tl.where(cols >= rows + (S.offset - S.left), z, NEG_INF)
    if EDGE and K.right:
        z = tl.where(cols <= rows + (S.offset + S.right), z, NEG_INF)
    if GUARD:
        z = tl.where(cols < S.n_keys, z, NEG_INF)
    return z, c


@triton.jit
def unit_of(A, K: tl.constexpr):
    """The factor that turns scores, as `scores_of` gives them, into units of log 2."""
    unit = tl.full([], 1.0 if K.in_log2 else LOG2E, tl.float32)
    return unit * A.scale if K.folds else unit


@triton.jit
def huge_unit(unit):
    """The least power of two that is at least unit."""
    return ((unit.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def unit_at(top, unit):
    """The factor that turns the scores of a row, whose maximum is `top`, into units of log 2.

    If the maximum is huge, it is a power of two near that factor.
    """
    return tl.where(tl.abs(top) > (1.0 / unit) * HUGE, huge_unit(unit), unit)


@triton.jit
def sink_as_origin(sink, unit):
    """A sink in units of log 2, scaled as `unit_at` scales a row's maximum."""
    return tl.where(tl.abs(sink) > HUGE, sink * (huge_unit(unit) / unit), sink)


@triton.jit
def origin_in_log2(m, unit):
    """A row's maximum that `unit_at` has scaled, in units of log 2, rounded."""
    return tl.where(tl.abs(m) > HUGE, m * (unit / huge_unit(unit)), m)


@triton.jit
def record_at(record_ptr, number, n_queries):
    """Where `_delta` has recorded a head that is numbered over batches and heads."""
    return record_ptr + number.to(tl.int64) * (3 * n_queries)


@triton.jit
def state_of(record, first, n_queries, BLOCK_M: tl.constexpr, EXACT: tl.constexpr = True):
    """(m, log2 of the sum, delta) of queries from `first` on, with p = exp2((z - m) unit - log2 of the sum).

    The log is inf for a query that sees nothing, so that p is 0. Unless EXACT, m is not read, and is 0.
    """
    rows = first + tl.arange(0, BLOCK_M)
    inside = rows < n_queries
    delta = tl.load(record + rows, mask=inside, other=0.0)
    m = tl.zeros([BLOCK_M], tl.float32)
    if EXACT:
        m = tl.load(record + n_queries + rows, mask=inside, other=0.0)
    return m, tl.load(record + 2 * n_queries + rows, mask=inside, other=float("inf")), delta


@triton.jit
def less_maximum(z, m, RECORDED: tl.constexpr = True):
    """Scores less the maxima of their rows, if these are RECORDED. m is 0 for rows that need none.

    A product by other tiles may differ in its last bits, and one of these bits may be worth more than a weight. So
    scores that are so close to the maximum count as the maximum.
    """
    if RECORDED:
        x = z - m
        return tl.where(x > tl.where(m == 0.0, float("inf"), tl.abs(m) * -(2.0**-22)), 0.0, x)
    else:
        return z


@triton.jit
def keys_seen(first, S, K: tl.constexpr):
    """(begin, cut, end): keys that some of block_m queries from `first` on see, in whole tiles of keys.

    All of these queries see all keys before `cut`, unless the window has a bound on the left.
    """
    last = tl.minimum(first + K.block_m, S.n_queries) - 1
    begin, end, cut = 0, S.n_keys, S.n_keys
    if K.left:
        begin = tl.maximum(first + S.offset - S.left, 0) // K.block_n * K.block_n
    if K.right:
        end = tl.maximum(tl.minimum(last + S.offset + S.right + 1, S.n_keys), 0)
        cut = tl.maximum(tl.minimum(first + S.offset + S.right + 1, S.n_keys), 0)
    return begin, cut // K.block_n * K.block_n, end


@triton.jit
def queries_that_see(first, S, K: tl.constexpr):
    """(begin, end): queries that see some of block_n keys from `first` on, in whole tiles of queries."""
    last = tl.minimum(first + K.block_n, S.n_keys) - 1
    begin, end = 0, S.n_queries
    if K.right:
        begin = tl.maximum(first - S.offset - S.right, 0) // K.block_m * K.block_m
    if K.left:
        end = tl.maximum(tl.minimum(last - S.offset + S.left + 1, S.n_queries), 0)
    return begin, end
