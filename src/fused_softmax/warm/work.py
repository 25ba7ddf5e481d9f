"""The process in which `warmup` plans its calls and compiles their kernels: `python -m fused_softmax.warm.work`.

It reads a pickle of (calls, each a pickle, device, processes, whether calls that raise are left out, sys.path). For
each kernel it prints a line of JSON: the kernel's name, the seconds that it took, and whether Triton's cache had it. If
something goes wrong, it prints a line about that. It changes its own modules, and ends.
"""

import contextlib
import importlib
import json
import logging
import multiprocessing
import pickle
import re
import sys
import tempfile
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from fused_softmax.core import launch
from fused_softmax.core.cached import wherever_it_lies
from fused_softmax.core.elsewhere import Job, noting_public_launches, run, stand_in_for
from fused_softmax.core.native import build
from fused_softmax.core.plan import Device
from fused_softmax.profile.binary import Compiled

_jobs: list[Job] = []  # forked processes have it too


def main() -> int:
    # The caller's sys.path, because the modules of the calls may be there alone.
    calls, device, processes, leaves_out, sys.path[:] = pickle.load(sys.stdin.buffer)
    importlib.import_module("fused_softmax.nn")  # all of the package, before stand-ins take their places
    prepare, found = launch.prepare, list[Job]()
    stand_in_for(device, found)
    for i, call in enumerate(calls):
        try:
            with noting_public_launches(found):
                run(pickle.loads(call))
        except Exception as error:
            print(json.dumps({"call": i, "error": f"{type(error).__name__}: {error}"}), flush=True)
            if not leaves_out:
                return 1
    setattr(launch, "prepare", prepare)  # noqa: B010
    _jobs.extend({key_of(each): each for each in found}.values())
    try:
        _share(device)
        with multiprocessing.get_context("fork").Pool(min(processes, max(len(_jobs), 1)), _begin, (device,)) as pool:
            for done in pool.imap_unordered(_compile, range(len(_jobs))):
                for each in done:
                    print(json.dumps(each), flush=True)
    except Exception as error:  # of a kernel, or of the cache's folder
        print(json.dumps({"failed": f"{type(error).__name__}: {error}"}), flush=True)
        return 1
    return 0


def key_of(job: Job) -> tuple:
    options = {name: tuple(each.items()) if isinstance(each, dict) else each for name, each in job.options.items()}
    return launch.key_of(job.kernel, 0, job.tensors, job.scalars, job.constexprs, options)


class _Nowhere:
    """Triton's driver of a GPU that is not here: Triton compiles for it."""

    def __init__(self, device: Device) -> None:
        major, minor = device.capability
        self.target = GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _begin(device: Device) -> None:
    triton.runtime.driver.set_active(_Nowhere(device))
    setattr(launch, "_load", _compiled)  # noqa: B010


def _compiled(kernel, grid, tensors, scalars, constexprs, device, options) -> Any:
    """`launch._load` without what needs the GPU. Facts about registers are read from the binary."""
    with wherever_it_lies():
        made = kernel.warmup(*tensors, *scalars, grid=grid, **constexprs, **options)
    of = Compiled(made)
    resources = SimpleNamespace(n_regs=of.registers, n_spills=of.stack_bytes // 4, metadata=made.metadata)
    return launch.Loaded(kernel, resources, dict(constexprs), device, dict(options), None, True)


def _compile(i: int) -> list[dict[str, Any]]:
    """What Triton was asked to compile for one launch."""
    job, told = _jobs[i], []

    def listener(*, src, metadata, metadata_group, times, cache_hit) -> None:
        told.append({"kernel": src.name, "seconds": round(time.perf_counter() - began, 3), "found": cache_hit})

    knobs.compilation.listener = listener
    began = time.perf_counter()
    if job.public:
        job.kernel.warmup(*job.tensors, *job.scalars, grid=job.grid, **job.options)
    else:
        launch.prepare(job.kernel, job.grid, job.tensors, job.scalars, job.constexprs, device=0, **job.options)
    return told


def _share(device: Device) -> None:
    """Build the C that all launches share, Triton's and this package's, into the same cache."""
    with warnings.catch_warnings(action="ignore"):  # without a driver the first cannot be loaded, once it is built
        logging.disable()
        build("launcher", ("dl",))
        build("lookup")
        if device.backend == "cuda":
            _build_tritons()


def _build_tritons() -> None:
    """Triton's calls of the driver. They link to a driver. Where there is none, an empty one stands in."""
    from triton.backends.nvidia import driver
    from triton.runtime.build import _build

    with tempfile.TemporaryDirectory() as folder:
        try:
            driver.libcuda_dirs()
        except (AssertionError, OSError):
            calls = Path(driver.__file__).with_name("driver.c").read_text(encoding="utf-8")
            names = set(re.findall(r"\bcu[A-Z]\w*(?=\()", calls))
            source = Path(folder, "nothing.c")  # without a driver's functions, linkers would leave it out as not needed
            source.write_text("".join(f"void {name}(void) {{}}\n" for name in sorted(names)), encoding="utf-8")
            Path(_build("nothing", str(source), folder, [], [], [], [])).rename(Path(folder, "libcuda.so.1"))
            knobs.nvidia.libcuda_path = folder
            driver.libcuda_dirs.cache_clear()
            driver.library_dirs.cache_clear()
        with contextlib.suppress(Exception):  # it is in the cache before it is loaded, which needs a true driver
            driver.CudaUtils()


if __name__ == "__main__":
    sys.exit(main())
