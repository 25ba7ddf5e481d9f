"""The launch of a kernel whose programs exchange with those of other ranks, prepared as `runner.prepare` does.

Its memory is on this rank's GPU, though the process mostly sees those of all ranks of its host.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from fused_softmax.core import calls
from fused_softmax.core.device import device_of
from fused_softmax.core.launched import Launched, compose
from fused_softmax.core.plan import RowPlan
from fused_softmax.core.runner import prepare
from fused_softmax.ranks.groups import Shards
from fused_softmax.ranks.peers import Peers
from fused_softmax.ranks.plan import plan_peers

DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # whose states are two numbers of 32 bits
_DIGEST = 0x7FFFFFFF  # ranks/kernels.py
PARTS: dict[str, int] = {}  # "cols": columns of a part, for tests and sweeps, which set it alike on every rank


class Facts(NamedTuple):
    """Shards without their group, which ends."""

    rank: int
    sizes: tuple[int, ...]
    n_classes: int
    digest: int | None

    def of(self, group: Any) -> Shards:
        return Shards(group, *self)


def facts_of(shards: Shards) -> Facts:
    return Facts(*shards[1:5])


def plan_of(
    n_rows: int, itemsize: int, alignment: Any, facts: Facts, device: int, *, inputs: int = 1
) -> RowPlan | None:
    """The plan of this rank's columns that are no padding; None on every rank where there are too many for it.

    inputs: 2 for pairs of rows.
    """
    held = facts.of(None).held_by
    return plan_peers(
        n_rows, held[facts.rank], max(held), len(held), itemsize, device_of(device), alignment=alignment,
        part_cols=PARTS.get("cols"), inputs=inputs,
    )  # fmt: skip


def prepare_launch(
    kernel: Any, plan_for: Callable[[int], RowPlan], n_rows: int, spec: Any, tensors: Mapping[str, Tensor | None],
    values: Mapping[str, Any], numbers: Sequence[str], peers: Peers, group: Any, asked: str,
    alike: Callable[[int], bool] = lambda n: True, messages: int = 1, **options: Any,
) -> Launched:  # fmt: skip
    """Compile `kernel` for tensors like these: call(peers, group, *tensors, *numbers), without the slots.

    plan_for: the plan for so many rows. alike: whether a call of so many takes the same kernel, if its plan is the
    same. asked: what every rank has to ask alike, and where they do not, is told. messages: of a part.
    """
    plan = plan_for(n_rows)
    slots_per_row = messages * (plan.parts + 1) * peers.ranks
    region = peers.region(group, slots_per_row, n_rows)
    values = {"rank": peers.rank, "ranks": peers.ranks, "digest": 0, "set_size": region.set_size, **values}
    n_tensors = sum(each is not None for each in tensors.values())

    def plan_alike(n: int) -> RowPlan | None:
        other = plan_for(n)
        return other if replace(other, n_rows=plan.n_rows) == plan and alike(n) else None

    pack = struct.Struct(f"{len(numbers)}d").pack

    def build(n, launch):
        digest = _digest(asked, n, plan)

        def call(peers, group, *arguments):
            region, given = peers.of_launch(group, slots_per_row, n), arguments[n_tensors:]
            # Numbers are not in the key of a kept call, so the digest has their bytes: hash(-1.0) is hash(-2.0).
            launch(
                region.slots, region.bases, region.asked, *arguments[:n_tensors], region.set_size,
                crc32(pack(*given), digest) & _DIGEST, *given,
            )  # fmt: skip

        return call

    launched = prepare(
        kernel, plan, spec, {"slots": region.slots, "bases": region.bases, "asked": region.asked, **tensors}, values,
        device=peers.device.index if peers.device.type == "cuda" else -1, numbers=("set_size", "digest", *numbers),
        plan_for=plan_alike, **options,
    )  # fmt: skip
    return compose(build, launched, n=n_rows)


def _digest(asked: str, n_rows: int, plan: RowPlan) -> int:
    return crc32(f"{asked} {n_rows} {plan.parts} {plan.part_cols}".encode())


_empty_strided_cuda: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)  # on the current device


def allocator(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """As `calls.allocator`. That one is fast if the process sees one GPU; this one, also while `device` is current."""
    general, fast = calls.allocator(device), _empty_strided_cuda
    if device.type != "cuda" or fast is None or general is fast:
        return general
    current: Any = torch._C._cuda_getDevice
    index = device.index

    def empty(shape, strides, dtype):
        return fast(shape, strides, dtype) if current() == index else general(shape, strides, dtype)

    return empty
