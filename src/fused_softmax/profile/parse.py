"""Parses the output of profilers and compilers: ncu's CSV, Proton's tree, PTX, resources. Standard library only."""

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fused_softmax.profile.command import STALL, STALLS

# ncu's units in bytes or microseconds.
_UNITS = {
    "byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12,
    "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30,
    "ns": 1e-3, "nsecond": 1e-3, "us": 1, "usecond": 1, "ms": 1e3, "msecond": 1e3, "s": 1e6, "second": 1e6,
}  # fmt: skip
_LIMITS = {"registers": "registers", "shared_mem": "shared memory", "warps": "warps", "blocks": "programs"}


@dataclass(frozen=True)
class Kernel:
    """One launch, as far as it is known from counters or from its binary alone.

    grid, block: programs, and threads of a program.
    occupancy: resident warps, in percent of a multiprocessor's. occupancy_limit: the most that could reside;
        limited_by names the limit.
    dram_percent: percent of the memory's peak.
    loads, stores: bytes of a thread's access to global memory; when measured, their mean.
    spilled_bytes: moved to and from local memory; from a binary, held there by a thread.
    stalls: warps stalled for each instruction issued.
    """

    name: str
    grid: int | None = None
    block: int | None = None
    time_us: float | None = None
    dram_bytes: float | None = None
    dram_percent: float | None = None
    l2_bytes: float | None = None
    l2_hit_percent: float | None = None
    occupancy: float | None = None
    occupancy_limit: float | None = None
    limited_by: str | None = None
    waves: float | None = None
    registers: int | None = None
    shared_bytes: int | None = None
    spilled_bytes: float | None = None
    loads: str | None = None
    stores: str | None = None
    stalls: tuple[tuple[str, float], ...] = field(default=())


def ncu(text: str) -> list[Kernel]:
    """The kernels in the output of `ncu --csv --page raw`, or in its long form, in the order of their launches.

    Lines around the table, by ncu or the application, are skipped. ValueError if there is no table.
    """
    return [_kernel(metrics) for metrics in _tables(text)]


def _tables(text: str) -> Iterator[dict[str, str]]:
    """A dict for each kernel: its name, and every metric's value in bytes, microseconds or its own unit."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID",')), None)
    if start is None:
        raise ValueError("no table of kernels")
    rows = list(csv.reader(io.StringIO("\n".join(line for line in lines[start:] if line.startswith('"')))))
    head, body = rows[0], [row for row in rows[1:] if len(row) == len(rows[0])]
    if "Metric Name" not in head:
        units = dict(zip(head, body[0], strict=True)) if body and not body[0][0] else {}
        for row in body[1:] if units else body:
            yield {name: _scaled(value, units.get(name, "")) for name, value in zip(head, row, strict=True)}
        return
    kernels: dict[str, dict[str, str]] = {}
    for row in body:
        line = dict(zip(head, row, strict=True))
        kernel = kernels.setdefault(line["ID"], {"Kernel Name": line["Kernel Name"]})
        kernel[line["Metric Name"]] = _scaled(line["Metric Value"], line["Metric Unit"])
    yield from kernels.values()


def _scaled(value: str, unit: str) -> str:
    factor = _UNITS.get(unit, 1)
    if factor == 1:
        return value
    number = _number(value)
    return "" if number is None else repr(number * factor)


def _number(text: str | None) -> float | None:
    """A number with commas between thousands; None for "n/a" and anything else."""
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def _kernel(metrics: dict[str, str]) -> Kernel:
    def get(name: str) -> float | None:
        return _number(metrics.get(name))

    def whole(name: str) -> int | None:
        return None if (value := get(name)) is None else round(value)

    def total(*names: str) -> float | None:
        found = [value for name in names if (value := get(name)) is not None]
        return sum(found) if found else None

    def width(kind: str) -> str | None:
        moved = get(f"smsp__sass_data_bytes_mem_global_op_{kind}.sum")
        instructions = get(f"smsp__sass_inst_executed_op_global_{kind}.sum")
        return f"{moved / instructions / 32:.3g}" if moved and instructions else None

    limits = {
        word: value for name, word in _LIMITS.items() if (value := get(f"launch__occupancy_limit_{name}")) is not None
    }
    least = min(limits.values(), default=None)
    stalls = {name: get(STALL.format(name)) for name in STALLS}
    known = sorted(((name, value) for name, value in stalls.items() if value), key=lambda item: -item[1])
    return Kernel(
        name=metrics.get("Kernel Name", ""),
        grid=whole("launch__grid_size"),
        block=whole("launch__block_size"),
        time_us=get("gpu__time_duration.sum"),
        dram_bytes=total("dram__bytes_read.sum", "dram__bytes_write.sum"),
        dram_percent=get("dram__throughput.avg.pct_of_peak_sustained_elapsed"),
        l2_bytes=get("lts__t_bytes.sum"),
        l2_hit_percent=get("lts__t_sector_hit_rate.pct"),
        occupancy=get("sm__warps_active.avg.pct_of_peak_sustained_active"),
        occupancy_limit=get("sm__maximum_warps_per_active_cycle_pct"),
        limited_by=" and ".join(word for word, value in limits.items() if value == least) or None,
        waves=get("launch__waves_per_multiprocessor"),
        registers=whole("launch__registers_per_thread"),
        shared_bytes=whole("launch__shared_mem_per_block"),
        spilled_bytes=total(
            "l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum", "l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum"
        ),
        loads=width("ld"),
        stores=width("st"),
        stalls=tuple(known),
    )


def problem(log: str, code: int) -> str:
    """Why ncu gave no counters, in a sentence, or "" if it does not say."""
    if "ERR_NVGPUCTRPERM" in log:
        return (
            "the driver lets only administrators read the GPU's counters (ERR_NVGPUCTRPERM): run as root, or have "
            "NVreg_RestrictProfilingToAdminUsers=0 set for the nvidia module"
        )
    errors = [line.removeprefix("==ERROR==").strip() for line in log.splitlines() if line.startswith("==ERROR==")]
    if errors:
        return f"ncu: {errors[0]}"
    if "No kernels were profiled" in log:
        return "ncu saw no kernel in the call"
    return f"ncu ended with exit code {code}" if code else ""


def proton(text: str, scope: str) -> dict[str, tuple[float, int]]:
    """Microseconds and launches of each kernel under `scope` in Proton's tree. ValueError for anything else."""
    found: dict[str, tuple[float, int]] = {}

    def walk(node: Any, inside: bool) -> None:
        if not isinstance(node, dict) or "frame" not in node:
            return
        name, metrics, children = node["frame"].get("name", ""), node.get("metrics", {}), node.get("children", [])
        if inside and not children and (time := metrics.get("time (ns)")):
            us, count = found.get(name, (0.0, 0))
            found[name] = us + time * 1e-3, count + int(metrics.get("count", 1))
        for child in children:
            walk(child, inside or name == scope)

    tree = json.loads(text)
    for root in tree if isinstance(tree, list) else [tree]:
        walk(root, False)
    return found


# `@%p1 ld.global.L1::evict_first.v4.b32 {...}`: state space, cache words, vector, type.
_PTX_ACCESS = re.compile(
    r"\b(?P<op>ld|st)(?:\.\w+)*?\.global(?:\.[\w:]+?)*?(?:\.v(?P<count>[248]))?\.(?:b|u|s|f|bf)(?P<bits>\d+)\b"
)
# `cp.async.cg.shared.global [%r1 + 0], [%rd1 + 0], 0x10, %r2`: the width follows the two addresses.
_PTX_COPY = re.compile(
    r"\bcp\.async\.c[ag]\.shared\.global[\w.:]*\s*\[[^\]]*\],\s*\[[^\]]*\],\s*(?P<bytes>0x[0-9a-fA-F]+|\d+)"
)
# `buffer_load_dwordx4`, `global_load_ushort`, `global_store_short_d16_hi`; newer chips write `global_load_b128`.
_AMD_ACCESS = re.compile(
    r"\b(?:global|buffer|flat)_(?P<op>load|store)_(?:lds_)?(?:d16_(?:hi_)?)?"
    r"(?:[us]?(?P<word>byte|short|dword)(?:x(?P<count>\d))?|[bui](?P<bits>\d+))"
)


def ptx_widths(ptx: str, op: str) -> list[int]:
    """Bytes of each access to global memory in PTX text. op: "ld", which includes cp.async, or "st".

    Of a kernel alone, if it calls functions: those stand before it and behind it.
    """
    start = max(0, ptx.find(".entry "))
    end = ptx.find("\n.func ", start)
    ptx = ptx[start : end if end >= 0 else None]
    accesses = [
        (each.start(), int(each["count"] or 1) * int(each["bits"]) // 8)
        for each in _PTX_ACCESS.finditer(ptx)
        if each["op"] == op
    ]
    copies = [(each.start(), int(each["bytes"], 0)) for each in _PTX_COPY.finditer(ptx)] if op == "ld" else []
    return [width for _, width in sorted(accesses + copies)]


def amd_widths(amdgcn: str, op: str) -> list[int]:
    """Bytes of each access to global memory in amdgcn text, without scalar loads. op: "load" or "store"."""
    size = {"byte": 1, "short": 2, "dword": 4}
    return [
        int(each["bits"]) // 8 if each["bits"] else size[each["word"]] * int(each["count"] or 1)
        for each in _AMD_ACCESS.finditer(amdgcn)
        if each["op"] == op
    ]


def widths(found: list[int]) -> str:
    """The widths, widest first, each with its number of accesses: 16 x8, 2 x1."""
    counted = sorted(Counter(found).items(), reverse=True)
    return ", ".join(f"{width} x{count}" for width, count in counted) or "none"


def local_bytes(sass: str) -> int:
    """Bytes of local memory that a kernel's own code writes, in the output of `nvdisasm`.

    Functions that it calls follow it in the same section, each after a label that begins with `$`.
    """
    words: set[int] = set()
    for line in sass.splitlines():
        if line.startswith("$"):
            break
        for width, offset in re.findall(r"\bSTL(?:\.(64|128))?\s+\[R1(?:\+(0x[0-9a-f]+))?\]", line):
            first = int(offset or "0", 16)
            words |= set(range(first, first + int(width or "32") // 8, 4))
    return 4 * len(words)


def usage(text: str) -> dict[str, int]:
    """REG, STACK, SHARED and LOCAL in the output of `cuobjdump -res-usage`."""
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}
