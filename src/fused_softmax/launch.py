"""Launch a Triton kernel at the cost of the launch itself.

`kernel[grid](...)` spends about 8 us of host time on every call to find out what it knew the call before: the types,
the specialisation, the compiled kernel. `prepare` finds these once, and the `Launch` it returns hands plain integers to
the compiled kernel's own launcher. That calling convention is undocumented, though Inductor emits the same; so it is
known to this file only, probed before it is used, and replaced by the public `kernel[grid](...)` wherever anything
about it is untested, or somebody listens to Triton's launch hooks.
"""

import inspect
import math
import os
from contextlib import nullcontext
from threading import Lock
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs

_PUBLIC_ONLY = os.environ.get("FUSED_SOFTMAX_PUBLIC_LAUNCH") == "1"
_TESTED_TRITONS = {"3.6", "3.7", "3.8", "3.9"}

_MOST_LAUNCHES = 4096  # that are kept

_loaded: dict[tuple, tuple[Any, Any]] = {}  # the compiled kernel, and what binds a grid and scalars to it
_bound: dict[tuple, "Launch"] = {}  # by grid and scalars too
_loading = Lock()


def prepare(kernel, grid, tensors, scalars, constexprs, *, device, most_registers=None, **options):
    """Compile `kernel` for these arguments and return the `Launch` that runs it; nothing runs yet.

    The kernel's parameters are, in order: the `tensors`, the `scalars` (ints or floats), the `constexprs` (by name).
    Tensors and scalars that a launch does without are None. Scalars, constexprs and grid (an int, or up to three) stay
    with the Launch; the tensors there are are given again at each launch, of the same dtypes and with the same 16-byte
    alignment. `device` is `tensor.get_device()`: an index, or -1 for CPU
    tensors under the interpreter. `options` are Triton's: `num_warps`, `num_ctas`, `maxnreg` and the like;
    `most_registers` is a `maxnreg` for where nothing spills by it, and elsewhere none.

        launch = prepare(_forward, n_rows, (x, y), (x.stride(0), n_cols), {"BLOCK_COLS": 1024}, device=0, num_warps=4)
        launch(x, y)

    The same again is looked up; another grid, or a scalar of the same kind (`_kind`), compiles and loads nothing.
    """
    if most_registers is not None:
        capped = prepare(kernel, grid, tensors, scalars, constexprs, device=device, maxnreg=most_registers, **options)
        if capped.resources is None or not capped.resources.n_spills:
            return capped
    grid = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]
    options["enable_fp_fusion"] = True  # Triton's default until 3.9, and off from then on: say it, so results stay
    key = (
        id(kernel),  # hashing a kernel hashes its source; what is loaded keeps it alive, so the id stays its own
        device,
        *[tensor is not None and (tensor.dtype, tensor.data_ptr() % 16 == 0) for tensor in tensors],
        *[_kind(scalar) for scalar in scalars],
        *constexprs.items(),
        *options.items(),
    )
    same = key, grid, scalars
    if same in _bound:
        return _bound[same]
    if grid[0] * grid[1] * grid[2] >= 2**31:
        raise ValueError(f"a grid of {grid} has 2**31 programs or more; Triton's launcher would drop it silently")
    given = tuple(tensor is not None for tensor in tensors)
    launch_public = _public(kernel, grid, given, scalars, constexprs, device, options)
    if not isinstance(kernel, triton.JITFunction):
        return Launch(launch_public, None)

    compiled, bind = _loaded.get(key, (None, None))
    if compiled is None:
        # One thread at a time: another would meet Triton's kernel with its launcher set and its function still missing.
        with _loading, torch.cuda.device(device):
            compiled = kernel.warmup(*tensors, *scalars, grid=grid, **constexprs, **options)
            if not isinstance(compiled, triton.compiler.CompiledKernel):  # a compile hook took it, or it is in a queue
                return Launch(launch_public, None)
            compiled.run  # noqa: B018  loads the kernel on the device, so that no launch has to
            bind = _binder(compiled, device)
        if bind is None:
            return Launch(launch_public, compiled)
        _loaded[key] = compiled, bind
    # The launcher skips constexprs by their place and never reads their values.
    n_constexprs = len(kernel.arg_names) - len(tensors) - len(scalars)
    launch = Launch(bind(grid, given, (*scalars, *[None] * n_constexprs), launch_public), compiled)
    if len(_bound) >= _MOST_LAUNCHES:
        _bound.clear()
    _bound[same] = launch
    return launch


class Launch:
    """A loaded kernel with its grid and scalars: call it with the tensors, to run on their device's current stream."""

    # A closure in the slot of `__call__` is called with no Python method in between: 0.1 us of 1.8.
    __slots__ = ("__call__", "_compiled")

    def __init__(self, call, compiled):
        self.__call__ = call
        self._compiled = compiled

    @property
    def resources(self) -> "Resources | None":
        """What the kernel takes of the chip, None where nothing was compiled (the interpreter)."""
        if self._compiled is None:
            return None
        return Resources(self._compiled.n_regs, self._compiled.n_spills, self._compiled.metadata.shared)


class Resources(NamedTuple):
    n_regs: int  # of a thread
    n_spills: int  # of a thread, in 32-bit words
    shared: int  # of a program, in bytes


def _binder(compiled, device):
    """What makes launches of a loaded kernel, or None where only the public way is known to work."""
    hooks: list[Any] = [getattr(knobs.runtime, name, None) for name in ("launch_enter_hook", "launch_exit_hook")]
    if (
        _PUBLIC_ONLY
        or ".".join(triton.__version__.split(".")[:2]) not in _TESTED_TRITONS
        or compiled.metadata.target.backend != "cuda"
        or getattr(compiled.metadata, "instrumentation_mode", "")  # a profiler or sanitizer adds arguments of its own
        or not all(isinstance(getattr(hook, "calls", None), list) for hook in hooks)
        or list(inspect.signature(compiled.run).parameters)[:5] != ["gridX", "gridY", "gridZ", "stream", "function"]
    ):
        return None

    enter, leave = hooks
    driver = triton.runtime.driver.active
    current_device = driver.get_current_device
    if current_device is torch.cuda.current_device:
        current_device = torch._C._cuda_getDevice  # the same less a check that CUDA is up, which a tensor on it proves
    known = {
        "function": compiled.function, "metadata": compiled.packed_metadata, "runtime": knobs.runtime,
        "enter": enter, "leave": leave, "entered": enter.calls, "left": leave.calls,
        "stream_of": driver.get_current_stream, "current_device": current_device,
    }  # fmt: skip
    run, known["run"] = _calling_convention(compiled.run, known)
    # One device is always the current one. Otherwise a kernel runs in the context it was loaded in, and a null stream
    # is that of the current context.
    here = "" if torch.cuda.device_count() == 1 else f" or current_device() != {device}"

    def bind(grid, given, values, launch_public):
        def elsewhere(*tensors):
            if current_device() == device:
                return launch_public(*tensors)
            with torch.cuda.device(device):
                return launch(*tensors)

        # As source, like Inductor's own: literals and names in one call cost half of unpacking tuples into it.
        tensors = ", ".join(f"t{i}" for i, there in enumerate(given) if there)
        pointers = [f"t{i}.data_ptr()" if there else "None" for i, there in enumerate(given)]
        arguments = ", ".join(pointers + [repr(value) for value in values])
        launch = eval(
            f"lambda {tensors}: elsewhere({tensors})"
            " if entered or left or runtime.launch_enter_hook is not enter or runtime.launch_exit_hook is not leave"
            f"{here} else {run.format(grid=', '.join(map(str, grid)), device=device, arguments=arguments)}",
            {**known, "elsewhere": elsewhere, "inf": math.inf, "nan": math.nan},
        )
        return launch

    return bind


def _calling_convention(launcher, known):
    """The call, as source, and what it calls: Triton's C launcher where nothing else is needed, else the Python one."""
    direct = getattr(launcher, "launch", None)
    sizes = [getattr(launcher, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    if direct is None or sizes != [0, 0]:
        return "run({grid}, stream_of({device}), function, metadata, None, None, None, {arguments})", launcher
    known |= {"cooperative": launcher.launch_cooperative_grid, "dependent": launcher.launch_pdl}
    start = "run({grid}, stream_of({device}), function, cooperative, dependent, "
    if hasattr(launcher, "kernel_signature"):  # from Triton 3.7 on
        known |= {"annotations": launcher.arg_annotations, "signature": launcher.kernel_signature}
        return start + "metadata, None, None, None, None, None, annotations, signature, ({arguments},))", direct
    return start + "None, None, metadata, None, None, None, {arguments})", direct


def _public(kernel, grid, given, scalars, constexprs, device, options):
    def launch(*tensors):
        rest = iter(tensors)
        tensors = tuple(next(rest) if there else None for there in given)
        with torch.cuda.device(device) if device >= 0 else nullcontext():
            kernel[grid](*tensors, *scalars, **constexprs, **options)

    return launch


def _kind(scalar):
    """All of a scalar that Triton may compile in: its type, and of an int also 1, a multiple of 16, the width."""
    if type(scalar) is not int:
        return type(scalar)
    return scalar == 1, scalar % 16 == 0, -(2**31) <= scalar < 2**31, scalar < 2**63
