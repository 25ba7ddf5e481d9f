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
# Programs a multiprocessor at most, where rows are added up: 131072 x 256 with losses 128 us, by 4 programs 171; the
# gradient of 16384 x 256 with losses 11.9, by 4 programs 15.6.
SUMMING = 8
# Warps of a program that adds up rows as it routes them. With 8, half as many programs add to the same slots as with 4:
# 16384 x 256 with counts 19.0 us, by 4 warps 24.3, by 16 30.7; x 64 with losses 11.5, 13.7, 12.4.
SUMMING_WARPS = 8
MOST_COLS = 256  # experts whose sums a program computes at a time


@dataclass(frozen=True)
class RoutePlan:
    """Programs of num_warps warps take `rows` rows at a time, a warp each, and part_rows in all.

    length: rows of a sequence; all rows where there are none. parts: programs of a sequence. Sums are taken of
    sum_rows x sum_cols at a time.
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

    @property
    def programs(self) -> int:
        return self.n_rows // self.length * self.parts


def plan_route(
    n_rows: int, n_experts: int, length: int, device: Device, sums: bool = False, most_warps: int = WARPS
) -> RoutePlan:  # fmt: skip
    """The plan for rows of a router's logits, at least one. sums: whether they are added up. most_warps: of a program.

    >>> from fused_softmax.core.plan import H200
    >>> plan_route(16384, 256, 16384, H200).parts
    2048
    """
    warps = 1 if n_experts >= WIDE or n_rows <= FEW * device.sm_count else most_warps
    part_rows = warps
    if warps > 1:
        part_rows *= min(TURNS, max(1, -(-n_rows // (warps * PROGRAMS * device.sm_count))))
    if sums:
        programs = SUMMING * device.sm_count * min(2 * warps, WARPS) // warps
        part_rows = max(warps, -(-n_rows // (programs * warps)) * warps)
    part_rows = min(part_rows, -(-length // warps) * warps)
    return RoutePlan(
        n_rows, n_experts, length, warps, part_rows, -(-length // part_rows), warps, 2 * warps,
        min(MOST_COLS, max(32, next_power_of_2(n_experts))),
    )  # fmt: skip
