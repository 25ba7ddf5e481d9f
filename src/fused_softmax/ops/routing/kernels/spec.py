"""The description that the kernels of routing are compiled for, and the bundles of values that their helpers share."""

from dataclasses import dataclass
from typing import Any, NamedTuple

LANES = 32  # experts side by side, one for each thread of a warp: one instruction of a warp reduces them
LIST = 8  # tiles from which a lane makes one sorted list
# Lists of a lane, times choices, from which merged lists pay: 1024 experts, k 16, 19.7 -> 17.6 us, k 12 15.5 -> 16.8.
MERGED_FROM = 64
BESIDE = 3  # slots of a sequence after those of its experts


@dataclass(frozen=True, kw_only=True)
class RouteSpec:
    """How a program routes its rows.

    rows: of a turn, each in one warp. A row lies in tiles [1, rows, LANES] of neighbouring experts; each group of
        experts begins with a tile of its own. Up to LIST tiles are a chunk, from which each lane makes a list.
    stacks: whether chunks of equally many tiles are stacked, [stacked, 1, LANES], so that the compiler has less to do.
        It needs turns of one row.
    packed: whether a key and its expert share 32 bits, so that one maximum finds both.
    of_scores: whether the choice compares scores, and not logits.
    elsewhere: whether the first choice may be another expert than that of the greatest logit.
    totals: whether the sum of exp(x - m) over all experts is needed.
    sums: whether rows are added up. held: whether registers hold the sums while rows are routed; else rows are added
        afterwards, in tiles of sum_rows x sum_cols, and sum_ids choices at a time.
    aligned: whether 8 divides the stride of rows, so that `add_rows` reads vectors.
    sequences: whether rows are taken and added up by sequences, each of which has a loss. copies: of the slots of each.
    full: in the gradient, whether experts that were not chosen have one. priced: whether it depends on the counts.
    """

    n_experts: int
    k: int
    rows: int
    score: str
    score_first: bool
    renormalize: bool
    stacks: bool = False
    n_groups: int = 1
    groups_kept: int = 1
    top2: bool = True
    packed: bool = False
    of_scores: bool = False
    elsewhere: bool = False
    totals: bool = False
    sums: bool = False
    held: bool = False
    sequences: bool = False
    copies: int = 1
    sum_rows: int = 1
    sum_cols: int = 32
    sum_ids: int = 32
    aligned: bool = False
    full: bool = False
    priced: bool = False

    @property
    def grouped(self) -> bool:
        return self.n_groups > 1

    @property
    def by_softmax(self) -> bool:
        return self.score == "softmax"

    @property
    def half(self) -> float:
        """The power: where x is far below 0, a score is nearly exp(x) ** half."""
        return 0.5 if self.score == "sqrtsoftplus" else 1.0

    @property
    def alone(self) -> bool:
        """Whether weights depend on the chosen experts' logits alone."""
        return self.by_softmax and (self.renormalize or not self.score_first)

    @property
    def group_size(self) -> int:
        return self.n_experts // self.n_groups

    @property
    def group_tiles(self) -> int:
        return -(-self.group_size // LANES)

    @property
    def n_tiles(self) -> int:
        """Tiles of LANES experts that a row has."""
        return self.n_groups * self.group_tiles

    @property
    def chunks(self) -> tuple[int, ...]:
        """Three numbers a chunk: its first tile, how many are stacked in it, and how many tiles each of these has."""
        return _chunks(self.n_tiles, self.stacks and not self.grouped)

    @property
    def n_chunks(self) -> int:
        return len(self.chunks) // 3

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each chunk's tiles begin in the tuple of all tiles. Tiles that are stacked are one element of it."""
        return tuple(sum(self.chunks[2 : 3 * c : 3]) for c in range(self.n_chunks))

    @property
    def merges(self) -> bool:
        """Whether a lane's lists, more than two of them, are merged into one, so that a choice moves one list up."""
        n_lists = sum(self.chunks[1::3])
        pays = n_lists > 2 and self.k >= LIST and n_lists * self.k >= MERGED_FROM
        return self.stacks and not self.grouped and pays

    @property
    def n_lists(self) -> int:
        return 1 if self.merges else self.n_chunks

    @property
    def lists(self) -> tuple[int, ...]:
        """Two numbers for each chunk: where its lists begin in the tuple of all, and how long they are.

        Longer than k they need not be: no more is taken from one. If lists are merged: of the one list.
        """
        if self.merges:
            return 0, LIST
        found, at = [], 0
        for length in self.chunks[2::3]:
            found += [at, min(length, self.k)]
            at += min(length, self.k)
        return tuple(found)

    @property
    def pairs(self) -> tuple[int, ...]:
        return _pairs(LIST)

    @property
    def halves(self) -> int:
        """How many tiles [rows, LANES] the chosen experts take."""
        return -(-self.k // LANES)

    @property
    def states(self) -> int:
        """Numbers of a row that are stored: m, the sum of exp(x - m), and the sum of scores that are not softmax's."""
        return 2 if self.by_softmax else 3


def _chunks(n_tiles: int, stacks: bool) -> tuple[int, ...]:
    found: list[int] = []
    at = 0
    while at < n_tiles:
        left, stacked = n_tiles - at, 1
        while stacks and 2 * stacked * LIST <= left:
            stacked *= 2
        length = min(LIST, left)
        found += [at, stacked, length]
        at += stacked * length
    return tuple(found)


def _pairs(n: int) -> tuple[int, ...]:
    """The pairs of places that a sorting network compares, for n values.

    Without the pairs that have a place from m on, it sorts the first m values. Batcher, "Sorting networks and their
    applications", 1968.
    """
    found: list[int] = []
    p = 1
    while p < n:
        k = p
        while k:
            for j in range(k % p, n - k, 2 * k):
                for i in range(j, min(j + k, n - k)):
                    if i // (2 * p) == (i + k) // (2 * p):
                        found += [i, i + k]
            k //= 2
        p *= 2
    return tuple(found)


class Given(NamedTuple):
    """A turn's rows: their numbers [rows], int64, and where they are read from. on: which of them exist."""

    x_ptr: Any
    noise_ptr: Any
    x_row_stride: Any
    noise_row_stride: Any
    row: Any
    on: Any


class Sums(NamedTuple):
    """Where programs add up their rows, and what the last of them writes.

    slots_ptr, all_ptr: int64, 2 * n_experts + BESIDE for each sequence, and for all rows together: probabilities in
        units of 1 / unit, counts, and the slots after those. Without sequences slots_ptr has those of all rows, in
        copies; the slots after those of experts are used in the first copy alone.
    squares: float32, of each program. balances: float64, the loss of each sequence.
    shares: float32, what a gradient needs: 1 / rows, 1 / sequences, and for each sequence n_experts / (rows ** 2 * k).
    of_sequences: int32 [n_sequences, n_experts], the counts of each.
    """

    slots_ptr: Any
    all_ptr: Any
    squares_ptr: Any
    balances_ptr: Any
    shares_ptr: Any
    of_sequences_ptr: Any
    counts_ptr: Any
    prob_sums_ptr: Any
    aux_loss_ptr: Any
    z_loss_ptr: Any
    unit: Any


class Priced(NamedTuple):
    """What the price of an expert in a sequence is made of. aux: what each row that chose the expert adds to it."""

    dprob_sums_ptr: Any
    counts_ptr: Any
    aux: Any


class Slopes(NamedTuple):
    """Of rows: m; share, 1 / s; of_scores, 1 / the sum of scores; of_p, a factor of p; mean, the mean price.

    If scores are p, `mean` has been subtracted from of_p.
    """

    m: Any
    share: Any
    of_scores: Any
    of_p: Any
    mean: Any
