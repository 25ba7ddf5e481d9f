"""How draws from rows of logits meet the chip: a pure function from sizes and a device to a frozen plan."""

from dataclasses import dataclass

from fused_softmax.core.plan.device import Device
from fused_softmax.core.plan.sizes import next_power_of_2

STRETCH = 1024  # columns that the lanes of a warp share

# Draws: stretches, and so warps, of a program; programs a multiprocessor, at most, above which each reads several in
# turn. fp32 256 x 128256 40.6 us; by 1 stretch and 16 programs 39.5, by 2 and 4 116.
DRAW_STRETCHES, DRAW_PROGRAMS = 4, 8
# Lanes of 32 logits held by the program that judges filters, and its warps: 8 rows 13.5 us, by 4 warps 13.2;
# 256 rows 20.4 and 18.9, bf16 21.7 and 20.1.
DRAW_CAPACITY, KEPT_WARPS = 64, 8
# If min-p alone, or nothing, judges: stretches whose lanes a program looks through, of few rows and of many; programs
# of a multiprocessor above which each looks through more; and its warps.
ABOVE_STRETCHES, ABOVE_PROGRAMS, ABOVE_WARPS = (4, 32), 4, 4
PROPOSE_STRETCHES = 128  # for each warp of the program that finds a row's first arrivals; it has 8 warps at most
DECIDE_WARPS, DECIDE_PROGRAMS = 4, 16  # of the programs that judge these, and programs of a multiprocessor
REDRAW_WARPS = 16  # of the program that draws again where all were rejected
# Warps of the program that seeks a low boundary; columns among which it seeks; programs a multiprocessor of the other
# launches for it, which are many because few rows may be left. The second number was not varied.
DRAW_BOUND_WARPS, DRAW_LISTED, DRAW_WIDE_PROGRAMS = 16, 8192, 32


@dataclass(frozen=True)
class DrawPlan:
    """Programs of num_warps warps read `stretches` stretches of 1024 columns at a time, part_stretches in all.

    parts: programs of a row.
    capacity: lanes of 32 columns that a program of kept_warps holds where filters are judged.
    all_stretches: a power of two, at least the stretches of a row. room: the stretches for which a row has notes.
    above_stretches: if a row's maximum says what is kept, each program of above_warps looks through so many.
    propose_warps: of the program that finds a row's first arrivals. decide_parts programs of decide_warps judge them,
        with decide_stretches each. One program of redraw_warps draws again if all are rejected.
    listed: among how many logits a program of bound_warps seeks a boundary, at most. For it wide_parts programs read a
        row, wide_stretches each: more programs than `parts`, because few rows may be left.
    """

    n_draws: int
    n_cols: int
    stretches: int
    part_stretches: int
    parts: int
    num_warps: int
    all_stretches: int
    room: int
    capacity: int
    kept_warps: int
    above_stretches: int
    above_warps: int
    propose_warps: int
    decide_warps: int
    decide_parts: int
    decide_stretches: int
    redraw_warps: int
    bound_warps: int
    listed: int
    wide_parts: int
    wide_stretches: int


def plan_draws(n_draws: int, n_cols: int, itemsize: int, device: Device) -> DrawPlan:
    """The plan for draws from rows of n_cols logits.

    >>> from fused_softmax.core.plan import H200
    >>> plan_draws(8, 128256, 2, H200).parts
    32
    """
    n_stretches = -(-n_cols // STRETCH)
    stretches = min(DRAW_STRETCHES, next_power_of_2(n_stretches))
    part_stretches = _stretches_of_part(n_draws, n_stretches, stretches, DRAW_PROGRAMS * device.sm_count)
    wide_stretches = _stretches_of_part(n_draws, n_stretches, stretches, DRAW_WIDE_PROGRAMS * device.sm_count)
    least, most = ABOVE_STRETCHES
    above = next_power_of_2(-(-n_stretches * max(1, n_draws) // (ABOVE_PROGRAMS * device.sm_count)))
    above = min(max(above, least), most, next_power_of_2(n_stretches))
    propose_warps = min(8, max(1, next_power_of_2(n_stretches) // PROPOSE_STRETCHES))
    at_once = min(DECIDE_WARPS, next_power_of_2(n_stretches))
    decide_stretches = _stretches_of_part(n_draws, n_stretches, at_once, DECIDE_PROGRAMS * device.sm_count)
    return DrawPlan(
        n_draws, n_cols, stretches, part_stretches, -(-n_stretches // part_stretches), stretches,
        next_power_of_2(n_stretches), _room(n_stretches), DRAW_CAPACITY, KEPT_WARPS, above, ABOVE_WARPS,
        propose_warps, at_once, -(-n_stretches // decide_stretches), decide_stretches,
        min(REDRAW_WARPS, next_power_of_2(n_stretches)), DRAW_BOUND_WARPS, DRAW_LISTED,
        -(-n_stretches // wide_stretches), wide_stretches,
    )  # fmt: skip


def _room(n_stretches: int) -> int:
    """At least n_stretches, and at most four numbers for each power of two, because each is another kernel.

    All are multiples of 4, so that all parts of a row's notes begin on 16 bytes.
    """
    step = max(4, next_power_of_2(n_stretches) // 8)
    return -(-max(1, n_stretches) // step) * step


def _stretches_of_part(n_draws: int, n_stretches: int, stretches: int, programs: int) -> int:
    wanted = -(-n_stretches * max(1, n_draws) // programs)
    return min(n_stretches, max(1, -(-wanted // stretches)) * stretches)
