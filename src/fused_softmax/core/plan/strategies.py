"""The plan of rows, and the four strategies of rows: each function decides only the shape of its own strategy."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from fused_softmax.core.plan.device import H200, Device
from fused_softmax.core.plan.ladders import (
    ALONE_BYTES,
    FEW_ROWS_PARTS,
    FEW_ROWS_PARTS_OF,
    LEAST_SHIFTED,
    MASKED_PIECES,
    MOST_THREADS,
    POLL_LAST_FIRST_PARTS,
    READERS_PER_COPY,
    SPLIT_PARTS,
    STREAM_MOST_PARTS,
    STREAM_PIECES,
    STREAM_PROGRAMS,
    STREAM_WARPS,
    WARPS_HELD,
    WHOLE_PARTS,
    Ladder,
    prefetch_bytes,
    row_warps,
    split_parts,
)
from fused_softmax.core.plan.sizes import ANY_ROWS, UNBOUNDED, VECTOR_BYTES, Span, both, next_power_of_2, side_of
from fused_softmax.core.plan.tiles import TILE_BLOCK_COLS, TILE_BYTES, TILE_NOTE, Alignment, Work, tiles_of

Strategy = Literal["tile", "row", "split", "stream"]
Choices = Mapping[str, Any]


@dataclass(frozen=True)
class RowPlan:
    """One decision: a program covers `block_rows` rows by `part_cols` columns, in `pieces` pieces of `block_cols`.

    inputs: tensors of this shape that are read, and held until the result is written: 2 in backward.
    full_pieces: how many leading pieces of a part need no mask, in any part of any row.
    parts: programs that share one row; 1 in tile and row.
    copies: copies of a row's slots, each polled by its share of the row's programs (split).
    lanes: lanes that poll a row's slots, one a part. If they are 32, all warps poll them; if they are more, each warp
    polls its own.
    poll_last_first: whether programs await the last part of their row before they poll the others.
    prefetch: how many programs ahead, in launch order, a program asks L2 to fetch; 0 is none.
    vector: elements of one access; 1 if rows of input and output are not aligned alike ("scalar").
    alignment: "even", every row starts and ends on 16 bytes; "shifted", an aligned body with guarded edges.
    reasons: why the plan is as it is, and on which measurement, a sentence for each decision.
    same_rows: the least and the greatest n_rows for which the same planning call gives this plan but for n_rows.
    batch_invariant: whether nothing of it but n_rows follows from the number of rows.

    Two plans are equal if they launch the same: the last three fields do not count.
    """

    strategy: Strategy
    n_rows: int
    n_cols: int
    itemsize: int
    inputs: int
    alignment: Alignment
    vector: int
    block_rows: int
    block_cols: int
    pieces: int
    full_pieces: int
    parts: int
    part_cols: int
    copies: int
    lanes: int
    poll_last_first: bool
    num_warps: int
    prefetch: int
    reasons: tuple[str, ...] = field(compare=False, repr=False)
    same_rows: Span = field(compare=False, repr=False)
    batch_invariant: bool = field(default=False, compare=False, repr=False)

    @property
    def programs(self) -> int:
        """Programs in the grid."""
        return -(-self.n_rows // self.block_rows) * self.parts

    @property
    def slots_per_row(self) -> int:
        """64-bit messages that the programs of one row exchange."""
        return self.parts * self.copies if self.strategy == "split" else 0

    @property
    def slots(self) -> tuple[int, int]:
        """(groups of programs that exchange, 64-bit messages of each)."""
        return self.n_rows, self.slots_per_row

    @property
    def sizes(self) -> dict[str, int]:
        """What kernels are told of the plan, by the names of their parameters."""
        return {
            "n_rows": self.n_rows, "n_cols": self.n_cols, "n_parts": self.parts, "part_cols": self.part_cols,
            "n_programs": self.programs, "ahead": self.prefetch,
        }  # fmt: skip

    def most_registers(self, device: Device, besides: int) -> int | None:
        """Registers of a thread that a split kernel is held to, unless values spill by it; None without a limit.

        besides: how many it needs in addition to those that hold a row. Both numbers say how many programs are resident
        on a multiprocessor, and these share all of its registers. Without a limit, the compiler takes more, and fewer
        programs are resident.
        """
        if self.strategy != "split" or self.itemsize == 8 or device.capability[0] != H200.capability[0]:
            return None
        threads = 32 * self.num_warps
        held = self.inputs * self.pieces * self.block_cols * self.itemsize // (4 * threads)
        programs = min(device.registers // (threads * -(-(held + besides) // 8) * 8), MOST_THREADS // threads)
        if self.num_warps < WARPS_HELD or programs < 2:
            return None
        return min(device.registers // (threads * programs) // 8 * 8, 255)

    @property
    def reads(self) -> int:
        """Elements read from memory, counting every read of the input."""
        return self.n_rows * self.n_cols * self.inputs * (2 if self.strategy == "stream" else 1)

    @property
    def writes(self) -> int:
        """Elements written to memory."""
        return self.n_rows * self.n_cols

    def data(self) -> dict[str, Any]:
        """The decision as a flat dict for JSON: the fields that count when plans are compared."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.compare}

    def for_rows(self, n_rows: int) -> "RowPlan | None":
        """The plan for another number of rows, if the same decision holds for it."""
        least, greatest = self.same_rows
        return self.with_rows(n_rows) if least <= n_rows <= greatest else None

    def with_rows(self, n_rows: int) -> "RowPlan":
        """The plan for another number of rows in `same_rows`, without planning. ValueError for any other number.

        >>> plan_rows(4096, 1024, 2, H200).with_rows(4000) == plan_rows(4000, 1024, 2, H200)
        True
        """
        least, greatest = self.same_rows
        if not least <= n_rows <= greatest:
            raise ValueError(f"this plan holds for {least} to {greatest} rows; got {n_rows}")
        plan = object.__new__(RowPlan)  # a tenth of what dataclasses.replace costs
        plan.__dict__.update(self.__dict__, n_rows=n_rows)
        return plan


class Rows(NamedTuple):
    """The rows that a plan is for. Made by `rows_of`, which checks them.

    held: (inputs, itemsize). Ladders are found by it, or by `work`.
    body: the longest that the aligned part of a row can be.
    batch_invariant: whether nothing of a plan but n_rows may follow from the number of rows.
    """

    n_rows: int
    n_cols: int
    itemsize: int
    inputs: int
    alignment: Alignment
    device: Device
    held: tuple[int, int]
    work: Work
    vector: int
    body: int
    batch_invariant: bool = False


def rows_of(
    n_rows: int, n_cols: int, itemsize: int, inputs: int, alignment: Alignment, device: Device,
    work: Work | None = None, batch_invariant: bool = False,
) -> Rows:  # fmt: skip
    """The rows, with the alignment that their length allows. ValueError for a shape of nothing.

    work: softmax or its gradient, by the number of inputs, unless told.
    batch_invariant: rows then start on 16 bytes or are read by elements. What stands before the first boundary would be
        summed by itself, and would differ from row to row.
    """
    if n_rows < 1 or n_cols < 1:
        raise ValueError(f"a plan is for at least 1 row of 1 column; got {n_rows} x {n_cols}")
    if inputs not in (1, 2):
        raise ValueError(f"1 or 2 inputs are read; got {inputs}")
    if alignment == "even" and n_cols % (VECTOR_BYTES // itemsize):
        alignment = "shifted"  # no row of such a length can end on 16 bytes
    if alignment == "shifted" and (batch_invariant or n_cols < LEAST_SHIFTED[itemsize]):
        alignment = "scalar"
    vector = 1 if alignment == "scalar" else VECTOR_BYTES // itemsize
    body = n_cols // vector * vector
    work = work or ("forward" if inputs == 1 else "gradient")
    held = inputs, itemsize
    return Rows(n_rows, n_cols, itemsize, inputs, alignment, device, held, work, vector, body, batch_invariant)


class Shape(NamedTuple):
    """What a strategy decides: how programs cover rows, and how the programs of a row find each other."""

    block_rows: int
    block_cols: int
    num_warps: int
    reason: str = ""
    part_cols: int = 0  # 0 is the whole body
    copies: int = 1
    few: bool = False  # rows, each in small parts that fill the chip
    same_rows: Span = ANY_ROWS


def tile(rows: Rows, choices: Choices) -> Shape:
    """Several short rows a program."""
    body, ladder = rows.body, tiles_of(rows.work, rows.alignment, rows.itemsize, rows.n_cols)
    if ladder:
        end, block_rows, block_cols, num_warps = ladder.rung(rows.n_cols)
        block_cols = min(next_power_of_2(body), block_cols)
        reason = ladder.sentence(f"{block_rows} rows a program, {block_cols} columns at a time,", end)
    else:
        block_cols, num_warps = min(next_power_of_2(body), TILE_BLOCK_COLS), 1
        block_rows = max(1, TILE_BYTES // rows.itemsize // (-(-body // block_cols) * block_cols))
        block_rows = next_power_of_2(block_rows + 1) // 2
        reason = f"{block_rows} rows a program of one warp, {TILE_BYTES} bytes of them ({TILE_NOTE})"
    shape = Shape(block_rows, block_cols, num_warps, reason)
    chosen = {name: choices[name] for name in ("block_rows", "block_cols", "num_warps") if name in choices}
    return shape._replace(**chosen)


def row(rows: Rows, choices: Choices) -> Shape:
    """One row a program."""
    ladder = row_warps(rows.held, rows.device.table)
    end, num_warps = ladder.rung(rows.n_cols)
    num_warps = choices.get("num_warps", num_warps)
    reason = ladder.sentence(f"{num_warps} warps", end)
    return Shape(1, _block_cols(rows, num_warps, choices), num_warps, reason)


def split(rows: Rows, choices: Choices) -> Shape:
    """One row over many programs, which hold their parts while they exchange (m, s). ValueError for fp64."""
    if rows.held not in SPLIT_PARTS:
        raise ValueError(f"split exchanges fp32 states; itemsize is {rows.itemsize}")
    ladder = split_parts(rows.held, rows.device.table, shifted=rows.alignment == "shifted")
    end, largest, num_warps = ladder.rung(rows.n_cols)
    wanted, num_warps, few, same_rows, most_few = _few_rows(rows, largest, num_warps)
    if "part_cols" in choices:
        wanted, same_rows = choices["part_cols"], side_of(rows.n_rows, most_few)
    num_warps = choices.get("num_warps", num_warps)
    block_cols = _block_cols(rows, num_warps, choices)
    part_cols = _equal_parts(rows.body, wanted)
    masked = part_cols % block_cols or rows.body % part_cols
    if masked and part_cols > MASKED_PIECES * block_cols and "part_cols" not in choices:
        part_cols = _equal_parts(rows.body, wanted - block_cols)
    if masked and rows.work == "forward" and not few and "part_cols" not in choices:
        part_cols = _whole_parts(rows.body, wanted, block_cols) or part_cols
    parts = -(-rows.body // part_cols)
    if few:
        reason = f"parts of {part_cols} columns, so that few rows fill the chip ({_few_rows_parts(rows).note})"
    else:
        reason = ladder.sentence(f"{parts} parts of {part_cols} columns", end)
    return Shape(
        1, block_cols, num_warps, reason, part_cols,
        copies=choices.get("copies", max(1, min(32, parts // READERS_PER_COPY))), few=few, same_rows=same_rows,
    )  # fmt: skip


def _few_rows(rows: Rows, largest: int, num_warps: int) -> tuple[int, int, bool, Span, int]:
    """(columns of a part, warps of a program, whether rows are few, for which rows this holds, how many rows are few).

    Rows are few if parts that are smaller than the largest ones still do no more than fill the chip.
    """
    found, above = None, 0
    for part_cols, warps, programs, most_parts in _few_rows_parts(rows):
        parts = -(-rows.n_cols // part_cols)
        if part_cols < largest and parts <= most_parts:
            most_few = programs * rows.device.sm_count // parts
            if found is None and rows.n_rows <= most_few:
                found = part_cols, warps, True, (above + 1, most_few)
            above = max(above, most_few)
    return *(found or (largest, num_warps, False, (above + 1, UNBOUNDED))), above


def _few_rows_parts(rows: Rows) -> Ladder:
    return FEW_ROWS_PARTS_OF.get((rows.work, rows.itemsize), FEW_ROWS_PARTS)


def _equal_parts(body: int, part_cols: int) -> int:
    """Columns of equal parts in whole cache lines, so that only the last piece of a part needs a mask."""
    return -(-body // -(-body // part_cols) // 64) * 64


def _whole_parts(body: int, part_cols: int, block_cols: int) -> int:
    """Columns of equal parts of about `part_cols` that need no mask, because pieces divide the row; 0 if none do."""
    longer, than = WHOLE_PARTS
    pieces, remain = divmod(body, block_cols)
    most = part_cols // block_cols
    found = range(most * longer // than, most * than // longer, -1)
    return next((n * block_cols for n in found if not remain and pieces % n == 0), 0)


def stream(rows: Rows, choices: Choices) -> Shape:
    """Parts of a row that wait for nothing: a second launch reads the row again."""
    num_warps = choices.get("num_warps", STREAM_WARPS)
    block_cols = _block_cols(rows, num_warps, choices)
    step, wanted, same_rows = STREAM_PIECES * block_cols, choices.get("part_cols"), ANY_ROWS
    if wanted is None and rows.batch_invariant:
        wanted = max(ALONE_BYTES // rows.itemsize, rows.n_cols // STREAM_MOST_PARTS)
    elif wanted is None:
        programs = STREAM_PROGRAMS * rows.device.sm_count
        least = max(step, rows.n_cols // STREAM_MOST_PARTS)
        wanted = max(least, rows.n_cols * rows.n_rows // programs)
        # The rows for which n_cols * n_rows // programs lies in the same step.
        end = -(-wanted // step) * step
        above = 0 if least > end - step else ((end - step + 1) * programs - 1) // rows.n_cols
        same_rows = above + 1, ((end + 1) * programs - 1) // rows.n_cols
    part_cols = -(-wanted // step) * step
    return Shape(1, block_cols, num_warps, part_cols=part_cols, same_rows=same_rows)


def _block_cols(rows: Rows, num_warps: int, choices: Choices) -> int:
    """Columns of a piece: one access of every thread."""
    return choices.get("block_cols", 32 * num_warps * VECTOR_BYTES // rows.itemsize)


_SHAPES = {"tile": tile, "row": row, "split": split, "stream": stream}


def build(
    strategy: Strategy,
    rows: Rows,
    because: str,
    choices: Choices | None = None,
    *,
    said: str | None = None,
    same_rows: Span = ANY_ROWS,
) -> RowPlan:
    """The plan of a strategy, by choices that a kernel can follow: `candidate` checks those of a caller.

    because: why this strategy. said: why these sizes, where `choices` made them and no ladder did.
    same_rows: for which rows the caller would choose the same.
    """
    choices = choices or {}
    shape = _SHAPES[strategy](rows, choices)
    block_rows, block_cols, num_warps = shape.block_rows, shape.block_cols, shape.num_warps
    body, part_cols = rows.body, shape.part_cols or rows.body
    parts = -(-body // part_cols)
    lanes = choices.get("lanes", max(32 if shape.few else 32 * num_warps, next_power_of_2(parts)))
    pieces = STREAM_PIECES if strategy == "stream" else -(-part_cols // block_cols)
    least_body = body - (rows.vector if rows.alignment == "shifted" else 0)
    shortest = min(part_cols, least_body - (parts - 1) * part_cols)
    full_pieces = 0 if strategy == "stream" else max(0, min(pieces, shortest // block_cols))
    same_rows = both(same_rows, shape.same_rows)
    waits = strategy == "split" and parts >= POLL_LAST_FIRST_PARTS and not shape.few
    poll_last_first = choices.get("poll_last_first", waits)

    ladder = prefetch_bytes(rows.held, rows.device.table)
    end, fetched = ladder.rung(rows.n_cols * rows.itemsize)
    prefetch = choices.get("prefetch", fetched // (block_rows * part_cols * rows.itemsize * rows.inputs))
    if strategy == "stream" or rows.alignment == "scalar":
        prefetch = 0
    if prefetch:  # there must be more programs than it looks ahead
        most_rows = prefetch // parts * block_rows
        same_rows = both(same_rows, side_of(rows.n_rows, most_rows))
        prefetch = prefetch if rows.n_rows > most_rows else 0

    reasons = [f"{strategy}: {because}"]
    if rows.alignment == "scalar":
        reasons.append("read by elements: rows of input and output lie differently against 16 bytes, or are very short")
    elif rows.alignment == "shifted":
        reasons.append("rows do not start on 16 bytes: an aligned body, read 16 bytes at a time, with guarded edges")
    if said or (said is None and shape.reason):
        reasons.append(said or shape.reason)
    if poll_last_first:
        reasons.append(f"{POLL_LAST_FIRST_PARTS} parts or more await the last one first")
    if prefetch and "prefetch" in choices:
        reasons.append(f"{prefetch} programs ahead are fetched into L2, as asked")
    elif prefetch:
        reasons.append(ladder.sentence(f"{fetched >> 20} MiB ahead are fetched into L2", end, "bytes"))
    return RowPlan(
        strategy=strategy,
        n_rows=rows.n_rows,
        n_cols=rows.n_cols,
        itemsize=rows.itemsize,
        inputs=rows.inputs,
        alignment=rows.alignment,
        vector=rows.vector,
        block_rows=block_rows,
        block_cols=block_cols,
        pieces=pieces,
        full_pieces=full_pieces,
        parts=parts,
        part_cols=part_cols,
        copies=shape.copies,
        lanes=lanes,
        poll_last_first=poll_last_first,
        num_warps=num_warps,
        prefetch=prefetch,
        reasons=tuple(reasons),
        same_rows=same_rows,
        batch_invariant=rows.batch_invariant,
    )
