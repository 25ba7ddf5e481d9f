"""Memory that the GPUs of a group write into each other's, and the choice of how ranks talk to each other.

`peer`: the kernels exchange by this memory (`kernels/peers.py`). It takes GPUs of one host and one kind, of which each
can map the others' memory. `collective`: all else, by `distributed.gather`.

Memory is set up at a group's first call, and grows as rows do: both are collective, and so have to happen outside a
captured graph. It is never multicast. On CPU ranks, whose kernels are interpreted, it is a file that all ranks map.
"""

import ctypes
import itertools
import os
import socket
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

_MISSING = 1  # of the words that kernels leave
_DEFAULT_SECONDS = 600.0
_POLLS_A_SECOND = 2000  # under the interpreter, whose kernels have no clock
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"

_numbers = itertools.count()
_groups: WeakKeyDictionary[Any, dict[int, "Peers | str"]] = WeakKeyDictionary()
_last: dict[int, Any] = {}  # by device: the stream of the last launch that waits for other GPUs


class Region(NamedTuple):
    """Slots of rows that have equally many.

    slots: int64, two sets, this rank's. bases: int64 [ranks + 2], where each rank's begin, where kernels leave word of
    what is missing, and how long they wait for it. set_size: slots of a set. rows: for how many there are slots. kept:
    what holds the mappings.
    """

    slots: Tensor
    bases: Tensor
    set_size: int
    rows: int
    kept: Any


class Peers:
    """A group's memory on one device. number: its own among all of this process.

    seconds: how long a program waits for another rank's message.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.number, self.device = next(_numbers), device
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.seconds = _seconds_of(group, device)
        self.limit = max(1, int(self.seconds * (1e9 if device.type == "cuda" else _POLLS_A_SECOND)))
        self._regions: dict[int, Region] = {}
        self._outgrown: list[Region] = []  # captured graphs go on using what they were captured with
        self._word = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self._seen = ctypes.c_int64.from_address(self._word.data_ptr())
        self._spoilt: str | None = None

    @property
    def compares(self) -> bool:
        """Whether ranks compare what they ask for whenever a call is not found: then all ranks have to find the same.

        A call for another number of rows may be made from one that is kept on one rank, and not on another.
        """
        return self.device.type == "cpu" and self.ranks > 1

    def ready(self, name: str) -> None:
        """Raise what earlier launches have left word of; from then on, at every call."""
        if self._seen.value or self._spoilt:
            self._raise(name)

    def _raise(self, name: str) -> None:
        if self._spoilt is None:
            word = self._seen.value
            row, rank, kind = word >> 16, (word >> 2) & 0x3FFF, word & 3
            if kind == _MISSING:
                self._spoilt = f"rank {rank} has told nothing of row {row} in {self.seconds:g} s"
            else:
                self._spoilt = f"rank {rank} differed in operation, dtype, columns, rows or options, as of row {row}"
        raise RuntimeError(
            f"{name}: an earlier call gave NaN, because {self._spoilt}; no rank can use this group's memory any more: "
            "make a new group"
        )

    def region(self, group: Any, slots_per_row: int, n_rows: int) -> Region:
        """The slots of n_rows; every rank of the group asks for the same, one after the other."""
        found = self._regions.get(slots_per_row)
        if found is None or found.rows < n_rows:
            found = self._grown(group, slots_per_row, n_rows)
        return found

    def _grown(self, group: Any, slots_per_row: int, n_rows: int) -> Region:
        _refuse_capture(self.device)
        rows = n_rows + n_rows // 4
        set_size = rows * slots_per_row
        if set_size >= 2**31:
            raise ValueError(f"{n_rows} rows of {slots_per_row} messages are too many for one call over peers")
        said = _heard(group, set_size)
        if len(set(said)) > 1:
            raise RuntimeError(
                f"the ranks of the group differ in rows or columns: they need {said} slots by rank. Shards whose sizes "
                "change need n_classes, unless all have as many columns as each other"
            )
        slots, addresses, kept = _mapped(group, self.device, 2 * set_size)
        bases = torch.tensor([*addresses, self._word.data_ptr(), self.limit], dtype=torch.int64, device=self.device)
        if slots_per_row in self._regions:
            self._outgrown.append(self._regions[slots_per_row])
        self._regions[slots_per_row] = Region(slots, bases, set_size, rows, kept)
        return self._regions[slots_per_row]

    def in_turn(self) -> None:
        """Have this launch follow the last one that waited for other GPUs, whichever stream and group it was of.

        In another order on another rank, both might hold a chip and wait for each other.
        """
        index = self.device.index
        if index is not None:
            last = _last.get(index)
            if last is None or last.cuda_stream != torch._C._cuda_getCurrentRawStream(index):
                _follow(index, last)


def _follow(index: int, last: Any) -> None:
    if torch.cuda.is_current_stream_capturing():  # who replays a graph orders it
        return
    now = torch.cuda.current_stream(index)
    if last is not None:
        event = torch.cuda.Event()
        event.record(last)
        now.wait_event(event)
    _last[index] = now


def choose(name: str, transport: Any, group: Any, device: torch.device, hindrance: str | None) -> Peers | None:
    """The memory by which the ranks of a call talk, or None for a collective.

    hindrance: why this call cannot go by peers, on any rank, in words. Tensors of a CPU go by them only if asked.
    Raises where transport is "peer" and that cannot be.
    """
    if transport == "collective" or (transport is None and device.type != "cuda"):
        return None
    found: Peers | str | None = None
    if hindrance is None:
        found = known(group, device)
        if found is None:
            _refuse_capture(device)
            found = _groups.setdefault(group, {})[_key(device)] = _set_up(group, device)
        hindrance = found if isinstance(found, str) else None
    if hindrance is not None and transport == "peer":
        raise ValueError(f"{name}: transport='peer' cannot take this call: {hindrance}")
    return found if isinstance(found, Peers) else None


def known(group: Any, device: Any) -> "Peers | str | None":
    """What is set up for a group; or why nothing is; None where nobody has asked yet."""
    try:
        return _groups[group].get(_key(device))
    except (AttributeError, KeyError, TypeError):  # of no group, too
        return None


def _key(device: torch.device) -> int:
    return -1 if device.index is None else device.index


def _set_up(group: Any, device: torch.device) -> Peers | str:
    """The same on every rank: each says what it has, and then whether a first mapping went well."""
    said = _heard(group, (*_facts(device), dist.get_world_size(group)))
    hosts, kinds, *_ = zip(*said, strict=True)
    if len(set(hosts)) > 1:
        return "the ranks are on several hosts"
    if len(set(kinds)) > 1:
        return f"the ranks have devices of several kinds, {sorted(set(kinds))}"
    if device.type == "cuda" and len(said) > len({each[2] for each in said}):
        return "several ranks share a GPU"
    if device.type == "cuda" and torch.version.hip:
        return "it needs NVIDIA GPUs"
    try:
        peers: Peers | str = Peers(group, device)
        peers.region(group, 1, 1)  # type: ignore[union-attr]
    except Exception as error:
        peers = f"{type(error).__name__}: {error}"
    failed = [each for each in _heard(group, peers if isinstance(peers, str) else "") if each]
    return f"the ranks cannot map each other's memory: {failed[0]}" if failed else peers


def _facts(device: torch.device) -> tuple[str, str, str]:
    """(this host, the kind of device, which one it is)."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
    if device.type != "cuda":
        return host, device.type, str(os.getpid())
    found: Any = torch.cuda.get_device_properties(device)
    return host, f"{found.name}, {found.multi_processor_count} multiprocessors", str(getattr(found, "uuid", device))


def _heard(group: Any, said: Any) -> list[Any]:
    """What every rank says, in rank order."""
    heard = [None] * dist.get_world_size(group)
    dist.all_gather_object(heard, said, group=group)
    return heard


def _mapped(group: Any, device: torch.device, n: int) -> tuple[Tensor, list[int], Any]:
    """(int64 [n] of this rank, all 0, where each rank's begins, what keeps them mapped)."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if ranks == 1:
        own = torch.zeros(n, dtype=torch.int64, device=device)
        return own, [own.data_ptr()], None
    if device.type != "cuda":
        return _mapped_files(group, ranks, rank, n)
    import torch.distributed._symmetric_memory as symmetric_memory

    with torch.cuda.device(device), _without_multicast():
        own = symmetric_memory.empty(n, dtype=torch.int64, device=device)
        own.zero_()
        torch.cuda.synchronize(device)
        handle = symmetric_memory.rendezvous(own, group)
        views = [own if each == rank else handle.get_buffer(each, (n,), torch.int64) for each in range(ranks)]
        _heard(group, None)  # nobody writes before all have zeroed theirs
    return own, [view.data_ptr() for view in views], (handle, views)


def _mapped_files(group: Any, ranks: int, rank: int, n: int) -> tuple[Tensor, list[int], Any]:
    descriptor, path = tempfile.mkstemp(prefix="fused-softmax-")
    try:
        os.truncate(descriptor, 8 * n)
        paths = _heard(group, path)
        views = [torch.from_file(each, shared=True, size=n, dtype=torch.int64) for each in paths]
        _heard(group, None)  # nobody removes a file before all have mapped it
    finally:
        os.close(descriptor)
        with suppress(OSError):
            os.unlink(path)
    return views[rank], [view.data_ptr() for view in views], views


@contextmanager
def _without_multicast():
    """Memory is mapped for plain stores alone; a group of GPUs that share a multicast object can fail together."""
    before = os.environ.get(_NO_MULTICAST)
    os.environ[_NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_MULTICAST]
        else:
            os.environ[_NO_MULTICAST] = before


def _refuse_capture(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the ranks' memory is set up at a group's first call, and at the first of so many rows: make this call "
            "once before it is captured"
        )


def _seconds_of(group: Any, device: torch.device) -> float:
    """The timeout of a group, as its backend has it."""
    try:
        return group._get_backend(device).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):
        return _DEFAULT_SECONDS
