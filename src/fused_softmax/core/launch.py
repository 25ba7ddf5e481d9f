"""Launch a Triton kernel at the cost of the launch itself.

`kernel[grid](...)` spends about 8 us of host time on every call to find out again what it knew the call before: the
types, the specialisation, the compiled kernel. `prepare` finds these once, and the `Launch` it returns hands the
driver its arguments by a few lines of C (`launcher.c`). Nothing documents how Triton's kernels are called; so this file
alone knows it, probes it first, and takes the public `kernel[grid](...)` wherever anything about it is untested, no C
compiler is found, or somebody listens to Triton's launch hooks.
"""

import inspect
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar, copy_context
from functools import cache, cached_property, partial
from operator import itemgetter
from threading import Lock, Thread
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.runtime.cache import triton_key

from fused_softmax.core.cached import wherever_it_lies
from fused_softmax.core.native import begin, build
from fused_softmax.core.progress import compiling

_GPUS = "/dev/nvidiactl", "/dev/kfd"  # a driver makes one where a GPU is; asking the driver would start it
# Triton names kernels by a hash of its own files too, which takes 0.4 s and is kept: it is made while the rest of this
# package is imported. The thread imports nothing, so that a process may fork meanwhile.
_hash = Thread(target=triton_key, daemon=True)
if not knobs.runtime.interpret and any(map(os.path.exists, _GPUS)):
    _hash.start()
_PUBLIC_ONLY = os.environ.get("FUSED_SOFTMAX_PUBLIC_LAUNCH") == "1"
_TESTED_TRITONS = {"3.6", "3.7", "3.8", "3.9"}
_KINDS = {"fp32": "f", **dict.fromkeys(("i1", "i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64"), "i")}

_BYTES = (torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)

MOST_SPILLED = 32  # bytes of a thread: to spill so few costs less than a resident program
_LEAST = 2.0**-149  # of 32 bits, above 0: no number may become 0 by rounding

_loaded: dict[tuple, Any] = {}  # what was compiled and loaded, by all that Triton specialises on
_loading = Lock()
_ahead: ContextVar[list[Callable[[], Any]] | None] = ContextVar("ahead", default=None)  # what `together` calls next
_only_compiles: ContextVar[bool] = ContextVar("only_compiles", default=False)  # in threads of `_compiling_ahead`


def prepare(
    kernel, grid, tensors, scalars, constexprs, *, device, numbers=(), most_registers=None, registers_of=None,
    plan=None, **options,
) -> "Launch":  # fmt: skip
    """Compile `kernel` for these arguments and return the `Launch` that runs it; nothing runs yet.

    The kernel's parameters are, in order: the `tensors`, the `scalars` (ints, floats or tuples of ints), the
    `constexprs` (by name).
    Tensors and scalars that a launch does without are None. bool and fp8 tensors are bytes to a kernel. A tensor may be
    Triton's TensorDescriptor; each launch then takes another base, of the same shape and strides.
    Scalars, constexprs and grid (an int, or up to three) stay with the Launch. Every launch takes the non-None tensors
    again, of the same dtypes and with the same 16-byte alignment, and then the scalars whose indices are in `numbers`,
    of the same types. A float that 32 bits would round to 0 becomes its nearest neighbour.
    `device` is `tensor.get_device()`: an index, or -1 for CPU tensors under the interpreter. `options` are Triton's:
    `num_warps`, `num_ctas`, `maxnreg` and the like. `most_registers` is a `maxnreg` that is dropped if more than
    MOST_SPILLED bytes spill by it. `registers_of` are other constexprs: the kernel may take as many registers as it
    takes with those, even if values then spill. `plan` is the record that all this follows from, for `explain()`, which
    listens here.

        launch = prepare(_forward, n_rows, (x, y), (x.stride(0), n_cols), {"BLOCK_COLS": 1024}, device=0, num_warps=4)
        launch(x, y)

    The same kinds of arguments again compile and load nothing.
    """
    if registers_of is not None:
        like = prepare(
            kernel, grid, tensors, scalars, registers_of, device=device, most_registers=most_registers, **options
        )
        if _only_compiles.get():
            return like
        if like.resources is not None:
            options["maxnreg"] = granted(like.resources.n_regs)
        most_registers = None
    if most_registers is not None:
        given: dict[str, Any] = {"device": device, "numbers": numbers, **options}
        capped = prepare(kernel, grid, tensors, scalars, constexprs, maxnreg=most_registers, **given)
        if capped.resources is None or 4 * capped.resources.n_spills <= MOST_SPILLED:
            return capped
    tensors = [_as_bytes(each) if getattr(each, "dtype", None) in _BYTES else each for each in tensors]
    options["enable_fp_fusion"] = True  # Triton's default until 3.9, off from then on: set, so results stay
    key = key_of(kernel, device, tensors, scalars, constexprs, options)
    loaded = None if _only_compiles.get() else _loaded.get(key)
    if loaded is None:
        loaded = _load(kernel, _grid(grid), tensors, scalars, constexprs, device, options)
        if loaded.keeps:
            _loaded[key] = loaded
    there = tuple(each is not None for each in tensors)
    maps = {i: _Map(each) for i, each in enumerate(tensors) if hasattr(each, "block_shape")}
    return Launch(loaded, _grid(grid), tuple(scalars), tuple(numbers), there, maps)


def together(*functions: Callable[[], Any]) -> list[Any]:
    """Call functions that prepare launches, and return their results. While one compiles, so do the others, in threads.

    Triton releases Python's global lock in most of what takes long. A function may be called twice.
    """
    found, ahead = [], list(functions)
    token = _ahead.set(ahead)
    try:
        for each in functions:
            del ahead[:1]
            found.append(each())
    finally:
        _ahead.reset(token)
    return found


@contextmanager
def _compiling_ahead() -> Iterator[None]:
    """Compiles in threads what the same call will prepare next. The threads touch no GPU.

    An error in a thread is raised when its function is called again.
    """
    ahead = _ahead.get()
    if not ahead:
        yield
        return
    functions = [*ahead]
    ahead.clear()
    token = _only_compiles.set(True)
    contexts = [copy_context() for _ in functions]
    _only_compiles.reset(token)
    with ThreadPoolExecutor(len(functions)) as pool:
        with suppress(RuntimeError):  # when the interpreter ends, no thread starts
            for context, each in zip(contexts, functions, strict=True):
                pool.submit(context.run, each)
        yield


def key_of(kernel, device, tensors, scalars, constexprs, options) -> tuple:
    """All that Triton specialises a kernel on."""
    names = kernel.arg_names[len(tensors) : len(tensors) + len(scalars)]
    return (
        id(kernel),  # hashing a kernel hashes its source; what is loaded keeps it alive, so the id stays its own
        device,
        *[tensor is not None and _kind_of(tensor) for tensor in tensors],
        *_kinds(scalars, names, _unspecialised(kernel)),
        *constexprs.items(),
        *options.items(),
    )


def granted(n_regs: int) -> int:
    """Registers that a thread gets that asks for n_regs: they are granted in eights."""
    return -(-n_regs // 8) * 8


class Launch:
    """A loaded kernel with its grid and scalars: call it with the tensors, to run on their device's current stream."""

    # The launcher's own object in the slot of `__call__` is called with no Python method in between.
    __slots__ = ("__call__", "_given", "_loaded", "_maps", "_numbers", "_scalars")

    def __init__(self, loaded, grid, scalars, numbers, given, maps):
        self._loaded, self._scalars, self._numbers = loaded, scalars, numbers
        self._given, self._maps = given, maps
        self.__call__ = loaded.bind(grid, given, scalars, numbers, maps)

    def again(self, grid, changed: dict[int, int]) -> Callable[..., None] | None:
        """What launches the same kernel with another grid and other integers among the scalars, by index.

        None where Triton would compile another kernel for one of them.
        """
        loaded, first, scalars = self._loaded, len(self._given), list(self._scalars)
        for i, value in changed.items():
            if value == scalars[i]:
                continue
            fixed = loaded.fixed[first + i]
            if _kind(value, fixed) != _kind(scalars[i], fixed):
                return None
            scalars[i] = value
        return loaded.bind(_grid(grid), self._given, tuple(scalars), self._numbers, self._maps)

    @property
    def resources(self) -> "Resources | None":
        """What the kernel takes of the chip; None where nothing was compiled (the interpreter)."""
        compiled = self._loaded.compiled
        return None if compiled is None else Resources(compiled.n_regs, compiled.n_spills, compiled.metadata.shared)


class Resources(NamedTuple):
    n_regs: int  # of a thread
    n_spills: int  # of a thread, in 32-bit words
    shared: int  # of a program, in bytes


class Loaded:
    """A kernel, compiled and loaded if it could be, and the ways to launch it."""

    def __init__(self, kernel, compiled, constexprs, device, options, direct, keeps):
        self.kernel, self.compiled, self.constexprs = kernel, compiled, constexprs
        self.device, self.options, self.keeps = device, options, keeps
        self.fixed = [name in _unspecialised(kernel) for name in kernel.arg_names]
        self._direct = direct

    def bind(self, *how):
        """What launches it. how: the grid, which tensors there are, the scalars, which are numbers, and maps."""
        if self._direct is None:
            return partial(self._public, how)
        return self._direct.bind(*how, partial(self._elsewhere, how))

    def _elsewhere(self, how, *arguments):
        current_device = self._direct.current_device
        if current_device is None or current_device() == self.device:
            return self._public(how, *arguments)
        with torch.cuda.device(self.device):
            return self.bind(*how)(*arguments)

    def _public(self, how, *arguments):
        grid, given, scalars, numbers, maps = how
        rest = iter(arguments)
        tensors = [_as_bytes(next(rest)) if there else None for there in given]
        for i, each in maps.items():
            tensors[i] = each.of(tensors[i])
        now = list(scalars)
        for i, value in zip(numbers, rest, strict=True):
            if type(now[i]) is int:
                now[i] = value
            else:
                now[i] = math.copysign(_LEAST, value) if 0 < abs(value) < _LEAST else float(value)
        with torch.cuda.device(self.device) if self.device >= 0 else nullcontext():
            self.kernel[grid](*tensors, *now, **self.constexprs, **self.options)


class _Direct:
    """How the driver launches a compiled kernel: what `launcher.c` wants to know of it."""

    def __init__(self, bound, compiled, kernel, device, hooks):
        driver = triton.runtime.driver.active
        self._bound, self._device, self._function = bound, device, compiled.function
        num_warps, _, self._shared = compiled.packed_metadata
        self._block = 32 * num_warps
        self._follows = compiled.metadata.launch_pdl
        types = [compiled.src.signature[name] for name in kernel.arg_names]
        self._leaves = _leaves if any(isinstance(kind, tuple) for kind in types) else tuple
        self._places = {}  # of the kernel's own parameters among all arguments; the others are compiled in
        kinds = ""
        for i, kind in enumerate(_leaves(types)):
            if kind != "constexpr":
                self._places[i] = len(kinds)
                kinds += "p" if kind[0] == "*" else _kinds_of_map(kind) if _is_map(kind) else _KINDS[kind]
        self._kinds = kinds
        self._tiled = getattr(compiled.metadata, "tensordesc_meta", ())  # a dict for each map, in their order
        self._laid_out = {}  # by the tensors and numbers that a call supplies
        self.current_device = None
        if torch.cuda.device_count() != 1:  # one device alone is always the current one
            self.current_device = driver.get_current_device
            if self.current_device is torch.cuda.current_device:
                # The same less a check that CUDA is up, which a tensor on it proves.
                self.current_device = torch._C._cuda_getDevice
        enter, leave = hooks
        self._asked = (
            driver.get_current_stream, device, self.current_device,
            (knobs.runtime, enter, leave, enter.calls, leave.calls),
        )  # fmt: skip

    def bind(self, grid, given, scalars, numbers, maps, elsewhere):
        laid_out = self._laid_out.get((given, numbers))
        if laid_out is None:
            places = [len(_leaves(scalars[:i])) for i in numbers]
            at = [i for i, there in enumerate(given) if there] + [len(given) + i for i in places]
            kept = [i - len(given) for i in self._places if i >= len(given)]
            tensors = tuple(i for i in self._places if i < len(given))
            laid_out = tensors, itemgetter(*kept, 0, 0), tuple(self._places[i] for i in at)
            self._laid_out[given, numbers] = laid_out
        tensors, kept_of, supplied = laid_out
        values = (None,) * len(tensors)
        if maps:
            tiled: Any = dict(zip(maps, self._tiled, strict=True))
            values = tuple(_leaves(maps[i].arguments(tiled[i]) if i in maps else None for i in tensors))
        if scalars:
            values = (*values, *kept_of(self._leaves(scalars))[:-2])
        return self._bound(
            self._function, grid, self._block, self._shared, self._follows, self._kinds, values, supplied,
            *self._asked, elsewhere,
        )  # fmt: skip


def _load(kernel, grid, tensors, scalars, constexprs, device, options) -> Loaded:
    compiled, direct, keeps = None, None, True
    if isinstance(kernel, triton.JITFunction) and _only_compiles.get():
        keeps = False
        with torch.cuda.device(device):
            kernel.warmup(*tensors, *scalars, grid=grid, **constexprs, **options)
    elif isinstance(kernel, triton.JITFunction):
        begin()
        if _hash.is_alive():
            _hash.join()
        # One thread at a time: another would meet Triton's kernel with its launcher set and its function still missing.
        with _one_at_a_time(kernel.__name__), torch.cuda.device(device), _compiling_ahead():
            compiled = kernel.warmup(*tensors, *scalars, grid=grid, **constexprs, **options)
            if isinstance(compiled, triton.compiler.CompiledKernel):
                compiled.run  # noqa: B018  loads the kernel on the device, so that no launch has to
                direct = _direct(kernel, compiled, device)
            else:  # a compile hook took it, or it is in a queue
                compiled, keeps = None, False
    return Loaded(kernel, compiled, dict(constexprs), device, dict(options), direct, keeps)


@contextmanager
def _one_at_a_time(name: str) -> Iterator[None]:
    with _loading, compiling(name), wherever_it_lies(), _launchers_later():
        yield


@cache
def _version() -> str:
    return ".".join(triton.__version__.split(".")[:2])


@contextmanager
def _launchers_later() -> Iterator[None]:
    """Lets Triton 3.6 compile the C of a kernel's launcher when that is first called. The direct way never calls it.

    It takes gcc a quarter of a second a kernel.
    """
    driver = triton.runtime.driver.active
    if _version() != "3.6" or driver.get_current_target().backend != "cuda":
        yield
        return
    kind = driver.launcher_cls
    driver.launcher_cls = lambda src, metadata: _LauncherLater(kind, src, metadata)
    try:
        yield
    finally:
        driver.launcher_cls = kind


class _LauncherLater:
    """Triton's launcher of a kernel, made at its first call."""

    def __init__(self, kind, src, metadata):
        self._of = kind, src, metadata
        self.global_scratch_size = metadata.global_scratch_size
        self.profile_scratch_size = metadata.profile_scratch_size
        self.__signature__ = inspect.signature(kind.__call__.__get__(self))

    @cached_property
    def _made(self):
        kind, *given = self._of
        return kind(*given)

    def __call__(self, *arguments):
        return self._made(*arguments)


def _direct(kernel, compiled, device) -> _Direct | None:
    """The direct way to a loaded kernel, or None where only the public way is known to work."""
    hooks: list[Any] = [getattr(knobs.runtime, name, None) for name in ("launch_enter_hook", "launch_exit_hook")]
    launcher, metadata = compiled.run, compiled.metadata
    kinds = _leaves(compiled.src.signature.values())
    scratch = [getattr(launcher, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    if (
        _PUBLIC_ONLY
        or _version() not in _TESTED_TRITONS
        or metadata.target.backend != "cuda"
        or getattr(metadata, "instrumentation_mode", "")  # a profiler or sanitizer adds arguments of its own
        or scratch != [0, 0]
        or metadata.launch_cooperative_grid
        or metadata.num_ctas != 1
        or len(compiled.packed_metadata) != 3
        or not all(isinstance(getattr(hook, "calls", None), list) for hook in hooks)
        or list(inspect.signature(launcher).parameters)[:5] != ["gridX", "gridY", "gridZ", "stream", "function"]
        or any(kind[0] != "*" and not _is_map(kind) and kind not in _KINDS for kind in kinds if kind != "constexpr")
        or (any(map(_is_map, kinds)) and not getattr(metadata, "tensordesc_meta", None))
    ):
        return None
    native = build("launcher", ("dl",))
    return None if native is None else _Direct(native.Bound, compiled, kernel, device, hooks)


class _Map:
    """A TensorDescriptor without its base."""

    def __init__(self, descriptor):
        self._kind, self._block, self._layout = type(descriptor), descriptor.block_shape, descriptor.layout
        self._shape, self._strides = tuple(descriptor.shape), tuple(descriptor.strides)
        address = descriptor.base.data_ptr()  # any that is aligned: each launch replaces it
        self._base = SimpleNamespace(dtype=descriptor.base.dtype, data_ptr=lambda: address)

    def of(self, base):
        return self._kind(base, list(self._shape), list(self._strides), self._block, self._layout)

    def arguments(self, tiled):
        """Of the driver: Triton's object, and sizes and strides after it. tiled: what the kernel says of it."""
        from triton.backends.nvidia.driver import make_tensordesc_arg

        more = [None] * (len(inspect.signature(make_tensordesc_arg).parameters) - 2)
        return tuple(make_tensordesc_arg(self.of(self._base), tiled, *more))


def _is_map(value) -> bool:
    """Of a tensor, or of its type's name."""
    return value.startswith("tensordesc") if isinstance(value, str) else hasattr(value, "block_shape")


def _kinds_of_map(kind: str) -> str:
    n_dims = kind[kind.index("[") + 1 : kind.index("]")].count(",") + 1
    return "t" + "i" * 2 * n_dims


def _kind_of(tensor):
    """All of a tensor that Triton may compile in."""
    if _is_map(tensor):
        return tensor.base.dtype, tuple(tensor.block_shape), repr(tensor.layout)
    return tensor.dtype, tensor.data_ptr() % 16 == 0


def _leaves(values):
    """Values, with the elements of each tuple in its place, as they stand among the arguments of a kernel."""
    return [leaf for value in values for leaf in (value if isinstance(value, tuple) else (value,))]


def _as_bytes(tensor):
    """A tensor of 8 bits as the bytes that kernels read."""
    dtype = getattr(tensor, "dtype", None)
    return tensor.view(torch.uint8) if dtype in _BYTES else tensor


@cache
def _unspecialised(kernel) -> frozenset[str]:
    """The parameters of which Triton compiles in nothing but their width."""
    params = getattr(kernel, "params", ())
    return frozenset(param.name for param in params if param.do_not_specialize)


def _grid(grid) -> tuple[int, int, int]:
    sizes = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]
    if sizes[0] * sizes[1] * sizes[2] >= 2**31:
        raise ValueError(f"a grid of {sizes} has 2**31 programs or more; Triton's launcher would drop it silently")
    return sizes


def _kinds(scalars, names, fixed):
    """`_kind` of each scalar by name."""
    kinds = []
    for scalar, name in zip(scalars, names, strict=True):
        kind = type(scalar)
        kinds.append(_kind(scalar, name in fixed) if kind is int or kind is tuple else kind)
    return kinds


def _kind(scalar, fixed=False):
    """All of a scalar that Triton may compile in: its type, and the width of an int.

    Unless the int is fixed, also whether it is 1, and whether 16 divides it.
    """
    if type(scalar) is tuple:  # whose elements no parameter fixes
        return tuple(_kind(each) for each in scalar)
    if type(scalar) is not int:
        return type(scalar)
    width = -(2**31) <= scalar < 2**31, scalar < 2**63
    return width if fixed else (scalar == 1, scalar % 16 == 0, *width)
