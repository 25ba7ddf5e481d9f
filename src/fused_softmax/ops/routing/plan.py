"""How rows of a router meet the chip: a pure function from sizes and a device to a frozen plan.

A row lies in one warp, whatever the plan, so that it has the same bits in any batch.
"""

from dataclasses import dataclass

from fused_softmax.core.plan.device import Device
from fused_softmax.core.plan.sizes import next_power_of_2

FEW = 8  # rows a multiprocessor up to which each has a program of its own
# Experts from which on a program has one row at a time: bf16 16384 x 512, k 10, 17.4 us, by 4 warps 19.1.
WIDE = 512
# If rows are many: warps of a program, with one row each; programs a multiprocessor from which on each takes several
# turns; turns at most. 131072 x 256, k 8, 57 us by four turns, by one 67.
WARPS, PROGRAMS, TURNS = 4, 16, 4
# Programs of WARPS warps a multiprocessor at most, where rows are added up: the gradient of 16384 x 256 with losses
# 10.4 us, by 4 programs 16.7, by 16 10.7.
SUMMING = 8
# Programs of one warp a multiprocessor at most, for the gradient: 16384 x 512 with losses 18.7 us, by 16 programs 27.8.
# Where they add up rows, 32 are too many: 8192 x 2304 with losses 134 us, by 16 programs 115.
GRADIENT_ALONE = 32
# Warps of a program whose registers hold the sums. 16384 x 256 with losses 15.7 us; x 64 8.8, by 4 warps 10.4.
SUMMING_WARPS = 8
# Registers of a thread for up to MANY_TILES tiles of sums, so that all those programs are resident at once. For more
# tiles it has twice as many, and half as many programs are resident.
REGISTERS, MANY_TILES = 65536 // (32 * WARPS * SUMMING), 8
MOST_COLS = 256  # experts whose sums a program computes at a time


@dataclass(frozen=True)
class RoutePlan:
    """Programs of num_warps warps take `rows` rows at a time, a warp each, and part_rows in all.

    length: rows of a sequence; all rows where there are none. parts: programs of a sequence. Sums are taken of
    sum_rows x sum_cols at a time. registers: of a thread at most; None where that is left to the compiler. alone:
    whether every plan for these experts has one row at a time, so that its tiles may be stacked: a row is then added up
    in the same order in any batch.
    """

    n_rows: int
    n_experts: int
    length: int
    rows: int
    part_rows: int
    parts: int
    num_warps: int
    sum_rows: int
    sum_cols: int
    registers: int | None = None
    alone: bool = False

    @property
    def programs(self) -> int:
        return self.n_rows // self.length * self.parts


def plan_route(
    n_rows: int, n_experts: int, length: int, device: Device, sums: bool = False, held: int = 0, gradient: bool = False
) -> RoutePlan:  # fmt: skip
    """The plan for rows of a router's logits, at least one.

    sums: whether rows are added up, or their gradient depends on sums. held: tiles of experts whose sums are in
    registers; 0 if they are not. gradient: whether it is the gradient's plan.

    >>> from fused_softmax.core.plan import H200
    >>> plan_route(16384, 256, 16384, H200).parts
    2048
    """
    alone = n_experts >= WIDE and not held
    if alone or n_rows <= FEW * device.sm_count:
        warps = 1
    else:
        warps = SUMMING_WARPS if held else WARPS
    part_rows, registers = warps, None
    if warps > 1:
        part_rows *= min(TURNS, max(1, -(-n_rows // (warps * PROGRAMS * device.sm_count))))
    if sums:
        resident = GRADIENT_ALONE if alone and gradient else SUMMING * min(2 * warps, WARPS) // warps
        if held and warps > 1:
            times = 1 if held <= MANY_TILES else 2
            resident, registers = resident // times, REGISTERS * times
        part_rows = max(warps, -(-n_rows // (resident * device.sm_count * warps)) * warps)
    part_rows = min(part_rows, -(-length // warps) * warps)
    return RoutePlan(
        n_rows, n_experts, length, warps, part_rows, -(-length // part_rows), warps, 2 * warps,
        min(MOST_COLS, max(32, next_power_of_2(n_experts))), registers, alone,
    )  # fmt: skip
