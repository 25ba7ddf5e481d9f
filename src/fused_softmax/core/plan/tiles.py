"""Short rows, several for each program: the shapes of programs for each kind of work, and the measurements behind them.

A program's lanes have one access of a tile each, or a few. The fewer columns a tile has, the fewer steps a reduction
over its lanes takes, and the more rows share the lanes. If rows are read by elements, one access is one element.
Figures are TB/s of an H200 at 64 Mi elements of 2 bytes, or 32 Mi elements of 4 bytes: a width, and its speed.
"""

from typing import Literal

from fused_softmax.core.plan.ladders import Ladder

# reduction: logsumexp, or losses alone. lse_gradient: logsumexp's. gradient: softmax's.
Work = Literal["forward", "gradient", "loss", "reduction", "lse_gradient"]
Alignment = Literal["even", "shifted", "scalar"]

TILE_COLS = 512  # rows longer than this get programs of their own
TILE_BYTES = 2048  # of a one-warp program of short rows for which no ladder has a rung
TILE_NOTE = "bf16 128 1.00, 256 1.00, fp32 128 1.00 of a copy"
TILE_BLOCK_COLS = 128

_BY_ELEMENTS = (
    "bf16 by elements: 5 3.0, 9 3.0, 21 2.6, 33 3.0, 49 2.5, 97 3.1; by one-warp programs 1.0, 0.8, 0.9, 1.5, 2.1, 3.1"
)
_RAGGED = "136 0.96, 264 0.98, 520 0.985 of a copy; by one-warp programs 0.84, 0.82, 0.81"
_SHIFTED = "131 3.6, 147 3.6, 197 3.6, 255 3.6, 287 3.8, 387 3.9; before 3.5, 2.6, 3.6, 3.6, 3.6, 3.8"

# (columns up to, rows, columns of a tile, warps)
TILES: dict[tuple[Work, Alignment, int], Ladder] = {
    ("forward", "even", 2): Ladder(
        (96, 16, 64, 4), (128, 8, 128, 1), (160, 8, 64, 2), (448, 8, 128, 4), (1016, 4, 256, 4), note=_RAGGED
    ),
    ("forward", "even", 4): Ladder(
        (128, 4, 128, 1), (160, 4, 128, 2), (320, 4, 128, 4), (636, 2, 128, 2),
        note="136 1.00, 264 1.00 of a copy; by one-warp programs 0.84, 0.82",
    ),
    ("forward", "scalar", 2): Ladder(
        (5, 256, 1, 8), (10, 64, 2, 4), (12, 64, 4, 4), (23, 32, 4, 4), (49, 16, 8, 4), (63, 16, 16, 4),
        (104, 8, 16, 4), note=_BY_ELEMENTS,
    ),
    ("forward", "scalar", 4): Ladder(
        (5, 128, 1, 4), (11, 64, 2, 4), (24, 32, 4, 4), (48, 16, 8, 4), (64, 8, 16, 4),
        note="fp32 by elements: 3 3.8, 9 3.8, 20 3.8, 40 3.9; by one-warp programs 2.3, 1.5, 1.9, 3.2",
    ),
    ("forward", "shifted", 1): Ladder((1024, 4, 128, 4)),
    ("forward", "shifted", 2): Ladder((224, 16, 64, 4), (352, 8, 64, 2), (1024, 4, 128, 2), note=_SHIFTED),
    ("forward", "shifted", 4): Ladder(
        (23, 16, 8, 1), (35, 16, 32, 2), (48, 8, 16, 1), (64, 8, 64, 1), (131, 4, 128, 1), (160, 2, 128, 1),
        (512, 4, 128, 4), (1024, 2, 1024, 4),
        note="17 3.4, 33 3.9, 37 3.5, 781 4.0; by blocks of the whole row 2.4, 3.6, 2.9",
    ),
    ("forward", "shifted", 8): Ladder((64, 4, 64, 1), (128, 2, 128, 1), (512, 1, 128, 1), note="unmeasured"),
    ("gradient", "scalar", 2): Ladder(
        (5, 128, 1, 4), (8, 64, 4, 4), (12, 32, 4, 4), (15, 32, 8, 4), (36, 16, 8, 4), (64, 8, 16, 4),
        (128, 8, 128, 1),
        note="bf16 by elements: 3 3.6, 9 2.7, 21 3.1, 33 2.8, 41 3.1; by one-warp programs 2.0, 1.3, 1.7, 2.4, 2.9",
    ),
    ("gradient", "scalar", 4): Ladder(
        (5, 128, 1, 4), (8, 64, 4, 4), (24, 32, 4, 4), note="fp32 by elements: 3 4.2, 7 4.1, 9 4.2; by one warp 9 3.3"
    ),
    ("gradient", "shifted", 2): Ladder(
        (224, 16, 64, 4), (352, 8, 64, 2), (448, 16, 128, 4), (1024, 4, 128, 4),
        note="131 3.8, 147 3.8, 255 3.9; before 3.7, 3.5, 3.8",
    ),
    ("gradient", "shifted", 4): Ladder(
        (28, 32, 16, 2), (36, 16, 16, 2), (52, 8, 32, 2),
        note="17 3.9, 33 4.0, 45 4.1; by one-warp programs 3.8, 3.8, 4.0",
    ),
    ("loss", "even", 2): Ladder(
        (10, 128, 8, 4), (48, 32, 16, 2), (128, 32, 32, 2), (384, 8, 64, 2), (576, 2, 128, 1),
        note="24 2.9, 64 3.4, 128 3.6, 256 3.4, 520 3.5; as softmax's 2.4, 2.7, 2.8, 3.3, 2.8",
    ),
    ("loss", "even", 4): Ladder(
        (10, 128, 4, 4), (40, 32, 16, 2), (96, 16, 32, 2), (320, 8, 64, 2), (512, 4, 64, 2),
        note="24 3.8, 64 3.9, 128 3.9, 256 3.9, 384 3.9; as softmax's 2.6, 3.2, 3.4, 3.8, 3.8",
    ),
    ("loss", "scalar", 2): Ladder(
        (5, 128, 1, 4), (12, 64, 2, 4), (24, 16, 4, 2), (40, 16, 8, 2), (72, 8, 8, 2), (128, 16, 16, 2),
        note="9 2.0, 21 1.9, 33 1.8, 49 2.0, 97 2.2, 121 2.3; by one-warp programs 0.2, 0.2, 0.5, 0.8, 1.6, 1.9",
    ),
    ("loss", "scalar", 4): Ladder((5, 128, 1, 4), (11, 64, 2, 4), note="3 2.9, 9 3.3; by one-warp programs 0.6, 0.3"),
    ("loss", "shifted", 2): Ladder(
        (176, 32, 32, 4), (352, 16, 32, 2), (768, 8, 64, 2),
        note="131 2.6, 197 2.9, 255 3.1, 387 3.1, 511 3.2, 700 3.4; as softmax's 1.5, 2.6, 2.0, 2.7, 2.2, 2.5",
    ),
    ("loss", "shifted", 4): Ladder(
        (24, 16, 8, 1), (48, 16, 16, 1), (96, 16, 16, 2), (192, 8, 32, 2), (320, 8, 64, 2),
        note="17 3.0, 33 3.2, 63 3.8, 131 3.9, 261 3.9; as softmax's 1.9, 2.7, 2.3, 3.0, 2.8",
    ),
    ("lse_gradient", "even", 2): Ladder((40, 64, 32, 2), (96, 16, 32, 2), note="72 3.9; as softmax's 3.3"),
    ("reduction", "even", 2): Ladder(
        (15, 256, 8, 2), (40, 64, 8, 2), (96, 32, 32, 2), (160, 16, 32, 2), (320, 8, 64, 2), (704, 4, 128, 2),
        (1024, 2, 256, 2), note="8 3.6, 24 3.9, 264 3.8, 520 3.8, 1000 3.9; by a row a program 520 1.6, 1000 3.0",
    ),
    ("reduction", "even", 4): Ladder(
        (8, 128, 4, 2), (40, 32, 8, 2), (96, 16, 32, 2), (192, 8, 32, 2), (384, 4, 64, 2), (768, 2, 128, 2),
        note="24 3.8, 132 3.8, 300 3.8, 500 3.9, 640 3.9",
    ),
    ("reduction", "even", 8): Ladder((32, 16, 32, 2), (128, 4, 32, 1), (512, 2, 32, 1), note="unmeasured"),
    ("reduction", "scalar", 2): Ladder(
        (7, 256, 1, 2), (23, 128, 1, 1), (46, 64, 2, 1), (84, 32, 4, 1), (128, 16, 8, 1),
        note="9 3.4, 17 3.3, 33 2.9, 49 2.9, 65 2.6, 97 2.9, 121 3.0; by blocks of the whole row 0.3 to 1.8",
    ),
    ("reduction", "scalar", 4): Ladder(
        (5, 256, 1, 2), (11, 128, 1, 2), note="3 4.0, 9 4.0; by one-warp programs 1.5, 0.9"
    ),
    ("reduction", "shifted", 2): Ladder(
        (150, 32, 16, 2), (304, 16, 32, 2), (544, 8, 64, 2), (1024, 4, 128, 2),
        note="129 3.5, 197 3.8, 255 3.9, 387 4.0, 511 3.9, 900 3.8; as softmax's 2.3, 3.4, 2.9, 3.6, 2.8, 3.6",
    ),
    ("reduction", "shifted", 4): Ladder(
        (40, 64, 8, 1), (96, 32, 16, 2), (320, 8, 32, 2), (1024, 4, 64, 2),
        note="17 3.7, 33 3.5, 63 3.7, 131 3.8, 261 3.8; as softmax's 1.8, 2.8, 2.9, 3.1, 3.2",
    ),
}  # fmt: skip


def longest(work: Work, alignment: Alignment, itemsize: int) -> int:
    """Columns up to which all rows share programs."""
    if alignment == "shifted":
        return TILES["forward", "shifted", itemsize].end
    if work == "reduction" and alignment == "even" and ("reduction", "even", itemsize) in TILES:
        return TILES["reduction", "even", itemsize].end
    return TILE_COLS


def tiles_of(work: Work, alignment: Alignment, itemsize: int, n_cols: int) -> Ladder | None:
    """The ladder that has a rung for such a row: the work's own, else softmax's; None if neither has one."""
    for each in (work, "forward"):
        ladder = TILES.get((each, alignment, itemsize))
        # Of even rows, softmax's ladder has those that tiles of 128 columns do not divide; its gradient has none.
        whole = (
            each == "forward"
            and alignment == "even"
            and (n_cols <= TILE_BLOCK_COLS // 2 or n_cols % TILE_BLOCK_COLS == 0 or work == "gradient")
        )
        if ladder and n_cols <= ladder.end and not whole:
            return ladder
    return None
