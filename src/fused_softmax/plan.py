"""Which kernel, with which blocks, for which shape: a pure function from sizes and a device to a frozen plan.

Standard library only. A ladder is a module constant, each rung beside the measurement that set it (MEASURED.md).
Allocation, launch, tests, the bench and `fused-softmax plan` all read the one record that `plan_rows` returns.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

Strategy = Literal["tile", "row", "split", "stream"]
Alignment = Literal["even", "shifted", "scalar"]

_CHOICES = {"part_cols", "block_rows", "block_cols", "num_warps", "copies", "lanes", "patient", "prefetch"}
VECTOR_BYTES = 16  # the widest access of one thread


class Ladder(tuple[tuple[Any, ...], ...]):
    """Rungs, each first the largest size it holds for, and what was measured on them: widths, and ratios to a copy."""

    note: str

    def __new__(cls, *rungs: tuple[Any, ...], note: str = "") -> "Ladder":
        ladder = super().__new__(cls, rungs)
        ladder.note = note
        return ladder


# What a table may hold, and the figures of a rung: a program of `warps` holds a row, or a part of one, in registers.
TUNABLE = {
    "row_warps": ("columns", "warps"),
    "split_parts": ("columns", "part_columns", "warps"),
    "prefetch_bytes": ("row_bytes", "bytes"),
}
UNBOUNDED = 2**62  # a last rung for all sizes above the others
_HELD_BYTES = 512  # of a thread at most: 128 of its 255 registers


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


def table_of(data: Any) -> Table:
    """The table that `Table.data` wrote. ValueError for what no planner could follow, saying what is wrong."""
    if not isinstance(data, list):
        raise ValueError(f"a table is a list of ladders, not {type(data).__name__}")
    ladders: dict[tuple[str, int, int], Ladder] = {}
    for each in data:
        if not isinstance(each, dict) or each.get("name") not in TUNABLE:
            raise ValueError(f"a ladder's name is one of {', '.join(TUNABLE)}; got {each!r:.80}")
        name, inputs, itemsize = each["name"], each.get("inputs", 0), each.get("itemsize", 0)
        known = _SPLIT_PARTS if name == "split_parts" else _ROW_WARPS
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
        if not 1 <= held * itemsize * inputs <= 32 * warps * _HELD_BYTES:
            raise ValueError(f"{name}: {warps} warps do not hold {held} columns of {inputs} x {itemsize} bytes")
        if name == "split_parts" and held % 64:
            raise ValueError(f"{name} has parts of whole cache lines, multiples of 64 columns; got {held}")
    return Ladder(*map(tuple, rungs), note=note)


@dataclass(frozen=True)
class Device:
    """What the planner needs to know of a GPU. `registers` (32-bit) and `shared_bytes` are per multiprocessor."""

    name: str
    backend: Literal["cuda", "hip"]
    capability: tuple[int, int]
    sm_count: int
    registers: int = 65536
    shared_bytes: int = 228 * 1024
    l2_bytes: int = 50 * 2**20
    copy_bytes_per_second: float | None = None
    table: Table | None = None  # ladders that were measured on this very GPU


H200 = Device("NVIDIA H200", "cuda", (9, 0), 132, l2_bytes=60 * 2**20, copy_bytes_per_second=4.2e12)


@dataclass(frozen=True)
class RowPlan:
    """One decision: a program covers `block_rows` rows by `part_cols` columns, in `pieces` pieces of `block_cols`.

    inputs: tensors of this shape that are read, and held until the result is written: 2 in backward.
    full_pieces: how many leading pieces of a part need no mask, in any part of any row.
    parts: programs that share one row; 1 in tile and row.
    copies: copies of a row's slots, each polled by its share of the row's programs (split).
    lanes: lanes that poll a row's slots, one a part; 32 are polled by every warp, more by each warp its own.
    patient: whether programs await the last part of their row before they poll the others.
    prefetch: how many programs ahead, in launch order, a program asks L2 to fetch; 0 is none.
    vector: elements of one access; 1 where rows of input and output are not aligned alike ("scalar").
    alignment: "even", every row starts and ends on 16 bytes; "shifted", an aligned body with guarded edges.
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
    patient: bool
    num_warps: int
    prefetch: int

    @property
    def programs(self) -> int:
        """Programs in the grid."""
        return -(-self.n_rows // self.block_rows) * self.parts

    @property
    def slots_per_row(self) -> int:
        """64-bit messages that the programs of one row exchange."""
        return self.parts * self.copies if self.strategy == "split" else 0

    @property
    def reads(self) -> int:
        """Elements read from memory, counting every read of the input."""
        return self.n_rows * self.n_cols * self.inputs * (2 if self.strategy == "stream" else 1)

    @property
    def writes(self) -> int:
        """Elements written to memory."""
        return self.n_rows * self.n_cols


# (inputs, itemsize): (columns up to, warps): how many warps hold one row. H200, 128 Mi elements, ratio to the copy.
_ROW_WARPS = {
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
# (inputs, itemsize): columns more than, up to, whose one program would leave no room for a second on its
# multiprocessor, and hold too little to fill it: split they are faster. 24000 0.97, by one program 0.94, of log 0.88.
_RATHER_SPLIT = {(2, 2): (16384, 28672)}
# Triton 3.9 spills a few bytes of longer rows on sm_80 and sm_100: on other GPUs than were measured they are split.
_UNMEASURED_ROW_COLS = {(2, 2): 8192}
# (inputs, itemsize): (columns up to, part columns, warps): how a row is split where rows are enough to fill the chip.
_SPLIT_PARTS = {
    (1, 2): Ladder((65536, 8192, 4), (2**62, 16384, 4), note="65536 0.98; 131072 0.97, 262144 0.96, 1 Mi 0.93"),
    (1, 4): Ladder((262144, 8192, 4), (2**62, 16384, 4), note="65536 1.00, 262144 0.98; 524288 0.98, 1 Mi 0.96"),
    (2, 2): Ladder((524288, 8192, 4), (2**62, 16384, 8), note="20000 0.96, 65536 0.97, 524288 0.93; 1 Mi 0.93"),
    (2, 4): Ladder((131072, 8192, 4), (2**62, 8192, 8), note="65536 0.99, 131072 0.98; 262144 0.96, 1 Mi 0.93"),
}
_SHIFTED_SPLIT_PARTS = {  # the edges are the first part's work, and long parts hide it
    **_SPLIT_PARTS,
    (1, 2): Ladder((2**62, 16384, 4), note="bf16 50257 0.95, with parts of 8192 0.91"),
    (2, 2): Ladder(
        (131072, 16384, 4), (524288, 8192, 4), (2**62, 16384, 4), note="bf16 50257 0.96, with parts of 8192 0.93"
    ),
    (2, 4): Ladder((2**62, 4096, 4), note="fp32 100003 0.95, with parts of 8192 0.90"),
}
# (part columns, warps) for few rows, smallest first.
_FEW_ROWS_PARTS = Ladder(
    (1024, 1), (2048, 4), (4096, 4), (8192, 4), note="1 x 32768 2.5 us, 1 x 1 Mi fp32 6.0 us, 132 x 32768 11.3 us"
)
_FEW_ROWS_MOST_PARTS = 256
_FEW_ROWS_COLS = 8192  # rows no longer than this are not worth an exchange: 1 x 16384 bf16 row 2.9 us, split 2.3

# (registers of values held by a thread up to, registers of a thread at most, as compiled): what bounds residency.
# A part read by elements takes up to them all: each element has an address and a mask of its own.
_SPLIT_REGISTERS = ((32, 96), (64, 128), (128, 176), (2**62, 255))

# inputs: (registers of values held by a thread, of a thread at most): what the compiler is held to where it would take
# more than it needs, and fewer programs reside. For parts of 2-byte rows: bf16 262144 0.93 -> 0.96, backward 524288
# 0.91 -> 0.93, 50257 0.92 -> 0.96.
_HELD_TO = {1: {32: 56, 64: 88}, 2: {64: 80, 104: 128}}

_TILE_BYTES = 2048  # of a one-warp program of short rows
_TILE_NOTE = "bf16 128 1.00, 256 1.00, fp32 128 1.00"
_TILE_COLS = 512  # rows longer than this get programs of their own
# itemsize: columns from which an aligned body with guarded edges beats reading by elements; bf16 99 0.74, by body 0.65.
_LEAST_SHIFTED = {1: 256, 2: 128, 4: 12, 8: 4}
# itemsize: (columns up to, rows or 0 for _TILE_BYTES of them, columns of a block, warps), for short rows with edges
# that are guarded one by one: they share programs longer, and more of them.
_SHIFTED_TILES = {
    1: Ladder((1024, 4, 128, 4)),
    2: Ladder(
        (160, 8, 128, 1), (224, 8, 64, 1), (448, 16, 128, 4), (1024, 4, 128, 4),
        note="131 0.84, 195 0.88, 387 0.93, 515 0.97, 781 0.98",
    ),
    4: Ladder((160, 0, 128, 1), (512, 4, 128, 4), (1024, 2, 1024, 4), note="781 1.00"),
    8: Ladder((512, 0, 128, 1)),
}  # fmt: skip
# (row bytes up to, columns of a block, warps, bytes of a program) of what reads rows and writes none; ratio to a read.
_REDUCTION_TILES = (
    (128, 32, 2, 4096),
    (256, 32, 2, 4096),
    (1024, 32, 1, 4096),
    (2**62, 32, 1, 8192),
)  # fmt: skip  bf16 64 0.91, 128 0.93, 256 0.95, 512 0.95; fp32 64 0.92, 128 0.94, 512 0.97
_REDUCTION_TILE_COLS = 512
# (row bytes up to, warps): fp32 1024 0.99; bf16 4096 0.97, 32000 0.96
_REDUCTION_WARPS = ((4096, 1), (8192, 2), (16384, 4), (2**62, 8))
_REDUCTION_PROGRAMS = 8  # a multiprocessor, fewer than which are split
# And into how many: bf16 131072 0.92, 1 Mi 0.93, by 8 0.90 and 0.81; where 8 are there, 32 would be worse: 32768 0.84.
_REDUCTION_PARTS = 32
# Over a strided dim: (contiguous bytes a program reads at a time, bytes it holds), by (inputs, itemsize).
# 64 x 4096 x 512 fp32 0.94, with 64 and 32 KiB 0.85; bf16 0.80, 40 KiB 0.76. Backward fp32 0.96, bf16 0.85.
_COLUMN_BYTES = {
    (1, 2): (128, 65536), (1, 4): (128, 65536), (1, 8): (128, 65536),
    (2, 2): (64, 65536), (2, 4): (128, 65536), (2, 8): (128, 65536),
}  # fmt: skip
_COLUMN_MOST_PARTS = 64
# logsumexp's there: positions a thread has a state for; warps a multiprocessor, fewer than which are split; and groups
# a multiprocessor from which programs of 2-byte numbers have 4 warps, not 8. bf16 64 x 4096 x 512 0.91, with 8
# positions 4 % less, split 14 %; 32 x 1024 x 2048 0.90, by 8 warps 13 % less. fp32 0.97, 0.95.
COLUMN_POSITIONS = 4
_COLUMN_WARPS = 16
_COLUMN_GROUPS = 6
# itemsize: (columns up to, rows, columns of a block, warps), for short even rows that no block of 128 divides.
_RAGGED_TILES = {
    2: Ladder(
        (160, 8, 64, 2), (448, 8, 128, 4), (1016, 4, 256, 4),
        note="136 0.96, 264 0.98, 520 0.985; by one-warp programs 0.84, 0.82, 0.81",
    ),
    4: Ladder(
        (160, 4, 128, 2), (320, 4, 128, 4), (636, 2, 128, 2), note="136 1.00, 264 1.00; by one-warp programs 0.84, 0.82"
    ),
}  # fmt: skip
# (row bytes up to, bytes): how far ahead, in launch order, programs ask L2 to fetch. 17 MB and more collapses.
_PREFETCH_BYTES = Ladder((8 * 1024, 8 << 20), (2**62, 12 << 20), note="bf16 16384 0.97 at 8 MiB, 0.99 at 12")
_PREFETCH_BYTES_OF = {  # where it is another
    (2, 2): Ladder((8192, 8 << 20), (1 << 20, 12 << 20), (2**62, 6 << 20), note="1 Mi 0.93 at 6 MiB, 0.92 at 12"),
}
_READERS_PER_COPY = (
    4  # programs that poll one copy of a row's slots: 16 copies of 64 slots, bf16 1 Mi 0.92, 1 copy 0.89
)
_PATIENT_PARTS = 32  # parts from which programs await the last part first: bf16 1 Mi 0.92, without 0.90


def plan_rows(
    n_rows: int, n_cols: int, itemsize: int, device: Device, *, alignment: Alignment = "even", inputs: int = 1
) -> RowPlan:
    """The plan for softmax over rows of n_cols elements of `itemsize` bytes; n_rows and n_cols are at least 1.

    inputs: 1, or 2 for what reads two tensors of the shape, as backward does.

    >>> plan_rows(4096, 131072, 2, H200).strategy
    'split'
    """
    return _decide(n_rows, n_cols, itemsize, device, alignment, inputs)[0]


def why(
    n_rows: int, n_cols: int, itemsize: int, device: Device, *, alignment: Alignment = "even", inputs: int = 1
) -> list[str]:
    """What `plan_rows` decides for these arguments and on which measurement, a sentence for each decision.

    >>> why(4096, 32768, 2, H200)[0]
    'row: a row of at most 32768 columns fits one program'
    """
    plan, reason = _decide(n_rows, n_cols, itemsize, device, alignment, inputs)
    held = plan.inputs, plan.itemsize
    said = [f"{plan.strategy}: {reason}"]
    if plan.alignment == "scalar":
        said.append("read by elements: rows of input and output lie differently against 16 bytes, or are very short")
    elif plan.alignment == "shifted":
        said.append("rows do not start on 16 bytes: an aligned body, read 16 bytes at a time, with guarded edges")
    if plan.strategy == "row":
        said.append(_rung_text(f"{plan.num_warps} warps", _row_warps(held, device), n_cols, "columns"))
    elif plan.strategy == "split" and _split(n_rows, n_cols, held, device, plan.alignment)[2]:
        said.append(f"parts of {plan.part_cols} columns, so that few rows fill the chip ({_FEW_ROWS_PARTS.note})")
    elif plan.strategy == "split":
        ladder = _split_parts(held, device, plan.alignment)
        said.append(_rung_text(f"{plan.parts} parts of {plan.part_cols} columns", ladder, n_cols, "columns"))
    elif plan.strategy == "tile" and plan.alignment == "shifted":
        said.append(_rung_text(f"{plan.block_rows} rows a program", _SHIFTED_TILES[itemsize], n_cols, "columns"))
    elif plan.strategy == "tile" and plan.alignment == "even" and _ragged(n_cols, itemsize, inputs):
        said.append(_rung_text(f"{plan.block_rows} rows a program", _RAGGED_TILES[itemsize], n_cols, "columns"))
    elif plan.strategy == "tile":
        said.append(f"{plan.block_rows} rows a program of one warp, {_TILE_BYTES} bytes of them ({_TILE_NOTE})")
    if plan.patient:
        said.append(f"{_PATIENT_PARTS} parts or more await the last one first")
    if plan.prefetch:
        fetched = _prefetch_bytes(held, device)
        ahead = f"{_rung(fetched, n_cols * itemsize)[1] >> 20} MiB ahead are fetched into L2"
        said.append(_rung_text(ahead, fetched, n_cols * itemsize, "bytes"))
    return said


def _rung_text(what: str, ladder: Ladder, size: int, unit: str) -> str:
    end = _rung(ladder, size)[0]
    upto = f"for rows of at most {end} {unit}" if end < 2**40 else "for all longer rows"
    return f"{what} {upto}" + (f" ({ladder.note})" if ladder.note else "")


def _decide(
    n_rows: int, n_cols: int, itemsize: int, device: Device, alignment: Alignment, inputs: int
) -> tuple[RowPlan, str]:
    """The plan, and why it has its strategy."""

    def plan(strategy: Strategy) -> RowPlan:
        return candidate(strategy, n_rows, n_cols, itemsize, device, alignment=alignment, inputs=inputs)

    short = _SHIFTED_TILES[itemsize][-1][0] if alignment == "shifted" else _TILE_COLS
    if n_cols <= short:
        return plan("tile"), f"rows of at most {short} columns share programs"
    if alignment == "even" and _ragged(n_cols, itemsize, inputs):
        return plan("tile"), "short rows that blocks of 128 columns do not divide share programs"
    rows = _row_warps((inputs, itemsize), device)
    most = rows[-1][0]
    if rows is _ROW_WARPS[inputs, itemsize] and device.backend == "cuda" and device.capability[0] != H200.capability[0]:
        most = _UNMEASURED_ROW_COLS.get((inputs, itemsize), most)
    fits = n_cols <= most
    above, upto = _RATHER_SPLIT.get((inputs, itemsize), (0, 0))
    rather = rows is _ROW_WARPS[inputs, itemsize] and device.backend == "cuda" and alignment == "even"
    rather = rather and fits and above < n_cols <= upto
    few = n_cols > _FEW_ROWS_COLS and n_rows <= device.sm_count
    if (inputs, itemsize) in _SPLIT_PARTS and (few or rather or not fits):
        split = plan("split")
        if 1 < split.parts <= most_parts(split, device):
            if not fits:
                return split, f"a row of more than {most} columns exceeds one program, and the chip holds it"
            if rather and not few:
                return split, f"a row of {above + 1} to {upto} columns leaves no room for a second beside it"
            return (
                split,
                f"no more rows than the {device.sm_count} multiprocessors, of more than {_FEW_ROWS_COLS} columns",
            )
    if fits:
        return plan("row"), f"a row of at most {most} columns fits one program"
    return plan("stream"), f"a row of more than {most} columns exceeds one program, and its parts the chip: read twice"


def plan_reduction(
    n_rows: int, n_cols: int, itemsize: int, device: Device, *, alignment: Alignment = "even", writes: bool = False
) -> RowPlan:
    """The plan for what reads rows tile by tile and holds none: logsumexp, and (writes) its gradient.

    Rows are split as far as programs are wanted; where parts of a row are merged, the last alone waits for the others.
    """
    if n_cols <= (_SHIFTED_TILES[itemsize][-1][0] if alignment == "shifted" else _REDUCTION_TILE_COLS):
        choices: dict[str, Any] = {"prefetch": 0}
        if alignment == "even":
            width, num_warps, size = _rung(_REDUCTION_TILES, n_cols * itemsize)[1:]
            rows = _power_of_two(size // (n_cols * itemsize) + 1) // 2
            choices |= {"block_cols": width, "num_warps": num_warps, "block_rows": max(1, rows)}
        return candidate("tile", n_rows, n_cols, itemsize, device, alignment=alignment, **choices)
    num_warps = _rung(_REDUCTION_WARPS, n_cols * itemsize)[1]
    tile = 4 * 32 * num_warps * VECTOR_BYTES // itemsize
    few = n_rows < _REDUCTION_PROGRAMS * device.sm_count
    wanted = -(-_REDUCTION_PARTS * device.sm_count // n_rows) if few else 1
    part_cols = max(tile, -(-n_cols // wanted), n_cols // 1024)
    if writes:
        choices = {"num_warps": num_warps, "part_cols": max(tile, n_cols // 4096)}
        return candidate("stream", n_rows, n_cols, itemsize, device, alignment=alignment, **choices)
    if part_cols >= n_cols or (1, itemsize) not in _SPLIT_PARTS:
        plan = candidate("row", n_rows, n_cols, itemsize, device, alignment=alignment, num_warps=num_warps)
    else:
        choices = {"num_warps": num_warps, "part_cols": part_cols, "copies": 1, "patient": False}
        plan = candidate("split", n_rows, n_cols, itemsize, device, alignment=alignment, **choices)
    # Pieces of one tile: those that pad the part least. bf16 50257 in tiles of 8 is 4, the last of them all but empty.
    tiles = {
        p: -(-plan.part_cols // (p * plan.block_cols)) * p for p in range(min(plan.pieces, 4), min(plan.pieces, 8) + 1)
    }
    pieces = min(tiles, key=lambda p: (tiles[p], -p))
    return replace(plan, pieces=pieces, full_pieces=0, prefetch=0)


@dataclass(frozen=True)
class ColumnPlan:
    """A reduction over a strided dim of [n_outer, n_cols, n_inner]: a program covers part_cols by block_inner of one.

    inputs: tensors of this shape that are read.
    block_cols: columns of one of the `pieces`; full_pieces, how many leading ones need no mask in any part.
    parts: programs that share their columns' reductions; lanes: of a row of the tile of messages that each awaits.
    """

    n_outer: int
    n_cols: int
    n_inner: int
    itemsize: int
    inputs: int
    block_cols: int
    block_inner: int
    pieces: int
    full_pieces: int
    parts: int
    part_cols: int
    lanes: int
    num_warps: int
    strategy: Literal["column"] = "column"

    @property
    def groups(self) -> int:
        """Blocks of inner positions over all of outer, each the work of `parts` programs."""
        return self.n_outer * -(-self.n_inner // self.block_inner)

    @property
    def programs(self) -> int:
        """Programs in the grid."""
        return self.groups * self.parts

    @property
    def slots_per_group(self) -> int:
        """64-bit messages that the programs of one group exchange."""
        return self.parts * self.block_inner if self.parts > 1 else 0


def plan_columns(
    n_outer: int,
    n_cols: int,
    n_inner: int,
    itemsize: int,
    device: Device,
    *,
    inputs: int = 1,
    holds: bool = True,
    access: int = 16,
    **choices: int,
) -> ColumnPlan | None:
    """The plan for reductions over the middle dim; None where too many programs would have to wait for each other.

    holds: whether a program holds what it reads until all is reduced; logsumexp does not, and splits as it likes.
    access: elements that lie side by side at an aligned address, wherever a program reads; at most 16 bytes count.
    choices: inner_bytes, held_bytes and num_warps overrule the constants; the tuner and the tests use it.
    """
    vector = choices.get("vector", VECTOR_BYTES // itemsize)
    inner_bytes, held_bytes = _COLUMN_BYTES[inputs, itemsize]
    inner = min(_power_of_two(n_inner), choices.get("inner_bytes", inner_bytes) // itemsize)
    num_warps = 4
    if not holds:
        vector = min(vector, COLUMN_POSITIONS)
        if itemsize == 2 and n_outer * -(-n_inner // inner) < _COLUMN_GROUPS * device.sm_count:
            num_warps = 8
    num_warps = choices.get("num_warps", num_warps)
    if access * itemsize < 4:  # what is read by 2 bytes waits in 4
        held_bytes = held_bytes * 3 // 4
    held = choices.get("held_bytes", held_bytes) // (itemsize * inputs)
    while num_warps > 1 and _power_of_two(n_cols) * inner <= held // 2 and num_warps * 32 * vector > n_cols * inner:
        num_warps //= 2
    piece = 32 * num_warps * vector
    inner = max(inner, min(_power_of_two(n_inner), piece // _power_of_two(n_cols)))
    block_cols = max(1, min(_power_of_two(n_cols), piece // inner))
    most = max(1, held // (inner * block_cols))  # pieces
    parts = -(-n_cols // (most * block_cols))
    if not holds:
        # A mask for every piece takes registers: fp32 64 x 4001 x 300 by 8 pieces 3421 GB/s, by 4 3847.
        most = min(8 if itemsize == 2 or n_inner % inner == 0 else 4, -(-n_cols // block_cols))
        wanted = -(-_COLUMN_WARPS // num_warps * device.sm_count // (n_outer * -(-n_inner // inner)))
        parts = max(1, min(wanted, -(-n_cols // (most * block_cols))))
        if itemsize == 8 or device.backend != "cuda":
            parts = 1
    part_cols = -(-n_cols // (parts * block_cols)) * block_cols
    parts = -(-n_cols // part_cols)
    # Messages are fp32; and AMD's compiler has no exchange of 64 bits for addresses like these.
    apart = itemsize < 8 and device.backend == "cuda" and parts <= min(_COLUMN_MOST_PARTS, device.sm_count)
    if parts > 1 and not apart:
        return None
    return ColumnPlan(
        n_outer=n_outer,
        n_cols=n_cols,
        n_inner=n_inner,
        itemsize=itemsize,
        inputs=inputs,
        block_cols=block_cols,
        block_inner=inner,
        pieces=part_cols // block_cols if holds else most,
        full_pieces=(n_cols - (parts - 1) * part_cols) // block_cols,
        parts=parts,
        part_cols=part_cols,
        lanes=max(_power_of_two(parts), 32 * num_warps // inner),  # no lane twice: copies of one would see it differ
        num_warps=num_warps,
    )


def row_rung_ends(itemsize: int, device: Device, inputs: int = 1) -> list[int]:
    """The last column count of every rung that `plan_rows` climbs where rows are enough to fill the chip, in order."""
    ladders: list[Any] = [_ROW_WARPS[inputs, itemsize], _SHIFTED_TILES[itemsize]]
    ladders += [ladder[inputs, itemsize] for ladder in (_SPLIT_PARTS, _SHIFTED_SPLIT_PARTS) if itemsize < 8]
    ragged = _RAGGED_TILES.get(itemsize, ()) if inputs == 1 else ()
    ends = {rung[0] for ladder in (*ladders, ragged) for rung in ladder} | {_TILE_COLS, _FEW_ROWS_COLS}
    ends |= set(_RATHER_SPLIT.get((inputs, itemsize), ()))
    if ragged:  # a whole number of blocks of 128 columns is a rung of one length
        ends |= set(range(128, ragged[-1][0] + 1, 128))
    ends |= {_LEAST_SHIFTED[itemsize] - 1} | {
        size // itemsize for size, _ in _prefetch_bytes((inputs, itemsize), device)
    }
    if (inputs, itemsize) in _SPLIT_PARTS:  # the longest row that the chip holds
        plan = candidate("split", device.sm_count + 1, 2**26, itemsize, device, inputs=inputs)
        ends.add(most_parts(plan, device) * plan.part_cols)
    return sorted(end for end in ends if end < 2**40)


def reduction_rung_ends(itemsize: int) -> list[int]:
    """The last column count of every rung that `plan_reduction` climbs, in order."""
    sizes = {rung[0] for ladder in (_REDUCTION_TILES, _REDUCTION_WARPS) for rung in ladder}
    ends = {size // itemsize for size in sizes} | {_REDUCTION_TILE_COLS, _SHIFTED_TILES[itemsize][-1][0]}
    return sorted(end for end in ends if end < 2**40)


def most_registers(plan: RowPlan, device: Device) -> int | None:
    """Registers of a thread that a split kernel is held to, as far as nothing spills by it; None: what it takes."""
    if plan.strategy != "split" or plan.itemsize != 2 or device.capability[0] != H200.capability[0]:
        return None
    held = plan.inputs * plan.pieces * plan.block_cols * plan.itemsize // (4 * 32 * plan.num_warps)
    return _HELD_TO[plan.inputs].get(held)


def most_parts(plan: RowPlan, device: Device, registers: int | None = None) -> int:
    """Parts of one row that may wait for each other: half of what is resident at once, so that two streams can.

    registers: of a thread at most; those of softmax's own kernels if None.
    """
    held = -(-plan.inputs * plan.pieces * plan.block_cols * plan.itemsize // (4 * 32 * plan.num_warps))
    registers = registers or (255 if plan.alignment == "scalar" else _rung(_SPLIT_REGISTERS, held)[1])
    resident = device.registers // (32 * plan.num_warps * registers)
    return device.sm_count * max(1, resident) // 2


def candidate(
    strategy: Strategy,
    n_rows: int,
    n_cols: int,
    itemsize: int,
    device: Device,
    *,
    alignment: Alignment = "even",
    inputs: int = 1,
    **choices: Any,
) -> RowPlan:
    """The plan of one strategy, whether or not `plan_rows` would choose it.

    `choices` overrule the ladders: part_cols, block_rows, block_cols, num_warps, copies, lanes, patient, prefetch.
    Tests, the tuner and the bench use it; a plan with impossible choices raises ValueError.
    """
    if n_rows < 1 or n_cols < 1:
        raise ValueError(f"a plan is for at least 1 row of 1 column; got {n_rows} x {n_cols}")
    if strategy not in get_args(Strategy) or choices.keys() - _CHOICES:
        raise ValueError(
            f"strategy is one of {get_args(Strategy)}, choices are of {sorted(_CHOICES)}; got {strategy!r}, {choices}"
        )
    if inputs not in (1, 2):
        raise ValueError(f"1 or 2 inputs are read; got {inputs}")
    if any(choice < (name != "prefetch") for name, choice in choices.items() if name != "patient"):
        raise ValueError(f"choices are at least 1, prefetch 0; got {choices}")
    if alignment == "even" and n_cols % (VECTOR_BYTES // itemsize):
        alignment = "shifted"  # no row of such a length ends where it says
    if alignment == "shifted" and n_cols < _LEAST_SHIFTED[itemsize]:
        alignment = "scalar"
    vector = 1 if alignment == "scalar" else VECTOR_BYTES // itemsize
    body = n_cols // vector * vector  # the longest that the aligned part of a row can be
    block_rows, parts, part_cols, few = 1, 1, body, False
    if strategy == "tile":
        block_cols = min(_power_of_two(body), 128)
        block_rows, num_warps = max(1, _TILE_BYTES // itemsize // (-(-body // block_cols) * block_cols)), 1
        if alignment == "shifted":
            _, wanted, block_cols, num_warps = _rung(_SHIFTED_TILES[itemsize], n_cols)
            block_rows, block_cols = wanted or block_rows, min(_power_of_two(body), block_cols)
        elif alignment == "even" and (rung := _ragged(n_cols, itemsize, inputs)):
            block_rows, block_cols, num_warps = rung[1:]
        num_warps = choices.get("num_warps", num_warps)
        block_cols = choices.get("block_cols", block_cols)
        block_rows = choices.get("block_rows", _power_of_two(block_rows + 1) // 2)
    elif strategy == "row":
        num_warps = choices.get("num_warps", _rung(_row_warps((inputs, itemsize), device), n_cols)[1])
        block_cols = choices.get("block_cols", 32 * num_warps * VECTOR_BYTES // itemsize)
    elif strategy == "split":
        if (inputs, itemsize) not in _SPLIT_PARTS:
            raise ValueError(f"split exchanges fp32 states; itemsize is {itemsize}")
        wanted, num_warps, few = _split(n_rows, n_cols, (inputs, itemsize), device, alignment)
        wanted, num_warps = choices.get("part_cols", wanted), choices.get("num_warps", num_warps)
        block_cols = choices.get("block_cols", 32 * num_warps * VECTOR_BYTES // itemsize)
        # Parts of equal length, whole cache lines, so that all but the last piece of a part need no mask.
        part_cols = -(-body // -(-body // wanted) // 64) * 64
        masked = part_cols % block_cols or body % part_cols
        if masked and part_cols > 15 * block_cols and "part_cols" not in choices:
            # A mask on the last of 16 pieces is 127 registers for 96, on that of 15 it is 80: bf16 262152 0.89, 0.95.
            part_cols = -(-body // -(-body // (wanted - block_cols)) // 64) * 64
        parts = -(-body // part_cols)
    else:
        num_warps = choices.get("num_warps", 8)
        block_cols = choices.get("block_cols", 32 * num_warps * VECTOR_BYTES // itemsize)
        step = 4 * block_cols
        wanted = choices.get("part_cols", max(step, n_cols * n_rows // (8 * device.sm_count), n_cols // 1024))
        part_cols = -(-wanted // step) * step
        parts = -(-body // part_cols)
    copies = choices.get("copies", max(1, min(32, parts // _READERS_PER_COPY))) if strategy == "split" else 1
    lanes = choices.get("lanes", max(32 if few else 32 * num_warps, _power_of_two(parts)))
    if any(size != _power_of_two(size) for size in (block_rows, block_cols, num_warps, lanes)) or num_warps > 32:
        raise ValueError(
            f"blocks, lanes and warps are powers of two, warps at most 32; got {block_rows} rows, "
            f"{block_cols} columns, {lanes} lanes, {num_warps} warps"
        )
    if lanes < max(parts, copies):
        raise ValueError(f"a lane for each of {parts} parts and {copies} copies; got {lanes}")

    pieces = 4 if strategy == "stream" else -(-part_cols // block_cols)
    least_body = body - (vector if alignment == "shifted" else 0)
    shortest = min(part_cols, least_body - (parts - 1) * part_cols)
    full_pieces = 0 if strategy == "stream" else max(0, min(pieces, shortest // block_cols))
    program_bytes = block_rows * part_cols * itemsize * inputs
    fetched = _rung(_prefetch_bytes((inputs, itemsize), device), n_cols * itemsize)[1]
    prefetch = choices.get("prefetch", fetched // program_bytes)
    if strategy == "stream" or alignment == "scalar" or prefetch >= -(-n_rows // block_rows) * parts:
        prefetch = 0
    return RowPlan(
        strategy=strategy,
        n_rows=n_rows,
        n_cols=n_cols,
        itemsize=itemsize,
        inputs=inputs,
        alignment=alignment,
        vector=vector,
        block_rows=block_rows,
        block_cols=block_cols,
        pieces=pieces,
        full_pieces=full_pieces,
        parts=parts,
        part_cols=part_cols,
        copies=copies,
        lanes=lanes,
        patient=choices.get("patient", parts >= _PATIENT_PARTS and not few),
        num_warps=num_warps,
        prefetch=prefetch,
    )


def _split(
    n_rows: int, n_cols: int, held: tuple[int, int], device: Device, alignment: Alignment
) -> tuple[int, int, bool]:
    """Columns of a part, warps of a program, and whether rows are few: then as many parts as fill the chip."""
    _, largest, num_warps = _rung(_split_parts(held, device, alignment), n_cols)
    for part_cols, warps in _FEW_ROWS_PARTS:
        parts = -(-n_cols // part_cols)
        if part_cols < largest and parts <= _FEW_ROWS_MOST_PARTS and n_rows * parts <= 8 * device.sm_count:
            return part_cols, warps, True
    return largest, num_warps, False


def _ragged(n_cols: int, itemsize: int, inputs: int) -> tuple[int, int, int, int] | None:
    """The rung of a short row that blocks of 128 columns do not divide, if it is one."""
    ladder = _RAGGED_TILES.get(itemsize) if inputs == 1 and n_cols > 128 and n_cols % 128 else None
    return _rung(ladder, n_cols) if ladder and n_cols <= ladder[-1][0] else None


def built_in(inputs: int, itemsize: int) -> Table:
    """The ladders that a table can stand in for, as they are without one."""
    held = inputs, itemsize
    ladders = {("row_warps", *held): _ROW_WARPS[held], ("prefetch_bytes", *held): _prefetch_bytes(held)}
    if held in _SPLIT_PARTS:
        ladders["split_parts", *held] = _SPLIT_PARTS[held]
    return Table(tuple(ladders.items()))


def _row_warps(held: tuple[int, int], device: Device) -> Ladder:
    return (device.table and device.table.get("row_warps", *held)) or _ROW_WARPS[held]


def _split_parts(held: tuple[int, int], device: Device, alignment: Alignment) -> Ladder:
    if alignment == "shifted":
        return _SHIFTED_SPLIT_PARTS[held]
    return (device.table and device.table.get("split_parts", *held)) or _SPLIT_PARTS[held]


def _prefetch_bytes(held: tuple[int, int], device: Device | None = None) -> Ladder:
    table = device and device.table and device.table.get("prefetch_bytes", *held)
    return table or _PREFETCH_BYTES_OF.get(held, _PREFETCH_BYTES)


def _rung(ladder, size):
    return next((rung for rung in ladder if size <= rung[0]), ladder[-1])


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
