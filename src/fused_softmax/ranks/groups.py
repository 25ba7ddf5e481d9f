"""Rows whose columns lie in shards over the ranks of a group: who holds which, and what the ranks tell each other.

Each rank reduces its own columns to a few numbers a row. One all_gather carries all ranks' numbers to every rank, and
every rank merges them in rank order. So all ranks get the same bits, in every run. Any backend that gathers will do.

What a rank takes the others to hold follows from its arguments alone: as many columns as it has itself, or those that
shard_sizes gives. Nothing is kept of earlier calls. Whether the others mean the same is found out in the call: on a CPU
before it, elsewhere by the header of each message.
"""

import ctypes
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, Literal, NamedTuple, get_args
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fused_softmax.core.checks import CHECK
from fused_softmax.core.described import described, typed
from fused_softmax.core.layout import as_bytes
from fused_softmax.ranks.peers import UNEVEN, choose

Transport = Literal["peer", "collective"]
TRANSPORTS = get_args(Transport)
WITHOUT_PEERS: set[str] = set()  # functions whose ranks exchange by the backend alone; their rooms add their names
_SAID = 1024  # bytes of what a rank says of a call
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)  # of 2.11
_HEADER = 4  # numbers at the end of each message: a rank's columns, n_classes, rows, a digest of all that is asked
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
_doubts: WeakKeyDictionary[Any, list[_Doubt]] = WeakKeyDictionary()
_notices: WeakKeyDictionary[Any, Notice] = WeakKeyDictionary()
_written_to: list[Tensor] = []  # of all notices: launches on their way and captured graphs may yet write there


class Over(NamedTuple):
    """The arguments that a call over a group has more, as they were given."""

    group: Any
    n_classes: Any
    shard_sizes: Any
    transport: Any


def over_of(group: Any, n_classes: Any, shard_sizes: Any, transport: Any) -> Over:
    """The same with shard_sizes as a tuple, by which calls are kept."""
    is_sequence = isinstance(shard_sizes, Sequence) and not isinstance(shard_sizes, str)
    return Over(group, n_classes, tuple(shard_sizes) if is_sequence else shard_sizes, transport)


class Refusing:
    """What a rank raises in here, before it has told the others anything, it tells them, and they raise too."""

    def __init__(self, name: str, over: Over, *tensors: Any) -> None:
        self._of = name, over, tensors

    def __enter__(self) -> None:
        check_group(*self._of[:2])

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if isinstance(error, Exception):
            _refuse(*self._of, error)


def _refuse(name: str, over: Over, tensors: Sequence[Any], error: Exception) -> None:
    group, given = over.group, next((each for each in tensors if isinstance(each, Tensor)), None)
    device = _device_of(group) if given is None else given.device
    said = f"{type(error).__name__}: {error}".replace("\n", " ")
    if _compares(device, over.transport):
        _compare(name, group, device, {"refused": said})
    elif over.transport != "collective":
        with suppress(ValueError):  # where nobody goes by peers
            peers = choose(name, over.transport, group, device, None)  # sets memory up, if it is the first call
            if peers is not None:
                peers.refuse(name, said)


def check_group(name: str, over: Over) -> None:
    """Raise where there is no group that this rank could say anything to."""
    group = over.group
    if group is None or not dist.is_available() or not dist.is_initialized():
        check_over(name, over)
    if group is None:
        others = zip(("n_classes", "shard_sizes", "transport"), over[1:], strict=True)
        given = [argument for argument, value in others if value is not None] or ["input_sharded"]
        raise ValueError(f"{name}: {' and '.join(given)} {'need' if given[1:] else 'needs'} group, got group=None")
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(f"{name}: group needs torch.distributed.init_process_group() before the call")
    if not isinstance(group, dist.ProcessGroup):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(f"{name}: this rank is not in the group")
        raise TypeError(f"{name}: group must be a torch.distributed.ProcessGroup, not {type(group).__name__}")
    if dist.get_rank(group) < 0:
        raise ValueError(f"{name}: this rank is not in the group")


def check_over(name: str, over: Over, *tensors: Any) -> None:
    """Raise what is wrong with the other arguments that a call over a group has more, and with the kind of tensors."""
    _, n_classes, sizes, transport = over
    if transport is not None and transport not in TRANSPORTS:
        raise ValueError(f"{name}: transport must be None or one of {TRANSPORTS}, got {described(transport)}")
    if transport == "peer" and name in WITHOUT_PEERS:
        raise ValueError(f"{name}: transport='peer' is not for this function; leave it out or give 'collective'")
    if n_classes is not None and (not isinstance(n_classes, int) or isinstance(n_classes, bool)):
        raise TypeError(f"{name}: n_classes must be an int, not {typed(n_classes)}")
    if n_classes is not None and n_classes < 1:
        raise ValueError(f"{name}: n_classes must be at least 1, got {n_classes}")
    if sizes is not None:
        odd = next((each for each in sizes if type(each) is not int), None) if isinstance(sizes, tuple) else sizes
        if odd is not None:
            got = type(odd).__name__ if odd is sizes else f"a {type(odd).__name__} among them"
            raise TypeError(f"{name}: shard_sizes must be a sequence of ints, one for each rank, got {got}")
    if any(hasattr(type(each), "to_local") for each in tensors):
        raise TypeError(f"{name}: group= takes this rank's columns as a plain tensor, got a DTensor, which has a mesh")


def sizes_of(name: str, over: Over, columns: int) -> tuple[int, ...]:
    """The columns of every rank: those given, or as many as this rank has."""
    group, n_classes, given, _ = over
    ranks, rank = group.size(), group.rank()
    sizes = (columns,) * ranks if given is None else given
    if len(sizes) != ranks or min(sizes) < 0:
        raise ValueError(f"{name}: shard_sizes must have {ranks} sizes, one for each rank, got {described(sizes)}")
    if sizes[rank] != columns:
        raise ValueError(
            f"{name}: shard_sizes={described(sizes)} gives rank {rank} {sizes[rank]} columns, but it has {columns}"
        )
    if n_classes is not None and sum(sizes) < n_classes:
        hint = "" if given is not None else f". {UNEVEN}"
        raise ValueError(f"{name}: the shards hold {sizes} columns, together fewer than n_classes={n_classes}{hint}")
    return sizes


def shards_of(
    name: str, sizes: tuple[int, ...], rows: int, over: Over, device: torch.device, asked: Mapping[str, Any],
    target: Tensor | None = None,
) -> Shards:  # fmt: skip
    """The shards of a call of checked arguments, or an error on every rank where ranks are found to differ.

    asked: what all ranks have to ask alike. On a CPU, where nobody waits for a device, and with FUSED_SOFTMAX_CHECK=1
    in the environment, the ranks compare it before the call, and under that flag their targets too. Elsewhere each
    message carries a digest of it.
    """
    group, n_classes, given, transport = over
    if not _captures(device):
        raise_doubts(name, group)
    compares = _compares(device, transport)
    if compares:
        said = {"columns": sizes[group.rank()], "n_classes": n_classes, "rows": rows, **asked, "transport": transport}
        said["shard_sizes"] = given
        if CHECK and target is not None:
            said["target"] = checksum(target)
        _compare(name, group, device, said)
    elif not _captures(device):
        notice_of(group, len(sizes), device)  # before a graph is captured, in which none can be made
    n = sum(sizes) if n_classes is None else n_classes
    digest = None if compares and _waits_for_nobody(device) else _digest_of(asked, sizes)
    return Shards(group, group.rank(), sizes, n, digest)


def check_targets_alike(name: str, group: Any, target: Tensor) -> None:
    """RuntimeError on every rank of a group whose ranks have different targets."""
    said = {"columns": 0, "rows": target.numel(), "target": checksum(target), "shard_sizes": None}
    _compare(name, group, target.device, said)


def checksum(target: Tensor) -> int:
    """By which ranks compare the values of a tensor that all have to give alike."""
    return zlib.crc32(as_bytes(target.detach().cpu().reshape(-1)).numpy().tobytes())


def _digest_of(asked: Mapping[str, Any], sizes: tuple[int, ...]) -> int:
    """A number of what a call asks; the same one for equal values, such as 1 and 1.0."""
    key = sizes, *asked.values()
    found = _digests.get(key)
    if found is None:
        alike = [int(each) if isinstance(each, bool | float) and each % 1 == 0 else each for each in key]
        if len(_digests) >= _MOST_KINDS:
            _digests.clear()
        found = _digests[key] = zlib.crc32(repr((*asked, *alike)).encode()) % _EXACT
    return found


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
    key = shards.sizes, shards.n_classes, rows, shards.digest, dtype, device
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
    of_all = shards.n_classes, rows, shards.digest or 0
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


def _compares(device: torch.device, transport: Any) -> bool:
    """Whether ranks compare a call before they make it."""
    return CHECK or (_waits_for_nobody(device) and transport != "peer")


def _device_of(group: Any) -> torch.device:
    """Where the ranks of a group gather, if a call has no tensor that says so."""
    by_gpu = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if by_gpu else torch.device("cpu")


def _compare(name: str, group: Any, device: torch.device, said: Mapping[str, Any]) -> None:
    """Raise on every rank where ranks do not say the same; but on one that refuses its call, and raises why itself."""
    text = "\n".join(f"{key}={value}" for key, value in said.items()).encode()
    text = (b"%08x\n" % zlib.crc32(text.partition(b"\n")[2]) + text)[:_SAID]  # the digest is of all but the columns
    own = torch.tensor([*text.ljust(_SAID, b"\0")], dtype=torch.uint8, device="cpu")
    size = dist.get_world_size(group)
    heard = torch.empty(size * _SAID, dtype=torch.uint8, device=device)
    _all_gather(heard, own.to(device), group=group)
    texts = [bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in heard.cpu().view(size, -1)]
    if "refused" in said:
        return
    lines = [each.split("\n") for each in texts]
    all_said = [dict(line.partition("=")[::2] for line in each[1:]) for each in lines]
    for rank, each in enumerate(all_said):
        if "refused" in each:
            raise RuntimeError(f"{name}: rank {rank} refused its call: {each['refused']}")
    before = f"{name}: the ranks of the group"
    for key in all_said[0] | all_said[-1]:
        values = [each.get(key, "nothing") for each in all_said]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if key != "columns" and other is not None:
            raise RuntimeError(f"{before} differ in {key}: {values[0]} on rank 0, {values[other]} on rank {other}")
    columns = [int(each["columns"]) for each in all_said]
    if said["shard_sizes"] is None and len(set(columns)) > 1:
        raise RuntimeError(f"{before} hold {columns} columns by rank. {UNEVEN}")
    if len({each[0] for each in lines}) > 1:
        raise RuntimeError(f"{before} differ in what they ask, past the {_SAID} bytes that each tells of it")


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
    kinds = ("columns", "n_classes", "rows", "options")  # as the header has them
    differing = [kind for kind, *both in zip(kinds, headers.T, expected.T, strict=True) if not torch.equal(*both)]
    # Two calls that overlap on two streams may have left some numbers each.
    kind = differing[0] if differing else "options"
    told = ""
    if kind == "columns":
        told = f": {headers[:, 0].long().tolist()} by rank. {UNEVEN}"
    differed = f"the ranks of the group differed in their {kind}{told}"
    raise RuntimeError(f"{name}: an earlier call gave NaN, because {differed}")
