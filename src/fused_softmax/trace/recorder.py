"""Records what kernels do under Triton's interpreter, line by line.

The interpreter rewrites a kernel as plain Python that keeps its file and line numbers, so `sys.settrace` sees each line
run, and the locals it leaves. What passes between a kernel and memory comes from `hooks`.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from fused_softmax.trace.encode import dtype_name, numbers
from fused_softmax.trace.hooks import Hooks
from fused_softmax.trace.locals import changed, encode, flat, plain
from fused_softmax.trace.memory import Memory, RecordingError
from fused_softmax.trace.story import Source, Story, Told

MOST_STEPS = 20000
MOST_BYTES = 2**23  # of tiles, as the kernel holds them

_TRITON = str(Path(triton.__file__).parent)
_PACKAGE = Path(__file__).parents[1]


@dataclass
class _Frame:
    """A function of a kernel that is running. over: how deep it is in calls whose lines are not recorded."""

    number: int
    running: FrameType
    source: Source
    function: str
    phase: str | None
    known: dict[str, Any]
    line: int | None = None
    step: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    computed: list[dict[str, Any]] = field(default_factory=list)
    reduced: dict[str, Any] = field(default_factory=dict)
    over: int = 0


@dataclass
class _Program:
    """One program of a launch: its frames, and where in the matrix it is."""

    grid: tuple[int, int, int]
    first_step: int
    frames: list[_Frame] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    cols: tuple[int, int] | None = None
    state: dict[int, dict[str, Any]] = field(default_factory=dict)


class Recorder:
    """The steps of the kernels that are launched while it is entered.

        recorder = Recorder(story)
        x = recorder.memory.hold("x", x, "input")
        with recorder:
            kernel[grid](x, y)

    The first tensor that is held is the matrix whose rows and columns steps are placed in.
    merge: launches of which one only publishes and the next only collects are run as the one they are on a GPU.
    """

    counts_scratch = False

    def __init__(self, story: Story | None = None, *, merge: bool = False) -> None:
        self.story = story or Story()
        self.memory = Memory()
        self.phases = list(dict.fromkeys(phase for told in self.story.told.values() for phase in told.phases))
        self._told = bool(self.phases)
        self.sources: list[Source] = []
        self.launches: list[dict[str, Any]] = []
        self.frames: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self.reads: dict[int, np.ndarray] = {}
        self.writes: dict[int, np.ndarray] = {}
        self.states: dict[int, dict[str, Any]] = {}
        self.take_turns = bool(self.story.waits)
        self._merge = merge
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
        while cause is not None:  # Triton wraps what is raised in a kernel, once for every function on the way
            if isinstance(cause, RecordingError) and cause is not error:
                raise cause from None
            cause = cause.__cause__

    # What the hooks tell of launches.

    def prepare(self, function: Any, given: dict[str, Any]) -> dict[str, Any] | None:
        if self._merge and given.get("PUBLISH") is True and given.get("COLLECT") is False:
            return None
        if self._merge and given.get("COLLECT") is True:
            given["PUBLISH"] = True
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
            raise RecordingError(f"the source of {function.__name__} is not to be had: define it in a file")
        constants = {name: plain(given[name]) for name in constexprs if name in given}
        arguments = {name: plain(value) for name, value in given.items() if name not in constexprs}
        launch: dict[str, Any] = {"name": source.name, "source": self.sources.index(source), "grid": list(grid)}
        launch["constants"] = {name: value for name, value in constants.items() if value is not None}
        launch["arguments"] = {name: value for name, value in arguments.items() if value is not None}
        self.launches.append(launch)

    def returned(self) -> None:
        self.memory.take()

    def switch(self, program: Any) -> Any:
        before, self._program = self._program, program
        return before

    def run(self, function: Any, args: dict[str, Any], grid: tuple[int, int, int]) -> None:
        self._program = _Program(grid, len(self.steps))
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            with np.errstate(all="ignore"):  # NumPy warns of the NaN and infinities that kernels compute with
                function(**args)
        finally:
            sys.settrace(before)

    # What Python tells of lines.

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
            arguments = self._changed(frame.f_locals, {})
            entry |= {"arguments": arguments} if arguments else {}
            phase = caller.source.phase(caller.line or 0) or caller.phase
        program.frames.append(_Frame(len(self.frames), frame, source, source.name, phase, dict(frame.f_locals)))
        self.frames.append(entry)

    def _close(self, program: _Program, top: _Frame, frame: FrameType, result: Any = None) -> None:
        """The line that was running is done, and its function with it where there is a result."""
        if top.line is None:
            return
        now = dict(frame.f_locals)
        news = self._changed(now, top.known)
        if result is not None:
            news |= self._changed({"return": result}, {})
        top.known = now
        is_kernel = len(program.frames) == 1
        touched, state = top.step.pop("touched", None), []
        if is_kernel:
            program.rows = self._rows_of(now.get(top.source.told.row)) or program.rows
            if top.source.starts(top.line, "for ", "while "):
                program.cols = None
            state = self._state_of(program, top, now)
        if touched:
            program.rows, program.cols = touched
        step: dict[str, Any] = {"frame": top.number, "line": top.line}
        step["phase"] = self._phase(top.source.phase(top.line) or top.phase or self._guess(top.step))
        step["rows"] = list(program.rows)
        step |= {"cols": list(program.cols)} if program.cols else {}
        step |= {"set": news} if news else {}
        step |= {"computed": top.computed} if top.computed else {}
        step |= top.step
        step |= {"state": state} if state else {}
        messages, note = top.messages, top.source.notes.get(top.line)
        step |= {"message": messages[0]} if messages else {}
        step |= {"note": note} if note else {}
        top.step, top.messages, top.computed, top.reduced = {}, [], [], {}
        if step.keys() <= {"frame", "line", "phase", "rows", "cols"} and top.source.starts(top.line, "if "):
            return  # what was asked is known when the kernel is compiled
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
        names = self.story.collects.get(top.function)
        if names:
            self._collected(program, dict(frame.f_locals), names)
        program.frames[-1].reduced = top.reduced | program.frames[-1].reduced

    def _steps_of(self, program: _Program) -> Iterator[dict[str, Any]]:
        here = {"launch": len(self.launches) - 1, "program": list(program.grid)}
        for step in self.steps[program.first_step :]:
            if here.items() <= self.frames[step["frame"]].items():
                yield step

    def _add(self, step: dict[str, Any]) -> None:
        self.steps.append(step)
        if len(self.steps) > MOST_STEPS:
            raise RecordingError(f"more than {MOST_STEPS} steps: take fewer rows or columns, or larger blocks")

    def _changed(self, now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
        self._bytes += sum(tile.nbytes for name, value in now.items()
                           if value is not before.get(name) and (tile := flat(value)) is not None)  # fmt: skip
        if self._bytes > MOST_BYTES:
            raise RecordingError(f"more than {MOST_BYTES} bytes of tiles: take fewer rows or columns")
        return changed(now, before, self.memory)

    def _phase(self, name: str) -> int:
        if name not in self.phases:
            self.phases.append(name)
        return self.phases.index(name)

    def _guess(self, step: dict[str, Any]) -> str:
        """The phase of a step of a kernel of which none was told."""
        if self._told:
            return self.phases[0]
        return "store" if "stores" in step else "load" if "loads" in step else "compute"

    # Rows and their states.

    def _shape(self) -> tuple[int, int]:
        if not self.memory.tensors:
            return 0, 1
        view = self.memory.tensors[0].view
        n_cols = view.shape[-1] if view.ndim else 1
        return view.numel() // max(1, n_cols), n_cols

    def _rows_of(self, value: Any) -> list[int]:
        rows = flat(value)
        return [] if rows is None else sorted({int(row) for row in rows if 0 <= row < self._shape()[0]})

    def _state_of(self, program: _Program, top: _Frame, now: dict[str, Any]) -> list[dict[str, Any]]:
        """The maximum and sum of the rows of which this step has changed them."""
        told = top.source.told
        rows = flat(now.get(told.row))
        if rows is None:
            return []
        news: dict[int, dict[str, Any]] = {}
        for letter, names in (("m", told.m), ("s", told.s)):
            values = [top.reduced.get(name) if name.endswith("()") else now.get(name) for name in names]
            value: Any = next((value for value in values if value is not None), None)
            of_rows = flat(value)
            if of_rows is None or of_rows.size not in (1, rows.size) or of_rows.dtype.kind != "f":
                continue
            encoded = numbers(np.broadcast_to(of_rows, rows.shape), dtype_name(getattr(value, "dtype", "float64")))
            for row, each in zip(map(int, rows), encoded, strict=True):
                state = program.state.setdefault(row, {})
                if 0 <= row < self._shape()[0] and state.get(letter) != each:
                    state[letter] = each
                    news[row] = state
        self.states |= {row: dict(state) for row, state in news.items()}
        return [{"row": row} | state for row, state in sorted(news.items())]

    # What the hooks tell of memory and arithmetic.

    def computed(self, kind: str | None, value: Any) -> None:
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
        """Note an access, or refuse it. Without `value`, a store is of what memory holds now."""
        program = self._program
        if program is None or not program.frames:
            return
        top = program.frames[-1]
        addresses = np.asarray(ptrs.data)
        on = np.ones(addresses.shape, bool) if mask is None else np.asarray(getattr(mask, "data", mask), bool)
        on = np.broadcast_to(on, addresses.shape).reshape(-1)
        tensor, index = self.memory.locate(addresses)
        if (tensor[on] < 0).any():
            self._refuse(top, kind, int((tensor[on] < 0).sum()))
        stored = None if value is None else np.broadcast_to(np.asarray(value.data), addresses.shape).reshape(-1)
        for each in dict.fromkeys(tensor[on].tolist()):
            held = self.memory.tensors[each]
            lanes = np.flatnonzero(on & (tensor == each))
            at, first = np.unique(index[lanes], return_index=True)
            order = np.argsort(first)
            at, lanes = at[order], lanes[first[order]]
            entry: dict[str, Any] = {"tensor": each, "at": at.tolist()}
            if kind == "stores":
                entry["data"] = numbers(_elements(held.view, at) if stored is None else stored[lanes], held.dtype)
            entry["masked"] = int((~on).sum())
            top.step.setdefault(kind, []).append(entry)
            counts = self.reads if kind == "loads" else self.writes
            counts.setdefault(each, np.zeros(held.view.numel(), np.int64))[at] += 1
            self._touch(program, top, each, at)
        if kind == "stores" and top.function in self.story.publishes:
            self._published(program, top)

    def _refuse(self, top: _Frame, kind: str, n: int) -> None:
        line = top.line or top.source.first_line
        does = "reads" if kind == "loads" else "writes"
        raise RecordingError(
            f"{top.source.name} {does} {n} elements outside its tensors, at line {line} of {top.source.file}: "
            f"{top.source.lines[line - top.source.first_line].strip()}"
        )

    def _touch(self, program: _Program, top: _Frame, tensor: int, at: np.ndarray) -> None:
        """Where in the matrix an access is, if its tensor is of the matrix's shape."""
        n_rows, n_cols = self._shape()
        held = self.memory.tensors[tensor]
        if held.view.numel() != n_rows * n_cols or held.role == "scratch" or not at.size:
            return
        rows = sorted({int(row) for row in at // n_cols})
        cols = int((at % n_cols).min()), int((at % n_cols).max()) + 1
        if program.cols is not None and len(program.frames) > 1 and rows == program.rows:
            cols = min(cols[0], program.cols[0]), max(cols[1], program.cols[1])
        program.rows, program.cols = rows, cols
        top.step["touched"] = rows, cols

    # Messages.

    def _published(self, program: _Program, top: _Frame) -> None:
        message: dict[str, Any] = {"kind": "publish", "row": program.rows[0], "from": int(_item(top.known["part"]))}
        for name, local in self.story.publishes[top.function].items():
            message[name] = numbers(_item(top.known[local]), "float32")[0]
        top.messages.append(message)

    def _collected(self, program: _Program, now: dict[str, Any], names: Mapping[str, str]) -> None:
        step, part = self.steps[-1], int(_item(now["part"]))
        for each in range(int(_item(now["n_parts"]))):
            message: dict[str, Any] = {"kind": "collect", "row": program.rows[0], "from": each, "to": part}
            for name, local in names.items():
                message[name] = numbers(_item(now[local], each), "float32")[0]
            self._add({name: step[name] for name in ("frame", "line", "phase", "rows")} | {"message": message})

    # Sources.

    def _source(self, code: CodeType) -> Source | None:
        """The source of a kernel's function; None for any other code, and for Triton's own library."""
        if code in self._functions:
            return self._functions[code]
        rewritten = InterpretedFunction.rewritten_fn
        if len(rewritten) != len(self._codes):
            self._codes = {getattr(now, "__code__", None): function for function, now in rewritten.items()}
        function = self._codes.get(code)
        if function is None:
            return None  # and not kept: a function is rewritten when it is first called
        source = None
        if not code.co_filename.startswith(_TRITON):
            source = Source(function, _file_name(code.co_filename), self.story.told.get(function.__name__, Told()))
            self.sources.append(source)
        self._functions[code] = source
        return source


def _file_name(path: str) -> str:
    """A name that says nothing of this machine: within the package, or the file's own."""
    found = Path(path)
    return found.relative_to(_PACKAGE).as_posix() if found.is_relative_to(_PACKAGE) else found.name


def _item(value: Any, at: int = 0) -> np.ndarray:
    """One of the numbers of a tile, or of a number."""
    found = flat(value)
    if found is None:
        raise TypeError(f"no number: {value!r}")
    return found[at]


def _elements(view: Tensor, at: np.ndarray) -> np.ndarray:
    values = view.contiguous().reshape(-1)[torch.from_numpy(at)]
    return (values.view(torch.uint16) if values.dtype == torch.bfloat16 else values).numpy()
