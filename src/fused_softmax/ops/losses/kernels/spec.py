"""What the kernels of losses are compiled for, and the bundles of values that their helpers share."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from fused_softmax.core.kernels.spec import Spec


@dataclass(frozen=True, kw_only=True)
class LossSpec(Spec):
    """For losses of rows of logits z = x * scale, or softcap * tanh(x * scale / softcap): see `options.Loss`.

    weighted, smooth, scaled (true with a softcap too), capped, z_loss, mean: what the call asks for. stats: whether the
    entropy is computed; finds: the likeliest class; moments: the sums of squared probabilities and of logits.
    targets: of a row, rounded up to a power of two. listed, masked: whether a list or a bitmask says over which columns
    a row is normalised.
    shard: whether rows are parts of longer rows (ops/losses/over_ranks). Targets, lists and bitmasks then name columns
    of the longer rows. crosses: whether the bits of a shard's neighbouring columns may lie in two bytes.
    totals: in how many parts the targets' totals are. counted: if not 0, every program counts the targets itself, this
    many at most, and reads no totals.
    gradient: whether it is written too; inplace: over the logits. finishes: whether the last program to write its loss
    sums all losses.
    block_tokens: tokens of a tile [classes, tokens].
    """

    weighted: bool = False
    smooth: bool = False
    scaled: bool = False
    capped: bool = False
    z_loss: bool = False
    mean: bool = False
    totals: int = 1
    stats: bool = False
    finds: bool = False
    moments: bool = False
    targets: int = 1
    listed: bool = False
    masked: bool = False
    shard: bool = False
    crosses: bool = False
    gradient: bool = False
    inplace: bool = False
    counted: int = 0
    finishes: bool = False
    greedy: bool = False
    block_tokens: int = 0
    crowds: bool = False

    @property
    def lane_cols(self):
        """Columns of a lane: a vector, or as many as fill 16 bytes where elements are read one by one."""
        return self.vector if self.vector > 1 else 128 // self.cast_dtype.primitive_bitwidth

    @property
    def compute_dtype(self):
        """With a softcap pieces hold finished logits, so that tanh is computed once."""
        return self.state_dtype if self.capped else self.cast_dtype

    @property
    def scale_on_use(self):
        return self.scaled and not self.capped

    @property
    def truncated(self):
        """Whether a row is normalised over only some of its columns."""
        return self.listed or self.masked

    @property
    def picks(self):
        """Whether a tile has columns that do not count."""
        return self.masked or (self.listed and self.shard)

    @property
    def list_cols(self):
        """How many of a row's listed columns are compared with its targets at a time."""
        return max(1, min(512, 1024 // self.targets))

    @property
    def bits_at_once(self):
        """How many columns of a tile share an access to their bitmask."""
        return min(8, self.block_cols)

    @property
    def unpack(self):
        """As Spec's, but False for rows of few pieces: with so few registers too many programs would be resident.

        bf16 16384 x 8192: 0.92 with 48 registers, 0.90 unpacked with 32.
        """
        return self.ptx and not (self.crowds and not self.split and self.pieces <= 4)


class Numbers(NamedTuple):
    """The numbers of a loss, in the dtype of the arithmetic."""

    factor: Any
    cap: Any
    smoothing: Any
    lse_square_scale: Any


class Target(NamedTuple):
    """A row's class t; kept: whether the row counts; wrong: whether t is no class; w: the weight of class t."""

    t: Any
    kept: Any
    wrong: Any
    w: Any


class Targets(NamedTuple):
    """The targets of rows, [n, K.targets].

    at: where each stands in memory. t: its class, counted from a shard's first column. kept: whether it counts; a shard
    keeps targets of other shards too. wrong: whether there is no such class. there: which of the K.targets places are
    used.
    outside: targets that count, but lie outside the columns over which their row is normalised; these are not kept.
    spoilt: whether the row's list has an id that is no column.
    """

    at: Any
    t: Any
    kept: Any
    wrong: Any
    there: Any
    outside: Any
    spoilt: Any


class Upstream(NamedTuple):
    """The incoming gradients of rows [n, 1], and what the forward pass stored of these rows.

    g: the gradient of each target's log-probability, [n, K.targets]. a: the factor of p_c in every column, g_lse - sum
    g. g_entropy: the gradient of the entropy. entropy, m, ls: from the forward pass. counts: whether the row has a
    gradient.
    """

    g: Any
    a: Any
    g_entropy: Any
    entropy: Any
    m: Any
    ls: Any
    counts: Any


class Listed(NamedTuple):
    """The columns over which a row is normalised, as a list: `size` ids from ids_ptr + first on.

    right: whether the row's offsets can be right. If not, the list has one id, which is no column, so that results are
    NaN. origin, n_classes: of a shard, its first column and the number of columns of the whole row.
    """

    ids_ptr: Any
    first: Any
    size: Any
    right: Any
    origin: Any
    n_classes: Any


class Masked(NamedTuple):
    """Those columns as a bitmask from ptr on, of rows [n, 1] or of one row. origin: of a shard, its first column."""

    ptr: Any
    origin: Any


class Scanned(NamedTuple):
    """What is known of a row of logits, or of its part, after one read. Whatever the call does not ask for is 0.

    m, s: its state. wz: sum_c w_c (z_c - zero). u: sum e t of `sums_and_terms`. q: sum exp(z - m) ** 2. total: sum z.
    found: the first column whose logit is m, or NO_COLUMN. n: the number of columns that count, if the row is
    normalised over some of them.
    """

    m: Any
    s: Any
    wz: Any
    u: Any
    q: Any
    total: Any
    found: Any
    n: Any


class LossRow(NamedTuple):
    """The arguments of a kernel that holds a row of logits, or its part: all but those of the exchange."""

    x: Any
    dx: Any
    target_ptr: Any
    weight_ptr: Any
    totals_ptr: Any
    w_total_ptr: Any
    numbers_ptr: Any
    m_ptr: Any
    ls_ptr: Any
    loss_ptr: Any
    z_ptr: Any
    result_ptr: Any
    ticket_ptr: Any
    n_cols: Any
    n_parts: Any
    part_cols: Any
    ignore_index: Any
    factor: Any
    hidden: Any
    cap: Any
    smoothing: Any
    lse_square_scale: Any


class HeldLoss(NamedTuple):
    """What a program knows of a row of logits, or of its part, before it knows the row's state.

    z_t: the target's logit, for the part that `writes` the row's loss. wz: sum_c w_c (z_c - zero) of the part. g, g_z:
    the factors of the row's loss and of its z-loss in the result.
    """

    target: Any
    z_t: Any
    zero: Any
    wz: Any
    w_total: Any
    writes: Any
    g: Any
    g_z: Any


class Shares(NamedTuple):
    """dloss / dz_c = p_c a - [c = t] b - w_c u."""

    a: Any
    b: Any
    u: Any


@dataclass(frozen=True, kw_only=True)
class PairSpec(Spec):
    """For pairs of a student's row and a teacher's row: see `options.Divergence`.

    divergence: its kind, or "cross". given: what the teacher's rows are. weighted, smooth: of "cross". scaled, capped,
    target_scaled, target_capped: whether logits are multiplied, or go through a tanh.
    itemsize: bytes of an element, the smaller one of both rows. shard: whether rows are parts of longer rows
    (ops/losses/over_ranks).
    publish_shares, collect_shares: as publish and collect, for the second exchange where `twice`.
    """

    divergence: str = "kl"
    given: str = "logits"
    weighted: bool = False
    smooth: bool = False
    scaled: bool = False
    capped: bool = False
    target_scaled: bool = False
    target_capped: bool = False
    itemsize: int = 4
    shard: bool = False
    publish_shares: bool = True
    collect_shares: bool = True

    @property
    def lane_cols(self):
        """Columns of a lane: as many as fill 16 bytes, whether they are read together or one by one."""
        return 16 // self.itemsize

    @property
    def past_x(self):
        """What is read past the student's row: -inf, whose exponential is 0, unless logits are yet to be changed."""
        return 0.0 if self.scaled or self.capped else float("-inf")

    @property
    def past_y(self):
        """As past_x, of the teacher's row."""
        return 0.0 if self.given == "probs" or self.target_scaled or self.target_capped else float("-inf")

    @property
    def twice(self):
        """Whether the terms of the divergence need the states of both whole rows, and so a second pass."""
        return self.divergence in ("jsd", "tvd")

    @property
    def messages(self):
        """Messages of a part, where the programs of a row exchange."""
        return messages_of(self.divergence)


def messages_of(divergence: str) -> int:
    """Messages of a part: the states of both rows, and one sum of the first pass or two sums of the second."""
    return 4 if divergence in ("jsd", "tvd") else 3


class PairNumbers(NamedTuple):
    """The numbers of a pair of rows."""

    factor: Any
    cap: Any
    target_factor: Any
    target_cap: Any
    beta: Any
    smoothing: Any


class OfTeacher(NamedTuple):
    """A teacher's probabilities and their logarithms."""

    p: Any
    log_p: Any


class PairSums(NamedTuple):
    """Sums of a pair of rows, or of a part of both.

    m, s: the student's state. m_t, s_t: the teacher's state; of probabilities s_t is their sum, and m_t is not used. c:
    the one sum of a divergence that the first pass gives, with logits counted from m and m_t.
    """

    m: Any
    s: Any
    m_t: Any
    s_t: Any
    c: Any


class Exponents(NamedTuple):
    """The origins of both rows: scale and base for exponentials (`origin_of`), zero for logits (`counted_from`)."""

    scale: Any
    base: Any
    scale_t: Any
    base_t: Any
    zero: Any
    zero_t: Any


class BothStates(NamedTuple):
    """What the states of a pair of rows give.

    m, m_t: their maxima. of_s, of_t: 1 / s and 1 / s_t; of_t is 1 for probabilities. ls: the student's log s. more: ls
    - ls_t, with which log T - log Q = (z_t - m_t) - (z - m) + more; for jsd log2 s - log2 s_t, see `jsd_of`.
    """

    m: Any
    m_t: Any
    of_s: Any
    of_t: Any
    ls: Any
    more: Any


class HeldPair(NamedTuple):
    """A pair of rows, or a part of both, that a program holds.

    N: its numbers. dvalue: the factor of the row's divergence in the result.
    """

    x: Any
    y: Any
    dx: Any
    dy_ptr: Any
    weight_ptr: Any
    value_ptr: Any
    n_cols: Any
    n_parts: Any
    part_cols: Any
    N: Any
    dvalue: Any


class RowOfRanks(NamedTuple):
    """Where the ranks of a group exchange what they know of a row: see ranks/kernels.py.

    at: the row's first slot in this launch's set. n_slots: the slots of one message. digest, tag: of this launch.
    """

    slots_ptr: Any
    bases_ptr: Any
    asked_ptr: Any
    at: Any
    row: Any
    n_slots: Any
    n_parts: Any
    rank: Any
    ranks: Any
    digest: Any
    tag: Any


@dataclass(frozen=True, kw_only=True)
class LossShardSpec(LossSpec):
    """For the numbers of rows that ranks tell each other, and for what follows from them."""

    @property
    def numbers(self):
        """Numbers of a row in a message."""
        return numbers_of(weighted=self.weighted, smooth=self.smooth, stats=self.stats)


def numbers_of(*, weighted: bool, smooth: bool, stats: bool) -> int:
    """Numbers of a row in a message: m, ls, the target's logit, and those that the call's options add.

    One for class weights, two for smoothing, two for statistics.
    """
    return 3 + int(weighted) + 2 * int(smooth) + 2 * int(stats)
