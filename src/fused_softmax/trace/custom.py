"""Records other kernels: checks a launch, and runs it here or in a worker."""

import copy
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from fused_softmax.core.described import number_of
from fused_softmax.trace import run
from fused_softmax.trace.recorder.hooks import interpreting
from fused_softmax.trace.recorder.memory import MOST_ELEMENTS, RecordingError
from fused_softmax.trace.recorder.recorder import Recorder
from fused_softmax.trace.recorder.story import Story, Told

_ELSE = "define it in a module, or set TRITON_INTERPRET=1 before anything imports Triton, so that no worker is needed"


class Launches:
    """`Launches(kernel, ...)[grid](*arguments, **constants)` records one launch, spelt like `kernel[grid](...)`.

    told: the options of `record_kernel`. ask: a worker's, for a process that does not interpret.
    """

    def __init__(self, kernel: Any, told: dict[str, Any], ask: Any) -> None:
        self._kernel, self._told, self._ask = kernel, told, ask

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **constants: Any) -> dict[str, Any]:
            kernel = unwrapped(self._kernel)
            names = kernel.arg_names
            if len(args) > len(names):
                raise TypeError(f"{kernel.__name__} takes {number_of(len(names), 'argument')}, got {len(args)}")
            given = dict(zip(names, args, strict=False))
            if twice := given.keys() & constants.keys():
                raise TypeError(f"{kernel.__name__} got {sorted(twice)[0]} twice")
            known = {name: value for name, value in constants.items() if name in names}
            given |= known  # the rest are Triton's options
            size = grid(given) if callable(grid) else grid
            size = (size,) if isinstance(size, int) else tuple(int(each) for each in size)
            plain = {name: checked(name, value) for name, value in given.items()}
            if interpreting():
                return record(kernel, size, copy.deepcopy(plain), self._told)
            return self._ask(record_found, *whereabouts(kernel), size, plain, self._told)

        return launch


def unwrapped(kernel: Any) -> Any:
    """The @triton.jit function, compiled or interpreted. Raises TypeError for anything else."""
    if isinstance(kernel, triton.runtime.Autotuner | triton.runtime.Heuristics):
        raise TypeError("the kernel is within an autotuner or heuristics: give its `.fn`, and every constant")
    if not isinstance(kernel, triton.JITFunction | InterpretedFunction):
        raise TypeError(f"kernel must be a @triton.jit function, got {type(kernel).__name__}")
    return kernel


def record(kernel: Any, grid: tuple[int, ...], given: dict[str, Any], told: dict[str, Any]) -> dict[str, Any]:
    """Record a launch in this process. Its tensors change."""
    story = Story(
        {kernel.__name__: Told(told["phases"] or {}, told["row"], (told["m"],), (told["s"],))},
        roles=dict.fromkeys(told["scratch"], "scratch") | dict.fromkeys(told["outputs"], "output"),
    )
    recorder = Recorder(story)
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    # The matrix in which steps have a place: preferably one of two dims, and read rather than written.
    main = min(tensors, key=lambda name: (name in story.roles, tensors[name].ndim != 2), default=None)
    x = None
    if main is not None:
        x = tensors[main].clone()
        recorder.memory.hold(main.removesuffix("_ptr"), tensors[main], story.roles.get(main, "input"), main)
    with recorder:
        kernel[grid](**given)
    for at, held in enumerate(recorder.memory.tensors):
        if held.role == "input" and at in recorder.writes:
            held.role = "output"
    title = told["title"] or f"{kernel.__name__}, grid {' x '.join(map(str, grid))}"
    rows = x if told["operation"] == "softmax" and x is not None and x.ndim == 2 else None
    return run.recording(recorder, title, "custom", told["operation"], told["summary"], {}, rows)


def whereabouts(kernel: Any) -> tuple[str, str]:
    """Where a worker finds a kernel: its module or the file that is being run, and its name."""
    function = kernel.fn
    name, module = function.__qualname__, function.__module__
    if "<" in name:
        raise RecordingError(f"{name} is made within a function, where a worker cannot find it: {_ELSE}")
    if module != "__main__":
        return module, name
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None or not Path(file).is_file():
        raise RecordingError(f"{name} is in no file in which a worker could find it: {_ELSE}")
    return str(Path(file).resolve()), name


def record_found(place: str, name: str, *launch: Any) -> dict[str, Any]:
    """In a worker, record a launch of the kernel that `whereabouts` described."""
    holder: Any = _import_file(place) if Path(place).is_absolute() else importlib.import_module(place)
    for each in name.split("."):
        holder = getattr(holder, each)
    while isinstance(holder, triton.runtime.Autotuner | triton.runtime.Heuristics):
        holder = holder.fn  # the name leads to the kernel with everything wrapped around it
    return record(unwrapped(holder), *launch)


def _import_file(file: str) -> ModuleType:
    """The module of a file, under a name other than __main__."""
    spec = importlib.util.spec_from_file_location("__recorded__", file)
    if spec is None or spec.loader is None:
        raise RecordingError(f"{Path(file).name} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules["__recorded__"] = module
    spec.loader.exec_module(module)
    return module


def checked(name: str, value: Any) -> Any:
    """An argument as a recording takes it. Raises TypeError for what it cannot take."""
    if isinstance(value, tl.constexpr):
        value = value.value
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        if value.numel() > MOST_ELEMENTS or value.untyped_storage().nbytes() > 16 * MOST_ELEMENTS:
            raise RecordingError(
                f"{name} has {value.numel()} elements; a recording takes small examples, up to {MOST_ELEMENTS}"
            )
        return value
    if type(value) is tuple:
        return tuple(checked(name, each) for each in value)
    if value is None or isinstance(value, bool | int | float | str | tl.dtype):
        return value
    raise TypeError(f"{name}: a recording cannot take {type(value).__name__}")
