"""The description that the kernels of routing are compiled for, and the bundles of values that their helpers share."""

from dataclasses import dataclass
from typing import Any, NamedTuple

LANES = 32  # experts side by side, one for each thread of a warp: a row is reduced by one instruction of a warp
LIST = 8  # tiles whose experts of one lane are a sorted list
BESIDE = 3  # slots of a sequence beside those of its experts


@dataclass(frozen=True, kw_only=True)
class RouteSpec:
    """How a program routes its rows.

    rows: of a turn, each in one warp. A row lies in tiles [1, rows, LANES] of neighbouring experts; each group of
        experts begins with a tile of its own. Up to LIST tiles are the lists of a chunk. Of a single row, chunks of as
        many tiles are stacked, [stacked, 1, LANES], for the compiler has less to do then.
    packed: whether a key and its expert share 32 bits, so that one maximum finds both.
    of_scores: whether the choice compares scores, and not logits.
    elsewhere: whether the greatest logit may not be chosen first.
    totals: whether the sum of exp(x - m) of all experts is needed.
    sums: whether rows are added up. held: in registers, while they are routed; else afterwards, in tiles of sum_rows x
        sum_cols, and sum_ids choices at a time.
    aligned: whether 8 divides the stride of rows, and vectors of them are read.
    sequences: whether they are added up in sequences, each of which has a loss.
    full: of a gradient, whether experts that were not chosen have one. priced: whether counts have a part in it.
    """

    n_experts: int
    k: int
    rows: int
    score: str
    score_first: bool
    renormalize: bool
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
    def compares_all(self) -> bool:
        """Whether m is looked for apart from the choice."""
        return self.elsewhere or self.totals

    @property
    def by_softmax(self) -> bool:
        return self.score == "softmax"

    @property
    def half(self) -> float:
        """The power of exp(x) that a score nearly is where x is far below 0."""
        return 0.5 if self.score == "sqrtsoftplus" else 1.0

    @property
    def alone(self) -> bool:
        """Whether weights are of the chosen experts alone, whatever the others' scores are."""
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
        """Of each chunk the first tile, how many are stacked, and its tiles of each."""
        return _chunks(self.n_tiles, self.rows == 1 and not self.grouped)

    @property
    def n_chunks(self) -> int:
        return len(self.chunks) // 3

    @property
    def starts(self) -> tuple[int, ...]:
        """Of each chunk where its tiles begin among all, in which those that are stacked are one."""
        return tuple(sum(self.chunks[2 : 3 * c : 3]) for c in range(self.n_chunks))

    @property
    def lists(self) -> tuple[int, ...]:
        """Of each chunk where its lists begin among all, and how long they are: nothing takes more than k of one."""
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
        """Tiles [rows, LANES] of chosen experts."""
        return -(-self.k // LANES)

    @property
    def states(self) -> int:
        """Numbers of a row that are kept: m, the sum of exp(x - m), and that of its scores if these are others."""
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
    """The places that a network compares to sort n values (Batcher, "Sorting networks and their applications", 1968).

    Less the pairs with a place from any other power of two on, it sorts as many.
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
    """A turn's rows, of which `on` are there: their numbers [rows], int64, and what they are read from."""

    x_ptr: Any
    noise_ptr: Any
    x_row_stride: Any
    noise_row_stride: Any
    row: Any
    on: Any


class Sums(NamedTuple):
    """Where programs add up their rows, and what the last of them writes.

    slots, all_slots: int64, of each sequence and of all, 2 * n_experts + BESIDE: probabilities in units of 1 / unit,
        counts, and what stands beside them. Without sequences there are no other slots than those of all.
    squares: float32, of each program. balances: float64, of each sequence its loss.
    shares: float32, of what a gradient needs: 1 / rows, 1 / sequences, and of each sequence
        n_experts / (rows ** 2 * k).
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
    """What the price of an expert in a sequence follows from: aux is what a row that chose it counts."""

    dprob_sums_ptr: Any
    counts_ptr: Any
    aux: Any


class Slopes(NamedTuple):
    """Of rows: m, 1 / s, 1 / the sum of scores, what p is multiplied by, and the mean price."""

    m: Any
    share: Any
    of_scores: Any
    of_p: Any
    mean: Any
