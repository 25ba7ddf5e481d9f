"""Calls that are compiled ahead, and a process that then makes them over a driver that does nothing.

`python tests/warm_calls.py` prints how many kernels Triton was asked for, and how many it compiled. With arguments of
`fused-softmax bench`, it makes the calls of that measurement instead.
"""

import sys
from functools import partial

import torch

import fused_softmax
from fused_softmax.core import launch
from fused_softmax.profile.binary import Compiled

BF16, FP32, INT64 = torch.bfloat16, torch.float32, torch.int64


def made(*shape, dtype=BF16, grad=False):
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)


def qkv(*shape, grad=False):
    return [made(*shape, grad=grad) for _ in range(3)]


def calls():
    logits, target = made(512, 32000, grad=True), made(512, dtype=INT64)
    rows = torch.empty(8, 1001, dtype=FP32)[:, 1:]  # off 16 bytes, with memory
    seeds = made(4, dtype=INT64)
    return {
        "softmax": partial(fused_softmax.softmax, logits, 1),
        "unaligned": partial(fused_softmax.softmax, rows, 1),
        "cross_entropy": partial(fused_softmax.cross_entropy, logits, target),
        # Statistics stand beside the loss, and refuse a backward pass.
        "statistics": partial(fused_softmax.cross_entropy, logits, target, return_token_stats=True),
        "top-k": partial(fused_softmax.sample, made(4, 32000), top_k=9, seed=seeds, position=seeds),
        "attention": partial(fused_softmax.attention, *qkv(1, 2, 512, 64), is_causal=True),
        # Takes no more registers than without a mask.
        "mask": partial(fused_softmax.attention, *qkv(1, 2, 512, 64), made(512, 512, dtype=torch.bool)),
        "decode": partial(fused_softmax.attention, made(8, 8, 1, 64), *qkv(8, 2, 3000, 64)[1:], enable_gqa=True),
    }


class NeverLaunched(launch.Launch):
    """A kernel that is loaded as ever, and never launched: the driver that does nothing knows no maps of tensors."""

    def __init__(self, loaded, *_):
        self._loaded, self.__call__ = loaded, lambda *arguments: None

    @property
    def resources(self):
        """As a true driver tells them."""
        of = Compiled(self._loaded.compiled)
        return launch.Resources(of.registers, of.stack_bytes // 4, of.shared_bytes)

    def again(self, *_):
        return self


def calls_of_bench(arguments):
    """What a measurement calls on a GPU: this package's providers and the ceilings."""
    from fused_softmax.bench.commands.sweep import asked
    from fused_softmax.bench.entries import sampling
    from fused_softmax.bench.entries.operations import operation_of
    from fused_softmax.bench.measure import check
    from fused_softmax.core.elsewhere import like

    def without_memory(tensors):
        return [like(each.shape, each.stride(), each.dtype) for each in tensors]

    for case in asked(arguments, "x.json").chosen:
        operation = operation_of(case)
        (inputs,) = map(without_memory, check.inputs(case, 1, "cpu", 0))
        yield partial(operation.own(case), *inputs)
        if operation.draws:
            row = torch.zeros(256, dtype=inputs[0].dtype)
            yield partial(operation.own(case), *without_memory(sampling.draws_of(row, 100_000)))
        for each in operation.ceilings(case):
            yield partial(each, *inputs)


def main(arguments):
    import stub_driver

    stub_driver.activate()
    from triton import knobs

    from fused_softmax.ahead import standing_in
    from fused_softmax.core.elsewhere import run, stand_in_for
    from fused_softmax.core.plan import H100

    # Which imports what stand-ins go into.
    told, given = [], [*calls_of_bench(arguments)] if arguments else [standing_in(each) for each in calls().values()]
    knobs.compilation.listener = lambda **of: told.append((of["src"].name, of["cache_hit"]))
    stand_in_for(H100)
    launch.Launch = NeverLaunched
    for each in given:
        run(each)
    print(len(told), sum(not found for _, found in told), sorted({name for name, found in told if not found}))


if __name__ == "__main__":
    main(sys.argv[1:])
