"""How segments meet the chip: a pure function from sizes and a device to a frozen plan."""

from dataclasses import dataclass
from math import log2
from typing import NamedTuple

from fused_softmax.core.plan.device import Device
from fused_softmax.core.plan.sizes import VECTOR_BYTES, next_power_of_2


class Tiles(NamedTuple):
    """How programs of a call read segments of about one mean length.

    num_warps: of a program. elements: of a tile that a thread holds in registers. registers: of a thread at most; 0 is
    any number. lanes: of a row, which read side by side. piece: positions of a piece; None if it follows from the mean,
    in which case most segments have several. segments: of a program; None if that follows too.
    """

    num_warps: int
    elements: int
    registers: int
    lanes: int
    piece: int | None = None
    segments: int | None = None


# Measured on an H200: many small programs hide waits better than few large ones, whose warps wait for each other. It
# holds until segments are longer than what one warp has in registers.
ONES, SHORT = Tiles(1, 32, 168, 4, 1, 256), Tiles(1, 32, 168, 4, 8, 128)
MEDIUM, LONG = Tiles(1, 16, 96, 4), Tiles(4, 32, 128, 8)
UP_TO = ((2.5, ONES), (6, SHORT), (128, MEDIUM))  # elements of a mean segment; the first two have one column

MOST_COLS = 64  # of a program
PIECES = 3.5  # of a segment of mean length, if the table gives no length of pieces
PIECE, OF_COLUMNS, MOST_OF_PIECE = 16, 32, 128  # elements of a piece then, at least; with several columns; at most
TILES = 4  # full tiles of a program
OF_ORDER = {"elements": 32, "registers": 168}  # with an order, because each element then has an address too
RANGE_DEEP = 4  # vectors of a long segment that a thread reads at once
PROGRAMS = 8  # of a multiprocessor
MOST_OF_BLOCK = 8192  # elements of a block of hubs that a warp reads in turn
FINISHERS, FINISHING_WARPS = 32, 4  # programs of the second launch, on a multiprocessor, at most
MENDERS = 64


@dataclass(frozen=True)
class SegmentPlan:
    """Programs of num_warps warps have a bunch of `segments` segments, and `cols` columns of the positions of each.

    singles, pieces, deep, wide: of a tile, as the spec has them. range_deep, range_wide: of a step through a longer
    segment. block: positions of a block; a longer segment is a hub. registers: of a thread at most; 0 is any number.
    n_finishers: programs of the second launch for each group; their range_wide is finishing_wide. n_menders: how many
    of them compute everything anew if offsets are wrong.
    """

    n: int
    n_segments: int
    outer: int
    inner: int
    cols: int
    segments: int
    singles: bool
    pieces: int
    deep: int
    wide: int
    num_warps: int
    range_deep: int
    range_wide: int
    finishing_wide: int
    n_finishers: int
    n_menders: int
    block: int
    registers: int

    @property
    def n_groups(self) -> int:
        """Blocks of columns, over all outer indices."""
        return self.outer * -(-self.inner // self.cols)

    @property
    def n_bunches(self) -> int:
        return -(-self.n_segments // self.segments)

    @property
    def n_blocks(self) -> int:
        """0 if no segment can be a hub."""
        return -(-self.n // self.block) if self.n > self.block else 0


def plan_segments(
    n: int, n_segments: int, outer: int, inner: int, itemsize: int, device: Device, *, ordered: bool = False,
    singles: bool | None = None, tile: int | None = None, block: int | None = None, **how: int,
) -> SegmentPlan:  # fmt: skip
    """The plan for n positions of outer * inner columns, which n_segments segments cut.

    ordered: whether elements are found by an order. The other keywords overrule the plan. singles: whether most
    segments are one piece. tile: positions of a tile. how: fields of Tiles.

    >>> from fused_softmax.core.plan import H200
    >>> plan = plan_segments(2**27, 2**18, 1, 1, 4, H200)
    >>> plan.num_warps, plan.pieces, plan.deep, plan.wide
    (4, 32, 16, 8)
    """
    cols, mean = min(next_power_of_2(max(1, inner)), MOST_COLS), n / max(1, n_segments)
    tiles = next((each for upto, each in UP_TO if mean * cols <= upto and (cols == 1 or not each.piece)), LONG)
    singles = tiles.piece is not None if singles is None else singles
    if ordered:
        tiles = tiles._replace(**OF_ORDER)
    tiles = tiles._replace(**how)
    threads, vector = 32 * tiles.num_warps, VECTOR_BYTES // itemsize
    tile = tile or max(1, threads * tiles.elements // cols)
    least = PIECE if cols == 1 else OF_COLUMNS
    wanted = max(1, min(MOST_OF_PIECE, max(least, mean * cols / PIECES)) / cols)
    piece = min(tile, tiles.piece or 2 ** round(log2(wanted)))
    at_once = min(TILES * (tile // piece) / max(1, mean / piece + 0.5), n_segments / (PROGRAMS * device.sm_count))
    segments = tiles.segments or 2 ** int(log2(max(1, at_once)))
    if singles:
        segments = min(segments, tile // piece)
    pieces = segments if singles else tile // piece
    wide = min(piece, max(1, tiles.lanes // max(1, cols // vector)))  # of lanes that have a vector each
    range_wide, finishing_wide = (max(1, each * min(vector, 4) // cols) for each in (threads, 32 * FINISHING_WARPS))
    at_most = max(2 * tile, MOST_OF_BLOCK * tiles.num_warps // cols)
    block = block or min(at_most, max(2 * tile, next_power_of_2(-(-n // (PROGRAMS * device.sm_count)))))
    n_bunches, n_blocks = -(-n_segments // segments), -(-n // block) if n > block else 0
    n_menders = min(MENDERS, n_bunches)
    finishers = -(-FINISHERS * device.sm_count // (outer * -(-inner // cols)))
    return SegmentPlan(
        n=n, n_segments=n_segments, outer=outer, inner=inner, cols=cols, segments=segments, singles=singles,
        pieces=pieces, deep=piece // wide, wide=wide, num_warps=tiles.num_warps, range_deep=RANGE_DEEP,
        range_wide=range_wide, finishing_wide=finishing_wide, n_finishers=max(n_menders, min(finishers, n_blocks)),
        n_menders=n_menders, block=block, registers=tiles.registers,
    )  # fmt: skip
