"""Rows whose columns lie in shards over the ranks of a group: who holds which, and what the ranks tell each other.

Each rank reduces its own columns to a few numbers a row. One all_gather carries all ranks' numbers to every rank, and
every rank merges them in rank order. So all ranks get the same bits, in every run. Any backend that gathers will do.
"""

import ctypes
import os
import zlib
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, Literal, NamedTuple, get_args
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fused_softmax.described import described, typed

CHECK = os.environ.get("FUSED_SOFTMAX_CHECK") == "1"
Transport = Literal["peer", "collective"]
TRANSPORTS = get_args(Transport)
BY_PEERS = ("softmax", "log_softmax", "logsumexp", "cross_entropy", "linear_cross_entropy")
CHANGING = "Shards whose sizes change need n_classes, unless all have as many columns as each other"
_SAID = 1024  # bytes of what a rank says of a call
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)  # of 2.11
_HEADER = 4  # numbers at the end of each message: a rank's columns, those of all as it knows them, rows, a digest
_NOTHING = -1.0  # which no rank expects
_EXACT = 2**20  # counts below this are exact in every dtype of messages
_MOST_KINDS = 256  # of messages whose headers are kept, and of digests


class Shards(NamedTuple):
    """The columns of a row over the ranks of a group.

    sizes: of each rank's columns, in rank order. n_classes: those of them that count; the rest is padding at the end.
    digest: of what all ranks have to ask alike; None where they are known to.
    by_peers: what gathers messages in the place of the group's backend, if anything does.
    """

    group: Any
    rank: int
    sizes: tuple[int, ...]
    n_classes: int
    digest: int | None = None
    by_peers: Any = None

    @property
    def first(self) -> int:
        """This rank's first column among all."""
        return sum(self.sizes[: self.rank])

    @property
    def held(self) -> int:
        """How many of this rank's columns are no padding."""
        return self.held_by[self.rank]

    @property
    def held_by(self) -> list[int]:
        """The same of every rank."""
        ends = accumulate(self.sizes)
        return [max(0, min(size, self.n_classes - end + size)) for size, end in zip(self.sizes, ends, strict=True)]


class Headers(NamedTuple):
    """[ranks, _HEADER] of what ranks that ask alike send of themselves: beside the messages, and on the host.

    of_ranks: that of each rank, beside the messages.
    """

    there: Tensor
    on_host: Tensor
    of_ranks: tuple[Tensor, ...]


class Notice(NamedTuple):
    """Where a kernel that merges messages leaves headers that differ, [2, ranks, _HEADER]: the expected, the heard.

    Memory of the host that kernels write to, so that no call copies headers to look at them. first: its first number,
    which is _NOTHING until then, and again once the host has seen them.
    """

    there: Tensor
    first: Any
    device: torch.device


class _Doubt(NamedTuple):
    """Headers that a call has gathered and nobody has read yet; there once `event`, if any, has happened."""

    headers: Tensor
    expected: Tensor
    event: Any


_headers: dict[tuple, dict[Any, Headers]] = {}  # of messages of one kind, by the stream on which they were made
_digests: dict[tuple, int] = {}  # of what calls ask
_of_graphs: dict[tuple, Headers] = {}  # which captured graphs read as long as they live
_known: WeakKeyDictionary[Any, dict[tuple, tuple]] = WeakKeyDictionary()  # Shards without their group, which ends
_doubts: WeakKeyDictionary[Any, list[_Doubt]] = WeakKeyDictionary()
_notices: WeakKeyDictionary[Any, Notice] = WeakKeyDictionary()
_written_to: list[Tensor] = []  # of all notices: launches on their way and captured graphs may yet write there


def shards_of(
    name: str, columns: int, rows: int, group: Any, n_classes: Any, transport: Any, device: torch.device,
    asked: Mapping[str, Any], target: Tensor | None = None, change_alike: bool = True,
) -> Shards:  # fmt: skip
    """The shards of a call, or an error that says what is wrong, on every rank that can tell.

    asked: what all ranks have to ask alike. On a CPU, where nobody waits for a device, and with FUSED_SOFTMAX_CHECK=1
    in the environment, the ranks compare it, and their targets under that flag, before each call. Elsewhere they do so
    at the group's first call with this n_classes; later messages carry a digest. A rank whose columns have changed
    since goes on as if the others' had not, for these cannot know that they should compare.
    """
    if not _captures(device):
        raise_doubts(name, group)
    known = _known.get(group)
    if known is None:
        known = _known.setdefault(group, {})
    key = n_classes, device.type
    compares = _waits_for_nobody(device)
    if compares or CHECK or key not in known:
        described = {"rows": rows, **asked}
        if CHECK and target is not None:
            described["target"] = _checksum(target)
        sizes = _compare(name, group, device, {"columns": columns, "n_classes": n_classes, **described})
        if n_classes is not None and sum(sizes) < n_classes:
            raise ValueError(f"{name}: the shards hold {sizes} columns, together fewer than n_classes={n_classes}")
        known[key] = dist.get_rank(group), sizes
        if not compares:
            notice_of(group, len(sizes), device)  # before a graph is captured, in which none can be made
    rank, sizes = known[key]
    if sizes[rank] != columns:
        equal = change_alike and n_classes is None and len(set(sizes)) == 1
        sizes = (columns,) * len(sizes) if equal else (*sizes[:rank], columns, *sizes[rank + 1 :])
    n = sum(sizes) if n_classes is None else n_classes
    return Shards(group, rank, sizes, n, None if compares else _digest_of(asked))


def check_targets_alike(name: str, group: Any, target: Tensor) -> None:
    """RuntimeError on every rank of a group whose ranks have different targets."""
    _compare(name, group, target.device, {"columns": 0, "rows": target.numel(), "target": _checksum(target)})


def _checksum(target: Tensor) -> int:
    return zlib.crc32(target.detach().cpu().contiguous().numpy().tobytes())


def _digest_of(asked: Mapping[str, Any]) -> int:
    """A number of what a call asks; the same one for equal values, such as 1 and 1.0."""
    key = tuple(asked.values())
    found = _digests.get(key)
    if found is None:
        alike = [int(each) if isinstance(each, bool | float) and each % 1 == 0 else each for each in key]
        if len(_digests) >= _MOST_KINDS:
            _digests.clear()
        found = _digests[key] = zlib.crc32(repr((*asked, *alike)).encode()) % _EXACT
    return found


def as_others_know(shards: Shards, n_classes: int | None, device: torch.device) -> Shards:
    """The shards of a call as the other ranks have them, if this rank's columns have changed since they compared."""
    _, sizes = _known[shards.group][n_classes, device.type]
    return shards._replace(sizes=sizes, n_classes=sum(sizes) if n_classes is None else n_classes)


def check_group(name: str, group: Any, n_classes: Any, transport: Any, *tensors: Any) -> None:
    """Raise what a single rank can tell of the arguments that a sharded call has more, and of the kind of tensors."""
    if transport is not None and transport not in TRANSPORTS:
        raise ValueError(f"{name}: transport must be None or one of {TRANSPORTS}, got {described(transport)}")
    if transport == "peer" and name not in BY_PEERS:
        raise ValueError(f"{name}: transport='peer' is for {', '.join(BY_PEERS)}")
    if n_classes is not None and (not isinstance(n_classes, int) or isinstance(n_classes, bool)):
        raise TypeError(f"{name}: n_classes must be an int, not {typed(n_classes)}")
    if n_classes is not None and n_classes < 1:
        raise ValueError(f"{name}: n_classes must be at least 1, got {n_classes}")
    if group is None:
        raise ValueError(f"{name}: n_classes and transport are of shards, which need group=")
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(f"{name}: group= needs torch.distributed.init_process_group() before the call")
    if not isinstance(group, dist.ProcessGroup):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(f"{name}: this rank is not in the group")
        raise TypeError(f"{name}: group must be a torch.distributed.ProcessGroup, not {type(group).__name__}")
    if dist.get_rank(group) < 0:
        raise ValueError(f"{name}: this rank is not in the group")
    if any(hasattr(type(each), "to_local") for each in tensors):
        raise TypeError(f"{name}: group= takes this rank's columns as a plain tensor, got a DTensor, which has a mesh")


def gather(message: Tensor, shards: Shards) -> Tensor:
    """[ranks, *message.shape] of every rank's message, in rank order; NaN where ranks ask for different things.

    message: [numbers, rows] or [rows].
    """
    if len(shards.sizes) == 1 or not message.numel():
        return message.expand(len(shards.sizes), *message.shape)
    if shards.by_peers is not None:
        return shards.by_peers(message, shards)
    shape, said = message.shape, message.reshape(-1)
    expected = headers_of(shards, shape[-1], message.dtype, message.device)
    if expected is not None:
        said = torch.cat((said, expected.of_ranks[shards.rank]))
    heard = torch.empty(len(shards.sizes) * said.numel(), dtype=said.dtype, device=said.device)
    exchange(heard, said, shards)
    if expected is None:
        return heard.view(-1, *shape)
    heard = heard.view(len(shards.sizes), -1)
    headers = heard[:, -_HEADER:]
    _remember(shards.group, headers, expected.on_host)
    return heard[:, :-_HEADER].masked_fill((headers != expected.there).any(), float("nan")).view(-1, *shape)


def exchange(heard: Tensor, said: Tensor, shards: Shards) -> None:
    """Write what every rank says [n] into `heard` [ranks * n]."""
    _all_gather(heard, said, group=shards.group)


def headers_of(shards: Shards, rows: int, dtype: torch.dtype, device: torch.device) -> Headers | None:
    """What stands behind messages of so many rows; None where ranks are known to ask alike.

    Made once for messages of one kind: each of its numbers is a launch, for no call waits for a copy to a device.
    """
    if shards.digest is None:
        return None
    key = shards.sizes, rows, shards.digest, dtype, device
    stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else None
    captures = _captures(device)
    if not captures:
        found = _headers.get(key, {}).get(stream)
    else:  # which begins with a wait for the device, so any stream's are there
        found = _of_graphs.get(key) or next(iter(_headers.get(key, {}).values()), None)
        if found is not None:
            _of_graphs[key] = found
    if found is None:
        found = _made_headers(shards, rows, dtype, device)
        if not captures:  # else they are the graph's own, and nobody has made them yet
            if len(_headers) >= _MOST_KINDS:
                _headers.clear()
            _headers.setdefault(key, {})[stream] = found
    return found


def _made_headers(shards: Shards, rows: int, dtype: torch.dtype, device: torch.device) -> Headers:
    of_all = sum(shards.sizes), rows, shards.digest or 0
    counts = [[count % _EXACT for count in (size, *of_all)] for size in shards.sizes]
    numbers = [torch.full((), count, dtype=dtype, device=device) for each in counts for count in each]
    there = torch.stack(numbers).view(-1, _HEADER)
    return Headers(there, torch.tensor(counts, dtype=dtype, device="cpu"), there.unbind())


def notice_of(group: Any, ranks: int, device: torch.device) -> Tensor:
    """Where a kernel leaves the headers of a group's messages that differ."""
    found = _notices.get(group)
    if found is None:
        there = torch.full(
            (2, ranks, _HEADER), _NOTHING, dtype=torch.float32, device="cpu", pin_memory=device.type == "cuda"
        )
        _written_to.append(there)
        found = _notices[group] = Notice(there, ctypes.c_float.from_address(there.data_ptr()), device)
    return found.there


def _waits_for_nobody(device: torch.device) -> bool:
    """Whether what is gathered there can be looked at without a wait for a device."""
    return device.type == "cpu"


def _captures(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, in which nothing can be asked of earlier calls."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _compare(name: str, group: Any, device: torch.device, said: Mapping[str, Any]) -> tuple[int, ...]:
    """The columns of every rank, once all are found to say the same of all else."""
    text = "\n".join(f"{key}={value}" for key, value in said.items()).encode()[:_SAID]
    own = torch.zeros(_SAID, dtype=torch.uint8, device="cpu")
    own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    size = dist.get_world_size(group)
    heard = torch.empty(size * _SAID, dtype=torch.uint8, device=device)
    _all_gather(heard, own.to(device), group=group)
    lines = [bytes(each.tolist()).rstrip(b"\0").decode().split("\n") for each in heard.cpu().view(size, -1)]
    all_said = [dict(line.split("=", 1) for line in each) for each in lines]
    for key in all_said[0] | all_said[-1]:
        values = [each.get(key, "nothing") for each in all_said]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if key != "columns" and other is not None:
            said_there = f"{values[0]} on rank 0, {values[other]} on rank {other}"
            raise RuntimeError(f"{name}: the ranks of the group differ in {key}: {said_there}")
    return tuple(int(each["columns"]) for each in all_said)


def _remember(group: Any, headers: Tensor, expected: Tensor) -> None:
    """Keep what a later call can say of this one: no call waits for a device to say it of itself."""
    if _captures(headers.device):
        return
    event = None
    if headers.is_cuda:
        headers = torch.empty(headers.shape, dtype=headers.dtype, device="cpu", pin_memory=True).copy_(
            headers, non_blocking=True
        )
        event = torch.cuda.Event()
        event.record()
    _doubts.setdefault(group, []).append(_Doubt(headers, expected, event))


def raise_doubts(name: str, group: Any) -> None:
    """Raise what earlier calls have found, as far as the device has come."""
    notice = _notices.get(group)
    if notice is not None and notice.first.value != _NOTHING:
        if notice.device.type == "cuda":
            torch.cuda.synchronize(notice.device)  # the other numbers are on their way, and maybe another call's
        expected, headers = notice.there.clone()
        notice.there.fill_(_NOTHING)
        _raise_difference(name, group, headers, expected)
    doubts = _doubts.get(group)
    while doubts and (doubts[0].event is None or doubts[0].event.query()):
        headers, expected, _ = doubts.pop(0)
        if not headers.equal(expected):
            _raise_difference(name, group, headers, expected)


def _raise_difference(name: str, group: Any, headers: Tensor, expected: Tensor) -> None:
    _doubts.pop(group, None)
    _known.pop(group, None)  # the next call compares
    kinds = ("columns", "columns", "rows", "options")  # as the header has them
    differing = [kind for kind, *both in zip(kinds, headers.T, expected.T, strict=True) if not torch.equal(*both)]
    # Two calls that overlap on two streams may have left some numbers each.
    kind = differing[0] if differing else "options"
    told = ""
    if kind == "columns":
        told = f": {headers[:, 0].long().tolist()} by rank. {CHANGING}"
    differed = f"the ranks of the group differed in their {kind}{told}"
    raise RuntimeError(f"{name}: an earlier call gave NaN, because {differed}")
