"""Runs programs that wait for each other in turns: each is a thread, and only one runs at a time.

The interpreter runs one program to its end before it starts the next. A program that waits for a later one would wait
for ever. Here a program that reaches its wait lets the others run until they reach theirs.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class Turns:
    """The programs of one launch. `switch(state)` exchanges the recorder's knowledge of the running program.

    late: numbers of programs that start when all others have ended, as on a chip that has no room for them.
    """

    def __init__(self, builder: Any, late: frozenset[int] = frozenset()) -> None:
        self._builder, self._late = builder, late
        self._held_back: deque[threading.Event] = deque()
        self._waiting: deque[threading.Event] = deque()
        self._programs: list[tuple[tuple[int, int, int], Callable[[], None]]] = []
        self._error: BaseException | None = None
        self._switch: Callable[[Any], Any] = lambda state: None

    def add(self, grid: tuple[int, int, int], run: Callable[[], None]) -> None:
        self._programs.append((grid, run))

    def run(self, switch: Callable[[Any], Any]) -> None:
        """Run all programs, in order except where they wait. Raises the first exception of any program."""
        self._switch = switch
        threads = []
        for grid, run in self._programs:
            turn = threading.Event()
            (self._held_back if grid[0] in self._late else self._waiting).append(turn)
            threads.append(threading.Thread(target=self._program, args=(turn, grid, run), daemon=True))
            threads[-1].start()
        self._programs = []
        self._next()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Called by a program that reaches its wait: the others run first."""
        turn = threading.Event()
        grid, state = self._builder.grid_idx, self._switch(None)
        self._waiting.append(turn)
        self._next()
        turn.wait()
        if self._error is not None:
            raise SystemExit
        self._builder.set_grid_idx(*grid)
        self._switch(state)

    def _program(self, turn: threading.Event, grid: tuple[int, int, int], run: Callable[[], None]) -> None:
        turn.wait()
        try:
            if self._error is None:
                self._builder.set_grid_idx(*grid)
                run()
        except SystemExit:
            pass
        except BaseException as error:
            self._error = self._error or error
        finally:
            self._next()

    def _next(self) -> None:
        if self._waiting or self._held_back:
            (self._waiting or self._held_back).popleft().set()
