"""How reductions over a strided dim meet the chip: a pure function from sizes and a device to a frozen plan."""

from dataclasses import dataclass, field
from typing import Literal

from fused_softmax.core.plan.device import Device
from fused_softmax.core.plan.ladders import (
    COLUMN_BYTES,
    COLUMN_FEW,
    COLUMN_FEW_BYTES,
    COLUMN_FEW_PIECES,
    COLUMN_FEW_READ,
    COLUMN_FEW_READ_PIECES,
    COLUMN_GROUPS,
    COLUMN_MASKED_PIECES,
    COLUMN_MASKED_SHARE,
    COLUMN_MOST_PARTS,
    COLUMN_NOTE,
    COLUMN_ODD_BYTES,
    COLUMN_POSITIONS,
    COLUMN_READ_NOTE,
    COLUMN_READ_PIECES,
    COLUMN_READ_REGISTERS,
    COLUMN_REGISTERS,
    COLUMN_SCARCE_BYTES,
    COLUMN_WARPS,
)
from fused_softmax.core.plan.sizes import VECTOR_BYTES, next_power_of_2


@dataclass(frozen=True)
class ColumnPlan:
    """A reduction over a strided dim of [n_outer, n_cols, n_inner]: a program covers part_cols by block_inner of one.

    inputs: tensors of this shape that are read.
    block_cols: columns of one of the `pieces`; full_pieces, how many leading ones need no mask in any part.
    parts: programs that share their columns' reductions; lanes: of a row of the tile of messages that each awaits.
    holds: whether a program holds the columns until all is reduced; only logsumexp does not.
    reasons: why the plan is as it is, a sentence for each decision; they do not count when plans are compared.
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
    holds: bool = True
    strategy: Literal["column"] = "column"
    reasons: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @property
    def groups(self) -> int:
        """Blocks of inner positions over all of outer, each the work of `parts` programs."""
        return self.n_outer * -(-self.n_inner // self.block_inner)

    @property
    def programs(self) -> int:
        """Programs in the grid."""
        return self.groups * self.parts

    @property
    def slots(self) -> tuple[int, int]:
        """(groups of programs that exchange, 64-bit messages of each)."""
        return self.groups, self.parts * self.block_inner if self.parts > 1 else 0

    @property
    def sizes(self) -> dict[str, int]:
        """What kernels are told of the plan, by the names of their parameters."""
        return {
            "n_cols": self.n_cols, "n_inner": self.n_inner, "n_parts": self.parts, "part_cols": self.part_cols,
            "n_programs": self.programs,
        }  # fmt: skip

    def for_rows(self, n_rows: int) -> None:
        """No plan of columns holds for other sizes."""

    def most_registers(self, device: Device, besides: int = 0) -> int | None:
        """Registers of a thread that the plan's kernel is held to; None: what it takes."""
        if device.backend != "cuda" or self.itemsize == 8:
            return None
        if not self.holds and self.num_warps >= 4:
            return COLUMN_READ_REGISTERS
        return COLUMN_REGISTERS if self.num_warps == 4 else None


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
    masked: bool = False,
    **choices: int,
) -> ColumnPlan | None:
    """The plan for reductions over the middle dim; None if too many programs would have to wait for each other.

    holds: whether a program holds what it reads until all is reduced. logsumexp does not, and splits as it likes.
    masked: whether a mask is read too, or masked elements are looked for. Both take registers from those that hold
    columns.
    access: elements that lie side by side at an aligned address, wherever a program reads; at most 16 bytes count.
    choices: inner_bytes, held_bytes, num_warps and vector overrule the constants; the tuner and the tests use it.

    >>> plan_columns(64, 4096, 512, 4, H200).parts
    8
    """
    tile = _held_tile if holds else _read_tile
    inner, block_cols, num_warps, most = tile(
        n_outer, n_cols, n_inner, itemsize, device, inputs, access, masked, choices
    )  # fmt: skip
    parts = -(-n_cols // (most * block_cols))
    if not holds:
        whole = itemsize == 2 or n_inner % inner == 0
        few = block_cols == 1 and n_cols <= COLUMN_FEW_READ_PIECES
        at_once = COLUMN_FEW_READ_PIECES if few else COLUMN_READ_PIECES if whole else COLUMN_MASKED_PIECES
        most = min(at_once, -(-n_cols // block_cols))
        wanted = -(-COLUMN_WARPS // num_warps * device.sm_count // (n_outer * -(-n_inner // inner)))
        parts = max(1, min(wanted, -(-n_cols // (most * block_cols))))
        if itemsize == 8 or device.backend != "cuda":
            parts = 1
    part_cols = -(-n_cols // (parts * block_cols)) * block_cols
    parts = -(-n_cols // part_cols)
    # Messages are fp32, and AMD's compiler has no 64-bit exchange for addresses like these.
    apart = itemsize < 8 and device.backend == "cuda" and parts <= min(COLUMN_MOST_PARTS, device.sm_count)
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
        lanes=max(next_power_of_2(parts), 32 * num_warps // inner),  # no lane twice: copies could differ
        num_warps=num_warps,
        holds=holds,
        reasons=(
            f"column: a reduction over a strided dim, in tiles of {block_cols} columns by {inner} inner positions",
            _why_parts(parts, part_cols, holds),
            f"{num_warps} warps, which {'hold' if holds else 'read'} up to {inner * itemsize} contiguous bytes of each "
            f"column ({COLUMN_NOTE if holds else COLUMN_READ_NOTE})",
        ),
    )


def _held_tile(
    n_outer: int, n_cols: int, n_inner: int, itemsize: int, device: Device, inputs: int, access: int,
    masked: bool, choices: dict[str, int],
) -> tuple[int, int, int, int]:  # fmt: skip
    """(inner positions, columns, warps, pieces at most) of a tile of columns that are held."""
    vector = choices.get("vector", VECTOR_BYTES // itemsize)
    inner_bytes, held_bytes = COLUMN_BYTES[inputs, itemsize]
    built_in = not choices
    wide = access * itemsize >= 4
    block_cols = next_power_of_2(-(-n_cols // (COLUMN_FEW_PIECES // (COLUMN_MASKED_SHARE if masked else 1))))
    if built_in and wide and block_cols <= COLUMN_FEW[inputs]:
        warp = 32 * vector // block_cols  # positions that a warp reads of block_cols columns
        inner = min(next_power_of_2(n_inner), max(warp, min(COLUMN_FEW_BYTES // itemsize, 4 * warp)))
        if n_outer * -(-n_inner // inner) >= device.sm_count:
            return inner, block_cols, max(1, inner // warp), -(-n_cols // block_cols)
    if masked and inputs == 1:  # an element that waits to be masked takes a register
        held_bytes = held_bytes // COLUMN_MASKED_SHARE * min(itemsize, 4) // 4
    if not wide:  # elements read one by one wait in 4 bytes each
        held_bytes = held_bytes * 3 // 4
    inner = min(next_power_of_2(n_inner), choices.get("inner_bytes", inner_bytes) // itemsize)
    held, num_warps = choices.get("held_bytes", held_bytes) // (itemsize * inputs), 4
    parts = -(-n_cols * inner // held)
    if built_in and not wide and parts > 1:
        inner, held, vector = min(inner, COLUMN_ODD_BYTES // itemsize), held // 3, vector // 2
    elif built_in and (n_outer * -(-n_inner // inner) * parts < device.sm_count or parts > COLUMN_MOST_PARTS):
        inner, num_warps, vector = min(inner, COLUMN_SCARCE_BYTES // itemsize), 8, max(1, vector // 2)
    return _tile(vector, choices.get("num_warps", num_warps), inner, held, n_cols, n_inner)


def _read_tile(
    n_outer: int, n_cols: int, n_inner: int, itemsize: int, device: Device, inputs: int, access: int,
    masked: bool, choices: dict[str, int],
) -> tuple[int, int, int, int]:  # fmt: skip
    """The same of columns that are read tile by tile."""
    vector = min(choices.get("vector", VECTOR_BYTES // itemsize), COLUMN_POSITIONS)
    inner_bytes, held_bytes = COLUMN_BYTES[inputs, itemsize]
    if not choices and access * itemsize >= 4 and n_cols <= COLUMN_FEW_READ:
        for num_warps in (4, 2, 1):  # one column at a time: no states of a position need merging
            inner = 32 * num_warps * vector
            if inner <= n_inner and n_outer * -(-n_inner // inner) >= device.sm_count:
                return inner, 1, num_warps, n_cols
    inner, num_warps = min(next_power_of_2(n_inner), choices.get("inner_bytes", inner_bytes) // itemsize), 4
    if itemsize == 2 and n_outer * -(-n_inner // inner) < COLUMN_GROUPS * device.sm_count:
        num_warps = 8
    if access * itemsize < 4:
        held_bytes = held_bytes * 3 // 4
    held = choices.get("held_bytes", held_bytes) // (itemsize * inputs)
    return _tile(vector, choices.get("num_warps", num_warps), inner, held, n_cols, n_inner)


def _tile(
    vector: int, num_warps: int, inner: int, held: int, n_cols: int, n_inner: int
) -> tuple[int, int, int, int]:  # fmt: skip
    """The tile for at most so many warps: fewer if columns do not fill them, or more inner positions."""
    while num_warps > 1 and next_power_of_2(n_cols) * inner <= held // 2 and num_warps * 32 * vector > n_cols * inner:
        num_warps //= 2
    elements = 32 * num_warps * vector
    inner = max(inner, min(next_power_of_2(n_inner), elements // next_power_of_2(n_cols)))
    block_cols = max(1, min(next_power_of_2(n_cols), elements // inner))
    return inner, block_cols, num_warps, max(1, held // (inner * block_cols))


def _why_parts(parts: int, part_cols: int, holds: bool) -> str:
    if parts == 1:
        return "one part: a program holds all columns" if holds else "one part: programs enough without a split"
    more = "more than one program holds" if holds else f"so that {COLUMN_WARPS} warps a multiprocessor have work"
    return f"{parts} parts of {part_cols} columns, {more}"
