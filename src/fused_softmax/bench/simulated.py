"""What a loss over 4 to 1024 ranks should take, computed from measured times and link speeds.

    python -m fused_softmax.bench.simulated [benchmarks/results/h100_shards_4.json ...] measured/ranks.md [--check]

Rewrites the tables between two markers. Files that `fused-softmax bench shards` wrote add a table of what was measured,
beside what is computed for as many ranks whose memory is as fast as the best plain kernel there. With --check it writes
nothing and exits with 1 if the page disagrees. Standard library only.

A rank of `peer` reads its shard once and writes its gradient, and a message of 8 bytes a row goes to each other rank
meanwhile. A rank of `collective` reads its shard, gathers 3 numbers of float32 a row of every rank, and reads its shard
again to write the gradient. Launches are not counted. An all_gather is what two ranks took, plus what NCCL's own model
(`src/graph/tuning.cc` at commit b647562) adds for more of them and for more bytes: a ring of R - 1 steps, each with a
latency, by the protocol that is fastest for so many bytes.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fused_softmax.bench import tables
from fused_softmax.bench.cases import Case
from fused_softmax.bench.catalog import OWN
from fused_softmax.bench.results import record
from fused_softmax.bench.results.record import Run
from fused_softmax.bench.tables import table_row
from fused_softmax.core.plan import H200

PLACE, LOSS = "ranks", "cross_entropy_gradient"
RANKS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
CASES = (Case((8192, 128256), "bfloat16"), Case((64, 128256), "float32"))
PER_HOST = 8  # H200s of one host, each with a network adapter of its own

MEMORY = H200.copy_bytes_per_second or 0.0  # bytes a second, of a copy on an H200: measured/bench.md
MESSAGE_US = 0.66  # a round of 64-bit messages between two running kernels, measured on 2 H200s
GATHER_US = 38.0  # all_gather of 3 numbers a row by NCCL on 2 H200s, the longest measured for 1 to 65536 rows
NVLINK = 450e9  # bytes a second one way: 900 GB/s a GPU both ways (NVIDIA H200 data sheet)
NETWORK = 400e9 / 8  # bytes a second one way: InfiniBand of 400 Gb/s (MLPerf Inference 4.1, H200-SXM-141GBx8)


@dataclass(frozen=True)
class Protocol:
    """Of NCCL's model of rings on Hopper GPUs beside Intel processors.

    us: at the beginning; of a step within a host, and to another; to post one, where there are several hosts.
    share: of the links' speed, within a host and over several. most: bytes a second, on a host, on two, and on more.
    """

    base_us: float
    nvlink_us: float
    network_us: float
    posted_us: float
    share: tuple[float, float]
    most: tuple[float, float, float]


INFINITE = (float("inf"),) * 3
PROTOCOLS = (
    Protocol(6.6, 0.6, 2.7, 1.0, (1 / 3, 1 / 4), (87.7e9, 39.0e9, 20.4e9)),  # LL
    Protocol(14.0, 1.9, 4.0, 1.0, (0.92, 0.92), INFINITE),  # LL128
    Protocol(8.4, 3.4, 14.0, 3.0, (1.0, 1.0), INFINITE),  # Simple
)


def hosts_of(ranks: int) -> int:
    return -(-ranks // PER_HOST)


def ring_us(ranks: int, sent: int) -> float:
    """NCCL's model of an all_gather to which every rank gives so many bytes."""
    hosts = hosts_of(ranks)
    between = hosts - 1
    links = NVLINK if hosts == 1 else min(NVLINK, PER_HOST * NETWORK)
    times = []
    for each in PROTOCOLS:
        within_us = each.nvlink_us if hosts == 1 else max(each.nvlink_us, each.posted_us)
        latency = each.base_us + (ranks - 1 - between) * within_us + between * each.network_us
        speed = min(links * each.share[hosts > 1], each.most[min(hosts, 3) - 1])
        times.append(latency + (ranks - 1) * sent / speed * 1e6)
    return min(times)


def gather_us(ranks: int, sent: int) -> float:
    return GATHER_US + ring_us(ranks, sent) - ring_us(2, 0)


@dataclass(frozen=True)
class Times:
    """us of a mean loss with its gradient, on each of so many ranks. peer: None over several hosts.

    shard: one read and one write of a shard. exchange: the part of collective in which ranks wait for each other.
    gathered: of every rank that gathers all logits and computes the whole.
    """

    ranks: int
    shard: float
    peer: float | None
    collective: float
    exchange: float
    gathered: float


def times_of(case: Case, ranks: int, memory: float = MEMORY) -> Times:
    """memory: bytes a second."""
    read = case.tensor_bytes / ranks / memory * 1e6
    message = 12 * case.n_rows
    exchange = gather_us(ranks, message)
    merge = ranks * message / memory * 1e6  # each rank reads what all say
    peer = None
    if hosts_of(ranks) == 1:
        peer = 2 * read + MESSAGE_US + (ranks - 1) * 8 * case.n_rows / NVLINK * 1e6
    gathered = gather_us(ranks, case.tensor_bytes // ranks) + 2 * ranks * read
    return Times(ranks, 2 * read, peer, 3 * read + exchange + merge, exchange, gathered)


def render(runs: Sequence[Run] = ()) -> str:
    """The tables, and what follows from each; and one of what runs have measured, if there are any."""
    return "\n\n".join([*map(_table, CASES), *([_measured(runs)] if runs else [])])


def _measured(runs: Sequence[Run]) -> str:
    heads = ("GPU", "ranks", "loss", "one read, one write", "`peer`", "`collective`")
    lines = [table_row(heads), table_row(["---", "---:", "---", *["---:"] * 3])]
    for run in runs:
        memory = max(point.ceiling.gb_per_s for point in run.points if point.ceiling) * 1e9
        ranks = run.options["ranks"]
        for case in CASES:
            there = {
                point.provider: point
                for point in run.points
                if (point.operation, point.case.shape, point.dtype) == (LOSS, case.shape, case.dtype) and point.kernel
            }
            own = [there.get(f"{OWN} {transport}") for transport in ("peer", "collective")]
            floor = next((point.ceiling.p50_us for point in there.values() if point.ceiling), None)
            took = (floor, *(point.kernel.p50_us if point and point.kernel else None for point in own))
            model = times_of(case, ranks, memory)
            cells = [
                f"{'' if us is None else _us(us)} ({'' if computed is None else _us(computed)})"
                for us, computed in zip(took, (model.shard, model.peer, model.collective), strict=True)
            ]
            gpu = run.environment["gpu"]["name"]
            lines.append(table_row([gpu, str(ranks), f"{case.size} {case.dtype}", *cells]))
    return "\n".join(["Measured, and in brackets computed for that GPU's memory, us:", "", *lines])


def _table(case: Case) -> str:
    found = [times_of(case, ranks) for ranks in RANKS]
    heads = ("ranks", "hosts", "one read, one write", "`peer`", "`collective`", "its exchange", "gathered logits")
    lines = [table_row(heads), table_row(["---:"] * len(heads))]
    for each in found:
        peer = "" if each.peer is None else _us(each.peer)
        times = [_us(us) for us in (each.collective, each.exchange, each.gathered)]
        lines.append(table_row([str(each.ranks), str(hosts_of(each.ranks)), _us(each.shard), peer, *times]))
    return "\n".join([f"{case.size} {case.dtype}, us:", "", *lines, "", _conclusion(found)])


def _conclusion(found: Sequence[Times]) -> str:
    inside = [each for each in found if each.peer is not None]
    gains = [each.collective / (each.peer or 1.0) for each in inside]
    best = min(found, key=lambda each: each.collective)
    first = next(each.ranks for each in found if each.exchange > each.shard)
    return (
        f"Within a host `collective` takes {min(gains):.1f} to {max(gains):.1f} times as long as `peer`. Its exchange "
        f"takes longer than a\nread and a write of the shard from {first} ranks on. {best.ranks} ranks take least."
    )


def _us(us: float) -> str:
    return f"{us:.2g}" if us < 1 else f"{us:.1f}" if us < 100 else f"{us:.0f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = tables.command("simulated", "Fill the tables of ranks.")
    parser.add_argument("results", type=Path, nargs="*", help="files that `fused-softmax bench shards` wrote")

    def update(options: argparse.Namespace) -> list[Path]:
        runs = []
        for path in options.results:
            with tables.naming(path):
                runs.append(record.read(path))
                if "ranks" not in runs[-1].options:
                    raise ValueError("is not what `fused-softmax bench shards --out` writes")
        return tables.fill(options.page, render(runs), PLACE, check=options.check)

    return tables.run(parser, arguments, update)


if __name__ == "__main__":
    sys.exit(main())
