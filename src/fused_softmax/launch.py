"""Launch a Triton kernel at the cost of the launch itself.

`kernel[grid](...)` spends about 8 us of host time on every call to rediscover what it knew the call before: the types,
the specialisation, the compiled kernel. `prepare` finds these once, and the `Launch` it returns hands plain integers to
the compiled kernel's own launcher. That calling convention is undocumented, though Inductor emits the same; so it is
known to this file only, checked before it is used, and replaced by the public `kernel[grid](...)` where anything about
it is untested.
"""

import inspect
import os
from threading import Lock
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs

_PUBLIC_ONLY = os.environ.get("FUSED_SOFTMAX_PUBLIC_LAUNCH") == "1"
_TESTED = {"3.6", "3.7", "3.8", "3.9"}
_CONVENTION = ["gridX", "gridY", "gridZ", "stream", "function"]

_compiled: dict[tuple, Any] = {}
_compiling = Lock()


def prepare(kernel, grid, tensors, scalars, constexprs, *, device, **options):
    """Compile `kernel` for these arguments and return the `Launch` that runs it; nothing runs yet.

    The kernel's parameters are, in order: the `tensors`, the `scalars` (ints or floats), the `constexprs` (by name).
    Scalars, constexprs and grid (an int, or up to three) stay with the Launch; tensors are given again at each launch,
    of the same dtypes and the same 16-byte alignment. `device` is `tensor.get_device()`: an index, or -1 for CPU
    tensors under the interpreter. `options` are Triton's: `num_warps`, `num_ctas`, `maxnreg` and the like.

        launch = prepare(_forward, n_rows, (x, y), (x.stride(0), n_cols), {"BLOCK": 1024}, device=0, num_warps=4)
        launch(x, y)

    A second grid or scalar of the same kind (see `_kind`) costs microseconds: it compiles and loads nothing.
    """
    grid = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]
    if grid[0] * grid[1] * grid[2] >= 2**31:
        raise ValueError(f"grid {grid} has 2**31 programs or more, which Triton's launcher drops without an error")
    options.setdefault("enable_fp_fusion", True)
    launch_public = _public(kernel, grid, scalars, constexprs, device, options)
    if not isinstance(kernel, triton.JITFunction):
        return Launch(launch_public, None)

    key = (
        id(kernel),  # its hash is that of its source, and slow; the compiled kernel keeps it alive
        device,
        *[(tensor.dtype, tensor.data_ptr() % 16) for tensor in tensors],
        *[_kind(scalar) for scalar in scalars],
        *constexprs.items(),
        *options.items(),
    )
    compiled, as_tested = _compiled.get(key) or (None, False)
    if compiled is None:
        # One thread at a time: a second one would see the launcher of a kernel whose function is still being loaded.
        with _compiling, torch.cuda.device(device):
            compiled = kernel.warmup(*tensors, *scalars, grid=grid, **constexprs, **options)
            compiled.run  # noqa: B018  loads it on the device, so that no launch has to
            as_tested = _is_as_tested(compiled)
            _compiled[key] = compiled, as_tested
    if not as_tested:
        return Launch(launch_public, compiled)
    # The launcher skips constexprs but wants their places.
    tail = (*scalars, *[None] * (len(kernel.arg_names) - len(tensors) - len(scalars)))
    return Launch(_direct(compiled, grid, tail, device, launch_public), compiled)


class Launch:
    """A compiled kernel with its grid and its scalars: call it with the tensors, on their device's current stream."""

    # A closure held in the slot of `__call__` is called without a Python method in between.
    __slots__ = ("__call__", "_compiled")

    def __init__(self, call, compiled):
        self.__call__ = call
        self._compiled = compiled

    @property
    def resources(self) -> "Resources | None":
        """What one program takes of the chip, None under the interpreter."""
        if self._compiled is None:
            return None
        return Resources(self._compiled.n_regs, self._compiled.n_spills, self._compiled.metadata.shared)


class Resources(NamedTuple):
    n_regs: int  # a thread
    n_spills: int  # 32-bit words a thread
    shared: int  # bytes a program


def _direct(compiled, grid, tail, device, launch_public):
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    grid_x, grid_y, grid_z = grid
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    driver = triton.runtime.driver.active
    stream_of, current_device = driver.get_current_stream, driver.get_current_device
    data_ptr = torch.Tensor.data_ptr

    def launch(*tensors):
        runtime = knobs.runtime
        if (
            enter.calls
            or leave.calls
            or runtime.launch_enter_hook is not enter
            or runtime.launch_exit_hook is not leave
        ):
            return launch_public(*tensors)
        if current_device() != device:
            with torch.cuda.device(device):
                return launch(*tensors)
        run(
            grid_x, grid_y, grid_z, stream_of(device), function, metadata, None, None, None,
            *map(data_ptr, tensors), *tail,
        )  # fmt: skip

    return launch


def _public(kernel, grid, scalars, constexprs, device, options):
    def launch(*tensors):
        if device < 0:
            kernel[grid](*tensors, *scalars, **constexprs, **options)
        else:
            with torch.cuda.device(device):
                kernel[grid](*tensors, *scalars, **constexprs, **options)

    return launch


def _kind(scalar):
    """What Triton specialises a scalar on: its type, and for an int also 1, divisibility by 16 and width."""
    if type(scalar) is not int:
        return type(scalar)
    return (scalar == 1, scalar % 16 == 0, -(2**31) <= scalar < 2**31, scalar < 2**63)


def _is_as_tested(compiled):
    """Whether this Triton, on this backend, launches in the way this file knows."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return (
        not _PUBLIC_ONLY
        and ".".join(triton.__version__.split(".")[:2]) in _TESTED
        and compiled.metadata.target.backend == "cuda"
        and not getattr(compiled.metadata, "instrumentation_mode", "")
        and all(hasattr(hook, "calls") for hook in hooks)
        and list(inspect.signature(compiled.run).parameters)[:5] == _CONVENTION
    )
