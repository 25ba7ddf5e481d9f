"""A recorder's knowledge of a kernel: the phase of each line, the names of its state, functions to step over."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fused_softmax.trace.recorder.memory import RecordingError, Role

_PACKAGE = Path(__file__).parents[2]

Span = tuple[int | None, int | None, int | None, int | None]
"""First and last line, first column and the column past the last, in bytes, as in code objects and syntax trees."""


@dataclass(frozen=True)
class Tile:
    """A local's place in a matrix that no memory holds.

    of: the name of the matrix, as `Memory.imagine` has it. rows, cols: locals that hold the tile's rows and columns in
    that matrix, or sums of locals such as "first + rows"; without cols, they are its first ones.
    """

    of: str
    rows: str
    cols: str = ""


@dataclass(frozen=True)
class Told:
    """Knowledge of one kernel function.

    phases: for each phase, the beginning of the statement that opens it, or of successive statements, of which the last
        opens it. In the order of the file; a phase lasts until the next one begins.
    row: the local that holds a program's current row or rows, or a sum of locals such as "first + rows".
    m, s: locals that may hold the running maximum and sum; the first that exists counts. "max()" is the last tl.max.
    notes: for the beginning of a statement, a sentence for the step that runs it.
    silent: how statements begin that get no step, and whose locals are not shown, because they only pass values on or
        prepare what the recorded call has no use for. One that reads or writes memory gets its step.
    unused: parameters, their fields and locals that are not shown: the recorded call has no use for them, or other
        locals hold the same.
    state: whether m and s count in a function that the kernel calls, as they always do in the kernel itself.
    tiles: locals that are tiles of a matrix that no memory holds.
    """

    phases: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    row: str = "row"
    m: tuple[str, ...] = ("m",)
    s: tuple[str, ...] = ("s",)
    notes: Mapping[str, str] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    state: bool = False
    tiles: Mapping[str, Tile] = field(default_factory=dict)


@dataclass(frozen=True)
class Story:
    """Knowledge of all functions of a recording. told: by function name.

    phases: all phases in order, where that of `told` is another.
    roles: the roles of kernel parameters that are not inputs.
    unset: parameters that, like outputs, hold nothing until a kernel writes them.
    step_over: functions whose lines are not recorded. Their reads and writes count for the calling line.
    step_through: functions whose lines are not recorded while those of the functions that they call are.
    waits: functions in which a program waits for others. It lets them run when it gets there.
    publishes: functions that write a message, with the local that holds each of its numbers.
    collects: functions that unpack the messages of all parts, with the local that holds each number of them.
    """

    told: Mapping[str, Told] = field(default_factory=dict)
    phases: tuple[str, ...] = ()
    roles: Mapping[str, Role] = field(default_factory=dict)
    unset: frozenset[str] = frozenset()
    step_over: frozenset[str] = frozenset()
    step_through: frozenset[str] = frozenset()
    waits: frozenset[str] = frozenset()
    publishes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    collects: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def in_order(self) -> list[str]:
        """All phases, once each: those that are given, else each function's within the phase that opens its call."""
        found = list(self.phases)
        for told in self.told.values():
            at = len(found)
            for phase in told.phases:
                if phase not in found:
                    found.insert(at, phase)
                at = len(found) if self.phases else found.index(phase) + 1
        return found


class Source:
    """The source of one function: its lines, its statements and their phases."""

    def __init__(self, function: Callable[..., Any], story: Story) -> None:
        lines, self.first_line = inspect.getsourcelines(function)
        self.name = function.__name__
        file = Path(inspect.getfile(function))  # shown without the machine's paths
        self.file = file.relative_to(_PACKAGE).as_posix() if file.is_relative_to(_PACKAGE) else file.name
        self.lines = [line.rstrip("\n") for line in lines]
        self.told = story.told.get(self.name, Told())

    @cached_property
    def _tree(self) -> ast.Module:
        tree = ast.parse(textwrap.dedent("\n".join(self.lines)))
        ast.increment_lineno(tree, self.first_line - 1)
        return tree

    @cached_property
    def statements(self) -> dict[int, tuple[int, int]]:
        """For each line of the file, the first and last line of the statement or statement header that contains it."""
        found: dict[int, tuple[int, int]] = {}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.stmt):
                body = getattr(node, "body", None)
                last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
                last = max(last, node.lineno)
                span = node.lineno, last
                for line in range(span[0], span[1] + 1):
                    if line not in found or found[line][0] <= span[0]:
                        found[line] = span
        return found

    def statement(self, line: int) -> int:
        """The first line of the statement that contains a line."""
        return self.statements.get(line, (line, line))[0]

    def starts(self, line: int, *words: str) -> bool:
        """Whether a line starts with one of these words."""
        return self.line(line).startswith(words)

    def line(self, line: int) -> str:
        """The text of a line of the file, without its indent."""
        return self.lines[line - self.first_line].strip()

    @cached_property
    def _fields(self) -> set[str]:
        """The fields that the function reads, like "r.row"."""
        return {ast.unparse(node) for node in ast.walk(self._tree) if isinstance(node, ast.Attribute)}

    def read(self, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments that the function reads. It only passes most fields on."""
        used = {name: value for name, value in given.items() if name not in self.told.unused}
        return {name: value for name, value in used.items() if "." not in name or name in self._fields}

    @cached_property
    def results(self) -> set[Span]:
        """The spans of expressions that are assigned to a local or returned as they are."""
        values = [node.value for node in ast.walk(self._tree) if isinstance(node, ast.Assign | ast.Return)]
        return {(v.lineno, v.end_lineno, v.col_offset, v.end_col_offset) for v in values if v is not None}

    def text(self, span: Span) -> str:
        """The text of an expression, on one line."""
        first, last, start, stop = span
        if first is None or last is None:
            return ""
        indent = len(self.lines[0]) - len(self.lines[0].lstrip())  # the interpreter removes it
        lines = [line[indent:].encode() for line in self.lines[first - self.first_line : last - self.first_line + 1]]
        lines[-1] = lines[-1][:stop]
        lines[0] = lines[0][start:]
        return " ".join(line.decode().strip() for line in lines)

    @cached_property
    def phases(self) -> list[tuple[int, str]]:
        """(line, phase) for the beginning of each phase."""
        found, at = [], -1
        for phase, openings in self.told.phases.items():
            for opening in (openings,) if isinstance(openings, str) else openings:
                at = self._find(opening, at + 1)
            found.append((at + self.first_line, phase))
        return found

    @cached_property
    def notes(self) -> dict[int, str]:
        """A sentence for each line that has one."""
        return {self._find(opening, 0) + self.first_line: note for opening, note in self.told.notes.items()}

    @cached_property
    def silent(self) -> set[int]:
        """The lines of statements that get no step."""
        return {self._find(opening, 0) + self.first_line for opening in self.told.silent}

    def phase(self, line: int) -> str | None:
        """The phase of a line, None before the first phase."""
        return next((phase for first, phase in reversed(self.phases) if first <= line), None)

    def _find(self, opening: str, start: int) -> int:
        for at in range(start, len(self.lines)):
            if self.lines[at].strip().startswith(opening):
                return at
        raise RecordingError(
            f"no line of {self.name} ({self.file}) begins with {opening!r}: the registry is out of date"
        )

    def entry(self) -> dict[str, Any]:
        """The function's entry in a recording."""
        ends = {str(first): last for first, last in self.statements.values() if last > first}
        entry = {"name": self.name, "file": self.file, "first_line": self.first_line, "lines": self.lines}
        return entry | ({"ends": ends} if ends else {})
