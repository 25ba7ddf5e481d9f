"""The description that attention's kernels are compiled for, and the bundles of values that they pass down."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton.language as tl

NO_MASK, BOOL_MASK, ADDED_MASK = 0, 1, 2
GRANULE = 64  # queries that a program of `_delta` has


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Tiles of block_m queries and block_n keys, of heads of head_dim, with values of value_dim.

    block_d, block_v: powers of two that hold these dims. left, right: whether the window has a bound there. ragged:
    whether the last tile of keys is not full. mask: NO_MASK, BOOL_MASK or ADDED_MASK. mask_rows, bias_rows: whether it
    differs between queries. skips: whether tiles that the mask hides as a whole are found first, so that nothing of
    them is read. mask_vector: keys of a mask that are then read as one number, 1 or 8.
    folds: whether scores are query times key times a positive scale, so that the scale is applied in the exponent.
    dtype: of the inputs. vector: elements that strides of query, key, value and dO are multiples of.
    entropy, row_max: what the forward kernel stores besides lse. recorded: whether the weights of the kernel of dK and
    dV take the maxima that `_delta` records. stores_ds: whether the kernel of dQ stores dS. pieces: tiles of stored dS
    that a program has side by side.
    held: whether the bias is the same for all batches, and kept; `bias` is then False.
    If keys are cut into parts: lanes and block_r are powers of two that hold the parts, and the rows that share a head
    of keys; chunk: parts whose o are merged at a time.
    """

    block_m: int
    block_n: int
    head_dim: int
    value_dim: int
    block_d: int
    block_v: int
    dtype: Any
    vector: int = 1
    left: bool = False
    right: bool = False
    ragged: bool = True
    mask: int = NO_MASK
    mask_rows: bool = True
    skips: bool = False
    mask_vector: int = 1
    bias: bool = False
    bias_rows: bool = True
    alibi: bool = False
    softcap: bool = False
    sinks: bool = False
    folds: bool = False
    entropy: bool = False
    row_max: bool = False
    recorded: bool = False
    stores_ds: bool = False
    sums_rows: bool = False
    sums_cols: bool = False
    held: bool = False
    lanes: int = 1
    block_r: int = 0
    chunk: int = 0
    pieces: int = 1

    @property
    def edge(self):
        """Whether a tile may have keys that are hidden or beyond the last."""
        return self.left or self.right or self.ragged

    @property
    def cuts(self):
        """Whether tiles that are seen whole have a loop of their own, which hides nothing."""
        return self.folds and self.mask == NO_MASK and not self.left and not self.entropy

    @property
    def exact(self):
        """Whether tanh and division are as exact as fp32 holds them."""
        return self.dtype == tl.float32

    @property
    def in_log2(self):
        """Whether scores are in units of log 2 from the start: with slopes alone, as in the kernels for sm_90."""
        return self.alibi and not (self.bias or self.softcap or self.mask)

    @property
    def most_lse(self):
        """The largest lse from which weights are computed, in units of log 2: larger ones have lost too many digits."""
        return 2.0**10 if self.exact else 2.0**12


class Place(NamedTuple):
    """A batch, numbered over two dims in int64, and a head of query in int32."""

    outer: Any
    inner: Any
    head: Any


class Head(NamedTuple):
    """Of query, key, value or dO: where it begins, and the stride from one row to the next."""

    ptr: Any
    stride: Any


class Read(NamedTuple):
    """What the gradient of a bias is made of: heads that begin at the first batch's, with strides of all dims."""

    q: Any
    k: Any
    v: Any
    do: Any
    record_ptr: Any


class Sizes(NamedTuple):
    n_queries: Any
    n_keys: Any
    left: Any
    right: Any
    offset: Any


class Tile(NamedTuple):
    """A tile of scores. first, start: its first query and key.

    rows, cols: queries and keys counted from these, which broadcast against each other.
    """

    first: Any
    rows: Any
    start: Any
    cols: Any


class Added(NamedTuple):
    """What scores are made of besides query and key. Strides are of (outer, inner, head, query, key)."""

    mask_ptr: Any
    mask_strides: Any
    bias_ptr: Any
    bias_strides: Any
    slopes_ptr: Any
    slopes_strides: Any
    scale: Any
    cap: Any
