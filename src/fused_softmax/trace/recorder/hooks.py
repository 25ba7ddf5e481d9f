"""Listens to Triton's interpreter. Launches, loads, stores, atomics, reductions and products pass through a few
methods. They are wrapped while a recording is made and restored afterwards, also after an error.

Triton 3.6 to 3.9 call these methods with different arguments after a pointer, a value and a mask. Those pass through.
"""

import inspect
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterBuilder, ReduceOps, TensorHandle

from fused_softmax.trace.recorder.as_a_gpu import CORRECTIONS
from fused_softmax.trace.recorder.memory import RecordingError
from fused_softmax.trace.recorder.shortcuts import SHORTCUTS
from fused_softmax.trace.recorder.turns import Turns

if TYPE_CHECKING:
    from fused_softmax.trace.recorder.recorder import Recorder

_one_at_a_time = threading.Lock()
_FUNCTIONS = ("exp", "exp2", "log", "log2")
_REDUCTIONS = {"_elementwise_max": "max", "_elementwise_min": "min", "_sum_combine": "sum"}


def interpreting() -> bool:
    """Whether this process interprets kernels. Triton reads its flag once, at the import."""
    return isinstance(tl.max, InterpretedFunction)


class Hooks:
    """A context in which a recorder hears everything that the interpreter runs. One at a time in a process."""

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder = recorder
        self._restore = ExitStack()
        self._patched: set[int] = set()
        self.turns: Turns | None = None

    def __enter__(self) -> "Hooks":
        if not interpreting():
            raise RecordingError(
                "this process does not interpret Triton: set TRITON_INTERPRET=1 before Triton is imported"
            )
        if not _one_at_a_time.acquire(blocking=False):
            raise RecordingError("this process is already making a recording; it can make one at a time")
        with ExitStack() as stack:
            stack.callback(_one_at_a_time.release)
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, of maxima of nothing but NaN
            for holder, name, wrap in (
                (GridExecutor, "__call__", self._launch),
                (InterpreterBuilder, "create_masked_load", self._load),
                (InterpreterBuilder, "create_masked_store", self._store),
                (InterpreterBuilder, "create_atomic_rmw", self._atomic(1, 3)),
                (InterpreterBuilder, "create_atomic_cas", self._atomic(0, None)),
                (ReduceOps, "apply_impl", self._reduce),
                *((InterpreterBuilder, f"create_{name}", self._compute) for name in (*_FUNCTIONS, "dot")),
                *CORRECTIONS,
                *SHORTCUTS,
                (interpreter, "_patch_lang", self._patch),
            ):
                plain = holder.__dict__[name]
                setattr(holder, name, wrap(plain))
                stack.callback(setattr, holder, name, plain)
            self._restore = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._restore.close()

    def _patch(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Patch Triton's language once. Triton does so at every call of a function, which takes most of its time."""

        def patch(function: Any) -> Any:
            if id(function.__globals__) in self._patched:
                return interpreter._LangPatchScope()  # with nothing to restore
            self._patched.add(id(function.__globals__))
            return plain(function)

        return patch

    def _launch(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def launch(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
            function = executor.fn
            parameters = inspect.getfullargspec(function)
            known = parameters.args + parameters.kwonlyargs
            given = inspect.getcallargs(function, *args, **{k: v for k, v in kwargs.items() if k in known})
            prepared = self._recorder.prepare(function, given)
            if prepared is None:
                return
            grid = executor.grid(prepared) if callable(executor.grid) else executor.grid
            grid = tuple(int(size) for size in (*grid, 1, 1)[:3])
            self._recorder.launched(function, grid, prepared, executor.constexprs)
            executor.fn = self._program(function, grid)
            self._patched.clear()
            try:
                plain(executor, **prepared)
            finally:
                executor.fn = function
                self._recorder.memory.take()

        return launch

    def _program(self, function: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        """The function that Triton calls for each program in place of the kernel."""
        turns = self.turns = (
            Turns(interpreter.interpreter_builder, self._recorder.late) if self._recorder.take_turns else None
        )
        last = tuple(size - 1 for size in grid)

        def program(**args: Any) -> None:
            at = interpreter.interpreter_builder.grid_idx
            if turns is None:
                self._recorder.run(function, args, at)
                return
            turns.add(at, lambda: self._recorder.run(function, args, at))
            if at == last:
                turns.run(self._recorder.switch)

        # The interpreter looks at the parameters and their types.
        program.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        program.__annotations__ = function.__annotations__
        return program

    def _load(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def load(builder: Any, ptrs: TensorHandle, mask: Any, *rest: Any, **options: Any) -> Any:
            self._recorder.accessed("loads", ptrs, mask)
            return plain(builder, ptrs, mask, *rest, **options)

        return load

    def _store(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def store(builder: Any, ptrs: TensorHandle, value: TensorHandle, mask: Any, *rest: Any, **options: Any) -> Any:
            self._recorder.accessed("stores", ptrs, mask, value)
            return plain(builder, ptrs, value, mask, *rest, **options)

        return store

    def _atomic(self, ptr: int, mask: int | None) -> Callable[..., Any]:
        """ptr, mask: their places among the arguments."""

        def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
            def atomic(builder: Any, *arguments: Any) -> Any:
                touched = arguments[ptr], None if mask is None else arguments[mask]
                self._recorder.accessed("loads", *touched)
                result = plain(builder, *arguments)
                self._recorder.accessed("stores", *touched)
                return result

            return atomic

        return wrap

    def _reduce(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def reduce(operation: ReduceOps, input: Any) -> Any:
            result = plain(operation, input)
            combine = getattr(operation.combine_fn, "fn", operation.combine_fn)
            kind = _REDUCTIONS.get(getattr(combine, "__name__", ""))
            if kind:
                self._recorder.computed(kind, result[0] if isinstance(result, list | tuple) else result)
            return result

        return reduce

    def _compute(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def compute(builder: Any, *arguments: Any) -> TensorHandle:
            result = plain(builder, *arguments)
            shape = result.data.shape if result.data.size > 1 else ()
            kind = tl.block_type(result.dtype.scalar, list(shape)) if shape else result.dtype.scalar
            self._recorder.computed(None, tl.tensor(result, kind))
            return result

        return compute
