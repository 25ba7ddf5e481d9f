"""Ranks of a gloo group for tests: processes that run a function side by side, and say what each gave or raised."""

import contextlib
import faulthandler
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import interpreter
import pytest
import torch
import torch.distributed as dist

import fused_softmax
from fused_softmax.core import route

MOST = 4
SECONDS = 60  # after which a rank that hears nothing gives up
LIMIT = 2 * SECONDS  # of a function's answer
SHARED: list[dist.ProcessGroup] = []  # of this rank, which all tests are given


class Raised(Exception):
    """What one rank raised: its type's name, and the text."""


class Ranks:
    """Processes, each a rank, which `serve` until they are sent None. They end with the pool."""

    def __init__(self, directory: Path, most: int = MOST, serve: Callable | None = None) -> None:
        self._of_start, self._asked = (directory, most, serve or partial(_serve, most)), 0
        self._start()

    def _start(self) -> None:
        directory, most, serve = self._of_start
        own = Path(tempfile.mkdtemp(dir=directory))
        context, self._pipes, self._processes = multiprocessing.get_context("spawn"), [], []
        for rank in range(most):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(rank, own, there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def __call__(self, n: int, function: Callable, *args: Any, limit: float = LIMIT) -> list[Any]:
        """[function(group, *args) on each rank of a group of n]; an exception is a Raised in its place.

        TimeoutError after `limit` seconds without an answer. Other processes then take their place, for a late answer
        would be taken for that to the next question.
        """
        self._asked += 1
        for pipe in self._pipes[:n]:
            pipe.send((n, function, args, self._asked))
        found = []
        for rank, pipe in enumerate(self._pipes[:n]):
            if not pipe.poll(limit):
                for process in self._processes:
                    process.kill()
                self._start()
                raise TimeoutError(f"rank {rank} did not answer")
            found.append(pipe.recv())
        return found

    def values(self, n: int, function: Callable, *args: Any, limit: float = LIMIT) -> list[Any]:
        """The same, where no rank may raise."""
        found = self(n, function, *args, limit=limit)
        for rank, each in enumerate(found):
            if isinstance(each, Raised):
                pytest.fail(f"rank {rank}: {each.args[0]}: {each.args[1]}\n{each.args[2]}")
        return found

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(10)
            process.kill()


def _serve(most: int, rank: int, directory: Path, pipe: Connection) -> None:
    torch.set_num_threads(1)
    assert fused_softmax.softmax  # imports all of the package, before a test changes what the import looks at
    interprets = route.INTERPRET
    if interprets:
        interpreter.as_a_gpu()
    store, waits = dist.FileStore(str(directory / "store"), most), timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=most, timeout=waits)
    groups = {n: dist.new_group(list(range(n)), timeout=waits) for n in range(1, most + 1)}
    SHARED[:] = groups.values()
    while (asked := pipe.recv()) is not None:
        n, function, args, number = asked
        route.INTERPRET = interprets  # whatever the function before has set
        name_groups_by(number)
        faulthandler.dump_traceback_later(LIMIT - 5)  # where it stood, for who reads what the test printed
        try:
            pipe.send(function(groups[n], *args))
        except Exception as error:
            pipe.send(Raised(type(error).__name__, str(error), traceback.format_exc()))
        finally:
            faulthandler.cancel_dump_traceback_later()
    os._exit(0)  # gloo's own end waits for ranks that may be gone


def name_groups_by(number: int) -> None:
    """Let ranks name new groups alike: torch counts those of a process, and not all of them answer every question.

    A name that one of them has used leads to the address of another group, which may have ended.
    """
    dist.distributed_c10d._world.group_count = 1000 * number


@contextlib.contextmanager
def pool(most: int = MOST) -> Iterator[Ranks]:
    with tempfile.TemporaryDirectory() as directory:
        ranks = Ranks(Path(directory), most)
        try:
            yield ranks
        finally:
            ranks.close()
