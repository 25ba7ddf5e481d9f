"""Profiles side by side, one line for each fact, and a sentence on what to look at. Standard library only."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fused_softmax.core.described import number_of
from fused_softmax.core.plan import Device
from fused_softmax.profile.command import STALLS
from fused_softmax.profile.parse import Kernel

MAX_WARPS, MAX_PROGRAMS = 64, 32  # of a multiprocessor, on compute capability 8.0, 9.0 and 10.0
COUNTS = ("threads", "programs", "bytes")  # units that lose their s after a 1
RESERVED_SHARED = 1024  # bytes that the system takes from every program, from 8.0 on


@dataclass(frozen=True)
class Profile:
    """The kernels of one call of a provider. how: the source of the facts. why: why there are no counters."""

    provider: str
    how: str
    kernels: tuple[Kernel, ...] = ()
    why: str = ""

    @property
    def longest(self) -> Kernel | None:
        """The kernel that takes most of the time. Without times, the last one, which writes the result."""
        return max(reversed(self.kernels), key=lambda kernel: kernel.time_us or 0, default=None)

    @property
    def time_us(self) -> float | None:
        return self.total("time_us")

    def total(self, name: str) -> float | None:
        """A figure summed over the kernels, or None unless all have it."""
        values = [getattr(kernel, name) for kernel in self.kernels]
        return sum(values) if values and None not in values else None


def occupancy(device: Device, registers: int, shared_bytes: int, block: int) -> tuple[float, str]:
    """The percentage of a multiprocessor's warps that can reside, and its limit, from a binary's resources."""
    warps = -(-block // 32)
    each = -(-registers // 8) * 8 * 32  # registers are handed to a warp in units of 256
    programs = {
        "registers": device.registers // each // warps if registers else MAX_PROGRAMS,
        "shared memory": device.shared_bytes // (shared_bytes + RESERVED_SHARED),
        "warps": MAX_WARPS // warps,
        "programs": MAX_PROGRAMS,
    }
    least = min(programs.values())
    return 100 * least * warps / MAX_WARPS, " and ".join(name for name, held in programs.items() if held == least)


def rows(profiles: Sequence[Profile], floor_bytes: int, device: Device | None) -> list[tuple[str, list[str]]]:
    """For every fact that any profile has: its name and a cell for each profile."""
    copy = device.copy_bytes_per_second if device else None

    def bandwidth(each: Profile) -> float | None:
        return floor_bytes / each.time_us * 1e-3 if each.time_us else None

    def ratio(each: Profile) -> float | None:
        speed = bandwidth(each)
        return speed * 1e9 / copy if speed and copy else None

    def of_floor(name: str) -> Callable[[Profile], str]:
        def text(each: Profile) -> str:
            moved = each.total(name)
            return "" if moved is None else f"{size(moved)} ({moved / floor_bytes:.2f} of the floor)"

        return text

    def own(form: Callable[[Kernel], str]) -> Callable[[Profile], str]:
        return lambda each: form(each.longest) if each.longest else ""

    lines: list[tuple[str, Callable[[Profile], str]]] = [
        ("known by", lambda each: each.how),
        ("kernels", lambda each: str(len(each.kernels)) if each.kernels else ""),
        ("longest", own(lambda kernel: kernel.name)),
        ("time", lambda each: unit(each.time_us, "us")),
        ("floor bandwidth", lambda each: unit(bandwidth(each), "GB/s")),
        ("of a copy's", lambda each: unit(ratio(each), "")),
        ("DRAM moved", of_floor("dram_bytes")),
        ("DRAM of its peak", own(lambda kernel: unit(kernel.dram_percent, "%"))),
        ("L2 moved", of_floor("l2_bytes")),
        ("L2 hits", own(lambda kernel: unit(kernel.l2_hit_percent, "%"))),
        ("occupancy", own(lambda kernel: unit(kernel.occupancy, "%"))),
        ("occupancy at most", own(_limit)),
        ("waves", own(lambda kernel: unit(kernel.waves, ""))),
        ("registers", own(lambda kernel: unit(kernel.registers, ""))),
        ("spilled", own(lambda kernel: "" if kernel.spilled_bytes is None else size(kernel.spilled_bytes))),
        ("shared memory", own(lambda kernel: "" if kernel.shared_bytes is None else size(kernel.shared_bytes))),
        ("block", own(lambda kernel: unit(kernel.block, "threads"))),
        ("grid", own(lambda kernel: unit(kernel.grid, "programs"))),
        ("load widths", own(lambda kernel: kernel.loads or "")),
        ("store widths", own(lambda kernel: kernel.stores or "")),
        ("stalls", own(lambda kernel: ", ".join(f"{name} {value:.1f}" for name, value in kernel.stalls[:3]))),
    ]
    found = [(name, [form(each) for each in profiles]) for name, form in lines]
    return [(name, cells) for name, cells in found if any(cells)]


def advice(profile: Profile, floor_bytes: int, device: Device | None) -> str:
    """A sentence on what to look at, from the most telling fact, or "" if nothing is known."""
    kernel = profile.longest
    if kernel is None:
        return ""
    moved = profile.total("dram_bytes")
    by_counters = bool(kernel.stalls)
    if kernel.spilled_bytes:
        return f"{size(kernel.spilled_bytes)} spilled: registers do not hold a row's values; use more warps or parts"
    if moved is not None and moved > 1.15 * floor_bytes:
        many = f", in {len(profile.kernels)} kernels" if len(profile.kernels) > 1 else ""
        return f"moves {moved / floor_bytes:.2f} times the floor{many}: first avoid reading or writing data again"
    if kernel.dram_percent is not None and kernel.dram_percent >= 88:
        return f"at {kernel.dram_percent:.0f} % of the memory's peak: only fewer bytes would be faster"
    narrow = _narrowest(kernel)
    if narrow is not None and narrow < 8:
        return f"accesses of {unit(narrow, 'bytes')} a thread, where 16 are possible: look at alignment and masks"
    if device and kernel.grid is not None and kernel.grid < device.sm_count:
        programs = number_of(kernel.grid, "program leaves", "programs leave")
        return f"{programs} {number_of(device.sm_count - kernel.grid, 'multiprocessor')} idle: split the rows"
    if by_counters:
        name = kernel.stalls[0][0]
        return f"{name}: {STALLS[name]}"
    if kernel.occupancy_limit is not None and kernel.occupancy_limit < 25:
        limit = kernel.limited_by or "the GPU's resources"
        let = "lets" if limit == "shared memory" else "let"
        return f"{limit} {let} {kernel.occupancy_limit:.0f} % of the warps reside: few bytes are in flight"
    return "nothing in the binary stands out: no spill, wide accesses, room for enough warps"


def _narrowest(kernel: Kernel) -> float | None:
    """The width of most accesses in a binary; if measured, a load's mean."""
    counts: Counter[float] = Counter()
    for text in (kernel.loads, kernel.stores):
        for width, times, count in (part.partition(" x") for part in (text or "").split(", ")):
            if times:
                counts[float(width)] += int(count)
    if counts:
        return counts.most_common(1)[0][0]
    return float(kernel.loads) if kernel.loads and kernel.loads != "none" else None


def _limit(kernel: Kernel) -> str:
    if kernel.occupancy_limit is None:
        return ""
    return f"{kernel.occupancy_limit:.0f} %" + (f", by {kernel.limited_by}" if kernel.limited_by else "")


def size(count: float) -> str:
    for step, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= step:
            return f"{count / step:.4g} {name}"
    return f"{count:.0f} B"


def unit(value: float | None, name: str) -> str:
    if value is None:
        return ""
    text = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    return f"{text} {name.removesuffix('s') if value == 1 and name in COUNTS else name}".rstrip()


def facts(profiles: Sequence[Profile], floor_bytes: int, device: Device | None) -> dict[str, Any]:
    """Everything known, for a program to read."""
    return {
        "floor_bytes": floor_bytes,
        "device": device.name if device else None,
        "profiles": [asdict(each) | {"look_at": advice(each, floor_bytes, device)} for each in profiles],
    }
