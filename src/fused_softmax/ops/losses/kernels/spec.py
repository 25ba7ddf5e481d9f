"""What the kernels of losses are compiled for, and the bundles of values that their helpers share."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from fused_softmax.core.kernels.spec import Spec


@dataclass(frozen=True, kw_only=True)
class LossSpec(Spec):
    """Of the losses of rows of logits z = x * scale, or softcap * tanh(x * scale / softcap): see `options.Loss`.

    weighted, smooth, capped, scaled (or capped), z_loss, mean: what the call asks for. stats: the entropy; finds: the
    likeliest class; moments: sums of squared probabilities and of logits. targets: of a row, as a power of two.
    listed, masked: whether a row is normalised over some columns alone, which a list has or a bitmask.
    shard: whether rows are a part of longer ones, as which ops/losses/over_ranks has them. Targets, lists and bitmasks
    are then of the longer ones. crosses: whether bits of neighbouring columns then lie over two bytes.
    totals: parts of the targets' totals. gradient: whether it is written too; inplace: over the logits.
    counted: how many targets at most each program counts itself, instead of totals. finishes: whether the program whose
    loss is the last to be written sums them all.
    block_tokens: of a tile [classes, tokens].
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
        """As many as 16 bytes have, where they are read one by one."""
        return self.vector if self.vector > 1 else 128 // self.cast_dtype.primitive_bitwidth

    @property
    def compute_dtype(self):
        """With a softcap pieces hold finished logits, so that no tanh is taken twice."""
        return self.state_dtype if self.capped else self.cast_dtype

    @property
    def scale_on_use(self):
        return self.scaled and not self.capped

    @property
    def truncated(self):
        """Whether a row is normalised over some columns alone."""
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
        """Few pieces would take so few registers that programs crowd: bf16 16384 x 8192 0.92, 0.90 with 32 of 48."""
        return self.ptx and not (self.crowds and not self.split and self.pieces <= 4)


class Numbers(NamedTuple):
    """The numbers of a loss, in the dtype of the arithmetic."""

    factor: Any
    cap: Any
    smoothing: Any
    lse_square_scale: Any


class Target(NamedTuple):
    """A row's class t, whether the row counts, whether there is no such class, and the class's weight."""

    t: Any
    kept: Any
    wrong: Any
    w: Any


class Targets(NamedTuple):
    """The classes t of rows, [n, K.targets]: where each stands in memory, whether it counts, whether there is no such
    class, and which are there.

    Of a shard they count from its first column, and those that other shards have are among the kept too. outside: those
    that count, and over which their row is not normalised; they are not among the kept. spoilt: whether the row's list
    has what is no column.
    """

    at: Any
    t: Any
    kept: Any
    wrong: Any
    there: Any
    outside: Any
    spoilt: Any


class Upstream(NamedTuple):
    """What the gradients of results of rows [n, 1] come to: g of each target, a of every class, and of the entropy.

    entropy, m, ls: of the forward pass. counts: whether the row has a gradient.
    """

    g: Any
    a: Any
    g_entropy: Any
    entropy: Any
    m: Any
    ls: Any
    counts: Any


class Listed(NamedTuple):
    """The columns over which a row is normalised: `size` ids from ids_ptr + first on. right: whether they can be read.

    Of offsets that cannot be right there is one, which is no column: what follows is NaN as for any such id.
    origin, n_classes: of a shard its first column, and how many the longer row has.
    """

    ids_ptr: Any
    first: Any
    size: Any
    right: Any
    origin: Any
    n_classes: Any


class Masked(NamedTuple):
    """The same as bits from ptr on, of rows [n, 1] or of one. origin: of a shard its first column."""

    ptr: Any
    origin: Any


class Scanned(NamedTuple):
    """What is known of a row of logits, or of its part, once it was read: 0, or no column, where nobody asked.

    m, s: its state. wz: sum_c w_c (z_c - zero). u: sum e t of `sums_and_terms`. q: sum exp(z - m) ** 2. total: sum z.
    found: the first column whose logit is m. n: how many columns count, of a row that is normalised over some alone.
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

    z_t: the target's logit, for the part that `writes` the row's loss; wz: sum_c w_c (z_c - zero) of the part.
    g, g_z: what a row's loss and its z-loss count in the result.
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
    """Of a student's rows and a teacher's: see `options.Divergence`.

    divergence: its kind, or "cross". given: what the teacher's rows are. weighted, smooth: of "cross".
    scaled, capped, target_scaled, target_capped: whether logits are multiplied, or go through a tanh. itemsize: the
    smaller one of both rows. shard: whether rows are a part of longer ones, as which ops/losses/over_ranks has them.
    publish_shares, collect_shares: as publish and collect, of the second exchange of `twice`.
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
        """As many as 16 bytes have, whether they are read together or not."""
        return 16 // self.itemsize

    @property
    def twice(self):
        """Whether a divergence is a sum of what both rows' states are needed for."""
        return self.divergence in ("jsd", "tvd")

    @property
    def messages(self):
        """Of a part, where a row's programs exchange."""
        return messages_of(self.divergence)


def messages_of(divergence: str) -> int:
    """The states of both rows, and the sums of what one pass gives, or then a second."""
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
    """Of a pair of rows, or of a part of both: the student's state (m, s), the teacher's, of probabilities their sum
    alone, and c, the one sum of a divergence that one pass gives, of logits counted from m and m_t.
    """

    m: Any
    s: Any
    m_t: Any
    s_t: Any
    c: Any


class Exponents(NamedTuple):
    """What the exponentials of both rows are counted from (`origin_of`), and their logits (`counted_from`)."""

    scale: Any
    base: Any
    scale_t: Any
    base_t: Any
    zero: Any
    zero_t: Any


class BothStates(NamedTuple):
    """Of a pair of rows: their maxima, what their exponentials are multiplied by, the student's ls, and by how much
    log T - log Q exceeds the difference of the logits, each counted from its maximum.
    """

    m: Any
    m_t: Any
    of_s: Any
    of_t: Any
    ls: Any
    more: Any


class HeldPair(NamedTuple):
    """A pair of rows of which a program holds both, or a part of both. N: its numbers. dvalue: see `_pair_held`."""

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


@dataclass(frozen=True, kw_only=True)
class LossShardSpec(LossSpec):
    """Of the numbers that ranks tell each other of rows, and of what follows from them."""

    @property
    def numbers(self):
        """Of a row in a message."""
        return numbers_of(weighted=self.weighted, smooth=self.smooth, stats=self.stats)


def numbers_of(*, weighted: bool, smooth: bool, stats: bool) -> int:
    """Of a row in a message: m, ls and the target's logit; a class weight; with smoothing two more, with stats too."""
    return 3 + int(weighted) + 2 * int(smooth) + 2 * int(stats)
