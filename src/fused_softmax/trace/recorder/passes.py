"""Records torch's own operations, each as a pass over memory, from what is dispatched."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fused_softmax.trace.recorder.encode import dtype_name, tensor_numbers
from fused_softmax.trace.recorder.memory import Held
from fused_softmax.trace.recorder.recorded import Recorded
from fused_softmax.trace.recorder.story import Source, Story


class Passes(TorchDispatchMode, Recorded):
    """While entered, records the reads and writes of a function of torch operations, one step an operation.

    Views move nothing and count as the tensor they view. Every result is a tensor in memory: the function's last one is
    the output, all earlier ones are scratch.
    """

    counts_scratch = True

    def __init__(self, story: Story, function: Callable[..., Any]) -> None:
        TorchDispatchMode.__init__(self)
        Recorded.__init__(self, story)
        self.sources = [Source(function, story)]
        self._function = function
        self._tensors: dict[int, int] = {}  # storage to number
        self._alive: list[Tensor] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        if operation.is_view or not isinstance(result, Tensor):
            return result
        source = self.sources[0]
        line = source.statement(self._line())
        phase = source.phase(line) or self.phases[0]
        name = str(operation).removeprefix("aten.").split(".")[0]
        loads = [self._load(each) for each in args if isinstance(each, Tensor)]
        number = self._new(result, source.line(line))
        at = list(range(result.numel()))
        self.writes[number] = np.ones(len(at), np.int64)
        self.launches.append({"name": f"aten.{name}", "source": 0, "grid": [1, 1, 1], "constants": {}, "arguments": {}})
        self.frames.append(
            {"source": 0, "launch": len(self.launches) - 1, "program": [0, 0, 0], "parent": None, "call_line": None}
        )
        n_rows, n_cols = self.memory.tensors[0].view.shape
        step: dict[str, Any] = {
            "frame": len(self.frames) - 1, "line": line, "phase": self.phases.index(phase),
            "rows": list(range(n_rows)), "cols": [0, n_cols],
        }  # fmt: skip
        local = self.memory.tensors[number].name
        step["set"] = {
            local: {"shape": list(result.shape), "dtype": dtype_name(result.dtype), "data": tensor_numbers(result)}
        }
        step["loads"] = loads
        step["stores"] = [{"tensor": number, "at": at, "data": tensor_numbers(result), "masked": 0}]
        for letter in ("m", "s"):
            if local == letter and result.shape == (n_rows,):
                for row, value in enumerate(tensor_numbers(result)):
                    self.states.setdefault(row, {})[letter] = value
                step["state"] = [{"row": row} | dict(self.states[row]) for row in range(n_rows)]
        note = source.notes.get(line)
        self.steps.append(step | ({"note": note} if note else {}))
        return result

    def _load(self, tensor: Tensor) -> dict[str, Any]:
        number = self._tensors.get(tensor.untyped_storage().data_ptr(), 0)
        counts = self.reads.setdefault(number, np.zeros(self.memory.tensors[number].view.numel(), np.int64))
        counts += 1
        return {"tensor": number, "at": list(range(counts.size)), "masked": 0}

    def _new(self, result: Tensor, text: str) -> int:
        name, equals, _ = text.partition(" = ")
        name = name if equals else "y"
        before = tensor_numbers(torch.full_like(result, float("nan")))
        self.memory.tensors.append(
            Held(name, None, "scratch" if equals else "output", result, dtype_name(result.dtype), before)
        )
        self._alive.append(result)
        self._tensors[result.untyped_storage().data_ptr()] = len(self.memory.tensors) - 1
        return len(self.memory.tensors) - 1

    def _line(self) -> int:
        frame: Any = sys._getframe()
        while frame is not None and frame.f_code is not self._function.__code__:
            frame = frame.f_back
        return int(frame.f_lineno) if frame is not None else self.sources[0].first_line
