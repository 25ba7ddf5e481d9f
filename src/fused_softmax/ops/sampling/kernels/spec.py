"""What the kernels that draw tokens are compiled for, and the bundles of values that their helpers share."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple


@dataclass(frozen=True, kw_only=True)
class SampleSpec:
    """Of draws from rows of logits, and where the parts of a draw's scratch begin, in int64.

    stretches: of 1024 columns, that a program reads at a time. whole_groups: whether no row ends within 8 columns.
    biased, bitmasked: whether a bias is added, and whether a bitmask says which columns there are.
    part_stretches: whose lanes a program looks through where a row's maximum says what is kept.
    split: whether a row's programs tell each other their best. greedy: whether the temperature is 0 for all rows.
    all_stretches: at least as many as a row has. ranked: whether top-k or top-p may ask which logits are the greatest.
        capacity: lanes of a row that are held at a time, and candidates, at most, that are ranked of their logits.
    joint: whether each filter judges all columns.
    first: whether rows are drawn from before they are judged; by_row: whether others are not, as top-k has it of each.
        counted: whether top-k judges them. given: whether the token is there, and what
        is kept is asked for.
    wide: whether launches follow for rows whose boundary is lower, after a second look at twice as many lanes.
        sampled, turns: groups that they are told of it by, and how many times so many; listed: logits that it is sought
        among.
    of_probs: whether the logits are the logarithms of what is read. masks: whether what is kept is written, also of
        rows that cannot be drawn from; `valid` then says which are not NaN.
    grain_bits: of the order of a logit, those that follow from the others: 16-bit logits have fewer than fp32.
    follows: whether the launch may begin before the one before it has ended, and waits for what that wrote; leads:
        whether the one after it may begin so.
    """

    stretches: int
    whole_groups: bool
    biased: bool = False
    bitmasked: bool = False
    part_stretches: int = 1
    split: bool = False
    greedy: bool = False
    all_stretches: int = 1
    capacity: int = 64
    candidates: int = 128
    ranked: bool = True
    joint: bool = False
    first: bool = False
    by_row: bool = False
    counted: bool = False
    given: bool = False
    wide: bool = False
    sampled: int = 512
    listed: int = 0
    grain_bits: int = 0
    of_probs: bool = False
    masks: bool = False
    ptx: bool = False
    follows: bool = False
    leads: bool = False

    @property
    def opens(self) -> bool:
        """Whether rows may be left to the launches after the one that judges filters."""
        return self.wide or self.by_row

    @property
    def more(self) -> "SampleSpec":
        """Of the second look."""
        return replace(self, capacity=2 * self.capacity)

    @property
    def turns(self) -> int:
        """A sample misses by columns as n_cols / sqrt(turns); there is room for what one turn misses of 131072."""
        return min(max(1, self.all_stretches // 128) ** 2, 16)

    @property
    def grain(self) -> int:
        return 1 << self.grain_bits

    @property
    def sums_at(self) -> int:
        """int64: the sum of each stretch. Before them, what is open of a row: see `row` and `first`."""
        return 24

    @property
    def ranked_at(self) -> int:
        """int64: the candidates."""
        return self.sums_at + self.room

    @property
    def maxima_at(self) -> int:
        """fp32: the maximum of each stretch."""
        return self.ranked_at + (self.candidates if self.ranked else 0)

    @property
    def tops_at(self) -> int:
        """fp32: the maximum of each lane."""
        return self.maxima_at + self.room // 2

    @property
    def scores_at(self) -> int:
        """fp32: the score by which each lane races."""
        return self.tops_at + 16 * self.room

    @property
    def bests_at(self) -> int:
        """fp32: the greatest of them of each stretch."""
        return self.scores_at + (16 * self.room if self.first else 0)

    @property
    def lanes_at(self) -> int:
        """int32: the lanes that are read where a row's maximum says what is kept."""
        return self.bests_at + (self.room // 2 if self.first else 0)

    @property
    def list_at(self) -> int:
        """int64: the logits among which a low boundary is sought, by their codes."""
        return self.lanes_at + (0 if self.ranked or self.first else 16 * self.room)

    @property
    def bins_at(self) -> int:
        """int32: how many sampled logits are in each of 1024 ranges."""
        return self.list_at + self.listed

    @property
    def scratch(self) -> int:
        return self.list_at + (self.listed + 512 if self.listed else 0)

    @property
    def room(self) -> int:
        return max(4, self.all_stretches)  # so that all begin on 16 bytes


@dataclass(frozen=True, kw_only=True)
class VerifySpec:
    """Of drafts that are verified: `rows` of the target for each sequence, and their judged rows and those of drafts.

    most: a power of two, at least `rows`. stretches: of 1024 columns, that a program reads at a time. block: whether
    all drafts are judged together. follows, leads: as SampleSpec's.
    """

    target: SampleSpec
    draft: SampleSpec
    rows: int
    stretches: int
    block: bool = False
    ptx: bool = False
    follows: bool = False
    leads: bool = False

    @property
    def most(self) -> int:
        return 1 << (self.rows - 1).bit_length()

    @property
    def scales(self) -> int:
        """fp32 of a sequence."""
        return 2 + self.most


@dataclass(frozen=True, kw_only=True)
class TraceSpec:
    """Of drafts whose distribution is not told: `rows` of the target for each sequence.

    most: a power of two, at least `rows`.
    """

    rows: int

    @property
    def most(self) -> int:
        return max(2, 1 << (self.rows - 1).bit_length())


@dataclass(frozen=True, kw_only=True)
class PenaltySpec:
    """Of penalties: a program writes `block` columns of a row at a time, or reads `tile` of its ids at a time.

    whole_groups: whether no row ends within 8 columns. biased, bitmasked: whether a bias is added first, and whether a
    bitmask says which columns there are. packed: whether a result has 16 bits, and two counts stand in 32. in_place:
    whether the results lie where the logits do. streams: whether blocks are written, and not the columns among the
    ids; by_block: whether those too, as there are so many ids that all columns of a block are counted. counted: ids
    that are counted at a time, so that a count of 16 bits carries to no neighbour. leads, follows: of two launches,
    whether the second begins early.
    """

    block: int
    tile: int
    whole_groups: bool
    biased: bool = False
    bitmasked: bool = False
    packed: bool = False
    in_place: bool = False
    streams: bool = False
    by_block: bool = False
    counted: int = 32768
    leads: bool = False
    follows: bool = False
    ptx: bool = False


class Draw(NamedTuple):
    """A row that is drawn from: where it is, what is added, and by which noise. valid: whether it can be, so far.

    turn: of the noise: every turn has streams of its own.

    bias_ptr, bitmask_ptr: the draw's own, where there are any (K.biased, K.bitmasked).
    """

    ptr: Any
    bias_ptr: Any
    bitmask_ptr: Any
    n_cols: Any
    temperature: Any
    factor: Any
    seed: Any
    position: Any
    valid: Any
    turn: Any


class Bounds(NamedTuple):
    """Of what is kept: the last logit and its column, and the least number above it. Of equal logits the first stay."""

    x: Any
    above: Any
    col: Any


class Filters(NamedTuple):
    """k, 0 for all; p; the order of the least logit that min-p keeps; and the row's maximum and sum, in units."""

    k: Any
    p: Any
    least: Any
    m: Any
    total: Any


class Held(NamedTuple):
    """Logits [lanes, 8] of the four quarters of lanes, by the numbers of their calls."""

    x_0: Any
    x_1: Any
    x_2: Any
    x_3: Any
    call: Any
