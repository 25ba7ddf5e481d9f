"""Triton's own CUDA launcher without a GPU: a libcuda whose calls do nothing, and a driver with two imaginary H200s.

The launch path of the host then runs for real, and the stub tells what reached the driver. Once active it is the
process's only driver, so tests over it run in a process of their own:

    subprocess.run([python, "-m", "pytest", "tests/over_stub_launch.py"], env=stub_driver.environment(tmp_path))
"""

import ctypes
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("stub_libcuda.c")


def environment(folder):
    """Build the stub in `folder` and return the environment of a process that finds it in place of a driver."""
    library = Path(folder, "libcuda.so.1")
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", library, SOURCE], check=True)
    return os.environ | {
        "TRITON_LIBCUDA_PATH": str(folder),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")])),
        "TRITON_CACHE_DIR": str(Path(folder, "triton")),
    }


class Recorded(NamedTuple):
    """What the driver was given to launch."""

    grid: tuple
    block: tuple
    stream: int
    context: int  # 1 for device 0, 2 for device 1
    function: int
    overlaps: bool  # whether it may begin before the launch before it has ended
    arguments: tuple  # 64 bits each, so a narrower one has noise above it


def activate():
    """Make the stub Triton's driver, and what `torch.cuda.device` selects; returns the `Stub` to ask."""
    import torch
    import triton
    from triton.backends.nvidia.driver import CudaDriver

    class Driver(CudaDriver):
        def __init__(self):
            super().__init__()
            self.get_device_capability = lambda device: (9, 0)
            self.get_current_stream = lambda device: 7000 + device
            self.get_current_device = lambda: stub.device

    class select:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            self.previous = stub.device
            stub.select(self.device)

        def __exit__(self, *error):
            stub.select(self.previous)

    stub = Stub(ctypes.CDLL("libcuda.so.1"))
    triton.runtime.driver.set_active(Driver())
    torch.cuda.device = select
    return stub


class Stub:
    def __init__(self, library):
        self.library = library
        self.device = 0

    @property
    def launches(self):
        return ctypes.c_long.in_dll(self.library, "stub_launches").value

    @property
    def modules(self):
        """How many compiled kernels were loaded."""
        return ctypes.c_long.in_dll(self.library, "stub_modules").value

    def select(self, device):
        self.device = device
        self.library.cuCtxSetCurrent(ctypes.c_void_p(device + 1))

    def record(self, launch, n_arguments=0):
        """Call `launch`, which has to launch exactly once, and return what the driver was given."""
        ctypes.c_int.in_dll(self.library, "stub_n_params").value = n_arguments
        before = self.launches
        launch()
        assert self.launches == before + 1
        ctypes.c_int.in_dll(self.library, "stub_n_params").value = 0
        return Recorded(
            tuple((ctypes.c_uint * 3).in_dll(self.library, "stub_grid")),
            tuple((ctypes.c_uint * 3).in_dll(self.library, "stub_block")),
            *[ctypes.c_uint64.in_dll(self.library, f"stub_{name}").value for name in ("stream", "context", "function")],
            bool(ctypes.c_int.in_dll(self.library, "stub_overlaps").value),
            tuple((ctypes.c_uint64 * n_arguments).in_dll(self.library, "stub_params")),
        )
