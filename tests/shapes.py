"""Widths at which the planner changes its mind, read off its own ladders, and tensors that lie as a test wants them."""

from dataclasses import replace

import torch

from fused_softmax.core.layout import alignment_of
from fused_softmax.core.plan import H200, UNBOUNDED, VECTOR_BYTES, RowPlan, candidate, ladders, plan_rows, tiles

ALIGNMENTS = ("even", "shifted", "scalar")
STRATEGIES = ("tile", "row", "split", "stream")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
FEW, MANY = 3, 4096  # rows: fewer than a GPU has multiprocessors, and many more
PRIME = 50021


def edges(itemsize: int, alignment: str = "even") -> list[int]:
    """The widths that end a rung of a ladder, ascending."""
    held = 1, itemsize
    climbed = [ladders.ROW_WARPS[held], ladders.SPLIT_PARTS.get(held, ())]
    climbed.append(tiles.TILES.get(("forward", alignment, itemsize), ()))
    found = {tiles.TILE_COLS, ladders.FEW_ROWS_COLS}
    found |= {tiles.TILE_BLOCK_COLS, tiles.TILE_BYTES // itemsize}  # one piece of a tile, and a whole program
    found |= {size // itemsize for size, _ in ladders.prefetch_bytes(held) if size < UNBOUNDED}
    if alignment == "shifted":
        climbed.append(ladders.SHIFTED_SPLIT_PARTS.get(held, ()))
        found.add(ladders.LEAST_SHIFTED[itemsize])
    return sorted(found | {rung[0] for ladder in climbed for rung in ladder if rung[0] < UNBOUNDED})


def widths(itemsize: int, alignment: str = "even", most: int = 2**27) -> list[int]:
    """Around every edge, 1 and a prime; those of the alignment: multiples of 16 bytes when even, else of all kinds."""
    vector = VECTOR_BYTES // itemsize
    step = vector if alignment == "even" else 1
    found = {width for edge in edges(itemsize, alignment) for width in (edge - step, edge, edge + step)}
    found |= {step, PRIME // step * step}
    if alignment == "shifted":  # shorter rows have no aligned body to speak of
        found = {width for width in found if width >= 2 * vector}
    return sorted(width for width in found if 0 < width <= most)


def planned(n_rows: int, like: int, n_cols: int, itemsize: int, alignment: str) -> RowPlan:
    """What the planner chooses for `like` rows, over n_rows of them."""
    return replace(plan_rows(like, n_cols, itemsize, H200, alignment=alignment), n_rows=n_rows)


# Choices that cut even a short row into many pieces and parts.
SMALL = {
    "tile": {},
    "row": {"num_warps": 1},
    "split": {"num_warps": 1, "part_cols": 256},
    "stream": {"num_warps": 1, "part_cols": 512},
}


def small(strategy: str, x: torch.Tensor, y: torch.Tensor, *, itemsize: int | None = None, **choices) -> RowPlan:
    """A plan of a named strategy for x and y [n_rows, n_cols], of small pieces and parts unless `choices` differ.

    itemsize: of what a program holds, if that is not what it reads.
    """
    n_rows, n_cols = x.shape
    choices = SMALL[strategy] | choices
    itemsize = itemsize or x.element_size()
    return candidate(strategy, n_rows, n_cols, itemsize, H200, alignment=alignment_of(x, y), **choices)


class Frame:
    """rows [n_rows, n_cols] within a buffer that is NaN all around them: before, after, and between row and row.

    `phase` is how many elements past a 64-byte boundary the rows start.
    """

    def __init__(self, n_rows, n_cols, dtype, device, *, row_stride=None, phase=0):
        row_stride = n_cols if row_stride is None else row_stride
        margin = 64
        size = 2 * margin + phase + n_rows * row_stride + n_cols
        self.buffer = torch.full((size,), float("nan"), dtype=dtype, device=device)
        start = margin + phase
        assert (self.buffer.data_ptr() + margin * self.buffer.element_size()) % 64 == 0
        self.rows = self.buffer.as_strided((n_rows, n_cols), (row_stride, 1), start)
        self._before = self.buffer.clone()

    def fill(self, values: torch.Tensor) -> torch.Tensor:
        self.rows.copy_(values)
        self._before = self.buffer.clone()
        return self.rows

    def changed(self, *, outside: bool = True) -> bool:
        """Whether any byte changed since the frame was made or filled; of the surroundings only, or of all."""
        before = self._before.clone()
        if outside:
            before.as_strided(self.rows.shape, self.rows.stride(), self.rows.storage_offset()).copy_(self.rows)
        return not torch.equal(before.view(torch.uint8), self.buffer.view(torch.uint8))


def framed(alignment, x, out_dtype=None, *, padding=None, device="cpu"):
    """Frames of an input that holds x and of a poisoned output, that lie against each other as `alignment` says."""
    n_rows, n_cols = x.shape
    vector = VECTOR_BYTES // x.element_size()
    if padding is None:
        padding = 2 * vector if alignment == "even" else 5
    strides = {"row_stride": n_cols + padding}
    phases = {"even": (0, 0), "shifted": (3 % vector, 3 % vector), "scalar": (1, 0)}[alignment]
    source = Frame(n_rows, n_cols, x.dtype, device, phase=phases[0], **strides)
    source.fill(x.to(device))
    target = Frame(n_rows, n_cols, out_dtype or x.dtype, device, phase=phases[1], **strides)
    assert n_cols < 2 * vector or alignment_of(source.rows, target.rows) == alignment
    return source, target
