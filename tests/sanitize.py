"""Kernels under compute-sanitizer: accesses out of bounds (memcheck), races in shared memory (racecheck).

Every strategy of softmax, and every other family of kernels (`sanitize_calls.py`).

    python tests/sanitize.py                     # both tools, on a machine with a GPU and the CUDA toolkit
    python tests/sanitize.py --tool racecheck    # one of them
    python tests/sanitize.py --launch            # what runs under a tool: the launches, compared with float64

What memcheck sees ends with a tensor, so each is an allocation of its own that ends where its last row does.
"""

import argparse
import os
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import sanitize_calls
import torch
from conftest import peaked
from contract import assert_softmax

from fused_softmax.core.device import device_of
from fused_softmax.core.plan import candidate
from fused_softmax.core.route import INTERPRET
from fused_softmax.ops.softmax.launches import prepare_forward

# memcheck: no complaint of what torch asks the driver in vain, and room after each allocation for what misses it.
# racecheck: without kernels whose warps have different tasks, for it does not know the barriers that start these.
TOOLS = {
    "memcheck": ["--report-api-errors", "no", "--padding", "4096"],
    "racecheck": ["--kernel-name-exclude", "kernel_substring=_hopper"],
}

# strategy: (rows, columns, choices). Several warps a program, for one has no shared memory to race for; rows left over
# in the last tile, a last piece that is masked, and several parts a row.
SHAPES = {
    "tile": (19, 376, {"num_warps": 4, "block_rows": 8, "prefetch": 1}),
    "row": (5, 8120, {"num_warps": 8, "prefetch": 2}),
    "split": (3, 16304, {"num_warps": 4, "part_cols": 4096, "copies": 2, "poll_last_first": True, "prefetch": 2}),
    "stream": (3, 17000, {"num_warps": 4}),
}
ALIGNMENTS = ("even", "shifted")
DTYPES = (torch.float32, torch.bfloat16)


def launch(strategy, alignment, dtype, device):
    """One plan, run twice: the programs of a row exchange other tags the second time."""
    n_rows, n_cols, choices = SHAPES[strategy]
    phase = 3 if alignment == "shifted" else 0
    n_cols -= phase
    x = peaked(n_rows, n_cols, dtype)
    source, target = (torch.full((phase + x.numel(),), float("nan"), dtype=dtype) for _ in range(2))
    source[phase:] = x.flatten()
    source, target = (each.to(device)[phase:].view(n_rows, n_cols) for each in (source, target))
    gpu = device_of(source.get_device())
    plan = candidate(strategy, n_rows, n_cols, dtype.itemsize, gpu, alignment=alignment, **choices)
    assert (plan.strategy, plan.alignment) == (strategy, alignment)
    assert (plan.parts > 1) == (strategy in ("split", "stream"))
    run = prepare_forward(source, target, plan)
    for _ in range(2):
        run(source, target)
        assert_softmax(target.cpu(), x)  # on the CPU, so that no kernel but ours is in the tool's way


def launch_all(only):
    for strategy, alignment, dtype in product([each for each in SHAPES if each in only], ALIGNMENTS, DTYPES):
        launch(strategy, alignment, dtype, "cpu" if INTERPRET else "cuda")
        print(f"{strategy}, {alignment}, {dtype}: right", flush=True)
    for name, dtype in product([each for each in sanitize_calls.NAMES if each in only], DTYPES):
        sanitize_calls.call(name, dtype, "cpu" if INTERPRET else "cuda")
        print(f"{name}, {dtype}: right", flush=True)


def sanitizer():
    """Where compute-sanitizer is: on PATH, or with the CUDA toolkit."""
    toolkits = filter(None, [os.environ.get("CUDA_HOME"), "/usr/local/cuda"])
    folders = [os.environ.get("PATH"), *[str(Path(toolkit, "bin")) for toolkit in toolkits]]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(filter(None, folders)))


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="sanitize", description=__doc__.partition("\n")[0])
    parser.add_argument("--tool", choices=TOOLS, action="append", help="one tool, or several; both if not given")
    parser.add_argument("--launch", action="store_true", help="only launch the kernels, and compare what they give")
    names = [*SHAPES, *sanitize_calls.NAMES]
    parser.add_argument("--only", choices=names, action="append", metavar="NAME", help="one call, or several")
    options = parser.parse_args(arguments)
    only = options.only or names
    if options.launch:
        return launch_all(only)
    found = sanitizer()
    if found is None:
        sys.exit("sanitize: compute-sanitizer is neither on PATH nor in $CUDA_HOME/bin; the CUDA toolkit has it")
    if not torch.cuda.is_available() or torch.version.hip:
        sys.exit("sanitize: torch sees no NVIDIA GPU, and compute-sanitizer needs one")

    chosen = [f"--only={name}" for name in options.only or ()]
    command = [sys.executable, str(Path(__file__).resolve()), *chosen, "--launch"]
    environment = {k: v for k, v in os.environ.items() if k not in ("FUSED_SOFTMAX_INTERPRET", "TRITON_INTERPRET")}
    environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    print("sanitize: without a tool", flush=True)  # compiles the kernels, and blames no tool for a wrong result
    if subprocess.run(command, env=environment).returncode:
        sys.exit("sanitize: failed without a tool")
    for tool in options.tool or TOOLS:
        print(f"sanitize: {tool}", flush=True)
        # The compiler that a launch may start is not under test.
        around = [found, "--tool", tool, "--error-exitcode", "1", "--target-processes", "application-only"]
        if subprocess.run([*around, *TOOLS[tool], *command], env=environment).returncode:
            sys.exit(f"sanitize: {tool} failed: what it found is above")
    print("sanitize: nothing found")


if __name__ == "__main__":
    main()
