"""Kernels that are compiled before the first call needs them, in processes of their own, with or without the GPU.

`warm/work.py` does the work: it runs the host path of each call on tensors without memory, as planned for the card,
and compiles what that would launch, through Triton, into Triton's own cache. A process that makes these calls later
compiles nothing.
"""

import contextlib
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_softmax.core.described import described
from fused_softmax.core.device import device_of
from fused_softmax.core.plan import H100, H200, Device

DEVICES = {"h100": H100, "h200": H200}
MOST_PROCESSES = 16


class Warmed(NamedTuple):
    """What a `warmup` did."""

    kernels: int  # that the calls take
    compiled: int  # of these, what the cache did not have
    seconds: float  # on the clock


class Kernel(NamedTuple):
    """A kernel that is in the cache now. seconds: until it was there. found: whether it was there before."""

    name: str
    seconds: float
    found: bool


def warmup(
    calls: Iterable[Callable[[], Any]], *, device: str | None = None, processes: int | None = None,
    folder: "str | os.PathLike[str] | None" = None,
) -> Warmed:  # fmt: skip
    """Compile what calls will launch, in parallel processes, into Triton's cache; nothing is launched.

    calls: functions without arguments that can be pickled, such as functools.partial of a public function. Tensors
        among the arguments say shapes, strides, dtypes, alignment and whether a gradient is wanted; their values count
        for nothing, so they may be on the device "meta". If the first tensor that a call returns requires a gradient,
        its backward pass is compiled too. Modes, such as autocast, are not known to the processes: give a call that
        opens them itself.
    device: the card that the kernels are for, "h100" or "h200"; this machine's GPU 0 if None. Plans follow the card's
        facts, so no GPU need be here.
    processes: how many compile at a time; the cores of this machine if None, and at most 16.
    folder: Triton's cache; TRITON_CACHE_DIR, or Triton's default, if None. A container may ship it. It is of use on
        machines with the same versions of Python, Triton, CUDA's assembler and this package.

    Where cuDNN would take a pass of attention, this package's kernels may be compiled for it too, which does no harm.

    Returns how many kernels the calls take, how many of them were compiled, and the seconds that this took.
    Raises ValueError for an unknown device, for a call that cannot be pickled, and for one that raises, which is named
    by its number; OSError for a folder that cannot be written; RuntimeError without a GPU where device is None, under
    the interpreter, and where a kernel does not compile.

    >>> from functools import partial
    >>> logits = torch.empty(8192, 128256, dtype=torch.bfloat16, device="meta", requires_grad=True)
    >>> target = torch.empty(8192, dtype=torch.int64, device="meta")
    >>> warmup([partial(cross_entropy, logits, target)], device="h100")
    Warmed(kernels=4, compiled=4, seconds=17.2)
    """
    began = time.perf_counter()
    kernels = list(compiling(calls, device, processes, folder))
    return Warmed(len(kernels), sum(not each.found for each in kernels), round(time.perf_counter() - began, 1))


def compiling(
    calls: Iterable[Callable[[], Any]], device: str | None = None, processes: int | None = None,
    folder: "str | os.PathLike[str] | None" = None, failed: Callable[[int, str], object] | None = None,
) -> Iterator[Kernel]:  # fmt: skip
    """As `warmup`, but yields each kernel when it is ready.

    failed: gets the index and the error of each call that raises, and the others go on."""
    if os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1" or os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError(
            "warmup: kernels are interpreted in this process, so none would be compiled; "
            "unset FUSED_SOFTMAX_INTERPRET and TRITON_INTERPRET"
        )
    if processes is not None and (type(processes) is not int or processes < 1):
        raise ValueError(f"warmup: processes must be a positive int, got {described(processes)}")
    processes = processes or min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
    given = pickle.dumps((_pickled(list(calls)), _card(device), processes, failed is not None, sys.path))
    environment = dict(os.environ)
    if folder is not None:
        _require_writable(Path(folder))
        environment["TRITON_CACHE_DIR"] = os.fspath(folder)
    command = [sys.executable, "-m", "fused_softmax.warm.work"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as work:
        try:
            assert work.stdin is not None
            assert work.stdout is not None
            with contextlib.suppress(BrokenPipeError), work.stdin:  # it has ended, and says why
                work.stdin.write(given)
            for line in work.stdout:
                told = json.loads(line)
                if "error" in told:
                    if failed is None:
                        raise ValueError(f"warmup: call {told['call']}: {told['error']}")
                    failed(told["call"], told["error"])
                    continue
                if "failed" in told:
                    raise RuntimeError(f"warmup: {told['failed']}")
                yield Kernel(told["kernel"], told["seconds"], told["found"])
        except BaseException:  # Ctrl-C reaches this process alone, and nothing is to work on
            with contextlib.suppress(ProcessLookupError):
                os.killpg(work.pid, signal.SIGKILL)
            raise
        if code := work.wait():
            how = f"ended with exit code {code}; its error is above" if code > 0 else f"was ended by signal {-code}"
            raise RuntimeError(f"warmup: the process that compiles {how}")


def _card(name: str | None) -> Device:
    if name is not None:
        found = DEVICES.get(name) if isinstance(name, str) else None
        if found is None:
            raise ValueError(f"warmup: device must be one of {', '.join(DEVICES)}, got {described(name)}")
        return found
    if not torch.cuda.is_available():
        raise RuntimeError(f"warmup: there is no GPU here; name one by device=: {', '.join(DEVICES)}")
    return device_of(0)


class _Pickler(pickle.Pickler):
    """Tensors by what a plan sees of them, in place of their values."""

    def reducer_override(self, each: Any) -> Any:
        if not isinstance(each, Tensor):
            return NotImplemented
        from fused_softmax.core.elsewhere import like

        if each.layout != torch.strided:
            raise pickle.PicklingError(f"a tensor of {each.layout} has no stand-in")
        offset, rest = divmod(0 if each.is_meta else each.data_ptr() % 16, each.element_size())
        if rest:
            raise pickle.PicklingError("a tensor that begins within an element has no stand-in")
        return like, (tuple(each.shape), each.stride(), each.dtype, each.requires_grad, offset)


def standing_in(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call as `warm/work.py` makes it, whose tensors are stand-ins."""
    return pickle.loads(_pickled([call])[0])


def _pickled(calls: list[Callable[[], Any]]) -> list[bytes]:
    found = []
    for i, call in enumerate(calls):
        if not callable(call):
            raise ValueError(f"warmup: call {i} must be callable without arguments, got {type(call).__name__}")
        written = io.BytesIO()
        try:
            _Pickler(written).dump(call)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(f"warmup: call {i} cannot go to another process: {error}") from None
        if b"__main__" in written.getvalue():
            raise ValueError(
                f"warmup: call {i} needs what __main__ defines, which other processes cannot import; "
                "move it into a module"
            )
        found.append(written.getvalue())
    return found


def _require_writable(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"warmup: folder {folder} cannot be written to")
