"""The strategy for rows: pure functions from sizes and a device to a frozen plan that says why.

Allocation, launch, tests, the bench and `fused-softmax plan` all read the one record that these functions return.
"""

from dataclasses import replace
from typing import Any, get_args

from fused_softmax.core.plan.device import H200, Device
from fused_softmax.core.plan.ladders import (
    ALL_NOTE,
    ALL_REGISTERS,
    ALONE_BYTES,
    ALONE_ROWS,
    CAUSAL_WARPS,
    FEW_ROWS_COLS,
    GRADIENT_MOST_PARTS,
    LEAST_SHIFTED,
    PAIR_COPIES,
    PAIR_NOTE,
    PAIR_PARTS,
    PAIR_ROW,
    PAIR_WARPS,
    POLL_LAST_FIRST_PARTS,
    RATHER_SPLIT,
    READERS_PER_COPY,
    REDUCTION_BYTES,
    REDUCTION_NOTE,
    REDUCTION_PARTS,
    REDUCTION_PIECES,
    REDUCTION_PROGRAMS,
    REDUCTION_ROWS,
    REDUCTION_WARPS,
    ROW_WARPS,
    SHIFTED_SPLIT_PARTS,
    SPLIT_PARTS,
    SPLIT_REGISTERS,
    STREAM_MOST_PARTS,
    UNMEASURED_ROW_COLS,
    Ladder,
    prefetch_bytes,
    row_warps,
)
from fused_softmax.core.plan.sizes import ANY_ROWS, UNBOUNDED, VECTOR_BYTES, Span, both, next_power_of_2, side_of
from fused_softmax.core.plan.strategies import RowPlan, Rows, Strategy, build, rows_of, split
from fused_softmax.core.plan.tiles import TILE_BLOCK_COLS, TILES, Alignment, Work, longest, tiles_of

_CHOICES = {"part_cols", "block_rows", "block_cols", "num_warps", "copies", "lanes", "poll_last_first", "prefetch"}


def plan_rows(
    n_rows: int,
    n_cols: int,
    itemsize: int,
    device: Device,
    *,
    alignment: Alignment = "even",
    inputs: int = 1,
    causal: bool = False,
    batch_invariant: bool = False,
) -> RowPlan:
    """The plan for softmax over rows of n_cols elements of `itemsize` bytes; n_rows and n_cols are at least 1.

    inputs: 1, or 2 for kernels that read two tensors of the shape, as backward does.
    causal: whether a row ends at its query, so that on average half of it is read.
    batch_invariant: whether a row is to have the same bits in any batch. The plan then follows from n_cols, itemsize,
        alignment and device alone: it is that of as many rows as fill the GPU, with another grid.

    >>> plan_rows(4096, 131072, 2, H200).strategy
    'split'
    >>> plan_rows(4096, 32768, 2, H200).reasons[0]
    'row: a row of at most 32768 columns fits one program'
    """
    rows = _rows(n_rows, n_cols, itemsize, inputs, alignment, device, None, batch_invariant)
    plan = _held_rows(rows, alignment)
    ladder = CAUSAL_WARPS.get(itemsize) if causal and device.capability == H200.capability else None
    if ladder and plan.strategy == "row" and n_cols <= ladder.end:
        end, num_warps = ladder.rung(n_cols)
        said = ladder.sentence(f"{num_warps} warps", end)
        because = "a causal row, half of which is hidden, fits one program"
        plan = build("row", rows, because, {"num_warps": num_warps}, said=said, same_rows=plan.same_rows)
    return _of_any_rows(plan, n_rows)


def _rows(
    n_rows: int, n_cols: int, itemsize: int, inputs: int, alignment: Alignment, device: Device, work: Work | None,
    batch_invariant: bool,
) -> Rows:  # fmt: skip
    """The rows to plan for. A plan for any batch is made for one number of rows, whatever the call has."""
    planned = ALONE_ROWS if batch_invariant and n_rows > 0 else n_rows
    return rows_of(planned, n_cols, itemsize, inputs, alignment, device, work, batch_invariant)


def _of_any_rows(plan: RowPlan, n_rows: int) -> RowPlan:
    """A plan for any batch, with the number of rows of the call; any other plan as it is."""
    if not plan.batch_invariant:
        return plan
    because = "whatever stands beside a row, so that it has the same bits in any batch"
    return replace(plan, n_rows=n_rows, same_rows=ANY_ROWS, reasons=(*plan.reasons, because))


def _held_rows(rows: Rows, alignment: Alignment) -> RowPlan:
    """The choice of a strategy. alignment: the caller's, even if rows of this length allow another."""
    n_cols, device = rows.n_cols, rows.device
    alignment = rows.alignment if rows.batch_invariant else alignment
    shared = longest(rows.work, alignment, rows.itemsize)
    if n_cols <= shared:
        return build("tile", rows, f"rows of at most {shared} columns share programs")
    if alignment == "even" and tiles_of(rows.work, alignment, rows.itemsize, n_cols):
        return build("tile", rows, "short rows that tiles of 128 columns do not divide share programs")

    most, built_in = _longest_row(rows)
    fits = n_cols <= most
    above, upto = RATHER_SPLIT.get(rows.held, (0, 0))
    alone = fits and built_in and device.backend == "cuda" and alignment == "even" and above < n_cols <= upto
    few = n_cols > FEW_ROWS_COLS and rows.n_rows <= device.sm_count
    same_rows = ANY_ROWS
    if rows.held in SPLIT_PARTS and n_cols > FEW_ROWS_COLS and fits:
        same_rows = side_of(rows.n_rows, device.sm_count)

    if rows.held in SPLIT_PARTS and (few or alone or not fits):
        if not fits:
            because = f"a row of more than {most} columns exceeds one program, and the chip holds it"
        elif few:
            because = f"no more rows than the {device.sm_count} multiprocessors, of more than {FEW_ROWS_COLS} columns"
        else:
            because = f"a row of {above + 1} to {upto} columns leaves no room for a second beside it"
        plan = build("split", rows, because, same_rows=same_rows)
        if 1 < plan.parts <= most_parts(plan, device):
            return plan
        measured = device.capability[0] == H200.capability[0]
        if measured and not fits and 1 < plan.parts <= parts_held(plan, device):
            why = f"a row takes more than half of the chip, since a second read costs more ({ALL_NOTE})"
            return replace(plan, reasons=(*plan.reasons, why))
        same_rows = both(same_rows, split(rows, {}).same_rows)  # other numbers of rows may have parts that fit
    if fits:
        return build("row", rows, f"a row of at most {most} columns fits one program", same_rows=same_rows)
    because = f"a row of more than {most} columns exceeds one program, and its parts the chip: read twice"
    return build("stream", rows, because, same_rows=same_rows)


def _longest_row(rows: Rows) -> tuple[int, bool]:
    """The longest row that one program holds, and whether the built-in ladder says so."""
    ladder, device = row_warps(rows.held, rows.device.table), rows.device
    built_in = ladder is ROW_WARPS[rows.held]
    if built_in and device.backend == "cuda" and device.capability[0] != H200.capability[0]:
        return UNMEASURED_ROW_COLS.get(rows.held, ladder.end), True
    return ladder.end, built_in


def plan_loss(
    n_rows: int,
    n_cols: int,
    itemsize: int,
    device: Device,
    *,
    alignment: Alignment = "even",
    batch_invariant: bool = False,
) -> RowPlan:
    """The plan for losses of rows of logits with their gradient in one pass, which hold each row until it is written.

    itemsize: of the logits as they are held. A loss without gradient is a reduction: `plan_reduction`.
    batch_invariant: as `plan_rows`.

    >>> plan_loss(4096, 32768, 4, H200).strategy, plan_rows(4096, 32768, 4, H200).strategy
    ('split', 'row')
    """
    rows = _rows(n_rows, n_cols, itemsize, 1, alignment, device, "loss", batch_invariant)
    plan = _held_rows(rows, alignment)
    if plan.num_warps == 32 and rows.held in SPLIT_PARTS:
        because = "a program of 32 warps has 64 registers a thread, too few for what a loss adds"
        plan = build("split", rows, because, same_rows=plan.same_rows)
    if plan.strategy == "split" and plan.parts > most_parts(plan, device, registers=ALL_REGISTERS):
        because = f"with all {ALL_REGISTERS} registers, as a loss may take, the chip holds too few parts: read twice"
        plan = build("stream", rows, because, same_rows=plan.same_rows)
    return _of_any_rows(plan, n_rows)


def plan_reduction(
    n_rows: int,
    n_cols: int,
    itemsize: int,
    device: Device,
    *,
    alignment: Alignment = "even",
    writes: bool = False,
    capped: bool = False,
    merges: bool = False,
    batch_invariant: bool = False,
) -> RowPlan:
    """The plan for kernels that read rows tile by tile and hold none: logsumexp, and (writes) its gradient.

    Rows are split into as many parts as there should be programs. Where parts are merged, only the last part waits for
    the others.
    capped: whether a gradient goes through the tanh of a softcap.
    merges: whether a launch of its own merges parts. It does not pay for rows of a few thousand columns.
    batch_invariant: as `plan_rows`, but a long row is cut into parts of one size, however many rows there are.

    >>> plan_reduction(8, 32000, 2, H200).strategy
    'split'
    """
    work: Work = "lse_gradient" if writes else "reduction"
    rows = _rows(n_rows, n_cols, itemsize, 1, alignment, device, work, batch_invariant)
    if n_cols <= longest(rows.work, rows.alignment if batch_invariant else alignment, itemsize):
        plan = build("tile", rows, "short rows share programs", {"prefetch": 0})
    elif writes:
        plan = _written_reduction(rows)
    else:
        plan = _long_reduction(rows, alone=merges and n_cols <= FEW_ROWS_COLS)
    if writes and capped and device.capability != H200.capability:
        because = f"{plan.pieces} pieces halved: tanh takes registers, and Triton 3.9 spills for sm_100"
        plan = replace(plan, pieces=-(-plan.pieces // 2), reasons=(*plan.reasons, because))
    return _of_any_rows(plan, n_rows)


def plan_alone(n_rows: int, n_cols: int, itemsize: int, device: Device) -> RowPlan:
    """The plan for a reduction that gives a row the same bits in any batch: the row alone decides how it is cut.

    If a row is a whole number of vectors, rows start on 16 bytes, and a caller copies those that do not. Other rows are
    read by elements, because what stands before the first boundary would differ from row to row.

    >>> plan_alone(8, 151936, 2, H200).parts, plan_alone(8192, 151936, 2, H200).parts
    (5, 5)
    """
    alignment: Alignment = "scalar" if n_cols % (VECTOR_BYTES // itemsize) else "even"
    rows = rows_of(n_rows, n_cols, itemsize, 1, alignment, device, "reduction", batch_invariant=True)
    num_warps, tile_cols, warps = _reduction_warps(rows)
    parts = min(-(-n_cols * itemsize // ALONE_BYTES), STREAM_MOST_PARTS)
    part_cols = -(-n_cols // parts // tile_cols) * tile_cols if parts > 1 else max(n_cols, tile_cols)
    because = f"a row is read in parts of about {ALONE_BYTES >> 10} KiB, whatever stands beside it"
    return build("stream", rows, because, {"num_warps": num_warps, "part_cols": part_cols}, said=warps)


def plan_pairs(n_rows: int, n_cols: int, itemsize: int, device: Device) -> RowPlan | None:
    """The plan for pairs of rows that are held until a gradient is written, with the same bits in any batch.

    None if the chip cannot hold them, or if rows are not a whole number of vectors. itemsize: the larger one of both.

    >>> plan_pairs(8192, 151936, 2, H200).parts
    38
    """
    held = 2, itemsize
    if n_cols % (VECTOR_BYTES // itemsize) or held not in SPLIT_PARTS:
        return None
    rows = rows_of(n_rows, n_cols, itemsize, 2, "even", device, batch_invariant=True)
    if n_cols <= PAIR_ROW:
        because = f"a pair of rows of at most {PAIR_ROW} columns fits one program"
        plan = build("row", rows, because)
        return plan if plan.num_warps <= PAIR_WARPS else build("row", rows, because, {"num_warps": PAIR_WARPS})
    part_cols, num_warps = PAIR_PARTS
    parts = -(-n_cols // part_cols)
    # If lanes followed from the number of rows, the order of sums would too. Of 38 parts each warp polls its own.
    lanes = 32 if parts <= 32 else max(32 * num_warps, next_power_of_2(parts))
    choices = {
        "part_cols": part_cols, "num_warps": num_warps, "lanes": lanes,
        "copies": max(1, min(PAIR_COPIES, parts // READERS_PER_COPY)),
        "poll_last_first": parts >= POLL_LAST_FIRST_PARTS,
    }  # fmt: skip
    said = f"parts of at most {part_cols} columns, whatever stands beside a row ({PAIR_NOTE})"
    plan = build("split", rows, "a pair of rows exceeds one program, and the chip holds it", choices, said=said)
    return plan if plan.parts <= most_parts(plan, device, registers=ALL_REGISTERS) else None


def _written_reduction(rows: Rows) -> RowPlan:
    num_warps, tile_cols, warps = _reduction_warps(rows)
    choices = {"num_warps": num_warps, "part_cols": max(tile_cols, rows.n_cols // GRADIENT_MOST_PARTS)}
    because = "the state of a row is known, and each of its parts is read and written alone"
    return build("stream", rows, because, choices, said=warps)


def _long_reduction(rows: Rows, *, alone: bool) -> RowPlan:
    """alone: whether a row is always one part, however few rows there are."""
    n_rows, n_cols, sm_count = rows.n_rows, rows.n_cols, rows.device.sm_count
    num_warps, tile_cols, warps = _reduction_warps(rows)
    few = n_rows < REDUCTION_PROGRAMS * sm_count
    very_few = int(REDUCTION_ROWS * sm_count)  # rows up to which parts are as short as can be
    same_rows = both(side_of(n_rows, REDUCTION_PROGRAMS * sm_count - 1), side_of(n_rows, very_few))
    programs = REDUCTION_PARTS * sm_count
    least = max(tile_cols, n_cols // STREAM_MOST_PARTS)
    if n_rows > very_few and not rows.batch_invariant:
        least = max(least, REDUCTION_BYTES // rows.itemsize)
    wanted = -(-programs // n_rows) if few else 1
    if rows.batch_invariant:
        wanted, same_rows = -(-n_cols * rows.itemsize // ALONE_BYTES), ANY_ROWS
    part_cols = max(least, -(-n_cols // wanted))
    choices: dict[str, Any] = {"num_warps": num_warps, "prefetch": 0}
    if alone or tile_cols >= n_cols or rows.held not in SPLIT_PARTS:
        because = "a row is one part, of which its program holds no more than a tile"
        plan = build("row", rows, because, choices, said=warps)
    elif least >= n_cols:
        because = f"rows of at most {REDUCTION_BYTES >> 10} KiB, of which there are many, are no quicker in parts"
        plan = build("row", rows, because, choices, said=warps, same_rows=same_rows)
    elif part_cols >= n_cols:
        because = f"at least {REDUCTION_PROGRAMS} rows a multiprocessor, each read by one program"
        if rows.batch_invariant:
            because = f"a row of at most {ALONE_BYTES >> 10} KiB is read by one program"
        plan = build("row", rows, because, choices, said=warps, same_rows=same_rows)
    else:
        because = f"fewer than {REDUCTION_PROGRAMS} rows a multiprocessor: parts fill the chip ({REDUCTION_NOTE})"
        choices |= {"part_cols": part_cols, "copies": 1, "poll_last_first": False}
        if rows.batch_invariant:
            because = f"parts of about {ALONE_BYTES >> 10} KiB"
        else:
            same_rows = both(same_rows, _rows_of_parts(rows, part_cols, least, programs))
        plan = build("split", rows, because, choices, said=warps, same_rows=same_rows)
    pieces = _reduction_pieces(plan)
    return replace(plan, pieces=pieces, full_pieces=0)


def _reduction_warps(rows: Rows) -> tuple[int, int, str]:
    """Warps of a program, the columns of its tile, and why."""
    end, num_warps = REDUCTION_WARPS.rung(rows.n_cols * rows.itemsize)
    tile_cols = 4 * 32 * num_warps * VECTOR_BYTES // rows.itemsize
    return num_warps, tile_cols, REDUCTION_WARPS.sentence(f"{num_warps} warps", end, "bytes")


def _rows_of_parts(rows: Rows, part_cols: int, least: int, programs: int) -> Span:
    """The numbers of rows for which part_cols gives as many parts as it does for these.

    The columns of a part are max(least, n_cols / (programs / n_rows)).
    """
    n_cols, parts = rows.n_cols, -(-rows.body // part_cols)
    if parts == 1:
        return rows.n_rows, rows.n_rows
    shortest, longest = -(-rows.body // parts), -(-rows.body // (parts - 1)) - 1  # give as many parts
    fewest = -(-n_cols // longest)  # programs that are wanted for a row
    most_rows = (programs - 1) // (fewest - 1) if fewest > 1 else UNBOUNDED
    if least >= shortest:
        return 1, most_rows
    most = -(-n_cols // (shortest - 1)) - 1
    return -(-programs // most), most_rows


def _reduction_pieces(plan: RowPlan) -> int:
    """Pieces of one tile: the number that pads a part least; of several, the greatest."""
    least, most = (min(plan.pieces, pieces) for pieces in REDUCTION_PIECES)
    padded = {p: -(-plan.part_cols // (p * plan.block_cols)) * p for p in range(least, most + 1)}
    return min(padded, key=lambda p: (padded[p], -p))


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

    `choices` overrule the ladders: part_cols, block_rows, block_cols, num_warps, copies, lanes, poll_last_first,
    prefetch. Tests, the tuner and the bench use it; a plan with impossible choices raises ValueError.

    >>> candidate("row", 4096, 4096, 2, H200, num_warps=4).num_warps
    4
    """
    if strategy not in get_args(Strategy) or choices.keys() - _CHOICES:
        raise ValueError(
            f"strategy is one of {get_args(Strategy)}, choices are of {sorted(_CHOICES)}; got {strategy!r}, {choices}"
        )
    if any(choice < (name != "prefetch") for name, choice in choices.items() if name != "poll_last_first"):
        raise ValueError(f"choices are at least 1, prefetch 0; got {choices}")
    rows = rows_of(n_rows, n_cols, itemsize, inputs, alignment, device)
    said = ", ".join(f"{name} {choice}" for name, choice in choices.items()) + ", as asked" if choices else None
    plan = build(strategy, rows, "asked for by name", choices, said=said, same_rows=(n_rows, n_rows))
    sizes = plan.block_rows, plan.block_cols, plan.num_warps, plan.lanes
    if any(size != next_power_of_2(size) for size in sizes) or plan.num_warps > 32:
        raise ValueError(
            f"blocks, lanes and warps are powers of two, warps at most 32; got {plan.block_rows} rows, "
            f"{plan.block_cols} columns, {plan.lanes} lanes, {plan.num_warps} warps"
        )
    if plan.lanes < max(plan.parts, plan.copies):
        raise ValueError(f"a lane for each of {plan.parts} parts and {plan.copies} copies; got {plan.lanes}")
    return plan


def most_parts(plan: RowPlan, device: Device, registers: int | None = None) -> int:
    """Parts of one row that may wait for each other: half of those that are resident at once, so that two streams can.

    They may be all of these, if the row would be read twice otherwise. registers: as `parts_held`.
    """
    return parts_held(plan, device, registers) // 2


def parts_held(plan: RowPlan, device: Device, registers: int | None = None) -> int:
    """Parts that are resident at once. registers: of a thread at most; None for those of softmax's own kernels."""
    held = -(-plan.inputs * plan.pieces * plan.block_cols * plan.itemsize // (4 * 32 * plan.num_warps))
    registers = registers or (ALL_REGISTERS if plan.alignment == "scalar" else SPLIT_REGISTERS.rung(held)[1])
    resident = device.registers // (32 * plan.num_warps * registers)
    return device.sm_count * max(1, resident)


def fetches_ahead(plan: RowPlan, device: Device, itemsize: int, *, causal: bool = False) -> bool:
    """Whether programs of a plan ask L2 for the data of later programs. Only sm_90 and newer can.

    itemsize: of the tensor that is read. If it is less than the plan's, boundaries of 16 bytes are elsewhere, and only
        the kernels for rows of fp8 know.
    causal: rows end at different columns, and the data ahead is not read next. 2048 x 2048 0.85, fetched 0.80.
    """
    able = device.backend == "cuda" and device.capability >= (9, 0)
    known = plan.vector * itemsize == VECTOR_BYTES or itemsize == 1
    return able and plan.prefetch > 0 and known and not causal


def row_rung_ends(itemsize: int, device: Device, inputs: int = 1) -> list[int]:
    """The last column count of every rung that `plan_rows` climbs where rows are enough to fill the chip, in order."""
    held = inputs, itemsize
    ladders: list[Ladder] = [ROW_WARPS[held]]
    ladders += [ladder[held] for ladder in (SPLIT_PARTS, SHIFTED_SPLIT_PARTS) if held in ladder]
    works = ("forward", "gradient")[:inputs]
    ladders += [ladder for (work, _, size), ladder in TILES.items() if size == itemsize and work in works]
    ends = {longest("forward", "even", itemsize), FEW_ROWS_COLS, LEAST_SHIFTED[itemsize] - 1}
    ends |= {size // itemsize for size, _ in prefetch_bytes(held, device.table)}
    ends |= {*RATHER_SPLIT.get(held, ())}
    if inputs == 1 and (ragged := TILES.get(("forward", "even", itemsize))):
        # A whole number of tiles of 128 columns is a rung of one length.
        ends |= set(range(TILE_BLOCK_COLS, ragged.end + 1, TILE_BLOCK_COLS))
    ends |= {rung[0] for ladder in ladders for rung in ladder}
    if held in SPLIT_PARTS:  # the longest row that the chip holds
        plan = candidate("split", device.sm_count + 1, 2**26, itemsize, device, inputs=inputs)
        ends |= {most_parts(plan, device) * plan.part_cols, parts_held(plan, device) * plan.part_cols}
    return sorted(end for end in ends if end < UNBOUNDED // 8)


def reduction_rung_ends(itemsize: int) -> list[int]:
    """The last column count of every rung that `plan_reduction` climbs, in order."""
    ends = {rung[0] // itemsize for rung in REDUCTION_WARPS}
    ends |= {
        rung[0]
        for (work, _, size), rungs in TILES.items()
        if size == itemsize and work == "reduction"
        for rung in rungs
    }
    ends |= {longest("reduction", alignment, itemsize) for alignment in get_args(Alignment)}
    return sorted(end for end in ends if end < UNBOUNDED // 8)
