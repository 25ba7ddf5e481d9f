"""Memory that the GPUs of a group write into each other's, and the choice of how ranks talk to each other.

`peer`: the kernels exchange by this memory (`ranks/kernels.py`). It takes GPUs of one host and one kind, of which each
can map the others' memory. `collective`: all else, by `distributed.gather`.

Memory is set up at a group's first call, and grows as rows do: both are collective, and so have to happen outside a
captured graph. It is never multicast. On CPU ranks, whose kernels are interpreted, it is a file that all ranks map.

Beside the slots of rows each rank has a word of every rank's: which launch that rank is in, by its number among the
group's, and a digest of what it asks there. Who waits compares these words. So launches that differ end at once in NaN,
whichever slots they wait on. So do launches that wait for a rank whose word is negative: it has refused its call, or an
earlier launch of it has failed. Until its host recovers, such a rank gives NaN, and sends its word but no messages.

A launch that has failed leaves a word for its host, whose next call then recovers. Hosts talk by a file that all map.
They tell each other how many calls they have made. The group's backend takes no part, because other collectives may be
on their way there, and not as many on each rank. A host that has come further than others has had NaN from calls that
these are yet to make: they make them alone, and get NaN too. At the call of the one that has come furthest, all wait
until all launches have ended, zero their slots, and raise. So every rank raises once, at the same call, and all begin
anew.

Before the backend is asked for anything, be it to map memory, the hosts agree on it by the same file.
"""

import ctypes
import itertools
import os
import socket
import tempfile
import time
import zlib
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

UNEVEN = "Give the columns of uneven shards to every rank as shard_sizes="
_DIFFERED = "refused its call, got NaN before, or differed in operation, dtype, columns, rows or options"
_MISSING = 1  # of the words that kernels leave
_REFUSED = -1  # of the words that ranks have of each other
_PATIENCE = 2.0  # seconds, for a rank that a launch has waited for in vain
_DEFAULT_SECONDS = 600.0
MOST_RANKS = 4  # of a call that names no transport: more have not been measured
_POLLS_AT_ONCE = 500  # of a host, which then sleeps in between
_POLLS_A_SECOND = 2000  # under the interpreter, whose kernels have no clock
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"

_numbers = itertools.count()
_groups: WeakKeyDictionary[Any, dict[int, "Peers | str"]] = WeakKeyDictionary()
_last: dict[int, Any] = {}  # by device: the stream of the last launch that waits for other GPUs


class Region(NamedTuple):
    """Slots of rows that have equally many.

    slots: int64, two sets, this rank's. bases: int64 [2 * ranks + 2], where each rank's begin, where kernels leave word
    of what is missing, how long they wait for it, and where each rank's words begin. asked: this rank's words, int64
    [ranks]. set_size: slots of a set. rows: for how many there are slots. kept: what holds the mappings.
    """

    slots: Tensor
    bases: Tensor
    asked: Tensor
    set_size: int
    rows: int
    kept: Any = None


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
        self._recoveries = 0
        self._begin_anew()

    def map_words(self, group: Any) -> None:
        """What devices say to each other: of each rank, in which launch it is."""
        self._words, self._words_of, self._kept = _mapped(group, self.device, self.ranks)

    def map_hosts(self, group: Any) -> None:
        """And hosts: of each rank its last step, its last two agreements, how far it has come in a recovery, and what
        a launch of it has waited for in vain."""
        _, self._files, _ = _mapped(group, torch.device("cpu"), 5)
        self._hosts = [(ctypes.c_int64 * 5).from_address(each.data_ptr()) for each in self._files]

    def _begin_anew(self) -> None:
        self._seen.value = self._calls = self._steps = self._agreements = 0
        self._spoilt: str | None = None
        self._joined: int | None = None  # the call at which this rank has begun to recover
        self._alone = False
        self._patience = self.seconds

    def ready(self, name: str) -> None:
        """Begin a call, or raise what has spoilt an earlier one: see above."""
        self._calls += 1
        if self._seen.value or self._spoilt:
            self._recover(name)

    def refuse(self, name: str, why: str) -> None:
        """Have a call that this rank does not make fail on the others."""
        self.ready(name)
        if not self._alone:
            self.in_turn()
            self._spoil(f"rank {self.rank} refused its call: {why}")

    def _spoil(self, why: str) -> None:
        self._spoilt = why
        self._hosts[self.rank][0] = _REFUSED
        for words in self._words_of:
            words[self.rank] = _REFUSED

    def _recover(self, name: str) -> None:
        if _captures(self.device):
            raise RuntimeError(f"{name}: an earlier call gave NaN; make a call outside of the capture, which says why")
        if self._joined is None:
            if self._seen.value & 3 == _MISSING:
                self._hosts[self.rank][4] = self._seen.value
            self._spoil(self._spoilt or self._told(self._seen.value))
            self._joined = self._calls
        self._alone = self._calls < max(self._met(name, 1))
        if self._alone:
            return
        self._wait_for_launches()
        self._met(name, 2)
        for region in (*self._regions.values(), *self._outgrown):
            region.slots.zero_()
        self._words.zero_()
        self._hosts[self.rank][:3] = [0, 0, 0]
        self._hosts[self.rank][4] = 0
        self._wait_for_launches()
        self._met(name, 3)
        spoilt, self._recoveries = self._spoilt, self._recoveries + 1
        self._begin_anew()
        raise RuntimeError(f"{name}: an earlier call gave NaN, because {spoilt}; made again, this call works")

    def _told(self, word: int) -> str:
        """What a launch has left word of, on this rank or another."""
        row, rank = word >> 16, _rank_of(word)
        if word & 3 == _MISSING:
            self._patience = min(self.seconds, _PATIENCE)
            return f"rank {rank} has told nothing of row {row} in {self.seconds:g} s"
        return f"rank {rank} {_DIFFERED}, as of row {row}. {UNEVEN}"

    def _met(self, name: str, step: int) -> list[int]:
        """The calls at which ranks began to recover, once all have come to this step."""
        step += 3 * self._recoveries
        self._hosts[self.rank][3] = step << 32 | (self._joined or 0)
        end = time.monotonic() + self._patience
        while True:
            words = [host[3] for host in self._hosts]
            late = [rank for rank, word in enumerate(words) if word >> 32 < step]
            missing = next((host[4] for host in self._hosts if host[4] and _rank_of(host[4]) != self.rank), 0)
            if missing and _DIFFERED in (self._spoilt or ""):  # from a rank that has waited for a third in vain
                self._spoilt = self._told(missing)
                end = min(end, time.monotonic() + self._patience)
            if not late:
                return [word & 0xFFFFFFFF for word in words]
            if time.monotonic() > end:
                raise RuntimeError(
                    f"{name}: an earlier call gave NaN, because {self._spoilt}; the group works again once ranks "
                    f"{late} have made their next call"
                )
            time.sleep(1e-4)

    def _wait_for_launches(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def of_launch(self, group: Any, slots_per_row: int, n_rows: int) -> Region:
        """The slots of a launch, which follows at once."""
        found = self.region(group, slots_per_row, n_rows)
        self._step(0)
        return found

    def region(self, group: Any, slots_per_row: int, n_rows: int) -> Region:
        """The slots of n_rows; every rank of the group asks for the same, one after the other."""
        found = self._regions.get(slots_per_row)
        if self._alone or found is None or found.rows < n_rows:
            found = self._grown(group, slots_per_row, n_rows)
        return found

    def _grown(self, group: Any, slots_per_row: int, n_rows: int) -> Region:
        _refuse_capture(self.device)
        rows = n_rows + n_rows // 4
        set_size = rows * slots_per_row
        if set_size >= 2**31:
            raise ValueError(f"{n_rows} rows of {slots_per_row} messages are too many for one call over peers")
        if self._differing(f"{slots_per_row} {rows}"):
            return self._of_none(set_size, rows)
        slots, views, kept = _mapped(group, self.device, 2 * set_size)
        if slots_per_row in self._regions:
            self._outgrown.append(self._regions[slots_per_row])
        bases = self._bases(views, self._words_of, self.limit)
        self._regions[slots_per_row] = Region(slots, bases, self._words, set_size, rows, (views, kept))
        return self._regions[slots_per_row]

    def _bases(self, slots: list[Tensor], words: list[Tensor], limit: int) -> Tensor:
        of_slots, of_words = ([each.data_ptr() for each in some] for some in (slots, words))
        numbers = *of_slots, self._word.data_ptr(), limit, *of_words
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def _of_none(self, set_size: int, rows: int) -> Region:
        """Slots that no other rank writes, by which a call gives NaN at once."""
        slots = torch.zeros(2 * set_size, dtype=torch.int64, device=self.device)
        words = torch.full((self.ranks,), _REFUSED, dtype=torch.int64, device=self.device)
        bases = self._bases([slots] * self.ranks, [words] * self.ranks, 0)
        return Region(slots, bases, words, set_size, rows, (slots, words))

    def agree(self, name: str, asked: Any) -> None:
        """Raise on every rank if they do not all ask for the same next: before the backend takes part in it."""
        differing = None if _captures(self.device) else self._differing(repr(asked))
        if differing:
            raise RuntimeError(f"{name}: {differing}")

    def _differing(self, asked: str) -> str | None:
        """What keeps the ranks from all asking for the same next, if anything does: then none of them gets it."""
        if self.ranks == 1:
            return None
        if self._alone or self._spoilt or self._seen.value:
            return self._spoilt or self._told(self._seen.value)
        at = 1 + self._agreements % 2  # who comes next must not overwrite what another is yet to read
        self._agreements += 1
        word = self._step(zlib.crc32(asked.encode()) & 0x7FFFFFFF, at)
        end, polls = time.monotonic() + self.seconds, 0
        for rank, host in enumerate(self._hosts):
            while host[at] != word:
                polls += 1
                step = host[0]
                if (step < 0 or step >> 31 >= self._steps) and host[at] != word:
                    return self._differ(f"rank {rank} {_DIFFERED}. {UNEVEN}")
                if time.monotonic() > end:
                    return self._differ(f"rank {rank} has not made it in {self.seconds:g} s")
                if polls > _POLLS_AT_ONCE:
                    time.sleep(1e-5)
        return None

    def _differ(self, why: str) -> str:
        self.in_turn()
        self._spoil(why)
        return why

    def _step(self, digest: int, at: int = 0) -> int:
        """Say that this rank goes on to its next launch, or asks for what `digest` stands for."""
        self._steps += 1
        own = self._hosts[self.rank]
        word = self._steps << 31 | digest
        if self._spoilt is None:
            own[at] = own[0] = word
        return word

    def in_turn(self) -> None:
        """Have this launch follow the last one that waited for other GPUs, whichever stream and group it was of.

        In another order on another rank, both might hold a chip and wait for each other.
        """
        index = self.device.index
        if index is not None:
            last = _last.get(index)
            if last is None or last.cuda_stream != torch._C._cuda_getCurrentRawStream(index):
                _follow(index, last)


def _rank_of(word: int) -> int:
    """The rank that a launch has left word of."""
    return (word >> 2) & 0x3FFF


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

    hindrance: why this call cannot go by peers, on any rank, in words. Tensors of a CPU, and more than MOST_RANKS, go
    by them only if asked. Raises where transport is "peer" and that cannot be.
    """
    if transport == "collective" or (transport is None and device.type != "cuda"):
        return None
    if transport is None and dist.get_world_size(group) > MOST_RANKS:
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
    """The same on every rank: each says what it has, and then whether its mappings went well."""
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
    peers = Peers(group, device)
    for mapping in (peers.map_words, peers.map_hosts):
        error = ""
        try:
            mapping(group)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        failed = [each for each in _heard(group, error) if each]
        if failed:
            return f"the ranks cannot map each other's memory: {failed[0]}"
    return peers


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


def _mapped(group: Any, device: torch.device, n: int) -> tuple[Tensor, list[Tensor], Any]:
    """(int64 [n] of this rank, all 0, each rank's, what keeps them mapped)."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if ranks == 1:
        own = torch.zeros(n, dtype=torch.int64, device=device)
        return own, [own], None
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
    return own, views, handle


def _mapped_files(group: Any, ranks: int, rank: int, n: int) -> tuple[Tensor, list[Tensor], Any]:
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
    return views[rank], views, None


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


def _captures(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _refuse_capture(device: torch.device) -> None:
    if _captures(device):
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
