"""What a recorder is told of a kernel: which lines are which phase, what its state is called, what is passed over."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fused_softmax.trace.memory import RecordingError, Role

Span = tuple[int | None, int | None, int | None, int | None]
"""First and last line, first column and the one past the last, in bytes: as code objects and the syntax tree count."""


@dataclass(frozen=True)
class Told:
    """What there is to know of one kernel function.

    phases: by name, how the statement that opens it begins, or several statements that follow each other, of which the
        last opens it. In the order of the file: a phase lasts to the next one's.
    row: the local with the row, or rows, that a program is at.
    m, s: locals with the running maximum and sum, the first that is there; "max()" is what the last tl.max gave.
    notes: by how a statement begins, a sentence for the step that runs it.
    """

    phases: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    row: str = "row"
    m: tuple[str, ...] = ("m",)
    s: tuple[str, ...] = ("s",)
    notes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Story:
    """What there is to know of all functions of a recording, by name.

    roles: of kernel parameters that are not inputs.
    unset: parameters that, as outputs, hold nothing until a kernel writes them.
    step_over: functions whose lines are not recorded; what they read and write counts for the line that called them.
    waits: functions in which a program waits for others; it lets them run when it gets there.
    publishes, collects: functions that write, and read, messages; of each number of a message, the local that holds it.
    """

    told: Mapping[str, Told] = field(default_factory=dict)
    roles: Mapping[str, Role] = field(default_factory=dict)
    unset: frozenset[str] = frozenset()
    step_over: frozenset[str] = frozenset()
    waits: frozenset[str] = frozenset()
    publishes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    collects: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


class Source:
    """The source of one function: its lines, its statements, the phase of each."""

    def __init__(self, function: Callable[..., Any], file: str, told: Told) -> None:
        lines, self.first_line = inspect.getsourcelines(function)
        self.name = function.__name__
        self.file = file
        self.lines = [line.rstrip("\n") for line in lines]
        self.told = told

    @cached_property
    def _tree(self) -> ast.Module:
        tree = ast.parse(textwrap.dedent("\n".join(self.lines)))
        ast.increment_lineno(tree, self.first_line - 1)
        return tree

    @cached_property
    def statements(self) -> dict[int, tuple[int, int]]:
        """For each line of the file, the first and last line of the statement, or header of one, that it is of."""
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
        """The first line of the statement that a line is of."""
        return self.statements.get(line, (line, line))[0]

    def starts(self, line: int, *words: str) -> bool:
        """Whether a line starts with one of these words."""
        return self.line(line).startswith(words)

    def line(self, line: int) -> str:
        """The text of a line of the file, less its indent."""
        return self.lines[line - self.first_line].strip()

    @cached_property
    def results(self) -> set[Span]:
        """Where the expressions are that a local is set to, or that are returned, with nothing done to them."""
        values = [node.value for node in ast.walk(self._tree) if isinstance(node, ast.Assign | ast.Return)]
        return {(v.lineno, v.end_lineno, v.col_offset, v.end_col_offset) for v in values if v is not None}

    def text(self, span: Span) -> str:
        """The text of an expression, on one line."""
        first, last, start, stop = span
        if first is None or last is None:
            return ""
        indent = len(self.lines[0]) - len(self.lines[0].lstrip())  # which the interpreter takes away
        lines = [line[indent:].encode() for line in self.lines[first - self.first_line : last - self.first_line + 1]]
        lines[-1] = lines[-1][:stop]
        lines[0] = lines[0][start:]
        return " ".join(line.decode().strip() for line in lines)

    @cached_property
    def phases(self) -> list[tuple[int, str]]:
        """(line, phase) where each phase begins."""
        found, at = [], -1
        for phase, openings in self.told.phases.items():
            for opening in (openings,) if isinstance(openings, str) else openings:
                at = self._find(opening, at + 1)
            found.append((at + self.first_line, phase))
        return found

    @cached_property
    def notes(self) -> dict[int, str]:
        """A sentence by line."""
        return {self._find(opening, 0) + self.first_line: note for opening, note in self.told.notes.items()}

    def phase(self, line: int) -> str | None:
        """The phase of a line; None before the first."""
        return next((phase for first, phase in reversed(self.phases) if first <= line), None)

    def _find(self, opening: str, start: int) -> int:
        for at in range(start, len(self.lines)):
            if self.lines[at].strip().startswith(opening):
                return at
        raise RecordingError(
            f"no line of {self.name} ({self.file}) begins with {opening!r}: the registry is out of date"
        )

    def entry(self) -> dict[str, Any]:
        """Its entry in a recording."""
        ends = {str(first): last for first, last in self.statements.values() if last > first}
        entry = {"name": self.name, "file": self.file, "first_line": self.first_line, "lines": self.lines}
        return entry | ({"ends": ends} if ends else {})
