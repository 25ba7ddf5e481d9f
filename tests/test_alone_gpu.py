"""Split rows on a GPU that other kernels hold: the bits of a run alone, and soon."""

import time
from functools import partial
from itertools import cycle

import pytest
import torch
import triton
import triton.language as tl

from fused_softmax import cross_entropy, log_softmax, logsumexp, softmax
from fused_softmax.core.kernels.exchange import in_any_warp
from fused_softmax.core.kernels.spec import Spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(not hasattr(torch.cuda, "_compile_kernel"), reason="no compiler for the kernel that holds"),
]
FREE = 4  # multiprocessors
SOON = 0.1  # seconds

# Each block takes the shared memory of its multiprocessor, and its time: no program fits beside it.
HOLD = """
extern "C" __global__ void hold(long long nanoseconds, const volatile int *stop) {
    extern __shared__ char memory[];
    long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        __nanosleep(2000);
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds && *stop == 0);
    if (nanoseconds < 0) memory[threadIdx.x] = 0;
}
"""


@pytest.fixture
def held():
    """A function: hold all but FREE multiprocessors on another stream while another function runs."""
    kernel = torch.cuda._compile_kernel(HOLD, "hold")
    properties = torch.cuda.get_device_properties()
    size = properties.shared_memory_per_block_optin - 1024
    kernel.set_shared_memory_config(size)
    other, copies = torch.cuda.Stream(), torch.cuda.Stream()
    stop = torch.zeros(1, dtype=torch.int32, device="cuda")

    def run(function, seconds=4):
        """(result, how long it took)."""
        stop.zero_()
        torch.cuda.synchronize()
        kernel(
            (properties.multi_processor_count - FREE, 1, 1), (32, 1, 1), [seconds * 10**9, stop], shared_mem=size,
            stream=other,
        )  # fmt: skip
        time.sleep(0.01)
        start = time.monotonic()
        result = function()
        torch.cuda.current_stream().synchronize()
        took = time.monotonic() - start
        assert not other.query(), "the multiprocessors were free before it was done"
        with torch.cuda.stream(copies):
            stop.fill_(1)
        torch.cuda.synchronize()
        return result, took

    return run


def rows(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return 4 * torch.randn(*shape, dtype=dtype, device="cuda", generator=generator)


def gradient(function, x):
    def run():
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        return torch.autograd.grad(y, leaf, rows(*y.shape, dtype=y.dtype, seed=1) if y.ndim else None)[0]

    return run


def losses(shape, dtype=torch.bfloat16, **options):
    x, target = rows(*shape, dtype=dtype), torch.arange(shape[0], device="cuda") * 7
    inplace = {"inplace_backward": True} if options.pop("inplace", False) else {}

    def run():
        leaf = x.clone().requires_grad_()
        # What the gradient is written over is no leaf.
        logits = leaf * 1 if inplace else leaf
        loss = cross_entropy(logits, target, **options, **inplace)
        return loss.detach().clone(), torch.autograd.grad(loss, leaf)[0]

    return run


KINDS = {
    "one long row": lambda: partial(softmax, rows(1, 4 << 20)),
    "four long rows": lambda: partial(softmax, rows(4, 1 << 20)),
    "many long rows": lambda: partial(softmax, rows(512, 131072)),
    "odd rows": lambda: partial(softmax, rows(64, 100003)),
    "fp32": lambda: partial(log_softmax, rows(8, 262144, dtype=torch.float32)),
    "few rows": lambda: partial(softmax, rows(8, 32000)),
    "masked": lambda: partial(softmax, rows(8, 262144), mask=rows(1, 262144, seed=2) > 0, scale=0.5),
    "temperature 0": lambda: partial(softmax, rows(8, 262144), scale=0.0),
    "logsumexp": lambda: partial(logsumexp, rows(8, 1 << 20), -1),
    "gradient": lambda: gradient(softmax, rows(8, 262144)),
    "gradient of log_softmax": lambda: gradient(log_softmax, rows(8, 131072)),
    "losses": lambda: losses((64, 128256)),
    "losses in place": lambda: losses((64, 128256), inplace=True),
    "smoothed losses in place": lambda: losses((64, 128256), inplace=True, label_smoothing=0.1),
    "strided dim": lambda: partial(softmax, rows(64, 4096, 512), 1),
    "gradient over a strided dim": lambda: gradient(partial(softmax, dim=1), rows(16, 4096, 512)),
    "logsumexp over a strided dim": lambda: partial(logsumexp, rows(1, 65536, 64), 1),
}


def same_bits(a, b):
    return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def alike(a, b):
    a, b = (each if isinstance(each, tuple) else (each,) for each in (a, b))
    return all(same_bits(one, other) for one, other in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_with_most_multiprocessors_held_a_row_has_the_bits_of_a_run_alone(kind, held):
    run = KINDS[kind]()
    alone = run()
    torch.cuda.synchronize()
    result, took = held(run)
    assert alike(result, alone)
    assert took < SOON + (0.4 if kind in ("many long rows", "strided dim") else 0)  # 128 MiB by 4 multiprocessors


@triton.jit
def _lacks(told_ptr, lacking, K: tl.constexpr):
    """What each of 128 threads is told where one warp, or none, lacks a message."""
    warp = tl.inline_asm_elementwise(
        "{ mov.u32 $0, %tid.x; shr.u32 $0, $0, 5; add.s32 $0, $0, $1; }", "=r,r", [lacking * 0], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
    told = in_any_warp((warp == lacking).to(tl.int32), K)
    tl.store(told_ptr + tl.arange(0, 128), tl.zeros([128], tl.int32) + told)


@pytest.mark.parametrize("lacking", [0, 2, 3, 4])
def test_what_one_warp_lacks_all_know(lacking):
    """Warps poll by themselves. One that goes on alone would wait at barriers for those that have what it lacks."""
    told = torch.full((128,), -1, dtype=torch.int32, device="cuda")
    spec = Spec(block_cols=1, pieces=1, vector=1, cast_dtype=tl.float32, ptx=torch.version.hip is None)
    _lacks[(1,)](told, lacking, K=spec, num_warps=4)
    assert told.tolist() == [int(lacking < 4)] * 128


def test_six_streams_of_the_longest_rows():
    inputs = [rows(1, 4 << 20, seed=i) for i in range(6)]
    wanted = [softmax(x) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    wrong = torch.zeros(6, dtype=torch.int64, device="cuda")
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                wrong[i] += (softmax(inputs[i]).view(torch.int16) != wanted[i].view(torch.int16)).sum()
    torch.cuda.synchronize()
    assert wrong.tolist() == [0] * 6


@pytest.mark.exhaustive
def test_a_million_launches_over_changing_shapes_and_two_streams():
    inputs = [rows(n, cols, seed=n) for n, cols in ((8, 32000), (1, 131072), (16, 16384), (3, 100003))]
    wanted = [softmax(x) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    outs = [[softmax(x) for x in inputs] for _ in streams]
    torch.cuda.synchronize()
    which = cycle(range(len(inputs)))
    for launch in range(1_000_000):
        i = next(which)
        with torch.cuda.stream(streams[launch % 2]):
            softmax(inputs[i], out=outs[launch % 2][i])
        if launch % 50_000 < 8:
            torch.cuda.synchronize()
            assert all(alike(out, want) for each in outs for out, want in zip(each, wanted, strict=True))
            for each in outs:
                for out in each:
                    out.zero_()
            torch.cuda.synchronize()
            for each in outs:
                for out, x in zip(each, inputs, strict=True):
                    softmax(x, out=out)
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    assert all(alike(out, want) for each in outs for out, want in zip(each, wanted, strict=True))
