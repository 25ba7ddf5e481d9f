"""What attention's kernels for sm_90 are compiled for, and the bundles of values that they pass down."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

ROWS = 64  # rows of a consumer's tile: those of a warpgroup
ROW_VECTOR = 4  # floats in 16 bytes: TMA wants rows that are multiples of it


@dataclass(frozen=True, kw_only=True)
class HopperSpec:
    """`consumers` warpgroups of ROWS rows each go over tiles of `block` rows, of which `stages` are in shared memory.

    block_d, block_v: powers of two that hold a head's dims and a value's. registers: of a consumer's thread. left,
    right: whether the window has a bound there. ragged: whether the last of those tiles has fewer rows. reuses: whether
    results leave by the shared memory of their inputs.
    of_keys: whether a consumer's rows are keys, and it goes over queries. bias: whether there is one. bias_batches,
    bias_heads: 1 if it differs between these, 0 if it is broadcast. stores_ds: whether the kernel of dK and dV also
    stores dS, from which the bias's gradient is summed. recorded: whether its weights take the maxima that `_delta`
    records.
    softcap: whether scores are capped. alibi: whether there are slopes, but neither a bias nor a softcap.
    slope_batches: 1 if batches have slopes of their own.
    """

    consumers: int
    block: int
    stages: int
    registers: int
    block_d: int
    block_v: int
    left: bool = False
    right: bool = False
    ragged: bool = True
    sinks: bool = False
    reuses: bool = False
    of_keys: bool = False
    bias: bool = False
    bias_batches: int = 0
    bias_heads: int = 0
    stores_ds: bool = False
    recorded: bool = False
    softcap: bool = False
    alibi: bool = False
    slope_batches: int = 0

    @property
    def block_m(self):
        return self.consumers * ROWS

    @property
    def edge(self):
        return self.left or self.right or self.ragged


@dataclass(frozen=True, kw_only=True)
class WindowSpec:
    """Two consumers, warpgroups of ROWS queries each, see `pieces` tiles of ROWS keys each.

    width: keys of a window, of which `after` come after the query. Its left bound cuts the first cut_left tiles, and
    its right bound the last one. stages: tiles of queries of each consumer in shared memory. key_stages: for how many
    turns shared memory holds keys. registers, block_d, block_v: as HopperSpec has them.
    """

    consumers: ClassVar[int] = 2
    width: int
    after: int
    pieces: int
    cut_left: int
    stages: int
    key_stages: int
    registers: int
    block_d: int
    block_v: int
    sinks: bool = False

    @property
    def block_m(self):
        return self.consumers * ROWS

    @property
    def all_pieces(self):
        """Tiles of keys that some consumer sees."""
        return self.pieces + self.consumers - 1


class WindowSizes(NamedTuple):
    """span: heads that a program goes through. head_tiles: tiles of queries of a head; n_tiles: of all spans."""

    n_heads: Any
    group: Any
    n_queries: Any
    n_keys: Any
    offset: Any
    head_tiles: Any
    n_tiles: Any
    span: Any


class WindowWork(NamedTuple):
    """A consumer's work: the first head's number among all, that head, the first query, and the first key."""

    number: Any
    head: Any
    first: Any
    start: Any


class Sizes(NamedTuple):
    """Sizes that all kernels take.

    head_tiles: tiles of a head, which programs take one after another. n_tiles: of all heads. shift: how many places a
    program moves on from one turn to the next. first_head, heads: in the kernel of dK and dV, the heads of keys that
    the tiles belong to.
    """

    n_heads: Any
    group: Any
    n_queries: Any
    n_keys: Any
    left: Any
    right: Any
    offset: Any
    head_tiles: Any
    n_tiles: Any
    shift: Any
    first_head: Any = 0
    heads: Any = 0


class Ring(NamedTuple):
    """Tiles in shared memory. Each has a barrier that says it is full, and one that says it is empty."""

    tiles: Any
    full: Any
    empty: Any


class Kept(NamedTuple):
    """Where dS goes, by way of a tile in shared memory for each consumer; and what `_delta` has recorded.

    record: of all heads, or of a head of queries. batch, head, first: the batch of a tile, its head among those that
    are kept, and its first key. slope: of the head, for ALiBi.
    """

    ds_map: Any
    tiles: Any
    record: Any
    batch: Any = 0
    head: Any = 0
    first: Any = 0
    slope: Any = 0


class Work(NamedTuple):
    """A tile of a head: the head's number among all, batch and head, and the first row."""

    number: Any
    batch: Any
    head: Any
    first: Any
