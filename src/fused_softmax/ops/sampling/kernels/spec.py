"""What the kernels that draw tokens are compiled for, and the bundles of values that their helpers share."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple


@dataclass(frozen=True, kw_only=True)
class SampleSpec:
    """For draws from rows of logits. Properties say where the parts of a draw's scratch begin, in int64.

    stretches: of 1024 columns, which a program reads at a time. whole_groups: whether rows are whole groups of 8
    columns. biased, bitmasked: whether a bias is added, and whether a bitmask says which columns are possible.
    bias_draws, bitmask_draws: how many draws, one after another, share a row of each.
    part_stretches: stretches whose lanes a program looks through, if a row's maximum says what is kept.
    split: whether the programs of a row tell each other their best groups. greedy: whether the temperature is 0 for all
    rows.
    all_stretches: a power of two, at least the stretches of a row. room: the stretches for which there is scratch, a
    multiple of 4, so that all parts of it begin on 16 bytes. ranked: whether top-k or top-p may need to know the
    greatest logits. capacity: lanes of a row that are held at a time. candidates: how many of their logits are ranked
    at most.
    joint: whether each filter judges all columns.
    first: whether rows are drawn from before they are judged. by_row: whether each row's own top-k and top-p say if it
    is. counted: whether top-k judges such draws. given: whether the token is known, and the call asks for what is kept.
    wide: whether launches follow for rows whose boundary is lower than twice as many lanes can tell. sampled:
    how many groups a sample of such a row takes. listed: among how many logits the boundary is sought.
    of_probs: whether probabilities are read, and their logarithms are the logits. linear: whether probabilities are
    read and judged as they are, and stand wherever logits do: logarithms in fp32 would make ties of close ones.
    sums: whether the launch that finds a low boundary also adds up what is kept; not where min-p may keep less.
    masks: whether what is kept is written, also for rows that cannot be drawn from; `valid` then says which rows are
    not NaN. judges: whether rows are judged and not drawn from.
    grain_bits: the low bits of a logit's order, if they follow from the others: 16-bit logits have fewer orders than
    fp32.
    follows: whether the launch may begin before the one before it has ended, and then waits for it. leads: whether the
    next launch may begin so.
    """

    stretches: int
    whole_groups: bool
    biased: bool = False
    bitmasked: bool = False
    bias_draws: int = 1
    bitmask_draws: int = 1
    part_stretches: int = 1
    split: bool = False
    greedy: bool = False
    all_stretches: int = 1
    room: int = 4
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
    linear: bool = False
    sums: bool = False
    masks: bool = False
    judges: bool = False
    ptx: bool = False
    follows: bool = False
    leads: bool = False

    @property
    def opens(self) -> bool:
        """Whether rows may be left to the launches after the one that judges filters."""
        return self.wide or self.by_row

    @property
    def more(self) -> "SampleSpec":
        """The spec of the second look, at twice as many lanes."""
        return replace(self, capacity=2 * self.capacity)

    @property
    def grain(self) -> int:
        return 1 << self.grain_bits

    @property
    def lowest(self) -> int:
        """The order from which on filters look: -inf's, or that of the least probability above 0."""
        return self.grain if self.linear else -2139095041

    @property
    def sums_at(self) -> int:
        """int64: the sum of each stretch. The row's record is before them: see `row` and `first`."""
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
        """fp32: the greatest score of each stretch."""
        return self.scores_at + (16 * self.room if self.first else 0)

    @property
    def lanes_at(self) -> int:
        """int32: the lanes to be read, if a row's maximum says what is kept."""
        return self.bests_at + (self.room // 2 if self.first else 0)

    @property
    def list_at(self) -> int:
        """int64: the codes of the logits among which a low boundary is sought.

        They take the place of the lanes' maxima, if no launch reads these after the one that judges.
        """
        if self.sums or self.masks:
            return self.tops_at
        return self.lanes_at + (0 if self.ranked or self.first or self.judges else 16 * self.room)

    @property
    def bins_at(self) -> int:
        """int32: how many sampled logits are in each of 1024 ranges."""
        return max(self.list_at + self.listed, self.lanes_at)

    @property
    def scratch(self) -> int:
        return self.bins_at + (512 if self.listed else 0)


@dataclass(frozen=True, kw_only=True)
class VerifySpec:
    """For drafts that are verified. target, draft: the specs of the judged rows of both.

    rows: of the target, for each sequence. most: a power of two, at least `rows`. stretches: of 1024 columns, which a
    program reads at a time. block: whether all drafts are judged together. follows, leads: as SampleSpec's.
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
        """fp32 numbers of a sequence."""
        return 2 + self.most


@dataclass(frozen=True, kw_only=True)
class TraceSpec:
    """For drafts whose distribution is not given. rows: of the target, for each sequence.

    most: a power of two, at least `rows`.
    """

    rows: int

    @property
    def most(self) -> int:
        return max(2, 1 << (self.rows - 1).bit_length())


@dataclass(frozen=True, kw_only=True)
class PenaltySpec:
    """For penalties: a program writes `block` columns of a row at a time, or reads `tile` of its ids at a time.

    whole_groups: whether rows are whole groups of 8 columns. biased, bitmasked: whether a bias is added first, and
    whether a bitmask says which columns are possible. packed: whether a result has 16 bits, so that two counters share
    32. in_place: whether the results lie where the logits do.
    streams: whether the launch writes whole blocks, and not only the columns among the ids. by_block: whether it
    penalizes these blocks too, because ids are so many that all columns of a block are counted. counted: how many ids
    are counted at a time: so few that a 16-bit counter does not carry into its neighbour.
    leads, follows: of two launches, whether the second begins early.
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
    """A row that is drawn from: where it is, what is added to its logits, and its noise.

    valid: whether it can be drawn from, as far as is known. turn: of the noise; every turn has streams of its own.
    bias_ptr, bitmask_ptr: the draw's own, if there are any (K.biased, K.bitmasked).
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
    """The bounds of what is kept: all logits of at least `above`, and logits of at least x up to column `col`.

    x: the last logit that is kept. above: the least number above x.
    """

    x: Any
    above: Any
    col: Any


class Filters(NamedTuple):
    """The filters of a row. k: of top-k, 0 if it keeps all. p: of top-p.

    least: the order of the least logit that min-p keeps. m, total: the row's maximum and its sum, in units.
    """

    k: Any
    p: Any
    least: Any
    m: Any
    total: Any


class Held(NamedTuple):
    """Logits [lanes, 8] of each of the four quarters of lanes. call: the numbers of the lanes' calls."""

    x_0: Any
    x_1: Any
    x_2: Any
    x_3: Any
    call: Any
