"""Records what kernels do under Triton's interpreter, line by line.

The interpreter rewrites a kernel as plain Python with the same file and line numbers. So `sys.settrace` sees each line
run, and the locals after it. The traffic between a kernel and memory comes from `hooks`.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from fused_softmax.core.described import number_of
from fused_softmax.trace.recorder.encode import numbers
from fused_softmax.trace.recorder.hooks import Hooks
from fused_softmax.trace.recorder.locals import changed, constants, encode, flat, item, plain
from fused_softmax.trace.recorder.matrix import Matrix, Place
from fused_softmax.trace.recorder.memory import RecordingError
from fused_softmax.trace.recorder.recorded import OutsideError, Recorded
from fused_softmax.trace.recorder.story import Source, Story

MOST_STEPS = 20000
MOST_BYTES = 2**23  # of tiles, in the kernel's dtypes

_TRITON = str(Path(triton.__file__).parent)


@dataclass
class _Frame:
    """A running function of a kernel.

    over: its depth in calls whose lines are not recorded. opened: the phase of its last line, if it or a function that
    it called opened one. within: the same of a function that the running line has called.
    """

    number: int
    running: FrameType
    source: Source
    phase: str | None
    known: dict[str, Any]
    line: int | None = None
    step: dict[str, Any] = field(default_factory=dict)
    reached: tuple[list[int], tuple[int, int] | None] | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    computed: list[dict[str, Any]] = field(default_factory=list)
    reduced: dict[str, Any] = field(default_factory=dict)
    over: int = 0
    opened: str | None = None
    within: str | None = None


@dataclass
class _Program:
    """One program of a launch. part: that of its row, once it has published a message."""

    grid: tuple[int, int, int]
    first_step: int
    frames: list[_Frame] = field(default_factory=list)
    place: Place = field(default_factory=Place)
    part: int | None = None


class Recorder(Recorded):
    """While entered, records the steps of all launched kernels.

        recorder = Recorder(story)
        x = recorder.memory.hold("x", x, "input")
        with recorder:
            kernel[grid](x, y)

    The first held tensor is the matrix: each step has rows and columns in it.
    Where programs wait for each other, a launch that only publishes and the next one, which only collects, run as the
    one launch of a GPU. late: programs of it that start when all others have ended, so that those do their part.
    """

    def __init__(self, story: Story | None = None, late: frozenset[int] = frozenset()) -> None:
        self.story = story or Story()
        super().__init__(self.story)
        self._told = bool(self.phases)
        self._matrix = Matrix(self.memory)
        self.take_turns, self.late = bool(self.story.waits), late
        self._told_parts: set[tuple[int, int]] = set()
        self._hooks = Hooks(self)
        self._program: _Program | None = None
        self._functions: dict[CodeType, Source | None] = {}
        self._codes: dict[CodeType | None, Any] = {}
        self._positions: dict[CodeType, list[Any]] = {}
        self._bytes = 0

    def __enter__(self) -> "Recorder":
        self._hooks.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._hooks.__exit__()
        cause = error
        while cause is not None:  # Triton wraps a kernel's exception once for every function on the way
            if isinstance(cause, RecordingError) and cause is not error:
                raise cause from None
            cause = cause.__cause__

    # Launches, from the hooks.

    def prepare(self, function: Any, given: dict[str, Any]) -> dict[str, Any] | None:
        """The arguments to launch a kernel with, from those of its call, or None to skip the launch."""
        spec: Any = given.get("K")
        if self.take_turns and spec.split:
            if not spec.collect:
                return None
            given["K"] = replace(spec, publish=True)
        self.memory.bring()
        return {name: self._guarded(name, value) for name, value in given.items()}

    def _guarded(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            role = self.story.roles.get(name, "input")
            return self.memory.hold(name.removesuffix("_ptr"), value, role, name, unset=name in self.story.unset)
        if isinstance(value, TensorDescriptor):
            return replace(value, base=self._guarded(name, value.base))
        if type(value) is tuple:
            return tuple(self._guarded(f"{name}[{at}]", each) for at, each in enumerate(value))
        return value

    def launched(self, function: Any, grid: tuple[int, ...], given: dict[str, Any], constexprs: list[str]) -> None:
        source = self._source(function.__code__)
        if source is None:
            raise RecordingError(f"the source of {function.__name__} cannot be found: define it in a file")
        fixed: dict[str, Any] = {}
        for name in constexprs:
            fixed |= constants(name, given.get(name))
        arguments = {name: plain(value) for name, value in given.items() if name not in constexprs}
        launch: dict[str, Any] = {"name": source.name, "source": self.sources.index(source), "grid": list(grid)}
        launch["constants"] = {name: value for name, value in fixed.items() if value is not None}
        launch["arguments"] = {name: value for name, value in arguments.items() if value is not None}
        self.launches.append(launch)

    def switch(self, program: Any) -> Any:
        """Another program runs from here on. Returns the one that ran before."""
        before, self._program = self._program, program
        return before

    def run(self, function: Any, args: dict[str, Any], grid: tuple[int, int, int]) -> None:
        """Run one program."""
        self._program = _Program(grid, len(self.steps))
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            with np.errstate(all="ignore"):  # NumPy warns of NaN and infinities, which kernels compute with
                function(**args)
        finally:
            sys.settrace(before)

    # Lines, from Python.

    def _called(self, frame: FrameType, event: str, _: Any) -> Any:
        program = self._program
        if event != "call" or program is None:
            return None
        top = program.frames[-1] if program.frames else None
        if top is not None and top.over:
            return None
        source = self._source(frame.f_code)
        if source is None:
            return None
        name = frame.f_code.co_name
        if name in self.story.waits and self._hooks.turns is not None:
            self._hooks.turns.wait()
        if top is not None and name in self.story.step_over:
            top.over += 1
            frame.f_trace_lines = False
            return self._stepped_over
        if top is not None and name in self.story.step_through:
            return None
        self._enter(program, frame, source)
        return self._ran

    def _stepped_over(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "return" and self._program is not None:
            self._program.frames[-1].over -= 1
        return self._stepped_over

    def _ran(self, frame: FrameType, event: str, result: Any) -> Any:
        program = self._program
        if program is None:
            return None
        top = program.frames[-1]
        if event == "line":
            line = top.source.statement(frame.f_lineno)
            if line != top.line:
                self._close(program, top, frame)
                top.line = line
        elif event == "return":
            self._close(program, top, frame, result)
            self._leave(program, frame)
        return self._ran

    def _enter(self, program: _Program, frame: FrameType, source: Source) -> None:
        caller = program.frames[-1] if program.frames else None
        entry: dict[str, Any] = {
            "source": self.sources.index(source),
            "launch": len(self.launches) - 1,
            "program": list(program.grid),
            "parent": caller.number if caller else None,
            "call_line": caller.line if caller else None,
        }
        phase = None
        if caller is not None:
            arguments = source.read(self._changed(frame.f_locals, {}))
            entry |= {"arguments": arguments} if arguments else {}
            phase = caller.source.phase(caller.line or 0) or caller.phase
        program.frames.append(_Frame(len(self.frames), frame, source, phase, dict(frame.f_locals)))
        self.frames.append(entry)

    def _close(self, program: _Program, top: _Frame, frame: FrameType, result: Any = None) -> None:
        """The running line is done. If there is a result, so is its function."""
        if top.line is None:
            return
        now, told = dict(frame.f_locals), top.source.told
        if top.line in top.source.silent and not top.step:
            top.known, top.within, top.computed, top.reduced = now, None, [], {}
            return
        news = {name: value for name, value in self._changed(now, top.known).items() if name not in told.unused}
        if result is not None:
            news |= self._changed({"return": result}, {})
        before, top.known = top.known, now
        place, state = program.place, []
        if len(program.frames) == 1:
            place.rows = self._matrix.rows_of(now, told.row) or place.rows
        if (len(program.frames) == 1 or self._matrix.imagined) and top.source.starts(top.line, "for ", "while "):
            place.cols = None
        if len(program.frames) == 1 or told.state:
            state = self._matrix.learn(place, told, now, before, top.reduced)
            self.states |= {entry["row"]: entry for entry in state}
        if top.reached:
            place.rows, place.cols = top.reached
        step: dict[str, Any] = {"frame": top.number, "line": top.line}
        top.opened = top.within or top.source.phase(top.line)
        step["phase"] = self._phase(top.opened or top.phase or self._guess(top.step))
        step["rows"] = list(place.rows)
        step |= {"cols": list(place.cols)} if place.cols else {}
        step |= {"set": news} if news else {}
        step |= {"computed": top.computed} if top.computed else {}
        step |= top.step
        holds = self._matrix.hold(told.tiles, now, before)
        step |= {"holds": holds} if holds else {}
        step |= {"state": state} if state else {}
        messages, note = top.messages, top.source.notes.get(top.line)
        step |= {"message": messages[0]} if messages else {}
        step |= {"note": note} if note else {}
        top.step, top.reached, top.within, top.messages, top.computed, top.reduced = {}, None, None, [], [], {}
        if step.keys() <= {"frame", "line", "phase", "rows", "cols"} and top.source.starts(top.line, "if ", "elif "):
            return  # the condition is known when the kernel is compiled
        self._add(step)
        for message in messages[1:]:
            self._add({"frame": top.number, "line": step["line"], "phase": step["phase"], "rows": [message["row"]],
                       "message": message})  # fmt: skip

    def _leave(self, program: _Program, frame: FrameType) -> None:
        top = program.frames.pop()
        if not program.frames:
            steps = list(self._steps_of(program))
            known: list[int] = next((step["rows"] for step in steps if step["rows"]), [])
            for step in steps:
                step["rows"] = step["rows"] or known
            return
        names = self.story.collects.get(top.source.name)
        if names:
            self._collected(program, dict(frame.f_locals), names)
        program.frames[-1].reduced = top.reduced | program.frames[-1].reduced
        program.frames[-1].within = top.opened or program.frames[-1].within

    def _steps_of(self, program: _Program) -> Iterator[dict[str, Any]]:
        here = {"launch": len(self.launches) - 1, "program": list(program.grid)}
        for step in self.steps[program.first_step :]:
            if here.items() <= self.frames[step["frame"]].items():
                yield step

    def _add(self, step: dict[str, Any]) -> None:
        self.steps.append(step)
        if len(self.steps) > MOST_STEPS:
            raise RecordingError(f"more than {MOST_STEPS} steps: use fewer rows or columns, or larger blocks")

    def _changed(self, now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
        self._bytes += sum(tile.nbytes for name, value in now.items()
                           if value is not before.get(name) and (tile := flat(value)) is not None)  # fmt: skip
        if self._bytes > MOST_BYTES:
            raise RecordingError(f"more than {MOST_BYTES} bytes of tiles: use fewer rows or columns")
        return changed(now, before, self.memory)

    def _phase(self, name: str) -> int:
        if name not in self.phases:
            self.phases.append(name)
        return self.phases.index(name)

    def _guess(self, step: dict[str, Any]) -> str:
        """The phase of a step if the story gives none."""
        if self._told:
            return self.phases[0]
        return "store" if "stores" in step else "load" if "loads" in step else "compute"

    # Memory and arithmetic, from the hooks.

    def computed(self, kind: str | None, value: Any) -> None:
        """A reduction of a kind, or an exponential, logarithm or product of matrices, was computed."""
        program = self._program
        if program is None or not program.frames:
            return
        top = program.frames[-1]
        if kind:
            top.reduced[f"{kind}()"] = value
        positions = self._positions.setdefault(top.running.f_code, list(top.running.f_code.co_positions()))
        span = positions[top.running.f_lasti // 2]
        if value.dtype.is_floating() and span not in top.source.results:
            top.computed.append({"text": top.source.text(span), "value": encode(value, self.memory)})

    def accessed(self, kind: str, ptrs: Any, mask: Any, value: Any = None) -> None:
        program = self._program
        if program is None or not program.frames:
            return
        top, place = program.frames[-1], program.place
        try:
            entries = self.note(kind, ptrs, mask, value)
        except OutsideError as error:
            line = top.line or top.source.first_line
            does, what = "reads" if kind == "loads" else "writes", number_of(error.elements, "element")
            raise RecordingError(
                f"{top.source.name} {does} {what} outside its tensors, at line {line} of {top.source.file}: "
                f"{top.source.line(line)}"
            ) from None
        for entry in entries:
            top.step.setdefault(kind, []).append(entry)
            reached = self._matrix.reach(entry, place)
            if reached is None:
                continue
            rows, cols = reached
            if place.cols and cols and len(program.frames) > 1 and rows == place.rows and not self._matrix.imagined:
                cols = min(cols[0], place.cols[0]), max(cols[1], place.cols[1])
            place.rows, place.cols = top.reached = rows, cols
        if kind == "stores" and top.source.name in self.story.publishes:
            self._published(program, top)

    # Messages.

    def _published(self, program: _Program, top: _Frame) -> None:
        program.part = int(item(top.known["part"]))
        message: dict[str, Any] = {"kind": "publish", "row": program.place.rows[0], "from": program.part}
        for name, local in self.story.publishes[top.source.name].items():
            message[name] = numbers(item(top.known[local]), "float32")[0]
        self._told_parts.add((message["row"], message["from"]))
        top.messages.append(message)

    def _collected(self, program: _Program, now: dict[str, Any], names: Mapping[str, str]) -> None:
        step, row = self.steps[-1], program.place.rows[0]
        for each in range(int(item(now["n_parts"]))):
            message: dict[str, Any] = {"kind": "collect", "row": row, "from": each, "to": program.part}
            for name, local in names.items():
                message[name] = numbers(item(now[local], each), "float32")[0]
            if (row, each) not in self._told_parts:
                message["missing"] = True
            self._add({name: step[name] for name in ("frame", "line", "phase", "rows")} | {"message": message})

    # Sources.

    def _source(self, code: CodeType) -> Source | None:
        """The source of a kernel's function, or None for other code and for Triton's own library."""
        if code in self._functions:
            return self._functions[code]
        rewritten = InterpretedFunction.rewritten_fn
        if len(rewritten) != len(self._codes):
            self._codes = {getattr(now, "__code__", None): function for function, now in rewritten.items()}
        function = self._codes.get(code)
        if function is None:
            return None  # not cached, because a function is rewritten when it is first called
        source = None
        if not code.co_filename.startswith(_TRITON):
            source = Source(function, self.story)
            self.sources.append(source)
        self._functions[code] = source
        return source
