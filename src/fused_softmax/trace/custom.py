"""Records other kernels: packs a launch as text for a worker, and runs it there."""

import base64
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from fused_softmax.trace import results, run
from fused_softmax.trace.recorder.encode import dtype_name, number
from fused_softmax.trace.recorder.hooks import interpreting
from fused_softmax.trace.recorder.memory import MOST_ELEMENTS, RecordingError
from fused_softmax.trace.recorder.recorder import Recorder
from fused_softmax.trace.recorder.story import Story, Told

_ELSE = "define it in a module, or set TRITON_INTERPRET=1 before anything imports Triton, so that no worker is needed"


class Launches:
    """`Launches(kernel, ...)[grid](*arguments, **constants)` records one launch, spelt like `kernel[grid](...)`."""

    def __init__(self, kernel: Any, ask: Any, **told: Any) -> None:
        self._kernel, self._ask, self._told = kernel, ask, told

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **constants: Any) -> dict[str, Any]:
            kernel = unwrapped(self._kernel)
            names = kernel.arg_names
            if len(args) > len(names):
                raise TypeError(f"{kernel.__name__} takes {len(names)} arguments, got {len(args)}")
            given = dict(zip(names, args, strict=False))
            if twice := given.keys() & constants.keys():
                raise TypeError(f"{kernel.__name__} got {sorted(twice)[0]} twice")
            known = {name: value for name, value in constants.items() if name in names}
            given |= known  # the rest are Triton's options
            size = grid(given) if callable(grid) else grid
            size = (size,) if isinstance(size, int) else tuple(int(each) for each in size)
            request = {"grid": list(size), "told": self._told} | pack(given)
            if interpreting():
                return record(kernel, request)
            return self._ask({"do": "launch", "where": whereabouts(kernel)} | request)

        return launch


def unwrapped(kernel: Any) -> Any:
    """The @triton.jit function, compiled or interpreted. Raises TypeError for anything else."""
    if isinstance(kernel, triton.runtime.Autotuner | triton.runtime.Heuristics):
        raise TypeError("the kernel is within an autotuner or heuristics: give its `.fn`, and every constant")
    if not isinstance(kernel, triton.JITFunction | InterpretedFunction):
        raise TypeError(f"kernel must be a @triton.jit function, got {type(kernel).__name__}")
    return kernel


def record(kernel: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Record a launch in this process."""
    told = request["told"]
    story = Story(
        {kernel.__name__: Told(told["phases"], told["row"], (told["m"],), (told["s"],))},
        roles=dict.fromkeys(told["scratch"], "scratch") | dict.fromkeys(told["outputs"], "output"),
    )
    given = unpack(request)
    recorder = Recorder(story)
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    # The matrix in which steps have a place: preferably one of two dims, and read rather than written.
    main = min(tensors, key=lambda name: (name in story.roles, tensors[name].ndim != 2), default=None)
    x = None
    if main is not None:
        x = tensors[main].clone()
        recorder.memory.hold(main.removesuffix("_ptr"), tensors[main], story.roles.get(main, "input"), main)
    with recorder:
        kernel[tuple(request["grid"])](**given)
    for at, held in enumerate(recorder.memory.tensors):
        if held.role == "input" and at in recorder.writes:
            held.role = "output"
    title = told["title"] or f"{kernel.__name__}, grid {' x '.join(map(str, request['grid']))}"
    softmax = told["operation"] == "softmax" and x is not None and x.ndim == 2
    return (
        run.heading(title, "custom", told["operation"], told["summary"], {})
        | run.content(recorder)
        | {"rows": results.rows("softmax", recorder, x) if softmax and x is not None else []}
        | {"traffic": results.traffic(recorder)}
    )


def whereabouts(kernel: Any) -> dict[str, str]:
    """Where a worker finds a kernel: its name, and its module or the file that is being run."""
    function = kernel.fn
    name, module = function.__qualname__, function.__module__
    if "<" in name:
        raise RecordingError(f"{name} is made within a function, where a worker cannot find it: {_ELSE}")
    if module != "__main__":
        return {"module": module, "name": name}
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None or not Path(file).is_file():
        raise RecordingError(f"{name} is in no file in which a worker could find it: {_ELSE}")
    return {"file": str(Path(file).resolve()), "name": name}


def found(where: dict[str, str]) -> Any:
    """In a worker, the kernel that `whereabouts` described. A file is imported under a name other than __main__."""
    if "module" in where:
        holder: Any = importlib.import_module(where["module"])
    else:
        holder = _import_file(where["file"])
    for name in where["name"].split("."):
        holder = getattr(holder, name)
    while isinstance(holder, triton.runtime.Autotuner | triton.runtime.Heuristics):
        holder = holder.fn  # the name leads to the kernel with everything wrapped around it
    return unwrapped(holder)


def _import_file(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("__recorded__", file)
    if spec is None or spec.loader is None:
        raise RecordingError(f"{Path(file).name} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules["__recorded__"] = module
    spec.loader.exec_module(module)
    return module


def pack(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, as JSON. Tensors are views of storages, so tensors that share memory still share it."""
    storages: dict[int, int] = {}
    bytes_of: list[str] = []

    def packed(name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            value = value.detach().cpu()
            storage = value.untyped_storage()
            if value.numel() > MOST_ELEMENTS or storage.nbytes() > 16 * MOST_ELEMENTS:
                raise RecordingError(
                    f"{name} has {value.numel()} elements; a recording takes small examples, up to {MOST_ELEMENTS}"
                )
            if storage.data_ptr() not in storages:
                storages[storage.data_ptr()] = len(bytes_of)
                memory = torch.empty(0, dtype=torch.uint8).set_(storage)
                bytes_of.append(base64.b64encode(memory.numpy().tobytes()).decode())
            place = [storages[storage.data_ptr()], value.storage_offset(), list(value.shape), list(value.stride())]
            return {"tensor": place, "dtype": dtype_name(value.dtype)}
        if isinstance(value, tl.constexpr):
            value = value.value
        if isinstance(value, tl.dtype):
            return {"dtype": value.name}
        if isinstance(value, float):
            return {"float": number(value, "float64")}
        if value is None or isinstance(value, bool | int | str):
            return value
        if type(value) is tuple:
            return {"tuple": [packed(name, each) for each in value]}
        raise TypeError(f"{name}: a recording cannot take {type(value).__name__}")

    return {"arguments": {name: packed(name, value) for name, value in given.items()}, "storages": bytes_of}


def unpack(request: dict[str, Any]) -> dict[str, Any]:
    """The arguments that `pack` packed, in new memory."""
    storages = [torch.frombuffer(bytearray(base64.b64decode(text)) or bytearray(8), dtype=torch.uint8)
                for text in request["storages"]]  # fmt: skip

    def unpacked(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if "tensor" in value:
            at, first, shape, strides = value["tensor"]
            whole = torch.empty(0, dtype=getattr(torch, value["dtype"])).set_(storages[at].untyped_storage())
            return whole.as_strided(shape, strides, first)
        if "tuple" in value:
            return tuple(unpacked(each) for each in value["tuple"])
        return float(value["float"]) if "float" in value else tl.str_to_ty(value["dtype"], None)

    return {name: unpacked(value) for name, value in request["arguments"].items()}
