"""The process that a profiler wraps. It makes one call of one provider between the profiler's start and stop.

    python -m fused_softmax.profile.target softmax 4096x32768 bfloat16 torch [--proton FOLDER/NAME]

With --proton it profiles itself: twenty calls, with flushed caches, into NAME.hatchet.
"""

import argparse
import sys
from contextlib import nullcontext

import torch

from fused_softmax.bench.cases import Case, parse_dtype, parse_shapes
from fused_softmax.bench.entries.makers import Call
from fused_softmax.bench.measure.one import NoFigure, prepared

PROTON_CALLS = 20
SCOPE = "call"  # kernels outside it are not the call's


def parse_case(operation: str, shape: str, dtype: str) -> Case:
    (case,) = parse_shapes(shape)
    return Case(case.shape, parse_dtype(dtype), operation, case.dim)


def between_start_and_stop(call: Call, inputs: tuple[torch.Tensor, ...]) -> None:
    """Make only the call, for `ncu --profile-from-start off`."""
    runtime = torch.cuda.cudart()
    runtime.cudaProfilerStart()
    call(*inputs)
    torch.cuda.synchronize()
    runtime.cudaProfilerStop()


def under_proton(call: Call, inputs: tuple[torch.Tensor, ...], name: str) -> None:
    import triton.profiler as proton

    flush = torch.empty(4 * torch.cuda.get_device_properties(0).L2_cache_size, dtype=torch.uint8, device="cuda")
    session = proton.start(name)
    for _ in range(PROTON_CALLS):
        flush.zero_()
        with proton.scope(SCOPE) if session is not None else nullcontext():
            call(*inputs)
    torch.cuda.synchronize()
    proton.finalize()


def main() -> int:
    parser = argparse.ArgumentParser("python -m fused_softmax.profile.target")
    for name in ("operation", "shape", "dtype", "provider"):
        parser.add_argument(name)
    parser.add_argument("--proton", metavar="NAME")
    options = parser.parse_args()
    try:
        call, inputs = prepared(parse_case(options.operation, options.shape, options.dtype), options.provider)
        for _ in range(2):  # compiles, and fills caches of plans
            call(*inputs)
        torch.cuda.synchronize()
        if options.proton:
            under_proton(call, inputs, options.proton)
        else:
            between_start_and_stop(call, inputs)
    except NoFigure as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
