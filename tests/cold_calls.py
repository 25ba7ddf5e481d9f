"""A process of first calls as `bench cold` starts them, over a driver that does nothing: `python cold_calls.py NAME`.

Its kernels are compiled for an H100, at small shapes, and none is launched.
"""

import sys
from dataclasses import replace

import torch

SHAPES = {"softmax_trained": [(64, 32000)], "softmax_batches_bf16": [(1, 32000), (64, 32000), (1, 32000)]}


def main(name):
    import stub_driver

    stub_driver.activate()
    from warm_calls import NeverLaunched

    import fused_softmax.nn  # noqa: F401  what stand-ins go into
    from fused_softmax.bench.entries.first_calls import CALLS
    from fused_softmax.bench.entries.operations import operation_of
    from fused_softmax.bench.measure import first_call
    from fused_softmax.core import launch
    from fused_softmax.core.elsewhere import like, stand_in_for
    from fused_softmax.core.plan import H100

    calls = CALLS[name]
    calls = replace(calls, cases=[replace(calls.cases[0], shape=shape) for shape in SHAPES[name]])
    stand_in_for(H100)
    launch.Launch = NeverLaunched

    def inputs(case):
        made = operation_of(case).inputs(case, torch.Generator())
        return tuple(like(each.shape, each.stride(), each.dtype) for each in made)

    first_call.tell(first_call.timed(name, calls, inputs, lambda: None))


if __name__ == "__main__":
    main(sys.argv[1])
