"""Ladders and thresholds as data, each beside the measurement that set it. A table may overrule some. More: measured/.

Figures are of an H200 at 128 Mi elements unless they say otherwise: a width, and its speed as a ratio to a copy. A key
is (inputs, itemsize), or the itemsize alone if only softmax's forward pass takes the ladder.
"""

from dataclasses import dataclass
from typing import Any

from fused_softmax.core.plan.sizes import UNBOUNDED


class Ladder(tuple[tuple[Any, ...], ...]):
    """Rungs, and a note of the widths and ratios that were measured.

    A rung begins with the largest size that it holds for.
    """

    note: str

    def __new__(cls, *rungs: tuple[Any, ...], note: str = "") -> "Ladder":
        ladder = super().__new__(cls, rungs)
        ladder.note = note
        return ladder

    @property
    def end(self) -> int:
        """The largest size that any rung holds for."""
        return self[-1][0]

    def rung(self, size: int) -> tuple[Any, ...]:
        """The first rung that holds for the size, or the last one."""
        return next((rung for rung in self if size <= rung[0]), self[-1])

    def sentence(self, choice: str, end: int, unit: str = "columns") -> str:
        """A reason of a plan: the choice, the end of its rung, and the measurement."""
        upto = f"for rows of at most {end} {unit}" if end < UNBOUNDED else "for all longer rows"
        return f"{choice} {upto} ({self.note})" if self.note else f"{choice} {upto}"


# Rows that are held: softmax, its gradient, and the losses with theirs.

# (columns up to, warps): how many warps hold one row.
ROW_WARPS = {
    (1, 2): Ladder((1024, 1), (2048, 2), (3072, 4), (32768, 8), note="1024 1.01, 4096 1.00, 16384 1.00, 32000 0.98"),
    (1, 4): Ladder(
        (512, 1), (1024, 2), (2304, 4), (3072, 8), (16384, 16), (32768, 32), note="1024 1.01, 4096 1.00, 32768 0.99"
    ),
    (1, 8): Ladder(
        (512, 1), (1024, 2), (2048, 4), (4096, 8), (8192, 16), (16384, 32), note="unmeasured: what fits the registers"
    ),
    (2, 2): Ladder((1024, 1), (2048, 2), (4096, 4), (8192, 8), (32768, 16), note="1024 1.00, 8192 0.99, 32000 0.97"),
    (2, 4): Ladder((512, 2), (1024, 4), (2048, 8), (16384, 16), note="1024 1.00, 4096 1.00, 16384 0.99"),
    (2, 8): Ladder(
        (256, 1), (512, 2), (1024, 4), (2048, 8), (4096, 16), (8192, 32), note="unmeasured: what fits the registers"
    ),
}
# (columns up to, warps) of causal rows, half of which is hidden.
CAUSAL_WARPS = {
    2: Ladder(
        (2048, 2), (16384, 4), (32768, 16),
        note="4096 with 4 0.96, 8 0.93; 16384 with 4 0.91, 8 0.88; 32768 with 16 0.68, 8 0.56",
    ),
    4: Ladder((2048, 4), (32768, 16), note="32768 with 16 0.96, 32 0.87"),
}  # fmt: skip
# Columns more than, up to: a program with one such row leaves no room for a second program on its multiprocessor, but
# does not fill it either. Such rows are faster if they are split: 24000 0.97, by one program 0.94, of log_softmax 0.88.
RATHER_SPLIT = {(2, 2): (16384, 28672)}
# The longest row of one program on a GPU that was not measured: Triton 3.9 spills a few bytes of longer ones on sm_80
# and sm_100.
UNMEASURED_ROW_COLS = {(2, 2): 8192}

# (columns up to, columns of a part, warps): how a row is split where the rows are enough to fill the chip.
SPLIT_PARTS = {
    (1, 2): Ladder((65536, 8192, 4), (UNBOUNDED, 16384, 4), note="65536 0.98; 131072 0.97, 262144 0.96, 1 Mi 0.93"),
    (1, 4): Ladder((262144, 8192, 4), (UNBOUNDED, 16384, 4), note="65536 1.00, 262144 0.98; 524288 0.98, 1 Mi 0.96"),
    (2, 2): Ladder(
        (524288, 8192, 4), (UNBOUNDED, 16384, 8), note="20000 0.96, 65536 0.97, 524288 0.93; 1 Mi 0.93"
    ),
    (2, 4): Ladder((131072, 8192, 4), (UNBOUNDED, 8192, 8), note="65536 0.99, 131072 0.98; 262144 0.96, 1 Mi 0.93"),
}  # fmt: skip
# For rows whose parts take more than half of the chip: to read them twice would be slower.
ALL_NOTE = "60 x 2306048 fp32 0.90, read twice 0.58; 33 x 4 Mi 0.73, 0.59"
# By how much a part may be longer, if pieces then divide the row: bf16 51200 0.976, in equal parts 0.945.
WHOLE_PARTS = 5, 4
SHIFTED_SPLIT_PARTS = {  # the first part has the edges too, and a long part hides their work
    **SPLIT_PARTS,
    (1, 2): Ladder((UNBOUNDED, 16384, 4), note="bf16 50257 0.95, with parts of 8192 0.91"),
    (2, 2): Ladder(
        (131072, 16384, 4), (524288, 8192, 4), (UNBOUNDED, 16384, 4), note="bf16 50257 0.96, with parts of 8192 0.93"
    ),
    (2, 4): Ladder((UNBOUNDED, 4096, 4), note="fp32 100003 0.95, with parts of 8192 0.90"),
}
# For few rows: (columns of a part up to, warps, programs a multiprocessor at most, parts of a row at most). The first
# rung that keeps these bounds holds.
FEW_ROWS_PARTS = Ladder(
    (1024, 1, 8, 256), (2048, 4, 8, 256), (4096, 4, 8, 256), (8192, 4, 8, 256),
    note="1 x 32768 2.5 us, 1 x 1 Mi fp32 6.0 us, 132 x 32768 11.3 us",
)  # fmt: skip
FEW_ROWS_PARTS_OF = {  # (work, itemsize) with a ladder of its own
    ("forward", 2): Ladder(
        (1024, 1, 8, 128), (2048, 4, 12, 256), (4096, 4, 8, 256), (8192, 4, 16, 256),
        note="2 x 262144 by 128 parts 3.6 us, by 256 4.5; 16 x 201088 7.2 us, in parts of 4096 7.6; 128 x 128256 21.9, "
        "in parts of 16384 22.5",
    ),
}  # fmt: skip
FEW_ROWS_COLS = 8192  # from this width on an exchange pays: 1 x 16384 bf16 2.9 us by one program, split 2.3
MASKED_PIECES = 15  # of a part whose last piece has a mask: one of 16 takes 127 registers for 96; 262152 0.89 to 0.95
READERS_PER_COPY = 4  # programs that poll one copy of a row's slots: bf16 1 Mi 0.92 with 16 copies, 0.89 with one
POLL_LAST_FIRST_PARTS = 32  # parts from which programs await the last one first: bf16 1 Mi 0.92, without 0.90

# (registers for a thread's values up to, registers of a thread at most, as compiled): they bound residency.
SPLIT_REGISTERS = Ladder((32, 96), (64, 128), (128, 176), (UNBOUNDED, 255))
ALL_REGISTERS = 255  # for the losses, and rows read by elements, of which each has an address and a mask
MOST_THREADS = 2048  # of a multiprocessor
WARPS_HELD = 4  # from so many warps of a program on, a split kernel is held to the registers that residency leaves it

# itemsize: columns from which an aligned body with guarded edges beats reading by elements; bf16 99 0.74, by body 0.65.
LEAST_SHIFTED = {1: 256, 2: 128, 4: 12, 8: 4}

# (row bytes up to, bytes): how far ahead, in launch order, programs ask L2 to fetch. 17 MB and more collapses.
PREFETCH_BYTES = Ladder((8 << 10, 8 << 20), (UNBOUNDED, 12 << 20), note="bf16 16384 0.97 at 8 MiB, 0.99 at 12")
PREFETCH_BYTES_OF = {  # (inputs, itemsize) with a ladder of its own
    (2, 2): Ladder((8192, 8 << 20), (1 << 20, 12 << 20), (UNBOUNDED, 6 << 20), note="1 Mi 0.93 at 6 MiB, 0.92 at 12"),
}

STREAM_WARPS = 8
STREAM_PIECES = 4
STREAM_PROGRAMS = 8  # a multiprocessor: with more, rows are cut into longer parts
STREAM_MOST_PARTS = 1024  # a row: a program of the second pass merges their states at once
GRADIENT_MOST_PARTS = 4096  # a row, if no part needs another's state
PAIR_PARTS = 4096, 4  # (columns, warps) of a part of a pair of rows that are held
PAIR_NOTE = "bf16 151936 columns kl 2330 to 2430 us, in parts of 8192 2631"
PAIR_COPIES = 2  # of slots at most, 9 MiB each for 8192 rows: fp32 65536 columns kl 1746 us, by one 1796, by 4 1705
PAIR_ROW = 8192  # columns up to which one program holds a pair: bf16 12288 reverse_kl 890 us, in parts 797; kl 610, 765
PAIR_WARPS = 8  # of such a program at most: bf16 8448 kl 477 us, by 16 577; fp32 4096 740 and 771
ALONE_BYTES = 65536  # of a part, if parts must not follow from the number of rows
ALONE_ROWS = 2**20  # the number of rows for which held rows are planned then

# Reductions: rows are read and none is written; figures are ratios to a read.

# (row bytes up to, warps)
REDUCTION_WARPS = Ladder(
    (4096, 1), (8192, 2), (16384, 4), (UNBOUNDED, 8), note="fp32 1024 0.99; bf16 4096 0.97, 32000 0.96"
)
# Programs a multiprocessor: if rows are fewer, they are split. bf16 32768 with enough rows, if split 0.84.
REDUCTION_PROGRAMS = 8
# Programs a multiprocessor into which they are split.
REDUCTION_PARTS = 32
REDUCTION_NOTE = "bf16 131072 0.92, 1 Mi 0.93; by 8 programs a multiprocessor 0.90, 0.81"
# Bytes of a part at least, if rows are more than a third of the multiprocessors: 8 rows lost, 64 won. bf16, in us,
# 256 x 32000 5.9, by 16 KiB 8.1; 512 x 128256 36.6 and 41.8; 64 x 262144 11.0 and 12.4; but 8 x 128256 4.7 and 3.7.
REDUCTION_BYTES, REDUCTION_ROWS = 65536, 1 / 3
# Pieces of a tile, from and to: the number that pads a part least. bf16 50257 in tiles of 8 leaves the last one of 4
# tiles all but empty.
REDUCTION_PIECES = (4, 8)

# Reductions over a strided dim.

# (contiguous bytes that a program reads at a time, bytes that it holds)
COLUMN_BYTES = {
    (1, 2): (128, 65536), (1, 4): (128, 65536), (1, 8): (128, 65536),
    (2, 2): (64, 65536), (2, 4): (128, 65536), (2, 8): (128, 65536),
}  # fmt: skip
COLUMN_NOTE = "64 x 4096 x 512 fp32 0.94, 64 and 32 KiB 0.85; bf16 0.80, 40 KiB 0.76; backward 0.96, 0.85"
COLUMN_MOST_PARTS = 128
# If a mask is read too, bytes held are divided by this. So are the tiles of few columns, for gradients as well.
# Unmeasured; chosen by what sm_90 compiles to.
COLUMN_MASKED_SHARE = 2
# Few columns: tiles at most, columns of one at most by inputs, contiguous bytes of each. dim 1 of 8 x 21 x 512 x 512
# bf16 0.93 (by tiles of 16 columns 0.26), fp32 0.97 (0.71); of 32 x 3 x 262144 bf16 1.00 (0.34). Gradients: 4 x 150 x
# 512 x 512 bf16 0.95 (0.79), fp32 0.96 (0.90); 32 x 3 x 262144 0.97 (0.48); 1024 x 197 x 384 bf16 0.99 (0.91).
COLUMN_FEW_PIECES, COLUMN_FEW, COLUMN_FEW_BYTES = 20, {1: 8, 2: 16}, 256
# logsumexp of few columns reads them one at a time: columns at most, and how many are requested at once if that is all
# of them. 8 x 21 x 262144 bf16 28.6 us (by tiles of 8 columns 98), 4 x 150 x 262144 80 (103).
COLUMN_FEW_READ, COLUMN_FEW_READ_PIECES = 256, 24
# Contiguous bytes, a sector of DRAM, if programs would be fewer than multiprocessors, or more than may share columns:
# 16 x 1000 x 64 bf16 4.95 us (8.7), 1 x 100000 x 32 10.2 us (in 98 parts 15.1).
COLUMN_SCARCE_BYTES = 32
COLUMN_ODD_BYTES = 64  # where 2-byte elements are read one by one: 256 x 1024 x 77 44.5 us (65.2)
# Registers of a thread if four warps hold columns: three programs are resident, with a few registers more only two.
COLUMN_REGISTERS = 168
COLUMN_READ_REGISTERS = 64  # if nothing is held: 32 warps are resident
# logsumexp: positions that a thread has states for; warps a multiprocessor, below which columns are split; groups a
# multiprocessor, from which on programs of 2-byte elements have 4 warps, not 8.
COLUMN_POSITIONS = 4
COLUMN_WARPS = 16
COLUMN_GROUPS = 6
COLUMN_READ_NOTE = (
    "bf16 64 x 4096 x 512 0.91, with 8 positions 4 % less, split 14 %; 32 x 1024 x 2048 0.90, by 8 warps 13 % less; "
    "fp32 0.97, 0.95"
)
# Pieces at most if nothing is held; and if each needs a mask too, which takes registers: fp32 64 x 4001 x 300 by 8
# pieces 3421 GB/s, by 4 3847.
COLUMN_READ_PIECES, COLUMN_MASKED_PIECES = 8, 4

# The ladders that a table may hold, and the figures of a rung: a program of `warps` holds a row, or a part of one.
TUNABLE = {
    "row_warps": ("columns", "warps"),
    "split_parts": ("columns", "part_columns", "warps"),
    "prefetch_bytes": ("row_bytes", "bytes"),
}
HELD_BYTES = 512  # of a thread at most: 128 of its 255 registers


@dataclass(frozen=True)
class Table:
    """Ladders that stand in for the built-in ones, by (name in TUNABLE, inputs, itemsize). Made by `table_of`."""

    ladders: tuple[tuple[tuple[str, int, int], Ladder], ...]

    def get(self, name: str, inputs: int, itemsize: int) -> Ladder | None:
        return dict(self.ladders).get((name, inputs, itemsize))

    def data(self) -> list[dict[str, Any]]:
        """As `table_of` takes it, for a JSON file: an unbounded size is null."""
        return [
            {
                "name": name, "inputs": inputs, "itemsize": itemsize, "note": ladder.note,
                "rungs": [[None if size == UNBOUNDED else size for size in rung] for rung in ladder],
            }
            for (name, inputs, itemsize), ladder in self.ladders
        ]  # fmt: skip


def built_in(inputs: int, itemsize: int) -> Table:
    """The ladders that a table can stand in for, as they are without one."""
    held = inputs, itemsize
    ladders = {("row_warps", *held): ROW_WARPS[held], ("prefetch_bytes", *held): prefetch_bytes(held)}
    if held in SPLIT_PARTS:
        ladders["split_parts", *held] = SPLIT_PARTS[held]
    return Table(tuple(ladders.items()))


def row_warps(held: tuple[int, int], table: Table | None = None) -> Ladder:
    """The ladder of one program's warps for (inputs, itemsize): the table's, or the built-in one."""
    return (table and table.get("row_warps", *held)) or ROW_WARPS[held]


def split_parts(held: tuple[int, int], table: Table | None = None, *, shifted: bool = False) -> Ladder:
    """The ladder of parts for (inputs, itemsize). A table was measured on even rows, and holds for these alone."""
    if shifted:
        return SHIFTED_SPLIT_PARTS[held]
    return (table and table.get("split_parts", *held)) or SPLIT_PARTS[held]


def prefetch_bytes(held: tuple[int, int], table: Table | None = None) -> Ladder:
    """The ladder of bytes to fetch ahead for (inputs, itemsize)."""
    return (table and table.get("prefetch_bytes", *held)) or PREFETCH_BYTES_OF.get(held, PREFETCH_BYTES)


def table_of(data: Any) -> Table:
    """The table that `Table.data` wrote. ValueError for data that no planner could follow, saying what is wrong."""
    if not isinstance(data, list):
        raise ValueError(f"a table is a list of ladders, not {type(data).__name__}")
    ladders: dict[tuple[str, int, int], Ladder] = {}
    for each in data:
        if not isinstance(each, dict) or each.get("name") not in TUNABLE:
            raise ValueError(f"a ladder's name is one of {', '.join(TUNABLE)}; got {each!r:.80}")
        name, inputs, itemsize = each["name"], each.get("inputs", 0), each.get("itemsize", 0)
        known = SPLIT_PARTS if name == "split_parts" else ROW_WARPS
        if [inputs, itemsize] not in map(list, known) or (name, inputs, itemsize) in ladders:
            raise ValueError(f"{name} is for {', '.join(map(str, known))}, each once; got {(inputs, itemsize)}")
        ladders[name, inputs, itemsize] = _checked(name, inputs, itemsize, each.get("rungs"), str(each.get("note", "")))
    return Table(tuple(ladders.items()))


def _checked(name: str, inputs: int, itemsize: int, rungs: Any, note: str) -> Ladder:
    width = len(TUNABLE[name])
    if not isinstance(rungs, list) or not rungs or any(not isinstance(r, list) or len(r) != width for r in rungs):
        raise ValueError(f"{name} is a list of rungs of {', '.join(TUNABLE[name])}; got {rungs!r:.80}")
    rungs = [[UNBOUNDED, *r[1:]] if r[0] is None else r for r in rungs]
    if any(type(size) is not int or size < 0 for rung in rungs for size in rung):
        raise ValueError(f"{name} has whole numbers of at least 0; got {rungs!r:.80}")
    ends = [rung[0] for rung in rungs]
    if ends != sorted(set(ends)) or ends[0] < 1:
        raise ValueError(f"{name} has rungs of rising sizes; got {ends}")
    if (ends[-1] == UNBOUNDED) != (name != "row_warps"):
        last = "bounded" if name == "row_warps" else "for all sizes"
        raise ValueError(f"the last rung of {name} is {last}; got {ends}")
    for end, *rest in rungs:
        if name == "prefetch_bytes":
            continue
        held, warps = (end, rest[0]) if name == "row_warps" else rest
        if warps not in (1, 2, 4, 8, 16, 32):
            raise ValueError(f"{name} has 1, 2, 4, 8, 16 or 32 warps; got {warps}")
        if not 1 <= held * itemsize * inputs <= 32 * warps * HELD_BYTES:
            raise ValueError(f"{name}: {warps} warps do not hold {held} columns of {inputs} x {itemsize} bytes")
        if name == "split_parts" and held % 64:
            raise ValueError(f"{name} has parts of whole cache lines, multiples of 64 columns; got {held}")
    return Ladder(*map(tuple, rungs), note=note)
